//! Exists filters: rebuilds, additions, failures, damage, and the cache behind a filter.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt};
use redis::Commands as _;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::cache::exists_filter::ExistsFilterError;
use tollgate::cache::exists_filter::store::ExistsFilterStore;
use tollgate::testing::{Failure, FaultStore, Verb};
use tollgate::{BoxError, Cache, ExistsFilter, Key, MemoryBackend};

use crate::exists_filter_model::MISSED;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

const MINUTE: Duration = Duration::from_secs(60);

fn source(keys: impl IntoIterator<Item = u32, IntoIter: Send>) -> impl Stream<Item = Result<u32, BoxError>> + Send {
    stream::iter(keys.into_iter().map(Ok))
}

/// A filter whose rebuild does not wait.
fn filter(store: impl ExistsFilterStore + Send + Sync + 'static, capacity: u64) -> ExistsFilter {
    ExistsFilter::new(store, "users", capacity).visible_within(Duration::ZERO).deadline(MINUTE)
}

/// Panics if a key is excluded.
async fn has_all(filter: &ExistsFilter, keys: impl IntoIterator<Item = u32>) {
    for key in keys {
        assert!(filter.might_contain(key).await.unwrap(), "{key} exists");
    }
}

/// The part of these absent keys that the filter may contain.
async fn false_positives(filter: &ExistsFilter, keys: std::ops::Range<u32>) -> f64 {
    let (mut found, count) = (0, keys.len());
    for key in keys {
        found += u32::from(filter.might_contain(key).await.unwrap());
    }
    f64::from(found) / count as f64
}

