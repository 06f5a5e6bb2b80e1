use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::BoxError;

/// Why there is no response. All callers that waited for one call get a clone of the same error.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SingleFlightError {
    /// The inner service failed. Its error is the [source](Error::source).
    Service(Arc<dyn Error + Send + Sync>),
    /// The call took longer than [`call_timeout`](super::SingleFlightLayer::call_timeout).
    TimedOut {
        /// That time.
        after: Duration,
    },
    /// The inner service panicked, or the runtime is shutting down.
    Aborted,
}

impl SingleFlightError {
    pub(super) fn service(error: impl Into<BoxError>) -> Self {
        Self::Service(error.into().into())
    }
}

impl fmt::Display for SingleFlightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(_) => f.write_str("the shared call failed"),
            Self::TimedOut { after } => write!(f, "the shared call did not respond within {after:?}"),
            Self::Aborted => f.write_str("the shared call panicked, or the runtime is shutting down"),
        }
    }
}

impl Error for SingleFlightError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Service(error) => Some(&**error),
            Self::TimedOut { .. } | Self::Aborted => None,
        }
    }
}
