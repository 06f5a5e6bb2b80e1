use std::cmp::Reverse;
use std::slice;
use std::time::Duration;

/// The result of a check by a store: a normal outcome, never a failure.
///
/// A policy of several limits gives one decision. [`limits`](Self::limits) returns the state of each limit, and the other methods describe
/// the most restrictive one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a decision says whether the request may pass"]
pub struct Decision {
    outcome: Outcome,
    receipt: Option<Receipt>,
    blocked_us: u64,
    limits: Limits,
}

/// The states of the limits of a policy. Usually there is one limit, and then no allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Limits {
    One(LimitStatus),
    /// Any other number.
    Several(Box<[LimitStatus]>),
}

impl Limits {
    #[inline]
    const fn as_slice(&self) -> &[LimitStatus] {
        match self {
            Self::One(limit) => slice::from_ref(limit),
            Self::Several(limits) => limits,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [LimitStatus] {
        match self {
            Self::One(limit) => slice::from_mut(limit),
            Self::Several(limits) => limits,
        }
    }
}

impl FromIterator<LimitStatus> for Limits {
    fn from_iter<I: IntoIterator<Item = LimitStatus>>(limits: I) -> Self {
        let limits: Box<[LimitStatus]> = limits.into_iter().collect();
        if let [only] = *limits { Self::One(only) } else { Self::Several(limits) }
    }
}

/// Whether a request may pass.
// One word, because decisions are moved often. With a smaller enum, the padding after it was moved in pieces, which stalled the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
#[non_exhaustive]
pub enum Outcome {
    /// The request may pass. It was charged, unless it costs nothing or was only peeked at. A [`Limiter`](super::Limiter) returns this also
    /// for a request over a limit that is not [enforced](super::Mode) for its key. Then nothing was charged.
    Allowed,
    /// The request may not pass now. Nothing was charged.
    Limited,
    /// The request may not pass, because its key is [blocked](super::Limiter::block) for a while. Nothing was charged.
    Blocked,
    /// The request may never pass: it costs more than can be used at once, or the quota is 0. Nothing was charged, and no store was called.
    Never,
}

/// The state of one limit of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    capacity: u64,
    remaining: u64,
    // In whole microseconds, the unit of stores.
    retry_us: u64,
    reset_us: u64,
}

/// When a charge was made, by the clock of the store, and how many tokens were missing from the token buckets after it. A refund needs the
/// receipt, so that units that no longer count are not given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    at_us: u64,
    // The tokens missing in the first token buckets of the policy after the charge. For further buckets a refund assumes that only the charge
    // itself is missing.
    missing: [u64; Receipt::BUCKETS],
}

impl Receipt {
    pub(crate) const BUCKETS: usize = 2;

    /// Creates the receipt of a charge at this instant of the store's clock, in microseconds.
    #[must_use]
    pub const fn at_micros(at_us: u64) -> Self {
        Self { at_us, missing: [0; Self::BUCKETS] }
    }

    /// Returns the instant, in microseconds of the store's clock.
    #[must_use]
    pub const fn as_micros(&self) -> u64 {
        self.at_us
    }

    #[inline]
    pub(crate) fn note_missing(&mut self, bucket: usize, tokens: u64) {
        if let Some(missing) = self.missing.get_mut(bucket) {
            *missing = tokens;
        }
    }

    /// The missing tokens, for each token bucket of the policy in order. After the first [`BUCKETS`](Self::BUCKETS) they are not recorded, so
    /// it is 0.
    pub(crate) fn missing(&self) -> impl Iterator<Item = u64> + use<> {
        self.missing.into_iter().chain(std::iter::repeat(0))
    }
}

impl LimitStatus {
    /// Creates the state of a limit of `capacity` units, of which `remaining` are left. More units become available after `reset_after`,
    /// which is zero if none are used. `retry_after` is zero if the limit has room for the request, and otherwise the time until it has.
    /// Times are kept in whole microseconds, rounded up.
    #[must_use]
    pub const fn new(capacity: u64, remaining: u64, retry_after: Duration, reset_after: Duration) -> Self {
        Self { capacity, remaining, retry_us: micros(retry_after), reset_us: micros(reset_after) }
    }

