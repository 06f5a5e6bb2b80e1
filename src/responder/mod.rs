//! What a layer answers when it turns a request away.
//!
//! Two answers come with the crate, [`HttpResponder`] and [`ErrorResponder`], one more for [jobs](crate::delay_queue::JobResponder), and one with the feature `grpc`. What a client reads, and
//! which of it can be chosen, is in the docs of the module `tollgate::http`.
//!
//! # Examples
//!
//! A service that does not speak HTTP gets an error to downcast:
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
//! One that does answers with a problem document and the newest header fields, unless told otherwise:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use http::{Request, Response};
//! use tollgate::responder::{HeaderVersion, RejectionBody};
//! use tollgate::{HttpResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let as_ever = HttpResponder::new().headers([HeaderVersion::LegacyDelta]).body(RejectionBody::PlainText);
//! let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(as_ever))
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
//! Any other answer is a type that implements [`Responder`] and, for a rate limit,
//! [`AnnotateResponse`](crate::rate_limit::AnnotateResponse), or for a lock [`BindLease`](crate::lock::BindLease). With a body of one's own, for instance, in an axum
//! router:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::response::{IntoResponse, Response};
//! use http::{StatusCode, header::RETRY_AFTER};
//! use tollgate::rate_limit::{AnnotateResponse, Policy, Rejection, LimitInfo};
//! use tollgate::responder::{HttpResponder, Responder};
//!
//! #[derive(Clone)]
//! struct AsJson;
//!
//! impl<E> Responder<Rejection, Response, E> for AsJson {
//!     type Response = Response;
//!     type Error = E;
//!
//!     fn reject(&self, rejection: Rejection) -> Result<Response, E> {
//!         Ok(match rejection {
//!             Rejection::Limited(limited) => {
//!                 let wait = limited.retry_after_secs().unwrap_or(3_600);
//!                 let body = r#"{"error":"slow down"}"#;
//!                 (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, wait.to_string())], body).into_response()
//!             }
//!             Rejection::MissingKey(_) => StatusCode::BAD_REQUEST.into_response(),
//!             Rejection::Denied(_) => StatusCode::FORBIDDEN.into_response(),
//!             _ => StatusCode::SERVICE_UNAVAILABLE.into_response(), // the store fails
//!         })
//!     }
//!
//!     fn response(&self, response: Response) -> Response {
//!         response
//!     }
//!
//!     fn error(&self, error: E) -> E {
//!         error
//!     }
//! }
//!
//! impl<Req> AnnotateResponse<http::Request<Req>, Response> for AsJson {
//!     fn announce(&self, standing: &LimitInfo<'_>, response: &mut Response) {
//!         AnnotateResponse::<http::Request<Req>, _>::announce(&HttpResponder::new(), standing, response); // the `RateLimit` fields
//!     }
//! }
//!
//! # use tollgate::{MemoryBackend, Quota, RateLimitLayer};
//! # let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//! let layer = RateLimitLayer::new(MemoryBackend::new(), policy).responder(AsJson);
//! # let _: axum::Router = axum::Router::new().route("/", axum::routing::get(async || "")).layer(layer);
//! # }
//! ```
//!
//! [`BindLease`](crate::lock::BindLease) says which requests need the lock and how long an answer keeps it, and a method that is left out changes what the lock protects. So
//! this one passes them on to [`HttpResponder`], with whatever else it has nothing to say about:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{body::Body, extract::Request, response::Response};
//! use bytes::Bytes;
//! use http::StatusCode;
//! use tollgate::http::LockedBody;
//! use tollgate::lock::{LeaseHandle, LockError, BindLease, Rejection, LeaseGuard};
//! use tollgate::responder::{HttpResponder, NotExecuted, Responder};
//!
//! #[derive(Clone)]
//! struct BusyAsJson(HttpResponder);
//!
//! /// Keeps the lock until its body has ended.
//! type Locked = Response<LockedBody<Body>>;
//!
//! impl<E> Responder<Rejection, Response, E> for BusyAsJson {
//!     type Response = Locked;
//!     type Error = E;
//!
//!     fn reject(&self, rejection: Rejection) -> Result<Locked, E> {
//!         if !matches!(rejection, Rejection::Lock(LockError::Busy(_))) {
//!             return self.0.reject(rejection);
//!         }
//!         let mut response = Response::new(Bytes::from_static(br#"{"error":"in use"}"#).into());
//!         *response.status_mut() = StatusCode::CONFLICT;
//!         response.extensions_mut().insert(NotExecuted);
//!         Ok(response)
//!     }
//!
//!     fn response(&self, response: Response) -> Locked {
//!         Responder::<Rejection, _, E>::response(&self.0, response)
//!     }
//!
//!     fn error(&self, error: E) -> E {
//!         error
//!     }
//! }
//!
//! impl BindLease<Request, Locked> for BusyAsJson {
//!     fn is_safe(&self, request: &Request) -> bool {
//!         BindLease::<_, Locked>::is_safe(&self.0, request)
//!     }
//!
//!     fn attach(&self, lease: LeaseHandle, request: &mut Request) {
//!         BindLease::<_, Locked>::attach(&self.0, lease, request);
//!     }
//!
//!     fn pass(&self, request: &mut Request) {
//!         BindLease::<_, Locked>::pass(&self.0, request);
//!     }
//!
//!     fn occupy(&self, stay: LeaseGuard, response: &mut Locked) {
//!         BindLease::<Request, _>::occupy(&self.0, stay, response);
//!     }
//! }
//!
//! # use axum::{Extension, Router, routing::get};
//! # use tollgate::{BoxError, LockLayer, MemoryBackend};
//! # use tower::ServiceExt;
//! # async fn pay(Extension(lease): Extension<LeaseHandle>) -> String {
//! #     lease.fence().to_string()
//! # }
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
//! let lock = LockLayer::new(MemoryBackend::new()).responder(BusyAsJson(HttpResponder::new()));
//! let app: Router = Router::new().route("/", get(async || "unpaid").post(pay)).layer(lock);
//!
//! let post = || Request::post("/").body(Body::empty());
//! let paid = app.clone().oneshot(post()?).await?;
//! assert_eq!(paid.status(), StatusCode::OK);
//! // Until its body was read nobody else may pay, and all may look.
//! assert_eq!(app.clone().oneshot(post()?).await?.status(), StatusCode::CONFLICT);
//! assert_eq!(app.clone().oneshot(Request::get("/").body(Body::empty())?).await?.status(), StatusCode::OK);
//! drop(paid);
//! assert_eq!(app.oneshot(post()?).await?.status(), StatusCode::OK);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```

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

