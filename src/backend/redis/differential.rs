//! The scripts and the memory backend must decide alike: random traces drive both on the same clock, and every field of
//! every decision is compared.
//!
//! The scripts run on a real server, through the calls that production uses. Only their clock is replaced (see
//! `virtual_clock.lua`), since nobody can wait for a day, or hit a microsecond, on a real one.

use std::cell::Cell;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::runtime::{Builder, Runtime};

use super::RedisBackend;
use super::scripts::{LuaScript, Scripts};
use crate::MemoryBackend;
use crate::key::Key;
use crate::rate_limit::{Algorithm, Decision, Policy, Quota, RateLimitStore};

#[path = "../../../tests/support/server.rs"]
#[allow(dead_code, unreachable_pub)]
mod server;

use self::server::RedisServer;

const CLOCK: &str = "{clock}:now";
/// When the virtual clock starts, in microseconds: a date of our time, so that numbers are as long as they really are.
const START_US: u64 = 1_800_000_000_000_000;
/// How many steps a run compares at least.
const STEPS: usize = 10_000;

#[derive(Clone, Debug)]
struct Trace {
    algorithm: Algorithm,
    window: Duration,
    // The limit changes to another of these now and then.
    limits: Vec<u32>,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
struct Step {
    // Before the step, in parts per million of the window; 0 for none.
    pause: u64,
    subject: u8,
    limit: usize,
    verb: Verb,
}

#[derive(Clone, Debug)]
enum Verb {
    // Costs in parts per thousand of the limit, rounded down.
    Check { cost: u32 },
    Peek { cost: u32 },
    Reset,
}

fn traces() -> impl Strategy<Value = Trace> {
    let limits = prop_oneof![prop::collection::vec(1_u32..12, 1..3), prop::collection::vec(90_u32..300, 1..3)];
    let window = prop_oneof![
        Just(Quota::MIN_WINDOW),
        Just(Duration::from_micros(1_234_567)),
        Just(Duration::from_secs(60)),
        // Not the longest there is: a trace must end before microseconds no longer fit into 53 bits, in 2255.
        Just(Duration::from_secs(30 * 86_400)),
    ];
    let algorithm = prop_oneof![Just(Algorithm::FixedWindow), Just(Algorithm::SlidingLog)];
    // Mostly as many pauses in a window as a log has entries, sometimes right at the edge of a window or beyond it.
    let pause = prop_oneof![
        60 => Just(0_u64),
        240 => 0..12_000_u64,
        6 => 0..600_000_u64,
        2 => 999_990..1_000_010_u64,
        1 => 0..3_000_000_u64,
    ];
    // Resets are rare, so that logs grow long enough to be cut.
    let verb = prop_oneof![
        400 => prop_oneof![60 => Just(0_u32), 6 => 0..30_u32, 1 => 0..1_001_u32].prop_map(|cost| Verb::Check { cost }),
        80 => (0..1_001_u32).prop_map(|cost| Verb::Peek { cost }),
        1 => Just(Verb::Reset),
    ];
    let subject = prop_oneof![20 => Just(0_u8), 1 => 1..3_u8];
    // Changes of the limit are rare.
    let limit = prop_oneof![20 => Just(0_usize), 1 => 0..3_usize];
    let step =
        (pause, subject, limit, verb).prop_map(|(pause, subject, limit, verb)| Step { pause, subject, limit, verb });
    (algorithm, window, limits, prop::collection::vec(step, 250..600))
        .prop_map(|(algorithm, window, limits, steps)| Trace { algorithm, window, limits, steps })
}

/// Both backends, each in a runtime of its own: a paused clock would run away while Redis is waited for.
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
        let redis = redis_runtime.block_on(RedisBackend::connect(server.url())).unwrap().on_virtual_clock();
        Self { memory_runtime, memory, redis_runtime, redis, connection: server.connection(), now_us: START_US }
    }

    fn pause(&mut self, pause: Duration) {
        self.memory_runtime.block_on(tokio::time::advance(pause));
        self.now_us += pause.as_micros() as u64;
        let _: () = redis::cmd("SET").arg(CLOCK).arg(self.now_us).query(&mut self.connection).unwrap();
    }

    fn check(&self, policy: &Policy, key: &Key, cost: u32) -> (Decision, Decision) {
        let memory = self.memory_runtime.block_on(self.memory.check(policy, key, cost)).unwrap();
        (memory, self.redis_runtime.block_on(self.redis.check(policy, key, cost)).unwrap())
    }

    fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> (Decision, Decision) {
        let memory = self.memory_runtime.block_on(self.memory.peek(policy, key, cost)).unwrap();
        (memory, self.redis_runtime.block_on(self.redis.peek(policy, key, cost)).unwrap())
    }

    fn reset(&mut self, policy: &Policy, key: &Key) {
        self.memory_runtime.block_on(self.memory.reset(policy, key)).unwrap();
        self.redis_runtime.block_on(self.redis.reset(policy, key)).unwrap();
        let due = format!("{}#due", self.redis.inner.keys.rate_limit(policy, key));
        let _: () = redis::cmd("DEL").arg(due).query(&mut self.connection).unwrap();
    }

    /// Every count has an expiry beside it.
    fn check_expiries(&mut self) {
        let keys: Vec<String> = redis::cmd("KEYS").arg("tollgate:*").query(&mut self.connection).unwrap();
        for key in keys.iter().filter(|key| !key.ends_with("#due")) {
            assert!(keys.contains(&format!("{key}#due")), "{key} has no expiry");
        }
    }
}

