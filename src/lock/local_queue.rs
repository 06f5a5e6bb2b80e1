//! The local wait queue of one `Locks` and its clones for one key. A pure state machine, without clock, store or task.

use std::collections::VecDeque;

/// The position of a waiter. Smaller numbers come first.
pub(super) type Position = u64;

/// The callers of this process that want one key. One of them is the leader, which calls the store or holds the lease. The others wait in
/// order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct LocalQueue<L, W> {
    front: LeaderState<L>,
    waiters: VecDeque<(Position, W)>,
}

/// What the leader does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum LeaderState<L> {
    /// It calls the store.
    Acquiring,
    /// It holds the lease.
    Held(L),
    /// It releases the lease.
    Releasing,
}

/// Where a released lease goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReleaseTarget<W, F> {
    /// To the first waiter.
    Handoff(W, F),
    /// To the store. Call [`LocalQueue::advance`] after the release.
    Release,
    /// The queue does not hold the lease: the lease was lost, or is one of several leases of the key.
    Unknown,
}

impl<L, W> LocalQueue<L, W> {
    /// A queue whose first caller is the leader.
    pub(super) const fn new() -> Self {
        Self { front: LeaderState::Acquiring, waiters: VecDeque::new() }
    }

    pub(super) const fn front(&self) -> &LeaderState<L> {
        &self.front
    }

    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// The next waiter.
    pub(super) fn first(&self) -> Option<&W> {
        self.waiters.front().map(|(_, waiter)| waiter)
    }

    /// Whether a new caller becomes the leader as soon as the lease is released.
    pub(super) fn is_free_soon(&self) -> bool {
        matches!(self.front, LeaderState::Releasing) && self.waiters.is_empty()
    }

    /// Adds a waiter at its position. A requeued waiter has the position from before.
    pub(super) fn enter(&mut self, position: Position, waiter: W) {
        let at = self.waiters.partition_point(|(other, _)| *other <= position);
        self.waiters.insert(at, (position, waiter));
    }

    /// Removes a waiter that gives up, and returns whether it was the first. False if a handoff has removed it already.
    pub(super) fn leave(&mut self, position: Position) -> bool {
        let Ok(at) = self.waiters.binary_search_by_key(&position, |(position, _)| *position) else { return false };
        self.waiters.remove(at);
        at == 0
    }

    /// The store has granted the lease to the leader.
    pub(super) fn granted(&mut self, lease: L) {
        self.front = LeaderState::Held(lease);
    }

    /// The leader leaves, and the first waiter becomes the leader. `None` if no caller is left: remove the queue then.
    pub(super) fn advance(&mut self) -> Option<W> {
        self.front = LeaderState::Acquiring;
        self.waiters.pop_front().map(|(_, waiter)| waiter)
    }
}

impl<L: PartialEq, W> LocalQueue<L, W> {
    pub(super) fn is_held_by(&self, lease: &L) -> bool {
        matches!(&self.front, LeaderState::Held(held) if held == lease)
    }

    /// The holder releases its lease. `hand_off` returns the grant for the first waiter, or `None` if the lease does not suit it.
    pub(super) fn release_or_hand_off<F>(
        &mut self,
        lease: &L,
        hand_off: impl FnOnce(&W) -> Option<F>,
    ) -> ReleaseTarget<W, F> {
        if !self.is_held_by(lease) {
            return ReleaseTarget::Unknown;
        }
        let handed_over = self.first().and_then(hand_off);
        match handed_over.and_then(|grant| Some((self.waiters.pop_front()?.1, grant))) {
            Some((waiter, grant)) => ReleaseTarget::Handoff(waiter, grant),
            None => {
                self.front = LeaderState::Releasing;
                ReleaseTarget::Release
            }
        }
    }

    /// A lease was lost. Returns whether the leader of this queue held it: call [`advance`](Self::advance) then.
    pub(super) fn lost(&mut self, lease: &L) -> bool {
        let is_ours = self.is_held_by(lease);
        if is_ours {
            self.front = LeaderState::Acquiring;
        }
        is_ours
    }
}

#[cfg(test)]
mod exploration;
