//! Locks that one holder has at a time, across all processes. They expire by themselves, report their loss, and can be awaited.
//!
//! [`Locks`] grants a [`Lease`] by key, and [`LockLayer`] does so in front of a tower service. A backend stores the lease: in
//! this process ([`MemoryBackend`](crate::MemoryBackend)), or in Redis, which all processes share.
//!
//! ```
//! use tollgate::{Locks, MemoryBackend};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let locks = Locks::new(MemoryBackend::new(), "orders");
//!
//! let total = locks.run("order:42", async |lease| {
//!     // UPDATE orders SET .., fence = $1 WHERE id = 42 AND fence <= $1
//!     lease.fence()
//! }).await?;
//! # assert!(total > 0);
//! # Ok(())
//! # }
//! ```
//!
//! Guides: [locks and fencing](crate::guide::locks), [order of layers](crate::guide::order), [Redis](crate::guide::redis),
//! [troubleshooting](crate::guide::troubleshooting).
//!
//! # Options
//!
//! | setter | default of [`Locks`] | default of [`LockLayer`] | meaning |
//! | --- | --- | --- | --- |
//! | [`ttl`](Locks::ttl) | 30 s | 15 s | how long the lock outlives a dead holder |
//! | [`wait`](Locks::wait) | 10 s | zero | how long to wait for a held lock |
//! | [`max_hold`](Locks::max_hold) | no limit | 5 minutes | how long a lease is renewed at most |
//! | [`max_waiters`](Locks::max_waiters) | 1,000 | 64 | waiters for one lock in this process |
//! | [`max_waiters_in_total`](Locks::max_waiters_in_total) | 100,000 | 1,000 | waiters for all locks in this process |
//! | [`fair`](Locks::fair) | off | off | serves waiters of all processes in order |
//! | [`request_release`](Locks::request_release) | off | off | asks the holder to release while a caller waits |
//! | [`holder`](Locks::holder) | no name | no name | the name of holders for [`LockAdmin`] |
//! | [`replication`](Locks::replication) | [`Replication::Primary`] | the same | where a lease must be stored before it counts |
//! | [`deadline`](Locks::deadline) | 100 ms | 100 ms | the longest time of a store call |
//! | [`circuit_breaker`](Locks::circuit_breaker) | [`CircuitBreaker::new`] | the same | when to stop calling a failing store |
//! | [`require`](Locks::require) | none | none | the [`Reach`](crate::Reach) that a backend must have |
//! | [`key`](LockLayer::key) | | required | what a request locks |
//! | [`lock_safe_methods`](LockLayer::lock_safe_methods) | | `false` | whether GET and other safe requests need the lock |
//! | [`on_missing_key`](LockLayer::on_missing_key) | | [`OnMissingKey::Reject`](crate::OnMissingKey::Reject) | what happens without a key |
//! | [`on_store_error`](LockLayer::on_store_error) | | [`OnStoreError::Deny`](crate::OnStoreError::Deny) | what happens if the store fails |
//! | [`on_loss`](LockLayer::on_loss) | | [`OnLoss::Cancel`] | what happens to a request that loses its lease |
//! | [`release_at`](LockLayer::release_at) | | [`ReleaseAt::BodyEnd`] | when the lock of a request is released |
//! | [`detached`](LockLayer::detached), [`max_running`](LockLayer::max_running) | | off, 10,000 | handlers finish after a disconnect, and how many run |
//! | [`responder`](LockLayer::responder) | | [`HttpResponder`](crate::HttpResponder) | the response to a rejected request |
//!
//! # A lease, and not a lock
//!
//! A holder can die or stall at any time. So a lock here is a lease: it expires some time after the last sign of life of its
//! holder ([`ttl`](Locks::ttl)), and a live holder renews it. The consequences:
//!
//! * One Redis primary has at most one live lease for a key.
//! * The holder of an expiring lease knows the end *before* the lock can be granted again. The deadline counts from before the
//!   command that set the expiry was sent, with a margin for clocks of different speed (1 % and 2 ms). It uses the local clock
//!   and needs no reply. [`Locks::run`] drops its body at the deadline.
//! * If the store ends a lease, the holder learns it at the next renewal, after a third of the lease, or at the release. Another
//!   client may have the lock before: after the key was deleted or evicted, after [`LockAdmin::force_release`], or if the clock of
//!   the server was set forward. [`Locks::run`] returns [`RunError::Unprotected`] if the release finds the loss. Each loss is logged
//!   at WARN and counted once.
//! * A stalled process (a blocked thread, a stopped container) learns nothing until it resumes. The same holds for a suspended
//!   machine. If the clock of the process stands still meanwhile, as on Linux, [`Lease::check`] may accept an ended lease until
//!   the next renewal. Use the [`Lease::fence`] against that: each grant has a larger number than all before, and the protected
//!   data refuses smaller numbers. Use it where two holders at a time would be worse than a failure.
//! * A failover to a replica forgets unreplicated leases, so it may grant a held lock. [`Locks::replication`] makes that less
//!   likely. For fences, see [below](#fences).
//!
//! # Fences
//!
//! A fence is the time of the store's clock in microseconds, or the largest known fence plus one if that is larger. The store
//! knows the last fence of the key until ten minutes after the lease. It also knows the largest fence of any grant to this
//! process, since each acquisition passes it on. A backend and its clones have one such number; two backends do not share it. On a
//! cluster it covers all nodes, so the clock of one node can raise the fences of another.
//!
//! * Fences of a key rise across process restarts, and if the clock of the store is set back by up to ten minutes.
//! * If the store forgets the key (`FLUSHALL`, eviction, a failover that loses the last grant), fences still rise within each
//!   process, for any clock.
//! * One gap remains: the store has forgotten the last fence of a key, *and* its clock is behind the time of that grant. Then a
//!   process without a fence as large, for instance a new one, may get a smaller fence than another process before.
//! * A fence above 2^53 - 2^40 is not remembered, so one wrong reply cannot use up the numbers below 2^53.
//!
//! # One kind for a key
//!
//! A held key has one kind: exclusive ([`Locks`], fair or not), read/write ([`RwLocks`]) or semaphore ([`Semaphore`], with any
//! number of permits). A claim of another kind is refused with [`LockError::OtherKind`], which names both. Locks with different names
//! have different keys.
//!
//! [`Redlock`] works while some of several independent servers are down, with guarantees of its own. If you need consensus, use
//! etcd or ZooKeeper, and fences as well.
//!
//! # Examples
//!
//! All options, with the loss of the lease handled by hand:
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{LockError, Locks, MemoryBackend};
//!
//! # async fn work(fence: u64) -> Result<(), tollgate::BoxError> { assert!(fence > 0); Ok(()) }
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let locks = Locks::new(MemoryBackend::new(), "orders")
//!     .ttl(Duration::from_secs(10))
//!     .max_hold(Duration::from_secs(300))
//!     .max_waiters(64);
//!
//! match locks.lock("42").wait(Duration::from_secs(2)).await {
//!     Ok(lease) => {
//!         tokio::select! {
//!             done = work(lease.fence()) => done?,
//!             why = lease.lost() => return Err(why.into()),
//!         }
//!         lease.release().await?; // or drop it
//!     }
//!     Err(LockError::Busy(busy)) => println!("try again in {:?}", busy.retry_after()),
//!     Err(error) => return Err(error.into()),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Locks::lock_all`] acquires several keys or none. [`Semaphore`] admits several holders at a time, [`RwLocks`] many readers
//! or one writer. For a hot key use [`Segmented`]: any of several locks.
//!
//! # In front of a service
//!
//! [`LockLayer`] admits one request at a time for each key. By default, a request for a held lock is rejected with 409 and
//! `Retry-After`. Safe requests such as GET need no lock. The lock is held until the response body has ended:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{Extension, Router, extract::Request, routing::post};
//! use tollgate::{LockLayer, MemoryBackend, lock::LeaseHandle};
//!
//! async fn pay(Extension(lease): Extension<LeaseHandle>) -> String {
//!     // UPDATE orders SET paid = true, fence = $1 WHERE id = 42 AND fence <= $1
//!     format!("paid by {}", lease.fence())
//! }
//!
//! let lock = LockLayer::new(MemoryBackend::new(), "payments")
//!     .key(|request: &Request| request.uri().path().to_owned());
//! let app: Router = Router::new().route("/orders/{id}/payment", post(pay)).layer(lock);
//! # }
//! ```
//!
//! All options:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use std::time::Duration;
//! use tollgate::http::header;
//! use tollgate::lock::{OnLoss, ReleaseAt};
//! use tollgate::Reach;
//! use tollgate::responder::BusyStatus;
//! use tollgate::{HttpResponder, LockLayer, MemoryBackend, OnMissingKey, OnStoreError};
//!
//! # fn main() -> Result<(), tollgate::ConfigError> {
//! let lock = LockLayer::new(MemoryBackend::new(), "uploads")
//!     .require(Reach::Process)? // Reach::Redis would refuse the memory backend
//!     .key(header("upload-id"))
//!     .wait(Duration::from_secs(2))
//!     .max_waiters(8)
//!     .ttl(Duration::from_secs(10))
//!     .max_hold(Duration::from_secs(60))
//!     .lock_safe_methods(true)
//!     .on_missing_key(OnMissingKey::Pass)
//!     .on_store_error(OnStoreError::Deny)
//!     .on_loss(OnLoss::Notify)
//!     .release_at(ReleaseAt::HandlerDone)
//!     .responder(HttpResponder::new().busy(BusyStatus::Locked));
//! # drop(lock);
//! # Ok(())
//! # }
//! # main().unwrap();
//! # }
//! ```
//!
//! | | with HTTP | problem | with gRPC |
//! | --- | --- | --- | --- |
//! | held, also after waiting | 409 (or 423, 429), `Retry-After` | `busy` | `ABORTED`, `RetryInfo` |
//! | the limit of waiters is reached | 503, `Retry-After` | `queue-full` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | a [detached](LockLayer::detached) layer has [`max_running`](LockLayer::max_running) requests | 503, `Retry-After` | `about:blank` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | the store fails, or too few replicas know of the lease | 503, `Retry-After` | `unavailable` | `UNAVAILABLE`, `RetryInfo` |
//! | the lease is lost while the handler runs, which is cancelled | 503 | `lost` | `ABORTED`, "do not retry" |
//! | the lease is lost while the body is sent | the body fails | | `ABORTED` in the trailers |
//! | no key | 400 | `about:blank` | `INVALID_ARGUMENT` |
//! | an invalid [setting](LockLayer::new), or a key that is held as [another kind](#one-kind-for-a-key) | 500 | `about:blank` | `INTERNAL` |
//!
//! The `type` of a problem document is `about:blank`, or `urn:tollgate:lock:` and the name.
//!
//! A request also stops waiting when an outer timeout or a disconnected client ends it. Servers such as tonic's apply the
//! `grpc-timeout` of a call outside of all layers; this layer does not read it.
//!
//! [`LockLayer::with_semaphore`] admits several requests of a key at a time, [`LockLayer::with_rw_locks`] all safe requests
//! together.
//!
//! When a client disconnects, its handler is dropped and the lock released. [`LockLayer::detached`] lets the handler finish
//! instead, for up to 10,000 running requests by default ([`max_running`](LockLayer::max_running)). A handler that an inner
//! [idempotency layer](crate::idempotency#together-with-other-layers) lets finish keeps the lock until its end. While the store keeps
//! failing, the layer calls the store only now and then: see [`CircuitBreaker`].
//!
//! Put a rate limit outside of this layer, and a timeout for the handler inside. Services behind the handler can refuse late
//! holders: see [`fencing`].
//!
//! # Waiting
//!
//! The waiters of one process share a queue and are served in order. Only the leader, the first of them, calls the store. Within
//! the process the lease is handed off, with a new fence each time, for up to 16 grants or 100 ms. Between processes, the first
//! call after a release gets the lock by default. That is not fair, but processes with a notification get a head start. A
//! notification tells waiters of a release. They also call once a second, because notifications can be lost.
//!
//! [`Locks::fair`] and [`RwLocks`] are fair between processes: the store keeps one queue of all waiters, by its own clock. Each
//! waiter calls the store once a second, which keeps its position. A dead or stopped waiter loses its position after three
//! seconds, and delays the others by at most one second more. A waiter that learns of its grant after the lease has ended moves
//! to the back of the queue. A release notifies only the next waiter. This costs one or two more commands for each grant after
//! waiting, and there is no handoff within a process. A queue holds up to 10,000 waiters.
//!
//! A waiter that is no longer polled delays no other waiter. An acquisition or release of more than 50 ms continues in a background task.
//! A lease that its caller does not pick up within 250 ms, or a third of the [ttl](Locks::ttl) if that is shorter, goes to the next waiter.
//! The caller keeps its position in its process, and its own [`wait`](Locks::wait). When it is polled again it continues to wait, or gets
//! [`LockError::Busy`] if its wait is over. With fair locks and read/write locks it enters the queue of the store again, at the end: a kept
//! position would delay all processes.
//!
//! With [`Locks::request_release`] waiters ask the holder to release the lock. [`Lease::release_requested`] tells the holder, which decides.
//!
//! # Store calls
//!
//! Acquiring and releasing a free lock cost one command each. On one Redis server, concurrent acquisitions share a command, and
//! so do releases. A lease is renewed after a third of its time. Leases that are due at the same time share a command, on a
//! connection of their own. A failed renewal makes the lease [suspended](LeaseState::Suspended), and is retried for the rest of
//! the lease.
//!
//! One task renews all leases of a [`Locks`] and its clones. It runs in the runtime of the first acquisition. When that runtime ends, the
//! task moves to a runtime in which a held lease was acquired.
//!
//! # Operations
//!
//! [`LockAdmin`] shows the holders of a lock and for how long, lists held locks, and releases a lock by force. [`Locks::holder`]
//! sets the name of holders.
//!
//! # Metrics
//!
//! With the feature `metrics`, locks report to the `metrics` facade. A metric that an exporter has dropped after its
//! idle timeout appears [again](crate::rate_limit#metrics) at its next use. The label `locks` is the name of the
//! locks; a key is never a label.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_lock_requests_total` | `locks`, `outcome`: `granted`, `busy`, `queue_full`, `failed` by the store, `full` if a detached layer has `max_running` requests, `refused` for any other reason | outcomes of requests for a lock, for [several](Locks::lock_all) at once, or for [any](Segmented::any) segment, unless the caller was dropped |
//! | `tollgate_lock_wait_seconds` | `locks` | the time until a lock was granted, a histogram |
//! | `tollgate_lock_hold_seconds` | `locks` | the time from the grant of a lease to its release, a histogram |
//! | `tollgate_lock_handover_seconds` | `locks`, `way`: `hand`, `message` | the time from one holder to the next, a histogram. `hand`: by a handoff in this process. `message`: since the notification of a release |
//! | `tollgate_lock_fallback_polls_total` | `locks` | polls of waiters without a notification |
//! | `tollgate_lock_failed_renewals_total` | `locks` | renewals that failed, and were tried again while the lease lasted |
//! | `tollgate_lock_lost_total` | `locks`, `reason`: `expired`, `taken`, `max_hold` | leases that were lost, each once, whether a renewal, a deadline or the release found it |
//! | `tollgate_lock_handlers_running` | `locks` | requests of [detached](LockLayer::detached) layers, from the request for the lock until the handler has responded, a gauge |
//! | `tollgate_lock_unprotected_total` | `locks` | requests that a [`LockLayer`] let pass without their lock because the store failed |
//! | `tollgate_lock_store_errors_total` | `locks` | calls for a lock that failed or were late |
//! | `tollgate_lock_circuit_transitions_total` | `locks`, `state`: `open`, `closed` | circuits that opened and closed |
//!
//! # Cancellation
//!
//! You may drop any future at any time, and any lease anywhere, also outside of a runtime. A grant without a caller is released
//! in the background, and a dropped waiter leaves the queue. No lease outlives its `ttl` in any case.
//!
//! An acquisition first waits for pending releases of the same key in its own process, for one [deadline](Locks::deadline) at
//! most. So `try_lock` after `drop(lease)` finds the lock free, for every kind of lock, if both belong to the same `Locks` or a
//! clone. A future may also be kept without polling: see [waiting](#waiting).

