use std::cmp::Reverse;
use std::error::Error;
use std::fmt;
use std::iter;
use std::slice;
use std::time::Duration;

use super::policy::Policy;
use super::quota::Limit;
use crate::key::lack;

/// What a store found out about one request: a normal outcome, never a failure.
///
/// A policy of several limits makes one decision; [`limits`](Self::limits) says how each of them stands, and the other
/// methods speak of the one that binds most.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "says whether the request may pass"]
pub struct Decision {
    outcome: Outcome,
    receipt: Option<Receipt>,
    blocked_us: u64,
    limits: Limits,
}

/// How the limits of a policy stand. Nearly always it is one, and a decision about one owns no memory.
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
// A word: decisions are moved about a lot, and the bytes behind a smaller one were moved in pieces that the processor has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
#[non_exhaustive]
pub enum Outcome {
    /// It may, and was charged; or it was not, because a limit that it is over is not [enforced](super::Mode) for its key by a
    /// [`Limiter`](super::Limiter).
    Allowed,
    /// It may not yet; nothing was charged.
    Limited,
    /// It may not, because its key was [blocked](super::Limiter::block) for a while; nothing was charged.
    Blocked,
    /// It never may: it costs more than can be had at once, or the quota is 0. Nothing was charged and no store was asked.
    Never,
}

/// How one limit of a policy stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    capacity: u32,
    remaining: u32,
    // In whole microseconds, which is what stores count in.
    retry_us: u64,
    reset_us: u64,
}

/// When something was charged, by the clock of the store, and how much was in use then. Whoever wants to give it back has to
/// show this, so that what does not count any more is not given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    at_us: u64,
    // The tokens missing in the first token buckets of the policy after the charge. Of further ones no more is known than
    // that what was charged was missing.
    missing: [u32; Receipt::BUCKETS],
}

impl Receipt {
    pub(crate) const BUCKETS: usize = 2;

    /// Charged at this instant of the store's clock, in microseconds.
    #[must_use]
    pub const fn at_micros(at_us: u64) -> Self {
        Self { at_us, missing: [0; Self::BUCKETS] }
    }

    /// The instant, in microseconds of the store's clock.
    #[must_use]
    pub const fn as_micros(&self) -> u64 {
        self.at_us
    }

    #[inline]
    pub(crate) fn note_missing(&mut self, bucket: usize, tokens: u32) {
        if let Some(missing) = self.missing.get_mut(bucket) {
            *missing = tokens;
        }
    }

    /// The tokens that were missing, for each token bucket of the policy in turn.
    pub(crate) fn missing(&self) -> impl Iterator<Item = u32> + use<> {
        self.missing.into_iter().chain(std::iter::repeat(0))
    }
}

impl LimitStatus {
    /// Of `capacity` units `remaining` are left and more become available after `reset_after`, zero where nothing is used.
    /// `retry_after` is zero if the limit has room for the request, and otherwise says when it will. Times are kept in whole
    /// microseconds, rounded up.
    #[must_use]
    pub const fn new(capacity: u32, remaining: u32, retry_after: Duration, reset_after: Duration) -> Self {
        Self { capacity, remaining, retry_us: micros(retry_after), reset_us: micros(reset_after) }
    }

    pub(crate) const fn of_micros(capacity: u32, remaining: u32, retry_us: u64, reset_us: u64) -> Self {
        Self { capacity, remaining, retry_us, reset_us }
    }

    /// The same limit when `elapsed` has passed and nobody came, as far as that can be told: waits are shorter.
    const fn later(self, elapsed_us: u64) -> Self {
        let (retry_us, reset_us) = (self.retry_us.saturating_sub(elapsed_us), self.reset_us.saturating_sub(elapsed_us));
        Self { retry_us, reset_us, ..self }
    }

