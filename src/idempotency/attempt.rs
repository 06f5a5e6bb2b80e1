use std::error::Error as _;
use std::future::{Future, pending};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::Instrument as _;

use super::checkpoint::Checkpoint;
use super::erased::DynStore;
use super::handle::HasPayload;
use super::metrics::{Ended, Meters};
use super::per_scope::PerScope;
use super::rejection::{Rejection, ScopeBound};
use super::store::{Begun, Claim, Completion, IdempotencyStore, Operation, Payload};
use crate::error::{ConfigError, StoreError};
use crate::key::Key;
use crate::lock::{Notifications, Reach, Token};
use crate::store::circuit::{Circuit, CircuitBreaker, CircuitObserver, OutageTracker};

/// How many attempts may be settled in the background at a time. While a store is away all of them are; what is beyond that is left
/// to the end of its lease.
const MAX_BACKGROUND: usize = 4_096;
/// How much later than its release a claim may come to the store that nobody has waited for.
const LATE: Duration = Duration::from_secs(1);
/// How long to wait before the store is asked again in the background; twice that the next time, and so on up to a tenth of the lease.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// No longer than this, however long the lease is: what is done is to be known soon after the store is back.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The retry time of a caller with too many handlers at work: any of them may end soon.
const RETRY_FULL: Duration = Duration::from_secs(1);
/// For how long the store is asked in the background at least.
const SHORTEST: Duration = Duration::from_secs(1);

/// What all attempts of one layer have in common.
pub(crate) struct Coordinator {
    store: Arc<dyn DynStore>,
    terms: Terms,
    circuit: Circuit,
    meters: OnceLock<Meters>,
    // Whether the log has been told that there is no room for answers.
    full: OutageTracker,
    running: AtomicUsize,
    running_per_scope: PerScope,
    waiting_per_scope: PerScope,
    waiting: AtomicUsize,
    background: AtomicUsize,
    idle: Notify,
}

/// How the store is dealt with.
#[derive(Clone)]
pub(crate) struct Terms {
    /// How long one call may take.
    pub(crate) limit: Duration,
    pub(crate) breaker: CircuitBreaker,
    /// What the layer is called in metrics.
    pub(crate) name: Arc<str>,
}

impl Default for Terms {
    fn default() -> Self {
        let (limit, breaker) = (Duration::from_millis(100), CircuitBreaker::new());
        Self { limit, breaker, name: "idempotency".into() }
    }
}

impl CircuitObserver for Coordinator {
    fn failed(&self) {
        self.meters().store_failed();
    }

    fn opened(&self) {
        self.meters().circuit(true);
        let layer = &*self.terms.name;
        tracing::warn!(layer, "idempotency circuit opens: the store is asked by probes only");
    }

    fn closed(&self) {
        self.meters().circuit(false);
        tracing::info!(layer = &*self.terms.name, "idempotency circuit closes: the store is asked again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(layer = &*self.terms.name, %error, cause, "idempotency store fails");
    }

    fn outage_ends(&self) {
        tracing::info!(layer = &*self.terms.name, "idempotency store answers again");
    }
}

impl Coordinator {
    pub(crate) fn new(store: impl IdempotencyStore + Send + Sync + 'static) -> Self {
        Self::over(Arc::new(store), Terms::default())
    }

    fn over(store: Arc<dyn DynStore>, terms: Terms) -> Self {
        let [running, waiting, background] = [const { AtomicUsize::new(0) }; 3];
        let (circuit, meters, full) = (Circuit::new(terms.breaker), OnceLock::new(), OutageTracker::of_a_store());
        let [running_per_scope, waiting_per_scope] = [(); 2].map(|()| PerScope::default());
        let idle = Notify::new();
        Self {
            store,
            terms,
            circuit,
            meters,
            full,
            running,
            running_per_scope,
            waiting,
            waiting_per_scope,
            background,
            idle,
        }
    }

    /// The same store on other terms.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Terms)) -> Self {
        let mut terms = self.terms.clone();
        change(&mut terms);
        Self::over(Arc::clone(&self.store), terms)
    }

