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
use crate::reach::Reach;
use crate::store::circuit::{Circuit, CircuitBreaker, CircuitObserver, OutageTracker};
use crate::store::notifications::Notifications;
use crate::store::token::Token;

/// The maximum number of background tasks that settle attempts. During a store outage all attempts are settled in the background.
/// Attempts above this number are left to the end of their lease.
const MAX_BACKGROUND: usize = 4_096;
/// How late a claim may reach the store after its release, if its caller did not wait for the reply.
const LATE: Duration = Duration::from_secs(1);
/// The first pause between background calls. It doubles with each call, up to a tenth of the lease.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The upper limit of the pause for any lease, so that results are stored soon after the store recovers.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The `retry_after` of a caller with too many running handlers: any of them may end soon.
const RETRY_FULL: Duration = Duration::from_secs(1);
/// The minimum time of background calls.
const SHORTEST: Duration = Duration::from_secs(1);

/// The shared state of all attempts of a layer.
pub(crate) struct Coordinator {
    store: Arc<dyn DynStore>,
    terms: Terms,
    circuit: Circuit,
    meters: OnceLock<Meters>,
    // Whether the log has reported that the store has no room for responses.
    full: OutageTracker,
    running: AtomicUsize,
    running_per_scope: PerScope,
    waiting_per_scope: PerScope,
    waiting: AtomicUsize,
    background: AtomicUsize,
    idle: Notify,
}

/// The settings for store calls.
#[derive(Clone)]
pub(crate) struct Terms {
    /// The deadline of a store call.
    pub(crate) limit: Duration,
    pub(crate) breaker: CircuitBreaker,
    /// The name of the layer in metrics and logs.
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

