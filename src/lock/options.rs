//! How a lock is acquired and held.

use std::time::Duration;

use super::kind::LockKind;
use super::store::Replicas;

/// How a lock is acquired and held.
#[derive(Clone, Copy, Debug)]
pub(super) struct AcquireOptions {
    pub(super) ttl: Duration,
    pub(super) wait: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) max_waiters: usize,
    pub(super) max_total_waiters: usize,
    pub(super) deadline: Duration,
    pub(super) kind: LockKind,
    pub(super) permits: u32,
    pub(super) is_fair: bool,
    pub(super) is_shared: bool,
    pub(super) requests_release: bool,
    /// Whether waiters give up while the circuit is open.
    pub(super) fails_if_circuit_opens: bool,
    pub(super) replication: Replication,
}

impl AcquireOptions {
    /// The replication that a claim requires.
    pub(super) fn replicas(&self) -> Replicas {
        match self.replication {
            Replication::Primary => Replicas::default(),
            Replication::Require(count) => Replicas { count, within: self.deadline / 2 },
        }
    }

    /// The longest duration of a store call.
    pub(super) fn call_timeout(&self) -> Duration {
        self.replicas().call_timeout(self.deadline)
    }

    /// The same if it waits for replicas, otherwise zero.
    pub(super) fn replication_timeout(&self) -> Duration {
        if self.replication.count() == 0 { Duration::ZERO } else { self.call_timeout() }
    }
}

/// Where a lease must be stored before it counts. Defaults to [`Primary`](Self::Primary).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Replication {
    /// The called server. A failover forgets leases that its replicas do not have yet.
    #[default]
    Primary,
    /// This many replicas of that server as well: see [`Locks::replication`](super::Locks::replication).
    Require(u32),
}

impl Replication {
    pub(super) const fn count(self) -> u32 {
        match self {
            Self::Primary => 0,
            Self::Require(count) => count,
        }
    }
}
