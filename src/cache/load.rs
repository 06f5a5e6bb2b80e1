//! One load: the lease, the loader, and the new entry or mark in the store.

use std::marker::PhantomData;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use super::error::CacheError;
use super::flights::{FlightHandle, Outcome};
use super::loaded::Loaded;
use super::loader::{Loader, without_panics};
#[cfg(feature = "local-cache")]
use super::local::Local;
use super::lookup::{Found, Lookup};
use super::metrics::LoadOutcome;
use super::options::Options;
use super::store::{CacheKey, Claim, Claimed, Content, Entry, EntryId, Mark, NewEntry, Notifications, TagGeneration};
use super::store_client::StoreClient;
use super::tags::Generations;
use crate::codec::Codec;
use crate::error::StoreError;
use crate::key::Key;

/// The parts of a cache that a load needs.
pub(super) struct LoadContext<T, C> {
    pub(super) options: Arc<Options>,
    pub(super) client: StoreClient,
    pub(super) codec: Arc<C>,
    // Limits the loads that run while the store fails: one permit for each.
    pub(super) origin: Arc<Semaphore>,
    pub(super) generations: Arc<Generations>,
    #[cfg(feature = "local-cache")]
    pub(super) local: Option<Arc<Local<T>>>,
    pub(super) value: PhantomData<fn() -> T>,
}

// Not derived, which would require `C: Clone`.
impl<T, C> Clone for LoadContext<T, C> {
    fn clone(&self) -> Self {
        Self {
            options: Arc::clone(&self.options),
            client: self.client.clone(),
            codec: Arc::clone(&self.codec),
            origin: Arc::clone(&self.origin),
            generations: Arc::clone(&self.generations),
            #[cfg(feature = "local-cache")]
            local: self.local.clone(),
            value: PhantomData,
        }
    }
}

/// The state of the entry, as the caller of a load has found it.
pub(crate) enum Observed {
    /// The id of the entry that the store returned.
    Entry(EntryId),
    /// The store failed.
    StoreFailed(StoreError),
}

/// How a load may proceed.
enum Acquired<T> {
    /// Load the value and store it, with these tags.
    Leased(Vec<TagGeneration>),
    /// Load a value for these callers only.
    Uncached,
    /// Another process has loaded it.
    Found(Option<Arc<T>>),
    /// The store failed.
    StoreFailed(StoreError),
}

impl<T: Send + Sync + 'static, C> LoadContext<T, C> {
    /// Removes the local entry of a key.
    pub(super) fn forget(&self, key: &CacheKey) {
        #[cfg(feature = "local-cache")]
        if let Some(local) = &self.local {
            local.remove(key.key());
        }
        #[cfg(not(feature = "local-cache"))]
        let _ = key;
    }

    /// Removes all local entries with a tag. Also removes the cached generation of the tag, so that its next use reads the store.
    pub(super) fn forget_tag(&self, tag: &Key) {
        self.generations.remove(tag);
        #[cfg(feature = "local-cache")]
        if let Some(local) = &self.local {
            local.remove_tag(tag);
        }
    }
}

