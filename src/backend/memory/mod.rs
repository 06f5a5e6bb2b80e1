//! Counts, leases, operations, jobs and cached values in this process.

mod cache;
mod cache_table;
mod clock;
mod counts;
mod delay_queue;
mod exists_filter;
mod filter_table;
mod idempotency;
mod lock;
mod lock_table;
mod operation_table;
mod queue;
mod queue_table;
mod rate_limit;
mod shard;
mod shares;
mod slot;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use siphasher::sip::{SipHasher13, SipHasher24};

use self::cache_table::CacheTable;
use self::clock::Clock;
use self::filter_table::FilterTable;
use self::lock_table::LockTable;
use self::operation_table::OperationTable;
use self::queue_table::QueueTable;
use self::shard::Shard;
use crate::key::Key;
use crate::rate_limit::{Policy, Quota};
use crate::store::shutdown::{ShutdownRegistry, ShutdownReport};

/// Keeps all state in this process: no server, no background task, and the same decisions as with Redis.
///
/// Its scope is this process. Ten replicas with a quota of 100 admit 1,000 together; use Redis where that matters. The backend logs its
/// scope when it is created: at INFO if a URL [selected](crate::connect) it, and at DEBUG otherwise. Clones share all state; a second
/// backend in the same process shares none of it.
///
/// # Memory
///
/// The backend keeps at most [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY) keys by default, at about 100 bytes each. A key is stored once
/// for each policy that counts it. The duration of a check depends neither on the number of keys nor on the number of policies.
///
/// A key counts as one additional key for every two limits of its policy, and for every eight requests that its sliding log has space for
/// (16 bytes each). A log of 10,000 requests counts as 1,251 keys.
///
/// New keys remove keys whose counts expired more than a second ago. If the backend is still full, it samples a few keys, and evicts the
/// key that used the smallest share of its quota. So a flood of new keys evicts its own keys, and limited clients stay limited.
/// Each backend hashes keys with its own secret (SipHash), so clients cannot choose keys that collide.
///
/// Locks do not share this space. The backend can hold as many locks as keys, and never evicts a held lock. If there is no space for
/// another lock, the error is [out of memory](crate::StoreError::is_out_of_memory). The records of one idempotency caller have the same
/// capacity, and so have the jobs of one queue. A response or job may have 1 KiB on average.
///
/// A single caller with records, or a single queue with jobs, may use this whole capacity. All callers together have twice the capacity,
/// and so do all queues. A caller or queue gets an out-of-memory error if it would use more than it leaves free for the others. So none can
/// block the others. For example, next to a caller with 100,000 records, a second one has space for 50,000.
///
/// The cached values of all caches also have this capacity, with 1 KiB on average for a value. If there is no space for another one, values
/// that expire soon are evicted. A value of more than a sixteenth of this space is not stored (6 MiB by default). The tags in use have this
/// capacity, too. If it is exceeded, the backend forgets many tags, and the entries with these tags are loaded again.
///
/// The dead jobs of all queues together may use half of the capacity. If they use more, a push without enough space removes some of them:
/// the oldest dead jobs of the queue with the most.
///
/// All versions of [exists filters](crate::cache::exists_filter) together may have 1 KiB for each key of the capacity. A rebuild without
/// enough space fails with an out-of-memory error.
///
/// # Time
///
/// The backend uses tokio's clock, so a test that pauses the clock controls every window:
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limiter, MemoryBackend, Policy, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::StoreError> {
/// let limiter = Limiter::new(MemoryBackend::new(), Policy::new("daily", Quota::per_day(1).fixed_window()));
/// assert!(limiter.check("alice").await?.is_allowed());
/// assert!(!limiter.check("alice").await?.is_allowed());
///
/// tokio::time::advance(Duration::from_secs(86_400)).await;
/// assert!(limiter.check("alice").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MemoryBackend {
    inner: Arc<Inner>,
}

