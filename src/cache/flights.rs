//! The loads of a cache in this process. Callers can join at most one load of each key.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{Instrument, Span};

use super::error::CacheError;
use super::loader::without_panics;
use super::store::CacheKey;
use crate::key::Key;
use crate::panics::discard_joined;
use crate::store::shutdown::{ShutdownReport, Work};

/// The result of a load for all callers.
pub(crate) type Outcome<T> = Result<Option<Arc<T>>, CacheError>;

/// The loads in progress, by key.
pub(super) struct Flights<T> {
    running: Mutex<HashMap<CacheKey, Arc<Flight<T>>>>,
    count: watch::Sender<usize>,
    is_closed: AtomicBool,
}

/// A load in progress.
struct Flight<T> {
    // `None` until the load has ended.
    outcome: watch::Sender<Option<Outcome<T>>>,
    // Whether the load goes on without callers: it runs in the background, or its loader has returned and only its result must be stored.
    runs_without_callers: Arc<AtomicBool>,
    tags: Vec<Key>,
}

/// A caller of a load.
pub(crate) struct LoadWaiter<T>(watch::Receiver<Option<Outcome<T>>>);

impl<T> LoadWaiter<T> {
    /// The result of the load.
    pub(crate) async fn outcome(mut self) -> Outcome<T> {
        // Without a result its task was aborted, since the cache was dropped.
        let outcome = self.0.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone());
        outcome.unwrap_or(Err(CacheError::Closed))
    }
}

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self { running: Mutex::default(), count: watch::Sender::new(0), is_closed: AtomicBool::new(false) }
    }
}

impl<T> Flights<T> {
    fn running(&self) -> MutexGuard<'_, HashMap<CacheKey, Arc<Flight<T>>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + Sync + 'static> Flights<T> {
    /// Joins the load of a key, or starts `load` in a task of `tasks`. Unless `runs_without_callers` is set, the load is cancelled when its
    /// last caller has gone, and then `cancel` runs.
    pub(super) fn join_or_start<L, C>(
        self: &Arc<Self>,
        tasks: &Mutex<JoinSet<()>>,
        key: CacheKey,
        tags: &[Key],
        runs_without_callers: Arc<AtomicBool>,
        load: impl FnOnce(FlightHandle<T>) -> L,
        cancel: impl FnOnce() -> C + Send + 'static,
    ) -> Result<LoadWaiter<T>, CacheError>
    where
        L: Future<Output = Outcome<T>> + Send + 'static,
        C: Future<Output = ()> + Send,
    {
        let mut running = self.running();
        if let Some(flight) = running.get(&key) {
            return Ok(LoadWaiter(flight.outcome.subscribe()));
        }
        if self.is_closed.load(Ordering::Acquire) {
            return Err(CacheError::Closed);
        }
        let (outcome, receiver) = watch::channel(None);
        let flight = Arc::new(Flight { outcome, runs_without_callers, tags: tags.to_vec() });
        running.insert(key, Arc::clone(&flight));
        let counted = Counted::new(Arc::clone(self));
        drop(running);
        let handle = FlightHandle { flights: Arc::clone(self), key, flight };
        let load = without_panics(load(handle.clone()));
        let mut tasks = tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(result) = tasks.try_join_next() {
            discard_joined(result);
        }
        let guard = RemoveOnEnd(handle);
        let task = async move {
            let flight = Arc::clone(&guard.0.flight);
            let mut load = Box::pin(load);
            match guard.run(load.as_mut()).await {
                Some(outcome) => {
                    flight.outcome.send_replace(Some(outcome));
                }
                None => {
                    drop(load);
                    cancel().await;
                }
            }
            drop(counted);
        };
        tasks.spawn(task.instrument(Span::current()));
        Ok(LoadWaiter(receiver))
    }

    /// Callers from now on do not join the load of a key. Its earlier callers still get its result.
    pub(super) fn close_to_new_callers(&self, key: &CacheKey) {
        self.running().remove(key);
    }

    /// The same for all loads with a tag.
    pub(super) fn detach_tag(&self, tag: &Key) {
        self.running().retain(|_, flight| !flight.tags.contains(tag));
    }
}

/// A load in the table.
pub(super) struct FlightHandle<T> {
    flights: Arc<Flights<T>>,
    key: CacheKey,
    flight: Arc<Flight<T>>,
}

impl<T> FlightHandle<T> {
    /// Later callers do not join this load.
    pub(super) fn close_to_new_callers(&self) {
        self.detach_from(&mut self.flights.running());
    }

    /// The same, if the load has no callers. Returns whether it has none.
    pub(super) fn detach_if_no_callers(&self) -> bool {
        // Locked, so that no caller joins meanwhile.
        let mut running = self.flights.running();
        let has_callers = self.flight.outcome.receiver_count() > 0;
        if !has_callers {
            self.detach_from(&mut running);
        }
        !has_callers
    }

    fn detach_from(&self, running: &mut HashMap<CacheKey, Arc<Flight<T>>>) {
        // After an invalidation, the next load of the key may have begun.
        if running.get(&self.key).is_some_and(|flight| Arc::ptr_eq(flight, &self.flight)) {
            running.remove(&self.key);
        }
    }
}

// Not derived, which would require `T: Clone`.
impl<T> Clone for FlightHandle<T> {
    fn clone(&self) -> Self {
        Self { flights: Arc::clone(&self.flights), key: self.key, flight: Arc::clone(&self.flight) }
    }
}

/// Removes a load from the table when it ends, also if its task is aborted.
struct RemoveOnEnd<T>(FlightHandle<T>);

impl<T: Send + Sync + 'static> RemoveOnEnd<T> {
    /// Runs a load, and removes it from the table. `None` if the last caller has gone.
    async fn run<L>(self, mut load: Pin<&mut L>) -> Option<Outcome<T>>
    where
        L: Future<Output = Outcome<T>> + Send,
    {
        let flight = &self.0.flight;
        let runs_without_callers = || flight.runs_without_callers.load(Ordering::Acquire);
        loop {
            tokio::select! {
                outcome = &mut load => return Some(outcome),
                () = flight.outcome.closed(), if !runs_without_callers() => {
                    // The loader may have returned meanwhile.
                    if !runs_without_callers() && self.0.detach_if_no_callers() {
                        return None;
                    }
                }
            }
        }
    }
}

impl<T> Drop for RemoveOnEnd<T> {
    fn drop(&mut self) {
        self.0.close_to_new_callers();
    }
}

/// Counts a task until its end, for the shutdown.
struct Counted<T>(Arc<Flights<T>>);

impl<T> Counted<T> {
    fn new(flights: Arc<Flights<T>>) -> Self {
        flights.count.send_modify(|count| *count += 1);
        Self(flights)
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.0.count.send_modify(|count| *count -= 1);
    }
}

impl<T: Send + Sync> Work for Flights<T> {
    fn close(&self) {
        // Locked, so that no load begins between its check of `is_closed` and its count.
        let _running = self.running();
        self.is_closed.store(true, Ordering::Release);
    }

    fn is_idle(&self) -> bool {
        *self.count.borrow() == 0
    }

    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            // The sender lives in `self`, so this cannot fail.
            let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
        })
    }

    fn left(&self) -> ShutdownReport {
        ShutdownReport { loads: *self.count.borrow(), ..ShutdownReport::default() }
    }
}
