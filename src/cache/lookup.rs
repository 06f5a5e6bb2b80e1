//! What a caller finds under a key.

use std::sync::Arc;
use std::time::Duration;

use super::store::{EntryId, TagGeneration};

/// What the store has for a key.
pub(crate) struct Lookup<T> {
    /// The id of the entry, also if it must not be served.
    pub(crate) id: EntryId,
    pub(crate) found: Option<Found<T>>,
}

/// An entry that may be served.
pub(crate) struct Found<T> {
    pub(crate) value: Option<Arc<T>>,
    /// Zero if it is stale.
    pub(crate) fresh_for: Duration,
    /// How long it is still kept, fresh or stale.
    #[cfg_attr(not(feature = "local-cache"), expect(dead_code, reason = "only the local tier keeps it"))]
    pub(super) expires_in: Duration,
    /// The time since it was stored.
    #[cfg_attr(
        not(any(feature = "http", feature = "local-cache")),
        expect(dead_code, reason = "only HTTP and the local tier need it")
    )]
    pub(crate) age: Duration,
    /// How long its load took.
    pub(super) cost: Duration,
    #[cfg_attr(not(feature = "local-cache"), expect(dead_code, reason = "only the local tier checks them again"))]
    pub(super) tags: Vec<TagGeneration>,
    /// From this process, not from the store.
    pub(crate) is_local: bool,
}
