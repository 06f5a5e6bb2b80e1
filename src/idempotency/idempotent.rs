use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout_at};

use super::attempt::{Attempt, ClaimResult, Granted};
use super::context::{OperationContext, Settlement};
use super::coordinator::Coordinator;
use super::handle::IdempotencyHandle;
use super::has_body_fingerprint::HasBodyFingerprint;
use super::metrics::Verdict;
use super::operation_error::{Failed, OperationError, cause_of};
use super::policy::{OnUnknown, ResponsePolicy};
use super::store::{Begun, BodyFingerprint, Claim, Completion, Digest, IdempotencyStore, Operation};
use super::stored_response::{MARK, read, written};
use crate::error::{BoxError, ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;
use crate::store::token::Token;

/// Executes operations that are not HTTP requests, each of them once: messages of a broker, jobs, commands.
///
/// An [`Operation`] identifies the work. A fingerprint of its input detects other work under the same `Operation`. The response is
/// bytes, which are stored and returned for each repeat.
///
/// ```
/// use tollgate::idempotency::{Operation, OperationError, Idempotent};
/// use tollgate::{BoxError, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
/// let payouts = Idempotent::new(MemoryBackend::new(), "payouts");
/// let pay = |amount: &'static str| {
///     payouts.run(Operation::new("alice", "payout-7"), amount, async move |attempt| {
///         // The same in each attempt, so the bank recognizes a retry.
///         Ok::<_, BoxError>(format!("paid {amount} as {}", attempt.derive("pay")))
///     })
/// };
/// let first = pay("100 EUR").await?;
/// let again = pay("100 EUR").await?;
/// assert!(!first.is_replay() && again.is_replay());
/// assert_eq!(first.response(), again.response());
/// assert!(matches!(pay("200 EUR").await, Err(OperationError::Mismatch)));
/// # Ok(())
/// # }
/// ```
///
/// All options:
///
/// ```
/// use std::time::Duration;
/// use tollgate::MemoryBackend;
/// use tollgate::idempotency::{CircuitBreaker, ResponsePolicy, OnUnknown, Idempotent};
/// use tollgate::Reach;
///
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// let payouts = Idempotent::new(MemoryBackend::new(), "payouts")
///     .require(Reach::Process)? // Reach::Redis would refuse the memory backend
///     .lease(Duration::from_secs(30))
///     .retention(Duration::from_secs(3 * 86_400))
///     .wait(Duration::from_secs(2))
///     .max_waiters_in_total(100)
///     .max_runtime(Duration::from_secs(3_600))
///     .max_response(16 * 1_024)
///     .response_policy(ResponsePolicy::All)
///     .on_unknown(OnUnknown::Retry)
///     .deadline(Duration::from_millis(200))
///     .circuit_breaker(CircuitBreaker::new().failures(10));
/// # drop(payouts);
/// # Ok(())
/// # }
/// ```
///
/// Cheap to clone. Its guarantees, its [metrics](super#metrics) and the role of [`IdempotencyAdmin`](super::IdempotencyAdmin)
/// for unknown outcomes are those of the idempotency layer.
///
/// The name precedes the scope of an operation in the store and in the log: `Operation::new("alice", "payout-7")` is
/// `Operation::new(("payouts", "alice"), "payout-7")` for [`IdempotencyAdmin`](super::IdempotencyAdmin). So operations of other names
/// never collide. A request of a layer collides with an operation only if the scope of the operation ends with a method and a path.
#[derive(Clone)]
pub struct Idempotent {
    coordinator: Arc<Coordinator>,
    name: Key,
    lease: Duration,
    retention: Duration,
    wait: Duration,
    max_waiting: usize,
    max_runtime: Option<Duration>,
    max_response: usize,
    policy: ResponsePolicy,
    on_unknown: OnUnknown,
}

/// Practically unlimited.
const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

impl Idempotent {
    /// Executes operations whose records are in `store`, which is a backend. `name` identifies the operations in the store and in the log,
    /// and is the label `layer` in metrics.
    ///
    /// Use a short name of letters, digits, `-`, `_` and `.`. Other bytes are percent-encoded, and a name of more than
    /// [`Key::MAX_LEN`] bytes is replaced by its digest, since names are part of stored keys. Two `Idempotent` with the same name and the
    /// same backend share their operations.
    pub fn new(store: impl IdempotencyStore + Send + Sync + 'static, name: impl AsRef<str>) -> Self {
        let name = Key::new(name.as_ref());
        Self {
            coordinator: Coordinator::new(store).with(|options| options.name = name.as_str().into()),
            name,
            lease: Duration::from_secs(15),
            retention: Duration::from_secs(86_400),
            wait: Duration::ZERO,
            max_waiting: 1_000,
            max_runtime: None,
            max_response: 64 * 1_024,
            policy: ResponsePolicy::default(),
            on_unknown: OnUnknown::default(),
        }
    }

    /// The name of these operations.
    #[must_use]
    pub const fn name(&self) -> &Key {
        &self.name
    }

    /// The length of the lease. If a process does not renew it in time, the outcome of its work is unknown. Defaults to 15 s, renewed
    /// after a third of that. Clamped to [`Claim::MIN_LEASE`] and [`Claim::MAX_LEASE`].
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Claim::MIN_LEASE, Claim::MAX_LEASE);
        self
    }

    /// How long a response is stored. Defaults to a day. Clamped to [`Claim::MIN_RETENTION`] and [`Claim::MAX_RETENTION`].
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention.clamp(Claim::MIN_RETENTION, Claim::MAX_RETENTION);
        self
    }

    /// How long a call waits for the same operation in flight. Defaults to zero: [`OperationError::InFlight`] at once. At most a
    /// day.
    ///
    /// Set this if a broker may deliver a message again while the first delivery is being processed. The waiting call asks the store after
    /// each notification, once a second, and when the other lease ends. If the operation was released, the call executes the operation.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait.min(Duration::from_secs(86_400));
        self
    }

    /// How many calls may [wait](Self::wait) at a time, over all clones. Defaults to 1,000. A further call does not wait.
    #[must_use]
    pub const fn max_waiters_in_total(mut self, calls: usize) -> Self {
        self.max_waiting = calls;
        self
    }

    /// How long the work may take. It is dropped then ([`OperationError::Cancelled`]), and its outcome is unknown. Defaults to
    /// no limit: hanging work stays in flight for as long as its process lives. Zero is an [`OperationError::Config`].
    #[must_use]
    pub const fn max_runtime(mut self, max_runtime: Duration) -> Self {
        self.max_runtime = Some(max_runtime);
        self
    }

    /// Maximum size of a stored response in bytes; for a larger one only its completion is stored. Defaults to 64 KiB.
    #[must_use]
    pub const fn max_response(mut self, bytes: usize) -> Self {
        self.max_response = bytes;
        self
    }

    /// What happens to an operation whose work fails with an error, or panics. Defaults to [`ResponsePolicy::SafeRetry`].
    ///
    /// With [`SafeRetry`](ResponsePolicy::SafeRetry) and [`Success`](ResponsePolicy::Success) it is released, and the next call executes it
    /// again. Effects before the failure are repeated then, also if the error is the timeout of another service. With
    /// [`All`](ResponsePolicy::All) its outcome is unknown when its lease ends. So nothing is repeated, and each failure waits for an
    /// [operator](super::IdempotencyAdmin), unless [`OnUnknown::Retry`] lets the next call execute it. A [`Failed`] error or
    /// the error of a lost lock overrides this policy. A panic cannot.
    #[must_use]
    pub const fn response_policy(mut self, policy: ResponsePolicy) -> Self {
        self.policy = policy;
        self
    }

    /// What to do with an operation whose outcome is unknown. Defaults to [`OnUnknown::Reject`].
    #[must_use]
    pub const fn on_unknown(mut self, then: OnUnknown) -> Self {
        self.on_unknown = then;
        self
    }

    /// The longest duration of a store call. Defaults to 100 ms. Zero is an [`OperationError::Config`].
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.coordinator = self.coordinator.with(|options| options.deadline = deadline);
        self
    }

    /// When to stop calling a failing store for new operations. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.coordinator = self.coordinator.with(|options| options.breaker = breaker);
        self
    }

    /// Checks that the reach of the backend is at least `needed`. For instance, [`Reach::Redis`] refuses the memory backend.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the reach of the backend is smaller than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.coordinator.reach().require(needed)?;
        Ok(self)
    }

    /// Executes an operation, or returns the response of its earlier execution. The lease is renewed while `work` runs. Errors
    /// are not stored: the operation is released, and the next call executes it again. The same goes for a panic.
    /// [`response_policy`](Self::response_policy) or the [error](Failed) can declare the outcome unknown instead.
    ///
    /// If the response cannot be stored, the caller gets it anyway. Storing is retried in the background for the length of a
    /// lease; after that the outcome is unknown.
    ///
    /// # Errors
    ///
    /// [`OperationError`].
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `work`, and the outcome is unknown when its lease ends. Spawn a task for work that must finish.
    pub async fn run<F, W, T, E>(
        &self,
        operation: Operation,
        fingerprint: impl AsRef<[u8]>,
        work: F,
    ) -> Result<Done, OperationError>
    where
        F: FnOnce(IdempotencyHandle) -> W,
        W: Future<Output = Result<T, E>>,
        T: Into<Vec<u8>>,
        E: Into<BoxError>,
    {
        self.coordinator.check_times(self.max_runtime).map_err(OperationError::Config)?;
        let operation = Operation::new((self.name, *operation.scope()), *operation.key());
        let fingerprint_digest = digest(&operation, fingerprint.as_ref());
        drop(fingerprint);
        let granted = match self.begin(operation, fingerprint_digest).await {
            Ok(ClaimResult::Granted(granted)) => granted,
            Ok(ClaimResult::NotGranted(begun)) => return self.not_executed(begun),
            Err(error) => {
                self.coordinator.metrics().decided(Verdict::FailedClosed);
                return Err(OperationError::Store(error));
            }
        };
        let Granted { attempt, fence, number, checkpoint, .. } = granted;
        let attempt = if self.policy.releases_failures() { attempt.release_on_panic() } else { attempt };
        let handle = IdempotencyHandle::new(Arc::clone(attempt.context()) as _, number, fence, checkpoint);
        self.coordinator.metrics().decided(Verdict::Executed);
        let start = attempt.sent();
        let until = self.max_runtime.map(|max_runtime| start + max_runtime.min(FOREVER));
        let result = run_under_lease(&attempt, until, || work(handle)).await;
        self.coordinator.metrics().handled(start);
        let Some(result) = result else {
            let context = attempt.context();
            let (layer, operation) = (context.layer(), context.operation());
            tracing::warn!(layer, %operation, "an operation was cancelled: its outcome is unknown when its lease has ended");
            attempt.mark_reported();
            self.coordinator.metrics().decided(Verdict::Cancelled);
            return Err(OperationError::Cancelled);
        };
        let (settlement, done) = match result {
            Ok(response) => {
                let stored = written(&response.into());
                (self.completed(&stored), Ok(Done { stored, is_replay: false }))
            }
            Err(error) => {
                let error = error.into();
                if Failed::is_unknown(&*error).unwrap_or(!self.policy.releases_failures()) {
                    let context = attempt.context();
                    let (layer, operation) = (context.layer(), context.operation());
                    let cause = cause_of(&*error).map(tracing::field::display);
                    tracing::warn!(layer, %operation, %error, cause, "an operation has failed: its outcome is unknown when its lease has ended");
                    attempt.mark_reported();
                    return Err(OperationError::Failed(error));
                }
                (Settlement::Release, Err(OperationError::Failed(error)))
            }
        };
        if let Some(settling) = attempt.settle(settlement) {
            settling.await;
        }
        done
    }

    /// Waits for background calls to the store: use it at the end of a program.
    pub async fn wait_idle(&self) {
        self.coordinator.wait_idle().await;
    }

    async fn begin(&self, operation: Operation, fingerprint_digest: Digest) -> Result<ClaimResult<NoBody>, StoreError> {
        let Self { lease, retention, .. } = *self;
        let takes_over = self.on_unknown == OnUnknown::Retry;
        let claim = Claim { takes_over, ..Claim::new(Token::random()?, fingerprint_digest, lease, retention) };
        let context = OperationContext::new(&self.coordinator, operation, claim, NoBody);
        context.begin_or_wait(Attempt::try_begin(&context), self.wait, self.max_waiting).await
    }

    /// The result of a call that is not executed.
    fn not_executed(&self, begun: Begun) -> Result<Done, OperationError> {
        let (verdict, result) = match begun {
            Begun::Completed { response: stored, is_kept: true, .. } => match read(&stored) {
                Some(_) => (Verdict::Replayed, Ok(Done { stored, is_replay: true })),
                None => {
                    let error =
                        StoreError::foreign_data("a stored response of a request, not the result of an operation");
                    (Verdict::FailedClosed, Err(OperationError::Store(error)))
                }
            },
            Begun::Completed { .. } => (Verdict::NotStored, Err(OperationError::NotStored)),
            Begun::InFlight { remaining, .. } => (Verdict::InFlight, Err(OperationError::InFlight { remaining })),
            Begun::Unknown { attempt, .. } => {
                (Verdict::OutcomeUnknown, Err(OperationError::OutcomeUnknown { attempt }))
            }
            // `Granted` and `ScopeFull` do not occur here: the caller handles `Granted`, and a claim without a bound finds no full scope.
            Begun::Mismatch | Begun::Granted { .. } | Begun::ScopeFull { .. } => {
                (Verdict::Mismatch, Err(OperationError::Mismatch))
            }
        };
        self.coordinator.metrics().decided(verdict);
        result
    }

    fn completed(&self, stored: &Arc<[u8]>) -> Settlement {
        let is_kept = read(stored).is_some_and(|answer| answer.len() <= self.max_response);
        let response = if is_kept { Arc::clone(stored) } else { Arc::from(MARK.as_slice()) };
        let (body_fingerprint, retention) = (BodyFingerprint::default(), self.retention);
        Settlement::Complete { completion: Completion { response, is_kept, body_fingerprint, retention }, mark: MARK }
    }
}

