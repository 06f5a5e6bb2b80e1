//! Logs, metrics and traces.

#![allow(clippy::unwrap_used, reason = "a panic shows where the test failed")]

#[path = "../support/mod.rs"]
mod support;

mod logs;
mod metrics;
mod traces;
