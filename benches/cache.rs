//! The cost of a cache: of a hit on Redis, of a hit in the process, of a cold key, and of a look-up in an exists filter.
//!
//! `cargo bench --bench cache` starts its own server, takes less than two minutes after the build, and ends with
//!
//! * `hit_over_get`: hits of 1 KiB per second on Redis, divided by GETs of the same values on one multiplexed connection. 64 calls are in
//!   flight. The median of several rounds in turns
//! * `local_hit_ns`, `moka_ns`: a hit of the local tier, and a `get` of moka with the same keys, on one thread
//! * `layer_hit_ns`: a request that `CacheLayer` serves from the local tier, on one thread. Includes creating the request and reading 1 KiB
//! * `origin_calls_3x1000`: calls of the origin, if 3 processes with 1,000 callers each ask for one cold key and the origin takes 200 ms.
//!   `slowest_caller_ms`: the longest wait among them. Both are the worst of several rounds
//! * `waiter_p99_ms`: the 99th percentile of the time from the return of the load to the return of a caller that waits in another process
//! * `filter_server_us`: the time of Redis for a look-up in an `ExistsFilter` of a million keys, which is one GETRANGE, from its statistics.
//!   64 look-ups are in flight
//! * `filter_false_positive`: the part of absent keys that this filter contains

#[path = "../tests/support/mod.rs"]
mod support;

use std::convert::Infallible;
use std::env;
use std::hint::black_box;
use std::io::{self, BufRead};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures_util::stream;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Bytes;
use support::server::RedisServer;
use support::worker::Worker;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tollgate::{BoxError, Cache, CacheLayer, Codec, ExistsFilter, Key, MemoryBackend, RedisBackend};
use tower::{Layer, Service, service_fn};

const KEYS: u64 = 10_000;
const IN_FLIGHT: u64 = 64;
const ROUND: Duration = Duration::from_millis(1_500);
const ROUNDS: usize = 5;
const PROCESSES: usize = 3;
const CALLERS: usize = 1_000;
const ORIGIN: Duration = Duration::from_millis(200);
const HOUR: Duration = Duration::from_secs(3_600);
/// Marks a worker. Contains the URL of its server.
const WORKER: &str = "TOLLGATE_BENCH_CACHE";

fn main() {
    if let Ok(url) = env::var(WORKER) {
        return work(&url);
    }
    let server = RedisServer::start();
    let runtime = runtime();
    let hit_over_get = runtime.block_on(hit_over_get(&server));
    let waiter_p99_ms = runtime.block_on(waiter_p99_ms(&server));
    let (origin_calls, slowest_caller_ms) = cold_key(&server);
    let [local_hit_ns, moka_ns, layer_hit_ns] = local_hits();
    let (filter_server_us, filter_false_positive) = runtime.block_on(exists_filter(&server));
    println!(
        "hit_over_get={hit_over_get:.2} local_hit_ns={local_hit_ns:.0} moka_ns={moka_ns:.0} \
         origin_calls_3x1000={origin_calls} slowest_caller_ms={slowest_caller_ms} waiter_p99_ms={waiter_p99_ms:.2} \
         filter_server_us={filter_server_us:.2} filter_false_positive={filter_false_positive:.4} layer_hit_ns={layer_hit_ns:.0}"
    );
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts")
}

/// Stores bytes as they are, so that the figures are not those of JSON.
#[derive(Clone, Copy, Debug)]
struct Plain;

impl Codec<Vec<u8>> for Plain {
    fn encode(&self, value: &Vec<u8>) -> Result<Vec<u8>, BoxError> {
        Ok(value.clone())
    }

    fn decode(&self, bytes: &[u8]) -> Result<Vec<u8>, BoxError> {
        Ok(bytes.to_vec())
    }
}

async fn connect(url: &str) -> RedisBackend {
    RedisBackend::connect(url).await.expect("Redis accepts the connection")
}

async fn cache(url: &str) -> Cache<Vec<u8>, Plain> {
    Cache::with_codec(connect(url).await, "bench", HOUR, Plain).deadline(Duration::from_secs(10))
}

async fn fill<C: Codec<Vec<u8>> + Send + Sync + 'static>(cache: &Cache<Vec<u8>, C>, key: Key) -> Arc<Vec<u8>> {
    let value = cache.get_or_fill(key, async || Ok::<_, BoxError>(vec![b'x'; 1_024])).await;
    value.expect("Redis answers").expect("the value is not absent")
}

