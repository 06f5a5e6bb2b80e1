//! The keys whose responses must not be stored, as far as this process knows.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::key::Key;

/// The marked keys. Requests for these keys do not wait for a load of another request, and do not read the store.
#[derive(Default)]
pub(super) struct Uncached(Mutex<Marks>);

#[derive(Default)]
struct Marks {
    until: HashMap<Key, Instant>,
    // The marks in the order of their insertion, including marks that have been removed or replaced.
    order: VecDeque<(Key, Instant)>,
}

impl Uncached {
    /// The largest number of marks. A further mark displaces the oldest one, which the store still has.
    const CAPACITY: usize = 10_000;

    pub(super) fn has(&self, key: &Key) -> bool {
        self.lock().until.get(key).is_some_and(|until| Instant::now() < *until)
    }

    /// Marks a key. If there are too many marks, removes the oldest one.
    pub(super) fn insert(&self, key: Key, time: Duration) {
        let mut marks = self.lock();
        let until = Instant::now() + time;
        marks.until.insert(key, until);
        marks.order.push_back((key, until));
        if marks.order.len() > Self::CAPACITY
            && let Some((oldest, until)) = marks.order.pop_front()
            && marks.until.get(&oldest) == Some(&until)
        {
            marks.until.remove(&oldest);
        }
    }

    pub(super) fn remove(&self, key: &Key) {
        self.lock().until.remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, Marks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(10);

    fn size(uncached: &Uncached) -> (usize, usize) {
        let marks = uncached.lock();
        (marks.until.len(), marks.order.len())
    }

    #[tokio::test(start_paused = true)]
    async fn mark_ends_or_is_removed() {
        let uncached = Uncached::default();
        uncached.insert(Key::from("a"), TIME);
        uncached.insert(Key::from("b"), TIME);
        uncached.remove(&Key::from("b"));
        assert!(uncached.has(&Key::from("a")) && !uncached.has(&Key::from("b")));
        tokio::time::advance(TIME).await;
        assert!(!uncached.has(&Key::from("a")));
    }

    /// Regression: a full table was searched for marks that have ended, and had no room for new keys.
    #[tokio::test(start_paused = true)]
    async fn new_mark_displaces_the_oldest() {
        let uncached = Uncached::default();
        for number in 0..2 * Uncached::CAPACITY {
            uncached.insert(Key::from(number as u64), TIME);
        }
        assert_eq!(size(&uncached), (Uncached::CAPACITY, Uncached::CAPACITY));
        assert!(uncached.has(&Key::from(2 * Uncached::CAPACITY as u64 - 1)));
        assert!(!uncached.has(&Key::from(Uncached::CAPACITY as u64 - 1)));
    }

    #[tokio::test(start_paused = true)]
    async fn renewed_mark_outlasts_older_marks() {
        let uncached = Uncached::default();
        uncached.insert(Key::from("a"), TIME);
        uncached.insert(Key::from("b"), TIME);
        tokio::time::advance(TIME / 2).await;
        uncached.insert(Key::from("a"), TIME);
        for number in 0..Uncached::CAPACITY as u64 - 1 {
            uncached.insert(Key::from(number), TIME);
        }
        assert!(uncached.has(&Key::from("a")) && !uncached.has(&Key::from("b")));
    }

    #[tokio::test(start_paused = true)]
    async fn removed_marks_do_not_accumulate() {
        let uncached = Uncached::default();
        for _ in 0..2 * Uncached::CAPACITY {
            uncached.insert(Key::from("a"), TIME);
            uncached.remove(&Key::from("a"));
        }
        uncached.insert(Key::from("b"), TIME);
        assert_eq!(size(&uncached), (1, Uncached::CAPACITY));
    }
}
