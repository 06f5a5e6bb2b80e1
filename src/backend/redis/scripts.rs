//! The Lua scripts, with a typed call for each.

use std::time::Duration;

use redis::{Cmd, RedisError, RedisWrite, Script, ToRedisArgs, Value};
use smallvec::SmallVec;

use super::codec::job::{PackedFinishes, PackedJobs};
use super::codec::millis::millis;
use super::codec::rate_limit::EncodedLimits;
use super::error;
use super::keys::{CacheKeys, QueueKeys};
use super::replicated::Outcome;
use super::topology::{Delivery, Servers};
use crate::cache::exists_filter::store::{self as exists_filter, KeyBits, Layout, NewBits};
use crate::cache::store::{self as cache, EntryId, Mark, NewEntry, TagGeneration};
use crate::delay_queue;
use crate::error::StoreError;
use crate::idempotency::store::{BodyFingerprint, Completion};
use crate::idempotency::{self, Checkpoint, StoredResponse};
use crate::lock::store::{Claim, Queueing, Token};
use crate::lock::{FenceFloor, LockKey, LockKind};
use crate::rate_limit::Receipt;

/// A Lua script and its hash, by which Redis identifies it.
#[derive(Debug)]
pub(crate) struct LuaScript {
    code: String,
    hash: String,
}

/// A script, after the includes that its header names.
macro_rules! lua {
    ($file:literal $(, $prefix:ident: $($include:ident)+)*) => {
        LuaScript::new(concat!(
            $($(lua_file!("includes/", stringify!($prefix), "_", stringify!($include), ".lua"),)+)*
            lua_file!($file),
        ))
    };
}

macro_rules! lua_file {
    ($($part:expr),+) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/lua/", $($part),+))
    };
}

/// All scripts.
#[derive(Debug)]
pub(crate) struct Scripts {
    pub(crate) check: LuaScript,
    pub(crate) check_plain: LuaScript,
    pub(crate) check_many: LuaScript,
    pub(crate) block: LuaScript,
    pub(crate) lock_acquire: LuaScript,
    pub(crate) lock_acquire_all: LuaScript,
    pub(crate) lock_exchange: LuaScript,
    pub(crate) lock_queue: LuaScript,
    pub(crate) lock_renew: LuaScript,
    pub(crate) lock_release: LuaScript,
    pub(crate) lock_inspect: LuaScript,
    pub(crate) lock_name: LuaScript,
    pub(crate) lock_force_release: LuaScript,
    pub(crate) idempotency_begin: LuaScript,
    pub(crate) idempotency_renew: LuaScript,
    pub(crate) idempotency_complete: LuaScript,
    pub(crate) idempotency_release: LuaScript,
    pub(crate) idempotency_inspect: LuaScript,
    pub(crate) idempotency_forget: LuaScript,
    pub(crate) idempotency_complete_unknown: LuaScript,
    pub(crate) cache_claim: LuaScript,
    pub(crate) cache_renew: LuaScript,
    pub(crate) cache_put: LuaScript,
    pub(crate) cache_release: LuaScript,
    pub(crate) cache_invalidate: LuaScript,
    pub(crate) cache_generation: LuaScript,
    pub(crate) cache_filter_allocate: LuaScript,
    pub(crate) cache_filter_begin: LuaScript,
    pub(crate) cache_filter_add: LuaScript,
    pub(crate) cache_filter_end: LuaScript,
    pub(crate) delay_queue_push: LuaScript,
    pub(crate) delay_queue_claim: LuaScript,
    pub(crate) delay_queue_extend: LuaScript,
    pub(crate) delay_queue_get: LuaScript,
    pub(crate) delay_queue_cancel: LuaScript,
    pub(crate) delay_queue_reschedule: LuaScript,
    pub(crate) delay_queue_replace: LuaScript,
    pub(crate) delay_queue_counts: LuaScript,
    pub(crate) delay_queue_list: LuaScript,
    pub(crate) delay_queue_pause: LuaScript,
    pub(crate) delay_queue_purge: LuaScript,
    pub(crate) delay_queue_release_unique: LuaScript,
    pub(crate) delay_queue_replay: LuaScript,
    pub(crate) delay_queue_forget: LuaScript,
    pub(crate) probe: LuaScript,
    // The largest fence in any reply to a lock call. Acquisitions send it as the floor of new fences.
    pub(crate) floor: FenceFloor,
}

