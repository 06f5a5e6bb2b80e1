use std::future::Future;
use std::time::Duration;

use super::decision::{Decision, Receipt};
use super::policy::Policy;
use crate::error::StoreError;
use crate::key::Key;

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
    /// `requests`; where one is a denial the others say what they would have been. A subject that is named twice is charged twice.
    ///
    /// Unless a store can do this atomically, as this implementation cannot, it charges one after the other and gives back what was charged when one of
    /// them is denied: others may be denied meanwhile what is given back a moment later, and what could not be given back stays charged,
    /// as does what was charged when the call is dropped on its way, at a deadline for instance.
    /// Nobody is admitted beyond a limit either way.
    fn check_all(&self, requests: &[Request]) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send
    where
        Self: Sync,
    {
        one_after_the_other(self, requests)
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
}

/// A yes without the details: see [`RateLimitStore::charge_now`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charged {
    /// Whether less than a fifth of a limit is left.
    pub is_near_limit: bool,
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

/// Charges several subjects by one call for each, and gives back where one of them is denied.
pub(crate) async fn one_after_the_other<S>(store: &S, requests: &[Request]) -> Result<Vec<Decision>, StoreError>
where
    S: RateLimitStore + ?Sized + Sync,
{
    let mut decisions: Vec<Decision> = Vec::with_capacity(requests.len());
    for Request { policy, key, cost } in requests {
        let denied = decisions.iter().any(|decision| !decision.is_allowed());
        let decision =
            if denied { store.peek(policy, key, *cost).await } else { store.check(policy, key, *cost).await };
        let failed = decision.is_err();
        if !denied && !matches!(&decision, Ok(decision) if decision.is_allowed()) {
            for (Request { policy, key, cost }, charged) in requests.iter().zip(&mut decisions) {
                if let Some(receipt) = charged.take_receipt() {
                    let given_back = store.settle(policy, key, receipt, -i64::from(*cost)).await;
                    // Where it failed before, the first failure says what is wrong.
                    if !failed {
                        given_back?;
                    }
                }
            }
        }
        decisions.push(decision?);
    }
    Ok(decisions)
}
