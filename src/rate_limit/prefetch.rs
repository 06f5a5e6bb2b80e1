use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::select;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::Instrument;

use super::decision::{Decision, LimitStatus, Outcome, Receipt};
use super::metrics::Leased;
use super::policy::Policy;
use super::quota::{Algorithm, Limit};
use super::sharded_map::{Expiry, Location, ShardedMap};
use super::store::{RateLimitStore, Request, as_change};
use crate::error::StoreError;
use crate::key::Key;
use crate::panics::discard_joined;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

/// Draws units from the store in advance for frequently used keys, and hands them out in this process.
///
/// A key with ten thousand requests per second, such as a global quota, then needs one round trip for hundreds of requests. Wraps any
/// store, and works below a layer and a [`Limiter`](super::Limiter):
///
/// ```
/// use tollgate::rate_limit::QuotaPrefetch;
/// use tollgate::{Limiter, MemoryBackend, Policy, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
/// let store = QuotaPrefetch::new(MemoryBackend::new()); // or a `RedisBackend`, where it saves round trips
/// let limiter = Limiter::new(store.clone(), Policy::new("all", Quota::per_second(10_000).fixed_window()));
///
/// for _ in 0..5_000 {
///     assert!(limiter.check("global").await?.is_allowed());
/// }
/// let stats = store.stats();
/// assert!(stats.handed_out > 4_900 && stats.draws < 30, "{stats:?}");
/// # Ok(())
/// # }
/// ```
///
/// A lease is the units that a draw has charged for a key. Clones share the leases. If many of your clients are over their limits, put
/// a [`DenyCache`](super::DenyCache) around this store.
///
/// # Accuracy
///
/// It never admits beyond the quota: units are charged in the store before they are handed out, in the window in which they are used. A
/// lease ends with the first of the windows from which it was drawn. Its end is computed conservatively: the remaining time is counted from
/// before the store call, and shortened by a thousandth and one millisecond for clock drift. (The store's clock must not be set forward
/// meanwhile, and the machine must not be suspended.)
///
/// It may admit less than the quota: units that one process holds are not available to others, and expire if they are not used in time. A
/// lease is at most an [eighth](Self::share) of the remaining units, so leases shrink as the quota is used up. Near its end there are no
/// leases: the last units are charged one request at a time, and every denial comes from the store. So an idle process holds at most an
/// eighth of the units that it knew to remain before the draw, plus the cost of the request that drew. `n` processes together hold at most
/// `1 - (7/8)^n` of the quota. The [`stats`](Self::stats) and the [metrics](crate::rate_limit#metrics) count expired units.
///
/// A block or reset by another process is noticed when the lease ends, after the [maximum age](Self::max_age) at the latest. Until then,
/// the rest of the lease is handed out. A block or reset through this store or a clone of it ends the lease at once. A debt made by
/// [`settle`](RateLimitStore::settle) does not end the lease, since the units of the lease were charged before. If you give back more than
/// was charged, you give back units that are held for other requests.
///
/// # Usage
///
/// Leases exist only for policies whose limits are all [fixed windows](super::Quota::fixed_window), since only there a unit has the same
/// value at any time of the window. Calls for other policies go to the store. So do [`check_all`](RateLimitStore::check_all) with several
/// requests, and [`peek`](RateLimitStore::peek), which counts the units held here as used.
///
/// A key gets a lease after [`PROMOTE_AFTER`](Self::PROMOTE_AFTER) requests within [`EARN_WITHIN`](Self::EARN_WITHIN). Other keys are
/// counted exactly and lose nothing. Leases start small. They double when they are used up within 10 ms, and are halved when they are not
/// used up. A request that costs more than a lease would hold goes to the store.
///
/// A decision from a lease shows the units that remained at the draw, plus the rest of the lease. Its receipt is that of the draw, so
/// [`settle`](RateLimitStore::settle) corrects the charge in the store.
///
/// Units that are not used within the maximum age are given back with the next request for the key, not by a background task. So the units
/// of an idle key, and units held when the last clone is dropped, expire with the window, unless you [give them back](Self::give_back)
/// before.
///
/// # Cancellation
///
/// A draw runs in a task of the runtime, whether or not the future that started it is polled. If that future is dropped, for example at a
/// deadline, requests that wait for the draw each charge only their own cost instead. A request that has waited for the maximum age does
/// the same. The draw continues for the maximum age, or for one second if that is longer, and its units are handed out.
///
/// A draw that fails or takes longer may have been charged. Its units count as expired, and the key has to qualify for a lease again. So at
/// most one lease per key is lost while a store hangs.
#[derive(Debug)]
pub struct QuotaPrefetch<S> {
    store: Arc<S>,
    max_age: Duration,
    share: u32,
    slots: Arc<ShardedMap<Slot, ShardState>>,
}

