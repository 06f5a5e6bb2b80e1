//! Counts, leases, operations and jobs in this process.

mod clock;
mod delay_queue;
mod idempotency;
mod lock;
mod queue;
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

use self::clock::Clock;
use self::delay_queue::QueueTable;
use self::idempotency::OperationTable;
use self::lock::LockTable;
use self::shard::Shard;
use crate::key::Key;
use crate::rate_limit::{Policy, Quota};

/// Keeps everything in this process: no server, no background task, and the same decisions as Redis would give.
///
/// Its scope is this process. Ten replicas with a quota of 100 admit 1,000 between them; use Redis where that matters. The log says so at debug level
/// where a backend is made, and where a URL [chose](crate::connect) it at info level.
/// Clones share all counts.
///
/// # Memory
///
/// Bounded: at most [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY) keys unless told otherwise, which take some 100 bytes each. A key that several
/// policies count is kept once for each, and a check takes the same time however many these are. A key
/// counts as one more for every two limits of its policy, and for every eight requests that a sliding log has room for, 16 bytes each: a
/// log of 10,000 requests takes the room of 1,251 keys. Keys whose count ran out a second ago are dropped as new ones come. When there is still no room, a
/// few keys are looked at and the least valuable one is forgotten: the one that has used the smallest share of its quota. So
/// a flood of new keys pushes out its own kind, and the clients that are being limited stay limited.
///
/// Locks are kept apart from counts: as many of them can be held as keys are kept, and a held one is never forgotten. One more is an
/// error that is [out of memory](crate::StoreError::is_out_of_memory). So are the records of idempotency, with 1 KiB of room for the answer
/// of each on the average; and the jobs of all queues, with 1 KiB for each.
///
/// A caller whose requests have records, or a queue, may have as many of them as keys are kept while it is alone. All callers together have twice that room, and
/// so do all queues. Each of them is refused, as out of memory, once it has as much as is left for the others, so one that fills its own share refuses no
/// other: beside a caller with 100,000 records the next one has room for 50,000. Once dead jobs are more than half of what a queue alone may have they make
/// way for new ones, of whatever queue: the oldest of the queue that has the most of them.
///
/// # Time
///
/// Time is tokio's clock, so a test that pauses it moves every window:
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
///
/// Keys are hashed with a secret of the process (SipHash), so nobody can choose keys that collide.
#[derive(Clone)]
pub struct MemoryBackend {
    inner: Arc<Inner>,
}

struct Inner {
    // Microseconds by this are what the shards see.
    clock: Clock,
    // What keys are hashed with.
    secret: (u64, u64),
    shards: Box<[CachePadded]>,
    capacity: usize,
    // The sum of the weights of all counts. One budget for all shards, since one long log may outweigh a fair share of it.
    weight: AtomicUsize,
    locks: Arc<LockTable>,
    // Nothing is held here: for holders who listen to those who ask for their locks.
    asks: Arc<LockTable>,
    operations: Arc<OperationTable>,
    queues: QueueTable,
}

/// A shard in cache lines of its own, so that processors that lock neighbours do not wait for each other.
#[derive(Default)]
#[repr(align(64))]
struct CachePadded(Mutex<Shard>);

const SCOPE: &str = "tollgate counts in memory: limits, locks, idempotency and jobs hold within this process only";

/// More than any machine has cores that would all ask at once.
const MAX_SHARDS: usize = 64;
/// With fewer keys than this to a shard, shards cost more than they save.
const MIN_SHARD: usize = 64;
/// How many counts are forgotten for another one in its own shard before all shards have to give.
const OWN_SHARE: usize = 4;

impl MemoryBackend {
    /// How many keys are kept unless told otherwise.
    pub const DEFAULT_CAPACITY: usize = 100_000;
    /// The longest time that a key is blocked for at once.
    const MAX_BLOCK: Duration = Quota::MAX_WINDOW;

    /// An empty backend that keeps at most [`DEFAULT_CAPACITY`](Self::DEFAULT_CAPACITY) keys.
    #[must_use]
    pub fn new() -> Self {
        Self::with_capacity(Self::DEFAULT_CAPACITY)
    }

    /// An empty backend that keeps at most `keys` keys, or as many fewer as long logs leave room for, and at least one.
    #[must_use]
    pub fn with_capacity(keys: usize) -> Self {
        // Whoever wrote this chose it, so nobody has to read of it.
        tracing::debug!("{SCOPE}");
        Self::build(keys)
    }

    /// The same as [`new`](Self::new), where a URL chose it, which may be another one than somebody meant.
    pub(super) fn chosen() -> Self {
        tracing::info!("{SCOPE}");
        Self::build(Self::DEFAULT_CAPACITY)
    }

