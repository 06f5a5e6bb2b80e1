//! The algorithms in integers: the units in use, and the time until fewer units count.
//!
//! The memory backend counts with this module. Other backends count themselves, for example in a script, and compute the state of a limit
//! from their stored values with it. Instants are microseconds of the store's clock.

use super::decision::{LimitStatus, Receipt};
use super::quota::QuotaChange;
use super::quota::{Algorithm, Limit, Quota};

/// The numbers of a limit for its algorithm. A token bucket counts its missing tokens as a debt: a token is worth a debt of `span`, and a
/// debt of `step / parts` is refilled per us.
///
/// The scripts calculate with doubles, which are exact below 2^53. All quotas, counts and debts are below that. Products stay below it as
/// follows, or are so large that the script only compares them with smaller numbers:
///
/// - The worth of a full bucket (`span * capacity`) is at most [`EXACT`], or is its capacity, with a `span` of 1.
/// - If whole debts per us are too coarse for the rate then, the debt counts in parts, with `parts * step` below 2^53. A time is divided by
///   `parts` before the quotient is multiplied by `step`. The remainder is below `parts`, so its product with `step` is below 2^53.
/// - The number of steps of a sliding window is at most 2^26, or at most `EXACT / capacity`. The count of the last window is divided by
///   this number before it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitParams {
    pub(crate) algorithm: Algorithm,
    /// The window in us; for a token bucket, the worth of one token.
    pub(crate) span: u64,
    /// The time unit of a sliding window in us; for a token bucket, the number of `parts` that are refilled per us.
    pub(crate) step: u64,
    /// The most units that can be used at once.
    pub(crate) capacity: u64,
    /// The number of parts into which a token bucket divides a debt of 1. 1 for nearly all rates, and for the other algorithms.
    pub(crate) parts: u32,
}

/// The largest product of a capacity with `span`, or with the steps of a sliding window, unless that factor is at its minimum. Debts of
/// twice the capacity still stay below 2^53.
const EXACT: u64 = 1 << 51;
/// The largest number of steps of a sliding window whose square is well below 2^53.
const STEPS: u64 = 1 << 26;

impl LimitParams {
    pub(crate) fn new(limit: Limit) -> Self {
        let (window, capacity) = (limit.quota().window_us(), limit.capacity());
        let (span, step, parts) = match limit.algorithm() {
            Algorithm::TokenBucket => Self::rate(limit.quota().limit(), window, capacity),
            Algorithm::SlidingWindow => (window, Self::fading_step(window, capacity), 1),
            Algorithm::FixedWindow | Algorithm::SlidingLog => (window, 0, 1),
        };
        Self { algorithm: limit.algorithm(), span, step, capacity, parts }
    }

    /// The same window for another capacity. For a token bucket, the rate stays.
    #[cfg(feature = "redis")]
    pub(crate) fn with_capacity(&self, capacity: u64) -> Self {
        let step = match self.algorithm {
            Algorithm::SlidingWindow => Self::fading_step(self.span, capacity),
            Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingLog => self.step,
        };
        Self { step, capacity, ..*self }
    }

    /// The time unit of a sliding window: the smallest with which all products are exact.
    fn fading_step(window: u64, capacity: u64) -> u64 {
        window.div_ceil((EXACT / capacity.max(1)).max(STEPS))
    }

    /// `limit` tokens in `window_us`, as (worth of a token, parts refilled per us, parts). The rate is exact, as a reduced fraction, if the
    /// worth of a full bucket is at most [`EXACT`] then. Otherwise it is too low by less than one part per us, at most a hundred-millionth.
    fn rate(limit: u64, window_us: u64, capacity: u64) -> (u64, u64, u32) {
        let limit = limit.max(1);
        let common = greatest_common_divisor(limit, window_us);
        let (worth, inflow) = (window_us / common, limit / common);
        if u128::from(worth) * u128::from(capacity) <= u128::from(EXACT) {
            return (worth, inflow, 1);
        }
        let worth = (EXACT / capacity).max(1);
        let (inflow, window) = (u128::from(limit) * u128::from(worth), u128::from(window_us));
        // The largest number with which `parts * step` is below 2^53. An empty bucket fills in at most `Quota::MAX_WINDOW`, so more than a
        // worth of 3 is refilled per us. This bounds the parts by 2^26, and the step from below by 2^27.
        let parts = (u128::from(Quota::MAX_UNITS) * window / inflow).isqrt().max(1);
        (worth, (inflow * parts / window) as u64, parts as u32)
    }

    /// The worth of a full bucket.
    pub(crate) fn full(&self) -> u64 {
        self.span * self.capacity
    }

