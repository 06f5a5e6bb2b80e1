use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::marker::PhantomData;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::batch::Batch;
use super::error::CacheError;
use super::exists_filter::ExistsFilter;
use super::flights::{Flights, LoadWaiter, Outcome};
use super::load::{LoadContext, Observed};
use super::loaded::Loaded;
use super::loader::{EndTracker, Loader, LoaderFn};
#[cfg(feature = "local-cache")]
use super::local::Local;
use super::lookup::{Found, Lookup};
use super::metrics::Served;
use super::options::Options;
use super::store::{CacheKey, CacheStore, Claim, EntryId, NewEntry, Token};
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
/// When the last clone is dropped, loads in progress are cancelled.
pub struct Cache<T, C = Json> {
    inner: LoadContext<T, C>,
    filter: Option<ExistsFilter>,
    flights: Arc<Flights<T>>,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

/// The loads that the current task is in, the innermost first.
struct Chain {
    // The address of the table of loads, which stands for the cache.
    flights: usize,
    // Several for a batch.
    keys: Arc<[CacheKey]>,
    outer: Option<Arc<Self>>,
}

tokio::task_local! {
    static CHAIN: Arc<Chain>;
}

impl Chain {
    fn has(&self, flights: usize, key: &CacheKey) -> bool {
        let mut next = Some(self);
        while let Some(chain) = next {
            if chain.flights == flights && chain.keys.contains(key) {
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
        let inner = LoadContext {
            options: Arc::new(Options::new(name, fresh_for)),
            client: StoreClient::new(Arc::new(store), name),
            codec: Arc::new(codec),
            origin: Arc::new(Semaphore::new(ORIGIN_LIMIT)),
            generations: Arc::default(),
            #[cfg(feature = "local-cache")]
            local: None,
            value: PhantomData,
        };
        let flights = Arc::new(Flights::default());
        inner.client.store.add_to_shutdown(&ShutdownTarget::new(&flights));
        Self { inner, filter: None, flights, tasks: Arc::default() }
    }

    fn with(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(Arc::make_mut(&mut self.inner.options));
        self
    }

    /// How long a stale value is served after it was fresh: while one caller loads a new one, and while the origin fails. Defaults to zero.
    #[must_use]
    pub fn stale_for(self, time: Duration) -> Self {
        self.with(|options| options.stale_for = time.min(NewEntry::MAX_TTL))
    }

    /// How long the absence of a value is cached. With zero it is not. Defaults to ten seconds, or to `fresh_for` if that is shorter.
    #[must_use]
    pub fn absent_for(self, time: Duration) -> Self {
        self.with(|options| options.absent_for = time.min(NewEntry::MAX_TTL))
    }

    /// Shortens the fresh time of each entry at random, by at most this part of it. So entries that were stored together do not expire
    /// together. From 0 to 1; defaults to 0.1.
    #[must_use]
    pub fn jitter(self, part: f64) -> Self {
        let part = if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) };
        self.with(|options| options.jitter = part)
    }

    /// How early a value may be loaded again while it is still fresh, as a multiple of the time that its last load took. The nearer
    /// the end of its fresh time, the likelier a call starts a load in the background (XFetch). Defaults to 1; with 0, never.
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

    /// How long the lease of a load lasts without a renewal, from 10 ms to one hour. After that another process may load. Defaults to two
    /// seconds.
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
        self.inner.origin = Arc::new(Semaphore::new(loads.min(Semaphore::MAX_PERMITS)));
        self
    }

    /// Keeps at most this number of values in this process too, each for at most `max_age` before the store is asked again. They are
    /// served without a call of the store. By default there are none.
    ///
    /// The store notifies this process of each change, so a changed value is usually gone within a millisecond. If it cannot notify, for
    /// instance because the connection is lost, the store is asked. While the store fails, this process serves values without a known
    /// change until the end of their [stale time](Self::stale_for). [`invalidate_tag`](Self::invalidate_tag) of another process takes up to
    /// one second.
    ///
    /// On Redis, each value needs a subscription to a channel, for which Redis keeps about 200 bytes.
    #[cfg(feature = "local-cache")]
    #[cfg_attr(docsrs, doc(cfg(feature = "local-cache")))]
    #[must_use]
    pub fn local_tier(mut self, values: u64, max_age: Duration) -> Self {
        self.inner.local = Some(Arc::new(Local::new(values, max_age)));
        self
    }

