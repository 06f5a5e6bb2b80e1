//! Acquisition of leases: first the local queue, then calls to the store until the lease is granted or the wait ends.

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
use super::grant::{FENCES, Grant, after, safe_ttl};
use super::jitter::jittered;
use super::kind::LockKind;
use super::lease::Lease;
use super::local_queues::{Entered, Failure, FailureWatch, Handoff, LeaderPermit, QueueTicket};
use super::lock_key::LockKey;
use super::locks_state::LocksState;
use super::metrics::{HandoffKind, Outcome};
use super::options::AcquireOptions;
use super::release_task::{IN_FLIGHT_GRACE, ReleaseTask};
use super::shared_call::{Acquire, RepeatableAcquisition};
use super::store::{Acquired, Claim, Queueing, Token};
use crate::error::{ConfigError, StoreError};
use crate::reach::Reach;
use crate::store::circuit::Circuit;

/// The interval of polls of the store, in case a notification is lost.
const POLL: Duration = Duration::from_secs(1);
/// The shortest timeout of a subscription, even if the lease ends sooner.
const MIN_SUBSCRIBE_TIMEOUT: Duration = Duration::from_millis(10);
/// How long the next leader of this process waits, so that processes that the release has notified go first.
const HEAD_START: Duration = Duration::from_millis(1);
/// The pause after a failed call. Doubles with each further failure, up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// One requested lock.
struct OneLock {
    shared: Arc<LocksState>,
    lock: LockKey,
    options: AcquireOptions,
    position: QueueTicket,
}

pub(super) fn acquire(
    shared: Arc<LocksState>,
    lock: LockKey,
    options: AcquireOptions,
) -> Call<Result<Lease, LockError>> {
    let position = shared.queues.new_position();
    Box::pin(Acquire::new(OneLock { shared, lock, options, position }))
}

impl RepeatableAcquisition for OneLock {
    type Grant = Lease;

    fn shared(&self) -> &Arc<LocksState> {
        &self.shared
    }

    fn wait_and_ttl(&self) -> (Duration, Duration) {
        (self.options.wait, self.options.ttl)
    }

    fn begin(&mut self, start: Instant, is_requeued: bool) -> Call<Result<Lease, LockError>> {
        let Self { lock, options, .. } = *self;
        let (shared, position) = (Arc::clone(&self.shared), QueueTicket { is_requeued, ..self.position });
        // Create the metrics before anything can fail that they count.
        shared.metrics();
        // Not an `async fn`: its future would hold the arguments twice.
        Box::pin(async move { acquire_one(&shared, &lock, &options, start, position).await })
    }

    fn granted_at(lease: &Lease) -> Instant {
        lease.since()
    }

    fn busy(&self) -> LockError {
        self.shared.queues.busy(&self.lock).into()
    }

    fn count(&self, outcome: &Result<Lease, LockError>, start: Instant) {
        let end = outcome.as_ref().map_or_else(|_| Instant::now(), Lease::since);
        self.shared.metrics().record_request(Outcome::of(outcome), end - start);
    }
}

/// Acquires the leases of several locks of one [shard](super::store::LockStore::shard), or none. For each lock, later callers of this
/// process queue behind this call. All callers must list locks in the same order, or they would deadlock.
pub(super) async fn acquire_all(
    shared: &Arc<LocksState>,
    locks: &[LockKey],
    options: AcquireOptions,
    position: QueueTicket,
) -> Result<impl Iterator<Item = Lease> + use<>, LockError> {
    acquire_shard(shared, locks, &options, Instant::now(), position).await.map(Leases::into_iter)
}

