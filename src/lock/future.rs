use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::task::JoinHandle;
use tower_service::Service;

use super::context::Held;
use super::error::LockError;
use super::layer::Settings;
use super::layer_options::ReleaseAt;
use super::lease::Lease;
use super::lease_guard::LeaseGuard;
use super::passage::Passage;
use super::rejection::{BindLease, Rejection};
use super::running::RunningPermit;
use crate::responder::Responder;

type BoxLease = Pin<Box<dyn Future<Output = Result<Lease, LockError>> + Send>>;

pin_project! {
    /// The response of a service behind a lock. Dropping it drops the handler and releases the lock.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, Req, K, A>
    where
        S: Service<Req>,
    {
        #[pin]
        state: State<S, Req, S::Future>,
        shared: Arc<(Settings, Arc<K>, A)>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // Acquiring the lock. The service that reported ready waits with the request.
        Acquiring { lease: BoxLease, permit: Option<RunningPermit>, call: Option<(S, Req)> },
        // The inner service runs, with the lock unless the request passes without it.
        Calling { #[pin] future: F, stay: Option<LeaseGuard>, held: Option<Held> },
        // The request is rejected without a store call.
        Rejected { rejection: Option<Rejection> },
        // The response was returned; nothing of the request or the inner service is left.
        Complete,
    }
}

impl<S: Service<Req>, Req, K, A> ResponseFuture<S, Req, K, A> {
    pub(super) fn passed_through(future: S::Future, shared: Arc<(Settings, Arc<K>, A)>) -> Self {
        Self { state: State::Calling { future, stay: None, held: None }, shared }
    }

    pub(super) fn rejected(rejection: Rejection, shared: Arc<(Settings, Arc<K>, A)>) -> Self {
        Self { state: State::Rejected { rejection: Some(rejection) }, shared }
    }

    pub(super) fn acquiring(
        lease: BoxLease,
        permit: Option<RunningPermit>,
        ready: S,
        request: Req,
        shared: Arc<(Settings, Arc<K>, A)>,
    ) -> Self {
        Self { state: State::Acquiring { lease, permit, call: Some((ready, request)) }, shared }
    }
}

impl<S, Req, K, A> Future for ResponseFuture<S, Req, K, A>
where
    S: Service<Req>,
    A: Responder<Rejection, S::Response, S::Error>
        + BindLease<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
{
    type Output = Result<A::Response, A::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let (settings, _, answer) = &**this.shared;
        loop {
            let (outcome, permit, call) = match this.state.as_mut().project() {
                StateProj::Acquiring { lease, permit, call } => {
                    (ready!(lease.as_mut().poll(cx)), permit.take(), call.take())
                }
                StateProj::Calling { future, stay, held } => {
                    // The lease may have been lost during a stall, so check this before the handler runs on.
                    if let Some(Poll::Ready(lost)) = stay.as_mut().map(|stay| stay.poll_lost(cx)) {
                        this.state.set(State::Complete);
                        return Poll::Ready(answer.reject(Rejection::Lock(lost.into())));
                    }
                    let outcome = match held {
                        Some(held) => ready!(held.scope(|| future.poll(cx))),
                        None => ready!(future.poll(cx)),
                    };
                    let stay = stay.take().filter(|_| settings.release_at == ReleaseAt::BodyEnd);
                    this.state.set(State::Complete);
                    return Poll::Ready(match outcome {
                        Ok(response) => {
                            let mut response = answer.response(response);
                            if let Some(stay) = stay {
                                answer.bind(stay, &mut response);
                            }
                            Ok(response)
                        }
                        Err(error) => Err(answer.error(error)),
                    });
                }
                StateProj::Rejected { rejection } => {
                    let rejection = rejection.take().expect("a rejection is returned once");
                    this.state.set(State::Complete);
                    return Poll::Ready(answer.reject(rejection));
                }
                StateProj::Complete => panic!("ResponseFuture polled after completion"),
            };
            // `call` is no longer in the state. So a rejection drops the ready service at once, with a permit that it may hold.
            let (mut ready, mut request) = call.expect("the call is kept until the lock is granted");
            match outcome {
                Ok(lease) => {
                    settings.answered();
                    answer.attach(lease.view(), &mut request);
                    let held = Held::current().and(&lease, settings.on_loss, settings.release_at);
                    let future = held.scope(|| Passage::Locked(permit).scope(|| ready.call(request)));
                    let stay = LeaseGuard::new(lease, settings.on_loss);
                    this.state.set(State::Calling { future, stay: Some(stay), held: Some(held) });
                }
                Err(LockError::Store(error)) if settings.passes(&error) => {
                    answer.pass(&mut request);
                    let future = Passage::Unprotected(permit).scope(|| ready.call(request));
                    this.state.set(State::Calling { future, stay: None, held: None });
                }
                Err(error) => {
                    this.state.set(State::Complete);
                    return Poll::Ready(answer.reject(Rejection::Lock(error)));
                }
            }
        }
    }
}

impl<S: Service<Req>, Req, K, A> fmt::Debug for ResponseFuture<S, Req, K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

pin_project! {
    /// The response of a detached service. Dropping it leaves the handler running, unless the request needs no lock.
    #[must_use = "futures do nothing unless polled"]
    pub struct DetachedFuture<F, T> {
        #[pin]
        state: DetachedState<F, T>,
    }
}

pin_project! {
    #[project = DetachedProj]
    enum DetachedState<F, T> {
        // The request needs no lock.
        Attached { #[pin] future: F },
        // A task runs the handler. It returns `None` if the lease was lost.
        Detached { task: JoinHandle<Option<T>> },
    }
}

impl<F, T> DetachedFuture<F, T> {
    pub(super) const fn attached(future: F) -> Self {
        Self { state: DetachedState::Attached { future } }
    }

    pub(super) const fn detached(task: JoinHandle<Option<T>>) -> Self {
        Self { state: DetachedState::Detached { task } }
    }
}

impl<F: Future<Output = T>, T> Future for DetachedFuture<F, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.project().state.project() {
            DetachedProj::Attached { future } => future.poll(cx),
            DetachedProj::Detached { task } => match ready!(Pin::new(task).poll(cx)) {
                Ok(Some(outcome)) => Poll::Ready(outcome),
                // The `ResponseFuture` that holds the lost lease notices the loss, and drops this future.
                Ok(None) => Poll::Pending,
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => resume_unwind(panic),
                    // The runtime is shutting down, and so is the caller.
                    Err(_) => Poll::Pending,
                },
            },
        }
    }
}

impl<F, T> fmt::Debug for DetachedFuture<F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedFuture").finish_non_exhaustive()
    }
}
