//! Batches: one call of a loader for several keys.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tollgate::cache::store::CacheStore;
use tollgate::cache::{CacheError, Loaded};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{BoxError, Cache, MemoryBackend};

use crate::support::server::RedisServer;
use crate::support::shared::patient;

const MINUTE: Duration = Duration::from_secs(60);
const MS: Duration = Duration::from_millis(1);

fn cache<S: CacheStore + Send + Sync + 'static>(store: S) -> Cache<u64> {
    Cache::new(store, "numbers", MINUTE).jitter(0.0).early_refresh(0.0)
}

/// An origin with even numbers only. It records the keys of each call.
#[derive(Clone, Default)]
struct Origin(Arc<Mutex<Vec<Vec<u64>>>>);

impl Origin {
    fn loader(&self) -> impl Fn(Vec<u64>) -> Loading + Send + Sync + use<> {
        let origin = self.clone();
        move |mut keys| {
            let origin = origin.clone();
            Box::pin(async move {
                sleep(100 * MS).await;
                keys.sort_unstable();
                origin.0.lock().unwrap().push(keys.clone());
                Ok(keys.into_iter().filter(|key| key % 2 == 0).map(|key| (key, key * 10)).collect())
            })
        }
    }

    fn calls(&self) -> Vec<Vec<u64>> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

type Loading = std::pin::Pin<Box<dyn Future<Output = Result<HashMap<u64, u64>, BoxError>> + Send>>;

async fn get_all(
    cache: &Cache<u64>,
    keys: impl IntoIterator<Item = u64>,
    origin: &Origin,
) -> Result<Vec<u64>, CacheError> {
    let found = cache.get_or_fill_all(keys, origin.loader()).await?;
    let mut values: Vec<_> = found.into_values().map(|value| *value).collect();
    values.sort_unstable();
    Ok(values)
}

async fn missing_keys_are_loaded_together(cache: Cache<u64>) {
    let origin = Origin::default();
    assert_eq!(get_all(&cache, [4, 1, 2, 4], &origin).await.unwrap(), [20, 40]);
    assert_eq!(origin.calls(), [vec![1, 2, 4]]);
    assert_eq!(get_all(&cache, [1, 2, 4], &origin).await.unwrap(), [20, 40]);
    assert!(origin.calls().is_empty());
    cache.invalidate(2_u64).await.unwrap();
    assert_eq!(get_all(&cache, [1, 2, 3, 4], &origin).await.unwrap(), [20, 40]);
    assert_eq!(origin.calls(), [[2, 3]]);
    assert!(get_all(&cache, [], &origin).await.unwrap().is_empty());
    let all: Vec<_> = (100..600).collect();
    assert_eq!(get_all(&cache, all.clone(), &origin).await.unwrap().len(), 250);
    assert_eq!(origin.calls(), [all]);
}

#[tokio::test(start_paused = true)]
async fn missing_keys_are_loaded_together_on_memory() {
    missing_keys_are_loaded_together(cache(MemoryBackend::new())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_keys_are_loaded_together_on_redis() {
    let server = RedisServer::start();
    missing_keys_are_loaded_together(cache(patient(server.url()).await).deadline(Duration::from_secs(5))).await;
    server.every_key_expires();
}

/// Caches on one backend stand for processes.
#[tokio::test(start_paused = true)]
async fn overlapping_batches_load_each_key_once() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let (first, second) = (cache(backend.clone()), cache(backend));
    let (a, b, c) =
        tokio::join!(get_all(&first, 0..6, &origin), get_all(&second, 2..10, &origin), get_all(&first, 4..8, &origin));
    assert_eq!(a.unwrap(), [0, 20, 40]);
    assert_eq!(b.unwrap(), [20, 40, 60, 80]);
    assert_eq!(c.unwrap(), [40, 60]);
    let mut loaded = origin.calls().concat();
    loaded.sort_unstable();
    assert_eq!(loaded, (0..10).collect::<Vec<_>>());
}

/// A key whose load in another process fails, without a mark, is loaded by this one.
#[tokio::test(start_paused = true)]
async fn key_of_a_failed_process_is_loaded_later() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let (other, cache) = (cache(backend.clone()), cache(backend));
    let stuck =
        tokio::spawn(async move { other.get_or_fill(2_u64, std::future::pending::<Result<u64, BoxError>>).await });
    sleep(MS).await;
    let all = tokio::spawn({
        let (cache, origin) = (cache.clone(), origin.clone());
        async move { get_all(&cache, [1, 2, 4], &origin).await.unwrap() }
    });
    sleep(200 * MS).await;
    assert_eq!(origin.calls(), [[1, 4]], "the others do not wait");
    stuck.abort();
    assert!(stuck.await.is_err());
    assert_eq!(all.await.unwrap(), [20, 40]);
    assert_eq!(origin.calls(), [[2]]);
}

#[tokio::test(start_paused = true)]
async fn stale_values_are_refreshed_together() {
    let origin = Origin::default();
    let cache = cache(MemoryBackend::new()).stale_for(MINUTE);
    assert_eq!(get_all(&cache, [2, 4], &origin).await.unwrap(), [20, 40]);
    sleep(MINUTE).await;
    assert_eq!(timeout(50 * MS, get_all(&cache, [2, 4], &origin)).await.unwrap().unwrap(), [20, 40]);
    sleep(200 * MS).await;
    assert_eq!(origin.calls(), [[2, 4], [2, 4]]);
}

#[tokio::test(start_paused = true)]
async fn failing_batch_is_an_error_and_is_called_once() {
    let (calls, cache) = (Arc::new(Mutex::new(0)), cache(MemoryBackend::new()));
    for panics in [false, true] {
        let counted = Arc::clone(&calls);
        let loader = move |_: Vec<u64>| {
            *counted.lock().unwrap() += 1;
            assert!(!panics, "in the call");
            async { Err::<HashMap<u64, u64>, BoxError>("the origin is down".into()) }
        };
        let error = cache.get_or_fill_all(0..10_u64, loader).await.unwrap_err();
        match error {
            CacheError::Load(error) if !panics => assert_eq!(error.to_string(), "the origin is down"),
            CacheError::Panicked if panics => {}
            error => panic!("{error:?}"),
        }
        assert_eq!(std::mem::take(&mut *calls.lock().unwrap()), 1);
        sleep(Duration::from_secs(1)).await;
    }
}

/// A batch is one load, however many keys it has.
#[tokio::test(start_paused = true)]
async fn batch_without_the_store_is_one_load() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, origin) = (store.faults(), Origin::default());
    let cache = cache(store).origin_limit(1);
    faults.fail(Failure::Unavailable);
    let (first, second) = tokio::join!(get_all(&cache, 0..100, &origin), get_all(&cache, 200..300, &origin));
    assert_eq!(first.unwrap().len(), 50);
    assert!(matches!(second.unwrap_err(), CacheError::OriginLimit { .. }));
    assert_eq!(origin.calls(), [(0..100).collect::<Vec<_>>()]);
}

