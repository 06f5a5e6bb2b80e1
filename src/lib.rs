//! Distributed traffic control for tower services.
//!
//! Tollgate adds rate limits and locks to any [tower] service with one `.layer()`, and idempotency and a response cache to HTTP services.
//! It also runs delayed jobs and caches values. The state is in Redis or in memory. In Redis, any number of processes share it, and every
//! decision is one atomic script. In memory, you need no server. The API is the same.
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
//! Without the feature `axum`, `peer_ip()` cannot read `ConnectInfo`, and every request gets a response of 400.
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | [`rate_limit`] | quotas, policies, decisions, [`Limiter`], [`RateLimitLayer`], and wrappers of a store |
//! | [`lock`] | [`Locks`], [`Lease`], [`LockLayer`], and the store trait of locks |
//! | [`idempotency`] | requests and operations that run once: `IdempotencyLayer`, [`Idempotent`](idempotency::Idempotent), and their store trait |
//! | [`delay_queue`] | jobs that run later: [`DelayQueue`], [`DelayQueueWorker`], [`Job`], and their store trait |
//! | [`cache`] | [`Cache`], which loads each missing value once for all processes, [`ExistsFilter`], and their store traits |
//! | [`single_flight`] | equal requests in this process share one call of a service |
//! | [`backend`] | [`MemoryBackend`], `RedisBackend`, [`connect`], `connect_with`, and the [shutdown](backend#shutdown) |
//! | `http` (feature `http`) | keys, responses and header fields for HTTP |
//! | `grpc` (feature `grpc`) | rejections as gRPC statuses |
//! | `config` (feature `config`) | rate limits from a file, which can be reloaded at runtime |
//! | `metrics` (feature `metrics`) | descriptions and units of the metrics |
//! | [`guide`] | guides, one page for each task |
//! | [`responder`] | responders, which turn rejections into responses |
//! | `testing` (feature `testing`) | for tests: a store that injects failures, and the contract for your own backends |
//!
//! # Terms
//!
//! A *store* is a value whose type implements the store trait of a capability. A *backend* is a store that keeps the data. A *decision* is
//! the outcome of a check: allowed or denied. A *rejection* is the refusal by a layer. A *[store error](StoreError)* means that the backend
//! failed or was late. These have separate types, so "denied" and "Redis is down" cannot be confused.
//!
//! # Guarantees
//!
//! * With one Redis primary, at most the quota is admitted, regardless of the number of processes and requests in flight. A failover may
//!   lose counts that were not replicated.
//! * A denied request costs nothing. If the reply with the decision is lost, the store may have charged the request, and the call is not
//!   retried.
//! * Every key in Redis has a time to live. Every client value, whatever its bytes, becomes a short [`Key`].
//! * A decision usually takes one round trip. A key that is blocked, or that was counted under other limits before, takes two. Each shadow
//!   policy beside an enforced one takes one more. A decision takes no longer than its deadline. After that [`RateLimitFallback`] applies.
//! * A decision for several keys is one call. On a cluster it is one call for each key. If one key is denied, the charges of the other
//!   keys are refunded, provided that their nodes reply.
//! * A lock has one live lease, and its holder learns of a loss before the lock can be granted again. A failover, or a process that is
//!   suspended, can break this. So each grant has a larger [fencing token](Lease::fence) than all earlier grants, and the storage can
//!   refuse a late holder.
//! * The handler of an idempotency key runs to its end at most once while its record lives, and no client gets the response of another
//!   scope. Exceptions are responses that [`ResponsePolicy`](idempotency::ResponsePolicy) does not store, the settings
//!   [`OnUnknown::Retry`](idempotency::OnUnknown::Retry) and [`OnStoreError::Allow`], and a failover that loses the record.
//! * With one Redis primary, one process at a time loads a missing value of a [`Cache`], as long as that process renews its lease. Values
//!   that must not be cached are an exception. A load that began before an invalidation is not stored after it.
//! * A job of a delay queue never runs early, and runs at least once unless it is cancelled or dead. It is in one state at a time, and only
//!   the holder of its last lease can finish it. It may run more than once, and a failover may lose it.
//! * No future blocks a thread. No task outlives the backend that it serves, with three exceptions. A connection attempt ends with its
//!   timeout. A task that releases a lease ends at the latest when the lease has expired. A detached handler runs to its end: an
//!   idempotency layer detaches handlers whose client has disconnected, and a lock layer does so if you configure it.
//!
//! # Features
//!
//! * `redis` (default): `RedisBackend`, with bb8, redis and crc16.
//! * `tls`: encrypted connections to Redis, with rustls.
//! * `http` (default): the module `http`, with http, http-body, httpdate, ipnet and small crates for responses.
//! * `json` (default): payloads of jobs and values of caches as JSON, with serde and serde_json.
//! * `axum`: the keys `peer_ip` and `ClientIp` read axum's `ConnectInfo`, the key `matched_path` exists, and handlers can extract the
//!   handles of layers. With the feature, idempotency and the HTTP cache read the full path in a nested router. Without the feature, two
//!   nested routes may count as the same operation, or share responses.
//! * `grpc`: the module `grpc`, with prost.
//! * `metrics`: counters and histograms of the `metrics` facade, with metrics and arc-swap: see [`rate_limit`](rate_limit#metrics),
//!   [`lock`](lock#metrics), [`idempotency`](idempotency#metrics), [`delay_queue`](delay_queue#metrics) and [`cache`](cache#metrics).
//!   `metrics::describe` registers their descriptions.
//! * `cron`: recurring jobs with cron patterns and time zones, with croner and jiff: see `delay_queue::Recurring`.
//! * `otel`: OpenTelemetry links from the span of a job to the span that pushed it: see [`delay_queue`](delay_queue#traces).
//! * `local-cache`: `Cache::local_tier`, with moka.
//! * `testing`: the module `testing`, for `[dev-dependencies]`.
//! * `config`: the module `config`, with serde, toml, toml_parser, serde_json, granit-parser (YAML), matchit and arc-swap.
//!
//! [tower]: https://docs.rs/tower
#![cfg_attr(docsrs, feature(doc_cfg))]

