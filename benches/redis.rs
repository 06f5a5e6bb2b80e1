//! The speed of decisions on Redis, relative to the maximum of the same server.
//!
//! `cargo bench --bench redis` starts its own server. In each round it measures several clients one after the other, with the same script
//! and 10,000 keys. The clients are `redis-benchmark` (the ceiling), this crate, and a bb8 pool that holds a connection for the round trip.
//! The pool runs with its PING (the common setup) and without it. The last line has the medians over all rounds:
//!
//! * `ceiling_ratio`: this crate divided by redis-benchmark (`-P 64 -c 50`)
//! * `held_ratio`, `held_no_ping_ratio`: this crate divided by the pools that hold connections
//! * `per_s`, `p99_us`: decisions per second, and the 99th percentile of their time, with 256 in flight

#[path = "../tests/support/mod.rs"]
mod support;

use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bb8_redis::RedisConnectionManager;
use redis::Script;
use support::server::{RedisServer, binary};
use tollgate::{Limiter, Policy, Quota, RedisBackend};

const IN_FLIGHT: u64 = 256;
const KEYS: u64 = 10_000;
const ROUNDS: usize = 5;
const BENCHMARK_REQUESTS: &str = "300000";
const ROUND: Duration = Duration::from_millis(1_800);
const SCRIPT: &str = concat!(
    include_str!("../lua/includes/rate_limit_refill.lua"),
    include_str!("../lua/includes/rate_limit_fade.lua"),
    include_str!("../lua/rate_limit_check_plain.lua"),
);
/// A request for one unit of a fixed window of 1,000,000 per minute, encoded for the script.
const REQUEST: &[u8] = b"\x01\x00\x00\x00\x00\x00\x00\x05\x25\x01\x00\x00\x00\x20\x00\x08\x00\
    \x02\x00\x87\x93\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x40\x42\x0f\x00\x00\x00\x00\
    \x05\x40\x42\x0f\x00\x00\x00\x00";

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    let server = RedisServer::start();
    let policy = Policy::new("bench", Quota::per_minute(1_000_000).fixed_window());
    let backend = runtime.block_on(RedisBackend::connect(server.url())).expect("Redis accepts the connection");
    let limiter = Limiter::new(backend, policy).deadline(Duration::from_secs(10));
    let held = runtime.block_on(held_pool(&server, true));
    let held_no_ping = runtime.block_on(held_pool(&server, false));
    let script = Script::new(SCRIPT);

    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        let ceiling = ceiling(&server);
        let limiter = limiter.clone();
        let (ours, p99) = runtime.block_on(load(move |turn| decide(limiter.clone(), turn)));
        let [held, held_no_ping] = [&held, &held_no_ping].map(|pool| {
            let (pool, script) = (pool.clone(), script.clone());
            runtime.block_on(load(move |turn| decide_held(pool.clone(), script.clone(), turn))).0
        });
        println!(
            "round {round}: ceiling {ceiling:.0}/s, tollgate {ours:.0}/s p99 {p99:.0} us, \
             held pool {held:.0}/s, held pool without PING {held_no_ping:.0}/s"
        );
        // The first round warms up.
        if round > 0 {
            rounds.push([ours / ceiling, ours / held, ours / held_no_ping, ours, p99]);
        }
    }
    let [ceiling_ratio, held_ratio, held_no_ping_ratio, per_s, p99_us] =
        [0, 1, 2, 3, 4].map(|i| median(rounds.iter().map(|round| round[i]).collect()));
    println!(
        "ceiling_ratio={ceiling_ratio:.2} held_ratio={held_ratio:.1} held_no_ping_ratio={held_no_ping_ratio:.1} \
         per_s={per_s:.0} p99_us={p99_us:.0}"
    );
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Spreads the turns pseudo-randomly over the keys.
fn key_of(turn: u64) -> u64 {
    turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xffff_ffff
}

async fn decide(limiter: Limiter<RedisBackend>, turn: u64) {
    let decision = limiter.check(key_of(turn) % KEYS).await.expect("Redis decides");
    assert!(decision.is_allowed());
}

