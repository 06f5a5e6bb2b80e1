//! What a worker does next. [`plan`] decides without I/O, and the event loop carries the decision out.

#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio::time::Instant;

use super::part::{Call, Part};
use super::stage::Stage;
use crate::delay_queue::store::MAX_BATCH;

/// How many calls that finish and claim run concurrently for each part of a queue: jobs of one call run while the other one is in flight.
const MAX_CONCURRENT_CALLS: usize = 2;

/// What the decision depends on.
#[derive(Clone, Copy)]
pub(crate) struct State<'a> {
    pub(crate) stage: Stage,
    pub(crate) turn: Turn,
    pub(crate) parts: &'a [Part],
    // The part whose call is sent first.
    pub(crate) first_part: usize,
    // The largest number of concurrent jobs.
    pub(crate) concurrency: usize,
    pub(crate) abort_after: Duration,
    // The number of running jobs, abandoned ones included.
    pub(crate) running: usize,
    // The number of ready instances of the service.
    pub(crate) ready: usize,
    // The calls in flight, renewals included, how many jobs they may claim, and how many results they carry.
    pub(crate) calls: usize,
    pub(crate) reserved: usize,
    pub(crate) acks_in_flight: usize,
    // When the next running job needs attention.
    pub(crate) check_at: Option<Instant>,
    // When to log how many jobs were too many to log one by one.
    pub(crate) summary_at: Option<Instant>,
}

/// How far the worker has come since it last waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Begun,
    /// The running jobs need no check before the next wait. A service that was just told to give up gets the time to do so.
    Checked,
    /// The service was polled until this many instances were ready, or one was pending.
    Polled {
        wanted: usize,
        is_pending: bool,
    },
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Log how many jobs were too many to log one by one.
    LogSummary,
    /// Renew leases that are due, and stop jobs that have lost theirs or run for too long.
    CheckJobs,
    /// Enter this stage of the shutdown.
    Enter(Stage),
    /// Poll the service until this many instances are ready, or one is pending.
    PollServices { wanted: usize },
    /// Send a call that records results and claims jobs.
    Call(Call),
    /// End the worker. This many results could not be recorded.
    Stop { unrecorded: usize },
    /// Wait for an event, until this instant at most.
    Wait { until: Option<Instant>, services: Services },
}

/// What to do with instances of the service during a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Services {
    Keep,
    /// Drop the ready ones, since they may hold permits that others need.
    Release,
    /// Poll the pending one until this many are ready.
    Await(usize),
}

/// Decides what to do next.
pub(crate) fn plan(now: Instant, state: &State<'_>) -> Action {
    let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
    if state.turn == Turn::Begun && is_due(state.check_at) {
        return Action::CheckJobs;
    }
    if is_due(state.summary_at) {
        return Action::LogSummary;
    }
    if let Some(stage) = state.stage.next(now, state.is_idle(), state.abort_after) {
        return Action::Enter(stage);
    }
    let Turn::Polled { wanted, is_pending } = state.turn else {
        return Action::PollServices { wanted: state.wanted(now) };
    };
    if let Some(call) = state.next_call(now) {
        return Action::Call(call);
    }
    let unrecorded = state.unrecorded();
    if let Stage::Flushing(until) = state.stage
        && (now >= until || (unrecorded == 0 && state.calls == 0))
    {
        return Action::Stop { unrecorded };
    }
    let services = match wanted {
        0 if state.reserved == 0 => Services::Release,
        _ if is_pending => Services::Await(wanted.min(state.ready + 1)),
        _ => Services::Keep,
    };
    Action::Wait { until: state.wake_at(now), services }
}

