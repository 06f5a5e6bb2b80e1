//! What is told of a store that fails.

use std::error::Error;
use std::sync::{MutexGuard, PoisonError};

use super::layer::LayerConfig;
use super::policy::Policy;
use crate::error::StoreError;
use crate::store::circuit::CircuitObserver;

/// What is told of a store that fails while it is asked about a policy.
impl CircuitObserver for Policy {
    fn failed(&self) {
        self.meters().store_failed();
    }

    fn opened(&self) {
        self.meters().circuit_opened();
        tracing::warn!(policy = self.name(), "rate limit circuit opens: the store is asked by probes only");
    }

    fn closed(&self) {
        self.meters().circuit_closed();
        tracing::info!(policy = self.name(), "rate limit circuit closes: the store is asked again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(policy = self.name(), %error, cause, "rate limit store fails");
    }

    fn outage_ends(&self) {
        tracing::info!(policy = self.name(), "rate limit store answers again");
    }
}

/// The same, and what is done without it.
impl<B> CircuitObserver for LayerConfig<B> {
    fn failed(&self) {
        self.policy.failed();
    }

    fn opened(&self) {
        *self.tripped_by() = Some(self.policy.clone());
        self.policy.opened();
    }

    fn closed(&self) {
        let tripped_by = self.tripped_by().take();
        tripped_by.as_ref().unwrap_or(&self.policy).closed();
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        let (policy, then) = (self.policy.name(), self.without_store());
        tracing::warn!(policy, %error, cause, ?then, "rate limit store fails");
    }

    fn outage_ends(&self) {
        self.policy.outage_ends();
    }
}

/// What is told of a store that fails while it is asked about policies that have no say, in a layer with this policy.
pub(super) struct Aside<'a>(pub(super) &'a Policy);

impl CircuitObserver for Aside<'_> {
    fn failed(&self) {
        self.0.failed();
    }

    fn opened(&self) {
        let policy = self.0.name();
        tracing::warn!(
            policy,
            "rate limit circuit of policies on trial opens: the store is asked about them by probes only"
        );
    }

    fn closed(&self) {
        let policy = self.0.name();
        tracing::info!(policy, "rate limit circuit of policies on trial closes: the store is asked about them again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(policy = self.0.name(), %error, cause, "rate limit store fails about policies on trial: they count nothing");
    }

    fn outage_ends(&self) {
        tracing::info!(policy = self.0.name(), "rate limit store answers again about policies on trial");
    }
}

impl<B> LayerConfig<B> {
    fn tripped_by(&self) -> MutexGuard<'_, Option<Policy>> {
        self.tripped_by.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