struct Inner {
    // The shards count in microseconds of this clock.
    clock: Clock,
    // The secret of the hashes of keys.
    secret: (u64, u64),
    shards: Box<[CachePadded]>,
    capacity: usize,
    // The total weight of all counts. One budget for all shards, since one long log may exceed the equal share of its shard.
    weight: AtomicUsize,
    locks: Arc<LockTable>,
    // This table never has leases. It only notifies the holder of a lock when a waiter asks for the lock.
    asks: Arc<LockTable>,
    operations: Arc<OperationTable>,
    queues: QueueTable,
    cache: Arc<CacheTable>,
    filters: FilterTable,
    shutdown: ShutdownRegistry,
}

/// A shard in its own cache lines, so that processors that lock adjacent shards do not slow each other down.
#[derive(Default)]
#[repr(align(64))]
struct CachePadded(Mutex<Shard>);

const SCOPE: &str = "tollgate counts in memory: limits, locks, idempotency and jobs hold within this process only";

/// The maximum number of shards. On most machines, fewer threads use the backend at once.
const MAX_SHARDS: usize = 64;
/// With fewer keys than this per shard, shards cost more than they save.
const MIN_SHARD: usize = 64;
/// How many counts of its own shard a growing count may evict. If that is not enough, all shards evict.
const OWN_EVICTIONS: usize = 4;

impl MemoryBackend {
    /// The maximum number of keys by default.
    pub const DEFAULT_CAPACITY: usize = 100_000;
    /// The longest duration of a block.
    const MAX_BLOCK: Duration = Quota::MAX_WINDOW;