    /// How many whole seconds until there are more units, rounded up; `None` where there is nothing to wait for.
    ///
    /// Not longer than the wait for the request's own cost, if that does not fit: `Retry-After`, which is the longest of these
    /// waits, must not be earlier than the time of a limit that caused it. With the stores of this crate it cannot be.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) const fn seconds_until_more(&self) -> Option<u64> {
        let is_shorter = self.retry_us > 0 && self.retry_us < self.reset_us;
        match if is_shorter { self.retry_us } else { self.reset_us } {
            0 => None,
            wait_us => Some(wait_us.div_ceil(1_000_000)),
        }
    }

    /// Whether this limit stands in the way of the request.
    #[must_use]
    pub const fn is_violated(&self) -> bool {
        self.retry_us > 0
    }

    /// The most units that can be used at once: see [`Limit::capacity`](super::Limit::capacity).
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The units left after the decision.
    #[must_use]
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }

    /// How long until this limit has room for the request, if nobody else comes first; `None` if it has.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if self.is_violated() { Some(Duration::from_micros(self.retry_us)) } else { None }
    }

    /// How long until more units become available; zero where all of them are.
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_us)
    }
}

impl Decision {
    /// What follows from how the limits stand: limited if one of them is violated, allowed otherwise. `limits` are those of the policy,
    /// in its order.
    pub fn new(limits: impl IntoIterator<Item = LimitStatus>) -> Self {
        let limits: Limits = limits.into_iter().collect();
        let violated = limits.as_slice().iter().any(LimitStatus::is_violated);
        let outcome = if violated { Outcome::Limited } else { Outcome::Allowed };
        Self { outcome, receipt: None, blocked_us: 0, limits }
    }

    /// What follows from how the only limit stands.
    #[inline]
    pub(crate) fn of_one(limit: LimitStatus, receipt: Option<Receipt>) -> Self {
        let outcome = if limit.is_violated() { Outcome::Limited } else { Outcome::Allowed };
        Self { outcome, receipt, blocked_us: 0, limits: Limits::One(limit) }
    }

    /// What is said of one of several requests when it does not matter, since another one is denied.
    pub(crate) fn of_none() -> Self {
        Self { outcome: Outcome::Allowed, receipt: None, blocked_us: 0, limits: Limits::Several(Box::default()) }
    }

    /// The same, with a receipt of what was charged.
    pub fn with_receipt(self, receipt: Receipt) -> Self {
        Self { receipt: Some(receipt), ..self }
    }

    /// The same, but denied because the key is blocked for the next `blocked_for`.
    pub fn blocked(self, blocked_for: Duration) -> Self {
        Self { outcome: Outcome::Blocked, receipt: None, blocked_us: micros(blocked_for).max(1), ..self }
    }

    /// The same when `elapsed` has passed and nobody came: waits are shorter. Less than the wait, or the decision is another.
    pub(crate) fn later(&self, elapsed: Duration) -> Self {
        // Of what has passed the whole microseconds, so that no wait is too short.
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        let limits = self.limits().iter().map(|limit| limit.later(elapsed_us)).collect();
        Self { blocked_us: self.blocked_us.saturating_sub(elapsed_us), limits, ..*self }
    }

    /// The same with so many units more that are left.
    pub(crate) fn with_more(mut self, units: u32) -> Self {
        for limit in self.limits.as_mut_slice() {
            limit.remaining = limit.remaining.saturating_add(units).min(limit.capacity);
        }
        self
    }

    /// The same, but allowed whatever the limits say: they are not enforced.
    pub(crate) fn let_pass(self) -> Self {
        Self { outcome: Outcome::Allowed, blocked_us: 0, ..self }
    }

    /// Denied for good, by limits of these capacities.
    pub fn never(capacities: impl IntoIterator<Item = u32>) -> Self {
        let status = |capacity| LimitStatus::new(capacity, 0, Duration::ZERO, Duration::ZERO);
        let limits = capacities.into_iter().map(status).collect();
        Self { outcome: Outcome::Never, receipt: None, blocked_us: 0, limits }
    }

