//! Repeated requests to four servers that are killed and stopped, on a Redis that is killed and restarted. Checks which operations
//! were executed twice, which client got which answer, and which records are left.

mod clients;
mod server;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;

use super::support::server::{DURABLE, RedisServer, wait_until};
use clients::{Clients, Sent};
use server::Server;
pub use server::{LEASE, WORKER, serve};

const SERVERS: usize = 4;

/// The size of a run.
pub struct Scale {
    pub operations: u64,
    /// The longest duration, even if operations are left.
    pub time: Duration,
    /// The retention of records. Longer than the run, so that no operation is executed again because its record has expired.
    pub retention: Duration,
    /// The pause between faults.
    pub pause: Duration,
    /// The minimum number of operations that have to begin.
    pub at_least: usize,
}

pub const FULL: Scale = Scale {
    operations: 10_000,
    time: Duration::from_secs(170),
    retention: Duration::from_secs(175),
    pause: Duration::from_millis(400),
    at_least: 9_500,
};
pub const SHORT: Scale = Scale {
    operations: 1_000,
    time: Duration::from_secs(4),
    retention: Duration::from_secs(6),
    pause: Duration::from_millis(250),
    at_least: 100,
};

/// The result of a run.
#[derive(Debug, Default)]
pub struct Report {
    operations: usize,
    requests: usize,
    executions: usize,
    again: usize,
    replays: usize,
    in_flight: usize,
    mismatches: usize,
    unknown: usize,
    unavailable: usize,
    hung_up: usize,
    killed: usize,
    stopped: usize,
    restarts: usize,
    complaints: Vec<String>,
}

impl Report {
    pub fn complaints(&self) -> &[String] {
        &self.complaints
    }

    fn must(&mut self, is_so: bool, complaint: impl FnOnce() -> String) {
        if !is_so && self.complaints.len() < 20 {
            self.complaints.push(complaint());
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operations, requests, executions, again, replays, in_flight, mismatches, .. } = self;
        let Self { unknown, unavailable, hung_up, killed, stopped, restarts, .. } = self;
        let verdict = if self.complaints.is_empty() { "ok" } else { "FAILED" };
        write!(
            f,
            "| {operations} | {requests} | {executions} | {again} | {replays} | {in_flight} | {mismatches} | {unknown} | {unavailable} \
             | {hung_up} | {killed} | {stopped} | {restarts} | {verdict} |"
        )
    }
}

pub const HEAD: &str = "\
| operations | requests | executions | again | replays | in flight | mismatches | unknown | unavailable | hung up | killed | stopped | Redis restarts | |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |";

/// Runs servers, clients and faults, and checks the result.
pub fn run(scale: &Scale) -> Report {
    let mut redis = RedisServer::start_with(DURABLE);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let journal = folder.path().join("journal");
    let start = |number: usize| Server::start(&redis.url(), &journal, scale.retention, number);
    let mut servers: Vec<Server> = (0..SERVERS).map(start).collect();
    let addresses = servers.iter().map(Server::address).collect();
    let url = redis.url();

    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime can be made");
    let clients = Clients::new(addresses, scale.operations);
    let until = Instant::now() + scale.time;
    let all = runtime.spawn(clients.clone().ask(until));

    let mut report = Report::default();
    let (mut held, mut asked_again) = (Vec::new(), Vec::new());
    for turn in 0_usize.. {
        sleep(scale.pause);
        if all.is_finished() || Instant::now() >= until {
            break;
        }
        let number = turn % SERVERS;
        match turn % 3 {
            0 => {
                let is_alive = servers[number].is_alive();
                report.must(is_alive, || format!("server {number} has ended before it was killed"));
                // Most handlers are too short for a kill to hit one, so the next one is held. There may be no client left that sends a
                // request.
                let dies_with = servers[number].hold(Duration::from_secs(2));
                servers[number] = Server::start(&url, &journal, scale.retention, SERVERS + turn);
                clients.moved(number, servers[number].address());
                report.killed += 1;
                if let Some((operation, body)) = dies_with {
                    held.push(operation.clone());
                    let clients = clients.clone();
                    asked_again.push(runtime.spawn(async move {
                        tokio::time::sleep(LEASE).await;
                        clients.ask_again(operation, body).await
                    }));
                }
            }
            1 => {
                // Longer than its lease, so that the outcome of its operations is unknown meanwhile.
                servers[number].pause();
                sleep(LEASE + Duration::from_millis(300));
                servers[number].resume();
                report.stopped += 1;
            }
            _ => {
                redis.kill();
                sleep(Duration::from_millis(100));
                redis.restart();
                report.restarts += 1;
            }
        }
    }
    let mut sent = runtime.block_on(all).expect("no client panics");
    for again in asked_again {
        sent.extend(runtime.block_on(again).expect("no client panics"));
    }
    let ended = Instant::now();
    // Operations that clients have abandoned complete, and their answers are stored.
    sleep(LEASE);
    judge(&mut report, &sent, &held, &fs::read_to_string(&journal).expect("there is a journal"));
    let operations = report.executions - report.again;
    report.must(operations >= scale.at_least, || format!("only {operations} operations were begun"));
    let is_all = scale.operations >= 10_000;
    let rare = [report.again, report.unknown];
    report.must(!is_all || rare.iter().all(|seen| *seen > 0), || format!("no operation was taken over: {rare:?}"));
    report.must(!held.is_empty(), || "no server was killed while a handler ran".to_owned());
    expiries(&mut report, &redis, scale, ended);
    let ended = servers.iter_mut().map(Server::is_alive).filter(|is_alive| !is_alive).count();
    report.must(ended == 0, || format!("{ended} servers have ended before they were killed"));
    drop(servers);
    report
}

