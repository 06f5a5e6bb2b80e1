//! Locks of all kinds: contracts, the layer, faults, replication and administration.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/mod.rs"]
mod support;

mod admin;
mod contract;
mod faults;
mod layer;
mod redlock;
mod release_requests;
mod replication;
mod unpolled;
