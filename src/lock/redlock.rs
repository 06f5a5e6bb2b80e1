use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::fence_floor::FenceFloor;
use super::kind::LockKind;
use super::lock_key::LockKey;
use super::store::{Acquired, Claim, LockStore, Notifications, Queueing, Released, Renewal, Token};
use crate::error::{ConfigError, StoreError};
use crate::panics::discard_joined;
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

/// Locks that need a majority of several independent stores, so that they work while a minority is down.
///
/// ```no_run
/// use tollgate::{GlobalKey, LockLayer, Locks, RedisBackend, lock::Redlock};
///
/// # #[tokio::main] async fn main() -> Result<(), tollgate::BoxError> {
/// let stores = Redlock::new([
///     RedisBackend::connect("redis://10.0.0.1").await?,
///     RedisBackend::connect("redis://10.0.0.2").await?,
///     RedisBackend::connect("redis://10.0.0.3").await?,
/// ])?;
/// let locks = Locks::new(stores.clone(), "orders");
/// let layer = LockLayer::new(stores, "payments").key(GlobalKey);
/// # drop((locks, layer));
/// # Ok(())
/// # }
/// ```
///
/// This is the algorithm that Redis calls Redlock. The client calls all stores at the same time. A lease is granted if a majority grants it
/// with time left. As for any lease, the time counts from before the first call, less 1 % and 2 ms for clocks of different speed. Without
/// such a majority, the client releases the lease on all stores. A renewal succeeds if a majority of the stores still has the lease. If the
/// result depends on stores that failed, the client retries the renewal until the lease ends. Once a majority has decided, the client waits
/// for the other stores as long again, at least 10 ms.
///
/// # Guarantees and limits
///
/// * Locks are granted, renewed and released while fewer than half of the stores are down.
/// * A key has one live lease as long as the stores keep their grants and their clocks run at about the same speed. The stores
///   must be independent: primaries without replicas that could take over. A store that restarts without its data forgets its
///   grants. So it must write each grant to disk (`appendfsync always`), or stay away for as long as the longest lease. A clock
///   that is set forward ends leases early.
/// * A [fence](super::Lease::fence) is the largest of the fences that the stores granted, each from the clock of its store. It is
///   larger than all fences that this value and its clones have granted in this process. It is larger than the previous fence of
///   another process, unless the clocks differ by more than the time between both grants. **One primary promises more.** Where
///   fences must never go backwards, use one primary, or a consensus system.
/// * A notification from any store wakes waiters. If callers try at the same time, each may get a minority of the stores. Then all of them
///   retry. There is no fair queue: [fair locks](super::Locks::fair), [`RwLocks`](super::RwLocks) and a
///   [`Semaphore`](super::Semaphore) with more than one permit are refused ([`ConfigError::NotByQuorum`]).
/// * If a store is slow to reply to a release, the release continues in the background, for up to 5 s and while a clone of this value
///   exists. If the store does not reply in that time, its grant stays until it expires. So does a late grant of a stalled store. The next
///   lease needs only a majority of the stores.
/// * A lease stays with the stores that granted it. If only two of three granted it, the lease is lost when one of the two goes down. The
///   third may have been down, or may have had an older grant.
///
/// If you call this value as a [`LockStore`], use a new token after each refusal. Stores that granted the refused claim release it,
/// possibly late, and would release a new grant with the same token. A repeated claim may get another fence, because
/// other stores may reply in time.
///
/// For locks that save work rather than protect data, one primary is simpler and just as good.
pub struct Redlock<S> {
    stores: Arc<[S]>,
    floor: Arc<FenceFloor>,
    // Releases in the background. They end with the last clone.
    rest: Arc<Mutex<JoinSet<()>>>,
}

/// The shortest time that the remaining stores get once a majority has decided.
const GRACE: Duration = Duration::from_millis(10);
/// How long a background release may take.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of background releases. Further grants expire.
const MAX_BACKGROUND_RELEASES: usize = 1_024;
/// The longest pause before a retry if no caller got the lock.
const MAX_RETRY_PAUSE_US: u32 = 15_000;

