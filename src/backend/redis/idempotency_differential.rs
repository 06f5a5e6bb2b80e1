//! The same for operations: random attempts run on memory, on Redis and on a model of the correct state. Each attempt may stop at any step
//! for good.

use super::*;
use crate::idempotency::store::{
    Begun, BodyFingerprint, Claim, Completion, Digest, IdempotencyRegistry, IdempotencyStore, Token,
};
use crate::idempotency::{Checkpoint, Operation, OperationState, OperationStatus, StoredResponse};

const TOKENS: usize = 4;
/// The model's token of operations that were forgotten or completed by an operator.
const NO_TOKEN: usize = usize::MAX;
const KEEP_FREE: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
struct AttemptStep {
    // In milliseconds, before the step.
    pause: u64,
    operation: u32,
    token: usize,
    head: u8,
    takes_over: bool,
    lease_ms: u64,
    // The known part of the request body.
    body: BodyFingerprint,
    verb: AttemptVerb,
}

#[derive(Clone, Copy, Debug)]
enum AttemptVerb {
    Begin,
    Renew,
    Checkpoint {
        number: u32,
    },
    Complete {
        is_kept: bool,
    },
    Release,
    Inspect,
    /// Expects the state of the last inspection.
    Forget,
    /// By an operator, who expects the state of the last inspection.
    CompleteUnknown {
        is_kept: bool,
    },
}

fn attempts() -> impl Strategy<Value = Vec<AttemptStep>> {
    // Often right at the end of a lease, of a retention, or of the memory of a released attempt.
    let pause = prop_oneof![
        6 => Just(0_u64),
        4 => 0..60_u64,
        3 => 9..12_u64,
        2 => 999..1_012_u64,
        1 => 1_999..2_002_u64,
        1 => 599_999..600_002_u64,
    ];
    let verb = prop_oneof![
        6 => Just(AttemptVerb::Begin),
        2 => Just(AttemptVerb::Renew),
        1 => (1..4_u32).prop_map(|number| AttemptVerb::Checkpoint { number }),
        1 => any::<bool>().prop_map(|is_kept| AttemptVerb::Complete { is_kept }),
        1 => Just(AttemptVerb::Release),
        2 => Just(AttemptVerb::Inspect),
        1 => Just(AttemptVerb::Forget),
        2 => any::<bool>().prop_map(|is_kept| AttemptVerb::CompleteUnknown { is_kept }),
    ];
    let head = prop_oneof![9 => Just(1_u8), 1 => Just(2)];
    let lease_ms = prop_oneof![Just(10_u64), Just(50)];
    // In no order, because earlier calls may arrive later.
    let body = (0..4_u64, prop::option::of(any::<bool>()), any::<u8>());
    let body = body.prop_map(|(len, is_whole, byte)| BodyFingerprint { len, is_whole, digest: Digest([byte; 16]) });
    let step = (pause, 0..2_u32, 0..TOKENS, head, any::<bool>(), lease_ms, body, verb);
    let step = step.prop_map(|(pause, operation, token, head, takes_over, lease_ms, body, verb)| AttemptStep {
        pause,
        operation,
        token,
        head,
        takes_over,
        lease_ms,
        body,
        verb,
    });
    prop::collection::vec(step, 100..300)
}

/// The expected state of an operation.
#[derive(Clone, Copy, Debug, Default)]
struct Model {
    state: Option<State>,
    attempt: u32,
    // The step of the last grant, plus one.
    fence: usize,
    token: usize,
    head: u8,
    body_fingerprint: BodyFingerprint,
    checkpoint: Option<u32>,
    // Whether it has a checkpoint or was taken over.
    is_bound: bool,
    // In milliseconds.
    expires: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    InFlight { ends: u64 },
    Completed { is_kept: bool },
}

const RETENTION_MS: u64 = 1_000;

impl Model {
    fn is_in_flight_by(&self, token: usize) -> bool {
        matches!(self.state, Some(State::InFlight { .. })) && self.token == token
    }