async fn hit_over_get(server: &RedisServer) -> f64 {
    let cache = cache(&server.url()).await;
    let client = redis::Client::open(server.url()).expect("the URL is well-formed");
    let connection = client.get_multiplexed_async_connection().await.expect("Redis accepts the connection");
    for key in 0..KEYS {
        fill(&cache, key.into()).await;
    }
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        let (cache, connection) = (cache.clone(), connection.clone());
        let gets = load(move |key| {
            let mut connection = connection.clone();
            async move {
                let entry = format!("tollgate:2:{{cache:bench:{key}}}:entry");
                let value: Vec<u8> =
                    redis::cmd("GET").arg(entry).query_async(&mut connection).await.expect("Redis answers");
                assert!(value.len() >= 1_024);
            }
        });
        let gets = gets.await;
        let hits = load(move |key| {
            let cache = cache.clone();
            async move { assert_eq!(fill(&cache, key.into()).await.len(), 1_024) }
        });
        let hits = hits.await;
        println!("round {round}: GET {gets:.0}/s, hits {hits:.0}/s");
        // The first round warms up.
        if round > 0 {
            ratios.push(hits / gets);
        }
    }
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

/// Calls per second.
async fn load<F: Future<Output = ()> + Send>(call: impl Fn(u64) -> F + Clone + Send + 'static) -> f64 {
    let (turn, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let mut tasks = JoinSet::new();
    for _ in 0..IN_FLIGHT {
        let (turn, call) = (Arc::clone(&turn), call.clone());
        tasks.spawn(async move {
            while start.elapsed() < ROUND {
                call(turn.fetch_add(1, Ordering::Relaxed) % KEYS).await;
            }
        });
    }
    tasks.join_all().await;
    turn.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()
}

/// Two caches with backends of their own stand for two processes.
async fn waiter_p99_ms(server: &RedisServer) -> f64 {
    let (loading, waiting) = (cache(&server.url()).await, cache(&server.url()).await);
    let mut waits = Vec::new();
    for round in 0..500_u64 {
        let key = Key::from(("wait", round));
        let has_begun = Arc::new(Notify::new());
        let (cache, begun) = (loading.clone(), Arc::clone(&has_begun));
        let loader = tokio::spawn(async move {
            let origin = async move || {
                begun.notify_one();
                tokio::time::sleep(Duration::from_millis(20)).await;
                Ok::<_, BoxError>(vec![b'x'; 1_024])
            };
            cache.get_or_fill(key, origin).await.expect("Redis answers");
            Instant::now()
        });
        has_begun.notified().await;
        fill(&waiting, key).await;
        let returned = Instant::now();
        let loaded = loader.await.expect("the task does not panic");
        waits.push(returned.saturating_duration_since(loaded).as_secs_f64() * 1e3);
    }
    waits.sort_by(f64::total_cmp);
    waits[waits.len() * 99 / 100]
}

/// A process with many callers for each key that it reads.
fn work(url: &str) {
    let runtime = runtime();
    let cache = runtime.block_on(cache(url));
    println!("ready");
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let key = Key::from(line.as_str());
        let slowest = runtime.block_on(async {
            let mut callers = JoinSet::new();
            let start = Instant::now();
            for _ in 0..CALLERS {
                let cache = cache.clone();
                callers.spawn(async move {
                    let origin = async || {
                        println!("origin");
                        tokio::time::sleep(ORIGIN).await;
                        Ok::<_, BoxError>(vec![b'x'; 1_024])
                    };
                    cache.get_or_fill(key, origin).await.expect("Redis answers");
                    start.elapsed()
                });
            }
            callers.join_all().await.into_iter().max().unwrap_or_default()
        });
        println!("slowest {}", slowest.as_millis());
    }
}

/// The calls of the origin, and the longest wait in ms: the worst of several rounds.
fn cold_key(server: &RedisServer) -> (usize, u64) {
    let (sender, lines) = mpsc::channel();
    let mut workers: Vec<_> =
        (0..PROCESSES).map(|_| Worker::start(WORKER, &server.url(), sender.clone(), Some)).collect();
    let next = || lines.recv_timeout(Duration::from_secs(30)).expect("a worker prints a line");
    for _ in 0..PROCESSES {
        assert_eq!(next(), "ready");
    }
    let mut worst = (0, 0);
    for round in 0..10 {
        workers.iter_mut().for_each(|worker| worker.order(&format!("cold-{round}")));
        let (mut calls, mut ended) = (0, 0);
        while ended < PROCESSES {
            match next().strip_prefix("slowest ") {
                None => calls += 1,
                Some(ms) => {
                    ended += 1;
                    worst.1 = worst.1.max(ms.parse().expect("it is a number"));
                }
            }
        }
        worst.0 = worst.0.max(calls);
    }
    worst
}

