//! Which locks are held further up by whoever runs the present task, and would be waited for in vain.

use std::future::Future;
use std::sync::Arc;

use super::shared::Shared;
use super::store::LockKey;

tokio::task_local! {
    // Locks of different `Locks` are told apart by the address of what they share, which lives as long as its leases.
    static HELD: Vec<(usize, LockKey)>;
}

fn name(home: &Arc<Shared>, lock: &LockKey) -> (usize, LockKey) {
    (Arc::as_ptr(home) as usize, *lock)
}

/// Whether the present task holds this lock, by a body or a handler that it is within.
pub(super) fn holds(home: &Arc<Shared>, lock: &LockKey) -> bool {
    HELD.try_with(|held| held.contains(&name(home, lock))).unwrap_or(false)
}

/// Runs `body` as what holds this lock.
pub(super) fn within<F: Future>(
    home: &Arc<Shared>,
    lock: &LockKey,
    body: F,
) -> impl Future<Output = F::Output> + use<F> {
    let mut held = HELD.try_with(Clone::clone).unwrap_or_default();
    held.push(name(home, lock));
    HELD.scope(held, body)
}
