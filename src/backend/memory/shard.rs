use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::clock::{Anchor, Clock, Reading};
use super::rate_limit::Counts;
use super::slot::Slot;
use crate::key::Key;
use crate::rate_limit::Policy;

/// How many keys are looked at to find one that can go. The least valuable of eight is among the lowest third nearly
/// always, which is as good as the least of all for this purpose, and takes the same time however many keys there are.
const SAMPLE: usize = 8;
/// In how many places at the most. A table is between half and nearly full, unless it was fuller once.
const PLACES: usize = 64;
/// In how many places keys are looked for that have been stale for a while, each time that a new one comes: one of them has a key at the least,
/// so there are never many more stale ones than others.
const SWEPT: usize = 4;
/// How long a count that has run out is kept where there is room. Who has so large a quota that it is whole again before the next
/// request would be dropped and put down anew each time, which takes several times as long as to find the count.
const GRACE_US: u64 = 1_000_000;

/// A part of the keys, under one lock.
///
/// Keys lie in the order of their hashes, so the next few in the table are as good as any that are drawn by lot: this is what lets a full
/// backend find a key to forget, and any shard drop stale keys, without a list of ages or a background task.
///
/// What a count weighs is for whoever owns the shard to add up.
#[derive(Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    // Where to look next for keys that can go.
    hand: usize,
    anchor: Anchor,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// What time it was when the clock was read.
    #[inline]
    pub(super) fn us(&mut self, clock: &Clock, reading: Reading) -> u64 {
        self.anchor.us(clock, reading)
    }

    /// What time it was in another shard for what happens in both.
    pub(super) fn is_past(&mut self, us: u64) {
        self.anchor.is_past(us);
    }

    #[cfg(test)]
    pub(super) fn weight(&self) -> usize {
        self.slots.iter().map(Slot::weight).sum()
    }

    /// What is kept of a subject, if anything is. It may have run out.
    #[inline]
    pub(super) fn find(&mut self, hash: u64, policy: &Policy, key: &Key) -> Option<&mut Slot> {
        self.slots.find_mut(hash, |slot| slot.is(policy, key))
    }

    /// The place of a subject, which is its own until another one is [put down](Self::put).
    pub(super) fn place(&self, hash: u64, policy: &Policy, key: &Key) -> Option<usize> {
        self.slots.find_bucket_index(hash, |slot| slot.is(policy, key))
    }

    pub(super) fn at(&mut self, place: usize) -> Option<&mut Slot> {
        self.slots.get_bucket_mut(place)
    }

    /// Puts down the counts of a subject and drops a couple of those as a matter of course that have been stale for a while. Answers
    /// where it is, and the weight of what was removed.
    pub(super) fn put(
        &mut self,
        key: &Key,
        counts: Counts,
        hash: impl Fn(&Key) -> u64,
        now_us: u64,
    ) -> (usize, usize) {
        let mut removed = 0;
        let policy = counts.policy().clone();
        let slot = Slot::new(key, counts, now_us);
        let entry = self.slots.entry(hash(key), |slot| slot.is(&policy, key), |slot| hash(&slot.key()));
        let place = match entry {
            Entry::Occupied(mut stale) => {
                removed += stale.get().weight();
                *stale.get_mut() = slot;
                stale.bucket_index()
            }
            Entry::Vacant(free) => free.insert(slot).bucket_index(),
        };
        for _ in 0..SWEPT {
            let hand = self.next_place();
            let is_stale = |slot: &Slot| slot.expires_us() + GRACE_US <= now_us;
            if hand != place && self.slots.get_bucket(hand).is_some_and(is_stale) {
                removed += self.evict(hand);
            }
        }
        (place, removed)
    }

    /// Forgets a subject; answers the weight of its count.
    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) -> usize {
        self.place(hash, policy, key).map_or(0, |place| self.evict(place))
    }

    /// Forgets another count than the one at `keep`: of a few a stale one, or else the one that has used least of its quota
    /// and will be forgotten soonest. Answers its weight, which is 0 if there is no other.
    pub(super) fn forget_one(&mut self, keep: Option<usize>, now_us: u64) -> usize {
        let mut victim = None;
        let mut seen = 0;
        for _ in 0..PLACES.min(self.slots.num_buckets()) {
            let place = self.next_place();
            let Some(slot) = self.slots.get_bucket(place).filter(|_| Some(place) != keep) else { continue };
            let rank = match slot.expires_us() {
                expires_us if expires_us > now_us => (slot.value(), expires_us),
                _ => (0, 0),
            };
            victim = victim.min(Some((rank, place))).or(Some((rank, place)));
            seen += 1;
            if seen == SAMPLE {
                break;
            }
        }
        // Nearly nothing is left of what was a large table: any one will do.
        let any = || self.slots.iter_buckets().find(|place| Some(*place) != keep);
        victim.map(|(_, place)| place).or_else(any).map_or(0, |place| self.evict(place))
    }

    fn next_place(&mut self) -> usize {
        self.hand = if self.hand + 1 < self.slots.num_buckets() { self.hand + 1 } else { 0 };
        self.hand
    }

    /// Forgets what is in a place. Answers its weight.
    fn evict(&mut self, place: usize) -> usize {
        self.slots.get_bucket_entry(place).map_or(0, |entry| entry.remove().0.weight())
    }
}