async fn acquire_shard(
    shared: &Arc<LocksState>,
    locks: &[LockKey],
    options: &AcquireOptions,
    start: Instant,
    position: QueueTicket,
) -> Result<Leases, LockError> {
    let wait_end = after(start, options.wait);
    let mut acquisitions = Acquisitions::new();
    let mut has_waited = false;
    let first = locks.first().filter(|_| !options.wait.is_zero());
    let _waiter =
        first.map(|lock| shared.register_waiter(lock, options.max_total_waiters, position.is_requeued)).transpose()?;
    for lock in locks {
        check_request(shared, lock, options)?;
        loop {
            // Accepts no lease by handoff: that would grant one lock without the others.
            let mut handoff = pin!(wait_for_handoff(shared, lock, options, start, position, false));
            let handoff = tokio::select! {
                biased;
                handoff = &mut handoff => handoff?,
                // While this caller waits for `lock`, it does not call the store for the locks before it in the list. So callers
                // with a wait of zero for those locks get `Busy`.
                () = ready(()) => {
                    has_waited = true;
                    publish(&acquisitions, Some(Failure::Busy(wait_end)));
                    handoff.await?
                }
            };
            match handoff {
                Handoff::LeaderPermit(permit) => {
                    break acquisitions.push((Acquisition::new(shared, lock, options)?, permit));
                }
                Handoff::Lease(lease) => drop(lease),
            }
        }
    }
    if has_waited {
        publish(&acquisitions, None);
    }
    acquire_leases(shared, &mut acquisitions, options, wait_end).await
}

/// Acquires the lease of one lock. The caller counts the outcome.
pub(super) async fn acquire_one(
    shared: &Arc<LocksState>,
    lock: &LockKey,
    options: &AcquireOptions,
    start: Instant,
    position: QueueTicket,
) -> Result<Lease, LockError> {
    check_request(shared, lock, options)?;
    let _waiter = if options.wait.is_zero() {
        None
    } else {
        Some(shared.register_waiter(lock, options.max_total_waiters, position.is_requeued)?)
    };
    let mut acquisitions: Acquisitions = match wait_for_handoff(shared, lock, options, start, position, true).await? {
        Handoff::Lease(lease) => {
            shared.metrics().handed_over(HandoffKind::Local, lease.since().elapsed());
            return Ok(lease);
        }
        Handoff::LeaderPermit(permit) => smallvec![(Acquisition::new(shared, lock, options)?, permit)],
    };
    let mut leases = acquire_leases(shared, &mut acquisitions, options, after(start, options.wait)).await?;
    leases.pop().ok_or_else(|| too_late().into())
}

fn check_request(shared: &Arc<LocksState>, lock: &LockKey, options: &AcquireOptions) -> Result<(), LockError> {
    check_options(options)?;
    if shared.store.reach() == Reach::Quorum
        && (options.is_fair || options.kind == LockKind::ReadWrite || options.permits > 1)
    {
        return Err(ConfigError::NotByQuorum.into());
    }
    if shared.is_closed() {
        return Err(Closed.into());
    }
    if !shared.is_semaphore && context::is_held(shared, lock) {
        return Err(Nested::new(*lock).into());
    }
    Ok(())
}

/// Waits until this caller may call the store. If it `accepts_lease`, it may get the lease of the previous holder instead.
async fn wait_for_handoff(
    shared: &Arc<LocksState>,
    lock: &LockKey,
    options: &AcquireOptions,
    start: Instant,
    position: QueueTicket,
    accepts_lease: bool,
) -> Result<Handoff, LockError> {
    // A lock that this process is releasing counts as free, so wait for the release before calling the store.
    if let Some(released) = shared.queues.wait_for_releases(lock, options.deadline) {
        Box::pin(released).await;
    }
    let entered = if options.is_fair {
        shared.enter_fair(*lock, options, position.is_requeued)?
    } else {
        shared.enter(*lock, options, position, accepts_lease)?
    };
    match entered {
        // A shutdown that began since the last check may have missed this caller.
        Entered::LeaderPermit(_) if shared.is_closed() => Err(Closed.into()),
        Entered::LeaderPermit(permit) => Ok(Handoff::LeaderPermit(permit)),
        // Boxed to keep the fast path's future small.
        entered => Box::pin(wait_in_queue(shared, *lock, *options, entered, start, position, accepts_lease)).await,
    }
}

