use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;

use super::counts::Counts;
use super::slot::Slot;
use crate::key::Key;
use crate::rate_limit::Policy;

/// How many keys are sampled to find one to evict. The least valuable of eight is nearly always among the lowest third, which is good
/// enough. The time does not depend on the number of keys.
const SAMPLE: usize = 8;
/// How many buckets are visited to find the sample. At least an eighth of all buckets are taken; otherwise the table
/// [shrinks](Shard::shrink). A table with at most this many buckets does not shrink.
const PLACES: usize = 64;
/// How many existing keys each new key visits, in at most [`SWEPT_PLACES`] buckets, to remove keys that expired a while ago. Two, so that
/// the expired keys never far outnumber the others.
const SWEPT: usize = 2;
const SWEPT_PLACES: usize = 16;
/// How long an expired count is kept while there is space. With a large quota, a count often expires before the next request of its key. To
/// remove and insert it for each request would take several times as long as to find it.
const GRACE_US: u64 = 1_000_000;

/// A part of the keys, under one lock.
///
/// Keys are in the order of their hashes, so a few adjacent keys are as good as a random sample. A full backend can therefore find a key to
/// evict, and any shard can remove expired keys, without a list of ages or a background task.
///
/// The owner of the shard adds up the weights of the counts.
#[derive(Default)]
pub(super) struct Shard {
    slots: HashTable<Slot>,
    // Where the next search for keys to remove starts.
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

    /// Finds the entry for which `is` returns true. Its count may have expired.
    // The caller passes the closure, so that the search is compiled into each of its few callers.
    #[inline]
    pub(super) fn find(&mut self, hash: u64, is: impl FnMut(&Slot) -> bool) -> Option<&mut Slot> {
        self.slots.find_mut(hash, is)
    }

    /// The bucket of a key. It stays valid until another key is [inserted](Self::put).
    pub(super) fn place(&self, hash: u64, policy: &Policy, key: &Key) -> Option<usize> {
        self.slots.find_bucket_index(hash, |slot| slot.is(policy, key))
    }

    pub(super) fn at(&mut self, place: usize) -> Option<&mut Slot> {
        self.slots.get_bucket_mut(place)
    }

    /// Inserts the counts of a key, and removes up to [`SWEPT`] keys that expired a while ago. Returns the bucket, and the weight of the
    /// removed counts. `rehash` computes the hashes of other entries.
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

    /// Shrinks a table if less than an eighth of it is taken. This moves every entry to another bucket.
    pub(super) fn shrink(&mut self, rehash: impl Fn(&Policy, &Key) -> u64) {
        let (len, buckets) = (self.slots.len(), self.slots.num_buckets());
        if buckets > PLACES && len < buckets / 8 {
            self.slots.shrink_to(2 * len, |slot| slot.hash(&rehash));
        }
    }

    /// Removes a key, and returns the weight of its count.
    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) -> usize {
        self.place(hash, policy, key).map_or(0, |place| self.evict(place))
    }

    /// Evicts one of a few sampled counts, except the one at `keep`. Prefers an expired count, then the smallest used share of a quota,
    /// then the earliest expiry. Returns the weight of the evicted count, or 0 if there is no other count.
    pub(super) fn forget_one(&mut self, keep: Option<usize>, now_us: u64) -> usize {
        let mut sample = self.some::<SAMPLE>(PLACES, keep);
        if sample.len() < SAMPLE {
            // The table is small or was fuller before, or the visited buckets were empty by chance.
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

    /// The next taken buckets except `keep`: up to `COUNT` of them, within the next `buckets` buckets.
    fn some<const COUNT: usize>(&mut self, buckets: usize, keep: Option<usize>) -> SmallVec<[usize; COUNT]> {
        let all = self.slots.num_buckets();
        let mut some = SmallVec::new();
        for _ in 0..buckets.min(all) {
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

    /// Empties a bucket, and returns the weight of its count.
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

    /// A shard with numbered keys. Each has used the given number of its ten units.
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
    fn most_used_keys_are_evicted_last_also_from_a_sparse_table() {
        let (policy, hash) = (Policy::new("api", Quota::per_hour(10).fixed_window()), hasher());
        let mut shard = shard(&policy, &hash, (0..4_000).map(|key| if key < 40 { 10 } else { 1 }));
        let buckets = shard.slots.num_buckets();
        let is_limited = |shard: &mut Shard, key: u32| {
            let key = Key::from(key);
            let slot = shard.find(hash(&policy, &key), |slot| slot.is(&policy, &key));
            slot.is_some_and(|slot| !slot.check_only_limit(&policy, 1, 2).unwrap().is_allowed())
        };
        // The chance that all eight keys of a sample are among the forty is one in a thousand million.
        for _ in 0..3_000 {
            assert_eq!(shard.forget_one(None, 2), 1);
        }
        assert_eq!((0..40).filter(|key| is_limited(&mut shard, *key)).count(), 40);
        while shard.len() > 42 {
            shard.shrink(&hash);
            shard.forget_one(None, 2);
        }
        assert!(shard.slots.num_buckets() < buckets / 16);
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
    fn new_keys_remove_expired_ones_also_from_a_sparse_table() {
        let (policy, hash) = (Policy::new("api", Quota::per_hour(10).fixed_window()), hasher());
        let mut shard = shard(&policy, &hash, (0..4_000).map(|_| 1));
        let later = 1 + HOUR_US + GRACE_US;
        for key in 4_000_u32..8_000 {
            let key = Key::from(key);
            shard.put(hash(&policy, &key), &policy, &key, Counts::new(&policy, later), &hash, later);
        }
        // Each new key has visited two others.
        assert!(shard.len() < 5_500, "{}", shard.len());
        let much_later = later + 2 * HOUR_US;
        for key in 0_u32..4_000 {
            let key = Key::from(key % 100);
            shard.put(hash(&policy, &key), &policy, &key, Counts::new(&policy, much_later), &hash, much_later);
        }
        assert!(shard.len() < 300, "{}", shard.len());
    }
}