    /// The same store with other settings.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Terms)) -> Self {
        let mut terms = self.terms.clone();
        change(&mut terms);
        Self::over(Arc::clone(&self.store), terms)
    }

    /// Rejects a deadline or a maximum runtime of zero. The memory backend replies at once, so a test on it would not find this
    /// error.
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

    /// Reports the result of a store call to the circuit.
    fn noted<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        match &answer {
            Ok(_) => self.circuit.answered(self),
            Err(error) => self.circuit.failed(self, error),
        }
        answer
    }

    pub(crate) fn reach(&self) -> Reach {
        self.store.reach()
    }

    /// Counts a new attempt, unless the maximum in total or for its scope is reached.
    pub(crate) fn admit(self: &Arc<Self>, scope: &Key, most: MostRunning) -> Result<Running, Rejection> {
        // First, so that a caller with too many requests gets 429 even if the process is full.
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

    /// Counts a new waiter, unless `most` requests wait, or half as many of its scope.
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

    /// Waits until no attempt runs and no background task is left.
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

/// All state of one request for an operation, from the first store call to the last. One allocation for each request.
pub(crate) struct OperationContext<P: ?Sized> {
    home: Arc<Coordinator>,
    operation: Operation,
    claim: Claim,
    // When the claim or the last renewal was sent: taken before the call.
    sent: Mutex<Instant>,
    // The number of the last stored checkpoint.
    checkpoint: AtomicU32,
    // Whether the record says that the operation is completed, so that no attempt takes over.
    is_done: AtomicBool,
    // The runtime of the first store call. The context may be dropped outside of any runtime.
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

    /// The scope whose records are limited, if there is a limit.
    pub(super) fn bounded_scope(&self) -> Option<&Key> {
        self.claim.bound.as_ref().map(|bound| &bound.scope)
    }

    /// The name of its layer.
    pub(crate) fn layer(&self) -> &str {
        &self.home.terms.name
    }

    /// The reader of the request body.
    pub(crate) const fn body(&self) -> &P {
        &self.body
    }

    fn sent(&self) -> MutexGuard<'_, Instant> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the record says that the operation is completed.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Relaxed)
    }

    /// Whether another attempt may have started, by the local clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.ends().is_some_and(|ends| Instant::now() >= ends)
    }

    /// Resolves when another attempt may have started. Does not renew the lease: for work that continues while the store is told
    /// that the operation is completed.
    pub(crate) async fn until_lost(&self) {
        while let Some(ends) = self.ends() {
            if Instant::now() >= ends {
                return;
            }
            sleep_until(ends).await;
        }
        pending::<()>().await;
    }

    /// When another attempt may start, unless the lease is renewed; `None` if no attempt will take over.
    fn ends(&self) -> Option<Instant> {
        let Claim { takes_over, lease, .. } = self.claim;
        let may_end = takes_over && !self.is_done();
        may_end.then(|| *self.sent() + safe_ttl(lease))
    }

    /// The number of the next checkpoint.
    pub(super) fn next_checkpoint(&self) -> u32 {
        self.checkpoint.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Stores the progress of the attempt.
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

    /// The same request with a new token, for use when the outcome of this claim is not known.
    pub(super) fn anew(&self) -> Result<Arc<Self>, StoreError> {
        let claim = Claim { token: Token::random()?, ..self.claim };
        Ok(Self::new(&self.home, self.operation, claim, self.body.anew()))
    }

    /// Begins the operation, or returns its state.
    ///
    /// # Cancellation
    ///
    /// If you drop the future, a claim that was granted meanwhile is released in the background.
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
            // Another attempt may have started by now, and this one has not.
            return Err(StoreError::timeout());
        }
        Ok(attempt.begun(begun))
    }

    /// Like [`begin`](Self::begin), if the reply is available without waiting. `None` if not, and then nothing was done.
    ///
    /// Call it at once: the lease is assumed to begin when the context was created.
    pub(crate) fn begin_now(self: &Arc<Self>) -> Option<Result<Begin<P>, StoreError>> {
        let Self { home, operation, claim, .. } = &**self;
        // A call that may not reach the store cannot be a probe.
        home.circuit.admit_no_probe().ok()?;
        let begun = home.noted(home.store.begin_now(operation, claim)?);
        Some(begun.map(|begun| self.attempt(DropAction::Settled).begun(begun)))
    }

    fn attempt(self: &Arc<Self>, end: DropAction) -> Attempt<P> {
        let [is_at_work, is_answering, is_told] = [const { AtomicBool::new(false) }; 3];
        Attempt { order: Arc::clone(self), end, is_at_work, is_answering, is_told }
    }

    /// Notifications for a waiter of the operation.
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
                // Stop at the deadline of the lease, because the reply may never arrive.
                timeout_at(sent + safe_ttl(lease), renewed).await.unwrap_or_default()
            } else {
                renewed.await
            };
            match renewed {
                Some(at) => *self.sent() = at,
                None if takes_over => return,
                // No attempt takes over this operation, so the handler continues. But the record is lost, and retries are no
                // longer recognized.
                None => pending().await,
            }
        }
    }

    /// When the successful renewal was sent; `None` if another attempt holds the operation or the record is gone.
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
                    tracing::warn!(layer, %operation, "the record of a running operation is gone");
                    return None;
                }
                Err(error) => {
                    tracing::debug!(%operation, %error, "a renewal failed: trying again");
                    due = Instant::now() + claim.lease / 10;
                }
            }
        }
    }

    /// Stores the result of the operation. False if the attempt no longer holds the operation.
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

    /// Like [`settle`](Self::settle), if the reply is available without waiting.
    fn settle_now(&self, end: &Settlement) -> Option<Result<bool, StoreError>> {
        let Self { home, operation, claim: Claim { token, .. }, .. } = self;
        let Settlement::Complete { completion, .. } = end else { return None };
        let settled = home.store.complete_now(operation, token, completion)?;
        Some(self.heard(end, home.noted(settled)))
    }

    /// The result of an attempt after it was settled.
    fn ended(&self, end: &Settlement, is_ours: bool) -> Ended {
        match end {
            Settlement::Complete { completion, .. } if is_ours => {
                if completion.is_kept {
                    Ended::Kept
                } else {
                    Ended::Tombstone
                }
            }
            // No other attempt can have started, unless an earlier release succeeded without a reply.
            Settlement::Release if is_ours || !self.is_lost() => Ended::GivenBack,
            _ => {
                let (layer, operation) = (self.layer(), &self.operation);
                match end {
                    Settlement::Complete { .. } => {
                        tracing::warn!(layer, %operation, "a response is not stored: its attempt no longer holds the operation");
                    }
                    Settlement::Release => {
                        tracing::warn!(layer, %operation, "an operation is not released: its attempt no longer holds it");
                    }
                }
                Ended::Unknown
            }
        }
    }

    /// Remembers a successful completion.
    fn heard(&self, end: &Settlement, settled: Result<bool, StoreError>) -> Result<bool, StoreError> {
        if matches!((end, &settled), (Settlement::Complete { .. }, Ok(true))) {
            self.is_done.store(true, Ordering::Relaxed);
        }
        settled
    }

    /// Continues to settle in the background, for the length of a lease, but at least a second.
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
                    // During a store outage there are as many of these as requests, so none of them is used as a probe.
                    let mut settled = order.settle_until(until, &end, || order.home.circuit.admit_no_probe()).await;
                    if settled.is_ok() {
                        sleep(LATE).await;
                        settled = order.settle(&end).await;
                    }
                    if let Err(error) = settled {
                        tracing::debug!(operation = %order.operation, %error, "a claim could not be released, if it was granted");
                    }
                }
            }
            telling.ends();
            drop(running);
        };
        drop(runtime.spawn(settling.in_current_span()));
    }

    /// Repeats the store call until it succeeds or `until` has passed. The last call ignores `may_ask`: without it no call might
    /// find out that the store has recovered.
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

