use std::future::Future;

use super::decision::Decision;
use super::policy::Policy;
use crate::error::StoreError;
use crate::key::Key;

/// What rate limiting needs of a backend: decisions, each of them atomic.
///
/// A store is asked only about costs that can be admitted at all (no more than the limit, which is not 0); [`Limiter`] and
/// the layer answer the others. Every backend passes the same contract tests.
///
/// # Cancellation
///
/// Dropping a returned future may or may not have charged.
///
/// [`Limiter`]: super::Limiter
pub trait RateLimitStore {
    /// Charges `cost` units if they fit, and says how things stand. A denial charges nothing, and so does a cost of 0.
    fn check(&self, policy: &Policy, key: &Key, cost: u32)
    -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Says whether [`check`](Self::check) would admit this cost, and how things stand, without charging. At the most it repairs what it finds broken.
    fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Forgets what was counted for this key. A key that is not known is no error.
    fn reset(&self, policy: &Policy, key: &Key) -> impl Future<Output = Result<(), StoreError>> + Send;
}
