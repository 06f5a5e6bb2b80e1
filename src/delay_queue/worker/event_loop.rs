//! The loop of a worker: claims, gives jobs to the service, looks after their leases, and notes what they have come to.

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
use crate::delay_queue::metrics;
use crate::delay_queue::metrics::Meters;
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

/// How many calls that finish and claim are under way at the same time, of each part of a queue: one is answered while jobs of the other run.
const LANES: usize = 2;
/// The pause after a call that failed, doubled with each further one up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long the store is asked to note what jobs have come to when everything else is over.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long one call of a worker that ends is waited for: there has to be time for others, over other connections.
const LAST_CALL: Duration = Duration::from_secs(1);
/// How long a service that is dropped may take to come to a point where it can be: one that never yields does not.
const LAST_POLL: Duration = Duration::from_secs(1);
/// How long a job waits that this worker has left behind and got again. Others are told of what is due within [`Claim::MAX_WAIT`].
const LEFT_PAUSE: Duration = Duration::from_secs(3);

pub(crate) struct WorkerLoop<T, S, C> {
    queue: DelayQueue<T, C>,
    slots: ReadyServices<S>,
    settings: Settings<T>,
    worker: WorkerId,
    meters: Meters,
    notices: Notices,
    parts: Vec<Part>,
    // Which part is asked first.
    turn: usize,
    // What the service is at. Ends with this value.
    tasks: JoinSet<Result<(), BoxError>>,
    running: HashMap<Id, RunningJob>,
    // How many of these are left behind.
    left: usize,
    calls: JoinSet<Answer<T>>,
    // For how many jobs calls under way have asked.
    reserved: usize,
    // Of how many jobs calls under way say what they have come to.
    being_noted: usize,
    // When something that runs is to be looked after.
    check_at: Option<Instant>,
    // Of jobs that are over a limit.
    spread: RetryStagger,
    // Of those that wait for what somebody else has.
    queueing: RetryStagger,
    stage: Stage,
}

/// One part of a queue.
struct Part {
    key: QueueKey,
    settled: VecDeque<PendingAck>,
    // When there may be something to claim; `None` if nobody knows, and a wake-up will tell.
    look_at: Option<Instant>,
    // Whether more was due the last time, and since when.
    more: bool,
    oldest_due: Option<Duration>,
    // When the store was last asked anything.
    asked_at: Instant,
    // Whether the store may count on this worker to look when something is due, so that others sleep.
    is_relied_on: bool,
    // Whether the next call asks for nothing, so that somebody else looks when something is due.
    passes_on: bool,
    calls: usize,
    failures: u32,
    paused_until: Instant,
    // Whether it was told that the store fails here, and the log that it does.
    is_failing: bool,
    outage: OutageTracker,
}

impl Part {
    fn is_due(&self, now: Instant) -> bool {
        self.look_at.is_some_and(|at| at <= now)
    }

