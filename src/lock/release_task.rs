use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::error::LossReason;
use super::gate::{LeaderPermit, PendingRelease};
use super::grant::Grant;
use super::lease::ReleaseOutcome;
use super::lock_key::LockKey;
use super::locks_state::{Running, Shared};
use super::renewal::jittered;
use super::store::{Claim, Released, Token};
use crate::error::StoreError;
use crate::store::deadline::Deadline;

/// The pause before giving back again what may not have been given back, doubled each time up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// For how long what was asked of the store is taken to be on its way once its answer is not waited for any more. Until then what was
/// given back is given back again, since it may come to be granted after that.
///
/// No bound always holds. A connection that has lost a packet sends it again after a fifth of a second and then after twice as long each
/// time, which is four times within this. What lies with a server that stands still is carried out before what it is asked once it
/// goes on, and until then it answers nothing, so nothing is taken to be given back. What comes later than that, over a connection that
/// was cut off when others were not, is held by nobody and ends by itself, as all leases do.
pub(super) const IN_FLIGHT_GRACE: Duration = Duration::from_secs(5);
/// How many acquisitions of which nothing is known are undone at the same time. What is beyond that expires by itself, as all of
/// them do in the end.
const MAX_UNDONE: usize = 1_024;

/// A token to be given back: carried out by whoever waits for that, and in the background if nobody does any more.
pub(super) struct ReleaseTask {
    // For whoever waits until nothing is under way.
    running: Running,
    lock: LockKey,
    token: Token,
    // The lease, if there is one.
    hold: Option<Arc<Grant>>,
    // How long one call may take.
    limit: Duration,
    turn: Option<LeaderPermit>,
    // What callers of this process that want the key wait for, if they do not wait for the turn.
    pending: Option<PendingRelease>,
    // The lease has ended by itself then, also one that was granted as late as it may be.
    until: Instant,
    // Until when an acquisition of this token may still come to pass, if one may: giving it back before that is not enough.
    settles: Option<Instant>,
    // Whether the store has been asked, and has answered the last time.
    is_asked: bool,
    is_answered: bool,
    // Whether it is certain that the lease was lost before it was given back.
    is_lost: bool,
    is_done: bool,
    place: Place,
    undone: Option<UndoPermit>,
}

/// Where an errand is carried out. One that comes to no end there goes on in the next of these.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Caller,
    Background,
    /// In another runtime than the first one, which came to its end.
    Elsewhere,
}

impl ReleaseTask {
    /// Gives back a lease that is held, and lets the next in line ask for it.
    pub(super) fn release(home: &Arc<Shared>, hold: &Arc<Grant>, turn: LeaderPermit, now: Instant) -> Self {
        let mut errand = Self::after_loss(home, hold, now);
        errand.turn = Some(turn);
        errand
    }

    /// Gives back a lease of several that are held beside each other, or what may be left of one that was lost.
    pub(super) fn given_back(home: &Arc<Shared>, hold: &Arc<Grant>, now: Instant) -> Self {
        let mut errand = Self::after_loss(home, hold, now);
        errand.pending = (!errand.is_done).then(|| PendingRelease::new(home, errand.lock));
        errand
    }

    /// Gives back what may be left of a lease that was lost.
    pub(super) fn after_loss(home: &Arc<Shared>, hold: &Arc<Grant>, now: Instant) -> Self {
        let settles = hold.settles(now);
        let is_lost = hold.look(now) == Err(LossReason::Taken);
        if is_lost {
            home.note_loss(hold, now);
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
            running: Running::new(home),
        }
    }

