use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::annotate::AnnotateResponse;
use super::charge_on::ChargeOn;
use super::cost::RequestCost;
use super::descriptor::{Descriptor, DescriptorList};
use super::filter::{Descriptors, FilterAction, RequestFilter};
use super::future::{ChargeRef, ResponseFuture};
use super::layer::RateLimitLayer;
use super::metrics::Verdict;
use super::options::LayerOptions;
use super::policy::Policy;
use super::record::record;
use super::rejection::{Denied, MissingKey, Rejection};
use super::settings::Settings;
use super::store::RateLimitStore;
use crate::key::{ExtractKey, GlobalKey, Key, missing_key};
use crate::on_failure::OnMissingKey;
use crate::responder::Responder;

/// A service behind a rate limit. See the [module docs](crate::rate_limit) for examples.
///
/// Ready when the inner service is ready: `poll_ready` makes no store call, since the key is known only when the request arrives. The inner
/// service that reported ready is held during the store call. If it holds a permit, for example of a concurrency limit below this layer, a
/// rejected request releases the permit unused.
#[must_use]
pub struct RateLimit<S, B, K = GlobalKey, O = LayerOptions> {
    inner: S,
    settings: Arc<Settings<B, K, O>>,
}

impl<S, B, K, O> RateLimit<S, B, K, O> {
    /// Puts `inner` behind the limit of `layer`, without a `ServiceBuilder`.
    pub fn new(inner: S, layer: RateLimitLayer<B, K, O>) -> Self {
        Self { inner, settings: layer.into_shared() }
    }

    /// Puts another service behind the same limit, at the cost of a clone.
    #[cfg(feature = "config")]
    pub(crate) fn around<S2>(&self, inner: S2) -> RateLimit<S2, B, K, O>
    where
        O: Clone,
    {
        RateLimit { inner, settings: Arc::clone(self.settings.for_this_thread()) }
    }

    /// Returns the inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns the inner service for changes.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service, without the limit.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, B, K, C, A, R, X> Service<Req> for RateLimit<S, B, K, LayerOptions<C, A, R, X>>
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
        self.inner.poll_ready(cx).map_err(|error| self.settings.options.responder.error(error))
    }

    fn call(&mut self, mut request: Req) -> Self::Future {
        let settings = &*self.settings;
        let mut added = Descriptors::default();
        missing_key::forget();
        match settings.options.filter.filter(&request, &mut added) {
            FilterAction::Limit => {}
            FilterAction::Bypass => return self.pass(request),
            FilterAction::Deny => {
                settings.core.policy.metrics().decided(Verdict::Denied);
                return self.reject(DescriptorList::default(), Rejection::Denied(Denied));
            }
        }
        let (policy, key) = match settings.counted(settings.key.extract_key(&request), added) {
            Ok(Counted::One(policy, key)) => (policy, key),
            Ok(Counted::Nothing) => return self.pass(request),
            Ok(Counted::Several(descriptors)) => {
                let cost = settings.options.cost.cost(&request);
                return self.evaluate(DescriptorList::Several(descriptors), cost, request);
            }
            Err(rejection) => return self.reject(DescriptorList::default(), rejection),
        };
        let (cost, core, primary) = (settings.options.cost.cost(&request), &settings.core, policy.is_none());
        let (mut resolved, is_known) = match &core.resolver {
            Some(resolver) if primary => {
                resolver.cached_policy(&key).map_or((None, false), |policy| (Some(policy), true))
            }
            _ => (policy, true),
        };
        let policy = resolved.as_ref().unwrap_or(&core.policy);
        let enforced = policy.is_enforced_for(&key);
        // Queued requests are served first, so skip the fast path.
        let is_known = is_known && !core.has_queue(if primary { &core.policy } else { policy }, &key);
        // Decides here without a future if that is possible. If no details of the decision are needed, the store only charges.
        if is_known && settings.needs_no_details::<S, Req>() && core.charge_now(policy, &key, cost) {
            // Cloned before the call, so that the compiler can build the inner future in its final place.
            let responder = A::clone(&settings.options.responder);
            return ResponseFuture::plain(self.inner.call(request), responder);
        }
        let mut decision = if is_known { core.try_decide(policy, &key, cost) } else { None };
        // A denied request may wait in a queue instead of being rejected here.
        let waits = enforced && decision.as_ref().is_some_and(|decision| core.can_wait(decision, cost));
        let final_decision = decision.as_ref().filter(|_| !waits);
        let admitted = final_decision.map(|decision| record(policy, decision, enforced, false, cost));
        // Built in its final place: moving it costs as much time as the decision.
        let mut make_descriptor = || Descriptor {
            policy: resolved.take(),
            key,
            primary,
            decision: decision.take(),
            enforced,
            local: false,
            question: None,
        };
        if admitted == Some(true) {
            let settings = Arc::clone(self.settings.for_this_thread());
            let charge = settings.track::<S, _>(|| DescriptorList::One(make_descriptor()), cost, &mut request);
            return ResponseFuture::calling(self.inner.call(request), charge, settings);
        }
        let descriptor = make_descriptor();
        match admitted.and_then(|_| core.limited(&descriptor, cost)) {
            Some(limited) => self.reject(DescriptorList::One(descriptor), Rejection::Limited(limited)),
            None => self.evaluate(DescriptorList::One(descriptor), cost, request),
        }
    }
}

