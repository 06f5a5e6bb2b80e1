use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use tokio::time::Instant;

use super::MemoryBackend;
use crate::error::StoreError;
use crate::idempotency::{Begun, Claim, Completion, Digest, IdempotencyStore, Operation, Payload};
use crate::lock::{Scope, Token};

/// More than threads would ask at once.
const SHARDS: usize = 16;
/// How many bytes of answers there is room for with each record, on the average.
const ANSWER_SHARE: usize = 1_024;
/// How long an operation that was given back is remembered, as in Redis.
const KEEP_FREE: Duration = Duration::from_secs(600);
/// How many records that have run out are dropped for each new one.
const SWEEP: usize = 4;

/// The operations of this process. None is forgotten before its time: where there is no room, nothing can be begun.
pub(super) struct OperationTable {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    fence: AtomicU64,
    len: AtomicUsize,
    answer_bytes: AtomicUsize,
    capacity: usize,
}

#[derive(Default)]
struct Shard {
    records: IndexMap<Operation, Record>,
    // When to look whether a record has run out: no later than it does, one line for each record.
    due: BTreeMap<Line, Operation>,
    next: u64,
}

/// A time, and a number that no other line has.
type Line = (Instant, u64);

struct Record {
    state: State,
    head: Digest,
    token: Token,
    payload: Payload,
    fence: u64,
    attempt: u32,
    expires: Instant,
    line: Line,
}

enum State {
    Free,
    InFlight { ends: Instant },
    Completed { answer: Arc<[u8]>, is_kept: bool },
}

impl Record {
    fn is_in_flight_by(&self, token: &Token) -> bool {
        matches!(self.state, State::InFlight { .. }) && self.token == *token
    }

    fn answer_bytes(&self) -> usize {
        match &self.state {
            State::Completed { answer, .. } => answer.len(),
            State::Free | State::InFlight { .. } => 0,
        }
    }
}

