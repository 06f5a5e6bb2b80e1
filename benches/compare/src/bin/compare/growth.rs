//! How Tollgate's figures change as something grows.

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

/// One of several processes that decide at the same time: says that it is ready, waits for a line, and says what came of it.
pub async fn client(url: &str, millis: &str) {
    let decider = Decider::tollgate(url, "growth", GENEROUS).await;
    assert!(decider.admits(0).await);
    println!("ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin()).read_line(&mut line).await.expect("the parent says when");
    let time = Duration::from_millis(millis.parse().expect("a number of milliseconds"));
    let figures = decide(decider, IN_FLIGHT, KEYS, time).await;
    println!("{} {} {} {}", figures.per_s, figures.p50_us, figures.p99_us, figures.calls);
}

/// The decisions of so many processes together, and the slowest of their times.
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
        let mut lines = BufReader::new(client.stdout.take().expect("it is piped")).lines();
        lines.next_line().await.expect("the client says that it is ready");
        clients.push((client, lines));
    }
    // What they do to begin and to end is no cost of a decision.
    let (begun, before) = (Instant::now(), Processors::used());
    for (client, _) in &mut clients {
        client.stdin.take().expect("it is piped").write_all(b"go\n").await.expect("the client reads");
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
        Quota::new(GENEROUS, window).expect("an hour is a window").fixed_window()
    };
    let policy = (1..limits).fold(Policy::new(name, quota(0)), |policy, number| policy.limit(quota(number)));
    let backend = RedisBackend::connect(url).await.expect("Redis lets us in");
    Decider::Tollgate(Limiter::new(backend, policy).deadline(Duration::from_secs(10)))
}

/// Of the script that Tollgate calls for a lone decision, over as many keys as the others are about.
async fn ceiling_of(server: &RedisServer, decider: &Decider) -> Ceiling {
    // Twice: the first call may find the script missing.
    assert!(decider.admits(7_777_777).await);
    let call = async { assert!(decider.admits(7_777_777).await) };
    Ceiling::record(server, "rate_limit_check_plain.lua", "7777777", call).await
}

async fn pooled(url: &str, connections: u32) -> Decider {
    let options = RedisOptions::from_url(url).expect("the URL is well-formed").connections(connections);
    let policy = Policy::new("pooled", Quota::per_hour(GENEROUS).fixed_window());
    Decider::Tollgate(
        Limiter::new(options.connect().await.expect("Redis lets us in"), policy).deadline(Duration::from_secs(10)),
    )
}

/// Jobs a second of a worker while so many more wait.
async fn backlog(url: &str, waiting: u32) -> Figures {
    let mut queue = Queue::tollgate(url, &format!("backlog-{waiting}")).await;
    let jobs = (waiting as usize).min(20_000);
    // Those behind the first are never reached, and need no number of their own.
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
        ["growth-keys",
        "More keys",
        "Decisions on Redis, 256 in flight, spread over so many keys, all of which are there before; each round asks about others of a million, in another order. A \
         call writes a key once, however many of its decisions are about that key, so few keys cost Redis less. From thousands of keys on nearly every \
         decision is about one of its own. The ceiling is that of a lone decision over 10,000 keys, whatever their number is here. More of them \
         cost Redis more, most likely since fewer of them fit the caches of the processor.",
        "keys"],
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
        "Decisions on Redis, 256 in flight over 10,000 keys, by policies of so many fixed windows. All windows of a key are one value: what is written grows, \
         and so does the arithmetic, but reading, writing and the call itself are there once. The ceiling is that of a lone decision by as many.",
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
        "Decisions on Redis, 256 in flight over 10,000 keys, through so many connections. Redis does one thing at a time, and calls are shared by all \
         decisions of a process, so one connection carries all there is. Three are the default, one less than there are full \
         calls on their way. The ceiling is that of a lone decision, here and with more processes.",
        "connections"],
        &[1, 2, 3, 4, 8, 16],
        pool,
        lone,
    )
    .await;

    let several = Contender::new("tollgate", |count| Box::pin(processes(url.clone(), count, time)));
    let text = "Decisions on Redis of so many processes together, each with 256 in flight over the same 10,000 keys; the times are those of the slowest process. \
                Processes share no calls with each other, and all of them share two cores with Redis.";
    table(run, ["growth-processes", "More processes", text, "processes"], &[1, 2, 3, 4], several, lone).await;
    server.query::<()>("FLUSHALL");

    let backlogs: &[u32] = if run.is_quick { &[100, 1_000, 10_000] } else { &[100, 1_000, 10_000, 100_000, 1_000_000] };
    let waiting = Contender::new("tollgate", |waiting| Box::pin(backlog(&url, waiting))).prepared(|_| {
        server.query::<()>("FLUSHALL");
        Box::pin(ready(()))
    });
    let text = "Jobs that a worker does a second, a hundred at a time, while so many wait: up to 20,000 of them due now, the others in an hour. With the start of the worker and its end, \
                which weigh the more the fewer jobs are due. A claim takes jobs from the front, whatever is behind. There is no ceiling: what a claim takes out cannot be claimed again.";
    table(run, ["growth-backlog", "More jobs that wait", text, "jobs"], backlogs, waiting, |_| None).await;
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