mod admin;
mod error;
mod grant;
mod kind;
mod lease;
mod lock_key;
mod locks;
mod multi;
mod options;
mod redlock;
mod release_outcome;
mod run_error;
mod rw;
mod segmented;
mod semaphore;
mod status;
pub mod store;

pub mod fencing;
mod layer;
mod layer_options;
mod lease_guard;
mod rejection;
mod service;

mod acquire;
mod context;
mod delivery;
mod erased;
mod fence_floor;
mod future;
mod jitter;
mod lifo_slot;
mod local_queue;
mod local_queues;
mod locks_state;
mod metrics;
mod passage;
mod release_task;
mod renewal;
mod renewal_schedule;
mod running;
mod shared_call;

pub use self::admin::LockAdmin;
#[cfg(feature = "http")]
pub(crate) use self::context::Held;
pub(crate) use self::error::PartialEffects;
pub use self::error::{Busy, Closed, LockError, LossReason, Lost, Nested, NotReplicated, OtherKind, QueueFull};
#[cfg(feature = "redis")]
pub(crate) use self::fence_floor::FenceFloor;
pub use self::future::{DetachedFuture, ResponseFuture};
pub use self::kind::LockKind;
pub use self::layer::{Attached, Detached, LockLayer, Unkeyed};
pub use self::layer_options::{OnLoss, ReleaseAt};
pub use self::lease::{Lease, LeaseHandle, LeaseState};
pub use self::lease_guard::LeaseGuard;
pub use self::lock_key::LockKey;
pub use self::locks::{LockRequest, Locks};
pub use self::multi::{MultiLease, MultiRequest};
pub use self::options::Replication;
pub use self::redlock::Redlock;
pub use self::rejection::{BindLease, Full, MissingKey, Rejection};
pub use self::release_outcome::ReleaseOutcome;
pub use self::run_error::RunError;
pub use self::rw::RwLocks;
pub use self::segmented::{Segment, SegmentRequest, Segmented};
pub use self::semaphore::Semaphore;
pub use self::service::{Detach, Lock};
pub use self::status::{ForceReleased, LockHolder, LockPage, LockStatus};
pub use crate::store::circuit::CircuitBreaker;
pub use crate::store::cursor::Cursor;
