//! The operations of a memory backend.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use indexmap::map::raw_entry_v1::{RawEntryApiV1, RawEntryMut};
use tokio::sync::watch;
use tokio::time::Instant;

use super::shares::{Amount, NoRoom, Shares};
use crate::error::StoreError;
use crate::idempotency::store::{Begun, BodyFingerprint, Claim, Completion, Digest, Notifications, Token};
use crate::idempotency::{
    Checkpoint, Cursor, Operation, OperationPage, OperationState, OperationStatus, StoredResponse,
};
use crate::key::Key;

/// The number of shards. Threads wait for each other only if they use operations of the same shard.
const SHARDS: usize = 16;
/// Capacity for responses and checkpoints, in bytes per record on average.
const BYTES_PER_RECORD: usize = 1_024;
/// How long a released operation is remembered, as in Redis.
const RELEASED_TTL: Duration = Duration::from_secs(600);
/// The `retry_after` of a scope with too many records. The table does not know when the first record of the scope expires.
const RETRY_FULL: Duration = Duration::from_secs(60);
/// The size of a new record.
const RECORD: Amount = Amount { records: 1, bytes: 0 };
/// The maximum number of due records that one sweep checks, and removes if they have expired.
const SWEEP: usize = 4;

/// The operations of one memory backend and its clones. No record is removed before it expires: if the table is full, `begin` fails.
pub(super) struct OperationTable {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    fence: AtomicU64,
    // Records, and bytes of responses and checkpoints, for each owner.
    shares: Shares,
}

#[derive(Default)]
struct Shard {
    // Has no hasher: each call passes the keyed hash that also selects the shard.
    // Boxed, so that a growing table moves no records.
    records: IndexMap<Box<Entry>, (), ()>,
    // One entry for each record: when to check whether it has expired, and the hash of its operation. The check is never later than
    // the end of the record.
    due: BTreeMap<DueEntry, u64>,
    next: u64,
    // Notifies waiters.
    watched: HashMap<Operation, watch::Sender<()>>,
}

/// A record and its identity.
struct Entry {
    operation: Operation,
    // Unique within the shard. Entries of `due` hold this number instead of the operation, which is large.
    number: u64,
    // The hash of the scope that the record counts for.
    owner: u64,
    record: Record,
}

/// When to check a record, and its number.
type DueEntry = (Instant, u64);

/// An operation and its hash.
#[derive(Clone, Copy)]
struct HashedOperation<'a> {
    hash: u64,
    operation: &'a Operation,
}

struct Record {
    state: State,
    head: Digest,
    token: Token,
    body_fingerprint: BodyFingerprint,
    fence: u64,
    attempt: u32,
    checkpoint: Option<Arc<Checkpoint>>,
    // The operation has a checkpoint or was taken over, so it may have had effects. After a release, only the same request may begin it.
    is_bound: bool,
    expires: Instant,
    // When to check next whether the record has expired.
    due: Instant,
}

enum State {
    Free,
    InFlight { ends: Instant },
    Completed { response: Arc<[u8]>, is_kept: bool },
}

impl Entry {
    fn is(operation: &Operation) -> impl Fn(&Box<Self>) -> bool {
        move |entry| entry.operation == *operation
    }
}

impl Record {
    /// The record of a released or forgotten operation. Any attempt may begin it, except one with `token`, whose `begin` arrives late.
    fn free(token: Token, now: Instant) -> Self {
        Self {
            state: State::Free,
            head: Digest::default(),
            token,
            body_fingerprint: BodyFingerprint::default(),
            fence: 0,
            attempt: 0,
            checkpoint: None,
            is_bound: false,
            expires: now + RELEASED_TTL,
            due: now + RELEASED_TTL,
        }
    }

    /// A record still exists at the instant `expires`, as in Redis.
    fn is_live(&self, now: Instant) -> bool {
        now <= self.expires
    }

    fn is_in_flight_by(&self, token: &Token) -> bool {
        matches!(self.state, State::InFlight { .. }) && self.token == *token
    }