/// Waits behind the leader. When the caller's wait has ended, waits for the next failure of the leader, which becomes the error of this
/// caller.
async fn wait_in_queue(
    shared: &Arc<LocksState>,
    lock: LockKey,
    mut options: AcquireOptions,
    mut entered: Entered,
    start: Instant,
    position: QueueTicket,
    accepts_lease: bool,
) -> Result<Handoff, LockError> {
    let wait_end = after(start, options.wait);
    // The wait may be over already, for instance after a slow release of this process.
    let mut answer_deadline = after(wait_end.max(Instant::now()), options.call_timeout());
    loop {
        match entered {
            Entered::LeaderPermit(_) if shared.is_closed() => return Err(Closed.into()),
            Entered::LeaderPermit(permit) => return Ok(Handoff::LeaderPermit(permit)),
            Entered::Queue { mut waiter, is_free_soon, failures } => {
                // A caller with a wait of zero still waits for a release in progress.
                let until = if is_free_soon { answer_deadline } else { wait_end };
                tokio::select! {
                    biased;
                    handoff = waiter.handoff() => return handoff.ok_or_else(|| Closed.into()),
                    () = shared.closed() => return Err(Closed.into()),
                    error = circuit_opens(shared, failures) => return Err(error.into()),
                    () = sleep_until(until) => {}
                }
            }
            Entered::Watching(mut failures) => tokio::select! {
                biased;
                changed = failures.changed() => {
                    let failure = changed.ok().and_then(|()| failures.borrow().clone());
                    if let Some(failure) = failure {
                        return Err(failure.error(lock, &options));
                    }
                }
                () = shared.closed() => return Err(Closed.into()),
                () = sleep_until(answer_deadline) => {}
            },
        }
        // A leader that requires replicas may get its answer later.
        answer_deadline = answer_deadline.max(after(wait_end, shared.queues.replication_timeout(&lock)));
        if Instant::now() >= answer_deadline {
            return Err(shared.queues.busy(&lock).into());
        }
        options.wait = Duration::ZERO;
        entered = match shared.queues.watch_failure(&lock) {
            Some(Ok(failures)) => Entered::Watching(failures),
            Some(Err(failure)) => return Err(failure.error(lock, &options)),
            // The leader has left without a failure.
            None => shared.enter(lock, &options, position, accepts_lease)?,
        };
    }
}

/// Resolves with the last store error once the circuit opens. Never resolves without `failures`.
async fn circuit_opens(shared: &LocksState, failures: Option<FailureWatch>) -> StoreError {
    if let Some(mut failures) = failures {
        while failures.changed().await.is_ok() {
            let failure = failures.borrow_and_update().clone();
            if let (Some(Failure::Failed(error)), Err(_)) = (failure, shared.circuit().admit_no_probe()) {
                return error;
            }
        }
    }
    pending().await
}

fn check_options(options: &AcquireOptions) -> Result<(), ConfigError> {
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

/// The acquisitions of one call, nearly always one, each with the permit to call the store for its lock.
type Acquisitions = SmallVec<[(Acquisition, LeaderPermit); 1]>;
type Leases = SmallVec<[Lease; 1]>;

/// Reports to other callers of this process why the store granted no lease; `None` before a call.
fn publish(acquisitions: &Acquisitions, failure: Option<Failure>) {
    acquisitions.iter().for_each(|(_, permit)| permit.publish(failure.clone()));
}

/// Calls the store until it grants all leases, on behalf of all waiters of this process.
async fn acquire_leases(
    shared: &Arc<LocksState>,
    acquisitions: &mut Acquisitions,
    options: &AcquireOptions,
    wait_end: Instant,
) -> Result<Leases, LockError> {
    if acquisitions.iter_mut().fold(false, |any, (_, permit)| mem::take(&mut permit.others_were_notified) || any) {
        Box::pin(sleep(HEAD_START)).await;
    }
    match Attempt::new(shared, acquisitions, options.call_timeout()).await {
        Ok((answers, now)) if answers.iter().all(|answer| fence(answer).is_some()) => {
            make_leases(acquisitions, &answers, now).ok_or_else(|| too_late().into())
        }
        // Boxed to keep the fast path's future small.
        answers => Box::pin(Retries::new(shared, options, wait_end).run(answers, acquisitions)).await,
    }
}

/// The calls after the first answer.
struct Retries<'a> {
    shared: &'a Arc<LocksState>,
    options: &'a AcquireOptions,
    wait_end: Instant,
    // The pause after the next failure.
    pause: Duration,
    // Whether a call was repeated immediately, over another connection.
    was_repeated: bool,
    // When the notification arrived that ended the last wait, if one did.
    notified_at: Option<Instant>,
    // When to send the next release request to the holders.
    request_release_at: Instant,
}

