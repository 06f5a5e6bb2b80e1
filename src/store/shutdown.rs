//! The shutdown of a backend: closes and waits for everything that was made from it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::timeout;

/// Something that was made from a backend, such as locks or a worker, and that the backend's shutdown closes and waits for.
///
/// A store gets it through `add_to_shutdown`, for instance [`LockStore::add_to_shutdown`](crate::lock::store::LockStore::add_to_shutdown). A
/// store that wraps another one passes it on. The target does not keep its owner alive.
#[derive(Clone)]
pub struct ShutdownTarget(Weak<dyn Work>);

impl ShutdownTarget {
    pub(crate) fn new<W: Work + 'static>(work: &Arc<W>) -> Self {
        let work: Weak<W> = Arc::downgrade(work);
        Self(work)
    }
}

impl fmt::Debug for ShutdownTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShutdownTarget").finish_non_exhaustive()
    }
}

/// Work that a shutdown closes and waits for.
pub(crate) trait Work: Send + Sync {
    /// Prevents the start of new work. Repeated calls have no effect.
    fn close(&self);

    /// Whether nothing runs.
    fn is_idle(&self) -> bool;

    /// Waits until nothing runs.
    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Counts the leftover work.
    fn left(&self) -> ShutdownReport;
}

/// The leftover work of a shutdown.
///
/// ```
/// use std::time::Duration;
/// use tollgate::MemoryBackend;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let report = MemoryBackend::new().shutdown(Duration::from_secs(25)).await;
/// assert!(report.is_clean());
/// assert_eq!(report.to_string(), "the shutdown is complete");
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Workers and recurring schedules that have not ended.
    pub workers: usize,
    /// Jobs that still run, and jobs whose result is not recorded. They run again when their leases have ended.
    pub jobs: usize,
    /// Leases of locks that are held or not released yet. They end with their time to live.
    pub leases: usize,
    /// Corrections of rate limits in flight. If they are lost, the charges stay as they were.
    pub corrections: usize,
    /// Handlers of idempotency layers that still run, and operations whose result is not stored. Their outcome will be unknown.
    pub handlers: usize,
    /// Loads of caches that still run. Their values may not be cached.
    pub loads: usize,
}

impl ShutdownReport {
    /// Whether nothing is left.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }

    fn add(self, other: Self) -> Self {
        Self {
            workers: self.workers + other.workers,
            jobs: self.jobs + other.jobs,
            leases: self.leases + other.leases,
            corrections: self.corrections + other.corrections,
            handlers: self.handlers + other.handlers,
            loads: self.loads + other.loads,
        }
    }
}

impl fmt::Display for ShutdownReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workers, jobs, leases, corrections, handlers, loads } = *self;
        let kinds = [
            (workers, "running worker", "running workers"),
            (jobs, "unfinished job", "unfinished jobs"),
            (leases, "held lease", "held leases"),
            (corrections, "correction in flight", "corrections in flight"),
            (handlers, "running handler", "running handlers"),
            (loads, "running load", "running loads"),
        ];
        let mut before = "the shutdown is incomplete: it left ";
        for (count, one, several) in kinds.into_iter().filter(|(count, ..)| *count > 0) {
            write!(f, "{before}{count} {}", if count == 1 { one } else { several })?;
            before = ", ";
        }
        if self.is_clean() { f.write_str("the shutdown is complete") } else { Ok(()) }
    }
}

/// Everything that was made from a backend. The clones of the backend share it.
#[derive(Default)]
pub(crate) struct ShutdownRegistry(Mutex<State>);

#[derive(Default)]
struct State {
    is_closed: bool,
    targets: Vec<ShutdownTarget>,
    // At this length, targets whose owners are gone are removed.
    prune_at: usize,
}

/// The smallest length at which targets are removed.
const MIN_PRUNE: usize = 64;

impl ShutdownRegistry {
    /// No code panics while it holds the lock, so a poisoned lock is intact.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a target. After the start of the shutdown, it is closed at once.
    pub(crate) fn add(&self, target: &ShutdownTarget) {
        let mut state = self.state();
        if state.targets.len() >= state.prune_at {
            state.targets.retain(|ShutdownTarget(work)| work.strong_count() > 0);
            // Twice the number of live targets, so that the average cost of an addition stays the same.
            state.prune_at = (2 * state.targets.len()).max(MIN_PRUNE);
        }
        state.targets.push(target.clone());
        let is_closed = state.is_closed;
        drop(state);
        if is_closed && let Some(work) = target.0.upgrade() {
            work.close();
        }
    }

    /// The targets whose owners are alive.
    fn targets(&self) -> Vec<Arc<dyn Work>> {
        self.state().targets.iter().filter_map(|ShutdownTarget(work)| work.upgrade()).collect()
    }

    /// Closes all targets, and waits until they are idle, at most for `deadline`.
    pub(crate) async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        self.state().is_closed = true;
        // Keeps the targets alive until the report, which counts the leftovers of a worker even after the worker has ended.
        let closed = self.targets();
        closed.iter().for_each(|work| work.close());
        // The report says whether the time was enough.
        let _ = timeout(deadline, self.wait_idle()).await;
        self.targets().iter().fold(ShutdownReport::default(), |report, work| report.add(work.left()))
    }

    /// Waits for one target after the other. All are closed, so their work ends in parallel.
    async fn wait_idle(&self) {
        loop {
            // Again from the start after each round: a job that ends may have made a correction.
            let busy: Vec<_> = self.targets().into_iter().filter(|work| !work.is_idle()).collect();
            if busy.is_empty() {
                return;
            }
            for work in busy {
                work.wait_idle().await;
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.state().targets.len()
    }
}

#[cfg(test)]
mod tests;