    /// An empty backend that keeps at most [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY) keys.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(Self::DEFAULT_CAPACITY)
    }

    /// An empty backend that keeps at most `keys` keys, and at least one. Long logs reduce the number.
    #[must_use]
    pub fn with_capacity(keys: usize) -> Self {
        // The program chose this backend explicitly, so DEBUG is enough.
        tracing::debug!("{SCOPE}");
        Self::build(keys)
    }

    /// Like [`new`](Self::new), for a URL. Logs at INFO, since the URL may be wrong.
    pub(super) fn chosen() -> Self {
        tracing::info!("{SCOPE}");
        Self::build(Self::DEFAULT_CAPACITY)
    }

    /// Like [`new`](Self::new) without a log line, for limits that Redis usually shares.
    pub(crate) fn fallback() -> Self {
        Self::build(Self::DEFAULT_CAPACITY)
    }

    fn build(keys: usize) -> Self {
        let fitting = (keys / MIN_SHARD).clamp(1, MAX_SHARDS);
        let random = RandomState::new();
        let shards = if fitting.is_power_of_two() { fitting } else { fitting.next_power_of_two() / 2 };
        Self {
            inner: Arc::new(Inner {
                clock: Clock::new(),
                secret: (random.hash_one(0), random.hash_one(1)),
                shards: (0..shards).map(|_| CachePadded::default()).collect(),
                capacity: keys.max(1),
                weight: AtomicUsize::new(0),
                locks: Arc::new(LockTable::new(keys.max(1))),
                asks: Arc::new(LockTable::new(keys.max(1))),
                operations: Arc::new(OperationTable::new(keys.max(1))),
                queues: QueueTable::new(keys.max(1)),
                cache: Arc::new(CacheTable::new(keys.max(1))),
                filters: FilterTable::new(keys.max(1)),
                shutdown: ShutdownRegistry::default(),
            }),
        }
    }

    /// The current number of keys, including expired keys that were not removed yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Whether the backend has no key of a rate limit. Locks, records, jobs and cached values do not count.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Closes everything that was made from this backend, waits for it, and returns what was left: see
    /// [`backend`](crate::backend#shutdown). Takes no longer than `deadline`.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        self.inner.shutdown.shutdown(deadline).await
    }

    /// The time in microseconds that rate limits use.
    #[inline]
    fn now_us(&self) -> u64 {
        self.inner.clock.now_us()
    }

    /// The hash of a key under a policy, and the index of the shard that holds its counts.
    #[inline]
    fn locate(&self, policy: &Policy, key: &Key) -> (u64, usize) {
        let hash = self.hash(policy, key);
        // The map inside the shard uses the low bits and the highest seven bits, so the index uses bits between them.
        (hash, (hash >> 48) as usize & (self.inner.shards.len() - 1))
    }

    // Long keys use another variant of SipHash. So the compiler specializes the code of the first variant for the fixed length of most
    // keys. `counts_hash` hashes the policy with another secret, so an XOR combines the two hashes.
    #[inline]
    fn hash(&self, policy: &Policy, key: &Key) -> u64 {
        let (first, second) = self.inner.secret;
        let hash = match key.as_least_hashed() {
            Some(bytes) => SipHasher13::new_with_keys(first, second).hash(bytes),
            None => SipHasher24::new_with_keys(first, second).hash(key.as_hashed()),
        };
        hash ^ policy.counts_hash()
    }

    /// Read the clock after this call, so that time does not go back from one holder of the lock to the next. If the clock was read before,
    /// use the time of the last update if that is later.
    #[inline]
    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        lock(&self.inner.shards[shard])
    }

    /// Adds to the total weight after a count grew by `added`. If the backend is full, evicts a few other counts of the shard.
    fn grew(&self, shard: &mut Shard, bucket: usize, added: usize, now_us: u64) {
        self.inner.weight.fetch_add(added, Ordering::Relaxed);
        for _ in 0..OWN_EVICTIONS {
            if self.overweight() == 0 || shard.len() < 2 {
                return;
            }
            self.record_removed(shard.evict_one(Some(bucket), now_us));
        }
    }

    fn record_removed(&self, removed: usize) {
        self.inner.weight.fetch_sub(removed, Ordering::Relaxed);
    }

    /// By how much the total weight exceeds the capacity.
    fn overweight(&self) -> usize {
        self.inner.weight.load(Ordering::Relaxed).saturating_sub(self.inner.capacity)
    }

    /// Evicts counts until the rest fits, the same number from each shard: a growing log must not evict only the counts of its own shard.
    /// Locks one shard at a time. At least one count stays in `shard_index`, the shard of the newest count.
    fn make_room(&self, shard_index: usize, now_us: u64) {
        let shards = &self.inner.shards;
        while self.overweight() > 0 {
            let share = self.overweight().div_ceil(shards.len());
            let mut forgotten = 0;
            for step in 1..=shards.len() {
                let at = (shard_index + step) % shards.len();
                let mut shard = lock(&shards[at]);
                shard.shrink(|policy, key| self.hash(policy, key));
                for _ in 0..share {
                    if self.overweight() == 0 || shard.len() <= usize::from(at == shard_index) {
                        break;
                    }
                    self.record_removed(shard.evict_one(None, now_us));
                    forgotten += 1;
                }
            }
            // The loop ends when the rest fits, or when no count is left to evict.
            if forgotten == 0 {
                return;
            }
        }
    }
}

