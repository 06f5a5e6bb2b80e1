use std::future::{Future, pending};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::sleep;

use crate::cache::exists_filter::store::{Added, Block, ExistsFilterStore, FilterStatus, Layout, NewBits, VersionIds};
use crate::cache::store as cache;
use crate::cache::store::{CacheKey, CacheStore, Entry, EntryId, Mark, NewEntry};
use crate::delay_queue::store::{Ack, Admission, Claimed, DelayQueueStore, Extended, JobLease, QueueKey, WorkerId};
use crate::delay_queue::{self, Cancelled, Changed, Counts, Due, JobId, NewJob, State as JobState, StoredJob};
use crate::error::StoreError;
use crate::idempotency::store::{Begun, BodyFingerprint, Completion, IdempotencyRegistry, IdempotencyStore};
use crate::idempotency::{self, Checkpoint, Operation, OperationPage, OperationStatus, StoredResponse};
use crate::key::Key;
use crate::lock::store::{Acquired, Claim, LockRegistry, LockStore, Notifications, Released, Renewal, Token};
use crate::lock::{Cursor, ForceReleased, LockKey, LockPage, LockStatus};
use crate::rate_limit::store::{RateLimitStore, Request};
use crate::rate_limit::{Decision, Policy, Receipt};
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

/// A store with faults that a test injects. It also counts its calls. See the [module docs](super) for an example.
///
/// Without faults, it behaves like the inner store. A call that fails is not passed on, so it has no effect. Clones share their faults and
/// counts.
#[derive(Clone, Debug)]
pub struct FaultStore<S> {
    inner: S,
    faults: Faults,
}

impl<S> FaultStore<S> {
    /// Wraps `inner`, without faults.
    pub fn new(inner: S) -> Self {
        Self { inner, faults: Faults::default() }
    }

    /// The handle that switches the faults on and off, also when the store is inside a layer.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// The inner store without faults, for instance to read its counts.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

/// The faults of a [`FaultStore`]. Clones control the same faults.
///
/// Faults combine: a call waits for its delay, and then hangs, fails or passes. The faults at the first poll of a call apply. A call that
/// hangs never ends, even after [`heal`](Self::heal), as a lost reply does not arrive later.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    delay: Duration,
    hangs: bool,
    loses_replies: bool,
    fail_all: Option<Failure>,
    fail_next: Option<(u32, Failure)>,
    fail_percent: Option<(u8, Failure)>,
    // The seed of the numbers that select the calls to fail.
    seed: u64,
    calls: [u64; VERBS],
}

/// The kind of [`StoreError`] that a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// [`StoreError::is_unavailable`].
    Unavailable,
    /// [`StoreError::is_timeout`], at once. To wait for the deadline of the caller instead, use [`Faults::hang`].
    Timeout,
    /// [`StoreError::is_unauthorized`].
    Unauthorized,
    /// [`StoreError::is_out_of_memory`].
    OutOfMemory,
    /// [`StoreError::is_foreign_data`].
    ForeignData,
    /// Any other failure.
    Other,
}

