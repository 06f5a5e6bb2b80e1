use std::fmt;
use std::future::{Future, pending};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::error::{LossReason, Lost};
use super::grant::Grant;
use super::lock_key::LockKey;
use super::locks_state::Shared;
use super::pickup::Attended;
use super::release_task::ReleaseTask;
use crate::error::StoreError;

/// A lock that is held: until it is given back, dropped or lost.
///
/// It is renewed in the background for as long as there is a handle. [`reenter`](Self::reenter) makes another handle; the lock
/// is given back with the last one.
///
/// # Loss
///
/// A lease can end while it is held. If nobody answers the renewals, every handle knows of that before the store can grant the lock to
/// somebody else, and without asking anybody, because the deadline is counted from before the command was sent that set the
/// lease's expiry. If it is taken away in the store (the key is deleted or evicted, [force-unlocked](super::LockAdmin::force_unlock), or the
/// clock of the server is set forward), somebody else can have it before that is known here, with the next renewal. And nothing
/// in the process can help against the process itself being stopped between a [`check`](Self::check) and what it does next. So
/// give the [`fence`](Self::fence) to what is being changed and let that refuse a smaller one than it has seen.
///
/// # Cancellation
///
/// Dropping the last handle gives the lock back in the background, in or out of a runtime. `std::mem::forget` keeps the
/// lock until [`max_hold`](super::Locks::max_hold) ends, or the process.
#[must_use = "the lock is given back when the lease is dropped"]
pub struct Lease {
    grant: Arc<LeaseInner>,
}

/// What all handles of one lease share.
struct LeaseInner {
    home: Arc<Shared>,
    hold: Arc<Grant>,
    fence: u64,
    since: Instant,
    is_returned: bool,
}

/// How a lease stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaseState {
    /// The lock is ours.
    Held,
    /// The lock is ours, but the last renewal failed. It is being tried again, and time is running out.
    Suspended,
    /// The lock is not ours any more, or cannot be told to be. That is for good.
    Lost,
}

/// What became of a handle that was given back. What is further down is worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The lock is free, or somebody else's by now.
    Released,
    /// There are other handles of this lease, which keep the lock.
    Shared,
    /// The lock is free, or somebody else's by now, and it is not known whether the lease was still ours: a connection broke before the
    /// answer came, and over another one the store has found nothing of the lease; or the answer came so late that the lease may have
    /// ended by itself. Nearly always it was given back over the first one. This is not counted as a loss, and
    /// [`run`](super::Locks::run) answers as if the lease had been ours. It was lost before if the store had forgotten it, as after a failover, or if it was
    /// [taken away](super::LockAdmin::force_unlock); by our own clock it had not ended. What has to be right in any case takes the
    /// [fence](Lease::fence).
    Uncertain,
    /// The lease had been lost before, or the store does not know it any more: somebody else may have had the lock already.
    Lost,
}

impl Lease {
    pub(super) fn new(home: &Arc<Shared>, hold: &Arc<Grant>, fence: u64, since: Instant) -> Self {
        let (home, hold) = (Arc::clone(home), Arc::clone(hold));
        Self { grant: Arc::new(LeaseInner { home, hold, fence, since, is_returned: false }) }
    }

    /// Which lock.
    #[must_use]
    pub fn lock(&self) -> &LockKey {
        self.grant.hold.lock()
    }