/// No code panics in the middle of a change, so a poisoned shard is intact.
#[inline]
fn lock(CachePadded(shard): &CachePadded) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::rate_limit::store::RateLimitStore;

    impl MemoryBackend {
        /// The number of targets of the shutdown.
        pub(crate) fn shutdown_targets(&self) -> usize {
            self.inner.shutdown.len()
        }

        /// The total weight, computed from all counts.
        fn weighed(&self) -> usize {
            self.inner.shards.iter().map(|shard| lock(shard).weight()).sum()
        }
    }

    /// Regression: after a reload of a file of rules, known keys missed the fast path until their counts expired.
    #[tokio::test]
    async fn new_equal_policy_takes_fast_path_from_second_check() {
        let (backend, key) = (MemoryBackend::new(), Key::from("alice"));
        let [old, new] = [(), ()].map(|()| Policy::new("api", Quota::per_hour(10).token_bucket()));
        let is_fast = |policy: &Policy| {
            let (hash, shard_index) = backend.locate(policy, &key);
            let mut shard = backend.lock(shard_index);
            let now = backend.now_us();
            shard
                .find(hash, |slot| slot.is(policy, &key))
                .is_some_and(|slot| slot.check_only_limit(policy, 0, now).is_some())
        };
        assert!(backend.check(&old, &key, 1).await.unwrap().is_allowed());
        assert!(is_fast(&old) && !is_fast(&new));
        // A peek changes nothing.
        assert_eq!(backend.peek(&new, &key, 1).await.unwrap().remaining(), Some(9));
        assert!(is_fast(&old) && !is_fast(&new));
        assert_eq!(backend.check(&new, &key, 1).await.unwrap().remaining(), Some(8));
        assert!(is_fast(&new));
    }

    #[test]
    fn hashes_are_distinct_and_secret_for_keys_of_all_lengths() {
        let keys: Vec<_> = (0..=Key::MAX_LEN).map(|len| Key::from("k".repeat(len))).collect();
        let policy = Policy::new("api", Quota::per_hour(10).token_bucket());
        let hashes =
            |backend: &MemoryBackend| keys.iter().map(|key| backend.hash(&policy, key)).collect::<HashSet<_>>();
        let (one, other) = (MemoryBackend::new(), MemoryBackend::new());
        assert_eq!(hashes(&one).len(), keys.len());
        assert_eq!(hashes(&one), hashes(&one.clone()));
        assert!(hashes(&one).is_disjoint(&hashes(&other)));
    }

    #[test]
    fn policies_have_distinct_hashes_for_one_key() {
        let (backend, quota) = (MemoryBackend::new(), Quota::per_hour(10));
        let hash = |policy: &Policy| backend.hash(policy, &Key::GLOBAL);
        let names: Vec<_> =
            (0..1_000).map(|tenant| Policy::new(format!("tenant-{tenant}"), quota.token_bucket())).collect();
        assert_eq!(names.iter().map(hash).collect::<HashSet<_>>().len(), names.len());
        // Policies that share counts have the same hash. A policy with another algorithm has another one.
        let [bucket, equal, larger, window] =
            [quota.token_bucket(), quota.token_bucket(), Quota::per_hour(20).token_bucket(), quota.fixed_window()]
                .map(|limit| hash(&Policy::new("api", limit)));
        assert!(bucket == equal && bucket == larger && bucket != window);
    }

    proptest! {
        #[test]
        fn total_weight_matches_counts_and_stays_within_capacity(
            capacity in 1_usize..700,
            steps in prop::collection::vec((0_u32..90, 0_u8..20, 1_u64..40, 0_u64..400), 1..400),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let backend = MemoryBackend::with_capacity(capacity);
                let fixed = Policy::new("fixed", Quota::per_second(100).fixed_window());
                let log = Policy::new("log", Quota::per_second(5_000).sliding_log().unwrap());
                for (key, verb, turns, pause) in steps {
                    let key = Key::from(key);
                    match verb {
                        0 => backend.reset(&log, &key).await.unwrap(),
                        1 => drop(backend.peek(&log, &key, 1).await.unwrap()),
                        2..10 => drop(backend.check(&fixed, &key, turns).await.unwrap()),
                        _ => {
                            for _ in 0..turns * 5 {
                                let _ = backend.check(&log, &key, 1).await.unwrap();
                            }
                        }
                    }
                    tokio::time::advance(std::time::Duration::from_millis(pause)).await;
                    let weight = backend.inner.weight.load(Ordering::Relaxed);
                    prop_assert_eq!(weight, backend.weighed());
                    // A single log may weigh more than the capacity.
                    prop_assert!(weight <= capacity || backend.len() == 1, "{} of {}", weight, capacity);
                }
                Ok(())
            })?;
        }
    }
}
