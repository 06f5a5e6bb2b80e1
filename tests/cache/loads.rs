//! Loads: once for many callers, stale values, failures and cancellation. Each test runs on memory with a paused clock.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{advance, sleep, timeout};
use tollgate::cache::{CacheError, Loaded};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{BoxError, Cache, Codec, MemoryBackend};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// An origin that counts its calls.
#[derive(Clone, Default)]
struct Origin(Arc<AtomicUsize>);

impl Origin {
    fn calls(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// A loader that returns the number of its call after 200 ms.
    fn load(&self) -> impl Future<Output = Result<usize, BoxError>> + Send + use<> {
        let calls = Arc::clone(&self.0);
        async move {
            sleep(ms(200)).await;
            Ok(calls.fetch_add(1, Ordering::Relaxed) + 1)
        }
    }

    /// A loader that fails after 200 ms.
    fn fail(&self) -> impl Future<Output = Result<usize, BoxError>> + Send + use<> {
        let calls = Arc::clone(&self.0);
        async move {
            sleep(ms(200)).await;
            calls.fetch_add(1, Ordering::Relaxed);
            Err("the origin is down".into())
        }
    }
}

/// Values are fresh for a minute, exactly.
fn cache(backend: &MemoryBackend) -> Cache<usize> {
    Cache::new(backend.clone(), "numbers", secs(60)).jitter(0.0).early_refresh(0.0)
}

async fn get(cache: &Cache<usize>, origin: &Origin) -> Result<Option<usize>, CacheError> {
    let origin = origin.clone();
    Ok(cache.get_or_fill("a", move || origin.load()).await?.map(|value| *value))
}

/// Several caches on one backend stand for several processes.
#[tokio::test(start_paused = true)]
async fn many_callers_share_one_load() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let caches: Vec<_> = (0..3).map(|_| cache(&backend)).collect();
    let mut callers = JoinSet::new();
    for number in 0..3_000 {
        let (cache, origin) = (caches[number % 3].clone(), origin.clone());
        callers.spawn(async move { get(&cache, &origin).await });
    }
    for value in callers.join_all().await {
        assert_eq!(value.unwrap(), Some(1));
    }
    assert_eq!(origin.calls(), 1);
    advance(secs(59)).await;
    assert_eq!(get(&caches[0], &origin).await.unwrap(), Some(1));
    advance(secs(1)).await;
    assert_eq!(get(&caches[0], &origin).await.unwrap(), Some(2));
}

#[tokio::test(start_paused = true)]
async fn absence_is_cached_for_its_own_time() {
    let (backend, calls) = (MemoryBackend::new(), Arc::new(AtomicUsize::new(0)));
    let cache = cache(&backend).absent_for(secs(5));
    for (after, expected) in [(0, 1), (4, 1), (2, 2)] {
        advance(secs(after)).await;
        let counter = Arc::clone(&calls);
        let absent = async move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok::<_, BoxError>(None)
        };
        assert_eq!(cache.get_or_fill("a", absent).await.unwrap(), None);
        assert_eq!(calls.load(Ordering::Relaxed), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn stale_value_is_served_while_one_caller_refreshes() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let cache = cache(&backend).stale_for(secs(600));
    assert_eq!(get(&cache, &origin).await.unwrap(), Some(1));
    advance(secs(61)).await;
    for _ in 0..100 {
        assert_eq!(get(&cache, &origin).await.unwrap(), Some(1), "nobody waits");
    }
    sleep(ms(201)).await;
    assert_eq!(get(&cache, &origin).await.unwrap(), Some(2));
    assert_eq!(origin.calls(), 2);

    // With a soft timeout that is long enough, callers get the new value.
    advance(secs(61)).await;
    assert_eq!(get(&cache.clone().soft_timeout(secs(1)), &origin).await.unwrap(), Some(3));
}

#[tokio::test(start_paused = true)]
async fn stale_value_is_served_while_the_origin_fails() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let cache = cache(&backend).stale_for(secs(600)).soft_timeout(secs(1));
    assert_eq!(get(&cache, &origin).await.unwrap(), Some(1));
    advance(secs(61)).await;
    let failing = Origin::default();
    for _ in 0..10 {
        let origin = failing.clone();
        assert_eq!(*cache.get_or_fill("a", move || origin.fail()).await.unwrap().unwrap(), 1);
    }
    assert_eq!(failing.calls(), 1, "once in `error_for`");
}

