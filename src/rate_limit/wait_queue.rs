//! Queues of requests that wait for room, in order of arrival.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::decision::Decision;
use super::descriptor::Descriptor;
use super::policy::Policy;
use crate::key::Key;

/// The longest time between two store calls of the first waiter of a queue. Units that other processes give back are noticed after this
/// time at the latest.
const RECHECK: Duration = Duration::from_secs(1);

/// How late a waiter may be after its turn has come, before others take its turn. Its future may be alive without being polled.
const GRACE: Duration = Duration::from_millis(250);

/// The resolution of decisions.
const SHORTEST_WAIT: Duration = Duration::from_micros(1);

/// The queues of a layer, one for each policy and key for which requests wait. While there is no room, only the first waiter of a queue
/// calls the store, so that many waiters cause no more calls than one. If there is room for several waiters, that many waiters from the
/// front call the store at the same time. Later requests never overtake.
#[derive(Debug)]
pub(super) struct WaitQueues {
    max_waiters: usize,
    waiter_count: AtomicUsize,
    queues: Mutex<HashMap<QueueKey, WaitQueue>>,
}

/// The policy name and key for which the requests of a queue wait.
#[derive(Clone, Debug)]
pub(super) struct QueueKey {
    policy: Policy,
    key: Key,
}

impl QueueKey {
    pub(super) fn new(policy: &Policy, key: &Key) -> Self {
        Self { policy: policy.clone(), key: *key }
    }
}

// Compared by name: while the store fails, the layer enforces another `Policy` with a share of the quota, which has the same queue.
impl PartialEq for QueueKey {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.policy.name() == other.policy.name()
    }
}

impl Eq for QueueKey {}

impl Hash for QueueKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key.hash(state);
        self.policy.name().hash(state);
    }
}

/// The waiters of one policy and key, numbered in order of arrival.
#[derive(Debug)]
struct WaitQueue {
    /// The waiters whose turn it is, with the instant from which they count as stalled.
    active: BTreeMap<u64, Instant>,
    /// The last of the active waiters, until it has noticed its turn.
    promoted: Option<u64>,
    /// The other waiters, with their wake-ups.
    queued: BTreeMap<u64, Arc<Notify>>,
    /// Waiters that were not polled in time. Once they are polled, they are in front again.
    stalled: BTreeSet<u64>,
    next_number: u64,
    /// How many waiters may be active: at least one.
    max_active: usize,
    /// Wakes the first waiter when units are given back.
    wake_first: Arc<Notify>,
    denial: CachedDenial,
    /// The denial with which the first waiter left, and its cost, until another waiter gets a different decision.
    rejection: Option<(CachedDenial, u64)>,
}

impl WaitQueue {
    fn new(denial: CachedDenial) -> Self {
        let (active, queued, stalled) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self {
            active,
            promoted: None,
            queued,
            stalled,
            next_number: 0,
            max_active: 1,
            wake_first: Arc::default(),
            denial,
            rejection: None,
        }
    }

    /// The unexpired denial with which an earlier waiter left, if that waiter cost at most `cost`.
    fn rejection(&self, cost: u64) -> Option<Descriptor> {
        let (denial, _) = self.rejection.as_ref().filter(|(_, least)| *least <= cost)?;
        denial.unexpired_denial()
    }

    fn first(&self) -> Option<u64> {
        let (active, queued) = (self.active.keys().next(), self.queued.keys().next());
        active.into_iter().chain(queued).min().copied()
    }

    /// Activates the first queued waiter if one more may be active. One at a time, so that they call in order. Otherwise a new request,
    /// which runs already, would call before waiters that have not noticed their turn.
    fn advance(&mut self) {
        if self.promoted.is_none()
            && self.active.len() < self.max_active
            && let Some((number, wake)) = self.queued.pop_first()
        {
            self.active.insert(number, Instant::now() + GRACE);
            self.promoted = Some(number);
            wake.notify_one();
            self.wake_next();
        }
    }

