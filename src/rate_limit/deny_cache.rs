use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::decision::{Decision, Outcome, Receipt};
use super::policy::Policy;
use super::sharded_map::{Expiry, Place, Shards};
use super::store::{RateLimitStore, Request};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::Reach;

/// Remembers who is over the limit, and turns them away without asking the store again.
///
/// A client that hammers an exhausted quota then costs a look into a map instead of a round trip. Goes around any store,
/// under a layer and a [`Limiter`](super::Limiter) alike:
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
/// assert!(!limiter.check("alice").await?.is_allowed()); // says the store
/// let decision = limiter.check("alice").await?; // says the cache
/// assert_eq!(decision.retry_after(), Some(Duration::from_secs(60)));
/// assert_eq!((store.stats().misses, store.stats().hits), (2, 1));
/// # Ok(())
/// # }
/// ```
///
/// Clones share the cache.
///
/// # What it may get wrong
///
/// It never admits anybody. It denies more than the store would only after somebody made room: lifted a block, reset a key,
/// or gave units back. Where that went through this cache or a clone of it, it is noticed at once; where another process did
/// it, after the [maximum age](Self::max_age) at the latest. Time alone makes room when the store said it would.
///
/// A denial is remembered for the cost that was denied and for the very policy that denied it: a request that costs less is put
/// to the store, as is one with other limits. One that costs more is told the wait of the smaller cost, which is the least that
/// it has to wait. Waits shrink as time passes; what remains is what remained when the store was asked.
///
/// [`peek`](RateLimitStore::peek) always asks the store. Of several subjects ([`check_all`](RateLimitStore::check_all)) it is enough that one
/// is known to be denied: how the others stand is not said then, and their decisions have no limits.
///
/// # Memory
///
/// At most [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY) denials unless told otherwise. Those that ended are dropped as new
/// ones come, and in a full cache a few are looked at and the one that ends soonest is forgotten, which costs a question to
/// the store.
#[derive(Clone, Debug)]
pub struct DenyCache<S> {
    store: S,
    max_age: Duration,
    denials: Arc<Shards<CachedDenial, Books>>,
}

/// What is counted for a part of the subjects.
#[derive(Debug, Default)]
struct Books {
    hits: u64,
    misses: u64,
    // How often something was changed through the cache: a denial that was on its way meanwhile may be out of date. For all
    // subjects of the part, since the worst that comes of it is another question to the store.
    changes: u64,
}

/// What the store said.
#[derive(Debug)]
struct CachedDenial {
    policy: Policy,
    // The least that is denied.
    cost: u32,
    decision: Decision,
    // When the answer came. The decision was made before, so its waits are over no later than counted from here.
    told: Instant,
    // From when on the store is asked again, counted from before the question: no later than the cost fits.
    until: Instant,
}

impl Expiry for CachedDenial {
    fn ends(&self) -> Instant {
        self.until
    }
}

/// How much a [`DenyCache`] has saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenyCacheStats {
    /// The requests that were denied without the store; of one that counts for several, those of them that are known to be over their limits.
    pub hits: u64,
    /// The requests that the store was asked about; of one that counts for several, each of these.
    pub misses: u64,
    /// The denials that are kept, those included that ended and were not dropped yet.
    pub entries: usize,
}

