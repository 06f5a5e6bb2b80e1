use std::fmt;
use std::future::{Future, pending, poll_fn};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use super::error::{LossReason, Lost};
use super::grant::Grant;
use super::lifo_slot::free_lifo_slot;
use super::lock_key::LockKey;
use super::locks_state::LocksState;
use super::release_outcome::ReleaseOutcome;
use super::release_task::ReleaseTask;
use super::shared_call::DetachableCall;
use crate::error::StoreError;

/// A held lock: until it is released, dropped or lost.
///
/// It is renewed in the background while a handle exists. [`reenter`](Self::reenter) makes another handle. Releasing the last
/// handle releases the lock.
///
/// # Loss
///
/// A lease can end while it is held. If the store stops replying, every handle knows of the loss before the store can grant the
/// lock again. The handles need no call for that: they count the ttl from before the command that set the expiry was sent.
///
/// If the store ends the lease, another client can get it before the next renewal reports the loss here. That happens if the key
/// is deleted or evicted, if the lock is [force-released](super::LockAdmin::force_release), or if the server's clock is set
/// forward.
///
/// And a process can be stopped between a [`check`](Self::check) and the next step. So send the [`fence`](Self::fence) with each
/// change, and let the receiver refuse smaller ones.
///
/// # Cancellation
///
/// Dropping the last handle releases the lock in the background, inside or outside of a runtime. `std::mem::forget` keeps the
/// lock until [`max_hold`](super::Locks::max_hold) is over or the process ends.
#[must_use = "the lock is given back when the lease is dropped"]
pub struct Lease {
    inner: Arc<LeaseInner>,
}

/// The state that all handles of one lease share.
struct LeaseInner {
    shared: Arc<LocksState>,
    grant: Arc<Grant>,
    fence: u64,
    since: Instant,
    is_released: bool,
}

/// The state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaseState {
    /// The lock is held.
    Held,
    /// The lock is held, but the last renewal failed. It is retried until the lease ends.
    Suspended,
    /// The lock is lost, or may be. That is final.
    Lost,
}

impl Lease {
    pub(super) fn new(shared: &Arc<LocksState>, grant: &Arc<Grant>, fence: u64, since: Instant) -> Self {
        let (shared, grant) = (Arc::clone(shared), Arc::clone(grant));
        Self { inner: Arc::new(LeaseInner { shared, grant, fence, since, is_released: false }) }
    }

    /// The lock.
    #[must_use]
    pub fn lock(&self) -> &LockKey {
        self.inner.grant.lock()
    }

