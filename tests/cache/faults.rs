//! Faults under load: a killed, paused and replaced Redis, flushed scripts, evicted keys and filters, and entries of a clock that was wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use redis::Commands;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::cache::CacheError;
use tollgate::{BoxError, Cache, ExistsFilter, RedisBackend};

use crate::support::sentinel::SentinelDeployment;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

const MINUTE: Duration = Duration::from_secs(60);
const MS: Duration = Duration::from_millis(1);
const ORIGIN_LIMIT: usize = 8;

fn cache(backend: RedisBackend) -> Cache<usize> {
    Cache::new(backend, "numbers", MINUTE).jitter(0.0).early_refresh(0.0).origin_limit(ORIGIN_LIMIT)
}

/// An origin that takes 20 ms. It counts its calls, and how many run at the same time at most.
#[derive(Clone, Default)]
struct Origin(Arc<Counts>);

#[derive(Default)]
struct Counts {
    calls: AtomicUsize,
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Origin {
    async fn load(self) -> Result<usize, BoxError> {
        let running = self.0.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most.fetch_max(running, Ordering::SeqCst);
        sleep(20 * MS).await;
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        Ok(self.0.calls.fetch_add(1, Ordering::SeqCst) + 1)
    }

    fn calls(&self) -> usize {
        self.0.calls.load(Ordering::SeqCst)
    }
}

async fn get(cache: &Cache<usize>, key: usize, origin: &Origin) -> Result<usize, CacheError> {
    let origin = origin.clone();
    cache.get_or_fill(key as u64, move || origin.load()).await.map(|value| *value.expect("no value is absent"))
}

/// Calls until Redis serves the cache again.
async fn wait_until_stored(cache: &Cache<usize>, origin: &Origin) {
    let give_up = Instant::now() + MINUTE;
    while get(cache, 9_999_999, origin).await.is_err() || !matches!(cache.get(9_999_999_u64).await, Ok(Some(_))) {
        assert!(Instant::now() < give_up, "the cache does not recover");
        sleep(10 * MS).await;
    }
}

/// Redis is killed while 1,000 callers wait for loads. Each caller gets a value, or an error that says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_redis_leaves_at_most_the_limit_of_loads() {
    let mut server = RedisServer::start();
    let cache = cache(patient(server.url()).await);
    for is_killed in [true, false] {
        let origin = Origin::default();
        let mut callers = JoinSet::new();
        if is_killed {
            server.kill();
        } else {
            server.pause();
        }
        for caller in 0..1_000 {
            let (cache, origin) = (cache.clone(), origin.clone());
            callers.spawn(async move { get(&cache, caller % 250, &origin).await });
        }
        let (mut values, mut refused) = (0, 0);
        for result in callers.join_all().await {
            match result {
                Ok(_) => values += 1,
                Err(CacheError::OriginLimit { .. }) => refused += 1,
                Err(error) => panic!("{error:?}"),
            }
        }
        let most = origin.0.most.load(Ordering::SeqCst);
        assert!(values > 0 && refused > 0, "{values} {refused}");
        assert!(most <= ORIGIN_LIMIT, "{most} loads at the same time");
        if is_killed {
            server.restart();
        } else {
            server.resume();
        }
        wait_until_stored(&cache, &origin).await;
    }
}

/// Redis is killed while one caller loads and 999 wait in another process. All of them get a value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_get_a_value_although_redis_is_killed() {
    let mut server = RedisServer::start();
    let (loading, waiting) = (cache(patient(server.url()).await), cache(patient(server.url()).await));
    let origin = Origin::default();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let leader = tokio::spawn(async move {
        let slow = async move || {
            let _ = started.send(());
            sleep(500 * MS).await;
            Ok::<_, BoxError>(77)
        };
        loading.get_or_fill(1_u64, slow).await
    });
    has_started.await.unwrap();
    let mut callers = JoinSet::new();
    for _ in 0..999 {
        let (waiting, origin) = (waiting.clone(), origin.clone());
        callers.spawn(async move { get(&waiting, 1, &origin).await.unwrap() });
    }
    sleep(100 * MS).await;
    server.kill();
    let values = timeout(MINUTE, callers.join_all()).await.unwrap();
    assert!(values.iter().all(|value| *value == values[0]), "one load for all waiters of this process");
    assert_eq!(origin.calls(), 1);
    assert_eq!(leader.await.unwrap().unwrap().as_deref(), Some(&77));
    server.restart();
    wait_until_stored(&waiting, &origin).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_and_killed_clients_fail_no_call_for_long() {
    let server = RedisServer::start();
    let (cache, origin) = (cache(patient(server.url()).await), Origin::default());
    let mut callers = JoinSet::new();
    for caller in 0..200 {
        let (cache, origin) = (cache.clone(), origin.clone());
        callers.spawn(async move {
            for round in 0..20 {
                get(&cache, (caller % 50) * 20 + round, &origin).await.unwrap();
            }
        });
    }
    for _ in 0..20 {
        server.flush_scripts();
        sleep(10 * MS).await;
    }
    callers.join_all().await;
    assert_eq!(origin.calls(), 1_000, "each key is loaded once");
    server.kill_clients();
    wait_until_stored(&cache, &origin).await;
    server.every_key_expires();
}

