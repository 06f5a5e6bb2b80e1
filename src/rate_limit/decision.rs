use std::error::Error;
use std::fmt;
use std::time::Duration;

use super::policy::Policy;

/// What a store found out about one request: a normal outcome, never a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    outcome: Outcome,
    limit: u32,
    remaining: u32,
    retry_after: Duration,
    reset_after: Duration,
}

/// Whether a request may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It may, and was charged.
    Allowed,
    /// It may not yet; nothing was charged.
    Limited,
    /// It never may: it costs more than the whole quota, or the quota is 0. Nothing was charged and no store was asked.
    Never,
}

impl Decision {
    /// Admitted, `remaining` units are left, and more become available after `reset_after`.
    #[must_use]
    pub const fn allowed(limit: u32, remaining: u32, reset_after: Duration) -> Self {
        Self { outcome: Outcome::Allowed, limit, remaining, retry_after: Duration::ZERO, reset_after }
    }

    /// Denied for now; the same cost would be admitted after `retry_after` if nobody else came first. A wait of nothing would
    /// have everybody ask in a loop, and counts as a microsecond.
    #[must_use]
    pub const fn limited(limit: u32, remaining: u32, retry_after: Duration, reset_after: Duration) -> Self {
        let retry_after = if retry_after.is_zero() { Duration::from_micros(1) } else { retry_after };
        Self { outcome: Outcome::Limited, limit, remaining, retry_after, reset_after }
    }

    /// Denied for good.
    #[must_use]
    pub const fn never(limit: u32) -> Self {
        Self { outcome: Outcome::Never, limit, remaining: 0, retry_after: Duration::ZERO, reset_after: Duration::ZERO }
    }

    /// Whether the request may pass.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self.outcome, Outcome::Allowed)
    }

    /// Allowed, limited for now, or impossible.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// The units of the quota.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// The units left after this decision, or `None` where no store was asked ([`Outcome::Never`]).
    #[must_use]
    pub const fn remaining(&self) -> Option<u32> {
        match self.outcome {
            Outcome::Never => None,
            Outcome::Allowed | Outcome::Limited => Some(self.remaining),
        }
    }

    /// How long to wait before the same cost fits, where waiting helps: only for [`Outcome::Limited`], and never zero then.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self.outcome {
            Outcome::Limited => Some(self.retry_after),
            Outcome::Allowed | Outcome::Never => None,
        }
    }

    /// How long until more units become available; zero where the whole quota is.
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        self.reset_after
    }
}

/// The rejection of a request that is over its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimited {
    policy: Policy,
    decision: Decision,
}

impl RateLimited {
    pub(crate) const fn new(policy: Policy, decision: Decision) -> Self {
        Self { policy, decision }
    }

    /// The name of the policy that said no.
    #[must_use]
    pub fn policy(&self) -> &str {
        self.policy.name()
    }

    /// How long to wait before trying again; `None` where no wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.decision.retry_after()
    }

    /// The same in whole seconds, as `Retry-After` wants it: rounded up, and at least 1.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after().map(ceil_seconds)
    }

    /// The decision behind the rejection.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.retry_after_secs() {
            Some(seconds) => write!(f, "rate limit `{}` exceeded, try again in {seconds} s", self.policy()),
            None => write!(f, "the request exceeds the whole quota of rate limit `{}`", self.policy()),
        }
    }
}

impl Error for RateLimited {}

/// The rejection of a request that says nothing about who is asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingKey;

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request carries no key to count it under")
    }
}

impl Error for MissingKey {}

/// Whole seconds that are not shorter than `wait`, and at least one: the only honest way to tell a client in seconds.
pub(crate) fn ceil_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
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
    fn a_denial_for_good_names_no_time() {
        let policy = Policy::new("api", Quota::per_second(0).fixed_window());
        let rejection = RateLimited::new(policy, Decision::never(0));
        assert_eq!(rejection.retry_after(), None);
        assert_eq!(rejection.to_string(), "the request exceeds the whole quota of rate limit `api`");
    }
}
