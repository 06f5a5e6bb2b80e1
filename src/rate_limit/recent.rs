use indexmap::IndexMap;
use tokio::time::Instant;

use crate::key::Key;

/// How many values are looked at to find an old one.
const SAMPLE: usize = 8;

/// The latest value of each of so many keys, and since when it has been that.
///
/// Newcomers make room before those that were of use: whoever makes up keys comes once with each.
pub(super) struct Recent<V> {
    // So many that were of use, and behind them the newcomers.
    entries: IndexMap<Key, (Instant, V)>,
    used: usize,
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

    /// The value, if it is fresh: then it was of use.
    pub(super) fn use_fresh(&mut self, key: &Key, is_fresh: impl FnOnce(Instant) -> bool) -> Option<&V> {
        let (mut index, _, (since, _)) = self.entries.get_full(key)?;
        if !is_fresh(*since) {
            return None;
        }
        if index >= self.used {
            self.entries.swap_indices(index, self.used);
            index = self.used;
            self.used += 1;
        }
        self.entries.get_index(index).map(|(_, (_, value))| value)
    }

    /// Keeps `value` as of now, and one less of the newcomers, or else of those that are old, if there would be more than `capacity`.
    pub(super) fn insert(&mut self, key: Key, value: V, capacity: usize) {
        let entry = (Instant::now(), value);
        if let Some(known) = self.entries.get_mut(&key) {
            *known = entry;
            return;
        }
        while self.entries.len() >= capacity.max(1) {
            // The oldest of a few, each time of others: the newest takes the place of the one that goes.
            let len = self.entries.len();
            let first = if self.used < len { self.used } else { 0 };
            let count = len - first;
            let sample = (0..SAMPLE.min(count)).map(|step| first + (self.hand + step) % count);
            let oldest = sample.min_by_key(|index| self.entries.get_index(*index).map(|(_, (since, _))| *since));
            self.remove_at(oldest.unwrap_or(first));
            self.hand = (self.hand + SAMPLE) % count;
        }
        self.entries.insert(key, entry);
    }

    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(index) = self.entries.get_index_of(key) {
            self.remove_at(index);
        }
    }

    fn remove_at(&mut self, mut index: usize) {
        if index < self.used {
            self.used -= 1;
            self.entries.swap_indices(index, self.used);
            index = self.used;
        }
        // The last newcomer takes its place.
        self.entries.swap_remove_index(index);
    }
}

// By hand: `derive` would ask for `V: Default`.
impl<V> Default for Recent<V> {
    fn default() -> Self {
        Self { entries: IndexMap::new(), used: 0, hand: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newcomers_make_room_before_what_was_of_use() {
        let mut recent = Recent::default();
        let insert = |recent: &mut Recent<u32>, numbers: std::ops::Range<u32>| {
            numbers.for_each(|number| recent.insert(Key::from(number), number, 10));
            recent.entries.len()
        };
        let of_use = |recent: &mut Recent<u32>, number: u32| recent.use_fresh(&Key::from(number), |_| true).copied();
        assert_eq!(insert(&mut recent, 0..10), 10);
        for number in [3, 7, 9, 0, 7] {
            assert_eq!(of_use(&mut recent, number), Some(number));
        }
        assert_eq!(recent.use_fresh(&Key::from(1), |_| false), None);
        recent.remove(&Key::from(7));
        recent.remove(&Key::from(8));
        assert_eq!(insert(&mut recent, 100..200), 10);
        for number in [3, 9, 0] {
            assert_eq!(of_use(&mut recent, number), Some(number));
        }
        for number in [1, 7, 8] {
            assert_eq!(of_use(&mut recent, number), None);
        }
        // Where all were of use there is room for newcomers all the same.
        let keys: Vec<Key> = recent.entries.keys().copied().collect();
        assert!(keys.iter().all(|key| recent.use_fresh(key, |_| true).is_some()));
        assert_eq!(insert(&mut recent, 200..300), 10);
        assert_eq!(keys.iter().filter(|key| recent.get(key).is_some()).count(), 9);
        assert_eq!(of_use(&mut recent, 299), Some(299));
    }
}
