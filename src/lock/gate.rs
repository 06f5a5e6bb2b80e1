//! Who is in front of a lock within this process. One at a time deals with the store, the others stand in line.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::errand::Errand;
use super::error::{Busy, LockError, NotReplicated, QueueFull};
use super::hold::Hold;
use super::lease::Lease;
use super::lock_key::{KnownHash, LockKey};
use super::locks::Terms;
use super::shared::Shared;
use super::store::Wakeups;
use crate::error::StoreError;

/// More than threads would be in here at once.
const SHARDS: usize = 16;

/// The locks that somebody in this process holds or asks for. A lock that nobody cares about is not in here.
pub(super) struct Gate {
    shards: [Mutex<Shard>; SHARDS],
    // How many queues and crowds are in the shards, and turns apart from these. Whoever adds one looks whether all is closed after that, and whoever closes it looks at
    // this after that, so these are in one order for all: one of the two sees the other.
    locks: AtomicUsize,
    next_id: AtomicU64,
}

#[derive(Default)]
struct Shard {
    queues: HashMap<LockKey, Queue, KnownHash>,
    // How many stand in the line that the store keeps for a lock. That knows who is first.
    crowds: HashMap<LockKey, usize, KnownHash>,
}

struct Queue {
    front: Front,
    // How long the store may take to answer whoever asks, if that one waits for replicas; zero otherwise.
    limit: Duration,
    waiters: VecDeque<Waiter>,
    // What the store said last, unless the lease is held here.
    heard: Option<Refusal>,
    // For those who want to hear what it says next, if there are any.
    news: Option<watch::Sender<Option<Refusal>>>,
}

/// What whoever is in front does.
enum Front {
    /// Asks the store for the lease.
    Asks,
    /// Has the lease.
    Holds(Arc<Hold>),
    /// Gives the lease back.
    Returns,
}

/// Why the store has not granted a lease, for all in this process who want it.
#[derive(Clone)]
pub(super) enum Refusal {
    /// Others have it until then, unless they renew it.
    Busy(Instant),
    /// So few replicas know of it. Whoever is in front asks again until then.
    NotReplicated { replicas: u32, until: Instant },
    /// The store has failed.
    Failed(StoreError),
}

/// Tells what whoever is in front hears of the store. Ends when nobody is in front any more.
pub(super) type News = watch::Receiver<Option<Refusal>>;

struct Waiter {
    id: u64,
    // The length of a lease that would do from hand to hand, if any would, and how many replicas have to know of it.
    fits: Option<(Duration, u32)>,
    // How long the store may take to answer this one, if it waits for replicas; zero otherwise.
    limit: Duration,
    max_hold: Option<Duration>,
    // Whether whoever holds the lease is asked for it when this one is first.
    asks: bool,
    offer: oneshot::Sender<Offer>,
}

/// What somebody in the line is given.
pub(super) enum Offer {
    /// The lease, from hand to hand.
    Lease(Lease),
    /// The right to ask the store.
    Turn(Turn),
}

/// What whoever comes to the gate finds.
pub(super) enum Entered {
    Turn(Turn),
    Line {
        waiting: Waiting,
        is_free_soon: bool,
        news: Option<News>,
    },
    /// What the store says to whoever is in front goes for this one, too.
    Behind(News),
}

/// The right to ask the store for a lock, which one at a time has. Whoever has it and drops it passes it on.
pub(super) struct Turn {
    home: Arc<Shared>,
    lock: LockKey,
    /// The subscription, which whoever comes next need not make again.
    pub(super) wakeups: Option<Wakeups>,
    /// Whether others, in other processes, were told at the same time that the lock is free.
    pub(super) is_shared: bool,
    is_over: bool,
    // Whether this is one of those who ask by themselves, since the store has a line for them.
    is_in_crowd: bool,
    // Whether this is one that nobody stands in line behind.
    is_apart: bool,
}

/// A place in the line. Whoever drops it leaves.
pub(super) struct Waiting {
    home: Arc<Shared>,
    lock: LockKey,
    id: u64,
    offer: oneshot::Receiver<Offer>,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { shards: Default::default(), locks: AtomicUsize::new(0), next_id: AtomicU64::new(0) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.locks.load(Ordering::SeqCst) == 0
    }

    /// Nothing panics halfway in here, so what a poisoned lock guards is whole.
    fn shard(&self, lock: &LockKey) -> MutexGuard<'_, Shard> {
        self.shards[lock.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why somebody who waits no longer is turned away, or who tells that next. `None` if nobody is in front.
    pub(super) fn overhear(&self, lock: &LockKey) -> Option<Result<News, Refusal>> {
        self.shard(lock).queues.get_mut(lock).map(Queue::overhear)
    }

    /// How long the store may take to answer whoever is in front, if that one waits for replicas; zero otherwise.
    pub(super) fn limit(&self, lock: &LockKey) -> Duration {
        self.shard(lock).queues.get(lock).map_or(Duration::ZERO, |queue| queue.limit)
    }
}

impl Refusal {
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

impl Queue {
    const fn new(limit: Duration) -> Self {
        Self { front: Front::Asks, limit, waiters: VecDeque::new(), heard: None, news: None }
    }

