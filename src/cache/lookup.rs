//! What a caller finds under a key.

use std::sync::Arc;
use std::time::Duration;

use super::store::{EntryId, TagGeneration};

/// What the store has for a key.
pub(super) struct Lookup<T> {
    /// The id of the entry, also if it must not be served.
    pub(super) id: EntryId,
    pub(super) found: Option<Found<T>>,
}

/// An entry that may be served.
pub(super) struct Found<T> {
    pub(super) value: Option<Arc<T>>,
    /// Zero if it is stale.
    pub(super) fresh_for: Duration,
    /// How long its load took.
    pub(super) cost: Duration,
    #[cfg_attr(not(feature = "local-cache"), expect(dead_code, reason = "only the local tier checks them again"))]
    pub(super) tags: Vec<TagGeneration>,
    /// From this process, not from the store.
    pub(super) is_local: bool,
}
