//! The runtime that a backend was made in, where its tasks and connections live, whoever sets them off.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

/// A runtime, and whether it is still there. If it is not, it is the caller's that stands in for it.
pub(crate) struct RuntimeHandle {
    runtime: Handle,
    // Ends with the runtime, and with this value.
    liveness: AbortHandle,
}

impl RuntimeHandle {
    /// The runtime that this is called in.
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

    /// Lets the caller wait for something whose tasks are to live here. `None` once the runtime has ended: what waits for its timers must not be
    /// polled any more.
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
