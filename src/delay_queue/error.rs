use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::error::{ConfigError, StoreError};

/// Why a job was not pushed, or not found, changed or finished.
#[derive(Debug)]
#[non_exhaustive]
pub enum QueueError {
    /// The store failed. What was asked may still have happened; a [clone](super::Push) of a push that was kept can be pushed again, and
    /// there is one while it waits or runs. One that is done by then runs a second time, unless it is
    /// [unique for a time](super::Push::unique_for): `.unique_for(key, UniqueFor::Time(..))`.
    Store(StoreError),
    /// The queue has as many jobs as it may have, dead ones included. It is worth trying again later: when others are done, a worker has claimed
    /// and let go of dead ones that are [too many](super::DelayQueue::keep_dead), or somebody [forgets](super::DelayQueue::forget) some.
    Full {
        /// How many that is.
        max: u64,
    },
    /// The payload and the headers are larger than a job of this queue may be.
    TooLarge {
        /// How many bytes they have.
        bytes: usize,
        /// How many they may have.
        max: usize,
    },
    /// The payload cannot be encoded: what the [codec](super::Codec) has failed with, which clones of the [push](super::Push) share.
    Encode(Arc<dyn Error + Send + Sync>),
    /// A setting cannot work; nothing was asked of the store.
    Config(ConfigError),
}

impl QueueError {
    /// Whether the queue has as many jobs as it may have.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether the job is larger than it may be.
    #[must_use]
    pub const fn is_too_large(&self) -> bool {
        matches!(self, Self::TooLarge { .. })
    }
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => fmt::Display::fmt(error, f),
            Self::Full { max } => write!(f, "the queue has {max} jobs, dead ones included, and no room for more"),
            Self::TooLarge { bytes, max } => write!(f, "a job of {bytes} bytes is larger than {max}"),
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
