use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::handle::RateLimitHandle;
use super::judge::{Judgement, Subjects};
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
        settings: Arc<Settings<B, K, C, A, R, X>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // Nobody has been asked yet; the service that reported ready waits with the request.
        Start { subjects: Subjects, cost: u32, call: Option<(S, Req)> },
        // The store is being asked.
        Judging { judgement: BoxJudgement, cost: u32, call: Option<(S, Req)> },
        // The request was admitted, or passed uncounted; the inner service is at work.
        Calling { #[pin] future: F, subjects: Subjects, handle: Option<RateLimitHandle>, counted: bool },
        // The request is turned away without asking anybody.
        Rejected { rejection: Option<Rejection> },
        // The answer was given; nothing of the request or the inner service is left.
        Complete,
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> ResponseFuture<S, Req, B, K, C, A, R, X> {
    pub(super) fn start(
        subjects: Subjects,
        cost: u32,
        ready: S,
        request: Req,
        settings: Arc<Settings<B, K, C, A, R, X>>,
    ) -> Self {
        Self { state: State::Start { subjects, cost, call: Some((ready, request)) }, settings }
    }

    pub(super) fn passed_through(future: S::Future, settings: Arc<Settings<B, K, C, A, R, X>>) -> Self {
        Self { state: State::Calling { future, subjects: Subjects::new(), handle: None, counted: false }, settings }
    }

    pub(super) fn rejected(rejection: Rejection, settings: Arc<Settings<B, K, C, A, R, X>>) -> Self {
        Self { state: State::Rejected { rejection: Some(rejection) }, settings }
    }
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
        let (answer, subjects) = loop {
            let (judgement, cost, call) = match this.state.as_mut().project() {
                StateProj::Start { subjects, cost, call } => {
                    let (mut subjects, cost) = (std::mem::take(subjects), *cost);
                    match settings.core.judge_now(&mut subjects, cost) {
                        Some(ruling) => (Judgement { subjects, ruling }, cost, call.take()),
                        None => {
                            // Boxed: next to a trip over the network an allocation is nothing.
                            let (core, call) = (settings.core.clone(), call.take());
                            let judgement = Box::pin(async move { core.judge(subjects, cost).await });
                            this.state.set(State::Judging { judgement, cost, call });
                            continue;
                        }
                    }
                }
                StateProj::Judging { judgement, cost, call } => {
                    (ready!(judgement.as_mut().poll(cx)), *cost, call.take())
                }
                StateProj::Calling { future, subjects, handle, counted } => {
                    let mut answer = ready!(future.poll(cx));
                    if let Some(handle) = handle.take() {
                        settings.charge.settle(&handle, answer.as_mut().map_err(|error| &*error));
                    }
                    let subjects = counted.then(|| std::mem::take(subjects));
                    this.state.set(State::Complete);
                    let answer = answer.map(|response| settings.answer.response(response));
                    break (answer.map_err(|error| settings.answer.error(error)), subjects);
                }
                StateProj::Rejected { rejection } => {
                    let rejection = rejection.take().expect("a rejection waits to be told");
                    this.state.set(State::Complete);
                    break (settings.answer.reject(rejection), None);
                }
                StateProj::Complete => panic!("ResponseFuture polled after completion"),
            };
            // Out of the state, so that a rejected request gives up its place in the inner service at once.
            let (mut ready, mut request) = call.expect("the call waits while the store is asked");
            match &judgement.ruling {
                Ok(()) => {
                    let handle = (A::ATTACHES || R::ASKED)
                        .then(|| RateLimitHandle::new(judgement.charges(), cost, settings.settler()));
                    if let (true, Some(handle)) = (A::ATTACHES, &handle) {
                        settings.answer.attach(handle.clone(), &mut request);
                    }
                    let future = ready.call(request);
                    let handle = handle.filter(|_| R::ASKED);
                    let subjects = judgement.subjects;
                    this.state.set(State::Calling { future, subjects, handle, counted: true });
                }
                Err(_) => {
                    this.state.set(State::Complete);
                    let Judgement { subjects, ruling } = judgement;
                    if let Err(rejection) = ruling {
                        break (settings.answer.reject(rejection), Some(subjects));
                    }
                }
            }
        };
        Poll::Ready(answer.map(|mut response| {
            match subjects {
                Some(subjects) => {
                    for standing in subjects.iter().filter_map(|subject| subject.standing()) {
                        settings.answer.announce(&standing, &mut response);
                    }
                }
                // Nobody was counted, but the client may know what there is.
                None => settings.answer.announce(&Standing::new(&settings.core.policy), &mut response),
            }
            response
        }))
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> fmt::Debug for ResponseFuture<S, Req, B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
