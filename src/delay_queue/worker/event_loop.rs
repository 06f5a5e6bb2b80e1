//! The event loop of a worker: claims jobs, runs them, renews their leases, and records their results.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tower_service::Service;
use tracing::Instrument;

use super::events::Event;
use super::ready::ReadyServices;
use super::running_job::{PendingAck, RetryStagger, RunningJob, StopReason};
use super::{OnUndecodable, Settings, WorkerError};
use crate::delay_queue::backoff::share;
use crate::delay_queue::codec::Codec;
use crate::delay_queue::job::{Canceller, Job};
use crate::delay_queue::metrics::{OutcomeLabel, WorkerMetrics};
use crate::delay_queue::notices::Notices;
use crate::delay_queue::outcome::FailureAction;
use crate::delay_queue::queue::DelayQueue;
use crate::delay_queue::record::Reason;
use crate::delay_queue::store::{
    AckKind, Claim, Claimed, ClaimedJob, Died, Expired, Extended, Finished, JobLease, MAX_BATCH, QueueKey, WorkerId,
};
use crate::error::{BoxError, StoreError};
use crate::panics::{discard, discard_joined};
use crate::store::circuit::OutageTracker;

/// How many calls that finish and claim run concurrently for each part of a queue: jobs of one call run while the other one is in flight.
const MAX_CONCURRENT_CALLS: usize = 2;
/// The pause after a failed call. It doubles with each further failure up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long the worker tries to record the last results during a shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// The deadline of one call during a shutdown, which leaves time for further calls over other connections.
const SHUTDOWN_CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a dropped service may take to yield before its job is abandoned.
const ABANDON_AFTER: Duration = Duration::from_secs(1);
/// The snooze of a job that this worker has abandoned and claimed again. Within [`Claim::MAX_WAIT`] other workers learn of due jobs.
const ABANDONED_SNOOZE: Duration = Duration::from_secs(3);

pub(crate) struct WorkerLoop<T, S, C> {
    queue: DelayQueue<T, C>,
    services: ReadyServices<S>,
    settings: Settings<T>,
    worker: WorkerId,
    metrics: WorkerMetrics,
    notices: Notices,
    parts: Vec<Part>,
    // The part whose call is sent first.
    first_part: usize,
    // The attempts that run. Dropping the worker aborts them.
    tasks: JoinSet<Result<(), BoxError>>,
    running: HashMap<Id, RunningJob>,
    // How many of these are abandoned.
    abandoned: usize,
    calls: JoinSet<Reply<T>>,
    // How many jobs the calls in flight may claim.
    reserved: usize,
    // How many results the calls in flight carry.
    acks_in_flight: usize,
    // When the next running job needs attention.
    check_at: Option<Instant>,
    // For jobs that are over a rate limit.
    rate_limit_stagger: RetryStagger,
    // For jobs that wait for a lock or an operation.
    contention_stagger: RetryStagger,
    stage: Stage,
}

/// One part of a queue.
struct Part {
    key: QueueKey,
    pending_acks: VecDeque<PendingAck>,
    // When there may be a job to claim; `None` if a wake-up will tell.
    claim_at: Option<Instant>,
    // Whether more jobs were due at the last claim, and for how long the oldest was.
    more: bool,
    oldest_due: Option<Duration>,
    // When the last call was sent.
    called_at: Instant,
    // Whether the store relies on this worker to claim when the next job is due, while other workers sleep.
    is_timekeeper: bool,
    // Whether the next call claims no job, so that the store relies on another worker.
    skips_claim: bool,
    calls: usize,
    failures: u32,
    backoff_until: Instant,
    // Whether the failure of the store was reported and logged.
    is_failing: bool,
    outage: OutageTracker,
}

impl Part {
    fn is_due(&self, now: Instant) -> bool {
        self.claim_at.is_some_and(|at| at <= now)
    }