    /// When to ask since when the oldest is due, if something is that cannot be claimed: there is no time for it, or the queue is paused. Also whether
    /// something is, while jobs run: one that blocks its thread keeps back whom it has woken just before, those who listen for us among them.
    fn overlooked_at(&self, now: Instant, is_busy: bool) -> Option<Instant> {
        (is_busy || self.is_due(now) || self.oldest_due.is_some()).then(|| self.asked_at + Claim::MAX_WAIT)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Working,
    /// Waits until this instant for what runs.
    Draining(Instant),
    /// What still runs was told to give up, and is dropped; until this instant, as a future that never yields cannot be.
    Releasing(Instant),
    /// Nothing runs any more.
    Flushing(Instant),
}

/// What came of a call.
enum Answer<T> {
    Claimed {
        part: usize,
        limit: usize,
        sent: Instant,
        settled: Vec<PendingAck>,
        // Before it was sent.
        was_relied_on: bool,
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
    // Those whose payload cannot be read.
    unreadable: Vec<PendingAck>,
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

/// What the loop has waited for.
enum LoopEvent<T> {
    ShutDown,
    Ended(Result<(Id, Result<(), BoxError>), JoinError>),
    Answered(Result<Answer<T>, JoinError>),
    Ready(Result<(), BoxError>),
    Woken(usize),
    Time,
}

impl<T, S, C> WorkerLoop<T, S, C> {
    pub(crate) fn new(
        queue: DelayQueue<T, C>,
        slots: ReadyServices<S>,
        settings: Settings<T>,
    ) -> Result<Self, StoreError> {
        let now = Instant::now();
        let part = |key| Part {
            key,
            settled: VecDeque::new(),
            look_at: Some(now),
            more: false,
            oldest_due: None,
            asked_at: now,
            is_relied_on: false,
            passes_on: false,
            calls: 0,
            failures: 0,
            paused_until: now,
            is_failing: false,
            outage: OutageTracker::of_a_store(),
        };
        Ok(Self {
            worker: WorkerId::random()?,
            meters: Meters::new(queue.name().as_str()),
            notices: Notices::new(*queue.name(), now),
            parts: queue.parts().map(part).collect(),
            turn: 0,
            tasks: JoinSet::new(),
            running: HashMap::new(),
            left: 0,
            calls: JoinSet::new(),
            reserved: 0,
            being_noted: 0,
            check_at: None,
            spread: RetryStagger::new(now),
            queueing: RetryStagger::new(now),
            stage: Stage::Working,
            queue,
            slots,
            settings,
        })
    }

    /// How many more jobs may be claimed, as far as we are concerned.
    fn room(&self) -> usize {
        self.settings.concurrency.saturating_sub(self.running.len() + self.reserved)
    }

    /// For how many jobs instances of the service are to be ready.
    fn wanted(&self, now: Instant) -> usize {
        let is_due = |part: &&Part| {
            let has_more = part.more && part.failures == 0;
            part.paused_until <= now && (part.is_due(now) || has_more || !part.settled.is_empty())
        };
        let failures = self.parts.iter().filter(is_due).map(|part| part.failures).min();
        match failures.filter(|_| self.stage == Stage::Working) {
            None => 0,
            // No more than calls can ask for at a time.
            Some(0) => (self.reserved + self.room()).min(self.parts.len() * LANES * MAX_BATCH),
            // Whether the store works again is found out by one call: others may have a use for the rest meanwhile.
            Some(_) => self.reserved + self.room().min(1),
        }
    }

    /// When to go on if nothing happens.
    fn next_time(&self, now: Instant) -> Option<Instant> {
        let (is_working, is_busy) = (self.stage == Stage::Working, !self.running.is_empty());
        let parts = self.parts.iter().filter_map(|part| {
            if part.paused_until > now && (is_working || !part.settled.is_empty()) {
                Some(part.paused_until)
            } else {
                // What is due already waits for something else than time, but for a word on how long it has.
                let times = [part.look_at, part.overlooked_at(now, is_busy)].into_iter().flatten();
                times.filter(|at| is_working && *at > now).min()
            }
        });
        let stage = match self.stage {
            Stage::Draining(until) | Stage::Releasing(until) | Stage::Flushing(until) => Some(until),
            Stage::Working => None,
        };
        parts.chain(self.check_at).chain(stage).chain(self.notices.sum_up_at()).min()
    }

    fn is_over(&self, now: Instant) -> bool {
        let Stage::Flushing(until) = self.stage else { return false };
        let unsaid = self.being_noted + self.parts.iter().map(|part| part.settled.len()).sum::<usize>();
        if now >= until && unsaid > 0 {
            tracing::warn!(queue = %self.queue.name(), jobs = unsaid, "what jobs have come to could not be noted");
        }
        now >= until || (unsaid == 0 && self.calls.is_empty())
    }

    /// Goes from one stage of the end to the next.
    fn advance(&mut self, now: Instant) {
        if let Stage::Draining(until) = self.stage
            && now >= until
        {
            let until = now.checked_add(self.settings.abort_after).unwrap_or_else(|| now + Claim::MAX_LEASE);
            self.stage = Stage::Releasing(until + LAST_POLL);
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
            tracing::warn!(queue = %self.queue.name(), jobs, "jobs that do not end are left behind: they never yield");
        }
        if is_late || (is_idle && matches!(self.stage, Stage::Draining(_) | Stage::Releasing(_))) {
            self.stage = Stage::Flushing(now + LAST_WORDS);
        }
    }

    fn shut_down(&mut self, now: Instant) {
        if self.stage == Stage::Working {
            let until = now.checked_add(self.settings.grace).unwrap_or_else(|| now + Claim::MAX_LEASE);
            self.stage = Stage::Draining(until);
            self.slots.rest();
        }
    }

    fn settle(&mut self, part: usize, lease_ends: Instant, settled: PendingAck) {
        self.parts[part].settled.push_back(PendingAck { lease_ends: Some(lease_ends), ..settled });
    }

    /// Notes what a job has come to.
    fn ended(&mut self, ended: Result<(Id, Result<(), BoxError>), JoinError>, now: Instant) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let Some(running) = self.running.remove(&id) else { return };
        self.meters.ended(now.saturating_duration_since(running.started));
        let (ticket, attempt) = (running.ticket, running.attempt);
        if running.is_left {
            self.left -= 1;
            discard_joined(ended);
            tracing::info!(queue = %self.queue.name(), job = %ticket.id, "a job that was left behind has ended");
            return;
        }
        let delay = || self.settings.backoff.delay(attempt);
        let settled = match (ended.map(|(_, answer)| answer), running.stop) {
            (answer, Some(StopReason::Cancelled)) => {
                discard_joined(answer);
                PendingAck::cancelled(ticket)
            }
            (Ok(Ok(())), _) => PendingAck::new(ticket, AckKind::Done),
            (Ok(Err(error)), stop) => {
                let backoff = &self.settings.backoff;
                let verdict = catch_unwind(AssertUnwindSafe(move || match stop {
                    // Given up for want of time, unless the service says more of the job than that.
                    Some(StopReason::ShutDown) => {
                        FailureAction::said(&error).unwrap_or(FailureAction::Ends(AckKind::Release))
                    }
                    _ => FailureAction::of(&error, attempt, backoff),
                }));
                match verdict {
                    Ok(verdict) => self.judge(ticket, verdict, now),
                    // What the error has to say is the service's, too.
                    Err(panic) => PendingAck::retry(ticket, delay(), panicked(panic)),
                }
            }
            (Err(error), stop) => match error.try_into_panic() {
                Ok(panic) => PendingAck::retry(ticket, delay(), panicked(panic)),
                Err(_) => PendingAck::dropped(ticket, stop, delay()),
            },
        };
        self.settle(running.part, running.lease_ends, PendingAck { is_last: running.is_last, attempt, ..settled });
    }

    fn judge(&mut self, ticket: JobLease, verdict: FailureAction, now: Instant) -> PendingAck {
        match verdict {
            FailureAction::Ends(ending) => PendingAck::new(ticket, ending),
            FailureAction::Limited(wait) => {
                PendingAck::new(ticket, AckKind::Snooze { delay: self.spread.delay(wait, now) })
            }
            FailureAction::Busy(wait) => {
                PendingAck::new(ticket, AckKind::Snooze { delay: self.queueing.turn(wait, now) })
            }
            FailureAction::Cancelled => PendingAck::new(ticket, AckKind::Cancelled),
        }
    }

    /// Tells what the store has noted.
    fn noted(&mut self, settled: PendingAck, finished: Finished, now: Instant) {
        let PendingAck { finish, result, is_last, attempt, told_at, .. } = settled;
        let id = finish.ticket.id;
        let result = match (finished, told_at, &finish.ending) {
            (Finished::Dead, ..) => metrics::Result::Dead,
            (Finished::Cancelled, ..) => metrics::Result::Cancelled,
            (Finished::Done, ..) => result,
            // An earlier call has come through, as far as can be known.
            (Finished::Gone, Some(at), ending) if self.is_kept(ending, is_last, now.saturating_duration_since(at)) => {
                metrics::Result::Cancelled
            }
            // Its attempts are over, whether the dead are kept or not.
            (Finished::Gone | Finished::Lost, Some(_), AckKind::Retry { .. }) if is_last => metrics::Result::Dead,
            (Finished::Gone, Some(_), _) => result,
            // What waits again after it is nobody's, or somebody else's; one that was done would be gone.
            (Finished::Lost, Some(_), ending) if !ending.forgets() => result,
            (Finished::Gone | Finished::Lost, ..) => metrics::Result::LeaseLost,
        };
        self.meters.finished(result);
        if result == metrics::Result::LeaseLost {
            tracing::warn!(queue = %self.queue.name(), job = %id, "a job ended after its lease was lost");
        }
        if result == metrics::Result::Dead {
            let (reason, error) = match &finish.ending {
                AckKind::Dead { reason, error } => (*reason, &**error),
                AckKind::Retry { error, .. } => (Reason::Failed, &**error),
                AckKind::Done | AckKind::Cancelled | AckKind::Snooze { .. } | AckKind::Release => {
                    (Reason::Undecodable, "")
                }
            };
            self.notices.died(&id, attempt, reason, error, now);
        }
        self.settings.teller.tell(|| match (result, finish.ending) {
            (metrics::Result::LeaseLost, _) => Event::LeaseLost { id },
            (metrics::Result::Cancelled, _) | (_, AckKind::Cancelled) => Event::Cancelled { id },
            (_, AckKind::Dead { reason, error }) => Event::Dead { id, reason, error },
            (metrics::Result::Dead, AckKind::Retry { error, .. }) => Event::Dead { id, reason: Reason::Failed, error },
            (_, AckKind::Retry { delay, error }) => Event::Retried { id, delay, error },
            (_, AckKind::Snooze { delay }) => Event::Snoozed { id, delay },
            (_, AckKind::Release) => Event::Released { id },
            (_, AckKind::Done) => Event::Done { id },
        });
    }

    /// Whether a job that ended like this is there still after so long, if it was not cancelled: nobody else can have done it, and it is not too
    /// old to be kept.
    fn is_kept(&self, ending: &AckKind, is_last: bool, since: Duration) -> bool {
        let dead = self.queue.dead_limits();
        match ending {
            AckKind::Dead { .. } => dead.count > 0 && since < dead.age,
            AckKind::Retry { .. } if is_last => dead.count > 0 && since < dead.age,
            AckKind::Retry { delay, .. } | AckKind::Snooze { delay } => since < *delay,
            AckKind::Release | AckKind::Done | AckKind::Cancelled => false,
        }
    }

    /// Tells of attempts that nobody else will tell of.
    fn taken_back(&mut self, expired: Expired, died: &[Died], now: Instant) {
        let Expired { jobs, dead } = expired;
        if jobs > 0 {
            self.meters.expired(expired);
            tracing::warn!(queue = %self.queue.name(), jobs, dead, "leases have ended without a word of their workers");
            self.settings.teller.tell(|| Event::LeasesExpired { jobs, dead });
        }
        for Died { id, attempts } in died {
            self.notices.died(id, *attempts, Reason::LeaseExpired, "its last lease has ended", now);
        }
    }

    fn store_failed(&mut self, part: usize, error: &StoreError) {
        self.meters.store_failed();
        let is_first = self.parts.iter().all(|part| !part.is_failing);
        let part = &mut self.parts[part];
        part.is_failing = true;
        if part.outage.begins() {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            tracing::warn!(queue = %part.key, %error, cause, "the store fails: the worker asks again until it works");
        }
        if is_first {
            self.settings.teller.tell(|| Event::StoreFailed { error: error.clone() });
        }
    }

    fn store_works(&mut self, part: usize) {
        let part = &mut self.parts[part];
        if part.outage.ends() {
            tracing::info!(queue = %part.key, "the store works again");
        }
        if mem::take(&mut part.is_failing) && self.parts.iter().all(|part| !part.is_failing) {
            self.settings.teller.tell(|| Event::StoreWorks);
        }
    }

    fn call_limit(&self) -> Duration {
        let patience = Claim::patience(self.settings.lease);
        if self.stage == Stage::Working { patience } else { patience.min(LAST_CALL) }
    }

    /// Notes what came of extending leases.
    fn extended(
        &mut self,
        part: usize,
        ids: &[Id],
        sent: Instant,
        result: Result<Vec<Extended>, StoreError>,
        now: Instant,
    ) {
        let answers = match result {
            Ok(answers) => {
                // Where claims fail it does not work, whatever else it answers.
                if self.parts[part].failures == 0 {
                    self.store_works(part);
                }
                answers
            }
            Err(error) => {
                // It is tried again in a while anyway.
                self.store_failed(part, &error);
                return;
            }
        };
        let Settings { lease, abort_after, .. } = self.settings;
        for (id, answer) in ids.iter().zip(answers) {
            let Some(running) = self.running.get_mut(id) else { continue };
            match answer {
                Extended::Held | Extended::Cancelled => {
                    running.lease_ends = sent + lease;
                    running.extend_at = running.extend_at.map(|_| sent + lease / 3);
                    if answer == Extended::Cancelled {
                        running.stop(StopReason::Cancelled, now, abort_after);
                    }
                }
                Extended::Lost => {
                    // Whatever the clocks say.
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
                self.ended(ended, now);
            }
            if self.check_at.is_some_and(|at| at <= now) {
                self.check(now);
            }
            self.notices.sum_up(now);
            self.advance(now);
            let wanted = self.wanted(now);
            let filled = poll_fn(|cx| Poll::Ready(self.slots.fill(wanted, cx))).await;
            let is_waiting = filled.is_pending();
            if let Poll::Ready(Err(error)) = filled
                && failure.is_none()
            {
                failure = Some(error);
                self.shut_down(now);
            }
            self.ask(now);
            if self.is_over(now) {
                return failure.map_or(Ok(()), |error| Err(WorkerError::Service(error)));
            }
            if self.reserved == 0 && wanted == 0 {
                self.slots.rest();
            }
            let (until, is_working) = (self.next_time(now), self.stage == Stage::Working);
            let (another, slots) = (wanted.min(self.slots.ready() + 1), &mut self.slots);
            let happened = tokio::select! {
                () = &mut shutdown, if is_working => LoopEvent::ShutDown,
                Some(ended) = self.tasks.join_next_with_id() => LoopEvent::Ended(ended),
                Some(answer) = self.calls.join_next() => LoopEvent::Answered(answer),
                ready = poll_fn(|cx| slots.fill(another, cx)), if is_waiting => LoopEvent::Ready(ready),
                Some(part) = wakeups.recv(), if is_working => LoopEvent::Woken(part),
                () = sleep_until(until.unwrap_or(now)), if until.is_some() => LoopEvent::Time,
            };
            let now = Instant::now();
            match happened {
                LoopEvent::ShutDown => self.shut_down(now),
                LoopEvent::Ended(ended) => self.ended(ended, now),
                LoopEvent::Answered(Ok(answer)) => {
                    self.answered(answer, now);
                    // Those that have nothing to wait for are done in a moment, and noted together.
                    give_way().await;
                }
                // Calls are not aborted, so the store has panicked.
                LoopEvent::Answered(Err(error)) => match error.try_into_panic() {
                    Ok(panic) => resume_unwind(panic),
                    Err(_) => return Ok(()),
                },
                LoopEvent::Ready(Err(error)) if failure.is_none() => {
                    failure = Some(error);
                    self.shut_down(now);
                }
                LoopEvent::Ready(_) | LoopEvent::Time => {}
                LoopEvent::Woken(part) => self.parts[part].look_at = Some(now),
            }
        }
    }

    /// Listens for jobs that come earlier than what is known of.
    fn watch(&self) -> (JoinSet<()>, mpsc::Receiver<usize>) {
        let (sender, wakeups) = mpsc::channel(self.parts.len().max(1));
        let mut watchers = JoinSet::new();
        for (index, part) in self.parts.iter().enumerate() {
            let (queue, key, worker, sender) = (self.queue.clone(), part.key, self.worker, sender.clone());
            watchers.spawn(async move {
                let mut wakeups = queue.watch(key, worker).await;
                // What came before it listened may have told nobody.
                while sender.send(index).await.is_ok() {
                    wakeups.next().await;
                }
            });
        }
        (watchers, wakeups)
    }

    /// Asks the store to note what jobs have come to, and for others.
    fn ask(&mut self, now: Instant) {
        let (is_working, is_busy) = (self.stage == Stage::Working, !self.running.is_empty());
        let (count, first) = (self.parts.len(), self.turn);
        // Where more is waiting, half of the jobs run while calls are about the other half.
        let share = self.settings.concurrency.div_ceil(LANES);
        for index in (0..count * LANES).map(|i| (first + i) % count) {
            let free = if is_working { self.room().min(self.slots.ready().saturating_sub(self.reserved)) } else { 0 };
            let part = &self.parts[index];
            if part.paused_until > now || part.calls >= LANES {
                continue;
            }
            let is_overlooked = is_working && part.overlooked_at(now, is_busy).is_some_and(|at| at <= now);
            // What is due must not wait for a worker that has no time for it, or ends: others are told to look instead.
            let hands_over = part.is_relied_on && free == 0 && (!is_working || part.is_due(now));
            let must_ask = is_overlooked || hands_over;
            if part.settled.is_empty() && !must_ask && (free == 0 || !part.is_due(now)) {
                continue;
            }
            // A second call at the same time has to be worth it.
            if part.calls > 0 && !hands_over && !(part.more && part.settled.len() * 2 >= share) {
                continue;
            }
            let is_asked = |part: &&Part| part.is_due(now) && part.failures == 0;
            let due = self.parts.iter().filter(is_asked).count().max(1);
            // Whether a part works again is found out by a call that asks for no jobs: one that is not answered would keep others from them.
            let is_probe = part.failures > 0 && count > 1;
            let part = &mut self.parts[index];
            let most = if part.more && is_working { share.min(MAX_BATCH) } else { MAX_BATCH };
            let batch = part.settled.len().min(most);
            let settled: Vec<_> = part.settled.drain(..batch).collect();
            // What is not noted yet counts as if it ran, so that it cannot become more and more: for its own part, as others may work although
            // nothing can be noted there.
            let limit = free.saturating_sub(part.settled.len()).min(free.div_ceil(due)).min(most);
            let passes_on = mem::take(&mut part.passes_on);
            let limit = match part.failures {
                _ if passes_on || is_probe => 0,
                0 => limit,
                _ => limit.min(1),
            };
            if settled.is_empty() && limit == 0 && !must_ask && !is_probe {
                continue;
            }
            let was_relied_on = part.is_relied_on;
            part.calls += 1;
            part.asked_at = now;
            if limit > 0 {
                // Until the answer says when; it says so within a time, or the call has failed.
                part.look_at = None;
                self.turn = index + 1;
            } else {
                part.is_relied_on = false;
            }
            self.reserved += limit;
            self.being_noted += settled.len();
            let claim =
                Claim { worker: self.worker, limit, lease: self.settings.lease, dead: self.queue.dead_limits() };
            let (key, queue, time) = (part.key, self.queue.clone(), self.call_limit());
            let backoff = self.settings.backoff;
            let is_retried = self.settings.on_undecodable == OnUndecodable::Retry;
            self.calls.spawn(async move {
                let finished = settled.iter().map(|settled| settled.finish.clone()).collect();
                let sent = Instant::now();
                let result = queue.claim(key, finished, claim, time).await;
                let result = result.map(|claimed| {
                    let received = Instant::now();
                    let Claimed { finished, jobs: claimed, more, next, oldest_due, expired, died, now } = claimed;
                    let (mut jobs, mut unreadable) = (Vec::with_capacity(claimed.len()), Vec::new());
                    for job in claimed {
                        let (ticket, attempt, max_attempts) = (job.ticket(), job.job.attempt, job.job.max_attempts);
                        let ending = match open(&queue, job) {
                            Ok(opened) => {
                                jobs.push(opened);
                                continue;
                            }
                            // After the last attempt it is dead as what it is, and not as one that the service has failed.
                            Err(AckKind::Dead { error, .. }) if is_retried && attempt < max_attempts => {
                                AckKind::Retry { delay: backoff.delay(attempt), error }
                            }
                            Err(ending) => ending,
                        };
                        unreadable.push(PendingAck { attempt, ..PendingAck::new(ticket, ending) });
                    }
                    Box::new(Claims {
                        finished,
                        jobs,
                        unreadable,
                        more,
                        next,
                        oldest_due,
                        expired,
                        died,
                        received,
                        now,
                    })
                });
                Answer::Claimed { part: index, limit, sent, settled, was_relied_on, result }
            });
        }
    }

    fn answered(&mut self, answer: Answer<T>, now: Instant) {
        match answer {
            Answer::Extended { part, ids, sent, result } => self.extended(part, &ids, sent, result, now),
            Answer::Claimed { part, limit, sent, settled, was_relied_on, result } => {
                self.reserved -= limit;
                self.being_noted -= settled.len();
                self.parts[part].calls -= 1;
                match result {
                    Ok(claims) => self.claimed(part, limit, sent, settled, *claims, now),
                    Err(error) => {
                        self.store_failed(part, &error);
                        let part = &mut self.parts[part];
                        for settled in settled.into_iter().rev() {
                            // What the store was not asked has not happened, and what is said when somebody else has the job already changes
                            // nothing.
                            let may_count = !error.is_refusal() && settled.lease_ends.is_none_or(|ends| sent < ends);
                            let told_at = settled.told_at.or(may_count.then_some(sent));
                            part.settled.push_front(PendingAck { told_at, ..settled });
                        }
                        let pause = (FIRST_PAUSE * (1 << part.failures.min(8))).min(LONGEST_PAUSE);
                        part.failures += 1;
                        (part.paused_until, part.look_at) = (now + pause / 2 + share(pause / 2), Some(now));
                        // It may have come through, or not.
                        part.is_relied_on |= limit > 0 || was_relied_on;
                    }
                }
            }
        }
    }

    fn claimed(
        &mut self,
        index: usize,
        limit: usize,
        sent: Instant,
        settled: Vec<PendingAck>,
        claims: Claims<T>,
        now: Instant,
    ) {
        self.store_works(index);
        for (settled, finished) in settled.into_iter().zip(claims.finished) {
            self.noted(settled, finished, now);
        }
        self.parts[index].oldest_due = claims.oldest_due;
        self.meters.oldest_due(self.parts.iter().filter_map(|part| part.oldest_due).max().unwrap_or_default());
        self.taken_back(claims.expired, &claims.died, now);
        let part = &mut self.parts[index];
        part.failures = 0;
        if limit == 0 {
            // Whoever does not wait is not told of what comes.
            part.look_at = Some(now);
        } else {
            part.more = claims.more || claims.jobs.len() + claims.unreadable.len() >= limit;
            // Of two calls at a time either may have been the last one.
            part.is_relied_on = !part.more || (part.is_relied_on && part.calls > 0);
            let next = claims.next.and_then(|next| claims.received.checked_add(wait(next, claims.now)));
            let look_at = if part.more { Some(now) } else { next };
            part.look_at = part.look_at.into_iter().chain(look_at).min();
        }
        let lease_ends = sent + self.settings.lease;
        for settled in claims.unreadable {
            self.settle(index, lease_ends, settled);
        }
        let jobs = claims.jobs.len();
        if lease_ends <= now && jobs > 0 {
            tracing::warn!(queue = %self.queue.name(), jobs, "a claim took longer than its leases last: its jobs wait again");
        }
        for opened in claims.jobs {
            self.start(index, opened, sent, claims.now, now);
        }
    }

    /// Gives a job to the service.
    fn start(&mut self, part: usize, opened: DecodedJob<T>, sent: Instant, claimed_at: SystemTime, now: Instant) {
        let DecodedJob { ticket, job, canceller } = opened;
        let lease_ends = sent + self.settings.lease;
        let id = ticket.id;
        if self.left > 0 && self.running.values().any(|running| running.is_left && running.ticket.id == id) {
            // It waits for the end of that attempt, or for another worker.
            self.parts[part].passes_on = true;
            self.settle(part, lease_ends, PendingAck::new(ticket, AckKind::Snooze { delay: LEFT_PAUSE }));
            return;
        }
        // What may be somebody else's already is not begun.
        let may_begin = self.stage == Stage::Working && now < lease_ends;
        let Some(mut instance) = may_begin.then(|| self.slots.take()).flatten() else {
            self.settle(part, lease_ends, PendingAck::new(ticket, AckKind::Release));
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
                self.slots.put_damaged(instance);
                let delay = self.settings.backoff.delay(attempt);
                let settled = PendingAck::retry(ticket, delay, panicked(panic));
                self.settle(part, lease_ends, PendingAck { is_last, attempt, ..settled });
                return;
            }
        };
        self.slots.put(instance);
        let task = async move { future.await.map(drop).map_err(Into::into) };
        let abort = self.tasks.spawn(task.instrument(span));
        self.meters.started(late);
        self.settings.teller.tell(|| Event::Started { id: ticket.id, attempt, late });
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
            leave_at: None,
            is_left: false,
            abort,
        };
        self.check_at = self.check_at.into_iter().chain(running.next_check()).min();
        self.running.insert(running.abort.id(), running);
    }

