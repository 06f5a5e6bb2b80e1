//! The algorithms against their definitions (`model/mod.rs`), on a paused clock. For any operations in any order, decisions match the model
//! to the microsecond, and the documented guarantees hold.

use crate::model;

use std::cell::Cell;
use std::time::Duration;

use model::{Count, Expected, Model};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::runtime::Builder;
use tokio::time::{Instant, advance};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{Algorithm, BurstQuota, Decision, Limit, LimitStatus, Outcome, Receipt};
use tollgate::{Key, MemoryBackend, Policy, Quota};

const MICROSECOND: Duration = Duration::from_micros(1);
const MILLISECOND: Duration = Duration::from_millis(1);

/// A policy, and the operations on one of its keys.
#[derive(Clone, Debug)]
struct Trace {
    limits: Vec<Limit>,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    // The pause before the step, in millionths of the window of the limit with index `of`.
    pause: u64,
    of: usize,
    verb: Verb,
}

/// Costs and changes are in thousandths of the smallest capacity, rounded down. 0 stands for one unit.
#[derive(Clone, Copy, Debug)]
enum Verb {
    Check(u64),
    CheckNothing,
    Peek(u64),
    // Of the charge so many before.
    GiveBack(usize, u64),
    ChargeAnyway(u64),
    // In parts per million of the window.
    Block(u64),
    Reset,
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    use Algorithm::{FixedWindow, SlidingLog, SlidingWindow, TokenBucket};
    prop_oneof![2 => Just(TokenBucket), 1 => Just(FixedWindow), 1 => Just(SlidingWindow), 1 => Just(SlidingLog)]
}

/// The largest product of capacity and window in us that is counted exactly by every algorithm. A fixed window has no such bound.
const EXACT: u64 = 1 << 51;

/// Quotas around the bounds of integers and doubles.
fn large() -> impl Strategy<Value = u64> {
    let around = |middle: u64| middle - 20..middle + 20;
    let most = Quota::MAX_UNITS;
    prop_oneof![around(1 << 32), around(1 << 40), around(1 << 51), most - 20..=most, (1 << 32)..=most]
}

/// Limits that are counted exactly.
fn limits() -> impl Strategy<Value = Limit> {
    let window = prop_oneof![
        Just(Quota::MIN_WINDOW),
        Just(Duration::from_micros(1_234_567)),
        Just(Duration::from_secs(1)),
        Just(Duration::from_secs(60)),
        Just(Duration::from_micros(3_661_000_007)),
        Just(Duration::from_secs(30 * 86_400)),
    ];
    let units = prop_oneof![2 => Just(1_u64), 12 => 1_u64..13, 6 => 13_u64..400, 3 => large()];
    // Up to twice the quota.
    let burst = prop_oneof![3 => Just(None), 2 => (0_u64..2_001).prop_map(Some)];
    (algorithms(), window, units, burst).prop_map(|(algorithm, window, units, burst)| {
        let exact = EXACT / window.as_micros() as u64;
        let units = match algorithm {
            Algorithm::FixedWindow => units,
            Algorithm::SlidingLog => units.min(400),
            _ => units.min(exact),
        };
        let quota = Quota::new(units, window).unwrap();
        match (algorithm, burst) {
            (Algorithm::TokenBucket, Some(share)) => {
                let burst = u128::from(units) * u128::from(share) / 1_000;
                quota.burst((burst as u64).clamp(1, exact)).unwrap().token_bucket()
            }
            _ => limit(algorithm, quota),
        }
    })
}

fn limit(algorithm: Algorithm, quota: Quota) -> Limit {
    match algorithm {
        Algorithm::TokenBucket => quota.token_bucket(),
        Algorithm::FixedWindow => quota.fixed_window(),
        Algorithm::SlidingWindow => quota.sliding_window(),
        _ => quota.sliding_log().unwrap(),
    }
}

