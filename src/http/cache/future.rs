use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::http::Response;
use pin_project_lite::pin_project;

use super::body::CachedBody;
use super::origin::OwnResponse;
use super::settings::Shared;
use super::status::CacheStatus;
use crate::cache::CacheError;
use crate::responder::Responder;

pin_project! {
    /// The response future of a [`CacheService`](super::CacheService). If you drop it, a load without further callers is cancelled.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<F, R, E, A, K> {
        #[pin]
        state: State<F, R, E, A, K>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, R, E, A, K> {
        // The request bypasses the cache.
        Passed { #[pin] future: F, shared: Arc<Shared<K, A>> },
        // The cache is read or changed.
        Boxed { future: Pin<Box<dyn Future<Output = OwnResponse<R, E>> + Send>> },
    }
}

impl<F, R, E, A, K> ResponseFuture<F, R, E, A, K> {
    pub(super) const fn passed(future: F, shared: Arc<Shared<K, A>>) -> Self {
        Self { state: State::Passed { future, shared } }
    }

    pub(super) fn boxed(future: impl Future<Output = OwnResponse<R, E>> + Send + 'static) -> Self {
        Self { state: State::Boxed { future: Box::pin(future) } }
    }
}

impl<F, R, E, A, K> Future for ResponseFuture<F, R, E, A, K>
where
    F: Future<Output = Result<Response<R>, E>>,
    A: Responder<CacheError, Response<R>, E, Response = Response<CachedBody<R>>, Error = E>,
{
    type Output = OwnResponse<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Passed { future, shared } => {
                let responder = &shared.responder;
                Poll::Ready(match ready!(future.poll(cx)) {
                    Ok(response) => {
                        let mut response = responder.response(response);
                        CacheStatus::Bypass.write(response.headers_mut());
                        Ok(response)
                    }
                    Err(error) => Err(responder.error(error)),
                })
            }
            StateProj::Boxed { future } => future.as_mut().poll(cx),
        }
    }
}

impl<F, R, E, A, K> fmt::Debug for ResponseFuture<F, R, E, A, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
