use std::error::Error;
use std::future::{Future, ready};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Notify;

use super::erased::DynStore;
use super::error::QueueFull;
use super::gate::LocalQueues;
use super::lock_key::LockKey;
use super::metrics::Meters;
use super::renewal::RenewalScheduler;
use crate::error::StoreError;
use crate::key::Key;
use crate::store::circuit::{Circuit, CircuitBreaker, CircuitObserver};

/// What all clones of one [`Locks`](super::Locks) and all of its leases have in common.
pub(super) struct Shared {
    pub(super) store: Arc<dyn DynStore>,
    pub(super) gate: LocalQueues,
    pub(super) keeper: RenewalScheduler,
    /// Whether several may hold what one of them would otherwise hold alone: nobody is in front then but for asking the store.
    pub(super) is_semaphore: bool,
    // Both are made when they are first needed: by then it is known how the circuit is to be, and what the locks are called.
    circuit: OnceLock<Circuit>,
    meters: OnceLock<(Key, Meters)>,
    // How the circuit is to be.
    breaker: Mutex<CircuitBreaker>,
    // What holders are called, if anything.
    holder: RwLock<Option<Arc<str>>>,
    // How many have asked for a lock that they are ready to wait for, and have not got it yet.
    asking: AtomicUsize,
    is_closed: AtomicBool,
    closing: Notify,
    // What is being given back, and tasks that finish what somebody left half done.
    background: AtomicUsize,
    /// Acquisitions of which nothing is known, and which are being undone.
    pub(super) undone: AtomicUsize,
    idle: Notify,
    // A runtime for what is dropped where there is none.
    runtime: Mutex<Option<Handle>>,
}

impl Shared {
    pub(super) fn new(store: Arc<dyn DynStore>, is_semaphore: bool) -> Self {
        Self {
            store,
            gate: LocalQueues::new(),
            keeper: RenewalScheduler::new(),
            is_semaphore,
            circuit: OnceLock::new(),
            meters: OnceLock::new(),
            breaker: Mutex::default(),
            holder: RwLock::default(),
            asking: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            closing: Notify::new(),
            background: AtomicUsize::new(0),
            undone: AtomicUsize::new(0),
            idle: Notify::new(),
            runtime: Mutex::new(None),
        }
    }

    /// The circuit to the store is to be like this, if nothing was asked of it yet.
    pub(super) fn set_circuit(&self, breaker: CircuitBreaker) {
        if self.circuit.get().is_some() {
            tracing::warn!(
                locks = self.called(),
                "a circuit breaker of locks is ignored: it comes after the first lock was asked for"
            );
        } else {
            *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = breaker;
        }
    }

    pub(super) fn circuit(&self) -> &Circuit {
        let make = || Circuit::new(*self.breaker.lock().unwrap_or_else(PoisonError::into_inner));
        self.circuit.get_or_init(make)
    }

    /// What holders are called from now on.
    pub(super) fn set_holder(&self, name: Arc<str>) {
        *self.holder.write().unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    pub(super) fn holder(&self) -> Option<Arc<str>> {
        self.holder.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Named after the first lock that is asked for: were there some for each namespace, there might be any number of them.
    pub(super) fn meters(&self, lock: &LockKey) -> &Meters {
        let (_, meters) = self.meters.get_or_init(|| (*lock.namespace(), Meters::new(lock.namespace().as_str())));
        meters
    }

    fn meters_so_far(&self) -> Option<&Meters> {
        self.meters.get().map(|(_, meters)| meters)
    }

    /// What the log and the meters call these locks, if any was asked for.
    fn called(&self) -> Option<&str> {
        self.meters.get().map(|(namespace, _)| namespace.as_str())
    }

    /// Notes a request that goes without its lock. It has asked for it, so the meters are there.
    pub(super) fn passed_unprotected(&self) {
        self.meters_so_far().inspect(|meters| meters.passed_unprotected());
    }

    /// Counts a waiter, unless `most` wait already. A waiter that is back from a missed grant was admitted before.
    pub(super) fn ask(&self, lock: &LockKey, most: usize, is_back: bool) -> Result<WaiterGuard<'_>, QueueFull> {
        let asking = WaiterGuard(self);
        let is_admitted = self.asking.fetch_add(1, Ordering::Relaxed) < most || is_back;
        if is_admitted { Ok(asking) } else { Err(QueueFull::new(*lock)) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Waits until nobody may begin anything any more.
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

    /// Waits until nothing is held, waited for or under way.
    pub(super) async fn wait_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            // In this order: whoever leaves one of these for the next is in both for a moment, and is seen in one of them.
            if self.gate.is_empty() && self.keeper.is_empty() && self.background.load(Ordering::SeqCst) == 0 {
                return;
            }
            idle.await;
        }
    }

    /// To be called when something has ended.
    pub(super) fn ended(&self) {
        self.idle.notify_waiters();
    }

    /// Remembers a runtime.
    pub(super) fn remember(&self, runtime: Handle) {
        *self.runtime.lock().unwrap_or_else(PoisonError::into_inner) = Some(runtime);
    }

    /// Runs `task` in the background: in the runtime of the caller, or in the one where leases are renewed. Where that is
    /// gone nothing is left to do it, and the lease expires.
    pub(super) fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_in(Handle::try_current().ok().or_else(|| self.remembered()), task);
    }

    /// The same in the runtime where leases are renewed: that of the caller is at its end.
    pub(super) fn spawn_elsewhere(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_in(self.remembered(), task);
    }

    fn remembered(&self) -> Option<Handle> {
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn spawn_in(self: &Arc<Self>, runtime: Option<Handle>, task: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = runtime else {
            tracing::debug!("no runtime to give a lease back in: it will expire");
            return;
        };
        let running = Running::new(self);
        drop(runtime.spawn(async move {
            task.await;
            drop(running);
        }));
    }
}

impl Shared {
    /// Makes way for the task that was woken last. A worker of a runtime keeps that one for itself, and a caller that blocks the worker from now on
    /// would block the task, too. The next task that is woken takes its place, and other workers can have it.
    pub(super) fn make_way() {
        if let Ok(runtime) = Handle::try_current()
            && runtime.runtime_flavor() == RuntimeFlavor::MultiThread
        {
            drop(runtime.spawn(ready(())));
        }
    }
}

impl CircuitObserver for Shared {
    fn failed(&self) {
        self.meters_so_far().inspect(|meters| meters.store_failed());
    }

    fn opened(&self) {
        self.meters_so_far().inspect(|meters| meters.circuit(true));
        tracing::warn!(locks = self.called(), "lock circuit opens: the store is asked by probes only");
    }

    fn closed(&self) {
        self.meters_so_far().inspect(|meters| meters.circuit(false));
        tracing::info!(locks = self.called(), "lock circuit closes: the store is asked again");
    }

    fn outage_begins(&self, error: &StoreError) {
        let cause = error.source().map(tracing::field::display);
        tracing::warn!(locks = self.called(), %error, cause, "lock store fails");
    }

    fn outage_ends(&self) {
        tracing::info!(locks = self.called(), "lock store answers again");
    }
}

/// Counts somebody who asks for a lock.
pub(super) struct WaiterGuard<'a>(&'a Shared);

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts something that is under way until it ends in whatever way.
pub(super) struct Running(Arc<Shared>);

impl Running {
    pub(super) fn new(home: &Arc<Shared>) -> Self {
        home.background.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(home))
    }

    pub(super) const fn home(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.background.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.ended();
        }
    }
}
