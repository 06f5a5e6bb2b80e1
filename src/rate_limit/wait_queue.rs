//! Requests that wait for room, in the order in which they came.

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

/// How long the first of a line goes without asking the store: room that others make, in other processes perhaps, is found this late.
const RECHECK: Duration = Duration::from_secs(1);

/// How late somebody may be who has a turn, before others take it: they keep the future perhaps, but do not poll it.
const GRACE: Duration = Duration::from_millis(250);

/// What decisions count in.
const SHORTEST_WAIT: Duration = Duration::from_micros(1);

/// The lines of a layer, one for each of those for whom requests wait. While there is no room only the first of a line asks the store, so that many who
/// wait ask no more often than one. Where there is room for more, so many of those in front ask at once. Who comes later passes nobody.
#[derive(Debug)]
pub(super) struct Lines {
    most: usize,
    waiting: AtomicUsize,
    lines: Mutex<HashMap<QueueKey, WaitQueue>>,
}

/// Whom the requests of a line count for: who is counted under this key by the policy of this name.
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

// By name: a share of a policy, for when the store fails, is waited for in the same line.
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

/// Its members have numbers in the order in which they came.
#[derive(Debug)]
struct WaitQueue {
    /// Whose turn it is, and from when on they are taken for ones that nobody polls.
    asking: BTreeMap<u64, Instant>,
    /// The last of these, until it has noticed.
    called: Option<u64>,
    /// The others, and what tells them that it is their turn.
    behind: BTreeMap<u64, Arc<Notify>>,
    /// Those that nobody polls. They are in front of the others again once that is done.
    aside: BTreeSet<u64>,
    next: u64,
    /// How many may ask at once: at least one.
    width: usize,
    /// Wakes the first.
    room: Arc<Notify>,
    denial: CachedDenial,
    /// What the first was told that left because of it, and what that one costs, until another one was told something else.
    refusal: Option<(CachedDenial, u32)>,
}

impl WaitQueue {
    fn new(denial: CachedDenial) -> Self {
        let (asking, behind, aside) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { asking, called: None, behind, aside, next: 0, width: 1, room: Arc::default(), denial, refusal: None }
    }

    /// What was too long for somebody to wait who costs no more than this.
    fn refusal(&self, cost: u32) -> Option<Descriptor> {
        let (denial, _) = self.refusal.as_ref().filter(|(_, least)| *least <= cost)?;
        denial.holding()
    }

    fn first(&self) -> Option<u64> {
        let (asking, behind) = (self.asking.keys().next(), self.behind.keys().next());
        asking.into_iter().chain(behind).min().copied()
    }

    /// Gives a turn to the first of those behind, if one more may ask. One after the other, so that they ask in their order: whoever has just come would
    /// pass those who have not noticed yet.
    fn advance(&mut self) {
        if self.called.is_none()
            && self.asking.len() < self.width
            && let Some((member, turn)) = self.behind.pop_first()
        {
            self.asking.insert(member, Instant::now() + GRACE);
            self.called = Some(member);
            turn.notify_one();
            self.tell_next();
        }
    }

    /// Has the next of those behind look again: it may have another one's turn earlier than it knows.
    fn tell_next(&self) {
        if let Some(next) = self.behind.values().next() {
            next.notify_one();
        }
    }

    fn leave(&mut self, member: u64) {
        self.asking.remove(&member);
        self.behind.remove(&member);
        self.aside.remove(&member);
    }

    /// Somebody asks who was called, or has gone.
    fn heard_by(&mut self, member: u64) {
        if self.called == Some(member) {
            self.called = None;
            self.advance();
        }
    }

    /// Gives the turns of those that nobody polls to others.
    fn skip_stalled(&mut self) {
        let now = Instant::now();
        let overdue = |due: &Instant| *due <= now;
        if self.asking.values().any(overdue) {
            if self.asking.values().next().is_some_and(overdue) {
                // The first alone pauses. It is not to be woken in the place of another one.
                self.room = Arc::default();
            }
            self.aside.extend(self.asking.iter().filter(|(_, due)| overdue(due)).map(|(member, _)| *member));
            self.asking.retain(|_, due| !overdue(due));
            self.called = self.called.filter(|member| self.asking.contains_key(member));
            self.advance();
        }
    }

    /// Has somebody go on until then whose turn it is.
    fn expect(&mut self, member: u64, until: Instant) {
        if let Some(due) = self.asking.get_mut(&member) {
            let before = std::mem::replace(due, until + GRACE);
            if *due < before {
                self.tell_next();
            }
        }
    }
}

