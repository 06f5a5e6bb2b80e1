use crate::key::Key;
use crate::rate_limit::{Decision, Limiter, Outcome, RateLimitStore};

/// How often what is left is charged before somebody else is to blame for what is left still.
const ATTEMPTS: usize = 100;

/// Uses up what `key` has left, so that the next request is over the limit; answers how it stands then.
///
/// Of several limits the tightest is used up. With a quota that is refilled faster than two calls follow each other there is more
/// left soon; a test of such a one pauses the clock.
///
/// # Panics
///
/// If the store fails, if the key is blocked, or if there is always something left because others give back or reset
/// meanwhile.
pub async fn exhaust<B: RateLimitStore>(limiter: &Limiter<B>, key: impl Into<Key>) -> Decision {
    let key = key.into();
    let answer = |answer: Result<Decision, _>| match answer {
        Ok(decision) => decision,
        Err(error) => panic!("what `{key}` has left cannot be used up, since the store fails: {error:?}"),
    };
    for _ in 0..ATTEMPTS {
        let decision = answer(limiter.peek(key).await);
        assert!(decision.outcome() != Outcome::Blocked, "what `{key}` has left cannot be used up while it is blocked");
        // Nothing is ever left of a quota of 0.
        let left = decision.remaining().unwrap_or(0);
        if left == 0 {
            return decision;
        }
        // All at once, since this works for a quota of billions too. Somebody else may be faster.
        let decision = answer(limiter.check_cost(key, left).await);
        if decision.is_allowed() && decision.remaining() == Some(0) {
            return decision;
        }
    }
    panic!("`{key}` has something left however often it is used up: who gives it back?");
}
