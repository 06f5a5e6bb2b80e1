use std::fmt;
use std::future::Future;
use std::time::Duration;

use super::checkpoint::Checkpoint;
use super::store::{IdempotencyStore, Operation};
use crate::deadline::Deadline;
use crate::error::StoreError;

/// What those who run services ask of a backend, and no request needs: how far an operation is, and to forget it.
pub trait IdempotencyRegistry: IdempotencyStore {
    /// How far an operation is. `None` if nothing is known of it.
    fn inspect(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<Option<OperationStatus>, StoreError>> + Send;

    /// Lets an operation be any request's to begin, in one step with looking whether it is still as `status` says: in the same state, by the same
    /// fence. False if it is not, and nothing is changed then. Asked again, the answer is the same until somebody begins.
    fn forget(&self, status: &OperationStatus) -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// An operation, as those see it who do not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationStatus {
    /// Which operation.
    pub operation: Operation,
    /// How far it is.
    pub state: OperationState,
    /// The fence of the last attempt. 0 if there was none.
    pub fence: u64,
    /// How many attempts there were, as far as is remembered.
    pub attempts: u32,
    /// What the attempts have put down last. Not known any more of an operation that is completed.
    pub checkpoint: Option<Checkpoint>,
    /// Until all of this is forgotten, unless somebody begins or goes on.
    pub kept_for: Duration,
}

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OperationState {
    /// The next request begins it.
    Free,
    /// Somebody is doing it.
    InFlight {
        /// Until the lease ends, unless it is renewed.
        remaining: Duration,
    },
    /// It was begun, and whoever did so was not heard of in time.
    Unknown {
        /// How long ago the lease has ended, by the clock of the store.
        since: Duration,
    },
    /// It is done.
    Completed {
        /// Whether all of the answer is kept.
        is_kept: bool,
    },
}

impl OperationState {
    /// Whether both are the same but for the time.
    pub(crate) fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Free, Self::Free)
            | (Self::InFlight { .. }, Self::InFlight { .. })
            | (Self::Unknown { .. }, Self::Unknown { .. }) => true,
            (Self::Completed { is_kept }, Self::Completed { is_kept: other }) => is_kept == other,
            _ => false,
        }
    }
}

/// Looks at operations, and lets them be begun anew: for those who run a service, and not for the service.
///
/// An operation of unknown outcome is refused for its retention ([`OnUnknown::Reject`](super::OnUnknown::Reject)), until somebody has found out
/// what became of it. The log names it, and so does [`IdempotencyHandle::operation`](super::IdempotencyHandle::operation).
///
/// ```
/// use tollgate::MemoryBackend;
/// use tollgate::idempotency::{IdempotencyAdmin, Operation, OperationState};
/// # use std::time::Duration;
/// # use tollgate::idempotency::{Claim, Digest, IdempotencyStore};
/// # use tollgate::lock::Token;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// # let backend = MemoryBackend::new();
/// # let operation = Operation::new(("alice", "POST", "/payments"), "8e03978e");
/// # let (lease, retention) = (Claim::MIN_LEASE, Duration::from_secs(60));
/// # let claim = Claim { token: Token::random()?, head: Digest::default(), lease, retention, takes_over: false };
/// # backend.begin(&operation, &claim).await?;
/// # tokio::time::sleep(lease * 2).await;
/// let admin = IdempotencyAdmin::new(backend);
/// // As the log has it: a handler was cancelled: its outcome is unknown when its lease has ended operation=alice,POST,/payments:8e03978e
/// let operation = Operation::parse("alice,POST,/payments:8e03978e").ok_or("not the name of an operation")?;
/// let status = admin.inspect(&operation).await?.ok_or("its time is over")?;
/// assert!(matches!(status.state, OperationState::Unknown { .. }));
///
/// // Somebody has made sure that nothing was charged: the client may try again.
/// assert!(admin.forget(&status).await?);
/// assert_eq!(admin.inspect(&operation).await?.map(|status| status.state), Some(OperationState::Free));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct IdempotencyAdmin<B> {
    store: B,
    deadline: Duration,
}

impl<B: IdempotencyRegistry + Sync> IdempotencyAdmin<B> {
    /// Looks at the operations that `store` keeps, which is a backend.
    pub fn new(store: B) -> Self {
        Self { store, deadline: Duration::from_secs(1) }
    }

    /// How long one call of the store may take. Defaults to 1 s.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How far an operation is. `None` if nothing is known of it: it was never begun, or its time is over.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        Deadline::new(self.store.inspect(operation), self.deadline).await
    }

    /// Forgets what became of an operation, with its answer and its checkpoint, if it is still as `status` says. The next request begins it, whatever it
    /// asks for, as the next attempt. False, with nothing changed, if somebody has begun, renewed, completed or given it back
    /// since: look at it again then.
    ///
    /// **A handler that is at work is not stopped by this**, be the operation in flight or of unknown outcome because its process was silent. It finds out
    /// when it renews its lease next or is done, its answer is not kept then, and what it does may be done twice. What keeps the two apart is the
    /// [fence](super::IdempotencyHandle::fence).
    ///
    /// # Errors
    ///
    /// If the store fails. Whether it was forgotten is not known then; asking again is harmless.
    pub async fn forget(&self, status: &OperationStatus) -> Result<bool, StoreError> {
        let is_forgotten = Deadline::new(self.store.forget(status), self.deadline).await?;
        if is_forgotten {
            let OperationStatus { operation, state, attempts, .. } = status;
            tracing::warn!(%operation, ?state, attempts, "operation forgotten");
        }
        Ok(is_forgotten)
    }
}

impl<B> fmt::Debug for IdempotencyAdmin<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyAdmin").finish_non_exhaustive()
    }
}
