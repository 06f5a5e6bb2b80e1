use std::error::Error;
use std::fmt;
use std::time::Duration;

use super::kind::LockKind;
use super::lock_key::LockKey;
use crate::error::{ConfigError, ContentionHint, StoreError};

/// Why a lock was not granted, or its lease was lost. Each case is a type of its own, so that a held lock and a failed store cannot be
/// confused.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockError {
    /// Another holder had the lock until the wait was over. Or one of [several](super::Locks::lock_all) leases was lost before all were
    /// granted.
    Busy(Busy),
    /// The queue is full.
    QueueFull(QueueFull),
    /// Fewer replicas have the lease than [`Locks::replication`](super::Locks::replication) requires. The lease is released in
    /// the background.
    NotReplicated(NotReplicated),
    /// The caller already holds this lock, further up the call stack.
    Nested(Nested),
    /// The key is held as a lock of another kind. This is a bug of the program: use different
    /// [names](super::Locks::new) for both kinds.
    OtherKind(OtherKind),
    /// The lease was lost while its body ran. The body was cancelled.
    Lost(Lost),
    /// [`Locks::shutdown`](super::Locks::shutdown) was called, or the [shutdown of the backend](crate::backend#shutdown).
    Closed(Closed),
    /// A setting is invalid; the store was not called.
    Config(ConfigError),
    /// The store failed. A late grant is released in the background. If 1,024 such releases are pending already, the grant
    /// expires.
    Store(StoreError),
}

impl LockError {
    /// Whether the lock is held by another holder.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Self::Busy(_))
    }

    /// Whether the lease was lost.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost(_))
    }

    fn inner(&self) -> &(dyn Error + 'static) {
        match self {
            Self::Busy(error) => error,
            Self::QueueFull(error) => error,
            Self::NotReplicated(error) => error,
            Self::Nested(error) => error,
            Self::OtherKind(error) => error,
            Self::Lost(error) => error,
            Self::Closed(error) => error,
            Self::Config(error) => error,
            Self::Store(error) => error,
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.inner(), f)
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.inner().source()
    }
}

macro_rules! cases {
    ($($case:ident($type:ty)),*) => {$(
        impl From<$type> for LockError {
            fn from(error: $type) -> Self {
                Self::$case(error)
            }
        }
    )*};
}

cases!(
    Busy(Busy),
    QueueFull(QueueFull),
    NotReplicated(NotReplicated),
    Nested(Nested),
    OtherKind(OtherKind),
    Lost(Lost),
    Closed(Closed),
    Config(ConfigError),
    Store(StoreError)
);

/// Another holder has the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Busy {
    lock: LockKey,
    occupied: ContentionHint,
}

impl Busy {
    pub(crate) const fn new(lock: LockKey, retry_after: Duration) -> Self {
        Self { lock, occupied: ContentionHint(retry_after) }
    }

    /// The lock.
    #[must_use]
    pub const fn lock(&self) -> &LockKey {
        &self.lock
    }

    /// The time until the lease of the holder expires. Most holders renew their lease before that. The holder may release the lock earlier.
    #[must_use]
    pub const fn retry_after(&self) -> Duration {
        self.occupied.0
    }
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the lock `{}` is held by another holder", self.lock)
    }
}

impl Error for Busy {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.occupied)
    }
}

/// Too many callers wait for the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFull {
    lock: LockKey,
}

impl QueueFull {
    pub(crate) const fn new(lock: LockKey) -> Self {
        Self { lock }
    }

    /// The lock.
    #[must_use]
    pub const fn lock(&self) -> &LockKey {
        &self.lock
    }
}

impl fmt::Display for QueueFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "too many callers wait for the lock `{}`", self.lock)
    }
}

impl Error for QueueFull {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(ContentionHint::FOR_LONG)
    }
}

/// Fewer replicas have the lease than required, so a failover could forget it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotReplicated {
    lock: LockKey,
    replicas: u32,
    required: u32,
}

impl NotReplicated {
    pub(super) const fn new(lock: LockKey, replicas: u32, required: u32) -> Self {
        Self { lock, replicas, required }
    }

    /// The lock.
    #[must_use]
    pub const fn lock(&self) -> &LockKey {
        &self.lock
    }

    /// Number of replicas that had the lease in time.
    #[must_use]
    pub const fn replicas(&self) -> u32 {
        self.replicas
    }

