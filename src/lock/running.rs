//! The bound on running requests of a detached layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::locks_state::Shared;

/// The permits of a layer and its clones, one for each running request.
#[derive(Clone)]
pub(super) struct Places {
    taken: Arc<AtomicUsize>,
    pub(super) most: usize,
}

impl Places {
    pub(super) fn new(most: usize) -> Self {
        Self { taken: Arc::default(), most }
    }

    /// Takes a permit for one more request, if one is left.
    pub(super) fn admit(&self, home: &Arc<Shared>) -> Option<Place> {
        let add = |taken| (taken < self.most).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        home.meters().handlers(1.0);
        Some(Place(Arc::new(Taken { taken: Arc::clone(&self.taken), home: Arc::clone(home) })))
    }
}

/// The permit of a request, shared with the task of its handler. Returned once both have dropped it.
#[derive(Clone)]
pub(super) struct Place(#[expect(dead_code, reason = "is dropped")] Arc<Taken>);

struct Taken {
    taken: Arc<AtomicUsize>,
    home: Arc<Shared>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
        self.home.meters().handlers(-1.0);
    }
}
