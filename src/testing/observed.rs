use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use crate::error::StoreError;
use crate::lock::LockKey;
use crate::lock::store::{Acquired, Claim, LockStore, Notifications, Released, Renewal, Token};
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

/// How long the tests wait for waiters, even on a slow machine.
const LONG: Duration = Duration::from_secs(60);

/// A store that records queued waiters. Clones share the record.
#[derive(Clone)]
pub(super) struct Observed<S> {
    inner: S,
    // How often each waiter got the reply that it is queued.
    queued: Arc<watch::Sender<HashMap<Token, u64>>>,
}

impl<S> Observed<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, queued: Arc::new(watch::Sender::new(HashMap::new())) }
    }

    /// Waits until `count` waiters are queued and listen. A waiter that learns that it is queued starts to listen, and then asks again.
    pub(super) async fn has_line_of(&self, count: usize) {
        let mut queued = self.queued.subscribe();
        let is_so = |queued: &HashMap<Token, u64>| queued.values().filter(|heard| **heard > 1).count() == count;
        assert!(timeout(LONG, queued.wait_for(is_so)).await.is_ok(), "the queue never had {count} waiters");
    }
}

impl<S: LockStore + Sync> LockStore for Observed<S> {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let answer = self.inner.acquire(lock, claim).await;
        self.queued.send_modify(|queued| match answer {
            Ok(Acquired::Queued { .. }) => *queued.entry(claim.token).or_default() += 1,
            Ok(_) => _ = queued.remove(&claim.token),
            Err(_) => {}
        });
        answer
    }

    async fn acquire_all(&self, wanted: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        self.inner.acquire_all(wanted).await
    }

    fn shard(&self, lock: &LockKey) -> u32 {
        self.inner.shard(lock)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        self.inner.renew(renewals).await
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        self.queued.send_modify(|queued| _ = queued.remove(token));
        self.inner.release(lock, token).await
    }

    async fn watch(&self, lock: &LockKey, queued: Option<&Token>) -> Notifications {
        self.inner.watch(lock, queued).await
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        self.inner.name(lock, token, name).await
    }

    async fn request_release(&self, lock: &LockKey) -> Result<(), StoreError> {
        self.inner.request_release(lock).await
    }

    async fn watch_release_requests(&self, lock: &LockKey) -> Notifications {
        self.inner.watch_release_requests(lock).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}