/// The units that a [`QuotaPrefetch`] has drawn: handed out, given back, expired, or held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefetchStats {
    /// The number of draws.
    pub draws: u64,
    /// The units that were charged in the store by draws, or may have been if no reply arrived.
    pub drawn: u64,
    /// The drawn units that admitted requests have used.
    pub handed_out: u64,
    /// The units that were given back to the store.
    pub given_back: u64,
    /// The units that were not used in time. No request could use them.
    pub expired: u64,
    /// The units that can still be handed out.
    pub held: u64,
}

/// The state of a shard.
#[derive(Debug, Default)]
struct ShardState {
    stats: PrefetchStats,
    // Hashes of keys that are being reset or blocked through this store. Such a key gets no lease meanwhile, since a draw may be charged
    // before or after the change.
    changing: Vec<u64>,
}

/// The state of a key.
#[derive(Debug)]
struct Slot {
    policy: Policy,
    lease: Option<Lease>,
    // While units are drawn, other requests wait for `refill_done`. Its address also distinguishes the slot from a later one for the same
    // key.
    pending_refill: Option<PendingRefill>,
    refill_done: Arc<Notify>,
    // The size of the next draw.
    size: u64,
    // How many requests the store has admitted since `counting_since`.
    direct_count: u32,
    counting_since: Instant,
    // The units that remained at the last store call, and until when that is valid.
    room: u64,
    room_until: Instant,
}

#[derive(Debug)]
struct PendingRefill {
    began: Instant,
    // Whether the request that started it was dropped.
    is_abandoned: bool,
}

#[derive(Debug)]
struct Lease {
    left: u64,
    // The drawn units.
    size: u64,
    // The decision of the store, and when it was received.
    decision: Decision,
    received_at: Instant,
    // No units are handed out after this.
    ends: Instant,
    // Until when the rest can be given back.
    window_ends: Instant,
}

impl Expiry for Slot {
    fn expires_at(&self) -> Instant {
        let earning = self.counting_since + QuotaPrefetch::<()>::EARN_WITHIN;
        if self.size == 0 {
            return earning;
        }
        // Keys with a lease are kept longer than new keys.
        let lease = self.lease.as_ref().map_or(self.room_until, |lease| lease.ends);
        lease.max(earning) + QuotaPrefetch::<()>::EARN_WITHIN * 10
    }
}

/// The next step for a request.
enum Step {
    Answer(Decision),
    /// Charge only this request in the store.
    CallStore,
    /// Draw this many units.
    Refill(u64, Arc<Notify>),
    /// Wait for another request's draw for at most this long.
    Wait(Arc<Notify>, Duration),
    /// Give back the rest of an expired lease, and decide again.
    GiveBack(Receipt, u64),
}

