//! Rejections for gRPC services, such as those of tonic.
//!
//! A gRPC client does not understand an HTTP 429. The [status mapping] of gRPC makes it `UNAVAILABLE`, which has no details and no wait, and
//! which retry policies retry. tonic 0.14 parses the problem document as a message and reports `INTERNAL`. So [`GrpcResponder`] responds with a
//! gRPC status, in a response without a body ("trailers-only"):
//!
//! | case | status | details | `grpc-retry-pushback-ms` |
//! | --- | --- | --- | --- |
//! | over the limit | 8 `RESOURCE_EXHAUSTED` | `RetryInfo`, `QuotaFailure` | the wait |
//! | key is [blocked](crate::Limiter::block) | 8 `RESOURCE_EXHAUSTED` | `RetryInfo`, and `QuotaFailure` if it is over a limit as well | the wait |
//! | costs more than a limit | 8 `RESOURCE_EXHAUSTED` | `QuotaFailure` | -1, "do not retry" |
//! | on the deny list | 7 `PERMISSION_DENIED` | | |
//! | no key | 3 `INVALID_ARGUMENT` | | |
//! | store failed ([`RateLimitFallback::Deny`](crate::RateLimitFallback::Deny)) | 14 `UNAVAILABLE` | `RetryInfo` of 1 s | 1000 |
//!
//! [status mapping]: https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md
//!
//! The details follow Google's [error model] and are in `grpc-status-details-bin`. The wait in `RetryInfo` is exact. In
//! `grpc-retry-pushback-ms`, which the retry policies of gRPC libraries read (gRFC A6), it is rounded up to milliseconds. The value is -1 if
//! the wait does not fit into 32 bits. `QuotaFailure` has a violation for each violated limit: its subject is the policy, and its description
//! is the limit, such as `api-1h: 1000 in 3600 s`.
//!
//! The `RateLimit` fields are sent as metadata. Choose their versions as with [`http`](crate::http).
//!
//! [error model]: https://google.aip.dev/193
//!
//! # Keys
//!
//! [`header`](crate::http::header) reads metadata. tonic puts the peer address into its own extension, which
//! [`peer_ip`](crate::http::peer_ip) and [`ClientIp`](crate::http::ClientIp) do not read. Without the layer below, calls have no key and get
//! `INVALID_ARGUMENT`. The layer copies the address, with tower's feature `util`:
//!
//! ```
//! use http::Request;
//! use tollgate::http::{PeerAddr, peer_ip};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, grpc::GrpcResponder};
//! use tonic::{body::Body, transport::server::{Server, TcpConnectInfo}};
//! use tower::util::MapRequestLayer;
//!
//! let copy_peer = |mut call: Request<Body>| {
//!     if let Some(peer) = call.extensions().get().and_then(TcpConnectInfo::remote_addr) {
//!         call.extensions_mut().insert(PeerAddr(peer));
//!     }
//!     call
//! };
//! let policy = Policy::new("rpc", Quota::per_second(100).fixed_window());
//! let limit = RateLimitLayer::new(MemoryBackend::new(), policy).key(peer_ip()).responder(GrpcResponder::new());
//! let server = Server::builder().layer(MapRequestLayer::new(copy_peer)).layer(limit); // .add_service(..)
//! ```
//!
//! # gRPC-Web
//!
//! Put the layer that translates gRPC-Web (`GrpcWebLayer` of tonic-web) outside the layers of this crate. With tonic, add it first. It
//! translates rejections for the client in the browser. [`failures`] and [`successes`] find the status of a call inside and outside that
//! layer.
//!
//! # Examples
//!
//! One limit per tenant for all services of a tonic server. A proxy has authenticated the tenant and set the header:
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, grpc::GrpcResponder, http::header};
//!
//! let policy = Policy::new("rpc", Quota::per_second(100).fixed_window());
//! let layer = RateLimitLayer::new(MemoryBackend::new(), policy)
//!     .key(header("x-tenant"))
//!     .responder(GrpcResponder::new().retry_jitter(Duration::from_millis(200)));
//! let server = tonic::transport::Server::builder().layer(layer); // .add_service(..)
//! ```
//!
//! The status that a client gets after its quota is used up:
//!
//! ```
//! use http::{Request, Response};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, grpc::GrpcResponder};
//! use tonic_types::StatusExt;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("rpc", Quota::per_minute(0).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(GrpcResponder::new()))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, tollgate::BoxError>(Response::new(String::new()))));
//!
//! let response = service.oneshot(Request::new(String::new())).await?;
//! assert_eq!(response.headers()["grpc-status"], "8");
//!
//! let status = tonic::Status::from_header_map(response.headers()).ok_or("a status")?;
//! let violations = status.get_details_quota_failure().ok_or("a quota failure")?.violations;
//! assert_eq!((&*violations[0].subject, &*violations[0].description), ("rpc", "rpc: 0 in 60 s"));
//! assert!(status.get_details_retry_info().is_none(), "no wait helps");
//! # Ok(())
//! # }
//! ```

mod charge;
mod details;
mod idempotency;
mod lock;
mod status;
mod web;

pub use self::charge::{ChargeStatus, failures, successes};
pub use self::status::GrpcResponder;
pub(crate) use self::web::WebTrailers;
