//! Logs, metrics and events of a worker.

use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use super::events::{Event, EventSender};
use super::pending_ack::PendingAck;
use super::running_job::RunningJob;
use crate::delay_queue::metrics::{OutcomeLabel, WorkerMetrics};
use crate::delay_queue::notices::DeadJobLog;
use crate::delay_queue::record::Reason;
use crate::delay_queue::store::{AckKind, DeadLimits, Died, Expired, Finished, QueueKey};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::circuit::OutageTracker;

/// Reports what a worker does: to its log, its metrics and the receivers of its events.
pub(crate) struct Reporter {
    queue: Key,
    metrics: WorkerMetrics,
    notices: DeadJobLog,
    events: EventSender,
    stores: Vec<PartitionStore>,
}

/// The store of one partition of the queue.
struct PartitionStore {
    key: QueueKey,
    // Whether its failure was reported.
    is_failing: bool,
    outage: OutageTracker,
}

impl Reporter {
    pub(crate) fn new(
        queue: Key,
        partitions: impl Iterator<Item = QueueKey>,
        events: EventSender,
        now: Instant,
    ) -> Self {
        let store = |key| PartitionStore { key, is_failing: false, outage: OutageTracker::for_store() };
        Self {
            queue,
            metrics: WorkerMetrics::new(queue.as_str()),
            notices: DeadJobLog::new(queue, now),
            events,
            stores: partitions.map(store).collect(),
        }
    }

    /// Reports that an attempt begins.
    pub(crate) fn started(&self, job: &RunningJob, late: Duration) {
        self.metrics.started(late);
        self.events.send(|| Event::Started { id: job.lease.id, attempt: job.attempt, late });
    }

    /// Reports an attempt that ends because its worker is dropped.
    pub(crate) fn dropped(&self, job: &RunningJob, now: Instant) {
        self.metrics.ended(now.saturating_duration_since(job.started));
    }

    /// Reports that an attempt has ended.
    pub(crate) fn ended(&self, job: &RunningJob, now: Instant) {
        self.metrics.ended(now.saturating_duration_since(job.started));
        if job.timers.is_abandoned() {
            tracing::info!(queue = %self.queue, job = %job.lease.id, "an abandoned job has ended");
        }
    }

    pub(crate) fn abandoned(&self, job: &RunningJob) {
        tracing::warn!(queue = %self.queue, job = %job.lease.id, "a job that does not yield is abandoned");
    }

    pub(crate) fn abandoned_at_shutdown(&self, jobs: usize) {
        tracing::warn!(queue = %self.queue, jobs, "jobs that do not yield are abandoned");
    }

    pub(crate) fn claimed_too_late(&self, jobs: usize) {
        tracing::warn!(queue = %self.queue, jobs, "a claim took longer than the lease: its jobs are released");
    }

    pub(crate) fn not_recorded(&self, jobs: usize) {
        tracing::warn!(queue = %self.queue, jobs, "job results could not be recorded: the jobs may run again");
    }

    /// Reports a job that still runs after the grace period of a shutdown.
    pub(crate) fn cut_off(&mut self, job: &RunningJob, now: Instant) {
        self.notices.cut_off(&job.lease.id, job.attempt, now);
    }

    /// When to log the number of jobs that got no log line of their own because there were too many.
    pub(crate) fn summary_at(&self) -> Option<Instant> {
        self.notices.summary_at()
    }

    pub(crate) fn log_summary(&mut self, now: Instant) {
        self.notices.log_summary(now);
    }

    /// Reports the age of the oldest due job.
    pub(crate) fn oldest_due(&self, age: Option<Duration>) {
        self.metrics.oldest_due(age.unwrap_or_default());
    }

    /// Reports a recorded result.
    pub(crate) fn acked(&mut self, pending: PendingAck, finished: Finished, dead: DeadLimits, now: Instant) {
        let outcome = pending.outcome(finished, dead, now);
        let PendingAck { ack, attempt, .. } = pending;
        let id = ack.lease.id;
        self.metrics.finished(outcome);
        let event = match (outcome, ack.kind) {
            (OutcomeLabel::LeaseLost, _) => Event::LeaseLost { id },
            (OutcomeLabel::Cancelled, _) | (_, AckKind::Cancelled) => Event::Cancelled { id },
            (_, AckKind::Dead { reason, error }) => Event::Dead { id, reason, error },
            (OutcomeLabel::Dead, AckKind::Retry { error, .. }) => Event::Dead { id, reason: Reason::Failed, error },
            // The store could not read the job.
            (OutcomeLabel::Dead, _) => Event::Dead { id, reason: Reason::Undecodable, error: "".into() },
            (_, AckKind::Retry { delay, error }) => Event::Retried { id, delay, error },
            (_, AckKind::Snooze { delay }) => Event::Snoozed { id, delay },
            (_, AckKind::Release) => Event::Released { id },
            (_, AckKind::Done) => Event::Done { id },
        };
        match &event {
            Event::LeaseLost { id } => {
                tracing::warn!(queue = %self.queue, job = %id, "a job ended after its lease was lost");
            }
            Event::Dead { id, reason, error } => self.notices.died(id, attempt, *reason, error, now),
            _ => {}
        }
        self.events.send(|| event);
    }

    /// Reports expired leases, since their workers will not.
    pub(crate) fn expired(&mut self, expired: Expired, died: &[Died], now: Instant) {
        let Expired { jobs, dead } = expired;
        if jobs > 0 {
            self.metrics.expired(expired);
            tracing::warn!(queue = %self.queue, jobs, dead, "leases expired before their jobs finished: the workers died, stalled or lost the network");
            self.events.send(|| Event::LeasesExpired { jobs, dead });
        }
        for Died { id, attempts } in died {
            self.notices.died(id, *attempts, Reason::LeaseExpired, "the lease of its last attempt expired", now);
        }
    }

    /// Reports a failed store call for a partition of the queue.
    pub(crate) fn store_failed(&mut self, partition: usize, error: &StoreError) {
        self.metrics.store_failed();
        let is_first = self.stores.iter().all(|store| !store.is_failing);
        let store = &mut self.stores[partition];
        store.is_failing = true;
        if store.outage.record_failure() {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            tracing::warn!(queue = %store.key, %error, cause, "the store fails: the worker retries until it works");
        }
        if is_first {
            self.events.send(|| Event::StoreFailed { error: error.clone() });
        }
    }

    /// Reports a successful store call for a partition of the queue, if its store failed before.
    pub(crate) fn store_works(&mut self, partition: usize) {
        let store = &mut self.stores[partition];
        if store.outage.record_success() {
            tracing::info!(queue = %store.key, "the store works again");
        }
        if mem::take(&mut store.is_failing) && self.stores.iter().all(|store| !store.is_failing) {
            self.events.send(|| Event::StoreWorks);
        }
    }
}