/// How a call uses the counts.
#[derive(Clone, Copy)]
pub(crate) enum CheckMode {
    Check,
    Peek,
    Settle(Receipt),
}

/// A descriptor: see the header of `rate_limit_check.lua`.
pub(crate) struct Descriptor<'a> {
    pub(crate) keys: &'a [String],
    pub(crate) cost: i64,
    pub(crate) quota_change: &'static str,
    pub(crate) limits: &'a EncodedLimits,
}

impl ToRedisArgs for Descriptor<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        self.cost.write_redis_args(out);
        out.write_arg(self.quota_change.as_bytes());
        let EncodedLimits { limits, params, layout, ttl_ms, .. } = self.limits;
        ttl_ms.write_redis_args(out);
        out.write_arg(params);
        out.write_arg(layout.as_bytes());
        out.write_arg(limits);
    }

    fn num_of_args(&self) -> usize {
        6
    }
}

/// The descriptors of one policy: see the header of `rate_limit_check_many.lua`.
pub(crate) struct Group<'a> {
    pub(crate) limits: &'a EncodedLimits,
    pub(crate) costs: SmallVec<[u64; 64]>,
}

impl ToRedisArgs for Group<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        let EncodedLimits { params, limits, format, ttl_ms, .. } = self.limits;
        let mut head = SmallVec::<[u8; 8 + 7 * 64]>::new();
        head.extend_from_slice(&ttl_ms.to_le_bytes()[..6]);
        head.extend_from_slice(&(self.costs.len() as u16).to_le_bytes());
        if self.costs.iter().any(|cost| *cost != 1) {
            self.costs.iter().for_each(|cost| head.extend_from_slice(&cost.to_le_bytes()[..7]));
        }
        out.write_arg(&head);
        out.write_arg(params);
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
            check: lua!("rate_limit_check.lua", rate_limit: refill fade),
            check_plain: lua!("rate_limit_check_plain.lua", rate_limit: refill fade),
            check_many: lua!("rate_limit_check_many.lua", rate_limit: refill fade),
            block: lua!("rate_limit_block.lua"),
            lock_acquire: lua!("lock_acquire.lua"),
            lock_acquire_all: lua!("lock_acquire_all.lua"),
            lock_exchange: lua!("lock_exchange.lua"),
            lock_queue: lua!("lock_queue.lua", server: notify),
            lock_renew: lua!("lock_renew.lua"),
            lock_release: lua!("lock_release.lua"),
            lock_inspect: lua!("lock_inspect.lua"),
            lock_name: lua!("lock_name.lua"),
            lock_force_release: lua!("lock_force_release.lua", server: notify),
            idempotency_begin: lua!("idempotency_begin.lua", idempotency: record),
            idempotency_renew: lua!("idempotency_renew.lua"),
            idempotency_complete: lua!("idempotency_complete.lua", server: notify),
            idempotency_release: lua!("idempotency_release.lua", server: notify),
            idempotency_inspect: lua!("idempotency_inspect.lua", idempotency: record),
            idempotency_forget: lua!("idempotency_forget.lua", server: notify, idempotency: record),
            idempotency_complete_unknown: lua!("idempotency_complete_unknown.lua", server: notify, idempotency: record),
            delay_queue_push: lua!("delay_queue_push.lua", server: notify, delay_queue: time wake),
            delay_queue_claim: lua!(
                "delay_queue_claim.lua",
                server: notify,
                delay_queue: time keys record runs unique wake rare settle fetch finish reclaim take
            ),
            delay_queue_extend: lua!("delay_queue_extend.lua", delay_queue: time),
            delay_queue_get: lua!("delay_queue_get.lua", delay_queue: time keys record runs find),
            delay_queue_cancel: lua!(
                "delay_queue_cancel.lua",
                delay_queue: time keys record runs split find unique free
            ),
            delay_queue_reschedule: lua!(
                "delay_queue_reschedule.lua",
                server: notify,
                delay_queue: time keys record runs split find wake state
            ),
            delay_queue_replace: lua!("delay_queue_replace.lua", delay_queue: time keys record runs find),
            delay_queue_counts: lua!("delay_queue_counts.lua", delay_queue: time keys),
            delay_queue_list: lua!("delay_queue_list.lua", delay_queue: time keys record runs),
            delay_queue_pause: lua!("delay_queue_pause.lua", server: notify, delay_queue: time keys wake state),
            delay_queue_purge: lua!("delay_queue_purge.lua", delay_queue: time keys record runs split unique free),
            delay_queue_release_unique: lua!("delay_queue_release_unique.lua", delay_queue: time keys unique),
            delay_queue_replay: lua!(
                "delay_queue_replay.lua",
                server: notify,
                delay_queue: time keys record unique wake state
            ),
            delay_queue_forget: lua!("delay_queue_forget.lua", delay_queue: time keys record unique free),
            cache_claim: lua!("cache_claim.lua"),
            cache_renew: lua!("cache_renew.lua"),
            cache_put: lua!("cache_put.lua", server: notify),
            cache_release: lua!("cache_release.lua", server: notify),
            cache_invalidate: lua!("cache_invalidate.lua", server: notify),
            cache_generation: lua!("cache_generation.lua"),
            cache_filter_allocate: lua!("cache_filter_allocate.lua", cache_filter: header),
            cache_filter_begin: lua!("cache_filter_begin.lua", cache_filter: header),
            cache_filter_add: lua!("cache_filter_add.lua", cache_filter: header),
            cache_filter_end: lua!("cache_filter_end.lua", cache_filter: header),
            probe: lua!("server_probe.lua"),
            floor: FenceFloor::default(),
        }
    }

    pub(crate) async fn rate_limit_check(
        &self,
        servers: &Servers,
        verb: CheckMode,
        descriptors: &[Descriptor<'_>],
    ) -> Result<Value, StoreError> {
        let keys: SmallVec<[&str; 4]> =
            descriptors.iter().flat_map(|descriptor| descriptor.keys.iter().map(String::as_str)).collect();
        match verb {
            CheckMode::Check => self.check.call(servers, &keys, ("check", descriptors)).await,
            CheckMode::Peek => self.check.call(servers, &keys, ("peek", descriptors)).await,
            CheckMode::Settle(receipt) => {
                let missing: Vec<u64> = receipt.missing().take(Receipt::BUCKETS).collect();
                self.check.call(servers, &keys, ("settle", descriptors, receipt.as_micros(), missing)).await
            }
        }
    }

    /// Charges a descriptor without sliding logs. An empty reply means that nothing was changed, and that the caller has to use
    /// [`rate_limit_check`](Self::rate_limit_check).
    pub(crate) async fn rate_limit_check_plain(
        &self,
        servers: &Servers,
        key: &str,
        cost: u64,
        encoded: &EncodedLimits,
    ) -> Result<Value, StoreError> {
        let EncodedLimits { params, limits, counts, ttl_ms, .. } = encoded;
        let mut request = SmallVec::<[u8; 160]>::new();
        request.extend_from_slice(&cost.to_le_bytes()[..7]);
        request.extend_from_slice(&ttl_ms.to_le_bytes()[..6]);
        for length in [limits.len() + counts, limits.len()] {
            request.extend_from_slice(&(length as u16).to_le_bytes());
        }
        request.extend_from_slice(params);
        request.extend_from_slice(limits);
        self.check_plain.call(servers, &[key], &*request).await
    }

    pub(crate) async fn rate_limit_block(
        &self,
        servers: &Servers,
        counts: &str,
        block_us: u64,
        encoded: &EncodedLimits,
    ) -> Result<(), StoreError> {
        self.block.call(servers, &[counts], (block_us, encoded.ttl_ms, &*encoded.limits)).await.map(drop)
    }

    pub(crate) async fn lock_acquire(
        &self,
        way: Delivery<'_>,
        lease: &str,
        claim: &Claim,
    ) -> Result<Reply, StoreError> {
        let is_granted = |reply: &Value| matches!(reply, Value::Int(1..));
        let encoded_claim = encode_claim(claim, self.floor.for_claim(claim));
        let reply = self.lock_acquire.exchange(way, &[lease], encoded_claim.as_slice(), is_granted).await?;
        if let Reply::Replied(Value::Int(fence)) = reply {
            self.granted(fence, claim.fences);
        }
        Ok(reply)
    }

    /// Acquires all locks or none, with the lease duration and the number of fences of the first claim.
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

    /// Acquires and releases leases, at most [`MAX_LOCKS`] in all, with a token for each. The keys are the leases to acquire for `ttl`, the
    /// leases to release, and the channels of the latter. All granted fences are larger than `floor`.
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

    /// Records the fence of a grant. A negative number is no grant, and is ignored.
    pub(crate) fn granted(&self, fence: i64, fences: u32) {
        if let Ok(fence) = u64::try_from(fence) {
            self.floor.raise(fence, fences);
        }
    }

    /// The same for a reply that begins with 1, followed by fences.
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

    /// Acquires a lock for a claim that joins or respects the wait queue, or for a read/write lock.
    pub(crate) async fn lock_queue(
        &self,
        way: Delivery<'_>,
        keys: [&str; 4],
        claim: &Claim,
        publish: &str,
    ) -> Result<Reply, StoreError> {
        let longest = if claim.queueing == Queueing::Enqueue { Claim::MAX_QUEUE } else { 0 };
        let floor = self.floor.for_claim(claim);
        let args = (claim_args(claim), held_as(claim), millis(Claim::POSITION_TTL), longest, publish, floor);
        let reply = self.lock_queue.exchange(way, &keys, args, begins_with_one).await?;
        self.granted_all(&reply, claim.fences);
        Ok(reply)
    }

    /// Renews at most [`MAX_RENEWALS`] leases.
    pub(crate) async fn lock_renew(
        &self,
        way: Delivery<'_>,
        leases: &[&str],
        renewals: &[(&Token, Duration)],
    ) -> Result<Reply, StoreError> {
        let renewals: Vec<_> =
            renewals.iter().map(|(token, ttl)| (token.as_bytes().as_slice(), millis(*ttl))).collect();
        let is_any_renewed = |reply: &Value| matches!(reply, Value::Array(renewed) if renewed.contains(&Value::Int(1)));
        self.lock_renew.exchange(way, leases, (KEEP_FENCE_MS, renewals), is_any_renewed).await
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
        max: usize,
    ) -> Result<Value, StoreError> {
        self.lock_inspect.call(servers, &keys, max).await
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

    pub(crate) async fn lock_force_release(
        &self,
        servers: &Servers,
        lease: &str,
        channel: &str,
        publish: &str,
    ) -> Result<Value, StoreError> {
        self.lock_force_release.call(servers, &[lease], (KEEP_FENCE_MS, publish, channel, self.floor.get())).await
    }

    pub(crate) async fn idempotency_begin(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        claim: &idempotency::store::Claim,
        max: u64,
    ) -> Result<Value, StoreError> {
        let idempotency::store::Claim { token, head, lease, retention, takes_over, .. } = claim;
        let times = (millis(*lease), millis(*retention));
        let args = (token.as_bytes().as_slice(), head.0.as_slice(), times, u8::from(*takes_over), max);
        self.idempotency_begin.call(servers, &keys, args).await
    }

    pub(crate) async fn idempotency_renew(
        &self,
        servers: &Servers,
        record: &str,
        claim: &idempotency::store::Claim,
        body_fingerprint: &BodyFingerprint,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Value, StoreError> {
        let (token, body_fingerprint) = (claim.token.as_bytes().as_slice(), body_fingerprint.to_bytes());
        let checkpoint = checkpoint.map(Checkpoint::to_bytes);
        let times = (millis(claim.lease), millis(claim.retention));
        let args = (token, times, body_fingerprint.as_slice(), checkpoint.as_deref());
        self.idempotency_renew.call(servers, &[record], args).await
    }

    pub(crate) async fn idempotency_complete(
        &self,
        servers: &Servers,
        record: &str,
        token: &Token,
        completion: &Completion,
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let Completion { response, is_kept, body_fingerprint, retention } = completion;
        let state = if *is_kept { 2 } else { 3 };
        let body_fingerprint = body_fingerprint.to_bytes();
        let kept = (state, millis(*retention), body_fingerprint.as_slice(), &**response);
        let args = (token.as_bytes().as_slice(), kept, publish, channel);
        self.idempotency_complete.call(servers, &[record], args).await
    }

    pub(crate) async fn idempotency_release(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        token: &Token,
        max: u64,
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let args = (token.as_bytes().as_slice(), KEEP_ATTEMPT_MS, publish, channel, max);
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
        (answer, retention): (&StoredResponse, Duration),
        (publish, channel): (&str, &str),
    ) -> Result<Value, StoreError> {
        let state = if answer.is_kept() { 2 } else { 3 };
        let args = (fence, found, state, millis(retention), &**answer.bytes(), publish, channel);
        self.idempotency_complete_unknown.call(servers, &[record], args).await
    }
}

impl Scripts {
    pub(crate) async fn cache_claim(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        seen: &EntryId,
        claim: &cache::Claim,
    ) -> Result<Value, StoreError> {
        let args = (claim.token.as_bytes().as_slice(), seen.as_bytes(), millis(claim.lease));
        self.cache_claim.call(servers, &[&keys.entry, &keys.lease], args).await
    }

    pub(crate) async fn cache_renew(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        claim: &cache::Claim,
    ) -> Result<Value, StoreError> {
        let args = (claim.token.as_bytes().as_slice(), millis(claim.lease));
        self.cache_renew.call(servers, &[&keys.lease], args).await
    }

    pub(crate) async fn cache_put(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        token: &Token,
        is_load: bool,
        entry: &NewEntry,
    ) -> Result<Value, StoreError> {
        let NewEntry { value, fresh_for, ttl, load_time, tags } = entry;
        let times = (millis(*fresh_for), millis(*ttl).max(1), millis(*load_time).min(u32::MAX.into()));
        let (is_value, value) = (u8::from(value.is_some()), value.as_deref().unwrap_or_default());
        let (publish, token) = (publish(servers), token.as_bytes().as_slice());
        let args = (token, u8::from(is_load), is_value, times, encode_tags(tags), value, publish, &keys.changed);
        self.cache_put.call(servers, &[&keys.entry, &keys.lease], args).await
    }

    pub(crate) async fn cache_release(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        token: &Token,
        mark: Option<Mark>,
    ) -> Result<Value, StoreError> {
        let (mark, time) = match mark {
            None => ("", Duration::ZERO),
            Some(Mark::Failed { retry_after }) => ("F", retry_after),
            Some(Mark::Uncached { remaining }) => ("U", remaining),
        };
        let args = (token.as_bytes().as_slice(), mark, millis(time).max(1), publish(servers), &keys.changed);
        self.cache_release.call(servers, &[&keys.lease, &keys.entry], args).await
    }

    /// Removes an entry, or makes it stale.
    pub(crate) async fn cache_invalidate(
        &self,
        servers: &Servers,
        keys: &CacheKeys,
        is_hard: bool,
    ) -> Result<Value, StoreError> {
        let args = (u8::from(is_hard), publish(servers), &keys.changed);
        self.cache_invalidate.call(servers, &[&keys.entry, &keys.lease], args).await
    }

    pub(crate) async fn cache_generation(
        &self,
        servers: &Servers,
        key: &str,
        new: &Token,
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        self.cache_generation.call(servers, &[key], (new.as_bytes().as_slice(), millis(ttl).max(1))).await
    }

    pub(crate) async fn cache_filter_allocate(
        &self,
        servers: &Servers,
        bits: &str,
        layout: &Layout,
    ) -> Result<Value, StoreError> {
        let args =
            (layout.blocks, layout.seed.as_slice(), exists_filter::ALLOCATION_STEP, millis(exists_filter::BUILD_TTL));
        self.cache_filter_allocate.call(servers, &[bits], args).await
    }

    /// Keys: of the versions, the new version, and the previous unfinished version. For a version that does not exist, the caller passes
    /// the key of the versions.
    pub(crate) async fn cache_filter_begin(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        (seen, start): (&[u8], &[u8]),
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        self.cache_filter_begin.call(servers, &keys, (seen, start, keep_versions_ms(ttl))).await
    }

    /// Keys: of the versions, the active version, and the unfinished version. For a version that does not exist, the caller passes the key
    /// of the versions.
    pub(crate) async fn cache_filter_add(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        seen: &[u8],
        bits: &NewBits,
    ) -> Result<Value, StoreError> {
        let (active, building) = (packed_bits(&bits.active), packed_bits(&bits.building));
        let build_ms = if bits.is_build { millis(exists_filter::BUILD_TTL) } else { 0 };
        let times = (millis(bits.ttl).max(1), build_ms, keep_versions_ms(bits.ttl));
        self.cache_filter_add.call(servers, &keys, (seen, active.as_slice(), building.as_slice(), times)).await
    }

    /// Keys: of the versions, the unfinished version, and the active version. For a version that does not exist, the caller passes the key
    /// of the versions.
    pub(crate) async fn cache_filter_end(
        &self,
        servers: &Servers,
        keys: [&str; 3],
        (seen, ended): (&[u8], &[u8]),
        is_complete: bool,
        ttl: Duration,
    ) -> Result<Value, StoreError> {
        let args = (seen, ended, u8::from(is_complete), millis(ttl).max(1), keep_versions_ms(ttl));
        self.cache_filter_end.call(servers, &keys, args).await
    }

    /// Pushes jobs of one priority, at most 256: see the header of `delay_queue_push.lua`.
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

    /// The same as a command for a pipeline, with the text of the script.
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

    /// Finishes and claims jobs. If no reply arrives within `timeout`, the claimed jobs belong to no worker until their lease ends.
    pub(crate) async fn delay_queue_claim(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        claim: &delay_queue::store::Claim,
        finished: &PackedFinishes,
        timeout: Duration,
    ) -> Result<Value, StoreError> {
        let delay_queue::store::Claim { worker, limit, lease, dead } = claim;
        let limits = (limit, millis(*lease), dead.count, millis(dead.age));
        let args = (KEEP_JOBS_MS, publish(servers), &keys.wake, worker.to_string(), limits, finished);
        let reply = self.delay_queue_claim.run_on(servers, &all_of(keys), &args, Some(timeout)).await;
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

    /// Calls one of the scripts that inspect and administer jobs, with the arguments of its own.
    pub(crate) async fn delay_queue_control(
        &self,
        servers: &Servers,
        keys: &QueueKeys,
        script: &LuaScript,
        args: impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        let args = (KEEP_JOBS_MS, publish(servers), &keys.wake, args);
        script.call(servers, &all_of(keys), args).await
    }
}

/// How long the ids of the versions of a filter are kept: longer than each version, so that no version is in use without them.
fn keep_versions_ms(ttl: Duration) -> u64 {
    millis(ttl.saturating_add(exists_filter::BUILD_TTL).saturating_add(Duration::from_secs(60)))
}

/// The bits of keys as an argument of `cache_filter_add`.
fn packed_bits(keys: &[KeyBits]) -> Vec<u8> {
    keys.iter().flat_map(|bits| bits.block.to_le_bytes().into_iter().chain(bits.to_block())).collect()
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

/// The tags of an entry, as `cache_put.lua` describes them.
fn encode_tags(tags: &[TagGeneration]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for TagGeneration { tag, generation } in tags {
        bytes.push(tag.as_str().len() as u8);
        bytes.extend_from_slice(tag.as_str().as_bytes());
        bytes.extend_from_slice(generation.as_bytes());
    }
    bytes
}

/// The command for notifications. A cluster sends each PUBLISH to all of its nodes.
pub(crate) const fn publish(servers: &Servers) -> &'static str {
    if servers.is_cluster() { "SPUBLISH" } else { "PUBLISH" }
}

/// How long the keys of a queue are kept after the latest time at which an entry in them is due.
pub(crate) const KEEP_JOBS_MS: u64 = 180 * 86_400 * 1_000;

/// The claim as arguments of `lock_queue`.
fn claim_args(claim: &Claim) -> (&[u8], u64, u32, u64, u32) {
    (claim.token.as_bytes(), millis(claim.ttl), claim.fences, KEEP_FENCE_MS, permits(claim))
}

/// The maximum number of holders of this kind.
const fn permits(claim: &Claim) -> u32 {
    match claim.kind {
        LockKind::Semaphore => claim.permits,
        LockKind::ReadWrite if claim.is_shared => claim.permits,
        LockKind::Exclusive | LockKind::ReadWrite => 1,
    }
}

/// The byte in the value of a lease for the kind of its holders.
const fn held_as(claim: &Claim) -> u8 {
    match (claim.kind, claim.queueing) {
        (LockKind::Exclusive, Queueing::Bypass) => 1,
        (LockKind::Semaphore, Queueing::Bypass) => 2,
        (LockKind::Semaphore, Queueing::Yield | Queueing::Enqueue) => 6,
        (LockKind::Exclusive, Queueing::Yield | Queueing::Enqueue) => 3,
        (LockKind::ReadWrite, _) => {
            if claim.is_shared {
                4
            } else {
                5
            }
        }
    }
}

/// The kind of lock for that byte.
pub(crate) const fn lock_kind(held_as: u64) -> Option<LockKind> {
    match held_as {
        1 | 3 => Some(LockKind::Exclusive),
        2 | 6 => Some(LockKind::Semaphore),
        4 | 5 => Some(LockKind::ReadWrite),
        _ => None,
    }
}

/// The claim as the argument of `lock_acquire`. One argument costs less than several.
fn encode_claim(claim: &Claim, floor: u64) -> [u8; 40] {
    let mut bytes = [0; 40];
    let (token, numbers) = bytes.split_at_mut(16);
    token.copy_from_slice(claim.token.as_bytes());
    let (fields, rest) = numbers.split_at_mut(16);
    let numbers = [millis(claim.ttl), claim.fences.into(), KEEP_FENCE_MS, permits(claim).into()];
    for (field, number) in fields.as_chunks_mut().0.iter_mut().zip(numbers) {
        *field = u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    }
    // One byte for the kind, and seven for the floor, which is below 2^53.
    rest.copy_from_slice(&(floor << 8 | u64::from(held_as(claim))).to_le_bytes());
    bytes
}

/// The reply of a script whose writes may have to reach replicas.
pub(crate) enum Reply {
    /// Enough replicas have the writes, or the call needed none: it granted nothing, or requires no replication.
    Replied(Value),
    /// Only this number of replicas have the writes.
    Insufficient(u32),
}

/// Whether the reply of a lock script is a grant.
fn begins_with_one(reply: &Value) -> bool {
    matches!(reply, Value::Array(numbers) if numbers.first() == Some(&Value::Int(1)))
}

/// The maximum number of leases in one call of `lock_exchange`. The script has the same limit.
pub(crate) const MAX_LOCKS: usize = 64;

/// The maximum number of leases in one call of `lock_renew`. The script has the same limit.
pub(crate) const MAX_RENEWALS: usize = 128;

/// How long the last fence of a lock is remembered after its lease. After that, the server's clock makes fences rise. So fences also rise
/// if the clock is set back by less than this, or if a new primary's clock is behind by less than this. It is a quarter more than the ten
/// minutes of the documentation, because most batches leave the expiry as it is.
const KEEP_FENCE_MS: u64 = 10 * 60 * 1_000 * 5 / 4;

/// How long a released attempt of an operation is remembered.
const KEEP_ATTEMPT_MS: u64 = 10 * 60 * 1_000;

impl LuaScript {
    pub(crate) fn new(code: &str) -> Self {
        Self { code: code.to_owned(), hash: Script::new(code).get_hash().to_owned() }
    }

    #[cfg(test)]
    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// Runs the script by its hash, or by its text if the server does not know it. That is so after a restart, a failover, a move of its
    /// slot or `SCRIPT FLUSH`. NOSCRIPT means that the server has done nothing, so the script never runs twice.
    pub(crate) async fn run(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: &impl ToRedisArgs,
    ) -> Result<Value, RedisError> {
        self.run_on(servers, keys, args, None).await
    }

    /// The same, with a response timeout other than the connection's.
    async fn run_on(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: &impl ToRedisArgs,
        timeout: Option<Duration>,
    ) -> Result<Value, RedisError> {
        // All keys of a script are in one slot.
        let key = keys.first().copied().unwrap_or_default();
        match servers.exchange(key, &command("EVALSHA", &self.hash, keys, args), timeout).await {
            Err(error) if error::is_no_script(&error) => {
                servers.exchange(key, &command("EVAL", &self.code, keys, args), timeout).await
            }
            reply => reply,
        }
    }

    /// The same, and waits until replicas have the writes of the script if `is_granted` is true for its reply.
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
                // No refusal, whatever the error says: the lease was granted.
                error => Err(StoreError::other(error)),
            },
        }
    }

    /// Runs the script by its hash, and checks that EVAL is permitted too, for a server that forgets the script.
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
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    /// The names after `KEYS[1]`, `ARGV[1]` and so on in the headers of a script and its includes.
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
        // The number of keys and arguments of the typed calls above, for one descriptor or lease.
        let calls = [
            (&scripts.check, 1, 10),
            (&scripts.check_plain, 1, 1),
            (&scripts.check_many, 1, 1),
            (&scripts.block, 1, 3),
            (&scripts.probe, 1, 1),
            (&scripts.lock_acquire, 1, 1),
            (&scripts.lock_acquire_all, 1, 5),
            (&scripts.lock_exchange, 1, 5),
            (&scripts.lock_queue, 4, 10),
            (&scripts.lock_renew, 1, 2),
            (&scripts.lock_release, 3, 4),
            (&scripts.lock_inspect, 2, 1),
            (&scripts.lock_name, 2, 2),
            (&scripts.lock_force_release, 1, 4),
            (&scripts.idempotency_begin, 2, 6),
            (&scripts.idempotency_renew, 1, 5),
            (&scripts.idempotency_complete, 1, 7),
            (&scripts.idempotency_release, 2, 5),
            (&scripts.idempotency_inspect, 1, 1),
            (&scripts.idempotency_forget, 1, 5),
            (&scripts.idempotency_complete_unknown, 1, 7),
            (&scripts.cache_claim, 2, 3),
            (&scripts.cache_renew, 1, 2),
            (&scripts.cache_put, 2, 10),
            (&scripts.cache_release, 2, 5),
            (&scripts.cache_invalidate, 2, 3),
            (&scripts.cache_generation, 1, 2),
            (&scripts.cache_filter_allocate, 1, 4),
            (&scripts.cache_filter_begin, 3, 3),
            (&scripts.cache_filter_add, 3, 6),
            (&scripts.cache_filter_end, 3, 5),
            (&scripts.delay_queue_push, 8, 6),
            (&scripts.delay_queue_claim, 12, 11),
            (&scripts.delay_queue_extend, 3, 3),
            (&scripts.delay_queue_get, 12, 4),
            (&scripts.delay_queue_cancel, 12, 5),
            (&scripts.delay_queue_reschedule, 12, 5),
            (&scripts.delay_queue_replace, 12, 5),
            (&scripts.delay_queue_counts, 12, 3),
            (&scripts.delay_queue_list, 12, 6),
            (&scripts.delay_queue_pause, 12, 4),
            (&scripts.delay_queue_purge, 12, 5),
            (&scripts.delay_queue_release_unique, 12, 4),
            (&scripts.delay_queue_replay, 12, 4),
            (&scripts.delay_queue_forget, 12, 4),
        ];
        for (script, keys, args) in calls {
            let (comments, code): (Vec<_>, Vec<_>) = script.code.lines().partition(|line| line.starts_with("--"));
            let (header, body) = (comments.join("\n"), code.join("\n"));
            for (what, count) in [("KEYS", keys), ("ARGV", args)] {
                let names = declared(&header, what);
                assert_eq!(names.len(), count, "{what} in the header");
                assert!(
                    !body.contains(&format!("{what}[{}]", count + 1)),
                    "the body uses a {what} that is not in the header"
                );
                for name in names {
                    assert!(body.contains(&name), "the body does not use {name} of the header");
                }
            }
            for word in ["Value ", "Returns ", "Errors ", "Repeat "] {
                assert!(header.contains(&format!("-- {word}")), "the header has no line {word}");
            }
        }
    }

    #[test]
    fn scripts_follow_the_includes_of_their_headers() {
        let lua = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua");
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        let scripts = format!("{:?}", Scripts::new());
        for entry in fs::read_dir(&lua).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                continue;
            }
            let script = read(path);
            let includes =
                script.lines().filter_map(|line| line.strip_prefix("-- Includes ")).flat_map(|names| names.split(", "));
            let mut joined: String = includes.map(|name| read(lua.join(format!("includes/{name}.lua")))).collect();
            joined += &script;
            assert!(scripts.contains(Script::new(&joined).get_hash()), "no script is {joined}");
        }
    }

    #[test]
    fn call_is_one_command_with_all_arguments() {
        let limits = EncodedLimits {
            params: b"params".to_vec(),
            limits: b"limits".to_vec(),
            layout: "<d".into(),
            format: "c6<d".into(),
            counts: 8,
            ttl_ms: 60_000,
        };
        let descriptor = Descriptor { keys: &[], cost: 5, quota_change: "keep", limits: &limits };
        let command = command("EVALSHA", "abc", &["key"], &("check", &[descriptor]));
        let command = String::from_utf8(command.get_packed_command()).unwrap();
        let words: Vec<_> = command.split("\r\n").filter(|word| !word.starts_with(['*', '$'])).collect();
        assert_eq!(words, ["EVALSHA", "abc", "1", "key", "check", "5", "keep", "60000", "params", "<d", "limits", ""]);
    }
}
