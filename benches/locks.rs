//! The cost of locks on Redis. Takes less than a minute after the build.
//!
//! `cargo bench --bench locks` starts its own server and ends with one line:
//!
//! * `cycles_per_s`: lock and release cycles per second of 64 tasks with a lock each; the median of interleaved rounds
//! * `cycle_ceiling_ratio`: those cycles divided by the cycles of a minimal client on the same server. That client only sends the two
//!   scripts of a cycle, which acquire a free lock and release it: 64 calls in a pipeline on each of 16 connections. Our cycles share
//!   calls, so the ratio can exceed 1
//! * `contended_per_s`: grants per second when 64 tasks of one process want one lock
//! * `wait_p99_over_p50`: the 99th percentile of their waits, divided by the median
//! * `grants_min_over_max`: the fewest grants of a task, divided by the most
//! * `commands_per_grant`: script calls per grant
//! * `handover_rtts`: the median time from a release to the grant to a waiter on other connections, as in another process, divided by the
//!   median of a PING. Both connections are idle for equally long before
//!
//! `cargo bench --bench locks -- renewals` measures renewals for a minute and a half. It holds 10,000 leases of 30 s, and ends with
//! `renewals_core=` and `renewals_redis_core=`: the processor time that this process and Redis use, as a share of one processor.

#[path = "parts/pipeline.rs"]
mod pipeline;
#[path = "../tests/support/mod.rs"]
mod support;

use std::env;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use support::server::RedisServer;
use tokio::sync::{Barrier, mpsc};
use tokio::task::JoinSet;
use tollgate::{Locks, RedisBackend};

const TASKS: u32 = 64;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(1_500);
const HANDOVERS: usize = 500;
const REST: Duration = Duration::from_millis(5);
const HELD: u32 = 10_000;
const HELD_FOR: Duration = Duration::from_secs(60);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    let server = RedisServer::start();
    if env::args().any(|word| word == "renewals") {
        runtime.block_on(renewals(&server));
        return;
    }
    let here = runtime.block_on(locks(&server));
    let there = runtime.block_on(locks(&server));

    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        let ceiling = ceiling(&server);
        let cycles = runtime.block_on(load(&here, true));
        let before = calls(&server);
        let contended = runtime.block_on(load(&here, false));
        let commands = (calls(&server) - before) as f64 / contended.grants as f64;
        let ratio = cycles.per_s / ceiling;
        println!(
            "round {round}: ceiling {ceiling:.0} cycles/s, {:.0} cycles/s, contended {:.0}/s, waits p50 {:.0} us p99 {:.0} us",
            cycles.per_s, contended.per_s, contended.p50_us, contended.p99_us
        );
        // The first round warms up.
        if round > 0 {
            let spread = contended.p99_us / contended.p50_us;
            rounds.push([cycles.per_s, ratio, contended.per_s, spread, contended.min_over_max, commands]);
        }
    }
    let handover_rtts = runtime.block_on(handover(&server, here, there));
    let [
        cycles_per_s,
        cycle_ceiling_ratio,
        contended_per_s,
        wait_p99_over_p50,
        grants_min_over_max,
        commands_per_grant,
    ] = [0, 1, 2, 3, 4, 5].map(|i| median(rounds.iter().map(|round| round[i]).collect()));
    println!(
        "cycles_per_s={cycles_per_s:.0} cycle_ceiling_ratio={cycle_ceiling_ratio:.2} contended_per_s={contended_per_s:.0} \
         wait_p99_over_p50={wait_p99_over_p50:.2} grants_min_over_max={grants_min_over_max:.3} \
         commands_per_grant={commands_per_grant:.3} handover_rtts={handover_rtts:.2}"
    );
}

