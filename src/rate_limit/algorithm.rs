//! The algorithms in integers: the units in use, and how long until fewer count.
//!
//! The memory backend counts with this module. Other backends count themselves, for example in a script, and compute the state of a limit
//! from their stored values with it. Instants are microseconds of the store's clock.

use super::decision::{LimitStatus, Receipt};
use super::policy::QuotaChange;
use super::quota::{Algorithm, Limit};

/// The numbers of a limit for its algorithm.
///
/// All products that the algorithms compute from them stay below 2^53, so scripts with doubles calculate exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitParams {
    pub(crate) algorithm: Algorithm,
    /// The window in us; for a token bucket, the worth of one token.
    pub(crate) span: u64,
    /// The time unit of a sliding window in us; for a token bucket, the worth that is refilled per us.
    pub(crate) step: u64,
    /// The most units that can be used at once.
    pub(crate) capacity: u32,
}

/// The largest intended product. Debts of twice the capacity still stay below 2^53.
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

    /// The same window for another capacity. For a token bucket, the rate stays.
    #[cfg(feature = "redis")]
    pub(crate) fn with_capacity(&self, capacity: u32) -> Self {
        let step = match self.algorithm {
            Algorithm::SlidingWindow => Self::fading_step(self.span, capacity),
            Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingLog => self.step,
        };
        Self { step, capacity, ..*self }
    }

    /// The time unit of a sliding window: the smallest with which all products are exact.
    fn fading_step(window: u64, capacity: u32) -> u64 {
        (u128::from(capacity) * u128::from(window)).div_ceil(EXACT).max(1) as u64
    }

    /// `limit` tokens in `window_us`, as (worth of a token, refill per us). This is the reduced fraction, or the closest one below it with
    /// which the worth of a full bucket is exact.
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

    /// The worth of a full bucket.
    pub(crate) fn full(&self) -> u64 {
        self.span * u64::from(self.capacity)
    }

    /// The length of a sliding window in time units.
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

/// The state of one limit for one key. It does not store its parameters, so pass those of its creation.
///
/// A sliding log keeps its requests elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// `debt` is the worth of the missing tokens at the last update. The bucket was last full at `since`.
    TokenBucket { since: u64, debt: u64 },
    /// The window began at `start`.
    FixedWindow { start: u64, used: u64 },
    /// The current window began at `start`, the one before it a window earlier.
    SlidingWindow { start: u64, current: u64, previous: u64 },
}

impl Count {
    /// The state without used units. `None` for an algorithm that keeps its state elsewhere.
    pub(crate) const fn new(algorithm: Algorithm, now: u64) -> Option<Self> {
        match algorithm {
            Algorithm::TokenBucket => Some(Self::TokenBucket { since: now, debt: 0 }),
            Algorithm::FixedWindow => Some(Self::FixedWindow { start: now, used: 0 }),
            Algorithm::SlidingWindow => Some(Self::SlidingWindow { start: now, previous: 0, current: 0 }),
            Algorithm::SlidingLog => None,
        }
    }

