use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::error::BoxError;

/// Why there is no response. All callers that waited for one call get a clone of the same error.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum SingleFlightError {
    /// The inner service failed. Its error is the [source](Error::source).
    Service(Arc<dyn Error + Send + Sync>),
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
        f.write_str(match self {
            Self::Service(_) => "the shared call failed",
            Self::Aborted => "the shared call panicked, or the runtime is shutting down",
        })
    }
}

impl Error for SingleFlightError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Service(error) => Some(&**error),
            Self::Aborted => None,
        }
    }
}
