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
use super::sharded_map::{Expiry, Place, Shards};
use super::store::{RateLimitStore, Request};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::Reach;
use crate::panics::discard_joined;

/// Draws units ahead from the store for keys that are asked about all the time, and hands them out in this process.
///
/// One key that takes ten thousand requests a second, such as a quota for everybody, then costs a round trip for hundreds of
/// requests instead of one each. Goes around any store, under a layer and a [`Limiter`](super::Limiter) alike:
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
///     assert!(limiter.check("everybody").await?.is_allowed());
/// }
/// let stats = store.stats();
/// assert!(stats.handed_out > 4_900 && stats.draws < 30, "{stats:?}");
/// # Ok(())
/// # }
/// ```
///
/// Clones share the leases. With many clients that are over their limits put a [`DenyCache`](super::DenyCache) around it.
///
/// # What it may get wrong
///
/// It never admits beyond the quota: what is handed out was charged in the store before, in the window in which it is used.
/// A lease ends with the first of the windows that it was drawn from, by a clock that runs no later than the store's: it
/// counts from before the question was sent what the store said, later, of the time left, less a thousandth of it and a
/// millisecond for clocks that do not run alike. (The store's clock must not be set forward meanwhile, nor the machine be
/// suspended.)
///
/// It may admit less than the quota: what one process holds cannot be used by others, and is lost if it is not used in time.
/// A lease is at most an [eighth](Self::share) of what was left, so leases shrink as the quota is used up, and near its end
/// there are none: the last units are charged one request at a time, and a denial is always the store's own. So what an idle process
/// holds is no more than an eighth of what was left when it drew, and what the request before it costs; `n` of them hold `1 - (7/8)^n` of the
/// quota together. How much was lost is in the [`stats`](Self::stats) and in the [metrics](crate::rate_limit#metrics).
///
/// What others change is noticed when the lease ends, after the [maximum age](Self::max_age) at the latest: a block, a reset
/// (what is left of the lease was charged before it and is handed out after it). One that goes through these leases or a
/// clone of them ends the lease at once. A debt made by [`settle`](RateLimitStore::settle) does not, since what is held was
/// charged before; and who gives back more than was charged gives back what is held for others.
///
/// # What it is for
///
/// Only policies whose limits are all [fixed windows](super::Quota::fixed_window), because only there a unit is as good at
/// any time of the window. All other policies are passed on to the store as they are, and so are
/// [`check_all`](RateLimitStore::check_all) and [`peek`](RateLimitStore::peek), which does not see what is held here.
///
/// A key has to earn its lease with [`PROMOTE_AFTER`](Self::PROMOTE_AFTER) requests within [`EARN_WITHIN`](Self::EARN_WITHIN): all others are
/// counted to the unit and lose nothing. Leases begin small, double when they are used up within 10 ms, and are halved when
/// they are not used up. A request that costs more than a lease would hold goes to the store.
///
/// A decision from a lease says what remained when it was drawn, and what was not handed out of it since. Its receipt is
/// that of the draw, so [`settle`](RateLimitStore::settle) corrects the charge in the store.
///
/// What is not used within the maximum age is given back with the key's next request. There is no task that would do it
/// before: what an idle key holds, and what is held when the last clone is dropped, is lost with the end of the window, unless it was
/// [given back](Self::give_back) before.
///
/// # Cancellation
///
/// A draw is carried out in a task of the runtime, whether or not the future that has begun it is polled. Where that one is dropped, at a deadline for
/// instance, those who wait for the draw ask for just what they need, and so does whoever has waited for the maximum age. The draw goes on for as
/// long again, or for a second if that is longer, and what comes of it is handed out.
///
/// One that fails, or takes longer than that, may have been charged. It counts as lost, and the key has to earn its lease anew: no more than one lease
/// is lost while a store stands still.
#[derive(Debug)]
pub struct QuotaPrefetch<S> {
    store: Arc<S>,
    max_age: Duration,
    share: u32,
    slots: Arc<Shards<Slot, Books>>,
}