/// How an attempt ends in the store.
pub(crate) enum Settlement {
    /// The response is stored, or `mark` if the store has no room for the response.
    Complete { completion: Completion, mark: [u8; 5] },
    /// The operation is released, so that the next request executes it.
    Release,
}

/// A background settlement. It may be dropped before its end, if there is no room or no runtime for its task.
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

/// The maximum numbers of running attempts.
#[derive(Clone, Copy)]
pub(crate) struct MostRunning {
    pub(crate) in_total: usize,
    pub(crate) per_scope: usize,
}

/// Selects the counts by scope of one kind of work.
type ScopeCounts = fn(&Coordinator) -> &PerScope;

/// Counts a running piece of work until it is dropped.
pub(crate) struct Running {
    home: Arc<Coordinator>,
    count: fn(&Coordinator) -> &AtomicUsize,
    // The counts of its scope, and the hash of the scope.
    scope: Option<(ScopeCounts, u64)>,
}

impl Running {
    fn new(home: &Arc<Coordinator>, count: fn(&Coordinator) -> &AtomicUsize, most: usize) -> Option<Self> {
        // Never exceed the maximum, not even for a moment. Otherwise the last work that ends might not see that it is the last.
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

/// The result of a claim.
pub(crate) enum Begin<P: HasPayload + 'static> {
    Granted(Granted<P>),
    Not(Begun),
}

/// An attempt, and the known state of earlier attempts.
pub(crate) struct Granted<P: HasPayload + 'static> {
    pub(crate) attempt: Attempt<P>,
    pub(crate) fence: u64,
    pub(crate) number: u32,
    pub(crate) payload: Payload,
    pub(crate) checkpoint: Option<Checkpoint>,
}

/// An operation that this process holds.
pub(crate) struct Attempt<P: HasPayload + 'static> {
    order: Arc<OperationContext<P>>,
    end: DropAction,
    is_at_work: AtomicBool,
    is_answering: AtomicBool,
    // Whether the log already has a line about its unknown outcome.
    is_told: AtomicBool,
}

/// The subject of a background settlement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Settled {
    Attempt,
    /// A claim whose reply was not received, so no handler was started. It is released twice, the second time a moment later. The
    /// claim may reach the store after the first release, and the store remembers only the token of the last release.
    Claim,
}

