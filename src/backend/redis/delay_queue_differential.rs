//! The same for jobs: random pushes, claims, results and changes run on memory, on Redis and on a model of the correct state. Workers may
//! stop at any step.

use std::time::{SystemTime, UNIX_EPOCH};

use super::*;
use crate::delay_queue::store::{
    Ack, AckKind, Admission, Claim, Claimed, DelayQueueStore, Expired, Extended, Finished, JobLease, QueueKey, WorkerId,
};
use crate::delay_queue::{
    Cancelled, Changed, DeadLimits, Due, FailureInfo, JobId, NewJob, Priority, Reason, State, StoredJob, Unique,
    UniqueFor,
};

#[derive(Clone, Debug)]
struct JobStep {
    // The time before the step, in microseconds.
    pause: u64,
    verb: JobVerb,
}

#[derive(Clone, Debug)]
enum JobVerb {
    Push(Vec<Pushing>),
    // The numbers of leases with their results, and how many jobs to claim.
    Claim { finish: Vec<(usize, End)>, limit: usize, lease_ms: u64 },
    Extend { leases: Vec<usize>, lease_ms: u64 },
    Cancel(u32, bool),
    // Cancels the job of the lease with this number, and pushes a job with the same ID.
    PushAgain(usize, bool),
    Reschedule(u32, When),
    Replace(u32, u8),
    Look { state: State, skip: u64, limit: usize },
    Pause(bool),
    Purge(usize, bool),
    ReleaseUnique(u8),
    Replay(Vec<u32>),
    Forget(Vec<u32>),
}

#[derive(Clone, Debug)]
struct Pushing {
    id: u32,
    when: When,
    priority: Priority,
    max_attempts: u16,
    unique: Option<(u8, UniqueFor)>,
    payload: u8,
}

#[derive(Clone, Copy, Debug)]
enum When {
    In(u64),
    // In ms since the start of the trace. May be in the past.
    At(u64),
}

#[derive(Clone, Copy, Debug)]
enum End {
    Done,
    Cancelled,
    Retry(u64),
    Snooze(u64),
    Release,
    Dead(Reason),
}

impl End {
    fn forgets(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled)
    }
}

/// The number of jobs with a name. Those of two runs follow.
const NAMED: u32 = 8;
const RUN: u32 = 16;
const IDS: u32 = NAMED + 2 * RUN;
/// In ms.
const BRIEF: u64 = 20;
const LONGER: u64 = 5_000;
/// Alternately: fewer than there are names, or all but a few of the IDs.
const MAX_JOBS: [u64; 2] = [6, 38];
const DEAD: DeadLimits = DeadLimits { count: 2, age: Duration::from_secs(1) };

