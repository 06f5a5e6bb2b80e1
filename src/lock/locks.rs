use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use super::acquire;
use super::context::Held;
use super::error::{LockError, Lost};
use super::kind::LockKind;
use super::lease::Lease;
use super::lock_key::LockKey;
use super::locks_state::Shared;
use super::run_error::{RunError, ended};
use super::store::{LockStore, Reach, Replicas};
use crate::error::ConfigError;
use crate::key::Key;
use crate::store::circuit::CircuitBreaker;

/// Locks by key, for one piece of work at a time.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Locks, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
/// let locks = Locks::new(MemoryBackend::new()).namespace("orders").ttl(Duration::from_secs(10));
///
/// let lease = locks.lock("42").wait(Duration::from_secs(2)).await?;
/// assert!(locks.try_lock("42").await.is_err_and(|error| error.is_busy()));
/// assert!(locks.try_lock("43").await.is_ok());
///
/// let fence = lease.fence(); // for what is being changed, to refuse a smaller one
/// lease.release().await?; // or drop it
/// assert!(locks.try_lock("42").await?.fence() > fence);
/// # Ok(())
/// # }
/// ```
///
/// Make one for a purpose and clone it: clones have their settings apart, and everything else in common. Those who wait in
/// one process stand in one line then, and only the first of them asks the store.
///
/// # Cancellation
///
/// Any future may be dropped at any time. A lease that the store grants afterwards is given back in the background, and who
/// stands in line behind comes forward. [`shutdown`](Self::shutdown) waits for that. A future that is kept without being polled loses
/// a lease that it does not pick up within 250 ms: see [waiting](crate::lock#waiting).
#[derive(Clone)]
pub struct Locks {
    shared: Arc<Shared>,
    namespace: Key,
    terms: Terms,
}

/// The longest name of a holder, in bytes.
const MAX_NAME: usize = 128;

/// How a lock is taken and held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) ttl: Duration,
    pub(super) wait: Duration,
    pub(super) max_hold: Option<Duration>,
    pub(super) max_waiters: usize,
    pub(super) max_asking: usize,
    pub(super) deadline: Duration,
    pub(super) kind: LockKind,
    pub(super) permits: u32,
    pub(super) is_fair: bool,
    pub(super) is_shared: bool,
    pub(super) asks: bool,
    /// Whether nobody waits while the circuit to the store is open.
    pub(super) heeds_circuit: bool,
    pub(super) replication: Replication,
}

impl Terms {
    /// What a claim asks of replicas.
    pub(super) fn replicas(&self) -> Replicas {
        match self.replication {
            Replication::Primary => Replicas::default(),
            Replication::Require(count) => Replicas { count, within: self.deadline / 2 },
        }
    }

    /// How long an attempt to take the lock may last.
    pub(super) fn limit(&self) -> Duration {
        self.replicas().limit(self.deadline)
    }

    /// The same if it waits for replicas, and otherwise zero.
    pub(super) fn replicas_limit(&self) -> Duration {
        if self.replication.count() == 0 { Duration::ZERO } else { self.limit() }
    }
}

/// Who has to know of a lease before it is relied on. Defaults to [`Primary`](Self::Primary).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Replication {
    /// The server that it is asked of. A failover forgets what its replicas do not know yet.
    #[default]
    Primary,
    /// So many replicas of that server as well: see [`Locks::replication`].
    Require(u32),
}

impl Replication {
    pub(super) const fn count(self) -> u32 {
        match self {
            Self::Primary => 0,
            Self::Require(count) => count,
        }
    }
}

impl Locks {
    /// Locks that `store` keeps, which is a backend: see [`backend`](crate::backend).
    pub fn new(store: impl LockStore + Send + Sync + 'static) -> Self {
        Self::with(Shared::new(Arc::new(store), false), "default", LockKind::Exclusive, 1)
    }

    /// Locks of which `permits` may be held at the same time.
    pub(super) fn with(shared: Shared, namespace: &str, kind: LockKind, permits: u32) -> Self {
        let terms = Terms {
            ttl: Duration::from_secs(30),
            wait: Duration::from_secs(10),
            max_hold: None,
            max_waiters: 1_000,
            max_asking: 100_000,
            deadline: Duration::from_millis(100),
            kind,
            permits,
            is_fair: false,
            is_shared: false,
            asks: false,
            heeds_circuit: false,
            replication: Replication::Primary,
        };
        Self { shared: Arc::new(shared), namespace: Key::new(namespace), terms }
    }

