//! What a worker does next. [`plan`] decides without I/O, and the event loop carries the decision out.

#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio::time::Instant;

use super::partition::{Call, Partition};
use super::stage::Stage;
use crate::delay_queue::store::MAX_BATCH;

/// For each partition, the maximum number of calls in flight that record results and claim jobs. With two, the jobs of one call run while
/// the other call is in flight.
const MAX_CONCURRENT_CALLS: usize = 2;

/// What the decision depends on.
#[derive(Clone, Copy)]
pub(crate) struct State<'a> {
    pub(crate) stage: Stage,
    pub(crate) progress: Progress,
    pub(crate) partitions: &'a [Partition],
    // The partition to consider first for the next call.
    pub(crate) next_partition: usize,
    // The largest number of concurrent jobs.
    pub(crate) concurrency: usize,
    pub(crate) abort_after: Duration,
    // The number of running jobs, abandoned ones included.
    pub(crate) running: usize,
    // The number of ready instances of the service.
    pub(crate) ready: usize,
    // Of the calls in flight, renewals included: their number, how many jobs they may claim, and how many results they carry.
    pub(crate) calls: usize,
    pub(crate) reserved: usize,
    pub(crate) acks_in_flight: usize,
    // When the next running job needs attention.
    pub(crate) check_at: Option<Instant>,
    // When to log the number of jobs that were not logged one by one.
    pub(crate) summary_at: Option<Instant>,
}

/// What the worker has done since it last waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Start,
    /// The running jobs were checked. Jobs are not checked again before the wait, so a job that was just asked to stop can end
    /// during the wait.
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
    /// Log the number of jobs that were not logged one by one.
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
    Wait { until: Option<Instant>, services: IdleServices },
}

/// What to do with instances of the service during a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleServices {
    Keep,
    /// Drop the ready ones, since they may hold permits that others need.
    Release,
    /// Poll the pending one until this many are ready.
    Await(usize),
}

