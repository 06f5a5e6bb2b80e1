//! One at a time, however many processes there are: locks that end by themselves, say when they are lost, and can be waited
//! for.
//!
//! [`Locks`] hands out a [`Lease`] by key; [`LockLayer`] does so in front of a tower service. The lease lies in a backend: in this process ([`MemoryBackend`](crate::MemoryBackend))
//! or in Redis, where all processes see it.
//!
//! # A lease, and not a lock
//!
//! Nothing in a network can keep a holder from dying, or from standing still. So what is called a lock here ends by itself, some
//! time after its holder was last heard of ([`ttl`](Locks::ttl)), and a holder that is alive renews it. What follows from that:
//!
//! * On one Redis primary there is at most one live lease for a key.
//! * The holder of a lease that runs out knows so *before* the lock can be granted to somebody else. The deadline is counted from before the
//!   command was sent that set the expiry, with a margin for clocks of different speed (1 % and 2 ms), and is kept by the clock:
//!   no answer has to come for that. [`Locks::run`] drops its body then.
//! * A lease that is taken away in the store is known to be lost with the next renewal, after a third of its time, or when it is given back. It may
//!   be somebody else's before: where its key is deleted or evicted, by [`LockAdmin::force_unlock`], or if the clock of the server is set forward.
//!   [`Locks::run`] answers [`RunError::Unprotected`] if the release finds that. Each loss is logged at WARN and counted once, whoever finds it.
//! * A process that stands still (a blocked thread, a stopped container) cannot know anything until it goes on. Nor can one on a machine that
//!   was suspended (a laptop, a virtual machine), and not even then where the clock of the process has not gone on meanwhile, as
//!   on Linux: [`Lease::check`] may take the lease for ours until a renewal is answered. This is what
//!   [`Lease::fence`] is for: each grant has a larger number than all before it, and whatever the lock protects refuses a smaller
//!   number than it has seen. Use it where two at a time would be worse than a failure.
//! * A failover to a replica forgets what was not replicated, and so may grant a lock that is held; [`Locks::replication`] makes that less likely. What that does to fences is said [below](#fences).
//!
//! # Fences
//!
//! A fence is the time of the store's clock in microseconds, or one more than the largest that is known where that is larger. Known are the last fence
//! of the key, which the store remembers for ten minutes after the lease, and the largest fence that any grant has shown to the
//! process, which each acquisition passes on. A backend and its clones have one such number; it is not shared between two backends.
//!
//! * Fences of a key rise whatever happens to processes, and if the clock of the store is set back by up to ten minutes.
//! * If the store forgets the key (`FLUSHALL`, eviction, a failover that loses the last grant), fences still rise within each process, whatever the
//!   clock does.
//! * What remains: the store has forgotten the last fence of a key *and* its clock is behind the time of that grant. Then a process
//!   that has not seen a fence as large, as one that has just started, may be granted a smaller one than another process before it.
//! * A reply with a number of 2^53 - 2^40 or more is not remembered, so one wrong reply cannot use up the numbers below 2^53.
//!
//! # One kind for a key
//!
//! While a key is held it is of one kind: exclusive ([`Locks`], fair or not), read/write ([`RwLocks`]) or a semaphore ([`Semaphore`], with whatever
//! number of permits). A claim of another kind is refused with [`LockError::OtherKind`], which names both. Each type has its own default
//! namespace, so their keys are apart unless you give them the same one.
//!
//! [`Redlock`] goes on while some of several independent servers are down, with promises of its own. If what you need is consensus, use
//! etcd or ZooKeeper, and fence all the same.
//!
//! # Examples
//!
//! As it comes:
//!
//! ```
//! use tollgate::{Locks, MemoryBackend};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let locks = Locks::new(MemoryBackend::new());
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
//! And with everything said, the loss of the lease handled by hand:
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{LockError, Locks, MemoryBackend};
//!
//! # async fn work(fence: u64) -> Result<(), tollgate::BoxError> { assert!(fence > 0); Ok(()) }
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
//! let locks = Locks::new(MemoryBackend::new())
//!     .namespace("orders")
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
//! [`Locks::lock_all`] takes several keys or none. [`Semaphore`] lets in several at a time, [`RwLocks`] many readers or one writer.
//! What would be one hot key can be [`Segmented`]: any of several locks will do.
//!
//! # In front of a service
//!
//! [`LockLayer`] lets one request at a time through for each key. As it comes, requests that find the lock held are turned away
//! with 409 and `Retry-After`, GET and its like need no lock, and the lock is held until the body of the answer has ended:
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
//! let lock = LockLayer::new(MemoryBackend::new())
//!     .namespace("payments") // or it is the same lock as that of any other layer with the same key
//!     .key(|request: &Request| request.uri().path().to_owned());
//! let app: Router = Router::new().route("/orders/{id}/payment", post(pay)).layer(lock);
//! # }
//! ```
//!
//! With everything said:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use std::time::Duration;
//! use tollgate::http::header;
//! use tollgate::lock::{OnLoss, OnMissingKey, OnStoreError, ReleaseAt, Reach};
//! use tollgate::responder::BusyStatus;
//! use tollgate::{HttpResponder, LockLayer, MemoryBackend};
//!
//! # fn main() -> Result<(), tollgate::ConfigError> {
//! let lock = LockLayer::new(MemoryBackend::new())
//!     .require(Reach::Process)? // Reach::Redis would refuse the memory backend
//!     .namespace("uploads")
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
//! | held by somebody else, also after waiting | 409 (or 423, 429), `Retry-After` | `busy` | `ABORTED`, `RetryInfo` |
//! | too many wait | 503, `Retry-After` | `queue-full` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | too many of a [detached](LockLayer::detached) layer are at work | 503, `Retry-After` | `about:blank` | `RESOURCE_EXHAUSTED`, `RetryInfo` |
//! | the store fails, or too few replicas know of the lease | 503, `Retry-After` | `unavailable` | `UNAVAILABLE`, `RetryInfo` |
//! | the lease is lost while the handler runs, which is cancelled | 503 | `lost` | `ABORTED`, "do not retry" |
//! | the lease is lost while the body is sent | the body fails | | `ABORTED` in the trailers |
//! | no key | 400 | `about:blank` | `INVALID_ARGUMENT` |
//! | a [setting](LockLayer::new) that cannot work, or a key that is held as [another kind](#one-kind-for-a-key) | 500 | `about:blank` | `INTERNAL` |
//!
//! The `type` of a problem document is `urn:tollgate:lock:` with the name behind it.
//!
//! Whatever ends a request from outside ends its waiting, too: a layer with a time limit, a client that goes away, and the
//! `grpc-timeout` of a call, which servers such as tonic's look at outside of all layers. It is not looked at here.
//!
//! [`LockLayer::with_semaphore`] lets several requests of a key through at a time, [`LockLayer::with_rw_locks`] those that change nothing together.
//!
//! A client that goes away takes the handler with it, and the lock is given back; [`LockLayer::detached`] lets it come to its end
//! instead, for up to 10,000 requests at work unless [`max_running`](LockLayer::max_running) says otherwise. A handler that goes on inside of an [idempotency layer](crate::idempotency#together-with-other-layers) keeps the lock until its end. A store that fails again and again is not asked but now and then, see [`CircuitBreaker`]. Put a rate limit outside of this
//! layer, and a timeout for the handler inside. What the handler calls can refuse who comes too late: [`fencing`].
//!
//! # Waiting
//!
//! Those who wait in one process stand in one line and are served in order. Only the first of the line asks the store, and the
//! lease goes from hand to hand inside the process, a new fence with each hand, for up to 16 grants or 100 ms at a time. Between
//! processes whoever is first gets the lock, unless told otherwise; that is not fair, but those who were told of it at the same time get a start. Who waits is told by
//! a message when the lock is given back, and looks once a second in any case, since messages get lost.
//!
//! [`Locks::fair`] and [`RwLocks`] are fair between processes: there the store keeps one line for all who wait, by its own clock. Each
//! of them asks by itself and asks again once a second, which keeps its place; whoever has not asked for three seconds, being dead or
//! stopped, has lost it, and holds the others up for no longer than that and one more second. Whoever learns of a grant only after that
//! lease has ended has lost the turn, and goes to the end of the line. Only who is next is told when the
//! lock is given back. The price is a command or two more for each grant that was waited for, and no lease goes from hand to hand inside
//! a process. Up to 10,000 stand in one line.
//!
//! A waiter whose task stops polling it holds up no other waiter. A call of the store that takes longer than 50 ms goes on in a task of the locks.
//! A lease that its caller does not pick up within 250 ms, or a third of the [ttl](Locks::ttl) if that is shorter, goes to the next waiter.
//! The caller keeps its position among the waiters of its process, and its own [`wait`](Locks::wait). Once it is polled again it waits on, or gets
//! [`LockError::Busy`] if its wait is over. In fair locks and read/write locks it joins the queue of the store again, at the end.
//!
//! [`Locks::request_release`] has those who wait ask the holder to give the lock back: [`Lease::asked`] tells the holder, who decides.
//!
//! # What is asked of the store
//!
//! Taking and giving back a free lock are one command each. On one Redis server those that are taken at the same time share a command, and so do those that are given
//! back. A lease is renewed after a third of its time; leases that are due
//! at the same time share a command, on a connection of their own. A renewal that fails makes the lease
//! [suspended](LeaseState::Suspended) and is tried again for as long as the lease lasts.
//! One task renews all leases of a [`Locks`] and its clones. It runs in the runtime where the first lease was taken, which has to be at work for that; when that
//! runtime ends, it moves to another one in which a lease was taken.
//!
//! # Operations
//!
//! [`LockAdmin`] says who holds a lock and for how long, lists those that are held, and takes one away. [`Locks::holder`] gives holders a name for
//! that.
//!
//! # Metrics
//!
//! With the feature `metrics` locks count with the `metrics` facade. A metric that an
//! exporter has dropped after its idle timeout appears [again](crate::rate_limit#metrics) when it is next used. The label
//! `locks` is the namespace of the first lock that one [`Locks`] and its clones were asked for; a key is never a label.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_lock_requests_total` | `locks`, `outcome`: `granted`, `busy`, `queue_full`, `failed` by the store, `full` where a detached layer has too many requests at work, `refused` for any other reason | what became of asking for a lock, or for [several](Locks::lock_all) at once, or for [any](Segmented::any) of some segments, unless nobody waited for that |
//! | `tollgate_lock_wait_seconds` | `locks` | the time until it was granted, a histogram |
//! | `tollgate_lock_hold_seconds` | `locks` | the time until it was given back, a histogram |
//! | `tollgate_lock_handover_seconds` | `locks`, `way`: `hand`, `message` | the time from one holder to the next, a histogram: in this process, or since the message that another one gave the lock back |
//! | `tollgate_lock_fallback_polls_total` | `locks` | how often somebody who waits looked without being told |
//! | `tollgate_lock_failed_renewals_total` | `locks` | renewals that failed, and were tried again while the lease lasted |
//! | `tollgate_lock_lost_total` | `locks`, `reason`: `expired`, `taken`, `max_hold` | leases that were lost, each once, whether a renewal, a deadline or the release found it |
//! | `tollgate_lock_handlers_running` | `locks` | requests of [detached](LockLayer::detached) layers at work, from asking for the lock until the handler has answered, a gauge |
//! | `tollgate_lock_unprotected_total` | `locks` | requests that a [`LockLayer`] let pass without their lock because the store failed |
//! | `tollgate_lock_store_errors_total` | `locks` | calls for a lock that failed or were late |
//! | `tollgate_lock_circuit_transitions_total` | `locks`, `state`: `open`, `closed` | circuits that opened and closed |
//!
//! # Cancellation
//!
//! Any future may be dropped at any time, and any lease anywhere, also where there is no runtime. What was granted to nobody is
//! given back in the background; who stands in line leaves it. Nothing is held beyond its time to live in any case.
//!
//! An acquisition first waits for the leases of the same key that its own process is giving back, for one [deadline](Locks::deadline) at most.
//! So `try_lock` after `drop(lease)` finds the lock free, for every kind of lock, if both are of the same `Locks` or a clone of it. A future may
//! also be kept without being polled: see [waiting](#waiting).

