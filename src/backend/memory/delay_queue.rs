use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as SystemInstant, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::Instant;

use super::MemoryBackend;
use crate::delay_queue::{
    Admission, Cancelled, Changed, Claim, Claimed, ClaimedJob, Counts, DeadLimits, DelayQueueStore, Due, Ending,
    Expired, Extended, Finish, Finished, JobId, MAX_BATCH, NewJob, Note, Priority, QueueKey, Reason, State, StoredJob,
    Ticket, Unique, UniqueFor, WorkerId,
};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::{Scope, Wakeups};

/// How many bytes there is room for with each job, on the average.
const JOB_SHARE: usize = 1_024;
/// As in Redis: how many leases that have ended come back in one call, and how many dead jobs go.
const RECLAIMED: usize = 64;
const FORGOTTEN: u64 = 320;
/// By how much the clock of the system is somewhere else than expected once it was set, or stood still: more than reading two clocks takes.
const CLOCK_STEP: Duration = Duration::from_secs(1);
/// How many bytes are claimed in one call, or a few jobs more.
const CLAIMED_BYTES: usize = 1 << 20;

/// The queues of this process. A queue is in here as long as it has jobs, holds unique keys, is paused, or somebody waits for it.
pub(super) struct QueueTable {
    queues: Mutex<Queues>,
    start: Start,
    len: AtomicUsize,
    // Unique keys that are held for a time.
    held: AtomicUsize,
    bytes: AtomicUsize,
    capacity: usize,
}

/// The date at some instant, from which all others are counted.
#[derive(Clone, Copy)]
struct Start {
    date: Duration,
    instant: Instant,
    // By the clock of the system, which no test pauses.
    system: SystemInstant,
}

#[derive(Default)]
struct Queues {
    all: HashMap<QueueKey, Queue>,
    // When the first of the unique keys that a queue holds for a time is over, and the name and the part of the queue. A queue that nobody
    // uses any more is found by it.
    ends: BTreeSet<(u64, Box<str>, u16)>,
    // Dead jobs, and the bytes of those.
    dead: usize,
    dead_bytes: usize,
    // The last one. One for all queues: a queue that is forgotten and comes again must not repeat what it has given out.
    token: u64,
}

/// A time in ms since 1970, and an id: jobs of the same time are in the order of their ids.
type Line = (u64, JobId);

#[derive(Default)]
struct Queue {
    jobs: HashMap<JobId, Record>,
    // By priority, the highest first.
    due: [BTreeSet<Line>; 3],
    // By when they end, then by token.
    leases: BTreeSet<(u64, u64, JobId)>,
    dead: BTreeSet<Line>,
    unique: HashMap<Key, Holder>,
    // Unique keys that are held for a time, by its end.
    unique_ends: BTreeSet<(u64, Box<str>)>,
    // Of all payloads and headers, and of those of dead jobs.
    bytes: usize,
    dead_bytes: usize,
    is_paused: bool,
    // The last one.
    token: u64,
    wake: Option<watch::Sender<()>>,
}

/// Who has a unique key, and until when it is held whatever becomes of the job.
struct Holder {
    id: JobId,
    until: Option<u64>,
}

struct Record {
    // With the attempts that are over.
    job: StoredJob,
    place: Place,
    due: u64,
}

#[derive(Clone, Copy)]
enum Place {
    Waiting,
    Running { token: u64, ends: u64, is_cancelled: bool },
    Dead { since: u64 },
}

/// The time of one call: the last whole millisecond, and the one from which delays and leases count.
#[derive(Clone, Copy)]
struct Now {
    us: u64,
    ms: u64,
    later: u64,
    // Larger than any that was given out.
    token: u64,
    start: Start,
}

impl Start {
    fn now() -> Self {
        let date = Duration::from_millis(since_1970(SystemTime::now()).as_millis() as u64);
        Self { date, instant: Instant::now(), system: SystemInstant::now() }
    }

    /// In µs since 1970.
    fn us(&self) -> u64 {
        (self.date + self.instant.elapsed()).as_micros() as u64
    }

    /// What an instant is for the queues, since 1970. The date is not read anew for them: where the machine was suspended or its clock was set,
    /// whoever names an instant means another one.
    fn instant(&self, instant: SystemTime) -> Duration {
        // In this order, so that a pause in between makes nothing early.
        let (date, instant) = (since_1970(SystemTime::now()), since_1970(instant));
        let expected = self.date + self.system.elapsed();
        match date.abs_diff(expected) {
            step if step < CLOCK_STEP => instant,
            step if date > expected => instant.saturating_sub(step),
            step => instant.saturating_add(step),
        }
    }
}

impl Now {
    /// When something is due, never early.
    fn due(self, due: Due) -> u64 {
        match due {
            Due::In(delay) if delay.is_zero() => self.ms,
            Due::In(delay) => self.later + millis(delay.min(Due::MAX_DELAY)),
            Due::At(instant) => millis(self.start.instant(instant)).max(self.ms),
        }
    }
}

impl Record {
    /// What there is to see of it.
    fn view(&self) -> StoredJob {
        let (state, running) = match self.place {
            Place::Waiting => (State::Waiting, 0),
            Place::Running { .. } => (State::Running, 1),
            Place::Dead { .. } => (State::Dead, 0),
        };
        let attempt = self.job.attempt.saturating_add(running);
        StoredJob { state, attempt, due_at: instant(self.due), ..self.job.clone() }
    }

    fn is_held_by(&self, ticket: &Ticket) -> bool {
        matches!(self.place, Place::Running { token, .. } if token == ticket.token)
    }

    /// Whether it was pushed after this ticket was given out, so that it is another job than the one of that.
    fn is_newer(&self, ticket: &Ticket) -> bool {
        since_1970(self.job.enqueued_at).as_micros() > ticket.token.into()
    }

