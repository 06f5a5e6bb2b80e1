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
use crate::reach::Reach;
use crate::store::deadline::Deadline;
use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;

pub(crate) type Call<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// An object-safe [`DelayQueueStore`]. The futures own their arguments. The last argument is the deadline of the call.
pub(crate) trait DynStore: Send + Sync {
    fn push(self: Arc<Self>, queue: QueueKey, jobs: Vec<NewJob>, max: u64, deadline: Duration) -> Call<Vec<Admission>>;
    fn claim(self: Arc<Self>, queue: QueueKey, finished: Vec<Ack>, claim: Claim, deadline: Duration) -> Call<Claimed>;
    fn extend(
        self: Arc<Self>,
        queue: QueueKey,
        leases: Vec<JobLease>,
        lease: Duration,
        deadline: Duration,
    ) -> Call<Vec<Extended>>;
    fn watch(self: Arc<Self>, queue: QueueKey, worker: WorkerId)
    -> Pin<Box<dyn Future<Output = Notifications> + Send>>;
    fn get(self: Arc<Self>, queue: QueueKey, id: JobId, deadline: Duration) -> Call<Option<StoredJob>>;
    fn cancel(self: Arc<Self>, queue: QueueKey, id: JobId, keeps: bool, deadline: Duration) -> Call<Cancelled>;
    fn reschedule(self: Arc<Self>, queue: QueueKey, id: JobId, due: Due, deadline: Duration) -> Call<Changed>;
    fn replace(self: Arc<Self>, queue: QueueKey, id: JobId, payload: Vec<u8>, deadline: Duration) -> Call<Changed>;
    fn counts(self: Arc<Self>, queue: QueueKey, deadline: Duration) -> Call<Counts>;
    fn list(
        self: Arc<Self>,
        queue: QueueKey,
        state: State,
        skip: u64,
        count: usize,
        deadline: Duration,
    ) -> Call<Vec<StoredJob>>;
    fn pause(self: Arc<Self>, queue: QueueKey, is_paused: bool, deadline: Duration) -> Call<()>;
    fn purge(self: Arc<Self>, queue: QueueKey, count: usize, keeps: bool, deadline: Duration) -> Call<usize>;
    fn release_unique(self: Arc<Self>, queue: QueueKey, key: Key, deadline: Duration) -> Call<bool>;
    fn replay(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, deadline: Duration) -> Call<Vec<bool>>;
    fn forget(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, deadline: Duration) -> Call<Vec<bool>>;
    fn reach(&self) -> Reach;
    fn identity(&self) -> Option<usize>;
    fn add_to_shutdown(&self, target: &ShutdownTarget);
}

fn with_deadline<T>(call: impl Future<Output = Result<T, StoreError>> + Send + 'static, deadline: Duration) -> Call<T> {
    Box::pin(Deadline::new(call, deadline))
}

impl<S: DelayQueueStore + Send + Sync + 'static> DynStore for S {
    fn push(self: Arc<Self>, queue: QueueKey, jobs: Vec<NewJob>, max: u64, deadline: Duration) -> Call<Vec<Admission>> {
        with_deadline(async move { DelayQueueStore::push(&*self, &queue, &jobs, max).await }, deadline)
    }

    fn claim(self: Arc<Self>, queue: QueueKey, finished: Vec<Ack>, claim: Claim, deadline: Duration) -> Call<Claimed> {
        with_deadline(async move { DelayQueueStore::claim(&*self, &queue, &finished, &claim).await }, deadline)
    }

    fn extend(
        self: Arc<Self>,
        queue: QueueKey,
        leases: Vec<JobLease>,
        lease: Duration,
        deadline: Duration,
    ) -> Call<Vec<Extended>> {
        with_deadline(async move { DelayQueueStore::extend(&*self, &queue, &leases, lease).await }, deadline)
    }

    fn watch(
        self: Arc<Self>,
        queue: QueueKey,
        worker: WorkerId,
    ) -> Pin<Box<dyn Future<Output = Notifications> + Send>> {
        Box::pin(async move { DelayQueueStore::watch(&*self, &queue, worker).await })
    }

    fn get(self: Arc<Self>, queue: QueueKey, id: JobId, deadline: Duration) -> Call<Option<StoredJob>> {
        with_deadline(async move { DelayQueueStore::get(&*self, &queue, &id).await }, deadline)
    }

    fn cancel(self: Arc<Self>, queue: QueueKey, id: JobId, keeps: bool, deadline: Duration) -> Call<Cancelled> {
        with_deadline(async move { DelayQueueStore::cancel(&*self, &queue, &id, keeps).await }, deadline)
    }

    fn reschedule(self: Arc<Self>, queue: QueueKey, id: JobId, due: Due, deadline: Duration) -> Call<Changed> {
        with_deadline(async move { DelayQueueStore::reschedule(&*self, &queue, &id, due).await }, deadline)
    }

    fn replace(self: Arc<Self>, queue: QueueKey, id: JobId, payload: Vec<u8>, deadline: Duration) -> Call<Changed> {
        with_deadline(async move { DelayQueueStore::replace(&*self, &queue, &id, &payload).await }, deadline)
    }

    fn counts(self: Arc<Self>, queue: QueueKey, deadline: Duration) -> Call<Counts> {
        with_deadline(async move { DelayQueueStore::counts(&*self, &queue).await }, deadline)
    }

    fn list(
        self: Arc<Self>,
        queue: QueueKey,
        state: State,
        skip: u64,
        count: usize,
        deadline: Duration,
    ) -> Call<Vec<StoredJob>> {
        with_deadline(async move { DelayQueueStore::list(&*self, &queue, state, skip, count).await }, deadline)
    }

    fn pause(self: Arc<Self>, queue: QueueKey, is_paused: bool, deadline: Duration) -> Call<()> {
        with_deadline(async move { DelayQueueStore::pause(&*self, &queue, is_paused).await }, deadline)
    }

    fn purge(self: Arc<Self>, queue: QueueKey, count: usize, keeps: bool, deadline: Duration) -> Call<usize> {
        with_deadline(async move { DelayQueueStore::purge(&*self, &queue, count, keeps).await }, deadline)
    }

    fn release_unique(self: Arc<Self>, queue: QueueKey, key: Key, deadline: Duration) -> Call<bool> {
        with_deadline(async move { DelayQueueStore::release_unique(&*self, &queue, &key).await }, deadline)
    }

    fn replay(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, deadline: Duration) -> Call<Vec<bool>> {
        with_deadline(async move { DelayQueueStore::replay(&*self, &queue, &ids).await }, deadline)
    }

    fn forget(self: Arc<Self>, queue: QueueKey, ids: Vec<JobId>, deadline: Duration) -> Call<Vec<bool>> {
        with_deadline(async move { DelayQueueStore::forget(&*self, &queue, &ids).await }, deadline)
    }

    fn reach(&self) -> Reach {
        DelayQueueStore::reach(self)
    }

    fn identity(&self) -> Option<usize> {
        DelayQueueStore::identity(self)
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        DelayQueueStore::add_to_shutdown(self, target);
    }
}
