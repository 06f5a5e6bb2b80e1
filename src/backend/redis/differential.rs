//! Differential tests: the scripts and the memory backend must decide alike. Random traces run on both with the same clock, and every
//! field of every decision is compared.
//!
//! The scripts run on a real server, through the calls of production. Only their clock is replaced (see `virtual_clock.lua`), since a test
//! with a real clock can neither wait for a day nor hit a microsecond.

use std::cell::Cell;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::runtime::{Builder, Runtime};

use super::scripts::{LuaScript, Scripts};
use super::stores::rate_limit;
use super::{RedisBackend, RedisOptions};
use crate::key::Key;
use crate::rate_limit::store::{RateLimitStore, Request};
use crate::rate_limit::{Algorithm, Decision, Limit, Policy, Quota, QuotaChange, Receipt, as_change};
use crate::{MemoryBackend, StoreError};

#[path = "delay_queue_differential.rs"]
mod delay_queue;
#[path = "idempotency_differential.rs"]
mod idempotency;
#[path = "lock_differential.rs"]
mod lock;
#[path = "../../../tests/support/server.rs"]
#[allow(dead_code, unreachable_pub)]
pub(crate) mod server;

use self::server::RedisServer;

const CLOCK: &str = "{clock}:now";
/// The start of the virtual clock, in microseconds. A realistic date, so that numbers have realistic lengths.
const START_US: u64 = 1_800_000_000_000_000;
/// Minimum number of steps that a run compares.
const STEPS: usize = 10_000;

#[derive(Clone, Debug)]
struct Trace {
    shape: Vec<(Algorithm, Duration)>,
    change: QuotaChange,
    // Units for each of the limits. Now and then, a key changes to another of these plans.
    plans: Vec<Vec<u64>>,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    // The time before the step, in millionths of the window of one of the limits; 0 for none.
    pause: u64,
    of: usize,
    key: u8,
    plan: usize,
    verb: Verb,
}

#[derive(Clone, Debug)]
enum Verb {
    // Costs in thousandths of the smallest capacity, rounded down; 0 for one unit.
    Check { cost: u64 },
    CheckTwo { cost: u64, other: u64 },
    // The keys and costs of a batch.
    CheckMany { checks: Vec<(u8, u64)> },
    Peek { cost: u64 },
    // With the receipt `charge` charges ago.
    Refund { charge: usize, cost: u64 },
    // With the plan that is `after` positions after that of the step, and the receipt `charge` charges ago or none.
    Charge { cost: u64, after: usize, charge: Option<usize> },
    Block { share: u64 },
    Reset,
}

