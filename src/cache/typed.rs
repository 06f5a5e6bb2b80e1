use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::error::CacheError;
use super::exists_filter::ExistsFilter;
use super::fill::{Before, Filler, loading};
use super::flights::{Flights, LoadWaiter};
use super::loaded::Loaded;
use super::metrics::Served;
use super::options::Options;
use super::store::{CacheKey, CacheStore, Claim, Entry, EntryId, NewEntry, Token};
use super::store_client::StoreClient;
use crate::codec::{Codec, Json};
use crate::error::{BoxError, ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;
use crate::store::shutdown::ShutdownTarget;

/// A cache of values, shared by all processes that use the same backend, whose misses are loaded once.
///
/// Cheap to clone. Clones share their loads. All caches with the same name on the same backend share their entries, so give each type of
/// value a name of its own.
///
/// If the last clone is dropped, loads in progress are cancelled, and their callers get [`CacheError::Closed`].
pub struct Cache<T, C = Json> {
    filler: Filler<C>,
    filter: Option<ExistsFilter>,
    flights: Arc<Flights<T>>,
    tasks: Arc<Mutex<JoinSet<()>>>,
    value: PhantomData<fn() -> T>,
}

/// The loads that the current task is in, the innermost first.
struct Chain {
    // The address of the table of loads, which stands for the cache.
    flights: usize,
    key: CacheKey,
    outer: Option<Arc<Self>>,
}

tokio::task_local! {
    static CHAIN: Arc<Chain>;
}

impl Chain {
    fn has(&self, flights: usize, key: &CacheKey) -> bool {
        let mut next = Some(self);
        while let Some(chain) = next {
            if chain.flights == flights && chain.key == *key {
                return true;
            }
            next = chain.outer.as_deref();
        }
        false
    }
}

#[cfg(feature = "json")]
impl<T: Send + Sync + 'static> Cache<T> {
    /// The cache `name` of `store`, which is a [backend](crate::backend). Values are stored as JSON, and are fresh for `fresh_for`.
    pub fn new(store: impl CacheStore + Send + Sync + 'static, name: impl Into<Key>, fresh_for: Duration) -> Self {
        Self::with_codec(store, name, fresh_for, Json)
    }
}

