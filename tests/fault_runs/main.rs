//! Runs every fault on every deployment under a steady load, and checks the results.
//!
//! * Rate limits: which calls fail, for how long, how many units exceed the quota, and which tasks and connections are left.
//! * Locks: whether two processes ever believe to hold the same lock.
//! * Notifications: how late a waiting process receives them after a fault.
//! * Idempotency: repeated requests to servers that are killed and stopped, on a Redis that is killed and restarted. Which operations run
//!   twice, and which client gets which answer.
//!
//! ```sh
//! scripts/faults            # all faults, those of the first table twice; about a quarter of an hour
//! scripts/faults --short    # a selection, once each; three and a half minutes
//! scripts/faults flushed    # faults whose name contains the word
//! scripts/faults operations # repeated requests
//! scripts/faults locks      # faults of locks; `fair`, `read/write`, `"semaphore of 2"` and `"both at once"` select some of them;
//!                           # `limits` selects faults of rate limits; all with `--short`
//! ```
//!
//! Prints tables with a line for each fault, and ends with
//! `faults=... failed=... worst_recovery_ms=... over_admitted=... leaked=... overlaps=... worst_lock_recovery_ms=...`. If a check fails,
//! prints the reason and exits with 1. `docs/faults.md` explains the columns. The result of the delay queue's jobs, which `scripts/faults`
//! passes on, counts as one more fault.

#![allow(clippy::unwrap_used, reason = "the panic shows where a test failed")]
#![allow(unreachable_pub)]

mod catalogue;
mod deployment;
mod listening;
mod load;
mod lock_catalogue;
mod lock_run;
mod lock_worker;
mod operations;
mod run;
#[path = "../support/mod.rs"]
mod support;

use std::env;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use catalogue::FAULTS;
use listening::{LISTENING_FAULTS, ListeningRow};
use lock_catalogue::LOCK_FAULTS;
use lock_run::LockRow;
use run::{Row, run};
use support::worker::end_at_panics;

/// The result of the delay queue's jobs, which are a program of their own: `ok`, or any other value if they failed.
const JOBS: &str = "TOLLGATE_FAULTS_JOBS";

/// The number of panics, in all threads.
static PANICS: AtomicU64 = AtomicU64::new(0);

