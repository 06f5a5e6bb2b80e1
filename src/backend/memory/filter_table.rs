//! The exists filters of a memory backend.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::exists_filter::store::{
    Added, BUILD_TTL, Block, FilterStatus, KeyBits, Layout, NewBits, Token, Version, VersionIds,
};
use crate::error::StoreError;
use crate::key::Key;

/// How many bytes all exists filters together may use for each key of the capacity.
const BYTES_PER_KEY: u64 = 1_024;

/// The filters of one memory backend and its clones. The table never evicts a filter. A new version that does not fit is refused.
pub(super) struct FilterTable {
    filters: RwLock<Filters>,
    // The most bytes of all versions together.
    capacity: u64,
}

#[derive(Default)]
struct Filters {
    ids: HashMap<Key, VersionIds>,
    versions: HashMap<(Key, Token), Stored>,
    // The bytes of all versions.
    bytes: u64,
}

struct Stored {
    layout: Layout,
    blocks: Vec<[u32; 8]>,
    keys: u64,
    bits: u64,
    active_since: Option<Instant>,
    expires: Instant,
}

impl FilterTable {
    pub(super) fn new(capacity: usize) -> Self {
        Self { filters: RwLock::default(), capacity: (capacity as u64).saturating_mul(BYTES_PER_KEY) }
    }

    pub(super) fn status(&self, filter: &Key) -> FilterStatus {
        let (filters, now) = (self.read(), Instant::now());
        let ids = filters.ids.get(filter).copied().unwrap_or_default();
        let version = |id: Option<Token>| {
            let stored = filters.version(filter, &id?, now)?;
            let age = stored.active_since.map_or(Duration::ZERO, |since| now - since);
            Some(Version::new(stored.layout, stored.keys, stored.bits, age))
        };
        FilterStatus::new(ids, version(ids.active), version(ids.building))
    }

    pub(super) fn read_block(&self, filter: &Key, version: &Token, block: u32) -> Option<Block> {
        let filters = self.read();
        filters.version(filter, version, Instant::now())?.blocks.get(block as usize).map(to_bytes)
    }

    pub(super) fn read_blocks(&self, filter: &Key, version: &Token, first: u32, count: u32) -> Option<Vec<Block>> {
        let (filters, first) = (self.read(), first as usize);
        let blocks = filters.version(filter, version, Instant::now())?.blocks.get(first..first + count as usize)?;
        Some(blocks.iter().map(to_bytes).collect())
    }

    /// Allocates the whole version in one call. That is fast, because the operating system provides a page of zeros at its first write.
    pub(super) fn allocate(&self, filter: &Key, version: &Token, layout: &Layout) -> Result<bool, StoreError> {
        let (mut filters, now) = (self.write(), Instant::now());
        let expires = now + BUILD_TTL;
        if let Some(stored) = filters.version_mut(filter, version, now) {
            stored.expires = expires;
            return Ok(true);
        }
        filters.remove_expired(now);
        if filters.bytes.saturating_add(layout.bytes()) > self.capacity {
            return Err(StoreError::out_of_memory(format!(
                "the exists filters of a memory backend have {} bytes at most",
                self.capacity
            )));
        }
        filters.bytes += layout.bytes();
        let blocks = vec![[0; 8]; layout.blocks as usize];
        let stored = Stored { layout: *layout, blocks, keys: 0, bits: 0, active_since: None, expires };
        filters.versions.insert((*filter, *version), stored);
        Ok(true)
    }

    pub(super) fn begin_build(&self, filter: &Key, seen: &VersionIds, version: &Token) -> bool {
        let (mut filters, now) = (self.write(), Instant::now());
        let start = VersionIds::new(seen.active, Some(*version));
        let found = filters.ids.get(filter).copied().unwrap_or_default();
        if found == start {
            return true;
        }
        if found != *seen || filters.version(filter, version, now).is_none() {
            return false;
        }
        filters.remove(filter, seen.building);
        filters.ids.insert(*filter, start);
        true
    }

    pub(super) fn add_bits(&self, filter: &Key, seen: &VersionIds, bits: &NewBits) -> Added {
        let (mut filters, now) = (self.write(), Instant::now());
        let found = filters.ids.get(filter).copied().unwrap_or_default();
        if found == VersionIds::default() {
            // Unlike Redis, this table never loses the ids of a version in use. Without ids, no version is in use, so callers need not
            // wait.
            return Added::Missing { missing_for: Duration::MAX };
        }
        if found != *seen {
            return Added::Changed;
        }
        let mut add = |id: Option<Token>, bits: &[KeyBits], expires: Option<Instant>| {
            let Some(stored) = id.and_then(|id| filters.version_mut(filter, &id, now)) else { return false };
            bits.iter().for_each(|bits| stored.set(bits));
            stored.expires = expires.unwrap_or(stored.expires);
            true
        };
        let active = add(seen.active, &bits.active, Some(now + bits.ttl));
        let building = add(seen.building, &bits.building, bits.is_build.then(|| now + BUILD_TTL));
        Added::Done { active, building }
    }

    pub(super) fn end_build(&self, filter: &Key, seen: &VersionIds, is_complete: bool, ttl: Duration) -> bool {
        let (mut filters, now) = (self.write(), Instant::now());
        let (ended, found) = (seen.after_build(is_complete), filters.ids.get(filter).copied().unwrap_or_default());
        if found == ended {
            return true;
        }
        if found != *seen {
            return false;
        }
        if is_complete {
            let Some(stored) = seen.building.and_then(|id| filters.version_mut(filter, &id, now)) else { return false };
            stored.active_since = Some(now);
            stored.expires = now + ttl;
            filters.remove(filter, seen.active);
        } else {
            filters.remove(filter, seen.building);
        }
        filters.ids.insert(*filter, ended);
        true
    }

    /// No code panics in the middle of a change, so a poisoned table is intact.
    fn read(&self) -> RwLockReadGuard<'_, Filters> {
        self.filters.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Filters> {
        self.filters.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Filters {
    fn version(&self, filter: &Key, version: &Token, now: Instant) -> Option<&Stored> {
        self.versions.get(&(*filter, *version)).filter(|stored| now < stored.expires)
    }

    fn version_mut(&mut self, filter: &Key, version: &Token, now: Instant) -> Option<&mut Stored> {
        self.versions.get_mut(&(*filter, *version)).filter(|stored| now < stored.expires)
    }

    fn remove(&mut self, filter: &Key, version: Option<Token>) {
        if let Some(stored) = version.and_then(|version| self.versions.remove(&(*filter, version))) {
            self.bytes -= stored.layout.bytes();
        }
    }

    /// Removes expired versions, and filters without versions.
    fn remove_expired(&mut self, now: Instant) {
        let Self { ids, versions, bytes } = self;
        versions.retain(|_, stored| now < stored.expires);
        *bytes = versions.values().map(|stored| stored.layout.bytes()).sum();
        ids.retain(|filter, ids| {
            [ids.active, ids.building].into_iter().flatten().any(|id| versions.contains_key(&(*filter, id)))
        });
    }
}

/// The block as little-endian bytes.
fn to_bytes(words: &[u32; 8]) -> Block {
    let mut bytes = [0; Layout::BLOCK_LEN];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

impl Stored {
    fn set(&mut self, bits: &KeyBits) {
        let Some(block) = self.blocks.get_mut(bits.block as usize) else { return };
        let mut new = 0;
        for (word, wanted) in block.iter_mut().zip(bits.words) {
            new += u64::from((wanted & !*word).count_ones());
            *word |= wanted;
        }
        self.bits += new;
        self.keys += u64::from(new > 0);
    }
}