impl<T: Send + Sync + 'static, C> Cache<T, C> {
    /// The cache `name` of `store`, with values encoded by `codec`.
    pub fn with_codec(
        store: impl CacheStore + Send + Sync + 'static,
        name: impl Into<Key>,
        fresh_for: Duration,
        codec: C,
    ) -> Self {
        let name = name.into();
        let filler = Filler {
            options: Arc::new(Options::new(name, fresh_for)),
            client: StoreClient::new(Arc::new(store), name),
            codec: Arc::new(codec),
            origin: Arc::new(Semaphore::new(ORIGIN_LIMIT)),
        };
        let flights = Arc::new(Flights::default());
        filler.client.store.add_to_shutdown(&ShutdownTarget::new(&flights));
        Self { filler, filter: None, flights, tasks: Arc::default(), value: PhantomData }
    }

    fn with(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(Arc::make_mut(&mut self.filler.options));
        self
    }

    /// How long a stale value is served after it was fresh: while one caller loads a new one, and while the origin fails. Defaults to zero.
    #[must_use]
    pub fn stale_for(self, time: Duration) -> Self {
        self.with(|options| options.stale_for = time.min(NewEntry::MAX_TTL))
    }

    /// How long the absence of a value is cached. With zero it is not. Defaults to ten seconds, or to the time for values if that is
    /// shorter.
    #[must_use]
    pub fn absent_for(self, time: Duration) -> Self {
        self.with(|options| options.absent_for = time.min(NewEntry::MAX_TTL))
    }

    /// By which part, at most, the time for which an entry is fresh is shortened at random, so that entries that were stored together do not
    /// expire together. From 0 to 1; defaults to 0.1.
    #[must_use]
    pub fn jitter(self, part: f64) -> Self {
        let part = if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) };
        self.with(|options| options.jitter = part)
    }

    /// How early a value may be loaded again while it is still fresh, as a multiple of the time that its last load took. The nearer its
    /// end, the likelier a call starts a load in the background (XFetch). Defaults to 1; with 0, never.
    #[must_use]
    pub fn early_refresh(self, factor: f64) -> Self {
        let factor = if factor.is_nan() { 0.0 } else { factor.max(0.0) };
        self.with(|options| options.early_refresh = factor)
    }

    /// How long a caller waits for a new value before it gets the stale one. The load goes on. Defaults to zero.
    #[must_use]
    pub fn soft_timeout(self, time: Duration) -> Self {
        self.with(|options| options.soft_timeout = time.min(NewEntry::MAX_TTL))
    }

    /// How long no process loads a key again after a load has failed. Defaults to one second.
    #[must_use]
    pub fn error_for(self, time: Duration) -> Self {
        self.with(|options| options.error_for = time.min(NewEntry::MAX_TTL))
    }

    /// How long a load may take, and how long a caller waits for that of another process. Defaults to 30 seconds.
    #[must_use]
    pub fn load_timeout(self, time: Duration) -> Self {
        self.with(|options| options.load_timeout = time.min(NewEntry::MAX_TTL))
    }

    /// How long a load is protected without a sign of life of its process. After that another process may load. Defaults to two seconds.
    #[must_use]
    pub fn lease(self, time: Duration) -> Self {
        self.with(|options| options.lease = time.clamp(Claim::MIN_LEASE, Claim::MAX_LEASE))
    }

    /// The largest encoded value in bytes. A larger one is returned to its callers, and not cached. Defaults to 1 MiB.
    #[must_use]
    pub fn max_len(self, bytes: usize) -> Self {
        self.with(|options| options.max_len = bytes)
    }

    /// The largest number of loads at a time in this process while the store fails. Further callers get [`CacheError::OriginLimit`].
    /// Defaults to 16.
    #[must_use]
    pub fn origin_limit(mut self, loads: usize) -> Self {
        self.filler.origin = Arc::new(Semaphore::new(loads.min(Semaphore::MAX_PERMITS)));
        self
    }

    /// A filter with the keys that exist. If it excludes a key without an entry, [`get_or_fill`](Self::get_or_fill) returns `None` without a
    /// load, and without an entry for the absence. [`set`](Self::set) adds the key to the filter before it stores a value. The filter has its
    /// own deadline. If its store fails, the key may exist. Defaults to none.
    #[must_use]
    pub fn exists_filter(mut self, filter: &ExistsFilter) -> Self {
        self.filter = Some(filter.clone());
        self
    }

    /// The deadline of a store call. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.filler.client.deadline = deadline;
        self
    }

    /// When to stop calling a failing store. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(mut self, settings: CircuitBreaker) -> Self {
        self.filler.client.set_circuit_breaker(settings);
        self
    }

    /// Which processes share the entries and loads.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.filler.client.store.reach()
    }

    /// Checks that the cache is shared as widely as you need, so that the memory backend is not used by mistake.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the store's reach is less than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.reach().require(needed)?;
        Ok(self)
    }

    fn key(&self, key: impl Into<Key>) -> CacheKey {
        CacheKey::new(self.filler.options.name, key)
    }

    /// Removes the entry of a key.
    ///
    /// A load that began before this call is not stored after it. Its callers still get its
    /// value; later ones do not join it.
    ///
    /// # Errors
    ///
    /// If the store fails; the entry may then still be there.
    pub async fn invalidate(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let (client, key) = (&self.filler.client, self.key(key));
        // Before and after: a load may begin in between.
        self.flights.detach(&key);
        let result = client.call_always(client.store.invalidate(&key)).await;
        self.flights.detach(&key);
        result
    }

    /// Makes the entry of a key stale: the next call loads it again, and gets the old value until the original end of the entry. A load
    /// that began before this call is not stored after it.
    ///
    /// # Errors
    ///
    /// If the store fails; the entry may then still be fresh.
    pub async fn expire(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let (client, key) = (&self.filler.client, self.key(key));
        self.flights.detach(&key);
        let result = client.call_always(client.store.expire(&key)).await;
        self.flights.detach(&key);
        result
    }
}

/// The largest number of loads at a time in this process while the store fails.
const ORIGIN_LIMIT: usize = 16;

