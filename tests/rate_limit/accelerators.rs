//! `DenyCache` and `QuotaPrefetch` around the memory backend, on a paused clock: the store contract, and how accurate the decisions are.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use proptest::prelude::*;
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep, timeout};
use tollgate::rate_limit::store::{RateLimitStore, Request};
use tollgate::rate_limit::{CircuitBreaker, Decision, DenyCache, Outcome, QuotaPrefetch, RateLimited, Receipt};
use tollgate::{
    BoxError, ErrorResponder, GlobalKey, Key, Limiter, MemoryBackend, Policy, Quota, RateLimitFallback, RateLimitLayer,
    StoreError,
};
use tower::{Service as _, ServiceBuilder, ServiceExt as _};

/// With default settings. All changes by the contract's tests go through the cache, so it notices them at once.
mod deny_cache {
    use super::*;

    tollgate::rate_limit_contract!(
        #[tokio::test(start_paused = true)]
        async {
            DenyCache::new(MemoryBackend::new())
        }
    );
}

/// With default settings. Keys without a lease are counted exactly. With a single process, keys with a lease are too.
mod leases {
    use super::*;

    tollgate::rate_limit_contract!(
        #[tokio::test(start_paused = true)]
        async {
            QuotaPrefetch::new(MemoryBackend::new())
        }
    );
}

/// `DenyCache` around `QuotaPrefetch`.
mod both {
    use super::*;

    tollgate::rate_limit_contract!(
        #[tokio::test(start_paused = true)]
        async {
            DenyCache::new(QuotaPrefetch::new(MemoryBackend::new()))
        }
    );
}

const MINUTE: Duration = Duration::from_secs(60);

fn limiter<S>(store: &S, policy: &Policy) -> Limiter<S>
where
    S: Clone,
{
    Limiter::new(store.clone(), policy.clone()).deadline(MINUTE)
}

fn fixed(limit: u64) -> Policy {
    Policy::new("fixed", Quota::per_minute(limit).fixed_window())
}

/// A store that counts its calls, delays its replies, and fails on demand.
#[derive(Clone, Debug)]
struct Slow<S> {
    store: S,
    inner: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    checks: AtomicU64,
    fails: AtomicBool,
    there: AtomicU64,
    back: AtomicU64,
    charges: Mutex<Vec<(u64, u64, u64)>>,
    given_back: Mutex<Vec<(u64, u64)>>,
}

impl<S> Slow<S> {
    fn new(store: S) -> Self {
        Self { store, inner: Arc::default() }
    }

    /// Sets the latency of a call in microseconds: `there` until the store decides, `back` until the reply arrives.
    fn takes(&self, there: u64, back: u64) {
        self.inner.there.store(there, Ordering::Relaxed);
        self.inner.back.store(back, Ordering::Relaxed);
    }

    fn checks(&self) -> u64 {
        self.inner.checks.load(Ordering::Relaxed)
    }

    async fn pause(&self, which: &AtomicU64) {
        let time = which.load(Ordering::Relaxed);
        if time > 0 {
            sleep(Duration::from_micros(time)).await;
        }
    }
}

impl<S: RateLimitStore + Sync> RateLimitStore for Slow<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.inner.checks.fetch_add(1, Ordering::Relaxed);
        let _ = ASKED.try_with(|asked| asked.set(true));
        self.pause(&self.inner.there).await;
        if self.inner.fails.load(Ordering::Relaxed) {
            return Err(StoreError::timeout());
        }
        let decision = self.store.check(policy, key, cost).await;
        if let Ok(decision) = &decision
            && let Some(receipt) = decision.receipt()
        {
            let at = receipt.as_micros();
            let ends = at + decision.limits()[0].reset_after().as_micros() as u64;
            self.inner.charges.lock().unwrap().push((at, ends, cost));
        }
        self.pause(&self.inner.back).await;
        decision
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        self.inner.checks.fetch_add(1, Ordering::Relaxed);
        if self.inner.fails.load(Ordering::Relaxed) {
            return Err(StoreError::timeout());
        }
        self.store.check_all(requests).await
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.store.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        self.pause(&self.inner.there).await;
        self.inner.given_back.lock().unwrap().push((receipt.as_micros(), change.unsigned_abs()));
        self.store.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        self.pause(&self.inner.there).await;
        self.store.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        self.pause(&self.inner.there).await;
        self.store.reset(policy, key).await?;
        self.pause(&self.inner.back).await;
        Ok(())
    }
}

fn slow() -> (MemoryBackend, Slow<MemoryBackend>) {
    let backend = MemoryBackend::new();
    (backend.clone(), Slow::new(backend))
}

