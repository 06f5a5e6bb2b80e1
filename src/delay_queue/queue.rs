use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::yield_now;

use super::codec::{Codec, Json};
use super::erased::{Call, DynStore};
use super::error::QueueError;
use super::id::{JobId, UniqueIds};
use super::job::{Canceller, Job};
use super::outcome::note;
use super::push::{Push, Pushed, check_delay};
use super::record::{Due, NewJob, Reason, StoredJob, Unique};
use super::removal::{Cancel, Purge};
use super::store::{
    Ack, AckKind, Admission, Changed, Claim, Claimed, ClaimedJob, Counts, DeadLimits, DelayQueueStore, Extended,
    JobLease, MAX_BATCH, QueueKey, State, WorkerId, batch_len,
};
use super::worker::store_client::{Patience, StoreClient};
use crate::error::{BoxError, ConfigError, StoreError};
use crate::key::Key;
use crate::lock::{Notifications, Reach};
use crate::store::circuit::CircuitBreaker;
use crate::store::deadline::require_nonzero_deadline;

/// How many ids a push of many tries until others have their turn.
const TRIES: u32 = 1_024;

/// Jobs that run later.
///
/// Cheap to clone; clones are the same queue, and so are all queues with the same name on the same backend.
pub struct DelayQueue<T, C = Json> {
    terms: Terms,
    dead: DeadLimits,
    codec: Arc<C>,
    payload: PhantomData<fn() -> T>,
}

/// Where a queue is, and what its jobs may be.
#[derive(Clone)]
pub(crate) struct Terms {
    store: Arc<dyn DynStore>,
    name: Key,
    pub(crate) parts: u16,
    pub(crate) max_jobs: u64,
    pub(crate) max_size: usize,
    pub(crate) max_attempts: u16,
    deadline: Duration,
    calls: Arc<StoreClient>,
}

impl Terms {
    /// Asks the store, if the circuit lets us, for as long as it may take.
    pub(crate) async fn ask<A>(
        &self,
        queue: QueueKey,
        call: impl FnOnce(Arc<dyn DynStore>, Duration) -> Call<A>,
    ) -> Result<A, StoreError> {
        self.ask_later(queue, &mut Patience::none(), call).await
    }

    /// The same as soon as the circuit lets us, if we may wait for it.
    async fn ask_later<A>(
        &self,
        queue: QueueKey,
        patience: &mut Patience,
        call: impl FnOnce(Arc<dyn DynStore>, Duration) -> Call<A>,
    ) -> Result<A, StoreError> {
        require_nonzero_deadline(self.deadline)?;
        self.calls.admit(&queue, patience).await?;
        let answer = call(Arc::clone(&self.store), self.deadline).await;
        self.calls.ended(&queue, &answer);
        answer
    }

    /// Pushes jobs that lie in one part of the queue.
    pub(crate) async fn push(
        &self,
        queue: QueueKey,
        jobs: Vec<NewJob>,
        patience: &mut Patience,
    ) -> Result<Vec<Admission>, StoreError> {
        let (pushing, max) = (self.calls.pushing(jobs.len()), self.max_jobs);
        let answer = self.ask_later(queue, patience, |store, limit| store.push(queue, jobs, max, limit)).await;
        pushing.answered(&answer);
        answer
    }

    /// The part of the queue that a job lies in.
    pub(crate) fn home(&self, id: &JobId) -> QueueKey {
        self.part(if self.parts > 1 { id.as_key().spread(self.parts) } else { 0 })
    }

    pub(crate) fn part(&self, part: u16) -> QueueKey {
        QueueKey::new(self.name).with_part(part)
    }

    /// Whether jobs lie at the same place by either.
    fn is_same_place(&self, other: &Self) -> bool {
        let is_same_store = Arc::ptr_eq(&self.store, &other.store)
            || self.store.identity().is_some_and(|identity| other.store.identity() == Some(identity));
        is_same_store && self.name == other.name && self.parts == other.parts
    }

