//! The packed counts of `lua/rate_limit_check.lua`: the terms of a policy as they are sent, and what comes back.

use std::time::Duration;

pub(super) use crate::rate_limit::Packed;
use crate::rate_limit::counting::{Count, Terms, carry_over, receipt};
use crate::rate_limit::{Algorithm, Decision, LimitStatus, Policy};

const VERSION: u8 = 1;
/// While a key is blocked; the end of the block follows, and then the counts.
const BLOCKED: u8 = 2;
/// What a reply says, where it does not begin with the version.
const BLOCKED_STATUS: u64 = 2;
const ADMITTED: u64 = ADMITTED_BYTE as u64;
const ADMITTED_BYTE: u8 = 3;
const HEADER: usize = 4;
const TERMS: usize = 17;
const INSTANT: usize = 7;

const fn code(algorithm: Algorithm) -> u8 {
    match algorithm {
        Algorithm::TokenBucket => 1,
        Algorithm::FixedWindow => 2,
        Algorithm::SlidingWindow => 3,
        Algorithm::SlidingLog => 4,
    }
}

/// The numbers of a count, as `struct` of Lua writes them.
const fn format(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::TokenBucket => "I7I7",
        Algorithm::FixedWindow => "I7I5",
        Algorithm::SlidingWindow => "I7I5I5",
        Algorithm::SlidingLog => "",
    }
}

/// How many bytes a count takes.
fn size(algorithm: Algorithm) -> usize {
    format(algorithm).bytes().filter(u8::is_ascii_digit).map(|digit| usize::from(digit - b'0')).sum()
}

/// How packed counts begin.
pub(super) fn encode(terms: &[Terms]) -> Packed {
    let counts: usize = terms.iter().map(|terms| size(terms.algorithm)).sum();
    let length = HEADER + terms.len() * TERMS + INSTANT + counts;
    let mut limits = Vec::with_capacity(length);
    limits.extend([VERSION, terms.len() as u8]);
    limits.extend((length as u16).to_le_bytes());
    for terms in terms {
        limits.push(code(terms.algorithm));
        limits.extend(&terms.span.to_le_bytes()[..7]);
        limits.extend(&terms.step.to_le_bytes()[..5]);
        limits.extend(terms.capacity.to_le_bytes());
    }
    let counts: String = terms.iter().map(|terms| format(terms.algorithm)).collect();
    Packed {
        limits,
        terms: ["<", &"BI7I5I4".repeat(terms.len())].concat(),
        layout: ["<I7", &counts].concat(),
        size: length,
    }
}

/// Whether a reply says that the subject is admitted.
pub(super) fn is_admitted(reply: &[u8]) -> bool {
    matches!(reply.first(), Some(&(VERSION | ADMITTED_BYTE)))
}

/// How long counts say something after they were written, debts included, and a quarter of that: the scripts do not write it each time.
pub(super) fn time_to_live_ms(policy: &Policy) -> u64 {
    let longest = policy.terms().iter().map(|terms| match terms.algorithm {
        Algorithm::TokenBucket => (2 * terms.full()).div_ceil(terms.step.max(1)),
        Algorithm::SlidingWindow => 2 * terms.span,
        Algorithm::FixedWindow | Algorithm::SlidingLog => terms.span,
    });
    // Expiry is counted in whole milliseconds of another reading of the clock.
    let longest = longest.max().unwrap_or(0).div_ceil(1_000) + 10;
    longest + longest.div_ceil(4)
}

