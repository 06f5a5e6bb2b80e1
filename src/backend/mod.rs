//! Backends, which keep the state of rate limits, locks, operations and queues.
//!
//! | backend | scope | needs |
//! | --- | --- | --- |
//! | [`MemoryBackend`](memory::MemoryBackend) | this process | nothing |
//! | `RedisBackend` (feature `redis`) | every process that uses the same Redis and prefix | Redis 6.2 or later, or Valkey |
//!
//! [`connect`] selects a backend by URL at run time, and `connect_with` also takes options for Redis. Backends are cheap to clone, and
//! clones share all state.
//!
//! # Examples
//!
//! A backend that the operator selects:
//!
//! ```
//! use tollgate::{Limiter, Policy, Quota};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let url = std::env::var("STORE").unwrap_or_else(|_| "memory:".into());
//! let backend = tollgate::connect(url).await?;
//! let limiter = Limiter::new(backend, Policy::new("mails", Quota::per_hour(100).fixed_window()));
//! assert!(limiter.check("alice").await?.is_allowed());
//! # Ok(())
//! # }
//! ```
//!
//! One backend for several policies, with room for a million keys:
//!
//! ```
//! use tollgate::{Limiter, MemoryBackend, Policy, Quota};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let backend = MemoryBackend::with_capacity(1_000_000);
//! let read = Limiter::new(backend.clone(), Policy::new("read", Quota::per_second(100).fixed_window()));
//! let write = Limiter::new(backend.clone(), Policy::new("write", Quota::per_second(5).sliding_log()?));
//!
//! assert!(read.check("alice").await?.is_allowed());
//! assert!(write.check_cost("alice", 2).await?.is_allowed());
//! assert_eq!(backend.len(), 2);
//! # Ok(())
//! # }
//! ```

pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;

mod any;

#[cfg(feature = "redis")]
pub use self::any::connect_with;
pub use self::any::{AnyBackend, connect};
