use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::lock_key::LockKey;
use super::store::{Acquired, Claim, LockStore, Notifications, Released, Renewal, Token};
use crate::error::StoreError;
use crate::reach::Reach;
use crate::store::deadline::Deadline;
use crate::store::shutdown::ShutdownTarget;

/// Nearly always one.
pub(super) type Claims = SmallVec<[(LockKey, Claim); 1]>;
pub(super) type Answers = SmallVec<[Acquired; 1]>;

pub(super) type Call<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A store of any type. Its calls own their arguments, so a pending call can continue without its caller.
pub(super) trait DynStore: Send + Sync {
    /// Takes all leases or none, with one answer for each.
    fn acquire(self: Arc<Self>, claims: Claims, call_timeout: Duration) -> Call<Result<Answers, StoreError>>;
    fn renew(self: Arc<Self>, renewals: Vec<Renewal>) -> Call<Result<Vec<bool>, StoreError>>;

    fn shard(&self, lock: &LockKey) -> u32;
    fn release(self: Arc<Self>, lock: LockKey, token: Token) -> Call<Result<Released, StoreError>>;
    fn watch(self: Arc<Self>, lock: LockKey, waiter: Option<Token>) -> Call<Notifications>;
    fn name(self: Arc<Self>, lock: LockKey, token: Token, name: Arc<str>) -> Call<Result<(), StoreError>>;
    fn request_release(self: Arc<Self>, lock: LockKey) -> Call<Result<(), StoreError>>;
    fn watch_release_requests(self: Arc<Self>, lock: LockKey) -> Call<Notifications>;
    fn reach(&self) -> Reach;
    fn add_to_shutdown(&self, target: &ShutdownTarget);
}

impl<S: LockStore + Send + Sync + 'static> DynStore for S {
    fn acquire(self: Arc<Self>, claims: Claims, call_timeout: Duration) -> Call<Result<Answers, StoreError>> {
        let call = async move {
            match &*claims {
                [(lock, claim)] => Ok(smallvec![LockStore::acquire(&*self, lock, claim).await?]),
                // Boxed to keep the future of a single lock small.
                claims => Ok(Box::pin(LockStore::acquire_all(&*self, claims)).await?.into()),
            }
        };
        Box::pin(Deadline::new(call, call_timeout))
    }

    fn shard(&self, lock: &LockKey) -> u32 {
        LockStore::shard(self, lock)
    }

    fn renew(self: Arc<Self>, renewals: Vec<Renewal>) -> Call<Result<Vec<bool>, StoreError>> {
        Box::pin(async move { LockStore::renew(&*self, &renewals).await })
    }

    fn release(self: Arc<Self>, lock: LockKey, token: Token) -> Call<Result<Released, StoreError>> {
        Box::pin(async move { LockStore::release(&*self, &lock, &token).await })
    }

    fn watch(self: Arc<Self>, lock: LockKey, waiter: Option<Token>) -> Call<Notifications> {
        Box::pin(async move { LockStore::watch(&*self, &lock, waiter.as_ref()).await })
    }

    fn name(self: Arc<Self>, lock: LockKey, token: Token, name: Arc<str>) -> Call<Result<(), StoreError>> {
        Box::pin(async move { LockStore::name(&*self, &lock, &token, &name).await })
    }

    fn request_release(self: Arc<Self>, lock: LockKey) -> Call<Result<(), StoreError>> {
        Box::pin(async move { LockStore::request_release(&*self, &lock).await })
    }

    fn watch_release_requests(self: Arc<Self>, lock: LockKey) -> Call<Notifications> {
        Box::pin(async move { LockStore::watch_release_requests(&*self, &lock).await })
    }

    fn reach(&self) -> Reach {
        LockStore::reach(self)
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        LockStore::add_to_shutdown(self, target);
    }
}
