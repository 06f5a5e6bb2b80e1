use std::future::Future;
use std::mem;
use std::time::Duration;

use super::decision::{Decision, Receipt};
use super::policy::Policy;
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::Reach;

/// What rate limiting needs of a backend: decisions, each of them atomic.
///
/// A store is asked only about costs that can be admitted at all (no more than the capacity of each limit, which is not 0);
/// [`Limiter`] and the layer answer the others. Every backend passes the same contract tests, which
/// `tollgate::testing` (feature `testing`) has for others.
///
/// # Cancellation
///
/// Dropping a returned future may or may not have done what was asked.
///
/// [`Limiter`]: super::Limiter
pub trait RateLimitStore {
    /// Charges `cost` units to all limits if all of them have room, and to none otherwise, and says how things stand. A cost
    /// of 0 charges nothing.
    fn check(&self, policy: &Policy, key: &Key, cost: u32)
    -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// The same as [`check`](Self::check) for a store that knows the answer without waiting; `None`, with nothing charged, where it does not. Saves a
    /// future, a timer and the deadline.
    fn check_now(&self, policy: &Policy, key: &Key, cost: u32) -> Option<Decision> {
        let _ = (policy, key, cost);
        None
    }

    /// Charges `cost` units, which are not 0, if it is clear without waiting that all limits have room. `None`, with nothing charged, says
    /// nothing about how things stand: ask [`check_now`](Self::check_now) then.
    ///
    /// For callers to whom a yes is enough, which costs less than a decision. A store need not have this.
    fn charge_now(&self, policy: &Policy, key: &Key, cost: u32) -> Option<Charged> {
        let _ = (policy, key, cost);
        None
    }

    /// Charges several subjects, each by its own policy, if all of them have room, and none otherwise. The decisions are in the order of
    /// `requests`; where one is a denial the others say what they would have been, or have no limits where nobody was asked about them. A subject that is
    /// named twice is charged twice.
    ///
    /// Unless a store can do this atomically, as this implementation cannot, it charges one after the other and gives back what was charged when one of
    /// them is denied or fails: others may be denied meanwhile what is given back a moment later, and what could not be given back stays
    /// charged. Where the call is dropped on its way, at a deadline for instance, this implementation gives nothing back. Redis, on a cluster, gives
    /// back in the background then; what stays charged is no more than the call that was under way, of which nothing is known.
    /// Nobody is admitted beyond a limit either way.
    fn check_all(&self, requests: &[Request]) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send
    where
        Self: Sync,
    {
        one_after_the_other(self, requests, |charges| give_back(self, charges))
    }

    /// The same as [`check_all`](Self::check_all) for a store that knows the answer without waiting; `None`, with nothing charged, where it does not.
    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        let _ = requests;
        None
    }

    /// Says whether [`check`](Self::check) would admit this cost, and how things stand, without charging. At the most it
    /// repairs what it finds broken.
    fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Corrects what was charged: adds `change` units, or gives them back if it is negative.
    ///
    /// What is added counts from now on and is charged even if it does not fit, but nobody gets deeper into debt than by a whole quota.
    /// What is given back must have been charged, as the receipt shows; limits in which it does not count any more are left alone,
    /// so nothing is ever given back into another window. A token bucket takes a charge back as long as it has not been full
    /// since, whether or not inflow has made up for a part of it by then.
    ///
    /// Where the key has been counted with other numbers ([`QuotaChange`](super::QuotaChange)), those of `policy` may be of an older and smaller quota.
    /// So where they would cut or forget anything, the numbers that are found hold; so they do for what is given back. What is added with
    /// a receipt of the instant 0 corrects no charge, and is counted with the numbers of `policy` in any case.
    fn settle(
        &self,
        policy: &Policy,
        key: &Key,
        receipt: Receipt,
        change: i64,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Denies everything to this key for the time given, whatever its limits say; a time of zero lifts the block. What has been
    /// counted stays. Policies that [count apart](super::QuotaChange) are blocked apart.
    fn block(&self, policy: &Policy, key: &Key, time: Duration) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Forgets what was counted for this key, and lifts a block. A key that is not known is no error.
    fn reset(&self, policy: &Policy, key: &Key) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Among whom a quota is one and the same. A store that does not say so is taken to count for its process alone.
    fn scope(&self) -> Reach {
        Reach::Process
    }
}

/// A yes without the details: see [`RateLimitStore::charge_now`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Charged {
    /// Whether less than a fifth of a limit is left.
    pub is_near_limit: bool,
}

