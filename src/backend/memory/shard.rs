use indexmap::IndexMap;
use indexmap::map::raw_entry_v1::{RawEntryApiV1, RawEntryMut};

use super::clock::{Anchor, Clock, Reading};
use super::rate_limit::Counts;
use crate::key::Key;
use crate::rate_limit::Policy;

/// How many keys are looked at to find one that can go. The least valuable of eight is among the lowest third nearly
/// always, which is as good as the least of all for this purpose, and takes the same time however many keys there are.
const SAMPLE: usize = 8;
/// How long a count that has run out is kept where there is room. Who has so large a quota that it is whole again before the next
/// request would be dropped and put down anew each time, which takes several times as long as to find the count.
const GRACE_US: u64 = 1_000_000;

/// A part of the keys, under one lock.
///
/// Keys lie in a dense array behind the hash map, so that some of them can be looked at by number: this is what lets a full
/// backend find a key to forget, and any shard drop stale keys, without a list of ages or a background task.
///
/// What a count weighs is for whoever owns the shard to add up.
#[derive(Default)]
pub(super) struct Shard {
    // Without a hasher: the keyed hash is taken once, to find the shard, and used here as it is.
    slots: IndexMap<Subject, Counts, ()>,
    // Where to look next for keys that can go.
    hand: usize,
    anchor: Anchor,
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
        self.slots.values().map(Counts::weight).sum()
    }

    /// Where the counts of a subject are, if there are any. They may have run out.
    #[inline]
    pub(super) fn find(&self, hash: u64, policy: &Policy, key: &Key) -> Option<usize> {
        self.slots.raw_entry_v1().from_hash_full(hash, Subject::is(policy, key)).map(|(index, _, _)| index)
    }

    #[inline]
    pub(super) fn counts_mut(&mut self, index: usize) -> &mut Counts {
        &mut self.slots[index]
    }

    /// Puts down the count of a subject and drops a couple of those as a matter of course that have been stale for a while. Answers
    /// where it is, and the weight of what was removed.
    pub(super) fn put(&mut self, hash: u64, policy: &Policy, key: &Key, counts: Counts, now_us: u64) -> (usize, usize) {
        let entry = self.slots.raw_entry_mut_v1().from_hash(hash, Subject::is(policy, key));
        let mut index = entry.index();
        let mut removed = 0;
        match entry {
            RawEntryMut::Occupied(mut stale) => removed += stale.insert(counts).weight(),
            RawEntryMut::Vacant(place) => {
                place.insert_hashed_nocheck(hash, Subject { policy: policy.clone(), key: *key }, counts);
            }
        }
        for _ in 0..2 {
            self.hand = if self.hand + 1 < self.slots.len() { self.hand + 1 } else { 0 };
            if self.hand != index && self.slots[self.hand].expires_us() + GRACE_US <= now_us {
                removed += self.evict(self.hand);
                // The last one has taken the place of the one that went.
                index = if index == self.slots.len() { self.hand } else { index };
            }
        }
        (index, removed)
    }

    /// Forgets a subject; answers the weight of its count.
    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) -> usize {
        match self.slots.raw_entry_mut_v1().from_hash(hash, Subject::is(policy, key)) {
            RawEntryMut::Occupied(entry) => entry.swap_remove().weight(),
            RawEntryMut::Vacant(_) => 0,
        }
    }

    /// Forgets another count than the one at `keep`: of a few a stale one, or else the one that has used least of its quota
    /// and will be forgotten soonest. Answers its weight, and where the count to keep is now. There has to be another one.
    ///
    /// The few are spread over the whole array, because neighbours came at the same time and are often of the same kind.
    pub(super) fn forget_one(&mut self, keep: Option<usize>, now_us: u64) -> (usize, Option<usize>) {
        let len = self.slots.len();
        let rank = |index: &usize| match self.slots.get_index(*index) {
            Some((_, counts)) if counts.expires_us() > now_us => (counts.value(), counts.expires_us()),
            _ => (0, 0),
        };
        let stride = len.div_ceil(SAMPLE);
        let sample = (0..SAMPLE).map(|step| (self.hand + step * stride) % len);
        let victim = sample.filter(|index| Some(*index) != keep).min_by_key(rank);
        // A sample of nothing but the one to keep: any other will do.
        let victim = victim.unwrap_or_else(|| keep.map_or(0, |keep| (keep + 1) % len));
        self.hand = (self.hand + 1) % len;
        let removed = self.evict(victim);
        (removed, if keep == Some(len - 1) { Some(victim) } else { keep })
    }

    /// Removes the count at `victim`; the last one takes its place. Answers its weight.
    fn evict(&mut self, victim: usize) -> usize {
        self.slots.swap_remove_index(victim).map_or(0, |(_, count)| count.weight())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn who_is_counted_and_what_was_counted_take_a_cache_line_each() {
        assert_eq!(size_of::<(u64, Subject)>(), 64);
        assert_eq!(size_of::<(u64, Subject, Counts)>(), 128);
    }
}
