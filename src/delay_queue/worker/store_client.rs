use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::delay_queue::metrics::{PushResult, QueueMetrics};
use crate::delay_queue::store::{Admission, QueueKey};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::circuit::{Circuit, CircuitBreaker, observe_circuit};

/// How long a bulk push waits for a failing store.
const BULK_WAIT: Duration = Duration::from_secs(1);

/// State that the clones of a queue share for their store calls: circuits and metrics. Workers bypass it: they retry until the store works.
pub(crate) struct StoreClient {
    queue: Key,
    breaker: CircuitBreaker,
    // One for each partition of the queue, since partitions may be on different nodes.
    circuits: Box<[Circuit]>,
    // Created when first used, since the program may install the metrics recorder after it makes the queue.
    metrics: OnceLock<QueueMetrics>,
}

impl StoreClient {
    pub(crate) fn new(queue: Key, breaker: CircuitBreaker, partitions: u16) -> Self {
        let circuits = (0..partitions).map(|_| Circuit::new(breaker)).collect();
        Self { queue, breaker, circuits, metrics: OnceLock::new() }
    }

    /// A new client for a queue of `partitions` partitions.
    pub(crate) fn split(&self, partitions: u16) -> Self {
        Self::new(self.queue, self.breaker, partitions)
    }

    fn circuit(&self, queue: &QueueKey) -> &Circuit {
        &self.circuits[usize::from(queue.partition())]
    }

    /// Waits until the circuit admits a call, for as long as `wait` allows.
    pub(crate) async fn admit(&self, queue: &QueueKey, wait: &mut CircuitWait) -> Result<(), StoreError> {
        let circuit = self.circuit(queue);
        loop {
            let Err(error) = circuit.admit() else { return Ok(()) };
            let ends_at = *wait.ends_at.get_or_insert_with(|| Instant::now() + wait.timeout);
            match circuit.next_probe().filter(|probe| *probe <= ends_at) {
                // Another call may take the probe, hence the loop.
                Some(probe) => sleep_until(probe).await,
                None => return Err(error),
            }
        }
    }

    pub(crate) fn record_reply<T>(&self, queue: &QueueKey, reply: &Result<T, StoreError>) {
        let (circuit, observer) = (self.circuit(queue), PartitionObserver { client: self, queue });
        circuit.record(&observer, reply);
    }

    /// Returns a guard that counts the results of a push of `jobs` jobs.
    pub(crate) const fn pushing(&self, jobs: usize) -> Pushing<'_> {
        Pushing { client: self, jobs }
    }

    fn metrics(&self) -> &QueueMetrics {
        self.metrics.get_or_init(|| QueueMetrics::new(self.queue.as_str()))
    }
}

/// A push in flight. If it is dropped without a reply, its jobs count as failed, since the outcome is unknown.
pub(crate) struct Pushing<'a> {
    client: &'a StoreClient,
    jobs: usize,
}

impl Pushing<'_> {
    pub(crate) fn answered(mut self, reply: &Result<Vec<Admission>, StoreError>) {
        if let Ok(admissions) = reply {
            self.jobs = 0;
            let metrics = self.client.metrics();
            admissions.iter().for_each(|admission| metrics.pushed(PushResult::of(admission), 1));
        }
    }
}

impl Drop for Pushing<'_> {
    fn drop(&mut self) {
        if self.jobs > 0 {
            self.client.metrics().pushed(PushResult::Failed, self.jobs);
        }
    }
}

/// How long to wait for a failing store, counted from the first wait.
pub(crate) struct CircuitWait {
    timeout: Duration,
    ends_at: Option<Instant>,
}

impl CircuitWait {
    /// Fails at once.
    pub(crate) const fn none() -> Self {
        Self { timeout: Duration::ZERO, ends_at: None }
    }

    /// For a bulk push: a short outage must not fail all remaining jobs.
    pub(crate) const fn bulk() -> Self {
        Self { timeout: BULK_WAIT, ends_at: None }
    }

    /// Restarts the wait, since the store has answered.
    pub(crate) fn reset(&mut self) {
        self.ends_at = None;
    }
}

/// A partition of the queue, as the observer of its circuit.
struct PartitionObserver<'a> {
    client: &'a StoreClient,
    queue: &'a QueueKey,
}

observe_circuit!("delay queue", PartitionObserver<'_>, |partition| partition.client.metrics(), queue = %partition.queue);