#[tokio::test(start_paused = true)]
async fn failing_origin_is_called_once_a_second() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let caches: Vec<_> = (0..3).map(|_| cache(&backend)).collect();
    let mut callers = JoinSet::new();
    for number in 0..300 {
        let (cache, origin) = (caches[number % 3].clone(), origin.clone());
        callers.spawn(async move { cache.get_or_fill("a", move || origin.fail()).await });
    }
    for result in callers.join_all().await {
        match result.unwrap_err() {
            CacheError::Load(error) => assert_eq!(error.to_string(), "the origin is down"),
            CacheError::RecentlyFailed { retry_after } => assert!(retry_after <= secs(1), "{retry_after:?}"),
            error => panic!("{error:?}"),
        }
    }
    assert_eq!(origin.calls(), 1);
    advance(secs(1)).await;
    let again = origin.clone();
    assert!(caches[0].get_or_fill("a", move || again.fail()).await.is_err());
    assert_eq!(origin.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn uncached_value_is_for_its_callers_only() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let cache = cache(&backend);
    for number in 1..4 {
        let origin = origin.clone();
        let load = async move || Ok::<_, BoxError>(Loaded::uncached(origin.load().await?));
        assert_eq!(*cache.get_or_fill("a", load).await.unwrap().unwrap(), number);
    }
    assert!(cache.get("a").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn panicking_loader_is_an_error_and_releases_the_key() {
    let cache = cache(&MemoryBackend::new()).error_for(ms(10));
    for panics_late in [false, true] {
        let load = move || {
            assert!(panics_late, "at once");
            async {
                sleep(ms(1)).await;
                if true {
                    panic!("later");
                }
                Ok::<_, BoxError>(1)
            }
        };
        let error = cache.get_or_fill("a", load).await.unwrap_err();
        assert!(matches!(error, CacheError::Panicked), "{error:?}");
        advance(ms(10)).await;
    }
    assert_eq!(get(&cache, &Origin::default()).await.unwrap(), Some(1));
}

/// Cannot encode: panics.
struct Panicking;

impl Codec<usize> for Panicking {
    fn encode(&self, _: &usize) -> Result<Vec<u8>, BoxError> {
        panic!("no form for this value")
    }

    fn decode(&self, _: &[u8]) -> Result<usize, BoxError> {
        Err("no value in this form".into())
    }
}

#[tokio::test(start_paused = true)]
async fn panicking_codec_is_an_error_for_all_callers() {
    let cache = Cache::with_codec(MemoryBackend::new(), "numbers", secs(60), Panicking);
    let call = || cache.get_or_fill("a", async || Ok::<_, BoxError>(1));
    let (first, second) = tokio::join!(call(), call());
    for outcome in [first, second] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, CacheError::Panicked), "{error:?}");
    }
}

#[test]
fn load_whose_runtime_ends_is_an_error() {
    let (loading, calling) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    let cache = cache(&MemoryBackend::new());
    let begun = Arc::new(Notify::new());
    let (first, begins) = (cache.clone(), Arc::clone(&begun));
    loading.spawn(async move {
        let load = async move || {
            begins.notify_one();
            pending::<Result<usize, BoxError>>().await
        };
        first.get_or_fill("a", load).await
    });
    calling.block_on(async {
        begun.notified().await;
        let mut second = pin!(cache.get_or_fill("a", async || Ok::<_, BoxError>(2)));
        assert!(futures_util::poll!(&mut second).is_pending());
        loading.shutdown_background();
        let error = timeout(secs(10), second).await.expect("the load has ended").unwrap_err();
        assert!(matches!(error, CacheError::Closed), "{error:?}");
    });
}

#[tokio::test(start_paused = true)]
async fn loader_that_never_ends_is_an_error() {
    let cache = cache(&MemoryBackend::new()).load_timeout(secs(3)).error_for(ms(10));
    let error = cache.get_or_fill("a", pending::<Result<usize, BoxError>>).await.unwrap_err();
    assert!(matches!(error, CacheError::TimedOut { after } if after == secs(3)), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn loader_that_asks_for_its_own_key_is_an_error() {
    let cache = cache(&MemoryBackend::new());
    let inner = cache.clone();
    let load = async move || {
        let other = inner.get_or_fill("b", async || Ok::<_, BoxError>(7)).await?;
        assert_eq!(other.as_deref(), Some(&7), "another key is no problem");
        let deeper = inner.clone();
        // Through another key, too.
        let load = async move || deeper.get_or_fill("a", pending::<Result<usize, BoxError>>).await.map(|_| 1);
        inner.get_or_fill("c", load).await.map(|_| 1)
    };
    let error = cache.get_or_fill("a", load).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap();
    assert_eq!(source.to_string(), "the loader failed");
    assert_eq!(source.source().unwrap().to_string(), "the loader asked the cache for a key that it loads");
}

#[tokio::test(start_paused = true)]
async fn load_without_callers_is_cancelled_and_releases_the_key() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let cache = cache(&backend);
    assert!(timeout(ms(50), get(&cache, &origin)).await.is_err());
    // Another process does not have to wait for the lease to end.
    let other = self::cache(&backend);
    assert_eq!(timeout(ms(300), get(&other, &origin)).await.unwrap().unwrap(), Some(1));

    // If one of two callers goes, the other one gets the value of the same load.
    other.invalidate("a").await.unwrap();
    let (first, second) = tokio::join!(timeout(ms(50), get(&cache, &origin)), get(&cache, &origin));
    assert!(first.is_err());
    assert_eq!(second.unwrap(), Some(2));
}

#[tokio::test(start_paused = true)]
async fn value_of_a_load_before_an_invalidation_is_not_stored() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let cache = cache(&backend);
    let (value, ()) = tokio::join!(get(&cache, &origin), async {
        sleep(ms(100)).await;
        cache.invalidate("a").await.unwrap();
    });
    assert_eq!(value.unwrap(), Some(1), "its callers get it");
    assert!(cache.get("a").await.unwrap().is_none());
    cache.set("a", 7).await.unwrap();
    assert_eq!(get(&cache, &origin).await.unwrap(), Some(7));
}

