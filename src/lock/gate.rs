//! The local wait queues of this process, one for each key. They connect the decisions of [`LocalQueue`] with callers and the
//! store.

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
use super::local_queue::{Front, GivenBack, LocalQueue, Position};
use super::lock_key::{KnownHash, LockKey};
use super::locks_state::LocksState;
use super::options::AcquireOptions;
use super::release_task::ReleaseTask;
use super::store::Notifications;
use crate::error::StoreError;

/// More than the number of threads that would lock shards at once.
const SHARDS: usize = 16;

/// The locks that callers in this process hold or want. Other locks have no entry.
pub(super) struct LocalQueues {
    shards: [Mutex<Shard>; SHARDS],
    // The number of queues and fair waiters in the shards, and of leader permits outside of them. A caller increments it and
    // then checks whether the locks are closed. A shutdown closes them and then reads it. Both use one total order, so one of
    // them sees the other.
    locks: AtomicUsize,
    next_position: AtomicU64,
    // The number of pending releases in the shards.
    releases: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    queues: HashMap<LockKey, QueueEntry, KnownHash>,
    // The number of callers in the queue that the store keeps for a lock. The store knows their order.
    fair_waiters: HashMap<LockKey, usize, KnownHash>,
    // Pending releases, except of leases that the queue holds.
    releases: HashMap<LockKey, SmallVec<[Arc<Semaphore>; 1]>, KnownHash>,
}

/// The queue of a key, and the store's last answer for its waiters.
struct QueueEntry {
    queue: LocalQueue<Arc<Grant>, Waiter>,
    // How long the store may take to answer a leader that waits for replicas; otherwise zero.
    limit: Duration,
    // The store's last answer, unless the lease is held here.
    heard: Option<Failure>,
    // Notifies callers that wait for the next answer, if there are any.
    news: Option<watch::Sender<Option<Failure>>>,
}

/// Why the store has not granted a lease, for all callers in this process.
#[derive(Clone)]
pub(super) enum Failure {
    /// Held by others until then, unless they renew it.
    Busy(Instant),
    /// Only this many replicas have the lease. The leader retries until then.
    NotReplicated { replicas: u32, until: Instant },
    /// The store failed.
    Failed(StoreError),
}

/// Delivers the answers that the leader gets from the store. Closed when there is no leader.
pub(super) type FailureWatch = watch::Receiver<Option<Failure>>;

struct Waiter {
    // The lease length and the number of replicas that a handed-off lease must have; `None` to refuse handoffs.
    fits: Option<(Duration, u32)>,
    // How long the store may take to answer this caller if it waits for replicas; otherwise zero.
    limit: Duration,
    max_hold: Option<Duration>,
    // Whether the holder is asked to release the lease when this caller is first.
    asks: bool,
    offer: oneshot::Sender<Handoff>,
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
        waiting: Waiting,
        is_free_soon: bool,
        news: Option<FailureWatch>,
    },
    /// The store's answer to the leader applies to this caller as well.
    Behind(FailureWatch),
}

/// The right to call the store for a lock. One caller at a time has it; dropping it passes it on.
pub(super) struct LeaderPermit {
    shared: Arc<LocksState>,
    lock: LockKey,
    /// The subscription, which the next leader reuses.
    pub(super) wakeups: Option<Notifications>,
    /// Whether waiters in other processes got the same notification.
    pub(super) is_shared: bool,
    is_over: bool,
    // Whether the store keeps the queue, so that each caller calls it by itself.
    is_in_crowd: bool,
    // Whether no caller is queued behind this one.
    is_apart: bool,
}

/// The position of a caller in the local queue.
#[derive(Clone, Copy)]
pub(super) struct QueuePosition {
    pub(super) position: Position,
    /// Whether the caller waited before and missed a grant. It was admitted then.
    pub(super) is_back: bool,
}

/// A position in the local queue. Dropping it leaves the queue.
pub(super) struct Waiting {
    shared: Arc<LocksState>,
    lock: LockKey,
    position: Position,
    offer: oneshot::Receiver<Handoff>,
}

/// A release in progress. Callers of this process that want the same key wait for its end.
pub(super) struct PendingRelease {
    shared: Arc<LocksState>,
    lock: LockKey,
    ended: Arc<Semaphore>,
}

impl LocalQueues {
    pub(super) fn new() -> Self {
        Self {
            shards: Default::default(),
            locks: AtomicUsize::new(0),
            next_position: AtomicU64::new(0),
            releases: AtomicUsize::new(0),
        }
    }

    /// The position of a new caller.
    pub(super) fn new_position(&self) -> QueuePosition {
        QueuePosition { position: self.next_position.fetch_add(1, Ordering::Relaxed), is_back: false }
    }