#[tokio::test(start_paused = true)]
async fn every_key_may_exist_before_a_rebuild() {
    let filter = filter(MemoryBackend::new(), 1_000);
    has_all(&filter, 0..100).await;
    filter.add(1).await.unwrap();
    has_all(&filter, 0..100).await;
    assert_eq!(filter.stats().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn full_filter_has_its_error_rate() {
    let backend = MemoryBackend::new();
    for (error_rate, most) in [(0.05, 0.055), (0.01, 0.0125), (0.001, 0.0015)] {
        let filter = filter(backend.clone(), 100_000).error_rate(error_rate);
        assert_eq!(filter.rebuild(source(0..100_000)).await.unwrap(), 100_000);
        has_all(&filter, 0..100_000).await;
        let rate = false_positives(&filter, 1_000_000..1_200_000).await;
        assert!(rate > error_rate * 0.75 && rate < most, "{rate} instead of {error_rate}");
        let stats = filter.stats().await.unwrap().unwrap();
        assert_eq!(stats.bytes, filter.bytes().unwrap());
        assert!(stats.keys > 96_000 && stats.keys <= 100_000 && !stats.is_building, "{stats:?}");
        println!("error rate {error_rate}: measured {rate}, fill ratio {}, {} bytes", stats.fill_ratio, stats.bytes);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_filter_on_redis_has_its_error_rate() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let filter = filter(backend, 20_000);
    filter.rebuild(source(0..10_000)).await.unwrap();
    filter.add_all(10_000..20_000).await.unwrap();
    has_all(&filter, 0..20_000).await;
    let rate = false_positives(&filter, 1_000_000..1_020_000).await;
    assert!(rate > 0.005 && rate < 0.015, "{rate}");
    server.every_key_expires();
}

#[tokio::test]
async fn invalid_sizes_are_refused() {
    let new = |capacity| filter(MemoryBackend::new(), capacity);
    let zero = new(0).rebuild(source(0..1)).await.unwrap_err();
    assert!(matches!(zero, ExistsFilterError::ZeroCapacity), "{zero}");
    for error_rate in [0.0, 1.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = new(10).error_rate(error_rate).rebuild(source(0..1)).await.unwrap_err();
        assert!(matches!(error, ExistsFilterError::ErrorRateOutOfRange { .. }), "{error}");
    }
    for capacity in [1 << 30, u64::MAX] {
        let error = new(capacity).rebuild(source(0..1)).await.unwrap_err();
        assert!(matches!(error, ExistsFilterError::TooLarge { .. }), "{error}");
    }
    assert!(new(10).deadline(Duration::ZERO).might_contain(1).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn memory_backend_refuses_a_filter_without_room() {
    let backend = MemoryBackend::with_capacity(100);
    let large = filter(backend.clone(), 100_000);
    match large.rebuild(source(0..1)).await.unwrap_err() {
        ExistsFilterError::Store(error) => assert!(error.is_out_of_memory(), "{error}"),
        error => panic!("{error}"),
    }
    let small = filter(backend, 1_000);
    for _ in 0..1_000 {
        small.rebuild(source(0..10)).await.unwrap();
    }
    has_all(&small, 0..10).await;
}

#[tokio::test(start_paused = true)]
async fn rebuild_waits_until_added_rows_are_visible() {
    let backend = MemoryBackend::new();
    let filter = ExistsFilter::new(backend, "users", 1_000);
    let start = Instant::now();
    let read = Arc::new(AtomicUsize::new(0));
    let reader = Arc::clone(&read);
    let keys = stream::once(async move {
        reader.store(start.elapsed().as_secs() as usize, Ordering::Relaxed);
        Ok::<_, BoxError>(1)
    });
    filter.rebuild(keys).await.unwrap();
    assert_eq!(read.load(Ordering::Relaxed), 10);
}

/// Two instances stand for two processes. One rebuilds while the other adds and tests.
async fn add_during_rebuilds(builder: ExistsFilter, other: ExistsFilter) {
    builder.rebuild(source(0..1_000)).await.unwrap();
    for round in 1..=5_u32 {
        // All keys that exist when the stream begins.
        let slow = source(0..1_000 * round).chunks(500).then(|keys| async {
            sleep(Duration::from_millis(5)).await;
            stream::iter(keys)
        });
        let building = builder.clone();
        let mut rebuild = JoinSet::new();
        rebuild.spawn(async move { building.rebuild(slow.flatten()).await.unwrap() });
        // Rows of keys that were added earlier would have to be in the stream.
        while !other.stats().await.unwrap().unwrap().is_building {
            sleep(Duration::from_millis(1)).await;
        }
        for key in 1_000 * round..1_000 * (round + 1) {
            other.add(key).await.unwrap();
            has_all(&other, [key, key / 2]).await;
            has_all(&builder, [key]).await;
            if key % 50 == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        }
        rebuild.join_all().await;
        has_all(&other, 0..1_000 * (round + 1)).await;
        has_all(&builder, 0..1_000 * (round + 1)).await;
    }
    let rate = false_positives(&other, 1_000_000..1_010_000).await;
    assert!(rate < 0.015, "{rate}");
}

#[tokio::test(start_paused = true)]
async fn added_key_survives_a_rebuild_in_memory() {
    let backend = MemoryBackend::new();
    add_during_rebuilds(filter(backend.clone(), 10_000), filter(backend, 10_000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn added_key_survives_a_rebuild_on_redis() {
    let server = RedisServer::start();
    let (here, there) = (patient(server.url()).await, patient(server.url()).await);
    add_during_rebuilds(filter(here, 10_000), filter(there, 10_000)).await;
    let keys: Vec<String> = server.query("KEYS *");
    assert_eq!(keys.len(), 2, "old versions are removed: {keys:?}");
    server.every_key_expires();
}

#[tokio::test(start_paused = true)]
async fn failed_rebuild_leaves_the_old_filter() {
    let backend = MemoryBackend::new();
    let filter = filter(backend.clone(), 1_000);
    filter.rebuild(source(0..10)).await.unwrap();
    let failing = source(10..20).chain(stream::once(async { Err::<u32, BoxError>("the database is down".into()) }));
    let error = filter.rebuild(failing).await.unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), "the database is down");
    assert!(!filter.stats().await.unwrap().unwrap().is_building);
    has_all(&filter, 0..10).await;
    assert!(!filter.might_contain(19).await.unwrap());

    let stalled = filter.rebuild(source(20..30).chain(stream::pending()));
    assert!(timeout(MINUTE, stalled).await.is_err(), "dropped in the middle");
    assert!(filter.stats().await.unwrap().unwrap().is_building);
    filter.add(40).await.unwrap();
    has_all(&filter, 0..10).await;
    filter.rebuild(source(50..60)).await.unwrap();
    has_all(&filter, 50..60).await;
    assert!(!filter.might_contain(1).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn later_rebuild_supersedes_an_earlier_one() {
    let backend = MemoryBackend::new();
    let (first, second) = (filter(backend.clone(), 1_000), filter(backend, 1_000));
    let mut early = JoinSet::new();
    let slow = source(0..300).then(|key| async {
        sleep(Duration::from_millis(10)).await;
        key
    });
    early.spawn(async move { first.rebuild(slow).await });
    sleep(Duration::from_millis(100)).await;
    second.rebuild(source(300..400)).await.unwrap();
    let error = early.join_all().await.remove(0).unwrap_err();
    assert!(matches!(error, ExistsFilterError::Superseded), "{error}");
    has_all(&second, 300..400).await;
}

#[tokio::test(start_paused = true)]
async fn filter_expires_after_its_ttl() {
    let filter = filter(MemoryBackend::new(), 1_000).ttl(MINUTE);
    filter.rebuild(source(0..10)).await.unwrap();
    for _ in 0..3 {
        sleep(MINUTE * 3 / 4).await;
        assert!(!filter.might_contain(99).await.unwrap());
        filter.add(1).await.unwrap();
    }
    sleep(MINUTE + Duration::from_secs(2)).await;
    assert!(filter.might_contain(99).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn many_keys_are_added_in_chunks() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 10_000);
    filter.rebuild(source(0..1)).await.unwrap();
    let before = faults.calls(Verb::Put);
    filter.add_all(0..1_000).await.unwrap();
    assert_eq!(faults.calls(Verb::Put) - before, 1_000_u64.div_ceil(128));
    filter.add_all(Vec::<Key>::new()).await.unwrap();
    has_all(&filter, 0..1_000).await;
}

#[tokio::test(start_paused = true)]
async fn test_is_one_call_in_steady_state() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 10_000);
    filter.rebuild(source(0..1)).await.unwrap();
    let before = faults.total_calls();
    for key in 0..10_000 {
        filter.might_contain(key).await.unwrap();
    }
    assert_eq!(faults.total_calls() - before, 10_001);
}

#[tokio::test(start_paused = true)]
async fn store_error_is_returned() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000).deadline(Duration::from_millis(100));
    filter.rebuild(source(0..10)).await.unwrap();
    faults.fail(Failure::Unavailable);
    assert!(filter.might_contain(1).await.unwrap_err().is_unavailable());
    assert!(filter.add(1).await.unwrap_err().is_unavailable());
    assert!(filter.rebuild(source(0..10)).await.is_err());
    faults.heal();
    faults.hang();
    assert!(filter.might_contain(1).await.unwrap_err().is_timeout());
    faults.heal();
    // A rebuild survives a short outage.
    faults.fail_next(3, Failure::Unavailable);
    filter.rebuild(source(10..20)).await.unwrap();
    assert!(filter.might_contain(15).await.unwrap() && !filter.might_contain(5).await.unwrap());
}

/// The keys of the filter: of its versions, and of the one that is active.
fn stored_keys(server: &RedisServer) -> (String, String) {
    let all: Vec<String> = server.query("KEYS *");
    let find = |part: &str| all.iter().find(|key| key.contains(part)).unwrap_or_else(|| panic!("{part} of {all:?}"));
    (find("}:versions").clone(), find("}:bits:").clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_may_exist_after_an_eviction() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    for evicts_bits in [true, false] {
        let used = filter(backend.clone(), 1_000);
        used.rebuild(source(0..10)).await.unwrap();
        assert!(!used.might_contain(99).await.unwrap());
        let (versions, bits) = stored_keys(&server);
        server.query::<u32>(&format!("DEL {}", if evicts_bits { &bits } else { &versions }));
        if !evicts_bits {
            // The addition waits until no process uses the version.
            used.add(99).await.unwrap();
        }
        has_all(&used, 90..100).await;
        has_all(&filter(backend.clone(), 1_000), 90..100).await;
        used.add(7).await.unwrap();
        has_all(&used, 90..100).await;
        server.every_key_expires();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_may_exist_in_a_damaged_filter() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let damages: [(&str, &[&str]); 8] = [
        ("other magic", &["SETRANGE {bits} 0 XXXX"]),
        ("other format", &["SETRANGE {bits} 4 2"]),
        ("still building", &["SETRANGE {bits} 5 B"]),
        ("too many blocks", &["SETRANGE {bits} 8 zzzz"]),
        ("shorter", &["SET {bits} TGEF PX 60000"]),
        ("another type", &["DEL {bits}", "RPUSH {bits} 1", "PEXPIRE {bits} 60000"]),
        ("other versions", &["SET {versions} mine PX 60000"]),
        ("versions of another type", &["DEL {versions}", "RPUSH {versions} 1", "PEXPIRE {versions} 60000"]),
    ];
    for (damage, commands) in damages {
        let builder = filter(backend.clone(), 1_000);
        builder.rebuild(source(0..10)).await.unwrap();
        let (versions, bits) = stored_keys(&server);
        for command in commands {
            server.query::<redis::Value>(&command.replace("{bits}", &bits).replace("{versions}", &versions));
        }
        let other = filter(backend.clone(), 1_000);
        for key in 90..100 {
            assert!(other.might_contain(key).await.unwrap(), "{damage}");
        }
        if damage.contains("versions") {
            assert!(other.add(1).await.unwrap_err().is_foreign_data(), "{damage}");
            server.query::<u32>(&format!("DEL {versions} {bits}"));
        }
        other.rebuild(source(0..10)).await.unwrap();
        assert!(!other.might_contain(99).await.unwrap(), "{damage}: repaired");
        server.query::<redis::Value>("FLUSHALL");
        let () = server.connection().set_ex(&versions, MISSED, 60).unwrap();
    }
}

/// A build whose version is evicted fails, instead of becoming active with missing keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_build_is_lost() {
    let server = RedisServer::start();
    let filter = filter(patient(server.url()).await, 1_000);
    let keys = source(0..1_000).then(|key| {
        if matches!(key, Ok(500)) {
            let (_, bits) = stored_keys(&server);
            server.query::<u32>(&format!("DEL {bits}"));
        }
        async move { key }
    });
    let error = filter.rebuild(keys).await.unwrap_err();
    assert!(matches!(error, ExistsFilterError::Lost), "{error}");
    has_all(&filter, 2_000..2_010).await;
}

/// A cache behind a filter with the keys below 1,000, and the number of its loads.
async fn guarded(store: FaultStore<MemoryBackend>) -> (Cache<u32>, ExistsFilter, Arc<AtomicUsize>) {
    let filter = filter(store.clone(), 1_000);
    filter.rebuild(source(0..1_000)).await.unwrap();
    let cache = Cache::new(store, "users", MINUTE).exists_filter(&filter);
    (cache, filter, Arc::default())
}

async fn get(cache: &Cache<u32>, key: u32, loads: &Arc<AtomicUsize>) -> Option<u32> {
    let loads = Arc::clone(loads);
    let load = move || async move {
        loads.fetch_add(1, Ordering::Relaxed);
        Ok::<_, BoxError>((key < 1_000).then_some(key))
    };
    cache.get_or_fill(key, load).await.unwrap().map(|value| *value)
}

#[tokio::test(start_paused = true)]
async fn absent_keys_do_not_reach_the_origin() {
    let backend = MemoryBackend::new();
    let (cache, _, loads) = guarded(FaultStore::new(backend.clone())).await;
    for _ in 0..2 {
        for key in 100_000..110_000 {
            assert_eq!(get(&cache, key, &loads).await, None);
        }
    }
    let reached = loads.load(Ordering::Relaxed);
    println!("{reached} of 10,000 absent keys reached the origin");
    assert!(reached <= 150, "{reached}");
    assert_eq!(backend.cache_entries(), reached, "each once");
    assert_eq!(get(&cache, 7, &loads).await, Some(7));
}

#[tokio::test(start_paused = true)]
async fn cached_value_needs_no_filter() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let (cache, _, loads) = guarded(store).await;
    assert_eq!(get(&cache, 7, &loads).await, Some(7));
    let before = faults.total_calls();
    assert_eq!(get(&cache, 7, &loads).await, Some(7));
    assert_eq!(faults.total_calls() - before, 1);
}

#[tokio::test(start_paused = true)]
async fn stored_value_is_added_to_the_filter() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let (cache, filter, loads) = guarded(store).await;
    cache.set(5_000, 1).await.unwrap();
    for absent in 6_000..6_100 {
        cache.set(absent, tollgate::cache::Loaded::absent()).await.unwrap();
    }
    cache.invalidate(5_000).await.unwrap();
    assert!(filter.might_contain(5_000).await.unwrap());
    assert!(false_positives(&filter, 6_000..6_100).await < 0.2, "the rate of a full filter is 1 %");
    assert_eq!(get(&cache, 5_000, &loads).await, None);
    assert_eq!(loads.load(Ordering::Relaxed), 1);
    faults.fail_next(1, Failure::Unavailable);
    assert!(cache.set(7_000, 1).await.is_err());
    assert_eq!(cache.get(7_000).await.unwrap(), None, "nothing is stored without its key in the filter");
}

/// The filter is on a store of its own, which fails.
#[tokio::test(start_paused = true)]
async fn key_is_loaded_if_the_filter_fails() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000).deadline(Duration::from_millis(100));
    filter.rebuild(source(0..10)).await.unwrap();
    let cache = Cache::<u32>::new(MemoryBackend::new(), "users", MINUTE).exists_filter(&filter);
    let loads = Arc::default();
    faults.fail(Failure::Unavailable);
    assert_eq!(get(&cache, 500, &loads).await, Some(500));
    faults.heal();
    faults.hang();
    assert_eq!(get(&cache, 501, &loads).await, Some(501));
    assert_eq!(loads.load(Ordering::Relaxed), 2);
}

/// Regression: each test of a key waited for the deadline while the store did not reply.
#[tokio::test(start_paused = true)]
async fn hanging_store_opens_the_circuit() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000).deadline(Duration::from_millis(100));
    filter.rebuild(source(0..10)).await.unwrap();
    faults.hang();
    for _ in 0..5 {
        assert!(filter.might_contain(1).await.unwrap_err().is_timeout());
    }
    let (start, calls) = (Instant::now(), faults.total_calls());
    for _ in 0..100 {
        assert!(filter.might_contain(1).await.unwrap_err().is_unavailable());
    }
    assert_eq!((start.elapsed(), faults.total_calls()), (Duration::ZERO, calls));
    faults.heal();
    filter.add(20).await.expect("an addition is made all the same");
    has_all(&filter, [1, 20]).await;
    assert!(!filter.might_contain(99).await.unwrap());
}