    /// The number of this grant: larger than that of every earlier grant of this lock by the same backend value and its clones.
    ///
    /// Send it with each change to the protected data, and let the receiver refuse a number smaller than the largest so far:
    /// `UPDATE .. SET fence = $1 .. WHERE fence <= $1`. If no row changed, the holder is too late and must stop. A fence is
    /// below 2^53, so it fits a signed 64-bit column and a JSON number.
    ///
    /// If one primary still remembers the last grant, fences increase across all processes, even if its clock is set back by up to
    /// ten minutes. If the primary has forgotten the last grant, fences increase within each process. Across processes they then increase
    /// only if the primary's clock is not behind the time of that grant: see [fences](super#fences).
    /// [`Redlock`](super::Redlock) has guarantees of its own.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.inner.fence
    }

    /// The current state of the lease.
    #[must_use]
    pub fn state(&self) -> LeaseState {
        let grant = &self.inner.grant;
        match grant.valid_until(Instant::now()) {
            Err(_) => LeaseState::Lost,
            Ok(_) if grant.is_suspended() => LeaseState::Suspended,
            Ok(_) => LeaseState::Held,
        }
    }

    /// Whether the lock is still held. Cheap: reads the local clock only. Call it before a step that cannot be undone.
    ///
    /// Uses the clock of [`tokio::time::Instant`], which stops on Linux and some other systems while the machine is suspended.
    /// After that it may return `Ok` for an ended lease, until the next renewal.
    ///
    /// # Errors
    ///
    /// How the lease was lost.
    pub fn check(&self) -> Result<(), Lost> {
        let grant = &self.inner.grant;
        grant.valid_until(Instant::now()).map(drop).map_err(|reason| Lost::new(*grant.lock(), reason))
    }

    /// How long the lock is held if no further renewal succeeds. Zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let now = Instant::now();
        self.inner.grant.valid_until(now).map_or(Duration::ZERO, |until| until - now)
    }

    /// Waits until the lease is lost; a healthy one never is. Use it in `select!`, beside the work.
    pub fn lost(&self) -> impl Future<Output = Lost> + Send + use<'_> {
        let grant = &self.inner.grant;
        async move { Lost::new(*grant.lock(), grant.lost().await) }
    }

    /// Waits until a waiter [asks](super::Locks::request_release) for the lock, or returns at once if one did. Use it in
    /// `select!`, beside the work, to finish early. You may ignore the request.
    ///
    /// # Cancellation
    ///
    /// May be dropped and called again. Requests of other processes arrive only while this is awaited; a waiter repeats them
    /// once a second.
    pub fn release_requested(&self) -> impl Future<Output = ()> + Send + use<'_> {
        self.inner.grant.release_requested(Arc::clone(&self.inner.shared.store))
    }

    /// Another handle of this lease, with the same fence, for a part of the work that takes the lock itself. The last handle
    /// releases the lock.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let locks = Locks::new(MemoryBackend::new(), "orders");
    /// let lease = locks.lock("order:42").await?;
    /// let inner = lease.reenter();
    /// lease.release().await?;
    /// assert!(locks.try_lock("order:42").await.is_err());
    /// inner.release().await?;
    /// assert!(locks.try_lock("order:42").await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    pub fn reenter(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }

    /// A handle that observes this lease without keeping it.
    #[must_use]
    pub fn view(&self) -> LeaseHandle {
        LeaseHandle {
            inner: Arc::downgrade(&self.inner),
            grant: Arc::clone(&self.inner.grant),
            fence: self.inner.fence,
        }
    }

    /// Releases the lock.
    ///
    /// If the store no longer has the lease, the outcome is [`ReleaseOutcome::Lost`]. The log and the [metrics](super#metrics)
    /// report such a loss, also for dropped leases. If the lease is handed off to the next waiter of this process, the outcome is
    /// [`ReleaseOutcome::Released`] without a store call. Only the last holder then learns whether the store still had the lease.
    ///
    /// # Errors
    ///
    /// If the store does not reply. Whether the lock is free is unknown then; the release is retried in the background until the
    /// lease has expired.
    ///
    /// # Cancellation
    ///
    /// Nothing happens before the future is polled. From then on, or if it is dropped, the lock is released in the background,
    /// whether or not you poll the future to its end.
    pub async fn release(self) -> Result<ReleaseOutcome, StoreError> {
        let Some(mut inner) = Arc::into_inner(self.inner) else { return Ok(ReleaseOutcome::Shared) };
        let now = Instant::now();
        let is_lost = inner.grant.valid_until(now).is_err();
        let outcome = if is_lost { ReleaseOutcome::Lost } else { ReleaseOutcome::Released };
        // Without a task, the lease was handed off to a local waiter.
        let Some(mut task) = inner.release_or_hand_off(now) else { return Ok(outcome) };
        let (shared, ttl) = (Arc::clone(&inner.shared), inner.grant.ttl());
        drop(inner);
        let call = Box::pin(async move { task.run(outcome).await });
        DetachableCall::new(shared, ttl, call).await
    }

    /// Waits until one of several leases is lost.
    pub(super) async fn first_lost(leases: &[Self]) -> Lost {
        let mut losses: Vec<_> = leases.iter().map(|lease| Box::pin(lease.lost())).collect();
        poll_fn(|cx| {
            let mut lost = losses.iter_mut().map(|loss| loss.as_mut().poll(cx));
            lost.find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Like [`lost`](Self::lost), but the future does not borrow the lease. Meaningless after the release.
    pub(super) fn loss(&self) -> impl Future<Output = Lost> + Send + use<> {
        let grant = Arc::clone(&self.inner.grant);
        async move { Lost::new(*grant.lock(), grant.lost().await) }
    }

    pub(super) fn grant(&self) -> &Arc<Grant> {
        &self.inner.grant
    }

    /// When this holder got the lease.
    pub(super) fn since(&self) -> Instant {
        self.inner.since
    }

    pub(super) fn shared(&self) -> &Arc<LocksState> {
        &self.inner.shared
    }

    /// Drops a handle that no caller received, without releasing its lease.
    pub(super) fn forget(mut self) {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.is_released = true;
        }
    }
}

impl LeaseInner {
    fn release_or_hand_off(&mut self, now: Instant) -> Option<ReleaseTask> {
        self.is_released = true;
        self.shared.metrics().held(now - self.since);
        self.shared.record_loss(&self.grant, now);
        // Observers of this grant must see its end before the next holder gets the lease.
        self.grant.notify_waiters();
        self.shared.release_or_hand_off(&self.grant, now)
    }
}

impl Drop for LeaseInner {
    fn drop(&mut self) {
        if self.is_released {
            return;
        }
        if let Some(task) = self.release_or_hand_off(Instant::now()) {
            task.in_background();
        }
        // So that another worker thread can run the release task or the next holder, if the caller blocks this thread.
        free_lifo_slot();
    }
}

/// Observes a [`Lease`] without keeping it: the layer adds it to the extensions of a request.
///
/// The lock is released with the lease, however many observers there are. After the release [`check`](Self::check) fails.
///
/// A request that passes without its lock, for instance with a safe method, has no `LeaseHandle`, even inside of another lock layer. With
/// the feature `axum`, a handler can take a `LeaseHandle` as an argument, or an `Option` of it where there may be none.
#[derive(Clone)]
pub struct LeaseHandle {
    inner: Weak<LeaseInner>,
    grant: Arc<Grant>,
    fence: u64,
}

impl LeaseHandle {
    /// The lock.
    #[must_use]
    pub fn lock(&self) -> &LockKey {
        self.grant.lock()
    }

    /// The number of this grant: see [`Lease::fence`].
    #[must_use]
    pub const fn fence(&self) -> u64 {
        self.fence
    }

    /// The current state of the lease: see [`Lease::state`]. [`Lost`](LeaseState::Lost) after the release.
    #[must_use]
    pub fn state(&self) -> LeaseState {
        match self.until() {
            Err(_) => LeaseState::Lost,
            Ok(_) if self.grant.is_suspended() => LeaseState::Suspended,
            Ok(_) => LeaseState::Held,
        }
    }

    /// Whether the lock is still held: see [`Lease::check`].
    ///
    /// # Errors
    ///
    /// How the lease was lost, or that it was released.
    pub fn check(&self) -> Result<(), Lost> {
        self.until().map(drop)
    }

    /// How long the lock is held if no further renewal succeeds: see [`Lease::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.until().map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Waits until the lease is lost or released.
    pub async fn lost(&self) -> Lost {
        self.grant.until_err(|| self.until()).await
    }

    /// Waits until a waiter asks for the lock: see [`Lease::release_requested`]. Never returns if the lease was released before.
    pub async fn release_requested(&self) {
        if let Some(store) = self.inner.upgrade().map(|inner| Arc::clone(&inner.shared.store)) {
            self.grant.release_requested(store).await;
        }
        // After a handoff, the request went to the next holder.
        if self.inner.strong_count() == 0 {
            pending::<()>().await;
        }
    }

    /// A handle that keeps the lock, unless it was released: see [`Lease::reenter`].
    #[must_use]
    pub fn reenter(&self) -> Option<Lease> {
        Some(Lease { inner: self.inner.upgrade()? })
    }

    fn until(&self) -> Result<Instant, Lost> {
        let lost = |reason| Lost::new(*self.lock(), reason);
        // After a handoff, the lease belongs to another holder.
        if self.inner.strong_count() == 0 {
            return Err(lost(LossReason::Released));
        }
        self.grant.valid_until(Instant::now()).map_err(lost)
    }
}

impl fmt::Debug for LeaseHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseHandle").field("lock", self.lock()).field("fence", &self.fence).finish_non_exhaustive()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("lock", self.lock())
            .field("fence", &self.fence())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
