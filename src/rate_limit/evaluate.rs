//! Evaluates a request for a layer: calls the store, applies the fallback if that fails, and combines the decisions into a result.

use std::error::Error;

use smallvec::SmallVec;
use tokio::time::Instant;
use tracing::Instrument;

use super::circuit_events::ShadowPolicies;
use super::decision::{Decision, RateLimited};
use super::descriptor::{Descriptor, Descriptors, enforced_decided};
use super::layer::{LayerConfig, RateLimitFallback};
use super::metrics::{Meters, Verdict};
use super::policy::Policy;
use super::rejection::Rejection;
use super::resolver::{PolicyResolver, Question, Resolved};
use super::store::{Charged, RateLimitStore, Request};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::circuit::Circuit;
use crate::store::deadline::{Deadline, require_nonzero_deadline};

/// The descriptors of a request with their decisions, and the result.
pub(super) struct Evaluation {
    pub(super) descriptors: Descriptors,
    pub(super) result: Result<(), Rejection>,
}

impl<B> LayerConfig<B> {
    /// The fallback for a failing store. A deadline of zero is not an outage in which each process may admit the quota.
    pub(super) fn without_store(&self) -> RateLimitFallback {
        if self.deadline.is_zero() { RateLimitFallback::Deny } else { self.on_store_error }
    }
}

impl<B: RateLimitStore + Sync> LayerConfig<B> {
    /// Decides about one descriptor, if that is possible without waiting. Not recorded as a success of the store, since a decorator in
    /// front of the store may have decided.
    #[inline]
    pub(super) fn try_decide_locally(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        if policy.rules_out(cost) { policy.rule_out(cost) } else { self.store.check_now(policy, key, cost) }
    }

    /// Charges the request immediately if possible, without the details of a decision. Returns whether it was charged.
    #[inline]
    pub(super) fn charge_now(&self, policy: &Policy, key: &Key, cost: u64) -> bool {
        if cost == 0 || policy.rules_out(cost) {
            return false;
        }
        let charged = self.store.charge_now(policy, key, cost);
        if let Some(Charged { is_near_limit }) = charged {
            count_allowed(policy, Verdict::Allowed, is_near_limit);
        }
        charged.is_some()
    }

    /// The rejection of the request due to this descriptor.
    pub(super) fn limited(&self, descriptor: &Descriptor, cost: u64) -> Option<RateLimited> {
        let (policy, decision) = (descriptor.policy(&self.policy).clone(), descriptor.decision.clone()?);
        Some(RateLimited::new(policy, cost, decision))
    }

    /// Evaluates a request that needs to wait for the resolver or the store.
    pub(super) async fn evaluate(&self, mut descriptors: Descriptors, cost: u64) -> Evaluation {
        let queried = self.query(&mut descriptors, cost).await;
        self.finish(descriptors, cost, queried).await
    }

    /// Gets the decisions that the result depends on.
    pub(super) async fn query(&self, descriptors: &mut [Descriptor], cost: u64) -> Result<(), StoreError> {
        let span = tracing::debug_span!("rate_limit", policy = self.policy.name(), subjects = descriptors.len());
        let result = self.decide(descriptors, cost).instrument(span).await;
        descriptors.iter_mut().for_each(|descriptor| descriptor.question = None);
        match result {
            // Only shadow policies failed.
            Err(_) if enforced_decided(descriptors) => Ok(()),
            result => result,
        }
    }

    /// Turns the decisions, or the error, into a result.
    pub(super) async fn finish(
        &self,
        mut descriptors: Descriptors,
        cost: u64,
        queried: Result<(), StoreError>,
    ) -> Evaluation {
        let result = match queried {
            Ok(()) => self.combine(&descriptors, cost),
            Err(error) => self.fallback(&mut descriptors, cost, error).await,
        };
        Evaluation { descriptors, result }
    }

