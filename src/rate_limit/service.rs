use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::future::{BoxDecision, ResponseFuture};
use super::layer::{OnMissingKey, RateLimitLayer, RequestCost, Settings, UnitCost};
use super::rejection::{Announce, Rejection};
use super::store::RateLimitStore;
use super::{Decision, MissingKey, OnStoreError, Outcome, RateLimited};
use crate::error::StoreError;
use crate::key::{Everyone, ExtractKey, Key};
use crate::reject::{AsResponse, Reject};

/// A service behind a rate limit. See the [module docs](crate::rate_limit) for examples.
///
/// Ready when the inner service is: whom a request counts for is known only once it is there, so there is nothing to ask
/// the store before. The inner service that reported ready is held while the store answers; where that holds a permit (a
/// concurrency limit below this layer), a rejected request gives it back unused.
#[must_use]
pub struct RateLimit<S, B, K = Everyone, C = UnitCost, A = AsResponse> {
    inner: S,
    settings: Arc<Settings<B, K, C, A>>,
}

impl<S, B, K, C, A> RateLimit<S, B, K, C, A> {
    /// Puts `inner` behind the limit of `layer`, without a stack of layers.
    pub fn new(inner: S, layer: RateLimitLayer<B, K, C, A>) -> Self {
        Self::with_settings(inner, layer.into_settings())
    }

    pub(super) fn with_settings(inner: S, settings: Settings<B, K, C, A>) -> Self {
        Self { inner, settings: Arc::new(settings) }
    }

    /// The service behind the limit.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service behind the limit, to change.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Takes the service out from behind the limit.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, B, K, C, A> Service<Req> for RateLimit<S, B, K, C, A>
where
    S: Service<Req> + Clone,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    K: ExtractKey<Req>,
    C: RequestCost<Req>,
    A: Reject<Rejection, S::Response, S::Error> + Announce<<A as Reject<Rejection, S::Response, S::Error>>::Response>,
{
    type Response = A::Response;
    type Error = A::Error;
    type Future = ResponseFuture<S, Req, B, K, C, A>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.settings.answer.error(error))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        // `self.inner` is the instance that reported ready. Use it here and leave a clone for next time.
        let fresh = self.inner.clone();
        let mut ready = mem::replace(&mut self.inner, fresh);
        let settings = Arc::clone(&self.settings);

        let key = settings.key.extract_key(&request).filter(|key| !key.is_empty());
        let key = match (key, settings.on_missing_key) {
            (Some(key), _) => key,
            (None, OnMissingKey::Shared) => Key::ANONYMOUS,
            (None, OnMissingKey::Pass) => return ResponseFuture::passed_through(ready.call(request), settings),
            (None, OnMissingKey::Reject) => {
                return ResponseFuture::rejected(Rejection::MissingKey(MissingKey), settings);
            }
        };
        let cost = settings.cost.cost(&request);
        let decision = settings.decide(key, cost);
        ResponseFuture::checking(decision, ready, request, settings)
    }
}

impl<B, K, C, A> Settings<B, K, C, A>
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    /// The call to the store, boxed: next to a trip over the network an allocation is nothing.
    fn decide(&self, key: Key, cost: u32) -> BoxDecision {
        let limiter = self.limiter.clone();
        Box::pin(async move { limiter.check_cost(key, cost).await })
    }
}

impl<B, K, C, A> Settings<B, K, C, A> {
    /// What to do now that the store has answered: call the inner service, or turn the request away.
    pub(super) fn judge(
        &self,
        answer: Result<Decision, StoreError>,
    ) -> Result<Option<Decision>, (Rejection, Option<Decision>)> {
        let policy = self.limiter.policy();
        match answer {
            Ok(decision) => {
                // What can never be admitted is decided without the store, and says nothing about it.
                if decision.outcome() != Outcome::Never {
                    self.outage.answered(policy);
                }
                if decision.is_allowed() {
                    Ok(Some(decision))
                } else {
                    let rejection = RateLimited::new(policy.clone(), 1, decision.clone());
                    Err((Rejection::Limited(rejection), Some(decision)))
                }
            }
            Err(error) => {
                self.outage.failed(policy, &error, self.on_store_error);
                match self.on_store_error {
                    OnStoreError::Allow => Ok(None),
                    OnStoreError::Deny => Err((Rejection::Store(error), None)),
                }
            }
        }
    }
}

// By hand: `derive` would ask for more than the inner service to be `Clone`.
impl<S: Clone, B, K, C, A> Clone for RateLimit<S, B, K, C, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(&self.settings) }
    }
}

impl<S: fmt::Debug, B, K, C, A> fmt::Debug for RateLimit<S, B, K, C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.describe(f, "RateLimit")
    }
}
