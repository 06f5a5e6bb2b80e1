//! Delay queues: contracts, workers, clocks and Redis.

#![allow(clippy::unwrap_used, reason = "a failing test panics with its location")]

#[path = "../support/mod.rs"]
mod support;

mod clock;
mod contract;
mod redis;
mod worker;