/// One limit, or several combined.
fn policies() -> impl Strategy<Value = Vec<Limit>> {
    prop_oneof![1 => prop::collection::vec(limits(), 1), 1 => prop::collection::vec(limits(), 2..=4)]
}

/// Mostly so short that a window sees as many steps as it has units, sometimes up to the edge of the window or beyond.
fn pauses() -> impl Strategy<Value = u64> {
    prop_oneof![
        20 => Just(0_u64),
        20 => 0..20_000_u64,
        10 => 0..300_000_u64,
        2 => 999_999..1_000_002_u64,
        1 => 1_999_999..2_000_002_u64,
        2 => 0..3_000_000_u64,
    ]
}

fn costs() -> impl Strategy<Value = u64> {
    prop_oneof![10 => Just(0_u64), 4 => 0..200_u64, 2 => 0..1_001_u64]
}

/// Only the operation that a layer calls by default.
fn checks() -> impl Strategy<Value = Verb> {
    costs().prop_map(Verb::Check)
}

/// All operations.
fn verbs() -> impl Strategy<Value = Verb> {
    prop_oneof![
        200 => checks(),
        10 => Just(Verb::CheckNothing),
        40 => (0..1_001_u64).prop_map(Verb::Peek),
        40 => (0..20_usize, 0..1_001_u64).prop_map(|(charge, units)| Verb::GiveBack(charge, units)),
        10 => (0..2_500_u64).prop_map(Verb::ChargeAnyway),
        4 => (0..1_500_000_u64).prop_map(Verb::Block),
        2 => Just(Verb::Reset),
    ]
}

fn traces(verbs: impl Strategy<Value = Verb>, steps: usize) -> impl Strategy<Value = Trace> {
    let step = (pauses(), 0..4_usize, verbs).prop_map(|(pause, of, verb)| Step { pause, of, verb });
    (policies(), prop::collection::vec(step, 1..steps)).prop_map(|(limits, steps)| Trace { limits, steps })
}

