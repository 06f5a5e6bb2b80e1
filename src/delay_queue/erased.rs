use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::id::JobId;
use super::record::{Due, NewJob, StoredJob};
use super::store::{
    Ack, Admission, Cancelled, Changed, Claim, Claimed, Counts, DelayQueueStore, Extended, JobLease, QueueKey, State,
    WorkerId,
};
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::{Notifications, Reach};
use crate::store::deadline::Deadline;

pub(crate) type Call<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A store of any type. Its calls own what they need, and end with their deadline, which is the last argument.
pub(crate) trait DynStore: Send + Sync {
    fn push(self: Arc<Self>, to: QueueKey, jobs: Vec<NewJob>, max: u64, limit: Duration) -> Call<Vec<Admission>>;
    fn claim(self: Arc<Self>, from: QueueKey, finished: Vec<Ack>, claim: Claim, limit: Duration) -> Call<Claimed>;
    fn extend(
        self: Arc<Self>,
        of: QueueKey,
        tickets: Vec<JobLease>,
        lease: Duration,
        limit: Duration,
    ) -> Call<Vec<Extended>>;
    fn watch(self: Arc<Self>, queue: QueueKey, worker: WorkerId)
    -> Pin<Box<dyn Future<Output = Notifications> + Send>>;
    fn get(self: Arc<Self>, queue: QueueKey, id: JobId, limit: Duration) -> Call<Option<StoredJob>>;
    fn cancel(self: Arc<Self>, queue: QueueKey, id: JobId, keeps: bool, limit: Duration) -> Call<Cancelled>;
    fn reschedule(self: Arc<Self>, queue: QueueKey, id: JobId, due: Due, limit: Duration) -> Call<Changed>;
    fn replace(self: Arc<Self>, queue: QueueKey, id: JobId, payload: Vec<u8>, limit: Duration) -> Call<Changed>;
    fn counts(self: Arc<Self>, queue: QueueKey, limit: Duration) -> Call<Counts>;
    fn list(
        self: Arc<Self>,
        queue: QueueKey,
        state: State,
        skip: u64,
        count: usize,
        limit: Duration,
    ) -> Call<Vec<StoredJob>>;
    fn pause(self: Arc<Self>, queue: QueueKey, is_paused: bool, limit: Duration) -> Call<()>;
    fn purge(self: Arc<Self>, queue: QueueKey, count: usize, keeps: bool, limit: Duration) -> Call<usize>;
    fn release_unique(self: Arc<Self>, queue: QueueKey, key: Key, limit: Duration) -> Call<bool>;
    fn replay(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, limit: Duration) -> Call<Vec<bool>>;
    fn forget(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, limit: Duration) -> Call<Vec<bool>>;
    fn scope(&self) -> Reach;
    fn identity(&self) -> Option<usize>;
}

fn bounded<T>(call: impl Future<Output = Result<T, StoreError>> + Send + 'static, limit: Duration) -> Call<T> {
    Box::pin(Deadline::new(call, limit))
}

impl<S: DelayQueueStore + Send + Sync + 'static> DynStore for S {
    fn push(self: Arc<Self>, to: QueueKey, jobs: Vec<NewJob>, max: u64, limit: Duration) -> Call<Vec<Admission>> {
        bounded(async move { DelayQueueStore::push(&*self, &to, &jobs, max).await }, limit)
    }

    fn claim(self: Arc<Self>, from: QueueKey, finished: Vec<Ack>, claim: Claim, limit: Duration) -> Call<Claimed> {
        bounded(async move { DelayQueueStore::claim(&*self, &from, &finished, &claim).await }, limit)
    }

    fn extend(
        self: Arc<Self>,
        of: QueueKey,
        tickets: Vec<JobLease>,
        lease: Duration,
        limit: Duration,
    ) -> Call<Vec<Extended>> {
        bounded(async move { DelayQueueStore::extend(&*self, &of, &tickets, lease).await }, limit)
    }

    fn watch(
        self: Arc<Self>,
        queue: QueueKey,
        worker: WorkerId,
    ) -> Pin<Box<dyn Future<Output = Notifications> + Send>> {
        Box::pin(async move { DelayQueueStore::watch(&*self, &queue, worker).await })
    }

    fn get(self: Arc<Self>, queue: QueueKey, id: JobId, limit: Duration) -> Call<Option<StoredJob>> {
        bounded(async move { DelayQueueStore::get(&*self, &queue, &id).await }, limit)
    }

    fn cancel(self: Arc<Self>, queue: QueueKey, id: JobId, keeps: bool, limit: Duration) -> Call<Cancelled> {
        bounded(async move { DelayQueueStore::cancel(&*self, &queue, &id, keeps).await }, limit)
    }

    fn reschedule(self: Arc<Self>, queue: QueueKey, id: JobId, due: Due, limit: Duration) -> Call<Changed> {
        bounded(async move { DelayQueueStore::reschedule(&*self, &queue, &id, due).await }, limit)
    }

    fn replace(self: Arc<Self>, queue: QueueKey, id: JobId, payload: Vec<u8>, limit: Duration) -> Call<Changed> {
        bounded(async move { DelayQueueStore::replace(&*self, &queue, &id, &payload).await }, limit)
    }

    fn counts(self: Arc<Self>, queue: QueueKey, limit: Duration) -> Call<Counts> {
        bounded(async move { DelayQueueStore::counts(&*self, &queue).await }, limit)
    }

    fn list(
        self: Arc<Self>,
        queue: QueueKey,
        state: State,
        skip: u64,
        count: usize,
        limit: Duration,
    ) -> Call<Vec<StoredJob>> {
        bounded(async move { DelayQueueStore::list(&*self, &queue, state, skip, count).await }, limit)
    }

    fn pause(self: Arc<Self>, queue: QueueKey, is_paused: bool, limit: Duration) -> Call<()> {
        bounded(async move { DelayQueueStore::pause(&*self, &queue, is_paused).await }, limit)
    }

    fn purge(self: Arc<Self>, queue: QueueKey, count: usize, keeps: bool, limit: Duration) -> Call<usize> {
        bounded(async move { DelayQueueStore::purge(&*self, &queue, count, keeps).await }, limit)
    }

    fn release_unique(self: Arc<Self>, queue: QueueKey, key: Key, limit: Duration) -> Call<bool> {
        bounded(async move { DelayQueueStore::release_unique(&*self, &queue, &key).await }, limit)
    }

    fn replay(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, limit: Duration) -> Call<Vec<bool>> {
        bounded(async move { DelayQueueStore::replay(&*self, &queue, &ids).await }, limit)
    }

    fn forget(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, limit: Duration) -> Call<Vec<bool>> {
        bounded(async move { DelayQueueStore::forget(&*self, &queue, &ids).await }, limit)
    }

    fn scope(&self) -> Reach {
        DelayQueueStore::scope(self)
    }

    fn identity(&self) -> Option<usize> {
        DelayQueueStore::identity(self)
    }
}