    /// What `make` says, an id that nobody else has. Of a unique job it is one that lies in the part of its key, so that all jobs of the key
    /// meet.
    pub(crate) fn fresh_id(
        &self,
        unique: Option<&Unique>,
        make: impl FnOnce() -> Result<JobId, StoreError>,
    ) -> Result<JobId, StoreError> {
        let mut id = make()?;
        if let Some(Unique { key, .. }) = unique.filter(|_| self.parts > 1) {
            let (part, mut ids) = (key.spread(self.parts), UniqueIds::default());
            // About one of as many ids as there are parts lies there. The bound is for a mistake, and not for bad luck.
            for _ in 0..100 * u32::from(self.parts) {
                if id.as_key().spread(self.parts) == part {
                    break;
                }
                id = ids.next()?;
            }
        }
        Ok(id)
    }
}

#[cfg(feature = "json")]
impl<T> DelayQueue<T> {
    /// The queue `name` that `store` keeps, which is a backend: see [`backend`](crate::backend). Payloads are kept as JSON.
    pub fn new(store: impl DelayQueueStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        Self::with_codec(store, name, Json)
    }
}

impl<T, C> DelayQueue<T, C> {
    /// The same with payloads that are kept as `codec` says.
    pub fn with_codec(store: impl DelayQueueStore + Send + Sync + 'static, name: impl Into<Key>, codec: C) -> Self {
        let name = name.into();
        let terms = Terms {
            store: Arc::new(store),
            name,
            parts: 1,
            max_jobs: 1_000_000,
            max_size: 64 * 1_024,
            max_attempts: NewJob::DEFAULT_ATTEMPTS,
            deadline: Duration::from_millis(100),
            calls: Arc::new(StoreClient::new(name, CircuitBreaker::new(), 1)),
        };
        Self { terms, dead: DeadLimits::default(), codec: Arc::new(codec), payload: PhantomData }
    }

    /// What the queue is called.
    #[must_use]
    pub const fn name(&self) -> &Key {
        &self.terms.name
    }

    /// Among whom the queue is one and the same.
    #[must_use]
    pub fn scope(&self) -> Reach {
        self.terms.store.scope()
    }