    /// The most units that can be in use. Charges that do not fit can exceed the capacity up to this number.
    fn max(&self) -> u64 {
        (2 * self.capacity).min(Quota::MAX_UNITS)
    }

    /// The debt of a bucket after a refill of `elapsed` us, as a worth and parts of it.
    #[inline]
    fn refilled(&self, debt: u64, part: u32, elapsed: u64) -> (u64, u32) {
        if self.parts == 1 {
            return (debt.saturating_sub(elapsed.saturating_mul(self.step)), 0);
        }
        self.refilled_in_parts(debt, part, elapsed)
    }

    // Cold, like the other rare cases, so that the common case is inlined.
    #[cold]
    fn refilled_in_parts(&self, debt: u64, part: u32, elapsed: u64) -> (u64, u32) {
        let parts = u128::from(self.parts);
        let left = self.in_parts(debt, part).saturating_sub(u128::from(elapsed) * u128::from(self.step));
        ((left / parts) as u64, (left % parts) as u32)
    }

    /// How many us it takes to refill this debt.
    #[inline]
    fn time_to_refill(&self, debt: u64, part: u32) -> u64 {
        if self.parts == 1 {
            // The common case, a whole number of us per token, without a slow division.
            return if self.step == 1 { debt } else { debt.div_ceil(self.step.max(1)) };
        }
        self.time_to_refill_parts(debt, part)
    }

    #[cold]
    fn time_to_refill_parts(&self, debt: u64, part: u32) -> u64 {
        self.in_parts(debt, part).div_ceil(self.step.max(1).into()) as u64
    }

    fn in_parts(&self, debt: u64, part: u32) -> u128 {
        u128::from(debt) * u128::from(self.parts) + u128::from(part)
    }

    /// How long a bucket needs to be full again after the largest debt, in us.
    #[cfg(feature = "redis")]
    pub(crate) fn longest_refill(&self) -> u64 {
        self.time_to_refill(self.max() * self.span, 0)
    }