impl<T: Send + Sync + 'static, C: Codec<T>> LoadContext<T, C> {
    /// Loads the value of a key, or waits for the process that does.
    ///
    /// If the store has failed and no caller waits, nothing is loaded: the value could be neither stored nor returned. When the lease is
    /// lost, for instance by an invalidation in another process, later callers do not join the load.
    pub(super) async fn load(
        &self,
        key: CacheKey,
        claim: Claim,
        observed: Observed,
        mut loader: impl Loader<T>,
        handle: FlightHandle<T>,
    ) -> Outcome<T> {
        let acquired = match observed {
            Observed::Entry(seen) => self.acquire(&key, seen, &claim, &mut loader).await?,
            Observed::StoreFailed(error) => Acquired::StoreFailed(error),
        };
        let (lease, _permit) = match acquired {
            Acquired::Found(value) => return Ok(value),
            Acquired::Leased(tags) => (Some(tags), None),
            Acquired::Uncached => (None, None),
            Acquired::StoreFailed(store) if handle.detach_if_no_callers() => return Err(CacheError::Store(store)),
            Acquired::StoreFailed(store) => match loader.permit(&self.origin) {
                Some(permit) => (None, Some(permit)),
                None => return Err(CacheError::OriginLimit { store }),
            },
        };
        let started = Instant::now();
        let mut loading = pin!(self.call_loader(loader));
        let loaded = tokio::select! {
            loaded = &mut loading => loaded,
            // The lease is lost, so the value will not be stored, but its callers get it.
            () = self.renew(&key, &claim, lease.as_deref().unwrap_or_default()), if lease.is_some() => {
                handle.close_to_new_callers();
                loading.await
            }
        };
        let load_time = started.elapsed();
        let load = match (&loaded, lease) {
            (Ok(loaded), Some(tags)) => self.store(&key, &claim, loaded, load_time, tags).await,
            (Ok(_), None) => LoadOutcome::NotStored,
            (Err(_), Some(_)) => {
                self.release(&key, &claim, Some(Mark::Failed { retry_after: self.options.error_for })).await;
                LoadOutcome::Failed
            }
            (Err(_), None) => LoadOutcome::Failed,
        };
        self.client.metrics().loaded(load, load_time);
        loaded.map(|loaded| loaded.value.map(Arc::new))
    }

    /// Waits for the lease of a key, or for the entry of the process that holds it.
    async fn acquire(
        &self,
        key: &CacheKey,
        mut seen: EntryId,
        claim: &Claim,
        loader: &mut impl Loader<T>,
    ) -> Result<Acquired<T>, CacheError> {
        let Options { load_timeout, .. } = *self.options;
        let store = &self.client.store;
        let give_up = Instant::now() + load_timeout;
        let mut notifications = None;
        loop {
            match self.client.call(store.claim(key, &seen, claim)).await {
                Err(error) => {
                    // The claim may have been executed.
                    self.release(key, claim, None).await;
                    return Ok(Acquired::StoreFailed(error));
                }
                Ok(Claimed::Granted) => return Ok(self.read_tags(key, claim).await),
                Ok(Claimed::Marked(Mark::Uncached { .. })) => return Ok(Acquired::Uncached),
                Ok(Claimed::Marked(Mark::Failed { retry_after })) => {
                    return Err(CacheError::RecentlyFailed { retry_after });
                }
                Ok(Claimed::Changed) => {}
                Ok(Claimed::Busy { remaining }) => match &mut notifications {
                    // Looks again below, since the entry may have come before the subscription.
                    None => {
                        loader.on_lease_busy();
                        let watched = timeout_at(give_up, store.watch(key)).await;
                        notifications = Some(watched.unwrap_or_else(|_| Notifications::none()));
                    }
                    Some(notifications) => {
                        let wake = give_up.min(Instant::now() + remaining.clamp(MIN_WAIT, POLL));
                        // After a timeout look anyway: the notification may be lost.
                        let _ = timeout_at(wake, notifications.next()).await;
                    }
                },
            }
            let Lookup { id, found } = match self.read_entry(key).await {
                Ok(lookup) => lookup,
                Err(error) => return Ok(Acquired::StoreFailed(error)),
            };
            if id != seen {
                if let Some(found) = found {
                    return Ok(Acquired::Found(found.value));
                }
                seen = id;
            }
            if Instant::now() >= give_up {
                return Err(CacheError::TimedOut { after: load_timeout });
            }
        }
    }

    /// Reads the generations of the tags for a load that has just got its lease.
    async fn read_tags(&self, key: &CacheKey, claim: &Claim) -> Acquired<T> {
        match self.current_tags().await {
            Ok(tags) => Acquired::Leased(tags),
            Err(error) => {
                self.release(key, claim, None).await;
                Acquired::StoreFailed(error)
            }
        }
    }

    pub(super) async fn current_tags(&self) -> Result<Vec<TagGeneration>, StoreError> {
        let Options { name, tags, .. } = &*self.options;
        self.generations.current(&self.client, name, tags, self.options.tag_ttl()).await
    }

    /// Looks a key up, in this process first.
    pub(super) async fn look_up(&self, key: &CacheKey) -> Result<Lookup<T>, StoreError> {
        #[cfg(feature = "local-cache")]
        if let Some(local) = &self.local {
            if let Some(lookup) = local.get_fresh(key.key())
                && self.generations.are_cached(lookup.tags())
            {
                return Ok(lookup);
            }
            // Boxed, so that the future of a local hit is small.
            let result = Box::pin(self.look_up_store_and_insert(local, key)).await;
            return result.or_else(|error| local.get_during_outage(key.key()).ok_or(error));
        }
        self.read_entry(key).await
    }

    #[cfg(feature = "local-cache")]
    async fn look_up_store_and_insert(&self, local: &Local<T>, key: &CacheKey) -> Result<Lookup<T>, StoreError> {
        // The entry is still valid if its tags have the same generations in the store.
        if let Some(lookup) = local.get_fresh(key.key())
            && self.generations.are_current(&self.client, key.cache(), lookup.tags()).await?
        {
            return Ok(lookup);
        }
        // The subscription begins before the entry is read, so no change is missed.
        let start = local.before_read(self.client.watch(key).await);
        let lookup = self.read_entry(key).await?;
        local.insert(*key.key(), &lookup, start);
        Ok(lookup)
    }

    async fn read_entry(&self, key: &CacheKey) -> Result<Lookup<T>, StoreError> {
        let read = Instant::now();
        let Some(entry) = self.client.call(self.client.store.get(key)).await? else {
            return Ok(Lookup { id: EntryId::default(), found: None });
        };
        let Entry { id, content, age, fresh_for, expires_in, load_time, tags } = entry;
        let is_valid = self.generations.are_current(&self.client, key.cache(), &tags).await?;
        let value = if is_valid { self.decode(key, &content) } else { None };
        let found = value.map(|value| Found {
            value,
            read,
            age_when_read: age,
            fresh_until: read + fresh_for,
            expires: read + expires_in,
            load_time,
            tags,
            is_local: false,
        });
        Ok(Lookup { id, found })
    }

    /// The value of an entry: `Some(None)` if the entry says that the value is absent. `None` if the content cannot be decoded.
    fn decode(&self, key: &CacheKey, content: &Content) -> Option<Option<Arc<T>>> {
        match content {
            Content::Absent => Some(None),
            Content::Value(bytes) => match self.codec.decode(bytes) {
                Ok(value) => Some(Some(Arc::new(value))),
                Err(error) => {
                    tracing::debug!(%key, %error, "cached value cannot be decoded");
                    None
                }
            },
            Content::Unreadable => None,
        }
    }

    /// Runs the loader for at most `load_timeout`, and catches its panics.
    async fn call_loader(&self, loader: impl Loader<T>) -> Result<Loaded<T>, CacheError> {
        let after = self.options.load_timeout;
        let loaded = timeout_at(Instant::now() + after, without_panics(async { loader.load().await })).await;
        loaded.unwrap_or(Err(CacheError::TimedOut { after }))
    }

    /// Renews the lease until it is lost, or a tag is invalidated.
    async fn renew(&self, key: &CacheKey, claim: &Claim, tags: &[TagGeneration]) {
        loop {
            sleep(claim.lease / 3).await;
            // A failed call does not mean a lost lease: there is time for another call before the lease ends.
            let is_renewed = self.client.call(self.client.store.renew(key, claim)).await;
            let is_current = self.generations.are_current(&self.client, key.cache(), tags).await;
            if !is_renewed.unwrap_or(true) || !is_current.unwrap_or(true) {
                return;
            }
        }
    }

    /// Stores a loaded value. The callers get the value in any case, so failures are only logged.
    async fn store(
        &self,
        key: &CacheKey,
        claim: &Claim,
        loaded: &Loaded<T>,
        load_time: Duration,
        tags: Vec<TagGeneration>,
    ) -> LoadOutcome {
        let value = match self.encode(key, loaded) {
            Ok(value) => value,
            Err(mark) => {
                self.release(key, claim, Some(mark)).await;
                return LoadOutcome::NotStored;
            }
        };
        let entry = self.options.entry(value, loaded.times(), load_time, tags);
        match self.client.call(self.client.store.put(key, &claim.token, &entry)).await {
            Ok(true) => LoadOutcome::Stored,
            Ok(false) => {
                tracing::debug!(%key, "value is not cached: the key was invalidated, or the lease has ended");
                LoadOutcome::Refused
            }
            Err(error) => {
                tracing::debug!(%key, %error, "value is not cached");
                self.release(key, claim, None).await;
                LoadOutcome::NotStored
            }
        }
    }

    /// The encoded value, or the mark for a value that must not be stored.
    fn encode(&self, key: &CacheKey, loaded: &Loaded<T>) -> Result<Option<Vec<u8>>, Mark> {
        let Options { max_len, fresh_for, .. } = *self.options;
        let Loaded { value, fresh_for: own, is_cached, .. } = loaded;
        let uncached = Err(Mark::Uncached { remaining: own.unwrap_or(fresh_for).min(NewEntry::MAX_TTL) });
        if !is_cached {
            return uncached;
        }
        match value.as_ref().map(|value| self.codec.encode(value)).transpose() {
            Ok(value) if value.as_ref().is_none_or(|value| value.len() <= max_len) => Ok(value),
            Ok(value) => {
                let bytes = value.map(|value| value.len());
                tracing::warn!(%key, bytes, max_len, "value is too large to be cached");
                uncached
            }
            Err(error) => {
                tracing::warn!(%key, %error, "value cannot be encoded, so it is not cached");
                uncached
            }
        }
    }

    /// Ends the lease, so that others need not wait for its end.
    pub(super) async fn release(&self, key: &CacheKey, claim: &Claim, mark: Option<Mark>) {
        if let Err(error) = self.client.call(self.client.store.release(key, &claim.token, mark)).await {
            tracing::debug!(%key, %error, "lease of a load is not released, and ends by itself");
        }
    }
}

/// The longest wait before the next look for the entry of another process, since a notification may get lost.
const POLL: Duration = Duration::from_millis(500);
/// The shortest such wait, if the lease is about to end.
const MIN_WAIT: Duration = Duration::from_millis(10);
