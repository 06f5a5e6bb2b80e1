//! Decisions by the counter of the processor, in real time: any other test of this crate could pause tokio's clock, so that none of them has a
//! counter.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use super::MemoryBackend;
use super::clock::Clock;
use crate::key::Key;
use crate::rate_limit::{Decision, Policy, Quota, RateLimitStore, Request};

crate::rate_limit_contract!(async { backend(quanta::Clock::new()) });

fn backend(counter: quanta::Clock) -> MemoryBackend {
    MemoryBackend::with_clock(MemoryBackend::DEFAULT_CAPACITY, Clock::with_counter(counter))
}

#[test]
fn racing_threads_get_the_quota_between_them() {
    const LIMIT: u32 = 50;
    let quota = Quota::per_hour(LIMIT);
    let plenty = Policy::new("plenty", Quota::per_hour(1_000_000_000).fixed_window());
    let [alice, bob] = ["alice", "bob"].map(Key::from);
    for limit in [quota.fixed_window(), quota.sliding_log().unwrap(), quota.sliding_window(), quota.token_bucket()] {
        let (backend, policy) = (backend(quanta::Clock::new()), Policy::new("race", limit));
        let together =
            [(&policy, alice), (&plenty, bob)].map(|(policy, key)| Request { policy: policy.clone(), key, cost: 1 });
        let (admitted, begun) = (AtomicU32::new(0), Instant::now());
        thread::scope(|scope| {
            for thread in 0..6 {
                let (backend, policy, together, admitted) = (&backend, &policy, &together, &admitted);
                scope.spawn(move || {
                    while begun.elapsed() < Duration::from_millis(150) {
                        let is_admitted = match thread % 3 {
                            0 => backend.check_now(policy, &alice, 1).is_some_and(|decision| decision.is_allowed()),
                            1 => backend.charge_now(policy, &alice, 1).is_some(),
                            _ => now(backend.check_all(together)).unwrap().iter().all(Decision::is_allowed),
                        };
                        admitted.fetch_add(is_admitted.into(), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), LIMIT, "{limit:?}");
    }
}

#[test]
fn nobody_is_told_less_than_a_decision_on_several_was() {
    // Stands still, so each shard believes for good what time it was when somebody came for the first time.
    let (counter, _) = quanta::Clock::mock();
    let backend = backend(counter);
    let policy = Policy::new("several", Quota::per_hour(10).fixed_window());
    let home = |key: &Key| backend.locate(&policy, key).1;
    let early = Key::from(0);
    let late = (1..).map(Key::from).find(|key| home(key) != home(&early)).unwrap();
    let time = |key: &Key| backend.now_us(&mut backend.lock(home(key)));
    for key in [&early, &late] {
        thread::sleep(Duration::from_millis(5));
        time(key);
    }
    assert!(time(&early) < time(&late));
    let requests = [early, late].map(|key| Request { policy: policy.clone(), key, cost: 1 });
    assert!(now(backend.check_all(&requests)).unwrap().iter().all(Decision::is_allowed));
    assert!(time(&early) >= time(&late));
}

/// The answer of a call that does not wait.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("memory answers at once"),
    }
}