    /// Whether the request may pass. By a [`Limiter`](super::Limiter) whose policy is not [enforced](super::Mode) it may in any case, and then it need not
    /// have been charged: see [`receipt`](Self::receipt).
    #[inline]
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self.outcome, Outcome::Allowed)
    }

    /// Allowed, limited for now, blocked, or impossible.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// How each limit of the policy stands, in the order of the policy. Where no store was asked ([`Outcome::Never`]) only
    /// their capacities are known.
    #[must_use]
    pub fn limits(&self) -> &[LimitStatus] {
        self.limits.as_slice()
    }

    /// What is needed to give back what was charged; `None` where nothing was: because it was denied, costs nothing, or passed over a limit that is
    /// not [enforced](super::Mode).
    #[must_use]
    pub const fn receipt(&self) -> Option<Receipt> {
        self.receipt
    }

    /// Whether less than a fifth of a limit is left.
    #[inline]
    pub(crate) fn is_near_limit(&self) -> bool {
        self.limits().iter().any(|limit| u64::from(limit.remaining) * 5 < u64::from(limit.capacity))
    }

    pub(crate) fn take_receipt(&mut self) -> Option<Receipt> {
        self.receipt.take()
    }

    /// The limit that has least left, and of those the one that takes longest to give more.
    fn tightest(&self) -> Option<&LimitStatus> {
        match self.limits() {
            [only] => Some(only),
            limits => limits.iter().min_by_key(|limit| (limit.remaining, Reverse(limit.reset_us), limit.capacity)),
        }
    }

    /// The units that can be used at once of the limit that has least left.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.tightest().map_or(0, LimitStatus::capacity)
    }

    /// The units left after this decision, by the limit that has least left; `None` where no store was asked
    /// ([`Outcome::Never`]).
    #[must_use]
    pub fn remaining(&self) -> Option<u32> {
        match self.outcome {
            Outcome::Never => None,
            Outcome::Allowed | Outcome::Limited | Outcome::Blocked => self.tightest().map(LimitStatus::remaining),
        }
    }

    /// How long to wait before the same cost fits, where waiting helps: until the last of the violated limits has room, or
    /// the block is over. Never zero; `None` for [`Outcome::Allowed`] and [`Outcome::Never`].
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.outcome {
            Outcome::Limited => self.limits().iter().filter_map(LimitStatus::retry_after).max(),
            Outcome::Blocked => Some(Duration::from_micros(self.blocked_us)),
            Outcome::Allowed | Outcome::Never => None,
        }
    }

    /// How long until more units become available, by the limit that has least left; zero where the whole quota is.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.tightest().map_or(Duration::ZERO, LimitStatus::reset_after)
    }

    /// How long until the request would pass; `None` where it does, or never will. Who is blocked may be over a limit as well, and then is
    /// not helped by the end of the block alone.
    fn wait(&self) -> Option<Duration> {
        Some(self.limits().iter().filter_map(LimitStatus::retry_after).fold(self.retry_after()?, Duration::max))
    }

    /// Orders decisions by how much they restrict: a yes by what is left, a no by how long it lasts.
    pub(crate) fn strictness(&self) -> impl Ord + use<> {
        (self.outcome == Outcome::Never, self.wait(), Reverse(self.remaining()), self.reset_after())
    }
}

/// The rejection of a request that is over its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimited {
    cost: u32,
    denial: Denial,
}

/// What one policy has said. An error of its own beneath a [`RateLimited`]: whoever wraps that one and passes on its source hides it, but not this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denial {
    pub(crate) policy: Policy,
    pub(crate) decision: Decision,
    // What another one has said of the same request. Nearly always there is none.
    next: Option<Box<Self>>,
}

impl Denial {
    /// How long until all that stands in the way is over; `None` where no wait helps.
    pub(crate) fn wait(&self) -> Option<Duration> {
        self.decision.wait()
    }

    /// Which of the limits stand in the way of this cost.
    pub(crate) fn violated(&self, cost: u32) -> impl Iterator<Item = (&str, &Limit)> {
        let never = self.decision.outcome() == Outcome::Never;
        let stands_in_the_way = move |limit: &LimitStatus| {
            limit.is_violated() || never && (limit.capacity() == 0 || cost > limit.capacity())
        };
        let limits = self.policy.limit_names().zip(self.policy.limits());
        let statuses = limits.zip(self.decision.limits());
        statuses.filter(move |(_, status)| stands_in_the_way(status)).map(|(limit, _)| limit)
    }
}

