use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream;
use tokio::time::sleep;

use super::error::ExistsFilterError;
use super::layout::Layout;
use super::local_copy::LocalCopy;
use super::rebuild::Rebuild;
use super::settings::Settings;
use super::sizing::blocks;
use super::stats::ExistsFilterStats;
use super::store::{Added, ExistsFilterStore, MAX_KEYS, NewBits};
use super::store_client::{LOSS_PAUSE, MAX_AGE, StoreClient};
use crate::error::{BoxError, ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;

/// A Bloom filter of the keys that exist. A key that the filter excludes does not exist. About 1 % of the absent keys pass it as well.
///
/// See the [module docs](super) for an example, its sizes, and the cases in which it excludes a key that exists.
///
/// Cheap to clone. All filters with the same name on the same backend share their keys.
#[derive(Clone)]
pub struct ExistsFilter {
    client: StoreClient,
    local: Option<Arc<LocalCopy>>,
}

impl ExistsFilter {
    const TTLS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(365 * 86_400));
    /// During a rebuild, the store keeps the new version for one hour after the last call. A longer wait would use up much of this hour.
    const MAX_VISIBLE_WITHIN: Duration = Duration::from_secs(600);
    /// The largest number of attempts of an addition, if builds begin or end meanwhile.
    const ATTEMPTS: usize = 8;

    /// The filter `name` of `store`, which is a [backend](crate::backend). [`rebuild`](Self::rebuild) gives it room for `capacity` keys.
    ///
    /// Before the first rebuild it may contain every key.
    pub fn new(store: impl ExistsFilterStore + Send + Sync + 'static, name: impl Into<Key>, capacity: u64) -> Self {
        Self { client: StoreClient::new(Arc::new(store), name.into(), capacity), local: None }
    }

    /// The part of absent keys that are false positives once the filter has `capacity` keys, from 0.000001 to 0.5. Used by the next
    /// rebuild. Defaults to 0.01.
    #[must_use]
    pub fn error_rate(mut self, error_rate: f64) -> Self {
        self.client.settings.error_rate = error_rate;
        self
    }

    /// How long the filter is kept after the last addition or rebuild, from one second to one year. After that it may contain every key.
    /// Defaults to 30 days.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        let (min, max) = Self::TTLS;
        self.client.settings.ttl = ttl.clamp(min, max);
        self
    }

    /// The longest time from the [`add`](Self::add) of a key until a query finds its row, at most ten minutes. A rebuild waits for this time
    /// before it reads the first key, so that its query finds the keys that were added before. Defaults to ten seconds.
    #[must_use]
    pub fn visible_within(mut self, time: Duration) -> Self {
        self.client.settings.visible_within = time.min(Self::MAX_VISIBLE_WITHIN);
        self
    }

    /// The deadline of a store call. Defaults to 100 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.client.settings.deadline = deadline;
        self
    }

    /// When to stop calling a failing store. Additions and rebuilds call it all the same. Defaults to [`CircuitBreaker::new`].
    #[must_use]
    pub fn circuit_breaker(mut self, settings: CircuitBreaker) -> Self {
        self.client.set_circuit_breaker(settings);
        self
    }

    /// Keeps a copy of the filter in this process too, and tests keys without a call of the store. By default, and with zero, there is none.
    ///
    /// A copy is used until it is `max_age` old, or a year if that is shorter. So for up to `max_age`, this process may exclude a key that
    /// another process has added. Keys that this process adds are in its copy at once. Set `max_age` to a time for which a new row may seem
    /// absent.
    ///
    /// While keys are tested, a task looks whether the filter has changed: twice in each `max_age`, but at most four times per second. If
    /// so, it reads the whole filter: 1.3 MB for a million keys. A filter of more than 16 MiB has no copy. During a refresh, the process
    /// has two copies. Clones of this filter share the copy. The task ends when the last clone is dropped.
    #[must_use]
    pub fn local_copy(mut self, max_age: Duration) -> Self {
        let (_, longest) = Self::TTLS;
        self.local = (!max_age.is_zero()).then(|| Arc::new(LocalCopy::new(max_age.min(longest))));
        self
    }

    /// Which processes share the filter.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.client.store.reach()
    }

    /// Checks that the filter is shared as widely as you need, so that the memory backend is not used by mistake.
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if the store's reach is less than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.reach().require(needed)?;
        Ok(self)
    }

    /// The memory in bytes that the next rebuild takes. Until it ends, the store has the old version too.
    ///
    /// # Errors
    ///
    /// If the capacity is zero or too large, or the error rate is out of range.
    pub fn bytes(&self) -> Result<u64, ExistsFilterError> {
        let Settings { capacity, error_rate, .. } = self.client.settings;
        Ok(Layout::new(blocks(capacity, error_rate)?, [0; 16]).bytes())
    }

    /// Whether the key may exist. False means that it was not added since the last rebuild.
    ///
    /// True for every key if there is no filter: before the first rebuild, and after the [`ttl`](Self::ttl). The same holds if the store has
    /// evicted the filter or the data is damaged. Also true if the reply comes more than one second after this process has read the ids of the
    /// versions: the filter may have changed meanwhile.
    ///
    /// # Errors
    ///
    /// If the store fails. Then the key may exist.
    pub async fn might_contain(&self, key: impl Into<Key>) -> Result<bool, StoreError> {
        match self.test(&key.into()).await {
            // The filter is damaged.
            Err(error) if error.is_foreign_data() => Ok(true),
            tested => tested,
        }
    }

    /// Whether a key is absent for certain. False if the store fails.
    pub(in crate::cache) async fn excludes(&self, key: &Key) -> bool {
        match self.might_contain(*key).await {
            Ok(might_contain) => !might_contain,
            Err(error) => {
                tracing::debug!(filter = %self.client.filter, %error, "exists filter cannot be read, so the key may exist");
                false
            }
        }
    }

    async fn test(&self, key: &Key) -> Result<bool, StoreError> {
        let client = &self.client;
        if let Some(might_contain) = self.local.as_ref().and_then(|local| local.might_contain(client, key)) {
            return Ok(might_contain);
        }
        let known = client.status().await?;
        let (Some(version), Some(active)) = (known.status.ids.active, known.status.active) else { return Ok(true) };
        let bits = active.layout.locate(key);
        match client.call(client.store.read_block(&client.filter, &version, bits.block)).await? {
            // If the store has lost the ids of the versions, `add_chunk` relies on this age: it waits until all known ids are older.
            Some(block) => Ok(bits.are_set_in(&block) || known.read.elapsed() > MAX_AGE),
            None => {
                // Another version may be active by now.
                client.forget_status();
                Ok(true)
            }
        }
    }

    /// Adds a key. Call it before the row of the key becomes visible to others, for instance before you commit its transaction.
    ///
    /// During a rebuild, the key is added to both versions. Without a filter, nothing is added: the next rebuild reads the key. On Redis,
    /// the first addition without a filter takes 1.25 seconds: if Redis has just evicted the filter, other processes may use it for another
    /// second.
    ///
    /// A cached absence of the key stays cached: [invalidate](crate::Cache::invalidate) the key after the commit, or
    /// [store](crate::Cache::set) the new value.
    ///
    /// # Errors
    ///
    /// If the store fails. The filter may then exclude the key, so do not create the row.
    pub async fn add(&self, key: impl Into<Key>) -> Result<(), StoreError> {
        self.add_chunk(&[key.into()]).await
    }

    /// Adds many keys, in one call to the store for each 128 of them. Otherwise like [`add`](Self::add).
    ///
    /// # Errors
    ///
    /// If the store fails. Some of the keys may then have been added.
    pub async fn add_all<I>(&self, keys: I) -> Result<(), StoreError>
    where
        I: IntoIterator<Item: Into<Key>, IntoIter: Send> + Send,
    {
        let mut keys = keys.into_iter().map(Into::<Key>::into);
        let mut chunk = Vec::with_capacity(MAX_KEYS);
        loop {
            chunk.clear();
            chunk.extend(keys.by_ref().take(MAX_KEYS));
            if chunk.is_empty() {
                return Ok(());
            }
            self.add_chunk(&chunk).await?;
        }
    }

    async fn add_chunk(&self, keys: &[Key]) -> Result<(), StoreError> {
        let client = &self.client;
        let mut known = client.known_status();
        for _ in 0..Self::ATTEMPTS {
            let status = match known.take() {
                Some(known) => known.status,
                None => client.read_status().await?.status,
            };
            let located = |layout: Layout| keys.iter().map(|key| layout.locate(key)).collect();
            let [active, building] = [status.active, status.building]
                .map(|version| version.map_or_else(Vec::new, |version| located(version.layout)));
            let bits = NewBits::added(active, building, client.settings.ttl);
            match client.call_always(client.store.add_bits(&client.filter, &status.ids, &bits)).await? {
                Added::Done { .. } => {
                    if let Some(local) = &self.local {
                        local.add(status.ids.active.as_ref(), &bits.active);
                    }
                    return Ok(());
                }
                Added::Changed => {}
                Added::Missing { missing_for } => match LOSS_PAUSE.checked_sub(missing_for) {
                    None | Some(Duration::ZERO) => {
                        if let Some(local) = &self.local {
                            local.clear();
                        }
                        return Ok(());
                    }
                    Some(pause) => sleep(pause).await,
                },
            }
        }
        Err(StoreError::other("the versions of the exists filter changed at each attempt to add a key"))
    }

    /// Builds the filter anew from a stream of all keys that exist, and then replaces the old one. Returns the number of keys in the stream.
    ///
    /// The stream is first polled after [`visible_within`](Self::visible_within): run the query in it, and not before. Keys that are added
    /// meanwhile are in the new filter too. Until the end, the old filter is used.
    ///
    /// If two processes rebuild a filter, only the later rebuild succeeds: hold a [lock](crate::Locks) meanwhile.
    ///
    /// # Errors
    ///
    /// See [`ExistsFilterError`].
    ///
    /// # Cancellation
    ///
    /// If you drop the future, the old filter stays. The store keeps the unfinished version for an hour, and additions go to both.
    #[allow(
        clippy::manual_async_fn,
        reason = "with some streams, the compiler could not tell that the future is `Send`"
    )]
    pub fn rebuild<St, K, E>(&self, keys: St) -> impl Future<Output = Result<u64, ExistsFilterError>> + Send
    where
        St: Stream<Item = Result<K, E>> + Send,
        K: Into<Key>,
        E: Into<BoxError>,
    {
        async move {
            let Settings { capacity, error_rate, .. } = self.client.settings;
            let blocks = blocks(capacity, error_rate)?;
            let result = Rebuild { client: &self.client }.run(blocks, keys).await;
            self.client.forget_status();
            if let Some(local) = &self.local {
                local.clear();
            }
            result
        }
    }

    /// The state of the filter. `None` if there is none.
    ///
    /// # Errors
    ///
    /// If the store fails.
    pub async fn stats(&self) -> Result<Option<ExistsFilterStats>, StoreError> {
        let status = self.client.read_status().await?.status;
        Ok(status.active.map(|active| ExistsFilterStats::new(&active, status.ids.building.is_some())))
    }
}

impl fmt::Debug for ExistsFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StoreClient { filter, settings, .. } = &self.client;
        f.debug_struct("ExistsFilter").field("name", filter).field("settings", settings).finish_non_exhaustive()
    }
}
