use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::decision::{Decision, Receipt};
use super::evaluate::{count_allowed, note};
use super::handle::Adjustment;
use super::metrics::{Meters, Verdict};
use super::policy::Policy;
use super::store::{Charged, RateLimitStore};
use crate::error::{ConfigError, StoreError};
use crate::key::Key;
use crate::lock::Reach;
use crate::store::circuit::{Circuit, CircuitBreaker};
use crate::store::deadline::{Deadline, require_nonzero_deadline};

/// How long a decision may take unless told otherwise.
pub(super) const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);

/// Asks a backend about keys, without any tower service: for jobs, sockets and everything else that is not a request.
///
/// ```
/// use tollgate::{Limiter, MemoryBackend, Policy, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
/// let mails = Limiter::new(MemoryBackend::new(), Policy::new("mails", Quota::per_hour(2).fixed_window()));
///
/// assert!(mails.check("alice").await?.is_allowed());
/// assert!(mails.check("alice").await?.is_allowed());
/// assert!(!mails.check("alice").await?.is_allowed());
/// assert!(mails.check("bob").await?.is_allowed());
///
/// mails.reset("alice").await?;
/// assert_eq!(mails.peek("alice").await?.remaining(), Some(2));
/// # Ok(())
/// # }
/// ```
///
/// Clones share all counts, since those lie in the backend.
///
/// # Trying a limit
///
/// Where the policy is not [enforced](super::Mode) for a key, all that charges it says yes, also over the limit, and [`acquire`](Limiter::acquire) does not wait. How the store
/// has decided shows in the decision all the same: what was over a limit has no [receipt](Decision::receipt), since it was not charged, and a limit that
/// [is violated](super::LimitStatus::is_violated). [`peek`](Limiter::peek) says what the store says. The [metrics](super#metrics) and the log tell it as
/// they do for a layer.
///
/// ```
/// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
/// let trial = Limiter::new(MemoryBackend::new(), Policy::new("trial", Quota::per_hour(1).fixed_window()).shadow());
/// assert!(trial.try_acquire("alice").await?);
/// let decision = trial.check("alice").await?;
/// assert!(decision.is_allowed() && decision.receipt().is_none());
/// assert!(decision.limits()[0].is_violated());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// Every method answers a [`StoreError`] when the backend fails or takes longer than the
/// [deadline](Limiter::deadline). What to do then is the caller's choice. A backend that fails again and again
/// can be [left alone](Limiter::circuit_breaker) but for a probe now and then, so that the error comes at once.
///
/// # Cancellation
///
/// Dropping the future of [`check`](Limiter::check) or [`try_acquire`](Limiter::try_acquire) may or may not have charged.
#[derive(Clone, Debug)]
pub struct Limiter<B> {
    store: B,
    policy: Policy,
    deadline: Duration,
    circuit: Arc<Circuit>,
}

impl<B> Limiter<B> {
    /// A limiter that enforces `policy` with what `store` counts.
    pub fn new(store: B, policy: Policy) -> Self {
        let circuit = Arc::new(Circuit::new(CircuitBreaker::off()));
        Self { store, policy, deadline: DEFAULT_DEADLINE, circuit }
    }

    /// How long a call may take in total, waiting for a connection included. Defaults to 100 ms.
    ///
    /// With zero only those that charge a key are answered, by a store that knows at once, as memory does, and what no store is needed for. All other
    /// questions fail, and the store is not asked, whichever it is: the [`StoreError`] has a [`ConfigError::ZeroTimeout`] as its source.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
    /// let policy = Policy::new("mails", Quota::per_hour(2).fixed_window());
    /// let at_once = Limiter::new(MemoryBackend::new(), policy).deadline(Duration::ZERO);
    /// assert!(at_once.check("alice").await?.is_allowed());
    /// assert!(at_once.peek("alice").await.is_err() && at_once.reset("alice").await.is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// When the limiter and its clones stop to ask a store that fails, and how soon they try again. Defaults to [`CircuitBreaker::off`]: there is nothing that
    /// decides in the place of the store, so a connection that breaks with many calls on it should not cost those that come behind.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::rate_limit::CircuitBreaker;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # let (backend, policy) = (MemoryBackend::new(), Policy::new("mails", Quota::per_hour(2).fixed_window()));
    /// // Where each call that waits for the deadline is one too many.
    /// let limiter = Limiter::new(backend, policy).circuit_breaker(CircuitBreaker::new().probe_interval(Duration::from_millis(50)));
    /// # drop(limiter);
    /// ```
    #[must_use]
    pub fn circuit_breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.circuit = Arc::new(Circuit::new(breaker));
        self
    }

    /// The store that counts.
    pub const fn store(&self) -> &B {
        &self.store
    }

    /// The policy that is enforced.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }
}

