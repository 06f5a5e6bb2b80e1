//! Distributed traffic control for tower services.
//!
//! Tollgate puts limits in front of any [tower] service, with one `.layer()`, locks keys for one at a time, serves the same request
//! once, and keeps jobs until they are due. The state lies in Redis, where any number of processes share it and every decision is one
//! atomic script, or in this process, where nothing has to be installed. The API is the same.
//!
//! ```toml
//! [dependencies]
//! tollgate = { version = "0.1", features = ["axum"] }
//! axum = "0.8"
//! tokio = { version = "1", features = ["full"] }
//! ```
//!
//! ```no_run
//! use std::net::SocketAddr;
//! use axum::{Router, routing::get};
//! use tollgate::{BoxError, Policy, Quota, RateLimitLayer, http::peer_ip};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), BoxError> {
//!     let backend = tollgate::connect("memory:").await?; // or "redis://127.0.0.1/"
//!     let policy = Policy::new("api", Quota::per_minute(100).fixed_window());
//!     let app = Router::new()
//!         .route("/", get(async || "hello\n"))
//!         .layer(RateLimitLayer::new(backend, policy).key(peer_ip()))
//!         .into_make_service_with_connect_info::<SocketAddr>();
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     Ok(axum::serve(listener, app).await?)
//! }
//! ```
//!
//! Without the feature `axum` nobody finds the address that axum tells, and each request is answered by 400.
//!
//! # Where things are
//!
//! | module | holds |
//! | --- | --- |
//! | [`rate_limit`] | quotas, policies, decisions, [`Limiter`], [`RateLimitLayer`], and what goes around a store |
//! | [`lock`] | [`Locks`], [`Lease`], [`LockLayer`], and what locks ask of a store |
//! | [`idempotency`] | the same request served once: `IdempotencyLayer`, [`Idempotent`](idempotency::Idempotent) for what is no request, and what they ask of a store |
//! | [`delay_queue`] | jobs that run later: [`DelayQueue`], [`DelayQueueWorker`], [`Job`], and what queues ask of a store |
//! | [`backend`] | [`MemoryBackend`], `RedisBackend`, [`connect`], `connect_with` |
//! | `http` (feature `http`) | keys, responses and header fields for HTTP |
//! | `grpc` (feature `grpc`) | rejections as gRPC statuses |
//! | `config` (feature `config`) | rules in a file, changed while the program runs |
//! | `metrics` (feature `metrics`) | texts and units of the metrics |
//! | [`responder`] | what a rejection becomes |
//! | `testing` (feature `testing`) | for tests: a store that fails when told to, the contract for backends of your own |
//!
//! # Words
//!
//! A *store* is what a capability needs of a *backend*, which keeps the data. A *decision* is a normal outcome, whether it is
//! yes or no. A *rejection* is a layer saying no. A *[store error](StoreError)* is the backend failing. These never share a
//! type: "denied" and "Redis is down" cannot be confused.
//!
//! # Guarantees
//!
//! * With one Redis primary at most the quota is admitted, whatever the number of processes and of requests in flight. Not
//!   across a failover, where what replication had not carried is forgotten.
//! * A denial charges nothing. A decision whose answer is lost on the way may have charged; it is not asked for again.
//! * Every key that is written to Redis has a time to live, and every subject, whatever bytes a client sends, becomes a short [`Key`].
//! * A decision takes one round trip, two for a key that is blocked or was counted by other limits before, one more for each shadow beside an
//!   enforced policy, and no longer than its deadline; then the named policy applies, [`OnStoreError`]. One for several subjects is one call as
//!   well, but not on a cluster, where it is one for each, and what a denied one has charged is given back if that node answers.
//! * A lock has one live lease, whose holder knows of a loss before the lock can be granted again. Not across a failover, or while
//!   a process stands still: each grant has a larger [fencing token](Lease::fence) than all before it, for the storage to refuse who is late.
//! * The handler of an idempotency key runs to its end at most once while its record lives, unless its answer is one that
//!   [`ResponsePolicy`](idempotency::ResponsePolicy) gives back or you chose [`OnUnknown::Retry`](idempotency::OnUnknown::Retry) or
//!   [`OnStoreError::Allow`](idempotency::OnStoreError::Allow), and nobody gets the answer of another scope. Not across a failover that forgets the record.
//! * A job of a delay queue is never early, is done at least once unless it is cancelled or dead, and is in one state; only the holder
//!   of its last lease can finish it. Not exactly once, and not across a failover that forgets it.
//! * Nothing that is awaited blocks a thread, and no task outlives the backend that it serves, but for an attempt to connect that is
//!   under way, which ends with its timeout, and for leases that are on their way back, which expire, and for
//!   handlers whose client has gone, which an idempotency layer lets finish, and a lock layer if told so.
//!
//! # Features
//!
//! * `redis` (default): `RedisBackend`, with bb8, redis, crc16 and futures-util.
//! * `tls`: encrypted connections to Redis, with rustls.
//! * `http` (default): the module `http`, with http, http-body, ipnet and the small crates that answers take.
//! * `json` (default): payloads of jobs as JSON, with serde and serde_json.
//! * `axum`: lets the keys `peer_ip` and `ClientIp` find axum's `ConnectInfo`, and idempotency the path that a nested router was asked for, without which
//!   two nested routes may be one to it; the key `matched_path`; handlers take what layers know as arguments.
//! * `grpc`: the module `grpc`, with prost.
//! * `metrics`: counters and histograms of the `metrics` facade, with metrics and arc-swap: see [`rate_limit`](rate_limit#metrics),
//!   [`lock`](lock#metrics), [`idempotency`](idempotency#metrics) and [`delay_queue`](delay_queue#metrics). `metrics::describe` tells the recorder what they are.
//! * `cron`: jobs that come back by cron patterns, in time zones, with croner and jiff: see `delay_queue::Recurring`.
//! * `otel`: links of OpenTelemetry from the span of a job to who pushed it: see [`delay_queue`](delay_queue#traces).
//! * `testing`: the module `testing`, for `[dev-dependencies]`.
//! * `config`: the module `config`, with serde, toml, toml_parser, serde_json, granit-parser (YAML), matchit and arc-swap.
//!
//! [tower]: https://docs.rs/tower
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod key;
#[cfg(feature = "metrics")]
mod meter;
mod panics;
mod store;

