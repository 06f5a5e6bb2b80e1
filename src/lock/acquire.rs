//! Acquisitions: from the local queue to the store, until the lease is granted or the caller gives up.

use std::future::{Future, pending, ready};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::context;
use super::erased::{Answers, Call};
use super::error::{Busy, Closed, LockError, Nested, NotReplicated, OtherKind, QueueFull};
use super::gate::{Entered, Failure, FailureWatch, Handoff, LeaderPermit, QueuePosition};
use super::grant::{FENCES, Grant, after, safe_ttl};
use super::jitter::jittered;
use super::kind::LockKind;
use super::lease::Lease;
use super::lock_key::LockKey;
use super::locks_state::LocksState;
use super::metrics::{HandoffKind, Outcome};
use super::options::AcquireOptions;
use super::pickup::{Acquire, Request};
use super::release_task::{IN_FLIGHT_GRACE, ReleaseTask};
use super::store::{Acquired, Claim, Queueing, Token};
use crate::error::{ConfigError, StoreError};
use crate::reach::Reach;
use crate::store::circuit::Circuit;

/// How long a waiter goes without a call to the store: a notification may be lost.
const POLL: Duration = Duration::from_secs(1);
/// The shortest timeout of a subscription, even if the lease ends sooner.
const SOON: Duration = Duration::from_millis(10);
/// Head start of other processes that got the same notification.
const HEAD_START: Duration = Duration::from_millis(1);
/// The pause after a failed call. Doubles with each further failure, up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// One requested lock.
struct Lone {
    shared: Arc<LocksState>,
    lock: LockKey,
    options: AcquireOptions,
    position: QueuePosition,
}

pub(super) fn acquire(
    shared: Arc<LocksState>,
    lock: LockKey,
    options: AcquireOptions,
) -> Call<Result<Lease, LockError>> {
    let position = shared.gate.new_position();
    Box::pin(Acquire::new(Lone { shared, lock, options, position }))
}

impl Request for Lone {
    type Grant = Lease;

    fn shared(&self) -> &Arc<LocksState> {
        &self.shared
    }

    fn times(&self) -> (Duration, Duration) {
        (self.options.wait, self.options.ttl)
    }

    fn begin(&mut self, begun: Instant, is_back: bool) -> Call<Result<Lease, LockError>> {
        let Self { lock, options, .. } = *self;
        let (shared, position) = (Arc::clone(&self.shared), QueuePosition { is_back, ..self.position });
        // Create the metrics before anything can fail that they count.
        shared.meters();
        // Not an `async fn`: its future would hold the arguments twice.
        Box::pin(async move { take(&shared, &lock, &options, begun, position).await })
    }

    fn since(lease: &Lease) -> Instant {
        lease.since()
    }

    fn busy(&self) -> LockError {
        self.shared.gate.busy(&self.lock).into()
    }

    fn count(&self, outcome: &Result<Lease, LockError>, begun: Instant) {
        let ended = outcome.as_ref().map_or_else(|_| Instant::now(), Lease::since);
        self.shared.meters().asked(Outcome::of(outcome), ended - begun);
    }
}

/// Takes the leases of several locks of one shard, or none. No other caller of this process asks for one of them meanwhile. All
/// callers must name locks in the same order.
pub(super) async fn acquire_all(
    shared: &Arc<LocksState>,
    locks: &[LockKey],
    options: AcquireOptions,
    position: QueuePosition,
) -> Result<impl Iterator<Item = Lease> + use<>, LockError> {
    take_all(shared, locks, &options, Instant::now(), position).await.map(Leases::into_iter)
}