    /// Makes sure that the queue is the same as far as it is meant to be, so that the memory backend, whose jobs end with the process, is not
    /// taken for one that keeps them.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if it is the same among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        self.scope().require(scope)?;
        Ok(self)
    }

    /// How many jobs the queue may have, in each of its parts where it is [split](Self::split): waiting, running and dead ones. One more is
    /// [full](QueueError::Full). Dead ones may be half of them at the most, whatever [`keep_dead`](Self::keep_dead) says: the queue of a
    /// [worker](super::DelayQueueWorker) has to know of it, too. Defaults to 1,000,000. A [`MemoryBackend`](crate::MemoryBackend) has room for no more than its capacity, 100,000 unless
    /// told otherwise, in all queues together, and beyond that answers [`QueueError::Store`].
    #[must_use]
    pub fn max_jobs(mut self, jobs: u64) -> Self {
        self.terms.max_jobs = jobs;
        self
    }

    /// How many bytes the payload of a job may have, encoded, together with its headers. More are [too large](QueueError::TooLarge). Defaults
    /// to 64 KiB.
    ///
    /// A claim takes no more jobs than make about 1 MiB, and a worker that has room for more asks again; a push of many gives Redis no more than
    /// that in one step. Redis does nothing else meanwhile, nor
    /// while it notes what has become of jobs that are tried again: up to 64 at a time, each of which it reads and writes. Much larger jobs are better kept
    /// elsewhere, and named by the payload.
    #[must_use]
    pub fn max_size(mut self, bytes: usize) -> Self {
        self.terms.max_size = bytes;
        self
    }

    /// How many times a job is tried that is not told otherwise. Defaults to 20.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u16) -> Self {
        self.terms.max_attempts = attempts.max(1);
        self
    }

    /// How many dead jobs are kept, in each part of the queue where it is [split](Self::split), and for how long. Defaults to 10,000 for 90 days. The
    /// oldest make room for others.
    ///
    /// No more than half of [`max_jobs`](Self::max_jobs), so that they do not keep others out, and no longer than 90 days
    /// ([`DeadLimits::MAX_AGE`]), whatever is said. What counts is the queue of a [worker](super::DelayQueueWorker): whichever claims
    /// next removes what is more than its own queue says, without a word. Say the same wherever there is a worker of this queue. In a
    /// [`MemoryBackend`](crate::MemoryBackend) that is full fewer may be left: what dead jobs have beyond half of the room of all queues is for new ones.
    #[must_use]
    pub fn keep_dead(mut self, count: u64, age: Duration) -> Self {
        self.dead = DeadLimits { count, age: age.min(DeadLimits::MAX_AGE) };
        self
    }

    /// How long one call of the store may take. Defaults to 100 ms. A [worker](super::DelayQueueWorker) gives its own calls more: a third of
    /// its lease, from 100 ms to 5 s, and no more than a second once it ends. With zero nothing is asked of the store: the error has a
    /// [`ConfigError::ZeroTimeout`] as its source.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.terms.deadline = deadline;
        self
    }

    /// When the queue and its clones stop to ask a store that fails, and how soon they try again. Defaults to [`CircuitBreaker::new`]. Meanwhile
    /// pushes and all else that the queue is asked fail at once, as [`QueueError::Store`]; only [`push_all`](Self::push_all) waits for a while. Each part
    /// of a [split](Self::split) queue has a circuit of its own. A [worker](super::DelayQueueWorker) is not told: it asks by itself until the store works.
    #[must_use]
    pub fn circuit_breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.terms.calls = Arc::new(StoreClient::new(self.terms.name, breaker, self.terms.parts));
        self
    }

    /// Spreads the queue over so many parts by the ids of the jobs, for one that is too much for a single node of a cluster. Defaults to 1,
    /// and at most 1,024. Has to be the same wherever this queue is used; what is in the queue already stays where it is.
    ///
    /// A [unique key](super::Push::unique) is one of the part that its job lies in. Jobs without an id of their own lie where their key says, so
    /// that they meet; those with one lie where that says, and jobs of one key that lie apart do not keep each other out.
    #[must_use]
    pub fn split(mut self, parts: u16) -> Self {
        self.terms.parts = parts.clamp(1, 1_024);
        self.terms.calls = Arc::new(self.terms.calls.split(self.terms.parts));
        self
    }

    /// Pushes a job.
    pub fn push(&self, payload: impl Borrow<T>) -> Push
    where
        C: Codec<T>,
    {
        let payload = self.codec.encode(payload.borrow()).map_err(Arc::from);
        Push::new(self.terms.clone(), payload)
    }

    /// Pushes several jobs, [`MAX_BATCH`] of them in each call of the store, or fewer where those make more than about 1 MiB. Answers for each, in order.
    ///
    /// Jobs of [normal](super::Priority::Normal) priority that have no [name](Push::id) and are due alike take Redis about half the memory of others
    /// while they wait, and two thirds of the work, unless the queue is [split](Self::split).
    ///
    /// Each has to be a push of this queue: by this value, a clone of it, or another one of the same name and split on the same backend or a
    /// clone of that. Another one is [not of this queue](ConfigError::OtherQueue), and pushed nowhere. Backends that were opened by
    /// themselves are not the same, even to one server.
    ///
    /// Each call of the store has the [deadline](Self::deadline), and those of one that fails have failed; the others go on. Where the
    /// [circuit](Self::circuit_breaker) is open they wait until the store may be asked again, for up to a second, and only what is left after that
    /// fails at once.
    ///
    /// # Cancellation
    ///
    /// Dropping the future leaves what has not been pushed.
    pub async fn push_all(&self, pushes: impl IntoIterator<Item = Push>) -> Vec<Result<Pushed, QueueError>> {
        let mut results: Vec<Option<Result<Pushed, QueueError>>> = Vec::new();
        let mut ids = UniqueIds::default();
        let mut parts: Vec<Vec<(usize, NewJob)>> = vec![Vec::new(); self.terms.parts.into()];
        let mut patience = Patience::of_many();
        // What makes them is not kept while others have their turn, since it may not be one for several threads.
        let pushes: Vec<_> = pushes.into_iter().collect();
        let mut tries = 0;
        for push in pushes {
            tries += push.tries();
            if tries > TRIES {
                tries = 0;
                yield_now().await;
            }
            if !push.terms().is_same_place(&self.terms) {
                let error = ConfigError::OtherQueue {
                    queue: self.terms.name.to_string(),
                    other: push.terms().name.to_string(),
                };
                results.push(Some(Err(error.into())));
                continue;
            }
            match push.into_job(|| ids.next()) {
                Ok(job) => {
                    let part = usize::from(self.terms.home(&job.id).part());
                    parts[part].push((results.len(), job));
                    results.push(None);
                }
                Err(error) => results.push(Some(Err(error))),
            }
        }
        for (part, jobs) in parts.into_iter().enumerate() {
            let queue = self.terms.part(part as u16);
            let mut jobs = jobs.into_iter();
            while jobs.len() > 0 {
                let len = batch_len(jobs.as_slice().iter().map(|(_, job)| job.size()));
                let batch = jobs.by_ref().take(len);
                let (places, batch): (Vec<_>, Vec<_>) = batch.map(|(place, job)| ((place, job.id), job)).unzip();
                let answer = self.terms.push(queue, batch, &mut patience).await;
                if answer.is_ok() {
                    patience.is_rewarded();
                }
                for (i, (place, id)) in places.into_iter().enumerate() {
                    results[place] = Some(match &answer {
                        Ok(admissions) => Pushed::of(id, admissions.get(i).copied(), &self.terms),
                        Err(error) => Err(error.clone().into()),
                    });
                }
            }
        }
        results.into_iter().flatten().collect()
    }

    /// A job in whatever state it is; `None` if there is none of this id, or it is done.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn get(&self, id: impl Into<JobId>) -> Result<Option<StoredJob>, QueueError> {
        let id = id.into();
        let queue = self.terms.home(&id);
        Ok(self.terms.ask(queue, |store, limit| store.get(queue, id, limit)).await?)
    }

    /// The payload of a job that was looked at.
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

    /// Removes a job that is waiting. The worker of a running job is told, and the job is not tried again. A dead job stays: see
    /// [`forget_ids`](Self::forget_ids).
    ///
    /// The id and the unique key are free at once, also for the time that [`UniqueFor::Time`](super::UniqueFor::Time) says, unless you
    /// [keep](Cancel::keep_unique) that key. The key of a `Recurring` job [stays](super::UniqueFor::Occurrence).
    ///
    /// A job that you push under the same id or key while the cancelled one still runs is kept. Workers claim it
    /// when that run has ended, or its lease has. Until then [`get`](Self::get) answers the new job, and [`list`](Self::list) has both.
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
        Cancel::new(self.terms.clone(), id.into())
    }

    /// Releases a unique key, whichever job holds it and for however long, so that another job with this key can be pushed. Answers whether a job held it.
    ///
    /// The job that held the key stays as it is, if it is there: a job that is pushed with the key after this may run at the same time.
    /// [`cancel`](Self::cancel) and [`purge`](Self::purge) release the keys of the jobs that they remove.
    ///
    /// Each part of a [split](Self::split) queue is asked, one after the other, since a job with an id lies where its id says.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`], of the first part that has failed: the key may be released in some parts then.
    pub async fn release_unique(&self, key: impl Into<Key>) -> Result<bool, QueueError> {
        let key = key.into();
        let mut result: Result<_, StoreError> = Ok(false);
        for queue in self.parts() {
            let answer = self.terms.ask(queue, |store, limit| store.release_unique(queue, key, limit)).await;
            result = result.and_then(|was_held| Ok(was_held | answer?));
        }
        Ok(result?)
    }

    /// Changes when a job that is waiting is due: after a `Duration` from now, or at a `SystemTime`.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`], or [`QueueError::Config`] for a delay that is longer than [`Due::MAX_DELAY`].
    pub async fn reschedule(&self, id: impl Into<JobId>, due: impl Into<Due>) -> Result<Changed, QueueError> {
        let (id, due) = (id.into(), due.into());
        if let Due::In(delay) = due {
            check_delay(delay)?;
        }
        let queue = self.terms.home(&id);
        Ok(self.terms.ask(queue, |store, limit| store.reschedule(queue, id, due, limit)).await?)
    }

    /// Makes a job that is waiting due at once.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn promote(&self, id: impl Into<JobId>) -> Result<Changed, QueueError> {
        self.reschedule(id, Duration::ZERO).await
    }

    /// Changes the payload of a job that is waiting. Its headers stay, and count for [how large](Self::max_size) it may be.
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
        let (queue, max) = (self.terms.home(&id), self.terms.max_size);
        let stored = self.terms.ask(queue, |store, limit| store.get(queue, id, limit)).await?;
        let bytes = payload.len() + stored.map_or(0, |job| job.headers.size());
        if bytes > max {
            return Err(QueueError::TooLarge { bytes, max });
        }
        Ok(self.terms.ask(queue, |store, limit| store.replace(queue, id, payload, limit)).await?)
    }

    /// How many jobs there are, in all parts of the queue.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn counts(&self) -> Result<Counts, QueueError> {
        let mut total = Counts::default();
        for queue in self.parts() {
            let counts = self.terms.ask(queue, |store, limit| store.counts(queue, limit)).await?;
            total.waiting += counts.waiting;
            total.due += counts.due;
            total.running += counts.running;
            total.dead += counts.dead;
            total.oldest_due = total.oldest_due.max(counts.oldest_due);
            total.is_paused |= counts.is_paused;
        }
        Ok(total)
    }

    /// Some of the jobs that are in one state, without those that come first: those that are waiting by when they are due, those that
    /// are running by when their lease ends, those that are dead by when they died. Of each priority by itself, the highest first and snoozed jobs
    /// last, and of each part of a [split](Self::split) queue by itself. At most `limit`, no more than [`MAX_BATCH`], and fewer where they are large: the
    /// next call skips as many more as this one has answered, and no more follow where there is none. What cannot be read is left out.
    ///
    /// Others may come and go between two calls, so that a job can be seen twice or not at all.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn list(&self, state: State, skip: u64, limit: usize) -> Result<Vec<StoredJob>, QueueError> {
        let limit = limit.min(MAX_BATCH);
        if self.terms.parts == 1 {
            let queue = self.terms.part(0);
            return Ok(self
                .terms
                .ask(queue, |store, deadline| store.list(queue, state, skip, limit, deadline))
                .await?);
        }
        let (mut jobs, mut skip) = (Vec::new(), skip);
        for queue in self.parts() {
            let room = limit.saturating_sub(jobs.len());
            if room == 0 {
                break;
            }
            let all = self.terms.ask(queue, |store, deadline| store.counts(queue, deadline)).await?.of(state);
            if skip >= all {
                skip -= all;
                continue;
            }
            let page = self.terms.ask(queue, |store, deadline| store.list(queue, state, skip, room, deadline)).await?;
            // Where large jobs made it short, those of the next part are not the next ones.
            let is_cut = !page.is_empty() && (page.len() as u64) < all - skip;
            jobs.extend(page);
            if is_cut {
                break;
            }
            skip = 0;
        }
        Ok(jobs)
    }

    /// Lets nobody claim anything from now on, wherever they are. What is running goes on, and jobs can be pushed.
    ///
    /// Each part of a [split](Self::split) queue is asked, one after the other, also behind one that fails: those that do not answer take up to a
    /// [deadline](Self::deadline) each.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`], of the first part that has failed: some are paused then.
    ///
    /// # Cancellation
    ///
    /// Dropping the future leaves the parts that were not asked as they are.
    pub async fn pause(&self) -> Result<(), QueueError> {
        self.set_paused(true).await
    }

    /// Ends a [pause](Self::pause), in each part as that begins it.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`], of the first part that has failed: some are paused still.
    pub async fn resume(&self) -> Result<(), QueueError> {
        self.set_paused(false).await
    }

    async fn set_paused(&self, is_paused: bool) -> Result<(), QueueError> {
        let mut result = Ok(());
        for queue in self.parts() {
            let answer = self.terms.ask(queue, |store, limit| store.pause(queue, is_paused, limit)).await;
            result = result.and(answer);
        }
        Ok(result?)
    }

    /// Removes all jobs that are waiting, due or not: they are lost. Answers how many those were. Their unique keys are released, unless you
    /// [keep](Purge::keep_unique) those that are held for a time. What is running goes on. To let workers come to
    /// an end, see [`DelayQueueWorker::run_until`](super::DelayQueueWorker::run_until).
    ///
    /// As many as are waiting when it begins, in each part of the queue: it has an end however fast jobs are pushed meanwhile. Those may be among
    /// what is removed, and leave others that were there before.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]; some are removed then.
    ///
    /// # Cancellation
    ///
    /// Removes a batch at a time, so that dropping the future leaves the rest.
    pub fn purge(&self) -> Purge {
        Purge::new(self.terms.clone())
    }

    /// Dead jobs, the oldest first: see [`list`](Self::list).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`].
    pub async fn dead(&self, skip: u64, limit: usize) -> Result<Vec<StoredJob>, QueueError> {
        self.list(State::Dead, skip, limit).await
    }

    /// Lets dead jobs wait again, due at once and with all of their attempts: those that `filter` wants, the oldest first, and no more
    /// than `limit`. Answers how many those were. Looks at as many as are dead when it begins, so that one that dies again is for the next call.
    /// One that is unique while it is [there](super::UniqueFor::WaitingOrRunning) takes its key again, and stays dead if another job has that.
    /// For some of which the ids are known there is [`replay_ids`](Self::replay_ids).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]; some are waiting then.
    pub async fn replay(&self, limit: usize, filter: impl FnMut(&StoredJob) -> bool) -> Result<usize, QueueError> {
        self.each_dead(limit, filter, |store, queue, ids, deadline| store.replay(queue, ids, deadline)).await
    }

    /// Removes dead jobs: those that `filter` wants, the oldest first, and no more than `limit`. Answers how many those were. Looks at
    /// as many as are dead when it begins. For some of which the ids are known there is [`forget_ids`](Self::forget_ids).
    ///
    /// A key that a removed job holds for a [time](super::UniqueFor::Time) is released. That of a `Recurring` job
    /// [stays](super::UniqueFor::Occurrence).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]; some are removed then.
    pub async fn forget(&self, limit: usize, filter: impl FnMut(&StoredJob) -> bool) -> Result<usize, QueueError> {
        self.each_dead(limit, filter, |store, queue, ids, deadline| store.forget(queue, ids, deadline)).await
    }

    /// Lets the dead jobs of these ids wait again, as [`replay`](Self::replay) does with those that a filter wants. Answers for each, in order,
    /// whether it waits again: not if it is not dead, or not there, or another job has its unique key. Whatever else is dead is not looked at: one call
    /// of the store for each part of the queue and [`MAX_BATCH`] ids, or fewer where those make more than about 1 MiB.
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
    /// [`QueueError::Store`]; some are waiting then.
    pub async fn replay_ids(&self, ids: impl IntoIterator<Item: Into<JobId>>) -> Result<Vec<bool>, QueueError> {
        self.dead_by_id(ids, |store, queue, ids, deadline| store.replay(queue, ids, deadline)).await
    }

    /// Removes the dead jobs of these ids, as [`forget`](Self::forget) does, and looks at no others. Answers for each, in order, whether it was dead.
    /// What waits or runs stays: see [`cancel`](Self::cancel).
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]; some are removed then.
    pub async fn forget_ids(&self, ids: impl IntoIterator<Item: Into<JobId>>) -> Result<Vec<bool>, QueueError> {
        self.dead_by_id(ids, |store, queue, ids, deadline| store.forget(queue, ids, deadline)).await
    }

    async fn dead_by_id(
        &self,
        ids: impl IntoIterator<Item: Into<JobId>>,
        verb: impl Fn(Arc<dyn DynStore>, QueueKey, Vec<JobId>, Duration) -> Call<Vec<bool>>,
    ) -> Result<Vec<bool>, QueueError> {
        let mut parts: Vec<Vec<(usize, JobId)>> = vec![Vec::new(); self.terms.parts.into()];
        let mut answers = Vec::new();
        for id in ids {
            let id = id.into();
            parts[usize::from(self.terms.home(&id).part())].push((answers.len(), id));
            answers.push(false);
        }
        for (queue, jobs) in self.parts().zip(parts) {
            let (places, ids): (Vec<_>, Vec<_>) = jobs.into_iter().unzip();
            for (place, is_changed) in places.into_iter().zip(self.change_each(queue, &ids, &verb).await?) {
                answers[place] = is_changed;
            }
        }
        Ok(answers)
    }

    /// Asks until the store has answered for each of these ids: it answers for fewer at a time where they are large.
    async fn change_each(
        &self,
        queue: QueueKey,
        ids: &[JobId],
        verb: impl Fn(Arc<dyn DynStore>, QueueKey, Vec<JobId>, Duration) -> Call<Vec<bool>>,
    ) -> Result<Vec<bool>, StoreError> {
        let mut answers = Vec::with_capacity(ids.len());
        while answers.len() < ids.len() {
            let batch: Vec<_> = ids.iter().skip(answers.len()).take(MAX_BATCH).copied().collect();
            let size = batch.len();
            let changed = self.terms.ask(queue, |store, limit| verb(store, queue, batch, limit)).await?;
            if changed.is_empty() {
                return Err(StoreError::other("the store answers for none of the jobs that it was asked to change"));
            }
            answers.extend(changed.into_iter().take(size));
        }
        Ok(answers)
    }

    async fn each_dead(
        &self,
        limit: usize,
        mut filter: impl FnMut(&StoredJob) -> bool,
        verb: impl Fn(Arc<dyn DynStore>, QueueKey, Vec<JobId>, Duration) -> Call<Vec<bool>>,
    ) -> Result<usize, QueueError> {
        let mut changed = 0;
        for queue in self.parts() {
            if changed >= limit {
                break;
            }
            // Those that die meanwhile come last, those among them that were replayed by this call. As many as were there before are looked
            // at, so that there is an end however fast they die.
            let mut unseen = self.terms.ask(queue, |store, limit| store.counts(queue, limit)).await?.dead;
            // Those that the filter does not want stay, as those do that cannot be changed, and are not looked at again.
            let mut skip = 0;
            while changed < limit && unseen > 0 {
                let size = usize::try_from(unseen).unwrap_or(usize::MAX).min(MAX_BATCH);
                let page =
                    self.terms.ask(queue, |store, limit| store.list(queue, State::Dead, skip, size, limit)).await?;
                unseen = unseen.saturating_sub(page.len() as u64);
                let (mut rest, mut left) = (page.iter(), page.len());
                // No more are tried at a time than may be changed, and those that cannot be leave room for the next ones.
                while changed < limit && rest.len() > 0 {
                    let wanted = rest.by_ref().filter(|job| filter(job)).map(|job| job.id);
                    let ids: Vec<_> = wanted.take(limit - changed).collect();
                    if !ids.is_empty() {
                        let answers = self.change_each(queue, &ids, &verb).await?;
                        let gone = answers.into_iter().filter(|is_changed| *is_changed).count();
                        (changed, left) = (changed + gone, left.saturating_sub(gone));
                    }
                }
                skip += left as u64;
                // A short page is one of large jobs.
                if page.is_empty() {
                    break;
                }
            }
        }
        Ok(changed)
    }

    /// The parts of the queue, each a queue of its own for the store.
    pub(crate) fn parts(&self) -> impl Iterator<Item = QueueKey> + use<T, C> {
        let name = self.terms.name;
        (0..self.terms.parts).map(move |part| QueueKey::new(name).with_part(part))
    }
}

