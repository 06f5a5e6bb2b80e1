//! The store contract on the memory backend, on a paused clock, and tests that are specific to this backend.

use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use tokio::time::advance;
use tollgate::rate_limit::store::{RateLimitStore, Request};
use tollgate::rate_limit::{LimitStatus, Mode, Outcome, QuotaChange, Receipt};
use tollgate::{Key, Limiter, MemoryBackend, Policy, Quota};

tollgate::rate_limit_contract!(
    #[tokio::test(start_paused = true)]
    async {
        MemoryBackend::new()
    }
);

fn limiter(backend: &MemoryBackend, quota: Quota) -> Limiter<MemoryBackend> {
    Limiter::new(backend.clone(), Policy::new("memory", quota.fixed_window()))
}

#[tokio::test(start_paused = true)]
async fn receipt_from_a_clock_ahead_does_not_panic() {
    let quota = Quota::per_hour(10);
    let limits = [quota.token_bucket(), quota.fixed_window(), quota.sliding_window(), quota.sliding_log().unwrap()];
    for limit in limits {
        let limiter = Limiter::new(MemoryBackend::new(), Policy::new("memory", limit));
        let _ = limiter.check("alice").await.unwrap();
        for at in [0, 1_800_000_000_000_000, u64::MAX] {
            limiter.settle("alice", Receipt::at_micros(at), -1).await.unwrap();
        }
        let left = limiter.peek("alice").await.unwrap().remaining().unwrap();
        assert!((9..=10).contains(&left), "{limit:?}");
    }
}

/// Regression: a `Limiter` denied requests under a shadow policy.
#[tokio::test(start_paused = true)]
async fn shadow_policy_denies_no_request() {
    let quota = Quota::per_hour(1);
    let limits =
        [quota.token_bucket(), quota.sliding_log().unwrap(), quota.fixed_window(), Quota::per_hour(0).fixed_window()];
    for limit in limits {
        let limiter = Limiter::new(MemoryBackend::new(), Policy::new("trial", limit).shadow());
        let since = tokio::time::Instant::now();
        for turn in 0..3 {
            assert!(limiter.try_acquire("alice").await.unwrap(), "{limit:?}");
            assert!(limiter.acquire("bob", Duration::from_secs(7_200)).await.unwrap().is_allowed(), "{limit:?}");
            let decision = limiter.check("carol").await.unwrap();
            assert_eq!((decision.outcome(), decision.retry_after()), (Outcome::Allowed, None), "{limit:?}");
            // The decision shows the state of the store.
            let fits = turn == 0 && limit.capacity() > 0;
            assert_eq!((decision.receipt().is_some(), decision.remaining()), (fits, Some(0)), "{limit:?}");
            assert_eq!(decision.limits()[0].is_violated(), turn > 0 && limit.capacity() > 0, "{limit:?}");
            assert!(!limiter.peek("carol").await.unwrap().is_allowed(), "{limit:?}");
        }
        limiter.block("alice", Duration::from_secs(7_200)).await.unwrap();
        assert!(limiter.try_acquire("alice").await.unwrap(), "{limit:?}");
        assert!(limiter.check_cost("dave", 2).await.unwrap().is_allowed(), "{limit:?}");
        assert_eq!(since.elapsed(), Duration::ZERO);
    }
}

#[tokio::test(start_paused = true)]
async fn policy_denies_its_enforced_share_of_keys() {
    let policy = Policy::new("trial", Quota::per_hour(1).fixed_window()).mode(Mode::Percent(30));
    let limiter = Limiter::new(MemoryBackend::new(), policy);
    let mut denied = 0;
    for client in 0..1_000_u32 {
        let passes = !limiter.policy().is_enforced_for(&Key::from(client));
        assert!(limiter.try_acquire(client).await.unwrap());
        assert_eq!(limiter.try_acquire(client).await.unwrap(), passes);
        assert_eq!(limiter.check(client).await.unwrap().is_allowed(), passes);
        assert_eq!(limiter.acquire(client, Duration::ZERO).await.unwrap().is_allowed(), passes);
        denied += u32::from(!passes);
    }
    assert!((240..360).contains(&denied), "{denied} of 1,000");
}

