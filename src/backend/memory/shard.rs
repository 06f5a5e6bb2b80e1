use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;

use super::counts::Counts;
use super::slot::Slot;
use crate::key::Key;
use crate::rate_limit::Policy;

/// How many keys are sampled to find one to evict. The least valuable of eight keys is nearly always among the least valuable third of all
/// keys, which is good enough. The sample has a fixed size, so the time of an eviction does not depend on the number of keys.
const SAMPLE: usize = 8;
/// The search for a sample visits at most this many buckets. They hold about a full sample: a larger table [shrinks](Shard::shrink) before
/// an insertion if less than an eighth of its buckets are taken.
const SAMPLED_BUCKETS: usize = 64;
/// How many other keys an insertion examines, in at most [`SWEPT_BUCKETS`] buckets, to remove keys that expired a while ago. Two, so that
/// the expired keys never far outnumber the others.
const SWEPT: usize = 2;
const SWEPT_BUCKETS: usize = 16;
/// How long an expired count is kept while there is space. A token bucket with a large quota is often full again, which expires its count,
/// before the next request of its key. To remove and insert it for each request would take several times as long as to find it.
const GRACE_US: u64 = 1_000_000;

/// A part of the keys, under one lock.
///
/// The hash of a key decides its bucket, so a few adjacent buckets are as good as a random sample. A full backend can therefore find a key
/// to evict, and any shard can remove expired keys, without a list of ages or a background task.
///
/// A shard does not know its total weight. Its methods return the weight that they removed, and `MemoryBackend` subtracts it from the
/// total.
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
    // Takes a closure, so that the compiler inlines the search and the comparison at each of the few call sites.
    #[inline]
    pub(super) fn find(&mut self, hash: u64, is: impl FnMut(&Slot) -> bool) -> Option<&mut Slot> {
        self.slots.find_mut(hash, is)
    }

    /// The bucket of a key. The index stays valid until the next [`put`](Self::put) or [`shrink`](Self::shrink).
    pub(super) fn bucket(&self, hash: u64, policy: &Policy, key: &Key) -> Option<usize> {
        self.slots.find_bucket_index(hash, |slot| slot.is(policy, key))
    }

    pub(super) fn at(&mut self, bucket: usize) -> Option<&mut Slot> {
        self.slots.get_bucket_mut(bucket)
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
        let bucket = match self.slots.entry(hash, |slot| slot.is(policy, key), |slot| slot.hash(&rehash)) {
            Entry::Occupied(mut stale) => {
                removed += stale.get().weight();
                *stale.get_mut() = slot;
                stale.bucket_index()
            }
            Entry::Vacant(free) => free.insert(slot).bucket_index(),
        };
        for swept in self.next_taken::<SWEPT>(SWEPT_BUCKETS, Some(bucket)) {
            let is_stale = |slot: &Slot| slot.expires_us() + GRACE_US <= now_us;
            if self.slots.get_bucket(swept).is_some_and(is_stale) {
                removed += self.remove_at(swept);
            }
        }
        (bucket, removed)
    }

    /// Shrinks a table if less than an eighth of it is taken. This moves every entry to another bucket.
    pub(super) fn shrink(&mut self, rehash: impl Fn(&Policy, &Key) -> u64) {
        let (len, buckets) = (self.slots.len(), self.slots.num_buckets());
        if buckets > SAMPLED_BUCKETS && len < buckets / 8 {
            self.slots.shrink_to(2 * len, |slot| slot.hash(&rehash));
        }
    }

    /// Removes a key, and returns the weight of its count.
    pub(super) fn remove(&mut self, hash: u64, policy: &Policy, key: &Key) -> usize {
        self.bucket(hash, policy, key).map_or(0, |bucket| self.remove_at(bucket))
    }

    /// Evicts one of a few sampled counts, except the one at `keep`. Prefers an expired count, then the smallest used share of a quota,
    /// then the earliest expiry. Returns the weight of the evicted count, or 0 if there is no other count.
    pub(super) fn evict_one(&mut self, keep: Option<usize>, now_us: u64) -> usize {
        let mut sample = self.next_taken::<SAMPLE>(SAMPLED_BUCKETS, keep);
        if sample.len() < SAMPLE {
            // The table is small or was fuller before, or the visited buckets were empty by chance.
            let others = self.slots.iter_buckets().filter(|bucket| Some(*bucket) != keep);
            sample.extend(others.take(SAMPLE - sample.len()));
        }
        let rank = |bucket: &usize| {
            let slot = self.slots.get_bucket(*bucket)?;
            Some(slot.expires_us()).filter(|ends| *ends > now_us).map(|ends| (slot.value(now_us), ends))
        };
        let victim = sample.into_iter().min_by_key(rank);
        victim.map_or(0, |bucket| self.remove_at(bucket))
    }

    /// Finds up to `COUNT` occupied buckets other than `keep`. Looks at the next `buckets` buckets only.
    fn next_taken<const COUNT: usize>(&mut self, buckets: usize, keep: Option<usize>) -> SmallVec<[usize; COUNT]> {
        let all = self.slots.num_buckets();
        let mut taken = SmallVec::new();
        for _ in 0..buckets.min(all) {
            self.hand = (self.hand + 1) & (all - 1);
            if Some(self.hand) != keep && self.slots.get_bucket(self.hand).is_some() {
                taken.push(self.hand);
                if taken.len() == COUNT {
                    break;
                }
            }
        }
        taken
    }

    /// Empties a bucket, and returns the weight of its count.
    fn remove_at(&mut self, bucket: usize) -> usize {
        self.slots.get_bucket_entry(bucket).map_or(0, |entry| entry.remove().0.weight())
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
            assert_eq!(shard.evict_one(None, 2), 1);
        }
        assert_eq!((0..40).filter(|key| is_limited(&mut shard, *key)).count(), 40);
        while shard.len() > 42 {
            shard.shrink(&hash);
            shard.evict_one(None, 2);
        }
        assert!(shard.slots.num_buckets() < buckets / 16);
        let left = (0..40).filter(|key| is_limited(&mut shard, *key)).count();
        assert!(left > 30, "{left} of 40");

        let new = Key::from("new");
        let (bucket, _) = shard.put(hash(&policy, &new), &policy, &new, Counts::new(&policy, 2), &hash, 2);
        while shard.len() > 1 {
            assert_eq!(shard.evict_one(Some(bucket), 2), 1);
        }
        assert!(shard.at(bucket).is_some());
        assert_eq!(shard.evict_one(Some(bucket), 2), 0);
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