/// Runs a property on `cases` values, each on its own paused clock.
fn for_all<T: std::fmt::Debug>(
    cases: u32,
    values: impl Strategy<Value = T>,
    property: impl AsyncFn(T) -> Result<(), TestCaseError>,
) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&values, |value| {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(property(value))
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// One key on its own backend.
struct Subject {
    backend: MemoryBackend,
    policy: Policy,
    key: Key,
    epoch: Instant,
    // Charges that were not refunded.
    charges: Vec<(Receipt, u64)>,
}

impl Subject {
    fn new(limits: &[Limit]) -> Self {
        let policy = Policy::new("properties", limits[0]);
        let policy = limits[1..].iter().fold(policy, |policy, limit| policy.limit(*limit));
        let (backend, key) = (MemoryBackend::new(), Key::from("alice"));
        // The clock of the backend starts one microsecond before its creation.
        Self { backend, policy, key, epoch: Instant::now() - Duration::from_micros(1), charges: Vec::new() }
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    /// The most that can be asked for at once.
    fn capacity(&self) -> u64 {
        self.policy.limits().iter().map(Limit::capacity).min().unwrap()
    }

    fn units(&self, share: u64) -> u64 {
        if share == 0 { 1 } else { (u128::from(share) * u128::from(self.capacity()) / 1_000) as u64 }
    }

    fn share_of_window(&self, of: usize, parts: u64) -> Duration {
        let window = self.policy.limits()[of % self.policy.limits().len()].quota().window().as_micros();
        Duration::from_micros((window * u128::from(parts) / 1_000_000) as u64)
    }

    async fn check(&mut self, cost: u64) -> Decision {
        let decision = self.backend.check(&self.policy, &self.key, cost).await.unwrap();
        if let Some(receipt) = decision.receipt() {
            self.charges.push((receipt, cost));
        }
        decision
    }

    async fn peek(&self, cost: u64) -> Decision {
        self.backend.peek(&self.policy, &self.key, cost).await.unwrap()
    }

    /// The charge so many before, and how much of it this is to give back: no more than is left of it.
    fn charge_to_give_back(&mut self, before: usize, share: u64) -> Option<(Receipt, u64)> {
        let units = self.units(share);
        let index = self.charges.len().checked_sub(before + 1)?;
        let (receipt, left) = &mut self.charges[index];
        let given = units.min(*left);
        *left -= given;
        Some((*receipt, given))
    }

    async fn settle(&self, receipt: Receipt, change: i64) {
        self.backend.settle(&self.policy, &self.key, receipt, change).await.unwrap();
    }

    async fn step(&mut self, step: &Step) -> Option<Decision> {
        match step.verb {
            Verb::Check(cost) => return Some(self.check(self.units(cost)).await),
            Verb::CheckNothing => return Some(self.check(0).await),
            Verb::Peek(cost) => return Some(self.peek(self.units(cost)).await),
            Verb::GiveBack(before, share) => {
                if let Some((receipt, units)) = self.charge_to_give_back(before, share) {
                    self.settle(receipt, -(units as i64)).await;
                }
            }
            Verb::ChargeAnyway(share) => {
                let units = self.units(share);
                self.settle(Receipt::at_micros(0), units as i64).await;
            }
            Verb::Block(parts) => {
                let time = self.share_of_window(step.of, parts);
                self.backend.block(&self.policy, &self.key, time).await.unwrap();
            }
            Verb::Reset => {
                self.charges.clear();
                self.backend.reset(&self.policy, &self.key).await.unwrap();
            }
        }
        None
    }

    async fn run(&mut self, steps: &[Step]) {
        for step in steps {
            advance(self.share_of_window(step.of, step.pause)).await;
            self.step(step).await;
        }
    }
}

#[test]
fn decisions_match_the_definitions() {
    let steps = Cell::new(0);
    for_all(150, traces(verbs(), 250), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        let mut model = Model::new(&subject.policy);
        for (number, step) in trace.steps.iter().enumerate() {
            advance(subject.share_of_window(step.of, step.pause)).await;
            let now = subject.now();
            let expected = match step.verb {
                Verb::Check(cost) => Some(model.check(now, subject.units(cost))),
                Verb::CheckNothing => Some(model.check(now, 0)),
                Verb::Peek(cost) => Some(model.peek(now, subject.units(cost))),
                Verb::GiveBack(before, share) => {
                    let left = subject.charges.clone();
                    if let Some((receipt, units)) = subject.charge_to_give_back(before, share) {
                        model.give_back(now, left.len() - before - 1, receipt.as_micros(), units);
                    }
                    subject.charges = left;
                    None
                }
                Verb::ChargeAnyway(share) => {
                    model.charge_anyway(now, subject.units(share));
                    None
                }
                Verb::Block(parts) => {
                    model.block(now + subject.share_of_window(step.of, parts).as_micros() as u64);
                    None
                }
                Verb::Reset => {
                    model = Model::new(&subject.policy);
                    None
                }
            };
            let seen = subject.step(step).await;
            // An operation without a decision is checked by a peek after it.
            let (seen, expected) = match (seen, expected) {
                (Some(seen), Some(expected)) => (seen, expected),
                _ => (subject.peek(1).await, model.peek(now, 1)),
            };
            prop_assert_eq!(
                Expected::from(&seen),
                expected,
                "left: decision, right: definition, step {}: {:?}",
                number,
                step
            );
            for (limit, status) in trace.limits.iter().zip(seen.limits()) {
                prop_assert_eq!(status.capacity(), limit.capacity());
            }
            steps.set(steps.get() + 1);
        }
        Ok(())
    });
    assert!(steps.get() >= 10_000, "only {} steps were checked", steps.get());
}

#[test]
fn denial_leaves_no_trace() {
    for_all(60, traces(verbs(), 200), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        // The same trace without the denied requests.
        let mut quiet = Subject::new(&trace.limits);
        for (number, step) in trace.steps.iter().enumerate() {
            advance(subject.share_of_window(step.of, step.pause)).await;
            // A request above the remaining units is always denied.
            let too_much = subject.peek(0).await.remaining().unwrap() + 1;
            if too_much <= subject.capacity() {
                prop_assert!(!subject.check(too_much).await.is_allowed());
            }
            let decision = subject.step(step).await;
            let changes = match (step.verb, &decision) {
                (Verb::Peek(_) | Verb::CheckNothing, _) => false,
                (_, Some(decision)) => decision.is_allowed(),
                (_, None) => true,
            };
            if changes {
                prop_assert_eq!(&quiet.step(step).await, &decision);
            }
            let (seen, expected) = (subject.peek(1).await, quiet.peek(1).await);
            prop_assert_eq!(seen, expected, "left: with denials, right: without, step {}: {:?}", number, step);
        }
        Ok(())
    });
}

