use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::erased::DynStore;
use super::error::LossReason;
use super::lock_key::LockKey;
use super::store::{Claim, Renewal, Replicas, Token};

/// Number of fences that each lease reserves, one for each successive holder of this process.
pub(super) const FENCES: u32 = 16;
/// How long local handoffs may go on while other processes wait.
const MAX_LOCAL_HANDOFF: Duration = Duration::from_millis(100);

/// How long the store keeps the name of a holder at least. It keeps names as long as fences, which is twice as long.
const NAMED_FOR: Duration = Duration::from_secs(300);

/// A lease as the store knows it: one token, one expiry. Successive holders of this process may share it by handoff, each with
/// its own fence.
pub(super) struct Grant {
    lock: LockKey,
    token: Token,
    ttl: Duration,
    // The longest duration of a store call, except of calls that wait for replicas.
    limit: Duration,
    replicas: Replicas,
    // Until when an earlier attempt with this token may still be executed.
    settles: Option<Instant>,
    standing: Mutex<LimitInfo>,
    changed: Notify,
}

struct LimitInfo {
    since: Instant,
    // The lease is good until then. Counted from before the command that granted it was sent.
    deadline: Instant,
    // When the lease ends in the store at the latest, renewals without a reply included; and when the pending renewal was sent.
    expires: Instant,
    renewing: Option<Instant>,
    renew_at: Instant,
    // End of the holder's `max_hold`.
    ends: Option<Instant>,
    lost: Option<LossReason>,
    // Whether watchers were notified of the loss.
    is_noted: bool,
    // Failed renewals since the last success.
    failures: u32,
    fence: u64,
    fences_left: u32,
    // Whether no caller has held it yet.
    is_first: bool,
    // When the holder's name was last stored.
    named: Option<Instant>,
    // Whether the holder was asked to release it.
    is_asked: bool,
    // Whether the store has released it.
    is_returned: bool,
}

impl Grant {
    /// A lease granted to a command that was sent at `sent`.
    pub(super) fn new(
        lock: LockKey,
        claim: &Claim,
        limit: Duration,
        settles: Option<Instant>,
        sent: Instant,
        fence: u64,
    ) -> Self {
        let Claim { token, ttl, fences, replicas, .. } = *claim;
        let standing = LimitInfo {
            since: sent,
            deadline: sent + safe_ttl(ttl),
            expires: sent + ttl,
            renewing: None,
            renew_at: sent + ttl / 3,
            ends: None,
            lost: None,
            is_noted: false,
            failures: 0,
            fence,
            fences_left: fences,
            is_first: true,
            named: None,
            is_asked: false,
            is_returned: false,
        };
        Self { lock, token, ttl, limit, replicas, settles, standing: Mutex::new(standing), changed: Notify::new() }
    }

    pub(super) const fn lock(&self) -> &LockKey {
        &self.lock
    }

    pub(super) const fn token(&self) -> &Token {
        &self.token
    }

    pub(super) const fn ttl(&self) -> Duration {
        self.ttl
    }

    pub(super) const fn replicas(&self) -> Replicas {
        self.replicas
    }

    pub(super) fn renewal(&self) -> Renewal {
        Renewal { replicas: self.replicas, ..Renewal::new(self.lock, self.token, self.ttl) }
    }

    pub(super) const fn limit(&self) -> Duration {
        self.limit
    }

    /// The longest duration of a renewal sent at `now`.
    pub(super) fn renewal_timeout(&self, now: Instant) -> Duration {
        let limit = self.replicas.limit(self.limit);
        self.look(now).map_or(Duration::ZERO, |until| until - now).min(limit)
    }

    /// Until when an earlier attempt with this token may still be executed, if one may at `now`.
    pub(super) fn settles(&self, now: Instant) -> Option<Instant> {
        self.settles.filter(|settles| now < *settles)
    }

    /// Hands the lease off to a new holder and returns its fence, if the lease is nearly as good as a new one. The previous
    /// holder must be done with it.
    pub(super) fn hand_to(&self, max_hold: Option<Duration>, now: Instant) -> Option<u64> {
        let mut standing = self.standing();
        let is_fresh = standing.failures == 0 && standing.look(now).is_ok_and(|until| until - now >= self.ttl / 2);
        let may_pass = is_fresh && standing.fences_left > 0 && now - standing.since < MAX_LOCAL_HANDOFF;
        // The first holder gets the new grant, however short it is by now.
        if !std::mem::take(&mut standing.is_first) && !may_pass {
            return None;
        }
        standing.ends = max_hold.map(|max_hold| after(now, max_hold));
        standing.is_asked = false;
        let fence = standing.fence;
        standing.fence += 1;
        standing.fences_left -= 1;
        Some(fence)
    }

