//! Rate limits that are shared by all processes.
//!
//! A [`Policy`] has a name and one or several [`Quota`]s, each with the algorithm that counts it. [`RateLimitLayer`] enforces a policy in
//! front of a tower service. [`Limiter`] checks, waits or inspects without a service. The counts are kept in a backend: in this process
//! ([`MemoryBackend`](crate::MemoryBackend)), or in Redis, where any number of processes share them.
//!
//! With one Redis primary, at most the quota is admitted, for any number of processes and of requests in flight: each decision is one
//! atomic script. A denied request is not charged.
//!
//! # Examples
//!
//! With defaults: one quota for all requests of a plain tower service, where a rejection is an error.
//!
//! ```
//! use tollgate::{ErrorResponder, MemoryBackend, Policy, Quota, RateLimitLayer, rate_limit::RateLimited};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let policy = Policy::new("jobs", Quota::per_minute(2).fixed_window());
//! let service = ServiceBuilder::new()
//!     .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(ErrorResponder))
//!     .service(service_fn(async |job: &'static str| Ok::<_, tollgate::BoxError>(job.len())));
//!
//! assert_eq!(service.clone().oneshot("one").await?, 3);
//! assert_eq!(service.clone().oneshot("three").await?, 5);
//! let error = service.oneshot("four").await.unwrap_err();
//! assert!(error.downcast::<RateLimited>()?.retry_after().is_some());
//! # Ok(())
//! # }
//! ```
//!
//! Options: a limit per client and route and one per address, requests of different cost, and denial while the store fails. With HTTP a
//! rejection is a response. `matched_path()`, and the peer address from axum's `ConnectInfo`, need the feature `axum`.
//!
//! ```
//! # #[cfg(feature = "axum")] {
//! use std::time::Duration;
//! use axum::{Router, extract::Request, routing::get};
//! use tollgate::http::{header, matched_path, peer_ip};
//! use tollgate::{MemoryBackend, OnMissingKey, RateLimitFallback, Policy, Quota, RateLimitLayer};
//!
//! # fn main() -> Result<(), tollgate::ConfigError> {
//! let policy = Policy::new("api", Quota::per_second(20).burst(50)?.token_bucket())
//!     .limit(Quota::per_minute(600).sliding_log()?);
//! let address = Policy::new("address", Quota::per_minute(3_000).fixed_window());
//! let limit = RateLimitLayer::new(MemoryBackend::new(), policy)
//!     .key((header("x-api-key").or(peer_ip()), matched_path()))
//!     .and(address, peer_ip()) // since clients can make up keys
//!     .cost(|request: &Request| if request.uri().path() == "/export" { 50 } else { 1 })
//!     .on_missing_key(OnMissingKey::Pass)
//!     .on_store_error(RateLimitFallback::Deny)
//!     .deadline(Duration::from_millis(20));
//! let app: Router = Router::new().route("/", get(async || "hello")).route_layer(limit);
//! # drop(app);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! Instead of being rejected, a request can [wait](RateLimitLayer::wait) for room. Use this for calls to a third-party service.
//!
//! # Options
//!
//! | setter of [`RateLimitLayer`] | default | meaning |
//! | --- | --- | --- |
//! | [`key`](RateLimitLayer::key) | [`GlobalKey`](crate::GlobalKey) | the key of a request |
//! | [`and`](RateLimitLayer::and), [`and_if_present`](RateLimitLayer::and_if_present) | none | further policies and keys |
//! | [`cost`](RateLimitLayer::cost) | 1 | the units that a request costs |
//! | [`charge_on`](RateLimitLayer::charge_on) | [`ChargeAlways`] | which responses are charged |
//! | [`allow`](RateLimitLayer::allow), [`deny`](RateLimitLayer::deny) | none | requests that pass uncounted, or get 403 |
//! | [`filter`](RateLimitLayer::filter) | none | policies and keys that depend on the request |
//! | [`resolver`](RateLimitLayer::resolver), [`resolver_from`](RateLimitLayer::resolver_from) | the policy of the layer | the policy of a key at run time |
//! | [`wait`](RateLimitLayer::wait) | zero | how long a request waits for room |
//! | [`max_waiters_in_total`](RateLimitLayer::max_waiters_in_total) | 1,000 | how many requests wait at a time |
//! | [`on_missing_key`](RateLimitLayer::on_missing_key) | [`OnMissingKey::Reject`](crate::OnMissingKey::Reject) | what happens without a key |
//! | [`on_store_error`](RateLimitLayer::on_store_error) | [`RateLimitFallback::Local`] | what happens if the store fails |
//! | [`replicas`](RateLimitLayer::replicas) | 1 | how many processes share the quota while the store fails |
//! | [`deadline`](RateLimitLayer::deadline) | 100 ms | the longest time of a decision |
//! | [`circuit_breaker`](RateLimitLayer::circuit_breaker) | [`CircuitBreaker::new`] | when the layer stops calling a failing store |
//! | [`responder`](RateLimitLayer::responder) | [`HttpResponder`](crate::HttpResponder) | the response to a rejected request |
//! | [`require`](RateLimitLayer::require) | none | the [`Reach`](crate::Reach) that a backend must have |
//!
//! A [`Limiter`] has a [`deadline`](Limiter::deadline) (100 ms) and a [`circuit_breaker`](Limiter::circuit_breaker) (off).
//!
//! Guides: [algorithms](crate::guide::algorithms), [costs, plans and waiting](crate::guide::rate_limits), [keys](crate::guide::keys),
//! [order of layers](crate::guide::order), [troubleshooting](crate::guide::troubleshooting).
//!
//! # What is charged
//!
//! An admitted request is charged its cost at once, so that requests in flight count. You can correct the charge afterwards. [`ChargeOn`]
//! corrects it by the response, with presets for HTTP and gRPC. A handler corrects it through the [`RateLimitHandle`] in the extensions of
//! the request. Use this also to reserve an estimate and settle the actual amount later. Corrections are sent to the store in the
//! background. Before your program ends, and after a graceful shutdown, wait for them: with the
//! [shutdown of the backend](crate::backend#shutdown), or with [`RateLimitLayer::wait_idle`] for one layer.
//!
//! Each layer that a request passes charges it. If a layer is on a router and its clone is on a nested router, a request for a nested route
//! is charged twice. Put the layer on one of them, or give the two layers policies with different names.
//!
//! # When the store fails
//!
//! A store call that fails or takes longer than the [deadline](RateLimitLayer::deadline) is a [`StoreError`], never a denial.
//! [`RateLimitFallback`] configures what happens then. By default, this process enforces the policy with its own counts until the store
//! answers again. After several failures in a row the circuit opens, and only periodic probes reach the store: see [`CircuitBreaker`].
//!
//! All of this is configured per layer, so a login can fail closed while other routes fall back to local counts. (The rules of a file share
//! one circuit breaker, because they share one store.) If a [`PolicyResolver`] fails, the layer applies the same
//! [`RateLimitFallback`]. The circuit ignores failures of a resolver.
//!
//! # When the clock is set
//!
//! Redis counts by the clock of its server, which an operator, NTP or a failover can set. The memory backend counts by a monotonic clock,
//! which cannot be set.
//!
//! If a clock is set back, no extra request is admitted. The store counts too little time, or none, between the last charge of a key and
//! the next request for it. This request may wait longer by the uncounted time, which is at most the real time since the charge. If a clock
//! is set forward, windows end early by the length of the jump. In the table, `that time` is the uncounted time or the jump.
//!
//! | algorithm | clock set back | clock set forward |
//! | --- | --- | --- |
//! | [token bucket](Quota::token_bucket) | no tokens are added for that time | tokens for that time are added at once, at most a whole [burst](Quota::burst) |
//! | [fixed window](Quota::fixed_window) | the window stays open longer by that time | the window closes early, and a new quota begins |
//! | [sliding window](Quota::sliding_window) | both windows fade later by that time | both windows fade early: after a jump of two windows the whole quota is free |
//! | [sliding log](Quota::sliding_log) | logged requests expire later by that time | logged requests expire early: after a jump of one window the whole quota is free |
//! | [block](Limiter::block) | ends later by as much as the clock was set back | ends early |
//!
//! If a request was charged before the clock was set back, its [correction](RateLimitHandle) gives nothing back until the clock has caught
//! up with the charge. If a new window has begun meanwhile, the correction can free units of the new window. A correction of a sliding log
//! frees no units of other requests, but may give nothing back at all.
//!
//! # Trying a limit
//!
//! A [shadow](Policy::shadow) policy is counted and evaluated, but never rejects a request. [`Mode::Percent`] enforces a policy for a share
//! of the keys. Metrics and logs show which requests a shadow policy would have rejected.
//!
//! If a request has enforced policies, the layer checks its shadow policies after them, within the same deadline. If the store fails only
//! for the shadow policy, because one node of a cluster hangs for example, that policy is not counted. After several such failures in a
//! row, requests no longer wait for it, except for a periodic [probe](CircuitBreaker).
//!
//! # Metrics
//!
//! With the feature `metrics`, layers and [`Limiter`]s record metrics with the `metrics` facade. Labels are the name of the policy and
//! those in the table, never a key. `tollgate::metrics::describe` registers descriptions with the recorder.
//!
//! Install the recorder before you use a policy. With a recorder that is installed later, up to a second of metrics is lost. If an exporter
//! drops a metric after an idle timeout of more than a second, the metric appears again when it is next used.
//!
//! | name | labels | meaning |
//! | --- | --- | --- |
//! | `tollgate_decisions_total` | `policy`, `outcome`: `allowed`, `limited`, `never`, `blocked`, `shadow_limited`, `missing_key`, `denied`, `turned_away`, `failed_open`, `failed_closed`, `local_allowed`, `local_limited` | decisions: one for each policy and key of a request, and one for each call of a [`Limiter`] that charges. `failed_closed` of a `Limiter` is a [`StoreError`] returned to its caller. `turned_away`: this policy had room, but another policy rejected the request, so nothing was charged |
//! | `tollgate_near_limit_total` | `policy` | admitted requests that left less than a fifth of a limit |
//! | `tollgate_store_seconds` | `policy`: of the layer or [`Limiter`] | histogram of the time of each store call that did not return at once, without the time of a resolver |
//! | `tollgate_wait_seconds` | `policy`: of the wait queue | histogram of the time that requests of a layer [waited](RateLimitLayer::wait) in a queue, until they were admitted, rejected or dropped |
//! | `tollgate_store_errors_total` | `policy`: of the layer or [`Limiter`] | store calls that failed or timed out |
//! | `tollgate_resolver_errors_total` | `policy`: of the layer | requests for which a [`PolicyResolver`] failed or timed out. Includes requests that used a stale policy or a cached error |
//! | `tollgate_circuit_transitions_total` | `policy`, `state`: `open`, `closed` | circuits that opened and closed, without the separate circuits of [shadow policies](#trying-a-limit) beside enforced ones. The circuit of a rules file counts both states under the policy whose request opened it |
//! | `tollgate_settlements_total` | `policy`, `outcome`: `done`, `lost` | corrections of charges |
//! | `tollgate_leased_units_total` | `policy`, `outcome`: `drawn`, `given_back`, `expired` | units of [`QuotaPrefetch`]: drawn in advance, returned unused, and expired unused. Expired units are counted at the next request for the key |
//! | `tollgate_deny_cache_total` | `policy`, `outcome`: `hit`, `miss` | requests that a [`DenyCache`] answered itself, and requests that it passed to its store |
//!
//! `tracing` has a span `rate_limit` at DEBUG around the resolver and store calls for each request of a layer. It has an event at DEBUG for
//! each request over a limit. It has one WARN when a store or a resolver begins to fail, and one when a circuit opens. Warnings about
//! shadow policies contain the words `shadow policies`. The field `then` is the [`RateLimitFallback`] that the layer applies; if a
//! resolver fails, it applies only to keys without a stale policy. The field `old_answer` is true if the first key that failed
//! had a stale policy.
//!
//! # Without a round trip
//!
//! Two decorators wrap a store and answer some requests themselves. [`DenyCache`] denies requests for keys that are known to be over the
//! limit. [`QuotaPrefetch`] draws units for hot keys in advance. Neither admits more than the quota, and the documentation of each says
//! which requests it may deny unnecessarily.
//!
//! ```
//! use tollgate::{ErrorResponder, DenyCache, QuotaPrefetch, MemoryBackend, Policy, Quota, RateLimitLayer};
//!
//! let store = DenyCache::new(QuotaPrefetch::new(MemoryBackend::new()));
//! let policy = Policy::new("global", Quota::per_second(50_000).fixed_window());
//! let layer = RateLimitLayer::new(store, policy).responder(ErrorResponder);
//! # drop(layer);
//! ```
//!
//! # What is not supported
//!
//! * Calendar windows, such as "until midnight". A fixed window opens with the first request of a key, and the other algorithms slide.
//! * Partial charges. A request is charged its whole cost, or is denied.
//! * Automatic blocks after many denials. Call [`Limiter::block`] yourself.
//! * A list of the keys that are denied most. No metric has a key as a label, and no store lists its keys.
//!
//! # Cancellation
//!
//! If you drop a response future during a store call, the request may or may not be charged. Once admitted, a request stays charged even if
//! the inner service fails or the future is dropped, unless [`ChargeOn`] or the [`RateLimitHandle`] corrects the charge. A decision that
//! needs no waiting, for example on the memory backend, is made when the service is called.
//!
//! [`StoreError`]: crate::StoreError