    pub(crate) const fn of_micros(capacity: u64, remaining: u64, retry_us: u64, reset_us: u64) -> Self {
        Self { capacity, remaining, retry_us, reset_us }
    }

    /// The state after `elapsed_us` microseconds, if no other request was charged: waits are shorter.
    const fn later(self, elapsed_us: u64) -> Self {
        let (retry_us, reset_us) = (self.retry_us.saturating_sub(elapsed_us), self.reset_us.saturating_sub(elapsed_us));
        Self { retry_us, reset_us, ..self }
    }

    /// How many whole seconds until more units become available, rounded up; `None` if none are used.
    ///
    /// If the request does not fit, the result is at most the time until it fits, so that no limit announces a time after `Retry-After`. The
    /// stores of this crate never report a longer `reset_us` than that. Other stores may.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) const fn seconds_until_more(&self) -> Option<u64> {
        let is_shorter = self.retry_us > 0 && self.retry_us < self.reset_us;
        match if is_shorter { self.retry_us } else { self.reset_us } {
            0 => None,
            wait_us => Some(wait_us.div_ceil(1_000_000)),
        }
    }

    /// Returns whether this limit has no room for the request.
    #[must_use]
    pub const fn is_violated(&self) -> bool {
        self.retry_us > 0
    }

    /// Returns the most units that can be used at once: see [`Limit::capacity`](super::Limit::capacity).
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the units left after the decision.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Returns how long until this limit has room for the request, if no other request is charged first; `None` if it has room now.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if self.is_violated() { Some(Duration::from_micros(self.retry_us)) } else { None }
    }

    /// Returns how long until more units become available, and not until all are; zero if all are available.
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_us)
    }
}

impl Decision {
    /// Creates the decision that follows from the states of the limits: limited if one of them is violated, allowed otherwise. `limits` are
    /// those of the policy, in its order.
    pub fn new(limits: impl IntoIterator<Item = LimitStatus>) -> Self {
        let limits: Limits = limits.into_iter().collect();
        let violated = limits.as_slice().iter().any(LimitStatus::is_violated);
        let outcome = if violated { Outcome::Limited } else { Outcome::Allowed };
        Self { outcome, receipt: None, blocked_us: 0, limits }
    }

    /// The decision that follows from the state of the only limit.
    #[inline]
    pub(crate) fn of_one(limit: LimitStatus, receipt: Option<Receipt>) -> Self {
        let outcome = if limit.is_violated() { Outcome::Limited } else { Outcome::Allowed };
        Self { outcome, receipt, blocked_us: 0, limits: Limits::One(limit) }
    }

    /// A placeholder for a request of a group that was not evaluated, because another request of the group was denied. Its outcome means
    /// nothing.
    pub(crate) fn not_evaluated() -> Self {
        Self { outcome: Outcome::Allowed, receipt: None, blocked_us: 0, limits: Limits::Several(Box::default()) }
    }

    /// Adds the receipt of the charge.
    pub fn with_receipt(self, receipt: Receipt) -> Self {
        Self { receipt: Some(receipt), ..self }
    }

    /// Denies the request because its key is blocked for the next `blocked_for`.
    pub fn blocked(self, blocked_for: Duration) -> Self {
        Self { outcome: Outcome::Blocked, receipt: None, blocked_us: micros(blocked_for).max(1), ..self }
    }

    /// The decision after `elapsed`, if no other request was charged: waits are shorter. `elapsed` must be less than the wait, since the
    /// outcome stays.
    pub(crate) fn later(&self, elapsed: Duration) -> Self {
        // Rounds `elapsed` down to whole microseconds, so that no wait is too short.
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        let limits = self.limits().iter().map(|limit| limit.later(elapsed_us)).collect();
        Self { blocked_us: self.blocked_us.saturating_sub(elapsed_us), limits, ..*self }
    }

    /// Adds `units` to the remaining units.
    pub(crate) fn with_more(mut self, units: u64) -> Self {
        for limit in self.limits.as_mut_slice() {
            limit.remaining = limit.remaining.saturating_add(units).min(limit.capacity);
        }
        self
    }

