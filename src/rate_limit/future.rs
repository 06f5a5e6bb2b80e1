use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::annotate::AnnotateResponse;
use super::charge_on::ChargeOn;
use super::descriptor::{Descriptor, DescriptorList};
use super::evaluate::Evaluation;
use super::handle::RateLimitHandle;
use super::limit_info::LimitInfo;
use super::options::LayerOptions;
use super::rejection::Rejection;
use super::settings::Settings;
use super::store::RateLimitStore;
use crate::responder::Responder;

type BoxEvaluation = Pin<Box<dyn Future<Output = Evaluation> + Send>>;

pin_project! {
    /// The response future of a rate-limited service. See the [module docs](crate::rate_limit#cancellation) for the effect of dropping it.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req>,
    {
        #[pin]
        stage: Stage<S, Req, S::Future, A, Settings<B, K, LayerOptions<C, A, R, X>>>,
    }
}

pin_project! {
    #[project = StageProj]
    enum Stage<S, Req, F, A, T> {
        // The request was admitted, and its charge is not tracked. Holds no `Arc` of the settings, to save its reference counting.
        Plain { #[pin] future: F, responder: A },
        Tracked { #[pin] state: State<S, Req, F>, charge: ChargeRef, settings: Arc<T> },
        // The response was returned.
        Complete,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // The store call is in flight, and the service that reported ready waits with the request. Both are boxed, to keep the future small
        // for requests that need no store call.
        Evaluating { evaluation: BoxEvaluation, cost: u64, call: Option<Box<(S, Req)>> },
        // The request was admitted or passed uncounted, and the inner service handles it.
        Calling { #[pin] future: F },
        // The request was rejected when the service was called.
        Rejected { rejection: Option<Rejection> },
    }
}

/// The charge of a request, as far as it is tracked. Behind a pointer, since futures are moved often.
pub(super) enum ChargeRef {
    Untracked,
    Descriptors(Box<DescriptorList>),
    Handle(RateLimitHandle),
}

impl ChargeRef {
    fn descriptors(&self) -> &[Descriptor] {
        match self {
            Self::Untracked => &[],
            Self::Descriptors(descriptors) => descriptors,
            Self::Handle(handle) => handle.descriptors(),
        }
    }
}

#[expect(clippy::type_complexity, reason = "each option has its parameter")]
impl<S: Service<Req>, Req, B, K, C, A, R, X> ResponseFuture<S, Req, B, K, C, A, R, X> {
    /// A future for an admitted request without tracking.
    #[inline]
    pub(super) fn plain(future: S::Future, responder: A) -> Self {
        Self { stage: Stage::Plain { future, responder } }
    }

    /// A future for a request that was admitted or passes uncounted, with its charge, if any.
    #[inline]
    pub(super) fn calling(
        future: S::Future,
        charge: ChargeRef,
        settings: Arc<Settings<B, K, LayerOptions<C, A, R, X>>>,
    ) -> Self {
        Self { stage: Stage::Tracked { state: State::Calling { future }, charge, settings } }
    }

    pub(super) fn rejected(
        descriptors: DescriptorList,
        rejection: Rejection,
        settings: Arc<Settings<B, K, LayerOptions<C, A, R, X>>>,
    ) -> Self {
        let charge = ChargeRef::Descriptors(Box::new(descriptors));
        let state = State::Rejected { rejection: Some(rejection) };
        Self { stage: Stage::Tracked { state, charge, settings } }
    }

    pub(super) fn evaluating(
        descriptors: DescriptorList,
        cost: u64,
        ready: S,
        request: Req,
        settings: Arc<Settings<B, K, LayerOptions<C, A, R, X>>>,
    ) -> Self
    where
        B: RateLimitStore + Clone + Send + Sync + 'static,
    {
        let core = settings.core.clone();
        // Boxed, since an allocation is cheap beside a network round trip. Two futures, so that the one without a wait queue is smaller.
        let evaluation: BoxEvaluation = if core.wait_config.is_some() {
            let arrived = Instant::now();
            Box::pin(async move { core.evaluate_with_wait(descriptors, cost, arrived).await })
        } else {
            Box::pin(async move { core.evaluate(descriptors, cost).await })
        };
        let state = State::Evaluating { evaluation, cost, call: Some(Box::new((ready, request))) };
        Self { stage: Stage::Tracked { state, charge: ChargeRef::Untracked, settings } }
    }
}

impl<B, K, C, A, R, X> Settings<B, K, LayerOptions<C, A, R, X>> {
    /// Whether an admitted request needs no details of its decision.
    #[inline]
    pub(super) fn needs_no_details<S, Req>(&self) -> bool
    where
        S: Service<Req>,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
        R: ChargeOn<S::Response, S::Error>,
    {
        !R::NEEDS_RESPONSE && !self.options.responder.attaches() && !self.options.responder.annotates()
    }

    /// Keeps the descriptors of an admitted request if they are needed later. Creates a handle if the responder attaches it or if the
    /// charge depends on the response.
    #[inline]
    pub(super) fn track<S, Req>(
        &self,
        descriptors: impl FnOnce() -> DescriptorList,
        cost: u64,
        request: &mut Req,
    ) -> ChargeRef
    where
        S: Service<Req>,
        B: RateLimitStore + Clone + Send + Sync + 'static,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
        R: ChargeOn<S::Response, S::Error>,
    {
        let attaches = self.options.responder.attaches();
        if !attaches && !R::NEEDS_RESPONSE {
            return if self.options.responder.annotates() {
                ChargeRef::Descriptors(Box::new(descriptors()))
            } else {
                ChargeRef::Untracked
            };
        }
        let handle = RateLimitHandle::new(descriptors(), cost, self.settler());
        if attaches {
            self.options.responder.attach(handle.clone(), request);
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
        let mut stage = self.project().stage;
        let result = match stage.as_mut().project() {
            StageProj::Plain { future, responder } => match ready!(future.poll(cx)) {
                Ok(response) => Ok(responder.response(response)),
                Err(error) => Err(responder.error(error)),
            },
            StageProj::Tracked { state, charge, settings } => ready!(settings.poll(state, charge, cx)),
            StageProj::Complete => panic!("ResponseFuture polled after completion"),
        };
        // Drops the request and the inner service's future. Clones of the handle can still correct the charge.
        stage.set(Stage::Complete);
        Poll::Ready(result)
    }
}

impl<B, K, C, A, R, X> Settings<B, K, LayerOptions<C, A, R, X>> {
    /// Polls the request until it is pending or complete.
    #[inline]
    fn poll<S, Req>(
        &self,
        mut state: Pin<&mut State<S, Req, S::Future>>,
        charge: &mut ChargeRef,
        cx: &mut Context<'_>,
    ) -> Poll<Result<A::Response, A::Error>>
    where
        S: Service<Req>,
        B: RateLimitStore + Clone + Send + Sync + 'static,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
        R: ChargeOn<S::Response, S::Error>,
    {
        // The loop ends with the response in `polled`, which avoids moves of large responses.
        let mut polled = loop {
            let (evaluation, cost, call) = match state.as_mut().project() {
                StateProj::Evaluating { evaluation, cost, call } => {
                    (ready!(evaluation.as_mut().poll(cx)), *cost, call.take())
                }
                StateProj::Calling { future } => {
                    let mut polled = future.poll(cx);
                    match (&mut polled, &*charge) {
                        (Poll::Pending, _) => return Poll::Pending,
                        (Poll::Ready(result), ChargeRef::Handle(handle)) if R::NEEDS_RESPONSE => {
                            self.options.charge.settle(handle, result.as_mut().map_err(|error| &*error));
                        }
                        (Poll::Ready(_), _) => {}
                    }
                    break match polled {
                        Poll::Ready(Ok(response)) => Poll::Ready(Ok(self.options.responder.response(response))),
                        Poll::Ready(Err(error)) => Poll::Ready(Err(self.options.responder.error(error))),
                        Poll::Pending => Poll::Pending,
                    };
                }
                StateProj::Rejected { rejection } => {
                    let rejection = rejection.take().expect("a rejection is returned once");
                    break Poll::Ready(self.options.responder.reject(rejection));
                }
            };
            // Taken out of the state, so that a rejected request releases the inner service's permit at once.
            let (mut ready, mut request) = *call.expect("the call is kept during the evaluation");
            let Evaluation { descriptors, result } = evaluation;
            match result {
                Ok(()) => {
                    *charge = self.track::<S, _>(|| descriptors, cost, &mut request);
                    let future = ready.call(request);
                    state.set(State::Calling { future });
                }
                Err(rejection) => {
                    *charge = ChargeRef::Descriptors(Box::new(descriptors));
                    break Poll::Ready(self.options.responder.reject(rejection));
                }
            }
        };
        if let Poll::Ready(Ok(response)) = &mut polled
            && self.options.responder.annotates()
        {
            let (policy, descriptors) = (&self.core.policy, charge.descriptors());
            for info in descriptors.iter().filter_map(|descriptor| descriptor.limit_info(policy)) {
                self.options.responder.annotate(&info, response);
            }
            if descriptors.is_empty() && policy.is_enforced_without_key() {
                // No key was counted, but the client can see the limits.
                self.options.responder.annotate(&LimitInfo::new(policy), response);
            }
        }
        polled
    }
}

impl<S: Service<Req>, Req, B, K, C, A, R, X> fmt::Debug for ResponseFuture<S, Req, B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