/// What a script says of one subject: the counts as they are stored now, if it was charged and has no logs, and otherwise
///
/// ```text
/// status, clock, (used, us until the cost fits, us until more is left) for each log, the counts as they are stored now
/// ```
///
/// `None` if it cannot be understood.
pub(super) fn decision(reply: &[u8], policy: &Policy, cost: u32, charges: bool) -> Option<Decision> {
    let mut reader = Reader(reply);
    let (status, now) = if reply.first() == Some(&VERSION) {
        // Nothing comes between the terms and the last update.
        (ADMITTED, Reader(reply.strip_prefix(&*policy.packed(encode).limits)?).integer(INSTANT)?)
    } else {
        (reader.integer(1)?, reader.integer(INSTANT)?)
    };
    let charged = charges && cost > 0 && status == ADMITTED;
    // What was charged is in the counts.
    let asked = if charged { 0 } else { cost };

    let logs = policy.terms().iter().filter(|terms| terms.algorithm == Algorithm::SlidingLog);
    let mut log_statuses = logs
        .map(|terms| {
            let remaining = u64::from(terms.capacity).saturating_sub(reader.integer(5)?) as u32;
            let [retry, reset] = [reader.integer(INSTANT)?, reader.integer(INSTANT)?].map(Duration::from_micros);
            Some(LimitStatus::new(terms.capacity, remaining, retry, reset))
        })
        .collect::<Option<Vec<_>>>()?
        .into_iter();

    let mut blocked_for = 0;
    if reader.0.first() == Some(&BLOCKED) {
        reader.integer(1)?;
        blocked_for = reader.integer(INSTANT)?.saturating_sub(now);
    }
    let mut counts = Counts::read(reader.0, policy, now)?;
    let statuses = policy.terms().iter().map(|terms| match counts.next(terms, now) {
        Some(count) => count.status(terms, now, asked),
        None => log_statuses.next().unwrap_or(LimitStatus::new(terms.capacity, 0, Duration::ZERO, Duration::ZERO)),
    });
    let decision = Decision::new(statuses);
    Some(match status {
        BLOCKED_STATUS => decision.blocked(Duration::from_micros(blocked_for)),
        _ if charged => {
            let receipt = receipt(now, policy.terms(), decision.limits());
            decision.with_receipt(receipt)
        }
        _ => decision,
    })
}

/// The counts of one subject, one after the other.
enum Counts<'a> {
    /// Nothing is stored.
    None,
    /// As they were packed under the same terms at the instant `last`, and later set back by `back`.
    Packed { reader: Reader<'a>, last: u64, back: u64 },
    /// Carried over from other terms.
    CarriedOver(std::vec::IntoIter<Option<Count>>),
}

impl<'a> Counts<'a> {
    fn read(value: &'a [u8], policy: &Policy, now: u64) -> Option<Self> {
        if value.is_empty() {
            return Some(Self::None);
        }
        if let Some(rest) = value.strip_prefix(&*policy.packed(encode).limits) {
            let mut reader = Reader(rest);
            let last = reader.integer(INSTANT)?;
            return Some(Self::Packed { reader, last: last.min(now), back: last.saturating_sub(now) });
        }
        let mut reader = Reader(value);
        if reader.integer(1)? != u64::from(VERSION) {
            return None;
        }
        let limits = reader.integer(1)? as usize;
        if limits > Policy::MAX_LIMITS || reader.integer(2)? as usize != value.len() {
            return None;
        }
        let terms = (0..limits).map(|_| reader.terms()).collect::<Option<Vec<Terms>>>()?;
        let last = reader.integer(INSTANT)?;
        let mut old = Self::Packed { reader, last: last.min(now), back: last.saturating_sub(now) };
        let counts: Vec<Option<Count>> = terms.iter().map(|terms| old.next(terms, now)).collect();
        let carried =
            carry_over(&terms, |index| counts.get(index).copied().flatten(), policy.terms(), policy.quota_change());
        Some(Self::CarriedOver(carried.collect::<Vec<_>>().into_iter()))
    }

    /// The count of the next limit, brought up to `now`; `None` for a log.
    fn next(&mut self, terms: &Terms, now: u64) -> Option<Count> {
        let fresh = Count::new(terms.algorithm, now);
        match self {
            Self::None => fresh,
            Self::Packed { reader, last, back } => {
                let mut count = reader.count(terms.algorithm)?;
                count.set_back(*back, now);
                count.advance(terms, *last, now);
                Some(count)
            }
            Self::CarriedOver(counts) => counts.next().flatten().or(fresh),
        }
    }
}

/// Bytes to be read from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    /// A little-endian integer of so many bytes, at most 8.
    fn integer(&mut self, bytes: usize) -> Option<u64> {
        let (integer, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(integer.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn terms(&mut self) -> Option<Terms> {
        let code_read = self.integer(1)?;
        let algorithms =
            [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];
        let algorithm = algorithms.into_iter().find(|algorithm| u64::from(code(*algorithm)) == code_read)?;
        let (span, step, capacity) = (self.integer(7)?, self.integer(5)?, self.integer(4)? as u32);
        (span > 0).then_some(Terms { algorithm, span, step, capacity })
    }

    fn count(&mut self, algorithm: Algorithm) -> Option<Count> {
        Some(match algorithm {
            Algorithm::TokenBucket => Count::TokenBucket { since: self.integer(7)?, debt: self.integer(7)? },
            Algorithm::FixedWindow => Count::FixedWindow { start: self.integer(7)?, used: self.integer(5)? },
            Algorithm::SlidingWindow => {
                Count::SlidingWindow { start: self.integer(7)?, previous: self.integer(5)?, current: self.integer(5)? }
            }
            Algorithm::SlidingLog => return None,
        })
    }
}
