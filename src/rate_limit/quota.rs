use std::time::Duration;

use crate::error::ConfigError;

/// How many units may be used in how long: `Quota::per_minute(60)` is sixty per minute.
///
/// A quota says nothing yet about *how* it is counted. Naming the algorithm makes it a [`Limit`]:
///
/// ```
/// use std::time::Duration;
/// use tollgate::Quota;
///
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// let login = Quota::per_minute(5).sliding_log()?;
/// let api = Quota::per_hour(1_000).fixed_window();
/// let export = Quota::new(3, Duration::from_secs(90))?.fixed_window();
/// # Ok(())
/// # }
/// ```
///
/// A unit is a request unless requests are given another [cost](crate::rate_limit::RequestCost). A quota of 0 denies
/// everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u32,
    window: Duration,
}

impl Quota {
    /// The shortest window: ten milliseconds. A shorter one would say more about the network than about clients.
    pub const MIN_WINDOW: Duration = Duration::from_millis(10);
    /// The longest window: 3,660 days, about ten years.
    pub const MAX_WINDOW: Duration = Duration::from_secs(3_660 * 86_400);
    /// The largest quota that a [sliding log](Quota::sliding_log) takes.
    pub const MAX_SLIDING_LOG: u32 = 10_000;

    /// `limit` units per second.
    #[must_use]
    pub const fn per_second(limit: u32) -> Self {
        Self { limit, window: Duration::from_secs(1) }
    }

    /// `limit` units per minute.
    #[must_use]
    pub const fn per_minute(limit: u32) -> Self {
        Self { limit, window: Duration::from_secs(60) }
    }

    /// `limit` units per hour.
    #[must_use]
    pub const fn per_hour(limit: u32) -> Self {
        Self { limit, window: Duration::from_secs(3_600) }
    }

    /// `limit` units per 24 hours.
    #[must_use]
    pub const fn per_day(limit: u32) -> Self {
        Self { limit, window: Duration::from_secs(86_400) }
    }

    /// `limit` units per `window`, which is counted in whole microseconds, and by a fixed window in whole milliseconds,
    /// rounded up.
    ///
    /// # Errors
    ///
    /// [`ConfigError::WindowOutOfRange`] unless the window is between [`MIN_WINDOW`](Self::MIN_WINDOW) and
    /// [`MAX_WINDOW`](Self::MAX_WINDOW).
    pub fn new(limit: u32, window: Duration) -> Result<Self, ConfigError> {
        if (Self::MIN_WINDOW..=Self::MAX_WINDOW).contains(&window) {
            Ok(Self { limit, window })
        } else {
            Err(ConfigError::WindowOutOfRange { window, min: Self::MIN_WINDOW, max: Self::MAX_WINDOW })
        }
    }

    /// Counts in windows that open with a key's first request and close together with its count.
    ///
    /// The cheapest algorithm: one counter per key. In the worst case twice the quota passes within one window's length,
    /// half at the end of one window and half at the start of the next. Windows are per key, so clients do not all come
    /// back at the same instant.
    #[must_use]
    pub const fn fixed_window(self) -> Limit {
        Limit { quota: self, algorithm: Algorithm::FixedWindow }
    }

    /// Remembers every request until it is a window old: never more than the quota in *any* span of a window's length.
    ///
    /// Exact, and paid for in memory: 12 bytes per remembered request in Redis, 16 in memory.
    ///
    /// # Errors
    ///
    /// [`ConfigError::SlidingLogTooLong`] for a quota above [`MAX_SLIDING_LOG`](Self::MAX_SLIDING_LOG).
    pub const fn sliding_log(self) -> Result<Limit, ConfigError> {
        if self.limit <= Self::MAX_SLIDING_LOG {
            Ok(Limit { quota: self, algorithm: Algorithm::SlidingLog })
        } else {
            Err(ConfigError::SlidingLogTooLong { limit: self.limit, max: Self::MAX_SLIDING_LOG })
        }
    }

    /// The units that may be used in a window.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// The length of the window.
    #[must_use]
    pub const fn window(&self) -> Duration {
        self.window
    }

    /// The length of the window as a sliding log counts it. It fits: see `MAX_WINDOW`.
    pub(crate) const fn window_us(&self) -> u64 {
        self.window.as_micros() as u64
    }

    /// The length of the window as a fixed window counts it: whole milliseconds, rounded up.
    pub(crate) const fn window_ms(&self) -> u64 {
        self.window.as_micros().div_ceil(1_000) as u64
    }
}

/// How a quota is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// See [`Quota::fixed_window`].
    FixedWindow,
    /// See [`Quota::sliding_log`].
    SlidingLog,
}

/// A quota together with the algorithm that counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    quota: Quota,
    algorithm: Algorithm,
}

impl Limit {
    /// How much in how long.
    #[must_use]
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// How it is counted.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_nothing_and_of_a_lifetime_are_refused() {
        for window in
            [Duration::ZERO, Duration::from_micros(9_999), Quota::MAX_WINDOW + Duration::from_nanos(1), Duration::MAX]
        {
            let error = Quota::new(1, window).unwrap_err();
            assert!(matches!(error, ConfigError::WindowOutOfRange { .. }), "{error}");
        }
        assert!(Quota::new(1, Quota::MIN_WINDOW).is_ok());
        assert!(Quota::new(1, Quota::MAX_WINDOW).is_ok());
    }

    #[test]
    fn a_log_that_would_fill_memory_is_refused() {
        assert!(Quota::per_day(10_000).sliding_log().is_ok());
        let error = Quota::per_day(10_001).sliding_log().unwrap_err();
        assert_eq!(error, ConfigError::SlidingLogTooLong { limit: 10_001, max: 10_000 });
    }
}
