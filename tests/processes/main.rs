//! Tests with several processes on one Redis. The program starts itself again as the workers, so it has its own `main`.
//!
//! Tests of the delay queue take longer. They run with `--ignored`, as in `scripts/faults`.

#![allow(clippy::unwrap_used, reason = "the panic shows where a test failed")]

mod cache;
mod delay_queue;
mod fair_locks;
mod locks;
mod rate_limits;
mod segments;
#[path = "../support/mod.rs"]
mod support;

use std::{env, mem};

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
    let (mut tests, mut ignored) = (
        [rate_limits::TESTS, locks::TESTS, fair_locks::TESTS, segments::TESTS, cache::TESTS].concat(),
        delay_queue::TESTS.to_vec(),
    );
    if env::args().any(|arg| arg == "--ignored") {
        mem::swap(&mut tests, &mut ignored);
    }
    tests.retain(|(name, _)| is_chosen(name));
    for (name, test) in &tests {
        test();
        println!("test {name} ... ok");
    }
    println!("\ntest result: ok. {} passed; {} ignored", tests.len(), ignored.len());
}
