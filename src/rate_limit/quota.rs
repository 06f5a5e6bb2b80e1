use std::time::Duration;

use crate::error::ConfigError;

/// A number of units per window: `Quota::per_minute(60)` is sixty units per minute.
///
/// A quota does not say *how* it is counted. Choose an algorithm to make it a [`Limit`]:
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
/// A request costs one unit unless you set another [cost](crate::rate_limit::RequestCost). A quota of 0 denies every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u64,
    window: Duration,
}

impl Quota {
    /// The shortest window: 10 ms. A shorter window would measure the network rather than the clients.
    pub const MIN_WINDOW: Duration = Duration::from_millis(10);
    /// The longest window: 3,660 days, about ten years.
    pub const MAX_WINDOW: Duration = Duration::from_secs(3_660 * 86_400);
    /// The largest quota, burst and charge: 2^53 - 1, about nine quadrillion. Up to here, every store counts exactly.
    pub const MAX_UNITS: u64 = (1 << 53) - 1;
    /// The largest quota that a [sliding log](Quota::sliding_log) takes.
    pub const MAX_SLIDING_LOG: u64 = 10_000;

    /// `limit` units per second.
    ///
    /// # Panics
    ///
    /// If `limit` is above [`MAX_UNITS`](Self::MAX_UNITS). [`new`](Self::new) returns an error instead.
    #[must_use]
    pub const fn per_second(limit: u64) -> Self {
        Self::per_seconds(limit, 1)
    }

    /// `limit` units per minute.
    ///
    /// # Panics
    ///
    /// If `limit` is above [`MAX_UNITS`](Self::MAX_UNITS). [`new`](Self::new) returns an error instead.
    #[must_use]
    pub const fn per_minute(limit: u64) -> Self {
        Self::per_seconds(limit, 60)
    }

    /// `limit` units per hour.
    ///
    /// # Panics
    ///
    /// If `limit` is above [`MAX_UNITS`](Self::MAX_UNITS). [`new`](Self::new) returns an error instead.
    #[must_use]
    pub const fn per_hour(limit: u64) -> Self {
        Self::per_seconds(limit, 3_600)
    }

    /// `limit` units per 24 hours.
    ///
    /// # Panics
    ///
    /// If `limit` is above [`MAX_UNITS`](Self::MAX_UNITS). [`new`](Self::new) returns an error instead.
    #[must_use]
    pub const fn per_day(limit: u64) -> Self {
        Self::per_seconds(limit, 86_400)
    }

    const fn per_seconds(limit: u64, seconds: u64) -> Self {
        assert!(limit <= Self::MAX_UNITS, "a quota is at most 2^53 - 1 units");
        Self { limit, window: Duration::from_secs(seconds) }
    }

    /// `limit` units per `window`, which is counted in whole microseconds.
    ///
    /// # Errors
    ///
    /// [`ConfigError::QuotaOutOfRange`] for a limit above [`MAX_UNITS`](Self::MAX_UNITS), and [`ConfigError::WindowOutOfRange`] unless the
    /// window is between [`MIN_WINDOW`](Self::MIN_WINDOW) and [`MAX_WINDOW`](Self::MAX_WINDOW).
    pub fn new(limit: u64, window: Duration) -> Result<Self, ConfigError> {
        if limit > Self::MAX_UNITS {
            Err(ConfigError::QuotaOutOfRange { units: limit, max: Self::MAX_UNITS })
        } else if (Self::MIN_WINDOW..=Self::MAX_WINDOW).contains(&window) {
            Ok(Self { limit, window })
        } else {
            Err(ConfigError::WindowOutOfRange { window, min: Self::MIN_WINDOW, max: Self::MAX_WINDOW })
        }
    }

    /// Sets how many units may be saved up and spent at once: the size of the [token bucket](BurstQuota::token_bucket).
    ///
    /// # Errors
    ///
    /// [`ConfigError::BurstOutOfRange`] if an empty bucket would take longer than [`MAX_WINDOW`](Self::MAX_WINDOW) to fill,
    /// [`ConfigError::QuotaOutOfRange`] for a burst above [`MAX_UNITS`](Self::MAX_UNITS), and [`ConfigError::ZeroBurst`] for 0. A quota of
    /// 0 accepts every burst up to [`MAX_UNITS`](Self::MAX_UNITS), including 0, since it denies every request.
    pub const fn burst(self, units: u64) -> Result<BurstQuota, ConfigError> {
        if units == 0 && self.limit > 0 {
            return Err(ConfigError::ZeroBurst);
        }
        if units > Self::MAX_UNITS {
            return Err(ConfigError::QuotaOutOfRange { units, max: Self::MAX_UNITS });
        }
        let fill_us = units as u128 * self.window.as_micros();
        if self.limit == 0 || fill_us <= self.limit as u128 * Self::MAX_WINDOW.as_micros() {
            Ok(BurstQuota { quota: self, burst: units })
        } else {
            Err(ConfigError::BurstOutOfRange { burst: units, limit: self.limit, window: self.window })
        }
    }

