//! For people who write a backend: what locks need from a store.

use std::future::Future;
use std::time::Duration;

use super::kind::LockKind;
use super::lock_key::LockKey;
use super::status::{ForceReleased, LockPage, LockStatus};
use crate::error::StoreError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::cursor::Cursor;

pub use crate::store::notifications::Notifications;
use crate::store::shutdown::ShutdownTarget;
pub use crate::store::token::Token;

/// What locks need from a backend: leases that are acquired, renewed and released, each in one atomic step.
///
/// Each acquisition has its own [`Token`], and each call may be repeated with it. So a lost reply can be requested again,
/// without holding a lease twice or releasing one of another client. The backend owns the clock.
///
/// All backends pass the same contract tests. `tollgate::testing` (feature `testing`) has them for your own backend.
///
/// # Cancellation
///
/// If you drop a returned future, the call may or may not have been executed.
pub trait LockStore {
    /// Acquires a lease for [`Claim::ttl`] from now on, if fewer than [`Claim::permits`] others of the same kind hold one, and
    /// no waiter precedes this one: see [`Queueing`]. While a lock of another [kind](Claim::kind) is held, the answer is
    /// [`Acquired::OtherKind`].
    ///
    /// If the token holds the lease already, this renews it and returns the same answer. Only a store over several servers may return another fence.
    fn acquire(&self, lock: &LockKey, claim: &Claim) -> impl Future<Output = Result<Acquired, StoreError>> + Send;

    /// Acquires the leases of several locks, each like [`acquire`](Self::acquire), or none. Either all answers are [`Acquired::Granted`],
    /// or none is. [`Acquired::Busy`] then says how long others hold the lock, zero if it is free. Accepts up to
    /// [`Claim::MAX_BATCH`] locks with the same [`shard`](Self::shard). Their claims have one permit, the same `ttl`, and
    /// [`Queueing::Bypass`].
    fn acquire_all(
        &self,
        claims: &[(LockKey, Claim)],
    ) -> impl Future<Output = Result<Vec<Acquired>, StoreError>> + Send;

    /// Renews leases for their whole time, each if its token still holds it. Returns for each lease, in order, whether it was renewed. An
    /// ended lease does not come back.
    fn renew(&self, renewals: &[Renewal]) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// Locks with the same number are acquired and renewed together. Others get calls of their own, so that a failure does not
    /// affect all leases. The default is one number for all locks.
    fn shard(&self, lock: &LockKey) -> u32 {
        let _ = lock;
        0
    }

    /// Releases a lease if `token` holds it, or removes the token from the queue, and notifies [watchers](Self::watch): all of
    /// them, or the first in the queue.
    fn release(&self, lock: &LockKey, token: &Token) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Notifications for a waiter. Without a token: whenever the lease is released and no waiter is queued. With the token of a queued waiter:
    /// when it may be its turn. The future is ready once no release can be missed. Call [`acquire`](Self::acquire) again then,
    /// and after each notification. A store without notifications returns [`Notifications::none`].
    fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> impl Future<Output = Notifications> + Send;

    /// Stores the name of a holder, for [`LockRegistry::inspect`]. Does nothing by default.
    fn name(&self, lock: &LockKey, token: &Token, name: &str) -> impl Future<Output = Result<(), StoreError>> + Send {
        let _ = (lock, token, name);
        std::future::ready(Ok(()))
    }

    /// Asks the holders to release the lease, if they [listen](Self::watch_release_requests). They may ignore it. Does nothing by default.
    fn request_release(&self, lock: &LockKey) -> impl Future<Output = Result<(), StoreError>> + Send {
        let _ = lock;
        std::future::ready(Ok(()))
    }

    /// Notifications for a holder, whenever the lease is [asked for](Self::request_release). Ready once none can be missed.
    fn watch_release_requests(&self, lock: &LockKey) -> impl Future<Output = Notifications> + Send {
        let _ = lock;
        std::future::ready(Notifications::none())
    }

    /// The reach of the leases.
    fn reach(&self) -> Reach;

    /// Registers work: the shutdown of the backend closes it and waits for its end. See [`backend`](crate::backend#shutdown). A store that
    /// wraps another one has to pass the call on. Defaults to nothing, for a store without a shutdown.
    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        let _ = target;
    }
}

/// What operators need from a backend, and holders do not: inspect locks and release them by force.
pub trait LockRegistry: LockStore {
    /// The holders of a lease; none if it is free.
    fn inspect(&self, lock: &LockKey) -> impl Future<Output = Result<LockStatus, StoreError>> + Send;

    /// Releases a lease of all holders by force.
    fn force_release(&self, lock: &LockKey) -> impl Future<Output = Result<ForceReleased, StoreError>> + Send;

    /// The held leases of all keys of the locks that are called `name`. Scans about `max` stored entries, and returns the held ones among them and the next
    /// cursor.
    fn list(&self, name: &Key, from: Cursor, max: usize) -> impl Future<Output = Result<LockPage, StoreError>> + Send;
}

