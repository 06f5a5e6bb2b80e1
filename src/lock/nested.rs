//! Which locks are held further up by whoever runs the present task, and would be waited for in vain.

use std::future::Future;
use std::sync::Arc;

use super::lease::{Lease, LeaseView};
use super::lock_key::LockKey;
use super::shared::Shared;

tokio::task_local! {
    static HELD: Held;
    // The address of what the locks share of which a call was to have one.
    static UNPROTECTED: usize;
}

/// The locks that a body or a handler is within, the innermost first.
#[derive(Clone, Default)]
pub(super) struct Held(Option<Arc<Inside>>);

struct Inside {
    // Locks of different `Locks` are told apart by the address of what they share, which lives as long as the lease. That two of them keep theirs
    // in the same place is not seen: a store says nothing of where it keeps them.
    home: usize,
    lease: LeaseView,
    outer: Held,
}

impl Held {
    /// Those of the present task, and this one.
    pub(super) fn with(lease: &Lease) -> Self {
        Self::with_all(std::slice::from_ref(lease))
    }

    /// Those of the present task, and these.
    pub(super) fn with_all(leases: &[Lease]) -> Self {
        let held = HELD.try_with(Self::clone).unwrap_or_default();
        leases.iter().fold(held, |outer, lease| {
            let (home, lease) = (address(lease.home()), lease.view());
            Self(Some(Arc::new(Inside { home, lease, outer })))
        })
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

/// What the present task is within, and a share in the innermost lease of it, if that is one of `home`.
pub(super) fn innermost(home: &Arc<Shared>) -> Option<(Held, Lease)> {
    let held = HELD.try_with(Held::clone).ok()?;
    let inside = held.0.as_ref().filter(|inside| inside.home == address(home))?;
    let lease = inside.lease.reenter()?;
    Some((held, lease))
}

/// Calls something that goes without its lock of `home`, since the store fails.
pub(super) fn unprotected<T>(home: &Arc<Shared>, call: impl FnOnce() -> T) -> T {
    UNPROTECTED.sync_scope(address(home), call)
}

/// Whether this is called by somebody who goes without a lock of `home`.
pub(super) fn is_unprotected(home: &Arc<Shared>) -> bool {
    UNPROTECTED.try_with(|of| *of == address(home)).unwrap_or(false)
}

/// Whether the present task holds this lock, by a body or a handler that it is within. One that was lost meanwhile may be had again.
pub(super) fn holds(home: &Arc<Shared>, lock: &LockKey) -> bool {
    let is_held = |held: &Held| {
        let mut inside = held.0.as_deref();
        while let Some(Inside { home: of, lease, outer }) = inside {
            if *of == address(home) && lease.lock() == lock && lease.check().is_ok() {
                return true;
            }
            inside = outer.0.as_deref();
        }
        false
    };
    HELD.try_with(is_held).unwrap_or(false)
}
