//! Builds a new version of a filter.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::sleep;

use super::error::ExistsFilterError;
use super::layout::{KeyBits, Layout};
use super::settings::Settings;
use super::store::{ALLOCATION_STEP, Added, MAX_KEYS, NewBits, Token, VersionIds};
use super::store_client::{LOSS_PAUSE, StoreClient};
use crate::error::{BoxError, StoreError};
use crate::key::Key;

/// The largest number of attempts of a call. A build takes minutes, so a short outage must not end the build.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// A rebuild of one filter.
pub(super) struct Rebuild<'a> {
    pub(super) client: &'a StoreClient,
}

impl Rebuild<'_> {
    pub(super) async fn run<St, K, E>(&self, blocks: u32, keys: St) -> Result<u64, ExistsFilterError>
    where
        St: Stream<Item = Result<K, E>> + Send,
        K: Into<Key>,
        E: Into<BoxError>,
    {
        let version = Token::random()?;
        let layout = Layout::new(blocks, *Token::random()?.as_bytes());
        self.allocate(&version, &layout).await?;
        let ids = self.begin(&version).await?;
        let filled = async {
            sleep(self.client.settings.visible_within).await;
            self.fill(&ids, &layout, keys).await
        };
        let count = match filled.await {
            Ok(count) => count,
            Err(error) => {
                self.abandon(&ids).await;
                return Err(error);
            }
        };
        if self.end(&ids, true).await? { Ok(count) } else { Err(self.why_refused(&ids).await) }
    }

    /// Creates the version in steps of at most [`ALLOCATION_STEP`] bytes.
    async fn allocate(&self, version: &Token, layout: &Layout) -> Result<(), ExistsFilterError> {
        let StoreClient { store, filter, .. } = self.client;
        // Twice the necessary steps, since the store may lose the version meanwhile.
        let steps = 2 * (layout.bytes() / ALLOCATION_STEP as u64 + 2);
        for _ in 0..steps {
            if self.persist(|| store.allocate(filter, version, layout)).await? {
                return Ok(());
            }
        }
        Err(ExistsFilterError::Lost)
    }

    async fn begin(&self, version: &Token) -> Result<VersionIds, ExistsFilterError> {
        let StoreClient { store, filter, settings: Settings { ttl, .. }, .. } = self.client;
        for _ in 0..ATTEMPTS {
            let mut seen = self.client.read_status().await?.status.ids;
            if seen == VersionIds::default() {
                self.wait_for_lost_ids().await?;
                seen = self.client.read_status().await?.status.ids;
            }
            if self.persist(|| store.begin_build(filter, &seen, version, *ttl)).await? {
                return Ok(VersionIds::new(seen.active, Some(*version)));
            }
        }
        Err(ExistsFilterError::Superseded)
    }

    /// Waits until no process uses versions whose ids the store may have lost. After the build has begun, additions go only to the new
    /// version, and do not wait.
    async fn wait_for_lost_ids(&self) -> Result<(), StoreError> {
        let StoreClient { store, filter, settings, .. } = self.client;
        let (none, nothing) = (VersionIds::default(), NewBits::added(Vec::new(), Vec::new(), settings.ttl));
        while let Added::Missing { missing_for } = self.persist(|| store.add_bits(filter, &none, &nothing)).await? {
            match LOSS_PAUSE.checked_sub(missing_for) {
                None | Some(Duration::ZERO) => break,
                Some(pause) => sleep(pause).await,
            }
        }
        Ok(())
    }

    async fn fill<St, K, E>(&self, ids: &VersionIds, layout: &Layout, keys: St) -> Result<u64, ExistsFilterError>
    where
        St: Stream<Item = Result<K, E>> + Send,
        K: Into<Key>,
        E: Into<BoxError>,
    {
        let mut keys = pin!(keys);
        let (mut count, mut chunk) = (0, Vec::with_capacity(MAX_KEYS));
        while let Some(key) = next(keys.as_mut()).await {
            chunk.push(layout.locate(&key?));
            count += 1;
            if chunk.len() == MAX_KEYS {
                self.write(ids, &mut chunk).await?;
            }
        }
        if !chunk.is_empty() {
            self.write(ids, &mut chunk).await?;
        }
        Ok(count)
    }

    async fn write(&self, ids: &VersionIds, chunk: &mut Vec<KeyBits>) -> Result<(), ExistsFilterError> {
        let StoreClient { store, filter, .. } = self.client;
        let bits = NewBits::built(std::mem::take(chunk), self.client.settings.ttl);
        match self.persist(|| store.add_bits(filter, ids, &bits)).await? {
            Added::Done { building: true, .. } => {}
            Added::Done { building: false, .. } => return Err(ExistsFilterError::Lost),
            Added::Changed | Added::Missing { .. } => return Err(self.why_refused(ids).await),
        }
        *chunk = bits.building;
        chunk.clear();
        Ok(())
    }

    async fn end(&self, ids: &VersionIds, is_complete: bool) -> Result<bool, StoreError> {
        let StoreClient { store, filter, .. } = self.client;
        self.persist(|| store.end_build(filter, ids, is_complete, self.client.settings.ttl)).await
    }

    /// Removes the unfinished version, so that additions go to one version again.
    async fn abandon(&self, ids: &VersionIds) {
        if let Err(error) = self.end(ids, false).await {
            let filter = &self.client.filter;
            tracing::debug!(%filter, %error, "unfinished version of an exists filter is not removed, and expires");
        }
    }

    /// Why the store refuses to go on with this build.
    async fn why_refused(&self, ids: &VersionIds) -> ExistsFilterError {
        match self.client.read_status().await.map(|known| known.status.ids) {
            Ok(found) if found.building == ids.building || found == VersionIds::default() => ExistsFilterError::Lost,
            Ok(_) => ExistsFilterError::Superseded,
            Err(error) => error.into(),
        }
    }

    /// Retries a call if the store is late or unavailable. All calls of a build may be repeated.
    async fn persist<'a, T>(
        &self,
        call: impl Fn() -> Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>> + Send,
    ) -> Result<T, StoreError> {
        let mut attempt = 1;
        loop {
            match self.client.call_always(call()).await {
                Err(error) if attempt < ATTEMPTS && (error.is_timeout() || error.is_unavailable()) => {
                    attempt += 1;
                    sleep(PAUSE).await;
                }
                reply => return reply,
            }
        }
    }
}

/// The next key. Converted within the poll, so that the future is `Send` even if the items are not.
async fn next<St, K, E>(mut keys: Pin<&mut St>) -> Option<Result<Key, ExistsFilterError>>
where
    St: Stream<Item = Result<K, E>>,
    K: Into<Key>,
    E: Into<BoxError>,
{
    let convert = |key: Result<K, E>| match key {
        Ok(key) => Ok(key.into()),
        Err(error) => Err(ExistsFilterError::Keys(error.into())),
    };
    poll_fn(|cx| keys.as_mut().poll_next(cx).map(|key| key.map(convert))).await
}