    /// Whether there is time for the store to answer, and for work that may take so long. Memory, which is not waited for, would not show
    /// it.
    pub(crate) fn check_times(&self, max_runtime: Option<Duration>) -> Result<(), ConfigError> {
        let times = [("deadline", Some(self.terms.limit)), ("max_runtime", max_runtime)];
        let none = times.into_iter().find(|(_, time)| time.is_some_and(|time| time.is_zero()));
        none.map_or(Ok(()), |(setting, _)| Err(ConfigError::ZeroTimeout { setting }))
    }

    pub(crate) const fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(crate) fn meters(&self) -> &Meters {
        self.meters.get_or_init(|| Meters::new(&self.terms.name))
    }

    /// Notes whether the store has answered.
    fn noted<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        match &answer {
            Ok(_) => self.circuit.answered(self),
            Err(error) => self.circuit.failed(self, error),
        }
        answer
    }

    pub(crate) fn scope(&self) -> Reach {
        self.store.scope()
    }

    /// A place for one more attempt, unless there are as many already, in all or of this scope.
    pub(crate) fn admit(self: &Arc<Self>, scope: &Key, most: MostRunning) -> Result<Running, Rejection> {
        // First, so that a caller with too many gets 429 also while the process is full.
        let Some(entered) = self.running_per_scope.enter(scope, most.per_scope) else {
            let (bound, retry_after) = (ScopeBound::Running, RETRY_FULL);
            return Err(Rejection::ScopeFull { bound, retry_after });
        };
        match Running::new(self, |home| &home.running, most.in_total) {
            Some(mut running) => {
                running.scope = Some((|home| &home.running_per_scope, entered));
                Ok(running)
            }
            None => {
                self.running_per_scope.leave(entered);
                Err(Rejection::Full)
            }
        }
    }

    /// Counts one more waiter, unless `most` wait already, or half as many of its scope.
    pub(super) fn register_waiter(self: &Arc<Self>, scope: Option<&Key>, most: usize) -> Option<Running> {
        let waiting_per_scope: ScopeCounts = |home| &home.waiting_per_scope;
        let entered = match scope {
            Some(scope) => Some((waiting_per_scope, self.waiting_per_scope.enter(scope, most.div_ceil(2))?)),
            None => None,
        };
        match Running::new(self, |home| &home.waiting, most) {
            Some(mut waiting) => {
                waiting.scope = entered;
                Some(waiting)
            }
            None => {
                entered.inspect(|(_, hash)| self.waiting_per_scope.leave(*hash));
                None
            }
        }
    }

    /// Waits until nothing is being done, in the background neither.
    pub(crate) async fn wait_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.running.load(Ordering::Acquire) == 0 && self.background.load(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// One request for an operation, from the first word to the store to the last: all that is known of it, in one place, since there is
/// one for each request.
pub(crate) struct OperationContext<P: ?Sized> {
    home: Arc<Coordinator>,
    operation: Operation,
    claim: Claim,
    // Before the claim was, or the last renewal.
    sent: Mutex<Instant>,
    // The number of the last one that was put down.
    checkpoint: AtomicU32,
    // Whether the record says that it is done, so that nobody takes over.
    is_done: AtomicBool,
    // Where the store was asked first: whoever drops this may be outside of any.
    runtime: OnceLock<Handle>,
    body: P,
}

impl<P: ?Sized> OperationContext<P> {
    pub(crate) const fn operation(&self) -> &Operation {
        &self.operation
    }

    pub(super) const fn home(&self) -> &Arc<Coordinator> {
        &self.home
    }

    /// The scope whose records are bounded, if they are.
    pub(super) fn bounded_scope(&self) -> Option<&Key> {
        self.claim.bound.as_ref().map(|bound| &bound.scope)
    }

    /// What its layer is called.
    pub(crate) fn layer(&self) -> &str {
        &self.home.terms.name
    }

    /// How far the body was read.
    pub(crate) const fn body(&self) -> &P {
        &self.body
    }

    fn sent(&self) -> MutexGuard<'_, Instant> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the record says that it is done.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Relaxed)
    }

    /// Whether somebody else may have begun, by the clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.ends().is_some_and(|ends| Instant::now() >= ends)
    }

    /// Ready when somebody else may have begun. Nothing is renewed meanwhile: this is for what goes on while the store is told that it is done.
    pub(crate) async fn until_lost(&self) {
        while let Some(ends) = self.ends() {
            if Instant::now() >= ends {
                return;
            }
            sleep_until(ends).await;
        }
        pending::<()>().await;
    }

    /// When somebody else may begin, unless it is renewed before; `None` if nobody does.
    fn ends(&self) -> Option<Instant> {
        let Claim { takes_over, lease, .. } = self.claim;
        let may_end = takes_over && !self.is_done();
        may_end.then(|| *self.sent() + safe_ttl(lease))
    }

    /// The number of one more checkpoint.
    pub(super) fn next_checkpoint(&self) -> u32 {
        self.checkpoint.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Puts down how far the attempt has come.
    pub(super) async fn checkpoint(&self, payload: &Payload, checkpoint: &Checkpoint) -> Result<bool, StoreError> {
        let Self { home, operation, claim, .. } = self;
        home.noted(home.store.checkpoint(operation, claim, payload, checkpoint, home.terms.limit).await)
    }
}