    /// What keeps these locks apart from others with the same keys. Defaults to `default`.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<Key>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// What the log calls them.
    pub(super) fn called(&self) -> &str {
        self.namespace.as_str()
    }

    /// How long the lock outlives a holder that has died. Defaults to 30 s. A living holder renews it after a third of that.
    ///
    /// From 10 ms to a day; anything else is a [`LockError::Config`] when a lock is asked for. A short one is lost when the
    /// store, the network or the process stands still for that long.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.terms.ttl = ttl;
        self
    }

    /// How long [`lock`](Self::lock) waits for a lock that somebody else holds, and for the store's last answer after that. Defaults to
    /// 10 s; with zero it waits for nothing but that answer.
    ///
    /// A lease that comes before the wait is over has to be picked up before that: a caller that is polled only later gets
    /// [`LockError::Busy`].
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.terms.wait = wait;
        self
    }

    /// How long a lease is renewed at the most; it is [lost](super::LossReason::MaxHold) then. A holder that does not give it back then has a hundredth of
    /// its [ttl](Self::ttl) left, and 2 ms, before that is done in its place. Defaults to no limit: a
    /// holder that hangs keeps the lock for as long as its process lives. Zero is a [`LockError::Config`] when a lock is asked for.
    #[must_use]
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.terms.max_hold = Some(max_hold);
        self
    }

    /// How many may stand in line for one lock in this process, behind the one that has it or asks the store for it. Defaults to 1,000. One more
    /// is a [`LockError::QueueFull`]. With zero one may still wait, if it is another process that has the lock, or while it is being given back. In
    /// fair locks and read/write locks, where all who wait ask the store, one more may than is said here, whoever has the lock.
    #[must_use]
    pub fn max_waiters(mut self, waiters: usize) -> Self {
        self.terms.max_waiters = waiters;
        self
    }

    /// First come, first served among all processes, and not only within this one: see [waiting](super#waiting) for how, and for
    /// what that costs. Defaults to whoever asks first when the lock is free.
    ///
    /// All who want the same locks have to do the same: who is not fair passes those who are.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let tickets = Locks::new(MemoryBackend::new()).namespace("tickets").fair();
    /// let lease = tickets.lock("front row").await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn fair(mut self) -> Self {
        self.terms.is_fair = true;
        self
    }

    /// Asks whoever holds a lock to give it back, for as long as somebody waits for it. Defaults to waiting for it in silence.
    ///
    /// The holder is told by [`Lease::asked`], if it listens, and does as it likes: nothing is taken away. For work that is worth less than what
    /// comes after it, as an upload whose client has long since connected again. Of those who wait in one process the first one asks ([each](Self::fair) where
    /// locks are fair), and asks again once a second, since a message may be lost. Costs a command each time, which nobody waits for.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let backend = MemoryBackend::new();
    /// let uploads = Locks::new(backend.clone()).request_release();
    ///
    /// let lease = uploads.lock("film.mkv").await?;
    /// let holder = tokio::spawn(async move {
    ///     lease.asked().await; // beside the work, in a `select!`
    ///     lease.release().await
    /// });
    /// # tokio::task::yield_now().await;
    /// let next = uploads.lock("film.mkv").wait(Duration::from_secs(5)).await?;
    /// # drop((holder, next));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn request_release(mut self) -> Self {
        self.terms.asks = true;
        self
    }

    /// How many may be waiting for locks in this process, of whatever keys and over all clones, those included who ask for theirs at the moment and are
    /// ready to wait. Defaults to 100,000. One more is a [`LockError::QueueFull`].
    #[must_use]
    pub fn max_waiters_in_total(mut self, waiters: usize) -> Self {
        self.terms.max_asking = waiters;
        self
    }

    /// When to stop asking a store that fails for locks, and how soon to try again. Defaults to [`CircuitBreaker::new`]. Leases are renewed and given
    /// back all the same.
    ///
    /// For all clones: what was said last before the first lock is asked for counts. What comes later is a warning in the log.
    #[must_use]
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.shared.set_circuit(breaker);
        self
    }

    /// What the holders of these locks are called in what [`LockAdmin`](super::LockAdmin) tells: the service, the process, the machine. Defaults to no name. At most
    /// 128 bytes; what is longer is cut off. Costs a command more, which nobody waits for, for each lease that the store grants.
    ///
    /// For all clones: what was said last counts, for the leases that are granted after that.
    #[must_use]
    pub fn holder(self, name: impl AsRef<str>) -> Self {
        let name = name.as_ref();
        let end = (0..=MAX_NAME.min(name.len())).rfind(|end| name.is_char_boundary(*end)).unwrap_or_default();
        self.shared.set_holder(name[..end].into());
        self
    }

    /// How long one call of the store may take. Defaults to 100 ms; zero is a [`LockError::Config`] when a lock is asked for. Who waits tries
    /// again after that. One that waits for [replicas](Self::replication) may take 100 ms more, and whoever asks for the same lock meanwhile waits for
    /// what that one is told.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.terms.deadline = deadline;
        self
    }

    /// Who has to know of a lease before it is relied on, when it is granted and whenever it is renewed. Defaults to
    /// [`Replication::Primary`].
    ///
    /// With `Require(n)` a lease counts once `n` replicas have it (`WAIT`), for which they have half of the
    /// [deadline](Self::deadline), or of the response timeout of the connections if that is shorter: Redis says up to a tenth
    /// of a second later that it is over, so the call may take as much longer. Those who ask at the same time share the wait; if all connections
    /// are waiting for as long as that, nothing is asked for, and no replica knows of it; or the store fails, where the server says nothing on
    /// any of them. With too few, it is tried again for as long as the caller is ready to wait, and is a [`LockError::NotReplicated`] then; what
    /// was granted is given back. A renewal that they do not have in time
    /// makes the lease [suspended](super::LeaseState::Suspended), and it is lost at its old deadline unless a later one gets through: a
    /// replica that takes over does not let go of a lease before its holder does, unless its clock is ahead of that of the primary: by as much
    /// the lease ends sooner there.
    ///
    /// This makes the gap of a failover smaller and does not close it: WAIT is no consensus, and a replica that does not have the
    /// lease may be the one that takes over. Require as many as Sentinel or the cluster could choose from, less those that may be down, and set
    /// `min-replicas-to-write`, so that a primary which is cut off refuses. What has to be right in any case takes the [fence](Lease::fence).
    ///
    /// A store without replicas has none of them, so nothing is granted there.
    #[must_use]
    pub fn replication(mut self, replication: Replication) -> Self {
        self.terms.replication = replication;
        self
    }

    /// Takes the lock of `key`, and waits for it if somebody else holds it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Locks, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// # let locks = Locks::new(MemoryBackend::new());
    /// let lease = locks.lock("order:42").ttl(Duration::from_secs(5)).wait(Duration::from_secs(2)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`LockError`]. Nothing is held then, or what is held all the same is given back in the background; while that is under way for 1,024
    /// others already, it expires by itself.
    pub fn lock(&self, key: impl Into<Key>) -> LockRequest {
        let lock = LockKey::new(self.namespace, key);
        LockRequest { shared: Arc::clone(&self.shared), lock, terms: self.terms }
    }

    /// Takes the lock of `key`, or says at once that somebody else holds it.
    ///
    /// # Errors
    ///
    /// See [`LockError`].
    pub fn try_lock(&self, key: impl Into<Key>) -> LockRequest {
        self.lock(key).wait(Duration::ZERO)
    }

    /// Runs `body` while holding the lock of `key`, and cancels it if the lease is lost: see [`LockRequest::run`].
    ///
    /// # Errors
    ///
    /// See [`RunError`].
    pub fn run<K, B, F, T>(
        &self,
        key: K,
        body: B,
    ) -> impl Future<Output = Result<T, RunError<T>>> + Send + use<K, B, F, T>
    where
        K: Into<Key>,
        B: FnOnce(Lease) -> F + Send,
        F: Future<Output = T> + Send,
        T: Send,
    {
        self.lock(key).run(body)
    }

    pub(super) const fn home(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn lock_key(&self, key: Key) -> LockKey {
        LockKey::new(self.namespace, key)
    }

    pub(super) const fn parts(&self) -> (&Arc<Shared>, Terms) {
        (&self.shared, self.terms)
    }

    pub(super) const fn waits(&self) -> Duration {
        self.terms.wait
    }

    /// Among whom the locks exclude each other: [`Reach::Process`] on the memory backend.
    #[must_use]
    pub fn scope(&self) -> Reach {
        self.shared.store.scope()
    }

    /// Makes sure that the locks hold as far as they are meant to, so that the memory backend is not taken for a distributed one.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend, lock::Reach};
    ///
    /// assert!(Locks::new(MemoryBackend::new()).require(Reach::Redis).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConfigError::ScopeTooSmall`] if they hold among fewer than `scope` says.
    pub fn require(self, scope: Reach) -> Result<Self, ConfigError> {
        self.scope().require(scope)?;
        Ok(self)
    }

    /// Grants nothing any more, and waits until every lease has been given back, also those that were dropped and are on their
    /// way. Whoever waits for a lock is told [`LockError::Closed`]. For all clones.
    ///
    /// Takes as long as the holders do; what cannot be given back takes until it has expired. Where the answer to an attempt to take a
    /// lock never came, what it may yet be granted is given back for five seconds more. Use `tokio::time::timeout` around it.
    pub async fn shutdown(&self) {
        self.shared.close();
        self.shared.wait_idle().await;
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("namespace", &self.namespace).field("terms", &self.terms).finish_non_exhaustive()
    }
}

