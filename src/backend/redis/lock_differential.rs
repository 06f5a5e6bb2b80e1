//! The same for locks: which token gets a lease, and for how long.

use super::*;
use crate::backend::redis::Inner;
use crate::lock::store::{Acquired, Claim, LockStore, Queueing, Released, Renewal, Token};
use crate::lock::{LockKey, LockKind};
use std::sync::Arc;

#[derive(Clone, Debug)]
struct LockStep {
    // The time before the step, in microseconds.
    pause: u64,
    lock: u32,
    token: usize,
    ttl_ms: u64,
    verb: LockVerb,
}

#[derive(Clone, Debug)]
enum LockVerb {
    Acquire,
    // Both locks or none, with a token for each.
    AcquireAll { tokens: [usize; 2] },
    // Releases and acquisitions in one batch, as locks and tokens.
    Exchange { held: Vec<(u32, usize)>, acquisitions: Vec<(u32, usize)> },
    Renew,
    // May renew several leases of one semaphore.
    RenewMany { held: Vec<(u32, usize)> },
    Release,
}

fn lock_traces() -> impl Strategy<Value = Vec<LockStep>> {
    // Often right at the end of a lease.
    let soon = prop_oneof![3 => Just(0_u64), 3 => 0..60_000_u64, 2 => 9_990..10_010_u64, 1 => Just(10_000_u64)];
    // Sometimes so long that the next grant has to write the expiry again.
    let pause = prop_oneof![9 => soon, 1 => 0..100_000_000_u64];
    let ttl_ms = prop_oneof![Just(10_u64), Just(50), Just(60_000), Just(86_400_000)];
    let several = || prop::collection::vec((0..2_u32, 0..3_usize), 1..6);
    let some = || prop::collection::vec((0..2_u32, 0..3_usize), 0..6);
    let verb = prop_oneof![
        3 => Just(LockVerb::Acquire),
        1 => [0..3_usize, 0..3_usize].prop_map(|tokens| LockVerb::AcquireAll { tokens }),
        5 => (some(), some()).prop_map(|(held, acquisitions)| LockVerb::Exchange { held, acquisitions }),
        1 => Just(LockVerb::Renew),
        1 => several().prop_map(|held| LockVerb::RenewMany { held }),
        1 => Just(LockVerb::Release),
    ];
    let step = (pause, 0..2_u32, 0..3_usize, ttl_ms, verb).prop_map(|(pause, lock, token, ttl_ms, verb)| LockStep {
        pause,
        lock,
        token,
        ttl_ms,
        verb,
    });
    prop::collection::vec(step, 100..300)
}

