//! Turns the end of an attempt into the result to record.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokio::task::JoinError;
use tokio::time::Instant;

use super::job_timers::StopReason;
use super::pending_ack::PendingAck;
use super::retry_stagger::RetryStagger;
use super::running_job::RunningJob;
use crate::delay_queue::backoff::Backoff;
use crate::delay_queue::outcome::FailureAction;
use crate::delay_queue::store::{AckKind, JobLease};
use crate::error::BoxError;
use crate::panics::{discard, discard_joined};

/// Turns the end of an attempt into the result to record.
pub(crate) struct AttemptResults {
    backoff: Backoff,
    // For jobs that are over a rate limit.
    rate_limit_stagger: RetryStagger,
    // For jobs that wait for a lock or an operation.
    contention_stagger: RetryStagger,
}

impl AttemptResults {
    pub(crate) fn new(backoff: Backoff, now: Instant) -> Self {
        Self { backoff, rate_limit_stagger: RetryStagger::new(now), contention_stagger: RetryStagger::new(now) }
    }

    /// The result of an attempt that has ended.
    pub(crate) fn ack_of_ended(
        &mut self,
        job: &RunningJob,
        ended: Result<Result<(), BoxError>, JoinError>,
        now: Instant,
    ) -> PendingAck {
        let lease = job.lease;
        let ack = match (ended, job.timers.stop_reason()) {
            (ended, Some(StopReason::Cancelled)) => {
                discard_joined(ended);
                PendingAck::cancelled(lease)
            }
            (Ok(Ok(())), _) => PendingAck::new(lease, AckKind::Done),
            (Ok(Err(error)), stop) => self.failed(lease, job.attempt, error, stop, now),
            (Err(error), _) => match error.try_into_panic() {
                Ok(panic) => self.panicked(lease, job.attempt, panic),
                Err(_) => return self.ack_of_dropped(job),
            },
        };
        job.ack(ack)
    }

    /// The result of a job whose future was dropped.
    pub(crate) fn ack_of_dropped(&self, job: &RunningJob) -> PendingAck {
        job.ack(PendingAck::dropped(job.lease, job.timers.stop_reason(), self.backoff.delay(job.attempt)))
    }

    /// The result of a job whose service panicked.
    pub(crate) fn panicked(&self, lease: JobLease, attempt: u16, panic: Box<dyn Any + Send>) -> PendingAck {
        PendingAck::retry(lease, self.backoff.delay(attempt), panic_text(panic))
    }

    fn failed(
        &mut self,
        lease: JobLease,
        attempt: u16,
        error: BoxError,
        stop: Option<StopReason>,
        now: Instant,
    ) -> PendingAck {
        let backoff = &self.backoff;
        let action = catch_unwind(AssertUnwindSafe(move || match stop {
            // The shutdown told the service to give up. The job is released, unless the error determines the outcome.
            Some(StopReason::ShutDown) => {
                FailureAction::from_error(&error).unwrap_or(FailureAction::Ack(AckKind::Release))
            }
            _ => FailureAction::of(&error, attempt, backoff),
        }));
        let kind = match action {
            Ok(FailureAction::Ack(kind)) => kind,
            Ok(FailureAction::Limited(wait)) => {
                AckKind::Snooze { delay: self.rate_limit_stagger.rate_limited_delay(wait, now) }
            }
            Ok(FailureAction::Busy(wait)) => {
                AckKind::Snooze { delay: self.contention_stagger.contended_delay(wait, now) }
            }
            Ok(FailureAction::Cancelled) => AckKind::Cancelled,
            // The error's own code, such as its `Display`, panicked. Treat it as a panic of the service.
            Err(panic) => return self.panicked(lease, attempt, panic),
        };
        PendingAck::new(lease, kind)
    }
}

/// The message of a panic.
pub(crate) fn panic_text(panic: Box<dyn Any + Send>) -> Arc<str> {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.map_or_else(|| "the job panicked".into(), |text| format!("the job panicked: {text}").into());
    discard(panic);
    text
}