#[tokio::test(start_paused = true)]
async fn cached_denial_needs_no_store_call_and_its_wait_shrinks() {
    let (_, slow) = slow();
    let store = DenyCache::new(slow.clone()).max_age(MINUTE);
    let limiter = limiter(&store, &fixed(1));
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    let denial = limiter.check("alice").await.unwrap();
    assert_eq!((denial.outcome(), denial.retry_after(), slow.checks()), (Outcome::Limited, Some(MINUTE), 2));
    for seconds in 1..60 {
        advance(Duration::from_secs(1)).await;
        let decision = limiter.check("alice").await.unwrap();
        let left = Duration::from_secs(60 - seconds);
        assert_eq!((decision.outcome(), decision.retry_after()), (Outcome::Limited, Some(left)));
        assert_eq!((decision.remaining(), decision.reset_after()), (Some(0), left));
    }
    assert_eq!((slow.checks(), store.stats().hits, store.stats().misses), (2, 59, 2));
    advance(Duration::from_secs(1)).await;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn failed_and_late_store_calls_count_as_misses() {
    let (_, slow) = slow();
    let store = DenyCache::new(slow.clone());
    let limiter = limiter(&store, &fixed(1)).deadline(Duration::from_millis(10));
    slow.inner.fails.store(true, Ordering::Relaxed);
    assert!(limiter.check("alice").await.is_err());
    drop(timeout(Duration::ZERO, store.check(&fixed(1), &Key::from("bob"), 1)).await);
    assert_eq!((store.stats().hits, store.stats().misses), (0, 2));
}

/// Regression: if a request had several keys, it went to the store although a denial of one key was cached.
#[tokio::test(start_paused = true)]
async fn request_with_several_keys_is_denied_from_the_cache() {
    let (backend, slow) = slow();
    let store = DenyCache::new(slow.clone()).max_age(MINUTE);
    let total = Policy::new("total", Quota::per_minute(1_000).fixed_window());
    let layer = RateLimitLayer::new(store.clone(), fixed(3))
        .key(|client: &&'static str| *client)
        .and(total.clone(), GlobalKey)
        .on_store_error(RateLimitFallback::Allow)
        .circuit_breaker(CircuitBreaker::new().failures(2).probe_interval(Duration::from_secs(1)))
        .responder(ErrorResponder);
    let mut service = ServiceBuilder::new().layer(layer).service_fn(async |_: &'static str| Ok::<_, BoxError>(()));
    let mut ask = async |client| service.ready().await.unwrap().call(client).await;
    for _ in 0..3 {
        ask("alice").await.unwrap();
    }
    for _ in 0..100 {
        let error = ask("alice").await.unwrap_err();
        let limited = error.downcast_ref::<RateLimited>().unwrap();
        assert_eq!((limited.policy(), limited.retry_after()), ("fixed", Some(MINUTE)));
    }
    assert_eq!((slow.checks(), store.stats().hits, store.stats().misses), (4, 99, 8));
    ask("bob").await.unwrap();
    let left = backend.peek(&total, &Key::GLOBAL, 1).await.unwrap().remaining();
    assert_eq!(left, Some(996), "denied requests are not charged");

    // A cached denial says nothing about the health of the store, so it does not close the circuit.
    slow.inner.fails.store(true, Ordering::Relaxed);
    let asked = slow.checks();
    for _ in 0..3 {
        ask("bob").await.unwrap();
    }
    assert_eq!(slow.checks(), asked + 2);
    advance(Duration::from_secs(2)).await;
    assert!(ask("alice").await.is_err());
    for _ in 0..3 {
        ask("bob").await.unwrap();
    }
    assert_eq!(slow.checks(), asked + 3, "expected only a probe");
}

#[tokio::test(start_paused = true)]
async fn denial_of_a_doubled_descriptor_is_not_cached_for_one() {
    let store = DenyCache::new(MemoryBackend::new()).max_age(MINUTE);
    let (policy, key) = (fixed(3), Key::from("alice"));
    assert!(store.check(&policy, &key, 2).await.unwrap().is_allowed());
    let request = Request { policy: policy.clone(), key, cost: 1 };
    let decisions = store.check_all(&[request.clone(), request]).await.unwrap();
    assert!(!decisions.iter().all(Decision::is_allowed));
    assert!(store.check(&policy, &key, 1).await.unwrap().is_allowed());
}

/// The denial of an expensive request does not apply to a cheap one. A cache that looks only at the key would deny clients with units left.
#[tokio::test(start_paused = true)]
async fn cheap_request_is_not_denied_because_of_an_expensive_one() {
    let (_, slow) = slow();
    let store = DenyCache::new(slow.clone());
    let limiter = limiter(&store, &fixed(10));
    assert!(limiter.check_cost("alice", 6).await.unwrap().is_allowed());
    assert!(!limiter.check_cost("alice", 6).await.unwrap().is_allowed());
    assert!(limiter.check_cost("alice", 3).await.unwrap().is_allowed());
    assert!(limiter.check_cost("alice", 0).await.unwrap().is_allowed());
    assert!(!limiter.check_cost("alice", 2).await.unwrap().is_allowed());
    let asked = slow.checks();
    // A cost equal to or above the denied cost needs no store call.
    for cost in 2..=10 {
        assert!(!limiter.check_cost("alice", cost).await.unwrap().is_allowed());
    }
    assert_eq!(slow.checks(), asked);
    assert!(limiter.check_cost("alice", 1).await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn denial_of_the_old_plan_does_not_apply_to_the_new_plan() {
    let store = DenyCache::new(MemoryBackend::new());
    let (free, pro) = (limiter(&store, &fixed(1)), limiter(&store, &fixed(5)));
    assert!(free.check("alice").await.unwrap().is_allowed());
    assert!(!free.check("alice").await.unwrap().is_allowed());
    assert!(pro.check("alice").await.unwrap().is_allowed());
    // An equal policy, for example after a reload of the configuration, shares the cached denial.
    assert!(!limiter(&store, &fixed(1)).check("alice").await.unwrap().is_allowed());
    let hits = store.stats().hits;
    assert!(!limiter(&store, &fixed(1)).check("alice").await.unwrap().is_allowed());
    assert_eq!(store.stats().hits, hits + 1);
}

#[tokio::test(start_paused = true)]
async fn changes_by_other_processes_are_noticed_after_max_age() {
    let backend = MemoryBackend::new();
    let store = DenyCache::new(backend.clone()).max_age(Duration::from_millis(300));
    let (here, there) = (limiter(&store, &fixed(1)), limiter(&backend, &fixed(1)));
    let _ = here.check("alice").await.unwrap();
    assert!(!here.check("alice").await.unwrap().is_allowed());
    there.reset("alice").await.unwrap();
    advance(Duration::from_millis(299)).await;
    assert!(!here.check("alice").await.unwrap().is_allowed());
    advance(Duration::from_millis(1)).await;
    assert!(here.check("alice").await.unwrap().is_allowed());

    there.block("bob", MINUTE).await.unwrap();
    assert_eq!(here.check("bob").await.unwrap().outcome(), Outcome::Blocked);
    there.block("bob", Duration::ZERO).await.unwrap();
    let cached = here.check_cost("bob", 0).await.unwrap();
    assert_eq!((cached.outcome(), cached.retry_after()), (Outcome::Blocked, Some(MINUTE)));
    advance(Duration::from_millis(300)).await;
    assert!(here.check("bob").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn changes_through_the_cache_take_effect_at_once() {
    let store = DenyCache::new(MemoryBackend::new()).max_age(MINUTE);
    let limiter = limiter(&store, &fixed(1));
    let receipt = limiter.check("alice").await.unwrap().receipt().unwrap();
    for _ in 0..2 {
        assert!(!limiter.check("alice").await.unwrap().is_allowed());
    }
    limiter.settle("alice", receipt, -1).await.unwrap();
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
    limiter.reset("alice").await.unwrap();
    limiter.block("alice", MINUTE).await.unwrap();
    for _ in 0..2 {
        assert_eq!(limiter.check("alice").await.unwrap().outcome(), Outcome::Blocked);
    }
    limiter.block("alice", Duration::ZERO).await.unwrap();
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

/// The store denies, then resets the key. The denial arrives after the reply to the reset.
#[tokio::test(start_paused = true)]
async fn denial_overtaken_by_a_reset_is_not_cached() {
    let (_, slow) = slow();
    let store = DenyCache::new(slow.clone());
    let limiter = limiter(&store, &fixed(1));
    let _ = limiter.check("alice").await.unwrap();
    slow.takes(0, 500_000);
    let late = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.check("alice").await.unwrap() }
    });
    sleep(Duration::from_millis(1)).await;
    slow.takes(0, 0);
    limiter.reset("alice").await.unwrap();
    assert!(!late.await.unwrap().is_allowed());
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

/// Regression: a charge removed the cached denial of its key, and made all denials in flight in the same shard uncacheable.
#[tokio::test(start_paused = true)]
async fn denial_overtaken_by_a_charge_is_cached() {
    let (_, slow) = slow();
    let store = DenyCache::new(slow.clone());
    let limiter = limiter(&store, &fixed(1));
    let receipt = limiter.check("alice").await.unwrap().receipt().unwrap();
    slow.takes(0, 50_000);
    let late = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.check("alice").await.unwrap() }
    });
    sleep(Duration::from_millis(1)).await;
    slow.takes(0, 0);
    limiter.settle("alice", receipt, 1).await.unwrap();
    assert!(!late.await.unwrap().is_allowed());
    limiter.settle("alice", receipt, 1).await.unwrap();
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
    assert_eq!((store.stats().hits, slow.checks()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn cached_denial_expires_in_time_on_a_slow_network() {
    let (backend, slow) = slow();
    slow.takes(20_000, 30_000);
    let store = DenyCache::new(slow.clone()).max_age(MINUTE);
    let policy = Policy::new("slow", Quota::new(1, Duration::from_millis(500)).unwrap().fixed_window());
    let limiter = limiter(&store, &policy);
    let _ = limiter.check("alice").await.unwrap();
    let _ = limiter.check("alice").await.unwrap();
    let asked = slow.checks();
    let cached = limiter.check("alice").await.unwrap().retry_after().unwrap();
    assert_eq!(slow.checks(), asked);
    let key = Key::from("alice");
    let stored = backend.peek(&policy, &key, 1).await.unwrap().retry_after().unwrap();
    assert!(cached >= stored && cached <= stored + Duration::from_millis(50), "{cached:?} instead of {stored:?}");
    sleep(stored).await;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn full_cache_evicts_the_denial_that_ends_first() {
    for capacity in [0, 1, 7, 100, 1_000] {
        let store = DenyCache::new(MemoryBackend::new()).capacity(capacity);
        let limiter = limiter(&store, &fixed(1));
        for client in 0..3_000_u32 {
            let _ = limiter.check(client).await.unwrap();
            assert!(!limiter.check(client).await.unwrap().is_allowed());
            assert!(store.stats().entries <= capacity.max(1));
        }
        assert!(store.stats().entries >= capacity / 2);
    }
    let store = DenyCache::new(MemoryBackend::new()).capacity(50).max_age(MINUTE);
    let long = limiter(&store, &Policy::new("long", Quota::per_minute(1).fixed_window()));
    let short = limiter(&store, &Policy::new("short", Quota::per_second(1).fixed_window()));
    for _ in 0..2 {
        let _ = long.check("alice").await.unwrap();
    }
    for client in 0..2_000_u32 {
        let _ = short.check(client).await.unwrap();
        let _ = short.check(client).await.unwrap();
    }
    let hits = store.stats().hits;
    let _ = long.check("alice").await.unwrap();
    assert_eq!(store.stats().hits, hits + 1);
}

#[tokio::test(start_paused = true)]
async fn check_now_returns_cached_denial() {
    let (_, slow) = slow();
    let store = DenyCache::new(slow);
    let (policy, key) = (fixed(1), Key::from("alice"));
    assert!(store.check_now(&policy, &key, 1).is_none());
    let _ = store.check(&policy, &key, 1).await.unwrap();
    let _ = store.check(&policy, &key, 1).await.unwrap();
    assert_eq!(store.check_now(&policy, &key, 1).unwrap().outcome(), Outcome::Limited);
    // `peek` always calls the store. `check_now` calls it too if the store can decide at once.
    assert!(!store.peek(&policy, &key, 1).await.unwrap().is_allowed());
    let memory = DenyCache::new(MemoryBackend::new());
    assert!(memory.check_now(&policy, &key, 1).unwrap().is_allowed());
}

/// An operation on a store.
#[derive(Clone, Debug)]
enum Act {
    Check { key: u8, cost: u64 },
    Settle { which: usize, change: i64 },
    Block { key: u8, ms: u64 },
    Reset { key: u8 },
    Wait { us: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        10 => (0_u8..3, 0_u64..5).prop_map(|(key, cost)| Act::Check { key, cost }),
        1 => (0_usize..8, -4_i64..3).prop_map(|(which, change)| Act::Settle { which, change }),
        1 => (0_u8..3, 0_u64..60).prop_map(|(key, ms)| Act::Block { key, ms }),
        1 => (0_u8..3).prop_map(|key| Act::Reset { key }),
        6 => (0_u64..60_000).prop_map(|us| Act::Wait { us }),
    ]
}

fn run_paused<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(future)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// If all changes go through the cache, it changes no decision.
    #[test]
    fn deny_cache_decides_as_its_store_would(acts in prop::collection::vec(act(), 1..150), which in 0_usize..5) {
        let quota = Quota::new(4, Duration::from_millis(100)).unwrap();
        let limits = [quota.fixed_window(), quota.sliding_window(), quota.token_bucket(), quota.sliding_log().unwrap()];
        let policy = match limits.get(which) {
            Some(limit) => Policy::new("plain", *limit),
            None => limits.into_iter().fold(Policy::new("all", quota.fixed_window()), Policy::limit),
        };
        run_paused(async {
            let (plain, cached) = (MemoryBackend::new(), DenyCache::new(MemoryBackend::new()).max_age(MINUTE).capacity(2));
            let mut receipts = Vec::new();
            for act in acts {
                match act {
                    Act::Check { key, cost } => {
                        let key = Key::from(key);
                        let expected = plain.check(&policy, &key, cost).await.unwrap();
                        let decision = cached.check(&policy, &key, cost).await.unwrap();
                        prop_assert_eq!(decision.outcome(), expected.outcome());
                        prop_assert!(decision.retry_after() <= expected.retry_after());
                        prop_assert!(decision.retry_after() != Some(Duration::ZERO));
                        receipts.extend(decision.receipt().map(|receipt| (key, receipt)));
                    }
                    Act::Settle { which, change } => {
                        if let Some((key, receipt)) = receipts.iter().rev().nth(which) {
                            plain.settle(&policy, key, *receipt, change).await.unwrap();
                            cached.settle(&policy, key, *receipt, change).await.unwrap();
                        }
                    }
                    Act::Block { key, ms } => {
                        plain.block(&policy, &Key::from(key), Duration::from_millis(ms)).await.unwrap();
                        cached.block(&policy, &Key::from(key), Duration::from_millis(ms)).await.unwrap();
                    }
                    Act::Reset { key } => {
                        plain.reset(&policy, &Key::from(key)).await.unwrap();
                        cached.reset(&policy, &Key::from(key)).await.unwrap();
                    }
                    Act::Wait { us } => advance(Duration::from_micros(us)).await,
                }
            }
            Ok(())
        })?;
    }
}

#[tokio::test(start_paused = true)]
async fn layer_accepts_deny_cache_around_prefetch() {
    let (_, slow) = slow();
    let store = DenyCache::new(QuotaPrefetch::new(slow.clone()));
    let policy = fixed(1_000);
    let mut service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(store.clone(), policy).responder(ErrorResponder))
        .service_fn(async |()| Ok::<_, tollgate::BoxError>(()));
    let mut admitted = 0;
    for _ in 0..3_000 {
        admitted += u32::from(service.ready().await.unwrap().call(()).await.is_ok());
    }
    assert_eq!(admitted, 1_000);
    assert!(slow.checks() < 100, "{} store calls for 3,000 requests", slow.checks());
    assert!(store.stats().hits > 1_990);
}

/// Returns a limiter whose key `alice` has qualified for a lease.
async fn hot<S: RateLimitStore + Clone>(store: &S, policy: &Policy) -> Limiter<S> {
    let limiter = limiter(store, policy);
    for _ in 0..QuotaPrefetch::<()>::PROMOTE_AFTER {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    limiter
}

#[tokio::test(start_paused = true)]
async fn hot_key_is_served_from_leases_to_the_last_unit() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = limiter(&store, &fixed(10_000));
    for left in (0..10_000).rev() {
        let decision = limiter.check("alice").await.unwrap();
        assert!(decision.is_allowed());
        // With a single process, the remaining units are exact.
        assert_eq!((decision.remaining(), decision.capacity(), decision.reset_after()), (Some(left), 10_000, MINUTE));
        assert!(decision.receipt().is_some());
    }
    assert!(slow.checks() < 100, "{} store calls for 10,000 requests", slow.checks());
    let stats = store.stats();
    assert_eq!((stats.drawn, stats.given_back, stats.expired, stats.held), (stats.handed_out, 0, 0, 0));
    assert!(stats.handed_out > 9_900);
    // Every denial comes from the store.
    let asked = slow.checks();
    for _ in 0..5 {
        assert_eq!(limiter.check("alice").await.unwrap().retry_after(), Some(MINUTE));
    }
    assert_eq!(slow.checks(), asked + 5);
    // In the next window, the key still qualifies for leases.
    advance(MINUTE).await;
    for _ in 0..9_000 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    assert!(slow.checks() < asked + 105, "{} store calls for 19,000 requests", slow.checks());
}

#[tokio::test(start_paused = true)]
async fn cold_key_is_counted_exactly() {
    let (backend, slow) = slow();
    let (store, policy) = (QuotaPrefetch::new(slow.clone()), fixed(1_000));
    let limiter = limiter(&store, &policy);
    // One request every 20 ms does not qualify a key for a lease.
    for turn in 1..=100 {
        let _ = limiter.check("alice").await.unwrap();
        assert_eq!(slow.checks(), turn);
        let peek = backend.peek(&policy, &Key::from("alice"), 1).await.unwrap();
        assert_eq!(peek.remaining(), Some(1_000 - turn));
        advance(Duration::from_millis(20)).await;
    }
    assert_eq!(store.stats().drawn, 0);
}

#[tokio::test(start_paused = true)]
async fn policies_without_fixed_windows_go_to_the_store() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let quota = Quota::per_minute(1_000);
    let others = [quota.sliding_window(), quota.token_bucket(), quota.sliding_log().unwrap()];
    let policies = others.map(|limit| Policy::new("other", limit));
    let mixed = fixed(1_000).limit(Quota::per_hour(9_000).token_bucket());
    for policy in policies.into_iter().chain([mixed]) {
        let limiter = limiter(&store, &policy);
        let before = slow.checks();
        for _ in 0..100 {
            assert!(limiter.check("alice").await.unwrap().is_allowed());
        }
        assert_eq!(slow.checks(), before + 100);
        store.reset(&policy, &Key::from("alice")).await.unwrap();
    }
    assert_eq!(store.stats(), tollgate::rate_limit::PrefetchStats::default());
    // Several fixed windows share a lease, which ends with the first of them.
    let windows = fixed(1_000).limit(Quota::per_hour(9_000).fixed_window());
    let limiter = hot(&store, &windows).await;
    let before = slow.checks();
    for _ in 0..500 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    assert!(slow.checks() < before + 20);
}

#[tokio::test(start_paused = true)]
async fn unused_units_are_given_back() {
    let (backend, policy) = (MemoryBackend::new(), fixed(1_000));
    let store = QuotaPrefetch::new(backend.clone()).max_age(Duration::from_millis(500));
    let limiter = hot(&store, &policy).await;
    let mut admitted = 8;
    // Make requests until a lease of 30 units or more has just been drawn.
    while store.stats().held < 30 {
        let _ = limiter.check("alice").await.unwrap();
        admitted += 1;
    }
    let held = store.stats().held;
    let left = |decision: Decision| decision.remaining().unwrap();
    assert_eq!(left(limiter.peek("alice").await.unwrap()), 1_000 - admitted - held);
    advance(Duration::from_millis(500)).await;
    // The next request finds the lease expired and gives the rest back. Then it charges its own cost or draws a smaller lease.
    let _ = limiter.check("alice").await.unwrap();
    let stats = store.stats();
    assert_eq!((stats.given_back, stats.expired), (held, 0));
    assert!(stats.held < held);
    assert_eq!(left(limiter.peek("alice").await.unwrap()), 999 - admitted - stats.held);
    assert_eq!(stats.drawn, stats.handed_out + stats.given_back + stats.expired + stats.held);
    // The units of an idle key expire with the window.
    advance(MINUTE).await;
    assert_eq!((store.stats().held, store.stats().expired), (0, stats.held));
}

#[tokio::test(start_paused = true)]
async fn give_back_returns_all_held_units() {
    let (backend, slow) = slow();
    let (store, policy) = (QuotaPrefetch::new(slow.clone()), fixed(1_000));
    let limiter = limiter(&store, &policy);
    let use_20 = async || {
        for client in 0..100_u32 {
            for _ in 0..20 {
                assert!(limiter.check(client).await.unwrap().is_allowed());
            }
        }
    };
    use_20().await;
    let held = store.stats().held;
    assert!(held > 100, "{held}");
    // The number of leases that are given back at the same time is bounded, so 100 leases take more than one round.
    slow.takes(10_000, 0);
    let since = Instant::now();
    store.give_back(MINUTE).await;
    let took = since.elapsed();
    assert!(took >= Duration::from_millis(20) && took < Duration::from_millis(25), "{took:?}");
    let stats = store.stats();
    assert_eq!((stats.held, stats.given_back, stats.expired), (0, held, 0));
    for client in 0..100_u32 {
        let peek = backend.peek(&policy, &Key::from(client), 1).await.unwrap();
        assert_eq!(peek.remaining(), Some(980), "{client}");
    }

    // Units that are not given back by the deadline are lost, so that they do not delay the end of the program.
    slow.takes(0, 0);
    use_20().await;
    let held = store.stats().held;
    slow.takes(10_000, 0);
    store.give_back(Duration::from_millis(15)).await;
    let given_back = store.stats().given_back - stats.given_back;
    assert!(given_back > 0 && given_back < held, "{given_back} of {held}");
    let stats = store.stats();
    assert_eq!((stats.held, stats.expired), (0, held - given_back));
    assert_eq!(stats.drawn, stats.handed_out + stats.given_back + stats.expired);
}

#[tokio::test(start_paused = true)]
async fn under_admission_is_at_most_the_idle_shares() {
    const QUOTA: u64 = 10_000;
    let (backend, policy) = (MemoryBackend::new(), fixed(QUOTA));
    let mut admitted = 0;
    let mut idle = Vec::new();
    for _ in 0..4 {
        // Each process draws a lease of the maximum size, and then stays idle.
        let store = QuotaPrefetch::new(backend.clone());
        let limiter = hot(&store, &policy).await;
        admitted += u64::from(QuotaPrefetch::<()>::PROMOTE_AFTER);
        let mut most = 0;
        loop {
            let left = limiter.peek("alice").await.unwrap().remaining().unwrap();
            assert!(limiter.check("alice").await.unwrap().is_allowed());
            admitted += 1;
            let held = store.stats().held;
            if held > most {
                assert!(held <= left / 8, "{held} of {left}");
            }
            // The lease holds more than a tenth of the remaining units, so it has reached its share.
            if held > most && held * 10 > left {
                break;
            }
            most = held;
        }
        idle.push(store);
    }
    // The other units can be used to the last one, by a process without leases and by a process with leases.
    let (one_by_one, leased) = (limiter(&backend, &policy), QuotaPrefetch::new(backend.clone()));
    let greedy = hot(&leased, &policy).await;
    admitted += u64::from(QuotaPrefetch::<()>::PROMOTE_AFTER);
    loop {
        let by_lease = greedy.check("alice").await.unwrap().is_allowed();
        let by_itself = one_by_one.check("alice").await.unwrap().is_allowed();
        admitted += u64::from(by_lease) + u64::from(by_itself);
        if !by_lease && !by_itself {
            break;
        }
    }
    let held: u64 = idle.iter().map(|store| store.stats().held).sum();
    assert_eq!(admitted + held, QUOTA);
    assert!(held > QUOTA / 4, "the idle processes hold only {held}");
    assert!(held as f64 <= QUOTA as f64 * (1.0 - (7.0_f64 / 8.0).powi(4)), "{held}");
    // When the window is over, these units count as expired.
    advance(MINUTE).await;
    for store in idle {
        let stats = store.stats();
        assert_eq!((stats.held, stats.drawn), (0, stats.handed_out + stats.given_back + stats.expired));
        assert!(stats.expired > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn unused_prefetched_unit_can_be_refunded() {
    let store = QuotaPrefetch::new(MemoryBackend::new());
    let limiter = hot(&store, &fixed(100)).await;
    let mut receipts = Vec::new();
    for _ in 8..100 {
        receipts.push(limiter.check("alice").await.unwrap().receipt().unwrap());
    }
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
    for receipt in &receipts[..40] {
        limiter.settle("alice", *receipt, -1).await.unwrap();
    }
    for _ in 0..40 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn waiters_survive_a_cancelled_refill() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = hot(&store, &fixed(100_000)).await;
    for _ in 0..50 {
        let _ = limiter.check("alice").await.unwrap();
    }
    while store.stats().held > 0 {
        let _ = limiter.check("alice").await.unwrap();
    }
    slow.takes(300_000, 300_000);
    let asked = slow.checks();
    let mut callers: Vec<_> = (0..20)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.check("alice").await.unwrap() })
        })
        .collect();
    sleep(Duration::from_millis(40)).await;
    assert_eq!(slow.checks(), asked + 1, "expected one draw for all callers");
    let before = store.stats();
    // The caller that draws is dropped. No other caller draws as much again, since the draw may have been charged: each charges its own
    // cost.
    callers.remove(0).abort();
    sleep(Duration::from_millis(100)).await;
    assert_eq!(slow.checks(), asked + 1 + 19);
    for caller in callers {
        assert!(timeout(Duration::from_secs(10), caller).await.expect("a caller is stuck").unwrap().is_allowed());
    }
    assert_eq!(slow.checks(), asked + 20);
    assert_eq!(slow.inner.charges.lock().unwrap().iter().rev().take(19).map(|(.., cost)| cost).sum::<u64>(), 19);
    // The prefetched units serve all requests.
    let stats = store.stats();
    assert!(
        stats.held > 20 && stats.drawn == before.drawn + stats.held && stats.expired == before.expired,
        "{stats:?}"
    );
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    assert_eq!(slow.checks(), asked + 20);
}

/// The store does not answer, and the caller that draws is dropped or no longer polled.
#[tokio::test(start_paused = true)]
async fn draw_without_a_reply_is_abandoned() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone()).max_age(Duration::from_millis(500));
    let limiter = hot(&store, &fixed(100_000)).await;
    for _ in 0..50 {
        let _ = limiter.check("alice").await.unwrap();
    }
    while store.stats().held > 0 {
        let _ = limiter.check("alice").await.unwrap();
    }
    let (before, asked) = (store.stats(), slow.checks());
    slow.takes(3_600_000_000, 0);
    assert!(timeout(Duration::from_millis(100), limiter.check("alice")).await.is_err());
    sleep(Duration::from_millis(900)).await;
    assert_eq!(store.stats(), before);
    sleep(Duration::from_millis(101)).await;
    let stats = store.stats();
    let lost = stats.expired - before.expired;
    assert!(lost > 20 && stats.drawn == before.drawn + lost, "{stats:?}");
    assert_eq!(slow.checks(), asked + 1);

    slow.takes(0, 0);
    for _ in 0..50 {
        let _ = limiter.check("alice").await.unwrap();
    }
    while store.stats().held > 0 {
        let _ = limiter.check("alice").await.unwrap();
    }
    slow.takes(3_600_000_000, 0);
    let mut drawing = Box::pin(limiter.check("alice"));
    assert!(drawing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let other = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.check("alice").await.unwrap() }
    });
    sleep(Duration::from_millis(499)).await;
    slow.takes(0, 0);
    let asked = slow.checks();
    sleep(Duration::from_millis(2)).await;
    assert_eq!(slow.checks(), asked + 1, "the waiting caller charges its own cost");
    assert!(other.await.unwrap().is_allowed());
}

