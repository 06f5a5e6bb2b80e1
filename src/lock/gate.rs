//! The queues of this process, one for each key that a caller wants: what [`LocalQueue`] decides reaches callers and the store.

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
use super::locks::Terms;
use super::locks_state::Shared;
use super::release_task::ReleaseTask;
use super::store::Notifications;
use crate::error::StoreError;

/// More than threads would be in here at once.
const SHARDS: usize = 16;

/// The locks that somebody in this process holds or asks for. A lock that nobody cares about is not in here.
pub(super) struct LocalQueues {
    shards: [Mutex<Shard>; SHARDS],
    // How many queues and crowds are in the shards, and turns apart from these. Whoever adds one looks whether all is closed after that, and whoever closes it looks at
    // this after that, so these are in one order for all: one of the two sees the other.
    locks: AtomicUsize,
    next_position: AtomicU64,
    // How many releases are in the shards.
    releases: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    queues: HashMap<LockKey, QueueEntry, KnownHash>,
    // How many stand in the line that the store keeps for a lock. That knows who is first.
    fair_waiters: HashMap<LockKey, usize, KnownHash>,
    // What is being given back, but for the leases that a queue is in front with.
    releases: HashMap<LockKey, SmallVec<[Arc<Semaphore>; 1]>, KnownHash>,
}

/// The queue of a key, and what its waiters are to know of the store.
struct QueueEntry {
    queue: LocalQueue<Arc<Grant>, Waiter>,
    // How long the store may take to answer whoever asks, if that one waits for replicas; zero otherwise.
    limit: Duration,
    // What the store said last, unless the lease is held here.
    heard: Option<Failure>,
    // For those who want to hear what it says next, if there are any.
    news: Option<watch::Sender<Option<Failure>>>,
}

/// Why the store has not granted a lease, for all in this process who want it.
#[derive(Clone)]
pub(super) enum Failure {
    /// Others have it until then, unless they renew it.
    Busy(Instant),
    /// So few replicas know of it. Whoever is in front asks again until then.
    NotReplicated { replicas: u32, until: Instant },
    /// The store has failed.
    Failed(StoreError),
}

/// Tells what whoever is in front hears of the store. Ends when nobody is in front any more.
pub(super) type FailureWatch = watch::Receiver<Option<Failure>>;

struct Waiter {
    // The length of a lease that would do from hand to hand, if any would, and how many replicas have to know of it.
    fits: Option<(Duration, u32)>,
    // How long the store may take to answer this one, if it waits for replicas; zero otherwise.
    limit: Duration,
    max_hold: Option<Duration>,
    // Whether whoever holds the lease is asked for it when this one is first.
    asks: bool,
    offer: oneshot::Sender<Handoff>,
}

/// What somebody in the line is given.
pub(super) enum Handoff {
    /// The lease, from hand to hand.
    Lease(Lease),
    /// The right to ask the store.
    LeaderPermit(LeaderPermit),
}

/// What whoever comes to the gate finds.
pub(super) enum Entered {
    LeaderPermit(LeaderPermit),
    Line {
        waiting: Waiting,
        is_free_soon: bool,
        news: Option<FailureWatch>,
    },
    /// What the store says to whoever is in front goes for this one, too.
    Behind(FailureWatch),
}

/// The right to ask the store for a lock, which one at a time has. Whoever has it and drops it passes it on.
pub(super) struct LeaderPermit {
    home: Arc<Shared>,
    lock: LockKey,
    /// The subscription, which whoever comes next need not make again.
    pub(super) wakeups: Option<Notifications>,
    /// Whether others, in other processes, were told at the same time that the lock is free.
    pub(super) is_shared: bool,
    is_over: bool,
    // Whether this is one of those who ask by themselves, since the store has a line for them.
    is_in_crowd: bool,
    // Whether this is one that nobody stands in line behind.
    is_apart: bool,
}

/// Where a caller stands in the queue of its process.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) position: Position,
    /// Whether it has waited there before, and has missed a lease. It was let in then.
    pub(super) is_back: bool,
}

/// A place in the line. Whoever drops it leaves.
pub(super) struct Waiting {
    home: Arc<Shared>,
    lock: LockKey,
    position: Position,
    offer: oneshot::Receiver<Handoff>,
}

/// A lease that is being given back. A caller of this process that wants the same key waits for the end of this.
pub(super) struct PendingRelease {
    home: Arc<Shared>,
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