type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;
/// The reply of each store; `None` without one in time.
type Answers<T> = Vec<Option<Result<T, StoreError>>>;

/// The reply of a store to a release.
struct StoreRelease {
    released: Released,
    // Whether the store was called again after a connection broke.
    is_again: bool,
}

impl<S> Redlock<S> {
    /// A lock store over three or more independent stores. Use an odd number: four are no safer than three.
    ///
    /// # Errors
    ///
    /// [`ConfigError::TooFewStores`] for fewer than three: of two, both would have to be up.
    pub fn new(stores: impl IntoIterator<Item = S>) -> Result<Self, ConfigError> {
        let stores: Arc<[S]> = stores.into_iter().collect();
        if stores.len() < 3 {
            return Err(ConfigError::TooFewStores { stores: stores.len(), min: 3 });
        }
        Ok(Self { stores, floor: Arc::default(), rest: Arc::default() })
    }

    /// The size of a majority.
    fn quorum(&self) -> usize {
        self.stores.len() / 2 + 1
    }

    /// Calls all stores at the same time, and again after a broken connection. Waits until all have replied, or for some time
    /// after a majority has decided.
    async fn call_all<'a, T>(
        &'a self,
        call: impl Fn(&'a S) -> Call<'a, T>,
        is_enough: impl Fn(&Answers<T>) -> bool,
    ) -> Answers<T> {
        // A call may be repeated with the same token, because its effect is the same.
        let call_all = async |store| match call(store).await {
            Err(error) if error.is_unavailable() => call(store).await,
            answer => answer,
        };
        collect(&mut self.stores.iter().map(|store| Some(Box::pin(call_all(store)))).collect::<Vec<_>>(), is_enough)
            .await
    }

    /// Like `call_all`, for a release. `call` releases in one store, and retries after a broken connection. Calls without a timely reply
    /// continue in the background.
    async fn release_on_all<T, F>(
        &self,
        call: impl Fn(Arc<[S]>, usize) -> F,
        is_enough: impl Fn(&Answers<T>) -> bool,
    ) -> Answers<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let mut calls: Vec<_> =
            (0..self.stores.len()).map(|i| Some(Box::pin(call(Arc::clone(&self.stores), i)))).collect();
        let answers = collect(&mut calls, is_enough).await;
        let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(joined) = rest.try_join_next() {
            discard_joined(joined);
        }
        for call in calls.into_iter().flatten() {
            if rest.len() < MAX_BACKGROUND_RELEASES {
                rest.spawn(async move { drop(timeout(RELEASE_TIMEOUT, call).await) });
            }
        }
        answers
    }
}

/// Waits until all stores have replied, or for some time after a majority has decided. Leaves the others pending.
async fn collect<T, F: Future<Output = Result<T, StoreError>>>(
    calls: &mut [Option<Pin<Box<F>>>],
    is_enough: impl Fn(&Answers<T>) -> bool,
) -> Answers<T> {
    let start = Instant::now();
    let mut answers: Answers<T> = calls.iter().map(|_| None).collect();
    let mut rest: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|cx| {
        for (call, answer) in calls.iter_mut().zip(&mut answers) {
            if let Some(Poll::Ready(ready)) = call.as_mut().map(|call| call.as_mut().poll(cx)) {
                (*call, *answer) = (None, Some(ready));
            }
        }
        if calls.iter().all(Option::is_none) {
            return Poll::Ready(());
        }
        if rest.is_none() && is_enough(&answers) {
            rest = Some(Box::pin(sleep(start.elapsed().max(GRACE))));
        }
        rest.as_mut().map_or(Poll::Pending, |rest| rest.as_mut().poll(cx))
    })
    .await;
    answers
}

