//! Which locks are held further up by whoever runs the present task, and would be waited for in vain.

use std::future::Future;
use std::sync::Arc;

use super::lease::Lease;
use super::shared::Shared;
use super::store::LockKey;

tokio::task_local! {
    static HELD: Held;
}

/// The locks that a body or a handler is within, the innermost first.
#[derive(Clone, Default)]
pub(super) struct Held(Option<Arc<Inside>>);

struct Inside {
    // Locks of different `Locks` are told apart by the address of what they share, which lives as long as the lease.
    home: usize,
    lock: LockKey,
    outer: Held,
}

impl Held {
    /// Those of the present task, and this one.
    pub(super) fn with(lease: &Lease) -> Self {
        let outer = HELD.try_with(Self::clone).unwrap_or_default();
        let (home, lock) = (address(lease.home()), *lease.lock());
        Self(Some(Arc::new(Inside { home, lock, outer })))
    }

    /// Runs something that these locks are held for.
    pub(super) fn scope<T>(&self, run: impl FnOnce() -> T) -> T {
        HELD.sync_scope(self.clone(), run)
    }

    /// The same for a future.
    pub(super) fn within<F: Future>(self, body: F) -> impl Future<Output = F::Output> {
        HELD.scope(self, body)
    }
}

fn address(home: &Arc<Shared>) -> usize {
    Arc::as_ptr(home) as usize
}

/// Whether the present task holds this lock, by a body or a handler that it is within.
pub(super) fn holds(home: &Arc<Shared>, lock: &LockKey) -> bool {
    let is_held = |held: &Held| {
        let mut inside = held.0.as_deref();
        while let Some(Inside { home: of, lock: held, outer }) = inside {
            if *of == address(home) && held == lock {
                return true;
            }
            inside = outer.0.as_deref();
        }
        false
    };
    HELD.try_with(is_held).unwrap_or(false)
}