    /// The name of its state.
    fn kind(&self, now: u64) -> &'static str {
        match self.state {
            None => "nothing",
            Some(State::Free) => "free",
            Some(State::InFlight { ends }) if ends > now => "in flight",
            Some(State::InFlight { .. }) => "unknown",
            Some(State::Completed { is_kept: true }) => "completed",
            Some(State::Completed { is_kept: false }) => "completed, not kept",
        }
    }

    fn looked_at(&self, now: u64) -> String {
        let (kind, checkpoint) = (self.kind(now), self.checkpoint);
        let time = match self.state {
            None => return kind.into(),
            Some(State::InFlight { ends }) => ends.abs_diff(now),
            Some(_) => 0,
        };
        format!("{kind}, {time} ms, attempt {}, checkpoint {checkpoint:?}", self.attempt)
    }

    fn begin(&mut self, now: u64, fence: usize, step: &AttemptStep) -> String {
        let AttemptStep { token, head, takes_over, lease_ms, .. } = *step;
        match self.state {
            Some(State::Free) if self.token == token => {
                return format!("in flight for 1 ms, {}", read(&BodyFingerprint::default()));
            }
            None => {}
            Some(State::Free) if !self.is_bound => {}
            _ if self.head != head => return "mismatch".into(),
            Some(State::Completed { is_kept }) => {
                return format!(
                    "completed by {} (kept: {is_kept}), {}",
                    self.token as u8,
                    read(&self.body_fingerprint)
                );
            }
            Some(State::InFlight { .. }) if self.token == token => {
                self.state = Some(State::InFlight { ends: now + lease_ms });
                self.expires = now + lease_ms + RETENTION_MS;
                return self.granted();
            }
            Some(State::Free) => {}
            Some(State::InFlight { ends }) if ends > now => {
                return format!("in flight for {} ms, {}", ends - now, read(&self.body_fingerprint));
            }
            Some(State::InFlight { .. }) if !takes_over => {
                return format!("unknown, attempt {}, {}", self.attempt, read(&self.body_fingerprint));
            }
            Some(State::InFlight { .. }) => {}
        }
        let (attempt, expires) = (self.attempt + 1, now + lease_ms + RETENTION_MS);
        // The known part of the body is kept.
        let is_bound = self.is_bound || matches!(self.state, Some(State::InFlight { .. }));
        let state = Some(State::InFlight { ends: now + lease_ms });
        *self = Self { state, attempt, fence, token, head, is_bound, expires, ..*self };
        self.granted()
    }

    /// Stores the known part of the body, unless it is smaller than the stored one.
    fn reads(&mut self, body: BodyFingerprint) {
        let known = |body_fingerprint: &BodyFingerprint| (body_fingerprint.len, body_fingerprint.is_whole);
        if known(&body) >= known(&self.body_fingerprint) {
            self.body_fingerprint = body;
        }
    }

    fn granted(&self) -> String {
        format!("granted, attempt {}, {}, checkpoint {:?}", self.attempt, read(&self.body_fingerprint), self.checkpoint)
    }
}

/// The known part of a body, as text.
fn read(body_fingerprint: &BodyFingerprint) -> String {
    let BodyFingerprint { len, is_whole, digest } = body_fingerprint;
    format!("body {len} of {}, whole: {is_whole:?}", digest.0[0])
}

fn outcome(start: &Begun) -> String {
    match start {
        Begun::Granted { attempt, body_fingerprint, checkpoint, .. } => {
            let checkpoint = checkpoint.as_ref().map(Checkpoint::number);
            format!("granted, attempt {attempt}, {}, checkpoint {checkpoint:?}", read(body_fingerprint))
        }
        Begun::Mismatch => "mismatch".into(),
        Begun::ScopeFull { .. } => "scope full".into(),
        Begun::InFlight { remaining, body_fingerprint } => {
            format!("in flight for {} ms, {}", remaining.as_micros().div_ceil(1_000), read(body_fingerprint))
        }
        Begun::Unknown { attempt, body_fingerprint } => {
            format!("unknown, attempt {attempt}, {}", read(body_fingerprint))
        }
        Begun::Completed { body_fingerprint, response: answer, is_kept } => {
            // The answer of an operator begins with a letter.
            let by = if answer[0] == b'o' || answer.len() > 1 { NO_TOKEN as u8 } else { answer[0] };
            format!("completed by {by} (kept: {is_kept}), {}", read(body_fingerprint))
        }
    }
}

