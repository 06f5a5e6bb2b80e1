//! The state that all attempts of a layer share.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;

use super::erased::DynStore;
use super::metrics::Metrics;
use super::per_scope::PerScope;
use super::rejection::{Rejection, ScopeBound};
use super::store::IdempotencyStore;
use crate::error::{ConfigError, StoreError};
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::{Circuit, CircuitBreaker, OutageTracker, observe_circuit};
use crate::store::deadline::DEFAULT_DEADLINE;
use crate::store::shutdown::{ShutdownReport, ShutdownTarget, Work};

/// The maximum number of background tasks that settle attempts. During a store outage all attempts are settled in the background.
/// The leases of further attempts expire.
const MAX_BACKGROUND: usize = 4_096;
/// The `retry_after` of a caller with too many running handlers: any of them may end soon.
const SCOPE_FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The shared state of all attempts of a layer.
pub(crate) struct Coordinator {
    pub(super) store: Arc<dyn DynStore>,
    options: CoordinatorOptions,
    pub(super) circuit: Circuit,
    metrics: OnceLock<Metrics>,
    // Whether the log has reported that the store has no room for responses.
    pub(super) full: OutageTracker,
    running: AtomicUsize,
    running_per_scope: PerScope,
    waiting_per_scope: PerScope,
    waiting: AtomicUsize,
    background: AtomicUsize,
    idle: Notify,
    is_closed: AtomicBool,
}

/// The settings for store calls.
#[derive(Clone)]
pub(crate) struct CoordinatorOptions {
    /// The deadline of a store call.
    pub(crate) deadline: Duration,
    pub(crate) breaker: CircuitBreaker,
    /// The name of the layer in metrics and logs.
    pub(crate) name: Arc<str>,
}

impl Default for CoordinatorOptions {
    fn default() -> Self {
        let (deadline, breaker) = (DEFAULT_DEADLINE, CircuitBreaker::new());
        Self { deadline, breaker, name: "idempotency".into() }
    }
}

observe_circuit!("idempotency", Coordinator, |shared| shared.metrics(), layer = &*shared.options.name);

impl Coordinator {
    pub(crate) fn new(store: impl IdempotencyStore + Send + Sync + 'static) -> Arc<Self> {
        Self::over(Arc::new(store), CoordinatorOptions::default())
    }

    fn over(store: Arc<dyn DynStore>, options: CoordinatorOptions) -> Arc<Self> {
        let [running, waiting, background] = [const { AtomicUsize::new(0) }; 3];
        let (circuit, metrics, full) = (Circuit::new(options.breaker), OnceLock::new(), OutageTracker::for_store());
        let [running_per_scope, waiting_per_scope] = [(); 2].map(|()| PerScope::default());
        let coordinator = Arc::new(Self {
            store,
            options,
            circuit,
            metrics,
            full,
            running,
            running_per_scope,
            waiting,
            waiting_per_scope,
            background,
            idle: Notify::new(),
            is_closed: AtomicBool::new(false),
        });
        coordinator.store.add_to_shutdown(&ShutdownTarget::new(&coordinator));
        coordinator
    }

    /// A new coordinator with the same store and other settings. Its counts start at zero.
    pub(crate) fn with(&self, change: impl FnOnce(&mut CoordinatorOptions)) -> Arc<Self> {
        let mut options = self.options.clone();
        change(&mut options);
        Self::over(Arc::clone(&self.store), options)
    }

    /// Rejects a deadline or a maximum runtime of zero. The memory backend replies immediately, so tests on it would not reveal this error.
    pub(crate) fn check_times(&self, max_runtime: Option<Duration>) -> Result<(), ConfigError> {
        let times = [("deadline", Some(self.options.deadline)), ("max_runtime", max_runtime)];
        let none = times.into_iter().find(|(_, time)| time.is_some_and(|time| time.is_zero()));
        none.map_or(Ok(()), |(setting, _)| Err(ConfigError::ZeroTimeout { setting }))
    }

    pub(crate) const fn options(&self) -> &CoordinatorOptions {
        &self.options
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        self.metrics.get_or_init(|| Metrics::new(&self.options.name))
    }

