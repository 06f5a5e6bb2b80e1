//! The local tier: values that this process keeps until a notification of the store reports a change.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moka::sync::Cache as Entries;
use tokio::time::Instant;

use super::lookup::{Found, Lookup};
use super::store::{EntryId, Notifications};
use crate::key::Key;

/// The entries of this process.
pub(super) struct Local<T> {
    entries: Entries<Key, Arc<LocalEntry<T>>>,
    max_age: Duration,
    // The number of calls of `remove` and `remove_tag`. Locked during an insert, so that no removal comes between the comparison of this
    // number and the insert.
    removals: Mutex<u64>,
}

/// An entry, and the subscription that began before it was read.
struct LocalEntry<T> {
    id: EntryId,
    found: Found<T>,
    // Until then the entry is fresh, and was read at most `max_age` ago.
    valid_until: Instant,
    changes: Notifications,
}

/// The state before an entry is read from the store.
pub(super) struct StateBeforeRead {
    removals: u64,
    changes: Notifications,
}

impl<T: Send + Sync + 'static> Local<T> {
    /// Keeps at most `entries` entries, each for at most `max_age`.
    pub(super) fn new(entries: u64, max_age: Duration) -> Self {
        Self { entries: Entries::new(entries), max_age, removals: Mutex::new(0) }
    }

    /// Call this before you read an entry from the store. `changes` notifies of changes of that entry from now on.
    pub(super) fn before_read(&self, changes: Notifications) -> StateBeforeRead {
        StateBeforeRead { removals: *self.lock(), changes }
    }

    /// A fresh value that has not changed since it was read.
    pub(super) fn get_fresh(&self, key: &Key) -> Option<Lookup<T>> {
        let entry = self.entries.get(key)?;
        let is_valid = Instant::now() < entry.valid_until && !entry.changes.may_have_changed();
        is_valid.then(|| entry.lookup())
    }

    /// For a failing store: a value, fresh or stale, for which no message about a change has arrived.
    pub(super) fn get_during_outage(&self, key: &Key) -> Option<Lookup<T>> {
        let entry = self.entries.get(key)?;
        (Instant::now() < entry.found.expires && !entry.changes.has_message()).then(|| entry.lookup())
    }

    /// Keeps a fresh value that the store has returned. If this process has removed an entry meanwhile, the value may be outdated and is
    /// not kept.
    pub(super) fn insert(&self, key: Key, lookup: &Lookup<T>, start: StateBeforeRead) {
        let StateBeforeRead { removals, changes } = start;
        let Some(found) = &lookup.found else { return self.entries.invalidate(&key) };
        if found.fresh_for().is_zero() || changes.may_have_changed() {
            return;
        }
        let valid_until = found.fresh_until.min(found.read + self.max_age);
        let found = Found { is_local: true, ..found.clone() };
        let entry = LocalEntry { id: lookup.id, found, valid_until, changes };
        let removals_now = self.lock();
        if *removals_now == removals {
            self.entries.insert(key, Arc::new(entry));
        }
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.removals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn remove(&self, key: &Key) {
        *self.lock() += 1;
        self.entries.invalidate(key);
    }

    pub(super) fn remove_tag(&self, tag: &Key) {
        *self.lock() += 1;
        for (key, entry) in &self.entries {
            if entry.found.tags.iter().any(|other| other.tag == *tag) {
                self.entries.invalidate(&*key);
            }
        }
    }
}

impl<T> LocalEntry<T> {
    fn lookup(&self) -> Lookup<T> {
        Lookup { id: self.id, found: Some(self.found.clone()) }
    }
}
