use ::http::{HeaderMap, Response};

use super::web::WebTrailers;
use crate::http::AtEnd;
use crate::rate_limit::{ChargeOn, RateLimitHandle};

/// Charges only failed calls: calls with another status than `OK`, and calls without a status.
///
/// The status is read from the trailers after the last message, or from the headers of a response without a body. With gRPC-Web it is read
/// from the last message of the body, unless that is compressed.
///
/// Every call is charged when it starts, and refunded if its end shows that it should not be charged. A call that breaks off or is cancelled
/// before its trailers has no status, so it failed: `failures` charges it, and [`successes`] refunds it. If the client disconnects before
/// there is a response, neither refunds the call.
///
/// Works with the responders [`GrpcResponder`](super::GrpcResponder) and [`HttpResponder`](crate::HttpResponder), whose bodies watch for
/// trailers.
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
/// A client that cancels a stream just before its end is not charged. If this matters to you, charge every call, or let the handler set the
/// cost of the stream with a [`RateLimitHandle`].
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
        let is_charged: fn(&HeaderMap) -> bool = if self.failures { |trailers| !is_ok(trailers) } else { is_ok };
        match result {
            Ok(response) if response.headers().contains_key("grpc-status") => {
                // The status is known already.
                AtEnd { handle: handle.clone(), is_charged, web: None }.settle(response.headers());
            }
            Ok(response) => {
                let web = WebTrailers::of(response.headers());
                response.extensions_mut().insert(AtEnd { handle: handle.clone(), is_charged, web });
            }
            Err(_) if self.failures => {}
            Err(_) => handle.settle(0),
        }
    }
}

fn is_ok(trailers: &HeaderMap) -> bool {
    trailers.get("grpc-status").is_some_and(|status| status == "0")
}
