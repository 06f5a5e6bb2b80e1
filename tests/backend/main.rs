//! Backends: connections, errors, faults, topologies and rights of Redis, and the shutdown of all.

#![allow(clippy::unwrap_used, reason = "a panic shows where the test failed")]

#[path = "../support/mod.rs"]
mod support;

mod connect_errors;
mod connecting;
mod errors;
mod expiry;
mod faults;
mod listening;
mod redis;
mod shutdown;
mod topologies;
mod user_rights;
