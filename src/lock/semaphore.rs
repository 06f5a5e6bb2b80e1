use std::sync::Arc;
use std::time::Duration;

use super::kind::LockKind;
use super::locks::{LockRequest, Locks, Replication};
use super::locks_state::Shared;
use super::store::{LockStore, Reach};
use crate::error::ConfigError;
use crate::key::Key;
use crate::store::circuit::CircuitBreaker;

/// So many at a time: permits by key, each of which is a [`Lease`](super::Lease) that expires with a holder that has died.
///
/// ```
/// use tollgate::{MemoryBackend, lock::Semaphore};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let exports = Semaphore::new(MemoryBackend::new(), 2);
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
/// A permit is renewed, lost and given back as a lock is, and what [`Locks`] says of waiting and of dropping holds here as
/// well. Those who wait in one process are served in order. Processes may disagree about the number of permits while a new one is
/// rolled out: each lets in as many as itself believes in.
#[derive(Clone, Debug)]
pub struct Semaphore {
    pub(super) locks: Locks,
}

impl Semaphore {
    /// Permits that `store` keeps, which is a backend: `permits` for each key, from 1 to 1,000. Any other number is a
    /// [`LockError::Config`](super::LockError::Config) when a permit is asked for.
    pub fn new(store: impl LockStore + Send + Sync + 'static, permits: u32) -> Self {
        Self { locks: Locks::with(Shared::new(Arc::new(store), true), "semaphores", LockKind::Semaphore, permits) }
    }

    fn with(self, change: impl FnOnce(Locks) -> Locks) -> Self {
        Self { locks: change(self.locks) }
    }

    /// What keeps these permits apart from others with the same keys. Defaults to `semaphores`.
    #[must_use]
    pub fn namespace(self, namespace: impl Into<Key>) -> Self {
        self.with(|locks| locks.namespace(namespace))
    }

    /// How long a permit outlives a holder that has died: see [`Locks::ttl`]. Defaults to 30 s.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|locks| locks.ttl(ttl))
    }

    /// How long to wait for a permit: see [`Locks::wait`]. Defaults to 10 s.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|locks| locks.wait(wait))
    }

    /// How long a permit is renewed at the most: see [`Locks::max_hold`]. Defaults to no limit.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|locks| locks.max_hold(max_hold))
    }

    /// Asks all who hold a permit to give theirs back, for as long as somebody waits for one: see [`Locks::request_release`]. Defaults to waiting in
    /// silence.
    #[must_use]
    pub fn request_release(self) -> Self {
        self.with(Locks::request_release)
    }

    /// How many may stand in line for one key in this process: see [`Locks::max_waiters`]. Defaults to 1,000.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters(waiters))
    }

    /// How many may be waiting for permits in this process, of whatever keys: see [`Locks::max_waiters_in_total`]. Defaults to 100,000.
    #[must_use]
    pub fn max_waiters_in_total(self, waiters: usize) -> Self {
        self.with(|locks| locks.max_waiters_in_total(waiters))
    }

    /// When to stop asking a store that fails: see [`Locks::circuit_breaker`]. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.with(|locks| locks.circuit_breaker(breaker))
    }

    /// What the holders of these permits are called in what [`LockAdmin`](super::LockAdmin) tells: see [`Locks::holder`]. Defaults to no name.
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

    /// Takes a permit of `key`, and waits for one if there is none.
    pub fn acquire(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.lock(key)
    }

    /// Takes a permit of `key`, or says at once that there is none.
    pub fn try_acquire(&self, key: impl Into<Key>) -> LockRequest {
        self.locks.try_lock(key)
    }

    /// Among whom the permits are counted: see [`Locks::scope`].
    #[must_use]
    pub fn scope(&self) -> Reach {
        self.locks.scope()
    }

    /// Makes sure that the permits are counted as far as they are meant to: see [`Locks::require`].
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if permits are counted among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        Ok(Self { locks: self.locks.require(scope)? })
    }

    /// Grants nothing any more, and waits until every permit has been given back: see [`Locks::shutdown`].
    pub async fn shutdown(&self) {
        self.locks.shutdown().await;
    }
}
