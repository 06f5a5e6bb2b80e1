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
use super::judge::Subject;
use super::policy::Policy;
use crate::key::Key;

/// How long the first of a line goes without asking the store: room that others make, in other processes perhaps, is found this late.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What decisions count in.
const SHORTEST_WAIT: Duration = Duration::from_micros(1);

/// The lines of a layer, one for each of those for whom requests wait. While there is no room only the first of a line asks the store, so that many who
/// wait ask no more often than one. Where there is room for more, so many of those in front ask at once. Who comes later passes nobody.
#[derive(Debug)]
pub(super) struct Lines {
    most: usize,
    waiting: AtomicUsize,
    lines: Mutex<HashMap<Whose, Line>>,
}

/// Whom the requests of a line count for: who is counted under this key by the policy of this name.
#[derive(Clone, Debug)]
pub(super) struct Whose {
    policy: Policy,
    key: Key,
}

impl Whose {
    pub(super) fn new(policy: &Policy, key: &Key) -> Self {
        Self { policy: policy.clone(), key: *key }
    }
}

// By name: a share of a policy, for when the store fails, is waited for in the same line.
impl PartialEq for Whose {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.policy.name() == other.policy.name()
    }
}

impl Eq for Whose {}

impl Hash for Whose {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // There are few policies for a key.
        self.key.hash(state);
    }
}

/// Its members have numbers in the order in which they came.
#[derive(Debug)]
struct Line {
    /// Whose turn it is.
    asking: BTreeSet<u64>,
    /// The last of these, until it has noticed.
    called: Option<u64>,
    /// The others, and what tells them that it is their turn.
    behind: BTreeMap<u64, Arc<Notify>>,
    next: u64,
    /// How many may ask at once: at least one.
    width: usize,
    /// Wakes the first.
    room: Arc<Notify>,
    denial: Denial,
    /// What the first was told that left because of it, and what that one costs, until another one was told something else.
    refusal: Option<(Denial, u32)>,
}

impl Line {
    fn new(denial: Denial) -> Self {
        let (asking, behind) = (BTreeSet::new(), BTreeMap::new());
        Self { asking, called: None, behind, next: 0, width: 1, room: Arc::default(), denial, refusal: None }
    }

    /// What was too long for somebody to wait who costs no more than this.
    fn refusal(&self, cost: u32) -> Option<Subject> {
        let (denial, _) = self.refusal.as_ref().filter(|(_, least)| *least <= cost)?;
        denial.holding()
    }

    fn first(&self) -> Option<u64> {
        let (asking, behind) = (self.asking.first(), self.behind.keys().next());
        asking.into_iter().chain(behind).min().copied()
    }

    /// Gives a turn to the first of those behind, if one more may ask. One after the other, so that they ask in their order: whoever has just come would
    /// pass those who have not noticed yet.
    fn advance(&mut self) {
        if self.called.is_none()
            && self.asking.len() < self.width
            && let Some((member, turn)) = self.behind.pop_first()
        {
            self.asking.insert(member);
            self.called = Some(member);
            turn.notify_one();
        }
    }

    /// Somebody asks who was called, or has gone.
    fn heard_by(&mut self, member: u64) {
        if self.called == Some(member) {
            self.called = None;
            self.advance();
        }
    }
}

/// What the first of a line was told at last of whom it counts for, and when.
#[derive(Clone, Debug)]
pub(super) struct Denial {
    subject: Subject,
    told: Instant,
}

impl Denial {
    pub(super) fn now(subject: Subject) -> Self {
        Self { subject, told: Instant::now() }
    }

    /// How it stands by now, as far as that can be told: the waits are shorter. Where the time is over nobody has been told anything else yet, and
    /// the shortest wait is left.
    fn later(&self) -> Subject {
        let elapsed = self.told.elapsed();
        match self.wait() {
            Some(wait) => self.after(elapsed.min(wait.saturating_sub(SHORTEST_WAIT))),
            None => self.subject.clone(),
        }
    }

    /// The same, if it was the store that said so and its time is not over.
    fn holding(&self) -> Option<Subject> {
        let elapsed = self.told.elapsed();
        (!self.subject.local && !self.is_over(elapsed)).then(|| self.after(elapsed))
    }

    fn is_over(&self, elapsed: Duration) -> bool {
        self.wait().is_none_or(|wait| wait <= elapsed)
    }

    fn wait(&self) -> Option<Duration> {
        self.subject.decision.as_ref().and_then(Decision::retry_after)
    }

    fn after(&self, elapsed: Duration) -> Subject {
        let decision = self.subject.decision.as_ref().map(|decision| decision.later(elapsed));
        Subject { decision, ..self.subject.clone() }
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
        self.are_used() && self.lines().contains_key(&Whose::new(policy, key))
    }

