//! The leases of one `Locks` and its clones, and when each of them is due for renewal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::grant::Grant;
use super::lifo_slot::free_lifo_slot;
use super::local_queue::Position;
use super::store::Token;
use crate::identity_hasher::IdentityBuildHasher;

/// The leases of one `Locks` and its clones, and when each is due.
pub(super) struct RenewalScheduler {
    state: Mutex<State>,
    pub(super) wake: Arc<Notify>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) leases: HashMap<Token, ScheduledLease, IdentityBuildHasher>,
    pub(super) due: BTreeSet<(Instant, Token)>,
    // Watchdogs of callers that may have stopped polling.
    pub(super) watchdogs: BTreeMap<WatchdogKey, Weak<dyn Watchdog>>,
    // Until when the task sleeps. Later work does not wake it.
    pub(super) sleeps_until: Option<Instant>,
    pub(super) has_task: bool,
    // Whether the task has ended and is about to restart in another runtime.
    pub(super) is_restarting: bool,
}

pub(super) struct ScheduledLease {
    pub(super) grant: Arc<Grant>,
    // `None` while it is being renewed.
    pub(super) due: Option<Instant>,
    // The runtime of the acquisition. `None` after `restart_task` has tried to start the task there.
    pub(super) runtime: Option<Handle>,
}

/// Acts on a caller that is not polled in time, because other callers wait for the lock. Moves its pending call to a task, or takes its
/// lease.
pub(super) trait Watchdog: Send + Sync {
    fn expire(self: Arc<Self>, now: Instant);
}

/// When a watchdog expires, and its number.
pub(super) type WatchdogKey = (Instant, Position);

impl State {
    pub(super) fn schedule(&mut self, token: &Token, due: Option<Instant>) {
        let Some(lease) = self.leases.get_mut(token) else { return };
        if let Some(was_due) = lease.due.take() {
            self.due.remove(&(was_due, *token));
        }
        if let Some(due) = due {
            lease.due = Some(due);
            self.due.insert((due, *token));
        }
    }
}

impl RenewalScheduler {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), wake: Arc::default() }
    }

    /// No code panics while it holds the mutex, so a poisoned state is intact.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of leases.
    pub(super) fn len(&self) -> usize {
        self.state().leases.len()
    }

    pub(super) fn reschedule(&self, grant: &Grant) {
        let (_, due) = grant.due();
        let mut state = self.state();
        state.schedule(grant.token(), Some(due));
        self.wake_for(&mut state, due);
    }

    pub(super) fn remove(&self, grant: &Grant) {
        let mut state = self.state();
        if let Some(due) = state.leases.remove(grant.token()).and_then(|lease| lease.due) {
            state.due.remove(&(due, *grant.token()));
        }
    }

    pub(super) fn wake_for(&self, state: &mut State, due: Instant) {
        if state.sleeps_until.is_some_and(|until| due < until) {
            state.sleeps_until = Some(due);
            self.wake.notify_one();
            free_lifo_slot();
        }
    }
}

impl Drop for RenewalScheduler {
    fn drop(&mut self) {
        // The task then ends, because its locks are gone.
        self.wake.notify_one();
    }
}
