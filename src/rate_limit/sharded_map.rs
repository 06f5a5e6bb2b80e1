use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;
use indexmap::map::raw_entry_v1::{RawEntryApiV1, RawEntryMut};
use tokio::time::Instant;

use super::policy::Policy;
use crate::key::Key;

/// Enough shards that threads rarely wait for the same lock.
const MAX_SHARDS: usize = 64;
/// With fewer entries per shard, shards cost more than they save.
const MIN_SHARD: usize = 64;
/// How many entries are examined to find one to evict.
const SAMPLE: usize = 8;

/// A bounded map from policy and key to an entry, in shards with one lock each. Used by stores that decorate others.
///
/// Keys are hashed with a random seed of the process, so clients cannot choose colliding keys.
#[derive(Debug)]
pub(super) struct ShardedMap<T, B> {
    hasher: RandomState,
    shards: Box<[Mutex<Shard<T, B>>]>,
}

/// An entry that expires.
pub(super) trait Expiry {
    fn expires_at(&self) -> Instant;
}

/// A part of the map. Entries are in a dense array, so that a few can be examined by index.
#[derive(Debug)]
pub(super) struct Shard<T, B> {
    /// What the owner of the map keeps for each shard.
    pub(super) state: B,
    // Without a hasher: the keyed hash that selects the shard is reused here.
    slots: IndexMap<Descriptor, T, ()>,
    capacity: usize,
    // The index at which the search for expired entries continues.
    sweep_cursor: usize,
}

/// A policy and the key under which it counts.
#[derive(Debug)]
struct Descriptor {
    policy: Policy,
    key: Key,
}

impl Descriptor {
    fn is(policy: &Policy, key: &Key) -> impl Fn(&Descriptor) -> bool {
        move |descriptor| descriptor.key == *key && descriptor.policy.shares_counts_with(policy)
    }
}

/// The location of a descriptor, whether or not it has an entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub(super) hash: u64,
    shard: usize,
}

impl<T, B: Default> ShardedMap<T, B> {
    /// Creates a map with room for at most `capacity` entries, and for at least one.
    pub(super) fn new(capacity: usize) -> Self {
        let fitting = (capacity / MIN_SHARD).clamp(1, MAX_SHARDS);
        let count = if fitting.is_power_of_two() { fitting } else { fitting.next_power_of_two() / 2 };
        let capacity = (capacity / count).max(1);
        let shard =
            || Mutex::new(Shard { state: B::default(), slots: IndexMap::with_hasher(()), capacity, sweep_cursor: 0 });
        Self { hasher: RandomState::new(), shards: (0..count).map(|_| shard()).collect() }
    }

    pub(super) fn locate(&self, policy: &Policy, key: &Key) -> Location {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key.as_bytes());
        let hash = hasher.finish() ^ policy.counts_hash();
        // The map in the shard uses the low bits.
        Location { hash, shard: (hash >> 48) as usize & (self.shards.len() - 1) }
    }

    pub(super) fn lock(&self, location: Location) -> MutexGuard<'_, Shard<T, B>> {
        lock(&self.shards[location.shard])
    }

    pub(super) fn lock_each(&self) -> impl Iterator<Item = MutexGuard<'_, Shard<T, B>>> {
        self.shards.iter().map(lock)
    }
}

/// Updates of a shard do not panic midway, so its data is intact even if the lock is poisoned.
fn lock<T>(shard: &Mutex<T>) -> MutexGuard<'_, T> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T, B> Shard<T, B> {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &T> {
        self.slots.values()
    }

    pub(super) fn entries_with_state(&mut self) -> (impl Iterator<Item = (&Key, &mut T)>, &mut B) {
        (self.slots.iter_mut().map(|(descriptor, entry)| (&descriptor.key, entry)), &mut self.state)
    }

    pub(super) fn get_mut(&mut self, location: Location, policy: &Policy, key: &Key) -> Option<&mut T> {
        self.get_with_state(location, policy, key).0
    }

    pub(super) fn get_with_state(
        &mut self,
        location: Location,
        policy: &Policy,
        key: &Key,
    ) -> (Option<&mut T>, &mut B) {
        let entry = match self.slots.raw_entry_mut_v1().from_hash(location.hash, Descriptor::is(policy, key)) {
            RawEntryMut::Occupied(entry) => Some(entry.into_mut()),
            RawEntryMut::Vacant(_) => None,
        };
        (entry, &mut self.state)
    }

    pub(super) fn remove(&mut self, location: Location, policy: &Policy, key: &Key) -> Option<T> {
        match self.slots.raw_entry_mut_v1().from_hash(location.hash, Descriptor::is(policy, key)) {
            RawEntryMut::Occupied(entry) => Some(entry.swap_remove()),
            RawEntryMut::Vacant(_) => None,
        }
    }
}

impl<T: Expiry, B> Shard<T, B> {
    /// Replaces an entry, or inserts it and removes up to two expired ones. If an insert finds no room, it examines a sample and evicts the
    /// entry that expires first. Calls `on_removed` with each replaced or removed entry.
    pub(super) fn put(
        &mut self,
        location: Location,
        policy: &Policy,
        key: &Key,
        entry: T,
        now: Instant,
        mut on_removed: impl FnMut(&mut B, T),
    ) {
        match self.slots.raw_entry_mut_v1().from_hash(location.hash, Descriptor::is(policy, key)) {
            RawEntryMut::Occupied(mut slot) => {
                on_removed(&mut self.state, slot.insert(entry));
                return;
            }
            RawEntryMut::Vacant(_) => {}
        }
        for _ in 0..2 {
            self.sweep_cursor = if self.sweep_cursor + 1 < self.slots.len() { self.sweep_cursor + 1 } else { 0 };
            if self.slots.get_index(self.sweep_cursor).is_some_and(|(_, entry)| entry.expires_at() <= now) {
                self.evict(self.sweep_cursor, &mut on_removed);
            }
        }
        if self.slots.len() >= self.capacity {
            // The sample is spread over the array, since neighbours were inserted at about the same time.
            let (len, stride) = (self.slots.len(), self.slots.len().div_ceil(SAMPLE));
            let sample = (0..SAMPLE).map(|step| (self.sweep_cursor + step * stride) % len);
            if let Some(victim) = sample.min_by_key(|index| self.slots[*index].expires_at()) {
                self.evict(victim, &mut on_removed);
            }
        }
        if let RawEntryMut::Vacant(slot) =
            self.slots.raw_entry_mut_v1().from_hash(location.hash, Descriptor::is(policy, key))
        {
            slot.insert_hashed_nocheck(location.hash, Descriptor { policy: policy.clone(), key: *key }, entry);
        }
    }

    /// Removes the entry at index `victim`. The last entry takes its index.
    fn evict(&mut self, victim: usize, on_removed: &mut impl FnMut(&mut B, T)) {
        if let Some((_, entry)) = self.slots.swap_remove_index(victim) {
            on_removed(&mut self.state, entry);
        }
    }
}
