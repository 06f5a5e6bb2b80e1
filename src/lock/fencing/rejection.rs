use std::error::Error;
use std::fmt;

use crate::error::BoxError;
use crate::lock::MissingKey;

/// Why a [`FenceLayer`](super::FenceLayer) rejected a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// A request with a larger fence came before.
    Stale(StaleFence),
    /// The request has no key.
    MissingKey(MissingKey),
    /// The request has no fence, or one that no store grants, such as 0.
    MissingFence(MissingFence),
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale(error) => fmt::Display::fmt(error, f),
            Self::MissingKey(error) => fmt::Display::fmt(error, f),
            Self::MissingFence(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl From<Rejection> for BoxError {
    /// The error inside: [`StaleFence`], [`MissingKey`] or [`MissingFence`], for downcasting.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Stale(error) => error.into(),
            Rejection::MissingKey(error) => error.into(),
            Rejection::MissingFence(error) => error.into(),
        }
    }
}

/// The request of a late lock holder: another holder had the lock since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleFence {
    fence: u64,
    min: u64,
}

impl StaleFence {
    pub(super) const fn new(fence: u64, min: u64) -> Self {
        Self { fence, min }
    }

    /// The fence of the request.
    #[must_use]
    pub const fn fence(&self) -> u64 {
        self.fence
    }

    /// The smallest fence that was admitted: the largest fence that was seen for this key. For a key that was evicted, the largest fence
    /// of all evicted keys.
    #[must_use]
    pub const fn min(&self) -> u64 {
        self.min
    }
}

impl fmt::Display for StaleFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the fence {} is too old: fences from {} on are admitted", self.fence, self.min)
    }
}

impl Error for StaleFence {}

/// The rejection of a request without a valid fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingFence;

impl fmt::Display for MissingFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no fence of a lock")
    }
}

impl Error for MissingFence {}
