//! HTTP: header fields, client addresses and real servers.

#![allow(clippy::unwrap_used, reason = "a failing test panics with its location")]

mod client_ip;
mod headers;
mod responders;
mod servers;
mod type_inference;
