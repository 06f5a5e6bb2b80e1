use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::acquire::acquire_all;
use super::context::Held;
use super::erased::Call;
use super::error::{Busy, Closed, LockError, Lost};
use super::grant::after;
use super::lease::Lease;
use super::local_queues::QueueTicket;
use super::lock_key::LockKey;
use super::locks::{Locks, unless_lost};
use super::locks_state::LocksState;
use super::metrics::Outcome;
use super::options::AcquireOptions;
use super::release_outcome::ReleaseOutcome;
use super::run_error::{RunError, run_result};
use super::shared_call::{Acquire, RepeatableAcquisition};
use super::store::Claim;
use crate::error::StoreError;
use crate::key::Key;

impl Locks {
    /// Acquires the locks of all keys, or none.
    ///
    /// Up to 128 keys on one server are acquired in one atomic step; on a cluster, up to 128 keys of one slot. With
    /// [fair](Self::fair) locks, each key is a step of its own. The steps follow a global order, so callers with common keys never
    /// deadlock. If one lock is not granted in time, the earlier ones are released. If an earlier one is lost meanwhile,
    /// for instance by its [`max_hold`](Self::max_hold), all are released, and the error is [`LockError::Busy`].
    ///
    /// While the call waits for keys of one step, it holds none of the keys of this step. So other processes that keep acquiring single
    /// keys can delay it until its wait is over; with [fair](Self::fair) locks they cannot.
    ///
    /// While the call waits for one key, other callers of this process may have to wait for its other keys as well. A repeated key counts
    /// once.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let accounts = Locks::new(MemoryBackend::new(), "accounts");
    /// let both = accounts.lock_all(["alice", "bob"]).await?;
    /// assert!(accounts.try_lock("bob").await.is_err());
    /// both.check()?; // before the transfer
    /// both.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`LockError`]. No lock is held then.
    pub fn lock_all<K: Into<Key>>(&self, keys: impl IntoIterator<Item = K>) -> MultiRequest {
        let mut keys: Vec<Key> = keys.into_iter().map(Into::into).collect();
        keys.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        keys.dedup();
        MultiRequest { locks: self.clone(), keys, wait: self.default_wait() }
    }
}

/// An acquisition of several locks: `.await` it, or [`run`](Self::run) a body under the locks.
#[must_use = "nothing is asked for until this is awaited"]
pub struct MultiRequest {
    locks: Locks,
    keys: Vec<Key>,
    wait: Duration,
}

impl MultiRequest {
    /// How long the locks outlive a dead holder: see [`Locks::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.locks = self.locks.ttl(ttl);
        self
    }

    /// How long to wait for all of them together: see [`Locks::wait`].
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// How long the leases are renewed at most: see [`Locks::max_hold`]. If they are acquired one after the other, the first one
    /// must last until the last one is granted.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.locks = self.locks.max_hold(max_hold);
        self
    }

    /// Runs `body` with the leases, and releases them afterwards. If a lease is lost while `body` runs, `body` is dropped, and the
    /// error names the lost lease: see [`LockRequest::run`](super::LockRequest::run).
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let accounts = Locks::new(MemoryBackend::new(), "accounts");
    /// accounts.lock_all(["alice", "bob"]).run(async |leases| {
    ///     // transfer(leases.leases()[0].fence(), leases.leases()[1].fence()).await
    ///     # drop(leases);
    /// }).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`RunError`]. A late release is no error: it is retried in the background.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and releases the locks.
    pub async fn run<T, F>(self, body: impl FnOnce(MultiLease) -> F + Send) -> Result<T, RunError<T>>
    where
        F: Future<Output = T> + Send,
        T: Send,
    {
        let leases = self.await?;
        let outcome = {
            let body = pin!(Held::with_all(&leases.leases).within(body(leases.reenter())));
            unless_lost(body, leases.lost()).await
        };
        let output = outcome?;
        let grants: Vec<_> = leases.leases.iter().map(|lease| Arc::clone(lease.grant())).collect();
        let _ = leases.release().await;
        run_result(output, grants.iter().map(|grant| &**grant))
    }
}

/// The locks of one request.
struct AllLocks {
    shared: Arc<LocksState>,
    locks: Vec<LockKey>,
    options: AcquireOptions,
    wait: Duration,
    position: QueueTicket,
}

impl AllLocks {
    fn new(MultiRequest { locks, keys, wait }: MultiRequest) -> Self {
        let (shared, options) = locks.parts();
        let mut lock_keys: Vec<_> = keys.into_iter().map(|key| locks.lock_key(key)).collect();
        lock_keys.sort_by_cached_key(|lock| shared.store.shard(lock));
        Self { shared: Arc::clone(shared), locks: lock_keys, options, wait, position: shared.queues.new_position() }
    }
}

impl RepeatableAcquisition for AllLocks {
    type Grant = MultiLease;

