//! The cache entries of this process, and the leases of their loads.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use indexmap::IndexMap;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cache::store::{
    CacheKey, Claim, Claimed, Content, Entry, EntryId, Mark, NewEntry, Notifications, TagGeneration, Token,
};

/// The number of shards. Threads wait for each other only if they use keys of the same shard.
const SHARDS: usize = 16;
/// A shard holds at most this many bytes of values for each entry of its capacity.
const VALUE_BYTES_PER_ENTRY: usize = 1_024;
/// The number of entries that a full shard compares to evict one.
const SAMPLE: usize = 8;

/// The entries of this process. If there is no room for a new entry, the table evicts entries that expire soon.
pub(super) struct CacheTable {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

struct Shard {
    entries: IndexMap<CacheKey, Stored>,
    // The bytes of all values.
    bytes: usize,
    capacity: usize,
    leases: HashMap<CacheKey, Lease>,
    tags: HashMap<CacheKey, Generation>,
    // Notifies waiters.
    watched: HashMap<CacheKey, watch::Sender<()>>,
}

struct Stored {
    id: Token,
    // `None` if the origin has no value for the key.
    value: Option<Bytes>,
    stored_at: Instant,
    fresh_until: Instant,
    expires: Instant,
    load_time: Duration,
    tags: Vec<TagGeneration>,
}

/// The generation of a tag.
struct Generation {
    id: Token,
    expires: Instant,
}

/// The lease of a load, or the mark that a load left.
struct Lease {
    state: LeaseState,
    ends: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaseState {
    Held(Token),
    Failed,
    Uncached,
}

impl Stored {
    fn len(&self) -> usize {
        self.value.as_ref().map_or(0, Bytes::len)
    }
}

impl CacheTable {
    pub(super) fn new(capacity: usize) -> Self {
        let shard = |_| {
            Mutex::new(Shard {
                entries: IndexMap::new(),
                bytes: 0,
                capacity: capacity.div_ceil(SHARDS),
                leases: HashMap::new(),
                tags: HashMap::new(),
                watched: HashMap::new(),
            })
        };
        Self { hasher: RandomState::new(), shards: std::array::from_fn(shard) }
    }

    /// The number of entries, including expired ones before their removal.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| locked(shard).entries.len()).sum()
    }

    fn shard(&self, key: &CacheKey) -> MutexGuard<'_, Shard> {
        locked(&self.shards[self.hasher.hash_one(key) as usize % SHARDS])
    }

    pub(super) fn get(&self, key: &CacheKey) -> Option<Entry> {
        let now = Instant::now();
        self.shard(key).entry(key, now).map(|stored| Entry {
            id: EntryId::from(&stored.id),
            content: stored.value.clone().map_or(Content::Absent, Content::Value),
            age: now - stored.stored_at,
            fresh_for: stored.fresh_until.saturating_duration_since(now),
            expires_in: stored.expires - now,
            load_time: stored.load_time,
            tags: stored.tags.clone(),
        })
    }

    pub(super) fn claim(&self, key: &CacheKey, seen: &EntryId, claim: &Claim) -> Claimed {
        let now = Instant::now();
        let mut shard = self.shard(key);
        let found = shard.entry(key, now).map_or_else(EntryId::default, |stored| EntryId::from(&stored.id));
        if found != *seen {
            return Claimed::Changed;
        }
        if let Some(lease) = shard.lease(key, now) {
            let remaining = lease.ends - now;
            match lease.state {
                LeaseState::Held(token) if token == claim.token => {}
                LeaseState::Held(_) => return Claimed::Busy { remaining },
                LeaseState::Failed => return Claimed::Marked(Mark::Failed { retry_after: remaining }),
                LeaseState::Uncached => return Claimed::Marked(Mark::Uncached { remaining }),
            }
        }
        shard.set_lease(*key, Lease { state: LeaseState::Held(claim.token), ends: now + claim.lease }, now);
        Claimed::Granted
    }

    pub(super) fn renew(&self, key: &CacheKey, claim: &Claim) -> bool {
        let now = Instant::now();
        let mut shard = self.shard(key);
        match shard.lease(key, now).filter(|lease| lease.state == LeaseState::Held(claim.token)) {
            Some(lease) => {
                lease.ends = now + claim.lease;
                true
            }
            None => false,
        }
    }