impl<S> QuotaPrefetch<S> {
    /// The default maximum number of keys.
    pub const DEFAULT_CAPACITY: usize = 10_000;
    /// The default maximum age of a lease.
    pub const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);
    /// How many requests for a key the store has to admit within [`EARN_WITHIN`](Self::EARN_WITHIN) before the key gets a lease.
    pub const PROMOTE_AFTER: u32 = 8;
    /// See [`PROMOTE_AFTER`](Self::PROMOTE_AFTER).
    pub const EARN_WITHIN: Duration = Duration::from_millis(100);
    /// A lease that is used up within this time is too small.
    const QUICK: Duration = Duration::from_millis(10);
    /// How many leases are given back at the same time.
    const MAX_CONCURRENT_RETURNS: usize = 64;

    /// Wraps `store`.
    pub fn new(store: S) -> Self {
        let slots = Arc::new(ShardedMap::new(Self::DEFAULT_CAPACITY));
        Self { store: Arc::new(store), max_age: Self::DEFAULT_MAX_AGE, share: 8, slots }
    }

    /// Sets the maximum number of keys, at least one. A further key evicts the key of a sample whose lease ends first. The returned
    /// store starts without leases, and shares none with earlier clones. Defaults to [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY), 10,000.
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { slots: Arc::new(ShardedMap::new(keys)), ..self }
    }

    /// Sets how long a lease is kept, unless its window ends before. Blocks and resets by other processes are noticed after this time at
    /// the latest. Defaults to [`DEFAULT_MAX_AGE`](Self::DEFAULT_MAX_AGE), 1 second.
    #[must_use]
    pub fn max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// Sets the largest lease as a fraction of the remaining quota: one `share`-th; with 0 or 1, all of it. Set at least the number of your
    /// processes if all of them should get units. Defaults to 8.
    #[must_use]
    pub fn share(self, share: u32) -> Self {
        Self { share: share.max(1), ..self }
    }

    /// How long a background call may take.
    fn background_timeout(&self) -> Duration {
        self.max_age.max(Self::DEFAULT_MAX_AGE)
    }

    /// Returns the statistics of all clones.
    #[must_use]
    pub fn stats(&self) -> PrefetchStats {
        let mut sum = PrefetchStats::default();
        for shard in self.slots.lock_each() {
            let (stats, now) = (shard.state.stats, Instant::now());
            sum.draws += stats.draws;
            sum.drawn += stats.drawn;
            sum.handed_out += stats.handed_out;
            sum.given_back += stats.given_back;
            sum.expired += stats.expired;
            for lease in shard.entries().filter_map(|slot| slot.lease.as_ref()) {
                // The rest of an expired lease can be given back until its window ends.
                let units = if lease.window_ends > now { &mut sum.held } else { &mut sum.expired };
                *units += lease.left;
            }
        }
        sum
    }

    /// Takes all leases and records their units as expired. Returns the leases whose units can still be given back.
    fn take_held(&self) -> Vec<(Key, Receipt, ReturnGuard)> {
        let (mut held, now) = (Vec::new(), Instant::now());
        for mut shard in self.slots.lock_each() {
            let (slots, state) = shard.entries_with_state();
            for (key, slot) in slots {
                let Some(lease) = slot.lease.take() else { continue };
                match lease.decision.receipt().filter(|_| lease.window_ends > now) {
                    Some(receipt) => {
                        state.stats.expired += lease.left;
                        held.push((*key, receipt, ReturnGuard { policy: slot.policy.clone(), units: lease.left }));
                    }
                    None => state.record_expired(&slot.policy, Some(lease)),
                }
            }
        }
        held
    }

    /// The next step for a request of `cost` units, more than 0. `can_wait` is false for a caller that cannot wait.
    fn step(&self, location: Location, policy: &Policy, key: &Key, cost: u64, can_wait: bool) -> Step {
        let mut shard = self.slots.lock(location);
        let shard = &mut *shard;
        let now = Instant::now();
        if shard.state.changing.contains(&location.hash) {
            return Step::CallStore;
        }
        if shard.get_mut(location, policy, key).is_none_or(|slot| slot.policy != *policy) {
            let slot = Slot::new(policy, now);
            shard.put(location, policy, key, slot, now, |state, slot| state.record_expired(&slot.policy, slot.lease));
            return Step::CallStore;
        }
        let (slot, state) = shard.get_with_state(location, policy, key);
        let Some(slot) = slot else { return Step::CallStore };

        if let Some(lease) = slot.lease.as_mut().filter(|lease| lease.ends > now) {
            if let Some(left) = lease.left.checked_sub(cost) {
                lease.left = left;
                state.stats.handed_out += cost;
                let decision = lease.decision.later(now - lease.received_at).with_more(left);
                if left == 0 {
                    slot.used_up(now);
                }
                return Step::Answer(decision);
            }
            if now - lease.received_at <= Self::QUICK {
                slot.size = slot.size.max(lease.size.saturating_mul(2));
            }
        } else if let Some(lease) = slot.lease.take() {
            let receipt = lease.decision.receipt().filter(|_| lease.window_ends > now);
            match receipt {
                Some(_) if !can_wait => {
                    slot.lease = Some(lease);
                    return Step::Wait(Arc::clone(&slot.refill_done), Duration::ZERO);
                }
                Some(receipt) => {
                    slot.size = lease.size / 2;
                    state.stats.expired += lease.left;
                    return Step::GiveBack(receipt, lease.left);
                }
                None => {
                    slot.size = lease.size / 2;
                    state.record_expired(policy, Some(lease));
                }
            }
        }
        self.refill(slot, policy, cost, can_wait, now)
    }

    /// The next step for a request that no lease covers: a refill, which all waiting requests of the key share.
    fn refill(&self, slot: &mut Slot, policy: &Policy, cost: u64, can_wait: bool, now: Instant) -> Step {
        let capacity = || policy.limits().iter().map(Limit::capacity).min().unwrap_or(0);
        let room = if slot.room_until > now { slot.room } else { capacity() };
        let units = slot.size.min(room / u64::from(self.share));
        if units <= cost {
            return Step::CallStore;
        }
        match &slot.pending_refill {
            // Requests no longer wait for this draw.
            Some(pending_refill) if pending_refill.is_abandoned || now - pending_refill.began >= self.max_age => {
                Step::CallStore
            }
            Some(pending_refill) => {
                Step::Wait(Arc::clone(&slot.refill_done), self.max_age - (now - pending_refill.began))
            }
            None if !can_wait => Step::Wait(Arc::clone(&slot.refill_done), Duration::ZERO),
            None => {
                slot.pending_refill = Some(PendingRefill { began: now, is_abandoned: false });
                Step::Refill(units, Arc::clone(&slot.refill_done))
            }
        }
    }

    /// Records the decision of the store about a single request.
    fn record_decision(
        &self,
        location: Location,
        policy: &Policy,
        key: &Key,
        cost: u64,
        called_at: Instant,
        decision: &Decision,
    ) {
        let mut shard = self.slots.lock(location);
        let Some(slot) = shard.get_mut(location, policy, key) else { return };
        slot.update_room(called_at, decision);
        let now = Instant::now();
        if now - slot.counting_since > Self::EARN_WITHIN {
            (slot.direct_count, slot.counting_since) = (0, now);
        }
        slot.direct_count += u32::from(decision.is_allowed());
        if slot.direct_count >= Self::PROMOTE_AFTER {
            (slot.direct_count, slot.counting_since) = (0, now);
            slot.size = slot.size.max(cost.saturating_mul(2));
        }
    }

    /// Stores a lease of `units`, of which `cost` are used at once. Returns the decision for the request that drew, and how many units to
    /// give back because the draw took too long.
    fn install(
        &self,
        refill: &Refill<S>,
        units: u64,
        cost: u64,
        called_at: Instant,
        decision: Decision,
    ) -> (Decision, u64) {
        let mut shard = self.slots.lock(refill.location);
        let received_at = Instant::now();
        let (slot, state) = shard.get_with_state(refill.location, &refill.policy, &refill.key);
        state.stats.draws += 1;
        state.stats.drawn += units;
        refill.policy.metrics().leased(Leased::Drawn, units);
        state.stats.handed_out += cost;
        let rest = units - cost;
        let Some(slot) = slot.filter(|slot| Arc::ptr_eq(&slot.refill_done, &refill.refill_done)) else {
            // The key was reset, blocked or evicted meanwhile.
            state.stats.expired += rest;
            refill.policy.metrics().leased(Leased::Expired, rest);
            return (decision, 0);
        };
        slot.update_room(called_at, &decision);
        let reset = decision.limits().iter().map(LimitStatus::reset_after).min().unwrap_or_default();
        let lasts = reset.saturating_sub(reset / 1_000 + Duration::from_millis(1));
        let (ends, window_ends) = (called_at + lasts.min(self.max_age), called_at + lasts);
        let receipt = decision.receipt();
        if ends <= received_at || receipt.is_none() {
            // The store is too slow for leases, so other requests should not wait for one.
            slot.size = 0;
            state.stats.expired += rest;
            return (decision, rest);
        }
        let mut lease = Lease { left: rest, size: units, decision, received_at, ends, window_ends };
        // Adds the rest of the previous lease, which was too small for the request.
        match slot.lease.take() {
            Some(old) if old.has_same_windows_as(&lease) => lease.left = lease.left.saturating_add(old.left),
            old => state.record_expired(&refill.policy, old),
        }
        let decision = lease.decision.clone().with_more(lease.left);
        slot.lease = Some(lease);
        (decision, 0)
    }

    fn is_drawing(&self, location: Location, policy: &Policy, key: &Key, refill_done: &Arc<Notify>) -> bool {
        let mut shard = self.slots.lock(location);
        shard.get_mut(location, policy, key).is_some_and(|slot| {
            slot.pending_refill.as_ref().is_some_and(|pending_refill| !pending_refill.is_abandoned)
                && Arc::ptr_eq(&slot.refill_done, refill_done)
        })
    }

    /// Removes the lease of a key. The key gets no other lease until the returned guard is dropped.
    fn change<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> ChangeGuard<'a> {
        let location = self.slots.locate(policy, key);
        let mut shard = self.slots.lock(location);
        shard.state.changing.push(location.hash);
        if let Some(slot) = shard.remove(location, policy, key) {
            shard.state.record_expired(policy, slot.lease);
        }
        ChangeGuard { slots: &self.slots, location }
    }
}

