//! Tags: entries with an invalidated tag are never served.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{advance, sleep};
use tollgate::cache::CacheError;
use tollgate::cache::store::{CacheKey, CacheStore};
use tollgate::{BoxError, Cache, MemoryBackend};

use crate::model::run_traces;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// A cache on a backend of its own process.
fn cache<S: CacheStore + Send + Sync + 'static>(store: S) -> Cache<usize> {
    Cache::new(store, "numbers", MINUTE).stale_for(MINUTE).jitter(0.0).early_refresh(0.0)
}

async fn fill(cache: &Cache<usize>, key: u64, value: usize) -> usize {
    *cache.get_or_fill(key, async move || Ok::<_, BoxError>(value)).await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn invalidated_tag_removes_its_entries() {
    let backend = MemoryBackend::new();
    let (cache, other) = (cache(backend.clone()), self::cache(backend));
    assert_eq!(fill(&cache.tagged(["a", "b"]), 1, 1).await, 1);
    assert_eq!(fill(&cache.tagged(["b"]), 2, 2).await, 2);
    cache.tagged(["c"]).set(3_u64, 3).await.unwrap();
    assert_eq!(fill(&other, 1, 9).await, 1, "whoever asks");

    cache.invalidate_tag("a").await.unwrap();
    assert!(cache.get(1_u64).await.unwrap().is_none());
    assert_eq!(fill(&other, 1, 9).await, 1, "another process asks the store once a second");
    advance(SECOND).await;
    assert!(other.get(1_u64).await.unwrap().is_none());
    // Not as a stale value either, and the entry is replaced.
    assert_eq!(fill(&other.tagged(["a"]), 1, 10).await, 10);
    assert_eq!(fill(&cache, 1, 9).await, 10);

    assert_eq!(fill(&cache, 2, 9).await, 2);
    cache.invalidate_tag("b").await.unwrap();
    assert_eq!(fill(&cache, 2, 20).await, 20);
    assert_eq!(fill(&cache, 3, 9).await, 3);
    cache.invalidate_tag("c").await.unwrap();
    assert_eq!(fill(&cache, 3, 30).await, 30);
}

#[tokio::test(start_paused = true)]
async fn load_before_an_invalidation_of_its_tag_is_not_served_later() {
    let backend = MemoryBackend::new();
    let (cache, other) = (cache(backend.clone()).tagged(["a"]), self::cache(backend).tagged(["a"]));
    for (round, invalidating) in [&cache, &other].into_iter().enumerate() {
        let (open, gate) = oneshot::channel();
        let loading = cache.clone();
        let load = async move || Ok::<_, BoxError>(gate.await?);
        let old = tokio::spawn(async move { *loading.get_or_fill(1_u64, load).await.unwrap().unwrap() });
        sleep(Duration::from_millis(1)).await;
        invalidating.invalidate_tag("a").await.unwrap();
        // The time after which another process knows.
        sleep(2 * SECOND).await;
        let new = tokio::spawn({
            let cache = cache.clone();
            async move { fill(&cache, 1, 10 + round).await }
        });
        sleep(Duration::from_millis(1)).await;
        open.send(round).unwrap();
        assert_eq!(old.await.unwrap(), round);
        assert_eq!(new.await.unwrap(), 10 + round);
        cache.invalidate_tag("a").await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn entry_with_an_evicted_generation_is_loaded_again() {
    let backend = MemoryBackend::new();
    let cache = cache(backend.clone()).tagged(["a"]);
    assert_eq!(fill(&cache, 1, 1).await, 1);
    // As an eviction does.
    CacheStore::invalidate_tag(&backend, &CacheKey::new("numbers", "a")).await.unwrap();
    advance(SECOND).await;
    assert_eq!(fill(&cache, 1, 2).await, 2);
    assert_eq!(fill(&cache, 1, 3).await, 2);
}

#[tokio::test(start_paused = true)]
async fn too_many_tags_are_refused() {
    let cache = cache(MemoryBackend::new());
    assert_eq!(fill(&cache.tagged(0..16_u64), 1, 1).await, 1);
    let error = cache.tagged(0..17_u64).set(1_u64, 1).await.unwrap_err();
    assert!(matches!(error, CacheError::Config(_)), "{error:?}");
    assert_eq!(error.to_string(), "an entry with 17 tags has too many: at most 16 are allowed");
    let endless = cache.tagged((0..100).map(|number| format!("{number}{}", "x".repeat(10_000))));
    assert!(endless.set(1_u64, 1).await.is_err());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A caller of a process asks for the value. If it loads, it goes on when `Finish` opens its gate.
    Ask { process: usize },
    /// The oldest load that waits goes on.
    Finish,
    /// A process changes the value, and invalidates one of the tags, or the key.
    Change { process: usize, by: u8 },
    /// The store forgets the generation of a tag.
    Evict { tag: u8 },
    /// Two seconds pass.
    Wait,
}

fn steps(processes: usize) -> impl Strategy<Value = Vec<Step>> {
    let process = move || 0..processes;
    let step = prop_oneof![
        6 => process().prop_map(|process| Step::Ask { process }),
        4 => Just(Step::Finish),
        3 => (process(), 0..3_u8).prop_map(|(process, by)| Step::Change { process, by }),
        2 => (0..2_u8).prop_map(|tag| Step::Evict { tag }),
        1 => Just(Step::Wait),
    ];
    prop::collection::vec(step, 1..30)
}

const TAGS: [&str; 2] = ["a", "b"];

/// No caller gets a value from before a change that its process knew of when the caller came. `wait` lets two seconds pass, after which all
/// processes know of all changes.
async fn run<S: CacheStore + Clone + Send + Sync + 'static>(
    store: &S,
    caches: &[Cache<usize>],
    steps: &[Step],
    round: u64,
    wait: Option<Duration>,
) {
    let origin = Arc::new(AtomicUsize::new(0));
    let mut known = vec![0; caches.len()];
    let mut gates = std::collections::VecDeque::new();
    let mut callers = JoinSet::new();
    for &step in steps {
        match step {
            Step::Ask { process } => {
                let (open, gate) = oneshot::channel::<()>();
                gates.push_back(open);
                let (cache, origin, known) = (caches[process].clone(), Arc::clone(&origin), known[process]);
                callers.spawn(async move {
                    let load = async move || {
                        let value = origin.load(Ordering::SeqCst);
                        // Also if the trace has ended.
                        let _ = gate.await;
                        Ok::<_, BoxError>(value)
                    };
                    let value = *cache.get_or_fill(round, load).await.unwrap().unwrap();
                    assert!(value >= known, "got {value}, although {known} was known");
                });
            }
            Step::Finish => drop(gates.pop_front()),
            Step::Change { process, by } => {
                let value = origin.fetch_add(1, Ordering::SeqCst) + 1;
                match TAGS.get(usize::from(by)) {
                    Some(tag) => caches[process].invalidate_tag(*tag).await.unwrap(),
                    None => caches[process].invalidate(round).await.unwrap(),
                }
                known[process] = value;
            }
            Step::Evict { tag } => {
                store.invalidate_tag(&CacheKey::new("numbers", TAGS[usize::from(tag)])).await.unwrap();
            }
            Step::Wait => {
                if let Some(wait) = wait {
                    sleep(wait).await;
                    known.fill(origin.load(Ordering::SeqCst));
                }
            }
        }
        // Lets the callers go on.
        tokio::task::yield_now().await;
    }
    gates.clear();
    while let Some(result) = callers.join_next().await {
        result.unwrap_or_else(|error| panic!("{error}"));
    }
    for (cache, known) in caches.iter().zip(known) {
        let load = async move || Ok::<_, BoxError>(usize::MAX);
        assert!(*cache.get_or_fill(round, load).await.unwrap().unwrap() >= known);
    }
}

#[test]
fn memory_serves_no_value_from_before_a_change() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let backend = MemoryBackend::new();
    let caches: Vec<_> = (0..3).map(|_| cache(backend.clone()).tagged(TAGS)).collect();
    run_traces(steps(caches.len()), 10_000, |steps, round| {
        runtime.block_on(run(&backend, &caches, steps, round, Some(2 * SECOND)));
    });
}

/// One process, since no time is left to wait.
#[test]
fn redis_serves_no_value_from_before_a_change() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let server = RedisServer::start();
    let backend = runtime.block_on(patient(server.url()));
    let caches = [cache(backend.clone()).tagged(TAGS)];
    run_traces(steps(1), 1_000, |steps, round| runtime.block_on(run(&backend, &caches, steps, round, None)));
    server.every_key_expires();
}
