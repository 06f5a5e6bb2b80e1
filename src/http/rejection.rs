//! The HTTP responses of all rejections, and your own version of them.

use std::fmt;

use ::http::{Request, Response};
use bytes::Bytes;
use http_body::Body;

use super::body::ResponseBody;
use super::cache::CachedBody;
use super::idempotency::IdempotentBody;
use super::lock::LockedBody;
use super::not_executed::{IS_REJECTED, REJECTED};
use crate::cache::CacheError;
use crate::idempotency;
use crate::lock::{self, BindLease, LeaseGuard, LeaseHandle, fencing};
use crate::rate_limit::{self, AnnotateResponse, LimitInfo, RateLimitHandle};
use crate::responder::{HttpResponder, NotExecuted, OutcomeUnknown, Responder};

/// A rejection that [`HttpResponder`] turns into a response: the `Rejection` types of the modules [`rate_limit`](crate::rate_limit),
/// [`lock`](crate::lock), [`lock::fencing`](crate::lock::fencing) and [`idempotency`](crate::idempotency), and
/// [`CacheError`].
pub trait HttpRejection: sealed::Sealed {
    /// The body of the responses of the layer, around the body `B` of the inner service.
    type Body<B>: From<Bytes>;

    /// The response of `responder` to this rejection.
    #[doc(hidden)]
    fn to_response(&self, responder: &HttpResponder) -> Response<Bytes>;

    /// Converts a response of the inner service.
    #[doc(hidden)]
    fn wrap<B>(response: Response<B>) -> Response<Self::Body<B>>;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for rate_limit::Rejection {}
impl sealed::Sealed for lock::Rejection {}
impl sealed::Sealed for fencing::Rejection {}
impl sealed::Sealed for idempotency::Rejection {}
impl sealed::Sealed for CacheError {}

impl HttpRejection for rate_limit::Rejection {
    type Body<B> = ResponseBody<B>;

    fn to_response(&self, responder: &HttpResponder) -> Response<Bytes> {
        responder.rate_limit_rejection(self)
    }

    #[inline]
    fn wrap<B>(response: Response<B>) -> Response<ResponseBody<B>> {
        ResponseBody::of(response)
    }
}

impl HttpRejection for lock::Rejection {
    type Body<B> = LockedBody<B>;

    fn to_response(&self, responder: &HttpResponder) -> Response<Bytes> {
        responder.lock_rejection(self)
    }

    fn wrap<B>(response: Response<B>) -> Response<LockedBody<B>> {
        response.map(|body| LockedBody::new(ResponseBody::inner(body)))
    }
}

impl HttpRejection for fencing::Rejection {
    type Body<B> = ResponseBody<B>;

    fn to_response(&self, responder: &HttpResponder) -> Response<Bytes> {
        responder.fence_rejection(self)
    }

    fn wrap<B>(response: Response<B>) -> Response<ResponseBody<B>> {
        ResponseBody::of(response)
    }
}

impl HttpRejection for idempotency::Rejection {
    type Body<B> = IdempotentBody<B>;

    fn to_response(&self, responder: &HttpResponder) -> Response<Bytes> {
        responder.idempotency_rejection(self)
    }

    fn wrap<B>(response: Response<B>) -> Response<IdempotentBody<B>> {
        response.map(|body| IdempotentBody::other(ResponseBody::inner(body)))
    }
}

impl HttpRejection for CacheError {
    type Body<B> = CachedBody<B>;

    fn to_response(&self, responder: &HttpResponder) -> Response<Bytes> {
        responder.cache_rejection(self)
    }

    fn wrap<B>(response: Response<B>) -> Response<CachedBody<B>> {
        response.map(|body| CachedBody::other(ResponseBody::inner(body)))
    }
}

impl<R: HttpRejection, B, E> Responder<R, Response<B>, E> for HttpResponder {
    type Response = Response<R::Body<B>>;
    type Error = E;

    fn reject(&self, rejection: R) -> Result<Self::Response, E> {
        Ok(rejection.to_response(self).map(R::Body::from))
    }

    #[inline]
    fn response(&self, response: Response<B>) -> Self::Response {
        R::wrap(response)
    }