async fn take_all(
    shared: &Arc<LocksState>,
    locks: &[LockKey],
    options: &AcquireOptions,
    begun: Instant,
    position: QueuePosition,
) -> Result<Leases, LockError> {
    let give_up = after(begun, options.wait);
    let mut asked = Asked::new();
    let mut has_waited = false;
    let first = locks.first().filter(|_| !options.wait.is_zero());
    let _asking = first.map(|lock| shared.ask(lock, options.max_asking, position.is_back)).transpose()?;
    for lock in locks {
        may_ask(shared, lock, options)?;
        loop {
            // No handoff: that would grant one lock without the others.
            let mut coming = pin!(wait_for_turn(shared, lock, options, begun, position, false));
            let offer = tokio::select! {
                biased;
                offer = &mut coming => offer?,
                // While waiting for this lock, the store is not called for the locks before it.
                () = ready(()) => {
                    has_waited = true;
                    tell(&asked, Some(Failure::Busy(give_up)));
                    coming.await?
                }
            };
            match offer {
                Handoff::LeaderPermit(turn) => break asked.push((Acquisition::new(shared, lock, options)?, turn)),
                Handoff::Lease(lease) => drop(lease),
            }
        }
    }
    if has_waited {
        tell(&asked, None);
    }
    acquire_once(shared, &mut asked, options, give_up).await
}

/// Takes the lease of one lock. The caller counts the outcome.
pub(super) async fn take(
    shared: &Arc<LocksState>,
    lock: &LockKey,
    options: &AcquireOptions,
    begun: Instant,
    position: QueuePosition,
) -> Result<Lease, LockError> {
    may_ask(shared, lock, options)?;
    let _asking =
        if options.wait.is_zero() { None } else { Some(shared.ask(lock, options.max_asking, position.is_back)?) };
    let mut asked: Asked = match wait_for_turn(shared, lock, options, begun, position, true).await? {
        Handoff::Lease(lease) => {
            shared.meters().handed_over(HandoffKind::Hand, lease.since().elapsed());
            return Ok(lease);
        }
        Handoff::LeaderPermit(turn) => smallvec![(Acquisition::new(shared, lock, options)?, turn)],
    };
    let mut leases = acquire_once(shared, &mut asked, options, after(begun, options.wait)).await?;
    leases.pop().ok_or_else(|| too_late().into())
}

fn may_ask(shared: &Arc<LocksState>, lock: &LockKey, options: &AcquireOptions) -> Result<(), LockError> {
    check(options)?;
    if shared.store.reach() == Reach::Quorum
        && (options.is_fair || options.kind == LockKind::ReadWrite || options.permits > 1)
    {
        return Err(ConfigError::NotByQuorum.into());
    }
    if shared.is_closed() {
        return Err(Closed.into());
    }
    if !shared.is_semaphore && context::holds(shared, lock) {
        return Err(Nested::new(*lock).into());
    }
    Ok(())
}

/// Waits until this caller may call the store, or gets the lease by handoff if that suffices.
async fn wait_for_turn(
    shared: &Arc<LocksState>,
    lock: &LockKey,
    options: &AcquireOptions,
    begun: Instant,
    position: QueuePosition,
    by_hand: bool,
) -> Result<Handoff, LockError> {
    // Locks in release by this process count as free, so wait for these releases before calling the store.
    if let Some(releases) = shared.gate.releases(lock, options.deadline) {
        Box::pin(releases).await;
    }
    let entered = if options.is_fair {
        shared.join(*lock, options, position.is_back)?
    } else {
        shared.enter(*lock, options, position, by_hand)?
    };
    match entered {
        // A shutdown that began since the last check may have missed this caller.
        Entered::LeaderPermit(_) if shared.is_closed() => Err(Closed.into()),
        Entered::LeaderPermit(turn) => Ok(Handoff::LeaderPermit(turn)),
        // Boxed to keep the fast path's future small.
        entered => Box::pin(wait_in_queue(shared, *lock, *options, entered, begun, position, by_hand)).await,
    }
}

