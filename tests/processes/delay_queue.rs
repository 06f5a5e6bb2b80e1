//! Workers of one queue in several processes. The tests measure the cost of a thousand idle workers, and the delivery of a very large
//! number of jobs with the same due time. They also check jobs whose workers are killed, or stopped for longer than their leases. Meanwhile
//! Redis is restarted, forgets its scripts and loses its connections.
//!
//! ```sh
//! cargo test --test processes -- delay_queue          # 4,000 jobs, 10,000 at once, about half a minute
//! cargo test --test processes -- delay_queue --short  # 4,000 jobs, 100,000 at once, under a minute; part of `scripts/faults --short`
//! cargo test --test processes -- delay_queue --long   # 100,000 jobs, a million at once, some minutes; part of `scripts/faults`
//! ```
//!
//! A worker prints a line for each job that it has run, and for each job that the store has completed. No job is lost, early or completed
//! twice, and nothing is left in Redis.

use crate::support;

use std::collections::HashMap;
use std::env;
use std::future::{Future, ready};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use redis::aio::MultiplexedConnection;
use support::server::{DURABLE, RedisServer};
use support::stores::delegate_queue;
use support::worker::{Worker, end_at_panics};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tollgate::delay_queue::store::{Ack, AckKind, Admission, Claim, Claimed, DelayQueueStore, Finished, QueueKey};
use tollgate::delay_queue::{Backoff, Counts, DelayQueue, DelayQueueWorker, Job, NewJob, Pushed};
use tollgate::{BoxError, RedisBackend, StoreError};
use tower::service_fn;

const WORKERS: usize = 4;
const LEASE: Duration = Duration::from_millis(600);
/// Marks a process as a worker. The value is the URL of its server and, for idle workers, their number.
const WORKER: &str = "TOLLGATE_TEST_QUEUE_WORKER";

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("delay_queue_idle_workers_are_cheap", delay_queue_idle_workers_are_cheap),
    ("delay_queue_delivers_due_jobs_by_short_scripts", delay_queue_delivers_due_jobs_by_short_scripts),
    ("delay_queue_completes_each_job_once", delay_queue_completes_each_job_once),
];

/// Runs the worker if this process is one, and returns whether it is.
pub(crate) fn is_worker() -> bool {
    let Ok(settings) = env::var(WORKER) else { return false };
    end_at_panics();
    match settings.split_once(' ') {
        Some((url, workers)) => runtime().block_on(idle(url, workers.parse().unwrap())),
        None => runtime().block_on(work(&settings)),
    }
    true
}

/// How large the tests are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    Default,
    Short,
    Long,
}

