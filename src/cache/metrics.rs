//! Counters and histograms of the `metrics` facade; nothing without the feature `metrics`.
//!
//! Their labels are the name of the cache, the outcome and the state of the circuit, never a key.

/// The result of a call of `get_or_fill`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// From this process.
    Local,
    Fresh,
    Stale,
    /// The call has waited for a load.
    Loaded,
    /// The exists filter excludes the key.
    Excluded,
    Failed,
}

/// The result of a call of a loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadOutcome {
    Stored,
    /// The value must not be stored, is too large or cannot be encoded, or the store failed.
    NotStored,
    /// The lease had ended, for instance by an invalidation.
    Refused,
    Failed,
}

pub(super) use self::imp::Metrics;

#[cfg(feature = "metrics")]
mod imp {
    use std::time::Duration;

    use metrics::{Label, SharedString};

    use super::{LoadOutcome, Served};
    use crate::key::Key;
    use crate::meter::{Counter, Histogram, counter, histogram};

    const SERVED: [(Served, &str); 6] = [
        (Served::Local, "local"),
        (Served::Fresh, "fresh"),
        (Served::Stale, "stale"),
        (Served::Loaded, "loaded"),
        (Served::Excluded, "excluded"),
        (Served::Failed, "failed"),
    ];
    const LOADS: [(LoadOutcome, &str); 4] = [
        (LoadOutcome::Stored, "stored"),
        (LoadOutcome::NotStored, "not_stored"),
        (LoadOutcome::Refused, "refused"),
        (LoadOutcome::Failed, "failed"),
    ];

    /// The metrics of one cache, registered when it is first used.
    pub(in crate::cache) struct Metrics {
        requests: [Counter; SERVED.len()],
        loads: [Counter; LOADS.len()],
        load_seconds: Histogram,
        store_errors: Counter,
        circuit: [Counter; 2],
    }

    impl Metrics {
        pub(in crate::cache) fn new(cache: &Key) -> Self {
            let name = SharedString::from(cache.as_str().to_owned());
            let cache = || Label::new("cache", name.clone());
            let outcome = |value: &'static str| vec![cache(), Label::from_static_parts("outcome", value)];
            let circuit = |state| {
                let labels = vec![cache(), Label::from_static_parts("state", state)];
                counter!("tollgate_cache_circuit_transitions_total", labels)
            };
            Self {
                requests: SERVED.map(|(_, name)| counter!("tollgate_cache_requests_total", outcome(name))),
                loads: LOADS.map(|(_, name)| counter!("tollgate_cache_loads_total", outcome(name))),
                load_seconds: histogram!("tollgate_cache_load_seconds", vec![cache()]),
                store_errors: counter!("tollgate_cache_store_errors_total", vec![cache()]),
                circuit: [circuit("open"), circuit("closed")],
            }
        }

        pub(in crate::cache) fn served(&self, served: Served) {
            self.requests[served as usize].increment(1);
        }

        pub(in crate::cache) fn loaded(&self, load: LoadOutcome, time: Duration) {
            self.loads[load as usize].increment(1);
            self.load_seconds.record(time.as_secs_f64());
        }

        pub(in crate::cache) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(in crate::cache) fn circuit(&self, is_open: bool) {
            self.circuit[usize::from(!is_open)].increment(1);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn names_are_in_order_of_enum_values() {
            assert!(SERVED.iter().enumerate().all(|(at, (served, _))| *served as usize == at));
            assert!(LOADS.iter().enumerate().all(|(at, (load, _))| *load as usize == at));
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use std::time::Duration;

    use super::{LoadOutcome, Served};
    use crate::key::Key;

    pub(in crate::cache) struct Metrics;

    impl Metrics {
        pub(in crate::cache) const fn new(_: &Key) -> Self {
            Self
        }

        pub(in crate::cache) fn served(&self, _: Served) {}

        pub(in crate::cache) fn loaded(&self, _: LoadOutcome, _: Duration) {}

        pub(in crate::cache) fn store_failed(&self) {}

        pub(in crate::cache) fn circuit(&self, _: bool) {}
    }
}
