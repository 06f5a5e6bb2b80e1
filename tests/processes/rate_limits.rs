//! Four processes of 64 tasks each send requests for one key on one Redis. Together they are granted exactly the quota.
//!
//! The program starts itself again as the workers. A worker prints the remaining units after each of its grants. Within a window, each
//! number is granted once, by any of the processes. A number that appears twice was granted in excess, and a missing number was lost.
//!
//! With leases, the workers print each charge and each admission for `support/windows.rs`. In a hundred windows or more, no window admits
//! more than its quota. The admitted share of the quota is printed.

use crate::support;

use std::collections::HashMap;
use std::env;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::server::{RedisServer, version};
use support::windows::{Event, Recorder, Windows, now_us};
use tokio::task::JoinSet;
use tollgate::rate_limit::{Limit, QuotaPrefetch};
use tollgate::{Limiter, Policy, Quota, RedisBackend};

const PROCESSES: usize = 4;
const TASKS: usize = 64;
const DURATION: Duration = Duration::from_secs(3);
/// Marks a worker process. Contains the URL of its server.
const WORKER: &str = "TOLLGATE_TEST_WORKER";
const ALGORITHM: &str = "TOLLGATE_TEST_ALGORITHM";

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("four_processes_share_every_window_exactly", four_processes_share_every_window_exactly),
    ("four_processes_share_a_sliding_log_exactly", four_processes_share_a_sliding_log_exactly),
    ("four_processes_with_leases_never_exceed_a_window", four_processes_with_leases_never_exceed_a_window),
];

/// Runs the worker if this process is one, and returns whether it is.
pub(crate) fn is_worker() -> bool {
    let Ok(url) = env::var(WORKER) else { return false };
    match env::var(ALGORITHM).expect("the algorithm of the worker is set").as_str() {
        "leases" => work_with_leases(&url),
        algorithm => work(&url, limit(algorithm)),
    }
    true
}

fn limit(algorithm: &str) -> Limit {
    match algorithm {
        // Several windows fit into the run, and each is used up long before its end.
        "fixed" => Quota::new(500, Duration::from_millis(400)).unwrap().fixed_window(),
        // More than a hundred windows fit into the run.
        "leases" => Quota::new(500, Duration::from_millis(25)).unwrap().fixed_window(),
        // One window, longer than the run.
        _ => Quota::per_minute(5_000).sliding_log().unwrap(),
    }
}

fn four_processes_share_every_window_exactly() {
    let quota = limit("fixed").quota().limit();
    // One round is enough, unless the machine is so busy that a window ends before it is used up.
    for round in 1.. {
        let server = RedisServer::start();
        let grants = hammer(&server, "fixed");
        let windows = grants[&(quota - 1)];
        let mut before = windows;
        for left in (0..quota).rev() {
            let times = grants.get(&left).copied().unwrap_or_default();
            assert!(times <= before, "a grant with {left} left occurred {times} times in {windows} windows");
            before = times;
        }
        // Denials write nothing, and several grants may share a write.
        let granted: u64 = grants.values().sum();
        let writes = calls(&server, &["set", "setrange"]);
        assert!(writes <= granted, "{writes} writes for {granted} grants");
        // Every window was used up, except perhaps the last one, which the end of the run cut short.
        if windows >= 4 && before >= windows - 1 {
            break;
        }
        assert!(round < 10, "only {before} of {windows} windows were used up");
    }
}

fn four_processes_share_a_sliding_log_exactly() {
    let server = RedisServer::start();
    let grants = hammer(&server, "log");
    let quota = limit("log").quota().limit();
    for left in 0..quota {
        assert_eq!(grants.get(&left), Some(&1), "{left} left");
    }
    assert_eq!(grants.len(), quota as usize);
    // Each grant writes the log, and the packed counts beside it. Each process also tests its permission once, for APPEND too if the server
    // cannot be queried.
    let tries = if version() < (7, 0) { 2 } else { 1 } * PROCESSES as u64;
    assert_eq!(calls(&server, &["append", "set"]), 2 * quota + tries);
}

