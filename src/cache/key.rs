use std::fmt;
use std::hash::{Hash, Hasher};

use crate::key::Key;

/// Identifies an entry: a key within a cache of some name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CacheKey {
    cache: Key,
    key: Key,
}

impl CacheKey {
    /// The entry with this key, in the cache of this name.
    pub fn new(cache: impl Into<Key>, key: impl Into<Key>) -> Self {
        Self { cache: cache.into(), key: key.into() }
    }

    /// The name of the cache.
    #[must_use]
    pub const fn cache(&self) -> &Key {
        &self.cache
    }

    /// The key within the cache.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.key
    }
}

// Hand-written, because a key is an array of the maximum length, and most keys are short.
impl Hash for CacheKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.cache.as_hashed().hash(state);
        self.key.as_hashed().hash(state);
    }
}

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheKey({self})")
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.cache, self.key)
    }
}
