//! Records a decision in metrics and the log.

use super::decision::Decision;
use super::metrics::{Metrics, Verdict};
use super::policy::Policy;

/// Records a decision, and returns whether its policy lets the request pass.
#[inline]
pub(super) fn record(policy: &Policy, decision: &Decision, enforced: bool, local: bool, cost: u64) -> bool {
    if decision.is_allowed() {
        if Metrics::ENABLED {
            let verdict = if local { Verdict::LocalAllowed } else { Verdict::Allowed };
            count_allowed(policy, verdict, decision.is_near_limit());
        }
        return true;
    }
    record_denial(policy, decision, enforced, local, cost);
    !enforced
}

/// Not inlined, to keep the path of admitted requests short.
#[cold]
fn record_denial(policy: &Policy, decision: &Decision, enforced: bool, local: bool, cost: u64) {
    let verdict = match (enforced, local) {
        (false, _) => Verdict::Shadow,
        (true, true) => Verdict::LocalLimited,
        (true, false) => Verdict::of(decision.outcome()),
    };
    policy.metrics().decided(verdict);
    tracing::debug!(
        policy = policy.name(),
        verdict = verdict.name(),
        cost,
        retry_after = ?decision.retry_after(),
        "request over a rate limit"
    );
}

#[inline]
pub(super) fn count_allowed(policy: &Policy, verdict: Verdict, is_near_limit: bool) {
    policy.metrics().decided(verdict);
    if is_near_limit {
        policy.metrics().near_limit();
    }
}
