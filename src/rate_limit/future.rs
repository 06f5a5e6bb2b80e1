use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::Decision;
use super::layer::Settings;
use super::rejection::{Announce, Rejection, Standing};
use crate::error::StoreError;
use crate::reject::Reject;

pub(super) type BoxDecision = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;

pin_project! {
    /// The answer of a rate-limited service. See the [module docs](crate::rate_limit#cancellation) for what dropping it does.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, Req, B, K, C, A>
    where
        S: Service<Req>,
    {
        #[pin]
        state: State<S, Req, S::Future>,
        settings: Arc<Settings<B, K, C, A>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // The store is being asked; the service that reported ready waits with the request.
        Checking { decision: BoxDecision, call: Option<(S, Req)> },
        // The request was admitted, or passed uncounted; the inner service is at work.
        Calling { #[pin] future: F, decision: Option<Decision> },
        // The request is turned away without asking anybody.
        Rejected { rejection: Option<Rejection> },
        // The answer was given; nothing of the request or the inner service is left.
        Complete,
    }
}

impl<S: Service<Req>, Req, B, K, C, A> ResponseFuture<S, Req, B, K, C, A> {
    pub(super) fn checking(decision: BoxDecision, ready: S, request: Req, settings: Arc<Settings<B, K, C, A>>) -> Self {
        Self { state: State::Checking { decision, call: Some((ready, request)) }, settings }
    }

    pub(super) fn passed_through(future: S::Future, settings: Arc<Settings<B, K, C, A>>) -> Self {
        Self { state: State::Calling { future, decision: None }, settings }
    }

    pub(super) fn rejected(rejection: Rejection, settings: Arc<Settings<B, K, C, A>>) -> Self {
        Self { state: State::Rejected { rejection: Some(rejection) }, settings }
    }
}

impl<S, Req, B, K, C, A> Future for ResponseFuture<S, Req, B, K, C, A>
where
    S: Service<Req>,
    A: Reject<Rejection, S::Response, S::Error> + Announce<<A as Reject<Rejection, S::Response, S::Error>>::Response>,
{
    type Output = Result<A::Response, A::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let settings = &**this.settings;
        let (answer, decision) = loop {
            match this.state.as_mut().project() {
                StateProj::Checking { decision, call } => {
                    let judgement = settings.judge(ready!(decision.as_mut().poll(cx)));
                    // Out of the state, so that a rejected request gives up its place in the inner service at once.
                    let (mut ready, request) = call.take().expect("the call waits while the store is asked");
                    match judgement {
                        Ok(decision) => {
                            let future = ready.call(request);
                            this.state.set(State::Calling { future, decision });
                        }
                        Err((rejection, decision)) => {
                            this.state.set(State::Complete);
                            break (settings.answer.reject(rejection), decision);
                        }
                    }
                }
                StateProj::Calling { future, decision } => {
                    let answer = ready!(future.poll(cx));
                    let decision = decision.take();
                    this.state.set(State::Complete);
                    let answer = answer.map(|response| settings.answer.response(response));
                    break (answer.map_err(|error| settings.answer.error(error)), decision);
                }
                StateProj::Rejected { rejection } => {
                    let rejection = rejection.take().expect("a rejection waits to be told");
                    this.state.set(State::Complete);
                    break (settings.answer.reject(rejection), None);
                }
                StateProj::Complete => panic!("ResponseFuture polled after completion"),
            }
        };
        Poll::Ready(answer.map(|mut response| {
            let mut standing = Standing::new(settings.limiter.policy());
            standing.decision = decision.as_ref();
            settings.answer.announce(&standing, &mut response);
            response
        }))
    }
}

impl<S: Service<Req>, Req, B, K, C, A> fmt::Debug for ResponseFuture<S, Req, B, K, C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
