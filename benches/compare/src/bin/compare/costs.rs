//! The costs of a decision, a lock and a job: processor time here and in Redis, commands, bytes on the wire and in Redis, and allocations.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::Run;
use crate::decisions::{Decider, GENEROUS, KEYS, decide, deciders, fill};
use crate::locks::{Locker, cycles};
use crate::queues::{BATCH, MINUTE, Queue, Tally, bulk, push};
use crate::report::grouped;
use crate::server::RedisServer;

const IN_FLIGHT: u32 = 256;
/// How many jobs a worker runs. `apalis-redis` fails with more than 8,000 at once.
const DONE: usize = 5_000;
/// How often the worker runs them, because processor time has a resolution of 10 ms.
const TIMES: usize = 30;
/// For how many jobs the memory is measured.
const JOBS: usize = 100_000;
const RULE: &str = "| --- | ---: | ---: | ---: | ---: | ---: | ---: |";

/// The resources used so far.
struct Meter {
    client_us: f64,
    redis_us: f64,
    commands: f64,
    received: f64,
    sent: f64,
}

impl Meter {
    fn read(server: &RedisServer) -> Self {
        let info = server.text("INFO");
        let of = |field: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            value.and_then(|value| value.parse::<f64>().ok()).unwrap_or_default()
        };
        Self {
            client_us: own_cpu_us(),
            redis_us: (of("used_cpu_user") + of("used_cpu_sys")) * 1e6,
            commands: of("total_commands_processed"),
            received: of("total_net_input_bytes"),
            sent: of("total_net_output_bytes"),
        }
    }
}

/// The processor time of this process, with a resolution of 10 ms.
fn own_cpu_us() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or_default();
    (ticks(11) + ticks(12)) * 1e4
}

fn memory(server: &RedisServer) -> f64 {
    server.info("used_memory").and_then(|bytes| bytes.parse().ok()).unwrap_or_default()
}

/// The memory of Redis per key, after one check of each of 10,000 keys.
async fn bytes_per_key(server: &RedisServer, decider: &Decider) -> f64 {
    emptied(server).await;
    let before = memory(server);
    fill(decider, KEYS).await;
    settled(server).await;
    (memory(server) - before) / KEYS as f64
}

