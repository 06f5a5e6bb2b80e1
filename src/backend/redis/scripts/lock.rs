//! The scripts of locks.

use std::time::Duration;

use redis::{RedisError, Value};

use super::lua_script::{Reply, scripts};
use crate::backend::redis::codec::millis::millis;
use crate::backend::redis::topology::{Delivery, Servers};
use crate::error::StoreError;
use crate::lock::store::{Claim, Queueing, Token};
use crate::lock::{FenceFloor, LockKey, LockKind};

/// The maximum number of leases in one call of `lock_exchange.lua`. The script has the same limit.
pub(crate) const MAX_LOCKS: usize = 64;

/// The maximum number of leases in one call of `lock_renew.lua`. The script has the same limit.
pub(crate) const MAX_RENEWALS: usize = 128;

/// How long the last fence of a lock is remembered after its lease. After that, the server's clock makes fences rise. So fences also rise
/// if the clock is set back by less than this, or if a new primary's clock is behind by less than this. It is a quarter more than the ten
/// minutes of the documentation, because most batches leave the expiry as it is.
const KEEP_FENCE_MS: u64 = 10 * 60 * 1_000 * 5 / 4;

scripts! {
    /// The scripts of locks.
    pub(crate) struct LockScripts {
        acquire: "lock_acquire.lua";
        acquire_all: "lock_acquire_all.lua";
        exchange: "lock_exchange.lua";
        queue: "lock_queue.lua" after server_notify;
        renew: "lock_renew.lua";
        release: "lock_release.lua";
        inspect: "lock_inspect.lua";
        name: "lock_name.lua";
        force_release: "lock_force_release.lua" after server_notify;
    }
    // The largest fence in any reply of these scripts. Acquisitions send it as the floor of new fences.
    and floor: FenceFloor
}

impl LockScripts {
    pub(crate) async fn acquire(&self, way: Delivery<'_>, lease: &str, claim: &Claim) -> Result<Reply, StoreError> {
        let is_granted = |reply: &Value| matches!(reply, Value::Int(1..));
        let encoded_claim = encode_claim(claim, self.floor.for_claim(claim));
        let reply = self.acquire.call_replicated(way, &[lease], encoded_claim.as_slice(), is_granted).await?;
        if let Reply::Replied(Value::Int(fence)) = reply {
            self.granted(fence, claim.fences);
        }
        Ok(reply)
    }

    /// Acquires all locks or none, with the lease duration and the number of fences of the first claim.
    pub(crate) async fn acquire_all(
        &self,
        way: Delivery<'_>,
        leases: &[&str],
        wanted: &[(LockKey, Claim)],
    ) -> Result<Reply, StoreError> {
        let (ttl, fences) = wanted.first().map_or((Claim::MIN_TTL, 1), |(_, claim)| (claim.ttl, claim.fences));
        let floor = wanted.iter().map(|(_, claim)| self.floor.for_claim(claim)).max().unwrap_or_default();
        let tokens: Vec<_> = wanted.iter().map(|(_, claim)| claim.token.as_bytes().as_slice()).collect();
        let args = (millis(ttl), fences, KEEP_FENCE_MS, floor, tokens);
        let reply = self.acquire_all.call_replicated(way, leases, args, begins_with_one).await?;
        self.granted_all(&reply, fences);
        Ok(reply)
    }

    /// Acquires and releases leases, at most [`MAX_LOCKS`] in all, with a token for each. The keys are the leases to acquire for `ttl`, the
    /// leases to release, and the channels of the latter. All granted fences are larger than `floor`.
    pub(crate) async fn exchange(
        &self,
        servers: &Servers,
        keys: &[&str],
        tokens: &[u8],
        ttl: Duration,
        fences: u32,
        floor: u64,
    ) -> Result<Value, RedisError> {
        let floor = self.floor.get().max(floor);
        self.exchange.run(servers, keys, &(tokens, millis(ttl), fences, KEEP_FENCE_MS, floor)).await
    }

    /// Acquires a lock for a claim that joins or respects the wait queue, or for a read/write lock.
    pub(crate) async fn queue(
        &self,
        way: Delivery<'_>,
        keys: [&str; 4],
        claim: &Claim,
        publish: &str,
    ) -> Result<Reply, StoreError> {
        let max_queue = if claim.queueing == Queueing::Enqueue { Claim::MAX_QUEUE } else { 0 };
        let floor = self.floor.for_claim(claim);
        let args = (claim_args(claim), held_as(claim), millis(Claim::POSITION_TTL), max_queue, publish, floor);
        let reply = self.queue.call_replicated(way, &keys, args, begins_with_one).await?;
        self.granted_all(&reply, claim.fences);
        Ok(reply)
    }

    /// Renews at most [`MAX_RENEWALS`] leases.
    pub(crate) async fn renew(
        &self,
        way: Delivery<'_>,
        leases: &[&str],
        renewals: &[(&Token, Duration)],
    ) -> Result<Reply, StoreError> {
        let renewals: Vec<_> =
            renewals.iter().map(|(token, ttl)| (token.as_bytes().as_slice(), millis(*ttl))).collect();
        let is_any_renewed = |reply: &Value| matches!(reply, Value::Array(renewed) if renewed.contains(&Value::Int(1)));
        self.renew.call_replicated(way, leases, (KEEP_FENCE_MS, renewals), is_any_renewed).await
    }

    pub(crate) async fn release(
        &self,
        servers: &Servers,
        keys: &[&str],
        token: &Token,
        channel: &str,
        publish: &str,
    ) -> Result<Value, StoreError> {
        let publish = (publish != "PUBLISH").then_some(publish);
        let args = (token.as_bytes().as_slice(), KEEP_FENCE_MS, channel, publish);
        self.release.call(servers, keys, args).await
    }

    pub(crate) async fn inspect(&self, servers: &Servers, keys: [&str; 2], max: usize) -> Result<Value, StoreError> {
        self.inspect.call(servers, &keys, max).await
    }

    pub(crate) async fn name(
        &self,
        servers: &Servers,
        keys: [&str; 2],
        token: &Token,
        name: &str,
    ) -> Result<Value, StoreError> {
        self.name.call(servers, &keys, (token.as_bytes().as_slice(), name)).await
    }

    pub(crate) async fn force_release(
        &self,
        servers: &Servers,
        lease: &str,
        channel: &str,
        publish: &str,
    ) -> Result<Value, StoreError> {
        self.force_release.call(servers, &[lease], (KEEP_FENCE_MS, publish, channel, self.floor.get())).await
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
}

/// Whether the reply of a lock script is a grant.
fn begins_with_one(reply: &Value) -> bool {
    matches!(reply, Value::Array(numbers) if numbers.first() == Some(&Value::Int(1)))
}

/// The first arguments of `queue`.
fn claim_args(claim: &Claim) -> (&[u8], u64, u32, u64, u32) {
    (claim.token.as_bytes(), millis(claim.ttl), claim.fences, KEEP_FENCE_MS, permits(claim))
}

/// The maximum number of holders of the kind that the claim wants.
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

/// The claim as the argument of `acquire`. One argument costs less than several.
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
