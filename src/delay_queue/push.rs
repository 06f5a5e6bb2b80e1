use std::error::Error;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::error::QueueError;
use super::id::JobId;
use super::queue_handle::QueueHandle;
use super::record::{Due, Headers, NewJob, Priority, Unique, UniqueFor};
use super::store::{Admission, QueueKey};
use super::worker::store_client::CircuitWait;
use crate::error::{ConfigError, StoreError};
use crate::key::Key;

/// A job to push: `.await` it, or pass it to [`DelayQueue::push_all`](super::DelayQueue::push_all).
///
/// A clone is the same job, with the same [id](Self::id). If the outcome of a push is unknown, push a clone of it again: that changes
/// nothing while the job waits or runs. If the job is done by then, it runs a second time. To exclude it for longer, use
/// [`.unique_for(key, UniqueFor::Time(..))`](Self::unique_for). If you change a clone, its delay for example, it becomes another job,
/// unless it has an id that you set.
///
/// ```
/// # #[cfg(feature = "json")] {
/// use tollgate::delay_queue::QueueError;
/// use tollgate::{DelayQueue, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let queue = DelayQueue::<String>::new(MemoryBackend::new(), "mail");
///
/// let push = queue.push("welcome".to_owned());
/// let pushed = match push.clone().await {
///     Err(QueueError::Store(_)) => push.await?, // not pushed twice while it waits or runs
///     answer => answer?,
/// };
/// # assert!(pushed.is_new());
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
#[must_use = "nothing is pushed until this is awaited"]
pub struct Push {
    handle: QueueHandle,
    payload: Encoded,
    id: Option<JobId>,
    // Used if `id` is `None`. The first call of `clone` generates it, so that the push and its clones have the same id.
    generated: OnceLock<JobId>,
    due: Due,
    priority: Priority,
    max_attempts: u16,
    unique: Option<Unique>,
    headers: Headers,
}

/// An encoded payload, or the error of the codec.
type Encoded = Result<Vec<u8>, Arc<dyn Error + Send + Sync>>;

impl Push {
    pub(crate) fn new(handle: QueueHandle, payload: Encoded) -> Self {
        let max_attempts = handle.max_attempts;
        Self {
            handle,
            payload,
            id: None,
            generated: OnceLock::new(),
            due: Due::NOW,
            priority: Priority::default(),
            max_attempts,
            unique: None,
            headers: Headers::new(),
        }
    }

    /// How long the job waits, by the store's clock, up to [`Due::MAX_DELAY`]. Defaults to zero.
    pub fn delay(self, delay: Duration) -> Self {
        self.due(delay)
    }

    /// When the job is due: after a `Duration`, or at a `SystemTime`, by the store's clock. Defaults to at once. A time in the past
    /// means at once, too.
    pub fn due(self, due: impl Into<Due>) -> Self {
        self.with(|push| push.due = due.into())
    }

    /// The time at which the job is due, by the store's clock: see [`due`](Self::due).
    pub fn at(self, instant: std::time::SystemTime) -> Self {
        self.due(instant)
    }

    /// The id of the job: while a job with this id waits or runs, pushing it again changes nothing. Defaults to a generated unique id.
    pub fn id(mut self, id: impl Into<JobId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// The priority: due jobs of higher priority are claimed first. Defaults to [`Priority::Normal`].
    pub fn priority(self, priority: Priority) -> Self {
        self.with(|push| push.priority = priority)
    }

    /// The number of attempts, at least 1. Defaults to the setting [of the queue](super::DelayQueue::max_attempts).
    pub fn max_attempts(self, attempts: u16) -> Self {
        self.with(|push| push.max_attempts = attempts.max(1))
    }

    /// Makes the push change nothing while another job with the same key waits or runs. In a [split](super::DelayQueue::split) queue, only
    /// jobs in the same partition exclude each other. Jobs with the same key are in the same partition unless you set their
    /// [ids](Self::id).
    pub fn unique(self, key: impl Into<Key>) -> Self {
        self.unique_for(key, UniqueFor::WaitingOrRunning)
    }

    /// Makes the push change nothing while another job holds the same key. A job holds its key for the `span` of its own push. For split
    /// queues see [`unique`](Self::unique).
    pub fn unique_for(self, key: impl Into<Key>, span: UniqueFor) -> Self {
        self.with(|push| push.unique = Some(Unique { key: key.into(), span }))
    }

    /// Adds a header, a name with a text: see [`Headers`].
    pub fn header(self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) -> Self {
        self.with(|push| push.headers.insert(name, value))
    }

    /// Adds the trace context of the current span, as the [headers](Self::header) `traceparent` and `tracestate` of the
    /// [W3C](https://www.w3.org/TR/trace-context/). The span of each attempt then links to it: see
    /// [traces](crate::delay_queue#traces). Adds nothing if no layer of `tracing-opentelemetry` knows the span.
    #[cfg(feature = "otel")]
    pub fn traced(self) -> Self {
        self.with(|push| super::trace::insert_current(&mut push.headers))
    }

    /// Changes the job. A changed clone is another job, so it loses the generated id.
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self.generated = OnceLock::new();
        self
    }

