use super::MemoryBackend;
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::store::{Acquired, Claim, LockRegistry, LockStore, Notifications, Released, Renewal, Token};
use crate::lock::{Cursor, ForceReleased, LockKey, LockPage, LockStatus};
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl LockStore for MemoryBackend {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        if claim.replicas.count > 0 {
            return Ok(Acquired::NotReplicated { replicas: 0 });
        }
        self.inner.locks.acquire(lock, claim)
    }

    async fn acquire_all(&self, wanted: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        if wanted.iter().any(|(_, claim)| claim.replicas.count > 0) {
            return Ok(vec![Acquired::NotReplicated { replicas: 0 }; wanted.len()]);
        }
        self.inner.locks.acquire_all(wanted)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        Ok(renewals.iter().map(|renewal| self.inner.locks.renew(renewal)).collect())
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        Ok(self.inner.locks.release(lock, token))
    }

    async fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        self.inner.locks.watch(lock, waiter)
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        self.inner.locks.name(lock, token, name);
        Ok(())
    }

    async fn request_release(&self, lock: &LockKey) -> Result<(), StoreError> {
        self.inner.asks.wake(lock);
        Ok(())
    }

    async fn watch_release_requests(&self, lock: &LockKey) -> Notifications {
        self.inner.asks.watch(lock, None)
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl LockRegistry for MemoryBackend {
    async fn inspect(&self, lock: &LockKey) -> Result<LockStatus, StoreError> {
        Ok(self.inner.locks.inspect(lock))
    }

    async fn force_release(&self, lock: &LockKey) -> Result<ForceReleased, StoreError> {
        Ok(self.inner.locks.force_release(lock))
    }

    async fn list(&self, name: &Key, from: Cursor, max: usize) -> Result<LockPage, StoreError> {
        Ok(self.inner.locks.list(name, from, max))
    }
}

impl MemoryBackend {
    /// Number of locks that are held or awaited, including expired leases that were not swept yet.
    #[must_use]
    pub fn locks(&self) -> usize {
        self.inner.locks.len()
    }
}
