use std::time::Duration;

use tokio::time::Instant;

use super::id::JobId;
use super::record::Reason;
use crate::key::Key;

/// Logs each job that dies or that a shutdown cuts off, up to a limit per second.
#[derive(Debug)]
pub(crate) struct DeadJobLog {
    queue: Key,
    // The start of the current second.
    since: Instant,
    logged: u64,
    suppressed: u64,
}

/// How many jobs a worker logs in a second. More would not be read.
const MAX_PER_SECOND: u64 = 100;
const SECOND: Duration = Duration::from_secs(1);

impl DeadJobLog {
    pub(crate) fn new(queue: Key, now: Instant) -> Self {
        Self { queue, since: now, logged: 0, suppressed: 0 }
    }

    /// Logs a dead job.
    pub(crate) fn died(&mut self, job: &JobId, attempts: u16, reason: Reason, error: &str, now: Instant) {
        if self.admits(now) {
            let queue = &self.queue;
            tracing::warn!(%queue, %job, attempts, ?reason, error, "a job is dead: it will not be tried again");
        }
    }

    /// Logs a job that still runs after the grace period of a shutdown.
    pub(crate) fn cut_off(&mut self, job: &JobId, attempts: u16, now: Instant) {
        if self.admits(now) {
            let (queue, reason) = (&self.queue, "shutdown");
            tracing::warn!(%queue, %job, attempts, reason, "a job is cut off: it did not end within the grace period of the shutdown");
        }
    }

    fn admits(&mut self, now: Instant) -> bool {
        self.log_summary(now);
        let is_logged = self.logged < MAX_PER_SECOND;
        let counted = if is_logged { &mut self.logged } else { &mut self.suppressed };
        *counted += 1;
        is_logged
    }

    /// If the current second is over, logs how many jobs it suppressed, and begins the next second.
    pub(crate) fn log_summary(&mut self, now: Instant) {
        if now.saturating_duration_since(self.since) >= SECOND {
            self.log_suppressed();
            (self.since, self.logged, self.suppressed) = (now, 0, 0);
        }
    }

    /// When to [log the summary](Self::log_summary), if jobs were suppressed.
    pub(crate) fn summary_at(&self) -> Option<Instant> {
        (self.suppressed > 0).then(|| self.since + SECOND)
    }

    fn log_suppressed(&self) {
        if self.suppressed > 0 {
            tracing::warn!(queue = %self.queue, jobs = self.suppressed, "more jobs died or were cut off than are logged in a second");
        }
    }
}

impl Drop for DeadJobLog {
    fn drop(&mut self) {
        self.log_suppressed();
    }
}