#[tokio::test(start_paused = true)]
async fn slow_load_keeps_its_lease() {
    let (backend, begun) = (MemoryBackend::new(), Arc::new(Notify::new()));
    let (first, second) = (cache(&backend), cache(&backend));
    let started = Arc::clone(&begun);
    let slow = tokio::spawn(async move {
        let load = async move || {
            started.notify_one();
            sleep(secs(20)).await;
            Ok::<_, BoxError>(1)
        };
        first.get_or_fill("a", load).await
    });
    begun.notified().await;
    let origin = Origin::default();
    assert_eq!(get(&second, &origin).await.unwrap(), Some(1));
    assert_eq!(origin.calls(), 0);
    assert_eq!(slow.await.unwrap().unwrap().as_deref(), Some(&1));
}

#[tokio::test(start_paused = true)]
async fn value_that_is_too_large_is_returned_and_not_cached() {
    let cache = Cache::<String>::new(MemoryBackend::new(), "texts", secs(60)).max_len(10);
    for _ in 0..2 {
        let text = cache.get_or_fill("a", async || Ok::<_, BoxError>("x".repeat(9))).await.unwrap().unwrap();
        assert_eq!(text.len(), 9, "with its quotes it has 11 bytes");
    }
    assert!(cache.get("a").await.unwrap().is_none());
    let error = cache.set("a", "x".repeat(9)).await.unwrap_err();
    assert!(matches!(error, CacheError::TooLarge { bytes: 11, max: 10 }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn settings_of_zero_are_refused() {
    let cache = Cache::<usize>::new(MemoryBackend::new(), "numbers", Duration::ZERO);
    let error = get(&cache, &Origin::default()).await.unwrap_err();
    assert!(matches!(error, CacheError::Config(_)), "{error:?}");
    // A century is as long as the longest time to live.
    let cache = Cache::<usize>::new(MemoryBackend::new(), "numbers", secs(100 * 365 * 86_400)).stale_for(Duration::MAX);
    assert_eq!(get(&cache, &Origin::default()).await.unwrap(), Some(1));
}

#[tokio::test(start_paused = true)]
async fn dropped_cache_and_shutdown_end_loads() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let cache = cache(&backend);
    let held = cache.clone();
    let caller = tokio::spawn(async move { held.get_or_fill("a", pending::<Result<usize, BoxError>>).await });
    sleep(ms(1)).await;
    let report = backend.shutdown(secs(1)).await;
    assert_eq!(report.to_string(), "the shutdown is incomplete: it left 1 running load");
    let error = get(&self::cache(&backend), &origin).await.unwrap_err();
    assert!(matches!(error, CacheError::Closed), "{error:?}");
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    sleep(ms(1)).await;
    assert!(backend.shutdown(secs(1)).await.is_clean());
}

#[tokio::test(start_paused = true)]
async fn failing_store_limits_loads_of_this_process() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, origin) = (store.faults(), Origin::default());
    let cache = Cache::<usize>::new(store, "numbers", secs(60)).origin_limit(2);
    faults.fail(Failure::Unavailable);
    let mut callers = JoinSet::new();
    for number in 0..100 {
        let (cache, origin) = (cache.clone(), origin.clone());
        callers.spawn(async move { cache.get_or_fill(number % 10, move || origin.load()).await });
    }
    let results = callers.join_all().await;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 20, "ten callers of each of two keys");
    for error in results.into_iter().filter_map(Result::err) {
        assert!(matches!(error, CacheError::OriginLimit { .. }), "{error:?}");
    }
    assert_eq!(origin.calls(), 2);
    faults.heal();
    sleep(ms(200)).await;
    assert!(get(&cache, &origin).await.unwrap().is_some());
}

