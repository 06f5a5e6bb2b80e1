//! Counters and histograms of the `metrics` facade; nothing without the feature `metrics`.
//!
//! Their labels are the policy, and the outcome or the state of the circuit, never a key.

use super::decision::Outcome;

/// The outcome of a decision, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    Limited,
    Never,
    Blocked,
    /// A shadow policy would have rejected the request.
    Shadow,
    MissingKey,
    /// The filter of the layer denied the request.
    Denied,
    /// This policy had room, but another one rejected the request, and nothing was charged.
    TurnedAway,
    /// The store failed, and `RateLimitFallback` admitted (open) or rejected (closed) the request.
    FailedOpen,
    FailedClosed,
    /// The store failed, and this process decided by itself.
    LocalAllowed,
    LocalLimited,
}

impl Verdict {
    pub(crate) const ALL: [(Self, &'static str); 12] = [
        (Self::Allowed, "allowed"),
        (Self::Limited, "limited"),
        (Self::Never, "never"),
        (Self::Blocked, "blocked"),
        (Self::Shadow, "shadow_limited"),
        (Self::MissingKey, "missing_key"),
        (Self::Denied, "denied"),
        (Self::TurnedAway, "turned_away"),
        (Self::FailedOpen, "failed_open"),
        (Self::FailedClosed, "failed_closed"),
        (Self::LocalAllowed, "local_allowed"),
        (Self::LocalLimited, "local_limited"),
    ];

    pub(crate) const fn of(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Allowed => Self::Allowed,
            Outcome::Limited => Self::Limited,
            Outcome::Never => Self::Never,
            Outcome::Blocked => Self::Blocked,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(verdict, _)| *verdict == self).map_or("", |(_, name)| name)
    }
}

/// What happened to units that [`QuotaPrefetch`](super::QuotaPrefetch) drew in advance. Drawn units that are neither given back nor
/// expired were spent on requests, or are still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leased {
    Drawn,
    GivenBack,
    Expired,
}

pub(crate) use self::imp::Metrics;

#[cfg(feature = "metrics")]
mod imp {
    use std::fmt;
    use std::sync::Arc;
    use std::time::Duration;

    use metrics::{Label, SharedString};

    use super::{Leased, Verdict};
    use crate::meter::{Counter, Histogram, counter, histogram};

    /// The metrics of one policy, registered when the policy is first used.
    pub(crate) struct Metrics {
        decisions: [Counter; Verdict::ALL.len()],
        near_limit: Counter,
        store_seconds: Histogram,
        wait_seconds: Histogram,
        store_errors: Counter,
        resolver_errors: Counter,
        circuit: [Counter; 2],
        settlements: [Counter; 2],
        leased_units: [Counter; 3],
        cached_denials: [Counter; 2],
    }

    impl Metrics {
        /// Whether metrics are recorded.
        pub(crate) const ENABLED: bool = true;

        pub(crate) fn new(policy: &str) -> Self {
            let name = SharedString::from(Arc::<str>::from(policy));
            let policy = || Label::new("policy", name.clone());
            let labels = |key: &'static str, value: &'static str| vec![policy(), Label::from_static_parts(key, value)];
            let circuit = |state| counter!("tollgate_circuit_transitions_total", labels("state", state));
            let settled = |outcome| counter!("tollgate_settlements_total", labels("outcome", outcome));
            let leased = |outcome| counter!("tollgate_leased_units_total", labels("outcome", outcome));
            let cached = |outcome| counter!("tollgate_deny_cache_total", labels("outcome", outcome));
            Self {
                decisions: Verdict::ALL
                    .map(|(_, outcome)| counter!("tollgate_decisions_total", labels("outcome", outcome))),
                near_limit: counter!("tollgate_near_limit_total", vec![policy()]),
                store_seconds: histogram!("tollgate_store_seconds", vec![policy()]),
                wait_seconds: histogram!("tollgate_wait_seconds", vec![policy()]),
                store_errors: counter!("tollgate_store_errors_total", vec![policy()]),
                resolver_errors: counter!("tollgate_resolver_errors_total", vec![policy()]),
                circuit: [circuit("open"), circuit("closed")],
                settlements: [settled("done"), settled("lost")],
                leased_units: [leased("drawn"), leased("given_back"), leased("expired")],
                cached_denials: [cached("hit"), cached("miss")],
            }
        }

        pub(crate) fn decided(&self, verdict: Verdict) {
            self.decisions[verdict as usize].increment(1);
        }

        pub(crate) fn near_limit(&self) {
            self.near_limit.increment(1);
        }

        pub(crate) fn record_call_time(&self, time: Duration) {
            self.store_seconds.record(time.as_secs_f64());
        }

        pub(crate) fn waited(&self, time: Duration) {
            self.wait_seconds.record(time.as_secs_f64());
        }

        pub(crate) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(crate) fn resolver_failed(&self) {
            self.resolver_errors.increment(1);
        }

        pub(crate) fn circuit(&self, is_open: bool) {
            self.circuit[usize::from(!is_open)].increment(1);
        }

        pub(crate) fn settled(&self, done: bool) {
            self.settlements[usize::from(!done)].increment(1);
        }

        pub(crate) fn leased(&self, what: Leased, units: u64) {
            self.leased_units[what as usize].increment(units);
        }

        pub(crate) fn deny_cache_looked_up(&self, hit: bool) {
            self.cached_denials[usize::from(!hit)].increment(1);
        }
    }

    impl fmt::Debug for Metrics {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Metrics").finish_non_exhaustive()
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use std::time::Duration;

    use super::{Leased, Verdict};

    #[derive(Debug)]
    pub(crate) struct Metrics;

    impl Metrics {
        pub(crate) const ENABLED: bool = false;

        pub(crate) const fn new(_: &str) -> Self {
            Self
        }

        pub(crate) fn decided(&self, _: Verdict) {}

        pub(crate) fn near_limit(&self) {}

        pub(crate) fn record_call_time(&self, _: Duration) {}

        pub(crate) fn waited(&self, _: Duration) {}

        pub(crate) fn store_failed(&self) {}

        pub(crate) fn resolver_failed(&self) {}

        pub(crate) fn circuit(&self, _: bool) {}

        pub(crate) fn settled(&self, _: bool) {}

        pub(crate) fn leased(&self, _: Leased, _: u64) {}

        pub(crate) fn deny_cache_looked_up(&self, _: bool) {}
    }
}
