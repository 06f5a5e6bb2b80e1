use std::error::Error;
use std::fmt;

use crate::error::{BoxError, StoreError};

/// Why a filter was not built. Usually the previous filter is still in use: see [`Lost`](Self::Lost) and [`Store`](Self::Store).
#[derive(Debug)]
#[non_exhaustive]
pub enum ExistsFilterError {
    /// The capacity is zero.
    ZeroCapacity,
    /// The error rate is out of range, or not a number.
    ErrorRateOutOfRange {
        /// The given rate.
        error_rate: f64,
        /// The smallest rate.
        min: f64,
        /// The largest rate.
        max: f64,
    },
    /// With this capacity and error rate, the filter is larger than 32 MiB. Split the keys over several filters.
    TooLarge {
        /// The bytes that the filter needs.
        bytes: u64,
        /// The most bytes that a filter may have.
        max: u64,
    },
    /// The stream of keys failed. The error is its [source](Error::source).
    Keys(BoxError),
    /// Another rebuild of this filter began later, or ended first.
    Superseded,
    /// The store has lost the new version, for instance by an eviction. If the ids of the versions are lost too, no filter is in use.
    Lost,
    /// The store failed. If the last call failed, the new version may be in use.
    Store(StoreError),
}

impl fmt::Display for ExistsFilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroCapacity => f.write_str("an exists filter needs a capacity of at least 1 key"),
            Self::ErrorRateOutOfRange { error_rate, min, max } => {
                write!(f, "an error rate of {error_rate} is not between {min} and {max}")
            }
            Self::TooLarge { bytes, max } => write!(
                f,
                "the exists filter needs {bytes} bytes, and the limit is {max} bytes; split the keys over several filters"
            ),
            Self::Keys(_) => f.write_str("the stream of keys failed, so the exists filter is not replaced"),
            Self::Superseded => f.write_str("another rebuild of the exists filter began later"),
            Self::Lost => f.write_str(
                "the store lost the new version of the exists filter while it was built; check its eviction policy",
            ),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl Error for ExistsFilterError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Keys(error) => Some(&**error),
            Self::Store(error) => error.source(),
            Self::ZeroCapacity
            | Self::ErrorRateOutOfRange { .. }
            | Self::TooLarge { .. }
            | Self::Superseded
            | Self::Lost => None,
        }
    }
}

impl From<StoreError> for ExistsFilterError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
