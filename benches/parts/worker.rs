//! Measurements of a `DelayQueueWorker`: jobs per second, lateness, takeover of leases, and the commands of idle workers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tollgate::delay_queue::{DelayQueueWorker, Job};
use tollgate::{BoxError, DelayQueue, RedisBackend};
use tower::service_fn;

use super::support::server::RedisServer;

const CONCURRENCY: usize = 100;
const IDLE_WORKERS: usize = 1_000;

/// Jobs per second that a worker runs and the store records as done, `CONCURRENCY` at a time, until at least `jobs` are done.
pub(crate) async fn process(queue: DelayQueue<String>, jobs: usize) -> f64 {
    let before = queue.counts().await.expect("the server answers").waiting as usize;
    let (done, enough) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (counted, tell) = (Arc::clone(&done), Arc::clone(&enough));
    let service = service_fn(move |job: Job<String>| {
        assert!(job.starts_with("payload"));
        if counted.fetch_add(1, Ordering::Relaxed) + 1 == jobs {
            tell.notify_one();
        }
        std::future::ready(Ok::<_, BoxError>(()))
    });
    let begun = Instant::now();
    let worker = DelayQueueWorker::new(queue.clone(), service).concurrency(CONCURRENCY);
    // Spawned, as in a program: the future of `block_on` does not run on a worker thread.
    let running = tokio::spawn(async move { worker.run_until(enough.notified()).await });
    running.await.expect("the worker does not panic").expect("the worker does not fail");
    let took = begun.elapsed();
    // The worker records the last results before it ends, so the time includes all acknowledgements.
    let counts = queue.counts().await.expect("the server answers");
    assert_eq!(counts.running, 0);
    assert_eq!(before - counts.waiting as usize, done.load(Ordering::Relaxed));
    done.load(Ordering::Relaxed) as f64 / took.as_secs_f64()
}

/// The lateness of 1,000 jobs that are due within ten seconds: the median and the 99th percentile in ms, and how many are early.
pub(crate) async fn lateness(queue: DelayQueue<String>) -> (f64, f64, usize) {
    const JOBS: u64 = 1_000;
    let late = Arc::new(Mutex::new(Vec::new()));
    let (noted, enough) = (Arc::clone(&late), Arc::new(Notify::new()));
    let tell = Arc::clone(&enough);
    let service = service_fn(move |job: Job<String>| {
        let late = match SystemTime::now().duration_since(job.due_at()) {
            Ok(late) => late.as_secs_f64() * 1e3,
            Err(early) => -early.duration().as_secs_f64() * 1e3,
        };
        let mut noted = noted.lock().expect("no task panics");
        noted.push(late);
        if noted.len() == JOBS as usize {
            tell.notify_one();
        }
        std::future::ready(Ok::<_, BoxError>(()))
    });
    for job in 0..JOBS {
        // Spread without a pattern: 7,919 is prime.
        let delay = Duration::from_millis(2_000 + job * 7_919 % 10_000);
        queue.push("late".to_owned()).delay(delay).await.expect("the job is stored");
    }
    let worker = DelayQueueWorker::new(queue, service);
    let running = tokio::spawn(async move { worker.run_until(enough.notified()).await });
    running.await.expect("the worker does not panic").expect("the worker does not fail");
    let mut late = late.lock().expect("no task panics").clone();
    late.sort_by(f64::total_cmp);
    let early = late.iter().filter(|late| **late < 0.0).count();
    (late[late.len() / 2], late[late.len() * 99 / 100], early)
}

/// How many ms after the end of its lease the job of a killed worker starts on an idle peer; the worst of several. The killed worker is the
/// timekeeper, so nothing wakes the peer.
pub(crate) async fn takeover(server: &RedisServer) -> f64 {
    let races =
        (0..8).map(|number| take_over(server, format!("takeover-{number}"), Duration::from_millis(300 * number)));
    join_all(races).await.into_iter().fold(0.0, f64::max)
}

