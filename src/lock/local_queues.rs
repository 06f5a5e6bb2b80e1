//! The local wait queues of one `Locks` and its clones, one for each key. [`LocalQueue`] decides who is next. This module then hands the
//! lease, or the right to call the store, to that caller.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{Instant, timeout};

use super::error::{Busy, LockError, NotReplicated, QueueFull};
use super::grant::Grant;
use super::lease::Lease;
use super::local_queue::{LeaderState, LocalQueue, Position, ReleaseTarget};
use super::lock_key::LockKey;
use super::locks_state::LocksState;
use super::options::AcquireOptions;
use super::release_task::ReleaseTask;
use super::store::Notifications;
use crate::error::StoreError;
use crate::identity_hasher::IdentityBuildHasher;

/// Enough shards that threads rarely wait for the same one.
const SHARDS: usize = 16;

/// The locks that callers of one `Locks` and its clones hold or want. Other locks have no entry.
pub(super) struct LocalQueues {
    shards: [Mutex<Shard>; SHARDS],
    // The number of queues, of locks with fair callers, and of permits of unqueued callers. A caller increments it and then checks whether
    // the locks are closed. A shutdown closes them and then reads it. With `SeqCst`, either the shutdown sees the new number, or the caller
    // sees that the locks are closed.
    active: AtomicUsize,
    next_position: AtomicU64,
    // The number of pending releases in the shards.
    releases: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    queues: HashMap<LockKey, KeyQueue, IdentityBuildHasher>,
    // For each fair lock, the number of its callers, including the first one, which does not wait. Their queue is in the store.
    fair_callers: HashMap<LockKey, usize, IdentityBuildHasher>,
    // Pending releases of leases that have no local queue.
    releases: HashMap<LockKey, SmallVec<[Arc<Semaphore>; 1]>, IdentityBuildHasher>,
}

/// The queue of a key, and the store's last failure to grant it.
struct KeyQueue {
    queue: LocalQueue<Arc<Grant>, Waiter>,
    // How long the store may take to answer the leader if the leader requires replicas. Zero if it requires none.
    replication_timeout: Duration,
    // The last failure, unless the lease is held by this process.
    last_failure: Option<Failure>,
    // Notifies callers that wait for the next failure, if there are any.
    failure_sender: Option<watch::Sender<Option<Failure>>>,
}

/// Why the store has not granted a lease, for all callers in this process.
#[derive(Clone)]
pub(super) enum Failure {
    /// Others hold the lease until this instant, or longer if they renew it.
    Busy(Instant),
    /// Only this many replicas have the lease. `until` is the end of the leader's wait, or of the TTL if that is earlier.
    NotReplicated { replicas: u32, until: Instant },
    /// The store failed.
    Failed(StoreError),
}

/// Receives the failures of the leader. Closed when there is no leader.
pub(super) type FailureWatch = watch::Receiver<Option<Failure>>;

struct Waiter {
    // The TTL and the number of replicas that a lease by handoff must have; `None` to refuse such leases.
    handoff_terms: Option<(Duration, u32)>,
    // How long the store may take to answer this caller if it requires replicas. Zero if it requires none.
    replication_timeout: Duration,
    max_hold: Option<Duration>,
    // Whether to send the holder a release request when this caller is first.
    requests_release: bool,
    handoff: oneshot::Sender<Handoff>,
}

/// What a queued caller receives.
pub(super) enum Handoff {
    /// The lease of the previous holder.
    Lease(Lease),
    /// The right to call the store.
    LeaderPermit(LeaderPermit),
}

/// What a caller finds when it enters.
pub(super) enum Entered {
    LeaderPermit(LeaderPermit),
    Queue {
        waiter: QueuedWaiter,
        is_free_soon: bool,
        failures: Option<FailureWatch>,
    },
    /// A caller whose wait is zero or over. It only awaits the next failure of the leader, and returns it as its own.
    Watching(FailureWatch),
}