fn traces() -> impl Strategy<Value = Trace> {
    let window = prop_oneof![
        Just(Quota::MIN_WINDOW),
        Just(Duration::from_micros(1_234_567)),
        Just(Duration::from_secs(60)),
        // Not the longest possible: a trace must end before 2255, when microseconds no longer fit into 53 bits.
        Just(Duration::from_secs(30 * 86_400)),
    ];
    let algorithm = prop_oneof![
        Just(Algorithm::TokenBucket),
        Just(Algorithm::FixedWindow),
        Just(Algorithm::SlidingWindow),
        Just(Algorithm::SlidingLog)
    ];
    let shape = prop_oneof![
        3 => prop::collection::vec((algorithm.clone(), window.clone()), 1),
        2 => prop::collection::vec((algorithm, window), 2..5),
    ];
    let change = prop_oneof![Just(QuotaChange::Keep), Just(QuotaChange::Reset), Just(QuotaChange::Proportional)];
    let max = Quota::MAX_UNITS;
    let large = prop_oneof![
        2 => (1 << 32) - 20..(1 << 32) + 20_u64,
        2 => (1 << 40) - 20..(1 << 40) + 20_u64,
        1 => (1 << 51) - 20..(1 << 51) + 20_u64,
        2 => max - 20..=max,
        2 => (32..53_u32, any::<u64>()).prop_map(|(bits, random)| 1 << bits | random & ((1 << bits) - 1)),
    ];
    let units = prop_oneof![6 => 1_u64..12, 4 => 90_u64..300, 1 => 1_000_000_u64..4_000_000_000, 2 => large];
    let plans = prop::collection::vec(prop::collection::vec(units, 4), 1..4);
    // Usually about as many pauses in a window as a log has entries, sometimes at the edge of a window or beyond it.
    let pause = prop_oneof![
        60 => Just(0_u64),
        240 => 0..12_000_u64,
        6 => 0..600_000_u64,
        2 => 999_990..1_000_010_u64,
        1 => 0..3_000_000_u64,
    ];
    let cost = prop_oneof![60 => Just(0_u64), 6 => 0..30_u64, 1 => 0..1_001_u64];
    // Resets are rare, so that logs grow long enough to be trimmed.
    let verb = prop_oneof![
        400 => cost.clone().prop_map(|cost| Verb::Check { cost }),
        40 => (cost.clone(), 0..3_u64).prop_map(|(cost, other)| Verb::CheckTwo { cost, other }),
        40 => prop::collection::vec((0..3_u8, cost.clone()), 1..12).prop_map(|checks| Verb::CheckMany { checks }),
        80 => (0..1_001_u64).prop_map(|cost| Verb::Peek { cost }),
        60 => (0..40_usize, cost.clone()).prop_map(|(charge, cost)| Verb::Refund { charge, cost }),
        12 => (0..2_001_u64, 0..3_usize, prop::option::of(0..3_usize))
            .prop_map(|(cost, after, charge)| Verb::Charge { cost, after, charge }),
        2 => (0..1_500_000_u64).prop_map(|share| Verb::Block { share }),
        1 => Just(Verb::Reset),
    ];
    let key = prop_oneof![20 => Just(0_u8), 1 => 1..3_u8];
    // Changes of the plan are rare.
    let plan = prop_oneof![20 => Just(0_usize), 1 => 0..3_usize];
    let step = (pause, 0..4_usize, key, plan, verb).prop_map(|(pause, of, key, plan, verb)| Step {
        pause,
        of,
        key,
        plan,
        verb,
    });
    (shape, change, plans, prop::collection::vec(step, 250..600)).prop_map(|(shape, change, plans, steps)| Trace {
        shape,
        change,
        plans,
        steps,
    })
}

fn limit_of(algorithm: Algorithm, window: Duration, units: u64) -> Limit {
    let quota = |units: u64| Quota::new(units, window).unwrap();
    match algorithm {
        // Sometimes with a burst other than the quota.
        Algorithm::TokenBucket if units.is_multiple_of(3) => quota(units).burst(units / 2 + 1).unwrap().token_bucket(),
        Algorithm::TokenBucket => quota(units).token_bucket(),
        Algorithm::FixedWindow => quota(units).fixed_window(),
        Algorithm::SlidingWindow => quota(units).sliding_window(),
        Algorithm::SlidingLog => quota(units % 300 + 1).sliding_log().unwrap(),
    }
}

/// Both backends, each in its own runtime: a paused clock would advance by itself during calls to Redis.
struct Pair {
    memory_runtime: Runtime,
    memory: MemoryBackend,
    redis_runtime: Runtime,
    redis: RedisBackend,
    // To set the clock and to look at the keys.
    connection: redis::Connection,
    now_us: u64,
}

impl Pair {
    fn new(server: &RedisServer) -> Self {
        let memory_runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let memory = memory_runtime.block_on(async { MemoryBackend::new() });
        let redis_runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let redis = redis_runtime.block_on(async {
            // A long timeout, so that results do not depend on the load of the machine.
            let options = RedisOptions::from_url(server.url()).unwrap().response_timeout(Duration::from_secs(10));
            options.connect().await.unwrap().on_virtual_clock()
        });
        Self { memory_runtime, memory, redis_runtime, redis, connection: server.connection(), now_us: START_US }
    }

    fn pause(&mut self, pause: Duration) {
        self.memory_runtime.block_on(tokio::time::advance(pause));
        self.now_us += pause.as_micros() as u64;
        let _: () = redis::cmd("SET").arg(CLOCK).arg(self.now_us).query(&mut self.connection).unwrap();
    }

