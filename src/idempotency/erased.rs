use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use super::checkpoint::Checkpoint;
use super::store::{Begun, BodyFingerprint, Claim, Completion, IdempotencyStore, Operation};
use crate::error::StoreError;
use crate::reach::Reach;
use crate::store::deadline::Deadline;
use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;
use crate::store::token::Token;

type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of any type. A call with a `deadline` fails if the store does not reply within this time.
pub(super) trait DynStore: Send + Sync {
    fn begin<'a>(&'a self, operation: &'a Operation, claim: &'a Claim, deadline: Duration) -> Call<'a, Begun>;
    fn try_begin(&self, operation: &Operation, claim: &Claim) -> Option<Result<Begun, StoreError>>;
    fn renew<'a>(
        &'a self,
        operation: &'a Operation,
        claim: &'a Claim,
        body_fingerprint: &'a BodyFingerprint,
        deadline: Duration,
    ) -> Call<'a, bool>;
    fn checkpoint<'a>(
        &'a self,
        operation: &'a Operation,
        claim: &'a Claim,
        body_fingerprint: &'a BodyFingerprint,
        checkpoint: &'a Checkpoint,
        deadline: Duration,
    ) -> Call<'a, bool>;
    fn complete<'a>(
        &'a self,
        operation: &'a Operation,
        token: &'a Token,
        completion: &'a Completion,
        deadline: Duration,
    ) -> Call<'a, bool>;
    fn complete_now(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Option<Result<bool, StoreError>>;
    fn release<'a>(&'a self, operation: &'a Operation, claim: &'a Claim, deadline: Duration) -> Call<'a, bool>;
    fn watch<'a>(&'a self, operation: &'a Operation) -> Pin<Box<dyn Future<Output = Notifications> + Send + 'a>>;
    fn reach(&self) -> Reach;
    fn add_to_shutdown(&self, target: &ShutdownTarget);
}

impl<S: IdempotencyStore + Send + Sync> DynStore for S {
    fn begin<'a>(&'a self, operation: &'a Operation, claim: &'a Claim, deadline: Duration) -> Call<'a, Begun> {
        Box::pin(Deadline::new(IdempotencyStore::begin(self, operation, claim), deadline))
    }

    fn try_begin(&self, operation: &Operation, claim: &Claim) -> Option<Result<Begun, StoreError>> {
        IdempotencyStore::try_begin(self, operation, claim)
    }

    fn renew<'a>(
        &'a self,
        operation: &'a Operation,
        claim: &'a Claim,
        body_fingerprint: &'a BodyFingerprint,
        deadline: Duration,
    ) -> Call<'a, bool> {
        Box::pin(Deadline::new(IdempotencyStore::renew(self, operation, claim, body_fingerprint), deadline))
    }

    fn checkpoint<'a>(
        &'a self,
        operation: &'a Operation,
        claim: &'a Claim,
        body_fingerprint: &'a BodyFingerprint,
        checkpoint: &'a Checkpoint,
        deadline: Duration,
    ) -> Call<'a, bool> {
        Box::pin(Deadline::new(
            IdempotencyStore::checkpoint(self, operation, claim, body_fingerprint, checkpoint),
            deadline,
        ))
    }

    fn complete<'a>(
        &'a self,
        operation: &'a Operation,
        token: &'a Token,
        completion: &'a Completion,
        deadline: Duration,
    ) -> Call<'a, bool> {
        Box::pin(Deadline::new(IdempotencyStore::complete(self, operation, token, completion), deadline))
    }

    fn complete_now(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Option<Result<bool, StoreError>> {
        IdempotencyStore::complete_now(self, operation, token, completion)
    }

    fn release<'a>(&'a self, operation: &'a Operation, claim: &'a Claim, deadline: Duration) -> Call<'a, bool> {
        Box::pin(Deadline::new(IdempotencyStore::release(self, operation, claim), deadline))
    }

    fn watch<'a>(&'a self, operation: &'a Operation) -> Pin<Box<dyn Future<Output = Notifications> + Send + 'a>> {
        Box::pin(IdempotencyStore::watch(self, operation))
    }

    fn reach(&self) -> Reach {
        IdempotencyStore::reach(self)
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        IdempotencyStore::add_to_shutdown(self, target);
    }
}
