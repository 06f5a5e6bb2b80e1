use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// The maximum number of slots. On larger machines more threads share a slot.
const MAX_SLOTS: usize = 64;
/// Threads are assigned to slots in turn. Short-lived threads take slots, too, so spare slots make it unlikely that two busy threads share
/// one.
const SLOTS_PER_PROCESSOR: usize = 4;

/// One copy of a value for each slot. Several threads may share a slot. The first thread of a slot that needs the copy creates it.
///
/// For reference-counted values that are cloned with every request, to avoid contention on one reference count.
pub(crate) struct ShardedRefs<T> {
    // Separate from `others`, because most values are used by one slot only.
    first: OnceLock<(usize, T)>,
    others: OnceLock<Box<[OnceLock<T>]>>,
}

// By hand: `derive` would require `T: Default`.
impl<T> Default for ShardedRefs<T> {
    fn default() -> Self {
        Self { first: OnceLock::new(), others: OnceLock::new() }
    }
}

impl<T> ShardedRefs<T> {
    /// The copy for the slot of this thread.
    #[inline]
    pub(crate) fn get(&self, make: impl Fn() -> T) -> &T {
        let slot = thread_slot();
        let (owner, first) = self.first.get_or_init(|| (slot, make()));
        if *owner == slot {
            return first;
        }
        let others = self.others.get_or_init(|| (0..slot_count()).map(|_| OnceLock::new()).collect());
        others[slot].get_or_init(make)
    }
}

/// The slot of this thread, less than [`slot_count`].
#[inline]
pub(crate) fn thread_slot() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SLOT: Cell<Option<usize>> = const { Cell::new(None) };
    }
    SLOT.with(|slot| {
        slot.get().unwrap_or_else(|| {
            let next = NEXT.fetch_add(1, Ordering::Relaxed) % slot_count();
            slot.set(Some(next));
            next
        })
    })
}

fn slot_count() -> usize {
    static SLOTS: OnceLock<usize> = OnceLock::new();
    *SLOTS.get_or_init(|| {
        let processors = available_parallelism().map_or(1, usize::from);
        processors.saturating_mul(SLOTS_PER_PROCESSOR).min(MAX_SLOTS)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread;

    use super::*;

    #[test]
    fn thread_keeps_its_copy_and_each_slot_has_one() {
        let (copies, made) = (ShardedRefs::default(), AtomicUsize::new(0));
        let get = || *copies.get(|| made.fetch_add(1, Ordering::Relaxed));
        let seen: HashSet<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..3 * MAX_SLOTS)
                .map(|_| {
                    scope.spawn(|| {
                        let copy = get();
                        assert_eq!(get(), copy);
                        copy
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        // There are more threads than slots, so every slot is used.
        assert_eq!((seen.len(), made.into_inner()), (slot_count(), slot_count()));
    }
}
