//! The entry of a shard: a key and its counts, in one cache line.

use super::counts::{Counts, share_of};
use crate::key::Key;
use crate::rate_limit::algorithm::{Count, LimitParams, receipt_of_one};
use crate::rate_limit::store::Charged;
use crate::rate_limit::{Decision, Policy};

/// A key and its counts.
// One cache line, so that nearly every decision waits for a single memory access.
#[repr(align(64))]
pub(super) struct Slot {
    // The policy that the counts were made under.
    policy: Policy,
    name: CompactKey,
    held: Counters,
}

/// A key, in less space if it is short. IPv4 addresses, IPv6 networks and many names are short.
enum CompactKey {
    Short([u8; Key::SHORT_LEN]),
    Long(Box<Key>),
}

enum Counters {
    One(One),
    /// Several limits, a log, or a block.
    Other(Box<Counts>),
}

/// The count of a single limit, and the time of its last update.
// Except for the first `u64`, the `u64` fields are in the order of `Count`, so that the compiler can convert all variants with the same
// code.
#[derive(Clone, Copy)]
enum One {
    TokenBucket { part: u32, last: u64, since: u64, debt: u64 },
    FixedWindow { last: u64, start: u64, used: u64 },
    // Needs no `last`: its windows are computed from their start. So time may go back slightly from one update to the next, which is
    // harmless.
    SlidingWindow { previous: u64, start: u64, current: u64 },
}

impl CompactKey {
    fn of(key: &Key) -> Self {
        key.as_short().map_or_else(|| Self::Long(Box::new(*key)), |short| Self::Short(*short))
    }

    #[inline]
    fn is(&self, key: &Key) -> bool {
        match self {
            Self::Short(name) => key.as_short() == Some(name),
            Self::Long(name) => **name == *key,
        }
    }
}

impl One {
    #[inline]
    const fn new(last: u64, count: Count) -> Self {
        match count {
            Count::TokenBucket { since, debt, part } => Self::TokenBucket { part, last, since, debt },
            Count::FixedWindow { start, used } => Self::FixedWindow { last, start, used },
            Count::SlidingWindow { start, previous, current } => Self::SlidingWindow { start, previous, current },
        }
    }

    /// The time of the last update, and the count.
    #[inline]
    const fn get(self) -> (u64, Count) {
        match self {
            Self::TokenBucket { part, last, since, debt } => (last, Count::TokenBucket { since, debt, part }),
            Self::FixedWindow { last, start, used } => (last, Count::FixedWindow { start, used }),
            Self::SlidingWindow { start, previous, current } => {
                (start, Count::SlidingWindow { start, previous, current })
            }
        }
    }
}

impl Counters {
    fn new(counts: Counts, now_us: u64) -> Self {
        match counts.as_one(now_us) {
            Some((last, count)) => Self::One(One::new(last, count)),
            None => Self::Other(Box::new(counts)),
        }
    }
}

impl Slot {
    /// `policy` is the policy that the counts were made under.
    pub(super) fn new(policy: &Policy, key: &Key, counts: Counts, now_us: u64) -> Self {
        Self { policy: policy.clone(), name: CompactKey::of(key), held: Counters::new(counts, now_us) }
    }

    #[inline]
    pub(super) fn is(&self, policy: &Policy, key: &Key) -> bool {
        self.name.is(key) && self.policy.shares_counts_with(policy)
    }

    fn key(&self) -> Key {
        match &self.name {
            CompactKey::Short(name) => Key::of_short(name),
            CompactKey::Long(name) => **name,
        }
    }

    /// The hash of the policy and the key.
    pub(super) fn hash(&self, hash: impl Fn(&Policy, &Key) -> u64) -> u64 {
        hash(&self.policy, &self.key())
    }

    /// When the counts expire.
    pub(super) fn expires_us(&self) -> u64 {
        match &self.held {
            Counters::One(one) => {
                let (last, count) = one.get();
                self.policy.params().first().map_or(0, |params| count.expires(params, last))
            }
            Counters::Other(counts) => counts.expires_us(),
        }
    }

    /// The loss if the entry is evicted: see [`Counts::value`].
    pub(super) fn value(&self, now_us: u64) -> u64 {
        match &self.held {
            Counters::One(one) => {
                let (last, count) = one.get();
                let share = |params| share_of(count.used_at(params, last, now_us.max(last)), params);
                1 + self.policy.params().first().map_or(0, share)
            }
            Counters::Other(counts) => counts.value(now_us),
        }
    }

    /// The weight, in units of a single small count.
    pub(super) fn weight(&self) -> usize {
        match &self.held {
            Counters::One(_) => 1,
            Counters::Other(counts) => counts.weight(),
        }
    }

