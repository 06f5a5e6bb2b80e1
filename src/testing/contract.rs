//! The contract tests of [`RateLimitStore`]: each function tests one requirement. [`rate_limit_contract!`](crate::rate_limit_contract) runs
//! them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::key::Key;
use crate::rate_limit::store::{RateLimitStore, Request};
use crate::rate_limit::{
    Algorithm, Decision, Limit, LimitStatus, Limiter, Outcome, Policy, Quota, QuotaChange, Receipt,
};

/// A window that does not end during a test, and in which a bucket gains no token, even on a slow machine.
const LONG: Duration = Duration::from_secs(3_600);
/// A window whose end a test can wait for, with tolerance for a slow machine.
const SHORT: Duration = Duration::from_secs(1);

/// All algorithms, with a quota of `limit` per [`LONG`].
fn limits(limit: u64) -> [Limit; 4] {
    limits_of(limit, LONG)
}

fn limits_of(limit: u64, window: Duration) -> [Limit; 4] {
    let quota = Quota::new(limit, window).unwrap();
    [quota.fixed_window(), quota.sliding_log().unwrap(), quota.sliding_window(), quota.token_bucket()]
}

/// The longest time that a count of this limit is kept.
fn lifetime(limit: Limit) -> Duration {
    limit.quota().window() * if limit.algorithm() == Algorithm::SlidingWindow { 2 } else { 1 }
}

fn limiter<B: RateLimitStore + Clone>(store: &B, name: &str, limit: Limit) -> Limiter<B> {
    // Generous, since these tests are not about time.
    Limiter::new(store.clone(), Policy::new(name, limit)).deadline(Duration::from_secs(10))
}

/// Each algorithm admits exactly the quota, and a denial says how long to wait.
pub async fn quota_is_admitted_exactly<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "quota", limit);
        for left in (0..5).rev() {
            let decision = limiter.check("alice").await.unwrap();
            assert!(decision.is_allowed());
            assert_eq!((decision.capacity(), decision.remaining(), decision.retry_after()), (5, Some(left), None));
            assert!(decision.reset_after() > Duration::ZERO && decision.reset_after() <= lifetime(limit));
        }
        for _ in 0..3 {
            let decision = limiter.check("alice").await.unwrap();
            assert!(!decision.is_allowed());
            assert_eq!(decision.remaining(), Some(0));
            let wait = decision.retry_after().unwrap();
            assert!(wait > Duration::ZERO && wait <= lifetime(limit), "{wait:?}");
        }
    }
}

/// The use of one key under one policy does not count for other keys or other policies.
pub async fn keys_and_policies_have_separate_counts<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(1) {
        let (api, login) = (limiter(&store, "api", limit), limiter(&store, "login", limit));
        for limiter in [&api, &login] {
            for subject in ["alice", "bob"] {
                assert!(limiter.check(subject).await.unwrap().is_allowed());
                assert!(!limiter.check(subject).await.unwrap().is_allowed());
            }
        }
    }
}

/// Two policies with the same name share their counts.
pub async fn policies_with_one_name_share_counts<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(2) {
        let (here, there) = (limiter(&store, "shared", limit), limiter(&store, "shared", limit));
        assert!(here.check("alice").await.unwrap().is_allowed());
        assert!(there.check("alice").await.unwrap().is_allowed());
        assert!(!here.check("alice").await.unwrap().is_allowed());
    }
}

/// A client whose large cost is denied can still use a small cost that fits, after any number of denials.
pub async fn denial_charges_nothing<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(10) {
        let limiter = limiter(&store, "denial", limit);
        assert_eq!(limiter.check_cost("alice", 7).await.unwrap().remaining(), Some(3));
        for _ in 0..20 {
            let decision = limiter.check_cost("alice", 4).await.unwrap();
            assert_eq!((decision.is_allowed(), decision.remaining()), (false, Some(3)));
        }
        let decision = limiter.check_cost("alice", 3).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(0)));
    }
}

/// A denied request fits after `retry_after`, and does not fit after half of it.
pub async fn retry_after_is_exact<B: RateLimitStore + Clone>(store: B) {
    for limit in limits_of(3, SHORT) {
        let limiter = limiter(&store, "wait", limit);
        let mut tries = 1;
        // If the test was delayed until the request fits, it has seen nothing, so try again.
        while !is_retry_after_exact(&limiter).await {
            assert!(tries < 10, "the request fitted too early in {tries} tries of {limit:?}");
            tries += 1;
            limiter.reset("alice").await.unwrap();
        }
    }
}

/// Whether the request had to wait, and half of the wait was not enough. Panics if `retry_after` is too short or too long.
async fn is_retry_after_exact<B: RateLimitStore + Clone>(limiter: &Limiter<B>) -> bool {
    let since = Instant::now();
    for _ in 0..3 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        sleep(Duration::from_millis(20)).await;
    }
    // The store decides between these two instants.
    let asked = Instant::now();
    let decision = limiter.check_cost("alice", 2).await.unwrap();
    let decided = Instant::now();
    let Some(wait) = decision.retry_after() else {
        assert!(since.elapsed() >= SHORT / 2, "the request fitted too early: {decision:?}");
        return false;
    };

    sleep(wait / 2).await;
    let early = limiter.check_cost("alice", 2).await.unwrap();
    if early.is_allowed() {
        assert!(asked.elapsed() >= wait, "the request fitted before {wait:?}: {early:?}");
        return false;
    }

    sleep(wait.saturating_sub(decided.elapsed())).await;
    let decision = limiter.check_cost("alice", 2).await.unwrap();
    assert!(decision.is_allowed(), "the request does not fit after {wait:?}: {decision:?}");
    true
}

