use indexmap::IndexMap;
use indexmap::map::raw_entry_v1::{RawEntryApiV1, RawEntryMut};

use super::rate_limit::Count;
use crate::key::Key;
use crate::rate_limit::Policy;

/// How many keys are looked at to find one that can go. The least valuable of eight is among the lowest third nearly
/// always, which is as good as the least of all for this purpose, and takes the same time however many keys there are.
const SAMPLE: usize = 8;

/// A part of the keys, under one lock.
///
/// Keys lie in a dense array behind the hash map, so "the next few keys" is a slice: this is what lets a full shard find a
/// key to forget, and any shard drop stale keys, without a list of ages or a background task.
pub(super) struct Shard {
    // Without a hasher: the keyed hash is taken once, to find the shard, and used here as it is.
    slots: IndexMap<Subject, Count, ()>,
    capacity: usize,
    // The sum of the weights of all counts.
    weight: usize,
    // Where to look next for keys that can go.
    hand: usize,
}

/// Who is counted, and by which policy.
struct Subject {
    policy: Policy,
    key: Key,
}

impl Subject {
    fn is(policy: &Policy, key: &Key) -> impl Fn(&Subject) -> bool {
        move |subject| subject.key == *key && subject.policy.shares_counts_with(policy)
    }
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        Self { slots: IndexMap::with_hasher(()), capacity, weight: 0, hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Where the count of a subject is, if there is one that still says something.
    pub(super) fn find(&self, hash: u64, policy: &Policy, key: &Key, now_us: u64) -> Option<usize> {
        let (index, _, count) = self.slots.raw_entry_v1().from_hash_full(hash, Subject::is(policy, key))?;
        (count.expires_us() > now_us).then_some(index)
    }

    pub(super) fn count_mut(&mut self, index: usize) -> &mut Count {
        &mut self.slots[index]
    }

    /// Puts down the count of a subject and makes room for it.
    pub(super) fn put(&mut self, hash: u64, policy: &Policy, key: &Key, count: Count, now_us: u64) {
        let weight = count.weight();
        let entry = self.slots.raw_entry_mut_v1().from_hash(hash, Subject::is(policy, key));
        let mut index = entry.index();
        match entry {
            RawEntryMut::Occupied(mut stale) => self.weight -= stale.insert(count).weight(),
            RawEntryMut::Vacant(place) => {
                place.insert_hashed_nocheck(hash, Subject { policy: policy.clone(), key: *key }, count);
            }
        }
        self.weight += weight;
        for _ in 0..2 {
            self.sweep(&mut index, now_us);
        }
        self.make_room(index, now_us);
    }

    /// Accounts for a count that weighs `added` more than before.
    pub(super) fn grew(&mut self, index: usize, added: usize, now_us: u64) {
        self.weight += added;
        self.make_room(index, now_us);
    }

    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) {
        if let RawEntryMut::Occupied(entry) = self.slots.raw_entry_mut_v1().from_hash(hash, Subject::is(policy, key)) {
            self.weight -= entry.swap_remove().weight();
        }
    }

    /// Forgets others than the count at `keep` until all fit. Each turn removes one, so this ends; as room is made for every
    /// count that comes or grows, it ends after a turn or two.
    fn make_room(&mut self, mut keep: usize, now_us: u64) {
        while self.weight > self.capacity && self.slots.len() > 1 {
            let victim = self.least_valuable(keep, now_us);
            self.evict(victim, &mut keep);
        }
    }

    /// Moves the hand by one key and drops the key it passes if it is stale.
    fn sweep(&mut self, keep: &mut usize, now_us: u64) {
        self.hand = if self.hand + 1 < self.slots.len() { self.hand + 1 } else { 0 };
        if self.hand != *keep && self.slots[self.hand].expires_us() <= now_us {
            self.evict(self.hand, keep);
        }
    }

    /// Of a few keys a stale one, or else the one that has used least of its quota and will be forgotten soonest.
    ///
    /// The keys are spread over the whole array, because neighbours came at the same time and are often of the same kind.
    fn least_valuable(&mut self, keep: usize, now_us: u64) -> usize {
        let len = self.slots.len();
        let rank = |index: &usize| match self.slots.get_index(*index) {
            Some((subject, count)) if count.expires_us() > now_us => (count.value(&subject.policy), count.expires_us()),
            _ => (0, 0),
        };
        let stride = len.div_ceil(SAMPLE);
        let sample = (0..SAMPLE).map(|step| (self.hand + step * stride) % len);
        let victim = sample.filter(|index| *index != keep).min_by_key(rank);
        self.hand = (self.hand + 1) % len;
        victim.unwrap_or((keep + 1) % len)
    }

    /// Removes the count at `victim`; the last one takes its place, which may be the one at `keep`.
    fn evict(&mut self, victim: usize, keep: &mut usize) {
        let last = self.slots.len() - 1;
        if let Some((_, count)) = self.slots.swap_remove_index(victim) {
            self.weight -= count.weight();
        }
        if *keep == last {
            *keep = victim;
        }
    }
}
