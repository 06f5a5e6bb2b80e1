//! Requests that wait for room, in the order in which they came.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as Turn, MutexGuard as Turned};
use tokio::time::Instant;

use super::judge::Subject;
use crate::key::Key;

/// The lines of a layer, one for each key whose requests wait. Only the first of a line asks the store, so that many who wait ask no more often than
/// one, and who comes later passes nobody.
#[derive(Debug)]
pub(super) struct Lines {
    most: usize,
    waiting: AtomicUsize,
    lines: Mutex<HashMap<Key, Line>>,
}

#[derive(Debug)]
struct Line {
    turn: Arc<Turn<()>>,
    members: usize,
    denial: Denial,
}

/// What the first of a line was told at last, and when.
#[derive(Clone, Debug)]
pub(super) struct Denial {
    pub(super) subjects: Vec<Subject>,
    told: Instant,
}

impl Denial {
    /// Of those that have a say.
    pub(super) fn now(subjects: &[Subject]) -> Self {
        Self { subjects: subjects.iter().filter(|subject| subject.enforced).cloned().collect(), told: Instant::now() }
    }

    /// How it stands by now, as far as that can be told: the waits are shorter.
    fn later(&self) -> Vec<Subject> {
        let elapsed = self.told.elapsed();
        let mut subjects = self.subjects.clone();
        for decision in subjects.iter_mut().filter_map(|subject| subject.decision.as_mut()) {
            // Whose time is over has not been asked again yet.
            let is_over = decision.retry_after().is_none_or(|wait| wait <= elapsed);
            if !is_over {
                *decision = decision.later(elapsed);
            }
        }
        subjects
    }
}

impl Lines {
    pub(super) fn new(most: usize) -> Self {
        Self { most, waiting: AtomicUsize::new(0), lines: Mutex::default() }
    }

    /// Whether there is a line for a key.
    pub(super) fn is_waited_for(&self, key: &Key) -> bool {
        // Hardly ever is there any.
        self.waiting.load(Ordering::Acquire) > 0 && self.lines().contains_key(key)
    }

    /// What whoever is first in the line of a key was told, if there is one.
    pub(super) fn denial(&self, key: &Key) -> Option<Vec<Subject>> {
        self.lines().get(key).map(|line| line.denial.later())
    }

    /// A place at the end of the line of a key, which begins with this denial if there is none. `None` where too many wait already.
    pub(super) fn join(self: &Arc<Self>, key: Key, denial: impl FnOnce() -> Denial) -> Option<Place> {
        let mut lines = self.lines();
        if self.waiting.load(Ordering::Relaxed) >= self.most {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::Release);
        let line = match lines.entry(key) {
            Entry::Occupied(line) => line.into_mut(),
            Entry::Vacant(place) => place.insert(Line { turn: Arc::default(), members: 0, denial: denial() }),
        };
        line.members += 1;
        Some(Place { turn: Arc::clone(&line.turn), key, lines: Arc::clone(self) })
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<Key, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a line, for as long as this lives.
#[derive(Debug)]
pub(super) struct Place {
    turn: Arc<Turn<()>>,
    key: Key,
    lines: Arc<Lines>,
}

impl Place {
    /// Waits to be the first of the line.
    pub(super) async fn turn(&self) -> Turned<'_, ()> {
        self.turn.lock().await
    }

    /// Tells those behind what the first was told.
    pub(super) fn tell(&self, denial: Denial) {
        if let Some(line) = self.lines.lines().get_mut(&self.key) {
            line.denial = denial;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lines = self.lines.lines();
        self.lines.waiting.fetch_sub(1, Ordering::Release);
        if let Entry::Occupied(mut line) = lines.entry(self.key) {
            line.get_mut().members -= 1;
            if line.get().members == 0 {
                line.remove();
            }
        }
    }
}
