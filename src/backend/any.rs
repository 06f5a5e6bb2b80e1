use std::time::Duration;

use super::memory::MemoryBackend;
#[cfg(feature = "redis")]
use super::redis::{RedisBackend, RedisOptions};
use crate::cache::exists_filter::store::{Added, Block, ExistsFilterStore, FilterStatus, Layout, NewBits, VersionIds};
use crate::cache::store as cache;
use crate::cache::store::{CacheKey, CacheStore, Entry, EntryId, Mark, NewEntry};
use crate::delay_queue::store::{Ack, Admission, Claimed, DelayQueueStore, Extended, JobLease, QueueKey, WorkerId};
use crate::delay_queue::{self, Cancelled, Changed, Counts, Due, JobId, NewJob, State, StoredJob};
use crate::error::{ConfigError, ConnectError, StoreError};
use crate::idempotency::store::{Begun, BodyFingerprint, Completion, IdempotencyRegistry, IdempotencyStore};
use crate::idempotency::{self, Checkpoint, Operation, OperationPage, OperationStatus, StoredResponse};
use crate::key::Key;
use crate::lock::store::{Acquired, Claim, LockRegistry, LockStore, Notifications, Released, Renewal, Token};
use crate::lock::{Cursor, ForceReleased, LockKey, LockPage, LockStatus};
use crate::rate_limit::store::{Charged, RateLimitStore, Request};
use crate::rate_limit::{Decision, Policy, Receipt};
use crate::reach::Reach;
use crate::store::shutdown::{ShutdownReport, ShutdownTarget};

/// Connects to the backend of a URL.
///
/// | URL | |
/// | --- | --- |
/// | `memory:` | this process: a [`MemoryBackend`], without parameters |
/// | `redis://user:password@host:port/db` | one server |
/// | `redis+unix:///path` | one server, over a Unix socket; `unix` alone means the same |
/// | `redis+sentinel://user:password@host1:port,host2/service/db` | the primary that the Sentinels name for a service |
/// | `redis+cluster://user:password@host1:port,host2` | all nodes of a cluster, found through the named ones |
/// | `rediss`, `rediss+sentinel`, `rediss+cluster` | the same, encrypted (feature `tls`) |
/// | `valkey`, `valkeys` | the same as `redis` and `rediss`, in each of these |
/// | **parameter** | |
/// | `?user=name`, `?pass=password` | the user of the data servers, also written before the `@`; a user without a password is an error |
/// | `?db=3` | the database, also written in the path; defaults to 0, the only database of a cluster |
/// | `?protocol=resp3` | `resp2`, the default, or `resp3` |
/// | `?prefix=shop` | `RedisOptions::prefix`, defaults to `tollgate` |
/// | `?connections=3` | `RedisOptions::connections`, 1 to 1,024 for each server, defaults to 3 |
/// | `?connect_timeout=2s` | `RedisOptions::connect_timeout` in `ms`, `s` or `m`, defaults to `1s` |
/// | `?response_timeout=250ms` | `RedisOptions::response_timeout`, likewise, defaults to `500ms` |
///
/// Every `redis` scheme takes all parameters, joined by `&`. Unknown, repeated and contradicting parameters are errors. Setters
/// (`connect_with`) replace the settings of the URL.
///
/// Database, port and login are optional. A password alone is for the user `default`; for a `nopass` user, write any password. Ports
/// default to 6379, and Sentinel ports to 26379. Names, passwords and prefixes are percent-encoded. The login is for the data servers;
/// for Sentinels, use `RedisOptions::sentinel_user`. A certificate must be for the host that the URL, the Sentinels or the cluster
/// nodes name.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::ConnectError> {
/// let backend = tollgate::connect("memory:").await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`ConnectError::Config`] if the URL is invalid, and [`ConnectError::Store`] if no server replies. Further kinds of [`ConnectError`]
/// tell problems with credentials, certificates and servers apart. `Debug` output, as from `main`, is one sentence with the server, the
/// cause and the remedy.
pub async fn connect(url: impl AsRef<str>) -> Result<AnyBackend, ConnectError> {
    let url = url.as_ref();
    match memory(url)? {
        Some(backend) => Ok(backend.into()),
        #[cfg(feature = "redis")]
        None => Ok(RedisOptions::from_url(url)?.connect().await?.into()),
        #[cfg(not(feature = "redis"))]
        None => Err(without_redis(url).into()),
    }
}