/// The kind of a call: the methods of [`RateLimitStore`], [`LockStore`], [`IdempotencyStore`], [`DelayQueueStore`], [`CacheStore`] and
/// [`ExistsFilterStore`], and of [`LockRegistry`] and [`IdempotencyRegistry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// `check`, and `check_now` if it returns a decision.
    Check,
    /// `check_all`, and `check_all_now` if it returns decisions. One call for any number of keys.
    CheckAll,
    /// `peek`.
    Peek,
    /// `settle`.
    Settle,
    /// `block`.
    Block,
    /// `reset`.
    Reset,
    /// `acquire` of a lock, or `acquire_all` of several.
    Acquire,
    /// `renew`. One call for any number of leases.
    Renew,
    /// `release`, of a lock, an operation or a load.
    Release,
    /// `name` of a holder.
    Name,
    /// `request_release`.
    RequestRelease,
    /// `watch` of a lock, an operation, a queue or a cache entry, or `watch_release_requests`. If it fails, there are no notifications.
    Watch,
    /// `begin` of an operation.
    Begin,
    /// `complete`.
    Complete,
    /// `checkpoint`.
    Checkpoint,
    /// `push`. One call for any number of jobs.
    Push,
    /// `claim` of jobs, which also finishes jobs, or of a load, or `ensure_generation` of a tag.
    Claim,
    /// `get` of a cache, `generation` of a tag, or `status`, `read_block` or `read_blocks` of an exists filter.
    Get,
    /// `put` of a load, `set` of a cache, or `add_bits` of an exists filter.
    Put,
    /// `invalidate`, `expire` or `invalidate_tag` of a cache.
    Invalidate,
    /// `extend`. One call for any number of leases.
    Extend,
    /// All other methods of a delay queue.
    Control,
    /// `allocate`, `begin_build` or `end_build` of an exists filter.
    Build,
    /// The methods of [`LockRegistry`] and [`IdempotencyRegistry`].
    Admin,
}

const VERBS: usize = Verb::Admin as usize + 1;

impl Failure {
    fn error(self) -> StoreError {
        let source = "a fault injected by the test";
        match self {
            Self::Unavailable => StoreError::unavailable(source),
            Self::Timeout => StoreError::timeout(),
            Self::Unauthorized => StoreError::unauthorized(source),
            Self::OutOfMemory => StoreError::out_of_memory(source),
            Self::ForeignData => StoreError::foreign_data(source),
            Self::Other => StoreError::other(source),
        }
    }
}

/// The faults of one call.
struct Plan {
    delay: Duration,
    hangs: bool,
    failure: Option<Failure>,
    loses_reply: bool,
}

impl Faults {
    /// Makes every call fail.
    pub fn fail(&self, failure: Failure) {
        self.state().fail_all = Some(failure);
    }

    /// Makes the next `calls` calls fail.
    pub fn fail_next(&self, calls: u32, failure: Failure) {
        self.state().fail_next = (calls > 0).then_some((calls, failure));
    }

    /// Makes about `percent` of 100 calls fail. The selection looks random and is the same in each run: see [`seed`](Self::seed).
    pub fn fail_percent(&self, percent: u8, failure: Failure) {
        self.state().fail_percent = (percent > 0).then_some((percent, failure));
    }

    /// Lets [`fail_percent`](Self::fail_percent) select other calls from now on. Defaults to 0.
    pub fn seed(&self, seed: u64) {
        self.state().seed = seed;
    }

    /// Makes every call hang, so that only the deadline of the caller ends it.
    pub fn hang(&self) {
        self.state().hangs = true;
    }

    /// Executes every call and never returns its reply. The caller cannot know whether the call had an effect.
    pub fn lose_replies(&self) {
        self.state().loses_replies = true;
    }

    /// Delays every call by this duration of tokio's clock.
    pub fn delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// Removes all faults. The counts of calls remain.
    pub fn heal(&self) {
        let mut state = self.state();
        *state = State { calls: state.calls, seed: state.seed, ..State::default() };
    }

    /// The number of calls of one kind, including failed and hanging calls.
    #[must_use]
    pub fn calls(&self, verb: Verb) -> u64 {
        self.state().calls[verb as usize]
    }

    /// The total number of calls.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.state().calls.iter().sum()
    }

    /// No code panics in the middle of a change, so a poisoned state is intact.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn around<T>(&self, verb: Verb, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let Plan { delay, hangs, failure, loses_reply } = self.state().plan(verb);
        if !delay.is_zero() {
            sleep(delay).await;
        }
        if hangs {
            pending::<()>().await;
        }
        if let Some(failure) = failure {
            return Err(failure.error());
        }
        let reply = call.await;
        if loses_reply {
            pending::<()>().await;
        }
        reply
    }

    async fn watch(&self, watch: impl Future<Output = Notifications>) -> Notifications {
        let watch = async { Ok(watch.await) };
        self.around(Verb::Watch, watch).await.unwrap_or_else(|_| Notifications::none())
    }
}