    fn size(&self) -> usize {
        self.job.payload.len() + self.job.headers.size()
    }
}

impl QueueTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            queues: Mutex::default(),
            start: Start::now(),
            len: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            capacity,
        }
    }

    /// The queues are changed in steps that do not panic, so what a poisoned lock guards is still whole.
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with a queue, and forgets it if there is nothing left to know of it.
    fn with<T>(&self, key: &QueueKey, verb: impl FnOnce(&mut Queue, Now) -> T) -> T {
        self.change(&mut self.queues(), key, verb)
    }

    fn change<T>(&self, queues: &mut Queues, key: &QueueKey, verb: impl FnOnce(&mut Queue, Now) -> T) -> T {
        // Whoever has the lock is no earlier than who had it before.
        let us = self.start.us();
        let token = us.max(queues.token + 1);
        let now = Now { us, ms: us / 1_000, later: us.div_ceil(1_000), token, start: self.start };
        let queue = queues.all.entry(*key).or_default();
        let (len, held, bytes, end) = (queue.jobs.len(), queue.unique_ends.len(), queue.bytes, queue.first_end());
        let (dead, dead_bytes) = (queue.dead.len(), queue.dead_bytes);
        let answer = verb(queue, now);
        queues.token = queues.token.max(queue.token);
        self.len.fetch_add(queue.jobs.len().wrapping_sub(len), Ordering::Relaxed);
        self.held.fetch_add(queue.unique_ends.len().wrapping_sub(held), Ordering::Relaxed);
        self.bytes.fetch_add(queue.bytes.wrapping_sub(bytes), Ordering::Relaxed);
        queues.dead = queues.dead + queue.dead.len() - dead;
        queues.dead_bytes = queues.dead_bytes + queue.dead_bytes - dead_bytes;
        let new_end = queue.first_end();
        if queue.is_over() {
            queues.all.remove(key);
        }
        if new_end != end {
            let line = |end| (end, Box::from(key.name().as_str()), key.part());
            end.map(|end| queues.ends.remove(&line(end)));
            queues.ends.extend(new_end.map(line));
        }
        answer
    }

    fn push(&self, key: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        let mut queues = self.queues();
        // Besides those that take the room of these jobs, a few unique keys whose time is over go with each that comes.
        let now_ms = self.start.us() / 1_000;
        let wanted = |queues: &Queues| queues.wants(key, jobs, max_jobs, now_ms);
        let (new, _) = wanted(&queues);
        self.sweep(&mut queues, self.excess(new) + 2 * jobs.len());
        // A dead job that is forgotten may be one that is pushed again, which takes room then.
        self.make_room(&mut queues, wanted)?;
        Ok(self.change(&mut queues, key, |queue, now| {
            let mut admissions = vec![Admission::Full; jobs.len()];
            for &priority in Priority::ALL {
                for (i, job) in jobs.iter().enumerate().filter(|(_, job)| job.priority == priority) {
                    admissions[i] = queue.push(job, max_jobs, now);
                }
            }
            admissions
        }))
    }

    /// Forgets some unique keys whose time is over, those that ended first, of whichever queues: there may be nobody else who ever asks for
    /// those.
    fn sweep(&self, queues: &mut Queues, most: usize) {
        let mut left = most;
        while left > 0
            && let Some((until, name, part)) = queues.ends.first()
            && *until <= self.start.us() / 1_000
        {
            let Some(name) = Key::stored(name) else {
                queues.ends.pop_first();
                continue;
            };
            let key = QueueKey::new(name).with_part(*part);
            left -= self.change(queues, &key, |queue, now| queue.sweep(left, now)).clamp(1, left);
        }
    }

    /// How many jobs and unique keys there are.
    fn kept(&self) -> usize {
        self.len.load(Ordering::Relaxed) + self.held.load(Ordering::Relaxed)
    }

    /// By how many there would be too many jobs and unique keys with so many jobs more.
    fn excess(&self, new: usize) -> usize {
        if new > 0 { (self.kept() + new).saturating_sub(self.capacity) } else { 0 }
    }

    /// By how much there would be too much with so many bytes more.
    fn excess_bytes(&self, bytes: usize) -> usize {
        let room = self.capacity.saturating_mul(JOB_SHARE);
        if bytes > 0 { (self.bytes.load(Ordering::Relaxed) + bytes).saturating_sub(room) } else { 0 }
    }

    /// Makes sure that there is room for so many jobs and bytes as are wanted. As long as dead jobs have more than half of it some are forgotten:
    /// the oldest of the queue that has the most of them.
    fn make_room(&self, queues: &mut Queues, wanted: impl Fn(&Queues) -> (usize, usize)) -> Result<(), StoreError> {
        loop {
            let (new, bytes) = wanted(queues);
            let (excess, excess_bytes) = (self.excess(new), self.excess_bytes(bytes));
            if excess == 0 && excess_bytes == 0 {
                return Ok(());
            }
            let half_of_bytes = self.capacity.saturating_mul(JOB_SHARE) / 2;
            // Nothing is forgotten for what has no room all the same.
            if excess > queues.dead.saturating_sub(self.capacity / 2)
                || excess_bytes > queues.dead_bytes.saturating_sub(half_of_bytes)
            {
                return Err(no_room());
            }
            let size = |queue: &Queue| if excess_bytes > 0 { queue.dead_bytes } else { queue.dead.len() };
            let Some((&largest, _)) = queues.all.iter().max_by_key(|(_, queue)| size(queue)) else {
                return Err(no_room());
            };
            self.change(queues, &largest, |queue, _| queue.forget_oldest(excess, excess_bytes));
        }
    }

    fn replace(&self, key: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        let mut queues = self.queues();
        let record = queues.all.get(key).and_then(|queue| queue.jobs.get(id));
        let record = record.filter(|record| matches!(record.place, Place::Waiting));
        let larger = record.map_or(0, |record| payload.len().saturating_sub(record.job.payload.len()));
        self.make_room(&mut queues, |_| (0, larger))?;
        Ok(self.change(&mut queues, key, |queue, _| {
            queue.change(id, |queue| {
                if let Some(record) = queue.jobs.get_mut(id) {
                    queue.bytes = queue.bytes + payload.len() - record.job.payload.len();
                    record.job.payload = payload.into();
                }
            })
        }))
    }
}

