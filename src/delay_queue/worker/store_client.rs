use std::error::Error;
use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::delay_queue::metrics::{CallMeters, PushResult};
use crate::delay_queue::store::{Admission, QueueKey};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::circuit::{Circuit, CircuitBreaker, CircuitObserver};

/// How long those who push many jobs wait for a store that fails.
const PATIENCE: Duration = Duration::from_secs(1);

/// What all clones of a queue have in common for their calls of the store, those of workers aside: these ask until it works.
pub(crate) struct StoreClient {
    queue: Key,
    breaker: CircuitBreaker,
    // One for each part of the queue: they may lie on different nodes.
    circuits: Box<[Circuit]>,
    // Made when the store is first asked: the recorder is installed by then.
    meters: OnceLock<CallMeters>,
}

impl StoreClient {
    pub(crate) fn new(queue: Key, breaker: CircuitBreaker, parts: u16) -> Self {
        let circuits = (0..parts).map(|_| Circuit::new(breaker)).collect();
        Self { queue, breaker, circuits, meters: OnceLock::new() }
    }

    /// The same for a queue of so many parts.
    pub(crate) fn split(&self, parts: u16) -> Self {
        Self::new(self.queue, self.breaker, parts)
    }

    fn circuit(&self, queue: &QueueKey) -> &Circuit {
        &self.circuits[usize::from(queue.part())]
    }

    /// Waits until the store may be asked, for no longer than there is patience.
    pub(crate) async fn admit(&self, queue: &QueueKey, patience: &mut Patience) -> Result<(), StoreError> {
        let circuit = self.circuit(queue);
        loop {
            let Err(error) = circuit.admit() else { return Ok(()) };
            let ends = *patience.ends.get_or_insert_with(|| Instant::now() + patience.time);
            match circuit.next_probe().filter(|probe| *probe <= ends) {
                // Somebody else may be faster.
                Some(probe) => sleep_until(probe).await,
                None => return Err(error),
            }
        }
    }

    pub(crate) fn ended<T>(&self, queue: &QueueKey, answer: &Result<T, StoreError>) {
        let (circuit, watch) = (self.circuit(queue), Part { calls: self, queue });
        match answer {
            Ok(_) => circuit.answered(&watch),
            Err(error) => circuit.failed(&watch, error),
        }
    }

    /// Counts what comes of pushing so many jobs.
    pub(crate) const fn pushing(&self, jobs: usize) -> Pushing<'_> {
        Pushing { calls: self, jobs }
    }

    fn meters(&self) -> &CallMeters {
        self.meters.get_or_init(|| CallMeters::new(self.queue.as_str()))
    }
}

/// A push that is not answered yet. They have failed if nobody waits for the answer: it is not known what has become of them.
pub(crate) struct Pushing<'a> {
    calls: &'a StoreClient,
    jobs: usize,
}

impl Pushing<'_> {
    pub(crate) fn answered(mut self, answer: &Result<Vec<Admission>, StoreError>) {
        if let Ok(admissions) = answer {
            self.jobs = 0;
            let meters = self.calls.meters();
            admissions.iter().for_each(|admission| meters.pushed(PushResult::of(admission), 1));
        }
    }
}

impl Drop for Pushing<'_> {
    fn drop(&mut self) {
        if self.jobs > 0 {
            self.calls.meters().pushed(PushResult::Failed, self.jobs);
        }
    }
}

/// How long to wait for a store that fails, from when it is first waited for.
pub(crate) struct Patience {
    time: Duration,
    ends: Option<Instant>,
}

impl Patience {
    /// For those who would rather be told at once.
    pub(crate) const fn none() -> Self {
        Self { time: Duration::ZERO, ends: None }
    }

    /// For those who push many jobs, and of whom a moment would fail all the rest.
    pub(crate) const fn of_many() -> Self {
        Self { time: PATIENCE, ends: None }
    }

    /// The store has answered.
    pub(crate) fn is_rewarded(&mut self) {
        self.ends = None;
    }
}

/// One part of the queue.
struct Part<'a> {
    calls: &'a StoreClient,
    queue: &'a QueueKey,
}

impl CircuitObserver for Part<'_> {
    fn failed(&self) {
        self.calls.meters().store_failed();
    }

    fn opened(&self) {
        self.calls.meters().circuit(true);
        tracing::warn!(queue = %self.queue, "delay queue circuit opens: the store is asked by probes only");
    }

    fn closed(&self) {
        self.calls.meters().circuit(false);
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
