use std::fmt;
use std::time::Duration;

use super::operation::Operation;
use super::status::{OperationPage, OperationState, OperationStatus};
use super::store::{Claim, IdempotencyRegistry};
use super::stored_response::StoredResponse;
use crate::error::StoreError;
use crate::key::Key;
use crate::store::cursor::Cursor;
use crate::store::deadline::call_within;

/// Inspects, completes and forgets operations. For operators and their tools.
///
/// By default, requests for an operation with unknown outcome are rejected ([`OnUnknown::Reject`](super::OnUnknown::Reject)), until its
/// retention ends or an operator determines the outcome. The log names the operation, and so does
/// [`IdempotencyHandle::operation`](super::IdempotencyHandle::operation).
///
/// ```
/// use tollgate::MemoryBackend;
/// use tollgate::idempotency::{IdempotencyAdmin, Operation, OperationState};
/// # use std::time::Duration;
/// # use tollgate::idempotency::store::{Claim, Digest, IdempotencyStore};
/// # use tollgate::lock::store::Token;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// # let backend = MemoryBackend::new();
/// # let operation = Operation::new(("alice", "POST", "/payments"), "8e03978e");
/// # let (lease, retention) = (Claim::MIN_LEASE, Duration::from_secs(60));
/// # let claim = Claim::new(Token::random()?, Digest::default(), lease, retention);
/// # backend.begin(&operation, &claim).await?;
/// # tokio::time::sleep(lease * 2).await;
/// let admin = IdempotencyAdmin::new(backend);
/// // From the log: "a handler was cancelled: its outcome is unknown when its lease has ended operation=alice,POST,/payments:8e03978e"
/// let operation = Operation::parse("alice,POST,/payments:8e03978e").ok_or("not the name of an operation")?;
/// let status = admin.inspect(&operation).await?.ok_or("its time is over")?;
/// assert!(matches!(status.state, OperationState::Unknown { .. }));
///
/// // The operator made sure that nothing was charged, so the client may try again.
/// assert!(admin.forget(&status).await?);
/// assert_eq!(admin.inspect(&operation).await?.map(|status| status.state), Some(OperationState::Free));
/// # Ok(())
/// # }
/// ```
///
/// If the operation was executed, complete it. To find operations with unknown outcome, read all pages: a page may be empty
/// although more pages follow.
///
/// ```
/// # #[cfg(feature = "http")] {
/// use tollgate::MemoryBackend;
/// use tollgate::idempotency::IdempotencyAdmin;
/// # use std::time::Duration;
/// # use tollgate::idempotency::store::{Claim, Digest, IdempotencyStore};
/// # use tollgate::idempotency::Operation;
/// # use tollgate::lock::store::Token;
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
/// // The payment was charged, so a retry must get this response.
/// let charged = http::Response::builder().status(201).header("location", "/payments/7").body("charged")?;
/// assert!(admin.complete(&unknown[0], charged).await?);
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
///
/// A Redis user needs `+scan` for [`list`](Self::list) and [`unknown`](Self::unknown), and otherwise the same permissions as
/// idempotency.
#[derive(Clone)]
pub struct IdempotencyAdmin<B> {
    store: B,
    scope: Option<Key>,
    deadline: Duration,
    retention: Duration,
}

impl<B: IdempotencyRegistry + Sync> IdempotencyAdmin<B> {
    /// Manages the operations in `store`, which is a backend.
    pub fn new(store: B) -> Self {
        Self { store, scope: None, deadline: Duration::from_secs(1), retention: Duration::from_secs(86_400) }
    }

    /// The scope whose operations are [listed](Self::list). Defaults to all scopes.
    ///
    /// * A layer appends the method and the path to its own scope. With the scope `header(..)`, use
    ///   `(Key::digest(value), "POST", "/payments")`.
    /// * [`Idempotent`](super::Idempotent) puts its name in front: `("payouts", "alice")`.
    #[must_use]
    pub fn scope(mut self, scope: impl Into<Key>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// The longest duration of a store call. Defaults to 1 s. With zero, each call fails.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long the response of [`complete`](Self::complete) is stored. Defaults to a day, as with a layer. Values outside
    /// [`Claim::MIN_RETENTION`] to [`Claim::MAX_RETENTION`] are clamped.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention.clamp(Claim::MIN_RETENTION, Claim::MAX_RETENTION);
        self
    }

