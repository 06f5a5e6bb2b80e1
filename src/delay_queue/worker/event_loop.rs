//! The event loop of a worker: calls [`plan`] and carries out the returned action.

use std::future::{Future, poll_fn};
use std::mem;
use std::panic::resume_unwind;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tower_service::Service;

use super::attempt_results::AttemptResults;
use super::error::WorkerError;
use super::partition::{Call, Partition};
use super::plan::{Action, IdleServices, Progress, State, plan};
use super::ready::ReadyServices;
use super::reporter::Reporter;
use super::running_jobs::{Ended, RunningJobs};
use super::settings::Settings;
use super::stage::Stage;
use super::store_calls::{Reply, StoreCalls};
use crate::codec::Codec;
use crate::delay_queue::activity::Activity;
use crate::delay_queue::job::Job;
use crate::delay_queue::queue::DelayQueue;
use crate::delay_queue::store::{Claim, WorkerId};
use crate::error::{BoxError, StoreError};
use crate::panics::discard_joined;

/// The timeout of one call during a shutdown. It is short, so that a retry over another connection has time.
const SHUTDOWN_CALL_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) struct WorkerLoop<T, S, C> {
    pub(super) queue: DelayQueue<T, C>,
    pub(super) services: ReadyServices<S>,
    pub(super) settings: Settings<T>,
    worker: WorkerId,
    pub(super) stage: Stage,
    progress: Progress,
    pub(super) partitions: Vec<Partition>,
    // The partition to consider first for the next call. It moves on, so that the partitions take turns.
    next_partition: usize,
    pub(super) jobs: RunningJobs,
    pub(super) calls: StoreCalls<T, C>,
    pub(super) results: AttemptResults,
    pub(super) reporter: Reporter,
    // Why the service will never be ready again.
    failure: Option<BoxError>,
}

/// An event that ends a wait.
enum LoopEvent<T> {
    ShutDown,
    Ended(Ended),
    Replied(Result<Reply<T>, JoinError>),
    Ready(Result<(), BoxError>),
    Woken(usize),
    Time,
}

impl<T, S, C> WorkerLoop<T, S, C> {
    pub(crate) fn new(
        queue: DelayQueue<T, C>,
        services: ReadyServices<S>,
        settings: Settings<T>,
    ) -> Result<Self, StoreError> {
        let (now, worker) = (Instant::now(), WorkerId::random()?);
        Ok(Self {
            worker,
            stage: Stage::Working,
            progress: Progress::Start,
            partitions: queue.partitions().map(|key| Partition::new(key, now)).collect(),
            next_partition: 0,
            jobs: RunningJobs::new(settings.lease, settings.abort_after),
            calls: StoreCalls::new(queue.clone(), worker, &settings),
            results: AttemptResults::new(settings.backoff, now),
            reporter: Reporter::new(*queue.name(), queue.partitions(), settings.events.clone(), now),
            failure: None,
            queue,
            services,
            settings,
        })
    }

