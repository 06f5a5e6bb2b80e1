use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::{Request, Response};
use tower_service::Service;

use super::future::ResponseFuture;
use super::layer::{RuleLimit, RulesLayer, Shared};
use crate::rate_limit::store::RateLimitStore;
use crate::rate_limit::{AnnotateResponse, Rejection};
use crate::responder::{HttpResponder, Responder};

/// An HTTP service behind rules. See the [module docs](crate::config) for examples.
///
/// Ready when the inner service is, as [`RateLimit`](crate::rate_limit::RateLimit) is.
#[must_use]
pub struct RulesService<S, B, A = HttpResponder> {
    inner: S,
    shared: Arc<Shared<B, A>>,
}

impl<S, B, A> RulesService<S, B, A> {
    /// Wraps `inner`, as [`RulesLayer`] does in a stack of layers.
    pub fn new(inner: S, layer: RulesLayer<B, A>) -> Self {
        Self { inner, shared: layer.shared }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, mutable.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Unwraps the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, ReqBody, ResBody, B, A> Service<Request<ReqBody>> for RulesService<S, B, A>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    A: Responder<Rejection, Response<ResBody>, S::Error>
        + AnnotateResponse<Request<ReqBody>, <A as Responder<Rejection, Response<ResBody>, S::Error>>::Response>
        + Clone,
{
    type Response = A::Response;
    type Error = A::Error;
    type Future = ResponseFuture<S, ReqBody, B, A>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.shared.responder.error(error))
    }

    fn call(&mut self, mut request: Request<ReqBody>) -> Self::Future {
        // `self.inner` is the instance that reported ready, so call it and keep a clone.
        let clone = self.inner.clone();
        let prepared = PreparedService(Some(mem::replace(&mut self.inner, clone)));
        match self.shared.limit(request.method(), request.uri().path(), prepared) {
            Ok(RuleLimit::Always(mut limited)) => ResponseFuture::limited(limited.call(request)),
            Ok(RuleLimit::ByResponse(mut limited)) => ResponseFuture::settled(limited.call(request)),
            Err(mut prepared) => {
                self.shared.responder.pass(&mut request);
                ResponseFuture::passed_through(prepared.call(request), self.shared.responder.clone())
            }
        }
    }
}

/// A service that is ready, to be called once. Its clones are empty, because they are never called.
pub(super) struct PreparedService<S>(Option<S>);

impl<S> Clone for PreparedService<S> {
    fn clone(&self) -> Self {
        Self(None)
    }
}

impl<S: Service<Req>, Req> Service<Req> for PreparedService<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> S::Future {
        self.0.take().expect("a prepared service is called only once").call(request)
    }
}

// By hand: `derive` would require `B: Clone` and `A: Clone`.
impl<S: Clone, B, A> Clone for RulesService<S, B, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, B, A> fmt::Debug for RulesService<S, B, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.shared.handle.rules();
        f.debug_struct("RulesService").field("inner", &self.inner).field("rules", &rules).finish_non_exhaustive()
    }
}
