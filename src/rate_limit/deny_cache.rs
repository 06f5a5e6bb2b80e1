use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::decision::{Decision, Outcome, Receipt};
use super::policy::Policy;
use super::sharded_map::{Expiry, Location, ShardedMap};
use super::store::{RateLimitStore, Request};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

/// Caches denials, and denies further requests of the same key without a store call.
///
/// A client that keeps calling with an exhausted quota then costs a map lookup instead of a round trip. It wraps any store. Pass it as the
/// store to a layer or a [`Limiter`](super::Limiter):
///
/// ```
/// use std::time::Duration;
/// use tollgate::rate_limit::DenyCache;
/// use tollgate::{Limiter, MemoryBackend, Policy, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
/// let store = DenyCache::new(MemoryBackend::new()); // or a `RedisBackend`, where it saves a round trip
/// let limiter = Limiter::new(store.clone(), Policy::new("api", Quota::per_minute(1).fixed_window()));
///
/// assert!(limiter.check("alice").await?.is_allowed());
/// assert!(!limiter.check("alice").await?.is_allowed()); // from the store
/// let decision = limiter.check("alice").await?; // from the cache
/// assert_eq!(decision.retry_after(), Some(Duration::from_secs(60)));
/// assert_eq!((store.stats().misses, store.stats().hits), (2, 1));
/// # Ok(())
/// # }
/// ```
///
/// Clones share the cache.
///
/// # Accuracy
///
/// The cache never admits a request itself. It denies more than the store only after an operation freed units: a lifted block, a reset, or
/// a refund. If the operation went through this cache or a clone of it, it takes effect at once. If another process did it, it takes effect
/// after the [maximum age](Self::max_age) at the latest. Units that become free with time are no such case: the denial tells when.
///
/// A denial is cached for its cost and its exact policy: a request with a lower cost or other limits goes to the store. A request with a
/// higher cost gets the wait of the lower cost, which is the least that it has to wait. Waits shrink as time passes. The remaining units
/// are those from the time of the store call.
///
/// [`peek`](RateLimitStore::peek) always calls the store. For several keys ([`check_all`](RateLimitStore::check_all)), one cached denial is
/// enough to deny the request. The decisions of the other keys then list no limits.
///
/// # Memory
///
/// At most [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY) denials by default. Expired denials are removed as new ones are added. If the cache
/// is full, it evicts the denial that ends first in a small sample. The next request of that key then needs a store call.
#[derive(Clone, Debug)]
pub struct DenyCache<S> {
    store: S,
    max_age: Duration,
    denials: Arc<ShardedMap<CachedDenial, ShardState>>,
}

/// The state of a shard.
#[derive(Debug, Default)]
struct ShardState {
    hits: u64,
    misses: u64,
    // How often a key was changed through the cache. If it changes during a store call, the returned denial may be out of date, and is not
    // cached. One counter serves all keys of the shard, since a change of another key costs only a further store call.
    changes: u64,
}

/// A denial by the store.
#[derive(Debug)]
struct CachedDenial {
    policy: Policy,
    // The lowest denied cost.
    cost: u64,
    decision: Decision,
    // When the denial was received. The waits of its decision count from here. The store decided earlier, so no wait is too short.
    received_at: Instant,
    // When the store is called again. The wait counts from before the store call, so this is never after the time when the cost fits.
    until: Instant,
}

impl Expiry for CachedDenial {
    fn expires_at(&self) -> Instant {
        self.until
    }
}

/// The statistics of a [`DenyCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenyCacheStats {
    /// Requests that were denied without a store call. Of a request with several keys, each key with a cached denial counts.
    pub hits: u64,
    /// Requests that went to the store. Of a request with several keys, each key counts.
    pub misses: u64,
    /// Cached denials, including expired denials until they are removed.
    pub entries: usize,
}

