//! What a layer makes of a request: asks the store, does without one that fails, and says yes or no.

use std::error::Error;
use std::iter::Chain;
use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;
use std::{mem, option, slice, vec};

use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::decision::{Decision, RateLimited};
use super::layer::{Core, OnStoreError, Patience};
use super::line::{Denial, Lines, Place, Whose};
use super::meters::{Meters, Verdict};
use super::policy::Policy;
use super::rejection::{Rejection, Standing};
use super::resolver::{PolicyResolver, Resolved};
use super::store::{Charged, RateLimitStore, Request};
use crate::circuit::{Circuit, Watch};
use crate::deadline::{Deadline, leaves_time};
use crate::error::StoreError;
use crate::key::Key;

/// Somebody whom a request counts for.
#[derive(Clone, Debug)]
pub(super) struct Subject {
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
}

impl Subject {
    /// Somebody about whom nothing was decided yet. `policy` is `None` for the key of the layer.
    pub(super) fn new(layer: &Policy, policy: Option<Policy>, key: Key) -> Self {
        let enforced = policy.as_ref().unwrap_or(layer).is_enforced_for(&key);
        let main = policy.is_none();
        Self { policy, key, main, decision: None, enforced, local: false }
    }

    /// Is counted by this policy instead.
    fn count_by(&mut self, policy: Policy) {
        self.enforced = policy.is_enforced_for(&self.key);
        self.policy = Some(policy);
    }

    /// What it is counted by, behind a layer with this policy.
    pub(super) fn policy<'a>(&'a self, layer: &'a Policy) -> &'a Policy {
        self.policy.as_ref().unwrap_or(layer)
    }

    /// Whether the request is turned away for this one.
    fn denies(&self) -> bool {
        self.enforced && self.decision.as_ref().is_some_and(|decision| !decision.is_allowed())
    }

    /// What the client may know.
    pub(super) fn standing<'a>(&'a self, layer: &'a Policy) -> Option<Standing<'a>> {
        self.enforced.then(|| Standing::of(self.policy(layer), &self.key, self.decision.as_ref()))
    }
}

/// Whom a request counts for: nearly always one, who takes no memory of its own.
#[derive(Debug)]
pub(super) enum Subjects {
    One(Subject),
    Several(Vec<Subject>),
}

impl Default for Subjects {
    /// Nobody.
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

impl Deref for Subjects {
    type Target = [Subject];

    #[inline]
    fn deref(&self) -> &[Subject] {
        match self {
            Self::One(subject) => slice::from_ref(subject),
            Self::Several(subjects) => subjects,
        }
    }
}

impl DerefMut for Subjects {
    fn deref_mut(&mut self) -> &mut [Subject] {
        match self {
            Self::One(subject) => slice::from_mut(subject),
            Self::Several(subjects) => subjects,
        }
    }
}

impl Subjects {
    /// The same, about whom nothing was decided yet.
    fn undecided(&self) -> Self {
        let undecided = |subject: &Subject| Subject { decision: None, local: false, ..subject.clone() };
        match self {
            Self::One(subject) => Self::One(undecided(subject)),
            Self::Several(subjects) => Self::Several(subjects.iter().map(undecided).collect()),
        }
    }

    /// Takes out what the only one was told so long ago, as it stands by now; `None` if the wait is over.
    fn take_denied(&mut self, elapsed: Duration) -> Option<Self> {
        let Self::One(subject) = self else { return None };
        let decision = subject.decision.take()?;
        decision.retry_after().filter(|wait| *wait > elapsed)?;
        Some(Self::One(Subject { decision: Some(decision.later(elapsed)), ..subject.clone() }))
    }

    /// Takes out those who turn out to have no say, as they were `judged`.
    fn take_those_without_a_say(&mut self, judged: &[Subject]) -> Vec<Subject> {
        if judged.iter().all(|subject| subject.enforced) {
            return Vec::new();
        }
        let subjects = mem::take(self).into_iter().zip(judged);
        *self = Self::Several(subjects.filter(|(_, judged)| judged.enforced).map(|(subject, _)| subject).collect());
        judged.iter().filter(|subject| !subject.enforced).cloned().collect()
    }

    fn extend(&mut self, others: Vec<Subject>) {
        if !others.is_empty() {
            *self = Self::Several(mem::take(self).into_iter().chain(others).collect());
        }
    }
}

impl IntoIterator for Subjects {
    type Item = Subject;
    type IntoIter = Chain<option::IntoIter<Subject>, vec::IntoIter<Subject>>;