#[tokio::test(start_paused = true)]
async fn values_of_a_batch_have_times_of_their_own() {
    let cache = cache(MemoryBackend::new());
    let load = async |keys: Vec<&'static str>| {
        let loaded = |key| if key == "short" { Loaded::value(1).fresh_for(MS) } else { Loaded::value(2) };
        Ok::<_, BoxError>(keys.into_iter().map(|key| (key, loaded(key))).collect::<HashMap<_, _>>())
    };
    assert_eq!(cache.get_or_fill_all(["short", "long"], load).await.unwrap().len(), 2);
    sleep(2 * MS).await;
    assert!(cache.get("short").await.unwrap().is_none());
    assert!(cache.get("long").await.unwrap().is_some());
}

/// A caller of one key who joins a batch gets its value, also if the caller of the batch has gone.
#[tokio::test(start_paused = true)]
async fn dropped_batch_leaves_other_callers_their_loads() {
    let (origin, cache) = (Origin::default(), cache(MemoryBackend::new()));
    let batch = tokio::spawn({
        let (cache, origin) = (cache.clone(), origin.clone());
        async move { get_all(&cache, [2, 4, 6], &origin).await }
    });
    sleep(MS).await;
    let one = tokio::spawn({
        let (cache, origin) = (cache.clone(), origin.clone());
        async move { get_all(&cache, [4], &origin).await.unwrap() }
    });
    sleep(MS).await;
    batch.abort();
    assert_eq!(one.await.unwrap(), [40]);
    assert_eq!(origin.calls().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn loader_that_asks_for_a_key_of_its_batch_is_an_error() {
    let cache = cache(MemoryBackend::new());
    let inner = cache.clone();
    let load = move |keys: Vec<u64>| {
        let inner = inner.clone();
        async move {
            let other = inner.get_or_fill(9_u64, async || Ok::<_, BoxError>(9)).await?;
            assert_eq!(other.as_deref(), Some(&9), "another key is no problem");
            for key in &keys {
                let error = inner.get_or_fill(*key, async || Ok::<_, BoxError>(0)).await.unwrap_err();
                assert!(matches!(error, CacheError::Recursive), "{error:?}");
            }
            Ok::<_, BoxError>(keys.into_iter().map(|key| (key, key)).collect::<HashMap<_, _>>())
        }
    };
    assert_eq!(cache.get_or_fill_all([1, 2, 3], load).await.unwrap().len(), 3);
}