    /// Records the result of a store call in the circuit.
    pub(super) fn record_result<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        self.circuit.record(self, &answer);
        answer
    }

    pub(crate) fn reach(&self) -> Reach {
        self.store.reach()
    }

    /// Counts a new attempt, unless the backend is shut down, or the maximum in total or for its scope is reached.
    pub(crate) fn admit(self: &Arc<Self>, scope: &Key, max: MaxRunning) -> Result<CountGuard, Rejection> {
        // The scope is checked before the total, so that a caller with too many requests gets 429 even if the process is full.
        let Some(entered) = self.running_per_scope.enter(scope, max.per_scope) else {
            let (bound, retry_after) = (ScopeBound::Running, SCOPE_FULL_RETRY_AFTER);
            return Err(Rejection::ScopeFull { bound, retry_after });
        };
        match CountGuard::new(self, |coordinator| &coordinator.running, max.in_total) {
            Some(mut running) => {
                running.scope = Some((|coordinator| &coordinator.running_per_scope, entered));
                // Checked after the attempt is counted. Either a concurrent shutdown sees the attempt, or this call sees the shutdown.
                if self.is_closed.load(Ordering::SeqCst) {
                    return Err(StoreError::unavailable("the backend is shut down").into());
                }
                Ok(running)
            }
            None => {
                self.running_per_scope.leave(entered);
                Err(Rejection::Full)
            }
        }
    }

    /// Counts a new waiter, unless `max` requests wait already, or `max / 2` (rounded up) with the same scope.
    pub(super) fn register_waiter(self: &Arc<Self>, scope: Option<&Key>, max: usize) -> Option<CountGuard> {
        let waiting_per_scope: ScopeCounts = |coordinator| &coordinator.waiting_per_scope;
        let entered = match scope {
            Some(scope) => Some((waiting_per_scope, self.waiting_per_scope.enter(scope, max.div_ceil(2))?)),
            None => None,
        };
        match CountGuard::new(self, |coordinator| &coordinator.waiting, max) {
            Some(mut waiting) => {
                waiting.scope = entered;
                Some(waiting)
            }
            None => {
                entered.inspect(|(_, hash)| self.waiting_per_scope.leave(*hash));
                None
            }
        }
    }

    /// Counts a new background task, unless there are too many.
    pub(super) fn admit_background(self: &Arc<Self>) -> Option<CountGuard> {
        CountGuard::new(self, |coordinator| &coordinator.background, MAX_BACKGROUND)
    }

    /// The number of running attempts and background tasks.
    fn count_left(&self) -> usize {
        self.running.load(Ordering::SeqCst) + self.background.load(Ordering::SeqCst)
    }

    /// Waits until no attempt runs and no background task is left.
    pub(crate) async fn wait_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.count_left() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Work for Coordinator {
    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    fn is_idle(&self) -> bool {
        self.count_left() == 0
    }

    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(Self::wait_idle(self))
    }

    fn left(&self) -> ShutdownReport {
        ShutdownReport { handlers: self.count_left(), ..ShutdownReport::default() }
    }
}

/// The maximum numbers of running attempts.
#[derive(Clone, Copy)]
pub(crate) struct MaxRunning {
    pub(crate) in_total: usize,
    pub(crate) per_scope: usize,
}

/// Selects the counts by scope of one kind of work.
type ScopeCounts = fn(&Coordinator) -> &PerScope;

/// Counts a running attempt, a waiter or a background task until this value is dropped.
pub(crate) struct CountGuard {
    coordinator: Arc<Coordinator>,
    count: fn(&Coordinator) -> &AtomicUsize,
    // Which `PerScope` counts the work too, and the hash of the scope there.
    scope: Option<(ScopeCounts, u64)>,
}

impl CountGuard {
    fn new(coordinator: &Arc<Coordinator>, count: fn(&Coordinator) -> &AtomicUsize, max: usize) -> Option<Self> {
        // Never exceed the maximum, not even for a moment. Otherwise the last work that ends might not see that it is the last.
        let add = |running| (running < max).then_some(running + 1);
        count(coordinator).fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).ok()?;
        Some(Self { coordinator: Arc::clone(coordinator), count, scope: None })
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        if let Some((per_scope, hash)) = self.scope.take() {
            per_scope(&self.coordinator).leave(hash);
        }
        if (self.count)(&self.coordinator).fetch_sub(1, Ordering::AcqRel) == 1 {
            self.coordinator.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::MemoryBackend;

    /// Regression: `wait_idle` never returned. While the last handler ended, a rejected one was counted, so the count was not 1.
    #[test]
    fn rejected_work_is_never_counted() {
        let coordinator = Coordinator::new(MemoryBackend::new());
        thread::scope(|scope| {
            let rejected = scope.spawn(|| {
                (0..3_000_000).all(|_| CountGuard::new(&coordinator, |coordinator| &coordinator.running, 0).is_none())
            });
            while !rejected.is_finished() {
                assert_eq!(coordinator.running.load(Ordering::Acquire), 0);
            }
            assert!(rejected.join().unwrap());
        });
    }

    #[test]
    fn rejected_or_ended_work_is_not_counted_for_its_scope() {
        let coordinator = Coordinator::new(MemoryBackend::new());
        let (max, [alice, bob]) = (MaxRunning { in_total: 2, per_scope: 1 }, ["alice", "bob"].map(Key::from));
        let running =
            [&alice, &bob].map(|scope| coordinator.admit(scope, max).unwrap_or_else(|refused| panic!("{refused}")));
        assert!(matches!(coordinator.admit(&alice, max), Err(Rejection::ScopeFull { bound: ScopeBound::Running, .. })));
        assert!(matches!(coordinator.admit(&Key::from("carol"), max), Err(Rejection::Full)));
        drop(running);
        assert!(coordinator.running_per_scope.is_empty());
    }

    #[test]
    fn one_scope_has_at_most_half_of_waiters() {
        let coordinator = Coordinator::new(MemoryBackend::new());
        let [alice, bob] = ["alice", "bob"].map(Key::from);
        let waiting =
            [Some(&alice), Some(&alice), Some(&bob), None].map(|scope| coordinator.register_waiter(scope, 4).unwrap());
        assert!(coordinator.register_waiter(Some(&bob), 4).is_none(), "four requests wait already");
        let [first, ..] = waiting;
        drop(first);
        assert!(
            coordinator.register_waiter(Some(&alice), 2).is_none()
                && coordinator.register_waiter(Some(&bob), 4).is_some()
        );
    }

    #[test]
    fn refused_waiter_is_not_counted_for_its_scope() {
        let coordinator = Coordinator::new(MemoryBackend::new());
        let alice = Key::from("alice");
        let waiting = coordinator.register_waiter(None, 1).unwrap();
        assert!(coordinator.register_waiter(Some(&alice), 1).is_none());
        drop(waiting);
        drop(coordinator.register_waiter(Some(&alice), 1).unwrap());
        assert!(coordinator.waiting_per_scope.is_empty());
    }
}
