//! The scripts, and one typed call for each.

use std::time::Duration;

use redis::{Cmd, RedisError, RedisWrite, Script, ToRedisArgs, Value};
use smallvec::SmallVec;

use super::codec::job::{PackedFinishes, PackedJobs};
use super::codec::rate_limit::EncodedLimits;
use super::error;
use super::keys::QueueKeys;
use super::replicated::Outcome;
use super::topology::{Delivery, Servers};
use crate::delay_queue;
use crate::error::StoreError;
use crate::idempotency::{self, Answer, Checkpoint, Completion, Payload};
use crate::lock::{Claim, FenceFloor, Line, LockKey, LockKind, Token};
use crate::rate_limit::Receipt;

/// A Lua script and its hash, which is what Redis knows it by.
#[derive(Debug)]
pub(crate) struct LuaScript {
    code: String,
    hash: String,
}

macro_rules! lua {
    ($file:literal) => {
        LuaScript::new(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/lua/", $file)))
    };
}

/// All scripts, ready to run.
#[derive(Debug)]
pub(crate) struct Scripts {
    pub(crate) check: LuaScript,
    pub(crate) check_plain: LuaScript,
    pub(crate) check_many: LuaScript,
    pub(crate) block: LuaScript,
    pub(crate) lock_acquire: LuaScript,
    pub(crate) lock_acquire_all: LuaScript,
    pub(crate) lock_exchange: LuaScript,
    pub(crate) lock_line: LuaScript,
    pub(crate) lock_renew: LuaScript,
    pub(crate) lock_release: LuaScript,
    pub(crate) lock_inspect: LuaScript,
    pub(crate) lock_name: LuaScript,
    pub(crate) lock_seize: LuaScript,
    pub(crate) idempotency_begin: LuaScript,
    pub(crate) idempotency_renew: LuaScript,
    pub(crate) idempotency_checkpoint: LuaScript,
    pub(crate) idempotency_complete: LuaScript,
    pub(crate) idempotency_release: LuaScript,
    pub(crate) idempotency_inspect: LuaScript,
    pub(crate) idempotency_forget: LuaScript,
    pub(crate) idempotency_complete_unknown: LuaScript,
    pub(crate) delay_queue_push: LuaScript,
    pub(crate) delay_queue_claim: LuaScript,
    pub(crate) delay_queue_extend: LuaScript,
    pub(crate) delay_queue_control: LuaScript,
    pub(crate) probe: LuaScript,
    // What the replies to the calls for locks have shown, and what they are sent.
    pub(crate) floor: FenceFloor,
}

/// What is to become of the counts.
#[derive(Clone, Copy)]
pub(crate) enum CheckMode {
    Check,
    Peek,
    Settle(Receipt),
}

/// Whom a decision is about: see the header of `rate_limit_check.lua`.
pub(crate) struct Subject<'a> {
    pub(crate) keys: &'a [String],
    pub(crate) cost: i64,
    pub(crate) change: &'static str,
    pub(crate) packed: &'a EncodedLimits,
}

impl ToRedisArgs for Subject<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        self.cost.write_redis_args(out);
        out.write_arg(self.change.as_bytes());
        let EncodedLimits { limits, terms, layout, ttl_ms, .. } = self.packed;
        ttl_ms.write_redis_args(out);
        out.write_arg(terms);
        out.write_arg(layout.as_bytes());
        out.write_arg(limits);
    }

    fn num_of_args(&self) -> usize {
        6
    }
}

/// Subjects that are counted by one policy: see the header of `rate_limit_check_many.lua`.
pub(crate) struct Group<'a> {
    pub(crate) packed: &'a EncodedLimits,
    pub(crate) costs: SmallVec<[u32; 64]>,
}

