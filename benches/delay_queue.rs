//! The cost of jobs on Redis. Takes about a minute after the build.
//!
//! `cargo bench --bench delay_queue` starts its own server and ends with one line:
//!
//! * `push_per_s`: jobs per second that 256 tasks push one at a time
//! * `push_ceiling_ratio`: that rate divided by the rate of `redis-benchmark -P 64 -c 50` on the same server, with a script of two
//!   commands, INCR and PEXPIRE; the median of interleaved rounds
//! * `bulk_per_s`: jobs per second that 8 tasks push with `push_all`
//! * `claim_per_s`: jobs per second that 4 tasks claim, 100 at a time, and acknowledge with the next claim, while 1,000 to 20,000 jobs wait
//! * `process_per_s`: the same with a `DelayQueueWorker` of 100 jobs at a time, while 1,000 to 60,000 jobs wait
//! * `claim_per_s_1e6`, `process_per_s_1e6`: the same with a million jobs that are all due in the same millisecond. The worker runs while
//!   1,000,000 down to 705,000 of them wait, and the claims after it, down to 505,000
//! * `late_p50_ms`, `late_p99_ms`, `early`: how late 1,000 jobs reach a service, and how many of them are early
//! * `takeover_ms`: how long after the end of its 5 s lease the job of a killed worker starts elsewhere; the worst of 8
//! * `idle_commands_per_s`: commands per second that each of 1,000 idle workers sends
//! * `redis_us_per_job`: the script time of Redis per job of that million that the tasks claim, as Redis measures it
//! * `scripts_above_5ms`: how many scripts took longer than that meanwhile, by SLOWLOG
//! * `bytes_per_job`: Redis memory per job of a million waiting jobs, which were pushed in bulk with a payload of 24 bytes

#[path = "../tests/support/mod.rs"]
mod support;
#[path = "parts/worker.rs"]
mod worker;

use std::env;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use support::server::{RedisServer, binary};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tollgate::delay_queue::Pushed;
use tollgate::delay_queue::store::{Ack, AckKind, Claim, DelayQueueStore, Finished, QueueKey, WorkerId};
use tollgate::{DelayQueue, RedisBackend};

const PUSHERS: usize = 256;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(1_500);
const MILLION: usize = 1_000_000;
const BATCH: usize = 100;
const WORKERS: usize = 4;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    let server = RedisServer::start();
    let backend = runtime.block_on(RedisBackend::connect(server.url())).expect("Redis accepts the connection");

    let (mut pushes, mut ratios) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let ceiling = ceiling(&server);
        let per_s = runtime.block_on(push(&backend));
        println!("round {round}: ceiling {ceiling:.0}/s, {per_s:.0} pushes/s");
        // The first round warms up.
        if round > 0 {
            pushes.push(per_s);
            ratios.push(per_s / ceiling);
        }
        server.query::<()>("FLUSHALL");
    }
    let (late_p50_ms, late_p99_ms, early) = runtime.block_on(worker::lateness(queue(&backend)));
    println!("late by {late_p50_ms:.2} ms in the median, 99th percentile {late_p99_ms:.2} ms, {early} early");
    server.query::<()>("FLUSHALL");
    let takeover_ms = runtime.block_on(worker::takeover(&server));
    println!("jobs of killed workers begin up to {takeover_ms:.0} ms after their leases");
    server.query::<()>("FLUSHALL");
    let idle_commands_per_s = runtime.block_on(worker::idle_commands(&server, &backend));
    println!("{idle_commands_per_s:.3} commands a second for an idle worker");
    server.query::<()>("FLUSHALL");
    let (mut few, mut few_worked) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        runtime.block_on(fill(&backend, 20_000, SystemTime::UNIX_EPOCH));
        few.push(process(&runtime, &backend, 19_000).1);
        server.query::<()>("FLUSHALL");
        runtime.block_on(fill(&backend, 60_000, SystemTime::UNIX_EPOCH));
        few_worked.push(runtime.block_on(worker::process(queue(&backend), 59_000)));
        server.query::<()>("FLUSHALL");
    }
    let before = memory(&server);
    let begun = Instant::now();
    let due = SystemTime::now() + Duration::from_secs(25);
    runtime.block_on(fill(&backend, MILLION, due));
    let bulk_per_s = MILLION as f64 / begun.elapsed().as_secs_f64();
    let bytes_per_job = (memory(&server) - before) / MILLION as f64;
    std::thread::sleep(due.duration_since(SystemTime::now()).unwrap_or_default());
    server.query::<()>("CONFIG SET slowlog-log-slower-than 5000");
    server.query::<()>("SLOWLOG RESET");
    let (mut many, mut many_worked) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        many_worked.push(runtime.block_on(worker::process(queue(&backend), 59_000)));
    }
    // Claim all remaining jobs, each only once.
    let counts = runtime.block_on(queue(&backend).counts()).expect("the server answers");
    assert_eq!(counts.running, 0, "a stopped worker leaves no job running");
    let all_left = counts.waiting as usize;
    let mut left = all_left;
    server.query::<()>("CONFIG RESETSTAT");
    while left > 0 {
        let (done, per_s) = process(&runtime, &backend, left.min(40_000));
        many.push(per_s);
        left = left.checked_sub(done).expect("no job is done twice");
    }
    let redis_us_per_job = script_us(&server) / all_left as f64;
    let scripts_above_5ms: u64 = server.query("SLOWLOG LEN");
    // Use the first rounds, while most jobs wait.
    let many = many.into_iter().take(ROUNDS).collect();
    println!(
        "push_per_s={:.0} push_ceiling_ratio={:.2} bulk_per_s={bulk_per_s:.0} claim_per_s={:.0} claim_per_s_1e6={:.0} \
         process_per_s={:.0} process_per_s_1e6={:.0} redis_us_per_job={redis_us_per_job:.2} \
         scripts_above_5ms={scripts_above_5ms} bytes_per_job={bytes_per_job:.0} late_p50_ms={late_p50_ms:.2} \
         late_p99_ms={late_p99_ms:.2} early={early} idle_commands_per_s={idle_commands_per_s:.3} takeover_ms={takeover_ms:.0}",
        median(pushes),
        median(ratios),
        median(few),
        median(many),
        median(few_worked),
        median(many_worked)
    );
}

