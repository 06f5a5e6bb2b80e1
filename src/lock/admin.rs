use std::fmt;
use std::time::Duration;

use super::lock_key::LockKey;
use super::status::{ForceReleased, LockPage, LockStatus};
use super::store::LockRegistry;
use crate::error::StoreError;
use crate::key::Key;
use crate::store::cursor::Cursor;
use crate::store::deadline::call_within;

/// Inspects locks and releases them by force: for operators, not for the service itself.
///
/// ```
/// use tollgate::{Locks, MemoryBackend, lock::LockAdmin};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let backend = MemoryBackend::new();
/// let locks = Locks::new(backend.clone(), "orders").holder("billing-7f9c");
/// let admin = LockAdmin::new(backend, "orders");
/// let lease = locks.lock("42").await?;
/// # tokio::task::yield_now().await;
///
/// let status = admin.inspect("42").await?;
/// assert_eq!(status.holders[0].fence, lease.fence());
/// assert_eq!(status.holders[0].name.as_deref(), Some("billing-7f9c"));
///
/// // Page by page: a page without locks may be followed by pages with locks.
/// let (mut held, mut next) = (Vec::new(), Some(Default::default()));
/// while let Some(from) = next {
///     let page = admin.list(from, 100).await?;
///     held.extend(page.locks);
///     next = page.next;
/// }
/// assert_eq!(held.len(), 1);
///
/// let released = admin.force_release("42").await?;
/// assert!(released.fence >= lease.fence());
/// assert!(!admin.inspect("42").await?.is_held());
/// # Ok(())
/// # }
/// ```
///
/// On Redis, [`list`](Self::list) needs the permission `+scan`; the rest needs no more than locks do.
#[derive(Clone)]
pub struct LockAdmin<B> {
    store: B,
    name: Key,
    deadline: Duration,
}

impl<B: LockRegistry + Sync> LockAdmin<B> {
    /// Inspects the locks in `store`, which is a backend, that have this name: the one of [`Locks`](crate::Locks), read/write locks, a
    /// semaphore or a layer.
    ///
    /// A segment of [`Segmented`](crate::lock::Segmented) has the key `(key, index)`. Inspect the servers of
    /// [`Redlock`](crate::lock::Redlock) one by one.
    pub fn new(store: B, name: impl Into<Key>) -> Self {
        Self { store, name: name.into(), deadline: Duration::from_secs(1) }
    }

    /// The longest duration of a store call. Defaults to 1 s. With zero, each call fails.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The holders of the lock of `key`.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn inspect(&self, key: impl Into<Key>) -> Result<LockStatus, StoreError> {
        let lock = LockKey::new(self.name, key);
        call_within(self.deadline, self.store.inspect(&lock)).await
    }

    /// The held locks with this name, page by page: begin with [`Cursor::default`] and continue with [`LockPage::next`] until
    /// it is `None`. Each page scans about `max` entries of the backend, 1 to 1,000.
    ///
    /// If another program has stored data under the key of a lock, the pages omit it, and [`inspect`](Self::inspect) fails. A lock that is
    /// held all the time is on one or two pages, unless a cluster moves its slot or a replica is promoted meanwhile. All pages together
    /// scan the whole backend: do not list locks in request handlers.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn list(&self, from: Cursor, max: usize) -> Result<LockPage, StoreError> {
        call_within(self.deadline, self.store.list(&self.name, from, max.clamp(1, 1_000))).await
    }

    /// Releases the lock of `key` by force, for a holder that hangs and cannot be stopped.
    ///
    /// **This does not stop the holder.** A holder that still runs learns of the loss at its next renewal, after at most a third of its
    /// ttl. Until then its lease reports the lock as held, although another client may hold it already. The
    /// [fence](crate::Lease::fence) tells the two holders apart.
    ///
    /// # Errors
    ///
    /// If the store fails. Whether the lock was released is unknown then.
    pub async fn force_release(&self, key: impl Into<Key>) -> Result<ForceReleased, StoreError> {
        let lock = LockKey::new(self.name, key);
        let released = call_within(self.deadline, self.store.force_release(&lock)).await?;
        tracing::warn!(%lock, holders = released.holders, "lock released by an administrator");
        Ok(released)
    }
}

impl<B> fmt::Debug for LockAdmin<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockAdmin").field("name", &self.name).finish_non_exhaustive()
    }
}