impl State {
    fn is_faulty(&self) -> bool {
        self.hangs
            || self.loses_replies
            || !self.delay.is_zero()
            || self.fail_all.is_some()
            || self.fail_next.is_some()
            || self.fail_percent.is_some()
    }

    fn plan(&mut self, verb: Verb) -> Plan {
        self.calls[verb as usize] += 1;
        let next = self.fail_next.map(|(_, failure)| failure);
        self.fail_next = self.fail_next.and_then(|(calls, failure)| (calls > 1).then_some((calls - 1, failure)));
        let percent = self.fail_percent.filter(|(percent, _)| self.draw() < *percent).map(|(_, failure)| failure);
        Plan {
            delay: self.delay,
            hangs: self.hangs,
            failure: next.or(self.fail_all).or(percent),
            loses_reply: self.loses_replies,
        }
    }

    /// A pseudorandom number below 100 (SplitMix64).
    fn draw(&mut self) -> u8 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.seed;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % 100) as u8
    }
}

impl<S: RateLimitStore + Sync> RateLimitStore for FaultStore<S> {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.faults.around(Verb::Check, self.inner.check(policy, key, cost)).await
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        // Without a decision here, the caller continues with `check`, which meets the fault.
        if self.faults.state().is_faulty() {
            return None;
        }
        let decision = self.inner.check_now(policy, key, cost)?;
        self.faults.state().calls[Verb::Check as usize] += 1;
        Some(decision)
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        self.faults.around(Verb::CheckAll, self.inner.check_all(requests)).await
    }

    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        if self.faults.state().is_faulty() {
            return None;
        }
        let decisions = self.inner.check_all_now(requests)?;
        self.faults.state().calls[Verb::CheckAll as usize] += 1;
        Some(decisions)
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.faults.around(Verb::Peek, self.inner.peek(policy, key, cost)).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        self.faults.around(Verb::Settle, self.inner.settle(policy, key, receipt, change)).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        self.faults.around(Verb::Block, self.inner.block(policy, key, time)).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        self.faults.around(Verb::Reset, self.inner.reset(policy, key)).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}

impl<S: CacheStore + Sync> CacheStore for FaultStore<S> {
    async fn get(&self, key: &CacheKey) -> Result<Option<Entry>, StoreError> {
        self.faults.around(Verb::Get, self.inner.get(key)).await
    }

    async fn claim(&self, key: &CacheKey, seen: &EntryId, claim: &cache::Claim) -> Result<cache::Claimed, StoreError> {
        self.faults.around(Verb::Claim, self.inner.claim(key, seen, claim)).await
    }

    async fn renew(&self, key: &CacheKey, claim: &cache::Claim) -> Result<bool, StoreError> {
        self.faults.around(Verb::Renew, self.inner.renew(key, claim)).await
    }