    pub(crate) const fn handle(&self) -> &QueueHandle {
        &self.handle
    }

    /// The job in the form that a store takes, for your own pipeline: see `RedisBackend::push_in`.
    ///
    /// # Errors
    ///
    /// The errors of a push, except those of the store.
    pub fn prepare(self) -> Result<PreparedPush, QueueError> {
        let handle = self.handle.clone();
        let job = self.into_job(JobId::unique)?;
        Ok(PreparedPush { queue: handle.partition_of(&job.id), job, max_jobs: handle.max_jobs })
    }

    /// About how many ids [`into_job`](Self::into_job) generates for this push: see [`QueueHandle::generate_id`].
    pub(crate) fn ids_to_try(&self) -> u32 {
        let has_id = self.id.is_some() || self.generated.get().is_some();
        if has_id || self.unique.is_none() { 1 } else { self.handle.partitions.into() }
    }

    /// The job for the store. If the push has no id yet, `unique` makes one, unrelated to the unique key.
    pub(crate) fn into_job(self, unique: impl FnOnce() -> Result<JobId, StoreError>) -> Result<NewJob, QueueError> {
        let payload = self.payload.map_err(QueueError::Encode)?;
        if let Due::In(delay) = self.due {
            check_delay(delay)?;
        }
        if let Some(Unique { span: UniqueFor::Time(time) | UniqueFor::Occurrence(time), .. }) = self.unique {
            check_delay(time)?;
        }
        let id = match self.id {
            Some(id) if id.as_bytes().is_empty() => return Err(ConfigError::EmptyJobId.into()),
            Some(id) => id,
            None => match self.generated.get() {
                Some(id) => *id,
                None => self.handle.generate_id(self.unique.as_ref(), unique)?,
            },
        };
        let job = NewJob {
            id,
            due: self.due,
            priority: self.priority,
            max_attempts: self.max_attempts,
            unique: self.unique,
            headers: self.headers,
            payload: payload.into(),
        };
        let (bytes, max) = (job.size(), self.handle.max_size);
        if bytes > max { Err(QueueError::TooLarge { bytes, max }) } else { Ok(job) }
    }
}

/// Rejects a delay longer than [`Due::MAX_DELAY`].
pub(crate) fn check_delay(delay: Duration) -> Result<(), ConfigError> {
    let max = Due::MAX_DELAY;
    if delay > max { Err(ConfigError::DelayOutOfRange { delay, max }) } else { Ok(()) }
}

impl IntoFuture for Push {
    type Output = Result<Pushed, QueueError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let handle = self.handle.clone();
            let job = self.into_job(JobId::unique)?;
            let id = job.id;
            let admission =
                handle.push(handle.partition_of(&id), vec![job], &mut CircuitWait::none()).await?.first().copied();
            Pushed::of(id, admission, &handle)
        })
    }
}

// Not derived, since the first call generates the id that all clones share.
impl Clone for Push {
    fn clone(&self) -> Self {
        let Self { handle, payload, id, generated, due, priority, max_attempts, unique, headers } = self;
        if id.is_none()
            && generated.get().is_none()
            && let Ok(id) = handle.generate_id(unique.as_ref(), JobId::unique)
        {
            // If another thread has cloned the push meanwhile, the id of that thread stays.
            let _ = generated.set(id);
        }
        Self {
            handle: handle.clone(),
            payload: payload.clone(),
            id: *id,
            generated: generated.clone(),
            due: *due,
            priority: *priority,
            max_attempts: *max_attempts,
            unique: *unique,
            headers: headers.clone(),
        }
    }
}

impl fmt::Debug for Push {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Push").field("id", &self.id).field("due", &self.due).finish_non_exhaustive()
    }
}

/// A job in the form that a store takes: see [`Push::prepare`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PreparedPush {
    /// The queue, and its partition.
    pub queue: QueueKey,
    /// The job.
    pub job: NewJob,
    /// The largest number of jobs in the queue: see [`DelayQueue::max_jobs`](super::DelayQueue::max_jobs).
    pub max_jobs: u64,
}

/// The result of a push: the [`JobId`], and whether this push added the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    id: JobId,
    is_new: bool,
}

impl Pushed {
    pub(crate) fn of(id: JobId, admission: Option<Admission>, handle: &QueueHandle) -> Result<Self, QueueError> {
        match admission {
            Some(Admission::New) => Ok(Self { id, is_new: true }),
            Some(Admission::Exists(id)) => Ok(Self { id, is_new: false }),
            Some(Admission::Full) => Err(QueueError::Full { max: handle.max_jobs }),
            None => Err(StoreError::other("the store did not answer for each job").into()),
        }
    }

    /// The id of the pushed job, or of the job that was there already.
    #[must_use]
    pub const fn id(&self) -> &JobId {
        &self.id
    }

    /// Whether this push added the job: no job had its id or its unique key.
    #[must_use]
    pub const fn is_new(&self) -> bool {
        self.is_new
    }
}

impl From<Pushed> for JobId {
    fn from(pushed: Pushed) -> Self {
        pushed.id
    }
}

impl From<&Pushed> for JobId {
    fn from(pushed: &Pushed) -> Self {
        pushed.id
    }
}