/// A cost of 0 is admitted even if no quota is left, and charges nothing.
pub async fn zero_cost_passes_and_charges_nothing<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(2) {
        let limiter = limiter(&store, "nothing", limit);
        let decision = limiter.check_cost("alice", 0).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(2)));
        assert!(limiter.check_cost("alice", 2).await.unwrap().is_allowed());
        let decision = limiter.check_cost("alice", 0).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(0)));
    }
}

/// A peek returns the decision of a check. It charges nothing, so it can be repeated.
pub async fn peek_predicts_a_check_and_charges_nothing<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(1) {
        let limiter = limiter(&store, "peek", limit);
        for _ in 0..3 {
            let peek = limiter.peek("alice").await.unwrap();
            assert_eq!((peek.is_allowed(), peek.remaining()), (true, Some(1)));
        }
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        let peek = limiter.peek("alice").await.unwrap();
        assert_eq!((peek.is_allowed(), peek.remaining()), (false, Some(0)));
        assert!(peek.retry_after().is_some());
    }
}

/// A reset forgets one key and no other. The reset of an unknown key is not an error.
pub async fn reset_clears_one_key<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(1) {
        let limiter = limiter(&store, "reset", limit);
        limiter.reset("nobody").await.unwrap();
        for subject in ["alice", "bob"] {
            assert!(limiter.check(subject).await.unwrap().is_allowed());
        }
        limiter.reset("alice").await.unwrap();
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        assert!(!limiter.check("bob").await.unwrap().is_allowed());
    }
}

/// `reset_after` is zero while nothing is used, and then no longer than a count is kept.
pub async fn unused_quota_has_no_reset_time<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(3) {
        let limiter = limiter(&store, "untouched", limit);
        assert_eq!(limiter.peek("alice").await.unwrap().reset_after(), Duration::ZERO);
        let reset = limiter.check("alice").await.unwrap().reset_after();
        assert!(reset > Duration::ZERO && reset <= lifetime(limit), "{reset:?}");
    }
}

/// If a limit is lowered below the used units, the client is denied, for no longer than the new limit lasts.
pub async fn lower_limit_keeps_counts<B: RateLimitStore + Clone>(store: B) {
    for (before, after) in limits(10).into_iter().zip(limits(4)) {
        let longest = lifetime(after);
        let (before, after) = (limiter(&store, "lower", before), limiter(&store, "lower", after));
        assert!(before.check_cost("alice", 6).await.unwrap().is_allowed());
        let decision = after.check("alice").await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (false, Some(0)));
        assert!(decision.retry_after().unwrap() <= longest);
    }
}

/// If a limit is raised, the used units still count.
pub async fn higher_limit_keeps_counts<B: RateLimitStore + Clone>(store: B) {
    for (before, after) in limits(2).into_iter().zip(limits(5)) {
        let (before, after) = (limiter(&store, "higher", before), limiter(&store, "higher", after));
        assert!(before.check_cost("alice", 2).await.unwrap().is_allowed());
        assert_eq!(after.check("alice").await.unwrap().remaining(), Some(2));
    }
}

/// A limit with another window is another limit.
pub async fn new_window_length_starts_new_counts<B: RateLimitStore + Clone>(store: B) {
    for (before, after) in limits(1).into_iter().zip(limits_of(1, LONG * 2)) {
        // A bucket has no window, only a rate.
        if before.algorithm() == Algorithm::TokenBucket {
            continue;
        }
        let (before, after) = (limiter(&store, "window", before), limiter(&store, "window", after));
        assert!(before.check("alice").await.unwrap().is_allowed());
        assert!(after.check("alice").await.unwrap().is_allowed());
    }
}

/// A fixed window opens with its first charge, and all units are available again at its end.
pub async fn fixed_window_ends_at_once<B: RateLimitStore + Clone>(store: B) {
    let window = SHORT * 3;
    let [fixed, ..] = limits_of(3, window);
    let limiter = limiter(&store, "fixed", fixed);
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    sleep(window / 2).await;
    assert_eq!(limiter.check_cost("alice", 2).await.unwrap().remaining(), Some(0));
    sleep(window * 3 / 4).await;
    // The window opened with the first request, so all three units are back, including those of the second request.
    assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(3));
}

/// No interval as long as the window contains more than the quota of a sliding log, and all of the quota can be used.
pub async fn sliding_log_is_exact_in_every_window<B: RateLimitStore + Clone>(store: B) {
    const LIMIT: usize = 4;
    let [_, log, ..] = limits_of(LIMIT as u64, SHORT);
    let limiter = limiter(&store, "sliding", log);
    let start = Instant::now();
    let mut admitted = Vec::new();
    while start.elapsed() < SHORT * 3 {
        let asked = Instant::now();
        if limiter.check("alice").await.unwrap().is_allowed() {
            // The store decided between these two instants.
            admitted.push((asked, Instant::now()));
        }
        sleep(Duration::from_millis(7)).await;
    }
    for span in admitted.windows(LIMIT + 1) {
        let (first, last) = (span[0], span[LIMIT]);
        assert!(last.1 - first.0 >= SHORT, "{} admitted within {:?}", LIMIT + 1, last.1 - first.0);
    }
    // Under constant load, it admits the whole quota: at once, and again in every window.
    assert!(admitted.len() >= LIMIT * 2, "only {} admitted", admitted.len());
}