    /// Until when the lease is good, or how it was lost. A loss is final.
    pub(super) fn look(&self, now: Instant) -> Result<Instant, LossReason> {
        self.standing().look(now)
    }

    /// How the lease was lost, for the first caller only.
    pub(super) fn note_loss(&self, now: Instant) -> Option<LossReason> {
        let mut standing = self.standing();
        let reason = standing.look(now).err()?;
        (!std::mem::replace(&mut standing.is_noted, true)).then_some(reason)
    }

    /// How the lease was lost, once that was [recorded](Self::note_loss).
    pub(super) fn noted_loss(&self) -> Option<LossReason> {
        let standing = self.standing();
        standing.lost.filter(|_| standing.is_noted)
    }

    /// Records that the store did not know the lease at its release, and returns whether that is a loss. A lease that has
    /// reached its end may have expired.
    pub(super) fn was_gone(&self, now: Instant) -> bool {
        let mut standing = self.standing();
        let is_loss = !standing.is_noted && now < standing.deadline;
        if is_loss {
            standing.lost = Some(LossReason::Taken);
        }
        is_loss
    }

    /// Whether the last renewal failed.
    pub(super) fn is_suspended(&self) -> bool {
        self.standing().failures > 0
    }

    /// When the lease ends in the store, unless it is renewed.
    pub(super) fn expires(&self) -> Instant {
        let standing = self.standing();
        standing.renewing.map_or(standing.expires, |sent| standing.expires.max(sent + self.ttl))
    }

    /// How much longer a lease lasts in the store than here.
    pub(super) fn margin(&self) -> Duration {
        self.ttl - safe_ttl(self.ttl)
    }

    /// When to renew the lease, and when to check it, which may be earlier.
    pub(super) fn due(&self) -> (Instant, Instant) {
        let standing = self.standing();
        let ends = standing.ends.unwrap_or(standing.deadline);
        (standing.renew_at, standing.renew_at.min(standing.deadline).min(ends))
    }

    /// Records that a renewal was sent.
    pub(super) fn renewing(&self, sent: Instant) {
        self.standing().renewing = Some(sent);
    }

    /// Records a renewal that was sent at `sent`. A late reply counts as none.
    pub(super) fn renewed(&self, sent: Instant, now: Instant) {
        let mut standing = self.standing();
        standing.renewing = None;
        standing.expires = standing.expires.max(sent + self.ttl);
        if standing.look(now).is_ok() {
            standing.failures = 0;
            standing.deadline = standing.deadline.max(sent + safe_ttl(self.ttl));
            standing.renew_at = sent + self.ttl / 3;
        }
    }

    /// Records a renewal without a result, unless it was refused. `pause` gives the wait after a number of failures.
    pub(super) fn suspended(&self, now: Instant, is_refused: bool, pause: impl FnOnce(u32) -> Duration) {
        let mut standing = self.standing();
        standing.renewing = None;
        if !is_refused {
            standing.expires = standing.expires.max(now + self.ttl);
        }
        standing.failures = standing.failures.saturating_add(1);
        standing.renew_at = now + pause(standing.failures);
    }

    /// Whether to store the holder's name at `now`, for the first time or again.
    pub(super) fn is_name_due(&self, now: Instant) -> bool {
        let mut standing = self.standing();
        let is_due = standing.named.is_none_or(|named| now - named >= NAMED_FOR);
        if is_due {
            standing.named = Some(now);
        }
        is_due
    }

    /// Records that the name may not be stored: store it again.
    pub(super) fn unnamed(&self) {
        self.standing().named = None;
    }

    /// Asks the holder to release it.
    pub(super) fn ask(&self) {
        self.standing().is_asked = true;
        self.changed.notify_waiters();
    }

