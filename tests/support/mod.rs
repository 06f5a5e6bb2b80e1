//! Helpers for several tests and benches, each of which uses a part of them.

#![allow(dead_code, unreachable_pub, unused_macros)]

pub mod cluster;
pub mod load;
pub mod locks;
pub mod processor;
pub mod proxy;
pub mod sentinel;
pub mod server;
pub mod shared;
pub mod stores;
pub mod tls;
pub mod waiting;
pub mod windows;
pub mod worker;