fn job_traces() -> impl Strategy<Value = Vec<JobStep>> {
    // Often right at the end of a delay or a lease.
    let pause = prop_oneof![
        8 => Just(0_u64),
        4 => 0..3_000_u64,
        3 => 19_000..21_001_u64,
        1 => 4_999_000..5_001_001_u64,
        1 => 999_000..1_001_001_u64,
    ];
    let delay = || prop_oneof![3 => Just(0_u64), 2 => Just(BRIEF), 1 => 1..4_u64, 1 => Just(LONGER)];
    let when = move || prop_oneof![4 => delay().prop_map(When::In), 1 => (0..20_000_u64).prop_map(When::At)];
    let priority = prop_oneof![3 => Just(Priority::Normal), 1 => Just(Priority::High), 1 => Just(Priority::Low)];
    let span = prop_oneof![
        Just(UniqueFor::WaitingOrRunning),
        Just(UniqueFor::Waiting),
        Just(UniqueFor::Time(Duration::from_millis(BRIEF))),
        Just(UniqueFor::Occurrence(Duration::from_millis(BRIEF))),
    ];
    let unique = prop_oneof![3 => Just(None), 2 => (0..2_u8, span).prop_map(Some)];
    let any_id = || prop_oneof![3 => 0..NAMED, 1 => NAMED..IDS];
    let run = (0..2_u32, when(), any::<u8>()).prop_map(|(run, when, payload)| {
        let pushing = |id| Pushing { id, when, priority: Priority::Normal, max_attempts: 2, unique: None, payload };
        let first = NAMED + run * RUN;
        JobVerb::Push((first..first + RUN).map(pushing).collect())
    });
    let pushing = (any_id(), when(), priority, 1..4_u16, unique, any::<u8>()).prop_map(
        |(id, when, priority, max_attempts, unique, payload)| Pushing {
            id,
            when,
            priority,
            max_attempts,
            unique,
            payload,
        },
    );
    let reason = prop_oneof![Just(Reason::Refused), Just(Reason::Undecodable)];
    let end = prop_oneof![
        3 => Just(End::Done),
        1 => Just(End::Cancelled),
        3 => delay().prop_map(End::Retry),
        2 => delay().prop_map(End::Snooze),
        1 => Just(End::Release),
        1 => reason.prop_map(End::Dead),
    ];
    let finish = prop::collection::vec((0..6_usize, end), 0..4);
    let lease_ms = || prop_oneof![3 => Just(BRIEF), 1 => Just(LONGER)];
    let state = prop_oneof![Just(State::Waiting), Just(State::Running), Just(State::Dead)];
    let ids = || prop::collection::vec(any_id(), 1..4);
    let verb = prop_oneof![
        8 => prop::collection::vec(pushing, 1..4).prop_map(JobVerb::Push),
        4 => run,
        8 => (finish, prop_oneof![4 => 0..4_usize, 1 => 4..40_usize], lease_ms())
            .prop_map(|(finish, limit, lease_ms)| JobVerb::Claim { finish, limit, lease_ms }),
        3 => (prop::collection::vec(0..6_usize, 1..4), lease_ms())
            .prop_map(|(leases, lease_ms)| JobVerb::Extend { leases, lease_ms }),
        3 => (any_id(), any::<bool>()).prop_map(|(id, keeps)| JobVerb::Cancel(id, keeps)),
        3 => (0..3_usize, any::<bool>()).prop_map(|(lease, keeps)| JobVerb::PushAgain(lease, keeps)),
        2 => (any_id(), when()).prop_map(|(id, when)| JobVerb::Reschedule(id, when)),
        1 => (any_id(), any::<u8>()).prop_map(|(id, payload)| JobVerb::Replace(id, payload)),
        3 => (state, prop_oneof![0..3_u64, 3..40_u64], prop_oneof![0..5_usize, 5..40_usize]).prop_map(|(state, skip, limit)| JobVerb::Look { state, skip, limit }),
        1 => prop_oneof![1 => Just(true), 2 => Just(false)].prop_map(JobVerb::Pause),
        1 => (prop_oneof![1..3_usize, 3..40_usize], any::<bool>()).prop_map(|(count, keeps)| JobVerb::Purge(count, keeps)),
        1 => (0..2_u8).prop_map(JobVerb::ReleaseUnique),
        2 => ids().prop_map(JobVerb::Replay),
        1 => ids().prop_map(JobVerb::Forget),
    ];
    let step = (pause, verb).prop_map(|(pause, verb)| JobStep { pause, verb });
    prop::collection::vec(step, 100..250)
}

