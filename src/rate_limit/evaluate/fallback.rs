//! Decides without the store or the resolver, after one of them has failed.

use super::decide::Decider;
use crate::error::StoreError;
use crate::rate_limit::descriptor::Descriptor;
use crate::rate_limit::layer_config::{LayerConfig, RateLimitFallback};
use crate::rate_limit::metrics::Verdict;
use crate::rate_limit::rejection::Rejection;
use crate::rate_limit::store::RateLimitStore;

impl<B: RateLimitStore + Sync> LayerConfig<B> {
    /// Applies the fallback after an error of the store or the resolver.
    pub(super) async fn fallback(
        &self,
        descriptors: &mut [Descriptor],
        cost: u64,
        error: StoreError,
    ) -> Result<(), Rejection> {
        let fallback = self.effective_fallback();
        if fallback == RateLimitFallback::Local {
            for descriptor in descriptors.iter_mut().filter(|descriptor| self.is_unresolved(descriptor)) {
                descriptor.policy = Some(self.policy.clone());
            }
        }
        let exceeds_capacity = self.exceeds_capacity(descriptors, cost);
        for descriptor in &mut *descriptors {
            // Partial results are discarded, except decisions that need no store.
            let is_known = exceeds_capacity && !self.is_unresolved(descriptor);
            descriptor.decision =
                if is_known { descriptor.policy(&self.policy).decision_if_never_allowed(cost) } else { None };
        }
        if exceeds_capacity {
            return self.combine(descriptors, cost);
        }
        // An unresolved policy may be enforced, whatever the mode of the layer's own policy.
        let may_be_enforced =
            descriptors.iter().any(|descriptor| descriptor.enforced || self.is_unresolved(descriptor));
        match fallback {
            RateLimitFallback::Local => self.decide_in_this_process(descriptors, cost, error).await,
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

    /// Enforces the share of this process with its own counts.
    async fn decide_in_this_process(
        &self,
        descriptors: &mut [Descriptor],
        cost: u64,
        error: StoreError,
    ) -> Result<(), Rejection> {
        for descriptor in &mut *descriptors {
            descriptor.policy = Some(descriptor.policy(&self.policy).share_of(self.replicas));
            descriptor.local = true;
        }
        if self.exceeds_capacity(descriptors, cost) {
            // Too much for the share of this process, but not for the quota.
            self.record_undecided(descriptors, Verdict::FailedClosed);
            return Err(Rejection::Store(error));
        }
        let decider = Decider::new(self.shared.fallback(), &self.policy, descriptors, cost);
        // The memory backend does not fail.
        decider.call_enforced(descriptors).await.map_err(Rejection::Store)?;
        decider.call_shadows(descriptors).await.map_err(Rejection::Store)?;
        self.combine(descriptors, cost)
    }

    /// Records the outcome of a request without decisions.
    fn record_undecided(&self, descriptors: &[Descriptor], verdict: Verdict) {
        for descriptor in descriptors {
            descriptor.policy(&self.policy).metrics().decided(verdict);
        }
    }
}