    /// The number of locks with a leader or waiters.
    pub(super) fn len(&self) -> usize {
        self.locks.load(Ordering::SeqCst)
    }

    /// No code panics while it holds the lock, so a poisoned shard is intact.
    fn shard(&self, lock: &LockKey) -> MutexGuard<'_, Shard> {
        self.shards[lock.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer for a caller that no longer waits, or a watch of the next one. `None` without a leader.
    pub(super) fn overhear(&self, lock: &LockKey) -> Option<Result<FailureWatch, Failure>> {
        self.shard(lock).queues.get_mut(lock).map(QueueEntry::overhear)
    }

    /// The error of a caller whose wait is over.
    pub(super) fn busy(&self, lock: &LockKey) -> Busy {
        let shard = self.shard(lock);
        let until = shard.queues.get(lock).and_then(|entry| match (entry.queue.front(), &entry.heard) {
            (Front::Held(hold), _) => Some(hold.expires()),
            (_, Some(Failure::Busy(until) | Failure::NotReplicated { until, .. })) => Some(*until),
            _ => None,
        });
        let remaining = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
        Busy::new(*lock, remaining)
    }

    /// Resolves when the current releases of this key have ended, or after `limit`. `None` if there are none.
    pub(super) fn releases(&self, lock: &LockKey, limit: Duration) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.releases.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let pending = self.shard(lock).releases.get(lock)?.clone();
        let all = async move {
            for release in pending {
                // It never has permits, and is closed at the end.
                let _ = release.acquire().await;
            }
        };
        Some(async move {
            let _ = timeout(limit, all).await;
        })
    }

    /// How long the store may take to answer a leader that waits for replicas; otherwise zero.
    pub(super) fn limit(&self, lock: &LockKey) -> Duration {
        self.shard(lock).queues.get(lock).map_or(Duration::ZERO, |queue| queue.limit)
    }
}

impl Failure {
    /// Whether the answer still applies to a new caller.
    fn lasts(&self) -> bool {
        match self {
            Self::Busy(until) => Instant::now() < *until,
            Self::NotReplicated { .. } | Self::Failed(_) => true,
        }
    }

    /// The error for a caller behind the leader, which may require another number of replicas.
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

impl QueueEntry {
    const fn new(limit: Duration) -> Self {
        Self { queue: LocalQueue::new(), limit, heard: None, news: None }
    }

    /// The answer for a caller that does not wait, or a watch of the next one.
    fn overhear(&mut self) -> Result<FailureWatch, Failure> {
        let refusal = match self.queue.front() {
            Front::Held(hold) => Some(Failure::Busy(hold.expires())),
            Front::Acquiring | Front::Releasing => self.heard.clone().filter(Failure::lasts),
        };
        refusal.map_or_else(|| Ok(self.news()), Err)
    }

    fn news(&mut self) -> FailureWatch {
        self.news.get_or_insert_with(|| watch::channel(None).0).subscribe()
    }

    fn tell(&mut self, refusal: Failure) {
        // Drop the sender once no caller listens.
        let _ = self.news.take_if(|news| news.send(Some(refusal)).is_err());
    }

