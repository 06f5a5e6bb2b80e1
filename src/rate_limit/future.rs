use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::handle::RateLimitHandle;
use super::judge::{Judgement, Subject, Subjects};
use super::layer::{ChargeOn, Settings};
use super::rejection::{Announce, Rejection, Standing};
use super::store::RateLimitStore;
use crate::reject::Reject;

type BoxJudgement = Pin<Box<dyn Future<Output = Judgement> + Send>>;

pin_project! {
    /// The answer of a rate-limited service. See the [module docs](crate::rate_limit#cancellation) for what dropping it does.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req>,
    {
        #[pin]
        state: State<S, Req, S::Future>,
        // Whom the request counts for; with the handle once there is one.
        subjects: Subjects,
        handle: Option<RateLimitHandle>,
        cost: u32,
        settings: Arc<Settings<B, K, C, A, R, X>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // The store is being asked; the service that reported ready waits with the request.
        Judging { judgement: BoxJudgement, call: Option<(S, Req)> },
        // The request was admitted, or passed uncounted; the inner service is at work.
        Calling { #[pin] future: F },
        // The request is turned away without asking anybody.
        Rejected { rejection: Option<Rejection> },
        // The answer was given; nothing of the request or the inner service is left.
        Complete,
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> ResponseFuture<S, Req, B, K, C, A, R, X> {
    pub(super) fn passed_through(future: S::Future, settings: Arc<Settings<B, K, C, A, R, X>>) -> Self {
        Self { state: State::Calling { future }, subjects: Subjects::new(), handle: None, cost: 0, settings }
    }

    pub(super) fn rejected(rejection: Rejection, settings: Arc<Settings<B, K, C, A, R, X>>) -> Self {
        Self::limited(Subjects::new(), rejection, settings)
    }

    pub(super) fn limited(subjects: Subjects, rejection: Rejection, settings: Arc<Settings<B, K, C, A, R, X>>) -> Self {
        Self { state: State::Rejected { rejection: Some(rejection) }, subjects, handle: None, cost: 0, settings }
    }
}

impl<S, Req, B, K, C, A, R, X> ResponseFuture<S, Req, B, K, C, A, R, X>
where
    S: Service<Req>,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    A: Reject<Rejection, S::Response, S::Error>
        + Announce<Req, <A as Reject<Rejection, S::Response, S::Error>>::Response>,
    R: ChargeOn<S::Response, S::Error>,
{
    pub(super) fn admitted(
        mut subjects: Subjects,
        cost: u32,
        ready: &mut S,
        mut request: Req,
        settings: Arc<Settings<B, K, C, A, R, X>>,
    ) -> Self {
        let handle = give_handle::<S, _, _, _, _, _, _, _>(&settings, &mut subjects, cost, &mut request);
        Self { state: State::Calling { future: ready.call(request) }, subjects, handle, cost, settings }
    }

    pub(super) fn asking(
        subjects: Subjects,
        cost: u32,
        ready: S,
        request: Req,
        settings: Arc<Settings<B, K, C, A, R, X>>,
    ) -> Self {
        let core = settings.core.clone();
        // Boxed: next to a trip over the network an allocation is nothing.
        let judgement = Box::pin(async move { core.judge(subjects, cost).await });
        let state = State::Judging { judgement, call: Some((ready, request)) };
        Self { state, subjects: Subjects::new(), handle: None, cost, settings }
    }
}

/// The handle of an admitted request, if anybody wants one; takes `subjects` then.
fn give_handle<S, Req, B, K, C, A, R, X>(
    settings: &Settings<B, K, C, A, R, X>,
    subjects: &mut Subjects,
    cost: u32,
    request: &mut Req,
) -> Option<RateLimitHandle>
where
    S: Service<Req>,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    A: Reject<Rejection, S::Response, S::Error>
        + Announce<Req, <A as Reject<Rejection, S::Response, S::Error>>::Response>,
    R: ChargeOn<S::Response, S::Error>,
{
    let attaches = settings.answer.attaches();
    if !attaches && !R::ASKED {
        return None;
    }
    let handle = RateLimitHandle::new(mem::take(subjects), cost, settings.settler());
    if attaches {
        settings.answer.attach(handle.clone(), request);
    }
    Some(handle)
}

impl<S, Req, B, K, C, A, R, X> Future for ResponseFuture<S, Req, B, K, C, A, R, X>
where
    S: Service<Req>,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    A: Reject<Rejection, S::Response, S::Error>
        + Announce<Req, <A as Reject<Rejection, S::Response, S::Error>>::Response>,
    R: ChargeOn<S::Response, S::Error>,
{
    type Output = Result<A::Response, A::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let settings = &**this.settings;
        let answer = loop {
            let (ruling, call) = match this.state.as_mut().project() {
                StateProj::Judging { judgement, call } => {
                    let Judgement { subjects, ruling } = ready!(judgement.as_mut().poll(cx));
                    *this.subjects = subjects;
                    (ruling, call.take())
                }
                StateProj::Calling { future } => {
                    let mut answer = ready!(future.poll(cx));
                    if let (true, Some(handle)) = (R::ASKED, &*this.handle) {
                        settings.charge.settle(handle, answer.as_mut().map_err(|error| &*error));
                    }
                    this.state.set(State::Complete);
                    let answer = answer.map(|response| settings.answer.response(response));
                    break answer.map_err(|error| settings.answer.error(error));
                }
                StateProj::Rejected { rejection } => {
                    let rejection = rejection.take().expect("a rejection waits to be told");
                    this.state.set(State::Complete);
                    break settings.answer.reject(rejection);
                }
                StateProj::Complete => panic!("ResponseFuture polled after completion"),
            };
            // Out of the state, so that a rejected request gives up its place in the inner service at once.
            let (mut ready, mut request) = call.expect("the call waits while the store is asked");
            match ruling {
                Ok(()) => {
                    *this.handle =
                        give_handle::<S, _, _, _, _, _, _, _>(settings, this.subjects, *this.cost, &mut request);
                    let future = ready.call(request);
                    this.state.set(State::Calling { future });
                }
                Err(rejection) => {
                    this.state.set(State::Complete);
                    break settings.answer.reject(rejection);
                }
            }
        };
        let answer = answer.map(|mut response| {
            let subjects = this.handle.as_ref().map_or(&*this.subjects, RateLimitHandle::subjects);
            for standing in subjects.iter().filter_map(Subject::standing) {
                settings.answer.announce(&standing, &mut response);
            }
            if subjects.is_empty() && settings.core.policy.is_enforced_without_key() {
                // Nobody was counted, but the client may know what there is.
                settings.answer.announce(&Standing::new(&settings.core.policy), &mut response);
            }
            response
        });
        // Whoever still has a clone may go on to correct the charge.
        *this.handle = None;
        Poll::Ready(answer)
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> fmt::Debug for ResponseFuture<S, Req, B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
