//! The state of one request for an operation, and its store calls.

use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::checkpoint::Checkpoint;
use super::coordinator::Coordinator;
use super::has_body_fingerprint::HasBodyFingerprint;
use super::metrics::AttemptOutcome;
use super::store::{Begun, BodyFingerprint, Claim, Completion, Operation};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::notifications::Notifications;
use crate::store::token::Token;

/// All state of one request for an operation, from the first store call to the last. One allocation for each request.
pub(crate) struct OperationContext<P: ?Sized> {
    coordinator: Arc<Coordinator>,
    operation: Operation,
    claim: Claim,
    // When the claim or the last renewal was sent, measured before the call.
    sent: Mutex<Instant>,
    // The number of the last checkpoint, also if storing it failed.
    checkpoint: AtomicU32,
    // Whether the operation is completed in the record, so that no other attempt starts.
    is_done: AtomicBool,
    // The runtime of the first store call that waited. The context may be dropped outside of any runtime.
    runtime: OnceLock<Handle>,
    body: P,
}

impl<P: ?Sized> OperationContext<P> {
    pub(crate) const fn operation(&self) -> &Operation {
        &self.operation
    }

    pub(super) const fn coordinator(&self) -> &Arc<Coordinator> {
        &self.coordinator
    }

    /// The scope whose records are limited, if there is a limit.
    pub(super) fn bounded_scope(&self) -> Option<&Key> {
        self.claim.bound.as_ref().map(|bound| &bound.scope)
    }

    /// The name of its layer.
    pub(crate) fn layer(&self) -> &str {
        &self.coordinator.options().name
    }

    /// The fingerprint of the request body.
    pub(crate) const fn body(&self) -> &P {
        &self.body
    }

    /// When the claim or the last renewal was sent.
    pub(super) fn sent(&self) -> Instant {
        *self.lock_sent()
    }