fn run_lock_trace(trace: &[LockStep], pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    let tokens = [(); 3].map(|()| Token::random().unwrap());
    // The last granted fence of each lock, on each backend.
    let mut fences = [[0; 2]; 2];
    // The grants of each lock, by token.
    let mut grants: [[Option<[u64; 2]>; 3]; 2] = Default::default();
    // One for an exclusive lock, more for a semaphore.
    let permits = 1 + turn as u32 % 3;
    // The same for all claims of a trace, because a repeated claim must not differ.
    let fences_each = 1 + turn as u32 % 4 * 5;
    let lock_at = |at: u32| LockKey::new(format!("trace-{turn}"), at);
    // When each lock was last found to be held.
    let mut held = [0; 2];
    for (number, step) in trace.iter().enumerate() {
        pair.pause(Duration::from_micros(step.pause));
        let (lock, token, ttl) = (lock_at(step.lock), tokens[step.token], Duration::from_millis(step.ttl_ms));
        match &step.verb {
            LockVerb::Acquire => {
                let claim = Claim { fences: fences_each, permits, ..Claim::new(token, ttl) };
                let answers = pair.both(|to| to.acquire(&lock, &claim), |to| to.acquire(&lock, &claim));
                let at = step.lock as usize;
                agree(answers, &mut grants[at][step.token], &mut fences[at], fences_each)
                    .map_err(|why| TestCaseError::fail(format!("{why}, at step {number}: {step:?}")))?;
            }
            LockVerb::AcquireAll { tokens: each } => {
                let claim = |token: usize| Claim { fences: fences_each, ..Claim::new(tokens[token], ttl) };
                let wanted = [0, 1].map(|at| (lock_at(at as u32), claim(each[at])));
                let (memory, redis) = pair.both(|to| to.acquire_all(&wanted), |to| to.acquire_all(&wanted));
                prop_assert_eq!((memory.len(), redis.len()), (2, 2));
                for (at, answers) in memory.into_iter().zip(redis).enumerate() {
                    agree(answers, &mut grants[at][each[at]], &mut fences[at], fences_each)
                        .map_err(|why| TestCaseError::fail(format!("{why}, at step {number}: {step:?}")))?;
                }
            }
            LockVerb::Exchange { held, acquisitions } => {
                let held: Vec<_> = held.iter().map(|&(at, token)| (lock_at(at), tokens[token])).collect();
                let wanted = acquisitions
                    .iter()
                    .map(|&(at, token)| (lock_at(at), Claim { fences: fences_each, ..Claim::new(tokens[token], ttl) }));
                let wanted: Vec<_> = wanted.collect();
                let (released, acquired) = pair.exchange(&held, &wanted);
                // First compare the calls that the batch has executed, then make the calls that it skipped.
                for is_left in [false, true] {
                    for ((lock, token), released) in held.iter().zip(&released) {
                        if released.is_none() == is_left {
                            let (memory, redis) = pair.both(
                                |memory| memory.release(lock, token),
                                async |redis: &RedisBackend| match released {
                                    Some(listeners) => Ok(Released { was_held: true, is_wanted: *listeners > 0 }),
                                    None => redis.release(lock, token).await,
                                },
                            );
                            prop_assert_eq!(memory, redis, "at step {}: {:?}", number, step);
                        }
                    }
                    for ((&(at, token), (lock, claim)), acquired) in acquisitions.iter().zip(&wanted).zip(&acquired) {
                        if acquired.is_none() == is_left {
                            let answers = pair.both(
                                |memory| memory.acquire(lock, claim),
                                async |redis: &RedisBackend| match acquired {
                                    Some(answer) => Ok(*answer),
                                    None => redis.acquire(lock, claim).await,
                                },
                            );
                            let at = at as usize;
                            agree(answers, &mut grants[at][token], &mut fences[at], fences_each)
                                .map_err(|why| TestCaseError::fail(format!("{why}, at step {number}: {step:?}")))?;
                        }
                    }
                }
            }
            LockVerb::Renew => {
                let others = Renewal::new(LockKey::new("not held", 0), token, ttl);
                let renewals = [Renewal::new(lock, token, ttl), others];
                let (memory, redis) = pair.both(|to| to.renew(&renewals), |to| to.renew(&renewals));
                prop_assert_eq!(memory, redis, "at step {}: {:?}", number, step);
            }
            LockVerb::RenewMany { held } => {
                let renewals = held.iter().map(|&(at, token)| Renewal::new(lock_at(at), tokens[token], ttl));
                let renewals: Vec<_> = renewals.collect();
                let (memory, redis) = pair.both(|to| to.renew(&renewals), |to| to.renew(&renewals));
                prop_assert_eq!(memory, redis, "at step {}: {:?}", number, step);
            }
            LockVerb::Release => {
                let (memory, redis) = pair.both(|to| to.release(&lock, &token), |to| to.release(&lock, &token));
                prop_assert_eq!(memory, redis, "at step {}: {:?}", number, step);
            }
        }
        for (at, held) in held.iter_mut().enumerate() {
            let lives = pair.outlives(&lock_at(at as u32), held);
            prop_assert!(lives, "the last fence of lock {at} expires too early after step {number}: {step:?}");
        }
    }
    pair.check_expiries();
    Ok(())
}