impl<S: LockStore + Send + Sync + 'static> Redlock<S> {
    /// Acquires leases in a majority of the stores. `call` acquires all of them, or none, in one store.
    async fn take<'a>(
        &'a self,
        claims: &[(LockKey, Claim)],
        call: impl Fn(&'a S) -> Call<'a, Vec<Acquired>>,
    ) -> Result<Vec<Acquired>, StoreError> {
        let plain = |claim: &Claim| {
            claim.kind != LockKind::ReadWrite && claim.permits == 1 && claim.queueing == Queueing::Bypass
        };
        if !claims.iter().all(|(_, claim)| plain(claim)) {
            return Err(StoreError::other(ConfigError::NotByQuorum));
        }
        let (all, quorum) = (self.stores.len(), self.quorum());
        let answers = self
            .call_all(call, |answers| {
                let failed = answers.iter().flatten().filter(|answer| answer.is_err()).count();
                // A failure says nothing about the holder, so it does not count towards the majority of replies.
                answers.iter().flatten().count() - failed >= quorum || failed > all - quorum
            })
            .await;
        let granted: Vec<_> = answers.iter().flatten().filter(|answer| is_granted(answer)).flatten().collect();
        if granted.len() >= quorum {
            let fence =
                |i: usize| granted.iter().filter_map(|answers| fence(answers.get(i)?)).max().unwrap_or_default();
            let grant = |(i, (_, claim)): (usize, &(LockKey, Claim))| {
                let fence = fence(i);
                self.floor.raise(fence, claim.fences);
                Acquired::Granted { fence }
            };
            return Ok(claims.iter().enumerate().map(grant).collect());
        }
        let granted = granted.len();
        self.undo(claims, &answers).await;
        self.refuse(claims.len(), answers, granted)
    }

    /// Releases grants of a failed claim, also late ones.
    async fn undo(&self, claims: &[(LockKey, Claim)], answers: &Answers<Vec<Acquired>>) {
        let is_done = |released: &Answers<()>| {
            let mut both = released.iter().zip(answers);
            both.all(|(released, answer)| released.is_some() || !answer.as_ref().is_some_and(is_granted))
        };
        let tokens: Arc<[_]> = claims.iter().map(|(lock, claim)| (*lock, claim.token)).collect();
        // Release all locks at the same time, so that the call waits for a silent store only once.
        let call = |stores: Arc<[S]>, i: usize| {
            let tokens = Arc::clone(&tokens);
            async move {
                let all = async || {
                    let releases = tokens.iter().map(|(lock, token)| stores[i].release(lock, token));
                    join_all(releases).await.into_iter().try_for_each(|released| released.map(drop))
                };
                match all().await {
                    Err(error) if error.is_unavailable() => all().await,
                    answer => answer,
                }
            }
        };
        drop(self.release_on_all(call, is_done).await);
    }

    /// The result of a claim that too few stores granted: why they did not.
    fn refuse(
        &self,
        count: usize,
        answers: Answers<Vec<Acquired>>,
        granted: usize,
    ) -> Result<Vec<Acquired>, StoreError> {
        let quorum = self.quorum();
        let is_refused = are_refusals(&answers);
        let (mut held, mut failure, mut unreplicated) = (Vec::new(), None, None);
        for answer in answers.into_iter().flatten().filter(|answer| !is_granted(answer)) {
            match answer {
                Err(error) => failure = failure.or(Some(if is_refused { error } else { error.in_doubt() })),
                Ok(answers) => match answers.first() {
                    Some(Acquired::NotReplicated { replicas }) => unreplicated = unreplicated.max(Some(*replicas)),
                    _ => held.push(answers),
                },
            }
        }
        if let Some(replicas) = unreplicated.filter(|_| held.len() <= self.stores.len() - quorum) {
            return Ok(vec![Acquired::NotReplicated { replicas }; count]);
        }
        if held.len() + granted < quorum {
            return Err(failure.unwrap_or_else(StoreError::timeout));
        }
        let busy = |i: usize| {
            if held.len() < quorum {
                // The stores granted it to different callers, and none has a majority. All callers must retry, at different times.
                let share = getrandom::u32().unwrap_or_default();
                return Duration::from_micros(u64::from(share % MAX_RETRY_PAUSE_US));
            }
            let mut remaining: Vec<_> = held.iter().filter_map(|answers| remaining(answers.get(i)?)).collect();
            remaining.sort_unstable();
            // The time until enough stores are free.
            remaining.get(held.len() - quorum).copied().unwrap_or_default()
        };
        let foreign = |i: usize| held.iter().find_map(|answers| other_kind(answers.get(i)?));
        let failure = |i: usize| {
            foreign(i).map_or_else(|| Acquired::Busy { remaining: busy(i) }, |held| Acquired::OtherKind { held })
        };
        Ok((0..count).map(failure).collect())
    }

    /// The same claim, with the largest fence seen as its floor.
    fn raised(&self, claim: &Claim) -> Claim {
        Claim { floor: self.floor.for_claim(claim), ..*claim }
    }
}

