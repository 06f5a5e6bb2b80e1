//! Logs, metrics and traces.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/mod.rs"]
mod support;

mod logs;
mod metrics;
mod traces;