impl Charged {
    /// For stores: a yes, and whether less than a fifth of a limit is left.
    #[must_use]
    pub const fn new(is_near_limit: bool) -> Self {
        Self { is_near_limit }
    }
}

/// One subject of a decision about several: see [`RateLimitStore::check_all`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The limits.
    pub policy: Policy,
    /// Whom they are counted for.
    pub key: Key,
    /// The units that are asked for.
    pub cost: u32,
}

/// Something that was charged on the way to a decision about several.
#[derive(Clone, Debug)]
pub(crate) struct Charge {
    request: Request,
    receipt: Receipt,
}

/// Charges several subjects by one call for each. Where one of them is denied or fails, `give_back` is waited for with what was charged before;
/// and where nobody waits for the decision any more it is called, and what it answers is dropped at once.
pub(crate) async fn one_after_the_other<S, G, F>(
    store: &S,
    requests: &[Request],
    give_back: G,
) -> Result<Vec<Decision>, StoreError>
where
    S: RateLimitStore + ?Sized + Sync,
    G: FnMut(Vec<Charge>) -> F,
    F: Future<Output = Result<(), StoreError>>,
{
    let mut open = RefundGuard { charges: Vec::with_capacity(requests.len()), give_back };
    let mut decisions: Vec<Decision> = Vec::with_capacity(requests.len());
    let mut denied = false;
    for request in requests {
        let Request { policy, key, cost } = request;
        let decision =
            if denied { store.peek(policy, key, *cost).await } else { store.check(policy, key, *cost).await };
        match &decision {
            Ok(decision) if decision.is_allowed() && !denied => {
                open.charges.extend(decision.receipt().map(|receipt| Charge { request: request.clone(), receipt }));
            }
            _ if !denied => {
                denied = true;
                let given_back = open.give_back().await;
                // Where it failed before, the first failure says what is wrong.
                if decision.is_ok() {
                    given_back?;
                }
                for decision in &mut decisions {
                    decision.take_receipt();
                }
            }
            _ => {}
        }
        decisions.push(decision?);
    }
    open.charges.clear();
    Ok(decisions)
}

/// What was charged, until it is known that it stays so.
struct RefundGuard<G: FnMut(Vec<Charge>) -> F, F> {
    charges: Vec<Charge>,
    give_back: G,
}

impl<G: FnMut(Vec<Charge>) -> F, F> RefundGuard<G, F> {
    fn give_back(&mut self) -> F {
        (self.give_back)(mem::take(&mut self.charges))
    }
}

impl<G: FnMut(Vec<Charge>) -> F, F> Drop for RefundGuard<G, F> {
    fn drop(&mut self) {
        if !self.charges.is_empty() {
            drop(self.give_back());
        }
    }
}

/// Gives all of it back, as far as that works, and answers with the first failure.
pub(crate) async fn give_back<S>(store: &S, charges: Vec<Charge>) -> Result<(), StoreError>
where
    S: RateLimitStore + ?Sized + Sync,
{
    let mut result = Ok(());
    for Charge { request: Request { policy, key, cost }, receipt } in charges {
        let given_back = store.settle(&policy, &key, receipt, -i64::from(cost)).await;
        result = result.and(given_back);
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

    /// Decides about several one after the other, and fails or hangs where the policy is called so.
    struct Plain {
        memory: MemoryBackend,
        settles: bool,
    }

    impl RateLimitStore for Plain {
        async fn check(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
            match policy.name() {
                "hangs" => pending().await,
                "fails" => Err(StoreError::unavailable("it fails")),
                _ => self.memory.check(policy, key, cost).await,
            }
        }

        async fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
            self.memory.peek(policy, key, cost).await
        }

        async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
            // Of the first one it fails, the others are to be told all the same.
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

        /// How much is left of the policies `a` and `b`, which have 5.
        async fn left(&self) -> [Option<u32>; 2] {
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
    async fn what_was_charged_before_a_failure_or_a_denial_is_given_back() {
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
    async fn a_refund_that_fails_keeps_no_other_one_back() {
        for (last, is_timeout) in [("full", true), ("fails", false)] {
            let store = Plain::new(false);
            let error = store.check_all(&requests(last)).await.unwrap_err();
            assert_eq!(
                (error.is_timeout(), error.is_unavailable()),
                (is_timeout, !is_timeout),
                "the first failure is told"
            );
            assert_eq!(store.left().await, [Some(4), Some(5)]);
        }
    }

    #[tokio::test]
    async fn what_was_charged_before_the_call_is_dropped_is_handed_over() {
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