    fn into_iter(self) -> Self::IntoIter {
        let (one, several) = match self {
            Self::One(subject) => (Some(subject), Vec::new()),
            Self::Several(subjects) => (None, subjects),
        };
        one.into_iter().chain(several)
    }
}

/// A request that has been judged.
pub(super) struct Judgement {
    pub(super) subjects: Subjects,
    pub(super) ruling: Result<(), Rejection>,
}

impl Judgement {
    /// How long a request has to wait that is over its limit, if that is over by then.
    fn pause(&self, until: Instant) -> Option<Duration> {
        let Err(Rejection::Limited(limited)) = &self.ruling else { return None };
        limited.retry_after().filter(|wait| after(Instant::now(), *wait) <= until)
    }
}

/// An instant, or one that no program sees.
fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(Duration::from_secs(86_400 * 365 * 30))
}

/// What is told of a store that fails while it is asked about a policy.
impl Watch for Policy {
    fn failed(&self) {
        self.meters().store_failed();
    }

    fn opened(&self) {
        self.meters().circuit_opened();
        tracing::warn!(policy = self.name(), "rate limit circuit opens: the store is asked by probes only");
    }

    fn closed(&self) {
        self.meters().circuit_closed();
        tracing::info!(policy = self.name(), "rate limit circuit closes: the store is asked again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(policy = self.name(), %error, cause, "rate limit store fails");
    }

    fn outage_ends(&self) {
        tracing::info!(policy = self.name(), "rate limit store answers again");
    }
}

/// The same, and what is done without it.
impl<B> Watch for Core<B> {
    fn failed(&self) {
        self.policy.failed();
    }

    fn opened(&self) {
        *self.opened_by() = Some(self.policy.clone());
        self.policy.opened();
    }

    fn closed(&self) {
        let opened_by = self.opened_by().take();
        opened_by.as_ref().unwrap_or(&self.policy).closed();
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        let (policy, then) = (self.policy.name(), self.without_store());
        tracing::warn!(policy, %error, cause, ?then, "rate limit store fails");
    }

    fn outage_ends(&self) {
        self.policy.outage_ends();
    }
}

/// What is told of a store that fails while it is asked about policies that have no say, in a layer with this policy.
struct Aside<'a>(&'a Policy);

impl Watch for Aside<'_> {
    fn failed(&self) {
        self.0.failed();
    }

    fn opened(&self) {
        let policy = self.0.name();
        tracing::warn!(
            policy,
            "rate limit circuit of policies on trial opens: the store is asked about them by probes only"
        );
    }

    fn closed(&self) {
        let policy = self.0.name();
        tracing::info!(policy, "rate limit circuit of policies on trial closes: the store is asked about them again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(policy = self.0.name(), %error, cause, "rate limit store fails about policies on trial: they count nothing");
    }

    fn outage_ends(&self) {
        tracing::info!(policy = self.0.name(), "rate limit store answers again about policies on trial");
    }
}

impl<B> Core<B> {
    fn opened_by(&self) -> MutexGuard<'_, Option<Policy>> {
        self.opened_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is done without the store. Where it is never asked that is no outage, in which each process may admit the quota.
    fn without_store(&self) -> OnStoreError {
        if self.deadline.is_zero() { OnStoreError::Deny } else { self.on_store_error }
    }
}