impl<P: HasPayload + 'static> OperationContext<P> {
    pub(crate) fn new(home: &Arc<Coordinator>, operation: Operation, claim: Claim, body: P) -> Arc<Self> {
        let (sent, checkpoint, is_done) = (Mutex::new(Instant::now()), AtomicU32::new(0), AtomicBool::new(false));
        let (home, runtime) = (Arc::clone(home), OnceLock::new());
        Arc::new(Self { home, operation, claim, sent, checkpoint, is_done, runtime, body })
    }

    /// The same with a token of its own, for when nobody knows what has become of the claim of this one.
    pub(super) fn anew(&self) -> Result<Arc<Self>, StoreError> {
        let claim = Claim { token: Token::random()?, ..self.claim };
        Ok(Self::new(&self.home, self.operation, claim, self.body.anew()))
    }

    /// Begins the operation, or says how far it is.
    ///
    /// # Cancellation
    ///
    /// What was begun without anybody hearing of it is given back in the background.
    pub(crate) async fn begin(self: &Arc<Self>) -> Result<Begin<P>, StoreError> {
        let Self { home, operation, claim, .. } = &**self;
        *self.sent() = Instant::now();
        if let Ok(runtime) = Handle::try_current() {
            self.runtime.get_or_init(|| runtime);
        }
        let mut attempt = self.attempt(DropAction::GiveBackClaim);
        let begun = match home.circuit.admit() {
            Ok(()) => home.noted(home.store.begin(operation, claim, home.terms.limit).await),
            Err(error) => Err(error),
        };
        if begun.as_ref().is_err_and(|error| error.is_refusal() || Circuit::is_cause_of(error)) {
            attempt.end = DropAction::Settled;
        }
        let begun = begun?;
        if matches!(begun, Begun::Granted { .. }) && attempt.is_lost() {
            // Somebody else may begin by now, and nobody has here.
            return Err(StoreError::timeout());
        }
        Ok(attempt.begun(begun))
    }

    /// The same where nothing has to be waited for. `None`, with nothing done, says nothing.
    ///
    /// To be called at once, since the lease is taken to last from when the order was made.
    pub(crate) fn begin_now(self: &Arc<Self>) -> Option<Result<Begin<P>, StoreError>> {
        let Self { home, operation, claim, .. } = &**self;
        // Nothing is a probe that may not even ask the store.
        home.circuit.admit_no_probe().ok()?;
        let begun = home.noted(home.store.begin_now(operation, claim)?);
        Some(begun.map(|begun| self.attempt(DropAction::Settled).begun(begun)))
    }

    fn attempt(self: &Arc<Self>, end: DropAction) -> Attempt<P> {
        let [is_at_work, is_answering, is_told] = [const { AtomicBool::new(false) }; 3];
        Attempt { order: Arc::clone(self), end, is_at_work, is_answering, is_told }
    }

    /// Wake-ups for somebody who waits for the operation.
    pub(super) async fn watch(&self) -> Notifications {
        self.home.store.watch(&self.operation).await
    }

    /// See [`Attempt::keep`].
    async fn keep(&self) {
        let Claim { takes_over, lease, .. } = self.claim;
        loop {
            let sent = *self.sent();
            let renewed = self.renewed(sent);
            let renewed = if takes_over {
                // By the clock alone, since no answer may come.
                timeout_at(sent + safe_ttl(lease), renewed).await.unwrap_or_default()
            } else {
                renewed.await
            };
            match renewed {
                Some(at) => *self.sent() = at,
                None if takes_over => return,
                // Nobody takes over what this has begun; but the record is lost, and with it what it protects from.
                None => pending().await,
            }
        }
    }

    /// When the command was sent that has renewed the lease; `None` if the operation is not ours any more.
    async fn renewed(&self, sent: Instant) -> Option<Instant> {
        let Self { home, operation, claim, body, .. } = self;
        let mut due = sent + claim.lease / 3;
        loop {
            sleep_until(due).await;
            let sent = Instant::now();
            match home.noted(home.store.renew(operation, claim, &body.payload(), home.terms.limit).await) {
                Ok(true) => return Some(sent),
                Ok(false) => {
                    let layer = self.layer();
                    tracing::warn!(layer, %operation, "the record of an operation is gone while it is being done");
                    return None;
                }
                Err(error) => {
                    tracing::debug!(%operation, %error, "a renewal failed: trying again");
                    due = Instant::now() + claim.lease / 10;
                }
            }
        }
    }

    /// Says what has become of the operation. False if it is somebody else's.
    async fn settle(&self, end: &Settlement) -> Result<bool, StoreError> {
        let Self { home, operation, claim, .. } = self;
        let settled = home.noted(match end {
            Settlement::Complete { completion, .. } => {
                home.store.complete(operation, &claim.token, completion, home.terms.limit).await
            }
            Settlement::Release => home.store.release(operation, claim, home.terms.limit).await,
        });
        self.heard(end, settled)
    }

    /// The same where nothing has to be waited for.
    fn settle_now(&self, end: &Settlement) -> Option<Result<bool, StoreError>> {
        let Self { home, operation, claim: Claim { token, .. }, .. } = self;
        let Settlement::Complete { completion, .. } = end else { return None };
        let settled = home.store.complete_now(operation, token, completion)?;
        Some(self.heard(end, home.noted(settled)))
    }

    /// What has become of an attempt of which this was said.
    fn ended(&self, end: &Settlement, is_ours: bool) -> Ended {
        match end {
            Settlement::Complete { completion, .. } if is_ours => {
                if completion.is_kept {
                    Ended::Kept
                } else {
                    Ended::Tombstone
                }
            }
            // Nobody else may have begun, unless it was given back before, by a call that was not answered in time.
            Settlement::Release if is_ours || !self.is_lost() => Ended::GivenBack,
            _ => {
                let (layer, operation) = (self.layer(), &self.operation);
                match end {
                    Settlement::Complete { .. } => {
                        tracing::warn!(layer, %operation, "an answer is not kept: its operation is somebody else's by now");
                    }
                    Settlement::Release => {
                        tracing::warn!(layer, %operation, "an operation is not given back: it is somebody else's by now");
                    }
                }
                Ended::Unknown
            }
        }
    }

    /// Notes whether the record says that it is done.
    fn heard(&self, end: &Settlement, settled: Result<bool, StoreError>) -> Result<bool, StoreError> {
        if matches!((end, &settled), (Settlement::Complete { .. }, Ok(true))) {
            self.is_done.store(true, Ordering::Relaxed);
        }
        settled
    }

    /// Goes on to say it in the background, for no longer than a lease, or a second where that is shorter.
    fn settle_in_background(self: &Arc<Self>, end: Settlement, what: Settled) {
        let telling = BackgroundSettle { order: Arc::clone(self), what, is_over: false };
        let runtime = Handle::try_current().ok().or_else(|| self.runtime.get().cloned());
        let running = Running::new(&self.home, |home| &home.background, MAX_BACKGROUND);
        let (Some(runtime), Some(running)) = (runtime, running) else { return };
        let settling = async move {
            let order = &telling.order;
            let until = Instant::now() + order.claim.lease.max(SHORTEST);
            match what {
                Settled::Attempt => {
                    let settled = order.settle_until(until, &end, || Ok(())).await;
                    if let Err(error) = &settled {
                        let (layer, operation) = (order.layer(), order.operation());
                        let cause = error.source().map(tracing::field::display);
                        tracing::warn!(
                            layer, %operation, %error, cause,
                            "an operation could not be settled in time: its outcome is unknown"
                        );
                    }
                    order.home.meters().ended(settled.map_or(Ended::Unknown, |is_ours| order.ended(&end, is_ours)));
                }
                Settled::Claim => {
                    // Of a store that fails there are as many of these as requests, and none is worth a probe.
                    let mut settled = order.settle_until(until, &end, || order.home.circuit.admit_no_probe()).await;
                    if settled.is_ok() {
                        sleep(LATE).await;
                        settled = order.settle(&end).await;
                    }
                    if let Err(error) = settled {
                        tracing::debug!(operation = %order.operation, %error, "a claim could not be given back, if it was one");
                    }
                }
            }
            telling.ends();
            drop(running);
        };
        drop(runtime.spawn(settling.in_current_span()));
    }

    /// Says it until the store has heard, or until then: where it may not be asked, the last time all the same, since nobody else may come who finds out that
    /// it answers again.
    async fn settle_until(
        &self,
        until: Instant,
        end: &Settlement,
        may_ask: impl Fn() -> Result<(), StoreError>,
    ) -> Result<bool, StoreError> {
        let longest = (self.claim.lease / 10).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        let mut pause = FIRST_PAUSE;
        loop {
            let is_last = Instant::now() >= until;
            let settled = match may_ask() {
                Err(error) if !is_last => Err(error),
                _ => self.settle(end).await,
            };
            if settled.is_ok() || is_last {
                return settled;
            }
            sleep_until(until.min(Instant::now() + pause)).await;
            pause = longest.min(pause * 2);
        }
    }
}

