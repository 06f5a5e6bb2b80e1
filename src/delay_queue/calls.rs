use std::error::Error;
use std::sync::OnceLock;

use super::meters::{CallMeters, PushResult};
use super::store::Admission;
use crate::circuit::{Circuit, CircuitBreaker, Watch};
use crate::error::StoreError;
use crate::key::Key;

/// What all clones of a queue have in common for their calls of the store, those of workers aside: these ask until it works.
pub(super) struct Calls {
    queue: Key,
    circuit: Circuit,
    // Made when the store is first asked, so that the recorder is installed by then.
    meters: OnceLock<CallMeters>,
}

impl Calls {
    pub(super) fn new(queue: Key, breaker: CircuitBreaker) -> Self {
        Self { queue, circuit: Circuit::new(breaker), meters: OnceLock::new() }
    }

    pub(super) fn admit(&self) -> Result<(), StoreError> {
        self.circuit.admit()
    }

    pub(super) fn ended<T>(&self, answer: &Result<T, StoreError>) {
        match answer {
            Ok(_) => self.circuit.answered(self),
            Err(error) => self.circuit.failed(self, error),
        }
    }

    /// Counts what came of pushing so many jobs.
    pub(super) fn pushed(&self, jobs: usize, answer: &Result<Vec<Admission>, StoreError>) {
        let meters = self.meters();
        match answer {
            Ok(admissions) => admissions.iter().for_each(|admission| meters.pushed(PushResult::of(admission), 1)),
            Err(_) => meters.pushed(PushResult::Failed, jobs),
        }
    }

    fn meters(&self) -> &CallMeters {
        self.meters.get_or_init(|| CallMeters::new(self.queue.as_str()))
    }
}

impl Watch for Calls {
    fn failed(&self) {
        self.meters().store_failed();
    }

    fn opened(&self) {
        self.meters().circuit(true);
        tracing::warn!(queue = %self.queue, "delay queue circuit opens: the store is asked by probes only");
    }

    fn closed(&self) {
        self.meters().circuit(false);
        tracing::info!(queue = %self.queue, "delay queue circuit closes: the store is asked again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(queue = %self.queue, %error, cause, "delay queue store fails");
    }

    fn outage_ends(&self) {
        tracing::info!(queue = %self.queue, "delay queue store answers again");
    }
}