/// Waits behind the leader: in the queue for as long as the caller wants, then for the leader's next answer. That answer is the
/// reason why the caller does not get the lock, so it also reports store errors.
async fn wait_in_queue(
    shared: &Arc<LocksState>,
    lock: LockKey,
    mut options: AcquireOptions,
    mut entered: Entered,
    begun: Instant,
    position: QueuePosition,
    by_hand: bool,
) -> Result<Handoff, LockError> {
    let give_up = after(begun, options.wait);
    // The wait may be over already, for instance after a slow release of this process.
    let mut answer_by = after(give_up.max(Instant::now()), options.limit());
    loop {
        match entered {
            Entered::LeaderPermit(_) if shared.is_closed() => return Err(Closed.into()),
            Entered::LeaderPermit(turn) => return Ok(Handoff::LeaderPermit(turn)),
            Entered::Queue { mut waiting, is_free_soon, news } => {
                // Callers that do not wait still wait for a release in progress.
                let until = if is_free_soon { answer_by } else { give_up };
                tokio::select! {
                    biased;
                    offer = waiting.offer() => return offer.ok_or_else(|| Closed.into()),
                    () = shared.closed() => return Err(Closed.into()),
                    error = circuit_opens(shared, news) => return Err(error.into()),
                    () = sleep_until(until) => {}
                }
            }
            Entered::Behind(mut news) => tokio::select! {
                biased;
                heard = news.changed() => {
                    let refusal = heard.ok().and_then(|()| news.borrow().clone());
                    if let Some(refusal) = refusal {
                        return Err(refusal.error(lock, &options));
                    }
                }
                () = shared.closed() => return Err(Closed.into()),
                () = sleep_until(answer_by) => {}
            },
        }
        // Replication takes time, which is no store error.
        answer_by = answer_by.max(after(give_up, shared.gate.limit(&lock)));
        if Instant::now() >= answer_by {
            return Err(shared.gate.busy(&lock).into());
        }
        options.wait = Duration::ZERO;
        entered = match shared.gate.overhear(&lock) {
            Some(Ok(news)) => Entered::Behind(news),
            Some(Err(refusal)) => return Err(refusal.error(lock, &options)),
            // The leader has gone without an answer.
            None => shared.enter(lock, &options, position, by_hand)?,
        };
    }
}

/// Resolves with the last failure once the circuit opens, for callers that heed it.
async fn circuit_opens(shared: &LocksState, news: Option<FailureWatch>) -> StoreError {
    if let Some(mut news) = news {
        while news.changed().await.is_ok() {
            let heard = news.borrow_and_update().clone();
            if let (Some(Failure::Failed(error)), Err(_)) = (heard, shared.circuit().admit_no_probe()) {
                return error;
            }
        }
    }
    pending().await
}

fn check(options: &AcquireOptions) -> Result<(), ConfigError> {
    let (min, max) = (Claim::MIN_TTL, Claim::MAX_TTL);
    if options.ttl < min || options.ttl > max {
        return Err(ConfigError::TtlOutOfRange { ttl: options.ttl, min, max });
    }
    if options.permits == 0 || options.permits > Claim::MAX_PERMITS {
        return Err(ConfigError::PermitsOutOfRange { permits: options.permits, max: Claim::MAX_PERMITS });
    }
    if options.deadline.is_zero() {
        return Err(ConfigError::ZeroTimeout { setting: "deadline" });
    }
    if options.max_hold.is_some_and(|max_hold| max_hold.is_zero()) {
        return Err(ConfigError::ZeroTimeout { setting: "max_hold" });
    }
    Ok(())
}

/// The locks of one call: nearly always one.
type Asked = SmallVec<[(Acquisition, LeaderPermit); 1]>;
type Leases = SmallVec<[Lease; 1]>;

/// Tells other callers of this process what the store answered; `None` before a call.
fn tell(asked: &Asked, refusal: Option<Failure>) {
    asked.iter().for_each(|(_, turn)| turn.hears(refusal.clone()));
}

/// Calls the store until it grants all leases, on behalf of all waiters of this process.
async fn acquire_once(
    shared: &Arc<LocksState>,
    asked: &mut Asked,
    options: &AcquireOptions,
    give_up: Instant,
) -> Result<Leases, LockError> {
    if asked.iter_mut().fold(false, |is_shared, (_, turn)| mem::take(&mut turn.is_shared) || is_shared) {
        Box::pin(sleep(HEAD_START)).await;
    }
    match Attempt::new(shared, asked, options.limit()).await {
        Ok((answers, now)) if answers.iter().all(|answer| fence(answer).is_some()) => {
            granted(asked, &answers, now).ok_or_else(|| too_late().into())
        }
        // Boxed to keep the fast path's future small.
        heard => Box::pin(Retries::new(shared, options, give_up).run(heard, asked)).await,
    }
}

