//! Which locks are held further up by whoever runs the present task, and would be waited for in vain.

use std::future::Future;
use std::sync::Arc;

use super::lease::{Lease, LeaseView};
use super::lock_key::LockKey;
use super::shared::Shared;

tokio::task_local! {
    static HELD: Held;
    // How the call that is being made passes the lock right in front of it. One further out says nothing of that.
    static PASSAGE: Passage;
}

/// How a call passes the lock in front of it.
#[derive(Clone, Copy)]
pub(super) enum Passage {
    /// It needs none.
    Free,
    /// With its lease, which is the innermost that is held.
    Locked,
    /// It goes without its lock, since the store fails.
    Unprotected,
}

impl Passage {
    /// Makes the call.
    pub(super) fn scope<T>(self, call: impl FnOnce() -> T) -> T {
        PASSAGE.sync_scope(self, call)
    }

    /// That of the call that is being made.
    pub(super) fn present() -> Self {
        PASSAGE.try_with(|passage| *passage).unwrap_or(Self::Free)
    }
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
    /// Those of the present task.
    pub(super) fn present() -> Self {
        HELD.try_with(Self::clone).unwrap_or_default()
    }

    /// Those of the present task, and this one.
    pub(super) fn with(lease: &Lease) -> Self {
        Self::with_all(std::slice::from_ref(lease))
    }

    /// Those of the present task, and these.
    pub(super) fn with_all(leases: &[Lease]) -> Self {
        leases.iter().fold(Self::present(), |outer, lease| {
            let (home, lease) = (address(lease.home()), lease.view());
            Self(Some(Arc::new(Inside { home, lease, outer })))
        })
    }

    /// A share in the lease of the innermost of them.
    pub(super) fn innermost(&self) -> Option<Lease> {
        self.0.as_ref()?.lease.reenter()
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
