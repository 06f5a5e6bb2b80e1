//! All delay queues of a memory backend, and their shared capacity.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::queue::{CallTime, ClockOrigin, JobState, Queue};
use super::shares;
use crate::delay_queue::store::{Admission, QueueKey};
use crate::delay_queue::{Changed, JobId, NewJob, Priority};
use crate::error::StoreError;
use crate::key::Key;

/// The capacity includes this many bytes for each job, so jobs may have this size on average.
const BYTES_PER_JOB: usize = 1_024;

/// The queues of one memory backend and its clones. A queue is in the table while it has jobs, unique keys or a worker, or is paused.
pub(super) struct QueueTable {
    queues: Mutex<Queues>,
    origin: ClockOrigin,
    len: AtomicUsize,
    // The number of unique keys that are held for a time.
    held: AtomicUsize,
    bytes: AtomicUsize,
    capacity: usize,
}

#[derive(Default)]
struct Queues {
    all: HashMap<QueueKey, Queue>,
    // Finds expired unique keys of all queues. An entry has the time in ms at which the first key of a queue expires, and the name and the
    // partition of the queue.
    ends: BTreeSet<(u64, Box<str>, u16)>,
    // The number and the bytes of dead jobs.
    dead: usize,
    dead_bytes: usize,
    // The latest token of all queues: a queue that is removed and created again must not repeat a token.
    token: u64,
}

