use ::http::{Request, Response};

use crate::rate_limit::{AnnotateResponse, LimitInfo, RateLimitHandle};
use crate::responder::Responder;

/// The answers of `A` with a body of the type that the inner service has, so that a [`RateLimitLayer`](crate::RateLimitLayer) or a
/// [`FenceLayer`](crate::lock::fencing::FenceLayer) changes no type. [`HttpResponder::same_body`](crate::HttpResponder::same_body) makes one.
///
/// That is for places that take no other: where a layer is there or not by a setting (`tower::util::option_layer`), or stands in front of a whole
/// `axum::Router`. There each request is spared what `Router::layer` boxes and clones for it, and is counted before a route is looked for, so
/// `matched_path` is not known. As a layer of a router it spares the box of the body.
///
/// With the feature `axum` the body is `axum::body::Body`. For one of your own implement `From<ResponseBody<YourBody>>`, with the
/// [`ResponseBody`](super::ResponseBody) of the layer, which is a body itself, to be boxed for instance.
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
/// // `with_state` makes the routes once, and not for every request, as `axum::serve` does with a router.
/// let router = Router::new().route("/", get(async || "hello")).with_state(());
/// let app = option_layer(is_limited.then_some(limit)).layer(router);
///
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
/// axum::serve(listener, ServiceExt::<Request>::into_make_service_with_connect_info::<SocketAddr>(app)).await
/// # }
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SameBody<A>(A);

impl<A> SameBody<A> {
    /// The answers of `answer`.
    #[must_use]
    pub const fn new(answer: A) -> Self {
        Self(answer)
    }
}

impl<A, R, B, M, E> Responder<R, Response<B>, E> for SameBody<A>
where
    A: Responder<R, Response<B>, E, Response = Response<M>>,
    B: From<M>,
{
    type Response = Response<B>;
    type Error = A::Error;

    fn reject(&self, rejection: R) -> Result<Response<B>, A::Error> {
        Ok(self.0.reject(rejection)?.map(B::from))
    }

    #[inline]
    fn response(&self, response: Response<B>) -> Response<B> {
        self.0.response(response).map(B::from)
    }

    fn error(&self, error: E) -> A::Error {
        self.0.error(error)
    }
}

impl<A, ReqBody, B> AnnotateResponse<Request<ReqBody>, Response<B>> for SameBody<A>
where
    A: AnnotateResponse<Request<ReqBody>, Response<B>>,
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
    fn announces(&self) -> bool {
        self.0.announces()
    }

    #[inline]
    fn announce(&self, standing: &LimitInfo<'_>, response: &mut Response<B>) {
        self.0.announce(standing, response);
    }
}