/// What became of the units that a [`QuotaPrefetch`] has drawn: they were handed out, given back, lost, or are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseStats {
    /// How often units were drawn ahead.
    pub draws: u64,
    /// The units that were charged to the store by that, or may have been where no answer came.
    pub drawn: u64,
    /// The units of these that requests were admitted with.
    pub handed_out: u64,
    /// The units that were given back to the store.
    pub given_back: u64,
    /// The units that were not used in time: nobody could have them.
    pub expired: u64,
    /// The units that can still be handed out.
    pub held: u64,
}

/// What is counted for a part of the keys.
#[derive(Debug, Default)]
struct Books {
    stats: LeaseStats,
    // The keys that are being reset or blocked through us. They get no lease until that is done, since nobody knows whether
    // what is drawn meanwhile is charged before or after.
    changing: Vec<u64>,
}

/// What is known of a key.
#[derive(Debug)]
struct Slot {
    policy: Policy,
    lease: Option<Lease>,
    // While units are drawn the others wait to be told that it is over. This also tells the slot from a later one of the same key.
    drawing: Option<Drawing>,
    flight: Arc<Notify>,
    // How much to draw next.
    size: u32,
    // How many requests the store has admitted since when.
    direct: u32,
    since: Instant,
    // What was left when the store was asked last, and until when that says something.
    room: u32,
    room_until: Instant,
}

#[derive(Debug)]
struct Drawing {
    began: Instant,
    // Whether the request that began it has gone.
    is_left: bool,
}

#[derive(Debug)]
struct Lease {
    left: u32,
    // How much it was.
    size: u32,
    // The store's decision, and when it came.
    decision: Decision,
    told: Instant,
    // No more is handed out from then on.
    ends: Instant,
    // Until when the rest can be given back.
    window_ends: Instant,
}

impl Expiry for Slot {
    fn ends(&self) -> Instant {
        let earning = self.since + QuotaPrefetch::<()>::EARN_WITHIN;
        if self.size == 0 {
            return earning;
        }
        // Whoever has earned a lease is kept longer than newcomers.
        let lease = self.lease.as_ref().map_or(self.room_until, |lease| lease.ends);
        lease.max(earning) + QuotaPrefetch::<()>::EARN_WITHIN * 10
    }
}

/// What is to be done about a request.
enum Step {
    Answer(Decision),
    /// Ask the store about just this.
    Ask,
    /// Draw so many units.
    Refill(u32, Arc<Notify>),
    /// Somebody else does: wait for that, but no longer.
    Wait(Arc<Notify>, Duration),
    /// Give back what is left of an old lease, and look again.
    GiveBack(Receipt, u32),
}

