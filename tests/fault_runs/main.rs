//! Every fault on every deployment, under a steady load of rate-limit decisions: what fails, for how long, what is admitted in
//! excess, and what is left behind. Faults for processes that hold locks: whether two ever believe to hold one. Faults for processes that wait to be told
//! of something: how late they hear of it. And the same requests again and again, to servers that are killed and stopped, on a Redis that is too: what is done twice, and what
//! is answered to whom.
//!
//! ```sh
//! scripts/faults            # all faults, twice each, the others once; about a quarter of an hour
//! scripts/faults --short    # the most telling ones, once each; three and a half minutes
//! scripts/faults flushed    # those whose name contains the word
//! scripts/faults operations # the same requests again and again
//! scripts/faults locks      # those of locks; `fair`, `read/write`, `"semaphore of 2"` and `"both at once"` for some of them; `limits` for
//!                           # those of rate limits; all with `--short`
//! ```
//!
//! Prints tables with a line for each fault and ends with
//! `faults=... failed=... worst_recovery_ms=... over_admitted=... leaked=... overlaps=... worst_lock_recovery_ms=...`. Exits with 1 if anything
//! is not as it should be, and says what. `docs/faults.md` explains the columns. What `scripts/faults` says that became of the jobs of a delay
//! queue counts as one more fault.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
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

/// Tells whether the jobs of a delay queue, which are a program of their own, came through: `ok`, or anything else if they did not.
const JOBS: &str = "TOLLGATE_FAULTS_JOBS";

/// How often anything panicked, in whichever thread.
static PANICS: AtomicU64 = AtomicU64::new(0);

fn main() -> ExitCode {
    if let Ok(told) = env::var(operations::WORKER) {
        end_at_panics();
        operations::serve(&told);
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

    let says = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        says(info);
    }));

    let begun = Instant::now();
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
        // Once: each has hundreds of stays under a lock to judge.
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
    let took = begun.elapsed().as_secs_f64();
    println!("\n{took:.0} s, {rounds} round(s), the longest wait for a processor {} ms", wait.as_millis());
    let single = usize::from(operations.is_some()) + usize::from(jobs.is_some());
    let faults = rows.len() + lock_rows.len() + listening_rows.len() + single;
    println!(
        "faults={faults} failed={failed} worst_recovery_ms={worst} over_admitted={over} leaked={leaked} overlaps={overlaps} \
         worst_lock_recovery_ms={lock_recovery}"
    );
    ExitCode::from(u8::from(failed > 0 || faults == 0))
}

/// One run. What the harness waits for in vain fails one line of the table, and not the rest of them.
fn attempt<R>(run: impl FnOnce() -> R) -> Result<(R, Option<String>), String> {
    let before = PANICS.load(Ordering::Relaxed);
    let round = panic::catch_unwind(AssertUnwindSafe(run)).map_err(|_| "the run could not be finished".to_owned())?;
    let panics = PANICS.load(Ordering::Relaxed) - before;
    Ok((round, (panics > 0).then(|| format!("{panics} panics"))))
}