    pub(super) fn put(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> bool {
        let now = Instant::now();
        let mut shard = self.shard(key);
        if shard.is_held(key, token, now) {
            shard.store(key, token, entry, now);
            return true;
        }
        // A repeated call succeeds if its entry is still stored.
        shard.entry(key, now).is_some_and(|stored| stored.id == *token)
    }

    pub(super) fn release(&self, key: &CacheKey, token: &Token, mark: Option<Mark>) -> bool {
        let now = Instant::now();
        let mut shard = self.shard(key);
        if !shard.is_held(key, token, now) {
            return false;
        }
        match mark {
            None => drop(shard.leases.remove(key)),
            Some(Mark::Failed { retry_after }) => {
                shard.set_lease(*key, Lease { state: LeaseState::Failed, ends: now + retry_after }, now);
            }
            Some(Mark::Uncached { remaining }) => {
                shard.remove(key);
                shard.set_lease(*key, Lease { state: LeaseState::Uncached, ends: now + remaining }, now);
            }
        }
        shard.notify(key);
        true
    }

    pub(super) fn set(&self, key: &CacheKey, token: &Token, entry: &NewEntry) {
        self.shard(key).store(key, token, entry, Instant::now());
    }

    pub(super) fn invalidate(&self, key: &CacheKey) {
        let mut shard = self.shard(key);
        shard.remove(key);
        shard.leases.remove(key);
        shard.notify(key);
    }

    pub(super) fn expire(&self, key: &CacheKey) {
        let now = Instant::now();
        let mut shard = self.shard(key);
        if let Some(stored) = shard.entries.get_mut(key) {
            stored.fresh_until = stored.fresh_until.min(now);
        }
        shard.leases.remove(key);
        shard.notify(key);
    }

    pub(super) fn generation(&self, tag: &CacheKey) -> Option<Token> {
        let now = Instant::now();
        self.shard(tag).tags.get(tag).filter(|generation| now < generation.expires).map(|generation| generation.id)
    }

    pub(super) fn ensure_generation(&self, tag: &CacheKey, new: &Token, ttl: Duration) -> Token {
        let now = Instant::now();
        let mut shard = self.shard(tag);
        let capacity = shard.capacity;
        let tags = &mut shard.tags;
        if tags.len() >= capacity && !tags.contains_key(tag) {
            tags.retain(|_, generation| now < generation.expires);
            if tags.len() >= capacity {
                // Each entry with a tag of this shard is then loaded again.
                tags.clear();
            }
        }
        let generation = tags.entry(*tag).or_insert(Generation { id: *new, expires: now });
        if generation.expires <= now {
            generation.id = *new;
        }
        generation.expires = generation.expires.max(now + ttl);
        generation.id
    }

    pub(super) fn invalidate_tag(&self, tag: &CacheKey) {
        self.shard(tag).tags.remove(tag);
    }

    pub(super) fn watch(self: &Arc<Self>, key: &CacheKey) -> Notifications {
        let changes = self.shard(key).watched.entry(*key).or_insert_with(|| watch::Sender::new(())).subscribe();
        Notifications::new(changes, Arc::new(Watcher { table: Arc::clone(self), key: *key }))
    }
}

/// No code panics in the middle of a change, so a poisoned shard is intact.
fn locked(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shard {
    fn entry(&self, key: &CacheKey, now: Instant) -> Option<&Stored> {
        self.entries.get(key).filter(|stored| now < stored.expires)
    }

    fn lease(&mut self, key: &CacheKey, now: Instant) -> Option<&mut Lease> {
        self.leases.get_mut(key).filter(|lease| now < lease.ends)
    }

    fn is_held(&mut self, key: &CacheKey, token: &Token, now: Instant) -> bool {
        self.lease(key, now).is_some_and(|lease| lease.state == LeaseState::Held(*token))
    }

    /// Sets a lease or a mark. If the shard has `capacity` of them, it removes the ended ones. If that is not enough, it removes all marks.
    fn set_lease(&mut self, key: CacheKey, lease: Lease, now: Instant) {
        if self.leases.len() >= self.capacity && !self.leases.contains_key(&key) {
            self.leases.retain(|_, lease| now < lease.ends);
            if self.leases.len() >= self.capacity {
                self.leases.retain(|_, lease| matches!(lease.state, LeaseState::Held(_)));
            }
        }
        self.leases.insert(key, lease);
    }

    fn store(&mut self, key: &CacheKey, token: &Token, entry: &NewEntry, now: Instant) {
        self.remove(key);
        self.leases.remove(key);
        self.notify(key);
        if entry.value.as_ref().is_some_and(|value| value.len() > self.capacity * VALUE_BYTES_PER_ENTRY) {
            // It would evict everything else, and then itself.
            return;
        }
        let NewEntry { ref value, fresh_for, ttl, load_time, ref tags } = *entry;
        let stored = Stored {
            id: *token,
            value: value.clone(),
            stored_at: now,
            fresh_until: now + fresh_for,
            expires: now + ttl,
            load_time,
            tags: tags.clone(),
        };
        self.bytes += stored.len();
        self.entries.insert(*key, stored);
        while self.entries.len() > self.capacity || self.bytes > self.capacity * VALUE_BYTES_PER_ENTRY {
            self.evict();
        }
    }

    /// Removes the entry that expires first among a few.
    fn evict(&mut self) {
        let len = self.entries.len();
        let start = getrandom::u32().unwrap_or_default() as usize;
        let first = (0..SAMPLE.min(len)).map(|i| (start + i) % len).min_by_key(|&at| self.entries[at].expires);
        if let Some((_, stored)) = first.and_then(|at| self.entries.swap_remove_index(at)) {
            self.bytes -= stored.len();
        }
    }

    fn remove(&mut self, key: &CacheKey) {
        if let Some(stored) = self.entries.swap_remove(key) {
            self.bytes -= stored.len();
        }
    }

    fn notify(&self, key: &CacheKey) {
        if let Some(changes) = self.watched.get(key) {
            changes.send_replace(());
        }
    }
}

/// Removes the channel of a key after its last waiter was dropped.
struct Watcher {
    table: Arc<CacheTable>,
    key: CacheKey,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut shard = self.table.shard(&self.key);
        if shard.watched.get(&self.key).is_some_and(|changes| changes.receiver_count() == 0) {
            shard.watched.remove(&self.key);
        }
    }
}
