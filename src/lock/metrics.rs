//! Counters and histograms of the `metrics` facade; nothing without the feature `metrics`.
//!
//! Their labels are the name of the locks, and the outcome, reason, way or state; never a key.

use super::error::{LockError, LossReason};

/// The outcome of a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Granted,
    Busy,
    QueueFull,
    /// Any other error: a nested or lost lock, another kind of lock, a shutdown, wrong settings.
    Other,
    Failed,
    /// The layer already runs its maximum number of requests.
    Full,
}

impl Outcome {
    #[cfg(feature = "metrics")]
    const ALL: [(Self, &'static str); 6] = [
        (Self::Granted, "granted"),
        (Self::Busy, "busy"),
        (Self::QueueFull, "queue_full"),
        // The label is public.
        (Self::Other, "refused"),
        (Self::Failed, "failed"),
        (Self::Full, "full"),
    ];

    pub(super) const fn of<T>(outcome: &Result<T, LockError>) -> Self {
        match outcome {
            Ok(_) => Self::Granted,
            Err(LockError::Busy(_)) => Self::Busy,
            Err(LockError::QueueFull(_)) => Self::QueueFull,
            Err(LockError::Store(_) | LockError::NotReplicated(_)) => Self::Failed,
            Err(_) => Self::Other,
        }
    }
}

#[cfg(feature = "metrics")]
const REASONS: [(LossReason, &str); 3] =
    [(LossReason::Expired, "expired"), (LossReason::Taken, "taken"), (LossReason::MaxHold, "max_hold")];

/// How a lock passes from one holder to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandoffKind {
    /// Passed directly to a waiter in this process.
    Local,
    /// The waiter was woken by the notification of a release.
    Notified,
}

pub(super) use self::imp::Metrics;

#[cfg(feature = "metrics")]
mod imp {
    use std::sync::Arc;
    use std::time::Duration;

    use metrics::{Label, SharedString};

    use super::{HandoffKind, LossReason, Outcome, REASONS};
    use crate::meter::{Counter, Gauge, Histogram, counter, gauge, histogram};

    /// The metrics of one [`Locks`](crate::Locks), registered at first use.
    pub(in crate::lock) struct Metrics {
        requests: [Counter; Outcome::ALL.len()],
        wait: Histogram,
        hold_time: Histogram,
        handover: [Histogram; 2],
        lost: [Counter; REASONS.len()],
        fallback_polls: Counter,
        failed_renewals: Counter,
        unprotected: Counter,
        store_errors: Counter,
        circuit: [Counter; 2],
        handlers: Gauge,
    }

    impl Metrics {
        pub(in crate::lock) fn new(name: &str) -> Self {
            let name = SharedString::from(Arc::<str>::from(name));
            let locks = || Label::new("locks", name.clone());
            let labels = |key: &'static str, value: &'static str| vec![locks(), Label::from_static_parts(key, value)];
            let handover = |way| histogram!("tollgate_lock_handover_seconds", labels("way", way));
            let circuit = |state| counter!("tollgate_lock_circuit_transitions_total", labels("state", state));
            Self {
                requests: Outcome::ALL
                    .map(|(_, outcome)| counter!("tollgate_lock_requests_total", labels("outcome", outcome))),
                wait: histogram!("tollgate_lock_wait_seconds", vec![locks()]),
                hold_time: histogram!("tollgate_lock_hold_seconds", vec![locks()]),
                handover: [handover("hand"), handover("message")],
                lost: REASONS.map(|(_, reason)| counter!("tollgate_lock_lost_total", labels("reason", reason))),
                fallback_polls: counter!("tollgate_lock_fallback_polls_total", vec![locks()]),
                failed_renewals: counter!("tollgate_lock_failed_renewals_total", vec![locks()]),
                unprotected: counter!("tollgate_lock_unprotected_total", vec![locks()]),
                store_errors: counter!("tollgate_lock_store_errors_total", vec![locks()]),
                circuit: [circuit("open"), circuit("closed")],
                handlers: gauge!("tollgate_lock_handlers_running", vec![locks()]),
            }
        }

        pub(in crate::lock) fn record_request(&self, outcome: Outcome, waited: Duration) {
            self.requests[outcome as usize].increment(1);
            if outcome == Outcome::Granted {
                self.wait.record(waited.as_secs_f64());
            }
        }

        pub(in crate::lock) fn held(&self, time: Duration) {
            self.hold_time.record(time.as_secs_f64());
        }

        pub(in crate::lock) fn handed_over(&self, way: HandoffKind, time: Duration) {
            self.handover[way as usize].record(time.as_secs_f64());
        }

        pub(in crate::lock) fn lost(&self, reason: LossReason) {
            if let Some(at) = REASONS.iter().position(|(known, _)| *known == reason) {
                self.lost[at].increment(1);
            }
        }

        pub(in crate::lock) fn polled(&self) {
            self.fallback_polls.increment(1);
        }

        pub(in crate::lock) fn renewal_failed(&self) {
            self.failed_renewals.increment(1);
        }

        pub(in crate::lock) fn passed_unprotected(&self) {
            self.unprotected.increment(1);
        }

        pub(in crate::lock) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(in crate::lock) fn circuit(&self, is_open: bool) {
            self.circuit[usize::from(!is_open)].increment(1);
        }

        pub(in crate::lock) fn handlers(&self, more: f64) {
            self.handlers.increment(more);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use std::time::Duration;

    use super::{HandoffKind, LossReason, Outcome};

    pub(in crate::lock) struct Metrics;

    impl Metrics {
        pub(in crate::lock) const fn new(_: &str) -> Self {
            Self
        }

        pub(in crate::lock) fn record_request(&self, _: Outcome, _: Duration) {}

        pub(in crate::lock) fn held(&self, _: Duration) {}

        pub(in crate::lock) fn handed_over(&self, _: HandoffKind, _: Duration) {}

        pub(in crate::lock) fn lost(&self, _: LossReason) {}

        pub(in crate::lock) fn polled(&self) {}

        pub(in crate::lock) fn renewal_failed(&self) {}

        pub(in crate::lock) fn passed_unprotected(&self) {}

        pub(in crate::lock) fn store_failed(&self) {}

        pub(in crate::lock) fn circuit(&self, _: bool) {}

        pub(in crate::lock) fn handlers(&self, _: f64) {}
    }
}
