//! The locks that the current task runs under. Waiting for one of them would be a deadlock.

use std::future::Future;
use std::iter::successors;
use std::sync::Arc;

use super::layer_options::{OnLoss, ReleaseAt};
use super::lease::{Lease, LeaseHandle};
use super::lock_key::LockKey;
use super::locks_state::LocksState;

tokio::task_local! {
    static HELD: Held;
}

/// The locks around a body or handler, innermost first.
#[derive(Clone, Default)]
pub(crate) struct Held(Option<Arc<Frame>>);

struct Frame {
    // The address of the `LocksState`, which identifies a `Locks` and its clones. The state lives as long as the lease. Two `Locks` on the
    // same backend have different addresses, because their stores cannot be compared.
    shared: usize,
    lease: LeaseHandle,
    on_loss: OnLoss,
    release_at: ReleaseAt,
    outer: Held,
}

impl Held {
    /// The locks of the current task.
    pub(crate) fn current() -> Self {
        HELD.try_with(Self::clone).unwrap_or_default()
    }

    /// The locks of the current task, and this one.
    pub(super) fn with(lease: &Lease) -> Self {
        Self::with_all(std::slice::from_ref(lease))
    }

    /// The locks of the current task, and these.
    pub(super) fn with_all(leases: &[Lease]) -> Self {
        let inside = |outer: Self, lease| outer.and(lease, OnLoss::default(), ReleaseAt::default());
        leases.iter().fold(Self::current(), inside)
    }

    /// These locks, and that of a request with the settings of its layer.
    pub(super) fn and(self, lease: &Lease, on_loss: OnLoss, release_at: ReleaseAt) -> Self {
        let (shared, lease) = (address(lease.shared()), lease.view());
        Self(Some(Arc::new(Frame { shared, lease, on_loss, release_at, outer: self })))
    }

    fn iter(&self) -> impl Iterator<Item = &Frame> {
        successors(self.0.as_deref(), |inside| inside.outer.0.as_deref())
    }

    /// Runs a function under these locks.
    pub(super) fn scope<T>(&self, run: impl FnOnce() -> T) -> T {
        HELD.sync_scope(self.clone(), run)
    }

    /// Runs a future under these locks.
    pub(super) fn within<F: Future>(self, body: F) -> impl Future<Output = F::Output> {
        HELD.scope(self, body)
    }
}

impl Held {
    /// For detached work: a handle of each held lease that its layer releases at `until` or later.
    pub(crate) fn shares(&self, until: ReleaseAt) -> Vec<Lease> {
        self.shares_of(|inside| until == ReleaseAt::HandlerDone || inside.release_at == until)
    }

    fn shares_of(&self, is_meant: impl Fn(&Frame) -> bool) -> Vec<Lease> {
        self.iter().filter(|inside| is_meant(inside)).filter_map(|inside| inside.lease.reenter()).collect()
    }

    /// Runs detached work to its end, and keeps a handle of each lease until then. If a lease with [`OnLoss::Cancel`] is lost, drops the
    /// work and returns `None`.
    pub(crate) fn detached<F: Future>(self, work: F) -> impl Future<Output = Option<F::Output>> + use<F> {
        let leases = self.shares(ReleaseAt::HandlerDone);
        let needed = self.shares_of(|inside| inside.on_loss == OnLoss::Cancel);
        async move {
            let outcome = tokio::select! {
                // After a stall, check the leases before the work runs.
                biased;
                _ = Lease::first_lost(&needed) => None,
                outcome = self.within(work) => Some(outcome),
            };
            drop(leases);
            outcome
        }
    }
}

fn address(shared: &Arc<LocksState>) -> usize {
    Arc::as_ptr(shared) as usize
}

/// Whether the current task runs in a body or handler that holds this lock. A lost lock does not count: the task can acquire it again.
pub(super) fn is_held(shared: &Arc<LocksState>, lock: &LockKey) -> bool {
    let is_it = |inside: &Frame| {
        inside.shared == address(shared) && inside.lease.lock() == lock && inside.lease.check().is_ok()
    };
    let is_held = |held: &Held| held.iter().any(is_it);
    HELD.try_with(is_held).unwrap_or(false)
}