pub(crate) mod algorithm;
mod annotate;
mod charge_on;
mod circuit_events;
mod cost;
mod decision;
mod deny_cache;
mod descriptor;
mod evaluate;
mod filter;
mod future;
mod handle;
mod layer;
mod layer_config;
mod limit_info;
mod limiter;
mod metrics;
mod options;
mod policy;
mod prefetch;
mod probationary_cache;
mod quota;
mod rate_limited;
mod record;
mod rejection;
mod resolver;
mod service;
mod settings;
mod sharded_map;
pub mod store;
mod wait;
mod wait_queue;

pub use self::annotate::AnnotateResponse;
pub use self::charge_on::{ChargeAlways, ChargeOn};
pub use self::cost::{RequestCost, UnitCost};
pub use self::decision::{Decision, LimitStatus, Outcome, Receipt};
pub use self::deny_cache::{DenyCache, DenyCacheStats};
pub use self::filter::{
    AllowList, DenyList, Descriptors, FilterAction, RequestFilter, ResolveFrom, WithFilter, WithLimit,
};
pub use self::future::ResponseFuture;
pub use self::handle::RateLimitHandle;
pub use self::layer::RateLimitLayer;
pub use self::layer_config::RateLimitFallback;
pub use self::limit_info::LimitInfo;
pub use self::limiter::Limiter;
pub use self::options::LayerOptions;
#[cfg(feature = "redis")]
pub(crate) use self::policy::EncodedLimits;
pub use self::policy::{Mode, Policy};
pub use self::prefetch::{PrefetchStats, QuotaPrefetch};
pub use self::quota::{Algorithm, BurstQuota, Limit, Quota, QuotaChange};
pub(crate) use self::rate_limited::Denial;
pub use self::rate_limited::RateLimited;
pub use self::rejection::{Denied, MissingKey, Rejection};
pub use self::resolver::PolicyResolver;
pub use self::service::RateLimit;
pub use crate::store::circuit::CircuitBreaker;

#[cfg(feature = "config")]
pub(crate) use self::layer_config::SharedState;
#[cfg(feature = "http")]
pub(crate) use self::rate_limited::ceil_seconds;
pub(crate) use self::store::as_change;
#[cfg(feature = "redis")]
pub(crate) use self::store::{Charge, one_after_the_other, refund_charges};