/// The right to call the store for a lock. Only one queued caller of a lock has it at a time. Fair and unqueued callers have one
/// each. If it is dropped, the next waiter gets it.
pub(super) struct LeaderPermit {
    shared: Arc<LocksState>,
    lock: LockKey,
    /// The subscription, which the next leader reuses.
    pub(super) notifications: Option<Notifications>,
    /// Whether waiters in other processes were notified of the same release. The next leader then lets them go first.
    pub(super) others_were_notified: bool,
    // If true, dropping the permit does not pass it to the next waiter.
    ends_on_drop: bool,
    // Whether the queue is in the store, so that each caller calls the store itself.
    is_fair: bool,
    // Whether the caller bypasses the local queue.
    bypasses_queue: bool,
}

/// The position of a caller in the local queue.
#[derive(Clone, Copy)]
pub(super) struct QueueTicket {
    pub(super) position: Position,
    /// Whether the caller missed a grant and waits again. The limit on waiters was checked when it first entered, so it is not checked
    /// again.
    pub(super) is_requeued: bool,
}

/// A caller's entry in the local queue, with the receiver of its handoff. Dropping it leaves the queue.
pub(super) struct QueuedWaiter {
    shared: Arc<LocksState>,
    lock: LockKey,
    position: Position,
    handoff: oneshot::Receiver<Handoff>,
}

/// A release in progress. Callers of this process that want the same key wait for its end.
pub(super) struct PendingRelease {
    shared: Arc<LocksState>,
    lock: LockKey,
    done: Arc<Semaphore>,
}

impl LocalQueues {
    pub(super) fn new() -> Self {
        Self {
            shards: Default::default(),
            active: AtomicUsize::new(0),
            next_position: AtomicU64::new(0),
            releases: AtomicUsize::new(0),
        }
    }

    /// The position of a new caller.
    pub(super) fn new_position(&self) -> QueueTicket {
        QueueTicket { position: self.next_position.fetch_add(1, Ordering::Relaxed), is_requeued: false }
    }