    /// The same as [`new`](Self::new) without a log line, for limits that Redis shares as a rule.
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
            }),
        }
    }

    /// How many keys are kept at the moment, those included whose count has run out and that were not dropped yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Whether no key is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The time in microseconds that rate limits use.
    #[inline]
    fn now_us(&self) -> u64 {
        self.inner.clock.now_us()
    }

    /// The hash of a key under a policy, and the number of the shard that holds its counts.
    #[inline]
    fn locate(&self, policy: &Policy, key: &Key) -> (u64, usize) {
        let hash = self.hash(policy, key);
        // The map inside the shard uses the low bits, and the highest ones.
        (hash, (hash >> 48) as usize & (self.inner.shards.len() - 1))
    }

    // Long keys by another variant, so that this one is compiled for the length of nearly all. The policy is hashed already, with another secret.
    #[inline]
    fn hash(&self, policy: &Policy, key: &Key) -> u64 {
        let (first, second) = self.inner.secret;
        let hash = match key.as_least_hashed() {
            Some(bytes) => SipHasher13::new_with_keys(first, second).hash(bytes),
            None => SipHasher24::new_with_keys(first, second).hash(key.as_hashed()),
        };
        hash ^ policy.counts_hash()
    }

    /// Read the clock only after this: whoever holds the lock has to be no earlier than who held it before. A reading from before it has to be held
    /// against the last update.
    #[inline]
    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        lock(&self.inner.shards[shard])
    }

    /// Accounts for a count that weighs `added` more than before, and forgets a few others in its shard if there is no room.
    fn grew(&self, shard: &mut Shard, place: usize, added: usize, now_us: u64) {
        self.inner.weight.fetch_add(added, Ordering::Relaxed);
        for _ in 0..OWN_SHARE {
            if self.overweight() == 0 || shard.len() < 2 {
                return;
            }
            self.shrank(shard.forget_one(Some(place), now_us));
        }
    }

    fn shrank(&self, removed: usize) {
        self.inner.weight.fetch_sub(removed, Ordering::Relaxed);
    }

    /// By how much more is kept than there is room for.
    fn overweight(&self) -> usize {
        self.inner.weight.load(Ordering::Relaxed).saturating_sub(self.inner.capacity)
    }

    /// Forgets counts all over until the rest fits, the same number in each shard: a log that grows must not push out
    /// whoever happens to share its own. One lock at a time. At least one count stays where the newest is, in `home`.
    fn make_room(&self, home: usize, now_us: u64) {
        let shards = &self.inner.shards;
        while self.overweight() > 0 {
            let share = self.overweight().div_ceil(shards.len());
            let mut forgotten = 0;
            for step in 1..=shards.len() {
                let at = (home + step) % shards.len();
                let mut shard = lock(&shards[at]);
                shard.shrink(|policy, key| self.hash(policy, key));
                for _ in 0..share {
                    if self.overweight() == 0 || shard.len() <= usize::from(at == home) {
                        break;
                    }
                    self.shrank(shard.forget_one(None, now_us));
                    forgotten += 1;
                }
            }
            // Ends with nothing too much or nothing left to forget, since each turn forgets something.
            if forgotten == 0 {
                return;
            }
        }
    }
}

/// A shard is changed in steps that do not panic, so what a poisoned lock guards is still whole.
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
    use crate::rate_limit::RateLimitStore;

    impl MemoryBackend {
        /// The weights of all counts, added up anew.
        fn weighed(&self) -> usize {
            self.inner.shards.iter().map(|shard| lock(shard).weight()).sum()
        }
    }

    /// As the rules of a file are when they are read again: no key that was known had it until its counts had run out.
    #[tokio::test]
    async fn an_equal_policy_that_was_made_anew_takes_the_short_way_from_its_second_check_on() {
        let (backend, key) = (MemoryBackend::new(), Key::from("alice"));
        let [old, new] = [(), ()].map(|()| Policy::new("api", Quota::per_hour(10).token_bucket()));
        let is_short = |policy: &Policy| {
            let (hash, home) = backend.locate(policy, &key);
            let mut shard = backend.lock(home);
            let now = backend.now_us();
            shard
                .find(hash, |slot| slot.is(policy, &key))
                .is_some_and(|slot| slot.check_only_limit(policy, 0, now).is_some())
        };
        assert!(backend.check(&old, &key, 1).await.unwrap().is_allowed());
        assert!(is_short(&old) && !is_short(&new));
        // Who only looks changes nothing.
        assert_eq!(backend.peek(&new, &key, 1).await.unwrap().remaining(), Some(9));
        assert!(is_short(&old) && !is_short(&new));
        assert_eq!(backend.check(&new, &key, 1).await.unwrap().remaining(), Some(8));
        assert!(is_short(&new));
    }

    #[test]
    fn keys_of_all_lengths_have_hashes_of_their_own_which_others_cannot_know() {
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
    fn policies_have_hashes_of_their_own_for_one_key() {
        let (backend, quota) = (MemoryBackend::new(), Quota::per_hour(10));
        let hash = |policy: &Policy| backend.hash(policy, &Key::GLOBAL);
        let names: Vec<_> =
            (0..1_000).map(|tenant| Policy::new(format!("tenant-{tenant}"), quota.token_bucket())).collect();
        assert_eq!(names.iter().map(hash).collect::<HashSet<_>>().len(), names.len());
        // Policies that share counts have one hash, and a policy with another algorithm has another one.
        let [bucket, equal, larger, window] =
            [quota.token_bucket(), quota.token_bucket(), Quota::per_hour(20).token_bucket(), quota.fixed_window()]
                .map(|limit| hash(&Policy::new("api", limit)));
        assert!(bucket == equal && bucket == larger && bucket != window);
    }

    proptest! {
        #[test]
        fn the_books_agree_with_what_is_kept_and_stay_within_the_budget(
            capacity in 1_usize..700,
            steps in prop::collection::vec((0_u32..90, 0_u8..20, 1_u32..40, 0_u64..400), 1..400),
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
                    // One log alone may weigh more than everything that it pushed out.
                    prop_assert!(weight <= capacity || backend.len() == 1, "{} of {}", weight, capacity);
                }
                Ok(())
            })?;
        }
    }
}