/// What the store is told of an attempt that is over.
pub(crate) enum Settlement {
    /// The answer is kept, or where there is no room for it the mark that there was one.
    Complete { completion: Completion, mark: [u8; 5] },
    /// The operation is given back, so that the next request begins it again.
    Release,
}

/// What the store is being told of in the background, until that is over, or is dropped for the lack of room or of a runtime.
struct BackgroundSettle<P: HasPayload + 'static> {
    order: Arc<OperationContext<P>>,
    what: Settled,
    is_over: bool,
}

impl<P: HasPayload + 'static> BackgroundSettle<P> {
    fn ends(mut self) {
        self.is_over = true;
    }
}

impl<P: HasPayload + 'static> Drop for BackgroundSettle<P> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (layer, operation) = (self.order.layer(), self.order.operation());
        match self.what {
            Settled::Attempt => {
                tracing::warn!(layer, %operation, "an operation cannot be settled in the background: its outcome is unknown");
                self.order.home.meters().ended(Ended::Unknown);
            }
            Settled::Claim => tracing::debug!(layer, %operation, "a claim is left to the end of its lease"),
        }
    }
}

/// How many attempts there may be at a time.
#[derive(Clone, Copy)]
pub(crate) struct MostRunning {
    pub(crate) in_total: usize,
    pub(crate) per_scope: usize,
}