    /// Why somebody who does not wait is turned away, or who tells that next.
    fn overhear(&mut self) -> Result<News, Refusal> {
        let refusal = match &self.front {
            Front::Holds(hold) => Some(Refusal::Busy(hold.expires())),
            Front::Asks | Front::Returns => self.heard.clone().filter(Refusal::lasts),
        };
        refusal.map_or_else(|| Ok(self.news()), Err)
    }

    fn news(&mut self) -> News {
        self.news.get_or_insert_with(|| watch::channel(None).0).subscribe()
    }

    fn tell(&mut self, refusal: Refusal) {
        // Until nobody wants to hear it any more.
        let _ = self.news.take_if(|news| news.send(Some(refusal)).is_err());
    }

    /// Asks for the lease on behalf of whoever is first.
    fn ask(&self) {
        if let Front::Holds(hold) = &self.front
            && self.waiters.front().is_some_and(|waiter| waiter.asks)
        {
            hold.ask();
        }
    }

    fn is_held_by(&self, hold: &Arc<Hold>) -> bool {
        matches!(&self.front, Front::Holds(holder) if Arc::ptr_eq(holder, hold))
    }
}

impl Shared {
    /// Comes to the gate: to ask the store where nobody is in front, or to stand in line.
    pub(super) fn enter(self: &Arc<Self>, lock: LockKey, terms: &Terms, by_hand: bool) -> Result<Entered, LockError> {
        let gate = &self.gate;
        if self.is_semaphore && terms.wait.is_zero() {
            // Whoever is in front may have to wait for a reason of their own.
            let mut turn = Turn::new(self, lock);
            turn.is_over = true;
            turn.is_apart = true;
            gate.locks.fetch_add(1, Ordering::SeqCst);
            return Ok(Entered::Turn(turn));
        }
        let mut shard = gate.shard(&lock);
        let queue = match shard.queues.entry(lock) {
            Entry::Vacant(place) => {
                place.insert(Queue::new(terms.replicas_limit()));
                gate.locks.fetch_add(1, Ordering::SeqCst);
                return Ok(Entered::Turn(Turn::new(self, lock)));
            }
            Entry::Occupied(place) => place.into_mut(),
        };
        let is_free_soon = matches!(queue.front, Front::Returns) && queue.waiters.is_empty();
        // Whoever asks the store is not waited for while nobody else would ask it.
        if (terms.wait.is_zero() || terms.heeds_circuit) && !matches!(queue.front, Front::Holds(_)) {
            self.circuit().admit_no_probe()?;
        }
        if terms.wait.is_zero() && !is_free_soon {
            return queue.overhear().map(Entered::Behind).map_err(|refusal| refusal.error(lock, terms));
        }
        // Whoever is next to ask is behind nobody.
        if queue.waiters.len() >= terms.max_waiters && !is_free_soon {
            return Err(QueueFull::new(lock).into());
        }
        let (sender, offer) = oneshot::channel();
        let id = gate.next_id.fetch_add(1, Ordering::Relaxed);
        queue.waiters.push_back(Waiter {
            id,
            fits: by_hand.then_some((terms.ttl, terms.replication.count())),
            limit: terms.replicas_limit(),
            max_hold: terms.max_hold,
            asks: terms.asks,
            offer: sender,
        });
        queue.ask();
        let news = terms.heeds_circuit.then(|| queue.news());
        Ok(Entered::Line { waiting: Waiting { home: Arc::clone(self), lock, id, offer }, is_free_soon, news })
    }

    /// Comes to ask the store beside all others, since the store has a line of its own for those who wait.
    pub(super) fn join(self: &Arc<Self>, lock: LockKey, terms: &Terms) -> Result<Entered, LockError> {
        let gate = &self.gate;
        let mut shard = gate.shard(&lock);
        let crowd = shard.crowds.get(&lock).copied().unwrap_or_default();
        // Whoever asks first of all does not wait yet.
        if crowd > terms.max_waiters && !terms.wait.is_zero() {
            return Err(QueueFull::new(lock).into());
        }
        shard.crowds.insert(lock, crowd + 1);
        if crowd == 0 {
            gate.locks.fetch_add(1, Ordering::SeqCst);
        }
        drop(shard);
        let mut turn = Turn::new(self, lock);
        turn.is_over = true;
        turn.is_in_crowd = true;
        Ok(Entered::Turn(turn))
    }