/// A log holds ten thousand requests.
pub async fn full_sliding_log_works<B: RateLimitStore + Clone>(store: B) {
    let limit = Quota::new(Quota::MAX_SLIDING_LOG, Duration::from_secs(3_600)).unwrap().sliding_log().unwrap();
    let limiter = limiter(&store, "full", limit);
    for left in (0..Quota::MAX_SLIDING_LOG).rev() {
        assert_eq!(limiter.check("alice").await.unwrap().remaining(), Some(left));
    }
    let decision = limiter.check_cost("alice", Quota::MAX_SLIDING_LOG / 2).await.unwrap();
    assert!(!decision.is_allowed());
    let wait = decision.retry_after().unwrap();
    assert!(wait >= decision.reset_after() && wait <= Duration::from_secs(3_600), "{decision:?}");
}

/// Windows of ten years and costs of nine quadrillion are counted.
pub async fn longest_windows_and_largest_costs_are_counted<B: RateLimitStore + Clone>(store: B) {
    let [_, log, ..] = limits_of(Quota::MAX_SLIDING_LOG, Quota::MAX_WINDOW);
    let largest = Quota::new(Quota::MAX_UNITS, Quota::MAX_WINDOW).unwrap();
    for limit in [largest.fixed_window(), log] {
        let max = limit.quota().limit();
        let limiter = limiter(&store, "longest", limit);
        assert_eq!(limiter.check_cost("alice", max - 1).await.unwrap().remaining(), Some(1));
        assert_eq!(limiter.check("alice").await.unwrap().remaining(), Some(0));
        let wait = limiter.check_cost("alice", max).await.unwrap().retry_after().unwrap();
        assert!(wait <= Quota::MAX_WINDOW && wait > Quota::MAX_WINDOW - Duration::from_secs(60), "{wait:?}");
        limiter.reset("alice").await.unwrap();
        assert!(limiter.check_cost("alice", max).await.unwrap().is_allowed());
    }
}

/// Concurrent callers get exactly the quota in total, and no two of them see the same number of remaining units.
pub async fn racing_callers_share_the_quota<B>(store: B)
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    for limit in limits(50) {
        let limiter = limiter(&store, "race", limit);
        let mut callers = JoinSet::new();
        for _ in 0..200 {
            let limiter = limiter.clone();
            callers.spawn(async move { limiter.check("alice").await.unwrap() });
        }
        let mut left: Vec<_> =
            callers.join_all().await.iter().filter(|d| d.is_allowed()).map(Decision::remaining).collect();
        left.sort_unstable();
        // Fifty requests were admitted, and no two saw the same number of remaining units.
        assert_eq!(left, (0..50).map(Some).collect::<Vec<_>>());
    }
}

/// A key may consist of any bytes, and has its own count.
pub async fn any_bytes_are_a_rate_limit_key<B: RateLimitStore + Clone>(store: B) {
    let huge = vec![b'x'; 1 << 20];
    let mut other_huge = huge.clone();
    other_huge.push(b'y');
    let subjects: [&[u8]; 10] =
        [b"", b"{", b"}{", b"{a}", b"\xff\xfe", b"\0", b"a b", b"a\r\nDEL x", &huge, &other_huge];
    for limit in limits(1) {
        let limiter = limiter(&store, "bytes", limit);
        for subject in subjects {
            assert!(limiter.check(Key::new(subject)).await.unwrap().is_allowed(), "{} bytes", subject.len());
        }
        for subject in subjects {
            assert!(!limiter.check(Key::new(subject)).await.unwrap().is_allowed(), "{} bytes", subject.len());
        }
    }
}

/// A token bucket refills token by token, and never holds more than its burst.
pub async fn bucket_refills_evenly_up_to_its_burst<B: RateLimitStore + Clone>(store: B) {
    // One token per second.
    let bucket = Quota::new(5, SHORT * 5).unwrap().burst(3).unwrap().token_bucket();
    let limiter = limiter(&store, "bucket", bucket);
    assert_eq!(limiter.check_cost("alice", 3).await.unwrap().remaining(), Some(0));
    let decision = limiter.check("alice").await.unwrap();
    assert!(!decision.is_allowed() && decision.retry_after().unwrap() <= SHORT);
    sleep(decision.retry_after().unwrap()).await;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    // After any idle time, it holds no more than its burst.
    sleep(SHORT * 4).await;
    assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(3));
    assert_eq!(limiter.check_cost("alice", 4).await.unwrap().outcome(), Outcome::Never);
}

