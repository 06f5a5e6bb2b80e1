use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::erased::DynStore;
use super::error::QueueFull;
use super::local_queues::LocalQueues;
use super::lock_key::LockKey;
use super::metrics::Metrics;
use super::renewal_schedule::RenewalScheduler;
use crate::key::Key;
use crate::store::circuit::{Circuit, CircuitBreaker, observe_circuit};
use crate::store::shutdown::{ShutdownReport, Work};

/// The state that all clones of one [`Locks`](super::Locks) and their leases share.
pub(super) struct LocksState {
    pub(super) store: Arc<dyn DynStore>,
    /// The name of the locks: part of their keys, and their name in the log and the metrics.
    pub(super) name: Key,
    pub(super) queues: LocalQueues,
    pub(super) renewals: RenewalScheduler,
    /// Whether a key can have several holders. Then callers queue locally only to call the store.
    pub(super) is_semaphore: bool,
    // Both are created at first use. Until then, `set_circuit` may change the breaker, and the program may install a metrics recorder.
    circuit: OnceLock<Circuit>,
    metrics: OnceLock<Metrics>,
    // The settings of the circuit breaker.
    breaker: Mutex<CircuitBreaker>,
    // The name of holders, if set.
    holder: RwLock<Option<Arc<str>>>,
    // The number of callers that wait for a lock.
    waiters: AtomicUsize,
    is_closed: AtomicBool,
    closing: Notify,
    // Releases in progress, and detached requests without a lease.
    releases: AtomicUsize,
    // Tasks in the background, also those of releases.
    tasks: AtomicUsize,
    /// Acquisitions with an unknown outcome that are being undone.
    pub(super) undoing: AtomicUsize,
    idle: Notify,
    // The runtime of the renewal task. It runs the releases of leases that are dropped outside of a runtime.
    fallback_runtime: Mutex<Option<Handle>>,
}

impl LocksState {
    pub(super) fn new(store: Arc<dyn DynStore>, name: Key, is_semaphore: bool) -> Self {
        Self {
            store,
            name,
            queues: LocalQueues::new(),
            renewals: RenewalScheduler::new(),
            is_semaphore,
            circuit: OnceLock::new(),
            metrics: OnceLock::new(),
            breaker: Mutex::default(),
            holder: RwLock::default(),
            waiters: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            closing: Notify::new(),
            releases: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            undoing: AtomicUsize::new(0),
            idle: Notify::new(),
            fallback_runtime: Mutex::new(None),
        }
    }

    /// Sets the circuit breaker, unless the store was called already.
    pub(super) fn set_circuit(&self, breaker: CircuitBreaker) {
        if self.circuit.get().is_some() {
            tracing::warn!(
                locks = self.name.as_str(),
                "a circuit breaker of locks is ignored: set it before the first call of the store"
            );
        } else {
            *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = breaker;
        }
    }

    pub(super) fn circuit(&self) -> &Circuit {
        let make = || Circuit::new(*self.breaker.lock().unwrap_or_else(PoisonError::into_inner));
        self.circuit.get_or_init(make)
    }

    /// Sets the name of holders.
    pub(super) fn set_holder(&self, name: Arc<str>) {
        *self.holder.write().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    pub(super) fn holder(&self) -> Option<Arc<str>> {
        self.holder.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn metrics(&self) -> &Metrics {
        self.metrics.get_or_init(|| Metrics::new(self.name.as_str()))
    }

    /// Counts a waiter, unless `max` callers wait already. `max` does not apply to a requeued waiter, which was admitted before.
    pub(super) fn register_waiter(
        &self,
        lock: &LockKey,
        max: usize,
        is_requeued: bool,
    ) -> Result<WaiterGuard<'_>, QueueFull> {
        let waiters = WaiterGuard(self);
        let is_admitted = self.waiters.fetch_add(1, Ordering::Relaxed) < max || is_requeued;
        if is_admitted { Ok(waiters) } else { Err(QueueFull::new(*lock)) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Waits for the start of a shutdown.
    pub(super) async fn closed(&self) {
        let mut closing = pin!(self.closing.notified());
        closing.as_mut().enable();
        if !self.is_closed() {
            closing.await;
        }
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.closing.notify_waiters();
    }

    /// Waits until no lease, waiter or task is left.
    pub(super) async fn wait_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if Work::is_idle(self) {
                return;
            }
            idle.await;
        }
    }

    /// The number of leases that are held, being acquired or being released.
    fn leases(&self) -> usize {
        // Read in this order. An item that moves to the next collection is in both for a moment, so at least one of the reads counts it.
        let (locks, leases, releases) = (self.queues.len(), self.renewals.len(), self.releases.load(Ordering::SeqCst));
        // The queue of a lock stays while its lease is held or released.
        locks.max(leases + releases)
    }

    /// Call this after a lease, waiter or task has ended.
    pub(super) fn notify_idle(&self) {
        self.idle.notify_waiters();
    }

    pub(super) fn set_fallback_runtime(&self, runtime: Handle) {
        *self.fallback_runtime.lock().unwrap_or_else(PoisonError::into_inner) = Some(runtime);
    }

    /// Runs `task` in the background: in the caller's runtime, or in that of the renewal task. If both are gone, the lease
    /// expires.
    pub(super) fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_in(Handle::try_current().ok().or_else(|| self.fallback_runtime()), task);
    }

    /// Runs `task` in the runtime of the renewal task, because the caller's runtime is ending.
    pub(super) fn spawn_on_fallback(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_in(self.fallback_runtime(), task);
    }

    fn fallback_runtime(&self) -> Option<Handle> {
        self.fallback_runtime.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn spawn_in(self: &Arc<Self>, runtime: Option<Handle>, task: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = runtime else {
            tracing::debug!("cannot release a lease without a tokio runtime: the lease expires on its own");
            return;
        };
        let running = InFlightGuard::task(self);
        drop(runtime.spawn(async move {
            task.await;
            drop(running);
        }));
    }
}

impl Work for LocksState {
    fn close(&self) {
        Self::close(self);
    }

    fn is_idle(&self) -> bool {
        self.leases() == 0 && self.tasks.load(Ordering::SeqCst) == 0
    }

    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(Self::wait_idle(self))
    }

    fn left(&self) -> ShutdownReport {
        ShutdownReport { leases: self.leases(), ..ShutdownReport::default() }
    }
}

observe_circuit!("lock", LocksState, |state| state.metrics(), locks = state.name.as_str());

/// Counts a waiter until it is dropped.
pub(super) struct WaiterGuard<'a>(&'a LocksState);

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a release, a request or a task until it is dropped.
pub(super) struct InFlightGuard {
    shared: Arc<LocksState>,
    count: fn(&LocksState) -> &AtomicUsize,
}

impl InFlightGuard {
    /// A release, or a detached request without a lease.
    pub(super) fn new(shared: &Arc<LocksState>) -> Self {
        Self::counted(shared, |shared| &shared.releases)
    }

    /// A task in the background.
    fn task(shared: &Arc<LocksState>) -> Self {
        Self::counted(shared, |shared| &shared.tasks)
    }

    fn counted(shared: &Arc<LocksState>, count: fn(&LocksState) -> &AtomicUsize) -> Self {
        count(shared).fetch_add(1, Ordering::SeqCst);
        Self { shared: Arc::clone(shared), count }
    }

    pub(super) const fn shared(&self) -> &Arc<LocksState> {
        &self.shared
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if (self.count)(&self.shared).fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.notify_idle();
        }
    }
}