impl<S> QuotaPrefetch<S> {
    /// How many keys are known at once unless told otherwise.
    pub const DEFAULT_CAPACITY: usize = 10_000;
    /// How long a lease is kept unless told otherwise.
    pub const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);
    /// How many requests of a key the store has to admit one by one, within [`EARN_WITHIN`](Self::EARN_WITHIN), before it
    /// gets a lease.
    pub const PROMOTE_AFTER: u32 = 8;
    /// See [`PROMOTE_AFTER`](Self::PROMOTE_AFTER).
    pub const EARN_WITHIN: Duration = Duration::from_millis(100);
    /// A lease that is used up within this time is too small.
    const QUICK: Duration = Duration::from_millis(10);
    /// How many leases are given back at the same time.
    const GIVEN_BACK_AT_ONCE: usize = 64;

    /// Leases of what `store` counts.
    pub fn new(store: S) -> Self {
        let slots = Arc::new(Shards::new(Self::DEFAULT_CAPACITY));
        Self { store: Arc::new(store), max_age: Self::DEFAULT_MAX_AGE, share: 8, slots }
    }

    /// How many keys are known at once, at least one: where there are more, that one of a few is forgotten whose lease ends
    /// first. Starts without leases, which earlier clones do not share. Defaults to
    /// [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY).
    #[must_use]
    pub fn capacity(self, keys: usize) -> Self {
        Self { slots: Arc::new(Shards::new(keys)), ..self }
    }

    /// How long a lease is kept, if its window does not end before: what others change is noticed this late. Defaults to
    /// [`DEFAULT_MAX_AGE`](Self::DEFAULT_MAX_AGE).
    #[must_use]
    pub fn max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// A lease is at most one `share`-th of what is left of the quota; with 0 as with 1, all of it. Take at least the number of
    /// processes if all of them are to have some. Defaults to 8.
    #[must_use]
    pub fn share(self, share: u32) -> Self {
        Self { share: share.max(1), ..self }
    }

    /// How long the store may take in the background for what nobody waits for.
    fn patience(&self) -> Duration {
        self.max_age.max(Self::DEFAULT_MAX_AGE)
    }

    /// What became of all units that were drawn, over all clones.
    #[must_use]
    pub fn stats(&self) -> LeaseStats {
        let mut sum = LeaseStats::default();
        for part in self.slots.each() {
            let (stats, now) = (part.books.stats, Instant::now());
            sum.draws += stats.draws;
            sum.drawn += stats.drawn;
            sum.handed_out += stats.handed_out;
            sum.given_back += stats.given_back;
            sum.expired += stats.expired;
            for lease in part.entries().filter_map(|slot| slot.lease.as_ref()) {
                // One that has ended and that nobody has asked for since can still be given back for a while.
                let units = if lease.window_ends > now { &mut sum.held } else { &mut sum.expired };
                *units += u64::from(lease.left);
            }
        }
        sum
    }

    /// Takes all leases away, and puts down as lost what can still be given back.
    fn take_held(&self) -> Vec<(Key, Receipt, ReturnGuard)> {
        let (mut held, now) = (Vec::new(), Instant::now());
        for mut part in self.slots.each() {
            let (slots, books) = part.entries_with_books();
            for (key, slot) in slots {
                let Some(lease) = slot.lease.take() else { continue };
                match lease.decision.receipt().filter(|_| lease.window_ends > now) {
                    Some(receipt) => {
                        books.stats.expired += u64::from(lease.left);
                        held.push((*key, receipt, ReturnGuard { policy: slot.policy.clone(), units: lease.left }));
                    }
                    None => books.lose(&slot.policy, Some(lease)),
                }
            }
        }
        held
    }

    /// What to do about a request of `cost` units, which are more than none. `waits` is false for who cannot do anything but ask.
    fn step(&self, place: Place, policy: &Policy, key: &Key, cost: u32, waits: bool) -> Step {
        let mut part = self.slots.lock(place);
        let part = &mut *part;
        let now = Instant::now();
        if part.books.changing.contains(&place.hash) {
            return Step::Ask;
        }
        if part.get_mut(place, policy, key).is_none_or(|slot| slot.policy != *policy) {
            let slot = Slot::new(policy, now);
            part.put(place, policy, key, slot, now, |books, slot| books.lose(&slot.policy, slot.lease));
            return Step::Ask;
        }
        let (slot, books) = part.get_with_books(place, policy, key);
        let Some(slot) = slot else { return Step::Ask };

        if let Some(lease) = slot.lease.as_mut().filter(|lease| lease.ends > now) {
            if let Some(left) = lease.left.checked_sub(cost) {
                lease.left = left;
                books.stats.handed_out += u64::from(cost);
                let decision = lease.decision.later(now - lease.told).with_more(left);
                if left == 0 {
                    slot.used_up(now);
                }
                return Step::Answer(decision);
            }
            if now - lease.told <= Self::QUICK {
                slot.size = slot.size.max(lease.size.saturating_mul(2));
            }
        } else if let Some(lease) = slot.lease.take() {
            let receipt = lease.decision.receipt().filter(|_| lease.window_ends > now);
            match receipt {
                Some(_) if !waits => {
                    slot.lease = Some(lease);
                    return Step::Wait(Arc::clone(&slot.flight), Duration::ZERO);
                }
                Some(receipt) => {
                    slot.size = lease.size / 2;
                    books.stats.expired += u64::from(lease.left);
                    return Step::GiveBack(receipt, lease.left);
                }
                None => {
                    slot.size = lease.size / 2;
                    books.lose(policy, Some(lease));
                }
            }
        }

        let capacity = || policy.limits().iter().map(Limit::capacity).min().unwrap_or(0);
        let room = if slot.room_until > now { slot.room } else { capacity() };
        let units = slot.size.min(room / self.share);
        if units <= cost {
            return Step::Ask;
        }
        match &slot.drawing {
            // It gives no lease any more.
            Some(drawing) if drawing.is_left || now - drawing.began >= self.max_age => Step::Ask,
            Some(drawing) => Step::Wait(Arc::clone(&slot.flight), self.max_age - (now - drawing.began)),
            None if !waits => Step::Wait(Arc::clone(&slot.flight), Duration::ZERO),
            None => {
                slot.drawing = Some(Drawing { began: now, is_left: false });
                Step::Refill(units, Arc::clone(&slot.flight))
            }
        }
    }

    /// What the store said to a request of its own.
    fn asked(&self, place: Place, policy: &Policy, key: &Key, cost: u32, asked: Instant, decision: &Decision) {
        let mut part = self.slots.lock(place);
        let Some(slot) = part.get_mut(place, policy, key) else { return };
        slot.room_is(asked, decision);
        let now = Instant::now();
        if now - slot.since > Self::EARN_WITHIN {
            (slot.direct, slot.since) = (0, now);
        }
        slot.direct += u32::from(decision.is_allowed());
        if slot.direct >= Self::PROMOTE_AFTER {
            (slot.direct, slot.since) = (0, now);
            slot.size = slot.size.max(cost.saturating_mul(2));
        }
    }

    /// Puts `units`, of which `cost` are used at once, where they can be handed out. Answers the decision for the one who
    /// drew, and how many units are to be given back because it took too long.
    fn install(&self, draw: &Refill<S>, units: u32, cost: u32, asked: Instant, decision: Decision) -> (Decision, u32) {
        let mut part = self.slots.lock(draw.place);
        let told = Instant::now();
        let (slot, books) = part.get_with_books(draw.place, &draw.policy, &draw.key);
        books.stats.draws += 1;
        books.stats.drawn += u64::from(units);
        draw.policy.meters().leased(Leased::Drawn, units);
        books.stats.handed_out += u64::from(cost);
        let rest = units - cost;
        let Some(slot) = slot.filter(|slot| Arc::ptr_eq(&slot.flight, &draw.flight)) else {
            // It was reset or blocked meanwhile, or had to make room.
            books.stats.expired += u64::from(rest);
            draw.policy.meters().leased(Leased::Expired, rest);
            return (decision, 0);
        };
        slot.room_is(asked, &decision);
        let reset = decision.limits().iter().map(LimitStatus::reset_after).min().unwrap_or_default();
        let lasts = reset.saturating_sub(reset / 1_000 + Duration::from_millis(1));
        let (ends, window_ends) = (asked + lasts.min(self.max_age), asked + lasts);
        let receipt = decision.receipt();
        if ends <= told || receipt.is_none() {
            // The store is too slow for leases. Others need not wait for one.
            slot.size = 0;
            books.stats.expired += u64::from(rest);
            return (decision, rest);
        }
        let mut lease = Lease { left: rest, size: units, decision, told, ends, window_ends };
        // And what is left of the one before, which was not enough for the request.
        match slot.lease.take() {
            Some(old) if old.is_of_the_windows_of(&lease) => lease.left = lease.left.saturating_add(old.left),
            old => books.lose(&draw.policy, old),
        }
        let decision = lease.decision.clone().with_more(lease.left);
        slot.lease = Some(lease);
        (decision, 0)
    }

    fn is_drawing(&self, place: Place, policy: &Policy, key: &Key, flight: &Arc<Notify>) -> bool {
        let mut part = self.slots.lock(place);
        part.get_mut(place, policy, key).is_some_and(|slot| {
            slot.drawing.as_ref().is_some_and(|drawing| !drawing.is_left) && Arc::ptr_eq(&slot.flight, flight)
        })
    }

    /// Takes the lease of a key away, now, and lets it have none until the value is dropped.
    fn change<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> Change<'a> {
        let place = self.slots.place(policy, key);
        let mut part = self.slots.lock(place);
        part.books.changing.push(place.hash);
        if let Some(slot) = part.remove(place, policy, key) {
            part.books.lose(policy, slot.lease);
        }
        Change { slots: &self.slots, place }
    }
}

