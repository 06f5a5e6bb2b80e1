//! The contract of `RateLimitStore`.
//!
//! The claims wait on tokio's clock, so they take no time where it is paused and some tenths of a second where it is not.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tollgate::rate_limit::{Decision, Limit, RateLimitStore};
use tollgate::{Key, Limiter, Policy, Quota};

/// Calls a macro with the names of all claims.
macro_rules! for_each_claim {
    ($call:ident) => {
        $call! {
            exactly_the_quota_is_admitted,
            subjects_and_policies_are_counted_apart,
            policies_of_one_name_share_their_counts,
            a_denial_charges_nothing,
            waiting_as_told_is_enough_and_not_too_much,
            a_cost_of_nothing_always_passes_and_charges_nothing,
            a_peek_tells_what_a_check_would_and_charges_nothing,
            a_reset_forgets_one_subject,
            an_untouched_quota_has_nothing_to_reset,
            a_lower_limit_keeps_what_was_counted,
            a_higher_limit_keeps_what_was_counted,
            another_window_starts_afresh,
            a_fixed_window_ends_all_at_once,
            a_sliding_log_never_admits_more_in_any_window,
            a_full_sliding_log_works,
            the_longest_windows_and_the_largest_costs_are_counted,
            racing_callers_get_the_quota_between_them,
            any_bytes_are_a_subject,
        }
    };
}
pub(crate) use for_each_claim;

/// A window that no test sees the end of, however slow the machine.
const LONG: Duration = Duration::from_secs(60);
/// A window that can be waited for, with room for a machine that is slow to wake somebody.
const SHORT: Duration = Duration::from_secs(1);

/// Both algorithms, with a quota of `limit` per [`LONG`].
fn limits(limit: u32) -> [Limit; 2] {
    limits_of(limit, LONG)
}

fn limits_of(limit: u32, window: Duration) -> [Limit; 2] {
    let quota = Quota::new(limit, window).unwrap();
    [quota.fixed_window(), quota.sliding_log().unwrap()]
}

fn limiter<B: RateLimitStore + Clone>(store: &B, name: &str, limit: Limit) -> Limiter<B> {
    // Generous, since these claims are not about time.
    Limiter::new(store.clone(), Policy::new(name, limit)).deadline(Duration::from_secs(10))
}

pub async fn exactly_the_quota_is_admitted<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(5) {
        let limiter = limiter(&store, "quota", limit);
        for left in (0..5).rev() {
            let decision = limiter.check("alice").await.unwrap();
            assert!(decision.is_allowed());
            assert_eq!((decision.limit(), decision.remaining(), decision.retry_after()), (5, Some(left), None));
            assert!(decision.reset_after() > Duration::ZERO && decision.reset_after() <= LONG);
        }
        for _ in 0..3 {
            let decision = limiter.check("alice").await.unwrap();
            assert!(!decision.is_allowed());
            assert_eq!(decision.remaining(), Some(0));
            let wait = decision.retry_after().unwrap();
            assert!(wait > Duration::ZERO && wait <= LONG, "{wait:?}");
        }
    }
}

pub async fn subjects_and_policies_are_counted_apart<B: RateLimitStore + Clone>(store: B) {
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

pub async fn policies_of_one_name_share_their_counts<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(2) {
        let (here, there) = (limiter(&store, "shared", limit), limiter(&store, "shared", limit));
        assert!(here.check("alice").await.unwrap().is_allowed());
        assert!(there.check("alice").await.unwrap().is_allowed());
        assert!(!here.check("alice").await.unwrap().is_allowed());
    }
}

pub async fn a_denial_charges_nothing<B: RateLimitStore + Clone>(store: B) {
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

pub async fn waiting_as_told_is_enough_and_not_too_much<B: RateLimitStore + Clone>(store: B) {
    for limit in limits_of(3, SHORT) {
        let limiter = limiter(&store, "wait", limit);
        for _ in 0..3 {
            assert!(limiter.check("alice").await.unwrap().is_allowed());
            sleep(Duration::from_millis(20)).await;
        }
        // The store decides somewhere between these two instants.
        let asked = Instant::now();
        let wait = limiter.check_cost("alice", 2).await.unwrap().retry_after().unwrap();
        let told = Instant::now();

        sleep(wait / 2).await;
        let early = limiter.check_cost("alice", 2).await.unwrap();
        assert!(!early.is_allowed() || asked.elapsed() >= wait, "less than {wait:?} was enough: {early:?}");

        sleep(wait.saturating_sub(told.elapsed())).await;
        let decision = limiter.check_cost("alice", 2).await.unwrap();
        assert!(decision.is_allowed(), "after {wait:?} there is room: {decision:?}");
    }
}

pub async fn a_cost_of_nothing_always_passes_and_charges_nothing<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(2) {
        let limiter = limiter(&store, "nothing", limit);
        let decision = limiter.check_cost("alice", 0).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(2)));
        limiter.check_cost("alice", 2).await.unwrap();
        let decision = limiter.check_cost("alice", 0).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(0)));
    }
}