/// What the first of a line was told at last of whom it counts for, and when.
#[derive(Clone, Debug)]
pub(super) struct CachedDenial {
    subject: Descriptor,
    told: Instant,
}

impl CachedDenial {
    pub(super) fn now(subject: Descriptor) -> Self {
        Self { subject, told: Instant::now() }
    }

    /// How it stands by now, as far as that can be told: the waits are shorter. Where the time is over nobody has been told anything else yet, and
    /// the shortest wait is left.
    fn later(&self) -> Descriptor {
        let elapsed = self.told.elapsed();
        match self.wait() {
            Some(wait) => self.after(elapsed.min(wait.saturating_sub(SHORTEST_WAIT))),
            None => self.subject.clone(),
        }
    }

    /// The same, if it was the store that said so and its time is not over.
    fn holding(&self) -> Option<Descriptor> {
        let elapsed = self.told.elapsed();
        (!self.subject.local && !self.is_over(elapsed)).then(|| self.after(elapsed))
    }

    fn is_over(&self, elapsed: Duration) -> bool {
        self.wait().is_none_or(|wait| wait <= elapsed)
    }

    fn wait(&self) -> Option<Duration> {
        self.subject.decision.as_ref().and_then(Decision::retry_after)
    }

    fn after(&self, elapsed: Duration) -> Descriptor {
        let decision = self.subject.decision.as_ref().map(|decision| decision.later(elapsed));
        Descriptor { decision, ..self.subject.clone() }
    }
}

impl Lines {
    pub(super) fn new(most: usize) -> Self {
        Self { most, waiting: AtomicUsize::new(0), lines: Mutex::default() }
    }

    /// Whether there is any line: hardly ever.
    pub(super) fn are_used(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Whether there is a line for whoever is counted by this policy under this key.
    pub(super) fn is_waited_for(&self, policy: &Policy, key: &Key) -> bool {
        self.are_used() && self.lines().contains_key(&QueueKey::new(policy, key))
    }

    /// What the first of a line was told, if there is one, as far as it holds for what costs so much.
    pub(super) fn denial(&self, whose: &QueueKey, cost: u32) -> Option<Descriptor> {
        self.lines().get(whose).map(|line| line.refusal(cost).unwrap_or_else(|| line.denial.later()))
    }

    /// A place at the end of a line, which begins with this denial if there is none. `None` where too many wait already.
    pub(super) fn join(self: &Arc<Self>, whose: QueueKey, denial: impl FnOnce() -> CachedDenial) -> Option<Waiter> {
        let mut lines = self.lines();
        if self.waiting.load(Ordering::Relaxed) >= self.most {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::Release);
        let line = match lines.entry(whose.clone()) {
            Entry::Occupied(line) => line.into_mut(),
            Entry::Vacant(place) => place.insert(WaitQueue::new(denial())),
        };
        let (begins, number) = (line.first().is_none(), line.next);
        let turn = Arc::new(Notify::new());
        line.next += 1;
        line.behind.insert(number, Arc::clone(&turn));
        line.advance();
        Some(Waiter { number, begins, turn, whose, since: Instant::now(), lines: Arc::clone(self) })
    }

    /// Has the first of a line, if there is one, ask the store: something was given back.
    pub(super) fn wake(&self, whose: &QueueKey) {
        if self.are_used()
            && let Some(line) = self.lines().get_mut(whose)
        {
            line.refusal = None;
            line.room.notify_one();
        }
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<QueueKey, WaitQueue>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a line, for as long as this lives.
#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    begins: bool,
    /// Tells that it is its turn.
    turn: Arc<Notify>,
    whose: QueueKey,
    since: Instant,
    lines: Arc<Lines>,
}

impl Waiter {
    /// Waits for its turn to ask the store.
    pub(super) async fn turn(&self) {
        while let Err(due) = self.takes_turn() {
            // Whether it was told or looks by itself does not matter. Who should have gone by before it may be one that nobody polls either.
            let _ = timeout_at(due.min(Instant::now() + RECHECK), self.turn.notified()).await;
        }
    }

    /// Takes its turn, if that has come, and answers otherwise by when one of those who have theirs will have gone on.
    fn takes_turn(&self) -> Result<(), Instant> {
        let mut lines = self.lines.lines();
        let Some(line) = lines.get_mut(&self.whose) else { return Ok(()) };
        let now = Instant::now();
        line.expect(self.number, now);
        if line.aside.remove(&self.number) {
            line.behind.insert(self.number, Arc::clone(&self.turn));
            line.advance();
        }
        line.skip_stalled();
        line.heard_by(self.number);
        if line.asking.contains_key(&self.number) {
            return Ok(());
        }
        Err(line.asking.values().min().copied().unwrap_or(now + RECHECK))
    }

    /// Asks, which is over by then.
    pub(super) fn asks(&self, until: Instant) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose) {
            line.expect(self.number, until);
        }
    }