impl Lease {
    /// Whether both were drawn from the same windows, which end at the same instants of the store's clock.
    fn has_same_windows_as(&self, other: &Self) -> bool {
        let (Some(own_receipt), Some(other_receipt)) = (self.decision.receipt(), other.decision.receipt()) else {
            return false;
        };
        let ends = |at: Receipt, limit: &LimitStatus| Duration::from_micros(at.as_micros()) + limit.reset_after();
        let mut limits = self.decision.limits().iter().zip(other.decision.limits());
        limits.all(|(own, other_limit)| ends(own_receipt, own) == ends(other_receipt, other_limit))
    }
}

impl ShardState {
    fn record_expired(&mut self, policy: &Policy, lease: Option<Lease>) {
        if let Some(lease) = lease {
            self.stats.expired += lease.left;
            policy.metrics().leased(Leased::Expired, lease.left);
        }
    }
}

impl Slot {
    fn new(policy: &Policy, now: Instant) -> Self {
        Self {
            policy: policy.clone(),
            lease: None,
            pending_refill: None,
            refill_done: Arc::default(),
            size: 0,
            direct_count: 0,
            counting_since: now,
            room: 0,
            room_until: now,
        }
    }

    fn used_up(&mut self, now: Instant) {
        if let Some(lease) = self.lease.take()
            && now - lease.received_at <= QuotaPrefetch::<()>::QUICK
        {
            self.size = self.size.max(lease.size.saturating_mul(2));
        }
    }

