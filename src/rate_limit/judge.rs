//! What a layer makes of a request: asks the store, does without one that fails, and says yes or no.

use smallvec::SmallVec;
use tokio::time::Instant;
use tracing::Instrument;

use super::breaker::Circuit;
use super::decision::{Decision, Outcome, RateLimited};
use super::layer::{Core, OnStoreError};
use super::meters::Verdict;
use super::policy::Policy;
use super::rejection::{Rejection, Standing};
use super::store::{RateLimitStore, Request};
use crate::deadline::Deadline;
use crate::error::StoreError;
use crate::key::Key;

/// Somebody whom a request counts for.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) policy: Policy,
    pub(super) key: Key,
    /// Whether it is the key of the layer, and not one that was added to it.
    pub(super) main: bool,
    // What is found out in between.
    pub(super) decision: Option<Decision>,
    enforced: bool,
    /// Whether this process decided by itself because the store had failed.
    pub(super) local: bool,
}

impl Subject {
    pub(super) fn new(policy: Policy, key: Key, main: bool) -> Self {
        let enforced = policy.is_enforced_for(&key);
        Self { policy, key, main, decision: None, enforced, local: false }
    }

    /// Is counted by this policy instead.
    fn count_by(&mut self, policy: Policy) {
        self.enforced = policy.is_enforced_for(&self.key);
        self.policy = policy;
    }

    /// What the client may know.
    pub(super) fn standing(&self) -> Option<Standing<'_>> {
        self.enforced.then(|| Standing::of(&self.policy, &self.key, self.decision.as_ref()))
    }
}

pub(super) type Subjects = SmallVec<[Subject; 1]>;

/// A request that has been judged.
pub(super) struct Judgement {
    pub(super) subjects: Subjects,
    pub(super) ruling: Result<(), Rejection>,
}

impl<B: RateLimitStore + Sync> Core<B> {
    /// The judgement, if it can be given without waiting for anything.
    pub(super) fn judge_now(&self, subjects: &mut Subjects, cost: u32) -> Option<Result<(), Rejection>> {
        let [subject] = subjects.as_mut_slice() else { return None };
        if let (Some(resolver), true) = (&self.resolver, subject.main) {
            subject.count_by(resolver.known(&subject.key)?);
        }
        let decision = match subject.policy.rule_out(cost) {
            Some(decision) => decision,
            // Says nothing about a store that fails: the answer may have come from something in front of it.
            None => self.store.check_now(&subject.policy, &subject.key, cost)?,
        };
        subject.decision = Some(decision);
        Some(self.rule(subjects, cost))
    }

    /// The judgement, after all that has to be waited for.
    pub(super) async fn judge(&self, mut subjects: Subjects, cost: u32) -> Judgement {
        let span = tracing::debug_span!("rate_limit", policy = self.policy.name(), subjects = subjects.len());
        let mut reached = false;
        let asked = async {
            let start = Instant::now();
            let asked = Deadline::new(self.ask(&mut subjects, cost, &mut reached), self.deadline).await;
            if !asked.as_ref().is_err_and(Circuit::is_cause_of) {
                self.policy.meters().store_answered(start.elapsed());
            }
            asked
        };
        let ruling = match asked.instrument(span).await {
            Ok(()) => self.rule(&subjects, cost),
            Err(error) => {
                self.circuit.failed(&self.policy, &error, reached, self.on_store_error);
                if is_ruled_on(&subjects) {
                    // It failed for those alone that have no say.
                    self.rule(&subjects, cost)
                } else {
                    self.do_without(&mut subjects, cost, error).await
                }
            }
        };
        Judgement { subjects, ruling }
    }

    /// Asks the resolver and then the store; `reached` says whether it came to that.
    async fn ask(&self, subjects: &mut Subjects, cost: u32, reached: &mut bool) -> Result<(), StoreError> {
        if let (Some(resolver), Some(main)) = (&self.resolver, subjects.iter_mut().find(|subject| subject.main)) {
            main.count_by(resolver.resolve(&main.key, self.deadline / 2).await.map_err(StoreError::other)?);
            // What is answered in front of the store says nothing about it, and is no probe.
            if let [main] = subjects.as_mut_slice() {
                let ruled_out = main.policy.rule_out(cost);
                main.decision = ruled_out.or_else(|| self.store.check_now(&main.policy, &main.key, cost));
                if main.decision.is_some() {
                    return Ok(());
                }
            }
        }
        if is_hopeless(subjects, cost) {
            // The store could only say how the others stand, which is not worth a probe.
            self.circuit.admit_no_probe()?;
        } else {
            self.circuit.admit()?;
        }
        *reached = true;
        decide(&self.store, subjects, cost).await?;
        // What can never be admitted is decided without the store, and says nothing about it.
        let was_asked =
            |subject: &Subject| subject.decision.as_ref().is_some_and(|decision| decision.outcome() != Outcome::Never);
        if subjects.iter().any(was_asked) {
            self.circuit.answered(&self.policy);
        }
        Ok(())
    }

