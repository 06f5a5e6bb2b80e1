use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::yield_now;

use super::activity::ActivityGuard;
use super::erased::{Call, DynStore};
use super::error::QueueError;
use super::id::{JobId, UniqueIds};
use super::job::{Canceller, Job};
use super::outcome::error_text;
use super::push::{Push, Pushed, check_delay};
use super::queue_handle::QueueHandle;
use super::record::{Due, NewJob, Reason, StoredJob};
use super::removal::{Cancel, Purge};
use super::store::{
    Ack, AckKind, Changed, Claim, Claimed, ClaimedJob, Counts, DeadLimits, DelayQueueStore, Extended, JobLease,
    MAX_BATCH, QueueKey, State, WorkerId, batch_len,
};
use super::worker::store_client::{CircuitWait, StoreClient};
use crate::codec::{Codec, Json};
use crate::error::{BoxError, ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;
use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;

/// How many ids a bulk push generates before it yields to other tasks.
const IDS_PER_YIELD: u32 = 1_024;

/// A queue of delayed jobs.
///
/// Cheap to clone. Clones, and all queues with the same name on the same backend, are the same queue.
pub struct DelayQueue<T, C = Json> {
    handle: QueueHandle,
    dead: DeadLimits,
    codec: Arc<C>,
    payload: PhantomData<fn() -> T>,
}

#[cfg(feature = "json")]
impl<T> DelayQueue<T> {
    /// The queue `name` of `store`, which is a [backend](crate::backend). Payloads are stored as JSON.
    pub fn new(store: impl DelayQueueStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        Self::with_codec(store, name, Json)
    }
}

impl<T, C> DelayQueue<T, C> {
    /// The queue `name` of `store`, with payloads encoded by `codec`.
    pub fn with_codec(store: impl DelayQueueStore + Send + Sync + 'static, name: impl Into<Key>, codec: C) -> Self {
        let name = name.into();
        let handle = QueueHandle {
            store: Arc::new(store),
            name,
            partitions: 1,
            max_jobs: 1_000_000,
            max_size: 64 * 1_024,
            max_attempts: NewJob::DEFAULT_ATTEMPTS,
            deadline: Duration::from_millis(100),
            client: Arc::new(StoreClient::new(name, CircuitBreaker::new(), 1)),
        };
        Self { handle, dead: DeadLimits::default(), codec: Arc::new(codec), payload: PhantomData }
    }

    /// Registers a worker or schedule for the shutdown of the backend. Call it when the worker or schedule starts.
    pub(crate) fn start_activity(&self) -> ActivityGuard {
        let guard = ActivityGuard::new();
        self.handle.store.add_to_shutdown(&ShutdownTarget::new(guard.activity()));
        guard
    }

    /// The name of the queue.
    #[must_use]
    pub const fn name(&self) -> &Key {
        &self.handle.name
    }

    /// Which processes share the queue.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.handle.store.reach()
    }

    /// Checks that the queue is shared as widely as you need, so that the memory backend, whose jobs end with the process, is not
    /// used by mistake.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the store's reach is less than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.reach().require(needed)?;
        Ok(self)
    }

    /// The largest number of jobs in the queue, or in each partition of a [split](Self::split) queue: waiting, running and dead ones.
    /// Defaults to 1,000,000. A push beyond that is [full](QueueError::Full).
    ///
    /// Dead jobs take up at most half of it, whatever [`keep_dead`](Self::keep_dead) says. Set the same value on the queue of a
    /// [worker](super::DelayQueueWorker), which enforces this share. In a [`MemoryBackend`](crate::MemoryBackend), a single queue holds no
    /// more jobs than the capacity, which defaults to 100,000. All queues together hold less than twice as many. Beyond that a push returns
    /// [`QueueError::Store`].
    #[must_use]
    pub fn max_jobs(mut self, jobs: u64) -> Self {
        self.handle.max_jobs = jobs;
        self
    }

    /// The largest size of a job in bytes: its encoded payload and its headers. Defaults to 64 KiB. A larger job is
    /// [too large](QueueError::TooLarge).
    ///
    /// A claim takes about 1 MiB of jobs at most, and a worker with more capacity claims again. A bulk push sends Redis at most that much
    /// in one step. Redis runs no other command during such a step. The same holds while it records failed attempts, and reads and
    /// writes up to 64 jobs that are tried again. Store much larger data elsewhere, and put a reference into the payload.
    #[must_use]
    pub fn max_size(mut self, bytes: usize) -> Self {
        self.handle.max_size = bytes;
        self
    }

    /// The number of attempts of a job, unless [`Push::max_attempts`] sets another. Defaults to 20.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u16) -> Self {
        self.handle.max_attempts = attempts.max(1);
        self
    }

    /// How many dead jobs the queue keeps, in each partition of a [split](Self::split) queue, and for how long. Defaults to 10,000 for 90
    /// days. Beyond that the oldest are removed.
    ///
    /// At most half of [`max_jobs`](Self::max_jobs) may be dead, so that dead jobs do not block new ones. The age is at most 90 days
    /// ([`DeadLimits::MAX_AGE`]). The limits of a [worker's](super::DelayQueueWorker) queue apply: each claim removes what exceeds the
    /// limits of the claiming worker, without a log line. Set the same limits for all workers of this queue. A full
    /// [`MemoryBackend`](crate::MemoryBackend) may keep fewer: while the dead jobs of all queues use more than half of its capacity, new
    /// jobs replace some.
    #[must_use]
    pub fn keep_dead(mut self, count: u64, age: Duration) -> Self {
        self.dead = DeadLimits { count, age: age.min(DeadLimits::MAX_AGE) };
        self
    }

    /// The deadline of a store call. Defaults to 100 ms. A [worker](super::DelayQueueWorker) has longer deadlines for its own calls: a third
    /// of its lease, from 100 ms to 5 s, and at most a second during its shutdown. With zero, no call reaches the store, and each returns
    /// an error with [`ConfigError::ZeroTimeout`] as its source.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.handle.deadline = deadline;
        self
    }

    /// When the queue and its clones stop calling a failing store, and how soon they probe it. Defaults to [`CircuitBreaker::new`]. While
    /// the circuit is open, pushes and all other calls fail at once with [`QueueError::Store`]; only [`push_all`](Self::push_all) waits for a
    /// while. Each partition of a [split](Self::split) queue has its own circuit. A [worker](super::DelayQueueWorker) ignores it, and retries
    /// until the store works.
    #[must_use]
    pub fn circuit_breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.handle.client = Arc::new(StoreClient::new(self.handle.name, breaker, self.handle.partitions));
        self
    }

    /// Splits the queue by job id into `partitions`, for a queue that is too much for one node of a cluster. Defaults to 1, and at most
    /// 1,024. Use the same value wherever you use this queue. Jobs that are in the queue already stay where they are.
    ///
    /// A [unique key](super::Push::unique) is unique within the partition of its job. A job without an id of its own goes to the partition of
    /// its key, so all such jobs of a key share a partition. A job with an id goes to the partition of that id. Jobs of one key in different
    /// partitions do not exclude each other.
    #[must_use]
    pub fn split(mut self, partitions: u16) -> Self {
        self.handle.partitions = partitions.clamp(1, 1_024);
        self.handle.client = Arc::new(self.handle.client.split(self.handle.partitions));
        self
    }

    /// Pushes a job.
    pub fn push(&self, payload: impl Borrow<T>) -> Push
    where
        C: Codec<T>,
    {
        let payload = self.codec.encode(payload.borrow()).map_err(Arc::from);
        Push::new(self.handle.clone(), payload)
    }

    /// Pushes several jobs. Returns a result for each, in order.
    ///
    /// A store call takes up to [`MAX_BATCH`] jobs of one partition, of about 1 MiB in total. Jobs of [normal](super::Priority::Normal)
    /// priority with the same due time are cheaper while they wait, if no job of the call has an [id](Push::id) or a
    /// [unique key](Push::unique). They take about half the memory of others in Redis, and two thirds of the work, unless the queue is
    /// [split](Self::split).
    ///
    /// Each push has to come from this queue, a clone of it, or a queue with the same name and number of partitions on the same backend.
    /// Clones of a backend are the same backend. Two backends that were opened separately are not the same, even if they use the same
    /// server. Any other push fails with [another queue](ConfigError::OtherQueue), and is pushed nowhere.
    ///
    /// Each store call has the [deadline](Self::deadline). If a call fails, its jobs fail, and the other calls go on. If the
    /// [circuit](Self::circuit_breaker) is open, the call waits for up to a second until the store may be probed. Jobs that are left after
    /// that fail at once.
    ///
    /// # Cancellation
    ///
    /// If you drop the future, the remaining jobs are not pushed.
    pub async fn push_all(&self, pushes: impl IntoIterator<Item = Push>) -> Vec<Result<Pushed, QueueError>> {
        let mut results: Vec<Option<Result<Pushed, QueueError>>> = Vec::new();
        let mut ids = UniqueIds::default();
        let mut partitions: Vec<Vec<(usize, NewJob)>> = vec![Vec::new(); self.handle.partitions.into()];
        let mut wait = CircuitWait::bulk();
        // Collected, since the iterator may not be `Send` and must not be held across an await.
        let pushes: Vec<_> = pushes.into_iter().collect();
        let mut ids_tried = 0;
        for push in pushes {
            ids_tried += push.ids_to_try();
            if ids_tried > IDS_PER_YIELD {
                ids_tried = 0;
                yield_now().await;
            }
            if !push.handle().is_same_queue(&self.handle) {
                let error = ConfigError::OtherQueue {
                    queue: self.handle.name.to_string(),
                    other: push.handle().name.to_string(),
                };
                results.push(Some(Err(error.into())));
                continue;
            }
            match push.into_job(|| ids.next()) {
                Ok(job) => {
                    let partition = usize::from(self.handle.partition_of(&job.id).partition());
                    partitions[partition].push((results.len(), job));
                    results.push(None);
                }
                Err(error) => results.push(Some(Err(error))),
            }
        }
        for (partition, jobs) in partitions.into_iter().enumerate() {
            let queue = self.handle.partition(partition as u16);
            let mut jobs = jobs.into_iter();
            while jobs.len() > 0 {
                let len = batch_len(jobs.as_slice().iter().map(|(_, job)| job.size()));
                let batch = jobs.by_ref().take(len);
                let (positions, batch): (Vec<_>, Vec<_>) =
                    batch.map(|(position, job)| ((position, job.id), job)).unzip();
                let reply = self.handle.push(queue, batch, &mut wait).await;
                if reply.is_ok() {
                    wait.reset();
                }
                for (i, (position, id)) in positions.into_iter().enumerate() {
                    results[position] = Some(match &reply {
                        Ok(admissions) => Pushed::of(id, admissions.get(i).copied(), &self.handle),
                        Err(error) => Err(error.clone().into()),
                    });
                }
            }
        }
        results.into_iter().flatten().collect()
    }

    /// The job with this id, in any state; `None` if there is none, or it is done.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn get(&self, id: impl Into<JobId>) -> Result<Option<StoredJob>, QueueError> {
        let id = id.into();
        let queue = self.handle.partition_of(&id);
        Ok(self.handle.call(queue, |store, deadline| store.get(queue, id, deadline)).await?)
    }

    /// Decodes the payload of a stored job.
    ///
    /// # Errors
    ///
    /// If the codec cannot read it.
    pub fn decode(&self, job: &StoredJob) -> Result<T, BoxError>
    where
        C: Codec<T>,
    {
        self.codec.decode(&job.payload)
    }

    /// Cancels a job: removes it if it waits. If it is running, its worker is notified, and the job is not tried again. A dead job stays: see
    /// [`forget_ids`](Self::forget_ids).
    ///
    /// The id and the unique key are free at once, even a key that is held for [`UniqueFor::Time`](super::UniqueFor::Time), unless you
    /// [keep](Cancel::keep_unique) that key. The key of a `Recurring` job [stays](super::UniqueFor::Occurrence).
    ///
    /// You can push a job under the same id or key while the cancelled one still runs. Workers claim the new job after
    /// that run, or its lease, has ended. Until then [`get`](Self::get) returns the new job, and [`list`](Self::list) returns both.
    ///
    /// ```
    /// # #[cfg(feature = "json")] {
    /// # use std::time::Duration;
    /// # use tollgate::delay_queue::UniqueFor;
    /// # use tollgate::{DelayQueue, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// # let queue = DelayQueue::<String>::new(MemoryBackend::new(), "mail");
    /// let once_a_day = UniqueFor::Time(Duration::from_secs(86_400));
    /// let push = || queue.push("news".to_owned()).unique_for("news:42", once_a_day);
    /// queue.cancel(push().await?).await?;
    /// let pushed = push().await?;
    /// assert!(pushed.is_new());
    /// queue.cancel(pushed).keep_unique().await?;
    /// assert!(!push().await?.is_new());
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub fn cancel(&self, id: impl Into<JobId>) -> Cancel {
        Cancel::new(self.handle.clone(), id.into())
    }

    /// Releases a unique key, whichever job holds it and for however long, so that you can push another job with this key. Returns
    /// whether a job held it.
    ///
    /// The job that held the key does not change. A job that you push with the key after this may run at the same
    /// time. [`cancel`](Self::cancel) and [`purge`](Self::purge) release the keys of the jobs that they remove.
    ///
    /// This calls each partition of a [split](Self::split) queue in turn, since a job with an id is in the partition of that id.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`] of the first partition that failed. The key may then be released in some partitions.
    pub async fn release_unique(&self, key: impl Into<Key>) -> Result<bool, QueueError> {
        let key = key.into();
        let mut result: Result<_, StoreError> = Ok(false);
        for queue in self.partitions() {
            let reply = self.handle.call(queue, |store, deadline| store.release_unique(queue, key, deadline)).await;
            result = result.and_then(|was_held| Ok(was_held | reply?));
        }
        Ok(result?)
    }

    /// Changes the due time of a waiting job: to a `Duration` from now, or to a `SystemTime`.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`], or [`QueueError::Config`] for a delay longer than [`Due::MAX_DELAY`].
    pub async fn reschedule(&self, id: impl Into<JobId>, due: impl Into<Due>) -> Result<Changed, QueueError> {
        let (id, due) = (id.into(), due.into());
        if let Due::In(delay) = due {
            check_delay(delay)?;
        }
        let queue = self.handle.partition_of(&id);
        Ok(self.handle.call(queue, |store, deadline| store.reschedule(queue, id, due, deadline)).await?)
    }

    /// Makes a waiting job due at once.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn promote(&self, id: impl Into<JobId>) -> Result<Changed, QueueError> {
        self.reschedule(id, Duration::ZERO).await
    }

    /// Replaces the payload of a waiting job. The headers of the job stay, and count towards its [size](Self::max_size).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`], [`QueueError::Encode`] or [`QueueError::TooLarge`].
    pub async fn replace(&self, id: impl Into<JobId>, payload: impl Borrow<T>) -> Result<Changed, QueueError>
    where
        C: Codec<T>,
    {
        let id = id.into();
        let payload = self.codec.encode(payload.borrow()).map_err(|error| QueueError::Encode(error.into()))?;
        let (queue, max) = (self.handle.partition_of(&id), self.handle.max_size);
        let stored = self.handle.call(queue, |store, deadline| store.get(queue, id, deadline)).await?;
        let bytes = payload.len() + stored.map_or(0, |job| job.headers.size());
        if bytes > max {
            return Err(QueueError::TooLarge { bytes, max });
        }
        Ok(self.handle.call(queue, |store, deadline| store.replace(queue, id, payload, deadline)).await?)
    }

    /// The number of jobs, in all partitions of the queue.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn counts(&self) -> Result<Counts, QueueError> {
        let mut total = Counts::default();
        for queue in self.partitions() {
            let counts = self.handle.call(queue, |store, deadline| store.counts(queue, deadline)).await?;
            total.waiting += counts.waiting;
            total.due += counts.due;
            total.running += counts.running;
            total.dead += counts.dead;
            total.oldest_due = total.oldest_due.max(counts.oldest_due);
            total.is_paused |= counts.is_paused;
        }
        Ok(total)
    }

    /// Lists jobs in one state, after skipping the first `skip`. Waiting jobs are sorted by priority, the highest first and snoozed jobs
    /// last, and within a priority by due time. Running jobs are sorted by the end of their lease, dead jobs by when they died. The
    /// partitions of a [split](Self::split) queue follow one another. Jobs that cannot be read are left out.
    ///
    /// Returns at most `limit` jobs, no more than [`MAX_BATCH`], and fewer if they are large. For the next page, add the number of returned
    /// jobs to `skip`. An empty page is the last one. Since jobs may come and go between two calls, a job can appear twice or not at all.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn list(&self, state: State, skip: u64, limit: usize) -> Result<Vec<StoredJob>, QueueError> {
        let limit = limit.min(MAX_BATCH);
        if self.handle.partitions == 1 {
            let queue = self.handle.partition(0);
            return Ok(self
                .handle
                .call(queue, |store, deadline| store.list(queue, state, skip, limit, deadline))
                .await?);
        }
        let (mut jobs, mut skip) = (Vec::new(), skip);
        for queue in self.partitions() {
            let room = limit.saturating_sub(jobs.len());
            if room == 0 {
                break;
            }
            let all = self.handle.call(queue, |store, deadline| store.counts(queue, deadline)).await?.of(state);
            if skip >= all {
                skip -= all;
                continue;
            }
            let page =
                self.handle.call(queue, |store, deadline| store.list(queue, state, skip, room, deadline)).await?;
            // If large jobs cut the page short, the next jobs are not those of the next partition.
            let is_cut = !page.is_empty() && (page.len() as u64) < all - skip;
            jobs.extend(page);
            if is_cut {
                break;
            }
            skip = 0;
        }
        Ok(jobs)
    }

    /// Stops all workers from claiming, in all processes. Running jobs go on, and you can still push jobs.
    ///
    /// This calls each partition of a [split](Self::split) queue in turn, and goes on after a failure. A partition that does not answer takes
    /// up to a [deadline](Self::deadline).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`] of the first partition that failed. Other partitions may be paused.
    ///
    /// # Cancellation
    ///
    /// If you drop the future, the remaining partitions do not change.
    pub async fn pause(&self) -> Result<(), QueueError> {
        self.set_paused(true).await
    }

    /// Ends a [pause](Self::pause), in each partition of the queue.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`] of the first partition that failed. Some partitions may still be paused.
    pub async fn resume(&self) -> Result<(), QueueError> {
        self.set_paused(false).await
    }

    async fn set_paused(&self, is_paused: bool) -> Result<(), QueueError> {
        let mut result = Ok(());
        for queue in self.partitions() {
            let reply = self.handle.call(queue, |store, deadline| store.pause(queue, is_paused, deadline)).await;
            result = result.and(reply);
        }
        Ok(result?)
    }

    /// Removes all waiting jobs, due or not, without running them. Returns how many. Their unique keys are released, unless you
    /// [keep](Purge::keep_unique) the keys held for a time. The keys of `Recurring` jobs [stay](super::UniqueFor::Occurrence). Running jobs
    /// go on. To let workers finish their jobs, see
    /// [`DelayQueueWorker::run_until`](super::DelayQueueWorker::run_until).
    ///
    /// In each partition of the queue, this removes as many jobs as waited when it began, so it ends however fast jobs are pushed meanwhile.
    /// New jobs may be among the removed ones, and older jobs may then stay.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]. Some jobs may then be removed.
    ///
    /// # Cancellation
    ///
    /// Jobs are removed in batches. If you drop the future, the rest stays.
    pub fn purge(&self) -> Purge {
        Purge::new(self.handle.clone())
    }

    /// Dead jobs, the oldest first: see [`list`](Self::list).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn dead(&self, skip: u64, limit: usize) -> Result<Vec<StoredJob>, QueueError> {
        self.list(State::Dead, skip, limit).await
    }

    /// Lets dead jobs wait again, due at once and with all of their attempts: jobs that match `filter`, the oldest first, at most `limit`.
    /// Returns how many. Visits as many jobs as were dead when it began, so a job that dies again meanwhile is left for the next call.
    ///
    /// A job that is unique while it [waits or runs](super::UniqueFor::WaitingOrRunning) takes its key again, and stays dead if another job
    /// holds the key. If you know the ids, use [`replay_ids`](Self::replay_ids).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]. Some jobs may then wait again.
    pub async fn replay(&self, limit: usize, filter: impl FnMut(&StoredJob) -> bool) -> Result<usize, QueueError> {
        self.change_matching(limit, filter, |store, queue, ids, deadline| store.replay(queue, ids, deadline)).await
    }

    /// Removes dead jobs that match `filter`, the oldest first, at most `limit`. Returns how many. Visits as many jobs as were dead when
    /// it began. If you know the ids, use [`forget_ids`](Self::forget_ids).
    ///
    /// A key that a removed job holds for a [time](super::UniqueFor::Time) is released. The key of a `Recurring` job
    /// [stays](super::UniqueFor::Occurrence).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]. Some jobs may then be removed.
    pub async fn forget(&self, limit: usize, filter: impl FnMut(&StoredJob) -> bool) -> Result<usize, QueueError> {
        self.change_matching(limit, filter, |store, queue, ids, deadline| store.forget(queue, ids, deadline)).await
    }

    /// Lets the dead jobs with these ids wait again, as [`replay`](Self::replay) does. Returns for each, in order, whether it waits again:
    /// `false` if it is not dead, does not exist, or another job holds its unique key. Reads no other dead jobs: each store call takes up
    /// to [`MAX_BATCH`] ids of one partition, or fewer if the jobs exceed about 1 MiB.
    ///
    /// ```
    /// # #[cfg(feature = "json")] {
    /// # use tollgate::{DelayQueue, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// # let queue = DelayQueue::<String>::new(MemoryBackend::new(), "mail");
    /// let answers = queue.replay_ids(["welcome:42", "welcome:43"]).await?;
    /// assert_eq!(answers, [false, false], "there are no such jobs");
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]. Some jobs may then wait again.
    pub async fn replay_ids(&self, ids: impl IntoIterator<Item: Into<JobId>>) -> Result<Vec<bool>, QueueError> {
        self.change_dead_ids(ids, |store, queue, ids, deadline| store.replay(queue, ids, deadline)).await
    }

    /// Removes the dead jobs with these ids, as [`forget`](Self::forget) does, and reads no others. Returns for each, in order, whether it was
    /// dead. Waiting and running jobs stay: see [`cancel`](Self::cancel).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]. Some jobs may then be removed.
    pub async fn forget_ids(&self, ids: impl IntoIterator<Item: Into<JobId>>) -> Result<Vec<bool>, QueueError> {
        self.change_dead_ids(ids, |store, queue, ids, deadline| store.forget(queue, ids, deadline)).await
    }

    async fn change_dead_ids(
        &self,
        ids: impl IntoIterator<Item: Into<JobId>>,
        operation: impl Fn(Arc<dyn DynStore>, QueueKey, Vec<JobId>, Duration) -> Call<Vec<bool>>,
    ) -> Result<Vec<bool>, QueueError> {
        let mut partitions: Vec<Vec<(usize, JobId)>> = vec![Vec::new(); self.handle.partitions.into()];
        let mut answers = Vec::new();
        for id in ids {
            let id = id.into();
            partitions[usize::from(self.handle.partition_of(&id).partition())].push((answers.len(), id));
            answers.push(false);
        }
        for (queue, jobs) in self.partitions().zip(partitions) {
            let (positions, ids): (Vec<_>, Vec<_>) = jobs.into_iter().unzip();
            for (position, is_changed) in positions.into_iter().zip(self.change_batches(queue, &ids, &operation).await?)
            {
                answers[position] = is_changed;
            }
        }
        Ok(answers)
    }

    /// Calls the store until it has replied for each of these ids: if the jobs are large, a reply covers only the first ids of a call.
    async fn change_batches(
        &self,
        queue: QueueKey,
        ids: &[JobId],
        operation: impl Fn(Arc<dyn DynStore>, QueueKey, Vec<JobId>, Duration) -> Call<Vec<bool>>,
    ) -> Result<Vec<bool>, StoreError> {
        let mut answers = Vec::with_capacity(ids.len());
        while answers.len() < ids.len() {
            let batch: Vec<_> = ids.iter().skip(answers.len()).take(MAX_BATCH).copied().collect();
            let size = batch.len();
            let changed = self.handle.call(queue, |store, deadline| operation(store, queue, batch, deadline)).await?;
            if changed.is_empty() {
                return Err(StoreError::other("the store returned no result for the jobs to change"));
            }
            answers.extend(changed.into_iter().take(size));
        }
        Ok(answers)
    }

    async fn change_matching(
        &self,
        limit: usize,
        mut filter: impl FnMut(&StoredJob) -> bool,
        operation: impl Fn(Arc<dyn DynStore>, QueueKey, Vec<JobId>, Duration) -> Call<Vec<bool>>,
    ) -> Result<usize, QueueError> {
        let mut changed = 0;
        for queue in self.partitions() {
            if changed >= limit {
                break;
            }
            // Jobs that die meanwhile are listed last, even jobs that this call has replayed. Visiting only as many as were there before
            // bounds the loop, however fast jobs die.
            let mut unseen = self.handle.call(queue, |store, deadline| store.counts(queue, deadline)).await?.dead;
            // Jobs that do not match or cannot be changed stay in the list, and are not visited again.
            let mut skip = 0;
            while changed < limit && unseen > 0 {
                let size = usize::try_from(unseen).unwrap_or(usize::MAX).min(MAX_BATCH);
                let page = self
                    .handle
                    .call(queue, |store, deadline| store.list(queue, State::Dead, skip, size, deadline))
                    .await?;
                unseen = unseen.saturating_sub(page.len() as u64);
                let (mut rest, mut left) = (page.iter(), page.len());
                // Try at most as many jobs as may still be changed. If one of them cannot be changed, the next round tries another one.
                while changed < limit && rest.len() > 0 {
                    let wanted = rest.by_ref().filter(|job| filter(job)).map(|job| job.id);
                    let ids: Vec<_> = wanted.take(limit - changed).collect();
                    if !ids.is_empty() {
                        let answers = self.change_batches(queue, &ids, &operation).await?;
                        let gone = answers.into_iter().filter(|is_changed| *is_changed).count();
                        (changed, left) = (changed + gone, left.saturating_sub(gone));
                    }
                }
                skip += left as u64;
                // A page may be short because its jobs are large. Only an empty page is the end.
                if page.is_empty() {
                    break;
                }
            }
        }
        Ok(changed)
    }

    /// The partitions of the queue, each of which is a queue to the store.
    pub(crate) fn partitions(&self) -> impl Iterator<Item = QueueKey> + use<T, C> {
        let name = self.handle.name;
        (0..self.handle.partitions).map(move |partition| QueueKey::new(name).with_partition(partition))
    }
}

