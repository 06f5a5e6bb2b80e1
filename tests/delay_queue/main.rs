//! Delay queues: contracts, workers, clocks and Redis.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/mod.rs"]
mod support;

mod clock;
mod contract;
mod redis;
mod worker;
