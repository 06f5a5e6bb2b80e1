use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::erased::AnyStore;
use super::store::{Begun, Claim, Completion, IdempotencyStore, Operation, Payload};
use crate::error::StoreError;
use crate::lock::{Scope, Token};

/// How many attempts may be settled in the background at a time. While a store is away all of them are; what is beyond that is left
/// to the end of its lease.
const MAX_BACKGROUND: usize = 4_096;
/// How long to wait before the store is asked again in the background; twice that the next time, and so on.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// For how long the store is asked in the background at least.
const SHORTEST: Duration = Duration::from_secs(1);

/// What all attempts of one layer have in common.
pub(crate) struct Home {
    store: Arc<dyn AnyStore>,
    // How long one call of the store may take.
    limit: Duration,
    running: AtomicUsize,
    background: AtomicUsize,
    idle: Notify,
}

impl Home {
    pub(crate) fn new(store: impl IdempotencyStore + Send + Sync + 'static, limit: Duration) -> Self {
        Self::over(Arc::new(store), limit)
    }

    fn over(store: Arc<dyn AnyStore>, limit: Duration) -> Self {
        let (running, background) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { store, limit, running, background, idle: Notify::new() }
    }

    /// The same store with another deadline.
    pub(crate) fn with_limit(&self, limit: Duration) -> Self {
        Self::over(Arc::clone(&self.store), limit)
    }

    pub(crate) fn scope(&self) -> Scope {
        self.store.scope()
    }

    pub(crate) const fn limit(&self) -> Duration {
        self.limit
    }

    /// A place for one more attempt, unless there are `most` already.
    pub(crate) fn admit(self: &Arc<Self>, most: usize) -> Option<Running> {
        Running::new(self, |home| &home.running, most)
    }

