//! Which processes share a store.

use std::fmt;

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

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "one process",
            Self::Redis => "all processes on one Redis",
            Self::Quorum => "all processes on the same stores",
        })
    }
}