fn id(number: u32) -> JobId {
    let digit = |place| char::from(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"[place as usize]);
    JobId::from(match number.checked_sub(NAMED) {
        Some(place) => format!("{:025}{}", 0, digit(place)),
        None => format!("job-{number}"),
    })
}

/// A lease as each backend has issued it. Traces count leases backwards from the last one.
#[derive(Clone, Copy)]
struct Tickets {
    of: u32,
    claim: u64,
    memory: JobLease,
    redis: JobLease,
}

/// The expected state of a job. Times are in ms since the start of the trace.
#[derive(Clone, Debug)]
struct ModelJob {
    id: u32,
    place: Place,
    pushed: u64,
    due: u64,
    priority: Priority,
    spent: u16,
    max_attempts: u16,
    unique: Option<(u8, UniqueFor)>,
    reason: Option<Reason>,
    payload: u8,
    // The end of its snooze, while it waits.
    snoozed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Waiting,
    Running { claim: u64, ends: u64 },
    Dead { since: u64 },
}

#[derive(Default)]
struct Model {
    jobs: Vec<ModelJob>,
    // Cancelled jobs that still run, and for each unique key the cancelled job that held it.
    cancelled: Vec<ModelJob>,
    cancelled_keys: [Option<u32>; 2],
    // For each unique key the job that holds it, and until when.
    unique: [Option<(u32, Option<u64>)>; 2],
    is_paused: bool,
    // The token of the last claim with jobs: the time in microseconds, and larger than all tokens before.
    token: u64,
    now_us: u64,
}

impl Model {
    fn now(&self) -> u64 {
        self.now_us / 1_000
    }

    fn after(&self, delay: u64) -> u64 {
        if delay == 0 { self.now() } else { self.now_us.div_ceil(1_000) + delay }
    }

    fn due(&self, when: When) -> u64 {
        match when {
            When::In(delay) => self.after(delay),
            When::At(at) => at.max(self.now()),
        }
    }

    fn find(&mut self, id: u32) -> Option<&mut ModelJob> {
        self.jobs.iter_mut().find(|job| job.id == id)
    }

    fn remove(&mut self, id: u32) {
        self.jobs.retain(|job| job.id != id);
    }

    fn free(&mut self, id: u32) {
        self.release(id, true);
    }

    /// Releases the unique key of a job, and returns it.
    fn release(&mut self, id: u32, keeps: bool) -> Option<usize> {
        let (key, span) = self.find(id)?.unique?;
        let (key, keeps) = (usize::from(key), keeps || matches!(span, UniqueFor::Occurrence(_)));
        let (holder, until) = self.unique[key]?;
        let is_held = until.is_none_or(|until| until > self.now());
        let is_released = holder == id && !(keeps && until.is_some());
        is_released.then(|| self.unique[key] = None).filter(|()| is_held).map(|()| key)
    }

    fn release_unique(&mut self, key: u8) -> bool {
        let holder = self.unique[usize::from(key)].take();
        holder.is_some_and(|(_, until)| until.is_none_or(|until| until > self.now()))
    }

    fn end_cancelled(&mut self, lease: &Tickets) -> bool {
        let holds = |job: &ModelJob| matches!(job.place, Place::Running { claim, .. } if claim == lease.claim);
        let Some(i) = self.cancelled.iter().position(|job| job.id == lease.of && holds(job)) else { return false };
        self.cancelled.remove(i);
        let (now, mut resumed) = (self.now(), vec![lease.of]);
        for (key, of) in self.cancelled_keys.iter_mut().enumerate().filter(|(_, of)| **of == Some(lease.of)) {
            *of = None;
            let held = self.unique[key].filter(|(_, until)| until.is_none_or(|until| until > now));
            resumed.extend(held.map(|(holder, _)| holder));
        }
        for id in resumed {
            if let Some(job) = self.find(id) {
                job.snoozed = None;
            }
        }
        true
    }

    fn is_held_up(&self, job: &ModelJob) -> bool {
        let holds_key = job.unique.is_some_and(|(key, _)| self.cancelled_keys[usize::from(key)].is_some());
        holds_key || self.cancelled.iter().any(|other| other.id == job.id)
    }

    fn push(&mut self, pushing: &Pushing, max_jobs: u64) -> Admission {
        let now = self.now();
        let was_dead = match self.find(pushing.id).map(|job| job.place) {
            Some(Place::Dead { .. }) => true,
            Some(_) => return Admission::Exists(id(pushing.id)),
            None => false,
        };
        if !was_dead && self.jobs.len() as u64 >= max_jobs {
            return Admission::Full;
        }
        if let Some((key, span)) = pushing.unique {
            match self.unique[usize::from(key)] {
                Some((holder, until)) if until.is_none_or(|until| until > now) => return Admission::Exists(id(holder)),
                _ => {}
            }
            let until = matches!(span, UniqueFor::Time(_) | UniqueFor::Occurrence(_)).then(|| self.after(BRIEF));
            self.unique[usize::from(key)] = Some((pushing.id, until));
        }
        self.remove(pushing.id);
        let due = self.due(pushing.when);
        let &Pushing { id, priority, max_attempts, unique, payload, .. } = pushing;
        let (place, reason) = (Place::Waiting, None);
        self.jobs.push(ModelJob {
            id,
            place,
            pushed: now,
            due,
            priority,
            spent: 0,
            max_attempts,
            unique,
            reason,
            payload,
            snoozed: None,
        });
        Admission::New
    }

    fn finish(&mut self, lease: &Tickets, end: End, is_expired: bool) -> Option<Finished> {
        if self.end_cancelled(lease) {
            return Some(if end.forgets() { Finished::Done } else { Finished::Cancelled });
        }
        let (now, after) = (self.now(), |model: &Self, delay| model.after(delay));
        let holds = |place| matches!(place, Place::Running { claim, .. } if claim == lease.claim);
        let due = match end {
            End::Retry(delay) => Some(after(self, delay)),
            _ => None,
        };
        let snoozed = match end {
            End::Snooze(delay) => Some(after(self, delay)),
            _ => None,
        };
        let job = self.find(lease.of).filter(|job| holds(job.place))?;
        if end.forgets() {
            self.release(lease.of, matches!(end, End::Done));
            self.remove(lease.of);
            return Some(Finished::Done);
        }
        (job.place, job.snoozed) = (Place::Waiting, snoozed);
        job.due = due.unwrap_or(job.due);
        let is_dead = match end {
            End::Retry(_) => {
                job.spent += 1;
                job.reason = Some(if is_expired { Reason::LeaseExpired } else { Reason::Failed });
                job.spent >= job.max_attempts
            }
            End::Dead(reason) => {
                job.spent += 1;
                job.reason = Some(reason);
                true
            }
            _ => false,
        };
        if is_dead {
            job.place = Place::Dead { since: now };
            self.free(lease.of);
            return Some(Finished::Dead);
        }
        Some(Finished::Done)
    }

    fn claim(&mut self, finish: &[(Tickets, End)], limit: usize, lease_ms: u64) -> String {
        let finished: Vec<_> = finish.iter().map(|(lease, end)| self.finish(lease, *end, false)).collect();
        let finished: Vec<_> = finished
            .into_iter()
            .zip(finish)
            .map(|(done, (lease, end))| {
                let is_done = end.forgets();
                // A job that was pushed after the lease was issued is another job. The job of the lease is gone.
                let is_other = |job: &&mut ModelJob| is_done && job.pushed * 1_000 > lease.claim;
                let is_there = self.find(lease.of).is_some_and(|job| !is_other(&job));
                done.unwrap_or(if is_there { Finished::Lost } else { Finished::Gone })
            })
            .collect();
        let now = self.now();
        let mut expired = Expired::default();
        if limit > 0 {
            for job in &mut self.jobs {
                job.snoozed = job.snoozed.filter(|until| *until > now);
            }
            let over = self.jobs.iter().chain(&self.cancelled).filter_map(|job| match job.place {
                Place::Running { claim, ends } if ends <= now => Some((job.id, claim)),
                _ => None,
            });
            let none = JobLease { id: id(0), token: 0, unique: None };
            for (of, claim) in over.collect::<Vec<_>>() {
                let finished = self.finish(&Tickets { of, claim, memory: none, redis: none }, End::Retry(0), true);
                expired.jobs += 1;
                expired.dead += usize::from(finished == Some(Finished::Dead));
            }
            let dead = |job: &ModelJob| match job.place {
                Place::Dead { since } => Some((since, id(job.id), job.id)),
                _ => None,
            };
            let mut all_dead: Vec<_> = self.jobs.iter().filter_map(dead).collect();
            all_dead.sort_unstable();
            let kept = all_dead.iter().filter(|(since, ..)| *since + 1_000 > now).count().min(DEAD.count as usize);
            for (.., id) in &all_dead[..all_dead.len() - kept] {
                self.remove(*id);
            }
        }
        let is_ready =
            |job: &&ModelJob| job.place == Place::Waiting && job.snoozed.is_none() && job.due <= now && !self.is_paused;
        let mut order: Vec<_> = self.jobs.iter().filter(is_ready).collect();
        order.sort_by_key(|job| (job.priority as u8, job.due, id(job.id)));
        let (mut taken, mut put_off) = (Vec::new(), Vec::new());
        for job in order {
            if taken.len() < limit {
                let list = if self.is_held_up(job) { &mut put_off } else { &mut taken };
                list.push(job.id);
            }
        }
        for job in self.jobs.iter_mut().filter(|job| put_off.contains(&job.id)) {
            job.snoozed = Some(now + LONGER);
        }
        if !taken.is_empty() {
            self.token = (self.token + 1).max(self.now_us);
        }
        let (claim, ends) = (self.token, self.after(lease_ms));
        let mut seen = Vec::new();
        for number in taken {
            let job = self.find(number).unwrap();
            job.place = Place::Running { claim, ends };
            seen.push(job.seen());
            if matches!(job.unique, Some((_, UniqueFor::Waiting))) {
                self.free(number);
            }
        }
        let next = self.jobs.iter().chain(&self.cancelled).filter_map(|job| match job.place {
            Place::Waiting => (!self.is_paused).then_some(job.ready()),
            Place::Running { ends, .. } => Some(ends),
            Place::Dead { .. } => None,
        });
        let next = next.min().map_or(5_000, |next| next.saturating_sub(now).min(5_000));
        let waiting = self.jobs.iter().filter(|job| job.place == Place::Waiting);
        let oldest = waiting.map(ModelJob::ready).min().and_then(|due| now.checked_sub(due)).map(Duration::from_millis);
        format!("{finished:?} {seen:?} more {} next {next} oldest {oldest:?} {expired:?}", next == 0)
    }

    fn extend(&mut self, lease: &Tickets, lease_ms: u64) -> Extended {
        let until = self.after(lease_ms);
        let lasts = |jobs: &mut [ModelJob]| {
            let states = jobs.iter_mut().filter(|job| job.id == lease.of).map(|job| &mut job.place);
            let mut ends = states.filter_map(|place| match place {
                Place::Running { claim, ends } if *claim == lease.claim => Some(ends),
                _ => None,
            });
            ends.next().map(|ends| *ends = until).is_some()
        };
        if lasts(&mut self.cancelled) {
            return Extended::Cancelled;
        }
        if lasts(&mut self.jobs) { Extended::Held } else { Extended::Lost }
    }

    fn cancel(&mut self, number: u32, keeps: bool) -> Cancelled {
        let is_cancelled = self.is_cancelled(number);
        match self.find(number).cloned() {
            None if is_cancelled => Cancelled::Notified,
            None => Cancelled::Missing,
            Some(ModelJob { place: Place::Dead { .. }, .. }) => Cancelled::Dead,
            Some(job @ ModelJob { place: Place::Running { .. }, .. }) => {
                if let Some(key) = self.release(number, keeps) {
                    self.cancelled_keys[key] = Some(number);
                }
                self.remove(number);
                self.cancelled.push(job);
                Cancelled::Notified
            }
            Some(_) => {
                self.release(number, keeps);
                self.remove(number);
                Cancelled::Removed
            }
        }
    }

    fn is_cancelled(&self, number: u32) -> bool {
        self.cancelled.iter().any(|job| job.id == number)
    }

    fn change(&mut self, number: u32, change: impl FnOnce(&mut ModelJob)) -> Changed {
        let is_cancelled = self.is_cancelled(number);
        match self.find(number) {
            None if is_cancelled => Changed::Running,
            None => Changed::Missing,
            Some(ModelJob { place: Place::Dead { .. }, .. }) => Changed::Dead,
            Some(ModelJob { place: Place::Running { .. }, .. }) => Changed::Running,
            Some(job) => {
                change(job);
                Changed::Done
            }
        }
    }

    fn look(&self, state: State, skip: u64, limit: usize) -> String {
        let all = || self.jobs.iter().chain(&self.cancelled);
        let mut order: Vec<_> = all().filter(|job| job.state() == state).collect();
        order.sort_by_key(|job| match job.place {
            Place::Waiting => (job.group(), job.ready(), id(job.id)),
            Place::Running { claim, ends } => (ends, claim, id(job.id)),
            Place::Dead { since } => (since, 0, id(job.id)),
        });
        let seen: Vec<_> = order.iter().skip(skip as usize).take(limit).map(|job| job.seen()).collect();
        let count = |state| all().filter(|job| job.state() == state).count();
        let due = |job: &&ModelJob| job.place == Place::Waiting && job.ready() <= self.now();
        let oldest = self.jobs.iter().filter(due).map(|job| self.now() - job.ready()).max();
        let counts =
            [count(State::Waiting), self.jobs.iter().filter(due).count(), count(State::Running), count(State::Dead)];
        format!("{seen:?} {counts:?} {oldest:?} {}", self.is_paused)
    }

    fn purge(&mut self, limit: usize, keeps: bool) -> usize {
        let mut order: Vec<_> = self.jobs.iter().filter(|job| job.place == Place::Waiting).collect();
        order.sort_by_key(|job| (job.group(), job.ready(), id(job.id)));
        let gone: Vec<_> = order.into_iter().take(limit).map(|job| job.id).collect();
        for id in &gone {
            self.release(*id, keeps);
            self.remove(*id);
        }
        gone.len()
    }

    fn revive(&mut self, number: u32) -> bool {
        let now = self.now();
        let Some(job) = self.find(number).filter(|job| matches!(job.place, Place::Dead { .. })) else { return false };
        if let Some((key, UniqueFor::WaitingOrRunning)) = job.unique {
            let holder = &mut self.unique[usize::from(key)];
            match *holder {
                Some((holder, None)) if holder != number => return false,
                Some((_, Some(until))) if until > now => return false,
                _ => *holder = Some((number, None)),
            }
        }
        let Some(job) = self.find(number) else { return false };
        (job.place, job.due, job.spent, job.reason) = (Place::Waiting, now, 0, None);
        true
    }
}

impl ModelJob {
    fn state(&self) -> State {
        match self.place {
            Place::Waiting => State::Waiting,
            Place::Running { .. } => State::Running,
            Place::Dead { .. } => State::Dead,
        }
    }

    /// The time from which it can be claimed.
    fn ready(&self) -> u64 {
        self.snoozed.unwrap_or(self.due)
    }

    /// The position in the order of waiting jobs: by priority, with snoozed jobs last.
    fn group(&self) -> u64 {
        if self.snoozed.is_some() { 3 } else { self.priority as u64 }
    }

    fn seen(&self) -> String {
        let attempt = self.spent + u16::from(self.state() == State::Running);
        let unique = self.unique.map(|(key, span)| Unique { key: u32::from(key).into(), span });
        format!(
            "{} {:?} {attempt}/{} {:?} pushed {} due {} {unique:?} {:?} {}",
            id(self.id),
            self.state(),
            self.max_attempts,
            self.priority,
            self.pushed,
            self.ready(),
            self.reason,
            self.payload
        )
    }
}

fn seen(job: &StoredJob, start: SystemTime) -> String {
    let ms = |instant: SystemTime| instant.duration_since(start).unwrap().as_millis();
    let StoredJob { id, state, attempt, max_attempts, priority, enqueued_at, due_at, unique, failure, payload, .. } =
        job;
    let reason = failure.as_ref().map(|FailureInfo { reason, .. }| *reason);
    format!(
        "{id} {state:?} {attempt}/{max_attempts} {priority:?} pushed {} due {} {unique:?} {reason:?} {}",
        ms(*enqueued_at),
        ms(*due_at),
        payload[0]
    )
}

fn run_job_trace(trace: &[JobStep], max_jobs: u64, pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    let queue = QueueKey::new(format!("trace-{turn}"));
    let worker = WorkerId::random().unwrap();
    let starts = [pair.memory.started_at(), UNIX_EPOCH + Duration::from_micros(START_US)];
    let mut model = Model::default();
    let mut leases: Vec<Tickets> = Vec::new();
    let ms = Duration::from_millis;
    for (number, step) in trace.iter().enumerate() {
        pair.pause(Duration::from_micros(step.pause));
        model.now_us += step.pause;
        let pick = |i: &usize| leases.len().checked_sub(i + 1).map(|i| leases[i]);
        let due = |when: When| match when {
            When::In(delay) => [Due::In(ms(delay)); 2],
            When::At(at) => starts.map(|start| Due::At(start + ms(at))),
        };
        let (expected, memory, redis) = match &step.verb {
            JobVerb::Push(pushing) => {
                let [memory, redis] = [0, 1].map(|backend: usize| {
                    let jobs = pushing.iter().map(|pushing| NewJob {
                        due: due(pushing.when)[backend],
                        priority: pushing.priority,
                        max_attempts: pushing.max_attempts,
                        unique: pushing.unique.map(|(key, span)| Unique { key: u32::from(key).into(), span }),
                        ..NewJob::new(id(pushing.id), [pushing.payload])
                    });
                    jobs.collect::<Vec<_>>()
                });
                let mut expected = vec![None; pushing.len()];
                for &priority in Priority::ALL {
                    for (i, pushing) in pushing.iter().enumerate().filter(|(_, job)| job.priority == priority) {
                        expected[i] = Some(model.push(pushing, max_jobs));
                    }
                }
                let expected: Vec<_> = expected.into_iter().flatten().collect();
                let (memory, redis) =
                    pair.both(|to| to.push(&queue, &memory, max_jobs), |to| to.push(&queue, &redis, max_jobs));
                (format!("{expected:?}"), format!("{memory:?}"), format!("{redis:?}"))
            }
            JobVerb::Claim { finish, limit, lease_ms } => {
                let finish: Vec<_> = finish.iter().filter_map(|(i, end)| Some((pick(i)?, *end))).collect();
                let kind = |end: &End| match *end {
                    End::Done => AckKind::Done,
                    End::Cancelled => AckKind::Cancelled,
                    End::Retry(delay) => AckKind::Retry { delay: ms(delay), error: "why".into() },
                    End::Snooze(delay) => AckKind::Snooze { delay: ms(delay) },
                    End::Release => AckKind::Release,
                    End::Dead(reason) => AckKind::Dead { reason, error: "why".into() },
                };
                // No worker sends a lease twice, and the order of two results is unspecified.
                let mut finish_once: Vec<(Tickets, End)> = Vec::new();
                for (lease, end) in finish {
                    if finish_once.iter().all(|(other, _)| (other.of, other.claim) != (lease.of, lease.claim)) {
                        finish_once.push((lease, end));
                    }
                }
                let finishes = |of: fn(&Tickets) -> JobLease| {
                    let finishes = finish_once.iter().map(|(leases, end)| Ack { lease: of(leases), kind: kind(end) });
                    finishes.collect::<Vec<_>>()
                };
                let (in_memory, in_redis) = (finishes(|leases| leases.memory), finishes(|leases| leases.redis));
                let claim = Claim { worker, limit: *limit, lease: ms(*lease_ms), dead: DEAD };
                let (memory, redis) =
                    pair.both(|to| to.claim(&queue, &in_memory, &claim), |to| to.claim(&queue, &in_redis, &claim));
                let expected = model.claim(&finish_once, *limit, *lease_ms);
                let results = [&memory, &redis].map(|claimed| {
                    let start = if std::ptr::eq(claimed, &memory) { starts[0] } else { starts[1] };
                    let jobs: Vec<_> = claimed.jobs.iter().map(|claimed| seen(&claimed.job, start)).collect();
                    // Without a future event, memory returns no time, and Redis returns the polling interval.
                    let next = claimed.next.map_or(5_000, |next| next.as_micros().div_ceil(1_000).min(5_000));
                    let Claimed { finished, more, oldest_due, expired, .. } = claimed;
                    format!("{finished:?} {jobs:?} more {more} next {next} oldest {oldest_due:?} {expired:?}")
                });
                for (memory, redis) in memory.jobs.iter().zip(&redis.jobs) {
                    let of = (0..IDS).find(|number| id(*number) == memory.job.id).unwrap();
                    let larger = |of_backend: fn(&Tickets) -> JobLease, token| {
                        leases.iter().filter(|leases| leases.of == of).all(|t| of_backend(t).token < token)
                    };
                    prop_assert!(larger(|leases| leases.memory, memory.token) && larger(|t| t.redis, redis.token));
                    let (memory, redis) = (memory.lease(), redis.lease());
                    leases.push(Tickets { of, claim: model.token, memory, redis });
                }
                let [memory, redis] = results;
                (expected, memory, redis)
            }
            JobVerb::Extend { leases, lease_ms } => {
                let leases: Vec<_> = leases.iter().filter_map(pick).collect();
                let expected: Vec<_> = leases.iter().map(|lease| model.extend(lease, *lease_ms)).collect();
                let of = |of: fn(&Tickets) -> JobLease| leases.iter().map(of).collect::<Vec<_>>();
                let (in_memory, in_redis) = (of(|leases| leases.memory), of(|leases| leases.redis));
                let (memory, redis) = pair.both(
                    |to| to.extend(&queue, &in_memory, ms(*lease_ms)),
                    |to| to.extend(&queue, &in_redis, ms(*lease_ms)),
                );
                (format!("{expected:?}"), format!("{memory:?}"), format!("{redis:?}"))
            }
            &JobVerb::Cancel(of, keeps) => {
                let job = id(of);
                let (memory, redis) =
                    pair.both(|to| to.cancel(&queue, &job, keeps), |to| to.cancel(&queue, &job, keeps));
                (format!("{:?}", model.cancel(of, keeps)), format!("{memory:?}"), format!("{redis:?}"))
            }
            &JobVerb::PushAgain(lease, keeps) => {
                let Some(of) = pick(&lease).map(|lease| lease.of) else { continue };
                let (job, when) = (id(of), When::In(0));
                let cancelled = pair.both(|to| to.cancel(&queue, &job, keeps), |to| to.cancel(&queue, &job, keeps));
                let unique = model.cancelled.iter().find(|job| job.id == of).and_then(|job| job.unique);
                let pushing = Pushing { id: of, when, priority: Priority::Normal, max_attempts: 2, unique, payload: 7 };
                let expected = (model.cancel(of, keeps), model.push(&pushing, u64::MAX));
                let unique = unique.map(|(key, span)| Unique { key: u32::from(key).into(), span });
                let new = [NewJob { max_attempts: 2, unique, ..NewJob::new(job, [7]) }];
                let pushed = pair.both(|to| to.push(&queue, &new, u64::MAX), |to| to.push(&queue, &new, u64::MAX));
                let results = |cancelled, pushed: Vec<Admission>| format!("{:?}", (cancelled, pushed[0]));
                (format!("{expected:?}"), results(cancelled.0, pushed.0), results(cancelled.1, pushed.1))
            }
            &JobVerb::Reschedule(of, when) => {
                let (job, [in_memory, in_redis], new) = (id(of), due(when), model.due(when));
                let (memory, redis) =
                    pair.both(|to| to.reschedule(&queue, &job, in_memory), |to| to.reschedule(&queue, &job, in_redis));
                let expected = model.change(of, |job| (job.due, job.snoozed) = (new, None));
                (format!("{expected:?}"), format!("{memory:?}"), format!("{redis:?}"))
            }
            &JobVerb::Replace(of, payload) => {
                let (job, bytes) = (id(of), [payload]);
                let (memory, redis) =
                    pair.both(|to| to.replace(&queue, &job, &bytes), |to| to.replace(&queue, &job, &bytes));
                let expected = model.change(of, |job| job.payload = payload);
                (format!("{expected:?}"), format!("{memory:?}"), format!("{redis:?}"))
            }
            &JobVerb::Look { state, skip, limit } => {
                let list =
                    pair.both(|to| to.list(&queue, state, skip, limit), |to| to.list(&queue, state, skip, limit));
                let counts = pair.both(|to| to.counts(&queue), |to| to.counts(&queue));
                let results = [(list.0, counts.0, starts[0]), (list.1, counts.1, starts[1])];
                let [memory, redis] = results.map(|(jobs, counts, start)| {
                    let jobs: Vec<_> = jobs.iter().map(|job| seen(job, start)).collect();
                    let numbers = [counts.waiting, counts.due, counts.running, counts.dead];
                    let oldest = counts.oldest_due.map(|age| age.as_millis());
                    format!("{jobs:?} {numbers:?} {oldest:?} {}", counts.is_paused)
                });
                (model.look(state, skip, limit), memory, redis)
            }
            &JobVerb::Pause(is_paused) => {
                pair.both(|to| to.pause(&queue, is_paused), |to| to.pause(&queue, is_paused));
                model.is_paused = is_paused;
                continue;
            }
            &JobVerb::Purge(limit, keeps) => {
                let (memory, redis) =
                    pair.both(|to| to.purge(&queue, limit, keeps), |to| to.purge(&queue, limit, keeps));
                (model.purge(limit, keeps).to_string(), memory.to_string(), redis.to_string())
            }
            &JobVerb::ReleaseUnique(number) => {
                let key = u32::from(number).into();
                let (memory, redis) =
                    pair.both(|to| to.release_unique(&queue, &key), |to| to.release_unique(&queue, &key));
                (model.release_unique(number).to_string(), memory.to_string(), redis.to_string())
            }
            JobVerb::Replay(of) => {
                let ids: Vec<_> = of.iter().map(|of| id(*of)).collect();
                let (memory, redis) = pair.both(|to| to.replay(&queue, &ids), |to| to.replay(&queue, &ids));
                let expected: Vec<_> = of.iter().map(|of| model.revive(*of)).collect();
                (format!("{expected:?}"), format!("{memory:?}"), format!("{redis:?}"))
            }
            JobVerb::Forget(of) => {
                let ids: Vec<_> = of.iter().map(|of| id(*of)).collect();
                let (memory, redis) = pair.both(|to| to.forget(&queue, &ids), |to| to.forget(&queue, &ids));
                let forget = |of: &u32| {
                    let is_dead = model.find(*of).is_some_and(|job| job.state() == State::Dead);
                    if is_dead {
                        model.release(*of, false);
                        model.remove(*of);
                    }
                    is_dead
                };
                let expected: Vec<_> = of.iter().map(forget).collect();
                (format!("{expected:?}"), format!("{memory:?}"), format!("{redis:?}"))
            }
        };
        prop_assert_eq!(&memory, &expected, "memory at step {}: {:?}", number, step);
        prop_assert_eq!(&redis, &expected, "redis at step {}: {:?}", number, step);
    }
    pair.check_expiries();
    Ok(())
}

#[test]
fn memory_and_redis_agree_with_model_of_jobs() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = config(60);
    let outcome = TestRunner::new(config).run(&(0..2_usize, job_traces()), |(room, trace)| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.len());
        run_job_trace(&trace, MAX_JOBS[room], &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS / 2, "only {} steps were compared", steps.get());
}
