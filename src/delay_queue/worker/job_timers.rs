//! Decides when the lease of a running job is renewed, and when the job is stopped, dropped or abandoned.

use std::time::Duration;

use tokio::time::Instant;

use super::stage::ABANDON_AFTER;

/// When the lease of a running job is to be renewed, and when the job is to be stopped. Does no I/O.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobTimers {
    // By the local clock. It counts from before the claim or renewal was sent, so it is never after the end by the store's clock.
    lease_ends: Instant,
    // `None` if the lease is not renewed any more.
    renew_at: Option<Instant>,
    overrun_at: Option<Instant>,
    stop: Option<StopReason>,
    abort_at: Option<Instant>,
    // When the job is abandoned, if its aborted task has not ended by then: a future that never yields cannot be dropped.
    abandon_at: Option<Instant>,
    // Whether the job is abandoned. The worker has then decided its result, and ignores how its task ends.
    is_abandoned: bool,
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

/// What to do for a running job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct JobActions {
    /// Drop its future.
    pub(crate) aborts: bool,
    /// Record a result for the job, since its aborted task has not ended.
    pub(crate) abandons: bool,
    /// Tell the service to give up.
    pub(crate) cancels: bool,
    /// Renew the lease.
    pub(crate) renews: bool,
}

impl JobTimers {
    /// The timers of a job that starts now, and that was claimed by a call sent at `sent`.
    pub(crate) fn new(sent: Instant, lease: Duration, now: Instant, max_runtime: Option<Duration>) -> Self {
        Self {
            lease_ends: sent + lease,
            renew_at: Some(sent + lease / 3),
            overrun_at: max_runtime.and_then(|time| now.checked_add(time)),
            stop: None,
            abort_at: None,
            abandon_at: None,
            is_abandoned: false,
        }
    }

    pub(crate) const fn lease_ends(&self) -> Instant {
        self.lease_ends
    }

    pub(crate) const fn stop_reason(&self) -> Option<StopReason> {
        self.stop
    }

    pub(crate) const fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// When the job needs attention next.
    pub(crate) fn next(&self) -> Option<Instant> {
        let lease_ends = self.renew_at.map(|_| self.lease_ends);
        [self.renew_at, lease_ends, self.overrun_at, self.abort_at, self.abandon_at].into_iter().flatten().min()
    }

    /// Stops the job: its future is dropped after `timeout`. Returns false if the job is stopped already, since the first reason counts.
    pub(crate) fn stop(&mut self, reason: StopReason, now: Instant, timeout: Duration) -> bool {
        if self.stop.is_some() {
            return false;
        }
        (self.stop, self.abort_at, self.overrun_at) = (Some(reason), now.checked_add(timeout), None);
        true
    }

    /// Notes that a call sent at `sent` has renewed the lease.
    pub(crate) fn renewed(&mut self, sent: Instant, lease: Duration) {
        self.lease_ends = sent + lease;
        self.renew_at = self.renew_at.map(|_| sent + lease / 3);
    }

    /// Notes that the store has reported the lease as lost, in its reply to a call sent at `sent`. The lease counts as ended since `sent`,
    /// even if it has not ended by the local clock.
    pub(crate) fn lease_lost(&mut self, sent: Instant) {
        self.lease_ends = sent.min(self.lease_ends);
        self.renew_at = None;
    }