/// Checks that memory and Redis give the same answer to an acquisition: a grant with rising fences, or a refusal with the same remaining
/// time.
fn agree(
    answers: (Acquired, Acquired),
    grant: &mut Option<[u64; 2]>,
    last_fences: &mut [u64; 2],
    fences_each: u32,
) -> Result<(), String> {
    match answers {
        (Acquired::Granted { fence: memory }, Acquired::Granted { fence: redis }) => {
            let granted = [memory, redis];
            if *grant != Some(granted) {
                for (fence, last) in granted.iter().zip(last_fences) {
                    if fence <= last {
                        return Err(format!("{fence} after {last}"));
                    }
                    *last = fence + u64::from(fences_each) - 1;
                }
            }
            *grant = Some(granted);
            Ok(())
        }
        // Redis replies in milliseconds, rounded up.
        (Acquired::Busy { remaining: memory }, Acquired::Busy { remaining: redis })
            if memory.as_micros().div_ceil(1_000) == redis.as_millis() =>
        {
            Ok(())
        }
        (memory, redis) => Err(format!("memory {memory:?}, redis {redis:?}")),
    }
}

impl Pair {
    /// Redis's answers to releases and acquisitions in one batch, as if other calls were in flight.
    fn exchange(
        &self,
        held: &[(LockKey, Token)],
        wanted: &[(LockKey, Claim)],
    ) -> (Vec<Option<u64>>, Vec<Option<Acquired>>) {
        let Inner { keys, scripts, auxiliary, .. } = &*self.redis.inner;
        let (own, scripts, keys) = (auxiliary.dedicated().clone(), Arc::clone(scripts), Arc::clone(keys));
        let outcome =
            super::super::batch::lock::exchange_batch(own, scripts, keys, held.iter().copied(), wanted.iter().copied());
        self.redis_runtime.block_on(outcome).unwrap()
    }

    /// Whether the last fence of a lock is remembered for ten minutes after its current leases, or without any, for ten minutes after
    /// `held`. Updates `held`.
    fn outlives(&mut self, lock: &LockKey, held: &mut u64) -> bool {
        const KEPT_US: u64 = 10 * 60 * 1_000_000;
        let lease = self.redis.inner.keys.lease(lock);
        let looks = [lease.clone(), format!("{lease}#due")];
        let (value, due): (Option<Vec<u8>>, Option<u64>) =
            redis::cmd("MGET").arg(&looks).query(&mut self.connection).unwrap();
        let due_us = due.unwrap_or_default() * 1_000;
        // The value may have expired on the virtual clock, and is deleted on the next access.
        let holders = value.iter().flat_map(|value| value[8..].chunks(34)).filter(|_| due_us > self.now_us);
        let ends = holders.map(|holder| holder[..7].iter().rfold(0, |number, byte| number << 8 | u64::from(*byte)));
        let latest = ends.max().filter(|ends| *ends > self.now_us);
        if latest.is_some() {
            *held = self.now_us;
        }
        let needed = latest.unwrap_or(*held) + KEPT_US;
        needed <= self.now_us || *held == 0 || due_us + 1_000 >= needed
    }
}

#[test]
fn memory_and_redis_grant_alike() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = config(50);
    let outcome = TestRunner::new(config).run(&lock_traces(), |trace| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.len());
        run_lock_trace(&trace, &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS / 2, "only {} steps were compared", steps.get());
}

/// The expected holders and wait queue of a lock, as documented. Written for clarity, not for speed.
#[derive(Default)]
struct Model {
    // Tokens and ends, in microseconds.
    holders: Vec<(usize, u64)>,
    is_shared: bool,
    queue: Vec<(usize, u64)>,
}

#[derive(Debug, PartialEq)]
enum Answer {
    Granted,
    Busy,
    Queued { is_first: bool },
}

/// Maximum number of concurrent readers in these traces.
const READERS: u32 = 2;
const PLACE_US: u64 = Claim::POSITION_TTL.as_micros() as u64;

/// Whether a token reads. Even tokens write.
const fn reads(token: usize) -> bool {
    token % 2 == 1
}

