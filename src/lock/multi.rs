use std::fmt;
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use super::acquire::acquire_all;
use super::context::Held;
use super::erased::Call;
use super::error::{Busy, Closed, LockError, Lost};
use super::gate::Place;
use super::grant::after;
use super::lease::{Lease, ReleaseOutcome};
use super::lock_key::LockKey;
use super::locks::{Locks, Terms, unless_lost};
use super::locks_state::Shared;
use super::metrics::Outcome;
use super::pickup::{Acquire, Request};
use super::run_error::{RunError, ended};
use super::store::Claim;
use super::together::together;
use crate::error::StoreError;
use crate::key::Key;

impl Locks {
    /// Takes the locks of all keys, or none of them.
    ///
    /// Up to 128 keys on one server are taken in one step, in which nobody sees some of them held and others not. On a cluster that is so for
    /// keys of one slot; slots, [fair](Self::fair) locks and keys beyond that number are taken one after the other in an order that is the
    /// same everywhere, so those who want some of the same keys never wait for each other in a circle; when one cannot be had in
    /// time, those before it are given back. If one of those is lost meanwhile, as when it was held for [as long as it may be](Self::max_hold),
    /// all are given back at once, and the error is [`LockError::Busy`].
    ///
    /// Nothing is held while it waits for keys that are taken in one step, so other processes that take single ones of them all the time
    /// can keep it waiting until its time is over; with [fair](Self::fair) locks they cannot.
    ///
    /// Whoever waits for one of the keys keeps others in this process from asking for any of them. A key that is named twice
    /// counts once.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let accounts = Locks::new(MemoryBackend::new()).namespace("accounts");
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
    /// See [`LockError`]. Nothing is held then.
    pub fn lock_all<K: Into<Key>>(&self, keys: impl IntoIterator<Item = K>) -> MultiRequest {
        let mut keys: Vec<Key> = keys.into_iter().map(Into::into).collect();
        keys.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        keys.dedup();
        MultiRequest { locks: self.clone(), keys, wait: self.waits() }
    }
}

/// Several locks that are about to be taken: `.await` it, or [`run`](Self::run) something.
#[must_use = "nothing is asked for until this is awaited"]
pub struct MultiRequest {
    locks: Locks,
    keys: Vec<Key>,
    wait: Duration,
}

impl MultiRequest {
    /// How long the locks outlive a holder that has died: see [`Locks::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.locks = self.locks.ttl(ttl);
        self
    }

    /// How long to wait for all of them together: see [`Locks::wait`].
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// How long the leases are renewed at the most: see [`Locks::max_hold`]. Where they are taken one after the other, that of the first has to
    /// last until the last one is there.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.locks = self.locks.max_hold(max_hold);
        self
    }

    /// Runs `body` with the leases, and gives them back when that is done. If one of them is lost before, `body` is dropped where it
    /// stands, and the error says which one: as [`LockRequest::run`](super::LockRequest::run) does with one.
    ///
    /// ```
    /// use tollgate::{Locks, MemoryBackend};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::LockError> {
    /// let accounts = Locks::new(MemoryBackend::new()).namespace("accounts");
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
    /// See [`RunError`]. That a lock could not be given back in time is none: it is tried again in the background.
    ///
    /// # Cancellation
    ///
    /// Dropping the future drops `body` and gives the locks back.
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
        let holds: Vec<_> = leases.leases.iter().map(|lease| Arc::clone(lease.hold())).collect();
        ended(output, leases.release().await, holds.iter().map(|hold| &**hold))
    }
}

/// The locks that a caller asks for together.
struct Several {
    home: Arc<Shared>,
    locks: Vec<LockKey>,
    terms: Terms,
    wait: Duration,
    place: Place,
}

impl Several {
    fn new(MultiRequest { locks, keys, wait }: MultiRequest) -> Self {
        let (home, terms) = locks.parts();
        let mut wanted: Vec<_> = keys.into_iter().map(|key| locks.lock_key(key)).collect();
        wanted.sort_by_cached_key(|lock| home.store.shard(lock));
        Self { home: Arc::clone(home), locks: wanted, terms, wait, place: home.gate.place() }
    }
}

impl Request for Several {
    type Grant = MultiLease;

    fn home(&self) -> &Arc<Shared> {
        &self.home
    }

    fn times(&self) -> (Duration, Duration) {
        (self.wait, self.terms.ttl)
    }

    fn begin(&mut self, begun: Instant, is_back: bool) -> Call<Result<MultiLease, LockError>> {
        let (home, locks, terms) = (Arc::clone(&self.home), self.locks.clone(), self.terms);
        let (give_up, place) = (after(begun, self.wait), Place { is_back, ..self.place });
        // Before anything can fail that they count.
        if let Some(lock) = locks.first() {
            home.meters(lock);
        }
        Box::pin(async move { MultiLease::take(&home, &locks, terms, give_up, place).await })
    }