#[tokio::test(start_paused = true)]
async fn retry_after_less_a_microsecond_is_too_short() {
    let policy = Policy::new("edge", Quota::per_second(2).sliding_log().unwrap());
    let limiter = Limiter::new(MemoryBackend::new(), policy);
    let _ = limiter.check("alice").await.unwrap();
    advance(Duration::from_micros(1_234)).await;
    let _ = limiter.check("alice").await.unwrap();
    let wait = limiter.check("alice").await.unwrap().retry_after().unwrap();
    assert_eq!(wait, Duration::from_micros(1_000_000 - 1_234));
    advance(wait - Duration::from_micros(1)).await;
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
    advance(Duration::from_micros(1)).await;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn memory_is_bounded_for_any_keys() {
    for capacity in [0, 1, 7, 100, 1_000] {
        let backend = MemoryBackend::with_capacity(capacity);
        let limiter = limiter(&backend, Quota::per_hour(10));
        for i in 0..5_000_u32 {
            assert!(limiter.check(i).await.unwrap().is_allowed());
            assert!(backend.len() <= capacity.max(1), "{} keys with room for {capacity}", backend.len());
        }
        assert!(backend.len() > capacity / 2, "only {} keys with room for {capacity}", backend.len());
    }
}

#[tokio::test(start_paused = true)]
async fn long_log_takes_the_room_of_many_keys() {
    let backend = MemoryBackend::with_capacity(60);
    let policy = Policy::new("logs", Quota::per_hour(200).sliding_log().unwrap());
    let limiter = Limiter::new(backend.clone(), policy);
    for subject in 0..20_u32 {
        for _ in 0..200 {
            assert!(limiter.check(subject).await.unwrap().is_allowed());
        }
    }
    // A log of 200 requests takes the room of more than 25 keys, so at most two logs fit.
    assert!((1..=2).contains(&backend.len()), "{} logs", backend.len());
}

#[tokio::test(start_paused = true)]
async fn long_log_and_its_neighbours_are_not_evicted() {
    // A log of this length takes more room than an equal share of a shard.
    let policy = Policy::new("long", Quota::per_hour(10_000).sliding_log().unwrap());
    let backend = MemoryBackend::new();
    let long = Limiter::new(backend.clone(), policy);
    let short = limiter(&backend, Quota::per_hour(1));
    for neighbour in 0..2_000_u32 {
        assert!(short.check(neighbour).await.unwrap().is_allowed());
    }
    for _ in 0..10_000 {
        assert!(long.check("alice").await.unwrap().is_allowed());
    }
    for neighbour in 2_000..4_000_u32 {
        assert!(short.check(neighbour).await.unwrap().is_allowed());
    }
    assert!(!long.check("alice").await.unwrap().is_allowed(), "the log was evicted");
    for neighbour in 0..4_000_u32 {
        assert!(!short.check(neighbour).await.unwrap().is_allowed(), "{neighbour} was evicted");
    }
}

#[tokio::test(start_paused = true)]
async fn growing_log_evicts_the_least_valuable_keys() {
    let backend = MemoryBackend::with_capacity(4_000);
    let (short, strict) =
        (limiter(&backend, Quota::per_hour(1_000)), Policy::new("strict", Quota::per_hour(1).fixed_window()));
    let strict = Limiter::new(backend.clone(), strict);
    // One client in twenty has used up its quota. The others have used little of theirs.
    for client in 0..3_999_u32 {
        let limiter = if client % 20 == 0 { &strict } else { &short };
        assert!(limiter.check(client).await.unwrap().is_allowed());
    }
    let log = Limiter::new(backend.clone(), Policy::new("log", Quota::per_hour(10_000).sliding_log().unwrap()));
    for _ in 0..10_000 {
        assert!(log.check("alice").await.unwrap().is_allowed());
    }
    assert!(!log.check("alice").await.unwrap().is_allowed());
    // The log takes the room of 1,251 keys, whichever shard it is in.
    assert!((2_500..3_000).contains(&backend.len()), "{} keys", backend.len());
    for client in (0..3_999_u32).step_by(20) {
        assert!(!strict.check(client).await.unwrap().is_allowed(), "{client} was evicted");
    }
}

#[tokio::test(start_paused = true)]
async fn acquire_waits_as_long_as_needed_and_never_in_vain() {
    let policy = Policy::new("wait", Quota::new(10, Duration::from_secs(1)).unwrap().burst(2).unwrap().token_bucket());
    let limiter = Limiter::new(MemoryBackend::new(), policy);
    let since = tokio::time::Instant::now();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..22 {
        let limiter = limiter.clone();
        waiting.spawn(async move { limiter.acquire("alice", Duration::from_secs(5)).await.unwrap().is_allowed() });
    }
    assert!(waiting.join_all().await.into_iter().all(|allowed| allowed));
    // Two requests at once, then twenty at ten per second, however many wait. A timer counts whole milliseconds.
    let took = since.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_millis(2_050), "{took:?}");

    let since = tokio::time::Instant::now();
    let denied = limiter.acquire("alice", Duration::from_millis(10)).await.unwrap();
    assert!(denied.retry_after() > Some(Duration::from_millis(10)), "{denied:?}");
    let never = limiter.acquire_cost("alice", 3, Duration::from_secs(5)).await.unwrap();
    limiter.block("alice", Duration::from_secs(10)).await.unwrap();
    let blocked = limiter.acquire("alice", Duration::from_secs(5)).await.unwrap();
    assert_eq!((never.outcome(), blocked.outcome()), (Outcome::Never, Outcome::Blocked));
    assert!(since.elapsed() < Duration::from_millis(10), "{:?}", since.elapsed());
    assert!(limiter.acquire("alice", Duration::from_secs(11)).await.unwrap().is_allowed());
    assert!(since.elapsed() >= Duration::from_secs(10));
}

