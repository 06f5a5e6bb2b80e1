//! Lets a woken task run before its waker.

use std::future::ready;

use tokio::runtime::{Handle, RuntimeFlavor};

/// Yields to the task that was woken last. A worker thread keeps that task for itself, so a caller that blocks the thread
/// would block the task. The next woken task takes its slot, and another worker can run it.
pub(super) fn make_way() {
    if let Ok(runtime) = Handle::try_current()
        && runtime.runtime_flavor() == RuntimeFlavor::MultiThread
    {
        drop(runtime.spawn(ready(())));
    }
}