fn queue(backend: &RedisBackend) -> DelayQueue<String> {
    DelayQueue::new(backend.clone(), "bench").deadline(Duration::from_secs(10)).max_jobs(10_000_000)
}

fn payload(number: usize) -> String {
    format!("payload-of-{number:011}")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn memory(server: &RedisServer) -> f64 {
    server.info("used_memory").and_then(|bytes| bytes.parse().ok()).expect("the server reports its memory")
}

/// Pushes from all tasks for a [`ROUND`], each task one job at a time.
async fn push(backend: &RedisBackend) -> f64 {
    let queue = queue(backend);
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..PUSHERS {
        let queue = queue.clone();
        tasks.spawn(async move {
            let mut pushed = 0;
            while begun.elapsed() < ROUND {
                let push = queue.push(payload(task)).delay(Duration::from_secs(60));
                assert!(push.await.expect("the job is stored").is_new());
                pushed += 1;
            }
            pushed
        });
    }
    let pushed: usize = tasks.join_all().await.into_iter().sum();
    pushed as f64 / begun.elapsed().as_secs_f64()
}

async fn fill(backend: &RedisBackend, jobs: usize, due: SystemTime) {
    const TASKS: usize = 8;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let queue = queue(backend);
        tasks.spawn(async move {
            let mut left = jobs / TASKS;
            while left > 0 {
                let count = left.min(1_024);
                let batch = queue.push_all((0..count).map(|i| queue.push(payload(task + i)).at(due))).await;
                let other = batch.iter().find(|pushed| !pushed.as_ref().is_ok_and(Pushed::is_new));
                assert!(other.is_none(), "{other:?}");
                left -= count;
            }
        });
    }
    tasks.join_all().await;
}

/// Claims and acknowledges jobs until at least `jobs` are done. Returns how many are done, and the rate per second.
fn process(runtime: &Runtime, backend: &RedisBackend, jobs: usize) -> (usize, f64) {
    let (done, key) = (Arc::new(AtomicUsize::new(0)), QueueKey::new("bench"));
    let begun = Instant::now();
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for _ in 0..WORKERS {
            let (backend, done) = (backend.clone(), Arc::clone(&done));
            tasks.spawn(async move {
                let worker = WorkerId::random().expect("random numbers are available");
                let mut claim = Claim::new(worker, BATCH, Duration::from_secs(30));
                let mut finishes: Vec<Ack> = Vec::new();
                loop {
                    let is_over = done.load(Ordering::Relaxed) >= jobs;
                    claim.limit = if is_over { 0 } else { BATCH };
                    let claimed = backend.claim(&key, &finishes, &claim).await.expect("the server answers");
                    assert!(claimed.finished.iter().all(|finished| *finished == Finished::Done));
                    done.fetch_add(claimed.finished.len(), Ordering::Relaxed);
                    if is_over {
                        return;
                    }
                    let finish = claimed.jobs.iter().map(|job| Ack::new(job.lease(), AckKind::Done));
                    finishes = finish.collect();
                }
            });
        }
        tasks.join_all().await;
    });
    let done = done.load(Ordering::Relaxed);
    (done, done as f64 / begun.elapsed().as_secs_f64())
}

/// How long the server has run scripts, in microseconds.
fn script_us(server: &RedisServer) -> f64 {
    let stats = server.text("INFO commandstats");
    let usec =
        |line: &str| line.strip_prefix("cmdstat_evalsha:")?.split_once("usec=")?.1.split(',').next()?.parse().ok();
    stats.lines().find_map(usec).expect("scripts were run")
}

/// The rate of `redis-benchmark` on the server with a script of two commands.
fn ceiling(server: &RedisServer) -> f64 {
    let script = "local n = redis.call('INCR', KEYS[1]) redis.call('PEXPIRE', KEYS[1], ARGV[1]) return n";
    let hash: String =
        redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut server.connection()).expect("the script loads");
    let binary = binary();
    let name = if binary.contains("valkey") { "valkey-benchmark" } else { "redis-benchmark" };
    let benchmark = env::var("TOLLGATE_REDIS_BENCHMARK").map_or(Path::new(&binary).with_file_name(name), Into::into);
    let output = Command::new(&benchmark)
        .args(["-p", &server.port().to_string(), "-c", "50", "-P", "64", "-n", "400000", "-r", "10000", "--csv"])
        .args(["EVALSHA", &hash, "1", "ceiling:__rand_int__", "60000"])
        .output()
        .unwrap_or_else(|error| {
            panic!("{} cannot be run ({error}): set TOLLGATE_REDIS_BENCHMARK", benchmark.display())
        });
    let text = String::from_utf8_lossy(&output.stdout);
    // The last line begins with the command and the requests per second, each in quotes.
    let rate = text.lines().last().and_then(|line| line.split("\",\"").nth(1)).and_then(|rate| rate.parse().ok());
    rate.unwrap_or_else(|| panic!("redis-benchmark printed no rate: {text}"))
}
