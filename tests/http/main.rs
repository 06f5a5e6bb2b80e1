//! HTTP: header fields, client addresses, real servers, and the recipes of the guide.

#![allow(clippy::unwrap_used, reason = "a failing test panics with its location")]

mod client_ip;
mod headers;
mod recipes;
mod responders;
mod servers;
mod type_inference;

#[path = "../support/mod.rs"]
mod support;
