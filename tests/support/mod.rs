//! What several tests and benches need. Each uses a part of it.
#![allow(dead_code, unreachable_pub)]

pub mod locks;
pub mod server;
pub mod windows;
