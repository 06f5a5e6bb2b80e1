//! Tollgate and its peers against the same Redis, in turns, in one run.
//!
//! `scripts/bench` builds and runs this. It starts its own servers, and prints one line per measurement: `RESULT table=.. who=.. at=..
//! per_s=.. p50_us=.. p99_us=.. rounds=LEAST..MOST ceiling_ratio=..`, with `-` for a missing value. It ends with `first_in=.. of=..
//! tables`: in how many tables Tollgate is first among the contenders with correct answers. Tollgate is not first if its median is no
//! better than a peer's best round, which prints a line `TIED`. It is not first if its own answers are wrong, either. A line `BEHIND` names
//! the peer that is first instead.
//!
//! * `--quick`: fewer and shorter rounds
//! * `--only NAME`: one part: decisions, memory, layers, locks, queues, http, growth or costs
//! * `--write FOLDER`: writes `benchmarks.md` and the plots there

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use report::Report;

mod bench;
mod ceiling;
mod costs;
mod decisions;
mod growth;
mod http;
mod layers;
mod locks;
mod memory;
mod node;
#[path = "../../../../parts/pipeline.rs"]
mod pipeline;
mod plot;
mod queues;
mod report;
#[allow(dead_code, unreachable_pub, reason = "the tests use the rest of it")]
#[path = "../../../../../tests/support/server.rs"]
mod server;

/// The settings and the results of this run.
pub struct Run {
    pub is_quick: bool,
    /// How long one load takes.
    pub time: Duration,
    pub rounds: usize,
    pub report: Report,
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(compare());
}

async fn compare() {
    // Some tables run parts of themselves in separate processes.
    let words: Vec<String> = env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["client", url, millis] => return growth::client(url, millis).await,
        ["serve", layer, url] => return http::serve(layer, url).await,
        ["answer", layer] => return http::answer(layer).await,
        _ => {}
    }
    let (mut is_quick, mut only, mut folder) = (false, None, None);
    let mut arguments = words.into_iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => is_quick = true,
            "--only" => only = arguments.next(),
            "--write" => folder = arguments.next().map(PathBuf::from),
            other => panic!("unknown argument {other}: expected --quick, --only NAME or --write FOLDER"),
        }
    }
    let time = Duration::from_millis(if is_quick { 150 } else { 1_000 });
    let mut run = Run { is_quick, time, rounds: if is_quick { 3 } else { 5 }, report: Report::default() };
    let is_wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);

    if is_wanted("decisions") {
        decisions::tables(&mut run).await;
    }
    if is_wanted("memory") {
        memory::table(&mut run).await;
    }
    if is_wanted("layers") {
        layers::tables(&mut run).await;
    }
    if is_wanted("locks") {
        locks::tables(&mut run).await;
    }
    if is_wanted("queues") {
        queues::tables(&mut run).await;
    }
    if is_wanted("http") {
        http::table(&mut run).await;
    }
    if is_wanted("growth") {
        growth::tables(&mut run).await;
    }
    if is_wanted("costs") {
        costs::lists(&mut run).await;
        http::counts(&mut run);
    }
    if let Some(folder) = folder {
        run.report.write(&folder, &version());
    }
    run.report.print_verdict();
}

/// The name and version of the server.
fn version() -> String {
    let output = std::process::Command::new(server::binary()).arg("--version").output();
    let output = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let name = if output.to_lowercase().contains("valkey") { "Valkey" } else { "Redis" };
    let version = output.split("v=").nth(1).and_then(|rest| rest.split(' ').next());
    format!("{name} {}", version.unwrap_or("?"))
}