async fn take_over(server: &RedisServer, name: String, head_start: Duration) -> f64 {
    const LEASE: Duration = Duration::from_secs(5);
    let connect = async || RedisBackend::connect(server.url()).await.expect("Redis accepts the connection");
    let (doomed, backend) = (connect().await, connect().await);
    let queue = |backend: &RedisBackend| {
        DelayQueue::<String>::new(backend.clone(), name.as_str()).deadline(Duration::from_secs(10))
    };
    let (begun, has_begun) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let tell = Arc::clone(&begun);
    let service = service_fn(move |_: Job<String>| {
        tell.notify_one();
        std::future::pending::<Result<(), BoxError>>()
    });
    let victim = tokio::spawn(DelayQueueWorker::new(queue(&doomed), service).lease(LEASE).run());
    queue(&doomed).push("payload".to_owned()).await.expect("the job is stored");
    begun.notified().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (taken, tell) = (Arc::new(Mutex::new(None)), Arc::clone(&has_begun));
    let noted = Arc::clone(&taken);
    let service = service_fn(move |_: Job<String>| {
        *noted.lock().expect("no task panics") = Some(SystemTime::now());
        tell.notify_one();
        std::future::ready(Ok::<_, BoxError>(()))
    });
    let peer = tokio::spawn(DelayQueueWorker::new(queue(&backend), service).lease(LEASE).run());
    tokio::time::sleep(Duration::from_secs(2) + head_start).await;
    victim.abort();
    drop(doomed);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let ends: Vec<f64> = {
        let leases = format!("tollgate:2:{{delay_queue:{name}}}:leases");
        let mut range = redis::cmd("ZRANGE");
        let members: Vec<(Vec<u8>, f64)> = range
            .arg(leases)
            .arg(0)
            .arg(0)
            .arg("WITHSCORES")
            .query(&mut server.connection())
            .expect("the server answers");
        members.into_iter().map(|(_, end)| end).collect()
    };
    has_begun.notified().await;
    peer.abort();
    let taken = taken.lock().expect("no task panics").expect("the start is noted before the notification");
    let since = taken.duration_since(SystemTime::UNIX_EPOCH).expect("the clock is after 1970");
    since.as_secs_f64() * 1e3 - ends.first().expect("the job is leased")
}

/// How many commands per second each of 1,000 idle workers in one process sends.
pub(crate) async fn idle_commands(server: &RedisServer, backend: &RedisBackend) -> f64 {
    let queue = DelayQueue::<String>::new(backend.clone(), "idle").deadline(Duration::from_secs(10));
    let mut workers = JoinSet::new();
    let mut stops = Vec::new();
    for _ in 0..IDLE_WORKERS {
        let (stop, stopped) = oneshot::channel::<()>();
        stops.push(stop);
        let service = service_fn(|_: Job<String>| std::future::ready(Ok::<_, BoxError>(())));
        workers.spawn(DelayQueueWorker::new(queue.clone(), service).run_until(async {
            let _ = stopped.await;
        }));
    }
    // Wait until all workers have subscribed.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (before, begun) = (commands(server), Instant::now());
    tokio::time::sleep(Duration::from_secs(6)).await;
    let per_second = (commands(server) - before) as f64 / begun.elapsed().as_secs_f64();
    drop(stops);
    while let Some(worker) = workers.join_next().await {
        worker.expect("no worker panics").expect("the worker does not fail");
    }
    per_second / IDLE_WORKERS as f64
}

/// The commands that clients have sent, without those of this benchmark.
fn commands(server: &RedisServer) -> u64 {
    let stats = server.text("INFO commandstats");
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    let is_ours = |line: &&str| {
        line.starts_with("cmdstat_eval") || line.starts_with("cmdstat_subscribe") || line.starts_with("cmdstat_ping")
    };
    stats.lines().filter(is_ours).filter_map(calls).sum()
}