#[test]
fn refund_never_exceeds_the_charge() {
    for_all(100, traces(verbs(), 120), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        subject.run(&trace.steps).await;
        let left = |decision: &Decision| decision.limits().iter().map(LimitStatus::remaining).collect::<Vec<_>>();
        // Gives all charges back, and once more against the rules of the documentation.
        let charges = subject.charges.clone();
        for (receipt, units) in charges.iter().chain(&charges) {
            let before = left(&subject.peek(0).await);
            subject.settle(*receipt, -(*units as i64)).await;
            let after = left(&subject.peek(0).await);
            for ((before, after), limit) in before.iter().zip(&after).zip(&trace.limits) {
                prop_assert!(after >= before && after - before <= *units && *after <= limit.capacity());
            }
        }
        // Refunds never admit more than the capacity at once. A large quota is used up in a thousand steps.
        let (mut admitted, step) = (0, (subject.capacity() / 1_000).max(1));
        while subject.check(step).await.is_allowed() {
            admitted += step;
            prop_assert!(admitted <= subject.capacity());
        }
        // An unknown key has nothing to give back.
        subject.backend.reset(&subject.policy, &subject.key).await.unwrap();
        subject.settle(Receipt::at_micros(subject.now()), -1).await;
        prop_assert!(subject.backend.is_empty());
        Ok(())
    });
}

#[test]
fn refund_at_once_undoes_the_charge() {
    for_all(60, traces(verbs(), 120), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        subject.run(&trace.steps).await;
        let before = subject.peek(1).await;
        let cost = before.remaining().unwrap_or(0);
        if let Some(receipt) = subject.check(cost).await.receipt() {
            subject.settle(receipt, -(cost as i64)).await;
            prop_assert_eq!(subject.peek(1).await, before);
        }
        Ok(())
    });
}

#[test]
fn retry_after_is_exact_to_the_microsecond() {
    let waits = Cell::new(0);
    let asked = (traces(verbs(), 60), prop::collection::vec(0..1_001_u64, 12));
    for_all(120, asked, async |(trace, costs): (Trace, Vec<u64>)| {
        let mut subject = Subject::new(&trace.limits);
        subject.run(&trace.steps).await;
        for cost in costs {
            let cost = subject.units(cost).max(1);
            let Some(wait) = subject.check(cost).await.retry_after() else { continue };
            prop_assert!(!wait.is_zero());
            let mut waited = Duration::ZERO;
            let half = Duration::from_micros(wait.as_micros() as u64 / 2);
            for early in [half, wait.saturating_sub(MILLISECOND), wait - MICROSECOND] {
                advance(early.saturating_sub(waited)).await;
                waited = waited.max(early);
                let decision = subject.check(cost).await;
                prop_assert!(!decision.is_allowed(), "{:?} of {:?} was enough: {:?}", waited, wait, decision);
                prop_assert_eq!(decision.retry_after().unwrap() + waited, wait);
            }
            // When a block ends, the limits may still deny the request.
            let blocked = subject.peek(cost).await.outcome() == Outcome::Blocked;
            advance(wait - waited).await;
            let decision = subject.check(cost).await;
            prop_assert!(decision.is_allowed() || blocked, "{:?} was not enough: {:?}", wait, decision);
            waits.set(waits.get() + 1);
        }
        Ok(())
    });
    assert!(waits.get() >= 300, "only {} waits were checked", waits.get());
}

