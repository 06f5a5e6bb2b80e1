//! For people who write a backend: what rate limits need from a store.

use std::future::Future;
use std::mem;
use std::time::Duration;

use super::decision::{Decision, Receipt};
use super::policy::Policy;
use super::quota::Quota;
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

/// The operations that rate limiting needs from a backend. Each decision is atomic.
///
/// A store is called only with costs that can be allowed at all: each limit has a capacity of at least 1 and at least the cost. [`Limiter`]
/// and the layer decide about other costs themselves. Every backend passes the same contract tests. To test your own backend, use
/// `tollgate::testing` (feature `testing`).
///
/// # Cancellation
///
/// If a returned future is dropped, its operation may or may not be done.
///
/// [`Limiter`]: super::Limiter
pub trait RateLimitStore {
    /// Charges `cost` units to all limits if all of them have room, and to none otherwise. Returns the state of the limits. A cost of 0
    /// charges nothing.
    fn check(&self, policy: &Policy, key: &Key, cost: u64)
    -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// As [`check`](Self::check), for a store that can answer immediately. Returns `None`, with nothing charged, if it cannot. Saves a
    /// future, a timer and the deadline. Defaults to `None`.
    fn check_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        let _ = (policy, key, cost);
        None
    }

    /// Charges `cost` units if it is known immediately that all limits have room. The cost is never 0. `None`, with nothing charged, does
    /// not mean a denial: call [`check_now`](Self::check_now) then.
    ///
    /// For callers that need no details of an allowed decision, which makes it cheaper. Optional; defaults to `None`.
    fn charge_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Charged> {
        let _ = (policy, key, cost);
        None
    }

    /// Charges several keys, each by its own policy, if all of them have room, and none otherwise. Returns the decisions in the order of
    /// `requests`. If one is a denial, each other decision tells whether its own policy has room. A decision that was not evaluated has no
    /// limits. A key that occurs twice is charged twice.
    ///
    /// A store should do this atomically. This default implementation cannot: it charges one key after the other, and gives the charges
    /// back if one is denied or fails. Meanwhile, other requests may be denied for units that are given back a moment later. A charge that
    /// cannot be given back stays. If the call is dropped, for example at a deadline, this implementation gives nothing back. With a Redis
    /// Cluster, the backend then gives the charges back in the background. Only the charge of the call in flight can stay, since its result
    /// is unknown. Neither implementation admits a request beyond a limit.
    fn check_all(&self, requests: &[Request]) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send
    where
        Self: Sync,
    {
        one_after_the_other(self, requests, |charges| refund_charges(self, charges))
    }

    /// As [`check_all`](Self::check_all), for a store that can answer immediately. Returns `None`, with nothing charged, if it cannot.
    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        let _ = requests;
        None
    }

    /// Returns whether [`check`](Self::check) would allow this cost, and the state of the limits, without charging. At most, it adapts the
    /// stored counts if the clock of the store was set back.
    fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Corrects a charge: adds `change` units, or gives them back if `change` is negative.
    ///
    /// Added units count from now on. They are charged even if they do not fit, but the debt of a key is at most a whole quota. Give back
    /// at most the units of the charge: a store need not check this. Limits in which the charge no longer counts are left unchanged, so no
    /// unit is given back into another window. A token bucket gives back only tokens that were missing after the charge and have not been
    /// refilled since.
    ///
    /// The key may have been counted with other numbers than those of `policy`, which may be an older and smaller quota: see
    /// [`QuotaChange`](super::QuotaChange). A refund always uses the stored numbers. Added units use the stored numbers if those of
    /// `policy` would cut or remove counts. A receipt of the instant 0 belongs to no charge: its units always count with the numbers of
    /// `policy`.
    fn settle(
        &self,
        policy: &Policy,
        key: &Key,
        receipt: Receipt,
        change: i64,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Denies every request of this key for `time`, whatever its limits say. A `time` of zero lifts the block. The counts stay. Policies
    /// that are [counted separately](super::QuotaChange) are blocked separately.
    fn block(&self, policy: &Policy, key: &Key, time: Duration) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes the counts of this key, and lifts a block. An unknown key is not an error.
    fn reset(&self, policy: &Policy, key: &Key) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Returns how widely the counts are shared. Defaults to this process.
    fn reach(&self) -> Reach {
        Reach::Process
    }

    /// Adds work to the shutdown of the backend. The shutdown closes this work and waits until it ends: see
    /// [`backend`](crate::backend#shutdown). A store that wraps another one has to pass the call on. Defaults to nothing, for a store
    /// without a shutdown.
    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        let _ = target;
    }
}

