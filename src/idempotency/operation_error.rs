use std::error::Error;
use std::fmt;
use std::iter;
use std::time::Duration;

use crate::error::{BoxError, ConfigError, ContentionHint, StoreError, causes};
use crate::lock::PartialEffects;

/// Why an operation has no answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum OperationError {
    /// The work has failed, with this error. What becomes of the operation is up to [`Idempotent::keep`](super::Idempotent::keep) and [`Failed`](struct@Failed).
    Failed(BoxError),
    /// Something else was asked for under the same name.
    Mismatch,
    /// Somebody is doing it.
    InFlight {
        /// For how long at the most, unless the lease is renewed.
        remaining: Duration,
    },
    /// It was begun before, and what came of it is not known.
    OutcomeUnknown {
        /// How many attempts there were.
        attempt: u32,
    },
    /// It was done before, and its answer was too large to be kept, or there was no room for it. That does not change before the time for which answers
    /// are [kept](super::Idempotent::retention) is over, so there is no use in asking again.
    ///
    /// A job of a delay queue is tried again with it as with any error, and ends among the dead: there may be more to it than the operation, which cannot
    /// go on without the answer. A job that needs to know no more than that it was done says so:
    ///
    /// ```
    /// use tollgate::BoxError;
    /// use tollgate::delay_queue::Job;
    /// use tollgate::idempotency::{Operation, OperationError, Idempotent};
    ///
    /// async fn pay(payouts: &Idempotent, job: Job<String>) -> Result<(), BoxError> {
    ///     let work = async |_| Ok::<_, BoxError>(format!("paid {}", *job));
    ///     match payouts.run(Operation::new("payouts", job.id().as_str()), job.as_bytes(), work).await {
    ///         Ok(_) | Err(OperationError::NotKept) => Ok(()),
    ///         Err(error) => Err(error.into()),
    ///     }
    /// }
    /// ```
    NotKept,
    /// The work was dropped half way, since its lease was lost and somebody else may have begun, or since it took
    /// [longer than it may](super::Idempotent::max_runtime). It may have had effects.
    Cancelled,
    /// A setting cannot work; nothing was asked of the store.
    Config(ConfigError),
    /// The store has failed. Nothing was begun.
    Store(StoreError),
}

impl fmt::Display for OperationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failed(_) => "the operation has failed",
            Self::Mismatch => "the name of the operation was used for something else",
            Self::InFlight { .. } => "the operation is being done",
            Self::OutcomeUnknown { .. } => "the operation was begun before, and what came of it is not known",
            Self::NotKept => "the operation was done before, and its answer was not kept",
            Self::Cancelled => "the operation was cancelled on the way and may have had effects",
            Self::Config(_) => "operations are set up wrongly",
            Self::Store(_) => "the store of idempotency failed",
        })
    }
}

impl Error for OperationError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Failed(error) => Some(&**error),
            Self::Config(error) => Some(error),
            Self::Store(error) => Some(error),
            // For how long is no error that could be borrowed.
            Self::InFlight { .. } => Some(ContentionHint::FOR_LONG),
            _ => None,
        }
    }
}

/// Says of an operation that has failed whether something may have come of it, whatever [`Idempotent::keep`](super::Idempotent::keep) says of
/// others.
///
/// What is done by [`Idempotent`](super::Idempotent) fails with it, or with an error that has it as its [source](Error::source), however deep, or that
/// shows it as its own, as `anyhow` and `#[error(transparent)]` do. The outermost one counts.
/// The loss of a lock, [`LockError::Lost`](crate::LockError::Lost) or [`Lost`](crate::lock::Lost), counts as [`outcome_unknown`](Self::outcome_unknown)
/// wherever it is found: what ran under the lock may have been dropped half way.
/// The handler of a request says so in its response: see `tollgate::responder::NotExecuted` and `OutcomeUnknown`.
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
///         // It may have been paid: nobody tries again until somebody has had a look.
///         io::ErrorKind::TimedOut => BoxError::from(Failed::outcome_unknown(error)),
///         _ => error.into(),
///     })
/// });
/// assert!(matches!(paid.await, Err(OperationError::Failed(_))));
/// # }
/// ```
#[derive(Debug)]
pub struct Failed {
    said: Said,
}

/// What a [`Failed`](struct@Failed) says, as an error of its own beneath it: whoever wraps that one and passes on its source hides it, but not this.
#[derive(Debug)]
struct Said {
    is_unknown: bool,
    source: BoxError,
}

impl Failed {
    /// Nothing has come of it: the operation is given back, and the next call begins it again.
    pub fn nothing_done(error: impl Into<BoxError>) -> Self {
        Self { said: Said { is_unknown: false, source: error.into() } }
    }

    /// It may have been done, as where the answer of somebody else did not come in time. The outcome is unknown when the lease has ended. The log
    /// says so, with `error` as the `cause`.
    pub fn outcome_unknown(error: impl Into<BoxError>) -> Self {
        Self { said: Said { is_unknown: true, source: error.into() } }
    }

    /// Whether the outcome of what has failed with this error is unknown; `None` if the error does not say.
    pub(super) fn is_unknown(error: &(dyn Error + 'static)) -> Option<bool> {
        causes(error).find_map(|cause| {
            let failed = cause.downcast_ref::<Self>().map(|failed| &failed.said);
            let said = failed.or_else(|| cause.downcast_ref()).map(|said| said.is_unknown);
            said.or_else(|| cause.is::<PartialEffects>().then_some(true))
        })
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.said.is_unknown { "what came of the operation is not known" } else { "nothing was done" })
    }
}

impl Error for Failed {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.said)
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the work has failed")
    }
}

// The cause itself comes after this, to be found by its type.
impl Error for Said {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

/// What an error was made of, for the log, which has the error itself beside it.
pub(super) fn cause_of(error: &(dyn Error + 'static)) -> Option<String> {
    let sources = iter::successors(error.source(), |&error| error.source());
    // What these say the error above them has said already.
    let sources = sources.filter(|cause| !(cause.is::<Said>() || cause.is::<ContentionHint>()));
    sources.map(ToString::to_string).reduce(|causes, cause| format!("{causes}: {cause}"))
}

const _: () = {
    const fn fits<T: Into<BoxError>>() {}
    fits::<OperationError>();
    fits::<Failed>();
};