impl ToRedisArgs for Group<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        let EncodedLimits { terms, limits, format, ttl_ms, .. } = self.packed;
        let mut head = SmallVec::<[u8; 8 + 4 * 64]>::new();
        head.extend_from_slice(&ttl_ms.to_le_bytes()[..6]);
        head.extend_from_slice(&(self.costs.len() as u16).to_le_bytes());
        if self.costs.iter().any(|cost| *cost != 1) {
            head.extend(self.costs.iter().flat_map(|cost| cost.to_le_bytes()));
        }
        out.write_arg(&head);
        out.write_arg(terms);
        out.write_arg(limits);
        out.write_arg(format.as_bytes());
    }

    fn num_of_args(&self) -> usize {
        4
    }
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            check: lua!("rate_limit_check.lua"),
            check_plain: lua!("rate_limit_check_plain.lua"),
            check_many: lua!("rate_limit_check_many.lua"),
            block: lua!("rate_limit_block.lua"),
            lock_acquire: lua!("lock_acquire.lua"),
            lock_acquire_all: lua!("lock_acquire_all.lua"),
            lock_exchange: lua!("lock_exchange.lua"),
            lock_line: lua!("lock_line.lua"),
            lock_renew: lua!("lock_renew.lua"),
            lock_release: lua!("lock_release.lua"),
            lock_inspect: lua!("lock_inspect.lua"),
            lock_name: lua!("lock_name.lua"),
            lock_seize: lua!("lock_seize.lua"),
            idempotency_begin: lua!("idempotency_begin.lua"),
            idempotency_renew: lua!("idempotency_renew.lua"),
            idempotency_checkpoint: lua!("idempotency_checkpoint.lua"),
            idempotency_complete: lua!("idempotency_complete.lua"),
            idempotency_release: lua!("idempotency_release.lua"),
            idempotency_inspect: lua!("idempotency_inspect.lua"),
            idempotency_forget: lua!("idempotency_forget.lua"),
            idempotency_complete_unknown: lua!("idempotency_complete_unknown.lua"),
            delay_queue_push: lua!("delay_queue_push.lua"),
            delay_queue_claim: lua!("delay_queue_claim.lua"),
            delay_queue_extend: lua!("delay_queue_extend.lua"),
            delay_queue_control: lua!("delay_queue_control.lua"),
            probe: lua!("server_probe.lua"),
            floor: FenceFloor::default(),
        }
    }

    pub(crate) async fn rate_limit_check(
        &self,
        servers: &Servers,
        verb: CheckMode,
        subjects: &[Subject<'_>],
    ) -> Result<Value, StoreError> {
        let keys: SmallVec<[&str; 4]> =
            subjects.iter().flat_map(|subject| subject.keys.iter().map(String::as_str)).collect();
        match verb {
            CheckMode::Check => self.check.call(servers, &keys, ("check", subjects)).await,
            CheckMode::Peek => self.check.call(servers, &keys, ("peek", subjects)).await,
            CheckMode::Settle(receipt) => {
                let missing: Vec<u32> = receipt.missing().take(Receipt::BUCKETS).collect();
                self.check.call(servers, &keys, ("settle", subjects, receipt.as_micros(), missing)).await
            }
        }
    }

    /// Charges a subject without sliding logs. An empty answer says that nothing was done, and the other script is to be asked.
    pub(crate) async fn rate_limit_check_plain(
        &self,
        servers: &Servers,
        key: &str,
        cost: u32,
        packed: &EncodedLimits,
    ) -> Result<Value, StoreError> {
        let EncodedLimits { terms, limits, counts, ttl_ms, .. } = packed;
        let mut request = SmallVec::<[u8; 128]>::new();
        request.extend_from_slice(&cost.to_le_bytes());
        request.extend_from_slice(&ttl_ms.to_le_bytes()[..6]);
        for length in [limits.len() + counts, limits.len()] {
            request.extend_from_slice(&(length as u16).to_le_bytes());
        }
        request.extend_from_slice(terms);
        request.extend_from_slice(limits);
        self.check_plain.call(servers, &[key], &*request).await
    }

    pub(crate) async fn rate_limit_block(
        &self,
        servers: &Servers,
        counts: &str,
        block_us: u64,
        packed: &EncodedLimits,
    ) -> Result<(), StoreError> {
        self.block.call(servers, &[counts], (block_us, packed.ttl_ms, &*packed.limits)).await.map(drop)
    }

    pub(crate) async fn lock_acquire(
        &self,
        way: Delivery<'_>,
        lease: &str,
        claim: &Claim,
    ) -> Result<Reply, StoreError> {
        let is_granted = |reply: &Value| matches!(reply, Value::Int(1..));
        let packed = packed_claim(claim, self.floor.for_claim(claim));
        let reply = self.lock_acquire.exchange(way, &[lease], packed.as_slice(), is_granted).await?;
        if let Reply::Replied(Value::Int(fence)) = reply {
            self.granted(fence, claim.fences);
        }
        Ok(reply)
    }

    /// All with the times of the first of them.
    pub(crate) async fn lock_acquire_all(
        &self,
        way: Delivery<'_>,
        leases: &[&str],
        wanted: &[(LockKey, Claim)],
    ) -> Result<Reply, StoreError> {
        let (ttl, fences) = wanted.first().map_or((Claim::MIN_TTL, 1), |(_, claim)| (claim.ttl, claim.fences));
        let floor = wanted.iter().map(|(_, claim)| self.floor.for_claim(claim)).max().unwrap_or_default();
        let tokens: Vec<_> = wanted.iter().map(|(_, claim)| claim.token.as_bytes().as_slice()).collect();
        let args = (millis(ttl), fences, KEEP_FENCE_MS, floor, tokens);
        let reply = self.lock_acquire_all.exchange(way, leases, args, begins_with_one).await?;
        self.granted_all(&reply, fences);
        Ok(reply)
    }

    /// At most [`MAX_LOCKS`] at once, with as many tokens. The keys are the leases that are wanted for `ttl`, those that are given back, and the
    /// channels of the latter. No fence that is granted is as small as `floor`.
    pub(crate) async fn lock_exchange(
        &self,
        servers: &Servers,
        keys: &[&str],
        tokens: &[u8],
        ttl: Duration,
        fences: u32,
        floor: u64,
    ) -> Result<Value, RedisError> {
        let floor = self.floor.get().max(floor);
        self.lock_exchange.run(servers, keys, &(tokens, millis(ttl), fences, KEEP_FENCE_MS, floor)).await
    }

    /// Notes what was granted, if that is a fence.
    pub(crate) fn granted(&self, fence: i64, fences: u32) {
        if let Ok(fence) = u64::try_from(fence) {
            self.floor.note(fence, fences);
        }
    }

    /// The same of a reply that begins with 1 where fences come after it.
    fn granted_all(&self, reply: &Reply, fences: u32) {
        if let Reply::Replied(Value::Array(numbers)) = reply
            && let [Value::Int(1), granted @ ..] = numbers.as_slice()
        {
            for fence in granted {
                if let Value::Int(fence) = fence {
                    self.granted(*fence, fences);
                }
            }
        }
    }

    /// For whoever stands in line, or respects it.
    pub(crate) async fn lock_line(
        &self,
        way: Delivery<'_>,
        keys: [&str; 4],
        claim: &Claim,
        publish: &str,
    ) -> Result<Reply, StoreError> {
        let longest = if claim.line == Line::Join { Claim::MAX_LINE } else { 0 };
        let floor = self.floor.for_claim(claim);
        let args = (claim_args(claim), held_as(claim), millis(Claim::PLACE), longest, publish, floor);
        let reply = self.lock_line.exchange(way, &keys, args, begins_with_one).await?;
        self.granted_all(&reply, claim.fences);
        Ok(reply)
    }

    /// At most [`MAX_RENEWALS`] at once.
    pub(crate) async fn lock_renew(
        &self,
        way: Delivery<'_>,
        leases: &[&str],
        terms: &[(&Token, Duration)],
    ) -> Result<Reply, StoreError> {
        let terms: Vec<_> = terms.iter().map(|(token, ttl)| (token.as_bytes().as_slice(), millis(*ttl))).collect();
        let is_any_renewed = |reply: &Value| matches!(reply, Value::Array(renewed) if renewed.contains(&Value::Int(1)));
        self.lock_renew.exchange(way, leases, (KEEP_FENCE_MS, terms), is_any_renewed).await
    }

    pub(crate) async fn lock_release(
        &self,
        servers: &Servers,
        keys: &[&str],
        token: &Token,
        channel: &str,
        publish: &str,
    ) -> Result<Value, StoreError> {
        let publish = (publish != "PUBLISH").then_some(publish);
        let args = (token.as_bytes().as_slice(), KEEP_FENCE_MS, channel, publish);
        self.lock_release.call(servers, keys, args).await
    }

    pub(crate) async fn lock_inspect(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        most: usize,
    ) -> Result<Value, StoreError> {
        self.lock_inspect.call(servers, &keys, most).await
    }

    pub(crate) async fn lock_name(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        token: &Token,
        name: &str,
    ) -> Result<Value, StoreError> {
        self.lock_name.call(servers, &keys, (token.as_bytes().as_slice(), name)).await
    }

    pub(crate) async fn lock_seize(
        &self,
        servers: &Servers,
        lease: &str,
        channel: &str,
        publish: &str,
    ) -> Result<Value, StoreError> {
        self.lock_seize.call(servers, &[lease], (KEEP_FENCE_MS, publish, channel, self.floor.get())).await
    }

    pub(crate) async fn idempotency_begin(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        claim: &idempotency::Claim,
        most: u64,
    ) -> Result<Value, StoreError> {
        let idempotency::Claim { token, head, lease, retention, takes_over, .. } = claim;
        let times = (millis(*lease), millis(*retention));
        let args = (token.as_bytes().as_slice(), head.0.as_slice(), times, u8::from(*takes_over), most);
        self.idempotency_begin.call(servers, &keys, args).await
    }

    pub(crate) async fn idempotency_renew(
        &self,
        servers: &Servers,
        record: &str,
        claim: &idempotency::Claim,
        payload: &Payload,
    ) -> Result<Value, StoreError> {
        let (token, payload) = (claim.token.as_bytes().as_slice(), payload.to_bytes());
        let args = (token, millis(claim.lease), millis(claim.retention), payload.as_slice());
        self.idempotency_renew.call(servers, &[record], args).await
    }

    pub(crate) async fn idempotency_checkpoint(
        &self,
        servers: &Servers,
        record: &str,
        claim: &idempotency::Claim,
        payload: &Payload,
        checkpoint: &Checkpoint,
    ) -> Result<Value, StoreError> {
        let (token, payload, checkpoint) =
            (claim.token.as_bytes().as_slice(), payload.to_bytes(), checkpoint.to_bytes());
        let times = (millis(claim.lease), millis(claim.retention));
        let args = (token, times, payload.as_slice(), checkpoint.as_slice());
        self.idempotency_checkpoint.call(servers, &[record], args).await
    }

    pub(crate) async fn idempotency_complete(
        &self,
        servers: &Servers,
        record: &str,
        token: &Token,
        completion: &Completion,
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let Completion { answer, is_kept, payload, retention } = completion;
        let state = if *is_kept { 2 } else { 3 };
        let payload = payload.to_bytes();
        let kept = (state, millis(*retention), payload.as_slice(), &**answer);
        let args = (token.as_bytes().as_slice(), kept, publish, channel);
        self.idempotency_complete.call(servers, &[record], args).await
    }

    pub(crate) async fn idempotency_release(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        token: &Token,
        most: u64,
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let args = (token.as_bytes().as_slice(), KEEP_ATTEMPT_MS, publish, channel, most);
        self.idempotency_release.call(servers, &keys, args).await
    }

    pub(crate) async fn idempotency_inspect(&self, servers: &Servers, record: &str) -> Result<Value, StoreError> {
        self.idempotency_inspect.call(servers, &[record], Checkpoint::MAX_LEN).await
    }

    pub(crate) async fn idempotency_forget(
        &self,
        servers: &Servers,
        record: &str,
        (state, fence): (u8, u64),
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let args = (state, fence, KEEP_ATTEMPT_MS, publish, channel);
        self.idempotency_forget.call(servers, &[record], args).await
    }

    pub(crate) async fn idempotency_complete_unknown(
        &self,
        servers: &Servers,
        record: &str,
        (found, fence): (u8, u64),
        (answer, retention): (&Answer, Duration),
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let state = if answer.is_kept() { 2 } else { 3 };
        let args = (fence, found, state, millis(retention), &**answer.bytes(), publish, channel);
        self.idempotency_complete_unknown.call(servers, &[record], args).await
    }
}

