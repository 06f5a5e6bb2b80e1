use std::sync::Arc;
use std::time::Duration;

use super::MemoryBackend;
use crate::delay_queue::store::{
    Ack, Admission, Claim, Claimed, DelayQueueStore, Extended, JobLease, Notifications, QueueKey, WorkerId,
};
use crate::delay_queue::{Cancelled, Changed, Counts, Due, JobId, NewJob, State, StoredJob};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl DelayQueueStore for MemoryBackend {
    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        self.inner.queues.push(queue, jobs, max_jobs)
    }

    async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.claim(finished, claim, now)))
    }

    async fn extend(
        &self,
        queue: &QueueKey,
        leases: &[JobLease],
        lease: Duration,
    ) -> Result<Vec<Extended>, StoreError> {
        Ok(self
            .inner
            .queues
            .with(queue, |queue, now| leases.iter().map(|held| queue.extend(held, lease, now)).collect()))
    }

    async fn watch(&self, queue: &QueueKey, _: WorkerId) -> Notifications {
        // All idle workers are woken, which is cheap within a process. The first one gets the job.
        let wakes = self.inner.queues.watch(queue);
        let watcher = Watcher { backend: self.clone(), queue: *queue };
        Notifications::new(wakes, Arc::new(watcher))
    }

    async fn get(&self, queue: &QueueKey, id: &JobId) -> Result<Option<StoredJob>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| queue.get(id)))
    }

    async fn cancel(&self, queue: &QueueKey, id: &JobId, keeps_unique: bool) -> Result<Cancelled, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.cancel(id, keeps_unique, now)))
    }

    async fn reschedule(&self, queue: &QueueKey, id: &JobId, due: Due) -> Result<Changed, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| {
            queue.change(id, |queue| {
                queue.unlink(id);
                queue.enqueue(id, now.due(due));
            })
        }))
    }

    async fn replace(&self, queue: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        self.inner.queues.replace(queue, id, payload)
    }

    async fn counts(&self, queue: &QueueKey) -> Result<Counts, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.counts(now)))
    }

    async fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> Result<Vec<StoredJob>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, _| queue.list(state, skip, limit)))
    }

    async fn pause(&self, queue: &QueueKey, is_paused: bool) -> Result<(), StoreError> {
        self.inner.queues.with(queue, |queue, _| {
            queue.is_paused = is_paused;
            queue.wake();
        });
        Ok(())
    }

    async fn purge(&self, queue: &QueueKey, limit: usize, keeps_unique: bool) -> Result<usize, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.purge(limit, keeps_unique, now)))
    }

    async fn release_unique(&self, queue: &QueueKey, key: &Key) -> Result<bool, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| queue.release_unique(key, now)))
    }

    async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| ids.iter().map(|id| queue.replay(id, now)).collect()))
    }

    async fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        Ok(self.inner.queues.with(queue, |queue, now| ids.iter().map(|id| queue.forget(id, now)).collect()))
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }

    fn identity(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.inner).addr())
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

/// When dropped with the subscription of a worker, removes the queue if it is unused: `QueueTable::with` does so after each operation.
struct Watcher {
    backend: MemoryBackend,
    queue: QueueKey,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.backend.inner.queues.with(&self.queue, |_, _| ());
    }
}

impl MemoryBackend {
    /// The number of jobs in all queues.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.inner.queues.len()
    }
}
