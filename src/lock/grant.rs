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
/// How long a lease may be handed off within this process while other processes may wait.
const MAX_LOCAL_HANDOFF: Duration = Duration::from_millis(100);

/// The interval at which a holder's name is stored again. The store keeps it for twice as long.
const NAME_INTERVAL: Duration = Duration::from_secs(300);

/// A lease as the store knows it: one token, one expiry. Successive holders of this process may share it by handoff, each with
/// its own fence.
pub(super) struct Grant {
    lock: LockKey,
    token: Token,
    ttl: Duration,
    // The longest duration of a store call, except of calls that wait for replicas.
    call_timeout: Duration,
    replicas: Replicas,
    // Until when an earlier attempt of this token may still be executed.
    in_flight_until: Option<Instant>,
    state: Mutex<GrantState>,
    changed: Notify,
}

struct GrantState {
    since: Instant,
    // The lease is good until then. Counted from before the command that granted it was sent.
    deadline: Instant,
    // When the lease ends in the store at the latest, without the pending renewal.
    expires: Instant,
    // When the pending renewal was sent, if there is one.
    renewal_sent: Option<Instant>,
    renew_at: Instant,
    // End of the holder's `max_hold`.
    ends: Option<Instant>,
    lost: Option<LossReason>,
    // Whether the loss was logged and counted.
    is_loss_recorded: bool,
    // Failed renewals since the last success.
    failures: u32,
    fence: u64,
    fences_left: u32,
    // Whether no caller has held it yet.
    is_first: bool,
    // When the holder's name was last stored.
    named: Option<Instant>,
    // Whether a waiter has sent the holder a release request.
    is_release_requested: bool,
    // Whether the store has released it.
    is_released: bool,
}