fn no_room() -> StoreError {
    StoreError::out_of_memory("more jobs are kept than the memory backend has room for")
}

#[cfg(test)]
impl MemoryBackend {
    /// From when the times of queues count.
    pub(crate) fn started_at(&self) -> SystemTime {
        UNIX_EPOCH + self.inner.queues.start.date
    }
}

impl Queues {
    /// How many of these jobs would be more than there are, and by how much there would be more bytes. What is there already, has a unique
    /// key that is held or comes to a queue that is full takes no room, be it for those before it, and what takes the place of a dead job takes no
    /// more than it is larger.
    fn wants(&self, key: &QueueKey, jobs: &[NewJob], max_jobs: u64, now_ms: u64) -> (usize, usize) {
        let known = self.all.get(key);
        let mut room = max_jobs.saturating_sub(known.map_or(0, |queue| queue.jobs.len() as u64));
        let is_held = |key: &Key| known.is_some_and(|queue| queue.holder(key, now_ms).is_some());
        // What comes before others in this push.
        let (mut ids, mut keys) = (HashSet::new(), HashSet::new());
        let (mut new, mut bytes) = (0, 0);
        for job in jobs {
            let record = known.and_then(|queue| queue.jobs.get(&job.id));
            let is_there = record.is_some_and(|record| !matches!(record.place, Place::Dead { .. }));
            let is_refused = is_there || ids.contains(&job.id) || (record.is_none() && room == 0);
            let key = job.unique.map(|unique| unique.key);
            if is_refused || key.is_some_and(|key| is_held(&key) || keys.contains(&key)) {
                continue;
            }
            // One alone is before nobody.
            if jobs.len() > 1 {
                ids.insert(job.id);
                keys.extend(key);
            }
            match record {
                Some(dead) => bytes += job.size().saturating_sub(dead.size()),
                None => (new, bytes, room) = (new + 1, bytes + job.size(), room - 1),
            }
        }
        (new, bytes)
    }
}

impl Queue {
    fn is_over(&self) -> bool {
        let is_wanted = self.wake.as_ref().is_some_and(|wake| wake.receiver_count() > 0);
        let is_empty = self.jobs.is_empty() && self.unique.is_empty() && self.unique_ends.is_empty();
        is_empty && !self.is_paused && !is_wanted
    }

    /// When the first of the unique keys that are held for a time is over.
    fn first_end(&self) -> Option<u64> {
        self.unique_ends.first().map(|(until, _)| *until)
    }

    /// Wakes those who wait.
    fn wake(&self) {
        if let Some(wake) = &self.wake {
            wake.send_replace(());
        }
    }

    /// Who keeps others out that have this unique key.
    fn holder(&self, key: &Key, now_ms: u64) -> Option<&Holder> {
        self.unique.get(key).filter(|holder| holder.until.is_none_or(|until| until > now_ms))
    }

    fn push(&mut self, job: &NewJob, max_jobs: u64, now: Now) -> Admission {
        let was_dead = match self.jobs.get(&job.id).map(|record| record.place) {
            Some(Place::Waiting | Place::Running { .. }) => return Admission::Exists(job.id),
            Some(Place::Dead { .. }) => true,
            None => false,
        };
        if !was_dead && self.jobs.len() as u64 >= max_jobs {
            return Admission::Full;
        }
        if let Some(unique) = job.unique {
            if let Some(holder) = self.holder(&unique.key, now.ms) {
                return Admission::Exists(holder.id);
            }
            let until = match unique.span {
                UniqueFor::Time(time) => Some(now.later + millis(time.min(Due::MAX_DELAY)).max(1)),
                UniqueFor::WaitingOrRunning | UniqueFor::Waiting => None,
            };
            self.unique.insert(unique.key, Holder { id: job.id, until });
            self.unique_ends.extend(until.map(|until| (until, unique.key.as_str().into())));
        }
        if was_dead {
            self.remove(&job.id);
        }
        let due = now.due(job.due);
        let stored = StoredJob::new(job, instant(now.ms), instant(due));
        self.bytes += job.size();
        self.jobs.insert(job.id, Record { job: stored, place: Place::Waiting, due });
        self.wait(&job.id, due);
        Admission::New
    }

    /// Forgets some unique keys whose time is over. Answers how many those were.
    fn sweep(&mut self, most: usize, now: Now) -> usize {
        for swept in 0..most {
            let is_over = self.first_end().is_some_and(|until| until <= now.ms);
            let first = if is_over { self.unique_ends.pop_first() } else { None };
            let Some((until, text)) = first else { return swept };
            if let Some(key) = Key::stored(&text)
                && self.unique.get(&key).is_some_and(|holder| holder.until == Some(until))
            {
                self.unique.remove(&key);
            }
        }
        most
    }

    /// Lets a job wait until it is due.
    fn wait(&mut self, id: &JobId, due: u64) {
        let soonest = self.due.iter().filter_map(|due| due.first()).map(|(due, _)| *due).min();
        if let Some(record) = self.jobs.get_mut(id) {
            (record.place, record.due) = (Place::Waiting, due);
            self.due[record.job.priority as usize].insert((due, *id));
            if soonest.is_none_or(|soonest| due < soonest) {
                self.wake();
            }
        }
    }

