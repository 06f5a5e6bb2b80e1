use std::error::Error;
use std::fmt;
use std::iter;
use std::time::Duration;

use crate::error::{BoxError, ConfigError, ContentionHint, StoreError, causes};
use crate::lock::PartialEffects;

/// Why a call of [`Idempotent::run`](super::Idempotent::run) returned no response.
#[derive(Debug)]
#[non_exhaustive]
pub enum OperationError {
    /// The work failed with this error. [`Idempotent::response_policy`](super::Idempotent::response_policy) and [`Failed`](struct@Failed)
    /// set what happens to the operation.
    Failed(BoxError),
    /// Other work used the same operation name: the fingerprint differs.
    Mismatch,
    /// The operation is in flight.
    InFlight {
        /// The time until the lease of the attempt in flight ends, unless the lease is renewed.
        remaining: Duration,
    },
    /// The operation was begun before, and its outcome is unknown.
    OutcomeUnknown {
        /// The number of attempts so far.
        attempt: u32,
    },
    /// The operation was completed before, and its response was not stored: it was too large, or the store had no room. This does
    /// not change before the [retention](super::Idempotent::retention) has passed, so retries are useless.
    ///
    /// A job of a delay queue that fails with this error is retried like after any other error, and becomes a dead job in the
    /// end. The crate cannot tell whether the job needs the response. If your job only needs to know that the operation was
    /// completed, treat this error as success:
    ///
    /// ```
    /// use tollgate::BoxError;
    /// use tollgate::delay_queue::Job;
    /// use tollgate::idempotency::{Operation, OperationError, Idempotent};
    ///
    /// async fn pay(payouts: &Idempotent, job: Job<String>) -> Result<(), BoxError> {
    ///     let work = async |_| Ok::<_, BoxError>(format!("paid {}", *job));
    ///     match payouts.run(Operation::new("payouts", job.id().as_str()), job.as_bytes(), work).await {
    ///         Ok(_) | Err(OperationError::NotStored) => Ok(()),
    ///         Err(error) => Err(error.into()),
    ///     }
    /// }
    /// ```
    NotStored,
    /// The work was dropped while it ran. It lost its lease, so another attempt may have started, or it took longer than
    /// [`max_runtime`](super::Idempotent::max_runtime). It may have had effects.
    Cancelled,
    /// A setting is invalid. The store was not called.
    Config(ConfigError),
    /// The store failed. The work was not started.
    Store(StoreError),
}

impl fmt::Display for OperationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failed(_) => "the operation failed",
            Self::Mismatch => "the name of the operation was used for other work",
            Self::InFlight { .. } => "the operation is in flight",
            Self::OutcomeUnknown { .. } => "the operation was begun before, and its outcome is unknown",
            Self::NotStored => "the operation was done before, and its response was not stored",
            Self::Cancelled => "the operation was cancelled while it ran and may have had effects",
            Self::Config(_) => "the settings of the operation are invalid",
            Self::Store(_) => "the idempotency store failed",
        })
    }
}

impl Error for OperationError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Failed(error) => Some(&**error),
            Self::Config(error) => Some(error),
            Self::Store(error) => Some(error),
            // `InFlight` contains no error that could be borrowed, only a duration.
            Self::InFlight { .. } => Some(ContentionHint::FOR_LONG),
            _ => None,
        }
    }
}

/// An error of the work that says whether the work may have had effects. It overrides
/// [`Idempotent::response_policy`](super::Idempotent::response_policy).
///
/// Return it as the error of the work, as a [source](Error::source) of that error at any depth, or behind a transparent wrapper as
/// in `anyhow` and `#[error(transparent)]`. If there are several, the outermost one counts.
///
/// The loss of a lock ([`LockError::Lost`](crate::LockError::Lost) or [`Lost`](crate::lock::Lost)) at any depth counts as
/// [`outcome_unknown`](Self::outcome_unknown), because the work under the lock may have been dropped while it ran.
///
/// A handler behind a layer declares this in its response instead: see `tollgate::responder::NotExecuted` and `OutcomeUnknown`.
///
/// ```
/// use std::io;
/// use tollgate::BoxError;
/// use tollgate::idempotency::{Failed, Operation, OperationError, Idempotent};
///
/// # async fn ask_the_bank(_: &str) -> io::Result<String> { Err(io::ErrorKind::TimedOut.into()) }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let payouts = Idempotent::new(tollgate::MemoryBackend::new(), "payouts");
/// let paid = payouts.run(Operation::new("alice", "payout-7"), "100 EUR", async |attempt| {
///     ask_the_bank(&attempt.derive("pay")).await.map_err(|error| match error.kind() {
///         // It may have been paid: no retry before an operator has checked.
///         io::ErrorKind::TimedOut => BoxError::from(Failed::outcome_unknown(error)),
///         _ => error.into(),
///     })
/// });
/// assert!(matches!(paid.await, Err(OperationError::Failed(_))));
/// # }
/// ```
#[derive(Debug)]
pub struct Failed {
    inner: FailureSource,
}

/// The content of a [`Failed`](struct@Failed), as its source. A wrapper that passes on only the source of its error hides the
/// `Failed`, but not this `FailureSource`.
#[derive(Debug)]
struct FailureSource {
    is_unknown: bool,
    source: BoxError,
}

impl Failed {
    /// The work had no effects. The operation is released, and the next call executes it again.
    pub fn nothing_done(error: impl Into<BoxError>) -> Self {
        Self { inner: FailureSource { is_unknown: false, source: error.into() } }
    }

    /// The work may have had effects, for instance if a request to another service timed out. The outcome is unknown when the
    /// lease has ended. The log has a line with `error` as its `cause`.
    pub fn outcome_unknown(error: impl Into<BoxError>) -> Self {
        Self { inner: FailureSource { is_unknown: true, source: error.into() } }
    }

    /// Whether this error makes the outcome unknown; `None` if the error does not say.
    pub(super) fn is_unknown(error: &(dyn Error + 'static)) -> Option<bool> {
        causes(error).find_map(|cause| {
            let failed = cause.downcast_ref::<Self>().map(|failed| &failed.inner);
            let is_unknown = failed.or_else(|| cause.downcast_ref()).map(|source| source.is_unknown);
            is_unknown.or_else(|| cause.is::<PartialEffects>().then_some(true))
        })
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.inner.is_unknown {
            "the outcome of the operation is unknown"
        } else {
            "the operation had no effects"
        })
    }
}

impl Error for Failed {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.inner)
    }
}

impl fmt::Display for FailureSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the work has failed")
    }
}

// Callers find the original error by its type, as the next source.
impl Error for FailureSource {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

/// The sources of an error, for the log, where the error itself is another field.
pub(super) fn cause_of(error: &(dyn Error + 'static)) -> Option<String> {
    let sources = iter::successors(error.source(), |&error| error.source());
    // The text of these types adds nothing for a reader of the log.
    let sources = sources.filter(|cause| !(cause.is::<FailureSource>() || cause.is::<ContentionHint>()));
    sources.map(ToString::to_string).reduce(|causes, cause| format!("{causes}: {cause}"))
}

const _: () = {
    const fn fits<T: Into<BoxError>>() {}
    fits::<OperationError>();
    fits::<Failed>();
};