impl<B: RateLimitStore + Sync> Core<B> {
    /// The decision about a subject, if it can be made without waiting for anything. Says nothing about a store that fails: the answer may have
    /// come from something in front of it.
    #[inline]
    pub(super) fn decide_now(&self, policy: &Policy, key: &Key, cost: u32) -> Option<Decision> {
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

    /// Whether requests stand in a line for whoever is counted by this policy under this key. Of the key of the layer the policy is that of the
    /// layer, whatever a resolver says.
    #[inline]
    pub(super) fn is_waited_for(&self, policy: &Policy, key: &Key) -> bool {
        self.patience.as_ref().is_some_and(|patience| patience.lines.is_waited_for(policy, key))
    }

    /// Whether a request waits for room that is denied it, as far as that is known when it comes.
    #[inline]
    pub(super) fn is_worth_waiting(&self, decision: &Decision, cost: u32) -> bool {
        let Some(patience) = self.patience.as_ref().filter(|_| cost > 0) else { return false };
        decision.retry_after().is_some_and(|wait| wait <= patience.wait)
    }

    /// What is said to a request because of this subject.
    pub(super) fn limited(&self, subject: &Subject, cost: u32) -> Option<RateLimited> {
        let (policy, decision) = (subject.policy(&self.policy).clone(), subject.decision.clone()?);
        Some(RateLimited::new(policy, cost, decision))
    }

    /// The judgement of a request that may have to wait for room: in the line of the one whom it counts for that has none for longest.
    /// What it was told when it `came`, if it was told something, is not asked again.
    pub(super) async fn judge_in_turn(&self, mut subjects: Subjects, cost: u32, came: Instant) -> Judgement {
        // What costs nothing needs no room.
        let Some(Patience { wait, lines }) = self.patience.as_ref().filter(|_| cost > 0) else {
            return self.judge(subjects, cost).await;
        };
        // And what never fits waits for none, as far as that is known.
        if let Some(main) = subjects.iter_mut().find(|subject| self.is_unresolved(subject))
            && let Some(policy) = self.resolver.as_ref().and_then(|resolver| resolver.known(&main.key))
        {
            main.count_by(policy);
        }
        if self.is_hopeless(&subjects, cost) {
            return self.judge(subjects, cost).await;
        }
        let until = after(Instant::now(), *wait);
        let mut place: Option<Place> = None;
        // In whose lines it has come to its turn. It need not stand there again unless it is denied once more, so that two lines do not
        // send it to and fro.
        let mut stood: SmallVec<[Whose; 2]> = SmallVec::new();
        // Those who have no say are asked once. Whether the key of the layer has one is for its resolver to tell.
        let mut others: Vec<Subject> = Vec::new();
        let mut denied = subjects.take_denied(came.elapsed());
        // When there is room for who was told this, if that is in time.
        let in_time = |told: &Subject| {
            let room = after(Instant::now(), self.limited(told, cost)?.retry_after()?);
            Some(room).filter(|room| *room <= until)
        };
        loop {
            let denied = denied.take();
            if let Some(told) = place.as_ref().and_then(|place| place.refusal(cost))
                && in_time(&told).is_none()
            {
                return self.refused(told, cost);
            }
            let (told, judged) = match self.ahead(lines, &subjects, &stood, cost) {
                Some(told) => (told, None),
                None => {
                    // Who asks again does so as long after this as the store says, so that the way to the store and back does not come on top.
                    let asked_at = Instant::now();
                    if let Some(place) = &place {
                        // The resolver may take as long as the store.
                        place.asks(after(asked_at, self.deadline.saturating_mul(2)));
                    }
                    let mut judged = match denied {
                        Some(subjects) => Judgement { ruling: self.rule(&subjects, cost), subjects },
                        None => {
                            let mut asked = subjects.undecided();
                            let answer = self.look(&mut asked, cost).await;
                            // To look before it is time makes nothing worse: what the store has said holds until then, also while it fails.
                            if let (Err(_), Some(place)) = (&answer, &place) {
                                place.narrow();
                                if let Some(told) = place.holding() {
                                    match in_time(&told) {
                                        Some(room) if place.again(room, until).await => continue,
                                        _ => return self.refused(self.by_now(lines, told, cost), cost),
                                    }
                                }
                            }
                            self.conclude(asked, cost, answer).await
                        }
                    };
                    let more = subjects.take_those_without_a_say(&judged.subjects);
                    judged.subjects.extend(others.clone());
                    others.extend(more);
                    let told = strictest(judged.subjects.iter().cloned());
                    match (&place, &told) {
                        (Some(place), Some(told)) if *place.whose() == self.whose(told) => place.narrow(),
                        (Some(place), None) => {
                            if let Some(room) = self.room_for_more(&judged, place.whose(), cost) {
                                place.widen(room);
                            }
                        }
                        _ => {}
                    }
                    let Some(told) = told else { return judged };
                    let own = place.as_ref().filter(|place| *place.whose() == self.whose(&told));
                    let Some(pause) = judged.pause(until) else {
                        if let Some(place) = own {
                            place.refuse(Denial::now(told), cost);
                        }
                        return judged;
                    };
                    if let Some(place) = own {
                        place.tell(Denial::now(told.clone()));
                        if place.again(after(asked_at, pause), until).await {
                            continue;
                        }
                        return self.refused(self.by_now(lines, told, cost), cost);
                    }
                    (told, Some((after(asked_at, pause), judged)))
                }
            };
            // Nobody holds up those who wait for somebody else.
            drop(place.take());
            let whose = self.whose(&told);
            let joined = in_time(&told).and_then(|_| lines.join(whose.clone(), || Denial::now(told.clone())));
            let Some(joined) = joined else {
                return judged.map_or_else(|| self.refused(told, cost), |(_, judged)| judged);
            };
            if timeout_at(until, joined.turn()).await.is_err() {
                return self.refused(self.by_now(lines, told, cost), cost);
            }
            // Those before it may have had room that it was not told of.
            if let (Some((again, _)), true) = (judged, joined.begins())
                && !joined.again(again, until).await
            {
                return self.refused(self.by_now(lines, told, cost), cost);
            }
            stood.push(whose);
            place = Some(joined);
        }
    }

    /// What the first of its line was told at last, for one who was told this earlier.
    fn by_now(&self, lines: &Lines, told: Subject, cost: u32) -> Subject {
        lines.denial(&self.whose(&told), cost).unwrap_or(told)
    }

    /// How many more requests of this line would have had room when this one was admitted, as far as that was said.
    fn room_for_more(&self, judged: &Judgement, whose: &Whose, cost: u32) -> Option<u32> {
        let subject = judged.subjects.iter().find(|subject| self.whose(subject) == *whose)?;
        let decision = subject.decision.as_ref().filter(|decision| judged.ruling.is_ok() && decision.is_allowed())?;
        decision.remaining()?.checked_div(cost)
    }

    /// Whose line a subject waits in.
    fn whose(&self, subject: &Subject) -> Whose {
        let policy = if subject.main { &self.policy } else { subject.policy(&self.policy) };
        Whose::new(policy, &subject.key)
    }

    /// What those were told who wait before this request, in the line that lasts longest.
    fn ahead(&self, lines: &Lines, subjects: &[Subject], stood: &[Whose], cost: u32) -> Option<Subject> {
        if !lines.are_used() {
            return None;
        }
        let lines_of = subjects.iter().map(|subject| self.whose(subject)).filter(|whose| !stood.contains(whose));
        strictest(lines_of.filter_map(|whose| lines.denial(&whose, cost)))
    }

    /// Turns a request away without asking anybody: by what another one was told of somebody whom both count for.
    fn refused(&self, told: Subject, cost: u32) -> Judgement {
        let subjects = Subjects::One(told);
        let ruling = self.rule(&subjects, cost);
        Judgement { subjects, ruling }
    }

    /// The judgement, after all that has to be waited for.
    pub(super) async fn judge(&self, mut subjects: Subjects, cost: u32) -> Judgement {
        let answer = self.look(&mut subjects, cost).await;
        self.conclude(subjects, cost, answer).await
    }

    /// Asks for the decisions that a ruling depends on.
    async fn look(&self, subjects: &mut [Subject], cost: u32) -> Result<(), StoreError> {
        let span = tracing::debug_span!("rate_limit", policy = self.policy.name(), subjects = subjects.len());
        match self.ask(subjects, cost).instrument(span).await {
            // It failed for those alone that have no say.
            Err(_) if is_ruled_on(subjects) => Ok(()),
            asked => asked,
        }
    }

    /// What follows from the answer, or from there being none.
    async fn conclude(&self, mut subjects: Subjects, cost: u32, answer: Result<(), StoreError>) -> Judgement {
        let ruling = match answer {
            Ok(()) => self.rule(&subjects, cost),
            Err(error) => self.do_without(&mut subjects, cost, error).await,
        };
        Judgement { subjects, ruling }
    }

    /// Asks the resolver and then the store. Each has the whole deadline, so that a store never fails because a resolver is slow.
    async fn ask(&self, subjects: &mut [Subject], cost: u32) -> Result<(), StoreError> {
        // What needs no time is found out first.
        let has_time = || leaves_time(self.deadline).inspect_err(|error| self.circuit.failed(self, error));
        // Others were found to be unknown in front of the store when they came.
        let mut may_be_known = self.patience.is_some();
        if let (Some(resolver), Some(main)) = (&self.resolver, subjects.iter_mut().find(|subject| subject.main)) {
            let policy = match resolver.known(&main.key) {
                Some(policy) => policy,
                None => {
                    has_time()?;
                    self.resolve(resolver, &main.key).await?
                }
            };
            main.count_by(policy);
            may_be_known = true;
        }
        if let ([only], true) = (&mut *subjects, may_be_known) {
            // What is answered there says nothing about the store, and is no probe.
            only.decision = self.decide_now(only.policy(&self.policy), &only.key, cost);
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
            if is_ruled_on(subjects) {
                // A trial that turns requests away because the circuit opens would have a say.
                self.aside.failed(&Aside(&self.policy), error);
            } else {
                self.circuit.failed(self, error);
            }
        })
    }

