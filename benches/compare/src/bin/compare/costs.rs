//! What a decision, a lock and a job cost: processor time here and in Redis, commands, bytes on the wire and in Redis, allocations.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;
use std::time::Duration;

use tokio::task::JoinSet;
use tollgate::{Locks, RedisBackend};

use crate::Run;
use crate::decisions::{Decider, GENEROUS, KEYS, decide, deciders};
use crate::queues::Queue;
use crate::server::RedisServer;

const IN_FLIGHT: u32 = 256;

/// What has been used until now.
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

/// The processor time of this process, in ticks of 10 ms.
fn own_cpu_us() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or_default();
    (ticks(11) + ticks(12)) * 1e4
}

fn memory(server: &RedisServer) -> f64 {
    server.info("used_memory").and_then(|bytes| bytes.parse().ok()).unwrap_or_default()
}

/// The memory of Redis for each of 10,000 keys that were asked about once.
async fn bytes_per_key(server: &RedisServer, decider: &Decider) -> f64 {
    let before = memory(server);
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let decider = decider.clone();
        tasks.spawn(async move {
            for key in (task..KEYS).step_by(64) {
                decider.admits(key).await;
            }
        });
    }
    tasks.join_all().await;
    (memory(server) - before) / KEYS as f64
}

pub async fn lists(run: &mut Run) {
    let server = RedisServer::start();
    let url = server.url();
    let mut text = String::from(
        "## What it costs\n\nA decision on Redis, 256 in flight over 10,000 keys: processor time of the client and of Redis, commands that Redis runs (those of scripts \
         included), bytes on the wire, and the memory of Redis for a key.\n\n\
         | | client | Redis | commands | bytes to Redis | bytes from Redis | bytes per key |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (who, decider) in deciders(&url, GENEROUS).await {
        server.query::<()>("FLUSHALL");
        let bytes_per_key = bytes_per_key(&server, &decider).await;
        let time = if run.is_quick { Duration::from_secs(1) } else { Duration::from_secs(3) };
        let before = Meter::read(&server);
        let figures = decide(decider, IN_FLIGHT, KEYS, time).await;
        let after = Meter::read(&server);
        let per = |of: fn(&Meter) -> f64| (of(&after) - of(&before)) / figures.calls as f64;
        let [client, redis] = [per(|meter| meter.client_us), per(|meter| meter.redis_us)];
        let [commands, received, sent] =
            [per(|meter| meter.commands), per(|meter| meter.received), per(|meter| meter.sent)];
        println!(
            "COST table=decisions who={who} client_us={client:.2} redis_us={redis:.2} commands={commands:.2} bytes_to_redis={received:.0} \
             bytes_from_redis={sent:.0} bytes_per_key={bytes_per_key:.0}"
        );
        let _ = writeln!(
            text,
            "| {who} | {client:.2} us | {redis:.2} us | {commands:.2} | {received:.0} | {sent:.0} | {bytes_per_key:.0} |"
        );
    }

    server.query::<()>("FLUSHALL");
    let (lock, job) = (bytes_per_lock(&server).await, bytes_per_job(&server).await);
    println!("COST table=sizes who=tollgate bytes_per_lock={lock:.0} bytes_per_job={job:.0}");
    let _ = writeln!(
        text,
        "\nA lock that is held takes {lock:.0} bytes of Redis, and a job that waits, with a payload of about four, {job:.0}."
    );

    let _ = writeln!(
        text,
        "\nAllocations on the memory path, once every key is known:\n\n| | allocations | bytes |\n| --- | ---: | ---: |"
    );
    for line in allocations() {
        println!("{line}");
        let value =
            |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)).unwrap_or_default().to_owned();
        let _ = writeln!(text, "| {} | {} | {} |", value("who="), value("allocations="), value("bytes="));
    }
    run.report.add_text(&text);
}

async fn bytes_per_lock(server: &RedisServer) -> f64 {
    const LOCKS: usize = 1_000;
    let backend = RedisBackend::connect(server.url()).await.expect("Redis lets us in");
    let locks = Locks::new(backend).deadline(Duration::from_secs(10));
    // What the first one brings with it is no part of a lock.
    let mut held = vec![locks.lock("first").await.expect("the lock is granted")];
    let before = memory(server);
    for number in 0..LOCKS {
        held.push(locks.lock(format!("lock-{number}")).await.expect("the lock is granted"));
    }
    let bytes = (memory(server) - before) / LOCKS as f64;
    for lease in held {
        lease.release().await.expect("the lock is given back");
    }
    bytes
}

async fn bytes_per_job(server: &RedisServer) -> f64 {
    const JOBS: usize = 100_000;
    let mut queue = Queue::tollgate(&server.url(), "sizes").await;
    queue.push_all(0..1, Duration::from_secs(3_600)).await;
    let before = memory(server);
    for from in (1..JOBS).step_by(1_000) {
        queue.push_all(from..from + 1_000, Duration::from_secs(3_600)).await;
    }
    (memory(server) - before) / JOBS as f64
}

/// The lines of a program whose allocator counts: it would slow everybody else down here.
fn allocations() -> Vec<String> {
    let program = env::current_exe().expect("this program is a file").with_file_name("allocations");
    let output = Command::new(&program).output();
    let output = output.unwrap_or_else(|error| panic!("{} cannot be run: {error}", program.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}
