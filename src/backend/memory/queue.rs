//! One delay queue: its jobs, their states, and the holders of unique keys.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant as StdInstant, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::delay_queue::store::{
    Ack, AckKind, Admission, Claim, Claimed, ClaimedJob, Died, Expired, Extended, Finished, JobLease, MAX_BATCH,
};
use crate::delay_queue::{
    Cancelled, Changed, Counts, DeadLimits, Due, FailureInfo, JobId, NewJob, Reason, State, StoredJob, Unique,
    UniqueFor,
};
use crate::key::Key;

/// As in Redis: how many expired leases one call reclaims, and how many dead jobs over the maximum number it removes.
pub(super) const RECLAIM_BATCH: usize = 64;
const MAX_TRIMMED: u64 = 320;
/// If the system clock differs by this from its expected value, the clock was set, or the machine was suspended. Two clock reads
/// take less time.
const CLOCK_STEP: Duration = Duration::from_secs(1);
/// About how many bytes of jobs one call claims. The last job may exceed it.
const CLAIMED_BYTES: usize = 1 << 20;

/// The date at one instant. All times of the queues are this date plus the time since the instant.
#[derive(Clone, Copy)]
pub(super) struct ClockOrigin {
    pub(super) date: Duration,
    instant: Instant,
    // The same instant by the monotonic clock of the system, which tests cannot pause.
    std_instant: StdInstant,
}

/// A time in ms since 1970, and a job. Jobs with the same time are in the order of their ids.
type DueEntry = (u64, JobId);

#[derive(Default)]
pub(super) struct Queue {
    pub(super) jobs: HashMap<JobId, Record>,
    // By priority, the highest first.
    due: [BTreeSet<DueEntry>; 3],
    // By end, then by token.
    leases: BTreeSet<(u64, u64, JobId)>,
    pub(super) dead: BTreeSet<DueEntry>,
    // By the end of the snooze.
    snoozed: BTreeSet<DueEntry>,
    // Cancelled jobs that still run, and the unique keys that they held. Jobs with the same id or key are not claimed meanwhile.
    cancelled: HashMap<JobId, Record>,
    cancelled_keys: HashMap<Key, JobId>,
    unique: HashMap<Key, UniqueHolder>,
    // Unique keys that are held for a fixed time, in the order in which the holds end.
    pub(super) unique_ends: BTreeSet<(u64, Box<str>)>,
    // The size of all payloads and headers, and of those of dead jobs.
    pub(super) bytes: usize,
    pub(super) dead_bytes: usize,
    pub(super) is_paused: bool,
    // The latest fencing token.
    pub(super) token: u64,
    pub(super) wake: Option<watch::Sender<()>>,
}

/// The job that holds a unique key. A hold for a fixed time has an end, and may outlive the job.
pub(super) struct UniqueHolder {
    id: JobId,
    until: Option<u64>,
}

pub(super) struct Record {
    // Its `attempt` counts only ended attempts.
    pub(super) job: StoredJob,
    pub(super) state: JobState,
    due: u64,
    // For a waiting job: the end of its snooze.
    snoozed: Option<u64>,
}

#[derive(Clone, Copy)]
pub(super) enum JobState {
    Waiting,
    Running { token: u64, ends: u64 },
    Dead { since: u64 },
}

/// The time of one call: the last whole millisecond, and the next one, from which delays and leases count.
#[derive(Clone, Copy)]
pub(super) struct CallTime {
    pub(super) us: u64,
    pub(super) ms: u64,
    pub(super) next_ms: u64,
    // Larger than all earlier tokens.
    pub(super) token: u64,
    pub(super) origin: ClockOrigin,
}

impl ClockOrigin {
    pub(super) fn now() -> Self {
        let date = Duration::from_millis(since_1970(SystemTime::now()).as_millis() as u64);
        Self { date, instant: Instant::now(), std_instant: StdInstant::now() }
    }

    /// The current time in µs since 1970.
    pub(super) fn us(&self) -> u64 {
        (self.date + self.instant.elapsed()).as_micros() as u64
    }