    /// Allows the request whatever the limits say, because they are not enforced.
    pub(crate) fn into_allowed(self) -> Self {
        Self { outcome: Outcome::Allowed, blocked_us: 0, ..self }
    }

    /// Creates the denial of a request that can never be allowed, by limits of these capacities.
    pub fn never(capacities: impl IntoIterator<Item = u64>) -> Self {
        let status = |capacity| LimitStatus::new(capacity, 0, Duration::ZERO, Duration::ZERO);
        let limits = capacities.into_iter().map(status).collect();
        Self { outcome: Outcome::Never, receipt: None, blocked_us: 0, limits }
    }

    /// Returns whether the request may pass. If the policy of a [`Limiter`](super::Limiter) is not [enforced](super::Mode), a call that
    /// charges always returns an allowed decision, even if nothing was charged: see [`receipt`](Self::receipt).
    #[inline]
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self.outcome, Outcome::Allowed)
    }

    /// Returns whether the request is allowed, limited for now, blocked, or impossible.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Returns the state of each limit, in the order of the policy. If no store was called ([`Outcome::Never`]), only the capacities are
    /// known.
    #[must_use]
    pub fn limits(&self) -> &[LimitStatus] {
        self.limits.as_slice()
    }

    /// Returns the receipt that is needed for a refund. `None` if nothing was charged: the request was denied, costs nothing, or passed
    /// over a limit that is not [enforced](super::Mode).
    #[must_use]
    pub const fn receipt(&self) -> Option<Receipt> {
        self.receipt
    }

    /// Whether less than a fifth of a limit is left.
    #[inline]
    pub(crate) fn is_near_limit(&self) -> bool {
        self.limits().iter().any(|limit| limit.remaining.saturating_mul(5) < limit.capacity)
    }

    pub(crate) fn take_receipt(&mut self) -> Option<Receipt> {
        self.receipt.take()
    }

    /// The limit that has least left; of several, the one with the longest time until more is available.
    fn tightest(&self) -> Option<&LimitStatus> {
        match self.limits() {
            [only] => Some(only),
            limits => limits.iter().min_by_key(|limit| (limit.remaining, Reverse(limit.reset_us), limit.capacity)),
        }
    }

    /// Returns the capacity of the limit that has least left: the units that can be used at once.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.tightest().map_or(0, LimitStatus::capacity)
    }

    /// Returns the units left after this decision, of the limit that has least left; `None` if no store was called ([`Outcome::Never`]).
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        match self.outcome {
            Outcome::Never => None,
            Outcome::Allowed | Outcome::Limited | Outcome::Blocked => self.tightest().map(LimitStatus::remaining),
        }
    }

    /// Returns how long to wait before the same cost fits: until the last violated limit has room. For a blocked key, it is the time until
    /// the block ends. Its limits may deny the cost after that. Never zero. `None` for [`Outcome::Allowed`], and for [`Outcome::Never`],
    /// because no wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.outcome {
            Outcome::Limited => self.limits().iter().filter_map(LimitStatus::retry_after).max(),
            Outcome::Blocked => Some(Duration::from_micros(self.blocked_us)),
            Outcome::Allowed | Outcome::Never => None,
        }
    }

    /// Returns how long until more units become available, of the limit that has least left; zero if its whole quota is available.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.tightest().map_or(Duration::ZERO, LimitStatus::reset_after)
    }

    /// How long until the request would be allowed; `None` if it is allowed now or never. A blocked key may also be over a limit, so the
    /// end of the block alone is not enough.
    pub(super) fn wait(&self) -> Option<Duration> {
        Some(self.limits().iter().filter_map(LimitStatus::retry_after).fold(self.retry_after()?, Duration::max))
    }

    /// Orders decisions by how much they restrict: allowed ones by their remaining units, denied ones by their wait.
    pub(crate) fn strictness(&self) -> impl Ord + use<> {
        (self.outcome == Outcome::Never, self.wait(), Reverse(self.remaining()), self.reset_after())
    }
}

/// Whole microseconds, rounded up.
const fn micros(time: Duration) -> u64 {
    let micros = time.as_nanos().div_ceil(1_000);
    if micros > u64::MAX as u128 { u64::MAX } else { micros as u64 }
}