    fn bytes(&self) -> usize {
        let response = match &self.state {
            State::Completed { response, is_kept: true } => response.len(),
            // A response that is not kept is a short mark, which counts as a part of its record.
            State::Completed { is_kept: false, .. } | State::Free | State::InFlight { .. } => 0,
        };
        response + self.checkpoint.as_deref().map_or(0, Checkpoint::len)
    }

    fn renew(&mut self, claim: &Claim, now: Instant) {
        self.state = State::InFlight { ends: now + claim.lease };
        self.expires = now + claim.lease + claim.retention;
    }

    fn state(&self, now: Instant) -> OperationState {
        match self.state {
            State::Free => OperationState::Free,
            State::InFlight { ends } if now < ends => OperationState::InFlight { remaining: ends - now },
            State::InFlight { ends } => OperationState::Unknown { since: now - ends },
            State::Completed { is_kept, .. } => OperationState::Completed { is_kept },
        }
    }

    fn status(&self, operation: &Operation, now: Instant) -> OperationStatus {
        OperationStatus {
            operation: *operation,
            state: self.state(now),
            fence: self.fence,
            attempts: self.attempt,
            checkpoint: self.checkpoint.as_deref().cloned(),
            kept_for: self.expires - now,
        }
    }

    fn granted(&self) -> Begun {
        let Self { fence, attempt, body_fingerprint, .. } = *self;
        Begun::Granted { fence, attempt, body_fingerprint, checkpoint: self.checkpoint.as_deref().cloned() }
    }
}

