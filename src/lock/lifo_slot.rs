//! Frees the LIFO slot of a tokio worker thread.

use std::future::ready;

use tokio::runtime::{Handle, RuntimeFlavor};

/// Moves the last woken task out of the LIFO slot of this worker thread. No other worker can take a task from that slot, so a caller that
/// blocks the thread would also block the task. An empty task takes its place.
pub(super) fn free_lifo_slot() {
    if let Ok(runtime) = Handle::try_current()
        && runtime.runtime_flavor() == RuntimeFlavor::MultiThread
    {
        drop(runtime.spawn(ready(())));
    }
}