impl<S> DenyCache<S> {
    /// How many denials are kept unless told otherwise.
    pub const DEFAULT_CAPACITY: usize = 10_000;
    /// How old a denial gets unless told otherwise.
    pub const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);

    /// A cache in front of `store`.
    pub fn new(store: S) -> Self {
        Self { store, max_age: Self::DEFAULT_MAX_AGE, denials: Arc::new(Shards::new(Self::DEFAULT_CAPACITY)) }
    }

    /// How many denials are kept at the most; at least one. Starts with an empty cache, which earlier clones do not share.
    /// Defaults to [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY).
    #[must_use]
    pub fn capacity(self, denials: usize) -> Self {
        Self { denials: Arc::new(Shards::new(denials)), ..self }
    }

    /// How long the cache goes without asking the store about a subject, at the most: what others change is noticed this late.
    /// Zero switches the cache off. Defaults to [`DEFAULT_MAX_AGE`](Self::DEFAULT_MAX_AGE).
    #[must_use]
    pub fn max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// How often the cache knew the answer, over all clones.
    #[must_use]
    pub fn stats(&self) -> DenyCacheStats {
        self.denials.each().fold(DenyCacheStats::default(), |stats, part| DenyCacheStats {
            hits: stats.hits + part.books.hits,
            misses: stats.misses + part.books.misses,
            entries: stats.entries + part.len(),
        })
    }

    /// The answer, or what is needed to remember the one of the store.
    fn look_up(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, Miss> {
        let place = self.denials.place(policy, key);
        let mut part = self.denials.lock(place);
        let now = Instant::now();
        let denial = part.get_mut(place, policy, key);
        let known = denial.filter(|denial| denial.until > now && denial.cost <= cost && denial.policy == *policy);
        if let Some(denial) = known {
            let decision = denial.decision.later(now - denial.told);
            part.books.hits += 1;
            policy.meters().deny_cache_asked(true);
            return Ok(decision);
        }
        Err(Miss { place, asked: now, changes: part.books.changes })
    }

    /// The answer where one of several is known to be denied, or what is needed to remember those of the store.
    fn look_up_all(&self, requests: &[Request]) -> Result<Vec<Decision>, Vec<Miss>> {
        let look_up = |Request { policy, key, cost }: &Request| self.look_up(policy, key, *cost);
        let known: Vec<_> = requests.iter().map(look_up).collect();
        if known.iter().any(Result::is_ok) {
            return Ok(known.into_iter().map(|known| known.unwrap_or_else(|_| Decision::of_none())).collect());
        }
        Err(known.into_iter().filter_map(Result::err).collect())
    }

    /// Counts a question that the store is asked.
    fn missed(&self, policy: &Policy, question: &Miss) {
        self.denials.lock(question.place).books.misses += 1;
        policy.meters().deny_cache_asked(false);
    }

    fn missed_all(&self, requests: &[Request], questions: &[Miss]) {
        for (Request { policy, .. }, question) in requests.iter().zip(questions) {
            self.missed(policy, question);
        }
    }

    /// Remembers what the store said, if that is a denial that will hold for a while.
    fn learn(&self, policy: &Policy, key: &Key, cost: u32, question: Miss, decision: &Decision) {
        let Miss { place, asked, changes } = question;
        let mut part = self.denials.lock(place);
        let cost = match decision.outcome() {
            Outcome::Limited => cost,
            // Whatever it costs.
            Outcome::Blocked => 0,
            Outcome::Allowed | Outcome::Never => return,
        };
        let Some(wait) = decision.retry_after() else { return };
        let (told, until) = (Instant::now(), asked + wait.min(self.max_age));
        if until <= told || part.books.changes != changes {
            return;
        }
        if let Some(known) = part.get_mut(place, policy, key)
            && known.cost < cost
            && known.until > told
            && known.policy == *policy
        {
            return;
        }
        let denial = CachedDenial { policy: policy.clone(), cost, decision: decision.clone(), told, until };
        part.put(place, policy, key, denial, told, |_, _| {});
    }

    /// The same for several that were asked about together.
    fn learn_all(&self, requests: &[Request], questions: Vec<Miss>, decisions: &[Decision]) {
        for ((request, question), decision) in requests.iter().zip(questions).zip(decisions) {
            let Request { policy, key, cost } = request;
            // What is denied to one that is named twice is denied to both costs together.
            let named = requests.iter().filter(|other| other.key == *key && other.policy.shares_counts_with(policy));
            if named.count() == 1 {
                self.learn(policy, key, *cost, question, decision);
            }
        }
    }

    /// Forgets what is known of a subject, now and when the value is dropped: what is changed meanwhile may be seen or not.
    fn forget<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> Forget<'a> {
        let forget = Forget { denials: &self.denials, policy, key };
        forget.now();
        forget
    }
}

/// A request that the store has to be asked about.
#[derive(Clone, Copy)]
struct Miss {
    place: Place,
    asked: Instant,
    changes: u64,
}

struct Forget<'a> {
    denials: &'a Shards<CachedDenial, Books>,
    policy: &'a Policy,
    key: &'a Key,
}

impl Forget<'_> {
    fn now(&self) {
        let place = self.denials.place(self.policy, self.key);
        let mut part = self.denials.lock(place);
        part.books.changes += 1;
        part.remove(place, self.policy, self.key);
    }
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.now();
    }
}

impl<S: RateLimitStore + Sync> RateLimitStore for DenyCache<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        let question = match self.look_up(policy, key, cost) {
            Ok(decision) => return Ok(decision),
            Err(question) => question,
        };
        // First: it may fail, or come too late.
        self.missed(policy, &question);
        let decision = self.store.check(policy, key, cost).await?;
        self.learn(policy, key, cost, question, &decision);
        Ok(decision)
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u32) -> Option<Decision> {
        let question = match self.look_up(policy, key, cost) {
            Ok(decision) => return Some(decision),
            Err(question) => question,
        };
        let decision = self.store.check_now(policy, key, cost)?;
        self.missed(policy, &question);
        self.learn(policy, key, cost, question, &decision);
        Some(decision)
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        if let [Request { policy, key, cost }] = requests {
            return Ok(vec![self.check(policy, key, *cost).await?]);
        }
        let questions = match self.look_up_all(requests) {
            Ok(decisions) => return Ok(decisions),
            Err(questions) => questions,
        };
        self.missed_all(requests, &questions);
        let decisions = self.store.check_all(requests).await?;
        self.learn_all(requests, questions, &decisions);
        Ok(decisions)
    }

    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        let questions = match self.look_up_all(requests) {
            Ok(decisions) => return Some(decisions),
            Err(questions) => questions,
        };
        let decisions = self.store.check_all_now(requests)?;
        self.missed_all(requests, &questions);
        self.learn_all(requests, questions, &decisions);
        Some(decisions)
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        self.store.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        // What is charged makes no room.
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

    fn scope(&self) -> Reach {
        self.store.scope()
    }
}