/// The counts of one kind of work by scope.
type ScopeCounts = fn(&Coordinator) -> &PerScope;

/// Counts something that is being done until it ends in whatever way.
pub(crate) struct Running {
    home: Arc<Coordinator>,
    count: fn(&Coordinator) -> &AtomicUsize,
    // Where it is counted for its scope, and the scope's hash.
    scope: Option<(ScopeCounts, u64)>,
}

impl Running {
    fn new(home: &Arc<Coordinator>, count: fn(&Coordinator) -> &AtomicUsize, most: usize) -> Option<Self> {
        // Never more than there is room for, not for a moment: the last one that ends would not be known to be the last.
        let add = |running| (running < most).then_some(running + 1);
        count(home).fetch_update(Ordering::AcqRel, Ordering::Acquire, add).ok()?;
        Some(Self { home: Arc::clone(home), count, scope: None })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some((per_scope, hash)) = self.scope.take() {
            per_scope(&self.home).leave(hash);
        }
        if (self.count)(&self.home).fetch_sub(1, Ordering::AcqRel) == 1 {
            self.home.idle.notify_waiters();
        }
    }
}

/// What came of a claim.
pub(crate) enum Begin<P: HasPayload + 'static> {
    Granted(Granted<P>),
    Not(Begun),
}

/// An attempt, and what is known of those before.
pub(crate) struct Granted<P: HasPayload + 'static> {
    pub(crate) attempt: Attempt<P>,
    pub(crate) fence: u64,
    pub(crate) number: u32,
    pub(crate) payload: Payload,
    pub(crate) checkpoint: Option<Checkpoint>,
}

/// An operation that is this process's to do.
pub(crate) struct Attempt<P: HasPayload + 'static> {
    order: Arc<OperationContext<P>>,
    end: DropAction,
    is_at_work: AtomicBool,
    is_answering: AtomicBool,
    // Whether the log names it as one of unknown outcome.
    is_told: AtomicBool,
}

