//! Which responses are charged.

use super::handle::RateLimitHandle;

/// Which responses are charged.
///
/// Every request is charged when it is admitted, so that requests in flight count. This trait is called with the response, and can give
/// units back through the [handle](RateLimitHandle) of the request. If the response future is dropped before, the request stays charged.
///
/// Closures `Fn(Result<&Res, &E>) -> bool` return whether a response is charged. With HTTP there are presets: `tollgate::http::failures()`
/// and `tollgate::http::successes()`.
pub trait ChargeOn<Res, E> {
    /// Whether [`settle`](Self::settle) has to be called. Defaults to `true`.
    const NEEDS_RESPONSE: bool = true;

    /// Corrects the charge of the request, now or, with a clone of `handle`, later.
    fn settle(&self, handle: &RateLimitHandle, result: Result<&mut Res, &E>);
}

impl<Res, E, F: Fn(Result<&Res, &E>) -> bool> ChargeOn<Res, E> for F {
    fn settle(&self, handle: &RateLimitHandle, result: Result<&mut Res, &E>) {
        if !self(result.map(|response| &*response)) {
            handle.settle(0);
        }
    }
}

/// Every admitted request stays charged, whatever the response. The default of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChargeAlways;

impl<Res, E> ChargeOn<Res, E> for ChargeAlways {
    const NEEDS_RESPONSE: bool = false;

    fn settle(&self, _: &RateLimitHandle, _: Result<&mut Res, &E>) {}
}
