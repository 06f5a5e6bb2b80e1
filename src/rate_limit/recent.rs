use indexmap::IndexMap;
use tokio::time::Instant;

use crate::key::Key;

/// How many values are looked at to find an old one.
const SAMPLE: usize = 8;

/// The latest value of each of so many keys, and since when it has been that.
pub(super) struct Recent<V> {
    entries: IndexMap<Key, (Instant, V)>,
    // Where to look next for values that can go.
    hand: usize,
}

impl<V> Recent<V> {
    pub(super) fn get(&self, key: &Key) -> Option<&(Instant, V)> {
        self.entries.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut (Instant, V)> {
        self.entries.get_mut(key)
    }

    /// Keeps `value` as of now, and of those that are old one less if there would be more than `capacity`.
    pub(super) fn insert(&mut self, key: Key, value: V, capacity: usize) {
        let entry = (Instant::now(), value);
        if let Some(known) = self.entries.get_mut(&key) {
            *known = entry;
            return;
        }
        while self.entries.len() >= capacity.max(1) {
            // The oldest of a few, each time of others: the newest takes the place of the one that goes.
            let len = self.entries.len();
            let sample = (0..SAMPLE.min(len)).map(|step| (self.hand + step) % len);
            let oldest = sample.min_by_key(|index| self.entries.get_index(*index).map(|(_, (since, _))| *since));
            self.entries.swap_remove_index(oldest.unwrap_or(0));
            self.hand = (self.hand + SAMPLE) % len;
        }
        self.entries.insert(key, entry);
    }

    pub(super) fn remove(&mut self, key: &Key) {
        self.entries.swap_remove(key);
    }
}

// By hand: `derive` would ask for `V: Default`.
impl<V> Default for Recent<V> {
    fn default() -> Self {
        Self { entries: IndexMap::new(), hand: 0 }
    }
}
