use std::fmt;

use super::decision::{Decision, Denied, MissingKey, RateLimited};
use super::handle::RateLimitHandle;
use super::policy::Policy;
use crate::error::{BoxError, StoreError};
use crate::key::Key;

/// Why a request was rejected. Each case has its own type, so "over the limit" and "the store is down" cannot be confused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The request is over its limit.
    Limited(RateLimited),
    /// The request has no key, and the layer is configured to [reject](crate::OnMissingKey::Reject) such requests.
    MissingKey(MissingKey),
    /// The request is on the [deny list](super::RateLimitLayer::deny) of the layer.
    Denied(Denied),
    /// The store failed, and the layer is configured to [deny](super::RateLimitFallback::Deny) requests then.
    Store(StoreError),
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(error) => fmt::Display::fmt(error, f),
            Self::MissingKey(error) => fmt::Display::fmt(error, f),
            Self::Denied(error) => fmt::Display::fmt(error, f),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl From<Rejection> for BoxError {
    /// Returns the inner error: [`RateLimited`], [`MissingKey`], [`Denied`] or [`StoreError`]. Downcast to find out which.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Limited(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::Denied(error) => error.into(),
            Rejection::Store(error) => error.into(),
        }
    }
}

/// Adds the state of its limits to the response of an admitted or rejected request, and a handle to an admitted request.
///
/// Implemented for the same types as [`Responder`](crate::responder::Responder), which builds the response.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot add rate limits to responses `{Res}` to `{Req}`",
    note = "the default responder needs HTTP responses (feature `http`); for other services call `.responder(ErrorResponder)`",
    note = "your own responder has to implement `AnnotateResponse` and `Responder`; over HTTP, `HttpResponder::map_rejection` takes a closure"
)]
pub trait AnnotateResponse<Req, Res> {
    /// Whether requests get a [handle](RateLimitHandle), which costs one or two allocations. Defaults to `false`.
    fn attaches(&self) -> bool {
        false
    }

    /// Gives an admitted request its handle.
    fn attach(&self, handle: RateLimitHandle, request: &mut Req) {
        let _ = (handle, request);
    }

    /// Called for a request that passes uncounted, so that the handle of an outer layer is not mistaken for one of this layer. Does nothing
    /// by default.
    fn pass(&self, request: &mut Req) {
        let _ = request;
    }

    /// Whether [`annotate`](Self::annotate) has to be called. Defaults to `true`. If `false`, nothing is kept for it while a request is
    /// handled.
    fn annotates(&self) -> bool {
        true
    }

    /// Adds the state of a policy to `response`. Called once for each enforced policy of the request.
    fn annotate(&self, info: &LimitInfo<'_>, response: &mut Res);
}

/// The state of a request under one policy.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LimitInfo<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The key under which the request counts, if known.
    pub key: Option<&'a Key>,
    /// The decision, if one could be made.
    pub decision: Option<&'a Decision>,
}

impl<'a> LimitInfo<'a> {
    /// Creates the info of a request of which only the policy is known.
    #[must_use]
    pub const fn new(policy: &'a Policy) -> Self {
        Self { policy, key: None, decision: None }
    }

    /// Creates the info of a request that counts under `key`, with its decision.
    #[must_use]
    pub const fn of(policy: &'a Policy, key: &'a Key, decision: Option<&'a Decision>) -> Self {
        Self { policy, key: Some(key), decision }
    }
}

impl<Req, Res> AnnotateResponse<Req, Res> for crate::responder::ErrorResponder {
    fn annotates(&self) -> bool {
        false
    }

    /// Adds nothing: a plain service has no headers.
    fn annotate(&self, _: &LimitInfo<'_>, _: &mut Res) {}
}
