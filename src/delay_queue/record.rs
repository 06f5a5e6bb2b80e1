use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::id::JobId;
use super::store::{MAX_NOTE, State};
use crate::key::Key;

/// When a job is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Due {
    /// So long from now, by the store's clock. At most [`Due::MAX_DELAY`].
    In(Duration),
    /// At this instant, by the store's clock; at once if that is over.
    ///
    /// The memory backend reads the date when it is made, and goes by what has passed since. Where the machine was suspended after that, or its clock was set, an
    /// instant is what it is by the clock of the machine when the store is told. So what waits while that happens is late by as long as the machine
    /// was suspended, or by as much as the clock was set forward, and early by as much as it was set back.
    At(SystemTime),
}

impl Due {
    /// The longest delay there is: 3,660 days.
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

/// Which of the jobs that are due are taken first. As long as there is one of a higher priority, none of a lower one is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Priority {
    /// Before all others.
    High,
    /// What a job has that is not told otherwise.
    #[default]
    Normal,
    /// After all others.
    Low,
}

impl Priority {
    /// All there are, the highest first.
    pub const ALL: &[Self] = &[Self::High, Self::Normal, Self::Low];
}

/// What keeps a job from being pushed a second time, under whatever id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unique {
    /// What is unique. Of one queue, or of one part of it where it is [split](super::DelayQueue::split).
    pub key: Key,
    /// For how long.
    pub span: UniqueFor,
}

/// How long a job keeps others with the same unique key out. A dead one keeps nobody out, but for a time that was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UniqueFor {
    /// Until it is done, [cancelled](super::DelayQueue::cancel), [purged](super::DelayQueue::purge) or dead; and again when it is [replayed](super::DelayQueue::replay).
    WaitingOrRunning,
    /// Until it is claimed for the first time. Not again after that, whether it is snoozed, tried again or replayed.
    Waiting,
    /// For so long after it was pushed, at most [`Due::MAX_DELAY`], also if it is done or dead before. [`cancel`](super::DelayQueue::cancel),
    /// [`Outcome::cancel`](super::Outcome::cancel), [`purge`](super::DelayQueue::purge), [`forget`](super::DelayQueue::forget) and
    /// [`release_unique`](super::DelayQueue::release_unique) end the time. A dead job that is removed for want of room, or for its age, does not end it.
    /// A key whose time is over keeps nobody out, but takes room
    /// until it is removed: each later push removes up to two of them, and in memory, where they take room from all queues, more if there is none left.
    /// So do claims there.
    Time(Duration),
    /// As [`Time`](Self::Time), but only [`release_unique`](super::DelayQueue::release_unique) ends the time. The jobs of `Recurring` use it, so that a cancelled occurrence is not pushed again.
    Occurrence(Duration),
}

/// A job to be pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewJob {
    /// What it is called.
    pub id: JobId,
    /// When it is due.
    pub due: Due,
    /// Which jobs go first.
    pub priority: Priority,
    /// How many attempts it has, at least 1.
    pub max_attempts: u16,
    /// What keeps it from being pushed twice.
    pub unique: Option<Unique>,
    /// What travels with it.
    pub headers: Headers,
    /// What it is about; the store does not look into it.
    pub payload: Arc<[u8]>,
}

impl NewJob {
    /// A job that is due at once, of the usual priority, with 20 attempts.
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

    /// How many attempts a job has that is not told otherwise.
    pub const DEFAULT_ATTEMPTS: u16 = 20;

    /// How many bytes of it the caller decides on.
    #[must_use]
    pub fn size(&self) -> usize {
        self.payload.len() + self.headers.size()
    }
}

/// A job as a store keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredJob {
    /// What it is called.
    pub id: JobId,
    /// Which state it is in.
    pub state: State,
    /// How many attempts were made, the one that is running included.
    pub attempt: u16,
    /// How many attempts it has.
    pub max_attempts: u16,
    /// Which jobs go first.
    pub priority: Priority,
    /// When it was pushed, by the store's clock.
    pub enqueued_at: SystemTime,
    /// When it is due, or was before it was claimed, by the store's clock. While a job is snoozed: when the snooze ends. Snoozing does not change when
    /// a job is due.
    pub due_at: SystemTime,
    /// What keeps it from being pushed twice.
    pub unique: Option<Unique>,
    /// Why the last attempt has failed, and why it is dead.
    pub note: Option<FailureInfo>,
    /// What travels with it.
    pub headers: Headers,
    /// What it is about.
    pub payload: Arc<[u8]>,
}

impl StoredJob {
    /// For stores: a job that was just pushed. It waits, and no attempt was made; the times are those of the store's clock.
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
            note: None,
            headers: job.headers.clone(),
            payload: Arc::clone(&job.payload),
        }
    }
}

/// Why an attempt has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailureInfo {
    /// What kind of failure it was.
    pub reason: Reason,
    /// The beginning of what there was to say.
    pub error: Arc<str>,
}

impl FailureInfo {
    /// For stores: why an attempt has failed, with the first [`MAX_NOTE`] bytes of `error`.
    #[must_use]
    pub fn new(reason: Reason, error: &str) -> Self {
        Self { reason, error: Self::cut(error).into() }
    }

    /// The beginning of an error, as much as is kept.
    pub(crate) fn cut(error: &str) -> &str {
        let end = (0..=error.len().min(MAX_NOTE)).rev().find(|&end| error.is_char_boundary(end));
        &error[..end.unwrap_or_default()]
    }
}

/// What ended an attempt, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The service failed.
    Failed,
    /// The lease ended without a word: the worker has died, stood still, or was cut off. All attempts ending so is a crash loop.
    LeaseExpired,
    /// The service said that it is not worth trying again.
    Refused,
    /// The payload is not what the worker expects.
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

/// What travels with a job beside its payload, for instance the `traceparent` of who pushed it: a few names, each with a text.
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

    /// Says what `name` stands for, in the place of what was said before. Names are told apart by case.
    pub fn insert(&mut self, name: impl Into<Box<str>>, value: impl Into<Box<str>>) {
        let (name, value) = (name.into(), value.into());
        match self.entries.iter_mut().find(|(other, _)| *other == name) {
            Some(entry) => entry.1 = value,
            None => self.entries.push((name, value)),
        }
    }

    /// What `name` stands for.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.entries.iter().find(|(other, _)| **other == *name).map(|(_, value)| &**value)
    }

    /// All of them, in the order in which they were said.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(name, value)| (&**name, &**value))
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many bytes they take.
    #[must_use]
    pub fn size(&self) -> usize {
        self.iter().map(|(name, value)| name.len() + value.len()).sum()
    }
}