/// The units that were used in the last window fade evenly during the next.
pub async fn sliding_window_fades<B: RateLimitStore + Clone>(store: B) {
    let [_, _, sliding, _] = limits_of(100, SHORT);
    let limiter = limiter(&store, "fades", sliding);
    let start = Instant::now();
    assert_eq!(limiter.check_cost("alice", 100).await.unwrap().remaining(), Some(0));
    let opened = Instant::now();
    // Half way through the next window, half of the units still count.
    sleep(SHORT * 3 / 2).await;
    let asked = opened.elapsed();
    let left = limiter.peek("alice").await.unwrap().remaining().unwrap();
    let fraction = |elapsed: Duration| (elapsed.as_secs_f64() / SHORT.as_secs_f64() - 1.0).min(1.0) * 100.0;
    let (least, max) = (fraction(asked) - 1.5, fraction(start.elapsed()) + 1.5);
    assert!((least..=max).contains(&(left as f64)), "{left} is not between {least} and {max}");
}

/// The largest quotas and windows, and unusual ones, do not overflow.
pub async fn largest_numbers_fit_every_algorithm<B: RateLimitStore + Clone>(store: B) {
    let largest = [1 << 32, 1 << 40, Quota::MAX_UNITS - 1, Quota::MAX_UNITS]
        .map(|limit| Quota::new(limit, Quota::MAX_WINDOW).unwrap());
    let slowest = Quota::new(1, Quota::MAX_WINDOW).unwrap();
    let odd = Quota::new(999_999_937, Duration::from_micros(86_400_000_001)).unwrap();
    for quota in largest.into_iter().chain([
        slowest,
        odd,
        Quota::per_second(u64::from(u32::MAX)),
        Quota::per_second(Quota::MAX_UNITS),
    ]) {
        for limit in [quota.token_bucket(), quota.sliding_window(), quota.fixed_window()] {
            let max = limit.capacity();
            let limiter = limiter(&store, "largest", limit);
            assert_eq!(limiter.check_cost("alice", max).await.unwrap().remaining(), Some(0), "{limit:?}");
            let decision = limiter.check_cost("alice", max).await.unwrap();
            // Such a fast bucket may already be full again.
            if quota.window() > SHORT {
                let wait = decision.retry_after().unwrap();
                let due = lifetime(limit);
                assert!(wait <= due + due / 100_000 && wait > due - LONG / 60, "{limit:?} {wait:?}");
            }
            limiter.reset("alice").await.unwrap();
        }
    }
}

/// A policy with one limit for each algorithm, the tightest first.
fn four_limits(name: &str) -> Policy {
    let policy = Policy::new(name, Quota::new(3, LONG).unwrap().token_bucket());
    let policy = policy.limit(Quota::new(5, LONG * 2).unwrap().fixed_window());
    let policy = policy.limit(Quota::new(7, LONG * 3).unwrap().sliding_window());
    policy.limit(Quota::new(9, LONG * 4).unwrap().sliding_log().unwrap())
}

fn policy_limiter<B: RateLimitStore + Clone>(store: &B, policy: Policy) -> Limiter<B> {
    Limiter::new(store.clone(), policy).deadline(Duration::from_secs(10))
}

fn left(decision: &Decision) -> Vec<u64> {
    decision.limits().iter().map(LimitStatus::remaining).collect()
}

/// A policy with several limits charges all of them or none.
pub async fn several_limits_are_charged_all_or_none<B: RateLimitStore + Clone>(store: B) {
    let limiter = policy_limiter(&store, four_limits("together"));
    let decision = limiter.check_cost("alice", 2).await.unwrap();
    assert_eq!((decision.is_allowed(), left(&decision)), (true, vec![1, 3, 5, 7]));
    assert_eq!((decision.remaining(), decision.capacity()), (Some(1), 3));
    for _ in 0..3 {
        let decision = limiter.check_cost("alice", 2).await.unwrap();
        assert_eq!((decision.outcome(), left(&decision)), (Outcome::Limited, vec![1, 3, 5, 7]));
        let violated: Vec<_> = decision.limits().iter().map(LimitStatus::is_violated).collect();
        assert_eq!(violated, [true, false, false, false]);
    }
    let decision = limiter.check("alice").await.unwrap();
    assert_eq!((decision.is_allowed(), left(&decision)), (true, vec![0, 2, 4, 6]));
}

/// A denial lists every violated limit, and the wait is the longest of theirs.
pub async fn denial_names_violated_limits_and_longest_wait<B: RateLimitStore + Clone>(store: B) {
    let limits = limits_of(4, LONG).into_iter().chain(limits_of(4, LONG * 4));
    let policy = limits.fold(Policy::new("roomy", Quota::per_day(100).fixed_window()), Policy::limit);
    let limiter = policy_limiter(&store, policy);
    assert!(limiter.check_cost("alice", 3).await.unwrap().is_allowed());
    let decision = limiter.check_cost("alice", 2).await.unwrap();
    assert_eq!(decision.outcome(), Outcome::Limited);
    let violated: Vec<_> = decision.limits().iter().map(LimitStatus::is_violated).collect();
    assert_eq!(violated, [false, true, true, true, true, true, true, true, true]);
    let longest = decision.limits().iter().filter_map(LimitStatus::retry_after).max();
    assert_eq!(decision.retry_after(), longest);
    assert!(longest.unwrap() > LONG * 3, "{longest:?}");
}

