//! Requests that wait for room, in the line of whom they count for.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use super::decision::Decision;
use super::descriptor::{Descriptor, Subjects};
use super::evaluate::Evaluation;
use super::layer::{LayerConfig, WaitConfig};
use super::policy::Policy;
use super::rejection::Rejection;
use super::store::RateLimitStore;
use super::wait_queue::{CachedDenial, Lines, QueueKey, Waiter};
use crate::key::Key;

impl Evaluation {
    /// How long a request has to wait that is over its limit, if that is over by then.
    fn pause(&self, until: Instant) -> Option<Duration> {
        let Err(Rejection::Limited(limited)) = &self.result else { return None };
        limited.retry_after().filter(|wait| after(Instant::now(), *wait) <= until)
    }
}

/// An instant, or one that no program sees.
fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(Duration::from_secs(86_400 * 365 * 30))
}

impl<B: RateLimitStore + Sync> LayerConfig<B> {
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

    /// The judgement of a request that may have to wait for room: in the line of the one whom it counts for that has none for longest.
    /// What it was told when it `came`, if it was told something, is not asked again.
    pub(super) async fn evaluate_with_wait(&self, mut subjects: Subjects, cost: u32, came: Instant) -> Evaluation {
        // What costs nothing needs no room.
        let Some(WaitConfig { wait, lines }) = self.patience.as_ref().filter(|_| cost > 0) else {
            return self.judge(subjects, cost).await;
        };
        // And what never fits waits for none, as far as that is known.
        if let Some(main) = subjects.iter_mut().find(|subject| self.is_unresolved(subject))
            && let Some(policy) = self.resolver.as_ref().and_then(|resolver| resolver.known(&main.key))
        {
            main.count_by(policy);
        }
        if self.exceeds_capacity(&subjects, cost) {
            return self.judge(subjects, cost).await;
        }
        let until = after(Instant::now(), *wait);
        let mut place: Option<Waiter> = None;
        // In whose lines it has come to its turn. It need not stand there again unless it is denied once more, so that two lines do not
        // send it to and fro.
        let mut stood: SmallVec<[QueueKey; 2]> = SmallVec::new();
        // Those who have no say are asked once. Whether the key of the layer has one is for its resolver to tell.
        let mut others: Vec<Descriptor> = Vec::new();
        let mut denied = subjects.take_denied(came.elapsed());
        // When there is room for who was told this, if that is in time.
        let in_time = |told: &Descriptor| {
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
                        Some(subjects) => Evaluation { result: self.rule(&subjects, cost), subjects },
                        None => {
                            let mut asked = subjects.undecided();
                            let answer = self.query(&mut asked, cost).await;
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
                            self.finish(asked, cost, answer).await
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
                            place.refuse(CachedDenial::now(told), cost);
                        }
                        return judged;
                    };
                    if let Some(place) = own {
                        place.tell(CachedDenial::now(told.clone()));
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
            let joined = in_time(&told).and_then(|_| lines.join(whose.clone(), || CachedDenial::now(told.clone())));
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
    fn by_now(&self, lines: &Lines, told: Descriptor, cost: u32) -> Descriptor {
        lines.denial(&self.whose(&told), cost).unwrap_or(told)
    }

    /// How many more requests of this line would have had room when this one was admitted, as far as that was said.
    fn room_for_more(&self, judged: &Evaluation, whose: &QueueKey, cost: u32) -> Option<u32> {
        let subject = judged.subjects.iter().find(|subject| self.whose(subject) == *whose)?;
        let decision = subject.decision.as_ref().filter(|decision| judged.result.is_ok() && decision.is_allowed())?;
        decision.remaining()?.checked_div(cost)
    }

    /// Whose line a subject waits in.
    fn whose(&self, subject: &Descriptor) -> QueueKey {
        let policy = if subject.main { &self.policy } else { subject.policy(&self.policy) };
        QueueKey::new(policy, &subject.key)
    }

    /// What those were told who wait before this request, in the line that lasts longest.
    fn ahead(&self, lines: &Lines, subjects: &[Descriptor], stood: &[QueueKey], cost: u32) -> Option<Descriptor> {
        if !lines.are_used() {
            return None;
        }
        let lines_of = subjects.iter().map(|subject| self.whose(subject)).filter(|whose| !stood.contains(whose));
        strictest(lines_of.filter_map(|whose| lines.denial(&whose, cost)))
    }

    /// Turns a request away without asking anybody: by what another one was told of somebody whom both count for.
    fn refused(&self, told: Descriptor, cost: u32) -> Evaluation {
        let subjects = Subjects::One(told);
        let result = self.rule(&subjects, cost);
        Evaluation { subjects, result }
    }
}

/// The one that stands in the way of a request for longest.
fn strictest(subjects: impl Iterator<Item = Descriptor>) -> Option<Descriptor> {
    let denials = subjects.filter(Descriptor::denies);
    denials.max_by_key(|subject| subject.decision.as_ref().map(Decision::strictness))
}
