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
use super::locks_state::LocksState;
use super::options::{AcquireOptions, Replication};
use super::run_error::{RunError, run_result};
use super::store::LockStore;
use crate::error::ConfigError;
use crate::key::Key;
use crate::reach::Reach;
use crate::store::circuit::CircuitBreaker;
use crate::store::deadline::DEFAULT_DEADLINE;
use crate::store::shutdown::ShutdownTarget;

/// Locks by key, for one piece of work at a time.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Locks, MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
/// let locks = Locks::new(MemoryBackend::new(), "orders").ttl(Duration::from_secs(10));
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
/// Make one `Locks` for each purpose and clone it. Each clone has its own settings, unless the setter says that it applies to all
/// clones. Clones share everything else: the waiters of one process for one lock share one queue, and only the first of them calls
/// the store.
///
/// # Cancellation
///
/// You may drop any future at any time. If the store grants the lease afterwards, it is released in the background, and the next
/// waiter moves up. [`shutdown`](Self::shutdown) waits for that. A future that is kept without polling loses a lease that it
/// does not pick up within 250 ms: see [waiting](crate::lock#waiting).
#[derive(Clone)]
pub struct Locks {
    shared: Arc<LocksState>,
    options: AcquireOptions,
}

/// Maximum length of a holder's name, in bytes.
const MAX_NAME: usize = 128;

impl Locks {
    /// Locks in `store`, which is a backend: see [`backend`](crate::backend).
    ///
    /// Equal keys under the same `name` are one lock, in all processes that share the store. Under another name they are another lock.
    pub fn new(store: impl LockStore + Send + Sync + 'static, name: impl Into<Key>) -> Self {
        Self::with(LocksState::new(Arc::new(store), name.into(), false), LockKind::Exclusive, 1)
    }

    /// Locks with `permits` holders at the same time.
    pub(super) fn with(shared: LocksState, kind: LockKind, permits: u32) -> Self {
        let options = AcquireOptions {
            ttl: Duration::from_secs(30),
            wait: Duration::from_secs(10),
            max_hold: None,
            max_waiters: 1_000,
            max_total_waiters: 100_000,
            deadline: DEFAULT_DEADLINE,
            kind,
            permits,
            is_fair: false,
            is_shared: false,
            requests_release: false,
            fails_if_circuit_opens: false,
            replication: Replication::Primary,
        };
        let shared = Arc::new(shared);
        shared.store.add_to_shutdown(&ShutdownTarget::new(&shared));
        Self { shared, options }
    }

    /// The name of these locks.
    pub(super) fn name(&self) -> &str {
        self.shared.name.as_str()
    }

