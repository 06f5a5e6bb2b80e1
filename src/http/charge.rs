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

/// Charges only responses with a status of 400 or above and service errors. This limits failed attempts, for example to log in.
///
/// Count such attempts by a key that an attacker cannot change with each guess, such as the address.
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

/// Charges only responses with a status below 400, so failed requests cost nothing.
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
    fn settle(&self, handle: &RateLimitHandle, result: Result<&mut Response<B>, &E>) {
        let failed =
            result.map_or(true, |response| response.status().is_client_error() || response.status().is_server_error());
        if failed != self.failures {
            handle.settle(0);
        }
    }
}

/// A charge that depends on the trailers of a response. The layer passes it to the body in the extensions of the response.
#[cfg(feature = "grpc")]
#[derive(Clone, Debug)]
pub(crate) struct AtEnd {
    pub(crate) handle: RateLimitHandle,
    /// Whether a response with these trailers is charged.
    pub(crate) is_charged: fn(&HeaderMap) -> bool,
    /// The parser for gRPC-Web, which sends the trailers in the body.
    pub(crate) web: Option<WebTrailers>,
}

#[cfg(feature = "grpc")]
impl AtEnd {
    /// The trailers, if `frame` completes them.
    pub(crate) fn trailers<'a>(&mut self, frame: &'a Frame<Bytes>) -> Option<Cow<'a, HeaderMap>> {
        let in_body = self.web.as_mut().zip(frame.data_ref()).and_then(|(web, data)| web.read(data));
        in_body.map(Cow::Owned).or(frame.trailers_ref().map(Cow::Borrowed))
    }

    pub(crate) fn settle(self, trailers: &HeaderMap) {
        if !(self.is_charged)(trailers) {
            self.handle.settle(0);
        }
    }
}