    /// When to refresh the age of the oldest due job, if a due job cannot be claimed: the worker has no capacity, or the queue is paused. Also
    /// while jobs run: a job that blocks its thread delays the tasks that it has just woken, the watcher of this queue among them.
    fn refresh_at(&self, now: Instant, is_busy: bool) -> Option<Instant> {
        (is_busy || self.is_due(now) || self.oldest_due.is_some()).then(|| self.called_at + Claim::MAX_WAIT)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Working,
    /// Waits for running jobs until this instant.
    Draining(Instant),
    /// Running services were told to give up and are dropped. Ends at this instant, since a future that never yields cannot be dropped.
    Releasing(Instant),
    /// No job runs any more. The remaining results are recorded until this instant.
    Flushing(Instant),
}

/// The reply to a call.
enum Reply<T> {
    Claimed {
        part: usize,
        limit: usize,
        sent: Instant,
        acks: Vec<PendingAck>,
        // The value before the call was sent.
        was_timekeeper: bool,
        // Boxed to keep answers small.
        result: Result<Box<Claims<T>>, StoreError>,
    },
    Extended {
        part: usize,
        ids: Vec<Id>,
        sent: Instant,
        result: Result<Vec<Extended>, StoreError>,
    },
}

struct Claims<T> {
    finished: Vec<Finished>,
    jobs: Vec<DecodedJob<T>>,
    // Jobs whose payload cannot be decoded.
    undecodable: Vec<PendingAck>,
    more: bool,
    next: Option<Duration>,
    oldest_due: Option<Duration>,
    expired: Expired,
    died: Vec<Died>,
    received: Instant,
    now: SystemTime,
}

struct DecodedJob<T> {
    ticket: JobLease,
    job: Job<T>,
    canceller: Canceller,
}

/// What wakes the loop.
enum LoopEvent<T> {
    ShutDown,
    Ended(Result<(Id, Result<(), BoxError>), JoinError>),
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
        let now = Instant::now();
        let part = |key| Part {
            key,
            pending_acks: VecDeque::new(),
            claim_at: Some(now),
            more: false,
            oldest_due: None,
            called_at: now,
            is_timekeeper: false,
            skips_claim: false,
            calls: 0,
            failures: 0,
            backoff_until: now,
            is_failing: false,
            outage: OutageTracker::of_a_store(),
        };
        Ok(Self {
            worker: WorkerId::random()?,
            metrics: WorkerMetrics::new(queue.name().as_str()),
            notices: Notices::new(*queue.name(), now),
            parts: queue.parts().map(part).collect(),
            first_part: 0,
            tasks: JoinSet::new(),
            running: HashMap::new(),
            abandoned: 0,
            calls: JoinSet::new(),
            reserved: 0,
            acks_in_flight: 0,
            check_at: None,
            rate_limit_stagger: RetryStagger::new(now),
            contention_stagger: RetryStagger::new(now),
            stage: Stage::Working,
            queue,
            services,
            settings,
        })
    }

    /// How many more jobs may be claimed within the concurrency.
    fn capacity(&self) -> usize {
        self.settings.concurrency.saturating_sub(self.running.len() + self.reserved)
    }

    /// How many instances of the service should be ready, counting jobs of the calls in flight.
    fn wanted(&self, now: Instant) -> usize {
        let is_due = |part: &&Part| {
            let has_more = part.more && part.failures == 0;
            part.backoff_until <= now && (part.is_due(now) || has_more || !part.pending_acks.is_empty())
        };
        let failures = self.parts.iter().filter(is_due).map(|part| part.failures).min();
        match failures.filter(|_| self.stage == Stage::Working) {
            None => 0,
            // At most what the concurrent calls can claim.
            Some(0) => (self.reserved + self.capacity()).min(self.parts.len() * MAX_CONCURRENT_CALLS * MAX_BATCH),
            // One call tests whether the store works again. Others may need the permits of further instances meanwhile.
            Some(_) => self.reserved + self.capacity().min(1),
        }
    }

    /// When to wake up if nothing else happens.
    fn next_time(&self, now: Instant) -> Option<Instant> {
        let (is_working, is_busy) = (self.stage == Stage::Working, !self.running.is_empty());
        let parts = self.parts.iter().filter_map(|part| {
            if part.backoff_until > now && (is_working || !part.pending_acks.is_empty()) {
                Some(part.backoff_until)
            } else {
                // A due part waits for capacity, not for time, except to refresh the age of the oldest due job.
                let times = [part.claim_at, part.refresh_at(now, is_busy)].into_iter().flatten();
                times.filter(|at| is_working && *at > now).min()
            }
        });
        let stage = match self.stage {
            Stage::Draining(until) | Stage::Releasing(until) | Stage::Flushing(until) => Some(until),
            Stage::Working => None,
        };
        parts.chain(self.check_at).chain(stage).chain(self.notices.summary_at()).min()
    }

    fn is_over(&self, now: Instant) -> bool {
        let Stage::Flushing(until) = self.stage else { return false };
        let unrecorded = self.acks_in_flight + self.parts.iter().map(|part| part.pending_acks.len()).sum::<usize>();
        if now >= until && unrecorded > 0 {
            tracing::warn!(queue = %self.queue.name(), jobs = unrecorded, "job results could not be recorded: the jobs may run again");
        }
        now >= until || (unrecorded == 0 && self.calls.is_empty())
    }