mod admin;
mod error;
mod grant;
mod kind;
mod lease;
mod lock_key;
mod locks;
mod multi;
mod redlock;
mod run_error;
mod rw;
mod segmented;
mod semaphore;
mod store;

pub mod fencing;
mod layer;
mod rejection;
mod service;

mod acquire;
mod context;
mod delivery;
mod erased;
mod fence_floor;
mod future;
mod gate;
mod local_queue;
mod locks_state;
mod metrics;
mod pickup;
mod release_task;
mod renewal;
mod running;
mod together;

pub use self::admin::{Cursor, ForceReleased, LockAdmin, LockHolder, LockPage, LockRegistry, LockStatus};
#[cfg(feature = "http")]
pub(crate) use self::context::Held;
pub(crate) use self::error::PartialEffects;
pub use self::error::{Busy, Closed, LockError, LossReason, Lost, Nested, NotReplicated, OtherKind, QueueFull};
#[cfg(feature = "redis")]
pub(crate) use self::fence_floor::FenceFloor;
pub use self::future::{DetachedFuture, ResponseFuture};
pub use self::kind::LockKind;
pub use self::layer::{Attached, Detached, LeaseGuard, LockLayer, OnLoss, OnMissingKey, OnStoreError, ReleaseAt};
pub use self::lease::{Lease, LeaseHandle, LeaseState, ReleaseOutcome};
pub(crate) use self::lock_key::KnownHash;
pub use self::lock_key::LockKey;
pub use self::locks::{LockRequest, Locks, Replication};
pub use self::multi::{MultiLease, MultiRequest};
pub use self::redlock::Redlock;
pub use self::rejection::{BindLease, Full, MissingKey, Rejection};
pub use self::run_error::RunError;
pub use self::rw::RwLocks;
pub use self::segmented::{Segment, SegmentRequest, Segmented};
pub use self::semaphore::Semaphore;
pub use self::service::{Detach, Lock};
pub use self::store::{Acquired, Claim, Line, LockStore, Notifications, Reach, Released, Renewal, Replicas, Token};
pub use crate::store::circuit::CircuitBreaker;
