use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::job_timers::{JobTimers, StopReason};
use super::pending_ack::PendingAck;
use crate::delay_queue::job::Canceller;
use crate::delay_queue::store::JobLease;

/// A job that the service is running.
pub(crate) struct RunningJob {
    pub(crate) partition: usize,
    pub(crate) lease: JobLease,
    pub(crate) attempt: u16,
    // Whether the job is dead if this attempt fails.
    pub(crate) is_last: bool,
    pub(crate) started: Instant,
    pub(crate) canceller: Canceller,
    pub(crate) abort: AbortHandle,
    pub(crate) timers: JobTimers,
}

impl RunningJob {
    /// Tells the service to give up the job, and schedules the drop of its future after `timeout`. The first reason counts.
    pub(crate) fn stop(&mut self, reason: StopReason, now: Instant, timeout: Duration) {
        if self.timers.stop(reason, now, timeout) {
            self.canceller.cancel();
        }
    }

    /// Adds the number of this attempt, and whether it is the last one, to its result.
    pub(crate) fn ack(&self, ack: PendingAck) -> PendingAck {
        PendingAck { is_last: self.is_last, attempt: self.attempt, ..ack }
    }
}
