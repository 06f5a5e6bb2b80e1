//! Staggers retries, so that jobs do not return together.

use std::time::Duration;

use tokio::time::Instant;

use crate::delay_queue::backoff::share;

/// Staggers the retries of jobs that are over a limit or wait for a lock. The delay grows with the number of jobs, so that they do not all
/// return for the same free slot.
#[derive(Debug)]
pub(crate) struct RetryStagger {
    since: Instant,
    count: u32,
}

/// The longest extra delay of a job.
const MAX_EXTRA_DELAY: Duration = Duration::from_secs(10);

impl RetryStagger {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// The delay of a job if the limit has capacity for one more after `wait`.
    pub(crate) fn rate_limited_delay(&mut self, wait: Duration, now: Instant) -> Duration {
        wait + self.extra_delay(wait, wait, now)
    }

    /// The delay of a job whose lock is held for up to `wait`, and may be released earlier. Each waiting job adds a small part of `wait`, so that
    /// one of them returns soon.
    pub(crate) fn contended_delay(&mut self, wait: Duration, now: Instant) -> Duration {
        wait / 2 + share(wait / 2) + self.extra_delay(wait, wait / 50, now)
    }

    /// The extra delay of a job, if each earlier job takes one `step`.
    fn extra_delay(&mut self, wait: Duration, step: Duration, now: Instant) -> Duration {
        if now.saturating_duration_since(self.since) > wait.max(Duration::from_secs(1)) {
            *self = Self::new(now);
        }
        let extra = share(step.saturating_mul(self.count).min(MAX_EXTRA_DELAY));
        self.count = self.count.saturating_add(1);
        extra
    }
}
