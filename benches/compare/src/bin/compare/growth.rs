//! How Tollgate's figures change as a parameter grows.

use std::env;
use std::future::ready;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tollgate::{Limiter, Policy, Quota, RedisBackend, RedisOptions};

use crate::Run;
use crate::bench::{Contender, Figures, Loaded, Processors, take_turns};
use crate::ceiling::Ceiling;
use crate::decisions::{Decider, GENEROUS, KEYS, decide, fill};
use crate::queues::{Queue, Tally};
use crate::report::{Rank, Table};
use crate::server::RedisServer;

const IN_FLIGHT: u32 = 256;

/// One of several client processes. Reports that it is ready, waits for a line, runs its load, and reports the figures.
pub async fn client(url: &str, millis: &str) {
    let decider = Decider::tollgate(url, "growth", GENEROUS).await;
    assert!(decider.admits(0).await);
    println!("ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin()).read_line(&mut line).await.expect("the parent sends a line");
    let time = Duration::from_millis(millis.parse().expect("a number of milliseconds"));
    let figures = decide(decider, IN_FLIGHT, KEYS, time).await;
    println!("{} {} {} {}", figures.per_s, figures.p50_us, figures.p99_us, figures.calls);
}

/// The sum of the rates of `count` processes, and the slowest of their times.
async fn processes(url: String, count: u32, time: Duration) -> Figures {
    let program = env::current_exe().expect("this program is a file");
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Command::new(&program)
            .args(["client", &url, &time.as_millis().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("this program runs");
        let mut lines = BufReader::new(client.stdout.take().expect("the stream is piped")).lines();
        lines.next_line().await.expect("the client reports that it is ready");
        clients.push((client, lines));
    }
    // Excludes the start and the end of the processes.
    let (begun, before) = (Instant::now(), Processors::used());
    for (client, _) in &mut clients {
        client.stdin.take().expect("the stream is piped").write_all(b"go\n").await.expect("the client reads");
    }
    let mut all = Figures::default();
    for (_, lines) in &mut clients {
        let line = lines.next_line().await.expect("the client answers").expect("the client has not failed");
        let numbers: Vec<f64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
        all.per_s += numbers[0];
        all.p50_us = all.p50_us.max(numbers[1]);
        all.p99_us = all.p99_us.max(numbers[2]);
        all.calls += numbers[3] as u64;
    }
    all.busy = Processors::used().since(before, begun.elapsed());
    for (mut client, _) in clients {
        client.wait().await.expect("the client ends");
    }
    all
}

async fn limited(url: &str, name: &str, limits: u32) -> Decider {
    let quota = |number: u32| {
        let window = Duration::from_secs(3_600 + u64::from(number));
        Quota::new(GENEROUS.into(), window).expect("an hour is a window").fixed_window()
    };
    let policy = (1..limits).fold(Policy::new(name, quota(0)), |policy, number| policy.limit(quota(number)));
    let backend = RedisBackend::connect(url).await.expect("Redis accepts the connection");
    Decider::Tollgate(Limiter::new(backend, policy).deadline(Duration::from_secs(10)))
}

/// The ceiling of the script that a single decision calls, over as many keys as the loads use.
async fn ceiling_of(server: &RedisServer, decider: &Decider) -> Ceiling {
    // Call twice, because the first call may find the script missing.
    assert!(decider.admits(7_777_777).await);
    let call = async { assert!(decider.admits(7_777_777).await) };
    Ceiling::record(server, "rate_limit_check_plain.lua", "7777777", call).await
}

async fn pooled(url: &str, connections: u32) -> Decider {
    let options = RedisOptions::from_url(url).expect("the URL is well-formed").connections(connections);
    let policy = Policy::new("pooled", Quota::per_hour(GENEROUS.into()).fixed_window());
    Decider::Tollgate(
        Limiter::new(options.connect().await.expect("Redis accepts the connection"), policy)
            .deadline(Duration::from_secs(10)),
    )
}

/// Jobs per second of a worker while `waiting` jobs wait.
async fn backlog(url: &str, waiting: u32) -> Figures {
    let mut queue = Queue::tollgate(url, &format!("backlog-{waiting}")).await;
    let jobs = (waiting as usize).min(20_000);
    // The worker never reaches the later jobs, so their numbers may repeat.
    for from in (jobs..waiting as usize).step_by(10_000) {
        queue.push_all(from..(from + 10_000).min(waiting as usize), Duration::from_secs(3_600)).await;
    }
    for from in (0..jobs).step_by(1_000) {
        queue.push_all(from..(from + 1_000).min(jobs), Duration::ZERO).await;
    }
    let tally = Tally::new(jobs);
    let begun = Instant::now();
    queue.work(Arc::clone(&tally)).await;
    let took = begun.elapsed();
    tally.assert_once();
    Figures { per_s: jobs as f64 / took.as_secs_f64(), ..Figures::default() }
}

pub async fn tables(run: &mut Run) {
    let server = RedisServer::start();
    let url = server.url();
    let time = run.time;

    let keyed = limited(&url, "keyed", 1).await;
    let ceiling = ceiling_of(&server, &keyed).await;
    let lone = |_| Some(ceiling.per_s());
    let keys = Contender::new("tollgate", |keys| Box::pin(decide(keyed.clone(), IN_FLIGHT, u64::from(keys), time)));
    let keys = keys.prepared(|keys| {
        let (server, keyed) = (&server, &keyed);
        Box::pin(async move {
            server.query::<()>("FLUSHALL");
            fill(keyed, u64::from(keys)).await;
        })
    });
    table(
        run,
        [
            "growth-keys",
            "More keys",
            "Decisions on Redis, 256 in flight, over a number of keys that all exist before. With a million keys, each \
             round reaches other keys, in another order. A call writes a key once, even if several of its decisions are \
             about that key, so few keys cost Redis less. From thousands of keys on, nearly every decision of a call has \
             its own key. The ceiling is that of single decisions over 10,000 keys, at every point. More keys cost Redis \
             more, most likely because fewer of them fit into the caches of the processor.",
            "keys",
        ],
        &[1, 100, 10_000, 1_000_000],
        keys,
        lone,
    )
    .await;
    server.query::<()>("FLUSHALL");

    let (mut policies, mut ceilings) = (Vec::new(), Vec::new());
    for limits in [1, 2, 4, 8] {
        let decider = limited(&url, &format!("limits-{limits}"), limits).await;
        ceilings.push((limits, ceiling_of(&server, &decider).await));
        policies.push((limits, decider));
    }
    let limits = Contender::new("tollgate", |limits| one_of(&policies, limits, time));
    table(
        run,
        ["growth-limits",
        "More limits in a policy",
        "Decisions on Redis, 256 in flight over 10,000 keys, by policies with a number of fixed windows. All windows of a key are one \
         value. More windows need a longer value and more arithmetic, but no more reads, writes or calls. The ceiling is that of single \
         decisions with as many limits.",
        "limits"],
        &[1, 2, 4, 8],
        limits,
        |limits| ceilings.iter().find(|(number, _)| *number == limits).map(|(_, ceiling)| ceiling.per_s()),
    )
    .await;

    let mut pools = Vec::new();
    for connections in [1, 2, 3, 4, 8, 16] {
        pools.push((connections, pooled(&url, connections).await));
    }
    let pool = Contender::new("tollgate", |connections| one_of(&pools, connections, time));
    table(
        run,
        ["growth-pool",
        "More connections",
        "Decisions on Redis, 256 in flight over 10,000 keys, through a number of connections. Redis executes one command at a time, and \
         all decisions of a process share calls, so one connection carries the whole load. The default is three, one less than the \
         number of full calls in flight. The ceiling is that of single decisions, here and with more processes.",
        "connections"],
        &[1, 2, 3, 4, 8, 16],
        pool,
        lone,
    )
    .await;

    let several = Contender::new("tollgate", |count| Box::pin(processes(url.clone(), count, time)));
    let text = "Decisions on Redis of a number of processes together, each with 256 in flight over the same 10,000 keys; the times are \
                those of the slowest process. Processes share no calls with each other, and all of them share two cores with Redis.";
    table(run, ["growth-processes", "More processes", text, "processes"], &[1, 2, 3, 4], several, lone).await;
    server.query::<()>("FLUSHALL");

    let backlogs: &[u32] = if run.is_quick { &[100, 1_000, 10_000] } else { &[100, 1_000, 10_000, 100_000, 1_000_000] };
    let waiting = Contender::new("tollgate", |waiting| Box::pin(backlog(&url, waiting))).prepared(|_| {
        server.query::<()>("FLUSHALL");
        Box::pin(ready(()))
    });
    let text = "Jobs per second of a worker, a hundred at a time, while a number of jobs wait: up to 20,000 of them due now, the others \
                in an hour. The time includes the start and the end of the worker, which weigh more with fewer due jobs. A claim takes \
                jobs from the front, however many are behind. There is no ceiling, because a job that is claimed cannot be claimed \
                again.";
    table(run, ["growth-backlog", "More waiting jobs", text, "jobs"], backlogs, waiting, |_| None).await;
}

fn one_of(deciders: &[(u32, Decider)], wanted: u32, time: Duration) -> Loaded<'static> {
    let decider = deciders.iter().find(|(number, _)| *number == wanted).map(|(_, decider)| decider.clone());
    Box::pin(decide(decider.expect("each point has one"), IN_FLIGHT, KEYS, time))
}

async fn table(
    run: &mut Run,
    [name, title, text, unit]: [&'static str; 4],
    points: &[u32],
    contender: Contender<'_>,
    ceiling: impl Fn(u32) -> Option<f64>,
) {
    let mut contenders = [contender];
    let rounds = run.rounds.min(3);
    let medians = take_turns(&mut contenders, points, rounds, ceiling).await;
    run.report.add(Table {
        name,
        title,
        text,
        unit,
        points: points.to_vec(),
        headline: *points.last().unwrap_or(&1),
        rank: Rank::Rate,
        lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
        medians,
        ..Table::default()
    });
}
