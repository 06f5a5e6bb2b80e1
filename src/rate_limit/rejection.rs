use super::decision::{Decision, Denied, MissingKey, RateLimited};
use super::handle::RateLimitHandle;
use super::policy::Policy;
use crate::error::{BoxError, StoreError};
use crate::key::Key;

/// Why a request was turned away. Each case is a type of its own, so "over the limit" and "the store is down" cannot be
/// confused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The request is over its limit.
    Limited(RateLimited),
    /// The request has no key, and the layer is told to [reject](super::OnMissingKey::Reject) such requests.
    MissingKey(MissingKey),
    /// The request is on the [deny list](super::RateLimitLayer::deny) of the layer.
    Denied(Denied),
    /// The store failed, and the layer is told to [deny](super::OnStoreError::Deny) requests then.
    Store(StoreError),
}

impl From<Rejection> for BoxError {
    /// The error inside: [`RateLimited`], [`MissingKey`], [`Denied`] or [`StoreError`], to be found by downcasting.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Limited(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::Denied(error) => error.into(),
            Rejection::Store(error) => error.into(),
        }
    }
}

/// Lets the response of an admitted or rejected request say how its limit stands, and an admitted request carry a handle.
///
/// Implemented for the same types as [`Responder`](crate::responder::Responder), which has the other half of the answer.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what the answers `{Res}` to `{Req}` tell of a rate limit",
    note = "the default answers with an HTTP response (feature `http`); for other services call `.responder(ErrorResponder)`",
    note = "an answer of your own to a rate limit implements `AnnotateResponse` beside `Responder`; over HTTP `HttpResponder::write_headers` writes the fields"
)]
pub trait AnnotateResponse<Req, Res> {
    /// Whether requests get a [handle](RateLimitHandle), which costs an allocation or two. Unless told otherwise they do
    /// not.
    fn attaches(&self) -> bool {
        false
    }

    /// Gives an admitted request its handle.
    fn attach(&self, handle: RateLimitHandle, request: &mut Req) {
        let _ = (handle, request);
    }

    /// Is told of a request that passes uncounted, so that no handle which a layer further out has attached is taken for one of this layer. Unless told
    /// otherwise it does nothing.
    fn pass(&self, request: &mut Req) {
        let _ = request;
    }

    /// Whether responses are told anything. Unless told otherwise they are; where they are not, nothing has to be kept for it while a
    /// request is handled, and [`announce`](Self::announce) is not called.
    fn announces(&self) -> bool {
        true
    }

    /// Adds to `response` what the client should know. Called once for each policy that was asked about the request.
    fn announce(&self, standing: &LimitInfo<'_>, response: &mut Res);
}

/// How a request stands with one policy.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LimitInfo<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// Whom the request counts for, where that is known.
    pub key: Option<&'a Key>,
    /// What was decided, where a decision could be made.
    pub decision: Option<&'a Decision>,
}

impl<'a> LimitInfo<'a> {
    /// Of a request of which no more than the policy is known.
    #[must_use]
    pub const fn new(policy: &'a Policy) -> Self {
        Self { policy, key: None, decision: None }
    }

    /// Of a request that counts for `key`, with what was decided about it.
    #[must_use]
    pub const fn of(policy: &'a Policy, key: &'a Key, decision: Option<&'a Decision>) -> Self {
        Self { policy, key: Some(key), decision }
    }
}

impl<Req, Res> AnnotateResponse<Req, Res> for crate::responder::ErrorResponder {
    fn announces(&self) -> bool {
        false
    }

    /// Adds nothing: a plain service has no place for it.
    fn announce(&self, _: &LimitInfo<'_>, _: &mut Res) {}
}