impl Scripts {
    /// Jobs of one priority, at most 256: see the header of `delay_queue_push.lua`.
    pub(crate) async fn delay_queue_push(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        priority: usize,
        max_jobs: u64,
        jobs: &PackedJobs<'_>,
    ) -> Result<Value, StoreError> {
        let (names, args) = delay_queue_push(servers, keys, priority, max_jobs, jobs);
        self.delay_queue_push.call(servers, &names, args).await
    }

    /// The same as a command by itself, with the text of the script.
    pub(crate) fn delay_queue_push_command(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        priority: usize,
        max_jobs: u64,
        jobs: &PackedJobs<'_>,
    ) -> Cmd {
        let (names, args) = delay_queue_push(servers, keys, priority, max_jobs, jobs);
        command("EVAL", &self.delay_queue_push.code, &names, &args)
    }

    /// Waits for `patience`: what is claimed by a call that nobody waits for any more is nobody's until its lease has ended.
    pub(crate) async fn delay_queue_claim(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        claim: &delay_queue::Claim,
        finished: &PackedFinishes,
        patience: Duration,
    ) -> Result<Value, StoreError> {
        let delay_queue::Claim { worker, limit, lease, dead } = claim;
        let terms = (limit, millis(*lease), dead.count, millis(dead.age));
        let args = (KEEP_JOBS_MS, publish(servers), &keys.wake, worker.to_string(), terms, finished);
        let reply = self.delay_queue_claim.run_on(servers, &all_of(keys), &args, Some(patience)).await;
        reply.map_err(error::store_error)
    }