    /// Returns what is due, and moves the timers on.
    pub(crate) fn check(&mut self, now: Instant, lease: Duration, abort_after: Duration) -> JobActions {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let mut actions = JobActions { aborts: is_due(self.abort_at), ..JobActions::default() };
        if actions.aborts {
            self.abort_at = None;
            // During a shutdown, the worker abandons all remaining jobs together when it enters `Stage::Flushing`.
            self.abandon_at = (self.stop != Some(StopReason::ShutDown)).then_some(now + ABANDON_AFTER);
        }
        if is_due(self.abandon_at) {
            (self.abandon_at, self.renew_at, self.is_abandoned) = (None, None, true);
            actions.abandons = true;
        }
        if is_due(self.overrun_at) {
            actions.cancels |= self.stop(StopReason::Overrun, now, abort_after);
        }
        if self.renew_at.is_some() && self.lease_ends <= now {
            self.renew_at = None;
            actions.cancels |= self.stop(StopReason::LeaseLost, now, abort_after);
        }
        // Also renew a lease that is due soon, so that it shares a store call with other renewals.
        if self.renew_at.is_some_and(|at| at <= now + lease / 12) {
            // Retried if there is no reply by then.
            self.renew_at = Some(now + lease / 6);
            actions.renews = true;
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = secs(12);
    const ABORT_AFTER: Duration = secs(5);
    const NOTHING: JobActions = JobActions { aborts: false, abandons: false, cancels: false, renews: false };
    const CANCEL: JobActions = JobActions { cancels: true, ..NOTHING };
    const RENEW: JobActions = JobActions { renews: true, ..NOTHING };
    const ABORT: JobActions = JobActions { aborts: true, ..NOTHING };
    const ABANDON: JobActions = JobActions { abandons: true, ..NOTHING };

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// The timers of a job that was claimed and started now.
    fn timers(max_runtime: Option<Duration>) -> (JobTimers, Instant) {
        let now = Instant::now();
        (JobTimers::new(now, LEASE, now, max_runtime), now)
    }

    fn check(timers: &mut JobTimers, now: Instant) -> JobActions {
        timers.check(now, LEASE, ABORT_AFTER)
    }

    #[test]
    fn lease_is_renewed_after_a_third() {
        let (mut timers, start) = timers(None);
        assert_eq!(timers.next(), Some(start + secs(4)));
        assert_eq!(check(&mut timers, start + secs(2)), NOTHING);
        assert_eq!(check(&mut timers, start + secs(4)), RENEW);
        timers.renewed(start + secs(4), LEASE);
        assert_eq!((timers.lease_ends(), timers.next()), (start + secs(16), Some(start + secs(8))));
    }

    #[test]
    fn lease_that_is_due_soon_is_renewed_with_others() {
        let (mut timers, start) = timers(None);
        assert_eq!(check(&mut timers, start + secs(3)), RENEW);
    }

    #[test]
    fn renewal_without_a_reply_is_repeated() {
        let (mut timers, start) = timers(None);
        assert_eq!(check(&mut timers, start + secs(4)), RENEW);
        assert_eq!(timers.next(), Some(start + secs(6)));
        assert_eq!(check(&mut timers, start + secs(6)), RENEW);
    }

    #[test]
    fn job_whose_lease_has_ended_is_stopped() {
        let (mut timers, start) = timers(None);
        assert_eq!(check(&mut timers, start + LEASE), CANCEL);
        assert_eq!(timers.stop_reason(), Some(StopReason::LeaseLost));
        assert_eq!(timers.next(), Some(start + LEASE + ABORT_AFTER), "the lease is not renewed any more");
    }

    #[test]
    fn lost_lease_ends_when_the_call_was_sent() {
        let (mut timers, start) = timers(None);
        timers.lease_lost(start + secs(4));
        assert_eq!((timers.lease_ends(), timers.next()), (start + secs(4), None));
        timers.lease_lost(start + secs(5));
        assert_eq!(timers.lease_ends(), start + secs(4));
    }

    #[test]
    fn job_over_its_max_runtime_keeps_its_lease() {
        let (mut timers, start) = timers(Some(secs(4)));
        assert_eq!(check(&mut timers, start + secs(4)), JobActions { cancels: true, renews: true, ..NOTHING });
        assert_eq!(timers.stop_reason(), Some(StopReason::Overrun));
    }

    #[test]
    fn first_reason_to_stop_counts() {
        let (mut timers, start) = timers(None);
        assert!(timers.stop(StopReason::Cancelled, start, ABORT_AFTER));
        assert!(!timers.stop(StopReason::ShutDown, start + secs(1), ABORT_AFTER));
        assert_eq!(timers.stop_reason(), Some(StopReason::Cancelled));
        assert_eq!(check(&mut timers, start + LEASE), ABORT, "the service gets one abort");
    }

    #[test]
    fn stopped_job_is_dropped_and_then_abandoned() {
        let (mut timers, start) = timers(None);
        timers.stop(StopReason::Cancelled, start, secs(1));
        assert_eq!(check(&mut timers, start + secs(1)), ABORT);
        assert!(!timers.is_abandoned());
        assert_eq!(check(&mut timers, start + secs(1) + ABANDON_AFTER), ABANDON);
        assert!(timers.is_abandoned());
        assert_eq!(timers.next(), None, "the lease is not renewed any more");
    }

    #[test]
    fn job_is_told_before_it_is_dropped_at_once() {
        let (mut timers, start) = timers(Some(secs(1)));
        let mut check = |now| timers.check(now, LEASE, Duration::ZERO);
        assert_eq!(check(start + secs(1)), CANCEL);
        assert_eq!(check(start + secs(1)), ABORT);
    }

    #[test]
    fn shutdown_abandons_no_single_job() {
        let (mut timers, start) = timers(None);
        timers.stop(StopReason::ShutDown, start, secs(1));
        assert_eq!(check(&mut timers, start + secs(1)), ABORT);
        assert_eq!(timers.next(), Some(start + secs(4)), "only the lease is left to renew");
    }
}
