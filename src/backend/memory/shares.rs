//! A capacity that several owners share, so that one owner cannot use all of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::identity_hasher::IdentityBuildHasher;

/// The number of parts. Threads wait for each other only if they change owners of the same part.
const PARTS: usize = 16;

/// An amount of records and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) records: usize,
    pub(super) bytes: usize,
}

/// Why an owner gets no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The owner has as many records as its bound allows.
    Bound,
    /// The owner would exceed its share.
    Share,
}

/// How much each owner uses, by a keyed hash of its name. An owner without records takes no memory.
pub(super) struct Shares {
    parts: [Mutex<HashMap<u64, Amount, IdentityBuildHasher>>; PARTS],
    records: AtomicUsize,
    bytes: AtomicUsize,
    room: Amount,
}

/// By how much an owner would exceed its share with `new` more. The share is the amount that is left for all others. A single owner may
/// have `room`, and all owners together have less than twice as much.
pub(super) const fn excess(own: usize, all: usize, new: usize, room: usize) -> usize {
    if new == 0 {
        return 0;
    }
    let left = room.saturating_mul(2).saturating_sub(all.saturating_add(new));
    own.saturating_add(new).saturating_sub(left)
}

impl Shares {
    /// `room` is the share of a single owner.
    pub(super) fn new(room: Amount) -> Self {
        Self { parts: Default::default(), records: AtomicUsize::new(0), bytes: AtomicUsize::new(0), room }
    }

    pub(super) fn records(&self) -> usize {
        self.records.load(Ordering::Relaxed)
    }

    /// Takes an amount, if the owner then has no more than its share, and no more than `max` records.
    pub(super) fn reserve(&self, owner: u64, new: Amount, max: usize) -> Result<(), NoRoom> {
        let mut part = self.part(owner);
        let own = part.get(&owner).copied().unwrap_or_default();
        self.check(own, new, max)?;
        let (records, bytes) = (own.records + new.records, own.bytes + new.bytes);
        part.insert(owner, Amount { records, bytes });
        self.records.fetch_add(new.records, Ordering::Relaxed);
        self.bytes.fetch_add(new.bytes, Ordering::Relaxed);
        Ok(())
    }

    fn check(&self, own: Amount, new: Amount, max: usize) -> Result<(), NoRoom> {
        if new.records > 0 && own.records >= max {
            return Err(NoRoom::Bound);
        }
        let bytes = self.bytes.load(Ordering::Relaxed);
        if excess(own.records, self.records(), new.records, self.room.records) > 0
            || excess(own.bytes, bytes, new.bytes, self.room.bytes) > 0
        {
            return Err(NoRoom::Share);
        }
        Ok(())
    }

    pub(super) fn release(&self, owner: u64, old: Amount) {
        let mut part = self.part(owner);
        if let Some(own) = part.get_mut(&owner) {
            own.records -= old.records;
            own.bytes -= old.bytes;
            if *own == Amount::default() {
                part.remove(&owner);
            }
        }
        self.records.fetch_sub(old.records, Ordering::Relaxed);
        self.bytes.fetch_sub(old.bytes, Ordering::Relaxed);
    }

    /// No code panics in the middle of a change, so a poisoned part is intact.
    fn part(&self, owner: u64) -> MutexGuard<'_, HashMap<u64, Amount, IdentityBuildHasher>> {
        // The map of a part uses the other half of the hash.
        self.parts[(owner >> 32) as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All amounts, read from the parts.
    #[cfg(test)]
    pub(super) fn added_up(&self) -> HashMap<u64, Amount> {
        let parts = (0..PARTS as u64).flat_map(|part| self.part(part << 32).clone());
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Amount = Amount { records: 1, bytes: 10 };

    fn fill(shares: &Shares, owner: u64) -> usize {
        (0..).take_while(|_| shares.reserve(owner, ONE, usize::MAX).is_ok()).count()
    }

    #[test]
    fn owner_leaves_as_much_room_as_it_has() {
        let shares = Shares::new(Amount { records: 1_000, bytes: usize::MAX / 2 });
        assert_eq!([1, 2, 3].map(|owner| fill(&shares, owner)), [1_000, 500, 250]);
        // Other owners may take the amount that one gives back.
        (0..1_000).for_each(|_| shares.release(1, ONE));
        assert!(fill(&shares, 3) > 300);
        assert_eq!(shares.reserve(4, ONE, 0), Err(NoRoom::Bound));
        assert_eq!(shares.reserve(3, ONE, usize::MAX), Err(NoRoom::Share));
    }

    #[test]
    fn bytes_are_shared_like_records() {
        let shares = Shares::new(Amount { records: 1_000, bytes: 100 });
        assert_eq!([1, 2].map(|owner| fill(&shares, owner)), [10, 5]);
        assert_eq!(shares.reserve(1, Amount { records: 1, bytes: 0 }, usize::MAX), Ok(()));
    }
}