    pub(crate) async fn delay_queue_extend(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        lease: Duration,
        tickets: &[Vec<u8>],
    ) -> Result<Value, StoreError> {
        let names = [keys.leases.as_str(), &keys.jobs, &keys.cancels];
        let tickets: Vec<_> = tickets.iter().map(Vec::as_slice).collect();
        self.delay_queue_extend.call(servers, &names, (KEEP_JOBS_MS, millis(lease), tickets)).await
    }

    pub(crate) async fn delay_queue_control(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        verb: &str,
        args: impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        let args = (KEEP_JOBS_MS, publish(servers), &keys.wake, verb, args);
        self.delay_queue_control.call(servers, &all_of(keys), args).await
    }
}

/// The keys and arguments of `delay_queue_push`.
fn delay_queue_push<'a>(
    servers: &Servers,
    keys: &'a QueueKeys,
    priority: usize,
    max_jobs: u64,
    jobs: &'a PackedJobs<'a>,
) -> ([&'a str; 8], impl ToRedisArgs + use<'a>) {
    let QueueKeys { jobs: records, due, dead, unique, unique_ends, state, idle, runs, wake, .. } = keys;
    let names = [records, &due[priority], dead, unique, unique_ends, state, idle, runs].map(String::as_str);
    (names, (KEEP_JOBS_MS, max_jobs, publish(servers), wake.as_str(), jobs))
}

fn all_of(keys: &QueueKeys) -> [&str; 12] {
    let QueueKeys { jobs, due: [high, normal, low], leases, dead, unique, cancels, state, idle, runs, snoozed, .. } =
        keys;
    [jobs, high, normal, low, leases, dead, unique, cancels, state, idle, runs, snoozed].map(String::as_str)
}

/// A cluster sends what is published by PUBLISH to all of its nodes.
const fn publish(servers: &Servers) -> &'static str {
    if servers.is_cluster() { "SPUBLISH" } else { "PUBLISH" }
}

