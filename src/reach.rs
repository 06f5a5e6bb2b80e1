//! Which processes share a store.

use std::fmt;

use crate::error::ConfigError;

/// The processes among which leases exclude each other, quotas are shared, operations run once and queues are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reach {
    /// This process only.
    Process,
    /// All processes with the same Redis primary.
    Redis,
    /// All processes with the same independent stores, by majority: see [`Redlock`](crate::lock::Redlock).
    Quorum,
}

impl Reach {
    /// An error if this is less than `needed`.
    pub(crate) fn require(self, needed: Self) -> Result<(), ConfigError> {
        if self < needed { Err(ConfigError::ReachTooSmall { needed, has: self }) } else { Ok(()) }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "one process",
            Self::Redis => "all processes on one Redis",
            Self::Quorum => "all processes on the same stores",
        })
    }
}
