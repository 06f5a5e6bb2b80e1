use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::decision::{Decision, Receipt};
use super::handle::Correction;
use super::metrics::{Metrics, Verdict};
use super::policy::Policy;
use super::record::{count_allowed, record};
use super::store::{Charged, RateLimitStore};
use crate::error::{ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::{Circuit, CircuitBreaker};
use crate::store::deadline::{DEFAULT_DEADLINE, Deadline, require_nonzero_deadline};

/// Enforces a rate limit without a tower service: for jobs, sockets and everything else that is not an HTTP request.
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
/// Clones share all counts, since the counts are in the backend.
///
/// # Trying a limit
///
/// If the policy is not [enforced](super::Mode) for a key, every call that charges it returns an allowed decision, also over the limit, and
/// [`acquire`](Limiter::acquire) does not wait. The decision still shows the result of the store. Over a limit it has no
/// [receipt](Decision::receipt), since nothing was charged. One of its limits [is violated](super::LimitStatus::is_violated).
/// [`peek`](Limiter::peek) returns the decision of the store. The [metrics](super#metrics) and the log show the result as they do for a
/// layer.
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
/// Every method returns a [`StoreError`] if the backend fails or takes longer than the [deadline](Limiter::deadline). What to do then is
/// the caller's choice. With a [circuit breaker](Limiter::circuit_breaker), calls to a backend that keeps failing return the error at once,
/// except for periodic probes.
///
/// # Cancellation
///
/// If you drop the future of [`check`](Limiter::check) or [`try_acquire`](Limiter::try_acquire), the key may or may not be charged.
#[derive(Clone, Debug)]
pub struct Limiter<B> {
    store: B,
    policy: Policy,
    deadline: Duration,
    circuit: Arc<Circuit>,
}

impl<B> Limiter<B> {
    /// Creates a limiter that enforces `policy` with the counts in `store`.
    pub fn new(store: B, policy: Policy) -> Self {
        let circuit = Arc::new(Circuit::new(CircuitBreaker::off()));
        Self { store, policy, deadline: DEFAULT_DEADLINE, circuit }
    }

    /// Sets how long a call may take in total, including the wait for a connection. Defaults to 100 ms.
    ///
    /// With zero, a check succeeds only if the store replies at once, as the memory backend does. All other calls fail without a store call,
    /// with a [`StoreError`] whose source is a [`ConfigError::ZeroTimeout`].
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

    /// Sets when the limiter and its clones stop calling a store that fails, and how soon they try again. Defaults to
    /// [`CircuitBreaker::off`], because a limiter has no fallback: an open circuit makes calls fail at once, and the failures of many calls
    /// on one broken connection are enough to open it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::rate_limit::CircuitBreaker;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # let (backend, policy) = (MemoryBackend::new(), Policy::new("mails", Quota::per_hour(2).fixed_window()));
    /// // For a service in which no call should wait for the deadline in vain.
    /// let limiter = Limiter::new(backend, policy).circuit_breaker(CircuitBreaker::new().probe_interval(Duration::from_millis(50)));
    /// # drop(limiter);
    /// ```
    #[must_use]
    pub fn circuit_breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.circuit = Arc::new(Circuit::new(breaker));
        self
    }

    /// Returns the store.
    pub const fn store(&self) -> &B {
        &self.store
    }

    /// Returns the policy.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }
}

