//! Logs and metrics of a failing store.

use std::error::Error;

use super::layer_config::LayerConfig;
use super::policy::Policy;
use crate::error::StoreError;
use crate::store::circuit::{CircuitObserver, observe_circuit};

// Reports a store that fails in calls about this policy.
observe_circuit!("rate limit", Policy, |policy| policy.metrics(), policy = policy.name());

/// Reports the same for a layer, with the fallback that it applies.
impl<B> CircuitObserver for LayerConfig<B> {
    fn failed(&self) {
        self.policy.failed();
    }

    fn opened(&self) {
        *self.shared.circuits.tripped_by() = Some(self.policy.clone());
        self.policy.opened();
    }

    fn closed(&self) {
        let tripped_by = self.shared.circuits.tripped_by().take();
        tripped_by.as_ref().unwrap_or(&self.policy).closed();
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        let (policy, then) = (self.policy.name(), self.effective_fallback());
        tracing::warn!(policy, %error, cause, ?then, "rate limit store fails");
    }

    fn outage_ends(&self) {
        self.policy.outage_ends();
    }
}

/// Reports a store that fails in calls about shadow policies, in a layer with this policy.
pub(super) struct ShadowPolicies<'a>(pub(super) &'a Policy);

impl CircuitObserver for ShadowPolicies<'_> {
    fn failed(&self) {
        self.0.failed();
    }

    fn opened(&self) {
        let policy = self.0.name();
        tracing::warn!(policy, "rate limit circuit of shadow policies opens: only probes call the store about them");
    }

    fn closed(&self) {
        let policy = self.0.name();
        tracing::info!(policy, "rate limit circuit of shadow policies closes: all calls about them reach the store");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(policy = self.0.name(), %error, cause, "rate limit store fails for shadow policies: they are not counted");
    }

    fn outage_ends(&self) {
        tracing::info!(policy = self.0.name(), "rate limit store answers again for shadow policies");
    }
}