impl<'a> Retries<'a> {
    fn new(shared: &'a Arc<LocksState>, options: &'a AcquireOptions, wait_end: Instant) -> Self {
        let request_release_at = Instant::now();
        Self {
            shared,
            options,
            wait_end,
            pause: FIRST_PAUSE,
            was_repeated: false,
            notified_at: None,
            request_release_at,
        }
    }

    /// Calls the store until it grants all leases, or the caller gives up.
    async fn run(
        mut self,
        mut answers: Result<(Answers, Instant), StoreError>,
        acquisitions: &mut Acquisitions,
    ) -> Result<Leases, LockError> {
        loop {
            match answers {
                Ok((answers, now)) => match blocking_answer(&answers) {
                    None => {
                        if let Some(notified_at) = self.notified_at {
                            self.shared.metrics().handed_over(HandoffKind::Notified, now - notified_at);
                        }
                        return make_leases(acquisitions, &answers, now).ok_or_else(|| too_late().into());
                    }
                    Some((at, answer)) => self.wait_after(answer, at, acquisitions).await?,
                },
                Err(error) => self.pause_after(error, acquisitions).await?,
            }
            // If a majority refused, the client releases the locks that other servers granted. These releases may be late, so the
            // next attempt needs a new token.
            if self.shared.store.reach() == Reach::Quorum {
                acquisitions.iter_mut().try_for_each(|(acquisition, _)| acquisition.restart())?;
            }
            answers = Attempt::new(self.shared, acquisitions, self.options.call_timeout()).await;
        }
    }

    /// Waits after the store refused the lock at index `at`.
    async fn wait_after(
        &mut self,
        answer: Acquired,
        at: usize,
        acquisitions: &mut Acquisitions,
    ) -> Result<(), LockError> {
        let Acquisition { lock, claim, .. } = acquisitions[at].0;
        match answer {
            Acquired::OtherKind { held } => return Err(OtherKind::new(lock, claim.kind, held).into()),
            Acquired::NotReplicated { replicas } => {
                let until = self.wait_end.min(after(Instant::now(), claim.ttl));
                publish(acquisitions, Some(Failure::NotReplicated { replicas, until }));
                return self.sleep_or(NotReplicated::new(lock, replicas, claim.replicas.count).into()).await;
            }
            _ => {}
        }
        let remaining = remaining(&answer);
        publish(acquisitions, Some(Failure::Busy(after(Instant::now(), remaining))));
        if matches!(answer, Acquired::QueueFull { .. }) {
            return Err(QueueFull::new(lock).into());
        }
        let busy = Busy::new(lock, remaining);
        if Instant::now() >= self.wait_end {
            return Err(busy.into());
        }
        if self.options.requests_release && Instant::now() >= self.request_release_at {
            self.request_release_at = Instant::now() + POLL / 2;
            self.shared.request_release(lock, self.options.deadline);
        }
        // Later waiters of the store's queue get no grant when the lease ends.
        let is_first = !matches!(answer, Acquired::Queued { is_first: false, .. });
        let (acquisition, permit) = &mut acquisitions[at];
        self.wait_for_release(acquisition, permit, remaining, is_first).await?;
        if Instant::now() >= self.wait_end { Err(busy.into()) } else { Ok(()) }
    }