    /// Converts an instant of the machine's clock to the time of the queues. The queues do not read the date again, so the two differ after
    /// a suspension or a change of the clock.
    fn to_queue_time(self, instant: SystemTime) -> Duration {
        // Read the date before `elapsed`, so that a pause between the two reads makes no job early.
        let (date, instant) = (since_1970(SystemTime::now()), since_1970(instant));
        let expected = self.date + self.std_instant.elapsed();
        match date.abs_diff(expected) {
            step if step < CLOCK_STEP => instant,
            step if date > expected => instant.saturating_sub(step),
            step => instant.saturating_add(step),
        }
    }
}

impl CallTime {
    /// When a job is due. Never early.
    pub(super) fn due(self, due: Due) -> u64 {
        match due {
            Due::In(delay) if delay.is_zero() => self.ms,
            Due::In(delay) => self.next_ms + millis(delay.min(Due::MAX_DELAY)),
            Due::At(instant) => millis(self.origin.to_queue_time(instant)).max(self.ms),
        }
    }
}

impl Record {
    /// The job as callers see it.
    pub(super) fn view(&self) -> StoredJob {
        let (state, running) = match self.state {
            JobState::Waiting => (State::Waiting, 0),
            JobState::Running { .. } => (State::Running, 1),
            JobState::Dead { .. } => (State::Dead, 0),
        };
        let attempt = self.job.attempt.saturating_add(running);
        StoredJob { state, attempt, due_at: system_time(self.snoozed.unwrap_or(self.due)), ..self.job.clone() }
    }

    fn is_held_by(&self, lease: &JobLease) -> bool {
        matches!(self.state, JobState::Running { token, .. } if token == lease.token)
    }

    /// Whether the job was pushed after this lease was granted, and is therefore another job with the same id.
    fn is_newer(&self, lease: &JobLease) -> bool {
        since_1970(self.job.enqueued_at).as_micros() > lease.token.into()
    }

    pub(super) fn size(&self) -> usize {
        self.job.payload.len() + self.job.headers.size()
    }
}

impl Queue {
    pub(super) fn is_unused(&self) -> bool {
        let is_watched = self.wake.as_ref().is_some_and(|wake| wake.receiver_count() > 0);
        let is_empty = self.jobs.is_empty() && self.cancelled.is_empty();
        let has_no_keys = self.unique.is_empty() && self.unique_ends.is_empty();
        is_empty && has_no_keys && !self.is_paused && !is_watched
    }

    /// When the first unique key that is held for a time expires.
    pub(super) fn first_end(&self) -> Option<u64> {
        self.unique_ends.first().map(|(until, _)| *until)
    }

    /// Wakes idle workers.
    pub(super) fn wake(&self) {
        if let Some(wake) = &self.wake {
            wake.send_replace(());
        }
    }

    /// The job that holds a unique key.
    pub(super) fn holder(&self, key: &Key, now_ms: u64) -> Option<&UniqueHolder> {
        self.unique.get(key).filter(|holder| holder.until.is_none_or(|until| until > now_ms))
    }