/// The parameters of an acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// The caller's token.
    pub token: Token,
    /// Length of the lease, from [`Claim::MIN_TTL`] to [`Claim::MAX_TTL`].
    pub ttl: Duration,
    /// Number of fences to reserve for the holder, at least 1.
    pub fences: u32,
    /// The kind of the lock.
    pub kind: LockKind,
    /// Maximum number of holders, this one included, up to [`Claim::MAX_PERMITS`]: of a semaphore, or of readers. 1 for all
    /// others.
    pub permits: u32,
    /// Whether the lease is shared, as by the readers of [`LockKind::ReadWrite`]. Shared and exclusive leases are never held together. All
    /// claims of [`LockKind::ReadWrite`] respect the queue, also with [`Queueing::Bypass`].
    pub is_shared: bool,
    /// Granted fences are larger than this number. Defaults to 0; values above [`Claim::MAX_FLOOR`] are cut to it.
    pub floor: u64,
    /// Whether this claim respects the queue, and whether it enters the queue.
    pub queueing: Queueing,
    /// The replication that a grant requires.
    pub replicas: Replicas,
}

/// How many replicas of a server must have a lease before it counts, and how long to wait for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replicas {
    /// Number of replicas. Defaults to none.
    pub count: u32,
    /// How long to wait for them.
    pub within: Duration,
}

impl Replicas {
    /// The longest duration of a call that waits for replicas, where other calls take `deadline`. Redis checks WAIT timeouts ten
    /// times a second, and its reply must still arrive.
    pub(super) const fn call_timeout(self, deadline: Duration) -> Duration {
        if self.count == 0 { deadline } else { deadline.saturating_add(Duration::from_millis(100)) }
    }
}

/// The order of the claims for one lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Queueing {
    /// The first claim after the lease is free gets it, whoever waits in the queue.
    #[default]
    Bypass,
    /// Queued waiters first. This claim does not enter the queue.
    Yield,
    /// Earlier waiters first. If the lease is not free, this claim enters the queue. It stays until it is granted or
    /// [released](LockStore::release), or does not call again for [`Claim::POSITION_TTL`].
    Enqueue,
}

impl Claim {
    /// A claim for one holder that ignores the queue.
    #[must_use]
    pub const fn new(token: Token, ttl: Duration) -> Self {
        Self {
            token,
            ttl,
            fences: 1,
            kind: LockKind::Exclusive,
            permits: 1,
            is_shared: false,
            floor: 0,
            queueing: Queueing::Bypass,
            replicas: Replicas { count: 0, within: Duration::ZERO },
        }
    }

    /// The [floor](Self::floor), within its bound.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.floor.min(Self::MAX_FLOOR)
    }

    /// How long a position is kept without a call of its waiter. A dead waiter blocks the queue for this long.
    pub const POSITION_TTL: Duration = Duration::from_secs(3);
    /// Maximum number of leases in one call.
    pub const MAX_BATCH: usize = 128;
    /// Maximum number of queued waiters for one lease, of all processes together.
    pub const MAX_QUEUE: u32 = 10_000;
    /// The shortest lease.
    pub const MIN_TTL: Duration = Duration::from_millis(10);
    /// The longest lease. To hold a lock for longer, renew a short lease: it ends soon after its holder dies.
    pub const MAX_TTL: Duration = Duration::from_secs(86_400);
    /// Maximum number of holders.
    pub const MAX_PERMITS: u32 = 1_000;
    /// The largest [floor](Self::floor). Fences that are granted above it still stay below 2^53.
    pub const MAX_FLOOR: u64 = (1 << 53) - (1 << 40);
}

/// The answer to an acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acquired {
    /// The token holds the lease.
    Granted {
        /// The first of the holder's fences. All of them are larger than every earlier one.
        fence: u64,
    },
    /// Others hold the lease, or waiters precede this claim, which does not enter the queue.
    Busy {
        /// Until the first of their leases ends, unless it is renewed.
        remaining: Duration,
    },
    /// A lock of another kind holds the key. The token holds nothing; a queued one keeps its position.
    OtherKind {
        /// The kind that holds it.
        held: LockKind,
    },
    /// Others hold the lease or precede this claim: the token is queued.
    Queued {
        /// Whether it is the first in the queue.
        is_first: bool,
        /// Until the first of the held leases ends, unless it is renewed. Zero if none is held.
        remaining: Duration,
    },
    /// Fewer replicas have the lease than required. The token may hold it: release it, or call again.
    NotReplicated {
        /// Number of replicas that have it.
        replicas: u32,
    },
    /// The queue is full.
    QueueFull {
        /// Until the first of the held leases ends, unless it is renewed. Zero if none is held.
        remaining: Duration,
    },
}

/// A lease to renew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Renewal {
    /// The lock.
    pub lock: LockKey,
    /// The token of the holder.
    pub token: Token,
    /// How long it lasts from now on.
    pub ttl: Duration,
    /// The required replication. If fewer replicas have the renewal, the whole call fails with an
    /// [unavailable](StoreError::is_unavailable) error.
    pub replicas: Replicas,
}

impl Renewal {
    /// A renewal without replication.
    #[must_use]
    pub const fn new(lock: LockKey, token: Token, ttl: Duration) -> Self {
        Self { lock, token, ttl, replicas: Replicas { count: 0, within: Duration::ZERO } }
    }
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// Whether the token still held the lease.
    pub was_held: bool,
    /// Whether other processes wait for the lease, as far as is known. The memory backend has no others, so it reports its own waiters.
    pub is_wanted: bool,
}

impl Released {
    /// For stores: whether the token still held the lease. No waiter, as far as is known.
    #[must_use]
    pub const fn new(was_held: bool) -> Self {
        Self { was_held, is_wanted: false }
    }
}