impl Model {
    fn acquire(&mut self, token: usize, ttl_us: u64, joins: bool, now: u64) -> Answer {
        self.holders.retain(|(_, ends)| *ends > now);
        self.queue.retain(|(_, ends)| *ends > now);
        let place = self.queue.iter().position(|(waiting, _)| *waiting == token);
        if let Some(holder) = self.holders.iter_mut().find(|(holder, _)| *holder == token) {
            holder.1 = now + ttl_us;
            return Answer::Granted;
        }
        let with_others = reads(token) && self.is_shared && self.holders.len() < READERS as usize;
        if (self.holders.is_empty() || with_others) && (self.queue.is_empty() || place == Some(0)) {
            if place.is_some() {
                self.queue.remove(0);
            }
            self.holders.push((token, now + ttl_us));
            self.is_shared = reads(token);
            return Answer::Granted;
        }
        match place {
            _ if !joins => return Answer::Busy,
            Some(place) => self.queue[place].1 = now + PLACE_US,
            None => self.queue.push((token, now + PLACE_US)),
        }
        Answer::Queued { is_first: self.queue[0].0 == token }
    }

    fn renew(&mut self, token: usize, ttl_us: u64, now: u64) -> bool {
        let holder = self.holders.iter_mut().find(|(holder, ends)| *holder == token && *ends > now);
        holder.map(|holder| holder.1 = now + ttl_us).is_some()
    }

    fn release(&mut self, token: usize, now: u64) -> bool {
        let was_held = self.holders.iter().any(|(holder, ends)| *holder == token && *ends > now);
        if self.holders.iter().all(|(holder, _)| *holder != token) {
            self.queue.retain(|(waiting, _)| *waiting != token);
        }
        self.holders.retain(|(holder, _)| *holder != token);
        was_held
    }
}

#[derive(Clone, Debug)]
struct LineStep {
    pause: u64,
    token: usize,
    ttl_ms: u64,
    verb: LineVerb,
}

#[derive(Clone, Copy, Debug)]
enum LineVerb {
    Join,
    Try,
    Renew,
    Release,
}

fn line_traces() -> impl Strategy<Value = Vec<LineStep>> {
    // Often zero, sometimes right at the end of a lease or of a position in the queue.
    let pause = prop_oneof![
        6 => Just(0_u64),
        4 => 0..40_000_u64,
        2 => 9_990..10_010_u64,
        1 => PLACE_US - 10..PLACE_US + 10,
    ];
    let ttl_ms = prop_oneof![Just(10_u64), Just(50), Just(5_000)];
    let verb = prop_oneof![
        6 => Just(LineVerb::Join),
        1 => Just(LineVerb::Try),
        2 => Just(LineVerb::Renew),
        3 => Just(LineVerb::Release),
    ];
    let step = (pause, 0..6_usize, ttl_ms, verb).prop_map(|(pause, token, ttl_ms, verb)| LineStep {
        pause,
        token,
        ttl_ms,
        verb,
    });
    prop::collection::vec(step, 100..300)
}

fn run_line_trace(trace: &[LineStep], pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    let tokens = [(); 6].map(|()| Token::random().unwrap());
    let lock = LockKey::new("line", turn.to_string());
    let mut model = Model::default();
    for (number, step) in trace.iter().enumerate() {
        pair.pause(Duration::from_micros(step.pause));
        let (token, ttl, now) = (tokens[step.token], Duration::from_millis(step.ttl_ms), pair.now_us);
        let ttl_us = step.ttl_ms * 1_000;
        match step.verb {
            LineVerb::Join | LineVerb::Try => {
                let joins = matches!(step.verb, LineVerb::Join);
                let claim = Claim {
                    kind: LockKind::ReadWrite,
                    permits: if reads(step.token) { READERS } else { 1 },
                    is_shared: reads(step.token),
                    queueing: if joins { Queueing::Enqueue } else { Queueing::Yield },
                    ..Claim::new(token, ttl)
                };
                let (memory, redis) = pair.both(|to| to.acquire(&lock, &claim), |to| to.acquire(&lock, &claim));
                let expected = model.acquire(step.token, ttl_us, joins, now);
                for (backend, answer) in [("memory", &memory), ("redis", &redis)] {
                    let seen = match *answer {
                        Acquired::Granted { .. } => Answer::Granted,
                        Acquired::Busy { .. } => Answer::Busy,
                        Acquired::Queued { is_first, .. } => Answer::Queued { is_first },
                        answer => panic!("the queue has room for six: {answer:?}"),
                    };
                    prop_assert_eq!(&seen, &expected, "{} at step {}: {:?}", backend, number, step);
                }
                let remaining = |answer| match answer {
                    Acquired::Busy { remaining } | Acquired::Queued { remaining, .. } => remaining,
                    _ => Duration::ZERO,
                };
                let (memory, redis) = (remaining(memory), remaining(redis));
                prop_assert_eq!(memory.as_micros().div_ceil(1_000), redis.as_millis(), "at step {}", number);
            }
            LineVerb::Renew => {
                let renewals = [Renewal::new(lock, token, ttl)];
                let (memory, redis) = pair.both(|to| to.renew(&renewals), |to| to.renew(&renewals));
                let expected = vec![model.renew(step.token, ttl_us, now)];
                prop_assert_eq!((&memory, &redis), (&expected, &expected), "at step {}: {:?}", number, step);
            }
            LineVerb::Release => {
                let (memory, redis) = pair.both(|to| to.release(&lock, &token), |to| to.release(&lock, &token));
                let expected = model.release(step.token, now);
                let seen = (memory.was_held, redis.was_held);
                prop_assert_eq!(seen, (expected, expected), "at step {}: {:?}", number, step);
            }
        }
    }
    pair.check_expiries();
    Ok(())
}