/// An allowed decision without details: see [`RateLimitStore::charge_now`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Charged {
    /// Whether less than a fifth of a limit is left.
    pub is_near_limit: bool,
}

impl Charged {
    /// Creates the result, for stores. `is_near_limit` is true if less than a fifth of a limit is left.
    #[must_use]
    pub const fn new(is_near_limit: bool) -> Self {
        Self { is_near_limit }
    }
}

/// One key of a decision about several: see [`RateLimitStore::check_all`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The policy that counts.
    pub policy: Policy,
    /// The key under which it counts.
    pub key: Key,
    /// The cost in units.
    pub cost: u64,
}

/// Units as the `change` of [`RateLimitStore::settle`]. No charge is larger than [`Quota::MAX_UNITS`].
pub(crate) const fn as_change(units: u64) -> i64 {
    if units < Quota::MAX_UNITS { units as i64 } else { Quota::MAX_UNITS as i64 }
}

/// A charge made during a decision about several keys.
#[derive(Clone, Debug)]
pub(crate) struct Charge {
    request: Request,
    receipt: Receipt,
}

/// Charges several keys with one call for each. If one of them is denied or fails, it awaits `refund` with the earlier charges. If the
/// future is dropped, `refund` is called and its future is dropped at once.
pub(crate) async fn one_after_the_other<S, G, F>(
    store: &S,
    requests: &[Request],
    refund: G,
) -> Result<Vec<Decision>, StoreError>
where
    S: RateLimitStore + ?Sized + Sync,
    G: FnMut(Vec<Charge>) -> F,
    F: Future<Output = Result<(), StoreError>>,
{
    let mut guard = RefundGuard { charges: Vec::with_capacity(requests.len()), refund };
    let mut decisions: Vec<Decision> = Vec::with_capacity(requests.len());
    let mut denied = false;
    for request in requests {
        let Request { policy, key, cost } = request;
        let decision =
            if denied { store.peek(policy, key, *cost).await } else { store.check(policy, key, *cost).await };
        match &decision {
            Ok(decision) if decision.is_allowed() && !denied => {
                guard.charges.extend(decision.receipt().map(|receipt| Charge { request: request.clone(), receipt }));
            }
            _ if !denied => {
                denied = true;
                let refunded = guard.refund().await;
                // If the charge failed, return its own error, which is the cause, and not that of the refund.
                if decision.is_ok() {
                    refunded?;
                }
                for decision in &mut decisions {
                    decision.take_receipt();
                }
            }
            _ => {}
        }
        decisions.push(decision?);
    }
    guard.charges.clear();
    Ok(decisions)
}

/// Charges that are given back on drop unless they are confirmed.
struct RefundGuard<G: FnMut(Vec<Charge>) -> F, F> {
    charges: Vec<Charge>,
    refund: G,
}

impl<G: FnMut(Vec<Charge>) -> F, F> RefundGuard<G, F> {
    fn refund(&mut self) -> F {
        (self.refund)(mem::take(&mut self.charges))
    }
}

impl<G: FnMut(Vec<Charge>) -> F, F> Drop for RefundGuard<G, F> {
    fn drop(&mut self) {
        if !self.charges.is_empty() {
            drop(self.refund());
        }
    }
}