    pub(super) fn push(&mut self, job: &NewJob, max_jobs: u64, now: CallTime) -> Admission {
        let was_dead = match self.jobs.get(&job.id).map(|record| record.state) {
            Some(JobState::Waiting | JobState::Running { .. }) => return Admission::Exists(job.id),
            Some(JobState::Dead { .. }) => true,
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
                UniqueFor::Time(time) | UniqueFor::Occurrence(time) => {
                    Some(now.next_ms + millis(time.min(Due::MAX_DELAY)).max(1))
                }
                UniqueFor::WaitingOrRunning | UniqueFor::Waiting => None,
            };
            self.unique.insert(unique.key, UniqueHolder { id: job.id, until });
            self.unique_ends.extend(until.map(|until| (until, unique.key.as_str().into())));
        }
        if was_dead {
            self.remove(&job.id);
        }
        let due = now.due(job.due);
        let stored = StoredJob::new(job, system_time(now.ms), system_time(due));
        self.bytes += job.size();
        self.jobs.insert(job.id, Record { job: stored, state: JobState::Waiting, due, snoozed: None });
        self.enqueue(&job.id, due);
        Admission::New
    }

    /// Removes up to `max` expired unique keys. Returns how many.
    pub(super) fn sweep(&mut self, max: usize, now: CallTime) -> usize {
        for removed in 0..max {
            let is_unused = self.first_end().is_some_and(|until| until <= now.ms);
            let first = if is_unused { self.unique_ends.pop_first() } else { None };
            let Some((until, text)) = first else { return removed };
            if let Some(key) = Key::stored(&text)
                && self.unique.get(&key).is_some_and(|holder| holder.until == Some(until))
            {
                self.unique.remove(&key);
            }
        }
        max
    }

    /// Makes a job wait until it is due.
    pub(super) fn enqueue(&mut self, id: &JobId, due: u64) {
        let first_due = self.first_due();
        if let Some(record) = self.jobs.get_mut(id) {
            (record.state, record.due, record.snoozed) = (JobState::Waiting, due, None);
            self.due[record.job.priority as usize].insert((due, *id));
            if first_due.is_none_or(|first_due| due < first_due) {
                self.wake();
            }
        }
    }

    /// When the next waiting job is due, or its snooze ends.
    fn first_due(&self) -> Option<u64> {
        self.due.iter().chain([&self.snoozed]).filter_map(|due| due.first()).map(|(due, _)| *due).min()
    }

    /// Makes a job wait until the end of its snooze, with its due time unchanged.
    fn snooze(&mut self, id: &JobId, until: u64) {
        let first_due = self.first_due();
        if let Some(record) = self.jobs.get_mut(id) {
            (record.state, record.snoozed) = (JobState::Waiting, Some(until));
            self.snoozed.insert((until, *id));
            if first_due.is_none_or(|first_due| until < first_due) {
                self.wake();
            }
        }
    }

    /// Ends the snooze of a job, which waits by its due time again.
    fn resume(&mut self, id: &JobId) {
        if let Some(record) = self.jobs.get_mut(id)
            && let Some(until) = record.snoozed.take()
        {
            self.snoozed.remove(&(until, *id));
            self.due[record.job.priority as usize].insert((record.due, *id));
        }
    }

    /// Removes a job from the index of its state. The caller sets a new state.
    pub(super) fn unlink(&mut self, id: &JobId) {
        let Some(record) = self.jobs.get(id) else { return };
        match record.state {
            JobState::Waiting => match record.snoozed {
                Some(until) => self.snoozed.remove(&(until, *id)),
                None => self.due[record.job.priority as usize].remove(&(record.due, *id)),
            },
            JobState::Running { token, ends } => self.leases.remove(&(ends, token, *id)),
            JobState::Dead { since } => {
                self.dead_bytes -= record.size();
                self.dead.remove(&(since, *id))
            }
        };
    }

    fn remove(&mut self, id: &JobId) {
        self.unlink(id);
        if let Some(record) = self.jobs.remove(id) {
            self.bytes -= record.size();
        }
    }

    /// Releases the unique key of a job, except a key that is held for a time.
    fn release_untimed(&mut self, id: &JobId, now: CallTime) {
        self.release(id, true, now);
    }

    /// Releases the unique key of a job. A key that is held for a time stays if `keeps_timed` is set, or if its span is an occurrence.
    /// Returns the key if it was released. A hold whose time has ended is ignored.
    fn release(&mut self, id: &JobId, keeps_timed: bool, now: CallTime) -> Option<Key> {
        let Unique { key, span } = self.jobs.get(id)?.job.unique?;
        let keeps_timed = keeps_timed || matches!(span, UniqueFor::Occurrence(_));
        let is_released = |holder: &UniqueHolder| holder.id == *id && !(keeps_timed && holder.until.is_some());
        let is_released = self.holder(&key, now.ms).is_some_and(is_released);
        is_released.then(|| self.remove_unique(&key)).map(|()| key)
    }

    fn remove_unique(&mut self, key: &Key) {
        if let Some(UniqueHolder { until: Some(until), .. }) = self.unique.remove(key) {
            self.unique_ends.remove(&(until, key.as_str().into()));
        }
    }

    pub(super) fn release_unique(&mut self, key: &Key, now: CallTime) -> bool {
        let was_held = self.holder(key, now.ms).is_some();
        self.remove_unique(key);
        was_held
    }

    /// Ends the run of a cancelled job, so that a job with the same id or unique key can be claimed. Returns whether the token matched.
    fn end_cancelled(&mut self, id: &JobId, held_token: u64, now: CallTime) -> bool {
        let Some(&Record { state: JobState::Running { token, ends }, ref job, .. }) = self.cancelled.get(id) else {
            return false;
        };
        if token != held_token {
            return false;
        }
        let key = job.unique.map(|unique| unique.key);
        self.leases.remove(&(ends, token, *id));
        self.cancelled.remove(id);
        self.resume(id);
        if let Some(key) = key.filter(|key| self.cancelled_keys.get(key) == Some(id)) {
            self.cancelled_keys.remove(&key);
            if let Some(holder) = self.holder(&key, now.ms).map(|holder| holder.id) {
                self.resume(&holder);
            }
        }
        self.wake();
        true
    }

    /// Whether the run of a cancelled job prevents a claim of this job.
    fn is_blocked(&self, id: &JobId) -> bool {
        let key = || self.jobs.get(id)?.job.unique.map(|unique| unique.key);
        !self.cancelled.is_empty()
            && (self.cancelled.contains_key(id) || key().is_some_and(|key| self.cancelled_keys.contains_key(&key)))
    }

    /// Lets a replayed job take its unique key again. Returns `false` if another job holds the key.
    fn acquire_unique(&mut self, id: &JobId, now: CallTime) -> bool {
        let unique = self.jobs.get(id).and_then(|record| record.job.unique);
        let Some(Unique { key, span: UniqueFor::WaitingOrRunning }) = unique else { return true };
        let is_held = |holder: &UniqueHolder| match holder.until {
            Some(until) => until > now.ms,
            None => holder.id != *id,
        };
        if self.unique.get(&key).is_some_and(is_held) {
            return false;
        }
        self.unique.insert(key, UniqueHolder { id: *id, until: None });
        true
    }

    fn mark_dead(&mut self, id: &JobId, now: CallTime) {
        self.release_untimed(id, now);
        if let Some(record) = self.jobs.get_mut(id) {
            record.state = JobState::Dead { since: now.ms };
            self.dead_bytes += record.size();
            self.dead.insert((now.ms, *id));
        }
    }

    /// Removes the oldest dead jobs: at least `count` jobs and at least `bytes` bytes.
    pub(super) fn forget_oldest(&mut self, count: usize, bytes: usize) {
        let (dead, dead_bytes) = (self.dead.len(), self.dead_bytes);
        while (dead - self.dead.len() < count || dead_bytes - self.dead_bytes < bytes)
            && let Some(&(_, id)) = self.dead.first()
        {
            self.remove(&id);
        }
    }

    /// Handles the end of an attempt, or of its lease.
    fn end_attempt(&mut self, id: &JobId, kind: &AckKind, is_expired: bool, now: CallTime) -> Finished {
        self.unlink(id);
        let Some(record) = self.jobs.get_mut(id) else { return Finished::Gone };
        if kind.forgets() {
            self.release(id, *kind == AckKind::Done, now);
            self.remove(id);
            return Finished::Done;
        }
        let failed = |reason: Reason, error: &str| Some(FailureInfo::new(reason, error));
        let is_dead = match kind {
            AckKind::Retry { error, .. } => {
                let reason = if is_expired { Reason::LeaseExpired } else { Reason::Failed };
                record.job.failure = failed(reason, error);
                record.job.attempt = record.job.attempt.saturating_add(1);
                record.job.attempt >= record.job.max_attempts
            }
            AckKind::Dead { reason, error } => {
                record.job.failure = failed(*reason, error);
                record.job.attempt = record.job.attempt.saturating_add(1);
                true
            }
            AckKind::Snooze { .. } | AckKind::Release | AckKind::Done | AckKind::Cancelled => false,
        };
        let due = match kind {
            AckKind::Retry { delay, .. } => now.due(Due::In(*delay)),
            AckKind::Snooze { .. } | AckKind::Release | AckKind::Dead { .. } | AckKind::Done | AckKind::Cancelled => {
                record.due
            }
        };
        record.due = due;
        if is_dead {
            self.mark_dead(id, now);
            return Finished::Dead;
        }
        match kind {
            AckKind::Snooze { delay } => self.snooze(id, now.due(Due::In(*delay))),
            _ => self.enqueue(id, due),
        }
        Finished::Done
    }

    pub(super) fn claim(&mut self, finished: &[Ack], claim: &Claim, now: CallTime) -> Claimed {
        // `Lost` and `Gone` can be distinguished only after all results are handled.
        let results: Vec<_> = finished
            .iter()
            .map(|Ack { lease, kind }| {
                if self.end_cancelled(&lease.id, lease.token, now) {
                    return Some(if kind.forgets() { Finished::Done } else { Finished::Cancelled });
                }
                let is_held = self.jobs.get(&lease.id).is_some_and(|record| record.is_held_by(lease));
                is_held.then(|| self.end_attempt(&lease.id, kind, false, now))
            })
            .collect();
        let finished = results.into_iter().zip(finished).map(|(result, Ack { lease, kind })| {
            let is_other = |record: &Record| kind.forgets() && record.is_newer(lease);
            let exists = self.jobs.get(&lease.id).is_some_and(|record| !is_other(record));
            result.unwrap_or(if exists { Finished::Lost } else { Finished::Gone })
        });
        let finished = finished.collect();
        let limit = claim.limit.min(MAX_BATCH);
        let mut expired = (Expired::default(), Vec::new());
        if limit > 0 {
            expired = self.reclaim(now);
            self.resume_due(limit, now);
            self.trim(claim.dead, now);
            self.sweep(RECLAIM_BATCH, now);
        }
        let jobs = if self.is_paused { Vec::new() } else { self.take(limit, claim.lease, now) };
        let due = self.first_due().filter(|_| !self.is_paused);
        let next = due.into_iter().chain(self.leases.first().map(|(ends, ..)| *ends)).min();
        let next = next.map(|next| next.saturating_sub(now.ms));
        Claimed {
            finished,
            jobs,
            more: next == Some(0),
            // Not limited to `Claim::MAX_WAIT`, since no notification gets lost within a process.
            next: next.map(Duration::from_millis),
            oldest_due: self.oldest_due(now),
            expired: expired.0,
            died: expired.1,
            now: UNIX_EPOCH + Duration::from_micros(now.us),
        }
    }

    /// Ends the attempts whose lease has ended: each job waits again, is dead, or is removed if it was cancelled. Returns the numbers, and
    /// the jobs that are now dead.
    fn reclaim(&mut self, now: CallTime) -> (Expired, Vec<Died>) {
        let over = self.leases.range(..(now.ms + 1, 0, JobId::LEAST)).take(RECLAIM_BATCH);
        let over: Vec<_> = over.map(|(_, token, id)| (*token, *id)).collect();
        let kind = AckKind::Retry { delay: Duration::ZERO, error: Arc::default() };
        let (jobs, mut died) = (over.len(), Vec::new());
        for (token, id) in over {
            if self.end_cancelled(&id, token, now) {
                continue;
            }
            if self.end_attempt(&id, &kind, true, now) == Finished::Dead {
                died.push(Died::new(id, self.jobs.get(&id).map_or(0, |record| record.job.attempt)));
            }
        }
        (Expired { jobs, dead: died.len() }, died)
    }

    /// Ends the snoozes that are over.
    fn resume_due(&mut self, limit: usize, now: CallTime) {
        // At least as many as may be claimed.
        let over = self.snoozed.range(..(now.ms + 1, JobId::LEAST)).take(RECLAIM_BATCH.max(limit));
        let over: Vec<_> = over.map(|(_, id)| *id).collect();
        for id in over {
            self.resume(&id);
        }
    }

    /// Removes dead jobs that are too old or too many.
    fn trim(&mut self, limits: DeadLimits, now: CallTime) {
        let oldest = now.ms.saturating_sub(millis(limits.age));
        let too_old = self.dead.range(..(oldest + 1, JobId::LEAST)).take(RECLAIM_BATCH).count();
        let excess = (self.dead.len() as u64 - too_old as u64).saturating_sub(limits.count).min(MAX_TRIMMED);
        for _ in 0..too_old as u64 + excess {
            if let Some(&(_, id)) = self.dead.first() {
                self.remove(&id);
            }
        }
    }

    fn take(&mut self, limit: usize, lease: Duration, now: CallTime) -> Vec<ClaimedJob> {
        let mut ids = Vec::new();
        let mut bytes = 0;
        for priority in 0..3 {
            while ids.len() < limit && bytes < CLAIMED_BYTES {
                let Some(&(due, id)) = self.due[priority].first().filter(|(due, _)| *due <= now.ms) else { break };
                self.due[priority].remove(&(due, id));
                if self.is_blocked(&id) {
                    self.snooze(&id, now.ms + millis(Claim::MAX_WAIT));
                    continue;
                }
                bytes += self.jobs.get(&id).map_or(0, Record::size);
                ids.push(id);
            }
        }
        let (token, ends) = (now.token, now.next_ms + millis(lease));
        if !ids.is_empty() {
            self.token = token;
        }
        let mut jobs = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(record) = self.jobs.get_mut(&id) {
                record.state = JobState::Running { token, ends };
                jobs.push(ClaimedJob { token, job: record.view() });
                let releases_unique = record.job.unique.is_some_and(|unique| unique.span == UniqueFor::Waiting);
                self.leases.insert((ends, token, id));
                if releases_unique {
                    self.release_untimed(&id, now);
                }
            }
        }
        jobs
    }

    pub(super) fn extend(&mut self, lease: &JobLease, ttl: Duration, now: CallTime) -> Extended {
        let is_cancelled = self.cancelled.get(&lease.id).is_some_and(|record| record.is_held_by(lease));
        let jobs = if is_cancelled { &mut self.cancelled } else { &mut self.jobs };
        let Some(record) = jobs.get_mut(&lease.id).filter(|record| record.is_held_by(lease)) else {
            return Extended::Lost;
        };
        let JobState::Running { token, ends } = &mut record.state else { return Extended::Lost };
        self.leases.remove(&(*ends, *token, lease.id));
        let is_shorter = now.next_ms + millis(ttl) < *ends;
        *ends = now.next_ms + millis(ttl);
        self.leases.insert((*ends, *token, lease.id));
        if is_shorter {
            // Idle workers have timers for the later end.
            self.wake();
        }
        if is_cancelled { Extended::Cancelled } else { Extended::Held }
    }

    pub(super) fn cancel(&mut self, id: &JobId, keeps_unique: bool, now: CallTime) -> Cancelled {
        match self.jobs.get(id).map(|record| record.state) {
            None if self.cancelled.contains_key(id) => Cancelled::Notified,
            None => Cancelled::Missing,
            Some(JobState::Dead { .. }) => Cancelled::Dead,
            Some(JobState::Running { .. }) => {
                let key = self.release(id, keeps_unique, now);
                self.cancelled_keys.extend(key.map(|key| (key, *id)));
                if let Some(record) = self.jobs.remove(id) {
                    self.bytes -= record.size();
                    self.cancelled.insert(*id, record);
                }
                Cancelled::Notified
            }
            Some(JobState::Waiting) => {
                self.release(id, keeps_unique, now);
                self.remove(id);
                Cancelled::Removed
            }
        }
    }

    /// Changes a waiting job.
    pub(super) fn change(&mut self, id: &JobId, change: impl FnOnce(&mut Self)) -> Changed {
        match self.jobs.get(id).map(|record| record.state) {
            None if self.cancelled.contains_key(id) => Changed::Running,
            None => Changed::Missing,
            Some(JobState::Dead { .. }) => Changed::Dead,
            Some(JobState::Running { .. }) => Changed::Running,
            Some(JobState::Waiting) => {
                change(self);
                Changed::Done
            }
        }
    }

    pub(super) fn counts(&self, now: CallTime) -> Counts {
        let ready = |due: &BTreeSet<DueEntry>| count_due(due.iter(), now.ms) as u64;
        let waiting = || self.due.iter().chain([&self.snoozed]);
        Counts {
            waiting: waiting().map(|due| due.len() as u64).sum(),
            due: waiting().map(ready).sum(),
            running: self.leases.len() as u64,
            dead: self.dead.len() as u64,
            oldest_due: self.oldest_due(now),
            is_paused: self.is_paused,
        }
    }

    fn oldest_due(&self, now: CallTime) -> Option<Duration> {
        self.first_due().and_then(|due| now.ms.checked_sub(due)).map(Duration::from_millis)
    }

    pub(super) fn list(&self, state: State, skip: u64, limit: usize) -> Vec<StoredJob> {
        let ids: Box<dyn Iterator<Item = &JobId>> = match state {
            State::Waiting => Box::new(self.due.iter().chain([&self.snoozed]).flatten().map(|(_, id)| id)),
            State::Running => Box::new(self.leases.iter().map(|(.., id)| id)),
            State::Dead => Box::new(self.dead.iter().map(|(_, id)| id)),
        };
        let ids = ids.skip(usize::try_from(skip).unwrap_or(usize::MAX)).take(limit.min(MAX_BATCH));
        let of = |id| match state {
            State::Running => self.cancelled.get(id).or_else(|| self.jobs.get(id)),
            State::Waiting | State::Dead => self.jobs.get(id),
        };
        ids.filter_map(of).map(Record::view).collect()
    }

    pub(super) fn purge(&mut self, limit: usize, keeps_unique: bool, now: CallTime) -> usize {
        let ids = self.due.iter().chain([&self.snoozed]).flatten().take(limit.min(MAX_BATCH)).map(|(_, id)| *id);
        let ids: Vec<_> = ids.collect();
        for id in &ids {
            self.release(id, keeps_unique, now);
            self.remove(id);
        }
        ids.len()
    }

    /// The job with this id, or else the cancelled job with this id that still runs.
    pub(super) fn get(&self, id: &JobId) -> Option<StoredJob> {
        self.jobs.get(id).or_else(|| self.cancelled.get(id)).map(Record::view)
    }

    fn is_dead(&self, id: &JobId) -> bool {
        self.jobs.get(id).is_some_and(|record| matches!(record.state, JobState::Dead { .. }))
    }

    pub(super) fn replay(&mut self, id: &JobId, now: CallTime) -> bool {
        if !self.is_dead(id) || !self.acquire_unique(id, now) {
            return false;
        }
        self.unlink(id);
        if let Some(record) = self.jobs.get_mut(id) {
            (record.job.attempt, record.job.failure) = (0, None);
        }
        self.enqueue(id, now.ms);
        true
    }

    pub(super) fn forget(&mut self, id: &JobId, now: CallTime) -> bool {
        let is_dead = self.is_dead(id);
        if is_dead {
            self.release(id, false, now);
            self.remove(id);
        }
        is_dead
    }
}

