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

/// Locks by key that many readers hold together, or one writer alone.
///
/// ```
/// use tollgate::{MemoryBackend, lock::RwLocks};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let pages = RwLocks::new(MemoryBackend::new(), "pages");
///
/// let (one, other) = (pages.read("home").await?, pages.read("home").await?);
/// assert!(pages.try_write("home").await.is_err_and(|error| error.is_busy()));
/// one.release().await?;
/// other.release().await?;
///
/// let writer = pages.write("home").await?;
/// assert!(pages.try_read("home").await.is_err_and(|error| error.is_busy()));
/// let fence = writer.fence(); // for what is being written, to refuse a smaller one
/// # assert!(fence > 0);
/// # Ok(())
/// # }
/// ```
///
/// Each reader has its own [`Lease`](super::Lease), which is renewed, lost and released like that of a lock. A dead reader
/// blocks writers until its own lease ends. Up to 1,000 readers share a key.
///
/// Requests are served first come, first served, across all processes. Readers behind a waiting writer wait for it, so writers
/// do not starve. Later writers wait behind these readers, so readers do not starve either. See [fair locks](Locks::fair) for
/// the cost. A reader that requests the same key again waits for the waiting writer: use
/// [`Lease::reenter`](super::Lease::reenter) instead.
///
/// Fences rise with each grant, of readers and writers. The notes of [`Locks`] on waiting, dropping and shutdown apply.
#[derive(Clone, Debug)]
pub struct RwLocks {
    pub(super) locks: Locks,
}

impl RwLocks {
    /// Locks in `store`, which is a backend. `name` separates them from other locks with the same keys: see [`Locks::new`].
    pub fn new(store: impl LockStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        let shared = LocksState::new(Arc::new(store), name.into(), false);
        Self { locks: Locks::with(shared, LockKind::ReadWrite, 1).fair() }
    }

    fn with(self, change: impl FnOnce(Locks) -> Locks) -> Self {
        Self { locks: change(self.locks) }
    }

    /// How long a lease outlives a dead holder: see [`Locks::ttl`]. Defaults to 30 s.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|locks| locks.ttl(ttl))
    }

    /// How long to wait for a lease: see [`Locks::wait`]. Defaults to 10 s.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|locks| locks.wait(wait))
    }

    /// How long a lease is renewed at most: see [`Locks::max_hold`]. Defaults to no limit.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|locks| locks.max_hold(max_hold))
    }

    /// Asks all holders to release their leases while a caller waits: see [`Locks::request_release`]. Off by default.
    #[must_use]
    pub fn request_release(self) -> Self {
        self.with(Locks::request_release)
    }

    /// How many callers may wait for one key in this process: see [`Locks::max_waiters`]. Defaults to 1,000.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters(waiters))
    }

    /// How many callers may wait for leases in this process, over all keys: see [`Locks::max_waiters_in_total`]. Defaults to
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

    /// Acquires a lease of `key` together with other readers. Waits while a writer has the lease, and for writers that requested it before.
    pub fn read(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.lock(key).shared()
    }

    /// Acquires a lease of `key` together with other readers, or returns at once that a writer has it or waits for it.
    pub fn try_read(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.try_lock(key).shared()
    }

    /// Acquires the lease of `key` alone. Waits while other holders have it, and for callers that requested it before.
    pub fn write(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.lock(key)
    }

    /// Acquires the lease of `key` alone, or returns at once that others have it or wait for it.
    pub fn try_write(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.try_lock(key)
    }

    /// The reach of the locks: see [`Locks::reach`].
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.locks.reach()
    }

    /// Checks that the locks reach far enough: see [`Locks::require`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if they reach less far than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        Ok(Self { locks: self.locks.require(needed)? })
    }

    /// Grants no more leases, and waits until every lease is released: see [`Locks::shutdown`].
    pub async fn shutdown(&self) {
        self.locks.shutdown().await;
    }
}
