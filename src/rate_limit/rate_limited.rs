//! The rejection of a request that is over its limit.

use std::error::Error;
use std::time::Duration;
use std::{fmt, iter};

use super::decision::{Decision, LimitStatus, Outcome};
use super::policy::Policy;
use super::quota::Limit;

/// The rejection of a request that is over its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimited {
    cost: u64,
    denial: Denial,
}

/// The denial by one policy. It is the source of [`RateLimited`], so that an error that wraps a `RateLimited` and forwards only its source
/// still exposes the denial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denial {
    pub(crate) policy: Policy,
    pub(crate) decision: Decision,
    // The denial of the same request by another policy. Usually `None`.
    next: Option<Box<Self>>,
}

impl Denial {
    /// How long until no limit and no block denies the request; `None` if no wait helps.
    pub(crate) fn wait(&self) -> Option<Duration> {
        self.decision.wait()
    }

    /// The limits that have no room for this cost.
    pub(crate) fn violated(&self, cost: u64) -> impl Iterator<Item = (&str, &Limit)> {
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
    /// Creates the rejection for a denied decision of this policy; `None` if the decision is allowed. `cost` is the requested cost. Use
    /// this to call a [`Limiter`](super::Limiter) in a handler and respond as a layer does, with `respond_to` of `HttpResponder` or
    /// `GrpcResponder`, or to test your own [`Responder`](crate::responder::Responder).
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use axum::response::{IntoResponse, Response};
    /// use tollgate::rate_limit::RateLimited;
    /// use tollgate::{HttpResponder, BoxError, Limiter, MemoryBackend, Policy, Quota};
    ///
    /// // The name is in the body, so a layer cannot extract it as a key.
    /// async fn log_in(limiter: &Limiter<MemoryBackend>, name: &str) -> Result<Response, BoxError> {
    ///     let decision = limiter.check(name).await?;
    ///     if let Some(limited) = RateLimited::of(limiter.policy(), 1, decision) {
    ///         return Ok(HttpResponder::new().respond_to(&limited, name).into_response());
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
    pub fn of(policy: &Policy, cost: u64, decision: Decision) -> Option<Self> {
        (!decision.is_allowed()).then(|| Self::new(policy.clone(), cost, decision))
    }

    pub(crate) const fn new(policy: Policy, cost: u64, decision: Decision) -> Self {
        Self { cost, denial: Denial { policy, decision, next: None } }
    }

    /// Combines the rejections of a request that is over both limits. The longer one comes first.
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

    /// The denials of all policies, the longest first.
    pub(crate) fn denials(&self) -> impl Iterator<Item = &Denial> {
        iter::successors(Some(&self.denial), |denial| denial.next.as_deref())
    }

    /// Returns the name of the policy that denied the request. If a request [counts under several](super::RateLimitLayer::and) and more
    /// than one denied it, this is the one with the longest denial.
    #[must_use]
    pub fn policy(&self) -> &str {
        self.denial.policy.name()
    }

    /// Returns the names of the limits that denied the request, of all policies: see [`Policy::limit_names`]. A block is not a limit and
    /// has no name. If no wait helps, the names are those of the limits whose capacity is too small for the cost.
    pub fn violated(&self) -> impl Iterator<Item = &str> {
        self.denials().flat_map(|denial| denial.violated(self.cost)).map(|(name, _)| name)
    }

    /// Returns the cost of the request in units.
    #[must_use]
    pub const fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns how long to wait before a retry, until no limit of any policy and no block denies the request. `None` if no wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.denial.wait()
    }

    /// Returns [`retry_after`](Self::retry_after) in whole seconds for the header `Retry-After`: rounded up, and at least 1.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after().map(ceil_seconds)
    }

    /// Returns the decision of the [policy](Self::policy).
    pub fn decision(&self) -> &Decision {
        &self.denial.decision
    }

    /// Returns the names of all policies that denied the request, with their decisions. The [policy](Self::policy) is the first.
    pub fn decisions(&self) -> impl Iterator<Item = (&str, &Decision)> {
        self.denials().map(|denial| (denial.policy.name(), &denial.decision))
    }
}

impl RateLimited {
    /// The text of [`Display`](fmt::Display), with this wait.
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

/// Whole seconds that are not shorter than `wait`, and at least one. A client that waits for a shorter time would be denied again.
pub(crate) fn ceil_seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Quota;

    #[test]
    fn retry_seconds_round_up_and_are_never_zero() {
        let cases = [(0, 1), (1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2), (59_000_001, 60)];
        for (micros, seconds) in cases {
            assert_eq!(ceil_seconds(Duration::from_micros(micros)), seconds, "{micros} us");
        }
    }

    #[test]
    fn combined_rejections_keep_all_denials_longest_first() {
        let limited = |name: &str| {
            let policy = Policy::new(name, Quota::per_hour(5).fixed_window());
            let wait = Duration::from_secs(name.len() as u64);
            RateLimited::new(policy, 1, Decision::new([LimitStatus::new(5, 0, wait, wait)]))
        };
        let names = ["a", "bb", "ccc", "dddd"];
        for permutation in 0..24 {
            // Each order of four, by the digits of the number in factorial base.
            let (mut left, mut number) = (names.to_vec(), permutation);
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
    fn permanent_denial_has_no_retry_time() {
        let policy = Policy::new("api", Quota::per_second(0).fixed_window());
        let rejection = RateLimited::new(policy, 1, Decision::never([0]));
        assert_eq!(rejection.retry_after(), None);
        assert_eq!(rejection.to_string(), "the request exceeds the whole quota of rate limit `api`");
    }
}