    /// Whether the line began with it.
    pub(super) const fn begins(&self) -> bool {
        self.begins
    }

    /// Lets more of the line ask at once, once it was admitted and there was room for so many like it: twice as many as before. Only the first has
    /// that say, so that one that is denied is not passed again and again by others that need less.
    pub(super) fn widen(&self, room: u32) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose)
            && line.first() == Some(self.number)
        {
            let most = usize::try_from(room).unwrap_or(usize::MAX).max(1);
            line.width = line.width.saturating_mul(2).min(most);
            line.refusal = None;
        }
    }

    /// Lets only the first of the line ask from now on: there is no room, or no answer.
    pub(super) fn narrow(&self) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose) {
            line.width = 1;
        }
    }

    /// Waits to ask again, once the line is [narrow](Self::narrow): as its first until `then`, and otherwise until it is its turn once more. Answers whether
    /// that was in time.
    pub(super) async fn again(&self, then: Instant, until: Instant) -> bool {
        if !self.requeue() {
            self.pause(then).await;
            // Somebody may be in front once more that nobody had polled.
            self.requeue();
        }
        // And where nobody has polled this one for a while another has its turn.
        timeout_at(until, self.turn()).await.is_ok()
    }

    /// Gives back its turn where somebody is in front of it, and answers whether it has.
    fn requeue(&self) -> bool {
        let mut lines = self.lines.lines();
        let Some(line) = lines.get_mut(&self.whose) else { return false };
        if line.first() == Some(self.number) {
            return false;
        }
        line.leave(self.number);
        line.behind.insert(self.number, Arc::clone(&self.turn));
        line.advance();
        true
    }

    /// Waits, as the first of the line, until it is time to ask the store: then, or earlier where something may have changed.
    async fn pause(&self, until: Instant) {
        let until = until.min(Instant::now() + RECHECK);
        let Some(room) = self.room(until) else { return };
        // Whether it was woken does not matter.
        let _ = timeout_at(until, room.notified()).await;
    }

    /// What wakes it, if it goes on by then in any case.
    fn room(&self, until: Instant) -> Option<Arc<Notify>> {
        let mut lines = self.lines.lines();
        let line = lines.get_mut(&self.whose)?;
        line.expect(self.number, until);
        Some(Arc::clone(&line.room))
    }

    /// Whose line it is.
    pub(super) const fn whose(&self) -> &QueueKey {
        &self.whose
    }

    /// What the first of the line was told by the store at last, while that is not over.
    pub(super) fn holding(&self) -> Option<Descriptor> {
        self.lines.lines().get(&self.whose)?.denial.holding()
    }

    /// Tells the others what it was told, as the first of the line.
    pub(super) fn tell(&self, denial: CachedDenial) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose)
            && line.first() == Some(self.number)
        {
            line.denial = denial;
            line.refusal = None;
        }
    }

    /// Tells the others what it was told and cannot wait for, as the first of the line: whoever costs as much and cannot either need not ask.
    pub(super) fn refuse(&self, denial: CachedDenial, cost: u32) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose)
            && line.first() == Some(self.number)
        {
            line.refusal = Some((denial, cost));
        }
    }

    /// What one before it was told by the store and could not wait for, which costs no more, while that is not over.
    pub(super) fn refusal(&self, cost: u32) -> Option<Descriptor> {
        self.lines.lines().get(&self.whose)?.refusal(cost)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.whose.policy.meters().waited(self.since.elapsed());
        let mut lines = self.lines.lines();
        self.lines.waiting.fetch_sub(1, Ordering::Release);
        if let Entry::Occupied(mut line) = lines.entry(self.whose.clone()) {
            let members = line.get_mut();
            members.leave(self.number);
            members.heard_by(self.number);
            members.advance();
            if members.asking.is_empty() {
                // Who comes next asks.
                members.refusal = None;
                if members.aside.is_empty() {
                    line.remove();
                }
            }
        }
    }
}