/// Decides what to do next.
pub(crate) fn plan(now: Instant, state: &State<'_>) -> Action {
    let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
    if state.progress == Progress::Start && is_due(state.check_at) {
        return Action::CheckJobs;
    }
    if is_due(state.summary_at) {
        return Action::LogSummary;
    }
    if let Some(stage) = state.stage.next(now, state.is_idle(), state.abort_after) {
        return Action::Enter(stage);
    }
    let Progress::Polled { wanted, is_pending } = state.progress else {
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
        0 if state.reserved == 0 => IdleServices::Release,
        _ if is_pending => IdleServices::Await(wanted.min(state.ready + 1)),
        _ => IdleServices::Keep,
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
    fn claimable(&self) -> usize {
        if self.stage.is_working() { self.capacity().min(self.ready.saturating_sub(self.reserved)) } else { 0 }
    }

    /// How many jobs one call claims while more jobs are due: one half of the concurrency. One half of the jobs runs while a call acks and
    /// replaces the other half.
    const fn jobs_per_call(&self) -> usize {
        self.concurrency.div_ceil(MAX_CONCURRENT_CALLS)
    }

    /// How many results are not recorded yet.
    fn unrecorded(&self) -> usize {
        self.acks_in_flight + self.partitions.iter().map(|partition| partition.pending_acks.len()).sum::<usize>()
    }

    /// The number of jobs that run or have a result that is not recorded.
    pub(crate) fn unfinished(&self) -> usize {
        self.running + self.unrecorded()
    }

    /// How many instances of the service should be ready, including one for each job that the calls in flight may claim.
    fn wanted(&self, now: Instant) -> usize {
        let failures = self
            .partitions
            .iter()
            .filter(|partition| partition.has_work(now))
            .map(|partition| partition.failures)
            .min();
        match failures.filter(|_| self.stage.is_working()) {
            None => 0,
            // At most what the concurrent calls can claim.
            Some(0) => (self.reserved + self.capacity()).min(self.partitions.len() * MAX_CONCURRENT_CALLS * MAX_BATCH),
            // If all partitions with work have failed, one call probes the store, so one instance is enough. Further instances may hold
            // permits, such as those of a concurrency limit, that other callers need.
            Some(_) => self.reserved + self.capacity().min(1),
        }
    }

    /// The next call to send. The partitions take turns.
    fn next_call(&self, now: Instant) -> Option<Call> {
        let count = self.partitions.len();
        (0..count).find_map(|i| self.call((self.next_partition + i) % count, now))
    }

    /// The call to send for a partition, if there is one to send now.
    fn call(&self, index: usize, now: Instant) -> Option<Call> {
        let (partition, claimable, is_working) = (&self.partitions[index], self.claimable(), self.stage.is_working());
        if partition.is_backing_off(now) || partition.calls >= MAX_CONCURRENT_CALLS {
            return None;
        }
        let must_refresh = is_working && partition.refresh_at(now, self.running > 0).is_some_and(|at| at <= now);
        // The store relies on the timekeeper to claim the next due job. If this worker is the timekeeper and cannot claim, a call that
        // claims nothing gives the role to another worker.
        let must_delegate = partition.is_timekeeper && claimable == 0 && (!is_working || partition.is_due(now));
        let must_call = must_refresh || must_delegate;
        if partition.pending_acks.is_empty() && !must_call && (claimable == 0 || !partition.is_due(now)) {
            return None;
        }
        // A second concurrent call is worth its cost only if it carries enough results.
        let is_worthwhile = partition.has_more_due && partition.pending_acks.len() * 2 >= self.jobs_per_call();
        if partition.calls > 0 && !must_delegate && !is_worthwhile {
            return None;
        }
        // A probe of a failing partition claims no job: an unanswered call would reserve instances that the other partitions need.
        let is_probe = partition.failures > 0 && self.partitions.len() > 1;
        let max = if partition.has_more_due && is_working { self.jobs_per_call().min(MAX_BATCH) } else { MAX_BATCH };
        let acks = partition.pending_acks.len().min(max);
        let max_jobs = if is_probe || partition.next_call_skips_claim {
            0
        } else {
            self.max_jobs(partition, claimable, acks, now).min(max)
        };
        (acks > 0 || max_jobs > 0 || must_call || is_probe).then_some(Call { partition: index, acks, max_jobs })
    }

    /// How many jobs a call that records `acks` results may claim.
    fn max_jobs(&self, partition: &Partition, claimable: usize, acks: usize, now: Instant) -> usize {
        // Results of this partition that this call does not carry reduce the jobs that it may claim, so that results cannot pile up.
        let claimable_in_partition = claimable.saturating_sub(partition.pending_acks.len() - acks);
        let due =
            self.partitions.iter().filter(|partition| partition.is_due(now) && partition.failures == 0).count().max(1);
        let max_jobs = claimable_in_partition.min(claimable.div_ceil(due));
        // With a single partition, the probe claims one job.
        if partition.failures > 0 { max_jobs.min(1) } else { max_jobs }
    }

    /// When to wake up if nothing else happens.
    fn wake_at(&self, now: Instant) -> Option<Instant> {
        let (is_working, is_busy) = (self.stage.is_working(), self.running > 0);
        let partitions = self.partitions.iter().filter_map(|partition| {
            if partition.is_backing_off(now) && (is_working || !partition.pending_acks.is_empty()) {
                Some(partition.backoff_until)
            } else {
                // A `claim_at` in the past needs no timer, since the partition waits for capacity. `refresh_at` still needs one.
                let times = [partition.claim_at, partition.refresh_at(now, is_busy)].into_iter().flatten();
                times.filter(|at| is_working && *at > now).min()
            }
        });
        partitions.chain(self.check_at).chain(self.stage.ends_at()).chain(self.summary_at).min()
    }
}