    /// The place of a caller that comes now.
    pub(super) fn place(&self) -> Place {
        Place { position: self.next_position.fetch_add(1, Ordering::Relaxed), is_back: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.locks.load(Ordering::SeqCst) == 0
    }

    /// Nothing panics halfway in here, so what a poisoned lock guards is whole.
    fn shard(&self, lock: &LockKey) -> MutexGuard<'_, Shard> {
        self.shards[lock.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why somebody who waits no longer is turned away, or who tells that next. `None` if nobody is in front.
    pub(super) fn overhear(&self, lock: &LockKey) -> Option<Result<FailureWatch, Failure>> {
        self.shard(lock).queues.get_mut(lock).map(QueueEntry::overhear)
    }

    /// The error of a caller whose wait is over, whatever the leader does.
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

    /// Ends when the leases of this key that are being given back now have been, or after `limit`. `None` if there are none.
    pub(super) fn releases(&self, lock: &LockKey, limit: Duration) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.releases.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let pending = self.shard(lock).releases.get(lock)?.clone();
        let all = async move {
            for release in pending {
                // It has no permits, and is closed in the end.
                let _ = release.acquire().await;
            }
        };
        Some(async move {
            let _ = timeout(limit, all).await;
        })
    }

    /// How long the store may take to answer whoever is in front, if that one waits for replicas; zero otherwise.
    pub(super) fn limit(&self, lock: &LockKey) -> Duration {
        self.shard(lock).queues.get(lock).map_or(Duration::ZERO, |queue| queue.limit)
    }
}

impl Failure {
    /// The same for somebody who asks now, unless so much time has gone by that the store has more to say.
    fn lasts(&self) -> bool {
        match self {
            Self::Busy(until) => Instant::now() < *until,
            Self::NotReplicated { .. } | Self::Failed(_) => true,
        }
    }

    /// What that is for somebody behind whoever was told, who may have asked for more or fewer replicas.
    pub(super) fn error(self, lock: LockKey, terms: &Terms) -> LockError {
        let required = terms.replication.count();
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

    /// Why somebody who does not wait is turned away, or who tells that next.
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
        // Until nobody wants to hear it any more.
        let _ = self.news.take_if(|news| news.send(Some(refusal)).is_err());
    }

