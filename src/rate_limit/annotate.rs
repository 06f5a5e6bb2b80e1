//! The state of the limits in a response.

use super::handle::RateLimitHandle;
use super::limit_info::LimitInfo;
use crate::responder::ErrorResponder;

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

    /// Called for a request that passes uncounted. An implementation removes the handle of an outer layer here, so that a handler does not
    /// mistake it for one of this layer. Does nothing by default.
    fn pass(&self, request: &mut Req) {
        let _ = request;
    }

    /// Whether [`annotate`](Self::annotate) has to be called. Defaults to `true`. If `false`, nothing is kept for it while a request is
    /// handled.
    fn annotates(&self) -> bool {
        true
    }

    /// Adds the state of a policy to `response`. Called once for each enforced policy of the request. If the request was not counted,
    /// called once for the policy of the layer, if that is enforced.
    fn annotate(&self, info: &LimitInfo<'_>, response: &mut Res);
}

impl<Req, Res> AnnotateResponse<Req, Res> for ErrorResponder {
    fn annotates(&self) -> bool {
        false
    }

    /// Adds nothing: a plain service has no headers.
    fn annotate(&self, _: &LimitInfo<'_>, _: &mut Res) {}
}