/// What a worker needs.
impl<T, C> DelayQueue<T, C> {
    /// How many dead jobs are kept: they leave room for others.
    pub(crate) fn dead_limits(&self) -> DeadLimits {
        DeadLimits { count: self.dead.count.min(self.terms.max_jobs / 2), ..self.dead }
    }

    /// See [`DelayQueueStore::claim`].
    pub(crate) async fn claim(
        &self,
        queue: QueueKey,
        finished: Vec<Ack>,
        claim: Claim,
        limit: Duration,
    ) -> Result<Claimed, StoreError> {
        Arc::clone(&self.terms.store).claim(queue, finished, claim, limit).await
    }

    /// See [`DelayQueueStore::extend`].
    pub(crate) async fn extend(
        &self,
        queue: QueueKey,
        tickets: Vec<JobLease>,
        lease: Duration,
        limit: Duration,
    ) -> Result<Vec<Extended>, StoreError> {
        Arc::clone(&self.terms.store).extend(queue, tickets, lease, limit).await
    }

    /// See [`DelayQueueStore::watch`].
    pub(crate) async fn watch(&self, queue: QueueKey, worker: WorkerId) -> Notifications {
        Arc::clone(&self.terms.store).watch(queue, worker).await
    }

    /// Makes a job of what was claimed, and what cancels it. If its payload cannot be read, the error is what puts it among the dead.
    pub(crate) fn open(&self, claimed: ClaimedJob) -> Result<(Job<T>, Canceller), AckKind>
    where
        C: Codec<T>,
    {
        match self.codec.decode(&claimed.job.payload) {
            Ok(payload) => Ok(Job::new(claimed, payload)),
            Err(error) => Err(AckKind::Dead { reason: Reason::Undecodable, error: note(&error) }),
        }
    }
}

