//! An attempt at an operation, which its owner settles or drops.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::time::Instant;

use super::background::{BackgroundSettle, Settled};
use super::checkpoint::Checkpoint;
use super::context::{OperationContext, Settlement};
use super::has_payload::HasPayload;
use super::metrics::Ended;
use super::store::{Begun, Payload};
use crate::error::StoreError;
use crate::store::circuit::Circuit;

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
    context: Arc<OperationContext<P>>,
    end: DropAction,
    is_at_work: AtomicBool,
    is_answering: AtomicBool,
    // Whether the log already has a line about its unknown outcome.
    is_reported: AtomicBool,
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
    /// Begins the operation, or returns its state.
    ///
    /// # Cancellation
    ///
    /// If you drop the future, a claim that was granted meanwhile is released in the background.
    pub(crate) async fn begin(context: &Arc<OperationContext<P>>) -> Result<Begin<P>, StoreError> {
        context.begins();
        let mut attempt = Self::new(Arc::clone(context), DropAction::GiveBackClaim);
        let begun = context.claim().await;
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
    pub(crate) fn begin_now(context: &Arc<OperationContext<P>>) -> Option<Result<Begin<P>, StoreError>> {
        let begun = context.claim_now()?;
        Some(begun.map(|begun| Self::new(Arc::clone(context), DropAction::Settled).begun(begun)))
    }

    const fn new(context: Arc<OperationContext<P>>, end: DropAction) -> Self {
        let [is_at_work, is_answering, is_reported] = [const { AtomicBool::new(false) }; 3];
        Self { context, end, is_at_work, is_answering, is_reported }
    }

    /// The result of the claim, from the reply of the store.
    fn begun(mut self, begun: Begun) -> Begin<P> {
        match begun {
            Begun::Granted { fence, attempt: number, payload, checkpoint } => {
                self.end = DropAction::Leave;
                if let Some(last) = &checkpoint {
                    self.context.begin_after(last);
                }
                Begin::Granted(Granted { attempt: self, fence, number, payload, checkpoint })
            }
            begun => {
                self.end = DropAction::Settled;
                Begin::Not(begun)
            }
        }
    }

    pub(crate) const fn context(&self) -> &Arc<OperationContext<P>> {
        &self.context
    }

    /// When the claim or the last renewal was sent.
    pub(crate) fn sent(&self) -> Instant {
        self.context.sent()
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
    pub(crate) fn mark_reported(&self) {
        self.is_reported.store(true, Ordering::Relaxed);
    }

    /// Whether another attempt may have started, by the local clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.context.is_lost()
    }

    /// Renews the lease while it is polled. Resolves when another attempt may have started, so that all work has to stop.
    pub(crate) fn keep(&self) -> impl Future<Output = ()> + Send + use<P> {
        let context = Arc::clone(&self.context);
        async move { context.keep().await }
    }

    /// Stores the result of the operation; `None` if that needs no waiting. If the store fails, a background task retries for the
    /// length of a lease. The client gets its response in any case.
    pub(crate) fn settle(mut self, end: Settlement) -> Option<impl Future<Output = ()> + Send + use<P>> {
        if let Some(settled) = self.context.settle_now(&end) {
            self.end = DropAction::Settled;
            self.settled(settled, end);
            return None;
        }
        self.end = DropAction::Settled;
        let mut settling = Settling { context: Arc::clone(&self.context), end: Some(end) };
        Some(async move {
            if let Some(end) = &settling.end {
                let settled = settling.context.settle(end).await;
                if let Some(end) = settling.end.take() {
                    self.settled(settled, end);
                }
            }
        })
    }

    /// Handles the reply of the store. If the call failed, a background task retries it.
    fn settled(&self, settled: Result<bool, StoreError>, mut end: Settlement) {
        let context = &self.context;
        match settled {
            Ok(is_ours) => {
                let ended = context.ended(&end, is_ours);
                if ended == Ended::Kept && context.coordinator().full.ends() {
                    tracing::info!(layer = context.layer(), "the idempotency store has room for responses again");
                }
                return context.coordinator().meters().ended(ended);
            }
            Err(error) => match &mut end {
                Settlement::Complete { completion, mark } if error.is_out_of_memory() && completion.is_kept => {
                    if context.coordinator().full.begins() {
                        tracing::warn!(layer = context.layer(), %error, "the idempotency store is out of memory: responses are not stored, and retries of their requests are rejected");
                    }
                    completion.is_kept = false;
                    completion.response = Arc::from(mark.as_slice());
                }
                _ => {
                    tracing::debug!(operation = %context.operation(), %error, "an operation could not be settled: trying again");
                }
            },
        }
        BackgroundSettle::spawn(context, end, Settled::Attempt);
    }
}

/// A settlement in progress. Both kinds may be repeated, so a dropped one continues in the background.
struct Settling<P: HasPayload + 'static> {
    context: Arc<OperationContext<P>>,
    end: Option<Settlement>,
}

impl<P: HasPayload + 'static> Drop for Settling<P> {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            BackgroundSettle::spawn(&self.context, end, Settled::Attempt);
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
            if !*self.is_reported.get_mut() {
                let (layer, operation) = (self.context.layer(), self.context.operation());
                tracing::warn!(layer, %operation, "an execution was dropped: the outcome of its operation is unknown when its lease has ended");
            }
            self.context.coordinator().meters().ended(Ended::Unknown);
        }
        if gives_back {
            let what = if self.end == DropAction::GiveBackClaim { Settled::Claim } else { Settled::Attempt };
            BackgroundSettle::spawn(&self.context, Settlement::Release, what);
        }
    }
}