    /// Moves to the next stage of the shutdown when it is time.
    fn advance(&mut self, now: Instant) {
        if let Stage::Draining(until) = self.stage
            && now >= until
        {
            let until = now.checked_add(self.settings.abort_after).unwrap_or_else(|| now + Claim::MAX_LEASE);
            self.stage = Stage::Releasing(until + ABANDON_AFTER);
            for running in self.running.values_mut() {
                if running.stop.is_none() {
                    self.notices.cut_off(&running.ticket.id, running.attempt, now);
                }
                running.stop(StopReason::ShutDown, now, self.settings.abort_after);
            }
            self.check_at = Some(now);
        }
        let is_late = matches!(self.stage, Stage::Releasing(until) if now >= until);
        let is_idle = self.running.is_empty() && self.reserved == 0;
        if is_late && !self.running.is_empty() {
            let jobs = self.running.len();
            tracing::warn!(queue = %self.queue.name(), jobs, "jobs that do not yield are abandoned");
        }
        if is_late || (is_idle && matches!(self.stage, Stage::Draining(_) | Stage::Releasing(_))) {
            self.stage = Stage::Flushing(now + FLUSH_TIMEOUT);
        }
    }

    fn shut_down(&mut self, now: Instant) {
        if self.stage == Stage::Working {
            let until = now.checked_add(self.settings.grace).unwrap_or_else(|| now + Claim::MAX_LEASE);
            self.stage = Stage::Draining(until);
            self.services.release();
        }
    }

    fn add_pending_ack(&mut self, part: usize, lease_ends: Instant, ack: PendingAck) {
        self.parts[part].pending_acks.push_back(PendingAck { lease_ends: Some(lease_ends), ..ack });
    }

