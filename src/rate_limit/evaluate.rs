//! What a layer makes of a request: asks the store, does without one that fails, and says yes or no.

use std::error::Error;

use smallvec::SmallVec;
use tokio::time::Instant;
use tracing::Instrument;

use super::circuit_events::Aside;
use super::decision::{Decision, RateLimited};
use super::descriptor::{Descriptor, Subjects, enforced_decided};
use super::layer::{LayerConfig, OnStoreError};
use super::metrics::{Meters, Verdict};
use super::policy::Policy;
use super::rejection::Rejection;
use super::resolver::{PolicyResolver, Question, Resolved};
use super::store::{Charged, RateLimitStore, Request};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::circuit::Circuit;
use crate::store::deadline::{Deadline, require_nonzero_deadline};

/// A request that has been judged.
pub(super) struct Evaluation {
    pub(super) subjects: Subjects,
    pub(super) result: Result<(), Rejection>,
}

impl<B> LayerConfig<B> {
    /// What is done without the store. Where it is never asked that is no outage, in which each process may admit the quota.
    pub(super) fn without_store(&self) -> OnStoreError {
        if self.deadline.is_zero() { OnStoreError::Deny } else { self.on_store_error }
    }
}

impl<B: RateLimitStore + Sync> LayerConfig<B> {
    /// The decision about a subject, if it can be made without waiting for anything. Says nothing about a store that fails: the answer may have
    /// come from something in front of it.
    #[inline]
    pub(super) fn try_decide_locally(&self, policy: &Policy, key: &Key, cost: u32) -> Option<Decision> {
        if policy.rules_out(cost) { policy.rule_out(cost) } else { self.store.check_now(policy, key, cost) }
    }

    /// Whether the request was charged here and now, and may pass, without a word about how things stand.
    #[inline]
    pub(super) fn charge_now(&self, policy: &Policy, key: &Key, cost: u32) -> bool {
        if cost == 0 || policy.rules_out(cost) {
            return false;
        }
        let charged = self.store.charge_now(policy, key, cost);
        if let Some(Charged { is_near_limit }) = charged {
            count_allowed(policy, Verdict::Allowed, is_near_limit);
        }
        charged.is_some()
    }

    /// What is said to a request because of this subject.
    pub(super) fn limited(&self, subject: &Descriptor, cost: u32) -> Option<RateLimited> {
        let (policy, decision) = (subject.policy(&self.policy).clone(), subject.decision.clone()?);
        Some(RateLimited::new(policy, cost, decision))
    }

    /// The judgement, after all that has to be waited for.
    pub(super) async fn judge(&self, mut subjects: Subjects, cost: u32) -> Evaluation {
        let answer = self.query(&mut subjects, cost).await;
        self.finish(subjects, cost, answer).await
    }

    /// Asks for the decisions that a ruling depends on.
    pub(super) async fn query(&self, subjects: &mut [Descriptor], cost: u32) -> Result<(), StoreError> {
        let span = tracing::debug_span!("rate_limit", policy = self.policy.name(), subjects = subjects.len());
        let asked = self.ask(subjects, cost).instrument(span).await;
        subjects.iter_mut().for_each(|subject| subject.question = None);
        match asked {
            // It failed for those alone that have no say.
            Err(_) if enforced_decided(subjects) => Ok(()),
            asked => asked,
        }
    }

    /// What follows from the answer, or from there being none.
    pub(super) async fn finish(&self, mut subjects: Subjects, cost: u32, answer: Result<(), StoreError>) -> Evaluation {
        let result = match answer {
            Ok(()) => self.rule(&subjects, cost),
            Err(error) => self.fallback(&mut subjects, cost, error).await,
        };
        Evaluation { subjects, result }
    }

