//! The policies and keys under which a request is counted.

use std::iter::Chain;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use std::{mem, option, slice, vec};

use super::decision::Decision;
use super::limit_info::LimitInfo;
use super::policy::Policy;
use super::resolver::ResolverCall;
use crate::key::Key;

/// One policy and key under which a request is counted.
#[derive(Clone, Debug)]
pub(super) struct Descriptor {
    /// `None` for the policy of the layer: a clone would update a reference count that all processors share.
    pub(super) policy: Option<Policy>,
    pub(super) key: Key,
    /// Whether it is the key of the layer, and not an added one.
    pub(super) primary: bool,
    // Set during the evaluation.
    pub(super) decision: Option<Decision>,
    pub(super) enforced: bool,
    /// Whether this process decided by itself, because the store or the resolver had failed.
    pub(super) local: bool,
    /// The resolver call of the layer, if the resolver takes an input from the request instead of the key.
    pub(super) question: Option<ResolverCall>,
}

impl Descriptor {
    /// A descriptor without a decision. `policy` is `None` for the key of the layer.
    pub(super) fn new(layer: &Policy, policy: Option<Policy>, key: Key) -> Self {
        let enforced = policy.as_ref().unwrap_or(layer).is_enforced_for(&key);
        let primary = policy.is_none();
        Self { policy, key, primary, decision: None, enforced, local: false, question: None }
    }

    /// Sets the resolved policy.
    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.enforced = policy.is_enforced_for(&self.key);
        self.policy = Some(policy);
    }

    /// Its policy, in a layer with the policy `layer`.
    pub(super) fn policy<'a>(&'a self, layer: &'a Policy) -> &'a Policy {
        self.policy.as_ref().unwrap_or(layer)
    }

    /// Whether it rejects the request.
    pub(super) fn denies(&self) -> bool {
        self.enforced && self.decision.as_ref().is_some_and(|decision| !decision.is_allowed())
    }

    /// The details for the client.
    pub(super) fn limit_info<'a>(&'a self, layer: &'a Policy) -> Option<LimitInfo<'a>> {
        self.enforced.then(|| LimitInfo::of(self.policy(layer), &self.key, self.decision.as_ref()))
    }
}

/// The descriptors of a request. Usually one, which needs no allocation.
#[derive(Debug)]
pub(super) enum DescriptorList {
    One(Descriptor),
    Several(Vec<Descriptor>),
}

impl Default for DescriptorList {
    /// No descriptors.
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

impl Deref for DescriptorList {
    type Target = [Descriptor];

    #[inline]
    fn deref(&self) -> &[Descriptor] {
        match self {
            Self::One(descriptor) => slice::from_ref(descriptor),
            Self::Several(descriptors) => descriptors,
        }
    }
}

impl DerefMut for DescriptorList {
    fn deref_mut(&mut self) -> &mut [Descriptor] {
        match self {
            Self::One(descriptor) => slice::from_mut(descriptor),
            Self::Several(descriptors) => descriptors,
        }
    }
}

impl DescriptorList {
    /// The same descriptors without decisions.
    pub(super) fn undecided(&self) -> Self {
        let undecided = |descriptor: &Descriptor| Descriptor { decision: None, local: false, ..descriptor.clone() };
        match self {
            Self::One(descriptor) => Self::One(undecided(descriptor)),
            Self::Several(descriptors) => Self::Several(descriptors.iter().map(undecided).collect()),
        }
    }

    /// Takes the denial of the only descriptor, as it stands after `elapsed`; `None` if it has expired.
    pub(super) fn take_denied(&mut self, elapsed: Duration) -> Option<Self> {
        let Self::One(descriptor) = self else { return None };
        let decision = descriptor.decision.take()?;
        decision.retry_after().filter(|wait| *wait > elapsed)?;
        Some(Self::One(Descriptor { decision: Some(decision.later(elapsed)), question: None, ..descriptor.clone() }))
    }

    /// Removes the descriptors whose copies in `evaluated` are not enforced. Returns these copies.
    pub(super) fn take_shadows(&mut self, evaluated: &[Descriptor]) -> Vec<Descriptor> {
        if evaluated.iter().all(|descriptor| descriptor.enforced) {
            return Vec::new();
        }
        let descriptors = mem::take(self).into_iter().zip(evaluated);
        *self = Self::Several(
            descriptors.filter(|(_, evaluated)| evaluated.enforced).map(|(descriptor, _)| descriptor).collect(),
        );
        evaluated.iter().filter(|descriptor| !descriptor.enforced).cloned().collect()
    }

    pub(super) fn extend(&mut self, descriptors: Vec<Descriptor>) {
        if !descriptors.is_empty() {
            *self = Self::Several(mem::take(self).into_iter().chain(descriptors).collect());
        }
    }
}

impl IntoIterator for DescriptorList {
    type Item = Descriptor;
    type IntoIter = Chain<option::IntoIter<Descriptor>, vec::IntoIter<Descriptor>>;

    fn into_iter(self) -> Self::IntoIter {
        let (one, several) = match self {
            Self::One(descriptor) => (Some(descriptor), Vec::new()),
            Self::Several(descriptors) => (None, descriptors),
        };
        one.into_iter().chain(several)
    }
}

/// Whether every enforced descriptor has a decision. False if no descriptor is enforced.
pub(super) fn all_enforced_are_decided(descriptors: &[Descriptor]) -> bool {
    let mut enforced = descriptors.iter().filter(|descriptor| descriptor.enforced).peekable();
    enforced.peek().is_some() && enforced.all(|descriptor| descriptor.decision.is_some())
}
