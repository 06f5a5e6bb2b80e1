//! From the gate to the store, until the lease is there or there is a reason to give up.

use std::future::{Future, pending, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::context;
use super::erased::{Answers, Call};
use super::error::{Busy, Closed, LockError, Nested, NotReplicated, OtherKind, QueueFull};
use super::gate::{Entered, Failure, FailureWatch, Handoff, LeaderPermit, Place};
use super::grant::{FENCES, Grant, after, safe_ttl};
use super::kind::LockKind;
use super::lease::Lease;
use super::lock_key::LockKey;
use super::locks::Terms;
use super::locks_state::Shared;
use super::metrics::{HandoffKind, Outcome};
use super::pickup::{Acquire, Request};
use super::release_task::{IN_FLIGHT_GRACE, ReleaseTask};
use super::renewal::jittered;
use super::store::{Acquired, Claim, Line, Reach, Token};
use crate::error::{ConfigError, StoreError};
use crate::store::circuit::Circuit;

/// How long somebody who waits goes without looking, told or not: a message may be lost.
const POLL: Duration = Duration::from_secs(1);
/// How long it may take to begin to listen, when the lease ends sooner than that.
const SOON: Duration = Duration::from_millis(10);
/// What those in other processes get as a start, where they were told at the same time.
const HEAD_START: Duration = Duration::from_millis(1);
/// The pause after a call that failed, doubled with each further one up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// One lock that a caller asks for.
struct Lone {
    home: Arc<Shared>,
    lock: LockKey,
    terms: Terms,
    place: Place,
}

pub(super) fn acquire(home: Arc<Shared>, lock: LockKey, terms: Terms) -> Call<Result<Lease, LockError>> {
    let place = home.gate.place();
    Box::pin(Acquire::new(Lone { home, lock, terms, place }))
}

impl Request for Lone {
    type Grant = Lease;

    fn home(&self) -> &Arc<Shared> {
        &self.home
    }

    fn times(&self) -> (Duration, Duration) {
        (self.terms.wait, self.terms.ttl)
    }

    fn begin(&mut self, begun: Instant, is_back: bool) -> Call<Result<Lease, LockError>> {
        let Self { lock, terms, .. } = *self;
        let (home, place) = (Arc::clone(&self.home), Place { is_back, ..self.place });
        // Before anything can fail that they count.
        home.meters(&lock);
        // No `async fn`: in its future there is twice what it is given.
        Box::pin(async move { take(&home, &lock, &terms, begun, place).await })
    }

    fn since(lease: &Lease) -> Instant {
        lease.since()
    }

    fn busy(&self) -> LockError {
        self.home.gate.busy(&self.lock).into()
    }

    fn count(&self, outcome: &Result<Lease, LockError>, begun: Instant) {
        let ended = outcome.as_ref().map_or_else(|_| Instant::now(), Lease::since);
        self.home.meters(&self.lock).asked(Outcome::of(outcome), ended - begun);
    }
}

/// Takes the leases of several locks of one shard at once, or none of them. Nobody else in this process asks for one of them
/// meanwhile. The order in which they are named has to be the same everywhere.
pub(super) async fn acquire_all(
    home: &Arc<Shared>,
    locks: &[LockKey],
    terms: Terms,
    place: Place,
) -> Result<impl Iterator<Item = Lease> + use<>, LockError> {
    take_all(home, locks, &terms, Instant::now(), place).await.map(Leases::into_iter)
}

async fn take_all(
    home: &Arc<Shared>,
    locks: &[LockKey],
    terms: &Terms,
    begun: Instant,
    place: Place,
) -> Result<Leases, LockError> {
    let give_up = after(begun, terms.wait);
    let mut asked = Asked::new();
    let mut has_waited = false;
    let first = locks.first().filter(|_| !terms.wait.is_zero());
    let _asking = first.map(|lock| home.ask(lock, terms.max_asking, place.is_back)).transpose()?;
    for lock in locks {
        may_ask(home, lock, terms)?;
        loop {
            // Not from hand to hand: that would be one of them without the others.
            let mut coming = pin!(wait_for_turn(home, lock, terms, begun, place, false));
            let offer = tokio::select! {
                biased;
                offer = &mut coming => offer?,
                // The store is not asked for those that come before as long as this one is waited for.
                () = ready(()) => {
                    has_waited = true;
                    tell(&asked, Some(Failure::Busy(give_up)));
                    coming.await?
                }
            };
            match offer {
                Handoff::LeaderPermit(turn) => break asked.push((Acquisition::new(home, lock, terms)?, turn)),
                Handoff::Lease(lease) => drop(lease),
            }
        }
    }
    if has_waited {
        tell(&asked, None);
    }
    acquire_once(home, &mut asked, terms, give_up).await
}

/// Takes the lease of a lock, for whoever counts what becomes of asking for it.
pub(super) async fn take(
    home: &Arc<Shared>,
    lock: &LockKey,
    terms: &Terms,
    begun: Instant,
    place: Place,
) -> Result<Lease, LockError> {
    may_ask(home, lock, terms)?;
    let _asking = if terms.wait.is_zero() { None } else { Some(home.ask(lock, terms.max_asking, place.is_back)?) };
    let mut asked: Asked = match wait_for_turn(home, lock, terms, begun, place, true).await? {
        Handoff::Lease(lease) => {
            home.meters(lock).handed_over(HandoffKind::Hand, lease.since().elapsed());
            return Ok(lease);
        }
        Handoff::LeaderPermit(turn) => smallvec![(Acquisition::new(home, lock, terms)?, turn)],
    };
    let mut leases = acquire_once(home, &mut asked, terms, after(begun, terms.wait)).await?;
    leases.pop().ok_or_else(|| too_late().into())
}

fn may_ask(home: &Arc<Shared>, lock: &LockKey, terms: &Terms) -> Result<(), LockError> {
    check(terms)?;
    if home.store.scope() == Reach::Quorum && (terms.is_fair || terms.kind == LockKind::ReadWrite || terms.permits > 1)
    {
        return Err(ConfigError::NotByQuorum.into());
    }
    if home.is_closed() {
        return Err(Closed.into());
    }
    if !home.is_semaphore && context::holds(home, lock) {
        return Err(Nested::new(*lock).into());
    }
    Ok(())
}

/// Waits until it is our turn to ask the store for a lock, or somebody in this process hands over the lease, if that would do.
async fn wait_for_turn(
    home: &Arc<Shared>,
    lock: &LockKey,
    terms: &Terms,
    begun: Instant,
    place: Place,
    by_hand: bool,
) -> Result<Handoff, LockError> {
    // What this process is giving back is free for it, and the store is not to say that it is held.
    if let Some(releases) = home.gate.releases(lock, terms.deadline) {
        Box::pin(releases).await;
    }
    let entered =
        if terms.is_fair { home.join(*lock, terms, place.is_back)? } else { home.enter(*lock, terms, place, by_hand)? };
    match entered {
        // A shutdown that has begun since this was looked at may not have seen that somebody is here.
        Entered::LeaderPermit(_) if home.is_closed() => Err(Closed.into()),
        Entered::LeaderPermit(turn) => Ok(Handoff::LeaderPermit(turn)),
        // Apart, so that who need not wait has no room for it to carry along.
        entered => Box::pin(wait_in_queue(home, *lock, *terms, entered, begun, place, by_hand)).await,
    }
}

/// Waits behind whoever is in front: in line, for as long as the caller is ready to, and then for what the store says to them. That is
/// why the caller does not get the lock, so those who are told of a store that fails are told by the store.
async fn wait_in_queue(
    home: &Arc<Shared>,
    lock: LockKey,
    mut terms: Terms,
    mut entered: Entered,
    begun: Instant,
    place: Place,
    by_hand: bool,
) -> Result<Handoff, LockError> {
    let give_up = after(begun, terms.wait);
    // The wait may be over when it comes, as after a release of this process that took its time.
    let mut answer_by = after(give_up.max(Instant::now()), terms.limit());
    loop {
        match entered {
            Entered::LeaderPermit(_) if home.is_closed() => return Err(Closed.into()),
            Entered::LeaderPermit(turn) => return Ok(Handoff::LeaderPermit(turn)),
            Entered::Line { mut waiting, is_free_soon, news } => {
                // What is being given back is waited for also by those who do not want to wait.
                let until = if is_free_soon { answer_by } else { give_up };
                tokio::select! {
                    biased;
                    offer = waiting.offer() => return offer.ok_or_else(|| Closed.into()),
                    () = home.closed() => return Err(Closed.into()),
                    error = circuit_opens(home, news) => return Err(error.into()),
                    () = sleep_until(until) => {}
                }
            }
            Entered::Behind(mut news) => tokio::select! {
                biased;
                heard = news.changed() => {
                    let refusal = heard.ok().and_then(|()| news.borrow().clone());
                    if let Some(refusal) = refusal {
                        return Err(refusal.error(lock, &terms));
                    }
                }
                () = home.closed() => return Err(Closed.into()),
                () = sleep_until(answer_by) => {}
            },
        }
        // Replicas take their time, which is no failure of the store.
        answer_by = answer_by.max(after(give_up, home.gate.limit(&lock)));
        if Instant::now() >= answer_by {
            return Err(home.gate.busy(&lock).into());
        }
        terms.wait = Duration::ZERO;
        entered = match home.gate.overhear(&lock) {
            Some(Ok(news)) => Entered::Behind(news),
            Some(Err(refusal)) => return Err(refusal.error(lock, &terms)),
            // Whoever was in front has gone without an answer.
            None => home.enter(lock, &terms, place, by_hand)?,
        };
    }
}

/// Ready with the last failure when the circuit to the store has opened, for those who heed that.
async fn circuit_opens(home: &Shared, news: Option<FailureWatch>) -> StoreError {
    if let Some(mut news) = news {
        while news.changed().await.is_ok() {
            let heard = news.borrow_and_update().clone();
            if let (Some(Failure::Failed(error)), Err(_)) = (heard, home.circuit().admit_no_probe()) {
                return error;
            }
        }
    }
    pending().await
}

fn check(terms: &Terms) -> Result<(), ConfigError> {
    let (min, max) = (Claim::MIN_TTL, Claim::MAX_TTL);
    if terms.ttl < min || terms.ttl > max {
        return Err(ConfigError::TtlOutOfRange { ttl: terms.ttl, min, max });
    }
    if terms.permits == 0 || terms.permits > Claim::MAX_PERMITS {
        return Err(ConfigError::PermitsOutOfRange { permits: terms.permits, max: Claim::MAX_PERMITS });
    }
    if terms.deadline.is_zero() {
        return Err(ConfigError::ZeroTimeout { setting: "deadline" });
    }
    if terms.max_hold.is_some_and(|max_hold| max_hold.is_zero()) {
        return Err(ConfigError::ZeroTimeout { setting: "max_hold" });
    }
    Ok(())
}

/// What is asked for, all at once: nearly always one lock.
type Asked = SmallVec<[(Acquisition, LeaderPermit); 1]>;
type Leases = SmallVec<[Lease; 1]>;

/// Lets others in this process know what the store says; `None` before it is asked.
fn tell(asked: &Asked, refusal: Option<Failure>) {
    asked.iter().for_each(|(_, turn)| turn.hears(refusal.clone()));
}

/// Asks the store for the leases until it grants all of them, on behalf of all who wait in this process.
async fn acquire_once(
    home: &Arc<Shared>,
    asked: &mut Asked,
    terms: &Terms,
    give_up: Instant,
) -> Result<Leases, LockError> {
    if asked.iter_mut().fold(false, |is_shared, (_, turn)| std::mem::take(&mut turn.is_shared) || is_shared) {
        Box::pin(sleep(HEAD_START)).await;
    }
    match Attempt::new(home, asked, terms.limit()).await {
        Ok((answers, now)) if answers.iter().all(|answer| fence(answer).is_some()) => {
            granted(asked, &answers, now).ok_or_else(|| too_late().into())
        }
        // Apart, so that who gets them at once has no room for it to carry along.
        heard => Box::pin(retry(home, heard, asked, terms, give_up)).await,
    }
}

/// Goes on asking after the first answers.
async fn retry(
    home: &Arc<Shared>,
    mut heard: Result<(Answers, Instant), StoreError>,
    asked: &mut Asked,
    terms: &Terms,
    give_up: Instant,
) -> Result<Leases, LockError> {
    let mut pause = FIRST_PAUSE;
    let mut is_second = false;
    // When a message came that the lock was given back, and nothing else since.
    let mut told = None;
    let mut ask_at = Instant::now();
    loop {
        let answer = heard.map(|heard| {
            // What takes longest, if anything does.
            let obstacles = heard.0.iter().enumerate().filter(|(_, answer)| fence(answer).is_none());
            let is_foreign = |answer: &Acquired| matches!(answer, Acquired::OtherKind { .. });
            let obstacle = obstacles
                .max_by_key(|(_, answer)| (is_foreign(answer), remaining(answer)))
                .map(|(at, answer)| (at, *answer));
            (heard, obstacle)
        });
        match answer {
            Ok(((answers, now), None)) => {
                if let (Some(told), Some((attempts, _))) = (told, asked.first()) {
                    home.meters(&attempts.lock).handed_over(HandoffKind::Message, now - told);
                }
                return granted(asked, &answers, now).ok_or_else(|| too_late().into());
            }
            Ok((_, Some((at, Acquired::NotReplicated { replicas })))) => {
                let Acquisition { lock, claim, .. } = &asked[at].0;
                let required = claim.replicas.count;
                let until = give_up.min(after(Instant::now(), claim.ttl));
                tell(asked, Some(Failure::NotReplicated { replicas, until }));
                let next = Instant::now() + jittered(pause);
                if next >= give_up {
                    return Err(NotReplicated::new(*lock, replicas, required).into());
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                tokio::select! {
                    () = sleep_until(next) => {}
                    () = home.closed() => return Err(Closed.into()),
                }
            }
            Ok((_, Some((at, Acquired::OtherKind { held })))) => {
                let Acquisition { lock, claim, .. } = &asked[at].0;
                return Err(OtherKind::new(*lock, claim.kind, held).into());
            }
            Ok((_, Some((at, answer)))) => {
                tell(asked, Some(Failure::Busy(after(Instant::now(), remaining(&answer)))));
                let (attempts, turn) = &mut asked[at];
                let (lock, remaining) = (attempts.lock, remaining(&answer));
                if matches!(answer, Acquired::LineFull { .. }) {
                    return Err(QueueFull::new(lock).into());
                }
                if Instant::now() >= give_up {
                    return Err(Busy::new(lock, remaining).into());
                }
                if terms.asks && Instant::now() >= ask_at {
                    ask_at = Instant::now() + POLL / 2;
                    home.ask_holders(lock, terms.deadline);
                }
                // Those further back get nothing when the lease ends.
                let is_first = !matches!(answer, Acquired::InLine { is_first: false, .. });
                if turn.wakeups.is_none() {
                    let listen = if is_first { remaining.clamp(SOON, POLL) } else { POLL };
                    let until = give_up.min(after(Instant::now(), listen));
                    tokio::select! {
                        wakeups = timeout_at(until, Arc::clone(&home.store).watch(lock, attempts.in_line())) => turn.wakeups = wakeups.ok(),
                        () = home.closed() => return Err(Closed.into()),
                    }
                    // What was given back before anybody listened is found by asking again.
                } else if let Some(wakeups) = &mut turn.wakeups {
                    let mut poll = jittered(POLL);
                    if is_first {
                        poll = remaining.saturating_add(Duration::from_millis(1)).min(poll);
                    }
                    told = tokio::select! {
                        () = wakeups.next() => Some(Instant::now()),
                        () = sleep_until(give_up.min(after(Instant::now(), poll))) => None,
                        () = home.closed() => return Err(Closed.into()),
                    };
                    // Whoever has no time left looks no more.
                    if told.is_none() && Instant::now() < give_up {
                        home.meters(&lock).polled();
                    }
                }
                if Instant::now() >= give_up {
                    return Err(Busy::new(lock, remaining).into());
                }
            }
            // A connection may just have broken, and there is another one. To ask again with the same token is harmless.
            Err(error)
                if error.is_unavailable()
                    && !Circuit::is_cause_of(&error)
                    && !std::mem::replace(&mut is_second, true) => {}
            Err(error) => {
                tell(asked, Some(Failure::Failed(error.clone())));
                // Who is refused now is refused the next time.
                let is_passing = error.is_timeout() || error.is_unavailable();
                let is_cut_off = terms.heeds_circuit && home.circuit().admit_no_probe().is_err();
                let next = Instant::now() + jittered(pause);
                if !is_passing || is_cut_off || next >= give_up {
                    return Err(error.into());
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                tokio::select! {
                    () = sleep_until(next) => {}
                    () = home.closed() => return Err(Closed.into()),
                }
            }
        }
        // A majority that says no gives back what the others have granted, and one of them may do so late: by then the token has to mean
        // nothing any more.
        if home.store.scope() == Reach::Quorum {
            asked.iter_mut().try_for_each(|(attempts, _)| attempts.begin_again())?;
        }
        heard = Attempt::new(home, asked, terms.limit()).await;
    }
}

/// The attempts to take a lease by one token. If one of them may have come to pass, it is undone when this is dropped; who stands in
/// line leaves it then.
struct Acquisition {
    home: Arc<Shared>,
    lock: LockKey,
    claim: Claim,
    // How long one call may take, and the lease be kept.
    limit: Duration,
    max_hold: Option<Duration>,
    // When the last attempt was sent, if the token may hold the lease or stand in line for it.
    sent: Option<Instant>,
    // The same of the attempts before that, which is not forgotten if the last one was not even carried out.
    sent_before: Option<Instant>,
    // Until when one of which no answer came may still come to pass, if there was one.
    settles: Option<Instant>,
}

impl Acquisition {
    fn new(home: &Arc<Shared>, lock: &LockKey, terms: &Terms) -> Result<Self, StoreError> {
        let line = match (terms.is_fair, terms.wait.is_zero()) {
            (false, _) => Line::Ignore,
            (true, true) => Line::Respect,
            (true, false) => Line::Join,
        };
        // From hand to hand goes what nobody else is in line for.
        let fences = if home.is_semaphore || terms.is_fair { 1 } else { FENCES };
        let permits = if terms.is_shared { Claim::MAX_PERMITS } else { terms.permits };
        let Terms { ttl, kind, is_shared, deadline, max_hold, .. } = *terms;
        let replicas = terms.replicas();
        let claim = Claim { fences, kind, permits, is_shared, line, replicas, ..Claim::new(Token::random()?, ttl) };
        let (home, lock) = (Arc::clone(home), *lock);
        Ok(Self { home, lock, claim, limit: deadline, max_hold, sent: None, sent_before: None, settles: None })
    }

    /// Who stands in line, if anybody does.
    fn in_line(&self) -> Option<Token> {
        (self.claim.line == Line::Join).then_some(self.claim.token)
    }

    fn answered(&mut self, answer: Result<Acquired, &StoreError>) {
        match answer {
            Ok(Acquired::Granted { .. } | Acquired::InLine { .. } | Acquired::NotReplicated { .. }) => {}
            // The claim may still have its position in the queue of the store, and has to leave it.
            Ok(Acquired::OtherKind { .. }) if self.claim.line == Line::Join => {}
            // An earlier attempt may still be on its way.
            Ok(Acquired::Busy { .. } | Acquired::LineFull { .. } | Acquired::OtherKind { .. })
                if self.settles.is_some() => {}
            Ok(Acquired::Busy { .. } | Acquired::LineFull { .. } | Acquired::OtherKind { .. }) => self.sent = None,
            // The store has said no, if for another reason, or was not asked.
            Err(error) if error.is_refusal() || Circuit::is_cause_of(error) => {
                if self.settles.is_none() {
                    self.sent = self.sent_before;
                }
            }
            Err(_) => self.settles = Some(Instant::now() + IN_FLIGHT_GRACE),
        }
    }

    /// When the last attempt was sent, if there is time left at `now` in a lease that it was granted.
    fn good_since(&self, now: Instant) -> Option<Instant> {
        self.sent.filter(|sent| now < *sent + safe_ttl(self.claim.ttl))
    }

    /// Makes a lease of what was granted, unless there is no time left in it at `now`. The turn is to be dropped after that.
    fn granted(&mut self, turn: &mut LeaderPermit, fence: u64, now: Instant) -> Option<Lease> {
        let sent = self.good_since(now)?;
        self.sent = None;
        let hold = Arc::new(Grant::new(self.lock, &self.claim, self.limit, self.settles, sent, fence));
        let fence = hold.hand_to(self.max_hold, now).unwrap_or(fence);
        turn.holds(&hold);
        self.home.keep(&hold);
        self.home.name(&hold, now);
        Some(Lease::new(&self.home, &hold, fence, now))
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        self.undo();
    }
}

impl Acquisition {
    /// Goes on as somebody else who has not asked for anything yet.
    fn begin_again(&mut self) -> Result<(), StoreError> {
        self.undo();
        self.claim.token = Token::random()?;
        self.settles = None;
        Ok(())
    }

    fn undo(&mut self) {
        if let Some(sent) = self.sent.take() {
            let granted_by = self.settles.map_or(sent, |settles| settles.max(sent));
            let until = after(granted_by, self.claim.ttl.max(Claim::PLACE));
            let errand = ReleaseTask::undo(&self.home, self.lock, &self.claim, until, self.limit, self.settles);
            if let Some(errand) = errand {
                errand.in_background();
            }
        }
    }
}

/// What there is to have of a lease, and when, if it is granted at all.
const fn fence(answer: &Acquired) -> Option<u64> {
    match answer {
        Acquired::Granted { fence } => Some(*fence),
        _ => None,
    }
}

/// How long whoever holds a lease may keep it.
const fn remaining(answer: &Acquired) -> Duration {
    match answer {
        Acquired::Granted { .. } | Acquired::NotReplicated { .. } | Acquired::OtherKind { .. } => Duration::ZERO,
        Acquired::Busy { remaining } | Acquired::InLine { remaining, .. } | Acquired::LineFull { remaining } => {
            *remaining
        }
    }
}

/// Makes leases of what was granted; of none if one of them is over already.
fn granted(asked: &mut Asked, answers: &[Acquired], now: Instant) -> Option<Leases> {
    let asked = asked.iter_mut().zip(answers);
    asked.map(|((attempts, turn), answer)| attempts.granted(turn, fence(answer)?, now)).collect()
}

/// One call of the store. Answers when that was heard, too. If it is dropped half way, it is carried on in the background, and what it
/// brings is given back.
struct Attempt<'a> {
    home: &'a Arc<Shared>,
    asked: &'a mut Asked,
    // `None` once it is answered.
    call: Option<Call<Result<Answers, StoreError>>>,
}

impl<'a> Attempt<'a> {
    fn new(home: &'a Arc<Shared>, asked: &'a mut Asked, limit: Duration) -> Self {
        let wanted = asked.iter().map(|(attempts, _)| (attempts.lock, attempts.claim)).collect();
        let call = match home.circuit().admit() {
            Ok(()) => Arc::clone(&home.store).acquire(wanted, limit),
            Err(error) => Box::pin(ready(Err(error))),
        };
        let sent = Instant::now();
        for (attempts, _) in asked.iter_mut() {
            attempts.sent_before = attempts.sent.replace(sent);
        }
        Self { home, asked, call: Some(call) }
    }
}

/// Notes what the store says.
fn answered(
    home: &Shared,
    asked: &mut Asked,
    answers: Result<Answers, StoreError>,
) -> Result<(Answers, Instant), StoreError> {
    // An answer for each, or it is none.
    let answers = answers.and_then(|answers| {
        let is_whole = answers.len() == asked.len();
        if is_whole { Ok(answers) } else { Err(StoreError::other("a store has answered half of what it was asked")) }
    });
    match &answers {
        Ok(_) => home.circuit().answered(home),
        Err(error) => home.circuit().failed(home, error),
    }
    for (at, (attempts, _)) in asked.iter_mut().enumerate() {
        attempts.answered(answers.as_ref().map(|answers| answers[at]));
    }
    answers.map(|answers| (answers, Instant::now()))
}

/// What was granted so late that there is no time left in it is to be asked for again.
fn in_time(asked: &Asked, (answers, now): (Answers, Instant)) -> Result<(Answers, Instant), StoreError> {
    let is_granted = answers.iter().all(|answer| fence(answer).is_some());
    let is_late = asked.iter().any(|(attempts, _)| attempts.good_since(now).is_none());
    if is_granted && is_late { Err(too_late()) } else { Ok((answers, now)) }
}

fn too_late() -> StoreError {
    StoreError::late("the answer came when the lease that it grants was over")
}

impl Future for Attempt<'_> {
    type Output = Result<(Answers, Instant), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { home, asked, call } = &mut *self;
        let under_way = call.as_mut().expect("Attempt polled after completion");
        let Poll::Ready(answers) = under_way.as_mut().poll(cx) else { return Poll::Pending };
        *call = None;
        Poll::Ready(answered(home, asked, answers).and_then(|heard| in_time(asked, heard)))
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        let (home, mut asked) = (Arc::clone(self.home), std::mem::take(self.asked));
        // What becomes of it is not known either if the task is dropped with its runtime.
        let settles = Some(Instant::now() + IN_FLIGHT_GRACE);
        let before: SmallVec<[_; 1]> =
            asked.iter_mut().map(|(attempts, _)| std::mem::replace(&mut attempts.settles, settles)).collect();
        self.home.spawn(async move {
            let answers = call.await;
            for ((attempts, _), before) in asked.iter_mut().zip(before) {
                attempts.settles = before;
            }
            if let Ok((answers, now)) = answered(&home, &mut asked, answers) {
                drop(granted(&mut asked, &answers, now));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;
    use crate::lock::{Locks, Semaphore};

    /// Between the look at that and the turn a shutdown could begin and end, and the lock was granted after it.
    #[tokio::test(start_paused = true)]
    async fn who_comes_while_a_shutdown_begins_is_told_so() {
        let semaphore = Semaphore::new(MemoryBackend::new(), 1);
        let all = [Locks::new(MemoryBackend::new()), Locks::new(MemoryBackend::new()).fair(), semaphore.locks];
        for (locks, wait) in all.iter().zip([Duration::from_secs(1), Duration::from_secs(1), Duration::ZERO]) {
            let (home, mut terms) = locks.parts();
            terms.wait = wait;
            let lock = LockKey::new("test", "a");
            may_ask(home, &lock, &terms).unwrap();
            locks.shutdown().await;
            let came = wait_for_turn(home, &lock, &terms, Instant::now(), home.gate.place(), true).await;
            assert!(matches!(came, Err(LockError::Closed(_))));
            // And leaves nothing behind.
            locks.shutdown().await;
        }
    }
}