#[test]
fn memory_and_redis_keep_the_same_queue() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = config(50);
    let outcome = TestRunner::new(config).run(&line_traces(), |trace| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.len());
        run_line_trace(&trace, &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS / 2, "only {} steps were compared", steps.get());
}

/// Regression: 449 of 527 grants had a smaller fence than the grant before. The store had lost the last fence, and its clock was behind it.
#[test]
fn fences_rise_after_data_loss_and_clock_set_back() {
    let server = RedisServer::start();
    let mut pair = Pair::new(&server);
    let locks = [0, 1].map(|at| LockKey::new("forgotten", at));
    let mut last = 0;
    for round in 0..12 {
        let _: () =
            redis::cmd("SET").arg(CLOCK).arg(START_US - round * 45_000_000).query(&mut pair.connection).unwrap();
        let claim = || Claim { fences: 16, ..Claim::new(Token::random().unwrap(), Duration::from_secs(30)) };
        let fair = || Claim { queueing: Queueing::Enqueue, ..claim() };
        let redis = &pair.redis;
        let answers = pair.redis_runtime.block_on(async {
            match round % 4 {
                0 => vec![redis.acquire(&locks[0], &claim()).await.unwrap()],
                1 => vec![redis.acquire(&locks[0], &fair()).await.unwrap()],
                _ => redis.acquire_all(&locks.map(|lock| (lock, claim()))).await.unwrap(),
            }
        });
        let answers = if round % 4 == 3 {
            for lock in &locks {
                let _: u64 = redis::cmd("DEL").arg(redis.inner.keys.lease(lock)).query(&mut pair.connection).unwrap();
            }
            let (_, outcome) = pair.exchange(&[], &locks.map(|lock| (lock, claim())));
            outcome.into_iter().map(|answer| answer.unwrap()).collect()
        } else {
            answers
        };
        let fences = answers.into_iter().map(|answer| match answer {
            Acquired::Granted { fence } => fence,
            answer => panic!("{answer:?} in round {round}"),
        });
        let fences: Vec<_> = fences.collect();
        assert!(fences.iter().all(|fence| *fence > last), "{fences:?} after {last} in round {round}");
        last = fences.into_iter().max().unwrap() + 15;
        for lock in &locks {
            let lease = pair.redis.inner.keys.lease(lock);
            let _: u64 = redis::cmd("DEL").arg(lease).query(&mut pair.connection).unwrap();
        }
    }
    // Another backend has its own floor.
    let other = Pair::new(&server);
    let _: () = redis::cmd("SET").arg(CLOCK).arg(START_US).query(&mut pair.connection).unwrap();
    let claim = Claim::new(Token::random().unwrap(), Duration::from_secs(30));
    let answer = other.redis_runtime.block_on(other.redis.acquire(&locks[0], &claim)).unwrap();
    assert_eq!(answer, Acquired::Granted { fence: START_US });
}
