use ::http::{HeaderMap, Response};

use super::web::WebTrailers;
use crate::http::AtEnd;
use crate::rate_limit::{ChargeOn, RateLimitHandle};

/// Charges only calls that fail: with another status than `OK`, or none.
///
/// The status is read where gRPC puts it, in the trailers behind the last message, or in the headers of an answer that has nothing
/// else; and in the last message of a body of gRPC-Web, unless that is compressed. A call that breaks off or is given up before its trailers is one without a status, so it fails: a client that goes away is
/// charged here and is not by [`successes`]. One that goes away before there is an answer stays charged by both. Works with the
/// answers [`GrpcResponder`](super::GrpcResponder) and [`HttpResponder`](crate::HttpResponder), whose bodies look out for trailers.
///
/// ```
/// use tollgate::grpc::{GrpcResponder, failures};
/// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, http::header};
///
/// let policy = Policy::new("errors", Quota::per_minute(10).fixed_window());
/// let layer = RateLimitLayer::new(MemoryBackend::new(), policy)
///     .key(header("x-tenant"))
///     .responder(GrpcResponder::new())
///     .charge_on(failures());
/// let server = tonic::transport::Server::builder().layer(layer); // .add_service(..)
/// ```
#[must_use]
pub const fn failures() -> ChargeStatus {
    ChargeStatus { failures: true }
}

/// Charges only calls that end with the status `OK`: see [`failures`].
///
/// A client that leaves a stream just before its end has had it for nothing. Where that is worth something charge every call, or let the
/// handler say what a stream was worth, with a [`RateLimitHandle`].
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
        let charged: fn(&HeaderMap) -> bool = if self.failures { |end| !is_ok(end) } else { is_ok };
        match answer {
            Ok(response) if response.headers().contains_key("grpc-status") => {
                AtEnd { handle: handle.clone(), charged, web: None }.settle(response.headers());
            }
            Ok(response) => {
                let web = WebTrailers::of(response.headers());
                response.extensions_mut().insert(AtEnd { handle: handle.clone(), charged, web });
            }
            Err(_) if self.failures => {}
            Err(_) => handle.settle(0),
        }
    }
}

fn is_ok(end: &HeaderMap) -> bool {
    end.get("grpc-status").is_some_and(|status| status == "0")
}
