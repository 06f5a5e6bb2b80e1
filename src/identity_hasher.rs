//! A hasher for keys that are hashes already.

use std::hash::{BuildHasherDefault, Hasher};

/// For maps whose keys write one keyed hash, such as [`LockKey`](crate::lock::store::LockKey) and [`Token`](crate::lock::store::Token).
pub(crate) type IdentityBuildHasher = BuildHasherDefault<IdentityHasher>;

/// Uses the hash as it is.
#[derive(Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys of this map write their hash with `write_u64`");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
