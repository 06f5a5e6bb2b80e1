//! Random sequences of operations on Redis. Every key expires, not before its contents are obsolete, and not much later. Denied requests
//! and peeks change no value.

use crate::support;

use std::collections::{BTreeMap, HashMap};
use std::thread::sleep;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use redis::Connection;
use support::server::RedisServer;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tollgate::rate_limit::store::{RateLimitStore, Request};
use tollgate::rate_limit::{Algorithm, Decision, Limit, QuotaChange, Receipt};
use tollgate::{Key, Policy, Quota, RedisBackend};

/// How long a key may outlive its contents.
const GRACE: Duration = Duration::from_millis(10);

#[derive(Clone, Debug)]
struct Trace {
    // The limits of each plan. Steps switch between plans, and counts are carried over.
    plans: Vec<Vec<Limit>>,
    change: QuotaChange,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    pause_ms: u64,
    plan: usize,
    subject: u8,
    verb: Verb,
}

/// Costs are percentages of the smallest capacity, rounded down. 0 stands for one unit.
#[derive(Clone, Copy, Debug)]
enum Verb {
    Check(u64),
    CheckNothing,
    CheckAll(u64),
    // This many concurrent requests of one unit, which are batched.
    CheckTogether(usize),
    Peek(u64),
    // Refunds part of an earlier charge, counted back from the last one.
    GiveBack(usize, u64),
    ChargeAnyway(u64),
    Block(u64),
    Unblock,
    Reset,
}

fn limits() -> impl Strategy<Value = Limit> {
    let algorithm = prop_oneof![
        Just(Algorithm::TokenBucket),
        Just(Algorithm::FixedWindow),
        Just(Algorithm::SlidingWindow),
        Just(Algorithm::SlidingLog)
    ];
    // Some windows expire during a trace.
    let window = prop_oneof![Just(20_u64), Just(300), Just(60_000)];
    (algorithm, window, 1_u64..20, 1_u64..40).prop_map(|(algorithm, window, units, burst)| {
        let quota = Quota::new(units, Duration::from_millis(window)).unwrap();
        match algorithm {
            Algorithm::TokenBucket => quota.burst(burst).unwrap().token_bucket(),
            Algorithm::FixedWindow => quota.fixed_window(),
            Algorithm::SlidingWindow => quota.sliding_window(),
            _ => quota.sliding_log().unwrap(),
        }
    })
}

fn traces() -> impl Strategy<Value = Trace> {
    let verb = prop_oneof![
        20 => (0..60_u64).prop_map(Verb::Check),
        2 => Just(Verb::CheckNothing),
        6 => (0..60_u64).prop_map(Verb::CheckAll),
        3 => (10..20_usize).prop_map(Verb::CheckTogether),
        6 => (0..101_u64).prop_map(Verb::Peek),
        6 => (0..6_usize, 0..101_u64).prop_map(|(charge, units)| Verb::GiveBack(charge, units)),
        3 => (0..250_u64).prop_map(Verb::ChargeAnyway),
        3 => prop_oneof![1_u64..50, 1_000_u64..600_000].prop_map(Verb::Block),
        2 => Just(Verb::Unblock),
        2 => Just(Verb::Reset),
    ];
    let plan = prop_oneof![8 => Just(0_usize), 1 => 1..3_usize];
    let pause = prop_oneof![8 => Just(0_u64), 1 => 1..40_u64];
    let step =
        (pause, plan, 0..3_u8, verb).prop_map(|(pause_ms, plan, subject, verb)| Step { pause_ms, plan, subject, verb });
    let change = prop_oneof![Just(QuotaChange::Keep), Just(QuotaChange::Reset), Just(QuotaChange::Proportional)];
    let plans = prop::collection::vec(prop::collection::vec(limits(), 1..=4), 1..4);
    (plans, change, prop::collection::vec(step, 20..80)).prop_map(|(plans, change, steps)| Trace {
        plans,
        change,
        steps,
    })
}