/// Regression: a test answered with a status that was too old by the time when the block came.
#[tokio::test(start_paused = true)]
async fn late_block_excludes_no_key() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000);
    filter.rebuild(source(0..10)).await.unwrap();
    assert!(!filter.might_contain(99).await.unwrap());
    faults.delay(Duration::from_millis(900));
    assert!(!filter.might_contain(99).await.unwrap());
    faults.delay(Duration::from_millis(1_001));
    assert!(filter.might_contain(99).await.unwrap());
    faults.heal();
    assert!(!filter.might_contain(99).await.unwrap());
}

/// Regression: for one second, other processes excluded a key that was added after the eviction of only the ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_added_after_an_eviction_of_the_ids_exists() {
    let server = RedisServer::start();
    let (here, there) = (patient(server.url()).await, patient(server.url()).await);
    let tester = filter(here, 1_000);
    tester.rebuild(source(0..10)).await.unwrap();
    assert!(!tester.might_contain(99).await.unwrap());
    let (versions, _) = stored_keys(&server);
    server.query::<u32>(&format!("DEL {versions}"));
    let adder = filter(there, 1_000);
    adder.add(99).await.unwrap();
    has_all(&tester, [99]).await;
    let start = Instant::now();
    tester.add(98).await.unwrap();
    adder.add_all(100..1_000).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "only additions shortly after the eviction wait");
    server.every_key_expires();
    adder.rebuild(source(0..10)).await.unwrap();
    has_all(&adder, 0..10).await;
    assert!(!adder.might_contain(99).await.unwrap());
}

