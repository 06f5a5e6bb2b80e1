//! Where the counts lie.
//!
//! | backend | scope | needs |
//! | --- | --- | --- |
//! | [`MemoryBackend`](memory::MemoryBackend) | this process | nothing |
//! | `RedisBackend` (feature `redis`) | every process that uses the same Redis and prefix | Redis 6.2 or later, or Valkey |
//!
//! [`connect`] chooses by URL at run time. All of them are cheap to clone, and clones share everything.

pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;

mod any;

pub use self::any::{AnyBackend, connect};
