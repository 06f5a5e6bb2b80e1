//! What a caller finds under a key.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::store::{EntryId, TagGeneration};

/// What the store has for a key.
pub(crate) struct Lookup<T> {
    /// The id of the entry, also if it must not be served.
    pub(crate) id: EntryId,
    pub(crate) found: Option<Found<T>>,
}

impl<T> Lookup<T> {
    #[cfg(feature = "local-cache")]
    pub(super) fn tags(&self) -> &[TagGeneration] {
        self.found.as_ref().map_or(&[], |found| &found.tags)
    }
}

/// An entry that may be served.
pub(crate) struct Found<T> {
    pub(crate) value: Option<Arc<T>>,
    /// When the entry was read from the store. `age_when_read` is its age at that time.
    #[cfg_attr(
        not(any(feature = "http", feature = "local-cache")),
        expect(dead_code, reason = "only HTTP and the local tier need it")
    )]
    pub(super) read: Instant,
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "only HTTP needs it"))]
    pub(super) age_when_read: Duration,
    pub(super) fresh_until: Instant,
    #[cfg_attr(not(feature = "local-cache"), expect(dead_code, reason = "only the local tier needs it"))]
    pub(super) expires: Instant,
    /// How long its load took.
    pub(super) load_time: Duration,
    pub(super) tags: Vec<TagGeneration>,
    /// From this process, not from the store.
    pub(crate) is_local: bool,
}

impl<T> Found<T> {
    /// How long it is still fresh. Zero if it is stale.
    pub(crate) fn fresh_for(&self) -> Duration {
        self.fresh_until.saturating_duration_since(Instant::now())
    }

    /// The time since it was stored.
    #[cfg(feature = "http")]
    pub(crate) fn age(&self) -> Duration {
        self.age_when_read + self.read.elapsed()
    }
}

// Not derived, which would require `T: Clone`.
impl<T> Clone for Found<T> {
    fn clone(&self) -> Self {
        Self { value: self.value.clone(), tags: self.tags.clone(), ..*self }
    }
}