#[test]
fn remaining_units_can_be_charged_at_once() {
    for_all(150, traces(verbs(), 60), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        subject.run(&trace.steps).await;
        subject.backend.block(&subject.policy, &subject.key, Duration::ZERO).await.unwrap();
        let left = subject.peek(1).await.limits().iter().map(LimitStatus::remaining).min().unwrap();
        prop_assert_eq!(subject.peek(0).await.remaining(), Some(left));
        if left < subject.capacity() {
            prop_assert!(!subject.check(left + 1).await.is_allowed());
        }
        let decision = subject.check(left).await;
        prop_assert!(decision.is_allowed());
        prop_assert_eq!(decision.remaining(), Some(0));
        prop_assert!(!subject.check(1).await.is_allowed());
        Ok(())
    });
}

#[test]
fn units_become_available_at_reset_after() {
    for_all(150, traces(verbs(), 60), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        subject.run(&trace.steps).await;
        // Each limit is checked on its own, since each has its own reset.
        for index in 0..trace.limits.len() {
            let before = subject.peek(0).await.limits()[index];
            let reset = before.reset_after();
            prop_assert_eq!(reset.is_zero(), before.remaining() == before.capacity());
            if reset.is_zero() {
                continue;
            }
            advance(reset - MICROSECOND).await;
            prop_assert_eq!(subject.peek(0).await.limits()[index].remaining(), before.remaining());
            advance(MICROSECOND).await;
            prop_assert!(subject.peek(0).await.limits()[index].remaining() > before.remaining());
        }
        Ok(())
    });
}

/// The most that the docs let pass in a span of `length` us, both ends included.
fn worst_case(limit: Limit, length: u64) -> u128 {
    let (quota, window) = (u128::from(limit.quota().limit()), limit.quota().window().as_micros());
    let length = u128::from(length);
    let windows = length / window + 1;
    match limit.algorithm() {
        Algorithm::TokenBucket => u128::from(limit.capacity()) + quota * length / window,
        // The end of one window, and every window that can begin in the span.
        Algorithm::FixedWindow => quota * (windows + 1),
        Algorithm::SlidingWindow if windows == 1 => 2 * quota - 1,
        Algorithm::SlidingWindow => quota * (windows + 1),
        _ => quota * windows,
    }
}

#[test]
fn no_span_exceeds_the_worst_case() {
    let admitted_in_total = Cell::new(0);
    for_all(120, traces(checks(), 300), async |trace: Trace| {
        let mut subject = Subject::new(&trace.limits);
        subject.run(&trace.steps).await;
        let charges: Vec<_> = subject.charges.iter().map(|(at, units)| (at.as_micros(), *units)).collect();
        admitted_in_total.set(admitted_in_total.get() + charges.len());
        for (first, (start, _)) in charges.iter().enumerate() {
            let mut admitted = 0;
            for (end, units) in &charges[first..] {
                admitted += u128::from(*units);
                for limit in &trace.limits {
                    let most = worst_case(*limit, end - start);
                    prop_assert!(admitted <= most, "{} in {} us of {:?}", admitted, end - start, limit);
                }
            }
        }
        Ok(())
    });
    assert!(admitted_in_total.get() >= 3_000, "only {} requests were admitted", admitted_in_total.get());
}