    fn leave_crowd(&self, lock: &LockKey) {
        let gate = &self.gate;
        let mut shard = gate.shard(lock);
        let Some(crowd) = shard.crowds.get_mut(lock) else { return };
        *crowd -= 1;
        if *crowd == 0 {
            shard.crowds.remove(lock);
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
        let queue = shard.queues.get_mut(lock)?;
        queue.front = Front::Asks;
        let waiter = queue.waiters.pop_front();
        if let Some(waiter) = &waiter {
            queue.limit = waiter.limit;
        } else {
            shard.queues.remove(lock);
            drop(shard);
            self.leave_gate();
        }
        waiter
    }

    /// Lets the next in line ask the store, and whoever comes behind if that one has gone.
    fn pass_on(&self, mut turn: Turn, mut waiter: Waiter) {
        while let Err(Offer::Turn(back)) = waiter.offer.send(Offer::Turn(turn)) {
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
    pub(super) fn give_back(self: &Arc<Self>, hold: &Arc<Hold>, now: Instant) -> Option<Errand> {
        let gate = &self.gate;
        loop {
            let mut shard = gate.shard(hold.lock());
            let queue = shard.queues.get_mut(hold.lock()).filter(|queue| queue.is_held_by(hold));
            let Some(queue) = queue else {
                // It was lost and whoever is in front now is somebody else, or it is a permit, which nobody is in front with.
                drop(shard);
                // First of all, so that a shutdown sees one of them.
                let errand = Errand::after_loss(self, hold, now);
                self.keeper.remove(hold);
                return Some(errand);
            };
            let next = match queue.waiters.front() {
                Some(waiter) if waiter.fits == Some((hold.ttl(), hold.replicas().count)) => {
                    hold.hand_to(waiter.max_hold, now)
                }
                Some(_) | None => None,
            };
            let waiter = next.and_then(|fence| Some((fence, queue.waiters.pop_front()?)));
            let Some((fence, waiter)) = waiter else {
                queue.front = Front::Returns;
                drop(shard);
                self.keeper.remove(hold);
                return Some(Errand::release(self, hold, Turn::new(self, *hold.lock()), now));
            };
            queue.ask();
            drop(shard);
            if waiter.max_hold.is_some() {
                self.keeper.look_again(hold);
            }
            match waiter.offer.send(Offer::Lease(Lease::new(self, hold, fence, now))) {
                Err(Offer::Lease(lease)) => lease.forget(),
                Ok(()) | Err(Offer::Turn(_)) => return None,
            }
        }
    }

    /// Lets others ask the store for a lock whose lease was lost, also if whoever had it does not care.
    pub(super) fn abandon(self: &Arc<Self>, hold: &Arc<Hold>) {
        let mut shard = self.gate.shard(hold.lock());
        let queue = shard.queues.get_mut(hold.lock()).filter(|queue| queue.is_held_by(hold));
        if let Some(queue) = queue {
            queue.front = Front::Asks;
            drop(shard);
            drop(Turn::new(self, *hold.lock()));
        }
    }
}

impl Turn {
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
    pub(super) fn holds(&mut self, hold: &Arc<Hold>) {
        if self.home.is_semaphore || self.is_in_crowd {
            // The next one may ask for another, or asks already.
            return;
        }
        self.is_over = true;
        if let Some(queue) = self.home.gate.shard(&self.lock).queues.get_mut(&self.lock) {
            queue.front = Front::Holds(Arc::clone(hold));
            queue.heard = None;
            if queue.news.is_some() {
                queue.tell(Refusal::Busy(hold.expires()));
            }
            queue.ask();
        }
    }

    /// Lets the others in this process know why the store has not granted the lease; `None` if it is about to be asked.
    pub(super) fn hears(&self, refusal: Option<Refusal>) {
        // Those who are not in front ask for themselves alone.
        if self.is_over {
            return;
        }
        if let Some(queue) = self.home.gate.shard(&self.lock).queues.get_mut(&self.lock) {
            queue.heard.clone_from(&refusal);
            if let Some(refusal) = refusal {
                queue.tell(refusal);
            }
        }
    }
}

impl Drop for Turn {
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
    pub(super) async fn offer(&mut self) -> Option<Offer> {
        (&mut self.offer).await.ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let gate = &self.home.gate;
        let mut shard = gate.shard(&self.lock);
        let Some(queue) = shard.queues.get_mut(&self.lock) else { return };
        if let Some(place) = queue.waiters.iter().position(|waiter| waiter.id == self.id) {
            queue.waiters.remove(place);
            if place == 0 {
                queue.ask();
            }
        }
        // An offer that came in the last moment is dropped with the channel, which passes it on.
    }
}
