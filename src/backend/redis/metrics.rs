//! The metrics of the backend itself. No-ops without the feature `metrics`.

pub(crate) use self::imp::Metrics;

#[cfg(feature = "metrics")]
mod imp {
    use crate::meter::{Counter, counter};

    /// Registered with the recorder that is installed at the first subscription.
    pub(crate) struct Metrics {
        failures: Counter,
    }

    impl Metrics {
        pub(crate) fn new() -> Self {
            Self { failures: counter!("tollgate_redis_subscription_failures_total", Vec::new()) }
        }

        /// An attempt to subscribe failed.
        pub(crate) fn subscription_failed(&self) {
            self.failures.increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    pub(crate) struct Metrics;

    impl Metrics {
        pub(crate) const fn new() -> Self {
            Self
        }

        pub(crate) fn subscription_failed(&self) {}
    }
}
