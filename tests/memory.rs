//! The contract on the memory backend, on a paused clock, and what is particular to it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod contract;

use std::time::Duration;

use tokio::time::advance;
use tollgate::{Limiter, MemoryBackend, Policy, Quota};

macro_rules! on_memory {
    ($($claim:ident),* $(,)?) => {$(
        #[tokio::test(start_paused = true)]
        async fn $claim() {
            contract::rate_limit::$claim(MemoryBackend::new()).await;
        }
    )*};
}

contract::rate_limit::for_each_claim!(on_memory);

fn limiter(backend: &MemoryBackend, quota: Quota) -> Limiter<MemoryBackend> {
    Limiter::new(backend.clone(), Policy::new("memory", quota.fixed_window()))
}

#[tokio::test(start_paused = true)]
async fn waiting_a_microsecond_less_than_told_is_not_enough() {
    let policy = Policy::new("edge", Quota::per_second(2).sliding_log().unwrap());
    let limiter = Limiter::new(MemoryBackend::new(), policy);
    limiter.check("alice").await.unwrap();
    advance(Duration::from_micros(1_234)).await;
    limiter.check("alice").await.unwrap();
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
async fn a_flood_of_new_keys_does_not_free_those_who_are_limited() {
    let backend = MemoryBackend::with_capacity(2_000);
    let limiter = limiter(&backend, Quota::per_hour(5));
    let culprits = 0..50_u32;
    for culprit in culprits.clone() {
        assert!(limiter.check_cost(culprit, 5).await.unwrap().is_allowed());
    }
    for stranger in 1_000..100_000_u32 {
        limiter.check(stranger).await.unwrap();
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
        limiter.check(old).await.unwrap();
    }
    assert_eq!(backend.len(), 10_000);
    advance(Duration::from_secs(2)).await;
    for new in 10_000..20_000_u32 {
        limiter.check(new).await.unwrap();
    }
    assert!(backend.len() < 11_000, "{} keys, of which 10,000 are alive", backend.len());
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_never_polled_charges_nothing() {
    let backend = MemoryBackend::new();
    let limiter = limiter(&backend, Quota::per_hour(1));
    drop(limiter.check("alice"));
    assert!(backend.is_empty());
}

#[test]
fn a_check_needs_no_runtime() {
    let limiter = limiter(&MemoryBackend::new(), Quota::per_hour(1));
    let mut check = std::pin::pin!(limiter.check("alice"));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(matches!(check.as_mut().poll(&mut context), std::task::Poll::Ready(Ok(decision)) if decision.is_allowed()));
}