/// How long the keys of a queue outlive the last time at which something in them is due.
pub(crate) const KEEP_JOBS_MS: u64 = 180 * 86_400 * 1_000;

/// One argument costs less than one for each.
fn claim_args(claim: &Claim) -> (&[u8], u64, u32, u64, u32) {
    (claim.token.as_bytes(), millis(claim.ttl), claim.fences, KEEP_FENCE_MS, permits(claim))
}

/// How many may hold it in the same way.
const fn permits(claim: &Claim) -> u32 {
    match claim.kind {
        LockKind::Semaphore => claim.permits,
        LockKind::ReadWrite if claim.is_shared => claim.permits,
        LockKind::Exclusive | LockKind::ReadWrite => 1,
    }
}

/// The byte of a lease's value that says how it is held.
const fn held_as(claim: &Claim) -> u8 {
    match (claim.kind, claim.line) {
        (LockKind::Exclusive, Line::Ignore) => 1,
        (LockKind::Semaphore, Line::Ignore) => 2,
        (LockKind::Semaphore, Line::Respect | Line::Join) => 6,
        (LockKind::Exclusive, Line::Respect | Line::Join) => 3,
        (LockKind::ReadWrite, _) => {
            if claim.is_shared {
                4
            } else {
                5
            }
        }
    }
}

