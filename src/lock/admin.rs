use std::fmt;
use std::future::Future;
use std::time::Duration;

use super::kind::LockKind;
use super::lock_key::LockKey;
use super::store::LockStore;
use crate::error::StoreError;
use crate::key::Key;
use crate::store::deadline::Deadline;

/// What those who run locks ask of a backend, and no holder needs: who holds what, and to take it away.
pub trait LockRegistry: LockStore {
    /// Who holds a lease. An answer about one that nobody holds has no holders.
    fn inspect(&self, lock: &LockKey) -> impl Future<Output = Result<LockStatus, StoreError>> + Send;

    /// Takes a lease away from all who hold it.
    fn seize(&self, lock: &LockKey) -> impl Future<Output = Result<ForceReleased, StoreError>> + Send;

    /// The leases of a namespace that are held. Looks at about `most` of what it keeps and answers with those of them that are held, if any, and
    /// where to go on.
    fn list(
        &self,
        namespace: &Key,
        from: Cursor,
        most: usize,
    ) -> impl Future<Output = Result<LockPage, StoreError>> + Send;
}

/// A lock, as those see it who do not hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockStatus {
    /// Which lock.
    pub lock: LockKey,
    /// No fence that was given out for it so far is larger. 0 if none is remembered.
    pub last_fence: u64,
    /// As what kind of lock it is held. `None` if it is not held.
    pub kind: Option<LockKind>,
    /// How many hold it: one, but for semaphores and readers.
    pub held_by: usize,
    /// Who they are: the first [`MAX_HOLDERS`](Self::MAX_HOLDERS).
    pub holders: Vec<LockHolder>,
}

impl LockStatus {
    /// How many holders are told of.
    pub const MAX_HOLDERS: usize = 100;

    /// For stores: a lock that nobody holds, and of which no fence is remembered.
    #[must_use]
    pub const fn new(lock: LockKey) -> Self {
        Self { lock, last_fence: 0, kind: None, held_by: 0, holders: Vec::new() }
    }

    /// Whether anybody holds it.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        self.held_by > 0
    }
}

/// Somebody who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockHolder {
    /// The first fence of the lease. Where it goes from hand to hand in a process the present one may be larger.
    pub fence: u64,
    /// Until the lease ends, unless it is renewed.
    pub remaining: Duration,
    /// For how long the lease has been held, from hand to hand in its process. By the clock of the store, which may have been set since.
    pub held_for: Duration,
    /// What it is called, if it is [called](crate::Locks::holder) anything.
    pub name: Option<String>,
}

impl LockHolder {
    /// For stores: a holder without a name.
    #[must_use]
    pub const fn new(fence: u64, remaining: Duration, held_for: Duration) -> Self {
        Self { fence, remaining, held_for, name: None }
    }
}

/// What came of taking a lease away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForceReleased {
    /// How many have held it.
    pub holders: usize,
    /// All fences that the store gives out for this lock from now on are larger than this one. What it protects may refuse those up to here at once. A process
    /// whose lease went from hand to hand may still have handed it on a moment ago or do so now, with a smaller fence than this, until it hears of the loss.
    pub fence: u64,
}

impl ForceReleased {
    /// For stores: so many have held it, and all later fences are larger than this one.
    #[must_use]
    pub const fn new(holders: usize, fence: u64) -> Self {
        Self { holders, fence }
    }
}

/// Where a [list](LockAdmin::list) goes on. Means nothing to others than the backend that it came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// Which part of the backend: a node of a cluster, for instance.
    pub part: u32,
    /// Where in it.
    pub position: u64,
}

/// A part of a [list](LockAdmin::list).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockPage {
    /// Locks that are held. There may be none, and more on the next page.
    pub locks: Vec<LockStatus>,
    /// Where to go on, unless this is the end.
    pub next: Option<Cursor>,
}

impl LockPage {
    /// For stores: these locks, and where to go on, unless this is the end.
    #[must_use]
    pub const fn new(locks: Vec<LockStatus>, next: Option<Cursor>) -> Self {
        Self { locks, next }
    }
}

