//! Requests that wait for room, in the order in which they came.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as Turn, Notify, OwnedMutexGuard as Turned};
use tokio::time::{Instant, timeout_at};

use super::decision::Decision;
use super::judge::Subject;
use super::policy::Policy;
use crate::key::Key;

/// How long the first of a line goes without asking the store: room that others make, in other processes perhaps, is found this late.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The lines of a layer, one for each of those for whom requests wait. Only the first of a line asks the store, so that many who wait ask no more
/// often than one, and who comes later passes nobody.
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

#[derive(Debug)]
struct Line {
    turn: Arc<Turn<()>>,
    /// Wakes the first.
    room: Arc<Notify>,
    members: usize,
    denial: Denial,
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

    /// How it stands by now, as far as that can be told: the waits are shorter.
    fn later(&self) -> Subject {
        let elapsed = self.told.elapsed();
        // Whose time is over has not been asked again yet.
        if self.is_over(elapsed) { self.subject.clone() } else { self.after(elapsed) }
    }

    /// The same, if it was the store that said so and its time is not over.
    fn holding(&self) -> Option<Subject> {
        let elapsed = self.told.elapsed();
        (!self.subject.local && !self.is_over(elapsed)).then(|| self.after(elapsed))
    }

    fn is_over(&self, elapsed: Duration) -> bool {
        let wait = self.subject.decision.as_ref().and_then(Decision::retry_after);
        wait.is_none_or(|wait| wait <= elapsed)
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

    /// What the first of a line was told, if there is one.
    pub(super) fn denial(&self, whose: &Whose) -> Option<Subject> {
        self.lines().get(whose).map(|line| line.denial.later())
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
            Entry::Vacant(place) => {
                place.insert(Line { turn: Arc::default(), room: Arc::default(), members: 0, denial: denial() })
            }
        };
        line.members += 1;
        let (turn, room) = (Arc::clone(&line.turn), Arc::clone(&line.room));
        Some(Place { turn, turned: None, room, whose, since: Instant::now(), lines: Arc::clone(self) })
    }

    /// Has the first of a line, if there is one, ask the store: something was given back.
    pub(super) fn wake(&self, whose: &Whose) {
        if self.are_used()
            && let Some(line) = self.lines().get(whose)
        {
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
    turn: Arc<Turn<()>>,
    /// Of the first.
    turned: Option<Turned<()>>,
    room: Arc<Notify>,
    whose: Whose,
    since: Instant,
    lines: Arc<Lines>,
}

impl Place {
    /// Waits to be the first of the line, and answers whether it was so from the start.
    pub(super) async fn turn(&mut self) -> bool {
        self.turned = Arc::clone(&self.turn).try_lock_owned().ok();
        let is_first = self.turned.is_some();
        if !is_first {
            self.turned = Some(Arc::clone(&self.turn).lock_owned().await);
        }
        is_first
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

    /// Tells those behind what the first was told.
    pub(super) fn tell(&self, denial: Denial) {
        if let Some(line) = self.lines.lines().get_mut(&self.whose) {
            line.denial = denial;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.whose.policy.meters().waited(self.since.elapsed());
        let mut lines = self.lines.lines();
        self.lines.waiting.fetch_sub(1, Ordering::Release);
        if let Entry::Occupied(mut line) = lines.entry(self.whose.clone()) {
            line.get_mut().members -= 1;
            if line.get().members == 0 {
                line.remove();
            }
        }
    }
}