    fn update_room(&mut self, called_at: Instant, decision: &Decision) {
        if decision.outcome() == Outcome::Blocked {
            (self.room, self.room_until) = (0, called_at + decision.retry_after().unwrap_or_default());
            return;
        }
        let windows = decision.limits().iter().filter(|limit| !limit.reset_after().is_zero());
        self.room = decision.limits().iter().map(LimitStatus::remaining).min().unwrap_or(0);
        self.room_until = called_at + windows.map(LimitStatus::reset_after).min().unwrap_or_default();
    }
}

/// A running draw for a key. Wakes waiting requests when it ends in any way.
struct Refill<S> {
    prefetch: QuotaPrefetch<S>,
    location: Location,
    policy: Policy,
    key: Key,
    refill_done: Arc<Notify>,
    // The requested units, which may have been charged; 0 once the store has replied.
    requested: u64,
}

/// The decision for the request that drew; `None` if the store did not have that many units.
type RefillReply = Result<Option<Decision>, StoreError>;

impl<S> Refill<S> {
    /// Marks the draw as abandoned by its request, and wakes the others. Its reply may still arrive.
    fn abandon(&self) {
        let mut shard = self.prefetch.slots.lock(self.location);
        if let Some(slot) = shard.get_mut(self.location, &self.policy, &self.key)
            && Arc::ptr_eq(&slot.refill_done, &self.refill_done)
            && let Some(pending_refill) = &mut slot.pending_refill
        {
            pending_refill.is_abandoned = true;
        }
        drop(shard);
        self.refill_done.notify_waiters();
    }
}

