use ::http::{Request, Response};

use crate::rate_limit::{AnnotateResponse, LimitInfo, RateLimitHandle};
use crate::responder::Responder;

/// Wraps the responder `R` and keeps the body type of the inner service.
///
/// Create it with [`HttpResponder::same_body`](crate::HttpResponder::same_body), for a [`RateLimitLayer`](crate::RateLimitLayer) or a
/// [`FenceLayer`](crate::lock::fencing::FenceLayer). Then the layer changes no type, so it works with `tower::util::option_layer` and around a
/// whole `axum::Router`.
///
/// Around a router, requests are counted before routing, so `matched_path` is not known. In return they skip the boxes and clones of
/// `Router::layer`. If you pass the layer to `Router::layer` instead, `SameBody` still avoids that the body is boxed.
///
/// The type works with `axum::body::Body` if the feature `axum` is enabled. For your own body type, implement `From<ResponseBody<YourBody>>`.
/// [`ResponseBody`](super::ResponseBody) implements `http_body::Body`, so this `From` can box it.
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use std::net::SocketAddr;
/// use axum::{Router, ServiceExt, extract::Request, routing::get};
/// use tollgate::{HttpResponder, MemoryBackend, Policy, Quota, RateLimitLayer, http::peer_ip};
/// use tower::Layer;
/// use tower::util::option_layer;
///
/// # async fn serve(is_limited: bool) -> std::io::Result<()> {
/// let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
/// let limit = RateLimitLayer::new(MemoryBackend::new(), policy).key(peer_ip()).responder(HttpResponder::new().same_body());
///
/// // `with_state` builds the routes once. `axum::serve` does this for a bare router.
/// let router = Router::new().route("/", get(async || "hello")).with_state(());
/// let app = option_layer(is_limited.then_some(limit)).layer(router);
///
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
/// axum::serve(listener, ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(app)).await
/// # }
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SameBody<R>(R);

impl<R> SameBody<R> {
    /// Wraps `responder`.
    #[must_use]
    pub const fn new(responder: R) -> Self {
        Self(responder)
    }
}

impl<R, Rejection, B, M, E> Responder<Rejection, Response<B>, E> for SameBody<R>
where
    R: Responder<Rejection, Response<B>, E, Response = Response<M>>,
    B: From<M>,
{
    type Response = Response<B>;
    type Error = R::Error;

    fn reject(&self, rejection: Rejection) -> Result<Response<B>, R::Error> {
        Ok(self.0.reject(rejection)?.map(B::from))
    }

    #[inline]
    fn response(&self, response: Response<B>) -> Response<B> {
        self.0.response(response).map(B::from)
    }

    fn error(&self, error: E) -> R::Error {
        self.0.error(error)
    }
}

impl<R, ReqBody, B> AnnotateResponse<Request<ReqBody>, Response<B>> for SameBody<R>
where
    R: AnnotateResponse<Request<ReqBody>, Response<B>>,
{
    #[inline]
    fn attaches(&self) -> bool {
        self.0.attaches()
    }

    #[inline]
    fn attach(&self, handle: RateLimitHandle, request: &mut Request<ReqBody>) {
        self.0.attach(handle, request);
    }

    #[inline]
    fn pass(&self, request: &mut Request<ReqBody>) {
        self.0.pass(request);
    }

    #[inline]
    fn annotates(&self) -> bool {
        self.0.annotates()
    }

    #[inline]
    fn annotate(&self, info: &LimitInfo<'_>, response: &mut Response<B>) {
        self.0.annotate(info, response);
    }
}
