//! The store calls of a filter, with their deadline and circuit breaker, and the status that was read last.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::metrics::Metrics;
use super::settings::Settings;
use super::sizing::is_overfull;
use super::stats::fill_ratio;
use super::store::{Added, Block, ExistsFilterStore, FilterStatus, Layout, NewBits, Token, VersionIds};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::{Circuit, CircuitBreaker, observe_circuit};

/// How long a status is used.
pub(super) const MAX_AGE: Duration = Duration::from_secs(1);
/// If the store has lost the ids of the versions, a process waits until this long after the first call that found none. Other processes may
/// use the lost ids for [`MAX_AGE`], and clocks may run at slightly different rates.
pub(super) const LOSS_PAUSE: Duration = MAX_AGE.saturating_add(Duration::from_millis(250));
/// The age of a status at which one caller reads the status again, while the others still use the old one.
const REFRESH_AGE: Duration = Duration::from_millis(500);
/// How long after the start of such a read another caller reads the status, if the first caller has no reply yet.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// [`ExistsFilterStore`] as a trait object.
pub(super) trait DynStore: Send + Sync {
    fn status<'a>(&'a self, filter: &'a Key) -> Call<'a, FilterStatus>;
    fn read_block<'a>(&'a self, filter: &'a Key, version: &'a Token, block: u32) -> Call<'a, Option<Block>>;
    fn read_blocks<'a>(
        &'a self,
        filter: &'a Key,
        version: &'a Token,
        first: u32,
        count: u32,
    ) -> Call<'a, Option<Vec<Block>>>;
    fn allocate<'a>(&'a self, filter: &'a Key, version: &'a Token, layout: &'a Layout) -> Call<'a, bool>;
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

    fn read_blocks<'a>(
        &'a self,
        filter: &'a Key,
        version: &'a Token,
        first: u32,
        count: u32,
    ) -> Call<'a, Option<Vec<Block>>> {
        Box::pin(ExistsFilterStore::read_blocks(self, filter, version, first, count))
    }

    fn allocate<'a>(&'a self, filter: &'a Key, version: &'a Token, layout: &'a Layout) -> Call<'a, bool> {
        Box::pin(ExistsFilterStore::allocate(self, filter, version, layout))
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

/// A store with a circuit breaker, and what this process knows of one filter in it.
#[derive(Clone)]
pub(super) struct StoreClient {
    pub(super) store: Arc<dyn DynStore>,
    pub(super) filter: Key,
    pub(super) settings: Settings,
    circuit: Arc<Circuit>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    known: Mutex<Option<Known>>,
    metrics: OnceLock<Metrics>,
    is_warned: AtomicBool,
}

/// A status that was read.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub(super) status: FilterStatus,
    /// When the call that read the status began.
    pub(super) read: Instant,
    refresh: Instant,
}

impl StoreClient {
    pub(super) fn new(store: Arc<dyn DynStore>, filter: Key, capacity: u64) -> Self {
        Self {
            store,
            filter,
            settings: Settings::new(capacity),
            circuit: Arc::new(Circuit::new(CircuitBreaker::new())),
            shared: Arc::default(),
        }
    }

    pub(super) fn set_circuit_breaker(&mut self, settings: CircuitBreaker) {
        self.circuit = Arc::new(Circuit::new(settings));
    }

    /// Makes a call, unless the circuit is open.
    pub(super) async fn call<T>(&self, call: Call<'_, T>) -> Result<T, StoreError> {
        self.circuit.call(self, self.settings.deadline, call).await
    }

    /// Makes a call, also while the circuit is open: for additions and rebuilds, which are rarer than tests.
    pub(super) async fn call_always<T>(&self, call: Call<'_, T>) -> Result<T, StoreError> {
        self.circuit.call_always(self, self.settings.deadline, call).await
    }

    /// For tests of keys: the status of the filter, as it was at most [`MAX_AGE`] ago.
    pub(super) async fn status(&self) -> Result<Known, StoreError> {
        match self.known_status() {
            Some(known) => Ok(known),
            None => self.current_status().await,
        }
    }

    /// Reads the status from the store, unless the circuit is open.
    pub(super) async fn current_status(&self) -> Result<Known, StoreError> {
        self.circuit.admit()?;
        self.read_status().await
    }

    /// The status that was read last, unless it is too old, or this caller should read it again.
    pub(super) fn known_status(&self) -> Option<Known> {
        let now = Instant::now();
        let mut known = self.known();
        let known = known.as_mut().filter(|known| now < known.read + MAX_AGE)?;
        if now >= known.refresh {
            known.refresh = now + REFRESH_PAUSE;
            return None;
        }
        Some(*known)
    }

    /// Reads the status from the store, also while the circuit is open, and remembers it.
    pub(super) async fn read_status(&self) -> Result<Known, StoreError> {
        let read = Instant::now();
        let status = self.call_always(self.store.status(&self.filter)).await?;
        self.report(&status);
        let new = Known { status, read, refresh: read + REFRESH_AGE };
        let mut known = self.known();
        // A slower call must not replace a newer status.
        if known.as_ref().is_none_or(|known| known.read <= read) {
            *known = Some(new);
        }
        Ok(new)
    }

    /// Makes the next test of a key read the status again.
    pub(super) fn forget_status(&self) {
        *self.known() = None;
    }

    fn report(&self, status: &FilterStatus) {
        let Some(active) = &status.active else { return };
        let fill_ratio = fill_ratio(active);
        self.metrics().filled(fill_ratio);
        let is_overfull = is_overfull(active.layout.blocks, active.keys, self.settings.error_rate);
        if self.shared.is_warned.swap(is_overfull, Ordering::Relaxed) || !is_overfull {
            return;
        }
        let (filter, keys) = (&self.filter, active.keys);
        tracing::warn!(%filter, keys, fill_ratio, "exists filter has more keys than it was built for: rebuild it with a larger capacity");
    }

    fn metrics(&self) -> &Metrics {
        self.shared.metrics.get_or_init(|| Metrics::new(&self.filter))
    }

    /// No code panics in the middle of a change, so a poisoned status is intact.
    fn known(&self) -> MutexGuard<'_, Option<Known>> {
        self.shared.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

observe_circuit!("exists filter", StoreClient, |client| client.metrics(), filter = %client.filter);
