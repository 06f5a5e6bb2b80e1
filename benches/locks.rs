//! What locks cost on Redis. Takes less than a minute after the build.
//!
//! `cargo bench --bench locks` starts its own server and ends with one line:
//!
//! * `cycles_per_s`: times a second that 64 tasks take a lock of their own and give it back; the median of interleaved rounds
//! * `cycle_ceiling_ratio`: these cycles to those that a client gets out of the same server that does nothing but send the two scripts of a
//!   cycle, one that takes a free lock and one that gives it back, 64 calls in a pipeline on each of 16 connections. The cycles share
//!   calls, so this can be above 1
//! * `contended_per_s`: grants a second when 64 tasks want one lock, all in one process
//! * `wait_p99_over_p50`: the 99th percentile of how long they wait for it to the median
//! * `grants_min_over_max`: the grants of the task that got fewest to those of the one that got most
//! * `commands_per_grant`: the script calls that this took
//! * `handover_rtts`: the median time from giving a lock back to its being granted to somebody who waits over other
//!   connections, as in another process, to the median of a PING, both on connections that were as long at rest
//!
//! `cargo bench --bench locks -- renewals` does something else, for a minute and a half: it holds 10,000 leases of 30 s, and ends with
//! `renewals_core=` and `renewals_redis_core=`, the processor time that this process and Redis take for it, in parts of one processor.

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
    let backend = RedisBackend::connect(server.url()).await.expect("Redis lets us in");
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

/// Lets all tasks take a lock and give it back for a [`ROUND`], each its own or all the same.
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
                lease.release().await.expect("the lock is given back");
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

/// How often the server was asked to run a script.
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
            granted.send(Instant::now()).await.expect("somebody listens");
            lease.release().await.expect("the lock is given back");
        }
    });
    let client = redis::Client::open(server.url()).expect("the URL is well-formed");
    let mut connection = client.get_multiplexed_async_connection().await.expect("Redis lets us in");
    let (mut times, mut pings) = (Vec::new(), Vec::new());
    for _ in 0..HANDOVERS {
        let lease = here.lock("handover").await.expect("the lock is granted");
        go.send(()).await.expect("somebody listens");
        // Until it is there and listens.
        tokio::time::sleep(REST).await;
        let freed = Instant::now();
        lease.release().await.expect("the lock is given back");
        times.push((grants.recv().await.expect("it is granted") - freed).as_secs_f64());
        tokio::time::sleep(REST).await;
        let begun = Instant::now();
        let _: String = redis::cmd("PING").query_async(&mut connection).await.expect("the server answers");
        pings.push(begun.elapsed().as_secs_f64());
    }
    drop(go);
    waiter.await.expect("nothing fails");
    let (handover, rtt) = (median(times), median(pings));
    println!("hand-over {:.0} us, round trip {:.0} us", handover * 1e6, rtt * 1e6);
    handover / rtt
}

/// Holds many leases, and measures what that costs.
async fn renewals(server: &RedisServer) {
    let locks = locks(server).await;
    let mut leases = Vec::new();
    for key in 0..HELD {
        leases.push(locks.lock(key).await.expect("the lock is granted"));
    }
    // All of them have been renewed once by then.
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

/// The processor time of this process in seconds, in ticks of 10 ms.
fn own_cpu() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("this is Linux");
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number of ticks");
    (ticks(11) + ticks(12)) / 100.0
}

/// Cycles a second of a client that does nothing else.
fn ceiling(server: &RedisServer) -> f64 {
    let load = |script: &str| -> Vec<u8> {
        let hash: String =
            redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut server.connection()).expect("the script loads");
        hash.into_bytes()
    };
    let key = |part: &str| format!("ceiling:2:{{lock:bench:7777777}}:{part}").into_bytes();
    // The length of a lease, 16 fences, how long they are remembered, and one holder.
    let (token, keep_ms) = (b"0123456789abcdef", 750_000_u32);
    let numbers = [30_000, 16, keep_ms, 1].map(u32::to_le_bytes).concat();
    let acquire = vec![
        b"EVALSHA".to_vec(),
        load(include_str!("../lua/lock_acquire.lua")),
        b"1".to_vec(),
        key("lease"),
        [token.as_slice(), &numbers].concat(),
    ];
    let release = vec![
        b"EVALSHA".to_vec(),
        load(include_str!("../lua/lock_release.lua")),
        b"4".to_vec(),
        key("lease"),
        key("free"),
        key("line"),
        key("places"),
        token.to_vec(),
        keep_ms.to_string().into_bytes(),
    ];
    pipeline::per_s(server.port(), &[acquire, release], "7777777")
}
