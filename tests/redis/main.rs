//! The Redis backend: connections, errors, faults, topologies and rights.

#![allow(clippy::unwrap_used, reason = "a panic shows where the test failed")]

#[path = "../support/mod.rs"]
mod support;

mod backend;
mod connect_errors;
mod connecting;
mod errors;
mod expiry;
mod faults;
mod listening;
mod topologies;
mod user_rights;