pub async fn a_peek_tells_what_a_check_would_and_charges_nothing<B: RateLimitStore + Clone>(store: B) {
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

pub async fn a_reset_forgets_one_subject<B: RateLimitStore + Clone>(store: B) {
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

pub async fn an_untouched_quota_has_nothing_to_reset<B: RateLimitStore + Clone>(store: B) {
    for limit in limits(3) {
        let limiter = limiter(&store, "untouched", limit);
        assert_eq!(limiter.peek("alice").await.unwrap().reset_after(), Duration::ZERO);
        let reset = limiter.check("alice").await.unwrap().reset_after();
        assert!(reset > Duration::ZERO && reset <= LONG, "{reset:?}");
    }
}

pub async fn a_lower_limit_keeps_what_was_counted<B: RateLimitStore + Clone>(store: B) {
    for (before, after) in limits(10).into_iter().zip(limits(4)) {
        let (before, after) = (limiter(&store, "lower", before), limiter(&store, "lower", after));
        assert!(before.check_cost("alice", 6).await.unwrap().is_allowed());
        let decision = after.check("alice").await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (false, Some(0)));
        assert!(decision.retry_after().unwrap() <= LONG);
    }
}

pub async fn a_higher_limit_keeps_what_was_counted<B: RateLimitStore + Clone>(store: B) {
    for (before, after) in limits(2).into_iter().zip(limits(5)) {
        let (before, after) = (limiter(&store, "higher", before), limiter(&store, "higher", after));
        assert!(before.check_cost("alice", 2).await.unwrap().is_allowed());
        assert_eq!(after.check("alice").await.unwrap().remaining(), Some(2));
    }
}

pub async fn another_window_starts_afresh<B: RateLimitStore + Clone>(store: B) {
    for (before, after) in limits(1).into_iter().zip(limits_of(1, LONG * 2)) {
        let (before, after) = (limiter(&store, "window", before), limiter(&store, "window", after));
        assert!(before.check("alice").await.unwrap().is_allowed());
        assert!(after.check("alice").await.unwrap().is_allowed());
    }
}

pub async fn a_fixed_window_ends_all_at_once<B: RateLimitStore + Clone>(store: B) {
    let [fixed, _] = limits_of(3, SHORT);
    let limiter = limiter(&store, "fixed", fixed);
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    sleep(SHORT / 2).await;
    assert_eq!(limiter.check_cost("alice", 2).await.unwrap().remaining(), Some(0));
    sleep(SHORT * 3 / 4).await;
    // The window opened with the first request, so all three units are back, those of the second request too.
    assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(3));
}

pub async fn a_sliding_log_never_admits_more_in_any_window<B: RateLimitStore + Clone>(store: B) {
    const LIMIT: usize = 4;
    let [_, log] = limits_of(LIMIT as u32, SHORT);
    let limiter = limiter(&store, "sliding", log);
    let start = Instant::now();
    let mut admitted = Vec::new();
    while start.elapsed() < SHORT * 3 {
        let asked = Instant::now();
        if limiter.check("alice").await.unwrap().is_allowed() {
            // The store decided somewhere between these two.
            admitted.push((asked, Instant::now()));
        }
        sleep(Duration::from_millis(7)).await;
    }
    for span in admitted.windows(LIMIT + 1) {
        let (first, last) = (span[0], span[LIMIT]);
        assert!(last.1 - first.0 >= SHORT, "{} admitted within {:?}", LIMIT + 1, last.1 - first.0);
    }
    // Asked all the time, it admits all there is: the quota at once and again with every window.
    assert!(admitted.len() >= LIMIT * 2, "only {} admitted", admitted.len());
}

pub async fn a_full_sliding_log_works<B: RateLimitStore + Clone>(store: B) {
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

pub async fn the_longest_windows_and_the_largest_costs_are_counted<B: RateLimitStore + Clone>(store: B) {
    let [_, log] = limits_of(Quota::MAX_SLIDING_LOG, Quota::MAX_WINDOW);
    let fixed = Quota::new(u32::MAX, Quota::MAX_WINDOW).unwrap().fixed_window();
    for limit in [fixed, log] {
        let most = limit.quota().limit();
        let limiter = limiter(&store, "longest", limit);
        assert_eq!(limiter.check_cost("alice", most - 1).await.unwrap().remaining(), Some(1));
        assert_eq!(limiter.check("alice").await.unwrap().remaining(), Some(0));
        let wait = limiter.check_cost("alice", most).await.unwrap().retry_after().unwrap();
        assert!(wait <= Quota::MAX_WINDOW && wait > Quota::MAX_WINDOW - Duration::from_secs(60), "{wait:?}");
        limiter.reset("alice").await.unwrap();
        assert!(limiter.check_cost("alice", most).await.unwrap().is_allowed());
    }
}

pub async fn racing_callers_get_the_quota_between_them<B>(store: B)
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
        // Fifty got through, and no two saw the same number left.
        assert_eq!(left, (0..50).map(Some).collect::<Vec<_>>());
    }
}

pub async fn any_bytes_are_a_subject<B: RateLimitStore + Clone>(store: B) {
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