/// An evicted entry is loaded again. If a lease is evicted, a second load begins, and the first one stores nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_entry_and_lease_are_replaced() {
    let server = RedisServer::start();
    let (first, second) = (cache(patient(server.url()).await), cache(patient(server.url()).await));
    let origin = Origin::default();
    let mut connection = server.connection();
    assert_eq!(get(&first, 1, &origin).await.unwrap(), 1);
    let _: u32 = connection.del("tollgate:2:{cache:numbers:1}:entry").unwrap();
    assert_eq!(get(&first, 1, &origin).await.unwrap(), 2);

    let (started, has_started) = tokio::sync::oneshot::channel();
    let slow = {
        let first = first.clone();
        tokio::spawn(async move {
            let load = async move || {
                let _ = started.send(());
                sleep(300 * MS).await;
                Ok::<_, BoxError>(77)
            };
            *first.get_or_fill(2_u64, load).await.unwrap().unwrap()
        })
    };
    has_started.await.unwrap();
    let _: u32 = connection.del("tollgate:2:{cache:numbers:2}:lease").unwrap();
    assert_eq!(get(&second, 2, &origin).await.unwrap(), 3);
    assert_eq!(slow.await.unwrap(), 77, "its own caller gets it");
    assert_eq!(first.get(2_u64).await.unwrap().as_deref(), Some(&3));
}

/// Redis evicts parts of a filter again and again, while keys are looked up, added and rebuilt. No key that exists is excluded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_filter_excludes_no_key_under_load() {
    const ROWS: u64 = 500;
    let server = RedisServer::start();
    let (here, there) = (patient(server.url()).await, patient(server.url()).await);
    let filter = |backend| ExistsFilter::new(backend, "rows", 10_000).visible_within(100 * MS).deadline(MINUTE);
    let (used, other) = (filter(here.clone()), filter(there));
    let cache = Cache::<u64>::new(here, "rows", 20 * MS).exists_filter(&used).deadline(MINUTE);
    // The rows of a table: all keys below this number.
    let rows = Arc::new(AtomicUsize::new(ROWS as usize));
    let table = Arc::clone(&rows);
    // Reads the table when it is first polled.
    let keys = move || {
        let table = Arc::clone(&table);
        let read = async move { stream::iter((0..table.load(Ordering::SeqCst) as u64).map(Ok::<_, BoxError>)) };
        stream::once(read).flatten()
    };
    used.rebuild(keys()).await.unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (cache, rows) = (cache.clone(), Arc::clone(&rows));
        tasks.spawn(async move {
            for round in 0_u64.. {
                let (count, origin) = (rows.load(Ordering::SeqCst) as u64, Arc::clone(&rows));
                let key = (round * 31 + task) % count;
                let load = |key: u64| async move || Ok::<_, BoxError>(Some(key));
                let value = cache.get_or_fill(key, load(key)).await.unwrap();
                assert_eq!(value.as_deref(), Some(&key), "it exists");
                let absent = 1_000_000 + round * 8 + task;
                let load =
                    async move || Ok::<_, BoxError>((absent < origin.load(Ordering::SeqCst) as u64).then_some(1));
                assert_eq!(cache.get_or_fill(absent, load).await.unwrap(), None);
            }
        });
    }
    // Additions of the other process, each before its row is visible.
    let (adder, new_rows) = (other.clone(), Arc::clone(&rows));
    tasks.spawn(async move {
        loop {
            adder.add(new_rows.load(Ordering::SeqCst) as u64).await.unwrap();
            new_rows.fetch_add(1, Ordering::SeqCst);
            sleep(MS).await;
        }
    });
    tasks.spawn(async move {
        loop {
            // A rebuild whose version is evicted fails.
            let _ = other.rebuild(keys()).await;
            sleep(200 * MS).await;
        }
    });
    let mut connection = server.connection();
    let (mut evictions, end) = (0, Instant::now() + Duration::from_secs(6));
    while Instant::now() < end {
        assert!(tasks.try_join_next().is_none(), "a task has failed");
        sleep(150 * MS).await;
        let all: Vec<String> = connection.keys("tollgate:2:{cache_filter:rows}:*").unwrap();
        // In turns the ids, a version, and all of it.
        let gone =
            all.into_iter().filter(|key| evictions % 3 == 2 || key.ends_with("versions") == (evictions % 3 == 0));
        for key in gone {
            let _: u32 = connection.del(key).unwrap();
        }
        evictions += 1;
    }
    assert!(tasks.try_join_next().is_none(), "a task has failed");
    let added = rows.load(Ordering::SeqCst) - ROWS as usize;
    println!("{evictions} evictions, {added} additions");
    assert!(added > 0);
    tasks.shutdown().await;
    server.every_key_expires();
}

