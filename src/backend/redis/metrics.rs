//! The counters of the backend itself; nothing without the feature `metrics`.

pub(crate) use self::imp::Meters;

#[cfg(feature = "metrics")]
mod imp {
    use crate::meter::{Counter, counter};

    /// Registered with the recorder that is installed when somebody listens for the first time.
    pub(crate) struct Meters {
        failures: Counter,
    }

    impl Meters {
        pub(crate) fn new() -> Self {
            Self { failures: counter!("tollgate_redis_subscription_failures_total", Vec::new()) }
        }

        /// Channels could not be subscribed to.
        pub(crate) fn failed(&self) {
            self.failures.increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    pub(crate) struct Meters;

    impl Meters {
        pub(crate) const fn new() -> Self {
            Self
        }

        pub(crate) fn failed(&self) {}
    }
}