/// The documented worst cases do occur, so the property above is not vacuous.
#[tokio::test(start_paused = true)]
async fn worst_cases_occur() {
    let quota = Quota::per_minute(10);
    for (limit, most) in [(quota.token_bucket(), 19), (quota.fixed_window(), 20), (quota.sliding_window(), 18)] {
        let mut subject = Subject::new(&[limit]);
        // The window opens long before the crowd comes.
        let early = u64::from(limit.algorithm() != Algorithm::TokenBucket);
        let _ = subject.check(early).await;
        advance(Duration::from_secs(60) - MICROSECOND).await;
        let (start, mut admitted) = (Instant::now(), early * u64::from(limit.algorithm() == Algorithm::FixedWindow));
        while start.elapsed() < Duration::from_secs(60) {
            if subject.check(1).await.is_allowed() {
                admitted += 1;
            } else {
                advance(MILLISECOND).await;
            }
        }
        assert_eq!(admitted, most, "{limit:?}");
    }
}

/// Shares are rounded up, so evenly spread requests may lose one unit per window, and never more.
#[tokio::test(start_paused = true)]
async fn even_requests_get_the_sliding_quota_less_one() {
    for quota in [1, 2, 3, 7, 10, 60, 100] {
        let window = Duration::from_secs(60);
        let mut subject = Subject::new(&[Quota::new(quota, window).unwrap().sliding_window()]);
        for number in 0..20 {
            let mut admitted = 0;
            for _ in 0..quota {
                admitted += u64::from(subject.check(1).await.is_allowed());
                advance(Duration::from_micros(60_000_000_u64.div_ceil(quota))).await;
            }
            assert!((quota - 1..=quota).contains(&admitted), "{admitted} of {quota} in window {number}");
        }
    }
}

/// Limits of any size, for which the documentation allows rounding.
fn huge_limits() -> impl Strategy<Value = Limit> {
    let longest = Quota::MAX_WINDOW.as_micros() as u64;
    let window = prop_oneof![
        1 => Just(longest),
        2 => 10_000..longest,
        2 => 10_000..86_400_000_000_u64,
    ];
    let units = prop_oneof![2 => large(), 2 => 1_000_000..1_u64 << 32, 1 => 1..1_u64 << 32];
    let algorithm = prop_oneof![Just(Algorithm::TokenBucket), Just(Algorithm::SlidingWindow)];
    let burst = prop_oneof![2 => Just(None), 1 => prop_oneof![1..1_000_u64, large()].prop_map(Some)];
    (algorithm, window, units, burst).prop_map(|(algorithm, window, units, burst)| {
        let quota = Quota::new(units, Duration::from_micros(window)).unwrap();
        let burst = burst.filter(|_| algorithm == Algorithm::TokenBucket).and_then(|burst| quota.burst(burst).ok());
        burst.map_or_else(|| limit(algorithm, quota), BurstQuota::token_bucket)
    })
}

#[test]
fn the_largest_numbers_are_rounded_as_documented_and_no_more() {
    let steps = prop::collection::vec((pauses(), 0..1_001_u64), 1..60);
    for_all(300, (huge_limits(), steps), async |(limit, steps): (Limit, Vec<(u64, u64)>)| {
        let mut subject = Subject::new(&[limit]);
        let mut count = Count::new(limit);
        let capacity = limit.capacity();
        for (pause, cost) in steps {
            advance(subject.share_of_window(0, pause)).await;
            let (now, cost) = (subject.now(), subject.units(cost));
            let decision = subject.check(cost).await;
            let used = count.used_at(now);
            let fits = |used: u64| used + cost <= capacity;
            if decision.is_allowed() {
                prop_assert!(fits(*used.start()), "{} of {} fitted into {:?}", cost, capacity, used);
                count.charge(now, cost);
            } else {
                prop_assert!(!fits(*used.end()), "{} of {} did not fit into {:?}", cost, capacity, used);
                let wait = decision.retry_after().unwrap().as_micros() as u64;
                let least = count.wait(now, |used| fits(*used.start()));
                let most = count.wait(now, |used| fits(*used.end()));
                prop_assert!((least..=most).contains(&wait), "{} is not from {} to {}", wait, least, most);
            }
            let (used, seen) = (count.used_at(now), capacity - decision.remaining().unwrap());
            prop_assert!(used.contains(&seen), "{} is not in {:?}: {:?}", seen, used, limit);
        }
        Ok(())
    });
}
