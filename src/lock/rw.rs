use std::sync::Arc;
use std::time::Duration;

use super::kind::LockKind;
use super::locks::{LockRequest, Locks, Replication};
use super::locks_state::Shared;
use super::store::{LockStore, Reach};
use crate::error::ConfigError;
use crate::key::Key;
use crate::store::circuit::CircuitBreaker;

/// Locks by key that many readers hold together, or one writer alone.
///
/// ```
/// use tollgate::{MemoryBackend, lock::RwLocks};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let pages = RwLocks::new(MemoryBackend::new());
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
/// Each reader has a [`Lease`](super::Lease) of its own, which is renewed, lost and given back as that of a lock is: a reader that
/// has died holds writers up until its own lease ends, whatever other readers do. Up to 1,000 read one key at a time.
///
/// Whoever came first is served first, in all processes together: readers who come while a writer waits stand behind it, so writers do
/// not starve, and neither do readers, since a writer who comes later stands behind them. See
/// [fair locks](Locks::fair) for what that costs. A reader that asks for the same key again waits for the writer that waits for it;
/// use [`Lease::reenter`](super::Lease::reenter) instead.
///
/// Fences rise with each grant, of readers and of writers. What [`Locks`] says of waiting, of dropping and of shutting down holds
/// here as well.
#[derive(Clone, Debug)]
pub struct RwLocks {
    pub(super) locks: Locks,
}

impl RwLocks {
    /// Locks that `store` keeps, which is a backend.
    pub fn new(store: impl LockStore + Send + Sync + 'static) -> Self {
        let shared = Shared::new(Arc::new(store), false);
        Self { locks: Locks::with(shared, "rw_locks", LockKind::ReadWrite, 1).fair() }
    }

    fn with(self, change: impl FnOnce(Locks) -> Locks) -> Self {
        Self { locks: change(self.locks) }
    }

    /// What keeps these locks apart from others with the same keys. Defaults to `rw_locks`.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<Key>) -> Self {
        self.with(|locks| locks.namespace(namespace))
    }

    /// How long a lease outlives a holder that has died: see [`Locks::ttl`]. Defaults to 30 s.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|locks| locks.ttl(ttl))
    }

    /// How long to wait for a lease: see [`Locks::wait`]. Defaults to 10 s.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|locks| locks.wait(wait))
    }

    /// How long a lease is renewed at the most: see [`Locks::max_hold`]. Defaults to no limit.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|locks| locks.max_hold(max_hold))
    }

    /// Asks all who hold a lease to give it back, for as long as somebody waits who cannot have one beside theirs: see [`Locks::request_release`]. Defaults to
    /// waiting in silence.
    #[must_use]
    pub fn request_release(self) -> Self {
        self.with(Locks::request_release)
    }

    /// How many may wait for one key in this process: see [`Locks::max_waiters`]. Defaults to 1,000.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters(waiters))
    }

    /// How many may be waiting for leases in this process, of whatever keys: see [`Locks::max_waiters_in_total`]. Defaults to 100,000.
    #[must_use]
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters_in_total(waiters))
    }

    /// When to stop asking a store that fails: see [`Locks::circuit_breaker`]. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|locks| locks.circuit_breaker(breaker))
    }

    /// What the holders of these locks are called in what [`LockAdmin`](super::LockAdmin) tells: see [`Locks::holder`]. Defaults to no name.
    #[must_use]
    pub fn holder(self, name: impl AsRef<str>) -> Self {
        self.with(|locks| locks.holder(name))
    }

    /// Who has to know of a lease before it is relied on: see [`Locks::replication`].
    #[must_use]
    pub fn replication(self, replication: Replication) -> Self {
        self.with(|locks| locks.replication(replication))
    }

    /// How long one call of the store may take: see [`Locks::deadline`]. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.with(|locks| locks.deadline(deadline))
    }

    /// Takes a lease of `key` together with other readers, and waits while a writer has it or came before.
    pub fn read(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.lock(key).shared()
    }

    /// Takes a lease of `key` together with other readers, or says at once that a writer has it or waits for it.
    pub fn try_read(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.try_lock(key).shared()
    }

    /// Takes the lease of `key` alone, and waits while others have it or came before.
    pub fn write(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.lock(key)
    }

    /// Takes the lease of `key` alone, or says at once that others have it or wait for it.
    pub fn try_write(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.try_lock(key)
    }

    /// Among whom the locks hold: see [`Locks::scope`].
    #[must_use]
    pub fn scope(&self) -> Reach {
        self.locks.scope()
    }

    /// Makes sure that the locks hold as far as they are meant to: see [`Locks::require`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if they hold among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        Ok(Self { locks: self.locks.require(scope)? })
    }

    /// Grants nothing any more, and waits until every lease has been given back: see [`Locks::shutdown`].
    pub async fn shutdown(&self) {
        self.locks.shutdown().await;
    }
}
