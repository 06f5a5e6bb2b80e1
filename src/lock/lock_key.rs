use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::LazyLock;

use crate::key::Key;

/// Identifies a lock: the name of the locks, and the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LockKey {
    // First, because the derived `PartialEq` compares the fields in order, and different locks usually have different hashes. Hashed once,
    // since each acquisition looks the lock up several times.
    hash: u64,
    key: Key,
    name: Key,
}

/// A secret of this process, so that clients cannot choose colliding keys.
static SEED: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl LockKey {
    /// The lock of `key` among the locks named `name`.
    pub fn new(name: impl Into<Key>, key: impl Into<Key>) -> Self {
        let (name, key) = (name.into(), key.into());
        let hash = SEED.hash_one((name.as_hashed(), key.as_hashed()));
        Self { hash, key, name }
    }

    /// The name of the locks, which separates the locks of one purpose from others.
    #[must_use]
    pub const fn name(&self) -> &Key {
        &self.name
    }

    /// The key.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.key
    }

    /// The hash of the lock. Equal locks have equal hashes in this process only.
    #[cfg(feature = "redis")]
    pub(crate) const fn known_hash(&self) -> u64 {
        self.hash
    }

    /// The shard of the lock, from the upper half of the hash. The map in the shard mainly uses the lower half.
    pub(crate) const fn shard(&self, shards: usize) -> usize {
        (self.hash >> 32) as usize % shards
    }
}

impl Hash for LockKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey({self})")
    }
}

impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity_hasher::IdentityBuildHasher;

    #[test]
    fn the_same_lock_has_the_same_hash_and_others_have_others() {
        let hash = |lock: &LockKey| IdentityBuildHasher::default().hash_one(lock);
        let lock = LockKey::new("orders", "42");
        assert_eq!(hash(&lock), hash(&LockKey::new("orders", "42")));
        for other in [LockKey::new("orders", "43"), LockKey::new("order", "42"), LockKey::new("42", "orders")] {
            assert_ne!(lock, other);
            assert_ne!(hash(&lock), hash(&other));
        }
    }

    #[test]
    fn locks_of_one_shard_differ_in_what_the_map_looks_at() {
        let mut hashes = [(); 4].map(|()| Vec::new());
        for number in 0..400 {
            let lock = LockKey::new("orders", number);
            hashes[lock.shard(4)].push(IdentityBuildHasher::default().hash_one(lock) as u32 % 64);
        }
        for hashes in &mut hashes {
            assert!(hashes.len() > 40, "the shards are used alike");
            hashes.sort_unstable();
            hashes.dedup();
            assert!(hashes.len() > 20, "the places of a map are used alike");
        }
    }
}
