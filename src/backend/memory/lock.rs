use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;

use super::MemoryBackend;
use crate::error::StoreError;
use crate::key::Key;
use crate::lock::{Acquired, Claim, LockKey, LockStore, Released, Renewal, Scope, Token, Wakeups};
use crate::lock::{Cursor, LockHolder, LockPage, LockRegistry, LockStatus, Seized};

/// More than threads would ask at once.
const SHARDS: usize = 16;

/// The leases of this process. What nobody holds and nobody waits for is not in here, but for leases that have run out and were not
/// met yet.
pub(super) struct LockTable {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    // The fence that was given out last, for whatever lock.
    fence: AtomicU64,
    len: AtomicUsize,
    capacity: usize,
}

#[derive(Default)]
struct Shard {
    locks: IndexMap<LockKey, Record>,
    // Where to look next for leases that have run out.
    hand: usize,
}

#[derive(Default)]
struct Record {
    // One, but for semaphores.
    holders: SmallVec<[Holder; 1]>,
    // For those who wait, if there are any.
    freed: Option<watch::Sender<()>>,
}

struct Holder {
    token: Token,
    since: Instant,
    ends: Instant,
    fence: u64,
    name: Option<Box<str>>,
}

impl LockTable {
    pub(super) fn new(capacity: usize) -> Self {
        // A program that was started later gives out larger fences.
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            hasher: RandomState::new(),
            shards: Default::default(),
            fence: AtomicU64::new(started.as_micros() as u64),
            len: AtomicUsize::new(0),
            capacity,
        }
    }

    /// A shard is changed in steps that do not panic, so what a poisoned lock guards is still whole.
    fn shard(&self, lock: &LockKey) -> MutexGuard<'_, Shard> {
        let shard = self.hasher.hash_one(lock) as usize % SHARDS;
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let mut shard = self.shard(lock);
        let now = Instant::now();
        if let Some(record) = shard.locks.get_mut(lock) {
            record.holders.retain(|holder| now < holder.ends);
            if let Some(holder) = record.holder(&claim.token) {
                holder.ends = now + claim.ttl;
                return Ok(Acquired::Granted { fence: holder.fence });
            }
            let soonest = record.holders.iter().map(|holder| holder.ends).min();
            if let Some(soonest) = soonest.filter(|_| record.holders.len() >= claim.permits as usize) {
                return Ok(Acquired::Busy { remaining: soonest - now });
            }
        }
        self.sweep(&mut shard, now);
        if !shard.locks.contains_key(lock) {
            if self.len.load(Ordering::Relaxed) >= self.capacity {
                return Err(StoreError::out_of_memory("more locks are held than the memory backend has room for"));
            }
            self.len.fetch_add(1, Ordering::Relaxed);
        }
        let fences = u64::from(claim.fences);
        let fence = self.fence.fetch_add(fences, Ordering::Relaxed) + 1;
        let record = shard.locks.entry(*lock).or_default();
        record.holders.push(Holder { token: claim.token, since: now, ends: now + claim.ttl, fence, name: None });
        Ok(Acquired::Granted { fence })
    }

    /// Forgets a couple of leases that have run out.
    fn sweep(&self, shard: &mut Shard, now: Instant) {
        for _ in 0..2 {
            shard.hand = if shard.hand + 1 < shard.locks.len() { shard.hand + 1 } else { 0 };
            let record = shard.locks.get_index_mut(shard.hand);
            if record.is_some_and(|(_, record)| record.is_free(now) && !record.is_wanted()) {
                shard.locks.swap_remove_index(shard.hand);
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn renew(&self, renewal: &Renewal) -> bool {
        let mut shard = self.shard(&renewal.lock);
        let now = Instant::now();
        let holder = shard.locks.get_mut(&renewal.lock).and_then(|record| record.holder(&renewal.token));
        let Some(holder) = holder.filter(|holder| now < holder.ends) else { return false };
        holder.ends = now + renewal.ttl;
        true
    }

    fn release(&self, lock: &LockKey, token: &Token) -> Released {
        let mut shard = self.shard(lock);
        let Some(record) = shard.locks.get_mut(lock) else { return Released::default() };
        let Some(place) = record.holders.iter().position(|holder| holder.token == *token) else {
            return Released::default();
        };
        let holder = record.holders.remove(place);
        let is_wanted = record.is_wanted();
        if is_wanted && let Some(freed) = &record.freed {
            freed.send_replace(());
        }
        if !is_wanted && record.holders.is_empty() {
            shard.locks.swap_remove(lock);
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        Released { was_held: Instant::now() < holder.ends, is_wanted }
    }

    fn name(&self, lock: &LockKey, token: &Token, name: &str) {
        if let Some(holder) = self.shard(lock).locks.get_mut(lock).and_then(|record| record.holder(token)) {
            holder.name = Some(name.into());
        }
    }

    fn inspect(&self, lock: &LockKey) -> LockStatus {
        let shard = self.shard(lock);
        shard.locks.get(lock).map_or_else(
            || LockStatus { lock: *lock, last_fence: 0, held_by: 0, holders: Vec::new() },
            |record| self.status(lock, record, Instant::now()),
        )
    }

    fn status(&self, lock: &LockKey, record: &Record, now: Instant) -> LockStatus {
        let held = || record.holders.iter().filter(|holder| now < holder.ends);
        let holders = held().take(LockStatus::MAX_HOLDERS).map(|holder| LockHolder {
            fence: holder.fence,
            remaining: holder.ends - now,
            held_for: now - holder.since,
            name: holder.name.as_deref().map(str::to_owned),
        });
        // One counter for all locks.
        let last_fence = self.fence.load(Ordering::Relaxed);
        LockStatus { lock: *lock, last_fence, held_by: held().count(), holders: holders.collect() }
    }

    fn seize(&self, lock: &LockKey) -> Seized {
        let mut shard = self.shard(lock);
        let now = Instant::now();
        let mut holders = 0;
        if let Some(record) = shard.locks.get_mut(lock) {
            holders = record.holders.iter().filter(|holder| now < holder.ends).count();
            record.holders.clear();
            if record.is_wanted() {
                if let Some(freed) = &record.freed {
                    freed.send_replace(());
                }
            } else {
                shard.locks.swap_remove(lock);
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
        Seized { holders, fence: self.fence.load(Ordering::Relaxed) }
    }

    /// From the last place to the first: what takes the place of something that is removed was seen already.
    fn list(&self, namespace: &Key, from: Cursor, most: usize) -> LockPage {
        let mut page = LockPage { locks: Vec::new(), next: None };
        let part = from.part as usize;
        let Some(shard) = self.shards.get(part) else { return page };
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Zero is the beginning of a part, and so its end.
        let start = if from.position == 0 { shard.locks.len() } else { shard.locks.len().min(from.position as usize) };
        let end = start.saturating_sub(most);
        for (lock, record) in (end..start).rev().filter_map(|place| shard.locks.get_index(place)) {
            if lock.namespace() == namespace && !record.is_free(now) {
                page.locks.push(self.status(lock, record, now));
            }
        }
        page.next = if end > 0 {
            Some(Cursor { position: end as u64, ..from })
        } else {
            (part + 1 < SHARDS).then_some(Cursor { part: from.part + 1, position: 0 })
        };
        page
    }

    fn watch(self: &Arc<Self>, lock: &LockKey) -> Wakeups {
        let mut shard = self.shard(lock);
        if !shard.locks.contains_key(lock) {
            self.len.fetch_add(1, Ordering::Relaxed);
        }
        let freed = shard.locks.entry(*lock).or_default().freed.get_or_insert_with(|| watch::Sender::new(()));
        Wakeups::new(freed.subscribe(), Arc::new(Watcher { table: Arc::clone(self), lock: *lock }))
    }
}

impl Record {
    fn holder(&mut self, token: &Token) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| holder.token == *token)
    }

    fn is_free(&self, now: Instant) -> bool {
        self.holders.iter().all(|holder| holder.ends <= now)
    }

    fn is_wanted(&self) -> bool {
        self.freed.as_ref().is_some_and(|freed| freed.receiver_count() > 0)
    }
}

/// Cleans up behind somebody who has waited.
struct Watcher {
    table: Arc<LockTable>,
    lock: LockKey,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut shard = self.table.shard(&self.lock);
        if shard.locks.get(&self.lock).is_some_and(|record| record.holders.is_empty() && !record.is_wanted()) {
            shard.locks.swap_remove(&self.lock);
            self.table.len.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl LockStore for MemoryBackend {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        self.inner.locks.acquire(lock, claim)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        Ok(renewals.iter().map(|renewal| self.inner.locks.renew(renewal)).collect())
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        Ok(self.inner.locks.release(lock, token))
    }

    async fn watch(&self, lock: &LockKey) -> Wakeups {
        self.inner.locks.watch(lock)
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        self.inner.locks.name(lock, token, name);
        Ok(())
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }
}

impl LockRegistry for MemoryBackend {
    async fn inspect(&self, lock: &LockKey) -> Result<LockStatus, StoreError> {
        Ok(self.inner.locks.inspect(lock))
    }

    async fn seize(&self, lock: &LockKey) -> Result<Seized, StoreError> {
        Ok(self.inner.locks.seize(lock))
    }

    async fn list(&self, namespace: &Key, from: Cursor, most: usize) -> Result<LockPage, StoreError> {
        Ok(self.inner.locks.list(namespace, from, most))
    }
}

impl MemoryBackend {
    /// How many locks are held or waited for at the moment, those included whose lease has run out and that were not met yet.
    #[must_use]
    pub fn locks(&self) -> usize {
        self.inner.locks.len.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn claim(ttl_ms: u64) -> Claim {
        Claim { token: Token::random().unwrap(), ttl: Duration::from_millis(ttl_ms), fences: 1, permits: 1 }
    }

    #[tokio::test(start_paused = true)]
    async fn what_runs_out_is_forgotten_as_others_come_and_what_is_held_never() {
        let table = LockTable::new(100);
        let held = LockKey::new("test", "held");
        table.acquire(&held, &claim(1_000_000)).unwrap();
        for i in 0..10_000_u32 {
            table.acquire(&LockKey::new("test", i), &claim(10)).unwrap();
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(table.len.load(Ordering::Relaxed) <= 100);
        }
        let answer = table.acquire(&held, &claim(10)).unwrap();
        assert!(matches!(answer, Acquired::Busy { .. }), "{answer:?}");
        let counted: usize = table.shards.iter().map(|shard| shard.lock().unwrap().locks.len()).sum();
        assert_eq!(table.len.load(Ordering::Relaxed), counted);
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_room_for_so_many_and_no_more() {
        let table = LockTable::new(3);
        let claims: Vec<_> = (0..3_u32).map(|i| (LockKey::new("test", i), claim(1_000))).collect();
        for (lock, claim) in &claims {
            table.acquire(lock, claim).unwrap();
        }
        assert!(table.acquire(&LockKey::new("test", "x"), &claim(10)).unwrap_err().is_out_of_memory());
        table.release(&claims[0].0, &claims[0].1.token);
        table.acquire(&LockKey::new("test", "x"), &claim(10)).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_left_of_those_who_have_waited() {
        let table = Arc::new(LockTable::new(3));
        let lock = LockKey::new("test", "a");
        let (one, other) = (table.watch(&lock), table.watch(&lock));
        drop(one);
        assert_eq!(table.len.load(Ordering::Relaxed), 1);
        drop(other);
        assert_eq!(table.len.load(Ordering::Relaxed), 0);
    }
}