/// Regression: the first waiter waited for half of its deadline, then charged its own cost, and was late.
#[tokio::test(start_paused = true)]
async fn slow_refill_serves_all_its_waiters() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = hot(&store, &fixed(100_000)).await.deadline(Duration::from_millis(100));
    for _ in 0..50 {
        let _ = limiter.check("alice").await.unwrap();
    }
    while store.stats().held > 0 {
        let _ = limiter.check("alice").await.unwrap();
    }
    slow.takes(60_000, 0);
    let (asked, since) = (slow.checks(), Instant::now());
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let limiter = limiter.clone();
        callers.spawn(async move { limiter.check("alice").await.unwrap().is_allowed() });
        sleep(Duration::from_micros(500)).await;
    }
    assert!(callers.join_all().await.into_iter().all(|allowed| allowed));
    assert!(since.elapsed() <= Duration::from_millis(61), "{:?}", since.elapsed());
    assert_eq!(slow.checks(), asked + 1);
}

/// Regression: all other callers waited for the unpolled draw until their deadlines, as if the store had failed.
#[tokio::test(start_paused = true)]
async fn unpolled_draw_delays_no_other_caller() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = hot(&store, &fixed(100_000)).await.deadline(Duration::from_millis(20));
    for _ in 0..50 {
        let _ = limiter.check("alice").await.unwrap();
    }
    while store.stats().held > 0 {
        let _ = limiter.check("alice").await.unwrap();
    }
    slow.takes(5_000, 0);
    let asked = slow.checks();
    let mut drawing = Box::pin(limiter.check("alice"));
    assert!(drawing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let since = Instant::now();
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let limiter = limiter.clone();
        callers.spawn(async move { limiter.check("alice").await.unwrap().is_allowed() });
    }
    assert!(callers.join_all().await.into_iter().all(|allowed| allowed));
    assert!(since.elapsed() <= Duration::from_millis(6), "{:?}", since.elapsed());
    assert!(drawing.await.unwrap().is_allowed());
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    assert_eq!(slow.checks(), asked + 1);
}