    /// Decides about several together where something in front of the store does, or none is needed: that says nothing about the store either.
    fn decide_all_now(&self, subjects: &mut [Subject], cost: u32) -> bool {
        let can_be_asked = !self.circuit.is_open() && !self.deadline.is_zero();
        let hopeless = self.is_hopeless(subjects, cost);
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
                (false, _) => self.decide_now(subject.policy(&self.policy), &subject.key, cost),
            };
        }
        // Without a ruling to make it takes all of them.
        hopeless || !requests.is_empty() || subjects.iter().all(|subject| subject.decision.is_some())
    }

    fn request(&self, subject: &Subject, cost: u32) -> Request {
        Request { policy: subject.policy(&self.policy).clone(), key: subject.key, cost }
    }

    /// Asks the resolver, and notes how it does: what it fails at says something about one key perhaps, and nothing about the store.
    async fn resolve(&self, resolver: &PolicyResolver, key: &Key) -> Result<Policy, StoreError> {
        match Deadline::new(resolver.resolve(key, self.deadline / 2), self.deadline).await {
            // That says nothing about the resolver.
            Ok(Resolved::Known(policy)) => Ok(policy),
            Ok(Resolved::Asked(policy)) => {
                if resolver.outage().ends() {
                    tracing::info!(policy = self.policy.name(), "rate limit resolver answers again");
                }
                Ok(policy)
            }
            Ok(Resolved::Old(policy, error)) => {
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
    async fn ask_store(&self, subjects: &mut [Subject], cost: u32) -> Result<(), StoreError> {
        if self.is_hopeless(subjects, cost) {
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
        let is_aside = is_ruled_on(subjects);
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
    async fn do_without(&self, subjects: &mut [Subject], cost: u32, error: StoreError) -> Result<(), Rejection> {
        let then = self.without_store();
        if then == OnStoreError::Local {
            for subject in subjects.iter_mut().filter(|subject| self.is_unresolved(subject)) {
                subject.policy = Some(self.policy.clone());
            }
        }
        let hopeless = self.is_hopeless(subjects, cost);
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
                if self.is_hopeless(subjects, cost) {
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
    fn undecided(&self, subjects: &[Subject], verdict: Verdict) {
        for subject in subjects {
            subject.policy(&self.policy).meters().decided(verdict);
        }
    }

    /// Yes or no, once all decisions are there.
    fn rule(&self, subjects: &[Subject], cost: u32) -> Result<(), Rejection> {
        let is_turned_away = subjects.iter().any(Subject::denies);
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
    fn denials(&self, subjects: &[Subject], cost: u32) -> Option<RateLimited> {
        let denials = subjects.iter().filter(|subject| subject.denies());
        denials.filter_map(|subject| self.limited(subject, cost)).reduce(RateLimited::and)
    }

    /// Whether the request is turned away whatever the store says, and the resolver where it has not answered.
    fn is_hopeless(&self, subjects: &[Subject], cost: u32) -> bool {
        let mut known = subjects.iter().filter(|subject| !self.is_unresolved(subject));
        known.any(|subject| subject.enforced && subject.policy(&self.policy).rules_out(cost))
    }

    /// Whether it is for the resolver to say by which policy this one is counted, and it has not.
    fn is_unresolved(&self, subject: &Subject) -> bool {
        self.resolver.is_some() && subject.main && subject.policy.is_none()
    }

    /// Lets `store` decide together about those whose policies are enforced: before the others, who have no say. Answers whether it had to be asked:
    /// what is known in front of it, or decided without it, says nothing about it.
    async fn decide_enforced<S: RateLimitStore + Sync>(
        &self,
        store: &S,
        subjects: &mut [Subject],
        cost: u32,
    ) -> Result<bool, StoreError> {
        let layer = &self.policy;
        let mut was_asked = false;
        for subject in &mut *subjects {
            subject.decision = subject.policy(layer).rule_out(cost);
        }
        let hopeless = self.is_hopeless(subjects, cost);
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
        subjects: &mut [Subject],
        cost: u32,
        enforced: bool,
    ) -> Result<bool, StoreError> {
        // Of one alone it was found out before that nothing is known.
        let may_be_known = subjects.len() > 1;
        let undecided = |subject: &&mut Subject| subject.enforced == enforced && subject.decision.is_none();
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

/// The one that stands in the way of a request for longest.
fn strictest(subjects: impl Iterator<Item = Subject>) -> Option<Subject> {
    let denials = subjects.filter(Subject::denies);
    denials.max_by_key(|subject| subject.decision.as_ref().map(Decision::strictness))
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

/// Whether the decisions are there that a ruling depends on.
fn is_ruled_on(subjects: &[Subject]) -> bool {
    let mut enforced = subjects.iter().filter(|subject| subject.enforced).peekable();
    enforced.peek().is_some() && enforced.all(|subject| subject.decision.is_some())
}
