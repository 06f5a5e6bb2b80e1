use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::error::LossReason;
use super::gate::{LeaderPermit, PendingRelease};
use super::grant::Grant;
use super::jitter::jittered;
use super::lock_key::LockKey;
use super::locks_state::{LocksState, Running};
use super::release_outcome::ReleaseOutcome;
use super::store::{Claim, Released, Token};
use crate::error::StoreError;
use crate::store::deadline::Deadline;

/// The pause before a release is retried. Doubles each time, up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a call without a reply is taken to be in flight. Until then a release is repeated, since a grant may still arrive
/// after it.
///
/// No bound always holds. TCP resends a lost packet after a fifth of a second and then after twice as long each time, four times
/// within this. A stopped server executes earlier commands first when it resumes, and answers none before, so no release counts
/// as done until then. A grant that arrives later, over a connection that was cut while others were not, has no holder and
/// expires like any lease.
pub(super) const IN_FLIGHT_GRACE: Duration = Duration::from_secs(5);
/// Maximum number of acquisitions with an unknown outcome that are undone at the same time. Further ones expire.
const MAX_UNDONE: usize = 1_024;

/// A token to release: by a caller that waits for it, or in the background.
pub(super) struct ReleaseTask {
    // For a shutdown, which waits until no task is left.
    running: Running,
    lock: LockKey,
    token: Token,
    // The lease, if there is one.
    hold: Option<Arc<Grant>>,
    // The longest duration of one call.
    limit: Duration,
    turn: Option<LeaderPermit>,
    // Callers of this process that want the key wait for it, unless they wait for the permit.
    pending: Option<PendingRelease>,
    // The lease has expired by then, even a late grant.
    until: Instant,
    // Until when an attempt with this token may still be executed. A release before that is not enough.
    settles: Option<Instant>,
    // Whether the store was called, and answered the last time.
    is_asked: bool,
    is_answered: bool,
    // Whether the lease was certainly lost before its release.
    is_lost: bool,
    is_done: bool,
    place: Place,
    undone: Option<UndoPermit>,
}

/// Where the task runs. A task that ends early continues in the next of these.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Caller,
    Background,
    /// In a second runtime, after the first one ended.
    Elsewhere,
}

impl ReleaseTask {
    /// Releases a held lease, and makes the next caller the leader.
    pub(super) fn release(shared: &Arc<LocksState>, hold: &Arc<Grant>, turn: LeaderPermit, now: Instant) -> Self {
        let mut errand = Self::after_loss(shared, hold, now);
        errand.turn = Some(turn);
        errand
    }

    /// Releases one of several leases of a key, or the remains of a lost one.
    pub(super) fn given_back(shared: &Arc<LocksState>, hold: &Arc<Grant>, now: Instant) -> Self {
        let mut errand = Self::after_loss(shared, hold, now);
        errand.pending = (!errand.is_done).then(|| PendingRelease::new(shared, errand.lock));
        errand
    }

    /// Releases the remains of a lost lease.
    pub(super) fn after_loss(shared: &Arc<LocksState>, hold: &Arc<Grant>, now: Instant) -> Self {
        let settles = hold.settles(now);
        let is_lost = hold.look(now) == Err(LossReason::Taken);
        if is_lost {
            shared.note_loss(hold, now);
        }
        Self {
            lock: *hold.lock(),
            token: *hold.token(),
            hold: Some(Arc::clone(hold)),
            limit: hold.limit(),
            turn: None,
            pending: None,
            until: settles.map_or(hold.expires(), |settles| hold.expires().max(settles + hold.ttl())),
            settles,
            is_asked: false,
            is_answered: false,
            is_lost,
            is_done: is_lost && settles.is_none(),
            place: Place::Caller,
            undone: None,
            running: Running::new(shared),
        }
    }

    /// Undoes an abandoned acquisition, even if it may still be executed before it settles. Its grant expires at `until`.
    /// `None` if there are too many.
    pub(super) fn undo(
        shared: &Arc<LocksState>,
        lock: LockKey,
        claim: &Claim,
        until: Instant,
        limit: Duration,
        settles: Option<Instant>,
    ) -> Option<Self> {
        let undone = Some(UndoPermit::new(shared)?);
        Some(Self {
            lock,
            token: claim.token,
            hold: None,
            limit,
            turn: None,
            pending: None,
            until,
            settles,
            is_asked: false,
            is_answered: false,
            is_lost: false,
            is_done: false,
            place: Place::Caller,
            undone,
            running: Running::new(shared),
        })
    }

