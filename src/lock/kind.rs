use std::fmt;

/// The kind of a lock. While a key is held as one kind, a claim of another kind is refused with [`OtherKind`](super::OtherKind).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LockKind {
    /// By one holder at a time: [`Locks`](super::Locks), [fair](super::Locks::fair) or not.
    #[default]
    Exclusive,
    /// By readers together or one writer: [`RwLocks`](super::RwLocks).
    ReadWrite,
    /// By several holders: [`Semaphore`](super::Semaphore). Semaphores with different numbers of permits are of one kind.
    Semaphore,
}

impl fmt::Display for LockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exclusive => "an exclusive lock",
            Self::ReadWrite => "a read/write lock",
            Self::Semaphore => "a semaphore",
        })
    }
}
