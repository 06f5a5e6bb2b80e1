//! One load: the lease, the loader, and the new entry or mark in the store.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use super::error::CacheError;
use super::flights::Outcome;
use super::loaded::Loaded;
use super::metrics::Load;
use super::options::Options;
use super::store::{CacheKey, Claim, Claimed, Content, EntryId, Mark, NewEntry};
use super::store_client::StoreClient;
use crate::codec::Codec;
use crate::error::StoreError;
use crate::panics::discard;

/// The parts of a cache that a load needs.
pub(super) struct Filler<C> {
    pub(super) options: Arc<Options>,
    pub(super) client: StoreClient,
    pub(super) codec: Arc<C>,
    // One permit for each load without the store.
    pub(super) origin: Arc<Semaphore>,
}

// Not derived, which would require `C: Clone`.
impl<C> Clone for Filler<C> {
    fn clone(&self) -> Self {
        Self {
            options: Arc::clone(&self.options),
            client: self.client.clone(),
            codec: Arc::clone(&self.codec),
            origin: Arc::clone(&self.origin),
        }
    }
}

/// The state of the entry, as the caller of a load has found it.
pub(super) enum Before {
    /// The id of the entry that the store returned.
    Seen(EntryId),
    /// The store failed.
    Failed(StoreError),
}

/// How a load may proceed.
enum Permission<T> {
    /// Load the value and store it.
    Leased,
    /// Load a value for these callers only.
    Uncached,
    /// Another process has loaded it.
    Found(Option<Arc<T>>),
    /// The store failed.
    Failed(StoreError),
}

impl<C> Filler<C> {
    /// Loads the value of a key, or waits for the process that does.
    ///
    /// A background load needs the store, since its value would otherwise be lost. `detach` is called when the lease is lost, for instance
    /// by an invalidation in another process.
    pub(super) async fn fill<T, L>(
        &self,
        key: CacheKey,
        claim: Claim,
        before: Before,
        is_background: bool,
        loader: L,
        detach: impl FnOnce() + Send,
    ) -> Outcome<T>
    where
        C: Codec<T>,
        L: Future<Output = Result<Loaded<T>, CacheError>> + Send,
    {
        let permission = match before {
            Before::Seen(seen) => self.acquire(&key, seen, &claim).await?,
            Before::Failed(error) => Permission::Failed(error),
        };
        let (is_leased, _permit) = match permission {
            Permission::Found(value) => return Ok(value),
            Permission::Leased => (true, None),
            Permission::Uncached => (false, None),
            Permission::Failed(store) if is_background => return Err(CacheError::Store(store)),
            Permission::Failed(store) => match self.origin.try_acquire() {
                Ok(permit) => (false, Some(permit)),
                Err(_) => return Err(CacheError::OriginLimit { store }),
            },
        };
        let started = Instant::now();
        let mut loading = pin!(self.load(loader));
        let loaded = tokio::select! {
            loaded = &mut loading => loaded,
            // The lease is lost, so the value will not be stored, but its callers get it.
            () = self.renew(&key, &claim), if is_leased => {
                detach();
                loading.await
            }
        };
        let cost = started.elapsed();
        let load = match &loaded {
            Ok(loaded) if is_leased => self.store(&key, &claim, loaded, cost).await,
            Ok(_) => Load::NotStored,
            Err(_) => {
                if is_leased {
                    self.release(&key, &claim, Some(Mark::Failed { retry_after: self.options.error_for })).await;
                }
                Load::Failed
            }
        };
        self.client.meters().loaded(load, cost);
        loaded.map(|loaded| loaded.value.map(Arc::new))
    }

