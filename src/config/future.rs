use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::charge::RuleCharge;
use super::key::RuleKey;
use super::layer::{ExtraLimits, RuleCost};
use super::service::PreparedService;
use crate::rate_limit::store::RateLimitStore;
use crate::rate_limit::{self, AnnotateResponse, ChargeAlways, Rejection};
use crate::responder::Responder;

type Limited<S, ReqBody, B, A, R> =
    rate_limit::ResponseFuture<PreparedService<S>, Request<ReqBody>, B, RuleKey, RuleCost, A, R, ExtraLimits>;

pin_project! {
    /// The response future of [`RulesService`](super::RulesService). It is cancelled like that of a
    /// [rate-limited](crate::rate_limit#cancellation) service.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, ReqBody, B, A>
    where
        S: Service<Request<ReqBody>>,
    {
        #[pin]
        state: State<S, ReqBody, B, A>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, ReqBody, B, A>
    where
        S: Service<Request<ReqBody>>,
    {
        // The limit of a rule applies.
        Limited { #[pin] future: Limited<S, ReqBody, B, A, ChargeAlways> },
        // The limit of a rule applies, and the charge depends on the response.
        Settled { #[pin] future: Limited<S, ReqBody, B, A, RuleCharge> },
        // No rule matches, or the rule is unlimited.
        PassedThrough { #[pin] future: S::Future, responder: A },
    }
}

impl<S: Service<Request<ReqBody>>, ReqBody, B, A> ResponseFuture<S, ReqBody, B, A> {
    pub(super) fn limited(future: Limited<S, ReqBody, B, A, ChargeAlways>) -> Self {
        Self { state: State::Limited { future } }
    }

    pub(super) fn settled(future: Limited<S, ReqBody, B, A, RuleCharge>) -> Self {
        Self { state: State::Settled { future } }
    }

    pub(super) fn passed_through(future: S::Future, responder: A) -> Self {
        Self { state: State::PassedThrough { future, responder } }
    }
}

impl<S, ReqBody, ResBody, B, A> Future for ResponseFuture<S, ReqBody, B, A>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    A: Responder<Rejection, Response<ResBody>, S::Error>
        + AnnotateResponse<Request<ReqBody>, <A as Responder<Rejection, Response<ResBody>, S::Error>>::Response>,
{
    type Output = Result<A::Response, A::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Limited { future } => future.poll(cx),
            StateProj::Settled { future } => future.poll(cx),
            StateProj::PassedThrough { future, responder } => Poll::Ready(match ready!(future.poll(cx)) {
                Ok(response) => Ok(responder.response(response)),
                Err(error) => Err(responder.error(error)),
            }),
        }
    }
}

impl<S: Service<Request<ReqBody>>, ReqBody, B, A> fmt::Debug for ResponseFuture<S, ReqBody, B, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