    /// Calls the resolver and then the store. Each has the whole deadline, so that a slow resolver causes no store error.
    async fn decide(&self, descriptors: &mut [Descriptor], cost: u64) -> Result<(), StoreError> {
        // The deadline is checked only before calls that take time.
        let has_time = || require_nonzero_deadline(self.deadline).inspect_err(|error| self.circuit.failed(self, error));
        // Without a wait queue or a resolver, the local decision was already tried when the request arrived.
        let mut may_be_known = self.wait_config.is_some();
        if let (Some(resolver), Some(primary)) =
            (&self.resolver, descriptors.iter_mut().find(|descriptor| descriptor.primary))
        {
            let policy = match resolver.cached_policy(&primary.key) {
                Some(policy) => policy,
                None => match resolver.question(&primary.key, primary.question.as_ref()) {
                    Some(question) => {
                        has_time()?;
                        self.resolve(resolver, &primary.key, &question).await?
                    }
                    // The request has no input for the resolver, or it had a cached policy that has expired since.
                    None => primary.policy(&self.policy).clone(),
                },
            };
            primary.count_by(policy);
            may_be_known = true;
        }
        if let ([only], true) = (&mut *descriptors, may_be_known) {
            // A local decision is no success of the store, and no probe.
            only.decision = self.try_decide_locally(only.policy(&self.policy), &only.key, cost);
            if only.decision.is_some() {
                return Ok(());
            }
        }
        if self.decide_all_now(descriptors, cost) {
            return Ok(());
        }
        has_time()?;
        let start = Instant::now();
        let result = Deadline::new(self.call_store(descriptors, cost), self.deadline).await;
        if !result.as_ref().is_err_and(Circuit::is_cause_of) {
            self.policy.meters().store_answered(start.elapsed());
        }
        result.inspect_err(|error| {
            if enforced_decided(descriptors) {
                // Otherwise the circuit would open due to a shadow policy and reject requests.
                self.shadow_circuit.failed(&ShadowPolicies(&self.policy), error);
            } else {
                self.circuit.failed(self, error);
            }
        })
    }

    /// Decides about several descriptors together if that is possible without waiting. Not recorded as a success of the store either.
    fn decide_all_now(&self, descriptors: &mut [Descriptor], cost: u64) -> bool {
        let can_be_called = !self.circuit.is_open() && !self.deadline.is_zero();
        let exceeds_capacity = self.exceeds_capacity(descriptors, cost);
        // If the store can be called, it counts the shadow policies, and reports the state of the other policies. One policy whose capacity
        // is exceeded rejects the request in any case.
        let needs_store =
            can_be_called && (exceeds_capacity || descriptors.iter().any(|descriptor| !descriptor.enforced));
        if descriptors.len() < 2 || needs_store {
            return false;
        }
        let enforced = descriptors.iter().filter(|descriptor| descriptor.enforced && !exceeds_capacity);
        let requests: Vec<Request> = enforced.map(|descriptor| self.request(descriptor, cost)).collect();
        let decisions = match &requests[..] {
            // If no policy is enforced, one of the calls may be the probe.
            [] if !exceeds_capacity && !self.deadline.is_zero() => None,
            [] => Some(Vec::new()),
            [Request { policy, key, cost }] => self.store.check_now(policy, key, *cost).map(|decision| vec![decision]),
            several => self.store.check_all_now(several),
        };
        let Some(decisions) = decisions else { return false };
        let mut decisions = decisions.into_iter();
        for descriptor in &mut *descriptors {
            descriptor.decision = match (descriptor.enforced, exceeds_capacity) {
                (true, false) => decisions.next(),
                (true, true) => descriptor.policy(&self.policy).rule_out(cost),
                (false, _) => self.try_decide_locally(descriptor.policy(&self.policy), &descriptor.key, cost),
            };
        }
        // Without an enforced policy, all descriptors need a decision.
        exceeds_capacity || !requests.is_empty() || descriptors.iter().all(|descriptor| descriptor.decision.is_some())
    }

    fn request(&self, descriptor: &Descriptor, cost: u64) -> Request {
        Request { policy: descriptor.policy(&self.policy).clone(), key: descriptor.key, cost }
    }

    /// Calls the resolver and records the outcome. An error concerns one key perhaps, and never the store.
    async fn resolve(&self, resolver: &PolicyResolver, key: &Key, question: &Question) -> Result<Policy, StoreError> {
        match Deadline::new(resolver.resolve(key, question, self.deadline / 2), self.deadline).await {
            // A cached policy is no success of the resolver.
            Ok(Resolved::Cached(policy)) => Ok(policy),
            Ok(Resolved::Fresh(policy)) => {
                if resolver.outage().ends() {
                    tracing::info!(policy = self.policy.name(), "rate limit resolver answers again");
                }
                Ok(policy)
            }
            Ok(Resolved::Stale(policy, error)) => {
                self.resolver_failed(resolver, &error, true);
                Ok(policy)
            }
            Err(error) => {
                self.resolver_failed(resolver, &error, false);
                Err(error)
            }
        }
    }

    /// Logs once per outage, with the fallback for keys without a stale policy, whether or not this key has one.
    fn resolver_failed(&self, resolver: &PolicyResolver, error: &StoreError, old_answer: bool) {
        self.policy.meters().resolver_failed();
        if resolver.outage().begins() {
            // The text of the error itself is about a store.
            let cause =
                error.source().map_or_else(|| "the resolver did not answer in time".to_owned(), ToString::to_string);
            let (policy, then) = (self.policy.name(), self.without_store());
            tracing::warn!(policy, cause, ?then, old_answer, "rate limit resolver fails");
        }
    }