impl fmt::Debug for Idempotent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotent").field("name", &self.name).finish_non_exhaustive()
    }
}

/// `Idempotent` has no request body. The fingerprint of the input is known before the work starts.
struct NoBody;

impl HasBodyFingerprint for NoBody {
    fn body_fingerprint(&self) -> BodyFingerprint {
        BodyFingerprint::default()
    }

    fn is_confirmed(&self) -> bool {
        true
    }

    fn restarted(&self) -> Self {
        Self
    }
}

/// Runs `work`. Returns `None` if `until` has passed or another attempt may have started, so that `work` must stop.
async fn run_under_lease<W: Future>(
    attempt: &Attempt<NoBody>,
    until: Option<Instant>,
    work: impl FnOnce() -> W,
) -> Option<W::Output> {
    if attempt.is_lost() {
        return None;
    }
    let mut stop = pin!(async {
        match until {
            Some(until) => drop(timeout_at(until, attempt.renew_until_lost()).await),
            None => attempt.renew_until_lost().await,
        }
    });
    let mut work = pin!(attempt.run_work(work));
    let result = poll_fn(|cx| {
        // After a stall, check this before the work runs.
        if attempt.is_lost() || stop.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        attempt.run_work(|| work.as_mut().poll(cx)).map(Some)
    });
    result.await
}

/// The digest of an operation and of the fingerprint of its input.
fn digest(operation: &Operation, fingerprint: &[u8]) -> Digest {
    let mut hash = Sha256::new();
    // Hash the length of each part, so that different parts never yield the same bytes.
    for part in [operation.scope().as_bytes(), operation.key().as_bytes(), fingerprint] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut digest = Digest::default();
    digest.0.copy_from_slice(&hash.finalize()[..16]);
    digest
}

/// The result of [`Idempotent::run`]. This call or an earlier one completed the operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    // The stored form.
    stored: Arc<[u8]>,
    is_replay: bool,
}

impl Done {
    /// The response.
    #[must_use]
    pub fn response(&self) -> &[u8] {
        read(&self.stored).unwrap_or_default()
    }

    /// Whether an earlier call completed the operation.
    #[must_use]
    pub const fn is_replay(&self) -> bool {
        self.is_replay
    }
}