/// A caller after an invalidation does not get what a load before it has read, in the same process either.
#[tokio::test(start_paused = true)]
async fn call_after_an_invalidation_joins_no_earlier_load() {
    let (backend, origin) = (MemoryBackend::new(), Origin::default());
    let (cache, other) = (cache(&backend), self::cache(&backend));
    for invalidating in [&cache, &other] {
        let old = tokio::spawn({
            let (cache, origin) = (cache.clone(), origin.clone());
            async move {
                let slow = async move || {
                    sleep(secs(10)).await;
                    origin.load().await
                };
                cache.get_or_fill("a", slow).await.unwrap().map(|value| *value)
            }
        });
        sleep(ms(100)).await;
        invalidating.invalidate("a").await.unwrap();
        // Another process tells this one by a lost lease: at the next renewal.
        sleep(secs(1)).await;
        let new = get(&cache, &origin).await.unwrap();
        let old = old.await.unwrap();
        assert!(new < old, "{new:?} {old:?}");
        assert_eq!(get(&cache, &origin).await.unwrap(), new, "the later value is not stored");
        cache.invalidate("a").await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn absent_and_uncached_results_replace_a_stale_value() {
    let backend = MemoryBackend::new();
    let cache = cache(&backend).stale_for(secs(600)).absent_for(Duration::ZERO);
    for loaded in [Loaded::absent(), Loaded::uncached(8)] {
        cache.set("a", 7).await.unwrap();
        cache.expire("a").await.unwrap();
        let result = loaded.clone();
        let stale = cache.get_or_fill("a", async || Ok::<_, BoxError>(result)).await.unwrap();
        assert_eq!(stale.as_deref(), Some(&7));
        sleep(ms(1)).await;
        assert!(cache.get("a").await.unwrap().is_none(), "{loaded:?}");
        cache.set("a", Loaded::uncached(9)).await.unwrap();
        assert!(cache.get("a").await.unwrap().is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn longest_settings_are_accepted() {
    let cache =
        cache(&MemoryBackend::new()).load_timeout(Duration::MAX).error_for(Duration::MAX).soft_timeout(Duration::MAX);
    assert_eq!(get(&cache, &Origin::default()).await.unwrap(), Some(1));
    let failing = Origin::default();
    assert!(cache.get_or_fill("b", move || failing.fail()).await.is_err());
    let error = get(&cache.deadline(Duration::ZERO), &Origin::default()).await.unwrap_err();
    assert!(matches!(error, CacheError::Config(_)), "{error:?}");
}

/// The end of an invalidated load leaves the next load of its key alone.
#[tokio::test(start_paused = true)]
async fn callers_after_an_invalidated_load_join_the_next_one() {
    for old_caller_goes in [false, true] {
        let store = FaultStore::new(MemoryBackend::new());
        let (faults, origin) = (store.faults(), Origin::default());
        let cache = Cache::<usize>::new(store, "numbers", secs(60)).jitter(0.0);
        let slow = |origin: &Origin| {
            let (cache, origin) = (cache.clone(), origin.clone());
            tokio::spawn(async move {
                let slow = async move || {
                    sleep(secs(5)).await;
                    origin.load().await
                };
                cache.get_or_fill("a", slow).await.unwrap().map(|value| *value)
            })
        };
        let old = slow(&Origin::default());
        sleep(ms(100)).await;
        cache.invalidate("a").await.unwrap();
        let new = slow(&origin);
        sleep(ms(100)).await;
        if old_caller_goes {
            old.abort();
        }
        // The old load learns at its next renewal that its lease is lost.
        sleep(secs(1)).await;
        // Without the store, another load would begin at once.
        faults.fail(Failure::Unavailable);
        assert_eq!(get(&cache, &origin).await.unwrap(), Some(1));
        assert_eq!(new.await.unwrap(), Some(1));
        assert_eq!(origin.calls(), 1);
        faults.heal();
    }
}

/// A refresh in the background ends if the store fails, but not if a caller waits for it.
#[tokio::test(start_paused = true)]
async fn caller_without_the_store_gets_the_value_of_a_refresh() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, origin) = (store.faults(), Origin::default());
    let cache = Cache::<usize>::new(store, "numbers", secs(60)).jitter(0.0).stale_for(secs(60)).deadline(secs(1));
    assert_eq!(get(&cache, &origin).await.unwrap(), Some(1));
    advance(secs(61)).await;
    faults.delay(ms(10));
    let stale = tokio::spawn({
        let (cache, origin) = (cache.clone(), origin.clone());
        async move { get(&cache, &origin).await }
    });
    // The entry is being read. After that, the refresh waits for its lease.
    sleep(ms(5)).await;
    faults.hang();
    let waiting = tokio::spawn({
        let (cache, origin) = (cache.clone().deadline(ms(100)), origin.clone());
        async move { get(&cache, &origin).await }
    });
    assert_eq!(stale.await.unwrap().unwrap(), Some(1));
    assert_eq!(waiting.await.unwrap().unwrap(), Some(2));
    faults.heal();
}