/// Checks the answers and the journal. `held` are operations whose handlers died with their servers.
fn judge(report: &mut Report, sent: &[Sent], held: &[String], journal: &str) {
    let (mut begun, mut said) = (HashMap::<&str, Vec<u64>>::new(), HashMap::<&str, HashSet<&str>>::new());
    for line in journal.lines() {
        // A line is `begin operation fence` or `end operation answer`.
        let mut words = line.splitn(3, ' ');
        let (Some(verb), Some(operation), Some(rest)) = (words.next(), words.next(), words.next()) else { continue };
        if verb == "begin" {
            begun.entry(operation).or_default().push(rest.parse().expect("a fence is a number"));
        } else {
            said.entry(operation).or_default().insert(rest);
        }
    }
    report.operations = sent.iter().map(|sent| &sent.operation).collect::<HashSet<_>>().len();
    report.requests = sent.len();
    report.executions = begun.values().map(Vec::len).sum();
    for (operation, fences) in &begun {
        let times = fences.len();
        report.again += times - 1;
        report.must(times == 1 || server::is_repeatable(operation), || format!("{operation} was begun {times} times"));
        let distinct: HashSet<_> = fences.iter().collect();
        report.must(distinct.len() == times, || format!("{operation} was begun with one fence twice: {fences:?}"));
    }
    for operation in held {
        let is_told = if server::is_repeatable(operation) {
            begun.get(&**operation).is_some_and(|fences| fences.len() > 1)
        } else {
            sent.iter().any(|sent| sent.operation == *operation && sent.problem == "outcome-unknown")
        };
        report.must(is_told, || format!("no client learned that a server died during {operation}"));
    }
    let mut replayed = HashMap::<&str, &str>::new();
    for Sent { operation, body, status, problem, is_replay, text } in sent {
        match (status, &**problem) {
            (0, _) => report.hung_up += 1,
            (200, _) => {
                let is_known = said.get(&**operation).is_some_and(|said| said.contains(&**text));
                report.must(is_known, || format!("{operation} got an answer that no handler sent: {text:.80}"));
                let is_own = text.starts_with(&format!("{operation} {body} "));
                report.must(is_own, || format!("{operation} {body} got the answer of another request: {text:.80}"));
                if *is_replay {
                    report.replays += 1;
                    let first = *replayed.entry(operation).or_insert(text);
                    report
                        .must(first == text, || format!("{operation} was replayed as {first:.80}, then as {text:.80}"));
                }
            }
            (409, "in-flight") => report.in_flight += 1,
            (409, "outcome-unknown") => report.unknown += 1,
            (422, "key-reused") => report.mismatches += 1,
            (503, _) => report.unavailable += 1,
            _ => report.must(false, || format!("{operation} was answered {status} {problem}")),
        }
    }
    // An operation that is never taken over has a single answer.
    for Sent { operation, text, .. } in sent.iter().filter(|sent| sent.status == 200) {
        let is_one = server::is_repeatable(operation) || replayed.get(&**operation).is_none_or(|first| first == text);
        report.must(is_one, || format!("{operation} got the answer {text:.80}, and other requests a different one"));
    }
    let seen = [report.replays, report.in_flight, report.mismatches, report.hung_up];
    report.must(seen.iter().all(|seen| *seen > 0), || format!("some answers never occurred: {seen:?}"));
}

/// Checks that every key has an expiry, and that only the last fences of released operations outlive the retention.
fn expiries(report: &mut Report, redis: &RedisServer, scale: &Scale, ended: Instant) {
    const KEEP_FREE: Duration = Duration::from_secs(600);
    let mut connection = redis.connection();
    let keys = |connection: &mut redis::Connection, pattern: &str| -> Vec<String> {
        redis::cmd("KEYS").arg(pattern).query(connection).expect("keys are listed")
    };
    let records = |connection: &mut redis::Connection| -> Vec<(String, Vec<u8>)> {
        let keys = keys(connection, "*:record");
        if keys.is_empty() {
            return Vec::new();
        }
        let mut pipe = redis::pipe();
        for key in &keys {
            pipe.get(key);
        }
        let values: Vec<Option<Vec<u8>>> = pipe.query(connection).expect("values are read");
        keys.into_iter().zip(values).filter_map(|(key, value)| Some((key, value?))).collect()
    };
    let longest = scale.retention.max(KEEP_FREE) + LEASE;
    // This includes the counts of callers.
    for key in keys(&mut connection, "*") {
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).expect("an expiry is read");
        let is_bounded = ttl == -2 || (0..=longest.as_millis() as i64).contains(&ttl);
        report.must(is_bounded, || format!("{key} is kept for {ttl} ms"));
    }
    sleep((ended + scale.retention + 2 * LEASE).saturating_duration_since(Instant::now()));
    // The second byte is 0 unless the operation is in flight or completed.
    let mut orphans = 0;
    let is_orphan = |(_, value): &(String, Vec<u8>)| value.get(1) != Some(&0);
    wait_until("records expire", || {
        orphans = records(&mut connection).iter().filter(|record| is_orphan(record)).count();
        orphans == 0 || ended.elapsed() > scale.retention + 4 * LEASE
    });
    report.must(orphans == 0, || format!("{orphans} records outlive their retention"));
}