impl Size {
    fn of_arguments() -> Self {
        let has = |option: &str| env::args().any(|arg| arg == option);
        if has("--long") {
            Self::Long
        } else if has("--short") {
            Self::Short
        } else {
            Self::Default
        }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

async fn connect(url: &str) -> RedisBackend {
    loop {
        // The server may be about to come back.
        if let Ok(backend) = RedisBackend::connect(url).await {
            return backend;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn queue(store: impl DelayQueueStore + Send + Sync + 'static) -> DelayQueue<u64> {
    DelayQueue::new(store, "chaos").deadline(Duration::from_secs(5)).max_attempts(u16::MAX)
}

fn say(line: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    // The parent process may be gone.
    let _ = writeln!(out, "{line}");
}

async fn work(url: &str) {
    let queue = queue(Reporter(connect(url).await));
    let service = service_fn(|job: Job<u64>| async move {
        let early = job.due_at().duration_since(SystemTime::now()).unwrap_or_default();
        tokio::time::sleep(Duration::from_millis(*job % 20)).await;
        say(format_args!("run {} {}", *job, early.as_micros()));
        say(format_args!("fence {} {}", job.id(), job.fence()));
        Ok::<_, BoxError>(())
    });
    let worker = DelayQueueWorker::new(queue, service)
        .lease(LEASE)
        .concurrency(50)
        .backoff(Backoff::fixed(Duration::from_millis(10)));
    worker.run_until(until_stopped(ended())).await.unwrap();
}

/// Runs many workers, which print the jobs that they run.
async fn idle(url: &str, workers: usize) {
    let queue = queue(connect(url).await);
    let mut ends = JoinSet::new();
    let ended = ended();
    for _ in 0..workers {
        let service = service_fn(|job: Job<u64>| async move {
            say(format_args!("run {} 0", *job));
            Ok::<_, BoxError>(())
        });
        ends.spawn(DelayQueueWorker::new(queue.clone(), service).run_until(until_stopped(ended.clone())));
    }
    for end in ends.join_all().await {
        end.unwrap();
    }
}

/// A channel that closes when the parent process writes to the pipe or is gone.
fn ended() -> watch::Receiver<()> {
    let (end, ended) = watch::channel(());
    thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        drop(end);
    });
    ended
}

async fn until_stopped(mut ended: watch::Receiver<()>) {
    while ended.changed().await.is_ok() {}
}

/// Prints the jobs that the store has completed.
struct Reporter(RedisBackend);

impl DelayQueueStore for Reporter {
    delegate_queue!(0: push, extend, watch, get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, replay, forget, scope);

    async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
        let claimed = self.0.claim(queue, finished, claim).await?;
        for (finish, answer) in finished.iter().zip(&claimed.finished) {
            match (answer, &finish.kind) {
                (Finished::Done, AckKind::Done) => {
                    say(format_args!("done {} {}", finish.lease.id, finish.lease.token));
                }
                // Another worker has the job, or has completed it.
                (Finished::Lost | Finished::Gone, AckKind::Done) => say(format_args!("refused")),
                _ => {}
            }
        }
        Ok(claimed)
    }
}

/// A script that ran on the server.
#[derive(Clone, Copy, Debug)]
struct Script {
    is_push: bool,
    /// The jobs pushed and claimed before it.
    progress: u64,
    /// The processor time.
    ms: f64,
}

impl Script {
    fn is_long(&self) -> bool {
        self.ms >= 5.0
    }
}

#[derive(Default)]
struct Scripts {
    progress: u64,
    all: Vec<Script>,
}

/// Measures how long pushes and claims take.
struct Timed {
    inner: RedisBackend,
    // Locked for one script at a time, so that the measured time belongs to that script.
    info: tokio::sync::Mutex<MultiplexedConnection>,
    scripts: Arc<Mutex<Scripts>>,
}

impl Timed {
    /// Runs a script that pushes or claims `jobs(its result)` jobs.
    async fn time<T>(&self, is_push: bool, script: impl Future<Output = T>, jobs: impl FnOnce(&T) -> usize) -> T {
        let mut info = self.info.lock().await;
        let before = cpu_ms(&mut info).await;
        let result = script.await;
        let ms = cpu_ms(&mut info).await - before;
        let mut scripts = self.scripts.lock().unwrap();
        let progress = scripts.progress;
        scripts.all.push(Script { is_push, progress, ms });
        scripts.progress += jobs(&result) as u64;
        result
    }
}

impl DelayQueueStore for Timed {
    delegate_queue!(inner: extend, watch, get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, replay, forget, scope);

    async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
        self.time(false, self.inner.claim(queue, finished, claim), |claimed| {
            claimed.as_ref().map_or(0, |c| c.jobs.len())
        })
        .await
    }

    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        self.time(true, self.inner.push(queue, jobs, max_jobs), |_| jobs.len()).await
    }
}

/// The processor time of the thread of the server that runs scripts.
async fn cpu_ms(info: &mut MultiplexedConnection) -> f64 {
    let text: String = redis::cmd("INFO").arg("cpu").query_async(info).await.unwrap();
    let seconds = |line: &str| line.strip_prefix("used_cpu_")?.split_once("_main_thread:")?.1.parse::<f64>().ok();
    text.lines().filter_map(seconds).sum::<f64>() * 1e3
}

/// Starts a process with a busy worker, or with `idle` idle workers.
fn start(url: &str, idle: Option<usize>, lines: &mpsc::Sender<String>) -> Worker {
    let settings = idle.map_or_else(|| url.to_owned(), |workers| format!("{url} {workers}"));
    Worker::start(WORKER, &settings, lines.clone(), Some)
}

fn end_all(mut workers: Vec<Worker>) {
    workers.iter_mut().for_each(Worker::stop);
    for worker in &mut workers {
        assert!(worker.has_ended_well(Duration::from_secs(60)), "a worker failed");
    }
}

/// The number of calls of a command, by clients and by scripts.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.text("INFO commandstats");
    assert!(!stats.is_empty(), "INFO commandstats is empty");
    // A command that was never called has no line.
    let of = |line: &str| line.strip_prefix(&format!("cmdstat_{command}:calls="))?.split(',').next()?.parse().ok();
    stats.lines().find_map(of).unwrap_or_default()
}