/// Again and again, the store hangs for longer than the deadlines of the callers of a hot key.
#[tokio::test(start_paused = true)]
async fn hanging_store_costs_one_lease() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = hot(&store, &fixed(500_000)).await;
    for _ in 0..5_000 {
        let _ = limiter.check("alice").await.unwrap();
    }
    let before = store.stats();
    assert!(before.drawn > 1_000, "{before:?}");
    slow.takes(0, 200_000);
    let charges = slow.inner.charges.lock().unwrap().len();
    let mut callers = JoinSet::new();
    for _ in 0..2_000 {
        let limiter = limiter.clone().deadline(Duration::from_millis(100));
        callers.spawn(async move { limiter.check("alice").await.is_ok() });
        sleep(Duration::from_micros(100)).await;
    }
    callers.join_all().await;
    let after = store.stats();
    let charged = slow.inner.charges.lock().unwrap()[charges..].iter().map(|(.., cost)| cost).sum::<u64>();
    assert_eq!(after.draws, before.draws + 1);
    let lost = after.drawn - before.drawn;
    assert!(charged <= 2_000 + lost, "{charged} units for 2,000 requests, {before:?} {after:?}");
    assert_eq!(after.drawn, after.handed_out + after.given_back + after.expired + after.held);
    // Once the store recovers, leases work as before.
    slow.takes(0, 0);
    for _ in 0..5_000 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    assert!(store.stats().handed_out - after.handed_out > 4_000, "{:?}", store.stats());
}

