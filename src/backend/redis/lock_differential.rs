//! The same for locks: what is granted, to whom and for how long.

use super::*;
use crate::lock::{Acquired, Claim, LockKey, LockStore, Renewal, Token};

#[derive(Clone, Debug)]
struct LockStep {
    // In microseconds, before the step.
    pause: u64,
    lock: u32,
    token: usize,
    ttl_ms: u64,
    fences: u32,
    verb: LockVerb,
}

#[derive(Clone, Copy, Debug)]
enum LockVerb {
    Acquire,
    Renew,
    Release,
}

fn lock_traces() -> impl Strategy<Value = Vec<LockStep>> {
    // Often right at the end of a lease.
    let pause = prop_oneof![3 => Just(0_u64), 3 => 0..60_000_u64, 2 => 9_990..10_010_u64, 1 => Just(10_000_u64)];
    let ttl_ms = prop_oneof![Just(10_u64), Just(50), Just(86_400_000)];
    let verb = prop_oneof![3 => Just(LockVerb::Acquire), 2 => Just(LockVerb::Renew), 1 => Just(LockVerb::Release)];
    let step = (pause, 0..2_u32, 0..3_usize, ttl_ms, verb).prop_map(|(pause, lock, token, ttl_ms, verb)| LockStep {
        pause,
        lock,
        token,
        ttl_ms,
        // The same whenever this token asks.
        fences: token as u32 * 7 + 1,
        verb,
    });
    prop::collection::vec(step, 100..300)
}

fn run_lock_trace(trace: &[LockStep], pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    let tokens = [(); 3].map(|()| Token::random().unwrap());
    // The last fence of each lock that was given out, on either backend.
    let mut fences = [[0; 2]; 2];
    // The grants of each lock, by token.
    let mut grants: [[Option<[u64; 2]>; 3]; 2] = Default::default();
    // A lock, or a semaphore.
    let permits = 1 + turn as u32 % 3;
    for (number, step) in trace.iter().enumerate() {
        pair.pause(Duration::from_micros(step.pause));
        let lock = LockKey::new(format!("trace-{turn}"), step.lock);
        let (token, ttl) = (tokens[step.token], Duration::from_millis(step.ttl_ms));
        let at = step.lock as usize;
        match step.verb {
            LockVerb::Acquire => {
                let claim = Claim { token, ttl, fences: step.fences, permits };
                match pair.both(|to| to.acquire(&lock, &claim), |to| to.acquire(&lock, &claim)) {
                    (Acquired::Granted { fence: memory }, Acquired::Granted { fence: redis }) => {
                        let granted = [memory, redis];
                        if grants[at][step.token] != Some(granted) {
                            for (fence, last) in granted.iter().zip(&mut fences[at]) {
                                prop_assert!(*fence > *last, "{} after {} at step {}: {:?}", fence, last, number, step);
                                *last = fence + u64::from(step.fences) - 1;
                            }
                        }
                        grants[at][step.token] = Some(granted);
                    }
                    (Acquired::Busy { remaining: memory }, Acquired::Busy { remaining: redis }) => {
                        // Redis answers in milliseconds, rounded up.
                        prop_assert_eq!(memory.as_micros().div_ceil(1_000), redis.as_millis(), "at step {}", number);
                    }
                    (memory, redis) => {
                        prop_assert!(false, "memory {:?}, redis {:?}, at step {}: {:?}", memory, redis, number, step);
                    }
                }
            }
            LockVerb::Renew => {
                let others = Renewal { lock: LockKey::new("nobody", 0), token, ttl };
                let renewals = [Renewal { lock, token, ttl }, others];
                let (memory, redis) = pair.both(|to| to.renew(&renewals), |to| to.renew(&renewals));
                prop_assert_eq!(memory, redis, "at step {}: {:?}", number, step);
            }
            LockVerb::Release => {
                let (memory, redis) = pair.both(|to| to.release(&lock, &token), |to| to.release(&lock, &token));
                prop_assert_eq!(memory, redis, "at step {}: {:?}", number, step);
            }
        }
    }
    pair.check_expiries();
    Ok(())
}

#[test]
fn memory_and_redis_lend_alike() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = Config { cases: 50, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&lock_traces(), |trace| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.len());
        run_lock_trace(&trace, &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS / 2, "{} steps are too few to say anything", steps.get());
}
