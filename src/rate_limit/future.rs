use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::descriptor::{Descriptor, Subjects};
use super::evaluate::Evaluation;
use super::handle::RateLimitHandle;
use super::layer::{ChargeOn, Settings};
use super::rejection::{AnnotateResponse, LimitInfo, Rejection};
use super::store::RateLimitStore;
use crate::responder::Responder;

type BoxJudgement = Pin<Box<dyn Future<Output = Evaluation> + Send>>;

pin_project! {
    /// The answer of a rate-limited service. See the [module docs](crate::rate_limit#cancellation) for what dropping it does.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req>,
    {
        #[pin]
        course: Course<S, Req, S::Future, A, Settings<B, K, C, A, R, X>>,
    }
}

pin_project! {
    #[project = CourseProj]
    enum Course<S, Req, F, A, T> {
        // The request was admitted and nobody wants to know more. Does without the settings, so that no reference to them is counted.
        Plain { #[pin] future: F, answer: A },
        Watched { #[pin] state: State<S, Req, F>, whom: ChargeRef, settings: Arc<T> },
        // The answer was given.
        Complete,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // The store is being asked; the service that reported ready waits with the request. Not here, where requests that wait
        // for nothing would have to make room for it.
        Judging { judgement: BoxJudgement, cost: u32, call: Option<Box<(S, Req)>> },
        // The request was admitted, or passed uncounted; the inner service is at work.
        Calling { #[pin] future: F },
        // The request is turned away without asking anybody.
        Rejected { rejection: Option<Rejection> },
    }
}

/// Whom the request counts for, as long as somebody may want to know. Behind a pointer: futures are moved more often than
/// one would think.
pub(super) enum ChargeRef {
    Nobody,
    Subjects(Box<Subjects>),
    Handle(RateLimitHandle),
}

impl ChargeRef {
    fn subjects(&self) -> &[Descriptor] {
        match self {
            Self::Nobody => &[],
            Self::Subjects(subjects) => subjects,
            Self::Handle(handle) => handle.subjects(),
        }
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> ResponseFuture<S, Req, B, K, C, A, R, X> {
    /// The inner service is at work, on a request of which nobody wants to know more.
    #[inline]
    pub(super) fn plain(future: S::Future, answer: A) -> Self {
        Self { course: Course::Plain { future, answer } }
    }

    /// The inner service is at work, on a request that counts for `whom`.
    #[inline]
    pub(super) fn calling(future: S::Future, whom: ChargeRef, settings: Arc<Settings<B, K, C, A, R, X>>) -> Self {
        Self { course: Course::Watched { state: State::Calling { future }, whom, settings } }
    }

    pub(super) fn rejected(
        subjects: Subjects,
        rejection: Rejection,
        settings: Arc<Settings<B, K, C, A, R, X>>,
    ) -> Self {
        let whom = ChargeRef::Subjects(Box::new(subjects));
        let state = State::Rejected { rejection: Some(rejection) };
        Self { course: Course::Watched { state, whom, settings } }
    }

    pub(super) fn asking(
        subjects: Subjects,
        cost: u32,
        ready: S,
        request: Req,
        settings: Arc<Settings<B, K, C, A, R, X>>,
    ) -> Self
    where
        B: RateLimitStore + Clone + Send + Sync + 'static,
    {
        let core = settings.core.clone();
        // Boxed: next to a trip over the network an allocation is nothing. Who does not wait for room has none for that to carry along.
        let judgement: BoxJudgement = if core.patience.is_some() {
            let came = Instant::now();
            Box::pin(async move { core.evaluate_with_wait(subjects, cost, came).await })
        } else {
            Box::pin(async move { core.judge(subjects, cost).await })
        };
        let state = State::Judging { judgement, cost, call: Some(Box::new((ready, request))) };
        Self { course: Course::Watched { state, whom: ChargeRef::Nobody, settings } }
    }
}

impl<B, K, C, A, R, X> Settings<B, K, C, A, R, X> {
    /// Whether nobody may want to know more about an admitted request than that it was admitted.
    #[inline]
    pub(super) fn wants_no_details<S, Req>(&self) -> bool
    where
        S: Service<Req>,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
        R: ChargeOn<S::Response, S::Error>,
    {
        !R::ASKED && !self.answer.attaches() && !self.answer.announces()
    }

    /// Keeps whom an admitted request counts for, if anybody may want to know: with a handle, if there has to be one.
    #[inline]
    pub(super) fn keep<S, Req>(&self, subjects: impl FnOnce() -> Subjects, cost: u32, request: &mut Req) -> ChargeRef
    where
        S: Service<Req>,
        B: RateLimitStore + Clone + Send + Sync + 'static,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
        R: ChargeOn<S::Response, S::Error>,
    {
        let attaches = self.answer.attaches();
        if !attaches && !R::ASKED {
            return if self.answer.announces() { ChargeRef::Subjects(Box::new(subjects())) } else { ChargeRef::Nobody };
        }
        let handle = RateLimitHandle::new(subjects(), cost, self.settler());
        if attaches {
            self.answer.attach(handle.clone(), request);
        }
        ChargeRef::Handle(handle)
    }
}

impl<S, Req, B, K, C, A, R, X> Future for ResponseFuture<S, Req, B, K, C, A, R, X>
where
    S: Service<Req>,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    A: Responder<Rejection, S::Response, S::Error>
        + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
    R: ChargeOn<S::Response, S::Error>,
{
    type Output = Result<A::Response, A::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut course = self.project().course;
        let answer = match course.as_mut().project() {
            CourseProj::Plain { future, answer } => match ready!(future.poll(cx)) {
                Ok(response) => Ok(answer.response(response)),
                Err(error) => Err(answer.error(error)),
            },
            CourseProj::Watched { state, whom, settings } => ready!(settings.poll(state, whom, cx)),
            CourseProj::Complete => panic!("ResponseFuture polled after completion"),
        };
        // Nothing of the request or the inner service is left; whoever has a clone of the handle may go on to correct the charge.
        course.set(Course::Complete);
        Poll::Ready(answer)
    }
}

impl<B, K, C, A, R, X> Settings<B, K, C, A, R, X> {
    /// Brings a request on its way by a step.
    #[inline]
    fn poll<S, Req>(
        &self,
        mut state: Pin<&mut State<S, Req, S::Future>>,
        whom: &mut ChargeRef,
        cx: &mut Context<'_>,
    ) -> Poll<Result<A::Response, A::Error>>
    where
        S: Service<Req>,
        B: RateLimitStore + Clone + Send + Sync + 'static,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
        R: ChargeOn<S::Response, S::Error>,
    {
        // Responses are large: this one is not taken apart more often than it takes to pass it on.
        let mut answer = loop {
            let (judgement, cost, call) = match state.as_mut().project() {
                StateProj::Judging { judgement, cost, call } => {
                    (ready!(judgement.as_mut().poll(cx)), *cost, call.take())
                }
                StateProj::Calling { future } => {
                    let mut answer = future.poll(cx);
                    match (&mut answer, &*whom) {
                        (Poll::Pending, _) => return Poll::Pending,
                        (Poll::Ready(answer), ChargeRef::Handle(handle)) if R::ASKED => {
                            self.charge.settle(handle, answer.as_mut().map_err(|error| &*error));
                        }
                        (Poll::Ready(_), _) => {}
                    }
                    break match answer {
                        Poll::Ready(Ok(response)) => Poll::Ready(Ok(self.answer.response(response))),
                        Poll::Ready(Err(error)) => Poll::Ready(Err(self.answer.error(error))),
                        Poll::Pending => Poll::Pending,
                    };
                }
                StateProj::Rejected { rejection } => {
                    let rejection = rejection.take().expect("a rejection waits to be told");
                    break Poll::Ready(self.answer.reject(rejection));
                }
            };
            // Out of the state, so that a rejected request gives up its place in the inner service at once.
            let (mut ready, mut request) = *call.expect("the call waits while the store is asked");
            let Evaluation { subjects, result } = judgement;
            match result {
                Ok(()) => {
                    *whom = self.keep::<S, _>(|| subjects, cost, &mut request);
                    let future = ready.call(request);
                    state.set(State::Calling { future });
                }
                Err(rejection) => {
                    *whom = ChargeRef::Subjects(Box::new(subjects));
                    break Poll::Ready(self.answer.reject(rejection));
                }
            }
        };
        if let Poll::Ready(Ok(response)) = &mut answer
            && self.answer.announces()
        {
            let (policy, subjects) = (&self.core.policy, whom.subjects());
            for standing in subjects.iter().filter_map(|subject| subject.standing(policy)) {
                self.answer.announce(&standing, response);
            }
            if subjects.is_empty() && policy.is_enforced_without_key() {
                // Nobody was counted, but the client may know what there is.
                self.answer.announce(&LimitInfo::new(policy), response);
            }
        }
        answer
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> fmt::Debug for ResponseFuture<S, Req, B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
