use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::MissingKey;
use super::decision::Denied;
use super::descriptor;
use super::descriptor::Descriptor;
use super::evaluate::note;
use super::filter::{FilterAction, RequestFilter, Subjects};
use super::future::{ChargeRef, ResponseFuture};
use super::layer::{ChargeAlways, ChargeOn, OnMissingKey, RateLimitLayer, RequestCost, Settings, UnitCost};
use super::metrics::Verdict;
use super::policy::Policy;
use super::rejection::{AnnotateResponse, Rejection};
use super::store::RateLimitStore;
use crate::key::{ExtractKey, GlobalKey, Key, lack};
use crate::responder::{HttpResponder, Responder};

/// A service behind a rate limit. See the [module docs](crate::rate_limit) for examples.
///
/// Ready when the inner service is: whom a request counts for is known only once it is there, so there is nothing to ask
/// the store before. The inner service that reported ready is held while the store answers; where that holds a permit (a
/// concurrency limit below this layer), a rejected request gives it back unused.
#[must_use]
pub struct RateLimit<S, B, K = GlobalKey, C = UnitCost, A = HttpResponder, R = ChargeAlways, X = ()> {
    inner: S,
    settings: Arc<Settings<B, K, C, A, R, X>>,
}

impl<S, B, K, C, A, R, X> RateLimit<S, B, K, C, A, R, X> {
    /// Puts `inner` behind the limit of `layer`, without a stack of layers.
    pub fn new(inner: S, layer: RateLimitLayer<B, K, C, A, R, X>) -> Self {
        Self { inner, settings: layer.into_shared() }
    }

    /// Puts another service behind the same limit, at the price of a clone.
    #[cfg(feature = "config")]
    pub(crate) fn around<S2>(&self, inner: S2) -> RateLimit<S2, B, K, C, A, R, X> {
        RateLimit { inner, settings: Arc::clone(self.settings.here()) }
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
    X: RequestFilter<Req>,
    C: RequestCost<Req>,
    A: Clone
        + Responder<Rejection, S::Response, S::Error>
        + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
    R: ChargeOn<S::Response, S::Error>,
{
    type Response = A::Response;
    type Error = A::Error;
    type Future = ResponseFuture<S, Req, B, K, C, A, R, X>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.settings.answer.error(error))
    }

    fn call(&mut self, mut request: Req) -> Self::Future {
        let settings = &*self.settings;
        let mut others = Subjects::default();
        lack::forget();
        match settings.filter.filter(&request, &mut others) {
            FilterAction::Limit => {}
            FilterAction::Bypass => return self.pass(request),
            FilterAction::Deny => {
                settings.core.policy.meters().decided(Verdict::Denied);
                return self.reject(descriptor::Subjects::default(), Rejection::Denied(Denied));
            }
        }
        let mut policy = None;
        let mut key = settings.key.extract_key(&request);
        if !others.found.is_empty() || key.as_ref().is_none_or(Key::is_empty) {
            match settings.subjects(key, others) {
                Ok(mut subjects) => match subjects.as_mut_slice() {
                    [only] => (policy, key) = (only.policy.take(), Some(only.key)),
                    [] => key = None,
                    _ => {
                        return self.ask(
                            descriptor::Subjects::Several(subjects),
                            settings.cost.cost(&request),
                            request,
                        );
                    }
                },
                Err(rejection) => return self.reject(descriptor::Subjects::default(), rejection),
            }
        }
        let Some(key) = &key else { return self.pass(request) };
        let (cost, core, main) = (settings.cost.cost(&request), &settings.core, policy.is_none());
        let (mut resolved, is_known) = match &core.resolver {
            Some(resolver) if main => resolver.known(key).map_or((None, false), |policy| (Some(policy), true)),
            _ => (policy, true),
        };
        let policy = resolved.as_ref().unwrap_or(&core.policy);
        let enforced = policy.is_enforced_for(key);
        // Nobody passes those who wait.
        let is_known = is_known && !core.is_waited_for(if main { &core.policy } else { policy }, key);
        // What need not be waited for is done here and now, as the inner service would. Where nobody asks how things stand, a yes
        // is all it takes.
        if is_known && settings.wants_no_details::<S, Req>() && core.charge_now(policy, key, cost) {
            // Before the call, whose future can be made where it is to stay then.
            let answer = A::clone(&settings.answer);
            return ResponseFuture::plain(self.inner.call(request), answer);
        }
        let mut decision = if is_known { core.try_decide_locally(policy, key, cost) } else { None };
        // Or it waits itself, by what it is told here.
        let waits = enforced && decision.as_ref().is_some_and(|decision| core.is_worth_waiting(decision, cost));
        let told = decision.as_ref().filter(|_| !waits);
        let admitted = told.map(|decision| note(policy, decision, enforced, false, cost));
        // Put together where it is to stay: to move all of this about takes as long as to find it out.
        let mut subject = || Descriptor {
            policy: resolved.take(),
            key: *key,
            main,
            decision: decision.take(),
            enforced,
            local: false,
            question: None,
        };
        if admitted == Some(true) {
            let settings = Arc::clone(self.settings.here());
            let whom = settings.keep::<S, _>(|| descriptor::Subjects::One(subject()), cost, &mut request);
            return ResponseFuture::calling(self.inner.call(request), whom, settings);
        }
        let subject = subject();
        match admitted.and_then(|_| core.limited(&subject, cost)) {
            Some(limited) => self.reject(descriptor::Subjects::One(subject), Rejection::Limited(limited)),
            None => self.ask(descriptor::Subjects::One(subject), cost, request),
        }
    }
}

