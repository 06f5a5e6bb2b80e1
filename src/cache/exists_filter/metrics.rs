//! The gauge of the `metrics` facade; nothing without the feature `metrics`.

pub(super) use self::imp::Meters;

#[cfg(feature = "metrics")]
mod imp {
    use metrics::{Label, SharedString};

    use crate::key::Key;
    use crate::meter::{Gauge, gauge};

    /// The metrics of one filter, registered when its status is first read.
    pub(in crate::cache::exists_filter) struct Meters {
        fill_ratio: Gauge,
    }

    impl Meters {
        pub(in crate::cache::exists_filter) fn new(filter: &Key) -> Self {
            let labels = vec![Label::new("filter", SharedString::from(filter.as_str().to_owned()))];
            Self { fill_ratio: gauge!("tollgate_exists_filter_fill_ratio", labels) }
        }

        pub(in crate::cache::exists_filter) fn filled(&self, ratio: f64) {
            self.fill_ratio.set(ratio);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    use crate::key::Key;

    pub(in crate::cache::exists_filter) struct Meters;

    impl Meters {
        pub(in crate::cache::exists_filter) const fn new(_: &Key) -> Self {
            Self
        }

        pub(in crate::cache::exists_filter) fn filled(&self, _: f64) {}
    }
}