    /// Takes a job out of where it waits, runs or is dead. It is in none of these then.
    fn lift(&mut self, id: &JobId) {
        let Some(record) = self.jobs.get(id) else { return };
        match record.place {
            Place::Waiting => self.due[record.job.priority as usize].remove(&(record.due, *id)),
            Place::Running { token, ends, .. } => self.leases.remove(&(ends, token, *id)),
            Place::Dead { since } => {
                self.dead_bytes -= record.size();
                self.dead.remove(&(since, *id))
            }
        };
    }

    fn remove(&mut self, id: &JobId) {
        self.lift(id);
        if let Some(record) = self.jobs.remove(id) {
            self.bytes -= record.size();
        }
    }

    /// Lets others have the unique key of a job, but for one that is held for a time.
    fn free(&mut self, id: &JobId) {
        let unique = self.jobs.get(id).and_then(|record| record.job.unique);
        if let Some(unique) = unique
            && self.unique.get(&unique.key).is_some_and(|holder| holder.id == *id && holder.until.is_none())
        {
            self.unique.remove(&unique.key);
        }
    }

    /// Has a job that is unique while it is there keep others out again, unless another one does so. Answers whether it may be there.
    fn hold(&mut self, id: &JobId, now: Now) -> bool {
        let unique = self.jobs.get(id).and_then(|record| record.job.unique);
        let Some(Unique { key, span: UniqueFor::WaitingOrRunning }) = unique else { return true };
        let is_held = |holder: &Holder| match holder.until {
            Some(until) => until > now.ms,
            None => holder.id != *id,
        };
        if self.unique.get(&key).is_some_and(is_held) {
            return false;
        }
        self.unique.insert(key, Holder { id: *id, until: None });
        true
    }

    fn bury(&mut self, id: &JobId, now: Now) {
        self.free(id);
        if let Some(record) = self.jobs.get_mut(id) {
            record.place = Place::Dead { since: now.ms };
            self.dead_bytes += record.size();
            self.dead.insert((now.ms, *id));
        }
    }

    /// Forgets so many dead jobs, and as many more as have so many bytes.
    fn forget_oldest(&mut self, count: usize, bytes: usize) {
        let (dead, dead_bytes) = (self.dead.len(), self.dead_bytes);
        while (dead - self.dead.len() < count || dead_bytes - self.dead_bytes < bytes)
            && let Some(&(_, id)) = self.dead.first()
        {
            self.remove(&id);
        }
    }

    /// What becomes of a job at the end of an attempt, that of a lease that has ended included.
    fn settle(&mut self, id: &JobId, ending: &Ending, is_expired: bool, now: Now) -> Finished {
        self.lift(id);
        let Some(record) = self.jobs.get_mut(id) else { return Finished::Gone };
        let is_cancelled = matches!(record.place, Place::Running { is_cancelled: true, .. });
        if is_cancelled || *ending == Ending::Done {
            self.free(id);
            self.remove(id);
            return if *ending == Ending::Done { Finished::Done } else { Finished::Cancelled };
        }
        let failed = |reason: Reason, error: &str| Some(Note::new(reason, error));
        let is_dead = match ending {
            Ending::Retry { error, .. } => {
                let reason = if is_expired { Reason::LeaseExpired } else { Reason::Failed };
                record.job.note = failed(reason, error);
                record.job.attempt = record.job.attempt.saturating_add(1);
                record.job.attempt >= record.job.max_attempts
            }
            Ending::Dead { reason, error } => {
                record.job.note = failed(*reason, error);
                record.job.attempt = record.job.attempt.saturating_add(1);
                true
            }
            Ending::Snooze { .. } | Ending::Release | Ending::Done => false,
        };
        let due = match ending {
            Ending::Retry { delay, .. } | Ending::Snooze { delay } => now.due(Due::In(*delay)),
            Ending::Release | Ending::Dead { .. } | Ending::Done => record.due,
        };
        record.due = due;
        if is_dead {
            self.bury(id, now);
            return Finished::Dead;
        }
        self.wait(id, due);
        Finished::Done
    }

    fn claim(&mut self, finished: &[Finish], claim: &Claim, now: Now) -> Claimed {
        // What is lost is told apart from what is gone when everything is finished.
        let settled: Vec<_> = finished
            .iter()
            .map(|Finish { ticket, ending }| {
                let is_held = self.jobs.get(&ticket.id).is_some_and(|record| record.is_held_by(ticket));
                is_held.then(|| self.settle(&ticket.id, ending, false, now))
            })
            .collect();
        let finished = settled.into_iter().zip(finished).map(|(settled, Finish { ticket, ending })| {
            let is_other = |record: &Record| *ending == Ending::Done && record.is_newer(ticket);
            let is_there = self.jobs.get(&ticket.id).is_some_and(|record| !is_other(record));
            settled.unwrap_or(if is_there { Finished::Lost } else { Finished::Gone })
        });
        let finished = finished.collect();
        let limit = claim.limit.min(MAX_BATCH);
        let mut expired = Expired::default();
        if limit > 0 {
            expired = self.reclaim(now);
            self.trim(claim.dead, now);
            self.sweep(RECLAIMED, now);
        }
        let jobs = if self.is_paused { Vec::new() } else { self.take(limit, claim.lease, now) };
        let due = self.due.iter().filter(|_| !self.is_paused).filter_map(|due| due.first()).map(|(due, _)| *due);
        let next = due.chain(self.leases.first().map(|(ends, ..)| *ends)).min();
        let next = next.map(|next| next.saturating_sub(now.ms));
        Claimed {
            finished,
            jobs,
            more: next == Some(0),
            // No wake-up is lost within a process.
            next: next.map(Duration::from_millis),
            oldest_due: self.oldest_due(now),
            expired,
            now: UNIX_EPOCH + Duration::from_micros(now.us),
        }
    }

