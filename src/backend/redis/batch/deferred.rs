//! What is put off until a thread has nothing else to do.
//!
//! Who tells many tasks that they may go on wakes another thread with each of them, which takes that task away, is done with it at once and sleeps
//! again. What is woken by a thread that is about to sleep is spread over the threads once, when all of it is there.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::Instant;

/// A thread that is busy for longer than this does not keep what it was to do: whoever comes by does it.
const LATE: Duration = Duration::from_millis(1);

/// What has been put off and is not done.
#[derive(Clone)]
pub(crate) struct Idle(Arc<Errands>);

struct Errands {
    epoch: Instant,
    // Since when the first of them waits, in us since `epoch`, plus one; zero if there is none.
    since: AtomicU64,
    waiting: Mutex<VecDeque<Pending>>,
}

/// An errand that is not done, and since when.
struct Pending {
    since: u64,
    errand: Arc<Errand>,
}

/// The place of an errand among those that are not done, while somebody waits for it.
struct Listed<'a> {
    errands: &'a Errands,
    errand: Arc<Errand>,
}

/// Something that is done once, by whoever comes first.
struct Errand(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Idle {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Errands { epoch: Instant::now(), since: AtomicU64::new(0), waiting: Mutex::default() }))
    }

    /// Does something once this thread has nothing else to do, and waits until it is done. Whoever stops waiting does not keep it from being done.
    pub(crate) async fn then(&self, act: impl FnOnce() + Send + 'static) {
        let (done, is_done) = oneshot::channel();
        let act = move || {
            act();
            // Who waited may have been dropped.
            let _ = done.send(());
        };
        let errand = Arc::new(Errand(Mutex::new(Some(Box::new(act)))));
        let _listed = self.0.list(&errand);
        // The runtime wakes who has yielded when it is done with others, whoever that is.
        let _ = pin!(yield_now()).poll(&mut Context::from_waker(&Waker::from(errand)));
        let _ = is_done.await;
    }

    /// Does what should have been done a while ago.
    pub(crate) fn catch_up(&self) {
        let since = self.0.since.load(Ordering::Relaxed);
        if since == 0 || self.0.now().saturating_sub(since) < LATE.as_micros() as u64 {
            return;
        }
        let late: Vec<_> = self.0.waiting().iter().map(|waiting| Arc::clone(&waiting.errand)).collect();
        late.into_iter().for_each(Errand::wake);
    }
}

impl Errands {
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64 + 1
    }

    fn list(&self, errand: &Arc<Errand>) -> Listed<'_> {
        let mut waiting = self.waiting();
        waiting.push_back(Pending { since: self.now(), errand: Arc::clone(errand) });
        self.note(&waiting);
        Listed { errands: self, errand: Arc::clone(errand) }
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
        let mut waiting = self.errands.waiting();
        waiting.retain(|other| !Arc::ptr_eq(&other.errand, &self.errand));
        self.errands.note(&waiting);
    }
}

impl Wake for Errand {
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
    async fn what_is_put_off_comes_after_what_others_do() {
        let noted = Arc::new(Mutex::new(Vec::new()));
        let note = |what: &'static str| {
            let noted = Arc::clone(&noted);
            move || noted.lock().unwrap().push(what)
        };
        let (act, after, other) = (note("act"), note("after"), note("other"));
        let acting = tokio::spawn(async move {
            let idle = Idle::new();
            let mut done = pin!(idle.then(act));
            // Unlike `yield_now` it does not end because somebody looks at it once more.
            assert_eq!(futures_util::poll!(&mut done), Poll::Pending);
            assert_eq!(futures_util::poll!(&mut done), Poll::Pending);
            done.await;
            after();
        });
        tokio::spawn(async move { other() });
        acting.await.unwrap();
        assert_eq!(*noted.lock().unwrap(), ["other", "act", "after"]);
    }

    /// They were kept for ever.
    #[tokio::test]
    async fn nothing_is_left_of_what_nobody_waits_for() {
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

    /// All who had met in a call waited for as long as the thread was busy that had got its answer.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_thread_that_is_blocked_does_not_keep_what_it_was_to_do() {
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
        assert!(has_acted.try_recv().is_err(), "nobody has come by");
        idle.catch_up();
        has_acted.try_recv().unwrap();
        free.send(()).unwrap();
        blocked.await.unwrap();
        assert!(idle.0.waiting().is_empty());
    }
}