    /// The number of this grant: larger than that of every grant of this lock before it.
    ///
    /// Send it along with each change to what the lock protects, and let the receiver refuse a number that is smaller than the
    /// largest it has seen: `UPDATE .. SET fence = $1 .. WHERE fence <= $1`. Where no row was changed the holder is too late, and has to stop.
    /// A fence is below 2^53, so it fits a signed column of 64 bits and a number of JSON.
    ///
    /// On one primary that remembers the last grant this holds whatever happens to processes, and if its clock is set back by up to ten minutes.
    /// If it has forgotten the last grant, this holds within each process, and between processes as long as its clock is not behind the
    /// time of that grant: see [fences](super#fences). [`Redlock`](super::Redlock) has promises of its own.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.grant.fence
    }

    /// How the lease stands at this moment.
    #[must_use]
    pub fn state(&self) -> LeaseState {
        let hold = &self.grant.hold;
        match hold.look(Instant::now()) {
            Err(_) => LeaseState::Lost,
            Ok(_) if hold.is_suspended() => LeaseState::Suspended,
            Ok(_) => LeaseState::Held,
        }
    }

    /// Whether the lock is still ours. Cheap: asks the clock and nobody else. A good thing to do before a step that cannot be
    /// taken back.
    ///
    /// The clock is that of [`tokio::time::Instant`], which on Linux and some other systems stands still while the machine is suspended. After
    /// that this may be `Ok` for a lease that has ended, until a renewal is answered.
    ///
    /// # Errors
    ///
    /// Says how the lease was lost.
    pub fn check(&self) -> Result<(), Lost> {
        let hold = &self.grant.hold;
        hold.look(Instant::now()).map(drop).map_err(|reason| Lost::new(*hold.lock(), reason))
    }

    /// For how long the lock is ours, should no renewal succeed any more. Zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let now = Instant::now();
        self.grant.hold.look(now).map_or(Duration::ZERO, |until| until - now)
    }

    /// Waits until the lease is lost, which a healthy one never is. For `select!`, beside the work.
    pub fn lost(&self) -> impl Future<Output = Lost> + Send + use<'_> {
        let hold = &self.grant.hold;
        async move { Lost::new(*hold.lock(), hold.lost().await) }
    }

    /// Waits until somebody who waits for the lock [asks](super::Locks::request_release) for it, or has asked before. For `select!`, beside the work: to come to an end
    /// sooner than one would otherwise, or not to care.
    ///
    /// # Cancellation
    ///
    /// May be dropped and called again. Who asks in another process is heard only while somebody waits here, and asks again once a second.
    pub fn asked(&self) -> impl Future<Output = ()> + Send + use<'_> {
        self.grant.hold.asked(Arc::clone(&self.grant.home.store))
    }

    /// Another handle of this lease, with the same fence, for a part of the work that takes the lock itself. The lock is given
    /// back with the last handle.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let locks = Locks::new(MemoryBackend::new());
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
        Self { grant: Arc::clone(&self.grant) }
    }

    /// Something that looks at this lease and keeps nothing, to be handed around.
    #[must_use]
    pub fn view(&self) -> LeaseHandle {
        LeaseHandle { grant: Arc::downgrade(&self.grant), hold: Arc::clone(&self.grant.hold), fence: self.grant.fence }
    }

    /// Gives the lock back, and says when that is done.
    ///
    /// If the store does not know the lease any more, the answer is [`ReleaseOutcome::Lost`]. The log and the
    /// [metrics](super#metrics) tell of that, also of a lease that is dropped. A lease that goes on to the next
    /// waiter of this process is [`ReleaseOutcome::Released`] without asking the store; its last holder finds out.
    ///
    /// # Errors
    ///
    /// If the store does not answer. Whether the lock is free is not known then; giving it back is tried again in the background
    /// until it has expired.
    ///
    /// # Cancellation
    ///
    /// Nothing happens before the future is polled. From then on, or if it is dropped, the lock is released in the background, whether or not
    /// the future is polled to its end.
    pub async fn release(self) -> Result<ReleaseOutcome, StoreError> {
        let Some(mut grant) = Arc::into_inner(self.grant) else { return Ok(ReleaseOutcome::Shared) };
        let now = Instant::now();
        let is_lost = grant.hold.look(now).is_err();
        let outcome = if is_lost { ReleaseOutcome::Lost } else { ReleaseOutcome::Released };
        // Without a task the lease was handed off to a local waiter, or nothing is left of it.
        let Some(mut task) = grant.give_back(now) else { return Ok(outcome) };
        let (home, ttl) = (Arc::clone(&grant.home), grant.hold.ttl());
        drop(grant);
        let call = Box::pin(async move { task.carry_out(outcome).await });
        Attended::new(home, ttl, call).await
    }

    /// [`lost`](Self::lost) for whoever has the lease beside it. Means nothing once the lease was given back.
    pub(super) fn loss(&self) -> impl Future<Output = Lost> + Send + use<> {
        let hold = Arc::clone(&self.grant.hold);
        async move { Lost::new(*hold.lock(), hold.lost().await) }
    }

    pub(super) fn hold(&self) -> &Arc<Grant> {
        &self.grant.hold
    }

    /// Since when it is somebody's.
    pub(super) fn since(&self) -> Instant {
        self.grant.since
    }

    pub(super) fn home(&self) -> &Arc<Shared> {
        &self.grant.home
    }

    /// Drops a handle that nobody has had, and that is not to give anything back.
    pub(super) fn forget(mut self) {
        if let Some(grant) = Arc::get_mut(&mut self.grant) {
            grant.is_returned = true;
        }
    }
}

