use std::error::Error;
use std::fmt;

use super::error::{LockError, Lost};
use super::grant::Grant;
use super::lease::ReleaseOutcome;
use crate::error::StoreError;

/// Why a body was not under its lock from its beginning to its end.
///
/// A function that has no use for the output turns it into a [`LockError`] with `?`.
#[non_exhaustive]
pub enum RunError<T> {
    /// The body has not begun, or it was cancelled since its lease was [lost](LockError::Lost).
    Lock(LockError),
    /// The body has ended. When its lease was given back, the store did not know it any more: somebody else may have had the lock while the body
    /// ran.
    Unprotected {
        /// How the lease was lost.
        lost: Lost,
        /// What the body has returned.
        output: T,
    },
}

impl<T> RunError<T> {
    /// Whether somebody else holds the lock, so that the body has not begun.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Self::Lock(error) if error.is_busy())
    }

    /// Whether the lease was lost, before the body had ended or after.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        match self {
            Self::Lock(error) => error.is_lost(),
            Self::Unprotected { .. } => true,
        }
    }

    /// What the body has returned, if it has come to its end.
    #[must_use]
    pub fn into_output(self) -> Option<T> {
        match self {
            Self::Lock(_) => None,
            Self::Unprotected { output, .. } => Some(output),
        }
    }
}

/// What comes of a body that has ended, once the store has said what became of its leases.
pub(super) fn ended<'a, T>(
    output: T,
    release: Result<ReleaseOutcome, StoreError>,
    holds: impl IntoIterator<Item = &'a Grant>,
) -> Result<T, RunError<T>> {
    if !matches!(release, Ok(ReleaseOutcome::Lost)) {
        return Ok(output);
    }
    let lost = |hold: &Grant| Some(Lost::new(*hold.lock(), hold.noted_loss()?));
    match holds.into_iter().find_map(lost) {
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
    /// Without the output.
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
