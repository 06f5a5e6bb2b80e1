//! A result that the store has not recorded yet.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::job_timers::StopReason;
use crate::delay_queue::metrics::OutcomeLabel;
use crate::delay_queue::store::{Ack, AckKind, DeadLimits, Finished, JobLease};

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
    pub(crate) fn new(lease: JobLease, kind: AckKind) -> Self {
        let outcome = match &kind {
            AckKind::Done => OutcomeLabel::Done,
            AckKind::Cancelled => OutcomeLabel::Cancelled,
            AckKind::Retry { .. } => OutcomeLabel::Retried,
            AckKind::Snooze { .. } => OutcomeLabel::Snoozed,
            AckKind::Release => OutcomeLabel::Released,
            AckKind::Dead { .. } => OutcomeLabel::Dead,
        };
        Self { ack: Ack { lease, kind }, outcome, lease_ends: None, is_last: false, attempt: 0, first_sent_at: None }
    }

    /// The result of a job that was cancelled through the queue. The store knows of the cancellation, and whether the unique key stays.
    pub(crate) fn cancelled(lease: JobLease) -> Self {
        Self { outcome: OutcomeLabel::Cancelled, ..Self::new(lease, AckKind::Done) }
    }

    /// The result of a job whose future was dropped.
    pub(crate) fn dropped(lease: JobLease, reason: Option<StopReason>, delay: Duration) -> Self {
        match reason {
            Some(StopReason::Cancelled) => Self::cancelled(lease),
            Some(StopReason::ShutDown) | None => Self::new(lease, AckKind::Release),
            Some(StopReason::Overrun) => Self::retry(lease, delay, "the job exceeded its maximum runtime"),
            Some(StopReason::LeaseLost) => Self::retry(lease, delay, "the lease of the job was lost"),
        }
    }

    pub(crate) fn retry(lease: JobLease, delay: Duration, error: impl Into<Arc<str>>) -> Self {
        Self::new(lease, AckKind::Retry { delay, error: error.into() })
    }

    /// The outcome to report, given the store's reply and the limits on dead jobs.
    pub(crate) fn outcome(&self, finished: Finished, dead: DeadLimits, now: Instant) -> OutcomeLabel {
        match (finished, self.first_sent_at, &self.ack.kind) {
            (Finished::Dead, ..) => OutcomeLabel::Dead,
            (Finished::Cancelled, ..) => OutcomeLabel::Cancelled,
            (Finished::Done, ..) => self.outcome,
            // The job would still exist if an earlier call had recorded the result, so a cancellation has removed it. The next arms assume
            // that an earlier call recorded it.
            (Finished::Gone, Some(at), _) if self.is_kept(dead, now.saturating_duration_since(at)) => {
                OutcomeLabel::Cancelled
            }
            // The attempts are used up, whether dead jobs are kept or not.
            (Finished::Gone | Finished::Lost, Some(_), AckKind::Retry { .. }) if self.is_last => OutcomeLabel::Dead,
            (Finished::Gone, Some(_), _) => self.outcome,
            // After an earlier call recorded such a result, the job waits or another worker holds it. A finished job would be gone.
            (Finished::Lost, Some(_), kind) if !kind.forgets() => self.outcome,
            (Finished::Gone | Finished::Lost, ..) => OutcomeLabel::LeaseLost,
        }
    }

    /// Whether a job with this result is probably still stored after `since`, unless it was cancelled. No worker can have finished it,
    /// since its delay is not over. A dead job must not be too old to be kept.
    fn is_kept(&self, dead: DeadLimits, since: Duration) -> bool {
        match &self.ack.kind {
            AckKind::Dead { .. } => dead.count > 0 && since < dead.age,
            AckKind::Retry { .. } if self.is_last => dead.count > 0 && since < dead.age,
            AckKind::Retry { delay, .. } | AckKind::Snooze { delay } => since < *delay,
            AckKind::Release | AckKind::Done | AckKind::Cancelled => false,
        }
    }
}
