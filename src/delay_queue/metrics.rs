//! Counters and histograms of the `metrics` facade; empty without the feature `metrics`.
//!
//! Their labels are the queue, the outcome and the state of a circuit breaker, never a job.

use super::store::Admission;

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutcomeLabel {
    Done,
    Retried,
    Snoozed,
    Dead,
    Cancelled,
    Released,
    LeaseLost,
}

#[cfg(feature = "metrics")]
impl OutcomeLabel {
    const ALL: [(Self, &'static str); 7] = [
        (Self::Done, "done"),
        (Self::Retried, "retried"),
        (Self::Snoozed, "snoozed"),
        (Self::Dead, "dead"),
        (Self::Cancelled, "cancelled"),
        (Self::Released, "released"),
        (Self::LeaseLost, "lease_lost"),
    ];
}

/// The result of pushing a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PushResult {
    New,
    Exists,
    Full,
    Failed,
}

impl PushResult {
    #[cfg(feature = "metrics")]
    const ALL: [(Self, &'static str); 4] =
        [(Self::New, "new"), (Self::Exists, "exists"), (Self::Full, "full"), (Self::Failed, "failed")];

    pub(crate) const fn of(admission: &Admission) -> Self {
        match admission {
            Admission::New => Self::New,
            Admission::Exists(_) => Self::Exists,
            Admission::Full => Self::Full,
        }
    }
}

pub(crate) use self::imp::{QueueMetrics, WorkerMetrics};

#[cfg(feature = "metrics")]
mod imp {
    use std::sync::Arc;
    use std::time::Duration;

    use metrics::{Label, SharedString};

    use super::{OutcomeLabel, PushResult};
    use crate::delay_queue::store::Expired;
    use crate::meter::{Counter, Gauge, Histogram, counter, gauge, histogram};

    /// The metrics of the workers of one queue, registered when a worker starts.
    pub(crate) struct WorkerMetrics {
        outcomes: [Counter; OutcomeLabel::ALL.len()],
        lateness: Histogram,
        duration: Histogram,
        running: Gauge,
        oldest_due: Gauge,
        store_errors: Counter,
        returned: Counter,
        expired_dead: Counter,
    }

    impl WorkerMetrics {
        pub(crate) fn new(queue: &str) -> Self {
            let name = SharedString::from(Arc::<str>::from(queue));
            let queue = || Label::new("queue", name.clone());
            let outcome = |value| vec![queue(), Label::from_static_parts("outcome", value)];
            let expired = |value| counter!("tollgate_job_leases_expired_total", outcome(value));
            Self {
                outcomes: OutcomeLabel::ALL.map(|(_, name)| counter!("tollgate_jobs_total", outcome(name))),
                lateness: histogram!("tollgate_job_lateness_seconds", vec![queue()]),
                duration: histogram!("tollgate_job_seconds", vec![queue()]),
                running: gauge!("tollgate_jobs_running", vec![queue()]),
                oldest_due: gauge!("tollgate_jobs_oldest_due_seconds", vec![queue()]),
                store_errors: counter!("tollgate_job_store_errors_total", vec![queue()]),
                returned: expired("returned"),
                expired_dead: expired("dead"),
            }
        }

        pub(crate) fn started(&self, lateness: Duration) {
            self.lateness.record(lateness.as_secs_f64());
            self.running.increment(1.0);
        }

        pub(crate) fn ended(&self, duration: Duration) {
            self.duration.record(duration.as_secs_f64());
            self.running.decrement(1.0);
        }

        pub(crate) fn oldest_due(&self, since: Duration) {
            self.oldest_due.set(since.as_secs_f64());
        }

        pub(crate) fn finished(&self, outcome: OutcomeLabel) {
            self.outcomes[outcome as usize].increment(1);
        }

        pub(crate) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(crate) fn expired(&self, Expired { jobs, dead }: Expired) {
            self.returned.increment(jobs.saturating_sub(dead) as u64);
            self.expired_dead.increment(dead as u64);
        }
    }

    /// The metrics of pushes to one queue and of its other calls, registered when the first of them is recorded.
    pub(crate) struct QueueMetrics {
        pushes: [Counter; PushResult::ALL.len()],
        store_errors: Counter,
        circuit: [Counter; 2],
    }

    impl QueueMetrics {
        pub(crate) fn new(queue: &str) -> Self {
            let name = SharedString::from(Arc::<str>::from(queue));
            let queue = || Label::new("queue", name.clone());
            let labels = |key: &'static str, value: &'static str| vec![queue(), Label::from_static_parts(key, value)];
            let circuit = |state| counter!("tollgate_job_circuit_transitions_total", labels("state", state));
            Self {
                pushes: PushResult::ALL.map(|(_, name)| counter!("tollgate_job_pushes_total", labels("outcome", name))),
                store_errors: counter!("tollgate_job_store_errors_total", vec![queue()]),
                circuit: [circuit("open"), circuit("closed")],
            }
        }

        pub(crate) fn pushed(&self, result: PushResult, jobs: usize) {
            self.pushes[result as usize].increment(jobs as u64);
        }

        pub(crate) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(crate) fn circuit(&self, is_open: bool) {
            self.circuit[usize::from(!is_open)].increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use std::time::Duration;

    use super::{OutcomeLabel, PushResult};
    use crate::delay_queue::store::Expired;

    pub(crate) struct WorkerMetrics;

    impl WorkerMetrics {
        pub(crate) const fn new(_: &str) -> Self {
            Self
        }

        pub(crate) fn started(&self, _: Duration) {}

        pub(crate) fn ended(&self, _: Duration) {}

        pub(crate) fn oldest_due(&self, _: Duration) {}

        pub(crate) fn finished(&self, _: OutcomeLabel) {}

        pub(crate) fn store_failed(&self) {}

        pub(crate) fn expired(&self, _: Expired) {}
    }

    pub(crate) struct QueueMetrics;

    impl QueueMetrics {
        pub(crate) const fn new(_: &str) -> Self {
            Self
        }

        pub(crate) fn pushed(&self, _: PushResult, _: usize) {}

        pub(crate) fn store_failed(&self) {}

        pub(crate) fn circuit(&self, _: bool) {}
    }
}