    /// Calls the store, if the circuit allows it.
    async fn call_store(&self, descriptors: &mut [Descriptor], cost: u64) -> Result<(), StoreError> {
        if self.exceeds_capacity(descriptors, cost) {
            // The store could only report the state of the other policies, which is not worth a probe.
            self.circuit.admit_no_probe()?;
        } else {
            self.circuit.admit()?;
        }
        if self.decide_enforced(&*self.store, descriptors, cost).await? {
            self.circuit.answered(self);
        }
        if descriptors.iter().all(|descriptor| descriptor.decision.is_some()) {
            return Ok(());
        }
        let only_shadow_left = enforced_decided(descriptors);
        if only_shadow_left && self.shadow_circuit.admit().is_err() {
            // The shadow policies would delay the request for the whole deadline. They stay undecided.
            return Ok(());
        }
        if self.decide_one_by_one(&*self.store, descriptors, cost, false).await? {
            self.circuit.answered(self);
            if only_shadow_left {
                self.shadow_circuit.answered(&ShadowPolicies(&self.policy));
            }
        }
        Ok(())
    }

    /// Applies the fallback after an error of the store or the resolver.
    async fn fallback(&self, descriptors: &mut [Descriptor], cost: u64, error: StoreError) -> Result<(), Rejection> {
        let then = self.without_store();
        if then == RateLimitFallback::Local {
            for descriptor in descriptors.iter_mut().filter(|descriptor| self.is_unresolved(descriptor)) {
                descriptor.policy = Some(self.policy.clone());
            }
        }
        let exceeds_capacity = self.exceeds_capacity(descriptors, cost);
        for descriptor in &mut *descriptors {
            // Partial results are discarded, except decisions that need no store.
            let is_known = exceeds_capacity && !self.is_unresolved(descriptor);
            descriptor.decision = if is_known { descriptor.policy(&self.policy).rule_out(cost) } else { None };
        }
        if exceeds_capacity {
            return self.combine(descriptors, cost);
        }
        // An unresolved policy may be enforced, whatever the mode of the layer's own policy.
        let may_be_enforced =
            descriptors.iter().any(|descriptor| descriptor.enforced || self.is_unresolved(descriptor));
        match then {
            RateLimitFallback::Local => {
                for descriptor in &mut *descriptors {
                    descriptor.policy = Some(descriptor.policy(&self.policy).share_of(self.replicas));
                    descriptor.local = true;
                }
                if self.exceeds_capacity(descriptors, cost) {
                    // Too much for the share of this process, but not for the quota.
                    self.record_undecided(descriptors, Verdict::FailedClosed);
                    return Err(Rejection::Store(error));
                }
                // The memory backend does not fail.
                let decided = async {
                    self.decide_enforced(self.fallback.backend(), descriptors, cost).await?;
                    self.decide_one_by_one(self.fallback.backend(), descriptors, cost, false).await
                };
                match decided.await {
                    Ok(_) => self.combine(descriptors, cost),
                    Err(error) => Err(Rejection::Store(error)),
                }
            }
            // A cost of 0 needs no room.
            RateLimitFallback::Deny if may_be_enforced && cost > 0 => {
                self.record_undecided(descriptors, Verdict::FailedClosed);
                Err(Rejection::Store(error))
            }
            RateLimitFallback::Allow | RateLimitFallback::Deny => {
                self.record_undecided(descriptors, Verdict::FailedOpen);
                Ok(())
            }
        }
    }

    /// Records the outcome of a request without decisions.
    fn record_undecided(&self, descriptors: &[Descriptor], verdict: Verdict) {
        for descriptor in descriptors {
            descriptor.policy(&self.policy).meters().decided(verdict);
        }
    }

    /// Combines the decisions into the result, once all are known.
    pub(super) fn combine(&self, descriptors: &[Descriptor], cost: u64) -> Result<(), Rejection> {
        let is_rejected = descriptors.iter().any(Descriptor::denies);
        for descriptor in descriptors {
            let (policy, Some(decision)) = (descriptor.policy(&self.policy), &descriptor.decision) else { continue };
            if is_rejected && descriptor.enforced && decision.is_allowed() {
                // It had room, but was not charged.
                policy.meters().decided(Verdict::TurnedAway);
            } else {
                record(policy, decision, descriptor.enforced, descriptor.local, cost);
            }
        }
        self.denials(descriptors, cost).map_or(Ok(()), |limited| Err(Rejection::Limited(limited)))
    }

    /// The rejection by all policies that deny the request.
    fn denials(&self, descriptors: &[Descriptor], cost: u64) -> Option<RateLimited> {
        let denials = descriptors.iter().filter(|descriptor| descriptor.denies());
        denials.filter_map(|descriptor| self.limited(descriptor, cost)).reduce(RateLimited::and)
    }

