use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// On larger machines some threads share a copy.
const MAX_LANES: usize = 64;
/// Threads take lanes in turn, also those that ask only once: with a few to spare two that work at the same time seldom have the same one.
const LANES_OF_A_PROCESSOR: usize = 4;

/// A copy for each lane of threads, made when one of them first asks.
///
/// For what is cloned with every request and counts references: processors that count in the same place wait for each other.
pub(crate) struct ShardedRefs<T> {
    // Of most things there is no other: they are made for a request, or on a thread that serves with them.
    first: OnceLock<(usize, T)>,
    others: OnceLock<Box<[OnceLock<T>]>>,
}

// By hand: `derive` would ask for `T: Default`.
impl<T> Default for ShardedRefs<T> {
    fn default() -> Self {
        Self { first: OnceLock::new(), others: OnceLock::new() }
    }
}

impl<T> ShardedRefs<T> {
    /// The copy of the lane of this thread.
    #[inline]
    pub(crate) fn get(&self, make: impl Fn() -> T) -> &T {
        let thread_slot = thread_slot();
        let (owner, first) = self.first.get_or_init(|| (thread_slot, make()));
        if *owner == thread_slot {
            return first;
        }
        let others = self.others.get_or_init(|| (0..lanes()).map(|_| OnceLock::new()).collect());
        others[thread_slot].get_or_init(make)
    }
}

/// The lane of this thread, less than [`lanes`].
#[inline]
pub(crate) fn thread_slot() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static LANE: Cell<Option<usize>> = const { Cell::new(None) };
    }
    LANE.with(|thread_slot| {
        thread_slot.get().unwrap_or_else(|| {
            let next = NEXT.fetch_add(1, Ordering::Relaxed) % lanes();
            thread_slot.set(Some(next));
            next
        })
    })
}

fn lanes() -> usize {
    static LANES: OnceLock<usize> = OnceLock::new();
    *LANES.get_or_init(|| {
        let processors = available_parallelism().map_or(1, usize::from);
        processors.saturating_mul(LANES_OF_A_PROCESSOR).min(MAX_LANES)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_keeps_its_copy_and_there_are_as_many_as_lanes() {
        let (copies, made) = (ShardedRefs::default(), AtomicUsize::new(0));
        let mine = || *copies.get(|| made.fetch_add(1, Ordering::Relaxed));
        let seen: HashSet<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..3 * MAX_LANES)
                .map(|_| {
                    scope.spawn(|| {
                        let copy = mine();
                        assert_eq!(mine(), copy);
                        copy
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        // So many threads in a row are in all lanes.
        assert_eq!((seen.len(), made.into_inner()), (lanes(), lanes()));
    }
}