    fn lock_sent(&self) -> MutexGuard<'_, Instant> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the record says that the operation is completed.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Relaxed)
    }

    /// Whether another attempt may have started, by the local clock.
    pub(crate) fn is_lost(&self) -> bool {
        self.lease_end().is_some_and(|lease_end| Instant::now() >= lease_end)
    }

    /// Resolves when another attempt may have started. Does not renew the lease. For work that continues while the result is stored.
    pub(crate) async fn until_lost(&self) {
        while let Some(lease_end) = self.lease_end() {
            if Instant::now() >= lease_end {
                return;
            }
            sleep_until(lease_end).await;
        }
        pending::<()>().await;
    }

    /// When another attempt may start, unless the lease is renewed; `None` if no other attempt starts.
    fn lease_end(&self) -> Option<Instant> {
        let Claim { takes_over, lease, .. } = self.claim;
        let can_be_lost = takes_over && !self.is_done();
        can_be_lost.then(|| *self.lock_sent() + safe_ttl(lease))
    }

    /// The runtime for background tasks, if there is one.
    pub(super) fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.runtime.get().cloned())
    }

    /// The length of a lease.
    pub(super) const fn lease(&self) -> Duration {
        self.claim.lease
    }

    /// Continues the numbers of checkpoints after the last one of the previous attempt.
    pub(super) fn resume_after(&self, last: &Checkpoint) {
        self.checkpoint.store(last.number(), Ordering::Relaxed);
    }

    /// The number of the next checkpoint.
    pub(super) fn next_checkpoint(&self) -> u32 {
        self.checkpoint.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Stores the progress of the attempt.
    pub(super) async fn checkpoint(
        &self,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, StoreError> {
        let Self { coordinator, operation, claim, .. } = self;
        coordinator.record_result(
            coordinator
                .store
                .checkpoint(operation, claim, body_fingerprint, checkpoint, coordinator.options().deadline)
                .await,
        )
    }
}

impl<P: HasBodyFingerprint + 'static> OperationContext<P> {
    pub(crate) fn new(coordinator: &Arc<Coordinator>, operation: Operation, claim: Claim, body: P) -> Arc<Self> {
        let (sent, checkpoint, is_done) = (Mutex::new(Instant::now()), AtomicU32::new(0), AtomicBool::new(false));
        let (coordinator, runtime) = (Arc::clone(coordinator), OnceLock::new());
        Arc::new(Self { coordinator, operation, claim, sent, checkpoint, is_done, runtime, body })
    }

    /// A context for the same request with a new token. Use it after a claim whose outcome is unknown.
    pub(super) fn with_new_token(&self) -> Result<Arc<Self>, StoreError> {
        let claim = Claim { token: Token::random()?, ..self.claim };
        Ok(Self::new(&self.coordinator, self.operation, claim, self.body.restarted()))
    }

    /// Claims the operation, or returns its state.
    pub(super) async fn claim(&self) -> Result<Begun, StoreError> {
        let Self { coordinator, operation, claim, .. } = self;
        coordinator.circuit.admit()?;
        coordinator.record_result(coordinator.store.begin(operation, claim, coordinator.options().deadline).await)
    }

    /// Like [`claim`](Self::claim), if the store replies without waiting. Otherwise returns `None` and has no effect.
    pub(super) fn claim_now(&self) -> Option<Result<Begun, StoreError>> {
        let Self { coordinator, operation, claim, .. } = self;
        // Not a probe, because `try_begin` may return without calling the store.
        coordinator.circuit.admit_no_probe().ok()?;
        Some(coordinator.record_result(coordinator.store.try_begin(operation, claim)?))
    }

    /// Records that the claim is sent now, and in which runtime.
    pub(super) fn mark_sent(&self) {
        *self.lock_sent() = Instant::now();
        if let Ok(runtime) = Handle::try_current() {
            self.runtime.get_or_init(|| runtime);
        }
    }

    /// Notifications for a waiter of the operation.
    pub(super) async fn watch(&self) -> Notifications {
        self.coordinator.store.watch(&self.operation).await
    }

    /// See [`Attempt::renew_until_lost`](super::attempt::Attempt::renew_until_lost).
    pub(super) async fn renew_until_lost(&self) {
        let Claim { takes_over, lease, .. } = self.claim;
        loop {
            let sent = *self.lock_sent();
            let renewed = self.next_renewal(sent);
            let renewed = if takes_over {
                // Stop at the end of the lease, because the reply may never arrive.
                timeout_at(sent + safe_ttl(lease), renewed).await.unwrap_or_default()
            } else {
                renewed.await
            };
            match renewed {
                Some(at) => *self.lock_sent() = at,
                None if takes_over => return,
                // Without a takeover the handler continues. The record is gone, or an operator has changed it, so a retry may start another
                // attempt.
                None => pending().await,
            }
        }
    }

    /// Renews the lease, and returns the time at which the renewal was sent; `None` if another attempt holds the operation or the record is
    /// gone.
    async fn next_renewal(&self, sent: Instant) -> Option<Instant> {
        let Self { coordinator, operation, claim, body, .. } = self;
        let mut due = sent + claim.lease / 3;
        loop {
            sleep_until(due).await;
            let sent = Instant::now();
            match coordinator.record_result(
                coordinator
                    .store
                    .renew(operation, claim, &body.body_fingerprint(), coordinator.options().deadline)
                    .await,
            ) {
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
    pub(super) async fn settle(&self, settlement: &Settlement) -> Result<bool, StoreError> {
        let Self { coordinator, operation, claim, .. } = self;
        let settled = coordinator.record_result(match settlement {
            Settlement::Complete { completion, .. } => {
                coordinator.store.complete(operation, &claim.token, completion, coordinator.options().deadline).await
            }
            Settlement::Release => coordinator.store.release(operation, claim, coordinator.options().deadline).await,
        });
        self.record_completion(settlement, settled)
    }

    /// Like [`settle`](Self::settle), if the store replies without waiting.
    pub(super) fn settle_now(&self, settlement: &Settlement) -> Option<Result<bool, StoreError>> {
        let Self { coordinator, operation, claim: Claim { token, .. }, .. } = self;
        let Settlement::Complete { completion, .. } = settlement else { return None };
        let settled = coordinator.store.complete_now(operation, token, completion)?;
        Some(self.record_completion(settlement, coordinator.record_result(settled)))
    }

    /// The outcome of an attempt after the reply to its settlement.
    pub(super) fn outcome(&self, settlement: &Settlement, is_ours: bool) -> AttemptOutcome {
        match settlement {
            Settlement::Complete { completion, .. } if is_ours => {
                if completion.is_kept {
                    AttemptOutcome::Stored
                } else {
                    AttemptOutcome::NotStored
                }
            }
            // If no other attempt can have taken over, most likely an earlier call released the operation, and the reply of that call was
            // lost.
            Settlement::Release if is_ours || !self.is_lost() => AttemptOutcome::Released,
            _ => {
                let (layer, operation) = (self.layer(), &self.operation);
                match settlement {
                    Settlement::Complete { .. } => {
                        tracing::warn!(layer, %operation, "a response is not stored: its attempt no longer holds the operation");
                    }
                    Settlement::Release => {
                        tracing::warn!(layer, %operation, "an operation is not released: its attempt no longer holds it");
                    }
                }
                AttemptOutcome::Unknown
            }
        }
    }

    /// Records a successful completion.
    fn record_completion(
        &self,
        settlement: &Settlement,
        settled: Result<bool, StoreError>,
    ) -> Result<bool, StoreError> {
        if matches!((settlement, &settled), (Settlement::Complete { .. }, Ok(true))) {
            self.is_done.store(true, Ordering::Relaxed);
        }
        settled
    }
}

/// How an attempt ends in the store.
pub(crate) enum Settlement {
    /// The response is stored, or `mark` if the store has no room for the response.
    Complete { completion: Completion, mark: [u8; 5] },
    /// The operation is released, so that the next request executes it.
    Release,
}

/// How long the holder may rely on a lease. The rest is a margin for clocks that differ by up to 1 %, and for late timers.
fn safe_ttl(lease: Duration) -> Duration {
    (lease - lease / 100).saturating_sub(Duration::from_millis(2))
}
