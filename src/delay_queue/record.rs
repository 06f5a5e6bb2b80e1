use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::id::JobId;
use super::limits::MAX_ERROR_LEN;
use crate::key::Key;

/// When a job is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Due {
    /// After this delay, by the store's clock. At most [`Due::MAX_DELAY`].
    In(Duration),
    /// At this instant, by the store's clock; at once if it is in the past.
    ///
    /// The memory backend reads the machine's clock when it is created, and then counts elapsed time. Before the push, a suspension of the
    /// machine or a step of its clock changes nothing: the push converts the instant by the machine's clock. While the job waits, a
    /// suspension or a step forward makes the job late by that time, and a step back makes it early.
    At(SystemTime),
}

impl Due {
    /// The longest delay: 3,660 days.
    pub const MAX_DELAY: Duration = Duration::from_secs(3_660 * 86_400);
    /// At once.
    pub const NOW: Due = Due::In(Duration::ZERO);
}

impl From<Duration> for Due {
    fn from(delay: Duration) -> Self {
        Self::In(delay)
    }
}

impl From<SystemTime> for Due {
    fn from(instant: SystemTime) -> Self {
        Self::At(instant)
    }
}

/// The priority of a job. While a job of a higher priority is due, none of a lower priority is claimed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Priority {
    /// Before all others.
    High,
    /// The default.
    #[default]
    Normal,
    /// After all others.
    Low,
}

impl Priority {
    /// All priorities, the highest first.
    pub const ALL: &[Self] = &[Self::High, Self::Normal, Self::Low];
}

/// A unique key, which excludes other jobs with the same key, whatever their ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unique {
    /// The key. It is unique within a queue, or within one partition of a [split](super::DelayQueue::split) queue.
    pub key: Key,
    /// How long it excludes other jobs.
    pub span: UniqueFor,
}

/// How long a job excludes others with the same unique key. A dead job excludes others only if it holds its key for a [time](Self::Time).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UniqueFor {
    /// Until the job is done, [cancelled](super::DelayQueue::cancel), [purged](super::DelayQueue::purge) or dead, and again after a
    /// [replay](super::DelayQueue::replay).
    WaitingOrRunning,
    /// Until the job is claimed for the first time. Not again if it is snoozed, tried again or replayed.
    Waiting,
    /// For this time after the push, at most [`Due::MAX_DELAY`], even if the job is done or dead before. The time ends early with
    /// [`cancel`](super::DelayQueue::cancel), [`Outcome::cancel`](super::Outcome::cancel), [`purge`](super::DelayQueue::purge),
    /// [`forget`](super::DelayQueue::forget) or [`release_unique`](super::DelayQueue::release_unique). It does not end early if a dead job is
    /// removed because of its age or for lack of space.
    ///
    /// An expired key excludes no jobs, but takes up space until it is removed. Each later push removes up to two expired keys. In the
    /// memory backend, keys count for the capacity of all queues. There, claims remove some too, and a push removes more if no space is
    /// left.
    Time(Duration),
    /// Like [`Time`](Self::Time), but only [`release_unique`](super::DelayQueue::release_unique) ends it early. The jobs of `Recurring` use it,
    /// so that a cancelled occurrence is not pushed again.
    Occurrence(Duration),
}

/// A job to be pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewJob {
    /// The id.
    pub id: JobId,
    /// When it is due.
    pub due: Due,
    /// The priority.
    pub priority: Priority,
    /// The number of attempts, at least 1.
    pub max_attempts: u16,
    /// The unique key.
    pub unique: Option<Unique>,
    /// The headers.
    pub headers: Headers,
    /// The encoded payload, which the store does not parse.
    pub payload: Arc<[u8]>,
}

impl NewJob {
    /// A job that is due at once, with normal priority and 20 attempts.
    #[must_use]
    pub fn new(id: JobId, payload: impl Into<Arc<[u8]>>) -> Self {
        Self {
            id,
            due: Due::NOW,
            priority: Priority::default(),
            max_attempts: Self::DEFAULT_ATTEMPTS,
            unique: None,
            headers: Headers::default(),
            payload: payload.into(),
        }
    }