/// A thousand idle workers call the store rarely, and a push wakes one of them.
fn delay_queue_idle_workers_are_cheap() {
    const EACH: usize = 250;
    const PUSHES: u64 = 20;
    let runtime = runtime();
    let server = RedisServer::start();
    let queue = queue(runtime.block_on(connect(&server.url())));
    let (sender, lines) = mpsc::channel();
    let workers = (0..WORKERS).map(|_| start(&server.url(), Some(EACH), &sender)).collect();
    let all = (WORKERS * EACH) as u64;
    let listening = || server.query::<Vec<String>>("PUBSUB CHANNELS").len() as u64;
    support::server::wait_until("all workers listen", || listening() == all);
    // Each worker claims once more when it listens.
    thread::sleep(Duration::from_secs(2));

    let (before, since) = (calls(&server, "evalsha"), Instant::now());
    thread::sleep(Duration::from_secs(if Size::of_arguments() == Size::Default { 4 } else { 10 }));
    let idle_per_s = (calls(&server, "evalsha") - before) as f64 / since.elapsed().as_secs_f64();

    let (before, woken, since) = (calls(&server, "evalsha"), calls(&server, "publish"), Instant::now());
    let mut slowest = Duration::ZERO;
    for job in 0..PUSHES {
        let pushed = Instant::now();
        assert!(runtime.block_on(async { queue.push(job).await }).unwrap().is_new());
        let line = lines.recv_timeout(Duration::from_secs(10)).expect("a worker is woken");
        assert_eq!(line, format!("run {job} 0"));
        slowest = slowest.max(pushed.elapsed());
    }
    let of_nothing = idle_per_s * since.elapsed().as_secs_f64();
    let in_all = calls(&server, "evalsha") - before;
    let for_jobs = in_all as f64 - of_nothing;
    let woken = calls(&server, "publish") - woken;
    end_all(workers);
    drop(sender);
    println!(
        "workers={all} idle_commands_per_s_each={:.3} commands_per_push={:.1} woken_per_push={:.1} slowest_ms={}",
        idle_per_s / all as f64,
        for_jobs / PUSHES as f64,
        woken as f64 / PUSHES as f64,
        slowest.as_millis()
    );
    assert_eq!(lines.iter().count(), 0, "a job ran twice");
    assert!(idle_per_s > 0.0 && in_all >= PUSHES && woken > 0, "nothing was measured");
    assert!(idle_per_s < all as f64 / 2.0, "{idle_per_s} commands a second");
    // A job costs the push, the claim of the woken worker, and its ack and next claim. The next timekeeper may need the same.
    assert!(for_jobs <= (6 * PUSHES) as f64, "{for_jobs} commands for {PUSHES} jobs");
    assert!(woken <= 3 * PUSHES, "{woken} workers were woken for {PUSHES} jobs");
}

/// If the host of a virtual machine takes away the processor, that time counts as work of the process, and no clock inside can tell. So a
/// script only counts as long if there is a long one at the same progress in every repetition: its own work repeats, the interference of
/// the host hardly does. In each repetition, at most one script of fifty may take that long for whatever reason.
///
/// The default size has too few scripts for that, and checks only the delivery.
fn delay_queue_delivers_due_jobs_by_short_scripts() {
    const TIMES: usize = 4;
    /// Scripts whose progress differs by less than this number of jobs are at the same progress: a claim takes 250 jobs or so.
    const NEAR: u64 = 600;
    let runtime = runtime();
    let jobs = match Size::of_arguments() {
        Size::Default => {
            deliver_at_once(&runtime, 10_000);
            return;
        }
        Size::Short => 100_000,
        Size::Long => 1_000_000,
    };
    let mut long = long_scripts(&runtime, jobs);
    for _ in 1..TIMES {
        if long.is_empty() {
            return;
        }
        let again = long_scripts(&runtime, jobs);
        long.retain(|first| again.iter().any(|script| script.progress.abs_diff(first.progress) < NEAR));
    }
    assert!(long.is_empty(), "these scripts are long in each of {TIMES} repetitions: {long:?}");
}

/// Returns the scripts that took 5 ms of processor time or more while `jobs` jobs were delivered.
fn long_scripts(runtime: &Runtime, jobs: u64) -> Vec<Script> {
    let scripts = deliver_at_once(runtime, jobs);
    let long: Vec<Script> = scripts.iter().copied().filter(Script::is_long).collect();
    assert!(long.len() * 50 <= scripts.len(), "{} of {} scripts are long", long.len(), scripts.len());
    long
}