    /// Handles the end of an attempt.
    fn on_ended(&mut self, ended: Result<(Id, Result<(), BoxError>), JoinError>, now: Instant) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let Some(running) = self.running.remove(&id) else { return };
        self.metrics.ended(now.saturating_duration_since(running.started));
        let (ticket, attempt) = (running.ticket, running.attempt);
        if running.is_abandoned {
            self.abandoned -= 1;
            discard_joined(ended);
            tracing::info!(queue = %self.queue.name(), job = %ticket.id, "an abandoned job has ended");
            return;
        }
        let delay = || self.settings.backoff.delay(attempt);
        let ack = match (ended.map(|(_, result)| result), running.stop) {
            (result, Some(StopReason::Cancelled)) => {
                discard_joined(result);
                PendingAck::cancelled(ticket)
            }
            (Ok(Ok(())), _) => PendingAck::new(ticket, AckKind::Done),
            (Ok(Err(error)), stop) => {
                let backoff = &self.settings.backoff;
                let action = catch_unwind(AssertUnwindSafe(move || match stop {
                    // The shutdown made the service give up, unless its error determines the outcome.
                    Some(StopReason::ShutDown) => {
                        FailureAction::from_error(&error).unwrap_or(FailureAction::Ack(AckKind::Release))
                    }
                    _ => FailureAction::of(&error, attempt, backoff),
                }));
                match action {
                    Ok(action) => self.ack_for(ticket, action, now),
                    // The text of the error panicked, which counts as a panic of the service.
                    Err(panic) => PendingAck::retry(ticket, delay(), panicked(panic)),
                }
            }
            (Err(error), stop) => match error.try_into_panic() {
                Ok(panic) => PendingAck::retry(ticket, delay(), panicked(panic)),
                Err(_) => PendingAck::dropped(ticket, stop, delay()),
            },
        };
        self.add_pending_ack(running.part, running.lease_ends, PendingAck { is_last: running.is_last, attempt, ..ack });
    }

    fn ack_for(&mut self, ticket: JobLease, action: FailureAction, now: Instant) -> PendingAck {
        match action {
            FailureAction::Ack(ending) => PendingAck::new(ticket, ending),
            FailureAction::Limited(wait) => PendingAck::new(
                ticket,
                AckKind::Snooze { delay: self.rate_limit_stagger.rate_limited_delay(wait, now) },
            ),
            FailureAction::Busy(wait) => {
                PendingAck::new(ticket, AckKind::Snooze { delay: self.contention_stagger.contended_delay(wait, now) })
            }
            FailureAction::Cancelled => PendingAck::new(ticket, AckKind::Cancelled),
        }
    }

    /// Handles a recorded result.
    fn on_acked(&mut self, pending: PendingAck, finished: Finished, now: Instant) {
        let PendingAck { ack, outcome, is_last, attempt, first_sent_at, .. } = pending;
        let id = ack.ticket.id;
        let outcome = match (finished, first_sent_at, &ack.ending) {
            (Finished::Dead, ..) => OutcomeLabel::Dead,
            (Finished::Cancelled, ..) => OutcomeLabel::Cancelled,
            (Finished::Done, ..) => outcome,
            // An earlier call has recorded it, as far as the worker can tell.
            (Finished::Gone, Some(at), ending) if self.is_kept(ending, is_last, now.saturating_duration_since(at)) => {
                OutcomeLabel::Cancelled
            }
            // The attempts are used up, whether dead jobs are kept or not.
            (Finished::Gone | Finished::Lost, Some(_), AckKind::Retry { .. }) if is_last => OutcomeLabel::Dead,
            (Finished::Gone, Some(_), _) => outcome,
            // After an earlier call recorded such a result, the job waits or another worker holds it. A finished job would be gone.
            (Finished::Lost, Some(_), ending) if !ending.forgets() => outcome,
            (Finished::Gone | Finished::Lost, ..) => OutcomeLabel::LeaseLost,
        };
        self.metrics.finished(outcome);
        if outcome == OutcomeLabel::LeaseLost {
            tracing::warn!(queue = %self.queue.name(), job = %id, "a job ended after its lease was lost");
        }
        if outcome == OutcomeLabel::Dead {
            let (reason, error) = match &ack.ending {
                AckKind::Dead { reason, error } => (*reason, &**error),
                AckKind::Retry { error, .. } => (Reason::Failed, &**error),
                AckKind::Done | AckKind::Cancelled | AckKind::Snooze { .. } | AckKind::Release => {
                    (Reason::Undecodable, "")
                }
            };
            self.notices.died(&id, attempt, reason, error, now);
        }
        self.settings.events.send(|| match (outcome, ack.ending) {
            (OutcomeLabel::LeaseLost, _) => Event::LeaseLost { id },
            (OutcomeLabel::Cancelled, _) | (_, AckKind::Cancelled) => Event::Cancelled { id },
            (_, AckKind::Dead { reason, error }) => Event::Dead { id, reason, error },
            (OutcomeLabel::Dead, AckKind::Retry { error, .. }) => Event::Dead { id, reason: Reason::Failed, error },
            (_, AckKind::Retry { delay, error }) => Event::Retried { id, delay, error },
            (_, AckKind::Snooze { delay }) => Event::Snoozed { id, delay },
            (_, AckKind::Release) => Event::Released { id },
            (_, AckKind::Done) => Event::Done { id },
        });
    }

    /// Whether a job with this result is certainly still stored after `since`, unless it was cancelled. No worker can have finished it, since
    /// its delay is not over. A dead job must not be too old to be kept.
    fn is_kept(&self, ending: &AckKind, is_last: bool, since: Duration) -> bool {
        let dead = self.queue.dead_limits();
        match ending {
            AckKind::Dead { .. } => dead.count > 0 && since < dead.age,
            AckKind::Retry { .. } if is_last => dead.count > 0 && since < dead.age,
            AckKind::Retry { delay, .. } | AckKind::Snooze { delay } => since < *delay,
            AckKind::Release | AckKind::Done | AckKind::Cancelled => false,
        }
    }

    /// Reports expired leases, since their workers will not.
    fn on_expired(&mut self, expired: Expired, died: &[Died], now: Instant) {
        let Expired { jobs, dead } = expired;
        if jobs > 0 {
            self.metrics.expired(expired);
            tracing::warn!(queue = %self.queue.name(), jobs, dead, "leases expired unfinished: their workers died, stalled or lost the network");
            self.settings.events.send(|| Event::LeasesExpired { jobs, dead });
        }
        for Died { id, attempts } in died {
            self.notices.died(id, *attempts, Reason::LeaseExpired, "the lease of its last attempt expired", now);
        }
    }

    fn store_failed(&mut self, part: usize, error: &StoreError) {
        self.metrics.store_failed();
        let is_first = self.parts.iter().all(|part| !part.is_failing);
        let part = &mut self.parts[part];
        part.is_failing = true;
        if part.outage.begins() {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            tracing::warn!(queue = %part.key, %error, cause, "the store fails: the worker retries until it works");
        }
        if is_first {
            self.settings.events.send(|| Event::StoreFailed { error: error.clone() });
        }
    }

    fn store_works(&mut self, part: usize) {
        let part = &mut self.parts[part];
        if part.outage.ends() {
            tracing::info!(queue = %part.key, "the store works again");
        }
        if mem::take(&mut part.is_failing) && self.parts.iter().all(|part| !part.is_failing) {
            self.settings.events.send(|| Event::StoreWorks);
        }
    }

    fn call_timeout(&self) -> Duration {
        let timeout = Claim::patience(self.settings.lease);
        if self.stage == Stage::Working { timeout } else { timeout.min(SHUTDOWN_CALL_TIMEOUT) }
    }

    /// Handles the reply to a lease renewal.
    fn on_extended(
        &mut self,
        part: usize,
        ids: &[Id],
        sent: Instant,
        result: Result<Vec<Extended>, StoreError>,
        now: Instant,
    ) {
        let extensions = match result {
            Ok(extensions) => {
                // While claims fail, a successful renewal does not mean that the store works.
                if self.parts[part].failures == 0 {
                    self.store_works(part);
                }
                extensions
            }
            Err(error) => {
                // The next renewal retries it.
                self.store_failed(part, &error);
                return;
            }
        };
        let Settings { lease, abort_after, .. } = self.settings;
        for (id, extended) in ids.iter().zip(extensions) {
            let Some(running) = self.running.get_mut(id) else { continue };
            match extended {
                Extended::Held | Extended::Cancelled => {
                    running.lease_ends = sent + lease;
                    running.extend_at = running.extend_at.map(|_| sent + lease / 3);
                    if extended == Extended::Cancelled {
                        running.stop(StopReason::Cancelled, now, abort_after);
                    }
                }
                Extended::Lost => {
                    // The store's answer counts, whatever the local clock says.
                    running.lease_ends = sent.min(running.lease_ends);
                    running.extend_at = None;
                    running.stop(StopReason::LeaseLost, now, abort_after);
                }
            }
            self.check_at = self.check_at.into_iter().chain(running.next_check()).min();
        }
    }
}