/// `charge_now` charges like `check`, and reports whether the key is near a limit. If it returns `None`, nothing was charged.
pub async fn charge_without_details_equals_a_decision<B: RateLimitStore + Clone>(store: B) {
    let (alice, cost) = (Key::from("alice"), 3);
    for limit in limits(20) {
        let policy = Policy::new("yes", limit);
        let mut left = 20;
        while left >= cost {
            let charged = store.charge_now(&policy, &alice, cost);
            let decision = match charged {
                Some(_) => store.peek(&policy, &alice, 0).await.unwrap(),
                None => store.check(&policy, &alice, cost).await.unwrap(),
            };
            left -= cost;
            assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(left)), "{limit:?}");
            assert!(charged.is_none_or(|charged| charged.is_near_limit == (left < 4)), "{charged:?} with {left} left");
        }
        assert_eq!(store.charge_now(&policy, &alice, cost), None, "{limit:?}");
        assert_eq!(store.peek(&policy, &alice, 0).await.unwrap().remaining(), Some(left));
        store.block(&policy, &alice, LONG).await.unwrap();
        assert_eq!(store.charge_now(&policy, &alice, 1), None, "{limit:?}");
    }
}

/// `check_now` and `check_all_now` charge like `check` and `check_all`, all requests or none, and return the same decisions. If they return
/// `None`, nothing was charged.
pub async fn immediate_decision_equals_a_decision<B>(store: B)
where
    B: RateLimitStore + Clone + Sync,
{
    for (number, limit) in limits(5).into_iter().enumerate() {
        let policy = Policy::new(format!("now-{number}"), limit);
        let request = |key: &str, cost| Request { policy: policy.clone(), key: Key::from(key), cost };
        let left = async |key: &str| store.peek(&policy, &Key::from(key), 0).await.unwrap().remaining().unwrap();
        let (alice, cost) = (Key::from("alice"), 2);
        for expected in [3, 1] {
            let before = left("alice").await;
            let decision = match store.check_now(&policy, &alice, cost) {
                Some(decision) => decision,
                None => {
                    assert_eq!(left("alice").await, before, "{limit:?}");
                    store.check(&policy, &alice, cost).await.unwrap()
                }
            };
            assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(expected)), "{limit:?}");
            assert!(decision.receipt().is_some(), "{limit:?}");
            assert_eq!(left("alice").await, expected, "{limit:?}");
        }
        // Once before the store has denied a request, and once after.
        for _ in 0..2 {
            if let Some(decision) = store.check_now(&policy, &alice, cost) {
                assert_eq!((decision.outcome(), decision.receipt()), (Outcome::Limited, None), "{limit:?}");
                assert!(decision.retry_after().is_some(), "{limit:?}");
            }
            assert!(!store.check(&policy, &alice, cost).await.unwrap().is_allowed(), "{limit:?}");
            assert_eq!(left("alice").await, 1, "{limit:?}");
        }
        // Two keys have units left and one has not, in any position.
        for names in [["alice", "bob", "carol"], ["bob", "alice", "carol"], ["bob", "carol", "alice"]] {
            let requests = names.map(|name| request(name, cost));
            if let Some(decisions) = store.check_all_now(&requests) {
                assert_eq!(decisions.len(), requests.len(), "{limit:?}");
                for (name, decision) in names.iter().zip(&decisions) {
                    assert_eq!(decision.is_allowed(), *name != "alice", "{limit:?} {decisions:?}");
                    assert_eq!(decision.receipt(), None, "{limit:?} {decisions:?}");
                }
            }
            assert_eq!([left("alice").await, left("bob").await, left("carol").await], [1, 5, 5], "{limit:?}");
        }
        // All keys have units left.
        let requests = ["bob", "carol"].map(|name| request(name, cost));
        let decisions = match store.check_all_now(&requests) {
            Some(decisions) => decisions,
            None => {
                assert_eq!([left("bob").await, left("carol").await], [5, 5], "{limit:?}");
                store.check_all(&requests).await.unwrap()
            }
        };
        assert!(decisions.iter().all(|decision| decision.receipt().is_some()), "{limit:?} {decisions:?}");
        assert_eq!([left("bob").await, left("carol").await], [3, 3], "{limit:?}");
    }
}

/// `Limiter::try_acquire` charges like `check`, and returns whether the request is allowed. A denied request is not charged.
pub async fn try_acquire_equals_a_decision<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(3) {
        let limiter = limiter(&store, "acquire", limit);
        for left in (0..3).rev() {
            assert!(limiter.try_acquire("alice").await.unwrap(), "{limit:?}");
            assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(left), "{limit:?}");
        }
        assert!(!limiter.try_acquire("alice").await.unwrap(), "{limit:?}");
        assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(0), "{limit:?}");
        limiter.block("bob", LONG).await.unwrap();
        assert!(!limiter.try_acquire("bob").await.unwrap(), "{limit:?}");
    }
    let nothing = limiter(&store, "nothing", Quota::new(0, LONG).unwrap().fixed_window());
    assert!(!nothing.try_acquire("alice").await.unwrap());
}