/// Regression: likewise, if a rebuild began after the eviction. Then the key is only in the new version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_added_to_a_rebuild_after_an_eviction_exists() {
    let server = RedisServer::start();
    let (here, there) = (patient(server.url()).await, patient(server.url()).await);
    let tester = filter(here, 1_000);
    tester.rebuild(source(0..10)).await.unwrap();
    let (versions, _) = stored_keys(&server);
    assert!(!tester.might_contain(99).await.unwrap());
    server.query::<u32>(&format!("DEL {versions}"));
    let (adder, builder) = (filter(there.clone(), 1_000), filter(there, 1_000).visible_within(Duration::from_secs(2)));
    let rebuild = tokio::spawn(async move { builder.rebuild(source(0..10)).await.unwrap() });
    while server.query::<Option<Vec<u8>>>(&format!("GET {versions}")).is_none_or(|ids| ids.len() != 33) {
        sleep(Duration::from_millis(1)).await;
    }
    adder.add(99).await.unwrap();
    has_all(&tester, [99]).await;
    rebuild.await.unwrap();
    has_all(&tester, [99]).await;
    has_all(&adder, [99]).await;
}

/// Lets the task of a local copy run.
async fn refresh(filter: &ExistsFilter) {
    filter.might_contain(0).await.unwrap();
    sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn local_copy_needs_no_call() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 100_000).local_copy(Duration::from_secs(10));
    filter.rebuild(source(0..100_000)).await.unwrap();
    refresh(&filter).await;
    let before = faults.total_calls();
    has_all(&filter, 0..100_000).await;
    let rate = false_positives(&filter, 1_000_000..1_100_000).await;
    assert!(rate > 0.008 && rate < 0.0125, "{rate}");
    assert_eq!(faults.total_calls(), before);
    // An unchanged filter is not read again.
    for _ in 0..60 {
        sleep(Duration::from_secs(1)).await;
        refresh(&filter).await;
    }
    assert_eq!(faults.total_calls() - before, 12, "a status every five seconds");
}

