use std::fmt;
use std::sync::Arc;

use super::checkpoint::{Checkpoint, CheckpointError};
use super::context::OperationContext;
use super::has_body_fingerprint::HasBodyFingerprint;
use super::operation::Operation;
use crate::key::Key;

/// The operation that a handler executes.
///
/// [`Idempotent`](super::Idempotent) passes it to the work. A layer inserts it into the extensions of the request, except for requests that
/// pass without a record. Such a request has a [method](crate::http::IdempotencyLayer::methods) that the layer does not guard, or no key
/// ([`OnMissingKey::Pass`](crate::OnMissingKey::Pass)), or the store failed ([`OnStoreError::Allow`](crate::OnStoreError::Allow)). If such
/// requests reach the handler, extract an `Option` of the handle. With the feature `axum`, handlers can take the handle as an argument
/// without `Extension`.
///
/// ```
/// use axum::{Extension, Router, routing::post};
/// use tollgate::{IdempotencyLayer, MemoryBackend, http::header, idempotency::IdempotencyHandle};
///
/// async fn pay(Extension(operation): Extension<IdempotencyHandle>) -> String {
///     // The same in each attempt, so the payment provider recognizes a retry.
///     format!("charged once, as {}", operation.derive("charge"))
/// }
///
/// let guard = IdempotencyLayer::new(MemoryBackend::new()).scope(header("x-api-key"));
/// let app: Router = Router::new().route("/payments", post(pay)).layer(guard);
/// ```
#[derive(Clone)]
pub struct IdempotencyHandle {
    context: Arc<OperationContext<dyn HasBodyFingerprint>>,
    attempt: u32,
    fence: u64,
    last: Option<Arc<Checkpoint>>,
}

impl IdempotencyHandle {
    pub(crate) fn new(
        context: Arc<OperationContext<dyn HasBodyFingerprint>>,
        attempt: u32,
        fence: u64,
        last: Option<Checkpoint>,
    ) -> Self {
        Self { context, attempt, fence, last: last.map(Arc::new) }
    }

    /// The operation: a scope and the key that the client chose. The scope of a layer ends with the method and the path. The
    /// scope of an [`Idempotent`](super::Idempotent) begins with its name.
    ///
    /// Its text is the same as in the log lines about unknown outcomes. So a handler can store the text with its effects, where
    /// an operator can find it.
    ///
    /// A scope from [`header`](crate::http::header) is a digest. A scope of your own is readable, unless it is long.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        self.context.operation()
    }

    /// The number of this attempt. It is 1, unless an earlier attempt was released or its outcome is unknown. The number is remembered for
    /// ten minutes after a release. If the operation has a checkpoint, or an earlier attempt had an unknown outcome, the number is
    /// remembered for the retention.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Larger than the fence of every earlier attempt. Store it with the data that the handler changes, and refuse smaller ones.
    ///
    /// With one primary that remembers the last attempt, fences rise across crashes of processes. They also rise if the clock of
    /// the primary is set back by at most ten minutes, and by at most the retention. After a failover that lost the last
    /// attempt, fences follow the clocks. Then the clock of the new primary must not be behind by more than the time since the
    /// lost attempt.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// A key for a request of the handler to another service. `purpose` identifies the request. The key has 32 characters. It is
    /// the same in each attempt of this operation, and differs from the keys of all other operations.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> String {
        derived(self.context.operation(), purpose)
    }

    /// The last checkpoint of earlier attempts; `None` if there is none.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Checkpoint> {
        self.last.as_deref()
    }

    /// Stores that a step is complete, with data for the next attempt. It replaces the previous checkpoint.
    ///
    /// If the next attempt begins within the retention, it gets the checkpoint from [`last_checkpoint`](Self::last_checkpoint). A next
    /// attempt is possible after this attempt was released. After its process died,
    /// [`OnUnknown::Retry`](super::OnUnknown::Retry) allows one.
    ///
    /// A checkpoint takes one round trip. `step` may have up to [`Checkpoint::MAX_STEP`] bytes, `data` up to
    /// [`Checkpoint::MAX_DATA`]. After a checkpoint, a different request under the same key is rejected, also after this attempt
    /// was released. The process may die between an effect and its checkpoint. Use [`derive`](Self::derive) to recognize a
    /// repeated effect.
    ///
    /// Before its first checkpoint, a later attempt must read the body as far as the earlier attempts have read it. Until then, the
    /// body may still turn out to differ, and a different request must not replace the stored checkpoint.
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
    /// [`CheckpointError`]: the handler should stop. After [`Unread`](CheckpointError::Unread) it may continue, and try again
    /// once it has read more of the body.
    ///
    /// # Cancellation
    ///
    /// If you drop the future, the checkpoint may or may not have been stored.
    pub async fn checkpoint(&self, step: &str, data: impl AsRef<[u8]>) -> Result<(), CheckpointError> {
        let context = &self.context;
        if !context.body().is_confirmed() {
            return Err(CheckpointError::Unread);
        }
        let checkpoint =
            Checkpoint::new(context.next_checkpoint(), step, data.as_ref()).ok_or(CheckpointError::TooLarge)?;
        drop(data);
        let is_ours = context.checkpoint(&context.body().body_fingerprint(), &checkpoint).await?;
        if is_ours { Ok(()) } else { Err(CheckpointError::Lost) }
    }
}

fn derived(operation: &Operation, purpose: &str) -> String {
    let (scope, key) = (operation.scope().as_str(), operation.key().as_str());
    // Scope and key contain no space, so the joined text is unambiguous.
    let digest = Key::digest([scope, " ", key, " ", purpose].concat());
    digest.as_str().trim_start_matches('#').to_owned()
}

impl fmt::Debug for IdempotencyHandle {
    // Omits the operation, since its key is private to the client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attempt, fence, .. } = self;
        f.debug_struct("IdempotencyHandle").field("attempt", attempt).field("fence", fence).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_key_depends_on_operation_and_purpose() {
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