impl OperationTable {
    pub(super) fn new(capacity: usize) -> Self {
        // A program that was started later gives out larger fences.
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            hasher: RandomState::new(),
            shards: Default::default(),
            fence: AtomicU64::new(started.as_micros() as u64),
            len: AtomicUsize::new(0),
            answer_bytes: AtomicUsize::new(0),
            capacity,
        }
    }

    /// A shard is changed in steps that do not panic, so what a poisoned lock guards is still whole.
    fn shard(&self, operation: &Operation) -> MutexGuard<'_, Shard> {
        let shard = self.hasher.hash_one(operation) as usize % SHARDS;
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, operation: &Operation, claim: &Claim) -> Result<Begun, StoreError> {
        let mut shard = self.shard(operation);
        let now = Instant::now();
        let mut attempt = 1;
        if let Some(record) = shard.records.get_mut(operation).filter(|record| now <= record.expires) {
            let payload = record.payload;
            match &record.state {
                State::Free if record.token == claim.token => {
                    return Ok(Begun::InFlight { remaining: Duration::from_millis(1), payload });
                }
                State::Free => {}
                _ if record.head != claim.head => return Ok(Begun::Mismatch),
                State::Completed { answer, is_kept } => {
                    return Ok(Begun::Completed { payload, answer: Arc::clone(answer), is_kept: *is_kept });
                }
                State::InFlight { .. } if record.token == claim.token => {
                    record.state = State::InFlight { ends: now + claim.lease };
                    record.expires = now + claim.lease + claim.retention;
                    return Ok(Begun::Granted { fence: record.fence, attempt: record.attempt });
                }
                State::InFlight { ends } if now < *ends => {
                    return Ok(Begun::InFlight { remaining: *ends - now, payload });
                }
                State::InFlight { .. } if !claim.takes_over => {
                    return Ok(Begun::Unknown { attempt: record.attempt, payload });
                }
                State::InFlight { .. } => {}
            }
            attempt = record.attempt.saturating_add(1);
        }
        self.sweep(&mut shard, now);
        let is_new = !shard.records.contains_key(operation);
        if is_new && self.len.load(Ordering::Relaxed) >= self.capacity {
            return Err(StoreError::out_of_memory("more operations are kept than the memory backend has room for"));
        }
        let fence = self.fence.fetch_add(1, Ordering::Relaxed) + 1;
        let record = Record {
            state: State::InFlight { ends: now + claim.lease },
            head: claim.head,
            token: claim.token,
            payload: Payload::default(),
            fence,
            attempt,
            expires: now + claim.lease + claim.retention,
            line: (now, 0),
        };
        self.put(&mut shard, operation, record);
        Ok(Begun::Granted { fence, attempt })
    }

    /// Writes a record in the place of the one that may be there.
    fn put(&self, shard: &mut Shard, operation: &Operation, record: Record) {
        self.answer_bytes.fetch_add(record.answer_bytes(), Ordering::Relaxed);
        match shard.records.insert(*operation, record) {
            Some(before) => {
                self.answer_bytes.fetch_sub(before.answer_bytes(), Ordering::Relaxed);
                shard.due.remove(&before.line);
            }
            None => {
                self.len.fetch_add(1, Ordering::Relaxed);
            }
        }
        shard.note(operation);
    }

    /// Forgets a couple of records that have run out.
    fn sweep(&self, shard: &mut Shard, now: Instant) {
        for _ in 0..SWEEP {
            let Some(entry) = shard.due.first_entry().filter(|entry| entry.key().0 < now) else { return };
            let operation = entry.remove();
            // One that was made to last longer since is looked at again.
            if shard.live(&operation, now).is_some() {
                shard.note(&operation);
            } else if let Some(record) = shard.records.swap_remove(&operation) {
                self.answer_bytes.fetch_sub(record.answer_bytes(), Ordering::Relaxed);
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn renew(&self, operation: &Operation, claim: &Claim, payload: &Payload) -> bool {
        let mut shard = self.shard(operation);
        let now = Instant::now();
        let Some(record) = shard.live(operation, now).filter(|record| record.is_in_flight_by(&claim.token)) else {
            return false;
        };
        record.state = State::InFlight { ends: now + claim.lease };
        record.expires = now + claim.lease + claim.retention;
        record.payload = *payload;
        true
    }

    fn complete(&self, operation: &Operation, token: &Token, completion: &Completion) -> Result<bool, StoreError> {
        let mut shard = self.shard(operation);
        let now = Instant::now();
        let Some(record) = shard.live(operation, now).filter(|record| record.token == *token) else {
            return Ok(false);
        };
        match record.state {
            State::Free => return Ok(false),
            State::Completed { .. } => return Ok(true),
            State::InFlight { .. } => {}
        }
        let Completion { answer, is_kept, payload, retention } = completion;
        let room = self.capacity.saturating_mul(ANSWER_SHARE);
        if self.answer_bytes.fetch_add(answer.len(), Ordering::Relaxed) + answer.len() > room {
            self.answer_bytes.fetch_sub(answer.len(), Ordering::Relaxed);
            return Err(StoreError::out_of_memory("more answers are kept than the memory backend has room for"));
        }
        record.state = State::Completed { answer: Arc::clone(answer), is_kept: *is_kept };
        record.payload = *payload;
        record.expires = now + *retention;
        shard.note(operation);
        Ok(true)
    }

    fn release(&self, operation: &Operation, token: &Token) -> bool {
        let mut shard = self.shard(operation);
        let now = Instant::now();
        let (mut fence, mut attempt) = (0, 0);
        if let Some(record) = shard.live(operation, now) {
            match record.state {
                State::Completed { .. } => return false,
                State::InFlight { .. } if record.token != *token => return false,
                State::InFlight { .. } | State::Free => (fence, attempt) = (record.fence, record.attempt),
            }
        }
        let free = Record {
            state: State::Free,
            head: Digest::default(),
            token: *token,
            payload: Payload::default(),
            fence,
            attempt,
            expires: now + KEEP_FREE,
            line: (now, 0),
        };
        // Nothing is to be remembered of a claim that has never come, if that costs room which there is not.
        if shard.records.contains_key(operation) || self.len.load(Ordering::Relaxed) < self.capacity {
            self.put(&mut shard, operation, free);
        }
        true
    }
}

impl Shard {
    /// The record of an operation, unless it has run out: it is there in its last instant still, as in Redis.
    fn live(&mut self, operation: &Operation, now: Instant) -> Option<&mut Record> {
        self.records.get_mut(operation).filter(|record| now <= record.expires)
    }

    /// Says when the record of an operation runs out, in the place of what was said before.
    fn note(&mut self, operation: &Operation) {
        let Some(record) = self.records.get_mut(operation) else { return };
        self.due.remove(&record.line);
        // Line 0 is nobody's: that of a record which has none yet.
        self.next += 1;
        record.line = (record.expires, self.next);
        self.due.insert(record.line, *operation);
    }
}

impl IdempotencyStore for MemoryBackend {
    async fn begin(&self, operation: &Operation, claim: &Claim) -> Result<Begun, StoreError> {
        self.inner.operations.begin(operation, claim)
    }

    async fn renew(&self, operation: &Operation, claim: &Claim, payload: &Payload) -> Result<bool, StoreError> {
        Ok(self.inner.operations.renew(operation, claim, payload))
    }

    async fn complete(
        &self,
        operation: &Operation,
        token: &Token,
        completion: &Completion,
    ) -> Result<bool, StoreError> {
        self.inner.operations.complete(operation, token, completion)
    }

    async fn release(&self, operation: &Operation, token: &Token) -> Result<bool, StoreError> {
        Ok(self.inner.operations.release(operation, token))
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }
}

impl MemoryBackend {
    /// How many operations are kept at the moment, those included that have run out and were not met yet.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.inner.operations.len.load(Ordering::Relaxed)
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
        }
    }

    fn completion(bytes: usize) -> Completion {
        let (answer, retention) = (vec![7; bytes].into(), Duration::from_secs(60));
        Completion { answer, is_kept: true, payload: Payload::default(), retention }
    }

    /// The books agree with what is kept.
    fn check(table: &OperationTable) {
        let (mut len, mut bytes) = (0, 0);
        for shard in &table.shards {
            let shard = shard.lock().unwrap();
            assert_eq!(shard.due.len(), shard.records.len());
            len += shard.records.len();
            bytes += shard.records.values().map(Record::answer_bytes).sum::<usize>();
        }
        assert_eq!(table.len.load(Ordering::Relaxed), len);
        assert_eq!(table.answer_bytes.load(Ordering::Relaxed), bytes);
    }

    #[tokio::test(start_paused = true)]
    async fn what_runs_out_is_forgotten_as_others_come_and_nothing_before() {
        let table = OperationTable::new(200);
        for i in 0..10_000_u32 {
            let (operation, claim) = (Operation::new("test", i), claim());
            let begun = table.begin(&operation, &claim).unwrap();
            assert!(matches!(begun, Begun::Granted { .. }), "{begun:?}");
            match i % 4 {
                0 => assert!(table.release(&operation, &claim.token)),
                1 => assert!(table.renew(&operation, &claim, &Payload::default())),
                _ => assert!(table.complete(&operation, &claim.token, &completion(100)).unwrap()),
            }
            // Those that are given back last the longest: 150 of them at a time.
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
    async fn there_is_room_for_so_much_and_nothing_is_forgotten_for_more() {
        let table = OperationTable::new(2);
        let (first, second) = (claim(), claim());
        let [a, b, c] = ["a", "b", "c"].map(|key| Operation::new("test", key));
        table.begin(&a, &first).unwrap();
        table.begin(&b, &second).unwrap();
        assert!(table.begin(&c, &claim()).unwrap_err().is_out_of_memory());
        assert!(table.complete(&a, &first.token, &completion(2 * ANSWER_SHARE)).unwrap());
        assert!(table.complete(&b, &second.token, &completion(1)).unwrap_err().is_out_of_memory());
        assert!(table.complete(&b, &second.token, &completion(0)).unwrap());
        check(&table);
        let begun = table.begin(&a, &claim()).unwrap();
        assert!(matches!(begun, Begun::Completed { .. }), "{begun:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_that_fails_again_and_again_is_one_record() {
        let table = OperationTable::new(2);
        let operation = Operation::new("test", "a");
        for attempt in 1..1_000 {
            let claim = claim();
            let begun = table.begin(&operation, &claim).unwrap();
            assert!(matches!(begun, Begun::Granted { attempt: is, .. } if is == attempt), "{begun:?}");
            assert!(table.release(&operation, &claim.token));
        }
        check(&table);
    }
}
