//! What layers do with a request that has no key, or when the store fails.

/// What a layer does with a request that has no key, or an empty one. Defaults to [`Reject`](Self::Reject).
///
/// To let such requests share one key, give the layer a fallback instead: `.key(header("x-tenant").or(GlobalKey))`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// The layer rejects the request: 400 with HTTP.
    #[default]
    Reject,
    /// The request passes without a lock or record. A rate limit counts it only under the other keys that it has.
    Pass,
}

/// What [`LockLayer`](crate::LockLayer) and `IdempotencyLayer` do with a request when the store fails or is late. Defaults to
/// [`Deny`](Self::Deny). [`RateLimitLayer`](crate::RateLimitLayer) has more options: see [`RateLimitFallback`](crate::RateLimitFallback).
///
/// The log has a line when requests begin to pass because of [`Allow`](Self::Allow), and one when the store answers again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// The layer rejects the request: 503 with HTTP, the [`StoreError`](crate::StoreError) without.
    #[default]
    Deny,
    /// The request passes without a lock or record, and without a handle in its extensions. The [metrics](crate::lock#metrics) of locks count
    /// such requests.
    ///
    /// With an `IdempotencyLayer`, a request that waits for one in flight does not pass when the store fails. It keeps waiting, and is
    /// rejected at the end of its wait.
    Allow,
}
