use std::time::Duration;

use super::MemoryBackend;
use crate::error::StoreError;
use crate::idempotency::store::{
    Begun, BodyFingerprint, Claim, Completion, IdempotencyRegistry, IdempotencyStore, Notifications, Token,
};
use crate::idempotency::{
    Checkpoint, Cursor, Operation, OperationPage, OperationState, OperationStatus, StoredResponse,
};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl IdempotencyStore for MemoryBackend {
    async fn begin(&self, operation: &Operation, claim: &Claim) -> Result<Begun, StoreError> {
        self.inner.operations.begin(operation, claim)
    }

    fn try_begin(&self, operation: &Operation, claim: &Claim) -> Option<Result<Begun, StoreError>> {
        Some(self.inner.operations.begin(operation, claim))
    }

    async fn renew(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
    ) -> Result<bool, StoreError> {
        Ok(self.inner.operations.renew(operation, claim, body_fingerprint))
    }

    async fn checkpoint(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, StoreError> {
        self.inner.operations.checkpoint(operation, claim, body_fingerprint, checkpoint)
    }

    async fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, StoreError> {
        self.inner.operations.complete(operation, token, completion)
    }

    fn complete_now(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Option<Result<bool, StoreError>> {
        Some(self.inner.operations.complete(operation, token, completion))
    }

    async fn release(&self, operation: &Operation, claim: &Claim) -> Result<bool, StoreError> {
        Ok(self.inner.operations.release(operation, claim))
    }

    async fn watch(&self, operation: &Operation) -> Notifications {
        self.inner.operations.watch(operation)
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl IdempotencyRegistry for MemoryBackend {
    async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        Ok(self.inner.operations.inspect(operation))
    }

    async fn forget(&self, status: &OperationStatus) -> Result<bool, StoreError> {
        Ok(self.inner.operations.forget(status))
    }

    async fn complete_unknown(
        &self,
        status: &OperationStatus,
        response: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        match status.state {
            OperationState::Unknown { .. } | OperationState::Completed { .. } => {
                self.inner.operations.complete_unknown(status, response, retention)
            }
            OperationState::Free | OperationState::InFlight { .. } => Ok(false),
        }
    }

    async fn list(&self, scope: Option<&Key>, from: Cursor, max: usize) -> Result<OperationPage, StoreError> {
        Ok(self.inner.operations.list(scope, from, max))
    }
}

impl MemoryBackend {
    /// Number of stored operations, including expired ones before their removal.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.inner.operations.len()
    }
}
