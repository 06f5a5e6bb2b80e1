//! Admit so many requests in so long, however many processes serve them.
//!
//! A [`Policy`] names one or several [`Quota`]s and the algorithm that counts each. [`RateLimitLayer`] enforces it in front of a tower
//! service; [`Limiter`] does without one. The counts lie in a backend: in this process
//! ([`MemoryBackend`](crate::MemoryBackend)) or in Redis, where any number of processes share them.
//!
//! With one Redis primary at most the quota is admitted, whatever the number of processes and of requests in flight: each
//! decision is one atomic script. A denial charges nothing.
//!
//! # Examples
//!
//! As it comes, one quota for all requests of a plain tower service, where a rejection is an error:
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
//! And with everything said: per client and route and per address, weighted, failing closed. With HTTP a rejection is a response. The route, and the
//! address that axum tells, are found with the feature `axum`.
//!
//! ```
//! # #[cfg(feature = "axum")] {
//! use std::time::Duration;
//! use axum::{Router, extract::Request, routing::get};
//! use tollgate::http::{header, matched_path, peer_ip};
//! use tollgate::{MemoryBackend, OnMissingKey, OnStoreError, Policy, Quota, RateLimitLayer};
//!
//! # fn main() -> Result<(), tollgate::ConfigError> {
//! let policy = Policy::new("api", Quota::per_second(20).burst(50)?.token_bucket())
//!     .limit(Quota::per_minute(600).sliding_log()?);
//! let address = Policy::new("address", Quota::per_minute(3_000).fixed_window());
//! let limit = RateLimitLayer::new(MemoryBackend::new(), policy)
//!     .key((header("x-api-key").or(peer_ip()), matched_path()))
//!     .and(address, peer_ip()) // since anybody can make up keys
//!     .cost(|request: &Request| if request.uri().path() == "/export" { 50 } else { 1 })
//!     .on_missing_key(OnMissingKey::Shared)
//!     .on_store_error(OnStoreError::Deny)
//!     .deadline(Duration::from_millis(20));
//! let app: Router = Router::new().route("/", get(async || "hello")).route_layer(limit);
//! # drop(app);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! Instead of being turned away a request can [wait](RateLimitLayer::wait) for room, as calls to somebody else's service should.
//!
//! # What is charged
//!
//! An admitted request is charged its cost at once, so that requests in flight count. What it turns out to be worth can be
//! said afterwards: by its answer ([`ChargeOn`], with presets for HTTP and gRPC), or by its handler, through the
//! [`RateLimitHandle`] in its extensions. This is also how an estimate is reserved and settled. The store is told in the background: at the end of a
//! program, after a graceful shutdown, wait for [`RateLimitLayer::wait_idle`].
//!
//! Each layer that a request passes charges it. A clone of one layer on a nested router and another on the router around it charge a
//! request for the nested routes twice. Put the layer on one of them, or give the two layers policies with different names.
//!
//! # When the store fails
//!
//! A decision that fails or takes longer than the [deadline](RateLimitLayer::deadline) is a [`StoreError`], never a "no".
//! [`OnStoreError`] says what happens then; unless told otherwise this process enforces the policy by itself until the store
//! answers again. After some failures in a row the store is not asked but by a probe now and then, see [`CircuitBreaker`].
//! All of this is per layer, so a login can be closed while the rest falls back. (The rules of a file share one breaker: it is about the
//! store, not about what is done without it.) The same is done where a [`PolicyResolver`] has failed, of which the circuit knows nothing.
//!
//! # When the clock is set
//!
//! Redis counts by the clock of its server, which an operator, NTP or a failover may set. The memory backend counts by a monotonic clock, which
//! nothing sets.
//!
//! A clock that is set back admits no request too many: no time passes for a key between its last charge and its next request. A request may wait
//! longer for that, by at most the time that has really passed in between. A clock that is set forward ends windows early, by as much as it was
//! set.
//!
//! | algorithm | clock set back | clock set forward |
//! | --- | --- | --- |
//! | [token bucket](Quota::token_bucket) | no tokens flow in for that time | tokens of that much time flow in at once, at most a whole [burst](Quota::burst) |
//! | [fixed window](Quota::fixed_window) | the window stays open for longer by that time | the window closes early, and a new quota begins |
//! | [sliding window](Quota::sliding_window) | both windows fade later by that time | both windows fade early: after two windows of time the whole quota is free |
//! | [sliding log](Quota::sliding_log) | remembered requests are forgotten later by that time | they are forgotten early: after one window of time the whole quota is free |
//! | [block](Limiter::block) | ends later by as much as the clock was set back | ends early |
//!
//! A [correction](RateLimitHandle) gives nothing back for a request that was charged before the clock was set back, unless the clock has caught up
//! with that charge. If a new window has begun meanwhile, such a correction can free units of the new window, except in a sliding log.
//!
//! # Trying a limit
//!
//! A [shadow](Policy::shadow) policy is counted and judged, and turns nobody away; [`Mode::Percent`] enforces a policy for a
//! share of the keys. Metrics tell whom it would hit. Beside a policy that is enforced it is asked about afterwards, within the same deadline. Where
//! the store fails about it then, for a node of a cluster that hangs say, it counts nothing, and once that has happened a few times in a row the requests
//! wait for it no longer, but for a [probe](CircuitBreaker) now and then.
//!
//! # Metrics
//!
//! With the feature `metrics` layers and [`Limiter`]s count with the `metrics` facade. Labels
//! are the name of the policy and those below, never a key. `tollgate::metrics::describe` tells the recorder what they are.
//!
//! Install the recorder before you use a policy: a recorder that comes later misses up to a second. A metric that an exporter has dropped after its
//! idle timeout appears again when it is next used, if the timeout is longer than a second.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_decisions_total` | `policy`, `outcome`: `allowed`, `limited`, `never`, `blocked`, `shadow_limited`, `missing_key`, `denied`, `turned_away`, `failed_open`, `failed_closed`, `local_allowed`, `local_limited` | decisions, one for each subject of a request, and for each time that a [`Limiter`] is asked to charge, where `failed_closed` is a [`StoreError`], of which its caller makes what it wants; `turned_away` is a policy that had room for a request which another one has turned away, and was not charged |
//! | `tollgate_near_limit_total` | `policy` | admitted requests that left less than a fifth of a limit |
//! | `tollgate_store_seconds` | `policy` | the time of each call that has to be waited for, without that of a resolver, a histogram |
//! | `tollgate_wait_seconds` | `policy`: that of the line | how long requests of a layer stood in a line for [room](RateLimitLayer::wait), until they were let through or turned away or had gone, a histogram |
//! | `tollgate_store_errors_total` | `policy` | calls that failed or were late |
//! | `tollgate_resolver_errors_total` | `policy`: that of the layer | requests that a [`PolicyResolver`] failed or was too late for, those included that went by an old answer or met with an error that is remembered |
//! | `tollgate_circuit_transitions_total` | `policy`, `state`: `open`, `closed` | circuits that opened and closed, but not those that policies [on trial](#trying-a-limit) have beside enforced ones; that of the rules of a file does both under the policy of the rule whose request opened it |
//! | `tollgate_settlements_total` | `policy`, `outcome`: `done`, `lost` | corrections of charges |
//! | `tollgate_leased_units_total` | `policy`, `outcome`: `drawn`, `given_back`, `expired` | units of [`QuotaPrefetch`]: drawn ahead, given back unused, and lost to everybody, as soon as that is noticed by the next request of the key |
//! | `tollgate_deny_cache_total` | `policy`, `outcome`: `hit`, `miss` | what a [`DenyCache`] has answered itself, and what it has asked its store |
//!
//! `tracing` has a span `rate_limit` at debug level around each such call of a layer, an event at debug level for each request over a
//! limit, one warning when a store or a resolver begins to fail, and one when a circuit opens; those about policies on trial say so. `then` in these is
//! what is done without them; with a resolver that is done for keys that have no old answer, and `old_answer` says whether the first that failed had one.
//!
//! # Without a round trip
//!
//! Two decorators go around a store and answer some requests in its place: [`DenyCache`] turns away who is known to be over the limit,
//! and [`QuotaPrefetch`] draws units of hot keys ahead. Neither admits more than the quota, and each says what it may deny
//! in excess.
//!
//! ```
//! use tollgate::{ErrorResponder, DenyCache, QuotaPrefetch, MemoryBackend, Policy, Quota, RateLimitLayer};
//!
//! let store = DenyCache::new(QuotaPrefetch::new(MemoryBackend::new()));
//! let policy = Policy::new("everybody", Quota::per_second(50_000).fixed_window());
//! let layer = RateLimitLayer::new(store, policy).responder(ErrorResponder);
//! # drop(layer);
//! ```
//!
//! # What there is not
//!
//! * Windows of the calendar, such as "until midnight". A fixed window opens with the first request of a key, and the others slide.
//! * A part of what was asked for. A request has its whole cost, or is denied.
//! * Blocks that come by themselves after many denials. [`Limiter::block`] is there for whoever sees them.
//! * A list of the keys that are denied most. No metric has a key in it, and a store lists none of those that it counts for.
//!
//! # Cancellation
//!
//! Dropping a response future while the store is asked may or may not have charged. Once admitted, a request stays charged
//! even if the inner service fails or the future is dropped, unless [`ChargeOn`] or the [`RateLimitHandle`] says otherwise.
//! A decision that need not be waited for, on the memory backend for instance, is made when the service is called.
//!
//! [`StoreError`]: crate::StoreError

