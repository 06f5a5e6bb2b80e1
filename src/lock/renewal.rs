//! Renews leases: one task for all leases of a `Locks` and its clones, a batch of renewals at a time.

use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::error::LossReason;
use super::grant::{Grant, after};
use super::jitter::jittered;
use super::lifo_slot::free_lifo_slot;
use super::local_queue::Position;
use super::lock_key::LockKey;
use super::locks_state::LocksState;
use super::release_task::ReleaseTask;
use super::renewal_schedule::{ScheduledLease, State, Watchdog, WatchdogKey};
use crate::error::StoreError;
use crate::panics::discard_joined;
use crate::reach::Reach;
use crate::store::deadline::Deadline;

/// Maximum number of leases in one renewal call.
const BATCH: usize = 128;
/// Leases that are due within this time of each other are renewed together.
const BATCH_INTERVAL: Duration = Duration::from_millis(50);
/// The pause after a failed renewal. Doubles with each further failure, up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl LocksState {
    /// Renews a lease from now on, until it is removed or lost.
    pub(super) fn start_renewal(self: &Arc<Self>, grant: &Arc<Grant>) {
        let (_, due) = grant.due();
        let runtime = Handle::current();
        let mut state = self.renewals.state();
        let first = (!state.has_task).then(|| runtime.clone());
        let lease = ScheduledLease { grant: Arc::clone(grant), due: Some(due), runtime: Some(runtime) };
        state.leases.insert(*grant.token(), lease);
        state.due.insert((due, *grant.token()));
        match first {
            Some(runtime) => self.start_task(state, runtime),
            None => self.renewals.wake_for(&mut state, due),
        }
    }

    /// Expires the watchdog at `due`, unless it is removed before. `None` without a runtime.
    pub(super) fn add_watchdog(self: &Arc<Self>, due: Instant, watchdog: Weak<dyn Watchdog>) -> Option<WatchdogKey> {
        let key = (due, self.queues.new_position().position);
        let mut state = self.renewals.state();
        if state.has_task {
            state.watchdogs.insert(key, watchdog);
            self.renewals.wake_for(&mut state, due);
        } else {
            let runtime = Handle::try_current().ok()?;
            state.watchdogs.insert(key, watchdog);
            self.start_task(state, runtime);
        }
        Some(key)
    }

    pub(super) fn remove_watchdog(&self, key: &WatchdogKey) {
        self.renewals.state().watchdogs.remove(key);
    }

    /// Starts the task after unlocking the state: in an ended runtime the task is dropped immediately, and its drop locks the state.
    fn start_task(self: &Arc<Self>, mut state: MutexGuard<'_, State>, runtime: Handle) {
        state.has_task = true;
        state.sleeps_until = None;
        drop(state);
        drop(runtime.spawn(run_renewals(Task(Arc::downgrade(self)), Arc::clone(&self.renewals.wake))));
        free_lifo_slot();
        self.set_fallback_runtime(runtime);
    }

    /// Restarts the task in the runtime of another lease, after it ended with its runtime.
    fn restart_task(self: &Arc<Self>) {
        let mut state = self.renewals.state();
        state.has_task = false;
        // Another call is already looking for a runtime, and its task did not start either.
        if std::mem::replace(&mut state.is_restarting, true) {
            return;
        }
        // Replies of pending renewals are lost.
        let now = Instant::now();
        let unanswered: Vec<_> =
            state.leases.iter().filter(|(_, lease)| lease.due.is_none()).map(|(token, _)| *token).collect();
        unanswered.iter().for_each(|token| state.schedule(token, Some(now)));
        // Each runtime is tried at most once for each of its leases.
        while !state.has_task {
            let candidates = state.leases.iter().filter(|(_, lease)| lease.runtime.is_some());
            let candidates: Vec<_> = candidates.map(|(token, _)| *token).collect();
            if candidates.is_empty() {
                break;
            }
            for token in candidates {
                if state.has_task {
                    break;
                }
                if let Some(runtime) = state.leases.get_mut(&token).and_then(|lease| lease.runtime.take()) {
                    self.start_task(state, runtime);
                    state = self.renewals.state();
                }
            }
        }
        state.is_restarting = false;
    }

    /// Stores the holder's name in the background, unless it is stored already. After a failure, the next renewal retries it.
    pub(super) fn store_holder_name(self: &Arc<Self>, grant: &Arc<Grant>, now: Instant) {
        let Some(name) = self.holder().filter(|_| grant.take_name_due(now)) else { return };
        let call = Arc::clone(&self.store).name(*grant.lock(), *grant.token(), name);
        let grant = Arc::clone(grant);
        self.spawn(async move {
            if !matches!(timeout(grant.call_timeout(), call).await, Ok(Ok(()))) {
                grant.record_name_failure();
                tracing::debug!(lock = %grant.lock(), "cannot store the name of a lock holder");
            }
        });
    }

    /// Sends the holders of a lock a release request in the background.
    pub(super) fn request_release(self: &Arc<Self>, lock: LockKey, call_timeout: Duration) {
        let call = Arc::clone(&self.store).request_release(lock);
        self.spawn(async move {
            if !matches!(timeout(call_timeout, call).await, Ok(Ok(()))) {
                tracing::debug!(%lock, "cannot send a release request to the holders of a lock");
            }
        });
    }

    /// Returns the leases to renew, and when the next lease or watchdog is due. Ends leases that are lost and watchdogs that have expired.
    fn take_due(self: &Arc<Self>, now: Instant) -> (Vec<Arc<Grant>>, Instant) {
        let mut renew = Vec::new();
        let mut lost = Vec::new();
        let mut state = self.renewals.state();
        while let Some(&(due, token)) = state.due.first() {
            if due > now + BATCH_INTERVAL || (due > now && renew.is_empty() && lost.is_empty()) {
                break;
            }
            let Some(lease) = state.leases.get(&token) else {
                state.due.pop_first();
                continue;
            };
            let grant = Arc::clone(&lease.grant);
            let (renew_at, next) = grant.due();
            match grant.valid_until(now) {
                Err(_) => {
                    state.schedule(&token, None);
                    state.leases.remove(&token);
                    lost.push(grant);
                }
                Ok(_) if renew_at <= now + BATCH_INTERVAL => {
                    state.schedule(&token, None);
                    renew.push(grant);
                }
                // The lease ends within the batching interval, and has not ended yet.
                Ok(_) if next == due => break,
                Ok(_) => state.schedule(&token, Some(next)),
            }
        }
        // The timer stays set after its lease was released. Otherwise each of many short leases would wake the task.
        let timer = state.sleeps_until.filter(|until| *until > now);
        let later = state.watchdogs.split_off(&(now, Position::MAX));
        let expired = std::mem::replace(&mut state.watchdogs, later);
        let watchdog = state.watchdogs.first_key_value().map(|((due, _), _)| *due);
        let next = state.due.first().map(|(due, _)| *due).into_iter().chain(watchdog).chain(timer).min();
        let next = next.unwrap_or_else(|| after(now, Duration::MAX));
        state.sleeps_until = Some(next);
        drop(state);
        for grant in lost {
            self.end_lost(&grant, now);
        }
        for watchdog in expired.into_values().filter_map(|watchdog| watchdog.upgrade()) {
            watchdog.expire(now);
        }
        (renew, next)
    }

    /// Logs and counts the loss of a lease once: the holder or the renewal task may detect it first.
    pub(super) fn record_loss(&self, grant: &Grant, now: Instant) {
        if let Some(reason) = grant.record_loss(now) {
            tracing::warn!(lock = %grant.lock(), ?reason, "lock lost");
            self.metrics().lost(reason);
        }
    }

    /// Ends a lost lease: notifies the holder, and lets other callers acquire the lock.
    fn end_lost(self: &Arc<Self>, grant: &Arc<Grant>, now: Instant) {
        self.record_loss(grant, now);
        grant.notify_waiters();
        if grant.valid_until(now) == Err(LossReason::MaxHold) {
            // The holder may not check its lease, and a renewal may just have succeeded. So release the lease, after the margin by which an
            // expired lease outlasts its holder in the store.
            ReleaseTask::for_grant(self, grant, now).in_background_at(Arc::clone(grant), now + grant.margin());
        }
        self.abandon(grant);
        self.notify_idle();
    }

    /// Records the result of a renewal that was sent at `sent`.
    fn record_renewals(self: &Arc<Self>, grants: &[Arc<Grant>], sent: Instant, answers: Result<&[bool], &StoreError>) {
        let now = Instant::now();
        for (i, grant) in grants.iter().enumerate() {
            match answers.map(|answers| answers.get(i).copied()) {
                Ok(Some(true)) => {
                    grant.record_renewal(sent, now);
                    self.store_holder_name(grant, now);
                }
                Ok(Some(false)) => grant.record_taken(),
                Ok(None) | Err(_) => {
                    let pause = |failures: u32| {
                        let longest = LONGEST_PAUSE.min(grant.ttl() / 10);
                        let pause = (FIRST_PAUSE * (1 << (failures - 1).min(4))).min(longest);
                        jittered(pause)
                    };
                    grant.record_failed_renewal(now, answers.is_err_and(StoreError::is_refusal), pause);
                    self.metrics().renewal_failed();
                    tracing::debug!(lock = %grant.lock(), "a renewal failed: trying again while the lease lasts");
                }
            }
            let is_lost = grant.valid_until(now).is_err();
            let mut state = self.renewals.state();
            // The lease was released during the call.
            if !state.leases.contains_key(grant.token()) {
                continue;
            }
            if is_lost {
                state.leases.remove(grant.token());
                drop(state);
                self.end_lost(grant, now);
            } else {
                let (_, due) = grant.due();
                state.schedule(grant.token(), Some(due));
                self.renewals.wake_for(&mut state, due);
            }
        }
    }
}

