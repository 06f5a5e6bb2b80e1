//! Renews leases: one task for all leases of a process, a batch of renewals at a time.

use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::error::LossReason;
use super::grant::{Grant, after};
use super::jitter::jittered;
use super::local_queue::Position;
use super::lock_key::LockKey;
use super::locks_state::LocksState;
use super::make_way::make_way;
use super::release_task::ReleaseTask;
use super::renewal_schedule::{Kept, Role, State, Watched};
use crate::error::StoreError;
use crate::panics::discard_joined;
use crate::reach::Reach;
use crate::store::deadline::Deadline;

/// Maximum number of leases in one renewal call.
const BATCH: usize = 128;
/// Leases that are due within this time of each other are renewed together.
const TOGETHER: Duration = Duration::from_millis(50);
/// The pause after a failed renewal. Doubles with each further failure, up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl LocksState {
    /// Renews a lease from now on, until it is removed or lost.
    pub(super) fn keep(self: &Arc<Self>, hold: &Arc<Grant>) {
        let (_, due) = hold.due();
        let runtime = Handle::current();
        let mut state = self.keeper.state();
        let first = (!state.has_task).then(|| runtime.clone());
        let kept = Kept { hold: Arc::clone(hold), due: Some(due), runtime: Some(runtime) };
        state.holds.insert(*hold.token(), kept);
        state.due.insert((due, *hold.token()));
        match first {
            Some(runtime) => self.start_task(state, runtime),
            None => self.keeper.wake_for(&mut state, due),
        }
    }

    /// Watches a role until `due`. `None` without a runtime.
    pub(super) fn watch(self: &Arc<Self>, due: Instant, role: Weak<dyn Role>) -> Option<Watched> {
        let watched = (due, self.gate.new_position().position);
        let mut state = self.keeper.state();
        if state.has_task {
            state.roles.insert(watched, role);
            self.keeper.wake_for(&mut state, due);
        } else {
            let runtime = Handle::try_current().ok()?;
            state.roles.insert(watched, role);
            self.start_task(state, runtime);
        }
        Some(watched)
    }

    pub(super) fn unwatch(&self, watched: &Watched) {
        self.keeper.state().roles.remove(watched);
    }

    /// Starts the task, outside of the lock: in an ended runtime it ends at once.
    fn start_task(self: &Arc<Self>, mut state: MutexGuard<'_, State>, runtime: Handle) {
        state.has_task = true;
        state.sleeps_until = None;
        drop(state);
        drop(runtime.spawn(keep_alive(Task(Arc::downgrade(self)), Arc::clone(&self.keeper.wake))));
        make_way();
        self.remember(runtime);
    }

    /// Starts another task if one ended with its runtime and leases of other runtimes are left.
    fn start_elsewhere(self: &Arc<Self>) {
        let mut state = self.keeper.state();
        state.has_task = false;
        // That task may not have started either.
        if std::mem::replace(&mut state.is_moving, true) {
            return;
        }
        // Replies of pending renewals are lost.
        let now = Instant::now();
        let unheard: Vec<_> =
            state.holds.iter().filter(|(_, kept)| kept.due.is_none()).map(|(token, _)| *token).collect();
        unheard.iter().for_each(|token| state.schedule(token, Some(now)));
        // Each runtime is tried at most once for each of its leases.
        while !state.has_task {
            let there = state.holds.iter().filter(|(_, kept)| kept.runtime.is_some());
            let there: Vec<_> = there.map(|(token, _)| *token).collect();
            if there.is_empty() {
                break;
            }
            for token in there {
                if state.has_task {
                    break;
                }
                if let Some(runtime) = state.holds.get_mut(&token).and_then(|kept| kept.runtime.take()) {
                    self.start_task(state, runtime);
                    state = self.keeper.state();
                }
            }
        }
        state.is_moving = false;
    }

    /// Stores the holder's name in the background, unless it has no name or the store knows it. A failure is repaired by the next
    /// renewal.
    pub(super) fn name(self: &Arc<Self>, hold: &Arc<Grant>, now: Instant) {
        let Some(name) = self.holder().filter(|_| hold.is_name_due(now)) else { return };
        let call = Arc::clone(&self.store).name(*hold.lock(), *hold.token(), name);
        let hold = Arc::clone(hold);
        self.spawn(async move {
            if !matches!(timeout(hold.limit(), call).await, Ok(Ok(()))) {
                hold.unnamed();
                tracing::debug!(lock = %hold.lock(), "cannot store the name of a lock holder");
            }
        });
    }

    /// Asks the holders of a lock in the background to release it.
    pub(super) fn ask_holders(self: &Arc<Self>, lock: LockKey, limit: Duration) {
        let call = Arc::clone(&self.store).ask_holders(lock);
        self.spawn(async move {
            if !matches!(timeout(limit, call).await, Ok(Ok(()))) {
                tracing::debug!(%lock, "cannot send a release request to the holders of a lock");
            }
        });
    }

    /// Takes the leases that are due for renewal, drops lost ones, and returns when to look again.
    fn due(self: &Arc<Self>, now: Instant) -> (Vec<Arc<Grant>>, Instant) {
        let mut renew = Vec::new();
        let mut lost = Vec::new();
        let mut state = self.keeper.state();
        while let Some(&(due, token)) = state.due.first() {
            if due > now + TOGETHER || (due > now && renew.is_empty() && lost.is_empty()) {
                break;
            }
            let Some(kept) = state.holds.get(&token) else {
                state.due.pop_first();
                continue;
            };
            let hold = Arc::clone(&kept.hold);
            let (renew_at, next) = hold.due();
            match hold.look(now) {
                Err(_) => {
                    state.schedule(&token, None);
                    state.holds.remove(&token);
                    lost.push(hold);
                }
                Ok(_) if renew_at <= now + TOGETHER => {
                    state.schedule(&token, None);
                    renew.push(hold);
                }
                // It ends within the batching interval, and has not ended yet.
                Ok(_) if next == due => break,
                Ok(_) => state.schedule(&token, Some(next)),
            }
        }
        // An alarm stays set after its lease was released. Otherwise each of many short leases would wake the task.
        let alarm = state.sleeps_until.filter(|until| *until > now);
        let later = state.roles.split_off(&(now, Position::MAX));
        let expired = std::mem::replace(&mut state.roles, later);
        let role = state.roles.first_key_value().map(|((due, _), _)| *due);
        let next = state.due.first().map(|(due, _)| *due).into_iter().chain(role).chain(alarm).min();
        let next = next.unwrap_or_else(|| after(now, Duration::MAX));
        state.sleeps_until = Some(next);
        drop(state);
        for hold in lost {
            self.lose(&hold, now);
        }
        for role in expired.into_values().filter_map(|role| role.upgrade()) {
            role.expire(now);
        }
        (renew, next)
    }

    /// Notifies watchers of a lost lease. The holder or the renewal task may notice it first.
    pub(super) fn note_loss(&self, hold: &Grant, now: Instant) {
        if let Some(reason) = hold.note_loss(now) {
            tracing::warn!(lock = %hold.lock(), ?reason, "lock lost");
            self.meters().lost(reason);
        }
    }

    /// Notifies the holder, and lets other callers try.
    fn lose(self: &Arc<Self>, hold: &Arc<Grant>, now: Instant) {
        self.note_loss(hold, now);
        hold.tell();
        if hold.look(now) == Err(LossReason::MaxHold) {
            // The holder may not look, and a renewal may just have succeeded. It gets as much time as with an expired lease.
            ReleaseTask::after_loss(self, hold, now).in_background_at(Arc::clone(hold), now + hold.margin());
        }
        self.abandon(hold);
        self.ended();
    }

    /// Records the result of a renewal that was sent at `sent`.
    fn renewed(self: &Arc<Self>, holds: &[Arc<Grant>], sent: Instant, answers: Result<&[bool], &StoreError>) {
        let now = Instant::now();
        for (i, hold) in holds.iter().enumerate() {
            match answers.map(|answers| answers.get(i).copied()) {
                Ok(Some(true)) => {
                    hold.renewed(sent, now);
                    self.name(hold, now);
                }
                Ok(Some(false)) => hold.taken(),
                Ok(None) | Err(_) => {
                    let pause = |failures: u32| {
                        let longest = LONGEST_PAUSE.min(hold.ttl() / 10);
                        let pause = (FIRST_PAUSE * (1 << (failures - 1).min(4))).min(longest);
                        jittered(pause)
                    };
                    hold.suspended(now, answers.is_err_and(StoreError::is_refusal), pause);
                    self.meters().renewal_failed();
                    tracing::debug!(lock = %hold.lock(), "a renewal failed: trying again while the lease lasts");
                }
            }
            let is_lost = hold.look(now).is_err();
            let mut state = self.keeper.state();
            // A lease that was released meanwhile is not renewed further.
            if !state.holds.contains_key(hold.token()) {
                continue;
            }
            if is_lost {
                state.holds.remove(hold.token());
                drop(state);
                self.lose(hold, now);
            } else {
                let (_, due) = hold.due();
                state.schedule(hold.token(), Some(due));
                self.keeper.wake_for(&mut state, due);
            }
        }
    }
}

