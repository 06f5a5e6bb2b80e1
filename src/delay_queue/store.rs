//! For people who write a backend: what a delay queue needs from a store.

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
use crate::reach::Reach;

pub use super::limits::{MAX_BATCH, MAX_ERROR_LEN};
pub use super::record::State;
pub use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;

/// The store of delay queues, which a backend implements. Each job is in one state at a time, and every transition is one atomic step.
///
/// ```text
///   push            claim                 finish: done
///   -----> waiting -------> running ----------------------> gone
///             ^  |            |  |
///             |  | cancel     |  | finish: dead, or no attempt left; or the lease expired and no attempt is left
///             |  +--> gone    |  +--------------------------> dead
///             |               | finish: retry, snooze, release; or the lease expired       |
///             +---------------+------------------------------------------------------------+ replay
/// ```
///
/// All times are by the backend's clock. Callers pass durations, and an instant only in [`Due::At`]. A claim returns a [`JobLease`] for
/// each job, and only the holder of the latest one can finish the job. Every backend passes the same contract tests. Your own backend can
/// run them from `tollgate::testing` (feature `testing`).
///
/// # Cancellation
///
/// If a returned future is dropped, the operation may or may not have taken effect.
pub trait DelayQueueStore {
    /// Adds jobs, which wait until they are due. Returns a result for each, in order.
    ///
    /// If a job with the same id waits or runs, nothing changes. A dead or [cancelled](Self::cancel) job with the same id is replaced. The call
    /// may be retried: a job that the first call added [exists](Admission::Exists) then.
    fn push(
        &self,
        queue: &QueueKey,
        jobs: &[NewJob],
        max_jobs: u64,
    ) -> impl Future<Output = Result<Vec<Admission>, StoreError>> + Send;

    /// Finishes claimed jobs, and then claims due ones, in one step. With a [limit](Claim::limit) of 0 it only finishes jobs, for a worker
    /// without capacity or one in shutdown.
    ///
    /// Before the claim, jobs whose lease has ended wait again, or are dead if they have no attempt left. An attempt counts as soon as it is
    /// claimed. Finishing may be retried with the same leases. If the reply of a call is lost, the jobs that it claimed wait again when
    /// their leases have ended.
    fn claim(
        &self,
        queue: &QueueKey,
        finished: &[Ack],
        claim: &Claim,
    ) -> impl Future<Output = Result<Claimed, StoreError>> + Send;

