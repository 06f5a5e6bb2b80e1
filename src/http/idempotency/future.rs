use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ::http::Response;
use pin_project_lite::pin_project;

use super::body::IdempotentBody;
use super::detach::{Answer, DetachableFuture};
use super::settings::Shared;
use crate::idempotency::Rejection;
use crate::responder::Responder;

pin_project! {
    /// The response future of an [`Idempotency`](super::Idempotency) service. If you drop it, a handler that has started
    /// continues in the background, with [`OnDisconnect::Finish`](crate::idempotency::OnDisconnect::Finish).
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<F, R, E, A, K> {
        #[pin]
        state: State<F, R, E, A, K>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, R, E, A, K> {
        // The request has no record: the inner service handles it.
        Passed { #[pin] future: F, shared: Arc<Shared<K, A>> },
        // The store call or the handler is running.
        DetachableFuture { guarded: DetachableFuture<R, E> },
        // The request was rejected without a store call; `None` after the response was returned.
        Rejected { answer: Option<Answer<R, E>> },
    }
}

impl<F, R, E, A, K> ResponseFuture<F, R, E, A, K> {
    pub(super) fn passed_through(future: F, shared: Arc<Shared<K, A>>) -> Self {
        Self { state: State::Passed { future, shared } }
    }

    pub(super) fn guarded(guarded: DetachableFuture<R, E>) -> Self {
        Self { state: State::DetachableFuture { guarded } }
    }

    pub(super) fn rejected(answer: Answer<R, E>) -> Self {
        Self { state: State::Rejected { answer: Some(answer) } }
    }
}

impl<F, R, E, A, K> Future for ResponseFuture<F, R, E, A, K>
where
    F: Future<Output = Result<Response<R>, E>>,
    A: Responder<Rejection, Response<R>, E, Response = Response<IdempotentBody<R>>, Error = E>,
{
    type Output = Answer<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Passed { future, shared } => {
                let response = ready!(future.poll(cx));
                let responder = &shared.responder;
                Poll::Ready(
                    response.map(|response| responder.response(response)).map_err(|error| responder.error(error)),
                )
            }
            StateProj::DetachableFuture { guarded } => guarded.poll(cx),
            StateProj::Rejected { answer } => {
                Poll::Ready(answer.take().expect("ResponseFuture polled after completion"))
            }
        }
    }
}

impl<F, R, E, A, K> fmt::Debug for ResponseFuture<F, R, E, A, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