    /// How long the lock outlives a dead holder. Defaults to 30 s. A live holder renews it after a third of that.
    ///
    /// From 10 ms to a day; other values are a [`LockError::Config`] when a lock is requested. A short lease is lost when the
    /// store, the network or the process stalls for that long.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = ttl;
        self
    }

    /// How long [`lock`](Self::lock) waits for a held lock. Defaults to 10 s. After that, the call still waits for the last reply of the
    /// store. With zero, the call waits only for that reply and, while this process is releasing the lock, for the end of
    /// the release.
    ///
    /// You must pick up a granted lease before the wait is over: a caller that is polled only later gets [`LockError::Busy`].
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = wait;
        self
    }

    /// How long a lease is renewed at most; then it is [lost](super::LossReason::MaxHold). The holder then has a hundredth of its
    /// [ttl](Self::ttl), plus 2 ms, to release the lease. After that, a background task releases the lease. Defaults to no limit: a hanging
    /// holder keeps the lock for as long as its process lives. Zero is a [`LockError::Config`] when a lock is requested.
    #[must_use]
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.options.max_hold = Some(max_hold);
        self
    }

    /// How many callers may wait for one lock in this process, behind the leader that has it or calls the store. Defaults to
    /// 1,000. One more is a [`LockError::QueueFull`]. With zero, one caller may still wait while another process has the lock,
    /// or while it is being released. With fair locks and read/write locks, each waiter calls the store, and `waiters + 1` callers
    /// may wait.
    #[must_use]
    pub fn max_waiters(mut self, waiters: usize) -> Self {
        self.options.max_waiters = waiters;
        self
    }

    /// First come, first served among all processes, not only within this one: see [waiting](super#waiting) for how, and for the
    /// cost. By default, the first caller after a release gets the lock.
    ///
    /// All users of the same locks must set this: unfair callers overtake fair ones.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let tickets = Locks::new(MemoryBackend::new(), "tickets").fair();
    /// let lease = tickets.lock("front row").await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn fair(mut self) -> Self {
        self.options.is_fair = true;
        self
    }

    /// Asks the holder of a lock to release it while a caller waits for it. Off by default.
    ///
    /// The holder learns it from [`Lease::release_requested`] and may ignore it. Use it for work that is worth less than its successor,
    /// such as an upload whose client has reconnected. The first waiter of each process sends the request, and repeats it once a second,
    /// because a message may be lost. With [fair](Self::fair) locks, each waiter does so. Each request costs a command in the background.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let backend = MemoryBackend::new();
    /// let uploads = Locks::new(backend.clone(), "orders").request_release();
    ///
    /// let lease = uploads.lock("film.mkv").await?;
    /// let holder = tokio::spawn(async move {
    ///     lease.release_requested().await; // beside the work, in a `select!`
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
        self.options.requests_release = true;
        self
    }

    /// How many callers may wait for locks in this process, over all keys and clones, including current callers of the store. Defaults to
    /// 100,000. One more is a [`LockError::QueueFull`].
    #[must_use]
    pub fn max_waiters_in_total(mut self, waiters: usize) -> Self {
        self.options.max_total_waiters = waiters;
        self
    }

    /// When to stop calling a failing store for new locks, and when to try again. Defaults to [`CircuitBreaker::new`]. Renewals
    /// and releases are not affected.
    ///
    /// Applies to all clones: the last setting before the first lock is requested. A later one logs a warning.
    #[must_use]
    pub fn circuit_breaker(self, breaker: CircuitBreaker) -> Self {
        self.shared.set_circuit(breaker);
        self
    }

    /// The holder's name for [`LockAdmin`](super::LockAdmin): the service, the process, the machine. Defaults to no name. At most 128
    /// bytes; longer names are cut. Costs one more command in the background for each lease that the store grants. A renewal repeats the
    /// command if the last one is five minutes old.
    ///
    /// Applies to all clones: the last setting counts for leases that are granted later.
    #[must_use]
    pub fn holder(self, name: impl AsRef<str>) -> Self {
        let name = name.as_ref();
        let end = (0..=MAX_NAME.min(name.len())).rfind(|end| name.is_char_boundary(*end)).unwrap_or_default();
        self.shared.set_holder(name[..end].into());
        self
    }

    /// The longest duration of a store call. Defaults to 100 ms; zero is a [`LockError::Config`] when a lock is requested. A
    /// waiter retries after that. A call that waits for [replicas](Self::replication) may take 100 ms more, and other callers of
    /// that lock wait for its result.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.options.deadline = deadline;
        self
    }

    /// Where a lease must be stored before it counts, at its grant and at each renewal. Defaults to [`Replication::Primary`].
    ///
    /// With `Require(n)` a lease counts once `n` replicas have it (`WAIT`). They have half of the [deadline](Self::deadline) for that, or
    /// of the response timeout of the connections if that is shorter. Redis reports the end of the wait up to 100 ms late, so the call may
    /// take 100 ms longer. Concurrent calls share the wait. If other calls block all connections for that long, the call is not sent, and
    /// counts as stored by no replica. If the server is silent on all these connections, the call fails with a store error instead.
    ///
    /// With too few replicas, the acquisition is retried until the wait is over. It then fails with [`LockError::NotReplicated`], and
    /// grants are released. A renewal that too few replicas have in time makes the lease
    /// [suspended](super::LeaseState::Suspended). It is lost at its previous end unless a later renewal succeeds. A promoted
    /// replica does not end a lease before its holder does, unless the replica's clock is ahead of the primary's. In that case, the
    /// lease ends earlier by that difference.
    ///
    /// This narrows the gap of a failover and does not close it: WAIT is no consensus, and a replica without the lease may be
    /// promoted. Require as many replicas as Sentinel or the cluster could choose from, minus replicas that may be down. Set
    /// `min-replicas-to-write`, so that an isolated primary refuses writes. Use the [fence](Lease::fence) where two holders must
    /// never overlap.
    ///
    /// A store without replicas grants nothing.
    #[must_use]
    pub fn replication(mut self, replication: Replication) -> Self {
        self.options.replication = replication;
        self
    }

    /// Acquires the lock of `key`, and waits while it is held.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Locks, MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// # let locks = Locks::new(MemoryBackend::new(), "orders");
    /// let lease = locks.lock("order:42").ttl(Duration::from_secs(5)).wait(Duration::from_secs(2)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`LockError`]. No lease is held then; a late grant is released in the background. If 1,024 such releases are pending
    /// already, the grant expires.
    pub fn lock(&self, key: impl Into<Key>) -> LockRequest {
        let lock = LockKey::new(self.shared.name, key);
        LockRequest { shared: Arc::clone(&self.shared), lock, options: self.options }
    }

    /// Acquires the lock of `key`, or returns at once that it is held.
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

    pub(super) const fn shared(&self) -> &Arc<LocksState> {
        &self.shared
    }

    pub(super) fn lock_key(&self, key: Key) -> LockKey {
        LockKey::new(self.shared.name, key)
    }

    pub(super) const fn parts(&self) -> (&Arc<LocksState>, AcquireOptions) {
        (&self.shared, self.options)
    }

    pub(super) const fn default_wait(&self) -> Duration {
        self.options.wait
    }

    /// The reach of the locks: [`Reach::Process`] on the memory backend.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.shared.store.reach()
    }

    /// Checks that the locks reach far enough, for instance that the backend is not the memory backend.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend, Reach};
    ///
    /// assert!(Locks::new(MemoryBackend::new(), "orders").require(Reach::Redis).is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConfigError::ReachTooSmall`] if they reach less far than `needed`.
    pub fn require(self, needed: Reach) -> Result<Self, ConfigError> {
        self.reach().require(needed)?;
        Ok(self)
    }

    /// Grants no more locks, and waits until every lease is released, including pending releases of dropped leases. Waiters get
    /// [`LockError::Closed`]. Applies to all clones.
    ///
    /// This takes as long as the holders do. A failed release takes until the lease has expired. After an acquisition without a
    /// reply, possible late grants are released for five more seconds. Wrap it in `tokio::time::timeout`, or use the
    /// [shutdown of the backend](crate::backend#shutdown), which has a deadline.
    pub async fn shutdown(&self) {
        self.shared.close();
        self.shared.wait_idle().await;
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("name", &self.shared.name).field("options", &self.options).finish_non_exhaustive()
    }
}

