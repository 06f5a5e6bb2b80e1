//! The bound on running requests of a detached layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::locks_state::LocksState;

/// The permits of a layer and its clones, one for each running request.
#[derive(Clone)]
pub(super) struct RunningPermits {
    taken: Arc<AtomicUsize>,
    pub(super) most: usize,
}

impl RunningPermits {
    pub(super) fn new(most: usize) -> Self {
        Self { taken: Arc::default(), most }
    }

    /// Takes a permit for one more request, if one is left.
    pub(super) fn admit(&self, shared: &Arc<LocksState>) -> Option<RunningPermit> {
        let add = |taken| (taken < self.most).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        shared.meters().handlers(1.0);
        Some(RunningPermit(Arc::new(Taken { taken: Arc::clone(&self.taken), shared: Arc::clone(shared) })))
    }
}

/// The permit of a request, shared with the task of its handler. Returned once both have dropped it.
#[derive(Clone)]
pub(super) struct RunningPermit(#[expect(dead_code, reason = "is dropped")] Arc<Taken>);

struct Taken {
    taken: Arc<AtomicUsize>,
    shared: Arc<LocksState>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
        self.shared.meters().handlers(-1.0);
    }
}