    /// Waits for the lease of a key, or for the entry of the process that holds it.
    async fn acquire<T>(&self, key: &CacheKey, mut seen: EntryId, claim: &Claim) -> Result<Permission<T>, CacheError>
    where
        C: Codec<T>,
    {
        let Options { load_timeout, .. } = *self.options;
        let store = &self.client.store;
        let give_up = Instant::now() + load_timeout;
        let mut notifications = None;
        loop {
            match self.client.call(store.claim(key, &seen, claim)).await {
                Err(error) => {
                    // The claim may have been executed.
                    self.release(key, claim, None).await;
                    return Ok(Permission::Failed(error));
                }
                Ok(Claimed::Granted) => return Ok(Permission::Leased),
                Ok(Claimed::Marked(Mark::Uncached { .. })) => return Ok(Permission::Uncached),
                Ok(Claimed::Marked(Mark::Failed { retry_after })) => {
                    return Err(CacheError::RecentlyFailed { retry_after });
                }
                Ok(Claimed::Changed) => {}
                Ok(Claimed::Busy { remaining }) => match &mut notifications {
                    // Looks again below, since the entry may have come before the subscription.
                    None => notifications = Some(store.watch(key).await),
                    Some(notifications) => {
                        let wake = give_up.min(Instant::now() + remaining.clamp(MIN_WAIT, POLL));
                        // A late notification is a poll.
                        let _ = timeout_at(wake, notifications.next()).await;
                    }
                },
            }
            let entry = match self.client.call(store.get(key)).await {
                Ok(entry) => entry,
                Err(error) => return Ok(Permission::Failed(error)),
            };
            let id = entry.as_ref().map_or_else(EntryId::default, |entry| entry.id.clone());
            if id != seen {
                if let Some(value) = entry.and_then(|entry| self.decode(key, &entry.content)) {
                    return Ok(Permission::Found(value));
                }
                seen = id;
            }
            if Instant::now() >= give_up {
                return Err(CacheError::TimedOut { after: load_timeout });
            }
        }
    }

    /// The value of an entry, which may be absent. `None` if it cannot be read.
    pub(super) fn decode<T>(&self, key: &CacheKey, content: &Content) -> Option<Option<Arc<T>>>
    where
        C: Codec<T>,
    {
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
    async fn load<T, L>(&self, loader: L) -> Result<Loaded<T>, CacheError>
    where
        L: Future<Output = Result<Loaded<T>, CacheError>> + Send,
    {
        let Options { load_timeout, .. } = *self.options;
        let mut loader = Box::pin(loader);
        let caught = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| loader.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(loaded)) => Poll::Ready(loaded),
            Err(payload) => {
                discard(payload);
                Poll::Ready(Err(CacheError::Panicked))
            }
        });
        let loaded = timeout_at(Instant::now() + load_timeout, caught).await;
        loaded.unwrap_or(Err(CacheError::TimedOut { after: load_timeout }))
    }

    /// Renews the lease until it is lost.
    async fn renew(&self, key: &CacheKey, claim: &Claim) {
        loop {
            sleep(claim.lease / 3).await;
            // A failed call may be repeated before the lease ends.
            if self.client.call(self.client.store.renew(key, claim)).await.is_ok_and(|is_renewed| !is_renewed) {
                return;
            }
        }
    }

    /// Stores a loaded value. The callers get the value in any case, so failures are only logged.
    async fn store<T>(&self, key: &CacheKey, claim: &Claim, loaded: &Loaded<T>, cost: Duration) -> Load
    where
        C: Codec<T>,
    {
        let value = match self.encode(key, loaded) {
            Ok(value) => value,
            Err(mark) => {
                self.release(key, claim, Some(mark)).await;
                return Load::NotStored;
            }
        };
        let entry = self.options.entry(value, loaded.fresh_for, cost);
        match self.client.call(self.client.store.put(key, &claim.token, &entry)).await {
            Ok(true) => Load::Stored,
            Ok(false) => {
                tracing::debug!(%key, "value is not cached: the key was invalidated, or the lease has ended");
                Load::Refused
            }
            Err(error) => {
                tracing::debug!(%key, %error, "value is not cached");
                self.release(key, claim, None).await;
                Load::NotStored
            }
        }
    }

    /// The encoded value, or the mark for a value that must not be stored.
    fn encode<T>(&self, key: &CacheKey, loaded: &Loaded<T>) -> Result<Option<Vec<u8>>, Mark>
    where
        C: Codec<T>,
    {
        let Options { max_len, fresh_for, .. } = *self.options;
        let Loaded { value, fresh_for: own, is_cached } = loaded;
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

/// How often to look for the entry of another process, at least: a notification may get lost.
const POLL: Duration = Duration::from_millis(500);
/// The shortest wait for it, if the lease is about to end.
const MIN_WAIT: Duration = Duration::from_millis(10);

/// The future of a loader, which calls it at the first poll: a panic of the call is then one of the future.
pub(super) async fn loading<T, L, F, R, E>(loader: L) -> Result<Loaded<T>, CacheError>
where
    L: FnOnce() -> F + Send,
    F: Future<Output = Result<R, E>> + Send,
    R: Into<Loaded<T>>,
    E: Into<crate::error::BoxError>,
{
    loader().await.map(Into::into).map_err(|error| CacheError::load(error.into()))
}