    async fn put(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<bool, StoreError> {
        self.faults.around(Verb::Put, self.inner.put(key, token, entry)).await
    }

    async fn release(&self, key: &CacheKey, token: &Token, mark: Option<Mark>) -> Result<bool, StoreError> {
        self.faults.around(Verb::Release, self.inner.release(key, token, mark)).await
    }

    async fn set(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<(), StoreError> {
        self.faults.around(Verb::Put, self.inner.set(key, token, entry)).await
    }

    async fn invalidate(&self, key: &CacheKey) -> Result<(), StoreError> {
        self.faults.around(Verb::Invalidate, self.inner.invalidate(key)).await
    }

    async fn expire(&self, key: &CacheKey) -> Result<(), StoreError> {
        self.faults.around(Verb::Invalidate, self.inner.expire(key)).await
    }

    async fn generation(&self, tag: &CacheKey) -> Result<Option<Token>, StoreError> {
        self.faults.around(Verb::Get, self.inner.generation(tag)).await
    }

    async fn ensure_generation(&self, tag: &CacheKey, new: &Token, ttl: Duration) -> Result<Token, StoreError> {
        self.faults.around(Verb::Claim, self.inner.ensure_generation(tag, new, ttl)).await
    }

    async fn invalidate_tag(&self, tag: &CacheKey) -> Result<(), StoreError> {
        self.faults.around(Verb::Invalidate, self.inner.invalidate_tag(tag)).await
    }

    async fn watch(&self, key: &CacheKey) -> Notifications {
        self.faults.watch(self.inner.watch(key)).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}

impl<S: ExistsFilterStore + Sync> ExistsFilterStore for FaultStore<S> {
    async fn status(&self, filter: &Key) -> Result<FilterStatus, StoreError> {
        self.faults.around(Verb::Get, self.inner.status(filter)).await
    }

    async fn read_block(&self, filter: &Key, version: &Token, block: u32) -> Result<Option<Block>, StoreError> {
        self.faults.around(Verb::Get, self.inner.read_block(filter, version, block)).await
    }

    async fn read_blocks(
        &self,
        filter: &Key,
        version: &Token,
        first: u32,
        count: u32,
    ) -> Result<Option<Vec<Block>>, StoreError> {
        self.faults.around(Verb::Get, self.inner.read_blocks(filter, version, first, count)).await
    }

    async fn allocate(&self, filter: &Key, version: &Token, layout: &Layout) -> Result<bool, StoreError> {
        self.faults.around(Verb::Build, self.inner.allocate(filter, version, layout)).await
    }

    async fn begin_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        version: &Token,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        self.faults.around(Verb::Build, self.inner.begin_build(filter, seen, version, ttl)).await
    }

    async fn add_bits(&self, filter: &Key, seen: &VersionIds, bits: &NewBits) -> Result<Added, StoreError> {
        self.faults.around(Verb::Put, self.inner.add_bits(filter, seen, bits)).await
    }

    async fn end_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        self.faults.around(Verb::Build, self.inner.end_build(filter, seen, is_complete, ttl)).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }
}

impl<S: IdempotencyStore + Sync> IdempotencyStore for FaultStore<S> {
    async fn begin(&self, operation: &Operation, claim: &idempotency::store::Claim) -> Result<Begun, StoreError> {
        self.faults.around(Verb::Begin, self.inner.begin(operation, claim)).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        claim: &idempotency::store::Claim,
        body_fingerprint: &BodyFingerprint,
    ) -> Result<bool, StoreError> {
        self.faults.around(Verb::Renew, self.inner.renew(operation, claim, body_fingerprint)).await
    }

    async fn checkpoint(
        &self,
        operation: &Operation,
        claim: &idempotency::store::Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, StoreError> {
        self.faults
            .around(Verb::Checkpoint, self.inner.checkpoint(operation, claim, body_fingerprint, checkpoint))
            .await
    }

    async fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, StoreError> {
        self.faults.around(Verb::Complete, self.inner.complete(operation, token, completion)).await
    }

    async fn release(&self, operation: &Operation, claim: &idempotency::store::Claim) -> Result<bool, StoreError> {
        self.faults.around(Verb::Release, self.inner.release(operation, claim)).await
    }

    async fn watch(&self, operation: &Operation) -> Notifications {
        self.faults.watch(self.inner.watch(operation)).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}

impl<S: LockStore + Sync> LockStore for FaultStore<S> {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        self.faults.around(Verb::Acquire, self.inner.acquire(lock, claim)).await
    }

    async fn acquire_all(&self, wanted: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        self.faults.around(Verb::Acquire, self.inner.acquire_all(wanted)).await
    }

    fn shard(&self, lock: &LockKey) -> u32 {
        self.inner.shard(lock)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        self.faults.around(Verb::Renew, self.inner.renew(renewals)).await
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        self.faults.around(Verb::Release, self.inner.release(lock, token)).await
    }

    async fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        self.faults.watch(self.inner.watch(lock, waiter)).await
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        self.faults.around(Verb::Name, self.inner.name(lock, token, name)).await
    }