impl Lease {
    /// Whether both were drawn from the same windows: those that end at the same instants of the store's clock.
    fn is_of_the_windows_of(&self, other: &Self) -> bool {
        let (Some(here), Some(there)) = (self.decision.receipt(), other.decision.receipt()) else { return false };
        let ends = |at: Receipt, limit: &LimitStatus| Duration::from_micros(at.as_micros()) + limit.reset_after();
        let mut limits = self.decision.limits().iter().zip(other.decision.limits());
        limits.all(|(mine, theirs)| ends(here, mine) == ends(there, theirs))
    }
}

impl Books {
    fn lose(&mut self, policy: &Policy, lease: Option<Lease>) {
        if let Some(lease) = lease {
            self.stats.expired += u64::from(lease.left);
            policy.meters().leased(Leased::Expired, lease.left);
        }
    }
}

impl Slot {
    fn new(policy: &Policy, now: Instant) -> Self {
        Self {
            policy: policy.clone(),
            lease: None,
            drawing: None,
            flight: Arc::default(),
            size: 0,
            direct: 0,
            since: now,
            room: 0,
            room_until: now,
        }
    }

    fn used_up(&mut self, now: Instant) {
        if let Some(lease) = self.lease.take()
            && now - lease.told <= QuotaPrefetch::<()>::QUICK
        {
            self.size = self.size.max(lease.size.saturating_mul(2));
        }
    }