    /// The state of an operation. `None` if it has no record: it was never begun, or its record has expired.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        call_within(self.deadline, self.store.inspect(operation)).await
    }

    /// Forgets an operation with its response and its checkpoint, if it is still as in `status`. The next request with its key
    /// executes it as the next attempt, even if it is a different request.
    ///
    /// False if the operation was begun, completed or released since, or if its ended lease was renewed. Then nothing changes, and
    /// you can [inspect](Self::inspect) it again.
    ///
    /// **A running handler is not stopped**, whether the operation is in flight, or its outcome is unknown because its process was silent.
    /// With [`OnUnknown::Reject`](super::OnUnknown::Reject), the handler runs to its end, and its response is not stored. With
    /// [`OnUnknown::Retry`](super::OnUnknown::Retry), its next renewal cancels the handler. Its effects may happen twice. Only the
    /// [fence](super::IdempotencyHandle::fence) separates the two attempts.
    ///
    /// # Errors
    ///
    /// If the store fails. The operation may or may not be forgotten then. You can safely repeat the call.
    pub async fn forget(&self, status: &OperationStatus) -> Result<bool, StoreError> {
        let is_forgotten = call_within(self.deadline, self.store.forget(status)).await?;
        if is_forgotten {
            let OperationStatus { operation, state, attempts, .. } = status;
            tracing::warn!(%operation, ?state, attempts, "operation forgotten by an administrator");
        }
        Ok(is_forgotten)
    }

    /// Completes an operation with unknown outcome, if it is still as in `status`. Retries of the request then get `answer`. A
    /// different request is rejected, as far as the fingerprint of the first request is known. False if the operation was begun,
    /// renewed, completed or released since, or if its state in `status` is neither [unknown](OperationState::Unknown) nor
    /// completed by this method; then nothing changes.
    ///
    /// You can replace the response of an earlier call: [inspect](Self::inspect) the operation again, and complete it with the
    /// new status. Clients that got the earlier response are not notified. A response of the handler cannot be replaced.
    ///
    /// The record does not say whether the operation belongs to a layer or to [`Idempotent`](super::Idempotent). If you store the
    /// wrong kind of [`StoredResponse`], each retry gets a store error until you complete the operation with the right kind.
    ///
    /// A handler that is still running has lost the operation. Its response goes to its own client, and is not stored. With
    /// [`OnUnknown::Retry`](super::OnUnknown::Retry), the next renewal cancels the handler.
    ///
    /// # Errors
    ///
    /// If the store fails. The operation may or may not be completed then. You can safely repeat the call.
    pub async fn complete(
        &self,
        status: &OperationStatus,
        response: impl Into<StoredResponse>,
    ) -> Result<bool, StoreError> {
        let response = response.into();
        let call = self.store.complete_unknown(status, &response, self.retention);
        let is_completed = call_within(self.deadline, call).await?;
        if is_completed {
            let OperationStatus { operation, attempts, .. } = status;
            tracing::warn!(%operation, attempts, is_kept = response.is_kept(), "operation completed by an administrator");
        }
        Ok(is_completed)
    }

    /// A page of the operations in the [scope](Self::scope), in any state. Begin with [`Cursor::default`], and continue with
    /// [`OperationPage::next`] until it is `None`. Each call scans about `max` stored entries, from 1 to 1,000.
    ///
    /// Entries that this crate did not write are left out. If you [inspect](Self::inspect) such an operation, you get an error.
    /// An operation that is stored during the whole scan is on at least one page, and may be on two. It can be missing if a
    /// cluster moves its slot, or if a replica is promoted. All pages together scan the whole backend, so do not list while
    /// serving requests.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn list(&self, from: Cursor, max: usize) -> Result<OperationPage, StoreError> {
        let call = self.store.list(self.scope.as_ref(), from, max.clamp(1, 1_000));
        call_within(self.deadline, call).await
    }

    /// The operations with unknown outcome on a page of the [list](Self::list).
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn unknown(&self, from: Cursor, max: usize) -> Result<OperationPage, StoreError> {
        let mut page = self.list(from, max).await?;
        page.operations.retain(|status| matches!(status.state, OperationState::Unknown { .. }));
        Ok(page)
    }
}

impl<B> fmt::Debug for IdempotencyAdmin<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyAdmin").finish_non_exhaustive()
    }
}