/// Turns a rejection into what the caller of the service gets, and passes on what the inner service answered.
///
/// A layer has one of these as its last type parameter. Two come with the crate: [`HttpResponder`], which is the default and
/// needs the feature `http`, and [`ErrorResponder`].
///
/// `R` is the rejection, `Res` and `E` are the response and the error of the inner service.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot turn `{R}` into an answer of a service that answers `{Res}`",
    note = "the default answers with an HTTP response (feature `http`); for other services call `.responder(ErrorResponder)`"
)]
pub trait Responder<R, Res, E> {
    /// What the service answers behind the layer.
    type Response;
    /// What the service fails with behind the layer.
    type Error;

    /// The answer to a request that was turned away.
    fn reject(&self, rejection: R) -> Result<Self::Response, Self::Error>;

    /// What a response of the inner service is passed on as.
    fn response(&self, response: Res) -> Self::Response;

    /// What a failure of the inner service is passed on as.
    fn error(&self, error: E) -> Self::Error;
}

/// A rejection becomes an error: a [`BoxError`] to downcast, beside the errors of the inner service.
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

/// In the extensions of a response: the request was turned away, and nothing was done for it.
///
/// [`HttpResponder`] and `GrpcResponder` put it there, other than in [`answer_to`](HttpResponder::answer_to), so that an [`IdempotencyLayer`](crate::http::IdempotencyLayer) outside of the layer that has turned
/// the request away keeps no such answer, whatever it is told to [keep](crate::idempotency::ResponsePolicy): the next request with the key is served. A
/// [`Responder`] of your own, a layer or a handler that refuses can do the same.
///
/// Extensions do not pass a connection. The rejections of locks and idempotency that a client could take for an answer carry the field `Tollgate-Rejected: true`
/// as well, which says the same to a layer in a gateway. A rejection of your own may carry it, too.
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

