//! The contract on the memory backend, on a paused clock, and what is particular to it.

use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use tokio::time::advance;
use tollgate::rate_limit::{LimitStatus, Mode, Outcome, QuotaChange, RateLimitStore, Receipt, Request};
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
async fn a_receipt_of_a_clock_that_is_ahead_is_no_panic() {
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

/// It happened that a `Limiter` denied by a policy that was only to be tried.
#[tokio::test(start_paused = true)]
async fn a_policy_that_is_not_enforced_denies_nobody() {
    let quota = Quota::per_hour(1);
    let limits =
        [quota.token_bucket(), quota.sliding_log().unwrap(), quota.fixed_window(), Quota::per_hour(0).fixed_window()];
    for limit in limits {
        let limiter = Limiter::new(MemoryBackend::new(), Policy::new("trial", limit).shadow());
        let begun = tokio::time::Instant::now();
        for turn in 0..3 {
            assert!(limiter.try_acquire("alice").await.unwrap(), "{limit:?}");
            assert!(limiter.acquire("bob", Duration::from_secs(7_200)).await.unwrap().is_allowed(), "{limit:?}");
            let decision = limiter.check("carol").await.unwrap();
            assert_eq!((decision.outcome(), decision.retry_after()), (Outcome::Allowed, None), "{limit:?}");
            // What the store says can be seen.
            let fits = turn == 0 && limit.capacity() > 0;
            assert_eq!((decision.receipt().is_some(), decision.remaining()), (fits, Some(0)), "{limit:?}");
            assert_eq!(decision.limits()[0].is_violated(), turn > 0 && limit.capacity() > 0, "{limit:?}");
            assert!(!limiter.peek("carol").await.unwrap().is_allowed(), "{limit:?}");
        }
        limiter.block("alice", Duration::from_secs(7_200)).await.unwrap();
        assert!(limiter.try_acquire("alice").await.unwrap(), "{limit:?}");
        assert!(limiter.check_cost("dave", 2).await.unwrap().is_allowed(), "{limit:?}");
        assert_eq!(begun.elapsed(), Duration::ZERO);
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
async fn waiting_a_microsecond_less_than_told_is_not_enough() {
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
async fn memory_is_bounded_whatever_keys_come() {
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
async fn long_logs_take_the_room_of_many_keys() {
    let backend = MemoryBackend::with_capacity(60);
    let policy = Policy::new("logs", Quota::per_hour(200).sliding_log().unwrap());
    let limiter = Limiter::new(backend.clone(), policy);
    for subject in 0..20_u32 {
        for _ in 0..200 {
            assert!(limiter.check(subject).await.unwrap().is_allowed());
        }
    }
    // 200 requests weigh as much as 25 keys and more, so two such logs fit at the most.
    assert!((1..=2).contains(&backend.len()), "{} logs", backend.len());
}

#[tokio::test(start_paused = true)]
async fn a_long_log_survives_its_neighbours_and_they_survive_it() {
    // A log of this length weighs more than a fair share of the shards would allow.
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
    assert!(!long.check("alice").await.unwrap().is_allowed(), "the log was forgotten");
    for neighbour in 0..4_000_u32 {
        assert!(!short.check(neighbour).await.unwrap().is_allowed(), "{neighbour} was forgotten");
    }
}

#[tokio::test(start_paused = true)]
async fn growing_log_evicts_the_least_valuable_keys() {
    let backend = MemoryBackend::with_capacity(4_000);
    let (short, strict) =
        (limiter(&backend, Quota::per_hour(1_000)), Policy::new("strict", Quota::per_hour(1).fixed_window()));
    let strict = Limiter::new(backend.clone(), strict);
    // One client in twenty has used up its quota; the others have hardly begun.
    for client in 0..3_999_u32 {
        let limiter = if client % 20 == 0 { &strict } else { &short };
        assert!(limiter.check(client).await.unwrap().is_allowed());
    }
    let log = Limiter::new(backend.clone(), Policy::new("log", Quota::per_hour(10_000).sliding_log().unwrap()));
    for _ in 0..10_000 {
        assert!(log.check("alice").await.unwrap().is_allowed());
    }
    assert!(!log.check("alice").await.unwrap().is_allowed());
    // The log takes the room of 1,251 of them, whichever shard it is in.
    assert!((2_500..3_000).contains(&backend.len()), "{} keys", backend.len());
    for client in (0..3_999_u32).step_by(20) {
        assert!(!strict.check(client).await.unwrap().is_allowed(), "{client} was forgotten");
    }
}

#[tokio::test(start_paused = true)]
async fn who_acquires_waits_for_as_long_as_it_takes_and_never_in_vain() {
    let policy = Policy::new("wait", Quota::new(10, Duration::from_secs(1)).unwrap().burst(2).unwrap().token_bucket());
    let limiter = Limiter::new(MemoryBackend::new(), policy);
    let begun = tokio::time::Instant::now();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..22 {
        let limiter = limiter.clone();
        waiting.spawn(async move { limiter.acquire("alice", Duration::from_secs(5)).await.unwrap().is_allowed() });
    }
    assert!(waiting.join_all().await.into_iter().all(|allowed| allowed));
    // Two at once and twenty at ten a second, however many asked at a time; a timer counts whole milliseconds.
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_millis(2_050), "{took:?}");

    let begun = tokio::time::Instant::now();
    let denied = limiter.acquire("alice", Duration::from_millis(10)).await.unwrap();
    assert!(denied.retry_after() > Some(Duration::from_millis(10)), "{denied:?}");
    let never = limiter.acquire_cost("alice", 3, Duration::from_secs(5)).await.unwrap();
    limiter.block("alice", Duration::from_secs(10)).await.unwrap();
    let blocked = limiter.acquire("alice", Duration::from_secs(5)).await.unwrap();
    assert_eq!((never.outcome(), blocked.outcome()), (Outcome::Never, Outcome::Blocked));
    assert!(begun.elapsed() < Duration::from_millis(10), "{:?}", begun.elapsed());
    assert!(limiter.acquire("alice", Duration::from_secs(11)).await.unwrap().is_allowed());
    assert!(begun.elapsed() >= Duration::from_secs(10));
}

/// Threads that are preempted between two steps must not mix up the order of requests: it happened that one read the clock,
/// lost the processor, and put its older time behind newer ones. Whoever came next found the log to have run out.
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
                    let asked = start.elapsed();
                    let decision = now(limiter.check("alice")).unwrap();
                    if decision.is_allowed() {
                        // Memory decided somewhere between these two.
                        own.push((asked, start.elapsed()));
                    } else {
                        assert!(decision.retry_after().unwrap() <= WINDOW, "{decision:?}");
                    }
                }
                admitted.lock().unwrap().extend(own);
            });
        }
    });
    let mut admitted = admitted.into_inner().unwrap();
    admitted.sort_by_key(|(_, told)| *told);
    // Everything that was asked and told within less than a window was decided within one. (A microsecond is lost to
    // rounding at each end.)
    for (i, (_, told)) in admitted.iter().enumerate() {
        let latest = told.saturating_sub(WINDOW - Duration::from_micros(2));
        let within =
            admitted[..=i].iter().rev().take_while(|(_, told)| *told > latest).filter(|(asked, _)| *asked > latest);
        assert!(within.count() <= LIMIT, "more than {LIMIT} within {WINDOW:?} before {told:?}");
    }
    assert!(admitted.len() > 20 * LIMIT, "only {} admitted", admitted.len());
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_new_keys_does_not_free_those_who_are_limited() {
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
        assert!(!limiter.check(culprit).await.unwrap().is_allowed(), "{culprit} was forgotten");
    }
}

