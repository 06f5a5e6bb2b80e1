//! The state of a request under one policy.

use super::decision::Decision;
use super::policy::Policy;
use crate::key::Key;

/// The state of a request under one policy.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LimitInfo<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The key under which the request counts, if known.
    pub key: Option<&'a Key>,
    /// The decision, if one could be made.
    pub decision: Option<&'a Decision>,
}

impl<'a> LimitInfo<'a> {
    /// Creates the info of a request of which only the policy is known.
    #[must_use]
    pub const fn new(policy: &'a Policy) -> Self {
        Self { policy, key: None, decision: None }
    }

    /// Creates the info of a request that counts under `key`, with its decision.
    #[must_use]
    pub const fn of(policy: &'a Policy, key: &'a Key, decision: Option<&'a Decision>) -> Self {
        Self { policy, key: Some(key), decision }
    }
}