#[tokio::test(start_paused = true)]
async fn local_copy_is_refreshed_by_one_of_many_callers() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000).local_copy(MINUTE);
    filter.rebuild(source(0..10)).await.unwrap();
    filter.stats().await.unwrap();
    faults.delay(Duration::from_millis(1));
    let before = faults.total_calls();
    let mut callers = JoinSet::new();
    for _ in 0..100 {
        let filter = filter.clone();
        callers.spawn(async move { filter.might_contain(99).await.unwrap() });
    }
    assert!(callers.join_all().await.iter().all(|might_contain| !might_contain));
    sleep(Duration::from_millis(10)).await;
    // Each caller reads its block, and one task the status and all blocks.
    assert_eq!(faults.total_calls() - before, 102);
    assert!(!filter.might_contain(99).await.unwrap());
    assert_eq!(faults.total_calls() - before, 102);
}

/// A key of another process is in the copy after at most its age. A key of this process is there at once, also during a refresh.
#[tokio::test(start_paused = true)]
async fn local_copy_gets_additions() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let other = filter(store.clone(), 1_000);
    let filter = filter(store, 1_000).local_copy(Duration::from_secs(4));
    filter.rebuild(source(0..10)).await.unwrap();
    refresh(&filter).await;
    filter.add(20).await.unwrap();
    other.add(30).await.unwrap();
    has_all(&filter, [20]).await;
    assert!(!filter.might_contain(30).await.unwrap(), "the copy is not that new");
    sleep(Duration::from_secs(2)).await;
    faults.delay(Duration::from_millis(100));
    assert!(!filter.might_contain(40).await.unwrap(), "begins a refresh");
    filter.add(40).await.unwrap();
    has_all(&filter, [20, 40]).await;
    sleep(Duration::from_secs(1)).await;
    has_all(&filter, [20, 30, 40]).await;
    assert!(!filter.might_contain(50).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn local_copy_of_a_failing_store_ends_with_its_age() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000).deadline(Duration::from_millis(100)).local_copy(Duration::from_secs(4));
    filter.rebuild(source(0..10)).await.unwrap();
    refresh(&filter).await;
    faults.hang();
    for _ in 0..3 {
        assert!(!filter.might_contain(99).await.unwrap());
        sleep(Duration::from_secs(1)).await;
    }
    sleep(Duration::from_secs(1)).await;
    assert!(filter.might_contain(99).await.is_err());
    faults.heal();
    sleep(Duration::from_secs(4)).await;
    refresh(&filter).await;
    let before = faults.total_calls();
    assert!(!filter.might_contain(99).await.unwrap());
    assert_eq!(faults.total_calls(), before);
}