fn main() -> ExitCode {
    if let Ok(config) = env::var(operations::WORKER) {
        end_at_panics();
        operations::serve(&config);
        return ExitCode::SUCCESS;
    }
    if lock_worker::work_if_asked() {
        return ExitCode::SUCCESS;
    }
    let words: Vec<String> = env::args().skip(1).collect();
    let short = words.iter().any(|word| word == "--short");
    let names: Vec<_> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |of: &[&str], name: &str, is_short: bool| {
        let is_named = |word: &&String| name.contains(&**word) || of.contains(&&***word);
        (is_short || !short) && (names.is_empty() || names.iter().any(is_named))
    };
    let rounds = if short || !names.is_empty() { 1 } else { 2 };

    let default_hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        default_hook(info);
    }));

    let start = Instant::now();
    let mut rows: Vec<Row> = Vec::new();
    println!("{}", Row::HEAD);
    for fault in FAULTS.iter().filter(|fault| is_wanted(&["limits"], fault.name, fault.short)) {
        let mut row = Row::new(fault);
        for _ in 0..rounds {
            match attempt(|| run(fault)) {
                Ok((round, panics)) => {
                    row.add(round);
                    panics.into_iter().for_each(|panics| row.complain(panics));
                }
                Err(complaint) => row.complain(complaint),
            }
        }
        println!("{row}");
        row.complaints().iter().for_each(|complaint| eprintln!("  {}, {}: {complaint}", fault.name, fault.on.name()));
        rows.push(row);
    }
    let mut lock_rows: Vec<LockRow> = Vec::new();
    println!("\n{}", LockRow::HEAD);
    for fault in LOCK_FAULTS.iter().filter(|fault| is_wanted(&["locks", fault.mode.name()], fault.name, fault.short)) {
        // Once only: each run checks hundreds of stays under a lock.
        let row = match attempt(|| lock_run::run(fault)) {
            Ok((mut row, panics)) => {
                panics.into_iter().for_each(|panics| row.complain(panics));
                row
            }
            Err(complaint) => LockRow::failed(fault, complaint),
        };
        println!("{row}");
        row.complaints().iter().for_each(|complaint| {
            eprintln!("  {}, {}, {}: {complaint}", fault.name, fault.on.name(), fault.mode.name());
        });
        lock_rows.push(row);
    }

    let mut listening_rows: Vec<ListeningRow> = Vec::new();
    println!("\n{}", ListeningRow::HEAD);
    for fault in LISTENING_FAULTS.iter().filter(|fault| is_wanted(&["listening"], fault.name, fault.short)) {
        let row = match attempt(|| listening::run(fault)) {
            Ok((mut row, panics)) => {
                panics.into_iter().for_each(|panics| row.complain(panics));
                row
            }
            Err(complaint) => ListeningRow::failed(fault, complaint),
        };
        println!("{row}");
        row.complaints().iter().for_each(|complaint| eprintln!("  {}, {}: {complaint}", fault.name, fault.on.name()));
        listening_rows.push(row);
    }

    let operations = is_wanted(&[], "operations", true).then(|| {
        let report = operations::run(if short { &operations::SHORT } else { &operations::FULL });
        println!("\n{}\n{report}", operations::HEAD);
        report.complaints().iter().for_each(|complaint| eprintln!("  operations: {complaint}"));
        report
    });

    let jobs = env::var(JOBS).ok();
    let failed = rows.iter().filter(|row| !row.complaints().is_empty()).count()
        + lock_rows.iter().filter(|row| !row.complaints().is_empty()).count()
        + listening_rows.iter().filter(|row| !row.complaints().is_empty()).count()
        + operations.iter().filter(|report| !report.complaints().is_empty()).count()
        + jobs.iter().filter(|jobs| *jobs != "ok").count();
    let worst = rows.iter().map(|row| row.recovery.as_millis()).max().unwrap_or_default();
    let over: u64 = rows.iter().map(|row| row.over_admitted).sum();
    let leaked: u64 = rows.iter().map(|row| row.leaked).chain(lock_rows.iter().map(|row| row.left)).sum();
    let overlaps: usize = lock_rows.iter().map(|row| row.unexplained).sum();
    let lock_recovery = lock_rows.iter().map(|row| row.recovery.as_millis()).max().unwrap_or_default();
    let wait = rows.iter().map(|row| row.longest_wait).max().unwrap_or_default();
    let took = start.elapsed().as_secs_f64();
    println!("\n{took:.0} s, {rounds} round(s), the longest wait for a processor {} ms", wait.as_millis());
    let single = usize::from(operations.is_some()) + usize::from(jobs.is_some());
    let faults = rows.len() + lock_rows.len() + listening_rows.len() + single;
    println!(
        "faults={faults} failed={failed} worst_recovery_ms={worst} over_admitted={over} leaked={leaked} overlaps={overlaps} \
         worst_lock_recovery_ms={lock_recovery}"
    );
    ExitCode::from(u8::from(failed > 0 || faults == 0))
}

/// Runs one fault. If the run panics, only its line of the table fails.
fn attempt<R>(run: impl FnOnce() -> R) -> Result<(R, Option<String>), String> {
    let before = PANICS.load(Ordering::Relaxed);
    let round = panic::catch_unwind(AssertUnwindSafe(run)).map_err(|_| "the run panicked".to_owned())?;
    let panics = PANICS.load(Ordering::Relaxed) - before;
    Ok((round, (panics > 0).then(|| format!("{panics} panics"))))
}