    /// Whether the request is rejected whatever the store and a pending resolver call return.
    pub(super) fn exceeds_capacity(&self, descriptors: &[Descriptor], cost: u64) -> bool {
        let mut known = descriptors.iter().filter(|descriptor| !self.is_unresolved(descriptor));
        known.any(|descriptor| descriptor.enforced && descriptor.policy(&self.policy).rules_out(cost))
    }

    /// Whether the resolver chooses the policy of this descriptor and has not done so yet.
    pub(super) fn is_unresolved(&self, descriptor: &Descriptor) -> bool {
        self.resolver.is_some() && descriptor.primary && descriptor.policy.is_none()
    }

    /// Decides in `store` about the enforced policies together, before the shadow policies. Returns whether the store itself was called,
    /// and not only a decorator in front of it.
    async fn decide_enforced<S: RateLimitStore + Sync>(
        &self,
        store: &S,
        descriptors: &mut [Descriptor],
        cost: u64,
    ) -> Result<bool, StoreError> {
        let layer = &self.policy;
        let mut was_called = false;
        for descriptor in &mut *descriptors {
            descriptor.decision = descriptor.policy(layer).rule_out(cost);
        }
        let exceeds_capacity = self.exceeds_capacity(descriptors, cost);
        let mut together: SmallVec<[usize; 4]> = SmallVec::new();
        for (index, descriptor) in descriptors.iter_mut().enumerate() {
            if descriptor.decision.is_some() {
                continue;
            }
            let (policy, key) = (descriptor.policy(layer), &descriptor.key);
            if descriptor.enforced && !exceeds_capacity {
                together.push(index);
            } else if descriptor.enforced {
                // The request is rejected in any case.
                descriptor.decision = Some(store.peek(policy, key, cost).await?);
                was_called = true;
            }
        }
        if together.len() > 1 {
            let requests: Vec<Request> =
                together.iter().map(|index| self.request(&descriptors[*index], cost)).collect();
            let known = store.check_all_now(&requests);
            was_called |= known.is_none();
            let decisions = match known {
                Some(decisions) => decisions,
                None => store.check_all(&requests).await?,
            };
            for (index, decision) in together.iter().zip(decisions) {
                descriptors[*index].decision = Some(decision);
            }
        }
        Ok(self.decide_one_by_one(store, descriptors, cost, true).await? | was_called)
    }

    /// Decides in `store` about each undecided descriptor by itself, `enforced` or not. Returns whether the store itself was called.
    async fn decide_one_by_one<S: RateLimitStore + Sync>(
        &self,
        store: &S,
        descriptors: &mut [Descriptor],
        cost: u64,
        enforced: bool,
    ) -> Result<bool, StoreError> {
        // For a single descriptor, the local decision was already tried.
        let may_be_known = descriptors.len() > 1;
        let undecided = |descriptor: &&mut Descriptor| descriptor.enforced == enforced && descriptor.decision.is_none();
        let mut was_called = false;
        for descriptor in descriptors.iter_mut().filter(undecided) {
            let (policy, key) = (descriptor.policy(&self.policy), &descriptor.key);
            let known = if may_be_known { store.check_now(policy, key, cost) } else { None };
            was_called |= known.is_none();
            descriptor.decision = match known {
                Some(decision) => Some(decision),
                None => Some(store.check(policy, key, cost).await?),
            };
        }
        Ok(was_called)
    }
}

/// Records a decision, and returns whether its policy lets the request pass.
#[inline]
pub(super) fn record(policy: &Policy, decision: &Decision, enforced: bool, local: bool, cost: u64) -> bool {
    if decision.is_allowed() {
        if Meters::COUNT {
            let verdict = if local { Verdict::LocalAllowed } else { Verdict::Allowed };
            count_allowed(policy, verdict, decision.is_near_limit());
        }
        return true;
    }
    record_denial(policy, decision, enforced, local, cost);
    !enforced
}

/// Not inlined, to keep the path of admitted requests short.
#[cold]
fn record_denial(policy: &Policy, decision: &Decision, enforced: bool, local: bool, cost: u64) {
    let verdict = match (enforced, local) {
        (false, _) => Verdict::Shadow,
        (true, true) => Verdict::LocalLimited,
        (true, false) => Verdict::of(decision.outcome()),
    };
    policy.meters().decided(verdict);
    tracing::debug!(
        policy = policy.name(),
        verdict = verdict.name(),
        cost,
        retry_after = ?decision.retry_after(),
        "over a rate limit"
    );
}

#[inline]
pub(super) fn count_allowed(policy: &Policy, verdict: Verdict, is_near_limit: bool) {
    policy.meters().decided(verdict);
    if is_near_limit {
        policy.meters().near_limit();
    }
}