    /// Lets jobs whose lease has ended wait again.
    fn reclaim(&mut self, now: Now) -> Expired {
        let over = self.leases.range(..(now.ms + 1, 0, JobId::LEAST)).take(RECLAIMED);
        let over: Vec<_> = over.map(|(.., id)| *id).collect();
        let ending = Ending::Retry { delay: Duration::ZERO, error: Arc::default() };
        let mut expired = Expired { jobs: over.len(), dead: 0 };
        for id in over {
            expired.dead += usize::from(self.settle(&id, &ending, true, now) == Finished::Dead);
        }
        expired
    }

    /// Forgets dead jobs that are too old or too many.
    fn trim(&mut self, limits: DeadLimits, now: Now) {
        let oldest = now.ms.saturating_sub(millis(limits.age));
        let rotten = self.dead.range(..(oldest + 1, JobId::LEAST)).take(RECLAIMED).count();
        let excess = (self.dead.len() as u64 - rotten as u64).saturating_sub(limits.count).min(FORGOTTEN);
        for _ in 0..rotten as u64 + excess {
            if let Some(&(_, id)) = self.dead.first() {
                self.remove(&id);
            }
        }
    }

    fn take(&mut self, limit: usize, lease: Duration, now: Now) -> Vec<ClaimedJob> {
        let mut ids = Vec::new();
        let mut bytes = 0;
        for priority in 0..3 {
            while ids.len() < limit && bytes < CLAIMED_BYTES {
                let Some(&(due, id)) = self.due[priority].first().filter(|(due, _)| *due <= now.ms) else { break };
                self.due[priority].remove(&(due, id));
                bytes += self.jobs.get(&id).map_or(0, Record::size);
                ids.push(id);
            }
        }
        let (token, ends) = (now.token, now.later + millis(lease));
        if !ids.is_empty() {
            self.token = token;
        }
        let mut jobs = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(record) = self.jobs.get_mut(&id) {
                record.place = Place::Running { token, ends, is_cancelled: false };
                jobs.push(ClaimedJob { token, job: record.view() });
                let is_free = record.job.unique.is_some_and(|unique| unique.span == UniqueFor::Waiting);
                self.leases.insert((ends, token, id));
                if is_free {
                    self.free(&id);
                }
            }
        }
        jobs
    }

    fn extend(&mut self, ticket: &Ticket, lease: Duration, now: Now) -> Extended {
        let Some(record) = self.jobs.get_mut(&ticket.id).filter(|record| record.is_held_by(ticket)) else {
            return Extended::Lost;
        };
        let Place::Running { token, ends, is_cancelled } = &mut record.place else { return Extended::Lost };
        self.leases.remove(&(*ends, *token, ticket.id));
        let is_shorter = now.later + millis(lease) < *ends;
        *ends = now.later + millis(lease);
        self.leases.insert((*ends, *token, ticket.id));
        let extended = if *is_cancelled { Extended::Cancelled } else { Extended::Held };
        if is_shorter {
            // Who waits has been told of a later end.
            self.wake();
        }
        extended
    }

    fn cancel(&mut self, id: &JobId) -> Cancelled {
        match self.jobs.get_mut(id).map(|record| &mut record.place) {
            None => Cancelled::Missing,
            Some(Place::Dead { .. }) => Cancelled::Dead,
            Some(Place::Running { is_cancelled, .. }) => {
                *is_cancelled = true;
                Cancelled::Told
            }
            Some(Place::Waiting) => {
                self.free(id);
                self.remove(id);
                Cancelled::Removed
            }
        }
    }

    /// Changes a job that is waiting.
    fn change(&mut self, id: &JobId, change: impl FnOnce(&mut Self)) -> Changed {
        match self.jobs.get(id).map(|record| record.place) {
            None => Changed::Missing,
            Some(Place::Dead { .. }) => Changed::Dead,
            Some(Place::Running { .. }) => Changed::Running,
            Some(Place::Waiting) => {
                change(self);
                Changed::Done
            }
        }
    }

    fn counts(&self, now: Now) -> Counts {
        let ready = |due: &BTreeSet<Line>| count_due(due.iter(), now.ms) as u64;
        Counts {
            waiting: self.due.iter().map(|due| due.len() as u64).sum(),
            due: self.due.iter().map(ready).sum(),
            running: self.leases.len() as u64,
            dead: self.dead.len() as u64,
            oldest_due: self.oldest_due(now),
            is_paused: self.is_paused,
        }
    }

    fn oldest_due(&self, now: Now) -> Option<Duration> {
        let oldest = self.due.iter().filter_map(|due| due.first()).map(|(due, _)| *due).min();
        oldest.and_then(|due| now.ms.checked_sub(due)).map(Duration::from_millis)
    }

    fn list(&self, state: State, skip: u64, limit: usize) -> Vec<StoredJob> {
        let ids: Box<dyn Iterator<Item = &JobId>> = match state {
            State::Waiting => Box::new(self.due.iter().flatten().map(|(_, id)| id)),
            State::Running => Box::new(self.leases.iter().map(|(.., id)| id)),
            State::Dead => Box::new(self.dead.iter().map(|(_, id)| id)),
        };
        let ids = ids.skip(usize::try_from(skip).unwrap_or(usize::MAX)).take(limit.min(MAX_BATCH));
        ids.filter_map(|id| self.jobs.get(id)).map(Record::view).collect()
    }

    fn drain(&mut self, limit: usize) -> usize {
        let ids = self.due.iter().flatten().take(limit.min(MAX_BATCH)).map(|(_, id)| *id);
        let ids: Vec<_> = ids.collect();
        for id in &ids {
            self.free(id);
            self.remove(id);
        }
        ids.len()
    }

    fn is_dead(&self, id: &JobId) -> bool {
        self.jobs.get(id).is_some_and(|record| matches!(record.place, Place::Dead { .. }))
    }

    fn replay(&mut self, id: &JobId, now: Now) -> bool {
        if !self.is_dead(id) || !self.hold(id, now) {
            return false;
        }
        self.lift(id);
        if let Some(record) = self.jobs.get_mut(id) {
            (record.job.attempt, record.job.note) = (0, None);
        }
        self.wait(id, now.ms);
        true
    }

    fn forget(&mut self, id: &JobId) -> bool {
        let is_dead = self.is_dead(id);
        if is_dead {
            self.remove(id);
        }
        is_dead
    }
}

