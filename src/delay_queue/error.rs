use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::error::{ConfigError, StoreError};

/// Why an operation on a queue failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum QueueError {
    /// The store failed. The operation may still have taken effect. You can push a kept [clone](super::Push) of a push again: while the job
    /// waits or runs, no second one is added. If the job is done by then, it runs a second time, unless it is
    /// [unique for a time](super::Push::unique_for): `.unique_for(key, UniqueFor::Time(..))`.
    Store(StoreError),
    /// The queue, or the partition of the job, has its largest number of jobs, dead ones included. Try again later: jobs may be done, a
    /// worker may remove dead jobs beyond the [limit](super::DelayQueue::keep_dead), or an operator may [forget](super::DelayQueue::forget)
    /// some.
    Full {
        /// The largest number of jobs.
        max: u64,
    },
    /// The payload and the headers are larger than this queue allows.
    TooLarge {
        /// Their size in bytes.
        bytes: usize,
        /// The largest size in bytes.
        max: usize,
    },
    /// The payload cannot be encoded: the error of the [codec](super::Codec), shared by clones of the [push](super::Push).
    Encode(Arc<dyn Error + Send + Sync>),
    /// A setting is invalid. No store call was made.
    Config(ConfigError),
}

impl QueueError {
    /// Whether the queue has its largest number of jobs.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether the job is too large.
    #[must_use]
    pub const fn is_too_large(&self) -> bool {
        matches!(self, Self::TooLarge { .. })
    }
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => fmt::Display::fmt(error, f),
            Self::Full { max } => write!(
                f,
                "the queue is full: it, or the partition of the job, has {max} jobs, dead ones included; raise `max_jobs` or forget dead jobs"
            ),
            Self::TooLarge { bytes, max } => {
                write!(f, "the job is too large: {bytes} bytes, and the limit is {max} bytes")
            }
            Self::Encode(_) => f.write_str("the payload cannot be encoded"),
            Self::Config(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl Error for QueueError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Store(error) => error.source(),
            Self::Config(error) => error.source(),
            Self::Encode(error) => Some(&**error),
            Self::Full { .. } | Self::TooLarge { .. } => None,
        }
    }
}

impl From<StoreError> for QueueError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<ConfigError> for QueueError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}
