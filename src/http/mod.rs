//! Keys, responses and header fields for HTTP services: axum, hyper, and tonic with the feature `grpc`.
//!
//! Guides: [keys, proxies and CDNs](crate::guide::keys), [responses](crate::guide::responses), [order of layers](crate::guide::order),
//! [troubleshooting](crate::guide::troubleshooting).
//!
//! # Keys
//!
//! | extractor | the key of a request |
//! | --- | --- |
//! | [`peer_ip`] | the address of the peer |
//! | [`ClientIp`] | the address of the client, also behind proxies |
//! | [`header`] | a digest of the value of a header |
//! | [`bearer_token`] | a digest of the bearer token |
//! | [`basic_user`] | a digest of the user name of Basic authentication |
//! | `matched_path` (feature `axum`) | the route |
//!
//! [`header`] counts by API key or session, and [`peer_ip`] by the address of the peer, which is the other end of the connection. The server
//! must put this address into the extensions of each request:
//!
//! * With axum, enable the feature `axum` and serve with `into_make_service_with_connect_info::<SocketAddr>()`.
//! * With tonic, add the layer that the docs of the module `grpc` show.
//! * With any other server, insert a [`PeerAddr`].
//!
//! A header value is the client's claim. Until something checks it, each key that a client invents has its own quota and its own entry in
//! the store. So put the layer behind the authentication, or [add a limit](crate::RateLimitLayer::and) for the address:
//!
//! ```
//! use tollgate::http::{header, peer_ip};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
//!
//! let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//! let address = Policy::new("address", Quota::per_minute(500).fixed_window());
//! let layer = RateLimitLayer::new(MemoryBackend::new(), policy)
//!     .key(header("x-api-key").or(peer_ip()))
//!     .and(address, peer_ip());
//! ```
//!
//! Behind a proxy the peer is the proxy, and the client may have forged the forwarding header. [`ClientIp`] trusts only the proxies you
//! list: give it their networks and the header that they write. Do not use [`header`] with a forwarding header, because then each client
//! chooses its own key.
//!
//! | in front of the service | key |
//! | --- | --- |
//! | nothing | [`peer_ip`] or [`ClientIp::peer`]. Both log a warning if requests come from a proxy; [`peer_ip`] only if the address of the proxy is private |
//! | proxies that append to `X-Forwarded-For` | `ClientIp::trusting(nets)` |
//! | proxies that append to `Forwarded` | `ClientIp::trusting(nets).header(ForwardingHeader::Forwarded)` |
//! | a CDN with its own header | `ClientIp::trusting(nets).single_header("cf-connecting-ip")` |
//! | proxies whose networks you cannot list | [`ClientIp::trusting_hops`], which has a risk |
//!
//! | setter of [`ClientIp`] | default | meaning |
//! | --- | --- | --- |
//! | [`header`](ClientIp::header), [`single_header`](ClientIp::single_header) | [`ForwardingHeader::XForwardedFor`] | the header that your proxies write |
//! | [`on_unreadable`](ClientIp::on_unreadable) | [`OnUnreadable::Proxy`] | the key if a trusted proxy wrote no address |
//! | [`ipv6_prefix`](ClientIp::ipv6_prefix) | 64 | the bits of an IPv6 address in the key |
//!
//! For credentials use [`bearer_token`] and [`basic_user`]. `header("authorization")` would give a client a quota for each spelling of the
//! scheme, and for each password that it tries.
//!
//! ## Proxies and their headers
//!
//! Each row gives the default of the proxy, as its vendor documents it. Trust the networks of the proxy, and check the value that arrives at
//! your service, because most of these products have settings that change it.
//!
//! | proxy | header and form | setting |
//! | --- | --- | --- |
//! | [Amazon CloudFront][cloudfront] | `CloudFront-Viewer-Address`: `198.51.100.10:46532`, IPv6 without brackets; only with an origin request policy | `.single_header("cloudfront-viewer-address")` |
//! | [AWS Application Load Balancer][alb] | appends `ip` to `X-Forwarded-For`, or `ip:port` with client port preservation; do not set its mode to `preserve` | the default |
//! | [Azure Front Door][afd] | `X-Azure-SocketIP`: the address of the connection. A client may forge `X-Azure-ClientIP`. Check that `X-Azure-FDID` is the ID of your Front Door | `.single_header("x-azure-socketip")` |
//! | [Azure Application Gateway][appgw] | appends `ip:port` to `X-Forwarded-For` | the default |
//! | [Google Cloud load balancers][google] | append `<client>,<load balancer>` to `X-Forwarded-For`; trust the load balancer's own address, too | the default, or `trusting_hops(2)` |
//! | [Fastly][fastly] | `Fastly-Client-IP`: one address, which a client may set unless your VCL sets it | `.single_header("fastly-client-ip")` |
//! | [Cloudflare][cloudflare] | `CF-Connecting-IP`: one address | `.single_header("cf-connecting-ip")` |
//! | [Akamai][akamai] | `True-Client-IP`: one address, if the property is configured for it | `.single_header("true-client-ip")` |
//! | [Envoy][envoy] | appends `ip` to `X-Forwarded-For` with `use_remote_address`; `X-Envoy-External-Address` is one address | the default, or `.single_header("x-envoy-external-address")` |
//! | [nginx][nginx] | appends `ip` with `proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for`, and nothing without it | the default |
//! | [HAProxy][haproxy] | adds a line of `X-Forwarded-For` with `option forwardfor`, or of `Forwarded` with `option forwarded` | the default, or `.header(ForwardingHeader::Forwarded)` |
//!
//! [cloudfront]: https://docs.aws.amazon.com/AmazonCloudFront/latest/DeveloperGuide/adding-cloudfront-headers.html
//! [alb]: https://docs.aws.amazon.com/elasticloadbalancing/latest/application/x-forwarded-headers.html
//! [afd]: https://learn.microsoft.com/en-us/azure/frontdoor/front-door-http-headers-protocol
//! [appgw]: https://learn.microsoft.com/en-us/azure/application-gateway/rewrite-http-headers-url
//! [google]: https://cloud.google.com/load-balancing/docs/https
//! [fastly]: https://www.fastly.com/documentation/reference/http/http-headers/Fastly-Client-IP/
//! [cloudflare]: https://developers.cloudflare.com/fundamentals/reference/http-headers/
//! [akamai]: https://techdocs.akamai.com/property-mgr/docs/configure-unique-origin
//! [envoy]: https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_conn_man/headers#x-forwarded-for
//! [nginx]: https://nginx.org/en/docs/http/ngx_http_proxy_module.html#var_proxy_add_x_forwarded_for
//! [haproxy]: https://docs.haproxy.org/3.2/configuration.html#4.2-option%20forwardfor
//!
//! If a trusted proxy writes a value without an address, the request counts under the address of the proxy. [`ClientIp::on_unreadable`] can
//! reject it instead. Watch this metric after you have set up a proxy (feature `metrics`):
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_unreadable_client_addresses_total` | `header` | requests in which a trusted proxy wrote no readable client address |
//!
//! # Responses
//!
//! | case | status | problem | fields |
//! | --- | --- | --- | --- |
//! | allowed | status of the inner service | | `RateLimit-Policy`, `RateLimit` |
//! | over the limit | 429 | [`#quota-exceeded`] | `Retry-After`, `RateLimit-Policy`, `RateLimit` |
//! | key is [blocked](crate::Limiter::block) | 429 | [`#abnormal-usage-detected`] | `Retry-After`, `RateLimit-Policy`, `RateLimit` |
//! | costs more than the quota | 429 | [`#quota-exceeded`] | `RateLimit-Policy`; no wait helps, so no `Retry-After` |
//! | on the deny list | 403 | `about:blank` | `RateLimit-Policy` |
//! | no key ([`OnMissingKey::Reject`](crate::OnMissingKey::Reject)) | 400 | `about:blank`; in debug builds `detail` names the extension that the server has not set | `RateLimit-Policy` |
//! | store failed ([`RateLimitFallback::Deny`](crate::RateLimitFallback::Deny)) | 503 | [`#temporary-reduced-capacity`] | `Retry-After: 1`, `RateLimit-Policy` |
//! | passed without a decision | status of the inner service | | `RateLimit-Policy` |
//!
//! The body of a rejection is a problem document (RFC 9457) with `type`, `title`, `status` and `detail`. The registered types also have
//! `violated-policies`, the names of the violated limits, which may be empty.
//!
//! If [several policies](crate::RateLimitLayer::and) deny a request, `violated-policies` names the limits of all of them, and `Retry-After`
//! is the longest of their waits. `type` and `detail` describe the policy with that wait. No response contains the text of a store error.
//!
//! ```json
//! {
//!   "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
//!   "title": "Request cannot be satisfied as assigned quota has been exceeded",
//!   "status": 429,
//!   "detail": "rate limit `api` exceeded, try again in 18 s",
//!   "violated-policies": ["api-1m"]
//! }
//! ```
//!
//! `api-1m` is the limit with the window of one minute in the policy `api`, which has several limits. A single limit has the name of its
//! policy.
//!
//! ## Large uploads
//!
//! A layer rejects a request before it reads the body. Over HTTP/1 the server then closes the connection, and a client that is still sending
//! gets a broken pipe or a reset. A client that gives up there never reads the 429, although it has arrived. With axum on loopback, an
//! upload of 64 MiB fails this way, and an upload of 1 MiB fits into the buffers of the connection. For routes with large bodies:
//!
//! * Let clients send `Expect: 100-continue`, as curl does, and wait for the response before they send the body.
//! * Let clients read the response even if writing has failed.
//! * Or let a proxy in front read the whole request first, as nginx does by default (`proxy_request_buffering on`).
//!
//! [`HttpResponder`](crate::HttpResponder) has the settings: other header fields, plain text, jitter, partition keys. Its
//! [`map_rejection`](crate::HttpResponder::map_rejection) takes a closure for your own status, fields and body. A handler that calls a
//! [`Limiter`](crate::Limiter) creates the same response with [`HttpResponder::respond_to`](crate::HttpResponder::respond_to).
//!
//! [`#quota-exceeded`]: https://iana.org/assignments/http-problem-types#quota-exceeded
//! [`#abnormal-usage-detected`]: https://iana.org/assignments/http-problem-types#abnormal-usage-detected
//! [`#temporary-reduced-capacity`]: https://iana.org/assignments/http-problem-types#temporary-reduced-capacity
//!
//! ## Header fields
//!
//! By [default](crate::responder::HeaderVersion) the fields follow draft-ietf-httpapi-ratelimit-headers-10. Each limit of the policy is a
//! member, under its [name](crate::Policy::limit_names) for clients:
//!
//! ```text
//! RateLimit-Policy: "api-1m";q=100;w=60, "api-1d";q=5000;w=86400
//! RateLimit: "api-1m";r=42;t=18, "api-1d";r=3007;t=40211
//! ```
//!
//! | parameter | meaning | omitted |
//! | --- | --- | --- |
//! | `q` | [the maximum number of units at once](crate::rate_limit::Limit::capacity) | |
//! | `w` | [the seconds](crate::rate_limit::Limit::period) in which all units become available again | if not a whole number of seconds |
//! | `r` | the remaining units | |
//! | `t` | the seconds until more units become available, rounded up | if all units are available |
//! | `pk` | [a keyed digest](crate::HttpResponder::partition_secret) of the key | unless you set a secret |
//!
//! `Retry-After` (RFC 9110) is rounded up and never 0. It is the time until *all* limits have room for a request of this cost. So it is
//! never earlier than the `t` of a violated limit: `t` is the time until the first units, and the request may need more. The `t` of a limit
//! that has room may be later, and does not matter for the retry.
//!
//! | [`HeaderVersion`](crate::responder::HeaderVersion) | fields for two limits |
//! | --- | --- |
//! | `Draft10` (default) | as above |
//! | `Draft7` | `RateLimit-Policy: 100;w=60, 5000;w=86400`, `RateLimit: limit=100, remaining=42, reset=18` |
//! | `Draft6` | the same policy, `RateLimit-Limit: 100`, `RateLimit-Remaining: 42`, `RateLimit-Reset: 18` |
//! | `LegacyDelta` | `X-RateLimit-Limit: 100`, `X-RateLimit-Remaining: 42`, `X-RateLimit-Reset: 18` |
//! | `LegacyEpoch` | the same, but `X-RateLimit-Reset: 1767225618` |
//!
//! Nested layers each add a line to fields that are lists. A field with one value keeps the value of the tightest limit.
//!
//! ## If the inner service is a proxy
//!
//! If the inner service is a proxy, a response may have the rate-limit fields of its upstream. Their names begin with `RateLimit`,
//! `X-RateLimit` or `X-Rate-Limit`. All fields of a response come from one source, which you choose with
//! [`UpstreamFields`](crate::responder::UpstreamFields):
//!
//! | setting of [`HttpResponder::upstream_fields`](crate::HttpResponder::upstream_fields) | the response has |
//! | --- | --- |
//! | `Replace` (default) | the fields of the layers |
//! | `KeepTighter` | the fields of the source with fewer remaining units or, if equal, the later reset; the fields of the layers if the upstream's cannot be parsed or there is no decision |
//! | `Keep` | the fields of the upstream, if it sends any |
//!
//! A number of at least 1,000,000,000 in `X-RateLimit-Reset` is read as seconds since 1970, and a number of at least 100,000,000,000 as
//! milliseconds.
//!
//! The `Retry-After` of the upstream stays unchanged, because it belongs to the status. A layer that sends no fields (`.headers([])`) keeps
//! those of the upstream.
//!
//! # Browsers
//!
//! Before a page may send `X-Api-Key` or `Idempotency-Key` to another origin, the browser sends a preflight (`OPTIONS`) without these
//! headers. A layer that requires a key responds with 400, and the page sees only a failed connection. The same happens if a 429 has no CORS
//! headers.
//!
//! So make the CORS layer the outermost. With axum, add it last. It answers preflights itself and adds its headers to rejections. Expose
//! [`EXPOSED_HEADERS`] so that pages can read these fields, and allow `Content-Type` so that pages can send JSON. With tower-http:
//!
//! ```
//! use axum::{Router, body::Body, http::Request, routing::post};
//! use http::header::{CONTENT_TYPE, HeaderName};
//! use tollgate::http::{EXPOSED_HEADERS, header};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::ServiceExt;
//! use tower_http::cors::CorsLayer;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//! let names = ["x-api-key", "idempotency-key"].map(HeaderName::from_static);
//! let cors = CorsLayer::new()
//!     .allow_origin(["https://shop.example".parse()?])
//!     .allow_headers([CONTENT_TYPE].into_iter().chain(names).collect::<Vec<_>>())
//!     .expose_headers(EXPOSED_HEADERS);
//! let app: Router = Router::new()
//!     .route("/orders", post(async || "ordered"))
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).key(header("x-api-key")))
//!     .layer(cors);
//!
//! let preflight = Request::options("/orders")
//!     .header("origin", "https://shop.example")
//!     .header("access-control-request-method", "POST")
//!     .header("access-control-request-headers", "content-type,x-api-key");
//! let response = app.clone().oneshot(preflight.body(Body::empty())?).await?;
//! assert_eq!(response.status(), 200);
//! assert_eq!(response.headers()["access-control-allow-headers"], "content-type,x-api-key,idempotency-key");
//!
//! let without_key = Request::post("/orders").header("origin", "https://shop.example").body(Body::empty())?;
//! let response = app.oneshot(without_key).await?;
//! assert_eq!(response.status(), 400);
//! assert_eq!(response.headers()["access-control-allow-origin"], "https://shop.example");
//! # Ok(())
//! # }
//! ```
//!
//! # Examples
//!
//! Counting by API key, behind an authentication layer:
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
//!     // .layer(..), which rejects invented keys before they are counted
//!
//! let response = app.oneshot(Request::get("/").header("x-api-key", "k1").body(Body::empty())?).await?;
//! assert_eq!(response.headers()["ratelimit-policy"], r#""api";q=100;w=60"#);
//! assert_eq!(response.headers()["ratelimit"], r#""api";r=99;t=60"#);
//! # Ok(())
//! # }
//! ```
//!
//! With additional fields for old clients, up to ten seconds of jitter, and partition keys:
//!
//! ```
//! use std::time::Duration;
//! use axum::{Router, body::Body, http::Request, routing::get};
//! use tollgate::responder::HeaderVersion::{Draft10, LegacyDelta};
//! use tollgate::{HttpResponder, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! # let secret = [7; 32];
//! let responder = HttpResponder::new()
//!     .headers([Draft10, LegacyDelta])
//!     .retry_jitter(Duration::from_secs(10))
//!     .partition_secret(secret); // 16 bytes or more, and the same in all processes
//! let policy = Policy::new("api", Quota::per_minute(100).fixed_window()).limit(Quota::per_day(5_000).sliding_window());
//! let app: Router = Router::new()
//!     .route("/", get(async || "hello"))
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(responder));
//!
//! let response = app.oneshot(Request::get("/").body(Body::empty())?).await?;
//! let policy = response.headers()["ratelimit-policy"].to_str()?;
//! assert!(policy.starts_with(r#""api-1m";q=100;w=60"#) && policy.contains(r#", "api-1d";q=5000;w=86400"#));
//! assert_eq!(response.headers()["x-ratelimit-remaining"], "99");
//! # Ok(())
//! # }
//! ```
//!
//! Counting by address, in a server that inserts [`PeerAddr`]:
//!
//! ```
//! use http::{Request, Response, StatusCode};
//! use tollgate::http::{PeerAddr, peer_ip};
//! use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).key(peer_ip()))
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
//! Behind a load balancer in `10.0.0.0/8`, with an office network that is not limited:
//!
//! ```
//! use http::{Request, Response, StatusCode};
//! use tollgate::http::{ClientIp, PeerAddr};
//! use tollgate::{ExtractKey, Key, MemoryBackend, OnMissingKey, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let by_ip = ClientIp::trusting(["10.0.0.0/8".parse()?]);
//! let is_office = by_ip.within(["198.51.100.0/24".parse()?]);
//! let key = move |request: &Request<String>| -> Option<Key> {
//!     if is_office(request) { None } else { by_ip.extract_key(request) }
//! };
//!
//! let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).key(key).on_missing_key(OnMissingKey::Pass))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, tollgate::BoxError>(Response::new(String::new()))));
//!
//! let send = async |forwarded_for: &str| {
//!     let balancer = PeerAddr("10.0.0.1:4711".parse()?);
//!     let request = Request::builder().extension(balancer).header("x-forwarded-for", forwarded_for);
//!     let response = service.clone().oneshot(request.body(String::new())?).await?;
//!     Ok::<_, tollgate::BoxError>(response.status())
//! };
//! assert_eq!(send("203.0.113.7").await?, StatusCode::OK);
//! assert_eq!(send("6.6.6.6, 203.0.113.7").await?, StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(send("198.51.100.7").await?, StatusCode::OK);
//! assert_eq!(send("198.51.100.7").await?, StatusCode::OK);
//! # Ok(())
//! # }
//! ```

