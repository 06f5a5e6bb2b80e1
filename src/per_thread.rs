use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// With more processors than this, some share a copy.
const MAX_COPIES: usize = 64;

/// A copy for each thread that runs at the same time, made when it first asks.
///
/// For what is cloned with every request and counts references: processors that count in the same place wait for each other.
#[derive(Debug)]
pub(crate) struct PerThread<T> {
    copies: OnceLock<Box<[OnceLock<T>]>>,
}

// By hand: `derive` would ask for `T: Default`.
impl<T> Default for PerThread<T> {
    fn default() -> Self {
        Self { copies: OnceLock::new() }
    }
}

impl<T> PerThread<T> {
    /// The copy of this thread.
    #[inline]
    pub(crate) fn get(&self, make: impl FnOnce() -> T) -> &T {
        let copies = self.copies.get_or_init(|| (0..places()).map(|_| OnceLock::new()).collect());
        copies[place()].get_or_init(make)
    }
}

/// Which copies this thread has: less than [`places`], and another number than that of the threads that asked just before or after it.
#[inline]
pub(crate) fn place() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static PLACE: Cell<Option<usize>> = const { Cell::new(None) };
    }
    PLACE.with(|place| {
        place.get().unwrap_or_else(|| {
            let next = NEXT.fetch_add(1, Ordering::Relaxed) % places();
            place.set(Some(next));
            next
        })
    })
}

/// How many copies there are at the most.
fn places() -> usize {
    static PLACES: OnceLock<usize> = OnceLock::new();
    *PLACES.get_or_init(|| available_parallelism().map_or(1, usize::from).min(MAX_COPIES))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_keeps_its_copy_and_there_are_as_many_as_processors() {
        let (copies, made) = (PerThread::default(), AtomicUsize::new(0));
        let mine = || *copies.get(|| made.fetch_add(1, Ordering::Relaxed));
        let seen: HashSet<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..3 * MAX_COPIES)
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
        // So many threads in a row have all places among them.
        assert_eq!((seen.len(), made.into_inner()), (places(), places()));
    }
}
