//! Keys, responses and header fields for services that speak HTTP: axum, hyper, and tonic with the feature `grpc`.
//!
//! # Who is asking
//!
//! [`header`] counts per API key or session, [`peer_ip`] per address of the connection. The peer address has to be put into
//! the request by the server: axum does so with `into_make_service_with_connect_info::<SocketAddr>()` (feature `axum`), any
//! other server by inserting a [`PeerAddr`] into the extensions of each request.
//!
//! Behind a proxy the peer is the proxy, and what a forwarding header says of the client may come from the client.
//! [`ClientIp`] knows whom to believe: name the networks of your proxies, and the header that they write. Do not count by a
//! forwarding header with [`header`]: whoever sends it chooses the bucket.
//!
//! | in front of the service | key |
//! | --- | --- |
//! | nothing | [`peer_ip`] or [`ClientIp::peer`], which warns of a proxy that was forgotten |
//! | proxies that append to `X-Forwarded-For` | `ClientIp::trusting(nets)` |
//! | proxies that append to `Forwarded` | `ClientIp::trusting(nets).header(ForwardingHeader::Forwarded)` |
//! | a CDN that sets a header of its own | `ClientIp::trusting(nets).single_header("cf-connecting-ip")` |
//!
//! # What is answered
//!
//! | case | status | fields |
//! | --- | --- | --- |
//! | admitted | that of the inner service | `RateLimit-Policy`, `RateLimit` |
//! | over the limit | 429 | `Retry-After`, `RateLimit-Policy`, `RateLimit` |
//! | costs more than the quota | 429 | `RateLimit-Policy`; no wait helps, so no `Retry-After` |
//! | on the deny list | 403 | `RateLimit-Policy` |
//! | no key ([`OnMissingKey::Reject`](crate::OnMissingKey::Reject)) | 400 | `RateLimit-Policy` |
//! | store failed ([`OnStoreError::Deny`](crate::OnStoreError::Deny)) | 503 | `Retry-After: 1`, `RateLimit-Policy` |
//! | no decision, but passed | that of the inner service | `RateLimit-Policy` |
//!
//! The fields follow draft-ietf-httpapi-ratelimit-headers-10, for instance
//!
//! ```text
//! RateLimit-Policy: "api";q=100;w=60
//! RateLimit: "api";r=42;t=18
//! ```
//!
//! where `q` is the quota, `w` the window in seconds (left out when it is not a whole number of them), `r` what remains and
//! `t` the seconds until more becomes available, rounded up (left out while the whole quota is). `Retry-After` (RFC 9110) is
//! rounded up too and never 0. Layers on top of each other each add a line of their own.
//!
//! # Examples
//!
//! Counting by API key:
//!
//! ```
//! use axum::{Router, body::Body, http::Request, routing::get};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer, http::header};
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//! let app: Router = Router::new()
//!     .route("/", get(async || "hello"))
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).key(header("x-api-key")));
//!
//! let response = app.oneshot(Request::get("/").header("x-api-key", "k1").body(Body::empty())?).await?;
//! assert_eq!(response.headers()["ratelimit-policy"], r#""api";q=100;w=60"#);
//! assert_eq!(response.headers()["ratelimit"], r#""api";r=99;t=60"#);
//! # Ok(())
//! # }
//! ```
//!
//! Anonymous clients by their address, in a server that fills in [`PeerAddr`] itself:
//!
//! ```
//! use http::{Request, Response, StatusCode};
//! use tollgate::http::{PeerAddr, header, peer_ip};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).key(header("x-api-key").or(peer_ip())))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, tollgate::BoxError>(Response::new(String::new()))));
//!
//! let request = || {
//!     let peer = PeerAddr("203.0.113.7:4711".parse().unwrap());
//!     Request::builder().extension(peer).body(String::new())
//! };
//! assert_eq!(service.clone().oneshot(request()?).await?.status(), StatusCode::OK);
//! assert_eq!(service.clone().oneshot(request()?).await?.status(), StatusCode::TOO_MANY_REQUESTS);
//! # Ok(())
//! # }
//! ```
//!
//! Behind a load balancer in `10.0.0.0/8`, with a network of the house that is not limited:
//!
//! ```
//! use http::{Request, Response, StatusCode};
//! use tollgate::http::{ClientIp, PeerAddr};
//! use tollgate::{ExtractKey, Key, MemoryBackend, OnMissingKey, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let by_ip = ClientIp::trusting(["10.0.0.0/8".parse()?]);
//! let is_ours = by_ip.within(["198.51.100.0/24".parse()?]);
//! let key = move |request: &Request<String>| -> Option<Key> {
//!     if is_ours(request) { None } else { by_ip.extract_key(request) }
//! };
//!
//! let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).key(key).on_missing_key(OnMissingKey::Pass))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, tollgate::BoxError>(Response::new(String::new()))));
//!
//! let ask = async |forwarded_for: &str| {
//!     let balancer = PeerAddr("10.0.0.1:4711".parse()?);
//!     let request = Request::builder().extension(balancer).header("x-forwarded-for", forwarded_for);
//!     let response = service.clone().oneshot(request.body(String::new())?).await?;
//!     Ok::<_, tollgate::BoxError>(response.status())
//! };
//! assert_eq!(ask("203.0.113.7").await?, StatusCode::OK);
//! assert_eq!(ask("6.6.6.6, 203.0.113.7").await?, StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(ask("198.51.100.7").await?, StatusCode::OK);
//! assert_eq!(ask("198.51.100.7").await?, StatusCode::OK);
//! # Ok(())
//! # }
//! ```

mod body;
mod client_ip;
mod forwarded;
mod headers;
mod key;
mod reject;

pub use self::body::ResponseBody;
pub use self::client_ip::{ClientIp, ForwardingHeader};
pub use self::key::{HeaderKey, PeerAddr, PeerIp, header, peer_ip};
pub use ::ipnet::IpNet;

#[cfg(feature = "grpc")]
pub(crate) use self::headers::write_fields;
