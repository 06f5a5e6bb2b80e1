//! Work that is deferred until a thread is idle.
//!
//! A busy thread that wakes many tasks wakes another thread for each of them. That thread steals the task, finishes it immediately and
//! sleeps again. If the busy thread wakes all tasks just before it sleeps, other threads find them all queued, and steal many at a time.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

/// If a thread is busy for longer than this, the next call of [`DeferredWork::run_late`] runs its deferred work.
const MAX_DELAY: Duration = Duration::from_millis(1);

/// The deferred work that has not run yet.
#[derive(Clone)]
pub(crate) struct DeferredWork(Arc<DeferredList>);

struct DeferredList {
    epoch: Instant,
    // When the oldest closure was deferred, in µs since `epoch`, plus one. Zero: there is none.
    since: AtomicU64,
    pending: Mutex<VecDeque<Pending>>,
}

/// A deferred closure, and when it was deferred.
struct Pending {
    since: u64,
    deferred: Arc<Deferred>,
}

/// Keeps a deferred closure in the list while its caller waits.
struct ListEntry<'a> {
    list: &'a DeferredList,
    deferred: Arc<Deferred>,
}

/// A closure that runs once, on the first wake.
struct Deferred(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl DeferredWork {
    pub(crate) fn new() -> Self {
        Self(Arc::new(DeferredList { epoch: Instant::now(), since: AtomicU64::new(0), pending: Mutex::default() }))
    }

    /// Runs `work` when this thread becomes idle, and waits until it has run. It also runs if the caller stops waiting.
    pub(crate) async fn when_idle(&self, work: impl FnOnce() + Send + 'static) {
        let (done, is_done) = oneshot::channel();
        let work = move || {
            work();
            // The caller may have stopped waiting.
            let _ = done.send(());
        };
        let deferred = Arc::new(Deferred(Mutex::new(Some(Box::new(work)))));
        let _entry = self.0.add(&deferred);
        // Registers the closure instead of this task as the waker: the runtime calls it after the other tasks of the thread.
        let _ = pin!(yield_now()).poll(&mut Context::from_waker(&Waker::from(deferred)));
        let _ = is_done.await;
    }

    /// Runs all deferred work if the oldest closure is late.
    pub(crate) fn run_late(&self) {
        let since = self.0.since.load(Ordering::Relaxed);
        if since == 0 || self.0.now().saturating_sub(since) < MAX_DELAY.as_micros() as u64 {
            return;
        }
        let late: Vec<_> = self.0.pending().iter().map(|pending| Arc::clone(&pending.deferred)).collect();
        late.into_iter().for_each(Deferred::wake);
    }
}

impl DeferredList {
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64 + 1
    }

    fn add(&self, deferred: &Arc<Deferred>) -> ListEntry<'_> {
        let mut pending = self.pending();
        pending.push_back(Pending { since: self.now(), deferred: Arc::clone(deferred) });
        self.update_since(&pending);
        ListEntry { list: self, deferred: Arc::clone(deferred) }
    }

    fn update_since(&self, pending: &VecDeque<Pending>) {
        self.since.store(pending.front().map_or(0, |first| first.since), Ordering::Relaxed);
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ListEntry<'_> {
    fn drop(&mut self) {
        let mut pending = self.list.pending();
        pending.retain(|other| !Arc::ptr_eq(&other.deferred, &self.deferred));
        self.list.update_since(&pending);
    }
}

impl Wake for Deferred {
    fn wake(self: Arc<Self>) {
        let work = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            work();
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
        let update_since = |what: &'static str| {
            let noted = Arc::clone(&noted);
            move || noted.lock().unwrap().push(what)
        };
        let (work, after, other) = (update_since("act"), update_since("after"), update_since("other"));
        let acting = tokio::spawn(async move {
            let deferred = DeferredWork::new();
            let mut done = pin!(deferred.when_idle(work));
            // Unlike with `yield_now`, a second poll does not complete the future.
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
        let deferred = DeferredWork::new();
        for _ in 0..2 {
            let mut waits = Box::pin(deferred.when_idle(|| ()));
            assert_eq!(futures_util::poll!(&mut waits), Poll::Pending);
            assert_ne!(deferred.0.since.load(Ordering::Relaxed), 0);
            drop(waits);
            assert!(deferred.0.pending().is_empty());
            assert_eq!(deferred.0.since.load(Ordering::Relaxed), 0);
        }
    }

    /// Regression: the callers of a batch waited for as long as the thread with its reply was busy.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn other_thread_runs_work_of_blocked_thread() {
        let deferred = DeferredWork::new();
        let (free, until_free) = mpsc::channel::<()>();
        let (start, has_begun) = oneshot::channel();
        let (acted, mut has_acted) = oneshot::channel();
        let blocked = tokio::spawn({
            let deferred = deferred.clone();
            async move {
                let mut done = pin!(deferred.when_idle(move || acted.send(()).unwrap()));
                assert_eq!(futures_util::poll!(&mut done), Poll::Pending);
                start.send(()).unwrap();
                until_free.recv().unwrap();
                done.await;
            }
        });
        has_begun.await.unwrap();
        tokio::time::sleep(2 * MAX_DELAY).await;
        assert!(has_acted.try_recv().is_err(), "another thread has caught up");
        deferred.run_late();
        has_acted.try_recv().unwrap();
        free.send(()).unwrap();
        blocked.await.unwrap();
        assert!(deferred.0.pending().is_empty());
    }
}
