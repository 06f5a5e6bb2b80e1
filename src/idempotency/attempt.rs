//! An attempt at an operation. Its owner settles it, or drops it.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::time::Instant;

use super::background::{BackgroundSettle, SettleTarget};
use super::checkpoint::Checkpoint;
use super::context::{OperationContext, Settlement};
use super::has_body_fingerprint::HasBodyFingerprint;
use super::metrics::AttemptOutcome;
use super::store::{Begun, BodyFingerprint};
use crate::error::StoreError;
use crate::store::circuit::Circuit;

/// The result of a claim.
pub(crate) enum ClaimResult<P: HasBodyFingerprint + 'static> {
    Granted(Granted<P>),
    NotGranted(Begun),
}

/// A granted attempt, and the state that earlier attempts left.
pub(crate) struct Granted<P: HasBodyFingerprint + 'static> {
    pub(crate) attempt: Attempt<P>,
    pub(crate) fence: u64,
    pub(crate) number: u32,
    pub(crate) body_fingerprint: BodyFingerprint,
    pub(crate) checkpoint: Option<Checkpoint>,
}

/// An operation that this process holds.
pub(crate) struct Attempt<P: HasBodyFingerprint + 'static> {
    context: Arc<OperationContext<P>>,
    on_drop: DropAction,
    is_in_work: AtomicBool,
    is_responding: AtomicBool,
    // Whether the log already says that the outcome of this attempt is unknown.
    is_reported: AtomicBool,
}

/// What to do with an attempt that is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DropAction {
    /// Release it. The claim may not have been granted.
    ReleaseClaim,
    /// Like `LetExpire`, but release the attempt if a panic in [`run_work`](Attempt::run_work) drops it.
    ReleaseOnPanic,
    /// Release it. Its handler was not started, or its request body differs from that of the previous attempt.
    Release,
    /// Let its lease expire, because its effects are not known.
    LetExpire,
    /// Do nothing: the store knows the result, or a task is reporting it.
    Settled,
}

