use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::id::JobId;
#[cfg(doc)]
use super::record::UniqueFor;
use super::record::{Due, NewJob, Reason, StoredJob, Unique};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::{Notifications, Reach};

/// What a delay queue needs of a backend: jobs, each in one state at a time, every change of it one atomic step.
///
/// ```text
///   push            claim                 finish: done
///   -----> waiting -------> running ----------------------> gone
///             ^  |            |  |
///             |  | cancel     |  | finish: dead, or no attempt left; or the lease has ended and no attempt is left
///             |  +--> gone    |  +--------------------------> dead
///             |               | finish: retry, snooze, release; or the lease has ended     |
///             +---------------+------------------------------------------------------------+ replay
/// ```
///
/// The backend keeps the time: delays are durations, and only [`Due::At`] is an instant. Whoever has claimed a job holds a
/// [`JobLease`] for it, and only the holder of the last one can finish it. Every backend passes the same contract tests, which
/// `tollgate::testing` (feature `testing`) has for others.
///
/// # Cancellation
///
/// Dropping a returned future may or may not have done what was asked.
pub trait DelayQueueStore {
    /// Keeps jobs until they are due. Answers for each, in order.
    ///
    /// A job whose id is waiting or running already is left alone; a dead or [cancelled](Self::cancel) one of the same id makes room for it. May be asked again:
    /// what was kept the first time [exists](Admission::Exists) then.
    fn push(
        &self,
        queue: &QueueKey,
        jobs: &[NewJob],
        max_jobs: u64,
    ) -> impl Future<Output = Result<Vec<Admission>, StoreError>> + Send;

    /// Finishes jobs that were claimed, and then claims others that are due, in one step. With a [limit](Claim::limit) of 0, finishes
    /// only: what a worker does that is full or about to end.
    ///
    /// Jobs whose lease has ended are waiting again before others are claimed, or dead if they have no attempt left. An attempt counts
    /// as soon as it is claimed. Finishing may be asked again with the same tickets; what was claimed by a call whose answer was lost
    /// comes back when its leases have ended.
    fn claim(
        &self,
        queue: &QueueKey,
        finished: &[Ack],
        claim: &Claim,
    ) -> impl Future<Output = Result<Claimed, StoreError>> + Send;

