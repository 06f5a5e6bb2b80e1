use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;

use super::error::QueueError;
use super::id::JobId;
use super::queue_handle::QueueHandle;
#[cfg(doc)]
use super::record::UniqueFor;
use super::store::{Cancelled, MAX_BATCH};

type ResultFuture<T> = Pin<Box<dyn Future<Output = Result<T, QueueError>> + Send>>;

/// A cancellation to make: `.await` it. See [`DelayQueue::cancel`](super::DelayQueue::cancel).
#[must_use = "nothing is cancelled until this is awaited"]
pub struct Cancel {
    handle: QueueHandle,
    id: JobId,
    keeps_unique: bool,
}

impl Cancel {
    pub(crate) const fn new(handle: QueueHandle, id: JobId) -> Self {
        Self { handle, id, keeps_unique: false }
    }

    /// Keeps a unique key that the job holds for a [time](UniqueFor::Time), so that a push with that key changes nothing until the time is over.
    /// By default the key is released.
    pub fn keep_unique(mut self) -> Self {
        self.keeps_unique = true;
        self
    }
}

impl IntoFuture for Cancel {
    type Output = Result<Cancelled, QueueError>;
    type IntoFuture = ResultFuture<Cancelled>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let Self { handle, id, keeps_unique } = self;
            let queue = handle.partition_of(&id);
            Ok(handle.call(queue, |store, deadline| store.cancel(queue, id, keeps_unique, deadline)).await?)
        })
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, keeps_unique, .. } = self;
        f.debug_struct("Cancel").field("id", id).field("keeps_unique", keeps_unique).finish_non_exhaustive()
    }
}

/// A purge to make: `.await` it. See [`DelayQueue::purge`](super::DelayQueue::purge).
#[must_use = "nothing is removed until this is awaited"]
pub struct Purge {
    handle: QueueHandle,
    keeps_unique: bool,
}

impl Purge {
    pub(crate) const fn new(handle: QueueHandle) -> Self {
        Self { handle, keeps_unique: false }
    }

    /// Keeps the unique keys that jobs hold for a [time](UniqueFor::Time), so that a push with such a key changes nothing until the time is over.
    /// By default the keys are released.
    pub fn keep_unique(mut self) -> Self {
        self.keeps_unique = true;
        self
    }
}

impl IntoFuture for Purge {
    type Output = Result<u64, QueueError>;
    type IntoFuture = ResultFuture<u64>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let Self { handle, keeps_unique } = self;
            let mut removed = 0;
            for queue in (0..handle.partitions).map(|partition| handle.partition(partition)) {
                let mut left = handle.call(queue, |store, deadline| store.counts(queue, deadline)).await?.waiting;
                while left > 0 {
                    let size = usize::try_from(left).unwrap_or(usize::MAX).min(MAX_BATCH);
                    let purged =
                        handle.call(queue, |store, deadline| store.purge(queue, size, keeps_unique, deadline)).await?;
                    let batch = purged as u64;
                    (removed, left) = (removed + batch, left.saturating_sub(batch));
                    if batch == 0 {
                        break;
                    }
                }
            }
            Ok(removed)
        })
    }
}

impl fmt::Debug for Purge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Purge").field("keeps_unique", &self.keeps_unique).finish_non_exhaustive()
    }
}
