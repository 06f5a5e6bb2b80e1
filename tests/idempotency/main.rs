//! Idempotency: contracts, the HTTP layer, other operations, and administration.

#![allow(clippy::unwrap_used, reason = "a failing test panics with its location")]

#[path = "../support/mod.rs"]
mod support;

mod admin;
mod contract;
mod layer;
mod operations;
mod redis;