impl DelayQueueStore for MemoryBackend {
    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        self.inner.queues.push(queue, jobs, max_jobs)
    }

    async fn claim(&self, queue: &QueueKey, finished: &[Finish], claim: &Claim) -> Result<Claimed, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.claim(finished, claim, now)))
    }

    async fn extend(&self, queue: &QueueKey, tickets: &[Ticket], lease: Duration) -> Result<Vec<Extended>, StoreError> {
        Ok(self
            .inner
            .queues
            .with(queue, |queue, now| tickets.iter().map(|ticket| queue.extend(ticket, lease, now)).collect()))
    }

    async fn watch(&self, queue: &QueueKey, _: WorkerId) -> Wakeups {
        // All who wait are woken, which costs a process little: who comes first gets the job.
        let mut queues = self.inner.queues.queues();
        let wake = queues.all.entry(*queue).or_default().wake.get_or_insert_with(|| watch::Sender::new(()));
        let watcher = Watcher { backend: self.clone(), queue: *queue };
        Wakeups::new(wake.subscribe(), Arc::new(watcher))
    }

    async fn get(&self, queue: &QueueKey, id: &JobId) -> Result<Option<StoredJob>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| queue.jobs.get(id).map(Record::view)))
    }

    async fn cancel(&self, queue: &QueueKey, id: &JobId) -> Result<Cancelled, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| queue.cancel(id)))
    }

    async fn reschedule(&self, queue: &QueueKey, id: &JobId, due: Due) -> Result<Changed, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| {
            queue.change(id, |queue| {
                queue.lift(id);
                queue.wait(id, now.due(due));
            })
        }))
    }

    async fn replace(&self, queue: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        self.inner.queues.replace(queue, id, payload)
    }

    async fn counts(&self, queue: &QueueKey) -> Result<Counts, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.counts(now)))
    }

    async fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> Result<Vec<StoredJob>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| queue.list(state, skip, limit)))
    }

    async fn pause(&self, queue: &QueueKey, is_paused: bool) -> Result<(), StoreError> {
        self.inner.queues.with(queue, |queue, _| {
            queue.is_paused = is_paused;
            queue.wake();
        });
        Ok(())
    }

    async fn drain(&self, queue: &QueueKey, limit: usize) -> Result<usize, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| queue.drain(limit)))
    }

    async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| ids.iter().map(|id| queue.replay(id, now)).collect()))
    }

    async fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| ids.iter().map(|id| queue.forget(id)).collect()))
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn identity(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.inner).addr())
    }
}

/// Cleans up behind somebody who has waited.
struct Watcher {
    backend: MemoryBackend,
    queue: QueueKey,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.backend.inner.queues.with(&self.queue, |_, _| ());
    }
}

impl MemoryBackend {
    /// How many jobs are kept at the moment, in all queues.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.inner.queues.len.load(Ordering::Relaxed)
    }
}

/// How many of these are due. Looks at no more than twice as many as are, or as are not: a backlog is not walked over while all queues wait.
fn count_due<'a>(mut lines: impl DoubleEndedIterator<Item = &'a Line> + ExactSizeIterator, now_ms: u64) -> usize {
    let len = lines.len();
    for looked in 0..len {
        if lines.next().is_none_or(|(due, _)| *due > now_ms) {
            return looked;
        }
        if lines.next_back().is_none_or(|(due, _)| *due <= now_ms) {
            return len - looked;
        }
    }
    len
}

/// Rounded up: never early.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}