    /// Waits until nothing is being done, in the background neither.
    pub(crate) async fn drained(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.running.load(Ordering::Acquire) == 0 && self.background.load(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Begins an operation, or says how far it is.
    ///
    /// # Cancellation
    ///
    /// What was begun without anybody hearing of it is given back in the background.
    pub(crate) async fn begin(self: &Arc<Self>, operation: Operation, claim: Claim) -> Result<Begin, StoreError> {
        let (home, sent) = (Arc::clone(self), Instant::now());
        let is_answering = AtomicBool::new(false);
        let mut attempt = Attempt { home, operation, claim, sent, end: End::GiveBack, is_answering };
        match Arc::clone(&self.store).begin(operation, claim, self.limit).await? {
            Begun::Granted { fence, attempt: number } => {
                attempt.end = End::Leave;
                Ok(Begin::Granted { attempt, fence, number })
            }
            begun => {
                attempt.end = End::Settled;
                Ok(Begin::Not(begun))
            }
        }
    }

    /// Asks the store for something until it has answered, for no longer than `lease`, or a second where that is shorter.
    fn persist<F>(self: &Arc<Self>, lease: Duration, mut ask: impl FnMut() -> F + Send + 'static)
    where
        F: Future<Output = Result<bool, StoreError>> + Send,
    {
        let (Ok(runtime), Some(running)) =
            (Handle::try_current(), Running::new(self, |home| &home.background, MAX_BACKGROUND))
        else {
            tracing::debug!("an operation is left to the end of its lease");
            return;
        };
        drop(runtime.spawn(async move {
            let (until, mut pause) = (Instant::now() + lease.max(SHORTEST), FIRST_PAUSE);
            while let Err(error) = ask().await {
                if Instant::now() + pause >= until {
                    tracing::warn!(%error, "an operation could not be settled in time: its outcome is unknown");
                    break;
                }
                sleep(pause).await;
                pause *= 2;
            }
            drop(running);
        }));
    }
}

/// Counts something that is being done until it ends in whatever way.
pub(crate) struct Running {
    home: Arc<Home>,
    count: fn(&Home) -> &AtomicUsize,
}

impl Running {
    fn new(home: &Arc<Home>, count: fn(&Home) -> &AtomicUsize, most: usize) -> Option<Self> {
        if count(home).fetch_add(1, Ordering::AcqRel) >= most {
            count(home).fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        Some(Self { home: Arc::clone(home), count })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if (self.count)(&self.home).fetch_sub(1, Ordering::AcqRel) == 1 {
            self.home.idle.notify_waiters();
        }
    }
}

/// What came of a claim.
pub(crate) enum Begin {
    Granted { attempt: Attempt, fence: u64, number: u32 },
    Not(Begun),
}

/// An operation that is this process's to do.
pub(crate) struct Attempt {
    home: Arc<Home>,
    operation: Operation,
    claim: Claim,
    // Before the claim was.
    sent: Instant,
    end: End,
    is_answering: AtomicBool,
}

/// What becomes of an attempt that is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// It may not even have begun: somebody else may.
    GiveBack,
    /// As `Leave`, but a panic gives it back.
    GiveBackPanic,
    /// Nobody knows what it has done: it is left to the end of its lease.
    Leave,
    /// The store knows, or is being told.
    Settled,
}

impl Attempt {
    pub(crate) const fn operation(&self) -> &Operation {
        &self.operation
    }

    fn settled(mut self) -> Self {
        self.end = End::Settled;
        self
    }

    /// Lets the attempt be given back if it is dropped by a panic, which is a failure like any other then.
    pub(crate) fn gives_back_panics(mut self) -> Self {
        self.end = End::GiveBackPanic;
        self
    }

    /// To be called when the caller gets a part of the answer: no panic gives back what has come so far.
    pub(crate) fn answering(&self) {
        self.is_answering.store(true, Ordering::Relaxed);
    }

    /// Renews the lease for as long as this is polled. Ready when somebody else may have begun, so that all has to stop.
    ///
    /// `payload` says what is known of the body by then.
    pub(crate) async fn keep(&self, payload: impl Fn() -> Payload) {
        let mut sent = self.sent;
        loop {
            let renewed = self.renewed(sent, &payload);
            let renewed = if self.claim.takes_over {
                // By the clock alone, since no answer may come.
                timeout_at(sent + usable(self.claim.lease), renewed).await.unwrap_or_default()
            } else {
                renewed.await
            };
            match renewed {
                Some(at) => sent = at,
                None if self.claim.takes_over => return,
                // Nobody takes over what this has begun; but the record is lost, and with it what it protects from.
                None => pending().await,
            }
        }
    }

    /// When the command was sent that has renewed the lease; `None` if the operation is not ours any more.
    async fn renewed(&self, sent: Instant, payload: impl Fn() -> Payload) -> Option<Instant> {
        let Self { home, operation, claim, .. } = self;
        let mut due = sent + claim.lease / 3;
        loop {
            sleep_until(due).await;
            let sent = Instant::now();
            match Arc::clone(&home.store).renew(*operation, *claim, payload(), home.limit).await {
                Ok(true) => return Some(sent),
                Ok(false) => {
                    tracing::warn!("the record of an operation is gone while it is being done");
                    return None;
                }
                Err(error) => {
                    tracing::debug!(%error, "a renewal failed: trying again");
                    due = Instant::now() + claim.lease / 10;
                }
            }
        }
    }

    /// Keeps the answer. Where that fails it is tried again in the background for as long as a lease lasts; the caller gets its answer
    /// in any case.
    pub(crate) async fn complete(self, mut completion: Completion) {
        let this = self.settled();
        let (store, operation, token, limit) = this.parts();
        match Arc::clone(&store).complete(operation, token, completion.clone(), limit).await {
            Ok(true) => return,
            Ok(false) => {
                tracing::warn!("an answer is not kept: its operation is somebody else's by now");
                return;
            }
            Err(error) if error.is_out_of_memory() && completion.is_kept => {
                tracing::warn!(%error, "there is no room to keep an answer");
                completion.is_kept = false;
            }
            Err(error) => tracing::debug!(%error, "an answer could not be kept: trying again"),
        }
        this.home.persist(this.claim.lease, move || {
            Arc::clone(&store).complete(operation, token, completion.clone(), limit)
        });
    }

    /// Gives the operation back, so that the next request begins it again. Tried again in the background where that fails.
    pub(crate) async fn release(self) {
        let this = self.settled();
        let (store, operation, token, limit) = this.parts();
        if let Err(error) = store.release(operation, token, limit).await {
            tracing::debug!(%error, "an operation could not be given back: trying again");
            this.give_back();
        }
    }

    fn give_back(&self) {
        let (store, operation, token, limit) = self.parts();
        self.home.persist(self.claim.lease, move || Arc::clone(&store).release(operation, token, limit));
    }

    fn parts(&self) -> (Arc<dyn AnyStore>, Operation, Token, Duration) {
        (Arc::clone(&self.home.store), self.operation, self.claim.token, self.home.limit)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let gives_back = match self.end {
            End::GiveBack => true,
            End::GiveBackPanic => thread::panicking() && !*self.is_answering.get_mut(),
            End::Leave | End::Settled => false,
        };
        if gives_back {
            self.give_back();
        }
    }
}

/// For how much of a lease its holder may rely on it: clocks differ by up to 1 %, and timers come late.
fn usable(lease: Duration) -> Duration {
    (lease - lease / 100).saturating_sub(Duration::from_millis(2))
}
