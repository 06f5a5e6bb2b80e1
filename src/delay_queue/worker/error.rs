//! Why a worker ended early.

use std::error::Error;
use std::fmt;

use crate::error::{BoxError, ConfigError, StoreError};

/// Why a worker ended early.
#[derive(Debug)]
#[non_exhaustive]
pub enum WorkerError {
    /// `poll_ready` of the service failed or panicked, so the service will never be ready again. Running jobs had the grace period of a
    /// shutdown.
    Service(BoxError),
    /// A setting is invalid. No store call was made.
    Config(ConfigError),
    /// The system has no random numbers for the worker's id.
    Store(StoreError),
}

impl fmt::Display for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(_) => f.write_str("the service of the worker failed in `poll_ready`"),
            Self::Config(error) => fmt::Display::fmt(error, f),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl Error for WorkerError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Service(error) => Some(&**error),
            Self::Config(error) => error.source(),
            Self::Store(error) => error.source(),
        }
    }
}
