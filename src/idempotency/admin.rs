use std::fmt;
use std::future::Future;
use std::time::Duration;

use super::answer::Answer;
use super::checkpoint::Checkpoint;
use super::store::{Claim, IdempotencyStore, Operation};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::Cursor;
use crate::store::deadline::{Deadline, require_nonzero_deadline};

/// What those who run services ask of a backend, and no request needs: how far operations are, to forget one, and to complete one by hand.
pub trait IdempotencyRegistry: IdempotencyStore {
    /// How far an operation is. `None` if nothing is known of it.
    fn inspect(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<Option<OperationStatus>, StoreError>> + Send;

    /// Lets an operation be any request's to begin, in one step with looking whether it is still as `status` says: in the same state, by the same
    /// fence. False if it is not, and nothing is changed then. Asked again, the answer is the same until somebody begins.
    fn forget(&self, status: &OperationStatus) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Completes an operation with an answer that is kept for `retention`, in one step with looking whether its outcome is still as unknown as
    /// `status` says: by the same fence. What is known of the request stays. What was completed by this before is completed anew, if it is still
    /// [completed](OperationState::Completed) as `status` says. False if it is neither, or was neither according to `status`, and nothing is
    /// changed then. Asked again with the same answer, the answer is the same. Whoever has begun the operation can change nothing any more.
    fn complete_unknown(
        &self,
        status: &OperationStatus,
        answer: &Answer,
        retention: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The operations of a scope, or of all of them. Looks at about `most` of what it keeps and answers with those of them that something is known of,
    /// if any, and where to go on.
    fn list(
        &self,
        scope: Option<&Key>,
        from: Cursor,
        most: usize,
    ) -> impl Future<Output = Result<OperationPage, StoreError>> + Send;
}

/// An operation, as those see it who do not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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

impl OperationStatus {
    /// For a store of your own: an operation that was never begun, without a checkpoint, and kept for no time, until the fields say otherwise.
    #[must_use]
    pub const fn new(operation: Operation, state: OperationState) -> Self {
        Self { operation, state, fence: 0, attempts: 0, checkpoint: None, kept_for: Duration::ZERO }
    }
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

/// A part of a [list](IdempotencyAdmin::list).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationPage {
    /// Operations. There may be none, and more on the next page.
    pub operations: Vec<OperationStatus>,
    /// Where to go on, unless this is the end.
    pub next: Option<Cursor>,
}

impl OperationPage {
    /// For a store of your own.
    #[must_use]
    pub const fn new(operations: Vec<OperationStatus>, next: Option<Cursor>) -> Self {
        Self { operations, next }
    }
}

/// Looks at operations, completes them by hand, and lets them be begun anew: for those who run a service, and not for the service.
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
/// # let claim = Claim::new(Token::random()?, Digest::default(), lease, retention);
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
///
/// Or somebody has found out that it was done. Those of unknown outcome are found page by page: there may be one without any, and more behind it.
///
/// ```
/// # #[cfg(feature = "http")] {
/// use tollgate::MemoryBackend;
/// use tollgate::idempotency::IdempotencyAdmin;
/// # use std::time::Duration;
/// # use tollgate::idempotency::{Claim, Digest, IdempotencyStore, Operation};
/// # use tollgate::lock::Token;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// # let backend = MemoryBackend::new();
/// # let operation = Operation::new(("alice", "POST", "/payments"), "8e03978e");
/// # let (lease, retention) = (Claim::MIN_LEASE, Duration::from_secs(60));
/// # let claim = Claim::new(Token::random()?, Digest::default(), lease, retention);
/// # backend.begin(&operation, &claim).await?;
/// # tokio::time::sleep(lease * 2).await;
/// let admin = IdempotencyAdmin::new(backend);
/// let (mut unknown, mut next) = (Vec::new(), Some(Default::default()));
/// while let Some(from) = next {
///     let page = admin.unknown(from, 100).await?;
///     unknown.extend(page.operations);
///     next = page.next;
/// }
/// // It was charged: the client is to get this answer when it tries again.
/// let charged = http::Response::builder().status(201).header("location", "/payments/7").body("charged")?;
/// assert!(admin.complete(&unknown[0], charged).await?);
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
///
/// On Redis a user needs `+scan` for [`list`](Self::list) and [`unknown`](Self::unknown), and nothing more than for idempotency otherwise.
#[derive(Clone)]
pub struct IdempotencyAdmin<B> {
    store: B,
    scope: Option<Key>,
    deadline: Duration,
    retention: Duration,
}

impl<B: IdempotencyRegistry + Sync> IdempotencyAdmin<B> {
    /// Looks at the operations that `store` keeps, which is a backend.
    pub fn new(store: B) -> Self {
        Self { store, scope: None, deadline: Duration::from_secs(1), retention: Duration::from_secs(86_400) }
    }

    /// Whose operations are [listed](Self::list). That of a layer is what its scope makes of a request, then the method and the path: where it is a
    /// header, `(Key::digest(value), "POST", "/payments")`. That of [`Idempotent`](super::Idempotent) has their name in front: `("payouts", "alice")`.
    /// Defaults to all.
    #[must_use]
    pub fn scope(mut self, scope: impl Into<Key>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// How long one call of the store may take. Defaults to 1 s. Zero leaves no time for an answer, so that each call is an error.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long an answer is kept that is given [by hand](Self::complete): from [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`]. Defaults to a day, as that of a layer.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention.clamp(Claim::MIN_RETENTION, Claim::MAX_RETENTION);
        self
    }

    /// How far an operation is. `None` if nothing is known of it: it was never begun, or its time is over.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        self.within_deadline(self.store.inspect(operation)).await
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
        let is_forgotten = self.within_deadline(self.store.forget(status)).await?;
        if is_forgotten {
            let OperationStatus { operation, state, attempts, .. } = status;
            tracing::warn!(%operation, ?state, attempts, "operation forgotten");
        }
        Ok(is_forgotten)
    }

    /// Completes an operation whose outcome was unknown, if it still is as `status` says: the next request gets `answer`, as long as it is the same one, as
    /// far as is known of the one that has begun the operation. False, with nothing changed, if somebody has begun, renewed, completed or given it back
    /// since, or if `status` says anything but [unknown](OperationState::Unknown).
    ///
    /// What was completed by this before, and [inspected](Self::inspect) since, can be completed with another answer. Those who have got the one before
    /// are not told. What its handler has answered is not replaced.
    ///
    /// Whether the operation is of a layer or of [`Idempotent`](super::Idempotent) is not in its record: what is made for the one is an error of the store to
    /// who asks for the other again, until it is completed with an [`Answer`] that fits.
    ///
    /// A handler that is heard of again is told that the operation is not its own any more. Its answer goes to its own caller, and is not kept.
    ///
    /// # Errors
    ///
    /// If the store fails. Whether it was completed is not known then; asking again is harmless.
    pub async fn complete(&self, status: &OperationStatus, answer: impl Into<Answer>) -> Result<bool, StoreError> {
        let answer = answer.into();
        let call = self.store.complete_unknown(status, &answer, self.retention);
        let is_completed = self.within_deadline(call).await?;
        if is_completed {
            let OperationStatus { operation, attempts, .. } = status;
            tracing::warn!(%operation, attempts, is_kept = answer.is_kept(), "operation completed by hand");
        }
        Ok(is_completed)
    }

    /// The operations of the [scope](Self::scope), in whatever state they are, a page at a time: begin with [`Cursor::default`] and go on with
    /// [`OperationPage::next`] until there is none. A page comes from looking at about `most` of what the backend keeps, 1 to 1,000.
    ///
    /// What others wrote in the place of a record is left out, and is an error when that operation is [inspected](Self::inspect). One that is there all the
    /// while is on one page at least, unless a cluster moves its slot or a replica takes over meanwhile; it may be on two. Takes a look at
    /// everything that the backend keeps in the end: not for requests.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn list(&self, from: Cursor, most: usize) -> Result<OperationPage, StoreError> {
        let call = self.store.list(self.scope.as_ref(), from, most.clamp(1, 1_000));
        self.within_deadline(call).await
    }

    /// Those of them whose outcome is unknown: a [list](Self::list) without the others.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn unknown(&self, from: Cursor, most: usize) -> Result<OperationPage, StoreError> {
        let mut page = self.list(from, most).await?;
        page.operations.retain(|status| matches!(status.state, OperationState::Unknown { .. }));
        Ok(page)
    }

    async fn within_deadline<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        // Also where the answer need not be waited for, so that a test on memory finds it.
        require_nonzero_deadline(self.deadline)?;
        Deadline::new(call, self.deadline).await
    }
}

impl<B> fmt::Debug for IdempotencyAdmin<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyAdmin").finish_non_exhaustive()
    }
}