fn is_granted(answer: &Result<Vec<Acquired>, StoreError>) -> bool {
    answer.as_ref().is_ok_and(|answers| answers.iter().all(|answer| fence(answer).is_some()))
}

const fn fence(answer: &Acquired) -> Option<u64> {
    match answer {
        Acquired::Granted { fence } => Some(*fence),
        _ => None,
    }
}

const fn other_kind(answer: &Acquired) -> Option<LockKind> {
    match answer {
        Acquired::OtherKind { held } => Some(*held),
        _ => None,
    }
}

const fn remaining(answer: &Acquired) -> Option<Duration> {
    match answer {
        Acquired::Busy { remaining } => Some(*remaining),
        _ => None,
    }
}

impl<S: LockStore + Send + Sync + 'static> LockStore for Redlock<S> {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let (lock, claim) = (*lock, self.raised(claim));
        let answers = self
            .take(&[(lock, claim)], |store| Box::pin(async move { Ok(vec![store.acquire(&lock, &claim).await?]) }))
            .await?;
        answers.first().copied().ok_or_else(StoreError::timeout)
    }

    async fn acquire_all(&self, claims: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        let all: Arc<[_]> = claims.iter().map(|(lock, claim)| (*lock, self.raised(claim))).collect();
        let call = |store| -> Call<'_, _> {
            let all = Arc::clone(&all);
            Box::pin(async move { S::acquire_all(store, &all).await })
        };
        self.take(claims, call).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        let (all, quorum) = (self.stores.len(), self.quorum());
        let count = |answers: &Answers<Vec<bool>>, i: usize, renewed: bool| {
            answers.iter().flatten().flatten().filter(|answers| answers.get(i) == Some(&renewed)).count()
        };
        let requested: Arc<[_]> = renewals.into();
        let call = |store| -> Call<'_, _> {
            let requested = Arc::clone(&requested);
            Box::pin(async move { S::renew(store, &requested).await })
        };
        let is_decided = |answers: &Answers<Vec<bool>>| {
            let mut leases = 0..renewals.len();
            leases.all(|i| count(answers, i, true) >= quorum || count(answers, i, false) > all - quorum)
        };
        let answers = self.call_all(call, is_decided).await;
        // The failed stores could decide the result, so return an error, and the caller retries.
        if !is_decided(&answers) {
            return Err(first_error(answers));
        }
        Ok((0..renewals.len()).map(|i| count(&answers, i, true) >= quorum).collect())
    }

    /// The largest shard number of the stores: a cluster returns the slot, a single server returns 0.
    fn shard(&self, lock: &LockKey) -> u32 {
        self.stores.iter().map(|store| store.shard(lock)).max().unwrap_or_default()
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        let (lock, token, quorum) = (*lock, *token, self.quorum());
        let all = self.stores.len();
        let count = |answers: &Answers<StoreRelease>| answers.iter().flatten().flatten().count();
        // If one of three stores has forgotten the lease and another is slow, the slow one decides.
        let is_decided = move |answers: &Answers<StoreRelease>| {
            let held = answers.iter().flatten().flatten().filter(|answer| answer.released.was_held).count();
            held >= quorum || count(answers) - held > all - quorum
        };
        let answers = self
            .release_on_all(
                move |stores, i| async move {
                    let (released, is_again) = match stores[i].release(&lock, &token).await {
                        Err(error) if error.is_unavailable() => (stores[i].release(&lock, &token).await?, true),
                        answer => (answer?, false),
                    };
                    Ok(StoreRelease { released, is_again })
                },
                is_decided,
            )
            .await;
        if count(&answers) < quorum {
            return Err(first_error(answers));
        }
        let answered = || answers.iter().flatten().flatten();
        let held = answered().filter(|answer| answer.released.was_held).count();
        // Stores that may have held the lease: those without a reply, and those whose first call may have released it before the connection
        // broke.
        let unclear = answered().filter(|answer| !answer.released.was_held && answer.is_again).count()
            + (answers.len() - count(&answers));
        if held < quorum && held + unclear >= quorum {
            return Err(StoreError::unavailable(
                "the replies do not show whether a majority of the stores held the lease",
            ));
        }
        let is_wanted = answered().any(|answer| answer.released.is_wanted);
        Ok(Released { was_held: held >= quorum, is_wanted })
    }

    async fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        let (lock, waiter, quorum) = (*lock, waiter.copied(), self.quorum());
        let answers = self
            .call_all(
                |store| Box::pin(async move { Ok(store.watch(&lock, waiter.as_ref()).await) }),
                |answers| answers.iter().flatten().count() >= quorum,
            )
            .await;
        Notifications::any(answers.into_iter().flatten().flatten())
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        let (lock, token, quorum) = (*lock, *token, self.quorum());
        let name: Arc<str> = name.into();
        let call = |store| -> Call<'_, _> {
            let name = Arc::clone(&name);
            Box::pin(async move { S::name(store, &lock, &token, &name).await })
        };
        let answers = self.call_all(call, |answers| answers.iter().flatten().flatten().count() >= quorum).await;
        if answers.iter().flatten().flatten().count() < quorum { Err(first_error(answers)) } else { Ok(()) }
    }

    async fn request_release(&self, lock: &LockKey) -> Result<(), StoreError> {
        let (lock, quorum) = (*lock, self.quorum());
        let call = |store| -> Call<'_, _> { Box::pin(async move { S::request_release(store, &lock).await }) };
        let answers = self.call_all(call, |answers| answers.iter().flatten().flatten().count() >= quorum).await;
        if answers.iter().flatten().flatten().count() < quorum { Err(first_error(answers)) } else { Ok(()) }
    }

    async fn watch_release_requests(&self, lock: &LockKey) -> Notifications {
        let (lock, quorum) = (*lock, self.quorum());
        let call =
            |store| -> Call<'_, _> { Box::pin(async move { Ok(S::watch_release_requests(store, &lock).await) }) };
        let answers = self.call_all(call, |answers| answers.iter().flatten().count() >= quorum).await;
        Notifications::any(answers.into_iter().flatten().flatten())
    }

    /// If one of the stores is local to this process, so are the locks.
    fn reach(&self) -> Reach {
        let is_shared = self.stores.iter().all(|store| store.reach() > Reach::Process);
        if is_shared { Reach::Quorum } else { Reach::Process }
    }

    /// The shutdown of any of the backends closes the locks.
    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.stores.iter().for_each(|store| store.add_to_shutdown(target));
    }
}

fn first_error<T>(answers: Answers<T>) -> StoreError {
    let is_refused = are_refusals(&answers);
    let error = answers.into_iter().flatten().find_map(Result::err).unwrap_or_else(StoreError::timeout);
    if is_refused { error } else { error.in_doubt() }
}

fn are_refusals<T>(answers: &Answers<T>) -> bool {
    answers.iter().all(|answer| matches!(answer, Some(Err(error)) if error.is_refusal()))
}

// By hand: the inner stores need not be `Clone`.
impl<S> Clone for Redlock<S> {
    fn clone(&self) -> Self {
        let (stores, floor, rest) = (Arc::clone(&self.stores), Arc::clone(&self.floor), Arc::clone(&self.rest));
        Self { stores, floor, rest }
    }
}

impl<S: fmt::Debug> fmt::Debug for Redlock<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redlock").field("stores", &self.stores).finish()
    }
}