/// A lease that has expired when it arrives cannot be handed out. All requests then charge their own costs, in parallel.
#[tokio::test(start_paused = true)]
async fn requests_wait_for_no_lease_if_the_store_is_too_slow() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone()).max_age(Duration::from_millis(100));
    let limiter = hot(&store, &fixed(100_000)).await;
    slow.takes(200_000, 200_000);
    let start = Instant::now();
    let mut callers = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        callers.spawn(async move { limiter.check("alice").await.unwrap().is_allowed() });
    }
    assert!(callers.join_all().await.into_iter().all(|allowed| allowed));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    // The requests do not wait until the units are given back.
    sleep(Duration::from_millis(200)).await;
    let stats = store.stats();
    assert_eq!((stats.held, stats.expired, stats.drawn), (0, 0, stats.handed_out + stats.given_back));
}

#[tokio::test(start_paused = true)]
async fn store_errors_reach_all_callers() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = hot(&store, &fixed(100_000)).await;
    slow.inner.fails.store(true, Ordering::Relaxed);
    slow.takes(1_000, 0);
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let limiter = limiter.clone();
        callers.spawn(async move { limiter.check("alice").await.is_err() });
    }
    assert!(timeout(MINUTE, callers.join_all()).await.unwrap().into_iter().all(|failed| failed));
    slow.inner.fails.store(false, Ordering::Relaxed);
    for _ in 0..100 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
}