    /// Undoes an acquisition that nobody wants any more; one of which nothing is known, should it come to pass before it settles.
    /// Whatever it was granted ends by itself at `until`. `None` if there are too many.
    pub(super) fn undo(
        home: &Arc<Shared>,
        lock: LockKey,
        claim: &Claim,
        until: Instant,
        limit: Duration,
        settles: Option<Instant>,
    ) -> Option<Self> {
        let undone = Some(UndoPermit::new(home)?);
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
            running: Running::new(home),
        })
    }

    /// Asks the store, and once more over another connection if one has just broken. Whatever it says, the next in line may try. Answers
    /// `release` for a lease that was still held.
    pub(super) async fn carry_out(&mut self, release: ReleaseOutcome) -> Result<ReleaseOutcome, StoreError> {
        let released = match self.attempt().await {
            // It may have been given back before the connection broke, and may as well have been lost.
            Err(error) if error.is_unavailable() => self.attempt().await?,
            answer => answer?,
        };
        Ok(match release {
            ReleaseOutcome::Released if self.is_lost => ReleaseOutcome::Lost,
            ReleaseOutcome::Released if !released.was_held => ReleaseOutcome::Uncertain,
            release => release,
        })
    }

    /// Carries the errand out without anybody waiting for it.
    pub(super) fn in_background(mut self) {
        if self.is_done {
            return;
        }
        let is_elsewhere = self.place == Place::Background;
        self.place = if is_elsewhere { Place::Elsewhere } else { Place::Background };
        let home = Arc::clone(self.running.home());
        let task = async move {
            // What was given back a moment ago, and may be granted once more, need not be given back again at once.
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
        if is_elsewhere { home.spawn_elsewhere(task) } else { home.spawn(task) }
    }

    /// The same, but not before `at`, and not if whoever has `hold` has given it back by then.
    pub(super) fn in_background_at(mut self, hold: Arc<Grant>, at: Instant) {
        let home = Arc::clone(self.running.home());
        home.spawn(async move {
            if hold.returned_by(at).await {
                return self.leave();
            }
            self.in_background();
        });
    }

    /// Leaves the lease to end by itself.
    fn leave(&mut self) {
        self.is_done = true;
    }

    /// When to ask again after so long a pause: once more as soon as all has settled, if the store answers.
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
        // What was asked before may have given it back, whether or not that was heard.
        let is_first = !std::mem::replace(&mut self.is_asked, true);
        let is_settled = self.settles.is_none_or(|settles| Instant::now() >= settles);
        let call = Arc::clone(&self.running.home().store).release(self.lock, self.token);
        let answer = Deadline::new(call, self.limit).await;
        if let Some(mut turn) = self.turn.take() {
            turn.is_shared = answer.as_ref().is_ok_and(|released| released.is_wanted);
        }
        if is_first && answer.as_ref().is_err_and(StoreError::is_refusal) {
            // The store has done nothing, so the next answer is the first that tells of a loss.
            self.is_asked = false;
        }
        self.pending = None;
        self.is_answered = answer.is_ok();
        match &answer {
            Ok(released) => {
                if let Some(hold) = self.hold.as_ref().filter(|_| is_first && !released.was_held) {
                    let now = Instant::now();
                    self.is_lost = hold.was_gone(now);
                    self.running.home().note_loss(hold, now);
                }
                self.is_done = is_settled;
                self.hold.iter().for_each(|hold| hold.returned());
            }
            Err(error) => tracing::debug!(lock = %self.lock, %error, "a lease could not be given back yet"),
        }
        answer
    }
}

impl Drop for ReleaseTask {
    fn drop(&mut self) {
        if !self.is_done && self.place != Place::Elsewhere {
            let rest = Self {
                running: Running::new(self.running.home()),
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

/// One of the acquisitions that are being undone.
struct UndoPermit(Arc<Shared>);

impl UndoPermit {
    fn new(home: &Arc<Shared>) -> Option<Self> {
        let counted = Self(Arc::clone(home));
        (home.undone.fetch_add(1, Ordering::Relaxed) < MAX_UNDONE).then_some(counted)
    }
}

impl Drop for UndoPermit {
    fn drop(&mut self) {
        self.0.undone.fetch_sub(1, Ordering::Relaxed);
    }
}
