//! The locks of a memory backend.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::StoreError;
use crate::identity_hasher::IdentityBuildHasher;
use crate::key::Key;
use crate::lock::store::{Acquired, Claim, Notifications, Queueing, Released, Renewal, Token};
use crate::lock::{Cursor, ForceReleased, LockHolder, LockKey, LockKind, LockPage, LockStatus};

/// More shards than threads that usually lock one at the same time.
const SHARDS: usize = 16;
/// The minimum time between two sweeps over all locks, for each lock in the table. A sweep takes a small part of it.
const SWEEP_INTERVAL_PER_LOCK: Duration = Duration::from_nanos(200);

/// The leases of one memory backend and its clones. A lock without holder and waiter has no entry, except for expired leases that were not
/// swept yet.
pub(super) struct LockTable {
    shards: [Mutex<Shard>; SHARDS],
    // When the table was created, and the same time by the system clock in us since 1970.
    since: Instant,
    since_us: u64,
    len: AtomicUsize,
    capacity: usize,
    // The last sweep over all locks. Such a sweep starts when the table is full.
    last_sweep: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Shard {
    locks: IndexMap<LockKey, Record, IdentityBuildHasher>,
    // The last fence of any lock in the shard. It is not kept for each lock, since a free lock has no entry.
    fence: u64,
    // Where to look next for expired leases.
    sweep_cursor: usize,
}

#[derive(Default)]
struct Record {
    // One, except for semaphores and readers.
    holders: SmallVec<[Holder; 1]>,
    held_as: LeaseMode,
    // Notifies waiters outside of the queue, if there are any.
    freed: Option<watch::Sender<()>>,
    queue: Option<Box<FairQueue>>,
}

/// How a lock is held. Leases of different modes never hold a lock together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LeaseMode {
    #[default]
    Exclusive,
    Semaphore,
    ExclusiveQueued,
    SemaphoreQueued,
    Reader,
    Writer,
}

/// The fair queue of a lock.
#[derive(Default)]
struct FairQueue {
    by_arrival: BTreeMap<u64, FairPosition>,
    arrivals: HashMap<Token, u64>,
    // When each position expires, unless its waiter calls again.
    ends: BTreeSet<(Instant, u64)>,
    last_arrival: u64,
    // Notifies queued waiters when they may acquire the lease.
    notifiers: HashMap<Token, watch::Sender<()>>,
}

