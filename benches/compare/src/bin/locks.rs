//! Locks of Tollgate and of `rslock`, on one Redis and in one process: one lock per task, and one lock for all tasks.
//!
//! `cargo run --release --bin locks` starts its own `redis-server` (or the server in `TOLLGATE_REDIS_SERVER`). It takes about a minute
//! after the build, and ends with one line. Both libraries are used as their docs recommend: `Locks::lock` and `release`,
//! `LockManager::acquire` and `release`, with leases of 30 s on one server. All figures are medians of interleaved rounds. Ratios are ours
//! divided by theirs in the same round, so above 1 is faster.
//!
//! * `cycles64_over_rslock`, `cycles1_over_rslock`: lock and release cycles per second of 64 tasks and of one, with a lock each, on two
//!   worker threads
//! * `best_cycles64_over_rslock`: the same of 64 tasks, with one or two worker threads, whichever suits a library better
//! * `contended_over_rslock`: grants per second when 64 tasks want one lock
//! * `wait_p99_over_rslock`: the 99th percentile of the wait for that lock, theirs divided by ours
//! * `client_cpu_over_rslock`, `redis_cpu_over_rslock`: the processor time per cycle of 64 tasks with a lock each, in this process and in
//!   Redis. Ours divided by theirs, so below 1 is less work. Other load on the machine hardly affects these
//! * `ours_grants_min_over_max`, `rslock_grants_min_over_max`: the fewest grants of a task, divided by the most

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rslock::LockManager;
use server::RedisServer;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tollgate::{Locks, RedisBackend};

#[allow(dead_code, unreachable_pub, reason = "the tests use the rest of it")]
#[path = "../../../../tests/support/server.rs"]
mod server;

const TASKS: u32 = 64;
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(30);

/// A library whose locks are measured. `cycle` acquires and releases a lock, and returns how long it waited.
#[derive(Clone)]
enum Contender {
    Ours(Locks),
    Rslock(LockManager),
}

impl Contender {
    async fn cycle(&self, key: &str) -> Duration {
        let begun = Instant::now();
        match self {
            Self::Ours(locks) => {
                let lease = locks.lock(key).await.expect("the lock is granted");
                let waited = begun.elapsed();
                lease.release().await.expect("the lock is released");
                waited
            }
            Self::Rslock(manager) => {
                let guard = manager.acquire(key, TTL).await.expect("the lock is granted");
                let waited = begun.elapsed();
                guard.release().await;
                waited
            }
        }
    }
}

struct Load {
    per_s: f64,
    client_us: f64,
    redis_us: f64,
    p50_us: f64,
    p99_us: f64,
    min_over_max: f64,
}

fn main() {
    let server = RedisServer::start();
    // A lock each for 64 tasks, a lock for one task, and one lock for 64 tasks.
    let [own, alone, contended] = with_workers(2, compare(&server, [(TASKS, true), (1, true), (TASKS, false)]));
    let [own_one_worker] = with_workers(1, compare(&server, [(TASKS, true)]));
    let ratio = |rounds: &[Vec<Load>; 2], figure: fn(&Load) -> f64| {
        let [ours, theirs] = rounds;
        median(ours.iter().zip(theirs).map(|(ours, theirs)| figure(ours) / figure(theirs)).collect())
    };
    let per_s = |rounds: &[Load]| median(rounds.iter().map(|load| load.per_s).collect());
    let best = |who: usize| per_s(&own[who]).max(per_s(&own_one_worker[who]));
    let fairness = |at: usize| median(contended[at].iter().map(|load| load.min_over_max).collect());
    println!(
        "cycles64_over_rslock={:.2} best_cycles64_over_rslock={:.2} cycles1_over_rslock={:.2} contended_over_rslock={:.1} \
         wait_p99_over_rslock={:.1} client_cpu_over_rslock={:.2} redis_cpu_over_rslock={:.2} ours_grants_min_over_max={:.2} \
         rslock_grants_min_over_max={:.2}",
        ratio(&own, |load| load.per_s),
        best(0) / best(1),
        ratio(&alone, |load| load.per_s),
        ratio(&contended, |load| load.per_s),
        1.0 / ratio(&contended, |load| load.p99_us),
        ratio(&own, |load| load.client_us),
        ratio(&own, |load| load.redis_us),
        fairness(0),
        fairness(1),
    );
}

