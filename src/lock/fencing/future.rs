use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;

use super::rejection::Rejection;
use crate::responder::Responder;

pin_project! {
    /// The response of a service that refuses small fences.
    #[must_use = "futures do nothing unless polled"]
    pub struct FenceFuture<F, A> {
        #[pin]
        state: State<F>,
        responder: A,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        // The inner service runs.
        Calling { #[pin] future: F },
        // The request is rejected.
        Rejected { rejection: Option<Rejection> },
    }
}

impl<F, A> FenceFuture<F, A> {
    pub(super) const fn calling(future: F, responder: A) -> Self {
        Self { state: State::Calling { future }, responder }
    }

    pub(super) const fn rejected(rejection: Rejection, responder: A) -> Self {
        Self { state: State::Rejected { rejection: Some(rejection) }, responder }
    }
}

impl<F, A, Res, E> Future for FenceFuture<F, A>
where
    F: Future<Output = Result<Res, E>>,
    A: Responder<Rejection, Res, E>,
{
    type Output = Result<A::Response, A::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        Poll::Ready(match this.state.project() {
            StateProj::Calling { future } => match ready!(future.poll(cx)) {
                Ok(response) => Ok(this.responder.response(response)),
                Err(error) => Err(this.responder.error(error)),
            },
            StateProj::Rejected { rejection } => {
                this.responder.reject(rejection.take().expect("FenceFuture polled after completion"))
            }
        })
    }
}

impl<F, A> fmt::Debug for FenceFuture<F, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceFuture").finish_non_exhaustive()
    }
}
