//! A gauge and counters of the `metrics` facade; nothing without the feature `metrics`.

pub(super) use self::imp::Metrics;

#[cfg(feature = "metrics")]
mod imp {
    use metrics::{Label, SharedString};

    use crate::key::Key;
    use crate::meter::{Counter, Gauge, counter, gauge};

    /// The metrics of one filter, registered when its status is first read.
    pub(in crate::cache::exists_filter) struct Metrics {
        fill_ratio: Gauge,
        store_errors: Counter,
        circuit: [Counter; 2],
    }

    impl Metrics {
        pub(in crate::cache::exists_filter) fn new(filter: &Key) -> Self {
            let name = SharedString::from(filter.as_str().to_owned());
            let filter = || Label::new("filter", name.clone());
            let circuit = |state| {
                let labels = vec![filter(), Label::from_static_parts("state", state)];
                counter!("tollgate_exists_filter_circuit_transitions_total", labels)
            };
            Self {
                fill_ratio: gauge!("tollgate_exists_filter_fill_ratio", vec![filter()]),
                store_errors: counter!("tollgate_exists_filter_store_errors_total", vec![filter()]),
                circuit: [circuit("open"), circuit("closed")],
            }
        }

        pub(in crate::cache::exists_filter) fn filled(&self, ratio: f64) {
            self.fill_ratio.set(ratio);
        }

        pub(in crate::cache::exists_filter) fn store_failed(&self) {
            self.store_errors.increment(1);
        }

        pub(in crate::cache::exists_filter) fn circuit(&self, is_open: bool) {
            self.circuit[usize::from(!is_open)].increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use crate::key::Key;

    pub(in crate::cache::exists_filter) struct Metrics;

    impl Metrics {
        pub(in crate::cache::exists_filter) const fn new(_: &Key) -> Self {
            Self
        }

        pub(in crate::cache::exists_filter) fn filled(&self, _: f64) {}

        pub(in crate::cache::exists_filter) fn store_failed(&self) {}

        pub(in crate::cache::exists_filter) fn circuit(&self, _: bool) {}
    }
}
