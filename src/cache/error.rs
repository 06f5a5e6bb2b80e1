use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{BoxError, ConfigError, StoreError};

/// Why a call of the cache failed. All callers that waited for one load get a clone of the same error.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CacheError {
    /// The loader failed. The error is its [source](Error::source).
    Load(Arc<dyn Error + Send + Sync>),
    /// A load has just failed, maybe in another process, so the origin is not called again yet.
    RecentlyFailed {
        /// The time until the next load may begin.
        retry_after: Duration,
    },
    /// The loader panicked.
    Panicked,
    /// The loader of this process, or of another one, took longer than [`load_timeout`](super::Cache::load_timeout).
    TimedOut {
        /// The value of `load_timeout`.
        after: Duration,
    },
    /// The loader asked the cache for the key that it loads, or for another key of its batch. It would wait for itself.
    Recursive,
    /// The store failed, and this process already runs [`origin_limit`](super::Cache::origin_limit) loads without the store.
    OriginLimit {
        /// The failure of the store.
        store: StoreError,
    },
    /// The store failed, and the call cannot continue without the store.
    Store(StoreError),
    /// The value cannot be encoded: the error of the [codec](crate::Codec).
    Encode(Arc<dyn Error + Send + Sync>),
    /// The encoded value is larger than [`max_len`](super::Cache::max_len).
    TooLarge {
        /// Its size in bytes.
        bytes: usize,
        /// The largest size in bytes.
        max: usize,
    },
    /// The backend is shut down, so nothing is loaded any more.
    Closed,
    /// A setting is invalid. No store call was made.
    Config(ConfigError),
}

impl CacheError {
    pub(super) fn load(error: BoxError) -> Self {
        Self::Load(error.into())
    }
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(_) => f.write_str("the loader failed"),
            Self::RecentlyFailed { retry_after } => {
                write!(f, "a load failed recently; the next one may begin in {retry_after:?}")
            }
            Self::Panicked => f.write_str("the loader panicked"),
            Self::TimedOut { after } => write!(f, "no value was loaded within {after:?}"),
            Self::Recursive => f.write_str("the loader asked the cache for a key that it loads"),
            Self::OriginLimit { store } => {
                write!(f, "{store}, and the largest number of loads without the store is running")
            }
            Self::Store(error) => fmt::Display::fmt(error, f),
            Self::Encode(_) => f.write_str("the value cannot be encoded"),
            Self::TooLarge { bytes, max } => {
                write!(f, "the value is too large: {bytes} bytes, and the limit is {max} bytes")
            }
            Self::Closed => f.write_str("the backend is shut down"),
            Self::Config(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl Error for CacheError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Load(error) | Self::Encode(error) => Some(&**error),
            Self::Store(error) | Self::OriginLimit { store: error } => error.source(),
            Self::Config(error) => error.source(),
            Self::RecentlyFailed { .. }
            | Self::Panicked
            | Self::TimedOut { .. }
            | Self::Recursive
            | Self::TooLarge { .. }
            | Self::Closed => None,
        }
    }
}

impl From<StoreError> for CacheError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<ConfigError> for CacheError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}