    /// Waits until the holder is asked to release, by this process or through the store.
    pub(super) async fn asked(&self, store: Arc<dyn DynStore>) {
        let by_others = async {
            let mut wakeups = store.watch_asks(self.lock).await;
            wakeups.next().await;
        };
        let mut by_others = pin!(by_others);
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.standing().is_asked {
                return;
            }
            tokio::select! {
                () = changed => {}
                () = &mut by_others => return self.ask(),
            }
        }
    }

    /// Records that the store refused the renewal.
    pub(super) fn taken(&self) {
        self.standing().lost.get_or_insert(LossReason::Taken);
        self.changed.notify_waiters();
    }

    /// Records that the store has released it.
    pub(super) fn returned(&self) {
        self.standing().is_returned = true;
        self.changed.notify_waiters();
    }

    /// Waits until the store has released it, or until `at`. Returns whether it has.
    pub(super) async fn returned_by(&self, at: Instant) -> bool {
        let look = || match self.standing().is_returned {
            false if Instant::now() < at => Ok(at),
            is_returned => Err(is_returned),
        };
        self.over(look).await
    }

    /// Wakes callers that wait for its end: [`look`](Self::look) found a loss, or the holder is done.
    pub(super) fn tell(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until the lease is lost. Uses the clock only, so no reply is needed.
    pub(super) async fn lost(&self) -> LossReason {
        self.over(|| self.look(Instant::now())).await
    }

    /// Waits until `look` fails. Calls it after each change, and at the instant it returned last.
    pub(super) async fn over<E>(&self, look: impl Fn() -> Result<Instant, E>) -> E {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let until = match look() {
                Ok(until) => until,
                Err(reason) => return reason,
            };
            tokio::select! {
                () = changed => {}
                () = sleep_until(until) => {}
            }
        }
    }

    fn standing(&self) -> MutexGuard<'_, LimitInfo> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LimitInfo {
    fn look(&mut self, now: Instant) -> Result<Instant, LossReason> {
        if self.lost.is_none() {
            if now >= self.deadline {
                self.lost = Some(LossReason::Expired);
            } else if self.ends.is_some_and(|ends| now >= ends) {
                self.lost = Some(LossReason::MaxHold);
            }
        }
        self.lost.map_or_else(|| Ok(self.ends.map_or(self.deadline, |ends| ends.min(self.deadline))), Err)
    }
}

/// Tokens belong to one acquisition.
impl PartialEq for Grant {
    fn eq(&self, other: &Self) -> bool {
        self.token == other.token
    }
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant").field("lock", &self.lock).field("token", &self.token).finish_non_exhaustive()
    }
}

/// How long to rely on a lease. Shorter than in the store, whose clock may run faster.
pub(super) fn safe_ttl(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))
}

/// The far future, for times too long to be added.
const FAR: Duration = Duration::from_secs(86_400 * 365 * 30);

pub(super) fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(FAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(ttl_ms: u64) -> Grant {
        let ttl = Duration::from_millis(ttl_ms);
        let claim = Claim { fences: FENCES, ..Claim::new(Token::random().unwrap(), ttl) };
        Grant::new(LockKey::new("test", "a"), &claim, Duration::from_millis(100), None, Instant::now(), 100)
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_for_its_holder_before_it_ends_in_the_store() {
        for ttl_ms in [10, 100, 30_000, 86_400_000] {
            let hold = hold(ttl_ms);
            let until = hold.look(Instant::now()).unwrap();
            assert!(until + Duration::from_millis(2) <= hold.expires());
            assert!(until > Instant::now());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_loss_is_for_good() {
        let hold = hold(1_000);
        tokio::time::advance(safe_ttl(hold.ttl())).await;
        let now = Instant::now();
        assert_eq!(hold.look(now), Err(LossReason::Expired));
        hold.renewed(now, now);
        assert_eq!(hold.look(now), Err(LossReason::Expired));
        assert_eq!(hold.hand_to(None, now).and(hold.hand_to(None, now)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_counts_from_when_it_was_sent() {
        let hold = hold(1_000);
        let sent = Instant::now() + Duration::from_millis(100);
        hold.renewed(sent, sent + Duration::from_millis(500));
        assert_eq!(hold.look(sent), Ok(sent + safe_ttl(hold.ttl())));
        // A late reply does not revoke a newer one.
        hold.renewed(sent - Duration::from_millis(50), sent + Duration::from_millis(500));
        assert_eq!(hold.look(sent), Ok(sent + safe_ttl(hold.ttl())));
    }

    #[tokio::test(start_paused = true)]
    async fn handoffs_have_rising_fences_and_end_in_time() {
        let hold = hold(30_000);
        let now = Instant::now();
        let fences: Vec<_> = std::iter::from_fn(|| hold.hand_to(None, now)).collect();
        assert_eq!(fences, (100..100 + u64::from(FENCES)).collect::<Vec<_>>());

        let hold = self::hold(30_000);
        assert_eq!(hold.hand_to(None, now), Some(100));
        assert_eq!(hold.hand_to(None, now + MAX_LOCAL_HANDOFF), None);

        let hold = self::hold(100);
        assert_eq!(hold.hand_to(None, now), Some(100));
        assert_eq!(hold.hand_to(None, now + Duration::from_millis(60)), None, "not enough of it is left");
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_be_held_for_a_moment_is_lost_after_it() {
        let hold = hold(30_000);
        let now = Instant::now();
        hold.hand_to(Some(Duration::from_secs(2)), now);
        let lost = hold.lost().await;
        assert_eq!((lost, now.elapsed()), (LossReason::MaxHold, Duration::from_secs(2)));
    }
}