fn run(trace: &Trace, pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    // A name of its own keeps the traces apart.
    let policies: Vec<Policy> = trace
        .limits
        .iter()
        .map(|&limit| {
            let quota = Quota::new(limit, trace.window).unwrap();
            let limit = match trace.algorithm {
                Algorithm::FixedWindow => quota.fixed_window(),
                Algorithm::SlidingLog => quota.sliding_log().unwrap(),
            };
            Policy::new(format!("trace-{turn}"), limit)
        })
        .collect();
    for (number, step) in trace.steps.iter().enumerate() {
        pair.pause(Duration::from_micros(trace.window.as_micros() as u64 / 1_000 * step.pause / 1_000));
        let policy = &policies[step.limit % policies.len()];
        let key = Key::from(u32::from(step.subject));
        let limit = policy.limit().quota().limit();
        let cost_of = |share: u32| if share == 0 { 1 } else { share * limit / 1_000 };
        let (memory, redis) = match step.verb {
            Verb::Check { cost } => pair.check(policy, &key, cost_of(cost)),
            Verb::Peek { cost } => pair.peek(policy, &key, cost_of(cost)),
            Verb::Reset => {
                pair.reset(policy, &key);
                continue;
            }
        };
        prop_assert_eq!(memory, redis, "memory left, redis right, at step {}: {:?}", number, step);
    }
    pair.check_expiries();
    Ok(())
}

#[test]
fn memory_and_redis_decide_alike() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = Config { cases: 40, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&traces(), |trace| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.steps.len());
        run(&trace, &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS, "{} steps are too few to say anything", steps.get());
}

impl RedisBackend {
    /// The same connections and keys, with scripts that read the clock of the test.
    fn on_virtual_clock(&self) -> Self {
        let prelude = include_str!("virtual_clock.lua");
        let Scripts { fixed_window, sliding_log } = Scripts::new();
        let [fixed_window, sliding_log] =
            [fixed_window, sliding_log].map(|script| LuaScript::new(&format!("{prelude}\n{}", script.code())));
        let scripts = Scripts { fixed_window, sliding_log };
        let super::Inner { pool, keys, .. } = &*self.inner;
        Self { inner: std::sync::Arc::new(super::Inner { pool: pool.clone(), keys: keys.clone(), scripts }) }
    }
}
