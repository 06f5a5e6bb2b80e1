//! Counters and histograms of the `metrics` facade; nothing without the feature `metrics`.
//!
//! Their labels are the name of the layer and the outcome, never a key.

use super::rejection::Rejection;

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The handler started.
    Executed,
    Replayed,
    /// The store failed, and the request was executed without a record.
    FailedOpen,
    FailedClosed,
    MissingKey,
    InvalidKey,
    MissingScope,
    Mismatch,
    InFlight,
    OutcomeUnknown,
    NotStored,
    Unreadable,
    BodyTimeout,
    TooLarge,
    Cancelled,
    Full,
    ScopeFull,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptOutcome {
    Stored,
    /// Only the status was stored.
    NotStored,
    Released,
    /// The outcome is unknown to this process.
    Unknown,
}

impl Verdict {
    pub(crate) const fn of(rejection: &Rejection) -> Self {
        match rejection {
            Rejection::MissingKey => Self::MissingKey,
            Rejection::InvalidKey(_) => Self::InvalidKey,
            Rejection::MissingScope => Self::MissingScope,
            Rejection::Mismatch => Self::Mismatch,
            Rejection::InFlight { .. } => Self::InFlight,
            Rejection::OutcomeUnknown { .. } => Self::OutcomeUnknown,
            Rejection::NotStored { .. } => Self::NotStored,
            Rejection::Unreadable => Self::Unreadable,
            Rejection::BodyTimeout => Self::BodyTimeout,
            Rejection::TooLarge { .. } => Self::TooLarge,
            Rejection::Cancelled => Self::Cancelled,
            Rejection::Full => Self::Full,
            Rejection::ScopeFull { .. } => Self::ScopeFull,
            Rejection::Config(_) | Rejection::Store(_) => Self::FailedClosed,
        }
    }
}

pub(crate) use self::imp::Metrics;

#[cfg(feature = "metrics")]
mod imp {
    use std::sync::Arc;
    use std::time::Duration;

    use metrics::{Label, SharedString};
    use tokio::time::Instant;

    use super::{AttemptOutcome, Verdict};
    use crate::meter::{Counter, Histogram, counter, histogram};

    const VERDICTS: [(Verdict, &str); 17] = [
        (Verdict::Executed, "executed"),
        (Verdict::Replayed, "replayed"),
        (Verdict::FailedOpen, "failed_open"),
        (Verdict::FailedClosed, "failed_closed"),
        (Verdict::MissingKey, "missing_key"),
        (Verdict::InvalidKey, "invalid_key"),
        (Verdict::MissingScope, "missing_scope"),
        (Verdict::Mismatch, "mismatch"),
        (Verdict::InFlight, "in_flight"),
        (Verdict::OutcomeUnknown, "outcome_unknown"),
        (Verdict::NotStored, "not_stored"),
        (Verdict::Unreadable, "unreadable"),
        (Verdict::BodyTimeout, "body_timeout"),
        (Verdict::TooLarge, "too_large"),
        (Verdict::Cancelled, "cancelled"),
        (Verdict::Full, "full"),
        (Verdict::ScopeFull, "scope_full"),
    ];
    const OUTCOMES: [(AttemptOutcome, &str); 4] = [
        (AttemptOutcome::Stored, "stored"),
        (AttemptOutcome::NotStored, "not_stored"),
        (AttemptOutcome::Released, "released"),
        (AttemptOutcome::Unknown, "unknown"),
    ];

    /// The metrics of one layer, registered when the layer is first used.
    pub(crate) struct Metrics {
        requests: [Counter; VERDICTS.len()],
        attempts: [Counter; OUTCOMES.len()],
        store_errors: Counter,
        circuit: [Counter; 2],
        wait_seconds: Histogram,
        handler_seconds: Histogram,
    }

    impl Metrics {
        pub(crate) fn new(layer: &str) -> Self {
            let name = SharedString::from(Arc::<str>::from(layer));
            let layer = || Label::new("layer", name.clone());
            let outcome = |value: &'static str| vec![layer(), Label::from_static_parts("outcome", value)];
            let circuit = |state| {
                let labels = vec![layer(), Label::from_static_parts("state", state)];
                counter!("tollgate_idempotency_circuit_transitions_total", labels)
            };
            Self {
                requests: VERDICTS.map(|(_, name)| counter!("tollgate_idempotency_requests_total", outcome(name))),
                attempts: OUTCOMES.map(|(_, name)| counter!("tollgate_idempotency_attempts_total", outcome(name))),
                store_errors: counter!("tollgate_idempotency_store_errors_total", vec![layer()]),
                circuit: [circuit("open"), circuit("closed")],
                wait_seconds: histogram!("tollgate_idempotency_wait_seconds", vec![layer()]),
                handler_seconds: histogram!("tollgate_idempotency_handler_seconds", vec![layer()]),
            }
        }

        pub(crate) fn decided(&self, verdict: Verdict) {
            self.requests[verdict as usize].increment(1);
        }

        pub(crate) fn record_attempt(&self, outcome: AttemptOutcome) {
            self.attempts[outcome as usize].increment(1);
        }

        pub(crate) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(crate) fn circuit(&self, is_open: bool) {
            self.circuit[usize::from(!is_open)].increment(1);
        }

        pub(crate) fn waited(&self, time: Duration) {
            self.wait_seconds.record(time.as_secs_f64());
        }

        pub(crate) fn handled(&self, start: Instant) {
            self.handler_seconds.record(start.elapsed().as_secs_f64());
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn names_are_in_order_of_enum_values() {
            assert!(VERDICTS.iter().enumerate().all(|(i, (verdict, _))| *verdict as usize == i));
            assert!(OUTCOMES.iter().enumerate().all(|(i, (outcome, _))| *outcome as usize == i));
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{AttemptOutcome, Verdict};

    pub(crate) struct Metrics;

    impl Metrics {
        pub(crate) const fn new(_: &str) -> Self {
            Self
        }

        pub(crate) fn decided(&self, _: Verdict) {}

        pub(crate) fn record_attempt(&self, _: AttemptOutcome) {}

        pub(crate) fn store_failed(&self) {}

        pub(crate) fn circuit(&self, _: bool) {}

        pub(crate) fn waited(&self, _: Duration) {}

        pub(crate) fn handled(&self, _: Instant) {}
    }
}