/// Calls of the worker.
impl<T, C> DelayQueue<T, C> {
    /// The limits on dead jobs. The number is at most half of `max_jobs`, so that dead jobs do not block new ones.
    pub(crate) fn dead_limits(&self) -> DeadLimits {
        DeadLimits { count: self.dead.count.min(self.handle.max_jobs / 2), ..self.dead }
    }

    /// See [`DelayQueueStore::claim`].
    pub(crate) async fn claim(
        &self,
        queue: QueueKey,
        finished: Vec<Ack>,
        claim: Claim,
        deadline: Duration,
    ) -> Result<Claimed, StoreError> {
        Arc::clone(&self.handle.store).claim(queue, finished, claim, deadline).await
    }

    /// See [`DelayQueueStore::extend`].
    pub(crate) async fn extend(
        &self,
        queue: QueueKey,
        leases: Vec<JobLease>,
        lease: Duration,
        deadline: Duration,
    ) -> Result<Vec<Extended>, StoreError> {
        Arc::clone(&self.handle.store).extend(queue, leases, lease, deadline).await
    }

    /// See [`DelayQueueStore::watch`].
    pub(crate) async fn watch(&self, queue: QueueKey, worker: WorkerId) -> Notifications {
        Arc::clone(&self.handle.store).watch(queue, worker).await
    }

