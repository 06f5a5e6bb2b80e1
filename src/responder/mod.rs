//! Responders turn rejections into responses or errors.
//!
//! The crate has [`HttpResponder`], [`ErrorResponder`] and, for jobs, [`JobResponder`](crate::delay_queue::JobResponder). With the feature
//! `grpc` it has `GrpcResponder`. The docs of the module `tollgate::http` describe the responses and their options.
//!
//! # Examples
//!
//! A service that is not an HTTP service returns an error, which you can downcast:
//!
//! ```
//! use tollgate::rate_limit::RateLimited;
//! use tollgate::{ErrorResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let policy = Policy::new("jobs", Quota::per_minute(0).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(ErrorResponder))
//!     .service(service_fn(async |job: u32| Ok::<_, BoxError>(job)));
//!
//! let error = service.oneshot(7).await.unwrap_err();
//! assert_eq!(error.downcast::<RateLimited>()?.policy(), "jobs");
//! # Ok(())
//! # }
//! ```
//!
//! An HTTP service by default responds with a problem document and the newest header fields. Here it uses older fields and plain text:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use http::{Request, Response};
//! use tollgate::responder::{HeaderVersion, RejectionBody};
//! use tollgate::{HttpResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let responder = HttpResponder::new().headers([HeaderVersion::LegacyDelta]).body(RejectionBody::PlainText);
//! let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(responder))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, BoxError>(Response::new(String::new()))));
//!
//! let response = service.oneshot(Request::new(String::new())).await?;
//! assert_eq!(response.headers()["x-ratelimit-limit"], "1");
//! assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! For your own status, header fields or body, pass a closure to [`HttpResponder::map_rejection`]. Here a lock and a rate limit share one
//! JSON body:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{Router, routing::post};
//! use bytes::Bytes;
//! use http::Response;
//! use tollgate::{GlobalKey, HttpResponder, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tollgate::{lock, rate_limit};
//!
//! fn json(response: Response<Bytes>) -> Response<Bytes> {
//!     let body = format!(r#"{{"error":{}}}"#, response.status().as_u16());
//!     response.map(|_| body.into())
//! }
//!
//! let backend = MemoryBackend::new();
//! let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//! let limit = RateLimitLayer::new(backend.clone(), policy)
//!     .responder(HttpResponder::new().map_rejection(|_: &rate_limit::Rejection, response| json(response)));
//! let lock = LockLayer::new(backend, "payments")
//!     .key(GlobalKey)
//!     .responder(HttpResponder::new().map_rejection(|_: &lock::Rejection, response| json(response)));
//! let app: Router = Router::new().route("/", post(async || "paid")).layer(lock).layer(limit);
//! # }
//! ```
//!
//! A service that is not an HTTP service and needs a response instead of an error implements [`Responder`]. A rate limit also needs
//! [`AnnotateResponse`](crate::rate_limit::AnnotateResponse), and a lock [`BindLease`](crate::lock::BindLease).

use std::fmt;
#[cfg(feature = "http")]
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "http")]
use hmac::{Hmac, Mac};
#[cfg(feature = "http")]
use sha2::Sha256;

use crate::error::BoxError;
#[cfg(feature = "http")]
pub use crate::http::same_body::SameBody;

/// Turns rejections into responses or errors, and converts the results of the inner service.
///
/// A layer's type has its responder as a parameter. The crate has [`HttpResponder`], which is the default and needs the feature `http`, and
/// [`ErrorResponder`].
///
/// `R` is the rejection. `Res` and `E` are the response and the error of the inner service.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot turn `{R}` into a response of a service that responds with `{Res}`",
    note = "the default responds with an HTTP response (feature `http`); for other services call `.responder(ErrorResponder)`"
)]
pub trait Responder<R, Res, E> {
    /// The response of the service with the layer.
    type Response;
    /// The error of the service with the layer.
    type Error;

    /// Turns a rejection into a response or an error.
    fn reject(&self, rejection: R) -> Result<Self::Response, Self::Error>;

    /// Converts a response of the inner service.
    fn response(&self, response: Res) -> Self::Response;

    /// Converts an error of the inner service.
    fn error(&self, error: E) -> Self::Error;
}

/// Turns rejections into errors of type [`BoxError`], which you can downcast. Errors of the inner service are boxed, too.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorResponder;

impl<R, Res, E> Responder<R, Res, E> for ErrorResponder
where
    R: Into<BoxError>,
    E: Into<BoxError>,
{
    type Response = Res;
    type Error = BoxError;

    fn reject(&self, rejection: R) -> Result<Res, BoxError> {
        Err(rejection.into())
    }

    fn response(&self, response: Res) -> Res {
        response
    }

    fn error(&self, error: E) -> BoxError {
        error.into()
    }
}