    /// Makes the same call to both.
    fn both<'a, M, R, T>(
        &'a self,
        memory: impl FnOnce(&'a MemoryBackend) -> M,
        redis: impl FnOnce(&'a RedisBackend) -> R,
    ) -> (T, T)
    where
        M: Future<Output = Result<T, StoreError>>,
        R: Future<Output = Result<T, StoreError>>,
    {
        let memory = self.memory_runtime.block_on(memory(&self.memory)).unwrap();
        (memory, self.redis_runtime.block_on(redis(&self.redis)).unwrap())
    }

    fn reset(&mut self, policy: &Policy, key: &Key) {
        self.both(|memory| memory.reset(policy, key), |redis| redis.reset(policy, key));
        for key in self.redis.inner.keys.rate_limit(policy, key) {
            let _: () = redis::cmd("DEL").arg(format!("{key}#due")).query(&mut self.connection).unwrap();
        }
    }

    /// Checks that every key has an expiry.
    fn check_expiries(&mut self) {
        let keys: Vec<String> = redis::cmd("KEYS").arg("tollgate:*").query(&mut self.connection).unwrap();
        for key in keys.iter().filter(|key| !key.ends_with("#due")) {
            assert!(keys.contains(&format!("{key}#due")), "{key} has no expiry");
        }
    }
}

fn run(trace: &Trace, pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    // Its own policy name separates the trace from the others.
    let policies: Vec<Policy> = trace
        .plans
        .iter()
        .map(|plan| {
            let mut limits =
                trace.shape.iter().zip(plan).map(|((algorithm, window), units)| limit_of(*algorithm, *window, *units));
            let policy = Policy::new(format!("trace-{turn}"), limits.next().unwrap());
            limits.fold(policy, Policy::limit).on_quota_change(trace.change)
        })
        .collect();
    let mut charges: Vec<(usize, Key, u64, [Receipt; 2])> = Vec::new();
    for (number, step) in trace.steps.iter().enumerate() {
        let window = trace.shape[step.of % trace.shape.len()].1;
        pair.pause(Duration::from_micros(window.as_micros() as u64 / 1_000 * step.pause / 1_000));
        let plan = step.plan % policies.len();
        let policy = &policies[plan];
        let key = Key::from(u64::from(step.key));
        let least = policy.limits().iter().map(Limit::capacity).min().unwrap();
        let cost_of = |share: u64| if share == 0 { 1 } else { (u128::from(share) * u128::from(least) / 1_000) as u64 };
        let decisions = match &step.verb {
            &Verb::Check { cost } => {
                let cost = cost_of(cost);
                let decisions =
                    pair.both(|memory| memory.check(policy, &key, cost), |redis| redis.check(policy, &key, cost));
                if let (Some(memory), Some(redis)) = (decisions.0.receipt(), decisions.1.receipt()) {
                    charges.push((plan, key, cost, [memory, redis]));
                }
                (vec![decisions.0], vec![decisions.1])
            }
            &Verb::CheckTwo { cost, other } => {
                let request = |key: Key| Request { policy: policy.clone(), key, cost: cost_of(cost) };
                let requests = [request(key), request(Key::from(other + 1))];
                // Redis checks a repeated key twice in sequence. Its first decision has the units that were left in between.
                if requests[0].key == requests[1].key {
                    continue;
                }
                pair.both(|memory| memory.check_all(&requests), |redis| redis.check_all(&requests))
            }
            Verb::CheckMany { checks } => {
                let checks = checks.iter().map(|&(key, cost)| (Key::from(u64::from(key)), cost_of(cost)));
                let checks: Vec<_> = checks.collect();
                let one_by_one = async |memory: &MemoryBackend| {
                    let mut decisions = Vec::new();
                    for (key, cost) in &checks {
                        decisions.push(memory.check(policy, key, *cost).await?);
                    }
                    Ok(decisions)
                };
                pair.both(one_by_one, |redis| redis.check_together(policy, &checks))
            }
            &Verb::Peek { cost } => {
                let cost = cost_of(cost);
                let decisions =
                    pair.both(|memory| memory.peek(policy, &key, cost), |redis| redis.peek(policy, &key, cost));
                (vec![decisions.0], vec![decisions.1])
            }
            &Verb::Refund { charge, cost } => {
                let Some(charge) = charges.len().checked_sub(charge + 1) else { continue };
                // At most the rest of the charge.
                let (plan, key, left, receipts) = &mut charges[charge];
                let units = cost_of(cost).min(*left);
                *left -= units;
                let (policy, [memory, redis], change) = (&policies[*plan], *receipts, -as_change(units));
                pair.both(|to| to.settle(policy, key, memory, change), |to| to.settle(policy, key, redis, change));
                continue;
            }
            &Verb::Charge { cost, after, charge } => {
                let charge = charge.and_then(|charge| charges.len().checked_sub(charge + 1));
                let (key, [memory, redis]) =
                    charge.map_or((key, [Receipt::at_micros(0); 2]), |charge| (charges[charge].1, charges[charge].3));
                let (policy, change) = (&policies[(plan + after) % policies.len()], as_change(cost_of(cost)));
                pair.both(|to| to.settle(policy, &key, memory, change), |to| to.settle(policy, &key, redis, change));
                continue;
            }
            &Verb::Block { share } => {
                let time = Duration::from_micros(window.as_micros() as u64 / 1_000 * share / 1_000);
                pair.both(|memory| memory.block(policy, &key, time), |redis| redis.block(policy, &key, time));
                continue;
            }
            Verb::Reset => {
                pair.reset(policy, &key);
                continue;
            }
        };
        let seen = |decisions: &[Decision]| {
            let decisions = decisions.iter();
            let seen =
                decisions.map(|decision| (decision.outcome(), decision.retry_after(), decision.limits().to_vec()));
            seen.collect::<Vec<_>>()
        };
        let (memory, redis) = (seen(&decisions.0), seen(&decisions.1));
        prop_assert_eq!(memory, redis, "memory left, redis right, at step {}: {:?}", number, step);
    }
    pair.check_expiries();
    Ok(())
}

/// `PROPTEST_CASES` sets another number of traces: `PROPTEST_CASES=5000 cargo test --lib differential`.
fn config(cases: u32) -> Config {
    let cases = std::env::var("PROPTEST_CASES").map_or(cases, |cases| cases.parse().unwrap());
    Config { cases, failure_persistence: None, ..Config::default() }
}

#[test]
fn memory_and_redis_decide_alike() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = config(50);
    let outcome = TestRunner::new(config).run(&traces(), |trace| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.steps.len());
        run(&trace, &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS, "only {} steps were compared", steps.get());
}