    fn room_is(&mut self, asked: Instant, decision: &Decision) {
        if decision.outcome() == Outcome::Blocked {
            (self.room, self.room_until) = (0, asked + decision.retry_after().unwrap_or_default());
            return;
        }
        let windows = decision.limits().iter().filter(|limit| !limit.reset_after().is_zero());
        self.room = decision.limits().iter().map(LimitStatus::remaining).min().unwrap_or(0);
        self.room_until = asked + windows.map(LimitStatus::reset_after).min().unwrap_or_default();
    }
}

/// Units are being drawn for a key. Whatever becomes of it, the others are told when it is over.
struct Refill<S> {
    leases: QuotaPrefetch<S>,
    place: Place,
    policy: Policy,
    key: Key,
    flight: Arc<Notify>,
    // How many units are asked for, as long as there is no answer: they may have been charged.
    asked_for: u32,
}

/// What a draw is to the request that made it: nothing where there are not so many units.
type Drawn = Result<Option<Decision>, StoreError>;

impl<S> Refill<S> {
    /// Tells the others that the request which began it has gone. It may still come.
    fn leave(&self) {
        let mut part = self.leases.slots.lock(self.place);
        if let Some(slot) = part.get_mut(self.place, &self.policy, &self.key)
            && Arc::ptr_eq(&slot.flight, &self.flight)
            && let Some(drawing) = &mut slot.drawing
        {
            drawing.is_left = true;
        }
        drop(part);
        self.flight.notify_waiters();
    }
}

