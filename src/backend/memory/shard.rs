use std::hash::{BuildHasherDefault, Hash, Hasher};

use indexmap::{Equivalent, IndexMap};

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
    slots: IndexMap<Subject, Slot, BuildHasherDefault<Prehashed>>,
    capacity: usize,
    // The sum of the weights of all slots.
    weight: usize,
    // Where to look next for keys that can go.
    hand: usize,
}

/// Who is counted, and by which policy.
struct Subject {
    hash: u64,
    policy: Policy,
    key: Key,
}

/// A subject to look up, without taking a share in its policy.
struct Lookup<'a> {
    hash: u64,
    policy: &'a Policy,
    key: &'a Key,
}

struct Slot {
    count: Count,
    // From here on the count says nothing any more.
    expires_us: u64,
    // The used share of the quota, in 1/65,536: what would be lost by forgetting.
    value: u32,
    weight: usize,
}

impl Shard {
    pub(super) fn new(capacity: usize) -> Self {
        Self { slots: IndexMap::default(), capacity, weight: 0, hand: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Where the count of a subject is, if there is one that still says something.
    pub(super) fn find(&self, hash: u64, policy: &Policy, key: &Key, now_us: u64) -> Option<usize> {
        let (index, _, slot) = self.slots.get_full(&Lookup { hash, policy, key })?;
        (slot.expires_us > now_us).then_some(index)
    }

    pub(super) fn count_mut(&mut self, index: usize) -> &mut Count {
        &mut self.slots[index].count
    }

    /// Puts down the count of a subject and makes room for it.
    pub(super) fn put(&mut self, hash: u64, policy: &Policy, key: &Key, count: Count, now_us: u64) {
        let (expires_us, value, weight) = (count.expires_us(), count.value(policy), count.weight());
        let slot = Slot { count, expires_us, value, weight };
        let (index, old) = self.slots.insert_full(Subject { hash, policy: policy.clone(), key: *key }, slot);
        self.settle(index, old.map_or(0, |old| old.weight), now_us);
    }

    /// Brings the books up to date after a count was charged.
    pub(super) fn changed(&mut self, index: usize, policy: &Policy, now_us: u64) {
        let slot = &mut self.slots[index];
        let old = slot.weight;
        slot.expires_us = slot.count.expires_us();
        slot.value = slot.count.value(policy);
        slot.weight = slot.count.weight();
        self.settle(index, old, now_us);
    }

    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) {
        if let Some(slot) = self.slots.swap_remove(&Lookup { hash, policy, key }) {
            self.weight -= slot.weight;
        }
    }

    /// Accounts for the slot at `index`, which weighed `old` before, then lets go of others: a couple of stale ones as a
    /// matter of course, more for as long as there is no room.
    fn settle(&mut self, index: usize, old: usize, now_us: u64) {
        let mut index = index;
        let weight = self.slots[index].weight;
        self.weight = self.weight - old + weight;
        if old == weight {
            return;
        }
        if old == 0 {
            for _ in 0..2 {
                self.sweep(&mut index, now_us);
            }
        }
        // Each turn removes a slot, so this ends; one that grew by little makes room with one turn or two.
        while self.weight > self.capacity && self.slots.len() > 1 {
            let victim = self.least_valuable(index, now_us);
            self.evict(victim, &mut index);
        }
    }

    /// Moves the hand by one key and drops the key it passes if it is stale.
    fn sweep(&mut self, keep: &mut usize, now_us: u64) {
        self.hand = if self.hand + 1 < self.slots.len() { self.hand + 1 } else { 0 };
        if self.hand != *keep && self.slots[self.hand].expires_us <= now_us {
            self.evict(self.hand, keep);
        }
    }

    /// The next stale key, or else the one of the next few that has used least of its quota and will be forgotten soonest.
    fn least_valuable(&mut self, keep: usize, now_us: u64) -> usize {
        let len = self.slots.len();
        let rank = |index: &usize| {
            let slot = &self.slots[*index];
            if slot.expires_us <= now_us { (0, 0) } else { (slot.value + 1, slot.expires_us) }
        };
        let start = self.hand;
        let sample = (1..=SAMPLE.min(len)).map(|step| (start + step) % len);
        let victim = sample.filter(|index| *index != keep).min_by_key(rank);
        self.hand = (start + SAMPLE) % len;
        victim.unwrap_or((keep + 1) % len)
    }

    /// Removes the slot at `victim`; the last slot takes its place, which may be the one at `keep`.
    fn evict(&mut self, victim: usize, keep: &mut usize) {
        let last = self.slots.len() - 1;
        if let Some((_, slot)) = self.slots.swap_remove_index(victim) {
            self.weight -= slot.weight;
        }
        if *keep == last {
            *keep = victim;
        }
    }
}

impl Hash for Subject {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialEq for Subject {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.policy.shares_counts_with(&other.policy)
    }
}

impl Eq for Subject {}

impl Hash for Lookup<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Equivalent<Subject> for Lookup<'_> {
    fn equivalent(&self, subject: &Subject) -> bool {
        *self.key == subject.key && self.policy.shares_counts_with(&subject.policy)
    }
}

/// The keyed hash was taken to find the shard already, so the map uses it as it is.
#[derive(Default)]
struct Prehashed(u64);

impl Hasher for Prehashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("subjects hash as one u64")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}
