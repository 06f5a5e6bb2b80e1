use std::ops::Range;
use std::time::Duration;

use indexmap::IndexMap;
use tokio::time::Instant;

use crate::key::Key;

/// How many entries are examined to find the oldest.
const SAMPLE: usize = 8;

/// The latest value of each of a bounded number of keys, with its time.
///
/// Of fresh entries, unused ones are evicted before used ones: keys that a client makes up to flood the cache come only once. A part of the
/// capacity is reserved for unused entries. Otherwise new keys would find no room once all entries are used.
pub(super) struct ProbationaryCache<V> {
    // The first `used` entries were used. The others are unused: they are in probation.
    entries: IndexMap<Key, (Instant, V)>,
    used: usize,
    // Where the searches for the oldest entry continue: among used entries, and among unused ones.
    sweep_cursors: [usize; 2],
}

/// The capacity, and how long a value is fresh.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) capacity: usize,
    pub(super) time_to_live: Duration,
}

impl Bounds {
    fn is_fresh(self, since: Instant) -> bool {
        since.elapsed() < self.time_to_live
    }

    /// The maximum number of used entries.
    fn max_used(self) -> usize {
        self.capacity - self.capacity.div_ceil(5)
    }
}

impl<V> ProbationaryCache<V> {
    pub(super) fn get(&self, key: &Key) -> Option<&(Instant, V)> {
        self.entries.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut (Instant, V)> {
        self.entries.get_mut(key)
    }

    /// Returns the value if it is fresh, and marks it as used.
    pub(super) fn use_fresh(&mut self, key: &Key, bounds: Bounds) -> Option<&V> {
        let (mut index, _, (since, _)) = self.entries.get_full(key)?;
        if !bounds.is_fresh(*since) {
            return None;
        }
        if index >= self.used {
            if self.used < bounds.max_used() {
                self.used += 1;
                self.entries.swap_indices(index, self.used - 1);
                index = self.used - 1;
            } else if let Some((oldest, _)) = self.oldest_used() {
                // The oldest used entry goes back to probation.
                self.entries.swap_indices(index, oldest);
                index = oldest;
            }
        }
        self.entries.get_index(index).map(|(_, (_, value))| value)
    }

    /// Stores `value` as of now. If the cache is full, evicts an expired entry, or else an unused one.
    pub(super) fn insert(&mut self, key: Key, value: V, bounds: Bounds) {
        let entry = (Instant::now(), value);
        if let Some(known) = self.entries.get_mut(&key) {
            *known = entry;
            return;
        }
        while self.entries.len() >= bounds.capacity.max(1) {
            let unused = self.oldest_unused();
            let evicted = match unused {
                Some((_, since)) if !bounds.is_fresh(since) => unused,
                _ => self.oldest_used().filter(|(_, since)| unused.is_none() || !bounds.is_fresh(*since)).or(unused),
            };
            self.remove_at(evicted.map_or(0, |(index, _)| index));
        }
        self.entries.insert(key, entry);
    }

    fn oldest_used(&mut self) -> Option<(usize, Instant)> {
        self.oldest(0, 0..self.used)
    }

    fn oldest_unused(&mut self) -> Option<(usize, Instant)> {
        self.oldest(1, self.used..self.entries.len())
    }

    /// The oldest of a sample, which differs each time, with its time.
    fn oldest(&mut self, cursor: usize, part: Range<usize>) -> Option<(usize, Instant)> {
        let (count, start) = (part.len(), self.sweep_cursors[cursor]);
        self.sweep_cursors[cursor] = (start + SAMPLE) % count.max(1);
        let sample = (0..SAMPLE.min(count)).map(|step| part.start + (start + step) % count);
        let aged = sample.filter_map(|index| self.entries.get_index(index).map(|(_, (since, _))| (index, *since)));
        aged.min_by_key(|(_, since)| *since)
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
        // The last new entry moves into the gap.
        self.entries.swap_remove_index(index);
    }
}

// Not derived: `derive` would require `V: Default`.
impl<V> Default for ProbationaryCache<V> {
    fn default() -> Self {
        Self { entries: IndexMap::new(), used: 0, sweep_cursors: [0; 2] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { capacity: 10, time_to_live: Duration::from_secs(60) };

    fn insert(cache: &mut ProbationaryCache<u32>, numbers: Range<u32>) -> usize {
        numbers.for_each(|number| cache.insert(Key::from(number), number, BOUNDS));
        cache.entries.len()
    }

    fn use_key(cache: &mut ProbationaryCache<u32>, number: u32) -> Option<u32> {
        cache.use_fresh(&Key::from(number), BOUNDS).copied()
    }

    #[tokio::test(start_paused = true)]
    async fn used_entries_outlive_unused_ones() {
        let mut cache = ProbationaryCache::default();
        assert_eq!(insert(&mut cache, 0..10), 10);
        for number in [3, 7, 9, 0, 7] {
            assert_eq!(use_key(&mut cache, number), Some(number));
        }
        assert_eq!(cache.use_fresh(&Key::from(1), Bounds { time_to_live: Duration::ZERO, ..BOUNDS }), None);
        cache.remove(&Key::from(7));
        cache.remove(&Key::from(8));
        assert_eq!(insert(&mut cache, 100..200), 10);
        for number in [3, 9, 0] {
            assert_eq!(use_key(&mut cache, number), Some(number));
        }
        for number in [1, 7, 8] {
            assert_eq!(use_key(&mut cache, number), None);
        }
        // Even if all entries were used, there is room for new ones, and for more than one.
        let keys: Vec<Key> = cache.entries.keys().copied().collect();
        assert!(keys.iter().all(|key| cache.use_fresh(key, BOUNDS).is_some()));
        assert_eq!(insert(&mut cache, 200..300), 10);
        assert_eq!(keys.iter().filter(|key| cache.get(key).is_some()).count(), 8);
        assert_eq!((use_key(&mut cache, 298), use_key(&mut cache, 299)), (Some(298), Some(299)));
        // With a capacity of one, the latest entry stays.
        let one = Bounds { capacity: 1, ..BOUNDS };
        let mut cache = ProbationaryCache::default();
        for number in 0..3 {
            cache.insert(Key::from(number), number, one);
            assert_eq!(cache.use_fresh(&Key::from(number), one), Some(&number));
        }
        assert_eq!(cache.entries.len(), 1);
    }

    /// Regression: used entries stayed forever, so all new keys shared one place.
    #[tokio::test(start_paused = true)]
    async fn expired_used_entries_make_room_for_new_ones() {
        let mut cache = ProbationaryCache::default();
        assert_eq!(insert(&mut cache, 0..10), 10);
        assert!((0..10).all(|number| use_key(&mut cache, number).is_some()));
        tokio::time::advance(BOUNDS.time_to_live).await;
        // More keys than the reserved places.
        let mut misses = 0;
        for number in (100..105).cycle().take(500) {
            if use_key(&mut cache, number).is_none() {
                misses += 1;
                assert_eq!(insert(&mut cache, number..number + 1), 10);
            }
        }
        assert_eq!(misses, 5);
    }
}