impl<T: Send + Sync + 'static, C: Codec<T> + Send + Sync + 'static> Cache<T, C> {
    /// The value of a key. `None` if it is absent.
    ///
    /// If the cache has no fresh value, one caller of all processes calls `loader`, and the others wait for its result. With
    /// [`stale_for`](Self::stale_for), they get the stale value meanwhile. The loader runs in a task of its own. If all its callers in this
    /// process have gone, it is cancelled, except if it refreshes a value that was served.
    ///
    /// # Errors
    ///
    /// If there is neither a value nor a stale one: see [`CacheError`].
    pub async fn get_or_fill<L, F, R, E>(&self, key: impl Into<Key>, loader: L) -> Result<Option<Arc<T>>, CacheError>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<R, E>> + Send,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        let result = self.serve(self.key(key), loader).await;
        let served = result.as_ref().map_or(Served::Failed, |(_, served)| *served);
        self.filler.client.meters().served(served);
        result.map(|(value, _)| value)
    }

    async fn serve<L, F, R, E>(&self, key: CacheKey, loader: L) -> Result<(Option<Arc<T>>, Served), CacheError>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<R, E>> + Send,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        let Filler { options, client, .. } = &self.filler;
        options.check()?;
        client.check()?;
        let before = match client.call(client.store.get(&key)).await {
            Ok(Some(entry)) => match self.filler.decode(&key, &entry.content) {
                Some(value) => return Ok(self.serve_entry(key, &entry, value, loader).await),
                None => Before::Seen(entry.id),
            },
            Ok(None) => Before::Seen(EntryId::default()),
            Err(error) => Before::Failed(error),
        };
        if let (Before::Seen(_), Some(filter)) = (&before, &self.filter)
            && filter.excludes(key.key()).await
        {
            return Ok((None, Served::Excluded));
        }
        Ok((self.load(key, before, false, loader)?.outcome().await?, Served::Loaded))
    }

    /// Serves the value of an entry, or a new one if it is stale.
    async fn serve_entry<L, F, R, E>(
        &self,
        key: CacheKey,
        entry: &Entry,
        value: Option<Arc<T>>,
        loader: L,
    ) -> (Option<Arc<T>>, Served)
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<R, E>> + Send,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        let options = &self.filler.options;
        let is_fresh = !entry.fresh_for.is_zero();
        if is_fresh && !options.refreshes_early(entry.fresh_for, entry.cost) {
            return (value, Served::Fresh);
        }
        // Without a load, for instance in a shutdown, the value is still good.
        let load = self.load(key, Before::Seen(entry.id.clone()), true, loader);
        match load {
            _ if is_fresh => (value, Served::Fresh),
            Ok(load) => match timeout(options.soft_timeout, load.outcome()).await {
                Ok(Ok(loaded)) => (loaded, Served::Loaded),
                Ok(Err(_)) | Err(_) => (value, Served::Stale),
            },
            Err(_) => (value, Served::Stale),
        }
    }

    /// Joins the load of a key, or starts it.
    fn load<L, F, R, E>(
        &self,
        key: CacheKey,
        before: Before,
        is_background: bool,
        loader: L,
    ) -> Result<LoadWaiter<T>, CacheError>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<R, E>> + Send,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        let flights = Arc::as_ptr(&self.flights).addr();
        let outer = CHAIN.try_with(Arc::clone).ok();
        if outer.as_ref().is_some_and(|chain| chain.has(flights, &key)) {
            return Err(CacheError::Recursive);
        }
        let claim = Claim { token: Token::random()?, lease: self.filler.options.lease };
        let (filler, canceller) = (self.filler.clone(), self.filler.clone());
        // Nobody waits long for a background load, so it is not a part of the load that started it.
        let chain = Arc::new(Chain { flights, key, outer: outer.filter(|_| !is_background) });
        let table = Arc::downgrade(&self.flights);
        let detach = move || {
            if let Some(flights) = table.upgrade() {
                flights.detach(&key);
            }
        };
        let load = move || {
            CHAIN.scope(
                chain,
                async move { filler.fill(key, claim, before, is_background, loading(loader), detach).await },
            )
        };
        let cancel = move || async move { canceller.release(&key, &claim, None).await };
        self.flights.join_or_start(&self.tasks, key, is_background, load, cancel)
    }

    /// The value of a key if it is cached, fresh or stale. `None` if it is not, or if its absence is cached. Loads nothing.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn get(&self, key: impl Into<Key>) -> Result<Option<Arc<T>>, CacheError> {
        let (client, key) = (&self.filler.client, self.key(key));
        let entry = client.call(client.store.get(&key)).await?;
        Ok(entry.and_then(|entry| self.filler.decode(&key, &entry.content)).flatten())
    }

    /// Stores a value, or its absence. A load that began before this call is not stored after it.
    ///
    /// # Errors
    ///
    /// [`CacheError::TooLarge`] and [`CacheError::Encode`] if the value cannot be stored, and [`CacheError::Store`] if the store fails;
    /// the old value may then still be there.
    pub async fn set(&self, key: impl Into<Key>, value: impl Into<Loaded<T>>) -> Result<(), CacheError> {
        let Filler { options, client, codec, .. } = &self.filler;
        options.check()?;
        let (key, loaded) = (key.into(), value.into());
        if !loaded.is_cached {
            return Ok(self.invalidate(key).await?);
        }
        let key = self.key(key);
        let encoded = loaded.value.as_ref().map(|value| codec.encode(value)).transpose();
        let value = encoded.map_err(|error| CacheError::Encode(error.into()))?;
        if let Some(bytes) = value.as_ref().map(Vec::len).filter(|bytes| *bytes > options.max_len) {
            return Err(CacheError::TooLarge { bytes, max: options.max_len });
        }
        if let (Some(_), Some(filter)) = (&value, &self.filter) {
            filter.add(*key.key()).await?;
        }
        let entry = options.entry(value, loaded.fresh_for, Duration::ZERO);
        let token = Token::random()?;
        self.flights.detach(&key);
        let result = client.call_always(client.store.set(&key, &token, &entry)).await;
        self.flights.detach(&key);
        Ok(result?)
    }
}

// Not derived, which would require `C: Clone`.
impl<T, C> Clone for Cache<T, C> {
    fn clone(&self) -> Self {
        Self {
            filler: self.filler.clone(),
            filter: self.filter.clone(),
            flights: Arc::clone(&self.flights),
            tasks: Arc::clone(&self.tasks),
            value: PhantomData,
        }
    }
}

impl<T, C> fmt::Debug for Cache<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("options", &self.filler.options).finish_non_exhaustive()
    }
}
