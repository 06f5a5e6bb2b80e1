use std::sync::atomic::{AtomicU64, Ordering};

use super::store::Claim;

/// The largest fence in the replies of a store to this process. Each acquisition passes it on. So fences do not go backwards
/// within a process, even if the store loses its last fence and its clock is set back.
///
/// Each store has its own: fences of two stores cannot be compared.
#[derive(Debug, Default)]
pub(crate) struct FenceFloor(AtomicU64);

impl FenceFloor {
    /// The granted fences of `claim` must be larger than this.
    pub(crate) fn for_claim(&self, claim: &Claim) -> u64 {
        claim.floor().max(self.get())
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Records the last of `fences` fences from `first` on. One bogus reply must not use up all numbers.
    pub(crate) fn raise(&self, first: u64, fences: u32) {
        let last = first.saturating_add(u64::from(fences.saturating_sub(1)));
        if last <= Claim::MAX_FLOOR {
            self.0.fetch_max(last, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_rises_and_ignores_replies_that_make_no_sense() {
        let floor = FenceFloor::default();
        floor.raise(100, 16);
        floor.raise(50, 1);
        assert_eq!(floor.get(), 115);
        for first in [u64::MAX, 1 << 53, Claim::MAX_FLOOR] {
            floor.raise(first, 16);
        }
        assert_eq!(floor.get(), 115);
        floor.raise(Claim::MAX_FLOOR, 1);
        assert!(floor.get() + u64::from(u32::MAX) < 1 << 53, "there is room for more grants than there ever are");
    }
}