    /// Decodes a claimed job, and makes its canceller. If the payload cannot be decoded, the error makes the job dead.
    pub(crate) fn decode_claimed(&self, claimed: ClaimedJob) -> Result<(Job<T>, Canceller), AckKind>
    where
        C: Codec<T>,
    {
        match self.codec.decode(&claimed.job.payload) {
            Ok(payload) => Ok(Job::new(claimed, payload)),
            Err(error) => Err(AckKind::Dead { reason: Reason::Undecodable, error: error_text(&error) }),
        }
    }
}

// By hand: a derived `Clone` would require `T: Clone`.
impl<T, C> Clone for DelayQueue<T, C> {
    fn clone(&self) -> Self {
        let Self { handle, dead, codec, .. } = self;
        Self { handle: handle.clone(), dead: *dead, codec: Arc::clone(codec), payload: PhantomData }
    }
}

impl<T, C> fmt::Debug for DelayQueue<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DelayQueue").field("name", &self.handle.name).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "json"))]
mod tests {
    use super::*;
    use crate::MemoryBackend;

    #[tokio::test(start_paused = true)]
    async fn undecodable_payload_makes_job_dead() {
        let backend = MemoryBackend::new();
        let texts = DelayQueue::<String>::new(backend.clone(), "test");
        let numbers = DelayQueue::<u32>::new(backend, "test");
        texts.push("not a number".to_owned()).id("a").await.unwrap();
        let worker = WorkerId::random().unwrap();
        let claim = Claim { worker, limit: 1, lease: Duration::from_secs(60), dead: numbers.dead_limits() };
        let queue = numbers.partitions().next().unwrap();
        let second = Duration::from_secs(1);
        let claimed = numbers.claim(queue, Vec::new(), claim, second).await.unwrap().jobs.remove(0);
        let lease = claimed.lease();
        let kind = numbers.decode_claimed(claimed).unwrap_err();
        assert!(matches!(kind, AckKind::Dead { reason: Reason::Undecodable, .. }), "{kind:?}");
        numbers.claim(queue, vec![Ack { lease, kind }], claim, second).await.unwrap();
        let dead = texts.get("a").await.unwrap().unwrap();
        assert_eq!((dead.state, texts.decode(&dead).unwrap().as_str()), (State::Dead, "not a number"));
    }
}
