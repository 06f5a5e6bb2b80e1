//! The store calls of a filter, each with a deadline, and the status that was read last.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::metrics::Meters;
use super::stats::fill_ratio;
use super::store::{Added, Block, ExistsFilterStore, FilterStatus, Layout, NewBits, Token, VersionIds};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::deadline::{Deadline, require_nonzero_deadline};

/// How long a status is used.
pub(super) const MAX_AGE: Duration = Duration::from_secs(1);
/// When one caller reads it again, while the others still use it.
const REFRESH_AGE: Duration = Duration::from_millis(500);
/// When another caller does so, if that one has not got a reply.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of any type.
pub(super) trait DynStore: Send + Sync {
    fn status<'a>(&'a self, filter: &'a Key) -> Call<'a, FilterStatus>;
    fn read_block<'a>(&'a self, filter: &'a Key, version: &'a Token, block: u32) -> Call<'a, Option<Block>>;
    fn grow<'a>(&'a self, filter: &'a Key, version: &'a Token, layout: &'a Layout) -> Call<'a, bool>;
    fn begin_build<'a>(
        &'a self,
        filter: &'a Key,
        seen: &'a VersionIds,
        version: &'a Token,
        ttl: Duration,
    ) -> Call<'a, bool>;
    fn add_bits<'a>(&'a self, filter: &'a Key, seen: &'a VersionIds, bits: &'a NewBits) -> Call<'a, Added>;
    fn end_build<'a>(
        &'a self,
        filter: &'a Key,
        seen: &'a VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> Call<'a, bool>;
    fn reach(&self) -> Reach;
}

impl<S: ExistsFilterStore + Send + Sync> DynStore for S {
    fn status<'a>(&'a self, filter: &'a Key) -> Call<'a, FilterStatus> {
        Box::pin(ExistsFilterStore::status(self, filter))
    }

    fn read_block<'a>(&'a self, filter: &'a Key, version: &'a Token, block: u32) -> Call<'a, Option<Block>> {
        Box::pin(ExistsFilterStore::read_block(self, filter, version, block))
    }

    fn grow<'a>(&'a self, filter: &'a Key, version: &'a Token, layout: &'a Layout) -> Call<'a, bool> {
        Box::pin(ExistsFilterStore::grow(self, filter, version, layout))
    }

    fn begin_build<'a>(
        &'a self,
        filter: &'a Key,
        seen: &'a VersionIds,
        version: &'a Token,
        ttl: Duration,
    ) -> Call<'a, bool> {
        Box::pin(ExistsFilterStore::begin_build(self, filter, seen, version, ttl))
    }

    fn add_bits<'a>(&'a self, filter: &'a Key, seen: &'a VersionIds, bits: &'a NewBits) -> Call<'a, Added> {
        Box::pin(ExistsFilterStore::add_bits(self, filter, seen, bits))
    }

    fn end_build<'a>(
        &'a self,
        filter: &'a Key,
        seen: &'a VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> Call<'a, bool> {
        Box::pin(ExistsFilterStore::end_build(self, filter, seen, is_complete, ttl))
    }

    fn reach(&self) -> Reach {
        ExistsFilterStore::reach(self)
    }
}

/// A store, and what this process knows of one filter in it.
pub(super) struct StoreClient {
    pub(super) store: Box<dyn DynStore>,
    pub(super) filter: Key,
    known: Mutex<Option<Known>>,
    meters: OnceLock<Meters>,
    is_warned: AtomicBool,
}

struct Known {
    status: FilterStatus,
    // Before the status was read.
    read: Instant,
    refresh: Instant,
}

impl StoreClient {
    pub(super) fn new(store: Box<dyn DynStore>, filter: Key) -> Self {
        Self { store, filter, known: Mutex::default(), meters: OnceLock::new(), is_warned: AtomicBool::new(false) }
    }

    /// Makes a call with a deadline.
    pub(super) async fn call<T>(&self, deadline: Duration, call: Call<'_, T>) -> Result<T, StoreError> {
        require_nonzero_deadline(deadline)?;
        Deadline::new(call, deadline).await
    }

    /// The status of the filter, as it was at most [`MAX_AGE`] ago.
    pub(super) async fn status(&self, deadline: Duration) -> Result<FilterStatus, StoreError> {
        match self.known_status() {
            Some(status) => Ok(status),
            None => self.read_status(deadline).await,
        }
    }

    /// The status that was read last, unless it is too old, or this caller should read it again.
    fn known_status(&self) -> Option<FilterStatus> {
        let now = Instant::now();
        let mut known = self.known();
        let known = known.as_mut().filter(|known| now < known.read + MAX_AGE)?;
        if now >= known.refresh {
            known.refresh = now + REFRESH_PAUSE;
            return None;
        }
        Some(known.status)
    }

    /// The current status of the filter.
    pub(super) async fn read_status(&self, deadline: Duration) -> Result<FilterStatus, StoreError> {
        let read = Instant::now();
        let status = self.call(deadline, self.store.status(&self.filter)).await?;
        self.report(&status);
        let mut known = self.known();
        // A slower call must not replace a newer status.
        if known.as_ref().is_none_or(|known| known.read <= read) {
            *known = Some(Known { status, read, refresh: read + REFRESH_AGE });
        }
        Ok(status)
    }

    /// Reads the status again at the next call.
    pub(super) fn forget_status(&self) {
        *self.known() = None;
    }

    fn report(&self, status: &FilterStatus) {
        let Some(active) = &status.active else { return };
        let fill_ratio = fill_ratio(active);
        self.meters.get_or_init(|| Meters::new(&self.filter)).filled(fill_ratio);
        if fill_ratio > 0.5 && !self.is_warned.swap(true, Ordering::Relaxed) {
            let (filter, keys) = (&self.filter, active.keys);
            tracing::warn!(%filter, fill_ratio, keys, "exists filter is more than half full: rebuild it with a larger capacity");
        }
    }

    /// No code panics in the middle of a change, so a poisoned status is intact.
    fn known(&self) -> MutexGuard<'_, Option<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
