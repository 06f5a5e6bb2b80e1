use std::error::Error;
use std::fmt;

use super::error::{LockError, Lost};
use super::grant::Grant;

/// Why a body did not run under its lock from start to end.
///
/// If you do not need the output, `?` turns this into a [`LockError`].
#[non_exhaustive]
pub enum RunError<T> {
    /// The body did not start, or was cancelled because its lease was [lost](LockError::Lost).
    Lock(LockError),
    /// The body has ended, but the store no longer had the lease when it was released. Another client may have held the lock while
    /// the body ran.
    Unprotected {
        /// How the lease was lost.
        lost: Lost,
        /// The output of the body.
        output: T,
    },
}

impl<T> RunError<T> {
    /// Whether another holder has the lock, so that the body did not start.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Self::Lock(error) if error.is_busy())
    }

    /// Whether the lease was lost, before or after the end of the body.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        match self {
            Self::Lock(error) => error.is_lost(),
            Self::Unprotected { .. } => true,
        }
    }

    /// The output of the body, if it has ended.
    #[must_use]
    pub fn into_output(self) -> Option<T> {
        match self {
            Self::Lock(_) => None,
            Self::Unprotected { output, .. } => Some(output),
        }
    }
}

/// The result of a body after the release of its leases. A failed release is no error, since it is retried in the background.
pub(super) fn run_result<'a, T>(output: T, grants: impl IntoIterator<Item = &'a Grant>) -> Result<T, RunError<T>> {
    let lost = |grant: &Grant| Some(Lost::new(*grant.lock(), grant.recorded_loss()?));
    match grants.into_iter().find_map(lost) {
        Some(lost) => Err(RunError::Unprotected { lost, output }),
        None => Ok(output),
    }
}

impl<T> From<LockError> for RunError<T> {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl<T> From<RunError<T>> for LockError {
    /// The error without the output.
    fn from(error: RunError<T>) -> Self {
        match error {
            RunError::Lock(error) => error,
            RunError::Unprotected { lost, .. } => lost.into(),
        }
    }
}

// By hand: the output need not be `Debug`.
impl<T> fmt::Debug for RunError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lock(error) => f.debug_tuple("Lock").field(error).finish(),
            Self::Unprotected { lost, .. } => f.debug_struct("Unprotected").field("lost", lost).finish_non_exhaustive(),
        }
    }
}

impl<T> fmt::Display for RunError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lock(error) => fmt::Display::fmt(error, f),
            Self::Unprotected { lost, .. } => fmt::Display::fmt(lost, f),
        }
    }
}

impl<T> Error for RunError<T> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Lock(error) => error.source(),
            Self::Unprotected { lost, .. } => lost.source(),
        }
    }
}
