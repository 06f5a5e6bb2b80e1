//! A handle of a queue, which calls its store.

use std::sync::Arc;
use std::time::Duration;

use super::erased::{Call, DynStore};
use super::id::{JobId, UniqueIds};
use super::record::{NewJob, Unique};
use super::store::{Admission, QueueKey};
use super::worker::store_client::{CircuitWait, StoreClient};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::deadline::require_nonzero_deadline;

/// The store of a queue, and the limits of its jobs.
#[derive(Clone)]
pub(crate) struct QueueHandle {
    pub(super) store: Arc<dyn DynStore>,
    pub(super) name: Key,
    pub(crate) partitions: u16,
    pub(crate) max_jobs: u64,
    pub(crate) max_size: usize,
    pub(crate) max_attempts: u16,
    pub(super) deadline: Duration,
    pub(super) client: Arc<StoreClient>,
}

impl QueueHandle {
    /// Calls the store if the circuit allows it, with the deadline of the queue.
    pub(crate) async fn call<A>(
        &self,
        queue: QueueKey,
        operation: impl FnOnce(Arc<dyn DynStore>, Duration) -> Call<A>,
    ) -> Result<A, StoreError> {
        self.call_when_admitted(queue, &mut CircuitWait::none(), operation).await
    }

    /// Calls the store. While the circuit is open, waits until it admits this call as a probe, for as long as `wait` allows.
    async fn call_when_admitted<A>(
        &self,
        queue: QueueKey,
        wait: &mut CircuitWait,
        operation: impl FnOnce(Arc<dyn DynStore>, Duration) -> Call<A>,
    ) -> Result<A, StoreError> {
        require_nonzero_deadline(self.deadline)?;
        self.client.admit(&queue, wait).await?;
        let reply = operation(Arc::clone(&self.store), self.deadline).await;
        self.client.record_reply(&queue, &reply);
        reply
    }

    /// Pushes jobs to one partition of the queue.
    pub(crate) async fn push(
        &self,
        queue: QueueKey,
        jobs: Vec<NewJob>,
        wait: &mut CircuitWait,
    ) -> Result<Vec<Admission>, StoreError> {
        let (pushing, max) = (self.client.pushing(jobs.len()), self.max_jobs);
        let reply =
            self.call_when_admitted(queue, wait, |store, deadline| store.push(queue, jobs, max, deadline)).await;
        pushing.answered(&reply);
        reply
    }

    /// The partition of the queue that holds a job.
    pub(crate) fn partition_of(&self, id: &JobId) -> QueueKey {
        self.partition(if self.partitions > 1 { id.as_key().spread(self.partitions) } else { 0 })
    }

    pub(crate) fn partition(&self, partition: u16) -> QueueKey {
        QueueKey::new(self.name).with_partition(partition)
    }

    /// Whether both have the same store, name and partitions.
    pub(super) fn is_same_queue(&self, other: &Self) -> bool {
        let is_same_store = Arc::ptr_eq(&self.store, &other.store)
            || self.store.identity().is_some_and(|identity| other.store.identity() == Some(identity));
        is_same_store && self.name == other.name && self.partitions == other.partitions
    }

    /// An id made by `make`. In a split queue, a unique job needs an id in the partition of its key, so that all jobs of the key share that
    /// partition. If the first id is not, generates further ones.
    pub(crate) fn generate_id(
        &self,
        unique: Option<&Unique>,
        make: impl FnOnce() -> Result<JobId, StoreError>,
    ) -> Result<JobId, StoreError> {
        let mut id = make()?;
        if let Some(Unique { key, .. }) = unique.filter(|_| self.partitions > 1) {
            let (partition, mut ids) = (key.spread(self.partitions), UniqueIds::default());
            // On average one of `partitions` ids falls into the partition. The bound guards against a bug, not against bad luck.
            for _ in 0..100 * u32::from(self.partitions) {
                if id.as_key().spread(self.partitions) == partition {
                    break;
                }
                id = ids.next()?;
            }
        }
        Ok(id)
    }
}