    /// Advances the state from the instant `last` to `now`, which is not earlier.
    #[inline]
    pub(crate) fn advance(&mut self, params: &LimitParams, last: u64, now: u64) {
        let span = params.span;
        match self {
            Self::TokenBucket { since, debt } => {
                *debt = debt.saturating_sub((now - last).saturating_mul(params.step));
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

    /// The units in use at `now`, to which the state was advanced. Rounded up.
    #[inline]
    pub(crate) fn used(&self, params: &LimitParams, now: u64) -> u64 {
        match *self {
            Self::TokenBucket { debt, .. } => debt.div_ceil(params.span),
            Self::FixedWindow { used, .. } => used,
            Self::SlidingWindow { start, previous, current } => {
                let rest = (params.span - (now - start)).div_ceil(params.step);
                current + (previous * rest).div_ceil(params.steps())
            }
        }
    }

    /// The units in use at `now`, of a state that was advanced to `last`.
    pub(crate) fn used_at(mut self, params: &LimitParams, last: u64, now: u64) -> u64 {
        self.advance(params, last, now);
        self.used(params, now)
    }

    /// How long until at most `target` units are in use, if nothing is charged meanwhile. `target` is less than the units in use now.
    #[inline]
    fn wait(&self, params: &LimitParams, now: u64, target: u64) -> u64 {
        let span = params.span;
        match *self {
            Self::TokenBucket { debt, .. } => {
                let excess = debt.saturating_sub(target * span);
                // The common case, a whole number of us per token, without a slow division.
                if params.step == 1 { excess } else { excess.div_ceil(params.step) }
            }
            Self::FixedWindow { start, .. } => start + span - now,
            Self::SlidingWindow { start, previous, current } => {
                // The window that fades, how many of its units may remain, and when it starts to fade.
                let (fading, room, begin) =
                    if current <= target { (previous, target - current, 0) } else { (current, target, span) };
                let rest = (room * params.steps()).checked_div(fading).unwrap_or(0);
                let faded = begin + span.saturating_sub(rest.saturating_mul(params.step));
                faded.max(begin).saturating_sub(now - start)
            }
        }
    }

    /// Whether there is room for `cost`.
    #[inline]
    pub(crate) fn fits(&self, params: &LimitParams, now: u64, cost: u32) -> bool {
        // Avoids a division.
        if let Self::TokenBucket { debt, .. } = *self {
            return debt.saturating_add(u64::from(cost).saturating_mul(params.span)) <= params.full();
        }
        self.used(params, now) + u64::from(cost) <= u64::from(params.capacity)
    }

    /// Whether less than a fifth of the limit is left.
    #[inline]
    pub(crate) fn is_near_limit(&self, params: &LimitParams, now: u64) -> bool {
        let enough = u64::from(params.capacity) * 4 / 5;
        match *self {
            Self::TokenBucket { debt, .. } => debt > enough * params.span,
            Self::FixedWindow { .. } | Self::SlidingWindow { .. } => self.used(params, now) > enough,
        }
    }

    /// The state of the limit, with the wait for a request of `cost`.
    #[inline]
    pub(crate) fn status(&self, params: &LimitParams, now: u64, cost: u32) -> LimitStatus {
        let (used, cost, capacity) = (self.used(params, now), u64::from(cost), u64::from(params.capacity));
        let retry = if cost > 0 && used + cost > capacity {
            // At least 1 us, since a wait of zero would cause busy loops.
            self.wait(params, now, capacity.saturating_sub(cost)).max(1)
        } else {
            0
        };
        let reset = if used == 0 { 0 } else { self.wait(params, now, used.min(capacity) - u64::from(capacity > 0)) };
        let remaining = capacity.saturating_sub(used) as u32;
        LimitStatus::of_micros(params.capacity, remaining, retry, reset)
    }

    /// Charges `units` at `now`, to which the state was advanced, even if they do not fit. The total stays at or below twice the capacity.
    #[inline]
    pub(crate) fn charge(&mut self, params: &LimitParams, now: u64, units: u32) {
        let units = u64::from(units);
        if let Self::TokenBucket { debt, .. } = self {
            *debt = add(*debt, units.saturating_mul(params.span), 2 * params.full());
            return;
        }
        let room = (2 * u64::from(params.capacity)).saturating_sub(self.used(params, now));
        if let Self::FixedWindow { used: current, .. } | Self::SlidingWindow { current, .. } = self {
            // Units of the previous window count as well.
            *current += units.min(room);
        }
    }

    /// Charges `cost` if there is room, and returns whether there was.
    #[inline]
    pub(crate) fn charge_if_it_fits(&mut self, params: &LimitParams, now: u64, cost: u32) -> bool {
        let units = u64::from(cost);
        match self {
            Self::TokenBucket { debt, .. } => {
                // A cost above the capacity may overflow.
                let fits = cost <= params.capacity && *debt + units * params.span <= params.full();
                if fits {
                    *debt += units * params.span;
                }
                fits
            }
            Self::FixedWindow { .. } | Self::SlidingWindow { .. } => {
                let fits = self.fits(params, now, cost);
                if let Self::FixedWindow { used: current, .. } | Self::SlidingWindow { current, .. } = self
                    && fits
                {
                    *current += units;
                }
                fits
            }
        }
    }

    /// Gives back `units` that were charged at the instant `at`, as far as they still count at `now`. `missing` is the number of tokens
    /// missing from a bucket then, or 0 if unknown.
    pub(crate) fn refund(&mut self, params: &LimitParams, now: u64, at: u64, missing: u32, units: u32) {
        let units = u64::from(units);
        match self {
            Self::TokenBucket { since, debt } if at >= *since => {
                // Without the charge, the bucket might have been full for a while, and that refill would have been lost. A token that was
                // missing then and has not been refilled since was not lost.
                let least = u64::from(missing).saturating_sub(1).max(units).saturating_mul(params.span);
                let still = least.saturating_sub(now.saturating_sub(at).saturating_mul(params.step));
                *debt = debt.saturating_sub(still.min(units.saturating_mul(params.span)));
            }
            Self::FixedWindow { start, used } if at >= *start => *used = used.saturating_sub(units),
            Self::SlidingWindow { start, current, .. } if at >= *start => *current = current.saturating_sub(units),
            Self::SlidingWindow { start, previous, .. } if at + params.span >= *start => {
                *previous = previous.saturating_sub(units);
            }
            Self::TokenBucket { .. } | Self::FixedWindow { .. } | Self::SlidingWindow { .. } => {}
        }
    }

    /// When the state has no more effect.
    pub(crate) fn expires(&self, params: &LimitParams, last: u64) -> u64 {
        match *self {
            Self::TokenBucket { debt, .. } => last + debt.div_ceil(params.step.max(1)),
            Self::FixedWindow { start, .. } => start + params.span,
            Self::SlidingWindow { start, .. } => start + 2 * params.span,
        }
    }

    /// Converts the state to other parameters of the same algorithm.
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

/// `value + more`, at most `most`, but never less than `value`.
fn add(value: u64, more: u64, most: u64) -> u64 {
    value.saturating_add(more).min(most.max(value))
}

/// `used * new / old`, rounded up. In doubles like the scripts, so that both round alike.
fn scale(used: u64, new: u64, old: u64) -> u64 {
    (used as f64 * new as f64 / old.max(1) as f64).ceil() as u64
}

/// Converts the states of a policy from `old` to `new` parameters. `None` for a limit that starts from zero. Algorithms and windows are the
/// same; the numbers may differ.
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

/// The receipt of a charge at `at`, after which the only limit has this state.
#[inline]
pub(crate) fn receipt_of_one(at: u64, params: &LimitParams, limit: &LimitStatus) -> Receipt {
    let mut receipt = Receipt::at_micros(at);
    if params.algorithm == Algorithm::TokenBucket {
        receipt.note_missing(0, params.capacity - limit.remaining().min(params.capacity));
    }
    receipt
}

/// The receipt of a charge at `at`, after which the limits have these states.
pub(crate) fn receipt<'a>(
    at: u64,
    params: &[LimitParams],
    limits: impl IntoIterator<Item = &'a LimitStatus>,
) -> Receipt {
    let mut receipt = Receipt::at_micros(at);
    let limits = params.iter().zip(limits);
    let buckets = limits.filter(|(params, _)| params.algorithm == Algorithm::TokenBucket);
    for (bucket, (params, limit)) in buckets.enumerate() {
        receipt.note_missing(bucket, params.capacity - limit.remaining().min(params.capacity));
    }
    receipt
}
