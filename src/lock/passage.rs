//! How the current call passes the innermost lock layer around it.

use super::running::RunningPermit;

tokio::task_local! {
    // Each lock layer sets its own, so the innermost layer counts.
    static PASSAGE: Passage;
}

/// How a call passes a lock.
#[derive(Clone)]
pub(super) enum Passage {
    /// It needs no lock.
    Free,
    /// With its lease, which is the innermost held one, and with its permit of a detached layer.
    Locked(Option<RunningPermit>),
    /// Without its lock, since the store fails.
    Unprotected(Option<RunningPermit>),
}

impl Passage {
    /// Makes the call.
    pub(super) fn scope<T>(self, call: impl FnOnce() -> T) -> T {
        PASSAGE.sync_scope(self, call)
    }

    /// The passage of the current call.
    pub(super) fn current() -> Self {
        PASSAGE.try_with(Self::clone).unwrap_or(Self::Free)
    }
}
