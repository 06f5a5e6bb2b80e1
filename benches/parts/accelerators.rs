//! The speed of decisions that need no round trip, and whether they exceed the quota.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::support::server::RedisServer;
use super::support::windows::{Event, Recorder, Windows, now_us};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{DenyCache, QuotaPrefetch};
use tollgate::{Key, Limiter, Policy, Quota, RedisBackend};

const THREADS: usize = 2;
const ROUND: Duration = Duration::from_millis(1_200);

/// `deny_cache_per_s`, `lease_per_s` and `lease_over_admitted`.
pub(crate) fn figures() -> (f64, f64, u64) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .expect("a runtime starts");
    let server = RedisServer::start();
    runtime.block_on(async {
        let backend = RedisBackend::connect(server.url()).await.expect("Redis accepts the connection");
        let hot = deny_cache_per_s(backend.clone(), 1).await;
        let many = deny_cache_per_s(backend.clone(), 10_000).await;
        let (leased, draws) = lease_per_s(backend.clone()).await;
        let (windows, used) = lease_windows(backend).await;
        println!(
            "deny cache: one key {:.0}/s ({:.3} % hits), 10,000 keys {:.0}/s ({:.3} % hits)",
            hot.0,
            hot.1 * 100.0,
            many.0,
            many.1 * 100.0
        );
        println!("leases: {draws} draws; {windows:?}, {:.1} % of the quota was used", used * 100.0);
        (hot.0.min(many.0), leased, windows.over_admitted)
    })
}

fn limiter<S>(store: S, name: &str, quota: Quota) -> Limiter<S> {
    Limiter::new(store, Policy::new(name, quota.fixed_window())).deadline(Duration::from_secs(10))
}

/// Denied requests per second of exhausted quotas, and the share of hits. By default, the cache asks the store about each key once a
/// second.
async fn deny_cache_per_s(backend: RedisBackend, keys: usize) -> (f64, f64) {
    let store = DenyCache::new(backend).capacity(2 * keys.max(64));
    let limiter = limiter(store.clone(), "denied", Quota::per_day(1));
    let keys: Vec<Key> = (0..keys).map(|key| Key::from(format!("client-{key}"))).collect();
    for key in &keys {
        let _ = limiter.check(*key).await.expect("Redis decides");
    }
    load(&limiter, &keys, 64, false).await;
    let before = store.stats();
    let rates = (0..3_u8).map(async |_| load(&limiter, &keys, 64, false).await);
    let rate = median(rates).await;
    let (hits, misses) = (store.stats().hits - before.hits, store.stats().misses - before.misses);
    (rate, hits as f64 / (hits + misses) as f64)
}

/// Allowed requests per second of one key, and how often units were drawn.
async fn lease_per_s(backend: RedisBackend) -> (f64, u64) {
    let store = QuotaPrefetch::new(backend);
    let limiter = limiter(store.clone(), "leased", Quota::per_second(u32::MAX.into()));
    let keys = [Key::from("all")];
    load(&limiter, &keys, 64, true).await;
    let rates = (0..3_u8).map(async |_| load(&limiter, &keys, 64, true).await);
    (median(rates).await, store.stats().draws)
}

async fn median(rates: impl Iterator<Item = impl Future<Output = f64>>) -> f64 {
    let mut measured = Vec::new();
    for rate in rates {
        measured.push(rate.await);
    }
    measured.sort_by(f64::total_cmp);
    measured[measured.len() / 2]
}

/// Decisions per second, all with the same outcome.
async fn load<S>(limiter: &Limiter<S>, keys: &[Key], tasks: usize, allowed: bool) -> f64
where
    S: RateLimitStore + Clone + Send + Sync + 'static,
{
    let start = Instant::now();
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (limiter, keys) = (limiter.clone(), keys.to_owned());
            tokio::spawn(async move {
                let mut decided = 0_u64;
                // Each task has its own random sequence. Tasks with the same sequence would catch up with each other at cache misses.
                let mut random = (task as u64 + 1) * 0x9e37_79b9_7f4a_7c15;
                while start.elapsed() < ROUND {
                    for _ in 0..256 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let key = keys[(random >> 32) as usize % keys.len()];
                        let decision = limiter.check(key).await.expect("Redis decides");
                        assert!(black_box(decision).is_allowed() == allowed);
                    }
                    decided += 256;
                    tokio::task::yield_now().await;
                }
                decided
            })
        })
        .collect();
    let mut decided = 0;
    for task in tasks {
        decided += task.await.expect("no call fails");
    }
    decided as f64 / start.elapsed().as_secs_f64()
}

/// Four decorators, like those of four processes, share a quota. The many tasks of each decorator exhaust it in every window.
async fn lease_windows(backend: RedisBackend) -> (Windows, f64) {
    const QUOTA: u64 = 500;
    const WINDOW: Duration = Duration::from_millis(20);
    let quota = Quota::new(QUOTA, WINDOW).expect("20 ms are long enough");
    let start = Instant::now();
    let recorders: Vec<_> = (0..4).map(|_| Recorder::new(backend.clone())).collect();
    let tasks: Vec<_> = (0..128_usize)
        .map(|task| recorders[task % 4].clone())
        .map(|recorder| limiter(QuotaPrefetch::new(recorder), "windows", quota))
        .collect();
    // The tasks of one process share its leases.
    let tasks: Vec<_> = (0..tasks.len())
        .map(|task| {
            let limiter = tasks[task % 4].clone();
            tokio::spawn(async move {
                let mut admissions = Vec::new();
                while start.elapsed() < WINDOW * 150 {
                    let after = now_us();
                    let decision = limiter.check("all").await.expect("Redis decides");
                    if let Some(receipt) = decision.receipt() {
                        admissions.push(Event::Admission { charged: receipt.as_micros(), after, before: now_us() });
                    }
                }
                admissions
            })
        })
        .collect();
    let mut events = Vec::new();
    for task in tasks {
        events.extend(task.await.expect("no call fails"));
    }
    events.extend(recorders.iter().flat_map(Recorder::take));
    let windows = Windows::of(&events, QUOTA, WINDOW);
    (windows, windows.used(QUOTA))
}