impl<T, S, C> WorkerLoop<T, S, C>
where
    S: Service<Job<T>, Error: Into<BoxError>, Future: Send + 'static>,
    C: Codec<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    pub(crate) async fn run(mut self, shutdown: impl Future<Output = ()>) -> Result<(), WorkerError> {
        let mut shutdown = pin!(shutdown);
        let (_watchers, mut wakeups) = self.watch();
        let mut failure = None;
        loop {
            let now = Instant::now();
            while let Some(ended) = self.tasks.try_join_next_with_id() {
                self.on_ended(ended, now);
            }
            if self.check_at.is_some_and(|at| at <= now) {
                self.check_running(now);
            }
            self.notices.log_summary(now);
            self.advance(now);
            let wanted = self.wanted(now);
            let filled = poll_fn(|cx| Poll::Ready(self.services.fill(wanted, cx))).await;
            let is_waiting = filled.is_pending();
            if let Poll::Ready(Err(error)) = filled
                && failure.is_none()
            {
                failure = Some(error);
                self.shut_down(now);
            }
            self.send_calls(now);
            if self.is_over(now) {
                return failure.map_or(Ok(()), |error| Err(WorkerError::Service(error)));
            }
            if self.reserved == 0 && wanted == 0 {
                self.services.release();
            }
            let (until, is_working) = (self.next_time(now), self.stage == Stage::Working);
            let (another, services) = (wanted.min(self.services.ready() + 1), &mut self.services);
            let event = tokio::select! {
                () = &mut shutdown, if is_working => LoopEvent::ShutDown,
                Some(ended) = self.tasks.join_next_with_id() => LoopEvent::Ended(ended),
                Some(reply) = self.calls.join_next() => LoopEvent::Replied(reply),
                ready = poll_fn(|cx| services.fill(another, cx)), if is_waiting => LoopEvent::Ready(ready),
                Some(part) = wakeups.recv(), if is_working => LoopEvent::Woken(part),
                () = sleep_until(until.unwrap_or(now)), if until.is_some() => LoopEvent::Time,
            };
            let now = Instant::now();
            match event {
                LoopEvent::ShutDown => self.shut_down(now),
                LoopEvent::Ended(ended) => self.on_ended(ended, now),
                LoopEvent::Replied(Ok(reply)) => {
                    self.on_reply(reply, now);
                    // Jobs that never wait end at once, so that one call records them all.
                    yield_once().await;
                }
                // Calls are not aborted, so the store panicked.
                LoopEvent::Replied(Err(error)) => match error.try_into_panic() {
                    Ok(panic) => resume_unwind(panic),
                    Err(_) => return Ok(()),
                },
                LoopEvent::Ready(Err(error)) if failure.is_none() => {
                    failure = Some(error);
                    self.shut_down(now);
                }
                LoopEvent::Ready(_) | LoopEvent::Time => {}
                LoopEvent::Woken(part) => self.parts[part].claim_at = Some(now),
            }
        }
    }

    /// Spawns watchers for jobs that come earlier than the next known one.
    fn watch(&self) -> (JoinSet<()>, mpsc::Receiver<usize>) {
        let (sender, wakeups) = mpsc::channel(self.parts.len().max(1));
        let mut watchers = JoinSet::new();
        for (index, part) in self.parts.iter().enumerate() {
            let (queue, key, worker, sender) = (self.queue.clone(), part.key, self.worker, sender.clone());
            watchers.spawn(async move {
                let mut wakeups = queue.watch(key, worker).await;
                // A job that was pushed before the watch began may have sent no wake-up, so claim first.
                while sender.send(index).await.is_ok() {
                    wakeups.next().await;
                }
            });
        }
        (watchers, wakeups)
    }

    /// Sends calls that record results and claim jobs.
    fn send_calls(&mut self, now: Instant) {
        let (is_working, is_busy) = (self.stage == Stage::Working, !self.running.is_empty());
        let (count, first) = (self.parts.len(), self.first_part);
        // If more jobs are due, one half of them runs while calls finish and claim the other half.
        let jobs_per_call = self.settings.concurrency.div_ceil(MAX_CONCURRENT_CALLS);
        for index in (0..count * MAX_CONCURRENT_CALLS).map(|i| (first + i) % count) {
            let free =
                if is_working { self.capacity().min(self.services.ready().saturating_sub(self.reserved)) } else { 0 };
            let part = &self.parts[index];
            if part.backoff_until > now || part.calls >= MAX_CONCURRENT_CALLS {
                continue;
            }
            let must_refresh = is_working && part.refresh_at(now, is_busy).is_some_and(|at| at <= now);
            // A due job must not wait for a worker that has no capacity or shuts down: the store then relies on other workers.
            let must_hand_over = part.is_timekeeper && free == 0 && (!is_working || part.is_due(now));
            let must_call = must_refresh || must_hand_over;
            if part.pending_acks.is_empty() && !must_call && (free == 0 || !part.is_due(now)) {
                continue;
            }
            // A second concurrent call has to be worth it.
            if part.calls > 0 && !must_hand_over && !(part.more && part.pending_acks.len() * 2 >= jobs_per_call) {
                continue;
            }
            let can_claim = |part: &&Part| part.is_due(now) && part.failures == 0;
            let due = self.parts.iter().filter(can_claim).count().max(1);
            // A probe of a failing part claims no job: an unanswered call would reserve instances that the other parts need.
            let is_probe = part.failures > 0 && count > 1;
            let part = &mut self.parts[index];
            let most = if part.more && is_working { jobs_per_call.min(MAX_BATCH) } else { MAX_BATCH };
            let batch = part.pending_acks.len().min(most);
            let acks: Vec<_> = part.pending_acks.drain(..batch).collect();
            // Unrecorded results count as running jobs, so that they cannot pile up. They count for their own part only, since other parts may work.
            let limit = free.saturating_sub(part.pending_acks.len()).min(free.div_ceil(due)).min(most);
            let skips_claim = mem::take(&mut part.skips_claim);
            let limit = match part.failures {
                _ if skips_claim || is_probe => 0,
                0 => limit,
                _ => limit.min(1),
            };
            if acks.is_empty() && limit == 0 && !must_call && !is_probe {
                continue;
            }
            let was_timekeeper = part.is_timekeeper;
            part.calls += 1;
            part.called_at = now;
            if limit > 0 {
                // Until the reply says when. The reply comes within the deadline, or the call fails.
                part.claim_at = None;
                self.first_part = index + 1;
            } else {
                part.is_timekeeper = false;
            }
            self.reserved += limit;
            self.acks_in_flight += acks.len();
            let claim =
                Claim { worker: self.worker, limit, lease: self.settings.lease, dead: self.queue.dead_limits() };
            let (key, queue, timeout) = (part.key, self.queue.clone(), self.call_timeout());
            let backoff = self.settings.backoff;
            let is_retried = self.settings.on_undecodable == OnUndecodable::Retry;
            self.calls.spawn(async move {
                let finished = acks.iter().map(|pending| pending.ack.clone()).collect();
                let sent = Instant::now();
                let result = queue.claim(key, finished, claim, timeout).await;
                let result = result.map(|claimed| {
                    let received = Instant::now();
                    let Claimed { finished, jobs: claimed, more, next, oldest_due, expired, died, now } = claimed;
                    let (mut jobs, mut undecodable) = (Vec::with_capacity(claimed.len()), Vec::new());
                    for job in claimed {
                        let (ticket, attempt, max_attempts) = (job.ticket(), job.job.attempt, job.job.max_attempts);
                        let ending = match decode(&queue, job) {
                            Ok(decoded) => {
                                jobs.push(decoded);
                                continue;
                            }
                            // After the last attempt the job is dead as undecodable, and not as failed.
                            Err(AckKind::Dead { error, .. }) if is_retried && attempt < max_attempts => {
                                AckKind::Retry { delay: backoff.delay(attempt), error }
                            }
                            Err(ending) => ending,
                        };
                        undecodable.push(PendingAck { attempt, ..PendingAck::new(ticket, ending) });
                    }
                    Box::new(Claims {
                        finished,
                        jobs,
                        undecodable,
                        more,
                        next,
                        oldest_due,
                        expired,
                        died,
                        received,
                        now,
                    })
                });
                Reply::Claimed { part: index, limit, sent, acks, was_timekeeper, result }
            });
        }
    }

    fn on_reply(&mut self, reply: Reply<T>, now: Instant) {
        match reply {
            Reply::Extended { part, ids, sent, result } => self.on_extended(part, &ids, sent, result, now),
            Reply::Claimed { part, limit, sent, acks, was_timekeeper, result } => {
                self.reserved -= limit;
                self.acks_in_flight -= acks.len();
                self.parts[part].calls -= 1;
                match result {
                    Ok(claims) => self.on_claimed(part, limit, sent, acks, *claims, now),
                    Err(error) => {
                        self.store_failed(part, &error);
                        let part = &mut self.parts[part];
                        for ack in acks.into_iter().rev() {
                            // A refused call had no effect, nor did a call sent after the lease, when another worker could have the job.
                            let may_count = !error.is_refusal() && ack.lease_ends.is_none_or(|ends| sent < ends);
                            let first_sent_at = ack.first_sent_at.or(may_count.then_some(sent));
                            part.pending_acks.push_front(PendingAck { first_sent_at, ..ack });
                        }
                        let pause = (FIRST_PAUSE * (1 << part.failures.min(8))).min(LONGEST_PAUSE);
                        part.failures += 1;
                        (part.backoff_until, part.claim_at) = (now + pause / 2 + share(pause / 2), Some(now));
                        // The claim may have taken effect.
                        part.is_timekeeper |= limit > 0 || was_timekeeper;
                    }
                }
            }
        }
    }

    fn on_claimed(
        &mut self,
        index: usize,
        limit: usize,
        sent: Instant,
        acks: Vec<PendingAck>,
        claims: Claims<T>,
        now: Instant,
    ) {
        self.store_works(index);
        for (ack, finished) in acks.into_iter().zip(claims.finished) {
            self.on_acked(ack, finished, now);
        }
        self.parts[index].oldest_due = claims.oldest_due;
        self.metrics.oldest_due(self.parts.iter().filter_map(|part| part.oldest_due).max().unwrap_or_default());
        self.on_expired(claims.expired, &claims.died, now);
        let part = &mut self.parts[index];
        part.failures = 0;
        if limit == 0 {
            // A worker that does not wait is not woken for new jobs.
            part.claim_at = Some(now);
        } else {
            part.more = claims.more || claims.jobs.len() + claims.undecodable.len() >= limit;
            // Of two concurrent calls, the store may have handled either last.
            part.is_timekeeper = !part.more || (part.is_timekeeper && part.calls > 0);
            let next = claims.next.and_then(|next| claims.received.checked_add(wait(next, claims.now)));
            let claim_at = if part.more { Some(now) } else { next };
            part.claim_at = part.claim_at.into_iter().chain(claim_at).min();
        }
        let lease_ends = sent + self.settings.lease;
        for ack in claims.undecodable {
            self.add_pending_ack(index, lease_ends, ack);
        }
        let jobs = claims.jobs.len();
        if lease_ends <= now && jobs > 0 {
            tracing::warn!(queue = %self.queue.name(), jobs, "a claim took longer than the lease: its jobs are released");
        }
        for decoded in claims.jobs {
            self.start(index, decoded, sent, claims.now, now);
        }
    }

    /// Starts a claimed job.
    fn start(&mut self, part: usize, decoded: DecodedJob<T>, sent: Instant, claimed_at: SystemTime, now: Instant) {
        let DecodedJob { ticket, job, canceller } = decoded;
        let lease_ends = sent + self.settings.lease;
        let id = ticket.id;
        if self.abandoned > 0 && self.running.values().any(|running| running.is_abandoned && running.ticket.id == id) {
            // The job waits for the end of the abandoned attempt, or for another worker.
            self.parts[part].skips_claim = true;
            self.add_pending_ack(
                part,
                lease_ends,
                PendingAck::new(ticket, AckKind::Snooze { delay: ABANDONED_SNOOZE }),
            );
            return;
        }
        // Another worker may have claimed the job after the end of the lease.
        let may_begin = self.stage == Stage::Working && now < lease_ends;
        let Some(mut instance) = may_begin.then(|| self.services.take()).flatten() else {
            self.add_pending_ack(part, lease_ends, PendingAck::new(ticket, AckKind::Release));
            return;
        };
        let (attempt, is_last) = (job.attempt(), job.is_last_attempt());
        let late = claimed_at.duration_since(job.due_at()).unwrap_or_default();
        let call = catch_unwind(AssertUnwindSafe(|| {
            let span = self.settings.span(self.queue.name().as_str(), &job);
            (span.in_scope(|| instance.call(job)), span)
        }));
        let (future, span) = match call {
            Ok(called) => called,
            Err(panic) => {
                self.services.put_panicked(instance);
                let delay = self.settings.backoff.delay(attempt);
                let ack = PendingAck::retry(ticket, delay, panicked(panic));
                self.add_pending_ack(part, lease_ends, PendingAck { is_last, attempt, ..ack });
                return;
            }
        };
        self.services.put(instance);
        let task = async move { future.await.map(drop).map_err(Into::into) };
        let abort = self.tasks.spawn(task.instrument(span));
        self.metrics.started(late);
        self.settings.events.send(|| Event::Started { id: ticket.id, attempt, late });
        let running = RunningJob {
            part,
            ticket,
            attempt,
            is_last,
            started: now,
            canceller,
            lease_ends,
            extend_at: Some(sent + self.settings.lease / 3),
            overrun_at: self.settings.max_runtime.and_then(|time| now.checked_add(time)),
            stop: None,
            abort_at: None,
            abandon_at: None,
            is_abandoned: false,
            abort,
        };
        self.check_at = self.check_at.into_iter().chain(running.next_check()).min();
        self.running.insert(running.abort.id(), running);
    }

    /// Checks the running jobs: renews leases, and stops jobs whose lease is lost or that run for too long.
    fn check_running(&mut self, now: Instant) {
        let Settings { lease, abort_after, .. } = self.settings;
        let mut extend: Vec<Vec<(Id, JobLease)>> = vec![Vec::new(); self.parts.len()];
        self.check_at = None;
        for (id, running) in &mut self.running {
            if running.abort_at.is_some_and(|at| at <= now) {
                running.abort.abort();
                running.abort_at = None;
                // During a shutdown all such jobs are abandoned together.
                running.abandon_at = (running.stop != Some(StopReason::ShutDown)).then_some(now + ABANDON_AFTER);
            }
            if running.abandon_at.is_some_and(|at| at <= now) {
                (running.abandon_at, running.extend_at, running.is_abandoned) = (None, None, true);
                self.abandoned += 1;
                let RunningJob { part, ticket, attempt, is_last, lease_ends, stop, .. } = *running;
                let ack = PendingAck::dropped(ticket, stop, self.settings.backoff.delay(attempt));
                let lease_ends = Some(lease_ends);
                self.parts[part].pending_acks.push_back(PendingAck { lease_ends, is_last, attempt, ..ack });
                tracing::warn!(queue = %self.queue.name(), job = %ticket.id, "a job that does not yield is abandoned");
            }
            if running.overrun_at.is_some_and(|at| at <= now) {
                running.stop(StopReason::Overrun, now, abort_after);
            }
            if running.extend_at.is_some() && running.lease_ends <= now {
                running.extend_at = None;
                running.stop(StopReason::LeaseLost, now, abort_after);
            }
            // Renew leases that are due soon in the same call.
            if running.extend_at.is_some_and(|at| at <= now + lease / 12) {
                // Retried if there is no reply by then.
                running.extend_at = Some(now + lease / 6);
                extend[running.part].push((*id, running.ticket));
            }
            self.check_at = self.check_at.into_iter().chain(running.next_check()).min();
        }
        for (part, due) in extend.into_iter().enumerate() {
            for batch in due.chunks(MAX_BATCH) {
                let (ids, tickets): (Vec<_>, Vec<_>) = batch.iter().copied().unzip();
                let (queue, key, timeout) = (self.queue.clone(), self.parts[part].key, self.call_timeout());
                self.calls.spawn(async move {
                    let sent = Instant::now();
                    let result = queue.extend(key, tickets, lease, timeout).await;
                    Reply::Extended { part, ids, sent, result }
                });
            }
        }
    }
}

