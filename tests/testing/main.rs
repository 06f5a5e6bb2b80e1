//! The module `testing`, and the servers and proxies that the tests start.

#![allow(clippy::unwrap_used, reason = "a failing test panics with its location")]

#[path = "../support/mod.rs"]
mod support;

mod fault_store;
mod harness;