    /// Lets each of `leases` end at the duration `lease` from now, if it is still the latest lease of its job. Reports which jobs were
    /// cancelled. Returns a result for each lease, in order. An expired lease can be extended until the store has handled its end.
    fn extend(
        &self,
        queue: &QueueKey,
        leases: &[JobLease],
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<Extended>, StoreError>> + Send;

    /// Notifications for an idle worker, for jobs that are due earlier than [`Claimed::next`]. The future completes when no notification can
    /// be missed any more. The worker claims then, and after each notification. If notifications can get lost, the store bounds
    /// [`Claimed::next`], so that the worker claims periodically. A store without notifications returns [`Notifications::none`].
    fn watch(&self, queue: &QueueKey, worker: WorkerId) -> impl Future<Output = Notifications> + Send;

    /// The job with this id, in any state; `None` if there is none.
    fn get(&self, queue: &QueueKey, id: &JobId) -> impl Future<Output = Result<Option<StoredJob>, StoreError>> + Send;

    /// Removes a waiting job. If the job is running, its worker is notified, and the job is not tried again: its id is free at once. Its
    /// unique key is free, too, with two exceptions: a key held for an [occurrence](UniqueFor::Occurrence), and with `keeps_unique` a key
    /// held for a [time](UniqueFor::Time).
    ///
    /// A new job with the freed id or key is not claimed while the cancelled attempt runs: until its worker finishes it, or its lease ends.
    fn cancel(
        &self,
        queue: &QueueKey,
        id: &JobId,
        keeps_unique: bool,
    ) -> impl Future<Output = Result<Cancelled, StoreError>> + Send;

    /// Changes the due time of a waiting job.
    fn reschedule(
        &self,
        queue: &QueueKey,
        id: &JobId,
        due: Due,
    ) -> impl Future<Output = Result<Changed, StoreError>> + Send;

    /// Replaces the payload of a waiting job.
    fn replace(
        &self,
        queue: &QueueKey,
        id: &JobId,
        payload: &[u8],
    ) -> impl Future<Output = Result<Changed, StoreError>> + Send;

    /// The number of jobs in each state.
    fn counts(&self, queue: &QueueKey) -> impl Future<Output = Result<Counts, StoreError>> + Send;

    /// Lists up to `limit` jobs in one state, and no more than [`MAX_BATCH`], after skipping the first `skip`. Waiting jobs are sorted by
    /// due time within each priority, with snoozed jobs last; running jobs by when their lease ends; dead jobs by when they died. It may
    /// return fewer jobs than there are. An empty result means that no more follow.
    fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<StoredJob>, StoreError>> + Send;

    /// Stops or allows claims. Running jobs go on.
    fn pause(&self, queue: &QueueKey, is_paused: bool) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes up to `limit` waiting jobs, and no more than [`MAX_BATCH`]. Returns how many; 0 means that none is left. Unique keys are
    /// released as by [`cancel`](Self::cancel).
    fn purge(
        &self,
        queue: &QueueKey,
        limit: usize,
        keeps_unique: bool,
    ) -> impl Future<Output = Result<usize, StoreError>> + Send;

    /// Releases a unique key, whichever job holds it. Returns whether it was held.
    fn release_unique(&self, queue: &QueueKey, key: &Key) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Lets dead jobs wait again, due at once and with all of their attempts. A job that is unique while it
    /// [waits or runs](UniqueFor::WaitingOrRunning) takes its key again, and stays dead if another job holds the key. Returns for each whether it
    /// waits again. If the jobs are large or many, it may handle only the first of them, at least one. It then returns results for these
    /// only.
    fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Removes dead jobs, and releases the unique keys that they hold for a [time](UniqueFor::Time), but not for an
    /// [occurrence](UniqueFor::Occurrence). Returns for each whether it was dead. Like
    /// [`replay`](Self::replay), it may handle only the first of them.
    fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Which processes share a queue.
    fn reach(&self) -> Reach;

    /// An address that clones of a store share and no other live store has. `None` means unknown.
    #[doc(hidden)]
    fn identity(&self) -> Option<usize> {
        None
    }

    /// Adds `target` to the shutdown of the backend, which closes it and waits for its work: see [`backend`](crate::backend#shutdown). A
    /// store that wraps another one has to pass the call on. Defaults to nothing, for a store without a shutdown.
    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        let _ = target;
    }
}

/// About the largest size of the jobs in one call, in bytes, since the server does nothing else during the call.
const MAX_BATCH_BYTES: usize = 1_024 * 1_024;

/// How many of the first jobs fit into one call, given their sizes. A job over the limit gets a call of its own.
pub(crate) fn batch_len(sizes: impl IntoIterator<Item = usize>) -> usize {
    let mut bytes = 0_usize;
    let fits = |size: &usize| {
        bytes = bytes.saturating_add(*size);
        bytes <= MAX_BATCH_BYTES
    };
    sizes.into_iter().take(MAX_BATCH).take_while(fits).count().max(1)
}

/// The key of a queue: its name, and the partition of a split queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueKey {
    name: Key,
    partition: u16,
}

impl QueueKey {
    /// The key of the queue `name`.
    pub fn new(name: impl Into<Key>) -> Self {
        Self { name: name.into(), partition: 0 }
    }

    /// The key of one partition. A queue that is not split has only the partition 0.
    #[must_use]
    pub const fn with_partition(self, partition: u16) -> Self {
        Self { partition, ..self }
    }

    /// The name of the queue.
    #[must_use]
    pub const fn name(&self) -> &Key {
        &self.name
    }

    /// The number of the partition.
    #[must_use]
    pub const fn partition(&self) -> u16 {
        self.partition
    }
}

impl fmt::Debug for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueKey({self})")
    }
}

impl fmt::Display for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.partition {
            0 => fmt::Display::fmt(&self.name, f),
            partition => write!(f, "{}#{partition}", self.name),
        }
    }
}

/// The result of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admission {
    /// The job was added.
    New,
    /// Nothing changed: this job has the same id, or holds the same unique key.
    Exists(JobId),
    /// The queue has reached its largest number of jobs.
    Full,
}

/// The id of a worker, unique to it for its lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkerId([u8; 16]);

