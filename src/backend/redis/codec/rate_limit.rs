//! The encoding of `lua/rate_limit_check.lua`: the parameters of a policy in requests, and the packed counts in replies.

use std::time::Duration;

pub(crate) use crate::rate_limit::EncodedLimits;
use crate::rate_limit::algorithm::{Count, LimitParams, carry_over, receipt};
use crate::rate_limit::{Algorithm, Decision, LimitStatus, Policy};

const VERSION: u8 = 5;
/// The first byte of the value of a blocked key. The end of the block follows, and then the counts.
const BLOCKED: u8 = 2;
/// The statuses in the long form of a reply: see [`decision`].
const BLOCKED_STATUS: u64 = 2;
const ADMITTED: u8 = 3;
const INSTANT: usize = 7;
/// Doubles represent all integers up to this one.
const EXACT: i64 = 1 << 53;
/// The length in bytes of a number of a count, and of the time of the last update.
const NUMBER: usize = 8;

const fn code(algorithm: Algorithm) -> u8 {
    match algorithm {
        Algorithm::TokenBucket => 1,
        Algorithm::FixedWindow => 2,
        Algorithm::SlidingWindow => 3,
        Algorithm::SlidingLog => 4,
    }
}

/// How many numbers the count of a limit has.
const fn numbers(algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::FixedWindow => 2,
        Algorithm::TokenBucket | Algorithm::SlidingWindow => 3,
        Algorithm::SlidingLog => 0,
    }
}

/// Encodes the parameters, and the prefix of the stored counts. The prefix has the parameters that are not part of the key.
pub(crate) fn encode(params: &[LimitParams]) -> EncodedLimits {
    // Plus one for the time of the last update.
    let numbers = 1 + params.iter().map(|params| numbers(params.algorithm)).sum::<usize>();
    let (mut all, mut limits) = (Vec::new(), vec![VERSION]);
    for LimitParams { algorithm, span, step, parts, capacity } in params {
        let [span, step, capacity] = [span, step, capacity].map(|number| number.to_le_bytes());
        let rate = [&span[..7], &step[..7], &parts.to_le_bytes()].concat();
        all.push(code(*algorithm));
        all.extend(&rate);
        all.extend(&capacity[..7]);
        if *algorithm == Algorithm::TokenBucket {
            limits.extend(&rate);
        }
        limits.extend(&capacity[..7]);
    }
    let layout = format!("<{}", "d".repeat(numbers));
    EncodedLimits {
        params: all,
        format: format!("c{}{layout}", limits.len()),
        limits,
        layout,
        counts_len: numbers * NUMBER,
        ttl_ms: time_to_live_ms(params),
    }
}

/// Whether this reply, one of several, admits its descriptor.
pub(crate) fn is_admitted(reply: &[u8]) -> bool {
    reply.first() == Some(&ADMITTED)
}

/// The longest time for which written counts can affect a decision, for instance until the largest debt is refilled. A quarter is added,
/// because the scripts do not write the expiry each time.
fn time_to_live_ms(params: &[LimitParams]) -> u64 {
    let longest = params.iter().map(|params| match params.algorithm {
        Algorithm::TokenBucket => params.longest_refill(),
        Algorithm::SlidingWindow => 2 * params.span,
        Algorithm::FixedWindow | Algorithm::SlidingLog => params.span,
    });
    // The expiry has whole milliseconds, and starts from another reading of the clock.
    let longest = longest.max().unwrap_or(0).div_ceil(1_000) + 10;
    longest + longest.div_ceil(4)
}

/// Decodes the reply of a script for one descriptor; `None` if it is malformed. If the descriptor was charged and has no logs, the reply is
/// the clock and the stored counts. Otherwise it is
///
/// ```text
/// status, clock, (used, us until the cost fits, us until more is left) for each log, the stored value
/// ```
///
/// The length tells the first form from the second, which never has that length without logs.
pub(crate) fn decision(reply: &[u8], policy: &Policy, cost: u64, charges: bool) -> Option<Decision> {
    let mut reader = Reader(reply);
    let is_short = policy.logs().next().is_none() && reply.len() == policy.encoded_limits(encode).counts_len;
    let (status, now) =
        if is_short { (ADMITTED.into(), reader.number()?) } else { (reader.integer(1)?, reader.integer(INSTANT)?) };
    let charged = charges && cost > 0 && status == u64::from(ADMITTED);
    // The counts in the reply include the charge.
    let asked = if charged { 0 } else { cost };

    let mut log_statuses = policy
        .logs()
        .map(|params| {
            let remaining = params.capacity.saturating_sub(reader.integer(5)?);
            let [retry, reset] = [reader.integer(INSTANT)?, reader.integer(INSTANT)?].map(Duration::from_micros);
            Some(LimitStatus::new(params.capacity, remaining, retry, reset))
        })
        .collect::<Option<Vec<_>>>()?
        .into_iter();

    let mut blocked_for = 0;
    if reader.0.first() == Some(&BLOCKED) {
        reader.integer(1)?;
        blocked_for = reader.integer(INSTANT)?.saturating_sub(now);
    }
    let mut counts = if is_short { Counts::Packed { reader, last: now } } else { Counts::read(reader.0, policy, now)? };
    let statuses = policy.params().iter().map(|params| match counts.next(params, now) {
        Some(count) => count.status(params, now, asked),
        None => log_statuses.next().unwrap_or(LimitStatus::new(params.capacity, 0, Duration::ZERO, Duration::ZERO)),
    });
    let decision = Decision::new(statuses);
    Some(match status {
        BLOCKED_STATUS => decision.blocked(Duration::from_micros(blocked_for)),
        _ if charged => {
            let receipt = receipt(now, policy.params(), decision.limits());
            decision.with_receipt(receipt)
        }
        _ => decision,
    })
}