/// A lock that is about to be taken: `.await` it, or [`run`](Self::run) something.
#[must_use = "nothing is asked for until this is awaited"]
pub struct LockRequest {
    shared: Arc<Shared>,
    lock: LockKey,
    terms: Terms,
}

impl LockRequest {
    pub(super) fn shared(mut self) -> Self {
        self.terms.is_shared = true;
        self
    }

    /// Does not wait while the circuit to the store is open.
    pub(super) fn heeding_circuit(mut self) -> Self {
        self.terms.heeds_circuit = true;
        self
    }

    /// How long the lock outlives a holder that has died: see [`Locks::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.terms.ttl = ttl;
        self
    }

    /// How long to wait while somebody else holds it: see [`Locks::wait`].
    pub fn wait(mut self, wait: Duration) -> Self {
        self.terms.wait = wait;
        self
    }

    /// How long the lease is renewed at the most: see [`Locks::max_hold`].
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.terms.max_hold = Some(max_hold);
        self
    }

    /// Runs `body` with the lease, and gives it back when that is done. If the lease is lost before, `body` is dropped where it
    /// stands, and the error says so.
    ///
    /// If the store turns out not to know the lease any more when it is given back, `body` has ended, and [`RunError::Unprotected`] carries what it
    /// has returned. That is found out where the store is asked, so not of a lease that goes on to the next waiter of this process.
    ///
    /// Nobody else runs under this lock at the same time, unless this process stands still or the lease is [lost](super#a-lease-and-not-a-lock)
    /// in the store, which the [fence](Lease::fence) is for. What `body` has spawned goes on by itself: [`Lease::lost`] and [`Lease::reenter`] are for that.
    /// A lock that `body` asks for though it has it is [`LockError::Nested`], if it asks these [`Locks`] or a clone: others on the same backend
    /// are others who wait, even in here, for as long as they are ready to. It cannot be seen either from a task that `body` has spawned.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let locks = Locks::new(MemoryBackend::new());
    /// let total = locks.run("order:42", async |lease| {
    ///     // update(42, lease.fence()).await
    ///     # drop(lease);
    ///     7
    /// }).await?;
    /// assert_eq!(total, 7);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`RunError`]. That the lock could not be given back in time is none: it is tried again in the background. Neither is a release
    /// of which the outcome is [uncertain](super::ReleaseOutcome::Uncertain).
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and gives the lock back.
    pub async fn run<T, F>(self, body: impl FnOnce(Lease) -> F + Send) -> Result<T, RunError<T>>
    where
        F: Future<Output = T> + Send,
        T: Send,
    {
        let lease = self.await?;
        let outcome = {
            let body = pin!(Held::with(&lease).within(body(lease.reenter())));
            unless_lost(body, lease.lost()).await
        };
        let output = outcome?;
        let hold = Arc::clone(lease.hold());
        ended(output, lease.release().await, [&*hold])
    }
}

/// Waits for the end of a body, or until what it runs under is lost.
pub(super) async fn unless_lost<T>(
    body: Pin<&mut impl Future<Output = T>>,
    lost: impl Future<Output = Lost>,
) -> Result<T, LockError> {
    tokio::select! {
        // After a standstill nothing of the body may run before this was looked at.
        biased;
        lost = lost => Err(lost.into()),
        value = body => Ok(value),
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<Lease, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        acquire::acquire(self.shared, self.lock, self.terms)
    }
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest").field("lock", &self.lock).field("terms", &self.terms).finish_non_exhaustive()
    }
}