    /// What happens when the store, or the resolver, has failed.
    async fn do_without(&self, subjects: &mut Subjects, cost: u32, error: StoreError) -> Result<(), Rejection> {
        let enforced = subjects.iter().any(|subject| subject.enforced);
        let hopeless = is_hopeless(subjects, cost);
        for subject in &mut *subjects {
            // Half of an answer is none, but for what needs no store.
            subject.decision = if hopeless { subject.policy.rule_out(cost) } else { None };
        }
        if hopeless {
            return self.rule(subjects, cost);
        }
        match self.on_store_error {
            OnStoreError::Local => {
                for subject in &mut *subjects {
                    subject.policy = subject.policy.share_of(self.replicas);
                    subject.local = true;
                }
                if is_hopeless(subjects, cost) {
                    // Too much for a share, but not for the quota.
                    self.policy.meters().decided(Verdict::FailedClosed);
                    return Err(Rejection::Store(error));
                }
                // Memory does not fail.
                match decide(self.local.backend(), subjects, cost).await {
                    Ok(()) => self.rule(subjects, cost),
                    Err(error) => Err(Rejection::Store(error)),
                }
            }
            OnStoreError::Deny if enforced => {
                self.policy.meters().decided(Verdict::FailedClosed);
                Err(Rejection::Store(error))
            }
            OnStoreError::Allow | OnStoreError::Deny => {
                self.policy.meters().decided(Verdict::FailedOpen);
                Ok(())
            }
        }
    }

    /// Yes or no, once all decisions are there.
    fn rule(&self, subjects: &Subjects, cost: u32) -> Result<(), Rejection> {
        let mut worst: Option<&Subject> = None;
        for subject in subjects {
            let Some(decision) = &subject.decision else { continue };
            let meters = subject.policy.meters();
            if decision.is_allowed() {
                meters.decided(if subject.local { Verdict::LocalAllowed } else { Verdict::Allowed });
                if decision.is_near_limit() {
                    meters.near_limit();
                }
                continue;
            }
            let verdict = match (subject.enforced, subject.local) {
                (false, _) => Verdict::Shadow,
                (true, true) => Verdict::LocalLimited,
                (true, false) => Verdict::of(decision.outcome()),
            };
            meters.decided(verdict);
            tracing::debug!(
                policy = subject.policy.name(),
                verdict = verdict.name(),
                cost,
                retry_after = ?decision.retry_after(),
                "over a rate limit"
            );
            // What never fits says more than what does not fit yet.
            let rank = |subject: &Subject| {
                let decision = subject.decision.as_ref();
                decision.map(|decision| (decision.outcome() == Outcome::Never, decision.retry_after()))
            };
            if subject.enforced && worst.is_none_or(|worst| rank(worst) < rank(subject)) {
                worst = Some(subject);
            }
        }
        match worst.and_then(|worst| Some((worst.policy.clone(), worst.decision.clone()?))) {
            Some((policy, decision)) => Err(Rejection::Limited(RateLimited::new(policy, cost, decision))),
            None => Ok(()),
        }
    }
}

/// Whether the request is turned away whatever the store says.
fn is_hopeless(subjects: &Subjects, cost: u32) -> bool {
    subjects.iter().any(|subject| subject.enforced && subject.policy.rule_out(cost).is_some())
}

/// Whether the decisions are there that a ruling depends on.
fn is_ruled_on(subjects: &Subjects) -> bool {
    let mut enforced = subjects.iter().filter(|subject| subject.enforced).peekable();
    enforced.peek().is_some() && enforced.all(|subject| subject.decision.is_some())
}

/// Lets `store` decide about all subjects: about those together whose policies are enforced, and then about each of the others by
/// itself.
async fn decide<S: RateLimitStore + Sync>(store: &S, subjects: &mut Subjects, cost: u32) -> Result<(), StoreError> {
    for subject in &mut *subjects {
        subject.decision = subject.policy.rule_out(cost);
    }
    let hopeless = is_hopeless(subjects, cost);
    let mut together: SmallVec<[usize; 4]> = SmallVec::new();
    for (index, subject) in subjects.iter_mut().enumerate() {
        if subject.decision.is_some() {
            continue;
        }
        let (policy, key) = (&subject.policy, &subject.key);
        if subject.enforced && !hopeless {
            together.push(index);
        } else if subject.enforced {
            // The request is turned away in any case.
            subject.decision = Some(store.peek(policy, key, cost).await?);
        }
    }
    if let [index] = together[..] {
        let Subject { policy, key, decision, .. } = &mut subjects[index];
        *decision = Some(store.check(policy, key, cost).await?);
    } else if !together.is_empty() {
        let requests: Vec<Request> = together
            .iter()
            .map(|index| Request { policy: subjects[*index].policy.clone(), key: subjects[*index].key, cost })
            .collect();
        for (index, decision) in together.iter().zip(store.check_all(&requests).await?) {
            subjects[*index].decision = Some(decision);
        }
    }
    for subject in subjects.iter_mut().filter(|subject| !subject.enforced && subject.decision.is_none()) {
        subject.decision = Some(store.check(&subject.policy, &subject.key, cost).await?);
    }
    Ok(())
}
