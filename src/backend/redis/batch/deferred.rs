//! Work that is deferred until a thread is idle.
//!
//! A busy thread that wakes many tasks wakes another thread for each of them. That thread steals the task, finishes it at once and sleeps
//! again. If a thread wakes the tasks just before it sleeps, they are spread over the threads once, when all of them are queued.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

/// If a thread is busy for longer than this, the next call of [`Idle::catch_up`] runs its deferred work.
const LATE: Duration = Duration::from_millis(1);

/// The deferred work that has not run yet.
#[derive(Clone)]
pub(crate) struct Idle(Arc<DeferredList>);

struct DeferredList {
    epoch: Instant,
    // When the first of them was deferred, in µs since `epoch`, plus one. Zero: there is none.
    since: AtomicU64,
    waiting: Mutex<VecDeque<Pending>>,
}

/// A deferred closure, and when it was deferred.
struct Pending {
    since: u64,
    deferred: Arc<Deferred>,
}

/// Keeps a deferred closure in the list while its caller waits.
struct Listed<'a> {
    list: &'a DeferredList,
    deferred: Arc<Deferred>,
}

/// A closure that runs once, on the first wake.
struct Deferred(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Idle {
    pub(crate) fn new() -> Self {
        Self(Arc::new(DeferredList { epoch: Instant::now(), since: AtomicU64::new(0), waiting: Mutex::default() }))
    }

    /// Runs `act` once this thread is idle, and waits until it has run. It also runs if the caller stops waiting.
    pub(crate) async fn then(&self, act: impl FnOnce() + Send + 'static) {
        let (done, is_done) = oneshot::channel();
        let act = move || {
            act();
            // The caller may have stopped waiting.
            let _ = done.send(());
        };
        let deferred = Arc::new(Deferred(Mutex::new(Some(Box::new(act)))));
        let _listed = self.0.list(&deferred);
        // Registers the closure, in place of this task, as the waker that the runtime wakes after the other tasks of the thread.
        let _ = pin!(yield_now()).poll(&mut Context::from_waker(&Waker::from(deferred)));
        let _ = is_done.await;
    }

    /// Runs all deferred work if the oldest of it is late.
    pub(crate) fn catch_up(&self) {
        let since = self.0.since.load(Ordering::Relaxed);
        if since == 0 || self.0.now().saturating_sub(since) < LATE.as_micros() as u64 {
            return;
        }
        let late: Vec<_> = self.0.waiting().iter().map(|waiting| Arc::clone(&waiting.deferred)).collect();
        late.into_iter().for_each(Deferred::wake);
    }
}

impl DeferredList {
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64 + 1
    }

    fn list(&self, deferred: &Arc<Deferred>) -> Listed<'_> {
        let mut waiting = self.waiting();
        waiting.push_back(Pending { since: self.now(), deferred: Arc::clone(deferred) });
        self.note(&waiting);
        Listed { list: self, deferred: Arc::clone(deferred) }
    }

    fn note(&self, waiting: &VecDeque<Pending>) {
        self.since.store(waiting.front().map_or(0, |first| first.since), Ordering::Relaxed);
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Pending>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        let mut waiting = self.list.waiting();
        waiting.retain(|other| !Arc::ptr_eq(&other.deferred, &self.deferred));
        self.list.note(&waiting);
    }
}

impl Wake for Deferred {
    fn wake(self: Arc<Self>) {
        let act = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(act) = act {
            act();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::Poll;

    use super::*;

    #[tokio::test]
    async fn deferred_work_runs_after_other_tasks() {
        let noted = Arc::new(Mutex::new(Vec::new()));
        let note = |what: &'static str| {
            let noted = Arc::clone(&noted);
            move || noted.lock().unwrap().push(what)
        };
        let (act, after, other) = (note("act"), note("after"), note("other"));
        let acting = tokio::spawn(async move {
            let idle = Idle::new();
            let mut done = pin!(idle.then(act));
            // Unlike `yield_now`, it does not complete because it is polled again.
            assert_eq!(futures_util::poll!(&mut done), Poll::Pending);
            assert_eq!(futures_util::poll!(&mut done), Poll::Pending);
            done.await;
            after();
        });
        tokio::spawn(async move { other() });
        acting.await.unwrap();
        assert_eq!(*noted.lock().unwrap(), ["other", "act", "after"]);
    }

    /// Regression: abandoned closures stayed in the list for ever.
    #[tokio::test]
    async fn abandoned_work_leaves_the_list() {
        let idle = Idle::new();
        for _ in 0..2 {
            let mut waits = Box::pin(idle.then(|| ()));
            assert_eq!(futures_util::poll!(&mut waits), Poll::Pending);
            assert_ne!(idle.0.since.load(Ordering::Relaxed), 0);
            drop(waits);
            assert!(idle.0.waiting().is_empty());
            assert_eq!(idle.0.since.load(Ordering::Relaxed), 0);
        }
    }

    /// Regression: the callers of a batch waited for as long as the thread with its reply was busy.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn other_thread_runs_work_of_blocked_thread() {
        let idle = Idle::new();
        let (free, until_free) = mpsc::channel::<()>();
        let (begun, has_begun) = oneshot::channel();
        let (acted, mut has_acted) = oneshot::channel();
        let blocked = tokio::spawn({
            let idle = idle.clone();
            async move {
                let mut done = pin!(idle.then(move || acted.send(()).unwrap()));
                assert_eq!(futures_util::poll!(&mut done), Poll::Pending);
                begun.send(()).unwrap();
                until_free.recv().unwrap();
                done.await;
            }
        });
        has_begun.await.unwrap();
        tokio::time::sleep(2 * LATE).await;
        assert!(has_acted.try_recv().is_err(), "no other thread has caught up");
        idle.catch_up();
        has_acted.try_recv().unwrap();
        free.send(()).unwrap();
        blocked.await.unwrap();
        assert!(idle.0.waiting().is_empty());
    }
}
