//! For people who write a backend: what an exists filter needs from a store.

use std::future::Future;
use std::time::Duration;

pub use super::layout::{Block, KeyBits, Layout};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
pub use crate::store::token::Token;

/// What an [`ExistsFilter`](super::ExistsFilter) needs from a backend: versions of a filter, of which one is in use, and one may be built.
///
/// ```text
///        allocate          begin_build            end_build
///   none -------> hidden -------------> building -----------> active, and the active version before is removed
///                                           |
///                                           +---------------> removed: abandoned, or another build began
/// ```
///
/// A version is removed in the same step in which another one becomes active. So a client that still reads the old version finds no block,
/// and never an outdated one. Each version has a random id, which is never used again.
///
/// The backend owns the clock. Every change is one atomic step. Every version has a time to live.
///
/// All backends pass the same contract tests. `tollgate::testing` (feature `testing`) has them for your own backend.
///
/// # Cancellation
///
/// If you drop a returned future, the call may or may not have been executed.
pub trait ExistsFilterStore {
    /// The versions of a filter. A missing or damaged version counts as `None`.
    fn status(&self, filter: &Key) -> impl Future<Output = Result<FilterStatus, StoreError>> + Send;

    /// A block of a version. `None` if the store does not have all of its bytes.
    fn read_block(
        &self,
        filter: &Key,
        version: &Token,
        block: u32,
    ) -> impl Future<Output = Result<Option<Block>, StoreError>> + Send;

    /// `count` blocks of a version, from the block `first` on. `None` if the store does not have all of their bytes.
    fn read_blocks(
        &self,
        filter: &Key,
        version: &Token,
        first: u32,
        count: u32,
    ) -> impl Future<Output = Result<Option<Vec<Block>>, StoreError>> + Send;

    /// Creates a hidden version without set bits, or allocates the next part of it. True if all of it is allocated; otherwise call it again.
    ///
    /// A call allocates at most [`ALLOCATION_STEP`] bytes. The version is kept for [`BUILD_TTL`] from then on.
    fn allocate(
        &self,
        filter: &Key,
        version: &Token,
        layout: &Layout,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Begins to build a hidden version, and removes the previous unfinished version. False if the versions are not those in
    /// `seen`, or if the hidden version is gone; then nothing changes. May be repeated.
    fn begin_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        version: &Token,
        ttl: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Sets bits in the active version and in the unfinished version. May be repeated.
    ///
    /// If there are no versions, the store keeps the time of the first such call until a build begins. A store that never loses the ids of
    /// versions in use need not keep it.
    fn add_bits(
        &self,
        filter: &Key,
        seen: &VersionIds,
        bits: &NewBits,
    ) -> impl Future<Output = Result<Added, StoreError>> + Send;

    /// If the build is complete, makes the unfinished version active, and removes the active version before it. If not, removes the
    /// unfinished version. False if the versions are not those in `seen`, or if the version is damaged; then nothing changes. May be
    /// repeated.
    fn end_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The reach within which a filter is shared.
    fn reach(&self) -> Reach;
}

/// The largest number of bytes that one call of [`ExistsFilterStore::allocate`] allocates.
pub const ALLOCATION_STEP: usize = 1 << 20;

/// The largest number of keys in one call of [`ExistsFilterStore::add_bits`], for each version.
pub const MAX_KEYS: usize = 128;

/// How long an unfinished version is kept after the last call of its builder.
pub const BUILD_TTL: Duration = Duration::from_secs(3_600);

/// The ids of the versions of a filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VersionIds {
    /// The version in use.
    pub active: Option<Token>,
    /// The unfinished version.
    pub building: Option<Token>,
}

impl VersionIds {
    /// The ids of these versions.
    #[must_use]
    pub const fn new(active: Option<Token>, building: Option<Token>) -> Self {
        Self { active, building }
    }

    /// The ids after the end of the build.
    #[must_use]
    pub const fn after_build(&self, is_complete: bool) -> Self {
        Self { active: if is_complete { self.building } else { self.active }, building: None }
    }
}

/// The versions of a filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FilterStatus {
    /// The ids of the versions.
    pub ids: VersionIds,
    /// The version in use. `None` if there is none, or if it is lost or damaged.
    pub active: Option<Version>,
    /// The unfinished version, likewise.
    pub building: Option<Version>,
}

impl FilterStatus {
    /// For stores: the status with these versions.
    #[must_use]
    pub const fn new(ids: VersionIds, active: Option<Version>, building: Option<Version>) -> Self {
        Self { ids, active, building }
    }
}

/// A version of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Version {
    /// Its size and seed.
    pub layout: Layout,
    /// The number of keys that set at least one new bit: slightly less than the number of different keys.
    pub keys: u64,
    /// The number of set bits.
    pub bits: u64,
    /// The time since it became active; zero while it is unfinished.
    pub age: Duration,
}

impl Version {
    /// For stores: a version.
    #[must_use]
    pub const fn new(layout: Layout, keys: u64, bits: u64, age: Duration) -> Self {
        Self { layout, keys, bits, age }
    }
}

/// Bits to set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewBits {
    /// The bits of at most [`MAX_KEYS`] keys in the active version.
    pub active: Vec<KeyBits>,
    /// The bits of at most [`MAX_KEYS`] keys in the unfinished version.
    pub building: Vec<KeyBits>,
    /// How long the active version is kept from now on.
    pub ttl: Duration,
    /// Whether the builder makes the call. If so, the unfinished version is kept for [`BUILD_TTL`] from now on.
    pub is_build: bool,
}

impl NewBits {
    /// The bits of keys that a client adds to both versions.
    #[must_use]
    pub const fn added(active: Vec<KeyBits>, building: Vec<KeyBits>, ttl: Duration) -> Self {
        Self { active, building, ttl, is_build: false }
    }

    /// The bits of keys that the builder adds to the unfinished version.
    #[must_use]
    pub const fn built(building: Vec<KeyBits>, ttl: Duration) -> Self {
        Self { active: Vec::new(), building, ttl, is_build: true }
    }
}

/// The reply to [`ExistsFilterStore::add_bits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Added {
    /// Another process has changed the versions since the caller read them. The call has set no bits.
    Changed,
    /// There are no versions. Other processes may still use versions whose ids the store lost shortly before the first such reply.
    Missing {
        /// The time since the first such reply.
        missing_for: Duration,
    },
    /// The bits are set in each version that is intact.
    Done {
        /// Whether the active version is intact.
        active: bool,
        /// Whether the unfinished version is intact.
        building: bool,
    },
}
