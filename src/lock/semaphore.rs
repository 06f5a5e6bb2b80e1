use std::sync::Arc;
use std::time::Duration;

use super::kind::LockKind;
use super::locks::{LockRequest, Locks};
use super::locks_state::LocksState;
use super::options::Replication;
use super::store::LockStore;
use crate::error::ConfigError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;

/// A semaphore for each key, which limits the number of holders. Each permit is a [`Lease`](super::Lease), so it expires if its holder
/// dies.
///
/// ```
/// use tollgate::{MemoryBackend, lock::Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let exports = Semaphore::new(MemoryBackend::new(), "exports", 2);
///
/// let (one, other) = (exports.acquire("acme").await?, exports.acquire("acme").await?);
/// assert!(exports.try_acquire("acme").await.is_err_and(|error| error.is_busy()));
/// assert!(exports.try_acquire("globex").await.is_ok());
///
/// one.release().await?;
/// assert!(exports.try_acquire("acme").await.is_ok());
/// # drop(other);
/// # Ok(())
/// # }
/// ```
///
/// A permit is renewed, lost and released like a lock, and the notes of [`Locks`] on waiting and dropping apply. Waiters of one
/// process are served in order. During a rolling deploy, processes may disagree about the number of permits: each admits its own
/// number.
#[derive(Clone, Debug)]
pub struct Semaphore {
    pub(super) locks: Locks,
}

impl Semaphore {
    /// Creates semaphores in `store`, which is a backend. Each key has `permits` permits, from 1 to 1,000. Other numbers are a
    /// [`LockError::Config`](super::LockError::Config) when a permit is requested. `name` separates these permits from other locks with the
    /// same keys: see [`Locks::new`].
    pub fn new(store: impl LockStore + Send + Sync + 'static, name: impl Into<Key>, permits: u32) -> Self {
        let shared = LocksState::new(Arc::new(store), name.into(), true);
        Self { locks: Locks::with(shared, LockKind::Semaphore, permits) }
    }

    fn with(self, change: impl FnOnce(Locks) -> Locks) -> Self {
        Self { locks: change(self.locks) }
    }

    /// How long a permit outlives a dead holder: see [`Locks::ttl`]. Defaults to 30 s.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|locks| locks.ttl(ttl))
    }

    /// How long to wait for a permit: see [`Locks::wait`]. Defaults to 10 s.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|locks| locks.wait(wait))
    }

    /// How long a permit is renewed at most: see [`Locks::max_hold`]. Defaults to no limit.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|locks| locks.max_hold(max_hold))
    }

    /// Asks all holders of permits to release theirs, while a caller waits for one: see [`Locks::request_release`]. Off by
    /// default.
    #[must_use]
    pub fn request_release(self) -> Self {
        self.with(Locks::request_release)
    }

    /// How many callers may wait for one key in this process: see [`Locks::max_waiters`]. Defaults to 1,000.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters(waiters))
    }

    /// How many callers may wait for permits in this process, over all keys: see [`Locks::max_waiters_in_total`]. Defaults to
    /// 100,000.
    #[must_use]
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters_in_total(waiters))
    }

    /// When to stop calling a failing store: see [`Locks::circuit_breaker`]. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|locks| locks.circuit_breaker(breaker))
    }

    /// The name of the holders for [`LockAdmin`](super::LockAdmin): see [`Locks::holder`]. Defaults to no name.
    #[must_use]
    pub fn holder(self, name: impl AsRef<str>) -> Self {
        self.with(|locks| locks.holder(name))
    }

    /// Where a lease must be stored before it counts: see [`Locks::replication`]. Defaults to [`Replication::Primary`].
    #[must_use]
    pub fn replication(self, replication: Replication) -> Self {
        self.with(|locks| locks.replication(replication))
    }

    /// The longest duration of a store call: see [`Locks::deadline`]. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|locks| locks.deadline(deadline))
    }

    /// Acquires a permit of `key`, and waits if none is free.
    pub fn acquire(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.lock(key)
    }

    /// Acquires a permit of `key`, or returns at once that none is free.
    pub fn try_acquire(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.try_lock(key)
    }

    /// The reach of the permits: see [`Locks::reach`].
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.locks.reach()
    }

    /// Checks that the permits reach far enough: see [`Locks::require`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if they reach less far than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        Ok(Self { locks: self.locks.require(needed)? })
    }

    /// Grants no more permits, and waits until every permit is released: see [`Locks::shutdown`].
    pub async fn shutdown(&self) {
        self.locks.shutdown().await;
    }
}
