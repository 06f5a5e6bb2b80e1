//! Processes under one lock on one Redis, some of which are stopped in their tracks for up to three leases, or killed.
//!
//! The program starts itself again as the workers, so it has a `main` of its own and is no list of tests. A worker prints each
//! of its stays under the lock: the fence, from when, and until when it was told that the lock was its own. No two may
//! overlap, and a later one has a larger fence.
//!
//! What they change under the lock lies in the same Redis and refuses a smaller fence than it has seen: no change is lost,
//! although a worker that is stopped between its last look at the lease and its write comes too late.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::env;
use std::io::Write;
use std::sync::mpsc;
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
const DURATION: Duration = Duration::from_secs(10);
/// How long workers may take to end after that.
const SETTLED: Duration = Duration::from_secs(60);
/// Tells the program that it is a worker, and the URL of its server.
const WORKER: &str = "TOLLGATE_TEST_LOCK_WORKER";

fn main() {
    if let Ok(url) = env::var(WORKER) {
        end_at_panics();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work(&url));
        return;
    }
    println!("running 1 test");
    no_two_processes_ever_believe_to_have_the_same_lock();
    println!("test no_two_processes_ever_believe_to_have_the_same_lock ... ok");
    println!("\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
}

async fn work(url: &str) {
    let backend = RedisBackend::connect(url).await.unwrap();
    let locks = Locks::new(backend).ttl(TTL).wait(Duration::from_secs(60)).deadline(Duration::from_secs(1));
    let client = redis::Client::open(url).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let guarded = Script::new(GUARDED);
    let begun = Instant::now();
    let mut turn = u64::from(std::process::id());
    while begun.elapsed() < DURATION {
        // It may have stood still while it waited.
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
                // An answer that came too late changes nothing: what counts is what is in the server.
                let _ = write.invoke_async::<i64>(&mut connection).await;
            }
            check(&lease);
        }
        let mut out = std::io::stdout();
        // Whoever was stopped as soon as it had the lock was never told that it has it.
        if until > 0 {
            writeln!(out, "{} {from} {until}", lease.fence()).unwrap();
            out.flush().unwrap();
        }
        drop(lease);
        // Others have a chance as well.
        sleep(Duration::from_millis(1)).await;
    }
    locks.shutdown().await;
}

fn no_two_processes_ever_believe_to_have_the_same_lock() {
    let server = RedisServer::start();
    let (sender, lines) = mpsc::channel();
    let mut workers: Vec<Worker> =
        (0..WORKERS).map(|_| Worker::start(WORKER, &server.url(), sender.clone(), Some)).collect();
    let begun = Instant::now();
    let mut stops = 0;
    thread::sleep(Duration::from_millis(500));
    // Half a lease to three of them.
    while begun.elapsed() < DURATION - TTL * 4 {
        let worker = &workers[stops % WORKERS];
        worker.pause();
        thread::sleep(TTL / 2 * (stops as u32 % 6 + 1));
        worker.resume();
        thread::sleep(Duration::from_millis(50));
        stops += 1;
        if stops == 4 {
            workers[0].kill();
            workers.swap(0, 1);
        }
    }
    for worker in &mut workers {
        assert!(worker.has_ended_well(SETTLED), "a worker failed, or has not ended");
    }
    drop(sender);
    let mut stays: Vec<[u64; 3]> = lines
        .iter()
        .filter_map(|line| {
            let mut numbers = line.split(' ').map(|number| number.parse().ok());
            Some([numbers.next()??, numbers.next()??, numbers.next()??])
        })
        .collect();
    stays.sort_unstable();
    for pair in stays.windows(2) {
        let ([fence, from, until], [next_fence, next_from, _]) = (pair[0], pair[1]);
        assert!(fence < next_fence, "the fence {fence} twice");
        assert!(from < next_from, "{next_fence} came {} us before {fence}", from - next_from);
        assert!(until <= next_from, "{fence} and {next_fence} at the same time for {} us", until - next_from);
    }
    let mut connection = server.connection();
    let [value, writes, refused] = ["value", "writes", "refused"].map(|field| counted(&mut connection, field));
    println!("{} stays, {stops} stops, {writes} writes, {refused} refused by their fence", stays.len());
    assert_eq!(value, writes, "a change was lost");
    assert!(stays.len() > 200 && stops > 4, "too few to say anything");
}

fn counted(connection: &mut Connection, field: &str) -> u64 {
    let number: Option<u64> = redis::cmd("HGET").arg("guarded").arg(field).query(connection).unwrap();
    number.unwrap_or_default()
}
