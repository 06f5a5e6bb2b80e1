use std::error::Error;
use std::fmt;

use crate::error::BoxError;
use crate::lock::MissingKey;

/// Why a request was turned away by a [`FenceLayer`](super::FenceLayer).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// Somebody came with a larger fence before.
    Stale(StaleFence),
    /// The request has no key.
    Missing(MissingKey),
    /// The request has no fence that a store could have granted.
    MissingFence(MissingFence),
}

impl From<Rejection> for BoxError {
    /// The error inside: [`StaleFence`], [`MissingKey`] or [`MissingFence`], to be found by downcasting.
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Stale(error) => error.into(),
            Rejection::Missing(error) => error.into(),
            Rejection::MissingFence(error) => error.into(),
        }
    }
}

/// The holder of a lock came too late: somebody else had it since.
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

    /// What the fence must not be smaller than: the largest that was seen for this key, or that was forgotten.
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

/// The rejection of a request that has no fence, or one that no store grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingFence;

impl fmt::Display for MissingFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no fence of a lock")
    }
}

impl Error for MissingFence {}