/// What to do with an attempt that is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DropAction {
    /// Release it. The claim may not have been granted.
    GiveBackClaim,
    /// Like `Leave`, but release it if its own work panics.
    GiveBackPanic,
    /// Release it. It had no effects beyond what the next attempt learns.
    GiveBack,
    /// Leave it to the end of its lease, because its effects are not known.
    Leave,
    /// Do nothing: the store knows the result, or a task is reporting it.
    Settled,
}

impl<P: HasPayload + 'static> Attempt<P> {
    /// The result of the claim, from the reply of the store.
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

    /// When the claim or the last renewal was sent.
    pub(crate) fn sent(&self) -> Instant {
        *self.order.sent()
    }

    /// Releases the attempt if a panic of its own work drops it. Such a panic is a failure like any other.
    pub(crate) fn gives_back_panics(mut self) -> Self {
        self.end = DropAction::GiveBackPanic;
        self
    }

    /// Releases the attempt when it is dropped.
    pub(crate) fn gives_back(&mut self) {
        self.end = DropAction::GiveBack;
    }

    /// Runs a part of the work. A panic inside is a panic of the attempt; a panic elsewhere does not release it.
    pub(crate) fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_at_work.store(true, Ordering::Relaxed);
        let done = work();
        self.is_at_work.store(false, Ordering::Relaxed);
        done
    }

    /// Call this when the client gets a part of the response. After that a panic does not release the attempt.
    pub(crate) fn answering(&self) {
        self.is_answering.store(true, Ordering::Relaxed);
    }

    /// Call this if the log already says why the outcome will be unknown.
    pub(crate) fn told(&self) {
        self.is_told.store(true, Ordering::Relaxed);
    }

    /// Whether another attempt may have started, by the local clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.order.is_lost()
    }

    /// Renews the lease while it is polled. Resolves when another attempt may have started, so that all work has to stop.
    pub(crate) fn keep(&self) -> impl Future<Output = ()> + Send + use<P> {
        let order = Arc::clone(&self.order);
        async move { order.keep().await }
    }

    /// Stores the result of the operation; `None` if that needs no waiting. If the store fails, a background task retries for the
    /// length of a lease. The client gets its response in any case.
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

    /// Handles the reply of the store. If the call failed, a background task retries it.
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

/// A settlement in progress. Both kinds may be repeated, so a dropped one continues in the background.
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

/// How long the holder may rely on a lease. The rest is a margin for clocks that differ by up to 1 %, and for late timers.
fn safe_ttl(lease: Duration) -> Duration {
    (lease - lease / 100).saturating_sub(Duration::from_millis(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBackend;

    /// Regression: `wait_idle` never returned. The last handler ended while a rejected one was counted, so it was not the last.
    #[test]
    fn rejected_work_is_never_counted() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        thread::scope(|scope| {
            let rejected =
                scope.spawn(|| (0..3_000_000).all(|_| Running::new(&home, |home| &home.running, 0).is_none()));
            while !rejected.is_finished() {
                assert_eq!(home.running.load(Ordering::Acquire), 0);
            }
            assert!(rejected.join().unwrap());
        });
    }

    #[test]
    fn rejected_or_ended_work_is_not_counted_for_its_scope() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        let (most, [alice, bob]) = (MostRunning { in_total: 2, per_scope: 1 }, ["alice", "bob"].map(Key::from));
        let running = [&alice, &bob].map(|scope| home.admit(scope, most).unwrap_or_else(|refused| panic!("{refused}")));
        assert!(matches!(home.admit(&alice, most), Err(Rejection::ScopeFull { bound: ScopeBound::Running, .. })));
        assert!(matches!(home.admit(&Key::from("carol"), most), Err(Rejection::Full)));
        drop(running);
        assert!(home.running_per_scope.is_empty());
    }

    #[test]
    fn one_scope_has_at_most_half_of_waiters() {
        let home = Arc::new(Coordinator::new(MemoryBackend::new()));
        let [alice, bob] = ["alice", "bob"].map(Key::from);
        let waiting =
            [Some(&alice), Some(&alice), Some(&bob), None].map(|scope| home.register_waiter(scope, 4).unwrap());
        assert!(home.register_waiter(Some(&bob), 4).is_none(), "four requests wait already");
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
