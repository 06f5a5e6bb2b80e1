use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

use crate::store::shutdown::{ShutdownReport, Work};

/// A running worker or recurring schedule, for the shutdown of its backend.
pub(crate) struct Activity {
    // Jobs that run, or whose result is not recorded.
    jobs: AtomicUsize,
    is_closed: watch::Sender<bool>,
    is_over: watch::Sender<bool>,
}

impl Activity {
    pub(crate) fn is_closed(&self) -> bool {
        *self.is_closed.borrow()
    }

    /// Waits for the start of the shutdown.
    pub(crate) async fn closed(&self) {
        // The sender lives in `self`, so this cannot fail.
        let _ = self.is_closed.subscribe().wait_for(|is_closed| *is_closed).await;
    }

    /// Sets the number of jobs that run, or whose result is not recorded. The last number stays after the end of the worker.
    pub(crate) fn set_jobs(&self, jobs: usize) {
        self.jobs.store(jobs, Ordering::Relaxed);
    }
}

impl Work for Activity {
    fn close(&self) {
        self.is_closed.send_replace(true);
    }

    fn is_idle(&self) -> bool {
        *self.is_over.borrow()
    }

    fn wait_idle(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let _ = self.is_over.subscribe().wait_for(|is_over| *is_over).await;
        })
    }

    fn left(&self) -> ShutdownReport {
        let (workers, jobs) = (usize::from(!self.is_idle()), self.jobs.load(Ordering::Relaxed));
        ShutdownReport { workers, jobs, ..ShutdownReport::default() }
    }
}

/// Ends the activity when it is dropped, with its worker.
pub(crate) struct ActivityGuard(Arc<Activity>);

impl ActivityGuard {
    pub(crate) fn new() -> Self {
        let (is_closed, is_over) = (watch::Sender::new(false), watch::Sender::new(false));
        Self(Arc::new(Activity { jobs: AtomicUsize::new(0), is_closed, is_over }))
    }

    pub(crate) const fn activity(&self) -> &Arc<Activity> {
        &self.0
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.0.is_over.send_replace(true);
    }
}
