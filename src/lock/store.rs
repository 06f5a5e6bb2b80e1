use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::time::sleep;

use super::kind::LockKind;
use super::lock_key::LockKey;
use crate::error::{ConfigError, StoreError};

/// What locks need of a backend: leases that are taken, renewed and given back, each in one atomic step.
///
/// Each acquisition has a [`Token`] of its own, and everything may be asked again with it: a reply that was lost is asked for
/// once more, and nothing is held twice or given back for somebody else. The backend keeps the time.
///
/// Every backend passes the same contract tests, which `tollgate::testing` (feature `testing`) has for others.
///
/// # Cancellation
///
/// Dropping a returned future may or may not have done what was asked.
pub trait LockStore {
    /// Takes a lease for [`Claim::ttl`] from now on, if fewer than [`Claim::permits`] others hold one in the same way, and if
    /// nobody comes before this one: see [`Line`]. While a lock of another [kind](Claim::kind) is held, the answer is
    /// [`Acquired::OtherKind`].
    ///
    /// Where the token holds it already, it lasts its whole time again and the answer is the one that was given before, but for the
    /// fence of a quorum.
    fn acquire(&self, lock: &LockKey, claim: &Claim) -> impl Future<Output = Result<Acquired, StoreError>> + Send;

    /// Takes the leases of several locks, each as [`acquire`](Self::acquire) does, or none of them: either all of the answers are
    /// [`Acquired::Granted`], or each says how long the lock is held by others, not at all if it is free. Asked of up to
    /// [`Claim::MAX_TOGETHER`] locks with the same [`shard`](Self::shard), for one holder each, all with the same times, and without
    /// a line.
    fn acquire_all(
        &self,
        wanted: &[(LockKey, Claim)],
    ) -> impl Future<Output = Result<Vec<Acquired>, StoreError>> + Send;

    /// Lets leases last their whole time from now on, each if its token still holds it. Answers so for each, in order. A lease
    /// that has ended does not come back.
    fn renew(&self, renewals: &[Renewal]) -> impl Future<Output = Result<Vec<bool>, StoreError>> + Send;

    /// What has the same number here is taken and renewed together; the rest in calls of their own, so that what fails for some leases does
    /// not fail for all. The same for all locks unless a store says otherwise.
    fn shard(&self, lock: &LockKey) -> u32 {
        let _ = lock;
        0
    }

    /// Gives a lease back if `token` holds it, or takes the token out of the line, and wakes those who [watch](Self::watch)
    /// for that: all of them, or who is first in the line.
    fn release(&self, lock: &LockKey, token: &Token) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Wake-ups for somebody who waits for the lease: whenever it is given back and nobody stands in line for it, or for the token of somebody
    /// who does, when it may be their turn. The future is ready once no release can be missed any more: the caller tries again then, and
    /// after each wake-up. A store that cannot tell answers [`Notifications::none`].
    fn watch(&self, lock: &LockKey, in_line: Option<&Token>) -> impl Future<Output = Notifications> + Send;

    /// Notes what a holder is called, for those who look at the lock. Unless a store has a place for that this is nothing.
    fn name(&self, lock: &LockKey, token: &Token, name: &str) -> impl Future<Output = Result<(), StoreError>> + Send {
        let _ = (lock, token, name);
        std::future::ready(Ok(()))
    }

    /// Asks those who hold the lease to give it back, as far as they [listen](Self::watch_asks) to that. None of them has to. Unless a store has a
    /// way to reach them this is nothing.
    fn ask_holders(&self, lock: &LockKey) -> impl Future<Output = Result<(), StoreError>> + Send {
        let _ = lock;
        std::future::ready(Ok(()))
    }

    /// Wake-ups for a holder, whenever the lease is [asked for](Self::ask_holders). Ready once none can be missed any more.
    fn watch_asks(&self, lock: &LockKey) -> impl Future<Output = Notifications> + Send {
        let _ = lock;
        std::future::ready(Notifications::none())
    }

    /// Among whom the leases exclude each other.
    fn scope(&self) -> Reach;
}

/// Who holds a lease: 16 random bytes, others for each acquisition.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Token([u8; 16]);

impl Token {
    /// A token that nobody else has.
    ///
    /// # Errors
    ///
    /// If the system has no random numbers to give.
    pub fn random() -> Result<Self, StoreError> {
        POOL.with_borrow_mut(Pool::take)
    }

    /// The token that a store has kept. `None` if that is not 16 bytes long.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().map(Self).ok()
    }

    /// The token as a store keeps it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

thread_local! {
    static POOL: RefCell<Pool> = const { RefCell::new(Pool { tokens: [[0; 16]; Pool::SIZE], left: 0 }) };
}