#[tokio::test(start_paused = true)]
async fn keys_that_ran_out_make_way_for_new_ones() {
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

/// With a large quota for a long time a count runs out within a moment. It was dropped for the next newcomer then and put down anew with
/// the next request, so that most requests were those of newcomers.
#[tokio::test(start_paused = true)]
async fn keys_that_have_only_just_run_out_stay() {
    let backend = MemoryBackend::new();
    let limiter = Limiter::new(backend.clone(), Policy::new("large", Quota::per_day(1_000_000_000).token_bucket()));
    for client in 0..10_000_u32 {
        let _ = limiter.check(client).await.unwrap();
        advance(Duration::from_micros(90)).await;
    }
    assert_eq!(backend.len(), 10_000);
}

/// As in tests that have a backend in a `static`, and each a clock of its own that begins now.
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
async fn a_mere_yes_to_a_newcomer_is_charged_as_a_decision_is() {
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
async fn a_check_that_is_never_polled_charges_nothing() {
    let backend = MemoryBackend::new();
    let limiter = limiter(&backend, Quota::per_hour(1));
    drop(limiter.check("alice"));
    assert!(backend.is_empty());
}

/// A fixed or sliding window was opened for whoever was let go, and kept for its whole length.
#[tokio::test(start_paused = true)]
async fn lifting_a_block_that_nobody_has_keeps_nothing() {
    let backend = MemoryBackend::new();
    let quota = Quota::per_hour(1);
    for limit in [quota.fixed_window(), quota.sliding_window(), quota.token_bucket(), quota.sliding_log().unwrap()] {
        Limiter::new(backend.clone(), Policy::new("lift", limit)).block("alice", Duration::ZERO).await.unwrap();
        assert!(backend.is_empty(), "{limit:?}");
    }
}

#[test]
fn a_check_needs_no_runtime() {
    let limiter = limiter(&MemoryBackend::new(), Quota::per_hour(1));
    assert!(now(limiter.check("alice")).unwrap().is_allowed());
}

/// The answer of a call that does not wait.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("memory answers at once"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_denial_of_several_converts_no_counts() {
    let backend = MemoryBackend::new();
    let [free, pro] = [10, 100].map(|units| {
        let policy = Policy::new("plan", Quota::per_hour(units).fixed_window());
        policy.on_quota_change(QuotaChange::Reset)
    });
    let [alice, bob] = ["alice", "bob"].map(Key::from);
    assert!(backend.check(&free, &alice, 7).await.unwrap().is_allowed());
    backend.block(&pro, &bob, Duration::from_secs(60)).await.unwrap();
    // Alice has room under the new numbers, and bob is blocked.
    let requests = [alice, bob].map(|key| Request { policy: pro.clone(), key, cost: 1 });
    let decisions = backend.check_all(&requests).await.unwrap();
    assert!(decisions[0].is_allowed() && !decisions[1].is_allowed());
    assert_eq!(backend.peek(&free, &alice, 1).await.unwrap().remaining(), Some(3));
}

/// A check looked at each policy that counts the same key, so that it took a hundred times as long with 10,000 of them.
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
    // The fastest of many batches: whatever else runs on the machine only adds to it.
    let fastest = |key: &Key| {
        let batch = || {
            let begun = Instant::now();
            for _ in 0..100 {
                assert!(backend.check_now(last, key, 1).unwrap().is_allowed());
            }
            begun.elapsed()
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
async fn policies_of_one_key_share_the_room_as_keys_do() {
    let backend = MemoryBackend::with_capacity(1_000);
    for tenant in 0..20_000 {
        let policy = Policy::new(format!("tenant-{tenant}"), Quota::per_hour(2).token_bucket());
        assert!(backend.check_now(&policy, &Key::GLOBAL, 1).unwrap().is_allowed());
        assert!(backend.len() <= 1_000);
    }
    assert!(backend.len() > 500);
}