    /// Waits for the notification of a release, or until the lease should have ended. Subscribes first if there is no subscription.
    async fn wait_for_release(
        &mut self,
        acquisition: &Acquisition,
        permit: &mut LeaderPermit,
        remaining: Duration,
        is_first: bool,
    ) -> Result<(), LockError> {
        let Some(notifications) = &mut permit.notifications else {
            let timeout = if is_first { remaining.clamp(MIN_SUBSCRIBE_TIMEOUT, POLL) } else { POLL };
            let until = self.wait_end.min(after(Instant::now(), timeout));
            tokio::select! {
                notifications = timeout_at(until, Arc::clone(&self.shared.store).watch(acquisition.lock, acquisition.queued_token())) => permit.notifications = notifications.ok(),
                () = self.shared.closed() => return Err(Closed.into()),
            }
            // A release may have preceded the subscription, so call again.
            return Ok(());
        };
        let mut poll = jittered(POLL);
        if is_first {
            poll = remaining.saturating_add(Duration::from_millis(1)).min(poll);
        }
        self.notified_at = tokio::select! {
            () = notifications.next() => Some(Instant::now()),
            () = sleep_until(self.wait_end.min(after(Instant::now(), poll))) => None,
            () = self.shared.closed() => return Err(Closed.into()),
        };
        // After the wait, there is no further call.
        if self.notified_at.is_none() && Instant::now() < self.wait_end {
            self.shared.metrics().polled();
        }
        Ok(())
    }

    /// Waits after an error, if a retry may succeed.
    async fn pause_after(&mut self, error: StoreError, acquisitions: &Acquisitions) -> Result<(), LockError> {
        // If the connection broke, another one may work. Repeating the call with the same token is harmless.
        let may_repeat = error.is_unavailable() && !Circuit::is_cause_of(&error);
        if may_repeat && !mem::replace(&mut self.was_repeated, true) {
            return Ok(());
        }
        publish(acquisitions, Some(Failure::Failed(error.clone())));
        // After a refusal, a retry would be refused as well.
        let is_transient = error.is_timeout() || error.is_unavailable();
        let is_blocked = self.options.fails_if_circuit_opens && self.shared.circuit().admit_no_probe().is_err();
        if is_transient && !is_blocked { self.sleep_or(error.into()).await } else { Err(error.into()) }
    }

    /// Sleeps for the pause, or fails with `failure` if the caller gives up before its end.
    async fn sleep_or(&mut self, failure: LockError) -> Result<(), LockError> {
        let next = Instant::now() + jittered(self.pause);
        if next >= self.wait_end {
            return Err(failure);
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        tokio::select! {
            () = sleep_until(next) => Ok(()),
            () = self.shared.closed() => Err(Closed.into()),
        }
    }
}

/// Of the answers that grant no lease, an `OtherKind` if there is one, otherwise the one with the longest remaining time. Also returns its
/// index.
fn blocking_answer(answers: &[Acquired]) -> Option<(usize, Acquired)> {
    let refusals = answers.iter().copied().enumerate().filter(|(_, answer)| fence(answer).is_none());
    refusals.max_by_key(|(_, answer)| (matches!(answer, Acquired::OtherKind { .. }), remaining(answer)))
}

/// The acquisition of one lease with one token. If it is dropped, it undoes an attempt that may have succeeded, and leaves the queue in
/// the store.
struct Acquisition {
    shared: Arc<LocksState>,
    lock: LockKey,
    claim: Claim,
    // The longest duration of one call, and of the lease.
    call_timeout: Duration,
    max_hold: Option<Duration>,
    // When the last attempt was sent, if the token may hold the lease or a position in the queue.
    sent: Option<Instant>,
    // The value of `sent` before the last attempt. Restored if the last attempt was not executed.
    sent_before: Option<Instant>,
    // Until when an attempt without a reply may still be executed.
    in_flight_until: Option<Instant>,
}

impl Acquisition {
    fn new(shared: &Arc<LocksState>, lock: &LockKey, options: &AcquireOptions) -> Result<Self, StoreError> {
        let queueing = match (options.is_fair, options.wait.is_zero()) {
            (false, _) => Queueing::Bypass,
            (true, true) => Queueing::Yield,
            (true, false) => Queueing::Enqueue,
        };
        // More fences are for local handoffs, which must not bypass a queue in the store.
        let fences = if shared.is_semaphore || options.is_fair { 1 } else { FENCES };
        let permits = if options.is_shared { Claim::MAX_PERMITS } else { options.permits };
        let AcquireOptions { ttl, kind, is_shared, deadline, max_hold, .. } = *options;
        let replicas = options.replicas();
        let claim = Claim { fences, kind, permits, is_shared, queueing, replicas, ..Claim::new(Token::random()?, ttl) };
        let (shared, lock) = (Arc::clone(shared), *lock);
        Ok(Self {
            shared,
            lock,
            claim,
            call_timeout: deadline,
            max_hold,
            sent: None,
            sent_before: None,
            in_flight_until: None,
        })
    }

