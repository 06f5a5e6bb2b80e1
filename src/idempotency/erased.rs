use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::store::{Begun, Claim, Completion, IdempotencyStore, Operation, Payload};
use crate::deadline::Deadline;
use crate::error::StoreError;
use crate::lock::{Scope, Token};

type Call<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A store of any type. Its calls own what they need, and end with their deadline.
pub(super) trait AnyStore: Send + Sync {
    fn begin(self: Arc<Self>, operation: Operation, claim: Claim, limit: Duration) -> Call<Begun>;
    fn renew(self: Arc<Self>, operation: Operation, claim: Claim, payload: Payload, limit: Duration) -> Call<bool>;
    fn complete(self: Arc<Self>, operation: Operation, token: Token, done: Completion, limit: Duration) -> Call<bool>;
    fn release(self: Arc<Self>, operation: Operation, token: Token, limit: Duration) -> Call<bool>;
    fn scope(&self) -> Scope;
}

impl<S: IdempotencyStore + Send + Sync + 'static> AnyStore for S {
    fn begin(self: Arc<Self>, operation: Operation, claim: Claim, limit: Duration) -> Call<Begun> {
        Box::pin(Deadline::new(async move { IdempotencyStore::begin(&*self, &operation, &claim).await }, limit))
    }

    fn renew(self: Arc<Self>, operation: Operation, claim: Claim, payload: Payload, limit: Duration) -> Call<bool> {
        let call = async move { IdempotencyStore::renew(&*self, &operation, &claim, &payload).await };
        Box::pin(Deadline::new(call, limit))
    }

    fn complete(self: Arc<Self>, operation: Operation, token: Token, done: Completion, limit: Duration) -> Call<bool> {
        let call = async move { IdempotencyStore::complete(&*self, &operation, &token, &done).await };
        Box::pin(Deadline::new(call, limit))
    }

    fn release(self: Arc<Self>, operation: Operation, token: Token, limit: Duration) -> Call<bool> {
        Box::pin(Deadline::new(async move { IdempotencyStore::release(&*self, &operation, &token).await }, limit))
    }

    fn scope(&self) -> Scope {
        IdempotencyStore::scope(self)
    }
}
