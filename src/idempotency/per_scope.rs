use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::identity_hasher::IdentityBuildHasher;
use crate::key::Key;

/// The number of parts. Threads that lock different parts do not wait for each other.
const PARTS: usize = 16;

/// Counts by scope, under a keyed hash of the scope. A scope whose count is 0 takes no memory.
#[derive(Default)]
pub(super) struct PerScope {
    hasher: RandomState,
    parts: [Mutex<HashMap<u64, usize, IdentityBuildHasher>>; PARTS],
}

impl PerScope {
    /// Counts one more, unless the scope has `max` already. Returns the hash to [give back](Self::leave).
    pub(super) fn enter(&self, scope: &Key, max: usize) -> Option<u64> {
        let hash = self.hasher.hash_one(scope.as_hashed());
        let mut part = self.part(hash);
        let count = part.entry(hash).or_default();
        if *count >= max {
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

    /// No code panics while it holds the lock, so a poisoned part is intact.
    fn part(&self, hash: u64) -> MutexGuard<'_, HashMap<u64, usize, IdentityBuildHasher>> {
        // The map of a part uses the other half of the hash.
        self.parts[(hash >> 32) as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        (0..PARTS as u64).all(|part| self.part(part << 32).is_empty())
    }
}