impl<P: HasBodyFingerprint + 'static> Attempt<P> {
    /// Begins the operation, or returns its state.
    ///
    /// # Cancellation
    ///
    /// If you drop the future, a claim that was granted meanwhile is released in the background.
    pub(crate) async fn begin(context: &Arc<OperationContext<P>>) -> Result<ClaimResult<P>, StoreError> {
        context.mark_sent();
        let mut attempt = Self::new(Arc::clone(context), DropAction::ReleaseClaim);
        let begun = context.claim().await;
        if begun.as_ref().is_err_and(|error| error.is_refusal() || Circuit::is_cause_of(error)) {
            attempt.on_drop = DropAction::Settled;
        }
        let begun = begun?;
        if matches!(begun, Begun::Granted { .. }) && attempt.is_lost() {
            // Another attempt may have started by now. The work of this attempt has not.
            return Err(StoreError::timeout());
        }
        Ok(attempt.claim_result(begun))
    }

    /// Like [`begin`](Self::begin), if the store replies without waiting. Otherwise returns `None` and has no effect.
    ///
    /// Call it right after the context was created, because the lease counts from then.
    pub(crate) fn try_begin(context: &Arc<OperationContext<P>>) -> Option<Result<ClaimResult<P>, StoreError>> {
        let begun = context.claim_now()?;
        Some(begun.map(|begun| Self::new(Arc::clone(context), DropAction::Settled).claim_result(begun)))
    }

    const fn new(context: Arc<OperationContext<P>>, on_drop: DropAction) -> Self {
        let [is_in_work, is_responding, is_reported] = [const { AtomicBool::new(false) }; 3];
        Self { context, on_drop, is_in_work, is_responding, is_reported }
    }

    /// The result of the claim, from the reply of the store.
    fn claim_result(mut self, begun: Begun) -> ClaimResult<P> {
        match begun {
            Begun::Granted { fence, attempt: number, body_fingerprint, checkpoint } => {
                self.on_drop = DropAction::LetExpire;
                if let Some(last) = &checkpoint {
                    self.context.resume_after(last);
                }
                ClaimResult::Granted(Granted { attempt: self, fence, number, body_fingerprint, checkpoint })
            }
            begun => {
                self.on_drop = DropAction::Settled;
                ClaimResult::NotGranted(begun)
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

    /// Releases the attempt if a panic in [`run_work`](Self::run_work) drops it.
    pub(crate) fn release_on_panic(mut self) -> Self {
        self.on_drop = DropAction::ReleaseOnPanic;
        self
    }

    /// Releases the attempt when it is dropped.
    pub(crate) fn release_on_drop(&mut self) {
        self.on_drop = DropAction::Release;
    }

    /// Runs a handler, or the work of the user. Only a panic inside of `work` counts as a panic of the attempt.
    pub(crate) fn run_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_in_work.store(true, Ordering::Relaxed);
        let done = work();
        self.is_in_work.store(false, Ordering::Relaxed);
        done
    }

    /// Call this when a part of the response is sent. After that, a panic does not release the attempt.
    pub(crate) fn mark_responding(&self) {
        self.is_responding.store(true, Ordering::Relaxed);
    }

    /// Call this if the log already says why the outcome will be unknown.
    pub(crate) fn mark_reported(&self) {
        self.is_reported.store(true, Ordering::Relaxed);
    }

    /// Whether another attempt may have started, by the local clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.context.is_lost()
    }

    /// Renews the lease while it is polled. Resolves when another attempt may have started, so that all work must stop.
    pub(crate) fn renew_until_lost(&self) -> impl Future<Output = ()> + Send + use<P> {
        let context = Arc::clone(&self.context);
        async move { context.renew_until_lost().await }
    }

    /// Stores the result of the operation. Returns a future only if the store does not reply at once. If the store fails, a background
    /// task retries for the length of a lease. The client gets its response in any case.
    pub(crate) fn settle(mut self, settlement: Settlement) -> Option<impl Future<Output = ()> + Send + use<P>> {
        if let Some(settled) = self.context.settle_now(&settlement) {
            self.on_drop = DropAction::Settled;
            self.finish_settle(settled, settlement);
            return None;
        }
        self.on_drop = DropAction::Settled;
        let mut settling = Settling { context: Arc::clone(&self.context), settlement: Some(settlement) };
        Some(async move {
            if let Some(settlement) = &settling.settlement {
                let settled = settling.context.settle(settlement).await;
                if let Some(settlement) = settling.settlement.take() {
                    self.finish_settle(settled, settlement);
                }
            }
        })
    }

    /// Handles the reply of the store. If the call failed, a background task retries it.
    fn finish_settle(&self, settled: Result<bool, StoreError>, mut settlement: Settlement) {
        let context = &self.context;
        match settled {
            Ok(is_ours) => {
                let outcome = context.outcome(&settlement, is_ours);
                if outcome == AttemptOutcome::Stored && context.coordinator().full.record_success() {
                    tracing::info!(layer = context.layer(), "the idempotency store has room for responses again");
                }
                return context.coordinator().metrics().record_attempt(outcome);
            }
            Err(error) => match &mut settlement {
                Settlement::Complete { completion, mark } if error.is_out_of_memory() && completion.is_kept => {
                    if context.coordinator().full.record_failure() {
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
        BackgroundSettle::spawn(context, settlement, SettleTarget::Attempt);
    }
}

/// A settlement in progress. The store call may be repeated, so it continues in the background if this is dropped.
struct Settling<P: HasBodyFingerprint + 'static> {
    context: Arc<OperationContext<P>>,
    settlement: Option<Settlement>,
}

impl<P: HasBodyFingerprint + 'static> Drop for Settling<P> {
    fn drop(&mut self) {
        if let Some(settlement) = self.settlement.take() {
            BackgroundSettle::spawn(&self.context, settlement, SettleTarget::Attempt);
        }
    }
}

impl<P: HasBodyFingerprint + 'static> Drop for Attempt<P> {
    fn drop(&mut self) {
        let is_released = match self.on_drop {
            DropAction::ReleaseClaim | DropAction::Release => true,
            DropAction::ReleaseOnPanic => {
                thread::panicking() && *self.is_in_work.get_mut() && !*self.is_responding.get_mut()
            }
            DropAction::LetExpire | DropAction::Settled => false,
        };
        if !is_released && self.on_drop != DropAction::Settled {
            if !*self.is_reported.get_mut() {
                let (layer, operation) = (self.context.layer(), self.context.operation());
                tracing::warn!(layer, %operation, "an execution was dropped: the outcome of its operation is unknown when its lease has ended");
            }
            self.context.coordinator().metrics().record_attempt(AttemptOutcome::Unknown);
        }
        if is_released {
            let target =
                if self.on_drop == DropAction::ReleaseClaim { SettleTarget::Claim } else { SettleTarget::Attempt };
            BackgroundSettle::spawn(&self.context, Settlement::Release, target);
        }
    }
}