impl RateLimited {
    /// The rejection that a decision of this policy comes to, for whoever asks a [`Limiter`](super::Limiter) in a handler and answers as a layer does, by
    /// `answer_to` of `HttpResponder` or `GrpcResponder`, or tests a [`Responder`](crate::responder::Responder) of their own. `None` if the decision is a yes. `cost` is
    /// what was asked for.
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::response::{IntoResponse, Response};
    /// use tollgate::rate_limit::RateLimited;
    /// use tollgate::{HttpResponder, BoxError, Limiter, MemoryBackend, Policy, Quota};
    ///
    /// // The name stands in the body, so that no layer can count by it.
    /// async fn log_in(limiter: &Limiter<MemoryBackend>, name: &str) -> Result<Response, BoxError> {
    ///     let decision = limiter.check(name).await?;
    ///     if let Some(limited) = RateLimited::of(limiter.policy(), 1, decision) {
    ///         return Ok(HttpResponder::new().answer_to(&limited, name).into_response());
    ///     }
    ///     Ok("welcome".into_response())
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// let policy = Policy::new("log-in", Quota::per_minute(1).fixed_window());
    /// let limiter = Limiter::new(MemoryBackend::new(), policy);
    /// assert_eq!(log_in(&limiter, "alice").await?.status(), 200);
    /// let limited = log_in(&limiter, "alice").await?;
    /// assert_eq!(limited.status(), 429);
    /// assert!(limited.headers().contains_key("retry-after") && limited.headers().contains_key("ratelimit"));
    /// # Ok(())
    /// # }
    /// # main().unwrap();
    /// # }
    /// ```
    #[must_use]
    pub fn of(policy: &Policy, cost: u32, decision: Decision) -> Option<Self> {
        (!decision.is_allowed()).then(|| Self::new(policy.clone(), cost, decision))
    }

    pub(crate) const fn new(policy: Policy, cost: u32, decision: Decision) -> Self {
        Self { cost, denial: Denial { policy, decision, next: None } }
    }

    /// The rejection of a request that is over both limits: the one that lasts longer comes first.
    pub(crate) fn and(self, other: Self) -> Self {
        let (Self { cost, denial: first }, Self { denial: second, .. }) = (self, other);
        let is_first_longer = first.decision.strictness() >= second.decision.strictness();
        let (mut longer, mut shorter) = if is_first_longer { (first, second) } else { (second, first) };
        let mut end = &mut shorter.next;
        while let Some(denial) = end {
            end = &mut denial.next;
        }
        *end = longer.next.take();
        longer.next = Some(Box::new(shorter));
        Self { cost, denial: longer }
    }

    /// All that have said no, the one that takes longest to say yes first.
    pub(crate) fn denials(&self) -> impl Iterator<Item = &Denial> {
        iter::successors(Some(&self.denial), |denial| denial.next.as_deref())
    }

    /// The name of the policy that said no. Where a request [counts for several](super::RateLimitLayer::and) and more than one has said no,
    /// this is the one that takes longest to say yes.
    #[must_use]
    pub fn policy(&self) -> &str {
        self.denial.policy.name()
    }

    /// The names of the limits that stand in the way, of all policies that said no: see [`Policy::limit_names`]. A block is none, and of a
    /// policy that no wait helps with these are the limits that can never be met.
    pub fn violated(&self) -> impl Iterator<Item = &str> {
        self.denials().flat_map(|denial| denial.violated(self.cost)).map(|(name, _)| name)
    }

    /// The units that the request asked for.
    #[must_use]
    pub const fn cost(&self) -> u32 {
        self.cost
    }