    /// The default number of attempts.
    pub const DEFAULT_ATTEMPTS: u16 = 20;

    /// The size of the payload and the headers in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.payload.len() + self.headers.size()
    }
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// The job waits until it is due and a worker has capacity.
    Waiting,
    /// A worker has claimed the job.
    Running,
    /// The job is not tried again, and is kept for inspection.
    Dead,
}

/// A job as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredJob {
    /// The id.
    pub id: JobId,
    /// The state.
    pub state: State,
    /// The number of attempts so far, including the running one.
    pub attempt: u16,
    /// The largest number of attempts.
    pub max_attempts: u16,
    /// The priority.
    pub priority: Priority,
    /// When the job was pushed, by the store's clock.
    pub enqueued_at: SystemTime,
    /// When the job is due, by the store's clock. A claim does not change it. While the job is snoozed, this is the end of the snooze.
    /// After the snooze, it is the original due time again.
    pub due_at: SystemTime,
    /// The unique key.
    pub unique: Option<Unique>,
    /// Why the last failed attempt failed. For a dead job, this is why it is dead.
    pub failure: Option<FailureInfo>,
    /// The headers.
    pub headers: Headers,
    /// The encoded payload.
    pub payload: Arc<[u8]>,
}

impl StoredJob {
    /// For stores: a job that was just pushed. It waits, without attempts. Both times are by the store's clock.
    #[must_use]
    pub fn new(job: &NewJob, enqueued_at: SystemTime, due_at: SystemTime) -> Self {
        Self {
            id: job.id,
            state: State::Waiting,
            attempt: 0,
            max_attempts: job.max_attempts,
            priority: job.priority,
            enqueued_at,
            due_at,
            unique: job.unique,
            failure: None,
            headers: job.headers.clone(),
            payload: Arc::clone(&job.payload),
        }
    }
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailureInfo {
    /// The kind of failure.
    pub reason: Reason,
    /// The error text, up to [`MAX_ERROR_LEN`] bytes.
    pub error: Arc<str>,
}

impl FailureInfo {
    /// For stores: why an attempt failed, with the first [`MAX_ERROR_LEN`] bytes of `error`.
    #[must_use]
    pub fn new(reason: Reason, error: &str) -> Self {
        Self { reason, error: Self::cut(error).into() }
    }

    /// The part of an error text that is stored.
    pub(crate) fn cut(error: &str) -> &str {
        let end = (0..=error.len().min(MAX_ERROR_LEN)).rev().find(|&end| error.is_char_boundary(end));
        &error[..end.unwrap_or_default()]
    }
}

/// The kind of failure of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The service returned an error or panicked.
    Failed,
    /// The lease expired: the worker died, stalled or lost the network. If all attempts end like this, the job is in a crash loop.
    LeaseExpired,
    /// The service refused the job: a retry is pointless.
    Refused,
    /// The worker cannot decode the payload.
    Undecodable,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failed => "failed",
            Self::LeaseExpired => "lease_expired",
            Self::Refused => "refused",
            Self::Undecodable => "undecodable",
        })
    }
}

/// Headers of a job beside its payload, for example the `traceparent` of the push: a few names, each with a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    entries: Vec<(Box<str>, Box<str>)>,
}

impl Headers {
    /// No headers.
    #[must_use]
    pub const fn new() -> Self {
        Self { entries: Vec::new() }
    }

    /// Sets the value of `name`, and replaces an earlier one. Names are case-sensitive.
    pub fn insert(&mut self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) {
        let (name, value) = (name.into(), value.into());
        match self.entries.iter_mut().find(|(other, _)| *other == name) {
            Some(entry) => entry.1 = value,
            None => self.entries.push((name, value)),
        }
    }

    /// The value of `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.entries.iter().find(|(other, _)| **other == *name).map(|(_, value)| &**value)
    }

    /// All headers, in the order of their insertion.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(name, value)| (&**name, &**value))
    }

    /// The number of headers.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no headers.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The size of the names and values in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.iter().map(|(name, value)| name.len() + value.len()).sum()
    }
}