    /// Lets leases last for `lease` from now on, each if its ticket still holds it, and tells which jobs are to be cancelled. Answers
    /// for each, in order. A lease that has ended comes back as long as nobody has seen its end.
    fn extend(
        &self,
        queue: &QueueKey,
        tickets: &[JobLease],
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<Extended>, StoreError>> + Send;

    /// Wake-ups for a worker that waits for jobs, for when there are some earlier than it was told. The future is ready
    /// once none can be missed any more: the worker claims again then, and after each wake-up. Where one can be lost on its way
    /// [`Claimed::next`] has the worker look now and then in any case. A store that cannot tell answers [`Notifications::none`].
    fn watch(&self, queue: &QueueKey, worker: WorkerId) -> impl Future<Output = Notifications> + Send;

    /// A job in whatever state it is; `None` if there is none of this id.
    fn get(&self, queue: &QueueKey, id: &JobId) -> impl Future<Output = Result<Option<StoredJob>, StoreError>> + Send;

    /// Removes a job that is waiting. The worker of a running job is told, and the job is not tried again: its id is free at once. Its unique key is
    /// free, too, unless `keeps_unique` says to keep one that is held for a [time](UniqueFor::Time).
    ///
    /// A job that is pushed under an id or a key that was freed by this is not claimed before the cancelled run has ended, by its finish or with its
    /// lease.
    fn cancel(
        &self,
        queue: &QueueKey,
        id: &JobId,
        keeps_unique: bool,
    ) -> impl Future<Output = Result<Cancelled, StoreError>> + Send;

    /// Changes when a job that is waiting is due.
    fn reschedule(
        &self,
        queue: &QueueKey,
        id: &JobId,
        due: Due,
    ) -> impl Future<Output = Result<Changed, StoreError>> + Send;

    /// Changes the payload of a job that is waiting.
    fn replace(
        &self,
        queue: &QueueKey,
        id: &JobId,
        payload: &[u8],
    ) -> impl Future<Output = Result<Changed, StoreError>> + Send;

    /// How many jobs there are.
    fn counts(&self, queue: &QueueKey) -> impl Future<Output = Result<Counts, StoreError>> + Send;

    /// Some of the jobs that are in one state, at most [`MAX_BATCH`], without those that come first: those that are waiting by when they
    /// are due, each priority by itself and snoozed jobs last, those that are running by when their lease ends, those that are dead by when they died. May be fewer
    /// than there are; none says that no more follow.
    fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<StoredJob>, StoreError>> + Send;

    /// Lets nobody claim anything, or lets them again. What is running goes on.
    fn pause(&self, queue: &QueueKey, is_paused: bool) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes jobs that are waiting, at most [`MAX_BATCH`] of them. Answers how many; 0 says that none is left. Their unique keys are free, unless
    /// `keeps_unique` says to keep those that are held for a [time](UniqueFor::Time).
    fn purge(
        &self,
        queue: &QueueKey,
        limit: usize,
        keeps_unique: bool,
    ) -> impl Future<Output = Result<usize, StoreError>> + Send;

    /// Releases a unique key, whichever job holds it. Answers whether it was held.
    fn release_unique(&self, queue: &QueueKey, key: &Key) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Lets dead jobs wait again, due at once and with all of their attempts. One that is unique while it is
    /// [there](UniqueFor::WaitingOrRunning) takes its key again, and stays dead if another job has that. Answers for each whether it waits
    /// again; where they are large or many for the first of them, at least one, and the rest are as they were.
    fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Removes dead jobs, and releases the unique keys that they hold for a [time](UniqueFor::Time). Answers for each whether it was dead, or for the first of them as [`replay`](Self::replay) does.
    fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Among whom a queue is one and the same.
    fn scope(&self) -> Reach;

    /// What clones of a store have in common and no other store that there is: an address. `None` is unknown.
    #[doc(hidden)]
    fn identity(&self) -> Option<usize> {
        None
    }
}

/// How many jobs one call is about at the most; tickets, too.
pub const MAX_BATCH: usize = 256;

/// About how many bytes of jobs one call carries at the most: a server does nothing else meanwhile.
const MAX_BATCH_BYTES: usize = 1_024 * 1_024;

/// How many of the first of these jobs go in one call, given how large each is. One that is larger than that by itself goes alone.
pub(crate) fn batch_len(sizes: impl IntoIterator<Item = usize>) -> usize {
    let mut bytes = 0_usize;
    let fits = |size: &usize| {
        bytes = bytes.saturating_add(*size);
        bytes <= MAX_BATCH_BYTES
    };
    sizes.into_iter().take(MAX_BATCH).take_while(fits).count().max(1)
}

/// Which queue: a name, and which part of it where it is split.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueKey {
    name: Key,
    part: u16,
}

impl QueueKey {
    /// The queue that is called `name`.
    pub fn new(name: impl Into<Key>) -> Self {
        Self { name: name.into(), part: 0 }
    }

    /// One part of it. The first one, number 0, is all there is of a queue that is not split.
    #[must_use]
    pub const fn with_part(self, part: u16) -> Self {
        Self { part, ..self }
    }

    /// What the queue is called.
    #[must_use]
    pub const fn name(&self) -> &Key {
        &self.name
    }

    /// Which part of it this is.
    #[must_use]
    pub const fn part(&self) -> u16 {
        self.part
    }
}

impl fmt::Debug for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueKey({self})")
    }
}

impl fmt::Display for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            0 => fmt::Display::fmt(&self.name, f),
            part => write!(f, "{}#{part}", self.name),
        }
    }
}

/// What came of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admission {
    /// The job is waiting.
    New,
    /// Nothing was changed: this job has the same id, or the same unique key.
    Exists(JobId),
    /// The queue has as many jobs as it may have.
    Full,
}

/// Who claims. Each worker has an id of its own for as long as it lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkerId([u8; 16]);

impl WorkerId {
    /// An id that nobody else has.
    ///
    /// # Errors
    ///
    /// If the system has no random numbers to give.
    pub fn random() -> Result<Self, StoreError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(StoreError::other)?;
        Ok(Self(bytes))
    }

    /// The id as a store keeps it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerId({self})")
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// What a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// Who asks.
    pub worker: WorkerId,
    /// How many jobs at the most, up to [`MAX_BATCH`]: as many as the worker has time for. One that gets as many is taken to wait for no
    /// more until it claims again, and is not [woken](DelayQueueStore::watch); all others are. There may be fewer although
    /// [more](Claimed::more) are due, where they are large.
    pub limit: usize,
    /// How long the jobs are the worker's without a word, from [`Claim::MIN_LEASE`] to [`Claim::MAX_LEASE`].
    pub lease: Duration,
    /// How many dead jobs are kept, and for how long.
    pub dead: DeadLimits,
}