/// Threads that are preempted between two steps must not change the order of requests. Regression: a thread read the clock, was preempted,
/// and stored its older time behind newer ones. To the next request, the log seemed expired.
#[test]
fn racing_threads_never_exceed_a_sliding_log() {
    const LIMIT: usize = 200;
    const WINDOW: Duration = Duration::from_millis(20);
    let policy = Policy::new("race", Quota::new(LIMIT as u64, WINDOW).unwrap().sliding_log().unwrap());
    let limiter = Limiter::new(MemoryBackend::new(), policy);
    let start = Instant::now();
    let admitted = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let mut own = Vec::new();
                while start.elapsed() < Duration::from_secs(1) {
                    let sent = start.elapsed();
                    let decision = now(limiter.check("alice")).unwrap();
                    if decision.is_allowed() {
                        // The backend decided between these two instants.
                        own.push((sent, start.elapsed()));
                    } else {
                        assert!(decision.retry_after().unwrap() <= WINDOW, "{decision:?}");
                    }
                }
                admitted.lock().unwrap().extend(own);
            });
        }
    });
    let mut admitted = admitted.into_inner().unwrap();
    admitted.sort_by_key(|(_, replied)| *replied);
    // Requests that were sent and answered within less than a window were decided within one window. Rounding loses a microsecond at each
    // end.
    for (i, (_, replied)) in admitted.iter().enumerate() {
        let latest = replied.saturating_sub(WINDOW - Duration::from_micros(2));
        let within =
            admitted[..=i].iter().rev().take_while(|(_, replied)| *replied > latest).filter(|(sent, _)| *sent > latest);
        assert!(within.count() <= LIMIT, "more than {LIMIT} within {WINDOW:?} before {replied:?}");
    }
    assert!(admitted.len() > 20 * LIMIT, "only {} admitted", admitted.len());
}