/// The calls after the first answer.
struct Retries<'a> {
    shared: &'a Arc<LocksState>,
    options: &'a AcquireOptions,
    give_up: Instant,
    // The pause after the next failure.
    pause: Duration,
    // Whether a call was repeated at once, over another connection.
    was_repeated: bool,
    // When the last notification of a release arrived, if nothing happened since.
    notified: Option<Instant>,
    // When the holders may be asked for a release again.
    ask_at: Instant,
}

impl<'a> Retries<'a> {
    fn new(shared: &'a Arc<LocksState>, options: &'a AcquireOptions, give_up: Instant) -> Self {
        let ask_at = Instant::now();
        Self { shared, options, give_up, pause: FIRST_PAUSE, was_repeated: false, notified: None, ask_at }
    }

    /// Calls the store until it grants all leases, or the caller gives up.
    async fn run(
        mut self,
        mut heard: Result<(Answers, Instant), StoreError>,
        asked: &mut Asked,
    ) -> Result<Leases, LockError> {
        loop {
            match heard {
                Ok((answers, now)) => match obstacle(&answers) {
                    None => {
                        if let Some(notified) = self.notified {
                            self.shared.meters().handed_over(HandoffKind::Message, now - notified);
                        }
                        return granted(asked, &answers, now).ok_or_else(|| too_late().into());
                    }
                    Some((at, answer)) => self.wait_after(answer, at, asked).await?,
                },
                Err(error) => self.pause_after(error, asked).await?,
            }
            // After a majority refused, the client releases the locks that other servers granted, possibly late. The next attempt
            // needs a new token.
            if self.shared.store.reach() == Reach::Quorum {
                asked.iter_mut().try_for_each(|(attempts, _)| attempts.begin_again())?;
            }
            heard = Attempt::new(self.shared, asked, self.options.limit()).await;
        }
    }

    /// Waits after the answer that the lock at index `at` is not granted.
    async fn wait_after(&mut self, answer: Acquired, at: usize, asked: &mut Asked) -> Result<(), LockError> {
        let Acquisition { lock, claim, .. } = asked[at].0;
        match answer {
            Acquired::OtherKind { held } => return Err(OtherKind::new(lock, claim.kind, held).into()),
            Acquired::NotReplicated { replicas } => {
                let until = self.give_up.min(after(Instant::now(), claim.ttl));
                tell(asked, Some(Failure::NotReplicated { replicas, until }));
                return self.sleep_or(NotReplicated::new(lock, replicas, claim.replicas.count).into()).await;
            }
            _ => {}
        }
        let remaining = remaining(&answer);
        tell(asked, Some(Failure::Busy(after(Instant::now(), remaining))));
        if matches!(answer, Acquired::QueueFull { .. }) {
            return Err(QueueFull::new(lock).into());
        }
        let busy = Busy::new(lock, remaining);
        if Instant::now() >= self.give_up {
            return Err(busy.into());
        }
        if self.options.asks && Instant::now() >= self.ask_at {
            self.ask_at = Instant::now() + POLL / 2;
            self.shared.ask_holders(lock, self.options.deadline);
        }
        // Waiters further back get no grant when the lease ends.
        let is_first = !matches!(answer, Acquired::Queued { is_first: false, .. });
        let (attempts, turn) = &mut asked[at];
        self.wait_for_release(attempts, turn, remaining, is_first).await?;
        if Instant::now() >= self.give_up { Err(busy.into()) } else { Ok(()) }
    }