/// Like [`connect`], with further [`RedisOptions`], which apply if the URL is for Redis.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::ConnectError> {
/// let url = std::env::var("STORE").unwrap_or_else(|_| "memory:".into());
/// let backend = tollgate::connect_with(url, |redis| redis.prefix("shop").tolerate_outage(true)).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// See [`connect`], and [`ConnectError::Config`] for settings that cannot work.
#[cfg(feature = "redis")]
pub async fn connect_with(
    url: impl AsRef<str>,
    options: impl FnOnce(RedisOptions) -> RedisOptions,
) -> Result<AnyBackend, ConnectError> {
    let url = url.as_ref();
    match memory(url)? {
        Some(backend) => Ok(backend.into()),
        None => Ok(options(RedisOptions::from_url(url)?).connect().await?.into()),
    }
}

/// The memory backend, if the URL names it.
fn memory(url: &str) -> Result<Option<MemoryBackend>, ConfigError> {
    match url.split_once(':') {
        Some(("memory", "" | "//")) => Ok(Some(MemoryBackend::chosen())),
        Some(("memory", _)) => {
            Err(ConfigError::InvalidUrl { reason: "`memory:` takes no address and no parameters".into() })
        }
        Some(_) => Ok(None),
        None => Err(ConfigError::no_scheme()),
    }
}

/// The error for a URL that does not name memory.
#[cfg(not(feature = "redis"))]
fn without_redis(url: &str) -> ConfigError {
    let scheme = url.split(':').next().unwrap_or(url);
    if ["redis", "rediss", "valkey", "valkeys", "unix"].contains(&scheme.split('+').next().unwrap_or(scheme)) {
        return ConfigError::FeatureMissing { feature: "redis" };
    }
    ConfigError::unknown_scheme(scheme)
}

/// A backend that is selected at run time: see [`connect`]. You can also convert a backend:
///
/// ```
/// use tollgate::{AnyBackend, MemoryBackend};
///
/// let backend = AnyBackend::from(MemoryBackend::with_capacity(1_000_000));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyBackend {
    /// Keeps all data in this process.
    Memory(MemoryBackend),
    /// Keeps all data in Redis.
    #[cfg(feature = "redis")]
    Redis(RedisBackend),
}

impl From<MemoryBackend> for AnyBackend {
    fn from(backend: MemoryBackend) -> Self {
        Self::Memory(backend)
    }
}

#[cfg(feature = "redis")]
impl From<RedisBackend> for AnyBackend {
    fn from(backend: RedisBackend) -> Self {
        Self::Redis(backend)
    }
}

/// Forwards a call to the backend.
macro_rules! delegate {
    ($self:ident, $store:ident => $call:expr) => {
        match $self {
            AnyBackend::Memory($store) => $call,
            #[cfg(feature = "redis")]
            AnyBackend::Redis($store) => $call,
        }
    };
}

impl AnyBackend {
    /// Pings the backend and returns the round-trip time. Use it for alerts. Memory replies at once; for Redis and readiness see
    /// `RedisBackend::ping`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// let backend = tollgate::connect("memory:").await?;
    /// assert!(backend.ping().await?.is_zero());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If no server replies, or a server reports that it cannot serve yet.
    pub async fn ping(&self) -> Result<Duration, StoreError> {
        match self {
            Self::Memory(_) => Ok(Duration::ZERO),
            #[cfg(feature = "redis")]
            Self::Redis(backend) => backend.ping().await,
        }
    }

    /// Closes the workers, locks, caches and idempotency layers that were made from this backend in this process, and waits for their work.
    /// Returns the work that is left: see [`backend`](crate::backend#shutdown). Takes no longer than `deadline`, also while Redis does not
    /// answer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tollgate::BoxError> {
    /// # use std::time::Duration;
    /// # use tollgate::Locks;
    /// let backend = tollgate::connect("memory:").await?;
    /// let locks = Locks::new(backend.clone(), "orders");
    /// // At the end of `main`:
    /// println!("{}", backend.shutdown(Duration::from_secs(25)).await);
    /// # assert!(locks.lock("42").await.is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        delegate!(self, backend => backend.shutdown(deadline).await)
    }
}

impl RateLimitStore for AnyBackend {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        delegate!(self, store => store.check(policy, key, cost).await)
    }

    fn check_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Decision> {
        delegate!(self, store => store.check_now(policy, key, cost))
    }

    fn charge_now(&self, policy: &Policy, key: &Key, cost: u64) -> Option<Charged> {
        delegate!(self, store => store.charge_now(policy, key, cost))
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        delegate!(self, store => store.check_all(requests).await)
    }

    fn check_all_now(&self, requests: &[Request]) -> Option<Vec<Decision>> {
        delegate!(self, store => store.check_all_now(requests))
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        delegate!(self, store => store.peek(policy, key, cost).await)
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        delegate!(self, store => store.settle(policy, key, receipt, change).await)
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        delegate!(self, store => store.block(policy, key, time).await)
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        delegate!(self, store => store.reset(policy, key).await)
    }

    fn reach(&self) -> Reach {
        delegate!(self, store => RateLimitStore::reach(store))
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        delegate!(self, store => RateLimitStore::add_to_shutdown(store, target));
    }
}

