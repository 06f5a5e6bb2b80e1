use std::any::{Any, TypeId};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::id::JobId;
use super::record::{FailureInfo, Headers, Priority, StoredJob};
use super::store::{ClaimedJob, JobLease};

/// A job that was claimed, on its way through a service: what was pushed, and what there is to know about it.
///
/// Dereferences to the payload.
#[derive(Clone)]
pub struct Job<T> {
    payload: T,
    about: Arc<JobMeta>,
    extensions: Extensions,
    cancellation: Cancellation,
}

struct JobMeta {
    token: u64,
    // But for the payload.
    stored: StoredJob,
}

impl<T> Job<T> {
    /// A job of a payload, and what cancels it.
    pub(crate) fn new(claimed: ClaimedJob, payload: T) -> (Self, Canceller) {
        let ClaimedJob { token, job: mut stored } = claimed;
        stored.payload = Arc::default();
        let (sender, is_cancelled) = watch::channel(false);
        let job = Self {
            payload,
            about: Arc::new(JobMeta { token, stored }),
            extensions: Extensions::default(),
            cancellation: Cancellation { is_cancelled },
        };
        (job, Canceller(sender))
    }

    /// What it is called.
    #[must_use]
    pub fn id(&self) -> &JobId {
        &self.about.stored.id
    }

    /// Which attempt this is: 1 for the first.
    #[must_use]
    pub fn attempt(&self) -> u16 {
        self.about.stored.attempt
    }

    /// How many attempts it has.
    #[must_use]
    pub fn max_attempts(&self) -> u16 {
        self.about.stored.max_attempts
    }

    /// Whether it is dead if this attempt fails.
    #[must_use]
    pub fn is_last_attempt(&self) -> bool {
        self.attempt() >= self.max_attempts()
    }

    /// Which jobs go first.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.about.stored.priority
    }

    /// When it was pushed, by the store's clock.
    #[must_use]
    pub fn enqueued_at(&self) -> SystemTime {
        self.about.stored.enqueued_at
    }

    /// When it was due, by the store's clock. Snoozing does not change that: a snoozed job keeps its place, and its lateness counts from here.
    #[must_use]
    pub fn due_at(&self) -> SystemTime {
        self.about.stored.due_at
    }

    /// What came with it.
    #[must_use]
    pub fn headers(&self) -> &Headers {
        &self.about.stored.headers
    }

    /// Why the attempt before this one has failed.
    #[must_use]
    pub fn last_failure(&self) -> Option<&FailureInfo> {
        self.about.stored.note.as_ref()
    }

    /// The fencing token: larger than that of each attempt before. For what the service changes, to refuse a smaller one from a worker
    /// that stood still for longer than its lease.
    ///
    /// On one primary that remembers the last claim this holds whatever happens to processes, and if its clock is set back by up to ten minutes.
    /// After a failover that lost the last claim the order is that of the clocks: the new primary's must not be behind by more than the time
    /// since that claim.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.about.token
    }

    /// The right to finish it.
    #[must_use]
    pub fn ticket(&self) -> JobLease {
        let JobMeta { token, stored } = &*self.about;
        JobLease { id: stored.id, token: *token, unique: stored.unique }
    }

    /// What layers tell each other and the service.
    #[must_use]
    pub const fn extensions(&self) -> &Extensions {
        &self.extensions
    }

    /// What layers tell each other and the service, to be added to.
    #[must_use]
    pub const fn extensions_mut(&mut self) -> &mut Extensions {
        &mut self.extensions
    }

    /// Tells when the job is to be given up.
    #[must_use]
    pub fn cancellation(&self) -> Cancellation {
        self.cancellation.clone()
    }

    /// The payload by itself.
    #[must_use]
    pub fn into_payload(self) -> T {
        self.payload
    }

    /// The same job with another payload.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Job<U> {
        let Self { payload, about, extensions, cancellation } = self;
        Job { payload: change(payload), about, extensions, cancellation }
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

/// Tells a service that its job is to be given up: somebody has cancelled it, its lease is lost, it has run for too long, or the worker ends and
/// has no more time.
///
/// A service that gives up answers with an error: the job is given back where the worker ends, and tried again otherwise. `Ok` still
/// says that it is done, and what an error [says of the job](super::DelayQueueWorker#what-becomes-of-a-job) counts as ever. What it answers
/// changes nothing where the job was cancelled, or is somebody else's by now.
#[derive(Clone, Debug)]
pub struct Cancellation {
    is_cancelled: watch::Receiver<bool>,
}

impl Cancellation {
    /// Whether the job is to be given up.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        *self.is_cancelled.borrow()
    }

    /// Waits until the attempt is over, or the job is to be given up, which is `true`: for what runs beside the service and is to end with it.
    pub async fn ended(&mut self) -> bool {
        self.is_cancelled.wait_for(|is_cancelled| *is_cancelled).await.is_ok()
    }

    /// Waits until the job is to be given up, if ever: not ready any more once the attempt is over. A task that waits for this alone is
    /// never done; [`ended`](Self::ended) is for those.
    pub async fn cancelled(&mut self) {
        if !self.ended().await {
            // Nobody is left who could cancel it.
            std::future::pending::<()>().await;
        }
    }
}

/// Cancels one job.
#[derive(Debug)]
pub(crate) struct Canceller(watch::Sender<bool>);

impl Canceller {
    pub(crate) fn cancel(&self) {
        self.0.send_replace(true);
    }
}

/// Values by type. Cheap to clone; clones have their own entries, of the same values.
#[derive(Clone, Default)]
pub struct Extensions {
    entries: Vec<(TypeId, Arc<dyn Any + Send + Sync>)>,
}

impl Extensions {
    /// Keeps a value, in the place of the one of its type that was there.
    pub fn insert<V: Send + Sync + 'static>(&mut self, value: V) {
        self.remove::<V>();
        self.entries.push((TypeId::of::<V>(), Arc::new(value)));
    }

    /// Drops the value of a type, if there is one.
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