impl<B: RateLimitStore> Limiter<B> {
    /// Makes sure that quotas hold as far as they are meant to, so that the memory backend is not taken for a distributed one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if they hold among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        self.store.scope().require(scope)?;
        Ok(self)
    }

    /// Charges one unit to `key` if it fits.
    pub fn check(&self, key: impl Into<Key>) -> impl Future<Output = Result<Decision, StoreError>> {
        self.check_cost(key, 1)
    }

    /// Charges `cost` units to `key` if all of them fit, and none otherwise.
    ///
    /// A cost of 0 is always admitted and charges nothing, unless the quota is 0 or the key is [blocked](Self::block). A cost above the quota can never be
    /// admitted and gives [`Outcome::Never`](super::Outcome::Never).
    pub async fn check_cost(&self, key: impl Into<Key>, cost: u32) -> Result<Decision, StoreError> {
        let key = key.into();
        let decision = if self.policy.rules_out(cost) {
            self.policy.rule_out(cost)
        } else {
            self.store.check_now(&self.policy, &key, cost)
        };
        let decision = match decision {
            Some(decision) => decision,
            // Boxed, so that there is no room for it in the future of a check that waits for nothing.
            None => {
                let asked = Box::pin(self.ask(Box::pin(self.store.check(&self.policy, &key, cost)))).await;
                asked.inspect_err(|_| self.policy.meters().decided(Verdict::FailedClosed))?
            }
        };
        if !decision.is_allowed() {
            return Ok(self.denied(&key, cost, decision));
        }
        note(&self.policy, &decision, true, false, cost);
        Ok(decision)
    }

    /// Apart, so that there is no room for it in the future of a check.
    #[cold]
    fn denied(&self, key: &Key, cost: u32, decision: Decision) -> Decision {
        let enforced = self.policy.is_enforced_for(key);
        note(&self.policy, &decision, enforced, false, cost);
        if enforced { decision } else { decision.let_pass() }
    }

    /// Charges one unit to `key` if it fits, and answers whether it did: [`check`](Self::check) for those who do not want to know how things
    /// stand. The memory backend need not work that out then for a key that it knows and admits, by a policy of one limit that is no sliding
    /// log; a no costs it more than `check`. Redis answers both alike.
    ///
    /// ```
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
    /// let mails = Limiter::new(MemoryBackend::new(), Policy::new("mails", Quota::per_hour(1).fixed_window()));
    /// assert!(mails.try_acquire("alice").await?);
    /// assert!(!mails.try_acquire("alice").await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_acquire(&self, key: impl Into<Key>) -> Result<bool, StoreError> {
        let key = key.into();
        if !self.policy.rules_out(1)
            && let Some(Charged { is_near_limit }) = self.store.charge_now(&self.policy, &key, 1)
        {
            count_allowed(&self.policy, Verdict::Allowed, is_near_limit);
            return Ok(true);
        }
        Ok(self.check(key).await?.is_allowed())
    }

    /// Charges one unit to `key` as soon as it fits, if that is within `wait`: for calls to somebody else's API, say, which should come later
    /// rather than not at all.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
    /// let calls = Limiter::new(MemoryBackend::new(), Policy::new("calls", Quota::per_second(10).burst(1).unwrap().token_bucket()));
    /// for _ in 0..50 {
    ///     assert!(calls.acquire("their-api", Duration::from_secs(1)).await?.is_allowed());
    ///     // At least 100 ms after the one before, in all processes together.
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Nobody waits in vain: a denial that lasts longer than what is left of `wait` is answered at once. Those who wait are in no order,
    /// and each of them asks again when it was told to, also if there is room before because something was given back or reset: where thousands would wait for one key, have a few of them do so at a time. The
    /// [deadline](Self::deadline) is that of each question. So `Ok` may well be a denial: ask it whether it [is allowed](Decision::is_allowed).
    ///
    /// # Errors
    ///
    /// What the store says; nothing is tried again then.
    ///
    /// # Cancellation
    ///
    /// While it waits nothing is charged, and nothing is left behind.
    pub async fn acquire(&self, key: impl Into<Key>, wait: Duration) -> Result<Decision, StoreError> {
        self.acquire_cost(key, 1, wait).await
    }

    /// The same for `cost` units, all of them at once.
    pub async fn acquire_cost(&self, key: impl Into<Key>, cost: u32, wait: Duration) -> Result<Decision, StoreError> {
        let (key, begun) = (key.into(), Instant::now());
        loop {
            let decision = self.check_cost(key, cost).await?;
            match decision.retry_after() {
                Some(pause) if begun.elapsed().saturating_add(pause) <= wait => sleep(pause).await,
                _ => return Ok(decision),
            }
        }
    }

    /// Says how `key` stands and whether one unit would fit, without charging.
    pub async fn peek(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        if let Some(decision) = self.policy.rule_out(1) {
            return Ok(decision);
        }
        let key = key.into();
        self.ask(self.store.peek(&self.policy, &key, 1)).await
    }

    /// Corrects a charge: adds `change` units, or gives them back if it is negative, as far as they still count. See
    /// [`RateLimitStore::settle`].
    ///
    /// ```
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
    /// let tokens = Limiter::new(MemoryBackend::new(), Policy::new("tokens", Quota::per_hour(1_000).token_bucket()));
    ///
    /// let estimate = tokens.check_cost("alice", 400).await?;
    /// let used = 150; // It was not that much after all.
    /// if let Some(receipt) = estimate.receipt() {
    ///     tokens.settle("alice", receipt, used - 400).await?;
    /// }
    /// assert_eq!(tokens.peek("alice").await?.remaining(), Some(850));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn settle(&self, key: impl Into<Key>, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        let key = key.into();
        let correction = Adjustment::new(self.policy.clone(), change, None);
        let settled = self.ask(self.store.settle(&self.policy, &key, receipt, change)).await;
        correction.end(settled.clone());
        settled
    }

    /// Denies everything to `key` for the time given, as a penalty for instance; a time of zero lifts the block. What was
    /// counted stays, and goes on to run out. The store keeps the time: where its clock is set back, the block lasts longer by as much.
    ///
    /// Where the policy is not [enforced](super::Mode) for the key, in shadow or outside of its percentage, a block turns nobody away either: it is
    /// seen in [`peek`](Self::peek), in metrics and in the log.
    ///
    /// A key that means another client than the one of a layer is not refused, so take the same: what the layer's own
    /// [`extract_key`](crate::ExtractKey::extract_key) makes of a request, or [`RateLimitHandle::key`](super::RateLimitHandle::key) inside of a
    /// handler. By hand: `tollgate::http::header` takes the [digest](Key::digest) of the value, addresses of IPv6 stand for their /64, and what
    /// was found by a fallback is [marked](Key::as_fallback).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Key, Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
    /// // The layer has .key(header("x-api-key").or(peer_ip())).
    /// # let (backend, policy) = (MemoryBackend::new(), Policy::new("api", Quota::per_minute(100).fixed_window()));
    /// let limiter = Limiter::new(backend, policy);
    /// limiter.block(Key::digest("the-api-key"), Duration::from_secs(3_600)).await?;
    /// limiter.block(Key::from("203.0.113.7").as_fallback(), Duration::from_secs(3_600)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn block(&self, key: impl Into<Key>, time: Duration) -> Result<(), StoreError> {
        let key = key.into();
        self.ask(self.store.block(&self.policy, &key, time)).await
    }

    /// Forgets what was counted for `key`, which then has its whole quota and is not blocked.
    pub async fn reset(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let key = key.into();
        self.ask(self.store.reset(&self.policy, &key)).await
    }

    /// Asks the store, if the circuit lets us, for as long as it may take.
    async fn ask<T>(&self, question: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        require_nonzero_deadline(self.deadline)?;
        self.circuit.admit()?;
        let mut question = pin!(Deadline::new(question, self.deadline));
        // What is answered at once takes no look at the clock.
        let mut begun = None;
        let answer = poll_fn(|cx| {
            let answer = question.as_mut().poll(cx);
            if Meters::COUNT && answer.is_pending() {
                begun.get_or_insert_with(Instant::now);
            }
            answer
        })
        .await;
        if let Some(begun) = begun {
            self.policy.meters().store_answered(begun.elapsed());
        }
        match &answer {
            Ok(_) => self.circuit.answered(&self.policy),
            Err(error) => self.circuit.failed(&self.policy, error),
        }
        answer
    }
}
