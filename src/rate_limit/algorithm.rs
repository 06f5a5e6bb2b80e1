//! The algorithms, in integers: what has been used, and how long until less of it counts.
//!
//! The memory backend counts with this. Other backends count by themselves, in a script for instance, and read out of what they
//! stored how a limit stands. Instants are microseconds of whatever clock the store has.

use super::decision::{LimitStatus, Receipt};
use super::policy::QuotaChange;
use super::quota::{Algorithm, Limit};

/// The numbers that a limit is counted with.
///
/// All products that counting makes of them stay below 2^53, so scripts whose numbers are doubles calculate exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitParams {
    pub(crate) algorithm: Algorithm,
    /// The window in us; for a token bucket what one token is worth.
    pub(crate) span: u64,
    /// What a sliding window counts time in, in us; for a token bucket how much of the worth flows in per us.
    pub(crate) step: u64,
    /// The most units that can be used at once.
    pub(crate) capacity: u32,
}

/// The largest product that is made on purpose. Debts of twice the capacity still stay below 2^53.
const EXACT: u128 = 1 << 51;

impl LimitParams {
    pub(crate) fn new(limit: Limit) -> Self {
        let (window, capacity) = (limit.quota().window_us(), limit.capacity());
        let (span, step) = match limit.algorithm() {
            Algorithm::TokenBucket => Self::rate(limit.quota().limit(), window, capacity),
            Algorithm::SlidingWindow => (window, Self::fading_step(window, capacity)),
            Algorithm::FixedWindow | Algorithm::SlidingLog => (window, 0),
        };
        Self { algorithm: limit.algorithm(), span, step, capacity }
    }

    /// Those of the same window for other units. The rate of a token bucket is not in its window.
    #[cfg(feature = "redis")]
    pub(crate) fn with_capacity(&self, capacity: u32) -> Self {
        let step = match self.algorithm {
            Algorithm::SlidingWindow => Self::fading_step(self.span, capacity),
            Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingLog => self.step,
        };
        Self { step, capacity, ..*self }
    }

    /// What a sliding window counts time in: the least with which all products are exact.
    fn fading_step(window: u64, capacity: u32) -> u64 {
        (u128::from(capacity) * u128::from(window)).div_ceil(EXACT).max(1) as u64
    }

    /// `limit` tokens in `window_us`, as (worth of a token, inflow per us): a fraction in its lowest terms, or the closest one
    /// below it with which a full bucket is not worth too much to count exactly.
    fn rate(limit: u32, window_us: u64, capacity: u32) -> (u64, u64) {
        let limit = u64::from(limit.max(1));
        let common = greatest_common_divisor(limit, window_us);
        let (worth, inflow) = (window_us / common, limit / common);
        let full = u128::from(worth) * u128::from(capacity);
        if full <= EXACT {
            return (worth, inflow);
        }
        let coarse = (u128::from(inflow) * EXACT / full).max(1);
        let worth = (u128::from(worth) * coarse).div_ceil(u128::from(inflow));
        (worth as u64, coarse as u64)
    }

    /// What a full bucket is worth.
    pub(crate) fn full(&self) -> u64 {
        self.span * u64::from(self.capacity)
    }

    /// A sliding window in steps.
    fn steps(&self) -> u64 {
        self.span.div_ceil(self.step.max(1))
    }
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// What one limit has counted for one subject. Does not know its terms, so those have to be the ones it was made with.
///
/// A sliding log keeps its requests elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// `debt` is the worth of the tokens that are missing, as of the last update. The bucket was full at `since`, and never
    /// again.
    TokenBucket { since: u64, debt: u64 },
    /// The window began at `start`.
    FixedWindow { start: u64, used: u64 },
    /// The current window began at `start`, the one before it a window earlier.
    SlidingWindow { start: u64, current: u64, previous: u64 },
}

impl Count {
    /// Nothing has been used. `None` for an algorithm that keeps its count elsewhere.
    pub(crate) const fn new(algorithm: Algorithm, now: u64) -> Option<Self> {
        match algorithm {
            Algorithm::TokenBucket => Some(Self::TokenBucket { since: now, debt: 0 }),
            Algorithm::FixedWindow => Some(Self::FixedWindow { start: now, used: 0 }),
            Algorithm::SlidingWindow => Some(Self::SlidingWindow { start: now, previous: 0, current: 0 }),
            Algorithm::SlidingLog => None,
        }
    }

    /// Brings the count from the instant `last` up to `now`, which is not before it.
    #[inline]
    pub(crate) fn advance(&mut self, terms: &LimitParams, last: u64, now: u64) {
        let span = terms.span;
        match self {
            Self::TokenBucket { since, debt } => {
                *debt = debt.saturating_sub((now - last).saturating_mul(terms.step));
                if *debt == 0 {
                    *since = now;
                }
            }
            Self::FixedWindow { start, used } => {
                // A window opens with its first charge.
                if *used == 0 || now - *start >= span {
                    (*start, *used) = (now, 0);
                }
            }
            Self::SlidingWindow { start, previous, current } => {
                let elapsed = now - *start;
                if elapsed >= span && elapsed < 2 * span {
                    (*start, *previous, *current) = (*start + span, *current, 0);
                } else if elapsed >= span {
                    (*previous, *current) = (0, 0);
                }
                if *previous + *current == 0 {
                    *start = now;
                }
            }
        }
    }

