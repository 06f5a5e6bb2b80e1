use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::backoff::share;
use super::job::Canceller;
use super::meters;
use super::store::{Ending, Finish, Ticket};

/// A job that is given to the service.
pub(super) struct Running {
    pub(super) part: usize,
    pub(super) ticket: Ticket,
    pub(super) attempt: u16,
    // Whether it is dead if this attempt fails.
    pub(super) is_last: bool,
    pub(super) started: Instant,
    pub(super) canceller: Canceller,
    pub(super) abort: AbortHandle,
    // By our clock, counted from before the store was asked.
    pub(super) lease_ends: Instant,
    // `None` when there is nothing left to extend.
    pub(super) extend_at: Option<Instant>,
    pub(super) overrun_at: Option<Instant>,
    pub(super) stop: Option<Stop>,
    pub(super) abort_at: Option<Instant>,
    // When it is left behind, if it has not ended by then although it is dropped.
    pub(super) leave_at: Option<Instant>,
    // Whether it was: what has become of the job is told already.
    pub(super) is_left: bool,
}

/// Why a job is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Somebody has cancelled it.
    Cancelled,
    LeaseLost,
    /// It runs for longer than it may.
    Overrun,
    /// The worker has no more time.
    ShutDown,
}

impl Running {
    /// Tells the service to give the job up, and drops it after `patience`. The first reason counts.
    pub(super) fn stop(&mut self, why: Stop, now: Instant, patience: Duration) {
        if self.stop.is_none() {
            self.stop = Some(why);
            self.abort_at = now.checked_add(patience);
            self.overrun_at = None;
            self.canceller.cancel();
        }
    }

    /// When there is something to look after.
    pub(super) fn next_check(&self) -> Option<Instant> {
        let lease_ends = self.extend_at.map(|_| self.lease_ends);
        [self.extend_at, lease_ends, self.overrun_at, self.abort_at, self.leave_at].into_iter().flatten().min()
    }
}

/// What has become of a job, and is to be noted by the store.
#[derive(Clone, Debug)]
pub(super) struct Settled {
    pub(super) finish: Finish,
    pub(super) result: meters::Result,
    // When the job is somebody else's, by our clock.
    pub(super) lease_ends: Option<Instant>,
    // Whether a failure is the end of the job.
    pub(super) is_last: bool,
    // Which attempt has ended.
    pub(super) attempt: u16,
    // When the first call was sent that was to note it, and may have come through although it failed.
    pub(super) told_at: Option<Instant>,
}

impl Settled {
    pub(super) fn new(ticket: Ticket, ending: Ending) -> Self {
        let result = match &ending {
            Ending::Done => meters::Result::Done,
            Ending::Cancelled => meters::Result::Cancelled,
            Ending::Retry { .. } => meters::Result::Retried,
            Ending::Snooze { .. } => meters::Result::Snoozed,
            Ending::Release => meters::Result::Released,
            Ending::Dead { .. } => meters::Result::Dead,
        };
        Self { finish: Finish { ticket, ending }, result, lease_ends: None, is_last: false, attempt: 0, told_at: None }
    }

    /// Given up since somebody has cancelled it. The store knows of it already, and whether the unique key stays.
    pub(super) fn cancelled(ticket: Ticket) -> Self {
        Self { result: meters::Result::Cancelled, ..Self::new(ticket, Ending::Done) }
    }

    /// What becomes of a job whose service was dropped.
    pub(super) fn dropped(ticket: Ticket, why: Option<Stop>, delay: Duration) -> Self {
        match why {
            Some(Stop::Cancelled) => Self::cancelled(ticket),
            Some(Stop::ShutDown) | None => Self::new(ticket, Ending::Release),
            Some(Stop::Overrun) => Self::retry(ticket, delay, "it ran for longer than it may"),
            Some(Stop::LeaseLost) => Self::retry(ticket, delay, "its lease was lost"),
        }
    }

    pub(super) fn retry(ticket: Ticket, delay: Duration, error: impl Into<Arc<str>>) -> Self {
        Self::new(ticket, Ending::Retry { delay, error: error.into() })
    }
}

/// Spreads jobs that are over a limit, or wait for what somebody else has: the more of them there are, the later each comes again, so that they
/// do not all come for the one that there is room for.
#[derive(Debug)]
pub(super) struct Spread {
    since: Instant,
    count: u32,
}

/// How much later than there is room one comes at the most.
const WIDEST: Duration = Duration::from_secs(10);

impl Spread {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// How long a job waits if there is room for the next one after `wait`.
    pub(super) fn delay(&mut self, wait: Duration, now: Instant) -> Duration {
        wait + self.more(wait, wait, now)
    }

    /// How long a job waits for what somebody else has for up to `wait`, and may give back at any time. Each of the others takes a small part of
    /// that, so that somebody comes soon.
    pub(super) fn turn(&mut self, wait: Duration, now: Instant) -> Duration {
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