#[tokio::test(start_paused = true)]
async fn block_and_reset_end_a_lease() {
    let backend = MemoryBackend::new();
    let store = QuotaPrefetch::new(backend.clone()).max_age(Duration::from_millis(500));
    let limiter = hot(&store, &fixed(1_000)).await;
    let _ = limiter.check("alice").await.unwrap();
    let _ = limiter.check("alice").await.unwrap();
    limiter.block("alice", MINUTE / 2).await.unwrap();
    assert_eq!(limiter.check("alice").await.unwrap().outcome(), Outcome::Blocked);
    limiter.reset("alice").await.unwrap();
    for left in (0..1_000).rev() {
        assert_eq!(limiter.check("alice").await.unwrap().remaining(), Some(left));
    }
    assert!(!limiter.check("alice").await.unwrap().is_allowed());

    // A block by another process is noticed when the lease reaches its maximum age.
    let limiter = hot(&QuotaPrefetch::new(backend.clone()).max_age(Duration::from_millis(500)), &fixed(5_000)).await;
    for _ in 0..100 {
        let _ = limiter.check("alice").await.unwrap();
    }
    backend.block(&fixed(5_000), &Key::from("alice"), MINUTE / 2).await.unwrap();
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    advance(Duration::from_millis(500)).await;
    assert_eq!(limiter.check("alice").await.unwrap().outcome(), Outcome::Blocked);
}