    /// Applies a function to the counts.
    pub(super) fn change<T>(&mut self, now_us: u64, change: impl FnOnce(&mut Counts) -> T) -> T {
        match &mut self.held {
            Counters::One(one) => {
                let (last, count) = one.get();
                let mut counts = Counts::of_one(&self.policy, last, count);
                let answer = change(&mut counts);
                self.policy = counts.policy().clone();
                self.held = Counters::new(counts, now_us);
                answer
            }
            Counters::Other(counts) => {
                let answer = change(counts);
                if !self.policy.is_same_as(counts.policy()) {
                    self.policy = counts.policy().clone();
                }
                if let Some((last, count)) = counts.as_one(now_us) {
                    self.held = Counters::One(One::new(last, count));
                }
                answer
            }
        }
    }

    /// The fast path for nearly all checks: a policy with one limit that is not a log. Returns `None` for any other check.
    #[inline]
    pub(super) fn check_only_limit(&mut self, policy: &Policy, cost: u64, now_us: u64) -> Option<Decision> {
        let (one, mut count, params, now_us) = self.only_limit(policy, now_us)?;
        let is_charged = cost > 0 && count.charge_if_it_fits(params, now_us, cost);
        *one = One::new(now_us, count);
        // A charged request needs no wait, so its status is for a cost of 0.
        let status = count.status(params, now_us, if is_charged { 0 } else { cost });
        Some(Decision::of_one(status, is_charged.then(|| receipt_of_one(now_us, params, &status))))
    }

    /// Like [`check_only_limit`](Self::check_only_limit), without a decision. Also returns `None` if the request is denied.
    #[inline]
    pub(super) fn charge_only_limit(&mut self, policy: &Policy, cost: u64, now_us: u64) -> Option<Charged> {
        let (one, mut count, params, now_us) = self.only_limit(policy, now_us)?;
        if !count.charge_if_it_fits(params, now_us, cost) {
            return None;
        }
        *one = One::new(now_us, count);
        Some(Charged { is_near_limit: count.is_near_limit(params, now_us) })
    }

    /// The stored count, a copy that is advanced to `now_us`, the only limit of `policy`, and `now_us`. If the last update is later than
    /// `now_us`, its time replaces `now_us`: another caller read the clock later and took the lock first. `None` if the counts were made
    /// under another policy, if the limit is a log, or if the key is blocked.
    #[inline]
    fn only_limit<'a>(
        &'a mut self,
        policy: &'a Policy,
        now_us: u64,
    ) -> Option<(&'a mut One, Count, &'a LimitParams, u64)> {
        let (Counters::One(one), [params]) = (&mut self.held, policy.params()) else { return None };
        if !self.policy.is_same_as(policy) {
            return None;
        }
        let (last, mut count) = one.get();
        let now_us = now_us.max(last);
        count.advance(params, last, now_us);
        Some((one, count, params, now_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn slot_takes_one_cache_line() {
        assert_eq!(size_of::<Slot>(), 64);
    }

    #[test]
    fn earlier_clock_reading_counts_at_the_last_update() {
        let bucket = Quota::per_hour(3_600).burst(3).unwrap().token_bucket();
        for limit in [bucket, Quota::per_second(3).fixed_window(), Quota::per_second(3).sliding_window()] {
            let policy = Policy::new("api", limit);
            let (late, early) = (5_000_000, 4_000_000);
            let mut slot = Slot::new(&policy, &Key::from("a"), Counts::new(&policy, late), late);
            assert_eq!(slot.charge_only_limit(&policy, 1, late), Some(Charged { is_near_limit: false }));
            let second = slot.check_only_limit(&policy, 1, early).unwrap();
            assert_eq!(
                (second.remaining(), second.receipt().map(|receipt| receipt.as_micros())),
                (Some(1), Some(late))
            );
            assert!(slot.charge_only_limit(&policy, 1, early).is_some());
            let wait = slot.check_only_limit(&policy, 1, early).unwrap().retry_after();
            assert_eq!(wait, slot.check_only_limit(&policy, 1, late).unwrap().retry_after());
        }
    }

    #[test]
    fn keys_of_any_length_are_distinct_and_read_back_unchanged() {
        let policy = Policy::new("api", Quota::per_second(3).fixed_window());
        let keys: Vec<_> = (0..=Key::MAX_LEN).map(|len| Key::from("k".repeat(len))).collect();
        for key in &keys {
            let slot = Slot::new(&policy, key, Counts::new(&policy, 1), 1);
            assert_eq!(slot.key(), *key);
            for other in &keys {
                assert_eq!(slot.is(&policy, other), key == other, "{key} {other}");
            }
        }
    }
}
