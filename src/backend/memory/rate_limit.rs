//! Rate limits. Each call locks the shards of its keys. Each decision must equal that of the scripts in `lua/`.

use std::cmp::Ordering;
use std::time::Duration;

use super::MemoryBackend;
use super::counts::{Counts, Verb};
use super::shard::Shard;
use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::store::{Charged, RateLimitStore, Request};
use crate::rate_limit::{Decision, Policy, Receipt, as_change};
use crate::store::shutdown::ShutdownTarget;

impl MemoryBackend {
    /// A check, with a fast path for a policy of one limit.
    fn check_one(&self, policy: &Policy, key: &Key, cost: u64) -> Decision {
        if policy.params().len() > 1 {
            return self.decide(policy, key, cost, |_| Verb::Check);
        }
        // Read the clock before the lock, so that the processor can already execute the next instructions during the read.
        let now = self.now_us();
        let (hash, shard_index) = self.locate(policy, key);
        let mut shard = self.lock(shard_index);
        if let Some(slot) = shard.find(hash, |slot| slot.is(policy, key))
            && let Some(decision) = slot.check_only_limit(policy, cost, now)
        {
            return decision;
        }
        let now = self.now_us();
        let decision = self.decide_in(&mut shard, hash, policy, key, cost, Verb::Check, now);
        drop(shard);
        self.make_room(shard_index, now);
        decision
    }

    /// Charges a request if it is allowed. `None` if it is denied, or if existing counts need the slow path. Then nothing is charged.
    fn charge_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Charged> {
        let now = self.now_us();
        let (hash, shard_index) = self.locate(policy, key);
        let mut shard = self.lock(shard_index);
        if let Some(slot) = shard.find(hash, |slot| slot.is(policy, key)) {
            return slot.charge_only_limit(policy, cost, now);
        }
        let now = self.now_us();
        let decision = self.decide_in(&mut shard, hash, policy, key, cost, Verb::Check, now);
        drop(shard);
        self.make_room(shard_index, now);
        decision.is_allowed().then(|| Charged { is_near_limit: decision.is_near_limit() })
    }

    fn decide(&self, policy: &Policy, key: &Key, cost: u64, verb: impl FnOnce(u64) -> Verb) -> Decision {
        let (hash, shard_index) = self.locate(policy, key);
        let mut shard = self.lock(shard_index);
        let now = self.now_us();
        let decision = self.decide_in(&mut shard, hash, policy, key, cost, verb(now), now);
        drop(shard);
        self.make_room(shard_index, now);
        decision
    }

    /// Charges all requests or none.
    fn check_together(&self, requests: &[Request]) -> Vec<Decision> {
        let located: Vec<_> = requests.iter().map(|request| self.locate(&request.policy, &request.key)).collect();
        // Always lock in the same order, so that two callers never deadlock.
        let mut shard_indexes: Vec<usize> = located.iter().map(|(_, shard_index)| *shard_index).collect();
        shard_indexes.sort_unstable();
        shard_indexes.dedup();
        let mut shards: Vec<_> = shard_indexes.iter().map(|shard_index| self.lock(*shard_index)).collect();
        let now = self.now_us();
        let mut act = |index: usize, verb: Verb| {
            let (hash, shard_index) = located[index];
            let Request { policy, key, cost } = &requests[index];
            let shard = &mut shards[shard_indexes.partition_point(|other| *other < shard_index)];
            self.decide_in(shard, hash, policy, key, *cost, verb, now)
        };
        let mut decisions: Vec<Decision> = Vec::with_capacity(requests.len());
        // A denial changes nothing, so look at all requests before any is charged.
        let peeks: Vec<Decision> = (0..requests.len()).map(|index| act(index, Verb::Peek)).collect();
        if !peeks.iter().all(Decision::is_allowed) {
            return peeks;
        }
        // A key that occurs twice can still be denied.
        for index in 0..requests.len() {
            let denied = decisions.iter().any(|decision| !decision.is_allowed());
            let decision = act(index, if denied { Verb::Peek } else { Verb::Check });
            if !denied && !decision.is_allowed() {
                for (index, charged) in decisions.iter_mut().enumerate() {
                    if let Some(receipt) = charged.receipt() {
                        let _ = act(index, Verb::Settle(receipt, -as_change(requests[index].cost)));
                        // Report the refunded request as not charged.
                        *charged = act(index, Verb::Peek);
                    }
                }
            }
            decisions.push(decision);
        }
        drop(shards);
        for shard_index in shard_indexes {
            self.make_room(shard_index, now);
        }
        decisions
    }

    /// Changes the counts of one key, under the lock of its shard.
    #[allow(clippy::too_many_arguments, reason = "all inputs of a decision in one place")]
    fn decide_in(
        &self,
        shard: &mut Shard,
        hash: u64,
        policy: &Policy,
        key: &Key,
        cost: u64,
        verb: Verb,
        now: u64,
    ) -> Decision {
        if let Some(bucket) = shard.bucket(hash, policy, key)
            && let Some(slot) = shard.at(bucket).filter(|slot| slot.expires_us() > now)
        {
            let before = slot.weight();
            let decision = slot.change(now, |counts| {
                if counts.are_under(policy) {
                    if matches!(verb, Verb::Check) {
                        counts.adopt(policy);
                    }
                    return counts.act(policy, cost, verb, now).0;
                }
                // The counts were made under other limits. `act` may carry them over to the limits of `policy`. Keep the result only if
                // the call changes the counts.
                let mut carried_over = counts.clone();
                let (decision, changed) = carried_over.act(policy, cost, verb, now);
                if changed {
                    *counts = carried_over;
                }
                decision
            });
            let after = slot.weight();
            match after.cmp(&before) {
                Ordering::Equal => {}
                Ordering::Less => self.record_removed(before - after),
                Ordering::Greater => self.grew(shard, bucket, after - before, now),
            }
            decision
        } else {
            let mut counts = Counts::new(policy, now);
            let (decision, changed) = counts.act(policy, cost, verb, now);
            // An unknown key has nothing to refund, and no block to lift.
            let only_reduces = match verb {
                Verb::Settle(_, change) => change < 0,
                Verb::BlockUntil(until) => until <= now,
                Verb::Check | Verb::Peek => false,
            };
            if changed && !only_reduces && counts.expires_us() > now {
                let added = counts.weight();
                let (bucket, removed) = shard.put(hash, policy, key, counts, |policy, key| self.hash(policy, key), now);
                self.record_removed(removed);
                self.grew(shard, bucket, added, now);
            }
            decision
        }
    }
}

// `async` although nothing waits, so that a call that is never polled does not charge.
impl RateLimitStore for MemoryBackend {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        Ok(self.check_one(policy, key, cost))
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        Some(self.check_one(policy, key, cost))
    }

    fn charge_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Charged> {
        self.charge_one(policy, key, cost)
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        Ok(self.check_together(requests))
    }

    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        Some(self.check_together(requests))
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        Ok(self.decide(policy, key, cost, |_| Verb::Peek))
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        let _ = self.decide(policy, key, 0, |_| Verb::Settle(receipt, change));
        Ok(())
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        let time = u64::try_from(time.min(Self::MAX_BLOCK).as_micros()).unwrap_or(u64::MAX);
        let _ = self.decide(policy, key, 0, |now| Verb::BlockUntil(now + time));
        Ok(())
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        let (hash, shard_index) = self.locate(policy, key);
        let removed = self.lock(shard_index).remove(hash, policy, key);
        self.record_removed(removed);
        Ok(())
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}
