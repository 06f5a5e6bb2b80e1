use std::any::{Any, TypeId};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::id::JobId;
use super::record::{FailureInfo, Headers, Priority, StoredJob};
use super::store::{ClaimedJob, JobLease};

/// A claimed job, as a service receives it: the payload and the metadata.
///
/// Dereferences to the payload.
#[derive(Clone)]
pub struct Job<T> {
    payload: T,
    meta: Arc<JobMeta>,
    extensions: Extensions,
    cancellation: Cancellation,
}

struct JobMeta {
    token: u64,
    // Without the payload.
    stored: StoredJob,
}

impl<T> Job<T> {
    /// Makes a job, and the canceller for it.
    pub(crate) fn new(claimed: ClaimedJob, payload: T) -> (Self, Canceller) {
        let ClaimedJob { token, job: mut stored } = claimed;
        stored.payload = Arc::default();
        let (sender, is_cancelled) = watch::channel(false);
        let job = Self {
            payload,
            meta: Arc::new(JobMeta { token, stored }),
            extensions: Extensions::default(),
            cancellation: Cancellation { is_cancelled },
        };
        (job, Canceller(sender))
    }

    /// The id of the job.
    #[must_use]
    pub fn id(&self) -> &JobId {
        &self.meta.stored.id
    }

    /// The number of this attempt: 1 for the first.
    #[must_use]
    pub fn attempt(&self) -> u16 {
        self.meta.stored.attempt
    }

    /// The number of attempts that the job may have.
    #[must_use]
    pub fn max_attempts(&self) -> u16 {
        self.meta.stored.max_attempts
    }

    /// Whether the job is dead if this attempt fails.
    #[must_use]
    pub fn is_last_attempt(&self) -> bool {
        self.attempt() >= self.max_attempts()
    }

    /// The priority of the job.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.meta.stored.priority
    }

    /// When the job was pushed, by the store's clock.
    #[must_use]
    pub fn enqueued_at(&self) -> SystemTime {
        self.meta.stored.enqueued_at
    }

    /// When the job was due, by the store's clock. Snoozing does not change this time, so the job keeps its position. The
    /// job's lateness counts from this time.
    #[must_use]
    pub fn due_at(&self) -> SystemTime {
        self.meta.stored.due_at
    }

    /// The headers that were pushed with the job.
    #[must_use]
    pub fn headers(&self) -> &Headers {
        &self.meta.stored.headers
    }

    /// Why the previous attempt failed.
    #[must_use]
    pub fn last_failure(&self) -> Option<&FailureInfo> {
        self.meta.stored.failure.as_ref()
    }

    /// The fencing token: larger than the token of each earlier attempt. Store it with the data that the service changes, and reject smaller
    /// tokens: they come from a worker that stalled for longer than its lease.
    ///
    /// The order holds while the primary keeps the last claim. Processes may stall or crash, and the primary's clock may be set back by up to
    /// ten minutes. If a failover loses the last claim, the next token comes from the clock of the new primary. The order then holds
    /// if that clock is behind the old one by less than the time since the lost claim.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.meta.token
    }

    /// The lease, which is needed to finish the job.
    #[must_use]
    pub fn lease(&self) -> JobLease {
        let JobMeta { token, stored } = &*self.meta;
        JobLease { id: stored.id, token: *token, unique: stored.unique }
    }

    /// Values that layers pass to each other and to the service.
    #[must_use]
    pub const fn extensions(&self) -> &Extensions {
        &self.extensions
    }

    /// The [extensions](Self::extensions), mutable.
    #[must_use]
    pub const fn extensions_mut(&mut self) -> &mut Extensions {
        &mut self.extensions
    }

    /// A handle that tells the service when to give up the job: see [`Cancellation`].
    #[must_use]
    pub fn cancellation(&self) -> Cancellation {
        self.cancellation.clone()
    }

    /// The payload, without the metadata.
    #[must_use]
    pub fn into_payload(self) -> T {
        self.payload
    }

    /// The same job with another payload.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Job<U> {
        let Self { payload, meta, extensions, cancellation } = self;
        Job { payload: change(payload), meta, extensions, cancellation }
    }
}

impl<T> Deref for Job<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.payload
    }
}

impl<T> DerefMut for Job<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.payload
    }
}

impl<T: fmt::Debug> fmt::Debug for Job<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("id", self.id())
            .field("attempt", &self.attempt())
            .field("max_attempts", &self.max_attempts())
            .field("fence", &self.fence())
            .field("payload", &self.payload)
            .finish_non_exhaustive()
    }
}

/// Tells a service to give up its job. The reason is a cancellation, a lost lease, the maximum runtime, or the end of the worker's grace period.
///
/// A service that gives up returns an error. The job is then released if the worker is shutting down, and tried again otherwise. `Ok` still
/// means that the job is done, and an error that [determines the outcome](super::DelayQueueWorker#what-becomes-of-a-job) still counts. The
/// result has no effect if the job was cancelled, or if another worker has claimed it.
#[derive(Clone, Debug)]
pub struct Cancellation {
    is_cancelled: watch::Receiver<bool>,
}

impl Cancellation {
    /// Whether the service should give up the job.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        *self.is_cancelled.borrow()
    }

    /// Waits until the attempt ends or the service should give up the job. Returns `true` if the service should give it up. For tasks that
    /// run beside the service.
    pub async fn ended(&mut self) -> bool {
        self.is_cancelled.wait_for(|is_cancelled| *is_cancelled).await.is_ok()
    }

    /// Waits until the service should give up the job. If the attempt ends without a cancellation, the future stays pending
    /// forever. In a task that may outlive the attempt, use [`ended`](Self::ended).
    pub async fn cancelled(&mut self) {
        if !self.ended().await {
            // The canceller is gone, so no cancellation can follow.
            std::future::pending::<()>().await;
        }
    }
}

/// Cancels one job. The worker drops it when the attempt has ended.
#[derive(Debug)]
pub(crate) struct Canceller(watch::Sender<bool>);

impl Canceller {
    pub(crate) fn cancel(&self) {
        self.0.send_replace(true);
    }
}

/// Values by type. Cheap to clone. Clones share the values, but not later changes.
#[derive(Clone, Default)]
pub struct Extensions {
    entries: Vec<(TypeId, Arc<dyn Any + Send + Sync>)>,
}

impl Extensions {
    /// Sets the value of its type, and replaces an earlier one.
    pub fn insert<V: Send + Sync + 'static>(&mut self, value: V) {
        self.remove::<V>();
        self.entries.push((TypeId::of::<V>(), Arc::new(value)));
    }

    /// Removes the value of a type.
    pub fn remove<V: Send + Sync + 'static>(&mut self) {
        self.entries.retain(|(id, _)| *id != TypeId::of::<V>());
    }

    /// The value of a type.
    #[must_use]
    pub fn get<V: Send + Sync + 'static>(&self) -> Option<&V> {
        self.entries.iter().find(|(id, _)| *id == TypeId::of::<V>())?.1.downcast_ref()
    }
}

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extensions").field("len", &self.entries.len()).finish()
    }
}
