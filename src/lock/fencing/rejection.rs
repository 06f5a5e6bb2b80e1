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
    /// The request has no fence that a store can grant.
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
    largest: u64,
}

impl StaleFence {
    pub(super) const fn new(fence: u64, largest: u64) -> Self {
        Self { fence, largest }
    }

    /// The fence of the request.
    #[must_use]
    pub const fn fence(&self) -> u64 {
        self.fence
    }

    /// The smallest admitted fence: the largest one for this key, or the largest forgotten one.
    #[must_use]
    pub const fn largest(&self) -> u64 {
        self.largest
    }
}

impl fmt::Display for StaleFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the fence {} is too old: {} was seen before", self.fence, self.largest)
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
