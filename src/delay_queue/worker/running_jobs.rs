//! The running jobs of a worker, each in its own task.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::mem;
use std::time::Duration;

use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::Instant;

use super::job_timers::StopReason;
use super::running_job::RunningJob;
use crate::delay_queue::id::JobId;
use crate::delay_queue::store::{Extended, JobLease};
use crate::error::BoxError;
use crate::panics::{discard, discard_joined};

/// The end of an attempt.
pub(crate) type Ended = Result<(Id, Result<(), BoxError>), JoinError>;

/// The jobs that run, each in a task of its own. If this is dropped, the tasks are aborted.
pub(crate) struct RunningJobs {
    tasks: JoinSet<Result<(), BoxError>>,
    jobs: HashMap<Id, RunningJob>,
    // How many of these are abandoned.
    abandoned: usize,
    // When the next job needs attention.
    check_at: Option<Instant>,
    lease: Duration,
    abort_after: Duration,
}

/// What a check of the running jobs finds.
#[derive(Default)]
pub(crate) struct Checked {
    /// The leases to renew, by the partition of the queue.
    pub(crate) renewals: BTreeMap<usize, Vec<(Id, JobLease)>>,
    /// The jobs that are abandoned from now on.
    pub(crate) abandoned: Vec<Id>,
}

impl RunningJobs {
    pub(crate) fn new(lease: Duration, abort_after: Duration) -> Self {
        Self { tasks: JoinSet::new(), jobs: HashMap::new(), abandoned: 0, check_at: None, lease, abort_after }
    }

    /// The number of jobs that run, abandoned ones included.
    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &RunningJob> {
        self.jobs.values()
    }

    pub(crate) fn get(&self, task: &Id) -> Option<&RunningJob> {
        self.jobs.get(task)
    }

    /// When the next job needs attention.
    pub(crate) const fn check_at(&self) -> Option<Instant> {
        self.check_at
    }

    /// Whether an abandoned attempt of this job still runs.
    pub(crate) fn has_abandoned(&self, id: &JobId) -> bool {
        self.abandoned > 0 && self.jobs.values().any(|job| job.timers.is_abandoned() && job.lease.id == *id)
    }

    pub(crate) fn spawn(&mut self, task: impl Future<Output = Result<(), BoxError>> + Send + 'static) -> AbortHandle {
        self.tasks.spawn(task)
    }

    /// Adds a job whose task is spawned.
    pub(crate) fn insert(&mut self, job: RunningJob) {
        self.check_at = self.check_at.into_iter().chain(job.timers.next()).min();
        self.jobs.insert(job.abort.id(), job);
    }

    /// An attempt that has ended.
    pub(crate) fn try_next_ended(&mut self) -> Option<Ended> {
        self.tasks.try_join_next_with_id()
    }

    /// Waits for the end of an attempt; `None` if no job runs.
    pub(crate) async fn next_ended(&mut self) -> Option<Ended> {
        self.tasks.join_next_with_id().await
    }

    /// Removes the job of an ended attempt.
    pub(crate) fn remove(&mut self, ended: &Ended) -> Option<RunningJob> {
        let task = ended.as_ref().map_or_else(JoinError::id, |(task, _)| *task);
        let job = self.jobs.remove(&task)?;
        self.abandoned -= usize::from(job.timers.is_abandoned());
        Some(job)
    }

    /// Tells the services of all jobs to give up, since the worker shuts down. `on_stop` gets the jobs that were not stopped before.
    pub(crate) fn shut_down(&mut self, now: Instant, mut on_stop: impl FnMut(&RunningJob)) {
        for job in self.jobs.values_mut() {
            if job.timers.stop_reason().is_none() {
                on_stop(job);
            }
            job.stop(StopReason::ShutDown, now, self.abort_after);
        }
        self.check_at = Some(now);
    }

    /// Checks the jobs: finds leases to renew, and stops jobs whose lease is lost or that run for too long.
    pub(crate) fn check(&mut self, now: Instant) -> Checked {
        let mut checked = Checked::default();
        self.check_at = None;
        for (task, job) in &mut self.jobs {
            let actions = job.timers.check(now, self.lease, self.abort_after);
            if actions.aborts {
                job.abort.abort();
            }
            if actions.abandons {
                self.abandoned += 1;
                checked.abandoned.push(*task);
            }
            if actions.cancels {
                job.canceller.cancel();
            }
            if actions.renews {
                checked.renewals.entry(job.partition).or_default().push((*task, job.lease));
            }
            self.check_at = self.check_at.into_iter().chain(job.timers.next()).min();
        }
        checked
    }

    /// Handles the store's answer for one lease, after a call that was sent at `sent`.
    pub(crate) fn extended(&mut self, task: &Id, extended: Extended, sent: Instant, now: Instant) {
        let Some(job) = self.jobs.get_mut(task) else { return };
        match extended {
            Extended::Held => job.timers.renewed(sent, self.lease),
            Extended::Cancelled => {
                job.timers.renewed(sent, self.lease);
                job.stop(StopReason::Cancelled, now, self.abort_after);
            }
            Extended::Lost => {
                job.timers.lease_lost(sent);
                job.stop(StopReason::LeaseLost, now, self.abort_after);
            }
        }
        self.check_at = self.check_at.into_iter().chain(job.timers.next()).min();
    }
}

impl Drop for RunningJobs {
    fn drop(&mut self) {
        // The `drop` of an unread result may panic. Drop the results one by one, since a second panic during unwinding would abort the
        // process.
        while let Some(ended) = self.try_next_ended() {
            discard_joined(ended);
        }
        // A job may have ended on another thread since the loop, and the `drop` of its result may panic, too.
        discard(mem::take(&mut self.tasks));
    }
}