struct FairPosition {
    token: Token,
    mode: LeaseMode,
    ends: Instant,
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
        let since_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let shard = || Mutex::new(Shard { fence: since_us, ..Shard::default() });
        Self {
            shards: [(); SHARDS].map(|()| shard()),
            since: Instant::now(),
            since_us,
            len: AtomicUsize::new(0),
            capacity,
            last_sweep: Mutex::default(),
        }
    }

    /// The number of locks that are held or awaited, including expired leases that were not swept yet.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    fn shard(&self, lock: &LockKey) -> MutexGuard<'_, Shard> {
        self.lock_shard(self.shard_index(lock))
    }

    fn shard_index(&self, lock: &LockKey) -> usize {
        lock.shard(SHARDS)
    }

    /// No code panics in the middle of a change, so a poisoned shard is intact.
    fn lock_shard(&self, shard_index: usize) -> MutexGuard<'_, Shard> {
        self.shards[shard_index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        self.retry_after_sweep(|| {
            let mut shard = self.shard(lock);
            self.acquire_in(&mut shard, lock, claim, Instant::now())
        })
    }

    /// Runs `change`. If the table is full, sweeps it and runs `change` again.
    fn retry_after_sweep<T>(&self, change: impl Fn() -> Result<T, StoreError>) -> Result<T, StoreError> {
        let first = change();
        if !first.as_ref().is_err_and(StoreError::is_out_of_memory) {
            return first;
        }
        self.sweep_all();
        change()
    }

    /// Removes all expired leases. Concurrent callers wait for the sweep, and need not repeat it.
    fn sweep_all(&self) {
        let mut last_sweep = self.last_sweep.lock().unwrap_or_else(PoisonError::into_inner);
        let since_sweep = last_sweep.and_then(|last_sweep| Instant::now().checked_duration_since(last_sweep));
        if since_sweep.is_some_and(|since_sweep| {
            since_sweep < SWEEP_INTERVAL_PER_LOCK.saturating_mul(self.len.load(Ordering::Relaxed) as u32)
        }) {
            return;
        }
        for shard_index in 0..SHARDS {
            let mut shard = self.lock_shard(shard_index);
            let (now, len) = (Instant::now(), shard.locks.len());
            shard.locks.retain(|_, record| !record.is_free(now) || record.is_wanted(now));
            self.len.fetch_sub(len - shard.locks.len(), Ordering::Relaxed);
        }
        *last_sweep = Some(Instant::now());
    }

    pub(super) fn acquire_all(&self, claims: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        self.retry_after_sweep(|| self.try_acquire_all(claims))
    }

    fn try_acquire_all(&self, claims: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        // Always lock in the same order, so that two callers never deadlock.
        let mut shard_indices: Vec<_> = claims.iter().map(|(lock, _)| self.shard_index(lock)).collect();
        shard_indices.sort_unstable();
        shard_indices.dedup();
        let mut shards: Vec<_> = shard_indices.iter().map(|shard_index| self.lock_shard(*shard_index)).collect();
        let now = Instant::now();
        let shard_of = |lock: &LockKey| shard_indices.binary_search(&self.shard_index(lock)).unwrap_or_default();
        let held: Vec<_> = claims
            .iter()
            .map(|(lock, claim)| {
                let record = shards[shard_of(lock)].locks.get(lock)?;
                let others = record.holders.iter().filter(|holder| holder.token != claim.token && now < holder.ends);
                others.map(|holder| (holder.ends, record.held_as.kind())).min_by_key(|(ends, _)| *ends)
            })
            .collect();
        if held.iter().any(Option::is_some) {
            let other = claims
                .iter()
                .zip(&held)
                .map(|((_, claim), held)| held.map(|(_, kind)| kind).filter(|kind| *kind != claim.kind));
            let other: Vec<_> = other.collect();
            let is_other = other.iter().any(Option::is_some);
            let refusal = |(held, other): (Option<(Instant, LockKind)>, Option<LockKind>)| match other {
                Some(held) => Acquired::OtherKind { held },
                None if is_other => Acquired::Busy { remaining: Duration::ZERO },
                None => Acquired::Busy { remaining: held.map_or(Duration::ZERO, |(ends, _)| ends - now) },
            };
            return Ok(held.into_iter().zip(other).map(refusal).collect());
        }
        let mut granted = Vec::with_capacity(claims.len());
        // The leases that this call has added. If there is no room for all, it removes them, and keeps the leases that it only renewed.
        let mut added = Vec::new();
        for (lock, claim) in claims {
            let shard = &mut shards[shard_of(lock)];
            let is_renewed = shard.locks.get(lock).is_some_and(|record| record.is_held_by(&claim.token, now));
            match self.acquire_in(shard, lock, claim, now) {
                Ok(acquired) => granted.push(acquired),
                Err(error) => {
                    drop(shards);
                    for (lock, token) in added {
                        self.release(lock, token);
                    }
                    return Err(error);
                }
            }
            if !is_renewed {
                added.push((lock, &claim.token));
            }
        }
        Ok(granted)
    }

    fn acquire_in(
        &self,
        shard: &mut Shard,
        lock: &LockKey,
        claim: &Claim,
        now: Instant,
    ) -> Result<Acquired, StoreError> {
        if let Some(record) = shard.locks.get_mut(lock) {
            record.holders.retain(|holder| now < holder.ends);
            if let Some(holder) = record.holder(&claim.token) {
                holder.ends = now + claim.ttl;
                return Ok(Acquired::Granted { fence: holder.fence });
            }
            if let Some(refusal) = record.refusal_or_dequeue(claim, now) {
                return Ok(refusal);
            }
        }
        self.sweep(shard, now);
        if !shard.locks.contains_key(lock) {
            if self.len.load(Ordering::Relaxed) >= self.capacity {
                return Err(StoreError::out_of_memory(
                    "the memory backend has no capacity for more locks; raise `MemoryBackend::with_capacity`",
                ));
            }
            self.len.fetch_add(1, Ordering::Relaxed);
        }
        // Fences follow the clock, as in Redis, so that a restarted program grants larger fences. A fence is ahead of the clock only if the
        // floor of a claim was ahead, or if this shard reserved more fences than microseconds passed. The clock is that of the leases,
        // which is never set back.
        let elapsed = now.saturating_duration_since(self.since).as_micros() as u64;
        let fence = (shard.fence + 1).max(self.since_us + elapsed).max(claim.floor() + 1);
        shard.fence = fence + u64::from(claim.fences) - 1;
        let record = shard.locks.entry(*lock).or_default();
        record.holders.push(Holder { token: claim.token, since: now, ends: now + claim.ttl, fence, name: None });
        record.held_as = LeaseMode::of(claim);
        if record.holders.len() < record.held_as.permits(claim) {
            // There may be room for the next waiter as well.
            record.wake_first(Some(record.held_as));
        }
        Ok(Acquired::Granted { fence })
    }

    /// Removes a few expired leases.
    fn sweep(&self, shard: &mut Shard, now: Instant) {
        for _ in 0..2 {
            shard.sweep_cursor = if shard.sweep_cursor + 1 < shard.locks.len() { shard.sweep_cursor + 1 } else { 0 };
            let record = shard.locks.get_index_mut(shard.sweep_cursor);
            if record.is_some_and(|(_, record)| record.is_free(now) && !record.is_wanted(now)) {
                shard.locks.swap_remove_index(shard.sweep_cursor);
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn renew(&self, renewal: &Renewal) -> bool {
        let mut shard = self.shard(&renewal.lock);
        let now = Instant::now();
        let holder = shard.locks.get_mut(&renewal.lock).and_then(|record| record.holder(&renewal.token));
        let Some(holder) = holder.filter(|holder| now < holder.ends) else { return false };
        holder.ends = now + renewal.ttl;
        true
    }

    pub(super) fn release(&self, lock: &LockKey, token: &Token) -> Released {
        let mut shard = self.shard(lock);
        let Some(record) = shard.locks.get_mut(lock) else { return Released::default() };
        let now = Instant::now();
        let holder = record.holders.iter().position(|holder| holder.token == *token);
        let holder = holder.map(|index| record.holders.remove(index));
        // Only the first waiter blocks other waiters. If any other waiter leaves, no notification is needed.
        if holder.is_none() && !record.queue.as_mut().is_some_and(|queue| queue.leave(token)) {
            return Released::default();
        }
        match record.held_as {
            LeaseMode::Exclusive | LeaseMode::Semaphore if holder.is_some() => record.wake_all(),
            _ if record.is_free(now) && record.has_no_queue() => record.wake_others(),
            _ if record.is_free(now) => record.wake_first(None),
            held_as => record.wake_first(Some(held_as)),
        }
        let was_held = holder.is_some_and(|holder| now < holder.ends);
        let is_wanted = record.is_watched();
        if record.holders.is_empty() && !record.is_wanted(now) {
            shard.locks.swap_remove(lock);
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        Released { was_held, is_wanted }
    }

    pub(super) fn name(&self, lock: &LockKey, token: &Token, name: &str) {
        if let Some(holder) = self.shard(lock).locks.get_mut(lock).and_then(|record| record.holder(token)) {
            holder.name = Some(name.into());
        }
    }

    pub(super) fn inspect(&self, lock: &LockKey) -> LockStatus {
        let shard = self.shard(lock);
        shard
            .locks
            .get(lock)
            .map_or_else(|| LockStatus::new(*lock), |record| shard.status(lock, record, Instant::now()))
    }

    pub(super) fn force_release(&self, lock: &LockKey) -> ForceReleased {
        let mut shard = self.shard(lock);
        let now = Instant::now();
        let mut holders = 0;
        if let Some(record) = shard.locks.get_mut(lock) {
            holders = record.holders.iter().filter(|holder| now < holder.ends).count();
            record.holders.clear();
            record.held_as = LeaseMode::Exclusive;
            if record.is_wanted(now) {
                record.wake_all();
            } else {
                shard.locks.swap_remove(lock);
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
        ForceReleased { holders, fence: shard.fence }
    }

    /// Lists entries from the last to the first, so that none is missed: a removal moves the last entry into the gap, and that entry is
    /// listed already.
    pub(super) fn list(&self, name: &Key, from: Cursor, max: usize) -> LockPage {
        let mut page = LockPage { locks: Vec::new(), next: None };
        let shard_index = from.part as usize;
        let Some(shard) = self.shards.get(shard_index) else { return page };
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // A position of zero means the start of the shard's list, which is its last entry.
        let start = if from.position == 0 { shard.locks.len() } else { shard.locks.len().min(from.position as usize) };
        let end = start.saturating_sub(max);
        for (lock, record) in (end..start).rev().filter_map(|index| shard.locks.get_index(index)) {
            if lock.name() == name && !record.is_free(now) {
                page.locks.push(shard.status(lock, record, now));
            }
        }
        page.next = if end > 0 {
            Some(Cursor { position: end as u64, ..from })
        } else {
            (shard_index + 1 < SHARDS).then_some(Cursor { part: from.part + 1, position: 0 })
        };
        page
    }

    pub(super) fn wake(&self, lock: &LockKey) {
        self.shard(lock).locks.get(lock).inspect(|record| record.wake_all());
    }

    pub(super) fn watch(self: &Arc<Self>, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        let mut shard = self.shard(lock);
        if !shard.locks.contains_key(lock) {
            self.len.fetch_add(1, Ordering::Relaxed);
        }
        let record = shard.locks.entry(*lock).or_default();
        let sender = match waiter {
            None => record.freed.get_or_insert_with(|| watch::Sender::new(())),
            Some(token) => {
                record.queue.get_or_insert_default().notifiers.entry(*token).or_insert_with(|| watch::Sender::new(()))
            }
        };
        let watcher = Watcher { table: Arc::clone(self), lock: *lock, waiter: waiter.copied() };
        Notifications::new(sender.subscribe(), Arc::new(watcher))
    }
}

impl Shard {
    fn status(&self, lock: &LockKey, record: &Record, now: Instant) -> LockStatus {
        let held = || record.holders.iter().filter(|holder| now < holder.ends);
        let holders = held().take(LockStatus::MAX_HOLDERS).map(|holder| LockHolder {
            fence: holder.fence,
            remaining: holder.ends - now,
            held_for: now - holder.since,
            name: holder.name.as_deref().map(str::to_owned),
        });
        // `last_fence` is that of the whole shard.
        let holder_count = held().count();
        let kind = (holder_count > 0).then(|| record.held_as.kind());
        LockStatus { lock: *lock, last_fence: self.fence, kind, holder_count, holders: holders.collect() }
    }
}

impl LeaseMode {
    const fn of(claim: &Claim) -> Self {
        match (claim.kind, claim.queueing) {
            (LockKind::Semaphore, Queueing::Bypass) => Self::Semaphore,
            (LockKind::Semaphore, Queueing::Yield | Queueing::Enqueue) => Self::SemaphoreQueued,
            (LockKind::ReadWrite, _) => {
                if claim.is_shared {
                    Self::Reader
                } else {
                    Self::Writer
                }
            }
            (LockKind::Exclusive, Queueing::Bypass) => Self::Exclusive,
            (LockKind::Exclusive, Queueing::Yield | Queueing::Enqueue) => Self::ExclusiveQueued,
        }
    }

    const fn kind(self) -> LockKind {
        match self {
            Self::Exclusive | Self::ExclusiveQueued => LockKind::Exclusive,
            Self::Semaphore | Self::SemaphoreQueued => LockKind::Semaphore,
            Self::Reader | Self::Writer => LockKind::ReadWrite,
        }
    }

    /// How many holders a lock can have in this mode.
    const fn permits(self, claim: &Claim) -> usize {
        match self {
            Self::Semaphore | Self::SemaphoreQueued | Self::Reader => claim.permits as usize,
            Self::Exclusive | Self::ExclusiveQueued | Self::Writer => 1,
        }
    }
}

impl FairQueue {
    /// Removes waiters that did not call in time.
    fn sweep(&mut self, now: Instant) {
        while let Some((_, arrival)) = self.ends.first().copied().filter(|(ends, _)| *ends <= now) {
            self.remove(arrival);
        }
    }

    fn first(&self) -> Option<&FairPosition> {
        self.by_arrival.values().next()
    }

    /// Extends the position of a waiter, or adds a waiter at the end. Returns whether the waiter is first, or `None` if the queue is full.
    fn extend_or_enqueue(&mut self, token: Token, mode: LeaseMode, now: Instant) -> Option<bool> {
        let ends = now + Claim::POSITION_TTL;
        let arrival = match self.arrivals.get(&token).copied() {
            Some(arrival) => arrival,
            None if self.by_arrival.len() >= Claim::MAX_QUEUE as usize => return None,
            None => {
                self.last_arrival += 1;
                self.arrivals.insert(token, self.last_arrival);
                self.last_arrival
            }
        };
        if let Some(previous) = self.by_arrival.insert(arrival, FairPosition { token, mode, ends }) {
            self.ends.remove(&(previous.ends, arrival));
        }
        self.ends.insert((ends, arrival));
        Some(self.first().is_some_and(|first| first.token == token))
    }

    /// Removes a waiter; true if it was the first.
    fn leave(&mut self, token: &Token) -> bool {
        let is_first = self.first().is_some_and(|first| first.token == *token);
        if let Some(arrival) = self.arrivals.get(token).copied() {
            self.remove(arrival);
        }
        is_first
    }

    fn remove(&mut self, arrival: u64) {
        if let Some(position) = self.by_arrival.remove(&arrival) {
            self.arrivals.remove(&position.token);
            self.ends.remove(&(position.ends, arrival));
        }
    }
}

impl Record {
    fn holder(&mut self, token: &Token) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| holder.token == *token)
    }

    fn is_held_by(&self, token: &Token, now: Instant) -> bool {
        self.holders.iter().any(|holder| holder.token == *token && now < holder.ends)
    }

    fn is_free(&self, now: Instant) -> bool {
        self.holders.iter().all(|holder| holder.ends <= now)
    }

    fn has_no_queue(&self) -> bool {
        self.queue.as_ref().is_none_or(|queue| queue.by_arrival.is_empty())
    }

    /// Whether a waiter listens.
    fn is_watched(&self) -> bool {
        self.freed.as_ref().is_some_and(|freed| freed.receiver_count() > 0)
            || self.queue.as_ref().is_some_and(|queue| !queue.notifiers.is_empty())
    }

    /// Whether a waiter listens or is queued.
    fn is_wanted(&self, now: Instant) -> bool {
        let is_alive = |queue: &FairQueue| queue.ends.last().is_some_and(|(latest, _)| *latest > now);
        self.is_watched() || self.queue.as_deref().is_some_and(is_alive)
    }

    /// Decides about a claim without a lease. Returns the refusal, and gives a claim that enqueues a position. Returns `None` if the claim
    /// can be granted, and removes it from the queue.
    fn refusal_or_dequeue(&mut self, claim: &Claim, now: Instant) -> Option<Acquired> {
        let mode = LeaseMode::of(claim);
        if !self.holders.is_empty() && self.held_as.kind() != mode.kind() {
            return Some(Acquired::OtherKind { held: self.held_as.kind() });
        }
        let is_room = self.holders.is_empty() || (self.held_as == mode && self.holders.len() < mode.permits(claim));
        let remaining = self.holders.iter().map(|holder| holder.ends - now).min().unwrap_or_default();
        if matches!(mode, LeaseMode::Exclusive | LeaseMode::Semaphore) {
            return (!is_room).then_some(Acquired::Busy { remaining });
        }
        let queue = self.queue.get_or_insert_default();
        queue.sweep(now);
        if is_room && queue.first().is_none_or(|first| first.token == claim.token) {
            queue.leave(&claim.token);
            return None;
        }
        if claim.queueing != Queueing::Enqueue {
            return Some(Acquired::Busy { remaining });
        }
        Some(match queue.extend_or_enqueue(claim.token, mode, now) {
            Some(is_first) => Acquired::Queued { is_first, remaining },
            None => Acquired::QueueFull { remaining },
        })
    }

    /// Notifies waiters outside of the queue.
    fn wake_others(&self) {
        if let Some(freed) = &self.freed {
            freed.send_replace(());
        }
    }

    /// Notifies all waiters, queued or not: the first to call gets the lease.
    fn wake_all(&self) {
        self.wake_others();
        for wakeup in self.queue.iter().flat_map(|queue| queue.notifiers.values()) {
            wakeup.send_replace(());
        }
    }

    /// Notifies the first queued waiter. If the lock is held, that is only if the waiter wants the mode `held_as` too.
    fn wake_first(&self, held_as: Option<LeaseMode>) {
        let Some(queue) = &self.queue else { return };
        let first = queue.first().filter(|first| held_as.is_none_or(|mode| mode == first.mode));
        if let Some(wakeup) = first.and_then(|first| queue.notifiers.get(&first.token)) {
            wakeup.send_replace(());
        }
    }
}

/// Removes the channel of a waiter that has gone.
struct Watcher {
    table: Arc<LockTable>,
    lock: LockKey,
    waiter: Option<Token>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut shard = self.table.shard(&self.lock);
        let Some(record) = shard.locks.get_mut(&self.lock) else { return };
        if let (Some(queue), Some(token)) = (&mut record.queue, &self.waiter) {
            queue.notifiers.remove(token);
        }
        if record.holders.is_empty() && !record.is_wanted(Instant::now()) {
            shard.locks.swap_remove(&self.lock);
            self.table.len.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn claim(ttl_ms: u64) -> Claim {
        Claim::new(Token::random().unwrap(), Duration::from_millis(ttl_ms))
    }

    #[tokio::test(start_paused = true)]
    async fn new_locks_remove_expired_and_never_held_ones() {
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
    async fn full_table_refuses_new_locks() {
        let table = LockTable::new(3);
        let claims: Vec<_> = (0..3_u32).map(|i| (LockKey::new("test", i), claim(1_000))).collect();
        for (lock, claim) in &claims {
            table.acquire(lock, claim).unwrap();
        }
        assert!(table.acquire(&LockKey::new("test", "x"), &claim(10)).unwrap_err().is_out_of_memory());
        table.release(&claims[0].0, &claims[0].1.token);
        table.acquire(&LockKey::new("test", "x"), &claim(10)).unwrap();
    }

    /// Regression: a repeated call that found no room for another lock released the leases that its token had.
    #[tokio::test(start_paused = true)]
    async fn repeated_acquisition_without_room_keeps_held_leases() {
        let table = LockTable::new(1);
        let (held, other, claim) = (LockKey::new("test", "held"), LockKey::new("test", "other"), claim(1_000));
        table.acquire(&held, &claim).unwrap();
        assert!(table.acquire_all(&[(held, claim), (other, claim)]).unwrap_err().is_out_of_memory());
        assert!(table.release(&held, &claim.token).was_held);
    }

    #[tokio::test(start_paused = true)]
    async fn expired_leases_make_room_in_all_shards() {
        let table = LockTable::new(2);
        let run_out = async |keys: [&str; 2]| {
            for key in keys {
                table.acquire(&LockKey::new("test", key), &claim(10)).unwrap();
            }
            tokio::time::advance(Duration::from_millis(20)).await;
        };
        for i in 0..32_u32 {
            let (lock, claim) = (LockKey::new("test", i), claim(1_000));
            run_out(["a", "b"]).await;
            table.acquire(&lock, &claim).unwrap();
            table.release(&lock, &claim.token);
            run_out(["a", "b"]).await;
            table.acquire_all(&[(lock, claim), (LockKey::new("other", i), claim)]).unwrap();
            assert!(table.acquire(&LockKey::new("test", "c"), &claim).unwrap_err().is_out_of_memory());
            table.release(&lock, &claim.token);
            table.release(&LockKey::new("other", i), &claim.token);
        }
        assert_eq!(table.len.load(Ordering::Relaxed), 0);
    }

    /// Formerly, each refusal swept all locks, and blocked callers of other locks.
    #[tokio::test(start_paused = true)]
    async fn refusals_without_room_do_not_sweep_all_locks_each_time() {
        let table = LockTable::new(20_000);
        let since = std::time::Instant::now();
        for i in 0..20_000_u32 {
            table.acquire(&LockKey::new("test", i), &claim(1_000)).unwrap();
        }
        let (filled, since) = (since.elapsed(), std::time::Instant::now());
        let refused = |lock: &LockKey| table.acquire(lock, &claim(1_000)).is_err_and(|error| error.is_out_of_memory());
        for i in 20_000..21_000_u32 {
            assert!(refused(&LockKey::new("test", i)));
        }
        assert!(since.elapsed() < filled, "{:?} for a twentieth of what took {filled:?}", since.elapsed());
        tokio::time::advance(Duration::from_millis(1_000)).await;
        assert!(!refused(&LockKey::new("test", "a")));
    }

    /// Formerly, fences counted from the creation of the backend and could run ahead of the clock, so that a restarted program
    /// granted smaller fences.
    #[tokio::test(start_paused = true)]
    async fn fences_rise_for_each_lock_and_follow_the_clock() {
        let table = LockTable::new(100);
        let cycle = |lock: &LockKey| {
            let claim = Claim { fences: 16, ..claim(1_000) };
            let Acquired::Granted { fence } = table.acquire(lock, &claim).unwrap() else { panic!("{lock} is held") };
            assert!(table.release(lock, &claim.token).was_held);
            fence
        };
        let (hot, since) = (LockKey::new("test", "hot"), Instant::now());
        let mut last = cycle(&hot);
        let start = table.since_us;
        for round in 0..50_000_u32 {
            cycle(&LockKey::new("test", round));
            let fence = cycle(&hot);
            assert!(fence >= last + 16, "{fence} after {last}");
            last = fence;
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        for round in 0..1_000_u32 {
            let ahead = cycle(&LockKey::new("test", round)) - (start + since.elapsed().as_micros() as u64);
            assert!(ahead <= 16 * 1_000, "{ahead} us");
        }
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(cycle(&hot), start + 10_000_000);
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_watchers_leave_no_entry() {
        let table = Arc::new(LockTable::new(3));
        let lock = LockKey::new("test", "a");
        let (one, other) = (table.watch(&lock, None), table.watch(&lock, None));
        drop(one);
        assert_eq!(table.len.load(Ordering::Relaxed), 1);
        drop(other);
        assert_eq!(table.len.load(Ordering::Relaxed), 0);
    }
}
