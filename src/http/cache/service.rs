use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::{Request, Response};
use bytes::Bytes;
use futures_util::future::join_all;
use http_body::Body;
use tower_service::Service;

use super::body::CachedBody;
use super::future::ResponseFuture;
use super::layer::CacheLayer;
use super::origin::{OwnResponse, SharedRequest, forget};
use super::request::Plan;
use super::serve::Reader;
use super::settings::Shared;
use super::status::CacheStatus;
use crate::cache::CacheError;
use crate::error::BoxError;
use crate::http::idempotency::handler::take_ready;
use crate::key::{ExtractKey, Key};
use crate::responder::{HttpResponder, Responder};

/// A service that stores responses and serves them to further requests. See [`CacheLayer`].
///
/// It is ready when the inner service is. Each request reserves the ready inner service while the entry is read. If the request is served from
/// the cache, or waits for the response of another request, the inner service is returned unused. A permit that it holds, for example of a
/// concurrency limit below this layer, is then free again. A load in the background waits until a clone of the inner service is ready.
#[must_use]
pub struct CacheService<S, K, A = HttpResponder> {
    inner: S,
    shared: Arc<Shared<K, A>>,
}

impl<S, K, A> CacheService<S, K, A> {
    /// Wraps `inner` without a layer stack.
    pub fn new(inner: S, layer: CacheLayer<K, A>) -> Self {
        Self { inner, shared: Arc::new(layer.into_shared()) }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, mutable.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, K, A, B, R> Service<Request<B>> for CacheService<S, K, A>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    K: ExtractKey<Request<B>> + Send + Sync + 'static,
    A: Responder<CacheError, Response<R>, S::Error, Response = Response<CachedBody<R>>, Error = S::Error>
        + Send
        + Sync
        + 'static,
    B: Body + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<CachedBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error, A, K>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let is_public = shared.settings.is_public;
        let principal = shared.principal.extract_key(&request);
        // In a private cache, an empty key and the key that all requests share do not identify a caller.
        let principal = principal.filter(|key| is_public || !key.is_empty() && *key != Key::GLOBAL);
        match Plan::of(&request, principal, &shared.settings) {
            Plan::Bypass => ResponseFuture::passed(self.inner.call(request), shared),
            Plan::Change(keys) => ResponseFuture::boxed(change(take_ready(&mut self.inner), request, keys, shared)),
            Plan::Read(read) => {
                let shared_request = SharedRequest::new(take_ready(&mut self.inner), request);
                ResponseFuture::boxed(Reader { shared, shared_request, read }.respond())
            }
        }
    }
}

/// Passes on a request that may change the resource. If it succeeds, the responses of its URI are removed (RFC 9111, section 4.4).
async fn change<S, B, K, A, R>(
    mut inner: S,
    request: Request<B>,
    keys: Vec<Key>,
    shared: Arc<Shared<K, A>>,
) -> OwnResponse<R, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
    A: Responder<CacheError, Response<R>, S::Error, Response = Response<CachedBody<R>>, Error = S::Error>,
{
    let responder = &shared.responder;
    let response = inner.call(request).await.map_err(|error| responder.error(error))?;
    if response.status().is_success() || response.status().is_redirection() {
        keys.iter().for_each(|key| shared.settings.uncached.remove(key));
        join_all(keys.into_iter().map(|key| forget(&shared.cache, key))).await;
    }
    let mut response = responder.response(response);
    CacheStatus::Method.write(response.headers_mut());
    Ok(response)
}

// Hand-written, because `derive` would also require `K: Clone` and `A: Clone`.
impl<S: Clone, K, A> Clone for CacheService<S, K, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, K, A> fmt::Debug for CacheService<S, K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheService").field("inner", &self.inner).finish_non_exhaustive()
    }
}