    /// Asks the resolver and then the store. Each has the whole deadline, so that a store never fails because a resolver is slow.
    async fn ask(&self, subjects: &mut [Descriptor], cost: u32) -> Result<(), StoreError> {
        // What needs no time is found out first.
        let has_time = || require_nonzero_deadline(self.deadline).inspect_err(|error| self.circuit.failed(self, error));
        // Others were found to be unknown in front of the store when they came.
        let mut may_be_known = self.patience.is_some();
        if let (Some(resolver), Some(main)) = (&self.resolver, subjects.iter_mut().find(|subject| subject.main)) {
            let policy = match resolver.known(&main.key) {
                Some(policy) => policy,
                None => match resolver.question(&main.key, main.question.as_ref()) {
                    Some(question) => {
                        has_time()?;
                        self.resolve(resolver, &main.key, &question).await?
                    }
                    // The request has nothing to find a policy by, or had an answer that has become old since.
                    None => main.policy(&self.policy).clone(),
                },
            };
            main.count_by(policy);
            may_be_known = true;
        }
        if let ([only], true) = (&mut *subjects, may_be_known) {
            // What is answered there says nothing about the store, and is no probe.
            only.decision = self.try_decide_locally(only.policy(&self.policy), &only.key, cost);
            if only.decision.is_some() {
                return Ok(());
            }
        }
        if self.decide_all_now(subjects, cost) {
            return Ok(());
        }
        has_time()?;
        let start = Instant::now();
        let asked = Deadline::new(self.ask_store(subjects, cost), self.deadline).await;
        if !asked.as_ref().is_err_and(Circuit::is_cause_of) {
            self.policy.meters().store_answered(start.elapsed());
        }
        asked.inspect_err(|error| {
            if enforced_decided(subjects) {
                // A trial that turns requests away because the circuit opens would have a say.
                self.aside.failed(&Aside(&self.policy), error);
            } else {
                self.circuit.failed(self, error);
            }
        })
    }

    /// Decides about several together where something in front of the store does, or none is needed: that says nothing about the store either.
    fn decide_all_now(&self, subjects: &mut [Descriptor], cost: u32) -> bool {
        let can_be_asked = !self.circuit.is_open() && !self.deadline.is_zero();
        let hopeless = self.exceeds_capacity(subjects, cost);
        // Those that have no say are for the store to count, if it can be asked, and it can say how others stand beside what never fits.
        let needs_store = can_be_asked && (hopeless || subjects.iter().any(|subject| !subject.enforced));
        if subjects.len() < 2 || needs_store {
            return false;
        }
        let enforced = subjects.iter().filter(|subject| subject.enforced && !hopeless);
        let requests: Vec<Request> = enforced.map(|subject| self.request(subject, cost)).collect();
        let decisions = match &requests[..] {
            // Where none has a say, one of them may be the probe.
            [] if !hopeless && !self.deadline.is_zero() => None,
            [] => Some(Vec::new()),
            [Request { policy, key, cost }] => self.store.check_now(policy, key, *cost).map(|decision| vec![decision]),
            several => self.store.check_all_now(several),
        };
        let Some(decisions) = decisions else { return false };
        let mut decisions = decisions.into_iter();
        for subject in &mut *subjects {
            subject.decision = match (subject.enforced, hopeless) {
                (true, false) => decisions.next(),
                (true, true) => subject.policy(&self.policy).rule_out(cost),
                (false, _) => self.try_decide_locally(subject.policy(&self.policy), &subject.key, cost),
            };
        }
        // Without a ruling to make it takes all of them.
        hopeless || !requests.is_empty() || subjects.iter().all(|subject| subject.decision.is_some())
    }

    fn request(&self, subject: &Descriptor, cost: u32) -> Request {
        Request { policy: subject.policy(&self.policy).clone(), key: subject.key, cost }
    }

    /// Asks the resolver, and notes how it does: what it fails at says something about one key perhaps, and nothing about the store.
    async fn resolve(&self, resolver: &PolicyResolver, key: &Key, question: &Question) -> Result<Policy, StoreError> {
        match Deadline::new(resolver.resolve(key, question, self.deadline / 2), self.deadline).await {
            // That says nothing about the resolver.
            Ok(Resolved::Cached(policy)) => Ok(policy),
            Ok(Resolved::Fresh(policy)) => {
                if resolver.outage().ends() {
                    tracing::info!(policy = self.policy.name(), "rate limit resolver answers again");
                }
                Ok(policy)
            }
            Ok(Resolved::Stale(policy, error)) => {
                self.resolver_failed(resolver, &error, true);
                Ok(policy)
            }
            Err(error) => {
                self.resolver_failed(resolver, &error, false);
                Err(error)
            }
        }
    }

    /// The log is told once in an outage, and so what becomes of the keys that have no old answer, whether or not this one has.
    fn resolver_failed(&self, resolver: &PolicyResolver, error: &StoreError, old_answer: bool) {
        self.policy.meters().resolver_failed();
        if resolver.outage().begins() {
            // The error itself speaks of a store.
            let cause = error.source().map_or_else(|| "no answer came in time".to_owned(), ToString::to_string);
            let (policy, then) = (self.policy.name(), self.without_store());
            tracing::warn!(policy, cause, ?then, old_answer, "rate limit resolver fails");
        }
    }