impl LockStore for AnyBackend {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        delegate!(self, store => store.acquire(lock, claim).await)
    }

    async fn acquire_all(&self, wanted: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        delegate!(self, store => store.acquire_all(wanted).await)
    }

    fn shard(&self, lock: &LockKey) -> u32 {
        delegate!(self, store => store.shard(lock))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        delegate!(self, store => LockStore::renew(store, renewals).await)
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        delegate!(self, store => LockStore::release(store, lock, token).await)
    }

    async fn watch(&self, lock: &LockKey, queued: Option<&Token>) -> Notifications {
        delegate!(self, store => LockStore::watch(store, lock, queued).await)
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        delegate!(self, store => store.name(lock, token, name).await)
    }

    async fn request_release(&self, lock: &LockKey) -> Result<(), StoreError> {
        delegate!(self, store => store.request_release(lock).await)
    }

    async fn watch_release_requests(&self, lock: &LockKey) -> Notifications {
        delegate!(self, store => store.watch_release_requests(lock).await)
    }

    fn reach(&self) -> Reach {
        delegate!(self, store => LockStore::reach(store))
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        delegate!(self, store => LockStore::add_to_shutdown(store, target));
    }
}

impl LockRegistry for AnyBackend {
    async fn inspect(&self, lock: &LockKey) -> Result<LockStatus, StoreError> {
        delegate!(self, store => LockRegistry::inspect(store, lock).await)
    }

    async fn force_release(&self, lock: &LockKey) -> Result<ForceReleased, StoreError> {
        delegate!(self, store => store.force_release(lock).await)
    }

    async fn list(&self, name: &Key, from: Cursor, max: usize) -> Result<LockPage, StoreError> {
        delegate!(self, store => LockRegistry::list(store, name, from, max).await)
    }
}

impl IdempotencyStore for AnyBackend {
    async fn begin(&self, operation: &Operation, claim: &idempotency::store::Claim) -> Result<Begun, StoreError> {
        delegate!(self, store => store.begin(operation, claim).await)
    }

    fn try_begin(&self, operation: &Operation, claim: &idempotency::store::Claim) -> Option<Result<Begun, StoreError>> {
        delegate!(self, store => store.try_begin(operation, claim))
    }

    async fn renew(
        &self,
        operation: &Operation,
        claim: &idempotency::store::Claim,
        body_fingerprint: &BodyFingerprint,
    ) -> Result<bool, StoreError> {
        delegate!(self, store => IdempotencyStore::renew(store, operation, claim, body_fingerprint).await)
    }