impl<T, S, C> Drop for WorkerLoop<T, S, C> {
    fn drop(&mut self) {
        let now = Instant::now();
        for running in self.running.values() {
            self.metrics.ended(now.saturating_duration_since(running.started));
        }
        // Unknown from now on. Another worker of this process sets the gauge at its next call.
        self.metrics.oldest_due(Duration::ZERO);
        // Results that were not read, whose `drop` may panic. One by one, since a second panic during unwinding would abort the process.
        while let Some(ended) = self.tasks.try_join_next() {
            discard_joined(ended);
        }
        // For a job that ends on another thread at this moment.
        discard(mem::take(&mut self.tasks));
    }
}

/// Decodes a claimed job. If that fails, the error says what becomes of the job.
fn decode<T, C: Codec<T>>(queue: &DelayQueue<T, C>, claimed: ClaimedJob) -> Result<DecodedJob<T>, AckKind> {
    let ticket = claimed.ticket();
    match catch_unwind(AssertUnwindSafe(|| queue.decode_claimed(claimed))) {
        Ok(Ok((job, canceller))) => Ok(DecodedJob { ticket, job, canceller }),
        Ok(Err(ending)) => Err(ending),
        Err(panic) => Err(AckKind::Dead { reason: Reason::Undecodable, error: panicked(panic) }),
    }
}

/// Yields to other tasks once. `yield_now` of tokio resumes when this thread has nothing else to do, which is only after a job that blocks
/// it. A task that is woken can be run by another thread.
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

/// The message of a panic.
fn panicked(panic: Box<dyn Any + Send>) -> Arc<str> {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.map_or_else(|| "the job panicked".into(), |text| format!("the job panicked: {text}").into());
    discard(panic);
    text
}

/// How long to wait from the reply on. `next` counts whole milliseconds of the store's clock, and the current one began a while before.
fn wait(next: Duration, now: SystemTime) -> Duration {
    if next == Claim::MAX_WAIT {
        // No due time is known. The spread keeps many workers from claiming at the same time.
        return next - share(next / 5);
    }
    let begun = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().subsec_nanos() % 1_000_000;
    next.saturating_sub(Duration::from_nanos(begun.into()))
}