/// Random numbers for some tokens: the system is not asked for each of them.
struct Pool {
    tokens: [[u8; 16]; Pool::SIZE],
    left: usize,
}

impl Pool {
    const SIZE: usize = 32;

    fn take(&mut self) -> Result<Token, StoreError> {
        if self.left == 0 {
            getrandom::fill(self.tokens.as_flattened_mut()).map_err(StoreError::other)?;
            self.left = Self::SIZE;
        }
        self.left -= 1;
        // It is nowhere but with whoever asked from now on.
        Ok(Token(std::mem::take(&mut self.tokens[self.left])))
    }
}

impl Hash for Token {
    // Random as it is.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [first, _] = self.0.as_chunks().0 else { return };
        state.write_u64(u64::from_le_bytes(*first));
    }
}

impl fmt::Debug for Token {
    // Whoever knows a token can give its lease back, so a log does not tell all of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "Token({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

/// What an acquisition asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// Who asks.
    pub token: Token,
    /// How long the lease is to last, from [`Claim::MIN_TTL`] to [`Claim::MAX_TTL`].
    pub ttl: Duration,
    /// How many fencing tokens to set aside for the holder, at least 1.
    pub fences: u32,
    /// As what kind of lock the key is to be held.
    pub kind: LockKind,
    /// How many may hold a lease at the same time, this one included, up to [`Claim::MAX_PERMITS`]: of a semaphore, or of readers. 1
    /// for all others.
    pub permits: u32,
    /// Whether it is shared, as by the readers of [`LockKind::ReadWrite`]: those who share never hold a lease together with others. They always
    /// respect the line.
    pub is_shared: bool,
    /// What all fences that are granted are to be larger than. Defaults to 0; more than [`Claim::MAX_FLOOR`] is that.
    pub floor: u64,
    /// Who comes first.
    pub line: Line,
    /// Who else has to know of the lease for it to be granted.
    pub replicas: Replicas,
}

/// How many replicas of a server have to have a lease before it counts, and how long they are waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replicas {
    /// How many. Defaults to none.
    pub count: u32,
    /// How long they are waited for.
    pub within: Duration,
}

impl Replicas {
    /// How long a call that waits for them may take, where others may take `deadline`: Redis looks ten times a second whether their time is
    /// over, and the answer is to come all the same.
    pub(super) const fn limit(self, deadline: Duration) -> Duration {
        if self.count == 0 { deadline } else { deadline.saturating_add(Duration::from_millis(100)) }
    }
}

/// Who comes first of those who want the same lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Line {
    /// Whoever asks when it is free.
    #[default]
    Ignore,
    /// Those who stand in line. This one goes away again if somebody does.
    Respect,
    /// Those who have stood in line for longer. This one stands there as well, if the lease cannot be had now, until it is granted or
    /// [given back](LockStore::release), or was not asked for again for [`Claim::PLACE`].
    Join,
}

impl Claim {
    /// A lease for one holder, whoever asks when it is free.
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
            line: Line::Ignore,
            replicas: Replicas { count: 0, within: Duration::ZERO },
        }
    }

    /// The [floor](Self::floor), within its bound.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.floor.min(Self::MAX_FLOOR)
    }

    /// How long a place in the line is kept for somebody who does not ask again: who has died holds the others up for that long.
    pub const PLACE: Duration = Duration::from_secs(3);
    /// How many leases are taken at once.
    pub const MAX_TOGETHER: usize = 128;
    /// How many may stand in the line for one lease, in all processes together.
    pub const MAX_LINE: u32 = 10_000;
    /// The shortest lease there is.
    pub const MIN_TTL: Duration = Duration::from_millis(10);
    /// The longest lease there is. What is to be held for longer is renewed, and free soon after its holder has died.
    pub const MAX_TTL: Duration = Duration::from_secs(86_400);
    /// The most that may hold a lease at the same time.
    pub const MAX_PERMITS: u32 = 1_000;
    /// The largest [floor](Self::floor). Fences that are granted above it still stay below 2^53.
    pub const MAX_FLOOR: u64 = (1 << 53) - (1 << 40);
}

/// What came of an acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acquired {
    /// The lease belongs to the token now.
    Granted {
        /// The first of the fencing tokens that are the holder's. All of them are larger than any that was given out before.
        fence: u64,
    },
    /// Others hold it.
    Busy {
        /// Until the first of their leases ends, unless it is renewed.
        remaining: Duration,
    },
    /// A lock of another kind is held under this key. The token holds nothing; if it stood in line it still does.
    OtherKind {
        /// Which kind.
        held: LockKind,
    },
    /// Others hold it, or come first: the token stands in line.
    InLine {
        /// Whether nobody stands in front of it.
        is_first: bool,
        /// Until the first of the leases that are held ends, unless it is renewed. Zero if none is.
        remaining: Duration,
    },
    /// Fewer replicas know of the lease than were asked for. The token may hold it: it is to be given back, or asked for again.
    NotReplicated {
        /// How many do.
        replicas: u32,
    },
    /// So many stand in line that there is no place.
    LineFull {
        /// Until the first of the leases that are held ends, unless it is renewed. Zero if none is.
        remaining: Duration,
    },
}

