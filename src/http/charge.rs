#[cfg(feature = "grpc")]
use std::borrow::Cow;

#[cfg(feature = "grpc")]
use ::http::HeaderMap;
use ::http::Response;
#[cfg(feature = "grpc")]
use bytes::Bytes;
#[cfg(feature = "grpc")]
use http_body::Frame;

#[cfg(feature = "grpc")]
use crate::grpc::WebTrailers;
use crate::rate_limit::{ChargeOn, RateLimitHandle};

/// Charges only answers with a status of 400 and above, and services that fail: limits attempts and not use, a login's for
/// instance. Those count by something that whoever guesses cannot change with each guess, such as the address.
///
/// ```
/// use axum::{Router, http::StatusCode, routing::post};
/// use tollgate::http::{failures, peer_ip};
/// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// let guesses = Policy::new("login", Quota::per_hour(5).fixed_window());
/// let limit = RateLimitLayer::new(MemoryBackend::new(), guesses).key(peer_ip()).charge_on(failures());
/// let app: Router = Router::new().route("/login", post(async || StatusCode::UNAUTHORIZED)).layer(limit);
/// ```
#[must_use]
pub const fn failures() -> ChargeStatus {
    ChargeStatus { failures: true }
}

/// Charges only answers with a status below 400: what did not work is not used up.
#[must_use]
pub const fn successes() -> ChargeStatus {
    ChargeStatus { failures: false }
}

/// See [`failures`] and [`successes`].
#[derive(Clone, Copy, Debug)]
pub struct ChargeStatus {
    failures: bool,
}

impl<B, E> ChargeOn<Response<B>, E> for ChargeStatus {
    fn settle(&self, handle: &RateLimitHandle, answer: Result<&mut Response<B>, &E>) {
        let failed =
            answer.map_or(true, |response| response.status().is_client_error() || response.status().is_server_error());
        if failed != self.failures {
            handle.settle(0);
        }
    }
}

/// A charge that depends on the trailers of an answer. Travels in the extensions of the response to its body.
#[cfg(feature = "grpc")]
#[derive(Clone, Debug)]
pub(crate) struct AtEnd {
    pub(crate) handle: RateLimitHandle,
    /// Whether an answer with these trailers is charged.
    pub(crate) charged: fn(&HeaderMap) -> bool,
    /// Where trailers are a part of the body.
    pub(crate) web: Option<WebTrailers>,
}

#[cfg(feature = "grpc")]
impl AtEnd {
    /// The trailers, if this frame of the body is or ends them.
    pub(crate) fn trailers<'a>(&mut self, frame: &'a Frame<Bytes>) -> Option<Cow<'a, HeaderMap>> {
        let in_body = self.web.as_mut().zip(frame.data_ref()).and_then(|(web, data)| web.read(data));
        in_body.map(Cow::Owned).or(frame.trailers_ref().map(Cow::Borrowed))
    }

    pub(crate) fn settle(self, trailers: &HeaderMap) {
        if !(self.charged)(trailers) {
            self.handle.settle(0);
        }
    }
}