async fn locks(server: &RedisServer) -> Locks {
    let backend = RedisBackend::connect(server.url()).await.expect("Redis accepts the connection");
    Locks::new(backend, "bench").deadline(Duration::from_secs(10)).wait(Duration::from_secs(60))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Load {
    grants: usize,
    per_s: f64,
    p50_us: f64,
    p99_us: f64,
    min_over_max: f64,
}

/// Runs lock and release cycles of all tasks for a [`ROUND`], with one lock per task or one for all.
async fn load(locks: &Locks, is_own: bool) -> Load {
    let barrier = Arc::new(Barrier::new(TASKS as usize));
    let mut tasks = JoinSet::new();
    let begun = Instant::now();
    for task in 0..TASKS {
        let (locks, barrier) = (locks.clone(), Arc::clone(&barrier));
        tasks.spawn(async move {
            barrier.wait().await;
            let mut waits = Vec::new();
            while begun.elapsed() < ROUND {
                let asked = Instant::now();
                let lease = locks.lock(if is_own { task } else { TASKS }).await.expect("the lock is granted");
                waits.push(asked.elapsed());
                lease.release().await.expect("the lock is released");
            }
            waits
        });
    }
    let waits = tasks.join_all().await;
    let elapsed = begun.elapsed().as_secs_f64();
    let (least, most) = (waits.iter().map(Vec::len).min(), waits.iter().map(Vec::len).max());
    let mut all: Vec<_> = waits.into_iter().flatten().map(|wait| wait.as_secs_f64() * 1e6).collect();
    all.sort_by(f64::total_cmp);
    Load {
        grants: all.len(),
        per_s: all.len() as f64 / elapsed,
        p50_us: all[all.len() / 2],
        p99_us: all[all.len() * 99 / 100],
        min_over_max: least.unwrap_or_default() as f64 / most.unwrap_or(1) as f64,
    }
}

/// How many script calls the server has received.
fn calls(server: &RedisServer) -> u64 {
    let info: String =
        redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("the server answers");
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or_default()
}

async fn handover(server: &RedisServer, here: Locks, there: Locks) -> f64 {
    let (granted, mut grants) = mpsc::channel(1);
    let (go, mut turns) = mpsc::channel::<()>(1);
    let waiter = tokio::spawn(async move {
        while turns.recv().await.is_some() {
            let lease = there.lock("handover").await.expect("the lock is granted");
            granted.send(Instant::now()).await.expect("the receiver is alive");
            lease.release().await.expect("the lock is released");
        }
    });
    let client = redis::Client::open(server.url()).expect("the URL is well-formed");
    let mut connection = client.get_multiplexed_async_connection().await.expect("Redis accepts the connection");
    let (mut times, mut pings) = (Vec::new(), Vec::new());
    for _ in 0..HANDOVERS {
        let lease = here.lock("handover").await.expect("the lock is granted");
        go.send(()).await.expect("the receiver is alive");
        // Wait until the waiter has subscribed.
        tokio::time::sleep(REST).await;
        let freed = Instant::now();
        lease.release().await.expect("the lock is released");
        times.push((grants.recv().await.expect("the lock is granted") - freed).as_secs_f64());
        tokio::time::sleep(REST).await;
        let begun = Instant::now();
        let _: String = redis::cmd("PING").query_async(&mut connection).await.expect("the server answers");
        pings.push(begun.elapsed().as_secs_f64());
    }
    drop(go);
    waiter.await.expect("the waiter does not panic");
    let (handover, rtt) = (median(times), median(pings));
    println!("hand-over {:.0} us, round trip {:.0} us", handover * 1e6, rtt * 1e6);
    handover / rtt
}

/// Holds many leases, and measures the cost.
async fn renewals(server: &RedisServer) {
    let locks = locks(server).await;
    let mut leases = Vec::new();
    for key in 0..HELD {
        leases.push(locks.lock(key).await.expect("the lock is granted"));
    }
    // By then, each lease has been renewed once.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let redis = || {
        let seconds = |field| server.info(field).and_then(|seconds| seconds.parse::<f64>().ok()).unwrap_or_default();
        seconds("used_cpu_user") + seconds("used_cpu_sys")
    };
    let (begun, own_before, redis_before, calls_before) = (Instant::now(), own_cpu(), redis(), calls(server));
    tokio::time::sleep(HELD_FOR).await;
    let (own, redis, elapsed) = (own_cpu() - own_before, redis() - redis_before, begun.elapsed().as_secs_f64());
    let calls = calls(server) - calls_before;
    assert!(leases.iter().all(|lease| lease.check().is_ok()), "a lease was lost");
    println!("{HELD} leases, {calls} calls in {elapsed:.0} s");
    println!("renewals_core={:.4} renewals_redis_core={:.4}", own / elapsed, redis / elapsed);
}

/// The processor time of this process in seconds, with a resolution of 10 ms.
fn own_cpu() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("this is Linux");
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number of ticks");
    (ticks(11) + ticks(12)) / 100.0
}

/// Cycles per second of a minimal client.
fn ceiling(server: &RedisServer) -> f64 {
    let load = |script: &str| -> Vec<u8> {
        let hash: String =
            redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut server.connection()).expect("the script loads");
        hash.into_bytes()
    };
    let key = |part: &str| format!("ceiling:2:{{lock:bench:7777777}}:{part}").into_bytes();
    // The lease time, 16 fences, how long the last fence is remembered, and one holder.
    let (token, keep_ms) = (b"0123456789abcdef", 750_000_u32);
    let numbers = [30_000, 16, keep_ms, 1].map(u32::to_le_bytes).concat();
    // An exclusive lease, whose fence has no lower bound.
    let kind_and_floor = 1_u64.to_le_bytes();
    let acquire = vec![
        b"EVALSHA".to_vec(),
        load(include_str!("../lua/lock_acquire.lua")),
        b"1".to_vec(),
        key("lease"),
        [token.as_slice(), &numbers, &kind_and_floor].concat(),
    ];
    let release = vec![
        b"EVALSHA".to_vec(),
        load(include_str!("../lua/lock_release.lua")),
        b"3".to_vec(),
        key("lease"),
        key("queue"),
        key("positions"),
        token.to_vec(),
        keep_ms.to_string().into_bytes(),
        key("free"),
    ];
    pipeline::per_s(server.port(), &[acquire, release], "7777777")
}
