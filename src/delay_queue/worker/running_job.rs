use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::delay_queue::backoff::share;
use crate::delay_queue::job::Canceller;
use crate::delay_queue::metrics::OutcomeLabel;
use crate::delay_queue::store::{Ack, AckKind, JobLease};

/// A job that the service is running.
pub(crate) struct RunningJob {
    pub(crate) part: usize,
    pub(crate) ticket: JobLease,
    pub(crate) attempt: u16,
    // Whether the job is dead if this attempt fails.
    pub(crate) is_last: bool,
    pub(crate) started: Instant,
    pub(crate) canceller: Canceller,
    pub(crate) abort: AbortHandle,
    // By the local clock, counted from before the store call was sent.
    pub(crate) lease_ends: Instant,
    // `None` if the lease is not extended any more.
    pub(crate) extend_at: Option<Instant>,
    pub(crate) overrun_at: Option<Instant>,
    pub(crate) stop: Option<StopReason>,
    pub(crate) abort_at: Option<Instant>,
    // When the job is abandoned, if its dropped future has not ended by then.
    pub(crate) abandon_at: Option<Instant>,
    // Whether it is abandoned: its result is recorded already.
    pub(crate) is_abandoned: bool,
}

/// Why a job is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// The job was cancelled through the queue.
    Cancelled,
    LeaseLost,
    /// It exceeded the maximum runtime.
    Overrun,
    /// The grace period of the shutdown is over.
    ShutDown,
}

impl RunningJob {
    /// Tells the service to give up the job, and schedules the drop of its future after `timeout`. The first reason counts.
    pub(crate) fn stop(&mut self, reason: StopReason, now: Instant, timeout: Duration) {
        if self.stop.is_none() {
            self.stop = Some(reason);
            self.abort_at = now.checked_add(timeout);
            self.overrun_at = None;
            self.canceller.cancel();
        }
    }

    /// When the job needs attention next.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        let lease_ends = self.extend_at.map(|_| self.lease_ends);
        [self.extend_at, lease_ends, self.overrun_at, self.abort_at, self.abandon_at].into_iter().flatten().min()
    }
}

/// The result of a job, to be recorded by the store.
#[derive(Clone, Debug)]
pub(crate) struct PendingAck {
    pub(crate) ack: Ack,
    pub(crate) outcome: OutcomeLabel,
    // When the lease ends, by the local clock.
    pub(crate) lease_ends: Option<Instant>,
    // Whether the job is dead after a failure.
    pub(crate) is_last: bool,
    // The number of the ended attempt.
    pub(crate) attempt: u16,
    // When the first call with this result was sent, if that call failed but may have taken effect.
    pub(crate) first_sent_at: Option<Instant>,
}

impl PendingAck {
    pub(crate) fn new(ticket: JobLease, ending: AckKind) -> Self {
        let outcome = match &ending {
            AckKind::Done => OutcomeLabel::Done,
            AckKind::Cancelled => OutcomeLabel::Cancelled,
            AckKind::Retry { .. } => OutcomeLabel::Retried,
            AckKind::Snooze { .. } => OutcomeLabel::Snoozed,
            AckKind::Release => OutcomeLabel::Released,
            AckKind::Dead { .. } => OutcomeLabel::Dead,
        };
        Self { ack: Ack { ticket, ending }, outcome, lease_ends: None, is_last: false, attempt: 0, first_sent_at: None }
    }

    /// A stop after a cancellation. The store knows of the cancellation, and whether the unique key stays.
    pub(crate) fn cancelled(ticket: JobLease) -> Self {
        Self { outcome: OutcomeLabel::Cancelled, ..Self::new(ticket, AckKind::Done) }
    }

    /// The result of a job whose future was dropped.
    pub(crate) fn dropped(ticket: JobLease, reason: Option<StopReason>, delay: Duration) -> Self {
        match reason {
            Some(StopReason::Cancelled) => Self::cancelled(ticket),
            Some(StopReason::ShutDown) | None => Self::new(ticket, AckKind::Release),
            Some(StopReason::Overrun) => Self::retry(ticket, delay, "the job exceeded its maximum runtime"),
            Some(StopReason::LeaseLost) => Self::retry(ticket, delay, "the lease of the job was lost"),
        }
    }

    pub(crate) fn retry(ticket: JobLease, delay: Duration, error: impl Into<Arc<str>>) -> Self {
        Self::new(ticket, AckKind::Retry { delay, error: error.into() })
    }
}

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