/// The leases and calls of the renewal task. Dropping it means that the task has ended.
struct Task(Weak<LocksState>);

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.start_elsewhere();
        }
    }
}

async fn keep_alive(task: Task, wake: Arc<Notify>) {
    // Pending calls. They end with this task.
    let mut calls = JoinSet::new();
    loop {
        let Some(shared) = task.0.upgrade() else { return };
        let (mut renew, next) = shared.due(Instant::now());
        // Leases with fewer replicas do not wait for those with more. Short leases do not delay long ones: within one call, no
        // lease waits twice as long as another.
        let now = Instant::now();
        let shard = |hold: &Arc<Grant>| {
            let timeout = hold.renewal_timeout(now).as_millis().max(1).ilog2();
            (shared.store.shard(hold.lock()), hold.replicas().count, timeout, is_apart(&shared, hold))
        };
        renew.sort_by_cached_key(shard);
        let shards = renew.chunk_by(|one, other| shard(one) == shard(other));
        for holds in shards.flat_map(|holds| holds.chunks(if is_apart(&shared, &holds[0]) { 1 } else { BATCH })) {
            calls.spawn(renew_batch(Weak::clone(&task.0), holds.to_vec()));
        }
        drop(shared);
        tokio::select! {
            () = wake.notified() => {}
            () = sleep_until(next) => {}
            Some(ended) = calls.join_next(), if !calls.is_empty() => discard_joined(ended),
        }
    }
}

/// Whether a lease needs a renewal call of its own. By a quorum, a call fails if one of its leases is undecided, which must not
/// cost others theirs. A replicated call fails if too few replicas have one lease, and then does not report a lost one.
fn is_apart(shared: &LocksState, hold: &Grant) -> bool {
    let may_fail_for_others = shared.store.reach() == Reach::Quorum || hold.replicas().count > 0;
    may_fail_for_others && hold.is_suspended()
}

async fn renew_batch(weak: Weak<LocksState>, holds: Vec<Arc<Grant>>) {
    let Some(shared) = weak.upgrade() else { return };
    let renewals = holds.iter().map(|hold| hold.renewal());
    let call = Arc::clone(&shared.store).renew(renewals.collect());
    drop(shared);
    let sent = Instant::now();
    holds.iter().for_each(|hold| hold.renewing(sent));
    // A lost lease is lost at its old deadline, so do not wait beyond the first deadline.
    let timeout = holds.iter().map(|hold| hold.renewal_timeout(sent)).min().unwrap_or_default();
    let answers = Deadline::new(call, timeout).await;
    if let Some(shared) = weak.upgrade() {
        shared.renewed(&holds, sent, answers.as_deref());
    }
}