    /// Wakes the next queued waiter, so that it learns of a new instant at which it may take a stalled waiter's turn.
    fn wake_next(&self) {
        if let Some(next) = self.queued.values().next() {
            next.notify_one();
        }
    }

    fn leave(&mut self, number: u64) {
        self.active.remove(&number);
        self.queued.remove(&number);
        self.stalled.remove(&number);
    }

    /// The activated waiter has noticed its turn, or has left.
    fn promotion_noticed(&mut self, number: u64) {
        if self.promoted == Some(number) {
            self.promoted = None;
            self.advance();
        }
    }

    /// Gives the turns of stalled waiters to others.
    fn skip_stalled(&mut self) {
        let now = Instant::now();
        let overdue = |due: &Instant| *due <= now;
        if self.active.values().any(overdue) {
            if self.active.values().next().is_some_and(overdue) {
                // Only the first waiter waits for `wake_first`. Once the first waiter is stalled, the wake-up has to reach the next waiter
                // instead.
                self.wake_first = Arc::default();
            }
            self.stalled.extend(self.active.iter().filter(|(_, due)| overdue(due)).map(|(number, _)| *number));
            self.active.retain(|_, due| !overdue(due));
            self.promoted = self.promoted.filter(|number| self.active.contains_key(number));
            self.advance();
        }
    }

    /// Expects an active waiter to continue by `until`. It counts as stalled [`GRACE`] later.
    fn set_due(&mut self, number: u64, until: Instant) {
        if let Some(due) = self.active.get_mut(&number) {
            let before = std::mem::replace(due, until + GRACE);
            if *due < before {
                self.wake_next();
            }
        }
    }
}

/// The last denial of the first waiter, and when it was received.
#[derive(Clone, Debug)]
pub(super) struct CachedDenial {
    descriptor: Descriptor,
    received_at: Instant,
}

impl CachedDenial {
    pub(super) fn new(descriptor: Descriptor) -> Self {
        Self { descriptor, received_at: Instant::now() }
    }

    /// The denial as of now, with a shorter wait. If the wait is over and there is no newer decision, the shortest possible wait remains.
    fn later(&self) -> Descriptor {
        let elapsed = self.received_at.elapsed();
        match self.wait() {
            Some(wait) => self.after(elapsed.min(wait.saturating_sub(SHORTEST_WAIT))),
            None => self.descriptor.clone(),
        }
    }

    /// The denial as of now, if it came from the store and has not expired.
    fn unexpired_denial(&self) -> Option<Descriptor> {
        let elapsed = self.received_at.elapsed();
        (!self.descriptor.local && !self.is_expired(elapsed)).then(|| self.after(elapsed))
    }

    fn is_expired(&self, elapsed: Duration) -> bool {
        self.wait().is_none_or(|wait| wait <= elapsed)
    }

    fn wait(&self) -> Option<Duration> {
        self.descriptor.decision.as_ref().and_then(Decision::retry_after)
    }

    fn after(&self, elapsed: Duration) -> Descriptor {
        let decision = self.descriptor.decision.as_ref().map(|decision| decision.later(elapsed));
        Descriptor { decision, ..self.descriptor.clone() }
    }
}

impl WaitQueues {
    pub(super) fn new(max_waiters: usize) -> Self {
        Self { max_waiters, waiter_count: AtomicUsize::new(0), queues: Mutex::default() }
    }

    /// Whether there is any queue, which is rare.
    pub(super) fn any_waiters(&self) -> bool {
        self.waiter_count.load(Ordering::Acquire) > 0
    }

    /// Whether requests wait for this policy and key.
    pub(super) fn has_queue(&self, policy: &Policy, key: &Key) -> bool {
        self.any_waiters() && self.queues().contains_key(&QueueKey::new(policy, key))
    }

