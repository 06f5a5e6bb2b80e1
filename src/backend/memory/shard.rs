use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;

use super::rate_limit::Counts;
use super::slot::Slot;
use crate::key::Key;
use crate::rate_limit::Policy;

/// How many keys are looked at to find one that can go. The least valuable of eight is among the lowest third nearly
/// always, which is as good as the least of all for this purpose, and takes the same time however many keys there are.
const SAMPLE: usize = 8;
/// How many places are looked at to find them. An eighth of all places are taken at the least, or the table [gets smaller](Shard::shrink);
/// one of no more than this stays as it is.
const PLACES: usize = 64;
/// How many keys are looked at each time that a new one comes, to drop those that have been stale for a while, and in how many places at
/// the most. More than one, so there are never many more stale ones than others.
const SWEPT: usize = 2;
const SWEPT_PLACES: usize = 16;
/// How long a count that has run out is kept where there is room. Who has so large a quota that it is whole again before the next
/// request would be dropped and put down anew each time, which takes several times as long as to find the count.
const GRACE_US: u64 = 1_000_000;

/// A part of the keys, under one lock.
///
/// Keys lie in the order of their hashes, so a few of them are as good as any that are drawn by lot: this is what lets a full backend find
/// a key to forget, and any shard drop stale keys, without a list of ages or a background task.
///
/// What a count weighs is for whoever owns the shard to add up.
#[derive(Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    // Where to look next for keys that can go.
    hand: usize,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    #[cfg(test)]
    pub(super) fn weight(&self) -> usize {
        self.slots.iter().map(Slot::weight).sum()
    }

    /// What is kept of the subject that `is` knows, if anything is. It may have run out.
    // Told by whoever asks, so that the search is compiled into each of the few that ask.
    #[inline]
    pub(super) fn find(&mut self, hash: u64, is: impl FnMut(&Slot) -> bool) -> Option<&mut Slot> {
        self.slots.find_mut(hash, is)
    }

    /// The place of a subject, which is its own until another one is [put down](Self::put).
    pub(super) fn place(&self, hash: u64, policy: &Policy, key: &Key) -> Option<usize> {
        self.slots.find_bucket_index(hash, |slot| slot.is(policy, key))
    }

    pub(super) fn at(&mut self, place: usize) -> Option<&mut Slot> {
        self.slots.get_bucket_mut(place)
    }

    /// Puts down the counts of a subject and drops a couple of those as a matter of course that have been stale for a while. Answers
    /// where it is, and the weight of what was removed. `rehash` gives the hashes of others.
    pub(super) fn put(
        &mut self,
        hash: u64,
        policy: &Policy,
        key: &Key,
        counts: Counts,
        rehash: impl Fn(&Policy, &Key) -> u64,
        now_us: u64,
    ) -> (usize, usize) {
        let mut removed = 0;
        let slot = Slot::new(policy, key, counts, now_us);
        self.shrink(&rehash);
        let place = match self.slots.entry(hash, |slot| slot.is(policy, key), |slot| slot.hash(&rehash)) {
            Entry::Occupied(mut stale) => {
                removed += stale.get().weight();
                *stale.get_mut() = slot;
                stale.bucket_index()
            }
            Entry::Vacant(free) => free.insert(slot).bucket_index(),
        };
        for swept in self.some::<SWEPT>(SWEPT_PLACES, Some(place)) {
            let is_stale = |slot: &Slot| slot.expires_us() + GRACE_US <= now_us;
            if self.slots.get_bucket(swept).is_some_and(is_stale) {
                removed += self.evict(swept);
            }
        }
        (place, removed)
    }

    /// Makes a table smaller that less than an eighth of is taken. Everything gets another place then.
    pub(super) fn shrink(&mut self, rehash: impl Fn(&Policy, &Key) -> u64) {
        let (len, places) = (self.slots.len(), self.slots.num_buckets());
        if places > PLACES && len < places / 8 {
            self.slots.shrink_to(2 * len, |slot| slot.hash(&rehash));
        }
    }

    /// Forgets a subject; answers the weight of its count.
    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) -> usize {
        self.place(hash, policy, key).map_or(0, |place| self.evict(place))
    }

    /// Forgets another count than the one at `keep`: of a few a stale one, or else the one that has used least of its quota
    /// and will be forgotten soonest. Answers its weight, which is 0 if there is no other.
    pub(super) fn forget_one(&mut self, keep: Option<usize>, now_us: u64) -> usize {
        let mut sample = self.some::<SAMPLE>(PLACES, keep);
        if sample.len() < SAMPLE {
            // The table is small, or was fuller a moment ago, or it is chance.
            let others = self.slots.iter_buckets().filter(|place| Some(*place) != keep);
            sample.extend(others.take(SAMPLE - sample.len()));
        }
        let rank = |place: &usize| {
            let slot = self.slots.get_bucket(*place)?;
            Some(slot.expires_us()).filter(|ends| *ends > now_us).map(|ends| (slot.value(now_us), ends))
        };
        let victim = sample.into_iter().min_by_key(rank);
        victim.map_or(0, |place| self.evict(place))
    }

    /// The next few places that are taken, but for the one at `keep`: as many as that if there are so many among the next `places`.
    fn some<const COUNT: usize>(&mut self, places: usize, keep: Option<usize>) -> SmallVec<[usize; COUNT]> {
        let all = self.slots.num_buckets();
        let mut some = SmallVec::new();
        for _ in 0..places.min(all) {
            self.hand = (self.hand + 1) & (all - 1);
            if Some(self.hand) != keep && self.slots.get_bucket(self.hand).is_some() {
                some.push(self.hand);
                if some.len() == COUNT {
                    break;
                }
            }
        }
        some
    }

    /// Forgets what is in a place. Answers its weight.
    fn evict(&mut self, place: usize) -> usize {
        self.slots.get_bucket_entry(place).map_or(0, |entry| entry.remove().0.weight())
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher, RandomState};

    use super::*;
    use crate::rate_limit::Quota;

    const HOUR_US: u64 = 3_600_000_000;

    fn hasher() -> impl Fn(&Policy, &Key) -> u64 {
        let secret = RandomState::new();
        move |_, key| secret.hash_one(key)
    }

    /// A shard of keys by number that have each used so many of ten.
    fn shard(policy: &Policy, hash: impl Fn(&Policy, &Key) -> u64, used: impl Iterator<Item = u32>) -> Shard {
        let mut shard = Shard::default();
        for (key, used) in (0_u32..).zip(used) {
            let key = Key::from(key);
            shard.put(hash(policy, &key), policy, &key, Counts::new(policy, 1), &hash, 1);
            for _ in 0..used {
                let slot = shard.find(hash(policy, &key), |slot| slot.is(policy, &key)).unwrap();
                assert!(slot.check_only_limit(policy, 1, 1).unwrap().is_allowed());
            }
        }
        shard
    }

    #[test]
    fn who_has_used_most_is_not_forgotten_as_long_as_there_are_others_however_few_are_left_of_a_large_table() {
        let (policy, hash) = (Policy::new("api", Quota::per_hour(10).fixed_window()), hasher());
        let mut shard = shard(&policy, &hash, (0..4_000).map(|key| if key < 40 { 10 } else { 1 }));
        let places = shard.slots.num_buckets();
        let is_limited = |shard: &mut Shard, key: u32| {
            let key = Key::from(key);
            let slot = shard.find(hash(&policy, &key), |slot| slot.is(&policy, &key));
            slot.is_some_and(|slot| !slot.check_only_limit(&policy, 1, 2).unwrap().is_allowed())
        };
        // That all eight of a sample are among those forty happens once in a thousand million times.
        for _ in 0..3_000 {
            assert_eq!(shard.forget_one(None, 2), 1);
        }
        assert_eq!((0..40).filter(|key| is_limited(&mut shard, *key)).count(), 40);
        while shard.len() > 42 {
            shard.shrink(&hash);
            shard.forget_one(None, 2);
        }
        assert!(shard.slots.num_buckets() < places / 16);
        let left = (0..40).filter(|key| is_limited(&mut shard, *key)).count();
        assert!(left > 30, "{left} of 40");

        let new = Key::from("new");
        let (place, _) = shard.put(hash(&policy, &new), &policy, &new, Counts::new(&policy, 2), &hash, 2);
        while shard.len() > 1 {
            assert_eq!(shard.forget_one(Some(place), 2), 1);
        }
        assert!(shard.at(place).is_some());
        assert_eq!(shard.forget_one(Some(place), 2), 0);
    }

    #[test]
    fn stale_keys_go_as_others_come_also_from_what_was_a_large_table() {
        let (policy, hash) = (Policy::new("api", Quota::per_hour(10).fixed_window()), hasher());
        let mut shard = shard(&policy, &hash, (0..4_000).map(|_| 1));
        let later = 1 + HOUR_US + GRACE_US;
        for key in 4_000_u32..8_000 {
            let key = Key::from(key);
            shard.put(hash(&policy, &key), &policy, &key, Counts::new(&policy, later), &hash, later);
        }
        // Each has looked at two others.
        assert!(shard.len() < 5_500, "{}", shard.len());
        let much_later = later + 2 * HOUR_US;
        for key in 0_u32..4_000 {
            let key = Key::from(key % 100);
            shard.put(hash(&policy, &key), &policy, &key, Counts::new(&policy, much_later), &hash, much_later);
        }
        assert!(shard.len() < 300, "{}", shard.len());
    }
}