/// `check_all` charges every key or none.
pub async fn several_keys_are_charged_all_or_none<B>(store: B)
where
    B: RateLimitStore + Clone + Sync,
{
    let user = Policy::new("all-user", Quota::new(3, LONG).unwrap().token_bucket());
    let address = four_limits("all-address");
    let everyone = Policy::new("all-everyone", Quota::new(2, LONG).unwrap().fixed_window());
    let request = |policy: &Policy, key: &str, cost| Request { policy: policy.clone(), key: Key::from(key), cost };
    let requests = [request(&user, "alice", 1), request(&address, "203.0.113.7", 2), request(&everyone, "all", 1)];
    let outcomes = |decisions: &[Decision]| decisions.iter().map(Decision::outcome).collect::<Vec<_>>();
    let left = |decisions: &[Decision]| decisions.iter().map(|d| d.remaining().unwrap()).collect::<Vec<_>>();

    let decisions = store.check_all(&requests).await.unwrap();
    assert_eq!(outcomes(&decisions), [Outcome::Allowed; 3]);
    assert_eq!(left(&decisions), [2, 1, 1]);
    assert!(decisions.iter().all(|decision| decision.receipt().is_some()));

    // The address has one unit left and needs two. The others have units left, and keep them.
    let decisions = store.check_all(&requests).await.unwrap();
    assert_eq!(outcomes(&decisions), [Outcome::Allowed, Outcome::Limited, Outcome::Allowed]);
    assert!(decisions.iter().all(|decision| decision.receipt().is_none()), "{decisions:?}");
    for (request, expected) in requests.iter().zip([2, 1, 1]) {
        let decision = store.peek(&request.policy, &request.key, 1).await.unwrap();
        assert_eq!(decision.remaining(), Some(expected), "{request:?}");
    }
}

/// A key that occurs twice in `check_all` is charged for both requests, or not at all.
///
/// Once, both were decided by the counts before the call, and only one was charged.
pub async fn repeated_key_is_charged_twice<B>(store: B)
where
    B: RateLimitStore + Clone + Sync,
{
    for limit in limits(3) {
        let (policy, key) = (Policy::new("twice", limit), Key::from("alice"));
        let request = |cost| Request { policy: policy.clone(), key, cost };
        let decisions = store.check_all(&[request(2), request(2)]).await.unwrap();
        assert!(!decisions.iter().all(Decision::is_allowed), "{limit:?} {decisions:?}");
        assert!(decisions.iter().all(|decision| decision.receipt().is_none()), "{limit:?} {decisions:?}");
        assert_eq!(store.peek(&policy, &key, 1).await.unwrap().remaining(), Some(3), "{limit:?}");

        let decisions = store.check_all(&[request(2), request(1)]).await.unwrap();
        assert!(decisions.iter().all(Decision::is_allowed), "{limit:?} {decisions:?}");
        assert_eq!(store.peek(&policy, &key, 1).await.unwrap().remaining(), Some(0), "{limit:?}");
        store.reset(&policy, &key).await.unwrap();
    }
}

/// Refunded units can be used again.
pub async fn refunded_units_can_be_used_again<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "refund", limit);
        let decision = limiter.check_cost("alice", 4).await.unwrap();
        assert!(!limiter.check_cost("alice", 3).await.unwrap().is_allowed());
        limiter.settle("alice", decision.receipt().unwrap(), -3).await.unwrap();
        assert_eq!(limiter.check_cost("alice", 3).await.unwrap().remaining(), Some(1), "{limit:?}");
        // Then refund the rest of the charge.
        limiter.settle("alice", decision.receipt().unwrap(), -1).await.unwrap();
        assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(2), "{limit:?}");
    }
}

/// A refund never leaves more tokens in a bucket than if the request had not been charged.
pub async fn refund_creates_no_tokens<B: RateLimitStore + Clone>(store: B) {
    // One token every tenth of a second.
    let limiter = limiter(&store, "tokens", Quota::new(10, SHORT).unwrap().token_bucket());
    let start = Instant::now();
    let receipt = limiter.check_cost("alice", 10).await.unwrap().receipt().unwrap();
    sleep(SHORT * 9 / 10).await;
    assert!(limiter.check_cost("alice", 9).await.unwrap().is_allowed());
    limiter.settle("alice", receipt, -10).await.unwrap();
    let left = limiter.peek("alice").await.unwrap().remaining().unwrap();
    // Without the first charge, the bucket would have been full before the second.
    let max = 1 + start.elapsed().saturating_sub(SHORT * 9 / 10).as_millis() as u64 / 100 + 1;
    assert!(left <= max, "{left} of 10 are left, and at most {max} are correct");

    // While other requests keep the bucket from filling up, the whole refund counts.
    let limiter = limiter_of_a_busy_bucket(&store);
    assert!(limiter.check_cost("bob", 60).await.unwrap().is_allowed());
    let receipt = limiter.check_cost("bob", 20).await.unwrap().receipt().unwrap();
    sleep(SHORT / 10).await;
    limiter.settle("bob", receipt, -20).await.unwrap();
    assert_eq!(limiter.peek("bob").await.unwrap().remaining(), Some(40));
}

/// A bucket that gains no token during a test.
fn limiter_of_a_busy_bucket<B: RateLimitStore + Clone>(store: &B) -> Limiter<B> {
    limiter(store, "busy", Quota::per_hour(100).token_bucket())
}