    /// Number of required replicas.
    #[must_use]
    pub const fn required(&self) -> u32 {
        self.required
    }
}

impl fmt::Display for NotReplicated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lock, replicas, required } = self;
        write!(f, "the lock `{lock}` has reached {replicas} replicas, and {required} are required")
    }
}

impl Error for NotReplicated {}

/// The caller already holds this lock and would wait for itself. Use [`Lease::reenter`](super::Lease::reenter) to share the
/// lease.
///
/// Detected within the body of [`run`](super::Locks::run) and within a handler behind a [`LockLayer`](super::LockLayer), in the
/// same task, and for the same [`Locks`](super::Locks) or a clone. Two `Locks` made on the same backend do not know each other:
/// the second waits for the first. Make them once and clone them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nested {
    lock: LockKey,
}

impl Nested {
    pub(super) const fn new(lock: LockKey) -> Self {
        Self { lock }
    }

    /// The lock.
    #[must_use]
    pub const fn lock(&self) -> &LockKey {
        &self.lock
    }
}

impl fmt::Display for Nested {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the caller already holds the lock `{}`", self.lock)
    }
}

impl Error for Nested {}

/// The key is held as a lock of another kind, which excludes this kind.
///
/// A key has one kind for as long as it is held: exclusive, read/write, or a semaphore of any number of permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherKind {
    lock: LockKey,
    wanted: LockKind,
    held: LockKind,
}

impl OtherKind {
    pub(super) const fn new(lock: LockKey, wanted: LockKind, held: LockKind) -> Self {
        Self { lock, wanted, held }
    }

    /// The lock.
    #[must_use]
    pub const fn lock(&self) -> &LockKey {
        &self.lock
    }

    /// The requested kind.
    #[must_use]
    pub const fn wanted(&self) -> LockKind {
        self.wanted
    }

    /// The kind that holds the key.
    #[must_use]
    pub const fn held(&self) -> LockKind {
        self.held
    }
}

impl fmt::Display for OtherKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lock, wanted, held } = self;
        write!(f, "the key `{lock}` is held as {held} and cannot be acquired as {wanted}; use locks with another name")
    }
}

impl Error for OtherKind {}

/// The locks were shut down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the locks were shut down")
    }
}

impl Error for Closed {
    // If a job of a delay queue fails with this error, the worker snoozes it without counting the attempt: another process can run it.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(ContentionHint::FOR_LONG)
    }
}

/// The lease is lost, or may be. That is final.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    lock: LockKey,
    reason: LossReason,
}

/// How a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// It could not be renewed in time: the store did not reply, or this process stalled.
    Expired,
    /// The store no longer has it, or has another holder: it was deleted, evicted, or forgotten in a failover.
    Taken,
    /// It was held for as long as [`max_hold`](super::Locks::max_hold) allows.
    MaxHold,
    /// It was released. Only a [`LeaseHandle`](super::LeaseHandle) can observe that.
    Released,
}

impl Lost {
    pub(super) const fn new(lock: LockKey, reason: LossReason) -> Self {
        Self { lock, reason }
    }

    /// The lock.
    #[must_use]
    pub const fn lock(&self) -> &LockKey {
        &self.lock
    }

    /// How the lease was lost.
    #[must_use]
    pub const fn reason(&self) -> LossReason {
        self.reason
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.reason {
            LossReason::Expired => "was not renewed in time",
            LossReason::Taken => "is no longer held",
            LossReason::MaxHold => "was held for the maximum time",
            LossReason::Released => "was released",
        };
        write!(f, "the lock `{}` {how}", self.lock)
    }
}

// Errors that have the same message, such as `LockError`, also have the same source.
impl Error for Lost {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&PartialEffects)
    }
}

/// The source of every [`Lost`], for downcasting: work under the lease may be incomplete.
#[derive(Debug)]
pub(crate) struct PartialEffects;

impl fmt::Display for PartialEffects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("work under the lock may have had effects")
    }
}

impl Error for PartialEffects {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_cross_threads_and_print_their_own_level() {
        fn portable<T: Error + Send + Sync + 'static>() {}
        portable::<LockError>();
        portable::<Lost>();
        let error = LockError::from(StoreError::unavailable("connection refused"));
        assert_eq!(error.to_string(), "the store is unavailable");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
    }
}
