//! Whom a request counts for.

use std::iter::Chain;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use std::{mem, option, slice, vec};

use super::decision::Decision;
use super::policy::Policy;
use super::rejection::LimitInfo;
use super::resolver::Question;
use crate::key::Key;

/// Somebody whom a request counts for.
#[derive(Clone, Debug)]
pub(super) struct Descriptor {
    /// `None` for the policy of the layer: counting references to it would make the processors wait for each other.
    pub(super) policy: Option<Policy>,
    pub(super) key: Key,
    /// Whether it is the key of the layer, and not one that was added to it.
    pub(super) main: bool,
    // What is found out in between.
    pub(super) decision: Option<Decision>,
    pub(super) enforced: bool,
    /// Whether this process decided by itself because the store had failed.
    pub(super) local: bool,
    /// What the resolver of the layer is asked by, where that is not the key.
    pub(super) question: Option<Question>,
}

impl Descriptor {
    /// Somebody about whom nothing was decided yet. `policy` is `None` for the key of the layer.
    pub(super) fn new(layer: &Policy, policy: Option<Policy>, key: Key) -> Self {
        let enforced = policy.as_ref().unwrap_or(layer).is_enforced_for(&key);
        let main = policy.is_none();
        Self { policy, key, main, decision: None, enforced, local: false, question: None }
    }

    /// Is counted by this policy instead.
    pub(super) fn count_by(&mut self, policy: Policy) {
        self.enforced = policy.is_enforced_for(&self.key);
        self.policy = Some(policy);
    }

    /// What it is counted by, behind a layer with this policy.
    pub(super) fn policy<'a>(&'a self, layer: &'a Policy) -> &'a Policy {
        self.policy.as_ref().unwrap_or(layer)
    }

    /// Whether the request is turned away for this one.
    pub(super) fn denies(&self) -> bool {
        self.enforced && self.decision.as_ref().is_some_and(|decision| !decision.is_allowed())
    }

    /// What the client may know.
    pub(super) fn standing<'a>(&'a self, layer: &'a Policy) -> Option<LimitInfo<'a>> {
        self.enforced.then(|| LimitInfo::of(self.policy(layer), &self.key, self.decision.as_ref()))
    }
}

/// Whom a request counts for: nearly always one, who takes no memory of its own.
#[derive(Debug)]
pub(super) enum Subjects {
    One(Descriptor),
    Several(Vec<Descriptor>),
}

impl Default for Subjects {
    /// Nobody.
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

impl Deref for Subjects {
    type Target = [Descriptor];

    #[inline]
    fn deref(&self) -> &[Descriptor] {
        match self {
            Self::One(subject) => slice::from_ref(subject),
            Self::Several(subjects) => subjects,
        }
    }
}

impl DerefMut for Subjects {
    fn deref_mut(&mut self) -> &mut [Descriptor] {
        match self {
            Self::One(subject) => slice::from_mut(subject),
            Self::Several(subjects) => subjects,
        }
    }
}

impl Subjects {
    /// The same, about whom nothing was decided yet.
    pub(super) fn undecided(&self) -> Self {
        let undecided = |subject: &Descriptor| Descriptor { decision: None, local: false, ..subject.clone() };
        match self {
            Self::One(subject) => Self::One(undecided(subject)),
            Self::Several(subjects) => Self::Several(subjects.iter().map(undecided).collect()),
        }
    }

    /// Takes out what the only one was told so long ago, as it stands by now; `None` if the wait is over.
    pub(super) fn take_denied(&mut self, elapsed: Duration) -> Option<Self> {
        let Self::One(subject) = self else { return None };
        let decision = subject.decision.take()?;
        decision.retry_after().filter(|wait| *wait > elapsed)?;
        Some(Self::One(Descriptor { decision: Some(decision.later(elapsed)), question: None, ..subject.clone() }))
    }

    /// Takes out those who turn out to have no say, as they were `judged`.
    pub(super) fn take_those_without_a_say(&mut self, judged: &[Descriptor]) -> Vec<Descriptor> {
        if judged.iter().all(|subject| subject.enforced) {
            return Vec::new();
        }
        let subjects = mem::take(self).into_iter().zip(judged);
        *self = Self::Several(subjects.filter(|(_, judged)| judged.enforced).map(|(subject, _)| subject).collect());
        judged.iter().filter(|subject| !subject.enforced).cloned().collect()
    }

    pub(super) fn extend(&mut self, others: Vec<Descriptor>) {
        if !others.is_empty() {
            *self = Self::Several(mem::take(self).into_iter().chain(others).collect());
        }
    }
}

impl IntoIterator for Subjects {
    type Item = Descriptor;
    type IntoIter = Chain<option::IntoIter<Descriptor>, vec::IntoIter<Descriptor>>;

    fn into_iter(self) -> Self::IntoIter {
        let (one, several) = match self {
            Self::One(subject) => (Some(subject), Vec::new()),
            Self::Several(subjects) => (None, subjects),
        };
        one.into_iter().chain(several)
    }
}

/// Whether the decisions are there that a ruling depends on.
pub(super) fn enforced_decided(subjects: &[Descriptor]) -> bool {
    let mut enforced = subjects.iter().filter(|subject| subject.enforced).peekable();
    enforced.peek().is_some() && enforced.all(|subject| subject.decision.is_some())
}