/// The kind of lock behind that byte.
pub(crate) const fn lock_kind(held_as: u64) -> Option<LockKind> {
    match held_as {
        1 | 3 => Some(LockKind::Exclusive),
        2 | 6 => Some(LockKind::Semaphore),
        4 | 5 => Some(LockKind::ReadWrite),
        _ => None,
    }
}

/// The claim as `lock_acquire` has it.
fn packed_claim(claim: &Claim, floor: u64) -> [u8; 40] {
    let mut packed = [0; 40];
    let (token, numbers) = packed.split_at_mut(16);
    token.copy_from_slice(claim.token.as_bytes());
    let (terms, rest) = numbers.split_at_mut(16);
    let numbers = [millis(claim.ttl), claim.fences.into(), KEEP_FENCE_MS, permits(claim).into()];
    for (term, number) in terms.as_chunks_mut().0.iter_mut().zip(numbers) {
        *term = u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    }
    // One byte of kind, and seven of a number that is below 2^53.
    rest.copy_from_slice(&(floor << 8 | u64::from(held_as(claim))).to_le_bytes());
    packed
}

/// What a script answers that replicas may have to know of.
pub(crate) enum Reply {
    /// They do, if there is something to know.
    Replied(Value),
    /// So few do.
    Insufficient(u32),
}

/// Whether a script of locks grants what it was asked for.
fn begins_with_one(reply: &Value) -> bool {
    matches!(reply, Value::Array(numbers) if numbers.first() == Some(&Value::Int(1)))
}

/// How many leases one call of `lock_exchange` takes, as the script has it.
pub(crate) const MAX_LOCKS: usize = 64;

/// How many leases one call of `lock_renew` takes, as the script has it.
pub(crate) const MAX_RENEWALS: usize = 128;