    /// The token of a caller in the store's queue.
    fn queued_token(&self) -> Option<Token> {
        (self.claim.queueing == Queueing::Enqueue).then_some(self.claim.token)
    }

    fn record_answer(&mut self, answer: Result<Acquired, &StoreError>) {
        match answer {
            Ok(Acquired::Granted { .. } | Acquired::Queued { .. } | Acquired::NotReplicated { .. }) => {}
            // The claim may still have its position in the store's queue, and must leave it.
            Ok(Acquired::OtherKind { .. }) if self.claim.queueing == Queueing::Enqueue => {}
            // An earlier attempt may still be in flight.
            Ok(Acquired::Busy { .. } | Acquired::QueueFull { .. } | Acquired::OtherKind { .. })
                if self.in_flight_until.is_some() => {}
            Ok(Acquired::Busy { .. } | Acquired::QueueFull { .. } | Acquired::OtherKind { .. }) => self.sent = None,
            // The store refused for another reason, or was not called.
            Err(error) if error.is_refusal() || Circuit::is_cause_of(error) => {
                if self.in_flight_until.is_none() {
                    self.sent = self.sent_before;
                }
            }
            Err(_) => self.in_flight_until = Some(Instant::now() + IN_FLIGHT_GRACE),
        }
    }

    /// When the last attempt was sent, if its lease would still be valid at `now`.
    fn usable_since(&self, now: Instant) -> Option<Instant> {
        self.sent.filter(|sent| now < *sent + safe_ttl(self.claim.ttl))
    }

    /// Makes a lease from a grant, unless it has expired at `now`. Drop the permit after that.
    fn make_lease(&mut self, permit: &mut LeaderPermit, fence: u64, now: Instant) -> Option<Lease> {
        let sent = self.usable_since(now)?;
        self.sent = None;
        let grant = Arc::new(Grant::new(self.lock, &self.claim, self.call_timeout, self.in_flight_until, sent, fence));
        let fence = grant.hand_off(self.max_hold, now).unwrap_or(fence);
        permit.granted(&grant);
        self.shared.start_renewal(&grant);
        self.shared.store_holder_name(&grant, now);
        Some(Lease::new(&self.shared, &grant, fence, now))
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        self.undo();
    }
}

impl Acquisition {
    /// Undoes the attempts, and goes on with a new token.
    fn restart(&mut self) -> Result<(), StoreError> {
        self.undo();
        self.claim.token = Token::random()?;
        self.in_flight_until = None;
        Ok(())
    }