/// The store charges a draw, then resets the key. When the reply to the draw arrives, the units are no longer charged.
#[tokio::test(start_paused = true)]
async fn draw_overtaken_by_a_reset_is_lost() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let limiter = hot(&store, &fixed(1_000)).await;
    slow.takes(0, 400_000);
    let late = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.check("alice").await.unwrap() }
    });
    sleep(Duration::from_millis(1)).await;
    slow.takes(0, 0);
    assert_eq!(store.stats().draws, 0);
    limiter.reset("alice").await.unwrap();
    assert!(late.await.unwrap().is_allowed());
    assert_eq!((store.stats().draws, store.stats().held), (1, 0));
    assert_eq!(store.stats().drawn, store.stats().handed_out + store.stats().expired);
    let mut admitted = 0;
    while limiter.check("alice").await.unwrap().is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 1_000);
}

#[tokio::test(start_paused = true)]
async fn prefetch_is_exact_for_costs_of_any_size() {
    for cost in [1, 2, 3, 7, 40, 600] {
        let store = QuotaPrefetch::new(MemoryBackend::new());
        let limiter = limiter(&store, &fixed(1_000));
        let mut admitted = 0;
        while limiter.check_cost("alice", cost).await.unwrap().is_allowed() {
            admitted += cost;
        }
        // The remaining units are too few, or are held for smaller requests.
        let held = store.stats().held;
        assert!(admitted + held <= 1_000 && admitted + held + cost > 1_000, "{admitted} by {cost}, {held} held");
        assert!(held < cost, "{held} held from requests of {cost}");
        for _ in 0..held {
            assert!(limiter.check("alice").await.unwrap().is_allowed());
            admitted += 1;
        }
        while limiter.check("alice").await.unwrap().is_allowed() {
            admitted += 1;
        }
        assert_eq!(admitted, 1_000, "by {cost}");
    }
}

#[tokio::test(start_paused = true)]
async fn check_now_uses_a_live_lease() {
    let (_, slow) = slow();
    let (store, policy, key) = (QuotaPrefetch::new(slow), fixed(1_000), Key::from("alice"));
    let limiter = hot(&store, &policy).await;
    assert!(store.check_now(&policy, &key, 1).is_none(), "a draw takes a store call");
    let _ = limiter.check("alice").await.unwrap();
    assert!(store.check_now(&policy, &key, 1).unwrap().is_allowed());
    let memory = QuotaPrefetch::new(MemoryBackend::new());
    for _ in 0..8 {
        assert!(memory.check_now(&policy, &key, 1).unwrap().is_allowed());
    }
    assert!(memory.check_now(&policy, &key, 1).is_none(), "only a caller that can wait draws");
    assert!(memory.check(&policy, &key, 1).await.unwrap().is_allowed());
    assert!(memory.check_now(&policy, &key, 1).unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn prefetched_keys_are_bounded_and_survive_a_flood() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone()).capacity(50);
    let limiter = hot(&store, &fixed(100_000)).await;
    for _ in 0..1_000 {
        let _ = limiter.check("alice").await.unwrap();
    }
    let held = store.stats().held;
    assert!(held > 0);
    for stranger in 0..5_000_u32 {
        let _ = limiter.check(stranger).await.unwrap();
    }
    assert_eq!((store.stats().held, store.stats().expired), (held, 0));
}

/// A lease is too small for a request, and the window ends during the next draw: the rest of the lease belongs to the old window.
#[tokio::test(start_paused = true)]
async fn lease_is_not_carried_into_the_next_window() {
    let (_, slow) = slow();
    let store = QuotaPrefetch::new(slow.clone());
    let policy = Policy::new("next", Quota::new(1_000, Duration::from_millis(200)).unwrap().fixed_window());
    let limiter = hot(&store, &policy).await;
    while store.stats().held != 3 || store.stats().draws < 4 {
        let _ = limiter.check("alice").await.unwrap();
    }
    advance(Duration::from_millis(195)).await;
    slow.takes(10_000, 0);
    let decision = limiter.check_cost("alice", 4).await.unwrap();
    assert!(decision.is_allowed());
    assert!(store.stats().held > 0, "the draw gave no lease");
    assert_eq!((store.stats().draws > 1, store.stats().expired), (true, 3));
    slow.takes(0, 0);
    let mut admitted = 4;
    while limiter.check("alice").await.unwrap().is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 1_000);
}

/// Instead of the end of the window, a reset by another process ends the lease.
#[tokio::test(start_paused = true)]
async fn lease_is_not_carried_over_a_reset() {
    let backend = MemoryBackend::new();
    let store = QuotaPrefetch::new(backend.clone());
    let limiter = hot(&store, &fixed(1_000)).await;
    while store.stats().held != 3 || store.stats().draws < 4 {
        let _ = limiter.check("alice").await.unwrap();
    }
    advance(Duration::from_millis(10)).await;
    backend.reset(&fixed(1_000), &Key::from("alice")).await.unwrap();
    let mut admitted = 4;
    assert!(limiter.check_cost("alice", 4).await.unwrap().is_allowed());
    assert_eq!(store.stats().expired, 3);
    while limiter.check("alice").await.unwrap().is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 1_000);
}

