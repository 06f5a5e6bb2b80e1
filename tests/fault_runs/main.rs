//! Every fault on every deployment, under a steady load of rate-limit decisions: what fails, for how long, what is admitted in
//! excess, and what is left behind. Then the same requests again and again, to servers that are killed and stopped, on a Redis
//! that is too: what is done twice, and what is answered to whom.
//!
//! ```sh
//! scripts/faults            # all faults, twice each; about a quarter of an hour
//! scripts/faults --short    # the most telling ones, once each; two minutes
//! scripts/faults flushed    # those whose name contains the word
//! scripts/faults operations # the same requests again and again
//! ```
//!
//! Prints a table with a line for each fault, one with a line for the requests, and ends with
//! `faults=... failed=... worst_recovery_ms=... over_admitted=... leaked=...`. Exits with 1 if anything is not as it should be,
//! and says what. `docs/faults.md` explains the columns.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(unreachable_pub)]

mod catalogue;
mod deployment;
mod load;
mod operations;
mod processor;
mod run;
#[path = "../support/mod.rs"]
mod support;

use std::env;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use catalogue::{FAULTS, Fault};
use run::{Row, run};

/// How often anything panicked, in whichever thread.
static PANICS: AtomicU64 = AtomicU64::new(0);

fn main() -> ExitCode {
    if let Ok(told) = env::var(operations::WORKER) {
        operations::serve(&told);
        return ExitCode::SUCCESS;
    }
    let words: Vec<String> = env::args().skip(1).collect();
    let short = words.iter().any(|word| word == "--short");
    let names: Vec<_> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |fault: &&Fault| {
        if names.is_empty() { !short || fault.short } else { names.iter().any(|name| fault.name.contains(&**name)) }
    };
    let rounds = if short || !names.is_empty() { 1 } else { 2 };

    let says = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        says(info);
    }));

    let begun = Instant::now();
    let mut rows: Vec<Row> = Vec::new();
    let operations = (names.is_empty() || names.iter().any(|name| "operations".contains(&**name))).then(|| {
        println!("{}", operations::HEAD);
        let scale = if short { operations::SHORT } else { operations::FULL };
        let report = operations::run(&scale);
        println!("{report}\n");
        report.complaints().iter().for_each(|complaint| eprintln!("  operations: {complaint}"));
        report
    });
    if FAULTS.iter().any(|fault| is_wanted(&fault)) {
        println!("{}", Row::HEAD);
    }
    for fault in FAULTS.iter().filter(is_wanted) {
        let mut row = Row::new(fault);
        for _ in 0..rounds {
            let before = PANICS.load(Ordering::Relaxed);
            // What the harness waits for in vain fails one line of the table, and not the rest of them.
            match panic::catch_unwind(AssertUnwindSafe(|| run(fault))) {
                Ok(round) => row.add(round),
                Err(_) => row.complain("the run could not be finished".to_owned()),
            }
            let panics = PANICS.load(Ordering::Relaxed) - before;
            if panics > 0 {
                row.complain(format!("{panics} panics"));
            }
        }
        println!("{row}");
        row.complaints().iter().for_each(|complaint| eprintln!("  {}, {}: {complaint}", fault.name, fault.on.name()));
        rows.push(row);
    }

    let done_wrong = operations.as_ref().is_some_and(|report| !report.complaints().is_empty());
    let failed = rows.iter().filter(|row| !row.complaints().is_empty()).count() + usize::from(done_wrong);
    let worst = rows.iter().map(|row| row.recovery.as_millis()).max().unwrap_or_default();
    let over: u64 = rows.iter().map(|row| row.over_admitted).sum();
    let leaked: u64 = rows.iter().map(|row| row.leaked).sum();
    let wait = rows.iter().map(|row| row.longest_wait).max().unwrap_or_default();
    let took = begun.elapsed().as_secs_f64();
    println!("\n{took:.0} s, {rounds} round(s), the longest wait for a processor {} ms", wait.as_millis());
    println!("faults={} failed={failed} worst_recovery_ms={worst} over_admitted={over} leaked={leaked}", rows.len());
    ExitCode::from(u8::from(failed > 0 || (rows.is_empty() && operations.is_none())))
}