    /// Looks after what runs: leases to be extended or lost, and jobs that take too long.
    fn check(&mut self, now: Instant) {
        let Settings { lease, abort_after, .. } = self.settings;
        let mut extend: Vec<Vec<(Id, JobLease)>> = vec![Vec::new(); self.parts.len()];
        self.check_at = None;
        for (id, running) in &mut self.running {
            if running.abort_at.is_some_and(|at| at <= now) {
                running.abort.abort();
                running.abort_at = None;
                // At the end all are left together.
                running.leave_at = (running.stop != Some(StopReason::ShutDown)).then_some(now + LAST_POLL);
            }
            if running.leave_at.is_some_and(|at| at <= now) {
                (running.leave_at, running.extend_at, running.is_left) = (None, None, true);
                self.left += 1;
                let RunningJob { part, ticket, attempt, is_last, lease_ends, stop, .. } = *running;
                let settled = PendingAck::dropped(ticket, stop, self.settings.backoff.delay(attempt));
                let lease_ends = Some(lease_ends);
                self.parts[part].settled.push_back(PendingAck { lease_ends, is_last, attempt, ..settled });
                tracing::warn!(queue = %self.queue.name(), job = %ticket.id, "a job that does not end is left behind: it never yields");
            }
            if running.overrun_at.is_some_and(|at| at <= now) {
                running.stop(StopReason::Overrun, now, abort_after);
            }
            if running.extend_at.is_some() && running.lease_ends <= now {
                running.extend_at = None;
                running.stop(StopReason::LeaseLost, now, abort_after);
            }
            // Those that are due soon go along.
            if running.extend_at.is_some_and(|at| at <= now + lease / 12) {
                // Until the answer is there, and again if it is not there by then.
                running.extend_at = Some(now + lease / 6);
                extend[running.part].push((*id, running.ticket));
            }
            self.check_at = self.check_at.into_iter().chain(running.next_check()).min();
        }
        for (part, due) in extend.into_iter().enumerate() {
            for batch in due.chunks(MAX_BATCH) {
                let (ids, tickets): (Vec<_>, Vec<_>) = batch.iter().copied().unzip();
                let (queue, key, time) = (self.queue.clone(), self.parts[part].key, self.call_limit());
                self.calls.spawn(async move {
                    let sent = Instant::now();
                    let result = queue.extend(key, tickets, lease, time).await;
                    Answer::Extended { part, ids, sent, result }
                });
            }
        }
    }
}

impl<T, S, C> Drop for WorkerLoop<T, S, C> {
    fn drop(&mut self) {
        let now = Instant::now();
        for running in self.running.values() {
            self.meters.ended(now.saturating_duration_since(running.started));
        }
        // Nobody knows any more, unless there is another worker, which says so with its next call.
        self.meters.oldest_due(Duration::ZERO);
        // Answers of the service that nobody has looked at, whose `drop` may panic: one by one, since a second panic at once would be an abort.
        while let Some(ended) = self.tasks.try_join_next() {
            discard_joined(ended);
        }
        // For a job that ends on another thread just now.
        discard(mem::take(&mut self.tasks));
    }
}

/// Reads the payload of a job. If it cannot be read, the error is what becomes of the job.
fn open<T, C: Codec<T>>(queue: &DelayQueue<T, C>, claimed: ClaimedJob) -> Result<DecodedJob<T>, AckKind> {
    let ticket = claimed.ticket();
    match catch_unwind(AssertUnwindSafe(|| queue.open(claimed))) {
        Ok(Ok((job, canceller))) => Ok(DecodedJob { ticket, job, canceller }),
        Ok(Err(ending)) => Err(ending),
        Err(panic) => Err(AckKind::Dead { reason: Reason::Undecodable, error: panicked(panic) }),
    }
}

/// Lets others have their turn first. `yield_now` of tokio comes back when this thread has nothing else to do, which is not before the end of a job
/// that blocks it; a task that is woken can be run by another thread.
async fn give_way() {
    let mut has_given_way = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_given_way, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// What a panic has to say.
fn panicked(panic: Box<dyn Any + Send>) -> Arc<str> {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.map_or_else(|| "it panicked".into(), |text| format!("it panicked: {text}").into());
    discard(panic);
    text
}

/// How long to wait from the answer on: `next` counts whole milliseconds of the store's clock, which may have begun a while before.
fn wait(next: Duration, now: SystemTime) -> Duration {
    if next == Claim::MAX_WAIT {
        // Nothing is known of. Many workers need not look at the same time.
        return next - share(next / 5);
    }
    let begun = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().subsec_nanos() % 1_000_000;
    next.saturating_sub(Duration::from_nanos(begun.into()))
}