    /// If there is a queue: the denial with which an earlier waiter of at most this cost left, or else the last denial of the first waiter.
    pub(super) fn denial(&self, queue_key: &QueueKey, cost: u64) -> Option<Descriptor> {
        self.queues().get(queue_key).map(|queue| queue.rejection(cost).unwrap_or_else(|| queue.denial.later()))
    }

    /// Joins the end of a queue, which starts with this denial if it is new. `None` if too many requests wait already.
    pub(super) fn join(self: &Arc<Self>, queue_key: QueueKey, denial: impl FnOnce() -> CachedDenial) -> Option<Waiter> {
        let mut queues = self.queues();
        if self.waiter_count.load(Ordering::Relaxed) >= self.max_waiters {
            return None;
        }
        self.waiter_count.fetch_add(1, Ordering::Release);
        let queue = match queues.entry(queue_key.clone()) {
            Entry::Occupied(queue) => queue.into_mut(),
            Entry::Vacant(vacant) => vacant.insert(WaitQueue::new(denial())),
        };
        let (begins_queue, number) = (queue.first().is_none(), queue.next_number);
        let wake = Arc::new(Notify::new());
        queue.next_number += 1;
        queue.queued.insert(number, Arc::clone(&wake));
        queue.advance();
        Some(Waiter { number, begins_queue, wake, queue_key, since: Instant::now(), queues: Arc::clone(self) })
    }

    /// Wakes the first waiter of a queue, if any, because units were given back.
    pub(super) fn wake(&self, queue_key: &QueueKey) {
        if self.any_waiters()
            && let Some(queue) = self.queues().get_mut(queue_key)
        {
            queue.rejection = None;
            queue.wake_first.notify_one();
        }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<QueueKey, WaitQueue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The position of a request in a queue. Leaves the queue on drop.
#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    begins_queue: bool,
    /// Wakes the waiter when its turn has come, or makes it check for its turn again.
    wake: Arc<Notify>,
    queue_key: QueueKey,
    since: Instant,
    queues: Arc<WaitQueues>,
}

impl Waiter {
    /// Waits for its turn to call the store.
    pub(super) async fn wait_for_turn(&self) {
        while let Err(due) = self.try_take_turn() {
            // Checks again after a wake-up or a timeout. The waiter that got the wake-up may be stalled as well.
            let _ = timeout_at(due.min(Instant::now() + RECHECK), self.wake.notified()).await;
        }
    }

    /// Takes its turn if that has come. Otherwise returns the instant at which the next active waiter counts as stalled.
    fn try_take_turn(&self) -> Result<(), Instant> {
        let mut queues = self.queues.queues();
        let Some(queue) = queues.get_mut(&self.queue_key) else { return Ok(()) };
        let now = Instant::now();
        queue.set_due(self.number, now);
        if queue.stalled.remove(&self.number) {
            queue.queued.insert(self.number, Arc::clone(&self.wake));
            queue.advance();
        }
        queue.skip_stalled();
        queue.promotion_noticed(self.number);
        if queue.active.contains_key(&self.number) {
            return Ok(());
        }
        Err(queue.active.values().min().copied().unwrap_or(now + RECHECK))
    }

    /// Marks its call as running until this instant at the latest.
    pub(super) fn call_until(&self, until: Instant) {
        if let Some(queue) = self.queues.queues().get_mut(&self.queue_key) {
            queue.set_due(self.number, until);
        }
    }

    /// Whether no other waiter was active or queued when this one joined.
    pub(super) const fn begins_queue(&self) -> bool {
        self.begins_queue
    }

    /// After this waiter was admitted, doubles the maximum number of active waiters, up to `room`. Only the first waiter may
    /// do this, so that a denied waiter is not overtaken repeatedly by cheaper ones.
    pub(super) fn widen(&self, room: u64) {
        if let Some(queue) = self.queues.queues().get_mut(&self.queue_key)
            && queue.first() == Some(self.number)
        {
            let max_active = usize::try_from(room).unwrap_or(usize::MAX).max(1);
            queue.max_active = queue.max_active.saturating_mul(2).min(max_active);
            queue.rejection = None;
        }
    }