impl<S: RateLimitStore + Send + Sync + 'static> Refill<S> {
    /// Draws units for several requests, the first of which costs `cost` and waits for the reply. Goes on for a while where that one leaves.
    async fn carry_out(mut self, cost: u32, mut reply: oneshot::Sender<Drawn>) {
        let (asked, units) = (Instant::now(), self.asked_for);
        let answer = {
            let mut question = pin!(self.leases.store.check(&self.policy, &self.key, units));
            select! {
                biased;
                answer = &mut question => answer,
                () = reply.closed() => {
                    self.leave();
                    match timeout(self.leases.patience(), question).await {
                        Ok(answer) => answer,
                        Err(_) => return,
                    }
                }
            }
        };
        let decision = match answer {
            Ok(decision) => decision,
            Err(error) => {
                drop(self);
                let _ = reply.send(Err(error));
                return;
            }
        };
        self.asked_for = 0;
        if !decision.is_allowed() {
            self.leases.asked(self.place, &self.policy, &self.key, cost, asked, &decision);
            let is_told = decision.outcome() != Outcome::Limited;
            drop(self);
            let _ = reply.send(Ok(is_told.then_some(decision)));
            return;
        }
        let receipt = decision.receipt();
        // Who has left needs none of it.
        let cost = if reply.is_closed() { 0 } else { cost };
        let (decision, rest) = self.leases.install(&self, units, cost, asked, decision);
        let (leases, place, policy, key) = (self.leases.clone(), self.place, self.policy.clone(), self.key);
        drop(self);
        let _ = reply.send(Ok(Some(decision)));
        match receipt {
            Some(receipt) if rest > 0 => {
                let repaid = leases.repay(place, &key, receipt, ReturnGuard { policy, units: rest });
                let _ = timeout(leases.patience(), repaid).await;
            }
            _ => policy.meters().leased(Leased::Expired, rest),
        }
    }
}

impl<S> Drop for Refill<S> {
    fn drop(&mut self) {
        let mut part = self.leases.slots.lock(self.place);
        let (slot, books) = part.get_with_books(self.place, &self.policy, &self.key);
        if let Some(slot) = slot.filter(|slot| Arc::ptr_eq(&slot.flight, &self.flight)) {
            slot.drawing = None;
            if self.asked_for > 0 {
                // Others would lose as much again while the store stands still.
                (slot.size, slot.direct) = (0, 0);
                slot.room = slot.room.saturating_sub(self.asked_for);
            }
        }
        if self.asked_for > 0 {
            books.stats.draws += 1;
            books.stats.drawn += u64::from(self.asked_for);
            books.stats.expired += u64::from(self.asked_for);
            self.policy.meters().leased(Leased::Drawn, self.asked_for);
            self.policy.meters().leased(Leased::Expired, self.asked_for);
        }
        drop(part);
        self.flight.notify_waiters();
    }
}

/// Units that are being given back, and are lost where nobody waits for that. A counter cannot take back what it has said.
struct ReturnGuard {
    policy: Policy,
    units: u32,
}

impl Drop for ReturnGuard {
    fn drop(&mut self) {
        self.policy.meters().leased(Leased::Expired, self.units);
    }
}

// By hand: `derive` would ask for `S: Clone`.
impl<S> Clone for QuotaPrefetch<S> {
    fn clone(&self) -> Self {
        Self { store: Arc::clone(&self.store), slots: Arc::clone(&self.slots), ..*self }
    }
}

struct Change<'a> {
    slots: &'a Shards<Slot, Books>,
    place: Place,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut part = self.slots.lock(self.place);
        if let Some(index) = part.books.changing.iter().position(|hash| *hash == self.place.hash) {
            part.books.changing.swap_remove(index);
        }
    }
}