/// An acquisition: `.await` it, or [`run`](Self::run) a body under the lock.
#[must_use = "nothing is asked for until this is awaited"]
pub struct LockRequest {
    shared: Arc<LocksState>,
    lock: LockKey,
    options: AcquireOptions,
}

impl LockRequest {
    pub(super) fn shared(mut self) -> Self {
        self.options.is_shared = true;
        self
    }

    /// Do not wait while the circuit is open.
    pub(super) fn heeding_circuit(mut self) -> Self {
        self.options.fails_if_circuit_opens = true;
        self
    }

    /// How long the lock outlives a dead holder: see [`Locks::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = ttl;
        self
    }

    /// How long to wait while the lock is held: see [`Locks::wait`].
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = wait;
        self
    }

    /// How long the lease is renewed at most: see [`Locks::max_hold`].
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.options.max_hold = Some(max_hold);
        self
    }

    /// Runs `body` with the lease, and releases it afterwards. If the lease is lost while `body` runs, `body` is dropped at its
    /// current await point, and the error is a [`LockError::Lost`].
    ///
    /// If the release finds that the store no longer has the lease, [`RunError::Unprotected`] carries the output of `body`. Only
    /// a store call can find that out, so a lease that is handed off to the next waiter of this process is not checked.
    ///
    /// No other client runs under this lock at the same time, unless this process stalls or the lease is
    /// [lost](super#a-lease-and-not-a-lock) in the store: use the [fence](Lease::fence) against that. Tasks that `body` has
    /// spawned continue: see [`Lease::lost`] and [`Lease::reenter`].
    ///
    /// If `body` requests its own lock from these [`Locks`] or a clone, the result is [`LockError::Nested`]. Other `Locks` on
    /// the same backend, and tasks that `body` has spawned, are not recognized and wait for the lock.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let locks = Locks::new(MemoryBackend::new(), "orders");
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
    /// See [`RunError`]. A release that is late or [uncertain](super::ReleaseOutcome::Uncertain) is no error: it is retried in
    /// the background.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and releases the lock.
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
        let grant = Arc::clone(lease.grant());
        let _ = lease.release().await;
        run_result(output, [&*grant])
    }
}

/// Waits for the end of a body, or the loss of its lease.
pub(super) async fn unless_lost<T>(
    body: Pin<&mut impl Future<Output = T>>,
    lost: impl Future<Output = Lost>,
) -> Result<T, LockError> {
    tokio::select! {
        // After a stall, check for a loss before the body runs on.
        biased;
        lost = lost => Err(lost.into()),
        value = body => Ok(value),
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<Lease, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        acquire::acquire(self.shared, self.lock, self.options)
    }
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRequest").field("lock", &self.lock).field("options", &self.options).finish_non_exhaustive()
    }
}
