use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::delay_queue::backoff::share;
use crate::delay_queue::job::Canceller;
use crate::delay_queue::metrics;
use crate::delay_queue::store::{Ack, AckKind, JobLease};

/// A job that is given to the service.
pub(crate) struct RunningJob {
    pub(crate) part: usize,
    pub(crate) ticket: JobLease,
    pub(crate) attempt: u16,
    // Whether it is dead if this attempt fails.
    pub(crate) is_last: bool,
    pub(crate) started: Instant,
    pub(crate) canceller: Canceller,
    pub(crate) abort: AbortHandle,
    // By our clock, counted from before the store was asked.
    pub(crate) lease_ends: Instant,
    // `None` when there is nothing left to extend.
    pub(crate) extend_at: Option<Instant>,
    pub(crate) overrun_at: Option<Instant>,
    pub(crate) stop: Option<StopReason>,
    pub(crate) abort_at: Option<Instant>,
    // When it is left behind, if it has not ended by then although it is dropped.
    pub(crate) leave_at: Option<Instant>,
    // Whether it was: what has become of the job is told already.
    pub(crate) is_left: bool,
}

/// Why a job is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// Somebody has cancelled it.
    Cancelled,
    LeaseLost,
    /// It runs for longer than it may.
    Overrun,
    /// The worker has no more time.
    ShutDown,
}

impl RunningJob {
    /// Tells the service to give the job up, and drops it after `patience`. The first reason counts.
    pub(crate) fn stop(&mut self, why: StopReason, now: Instant, patience: Duration) {
        if self.stop.is_none() {
            self.stop = Some(why);
            self.abort_at = now.checked_add(patience);
            self.overrun_at = None;
            self.canceller.cancel();
        }
    }

    /// When there is something to look after.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        let lease_ends = self.extend_at.map(|_| self.lease_ends);
        [self.extend_at, lease_ends, self.overrun_at, self.abort_at, self.leave_at].into_iter().flatten().min()
    }
}

/// What has become of a job, and is to be noted by the store.
#[derive(Clone, Debug)]
pub(crate) struct PendingAck {
    pub(crate) finish: Ack,
    pub(crate) result: metrics::Result,
    // When the job is somebody else's, by our clock.
    pub(crate) lease_ends: Option<Instant>,
    // Whether a failure is the end of the job.
    pub(crate) is_last: bool,
    // Which attempt has ended.
    pub(crate) attempt: u16,
    // When the first call was sent that was to note it, and may have come through although it failed.
    pub(crate) told_at: Option<Instant>,
}

impl PendingAck {
    pub(crate) fn new(ticket: JobLease, ending: AckKind) -> Self {
        let result = match &ending {
            AckKind::Done => metrics::Result::Done,
            AckKind::Cancelled => metrics::Result::Cancelled,
            AckKind::Retry { .. } => metrics::Result::Retried,
            AckKind::Snooze { .. } => metrics::Result::Snoozed,
            AckKind::Release => metrics::Result::Released,
            AckKind::Dead { .. } => metrics::Result::Dead,
        };
        Self { finish: Ack { ticket, ending }, result, lease_ends: None, is_last: false, attempt: 0, told_at: None }
    }

    /// Given up since somebody has cancelled it. The store knows of it already, and whether the unique key stays.
    pub(crate) fn cancelled(ticket: JobLease) -> Self {
        Self { result: metrics::Result::Cancelled, ..Self::new(ticket, AckKind::Done) }
    }

    /// What becomes of a job whose service was dropped.
    pub(crate) fn dropped(ticket: JobLease, why: Option<StopReason>, delay: Duration) -> Self {
        match why {
            Some(StopReason::Cancelled) => Self::cancelled(ticket),
            Some(StopReason::ShutDown) | None => Self::new(ticket, AckKind::Release),
            Some(StopReason::Overrun) => Self::retry(ticket, delay, "it ran for longer than it may"),
            Some(StopReason::LeaseLost) => Self::retry(ticket, delay, "its lease was lost"),
        }
    }

    pub(crate) fn retry(ticket: JobLease, delay: Duration, error: impl Into<Arc<str>>) -> Self {
        Self::new(ticket, AckKind::Retry { delay, error: error.into() })
    }
}

/// Spreads jobs that are over a limit, or wait for what somebody else has: the more of them there are, the later each comes again, so that they
/// do not all come for the one that there is room for.
#[derive(Debug)]
pub(crate) struct RetryStagger {
    since: Instant,
    count: u32,
}

/// How much later than there is room one comes at the most.
const WIDEST: Duration = Duration::from_secs(10);

impl RetryStagger {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// How long a job waits if there is room for the next one after `wait`.
    pub(crate) fn delay(&mut self, wait: Duration, now: Instant) -> Duration {
        wait + self.more(wait, wait, now)
    }

    /// How long a job waits for what somebody else has for up to `wait`, and may give back at any time. Each of the others takes a small part of
    /// that, so that somebody comes soon.
    pub(crate) fn turn(&mut self, wait: Duration, now: Instant) -> Duration {
        wait / 2 + share(wait / 2) + self.more(wait, wait / 50, now)
    }

    /// How much later than `wait` a job comes, if each of those before it takes a `step`.
    fn more(&mut self, wait: Duration, step: Duration, now: Instant) -> Duration {
        if now.saturating_duration_since(self.since) > wait.max(Duration::from_secs(1)) {
            *self = Self::new(now);
        }
        let more = share(step.saturating_mul(self.count).min(WIDEST));
        self.count = self.count.saturating_add(1);
        more
    }
}