    /// Asks the holder to release the lease, on behalf of the first waiter.
    fn ask(&self) {
        if let Front::Held(hold) = self.queue.front()
            && self.queue.first().is_some_and(|waiter| waiter.asks)
        {
            hold.ask();
        }
    }
}

impl LocksState {
    /// Enters the local queue: becomes the leader if there is none, otherwise waits.
    pub(super) fn enter(
        self: &Arc<Self>,
        lock: LockKey,
        options: &AcquireOptions,
        position: QueuePosition,
        by_hand: bool,
    ) -> Result<Entered, LockError> {
        let gate = &self.gate;
        if self.is_semaphore && options.wait.is_zero() {
            // The leader may wait for other reasons, so try beside it.
            let mut turn = LeaderPermit::new(self, lock);
            turn.is_over = true;
            turn.is_apart = true;
            gate.locks.fetch_add(1, Ordering::SeqCst);
            return Ok(Entered::LeaderPermit(turn));
        }
        let mut shard = gate.shard(&lock);
        let entry = match shard.queues.entry(lock) {
            Entry::Vacant(vacant) => {
                vacant.insert(QueueEntry::new(options.replicas_limit()));
                gate.locks.fetch_add(1, Ordering::SeqCst);
                return Ok(Entered::LeaderPermit(LeaderPermit::new(self, lock)));
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        let is_free_soon = entry.queue.is_free_soon();
        // Do not wait for a leader whose calls an open circuit would refuse.
        if (options.wait.is_zero() || options.heeds_circuit) && !matches!(entry.queue.front(), Front::Held(_)) {
            self.circuit().admit_no_probe()?;
        }
        if options.wait.is_zero() && !is_free_soon {
            return entry.overhear().map(Entered::Behind).map_err(|refusal| refusal.error(lock, options));
        }
        // The next leader waits behind no other caller.
        if entry.queue.len() >= options.max_waiters && !is_free_soon && !position.is_back {
            return Err(QueueFull::new(lock).into());
        }
        let (sender, offer) = oneshot::channel();
        let QueuePosition { position, .. } = position;
        entry.queue.enter(
            position,
            Waiter {
                fits: by_hand.then_some((options.ttl, options.replication.count())),
                limit: options.replicas_limit(),
                max_hold: options.max_hold,
                asks: options.asks,
                offer: sender,
            },
        );
        entry.ask();
        let news = options.heeds_circuit.then(|| entry.news());
        Ok(Entered::Queue { waiting: Waiting { shared: Arc::clone(self), lock, position, offer }, is_free_soon, news })
    }

    /// Calls the store beside other callers: the store keeps the queue.
    pub(super) fn join(
        self: &Arc<Self>,
        lock: LockKey,
        options: &AcquireOptions,
        is_back: bool,
    ) -> Result<Entered, LockError> {
        let gate = &self.gate;
        let mut shard = gate.shard(&lock);
        let crowd = shard.fair_waiters.get(&lock).copied().unwrap_or_default();
        // The first caller does not wait yet.
        if crowd > options.max_waiters && !options.wait.is_zero() && !is_back {
            return Err(QueueFull::new(lock).into());
        }
        shard.fair_waiters.insert(lock, crowd + 1);
        if crowd == 0 {
            gate.locks.fetch_add(1, Ordering::SeqCst);
        }
        drop(shard);
        let mut turn = LeaderPermit::new(self, lock);
        turn.is_over = true;
        turn.is_in_crowd = true;
        Ok(Entered::LeaderPermit(turn))
    }

    fn leave_crowd(&self, lock: &LockKey) {
        let gate = &self.gate;
        let mut shard = gate.shard(lock);
        let Some(crowd) = shard.fair_waiters.get_mut(lock) else { return };
        *crowd -= 1;
        if *crowd == 0 {
            shard.fair_waiters.remove(lock);
            drop(shard);
            self.leave_gate();
        }
    }

    /// Removes one entry from the count.
    fn leave_gate(&self) {
        if self.gate.locks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.ended();
        }
    }

    /// The next leader. Removes the queue after the last caller.
    fn next(&self, lock: &LockKey) -> Option<Waiter> {
        let mut shard = self.gate.shard(lock);
        let entry = shard.queues.get_mut(lock)?;
        let waiter = entry.queue.advance();
        if let Some(waiter) = &waiter {
            entry.limit = waiter.limit;
        } else {
            shard.queues.remove(lock);
            drop(shard);
            self.leave_gate();
        }
        waiter
    }

    /// Makes the next caller the leader, or the one behind it if it has gone.
    fn pass_on(&self, mut turn: LeaderPermit, mut waiter: Waiter) {
        while let Err(Handoff::LeaderPermit(back)) = waiter.offer.send(Handoff::LeaderPermit(turn)) {
            turn = back;
            match self.next(&turn.lock) {
                Some(next) => waiter = next,
                None => {
                    turn.is_over = true;
                    return;
                }
            }
        }
    }

    /// Takes a lease back from a holder. Hands it off to the next waiter if it is still good for that; otherwise returns the
    /// release task.
    pub(super) fn give_back(self: &Arc<Self>, hold: &Arc<Grant>, now: Instant) -> Option<ReleaseTask> {
        let gate = &self.gate;
        loop {
            let mut shard = gate.shard(hold.lock());
            let entry = shard.queues.get_mut(hold.lock());
            let hand_over = |waiter: &Waiter| {
                let is_good_for = waiter.fits == Some((hold.ttl(), hold.replicas().count));
                if is_good_for { hold.hand_to(waiter.max_hold, now) } else { None }
            };
            let given_back = entry.map_or(GivenBack::Unknown, |entry| {
                let given_back = entry.queue.give_back(hold, hand_over);
                entry.ask();
                given_back
            });
            drop(shard);
            let (waiter, fence) = match given_back {
                GivenBack::Handoff(waiter, fence) => (waiter, fence),
                GivenBack::Release => {
                    self.keeper.remove(hold);
                    return Some(ReleaseTask::release(self, hold, LeaderPermit::new(self, *hold.lock()), now));
                }
                GivenBack::Unknown => {
                    // Register the release first, so that a shutdown sees either the queue or the release.
                    let errand = ReleaseTask::given_back(self, hold, now);
                    self.keeper.remove(hold);
                    return Some(errand);
                }
            };
            if waiter.max_hold.is_some() {
                self.keeper.look_again(hold);
            }
            match waiter.offer.send(Handoff::Lease(Lease::new(self, hold, fence, now))) {
                Err(Handoff::Lease(lease)) => lease.forget(),
                Ok(()) | Err(Handoff::LeaderPermit(_)) => return None,
            }
        }
    }

    /// Lets other callers call the store for a lost lease, even if its holder keeps it.
    pub(super) fn abandon(self: &Arc<Self>, hold: &Arc<Grant>) {
        let mut shard = self.gate.shard(hold.lock());
        if shard.queues.get_mut(hold.lock()).is_some_and(|entry| entry.queue.lost(hold)) {
            drop(shard);
            drop(LeaderPermit::new(self, *hold.lock()));
        }
    }
}

impl LeaderPermit {
    /// Only for a caller that has just become the leader.
    fn new(shared: &Arc<LocksState>, lock: LockKey) -> Self {
        Self {
            shared: Arc::clone(shared),
            lock,
            wakeups: None,
            is_shared: false,
            is_over: false,
            is_in_crowd: false,
            is_apart: false,
        }
    }