    fn undo(&mut self) {
        if let Some(sent) = self.sent.take() {
            let granted_by = self.in_flight_until.map_or(sent, |in_flight_until| in_flight_until.max(sent));
            let until = after(granted_by, self.claim.ttl.max(Claim::POSITION_TTL));
            let task =
                ReleaseTask::undo(&self.shared, self.lock, &self.claim, until, self.call_timeout, self.in_flight_until);
            if let Some(task) = task {
                task.in_background();
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

/// Makes leases from the grants, or none if one of them has expired.
fn make_leases(acquisitions: &mut Acquisitions, answers: &[Acquired], now: Instant) -> Option<Leases> {
    let acquisitions = acquisitions.iter_mut().zip(answers);
    acquisitions.map(|((acquisition, permit), answer)| acquisition.make_lease(permit, fence(answer)?, now)).collect()
}

/// One call to the store, with the time of its reply. If it is dropped before the reply, the call continues in the background, and its
/// leases are released.
struct Attempt<'a> {
    shared: &'a Arc<LocksState>,
    acquisitions: &'a mut Acquisitions,
    // `None` after the reply.
    call: Option<Call<Result<Answers, StoreError>>>,
}

impl<'a> Attempt<'a> {
    fn new(shared: &'a Arc<LocksState>, acquisitions: &'a mut Acquisitions, call_timeout: Duration) -> Self {
        let claims = acquisitions.iter().map(|(acquisition, _)| (acquisition.lock, acquisition.claim)).collect();
        let call = match shared.circuit().admit() {
            Ok(()) => Arc::clone(&shared.store).acquire(claims, call_timeout),
            Err(error) => Box::pin(ready(Err(error))),
        };
        let sent = Instant::now();
        for (acquisition, _) in acquisitions.iter_mut() {
            acquisition.sent_before = acquisition.sent.replace(sent);
        }
        Self { shared, acquisitions, call: Some(call) }
    }
}

/// Records the answers of the store.
fn record_answers(
    shared: &LocksState,
    acquisitions: &mut Acquisitions,
    answers: Result<Answers, StoreError>,
) -> Result<(Answers, Instant), StoreError> {
    // The store must answer for each lock.
    let answers = answers.and_then(|answers| {
        let is_complete = answers.len() == acquisitions.len();
        if is_complete { Ok(answers) } else { Err(StoreError::other("the store did not answer for each lock")) }
    });
    shared.circuit().record(shared, &answers);
    for (i, (acquisition, _)) in acquisitions.iter_mut().enumerate() {
        acquisition.record_answer(answers.as_ref().map(|answers| answers[i]));
    }
    answers.map(|answers| (answers, Instant::now()))
}

/// Replaces grants by an error if a lease expired before its reply arrived.
fn check_in_time(
    acquisitions: &Acquisitions,
    (answers, now): (Answers, Instant),
) -> Result<(Answers, Instant), StoreError> {
    let is_granted = answers.iter().all(|answer| fence(answer).is_some());
    let is_late = acquisitions.iter().any(|(acquisition, _)| acquisition.usable_since(now).is_none());
    if is_granted && is_late { Err(too_late()) } else { Ok((answers, now)) }
}

fn too_late() -> StoreError {
    StoreError::late("the lease expired before its reply arrived")
}

impl Future for Attempt<'_> {
    type Output = Result<(Answers, Instant), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { shared, acquisitions, call } = &mut *self;
        let pending = call.as_mut().expect("Attempt polled after completion");
        let Poll::Ready(answers) = pending.as_mut().poll(cx) else { return Poll::Pending };
        *call = None;
        let answers = record_answers(shared, acquisitions, answers);
        Poll::Ready(answers.and_then(|answers| check_in_time(acquisitions, answers)))
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        let (shared, mut acquisitions) = (Arc::clone(self.shared), mem::take(self.acquisitions));
        // Set before the task starts: if the runtime drops the task, the outcome stays unknown.
        let in_flight_until = Some(Instant::now() + IN_FLIGHT_GRACE);
        let before: SmallVec<[_; 1]> = acquisitions
            .iter_mut()
            .map(|(acquisition, _)| mem::replace(&mut acquisition.in_flight_until, in_flight_until))
            .collect();
        self.shared.spawn(async move {
            let answers = call.await;
            for ((acquisition, _), before) in acquisitions.iter_mut().zip(before) {
                acquisition.in_flight_until = before;
            }
            if let Ok((answers, now)) = record_answers(&shared, &mut acquisitions, answers) {
                drop(make_leases(&mut acquisitions, &answers, now));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;
    use crate::lock::{Locks, Semaphore};

    /// Regression: if a shutdown began and ended between the check and the permit, the lock was granted after the shutdown.
    #[tokio::test(start_paused = true)]
    async fn caller_during_the_start_of_a_shutdown_gets_closed() {
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
            check_request(shared, &lock, &options).unwrap();
            locks.shutdown().await;
            let handoff =
                wait_for_handoff(shared, &lock, &options, Instant::now(), shared.queues.new_position(), true).await;
            assert!(matches!(handoff, Err(LockError::Closed(_))));
            // Nothing is left that delays a shutdown.
            locks.shutdown().await;
        }
    }
}