    /// Waits for the notification of a release, or until the lease should have ended. Subscribes first if there is no subscription.
    async fn wait_for_release(
        &mut self,
        attempts: &Acquisition,
        turn: &mut LeaderPermit,
        remaining: Duration,
        is_first: bool,
    ) -> Result<(), LockError> {
        let Some(wakeups) = &mut turn.wakeups else {
            let listen = if is_first { remaining.clamp(SOON, POLL) } else { POLL };
            let until = self.give_up.min(after(Instant::now(), listen));
            tokio::select! {
                wakeups = timeout_at(until, Arc::clone(&self.shared.store).watch(attempts.lock, attempts.queued_token())) => turn.wakeups = wakeups.ok(),
                () = self.shared.closed() => return Err(Closed.into()),
            }
            // A release before the subscription is found by another call.
            return Ok(());
        };
        let mut poll = jittered(POLL);
        if is_first {
            poll = remaining.saturating_add(Duration::from_millis(1)).min(poll);
        }
        self.notified = tokio::select! {
            () = wakeups.next() => Some(Instant::now()),
            () = sleep_until(self.give_up.min(after(Instant::now(), poll))) => None,
            () = self.shared.closed() => return Err(Closed.into()),
        };
        // Without time left, there is no further call.
        if self.notified.is_none() && Instant::now() < self.give_up {
            self.shared.meters().polled();
        }
        Ok(())
    }

    /// Waits after an error, unless another call would fail as well.
    async fn pause_after(&mut self, error: StoreError, asked: &Asked) -> Result<(), LockError> {
        // A connection may just have broken, and another may work. Repeating the call with the same token is harmless.
        let may_repeat = error.is_unavailable() && !Circuit::is_cause_of(&error);
        if may_repeat && !mem::replace(&mut self.was_repeated, true) {
            return Ok(());
        }
        tell(asked, Some(Failure::Failed(error.clone())));
        // A refused call would be refused again.
        let is_passing = error.is_timeout() || error.is_unavailable();
        let is_cut_off = self.options.heeds_circuit && self.shared.circuit().admit_no_probe().is_err();
        if is_passing && !is_cut_off { self.sleep_or(error.into()).await } else { Err(error.into()) }
    }

    /// Sleeps for the pause, or fails with `failure` if the caller gives up before its end.
    async fn sleep_or(&mut self, failure: LockError) -> Result<(), LockError> {
        let next = Instant::now() + jittered(self.pause);
        if next >= self.give_up {
            return Err(failure);
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        tokio::select! {
            () = sleep_until(next) => Ok(()),
            () = self.shared.closed() => Err(Closed.into()),
        }
    }
}

/// The answer with the longest remaining time, of those that grant no lease, with its index.
fn obstacle(answers: &[Acquired]) -> Option<(usize, Acquired)> {
    let obstacles = answers.iter().copied().enumerate().filter(|(_, answer)| fence(answer).is_none());
    obstacles.max_by_key(|(_, answer)| (matches!(answer, Acquired::OtherKind { .. }), remaining(answer)))
}

/// The attempts to take a lease with one token. Dropping it undoes an attempt that may have succeeded, and leaves the store's
/// queue.
struct Acquisition {
    shared: Arc<LocksState>,
    lock: LockKey,
    claim: Claim,
    // The longest duration of one call, and of the lease.
    limit: Duration,
    max_hold: Option<Duration>,
    // When the last attempt was sent, if the token may hold the lease or a position in the queue.
    sent: Option<Instant>,
    // The same for earlier attempts. Kept if the last attempt was not even executed.
    sent_before: Option<Instant>,
    // Until when an attempt without a reply may still be executed, if there is one.
    settles: Option<Instant>,
}

impl Acquisition {
    fn new(shared: &Arc<LocksState>, lock: &LockKey, options: &AcquireOptions) -> Result<Self, StoreError> {
        let queueing = match (options.is_fair, options.wait.is_zero()) {
            (false, _) => Queueing::Bypass,
            (true, true) => Queueing::Yield,
            (true, false) => Queueing::Enqueue,
        };
        // Handoff is allowed only if no queue in the store would be bypassed.
        let fences = if shared.is_semaphore || options.is_fair { 1 } else { FENCES };
        let permits = if options.is_shared { Claim::MAX_PERMITS } else { options.permits };
        let AcquireOptions { ttl, kind, is_shared, deadline, max_hold, .. } = *options;
        let replicas = options.replicas();
        let claim = Claim { fences, kind, permits, is_shared, queueing, replicas, ..Claim::new(Token::random()?, ttl) };
        let (shared, lock) = (Arc::clone(shared), *lock);
        Ok(Self { shared, lock, claim, limit: deadline, max_hold, sent: None, sent_before: None, settles: None })
    }