/// A charge of an ended window is not refunded in another window, and a refund does not create a key.
pub async fn refund_has_no_effect_on_a_later_window<B: RateLimitStore + Clone>(store: B) {
    for limit in limits_of(5, SHORT / 4) {
        let limiter = limiter(&store, "late", limit);
        let late = limiter.check_cost("alice", 5).await.unwrap().receipt().unwrap();
        sleep(lifetime(limit) + Duration::from_millis(20)).await;
        let before = Instant::now();
        let decision = limiter.check_cost("alice", 5).await.unwrap();
        assert!(decision.is_allowed());
        limiter.settle("alice", late, -5).await.unwrap();
        let decision = limiter.check_cost("alice", 5).await.unwrap();
        assert!(!decision.is_allowed() || before.elapsed() >= limit.quota().window(), "{limit:?}");
        limiter.reset("alice").await.unwrap();
    }
    // A refund does not create a removed key again.
    for limit in limits(5) {
        let limiter = limiter(&store, "gone", limit);
        let receipt = limiter.check("alice").await.unwrap().receipt().unwrap();
        limiter.reset("alice").await.unwrap();
        limiter.settle("alice", receipt, -1).await.unwrap();
        let peek = limiter.peek("alice").await.unwrap();
        assert_eq!((peek.remaining(), peek.reset_after()), (Some(5), Duration::ZERO), "{limit:?}");
    }
}

/// A refund of more units than were used restores the whole quota, and no more.
pub async fn refund_is_at_most_the_used_units<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "over", limit);
        let receipt = limiter.check_cost("alice", 2).await.unwrap().receipt().unwrap();
        for change in [-3, -5, i64::MIN] {
            limiter.settle("alice", receipt, change).await.unwrap();
            assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(5), "{limit:?} {change}");
        }
        assert_eq!(limiter.check_cost("alice", 5).await.unwrap().remaining(), Some(0), "{limit:?}");
        assert!(!limiter.check("alice").await.unwrap().is_allowed(), "{limit:?}");
    }
}

/// A later charge counts even if it does not fit.
pub async fn later_charge_becomes_debt<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "debt", limit);
        let receipt = limiter.check_cost("alice", 4).await.unwrap().receipt().unwrap();
        limiter.settle("alice", receipt, 3).await.unwrap();
        let decision = limiter.check("alice").await.unwrap();
        assert_eq!((decision.outcome(), decision.remaining()), (Outcome::Limited, Some(0)), "{limit:?}");
        // Seven of five units are used, so a refund of three leaves one.
        limiter.settle("alice", receipt, -3).await.unwrap();
        assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(1), "{limit:?}");
    }
}

/// A debt is paid within at most twice the window.
pub async fn debt_is_at_most_the_quota<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "deep", limit);
        for change in [3, u32::MAX.into(), i64::MAX] {
            limiter.settle("alice", Receipt::at_micros(0), change).await.unwrap();
        }
        let wait = limiter.check("alice").await.unwrap().retry_after().unwrap();
        assert!(wait <= LONG * 2, "{limit:?} {wait:?}");
    }
}

/// A debt that was made in two windows is no deeper.
///
/// Once, each of the two windows of a sliding window held a debt of a whole quota, which made three quotas in total.
pub async fn debt_over_two_windows_is_at_most_the_quota<B: RateLimitStore + Clone>(store: B) {
    let [_, _, sliding, _] = limits_of(5, SHORT);
    let limiter = limiter(&store, "windows", sliding);
    let opened = Instant::now();
    limiter.settle("alice", Receipt::at_micros(0), 10).await.unwrap();
    sleep(SHORT + Duration::from_millis(20)).await;
    limiter.settle("alice", Receipt::at_micros(0), 10).await.unwrap();
    let wait = limiter.check("alice").await.unwrap().retry_after().unwrap();
    assert!(wait <= SHORT || opened.elapsed() > SHORT * 3 / 2, "{wait:?}");
}

/// A block denies every request, and keeps the counts. It ends after its time, with a block of no duration, or with a reset.
pub async fn block_denies_and_keeps_counts<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "block", limit);
        assert_eq!(limiter.check_cost("alice", 2).await.unwrap().remaining(), Some(3));
        limiter.block("alice", SHORT * 2).await.unwrap();
        limiter.block("stranger", LONG).await.unwrap();
        for subject in ["alice", "stranger"] {
            for cost in [0, 1] {
                let decision = limiter.check_cost(subject, cost).await.unwrap();
                assert_eq!(decision.outcome(), Outcome::Blocked, "{subject} {cost}");
                let wait = decision.retry_after().unwrap();
                assert!(wait > Duration::ZERO && wait <= LONG);
            }
            assert_eq!(limiter.peek(subject).await.unwrap().outcome(), Outcome::Blocked);
        }
        sleep(SHORT * 2 + Duration::from_millis(20)).await;
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        assert!(limiter.peek("alice").await.unwrap().remaining().unwrap() <= 3, "{limit:?}");

        limiter.block("stranger", Duration::ZERO).await.unwrap();
        assert_eq!(limiter.check("stranger").await.unwrap().remaining(), Some(4));
        limiter.block("stranger", LONG).await.unwrap();
        limiter.reset("stranger").await.unwrap();
        assert_eq!(limiter.check("stranger").await.unwrap().remaining(), Some(4));
    }
}