    async fn request_release(&self, lock: &LockKey) -> Result<(), StoreError> {
        self.faults.around(Verb::RequestRelease, self.inner.request_release(lock)).await
    }

    async fn watch_release_requests(&self, lock: &LockKey) -> Notifications {
        self.faults.watch(self.inner.watch_release_requests(lock)).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}

impl<S: LockRegistry + Sync> LockRegistry for FaultStore<S> {
    async fn inspect(&self, lock: &LockKey) -> Result<LockStatus, StoreError> {
        self.faults.around(Verb::Admin, self.inner.inspect(lock)).await
    }

    async fn force_release(&self, lock: &LockKey) -> Result<ForceReleased, StoreError> {
        self.faults.around(Verb::Admin, self.inner.force_release(lock)).await
    }

    async fn list(&self, name: &Key, from: Cursor, max: usize) -> Result<LockPage, StoreError> {
        self.faults.around(Verb::Admin, self.inner.list(name, from, max)).await
    }
}

impl<S: IdempotencyRegistry + Sync> IdempotencyRegistry for FaultStore<S> {
    async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        self.faults.around(Verb::Admin, self.inner.inspect(operation)).await
    }

    async fn forget(&self, status: &OperationStatus) -> Result<bool, StoreError> {
        self.faults.around(Verb::Admin, self.inner.forget(status)).await
    }

    async fn complete_unknown(
        &self,
        status: &OperationStatus,
        answer: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        self.faults.around(Verb::Admin, self.inner.complete_unknown(status, answer, retention)).await
    }

    async fn list(&self, scope: Option<&Key>, from: Cursor, max: usize) -> Result<OperationPage, StoreError> {
        self.faults.around(Verb::Admin, self.inner.list(scope, from, max)).await
    }
}

impl<S: DelayQueueStore + Sync> DelayQueueStore for FaultStore<S> {
    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        self.faults.around(Verb::Push, self.inner.push(queue, jobs, max_jobs)).await
    }

    async fn claim(
        &self,
        queue: &QueueKey,
        finished: &[Ack],
        claim: &delay_queue::store::Claim,
    ) -> Result<Claimed, StoreError> {
        self.faults.around(Verb::Claim, self.inner.claim(queue, finished, claim)).await
    }

    async fn extend(
        &self,
        queue: &QueueKey,
        leases: &[JobLease],
        lease: Duration,
    ) -> Result<Vec<Extended>, StoreError> {
        self.faults.around(Verb::Extend, self.inner.extend(queue, leases, lease)).await
    }

    async fn watch(&self, queue: &QueueKey, worker: WorkerId) -> Notifications {
        let watch = async { Ok(self.inner.watch(queue, worker).await) };
        self.faults.around(Verb::Watch, watch).await.unwrap_or_else(|_| Notifications::none())
    }

    async fn get(&self, queue: &QueueKey, id: &JobId) -> Result<Option<StoredJob>, StoreError> {
        self.faults.around(Verb::Control, self.inner.get(queue, id)).await
    }

    async fn cancel(&self, queue: &QueueKey, id: &JobId, keeps_unique: bool) -> Result<Cancelled, StoreError> {
        self.faults.around(Verb::Control, self.inner.cancel(queue, id, keeps_unique)).await
    }

    async fn reschedule(&self, queue: &QueueKey, id: &JobId, due: Due) -> Result<Changed, StoreError> {
        self.faults.around(Verb::Control, self.inner.reschedule(queue, id, due)).await
    }

    async fn replace(&self, queue: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        self.faults.around(Verb::Control, self.inner.replace(queue, id, payload)).await
    }