    /// Lets only the first waiter call from now on: there is no room, or the call failed.
    pub(super) fn narrow(&self) {
        if let Some(queue) = self.queues.queues().get_mut(&self.queue_key) {
            queue.max_active = 1;
        }
    }

    /// Waits to call again after [`narrow`](Self::narrow): the first waiter until `then`, the others until their turn has come again.
    /// Returns whether that was before `until`.
    pub(super) async fn wait_again(&self, then: Instant, until: Instant) -> bool {
        if !self.requeue() {
            self.sleep_as_first(then).await;
            // A stalled waiter may be back in front.
            self.requeue();
        }
        // If this waiter was stalled, another one has its turn.
        timeout_at(until, self.wait_for_turn()).await.is_ok()
    }

    /// Gives up its turn if another waiter is in front of it, and returns whether it has.
    fn requeue(&self) -> bool {
        let mut queues = self.queues.queues();
        let Some(queue) = queues.get_mut(&self.queue_key) else { return false };
        if queue.first() == Some(self.number) {
            return false;
        }
        queue.leave(self.number);
        queue.queued.insert(self.number, Arc::clone(&self.wake));
        queue.advance();
        true
    }

    /// Sleeps as the first waiter until the next store call: at `until`, after [`RECHECK`], or when units are given back, whichever is
    /// first.
    async fn sleep_as_first(&self, until: Instant) {
        let until = until.min(Instant::now() + RECHECK);
        let Some(wake) = self.first_wake(until) else { return };
        // Continues after a wake-up or a timeout.
        let _ = timeout_at(until, wake.notified()).await;
    }

    /// The wake-up of the first waiter, which continues at `until` in any case.
    fn first_wake(&self, until: Instant) -> Option<Arc<Notify>> {
        let mut queues = self.queues.queues();
        let queue = queues.get_mut(&self.queue_key)?;
        queue.set_due(self.number, until);
        Some(Arc::clone(&queue.wake_first))
    }

    /// The policy and key of its queue.
    pub(super) const fn queue_key(&self) -> &QueueKey {
        &self.queue_key
    }

    /// The last denial from the store for the first waiter, if it has not expired.
    pub(super) fn unexpired_denial(&self) -> Option<Descriptor> {
        self.queues.queues().get(&self.queue_key)?.denial.unexpired_denial()
    }

    /// Stores its denial for the others, if it is the first waiter.
    pub(super) fn set_denial(&self, denial: CachedDenial) {
        if let Some(queue) = self.queues.queues().get_mut(&self.queue_key)
            && queue.first() == Some(self.number)
        {
            queue.denial = denial;
            queue.rejection = None;
        }
    }

    /// Stores a denial that it cannot wait for, if it is the first waiter. Followers that cost as much and cannot wait either are rejected
    /// without a call.
    pub(super) fn set_rejection(&self, denial: CachedDenial, cost: u64) {
        if let Some(queue) = self.queues.queues().get_mut(&self.queue_key)
            && queue.first() == Some(self.number)
        {
            queue.rejection = Some((denial, cost));
        }
    }

    /// The unexpired denial with which an earlier waiter left, if that waiter cost at most `cost`.
    pub(super) fn rejection(&self, cost: u64) -> Option<Descriptor> {
        self.queues.queues().get(&self.queue_key)?.rejection(cost)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.queue_key.policy.metrics().waited(self.since.elapsed());
        let mut queues = self.queues.queues();
        self.queues.waiter_count.fetch_sub(1, Ordering::Release);
        if let Entry::Occupied(mut queue) = queues.entry(self.queue_key.clone()) {
            let waiters = queue.get_mut();
            waiters.leave(self.number);
            waiters.promotion_noticed(self.number);
            waiters.advance();
            if waiters.active.is_empty() {
                // The next request calls the store.
                waiters.rejection = None;
                if waiters.stalled.is_empty() {
                    queue.remove();
                }
            }
        }
    }
}
