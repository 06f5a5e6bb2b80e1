use std::error::Error;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::error::QueueError;
use super::id::JobId;
use super::queue::Terms;
use super::record::{Due, Headers, NewJob, Priority, Unique, UniqueFor};
use super::store::{Admission, QueueKey};
use super::worker::store_client::Patience;
use crate::error::{ConfigError, StoreError};
use crate::key::Key;

/// A job that is about to be pushed: `.await` it, or give it to [`DelayQueue::push_all`](super::DelayQueue::push_all).
///
/// A clone is the same job, with the same [id](Self::id), so that one that was kept can be pushed again where it is not known what has become
/// of the first: that changes nothing while the job waits or runs. One that is done by then runs a second time; where that must not be,
/// [`.unique_for(key, UniqueFor::Time(..))`](Self::unique_for) keeps it out for longer. A clone that is told something else, another delay
/// say, is another job, unless it has a name.
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
///     Err(QueueError::Store(_)) => push.await?, // while it waits or runs it is not pushed twice
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
    terms: Terms,
    payload: Encoded,
    id: Option<JobId>,
    // What it is called without a name, from the first clone on.
    drawn: OnceLock<JobId>,
    due: Due,
    priority: Priority,
    max_attempts: u16,
    unique: Option<Unique>,
    headers: Headers,
}

/// A payload as it is kept, or what the codec has failed with.
type Encoded = Result<Vec<u8>, Arc<dyn Error + Send + Sync>>;

impl Push {
    pub(crate) fn new(terms: Terms, payload: Encoded) -> Self {
        let max_attempts = terms.max_attempts;
        Self {
            terms,
            payload,
            id: None,
            drawn: OnceLock::new(),
            due: Due::NOW,
            priority: Priority::default(),
            max_attempts,
            unique: None,
            headers: Headers::new(),
        }
    }

    /// How long the job waits, by the store's clock, up to [`Due::MAX_DELAY`]. Defaults to nothing.
    pub fn delay(self, delay: Duration) -> Self {
        self.due(delay)
    }

    /// When the job is due: after a `Duration`, or at a `SystemTime`, by the store's clock. Defaults to at once, which an instant that
    /// is over means, too.
    pub fn due(self, due: impl Into<Due>) -> Self {
        self.with(|push| push.due = due.into())
    }

    /// At what instant the job is due, by the store's clock: see [`due`](Self::due).
    pub fn at(self, instant: std::time::SystemTime) -> Self {
        self.due(instant)
    }

    /// What the job is called, so that pushing it again changes nothing while it is waiting or running. Defaults to an id that nobody
    /// else has.
    pub fn id(mut self, id: impl Into<JobId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Which of the jobs that are due are taken first. Defaults to [`Priority::Normal`].
    pub fn priority(self, priority: Priority) -> Self {
        self.with(|push| push.priority = priority)
    }

    /// How many times the job is tried, at least once. Defaults to what the queue [says](super::DelayQueue::max_attempts).
    pub fn max_attempts(self, attempts: u16) -> Self {
        self.with(|push| push.max_attempts = attempts.max(1))
    }

    /// Does nothing while another job with the same key is waiting or running; in a [split](super::DelayQueue::split) queue, one in the same
    /// part, which jobs without an [id](Self::id) of their own always are.
    pub fn unique(self, key: impl Into<Key>) -> Self {
        self.unique_for(key, UniqueFor::WaitingOrRunning)
    }

    /// Does nothing while another job with the same key keeps it, each for as long as it was pushed for; in a split queue as
    /// [`unique`](Self::unique).
    pub fn unique_for(self, key: impl Into<Key>, span: UniqueFor) -> Self {
        self.with(|push| push.unique = Some(Unique { key: key.into(), span }))
    }

    /// Sends a text along, under a name: see [`Headers`].
    pub fn header(self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) -> Self {
        self.with(|push| push.headers.insert(name, value))
    }

    /// Sends along where the current span is in its trace, as the [headers](Self::header) `traceparent` and `tracestate` of the
    /// [W3C](https://www.w3.org/TR/trace-context/), so that the span of each attempt links to it: see
    /// [traces](crate::delay_queue#traces). Nothing where no layer of `tracing-opentelemetry` knows the span.
    #[cfg(feature = "otel")]
    pub fn traced(self) -> Self {
        self.with(|push| super::trace::insert_current(&mut push.headers))
    }

    /// Another job from now on than those that it was cloned from.
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self.drawn = OnceLock::new();
        self
    }