/// Regression: after the clock was set back, windows that began before 1970 were stored as negative instants, which are unreadable.
#[test]
fn counts_survive_clock_set_back_to_1970() {
    let server = RedisServer::start();
    let mut pair = Pair::new(&server);
    let quota = Quota::per_minute(10);
    // In 10 s, the bucket refills by one token and most of a second one.
    let limits = [
        ("bucket", quota.token_bucket(), 2),
        ("fixed", quota.fixed_window(), 1),
        ("sliding", quota.sliding_window(), 1),
    ];
    for (name, limit, left) in limits {
        let (policy, key) = (Policy::new(name, limit), Key::from("alice"));
        let mut check = |at_us: u64| {
            let _: () = redis::cmd("SET").arg(CLOCK).arg(at_us).query(&mut pair.connection).unwrap();
            pair.redis_runtime.block_on(pair.redis.check(&policy, &key, 3)).unwrap()
        };
        for seconds in [0, 10] {
            assert!(check(START_US + seconds * 1_000_000).is_allowed(), "{name}");
        }
        let decision = check(5_000_000);
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, Some(left)), "{name}");
        let decision = check(6_000_000);
        assert!(decision.retry_after().is_some_and(|wait| wait <= Duration::from_secs(120)), "{name}: {decision:?}");
        assert_eq!(decision.remaining(), Some(left), "{name}");
    }
}

/// Regression: a sliding log started again after the clock was set back by more than its window. It admitted 40 requests instead of 20.
#[test]
fn clock_set_back_admits_no_more_in_any_real_window() {
    const UNITS: u64 = 20;
    const WINDOW_S: u64 = 60;
    let server = RedisServer::start();
    let mut pair = Pair::new(&server);
    let quota = Quota::per_minute(UNITS);
    let log = quota.sliding_log().unwrap();
    // The maximum number of requests admitted within a window: see the documentation of each algorithm.
    let limits = [
        (Policy::new("log", log), UNITS),
        (Policy::new("log-and-window", log).limit(quota.fixed_window()), UNITS),
        (Policy::new("sliding", quota.sliding_window()), 2 * UNITS - 1),
        (Policy::new("fixed", quota.fixed_window()), 2 * UNITS),
        (Policy::new("bucket", quota.token_bucket()), 2 * UNITS - 1),
    ];
    let key = Key::from("alice");
    for (policy, max) in limits {
        for back_s in [45, 10 * WINDOW_S, 365 * 86_400] {
            let (mut clock_s, mut admitted) = (START_US / 1_000_000, Vec::new());
            for real_s in 0..10 * WINDOW_S {
                // In the middle of a window, when its quota is used up, and twice in a row.
                clock_s = if [25, 190, 191, 407].contains(&real_s) { clock_s - back_s } else { clock_s + 1 };
                let _: () = redis::cmd("SET").arg(CLOCK).arg(clock_s * 1_000_000).query(&mut pair.connection).unwrap();
                let check = || pair.redis_runtime.block_on(pair.redis.check(&policy, &key, 1)).unwrap();
                // Bursts between single requests.
                let checks = if real_s % 7 == 3 { 15 } else { 1 };
                let passed = (0..checks).map(|_| check()).filter(Decision::is_allowed).count();
                admitted.extend(std::iter::repeat_n(real_s, passed));
            }
            let name = format!("{}, set back by {back_s} s", policy.name());
            for (index, begin) in admitted.iter().enumerate() {
                let within = admitted[index..].iter().take_while(|real_s| **real_s < begin + WINDOW_S).count();
                assert!(within <= max as usize, "{name}: {within} within a window from {begin} s on");
            }
            // Each step back of the clock costs at most a window, and single requests get nearly all of the quota.
            assert!(admitted.len() as u64 > 5 * (UNITS - 2), "{name}: only {} were admitted", admitted.len());
            pair.check_expiries();
            pair.reset(&policy, &key);
        }
    }
}