    /// What the next decision depends on.
    fn state(&self) -> State<'_> {
        State {
            stage: self.stage,
            progress: self.progress,
            partitions: &self.partitions,
            next_partition: self.next_partition,
            concurrency: self.settings.concurrency,
            abort_after: self.settings.abort_after,
            running: self.jobs.len(),
            ready: self.services.ready(),
            calls: self.calls.len(),
            reserved: self.calls.reserved(),
            acks_in_flight: self.calls.acks(),
            check_at: self.jobs.check_at(),
            summary_at: self.reporter.summary_at(),
        }
    }

    /// Starts the shutdown, unless it has started.
    fn shut_down(&mut self, now: Instant) {
        if self.stage.is_working() {
            self.stage = Stage::draining(now, self.settings.grace);
            self.services.drop_ready();
        }
    }

    /// Shuts down since the service will never be ready again.
    fn service_failed(&mut self, error: BoxError, now: Instant) {
        if self.failure.is_none() {
            self.failure = Some(error);
            self.shut_down(now);
        }
    }

    fn enter(&mut self, stage: Stage, now: Instant) {
        self.stage = stage;
        if self.progress == Progress::Start {
            self.progress = Progress::Checked;
        }
        match stage {
            Stage::Releasing(_) => {
                let reporter = &mut self.reporter;
                self.jobs.shut_down(now, |job| reporter.cut_off(job, now));
            }
            Stage::Flushing(_) if self.jobs.len() > 0 => self.reporter.abandoned_at_shutdown(self.jobs.len()),
            Stage::Working | Stage::Draining(_) | Stage::Flushing(_) => {}
        }
    }

    /// Handles the end of an attempt.
    fn on_ended(&mut self, ended: Ended, now: Instant) {
        let Some(job) = self.jobs.remove(&ended) else { return };
        self.reporter.ended(&job, now);
        if job.timers.is_abandoned() {
            discard_joined(ended);
            return;
        }
        let ack = self.results.ack_of_ended(&job, ended.map(|(_, result)| result), now);
        self.partitions[job.partition].add_ack(job.timers.lease_ends(), ack);
    }

    fn call_timeout(&self) -> Duration {
        let timeout = Claim::call_timeout(self.settings.lease);
        if self.stage.is_working() { timeout } else { timeout.min(SHUTDOWN_CALL_TIMEOUT) }
    }
}