#[tokio::test(start_paused = true)]
async fn flood_of_new_keys_evicts_no_limited_keys() {
    let backend = MemoryBackend::with_capacity(2_000);
    let limiter = limiter(&backend, Quota::per_hour(5));
    let culprits = 0..50_u32;
    for culprit in culprits.clone() {
        assert!(limiter.check_cost(culprit, 5).await.unwrap().is_allowed());
    }
    for stranger in 1_000..100_000_u32 {
        let _ = limiter.check(stranger).await.unwrap();
    }
    for culprit in culprits {
        assert!(!limiter.check(culprit).await.unwrap().is_allowed(), "{culprit} was evicted");
    }
}

#[tokio::test(start_paused = true)]
async fn expired_keys_make_room_for_new_keys() {
    let backend = MemoryBackend::new();
    let limiter = limiter(&backend, Quota::per_second(5));
    for old in 0..10_000_u32 {
        let _ = limiter.check(old).await.unwrap();
    }
    assert_eq!(backend.len(), 10_000);
    advance(Duration::from_secs(2)).await;
    for new in 10_000..20_000_u32 {
        let _ = limiter.check(new).await.unwrap();
    }
    assert!(backend.len() < 11_000, "{} keys, of which 10,000 are alive", backend.len());
}

/// Regression: with a large quota over a long time, a count expires within a moment. The next new key evicted it, and its next request
/// added it again. So most requests were those of new keys.
#[tokio::test(start_paused = true)]
async fn recently_expired_keys_stay() {
    let backend = MemoryBackend::new();
    let limiter = Limiter::new(backend.clone(), Policy::new("large", Quota::per_day(1_000_000_000).token_bucket()));
    for client in 0..10_000_u32 {
        let _ = limiter.check(client).await.unwrap();
        advance(Duration::from_micros(90)).await;
    }
    assert_eq!(backend.len(), 10_000);
}

/// Tests that share a backend in a `static` do this: each has its own clock, which starts when the test starts.
#[test]
fn clock_behind_another_runtime_refunds_nothing() {
    let backend = MemoryBackend::new();
    let policy = Policy::new("several", Quota::per_hour(3).token_bucket())
        .limit(Quota::per_hour(3).fixed_window())
        .limit(Quota::per_hour(3).sliding_window())
        .limit(Quota::per_hour(3).sliding_log().unwrap());
    let limiter = Limiter::new(backend, policy);
    for turn in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            if turn == 0 {
                advance(Duration::from_secs(60)).await;
            }
            assert!(limiter.peek("alice").await.unwrap().is_allowed());
            let decision = limiter.check("alice").await.unwrap();
            let left: Vec<_> = decision.limits().iter().map(LimitStatus::remaining).collect();
            assert_eq!(left, [2 - turn; 4]);
            if turn == 1 {
                limiter.settle("alice", decision.receipt().unwrap(), 0).await.unwrap();
            }
        });
    }
}

#[tokio::test(start_paused = true)]
async fn charge_now_charges_a_new_key_like_a_check() {
    let policy = Policy::new("yes", Quota::per_hour(10).token_bucket());
    for cost in 1..=10 {
        let (backend, key) = (MemoryBackend::new(), Key::from("alice"));
        let charged = backend.charge_now(&policy, &key, cost).unwrap();
        assert_eq!(charged.is_near_limit, cost > 8, "{cost} of 10");
        assert_eq!(backend.peek(&policy, &key, 1).await.unwrap().remaining(), Some(10 - cost));
        assert_eq!(backend.charge_now(&policy, &key, 11 - cost), None);
        assert_eq!(backend.peek(&policy, &key, 1).await.unwrap().remaining(), Some(10 - cost));
    }
}

#[tokio::test(start_paused = true)]
async fn unpolled_check_charges_nothing() {
    let backend = MemoryBackend::new();
    let limiter = limiter(&backend, Quota::per_hour(1));
    drop(limiter.check("alice"));
    assert!(backend.is_empty());
}