impl State<'_> {
    /// Whether no job runs, and no call in flight can claim one.
    const fn is_idle(&self) -> bool {
        self.running == 0 && self.reserved == 0
    }

    /// How many more jobs may be claimed within the concurrency.
    const fn capacity(&self) -> usize {
        self.concurrency.saturating_sub(self.running + self.reserved)
    }

    /// How many more jobs may be claimed, given that each needs an instance of the service that is ready.
    fn free(&self) -> usize {
        if self.stage.is_working() { self.capacity().min(self.ready.saturating_sub(self.reserved)) } else { 0 }
    }

    /// How many jobs one call claims if more are due: one half of them runs while calls finish and claim the other half.
    const fn jobs_per_call(&self) -> usize {
        self.concurrency.div_ceil(MAX_CONCURRENT_CALLS)
    }

    /// How many results are not recorded yet.
    fn unrecorded(&self) -> usize {
        self.acks_in_flight + self.parts.iter().map(|part| part.pending_acks.len()).sum::<usize>()
    }

    /// How many jobs run or have a result that is not recorded.
    pub(crate) fn left(&self) -> usize {
        self.running + self.unrecorded()
    }

    /// How many instances of the service should be ready, counting jobs of the calls in flight.
    fn wanted(&self, now: Instant) -> usize {
        let failures = self.parts.iter().filter(|part| part.has_work(now)).map(|part| part.failures).min();
        match failures.filter(|_| self.stage.is_working()) {
            None => 0,
            // At most what the concurrent calls can claim.
            Some(0) => (self.reserved + self.capacity()).min(self.parts.len() * MAX_CONCURRENT_CALLS * MAX_BATCH),
            // One call tests whether the store works again. Others may need the permits of further instances meanwhile.
            Some(_) => self.reserved + self.capacity().min(1),
        }
    }

    /// The next call to send. The parts take turns.
    fn next_call(&self, now: Instant) -> Option<Call> {
        let count = self.parts.len();
        (0..count).find_map(|i| self.call((self.first_part + i) % count, now))
    }

    /// The call to send for a part, if there is one to send now.
    fn call(&self, index: usize, now: Instant) -> Option<Call> {
        let (part, free, is_working) = (&self.parts[index], self.free(), self.stage.is_working());
        if part.is_backing_off(now) || part.calls >= MAX_CONCURRENT_CALLS {
            return None;
        }
        let must_refresh = is_working && part.refresh_at(now, self.running > 0).is_some_and(|at| at <= now);
        // A due job must not wait for a worker that has no capacity or shuts down: the store then relies on other workers.
        let must_hand_over = part.is_timekeeper && free == 0 && (!is_working || part.is_due(now));
        let must_call = must_refresh || must_hand_over;
        if part.pending_acks.is_empty() && !must_call && (free == 0 || !part.is_due(now)) {
            return None;
        }
        // A second concurrent call has to be worth it.
        let is_worth_it = part.more && part.pending_acks.len() * 2 >= self.jobs_per_call();
        if part.calls > 0 && !must_hand_over && !is_worth_it {
            return None;
        }
        // A probe of a failing part claims no job: an unanswered call would reserve instances that the other parts need.
        let is_probe = part.failures > 0 && self.parts.len() > 1;
        let most = if part.more && is_working { self.jobs_per_call().min(MAX_BATCH) } else { MAX_BATCH };
        let acks = part.pending_acks.len().min(most);
        let limit = if is_probe || part.skips_claim { 0 } else { self.limit(part, free, acks, now).min(most) };
        (acks > 0 || limit > 0 || must_call || is_probe).then_some(Call { part: index, acks, limit })
    }

    /// How many jobs a call that records `acks` results may claim.
    fn limit(&self, part: &Part, free: usize, acks: usize, now: Instant) -> usize {
        // Unrecorded results count as running jobs, so that they cannot pile up. They count for their own part only, since other parts may work.
        let free_of_part = free.saturating_sub(part.pending_acks.len() - acks);
        let due = self.parts.iter().filter(|part| part.is_due(now) && part.failures == 0).count().max(1);
        let limit = free_of_part.min(free.div_ceil(due));
        // After a failure, one job tests whether the store works again.
        if part.failures > 0 { limit.min(1) } else { limit }
    }

    /// When to wake up if nothing else happens.
    fn wake_at(&self, now: Instant) -> Option<Instant> {
        let (is_working, is_busy) = (self.stage.is_working(), self.running > 0);
        let parts = self.parts.iter().filter_map(|part| {
            if part.is_backing_off(now) && (is_working || !part.pending_acks.is_empty()) {
                Some(part.backoff_until)
            } else {
                // A due part waits for capacity, not for time, except to refresh the age of the oldest due job.
                let times = [part.claim_at, part.refresh_at(now, is_busy)].into_iter().flatten();
                times.filter(|at| is_working && *at > now).min()
            }
        });
        parts.chain(self.check_at).chain(self.stage.ends_at()).chain(self.summary_at).min()
    }
}