    async fn checkpoint(
        &self,
        operation: &Operation,
        claim: &idempotency::store::Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, StoreError> {
        delegate!(self, store => store.checkpoint(operation, claim, body_fingerprint, checkpoint).await)
    }

    async fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, StoreError> {
        delegate!(self, store => store.complete(operation, token, completion).await)
    }

    fn complete_now(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Option<Result<bool, StoreError>> {
        delegate!(self, store => store.complete_now(operation, token, completion))
    }

    async fn release(&self, operation: &Operation, claim: &idempotency::store::Claim) -> Result<bool, StoreError> {
        delegate!(self, store => IdempotencyStore::release(store, operation, claim).await)
    }

    async fn watch(&self, operation: &Operation) -> Notifications {
        delegate!(self, store => IdempotencyStore::watch(store, operation).await)
    }

    fn reach(&self) -> Reach {
        delegate!(self, store => IdempotencyStore::reach(store))
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        delegate!(self, store => IdempotencyStore::add_to_shutdown(store, target));
    }
}

impl IdempotencyRegistry for AnyBackend {
    async fn inspect(&self, operation: &Operation) -> Result<Option<OperationStatus>, StoreError> {
        delegate!(self, store => IdempotencyRegistry::inspect(store, operation).await)
    }

    async fn forget(&self, status: &OperationStatus) -> Result<bool, StoreError> {
        delegate!(self, store => IdempotencyRegistry::forget(store, status).await)
    }

    async fn complete_unknown(
        &self,
        status: &OperationStatus,
        response: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        delegate!(self, store => store.complete_unknown(status, response, retention).await)
    }

    async fn list(&self, scope: Option<&Key>, from: Cursor, max: usize) -> Result<OperationPage, StoreError> {
        delegate!(self, store => IdempotencyRegistry::list(store, scope, from, max).await)
    }
}

impl CacheStore for AnyBackend {
    async fn get(&self, key: &CacheKey) -> Result<Option<Entry>, StoreError> {
        delegate!(self, store => CacheStore::get(store, key).await)
    }

    async fn claim(&self, key: &CacheKey, seen: &EntryId, claim: &cache::Claim) -> Result<cache::Claimed, StoreError> {
        delegate!(self, store => CacheStore::claim(store, key, seen, claim).await)
    }

    async fn renew(&self, key: &CacheKey, claim: &cache::Claim) -> Result<bool, StoreError> {
        delegate!(self, store => CacheStore::renew(store, key, claim).await)
    }

    async fn put(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<bool, StoreError> {
        delegate!(self, store => store.put(key, token, entry).await)
    }

    async fn release(&self, key: &CacheKey, token: &Token, mark: Option<Mark>) -> Result<bool, StoreError> {
        delegate!(self, store => CacheStore::release(store, key, token, mark).await)
    }

    async fn set(&self, key: &CacheKey, token: &Token, entry: &NewEntry) -> Result<(), StoreError> {
        delegate!(self, store => store.set(key, token, entry).await)
    }

    async fn invalidate(&self, key: &CacheKey) -> Result<(), StoreError> {
        delegate!(self, store => store.invalidate(key).await)
    }

    async fn expire(&self, key: &CacheKey) -> Result<(), StoreError> {
        delegate!(self, store => store.expire(key).await)
    }

    async fn generation(&self, tag: &CacheKey) -> Result<Option<Token>, StoreError> {
        delegate!(self, store => store.generation(tag).await)
    }

    async fn ensure_generation(&self, tag: &CacheKey, new: &Token, ttl: Duration) -> Result<Token, StoreError> {
        delegate!(self, store => store.ensure_generation(tag, new, ttl).await)
    }

    async fn invalidate_tag(&self, tag: &CacheKey) -> Result<(), StoreError> {
        delegate!(self, store => store.invalidate_tag(tag).await)
    }

    async fn watch(&self, key: &CacheKey) -> Notifications {
        delegate!(self, store => CacheStore::watch(store, key).await)
    }

    fn reach(&self) -> Reach {
        delegate!(self, store => CacheStore::reach(store))
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        delegate!(self, store => CacheStore::add_to_shutdown(store, target));
    }
}

impl ExistsFilterStore for AnyBackend {
    async fn status(&self, filter: &Key) -> Result<FilterStatus, StoreError> {
        delegate!(self, store => ExistsFilterStore::status(store, filter).await)
    }

    async fn read_block(&self, filter: &Key, version: &Token, block: u32) -> Result<Option<Block>, StoreError> {
        delegate!(self, store => ExistsFilterStore::read_block(store, filter, version, block).await)
    }

    async fn read_blocks(
        &self,
        filter: &Key,
        version: &Token,
        first: u32,
        count: u32,
    ) -> Result<Option<Vec<Block>>, StoreError> {
        delegate!(self, store => ExistsFilterStore::read_blocks(store, filter, version, first, count).await)
    }

    async fn allocate(&self, filter: &Key, version: &Token, layout: &Layout) -> Result<bool, StoreError> {
        delegate!(self, store => ExistsFilterStore::allocate(store, filter, version, layout).await)
    }

    async fn begin_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        version: &Token,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        delegate!(self, store => ExistsFilterStore::begin_build(store, filter, seen, version, ttl).await)
    }

    async fn add_bits(&self, filter: &Key, seen: &VersionIds, bits: &NewBits) -> Result<Added, StoreError> {
        delegate!(self, store => ExistsFilterStore::add_bits(store, filter, seen, bits).await)
    }

    async fn end_build(
        &self,
        filter: &Key,
        seen: &VersionIds,
        is_complete: bool,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        delegate!(self, store => ExistsFilterStore::end_build(store, filter, seen, is_complete, ttl).await)
    }

    fn reach(&self) -> Reach {
        delegate!(self, store => ExistsFilterStore::reach(store))
    }
}

impl DelayQueueStore for AnyBackend {
    async fn push(&self, queue: &QueueKey, jobs: &[NewJob], max_jobs: u64) -> Result<Vec<Admission>, StoreError> {
        delegate!(self, store => store.push(queue, jobs, max_jobs).await)
    }

    async fn claim(
        &self,
        queue: &QueueKey,
        finished: &[Ack],
        claim: &delay_queue::store::Claim,
    ) -> Result<Claimed, StoreError> {
        delegate!(self, store => DelayQueueStore::claim(store, queue, finished, claim).await)
    }

    async fn extend(&self, queue: &QueueKey, leases: &[JobLease], ttl: Duration) -> Result<Vec<Extended>, StoreError> {
        delegate!(self, store => store.extend(queue, leases, ttl).await)
    }

    async fn watch(&self, queue: &QueueKey, worker: WorkerId) -> Notifications {
        delegate!(self, store => DelayQueueStore::watch(store, queue, worker).await)
    }

    async fn get(&self, queue: &QueueKey, id: &JobId) -> Result<Option<StoredJob>, StoreError> {
        delegate!(self, store => DelayQueueStore::get(store, queue, id).await)
    }

    async fn cancel(&self, queue: &QueueKey, id: &JobId, keeps_unique: bool) -> Result<Cancelled, StoreError> {
        delegate!(self, store => store.cancel(queue, id, keeps_unique).await)
    }

    async fn reschedule(&self, queue: &QueueKey, id: &JobId, due: Due) -> Result<Changed, StoreError> {
        delegate!(self, store => store.reschedule(queue, id, due).await)
    }

    async fn replace(&self, queue: &QueueKey, id: &JobId, payload: &[u8]) -> Result<Changed, StoreError> {
        delegate!(self, store => store.replace(queue, id, payload).await)
    }

    async fn counts(&self, queue: &QueueKey) -> Result<Counts, StoreError> {
        delegate!(self, store => store.counts(queue).await)
    }

    async fn list(
        &self,
        queue: &QueueKey,
        state: State,
        skip: u64,
        limit: usize,
    ) -> Result<Vec<StoredJob>, StoreError> {
        delegate!(self, store => DelayQueueStore::list(store, queue, state, skip, limit).await)
    }

    async fn pause(&self, queue: &QueueKey, is_paused: bool) -> Result<(), StoreError> {
        delegate!(self, store => store.pause(queue, is_paused).await)
    }

    async fn purge(&self, queue: &QueueKey, limit: usize, keeps_unique: bool) -> Result<usize, StoreError> {
        delegate!(self, store => store.purge(queue, limit, keeps_unique).await)
    }

    async fn release_unique(&self, queue: &QueueKey, key: &Key) -> Result<bool, StoreError> {
        delegate!(self, store => store.release_unique(queue, key).await)
    }

    async fn replay(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        delegate!(self, store => store.replay(queue, ids).await)
    }

    async fn forget(&self, queue: &QueueKey, ids: &[JobId]) -> Result<Vec<bool>, StoreError> {
        delegate!(self, store => DelayQueueStore::forget(store, queue, ids).await)
    }

    fn reach(&self) -> Reach {
        delegate!(self, store => DelayQueueStore::reach(store))
    }

    fn identity(&self) -> Option<usize> {
        delegate!(self, store => DelayQueueStore::identity(store))
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        delegate!(self, store => DelayQueueStore::add_to_shutdown(store, target));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn malformed_urls_have_own_errors() {
        let error = |url: &'static str| async move {
            match connect(url).await.unwrap_err() {
                ConnectError::Config(error) => error,
                error => panic!("{url} should be rejected before a connection: {error:?}"),
            }
        };
        assert!(matches!(error("").await, ConfigError::InvalidUrl { .. }));
        assert!(matches!(error("localhost").await, ConfigError::InvalidUrl { .. }));
        for url in ["memory:8", "memory:?prefix=shop", "memory://?connections=3", "memory://localhost"] {
            let reason = "`memory:` takes no address and no parameters".to_owned();
            assert_eq!(error(url).await, ConfigError::InvalidUrl { reason }, "{url}");
        }
        assert_eq!(error("localhost:6379").await, ConfigError::UnknownScheme { scheme: "localhost".into() });
        assert_eq!(error("http://localhost/").await, ConfigError::UnknownScheme { scheme: "http".into() });
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn malformed_redis_url_hides_its_password() {
        for url in ["redis://:hunter2@", "redis://:hunter2@host:notaport", "redis://:hunter2@host/notadb", "redis://"] {
            let error = connect(url).await.unwrap_err();
            let ConnectError::Config(ConfigError::InvalidUrl { reason }) = &error else { panic!("{url}: {error:?}") };
            assert!(!reason.contains("hunter2"), "{reason}");
        }
    }
}