/// Gives all charges back as far as possible, and returns the first error.
pub(crate) async fn refund_charges<S>(store: &S, charges: Vec<Charge>) -> Result<(), StoreError>
where
    S: RateLimitStore + ?Sized + Sync,
{
    let mut result = Ok(());
    for Charge { request: Request { policy, key, cost }, receipt } in charges {
        let refunded = store.settle(&policy, &key, receipt, -as_change(cost)).await;
        result = result.and(refunded);
    }
    result
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::MemoryBackend;
    use crate::rate_limit::Quota;

    /// A store without an atomic decision about several keys. Its checks fail for the policy `fails`, and hang for the policy `hangs`.
    struct Plain {
        memory: MemoryBackend,
        settles: bool,
    }

    impl RateLimitStore for Plain {
        async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
            match policy.name() {
                "hangs" => pending().await,
                "fails" => Err(StoreError::unavailable("it fails")),
                _ => self.memory.check(policy, key, cost).await,
            }
        }

        async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
            self.memory.peek(policy, key, cost).await
        }

        async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
            // The refund of the first charge fails; the others must be tried all the same.
            if !self.settles && policy.name() == "a" {
                return Err(StoreError::timeout());
            }
            self.memory.settle(policy, key, receipt, change).await
        }

        async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
            self.memory.block(policy, key, time).await
        }

        async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
            self.memory.reset(policy, key).await
        }
    }

    impl Plain {
        fn new(settles: bool) -> Self {
            Self { memory: MemoryBackend::new(), settles }
        }

        /// The units left in the policies `a` and `b`, which have 5.
        async fn left(&self) -> [Option<u64>; 2] {
            let [a, b, ..] = requests("c").map(|request| request.policy);
            let left = async |policy| self.memory.peek(policy, &Key::GLOBAL, 1).await.unwrap().remaining();
            [left(&a).await, left(&b).await]
        }
    }

    fn requests(last: &str) -> [Request; 3] {
        ["a", "b", last].map(|name| {
            let limit = if name == "full" { 0 } else { 5 };
            let policy = Policy::new(name, Quota::per_hour(limit).fixed_window());
            Request { policy, key: Key::GLOBAL, cost: 1 }
        })
    }

    #[tokio::test]
    async fn check_all_refunds_on_failure_and_denial() {
        let store = Plain::new(true);
        let error = store.check_all(&requests("fails")).await.unwrap_err();
        assert!(error.is_unavailable());
        assert_eq!(store.left().await, [Some(5), Some(5)]);
        let decisions = store.check_all(&requests("full")).await.unwrap();
        assert_eq!(decisions.iter().map(Decision::is_allowed).collect::<Vec<_>>(), [true, true, false]);
        assert!(decisions.iter().all(|decision| decision.receipt().is_none()), "nothing was charged in the end");
        assert_eq!(store.left().await, [Some(5), Some(5)]);
        assert!(store.check_all(&requests("c")).await.unwrap().iter().all(Decision::is_allowed));
        assert_eq!(store.left().await, [Some(4), Some(4)]);
    }

    #[tokio::test]
    async fn failed_refund_does_not_stop_other_refunds() {
        for (last, is_timeout) in [("full", true), ("fails", false)] {
            let store = Plain::new(false);
            let error = store.check_all(&requests(last)).await.unwrap_err();
            assert_eq!(
                (error.is_timeout(), error.is_unavailable()),
                (is_timeout, !is_timeout),
                "the first failure is returned"
            );
            assert_eq!(store.left().await, [Some(4), Some(5)]);
        }
    }

    #[tokio::test]
    async fn dropped_check_all_hands_over_its_charges() {
        for (last, handed_over) in [("hangs", 2), ("c", 0), ("fails", 2)] {
            let (store, mut calls) = (Plain::new(true), Vec::new());
            let requests = requests(last);
            let mut call = Box::pin(one_after_the_other(&store, &requests, |charges| {
                calls.push(charges.len());
                ready(Ok(()))
            }));
            let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(matches!(polled, Poll::Pending), last == "hangs");
            drop(call);
            assert_eq!(calls.iter().sum::<usize>(), handed_over, "{last}");
        }
    }
}