impl OperationTable {
    pub(super) fn new(capacity: usize) -> Self {
        // Fences begin at the current time, so a restarted program grants larger ones.
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            hasher: RandomState::new(),
            shards: Default::default(),
            fence: AtomicU64::new(started.as_micros() as u64),
            shares: Shares::new(Amount { records: capacity, bytes: capacity.saturating_mul(BYTES_PER_RECORD) }),
        }
    }

    /// The number of records, including expired ones before their removal.
    pub(super) fn len(&self) -> usize {
        self.shares.records()
    }

    /// The hash of the scope that the record of a claim counts for, and the maximum number of records of that scope.
    fn owner(&self, operation: &Operation, claim: &Claim) -> (u64, usize) {
        let bound = claim.bound.as_ref();
        let (scope, max) = bound.map_or((operation.scope(), u64::MAX), |bound| (&bound.scope, bound.max));
        (self.hasher.hash_one(scope.as_hashed()), usize::try_from(max).unwrap_or(usize::MAX))
    }

    /// Locks the shard of an operation. No code panics in the middle of a change, so a poisoned shard is intact.
    fn shard<'a>(&self, operation: &'a Operation) -> (MutexGuard<'_, Shard>, HashedOperation<'a>) {
        let hash = self.hasher.hash_one(operation);
        // The lower half selects the entry within the shard.
        let shard = (hash >> 32) as usize % SHARDS;
        let hashed = HashedOperation { hash, operation };
        (self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner), hashed)
    }

    pub(super) fn begin(&self, operation: &Operation, claim: &Claim) -> Result<Begun, StoreError> {
        match self.retry_after_sweep(|| self.try_begin(operation, claim)) {
            Ok(begun) => Ok(begun),
            Err(NoRoom::Bound) => Ok(Begun::ScopeFull { retry_after: RETRY_FULL }),
            Err(NoRoom::Share) => Err(StoreError::out_of_memory(
                "the memory backend has no capacity for more operations; raise `MemoryBackend::with_capacity`",
            )),
        }
    }

    /// Runs `change`. While it finds no room, removes expired records and runs it again.
    fn retry_after_sweep<T>(&self, change: impl Fn() -> Result<T, NoRoom>) -> Result<T, NoRoom> {
        loop {
            let change = change();
            if change.is_ok() {
                return change;
            }
            let now = Instant::now();
            let mut has_swept = false;
            for shard in &self.shards {
                has_swept |= self.sweep(&mut shard.lock().unwrap_or_else(PoisonError::into_inner), now);
            }
            if !has_swept {
                return change;
            }
        }
    }

    fn try_begin(&self, operation: &Operation, claim: &Claim) -> Result<Begun, NoRoom> {
        let (mut shard, hashed) = self.shard(operation);
        let now = Instant::now();
        let (mut attempt, mut body_fingerprint, mut checkpoint, mut is_bound) =
            (1, BodyFingerprint::default(), None, false);
        if let Some(record) = shard.live(&hashed, now) {
            match &record.state {
                State::Free if record.token == claim.token => {
                    return Ok(Begun::InFlight { remaining: Duration::from_millis(1), body_fingerprint });
                }
                // The released attempt had no effects, so any request may begin.
                State::Free if !record.is_bound => {}
                _ if record.head != claim.head => return Ok(Begun::Mismatch),
                State::Free => {}
                State::Completed { response, is_kept } => {
                    let (body_fingerprint, response) = (record.body_fingerprint, Arc::clone(response));
                    return Ok(Begun::Completed { body_fingerprint, response, is_kept: *is_kept });
                }
                State::InFlight { .. } if record.token == claim.token => {
                    record.renew(claim, now);
                    return Ok(record.granted());
                }
                State::InFlight { ends } if now < *ends => {
                    return Ok(Begun::InFlight { remaining: *ends - now, body_fingerprint: record.body_fingerprint });
                }
                State::InFlight { .. } if !claim.takes_over => {
                    return Ok(Begun::Unknown { attempt: record.attempt, body_fingerprint: record.body_fingerprint });
                }
                State::InFlight { .. } => {}
            }
            attempt = record.attempt.saturating_add(1);
            (body_fingerprint, checkpoint) = (record.body_fingerprint, record.checkpoint.clone());
            is_bound = record.is_bound || matches!(record.state, State::InFlight { .. });
        }
        self.sweep(&mut shard, now);
        let owner = match shard.entry(&hashed) {
            Some(entry) => entry.owner,
            None => {
                let (owner, max) = self.owner(operation, claim);
                self.shares.reserve(owner, RECORD, max)?;
                owner
            }
        };
        let fence = self.fence.fetch_add(1, Ordering::Relaxed) + 1;
        let record = Record {
            state: State::InFlight { ends: now + claim.lease },
            head: claim.head,
            token: claim.token,
            body_fingerprint,
            fence,
            attempt,
            checkpoint,
            is_bound,
            expires: now + claim.lease + claim.retention,
            // The operation is usually completed before this check, and the record expires soon after it. If the record is still live
            // at the check, `sweep` checks it again at its end.
            due: now + claim.retention,
        };
        let granted = record.granted();
        self.put(&mut shard, hashed, owner, record);
        Ok(granted)
    }

    /// Writes a record, and replaces an existing one. The caller has reserved room for a new record. A replacement has no more
    /// bytes than the previous record.
    fn put(&self, shard: &mut Shard, hashed: HashedOperation<'_>, owner: u64, record: Record) {
        let (due, bytes) = (record.due, record.bytes());
        let number = match shard.records.raw_entry_mut_v1().from_hash(hashed.hash, Entry::is(hashed.operation)) {
            RawEntryMut::Occupied(mut entry) => {
                let Entry { number, record: existing, .. } = &mut **entry.key_mut();
                let previous = mem::replace(existing, record);
                self.release_bytes(owner, previous.bytes().saturating_sub(bytes));
                shard.due.remove(&(previous.due, *number));
                *number
            }
            RawEntryMut::Vacant(entry) => {
                shard.next += 1;
                let name = Box::new(Entry { operation: *hashed.operation, number: shard.next, owner, record });
                entry.insert_hashed_nocheck(hashed.hash, name, ());
                shard.next
            }
        };
        shard.due.insert((due, number), hashed.hash);
    }

    /// Checks a few records that are due, and removes the expired ones. Returns false if no record is due.
    fn sweep(&self, shard: &mut Shard, now: Instant) -> bool {
        for round in 0..SWEEP {
            let Some(entry) = shard.due.first_entry().filter(|entry| entry.key().0 < now) else { return round > 0 };
            let ((_, number), hash) = entry.remove_entry();
            let named = shard.records.raw_entry_mut_v1().from_hash(hash, |entry| entry.number == number);
            let RawEntryMut::Occupied(mut entry) = named else { continue };
            let Entry { owner, record, .. } = &mut **entry.key_mut();
            if record.is_live(now) {
                // The record expires later than this check: check it again at its end.
                record.due = record.expires;
                shard.due.insert((record.due, number), hash);
            } else {
                self.shares.release(*owner, Amount { bytes: record.bytes(), ..RECORD });
                entry.swap_remove();
            }
        }
        true
    }

    pub(super) fn renew(&self, operation: &Operation, claim: &Claim, body_fingerprint: &BodyFingerprint) -> bool {
        let (mut shard, hashed) = self.shard(operation);
        let now = Instant::now();
        let Some(record) = shard.live(&hashed, now).filter(|record| record.is_in_flight_by(&claim.token)) else {
            return false;
        };
        record.renew(claim, now);
        record.body_fingerprint = record.body_fingerprint.or_more(*body_fingerprint);
        true
    }

    pub(super) fn checkpoint(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, StoreError> {
        self.retry_after_sweep(|| self.try_checkpoint(operation, claim, body_fingerprint, checkpoint)).map_err(no_room)
    }

    fn try_checkpoint(
        &self,
        operation: &Operation,
        claim: &Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: &Checkpoint,
    ) -> Result<bool, NoRoom> {
        let (mut shard, hashed) = self.shard(operation);
        let now = Instant::now();
        let Some(Entry { owner, record, .. }) = shard.entry(&hashed) else { return Ok(false) };
        if !record.is_live(now) || !record.is_in_flight_by(&claim.token) {
            return Ok(false);
        }
        if record.checkpoint.as_ref().is_some_and(|last| last.number() > checkpoint.number()) {
            return Ok(true);
        }
        self.make_room(*owner, checkpoint.len())?;
        record.renew(claim, now);
        record.body_fingerprint = record.body_fingerprint.or_more(*body_fingerprint);
        record.is_bound = true;
        if let Some(last) = record.checkpoint.replace(Arc::new(checkpoint.clone())) {
            self.release_bytes(*owner, last.len());
        }
        Ok(true)
    }

    /// Reserves bytes.
    fn make_room(&self, owner: u64, bytes: usize) -> Result<(), NoRoom> {
        if bytes == 0 {
            return Ok(());
        }
        self.shares.reserve(owner, Amount { records: 0, bytes }, usize::MAX)
    }

    fn release_bytes(&self, owner: u64, bytes: usize) {
        if bytes > 0 {
            self.shares.release(owner, Amount { records: 0, bytes });
        }
    }

    pub(super) fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, StoreError> {
        self.retry_after_sweep(|| self.try_complete(operation, token, completion)).map_err(no_room)
    }

    fn try_complete(&self, operation: &Operation, token: &Token, completion: &Completion) -> Result<bool, NoRoom> {
        let (mut shard, hashed) = self.shard(operation);
        self.complete_in(&mut shard, hashed, token, completion)
    }

    fn complete_in(
        &self,
        shard: &mut Shard,
        hashed: HashedOperation<'_>,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, NoRoom> {
        let now = Instant::now();
        let Some(record) = shard.live(&hashed, now).filter(|record| record.token == *token) else {
            return Ok(false);
        };
        match record.state {
            State::Free => return Ok(false),
            State::Completed { .. } => return Ok(true),
            State::InFlight { .. } => {}
        }
        self.store_completion(shard, hashed, now, completion)?;
        Ok(true)
    }

    /// Stores a response in the record, and removes the checkpoint.
    fn store_completion(
        &self,
        shard: &mut Shard,
        hashed: HashedOperation<'_>,
        now: Instant,
        completion: &Completion,
    ) -> Result<(), NoRoom> {
        let Some(Entry { owner, record, .. }) = shard.entry(&hashed) else { return Ok(()) };
        let Completion { response, is_kept, body_fingerprint, retention } = completion;
        if *is_kept {
            self.make_room(*owner, response.len())?;
        }
        self.release_bytes(*owner, record.bytes());
        record.checkpoint = None;
        record.state = State::Completed { response: Arc::clone(response), is_kept: *is_kept };
        record.body_fingerprint = *body_fingerprint;
        record.expires = now + *retention;
        if record.due > record.expires {
            let (previous, due) = (record.due, record.expires);
            record.due = due;
            shard.move_check(&hashed, previous, due);
        }
        shard.notify(hashed.operation);
        Ok(())
    }

    pub(super) fn release(&self, operation: &Operation, claim: &Claim) -> bool {
        let (mut shard, hashed) = self.shard(operation);
        let (now, token) = (Instant::now(), &claim.token);
        let mut free = Record::free(*token, now);
        if let Some(record) = shard.live(&hashed, now) {
            match record.state {
                State::Completed { .. } => return false,
                State::InFlight { .. } if record.token != *token => return false,
                State::InFlight { .. } | State::Free => {}
            }
            (free.fence, free.attempt) = (record.fence, record.attempt);
            if record.is_bound {
                (free.head, free.body_fingerprint, free.is_bound) = (record.head, record.body_fingerprint, true);
                free.checkpoint = record.checkpoint.clone();
                free.expires = free.expires.max(record.expires);
            }
        }
        // If there is no record, the `begin` of this claim may arrive later. A free record refuses it. Store it only if there is room.
        let (owner, max) = self.owner(operation, claim);
        match shard.entry(&hashed).map(|entry| entry.owner) {
            Some(owner) => self.put(&mut shard, hashed, owner, free),
            None if self.shares.reserve(owner, RECORD, max).is_ok() => self.put(&mut shard, hashed, owner, free),
            None => {}
        }
        shard.notify(operation);
        true
    }

    pub(super) fn inspect(&self, operation: &Operation) -> Option<OperationStatus> {
        let (mut shard, hashed) = self.shard(operation);
        let now = Instant::now();
        shard.live(&hashed, now).map(|record| record.status(operation, now))
    }

    pub(super) fn forget(&self, status: &OperationStatus) -> bool {
        let operation = &status.operation;
        let (mut shard, hashed) = self.shard(operation);
        let now = Instant::now();
        let Some(record) = shard.live(&hashed, now).filter(|record| record.fence == status.fence) else { return false };
        // A free record with `no_token` was forgotten before, so this call is a repetition.
        let is_forgotten = matches!(record.state, State::Free) && record.token == no_token();
        if !is_forgotten && !record.state(now).is_like(status.state) {
            return false;
        }
        let (fence, attempt) = (record.fence, record.attempt);
        if let Some(owner) = shard.entry(&hashed).map(|entry| entry.owner) {
            self.put(&mut shard, hashed, owner, Record { fence, attempt, ..Record::free(no_token(), now) });
        }
        shard.notify(operation);
        true
    }

    pub(super) fn complete_unknown(
        &self,
        status: &OperationStatus,
        response: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, StoreError> {
        self.retry_after_sweep(|| self.try_complete_unknown(status, response, retention)).map_err(no_room)
    }

    fn try_complete_unknown(
        &self,
        status: &OperationStatus,
        response: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, NoRoom> {
        let (mut shard, hashed) = self.shard(&status.operation);
        let now = Instant::now();
        let Some(record) = shard.live(&hashed, now).filter(|record| record.fence == status.fence) else {
            return Ok(false);
        };
        if let State::Completed { response: existing, is_kept } = &record.state {
            // Only responses of operators have `no_token`. An operator cannot replace the response of a handler.
            if record.token != no_token() {
                return Ok(false);
            }
            if existing == response.bytes() && *is_kept == response.is_kept() {
                return Ok(true);
            }
        }
        if !record.state(now).is_like(status.state) {
            return Ok(false);
        }
        let (response, is_kept, body_fingerprint) =
            (Arc::clone(response.bytes()), response.is_kept(), record.body_fingerprint);
        self.store_completion(&mut shard, hashed, now, &Completion { response, is_kept, body_fingerprint, retention })?;
        // The token of the attempt no longer matches, so its own `complete` reports that its response is not stored.
        if let Some(record) = shard.record(&hashed) {
            record.token = no_token();
        }
        Ok(true)
    }

    pub(super) fn list(&self, scope: Option<&Key>, from: Cursor, max: usize) -> OperationPage {
        let mut page = OperationPage { operations: Vec::new(), next: None };
        let part = from.part as usize;
        let Some(shard) = self.shards.get(part) else { return page };
        let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, len) = (Instant::now(), shard.records.len());
        // Pages go from the last entry to the first, since the last entry replaces a removed one. Position 0 begins a shard, at its last
        // entry.
        let start = if from.position == 0 { len } else { len.min(from.position as usize) };
        let end = start.saturating_sub(max);
        for (entry, ()) in (end..start).rev().filter_map(|hashed| shard.records.get_index(hashed)) {
            let is_wanted = scope.is_none_or(|scope| entry.operation.scope() == scope);
            if is_wanted && entry.record.is_live(now) {
                page.operations.push(entry.record.status(&entry.operation, now));
            }
        }
        page.next = if end > 0 {
            Some(Cursor { position: end as u64, ..from })
        } else {
            (part + 1 < SHARDS).then_some(Cursor { part: from.part + 1, position: 0 })
        };
        page
    }

    pub(super) fn watch(self: &Arc<Self>, operation: &Operation) -> Notifications {
        let (mut shard, _) = self.shard(operation);
        let receiver = shard.watched.entry(*operation).or_insert_with(|| watch::Sender::new(())).subscribe();
        Notifications::new(receiver, Arc::new(Watcher { table: Arc::clone(self), operation: *operation }))
    }
}

impl Shard {
    fn record(&mut self, hashed: &HashedOperation<'_>) -> Option<&mut Record> {
        self.entry(hashed).map(|entry| &mut entry.record)
    }

    fn entry(&mut self, hashed: &HashedOperation<'_>) -> Option<&mut Entry> {
        match self.records.raw_entry_mut_v1().from_hash(hashed.hash, Entry::is(hashed.operation)) {
            RawEntryMut::Occupied(entry) => Some(entry.into_key()),
            RawEntryMut::Vacant(_) => None,
        }
    }

    /// The record of an operation, unless it has expired.
    fn live(&mut self, hashed: &HashedOperation<'_>, now: Instant) -> Option<&mut Record> {
        self.record(hashed).filter(|record| record.is_live(now))
    }

    /// Moves the check of a record to another time.
    fn move_check(&mut self, hashed: &HashedOperation<'_>, previous: Instant, due: Instant) {
        if let Some(number) = self.entry(hashed).map(|entry| entry.number) {
            self.due.remove(&(previous, number));
            self.due.insert((due, number), hashed.hash);
        }
    }

    /// Notifies waiters that an operation is completed or free.
    fn notify(&self, operation: &Operation) {
        if !self.watched.is_empty()
            && let Some(sender) = self.watched.get(operation)
        {
            sender.send_replace(());
        }
    }
}

/// The error for a response or checkpoint that is not stored.
fn no_room(_: NoRoom) -> StoreError {
    StoreError::out_of_memory(
        "the memory backend has no capacity for more responses; raise `MemoryBackend::with_capacity`",
    )
}

/// No attempt has this token.
fn no_token() -> Token {
    Token::from_bytes(&[0; 16]).expect("a token has 16 bytes")
}

/// Removes the channel of an operation when its last waiter is dropped.
struct Watcher {
    table: Arc<OperationTable>,
    operation: Operation,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let (mut shard, _) = self.table.shard(&self.operation);
        if shard.watched.get(&self.operation).is_some_and(|sender| sender.receiver_count() == 0) {
            shard.watched.remove(&self.operation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim() -> Claim {
        Claim {
            token: Token::random().unwrap(),
            head: Digest::default(),
            lease: Duration::from_secs(10),
            retention: Duration::from_secs(60),
            takes_over: false,
            bound: None,
        }
    }

    fn completion(bytes: usize) -> Completion {
        let (response, retention) = (vec![7; bytes].into(), Duration::from_secs(60));
        Completion { response, is_kept: true, body_fingerprint: BodyFingerprint::default(), retention }
    }

    /// The counts agree with the records.
    fn check(table: &OperationTable) {
        let (mut len, mut taken) = (0, HashMap::<u64, Amount>::new());
        for shard in &table.shards {
            let shard = shard.lock().unwrap();
            assert_eq!(shard.due.len(), shard.records.len());
            len += shard.records.len();
            for entry in shard.records.keys() {
                let own = taken.entry(entry.owner).or_default();
                own.records += 1;
                own.bytes += entry.record.bytes();
            }
        }
        assert_eq!(table.shares.records(), len);
        assert_eq!(table.shares.added_up(), taken);
    }

    #[tokio::test(start_paused = true)]
    async fn new_operations_remove_expired_records_only() {
        let table = OperationTable::new(200);
        for i in 0..10_000_u32 {
            let (operation, claim) = (Operation::new("test", i), claim());
            let begun = table.begin(&operation, &claim).unwrap();
            assert!(matches!(begun, Begun::Granted { .. }), "{begun:?}");
            match i % 4 {
                0 => assert!(table.release(&operation, &claim)),
                1 => assert!(table.renew(&operation, &claim, &BodyFingerprint::default())),
                _ => assert!(table.complete(&operation, &claim.token, &completion(100)).unwrap()),
            }
            // Released records last the longest: 75 of them exist at a time.
            tokio::time::advance(Duration::from_secs(1)).await;
            if i % 4 == 2 {
                let begun = table.begin(&operation, &claim).unwrap();
                assert!(matches!(begun, Begun::Completed { .. }), "{begun:?}");
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        check(&table);
    }

    #[tokio::test(start_paused = true)]
    async fn full_table_refuses_operations_and_keeps_the_others() {
        let table = OperationTable::new(2);
        let (first, second) = (claim(), claim());
        let [a, b, c] = ["a", "b", "c"].map(|key| Operation::new("test", key));
        table.begin(&a, &first).unwrap();
        table.begin(&b, &second).unwrap();
        assert!(table.begin(&c, &claim()).unwrap_err().is_out_of_memory());
        assert!(table.complete(&a, &first.token, &completion(2 * BYTES_PER_RECORD)).unwrap());
        assert!(table.complete(&b, &second.token, &completion(1)).unwrap_err().is_out_of_memory());
        // A completion without its response still fits.
        assert!(table.complete(&b, &second.token, &Completion { is_kept: false, ..completion(5) }).unwrap());
        check(&table);
        for (operation, is) in [(&a, true), (&b, false)] {
            let begun = table.begin(operation, &claim()).unwrap();
            assert!(matches!(begun, Begun::Completed { is_kept, .. } if is_kept == is), "{begun:?}");
        }
    }

    /// The expired responses are removed in all shards, even if no operation begins.
    #[tokio::test(start_paused = true)]
    async fn expired_responses_make_room_for_others() {
        let table = OperationTable::new(200);
        let begin = |key: u32| {
            let (operation, claim) = (Operation::new("test", key), claim());
            table.begin(&operation, &claim).unwrap();
            (operation, claim.token)
        };
        let old: Vec<_> = (0..100).map(begin).collect();
        let new: Vec<_> = (100..102).map(begin).collect();
        for (operation, token) in &old {
            assert!(table.complete(operation, token, &completion(2 * BYTES_PER_RECORD)).unwrap());
        }
        let checkpoint = Checkpoint::new(1, "charged", b"").unwrap();
        for (operation, token) in &new {
            assert!(table.complete(operation, token, &completion(1)).unwrap_err().is_out_of_memory());
            let claim = Claim { token: *token, lease: Duration::from_secs(100), ..claim() };
            assert!(table.renew(operation, &claim, &BodyFingerprint::default()));
        }
        tokio::time::advance(Duration::from_secs(61)).await;
        let claim = Claim { token: new[0].1, ..claim() };
        assert!(table.checkpoint(&new[0].0, &claim, &BodyFingerprint::default(), &checkpoint).unwrap());
        check(&table);
        let response = completion(199 * BYTES_PER_RECORD);
        assert!(table.complete(&new[1].0, &new[1].1, &response).unwrap());
        check(&table);
    }

    #[tokio::test(start_paused = true)]
    async fn failing_operation_is_one_record() {
        let table = OperationTable::new(2);
        let operation = Operation::new("test", "a");
        for attempt in 1..1_000 {
            let claim = claim();
            let begun = table.begin(&operation, &claim).unwrap();
            assert!(matches!(begun, Begun::Granted { attempt: is, .. } if is == attempt), "{begun:?}");
            assert!(table.release(&operation, &claim));
        }
        check(&table);
    }
}