mod address;
mod authorization;
mod body;
mod cache;
mod charge;
mod client_ip;
mod client_ip_log;
#[cfg(feature = "axum")]
mod extract;
mod forwarded;
mod forwarding_header;
mod headers;
mod idempotency;
mod key;
mod lock;
mod not_executed;
mod problem;
mod rejection;
mod responder;
pub(crate) mod same_body;
mod upstream;

pub use self::authorization::{BasicUserKey, BearerTokenKey, basic_user, bearer_token};
pub use self::body::{Never, ResponseBody};
pub use self::cache::{CacheFuture, CacheLayer, CacheService, CachedBody, Undecided};
#[cfg(feature = "grpc")]
pub(crate) use self::charge::AtEnd;
pub use self::charge::{ChargeStatus, failures, successes};
#[cfg(feature = "config")]
pub(crate) use self::client_ip::contain_entire_family;
pub use self::client_ip::{ClientIp, OnUnreadable};
#[cfg(feature = "axum")]
pub use self::extract::{MatchedPathKey, matched_path};
pub use self::forwarding_header::ForwardingHeader;
pub use self::headers::EXPOSED_HEADERS;
pub use self::idempotency::{
    FingerprintedBody, Idempotency, IdempotencyFuture, IdempotencyLayer, IdempotentBody, Unscoped,
};
pub use self::key::{HeaderKey, PeerAddr, PeerIp, header, peer_ip};
pub use self::lock::{LOCK_FENCE, LockedBody, lock_fence};
pub use self::rejection::{HttpRejection, MapRejection};
pub use ::ipnet::IpNet;

#[cfg(feature = "grpc")]
pub(crate) use self::not_executed::declare_rejection;
#[cfg(feature = "grpc")]
pub(crate) use self::responder::{STORE_RETRY, STORE_TEXT, insert_decision, respond_to};
#[cfg(feature = "grpc")]
pub(crate) use self::upstream::annotate;