    /// Counts with a bucket that holds a whole quota of tokens and is refilled evenly: the smoothest algorithm, and one of the cheapest.
    ///
    /// A client that was idle may use the whole quota at once, and then tokens as they are refilled. In the worst case, twice the quota,
    /// less one, passes within one window's length. Set a smaller [burst](Self::burst) if that is too much.
    ///
    /// This is the generic cell rate algorithm (GCRA, ITU-T I.371) in the form of a leaky bucket, in integers. The rate is exact if the
    /// window in microseconds times the size of the bucket is at most 2^51 (37 million a minute, 26,000 a day). For round numbers, it is
    /// exact far beyond that. Otherwise it may be too slow by at most a hundred-millionth.
    #[must_use]
    pub const fn token_bucket(self) -> Limit {
        Limit { quota: self, algorithm: Algorithm::TokenBucket, capacity: self.limit }
    }

    /// Counts in a window that opens with the first request of a key. The count is reset when the window closes.
    ///
    /// In the worst case twice the quota passes within one window's length, half at the end of one window and half at the start of the
    /// next. Windows are per key, so clients do not all return at the same instant.
    #[must_use]
    pub const fn fixed_window(self) -> Limit {
        Limit { quota: self, algorithm: Algorithm::FixedWindow, capacity: self.limit }
    }

    /// Counts in two windows, and reduces the older count as time passes in the newer window: nearly as strict as a
    /// [log](Self::sliding_log), at the cost of two numbers.
    ///
    /// The count of the previous window is scaled by the share of that window that is less than one window's length ago, and rounded up.
    /// This treats the requests of that window as spread evenly. So a client that spreads its requests evenly gets the quota less at most
    /// one in each window. For a quota of two or three that is a lot: use a token bucket or a log. In the worst case, with all requests of
    /// the last window at its end, somewhat less than twice the quota passes within one window's length.
    ///
    /// If the window in microseconds times the quota is above 2^51, the share is counted in coarser steps: of at most a 67-millionth of the
    /// window, rounded up to whole microseconds.
    #[must_use]
    pub const fn sliding_window(self) -> Limit {
        Limit { quota: self, algorithm: Algorithm::SlidingWindow, capacity: self.limit }
    }

    /// Logs every request until it is one window old. So at most the quota passes in *any* span of a window's length.
    ///
    /// Exact, but needs more memory: 12 bytes per logged request in Redis, 16 in memory.
    ///
    /// # Errors
    ///
    /// [`ConfigError::SlidingLogTooLong`] for a quota above [`MAX_SLIDING_LOG`](Self::MAX_SLIDING_LOG).
    pub const fn sliding_log(self) -> Result<Limit, ConfigError> {
        if self.limit <= Self::MAX_SLIDING_LOG {
            Ok(Limit { quota: self, algorithm: Algorithm::SlidingLog, capacity: self.limit })
        } else {
            Err(ConfigError::SlidingLogTooLong { limit: self.limit, max: Self::MAX_SLIDING_LOG })
        }
    }

    /// Returns the units per window.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the length of the window.
    #[must_use]
    pub const fn window(&self) -> Duration {
        self.window
    }

    /// The length of the window. It fits into a `u64`: see `MAX_WINDOW`.
    pub(crate) const fn window_us(&self) -> u64 {
        self.window.as_micros() as u64
    }
}

/// A quota with a burst, the number of units that may be saved up and spent at once. See [`Quota::burst`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BurstQuota {
    quota: Quota,
    burst: u64,
}

impl BurstQuota {
    /// Counts with a bucket that holds the burst and is refilled evenly at the rate of the quota.
    ///
    /// In the worst case the burst and a whole quota, less one, pass within one window's length. See
    /// [`Quota::token_bucket`].
    #[must_use]
    pub const fn token_bucket(self) -> Limit {
        Limit { quota: self.quota, algorithm: Algorithm::TokenBucket, capacity: self.burst }
    }
}

/// How a quota is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// See [`Quota::token_bucket`].
    TokenBucket,
    /// See [`Quota::fixed_window`].
    FixedWindow,
    /// See [`Quota::sliding_window`].
    SlidingWindow,
    /// See [`Quota::sliding_log`].
    SlidingLog,
}

/// A quota together with the algorithm that counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    quota: Quota,
    algorithm: Algorithm,
    capacity: u64,
}

impl Limit {
    /// Returns the units and their window.
    #[must_use]
    pub const fn quota(&self) -> Quota {
        self.quota
    }

    /// Returns the algorithm.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the most units that can be used at once: the burst of a token bucket, the quota otherwise. 0 if the quota is 0.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        if self.quota.limit == 0 { 0 } else { self.capacity }
    }

    /// Returns the window, or the time in which an empty token bucket fills. The fill time is in whole microseconds, rounded up.
    #[must_use]
    pub const fn period(&self) -> Duration {
        if self.capacity == self.quota.limit || self.quota.limit == 0 {
            return self.quota.window;
        }
        let fill_us = (self.capacity as u128 * self.quota.window.as_micros()).div_ceil(self.quota.limit as u128);
        // It fits into a `u64`: see `Quota::burst`.
        Duration::from_micros(fill_us as u64)
    }

    /// The limit for one of `replicas` processes that do not share counts: its share of the units, rounded up.
    #[must_use]
    pub(crate) const fn share_of(self, replicas: u32) -> Self {
        let replicas = if replicas == 0 { 1 } else { replicas as u64 };
        let quota = Quota { limit: self.quota.limit.div_ceil(replicas), window: self.quota.window };
        Self { quota, algorithm: self.algorithm, capacity: self.capacity.div_ceil(replicas) }
    }
}

