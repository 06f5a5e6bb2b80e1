//! Which locks are held further up by whoever runs the present task, and would be waited for in vain.

use std::future::Future;
use std::iter::successors;
use std::sync::Arc;

use super::layer::{OnLoss, ReleaseAt};
use super::lease::{Lease, LeaseHandle};
use super::lock_key::LockKey;
use super::locks_state::Shared;
use super::multi::MultiLease;
use super::running::Place;

tokio::task_local! {
    static HELD: Held;
    // How the call that is being made passes the lock right in front of it. One further out says nothing of that.
    static PASSAGE: Passage;
}

/// How a call passes the lock in front of it.
#[derive(Clone)]
pub(super) enum Passage {
    /// It needs none.
    Free,
    /// With its lease, which is the innermost that is held, and with its place among those of a detached layer.
    Locked(Option<Place>),
    /// It goes without its lock, since the store fails.
    Unprotected(Option<Place>),
}

impl Passage {
    /// Makes the call.
    pub(super) fn scope<T>(self, call: impl FnOnce() -> T) -> T {
        PASSAGE.sync_scope(self, call)
    }

    /// That of the call that is being made.
    pub(super) fn present() -> Self {
        PASSAGE.try_with(Self::clone).unwrap_or(Self::Free)
    }
}

/// The locks that a body or a handler is within, the innermost first.
#[derive(Clone, Default)]
pub(crate) struct Held(Option<Arc<Frame>>);

struct Frame {
    // Locks of different `Locks` are told apart by the address of what they share, which lives as long as the lease. That two of them keep theirs
    // in the same place is not seen: a store says nothing of where it keeps them.
    home: usize,
    lease: LeaseHandle,
    on_loss: OnLoss,
    release_at: ReleaseAt,
    outer: Held,
}

impl Held {
    /// Those of the present task.
    pub(crate) fn present() -> Self {
        HELD.try_with(Self::clone).unwrap_or_default()
    }

    /// Those of the present task, and this one.
    pub(super) fn with(lease: &Lease) -> Self {
        Self::with_all(std::slice::from_ref(lease))
    }

    /// Those of the present task, and these.
    pub(super) fn with_all(leases: &[Lease]) -> Self {
        let inside = |outer: Self, lease| outer.and(lease, OnLoss::default(), ReleaseAt::default());
        leases.iter().fold(Self::present(), inside)
    }

    /// These, and that of a request on the terms of its layer.
    pub(super) fn and(self, lease: &Lease, on_loss: OnLoss, release_at: ReleaseAt) -> Self {
        let (home, lease) = (address(lease.home()), lease.view());
        Self(Some(Arc::new(Frame { home, lease, on_loss, release_at, outer: self })))
    }

    fn iter(&self) -> impl Iterator<Item = &Frame> {
        successors(self.0.as_deref(), |inside| inside.outer.0.as_deref())
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

impl Held {
    /// A share in each lease that is held until then, for work that goes on by itself.
    pub(crate) fn shares(&self, until: ReleaseAt) -> Vec<Lease> {
        self.shares_of(|inside| until == ReleaseAt::HandlerDone || inside.release_at == until)
    }

    fn shares_of(&self, is_meant: impl Fn(&Frame) -> bool) -> Vec<Lease> {
        self.iter().filter(|inside| is_meant(inside)).filter_map(|inside| inside.lease.reenter()).collect()
    }

    /// Work that goes on by itself until its end: with a share in each lease, and dropped where it stands when one is lost, unless that is only to be told.
    /// `None` if it was dropped.
    pub(crate) fn detached<F: Future>(self, work: F) -> impl Future<Output = Option<F::Output>> + use<F> {
        let leases = self.shares(ReleaseAt::HandlerDone);
        let needed = MultiLease::of(self.shares_of(|inside| inside.on_loss == OnLoss::Cancel));
        async move {
            let outcome = tokio::select! {
                // After a standstill nothing of the work may run before this was looked at.
                biased;
                _ = needed.lost() => None,
                outcome = self.within(work) => Some(outcome),
            };
            drop(leases);
            outcome
        }
    }
}

fn address(home: &Arc<Shared>) -> usize {
    Arc::as_ptr(home) as usize
}

/// Whether the present task holds this lock, by a body or a handler that it is within. One that was lost meanwhile may be had again.
pub(super) fn holds(home: &Arc<Shared>, lock: &LockKey) -> bool {
    let is_it =
        |inside: &Frame| inside.home == address(home) && inside.lease.lock() == lock && inside.lease.check().is_ok();
    let is_held = |held: &Held| held.iter().any(is_it);
    HELD.try_with(is_held).unwrap_or(false)
}
