//! The cost of executing a request only once: in commands, in time on the memory backend, and relative to the maximum of the server.
//!
//! `cargo bench --bench idempotency` starts its own server, takes some seconds, and ends with
//!
//! * `first_commands`, `replay_commands`: scripts that the server runs for an executed request, and for a replay
//! * `replay_ceiling_ratio`: replays of 1 KiB per second on Redis, divided by the rate of `redis-benchmark` (`-P 64 -c 50`) with the same
//!   script and response size. The median of several rounds, with 256 in flight over 10,000 keys
//! * `layer_memory_ns`: the time that the layer adds to an executed request on memory, with bodies of 100 bytes each way

#[path = "../tests/support/mod.rs"]
mod support;

use std::convert::Infallible;
use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use support::server::{RedisServer, binary};
use tollgate::idempotency::Operation;
use tollgate::idempotency::store::{BodyFingerprint, Claim, Completion, Digest, IdempotencyStore};
use tollgate::lock::store::Token;
use tollgate::{GlobalKey, IdempotencyLayer, MemoryBackend, RedisBackend, RedisOptions};
use tower::{Layer, Service, ServiceExt, service_fn};

const IN_FLIGHT: u64 = 256;
const KEYS: u64 = 10_000;
const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_millis(1_800);
const BENCHMARK_REQUESTS: &str = "200000";
const SCRIPT: &str =
    concat!(include_str!("../lua/includes/idempotency_record.lua"), include_str!("../lua/idempotency_begin.lua"));

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    let server = RedisServer::start();
    let connect = || async {
        let options = RedisOptions::from_url(server.url()).expect("the URL is well-formed");
        options.prefix("bench").connect().await.expect("Redis accepts the connection")
    };
    let backend = runtime.block_on(connect());
    let [first_commands, replay_commands] = runtime.block_on(commands(&server, backend.clone()));
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        let ceiling = ceiling(&server, &runtime, &backend);
        let ours = runtime.block_on(replays(backend.clone()));
        println!("round {round}: ceiling {ceiling:.0}/s, replays {ours:.0}/s");
        // The first round executes the requests that the other rounds replay.
        if round > 0 {
            ratios.push(ours / ceiling);
        }
    }
    ratios.sort_by(f64::total_cmp);
    let replay_ceiling_ratio = ratios[ratios.len() / 2];
    let single = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    let layer_memory_ns = single.block_on(layer_ns());
    println!(
        "first_commands={first_commands} replay_commands={replay_commands} \
         replay_ceiling_ratio={replay_ceiling_ratio:.2} layer_memory_ns={layer_memory_ns:.0}"
    );
}

fn request(key: &str, body: Bytes) -> Request<Full<Bytes>> {
    Request::post("/pay").header("idempotency-key", key).body(Full::new(body)).expect("a request can be made")
}

/// Reads the whole request, and responds with `size` bytes.
async fn answer<B>(request: Request<B>, size: usize) -> Result<Response<Full<Bytes>>, Infallible>
where
    B: Body<Error = Infallible>,
{
    request.into_body().collect().await?;
    static TEXT: [u8; 1_024] = [b'x'; 1_024];
    Ok(Response::new(Full::new(Bytes::from_static(&TEXT[..size]))))
}

async fn commands(server: &RedisServer, backend: RedisBackend) -> [u64; 2] {
    let layer = IdempotencyLayer::new(backend).scope(GlobalKey).deadline(Duration::from_secs(10));
    let service = layer.layer(service_fn(|request: Request<_>| answer(request, 1_024)));
    let ask = async |key: &str| {
        let response = service.clone().oneshot(request(key, Bytes::from_static(b"hundred"))).await;
        let Ok(response) = response;
        response.into_body().collect().await.expect("the body is complete");
    };
    ask("first").await;
    let calls = || {
        let stats = server.text("INFO commandstats");
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum::<u64>()
    };
    let before = calls();
    ask("counted").await;
    let first = calls();
    ask("counted").await;
    [first - before, calls() - first]
}

/// Replays of 1 KiB per second.
async fn replays(backend: RedisBackend) -> f64 {
    let layer = IdempotencyLayer::new(backend).scope(GlobalKey).deadline(Duration::from_secs(10));
    let service = layer.layer(service_fn(|request: Request<_>| answer(request, 1_024)));
    let keys: Arc<Vec<String>> = Arc::new((0..KEYS).map(|key| format!("key-{key}")).collect());
    // Execute all requests before the replays are measured.
    let turns = Arc::new(AtomicU64::new(0));
    let run = async |until: u64, time: Duration| {
        let start = Instant::now();
        let tasks: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                let (service, keys, turns) = (service.clone(), Arc::clone(&keys), Arc::clone(&turns));
                tokio::spawn(async move {
                    let mut done = 0;
                    while start.elapsed() < time {
                        let turn = turns.fetch_add(1, Ordering::Relaxed);
                        if turn >= until {
                            break;
                        }
                        let key = &keys[(turn % KEYS) as usize];
                        let Ok(response) = service.clone().oneshot(request(key, Bytes::from_static(b"hundred"))).await;
                        let body = response.into_body().collect().await.expect("the body is complete").to_bytes();
                        assert_eq!(body.len(), 1_024);
                        done += 1;
                    }
                    done
                })
            })
            .collect();
        let mut done = 0_u64;
        for task in tasks {
            done += task.await.expect("no request fails");
        }
        done as f64 / start.elapsed().as_secs_f64()
    };
    run(KEYS, Duration::from_secs(60)).await;
    run(u64::MAX, ROUND).await
}