/// How many entries are due. Searches from both ends and stops at the nearer boundary, so that a long backlog does not hold the lock for
/// long.
fn count_due<'a>(mut entries: impl DoubleEndedIterator<Item = &'a DueEntry> + ExactSizeIterator, now_ms: u64) -> usize {
    let len = entries.len();
    for visited in 0..len {
        if entries.next().is_none_or(|(due, _)| *due > now_ms) {
            return visited;
        }
        if entries.next_back().is_none_or(|(due, _)| *due <= now_ms) {
            return len - visited;
        }
    }
    len
}

/// Rounds up, so that no job is early.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}

fn since_1970(instant: SystemTime) -> Duration {
    instant.duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn system_time(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_due_searches_from_both_ends() {
        for len in [0, 1, 2, 3, 10, 101] {
            let entries: BTreeSet<DueEntry> = (0..len).map(|i| (100 + i / 2, JobId::from(i))).collect();
            for now_ms in 99..=100 + len {
                let due = entries.iter().filter(|(due, _)| *due <= now_ms).count();
                let mut visited = 0;
                assert_eq!(count_due(entries.iter().inspect(|_| visited += 1), now_ms), due, "{len} {now_ms}");
                assert!(visited <= 2 * due.min(entries.len() - due) + 2, "{visited} for {due} of {len}");
            }
        }
    }
}
