//! Macros for stores that delegate most methods to an inner store.

/// Delegates methods of a `DelayQueueStore` in an `impl`: `delegate_queue!(inner: get, cancel)` calls `self.inner`.
macro_rules! delegate_queue {
    ($inner:tt: $($method:ident),+) => {
        $(delegate_queue!(@$method $inner);)+
    };
    (@$method:ident $inner:tt ($($name:ident: $kind:ty),*) -> $answer:ty) => {
        async fn $method(&self, queue: &tollgate::delay_queue::store::QueueKey, $($name: $kind),*) -> $answer {
            tollgate::delay_queue::store::DelayQueueStore::$method(&self.$inner, queue, $($name),*).await
        }
    };
    (@push $inner:tt) => {
        delegate_queue!(@push $inner (jobs: &[tollgate::delay_queue::NewJob], max_jobs: u64)
            -> Result<Vec<tollgate::delay_queue::store::Admission>, tollgate::StoreError>);
    };
    (@extend $inner:tt) => {
        delegate_queue!(@extend $inner (leases: &[tollgate::delay_queue::store::JobLease], lease: std::time::Duration)
            -> Result<Vec<tollgate::delay_queue::store::Extended>, tollgate::StoreError>);
    };
    (@watch $inner:tt) => {
        delegate_queue!(@watch $inner (worker: tollgate::delay_queue::store::WorkerId) -> tollgate::lock::store::Notifications);
    };
    (@get $inner:tt) => {
        delegate_queue!(@get $inner (id: &tollgate::delay_queue::JobId)
            -> Result<Option<tollgate::delay_queue::StoredJob>, tollgate::StoreError>);
    };
    (@cancel $inner:tt) => {
        delegate_queue!(@cancel $inner (id: &tollgate::delay_queue::JobId, keeps_unique: bool)
            -> Result<tollgate::delay_queue::Cancelled, tollgate::StoreError>);
    };
    (@reschedule $inner:tt) => {
        delegate_queue!(@reschedule $inner (id: &tollgate::delay_queue::JobId, due: tollgate::delay_queue::Due)
            -> Result<tollgate::delay_queue::Changed, tollgate::StoreError>);
    };
    (@replace $inner:tt) => {
        delegate_queue!(@replace $inner (id: &tollgate::delay_queue::JobId, payload: &[u8])
            -> Result<tollgate::delay_queue::Changed, tollgate::StoreError>);
    };
    (@counts $inner:tt) => {
        delegate_queue!(@counts $inner () -> Result<tollgate::delay_queue::Counts, tollgate::StoreError>);
    };
    (@list $inner:tt) => {
        delegate_queue!(@list $inner (state: tollgate::delay_queue::State, skip: u64, limit: usize)
            -> Result<Vec<tollgate::delay_queue::StoredJob>, tollgate::StoreError>);
    };
    (@pause $inner:tt) => {
        delegate_queue!(@pause $inner (is_paused: bool) -> Result<(), tollgate::StoreError>);
    };
    (@purge $inner:tt) => {
        delegate_queue!(@purge $inner (limit: usize, keeps_unique: bool) -> Result<usize, tollgate::StoreError>);
    };
    (@release_unique $inner:tt) => {
        delegate_queue!(@release_unique $inner (key: &tollgate::Key) -> Result<bool, tollgate::StoreError>);
    };
    (@replay $inner:tt) => {
        delegate_queue!(@replay $inner (ids: &[tollgate::delay_queue::JobId]) -> Result<Vec<bool>, tollgate::StoreError>);
    };
    (@forget $inner:tt) => {
        delegate_queue!(@forget $inner (ids: &[tollgate::delay_queue::JobId]) -> Result<Vec<bool>, tollgate::StoreError>);
    };
    (@scope $inner:tt) => {
        fn reach(&self) -> tollgate::Reach {
            tollgate::delay_queue::store::DelayQueueStore::reach(&self.$inner)
        }
    };
}

/// Delegates methods of a `LockStore` in an `impl`: `delegate_lock!(inner: renew, release)` calls `self.inner`.
macro_rules! delegate_lock {
    ($inner:tt: $($method:ident),+) => {
        $(delegate_lock!(@$method $inner);)+
    };
    (@acquire $inner:tt) => {
        async fn acquire(
            &self,
            lock: &tollgate::lock::LockKey,
            claim: &tollgate::lock::store::Claim,
        ) -> Result<tollgate::lock::store::Acquired, tollgate::StoreError> {
            tollgate::lock::store::LockStore::acquire(&self.$inner, lock, claim).await
        }
    };
    (@acquire_all $inner:tt) => {
        async fn acquire_all(
            &self,
            wanted: &[(tollgate::lock::LockKey, tollgate::lock::store::Claim)],
        ) -> Result<Vec<tollgate::lock::store::Acquired>, tollgate::StoreError> {
            tollgate::lock::store::LockStore::acquire_all(&self.$inner, wanted).await
        }
    };
    (@renew $inner:tt) => {
        async fn renew(&self, renewals: &[tollgate::lock::store::Renewal]) -> Result<Vec<bool>, tollgate::StoreError> {
            tollgate::lock::store::LockStore::renew(&self.$inner, renewals).await
        }
    };
    (@release $inner:tt) => {
        async fn release(
            &self,
            lock: &tollgate::lock::LockKey,
            token: &tollgate::lock::store::Token,
        ) -> Result<tollgate::lock::store::Released, tollgate::StoreError> {
            tollgate::lock::store::LockStore::release(&self.$inner, lock, token).await
        }
    };
    (@watch $inner:tt) => {
        async fn watch(
            &self,
            lock: &tollgate::lock::LockKey,
            waiter: Option<&tollgate::lock::store::Token>,
        ) -> tollgate::lock::store::Notifications {
            tollgate::lock::store::LockStore::watch(&self.$inner, lock, waiter).await
        }
    };
    (@scope $inner:tt) => {
        fn reach(&self) -> tollgate::Reach {
            tollgate::lock::store::LockStore::reach(&self.$inner)
        }
    };
}

#[allow(unused_imports, reason = "each test uses a part of it")]
pub(crate) use {delegate_lock, delegate_queue};