/// An extension of a response: the request was rejected, and nothing was executed.
///
/// An outer [`IdempotencyLayer`](crate::http::IdempotencyLayer) does not store such a response, whatever its
/// [`ResponsePolicy`](crate::idempotency::ResponsePolicy), so the next request with the same key is executed. [`HttpResponder`] and
/// `GrpcResponder` insert the extension into rejections, but not into the responses of [`respond_to`](HttpResponder::respond_to). Your own
/// responders, layers and handlers can insert it, too.
///
/// Extensions are not sent over a connection. So rejections by locks and idempotency also have the header field `Tollgate-Rejected: true`,
/// which an `IdempotencyLayer` in a gateway reads. Rejections by rate limits do not have it: by default, a
/// response with the status 403, 429 or 503 is not stored. Your own rejections may have the field, too.
///
/// ```
/// use axum::Extension;
/// use axum::response::IntoResponse;
/// use http::StatusCode;
/// use tollgate::responder::NotExecuted;
///
/// async fn pay() -> impl IntoResponse {
///     (StatusCode::CONFLICT, Extension(NotExecuted), "the shop is closed")
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(pay));
/// ```
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NotExecuted;

/// An extension of a response: the outcome of the request is unknown.
///
/// A handler inserts it if it called another service and got no reply in time. Then an outer
/// [`IdempotencyLayer`](crate::http::IdempotencyLayer) neither stores the response nor releases the operation, whatever the status and the
/// [`ResponsePolicy`](crate::idempotency::ResponsePolicy). The client gets the response. The operation stays in flight until its lease
/// expires. After that its outcome is unknown, and [`OnUnknown`](crate::idempotency::OnUnknown) applies. If a response also has
/// [`NotExecuted`], this extension takes precedence.
///
/// ```
/// use axum::Extension;
/// use axum::response::IntoResponse;
/// use http::StatusCode;
/// use tollgate::responder::OutcomeUnknown;
///
/// async fn pay() -> impl IntoResponse {
///     (StatusCode::GATEWAY_TIMEOUT, Extension(OutcomeUnknown), "the bank does not answer")
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(pay));
/// ```
///
/// It works in the same way with gRPC. A handler cannot attach extensions to a `tonic::Status`, so a layer between the handler and the
/// `IdempotencyLayer` inserts it:
///
/// ```
/// use tollgate::responder::OutcomeUnknown;
/// use tonic::{Code, Status};
///
/// fn mark_unknown<B>(mut response: http::Response<B>) -> http::Response<B> {
///     if response.extensions().get::<Status>().is_some_and(|status| status.code() == Code::DeadlineExceeded) {
///         response.extensions_mut().insert(OutcomeUnknown);
///     }
///     response
/// }
/// # type Body = tonic::body::Body;
/// let layer = tower::util::MapResponseLayer::new(mark_unknown::<Body>);
/// # drop(layer);
/// ```
///
/// Operations that are not requests use [`Failed::outcome_unknown`](crate::idempotency::Failed::outcome_unknown).
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeUnknown;

/// Turns rejections into HTTP responses, so the service fails only if the inner service fails.
///
/// Needs the feature `http`. See the module `tollgate::http` for the responses. Cheap to clone.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "settings that only the feature http reads"))]
pub struct HttpResponder {
    pub(crate) fields: HeaderConfig,
    // In seconds.
    pub(crate) retry_jitter: u32,
    pub(crate) body: RejectionBody,
    pub(crate) busy: BusyStatus,
}

impl HttpResponder {
    /// Creates a responder with the newest header fields, an exact `Retry-After` and a problem document.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the versions of the rate-limit header fields; `[]` for none. Defaults to [`[HeaderVersion::Draft10]`](HeaderVersion::Draft10).
    #[must_use]
    pub fn headers(mut self, versions: impl IntoIterator<Item = HeaderVersion>) -> Self {
        self.fields.versions = versions.into_iter().collect();
        self
    }

