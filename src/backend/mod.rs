//! Backends, which keep the state of rate limits, locks, operations, queues and caches.
//!
//! | backend | scope | needs |
//! | --- | --- | --- |
//! | [`MemoryBackend`](memory::MemoryBackend) | this process | nothing |
//! | `RedisBackend` (feature `redis`) | every process that uses the same Redis and prefix | Redis 6.2 or later, or Valkey |
//!
//! [`connect`] selects a backend by URL at run time, and `connect_with` also takes options for Redis. Backends are cheap to clone, and
//! clones share all state.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::ConnectError> {
//! let backend = tollgate::connect("memory:").await?; // or "redis://127.0.0.1/"
//! # drop(backend);
//! # Ok(())
//! # }
//! ```
//!
//! [`MemoryBackend::with_capacity`](memory::MemoryBackend::with_capacity) sets the number of keys, 100,000 by default. A full memory backend
//! evicts cached values that expire soon. Redis evicts none with the recommended `noeviction`: a large cache needs
//! [a Redis of its own](crate::guide::redis#eviction). The module `redis` has the options of Redis.
//!
//! Guides: [Redis](crate::guide::redis), [Kubernetes](crate::guide::kubernetes), [performance](crate::guide::performance),
//! [guarantees](crate::guide::guarantees).
//!
//! # Shutdown
//!
//! `backend.shutdown(deadline)` is one call for the end of a program. It closes everything that was made from the backend and its clones,
//! and waits for all of it at the same time. First stop accepting requests, then call it:
//!
//! ```no_run
//! # #[cfg(feature = "http")] {
//! use std::time::Duration;
//! use axum::{Router, routing::get};
//! use tollgate::{BoxError, Policy, Quota, RateLimitLayer};
//!
//! # async fn serve(stopped: impl Future<Output = ()> + Send + 'static) -> Result<(), BoxError> {
//! let backend = tollgate::connect("redis://127.0.0.1/").await?;
//! let failures = Policy::new("failures", Quota::per_minute(5).fixed_window());
//! let limit = RateLimitLayer::new(backend.clone(), failures).charge_on(tollgate::http::failures());
//! let app: Router = Router::new().route("/login", get(async || "welcome")).layer(limit);
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! axum::serve(listener, app).with_graceful_shutdown(stopped).await?;
//! let report = backend.shutdown(Duration::from_secs(25)).await;
//! if !report.is_clean() {
//!     eprintln!("{report}"); // the shutdown is incomplete: it left 1 unfinished job, 2 held leases
//! }
//! # Ok(())
//! # }
//! # }
//! ```
//!
//! | made from the backend | from the call on | the shutdown waits until |
//! | --- | --- | --- |
//! | workers of queues | claim no more jobs, as after the signal of [`run_until`](crate::DelayQueueWorker::run_until) | `run` or `run_until` has returned |
//! | recurring schedules | push no more jobs | `run` or `run_until` has returned |
//! | locks, semaphores and their layers | grant nothing: [`LockError::Closed`](crate::LockError::Closed), also for waiters | each lease is released |
//! | rate limit layers | limit as before | no [correction](crate::rate_limit::RateLimitHandle) is in flight |
//! | idempotency layers | reject requests that have a key: 503 with HTTP | no handler runs, detached or not, and the store has all results |
//! | [`Idempotent`](crate::idempotency::Idempotent) | executes operations as before | the store has the results of finished operations |
//! | [caches](crate::Cache) | load nothing; cached values are still returned | no load runs |
//! | queues, [`Limiter`](crate::Limiter), admin types | work as before | |
//!
//! There is no default deadline. A worker ends within 24 s with its [defaults](crate::DelayQueueWorker::grace), so use 25 s for a process
//! with workers, and 10 s for a process without. The grace period of Kubernetes, 30 s by default, also includes the time before this call:
//! a pod that serves HTTP and runs workers needs 45 s. [The guide](crate::guide::kubernetes) adds up the parts.
//!
//! While Redis is down, the call takes no longer than its deadline either. At the deadline it returns and stops nothing: leftover work
//! continues until the process ends. The [`ShutdownReport`] has the number of each kind.
//!
//! The shutdown cancels no work under a lock. End endless work, such as that of a leader, by your own signal: otherwise its lease is still
//! held at the deadline.
//!
//! If a running job cannot get its lock because of the shutdown, the worker snoozes it, and the attempt does not count. Locks
//! and workers that you make from the backend afterwards are closed from the beginning. A closed backend does not open again. A further
//! call waits again.
//!
//! The shutdown reaches through wrappers such as [`DenyCache`](crate::DenyCache). A [`Redlock`](crate::lock::Redlock) is closed by the
//! shutdown of any of its backends. Other backends, and other processes on the same Redis, are not affected. For the held units of a
//! [`QuotaPrefetch`](crate::QuotaPrefetch), call its `give_back`.
//!
//! If you drop the future of `shutdown`, the backend stays closed. If you drop a backend without a shutdown, nothing is closed, since its
//! workers, locks and layers have clones of it.
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
pub use crate::store::shutdown::{ShutdownReport, ShutdownTarget};
