//! The cost of a decision on the memory backend.
//!
//! `cargo bench --bench memory` runs the criterion benchmarks, and ends with the time of one `Limiter::check` on one thread. `check_ns` is
//! over 1,000 keys, which stay in the processor's cache. `check_100k_keys_ns` is over as many keys as a backend keeps by default, where
//! nearly every check waits for main memory. `policies_100k_ratio` divides the time for a key that 100,000 policies count by the time for a
//! key that one policy counts.

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use criterion::{Criterion, Throughput};
use tollgate::{Key, Limiter, MemoryBackend, Policy, Quota};

const KEYS: u64 = 1_000;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    checks(&mut criterion);
    criterion.final_summary();
    let ratio = policies_100k_ratio();
    println!(
        "check_ns={:.0} check_100k_keys_ns={:.0} policies_100k_ratio={ratio:.2}",
        check_ns(1_000),
        check_ns(100_000)
    );
}

fn limiters() -> [(&'static str, Limiter<MemoryBackend>); 3] {
    let generous = Quota::per_second(u32::MAX.into()).fixed_window();
    let exhausted = Quota::per_day(1).fixed_window();
    let log = Quota::new(10_000, Quota::MIN_WINDOW).and_then(Quota::sliding_log).expect("10,000 is not too long");
    [("fixed_window", generous), ("fixed_window_denied", exhausted), ("sliding_log", log)]
        .map(|(name, limit)| (name, Limiter::new(MemoryBackend::with_capacity(200_000), Policy::new(name, limit))))
}

fn checks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("check");
    group.throughput(Throughput::Elements(1));
    for (name, limiter) in limiters() {
        let mut turn = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                turn += 1;
                now(limiter.check(black_box(turn % KEYS)))
            });
        });
    }
    group.finish();
}

/// Polls a call once. The memory backend never waits, so the measurement needs no runtime.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("the memory backend did not answer at once"),
    }
}

/// The 10th percentile of many batches, because other load on the machine only adds time. The order of the checks differs from the order of
/// insertion, so neither the processor nor the map can predict the next key.
fn check_ns(count: usize) -> f64 {
    let [(_, limiter), ..] = limiters();
    let mut keys: Vec<Key> = (0..count).map(|i| Key::from(format!("client-{i}"))).collect();
    let pass = |keys: &[Key]| {
        let start = Instant::now();
        for &key in keys {
            let decision = now(limiter.check(key)).expect("memory does not fail");
            assert!(black_box(decision).is_allowed());
        }
        start.elapsed().as_secs_f64() * 1e9 / keys.len() as f64
    };
    pass(&keys);
    let state = RandomState::new();
    keys.sort_by_cached_key(|key| state.hash_one(key));
    let mut batches: Vec<f64> = (0..5_000_000 / count).map(|_| pass(&keys)).collect();
    batches.sort_by(f64::total_cmp);
    batches[batches.len() / 10]
}

/// Both times are of one policy, one key and one backend. They differ only in how many other policies count the key.
fn policies_100k_ratio() -> f64 {
    const POLICIES: u32 = 100_000;
    let backend = MemoryBackend::with_capacity(2 * POLICIES as usize);
    let limit = Quota::per_second(u32::MAX.into()).fixed_window();
    let ns = |of: &Limiter<MemoryBackend>, key: Key| {
        let pass = || {
            let start = Instant::now();
            for _ in 0..1_000 {
                let decision = now(of.check(black_box(key))).expect("memory does not fail");
                assert!(black_box(decision).is_allowed());
            }
            start.elapsed().as_secs_f64() * 1e9 / 1_000.0
        };
        let mut batches: Vec<f64> = (0..2_000).map(|_| pass()).collect();
        batches.sort_by(f64::total_cmp);
        batches[batches.len() / 10]
    };
    let [crowded, single] = ["crowded", "single"].map(Key::from);
    // Measure the policy that was the last to count the key.
    let policies = (0..POLICIES).map(|tenant| Policy::new(format!("tenant-{tenant}"), limit));
    let limiters: Vec<_> = policies.map(|policy| Limiter::new(backend.clone(), policy)).collect();
    for limiter in &limiters {
        assert!(now(limiter.check(crowded)).expect("memory does not fail").is_allowed());
    }
    let last = &limiters[limiters.len() - 1];
    assert!(now(last.check(single)).expect("memory does not fail").is_allowed());
    ns(last, crowded) / ns(last, single)
}
