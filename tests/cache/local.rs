//! The tier in the process: what it serves, and when it asks the store.

use std::time::Duration;

use redis::Commands;
use tokio::time::{Instant, advance, sleep};
use tollgate::cache::store::CacheStore;
use tollgate::cache::{CacheError, CircuitBreaker, Loaded};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{BoxError, Cache, MemoryBackend};

use crate::support::cluster::Cluster;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn plain<S: CacheStore + Send + Sync + 'static>(store: S) -> Cache<u64> {
    Cache::new(store, "numbers", MINUTE).jitter(0.0).early_refresh(0.0)
}

fn cache<S: CacheStore + Send + Sync + 'static>(store: S) -> Cache<u64> {
    plain(store).local_tier(100, 10 * SECOND)
}

async fn fill(cache: &Cache<u64>, value: u64) -> u64 {
    *cache.get_or_fill("a", async move || Ok::<_, BoxError>(value)).await.unwrap().unwrap()
}

/// Reads until a condition holds, for at most ten seconds.
async fn wait_for(cache: &Cache<u64>, expected: Option<u64>) {
    let give_up = Instant::now() + 10 * SECOND;
    while cache.get("a").await.unwrap().map(|value| *value) != expected {
        assert!(Instant::now() < give_up, "{:?} is not {expected:?}", cache.get("a").await);
        sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn hit_needs_no_store_until_its_age() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let cache = cache(store);
    fill(&cache, 1).await;
    assert_eq!(fill(&cache, 2).await, 1, "read, and kept from now on");
    let calls = faults.total_calls();
    advance(9 * SECOND).await;
    for _ in 0..100 {
        assert_eq!(fill(&cache, 2).await, 1);
    }
    assert_eq!(faults.total_calls(), calls);
    advance(SECOND).await;
    assert_eq!(fill(&cache, 2).await, 1);
    assert!(faults.total_calls() > calls, "after its age the store is asked");
    advance(50 * SECOND).await;
    assert_eq!(fill(&cache, 2).await, 2, "no longer fresh");
}

#[tokio::test(start_paused = true)]
async fn change_by_this_process_is_seen_at_once() {
    let cache = cache(MemoryBackend::new());
    for round in 0..10 {
        assert_eq!(fill(&cache, round).await, round);
        assert_eq!(fill(&cache, 99).await, round);
        match round % 3 {
            0 => cache.invalidate("a").await.unwrap(),
            1 => {
                cache.set("a", 77).await.unwrap();
                assert_eq!(fill(&cache, 99).await, 77);
                cache.invalidate("a").await.unwrap();
            }
            _ => {
                cache.expire("a").await.unwrap();
                assert_eq!(fill(&cache, 77).await, round, "stale, while it is loaded");
                sleep(SECOND).await;
                assert_eq!(fill(&cache, 99).await, 77);
                cache.invalidate_tag("t").await.unwrap();
                assert_eq!(fill(&cache, 99).await, 77, "it has no tag");
                cache.invalidate("a").await.unwrap();
            }
        }
        let tagged = cache.tagged(["t"]);
        assert_eq!(fill(&tagged, 50 + round).await, 50 + round);
        assert_eq!(fill(&tagged, 99).await, 50 + round);
        cache.invalidate_tag("t").await.unwrap();
    }
}

async fn change_by_another_process_is_notified(first: Cache<u64>, second: Cache<u64>) {
    for round in 0..5 {
        assert_eq!(fill(&first, 10 * round).await, 10 * round);
        wait_for(&second, Some(10 * round)).await;
        first.set("a", 10 * round + 1).await.unwrap();
        wait_for(&second, Some(10 * round + 1)).await;
        first.invalidate("a").await.unwrap();
        wait_for(&second, None).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_by_another_process_is_notified_on_redis() {
    let server = RedisServer::start();
    let [first, second] = [patient(server.url()).await, patient(server.url()).await].map(|backend| {
        // So long that only a notification ends it.
        plain(backend).local_tier(100, 100 * MINUTE).deadline(5 * SECOND)
    });
    change_by_another_process_is_notified(first, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_by_another_process_is_notified_on_a_cluster() {
    let cluster = Cluster::start();
    let [first, second] = [patient(cluster.url()).await, patient(cluster.url()).await]
        .map(|backend| plain(backend).local_tier(100, 100 * MINUTE).deadline(5 * SECOND));
    change_by_another_process_is_notified(first, second).await;
}

/// A value is not kept if it was changed between its read and the subscription, or while the reply was on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn value_that_changes_while_it_is_read_is_not_kept() {
    let server = RedisServer::start();
    let writer = plain(patient(server.url()).await).deadline(5 * SECOND);
    let reader = plain(patient(server.url()).await).local_tier(100, 100 * MINUTE).deadline(5 * SECOND);
    for round in 1..500_u64 {
        let reading = tokio::spawn({
            let reader = reader.clone();
            async move {
                for _ in 0..3 {
                    reader.get("a").await.unwrap();
                }
            }
        });
        writer.set("a", round).await.unwrap();
        reading.await.unwrap();
        // Whatever was read, the message arrives.
        wait_for(&reader, Some(round)).await;
    }
}

/// The subscription begins before the value is read.
#[tokio::test(start_paused = true)]
async fn change_between_read_and_subscription_is_noticed() {
    let backend = MemoryBackend::new();
    let (store, other) = (FaultStore::new(backend.clone()), plain(backend));
    let faults = store.faults();
    let cache = cache(store);
    other.set("a", 1).await.unwrap();
    let step = Duration::from_millis(10);
    faults.delay(step);
    tokio::join!(async { cache.get("a").await.unwrap() }, async {
        sleep(step + step / 2).await;
        other.set("a", 2).await.unwrap();
    });
    assert_eq!(cache.get("a").await.unwrap().as_deref(), Some(&2));
}

/// A change during a lost connection is not notified. After the loss, the store is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_subscription_ends_the_trust() {
    let server = RedisServer::start();
    let store = FaultStore::new(patient(server.url()).await);
    let faults = store.faults();
    let cache = plain(store).local_tier(100, 100 * MINUTE).deadline(5 * SECOND);
    // The message of the put may arrive after the next read. Then the value is read once more.
    fill(&cache, 1).await;
    let mut calls = 0;
    while faults.total_calls() != calls {
        calls = faults.total_calls();
        assert_eq!(fill(&cache, 9).await, 1);
    }
    let mut connection = server.connection();
    let entry = "tollgate:2:{cache:numbers:a}:entry";
    // Without a message, as if it was lost.
    let bytes: Vec<u8> = connection.get(entry).unwrap();
    let changed: Vec<u8> = [&bytes[..bytes.len() - 1], b"2"].concat();
    let () = connection.set_ex(entry, changed, 60).unwrap();
    assert_eq!(fill(&cache, 9).await, 1, "nobody has told it");
    let () = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "pubsub"]).query::<()>(&mut connection).unwrap_or_default();
    wait_for(&cache, Some(2)).await;
}

#[tokio::test(start_paused = true)]
async fn failing_store_leaves_the_last_known_value() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let cache = cache(store).stale_for(MINUTE).origin_limit(1);
    fill(&cache, 1).await;
    fill(&cache, 1).await;
    faults.fail(Failure::Unavailable);
    advance(20 * SECOND).await;
    assert_eq!(fill(&cache, 2).await, 1, "fresh, although the store cannot confirm it");
    advance(50 * SECOND).await;
    assert_eq!(fill(&cache, 2).await, 1, "stale");
    advance(51 * SECOND).await;
    assert_eq!(fill(&cache, 2).await, 2, "too old");

    // A value with a known change is not served.
    faults.heal();
    sleep(10 * SECOND).await;
    assert_eq!(fill(&cache, 3).await, 3);
    assert_eq!(fill(&cache, 4).await, 3);
    plain(backend).invalidate("a").await.unwrap();
    faults.fail(Failure::Unavailable);
    assert_eq!(fill(&cache, 5).await, 5);
}