impl Grant {
    /// A lease granted to a command that was sent at `sent`.
    pub(super) fn new(
        lock: LockKey,
        claim: &Claim,
        call_timeout: Duration,
        in_flight_until: Option<Instant>,
        sent: Instant,
        fence: u64,
    ) -> Self {
        let Claim { token, ttl, fences, replicas, .. } = *claim;
        let state = GrantState {
            since: sent,
            deadline: sent + safe_ttl(ttl),
            expires: sent + ttl,
            renewal_sent: None,
            renew_at: sent + ttl / 3,
            ends: None,
            lost: None,
            is_loss_recorded: false,
            failures: 0,
            fence,
            fences_left: fences,
            is_first: true,
            named: None,
            is_release_requested: false,
            is_released: false,
        };
        Self {
            lock,
            token,
            ttl,
            call_timeout,
            replicas,
            in_flight_until,
            state: Mutex::new(state),
            changed: Notify::new(),
        }
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

    pub(super) const fn call_timeout(&self) -> Duration {
        self.call_timeout
    }

    /// The longest duration of a renewal sent at `now`.
    pub(super) fn renewal_timeout(&self, now: Instant) -> Duration {
        let call_timeout = self.replicas.call_timeout(self.call_timeout);
        self.valid_until(now).map_or(Duration::ZERO, |until| until - now).min(call_timeout)
    }

    /// Until when an earlier attempt with this token may still be executed; `None` if that time has passed.
    pub(super) fn in_flight_until(&self, now: Instant) -> Option<Instant> {
        self.in_flight_until.filter(|in_flight_until| now < *in_flight_until)
    }

    /// Hands the lease off to a new holder and returns its fence, if enough time and fences are left. The previous holder must have
    /// released it.
    pub(super) fn hand_off(&self, max_hold: Option<Duration>, now: Instant) -> Option<u64> {
        let mut state = self.state();
        let is_fresh = state.failures == 0 && state.valid_until(now).is_ok_and(|until| until - now >= self.ttl / 2);
        let can_hand_off = is_fresh && state.fences_left > 0 && now - state.since < MAX_LOCAL_HANDOFF;
        // The first holder gets the grant even if little time is left.
        if !std::mem::take(&mut state.is_first) && !can_hand_off {
            return None;
        }
        state.ends = max_hold.map(|max_hold| after(now, max_hold));
        state.is_release_requested = false;
        let fence = state.fence;
        state.fence += 1;
        state.fences_left -= 1;
        Some(fence)
    }

    /// Until when the lease is valid, or how it was lost. A loss is final.
    pub(super) fn valid_until(&self, now: Instant) -> Result<Instant, LossReason> {
        self.state().valid_until(now)
    }

    /// How the lease was lost, if no caller has recorded that before.
    pub(super) fn record_loss(&self, now: Instant) -> Option<LossReason> {
        let mut state = self.state();
        let reason = state.valid_until(now).err()?;
        (!std::mem::replace(&mut state.is_loss_recorded, true)).then_some(reason)
    }

    /// How the lease was lost, once that was [recorded](Self::record_loss).
    pub(super) fn recorded_loss(&self) -> Option<LossReason> {
        let state = self.state();
        state.lost.filter(|_| state.is_loss_recorded)
    }

    /// Records that the store no longer had the lease when it was released. Returns whether that is a loss. After the deadline it is none,
    /// because the lease may have expired.
    pub(super) fn record_unknown(&self, now: Instant) -> bool {
        let mut state = self.state();
        let is_loss = !state.is_loss_recorded && now < state.deadline;
        if is_loss {
            state.lost = Some(LossReason::Taken);
        }
        is_loss
    }

    /// Whether the last renewal failed.
    pub(super) fn is_suspended(&self) -> bool {
        self.state().failures > 0
    }

    /// When the lease ends in the store, unless it is renewed.
    pub(super) fn expires(&self) -> Instant {
        let state = self.state();
        state.renewal_sent.map_or(state.expires, |sent| state.expires.max(sent + self.ttl))
    }

    /// How much earlier a lease ends for its holder than in the store.
    pub(super) fn margin(&self) -> Duration {
        self.ttl - safe_ttl(self.ttl)
    }

    /// When to renew the lease, and when to check it, which may be earlier.
    pub(super) fn due(&self) -> (Instant, Instant) {
        let state = self.state();
        let ends = state.ends.unwrap_or(state.deadline);
        (state.renew_at, state.renew_at.min(state.deadline).min(ends))
    }

    /// Records that a renewal was sent.
    pub(super) fn record_renewal_sent(&self, sent: Instant) {
        self.state().renewal_sent = Some(sent);
    }

    /// Records a renewal that was sent at `sent`. A lost lease stays lost.
    pub(super) fn record_renewal(&self, sent: Instant, now: Instant) {
        let mut state = self.state();
        state.renewal_sent = None;
        state.expires = state.expires.max(sent + self.ttl);
        if state.valid_until(now).is_ok() {
            state.failures = 0;
            state.deadline = state.deadline.max(sent + safe_ttl(self.ttl));
            state.renew_at = sent + self.ttl / 3;
        }
    }

    /// Records a renewal that the store refused or did not answer. `pause` returns the pause after a number of failures.
    pub(super) fn record_failed_renewal(&self, now: Instant, is_refused: bool, pause: impl FnOnce(u32) -> Duration) {
        let mut state = self.state();
        state.renewal_sent = None;
        if !is_refused {
            state.expires = state.expires.max(now + self.ttl);
        }
        state.failures = state.failures.saturating_add(1);
        state.renew_at = now + pause(state.failures);
    }

    /// Whether to store the holder's name at `now`, for the first time or again. If so, it counts as stored.
    pub(super) fn take_name_due(&self, now: Instant) -> bool {
        let mut state = self.state();
        let is_due = state.named.is_none_or(|named| now - named >= NAME_INTERVAL);
        if is_due {
            state.named = Some(now);
        }
        is_due
    }

    /// Records that storing the name failed, so that it is stored again.
    pub(super) fn record_name_failure(&self) {
        self.state().named = None;
    }

    /// Notifies the holder of a release request.
    pub(super) fn request_release(&self) {
        self.state().is_release_requested = true;
        self.changed.notify_waiters();
    }

    /// Waits for a release request from this process or through the store.
    pub(super) async fn release_requested(&self, store: Arc<dyn DynStore>) {
        let by_others = async {
            let mut notifications = store.watch_release_requests(self.lock).await;
            notifications.next().await;
        };
        let mut by_others = pin!(by_others);
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.state().is_release_requested {
                return;
            }
            tokio::select! {
                () = changed => {}
                () = &mut by_others => return self.request_release(),
            }
        }
    }

    /// Records that the store no longer has the lease of this token.
    pub(super) fn record_taken(&self) {
        self.state().lost.get_or_insert(LossReason::Taken);
        self.changed.notify_waiters();
    }

    /// Records that the store has released it.
    pub(super) fn record_released(&self) {
        self.state().is_released = true;
        self.changed.notify_waiters();
    }

