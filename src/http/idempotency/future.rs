use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use ::http::Response;
use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tracing::{Instrument as _, Span};

use super::body::IdempotentBody;
use super::service::Shared;
use crate::idempotency::Rejection;
use crate::lock::Held;
use crate::responder::Responder;

pub(super) type Answer<R, E> = Result<Response<IdempotentBody<R>>, E>;

pin_project! {
    /// The answer of a service that serves the same request once. Dropping it lets a handler that has begun
    /// [finish](crate::idempotency::OnDisconnect) in the background.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<F, R, E, A, K> {
        #[pin]
        state: State<F, R, E, A, K>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, R, E, A, K> {
        // The request needs no record: the inner service is at work.
        Passed { #[pin] future: F, shared: Arc<Shared<K, A>> },
        // The store is asked, or the handler is at work.
        DetachableFuture { guarded: DetachableFuture<R, E> },
        // The request is turned away without asking anybody; `None` once that was told.
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
                let answer = &shared.answer;
                Poll::Ready(response.map(|response| answer.response(response)).map_err(|error| answer.error(error)))
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

/// A guarded request. Its caller does the work by polling; once its handler has begun it goes on in a task of its own when the
/// caller goes away. So a caller who stays pays for no task.
pub(super) struct DetachableFuture<R, E> {
    // `None` once it has answered, or has panicked.
    answer: Option<Work<Answer<R, E>>>,
    goes_on: DetachMode,
    // What it goes on with.
    locks: Held,
    // Where it goes on, once it has not come to its end at once.
    backstage: Option<DetachContext>,
}

type Work<T> = Pin<Box<dyn Detach<Output = T>>>;

/// Whether the handler has begun, and is finished whatever becomes of its caller.
pub(super) enum DetachMode {
    Yes,
    /// Once this says so.
    When(Arc<AtomicBool>),
}

type DetachContext = (Handle, Span);

fn backstage() -> Option<DetachContext> {
    Some((Handle::try_current().ok()?, Span::current()))
}

/// A future that can go on in a task of its own.
trait Detach: Future + Send {
    fn detach(self: Pin<Box<Self>>, locks: Held, runtime: &Handle, span: Span);
}

impl<F: Future + Send + 'static> Detach for F {
    fn detach(self: Pin<Box<Self>>, locks: Held, runtime: &Handle, span: Span) {
        let work = locks.detached(async move { drop(self.await) });
        drop(runtime.spawn(work.instrument(span)));
    }
}

impl<R, E> DetachableFuture<R, E> {
    /// `answer` is large, so it is boxed where it is made.
    pub(super) fn new<F>(answer: Pin<Box<F>>, goes_on: DetachMode) -> Self
    where
        F: Future<Output = Answer<R, E>> + Send + 'static,
    {
        Self { answer: Some(answer), goes_on, locks: Held::present(), backstage: None }
    }

    fn goes_on(&self) -> bool {
        match &self.goes_on {
            DetachMode::Yes => true,
            DetachMode::When(says_so) => says_so.load(Ordering::Acquire),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Answer<R, E>> {
        // Not put back by a panic.
        let mut answer = self.answer.take().expect("ResponseFuture polled after completion");
        let polled = answer.as_mut().poll(cx);
        if polled.is_pending() {
            if self.backstage.is_none() && self.goes_on() {
                self.backstage = backstage();
            }
            self.answer = Some(answer);
        }
        polled
    }
}

impl<R, E> Drop for DetachableFuture<R, E> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take()
            && self.goes_on()
            && let Some((runtime, span)) = self.backstage.take().or_else(backstage)
        {
            answer.detach(mem::take(&mut self.locks), &runtime, span);
        }
    }
}