    /// Calls the store, and again over another connection if one just broke. After any reply the next caller may try. Returns
    /// `release` for a lease that was still held.
    pub(super) async fn carry_out(&mut self, release: ReleaseOutcome) -> Result<ReleaseOutcome, StoreError> {
        let released = match self.attempt().await {
            // It may have been released before the connection broke, or lost.
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
        let is_elsewhere = self.place == Place::Background;
        self.place = if is_elsewhere { Place::Elsewhere } else { Place::Background };
        let shared = Arc::clone(self.running.shared());
        let task = async move {
            // A release that may be followed by a late grant is not repeated at once.
            if !self.is_answered {
                let _ = self.attempt().await;
            }
            let mut pause = FIRST_PAUSE;
            while !self.is_done {
                let next = self.next(pause);
                if next >= self.until {
                    return self.leave();
                }
                sleep_until(next).await;
                let _ = self.attempt().await;
                pause = if self.is_answered { pause * 2 } else { (pause * 2).min(LONGEST_PAUSE) };
            }
        };
        if is_elsewhere { shared.spawn_elsewhere(task) } else { shared.spawn(task) }
    }

    /// The same, but not before `at`, and not if the holder of `hold` has released it by then.
    pub(super) fn in_background_at(mut self, hold: Arc<Grant>, at: Instant) {
        let shared = Arc::clone(self.running.shared());
        shared.spawn(async move {
            if hold.returned_by(at).await {
                return self.leave();
            }
            self.in_background();
        });
    }

    /// Leaves the lease to expire.
    fn leave(&mut self) {
        self.is_done = true;
    }

    /// When to retry after this pause: once more as soon as no call is in flight, if the store answers.
    fn next(&self, pause: Duration) -> Instant {
        let now = Instant::now();
        let next = now + jittered(pause);
        let settles = self.settles.filter(|settles| self.is_answered && now < *settles);
        settles.map_or(next, |settles| next.min(settles))
    }

    async fn attempt(&mut self) -> Result<Released, StoreError> {
        if self.is_done {
            return Ok(Released::default());
        }
        // An earlier call may have released it, with or without a reply.
        let is_first = !std::mem::replace(&mut self.is_asked, true);
        let is_settled = self.settles.is_none_or(|settles| Instant::now() >= settles);
        let call = Arc::clone(&self.running.shared().store).release(self.lock, self.token);
        let answer = Deadline::new(call, self.limit).await;
        if let Some(mut turn) = self.turn.take() {
            turn.is_shared = answer.as_ref().is_ok_and(|released| released.is_wanted);
        }
        if is_first && answer.as_ref().is_err_and(StoreError::is_refusal) {
            // The store refused the call, so the next reply is the first that can report a loss.
            self.is_asked = false;
        }
        self.pending = None;
        self.is_answered = answer.is_ok();
        match &answer {
            Ok(released) => {
                if let Some(hold) = self.hold.as_ref().filter(|_| is_first && !released.was_held) {
                    let now = Instant::now();
                    self.is_lost = hold.was_gone(now);
                    self.running.shared().note_loss(hold, now);
                }
                self.is_done = is_settled;
                self.hold.iter().for_each(|hold| hold.returned());
            }
            Err(error) => tracing::debug!(lock = %self.lock, %error, "the release of a lock failed: trying again"),
        }
        answer
    }
}

impl Drop for ReleaseTask {
    fn drop(&mut self) {
        if !self.is_done && self.place != Place::Elsewhere {
            let rest = Self {
                running: Running::new(self.running.shared()),
                turn: self.turn.take(),
                pending: self.pending.take(),
                hold: self.hold.take(),
                undone: self.undone.take(),
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
        (shared.undone.fetch_add(1, Ordering::Relaxed) < MAX_UNDONE).then_some(counted)
    }
}

impl Drop for UndoPermit {
    fn drop(&mut self) {
        self.0.undone.fetch_sub(1, Ordering::Relaxed);
    }
}