impl<S: RateLimitStore + Send + Sync + 'static> Refill<S> {
    /// Draws units for several requests. The first costs `cost` and waits for `reply`. If it is dropped, the draw continues for the
    /// background timeout.
    async fn run(mut self, cost: u64, mut reply: oneshot::Sender<RefillReply>) {
        let (called_at, units) = (Instant::now(), self.requested);
        let result = {
            let mut call = pin!(self.prefetch.store.check(&self.policy, &self.key, units));
            select! {
                biased;
                result = &mut call => result,
                () = reply.closed() => {
                    self.abandon();
                    match timeout(self.prefetch.background_timeout(), call).await {
                        Ok(result) => result,
                        Err(_) => return,
                    }
                }
            }
        };
        let decision = match result {
            Ok(decision) => decision,
            Err(error) => {
                drop(self);
                let _ = reply.send(Err(error));
                return;
            }
        };
        self.requested = 0;
        if !decision.is_allowed() {
            self.prefetch.record_decision(self.location, &self.policy, &self.key, cost, called_at, &decision);
            let is_final = decision.outcome() != Outcome::Limited;
            drop(self);
            let _ = reply.send(Ok(is_final.then_some(decision)));
            return;
        }
        let receipt = decision.receipt();
        // A dropped request needs no units.
        let cost = if reply.is_closed() { 0 } else { cost };
        let (decision, rest) = self.prefetch.install(&self, units, cost, called_at, decision);
        let (prefetch, location, policy, key) = (self.prefetch.clone(), self.location, self.policy.clone(), self.key);
        drop(self);
        let _ = reply.send(Ok(Some(decision)));
        match receipt {
            Some(receipt) if rest > 0 => {
                let repaid = prefetch.return_units(location, &key, receipt, ReturnGuard { policy, units: rest });
                let _ = timeout(prefetch.background_timeout(), repaid).await;
            }
            _ => policy.metrics().leased(Leased::Expired, rest),
        }
    }
}

impl<S> Drop for Refill<S> {
    fn drop(&mut self) {
        let mut shard = self.prefetch.slots.lock(self.location);
        let (slot, state) = shard.get_with_state(self.location, &self.policy, &self.key);
        if let Some(slot) = slot.filter(|slot| Arc::ptr_eq(&slot.refill_done, &self.refill_done)) {
            slot.pending_refill = None;
            if self.requested > 0 {
                // Further draws would lose as many units while the store hangs.
                (slot.size, slot.direct_count) = (0, 0);
                slot.room = slot.room.saturating_sub(self.requested);
            }
        }
        if self.requested > 0 {
            state.stats.draws += 1;
            state.stats.drawn += self.requested;
            state.stats.expired += self.requested;
            self.policy.metrics().leased(Leased::Drawn, self.requested);
            self.policy.metrics().leased(Leased::Expired, self.requested);
        }
        drop(shard);
        self.refill_done.notify_waiters();
    }
}

/// Units that are being given back. Its drop counts them as expired in the metrics, unless the call succeeded. They are not counted before,
/// since a metrics counter cannot be decremented.
struct ReturnGuard {
    policy: Policy,
    units: u64,
}

impl Drop for ReturnGuard {
    fn drop(&mut self) {
        self.policy.metrics().leased(Leased::Expired, self.units);
    }
}

// Not derived: `derive` would require `S: Clone`.
impl<S> Clone for QuotaPrefetch<S> {
    fn clone(&self) -> Self {
        Self { store: Arc::clone(&self.store), slots: Arc::clone(&self.slots), ..*self }
    }
}

struct ChangeGuard<'a> {
    slots: &'a ShardedMap<Slot, ShardState>,
    location: Location,
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        let mut shard = self.slots.lock(self.location);
        if let Some(index) = shard.state.changing.iter().position(|hash| *hash == self.location.hash) {
            shard.state.changing.swap_remove(index);
        }
    }
}