/// Regression: a refund for a charge of a past window made room in the next one.
#[test]
fn refund_from_before_clock_set_back_makes_no_room() {
    let server = RedisServer::start();
    let mut pair = Pair::new(&server);
    let quota = Quota::per_minute(5);
    let limits = [quota.token_bucket(), quota.fixed_window(), quota.sliding_window(), quota.sliding_log().unwrap()];
    for limit in limits {
        let (policy, key) = (Policy::new("refund", limit), Key::from("alice"));
        let mut set = |clock_s: u64| {
            let _: () = redis::cmd("SET").arg(CLOCK).arg(clock_s * 1_000_000).query(&mut pair.connection).unwrap();
        };
        let check = |cost: u64| pair.redis_runtime.block_on(pair.redis.check(&policy, &key, cost)).unwrap();
        let noon_s = START_US / 1_000_000;
        set(noon_s);
        let receipt = check(5).receipt().unwrap();
        set(noon_s - 3_600);
        assert!(!check(5).is_allowed(), "{limit:?}");
        set(noon_s - 3_600 + 121);
        assert!(check(5).is_allowed(), "{limit:?}");
        pair.redis_runtime.block_on(pair.redis.settle(&policy, &key, receipt, -5)).unwrap();
        assert!(!check(1).is_allowed(), "{limit:?}");
        pair.reset(&policy, &key);
    }
}

impl RedisBackend {
    /// A backend with the same connections and keys, and with scripts that read the virtual clock.
    fn on_virtual_clock(&self) -> Self {
        let prelude = include_str!("virtual_clock.lua");
        let mut scripts = Scripts::new();
        for script in scripts.each_mut() {
            *script = LuaScript::new(&format!("{prelude}\n{}", script.code()));
        }
        let super::Inner { servers, keys, auxiliary, .. } = &*self.inner;
        Self::with_scripts(servers.clone(), (**keys).clone(), auxiliary.again(), scripts)
    }

    /// Checks all of these in one batch, as if other calls were in flight.
    async fn check_together(&self, policy: &Policy, checks: &[(Key, u64)]) -> Result<Vec<Decision>, StoreError> {
        let super::Inner { servers, keys, scripts, .. } = &*self.inner;
        let keys: Vec<_> = checks.iter().map(|(key, _)| keys.rate_limit(policy, key)).collect();
        let replies = if keys.iter().all(|keys| keys.len() == 1) && checks.iter().all(|(_, cost)| *cost > 0) {
            let together = checks.iter().zip(&keys).map(|((key, cost), keys)| (policy, key, keys[0].clone(), *cost));
            super::batch::check::check_batch(servers, scripts, together).await?
        } else {
            // Such checks are never batched.
            vec![super::batch::check::Reply::new(); checks.len()]
        };
        let mut decisions = Vec::new();
        for ((key, cost), reply) in checks.iter().zip(replies) {
            decisions.push(match &*reply {
                [] => self.check(policy, key, *cost).await?,
                reply => {
                    rate_limit::parse_decision(reply, policy, *cost, super::scripts::rate_limit::CheckMode::Check)?
                }
            });
        }
        Ok(decisions)
    }
}