/// Regression: a fixed or sliding window was opened for the unblocked key, and kept for its whole length.
#[tokio::test(start_paused = true)]
async fn lifting_an_absent_block_stores_nothing() {
    let backend = MemoryBackend::new();
    let quota = Quota::per_hour(1);
    for limit in [quota.fixed_window(), quota.sliding_window(), quota.token_bucket(), quota.sliding_log().unwrap()] {
        Limiter::new(backend.clone(), Policy::new("lift", limit)).block("alice", Duration::ZERO).await.unwrap();
        assert!(backend.is_empty(), "{limit:?}");
    }
}

#[test]
fn check_needs_no_runtime() {
    let limiter = limiter(&MemoryBackend::new(), Quota::per_hour(1));
    assert!(now(limiter.check("alice")).unwrap().is_allowed());
}

/// Returns the result of a call that completes at once.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("a call of the memory backend is pending"),
    }
}

#[tokio::test(start_paused = true)]
async fn denial_of_several_keys_converts_no_counts() {
    let backend = MemoryBackend::new();
    let [free, pro] = [10, 100].map(|units| {
        let policy = Policy::new("plan", Quota::per_hour(units).fixed_window());
        policy.on_quota_change(QuotaChange::Reset)
    });
    let [alice, bob] = ["alice", "bob"].map(Key::from);
    assert!(backend.check(&free, &alice, 7).await.unwrap().is_allowed());
    backend.block(&pro, &bob, Duration::from_secs(60)).await.unwrap();
    // Alice has room under the new quota, and bob is blocked.
    let requests = [alice, bob].map(|key| Request { policy: pro.clone(), key, cost: 1 });
    let decisions = backend.check_all(&requests).await.unwrap();
    assert!(decisions[0].is_allowed() && !decisions[1].is_allowed());
    assert_eq!(backend.peek(&free, &alice, 1).await.unwrap().remaining(), Some(3));
}

/// Regression: a check looked at every policy that counts the same key, so 10,000 policies made it a hundred times slower.
#[tokio::test(start_paused = true)]
async fn check_takes_no_longer_with_many_policies_on_one_key() {
    const POLICIES: usize = 10_000;
    let backend = MemoryBackend::with_capacity(2 * POLICIES);
    let [crowded, single] = ["crowded", "single"].map(Key::from);
    let policy = |tenant: usize| Policy::new(format!("tenant-{tenant}"), Quota::per_hour(1_000_000).fixed_window());
    let policies: Vec<Policy> = (0..POLICIES).map(policy).collect();
    for policy in &policies {
        assert!(backend.check_now(policy, &crowded, 1).unwrap().is_allowed());
    }
    assert_eq!(backend.len(), POLICIES);
    let last = &policies[POLICIES - 1];
    // The fastest of many batches, since other load on the machine only adds time.
    let fastest = |key: &Key| {
        let batch = || {
            let since = Instant::now();
            for _ in 0..100 {
                assert!(backend.check_now(last, key, 1).unwrap().is_allowed());
            }
            since.elapsed()
        };
        (0..50).map(|_| batch()).min().unwrap()
    };
    let (among_many, alone) = (fastest(&crowded), fastest(&single));
    assert!(among_many < 10 * alone, "{among_many:?} among many, {alone:?} alone");
    for policy in &policies {
        backend.reset(policy, &crowded).await.unwrap();
    }
    assert_eq!(backend.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn policies_of_one_key_share_the_capacity() {
    let backend = MemoryBackend::with_capacity(1_000);
    for tenant in 0..20_000 {
        let policy = Policy::new(format!("tenant-{tenant}"), Quota::per_hour(2).token_bucket());
        assert!(backend.check_now(&policy, &Key::GLOBAL, 1).unwrap().is_allowed());
        assert!(backend.len() <= 1_000);
    }
    assert!(backend.len() > 500);
}