/// Waits until the number of keys is stable for more than a second, because some contenders write a second late.
async fn settled(server: &RedisServer) {
    let (mut keys, mut times) = (None, 0);
    while times < 6 {
        let now = server.query::<u64>("DBSIZE");
        times = if keys == Some(now) { times + 1 } else { 0 };
        keys = Some(now);
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

async fn emptied(server: &RedisServer) {
    settled(server).await;
    server.query::<()>("FLUSHALL");
}

/// The columns of a result, written as a machine-readable line and as a table row.
struct Row {
    client_us: f64,
    redis_us: f64,
    commands: f64,
    received: f64,
    sent: f64,
}

impl Row {
    const HEAD: &str = "client | Redis | commands | bytes to Redis | bytes from Redis";

    /// The resources that `load` uses, divided by the count that it returns.
    async fn of(server: &RedisServer, load: impl Future<Output = u64>) -> Self {
        let before = Meter::read(server);
        let count = load.await as f64;
        let after = Meter::read(server);
        let per = |of: fn(&Meter) -> f64| (of(&after) - of(&before)) / count;
        Self {
            client_us: per(|meter| meter.client_us),
            redis_us: per(|meter| meter.redis_us),
            commands: per(|meter| meter.commands),
            received: per(|meter| meter.received),
            sent: per(|meter| meter.sent),
        }
    }

    /// The mean of rows with equal counts.
    fn mean(rows: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| rows.iter().map(of).sum::<f64>() / rows.len() as f64;
        Self {
            client_us: mean(|row| row.client_us),
            redis_us: mean(|row| row.redis_us),
            commands: mean(|row| row.commands),
            received: mean(|row| row.received),
            sent: mean(|row| row.sent),
        }
    }

    /// `bytes` is the Redis memory per item, if it was measured.
    fn write(&self, table: &str, who: &str, bytes: Option<f64>, text: &mut String) {
        let Self { client_us, redis_us, commands, received, sent } = self;
        let bytes = bytes.map_or("-".to_owned(), |bytes| format!("{bytes:.0}"));
        println!(
            "COST table={table} who={who} client_us={client_us:.2} redis_us={redis_us:.2} commands={commands:.2} bytes_to_redis={received:.0} \
             bytes_from_redis={sent:.0} bytes_in_redis={bytes}"
        );
        let _ = writeln!(
            text,
            "| {who} | {client_us:.2} us | {redis_us:.2} us | {commands:.2} | {received:.0} | {sent:.0} | {bytes} |"
        );
    }
}

pub async fn lists(run: &mut Run) {
    let server = RedisServer::start();
    let url = server.url();
    let time = if run.is_quick { Duration::from_secs(1) } else { Duration::from_secs(3) };
    let mut text = format!(
        "## What it costs\n\nThe cost of a decision on Redis, with 256 in flight over 10,000 keys. \
         The processor times are those of the client and of Redis. The commands include those of scripts. \
         The bytes are those on the wire, and the growth of `used_memory` of Redis per key. \
         To plan memory, use the sizing table in docs/guide/redis.md.\n\n| | {} | bytes per key \
         |\n{RULE}\n",
        Row::HEAD
    );
    // The contender that writes in the background comes last.
    let (late, mut deciders): (Vec<_>, Vec<_>) =
        deciders(&url, GENEROUS).await.into_iter().partition(|(who, _)| *who == "limitador-cached");
    deciders.extend(late);
    for (who, decider) in deciders {
        let bytes_per_key = bytes_per_key(&server, &decider).await;
        let row = Row::of(&server, async { decide(decider, IN_FLIGHT, KEYS, time).await.calls }).await;
        row.write("decisions", who, Some(bytes_per_key), &mut text);
    }
    let server = RedisServer::start();
    let url = server.url();

    let _ = writeln!(
        text,
        "\nA lock and release cycle of 64 tasks with a lock each, and the memory of Redis per held lock:\n\n| | {} | bytes per lock \
         |\n{RULE}",
        Row::HEAD
    );
    for (who, locker) in Locker::both(&url).await {
        server.query::<()>("FLUSHALL");
        let bytes = bytes_per_lock(&server, &locker).await;
        let row = Row::of(&server, async { cycles(who, locker, true, 64, time).await.calls }).await;
        row.write("locks", who, Some(bytes), &mut text);
    }

    let _ = writeln!(
        text,
        "\nA job: pushed alone by 256 tasks, pushed in bulk by 8, and run by a worker, a hundred at a time, {} in all. The memory of \
         Redis per waiting job, with a payload of a few bytes, is that of jobs pushed alone and of jobs pushed in bulk:\n\n| | {} | \
         bytes per job |\n{RULE}",
        grouped((DONE * TIMES) as f64),
        Row::HEAD
    );
    for (who, queue) in Queue::both(&url).await {
        server.query::<()>("FLUSHALL");
        // Single pushes may store jobs in another format than bulk pushes.
        let alone = bytes_per_job(&server, push_alone(queue.clone())).await;
        let together = bytes_per_job(&server, push_together(queue.clone())).await;
        let pushed = Row::of(&server, async { push(queue.clone(), 256, time).await.calls }).await;
        pushed.write("jobs", &format!("{who}-pushed"), Some(alone), &mut text);
        server.query::<()>("FLUSHALL");
        let in_bulk = Row::of(&server, async { bulk(queue.clone(), 8, time).await.calls * BATCH as u64 }).await;
        in_bulk.write("jobs", &format!("{who}-in-bulk"), Some(together), &mut text);
        let mut done = Vec::new();
        for _ in 0..TIMES {
            server.query::<()>("FLUSHALL");
            let tally = Tally::new(DONE);
            queue.clone().push_all(0..DONE, Duration::ZERO).await;
            let row = Row::of(&server, async {
                queue.work(Arc::clone(&tally)).await;
                DONE as u64
            });
            done.push(row.await);
            tally.assert_once();
        }
        Row::mean(&done).write("jobs", &format!("{who}-done"), None, &mut text);
    }

    let _ = writeln!(
        text,
        "\nAllocations on the memory path, after all keys are created:\n\n| | allocations | bytes |\n| --- | ---: | ---: |"
    );
    for line in allocations() {
        println!("{line}");
        let value =
            |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)).unwrap_or_default().to_owned();
        let _ = writeln!(text, "| {} | {} | {} |", value("who="), value("allocations="), value("bytes="));
    }
    run.report.add_text(&text);
}

async fn bytes_per_lock(server: &RedisServer, locker: &Locker) -> f64 {
    const LOCKS: usize = 1_000;
    // Excludes what Redis allocates for the first lock only.
    let mut held = vec![locker.hold("first").await];
    let before = memory(server);
    for number in 0..LOCKS {
        held.push(locker.hold(&format!("lock-{number}")).await);
    }
    let bytes = (memory(server) - before) / LOCKS as f64;
    for lock in held {
        lock.give_back().await;
    }
    bytes
}

async fn bytes_per_job(server: &RedisServer, push: impl Future<Output = ()>) -> f64 {
    let before = memory(server);
    push.await;
    let bytes = (memory(server) - before) / JOBS as f64;
    server.query::<()>("FLUSHALL");
    bytes
}

async fn push_alone(queue: Queue) {
    const TASKS: usize = 250;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let mut queue = queue.clone();
        tasks.spawn(async move {
            for number in (task..JOBS).step_by(TASKS) {
                queue.push(number.to_string()).await;
            }
        });
    }
    tasks.join_all().await;
}

async fn push_together(mut queue: Queue) {
    for from in (0..JOBS).step_by(BATCH) {
        queue.push_all(from..from + BATCH, MINUTE).await;
    }
}

/// The output of a separate program with a counting allocator, which would slow down all measurements here.
fn allocations() -> Vec<String> {
    let program = env::current_exe().expect("this program is a file").with_file_name("allocations");
    let output = Command::new(&program).output();
    let output = output.unwrap_or_else(|error| panic!("{} cannot be run: {error}", program.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}
