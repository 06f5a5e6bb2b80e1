use std::time::Duration;

use super::MemoryBackend;
use crate::cache::store::{CacheKey, CacheStore, Claim, Claimed, Entry, EntryId, Mark, NewEntry, Notifications, Token};
use crate::error::StoreError;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl CacheStore for MemoryBackend {
    async fn get(&self, key: &CacheKey) -> Result<Option<Entry>, StoreError> {
        Ok(self.inner.cache.get(key))
    }

    async fn claim(&self, key: &CacheKey, seen: &EntryId, claim: &Claim) -> Result<Claimed, StoreError> {
        Ok(self.inner.cache.claim(key, seen, claim))
    }

    async fn renew(&self, key: &CacheKey, claim: &Claim) -> Result<bool, StoreError> {
        Ok(self.inner.cache.renew(key, claim))
    }

    async fn put(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<bool, StoreError> {
        Ok(self.inner.cache.put(key, token, entry))
    }

    async fn release(&self, key: &CacheKey, token: &Token, mark: Option<Mark>) -> Result<bool, StoreError> {
        Ok(self.inner.cache.release(key, token, mark))
    }

    async fn set(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<(), StoreError> {
        self.inner.cache.set(key, token, entry);
        Ok(())
    }

    async fn invalidate(&self, key: &CacheKey) -> Result<(), StoreError> {
        self.inner.cache.invalidate(key);
        Ok(())
    }

    async fn expire(&self, key: &CacheKey) -> Result<(), StoreError> {
        self.inner.cache.expire(key);
        Ok(())
    }

    async fn generation(&self, tag: &CacheKey) -> Result<Option<Token>, StoreError> {
        Ok(self.inner.cache.generation(tag))
    }

    async fn ensure_generation(&self, tag: &CacheKey, new: &Token, ttl: Duration) -> Result<Token, StoreError> {
        Ok(self.inner.cache.ensure_generation(tag, new, ttl))
    }

    async fn invalidate_tag(&self, tag: &CacheKey) -> Result<(), StoreError> {
        self.inner.cache.invalidate_tag(tag);
        Ok(())
    }

    async fn watch(&self, key: &CacheKey) -> Notifications {
        self.inner.cache.watch(key)
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl MemoryBackend {
    /// Number of cached entries, including expired ones before their removal.
    #[must_use]
    pub fn cache_entries(&self) -> usize {
        self.inner.cache.len()
    }
}
