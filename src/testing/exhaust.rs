use crate::key::Key;
use crate::rate_limit::store::RateLimitStore;
use crate::rate_limit::{Decision, Limiter, Outcome};

/// How often the remaining units are charged before other callers must be the reason that units remain.
const ATTEMPTS: usize = 100;

/// Uses up the remaining quota of `key`, so that the next request is over the limit. Returns the decision at that point.
///
/// If the policy has several limits, this uses up the tightest one. If a quota refills faster than two calls follow each other, units
/// become available again soon. Pause the clock to test such a quota.
///
/// # Panics
///
/// If the store fails, if the key is blocked, or if units always remain because other callers refund or reset them.
pub async fn exhaust<B: RateLimitStore>(limiter: &Limiter<B>, key: impl Into<Key>) -> Decision {
    let key = key.into();
    let answer = |answer: Result<Decision, _>| match answer {
        Ok(decision) => decision,
        Err(error) => panic!("cannot exhaust `{key}`: the store failed: {error:?}"),
    };
    for _ in 0..ATTEMPTS {
        let decision = answer(limiter.peek(key).await);
        assert!(decision.outcome() != Outcome::Blocked, "cannot exhaust `{key}`: it is blocked");
        // `remaining` is `None` for a quota of 0, which never has units left.
        let left = decision.remaining().unwrap_or(0);
        if left == 0 {
            return decision;
        }
        // All remaining units in one call, so that this also works for quotas of billions. Another caller may be faster.
        let decision = answer(limiter.check_cost(key, left).await);
        if decision.is_allowed() && decision.remaining() == Some(0) {
            return decision;
        }
    }
    panic!("cannot exhaust `{key}`: units remain after {ATTEMPTS} attempts; does another caller refund or reset them?");
}
