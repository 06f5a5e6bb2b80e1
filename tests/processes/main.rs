//! Tests with several processes on one Redis. The program starts itself again as the workers, so it has its own `main`.
//!
//! The tests of the delay queue are larger with `--short` or `--long`, which `scripts/faults` sets.

#![allow(clippy::unwrap_used, reason = "the panic shows where a test failed")]

mod cache;
mod delay_queue;
mod fair_locks;
mod locks;
mod rate_limits;
mod segments;
#[path = "../support/mod.rs"]
mod support;

use std::env;

fn main() {
    let workers = [
        cache::is_worker,
        delay_queue::is_worker,
        fair_locks::is_worker,
        locks::is_worker,
        rate_limits::is_worker,
        segments::is_worker,
    ];
    if workers.iter().any(|is_worker| is_worker()) {
        return;
    }
    // As in other tests, arguments that are not options are parts of test names.
    let filters: Vec<String> = env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let modules =
        [rate_limits::TESTS, locks::TESTS, fair_locks::TESTS, segments::TESTS, cache::TESTS, delay_queue::TESTS];
    let mut tests = modules.concat();
    tests.retain(|(name, _)| is_chosen(name));
    for (name, test) in &tests {
        test();
        println!("test {name} ... ok");
    }
    println!("\ntest result: ok. {} passed", tests.len());
}
