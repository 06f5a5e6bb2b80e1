//! A cache in several processes on one Redis: one of them loads a value, and a process that dies or stands still is replaced.
//!
//! The program starts itself again as the workers. Each line of their input is a load: a key, a value, the number of callers, and how long
//! the origin takes. A worker prints a line when its origin is called, and one with the values of all callers and their longest wait.

use crate::support;

use std::env;
use std::io::{self, BufRead};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use support::server::RedisServer;
use support::worker::Worker;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::{BoxError, Cache, RedisBackend};

const PROCESSES: usize = 3;
const CALLERS: usize = 1_000;
const LEASE: Duration = Duration::from_secs(1);
/// Longer than any pause of a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Marks a worker. Contains the URL of its server.
const WORKER: &str = "TOLLGATE_TEST_CACHE";

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("three_processes_load_a_value_once", three_processes_load_a_value_once),
    ("killed_process_is_replaced", killed_process_is_replaced),
    ("stopped_process_stores_nothing", stopped_process_stores_nothing),
];

/// Runs the worker if this process is one, and returns whether it is.
pub(crate) fn is_worker() -> bool {
    let Ok(url) = env::var(WORKER) else { return false };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let backend = runtime.block_on(RedisBackend::connect(&url)).unwrap();
    let cache = Cache::<u32>::new(backend, "numbers", Duration::from_secs(60)).deadline(TIMEOUT).lease(LEASE);
    println!("ready");
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let mut words = line.split(' ').map(|word| word.parse().unwrap());
        let [key, value, callers, ms] = [(); 4].map(|()| words.next().unwrap());
        let cache = cache.clone();
        runtime.spawn(async move { println!("{}", load(&cache, key, value, callers, ms).await) });
    }
    true
}

async fn load(cache: &Cache<u32>, key: u32, value: u32, callers: u32, ms: u32) -> String {
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let cache = cache.clone();
        tasks.spawn(async move {
            let origin = async move || {
                println!("origin");
                sleep(Duration::from_millis(ms.into())).await;
                Ok::<_, BoxError>(value)
            };
            let loaded = cache.get_or_fill(key, origin).await;
            (loaded.unwrap_or_else(|error| panic!("{error}")).map(|value| *value), begun.elapsed())
        });
    }
    let results = tasks.join_all().await;
    let (found, slowest) = (results[0].0, results.iter().map(|(_, time)| *time).max().unwrap_or_default());
    assert!(results.iter().all(|(value, _)| *value == found), "the callers get different values");
    format!("value {} {}", found.unwrap(), slowest.as_millis())
}

/// Starts workers and waits until they are connected.
fn start(server: &RedisServer, number: usize) -> (Vec<Worker>, Receiver<String>) {
    let (sender, lines) = mpsc::channel();
    let workers = (0..number).map(|_| Worker::start(WORKER, &server.url(), sender.clone(), Some)).collect();
    for _ in 0..number {
        assert_eq!(next(&lines), "ready");
    }
    (workers, lines)
}

fn next(lines: &Receiver<String>) -> String {
    lines.recv_timeout(TIMEOUT).expect("a worker prints a line")
}

/// The value of all callers of a worker, and their longest wait.
fn result(lines: &Receiver<String>) -> (u32, u64) {
    let line = next(lines);
    let (value, ms) = line.strip_prefix("value ").unwrap_or_else(|| panic!("{line}")).split_once(' ').unwrap();
    (value.parse().unwrap(), ms.parse().unwrap())
}

fn three_processes_load_a_value_once() {
    let server = RedisServer::start();
    let (mut workers, lines) = start(&server, PROCESSES);
    let mut slowest = Vec::new();
    for key in 0..5 {
        workers.iter_mut().for_each(|worker| worker.order(&format!("{key} 7 {CALLERS} 200")));
        assert_eq!(next(&lines), "origin");
        for _ in 0..PROCESSES {
            // Another call of the origin would be another line.
            let (value, ms) = result(&lines);
            assert_eq!(value, 7);
            slowest.push(ms);
        }
    }
    println!("slowest caller of each process, ms: {slowest:?}, with 200 ms of the origin");
    server.every_key_expires();
}

fn killed_process_is_replaced() {
    let server = RedisServer::start();
    let (mut workers, lines) = start(&server, 2);
    workers[0].order("1 1 10 60000");
    assert_eq!(next(&lines), "origin");
    workers[1].order("1 2 10 0");
    workers[0].kill();
    assert_eq!(next(&lines), "origin");
    let (value, ms) = result(&lines);
    assert_eq!(value, 2);
    println!("replaced within {ms} ms, with a lease of {LEASE:?}");
}

fn stopped_process_stores_nothing() {
    let server = RedisServer::start();
    let (mut workers, lines) = start(&server, 2);
    workers[0].order("1 1 10 500");
    assert_eq!(next(&lines), "origin");
    workers[0].pause();
    thread::sleep(2 * LEASE);
    workers[1].order("1 2 10 0");
    assert_eq!(next(&lines), "origin");
    assert_eq!(result(&lines).0, 2);
    workers[0].resume();
    assert_eq!(result(&lines).0, 1, "its own callers get what it has loaded");
    workers[1].order("1 3 10 0");
    assert_eq!(result(&lines).0, 2, "the late value was stored");
}