/// An entry of a server whose clock was an hour ahead or behind: it never outlives its time to live, and is loaded again if it seems stale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entry_of_a_clock_an_hour_off_is_served_or_loaded_again() {
    const HOUR_MS: i64 = 3_600_000;
    let server = RedisServer::start();
    let (cache, origin) = (cache(patient(server.url()).await), Origin::default());
    let entry = "tollgate:2:{cache:numbers:1}:entry";
    let mut connection = server.connection();
    let mut shift = |by: i64| {
        let mut bytes: Vec<u8> = connection.get(entry).unwrap();
        for at in [18..25, 25..32, 32..39] {
            let mut number = [0; 8];
            number[..7].copy_from_slice(&bytes[at.clone()]);
            bytes[at].copy_from_slice(&(i64::from_le_bytes(number) + by).to_le_bytes()[..7]);
        }
        let () = connection.set_ex(entry, bytes, 60).unwrap();
    };
    assert_eq!(get(&cache, 1, &origin).await.unwrap(), 1);
    shift(HOUR_MS);
    assert_eq!(get(&cache, 1, &origin).await.unwrap(), 1, "fresh until its time to live ends");
    let ttl: u64 = server.query(&format!("TTL {entry}"));
    assert!(ttl <= 60);
    shift(-2 * HOUR_MS);
    // It is stale. Its value is served once more, while it is loaded.
    get(&cache, 1, &origin).await.unwrap();
    sleep(500 * MS).await;
    assert_eq!(get(&cache, 1, &origin).await.unwrap(), 2);
}

/// A failover loses what its replica did not have: the older value is then served until its time has passed, or until the next change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_between_put_and_replica_leaves_a_working_cache() {
    let mut deployment = SentinelDeployment::start();
    let (cache, origin) = (cache(patient(deployment.url()).await), Origin::default());
    cache.set(1_u64, 100).await.unwrap();
    let primary = deployment.primary_index();
    let old = deployment.primary().port();
    let replicas = deployment.servers.len() - 1;
    let acknowledged: usize = deployment.primary().query(&format!("WAIT {replicas} 10000"));
    assert_eq!(acknowledged, replicas);
    // From now on the replicas get nothing.
    for (at, server) in deployment.servers.iter().enumerate() {
        if at != primary {
            server.pause();
        }
    }
    cache.set(1_u64, 200).await.unwrap();
    deployment.kill_primary();
    deployment.servers.iter().filter(|server| server.port() != old).for_each(RedisServer::resume);
    deployment.wait_for_another_primary(old);
    wait_until_stored(&cache, &origin).await;
    let value = get(&cache, 1, &origin).await.unwrap();
    assert!(value == 100 || value == 200, "{value}");
    cache.invalidate(1_u64).await.unwrap();
    let calls = origin.calls();
    assert_eq!(get(&cache, 1, &origin).await.unwrap(), calls + 1);
}