    /// Asks the store, if the circuit lets it.
    async fn ask_store(&self, subjects: &mut [Descriptor], cost: u32) -> Result<(), StoreError> {
        if self.exceeds_capacity(subjects, cost) {
            // The store could only say how the others stand, which is not worth a probe.
            self.circuit.admit_no_probe()?;
        } else {
            self.circuit.admit()?;
        }
        if self.decide_enforced(&*self.store, subjects, cost).await? {
            self.circuit.answered(self);
        }
        if subjects.iter().all(|subject| subject.decision.is_some()) {
            return Ok(());
        }
        let is_aside = enforced_decided(subjects);
        if is_aside && self.aside.admit().is_err() {
            // Those who have no say would hold up the request for the whole deadline. They are left undecided.
            return Ok(());
        }
        if self.decide_one_by_one(&*self.store, subjects, cost, false).await? {
            self.circuit.answered(self);
            if is_aside {
                self.aside.answered(&Aside(&self.policy));
            }
        }
        Ok(())
    }

    /// What happens when the store, or the resolver, has failed.
    async fn fallback(&self, subjects: &mut [Descriptor], cost: u32, error: StoreError) -> Result<(), Rejection> {
        let then = self.without_store();
        if then == OnStoreError::Local {
            for subject in subjects.iter_mut().filter(|subject| self.is_unresolved(subject)) {
                subject.policy = Some(self.policy.clone());
            }
        }
        let hopeless = self.exceeds_capacity(subjects, cost);
        for subject in &mut *subjects {
            // Half of an answer is none, but for what needs no store.
            let is_known = hopeless && !self.is_unresolved(subject);
            subject.decision = if is_known { subject.policy(&self.policy).rule_out(cost) } else { None };
        }
        if hopeless {
            return self.rule(subjects, cost);
        }
        // Whoever has not been resolved may well have a say: of that the policy of the layer knows nothing.
        let has_a_say = subjects.iter().any(|subject| subject.enforced || self.is_unresolved(subject));
        match then {
            OnStoreError::Local => {
                for subject in &mut *subjects {
                    subject.policy = Some(subject.policy(&self.policy).share_of(self.replicas));
                    subject.local = true;
                }
                if self.exceeds_capacity(subjects, cost) {
                    // Too much for a share, but not for the quota.
                    self.undecided(subjects, Verdict::FailedClosed);
                    return Err(Rejection::Store(error));
                }
                // Memory does not fail.
                let decided = async {
                    self.decide_enforced(self.local.backend(), subjects, cost).await?;
                    self.decide_one_by_one(self.local.backend(), subjects, cost, false).await
                };
                match decided.await {
                    Ok(_) => self.rule(subjects, cost),
                    Err(error) => Err(Rejection::Store(error)),
                }
            }
            // What costs nothing needs no room.
            OnStoreError::Deny if has_a_say && cost > 0 => {
                self.undecided(subjects, Verdict::FailedClosed);
                Err(Rejection::Store(error))
            }
            OnStoreError::Allow | OnStoreError::Deny => {
                self.undecided(subjects, Verdict::FailedOpen);
                Ok(())
            }
        }
    }

    /// Counts what became of a request about which nothing could be decided.
    fn undecided(&self, subjects: &[Descriptor], verdict: Verdict) {
        for subject in subjects {
            subject.policy(&self.policy).meters().decided(verdict);
        }
    }

    /// Yes or no, once all decisions are there.
    pub(super) fn rule(&self, subjects: &[Descriptor], cost: u32) -> Result<(), Rejection> {
        let is_turned_away = subjects.iter().any(Descriptor::denies);
        for subject in subjects {
            let (policy, Some(decision)) = (subject.policy(&self.policy), &subject.decision) else { continue };
            if is_turned_away && subject.enforced && decision.is_allowed() {
                // It had room, but was not charged.
                policy.meters().decided(Verdict::TurnedAway);
            } else {
                note(policy, decision, subject.enforced, subject.local, cost);
            }
        }
        self.denials(subjects, cost).map_or(Ok(()), |limited| Err(Rejection::Limited(limited)))
    }

    /// What stands in the way of a request.
    fn denials(&self, subjects: &[Descriptor], cost: u32) -> Option<RateLimited> {
        let denials = subjects.iter().filter(|subject| subject.denies());
        denials.filter_map(|subject| self.limited(subject, cost)).reduce(RateLimited::and)
    }

