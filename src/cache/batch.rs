//! One call of a loader for several keys.

use std::collections::HashMap;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore, watch};

use super::error::CacheError;
use super::loaded::Loaded;
use super::loader::{Loader, without_panics};
use super::store::CacheKey;

type Values<K, T> = HashMap<K, Loaded<T>>;
type Loading<K, T> = Pin<Box<dyn Future<Output = Result<Values<K, T>, CacheError>> + Send>>;

/// The keys of one call of `get_or_fill_all`. Each key is looked up on its own. If a key is missing, its load claims the lease. Once every
/// key is found, is leased, or waits for another process, one member calls the loader once, for all leased keys.
pub(super) struct Batch<K, T> {
    keys: Arc<[CacheKey]>,
    loader: Box<dyn Fn(Vec<K>) -> Loading<K, T> + Send + Sync>,
    pending: watch::Sender<usize>,
    leased: Mutex<Leased<K>>,
    loaded: OnceCell<Result<Mutex<Values<K, T>>, CacheError>>,
    permit: Mutex<Option<Arc<OwnedSemaphorePermit>>>,
}

struct Leased<K> {
    keys: Vec<K>,
    is_loading: bool,
}

impl<K: Clone + Eq + Hash + Send + Sync + 'static, T: Send + 'static> Batch<K, T> {
    pub(super) fn new(
        keys: Arc<[CacheKey]>,
        loader: impl Fn(Vec<K>) -> Loading<K, T> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            keys,
            loader: Box::new(loader),
            pending: watch::Sender::new(0),
            leased: Mutex::new(Leased { keys: Vec::new(), is_loading: false }),
            loaded: OnceCell::new(),
            permit: Mutex::new(None),
        })
    }

    /// The loader of one key.
    pub(super) fn member(self: &Arc<Self>, key: K) -> Member<K, T> {
        self.pending.send_modify(|pending| *pending += 1);
        Member { batch: Arc::clone(self), key, has_arrived: false }
    }

    fn leased(&self) -> MutexGuard<'_, Leased<K>> {
        locked(&self.leased)
    }

    async fn load(&self) -> Result<Mutex<Values<K, T>>, CacheError> {
        let keys = {
            let mut leased = self.leased();
            leased.is_loading = true;
            leased.keys.clone()
        };
        without_panics(async { (self.loader)(keys).await }).await.map(Mutex::new)
    }
}

/// The loader of one key in a batch.
pub(super) struct Member<K, T> {
    batch: Arc<Batch<K, T>>,
    key: K,
    has_arrived: bool,
}

impl<K, T> Member<K, T> {
    /// The batch need not wait for this key any longer.
    fn arrive(&mut self) {
        if !std::mem::replace(&mut self.has_arrived, true) {
            self.batch.pending.send_modify(|pending| *pending -= 1);
        }
    }
}

impl<K: Clone + Eq + Hash + Send + Sync + 'static, T: Send + 'static> Loader<T> for Member<K, T> {
    fn on_lease_busy(&mut self) {
        self.arrive();
    }

    async fn load(mut self) -> Result<Loaded<T>, CacheError> {
        let is_late = {
            let mut leased = self.batch.leased();
            if !leased.is_loading {
                leased.keys.push(self.key.clone());
            }
            leased.is_loading
        };
        self.arrive();
        let Self { batch, key, .. } = &self;
        if is_late {
            // Another process held the lease of this key when the batch was loaded, and has failed since. Load this key alone.
            let mut values = (batch.loader)(vec![key.clone()]).await?;
            return Ok(values.remove(key).unwrap_or_else(Loaded::absent));
        }
        // The sender lives in the batch, so this cannot fail.
        let _ = batch.pending.subscribe().wait_for(|pending| *pending == 0).await;
        match batch.loaded.get_or_init(|| batch.load()).await {
            Ok(values) => Ok(locked(values).remove(key).unwrap_or_else(Loaded::absent)),
            Err(error) => Err(error.clone()),
        }
    }

    fn batch_keys(&self) -> Option<Arc<[CacheKey]>> {
        Some(Arc::clone(&self.batch.keys))
    }

    /// All members share one permit, since the loader is called once.
    fn permit(&self, origin: &Arc<Semaphore>) -> Option<Arc<OwnedSemaphorePermit>> {
        let mut permit = locked(&self.batch.permit);
        if permit.is_none() {
            *permit = Arc::clone(origin).try_acquire_owned().ok().map(Arc::new);
        }
        permit.clone()
    }
}

impl<K, T> Drop for Member<K, T> {
    fn drop(&mut self) {
        self.arrive();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