/// A lease to renew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Renewal {
    /// Which lock.
    pub lock: LockKey,
    /// Who holds it.
    pub token: Token,
    /// How long it is to last from now on.
    pub ttl: Duration,
    /// Who else has to know of that: if fewer do, the call fails with an error that is
    /// [unavailable](StoreError::is_unavailable), for all leases that it is about.
    pub replicas: Replicas,
}

impl Renewal {
    /// A renewal that no replica has to know of.
    #[must_use]
    pub const fn new(lock: LockKey, token: Token, ttl: Duration) -> Self {
        Self { lock, token, ttl, replicas: Replicas { count: 0, within: Duration::ZERO } }
    }
}

/// What came of giving a lease back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// Whether the token still held it.
    pub was_held: bool,
    /// Whether others, who do not share this backend value, were waiting for it, as far as is known.
    pub is_wanted: bool,
}

impl Released {
    /// For stores: whether the token still held it. Nobody was waiting, as far as is known.
    #[must_use]
    pub const fn new(was_held: bool) -> Self {
        Self { was_held, is_wanted: false }
    }
}

/// Among whom leases exclude each other, quotas are counted together, operations run once and queues are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reach {
    /// Only within this process.
    Process,
    /// All processes that use the same Redis primary.
    Redis,
    /// All processes that use the same independent stores, of which more than half agree: see [`Redlock`](super::Redlock).
    Quorum,
}

impl Reach {
    /// An error if this is less than what is `needed`.
    pub(crate) fn require(self, needed: Self) -> Result<(), ConfigError> {
        if self < needed { Err(ConfigError::ScopeTooSmall { needed, has: self }) } else { Ok(()) }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "one process",
            Self::Redis => "all processes on one Redis",
            Self::Quorum => "all processes on the same stores",
        })
    }
}

/// Tells somebody who waits when to look again: see [`LockStore::watch`].
pub struct Notifications {
    changes: SmallVec<[watch::Receiver<()>; 1]>,
    // What ends the subscriptions when it is dropped. After the receivers, so that they are not counted any more.
    keep: SmallVec<[Arc<dyn Any + Send + Sync>; 1]>,
}

/// How long somebody who is told by one of several waits for what the others have to say, at the most.
const LONGEST_LULL_US: u32 = 4_000;

impl Notifications {
    /// A wake-up for each time that something is sent. `keep` is dropped with the last of them.
    #[must_use]
    pub fn new(changes: watch::Receiver<()>, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { changes: smallvec![changes], keep: smallvec![keep] }
    }

    /// No wake-ups: whoever waits has to look now and then.
    #[must_use]
    pub const fn none() -> Self {
        Self { changes: SmallVec::new_const(), keep: SmallVec::new_const() }
    }

    /// All wake-ups of several: those that come shortly after each other are one, and somebody else's come at another moment.
    #[must_use]
    pub fn any(several: impl IntoIterator<Item = Self>) -> Self {
        let mut all = Self::none();
        for Self { changes, keep } in several {
            all.changes.extend(changes);
            all.keep.extend(keep);
        }
        all
    }

    /// Waits until there is a reason to look again that came up since the last time.
    pub async fn next(&mut self) {
        loop {
            let gone = match &mut *self.changes {
                [] => std::future::pending().await,
                [one] => match one.changed().await {
                    Ok(()) => return,
                    Err(_) => 0,
                },
                several => {
                    let mut changes: Vec<_> = several.iter_mut().map(|changes| Box::pin(changes.changed())).collect();
                    let (at, is_told) = poll_fn(|cx| {
                        let polls = changes.iter_mut().map(|changed| changed.as_mut().poll(cx));
                        let told = polls.enumerate().find_map(|(at, poll)| match poll {
                            Poll::Ready(outcome) => Some((at, outcome.is_ok())),
                            Poll::Pending => None,
                        });
                        told.map_or(Poll::Pending, Poll::Ready)
                    })
                    .await;
                    if is_told {
                        break;
                    }
                    at
                }
            };
            // It has nothing to say any more.
            self.changes.remove(gone);
        }
        let share = getrandom::u32().unwrap_or_default();
        sleep(Duration::from_micros(u64::from(share % LONGEST_LULL_US))).await;
        self.changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
    }
}

impl fmt::Debug for Notifications {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifications").field("is_told", &!self.changes.is_empty()).finish()
    }
}