    /// The units in use at `now`, which the count has been brought up to. Rounded up.
    #[inline]
    pub(crate) fn used(&self, terms: &LimitParams, now: u64) -> u64 {
        match *self {
            Self::TokenBucket { debt, .. } => debt.div_ceil(terms.span),
            Self::FixedWindow { used, .. } => used,
            Self::SlidingWindow { start, previous, current } => {
                let rest = (terms.span - (now - start)).div_ceil(terms.step);
                current + (previous * rest).div_ceil(terms.steps())
            }
        }
    }

    /// The units in use at `now` of a count that has been brought up to `last`.
    pub(crate) fn used_at(mut self, terms: &LimitParams, last: u64, now: u64) -> u64 {
        self.advance(terms, last, now);
        self.used(terms, now)
    }

    /// How long until no more than `target` units are in use, if nobody comes in the meantime. Fewer than are in use now.
    #[inline]
    fn wait(&self, terms: &LimitParams, now: u64, target: u64) -> u64 {
        let span = terms.span;
        match *self {
            Self::TokenBucket { debt, .. } => {
                let excess = debt.saturating_sub(target * span);
                // As it is with all rates of a whole number of us for a token, and divisions are slow.
                if terms.step == 1 { excess } else { excess.div_ceil(terms.step) }
            }
            Self::FixedWindow { start, .. } => start + span - now,
            Self::SlidingWindow { start, previous, current } => {
                // The window that has to fade, how far it may reach into ours, and when that begins.
                let (fading, room, begin) =
                    if current <= target { (previous, target - current, 0) } else { (current, target, span) };
                let rest = (room * terms.steps()).checked_div(fading).unwrap_or(0);
                let faded = begin + span.saturating_sub(rest.saturating_mul(terms.step));
                faded.max(begin).saturating_sub(now - start)
            }
        }
    }

    /// Whether there is room for `cost`.
    #[inline]
    pub(crate) fn fits(&self, terms: &LimitParams, now: u64, cost: u32) -> bool {
        // Without a division, where it can be done without.
        if let Self::TokenBucket { debt, .. } = *self {
            return debt.saturating_add(u64::from(cost).saturating_mul(terms.span)) <= terms.full();
        }
        self.used(terms, now) + u64::from(cost) <= u64::from(terms.capacity)
    }

    /// Whether less than a fifth of the limit is left.
    #[inline]
    pub(crate) fn is_near_limit(&self, terms: &LimitParams, now: u64) -> bool {
        let enough = u64::from(terms.capacity) * 4 / 5;
        match *self {
            Self::TokenBucket { debt, .. } => debt > enough * terms.span,
            Self::FixedWindow { .. } | Self::SlidingWindow { .. } => self.used(terms, now) > enough,
        }
    }

    /// How the limit stands, and how long somebody has to wait who wants `cost`.
    #[inline]
    pub(crate) fn status(&self, terms: &LimitParams, now: u64, cost: u32) -> LimitStatus {
        let (used, cost, capacity) = (self.used(terms, now), u64::from(cost), u64::from(terms.capacity));
        let retry = if cost > 0 && used + cost > capacity {
            // At least a microsecond: a wait of nothing would have everybody ask in a loop.
            self.wait(terms, now, capacity.saturating_sub(cost)).max(1)
        } else {
            0
        };
        let reset = if used == 0 { 0 } else { self.wait(terms, now, used.min(capacity) - u64::from(capacity > 0)) };
        let remaining = capacity.saturating_sub(used) as u32;
        LimitStatus::of_micros(terms.capacity, remaining, retry, reset)
    }

    /// Charges `units` at `now`, which the count has been brought up to, whether or not they fit, but nobody gets deeper into
    /// debt than by a whole quota.
    #[inline]
    pub(crate) fn charge(&mut self, terms: &LimitParams, now: u64, units: u32) {
        let units = u64::from(units);
        if let Self::TokenBucket { debt, .. } = self {
            *debt = add(*debt, units.saturating_mul(terms.span), 2 * terms.full());
            return;
        }
        let room = (2 * u64::from(terms.capacity)).saturating_sub(self.used(terms, now));
        if let Self::FixedWindow { used: current, .. } | Self::SlidingWindow { current, .. } = self {
            // What is left of the window before counts as well.
            *current += units.min(room);
        }
    }

    /// Charges `cost` if there is room for it; answers whether there is.
    #[inline]
    pub(crate) fn charge_if_it_fits(&mut self, terms: &LimitParams, now: u64, cost: u32) -> bool {
        let units = u64::from(cost);
        match self {
            Self::TokenBucket { debt, .. } => {
                // What is more than all of the limit may be more than can be counted.
                let fits = cost <= terms.capacity && *debt + units * terms.span <= terms.full();
                if fits {
                    *debt += units * terms.span;
                }
                fits
            }
            Self::FixedWindow { .. } | Self::SlidingWindow { .. } => {
                let fits = self.fits(terms, now, cost);
                if let Self::FixedWindow { used: current, .. } | Self::SlidingWindow { current, .. } = self
                    && fits
                {
                    *current += units;
                }
                fits
            }
        }
    }