/// Restarts the renewal task in another runtime when it is dropped, which means that the task has ended.
struct Task(Weak<LocksState>);

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.restart_task();
        }
    }
}

async fn run_renewals(task: Task, wake: Arc<Notify>) {
    // Pending calls. They end with this task.
    let mut calls = JoinSet::new();
    loop {
        let Some(shared) = task.0.upgrade() else { return };
        let (mut renew, next) = shared.take_due(Instant::now());
        // One call renews leases with the same number of replicas, so none waits for the replicas of another. The timeouts in one call
        // differ at most by a factor of two, so short leases do not fail long ones.
        let now = Instant::now();
        let shard = |grant: &Arc<Grant>| {
            let timeout = grant.renewal_timeout(now).as_millis().max(1).ilog2();
            (shared.store.shard(grant.lock()), grant.replicas().count, timeout, needs_own_call(&shared, grant))
        };
        renew.sort_by_cached_key(shard);
        let shards = renew.chunk_by(|one, other| shard(one) == shard(other));
        for grants in
            shards.flat_map(|grants| grants.chunks(if needs_own_call(&shared, &grants[0]) { 1 } else { BATCH }))
        {
            calls.spawn(renew_batch(Weak::clone(&task.0), grants.to_vec()));
        }
        drop(shared);
        tokio::select! {
            () = wake.notified() => {}
            () = sleep_until(next) => {}
            Some(joined) = calls.join_next(), if !calls.is_empty() => discard_joined(joined),
        }
    }
}

/// Whether a lease needs a renewal call of its own, so that it cannot fail others. A quorum call fails if it has no majority for one of its
/// leases. A replicated call fails if too few replicas have one of them, and does not report lost leases then.
fn needs_own_call(shared: &LocksState, grant: &Grant) -> bool {
    let may_fail_for_others = shared.store.reach() == Reach::Quorum || grant.replicas().count > 0;
    may_fail_for_others && grant.is_suspended()
}

async fn renew_batch(weak: Weak<LocksState>, grants: Vec<Arc<Grant>>) {
    let Some(shared) = weak.upgrade() else { return };
    let renewals = grants.iter().map(|grant| grant.renewal());
    let call = Arc::clone(&shared.store).renew(renewals.collect());
    drop(shared);
    let sent = Instant::now();
    grants.iter().for_each(|grant| grant.record_renewal_sent(sent));
    // A renewal after the deadline of its lease is useless, so wait until the first deadline at most.
    let timeout = grants.iter().map(|grant| grant.renewal_timeout(sent)).min().unwrap_or_default();
    let answers = Deadline::new(call, timeout).await;
    if let Some(shared) = weak.upgrade() {
        shared.record_renewals(&grants, sent, answers.as_deref());
    }
}