    /// The token of a caller in the store's queue.
    fn queued_token(&self) -> Option<Token> {
        (self.claim.queueing == Queueing::Enqueue).then_some(self.claim.token)
    }

    fn answered(&mut self, answer: Result<Acquired, &StoreError>) {
        match answer {
            Ok(Acquired::Granted { .. } | Acquired::Queued { .. } | Acquired::NotReplicated { .. }) => {}
            // The claim may still have its position in the store's queue, and has to leave it.
            Ok(Acquired::OtherKind { .. }) if self.claim.queueing == Queueing::Enqueue => {}
            // An earlier attempt may still be in flight.
            Ok(Acquired::Busy { .. } | Acquired::QueueFull { .. } | Acquired::OtherKind { .. })
                if self.settles.is_some() => {}
            Ok(Acquired::Busy { .. } | Acquired::QueueFull { .. } | Acquired::OtherKind { .. }) => self.sent = None,
            // The store refused for another reason, or was not called.
            Err(error) if error.is_refusal() || Circuit::is_cause_of(error) => {
                if self.settles.is_none() {
                    self.sent = self.sent_before;
                }
            }
            Err(_) => self.settles = Some(Instant::now() + IN_FLIGHT_GRACE),
        }
    }

    /// When the last attempt was sent, if a lease granted by it is still usable at `now`.
    fn good_since(&self, now: Instant) -> Option<Instant> {
        self.sent.filter(|sent| now < *sent + safe_ttl(self.claim.ttl))
    }

    /// Makes a lease from a grant, unless it is over at `now`. Drop the permit after that.
    fn granted(&mut self, turn: &mut LeaderPermit, fence: u64, now: Instant) -> Option<Lease> {
        let sent = self.good_since(now)?;
        self.sent = None;
        let hold = Arc::new(Grant::new(self.lock, &self.claim, self.limit, self.settles, sent, fence));
        let fence = hold.hand_to(self.max_hold, now).unwrap_or(fence);
        turn.holds(&hold);
        self.shared.keep(&hold);
        self.shared.name(&hold, now);
        Some(Lease::new(&self.shared, &hold, fence, now))
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        self.undo();
    }
}

impl Acquisition {
    /// Starts over with a new token.
    fn begin_again(&mut self) -> Result<(), StoreError> {
        self.undo();
        self.claim.token = Token::random()?;
        self.settles = None;
        Ok(())
    }

    fn undo(&mut self) {
        if let Some(sent) = self.sent.take() {
            let granted_by = self.settles.map_or(sent, |settles| settles.max(sent));
            let until = after(granted_by, self.claim.ttl.max(Claim::POSITION_TTL));
            let errand = ReleaseTask::undo(&self.shared, self.lock, &self.claim, until, self.limit, self.settles);
            if let Some(errand) = errand {
                errand.in_background();
            }
        }
    }
}

/// The first fence of a granted lease.
const fn fence(answer: &Acquired) -> Option<u64> {
    match answer {
        Acquired::Granted { fence } => Some(*fence),
        _ => None,
    }
}

/// How long the current holder may keep the lease.
const fn remaining(answer: &Acquired) -> Duration {
    match answer {
        Acquired::Granted { .. } | Acquired::NotReplicated { .. } | Acquired::OtherKind { .. } => Duration::ZERO,
        Acquired::Busy { remaining } | Acquired::Queued { remaining, .. } | Acquired::QueueFull { remaining } => {
            *remaining
        }
    }
}

/// Makes leases from the grants, or none if one of them is over.
fn granted(asked: &mut Asked, answers: &[Acquired], now: Instant) -> Option<Leases> {
    let asked = asked.iter_mut().zip(answers);
    asked.map(|((attempts, turn), answer)| attempts.granted(turn, fence(answer)?, now)).collect()
}

/// One call to the store, with the time of its reply. If it is dropped before the reply, it continues in the background, and
/// releases what it is granted.
struct Attempt<'a> {
    shared: &'a Arc<LocksState>,
    asked: &'a mut Asked,
    // `None` after the reply.
    call: Option<Call<Result<Answers, StoreError>>>,
}

