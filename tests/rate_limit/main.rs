//! Rate limits: the layer, waiting, charges, prefetched quotas and the memory backend.

#![allow(clippy::unwrap_used, reason = "the panic shows where a test failed")]

#[path = "../model/mod.rs"]
mod model;

mod accelerators;
mod charging;
mod memory;
mod middleware;
mod properties;
mod waiting;