impl<S> DenyCache<S> {
    /// The default maximum number of denials.
    pub const DEFAULT_CAPACITY: usize = 10_000;
    /// The default maximum age of a denial.
    pub const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);

    /// Creates a cache in front of `store`.
    pub fn new(store: S) -> Self {
        Self { store, max_age: Self::DEFAULT_MAX_AGE, denials: Arc::new(ShardedMap::new(Self::DEFAULT_CAPACITY)) }
    }

    /// Sets the maximum number of denials, at least one. The returned cache starts empty, and is not shared with earlier clones. Defaults
    /// to [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY), 10,000.
    #[must_use]
    pub fn capacity(self, denials: usize) -> Self {
        Self { denials: Arc::new(ShardedMap::new(denials)), ..self }
    }

    /// Sets the longest time without a store call for a key. Changes by other processes take effect after this time at the latest. Zero
    /// disables the cache.
    /// Defaults to [`DEFAULT_MAX_AGE`](Self::DEFAULT_MAX_AGE), 1 second.
    #[must_use]
    pub fn max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// Returns the statistics of all clones.
    #[must_use]
    pub fn stats(&self) -> DenyCacheStats {
        self.denials.lock_each().fold(DenyCacheStats::default(), |stats, shard| DenyCacheStats {
            hits: stats.hits + shard.state.hits,
            misses: stats.misses + shard.state.misses,
            entries: stats.entries + shard.len(),
        })
    }

    /// Returns the cached denial, or the `Miss` with which to cache the decision of the store.
    fn look_up(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, Miss> {
        let location = self.denials.locate(policy, key);
        let mut shard = self.denials.lock(location);
        let now = Instant::now();
        let denial = shard.get_mut(location, policy, key);
        let known = denial.filter(|denial| denial.until > now && denial.cost <= cost && denial.policy == *policy);
        if let Some(denial) = known {
            let decision = denial.decision.later(now - denial.received_at);
            shard.state.hits += 1;
            policy.metrics().deny_cache_looked_up(true);
            return Ok(decision);
        }
        Err(Miss { location, called_at: now, changes: shard.state.changes })
    }

    /// Returns the decisions if one of several keys has a cached denial, or the `Miss` of each key.
    fn look_up_all(&self, requests: &[Request]) -> Result<Vec<Decision>, Vec<Miss>> {
        let look_up = |Request { policy, key, cost }: &Request| self.look_up(policy, key, *cost);
        let known: Vec<_> = requests.iter().map(look_up).collect();
        if known.iter().any(Result::is_ok) {
            return Ok(known.into_iter().map(|known| known.unwrap_or_else(|_| Decision::not_evaluated())).collect());
        }
        Err(known.into_iter().filter_map(Result::err).collect())
    }

    /// Counts a store call.
    fn missed(&self, policy: &Policy, miss: &Miss) {
        self.denials.lock(miss.location).state.misses += 1;
        policy.metrics().deny_cache_looked_up(false);
    }

    fn missed_all(&self, requests: &[Request], misses: &[Miss]) {
        for (Request { policy, .. }, miss) in requests.iter().zip(misses) {
            self.missed(policy, miss);
        }
    }

    /// Caches the decision of the store if it is a denial that lasts for a while.
    fn remember(&self, policy: &Policy, key: &Key, cost: u64, miss: Miss, decision: &Decision) {
        let Miss { location, called_at, changes } = miss;
        let mut shard = self.denials.lock(location);
        let cost = match decision.outcome() {
            Outcome::Limited => cost,
            // A block applies to every cost.
            Outcome::Blocked => 0,
            Outcome::Allowed | Outcome::Never => return,
        };
        let Some(wait) = decision.retry_after() else { return };
        let (received_at, until) = (Instant::now(), called_at + wait.min(self.max_age));
        if until <= received_at || shard.state.changes != changes {
            return;
        }
        if let Some(known) = shard.get_mut(location, policy, key)
            && known.cost < cost
            && known.until > received_at
            && known.policy == *policy
        {
            return;
        }
        let denial = CachedDenial { policy: policy.clone(), cost, decision: decision.clone(), received_at, until };
        shard.put(location, policy, key, denial, received_at, |_, _| {});
    }

    /// Caches the decisions about several keys.
    fn remember_all(&self, requests: &[Request], misses: Vec<Miss>, decisions: &[Decision]) {
        for ((request, miss), decision) in requests.iter().zip(misses).zip(decisions) {
            let Request { policy, key, cost } = request;
            // If a key occurs twice, its denial is about the sum of both costs.
            let named = requests.iter().filter(|other| other.key == *key && other.policy.shares_counts_with(policy));
            if named.count() == 1 {
                self.remember(policy, key, *cost, miss, decision);
            }
        }
    }

    /// Removes the denial of a key, now and when the returned value is dropped. Keep that value until the store call has ended: checks
    /// during the call may cache a denial from before the change.
    fn forget<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> Forget<'a> {
        let forget = Forget { denials: &self.denials, policy, key };
        forget.now();
        forget
    }
}

/// A request that needs a store call.
#[derive(Clone, Copy)]
struct Miss {
    location: Location,
    called_at: Instant,
    changes: u64,
}

struct Forget<'a> {
    denials: &'a ShardedMap<CachedDenial, ShardState>,
    policy: &'a Policy,
    key: &'a Key,
}

impl Forget<'_> {
    fn now(&self) {
        let location = self.denials.locate(self.policy, self.key);
        let mut shard = self.denials.lock(location);
        shard.state.changes += 1;
        shard.remove(location, self.policy, self.key);
    }
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.now();
    }
}

impl<S: RateLimitStore + Sync> RateLimitStore for DenyCache<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        let miss = match self.look_up(policy, key, cost) {
            Ok(decision) => return Ok(decision),
            Err(miss) => miss,
        };
        // Counted before the call, which may fail or time out.
        self.missed(policy, &miss);
        let decision = self.store.check(policy, key, cost).await?;
        self.remember(policy, key, cost, miss, &decision);
        Ok(decision)
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        let miss = match self.look_up(policy, key, cost) {
            Ok(decision) => return Some(decision),
            Err(miss) => miss,
        };
        let decision = self.store.check_now(policy, key, cost)?;
        self.missed(policy, &miss);
        self.remember(policy, key, cost, miss, &decision);
        Some(decision)
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        if let [Request { policy, key, cost }] = requests {
            return Ok(vec![self.check(policy, key, *cost).await?]);
        }
        let misses = match self.look_up_all(requests) {
            Ok(decisions) => return Ok(decisions),
            Err(misses) => misses,
        };
        self.missed_all(requests, &misses);
        let decisions = self.store.check_all(requests).await?;
        self.remember_all(requests, misses, &decisions);
        Ok(decisions)
    }

    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        let misses = match self.look_up_all(requests) {
            Ok(decisions) => return Some(decisions),
            Err(misses) => misses,
        };
        let decisions = self.store.check_all_now(requests)?;
        self.missed_all(requests, &misses);
        self.remember_all(requests, misses, &decisions);
        Some(decisions)
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.store.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        // An added charge makes no room.
        let _forget = (change < 0).then(|| self.forget(policy, key));
        self.store.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        let _forget = self.forget(policy, key);
        self.store.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        let _forget = self.forget(policy, key);
        self.store.reset(policy, key).await
    }

    fn reach(&self) -> Reach {
        self.store.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.store.add_to_shutdown(target);
    }
}