/// A lease without a maximum age lives as long as its window.
#[tokio::test(start_paused = true)]
async fn largest_ages_are_accepted() {
    let store = DenyCache::new(QuotaPrefetch::new(MemoryBackend::new()).max_age(Duration::MAX)).max_age(Duration::MAX);
    let policy = Policy::new("long", Quota::new(1_000, Quota::MAX_WINDOW).unwrap().fixed_window());
    let limiter = hot(&store, &policy).await;
    for _ in 8..1_000 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    for _ in 0..3 {
        assert!(!limiter.check("alice").await.unwrap().is_allowed());
    }
    limiter.block("bob", Duration::MAX).await.unwrap();
    for _ in 0..3 {
        assert_eq!(limiter.check("bob").await.unwrap().outcome(), Outcome::Blocked);
    }
}

tokio::task_local! {
    /// Whether the request called the store.
    static ASKED: std::cell::Cell<bool>;
}

/// The traffic of one process in the simulation: its tasks, their largest cost and typical pause, and the latency of the store.
#[derive(Clone, Debug)]
struct Traffic {
    tasks: usize,
    cost: u64,
    pause_us: u64,
    there_us: u64,
    back_us: u64,
}

fn traffic() -> impl Strategy<Value = Traffic> {
    let way = || prop_oneof![Just(0_u64), 1_u64..300, 300_u64..5_000, 5_000_u64..60_000];
    let pause = prop_oneof![1_u64..100, 100_u64..3_000, 3_000_u64..40_000];
    (1_usize..6, 1_u64..5, pause, way(), way()).prop_map(|(tasks, cost, pause_us, there_us, back_us)| Traffic {
        tasks,
        cost,
        pause_us,
        there_us,
        back_us,
    })
}

/// Returns the next pseudo-random number of a repeatable sequence.
fn next(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 20) % below.max(1)
}

/// An admission: the time of its charge, the time of a local decision, and the cost.
type Admission = (u64, Option<u64>, u64);

/// The events of a simulation.
#[derive(Debug, Default)]
struct Seen {
    /// The instant, the end of the window, the units.
    charges: Vec<(u64, u64, u64)>,
    /// The instant of the charge, the units.
    given_back: Vec<(u64, u64)>,
    admissions: Vec<Admission>,
}

/// Runs several processes with leases over one store.
async fn simulate(traffic: &[Traffic], policy: &Policy, time: Duration, seed: u64) -> Seen {
    let backend = MemoryBackend::new();
    // The clock of the backend starts one microsecond before its creation.
    let epoch = Instant::now() - Duration::from_micros(1);
    let mut tasks = JoinSet::new();
    let mut stores = Vec::new();
    for (number, traffic) in traffic.iter().enumerate() {
        let slow = Slow::new(backend.clone());
        let limiter = limiter(&QuotaPrefetch::new(slow.clone()), policy);
        for task in 0..traffic.tasks {
            let (limiter, slow, traffic) = (limiter.clone(), slow.clone(), traffic.clone());
            let mut random = seed ^ ((number * 31 + task + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            tasks.spawn(ASKED.scope(std::cell::Cell::new(false), async move {
                let mut admissions = Vec::new();
                while epoch.elapsed() < time {
                    // Some requests follow without a pause, which makes bursts. Others follow a random pause.
                    if next(&mut random, 4) > 0 {
                        sleep(Duration::from_micros(next(&mut random, 2 * traffic.pause_us))).await;
                    }
                    slow.takes(next(&mut random, traffic.there_us + 1), next(&mut random, traffic.back_us + 1));
                    let cost = 1 + next(&mut random, traffic.cost);
                    ASKED.with(|asked| asked.set(false));
                    // A few callers give up after 1 ms.
                    let time_limit = if next(&mut random, 50) == 0 { Duration::from_millis(1) } else { MINUTE };
                    let decision = match timeout(time_limit, limiter.check_cost("all", cost)).await {
                        Ok(decision) => decision.unwrap(),
                        Err(_) => continue,
                    };
                    if let Some(receipt) = decision.receipt() {
                        let local = (!ASKED.with(std::cell::Cell::get)).then(|| epoch.elapsed().as_micros() as u64);
                        admissions.push((receipt.as_micros(), local, cost));
                    }
                    tokio::task::yield_now().await;
                }
                admissions
            }));
        }
        stores.push(slow);
    }
    let mut seen = Seen { admissions: tasks.join_all().await.concat(), ..Seen::default() };
    for store in stores {
        seen.charges.append(&mut store.inner.charges.lock().unwrap());
        seen.given_back.append(&mut store.inner.given_back.lock().unwrap());
    }
    seen
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn processes_with_prefetch_never_exceed_a_window(
        traffic in prop::collection::vec(traffic(), 1..5),
        quota in prop_oneof![5_u64..60, 60_u64..3_000],
        window_ms in 10_u64..200,
        seed in 1_u64..u64::MAX,
    ) {
        let window = Duration::from_millis(window_ms);
        let policy = Policy::new("windows", Quota::new(quota, window).unwrap().fixed_window());
        let Seen { charges, given_back, admissions } = run_paused(simulate(&traffic, &policy, window * 12, seed));
        // All charges of a window have the same end. A unit belongs to the window of its charge, and must be handed out before that window
        // ends by the store's clock.
        let window_of: BTreeMap<u64, u64> = charges.iter().map(|(at, ends, _)| (*at, *ends)).collect();
        let mut charged: BTreeMap<u64, i64> = BTreeMap::new();
        for (_, ends, units) in charges {
            *charged.entry(ends).or_default() += units as i64;
        }
        for (at, units) in given_back {
            *charged.entry(window_of[&at]).or_default() -= units as i64;
        }
        let mut admitted: BTreeMap<u64, i64> = BTreeMap::new();
        for (at, local, cost) in admissions {
            let ends = window_of[&at];
            if let Some(decided) = local {
                prop_assert!(decided < ends, "charged at {}, handed out at {}, {} after the end", at, decided, decided - ends);
            }
            *admitted.entry(ends).or_default() += cost as i64;
        }
        for (ends, units) in admitted {
            prop_assert!(units <= quota as i64, "{} of {} in the window that ends at {}", units, quota, ends);
            // Also in a window that is not used up, no admission lacks a charge.
            prop_assert!(units <= charged[&ends], "{} of {} charged, window {}", units, charged[&ends], ends);
        }
    }
}
