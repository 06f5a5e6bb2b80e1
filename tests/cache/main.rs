//! The cache: contracts, loads, failures, and processes.

#![allow(clippy::unwrap_used, reason = "a failing test panics with its location")]

#[path = "../support/mod.rs"]
mod support;

mod avalanche;
mod bad_data;
mod batches;
mod contract;
mod exists_filter;
mod exists_filter_contract;
mod exists_filter_model;
mod faults;
mod http;
mod http_faults;
mod http_fuzz;
mod http_leaks;
mod http_servers;
mod loads;
mod local;
mod model;
mod single_flight;
mod tags;