    /// The number of queues, of locks with fair callers, and of permits of unqueued callers.
    pub(super) fn len(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// No code panics while it holds the lock, so a poisoned shard is intact.
    fn shard(&self, lock: &LockKey) -> MutexGuard<'_, Shard> {
        self.shards[lock.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last failure as `Err` if it still applies, otherwise a watch of the next one. `None` if the lock has no local queue.
    pub(super) fn watch_failure(&self, lock: &LockKey) -> Option<Result<FailureWatch, Failure>> {
        self.shard(lock).queues.get_mut(lock).map(KeyQueue::watch_failure)
    }

    /// The error of a caller whose wait has ended.
    pub(super) fn busy(&self, lock: &LockKey) -> Busy {
        let shard = self.shard(lock);
        let until = shard.queues.get(lock).and_then(|entry| match (entry.queue.front(), &entry.last_failure) {
            (LeaderState::Held(grant), _) => Some(grant.expires()),
            (_, Some(Failure::Busy(until) | Failure::NotReplicated { until, .. })) => Some(*until),
            _ => None,
        });
        let remaining = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
        Busy::new(*lock, remaining)
    }

    /// Resolves when the current releases of this key have ended, or after `max_wait`. `None` if there are none.
    pub(super) fn wait_for_releases(
        &self,
        lock: &LockKey,
        max_wait: Duration,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.releases.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let pending = self.shard(lock).releases.get(lock)?.clone();
        let all = async move {
            for release in pending {
                // This semaphore serves as an event: it has no permits, and `acquire` returns when the release closes it.
                let _ = release.acquire().await;
            }
        };
        Some(async move {
            let _ = timeout(max_wait, all).await;
        })
    }

    /// How long the store may take to answer the leader if the leader requires replicas. Zero if it requires none.
    pub(super) fn replication_timeout(&self, lock: &LockKey) -> Duration {
        self.shard(lock).queues.get(lock).map_or(Duration::ZERO, |queue| queue.replication_timeout)
    }
}

impl Failure {
    /// Whether the failure still applies to a new caller.
    fn still_applies(&self) -> bool {
        match self {
            Self::Busy(until) => Instant::now() < *until,
            Self::NotReplicated { .. } | Self::Failed(_) => true,
        }
    }

    /// The error for a caller behind the leader. The caller may require more or fewer replicas than the leader.
    pub(super) fn error(self, lock: LockKey, options: &AcquireOptions) -> LockError {
        let required = options.replication.count();
        match self {
            Self::NotReplicated { replicas, .. } if replicas < required => {
                NotReplicated::new(lock, replicas, required).into()
            }
            Self::Busy(until) | Self::NotReplicated { until, .. } => {
                Busy::new(lock, until.saturating_duration_since(Instant::now())).into()
            }
            Self::Failed(error) => error.into(),
        }
    }
}

impl KeyQueue {
    const fn new(replication_timeout: Duration) -> Self {
        Self { queue: LocalQueue::new(), replication_timeout, last_failure: None, failure_sender: None }
    }

    /// Returns the last failure as `Err` if it still applies, otherwise a watch of the next one.
    fn watch_failure(&mut self) -> Result<FailureWatch, Failure> {
        let failure = match self.queue.front() {
            LeaderState::Held(grant) => Some(Failure::Busy(grant.expires())),
            LeaderState::Acquiring | LeaderState::Releasing => self.last_failure.clone().filter(Failure::still_applies),
        };
        failure.map_or_else(|| Ok(self.watch()), Err)
    }

    fn watch(&mut self) -> FailureWatch {
        self.failure_sender.get_or_insert_with(|| watch::channel(None).0).subscribe()
    }

    fn notify_watchers(&mut self, failure: Failure) {
        // Drop the sender once no caller listens.
        let _ = self.failure_sender.take_if(|failure_sender| failure_sender.send(Some(failure)).is_err());
    }

    /// Sends the holder a release request on behalf of the first waiter.
    fn request_release(&self) {
        if let LeaderState::Held(grant) = self.queue.front()
            && self.queue.first().is_some_and(|waiter| waiter.requests_release)
        {
            grant.request_release();
        }
    }
}

impl LocksState {
    /// Enters the local queue: becomes the leader if there is none, otherwise waits.
    pub(super) fn enter(
        self: &Arc<Self>,
        lock: LockKey,
        options: &AcquireOptions,
        position: QueueTicket,
        accepts_lease: bool,
    ) -> Result<Entered, LockError> {
        let queues = &self.queues;
        if self.is_semaphore && options.wait.is_zero() {
            // The leader may still pause between its calls although a permit is free. So this caller bypasses the queue and calls the store
            // itself.
            let mut permit = LeaderPermit::new(self, lock);
            permit.ends_on_drop = true;
            permit.bypasses_queue = true;
            queues.active.fetch_add(1, Ordering::SeqCst);
            return Ok(Entered::LeaderPermit(permit));
        }
        let mut shard = queues.shard(&lock);
        let entry = match shard.queues.entry(lock) {
            Entry::Vacant(vacant) => {
                vacant.insert(KeyQueue::new(options.replication_timeout()));
                queues.active.fetch_add(1, Ordering::SeqCst);
                return Ok(Entered::LeaderPermit(LeaderPermit::new(self, lock)));
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        let is_free_soon = entry.queue.is_free_soon();
        // Do not wait for a leader whose calls an open circuit would refuse.
        if (options.wait.is_zero() || options.fails_if_circuit_opens)
            && !matches!(entry.queue.front(), LeaderState::Held(_))
        {
            self.circuit().admit_no_probe()?;
        }
        if options.wait.is_zero() && !is_free_soon {
            return entry.watch_failure().map(Entered::Watching).map_err(|failure| failure.error(lock, options));
        }
        // With `is_free_soon`, this caller is the next leader and waits behind no other.
        if entry.queue.len() >= options.max_waiters && !is_free_soon && !position.is_requeued {
            return Err(QueueFull::new(lock).into());
        }
        let (sender, handoff) = oneshot::channel();
        let QueueTicket { position, .. } = position;
        entry.queue.enter(
            position,
            Waiter {
                handoff_terms: accepts_lease.then_some((options.ttl, options.replication.count())),
                replication_timeout: options.replication_timeout(),
                max_hold: options.max_hold,
                requests_release: options.requests_release,
                handoff: sender,
            },
        );
        entry.request_release();
        let failures = options.fails_if_circuit_opens.then(|| entry.watch());
        Ok(Entered::Queue {
            waiter: QueuedWaiter { shared: Arc::clone(self), lock, position, handoff },
            is_free_soon,
            failures,
        })
    }

    /// Counts a caller of a fair lock. Callers of a fair lock call the store concurrently, because their queue is in the store.
    pub(super) fn enter_fair(
        self: &Arc<Self>,
        lock: LockKey,
        options: &AcquireOptions,
        is_requeued: bool,
    ) -> Result<Entered, LockError> {
        let queues = &self.queues;
        let mut shard = queues.shard(&lock);
        let waiters = shard.fair_callers.get(&lock).copied().unwrap_or_default();
        // The first caller does not wait yet.
        if waiters > options.max_waiters && !options.wait.is_zero() && !is_requeued {
            return Err(QueueFull::new(lock).into());
        }
        shard.fair_callers.insert(lock, waiters + 1);
        if waiters == 0 {
            queues.active.fetch_add(1, Ordering::SeqCst);
        }
        drop(shard);
        let mut permit = LeaderPermit::new(self, lock);
        permit.ends_on_drop = true;
        permit.is_fair = true;
        Ok(Entered::LeaderPermit(permit))
    }

    fn leave_fair_queue(&self, lock: &LockKey) {
        let queues = &self.queues;
        let mut shard = queues.shard(lock);
        let Some(waiters) = shard.fair_callers.get_mut(lock) else { return };
        *waiters -= 1;
        if *waiters == 0 {
            shard.fair_callers.remove(lock);
            drop(shard);
            self.decrement_active();
        }
    }

    /// Decrements the number of active locks.
    fn decrement_active(&self) {
        if self.queues.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.notify_idle();
        }
    }

    /// The next leader. Removes the queue after the last caller.
    fn advance_leader(&self, lock: &LockKey) -> Option<Waiter> {
        let mut shard = self.queues.shard(lock);
        let entry = shard.queues.get_mut(lock)?;
        let waiter = entry.queue.advance();
        if let Some(waiter) = &waiter {
            entry.replication_timeout = waiter.replication_timeout;
        } else {
            shard.queues.remove(lock);
            drop(shard);
            self.decrement_active();
        }
        waiter
    }

    /// Makes this waiter the leader. Skips waiters that have gone.
    fn appoint(&self, mut permit: LeaderPermit, mut waiter: Waiter) {
        while let Err(Handoff::LeaderPermit(back)) = waiter.handoff.send(Handoff::LeaderPermit(permit)) {
            permit = back;
            match self.advance_leader(&permit.lock) {
                Some(next) => waiter = next,
                None => {
                    permit.ends_on_drop = true;
                    return;
                }
            }
        }
    }

    /// Hands a released lease off to the next waiter if enough time and fences are left and it meets the waiter's terms. Otherwise returns
    /// the release task.
    pub(super) fn release_or_hand_off(self: &Arc<Self>, grant: &Arc<Grant>, now: Instant) -> Option<ReleaseTask> {
        let queues = &self.queues;
        loop {
            let mut shard = queues.shard(grant.lock());
            let entry = shard.queues.get_mut(grant.lock());
            let hand_off = |waiter: &Waiter| {
                let meets_terms = waiter.handoff_terms == Some((grant.ttl(), grant.replicas().count));
                if meets_terms { grant.hand_off(waiter.max_hold, now) } else { None }
            };
            let target = entry.map_or(ReleaseTarget::Unknown, |entry| {
                let target = entry.queue.release_or_hand_off(grant, hand_off);
                entry.request_release();
                target
            });
            drop(shard);
            let (waiter, fence) = match target {
                ReleaseTarget::Handoff(waiter, fence) => (waiter, fence),
                ReleaseTarget::Release => {
                    self.renewals.remove(grant);
                    return Some(ReleaseTask::release(self, grant, LeaderPermit::new(self, *grant.lock()), now));
                }
                ReleaseTarget::Unknown => {
                    // A shutdown counts leases in `renewals`, and releases. Register the release first, so that a shutdown sees one of
                    // the two at least.
                    let task = ReleaseTask::release_unqueued(self, grant, now);
                    self.renewals.remove(grant);
                    return Some(task);
                }
            };
            if waiter.max_hold.is_some() {
                self.renewals.reschedule(grant);
            }
            match waiter.handoff.send(Handoff::Lease(Lease::new(self, grant, fence, now))) {
                Err(Handoff::Lease(lease)) => lease.forget(),
                Ok(()) | Err(Handoff::LeaderPermit(_)) => return None,
            }
        }
    }

    /// After a loss, lets other callers call the store, even if the holder still has its handle.
    pub(super) fn abandon(self: &Arc<Self>, grant: &Arc<Grant>) {
        let mut shard = self.queues.shard(grant.lock());
        if shard.queues.get_mut(grant.lock()).is_some_and(|entry| entry.queue.lost(grant)) {
            drop(shard);
            drop(LeaderPermit::new(self, *grant.lock()));
        }
    }
}

impl LeaderPermit {
    /// The queue must have no other permit, unless `ends_on_drop` is set at once.
    fn new(shared: &Arc<LocksState>, lock: LockKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            lock,
            notifications: None,
            others_were_notified: false,
            ends_on_drop: false,
            is_fair: false,
            bypasses_queue: false,
        }
    }

    /// Records the lease, which stays in the queue until its release. Drop the permit once the lease is being renewed.
    pub(super) fn granted(&mut self, grant: &Arc<Grant>) {
        if self.shared.is_semaphore || self.is_fair {
            // Do not record the lease as held, because a held lease stops other callers. A semaphore may have another permit for the next
            // caller. Callers of a fair lock call the store themselves.
            return;
        }
        self.ends_on_drop = true;
        if let Some(entry) = self.shared.queues.shard(&self.lock).queues.get_mut(&self.lock) {
            entry.queue.granted(Arc::clone(grant));
            entry.last_failure = None;
            if entry.failure_sender.is_some() {
                entry.notify_watchers(Failure::Busy(grant.expires()));
            }
            entry.request_release();
        }
    }

    /// Reports to the other callers why the store has not granted the lease; `None` before a call.
    pub(super) fn publish(&self, failure: Option<Failure>) {
        // A fair or unqueued caller calls the store for itself only.
        if self.ends_on_drop {
            return;
        }
        if let Some(entry) = self.shared.queues.shard(&self.lock).queues.get_mut(&self.lock) {
            entry.last_failure.clone_from(&failure);
            if let Some(failure) = failure {
                entry.notify_watchers(failure);
            }
        }
    }
}

impl Drop for LeaderPermit {
    fn drop(&mut self) {
        if !self.ends_on_drop
            && let Some(waiter) = self.shared.advance_leader(&self.lock)
        {
            let permit = Self {
                shared: Arc::clone(&self.shared),
                lock: self.lock,
                notifications: self.notifications.take(),
                others_were_notified: self.others_were_notified,
                ends_on_drop: false,
                is_fair: false,
                bypasses_queue: false,
            };
            self.shared.appoint(permit, waiter);
        }
        if self.is_fair {
            self.shared.leave_fair_queue(&self.lock);
        }
        if self.bypasses_queue {
            self.shared.decrement_active();
        }
    }
}

impl QueuedWaiter {
    /// Waits for the handoff. `None` if the queue is gone.
    pub(super) async fn handoff(&mut self) -> Option<Handoff> {
        (&mut self.handoff).await.ok()
    }
}

impl Drop for QueuedWaiter {
    fn drop(&mut self) {
        let queues = &self.shared.queues;
        let mut shard = queues.shard(&self.lock);
        let Some(entry) = shard.queues.get_mut(&self.lock) else { return };
        if entry.queue.leave(self.position) {
            entry.request_release();
        }
        // Dropping the channel drops a handoff that just arrived. The dropped lease or permit then goes to the next waiter.
    }
}

impl PendingRelease {
    pub(super) fn new(shared: &Arc<LocksState>, lock: LockKey) -> Self {
        let done = Arc::new(Semaphore::new(0));
        shared.queues.releases.fetch_add(1, Ordering::Relaxed);
        shared.queues.shard(&lock).releases.entry(lock).or_default().push(Arc::clone(&done));
        Self { shared: Arc::clone(shared), lock, done }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        let queues = &self.shared.queues;
        let mut shard = queues.shard(&self.lock);
        if let Entry::Occupied(mut releases) = shard.releases.entry(self.lock) {
            releases.get_mut().retain(|release| !Arc::ptr_eq(release, &self.done));
            if releases.get().is_empty() {
                releases.remove();
            }
        }
        drop(shard);
        queues.releases.fetch_sub(1, Ordering::Relaxed);
        self.done.close();
    }
}