/// In the extensions of a response: nobody knows what was done for the request.
///
/// For a handler that has asked somebody else and got no answer in time: an [`IdempotencyLayer`](crate::http::IdempotencyLayer) outside of it
/// neither keeps the response nor gives the operation back, whatever its status and whatever the layer is told to
/// [keep](crate::idempotency::ResponsePolicy). The caller gets the response. The same request is in flight until the lease has ended, and of unknown outcome then, which is
/// what [`OnUnknown`](crate::idempotency::OnUnknown) is for. With [`NotExecuted`] beside it, this one counts.
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
/// With gRPC it is the same. Where a handler answers with something that has no extensions, as the errors of tonic, a layer between puts it there:
///
/// ```
/// use tollgate::responder::OutcomeUnknown;
/// use tonic::{Code, Status};
///
/// fn note<B>(mut response: http::Response<B>) -> http::Response<B> {
///     if response.extensions().get::<Status>().is_some_and(|status| status.code() == Code::DeadlineExceeded) {
///         response.extensions_mut().insert(OutcomeUnknown);
///     }
///     response
/// }
/// # type Body = tonic::body::Body;
/// let layer = tower::util::MapResponseLayer::new(note::<Body>);
/// # drop(layer);
/// ```
///
/// What is no request says it with [`Failed::outcome_unknown`](crate::idempotency::Failed::outcome_unknown).
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeUnknown;

/// A rejection becomes an HTTP response, so the service fails only where the inner service does.
///
/// Implemented with the feature `http`; see the module `tollgate::http` for the responses. Cheap to clone.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "settings of what is written with that feature"))]
pub struct HttpResponder {
    pub(crate) fields: HeaderConfig,
    // In seconds.
    pub(crate) retry_jitter: u32,
    pub(crate) body: RejectionBody,
    pub(crate) busy: BusyStatus,
}

impl HttpResponder {
    /// With the newest header fields, an exact `Retry-After` and a problem document.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Which header fields tell the client how its limits stand; `[]` for none. Defaults to
    /// [`[HeaderVersion::Draft10]`](HeaderVersion::Draft10).
    #[must_use]
    pub fn headers(mut self, versions: impl IntoIterator<Item = HeaderVersion>) -> Self {
        self.fields.versions = versions.into_iter().collect();
        self
    }

    /// Whose rate-limit fields a response has if the inner service, a proxy for instance, has sent some. Defaults to [`UpstreamFields::Replace`].
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use http::{Request, Response};
    /// use tollgate::responder::UpstreamFields;
    /// use tollgate::{HttpResponder, BoxError, MemoryBackend, Policy, Quota, RateLimitLayer};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// // The upstream has less left than the layer.
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

    /// Tells the client its partition key, the parameter `pk` of [`HeaderVersion::Draft10`]. Defaults to not telling it.
    ///
    /// The partition key says which of its requests count together. It is the first half of the HMAC-SHA-256 of the
    /// [`Key`](crate::Key) under `secret`: the same in all replicas that are given the same secret, and nothing that the
    /// key could be guessed from without it. A plain digest of an IP address could be turned back by trying them all.
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

    /// Whether requests carry a [`RateLimitHandle`](crate::rate_limit::RateLimitHandle) in their extensions, which knows the
    /// [`Decision`](crate::rate_limit::Decision), and responses the decision itself: of several policies and layers the one that restricts most.
    /// Of which policy that is it does not say: those who need to know find all of them, each with its name, in the `RateLimit` field of
    /// [draft 10](HeaderVersion::Draft10). Defaults to true; without it a request costs some allocations less. A [`LockLayer`](crate::LockLayer) that is told not to does not leave its
    /// [`LeaseHandle`](crate::lock::LeaseHandle) in them either.
    #[must_use]
    pub const fn extensions(mut self, extensions: bool) -> Self {
        self.fields.no_extensions = !extensions;
        self
    }

    /// Adds a random number of whole seconds to `Retry-After`, up to this many, so that clients who were turned away
    /// together do not come back together. Defaults to zero.
    ///
    /// What is told is never less than the true wait. Less than a second changes nothing.
    #[must_use]
    pub const fn retry_jitter(mut self, most: Duration) -> Self {
        let seconds = most.as_secs();
        self.retry_jitter = if seconds > u32::MAX as u64 { u32::MAX } else { seconds as u32 };
        self
    }

    /// What is in the body of a rejection. Defaults to [`RejectionBody::Problem`].
    #[must_use]
    pub const fn body(mut self, body: RejectionBody) -> Self {
        self.body = body;
        self
    }

    /// The status of a request whose lock somebody else holds. Defaults to [`BusyStatus::Conflict`].
    #[must_use]
    pub const fn busy(mut self, status: BusyStatus) -> Self {
        self.busy = status;
        self
    }

