//! Tests with several processes on one Redis. The program starts itself again as the workers, so it has its own `main`.

#![allow(clippy::unwrap_used, reason = "the panic shows where a test failed")]

mod cache;
mod fair_locks;
mod locks;
mod rate_limits;
mod segments;
#[path = "../support/mod.rs"]
mod support;

use std::env;

fn main() {
    if [cache::is_worker, fair_locks::is_worker, locks::is_worker, rate_limits::is_worker, segments::is_worker]
        .iter()
        .any(|worker| worker())
    {
        return;
    }
    // As in other tests, arguments that are not options are parts of test names.
    let filters: Vec<String> = env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let all = [rate_limits::TESTS, locks::TESTS, fair_locks::TESTS, segments::TESTS, cache::TESTS].concat();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let mut passed = 0;
    for (name, test) in all.iter().filter(|(name, _)| chosen(name)) {
        test();
        println!("test {name} ... ok");
        passed += 1;
    }
    println!("\ntest result: ok. {passed} passed; {} filtered out", all.len() - passed);
}