    async fn counts(&self, queue: &QueueKey) -> Result<Counts, StoreError> {
        self.faults.around(Verb::Control, self.inner.counts(queue)).await
    }

    async fn list(
        &self,
        queue: &QueueKey,
        state: JobState,
        skip: u64,
        limit: usize,
    ) -> Result<Vec<StoredJob>, StoreError> {
        self.faults.around(Verb::Control, self.inner.list(queue, state, skip, limit)).await
    }

    async fn pause(&self, queue: &QueueKey, is_paused: bool) -> Result<(), StoreError> {
        self.faults.around(Verb::Control, self.inner.pause(queue, is_paused)).await
    }

    async fn purge(&self, queue: &QueueKey, limit: usize, keeps_unique: bool) -> Result<usize, StoreError> {
        self.faults.around(Verb::Control, self.inner.purge(queue, limit, keeps_unique)).await
    }

    async fn release_unique(&self, queue: &QueueKey, key: &Key) -> Result<bool, StoreError> {
        self.faults.around(Verb::Control, self.inner.release_unique(queue, key)).await
    }

    async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        self.faults.around(Verb::Control, self.inner.replay(queue, ids)).await
    }

    async fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        self.faults.around(Verb::Control, self.inner.forget(queue, ids)).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn identity(&self) -> Option<usize> {
        self.inner.identity()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}

#[cfg(test)]
mod tests {
    /// The lines after the one with the prefix `first`, up to the next line with a brace as its prefix.
    fn block<'a>(source: &'a str, first: &str) -> Vec<&'a str> {
        let lines = source.lines().skip_while(|line| !line.starts_with(first)).skip(1);
        lines.take_while(|line| !line.starts_with('}')).collect()
    }

    /// The methods of a block: the name of each, with its signature and its body.
    fn methods(block: &[&str]) -> Vec<(String, String)> {
        let mut methods: Vec<(String, String)> = Vec::new();
        for line in block {
            let signature = line.strip_prefix("    fn ").or_else(|| line.strip_prefix("    async fn "));
            if let Some(signature) = signature {
                methods.push((signature.split(['(', '<']).next().unwrap_or_default().to_owned(), String::new()));
            }
            if let Some((_, text)) = methods.last_mut().filter(|_| !line.trim_start().starts_with("//")) {
                text.push_str(line.trim());
            }
        }
        methods
    }

    /// A new method with a default body would bypass the inner store and all faults.
    #[test]
    fn every_asynchronous_method_meets_the_faults() {
        let traits = [
            ("RateLimitStore", include_str!("../rate_limit/store.rs"), 6),
            ("LockStore", include_str!("../lock/store.rs"), 8),
            ("LockRegistry", include_str!("../lock/store.rs"), 3),
            ("IdempotencyStore", include_str!("../idempotency/store.rs"), 6),
            ("IdempotencyRegistry", include_str!("../idempotency/store.rs"), 4),
            ("CacheStore", include_str!("../cache/store.rs"), 12),
            ("ExistsFilterStore", include_str!("../cache/exists_filter/store.rs"), 6),
            ("DelayQueueStore", include_str!("../delay_queue/store.rs"), 14),
        ];
        for (name, source, expected) in traits {
            let wanted = methods(&block(source, &format!("pub trait {name}")));
            let wanted: Vec<_> = wanted.into_iter().filter(|(_, text)| text.contains("-> impl Future<")).collect();
            assert!(wanted.len() >= expected, "{name} has only these methods: {wanted:?}");
            let had =
                methods(&block(include_str!("fault.rs"), &format!("impl<S: {name} + Sync> {name} for FaultStore<S>")));
            for (method, _) in wanted {
                let body = had.iter().find(|(other, _)| *other == method).map_or("", |(_, body)| body);
                let meets = body.contains("self.faults.around(") || body.contains("self.faults.watch(");
                assert!(meets, "{name}::{method} bypasses the faults");
            }
        }
    }
}
