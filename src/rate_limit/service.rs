use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::MissingKey;
use super::decision::Denied;
use super::future::ResponseFuture;
use super::judge::{self, Subject};
use super::layer::{ChargeAlways, ChargeOn, OnMissingKey, RateLimitLayer, RequestCost, Settings, UnitCost};
use super::meters::Verdict;
use super::policy::Policy;
use super::rejection::{Announce, Rejection};
use super::screen::{Screen, Screening, Subjects};
use super::store::RateLimitStore;
use crate::key::{Everyone, ExtractKey, Key};
use crate::reject::{AsResponse, Reject};

/// A service behind a rate limit. See the [module docs](crate::rate_limit) for examples.
///
/// Ready when the inner service is: whom a request counts for is known only once it is there, so there is nothing to ask
/// the store before. The inner service that reported ready is held while the store answers; where that holds a permit (a
/// concurrency limit below this layer), a rejected request gives it back unused.
#[must_use]
pub struct RateLimit<S, B, K = Everyone, C = UnitCost, A = AsResponse, R = ChargeAlways, X = ()> {
    inner: S,
    settings: Arc<Settings<B, K, C, A, R, X>>,
}

impl<S, B, K, C, A, R, X> RateLimit<S, B, K, C, A, R, X> {
    /// Puts `inner` behind the limit of `layer`, without a stack of layers.
    pub fn new(inner: S, layer: RateLimitLayer<B, K, C, A, R, X>) -> Self {
        Self { inner, settings: Arc::new(layer.into_settings()) }
    }

    /// Puts another service behind the same limit, at the price of counting one reference.
    #[cfg(feature = "config")]
    pub(crate) fn around<S2>(&self, inner: S2) -> RateLimit<S2, B, K, C, A, R, X> {
        RateLimit { inner, settings: Arc::clone(&self.settings) }
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

impl<S, Req, B, K, C, A, R, X> Service<Req> for RateLimit<S, B, K, C, A, R, X>
where
    S: Service<Req> + Clone,
    B: RateLimitStore + Clone + Send + Sync + 'static,
    K: ExtractKey<Req>,
    X: Screen<Req>,
    C: RequestCost<Req>,
    A: Reject<Rejection, S::Response, S::Error>
        + Announce<Req, <A as Reject<Rejection, S::Response, S::Error>>::Response>,
    R: ChargeOn<S::Response, S::Error>,
{
    type Response = A::Response;
    type Error = A::Error;
    type Future = ResponseFuture<S, Req, B, K, C, A, R, X>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.settings.answer.error(error))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let settings = Arc::clone(&self.settings);
        let mut subjects = judge::Subjects::new();
        if let Err(rejection) = settings.screen(&request, &mut subjects) {
            drop(self.take_ready());
            return ResponseFuture::rejected(rejection, settings);
        }
        if subjects.is_empty() {
            return ResponseFuture::passed_through(self.inner.call(request), settings);
        }
        let cost = settings.cost.cost(&request);
        // What need not be waited for is done here and now, as the inner service would.
        match settings.core.judge_now(&mut subjects, cost) {
            Some(Ok(())) => ResponseFuture::admitted(subjects, cost, &mut self.inner, request, settings),
            Some(Err(rejection)) => {
                drop(self.take_ready());
                ResponseFuture::limited(subjects, rejection, settings)
            }
            None => ResponseFuture::asking(subjects, cost, self.take_ready(), request, settings),
        }
    }
}

impl<S: Clone, B, K, C, A, R, X> RateLimit<S, B, K, C, A, R, X> {
    /// The instance of the inner service that reported ready, with the place that it may have reserved. Leaves a clone for the next time.
    fn take_ready(&mut self) -> S {
        let fresh = self.inner.clone();
        mem::replace(&mut self.inner, fresh)
    }
}

impl<B, K, C, A, R, X> Settings<B, K, C, A, R, X> {
    /// Finds out whom a request counts for: nobody if it passes uncounted.
    fn screen<Req>(&self, request: &Req, subjects: &mut judge::Subjects) -> Result<(), Rejection>
    where
        K: ExtractKey<Req>,
        X: Screen<Req>,
    {
        let mut others = Subjects::default();
        match self.screen.screen(request, &mut others) {
            Screening::Count => {}
            Screening::Pass => return Ok(()),
            Screening::Deny => {
                self.core.policy.meters().decided(Verdict::Denied);
                return Err(Rejection::Denied(Denied));
            }
        }
        self.count(self.core.policy.clone(), self.key.extract_key(request), true, subjects)?;
        for (policy, key) in others.found {
            self.count(policy, key, false, subjects)?;
        }
        Ok(())
    }

    fn count(
        &self,
        policy: Policy,
        key: Option<Key>,
        main: bool,
        subjects: &mut judge::Subjects,
    ) -> Result<(), Rejection> {
        let key = match (key.filter(|key| !key.is_empty()), self.core.on_missing_key) {
            (Some(key), _) => key,
            (None, OnMissingKey::Shared) => Key::ANONYMOUS,
            (None, OnMissingKey::Pass) => return Ok(()),
            (None, OnMissingKey::Reject) if !policy.is_enforced_without_key() => {
                policy.meters().decided(Verdict::Shadow);
                return Ok(());
            }
            (None, OnMissingKey::Reject) => {
                policy.meters().decided(Verdict::MissingKey);
                return Err(Rejection::MissingKey(MissingKey));
            }
        };
        subjects.push(Subject::new(policy, key, main));
        Ok(())
    }
}

// By hand: `derive` would ask for more than the inner service to be `Clone`.
impl<S: Clone, B, K, C, A, R, X> Clone for RateLimit<S, B, K, C, A, R, X> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(&self.settings) }
    }
}

impl<S: fmt::Debug, B, K, C, A, R, X> fmt::Debug for RateLimit<S, B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.core.describe::<K>(f, "RateLimit")
    }
}