impl WorkerId {
    /// Generates a unique id.
    ///
    /// # Errors
    ///
    /// If the system provides no random numbers.
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

/// The parameters of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// The worker that claims.
    pub worker: WorkerId,
    /// The largest number of jobs, up to [`MAX_BATCH`]: the worker's free capacity. A worker that gets that many is not idle: the store
    /// does not [notify](DelayQueueStore::watch) this worker until its next claim, and may notify any other. A
    /// claim may return fewer jobs although [more](Claimed::more) are due, if the jobs are large.
    pub limit: usize,
    /// How long the jobs are reserved for the worker without a renewal, from [`Claim::MIN_LEASE`] to [`Claim::MAX_LEASE`].
    pub lease: Duration,
    /// The limits on dead jobs.
    pub dead: DeadLimits,
}

impl Claim {
    /// A claim of up to `limit` jobs, with the default limits on dead jobs.
    #[must_use]
    pub fn new(worker: WorkerId, limit: usize, lease: Duration) -> Self {
        Self { worker, limit, lease, dead: DeadLimits::default() }
    }

    /// The shortest lease.
    pub const MIN_LEASE: Duration = Duration::from_millis(10);
    /// The longest lease. Longer jobs renew theirs.
    pub const MAX_LEASE: Duration = Duration::from_secs(86_400);
    /// The longest wait between claims of an idle worker, if notifications can get lost.
    pub const MAX_WAIT: Duration = Duration::from_secs(5);

    /// The deadline of a worker's call: a third of the lease, so that there is time for another call. At least 100 ms, and at most 5 s.
    pub(crate) fn call_timeout(lease: Duration) -> Duration {
        (lease / 3).min(Duration::from_secs(5)).max(Duration::from_millis(100))
    }
}

/// The limits on dead jobs. The oldest are removed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLimits {
    /// The largest number of dead jobs.
    pub count: u64,
    /// How long they are kept, up to [`DeadLimits::MAX_AGE`].
    pub age: Duration,
}

impl DeadLimits {
    /// Limits on the number and the age.
    #[must_use]
    pub const fn new(count: u64, age: Duration) -> Self {
        Self { count, age }
    }

    /// The longest time for which dead jobs are kept.
    pub const MAX_AGE: Duration = Duration::from_secs(90 * 86_400);
}

impl Default for DeadLimits {
    /// 10,000 jobs for 90 days.
    fn default() -> Self {
        Self { count: 10_000, age: Self::MAX_AGE }
    }
}

/// A lease on a job. Its holder can finish the job until the store has handled the end of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobLease {
    /// The id of the job.
    pub id: JobId,
    /// The fencing token: larger than that of each earlier claim of this job.
    pub token: u64,
    /// The unique key that the job holds.
    pub unique: Option<Unique>,
}

/// The result of an attempt, to be recorded by the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ack {
    /// The lease of the job.
    pub lease: JobLease,
    /// How the attempt ended.
    pub kind: AckKind,
}

impl Ack {
    /// The result of the attempt under `lease`.
    #[must_use]
    pub const fn new(lease: JobLease, kind: AckKind) -> Self {
        Self { lease, kind }
    }
}

/// How an attempt ended. If the job was [cancelled](DelayQueueStore::cancel) meanwhile, it is removed in any
/// case.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AckKind {
    /// The job is done, and removed.
    Done,
    /// The service cancelled the job, which is removed. Its unique key is free, even a key held for a [time](UniqueFor::Time).
    Cancelled,
    /// The attempt failed, and the job waits for its next attempt. It is dead if this was the last one.
    Retry {
        /// How long it waits.
        delay: Duration,
        /// Why the attempt failed. The first [`MAX_ERROR_LEN`] bytes are stored.
        error: Arc<str>,
    },
    /// The job waits, and the attempt does not count. Its due time does not change: after the snooze it precedes jobs of its priority that are
    /// due later.
    Snooze {
        /// How long it waits.
        delay: Duration,
    },
    /// The job waits, due as before, and the attempt does not count: its worker did not start the job, or gave it up.
    Release,
    /// The job is dead: it is not tried again.
    Dead {
        /// The kind of failure.
        reason: Reason,
        /// The error text. The first [`MAX_ERROR_LEN`] bytes are stored.
        error: Arc<str>,
    },
}

impl AckKind {
    /// Whether the job is removed.
    pub(crate) const fn forgets(&self) -> bool {
        matches!(self, Self::Done | Self::Cancelled)
    }
}