pub(crate) mod algorithm;
mod circuit_events;
mod decision;
mod deny_cache;
mod descriptor;
mod evaluate;
mod filter;
mod future;
mod handle;
mod layer;
mod limiter;
mod metrics;
mod policy;
mod prefetch;
mod probationary_cache;
mod quota;
mod rejection;
mod resolver;
mod service;
mod sharded_map;
mod store;
mod wait;
mod wait_queue;

pub(crate) use self::decision::Denial;
pub use self::decision::{Decision, Denied, LimitStatus, MissingKey, Outcome, RateLimited, Receipt};
pub use self::deny_cache::{DenyCache, DenyCacheStats};
pub use self::filter::{
    AllowList, DenyList, FilterAction, RequestFilter, ResolveFrom, Subjects, WithFilter, WithLimit,
};
pub use self::future::ResponseFuture;
pub use self::handle::RateLimitHandle;
pub use self::layer::{ChargeAlways, ChargeOn, OnMissingKey, OnStoreError, RateLimitLayer, RequestCost, UnitCost};
pub use self::limiter::Limiter;
#[cfg(feature = "redis")]
pub(crate) use self::policy::EncodedLimits;
pub use self::policy::{Mode, Policy, QuotaChange};
pub use self::prefetch::{LeaseStats, QuotaPrefetch};
pub use self::quota::{Algorithm, BurstQuota, Limit, Quota};
pub use self::rejection::{AnnotateResponse, LimitInfo, Rejection};
pub use self::resolver::PolicyResolver;
pub use self::service::RateLimit;
pub use self::store::{Charged, RateLimitStore, Request};
pub use crate::store::circuit::CircuitBreaker;

#[cfg(feature = "http")]
pub(crate) use self::decision::ceil_seconds;
#[cfg(feature = "config")]
pub(crate) use self::layer::SharedState;
#[cfg(feature = "redis")]
pub(crate) use self::store::{Charge, give_back, one_after_the_other};