    /// Sets the source of the rate-limit fields if the response of the inner service, such as a proxy, already has some. Defaults to
    /// [`UpstreamFields::Replace`].
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use http::{Request, Response};
    /// use tollgate::responder::UpstreamFields;
    /// use tollgate::{HttpResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// // The upstream has fewer remaining units than the layer.
    /// let proxy = service_fn(async |_: Request<String>| {
    ///     let response = Response::builder().header("x-ratelimit-remaining", "7").header("x-ratelimit-reset", "30");
    ///     Ok::<_, BoxError>(response.body(String::new())?)
    /// });
    /// let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
    /// let layer = RateLimitLayer::new(MemoryBackend::new(), policy);
    ///
    /// let response = layer.clone().layer(proxy.clone()).oneshot(Request::new(String::new())).await?;
    /// assert!(response.headers().contains_key("ratelimit") && !response.headers().contains_key("x-ratelimit-reset"));
    ///
    /// let tighter = layer.responder(HttpResponder::new().upstream_fields(UpstreamFields::KeepTighter));
    /// let response = tighter.layer(proxy).oneshot(Request::new(String::new())).await?;
    /// assert!(!response.headers().contains_key("ratelimit") && response.headers()["x-ratelimit-remaining"] == "7");
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    #[must_use]
    pub const fn upstream_fields(mut self, fields: UpstreamFields) -> Self {
        self.fields.upstream = fields;
        self
    }

    /// Sends the client its partition key, the parameter `pk` of [`HeaderVersion::Draft10`]. Defaults to no partition key.
    ///
    /// Requests with the same partition key share a quota. It is the first half of the HMAC-SHA-256 of the [`Key`](crate::Key) under
    /// `secret`. So it is the same in all processes with the same secret, and the key cannot be guessed without the secret. A plain digest
    /// of an IP address could be reversed by trying all addresses.
    ///
    /// # Panics
    ///
    /// If the secret has fewer than 16 bytes.
    #[must_use]
    #[cfg(feature = "http")]
    pub fn partition_secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.fields.secret = Some(PartitionKeyMac::new(secret.as_ref()));
        self
    }

    /// Whether layers insert extensions into requests and responses. Defaults to true. Without extensions a request needs fewer allocations.
    ///
    /// A rate limit inserts a [`RateLimitHandle`](crate::rate_limit::RateLimitHandle) with the [`Decision`](crate::rate_limit::Decision)
    /// into the request, and the decision into the response. With several policies or layers, the response has the strictest decision,
    /// without the name of its policy. The `RateLimit` field of [draft 10](HeaderVersion::Draft10) has all limits with their names. A
    /// [`LockLayer`](crate::LockLayer) inserts its [`LeaseHandle`](crate::lock::LeaseHandle) into the request.
    #[must_use]
    pub const fn extensions(mut self, extensions: bool) -> Self {
        self.fields.no_extensions = !extensions;
        self
    }

    /// Adds a random number of whole seconds of up to `max` to `Retry-After`, so that clients that were rejected together do not retry
    /// together. Defaults to zero.
    ///
    /// `Retry-After` is never shorter than the wait. A `max` of less than a second has no effect.
    #[must_use]
    pub const fn retry_jitter(mut self, max: Duration) -> Self {
        let seconds = max.as_secs();
        self.retry_jitter = if seconds > u32::MAX as u64 { u32::MAX } else { seconds as u32 };
        self
    }

    /// Sets the format of the body of a rejection. Defaults to [`RejectionBody::Problem`].
    #[must_use]
    pub const fn body(mut self, body: RejectionBody) -> Self {
        self.body = body;
        self
    }

    /// Sets the status of a request whose lock is held by another request. Defaults to [`BusyStatus::Conflict`].
    #[must_use]
    pub const fn busy(mut self, status: BusyStatus) -> Self {
        self.busy = status;
        self
    }

    /// Keeps the body type of the inner service: see [`SameBody`].
    #[must_use]
    #[cfg(feature = "http")]
    pub const fn same_body(self) -> SameBody<Self> {
        SameBody::new(self)
    }
}

/// The status of a request whose lock is held by another request. Defaults to [`Conflict`](Self::Conflict).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BusyStatus {
    /// 409: the request conflicts with a request in progress.
    #[default]
    Conflict,
    /// 423: used by WebDAV and resumable uploads.
    Locked,
    /// 429: clients of some payment services retry this status.
    TooManyRequests,
}

/// The format of the body of a rejection. Defaults to [`Problem`](Self::Problem).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectionBody {
    /// A problem document (RFC 9457), `application/problem+json`.
    #[default]
    Problem,
    /// A line of text.
    PlainText,
}

