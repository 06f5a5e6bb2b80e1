//! What operators see of locks.

use std::time::Duration;

use super::kind::LockKind;
use super::lock_key::LockKey;
use crate::store::cursor::Cursor;

/// The state of a lock, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockStatus {
    /// The lock.
    pub lock: LockKey,
    /// The largest fence so far. 0 if none is remembered.
    pub last_fence: u64,
    /// The kind of the lock. `None` if it is free.
    pub kind: Option<LockKind>,
    /// Number of holders: one, except for semaphores and readers.
    pub holder_count: usize,
    /// The first [`MAX_HOLDERS`](Self::MAX_HOLDERS) holders.
    pub holders: Vec<LockHolder>,
}

impl LockStatus {
    /// Maximum number of listed holders.
    pub const MAX_HOLDERS: usize = 100;

    /// For stores: a free lock without a remembered fence.
    #[must_use]
    pub const fn new(lock: LockKey) -> Self {
        Self { lock, last_fence: 0, kind: None, holder_count: 0, holders: Vec::new() }
    }

    /// Whether the lock is held.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        self.holder_count > 0
    }
}

/// A holder of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockHolder {
    /// The first fence of the lease. After handoffs within a process, the current one may be larger.
    pub fence: u64,
    /// The time until the lease ends, unless it is renewed.
    pub remaining: Duration,
    /// How long the lease has been held, handoffs included. Wrong if the clock of the store was set meanwhile.
    pub held_for: Duration,
    /// Its [name](crate::Locks::holder), if it has one.
    pub name: Option<String>,
}

impl LockHolder {
    /// For stores: a holder without a name.
    #[must_use]
    pub const fn new(fence: u64, remaining: Duration, held_for: Duration) -> Self {
        Self { fence, remaining, held_for, name: None }
    }
}

/// The outcome of a forced release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForceReleased {
    /// Number of holders before the release.
    pub holders: usize,
    /// All later fences of this lock are larger than this one. So the protected data may refuse this fence and smaller ones from now on.
    /// A process that hands its lease over locally may use such fences until it learns that the lease is lost.
    pub fence: u64,
}

impl ForceReleased {
    /// For stores: the number of holders, and a fence below all later ones.
    #[must_use]
    pub const fn new(holders: usize, fence: u64) -> Self {
        Self { holders, fence }
    }
}

/// A page of a [list](super::LockAdmin::list).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockPage {
    /// Held locks. A page may be empty although more follow.
    pub locks: Vec<LockStatus>,
    /// The next cursor; `None` at the end.
    pub next: Option<Cursor>,
}

impl LockPage {
    /// For stores: these locks, and the next cursor; `None` at the end.
    #[must_use]
    pub const fn new(locks: Vec<LockStatus>, next: Option<Cursor>) -> Self {
        Self { locks, next }
    }
}