    /// Gives back `units` that were charged at the instant `at`, as far as they still count at `now`. In a bucket `missing`
    /// tokens were missing then, if that is known.
    pub(crate) fn refund(&mut self, terms: &LimitParams, now: u64, at: u64, missing: u32, units: u32) {
        let units = u64::from(units);
        match self {
            Self::TokenBucket { since, debt } if at >= *since => {
                // Without the charge the bucket may have been full for a while, and what flowed in then would have been
                // lost. What was missing at the time and has not flowed in since cannot have been.
                let least = u64::from(missing).saturating_sub(1).max(units).saturating_mul(terms.span);
                let still = least.saturating_sub(now.saturating_sub(at).saturating_mul(terms.step));
                *debt = debt.saturating_sub(still.min(units.saturating_mul(terms.span)));
            }
            Self::FixedWindow { start, used } if at >= *start => *used = used.saturating_sub(units),
            Self::SlidingWindow { start, current, .. } if at >= *start => *current = current.saturating_sub(units),
            Self::SlidingWindow { start, previous, .. } if at + terms.span >= *start => {
                *previous = previous.saturating_sub(units);
            }
            Self::TokenBucket { .. } | Self::FixedWindow { .. } | Self::SlidingWindow { .. } => {}
        }
    }

    /// From when on the count says nothing any more.
    pub(crate) fn expires(&self, terms: &LimitParams, last: u64) -> u64 {
        match *self {
            Self::TokenBucket { debt, .. } => last + debt.div_ceil(terms.step.max(1)),
            Self::FixedWindow { start, .. } => start + terms.span,
            Self::SlidingWindow { start, .. } => start + 2 * terms.span,
        }
    }

    /// The count as it is carried over to other terms of the same algorithm.
    fn carried_over(mut self, old: &LimitParams, new: &LimitParams, change: QuotaChange) -> Self {
        let most = 2 * u64::from(new.capacity);
        let convert = |used: u64| match change {
            QuotaChange::Proportional => scale(used, u64::from(new.capacity), u64::from(old.capacity)).min(most),
            QuotaChange::Keep | QuotaChange::Reset => used.min(most),
        };
        match &mut self {
            Self::TokenBucket { debt, .. } => *debt = convert(debt.div_ceil(old.span)) * new.span,
            Self::FixedWindow { used, .. } => *used = convert(*used),
            Self::SlidingWindow { previous, current, .. } => {
                (*previous, *current) = (convert(*previous), convert(*current));
            }
        }
        self
    }
}

/// `value + more`, but no more than `most` unless it was more before.
fn add(value: u64, more: u64, most: u64) -> u64 {
    value.saturating_add(more).min(most.max(value))
}

/// `used * new / old`, rounded up. In doubles, as scripts have to do it: both must round alike.
fn scale(used: u64, new: u64, old: u64) -> u64 {
    (used as f64 * new as f64 / old.max(1) as f64).ceil() as u64
}

/// For each of the new terms, what has been counted under the old ones of the same policy: `None` where it starts afresh.
/// Algorithms and windows are the same; the numbers may not be.
pub(crate) fn carry_over<'a>(
    old: &'a [LimitParams],
    counts: impl Fn(usize) -> Option<Count> + 'a,
    new: &'a [LimitParams],
    change: QuotaChange,
) -> impl Iterator<Item = Option<Count>> + 'a {
    old.iter().zip(new).enumerate().map(move |(index, (old, new))| {
        let count = counts(index).filter(|_| old.algorithm == new.algorithm)?;
        if old == new {
            Some(count)
        } else if change == QuotaChange::Reset {
            None
        } else {
            Some(count.carried_over(old, new, change))
        }
    })
}

/// The receipt of a charge at `at`, after which the only limit stands like this.
#[inline]
pub(crate) fn receipt_of_one(at: u64, terms: &LimitParams, limit: &LimitStatus) -> Receipt {
    let mut receipt = Receipt::at_micros(at);
    if terms.algorithm == Algorithm::TokenBucket {
        receipt.note_missing(0, terms.capacity - limit.remaining().min(terms.capacity));
    }
    receipt
}

/// The receipt of a charge at `at`, after which the limits stand like this.
pub(crate) fn receipt<'a>(
    at: u64,
    terms: &[LimitParams],
    limits: impl IntoIterator<Item = &'a LimitStatus>,
) -> Receipt {
    let mut receipt = Receipt::at_micros(at);
    let limits = terms.iter().zip(limits);
    let buckets = limits.filter(|(terms, _)| terms.algorithm == Algorithm::TokenBucket);
    for (bucket, (terms, limit)) in buckets.enumerate() {
        receipt.note_missing(bucket, terms.capacity - limit.remaining().min(terms.capacity));
    }
    receipt
}