    /// The store granted the lease, which the queue holds until its release. Drop the permit once the lease is being renewed.
    pub(super) fn holds(&mut self, hold: &Arc<Grant>) {
        if self.shared.is_semaphore || self.is_in_crowd {
            // The next caller may want another lock, or calls the store already.
            return;
        }
        self.is_over = true;
        if let Some(entry) = self.shared.gate.shard(&self.lock).queues.get_mut(&self.lock) {
            entry.queue.granted(Arc::clone(hold));
            entry.heard = None;
            if entry.news.is_some() {
                entry.tell(Failure::Busy(hold.expires()));
            }
            entry.ask();
        }
    }

    /// Tells the other callers why the store has not granted the lease; `None` before a call.
    pub(super) fn hears(&self, refusal: Option<Failure>) {
        // Callers beside the queue call for themselves only.
        if self.is_over {
            return;
        }
        if let Some(entry) = self.shared.gate.shard(&self.lock).queues.get_mut(&self.lock) {
            entry.heard.clone_from(&refusal);
            if let Some(refusal) = refusal {
                entry.tell(refusal);
            }
        }
    }
}

impl Drop for LeaderPermit {
    fn drop(&mut self) {
        if !self.is_over
            && let Some(waiter) = self.shared.next(&self.lock)
        {
            let next = Self {
                shared: Arc::clone(&self.shared),
                lock: self.lock,
                wakeups: self.wakeups.take(),
                is_shared: self.is_shared,
                is_over: false,
                is_in_crowd: false,
                is_apart: false,
            };
            self.shared.pass_on(next, waiter);
        }
        if self.is_in_crowd {
            self.shared.leave_crowd(&self.lock);
        }
        if self.is_apart {
            self.shared.leave_gate();
        }
    }
}

impl Waiting {
    /// Waits for the turn of this caller. `None` if that cannot happen any more.
    pub(super) async fn offer(&mut self) -> Option<Handoff> {
        (&mut self.offer).await.ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let gate = &self.shared.gate;
        let mut shard = gate.shard(&self.lock);
        let Some(entry) = shard.queues.get_mut(&self.lock) else { return };
        if entry.queue.leave(self.position) {
            entry.ask();
        }
        // A handoff that arrived in the last moment is dropped with the channel, which passes it on.
    }
}

impl PendingRelease {
    pub(super) fn new(shared: &Arc<LocksState>, lock: LockKey) -> Self {
        let ended = Arc::new(Semaphore::new(0));
        shared.gate.releases.fetch_add(1, Ordering::Relaxed);
        shared.gate.shard(&lock).releases.entry(lock).or_default().push(Arc::clone(&ended));
        Self { shared: Arc::clone(shared), lock, ended }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        let gate = &self.shared.gate;
        let mut shard = gate.shard(&self.lock);
        if let Entry::Occupied(mut releases) = shard.releases.entry(self.lock) {
            releases.get_mut().retain(|release| !Arc::ptr_eq(release, &self.ended));
            if releases.get().is_empty() {
                releases.remove();
            }
        }
        drop(shard);
        gate.releases.fetch_sub(1, Ordering::Relaxed);
        self.ended.close();
    }
}
