//! What calls the origin for one key.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::CacheError;
use super::loaded::Loaded;
use super::store::CacheKey;
use crate::error::BoxError;
use crate::panics::discard;

/// Loads the value of one key.
pub(super) trait Loader<T>: Send {
    /// Loads the value.
    fn load(self) -> impl Future<Output = Result<Loaded<T>, CacheError>> + Send;

    /// Another process holds the lease. The load of this process begins only if that process does not store a value.
    fn on_lease_busy(&mut self) {}

    /// The keys of the batch that it may load together with its own.
    fn batch_keys(&self) -> Option<Arc<[CacheKey]>> {
        None
    }

    /// A permit for a load without the store. `None` if there are too many.
    fn permit(&self, origin: &Arc<Semaphore>) -> Option<Arc<OwnedSemaphorePermit>> {
        Arc::clone(origin).try_acquire_owned().ok().map(Arc::new)
    }
}

/// A function that loads the value of one key.
pub(super) struct LoaderFn<L>(pub(super) L);

impl<T, L, F, R, E> Loader<T> for LoaderFn<L>
where
    L: FnOnce() -> F + Send,
    F: Future<Output = Result<R, E>> + Send,
    R: Into<Loaded<T>>,
    E: Into<BoxError>,
{
    async fn load(self) -> Result<Loaded<T>, CacheError> {
        (self.0)().await.map(Into::into).map_err(|error| CacheError::load(error.into()))
    }
}

/// A loader that notes when it has returned.
pub(super) struct EndTracker<L> {
    pub(super) loader: L,
    pub(super) has_ended: Arc<AtomicBool>,
}

impl<T: Send, L: Loader<T>> Loader<T> for EndTracker<L> {
    async fn load(self) -> Result<Loaded<T>, CacheError> {
        let loaded = self.loader.load().await;
        self.has_ended.store(true, Ordering::Release);
        loaded
    }

    fn on_lease_busy(&mut self) {
        self.loader.on_lease_busy();
    }

    fn batch_keys(&self) -> Option<Arc<[CacheKey]>> {
        self.loader.batch_keys()
    }

    fn permit(&self, origin: &Arc<Semaphore>) -> Option<Arc<OwnedSemaphorePermit>> {
        self.loader.permit(origin)
    }
}

/// Runs a future of a user. A panic is an error.
pub(super) async fn without_panics<T>(
    future: impl Future<Output = Result<T, CacheError>> + Send,
) -> Result<T, CacheError> {
    let mut future = Box::pin(future);
    poll_fn(|cx| {
        catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))).unwrap_or_else(|payload| {
            discard(payload);
            Poll::Ready(Err(CacheError::Panicked))
        })
    })
    .await
}
