//! Idempotency: contracts, the HTTP layer, operations and administration.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/mod.rs"]
mod support;

mod admin;
mod contract;
mod layer;
mod operations;
mod redis;