impl<S, B, K, C, A, R, X> RateLimit<S, B, K, C, A, R, X> {
    #[inline]
    fn pass<Req>(&mut self, mut request: Req) -> ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req>,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
    {
        self.settings.answer.pass(&mut request);
        ResponseFuture::calling(self.inner.call(request), ChargeRef::Nobody, Arc::clone(self.settings.here()))
    }

    fn reject<Req>(
        &mut self,
        subjects: descriptor::Subjects,
        rejection: Rejection,
    ) -> ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req> + Clone,
    {
        drop(self.take_ready());
        ResponseFuture::rejected(subjects, rejection, Arc::clone(self.settings.here()))
    }

    fn ask<Req>(
        &mut self,
        mut subjects: descriptor::Subjects,
        cost: u32,
        request: Req,
    ) -> ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req> + Clone,
        B: RateLimitStore + Clone + Send + Sync + 'static,
        X: RequestFilter<Req>,
    {
        let Settings { core, filter, .. } = &*self.settings;
        if let Some(resolver) = core.resolver.as_ref().filter(|resolver| resolver.needs_input())
            && let Some(main) = subjects.iter_mut().find(|subject| subject.main)
        {
            if main.policy.is_none()
                && let Some(policy) = resolver.known(&main.key)
            {
                main.count_by(policy);
            }
            // While a request waits, an answer that is known may become old.
            if main.policy.is_none() || core.patience.is_some() {
                main.question = filter.question(&request);
            }
        }
        ResponseFuture::asking(subjects, cost, self.take_ready(), request, Arc::clone(self.settings.here()))
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
    /// Whom a request counts for, where that is not its key alone: nobody if it passes uncounted.
    fn subjects(&self, key: Option<Key>, others: Subjects) -> Result<Vec<Descriptor>, Rejection> {
        let layer = &self.core.policy;
        let mut subjects = Vec::new();
        if let Some(key) = self.counted(layer, key)? {
            subjects.push(Descriptor::new(layer, None, key));
        }
        for (policy, key) in others.found {
            if let Some(key) = self.counted(&policy, key)? {
                subjects.push(Descriptor::new(layer, Some(policy), key));
            }
        }
        Ok(subjects)
    }

    /// The key that a request is counted under, which may have none of its own.
    fn counted(&self, policy: &Policy, key: Option<Key>) -> Result<Option<Key>, Rejection> {
        if let Some(key) = key.filter(|key| !key.is_empty()) {
            return Ok(Some(key));
        }
        match self.core.on_missing_key {
            OnMissingKey::Shared => Ok(Some(Key::ANONYMOUS)),
            OnMissingKey::Pass => Ok(None),
            OnMissingKey::Reject if !policy.is_enforced_without_key() => {
                policy.meters().decided(Verdict::Shadow);
                Ok(None)
            }
            OnMissingKey::Reject => {
                policy.meters().decided(Verdict::MissingKey);
                Err(Rejection::MissingKey(MissingKey::new()))
            }
        }
    }
}

// By hand: `derive` would ask for more than the inner service to be `Clone`.
impl<S: Clone, B, K, C, A, R, X> Clone for RateLimit<S, B, K, C, A, R, X> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(self.settings.here()) }
    }
}

impl<S: fmt::Debug, B, K, C, A, R, X> fmt::Debug for RateLimit<S, B, K, C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.core.describe::<K>(f, "RateLimit")
    }
}