/// What happens to the counts when a limit of a policy changes: in a new release, by a reload, or because a client has changed plans.
/// Defaults to [`Keep`](Self::Keep).
///
/// This applies to the numbers: quotas, bursts, and the rates of token buckets. Policies with one name are counted separately if their
/// limits differ in number, order, algorithms or windows, except the windows of token buckets. After such a change, counts start from
/// zero and earlier blocks do not apply. While two releases share a store, each enforces its own limits.
///
/// The first request that is charged under the new numbers converts the counts. Counts of windows and buckets are cut at twice the new
/// quota: a client that used 900 of 1,000 counts as having used 200 of 100. A [correction](super::RateLimitHandle) of an earlier charge
/// uses the stored numbers if it gives units back, or if the new numbers would cut or remove counts. If a correction charges units
/// to a request with a cost of 0, they count under the numbers that the request used. While two releases with different numbers share a
/// store, counts are converted back and forth. This is harmless with `Keep`. With `Proportional`, units are rounded up each time.
///
/// **With `Reset`, two quotas under one name that are in use at the same time enforce nothing**: each request that finds the numbers of the
/// other quota starts from zero. This happens during a rolling deploy, and permanently if two layers give different quotas the same name.
/// Give each quota its own name, or use `Keep`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuotaChange {
    /// Used units stay used: after 80 of 100, 920 of 1,000 are left.
    #[default]
    Keep,
    /// A limit whose numbers change starts from zero: after 80 of 100, 1,000 of 1,000 are left. Not for two quotas that are in use at the
    /// same time.
    Reset,
    /// The used share stays the same, rounded up: after 80 of 100, 200 of 1,000 are left. A sliding log keeps its logged requests, since it
    /// has no share to scale.
    Proportional,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_out_of_range_is_refused() {
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
    fn units_above_maximum_are_refused() {
        let (most, second) = (Quota::MAX_UNITS, Duration::from_secs(1));
        assert_eq!(Quota::new(most, second).unwrap(), Quota::per_second(most));
        let refused = |units: u64| Err(ConfigError::QuotaOutOfRange { units, max: most });
        for units in [most + 1, u64::MAX] {
            assert_eq!(Quota::new(units, second).map(drop), refused(units));
            assert_eq!(Quota::per_second(most).burst(units).map(drop), refused(units));
            assert_eq!(Quota::per_second(0).burst(units).map(drop), refused(units));
        }
        assert_eq!(Quota::per_second(most).burst(most).unwrap().token_bucket().capacity(), most);
    }

    #[test]
    #[should_panic(expected = "a quota is at most 2^53 - 1 units")]
    fn constructor_without_error_panics_above_maximum() {
        let _ = Quota::per_minute(Quota::MAX_UNITS + 1);
    }

    #[test]
    fn sliding_log_above_maximum_is_refused() {
        assert!(Quota::per_day(10_000).sliding_log().is_ok());
        let error = Quota::per_day(10_001).sliding_log().unwrap_err();
        assert_eq!(error, ConfigError::SlidingLogTooLong { limit: 10_001, max: 10_000 });
    }

    #[test]
    fn bucket_that_never_fills_is_refused() {
        assert!(Quota::per_day(1).burst(3_660).is_ok());
        assert!(matches!(Quota::per_day(1).burst(3_661), Err(ConfigError::BurstOutOfRange { burst: 3_661, .. })));
    }

    /// Regression: a quota of 0 was refused as a bucket that never fills.
    #[test]
    fn zero_quota_accepts_any_burst() {
        for burst in [1, 20, Quota::MAX_UNITS] {
            let limit = Quota::per_day(0).burst(burst).unwrap().token_bucket();
            assert_eq!((limit.capacity(), limit.period()), (0, Duration::from_secs(86_400)));
            assert_eq!((limit.share_of(3).capacity(), limit.share_of(3).period()), (0, Duration::from_secs(86_400)));
        }
    }

    #[test]
    fn zero_burst_needs_zero_quota() {
        assert_eq!(Quota::per_second(10).burst(0), Err(ConfigError::ZeroBurst));
        assert_eq!(Quota::per_second(0).burst(0).unwrap().token_bucket().capacity(), 0);
    }

    #[test]
    fn bucket_period_is_time_to_fill() {
        let period = |limit: u64, burst: u64| Quota::per_second(limit).burst(burst).unwrap().token_bucket().period();
        assert_eq!(period(10, 10), Duration::from_secs(1));
        assert_eq!(period(10, 25), Duration::from_millis(2_500));
        assert_eq!(period(3, 1), Duration::from_micros(333_334));
    }
}
