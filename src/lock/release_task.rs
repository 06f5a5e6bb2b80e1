use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::error::LossReason;
use super::grant::Grant;
use super::jitter::jittered;
use super::local_queues::{LeaderPermit, PendingRelease};
use super::lock_key::LockKey;
use super::locks_state::{InFlightGuard, LocksState};
use super::release_outcome::ReleaseOutcome;
use super::store::{Claim, Released, Token};
use crate::error::StoreError;
use crate::store::deadline::Deadline;

/// The pause before a release is retried. Doubles each time, up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a call without a reply may still be in flight. Until then a release is repeated, since the server may execute a grant after it.
///
/// This is not a strict bound. TCP retransmits a lost packet after 200 ms, then with doubled pauses, four times within this time. A stopped
/// server executes earlier commands first when it resumes, so no release is answered before that. A later grant, over a connection that was
/// cut while others were not, has no holder and expires.
pub(super) const IN_FLIGHT_GRACE: Duration = Duration::from_secs(5);
/// Maximum number of acquisitions with an unknown outcome that are undone at the same time. Further ones expire.
const MAX_UNDONE: usize = 1_024;

/// A token to release: by a caller that waits for it, or in the background.
pub(super) struct ReleaseTask {
    // For a shutdown, which waits until no task is left.
    running: InFlightGuard,
    lock: LockKey,
    token: Token,
    // The lease, if there is one.
    grant: Option<Arc<Grant>>,
    // The longest duration of one call.
    call_timeout: Duration,
    permit: Option<LeaderPermit>,
    // Makes callers of this process wait for the release if the lease has no local queue.
    pending: Option<PendingRelease>,
    // The lease has expired by then, even a late grant.
    until: Instant,
    // Until when an attempt with this token may still be executed. A release before that is not enough.
    in_flight_until: Option<Instant>,
    // Whether the store was called, and whether it answered the last call.
    was_called: bool,
    was_answered: bool,
    // Whether the lease was lost before its release, and not just expired.
    is_lost: bool,
    is_done: bool,
    stage: Stage,
    undo_permit: Option<UndoPermit>,
}

/// Where the task runs. A task that is dropped early continues in the next stage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Caller,
    Background,
    /// In a second runtime, after the first one ended.
    FallbackRuntime,
}

impl ReleaseTask {
    /// Releases a held lease, and makes the next caller the leader.
    pub(super) fn release(shared: &Arc<LocksState>, grant: &Arc<Grant>, permit: LeaderPermit, now: Instant) -> Self {
        let mut task = Self::for_grant(shared, grant, now);
        task.permit = Some(permit);
        task
    }

    /// Releases a lease that the local queue does not hold: one of several of the key, or a lost one.
    pub(super) fn release_unqueued(shared: &Arc<LocksState>, grant: &Arc<Grant>, now: Instant) -> Self {
        let mut task = Self::for_grant(shared, grant, now);
        task.pending = (!task.is_done).then(|| PendingRelease::new(shared, task.lock));
        task
    }

    /// Releases a lease without making the next caller the leader, for instance a lost lease, which may still exist in the store.
    pub(super) fn for_grant(shared: &Arc<LocksState>, grant: &Arc<Grant>, now: Instant) -> Self {
        let in_flight_until = grant.in_flight_until(now);
        let is_lost = grant.valid_until(now) == Err(LossReason::Taken);
        if is_lost {
            shared.record_loss(grant, now);
        }
        Self {
            lock: *grant.lock(),
            token: *grant.token(),
            grant: Some(Arc::clone(grant)),
            call_timeout: grant.call_timeout(),
            permit: None,
            pending: None,
            until: in_flight_until
                .map_or(grant.expires(), |in_flight_until| grant.expires().max(in_flight_until + grant.ttl())),
            in_flight_until,
            was_called: false,
            was_answered: false,
            is_lost,
            is_done: is_lost && in_flight_until.is_none(),
            stage: Stage::Caller,
            undo_permit: None,
            running: InFlightGuard::new(shared),
        }
    }

    /// Undoes an abandoned acquisition, which may be executed until `in_flight_until`. Its grant expires at `until`. `None` if too many
    /// are being undone.
    pub(super) fn undo(
        shared: &Arc<LocksState>,
        lock: LockKey,
        claim: &Claim,
        until: Instant,
        call_timeout: Duration,
        in_flight_until: Option<Instant>,
    ) -> Option<Self> {
        let undo_permit = Some(UndoPermit::new(shared)?);
        Some(Self {
            lock,
            token: claim.token,
            grant: None,
            call_timeout,
            permit: None,
            pending: None,
            until,
            in_flight_until,
            was_called: false,
            was_answered: false,
            is_lost: false,
            is_done: false,
            stage: Stage::Caller,
            undo_permit,
            running: InFlightGuard::new(shared),
        })
    }