/// What the store is told of in the background.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Settled {
    Attempt,
    /// A claim that nobody has heard of, so that nothing was begun. It is given back once more a moment later: the store may hear of it after
    /// that, and remembers the token of the last one alone that was given back.
    Claim,
}

/// What becomes of an attempt that is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DropAction {
    /// It may not even have begun: somebody else may.
    GiveBackClaim,
    /// As `Leave`, but a panic of its own gives it back.
    GiveBackPanic,
    /// It has come to nothing, or to no more than the next one is told of.
    GiveBack,
    /// Nobody knows what it has done: it is left to the end of its lease.
    Leave,
    /// The store knows, or is being told.
    Settled,
}

impl<P: HasPayload + 'static> Attempt<P> {
    /// What has come of its claim, by what the store has answered.
    fn begun(mut self, begun: Begun) -> Begin<P> {
        match begun {
            Begun::Granted { fence, attempt: number, payload, checkpoint } => {
                self.end = DropAction::Leave;
                if let Some(last) = &checkpoint {
                    self.order.checkpoint.store(last.number(), Ordering::Relaxed);
                }
                Begin::Granted(Granted { attempt: self, fence, number, payload, checkpoint })
            }
            begun => {
                self.end = DropAction::Settled;
                Begin::Not(begun)
            }
        }
    }

    pub(crate) const fn order(&self) -> &Arc<OperationContext<P>> {
        &self.order
    }

    /// When it was asked for, or renewed.
    pub(crate) fn sent(&self) -> Instant {
        *self.order.sent()
    }

    /// Lets the attempt be given back if it is dropped by a panic of its own, which is a failure like any other then.
    pub(crate) fn gives_back_panics(mut self) -> Self {
        self.end = DropAction::GiveBackPanic;
        self
    }

    /// Lets the attempt be given back when it is dropped.
    pub(crate) fn gives_back(&mut self) {
        self.end = DropAction::GiveBack;
    }

    /// Does a part of what the attempt is for. A panic in here is its own; others have nothing to do with it.
    pub(crate) fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_at_work.store(true, Ordering::Relaxed);
        let done = work();
        self.is_at_work.store(false, Ordering::Relaxed);
        done
    }

    /// To be called when the caller gets a part of the answer: no panic gives back what has come so far.
    pub(crate) fn answering(&self) {
        self.is_answering.store(true, Ordering::Relaxed);
    }

    /// To be called where the log has been told why the outcome is unknown once this is dropped.
    pub(crate) fn told(&self) {
        self.is_told.store(true, Ordering::Relaxed);
    }

    /// Whether somebody else may have begun, by the clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.order.is_lost()
    }

    /// Renews the lease for as long as this is polled. Ready when somebody else may have begun, so that all has to stop.
    pub(crate) fn keep(&self) -> impl Future<Output = ()> + Send + use<P> {
        let order = Arc::clone(&self.order);
        async move { order.keep().await }
    }

    /// Says what has become of the operation; `None` if there is nothing to wait for. Where that fails it is tried again in the background
    /// for as long as a lease lasts; the caller gets its answer in any case.
    pub(crate) fn settle(mut self, end: Settlement) -> Option<impl Future<Output = ()> + Send + use<P>> {
        if let Some(settled) = self.order.settle_now(&end) {
            self.end = DropAction::Settled;
            self.settled(settled, end);
            return None;
        }
        self.end = DropAction::Settled;
        let mut settling = Settling { order: Arc::clone(&self.order), end: Some(end) };
        Some(async move {
            if let Some(end) = &settling.end {
                let settled = settling.order.settle(end).await;
                if let Some(end) = settling.end.take() {
                    self.settled(settled, end);
                }
            }
        })
    }

    /// Whether the store has noted it; in the background from now on, where it has not.
    fn settled(&self, settled: Result<bool, StoreError>, mut end: Settlement) {
        let order = &self.order;
        match settled {
            Ok(is_ours) => {
                let ended = order.ended(&end, is_ours);
                if ended == Ended::Kept && order.home.full.ends() {
                    tracing::info!(layer = order.layer(), "there is room to keep answers again");
                }
                return order.home.meters().ended(ended);
            }
            Err(error) => match &mut end {
                Settlement::Complete { completion, mark } if error.is_out_of_memory() && completion.is_kept => {
                    if order.home.full.begins() {
                        tracing::warn!(layer = order.layer(), %error, "there is no room to keep an answer");
                    }
                    completion.is_kept = false;
                    completion.answer = Arc::from(mark.as_slice());
                }
                _ => {
                    tracing::debug!(operation = %order.operation, %error, "an operation could not be settled: trying again");
                }
            },
        }
        order.settle_in_background(end, Settled::Attempt);
    }
}

