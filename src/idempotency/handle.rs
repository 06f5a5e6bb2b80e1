use std::fmt;

use super::store::Operation;
use crate::key::Key;

/// What a handler can know of the operation that it does. In the extensions of the request.
///
/// ```
/// # #[cfg(feature = "http")] {
/// use axum::{Extension, Router, routing::post};
/// use tollgate::{IdempotencyLayer, MemoryBackend, http::header, idempotency::IdempotencyHandle};
///
/// async fn pay(Extension(operation): Extension<IdempotencyHandle>) -> String {
///     // The same in each attempt, so the payment provider sees a retry as one, too.
///     format!("charged once, as {}", operation.derive("charge"))
/// }
///
/// let guard = IdempotencyLayer::new(MemoryBackend::new()).scope(header("authorization"));
/// let app: Router = Router::new().route("/payments", post(pay)).layer(guard);
/// # }
/// ```
#[derive(Clone)]
pub struct IdempotencyHandle {
    operation: Operation,
    attempt: u32,
    fence: u64,
}

impl IdempotencyHandle {
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "requests come with that feature"))]
    pub(crate) const fn new(operation: Operation, attempt: u32, fence: u64) -> Self {
        Self { operation, attempt, fence }
    }

    /// Which attempt this is: 1, unless one before was given back or came to nobody knows what. Remembered for ten minutes after
    /// an attempt that was given back.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Larger than that of every attempt before: for what the handler changes, to refuse a smaller one.
    #[must_use]
    pub const fn fence(&self) -> u64 {
        self.fence
    }

    /// A key for something that the handler asks of others, by what it is for: 32 characters, the same in each attempt of this
    /// operation and in no other operation.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> String {
        let (scope, key) = (self.operation.scope().as_str(), self.operation.key().as_str());
        // Neither of the first two holds a space.
        let digest = Key::digest([scope, " ", key, " ", purpose].concat());
        digest.as_str().trim_start_matches('#').to_owned()
    }
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
        let derive = |scope: &str, key: &str, attempt, purpose: &str| {
            IdempotencyHandle::new(Operation::new(scope, key), attempt, 7).derive(purpose)
        };
        let charge = derive("alice", "k", 1, "charge");
        assert_eq!(charge, derive("alice", "k", 2, "charge"));
        assert_eq!(charge.len(), 32);
        let others =
            [("bob", "k", "charge"), ("alice", "l", "charge"), ("alice", "k", "mail"), ("alice", "k c", "harge")];
        for (scope, key, purpose) in others {
            assert_ne!(charge, derive(scope, key, 1, purpose));
        }
    }
}