impl<S: RateLimitStore + Send + Sync + 'static> QuotaPrefetch<S> {
    async fn call_store(
        &self,
        location: Location,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> Result<Decision, StoreError> {
        let called_at = Instant::now();
        let decision = self.store.check(policy, key, cost).await?;
        self.record_decision(location, policy, key, cost, called_at, &decision);
        Ok(decision)
    }

    /// Draws units for several requests, of which the first costs `cost`. Runs in the background unless it completes at once, since other
    /// requests wait for it and this request may not be polled.
    async fn draw_units(&self, refill: Refill<S>, cost: u64) -> RefillReply {
        let (reply, receiver) = oneshot::channel();
        let mut task = Box::pin(refill.run(cost, reply).in_current_span());
        if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            match Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn(task)),
                // Without a runtime, only the request itself can run it.
                Err(_) => task.await,
            }
        }
        // Without a reply, the draw has ended with its runtime.
        receiver.await.unwrap_or(Ok(None))
    }

    /// Gives all held units of all clones back to the store. Call it before your program ends, when no more requests arrive. Otherwise
    /// these units expire with their window. Takes no longer than `deadline`; units that are not given back by then are lost.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::rate_limit::QuotaPrefetch;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
    /// # let store = QuotaPrefetch::new(MemoryBackend::new());
    /// # let limiter = Limiter::new(store.clone(), Policy::new("all", Quota::per_hour(10_000).fixed_window()));
    /// for _ in 0..1_000 {
    ///     assert!(limiter.check("global").await?.is_allowed());
    /// }
    /// store.give_back(Duration::from_secs(1)).await;
    /// assert_eq!(limiter.peek("global").await?.remaining(), Some(9_000));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancellation
    ///
    /// Units that are not given back when the future is dropped are lost.
    pub async fn give_back(&self, deadline: Duration) {
        let held = self.take_held();
        let given_back = async {
            let mut calls = JoinSet::new();
            for (key, receipt, guard) in held {
                if calls.len() == Self::MAX_CONCURRENT_RETURNS {
                    calls.join_next().await.into_iter().for_each(discard_joined);
                }
                let prefetch = self.clone();
                calls.spawn(async move {
                    prefetch.return_units(prefetch.slots.locate(&guard.policy, &key), &key, receipt, guard).await;
                });
            }
            while let Some(ended) = calls.join_next().await {
                discard_joined(ended);
            }
        };
        let _ = timeout(deadline, given_back).await;
    }

    /// Gives back units that the statistics count as expired. If the call fails, they stay expired.
    async fn return_units(&self, location: Location, key: &Key, receipt: Receipt, mut guard: ReturnGuard) {
        let units = guard.units;
        if self.store.settle(&guard.policy, key, receipt, -as_change(units)).await.is_ok() {
            guard.units = 0;
            guard.policy.metrics().leased(Leased::GivenBack, units);
            let stats = &mut self.slots.lock(location).state.stats;
            stats.expired -= units;
            stats.given_back += units;
        }
    }
}

/// Whether units for this cost may come from a lease: not for a cost of 0, and only if all limits are fixed windows.
fn is_leasable(policy: &Policy, cost: u64) -> bool {
    cost > 0 && policy.limits().iter().all(|limit| limit.algorithm() == Algorithm::FixedWindow)
}

impl<S: RateLimitStore + Send + Sync + 'static> RateLimitStore for QuotaPrefetch<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        if !is_leasable(policy, cost) {
            return self.store.check(policy, key, cost).await;
        }
        let location = self.slots.locate(policy, key);
        loop {
            match self.step(location, policy, key, cost, true) {
                Step::Answer(decision) => return Ok(decision),
                Step::CallStore => return self.call_store(location, policy, key, cost).await,
                Step::Refill(units, refill_done) => {
                    let refill = Refill {
                        prefetch: self.clone(),
                        location,
                        policy: policy.clone(),
                        key: *key,
                        refill_done,
                        requested: units,
                    };
                    if let Some(decision) = self.draw_units(refill, cost).await? {
                        return Ok(decision);
                    }
                    // The store has fewer units than the draw, so this request charges only its own cost.
                    return self.call_store(location, policy, key, cost).await;
                }
                Step::Wait(refill_done, longest) => {
                    let done = refill_done.notified();
                    // The draw may have ended before this request started to listen.
                    if self.is_drawing(location, policy, key, &refill_done) {
                        let _ = timeout(longest, done).await;
                    }
                }
                Step::GiveBack(receipt, units) => {
                    self.return_units(location, key, receipt, ReturnGuard { policy: policy.clone(), units }).await;
                }
            }
        }
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        if !is_leasable(policy, cost) {
            return self.store.check_now(policy, key, cost);
        }
        let location = self.slots.locate(policy, key);
        match self.step(location, policy, key, cost, false) {
            Step::Answer(decision) => Some(decision),
            Step::CallStore => {
                let called_at = Instant::now();
                let decision = self.store.check_now(policy, key, cost)?;
                self.record_decision(location, policy, key, cost, called_at, &decision);
                Some(decision)
            }
            Step::Refill(..) | Step::Wait(..) | Step::GiveBack(..) => None,
        }
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        if let [Request { policy, key, cost }] = requests {
            return Ok(vec![self.check(policy, key, *cost).await?]);
        }
        self.store.check_all(requests).await
    }

    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        if let [Request { policy, key, cost }] = requests {
            return Some(vec![self.check_now(policy, key, *cost)?]);
        }
        self.store.check_all_now(requests)
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.store.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        self.store.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        let _change = self.change(policy, key);
        self.store.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        let _change = self.change(policy, key);
        self.store.reset(policy, key).await
    }

    fn reach(&self) -> Reach {
        self.store.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.store.add_to_shutdown(target);
    }
}