impl<S, B, K, C, A, R, X> RateLimit<S, B, K, LayerOptions<C, A, R, X>> {
    #[inline]
    fn pass<Req>(&mut self, mut request: Req) -> ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req>,
        A: Responder<Rejection, S::Response, S::Error>
            + AnnotateResponse<Req, <A as Responder<Rejection, S::Response, S::Error>>::Response>,
    {
        self.settings.options.responder.pass(&mut request);
        ResponseFuture::calling(
            self.inner.call(request),
            ChargeRef::Untracked,
            Arc::clone(self.settings.for_this_thread()),
        )
    }

    fn reject<Req>(
        &mut self,
        descriptors: DescriptorList,
        rejection: Rejection,
    ) -> ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req> + Clone,
    {
        drop(self.take_ready());
        ResponseFuture::rejected(descriptors, rejection, Arc::clone(self.settings.for_this_thread()))
    }

    fn evaluate<Req>(
        &mut self,
        mut descriptors: DescriptorList,
        cost: u64,
        request: Req,
    ) -> ResponseFuture<S, Req, B, K, C, A, R, X>
    where
        S: Service<Req> + Clone,
        B: RateLimitStore + Clone + Send + Sync + 'static,
        X: RequestFilter<Req>,
    {
        let Settings { core, options, .. } = &*self.settings;
        if let Some(resolver) = core.resolver.as_ref().filter(|resolver| resolver.needs_input())
            && let Some(primary) = descriptors.iter_mut().find(|descriptor| descriptor.primary)
        {
            if primary.policy.is_none()
                && let Some(policy) = resolver.cached_policy(&primary.key)
            {
                primary.set_policy(policy);
            }
            // A cached policy may expire while the request waits.
            if primary.policy.is_none() || core.wait_config.is_some() {
                primary.question = options.filter.question(&request);
            }
        }
        ResponseFuture::evaluating(
            descriptors,
            cost,
            self.take_ready(),
            request,
            Arc::clone(self.settings.for_this_thread()),
        )
    }
}

impl<S: Clone, B, K, O> RateLimit<S, B, K, O> {
    /// Takes the instance of the inner service that reported ready, with its permit, and leaves a clone.
    fn take_ready(&mut self) -> S {
        let fresh = self.inner.clone();
        mem::replace(&mut self.inner, fresh)
    }
}

/// The policies and keys under which a request is counted.
enum Counted {
    Nothing,
    /// One policy and key. `None` is the policy of the layer.
    One(Option<Policy>, Key),
    Several(Vec<Descriptor>),
}

impl<B, K, O> Settings<B, K, O> {
    /// How a request with this key counts. `added` are the policies and keys of the filters.
    #[inline]
    fn counted(&self, key: Option<Key>, added: Descriptors) -> Result<Counted, Rejection> {
        match key {
            Some(key) if added.added.is_empty() && !key.is_empty() => Ok(Counted::One(None, key)),
            key => self.counted_with(key, added),
        }
    }

    fn counted_with(&self, key: Option<Key>, added: Descriptors) -> Result<Counted, Rejection> {
        let layer = &self.core.policy;
        let mut descriptors = Vec::new();
        if let Some(key) = self.effective_key(layer, key)? {
            descriptors.push(Descriptor::new(layer, None, key));
        }
        for (policy, key) in added.added {
            if let Some(key) = self.effective_key(&policy, key)? {
                descriptors.push(Descriptor::new(layer, Some(policy), key));
            }
        }
        Ok(match descriptors.as_mut_slice() {
            [] => Counted::Nothing,
            [only] => Counted::One(only.policy.take(), only.key),
            _ => Counted::Several(descriptors),
        })
    }

    /// The key under which the request is counted.
    fn effective_key(&self, policy: &Policy, key: Option<Key>) -> Result<Option<Key>, Rejection> {
        if let Some(key) = key.filter(|key| !key.is_empty()) {
            return Ok(Some(key));
        }
        match self.core.on_missing_key {
            OnMissingKey::Pass => Ok(None),
            OnMissingKey::Reject if !policy.is_enforced_without_key() => {
                policy.metrics().decided(Verdict::Shadow);
                Ok(None)
            }
            OnMissingKey::Reject => {
                policy.metrics().decided(Verdict::MissingKey);
                Err(Rejection::MissingKey(MissingKey::new()))
            }
        }
    }
}

// Not derived: `derive` would require `K: Clone` and so on.
impl<S: Clone, B, K, O: Clone> Clone for RateLimit<S, B, K, O> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(self.settings.for_this_thread()) }
    }
}

impl<S: fmt::Debug, B, K, O> fmt::Debug for RateLimit<S, B, K, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.core.describe::<K>(f, "RateLimit")
    }
}