    /// The same answers with a body of the type that the inner service has: see [`SameBody`].
    #[must_use]
    #[cfg(feature = "http")]
    pub const fn same_body(self) -> SameBody<Self> {
        SameBody::new(self)
    }
}

/// The status of a request whose lock somebody else holds. Defaults to [`Conflict`](Self::Conflict).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BusyStatus {
    /// 409: what is asked for is in conflict with what is being done.
    #[default]
    Conflict,
    /// 423: the status of WebDAV and of resumable uploads.
    Locked,
    /// 429: what the clients of some payment services know to try again.
    TooManyRequests,
}

/// What is in the body of a rejection. Defaults to [`Problem`](Self::Problem).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectionBody {
    /// A problem document (RFC 9457), `application/problem+json`.
    #[default]
    Problem,
    /// A line of text.
    PlainText,
}

/// The header fields that tell a client how its limits stand. There have been several in the course of time.
///
/// Several of them can be sent at once, so that clients can move from one to the next. Where two want a field of the same
/// name with different contents, [`Draft10`](Self::Draft10) has it; `Draft10` and `Draft7` together are therefore `Draft10`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeaderVersion {
    /// `RateLimit-Policy: "api";q=100;w=60` and `RateLimit: "api";r=42;t=18`, with a member for each limit:
    /// draft-ietf-httpapi-ratelimit-headers-10.
    Draft10,
    /// `RateLimit-Policy: 100;w=60` and `RateLimit: limit=100, remaining=42, reset=18`:
    /// draft-ietf-httpapi-ratelimit-headers-07. Of several limits the second one tells the tightest.
    Draft7,
    /// `RateLimit-Policy: 100;w=60` and `RateLimit-Limit: 100`, `RateLimit-Remaining: 42`, `RateLimit-Reset: 18`:
    /// draft-ietf-httpapi-ratelimit-headers-06. Of several limits the last three tell the tightest.
    Draft6,
    /// `X-RateLimit-Limit: 100`, `X-RateLimit-Remaining: 42` and `X-RateLimit-Reset: 1767225618`, as seconds since 1970 by the
    /// clock of this machine: the habit of GitHub and others. Of several limits the tightest.
    LegacyEpoch,
    /// The same, but `X-RateLimit-Reset: 18`, as seconds from now. Of the two the one that is named last.
    LegacyDelta,
}

/// Whose rate-limit fields a response has that the inner service has sent with some already. Defaults to [`Replace`](Self::Replace).
///
/// All fields of a response come from one source, so that a client can read them together. Fields that other layers of this process have added are not
/// those of an upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UpstreamFields {
    /// The layer removes the fields of the upstream and sends its own.
    #[default]
    Replace,
    /// The response has the fields of the source with fewer units left. Where the fields of the upstream cannot be read, or the layer has made no
    /// decision, the layer replaces them.
    KeepTighter,
    /// The layer adds nothing to a response that has such fields.
    Keep,
}

/// Which fields are written, and with what.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "settings of what is written with that feature"))]
pub(crate) struct HeaderConfig {
    pub(crate) no_extensions: bool,
    pub(crate) versions: HeaderVersions,
    pub(crate) upstream: UpstreamFields,
    #[cfg(feature = "http")]
    pub(crate) secret: Option<PartitionKeyMac>,
}

impl HeaderConfig {
    /// Whether a response is told anything, be it in its extensions.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) const fn are_announced(&self) -> bool {
        !self.no_extensions || self.are_written()
    }

    /// Whether a response is told anything in its header.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) const fn are_written(&self) -> bool {
        self.versions.0 != 0
    }
}

/// A set of versions, a bit for each.
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
            // These write the same fields, so only one of them can be meant.
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

/// What partition keys are made with. The secret itself is not kept, and nothing of it printed.
#[cfg(feature = "http")]
#[derive(Clone)]
pub(crate) struct PartitionKeyMac(Arc<Hmac<Sha256>>);

#[cfg(feature = "http")]
impl PartitionKeyMac {
    pub(crate) fn new(secret: &[u8]) -> Self {
        assert!(secret.len() >= 16, "a secret for partition keys has at least 16 bytes");
        Self(Arc::new(Hmac::new_from_slice(secret).expect("a key of any length will do")))
    }

    /// The first half of the code that authenticates `text`.
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
        f.write_str("Secret(..)")
    }
}