impl<S: RateLimitStore + Send + Sync + 'static> QuotaPrefetch<S> {
    async fn ask(&self, place: Place, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        let asked = Instant::now();
        let decision = self.store.check(policy, key, cost).await?;
        self.asked(place, policy, key, cost, asked, &decision);
        Ok(decision)
    }

    /// Draws units for several requests, the first of which costs `cost`: in the background if that has to be waited for, since the others wait
    /// for it as well, and nobody says that this request is polled.
    async fn draw(&self, draw: Refill<S>, cost: u32) -> Drawn {
        let (reply, answer) = oneshot::channel();
        let mut course = Box::pin(draw.carry_out(cost, reply).in_current_span());
        if course.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            match Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn(course)),
                // There is nothing to carry it out but the request itself.
                Err(_) => course.await,
            }
        }
        // Where nothing is told it has ended with its runtime.
        answer.await.unwrap_or(Ok(None))
    }

    /// Gives back to the store what was drawn ahead and is held for requests, from all clones: for the end of a program, once it takes no more of
    /// them. Otherwise that is lost with the end of its window. Takes no longer than `deadline`; what could not be given back by then is lost.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::rate_limit::QuotaPrefetch;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
    /// # let store = QuotaPrefetch::new(MemoryBackend::new());
    /// # let limiter = Limiter::new(store.clone(), Policy::new("all", Quota::per_hour(10_000).fixed_window()));
    /// for _ in 0..1_000 {
    ///     assert!(limiter.check("everybody").await?.is_allowed());
    /// }
    /// store.give_back(Duration::from_secs(1)).await;
    /// assert_eq!(limiter.peek("everybody").await?.remaining(), Some(9_000));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancellation
    ///
    /// What is not given back when the future is dropped is lost.
    pub async fn give_back(&self, deadline: Duration) {
        let held = self.take_held();
        let given_back = async {
            let mut calls = JoinSet::new();
            for (key, receipt, lost) in held {
                if calls.len() == Self::GIVEN_BACK_AT_ONCE {
                    calls.join_next().await.into_iter().for_each(discard_joined);
                }
                let leases = self.clone();
                calls.spawn(
                    async move { leases.repay(leases.slots.place(&lost.policy, &key), &key, receipt, lost).await },
                );
            }
            while let Some(ended) = calls.join_next().await {
                discard_joined(ended);
            }
        };
        let _ = timeout(deadline, given_back).await;
    }

    /// Gives back what was put down as lost. Stays lost if that does not work.
    async fn repay(&self, place: Place, key: &Key, receipt: Receipt, mut lost: ReturnGuard) {
        let units = lost.units;
        if self.store.settle(&lost.policy, key, receipt, -i64::from(units)).await.is_ok() {
            lost.units = 0;
            lost.policy.meters().leased(Leased::GivenBack, units);
            let stats = &mut self.slots.lock(place).books.stats;
            stats.expired -= u64::from(units);
            stats.given_back += u64::from(units);
        }
    }
}

/// Whether a unit is as good at any time of the windows of this policy.
fn is_leasable(policy: &Policy, cost: u32) -> bool {
    cost > 0 && policy.limits().iter().all(|limit| limit.algorithm() == Algorithm::FixedWindow)
}

impl<S: RateLimitStore + Send + Sync + 'static> RateLimitStore for QuotaPrefetch<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        if !is_leasable(policy, cost) {
            return self.store.check(policy, key, cost).await;
        }
        let place = self.slots.place(policy, key);
        loop {
            match self.step(place, policy, key, cost, true) {
                Step::Answer(decision) => return Ok(decision),
                Step::Ask => return self.ask(place, policy, key, cost).await,
                Step::Refill(units, flight) => {
                    let draw = Refill {
                        leases: self.clone(),
                        place,
                        policy: policy.clone(),
                        key: *key,
                        flight,
                        asked_for: units,
                    };
                    if let Some(decision) = self.draw(draw, cost).await? {
                        return Ok(decision);
                    }
                    // It does not get better by drawing less and less.
                    return self.ask(place, policy, key, cost).await;
                }
                Step::Wait(flight, longest) => {
                    let over = flight.notified();
                    // It may have been over before we began to listen.
                    if self.is_drawing(place, policy, key, &flight) {
                        let _ = timeout(longest, over).await;
                    }
                }
                Step::GiveBack(receipt, units) => {
                    self.repay(place, key, receipt, ReturnGuard { policy: policy.clone(), units }).await;
                }
            }
        }
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u32) -> Option<Decision> {
        if !is_leasable(policy, cost) {
            return self.store.check_now(policy, key, cost);
        }
        let place = self.slots.place(policy, key);
        match self.step(place, policy, key, cost, false) {
            Step::Answer(decision) => Some(decision),
            Step::Ask => {
                let asked = Instant::now();
                let decision = self.store.check_now(policy, key, cost)?;
                self.asked(place, policy, key, cost, asked, &decision);
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

    async fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
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

    fn scope(&self) -> Reach {
        self.store.scope()
    }
}
