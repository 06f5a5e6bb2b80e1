use std::ops::Range;
use std::time::Duration;

use indexmap::IndexMap;
use tokio::time::Instant;

use crate::key::Key;

/// How many values are looked at to find an old one.
const SAMPLE: usize = 8;

/// The latest value of each of so many keys, and since when it has been that.
///
/// Newcomers make room before those that were of use: whoever makes up keys comes once with each. There is always room for newcomers, who
/// would find none where those that were of use once stayed for ever.
pub(super) struct ProbationaryCache<V> {
    // So many that were of use, and behind them the newcomers.
    entries: IndexMap<Key, (Instant, V)>,
    used: usize,
    // Where to look next for old values: of those that were of use, and of newcomers.
    hands: [usize; 2],
}

/// How much is kept, and how long it is good.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) capacity: usize,
    pub(super) time_to_live: Duration,
}

impl Bounds {
    fn is_fresh(self, since: Instant) -> bool {
        since.elapsed() < self.time_to_live
    }

    /// How many of the values can be such that were of use.
    fn most_used(self) -> usize {
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

    /// The value, if it is fresh: then it was of use.
    pub(super) fn use_fresh(&mut self, key: &Key, bounds: Bounds) -> Option<&V> {
        let (mut index, _, (since, _)) = self.entries.get_full(key)?;
        if !bounds.is_fresh(*since) {
            return None;
        }
        if index >= self.used {
            if self.used < bounds.most_used() {
                self.used += 1;
                self.entries.swap_indices(index, self.used - 1);
                index = self.used - 1;
            } else if let Some((oldest, _)) = self.oldest_used() {
                self.entries.swap_indices(index, oldest);
                index = oldest;
            }
        }
        self.entries.get_index(index).map(|(_, (_, value))| value)
    }

    /// Keeps `value` as of now. Where there would be too many, one makes room that is old, or else a newcomer.
    pub(super) fn insert(&mut self, key: Key, value: V, bounds: Bounds) {
        let entry = (Instant::now(), value);
        if let Some(known) = self.entries.get_mut(&key) {
            *known = entry;
            return;
        }
        while self.entries.len() >= bounds.capacity.max(1) {
            let newcomer = self.oldest_newcomer();
            let goes = match newcomer {
                Some((_, since)) if !bounds.is_fresh(since) => newcomer,
                _ => {
                    self.oldest_used().filter(|(_, since)| newcomer.is_none() || !bounds.is_fresh(*since)).or(newcomer)
                }
            };
            self.remove_at(goes.map_or(0, |(index, _)| index));
        }
        self.entries.insert(key, entry);
    }

    fn oldest_used(&mut self) -> Option<(usize, Instant)> {
        self.oldest(0, 0..self.used)
    }

    fn oldest_newcomer(&mut self) -> Option<(usize, Instant)> {
        self.oldest(1, self.used..self.entries.len())
    }

    /// The oldest of a few, each time of others, and since when it has its value.
    fn oldest(&mut self, hand: usize, part: Range<usize>) -> Option<(usize, Instant)> {
        let (count, start) = (part.len(), self.hands[hand]);
        self.hands[hand] = (start + SAMPLE) % count.max(1);
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
        // The last newcomer takes its place.
        self.entries.swap_remove_index(index);
    }
}

// By hand: `derive` would ask for `V: Default`.
impl<V> Default for ProbationaryCache<V> {
    fn default() -> Self {
        Self { entries: IndexMap::new(), used: 0, hands: [0; 2] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { capacity: 10, time_to_live: Duration::from_secs(60) };

    fn insert(recent: &mut ProbationaryCache<u32>, numbers: Range<u32>) -> usize {
        numbers.for_each(|number| recent.insert(Key::from(number), number, BOUNDS));
        recent.entries.len()
    }

    fn of_use(recent: &mut ProbationaryCache<u32>, number: u32) -> Option<u32> {
        recent.use_fresh(&Key::from(number), BOUNDS).copied()
    }

    #[tokio::test(start_paused = true)]
    async fn newcomers_make_room_before_what_was_of_use() {
        let mut recent = ProbationaryCache::default();
        assert_eq!(insert(&mut recent, 0..10), 10);
        for number in [3, 7, 9, 0, 7] {
            assert_eq!(of_use(&mut recent, number), Some(number));
        }
        assert_eq!(recent.use_fresh(&Key::from(1), Bounds { time_to_live: Duration::ZERO, ..BOUNDS }), None);
        recent.remove(&Key::from(7));
        recent.remove(&Key::from(8));
        assert_eq!(insert(&mut recent, 100..200), 10);
        for number in [3, 9, 0] {
            assert_eq!(of_use(&mut recent, number), Some(number));
        }
        for number in [1, 7, 8] {
            assert_eq!(of_use(&mut recent, number), None);
        }
        // Where all were of use there is room for newcomers all the same, and not for one alone.
        let keys: Vec<Key> = recent.entries.keys().copied().collect();
        assert!(keys.iter().all(|key| recent.use_fresh(key, BOUNDS).is_some()));
        assert_eq!(insert(&mut recent, 200..300), 10);
        assert_eq!(keys.iter().filter(|key| recent.get(key).is_some()).count(), 8);
        assert_eq!((of_use(&mut recent, 298), of_use(&mut recent, 299)), (Some(298), Some(299)));
        // The room of a single one is that of the latest.
        let one = Bounds { capacity: 1, ..BOUNDS };
        let mut recent = ProbationaryCache::default();
        for number in 0..3 {
            recent.insert(Key::from(number), number, one);
            assert_eq!(recent.use_fresh(&Key::from(number), one), Some(&number));
        }
        assert_eq!(recent.entries.len(), 1);
    }

    /// What was of use stayed so for ever: one place was left for all who came once that were as many as there was room for.
    #[tokio::test(start_paused = true)]
    async fn what_was_of_use_long_ago_makes_room_for_newcomers() {
        let mut recent = ProbationaryCache::default();
        assert_eq!(insert(&mut recent, 0..10), 10);
        assert!((0..10).all(|number| of_use(&mut recent, number).is_some()));
        tokio::time::advance(BOUNDS.time_to_live).await;
        // More than the places that only newcomers have.
        let mut questions = 0;
        for number in (100..105).cycle().take(500) {
            if of_use(&mut recent, number).is_none() {
                questions += 1;
                assert_eq!(insert(&mut recent, number..number + 1), 10);
            }
        }
        assert_eq!(questions, 5);
    }
}