/// If the quota changes, the counts change as [`QuotaChange`] says.
pub async fn quota_change_keeps_resets_or_scales<B: RateLimitStore + Clone>(store: B) {
    let cases = [(QuotaChange::Keep, 920), (QuotaChange::Reset, 1_000), (QuotaChange::Proportional, 200)];
    for (change, expected) in cases {
        for (free, pro) in limits(100).into_iter().zip(limits(1_000)) {
            let expected = match (free.algorithm(), change) {
                // A log stores requests, so it cannot be scaled.
                (Algorithm::SlidingLog, QuotaChange::Proportional) => 920,
                _ => expected,
            };
            let [free, pro] =
                [free, pro].map(|limit| policy_limiter(&store, Policy::new("plan", limit).on_quota_change(change)));
            assert_eq!(free.check_cost("alice", 80).await.unwrap().remaining(), Some(20));
            let seen = pro.peek("alice").await.unwrap().remaining();
            // A bucket of 1,000 per hour may have gained a token.
            assert!(seen.unwrap().abs_diff(expected) <= 10, "{change:?} {:?} {seen:?}", pro.policy());
            assert!(pro.check_cost("alice", expected - 10).await.unwrap().is_allowed());
            assert!(!pro.check_cost("alice", 100).await.unwrap().is_allowed());
            pro.reset("alice").await.unwrap();
        }
    }
}

/// A correction of a charge under an older plan does not affect the units that were used under the newer plan since.
///
/// Once, the correction cut these units to twice the older quota, or removed them.
pub async fn correction_under_another_quota_keeps_counts<B: RateLimitStore + Clone>(store: B) {
    let hour = Duration::from_secs(3_600);
    for change in [QuotaChange::Keep, QuotaChange::Reset, QuotaChange::Proportional] {
        for (free, pro) in limits_of(100, hour).into_iter().zip(limits_of(1_000, hour)) {
            let [free, pro] =
                [free, pro].map(|limit| policy_limiter(&store, Policy::new("older", limit).on_quota_change(change)));
            let left = async || pro.peek("alice").await.unwrap().remaining().unwrap();
            let receipt = free.check("alice").await.unwrap().receipt().unwrap();
            assert!(pro.check_cost("alice", 900).await.unwrap().is_allowed());
            let before = left().await;
            assert!(before <= 100, "{change:?} {:?}", pro.policy());

            free.settle("alice", receipt, -1).await.unwrap();
            // A bucket of 1,000 per hour gains a token every few seconds.
            assert!((before..before + 3).contains(&left().await), "{change:?} {:?}", pro.policy());
            free.settle("alice", receipt, 50).await.unwrap();
            let after = left().await;
            assert!((before - 50..before - 46).contains(&after), "{change:?} {:?}", pro.policy());
            assert!(!pro.check_cost("alice", after + 10).await.unwrap().is_allowed());
            pro.reset("alice").await.unwrap();
        }
    }
}

/// A later charge counts under the quota that the client has changed to, if that is larger.
///
/// Once, each charge cut the count to twice the older quota, so that far more was admitted than the newer quota allows.
pub async fn later_charge_counts_under_a_larger_quota<B: RateLimitStore + Clone>(store: B) {
    let hour = Duration::from_secs(3_600);
    for change in [QuotaChange::Keep, QuotaChange::Reset, QuotaChange::Proportional] {
        for (free, pro) in limits_of(100, hour).into_iter().zip(limits_of(1_000, hour)) {
            let [free, pro] =
                [free, pro].map(|limit| policy_limiter(&store, Policy::new("larger", limit).on_quota_change(change)));
            // Requests that are admitted at a cost of 0, and charged with their actual cost later.
            assert!(free.check_cost("alice", 50).await.unwrap().is_allowed());
            for _ in 0..5 {
                assert!(pro.check_cost("alice", 0).await.unwrap().is_allowed());
                pro.settle("alice", Receipt::at_micros(0), 500).await.unwrap();
            }
            let decision = pro.check("alice").await.unwrap();
            assert_eq!(
                (decision.outcome(), decision.remaining()),
                (Outcome::Limited, Some(0)),
                "{change:?} {:?}",
                pro.policy()
            );
            pro.reset("alice").await.unwrap();

            // A request from before the change that was charged too little. Even so, a limit that resets starts without used units.
            let receipt = free.check("alice").await.unwrap().receipt().unwrap();
            pro.settle("alice", receipt, 1_500).await.unwrap();
            let decision = pro.check("alice").await.unwrap();
            assert_eq!(decision.is_allowed(), change == QuotaChange::Reset, "{change:?} {:?}", pro.policy());
            pro.reset("alice").await.unwrap();
        }
    }
}

/// Concurrent callers under several limits get exactly the tightest of them in total.
pub async fn racing_callers_share_the_tightest_limit<B>(store: B)
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    let limits = limits_of(60, LONG * 2);
    let policy =
        limits.into_iter().fold(Policy::new("races", Quota::new(50, LONG).unwrap().fixed_window()), Policy::limit);
    let limiter = policy_limiter(&store, policy);
    let mut callers = JoinSet::new();
    for _ in 0..200 {
        let limiter = limiter.clone();
        callers.spawn(async move { limiter.check("alice").await.unwrap() });
    }
    let admitted = callers.join_all().await.iter().filter(|decision| decision.is_allowed()).count();
    assert_eq!(admitted, 50);
    let peek = limiter.peek("alice").await.unwrap();
    assert!(left(&peek)[1..].iter().all(|left| *left == 10 || *left == 11), "{peek:?}");
}