    /// A filter with the keys that exist. If a key has no entry and the filter excludes the key, [`get_or_fill`](Self::get_or_fill) returns
    /// `None`. It starts no load, and stores no absence. [`set`](Self::set) adds the key to the filter before it stores a value. The filter
    /// has its own deadline. If the store of the filter fails, `get_or_fill` loads the key, and `set` fails. Defaults to none.
    #[must_use]
    pub fn exists_filter(mut self, filter: &ExistsFilter) -> Self {
        self.filter = Some(filter.clone());
        self
    }

    /// The deadline of a store call. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.inner.client.deadline = deadline;
        self
    }

    /// When to stop calling a failing store. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(mut self, settings: CircuitBreaker) -> Self {
        self.inner.client.set_circuit_breaker(settings);
        self
    }

    /// Returns a clone of this cache with these tags, at most 16, instead of the tags of `self`. The clone gives the tags to the entries
    /// that its loads and its calls of [`set`](Self::set) store.
    /// [`invalidate_tag`](Self::invalidate_tag) removes all entries with a tag. Use the same tags for all calls with the same key.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{BoxError, Cache};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// # let backend = tollgate::connect("memory:").await?;
    /// # let user = async || Ok::<_, BoxError>("Alice".to_owned());
    /// let users = Cache::<String>::new(backend, "users", Duration::from_secs(300));
    /// users.tagged(["tenant-7"]).get_or_fill("1", user).await?;
    /// assert!(users.get("1").await?.is_some());
    /// users.invalidate_tag("tenant-7").await?;
    /// assert!(users.get("1").await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn tagged<K: Into<Key>>(&self, tags: impl IntoIterator<Item = K>) -> Self {
        self.clone().with(|options| options.tags = tags.into_iter().map(Into::into).collect())
    }

    /// Which processes share the entries and loads.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.inner.client.store.reach()
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
        CacheKey::new(self.inner.options.name, key)
    }

    /// Removes the local entry of a key, and keeps later calls from joining its load.
    fn forget(&self, key: &CacheKey) {
        self.flights.close_to_new_callers(key);
        self.inner.forget(key);
    }

    /// Removes the entry of a key.
    ///
    /// A load that began before this call is not stored after it. Its callers still get its value. Callers that come later do not join it;
    /// in other processes they may, for up to a third of [`lease`](Self::lease).
    ///
    /// # Errors
    ///
    /// If the store fails; the entry may then still be there.
    pub async fn invalidate(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let (client, key) = (&self.inner.client, self.key(key));
        // Before and after: a load may begin in between.
        self.forget(&key);
        let result = client.call_always(client.store.invalidate(&key)).await;
        self.forget(&key);
        result
    }

    /// Makes the entry of a key stale: the next call loads it again, and gets the old value until the original end of the entry. A load
    /// that began before this call is not stored after it.
    ///
    /// # Errors
    ///
    /// If the store fails; the entry may then still be fresh.
    pub async fn expire(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        let (client, key) = (&self.inner.client, self.key(key));
        self.forget(&key);
        let result = client.call_always(client.store.expire(&key)).await;
        self.forget(&key);
        result
    }

    /// Invalidates all entries with a tag, however many they are. A load with this tag that began before this call is not served to later
    /// calls.
    ///
    /// Other processes may serve the entries for up to one second, since they read the state of a tag once a second.
    ///
    /// # Errors
    ///
    /// If the store fails; the entries may then still be there.
    pub async fn invalidate_tag(&self, tag: impl Into<Key>) -> Result<(), StoreError> {
        let (client, tag) = (&self.inner.client, tag.into());
        let forget = || {
            self.inner.forget_tag(&tag);
            self.flights.detach_tag(&tag);
        };
        // Before and after: a load may begin in between.
        forget();
        let result = client.call_always(client.store.invalidate_tag(&self.key(tag))).await;
        forget();
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
    /// If the load fails and the cache has no stale value, or if a setting is invalid: see [`CacheError`].
    pub async fn get_or_fill<L, F, R, E>(&self, key: impl Into<Key>, loader: L) -> Result<Option<Arc<T>>, CacheError>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<R, E>> + Send,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        self.serve(self.key(key), LoaderFn(loader)).await
    }

    /// The values of several keys. Absent values are left out.
    ///
    /// Like [`get_or_fill`](Self::get_or_fill) for each key, but this process calls `loader` once, with all keys that it has to load. Keys
    /// without a value in the map that it returns are absent. If another process fails to load a key, `loader` may be called again for it.
    ///
    /// ```
    /// # use std::collections::HashMap;
    /// # use std::time::Duration;
    /// # use tollgate::{BoxError, Cache};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// # let backend = tollgate::connect("memory:").await?;
    /// # let users = Cache::<String>::new(backend, "users", Duration::from_secs(300));
    /// async fn load(ids: Vec<u64>) -> Result<HashMap<u64, String>, BoxError> {
    ///     Ok(ids.into_iter().filter(|id| *id < 3).map(|id| (id, format!("user {id}"))).collect()) // one query
    /// }
    ///
    /// let found = users.get_or_fill_all([1, 2, 3], load).await?;
    /// assert_eq!(*found[&1], "user 1");
    /// assert!(!found.contains_key(&3));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The first error: if the load of a key fails and the cache has no stale value for it, or if a setting is invalid.
    pub async fn get_or_fill_all<K, L, F, R, E>(
        &self,
        keys: impl IntoIterator<Item = K>,
        loader: L,
    ) -> Result<HashMap<K, Arc<T>>, CacheError>
    where
        K: Into<Key> + Clone + Eq + Hash + Send + Sync + 'static,
        L: Fn(Vec<K>) -> F + Send + Sync + 'static,
        F: Future<Output = Result<HashMap<K, R>, E>> + Send + 'static,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        let keys: Vec<K> = keys.into_iter().collect();
        let cache_keys = keys.iter().map(|key| self.key(key.clone())).collect();
        let batch = Batch::new(cache_keys, move |keys| {
            let loading = loader(keys);
            Box::pin(async move {
                let values = loading.await.map_err(|error| CacheError::load(error.into()))?;
                Ok(values.into_iter().map(|(key, value)| (key, value.into())).collect())
            })
        });
        // All members exist before the first of them may load.
        let members: Vec<_> = keys.into_iter().map(|key| (key.clone(), batch.member(key))).collect();
        let served = members.into_iter().map(async |(key, member)| {
            let value = self.serve(self.key(key.clone()), member).await?;
            Ok(value.map(|value| (key, value)))
        });
        join_all(served).await.into_iter().filter_map(Result::transpose).collect()
    }

    /// Serves a key, and counts the result.
    async fn serve(&self, key: CacheKey, loader: impl Loader<T> + 'static) -> Outcome<T> {
        let result = self.find_or_load(key, loader).await;
        let served = result.as_ref().map_or(Served::Failed, |(_, served)| *served);
        self.inner.client.metrics().served(served);
        result.map(|(value, _)| value)
    }

    async fn find_or_load(
        &self,
        key: CacheKey,
        loader: impl Loader<T> + 'static,
    ) -> Result<(Option<Arc<T>>, Served), CacheError> {
        self.inner.options.check()?;
        self.inner.client.check()?;
        let observed = match self.inner.look_up(&key).await {
            Ok(Lookup { id, found: Some(found) }) => return Ok(self.serve_entry(key, id, found, loader).await),
            Ok(Lookup { id, found: None }) => Observed::Entry(id),
            Err(error) => Observed::StoreFailed(error),
        };
        if let (Observed::Entry(_), Some(filter)) = (&observed, &self.filter)
            && filter.excludes(key.key()).await
        {
            return Ok((None, Served::Excluded));
        }
        Ok((self.load(key, observed, false, loader)?.outcome().await?, Served::Loaded))
    }

    /// Serves the value of an entry, or a new one if it is stale.
    async fn serve_entry(
        &self,
        key: CacheKey,
        id: EntryId,
        found: Found<T>,
        loader: impl Loader<T> + 'static,
    ) -> (Option<Arc<T>>, Served) {
        let options = &self.inner.options;
        let (fresh_for, value) = (found.fresh_for(), found.value);
        let is_fresh = !fresh_for.is_zero();
        let fresh = if found.is_local { Served::Local } else { Served::Fresh };
        if is_fresh && !options.refreshes_early(fresh_for, found.load_time) {
            return (value, fresh);
        }
        // Without a load, for instance in a shutdown, the value is still good.
        let load = self.load(key, Observed::Entry(id), true, loader);
        match load {
            _ if is_fresh => (value, fresh),
            Ok(load) => match timeout(options.soft_timeout, load.outcome()).await {
                Ok(Ok(loaded)) => (loaded, Served::Loaded),
                Ok(Err(_)) | Err(_) => (value, Served::Stale),
            },
            Err(_) => (value, Served::Stale),
        }
    }

    /// Joins the load of a key, or starts it.
    fn load(
        &self,
        key: CacheKey,
        observed: Observed,
        is_background: bool,
        loader: impl Loader<T> + 'static,
    ) -> Result<LoadWaiter<T>, CacheError> {
        let flights = Arc::as_ptr(&self.flights).addr();
        let outer = CHAIN.try_with(Arc::clone).ok();
        if outer.as_ref().is_some_and(|chain| chain.has(flights, &key)) {
            return Err(CacheError::Recursive);
        }
        let claim = Claim { token: Token::random()?, lease: self.inner.options.lease };
        let (inner, canceller) = (self.inner.clone(), self.inner.clone());
        // A background load starts a new chain: no caller waits for it longer than `soft_timeout`, so no cycle through it waits forever.
        let keys = loader.batch_keys().unwrap_or_else(|| [key].into());
        let chain = Arc::new(Chain { flights, keys, outer: outer.filter(|_| !is_background) });
        // When the loader has ended, only its result must be stored, as an entry or a mark. This happens even if the callers have gone.
        let runs_without_callers = Arc::new(AtomicBool::new(is_background));
        let loader = EndTracker { loader, has_ended: Arc::clone(&runs_without_callers) };
        let load =
            move |handle| CHAIN.scope(chain, async move { inner.load(key, claim, observed, loader, handle).await });
        let cancel = move || async move { canceller.release(&key, &claim, None).await };
        self.flights.join_or_start(&self.tasks, key, &self.inner.options.tags, runs_without_callers, load, cancel)
    }

    /// For a service around the cache: the entry of a key, fresh or stale.
    #[cfg(feature = "http")]
    pub(crate) async fn look_up(&self, key: Key) -> Result<Lookup<T>, StoreError> {
        self.inner.look_up(&self.key(key)).await
    }

    /// For a service around the cache: joins the load of a key that was looked up before, or starts it.
    #[cfg(feature = "http")]
    pub(crate) fn join_or_load<L, F, R, E>(
        &self,
        key: Key,
        observed: Observed,
        is_background: bool,
        loader: L,
    ) -> Result<LoadWaiter<T>, CacheError>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<R, E>> + Send,
        R: Into<Loaded<T>>,
        E: Into<BoxError>,
    {
        self.inner.options.check()?;
        self.inner.client.check()?;
        self.load(self.key(key), observed, is_background, LoaderFn(loader))
    }

    /// For a service around the cache: counts a request.
    #[cfg(feature = "http")]
    pub(crate) fn count(&self, served: Served) {
        self.inner.client.metrics().served(served);
    }

    /// For a service around the cache: whether to load a value again although it is still fresh.
    #[cfg(feature = "http")]
    pub(crate) fn refreshes_early(&self, found: &Found<T>) -> bool {
        self.inner.options.refreshes_early(found.fresh_for(), found.load_time)
    }

    /// The value of a key if it is cached, fresh or stale. `None` if it is not, or if its absence is cached. Loads nothing.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn get(&self, key: impl Into<Key>) -> Result<Option<Arc<T>>, CacheError> {
        Ok(self.inner.look_up(&self.key(key)).await?.found.and_then(|found| found.value))
    }

    /// Stores a value, or its absence. With [`Loaded::uncached`], removes the entry. A load that began before this call is not stored after
    /// it.
    ///
    /// # Errors
    ///
    /// [`CacheError::TooLarge`] and [`CacheError::Encode`] if the value cannot be stored, and [`CacheError::Store`] if the store fails;
    /// the old value may then still be there.
    pub async fn set(&self, key: impl Into<Key>, value: impl Into<Loaded<T>>) -> Result<(), CacheError> {
        let LoadContext { options, client, codec, .. } = &self.inner;
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
        let tags = self.inner.current_tags().await?;
        let entry = options.entry(value, loaded.times(), Duration::ZERO, tags);
        let token = Token::random()?;
        self.forget(&key);
        let result = client.call_always(client.store.set(&key, &token, &entry)).await;
        self.forget(&key);
        Ok(result?)
    }
}

// Not derived, which would require `C: Clone`.
impl<T, C> Clone for Cache<T, C> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            filter: self.filter.clone(),
            flights: Arc::clone(&self.flights),
            tasks: Arc::clone(&self.tasks),
        }
    }
}

impl<T, C> fmt::Debug for Cache<T, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("options", &self.inner.options).finish_non_exhaustive()
    }
}