    /// What the first of a line was told, if there is one, as far as it holds for what costs so much.
    pub(super) fn denial(&self, whose: &Whose, cost: u32) -> Option<Subject> {
        self.lines().get(whose).map(|line| line.refusal(cost).unwrap_or_else(|| line.denial.later()))
    }

    /// A place at the end of a line, which begins with this denial if there is none. `None` where too many wait already.
    pub(super) fn join(self: &Arc<Self>, whose: Whose, denial: impl FnOnce() -> Denial) -> Option<Place> {
        let mut lines = self.lines();
        if self.waiting.load(Ordering::Relaxed) >= self.most {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::Release);
        let line = match lines.entry(whose.clone()) {
            Entry::Occupied(line) => line.into_mut(),
            Entry::Vacant(place) => place.insert(Line::new(denial())),
        };
        let (begins, number) = (line.first().is_none(), line.next);
        let (turn, room) = (Arc::new(Notify::new()), Arc::clone(&line.room));
        line.next += 1;
        line.behind.insert(number, Arc::clone(&turn));
        line.advance();
        Some(Place { number, begins, turn, room, whose, since: Instant::now(), lines: Arc::clone(self) })
    }

    /// Has the first of a line, if there is one, ask the store: something was given back.
    pub(super) fn wake(&self, whose: &Whose) {
        if self.are_used()
            && let Some(line) = self.lines().get_mut(whose)
        {
            line.refusal = None;
            line.room.notify_one();
        }
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<Whose, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a line, for as long as this lives.
#[derive(Debug)]
pub(super) struct Place {
    number: u64,
    begins: bool,
    /// Tells that it is its turn.
    turn: Arc<Notify>,
    room: Arc<Notify>,
    whose: Whose,
    since: Instant,
    lines: Arc<Lines>,
}

impl Place {
    /// Waits for its turn to ask the store.
    pub(super) async fn turn(&self) {
        while !self.takes_turn() {
            self.turn.notified().await;
        }
    }

    fn takes_turn(&self) -> bool {
        let mut lines = self.lines.lines();
        let Some(line) = lines.get_mut(&self.whose) else { return true };
        line.heard_by(self.number);
        line.asking.contains(&self.number)
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
        if self.stands_back() {
            return timeout_at(until, self.turn()).await.is_ok();
        }
        self.pause(then).await;
        true
    }

    /// Gives back its turn where somebody is in front of it, and answers whether it has.
    fn stands_back(&self) -> bool {
        let mut lines = self.lines.lines();
        let Some(line) = lines.get_mut(&self.whose) else { return false };
        if line.first() == Some(self.number) {
            return false;
        }
        line.asking.remove(&self.number);
        line.behind.insert(self.number, Arc::clone(&self.turn));
        line.advance();
        true
    }

    /// Waits, as the first of the line, until it is time to ask the store: then, or earlier where something may have changed.
    pub(super) async fn pause(&self, until: Instant) {
        let until = until.min(Instant::now() + LOOK_AGAIN);
        // Whether it was woken does not matter.
        let _ = timeout_at(until, self.room.notified()).await;
    }

    /// Whose line it is.
    pub(super) const fn whose(&self) -> &Whose {
        &self.whose
    }

    /// What the first of the line was told by the store at last, while that is not over.
    pub(super) fn holding(&self) -> Option<Subject> {
        self.lines.lines().get(&self.whose)?.denial.holding()
    }

    /// Tells the others what it was told, as the first of the line.
    pub(super) fn tell(&self, denial: Denial) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose)
            && line.first() == Some(self.number)
        {
            line.denial = denial;
            line.refusal = None;
        }
    }

    /// Tells the others what it was told and cannot wait for, as the first of the line: whoever costs as much and cannot either need not ask.
    pub(super) fn refuse(&self, denial: Denial, cost: u32) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose)
            && line.first() == Some(self.number)
        {
            line.refusal = Some((denial, cost));
        }
    }

    /// What one before it was told by the store and could not wait for, which costs no more, while that is not over.
    pub(super) fn refusal(&self, cost: u32) -> Option<Subject> {
        self.lines.lines().get(&self.whose)?.refusal(cost)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.whose.policy.meters().waited(self.since.elapsed());
        let mut lines = self.lines.lines();
        self.lines.waiting.fetch_sub(1, Ordering::Release);
        if let Entry::Occupied(mut line) = lines.entry(self.whose.clone()) {
            let members = line.get_mut();
            if !members.asking.remove(&self.number) {
                members.behind.remove(&self.number);
            }
            members.heard_by(self.number);
            members.advance();
            if members.asking.is_empty() {
                line.remove();
            }
        }
    }
}