    /// Calls the store, and once more over another connection if the first one broke. After the first call, even a failed one, the next
    /// caller may acquire the lock. Returns `release` for a lease that was still held.
    pub(super) async fn run(&mut self, release: ReleaseOutcome) -> Result<ReleaseOutcome, StoreError> {
        let released = match self.attempt().await {
            // Whether the first call has released it is unknown.
            Err(error) if error.is_unavailable() => self.attempt().await?,
            answer => answer?,
        };
        Ok(match release {
            ReleaseOutcome::Released if self.is_lost => ReleaseOutcome::Lost,
            ReleaseOutcome::Released if !released.was_held => ReleaseOutcome::Uncertain,
            release => release,
        })
    }

    /// Runs the task in the background.
    pub(super) fn in_background(mut self) {
        if self.is_done {
            return;
        }
        let is_fallback = self.stage == Stage::Background;
        self.stage = if is_fallback { Stage::FallbackRuntime } else { Stage::Background };
        let shared = Arc::clone(self.running.shared());
        let task = async move {
            // If the store has answered, only a late grant can follow, so do not repeat the release immediately.
            if !self.was_answered {
                let _ = self.attempt().await;
            }
            let mut pause = FIRST_PAUSE;
            while !self.is_done {
                let next = self.next_attempt(pause);
                if next >= self.until {
                    return self.let_expire();
                }
                sleep_until(next).await;
                let _ = self.attempt().await;
                pause = if self.was_answered { pause * 2 } else { (pause * 2).min(LONGEST_PAUSE) };
            }
        };
        if is_fallback { shared.spawn_on_fallback(task) } else { shared.spawn(task) }
    }

    /// The same, but not before `at`, and not if the holder of `grant` has released it by then.
    pub(super) fn in_background_at(mut self, grant: Arc<Grant>, at: Instant) {
        let shared = Arc::clone(self.running.shared());
        shared.spawn(async move {
            if grant.released_before(at).await {
                return self.let_expire();
            }
            self.in_background();
        });
    }

    /// Gives up: the lease expires.
    fn let_expire(&mut self) {
        self.is_done = true;
    }

    /// When to retry: after the pause, or earlier when no call can be in flight any more.
    fn next_attempt(&self, pause: Duration) -> Instant {
        let now = Instant::now();
        let next = now + jittered(pause);
        let in_flight_until =
            self.in_flight_until.filter(|in_flight_until| self.was_answered && now < *in_flight_until);
        in_flight_until.map_or(next, |in_flight_until| next.min(in_flight_until))
    }

    async fn attempt(&mut self) -> Result<Released, StoreError> {
        if self.is_done {
            return Ok(Released::default());
        }
        // Only the first call can detect a loss: an earlier call may have released the lease without a reply.
        let is_first = !std::mem::replace(&mut self.was_called, true);
        let is_settled = self.in_flight_until.is_none_or(|in_flight_until| Instant::now() >= in_flight_until);
        let call = Arc::clone(&self.running.shared().store).release(self.lock, self.token);
        let answer = Deadline::new(call, self.call_timeout).await;
        if let Some(mut permit) = self.permit.take() {
            permit.others_were_notified = answer.as_ref().is_ok_and(|released| released.is_wanted);
        }
        if is_first && answer.as_ref().is_err_and(StoreError::is_refusal) {
            // A refused call released nothing, so the next call counts as the first.
            self.was_called = false;
        }
        self.pending = None;
        self.was_answered = answer.is_ok();
        match &answer {
            Ok(released) => {
                if let Some(grant) = self.grant.as_ref().filter(|_| is_first && !released.was_held) {
                    let now = Instant::now();
                    self.is_lost = grant.record_unknown(now);
                    self.running.shared().record_loss(grant, now);
                }
                self.is_done = is_settled;
                self.grant.iter().for_each(|grant| grant.record_released());
            }
            Err(error) => tracing::debug!(lock = %self.lock, %error, "the release of a lock failed: trying again"),
        }
        answer
    }
}

impl Drop for ReleaseTask {
    fn drop(&mut self) {
        if !self.is_done && self.stage != Stage::FallbackRuntime {
            let rest = Self {
                running: InFlightGuard::new(self.running.shared()),
                permit: self.permit.take(),
                pending: self.pending.take(),
                grant: self.grant.take(),
                undo_permit: self.undo_permit.take(),
                ..*self
            };
            rest.in_background();
        }
    }
}

/// A permit for an acquisition that is being undone.
struct UndoPermit(Arc<LocksState>);

impl UndoPermit {
    fn new(shared: &Arc<LocksState>) -> Option<Self> {
        let counted = Self(Arc::clone(shared));
        (shared.undoing.fetch_add(1, Ordering::Relaxed) < MAX_UNDONE).then_some(counted)
    }
}

impl Drop for UndoPermit {
    fn drop(&mut self) {
        self.0.undoing.fetch_sub(1, Ordering::Relaxed);
    }
}
