//! The bound on running requests of a detached layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::locks_state::LocksState;

/// The permits of a layer and its clones, one for each running request.
#[derive(Clone)]
pub(super) struct RunningPermits {
    in_use: Arc<AtomicUsize>,
    pub(super) max: usize,
}

impl RunningPermits {
    pub(super) fn new(max: usize) -> Self {
        Self { in_use: Arc::default(), max }
    }

    /// Takes a permit for one more request, if one is left.
    pub(super) fn admit(&self, shared: &Arc<LocksState>) -> Option<RunningPermit> {
        let add = |in_use| (in_use < self.max).then_some(in_use + 1);
        self.in_use.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        shared.metrics().handlers(1.0);
        Some(RunningPermit(Arc::new(InUse { in_use: Arc::clone(&self.in_use), shared: Arc::clone(shared) })))
    }
}

/// The permit of a request, shared with the task of its handler. Returned once both have dropped it.
#[derive(Clone)]
pub(super) struct RunningPermit(#[expect(dead_code, reason = "is dropped")] Arc<InUse>);

struct InUse {
    in_use: Arc<AtomicUsize>,
    shared: Arc<LocksState>,
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics().handlers(-1.0);
    }
}