    pub(crate) const fn terms(&self) -> &Terms {
        &self.terms
    }

    /// The job as a store is given it, for a pipeline of one's own: see `RedisBackend::push_in`.
    ///
    /// # Errors
    ///
    /// As pushing it, but for those of the store.
    pub fn prepare(self) -> Result<PreparedPush, QueueError> {
        let terms = self.terms.clone();
        let job = self.into_job(JobId::unique)?;
        Ok(PreparedPush { queue: terms.home(&job.id), job, max_jobs: terms.max_jobs })
    }

    /// How many ids are tried for it, about: see [`Terms::fresh_id`].
    pub(crate) fn tries(&self) -> u32 {
        let is_found = self.id.is_some() || self.drawn.get().is_some();
        if is_found || self.unique.is_none() { 1 } else { self.terms.parts.into() }
    }

    /// What a store is given, if it can be. `unique` is what a job is called that nobody has named.
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
            None => match self.drawn.get() {
                Some(id) => *id,
                None => self.terms.fresh_id(self.unique.as_ref(), unique)?,
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
        let (bytes, max) = (job.size(), self.terms.max_size);
        if bytes > max { Err(QueueError::TooLarge { bytes, max }) } else { Ok(job) }
    }
}

/// Refuses a delay that is longer than the longest one.
pub(crate) fn check_delay(delay: Duration) -> Result<(), ConfigError> {
    let max = Due::MAX_DELAY;
    if delay > max { Err(ConfigError::DelayOutOfRange { delay, max }) } else { Ok(()) }
}

impl IntoFuture for Push {
    type Output = Result<Pushed, QueueError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let terms = self.terms.clone();
            let job = self.into_job(JobId::unique)?;
            let id = job.id;
            let admission = terms.push(terms.home(&id), vec![job], &mut Patience::none()).await?.first().copied();
            Pushed::of(id, admission, &terms)
        })
    }
}

// By hand: from now on there is more than one that stands for the same job.
impl Clone for Push {
    fn clone(&self) -> Self {
        let Self { terms, payload, id, drawn, due, priority, max_attempts, unique, headers } = self;
        if id.is_none()
            && drawn.get().is_none()
            && let Ok(id) = terms.fresh_id(unique.as_ref(), JobId::unique)
        {
            // Another clone may have been faster.
            let _ = drawn.set(id);
        }
        Self {
            terms: terms.clone(),
            payload: payload.clone(),
            id: *id,
            drawn: drawn.clone(),
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

/// A job that can be pushed as it is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PreparedPush {
    /// Where it is to be.
    pub queue: QueueKey,
    /// What it is.
    pub job: NewJob,
    /// How many jobs there may be.
    pub max_jobs: u64,
}

/// A job that is waiting: a [`JobId`], and whether this push has made it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    id: JobId,
    is_new: bool,
}

impl Pushed {
    pub(crate) fn of(id: JobId, admission: Option<Admission>, terms: &Terms) -> Result<Self, QueueError> {
        match admission {
            Some(Admission::New) => Ok(Self { id, is_new: true }),
            Some(Admission::Exists(id)) => Ok(Self { id, is_new: false }),
            Some(Admission::Full) => Err(QueueError::Full { max: terms.max_jobs }),
            None => Err(StoreError::other("the store has not answered for each job").into()),
        }
    }

    /// What the job is called: the one that was pushed, or the one that was there.
    #[must_use]
    pub const fn id(&self) -> &JobId {
        &self.id
    }

    /// Whether the job was not there before, under this id or this unique key.
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