/// The time of a hit of the local tier, of moka, and of a request, in turns.
fn local_hits() -> [f64; 3] {
    const LOCAL_KEYS: u64 = 1_000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    let cache = Cache::with_codec(MemoryBackend::new(), "bench", HOUR, Plain).local_tier(10 * LOCAL_KEYS, HOUR);
    let moka = moka::sync::Cache::<Key, Arc<Vec<u8>>>::new(10 * LOCAL_KEYS);
    let keys: Vec<Key> = (0..LOCAL_KEYS).map(|key| Key::from(("user", key))).collect();
    for &key in &keys {
        for _ in 0..2 {
            moka.insert(key, runtime.block_on(fill(&cache, key)));
        }
    }
    let page = |_: Request<Empty<Bytes>>| async { Ok::<_, Infallible>(Response::new(Full::from(vec![b'x'; 1_024]))) };
    let layer = CacheLayer::new(MemoryBackend::new(), "pages").public().fresh_for(HOUR);
    let mut service = layer.local_tier(10 * LOCAL_KEYS, HOUR).layer(service_fn(page));
    let mut send = |path: &String| {
        let request = Request::get(path).header("host", "localhost").body(Empty::new()).expect("the path is valid");
        let response = service.call(request);
        async {
            let Ok(response) = response.await;
            response.into_body().collect().await.expect("the body is complete").to_bytes().len()
        }
    };
    let paths: Vec<_> = (0..LOCAL_KEYS).map(|path| format!("/users/{path}")).collect();
    for path in paths.iter().chain(&paths) {
        assert_eq!(runtime.block_on(send(path)), 1_024);
    }
    let _context = runtime.enter();
    let mut rounds = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..1_000 {
        rounds[0].push(time(&keys, |key| assert!(now(fill(&cache, *key)).len() == 1_024)));
        rounds[1].push(time(&keys, |key| assert!(black_box(moka.get(key)).is_some())));
        rounds[2].push(time(&paths, |path| assert!(now(send(path)) == 1_024)));
    }
    rounds.map(|mut rounds| {
        rounds.sort_by(f64::total_cmp);
        // Other load on the machine only adds time.
        rounds[rounds.len() / 10]
    })
}

/// Nanoseconds of a call.
fn time<K>(keys: &[K], call: impl FnMut(&K)) -> f64 {
    let start = Instant::now();
    keys.iter().for_each(call);
    start.elapsed().as_secs_f64() * 1e9 / keys.len() as f64
}

/// Polls a call once: a hit in the process does not wait.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the value was not in the process"),
    }
}

/// The time of Redis in us for a look-up of an absent key, and the part of absent keys that the filter contains.
async fn exists_filter(server: &RedisServer) -> (f64, f64) {
    const CAPACITY: u64 = 1_000_000;
    let filter = ExistsFilter::new(connect(&server.url()).await, "bench", CAPACITY)
        .visible_within(Duration::ZERO)
        .deadline(Duration::from_secs(10));
    let keys = stream::iter((0..CAPACITY).map(Ok::<_, BoxError>));
    let start = Instant::now();
    filter.rebuild(keys).await.expect("Redis answers");
    println!("rebuild of a filter of {CAPACITY} keys: {:.1} s", start.elapsed().as_secs_f64());
    server.query::<String>("CONFIG RESETSTAT");
    let (absent, contained) = (Arc::new(AtomicU64::new(CAPACITY)), Arc::new(AtomicU64::new(0)));
    let (next, found) = (Arc::clone(&absent), Arc::clone(&contained));
    let look_ups = load(move |_| {
        let (filter, key, found) = (filter.clone(), next.fetch_add(1, Ordering::Relaxed), Arc::clone(&found));
        async move {
            let might_contain = filter.might_contain(key).await.expect("Redis answers");
            found.fetch_add(u64::from(might_contain), Ordering::Relaxed);
        }
    });
    println!("look-ups: {:.0}/s", look_ups.await);
    let info = server.text("INFO commandstats");
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_getrange:")).expect("GETRANGE was called");
        let value = line.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|value| value.parse::<f64>().ok()).expect("it is a number")
    };
    let look_ups = absent.load(Ordering::Relaxed) - CAPACITY;
    (field("usec") / field("calls"), contained.load(Ordering::Relaxed) as f64 / look_ups as f64)
}