/// A bb8 pool with a connection for every 16 requests in flight. A call holds its connection until Redis answers. By default, each checkout
/// sends a PING.
async fn held_pool(server: &RedisServer, ping: bool) -> bb8_redis::bb8::Pool<RedisConnectionManager> {
    let manager = RedisConnectionManager::new(server.url()).expect("the URL is well-formed");
    let builder = bb8_redis::bb8::Pool::builder().max_size(16).min_idle(16).test_on_check_out(ping);
    builder.build(manager).await.expect("Redis accepts the connection")
}

async fn decide_held(pool: bb8_redis::bb8::Pool<RedisConnectionManager>, script: Script, turn: u64) {
    let mut connection = pool.get().await.expect("the pool has a connection");
    let key = format!("held:2:{{rate_limit:bench:{}}}:counts", key_of(turn) % KEYS);
    let reply: Vec<u8> = script.key(key).arg(REQUEST).invoke_async(&mut *connection).await.expect("Redis decides");
    // The last update, the start of the window, and its used units.
    assert_eq!(reply.len(), 24);
}

/// Runs [`IN_FLIGHT`] concurrent calls for a [`ROUND`]. Returns calls per second and the 99th percentile in microseconds.
async fn load<F>(call: impl Fn(u64) -> F + Clone + Send + Sync + 'static) -> (f64, f64)
where
    F: Future<Output = ()> + Send + 'static,
{
    let turns = Arc::new(AtomicU64::new(0));
    let times = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let tasks: Vec<_> = (0..IN_FLIGHT)
        .map(|_| {
            let (turns, times, call) = (Arc::clone(&turns), Arc::clone(&times), call.clone());
            tokio::spawn(async move {
                let mut own = Vec::new();
                while start.elapsed() < ROUND {
                    let begin = Instant::now();
                    call(turns.fetch_add(1, Ordering::Relaxed)).await;
                    own.push(begin.elapsed());
                }
                times.lock().expect("no task panics").extend(own);
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no call fails");
    }
    let elapsed = start.elapsed();
    let mut times = std::mem::take(&mut *times.lock().expect("no task panics"));
    let rank = times.len() * 99 / 100;
    let (_, p99, _) = times.select_nth_unstable(rank);
    let p99 = p99.as_secs_f64() * 1e6;
    (times.len() as f64 / elapsed.as_secs_f64(), p99)
}

/// The rate of `redis-benchmark` on the server with the same script and as many keys.
fn ceiling(server: &RedisServer) -> f64 {
    // redis-benchmark cannot send binary arguments, so a first line of the script sets this one.
    let request: String = REQUEST.iter().map(|byte| format!("\\{byte:03}")).collect();
    let script = format!("ARGV[1] = '{request}'\n{SCRIPT}");
    let hash: String =
        redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut server.connection()).expect("the script loads");
    let decided: Vec<u8> = redis::cmd("EVALSHA")
        .arg(&[&hash, "1", "ceiling:2:{rate_limit:bench:first}:counts", "request"])
        .query(&mut server.connection())
        .expect("the script can read the request");
    assert!(!decided.is_empty(), "the script leaves the decision to another script");
    let binary = binary();
    let sibling = Path::new(&binary).with_file_name(if binary.contains("valkey") {
        "valkey-benchmark"
    } else {
        "redis-benchmark"
    });
    let benchmark = env::var("TOLLGATE_REDIS_BENCHMARK").map_or(sibling, Into::into);
    let output = Command::new(&benchmark)
        .args([
            "-p",
            &server.port().to_string(),
            "-c",
            "50",
            "-P",
            "64",
            "-n",
            BENCHMARK_REQUESTS,
            "-r",
            &KEYS.to_string(),
            "--csv",
        ])
        .args(["EVALSHA", &hash, "1", "ceiling:2:{rate_limit:bench:__rand_int__}:counts"])
        .arg("request")
        .output()
        .unwrap_or_else(|error| {
            panic!("{} cannot be run ({error}): set TOLLGATE_REDIS_BENCHMARK", benchmark.display())
        });
    let text = String::from_utf8_lossy(&output.stdout);
    // The last line begins with the command and the requests per second, each in quotes.
    let rate = text.lines().last().and_then(|line| line.split("\",\"").nth(1)).and_then(|rate| rate.parse().ok());
    rate.unwrap_or_else(|| panic!("redis-benchmark printed no rate: {text}"))
}