fn since_1970(instant: SystemTime) -> Duration {
    instant.duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn instant(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delay_queue::Headers;

    const MINUTE: Duration = Duration::from_secs(60);

    fn job(id: u32, unique: Option<Unique>) -> NewJob {
        NewJob {
            id: JobId::from(id.to_string()),
            due: Due::NOW,
            priority: Priority::Normal,
            max_attempts: 1,
            unique,
            headers: Headers::default(),
            payload: Arc::default(),
        }
    }

    fn unique(key: &str) -> Option<Unique> {
        Some(Unique { key: Key::from(key), span: UniqueFor::Time(MINUTE) })
    }

    /// Claims a job and is done with it. Answers its token.
    async fn run(backend: &MemoryBackend, queue: &QueueKey) -> u64 {
        let worker = WorkerId::random().unwrap();
        let claim = Claim { worker, limit: 1, lease: MINUTE, dead: DeadLimits::default() };
        let ticket = backend.claim(queue, &[], &claim).await.unwrap().jobs[0].ticket();
        let finish = Finish { ticket, ending: Ending::Done };
        backend.claim(queue, &[finish], &Claim { limit: 0, ..claim }).await.unwrap();
        ticket.token
    }

    /// How many jobs and unique keys there are, queues, and queues whose unique keys end.
    fn sizes(backend: &MemoryBackend) -> (usize, usize, usize) {
        let table = &backend.inner.queues;
        let queues = table.queues();
        (table.kept(), queues.all.len(), queues.ends.len())
    }

    /// All of them were refused, for want of room that only some would have taken.
    #[tokio::test(start_paused = true)]
    async fn what_is_refused_of_several_takes_no_room() {
        let queue = QueueKey::new("q");
        let admitted = async |capacity, max_jobs, jobs: &[NewJob]| {
            MemoryBackend::with_capacity(capacity).push(&queue, jobs, max_jobs).await.map_err(|error| error.to_string())
        };
        let many: Vec<_> = (0..11).map(|id| job(id, None)).collect();
        let ten = [vec![Admission::New; 10], vec![Admission::Full]].concat();
        assert_eq!(admitted(10, 10, &many).await, Ok(ten));
        let exists = |job: &NewJob| Ok(vec![Admission::New, Admission::Exists(job.id)]);
        let twice = [job(1, None), job(1, None)];
        assert_eq!(admitted(1, 10, &twice).await, exists(&twice[0]));
        let key = Some(Unique { key: Key::from("a"), span: UniqueFor::WaitingOrRunning });
        let alike = [job(1, key), job(2, key)];
        assert_eq!(admitted(1, 10, &alike).await, exists(&alike[0]));
        assert!(admitted(10, 11, &many).await.is_err(), "there is no room for what the queue would take");
    }

    #[tokio::test(start_paused = true)]
    async fn unique_keys_of_queues_that_nobody_uses_any_more_make_room_when_they_are_over() {
        let backend = MemoryBackend::with_capacity(10);
        let queue = |name: u32| QueueKey::new(name).with_part(3);
        for name in 0..10 {
            backend.push(&queue(name), &[job(1, unique("a"))], 100).await.unwrap();
            run(&backend, &queue(name)).await;
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let other = QueueKey::new("other");
        assert!(backend.push(&other, &[job(1, None)], 100).await.unwrap_err().is_out_of_memory());
        // The first of them is over.
        tokio::time::advance(Duration::from_millis(50_500)).await;
        assert_eq!(backend.push(&other, &[job(1, None)], 100).await.unwrap(), [Admission::New]);
        assert!(backend.push(&other, &[job(2, None)], 100).await.unwrap_err().is_out_of_memory());
        tokio::time::advance(MINUTE).await;
        let jobs: Vec<_> = (2..11).map(|id| job(id, None)).collect();
        assert_eq!(backend.push(&other, &jobs, 100).await.unwrap(), [Admission::New; 9]);
        assert_eq!(sizes(&backend), (10, 1, 0));
    }

    /// Claims all jobs that are due, and gives them up.
    async fn kill(backend: &MemoryBackend, queue: &QueueKey) {
        let worker = WorkerId::random().unwrap();
        let claim = Claim { worker, limit: MAX_BATCH, lease: MINUTE, dead: DeadLimits::default() };
        let ending = Ending::Dead { reason: Reason::Failed, error: Arc::default() };
        let claimed = backend.claim(queue, &[], &claim).await.unwrap().jobs;
        let finished: Vec<_> = claimed.iter().map(|job| Finish::new(job.ticket(), ending.clone())).collect();
        backend.claim(queue, &finished, &Claim { limit: 0, ..claim }).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn dead_jobs_keep_no_other_queue_out() {
        let backend = MemoryBackend::with_capacity(10);
        let [poison, unlucky, other] = ["poison", "unlucky", "other"].map(QueueKey::new);
        let dead = async || {
            let counts = [backend.counts(&poison).await, backend.counts(&unlucky).await];
            counts.map(|counts| counts.unwrap().dead)
        };
        let jobs: Vec<_> = (0..8).map(|id| job(id, None)).collect();
        backend.push(&unlucky, &jobs[..2], 100).await.unwrap();
        kill(&backend, &unlucky).await;
        tokio::time::advance(MINUTE).await;
        backend.push(&poison, &jobs, 100).await.unwrap();
        kill(&backend, &poison).await;
        assert_eq!(dead().await, [8, 2]);
        // Nothing is forgotten for what would have no room all the same.
        assert!(backend.push(&other, &jobs[..6], 100).await.unwrap_err().is_out_of_memory());
        assert_eq!(dead().await, [8, 2]);
        for id in 0..5 {
            assert_eq!(backend.push(&other, &[job(id, None)], 100).await.unwrap(), [Admission::New]);
        }
        assert!(backend.push(&other, &[job(5, None)], 100).await.unwrap_err().is_out_of_memory());
        assert_eq!(dead().await, [3, 2]);
        assert_eq!(sizes(&backend).0, 10);
    }

    /// It took the place of dead jobs, or there was no room for it.
    #[tokio::test(start_paused = true)]
    async fn what_is_not_added_needs_no_room() {
        let backend = MemoryBackend::with_capacity(10);
        let [poison, other] = ["poison", "other"].map(QueueKey::new);
        let dead = async || backend.counts(&poison).await.unwrap().dead;
        let jobs: Vec<_> = (0..8).map(|id| job(id, None)).collect();
        backend.push(&poison, &jobs, 100).await.unwrap();
        kill(&backend, &poison).await;
        let held = Some(Unique { key: Key::from("a"), span: UniqueFor::WaitingOrRunning });
        backend.push(&other, &[job(0, held), job(1, None)], 100).await.unwrap();
        let exists = Admission::Exists(JobId::from("0"));
        assert_eq!(backend.push(&other, &[job(2, held), job(3, held)], 100).await.unwrap(), [exists; 2]);
        assert_eq!(backend.push(&other, &[job(2, None)], 2).await.unwrap(), [Admission::Full]);
        assert_eq!(dead().await, 8);
        assert_eq!(backend.push(&other, &[job(2, held), job(3, None)], 100).await.unwrap(), [exists, Admission::New]);
        assert_eq!(dead().await, 7);
        // Nor where there is none.
        let backend = MemoryBackend::with_capacity(2);
        backend.push(&other, &[job(0, held), job(1, None)], 100).await.unwrap();
        assert_eq!(backend.push(&other, &[job(2, held)], 100).await.unwrap(), [exists]);
        assert_eq!(backend.push(&other, &[job(2, None)], 2).await.unwrap(), [Admission::Full]);
        assert!(backend.push(&other, &[job(2, None)], 100).await.unwrap_err().is_out_of_memory());
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_job_that_makes_room_for_others_may_be_one_of_those_that_are_pushed() {
        let backend = MemoryBackend::with_capacity(4);
        let queue = QueueKey::new("test");
        let jobs: Vec<_> = (0..4).map(|id| job(id, None)).collect();
        backend.push(&queue, &jobs, 100).await.unwrap();
        kill(&backend, &queue).await;
        let again = [job(4, None), job(0, None)];
        assert_eq!(backend.push(&queue, &again, 100).await.unwrap(), [Admission::New; 2]);
        let counts = backend.counts(&queue).await.unwrap();
        assert_eq!((counts.waiting, counts.dead), (2, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn the_bytes_of_dead_jobs_keep_no_other_queue_out() {
        let backend = MemoryBackend::with_capacity(4);
        let [poison, other] = ["poison", "other"].map(QueueKey::new);
        let large = |id, len: usize| NewJob { payload: vec![0; len].into(), ..job(id, None) };
        let dead = async || backend.counts(&poison).await.unwrap().dead;
        backend.push(&poison, &[large(0, 1_000), large(1, 1_000), large(2, 1_000)], 100).await.unwrap();
        kill(&backend, &poison).await;
        assert_eq!(backend.push(&other, &[large(0, 1_090)], 100).await.unwrap(), [Admission::New]);
        assert_eq!(dead().await, 3);
        // What becomes larger needs room as well.
        assert_eq!(backend.replace(&other, &large(0, 0).id, &[0; 1_100]).await.unwrap(), Changed::Done);
        assert_eq!(dead().await, 2);
        // They have less than half of the room.
        assert_eq!(backend.push(&other, &[large(1, 990)], 100).await.unwrap(), [Admission::New]);
        assert!(backend.push(&other, &[large(2, 10)], 100).await.unwrap_err().is_out_of_memory());
        assert!(backend.replace(&other, &large(1, 0).id, &[0; 1_000]).await.unwrap_err().is_out_of_memory());
        assert_eq!(dead().await, 2);
        assert_eq!(backend.forget(&poison, &[large(1, 0).id, large(2, 0).id]).await.unwrap(), [true; 2]);
        assert_eq!(backend.push(&other, &[large(2, 2_000)], 100).await.unwrap(), [Admission::New]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_is_held_anew_before_the_old_time_is_swept_is_not_counted_for_ever() {
        // One more than a push and a claim sweep, so that the last one is left.
        const KEYS: u32 = 2 + RECLAIMED as u32 + 1;
        let backend = MemoryBackend::new();
        let queue = QueueKey::new("test");
        for id in 0..KEYS {
            backend.push(&queue, &[job(id, unique(&format!("{id:02}")))], 100).await.unwrap();
            run(&backend, &queue).await;
        }
        tokio::time::advance(2 * MINUTE).await;
        let again = Unique { key: Key::from((KEYS - 1).to_string()), span: UniqueFor::WaitingOrRunning };
        backend.push(&queue, &[job(KEYS, Some(again))], 100).await.unwrap();
        run(&backend, &queue).await;
        let other = QueueKey::new("other");
        backend.push(&other, &[job(1, None)], 100).await.unwrap();
        run(&backend, &other).await;
        assert_eq!(sizes(&backend), (0, 0, 0));
    }

    /// As one that was suspended, or whose clock was wrong when the backend was made.
    #[tokio::test(start_paused = true)]
    async fn an_instant_is_one_of_the_clock_of_the_machine_wherever_that_was_set_to() {
        let queue = QueueKey::new("test");
        let at = |id, after| NewJob { due: Due::At(SystemTime::now() + after), ..job(id, None) };
        for is_ahead in [true, false] {
            let mut backend = MemoryBackend::new();
            let date = &mut Arc::get_mut(&mut backend.inner).unwrap().queues.start.date;
            *date = if is_ahead { *date - 60 * MINUTE } else { *date + 60 * MINUTE };
            let due = async || backend.counts(&queue).await.unwrap().due;
            backend.push(&queue, &[at(1, Duration::ZERO), at(2, MINUTE), job(3, None)], 100).await.unwrap();
            let later = Due::At(SystemTime::now() + MINUTE);
            assert_eq!(backend.reschedule(&queue, &JobId::from(3), later).await.unwrap(), Changed::Done);
            tokio::time::advance(Duration::from_secs(30)).await;
            assert_eq!(due().await, 1, "{is_ahead}");
            tokio::time::advance(MINUTE).await;
            assert_eq!(due().await, 3, "{is_ahead}");
        }
    }

    #[test]
    fn what_is_due_is_counted_from_the_end_where_it_ends_sooner() {
        for len in [0, 1, 2, 3, 10, 101] {
            let lines: BTreeSet<Line> = (0..len).map(|i| (100 + i / 2, JobId::from(i))).collect();
            for now_ms in 99..=100 + len {
                let due = lines.iter().filter(|(due, _)| *due <= now_ms).count();
                let mut looked = 0;
                assert_eq!(count_due(lines.iter().inspect(|_| looked += 1), now_ms), due, "{len} {now_ms}");
                assert!(looked <= 2 * due.min(lines.len() - due) + 2, "{looked} for {due} of {len}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_comes_again_gives_out_larger_tokens() {
        let backend = MemoryBackend::new();
        let queue = QueueKey::new("test");
        let mut tokens = Vec::new();
        for _ in 0..3 {
            backend.push(&queue, &[job(1, None)], 100).await.unwrap();
            tokens.push(run(&backend, &queue).await);
            assert!(backend.inner.queues.queues().all.is_empty());
        }
        assert!(tokens.windows(2).all(|tokens| tokens[0] < tokens[1]), "{tokens:?}");
    }
}