    /// Whether the request is turned away whatever the store says, and the resolver where it has not answered.
    pub(super) fn exceeds_capacity(&self, subjects: &[Descriptor], cost: u32) -> bool {
        let mut known = subjects.iter().filter(|subject| !self.is_unresolved(subject));
        known.any(|subject| subject.enforced && subject.policy(&self.policy).rules_out(cost))
    }

    /// Whether it is for the resolver to say by which policy this one is counted, and it has not.
    pub(super) fn is_unresolved(&self, subject: &Descriptor) -> bool {
        self.resolver.is_some() && subject.main && subject.policy.is_none()
    }

    /// Lets `store` decide together about those whose policies are enforced: before the others, who have no say. Answers whether it had to be asked:
    /// what is known in front of it, or decided without it, says nothing about it.
    async fn decide_enforced<S: RateLimitStore + Sync>(
        &self,
        store: &S,
        subjects: &mut [Descriptor],
        cost: u32,
    ) -> Result<bool, StoreError> {
        let layer = &self.policy;
        let mut was_asked = false;
        for subject in &mut *subjects {
            subject.decision = subject.policy(layer).rule_out(cost);
        }
        let hopeless = self.exceeds_capacity(subjects, cost);
        let mut together: SmallVec<[usize; 4]> = SmallVec::new();
        for (index, subject) in subjects.iter_mut().enumerate() {
            if subject.decision.is_some() {
                continue;
            }
            let (policy, key) = (subject.policy(layer), &subject.key);
            if subject.enforced && !hopeless {
                together.push(index);
            } else if subject.enforced {
                // The request is turned away in any case.
                subject.decision = Some(store.peek(policy, key, cost).await?);
                was_asked = true;
            }
        }
        if together.len() > 1 {
            let requests: Vec<Request> = together.iter().map(|index| self.request(&subjects[*index], cost)).collect();
            let known = store.check_all_now(&requests);
            was_asked |= known.is_none();
            let decisions = match known {
                Some(decisions) => decisions,
                None => store.check_all(&requests).await?,
            };
            for (index, decision) in together.iter().zip(decisions) {
                subjects[*index].decision = Some(decision);
            }
        }
        Ok(self.decide_one_by_one(store, subjects, cost, true).await? | was_asked)
    }

    /// Lets `store` decide about each by itself of those, enforced or not, about whom nothing was decided yet. Answers whether it had to be asked.
    async fn decide_one_by_one<S: RateLimitStore + Sync>(
        &self,
        store: &S,
        subjects: &mut [Descriptor],
        cost: u32,
        enforced: bool,
    ) -> Result<bool, StoreError> {
        // Of one alone it was found out before that nothing is known.
        let may_be_known = subjects.len() > 1;
        let undecided = |subject: &&mut Descriptor| subject.enforced == enforced && subject.decision.is_none();
        let mut was_asked = false;
        for subject in subjects.iter_mut().filter(undecided) {
            let (policy, key) = (subject.policy(&self.policy), &subject.key);
            let known = if may_be_known { store.check_now(policy, key, cost) } else { None };
            was_asked |= known.is_none();
            subject.decision = match known {
                Some(decision) => Some(decision),
                None => Some(store.check(policy, key, cost).await?),
            };
        }
        Ok(was_asked)
    }
}

/// Counts a decision, and answers whether the request may pass as far as it is concerned.
#[inline]
pub(super) fn note(policy: &Policy, decision: &Decision, enforced: bool, local: bool, cost: u32) -> bool {
    if decision.is_allowed() {
        if Meters::COUNT {
            let verdict = if local { Verdict::LocalAllowed } else { Verdict::Allowed };
            count_allowed(policy, verdict, decision.is_near_limit());
        }
        return true;
    }
    note_denial(policy, decision, enforced, local, cost);
    !enforced
}

/// Apart, so that requests that are admitted do not have to go around it.
#[cold]
fn note_denial(policy: &Policy, decision: &Decision, enforced: bool, local: bool, cost: u32) {
    let verdict = match (enforced, local) {
        (false, _) => Verdict::Shadow,
        (true, true) => Verdict::LocalLimited,
        (true, false) => Verdict::of(decision.outcome()),
    };
    policy.meters().decided(verdict);
    tracing::debug!(
        policy = policy.name(),
        verdict = verdict.name(),
        cost,
        retry_after = ?decision.retry_after(),
        "over a rate limit"
    );
}

#[inline]
pub(super) fn count_allowed(policy: &Policy, verdict: Verdict, is_near_limit: bool) {
    policy.meters().decided(verdict);
    if is_near_limit {
        policy.meters().near_limit();
    }
}