/// The time to live and the serialized value of every key, read atomically.
fn look(connection: &mut Connection) -> BTreeMap<String, (i64, Vec<u8>)> {
    let script = redis::Script::new(
        "local found = {}
        for _, key in ipairs(redis.call('KEYS', '*')) do
          local ttl, value = redis.call('PTTL', key), redis.call('DUMP', key)
          -- Older servers let keys expire while a script runs.
          if ttl ~= -2 and value then
            found[#found + 1] = {key, ttl, value}
          end
        end
        return found",
    );
    let found: Vec<(String, i64, Vec<u8>)> = script.invoke(connection).unwrap();
    found.into_iter().map(|(key, ttl, value)| (key, (ttl, value))).collect()
}

/// How many steps ran, and how many of them must not have changed a value.
#[derive(Debug, Default)]
struct Counted {
    steps: usize,
    unchanged: usize,
    // Keys whose time to live was compared with the lifetime of their counts.
    charged: usize,
}

struct Bench {
    counted: Counted,
    runtime: Runtime,
    backend: RedisBackend,
    connection: Connection,
}

impl Bench {
    fn run(&mut self, trace: &Trace) -> Result<(), TestCaseError> {
        let _: () = redis::cmd("FLUSHALL").query(&mut self.connection).unwrap();
        let policies: Vec<Policy> = trace
            .plans
            .iter()
            .map(|limits| {
                let policy = Policy::new("expiry", limits[0]).on_quota_change(trace.change);
                limits[1..].iter().fold(policy, |policy, limit| policy.limit(*limit))
            })
            .collect();
        // As documented: twice the longest window or time to fill a bucket, and a quarter more.
        let all = trace.plans.iter().flatten();
        let longest = all.map(|limit| limit.period().max(limit.quota().window())).max().unwrap() * 2 + GRACE;
        let longest = longest * 5 / 4 + GRACE;
        let mut charges: Vec<(usize, Key, Receipt, u64)> = Vec::new();
        // Plans whose limits differ in algorithm or window have separate counts and blocks.
        let shape = |plan: usize| -> Vec<(Algorithm, Duration)> {
            let window = |limit: &Limit| match limit.algorithm() {
                Algorithm::TokenBucket => Duration::ZERO,
                _ => limit.quota().window(),
            };
            trace.plans[plan].iter().map(|limit| (limit.algorithm(), window(limit))).collect()
        };
        let mut blocks: HashMap<(Key, Vec<(Algorithm, Duration)>), Instant> = HashMap::new();
        for (number, step) in trace.steps.iter().enumerate() {
            sleep(Duration::from_millis(step.pause_ms));
            let plan = step.plan % policies.len();
            let (policy, key) = (&policies[plan], Key::from(format!("subject-{}", step.subject)));
            let capacity = policy.limits().iter().map(Limit::capacity).min().unwrap();
            let units = |share: u64| if share == 0 { 1 } else { share * capacity / 100 };
            let (looked, before) = (Instant::now(), look(&mut self.connection));

            let Self { runtime, backend, .. } = self;
            // Whether the step may have changed a value.
            let changes = match step.verb {
                Verb::Check(_) | Verb::CheckNothing => {
                    let cost = if let Verb::Check(share) = step.verb { units(share) } else { 0 };
                    let decision = runtime.block_on(backend.check(policy, &key, cost)).unwrap();
                    if let Some(receipt) = decision.receipt() {
                        charges.push((plan, key, receipt, cost));
                    }
                    decision.is_allowed() && cost > 0
                }
                Verb::CheckAll(share) => {
                    let other = Key::from(format!("subject-{}", (step.subject + 1) % 3));
                    let requests = [key, other].map(|key| Request { policy: policy.clone(), key, cost: units(share) });
                    let decisions = runtime.block_on(backend.check_all(&requests)).unwrap();
                    decisions.iter().all(Decision::is_allowed)
                }
                Verb::CheckTogether(requests) => {
                    let mut checks = JoinSet::new();
                    for request in 0..requests {
                        let (backend, policy) = (backend.clone(), policy.clone());
                        let key = Key::from(format!("subject-{}", request % 3));
                        let check = async move { backend.check(&policy, &key, 1).await.unwrap().is_allowed() };
                        checks.spawn_on(check, runtime.handle());
                    }
                    runtime.block_on(checks.join_all()).contains(&true)
                }
                Verb::Peek(share) => {
                    let _ = runtime.block_on(backend.peek(policy, &key, units(share))).unwrap();
                    false
                }
                Verb::GiveBack(before, share) => {
                    let Some(charge) = charges.len().checked_sub(before + 1) else { continue };
                    let (plan, key, receipt, left) = &mut charges[charge];
                    let given = units(share).min(*left);
                    *left -= given;
                    let policy = &policies[*plan];
                    runtime.block_on(backend.settle(policy, key, *receipt, -(given as i64))).unwrap();
                    given > 0
                }
                Verb::ChargeAnyway(share) => {
                    let change = units(share) as i64;
                    runtime.block_on(backend.settle(policy, &key, Receipt::at_micros(0), change)).unwrap();
                    change > 0
                }
                Verb::Block(ms) => {
                    let time = Duration::from_millis(ms);
                    runtime.block_on(backend.block(policy, &key, time)).unwrap();
                    blocks.insert((key, shape(plan)), Instant::now() + time);
                    true
                }
                Verb::Unblock => {
                    runtime.block_on(backend.block(policy, &key, Duration::ZERO)).unwrap();
                    blocks.remove(&(key, shape(plan)));
                    true
                }
                Verb::Reset => {
                    runtime.block_on(backend.reset(policy, &key)).unwrap();
                    blocks.remove(&(key, shape(plan)));
                    true
                }
            };

            self.counted.steps += 1;
            self.counted.unchanged += usize::from(!changes);
            let now = Instant::now();
            let after = look(&mut self.connection);
            for (name, (ttl, _)) in &after {
                prop_assert!(*ttl != -1, "{} has no expiry after step {}: {:?}", name, number, step);
                let of_the_key = blocks.iter().filter(|((key, _), _)| name.contains(&format!(":{}}}", key.as_str())));
                let blocked = of_the_key.map(|(_, until)| until.saturating_duration_since(now) + GRACE).max();
                let blocked = blocked.unwrap_or_default();
                // Redis rounds to whole milliseconds when it sets and reads an expiry, and scripts set whole milliseconds.
                let most = longest.max(blocked) + Duration::from_millis(3);
                let ttl = Duration::from_millis(u64::try_from(*ttl).unwrap());
                prop_assert!(ttl <= most, "{} lives {:?} > {:?} after step {}: {:?}", name, ttl, most, number, step);
            }
            // A charged key lives for as long as its counts matter.
            if matches!(step.verb, Verb::Check(_) | Verb::CheckTogether(_)) {
                let counts = policy.limits().iter().map(|limit| match limit.algorithm() {
                    Algorithm::TokenBucket => limit.period(),
                    Algorithm::FixedWindow => limit.quota().window(),
                    Algorithm::SlidingWindow => 2 * limit.quota().window(),
                    // A sliding log has its own key.
                    _ => Duration::ZERO,
                });
                let least = counts.max().unwrap().saturating_sub(looked.elapsed());
                let written = after.iter().filter(|(name, (_, value))| {
                    name.ends_with(":counts") && before.get(*name).is_none_or(|(_, before)| before != value)
                });
                for (name, (ttl, _)) in written {
                    self.counted.charged += 1;
                    let ttl = Duration::from_millis(u64::try_from(*ttl).unwrap());
                    prop_assert!(
                        ttl >= least,
                        "{} lives {:?} < {:?} after step {}: {:?}",
                        name,
                        ttl,
                        least,
                        number,
                        step
                    );
                }
            }
            if !changes {
                for (name, (_, value)) in &after {
                    let was = before.get(name).map(|(_, value)| value);
                    prop_assert_eq!(was, Some(value), "{} was changed by step {}: {:?}", name, number, step);
                }
                let passed = looked.elapsed() + Duration::from_millis(2);
                for (name, (ttl, _)) in before.iter().filter(|(name, _)| !after.contains_key(*name)) {
                    let ran_out = Duration::from_millis(u64::try_from(*ttl).unwrap()) <= passed;
                    prop_assert!(ran_out, "{} was removed by step {}: {:?}", name, number, step);
                }
            }
        }
        Ok(())
    }
}

#[test]
fn every_key_expires_in_time_and_denials_write_nothing() {
    let server = RedisServer::start();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let backend = runtime.block_on(RedisBackend::connect(server.url())).unwrap();
    let bench = std::cell::RefCell::new(Bench {
        counted: Counted::default(),
        runtime,
        backend,
        connection: server.connection(),
    });
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&traces(), |trace| bench.borrow_mut().run(&trace));
    outcome.unwrap_or_else(|error| panic!("{error}"));
    let counted = &bench.borrow().counted;
    assert!(
        counted.steps >= 1_000 && counted.unchanged >= 300 && counted.charged >= 300,
        "{counted:?} is too little to prove anything"
    );
}
