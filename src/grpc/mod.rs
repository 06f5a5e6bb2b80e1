//! Rejections for services that speak gRPC, tonic's for instance.
//!
//! A plain HTTP 429 tells a gRPC client nothing of a limit. By the [status mapping] of gRPC it is `UNAVAILABLE`, which retry policies try
//! again, without details and without a wait. tonic 0.14 reads the problem document as a message, and reports `INTERNAL`. [`GrpcResponder`]
//! answers with a gRPC status instead, in a response without a body ("trailers-only"):
//!
//! | case | status | details | `grpc-retry-pushback-ms` |
//! | --- | --- | --- | --- |
//! | over the limit | 8 `RESOURCE_EXHAUSTED` | `RetryInfo`, `QuotaFailure` | the wait |
//! | key is [blocked](crate::Limiter::block) | 8 `RESOURCE_EXHAUSTED` | `RetryInfo`, and `QuotaFailure` if it is over a limit as well | the wait |
//! | costs more than a limit | 8 `RESOURCE_EXHAUSTED` | `QuotaFailure` | -1, "do not retry" |
//! | on the deny list | 7 `PERMISSION_DENIED` | | |
//! | no key | 3 `INVALID_ARGUMENT` | | |
//! | store failed and the layer denies then | 14 `UNAVAILABLE` | `RetryInfo` of 1 s | 1000 |
//!
//! [status mapping]: https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md
//!
//! The details are those of Google's [error model], in `grpc-status-details-bin`. The wait in `RetryInfo` is exact, in
//! `grpc-retry-pushback-ms` (gRFC A6, read by the retry policies of gRPC libraries) it is rounded up to milliseconds, and -1
//! where it does not fit into 32 bits. `QuotaFailure` has a violation for each limit that stands in the way: its subject is
//! the policy, its description the limit, `api-1h: 1000 in 3600 s` for instance.
//!
//! The `RateLimit` fields are there as metadata, as with [`http`](crate::http), and can be chosen in the same way.
//!
//! [error model]: https://google.aip.dev/193
//!
//! # Who is asking
//!
//! [`header`](crate::http::header) reads metadata. The address of the other end tonic puts into an extension of its own, where
//! [`peer_ip`](crate::http::peer_ip) and [`ClientIp`](crate::http::ClientIp) do not find it: calls have no key then, and are answered by
//! `INVALID_ARGUMENT`. A layer in front passes it on, here with that of tower (feature `util`):
//!
//! ```
//! use http::Request;
//! use tollgate::http::{PeerAddr, peer_ip};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, grpc::GrpcResponder};
//! use tonic::{body::Body, transport::server::{Server, TcpConnectInfo}};
//! use tower::util::MapRequestLayer;
//!
//! let pass_on = |mut call: Request<Body>| {
//!     if let Some(peer) = call.extensions().get().and_then(TcpConnectInfo::remote_addr) {
//!         call.extensions_mut().insert(PeerAddr(peer));
//!     }
//!     call
//! };
//! let policy = Policy::new("rpc", Quota::per_second(100).fixed_window());
//! let limit = RateLimitLayer::new(MemoryBackend::new(), policy).key(peer_ip()).responder(GrpcResponder::new());
//! let server = Server::builder().layer(MapRequestLayer::new(pass_on)).layer(limit); // .add_service(..)
//! ```
//!
//! # gRPC-Web
//!
//! Let the layer that translates gRPC-Web (`GrpcWebLayer` of tonic-web) be outside of the layers of this crate, with tonic the first to be added: it makes
//! of a rejection what the client in the browser understands. [`failures`] and [`successes`] find the status of a call on either side of it.
//!
//! # Examples
//!
//! In front of all services of a tonic server, per tenant, whom a proxy has checked and named:
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
//! What a client gets to see that has used up its quota:
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