impl<'a> Attempt<'a> {
    fn new(shared: &'a Arc<LocksState>, asked: &'a mut Asked, limit: Duration) -> Self {
        let wanted = asked.iter().map(|(attempts, _)| (attempts.lock, attempts.claim)).collect();
        let call = match shared.circuit().admit() {
            Ok(()) => Arc::clone(&shared.store).acquire(wanted, limit),
            Err(error) => Box::pin(ready(Err(error))),
        };
        let sent = Instant::now();
        for (attempts, _) in asked.iter_mut() {
            attempts.sent_before = attempts.sent.replace(sent);
        }
        Self { shared, asked, call: Some(call) }
    }
}

/// Records the answers of the store.
fn answered(
    shared: &LocksState,
    asked: &mut Asked,
    answers: Result<Answers, StoreError>,
) -> Result<(Answers, Instant), StoreError> {
    // The store must answer for each lock.
    let answers = answers.and_then(|answers| {
        let is_whole = answers.len() == asked.len();
        if is_whole { Ok(answers) } else { Err(StoreError::other("the store did not answer for each lock")) }
    });
    match &answers {
        Ok(_) => shared.circuit().answered(shared),
        Err(error) => shared.circuit().failed(shared, error),
    }
    for (at, (attempts, _)) in asked.iter_mut().enumerate() {
        attempts.answered(answers.as_ref().map(|answers| answers[at]));
    }
    answers.map(|answers| (answers, Instant::now()))
}

/// Retry if the lease expired before its reply arrived.
fn in_time(asked: &Asked, (answers, now): (Answers, Instant)) -> Result<(Answers, Instant), StoreError> {
    let is_granted = answers.iter().all(|answer| fence(answer).is_some());
    let is_late = asked.iter().any(|(attempts, _)| attempts.good_since(now).is_none());
    if is_granted && is_late { Err(too_late()) } else { Ok((answers, now)) }
}

fn too_late() -> StoreError {
    StoreError::late("the lease expired before its reply arrived")
}

impl Future for Attempt<'_> {
    type Output = Result<(Answers, Instant), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { shared, asked, call } = &mut *self;
        let under_way = call.as_mut().expect("Attempt polled after completion");
        let Poll::Ready(answers) = under_way.as_mut().poll(cx) else { return Poll::Pending };
        *call = None;
        Poll::Ready(answered(shared, asked, answers).and_then(|heard| in_time(asked, heard)))
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        let (shared, mut asked) = (Arc::clone(self.shared), mem::take(self.asked));
        // The outcome is also unknown if the task is dropped with its runtime.
        let settles = Some(Instant::now() + IN_FLIGHT_GRACE);
        let before: SmallVec<[_; 1]> =
            asked.iter_mut().map(|(attempts, _)| mem::replace(&mut attempts.settles, settles)).collect();
        self.shared.spawn(async move {
            let answers = call.await;
            for ((attempts, _), before) in asked.iter_mut().zip(before) {
                attempts.settles = before;
            }
            if let Ok((answers, now)) = answered(&shared, &mut asked, answers) {
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

    /// A shutdown could begin and end between the check and the permit, and the lock was granted after it.
    #[tokio::test(start_paused = true)]
    async fn who_comes_while_a_shutdown_begins_is_told_so() {
        let semaphore = Semaphore::new(MemoryBackend::new(), "semaphores", 1);
        let all = [
            Locks::new(MemoryBackend::new(), "default"),
            Locks::new(MemoryBackend::new(), "default").fair(),
            semaphore.locks,
        ];
        for (locks, wait) in all.iter().zip([Duration::from_secs(1), Duration::from_secs(1), Duration::ZERO]) {
            let (shared, mut options) = locks.parts();
            options.wait = wait;
            let lock = LockKey::new("test", "a");
            may_ask(shared, &lock, &options).unwrap();
            locks.shutdown().await;
            let came = wait_for_turn(shared, &lock, &options, Instant::now(), shared.gate.new_position(), true).await;
            assert!(matches!(came, Err(LockError::Closed(_))));
            // Nothing is left behind.
            locks.shutdown().await;
        }
    }
}