impl Claim {
    /// A claim of up to `limit` jobs, which keeps as many dead ones as is usual.
    #[must_use]
    pub fn new(worker: WorkerId, limit: usize, lease: Duration) -> Self {
        Self { worker, limit, lease, dead: DeadLimits::default() }
    }

    /// The shortest lease there is.
    pub const MIN_LEASE: Duration = Duration::from_millis(10);
    /// The longest lease there is. What takes longer is extended.
    pub const MAX_LEASE: Duration = Duration::from_secs(86_400);
    /// The longest that a store whose wake-ups can be lost lets a worker wait.
    pub const MAX_WAIT: Duration = Duration::from_secs(5);

    /// How long a worker waits for an answer: less than a part of the lease, so that there is time for another call.
    pub(crate) fn patience(lease: Duration) -> Duration {
        (lease / 3).min(Duration::from_secs(5)).max(Duration::from_millis(100))
    }
}

/// How many dead jobs are kept, and for how long. The oldest make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLimits {
    /// How many.
    pub count: u64,
    /// For how long, up to [`DeadLimits::MAX_AGE`].
    pub age: Duration,
}

impl DeadLimits {
    /// So many, for so long.
    #[must_use]
    pub const fn new(count: u64, age: Duration) -> Self {
        Self { count, age }
    }

    /// The longest that a dead job is kept.
    pub const MAX_AGE: Duration = Duration::from_secs(90 * 86_400);
}

impl Default for DeadLimits {
    /// 10,000 jobs for 90 days.
    fn default() -> Self {
        Self { count: 10_000, age: Self::MAX_AGE }
    }
}

/// The right to finish one job, for as long as nobody has claimed it anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobLease {
    /// Which job.
    pub id: JobId,
    /// The fencing token: larger than that of each claim of this job before.
    pub token: u64,
    /// What is not pushed again while the job is there.
    pub unique: Option<Unique>,
}

/// What becomes of a job that was claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ack {
    /// Which one.
    pub ticket: JobLease,
    /// What becomes of it.
    pub ending: AckKind,
}

impl Ack {
    /// What becomes of the job of this ticket.
    #[must_use]
    pub const fn new(ticket: JobLease, ending: AckKind) -> Self {
        Self { ticket, ending }
    }
}

/// What becomes of a job at the end of an attempt. Where it was to be [cancelled](DelayQueueStore::cancel) meanwhile, it is gone in any
/// case.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AckKind {
    /// It is done, and forgotten.
    Done,
    /// It is not to be done any more, and forgotten. Its unique key is free, also one that is held for a [time](UniqueFor::Time).
    Cancelled,
    /// It has failed and waits for its next attempt; it is dead if this was the last one.
    Retry {
        /// For how long it waits.
        delay: Duration,
        /// Why it has failed, of which the first [`MAX_NOTE`] bytes are kept.
        error: Arc<str>,
    },
    /// It waits, and the attempt does not count. It is due as before: once it may be claimed again it goes before jobs of its priority that are due
    /// later.
    Snooze {
        /// For how long it waits.
        delay: Duration,
    },
    /// It waits, due as before, and the attempt does not count: its worker will not do it.
    Release,
    /// It will not be tried again.
    Dead {
        /// What kind of end this is.
        reason: Reason,
        /// Why, of which the first [`MAX_NOTE`] bytes are kept.
        error: Arc<str>,
    },
}

impl AckKind {
    /// Whether the job is gone after it.
    pub(crate) const fn forgets(&self) -> bool {
        matches!(self, Self::Done | Self::Cancelled)
    }
}

/// How many bytes of an error are kept.
pub const MAX_NOTE: usize = 1_024;

/// What came of finishing a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finished {
    /// As was asked for.
    Done,
    /// It has no attempt left, or none was to be made: it is among the dead now.
    Dead,
    /// It was not done, and is gone: somebody has [cancelled](DelayQueueStore::cancel) it meanwhile.
    Cancelled,
    /// There is no such job any more: an earlier call with this ticket has come through, or somebody else has done it. Of one that is
    /// [done](AckKind::Done) or [cancelled](AckKind::Cancelled), also where a job of its id is there that was pushed after this one was claimed.
    Gone,
    /// Somebody else has the job, or will have it: the lease had ended, or the store has forgotten it. Nothing was changed.
    Lost,
}