    /// Waits until the store has released the lease, or until `at`. Returns whether it was released.
    pub(super) async fn released_before(&self, at: Instant) -> bool {
        let wait_until = || match self.state().is_released {
            false if Instant::now() < at => Ok(at),
            is_released => Err(is_released),
        };
        self.until_err(wait_until).await
    }

    /// Wakes callers that wait for the end of the lease.
    pub(super) fn notify_waiters(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until the lease is lost. Reads only the local clock, so it needs no reply.
    pub(super) async fn lost(&self) -> LossReason {
        self.until_err(|| self.valid_until(Instant::now())).await
    }

    /// Waits until `wait_until` returns an error. Calls it after each change, and at the last returned instant.
    pub(super) async fn until_err<E>(&self, wait_until: impl Fn() -> Result<Instant, E>) -> E {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let until = match wait_until() {
                Ok(until) => until,
                Err(reason) => return reason,
            };
            tokio::select! {
                () = changed => {}
                () = sleep_until(until) => {}
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, GrantState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GrantState {
    fn valid_until(&mut self, now: Instant) -> Result<Instant, LossReason> {
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

// Each acquisition has its own token.
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

/// How long a holder may rely on a lease. Shorter than the TTL in the store, because the clock of the store may run faster.
pub(super) fn safe_ttl(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))
}

/// A bound that keeps additions to an instant from overflowing.
const FAR: Duration = Duration::from_secs(86_400 * 365 * 30);

pub(super) fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(FAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(ttl_ms: u64) -> Grant {
        let ttl = Duration::from_millis(ttl_ms);
        let claim = Claim { fences: FENCES, ..Claim::new(Token::random().unwrap(), ttl) };
        Grant::new(LockKey::new("test", "a"), &claim, Duration::from_millis(100), None, Instant::now(), 100)
    }

    #[tokio::test(start_paused = true)]
    async fn lease_ends_for_its_holder_before_it_ends_in_the_store() {
        for ttl_ms in [10, 100, 30_000, 86_400_000] {
            let grant = grant(ttl_ms);
            let until = grant.valid_until(Instant::now()).unwrap();
            assert!(until + Duration::from_millis(2) <= grant.expires());
            assert!(until > Instant::now());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn loss_is_final() {
        let grant = grant(1_000);
        tokio::time::advance(safe_ttl(grant.ttl())).await;
        let now = Instant::now();
        assert_eq!(grant.valid_until(now), Err(LossReason::Expired));
        grant.record_renewal(now, now);
        assert_eq!(grant.valid_until(now), Err(LossReason::Expired));
        assert_eq!(grant.hand_off(None, now).and(grant.hand_off(None, now)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn renewal_counts_from_when_it_was_sent() {
        let grant = grant(1_000);
        let sent = Instant::now() + Duration::from_millis(100);
        grant.record_renewal(sent, sent + Duration::from_millis(500));
        assert_eq!(grant.valid_until(sent), Ok(sent + safe_ttl(grant.ttl())));
        // A late reply does not revoke a newer one.
        grant.record_renewal(sent - Duration::from_millis(50), sent + Duration::from_millis(500));
        assert_eq!(grant.valid_until(sent), Ok(sent + safe_ttl(grant.ttl())));
    }

    #[tokio::test(start_paused = true)]
    async fn handoffs_have_rising_fences_and_end_in_time() {
        let grant = grant(30_000);
        let now = Instant::now();
        let fences: Vec<_> = std::iter::from_fn(|| grant.hand_off(None, now)).collect();
        assert_eq!(fences, (100..100 + u64::from(FENCES)).collect::<Vec<_>>());

        let grant = self::grant(30_000);
        assert_eq!(grant.hand_off(None, now), Some(100));
        assert_eq!(grant.hand_off(None, now + MAX_LOCAL_HANDOFF), None);

        let grant = self::grant(100);
        assert_eq!(grant.hand_off(None, now), Some(100));
        assert_eq!(grant.hand_off(None, now + Duration::from_millis(60)), None, "not enough of it is left");
    }

    #[tokio::test(start_paused = true)]
    async fn lease_is_lost_after_max_hold() {
        let grant = grant(30_000);
        let now = Instant::now();
        grant.hand_off(Some(Duration::from_secs(2)), now);
        let lost = grant.lost().await;
        assert_eq!((lost, now.elapsed()), (LossReason::MaxHold, Duration::from_secs(2)));
    }
}