#[tokio::test(start_paused = true)]
async fn number_of_values_is_bounded() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let cache = cache(store);
    let get_all = async || {
        for key in 0..10_000_u64 {
            let value = *cache.get_or_fill(key, async move || Ok::<_, BoxError>(key)).await.unwrap().unwrap();
            assert_eq!(value, key);
        }
    };
    get_all().await;
    get_all().await;
    let calls = faults.total_calls();
    get_all().await;
    assert!(faults.total_calls() - calls > 9_000, "at most 100 values are kept, and some more until they are evicted");
}

/// The time for which a value is served stale is the one of its entry.
#[tokio::test(start_paused = true)]
async fn failing_store_leaves_each_value_for_its_own_time() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let cache = plain(store).local_tier(100, MINUTE).absent_for(MINUTE).origin_limit(0);
    let (absent, own, default) = ("absent", "own", "default");
    cache.set(absent, Loaded::absent()).await.unwrap();
    cache.set(own, Loaded::value(1).stale_for(MINUTE)).await.unwrap();
    cache.set(default, 2).await.unwrap();
    let get = async |key| cache.get_or_fill(key, async || Ok::<_, BoxError>(9)).await;
    for key in [absent, own, default] {
        get(key).await.unwrap();
    }
    faults.fail(Failure::Unavailable);
    assert!(get(absent).await.unwrap().is_none());
    advance(61 * SECOND).await;
    assert_eq!(get(own).await.unwrap().as_deref(), Some(&1));
    for key in [absent, default] {
        assert!(matches!(get(key).await.unwrap_err(), CacheError::OriginLimit { .. }), "{key} is not served stale");
    }
    advance(MINUTE).await;
    assert!(get(own).await.is_err());
}

/// If this process cannot subscribe, only the hits before the circuit opens wait for it. Without the circuit, each of them waits for 200 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hits_do_not_wait_for_failing_subscriptions() {
    let server = RedisServer::start();
    let () = server.query("ACL SETUSER default -subscribe -ssubscribe");
    let backend = patient(server.url()).await;
    let no_probes = CircuitBreaker::new().probe_interval(10 * MINUTE);
    let writer = plain(backend.clone()).deadline(MINUTE);
    let reader = cache(backend).circuit_breaker(no_probes).deadline(Duration::from_millis(500));
    for key in 0..100 {
        writer.set(key, 1).await.unwrap();
    }
    let start = Instant::now();
    for key in 0..100 {
        assert_eq!(reader.get(key).await.unwrap().as_deref(), Some(&1));
    }
    assert!(start.elapsed() < 10 * SECOND, "{:?} for 100 hits", start.elapsed());
}