    /// The units of the previous window that still count, `elapsed` us after the start of the current window.
    // Not inlined, so that the compiler inlines the callers for the other algorithms.
    #[inline(never)]
    fn faded(&self, previous: u64, elapsed: u64) -> u64 {
        scale_up(previous, (self.span - elapsed).div_ceil(self.step), self.steps())
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

/// The state of one limit for one key. It does not store its parameters, so pass those that its units were charged with.
///
/// A sliding log keeps its requests elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// `debt` is the worth of the missing tokens at the last update, and `part` the parts that are missing as well. The bucket was last
    /// full at `since`.
    TokenBucket { since: u64, debt: u64, part: u32 },
    /// The window began at `start`.
    FixedWindow { start: u64, used: u64 },
    /// The current window began at `start`, the one before it a window earlier.
    SlidingWindow { start: u64, current: u64, previous: u64 },
}

impl Count {
    /// The state without used units. `None` for an algorithm that keeps its state elsewhere.
    pub(crate) const fn new(algorithm: Algorithm, now: u64) -> Option<Self> {
        match algorithm {
            Algorithm::TokenBucket => Some(Self::TokenBucket { since: now, debt: 0, part: 0 }),
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
            Self::TokenBucket { since, debt, part } => {
                (*debt, *part) = params.refilled(*debt, *part, now - last);
                if *debt == 0 && *part == 0 {
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
            Self::TokenBucket { debt, part, .. } => rounded_up(debt, part).div_ceil(params.span),
            Self::FixedWindow { used, .. } => used,
            Self::SlidingWindow { start, previous, current } => current + params.faded(previous, now - start),
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
            Self::TokenBucket { debt, part, .. } => params.time_to_refill(debt.saturating_sub(target * span), part),
            Self::FixedWindow { start, .. } => start + span - now,
            Self::SlidingWindow { start, previous, current } => {
                // The window that fades, how many of its units may remain, and when it starts to fade.
                let (fading, room, begin) =
                    if current <= target { (previous, target - current, 0) } else { (current, target, span) };
                let rest = scale_down(room, params.steps(), fading);
                let faded = begin + span.saturating_sub(rest.saturating_mul(params.step));
                faded.max(begin).saturating_sub(now - start)
            }
        }
    }

    /// Whether there is room for `cost`.
    #[inline]
    pub(crate) fn fits(&self, params: &LimitParams, now: u64, cost: u64) -> bool {
        // Avoids a division.
        if let Self::TokenBucket { debt, part, .. } = *self {
            return rounded_up(debt, part).saturating_add(cost.saturating_mul(params.span)) <= params.full();
        }
        self.used(params, now).saturating_add(cost) <= params.capacity
    }

    /// Whether less than a fifth of the limit is left.
    #[inline]
    pub(crate) fn is_near_limit(&self, params: &LimitParams, now: u64) -> bool {
        let enough = params.capacity * 4 / 5;
        match *self {
            Self::TokenBucket { debt, part, .. } => rounded_up(debt, part) > enough * params.span,
            Self::FixedWindow { .. } | Self::SlidingWindow { .. } => self.used(params, now) > enough,
        }
    }

    /// The state of the limit, with the wait for a request of `cost`.
    #[inline]
    pub(crate) fn status(&self, params: &LimitParams, now: u64, cost: u64) -> LimitStatus {
        let (used, capacity) = (self.used(params, now), params.capacity);
        let retry = if cost > 0 && used.saturating_add(cost) > capacity {
            // At least 1 us, since a wait of zero would cause busy loops.
            self.wait(params, now, capacity.saturating_sub(cost)).max(1)
        } else {
            0
        };
        let reset = if used == 0 { 0 } else { self.wait(params, now, used.min(capacity) - u64::from(capacity > 0)) };
        LimitStatus::of_micros(capacity, capacity.saturating_sub(used), retry, reset)
    }

    /// Charges `units` at `now`, to which the state was advanced, even if they do not fit. The total stays at or below twice the capacity.
    #[inline]
    pub(crate) fn charge(&mut self, params: &LimitParams, now: u64, units: u64) {
        let max = params.max();
        if let Self::TokenBucket { debt, part, .. } = self {
            let deepest = max * params.span;
            *debt = add(*debt, units.min(max) * params.span, deepest);
            if *debt >= deepest {
                *part = 0;
            }
            return;
        }
        let room = max.saturating_sub(self.used(params, now));
        if let Self::FixedWindow { used: current, .. } | Self::SlidingWindow { current, .. } = self {
            // Units of the previous window count as well.
            *current += units.min(room);
        }
    }

    /// Charges `cost` if there is room, and returns whether there was.
    #[inline]
    pub(crate) fn charge_if_it_fits(&mut self, params: &LimitParams, now: u64, cost: u64) -> bool {
        match self {
            Self::TokenBucket { debt, part, .. } => {
                // A cost above the capacity may overflow.
                let fits = cost <= params.capacity && rounded_up(*debt, *part) + cost * params.span <= params.full();
                if fits {
                    *debt += cost * params.span;
                }
                fits
            }
            Self::FixedWindow { .. } | Self::SlidingWindow { .. } => {
                let fits = self.fits(params, now, cost);
                if let Self::FixedWindow { used: current, .. } | Self::SlidingWindow { current, .. } = self
                    && fits
                {
                    *current += cost;
                }
                fits
            }
        }
    }

    /// Gives back `units` that were charged at the instant `at`, as far as they still count at `now`. `missing` is the number of tokens
    /// that were missing from a bucket right after the charge, rounded up, or 0 if unknown.
    pub(crate) fn refund(&mut self, params: &LimitParams, now: u64, at: u64, missing: u64, units: u64) {
        let max = params.max();
        let (units, missing) = (units.min(max), missing.min(max));
        match self {
            Self::TokenBucket { since, debt, part } if at >= *since => {
                // Without the charge, the bucket might have become full, and would have lost its refill from then on. So the refund is at
                // most the rest of the debt from right after the charge: what the refill since then has not covered.
                let least = missing.saturating_sub(1).max(units) * params.span;
                let (still, _) = params.refilled(least, 0, now.saturating_sub(at));
                let given_back = still.min(units * params.span);
                (*debt, *part) = debt.checked_sub(given_back).map_or((0, 0), |left| (left, *part));
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
            Self::TokenBucket { debt, part, .. } => last + params.time_to_refill(debt, part),
            Self::FixedWindow { start, .. } => start + params.span,
            Self::SlidingWindow { start, .. } => start + 2 * params.span,
        }
    }

    /// Converts the state to other parameters of the same algorithm.
    fn carried_over(mut self, old: &LimitParams, new: &LimitParams, change: QuotaChange) -> Self {
        let max = new.max();
        let convert = |used: u64| match change {
            QuotaChange::Proportional => scale_up(used, new.capacity, old.capacity.max(1)).min(max),
            QuotaChange::Keep | QuotaChange::Reset => used.min(max),
        };
        match &mut self {
            Self::TokenBucket { debt, part, .. } => {
                *debt = convert(rounded_up(*debt, *part).div_ceil(old.span)) * new.span;
                *part = 0;
            }
            Self::FixedWindow { used, .. } => *used = convert(*used),
            Self::SlidingWindow { previous, current, .. } => {
                (*previous, *current) = (convert(*previous), convert(*current));
            }
        }
        self
    }
}

/// `value + more`, at most `max`, but never less than `value`.
fn add(value: u64, more: u64, max: u64) -> u64 {
    value.saturating_add(more).min(max.max(value))
}

/// A debt with a missing part, rounded up.
#[inline]
fn rounded_up(debt: u64, part: u32) -> u64 {
    debt + u64::from(part > 0)
}

/// `value * by / of`, rounded up.
#[inline]
fn scale_up(value: u64, by: u64, of: u64) -> u64 {
    match value.checked_mul(by) {
        Some(product) => product.div_ceil(of),
        None => scale_wide(value, by, of, of - 1),
    }
}

/// `value * by / of`, rounded down; 0 if `of` is 0.
#[inline]
fn scale_down(value: u64, by: u64, of: u64) -> u64 {
    match value.checked_mul(by) {
        _ if of == 0 => 0,
        Some(product) => product / of,
        None => scale_wide(value, by, of, 0),
    }
}

/// `(value * by + rounding) / of`.
#[cold]
fn scale_wide(value: u64, by: u64, of: u64, rounding: u64) -> u64 {
    let scaled = (u128::from(value) * u128::from(by) + u128::from(rounding)) / u128::from(of);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// Converts the states of a policy from `old` to `new` parameters. `None` for a limit that starts from zero. The limits have the same
/// algorithms and windows, and may differ in their numbers of units.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::rate_limit::BurstQuota;

    fn units() -> impl Strategy<Value = u64> {
        let any_size = (0..53_u32, any::<u64>()).prop_map(|(bits, random)| 1 << bits | random & ((1 << bits) - 1));
        prop_oneof![any_size, (1 << 32) - 9..(1 << 32) + 9_u64, Quota::MAX_UNITS - 9..=Quota::MAX_UNITS]
    }

    fn quotas() -> impl Strategy<Value = Quota> {
        let longest = Quota::MAX_WINDOW.as_micros() as u64;
        let window = prop_oneof![10_000..longest, 10_000..86_400_000_000_u64, Just(10_000), Just(longest)];
        (units(), window).prop_map(|(units, window)| Quota::new(units, Duration::from_micros(window)).unwrap())
    }

    proptest! {
        #[test]
        fn bucket_products_are_exact_and_rates_hardly_slower(quota in quotas(), burst in units()) {
            let max = u128::from(Quota::MAX_UNITS);
            let limits = [Some(quota.token_bucket()), quota.burst(burst).ok().map(BurstQuota::token_bucket)];
            for limit in limits.into_iter().flatten() {
                let LimitParams { span, step, capacity, parts, .. } = LimitParams::new(limit);
                let [span, step, capacity, parts] = [span, step, capacity, parts.into()].map(u128::from);
                prop_assert!(span * capacity <= max && step < 1 << 56 && parts <= 1 << 26);
                prop_assert!(parts == 1 || step * parts <= max);
                // The rate is `step / (parts * span)` tokens per us, and should be `limit / window`.
                let (is, should_be) = (step * u128::from(quota.window_us()), parts * span * u128::from(quota.limit()));
                prop_assert!(is <= should_be && (should_be - is) <= should_be / 100_000_000, "{is} {should_be}");
            }
        }

        #[test]
        fn sliding_window_products_are_exact(quota in quotas()) {
            let params = LimitParams::new(quota.sliding_window());
            let (steps, max) = (params.steps(), Quota::MAX_UNITS);
            // The remainder of a count divided by the steps, times at most all steps.
            prop_assert!(u128::from(steps.min(params.max())) * u128::from(steps) <= u128::from(max));
            prop_assert!(params.step == 1 || steps > 67_000_000 / 2);
            if u128::from(quota.limit()) * u128::from(quota.window_us()) <= u128::from(EXACT) {
                prop_assert_eq!(params.step, 1);
            }
        }
    }

    #[test]
    fn product_beyond_64_bits_is_scaled_exactly() {
        let max = Quota::MAX_UNITS;
        assert_eq!((scale_up(max, max, max), scale_down(max, max, max)), (max, max));
        assert_eq!((scale_up(max - 1, max, max - 2), scale_down(max - 1, max, max - 2)), (max + 2, max + 1));
        assert_eq!((scale_up(7, 2, 4), scale_down(7, 2, 4), scale_down(7, 2, 0)), (4, 3, 0));
    }
}