/// The result of finishing a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finished {
    /// The request took effect.
    Done,
    /// The job is dead: it has no attempt left, or was finished as [dead](AckKind::Dead).
    Dead,
    /// The job was not done, and is removed, since it was [cancelled](DelayQueueStore::cancel) meanwhile.
    Cancelled,
    /// The job does not exist any more: an earlier call with this lease took effect, or another worker has finished the job. If a new job
    /// with the same id was pushed since, this is the result for [`Done`](AckKind::Done) and [`Cancelled`](AckKind::Cancelled). For other
    /// kinds it is [`Lost`](Self::Lost).
    Gone,
    /// The lease is not valid any more, but the job exists: the lease had ended, the store lost it, or an earlier call with it took effect.
    /// Nothing changed.
    Lost,
}

/// The result of extending a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extended {
    /// The lease is extended.
    Held,
    /// The lease is extended, and the job was cancelled.
    Cancelled,
    /// The lease is lost: another worker has the job, or will have it, or the job is gone.
    Lost,
}

/// The result of finishing and claiming.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claimed {
    /// The result for each job to finish, in order.
    pub finished: Vec<Finished>,
    /// The claimed jobs: by priority, then by due time, then by id.
    pub jobs: Vec<ClaimedJob>,
    /// Whether more jobs are due, or more leases have ended.
    pub more: bool,
    /// When to claim again, unless [notified](DelayQueueStore::watch) earlier: the time until the next job is due or the next lease ends.
    /// If another worker waits for this time, the store may return a longer one. An earlier claim does no harm.
    ///
    /// At most [`Claim::MAX_WAIT`] if notifications can get lost. `None` lets the worker sleep until it is notified.
    pub next: Option<Duration>,
    /// For how long the oldest job that is not claimed has been due, as in [`Counts::oldest_due`].
    pub oldest_due: Option<Duration>,
    /// How many leases had ended, and how many of their jobs are dead.
    pub expired: Expired,
    /// The jobs that died because their last lease had ended, as far as the store names them.
    pub died: Vec<Died>,
    /// The time of the store's clock.
    pub now: SystemTime,
}

impl Claimed {
    /// For stores: a result without finished and claimed jobs. The worker claims again after [`Claim::MAX_WAIT`].
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

/// How many leases had expired at a claim before their jobs finished: the workers died, stalled or lost the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Expired {
    /// The number of leases. Their jobs wait again, and cancelled jobs are removed.
    pub jobs: usize,
    /// How many of these jobs are dead instead, since it was their last attempt.
    pub dead: usize,
}

/// A job that died because the lease of its last attempt expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Died {
    /// The id of the job.
    pub id: JobId,
    /// The number of its attempts.
    pub attempts: u16,
}

impl Died {
    /// For stores: a job, and the number of its attempts.
    #[must_use]
    pub const fn new(id: JobId, attempts: u16) -> Self {
        Self { id, attempts }
    }
}

/// A claimed job, with the fencing token of its lease.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimedJob {
    /// The fencing token.
    pub token: u64,
    /// The job.
    pub job: StoredJob,
}

impl ClaimedJob {
    /// For stores: a job, and the fencing token of this claim.
    #[must_use]
    pub const fn new(token: u64, job: StoredJob) -> Self {
        Self { token, job }
    }

    /// The lease, which is needed to finish the job.
    #[must_use]
    pub const fn lease(&self) -> JobLease {
        JobLease { id: self.job.id, token: self.token, unique: self.job.unique }
    }
}

/// The result of a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cancelled {
    /// The job was waiting, and is removed.
    Removed,
    /// The job is running. Its worker is notified with the next renewal of its lease. The job is not tried again, and its id is free.
    Notified,
    /// The job is dead already.
    Dead,
    /// There is no job with this id, or it is done.
    Missing,
}

/// The result of a change to a waiting job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Changed {
    /// The job is changed.
    Done,
    /// The job is running, and unchanged.
    Running,
    /// The job is dead, and unchanged.
    Dead,
    /// There is no job with this id, or it is done.
    Missing,
}

/// The number of jobs in a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Waiting jobs, the due ones included.
    pub waiting: u64,
    /// Jobs that are due and not claimed.
    pub due: u64,
    /// Claimed jobs.
    pub running: u64,
    /// Dead jobs.
    pub dead: u64,
    /// For how long the oldest waiting job has been due.
    pub oldest_due: Option<Duration>,
    /// Whether claims are paused.
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