// By hand: a clone does not need a payload that can be cloned.
impl<T, C> Clone for DelayQueue<T, C> {
    fn clone(&self) -> Self {
        let Self { terms, dead, codec, .. } = self;
        Self { terms: terms.clone(), dead: *dead, codec: Arc::clone(codec), payload: PhantomData }
    }
}

impl<T, C> fmt::Debug for DelayQueue<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DelayQueue").field("name", &self.terms.name).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "json"))]
mod tests {
    use super::*;
    use crate::MemoryBackend;

    #[tokio::test(start_paused = true)]
    async fn a_payload_that_cannot_be_read_goes_to_the_dead() {
        let backend = MemoryBackend::new();
        let texts = DelayQueue::<String>::new(backend.clone(), "test");
        let numbers = DelayQueue::<u32>::new(backend, "test");
        texts.push("not a number".to_owned()).id("a").await.unwrap();
        let worker = WorkerId::random().unwrap();
        let claim = Claim { worker, limit: 1, lease: Duration::from_secs(60), dead: numbers.dead_limits() };
        let queue = numbers.parts().next().unwrap();
        let second = Duration::from_secs(1);
        let claimed = numbers.claim(queue, Vec::new(), claim, second).await.unwrap().jobs.remove(0);
        let ticket = claimed.ticket();
        let ending = numbers.open(claimed).unwrap_err();
        assert!(matches!(ending, AckKind::Dead { reason: Reason::Undecodable, .. }), "{ending:?}");
        numbers.claim(queue, vec![Ack { ticket, ending }], claim, second).await.unwrap();
        let dead = texts.get("a").await.unwrap().unwrap();
        assert_eq!((dead.state, texts.decode(&dead).unwrap().as_str()), (State::Dead, "not a number"));
    }
}
