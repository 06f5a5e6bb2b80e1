use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::key::Key;

/// More than threads would ask at once.
const PARTS: usize = 16;

/// How many of something each scope has, by a keyed hash of its name. A scope that has none takes no room.
#[derive(Default)]
pub(super) struct PerScope {
    hasher: RandomState,
    parts: [Mutex<HashMap<u64, usize>>; PARTS],
}

impl PerScope {
    /// Counts one more, unless the scope has `most` already. Answers what to [give back](Self::leave).
    pub(super) fn enter(&self, scope: &Key, most: usize) -> Option<u64> {
        let hash = self.hasher.hash_one(scope.as_hashed());
        let mut part = self.part(hash);
        let count = part.entry(hash).or_default();
        if *count >= most {
            if *count == 0 {
                part.remove(&hash);
            }
            return None;
        }
        *count += 1;
        Some(hash)
    }

    pub(super) fn leave(&self, hash: u64) {
        let mut part = self.part(hash);
        if let Some(count) = part.get_mut(&hash) {
            *count -= 1;
            if *count == 0 {
                part.remove(&hash);
            }
        }
    }

    /// Nothing in here panics halfway, so what a poisoned lock guards is whole.
    fn part(&self, hash: u64) -> MutexGuard<'_, HashMap<u64, usize>> {
        // The lower half chooses the place within the part.
        self.parts[(hash >> 32) as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        (0..PARTS as u64).all(|part| self.part(part << 32).is_empty())
    }
}
