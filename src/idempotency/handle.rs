use std::fmt;
use std::sync::Arc;

use super::attempt::OperationContext;
use super::checkpoint::{Checkpoint, CheckpointError};
use super::store::{Operation, Payload};
use crate::key::Key;

/// What a handler can know of the operation that it does. [`Idempotent`](super::Idempotent) give it to what they run; a layer puts it in the extensions of the request, but for a request that passes without a record:
/// for the lack of a key ([`OnMissingKey::Pass`](crate::OnMissingKey::Pass)) or of a store
/// ([`OnStoreError::Allow`](crate::OnStoreError::Allow)). Where there may be such, ask for an `Option` of it. With the feature `axum` handlers
/// can also take it as an argument by itself, without `Extension`.
///
/// ```
/// use axum::{Extension, Router, routing::post};
/// use tollgate::{IdempotencyLayer, MemoryBackend, http::header, idempotency::IdempotencyHandle};
///
/// async fn pay(Extension(operation): Extension<IdempotencyHandle>) -> String {
///     // The same in each attempt, so the payment provider sees a retry as one, too.
///     format!("charged once, as {}", operation.derive("charge"))
/// }
///
/// let guard = IdempotencyLayer::new(MemoryBackend::new()).scope(header("x-api-key"));
/// let app: Router = Router::new().route("/payments", post(pay)).layer(guard);
/// ```
#[derive(Clone)]
pub struct IdempotencyHandle {
    order: Arc<OperationContext<dyn HasPayload>>,
    attempt: u32,
    fence: u64,
    last: Option<Arc<Checkpoint>>,
}

/// Something that knows how far the body of a request was read.
pub(crate) trait HasPayload: Send + Sync {
    fn payload(&self) -> Payload;

    /// Whether it is known to be what the attempt before was sent, as far as that one has read it.
    fn is_known(&self) -> bool;

    /// The same before any of it was read.
    fn anew(&self) -> Self
    where
        Self: Sized;
}

impl IdempotencyHandle {
    pub(crate) fn new(
        order: Arc<OperationContext<dyn HasPayload>>,
        attempt: u32,
        fence: u64,
        last: Option<Checkpoint>,
    ) -> Self {
        Self { order, attempt, fence, last: last.map(Arc::new) }
    }

    /// Which operation this is: the scope of whoever asks, with the method and the path, and the key that the client has chosen; of
    /// [`Idempotent`](super::Idempotent) their name and the scope, and the key. It prints as the log names it where the outcome of an operation is unknown, so a handler can put it down beside what it does, for somebody to
    /// find.
    ///
    /// Keys of [`header`](crate::http::header) are digests. A scope of one's own is there as it is, unless it is long.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        self.order.operation()
    }

    /// Which attempt this is: 1, unless one before was given back or came to nobody knows what. Remembered for ten minutes after
    /// an attempt that was given back, and for the retention where one of unknown outcome was before that.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Larger than that of every attempt before: for what the handler changes, to refuse a smaller one.
    ///
    /// On one primary that remembers the last attempt this holds whatever happens to processes, and if its clock is set back by up to ten minutes,
    /// or by the retention where that is shorter. After a failover that lost the last attempt the order is that of the clocks: the new primary's must
    /// not be behind by more than the time since that attempt.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// A key for something that the handler asks of others, by what it is for: 32 characters, the same in each attempt of this
    /// operation and in no other operation.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> String {
        derived(self.order.operation(), purpose)
    }

    /// What the attempts before this one have put down last; `None` if they have put down nothing.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Checkpoint> {
        self.last.as_deref()
    }

    /// Puts down in the record that a step is done, with what the next attempt needs to know of it, in the place of what was put
    /// down before. The next attempt finds it as its [`last_checkpoint`](Self::last_checkpoint): when this one was given back, for
    /// the retention; and when the process dies and [`OnUnknown::Retry`](super::OnUnknown::Retry) lets the request be served again.
    ///
    /// One round trip; `step` is at most [`Checkpoint::MAX_STEP`] bytes, `data` [`Checkpoint::MAX_DATA`]. From then on
    /// another request under the same key is refused, also when this attempt is given back. Between something that is done
    /// elsewhere and its checkpoint the process may still die: [`derive`](Self::derive) is for that.
    ///
    /// An attempt that is not the first has to read the body as far as those before have read it: until then nobody knows whether it was sent the
    /// same, and it must not put down anything that one with the right body would find.
    ///
    /// ```
    /// # use tollgate::{BoxError, idempotency::IdempotencyHandle};
    /// # async fn charge(_: &str) -> Result<String, BoxError> { Ok(String::new()) }
    /// # async fn mail(_: &str) -> Result<(), BoxError> { Ok(()) }
    /// async fn pay(operation: IdempotencyHandle) -> Result<String, BoxError> {
    ///     let receipt = match operation.last_checkpoint() {
    ///         Some(last) if last.step() == "charged" => String::from_utf8_lossy(last.data()).into_owned(),
    ///         _ => {
    ///             let receipt = charge(&operation.derive("charge")).await?;
    ///             operation.checkpoint("charged", &receipt).await?;
    ///             receipt
    ///         }
    ///     };
    ///     mail(&receipt).await?;
    ///     Ok(receipt)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]: the handler should go no further then. After [`Unread`](CheckpointError::Unread) it may, once it has read more of the body.
    ///
    /// # Cancellation
    ///
    /// A checkpoint that is dropped on its way may have been put down.
    pub async fn checkpoint(&self, step: &str, data: impl AsRef<[u8]>) -> Result<(), CheckpointError> {
        let order = &self.order;
        if !order.body().is_known() {
            return Err(CheckpointError::Unread);
        }
        let checkpoint =
            Checkpoint::new(order.next_checkpoint(), step, data.as_ref()).ok_or(CheckpointError::TooLarge)?;
        drop(data);
        let is_ours = order.checkpoint(&order.body().payload(), &checkpoint).await?;
        if is_ours { Ok(()) } else { Err(CheckpointError::Lost) }
    }
}

fn derived(operation: &Operation, purpose: &str) -> String {
    let (scope, key) = (operation.scope().as_str(), operation.key().as_str());
    // Neither of the first two holds a space.
    let digest = Key::digest([scope, " ", key, " ", purpose].concat());
    digest.as_str().trim_start_matches('#').to_owned()
}

impl fmt::Debug for IdempotencyHandle {
    // What a client calls an operation is its own business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attempt, fence, .. } = self;
        f.debug_struct("IdempotencyHandle").field("attempt", attempt).field("fence", fence).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_derived_key_is_that_of_one_operation_and_purpose() {
        let derive = |scope: &str, key: &str, purpose: &str| derived(&Operation::new(scope, key), purpose);
        let charge = derive("alice", "k", "charge");
        assert_eq!(charge, derive("alice", "k", "charge"));
        assert_eq!(charge.len(), 32);
        let others =
            [("bob", "k", "charge"), ("alice", "l", "charge"), ("alice", "k", "mail"), ("alice", "k c", "harge")];
        for (scope, key, purpose) in others {
            assert_ne!(charge, derive(scope, key, purpose));
        }
    }
}