    fn error(&self, error: E) -> E {
        error
    }
}

/// An [`HttpResponder`] whose rejections pass through a closure: see [`HttpResponder::map_rejection`].
#[derive(Clone)]
pub struct MapRejection<F> {
    responder: HttpResponder,
    map: F,
}

impl HttpResponder {
    /// Passes each rejection and its response through a closure, which returns the response to send: with your own status, header fields or
    /// body. The first parameter of the closure has the `Rejection` type of the layer.
    ///
    /// The closure cannot break other layers: afterwards the response still has the extension [`NotExecuted`] or [`OutcomeUnknown`], and the
    /// header field `Tollgate-Rejected`, if it had them before. Everything else works as with `HttpResponder`: rate-limit header fields,
    /// handles in extensions, and how long a response holds its lock.
    ///
    /// ```
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Router, routing::get};
    /// use bytes::Bytes;
    /// use http::StatusCode;
    /// use http::header::{CONTENT_TYPE, HeaderValue};
    /// use tollgate::rate_limit::Rejection;
    /// use tollgate::{HttpResponder, MemoryBackend, Policy, Quota, RateLimitLayer};
    ///
    /// # use axum::{body::{Body, to_bytes}, http::Request};
    /// # use tower::ServiceExt;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let responder = HttpResponder::new().map_rejection(|_: &Rejection, mut response| {
    ///     response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    ///     *response.body_mut() = Bytes::from_static(br#"{"error":"slow down"}"#);
    ///     response
    /// });
    /// let policy = Policy::new("api", Quota::per_minute(0).fixed_window());
    /// let layer = RateLimitLayer::new(MemoryBackend::new(), policy).responder(responder);
    /// let app: Router = Router::new().route("/", get(async || "hello")).layer(layer);
    ///
    /// let response = app.oneshot(Request::get("/").body(Body::empty())?).await?;
    /// assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    /// assert!(response.headers().contains_key("ratelimit-policy"));
    /// assert_eq!(to_bytes(response.into_body(), 100).await?, r#"{"error":"slow down"}"#);
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    #[must_use]
    pub fn map_rejection<R, F>(self, map: F) -> MapRejection<F>
    where
        R: HttpRejection,
        F: Fn(&R, Response<Bytes>) -> Response<Bytes>,
    {
        MapRejection { responder: self, map }
    }
}

impl<R, B, E, F> Responder<R, Response<B>, E> for MapRejection<F>
where
    R: HttpRejection,
    F: Fn(&R, Response<Bytes>) -> Response<Bytes>,
{
    type Response = Response<R::Body<B>>;
    type Error = E;

    fn reject(&self, rejection: R) -> Result<Self::Response, E> {
        let response = rejection.to_response(&self.responder);
        let marks = Marks::of(&response);
        let mut response = (self.map)(&rejection, response);
        marks.put(&mut response);
        Ok(response.map(R::Body::from))
    }

    #[inline]
    fn response(&self, response: Response<B>) -> Self::Response {
        R::wrap(response)
    }

    fn error(&self, error: E) -> E {
        error
    }
}

/// The parts of a rejection that other layers read.
struct Marks {
    not_executed: Option<NotExecuted>,
    outcome_unknown: Option<OutcomeUnknown>,
    is_rejected: bool,
}

impl Marks {
    fn of(response: &Response<Bytes>) -> Self {
        Self {
            not_executed: response.extensions().get().copied(),
            outcome_unknown: response.extensions().get().copied(),
            is_rejected: response.headers().contains_key(REJECTED),
        }
    }

    fn put(self, response: &mut Response<Bytes>) {
        if let Some(mark) = self.not_executed {
            response.extensions_mut().insert(mark);
        }
        if let Some(mark) = self.outcome_unknown {
            response.extensions_mut().insert(mark);
        }
        if self.is_rejected {
            response.headers_mut().insert(REJECTED, IS_REJECTED);
        }
    }
}

impl<ReqBody, B, F> AnnotateResponse<Request<ReqBody>, Response<B>> for MapRejection<F> {
    #[inline]
    fn attaches(&self) -> bool {
        AnnotateResponse::<Request<ReqBody>, Response<B>>::attaches(&self.responder)
    }

    #[inline]
    fn attach(&self, handle: RateLimitHandle, request: &mut Request<ReqBody>) {
        AnnotateResponse::<_, Response<B>>::attach(&self.responder, handle, request);
    }

    #[inline]
    fn pass(&self, request: &mut Request<ReqBody>) {
        AnnotateResponse::<_, Response<B>>::pass(&self.responder, request);
    }

    #[inline]
    fn annotates(&self) -> bool {
        AnnotateResponse::<Request<ReqBody>, Response<B>>::annotates(&self.responder)
    }

    #[inline]
    fn annotate(&self, info: &LimitInfo<'_>, response: &mut Response<B>) {
        AnnotateResponse::<Request<ReqBody>, _>::annotate(&self.responder, info, response);
    }
}

impl<ReqBody, B, F> BindLease<Request<ReqBody>, Response<LockedBody<B>>> for MapRejection<F>
where
    B: Body<Data = Bytes>,
{
    fn is_safe(&self, request: &Request<ReqBody>) -> bool {
        BindLease::<_, Response<LockedBody<B>>>::is_safe(&self.responder, request)
    }

    fn attach(&self, lease: LeaseHandle, request: &mut Request<ReqBody>) {
        BindLease::<_, Response<LockedBody<B>>>::attach(&self.responder, lease, request);
    }

    fn pass(&self, request: &mut Request<ReqBody>) {
        BindLease::<_, Response<LockedBody<B>>>::pass(&self.responder, request);
    }

    fn bind(&self, guard: LeaseGuard, response: &mut Response<LockedBody<B>>) {
        BindLease::<Request<ReqBody>, _>::bind(&self.responder, guard, response);
    }
}

impl<F> fmt::Debug for MapRejection<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapRejection").field("responder", &self.responder).finish_non_exhaustive()
    }
}
