//! The leases of this process, and when each of them is due for renewal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::grant::Grant;
use super::local_queue::Position;
use super::lock_key::KnownHash;
use super::make_way::make_way;
use super::store::Token;

/// The leases of this process, and when each is due.
pub(super) struct RenewalScheduler {
    state: Mutex<State>,
    pub(super) wake: Arc<Notify>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) holds: HashMap<Token, Kept, KnownHash>,
    pub(super) due: BTreeSet<(Instant, Token)>,
    // Roles of callers that may have stopped polling.
    pub(super) roles: BTreeMap<Watched, Weak<dyn Role>>,
    // Until when the task sleeps. Later work does not wake it.
    pub(super) sleeps_until: Option<Instant>,
    pub(super) has_task: bool,
    // Whether the task has ended and another runtime is being looked for.
    pub(super) is_moving: bool,
}

pub(super) struct Kept {
    pub(super) hold: Arc<Grant>,
    // `None` while it is being renewed.
    pub(super) due: Option<Instant>,
    // The runtime of the grant, unless the task runs there or could not be started there.
    pub(super) runtime: Option<Handle>,
}

/// A role that other callers need as well. It passes on if its caller is not polled in time.
pub(super) trait Role: Send + Sync {
    fn expire(self: Arc<Self>, now: Instant);
}

/// A watched role: its expiry and its number.
pub(super) type Watched = (Instant, Position);

impl State {
    pub(super) fn schedule(&mut self, token: &Token, due: Option<Instant>) {
        let Some(kept) = self.holds.get_mut(token) else { return };
        if let Some(was_due) = kept.due.take() {
            self.due.remove(&(was_due, *token));
        }
        if let Some(due) = due {
            kept.due = Some(due);
            self.due.insert((due, *token));
        }
    }
}

impl RenewalScheduler {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), wake: Arc::default() }
    }

    /// No code panics while it holds the lock, so a poisoned lock is intact.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of leases.
    pub(super) fn len(&self) -> usize {
        self.state().holds.len()
    }

    pub(super) fn look_again(&self, hold: &Grant) {
        let (_, due) = hold.due();
        let mut state = self.state();
        state.schedule(hold.token(), Some(due));
        self.wake_for(&mut state, due);
    }

    pub(super) fn remove(&self, hold: &Grant) {
        let mut state = self.state();
        if let Some(due) = state.holds.remove(hold.token()).and_then(|kept| kept.due) {
            state.due.remove(&(due, *hold.token()));
        }
    }

    pub(super) fn wake_for(&self, state: &mut State, due: Instant) {
        if state.sleeps_until.is_some_and(|until| due < until) {
            state.sleeps_until = Some(due);
            self.wake.notify_one();
            make_way();
        }
    }
}

impl Drop for RenewalScheduler {
    fn drop(&mut self) {
        // The task then sees that no lease is left.
        self.wake.notify_one();
    }
}