    /// How long to wait before trying again, until all that stands in the way is over: limits of all policies, and a block; `None` where no
    /// wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.denial.wait()
    }

    /// The same in whole seconds, as `Retry-After` wants it: rounded up, and at least 1.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after().map(ceil_seconds)
    }

    /// The decision behind the rejection: that of the [policy](Self::policy).
    pub fn decision(&self) -> &Decision {
        &self.denial.decision
    }

    /// The names of all policies that said no, with their decisions; the [policy](Self::policy) is the first.
    pub fn decisions(&self) -> impl Iterator<Item = (&str, &Decision)> {
        self.denials().map(|denial| (denial.policy.name(), &denial.decision))
    }
}

impl RateLimited {
    /// What [`Display`](fmt::Display) says, with this wait.
    pub(crate) fn text(&self, wait_seconds: Option<u64>) -> String {
        let policy = self.policy();
        match wait_seconds {
            Some(seconds) if self.decision().outcome() == Outcome::Blocked => {
                format!("blocked by rate limit `{policy}`, try again in {seconds} s")
            }
            Some(seconds) => format!("rate limit `{policy}` exceeded, try again in {seconds} s"),
            None => format!("the request exceeds the whole quota of rate limit `{policy}`"),
        }
    }
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(self.retry_after_secs()))
    }
}

impl Error for RateLimited {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.denial)
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing was charged")
    }
}

impl Error for Denial {}

/// The rejection of a request that says nothing about who is asking.
///
/// If an extractor of this crate found no key because the server has not put an extension into the request, the message names that
/// extension. It does so in debug builds only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingKey {
    lack: Option<&'static str>,
}

impl MissingKey {
    /// Of the request that this thread looks at.
    pub(super) fn new() -> Self {
        Self { lack: lack::noted() }
    }
}

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no key to count it under")?;
        self.lack.map_or(Ok(()), |lack| write!(f, ": {lack}"))
    }
}

impl Error for MissingKey {}

/// The rejection of a request that is on a deny list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denied;

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request is not allowed")
    }
}

impl Error for Denied {}

/// Whole microseconds, rounded up.
const fn micros(time: Duration) -> u64 {
    let micros = time.as_nanos().div_ceil(1_000);
    if micros > u64::MAX as u128 { u64::MAX } else { micros as u64 }
}

/// Whole seconds that are not shorter than `wait`, and at least one: the only honest way to tell a client in seconds.
pub(crate) fn ceil_seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    #[test]
    fn waits_round_up_and_are_never_zero() {
        let cases = [(0, 1), (1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2), (59_000_001, 60)];
        for (micros, seconds) in cases {
            assert_eq!(ceil_seconds(Duration::from_micros(micros)), seconds, "{micros} us");
        }
    }

    #[test]
    fn of_several_rejections_none_is_lost_and_the_longest_comes_first() {
        let limited = |name: &str| {
            let policy = Policy::new(name, Quota::per_hour(5).fixed_window());
            let wait = Duration::from_secs(name.len() as u64);
            RateLimited::new(policy, 1, Decision::new([LimitStatus::new(5, 0, wait, wait)]))
        };
        let names = ["a", "bb", "ccc", "dddd"];
        for turn in 0..24 {
            // Each order of four, by the digits of the number in factorial base.
            let (mut left, mut number) = (names.to_vec(), turn);
            let order: Vec<&str> = (1..=4)
                .rev()
                .map(|len| {
                    let next = left.remove(number % len);
                    number /= len;
                    next
                })
                .collect();
            let rejection = order.iter().copied().map(limited).reduce(RateLimited::and).unwrap();
            assert_eq!((rejection.policy(), rejection.retry_after_secs()), ("dddd", Some(4)), "{order:?}");
            let mut named: Vec<&str> = rejection.decisions().map(|(policy, _)| policy).collect();
            assert_eq!(named, rejection.violated().collect::<Vec<_>>());
            named.sort_unstable();
            assert_eq!(named, names, "{order:?}");
        }
    }

    #[test]
    fn a_denial_for_good_names_no_time() {
        let policy = Policy::new("api", Quota::per_second(0).fixed_window());
        let rejection = RateLimited::new(policy, 1, Decision::never([0]));
        assert_eq!(rejection.retry_after(), None);
        assert_eq!(rejection.to_string(), "the request exceeds the whole quota of rate limit `api`");
    }
}