/// How long the last fence of a lock is remembered after its lease. Fences go on to rise without that, by the server's clock;
/// this is by how much the clock may be set back, or that of a replica be behind that takes over, for them to rise all the same. A
/// quarter more than the ten minutes that are promised: locks that go together leave it as it is most of the time.
const KEEP_FENCE_MS: u64 = 10 * 60 * 1_000 * 5 / 4;

/// The same for an attempt at an operation that was given back.
const KEEP_ATTEMPT_MS: u64 = 10 * 60 * 1_000;

/// Rounded up: a lease is never shorter than was asked for.
pub(crate) fn millis(ttl: Duration) -> u64 {
    ttl.as_micros().div_ceil(1_000) as u64
}

impl LuaScript {
    pub(crate) fn new(code: &str) -> Self {
        Self { code: code.to_owned(), hash: Script::new(code).get_hash().to_owned() }
    }

    #[cfg(test)]
    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// Runs the script by its hash, and by its text where the server does not know it: after a restart, a failover, a move of
    /// its slot or `SCRIPT FLUSH`. A server that answers NOSCRIPT has done nothing, so nothing happens twice.
    pub(crate) async fn run(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: &impl ToRedisArgs,
    ) -> Result<Value, RedisError> {
        self.run_on(servers, keys, args, None).await
    }

    /// The same, for longer or less than commands are waited for otherwise.
    async fn run_on(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: &impl ToRedisArgs,
        patience: Option<Duration>,
    ) -> Result<Value, RedisError> {
        // All keys of a script are in one slot, so any of them will do.
        let key = keys.first().copied().unwrap_or_default();
        match servers.exchange(key, &command("EVALSHA", &self.hash, keys, args), patience).await {
            Err(error) if error::is_no_script(&error) => {
                servers.exchange(key, &command("EVAL", &self.code, keys, args), patience).await
            }
            reply => reply,
        }
    }