fn seen(status: Option<&OperationStatus>) -> String {
    let Some(OperationStatus { state, attempts, checkpoint, .. }) = status else { return "nothing".into() };
    let (kind, time) = match *state {
        OperationState::Free => ("free", Duration::ZERO),
        OperationState::InFlight { remaining } => ("in flight", remaining),
        OperationState::Unknown { since } => ("unknown", since),
        OperationState::Completed { is_kept: true } => ("completed", Duration::ZERO),
        OperationState::Completed { is_kept: false } => ("completed, not kept", Duration::ZERO),
    };
    let (time, checkpoint) = (time.as_micros().div_ceil(1_000), checkpoint.as_ref().map(Checkpoint::number));
    format!("{kind}, {time} ms, attempt {attempts}, checkpoint {checkpoint:?}")
}

/// The answer of an operator.
fn answer(is_kept: bool) -> StoredResponse {
    if is_kept { StoredResponse::of_operation([]) } else { StoredResponse::not_stored() }
}

fn run_attempts(trace: &[AttemptStep], pair: &mut Pair, turn: usize) -> Result<(), TestCaseError> {
    let tokens = [(); TOKENS].map(|()| Token::random().unwrap());
    let mut models = [Model::default(); 2];
    // The last granted fence of each operation, on each backend.
    let mut fences = [[0; 2]; 2];
    // The last inspection of each operation, by the model and by each backend.
    let mut looks = [const { None }; 2];
    let mut now = 0;
    for (number, step) in trace.iter().enumerate() {
        pair.pause(Duration::from_millis(step.pause));
        now += step.pause;
        let operation = Operation::new(format!("trace-{turn}"), step.operation);
        let (at, token) = (step.operation as usize, tokens[step.token]);
        let model = &mut models[at];
        if model.state.is_some() && now > model.expires {
            *model = Model::default();
        }
        let (lease, retention) = (Duration::from_millis(step.lease_ms), Duration::from_millis(RETENTION_MS));
        let head = Digest([step.head; 16]);
        let claim = Claim { takes_over: step.takes_over, ..Claim::new(token, head, lease, retention) };
        let body = step.body;
        let (expected, memory, redis) = match step.verb {
            AttemptVerb::Begin => {
                let was_ours = model.is_in_flight_by(step.token);
                let expected = model.begin(now, number + 1, step);
                let (memory, redis) = pair.both(|to| to.begin(&operation, &claim), |to| to.begin(&operation, &claim));
                for (start, last) in [&memory, &redis].into_iter().zip(&mut fences[at]) {
                    if let Begun::Granted { fence, .. } = start {
                        prop_assert!(if was_ours { fence == last } else { fence > last }, "{} {:?}", last, start);
                        *last = *fence;
                    }
                }
                (expected, outcome(&memory), outcome(&redis))
            }
            AttemptVerb::Renew => {
                let expected = model.is_in_flight_by(step.token);
                if expected {
                    model.state = Some(State::InFlight { ends: now + step.lease_ms });
                    model.expires = now + step.lease_ms + RETENTION_MS;
                    model.reads(body);
                }
                let (memory, redis) = pair.both(
                    |to| IdempotencyStore::renew(to, &operation, &claim, &body),
                    |to| IdempotencyStore::renew(to, &operation, &claim, &body),
                );
                (expected.to_string(), memory.to_string(), redis.to_string())
            }
            AttemptVerb::Checkpoint { number } => {
                let expected = model.is_in_flight_by(step.token);
                if expected && model.checkpoint.is_none_or(|last| last <= number) {
                    model.state = Some(State::InFlight { ends: now + step.lease_ms });
                    model.expires = now + step.lease_ms + RETENTION_MS;
                    model.reads(body);
                    (model.checkpoint, model.is_bound) = (Some(number), true);
                }
                let note = Checkpoint::new(number, "step", b"data").unwrap();
                let (memory, redis) = pair.both(
                    |to| to.checkpoint(&operation, &claim, &body, &note),
                    |to| to.checkpoint(&operation, &claim, &body, &note),
                );
                (expected.to_string(), memory.to_string(), redis.to_string())
            }
            AttemptVerb::Complete { is_kept } => {
                let is_done = matches!(model.state, Some(State::Completed { .. })) && model.token == step.token;
                let expected = is_done || model.is_in_flight_by(step.token);
                if expected && !is_done {
                    model.state = Some(State::Completed { is_kept });
                    (model.expires, model.body_fingerprint) = (now + RETENTION_MS, body);
                    model.checkpoint = None;
                }
                let answer = [step.token as u8].into();
                let done = Completion { response: answer, is_kept, body_fingerprint: body, retention };
                let (memory, redis) =
                    pair.both(|to| to.complete(&operation, &token, &done), |to| to.complete(&operation, &token, &done));
                (expected.to_string(), memory.to_string(), redis.to_string())
            }
            AttemptVerb::Release => {
                let expected = match model.state {
                    None | Some(State::Free) => true,
                    Some(State::InFlight { .. }) => model.token == step.token,
                    Some(State::Completed { .. }) => false,
                };
                if expected {
                    model.state = Some(State::Free);
                    let kept = now + KEEP_FREE.as_millis() as u64;
                    model.token = step.token;
                    model.expires = if model.is_bound { model.expires.max(kept) } else { kept };
                    if !model.is_bound {
                        model.body_fingerprint = BodyFingerprint::default();
                    }
                }
                let (memory, redis) = pair.both(
                    |to| IdempotencyStore::release(to, &operation, &claim),
                    |to| IdempotencyStore::release(to, &operation, &claim),
                );
                (expected.to_string(), memory.to_string(), redis.to_string())
            }
            AttemptVerb::Inspect => {
                let (memory, redis) = pair.both(
                    |to| IdempotencyRegistry::inspect(to, &operation),
                    |to| IdempotencyRegistry::inspect(to, &operation),
                );
                let outcome = (model.looked_at(now), seen(memory.as_ref()), seen(redis.as_ref()));
                if let Some((memory, redis)) = memory.zip(redis) {
                    looks[at] = Some((model.kind(now), model.fence, memory, redis));
                }
                outcome
            }
            AttemptVerb::Forget => {
                let Some((kind, fence, memory, redis)) = &looks[at] else { continue };
                let was_forgotten = model.state == Some(State::Free) && model.token == NO_TOKEN;
                let expected =
                    model.state.is_some() && model.fence == *fence && (model.kind(now) == *kind || was_forgotten);
                if expected {
                    let (attempt, fence, expires) = (model.attempt, model.fence, now + KEEP_FREE.as_millis() as u64);
                    let (state, token) = (Some(State::Free), NO_TOKEN);
                    *model = Model { state, attempt, fence, token, expires, ..Model::default() };
                }
                let (memory, redis) = pair
                    .both(|to| IdempotencyRegistry::forget(to, memory), |to| IdempotencyRegistry::forget(to, redis));
                (expected.to_string(), memory.to_string(), redis.to_string())
            }
            AttemptVerb::CompleteUnknown { is_kept } => {
                let Some((kind, fence, memory, redis)) = &looks[at] else { continue };
                let was_completed = model.state == Some(State::Completed { is_kept }) && model.token == NO_TOKEN;
                let is_completed = matches!(model.state, Some(State::Completed { .. })) && model.token == NO_TOKEN;
                let is_as_found = model.kind(now) == *kind && (*kind == "unknown" || is_completed);
                let can_be = *kind == "unknown" || kind.starts_with("completed");
                let expected = model.fence == *fence && can_be && (is_as_found || was_completed);
                if expected && !was_completed {
                    (model.state, model.token) = (Some(State::Completed { is_kept }), NO_TOKEN);
                    (model.expires, model.checkpoint) = (now + RETENTION_MS, None);
                }
                let answer = answer(is_kept);
                let (memory, redis) = pair.both(
                    |to| to.complete_unknown(memory, &answer, retention),
                    |to| to.complete_unknown(redis, &answer, retention),
                );
                (expected.to_string(), memory.to_string(), redis.to_string())
            }
        };
        prop_assert_eq!(&memory, &expected, "memory at step {}: {:?}", number, step);
        prop_assert_eq!(&redis, &expected, "redis at step {}: {:?}", number, step);
    }
    pair.check_expiries();
    Ok(())
}

#[test]
fn memory_and_redis_agree_with_model_of_operations() {
    let server = RedisServer::start();
    let (turns, steps) = (Cell::new(0), Cell::new(0));
    let config = config(50);
    let outcome = TestRunner::new(config).run(&attempts(), |trace| {
        turns.set(turns.get() + 1);
        steps.set(steps.get() + trace.len());
        run_attempts(&trace, &mut Pair::new(&server), turns.get())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(steps.get() >= STEPS / 2, "only {} steps were compared", steps.get());
}
