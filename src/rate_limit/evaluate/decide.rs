//! Second phase of an evaluation: decides about each descriptor, without waiting if the store allows that, otherwise by a store call.

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::circuit_events::ShadowPolicies;
use crate::rate_limit::decision::Decision;
use crate::rate_limit::descriptor::{Descriptor, all_enforced_are_decided};
use crate::rate_limit::layer_config::LayerConfig;
use crate::rate_limit::metrics::Verdict;
use crate::rate_limit::policy::Policy;
use crate::rate_limit::record::count_allowed;
use crate::rate_limit::store::{Charged, RateLimitStore, Request};
use crate::store::circuit::Circuit;
use crate::store::deadline::Deadline;

impl<B: RateLimitStore + Sync> LayerConfig<B> {
    /// Decides about one descriptor, if that is possible without waiting. Does not tell the circuit that the store answered: a wrapper
    /// around the store may have decided by itself.
    #[inline]
    pub(in crate::rate_limit) fn try_decide(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        if policy.can_never_allow(cost) {
            policy.decision_if_never_allowed(cost)
        } else {
            self.store.check_now(policy, key, cost)
        }
    }

    /// Charges the request immediately if possible, without the details of a decision. Returns whether it was charged.
    #[inline]
    pub(in crate::rate_limit) fn charge_now(&self, policy: &Policy, key: &Key, cost: u64) -> bool {
        if cost == 0 || policy.can_never_allow(cost) {
            return false;
        }
        let charged = self.store.charge_now(policy, key, cost);
        if let Some(Charged { is_near_limit }) = charged {
            count_allowed(policy, Verdict::Allowed, is_near_limit);
        }
        charged.is_some()
    }

    /// Whether the request is rejected whatever the store and a pending resolver call return.
    pub(in crate::rate_limit) fn exceeds_capacity(&self, descriptors: &[Descriptor], cost: u64) -> bool {
        let mut known = descriptors.iter().filter(|descriptor| !self.is_unresolved(descriptor));
        known.any(|descriptor| descriptor.enforced && descriptor.policy(&self.policy).can_never_allow(cost))
    }

    /// Decides about all descriptors. Their policies must be resolved. After an error, some descriptors may have a decision.
    pub(super) async fn decide(&self, descriptors: &mut [Descriptor], cost: u64) -> Result<(), StoreError> {
        let decider = Decider::new(&*self.store, &self.policy, descriptors, cost);
        // Without a wait queue or a resolver, the decision about a single descriptor was already tried when the request arrived.
        let was_tried = descriptors.len() == 1 && self.wait_config.is_none() && self.resolver.is_none();
        if !was_tried {
            decider.try_decide(descriptors);
        }
        if descriptors.iter().all(|descriptor| descriptor.decision.is_some()) {
            return Ok(());
        }
        let is_reachable = !self.shared.circuits.store.is_open() && !self.deadline.is_zero();
        if !is_reachable && (decider.exceeds_capacity || all_enforced_are_decided(descriptors)) {
            // The result is certain already. A call would only fetch the state of other policies, or charge shadow policies.
            return Ok(());
        }
        self.require_time()?;
        let start = Instant::now();
        let result = Deadline::new(self.call_store(&decider, descriptors), self.deadline).await;
        if !result.as_ref().is_err_and(Circuit::is_cause_of) {
            self.policy.metrics().record_call_time(start.elapsed());
        }
        result.inspect_err(|error| {
            if all_enforced_are_decided(descriptors) {
                // Failures of shadow policies must not open the store's circuit, which would leave the enforced policies to the fallback.
                self.shared.circuits.shadow.failed(&ShadowPolicies(&self.policy), error);
            } else {
                self.shared.circuits.store.failed(self, error);
            }
        })
    }

    /// Calls the store about the undecided descriptors, if the circuits allow it.
    async fn call_store(&self, decider: &Decider<'_, B>, descriptors: &mut [Descriptor]) -> Result<(), StoreError> {
        let circuits = &self.shared.circuits;
        if decider.exceeds_capacity {
            // The result is certain already, so the call is not worth a probe.
            circuits.store.admit_no_probe()?;
        } else {
            circuits.store.admit()?;
        }
        if decider.call_enforced(descriptors).await? {
            circuits.store.answered(self);
        }
        if undecided(descriptors, false).is_empty() {
            // Without a call there is no probe of the circuit of shadow policies.
            return Ok(());
        }
        let only_shadow_left = all_enforced_are_decided(descriptors);
        if only_shadow_left && circuits.shadow.admit().is_err() {
            // The store fails for shadow policies. A call about them could delay the request until its deadline. They stay undecided.
            return Ok(());
        }
        if decider.call_shadows(descriptors).await? {
            circuits.store.answered(self);
            if only_shadow_left {
                circuits.shadow.answered(&ShadowPolicies(&self.policy));
            }
        }
        Ok(())
    }
}

/// Decides about the descriptors of one request in one store. The enforced ones are charged together, or not at all.
pub(super) struct Decider<'a, S> {
    store: &'a S,
    // The policy of the layer.
    policy: &'a Policy,
    cost: u64,
    // Whether the capacity of an enforced policy rejects the request. Then no enforced policy is charged. Shadow policies still are.
    exceeds_capacity: bool,
}

