use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;
use indexmap::map::raw_entry_v1::{RawEntryApiV1, RawEntryMut};
use tokio::time::Instant;

use super::policy::Policy;
use crate::key::Key;

/// More than any machine has cores that would all ask at once.
const MAX_SHARDS: usize = 64;
/// With fewer entries than this to a shard, shards cost more than they save.
const MIN_SHARD: usize = 64;
/// How many entries are looked at to find the one that can go.
const SAMPLE: usize = 8;

/// What a decorator remembers of some of the subjects that are counted: a bounded map in parts, each under its own lock.
///
/// Keys are hashed with a secret of the process, so nobody can choose keys that collide.
#[derive(Debug)]
pub(super) struct Shards<T, B> {
    hasher: RandomState,
    shards: Box<[Mutex<Shard<T, B>>]>,
}

/// Something that says nothing any more from some instant on.
pub(super) trait Expiry {
    fn ends(&self) -> Instant;
}

/// A part of the subjects. Entries lie in a dense array behind the map, so that a few can be looked at by number.
#[derive(Debug)]
pub(super) struct Shard<T, B> {
    /// The books of whoever owns it.
    pub(super) books: B,
    // Without a hasher: the keyed hash is taken once, to find the shard, and used here as it is.
    slots: IndexMap<Descriptor, T, ()>,
    capacity: usize,
    // Where to look next for entries that can go.
    hand: usize,
}

/// Who is counted, and by which policy.
#[derive(Debug)]
struct Descriptor {
    policy: Policy,
    key: Key,
}

impl Descriptor {
    fn is(policy: &Policy, key: &Key) -> impl Fn(&Descriptor) -> bool {
        move |subject| subject.key == *key && subject.policy.shares_counts_with(policy)
    }
}

/// Where a subject is, if it is anywhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) hash: u64,
    shard: usize,
}

impl<T, B: Default> Shards<T, B> {
    /// Room for at most `capacity` entries, and for at least one.
    pub(super) fn new(capacity: usize) -> Self {
        let fitting = (capacity / MIN_SHARD).clamp(1, MAX_SHARDS);
        let count = if fitting.is_power_of_two() { fitting } else { fitting.next_power_of_two() / 2 };
        let capacity = (capacity / count).max(1);
        let shard = || Mutex::new(Shard { books: B::default(), slots: IndexMap::with_hasher(()), capacity, hand: 0 });
        Self { hasher: RandomState::new(), shards: (0..count).map(|_| shard()).collect() }
    }

    pub(super) fn place(&self, policy: &Policy, key: &Key) -> Place {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key.as_bytes());
        let hash = hasher.finish() ^ policy.counts_hash();
        // The map inside the shard uses the low bits.
        Place { hash, shard: (hash >> 48) as usize & (self.shards.len() - 1) }
    }

    pub(super) fn lock(&self, place: Place) -> MutexGuard<'_, Shard<T, B>> {
        lock(&self.shards[place.shard])
    }

    pub(super) fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Shard<T, B>>> {
        self.shards.iter().map(lock)
    }
}

/// A shard is changed in steps that do not panic, so what a poisoned lock guards is still whole.
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

    pub(super) fn entries_with_books(&mut self) -> (impl Iterator<Item = (&Key, &mut T)>, &mut B) {
        (self.slots.iter_mut().map(|(subject, entry)| (&subject.key, entry)), &mut self.books)
    }

    pub(super) fn get_mut(&mut self, place: Place, policy: &Policy, key: &Key) -> Option<&mut T> {
        self.get_with_books(place, policy, key).0
    }

    pub(super) fn get_with_books(&mut self, place: Place, policy: &Policy, key: &Key) -> (Option<&mut T>, &mut B) {
        let entry = match self.slots.raw_entry_mut_v1().from_hash(place.hash, Descriptor::is(policy, key)) {
            RawEntryMut::Occupied(entry) => Some(entry.into_mut()),
            RawEntryMut::Vacant(_) => None,
        };
        (entry, &mut self.books)
    }

    pub(super) fn remove(&mut self, place: Place, policy: &Policy, key: &Key) -> Option<T> {
        match self.slots.raw_entry_mut_v1().from_hash(place.hash, Descriptor::is(policy, key)) {
            RawEntryMut::Occupied(entry) => Some(entry.swap_remove()),
            RawEntryMut::Vacant(_) => None,
        }
    }
}

impl<T: Expiry, B> Shard<T, B> {
    /// Puts down an entry in the place of the one there was, and drops a couple of those that have ended as a matter of course.
    /// Where there is no room, drops the one of a few that ends soonest. `gone` is told what was dropped.
    pub(super) fn put(
        &mut self,
        place: Place,
        policy: &Policy,
        key: &Key,
        entry: T,
        now: Instant,
        mut gone: impl FnMut(&mut B, T),
    ) {
        match self.slots.raw_entry_mut_v1().from_hash(place.hash, Descriptor::is(policy, key)) {
            RawEntryMut::Occupied(mut slot) => {
                gone(&mut self.books, slot.insert(entry));
                return;
            }
            RawEntryMut::Vacant(_) => {}
        }
        for _ in 0..2 {
            self.hand = if self.hand + 1 < self.slots.len() { self.hand + 1 } else { 0 };
            if self.slots.get_index(self.hand).is_some_and(|(_, entry)| entry.ends() <= now) {
                self.evict(self.hand, &mut gone);
            }
        }
        if self.slots.len() >= self.capacity {
            // Spread over the whole array, because neighbours came at the same time.
            let (len, stride) = (self.slots.len(), self.slots.len().div_ceil(SAMPLE));
            let sample = (0..SAMPLE).map(|step| (self.hand + step * stride) % len);
            if let Some(victim) = sample.min_by_key(|index| self.slots[*index].ends()) {
                self.evict(victim, &mut gone);
            }
        }
        if let RawEntryMut::Vacant(slot) =
            self.slots.raw_entry_mut_v1().from_hash(place.hash, Descriptor::is(policy, key))
        {
            slot.insert_hashed_nocheck(place.hash, Descriptor { policy: policy.clone(), key: *key }, entry);
        }
    }

    /// The last one takes its place.
    fn evict(&mut self, victim: usize, gone: &mut impl FnMut(&mut B, T)) {
        if let Some((_, entry)) = self.slots.swap_remove_index(victim) {
            gone(&mut self.books, entry);
        }
    }
}