/// The versions of the rate-limit header fields.
///
/// A responder can send several versions at once, so that clients can migrate. If two versions use the same field with different contents,
/// [`Draft10`](Self::Draft10) takes precedence. So `Draft10` and `Draft7` together are `Draft10`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeaderVersion {
    /// `RateLimit-Policy: "api";q=100;w=60` and `RateLimit: "api";r=42;t=18`, with a member for each limit:
    /// draft-ietf-httpapi-ratelimit-headers-10.
    Draft10,
    /// `RateLimit-Policy: 100;w=60` and `RateLimit: limit=100, remaining=42, reset=18`:
    /// draft-ietf-httpapi-ratelimit-headers-07. With several limits, `RateLimit` has the tightest.
    Draft7,
    /// `RateLimit-Policy: 100;w=60` and `RateLimit-Limit: 100`, `RateLimit-Remaining: 42`, `RateLimit-Reset: 18`:
    /// draft-ietf-httpapi-ratelimit-headers-06. With several limits, the last three fields have the tightest.
    Draft6,
    /// `X-RateLimit-Limit: 100`, `X-RateLimit-Remaining: 42` and `X-RateLimit-Reset: 1767225618`, in seconds since 1970 by the clock of this
    /// machine. GitHub and other services use these fields. With several limits, they have the tightest.
    LegacyEpoch,
    /// Like `LegacyEpoch`, but `X-RateLimit-Reset: 18`, in seconds from now. If you set both, the last one is used.
    LegacyDelta,
}

/// The source of the rate-limit fields if the response of the inner service already has some. Defaults to [`Replace`](Self::Replace).
///
/// All fields of a response come from one source, so that a client can read them together. Fields of other layers in this process are not
/// upstream fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UpstreamFields {
    /// The layer removes the fields of the upstream and sends its own.
    #[default]
    Replace,
    /// The response has the fields of the source with fewer remaining units. The layer replaces the fields of the upstream if they cannot be
    /// parsed, or if there is no decision.
    KeepTighter,
    /// The layer adds no fields if the upstream has sent any.
    Keep,
}

/// The settings of the rate-limit header fields and extensions.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "settings that only the feature http reads"))]
pub(crate) struct HeaderConfig {
    pub(crate) no_extensions: bool,
    pub(crate) versions: HeaderVersions,
    pub(crate) upstream: UpstreamFields,
    #[cfg(feature = "http")]
    pub(crate) secret: Option<PartitionKeyMac>,
}

impl HeaderConfig {
    /// Whether responses get header fields or extensions.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) const fn annotates(&self) -> bool {
        !self.no_extensions || self.writes_headers()
    }

    /// Whether responses get header fields.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) const fn writes_headers(&self) -> bool {
        self.versions.0 != 0
    }
}

/// A set of versions, with one bit for each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeaderVersions(u8);

impl HeaderVersions {
    const fn bit(version: HeaderVersion) -> u8 {
        1 << version as u8
    }

    pub(crate) const fn contains(self, version: HeaderVersion) -> bool {
        self.0 & Self::bit(version) != 0
    }
}

impl Default for HeaderVersions {
    fn default() -> Self {
        Self(Self::bit(HeaderVersion::Draft10))
    }
}

impl FromIterator<HeaderVersion> for HeaderVersions {
    fn from_iter<I: IntoIterator<Item = HeaderVersion>>(versions: I) -> Self {
        versions.into_iter().fold(Self(0), |Self(bits), version| {
            // These two write the same fields, so the last one replaces the other.
            let replaced = match version {
                HeaderVersion::LegacyEpoch => Self::bit(HeaderVersion::LegacyDelta),
                HeaderVersion::LegacyDelta => Self::bit(HeaderVersion::LegacyEpoch),
                _ => 0,
            };
            Self(bits & !replaced | Self::bit(version))
        })
    }
}

impl fmt::Debug for HeaderVersions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use HeaderVersion::{Draft6, Draft7, Draft10, LegacyDelta, LegacyEpoch};
        let all = [Draft10, Draft7, Draft6, LegacyEpoch, LegacyDelta];
        f.debug_list().entries(all.into_iter().filter(|version| self.contains(*version))).finish()
    }
}

/// Computes partition keys. It does not keep the secret itself, and `Debug` prints nothing of it.
#[cfg(feature = "http")]
#[derive(Clone)]
pub(crate) struct PartitionKeyMac(Arc<Hmac<Sha256>>);

#[cfg(feature = "http")]
impl PartitionKeyMac {
    pub(crate) fn new(secret: &[u8]) -> Self {
        assert!(secret.len() >= 16, "a secret for partition keys must have at least 16 bytes");
        Self(Arc::new(Hmac::new_from_slice(secret).expect("HMAC accepts a key of any length")))
    }

    /// The first half of the HMAC of `text`.
    pub(crate) fn mac(&self, text: &[u8]) -> [u8; 16] {
        let mut mac = Hmac::clone(&self.0);
        mac.update(text);
        let code: [u8; 32] = mac.finalize().into_bytes().into();
        std::array::from_fn(|i| code[i])
    }
}

#[cfg(feature = "http")]
impl fmt::Debug for PartitionKeyMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PartitionKeyMac(..)")
    }
}