/// What came of extending a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extended {
    /// It lasts.
    Held,
    /// It lasts, and the job is to be cancelled.
    Cancelled,
    /// It is over: somebody else has the job, or will have it, or it is gone.
    Lost,
}

/// What came of finishing and claiming.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claimed {
    /// What came of each job that was to be finished, in order.
    pub finished: Vec<Finished>,
    /// What was claimed: by priority, then by when it was due, then by id.
    pub jobs: Vec<ClaimedJob>,
    /// Whether more is due.
    pub more: bool,
    /// After how long to claim again at the latest, unless [woken](DelayQueueStore::watch) before: when the next job is due, as far as this
    /// worker has to see to that. Looking before does no harm.
    ///
    /// Never more than [`Claim::MAX_WAIT`] where a wake-up can be lost. `None` lets the worker sleep until it is woken.
    pub next: Option<Duration>,
    /// For how long the oldest job that is still due has been so, as in [`Counts::oldest_due`].
    pub oldest_due: Option<Duration>,
    /// What became of jobs whose lease had ended.
    pub expired: Expired,
    /// The jobs among those that are dead now, as far as the store names them.
    pub died: Vec<Died>,
    /// The store's clock.
    pub now: SystemTime,
}

impl Claimed {
    /// For stores: nothing was finished and nothing claimed, and the worker looks again after [`Claim::MAX_WAIT`].
    #[must_use]
    pub const fn new(now: SystemTime) -> Self {
        Self {
            finished: Vec::new(),
            jobs: Vec::new(),
            more: false,
            next: Some(Claim::MAX_WAIT),
            oldest_due: None,
            expired: Expired { jobs: 0, dead: 0 },
            died: Vec::new(),
            now,
        }
    }
}

/// How many leases had ended without a word when others were claimed: their workers have died, stood still or were cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expired {
    /// How many. Their jobs wait again; those that were to be cancelled are gone.
    pub jobs: usize,
    /// How many of these are dead instead, since it was their last attempt.
    pub dead: usize,
}

/// A job that is dead since the lease of its last attempt has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Died {
    /// Which job.
    pub id: JobId,
    /// How many attempts it has had.
    pub attempts: u16,
}

impl Died {
    /// For stores: a job, and how many attempts it has had.
    #[must_use]
    pub const fn new(id: JobId, attempts: u16) -> Self {
        Self { id, attempts }
    }
}

/// A job, and the right to finish it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimedJob {
    /// The fencing token.
    pub token: u64,
    /// What was pushed.
    pub job: StoredJob,
}

impl ClaimedJob {
    /// For stores: a job, and the fencing token of this claim.
    #[must_use]
    pub const fn new(token: u64, job: StoredJob) -> Self {
        Self { token, job }
    }

    /// The right to finish it.
    #[must_use]
    pub const fn ticket(&self) -> JobLease {
        JobLease { id: self.job.id, token: self.token, unique: self.job.unique }
    }
}

/// What came of a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cancelled {
    /// It was waiting, and is gone.
    Removed,
    /// It is running: its worker is told with the next extension of its lease. It will not be tried again, and its id is free.
    Told,
    /// It is dead already.
    Dead,
    /// There is none of this id, or it is done.
    Missing,
}

/// What came of a change to a job that has to be waiting for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Changed {
    /// It is changed.
    Done,
    /// It is running, and as it was.
    Running,
    /// It is dead, and as it was.
    Dead,
    /// There is none of this id, or it is done.
    Missing,
}

/// Which state a job is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// It waits until it is due and somebody has time for it.
    Waiting,
    /// Somebody has claimed it.
    Running,
    /// It will not be tried again, and is kept for somebody to look at.
    Dead,
}

/// How many jobs a queue has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Jobs that are waiting, those that are due included.
    pub waiting: u64,
    /// Jobs that are due and not claimed.
    pub due: u64,
    /// Jobs that are claimed.
    pub running: u64,
    /// Dead jobs that are kept.
    pub dead: u64,
    /// For how long the oldest job that is due has been so.
    pub oldest_due: Option<Duration>,
    /// Whether nothing can be claimed.
    pub is_paused: bool,
}

impl Counts {
    pub(crate) const fn of(&self, state: State) -> u64 {
        match state {
            State::Waiting => self.waiting,
            State::Running => self.running,
            State::Dead => self.dead,
        }
    }
}