mod codec;
mod error;
mod identity_hasher;
mod key;
#[cfg(feature = "metrics")]
mod meter;
mod on_failure;
mod panics;
mod reach;
mod store;

pub mod backend;
pub mod cache;
#[cfg(feature = "config")]
pub mod config;
pub mod delay_queue;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(any(doc, doctest))]
pub mod guide;
#[cfg(feature = "http")]
pub mod http;
pub mod idempotency;
pub mod lock;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod rate_limit;
pub mod responder;
pub mod single_flight;
#[cfg(feature = "testing")]
pub mod testing;

#[cfg(feature = "redis")]
pub use self::backend::connect_with;
pub use self::backend::memory::MemoryBackend;
#[cfg(feature = "redis")]
pub use self::backend::redis::{RedisBackend, RedisOptions};
pub use self::backend::{AnyBackend, connect};
pub use self::cache::{Cache, ExistsFilter};
pub use self::codec::{Codec, Json};
pub use self::delay_queue::{DelayQueue, DelayQueueWorker, Job, JobId};
pub use self::error::{BoxError, ConfigError, ConnectError, ConnectFailure, StoreError};
#[cfg(feature = "http")]
pub use self::http::{CacheLayer, IdempotencyLayer};
pub use self::key::{ExtractKey, GlobalKey, IntoKey, Key, Or, ParseKeyError, StrKey, first_of, str_key};
pub use self::lock::{Lease, LockError, LockLayer, Locks};
pub use self::on_failure::{OnMissingKey, OnStoreError};
pub use self::rate_limit::{DenyCache, Limiter, Policy, Quota, QuotaPrefetch, RateLimitFallback, RateLimitLayer};
pub use self::reach::Reach;
pub use crate::responder::{ErrorResponder, HttpResponder};
pub use crate::single_flight::SingleFlightLayer;

/// The code in the README, run as doctests.
#[cfg(all(doctest, feature = "redis", feature = "axum", feature = "testing"))]
#[cfg(all(doctest, feature = "redis", feature = "axum", feature = "config"))]
#[doc = include_str!("../README.md")]
mod readme {}