fn with_workers<T>(workers: usize, work: impl Future<Output = T>) -> T {
    println!("worker threads: {workers}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build();
    runtime.expect("a runtime starts").block_on(work)
}

/// The rounds of both libraries under each load: a number of tasks, and whether each task has its own lock.
async fn compare<const LOADS: usize>(server: &RedisServer, loads: [(u32, bool); LOADS]) -> [[Vec<Load>; 2]; LOADS] {
    let backend = RedisBackend::connect(server.url()).await.expect("Redis accepts the connection");
    let locks = Locks::new(backend, "default").ttl(TTL).deadline(Duration::from_secs(10)).wait(Duration::from_secs(60));
    let contenders = [Contender::Ours(locks), Contender::Rslock(LockManager::new(vec![server.url()]))];
    let names = ["ours", "rslock"];
    let mut rounds = [const { [Vec::new(), Vec::new()] }; LOADS];
    for round in 0..=ROUNDS {
        for ((tasks, is_own), rounds) in loads.into_iter().zip(&mut rounds) {
            for turn in 0..2 {
                let at = (round + turn) % 2;
                let load = load(server, &contenders[at], names[at], tasks, is_own).await;
                // The first round warms up.
                if round > 0 {
                    rounds[at].push(load);
                }
            }
        }
    }
    for ((tasks, is_own), rounds) in loads.into_iter().zip(&rounds) {
        for (name, rounds) in names.into_iter().zip(rounds) {
            let of = |figure: fn(&Load) -> f64| median(rounds.iter().map(figure).collect());
            println!(
                "{name:<7} {tasks:>2} tasks, {}: {:.0}/s, waits p50 {:.0} us p99 {:.0} us, fewest to most grants {:.2}, \
                 processor time here {:.1} us, of Redis {:.1} us a cycle",
                if is_own { "own locks" } else { "one lock" },
                of(|load| load.per_s),
                of(|load| load.p50_us),
                of(|load| load.p99_us),
                of(|load| load.min_over_max),
                of(|load| load.client_us),
                of(|load| load.redis_us),
            );
        }
    }
    rounds
}

/// Runs lock and release cycles of all tasks for a [`ROUND`], with one lock per task or one for all.
async fn load(server: &RedisServer, contender: &Contender, name: &str, tasks: u32, is_own: bool) -> Load {
    let (client_before, redis_before) = (own_cpu_us(), redis_cpu_us(server));
    let barrier = Arc::new(Barrier::new(tasks as usize));
    let mut running = JoinSet::new();
    let begun = Instant::now();
    for task in 0..tasks {
        let (contender, barrier) = (contender.clone(), Arc::clone(&barrier));
        let key = if is_own { format!("{name}-{task}") } else { name.to_owned() };
        running.spawn(async move {
            barrier.wait().await;
            let mut waits = Vec::new();
            while begun.elapsed() < ROUND {
                waits.push(contender.cycle(&key).await);
            }
            waits
        });
    }
    let waits = running.join_all().await;
    let elapsed = begun.elapsed().as_secs_f64();
    let (client_us, redis_us) = (own_cpu_us() - client_before, redis_cpu_us(server) - redis_before);
    let (least, most) = (waits.iter().map(Vec::len).min(), waits.iter().map(Vec::len).max());
    let mut all: Vec<_> = waits.into_iter().flatten().map(|wait| wait.as_secs_f64() * 1e6).collect();
    all.sort_by(f64::total_cmp);
    Load {
        per_s: all.len() as f64 / elapsed,
        client_us: client_us / all.len() as f64,
        redis_us: redis_us / all.len() as f64,
        p50_us: all[all.len() / 2],
        p99_us: all[all.len() * 99 / 100],
        min_over_max: least.unwrap_or_default() as f64 / most.unwrap_or(1) as f64,
    }
}

/// The processor time of this process, with a resolution of 10 ms.
fn own_cpu_us() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("this is Linux");
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number of ticks");
    (ticks(11) + ticks(12)) * 1e4
}

/// The processor time of the server.
fn redis_cpu_us(server: &RedisServer) -> f64 {
    let seconds = |field| server.info(field).and_then(|seconds| seconds.parse::<f64>().ok()).unwrap_or_default();
    (seconds("used_cpu_user") + seconds("used_cpu_sys")) * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