fn four_processes_with_leases_never_exceed_a_window() {
    let server = RedisServer::start();
    let quota = limit("leases").quota();
    let mut lines = Vec::new();
    // One round is enough, unless the machine is so busy that few units are requested in a window, and some windows pass unused.
    for round in 1.. {
        lines.extend(hammer_and_listen(&server, "leases"));
        let of = |word: &str| -> u64 {
            lines.iter().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' ')?.parse::<u64>().ok()).sum()
        };
        let (drawn, handed_out, lost) = (of("drawn"), of("handed_out"), of("lost"));
        let events: Vec<Event> = lines.iter().filter_map(|line| line.parse().ok()).collect();
        let windows = Windows::of(&events, quota.limit(), quota.window());
        println!(
            "{windows:?}: {:.1} % of the quota was admitted, {drawn} units drawn, {handed_out} handed out, {lost} lost",
            windows.used(quota.limit()) * 100.0
        );
        assert_eq!((windows.over_admitted, windows.over_charged), (0, 0));
        assert!(windows.admitted <= quota.limit() * windows.opened);
        // A good part came out of leases, or this has shown nothing.
        if windows.opened >= 100 && handed_out * 5 > windows.admitted {
            break;
        }
        assert!(round < 10, "{round} rounds opened {} windows, and {handed_out} units were leased", windows.opened);
    }
}

/// How often each number was left after a grant, over all processes.
fn hammer(server: &RedisServer, algorithm: &str) -> HashMap<u64, u64> {
    let mut grants = HashMap::new();
    for line in hammer_and_listen(server, algorithm) {
        *grants.entry(line.parse().expect("a worker prints numbers")).or_default() += 1;
    }
    grants
}

/// Returns the lines that all processes print.
fn hammer_and_listen(server: &RedisServer, algorithm: &str) -> Vec<String> {
    let program = env::current_exe().expect("the path of this program is known");
    let workers: Vec<_> = (0..PROCESSES)
        .map(|_| {
            let mut command = Command::new(&program);
            command.env(WORKER, server.url()).env(ALGORITHM, algorithm).stdout(Stdio::piped());
            command.spawn().expect("a worker starts")
        })
        .collect();
    // All outputs are read at the same time, since a worker blocks if its output is not read.
    let listeners: Vec<_> =
        workers.into_iter().map(|worker| std::thread::spawn(move || worker.wait_with_output())).collect();
    let mut lines = Vec::new();
    for listener in listeners {
        let output = listener.join().expect("a listener ends").expect("a worker ends");
        assert!(output.status.success(), "a worker failed");
        let output = String::from_utf8(output.stdout).expect("a worker prints text");
        lines.extend(output.lines().map(str::to_owned));
    }
    lines
}

fn work(url: &str, limit: Limit) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let left = runtime.block_on(async {
        let backend = RedisBackend::connect(url).await.expect("the server accepts the connection");
        let limiter = Limiter::new(backend, Policy::new("processes", limit)).deadline(Duration::from_secs(20));
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut left = Vec::new();
                while start.elapsed() < DURATION {
                    let decision = limiter.check("everybody").await.expect("the server decides");
                    if decision.is_allowed() {
                        left.extend(decision.remaining());
                    }
                }
                left
            });
        }
        tasks.join_all().await.concat()
    });
    left.iter().for_each(|left| println!("{left}"));
}

fn work_with_leases(url: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (admissions, recorder, stats) = runtime.block_on(async {
        let recorder = Recorder::new(RedisBackend::connect(url).await.expect("the server accepts the connection"));
        let leases = QuotaPrefetch::new(recorder.clone());
        let policy = Policy::new("leases", limit("leases"));
        let limiter = Limiter::new(leases.clone(), policy).deadline(Duration::from_secs(20));
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut admissions = Vec::new();
                while start.elapsed() < DURATION {
                    let after = now_us();
                    let decision = limiter.check("everybody").await.expect("the server decides");
                    if let Some(receipt) = decision.receipt() {
                        admissions.push(Event::Admission { charged: receipt.as_micros(), after, before: now_us() });
                    }
                }
                admissions
            });
        }
        (tasks.join_all().await.concat(), recorder, leases.stats())
    });
    for event in recorder.take().into_iter().chain(admissions) {
        println!("{event}");
    }
    println!("drawn {}\nhanded_out {}\nlost {}", stats.drawn, stats.handed_out, stats.expired + stats.held);
}

/// Returns how often scripts called these commands.
fn calls(server: &RedisServer, commands: &[&str]) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let count = |command: &&str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |numbers| numbers.split(',').next().unwrap().parse().unwrap())
    };
    commands.iter().map(count).sum()
}