    /// Asks for the lease on behalf of whoever is first.
    fn ask(&self) {
        if let Front::Held(hold) = self.queue.front()
            && self.queue.first().is_some_and(|waiter| waiter.asks)
        {
            hold.ask();
        }
    }
}

impl Shared {
    /// Comes to the gate: to ask the store where nobody is in front, or to stand in line.
    pub(super) fn enter(
        self: &Arc<Self>,
        lock: LockKey,
        terms: &Terms,
        place: Place,
        by_hand: bool,
    ) -> Result<Entered, LockError> {
        let gate = &self.gate;
        if self.is_semaphore && terms.wait.is_zero() {
            // Whoever is in front may have to wait for a reason of their own.
            let mut turn = LeaderPermit::new(self, lock);
            turn.is_over = true;
            turn.is_apart = true;
            gate.locks.fetch_add(1, Ordering::SeqCst);
            return Ok(Entered::LeaderPermit(turn));
        }
        let mut shard = gate.shard(&lock);
        let entry = match shard.queues.entry(lock) {
            Entry::Vacant(vacant) => {
                vacant.insert(QueueEntry::new(terms.replicas_limit()));
                gate.locks.fetch_add(1, Ordering::SeqCst);
                return Ok(Entered::LeaderPermit(LeaderPermit::new(self, lock)));
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        let is_free_soon = entry.queue.is_free_soon();
        // Whoever asks the store is not waited for while nobody else would ask it.
        if (terms.wait.is_zero() || terms.heeds_circuit) && !matches!(entry.queue.front(), Front::Held(_)) {
            self.circuit().admit_no_probe()?;
        }
        if terms.wait.is_zero() && !is_free_soon {
            return entry.overhear().map(Entered::Behind).map_err(|refusal| refusal.error(lock, terms));
        }
        // Whoever is next to ask is behind nobody.
        if entry.queue.len() >= terms.max_waiters && !is_free_soon && !place.is_back {
            return Err(QueueFull::new(lock).into());
        }
        let (sender, offer) = oneshot::channel();
        let Place { position, .. } = place;
        entry.queue.enter(
            position,
            Waiter {
                fits: by_hand.then_some((terms.ttl, terms.replication.count())),
                limit: terms.replicas_limit(),
                max_hold: terms.max_hold,
                asks: terms.asks,
                offer: sender,
            },
        );
        entry.ask();
        let news = terms.heeds_circuit.then(|| entry.news());
        Ok(Entered::Line { waiting: Waiting { home: Arc::clone(self), lock, position, offer }, is_free_soon, news })
    }

    /// Comes to ask the store beside all others, since the store has a line of its own for those who wait.
    pub(super) fn join(self: &Arc<Self>, lock: LockKey, terms: &Terms, is_back: bool) -> Result<Entered, LockError> {
        let gate = &self.gate;
        let mut shard = gate.shard(&lock);
        let crowd = shard.fair_waiters.get(&lock).copied().unwrap_or_default();
        // Whoever asks first of all does not wait yet.
        if crowd > terms.max_waiters && !terms.wait.is_zero() && !is_back {
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

    /// One of those that the gate counts is gone.
    fn leave_gate(&self) {
        if self.gate.locks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.ended();
        }
    }

    /// Whoever is next in line to ask the store. Closes the gate behind the last one.
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

    /// Lets the next in line ask the store, and whoever comes behind if that one has gone.
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

    /// Takes a lease back from whoever is done with it. The next in line gets it from hand to hand, if it is still good for
    /// that; otherwise the answer is what is left to do.
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
                    // First of all, so that a shutdown sees one of them.
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

    /// Lets others ask the store for a lock whose lease was lost, also if whoever had it does not care.
    pub(super) fn abandon(self: &Arc<Self>, hold: &Arc<Grant>) {
        let mut shard = self.gate.shard(hold.lock());
        if shard.queues.get_mut(hold.lock()).is_some_and(|entry| entry.queue.lost(hold)) {
            drop(shard);
            drop(LeaderPermit::new(self, *hold.lock()));
        }
    }
}

impl LeaderPermit {
    /// Only for whoever has just put themselves in front.
    fn new(home: &Arc<Shared>, lock: LockKey) -> Self {
        Self {
            home: Arc::clone(home),
            lock,
            wakeups: None,
            is_shared: false,
            is_over: false,
            is_in_crowd: false,
            is_apart: false,
        }
    }

    /// The store has granted the lease: it stays in front until it is given back. This is to be dropped once the lease is being kept.
    pub(super) fn holds(&mut self, hold: &Arc<Grant>) {
        if self.home.is_semaphore || self.is_in_crowd {
            // The next one may ask for another, or asks already.
            return;
        }
        self.is_over = true;
        if let Some(entry) = self.home.gate.shard(&self.lock).queues.get_mut(&self.lock) {
            entry.queue.granted(Arc::clone(hold));
            entry.heard = None;
            if entry.news.is_some() {
                entry.tell(Failure::Busy(hold.expires()));
            }
            entry.ask();
        }
    }

    /// Lets the others in this process know why the store has not granted the lease; `None` if it is about to be asked.
    pub(super) fn hears(&self, refusal: Option<Failure>) {
        // Those who are not in front ask for themselves alone.
        if self.is_over {
            return;
        }
        if let Some(entry) = self.home.gate.shard(&self.lock).queues.get_mut(&self.lock) {
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
            && let Some(waiter) = self.home.next(&self.lock)
        {
            let next = Self {
                home: Arc::clone(&self.home),
                lock: self.lock,
                wakeups: self.wakeups.take(),
                is_shared: self.is_shared,
                is_over: false,
                is_in_crowd: false,
                is_apart: false,
            };
            self.home.pass_on(next, waiter);
        }
        if self.is_in_crowd {
            self.home.leave_crowd(&self.lock);
        }
        if self.is_apart {
            self.home.leave_gate();
        }
    }
}

impl Waiting {
    /// Waits to be next. `None` if that can never be.
    pub(super) async fn offer(&mut self) -> Option<Handoff> {
        (&mut self.offer).await.ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let gate = &self.home.gate;
        let mut shard = gate.shard(&self.lock);
        let Some(entry) = shard.queues.get_mut(&self.lock) else { return };
        if entry.queue.leave(self.position) {
            entry.ask();
        }
        // An offer that came in the last moment is dropped with the channel, which passes it on.
    }
}

impl PendingRelease {
    pub(super) fn new(home: &Arc<Shared>, lock: LockKey) -> Self {
        let ended = Arc::new(Semaphore::new(0));
        home.gate.releases.fetch_add(1, Ordering::Relaxed);
        home.gate.shard(&lock).releases.entry(lock).or_default().push(Arc::clone(&ended));
        Self { home: Arc::clone(home), lock, ended }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        let gate = &self.home.gate;
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
