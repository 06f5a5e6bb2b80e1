//! The third phase: one result from the decisions about all descriptors.

use crate::rate_limit::descriptor::Descriptor;
use crate::rate_limit::layer_config::LayerConfig;
use crate::rate_limit::metrics::Verdict;
use crate::rate_limit::policy::Policy;
use crate::rate_limit::rate_limited::RateLimited;
use crate::rate_limit::record::record;
use crate::rate_limit::rejection::Rejection;

impl<B> LayerConfig<B> {
    /// Records the decisions, and combines them into the result.
    pub(in crate::rate_limit) fn combine(&self, descriptors: &[Descriptor], cost: u64) -> Result<(), Rejection> {
        let limited = combined_rejection(&self.policy, descriptors, cost);
        for descriptor in descriptors {
            let (policy, Some(decision)) = (descriptor.policy(&self.policy), &descriptor.decision) else { continue };
            if limited.is_some() && descriptor.enforced && decision.is_allowed() {
                // It had room, but was not charged.
                policy.metrics().decided(Verdict::TurnedAway);
            } else {
                record(policy, decision, descriptor.enforced, descriptor.local, cost);
            }
        }
        limited.map_or(Ok(()), |limited| Err(Rejection::Limited(limited)))
    }

    /// The rejection of the request due to this descriptor.
    pub(in crate::rate_limit) fn limited(&self, descriptor: &Descriptor, cost: u64) -> Option<RateLimited> {
        rejection_by(&self.policy, descriptor, cost)
    }
}

/// The rejection by all enforced policies that deny the request.
fn combined_rejection(layer_policy: &Policy, descriptors: &[Descriptor], cost: u64) -> Option<RateLimited> {
    let denials = descriptors.iter().filter(|descriptor| descriptor.denies());
    denials.filter_map(|descriptor| rejection_by(layer_policy, descriptor, cost)).reduce(RateLimited::and)
}

fn rejection_by(layer_policy: &Policy, descriptor: &Descriptor, cost: u64) -> Option<RateLimited> {
    let (policy, decision) = (descriptor.policy(layer_policy).clone(), descriptor.decision.clone()?);
    Some(RateLimited::new(policy, cost, decision))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::key::Key;
    use crate::rate_limit::{Decision, LimitStatus, Mode, Quota};

    fn descriptor(layer: &Policy, name: &str, mode: Mode, wait_secs: u64) -> Descriptor {
        let policy = Policy::new(name, Quota::per_hour(5).fixed_window()).mode(mode);
        let mut descriptor = Descriptor::new(layer, Some(policy), Key::from("alice"));
        let wait = Duration::from_secs(wait_secs);
        descriptor.decision = Some(Decision::new([LimitStatus::new(5, u64::from(wait_secs == 0), wait, wait)]));
        descriptor
    }

    fn layer() -> Policy {
        Policy::new("layer", Quota::per_hour(5).fixed_window())
    }

    #[test]
    fn rejection_names_all_denying_policies_longest_first() {
        let layer = layer();
        let descriptors =
            [("a", 0), ("b", 3), ("c", 9)].map(|(name, wait)| descriptor(&layer, name, Mode::Enforce, wait));
        let limited = combined_rejection(&layer, &descriptors, 1).unwrap();
        assert_eq!(limited.decisions().map(|(policy, _)| policy).collect::<Vec<_>>(), ["c", "b"]);
        assert_eq!(limited.retry_after_secs(), Some(9));
    }

    #[test]
    fn shadow_policies_and_undecided_ones_reject_nothing() {
        let layer = layer();
        let mut undecided = descriptor(&layer, "a", Mode::Enforce, 3);
        undecided.decision = None;
        let descriptors = [undecided, descriptor(&layer, "b", Mode::Shadow, 9)];
        assert_eq!(combined_rejection(&layer, &descriptors, 1), None);
    }
}
