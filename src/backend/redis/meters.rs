//! The counters of the backend itself; nothing without the feature `metrics`.

pub(super) use self::imp::Meters;

#[cfg(feature = "metrics")]
mod imp {
    use crate::meter::{Counter, counter};

    /// Registered with the recorder that is installed when somebody listens for the first time.
    pub(in crate::backend::redis) struct Meters {
        failures: Counter,
    }

    impl Meters {
        pub(in crate::backend::redis) fn new() -> Self {
            Self { failures: counter!("tollgate_redis_subscription_failures_total", Vec::new()) }
        }

        /// Channels could not be subscribed to.
        pub(in crate::backend::redis) fn failed(&self) {
            self.failures.increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod imp {
    pub(in crate::backend::redis) struct Meters;

    impl Meters {
        pub(in crate::backend::redis) const fn new() -> Self {
            Self
        }

        pub(in crate::backend::redis) fn failed(&self) {}
    }
}