impl<T, S, C> WorkerLoop<T, S, C>
where
    S: Service<Job<T>, Error: Into<BoxError>, Future: Send + 'static>,
    C: Codec<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    pub(crate) async fn run(
        mut self,
        shutdown: impl Future<Output = ()>,
        activity: &Activity,
    ) -> Result<(), WorkerError> {
        let mut shutdown = pin!(shutdown);
        let (_watchers, mut notifications) = self.watch();
        let mut now = Instant::now();
        loop {
            let state = self.state();
            activity.set_jobs(state.unfinished());
            match plan(now, &state) {
                Action::LogSummary => self.reporter.log_summary(now),
                Action::CheckJobs => self.check_jobs(now),
                Action::Enter(stage) => self.enter(stage, now),
                Action::PollServices { wanted } => self.poll_services(wanted, now).await,
                Action::Call(call) => self.send(call, now),
                Action::Stop { unrecorded } => {
                    if unrecorded > 0 {
                        self.reporter.not_recorded(unrecorded);
                    }
                    return self.failure.take().map_or(Ok(()), |error| Err(WorkerError::Service(error)));
                }
                Action::Wait { until, services } => {
                    let event = self.wait(until, services, shutdown.as_mut(), &mut notifications).await;
                    if let LoopEvent::Replied(Err(error)) = event {
                        // No code aborts the task of a call, so this error is a panic in the store.
                        return error.try_into_panic().map_or(Ok(()), |panic| resume_unwind(panic));
                    }
                    self.on_event(event).await;
                    now = self.start_round();
                }
            }
        }
    }

    /// Spawns a task for each partition. It receives a notification when a job is pushed that is due before the next job that this worker
    /// knows of, and sends the index of the partition.
    fn watch(&self) -> (JoinSet<()>, mpsc::Receiver<usize>) {
        let (sender, notifications) = mpsc::channel(self.partitions.len().max(1));
        let mut watchers = JoinSet::new();
        for (index, partition) in self.partitions.iter().enumerate() {
            let (queue, key, worker, sender) = (self.queue.clone(), partition.key, self.worker, sender.clone());
            watchers.spawn(async move {
                let mut notifications = queue.watch(key, worker).await;
                // The worker gets no notification of jobs that were pushed before the subscription. So send the index once without one, to
                // make the worker claim.
                while sender.send(index).await.is_ok() {
                    notifications.next().await;
                }
            });
        }
        (watchers, notifications)
    }

    /// Starts a round: handles the attempts that have ended meanwhile, and returns the time.
    fn start_round(&mut self) -> Instant {
        let now = Instant::now();
        self.progress = Progress::Start;
        while let Some(ended) = self.jobs.try_next_ended() {
            self.on_ended(ended, now);
        }
        now
    }

    /// Checks the running jobs: renews leases, and stops jobs whose lease is lost or that run for too long.
    fn check_jobs(&mut self, now: Instant) {
        self.progress = Progress::Checked;
        let checked = self.jobs.check(now);
        for job in checked.abandoned.iter().filter_map(|task| self.jobs.get(task)) {
            self.partitions[job.partition].add_ack(job.timers.lease_ends(), self.results.ack_of_dropped(job));
            self.reporter.abandoned(job);
        }
        let timeout = self.call_timeout();
        for (partition, leases) in checked.renewals {
            self.calls.extend(partition, self.partitions[partition].key, &leases, timeout);
        }
    }

    async fn poll_services(&mut self, wanted: usize, now: Instant) {
        let polled = poll_fn(|cx| Poll::Ready(self.services.fill(wanted, cx))).await;
        self.progress = Progress::Polled { wanted, is_pending: polled.is_pending() };
        if let Poll::Ready(Err(error)) = polled {
            self.service_failed(error, now);
        }
    }

    /// Sends a call that records results and claims jobs.
    fn send(&mut self, call: Call, now: Instant) {
        if call.max_jobs > 0 {
            self.next_partition = call.partition + 1;
        }
        let (timeout, partition) = (self.call_timeout(), &mut self.partitions[call.partition]);
        self.calls.claim(partition.key, partition.start_call(call, now), timeout);
    }

    async fn wait(
        &mut self,
        until: Option<Instant>,
        services: IdleServices,
        shutdown: Pin<&mut impl Future<Output = ()>>,
        notifications: &mut mpsc::Receiver<usize>,
    ) -> LoopEvent<T> {
        if services == IdleServices::Release {
            self.services.drop_ready();
        }
        let (is_working, ready) = (self.stage.is_working(), &mut self.services);
        let awaited = if let IdleServices::Await(wanted) = services { Some(wanted) } else { None };
        tokio::select! {
            () = shutdown, if is_working => LoopEvent::ShutDown,
            Some(ended) = self.jobs.next_ended() => LoopEvent::Ended(ended),
            Some(reply) = self.calls.next_reply() => LoopEvent::Replied(reply),
            polled = poll_fn(|cx| ready.fill(awaited.unwrap_or(0), cx)), if awaited.is_some() => LoopEvent::Ready(polled),
            Some(partition) = notifications.recv(), if is_working => LoopEvent::Woken(partition),
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => LoopEvent::Time,
        }
    }

    async fn on_event(&mut self, event: LoopEvent<T>) {
        let now = Instant::now();
        match event {
            LoopEvent::ShutDown => self.shut_down(now),
            LoopEvent::Ended(ended) => self.on_ended(ended, now),
            LoopEvent::Replied(reply) => {
                if let Ok(reply) = reply {
                    self.on_reply(reply, now);
                }
                // The reply may have started jobs. Those that never yield finish here, so that the next call records all their results.
                yield_once().await;
            }
            LoopEvent::Ready(Err(error)) => self.service_failed(error, now),
            LoopEvent::Woken(partition) => self.partitions[partition].claim_at = Some(now),
            LoopEvent::Ready(Ok(())) | LoopEvent::Time => {}
        }
    }
}

impl<T, S, C> Drop for WorkerLoop<T, S, C> {
    fn drop(&mut self) {
        let now = Instant::now();
        for job in self.jobs.iter() {
            self.reporter.dropped(job, now);
        }
        // This worker no longer knows the age of the oldest due job, so it sets the gauge to zero. Another worker of this process sets the
        // gauge at its next call.
        self.reporter.oldest_due(None);
    }
}

/// Yields to other tasks once. `tokio::task::yield_now` would wake this task only when its thread is idle, but a job may block that
/// thread. A task that wakes itself can resume on another thread.
async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