/// What the store is being told. Both ends may be told twice, so whoever does not wait for it has it told in the background.
struct Settling<P: HasPayload + 'static> {
    order: Arc<OperationContext<P>>,
    end: Option<Settlement>,
}

impl<P: HasPayload + 'static> Drop for Settling<P> {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            self.order.settle_in_background(end, Settled::Attempt);
        }
    }
}

impl<P: HasPayload + 'static> Drop for Attempt<P> {
    fn drop(&mut self) {
        let gives_back = match self.end {
            DropAction::GiveBackClaim | DropAction::GiveBack => true,
            DropAction::GiveBackPanic => {
                thread::panicking() && *self.is_at_work.get_mut() && !*self.is_answering.get_mut()
            }
            DropAction::Leave | DropAction::Settled => false,
        };
        if !gives_back && self.end != DropAction::Settled {
            if !*self.is_told.get_mut() {
                let (layer, operation) = (self.order.layer(), self.order.operation());
                tracing::warn!(layer, %operation, "an operation was left: its outcome is unknown when its lease has ended");
            }
            self.order.home.meters().ended(Ended::Unknown);
        }
        if gives_back {
            let what = if self.end == DropAction::GiveBackClaim { Settled::Claim } else { Settled::Attempt };
            self.order.settle_in_background(Settlement::Release, what);
        }
    }
}

/// For how much of a lease its holder may rely on it: clocks differ by up to 1 %, and timers come late.
fn safe_ttl(lease: Duration) -> Duration {
    (lease - lease / 100).saturating_sub(Duration::from_millis(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;

    /// The story of somebody who waited for ever: the last handler ended while one that was turned away was counted, so it was not the last.
    #[test]
    fn what_is_turned_away_is_not_counted_for_a_moment() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        thread::scope(|scope| {
            let turned_away =
                scope.spawn(|| (0..3_000_000).all(|_| Running::new(&home, |home| &home.running, 0).is_none()));
            while !turned_away.is_finished() {
                assert_eq!(home.running.load(Ordering::Acquire), 0);
            }
            assert!(turned_away.join().unwrap());
        });
    }

    #[test]
    fn who_is_turned_away_or_has_ended_is_not_counted_for_its_scope() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        let (most, [alice, bob]) = (MostRunning { in_total: 2, per_scope: 1 }, ["alice", "bob"].map(Key::from));
        let running = [&alice, &bob].map(|scope| home.admit(scope, most).unwrap_or_else(|refused| panic!("{refused}")));
        assert!(matches!(home.admit(&alice, most), Err(Rejection::ScopeFull { bound: ScopeBound::Running, .. })));
        assert!(matches!(home.admit(&Key::from("carol"), most), Err(Rejection::Full)));
        drop(running);
        assert!(home.running_per_scope.is_empty());
    }

    #[test]
    fn one_scope_takes_half_of_the_room_for_waiters() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        let [alice, bob] = ["alice", "bob"].map(Key::from);
        let waiting =
            [Some(&alice), Some(&alice), Some(&bob), None].map(|scope| home.register_waiter(scope, 4).unwrap());
        assert!(home.register_waiter(Some(&bob), 4).is_none(), "there are as many as there may be");
        let [first, ..] = waiting;
        drop(first);
        assert!(home.register_waiter(Some(&alice), 2).is_none() && home.register_waiter(Some(&bob), 4).is_some());
    }

    #[test]
    fn refused_waiter_is_not_counted_for_its_scope() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        let alice = Key::from("alice");
        let waiting = home.register_waiter(None, 1).unwrap();
        assert!(home.register_waiter(Some(&alice), 1).is_none());
        drop(waiting);
        drop(home.register_waiter(Some(&alice), 1).unwrap());
        assert!(home.waiting_per_scope.is_empty());
    }
}
