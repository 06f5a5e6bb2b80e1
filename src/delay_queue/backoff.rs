use std::time::Duration;

use super::record::Due;

/// How long a failed job waits for its next attempt.
///
/// ```
/// use std::time::Duration;
/// use tollgate::delay_queue::Backoff;
///
/// // Up to 1 s, 2 s, 4 s and so on, at most an hour: the default of a worker.
/// let backoff = Backoff::exponential(Duration::from_secs(1), Duration::from_secs(3_600)).full_jitter();
/// assert!(backoff.delay(3) <= Duration::from_secs(4));
///
/// assert_eq!(Backoff::fixed(Duration::from_secs(10)).delay(3), Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    is_jittered: bool,
}

impl Backoff {
    /// Doubles after each attempt, from `first` up to `longest`.
    #[must_use]
    pub fn exponential(first: Duration, longest: Duration) -> Self {
        let longest = longest.min(Due::MAX_DELAY);
        Self { first: first.min(longest), longest, is_jittered: false }
    }

    /// The same delay after each attempt.
    #[must_use]
    pub fn fixed(delay: Duration) -> Self {
        Self::exponential(delay, delay)
    }

    /// A random delay from zero to the full delay, so that jobs that failed together are not tried again together.
    #[must_use]
    pub const fn full_jitter(self) -> Self {
        Self { is_jittered: true, ..self }
    }

    /// The delay after attempt number `attempt`. The first attempt has the number 1.
    #[must_use]
    pub fn delay(&self, attempt: u16) -> Duration {
        // With 62 doublings any delay has reached its maximum.
        let doublings = u32::from(attempt.saturating_sub(1)).min(62);
        let delay = self.first.as_nanos().saturating_mul(1 << doublings).min(self.longest.as_nanos());
        let delay = Duration::new((delay / 1_000_000_000) as u64, (delay % 1_000_000_000) as u32);
        if self.is_jittered { share(delay) } else { delay }
    }
}

impl Default for Backoff {
    /// Exponential from a second to an hour, with full jitter.
    fn default() -> Self {
        Self::exponential(Duration::from_secs(1), Duration::from_secs(3_600)).full_jitter()
    }
}

/// A random part of a duration, or the whole duration if the operating system provides no random numbers.
pub(crate) fn share(time: Duration) -> Duration {
    let share = getrandom::u32().unwrap_or(u32::MAX);
    time.mul_f64(f64::from(share) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn backoff_doubles_up_to_the_longest() {
        let backoff = Backoff::exponential(secs(1), secs(3_600));
        let delays = [1, 2, 3, 12, 13, u16::MAX].map(|attempt| backoff.delay(attempt).as_secs());
        assert_eq!(delays, [1, 2, 4, 2_048, 3_600, 3_600]);
        assert_eq!(backoff.delay(0), secs(1));
    }

    #[test]
    fn backoff_never_overflows() {
        assert_eq!(Backoff::exponential(Duration::MAX, Duration::MAX).delay(u16::MAX), Due::MAX_DELAY);
        assert_eq!(Backoff::exponential(secs(9), secs(2)).delay(1), secs(2));
        assert_eq!(Backoff::fixed(Duration::ZERO).full_jitter().delay(7), Duration::ZERO);
    }

    #[test]
    fn full_jitter_spans_the_whole_delay() {
        let backoff = Backoff::fixed(secs(100)).full_jitter();
        let delays: Vec<_> = (0..1_000).map(|_| backoff.delay(1)).collect();
        assert!(delays.iter().all(|delay| *delay <= secs(100)));
        assert!(delays.iter().any(|delay| *delay < secs(10)) && delays.iter().any(|delay| *delay > secs(90)));
    }
}