/// Looks at locks, and takes them away: for those who run a service, and not for the service.
///
/// ```
/// use tollgate::{Locks, MemoryBackend, lock::LockAdmin};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
/// let backend = MemoryBackend::new();
/// let locks = Locks::new(backend.clone()).namespace("orders").holder("billing-7f9c");
/// let admin = LockAdmin::new(backend).namespace("orders");
/// let lease = locks.lock("42").await?;
/// # tokio::task::yield_now().await;
///
/// let status = admin.inspect("42").await?;
/// assert_eq!(status.holders[0].fence, lease.fence());
/// assert_eq!(status.holders[0].name.as_deref(), Some("billing-7f9c"));
///
/// // Page by page: there may be one without locks, and more behind it.
/// let (mut held, mut next) = (Vec::new(), Some(Default::default()));
/// while let Some(from) = next {
///     let page = admin.list(from, 100).await?;
///     held.extend(page.locks);
///     next = page.next;
/// }
/// assert_eq!(held.len(), 1);
///
/// let seized = admin.force_unlock("42").await?;
/// assert!(seized.fence >= lease.fence());
/// assert!(!admin.inspect("42").await?.is_held());
/// # Ok(())
/// # }
/// ```
///
/// On Redis a user needs `+scan` for [`list`](Self::list), and nothing more than for locks otherwise.
#[derive(Clone)]
pub struct LockAdmin<B> {
    store: B,
    namespace: Key,
    deadline: Duration,
}

impl<B: LockRegistry + Sync> LockAdmin<B> {
    /// Looks at the locks that `store` keeps, which is a backend.
    pub fn new(store: B) -> Self {
        Self { store, namespace: Key::new("default"), deadline: Duration::from_secs(1) }
    }

    /// Whose locks: see [`Locks::namespace`](crate::Locks::namespace). Defaults to `default`. Those of layers are in `requests`, the permits of semaphores in
    /// `semaphores`, those of [`RwLocks`](crate::lock::RwLocks) in `rw_locks`, unless they were told otherwise. A segment of
    /// [`Segmented`](crate::lock::Segmented) has the key `(key, index)`. [`Redlock`](crate::lock::Redlock) is looked at one server after the other.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<Key>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// How long one call of the store may take. Defaults to 1 s.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Who holds the lock of `key`.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn inspect(&self, key: impl Into<Key>) -> Result<LockStatus, StoreError> {
        let lock = LockKey::new(self.namespace, key);
        Deadline::new(self.store.inspect(&lock), self.deadline).await
    }

    /// The locks of the namespace that are held, a page at a time: begin with [`Cursor::default`] and go on with
    /// [`LockPage::next`] until there is none. A page comes from looking at about `most` of what the backend keeps, 1 to 1,000.
    ///
    /// What others wrote in the place of a lock is left out, and is an error when that lock is [inspected](Self::inspect). A lock that is held all the while is on one page at least, unless a cluster moves its slot or a replica takes over meanwhile; it may be on two. Takes a look at everything that
    /// the backend keeps in the end: not for requests.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn list(&self, from: Cursor, most: usize) -> Result<LockPage, StoreError> {
        Deadline::new(self.store.list(&self.namespace, from, most.clamp(1, 1_000)), self.deadline).await
    }

    /// Takes the lock of `key` away from whoever holds it. For a holder that hangs, and that cannot be stopped where it runs.
    ///
    /// **The holder is not stopped by this.** It finds out when it renews its lease next, after a third of its time at the latest if it runs at all, and
    /// believes until then to have the lock, while somebody else may have it already. What keeps the two apart is the [fence](crate::Lease::fence).
    ///
    /// # Errors
    ///
    /// If the store fails. Whether the lock was taken away is not known then.
    pub async fn force_unlock(&self, key: impl Into<Key>) -> Result<ForceReleased, StoreError> {
        let lock = LockKey::new(self.namespace, key);
        let seized = Deadline::new(self.store.seize(&lock), self.deadline).await?;
        tracing::warn!(%lock, holders = seized.holders, "lock taken away from its holder");
        Ok(seized)
    }
}

impl<B> fmt::Debug for LockAdmin<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockAdmin").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}
