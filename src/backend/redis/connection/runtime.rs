//! The runtime in which a backend was created. Its tasks and connections live there, even if calls come from other runtimes.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

/// A runtime, and whether it still exists. After it has ended, tasks are spawned in the caller's runtime.
pub(crate) struct RuntimeHandle {
    runtime: Handle,
    // Finishes when the runtime ends, or when this value is dropped.
    liveness: AbortHandle,
}

impl RuntimeHandle {
    /// The current runtime.
    pub(crate) fn here() -> Self {
        let runtime = Handle::current();
        let liveness = runtime.spawn(pending::<()>()).abort_handle();
        Self { runtime, liveness }
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        if self.has_ended() { tokio::spawn(task).abort_handle() } else { self.runtime.spawn(task).abort_handle() }
    }

    /// Whether the runtime has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.liveness.is_finished()
    }

    /// Polls `call` inside this runtime, so that its tasks and timers live there. Returns `None` once the runtime has ended: its timers must
    /// not be polled any more.
    pub(crate) async fn inside<T>(&self, call: impl Future<Output = T>) -> Option<T> {
        let mut call = pin!(call);
        poll_fn(|cx| {
            if self.has_ended() {
                return Poll::Ready(None);
            }
            let _guard = self.runtime.enter();
            call.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

impl Drop for RuntimeHandle {
    fn drop(&mut self) {
        self.liveness.abort();
    }
}
