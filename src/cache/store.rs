//! For people who write a backend: what a cache needs from a store.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;

use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;

pub use super::key::CacheKey;
pub use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;
pub use crate::store::token::Token;

/// What a cache needs from a backend: entries, and one lease for each key, which a process holds while it loads the entry.
///
/// ```text
///             claim                 put
///   no lease ------> leased ------------------> no lease, a new entry
///      ^                |  \  release
///      |                |   +-----------------> no lease, or for a while a mark: failed, or not cached
///      |                |
///      +----------------+  the lease ends, or the entry is set, expired or invalidated
/// ```
///
/// A load can only store its entry while it holds the lease, and each `set`, `expire` and `invalidate` ends the lease. So a load that began
/// before an invalidation is never stored after it.
///
/// Each load has its own [`Token`], and each call may be repeated with it. The backend owns the clock. Every change is one atomic step.
///
/// All backends pass the same contract tests. `tollgate::testing` (feature `testing`) has them for your own backend.
///
/// # Cancellation
///
/// If you drop a returned future, the call may or may not have been executed.
pub trait CacheStore {
    /// The entry of a key, unless it has expired. An entry that the store cannot read counts as [`Content::Unreadable`].
    fn get(&self, key: &CacheKey) -> impl Future<Output = Result<Option<Entry>, StoreError>> + Send;

    /// Claims the lease of a key, for a caller that has seen the entry `seen`.
    ///
    /// If the entry is no longer `seen`, nothing is claimed: read the entry again. If the token holds the lease already, renews the lease.
    fn claim(
        &self,
        key: &CacheKey,
        seen: &EntryId,
        claim: &Claim,
    ) -> impl Future<Output = Result<Claimed, StoreError>> + Send;

    /// Renews a lease: it lasts [`Claim::lease`] from now on. False if the token does not hold it. An ended lease does not come back.
    fn renew(&self, key: &CacheKey, claim: &Claim) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// If the token holds the lease: stores an entry, ends the lease, notifies waiters, and returns true. A repeated call also returns
    /// true, while the entry of the token is stored. Otherwise returns false, and nothing changes.
    fn put(
        &self,
        key: &CacheKey,
        token: &Token,
        entry: &NewEntry,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Ends the lease without an entry, if the token holds it, and leaves the mark if there is one. [`Mark::Uncached`] also removes the old
    /// entry. Notifies waiters. False if the token does not hold the lease; then nothing changes.
    fn release(
        &self,
        key: &CacheKey,
        token: &Token,
        mark: Option<Mark>,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Stores an entry unconditionally. Ends the lease of a load, and removes a mark. Notifies waiters. The entry has the token as its id.
    fn set(
        &self,
        key: &CacheKey,
        token: &Token,
        entry: &NewEntry,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes an entry. Ends the lease of a load, and removes a mark. Notifies waiters.
    fn invalidate(&self, key: &CacheKey) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Makes an entry stale, if there is one. Ends the lease of a load, and removes a mark. Notifies waiters.
    fn expire(&self, key: &CacheKey) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The generation of a tag. [`CacheKey::key`] of `tag` is the tag. `None` if the tag has no generation.
    fn generation(&self, tag: &CacheKey) -> impl Future<Output = Result<Option<Token>, StoreError>> + Send;

    /// The generation of a tag, which is `new` if there was none. It is kept for at least `ttl` from now on, if the store has room.
    fn ensure_generation(
        &self,
        tag: &CacheKey,
        new: &Token,
        ttl: Duration,
    ) -> impl Future<Output = Result<Token, StoreError>> + Send;

    /// Removes the generation of a tag. Entries with that generation become invalid for good.
    fn invalidate_tag(&self, tag: &CacheKey) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Notifications for a waiter, after each `put`, `release`, `set`, `invalidate` or `expire` that takes effect. The future is ready once
    /// no notification can be missed. Read the entry then, and after each notification. A store without notifications returns
    /// [`Notifications::none`].
    fn watch(&self, key: &CacheKey) -> impl Future<Output = Notifications> + Send;

    /// The reach within which at most one load of a key runs at a time.
    fn reach(&self) -> Reach;

    /// Adds `target` to the shutdown of the backend, which closes it and waits for its work: see [`backend`](crate::backend#shutdown). A
    /// store that wraps another one has to pass the call on. Defaults to nothing, for a store without a shutdown.
    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        let _ = target;
    }
}

/// Identifies an entry: the token of the load or of the `set` that stored it. Empty if there is no entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryId {
    len: usize,
    bytes: [u8; 16],
}

impl EntryId {
    /// An id from the first 16 of these bytes. Fewer bytes make a shorter id, for instance for an entry that the store cannot read.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut id = Self::default();
        id.len = bytes.len().min(id.bytes.len());
        id.bytes[..id.len].copy_from_slice(&bytes[..id.len]);
        id
    }