    fn shared(&self) -> &Arc<LocksState> {
        &self.shared
    }

    fn wait_and_ttl(&self) -> (Duration, Duration) {
        (self.wait, self.options.ttl)
    }

    fn begin(&mut self, start: Instant, is_requeued: bool) -> Call<Result<MultiLease, LockError>> {
        let (shared, locks, options) = (Arc::clone(&self.shared), self.locks.clone(), self.options);
        let (wait_end, position) = (after(start, self.wait), QueueTicket { is_requeued, ..self.position });
        // Create the metrics before anything can fail that they count.
        shared.metrics();
        Box::pin(async move { MultiLease::take(&shared, &locks, options, wait_end, position).await })
    }

    fn granted_at(leases: &MultiLease) -> Instant {
        leases.leases.iter().map(Lease::since).max().unwrap_or_else(Instant::now)
    }

    fn busy(&self) -> LockError {
        let busy = self.locks.iter().map(|lock| self.shared.queues.busy(lock));
        let longest = busy.max_by_key(Busy::retry_after);
        // Without locks there is nothing to wait for.
        longest.map_or_else(|| Closed.into(), LockError::from)
    }

    fn count(&self, outcome: &Result<MultiLease, LockError>, start: Instant) {
        if !self.locks.is_empty() {
            self.shared.metrics().record_request(Outcome::of(outcome), start.elapsed());
        }
    }
}

impl MultiLease {
    async fn take(
        shared: &Arc<LocksState>,
        locks: &[LockKey],
        mut options: AcquireOptions,
        wait_end: Instant,
        position: QueueTicket,
    ) -> Result<Self, LockError> {
        let mut leases = Self { leases: Vec::with_capacity(locks.len()) };
        // With a queue in the store, wait for each lock by itself.
        let max_batch = if options.is_fair { 1 } else { Claim::MAX_BATCH };
        let shards = locks.chunk_by(|one, other| shared.store.shard(one) == shared.store.shard(other));
        for locks in shards.flat_map(|shard| shard.chunks(max_batch)) {
            options.wait = wait_end.saturating_duration_since(Instant::now());
            let acquired = tokio::select! {
                biased;
                acquired = acquire_all(shared, locks, options, position) => acquired,
                lost = leases.lost() => Err(lost_before(&lost)),
            };
            match acquired {
                Ok(acquired) => leases.leases.extend(acquired),
                Err(error) => {
                    // A failed release is retried in the background.
                    let _ = leases.release().await;
                    return Err(error);
                }
            }
        }
        leases.leases.sort_by(|one, other| one.lock().key().as_str().cmp(other.lock().key().as_str()));
        // An early lease may have been lost while waiting for a later one.
        leases.check().map_err(|lost| lost_before(&lost))?;
        Ok(leases)
    }
}

/// The error of a lease that is lost before all are granted: no work was done under it.
fn lost_before(lost: &Lost) -> LockError {
    Busy::new(*lost.lock(), Duration::ZERO).into()
}

impl IntoFuture for MultiRequest {
    type Output = Result<MultiLease, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(Acquire::new(AllLocks::new(self)))
    }
}

impl fmt::Debug for MultiRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiRequest").field("keys", &self.keys).finish_non_exhaustive()
    }
}

/// Several locks that are held together: see [`Locks::lock_all`]. Dropping it releases all of them.
#[derive(Debug)]
#[must_use = "the locks are given back when this is dropped"]
pub struct MultiLease {
    leases: Vec<Lease>,
}

impl MultiLease {
    /// The leases, each with its own [fence](Lease::fence), ordered by key.
    pub fn leases(&self) -> &[Lease] {
        &self.leases
    }

    /// Whether all locks are still held: see [`Lease::check`].
    ///
    /// # Errors
    ///
    /// Which one was lost, and how.
    pub fn check(&self) -> Result<(), Lost> {
        self.leases.iter().try_for_each(Lease::check)
    }

    /// How long all locks are held if no further renewal succeeds. Without locks, for ever.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.leases.iter().map(Lease::remaining).min().unwrap_or(Duration::MAX)
    }

    /// Waits until one of the leases is lost.
    pub async fn lost(&self) -> Lost {
        Lease::first_lost(&self.leases).await
    }

    /// Another handle of each lease: see [`Lease::reenter`].
    pub fn reenter(&self) -> Self {
        Self { leases: self.leases.iter().map(Lease::reenter).collect() }
    }

    /// Releases all of them, and returns the worst outcome.
    ///
    /// # Errors
    ///
    /// The first store error, if any. The other locks are released anyway. Failed releases are retried in the background.
    pub async fn release(mut self) -> Result<ReleaseOutcome, StoreError> {
        let outcomes = join_all(self.leases.drain(..).map(Lease::release)).await;
        outcomes.into_iter().try_fold(ReleaseOutcome::Released, |worst, outcome| Ok(worst.max(outcome?)))
    }
}