    fn since(leases: &MultiLease) -> Instant {
        leases.leases.iter().map(Lease::since).max().unwrap_or_else(Instant::now)
    }

    fn busy(&self) -> LockError {
        let busy = self.locks.iter().map(|lock| self.home.gate.busy(lock));
        let longest = busy.max_by_key(Busy::retry_after);
        // There is nothing to wait for without a lock.
        longest.map_or_else(|| Closed.into(), LockError::from)
    }

    fn count(&self, outcome: &Result<MultiLease, LockError>, begun: Instant) {
        if let Some(lock) = self.locks.first() {
            self.home.meters(lock).asked(Outcome::of(outcome), begun.elapsed());
        }
    }
}

impl MultiLease {
    async fn take(
        home: &Arc<Shared>,
        locks: &[LockKey],
        mut terms: Terms,
        give_up: Instant,
        place: Place,
    ) -> Result<Self, LockError> {
        let mut leases = Self { leases: Vec::with_capacity(locks.len()) };
        // In a line of the store each is waited for by itself.
        let most = if terms.is_fair { 1 } else { Claim::MAX_TOGETHER };
        let shards = locks.chunk_by(|one, other| home.store.shard(one) == home.store.shard(other));
        for locks in shards.flat_map(|shard| shard.chunks(most)) {
            terms.wait = give_up.saturating_duration_since(Instant::now());
            let taken = tokio::select! {
                biased;
                taken = acquire_all(home, locks, terms, place) => taken,
                lost = leases.lost() => Err(lost_before(&lost)),
            };
            match taken {
                Ok(taken) => leases.leases.extend(taken),
                Err(error) => {
                    // Whatever cannot be given back now is tried again in the background.
                    let _ = leases.release().await;
                    return Err(error);
                }
            }
        }
        leases.leases.sort_by(|one, other| one.lock().subject().as_str().cmp(other.lock().subject().as_str()));
        // The first ones may have been lost while the last ones were waited for.
        leases.check().map_err(|lost| lost_before(&lost))?;
        Ok(leases)
    }
}

/// What it is that a lock was lost before all were there: nothing was done under it that could be half done.
fn lost_before(lost: &Lost) -> LockError {
    Busy::new(*lost.lock(), Duration::ZERO).into()
}

impl IntoFuture for MultiRequest {
    type Output = Result<MultiLease, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(Acquire::new(Several::new(self)))
    }
}

impl fmt::Debug for MultiRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiRequest").field("keys", &self.keys).finish_non_exhaustive()
    }
}

/// Several locks that are held together: see [`Locks::lock_all`]. Dropping it gives all of them back.
#[derive(Debug)]
#[must_use = "the locks are given back when this is dropped"]
pub struct MultiLease {
    leases: Vec<Lease>,
}

impl MultiLease {
    pub(super) const fn of(leases: Vec<Lease>) -> Self {
        Self { leases }
    }

    /// The leases, each with its own [fence](Lease::fence), ordered by key.
    pub fn leases(&self) -> &[Lease] {
        &self.leases
    }

    /// Whether all locks are still ours: see [`Lease::check`].
    ///
    /// # Errors
    ///
    /// Says which one was lost, and how.
    pub fn check(&self) -> Result<(), Lost> {
        self.leases.iter().try_for_each(Lease::check)
    }

    /// For how long all locks are ours, should no renewal succeed any more. Of no locks, for ever.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.leases.iter().map(Lease::remaining).min().unwrap_or(Duration::MAX)
    }

    /// Waits until one of them is lost.
    pub async fn lost(&self) -> Lost {
        let mut losses: Vec<_> = self.leases.iter().map(|lease| Box::pin(lease.lost())).collect();
        poll_fn(|cx| {
            let mut lost = losses.iter_mut().map(|loss| loss.as_mut().poll(cx));
            lost.find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Another handle of each of them: see [`Lease::reenter`].
    pub fn reenter(&self) -> Self {
        Self { leases: self.leases.iter().map(Lease::reenter).collect() }
    }

    /// Gives all of them back, and says what became of the one that fared worst.
    ///
    /// # Errors
    ///
    /// The first error of the store there was, if any. All are given back in any case, or tried again in the background.
    pub async fn release(mut self) -> Result<ReleaseOutcome, StoreError> {
        let outcomes = together(self.leases.drain(..).map(Lease::release)).await;
        outcomes.into_iter().try_fold(ReleaseOutcome::Released, |worst, outcome| Ok(worst.max(outcome?)))
    }
}
