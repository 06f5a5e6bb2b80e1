use std::time::Duration;

use tokio::time::Instant;

use super::id::JobId;
use super::record::Reason;
use crate::key::Key;

/// Logs each job that dies and each that a shutdown cuts off, up to a number of them a second.
#[derive(Debug)]
pub(crate) struct Notices {
    queue: Key,
    // The second that is counted.
    since: Instant,
    logged: u64,
    suppressed: u64,
}

/// How many jobs of a worker are logged in a second. Twice as many would not be read either.
const MOST: u64 = 100;
const SECOND: Duration = Duration::from_secs(1);

impl Notices {
    pub(crate) fn new(queue: Key, now: Instant) -> Self {
        Self { queue, since: now, logged: 0, suppressed: 0 }
    }

    /// Logs a job that is dead.
    pub(crate) fn died(&mut self, job: &JobId, attempts: u16, reason: Reason, error: &str, now: Instant) {
        if self.admits(now) {
            let queue = &self.queue;
            tracing::warn!(%queue, %job, attempts, ?reason, error, "a job is dead: it will not be tried again");
        }
    }

    /// Logs a job that still runs when the grace of a shutdown is over.
    pub(crate) fn cut_off(&mut self, job: &JobId, attempts: u16, now: Instant) {
        if self.admits(now) {
            let (queue, reason) = (&self.queue, "shutdown");
            tracing::warn!(%queue, %job, attempts, reason, "a job is cut off: it did not end within the grace of a shutdown");
        }
    }

    fn admits(&mut self, now: Instant) -> bool {
        self.sum_up(now);
        let is_logged = self.logged < MOST;
        let counted = if is_logged { &mut self.logged } else { &mut self.suppressed };
        *counted += 1;
        is_logged
    }

    /// Begins another second if this one is over. Logs how many jobs were suppressed in it.
    pub(crate) fn sum_up(&mut self, now: Instant) {
        if now.saturating_duration_since(self.since) >= SECOND {
            self.end();
            (self.since, self.logged, self.suppressed) = (now, 0, 0);
        }
    }

    /// When to [sum up](Self::sum_up), if jobs were suppressed.
    pub(crate) fn sum_up_at(&self) -> Option<Instant> {
        (self.suppressed > 0).then(|| self.since + SECOND)
    }

    fn end(&self) {
        if self.suppressed > 0 {
            tracing::warn!(queue = %self.queue, jobs = self.suppressed, "more jobs died or were cut off than are logged in a second");
        }
    }
}

impl Drop for Notices {
    fn drop(&mut self) {
        self.end();
    }
}
