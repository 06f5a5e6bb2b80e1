//! Tags: checks whether the tags of an entry are current, and reads the generations for a new entry.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::store::{CacheKey, TagGeneration, Token};
use super::store_client::StoreClient;
use crate::error::StoreError;
use crate::key::Key;

/// The generations of tags that this process has read lately.
#[derive(Default)]
pub(super) struct Generations(Mutex<Cached>);

#[derive(Default)]
struct Cached {
    by_tag: HashMap<Key, (Token, Instant)>,
    // Calls of `remove`.
    removals: u64,
}

/// The time, and the number of removals, just before a store call that reads a generation.
#[derive(Clone, Copy)]
struct ReadAt {
    time: Instant,
    removals: u64,
}

impl Generations {
    /// How long an invalidation by another process may go unnoticed.
    const MAX_AGE: Duration = Duration::from_secs(1);
    const CAPACITY: usize = 10_000;

    /// Whether this process has read all these generations within the last second. If not, only the store can tell.
    pub(super) fn are_cached(&self, tags: &[TagGeneration]) -> bool {
        tags.iter().all(|tag| self.cached(&tag.tag) == Some(tag.generation))
    }

    /// Whether all tags of an entry have the generations that they had before its load.
    pub(super) async fn are_current(
        &self,
        client: &StoreClient,
        cache: &Key,
        tags: &[TagGeneration],
    ) -> Result<bool, StoreError> {
        if self.are_cached(tags) {
            return Ok(true);
        }
        // A generation may have been replaced since it was read, so a generation that differs is read again.
        let unknown = tags.iter().filter(|tag| self.cached(&tag.tag) != Some(tag.generation));
        let current = join_all(unknown.map(|tag| self.is_current(client, cache, tag))).await;
        current.into_iter().try_fold(true, |all, is_current| Ok(all && is_current?))
    }

    async fn is_current(&self, client: &StoreClient, cache: &Key, tag: &TagGeneration) -> Result<bool, StoreError> {
        let read_at = self.read_at();
        let found = client.call(client.store.generation(&CacheKey::new(*cache, tag.tag))).await?;
        if let Some(generation) = found {
            self.insert(tag.tag, generation, read_at);
        }
        Ok(found == Some(tag.generation))
    }

    /// The generations for an entry whose load begins after this call. Creates missing ones.
    pub(super) async fn current(
        &self,
        client: &StoreClient,
        cache: &Key,
        tags: &[Key],
        ttl: Duration,
    ) -> Result<Vec<TagGeneration>, StoreError> {
        join_all(tags.iter().map(|tag| self.read_or_create(client, cache, tag, ttl))).await.into_iter().collect()
    }

    async fn read_or_create(
        &self,
        client: &StoreClient,
        cache: &Key,
        tag: &Key,
        ttl: Duration,
    ) -> Result<TagGeneration, StoreError> {
        let (read_at, new) = (self.read_at(), Token::random()?);
        let key = CacheKey::new(*cache, *tag);
        let generation = client.call(client.store.ensure_generation(&key, &new, ttl)).await?;
        self.insert(*tag, generation, read_at);
        Ok(TagGeneration { tag: *tag, generation })
    }

    fn cached(&self, tag: &Key) -> Option<Token> {
        let (generation, read_at) = self.lock().by_tag.get(tag).copied()?;
        (read_at.elapsed() < Self::MAX_AGE).then_some(generation)
    }

    fn read_at(&self) -> ReadAt {
        ReadAt { time: Instant::now(), removals: self.lock().removals }
    }

    /// Keeps a generation, unless this process has invalidated any tag since `read_at`.
    fn insert(&self, tag: Key, generation: Token, read_at: ReadAt) {
        let mut cached = self.lock();
        if cached.removals != read_at.removals {
            return;
        }
        if cached.by_tag.len() >= Self::CAPACITY {
            cached.by_tag.retain(|_, (_, read)| read.elapsed() < Self::MAX_AGE);
        }
        if cached.by_tag.len() < Self::CAPACITY {
            cached.by_tag.insert(tag, (generation, read_at.time));
        }
    }

    /// Removes the generation of a tag, so that its next use reads the store.
    pub(super) fn remove(&self, tag: &Key) {
        let mut cached = self.lock();
        cached.by_tag.remove(tag);
        cached.removals += 1;
    }

    fn lock(&self) -> MutexGuard<'_, Cached> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