impl<B: RateLimitStore> Limiter<B> {
    /// Fails unless the store shares its counts as widely as `needed` requires, so that the memory backend is not mistaken for a distributed
    /// one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the counts are shared less widely than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.store.reach().require(needed)?;
        Ok(self)
    }

    /// Charges one unit to `key` if there is room.
    pub fn check(&self, key: impl Into<Key>) -> impl Future<Output = Result<Decision, StoreError>> {
        self.check_cost(key, 1)
    }

    /// Charges `cost` units to `key` if there is room for all of them, and none otherwise.
    ///
    /// A cost of 0 is always allowed and charges nothing, unless the quota is 0 or the key is [blocked](Self::block). A cost above the
    /// [capacity](super::Limit::capacity) of a limit can never be allowed and returns [`Outcome::Never`](super::Outcome::Never).
    pub async fn check_cost(&self, key: impl Into<Key>, cost: u64) -> Result<Decision, StoreError> {
        let key = key.into();
        let decision = if self.policy.can_never_allow(cost) {
            self.policy.decision_if_never_allowed(cost)
        } else {
            self.store.check_now(&self.policy, &key, cost)
        };
        let decision = match decision {
            Some(decision) => decision,
            // Boxed, so that the future of a check stays small. Most checks return at once.
            None => {
                let result = Box::pin(self.call_store(Box::pin(self.store.check(&self.policy, &key, cost)))).await;
                result.inspect_err(|_| self.policy.metrics().decided(Verdict::FailedClosed))?
            }
        };
        if !decision.is_allowed() {
            return Ok(self.record_denial(&key, cost, decision));
        }
        record(&self.policy, &decision, true, false, cost);
        Ok(decision)
    }

    /// Not inlined, so that its variables do not enlarge the future of a check.
    #[cold]
    fn record_denial(&self, key: &Key, cost: u64, decision: Decision) -> Decision {
        let enforced = self.policy.is_enforced_for(key);
        record(&self.policy, &decision, enforced, false, cost);
        if enforced { decision } else { decision.into_allowed() }
    }

    /// Charges one unit to `key` if there is room, and returns whether the call is allowed. Use it instead of [`check`](Self::check) if you
    /// do not need the details of the decision. In the memory backend it is faster than `check` when it allows, and slower when it denies.
    /// With Redis both cost the same.
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
        if !self.policy.can_never_allow(1)
            && let Some(Charged { is_near_limit }) = self.store.charge_now(&self.policy, &key, 1)
        {
            count_allowed(&self.policy, Verdict::Allowed, is_near_limit);
            return Ok(true);
        }
        Ok(self.check(key).await?.is_allowed())
    }

    /// Charges one unit to `key` as soon as there is room, if that is within `wait`. Use it for calls to a third-party API, for example,
    /// which should be late rather than fail.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
    /// let calls = Limiter::new(MemoryBackend::new(), Policy::new("calls", Quota::per_second(10).burst(1).unwrap().token_bucket()));
    /// for _ in 0..50 {
    ///     assert!(calls.acquire("their-api", Duration::from_secs(1)).await?.is_allowed());
    ///     // At least 100 ms after the call before, in all processes together.
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A denial that lasts longer than the rest of `wait` is returned at once. Waiters are in no order. Each calls the store again when its
    /// denial has expired, not earlier, even if units are given back or the key is reset. If thousands would wait for one key, let only a
    /// few of them wait at a time. The [deadline](Self::deadline) applies to each call. `Ok` can be a denial: check whether the decision
    /// [is allowed](Decision::is_allowed).
    ///
    /// # Errors
    ///
    /// Store errors are returned, without a retry.
    ///
    /// # Cancellation
    ///
    /// While the call waits, nothing is charged. If you drop its future during the pause, nothing is left behind. During a store call, the
    /// key may be charged.
    pub async fn acquire(&self, key: impl Into<Key>, wait: Duration) -> Result<Decision, StoreError> {
        self.acquire_cost(key, 1, wait).await
    }

    /// Charges `cost` units, all of them at once, as [`acquire`](Self::acquire) charges one.
    pub async fn acquire_cost(&self, key: impl Into<Key>, cost: u64, wait: Duration) -> Result<Decision, StoreError> {
        let (key, start) = (key.into(), Instant::now());
        loop {
            let decision = self.check_cost(key, cost).await?;
            match decision.retry_after() {
                Some(pause) if start.elapsed().saturating_add(pause) <= wait => sleep(pause).await,
                _ => return Ok(decision),
            }
        }
    }

    /// Returns the state of `key` and whether one unit would fit, without charging.
    pub async fn peek(&self, key: impl Into<Key>) -> Result<Decision, StoreError> {
        if let Some(decision) = self.policy.decision_if_never_allowed(1) {
            return Ok(decision);
        }
        let key = key.into();
        self.call_store(self.store.peek(&self.policy, &key, 1)).await
    }

    /// Corrects a charge: adds `change` units, or gives them back if `change` is negative and the charge still counts. See
    /// [`RateLimitStore::settle`]. [`RateLimitHandle::settle`](super::RateLimitHandle::settle) takes the total, and not the change.
    ///
    /// ```
    /// # use tollgate::{Limiter, MemoryBackend, Policy, Quota};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::StoreError> {
    /// let tokens = Limiter::new(MemoryBackend::new(), Policy::new("tokens", Quota::per_hour(1_000).token_bucket()));
    ///
    /// let estimate = tokens.check_cost("alice", 400).await?;
    /// let used = 150; // Less than the estimate.
    /// if let Some(receipt) = estimate.receipt() {
    ///     tokens.settle("alice", receipt, used - 400).await?;
    /// }
    /// assert_eq!(tokens.peek("alice").await?.remaining(), Some(850));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn settle(&self, key: impl Into<Key>, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        let key = key.into();
        let correction = Correction::new(self.policy.clone(), change, None);
        let settled = self.call_store(self.store.settle(&self.policy, &key, receipt, change)).await;
        correction.end(settled.clone());
        settled
    }

    /// Denies all requests of `key` for `time`, for example as a penalty. A `time` of zero lifts the block. The counts of the key are kept
    /// and expire as usual. The block ends by the clock of the store: if that clock is set back, the block lasts longer by as much.
    ///
    /// If the policy is not [enforced](super::Mode) for the key (it is in shadow mode, or the key is outside of the enforced percentage), a
    /// block rejects no request either. It appears in [`peek`](Self::peek), in metrics and in the log.
    ///
    /// If `key` differs from the key that a layer uses for the client, there is no error and no effect on the layer. Use the same key: the
    /// result of the layer's own [`extract_key`](crate::ExtractKey::extract_key), or [`RateLimitHandle::key`](super::RateLimitHandle::key)
    /// in a handler. To build it yourself: `tollgate::http::header` uses the [digest](Key::digest) of the value, an IPv6 address is reduced
    /// to its /64, and a key from a fallback is [marked](Key::as_fallback).
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
        self.call_store(self.store.block(&self.policy, &key, time)).await
    }

    /// Removes the counts of `key` and lifts its block. The key has its whole quota again.
    pub async fn reset(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let key = key.into();
        self.call_store(self.store.reset(&self.policy, &key)).await
    }

    /// Calls the store within the deadline, if the circuit allows it.
    async fn call_store<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        require_nonzero_deadline(self.deadline)?;
        self.circuit.admit()?;
        let mut call = pin!(Deadline::new(call, self.deadline));
        // A call that returns at once does not read the clock.
        let mut start = None;
        let result = poll_fn(|cx| {
            let result = call.as_mut().poll(cx);
            if Metrics::ENABLED && result.is_pending() {
                start.get_or_insert_with(Instant::now);
            }
            result
        })
        .await;
        if let Some(start) = start {
            self.policy.metrics().record_call_time(start.elapsed());
        }
        self.circuit.record(&self.policy, &result);
        result
    }
}