/// The rate of `redis-benchmark` with the same script, over as many keys with responses of 1 KiB.
fn ceiling(server: &RedisServer, runtime: &tokio::runtime::Runtime, backend: &RedisBackend) -> f64 {
    let head = Digest(*b"0123456789abcdef");
    runtime.block_on(async {
        for key in 0..KEYS {
            // redis-benchmark formats its keys this way.
            let operation = Operation::new("ceiling", format!("{key:012}"));
            let token = Token::random().expect("random numbers are available");
            let (lease, retention) = (Duration::from_secs(10), Duration::from_secs(3_600));
            let claim = Claim::new(token, head, lease, retention);
            backend.begin(&operation, &claim).await.expect("Redis answers");
            let completion = Completion::new(vec![b'x'; 1_024], BodyFingerprint::default(), retention);
            backend.complete(&operation, &token, &completion).await.expect("Redis answers");
        }
    });
    // The Redis key of a record depends on its operation. Rename it to the key that redis-benchmark generates.
    let mut connection = server.connection();
    let records: Vec<String> =
        redis::cmd("KEYS").arg("bench:2:*:ceiling:*:record").query(&mut connection).expect("Redis answers");
    for record in records {
        let number = record.trim_end_matches(":record").rsplit(':').next().unwrap_or_default();
        let name = format!("ceiling:{number}");
        let _: () = redis::cmd("RENAME").arg(&record).arg(name).query(&mut connection).expect("Redis answers");
    }
    let hash: String =
        redis::cmd("SCRIPT").arg("LOAD").arg(SCRIPT).query(&mut server.connection()).expect("the script loads");
    let binary = binary();
    let name = if binary.contains("valkey") { "valkey-benchmark" } else { "redis-benchmark" };
    let sibling = Path::new(&binary).with_file_name(name);
    let benchmark = env::var("TOLLGATE_REDIS_BENCHMARK").map_or(sibling, Into::into);
    let output = Command::new(&benchmark)
        .args(["-p", &server.port().to_string(), "-c", "50", "-P", "64", "-n", BENCHMARK_REQUESTS])
        .args(["-r", &KEYS.to_string(), "--csv", "EVALSHA", &hash, "2"])
        .args(["ceiling:__rand_int__", "bench:2:{idempotency}:ceiling:records"])
        .args(["fedcba9876543210", "0123456789abcdef", "15000", "86400000", "0", "1000000"])
        .output()
        .unwrap_or_else(|error| {
            panic!("{} cannot be run ({error}): set TOLLGATE_REDIS_BENCHMARK", benchmark.display())
        });
    let text = String::from_utf8_lossy(&output.stdout);
    // The last line begins with the command and the requests per second, each in quotes.
    let rate = text.lines().last().and_then(|line| line.split("\",\"").nth(1)).and_then(|rate| rate.parse().ok());
    rate.unwrap_or_else(|| panic!("redis-benchmark printed no rate: {text}"))
}

/// The 10th percentile of many batches, minus that of the bare service. Other load on the machine only adds time.
async fn layer_ns() -> f64 {
    const BATCH: usize = 1_000;
    const BATCHES: usize = 100;
    let body = Bytes::from_static(&[b'y'; 100]);
    let guarded = IdempotencyLayer::new(MemoryBackend::with_capacity(2 * BATCH * BATCHES)).scope(GlobalKey);
    let guarded = guarded.layer(service_fn(|request: Request<_>| answer(request, 100)));
    let alone = service_fn(|request: Request<Full<Bytes>>| answer(request, 100));
    let mut number = 0_u64;
    let mut batch = || -> Vec<Request<Full<Bytes>>> {
        (0..BATCH)
            .map(|_| {
                number += 1;
                request(&format!("key-{number}"), body.clone())
            })
            .collect()
    };
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..BATCHES {
        times[0].push(time(guarded.clone(), batch()).await);
        times[1].push(time(alone, batch()).await);
    }
    let [guarded, alone] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 10]
    });
    guarded - alone
}

async fn time<S, B>(mut service: S, requests: Vec<Request<Full<Bytes>>>) -> f64
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let count = requests.len();
    let start = Instant::now();
    for request in requests {
        let Ok(ready) = service.ready().await;
        let Ok(response) = ready.call(request).await;
        let body = response.into_body().collect().await.expect("the body is complete").to_bytes();
        assert_eq!(body.len(), 100);
    }
    start.elapsed().as_secs_f64() * 1e9 / count as f64
}