    /// The same, and waits for replicas if `is_granted` says that they have to have what the script has written.
    async fn exchange(
        &self,
        way: Delivery<'_>,
        keys: &[&str],
        args: impl ToRedisArgs,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Reply, StoreError> {
        let key = keys.first().copied().unwrap_or_default();
        let answer = match way.exchange(key, &command("EVALSHA", &self.hash, keys, &args), is_granted).await {
            Err(error) if error::is_no_script(&error) => {
                way.exchange(key, &command("EVAL", &self.code, keys, &args), is_granted).await
            }
            answer => answer,
        };
        match answer.map_err(error::store_error)? {
            Outcome::Replied(reply) => Ok(Reply::Replied(reply)),
            Outcome::Insufficient(replicas) => Ok(Reply::Insufficient(replicas)),
            Outcome::Indeterminate(error) => match error::store_error(error) {
                error if error.is_timeout() || error.is_unavailable() => Err(error),
                // Whatever it says, the lease has been granted.
                error => Err(StoreError::other(error)),
            },
        }
    }

    /// Runs the script, and makes sure that it could be run by its text too if the server forgot it.
    pub(crate) async fn run_and_verify(
        &self,
        servers: &Servers,
        key: &str,
        args: &impl ToRedisArgs,
    ) -> Result<Value, RedisError> {
        let keys = &[key];
        match servers.exchange(key, &command("EVALSHA", &self.hash, keys, args), None).await {
            Ok(reply) => servers.exchange(key, &command("EVAL", "", keys, args), None).await.map(|_| reply),
            Err(error) if error::is_no_script(&error) => {
                servers.exchange(key, &command("EVAL", &self.code, keys, args), None).await
            }
            Err(error) => Err(error),
        }
    }

    async fn call(&self, servers: &Servers, keys: &[&str], args: impl ToRedisArgs) -> Result<Value, StoreError> {
        self.run(servers, keys, &args).await.map_err(error::store_error)
    }
}

fn command(verb: &str, script: &str, keys: &[&str], args: &impl ToRedisArgs) -> Cmd {
    let bytes = verb.len() + script.len() + keys.iter().map(|key| key.len()).sum::<usize>() + 192;
    let mut command = Cmd::with_capacity(10 + keys.len(), bytes);
    command.arg(verb).arg(script).arg(keys.len());
    for key in keys {
        command.arg(key);
    }
    command.arg(args);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words behind `KEYS[1]`, `ARGV[1]` and so on in the header of a script.
    fn declared(header: &str, what: &str) -> Vec<String> {
        let names = (1..).map_while(|i| {
            let tag = format!("-- {what}[{i}]");
            let line = header.lines().find_map(|line| line.strip_prefix(&tag))?;
            line.split_whitespace().next().map(str::to_owned)
        });
        names.collect()
    }

    #[test]
    fn headers_agree_with_bodies_and_calls() {
        let scripts = Scripts::new();
        // How many keys and arguments the typed calls above give for one subject or lease.
        let calls = [
            (&scripts.check, 1, 10),
            (&scripts.check_plain, 1, 1),
            (&scripts.check_many, 1, 1),
            (&scripts.block, 1, 3),
            (&scripts.probe, 1, 1),
            (&scripts.lock_acquire, 1, 1),
            (&scripts.lock_acquire_all, 1, 5),
            (&scripts.lock_exchange, 1, 5),
            (&scripts.lock_line, 4, 10),
            (&scripts.lock_renew, 1, 2),
            (&scripts.lock_release, 3, 4),
            (&scripts.lock_inspect, 2, 1),
            (&scripts.lock_name, 2, 2),
            (&scripts.lock_seize, 1, 4),
            (&scripts.idempotency_begin, 2, 6),
            (&scripts.idempotency_renew, 1, 4),
            (&scripts.idempotency_checkpoint, 1, 5),
            (&scripts.idempotency_complete, 1, 7),
            (&scripts.idempotency_release, 2, 5),
            (&scripts.idempotency_inspect, 1, 1),
            (&scripts.idempotency_forget, 1, 5),
            (&scripts.idempotency_complete_unknown, 1, 7),
            (&scripts.delay_queue_push, 8, 6),
            (&scripts.delay_queue_claim, 12, 11),
            (&scripts.delay_queue_extend, 3, 3),
            (&scripts.delay_queue_control, 12, 5),
        ];
        for (script, keys, args) in calls {
            let (header, body) = script.code.split_at(script.code.find("\nlocal ").unwrap());
            for (what, count) in [("KEYS", keys), ("ARGV", args)] {
                let names = declared(header, what);
                assert_eq!(names.len(), count, "{what} in the header");
                assert!(!body.contains(&format!("{what}[{}]", count + 1)), "{what} that the header does not have");
                for name in names {
                    assert!(body.contains(&name), "the body names {name} as the header does");
                }
            }
            for word in ["Value ", "Returns ", "Errors ", "Repeat "] {
                assert!(header.contains(&format!("-- {word}")), "the header states {word}");
            }
        }
    }

    #[test]
    fn a_call_is_one_command_with_all_arguments() {
        let packed = EncodedLimits {
            terms: b"terms".to_vec(),
            limits: b"limits".to_vec(),
            layout: "<d".into(),
            format: "c6<d".into(),
            counts: 8,
            ttl_ms: 60_000,
        };
        let subject = Subject { keys: &[], cost: 5, change: "keep", packed: &packed };
        let command = command("EVALSHA", "abc", &["key"], &("check", &[subject]));
        let packed = String::from_utf8(command.get_packed_command()).unwrap();
        let words: Vec<_> = packed.split("\r\n").filter(|word| !word.starts_with(['*', '$'])).collect();
        assert_eq!(words, ["EVALSHA", "abc", "1", "key", "check", "5", "keep", "60000", "terms", "<d", "limits", ""]);
    }
}