/// Delivers `jobs` jobs with the same due time, and checks that each runs once and not early. Returns the scripts that ran.
fn deliver_at_once(runtime: &Runtime, jobs: u64) -> Vec<Script> {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let info = runtime.block_on(client.get_multiplexed_async_connection()).unwrap();
    let scripts = Arc::<Mutex<Scripts>>::default();
    let inner = runtime.block_on(connect(&server.url()));
    let queue = queue(Timed { inner, info: info.into(), scripts: Arc::clone(&scripts) });
    let due = SystemTime::now() + Duration::from_millis(jobs / 10);
    let all: Vec<_> = (0..jobs).collect();
    for batch in all.chunks(2_000) {
        let pushed = runtime.block_on(queue.push_all(batch.iter().map(|&job| queue.push(job).at(due))));
        assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)), "{pushed:?}");
    }
    let waiting = runtime.block_on(queue.counts()).unwrap();
    assert_eq!((waiting.waiting, waiting.due), (jobs, 0), "the pushes took longer than the delay of the jobs");
    // Reads all data shortly before the jobs are due. The host of a virtual machine may have to map idle memory again, which would count as
    // work of the first claims.
    thread::sleep(due.duration_since(SystemTime::now()).unwrap_or_default().saturating_sub(Duration::from_secs(3)));
    server.query::<String>("DEBUG DIGEST");
    let seen: Arc<[AtomicU32]> = (0..jobs).map(|_| AtomicU32::new(0)).collect();
    let (left, early) = (Arc::new(AtomicU64::new(jobs)), Arc::new(AtomicU64::new(0)));
    let over = Arc::new(Notify::new());
    let service = {
        let (seen, left, early, over) = (Arc::clone(&seen), Arc::clone(&left), Arc::clone(&early), Arc::clone(&over));
        service_fn(move |job: Job<u64>| {
            early.fetch_add(u64::from(SystemTime::now() < job.due_at()), Ordering::Relaxed);
            seen[*job as usize].fetch_add(1, Ordering::Relaxed);
            if left.fetch_sub(1, Ordering::Relaxed) == 1 {
                over.notify_one();
            }
            ready(Ok::<_, BoxError>(()))
        })
    };
    let worker = DelayQueueWorker::new(queue.clone(), service).concurrency(512);
    let worker = runtime.spawn(async move { worker.run_until(over.notified()).await });
    runtime.block_on(worker).unwrap().unwrap();
    let took = SystemTime::now().duration_since(due).unwrap();
    let scripts = std::mem::take(&mut scripts.lock().unwrap().all);
    let [pushes, claims] =
        [true, false].map(|is_push| scripts.iter().filter(|s| s.is_push == is_push).map(|s| s.ms).collect::<Vec<_>>());
    let [longest_push_ms, longest_claim_ms] = [&pushes, &claims].map(|ms| ms.iter().copied().fold(0.0, f64::max));
    println!(
        "jobs_at_once={jobs} per_s={:.0} early={} pushes={} claims={} mean_claim_ms={:.2} longest_push_ms={longest_push_ms:.2} \
         longest_claim_ms={longest_claim_ms:.2} long_scripts={}",
        jobs as f64 / took.as_secs_f64(),
        early.load(Ordering::Relaxed),
        pushes.len(),
        claims.len(),
        claims.iter().sum::<f64>() / claims.len() as f64,
        scripts.iter().filter(|script| script.is_long()).count(),
    );
    assert!(seen.iter().all(|runs| runs.load(Ordering::Relaxed) == 1), "each job runs once");
    assert_eq!(early.load(Ordering::Relaxed), 0);
    let counts = runtime.block_on(queue.counts()).unwrap();
    assert_eq!(counts.waiting + counts.running + counts.dead, 0, "{counts:?}");
    assert!(longest_push_ms > 0.0 && longest_claim_ms > 0.0, "nothing was measured");
    scripts
}

#[derive(Debug, Default)]
struct Faults {
    kills: u32,
    stops: u32,
    restarts: u32,
    flushes: u32,
    cuts: u32,
}

