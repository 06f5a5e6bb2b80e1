//! HTTP: header fields, client addresses and real servers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod client_ip;
mod headers;
mod servers;