impl LeaseInner {
    fn give_back(&mut self, now: Instant) -> Option<ReleaseTask> {
        self.is_returned = true;
        self.home.meters(self.hold.lock()).held(now - self.since);
        self.home.note_loss(&self.hold, now);
        // Nobody is to have it before those who look at this grant can know that it is over.
        self.hold.tell();
        self.home.give_back(&self.hold, now)
    }
}

impl Drop for LeaseInner {
    fn drop(&mut self) {
        if self.is_returned {
            return;
        }
        if let Some(errand) = self.give_back(Instant::now()) {
            errand.in_background();
        }
        // For the task that gives it back, or for the next holder.
        Shared::make_way();
    }
}

/// A look at a [`Lease`], without a share in it: what a request carries in its extensions.
///
/// The lock is given back when the lease is, whoever has a view. What becomes of the lease is lost on a view from then on:
/// [`check`](Self::check) fails.
///
/// A request that passes without its lock has none, as with a safe method, also where it has that of a layer further out. With the feature `axum` it is an argument that a handler can take: `LeaseHandle`, or an
/// `Option` of it where there may be none.
#[derive(Clone)]
pub struct LeaseHandle {
    grant: Weak<LeaseInner>,
    hold: Arc<Grant>,
    fence: u64,
}

impl LeaseHandle {
    /// Which lock.
    #[must_use]
    pub fn lock(&self) -> &LockKey {
        self.hold.lock()
    }

    /// The number of this grant: see [`Lease::fence`].
    #[must_use]
    pub const fn fence(&self) -> u64 {
        self.fence
    }

    /// How the lease stands at this moment: see [`Lease::state`]. [`Lost`](LeaseState::Lost) once it was given back.
    #[must_use]
    pub fn state(&self) -> LeaseState {
        match self.until() {
            Err(_) => LeaseState::Lost,
            Ok(_) if self.hold.is_suspended() => LeaseState::Suspended,
            Ok(_) => LeaseState::Held,
        }
    }

    /// Whether the lock is still ours: see [`Lease::check`].
    ///
    /// # Errors
    ///
    /// Says how the lease was lost, or that it was given back.
    pub fn check(&self) -> Result<(), Lost> {
        self.until().map(drop)
    }

    /// For how long the lock is ours, should no renewal succeed any more: see [`Lease::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.until().map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Waits until the lease is lost, or given back.
    pub async fn lost(&self) -> Lost {
        self.hold.over(|| self.until()).await
    }

    /// Waits until somebody asks for the lock: see [`Lease::asked`]. For ever if it was given back before.
    pub async fn asked(&self) {
        if let Some(store) = self.grant.upgrade().map(|grant| Arc::clone(&grant.home.store)) {
            self.hold.asked(store).await;
        }
        // Whoever has it from hand to hand by now was asked, and not this one.
        if self.grant.strong_count() == 0 {
            pending::<()>().await;
        }
    }

    /// A handle that keeps the lock, if it was not given back yet: see [`Lease::reenter`].
    #[must_use]
    pub fn reenter(&self) -> Option<Lease> {
        Some(Lease { grant: self.grant.upgrade()? })
    }

    fn until(&self) -> Result<Instant, Lost> {
        let lost = |reason| Lost::new(*self.lock(), reason);
        // Somebody else may have it from hand to hand by now.
        if self.grant.strong_count() == 0 {
            return Err(lost(LossReason::GivenBack));
        }
        self.hold.look(Instant::now()).map_err(lost)
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
