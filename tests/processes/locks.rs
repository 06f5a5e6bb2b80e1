//! Processes share one lock on one Redis. Some of them are stopped for up to three leases, or killed.
//!
//! The program starts itself again as the workers. A worker prints each of its stays under the lock: the fence, the start, and the last
//! instant at which the lock was known to be held. It also prints whether the lease was lost before its release. No two stays may overlap,
//! and a later stay has a larger fence. Workers are stopped until several stays have lost their leases.
//!
//! The data that they change under the lock is in the same Redis, and refuses a smaller fence than it has seen. A worker that is stopped
//! between its last check of the lease and its write comes too late. Still no change is lost.

use crate::support;

use std::env;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Connection, Script};
use support::locks::GUARDED;
use support::server::RedisServer;
use support::windows::now_us;
use support::worker::{Worker, end_at_panics};
use tokio::time::sleep;
use tollgate::{Lease, Locks, RedisBackend};

const WORKERS: usize = 4;
const TTL: Duration = Duration::from_millis(500);
/// How long workers are stopped at least, and at most if too few leases are lost by then.
const DURATION: Duration = Duration::from_secs(8);
const MAX_DURATION: Duration = Duration::from_secs(120);
/// How many stays have to lose their leases.
const LOST: usize = 3;
/// How long workers may take to end afterwards.
const SETTLED: Duration = Duration::from_secs(60);
/// Marks a worker process. Contains the URL of its server.
const WORKER: &str = "TOLLGATE_TEST_LOCK_WORKER";

pub(crate) const TESTS: &[(&str, fn())] =
    &[("no_two_processes_believe_to_hold_the_same_lock", no_two_processes_believe_to_hold_the_same_lock)];

/// Runs the worker if this process is one, and returns whether it is.
pub(crate) fn is_worker() -> bool {
    let Ok(url) = env::var(WORKER) else { return false };
    end_at_panics();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work(&url));
    true
}

async fn work(url: &str) {
    let backend = RedisBackend::connect(url).await.unwrap();
    let locks = Locks::new(backend, "default").ttl(TTL).wait(Duration::from_secs(60)).deadline(Duration::from_secs(1));
    let client = redis::Client::open(url).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let guarded = Script::new(GUARDED);
    let is_over = Arc::new(AtomicBool::new(false));
    let input_ended = Arc::clone(&is_over);
    thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        input_ended.store(true, Ordering::Relaxed);
    });
    let mut turn = u64::from(std::process::id());
    while !is_over.load(Ordering::Relaxed) {
        // The worker may have been stopped while it waited.
        let Ok(lease) = locks.lock("a").await else { continue };
        let from = now_us();
        let mut until = 0;
        let mut check = |lease: &Lease| {
            let now = now_us();
            let is_held = lease.check().is_ok();
            if is_held {
                until = now;
            }
            is_held
        };
        if check(&lease) {
            let read: i64 =
                guarded.key("guarded").arg(lease.fence()).arg("").invoke_async(&mut connection).await.unwrap_or(-1);
            turn += 1;
            sleep(Duration::from_millis(turn % 5)).await;
            if check(&lease) && read >= 0 {
                let mut write = guarded.key("guarded");
                write.arg(lease.fence()).arg(read + 1);
                // A late reply changes nothing, since the data on the server is checked.
                let _ = write.invoke_async::<i64>(&mut connection).await;
            }
            check(&lease);
        }
        let mut out = std::io::stdout();
        // A worker that was stopped right after the grant never learned of it.
        if until > 0 {
            writeln!(out, "{} {from} {until} {}", lease.fence(), u64::from(lease.check().is_err())).unwrap();
            out.flush().unwrap();
        }
        drop(lease);
        // Gives other waiters a chance.
        sleep(Duration::from_millis(1)).await;
    }
    locks.shutdown().await;
}

fn no_two_processes_believe_to_hold_the_same_lock() {
    let server = RedisServer::start();
    let (sender, lines) = mpsc::channel();
    let mut workers: Vec<Worker> =
        (0..WORKERS).map(|_| Worker::start(WORKER, &server.url(), sender.clone(), read)).collect();
    drop(sender);
    let start = Instant::now();
    let mut stops = 0;
    let mut stays: Vec<[u64; 4]> = Vec::new();
    let lost = |stays: &[[u64; 4]]| stays.iter().filter(|[.., is_lost]| *is_lost == 1).count();
    thread::sleep(Duration::from_millis(500));
    while start.elapsed() < DURATION || (lost(&stays) < LOST && start.elapsed() < MAX_DURATION) {
        let mut alive = workers.iter().filter(|worker| !worker.is_killed()).cycle();
        let worker = alive.nth(stops).unwrap();
        worker.pause();
        // From half a lease to three leases.
        thread::sleep(TTL / 2 * (stops as u32 % 6 + 1));
        worker.resume();
        thread::sleep(Duration::from_millis(50));
        stops += 1;
        if stops == 4 {
            workers[0].kill();
        }
        stays.extend(lines.try_iter());
    }
    workers.iter_mut().for_each(Worker::stop);
    for worker in &mut workers {
        assert!(worker.has_ended_well(SETTLED), "a worker failed, or did not end");
    }
    stays.extend(lines.iter());
    stays.sort_unstable();
    for pair in stays.windows(2) {
        let ([fence, from, until, _], [next_fence, next_from, ..]) = (pair[0], pair[1]);
        assert!(fence < next_fence, "the fence {fence} was issued twice");
        assert!(from < next_from, "{next_fence} began {} us before {fence}", from - next_from);
        assert!(until <= next_from, "{fence} and {next_fence} overlap by {} us", until - next_from);
    }
    let mut connection = server.connection();
    let [value, writes, refused] = ["value", "writes", "refused"].map(|field| counted(&mut connection, field));
    let (all, lost) = (stays.len(), lost(&stays));
    println!("{all} stays, {lost} of them lost, {stops} stops, {writes} writes, {refused} refused by their fence");
    assert_eq!(value, writes, "a change was lost");
    assert!(all > 200 && stops > 4, "too few stays or stops");
    assert!(lost >= LOST, "too few workers were stopped for long enough under the lock");
}

/// Parses a stay that a worker printed. Returns `None` for the partial line of a killed worker.
fn read(line: String) -> Option<[u64; 4]> {
    let numbers: Vec<u64> = line.split(' ').map_while(|number| number.parse().ok()).collect();
    numbers.try_into().ok()
}

fn counted(connection: &mut Connection, field: &str) -> u64 {
    let number: Option<u64> = redis::cmd("HGET").arg("guarded").arg(field).query(connection).unwrap();
    number.unwrap_or_default()
}