/// The counts of one descriptor, limit by limit.
enum Counts<'a> {
    /// Nothing is stored.
    None,
    /// Packed under the same parameters, at the instant `last`.
    Packed { reader: Reader<'a>, last: u64 },
    /// Carried over from other parameters.
    CarriedOver(std::vec::IntoIter<Option<Count>>),
}

impl<'a> Counts<'a> {
    fn read(value: &'a [u8], policy: &Policy, now: u64) -> Option<Self> {
        if value.is_empty() {
            return Some(Self::None);
        }
        if let Some(rest) = value.strip_prefix(&*policy.encoded_limits(encode).limits) {
            let mut reader = Reader(rest);
            let last = reader.number()?;
            return Some(Self::Packed { reader, last: last.min(now) });
        }
        let mut reader = Reader(value);
        if reader.integer(1)? != u64::from(VERSION) {
            return None;
        }
        let params =
            policy.params().iter().map(|params| reader.params(params)).collect::<Option<Vec<LimitParams>>>()?;
        let last = reader.number()?;
        let mut old = Self::Packed { reader, last: last.min(now) };
        let counts: Vec<Option<Count>> = params.iter().map(|params| old.next(params, now)).collect();
        let carried =
            carry_over(&params, |index| counts.get(index).copied().flatten(), policy.params(), policy.quota_change());
        Some(Self::CarriedOver(carried.collect::<Vec<_>>().into_iter()))
    }

    /// The count of the next limit, brought up to `now`; `None` for a log.
    fn next(&mut self, params: &LimitParams, now: u64) -> Option<Count> {
        let fresh = Count::new(params.algorithm, now);
        match self {
            Self::None => fresh,
            Self::Packed { reader, last } => {
                let mut count = reader.count(params.algorithm, now)?;
                count.advance(params, *last, now);
                Some(count)
            }
            Self::CarriedOver(counts) => counts.next().flatten().or(fresh),
        }
    }
}

/// Reads values from the front of a byte string.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    /// A little-endian integer of `bytes` bytes, at most 8.
    fn integer(&mut self, bytes: usize) -> Option<u64> {
        let (integer, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(integer.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// An integer in Lua's representation, a double. `None` if Lua cannot count it exactly.
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<NUMBER>()?;
        self.0 = rest;
        let number = f64::from_le_bytes(*number);
        // The cast changes a number that is no integer. The range check rejects a number that is too large.
        let integer = number as i64;
        (integer as f64 == number && (0..=EXACT).contains(&integer)).then_some(integer as u64)
    }

    /// The stored parameters of a limit. `params` are those of the limit at the same position in the current policy.
    fn params(&mut self, params: &LimitParams) -> Option<LimitParams> {
        if params.algorithm == Algorithm::TokenBucket {
            let [span, step] = [self.integer(7)?, self.integer(7)?];
            let (parts, capacity) = (self.integer(4)? as u32, self.integer(7)?);
            return (span > 0 && parts > 0).then_some(LimitParams { span, step, parts, capacity, ..*params });
        }
        Some(params.with_capacity(self.integer(7)?))
    }

    /// `None` for a log.
    fn count(&mut self, algorithm: Algorithm, now: u64) -> Option<Count> {
        if algorithm == Algorithm::SlidingLog {
            return None;
        }
        // Another program may have stored a later start.
        let start = self.number()?.min(now);
        Some(match algorithm {
            Algorithm::TokenBucket => {
                Count::TokenBucket { since: start, debt: self.number()?, part: u32::try_from(self.number()?).ok()? }
            }
            Algorithm::FixedWindow => Count::FixedWindow { start, used: self.number()? },
            Algorithm::SlidingWindow => {
                Count::SlidingWindow { start, previous: self.number()?, current: self.number()? }
            }
            Algorithm::SlidingLog => return None,
        })
    }
}