pub mod backend;
#[cfg(feature = "config")]
pub mod config;
pub mod delay_queue;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(feature = "http")]
pub mod http;
pub mod idempotency;
pub mod lock;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod rate_limit;
pub mod responder;
#[cfg(feature = "testing")]
pub mod testing;

#[cfg(feature = "redis")]
pub use self::backend::connect_with;
pub use self::backend::memory::MemoryBackend;
#[cfg(feature = "redis")]
pub use self::backend::redis::{RedisBackend, RedisOptions};
pub use self::backend::{AnyBackend, connect};
pub use self::delay_queue::{DelayQueue, DelayQueueWorker, Job, JobId};
pub use self::error::{BoxError, ConfigError, ConnectError, ConnectFailure, StoreError};
#[cfg(feature = "http")]
pub use self::http::IdempotencyLayer;
pub use self::key::{ExtractKey, GlobalKey, IntoKey, Key, Or, ParseKeyError, first_of};
pub use self::lock::{Lease, LockError, LockLayer, Locks};
pub use self::rate_limit::{
    DenyCache, Limiter, OnMissingKey, OnStoreError, Policy, Quota, QuotaPrefetch, RateLimitLayer,
};
pub use crate::responder::{ErrorResponder, HttpResponder};

/// The code in the README, run as doctests.
#[cfg(all(doctest, feature = "redis", feature = "axum", feature = "testing"))]
#[cfg(all(doctest, feature = "redis", feature = "axum", feature = "config"))]
#[doc = include_str!("../README.md")]
mod readme {}