fn delay_queue_completes_each_job_once() {
    let (jobs, time) = match Size::of_arguments() {
        Size::Default | Size::Short => (4_000, Duration::from_secs(6)),
        Size::Long => (100_000, Duration::from_secs(45)),
    };
    let runtime = runtime();
    let mut server = RedisServer::start_with(DURABLE);
    let url = server.url();
    let backend = runtime.block_on(connect(&url));
    let queue = queue(backend);
    runtime.block_on(fill(&queue, jobs, time));
    let since = Instant::now();

    let (sender, lines) = mpsc::channel();
    let mut workers: Vec<Worker> = (0..WORKERS).map(|_| start(&url, None, &sender)).collect();
    let mut faults = Faults::default();
    // Not random, so that the short run has every kind of fault too.
    for turn in 0.. {
        if since.elapsed() >= time {
            break;
        }
        thread::sleep(Duration::from_millis(150));
        match turn % 8 {
            0 | 4 => {
                workers[(turn / 4) % WORKERS].kill();
                workers[(turn / 4) % WORKERS] = start(&url, None, &sender);
                faults.kills += 1;
            }
            1 | 5 => {
                // Not the worker that has just started.
                let worker = &workers[(turn / 4 + 1) % WORKERS];
                worker.pause();
                thread::sleep(LEASE * 2);
                worker.resume();
                faults.stops += 1;
            }
            2 => {
                server.flush_scripts();
                faults.flushes += 1;
            }
            3 => {
                server.kill();
                thread::sleep(Duration::from_millis(100));
                server.restart();
                faults.restarts += 1;
            }
            _ => {
                server.kill_clients();
                faults.cuts += 1;
            }
        }
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut counts = Counts::default();
    while Instant::now() < deadline {
        if let Ok(now) = runtime.block_on(queue.counts()) {
            counts = now;
            if counts.waiting + counts.running == 0 {
                break;
            }
        }
        thread::sleep(Duration::from_millis(50));
    }
    end_all(workers);
    let took = since.elapsed();
    drop(sender);

    let (mut runs, mut done) = (HashMap::<u64, u32>::new(), HashMap::<String, Vec<u64>>::new());
    let mut fences = HashMap::<String, u64>::new();
    let (mut early, mut refused) = (0_u64, 0_u64);
    for line in lines {
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some("run"), Some(job), Some(us)) => {
                *runs.entry(job.parse().unwrap()).or_default() += 1;
                early += u64::from(us != "0");
            }
            (Some("fence"), Some(id), Some(fence)) => {
                let largest = fences.entry(id.to_owned()).or_default();
                *largest = (*largest).max(fence.parse().unwrap());
            }
            (Some("done"), Some(id), Some(fence)) => {
                done.entry(id.to_owned()).or_default().push(fence.parse().unwrap());
            }
            (Some("refused"), ..) => refused += 1,
            // A worker that is killed may leave an incomplete line.
            _ => {}
        }
    }
    let lost = (0..jobs).filter(|job| !runs.contains_key(job)).count();
    let twice = done.values().filter(|by| by.len() > 1).count();
    // Completed by an attempt after which another attempt started.
    let stale = done.iter().filter(|(id, by)| by.iter().any(|fence| fences.get(*id) > Some(fence))).count();
    let keys: Vec<String> = server.query("KEYS *");
    let left = keys.iter().filter(|key| !key.ends_with(":state") && !key.ends_with(":idle")).count();
    let Faults { kills, stops, restarts, flushes, cuts } = faults;
    println!(
        "jobs={jobs} runs={} finished={} refused={refused} lost={lost} twice={twice} stale={stale} early={early} \
         dead={} keys_left={left} kills={kills} stops={stops} restarts={restarts} flushes={flushes} cuts={cuts} seconds={:.0}",
        runs.values().sum::<u32>(),
        done.len(),
        counts.dead,
        took.as_secs_f64()
    );
    assert_eq!(counts.waiting + counts.running + counts.dead, 0, "{counts:?}");
    assert_eq!((lost, twice, stale, early, left), (0, 0, 0, 0, 0), "{keys:?}");
    assert!(done.len() as u64 > jobs * 9 / 10, "few replies are lost");
    assert!(kills > 0 && stops > 0 && restarts > 0 && flushes > 0 && cuts > 0, "the run is too short for every fault");
}

/// Pushes jobs with due times throughout the test.
async fn fill(queue: &DelayQueue<u64>, jobs: u64, time: Duration) {
    let all: Vec<_> = (0..jobs).collect();
    for batch in all.chunks(2_000) {
        let pushes = batch.iter().map(|&job| queue.push(job).delay(time * 4 / 5 * (job % 1_000) as u32 / 1_000));
        for pushed in queue.push_all(pushes).await {
            assert!(pushed.unwrap().is_new());
        }
    }
}