impl QueueTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            queues: Mutex::default(),
            origin: ClockOrigin::now(),
            len: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            capacity,
        }
    }

    /// The number of jobs in all queues.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Changes to the queues do not panic halfway, so the data behind a poisoned lock is still consistent.
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an operation on a queue, and removes the queue if it is unused afterwards.
    pub(super) fn with<T>(&self, key: &QueueKey, operation: impl FnOnce(&mut Queue, CallTime) -> T) -> T {
        self.change(&mut self.queues(), key, operation)
    }

    fn change<T>(&self, queues: &mut Queues, key: &QueueKey, operation: impl FnOnce(&mut Queue, CallTime) -> T) -> T {
        // Read under the lock, so that time does not go back between calls.
        let us = self.origin.us();
        let token = us.max(queues.token + 1);
        let now = CallTime { us, ms: us / 1_000, next_ms: us.div_ceil(1_000), token, origin: self.origin };
        let queue = queues.all.entry(*key).or_default();
        let (len, held, bytes, end) = (queue.jobs.len(), queue.unique_ends.len(), queue.bytes, queue.first_end());
        let (dead, dead_bytes) = (queue.dead.len(), queue.dead_bytes);
        let result = operation(queue, now);
        queues.token = queues.token.max(queue.token);
        self.len.fetch_add(queue.jobs.len().wrapping_sub(len), Ordering::Relaxed);
        self.held.fetch_add(queue.unique_ends.len().wrapping_sub(held), Ordering::Relaxed);
        self.bytes.fetch_add(queue.bytes.wrapping_sub(bytes), Ordering::Relaxed);
        queues.dead = queues.dead + queue.dead.len() - dead;
        queues.dead_bytes = queues.dead_bytes + queue.dead_bytes - dead_bytes;
        let new_end = queue.first_end();
        if queue.is_unused() {
            queues.all.remove(key);
        }
        if new_end != end {
            let entry = |end| (end, Box::from(key.name().as_str()), key.partition());
            end.map(|end| queues.ends.remove(&entry(end)));
            queues.ends.extend(new_end.map(entry));
        }
        result
    }

    /// Notifications for an idle worker of a queue.
    pub(super) fn watch(&self, key: &QueueKey) -> watch::Receiver<()> {
        let mut queues = self.queues();
        let wake = queues.all.entry(*key).or_default().wake.get_or_insert_with(|| watch::Sender::new(()));
        wake.subscribe()
    }

    pub(super) fn push(&self, key: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        let mut queues = self.queues();
        // Removes expired unique keys: as many as the jobs need space for, and two more for each job.
        let now_ms = self.origin.us() / 1_000;
        let demand = |queues: &Queues| queues.demand(key, jobs, max_jobs, now_ms);
        let (new, _) = demand(&queues);
        let excess = self.excess(queues.used(key), new);
        self.sweep(&mut queues, excess + 2 * jobs.len());
        // `make_room` computes the demand again after each removal. If a removed dead job has the id of a pushed job, the pushed job now
        // takes space.
        self.make_room(&mut queues, key, demand)?;
        Ok(self.change(&mut queues, key, |queue, now| {
            let mut admissions = vec![Admission::Full; jobs.len()];
            for (i, job) in by_priority(jobs) {
                admissions[i] = queue.push(job, max_jobs, now);
            }
            admissions
        }))
    }

    /// Removes up to `max` expired unique keys of all queues. It begins with the queue whose first key expired earliest. A claim removes
    /// expired keys of its own queue only, so those of a queue without workers would stay.
    fn sweep(&self, queues: &mut Queues, max: usize) {
        let mut left = max;
        while left > 0
            && let Some((until, name, part)) = queues.ends.first()
            && *until <= self.origin.us() / 1_000
        {
            let Some(name) = Key::stored(name) else {
                queues.ends.pop_first();
                continue;
            };
            let key = QueueKey::new(name).with_partition(*part);
            left -= self.change(queues, &key, |queue, now| queue.sweep(left, now)).clamp(1, left);
        }
    }

    /// The number of jobs, and of unique keys that are held for a time.
    fn used_slots(&self) -> usize {
        self.len.load(Ordering::Relaxed) + self.held.load(Ordering::Relaxed)
    }

    /// How many jobs and unique keys of other queues must go, so that a queue with `own` of them may add `new` jobs.
    fn excess(&self, (own, _): (usize, usize), new: usize) -> usize {
        shares::excess(own, self.used_slots(), new, self.capacity)
    }

    /// The same for bytes.
    fn excess_bytes(&self, (_, own): (usize, usize), bytes: usize) -> usize {
        let (all, room) = (self.bytes.load(Ordering::Relaxed), self.capacity.saturating_mul(BYTES_PER_JOB));
        shares::excess(own, all, bytes, room)
    }

    /// Makes room for the jobs and bytes that a queue demands. While dead jobs use more than half of the capacity, it removes the oldest
    /// dead jobs of the queue with the most of them.
    fn make_room(
        &self,
        queues: &mut Queues,
        key: &QueueKey,
        demand: impl Fn(&Queues) -> (usize, usize),
    ) -> Result<(), StoreError> {
        loop {
            let (new, bytes) = demand(queues);
            let used = queues.used(key);
            let (excess, excess_bytes) = (self.excess(used, new), self.excess_bytes(used, bytes));
            if excess == 0 && excess_bytes == 0 {
                return Ok(());
            }
            let size = |queue: &Queue| if excess_bytes > 0 { queue.dead_bytes } else { queue.dead.len() };
            let Some((&largest, _)) = queues.all.iter().max_by_key(|(_, queue)| size(queue)) else {
                return Err(no_room());
            };
            // Removing a dead job of the demanding queue lowers the total and the usage of this queue, so each such removal counts twice.
            let factor = if largest == *key { 2 } else { 1 };
            let (excess, excess_bytes) = (excess.div_ceil(factor), excess_bytes.div_ceil(factor));
            let half_of_bytes = self.capacity.saturating_mul(BYTES_PER_JOB) / 2;
            // Remove nothing if that would not make enough room.
            if excess > queues.dead.saturating_sub(self.capacity / 2)
                || excess_bytes > queues.dead_bytes.saturating_sub(half_of_bytes)
            {
                return Err(no_room());
            }
            self.change(queues, &largest, |queue, _| queue.forget_oldest(excess, excess_bytes));
        }
    }

    pub(super) fn replace(&self, key: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        let mut queues = self.queues();
        let record = queues.all.get(key).and_then(|queue| queue.jobs.get(id));
        let record = record.filter(|record| matches!(record.state, JobState::Waiting));
        let larger = record.map_or(0, |record| payload.len().saturating_sub(record.job.payload.len()));
        self.make_room(&mut queues, key, |_| (0, larger))?;
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

/// The jobs of a push in the order in which they are admitted, with their indexes.
fn by_priority(jobs: &[NewJob]) -> impl Iterator<Item = (usize, &NewJob)> {
    let of = |priority| jobs.iter().enumerate().filter(move |(_, job)| job.priority == priority);
    Priority::ALL.iter().flat_map(move |priority| of(*priority))
}

fn no_room() -> StoreError {
    StoreError::out_of_memory("the memory backend has no capacity for more jobs; raise `MemoryBackend::with_capacity`")
}

impl Queues {
    /// The number of jobs of a queue and of its unique keys that are held for a time, and its bytes.
    fn used(&self, key: &QueueKey) -> (usize, usize) {
        self.all.get(key).map_or((0, 0), |queue| (queue.jobs.len() + queue.unique_ends.len(), queue.bytes))
    }

    /// How many jobs, and how many bytes, a push would add. A job takes no space if its id exists, if its unique key is held, or if the
    /// queue is full. Earlier jobs of this push count for each condition. A job that replaces a dead one takes only its additional bytes.
    fn demand(&self, key: &QueueKey, jobs: &[NewJob], max_jobs: u64, now_ms: u64) -> (usize, usize) {
        let existing = self.all.get(key);
        let mut room = max_jobs.saturating_sub(existing.map_or(0, |queue| queue.jobs.len() as u64));
        let is_held = |key: &Key| existing.is_some_and(|queue| queue.holder(key, now_ms).is_some());
        // Ids and keys of earlier jobs of this push.
        let (mut ids, mut keys) = (HashSet::new(), HashSet::new());
        let (mut new, mut bytes) = (0, 0);
        for (_, job) in by_priority(jobs) {
            let record = existing.and_then(|queue| queue.jobs.get(&job.id));
            let exists = record.is_some_and(|record| !matches!(record.state, JobState::Dead { .. }));
            let is_refused = exists || ids.contains(&job.id) || (record.is_none() && room == 0);
            let key = job.unique.map(|unique| unique.key);
            if is_refused || key.is_some_and(|key| is_held(&key) || keys.contains(&key)) {
                continue;
            }
            // A single job has no successors to compare with.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use super::super::queue::RECLAIM_BATCH;
    use super::*;
    use crate::MemoryBackend;
    use crate::delay_queue::store::{Ack, AckKind, Claim, DelayQueueStore, MAX_BATCH, WorkerId};
    use crate::delay_queue::{DeadLimits, Due, Headers, Reason, Unique, UniqueFor};

    const MINUTE: Duration = Duration::from_secs(60);

    impl MemoryBackend {
        /// The date from which the times of queues count.
        pub(crate) fn started_at(&self) -> SystemTime {
            UNIX_EPOCH + self.inner.queues.origin.date
        }
    }

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

    /// Claims a job and finishes it. Returns its token.
    async fn run(backend: &MemoryBackend, queue: &QueueKey) -> u64 {
        let worker = WorkerId::random().unwrap();
        let claim = Claim { worker, limit: 1, lease: MINUTE, dead: DeadLimits::default() };
        let lease = backend.claim(queue, &[], &claim).await.unwrap().jobs[0].lease();
        let finish = Ack { lease, kind: AckKind::Done };
        backend.claim(queue, &[finish], &Claim { limit: 0, ..claim }).await.unwrap();
        lease.token
    }

    /// The number of jobs and of unique keys that are held for a time, the number of queues, and the number of queues with such keys.
    fn sizes(backend: &MemoryBackend) -> (usize, usize, usize) {
        let table = &backend.inner.queues;
        let queues = table.queues();
        (table.used_slots(), queues.all.len(), queues.ends.len())
    }

    /// Regression: the backend refused all jobs of a push if it had no room for some of them.
    #[tokio::test(start_paused = true)]
    async fn refused_job_of_a_batch_takes_no_room() {
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
        assert!(admitted(10, 11, &many).await.is_err(), "the backend has no room for the last job");
    }

    /// Regression: the room was computed for the first jobs of a push, and the queue admitted those with the highest priority.
    #[tokio::test(start_paused = true)]
    async fn room_is_computed_for_the_jobs_with_the_highest_priority() {
        let payload = vec![0; BYTES_PER_JOB + 1].into();
        let jobs = [job(1, None), NewJob { priority: Priority::High, payload, ..job(2, None) }];
        let result = MemoryBackend::with_capacity(1).push(&QueueKey::new("q"), &jobs, 1).await;
        assert!(result.unwrap_err().is_out_of_memory());
    }

    #[tokio::test(start_paused = true)]
    async fn expired_keys_of_unused_queues_make_room() {
        let backend = MemoryBackend::with_capacity(10);
        let queue = |name: u32| QueueKey::new(name).with_partition(3);
        for name in 0..19 {
            backend.push(&queue(name), &[job(1, unique("a"))], 100).await.unwrap();
            run(&backend, &queue(name)).await;
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let other = QueueKey::new("other");
        assert!(backend.push(&other, &[job(1, None)], 100).await.unwrap_err().is_out_of_memory());
        // The first key has expired.
        tokio::time::advance(Duration::from_millis(41_500)).await;
        assert_eq!(backend.push(&other, &[job(1, None)], 100).await.unwrap(), [Admission::New]);
        assert!(backend.push(&other, &[job(2, None)], 100).await.unwrap_err().is_out_of_memory());
        tokio::time::advance(MINUTE).await;
        let jobs: Vec<_> = (2..11).map(|id| job(id, None)).collect();
        assert_eq!(backend.push(&other, &jobs, 100).await.unwrap(), [Admission::New; 9]);
        assert_eq!(sizes(&backend), (10, 1, 0));
    }

    /// Claims all due jobs, and finishes them as dead.
    async fn kill(backend: &MemoryBackend, queue: &QueueKey) {
        let worker = WorkerId::random().unwrap();
        let claim = Claim { worker, limit: MAX_BATCH, lease: MINUTE, dead: DeadLimits::default() };
        let kind = AckKind::Dead { reason: Reason::Failed, error: Arc::default() };
        let claimed = backend.claim(queue, &[], &claim).await.unwrap().jobs;
        let finished: Vec<_> = claimed.iter().map(|job| Ack::new(job.lease(), kind.clone())).collect();
        backend.claim(queue, &finished, &Claim { limit: 0, ..claim }).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn dead_jobs_do_not_block_other_queues() {
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
        // No dead job is removed for a push that would still not fit.
        assert!(backend.push(&other, &jobs, 100).await.unwrap_err().is_out_of_memory());
        assert_eq!(dead().await, [8, 2]);
        for id in 0..7 {
            assert_eq!(backend.push(&other, &[job(id, None)], 100).await.unwrap(), [Admission::New]);
        }
        assert!(backend.push(&other, &[job(7, None)], 100).await.unwrap_err().is_out_of_memory());
        assert_eq!(dead().await, [4, 2]);
        assert_eq!(sizes(&backend).0, 13);
    }

    /// Regression: a push that added nothing removed dead jobs, or failed with an out-of-memory error.
    #[tokio::test(start_paused = true)]
    async fn push_that_adds_nothing_needs_no_room() {
        let backend = MemoryBackend::with_capacity(5);
        let [poison, other] = ["poison", "other"].map(QueueKey::new);
        let dead = async || backend.counts(&poison).await.unwrap().dead;
        let jobs: Vec<_> = (0..5).map(|id| job(id, None)).collect();
        backend.push(&poison, &jobs, 100).await.unwrap();
        kill(&backend, &poison).await;
        let held = Some(Unique { key: Key::from("a"), span: UniqueFor::WaitingOrRunning });
        backend.push(&other, &[job(0, held), job(1, None)], 100).await.unwrap();
        let exists = Admission::Exists(JobId::from("0"));
        assert_eq!(backend.push(&other, &[job(2, held), job(3, held)], 100).await.unwrap(), [exists; 2]);
        assert_eq!(backend.push(&other, &[job(2, None)], 2).await.unwrap(), [Admission::Full]);
        assert_eq!(dead().await, 5);
        assert_eq!(backend.push(&other, &[job(2, held), job(3, None)], 100).await.unwrap(), [exists, Admission::New]);
        assert_eq!(dead().await, 4);
        // In a full backend, a push that adds nothing needs no room, either.
        let backend = MemoryBackend::with_capacity(2);
        backend.push(&other, &[job(0, held), job(1, None)], 100).await.unwrap();
        assert_eq!(backend.push(&other, &[job(2, held)], 100).await.unwrap(), [exists]);
        assert_eq!(backend.push(&other, &[job(2, None)], 2).await.unwrap(), [Admission::Full]);
        assert!(backend.push(&other, &[job(2, None)], 100).await.unwrap_err().is_out_of_memory());
    }

    #[tokio::test(start_paused = true)]
    async fn full_queue_does_not_block_pushes_to_others() {
        let backend = MemoryBackend::with_capacity(100);
        let push = async |queue: &str, id: u32| backend.push(&QueueKey::new(queue), &[job(id, None)], 1_000).await;
        for id in 0..100 {
            assert_eq!(push("flood", id).await.unwrap(), [Admission::New]);
        }
        assert!(push("flood", 100).await.unwrap_err().is_out_of_memory());
        for id in 0..50 {
            assert_eq!(push("other", id).await.unwrap(), [Admission::New]);
        }
        assert!(push("other", 50).await.unwrap_err().is_out_of_memory());
        assert_eq!(push("third", 0).await.unwrap(), [Admission::New]);
        // A queue that is full of large jobs does not block other queues, either.
        let large = |id| NewJob { payload: vec![0; 1_000].into(), ..job(id, None) };
        let backend = MemoryBackend::with_capacity(10);
        let jobs: Vec<_> = (0..10).map(large).collect();
        assert_eq!(backend.push(&QueueKey::new("flood"), &jobs, 100).await.unwrap(), [Admission::New; 10]);
        assert_eq!(backend.push(&QueueKey::new("other"), &jobs[..5], 100).await.unwrap(), [Admission::New; 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn removed_dead_job_may_be_pushed_in_the_same_batch() {
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
    async fn bytes_of_dead_jobs_do_not_block_other_queues() {
        let backend = MemoryBackend::with_capacity(4);
        let [poison, other] = ["poison", "other"].map(QueueKey::new);
        let large = |id, len: usize| NewJob { payload: vec![0; len].into(), ..job(id, None) };
        let dead = async || backend.counts(&poison).await.unwrap().dead;
        backend.push(&poison, &[large(0, 1_000), large(1, 1_000), large(2, 1_000)], 100).await.unwrap();
        kill(&backend, &poison).await;
        assert_eq!(backend.push(&other, &[large(0, 2_590)], 100).await.unwrap(), [Admission::New]);
        assert_eq!(dead().await, 3);
        // A payload that grows needs room, too.
        assert_eq!(backend.replace(&other, &large(0, 0).id, &[0; 2_600]).await.unwrap(), Changed::Done);
        assert_eq!(dead().await, 2);
        // Dead jobs now use less than half of the capacity.
        assert_eq!(backend.push(&other, &[large(1, 490)], 100).await.unwrap(), [Admission::New]);
        assert!(backend.push(&other, &[large(2, 10)], 100).await.unwrap_err().is_out_of_memory());
        assert!(backend.replace(&other, &large(1, 0).id, &[0; 1_000]).await.unwrap_err().is_out_of_memory());
        assert_eq!(dead().await, 2);
        assert_eq!(backend.forget(&poison, &[large(1, 0).id, large(2, 0).id]).await.unwrap(), [true; 2]);
        assert_eq!(backend.push(&other, &[large(2, 1_000)], 100).await.unwrap(), [Admission::New]);
    }

    #[tokio::test(start_paused = true)]
    async fn key_held_again_before_its_sweep_is_counted_once() {
        // A push and a claim together remove one key less than this, so the last key is left.
        const KEYS: u32 = 2 + RECLAIM_BATCH as u32 + 1;
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

    /// The machine was suspended, or its clock was wrong when the backend was created.
    #[tokio::test(start_paused = true)]
    async fn instant_follows_the_current_clock_of_the_machine() {
        let queue = QueueKey::new("test");
        let at = |id, after| NewJob { due: Due::At(SystemTime::now() + after), ..job(id, None) };
        for is_ahead in [true, false] {
            let mut backend = MemoryBackend::new();
            let date = &mut Arc::get_mut(&mut backend.inner).unwrap().queues.origin.date;
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

    #[tokio::test(start_paused = true)]
    async fn recreated_queue_grants_larger_tokens() {
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