impl<'a, S: RateLimitStore + Sync> Decider<'a, S> {
    /// Denies the descriptors whose capacity the cost exceeds. The others get no decision yet.
    pub(super) fn new(store: &'a S, policy: &'a Policy, descriptors: &mut [Descriptor], cost: u64) -> Self {
        let mut exceeds_capacity = false;
        for descriptor in descriptors {
            descriptor.decision = descriptor.policy(policy).decision_if_never_allowed(cost);
            exceeds_capacity |= descriptor.denies();
        }
        Self { store, policy, cost, exceeds_capacity }
    }

    /// Decides as far as the store can answer immediately.
    pub(super) fn try_decide(&self, descriptors: &mut [Descriptor]) {
        match &mut undecided(descriptors, true)[..] {
            [] => {}
            _ if self.exceeds_capacity => {}
            [only] => only.decision = self.check_now(only),
            several => {
                let decisions = self.store.check_all_now(&self.requests(several));
                assign(several, decisions.unwrap_or_default());
            }
        }
        for shadow in undecided(descriptors, false) {
            shadow.decision = self.check_now(shadow);
        }
    }

    /// Calls the store about the undecided enforced policies. Returns whether there were any.
    pub(super) async fn call_enforced(&self, descriptors: &mut [Descriptor]) -> Result<bool, StoreError> {
        let mut enforced = undecided(descriptors, true);
        match &mut enforced[..] {
            [] => return Ok(false),
            rejected if self.exceeds_capacity => {
                for descriptor in rejected {
                    let state = self.store.peek(descriptor.policy(self.policy), &descriptor.key, self.cost).await?;
                    descriptor.decision = Some(state);
                }
            }
            [only] => only.decision = Some(self.check(only).await?),
            several => {
                let decisions = self.store.check_all(&self.requests(several)).await?;
                assign(several, decisions);
            }
        }
        Ok(true)
    }

    /// Calls the store about the undecided shadow policies. Returns whether there were any.
    pub(super) async fn call_shadows(&self, descriptors: &mut [Descriptor]) -> Result<bool, StoreError> {
        let shadows = undecided(descriptors, false);
        let was_called = !shadows.is_empty();
        for shadow in shadows {
            shadow.decision = Some(self.check(shadow).await?);
        }
        Ok(was_called)
    }

    fn check_now(&self, descriptor: &Descriptor) -> Option<Decision> {
        self.store.check_now(descriptor.policy(self.policy), &descriptor.key, self.cost)
    }

    async fn check(&self, descriptor: &Descriptor) -> Result<Decision, StoreError> {
        self.store.check(descriptor.policy(self.policy), &descriptor.key, self.cost).await
    }

    fn requests(&self, descriptors: &[&mut Descriptor]) -> Vec<Request> {
        let request = |descriptor: &&mut Descriptor| Request {
            policy: descriptor.policy(self.policy).clone(),
            key: descriptor.key,
            cost: self.cost,
        };
        descriptors.iter().map(request).collect()
    }
}

/// The descriptors without a decision, `enforced` or not.
fn undecided(descriptors: &mut [Descriptor], enforced: bool) -> SmallVec<[&mut Descriptor; 4]> {
    let undecided = |descriptor: &&mut Descriptor| descriptor.enforced == enforced && descriptor.decision.is_none();
    descriptors.iter_mut().filter(undecided).collect()
}

fn assign(descriptors: &mut [&mut Descriptor], decisions: Vec<Decision>) {
    for (descriptor, decision) in descriptors.iter_mut().zip(decisions) {
        descriptor.decision = Some(decision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;
    use crate::rate_limit::{Mode, Quota};

    /// Descriptors of policies with these names, quotas and modes, and the policy of the layer.
    fn descriptors<const N: usize>(policies: [(&str, u64, Mode); N]) -> (Policy, [Descriptor; N]) {
        let layer = Policy::new("layer", Quota::per_hour(1).fixed_window());
        let descriptor = |(name, quota, mode)| {
            let policy = Policy::new(name, Quota::per_hour(quota).fixed_window()).mode(mode);
            Descriptor::new(&layer, Some(policy), Key::from("alice"))
        };
        (layer.clone(), policies.map(descriptor))
    }

    fn remaining(descriptors: &[Descriptor]) -> Vec<Option<u64>> {
        descriptors.iter().map(|descriptor| descriptor.decision.as_ref().and_then(Decision::remaining)).collect()
    }

    #[tokio::test]
    async fn enforced_policies_are_charged_together_or_not_at_all() {
        let store = MemoryBackend::new();
        let (layer, mut few) = descriptors([("a", 5, Mode::Enforce), ("b", 2, Mode::Enforce)]);
        for expected in [[Some(3), Some(0)], [Some(3), Some(0)]] {
            let decider = Decider::new(&store, &layer, &mut few, 2);
            decider.try_decide(&mut few);
            assert_eq!(remaining(&few), expected);
        }
        assert!(few[1].denies());
    }

    #[tokio::test]
    async fn exceeded_capacity_charges_only_shadow_policies() {
        let store = MemoryBackend::new();
        let (layer, mut all) = descriptors([("a", 9, Mode::Enforce), ("b", 2, Mode::Enforce), ("c", 9, Mode::Shadow)]);
        for shadow in [6, 3] {
            let decider = Decider::new(&store, &layer, &mut all, 3);
            assert!(decider.exceeds_capacity && all[1].denies());
            decider.try_decide(&mut all);
            assert!(decider.call_enforced(&mut all).await.unwrap());
            assert!(!decider.call_shadows(&mut all).await.unwrap(), "decided without a call");
            assert_eq!((remaining(&all)[0], remaining(&all)[2]), (Some(9), Some(shadow)));
        }
    }
}