    /// The bytes of the id.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl From<&Token> for EntryId {
    fn from(token: &Token) -> Self {
        Self::new(token.as_bytes())
    }
}

/// The content of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// A value, as the codec has encoded it.
    Value(Bytes),
    /// The origin has no value for this key.
    Absent,
    /// Written by another version, or damaged. It counts as stale, and is never served.
    Unreadable,
}

/// A stored entry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its id.
    pub id: EntryId,
    /// Its content.
    pub content: Content,
    /// The time since it was stored.
    pub age: Duration,
    /// How long it is still fresh; zero if it is stale.
    pub fresh_for: Duration,
    /// How long it is still kept, fresh or stale.
    pub expires_in: Duration,
    /// How long its load took.
    pub load_time: Duration,
    /// Its tags. The entry is valid while each tag still has the generation given here. The cache checks this, not the store.
    pub tags: Vec<TagGeneration>,
}

impl Entry {
    /// For stores: an entry without tags, whose times are all zero.
    #[must_use]
    pub const fn new(id: EntryId, content: Content) -> Self {
        let zero = Duration::ZERO;
        Self { id, content, age: zero, fresh_for: zero, expires_in: zero, load_time: zero, tags: Vec::new() }
    }

    /// With this age, and the times for which it is still fresh, and still kept.
    #[must_use]
    pub const fn times(mut self, age: Duration, fresh_for: Duration, expires_in: Duration) -> Self {
        (self.age, self.fresh_for, self.expires_in) = (age, fresh_for, expires_in);
        self
    }

    /// With the time that its load took.
    #[must_use]
    pub const fn load_time(mut self, load_time: Duration) -> Self {
        self.load_time = load_time;
        self
    }

    /// With these tags.
    #[must_use]
    pub fn tags(mut self, tags: Vec<TagGeneration>) -> Self {
        self.tags = tags;
        self
    }
}

/// A tag of an entry, and the generation that the tag had before the load of the entry began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TagGeneration {
    /// The tag.
    pub tag: Key,
    /// Its generation: random, and another one after each invalidation.
    pub generation: Token,
}

impl TagGeneration {
    /// The largest number of tags of an entry.
    pub const MAX: usize = 16;

    /// A tag with its generation.
    #[must_use]
    pub const fn new(tag: Key, generation: Token) -> Self {
        Self { tag, generation }
    }
}

/// An entry to store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewEntry {
    /// The encoded value. `None` if the origin has none.
    pub value: Option<Bytes>,
    /// How long it is fresh.
    pub fresh_for: Duration,
    /// How long it is kept: while it is fresh and then stale. At most [`NewEntry::MAX_TTL`].
    pub ttl: Duration,
    /// How long its load took.
    pub load_time: Duration,
    /// Its tags, at most [`TagGeneration::MAX`].
    pub tags: Vec<TagGeneration>,
}

impl NewEntry {
    /// An entry with a value, or without one if the origin has none. It has no tags.
    #[must_use]
    pub const fn new(value: Option<Bytes>, fresh_for: Duration, ttl: Duration, load_time: Duration) -> Self {
        Self { value, fresh_for, ttl, load_time, tags: Vec::new() }
    }

    /// With these tags.
    #[must_use]
    pub fn tags(mut self, tags: Vec<TagGeneration>) -> Self {
        self.tags = tags;
        self
    }

    /// The longest time for which an entry is kept.
    pub const MAX_TTL: Duration = Duration::from_secs(365 * 86_400);
}

/// The parameters of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// Identifies the load. The entry that it stores has the token as its id.
    pub token: Token,
    /// How long the lease lasts without a renewal, from [`Claim::MIN_LEASE`] to [`Claim::MAX_LEASE`].
    pub lease: Duration,
}

impl Claim {
    /// A claim.
    #[must_use]
    pub const fn new(token: Token, lease: Duration) -> Self {
        Self { token, lease }
    }

    /// The shortest lease.
    pub const MIN_LEASE: Duration = Duration::from_millis(10);
    /// The longest lease.
    pub const MAX_LEASE: Duration = Duration::from_secs(3_600);
}

/// The reply to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claimed {
    /// The token holds the lease: load the value.
    Granted,
    /// The entry is no longer the one in `seen`.
    Changed,
    /// Another load holds the lease.
    Busy {
        /// The time until its lease ends, unless it is renewed.
        remaining: Duration,
    },
    /// A load has left a mark.
    Marked(Mark),
}

/// What a load leaves instead of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mark {
    /// The load has failed.
    Failed {
        /// The time until the next load may begin.
        retry_after: Duration,
    },
    /// The value must not be stored: each caller loads its own, without a lease.
    Uncached {
        /// The time until the mark ends.
        remaining: Duration,
    },
}
