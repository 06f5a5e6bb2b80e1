use std::sync::{Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;

use crate::key::Key;

/// How many keys to inspect when one must be forgotten.
const LOOKED_AT: usize = 8;

/// The largest fence of each remembered key.
#[derive(Debug)]
pub(super) struct FenceTable {
    capacity: usize,
    seen: Mutex<TableState>,
}

#[derive(Debug, Default)]
struct TableState {
    largest: IndexMap<Key, u64>,
    // The largest forgotten fence.
    forgotten: u64,
    // Where to look next for a key to forget.
    hand: usize,
}

impl FenceTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), seen: Mutex::default() }
    }

    /// No code panics while it holds the lock, so a poisoned lock is intact.
    fn seen(&self) -> MutexGuard<'_, TableState> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a fence, unless it is smaller than the largest one of its key. A key that is not remembered is compared with the largest
    /// forgotten fence of all keys. The error is the larger fence.
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

impl TableState {
    /// Of the next few keys, forgets the one with the smallest fence: an old fence is least likely to be sent again.
    fn forget_one(&mut self) {
        let len = self.largest.len();
        let indexes = (0..LOOKED_AT.min(len)).map(|step| (self.hand + step) % len);
        let oldest = indexes.min_by_key(|index| self.largest.get_index(*index).map(|(_, fence)| *fence));
        self.hand = (self.hand + LOOKED_AT) % len;
        if let Some((_, fence)) = oldest.and_then(|index| self.largest.swap_remove_index(index)) {
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
        // A late fence is refused, whether its key is remembered or not.
        for i in 0..10_000_u64 {
            assert!(fences.admit(i.into(), 999 + i).is_err(), "{i}");
        }
        assert_eq!(fences.admit("new".into(), 20_000), Ok(()));
    }
}
