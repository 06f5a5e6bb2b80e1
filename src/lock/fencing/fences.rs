use std::sync::{Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;

use crate::key::Key;

/// How many are looked at to find the one that is to be forgotten.
const LOOKED_AT: usize = 8;

/// The largest fence that was seen for each of the keys that are remembered.
#[derive(Debug)]
pub(super) struct FenceTable {
    capacity: usize,
    seen: Mutex<Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    largest: IndexMap<Key, u64>,
    // The largest of those that were forgotten.
    forgotten: u64,
    // Where to look next for one to forget.
    hand: usize,
}

impl FenceTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), seen: Mutex::default() }
    }

    /// Nothing panics halfway in here, so what a poisoned lock guards is whole.
    fn seen(&self) -> MutexGuard<'_, Entry> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a fence, if it is not smaller than what was seen before. If it is the error says what that was.
    pub(super) fn admit(&self, key: Key, fence: u64) -> Result<(), u64> {
        let mut seen = self.seen();
        let seen = &mut *seen;
        if let Some(largest) = seen.largest.get_mut(&key) {
            if fence < *largest {
                return Err(*largest);
            }
            *largest = fence;
            return Ok(());
        }
        if fence < seen.forgotten {
            return Err(seen.forgotten);
        }
        if seen.largest.len() >= self.capacity {
            seen.forget_one();
        }
        seen.largest.insert(key, fence);
        Ok(())
    }
}

impl Entry {
    /// Of some the one with the smallest fence: the later it may come again, the better.
    fn forget_one(&mut self) {
        let len = self.largest.len();
        let places = (0..LOOKED_AT.min(len)).map(|step| (self.hand + step) % len);
        let oldest = places.min_by_key(|place| self.largest.get_index(*place).map(|(_, fence)| *fence));
        self.hand = (self.hand + LOOKED_AT) % len;
        if let Some((_, fence)) = oldest.and_then(|place| self.largest.swap_remove_index(place)) {
            self.forgotten = self.forgotten.max(fence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_fence_is_refused_and_the_same_is_not() {
        let fences = FenceTable::new(10);
        assert_eq!(fences.admit("a".into(), 5), Ok(()));
        assert_eq!(fences.admit("a".into(), 5), Ok(()));
        assert_eq!(fences.admit("a".into(), 4), Err(5));
        assert_eq!(fences.admit("b".into(), 4), Ok(()));
        assert_eq!(fences.admit("a".into(), u64::MAX), Ok(()));
        assert_eq!(fences.admit("a".into(), u64::MAX - 1), Err(u64::MAX));
    }

    #[test]
    fn what_is_forgotten_is_not_let_through_unseen() {
        let fences = FenceTable::new(100);
        for i in 0..10_000_u64 {
            assert_eq!(fences.admit(i.into(), 1_000 + i), Ok(()));
            assert!(fences.seen().largest.len() <= 100);
        }
        // Whoever comes again too late is refused, remembered or not.
        for i in 0..10_000_u64 {
            assert!(fences.admit(i.into(), 999 + i).is_err(), "{i}");
        }
        assert_eq!(fences.admit("new".into(), 20_000), Ok(()));
    }
}