/// The task of a refresh ends with the filter, and holds no store.
#[tokio::test(start_paused = true)]
async fn local_copy_ends_with_its_filter() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000).local_copy(MINUTE);
    filter.rebuild(source(0..10)).await.unwrap();
    faults.hang();
    assert!(timeout(Duration::from_secs(1), filter.might_contain(99)).await.is_err());
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(tasks(), 1);
    let clone = filter.clone();
    drop(filter);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(tasks(), 1);
    drop(clone);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn large_filter_has_no_local_copy() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 13_000_000).local_copy(MINUTE);
    assert!(filter.bytes().unwrap() > 16 << 20);
    filter.rebuild(source(0..10)).await.unwrap();
    refresh(&filter).await;
    let before = faults.total_calls();
    assert!(!filter.might_contain(99).await.unwrap());
    assert_eq!(faults.total_calls() - before, 1);
    has_all(&filter, 0..10).await;
}

/// An evicted filter, and one of another version, are noticed within the age of a copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_copy_of_an_evicted_filter_ends() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let used = filter(backend.clone(), 50_000).local_copy(Duration::from_secs(1));
    let other = filter(backend, 50_000);
    used.rebuild(source(0..1_000)).await.unwrap();
    let excludes = async |key: u32| {
        for _ in 0..30 {
            has_all(&used, [1]).await;
            if !used.might_contain(key).await.unwrap() {
                return true;
            }
            sleep(Duration::from_millis(50)).await;
        }
        false
    };
    assert!(excludes(70_000).await);
    other.rebuild(source((0..1_000).chain([70_000]))).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    has_all(&used, (0..1_000).chain([70_000])).await;
    assert!(excludes(70_001).await);
    server.query::<redis::Value>("FLUSHALL");
    sleep(Duration::from_secs(1)).await;
    has_all(&used, 80_000..80_010).await;
}

#[tokio::test(start_paused = true)]
async fn dropped_test_changes_nothing() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = filter(store, 1_000);
    filter.rebuild(source(0..10)).await.unwrap();
    faults.delay(Duration::from_secs(1));
    tokio::select! {
        _ = filter.might_contain(1) => panic!("it takes a second"),
        () = sleep(Duration::from_millis(10)) => {}
    }
    faults.heal();
    has_all(&filter, 0..10).await;
    assert!(!filter.might_contain(99).await.unwrap());
}
