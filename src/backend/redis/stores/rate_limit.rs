use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::backend::redis::batch::check::Reply;
use crate::backend::redis::codec::rate_limit;
use crate::backend::redis::codec::rate_limit::encode;
use crate::backend::redis::error::{store_error, unexpected_reply};
use crate::backend::redis::scripts::rate_limit::{CheckMode, Descriptor};
use crate::backend::redis::{Inner, RedisBackend};
use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::store::{RateLimitStore, Request};
use crate::rate_limit::{
    Charge, Decision, Policy, Quota, QuotaChange, Receipt, as_change, one_after_the_other, refund_charges,
};
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl RedisBackend {
    async fn decide(&self, policy: &Policy, key: &Key, cost: u64, mode: CheckMode) -> Result<Decision, StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        if let (CheckMode::Check, 1.., None) = (mode, cost, policy.logs().next()) {
            let reply = self.check_plain(policy, key, cost).await?;
            if !reply.is_empty() {
                return parse_decision(&reply, policy, cost, mode);
            }
        }
        let keys = keys.rate_limit(policy, key);
        let descriptor = descriptor(policy, &keys, as_change(cost));
        // Boxed to keep the fast path's future small.
        let reply = Box::pin(scripts.rate_limit.check(servers, mode, &[descriptor])).await?;
        parse_decision(reply_bytes(&reply)?, policy, cost, mode)
    }

    /// Checks a key whose policy has no sliding log, directly or in a batch.
    async fn check_plain(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Reply, StoreError> {
        let Inner { servers, keys, scripts, check_batcher, .. } = &*self.inner;
        let mut permit = None;
        if let Some(check_batcher) = check_batcher {
            permit = check_batcher.try_direct();
            if permit.is_none()
                && let Some(reply) = check_batcher.check(policy, key, keys.counts(policy, key), cost).await
            {
                return reply;
            }
        }
        let counts = keys.counts(policy, key);
        let reply = scripts.rate_limit.check_plain(servers, &counts, cost, policy.encoded_limits(encode)).await;
        drop(permit);
        Ok(Reply::from_slice(reply_bytes(&reply?)?))
    }

    /// Refunds charges. In a runtime, and if fewer than `MAX_REFUNDS` tasks refund, it spawns a task at once, which goes on if the returned
    /// future is dropped. Otherwise the returned future refunds. Each store call has its own timeout.
    fn refund(&self, charges: Vec<Charge>) -> impl Future<Output = Result<(), StoreError>> + Send + use<> {
        let (backend, permit) = (self.clone(), Arc::clone(&self.inner.refunds).try_acquire_owned());
        let refund = async move { refund_charges(&backend, charges).await };
        let task = match (Handle::try_current(), permit) {
            (Ok(runtime), Ok(permit)) => Ok(runtime.spawn(async move {
                let _permit = permit;
                refund.await
            })),
            _ => Err(refund),
        };
        async move {
            match task {
                Ok(task) => task.await.unwrap_or_else(|error| Err(StoreError::other(error))),
                Err(refund) => refund.await,
            }
        }
    }
}

fn descriptor<'a>(policy: &'a Policy, keys: &'a [String], cost: i64) -> Descriptor<'a> {
    let quota_change = match policy.quota_change() {
        QuotaChange::Keep => "keep",
        QuotaChange::Reset => "reset",
        QuotaChange::Proportional => "proportional",
    };
    Descriptor { keys, cost, limits: policy.encoded_limits(encode), quota_change }
}

fn reply_bytes(reply: &redis::Value) -> Result<&[u8], StoreError> {
    match reply {
        redis::Value::BulkString(reply) => Ok(reply),
        other => Err(unexpected_reply(other)),
    }
}

pub(crate) fn parse_decision(
    reply: &[u8],
    policy: &Policy,
    cost: u64,
    mode: CheckMode,
) -> Result<Decision, StoreError> {
    let decision = rate_limit::decision(reply, policy, cost, matches!(mode, CheckMode::Check));
    decision.ok_or_else(|| unexpected_reply(&redis::Value::BulkString(reply.to_vec())))
}

impl RateLimitStore for RedisBackend {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.decide(policy, key, cost, CheckMode::Check).await
    }

    async fn check_all(&self, requests: &[Request]) -> Result<Vec<Decision>, StoreError> {
        if let [Request { policy, key, cost }] = requests {
            return Ok(vec![self.check(policy, key, *cost).await?]);
        }
        // The script reads all counts before it writes any, so one call cannot have a key twice.
        let is_repeated = |(index, request): (usize, &Request)| {
            requests[..index]
                .iter()
                .any(|other| request.key == other.key && request.policy.name() == other.policy.name())
        };
        if requests.iter().enumerate().any(is_repeated) {
            return one_after_the_other(self, requests, |charges| self.refund(charges)).await;
        }
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let keys: Vec<_> = requests.iter().map(|request| keys.rate_limit(&request.policy, &request.key)).collect();
        let descriptors: Vec<_> = requests
            .iter()
            .zip(&keys)
            .map(|(request, keys)| descriptor(&request.policy, keys, as_change(request.cost)))
            .collect();
        if !servers.are_together(descriptors.iter().flat_map(|descriptor| descriptor.keys.first()).map(String::as_str))
        {
            return one_after_the_other(self, requests, |charges| self.refund(charges)).await;
        }
        let reply = scripts.rate_limit.check(servers, CheckMode::Check, &descriptors).await?;
        let replies = match &reply {
            redis::Value::Array(replies) if replies.len() == requests.len() => replies.as_slice(),
            _ => return Err(unexpected_reply(&reply)),
        };
        // Each reply has the status of its own key, but the keys were charged only if all of them were admitted. If one was denied, the
        // replies are decoded as peeks.
        let admitted = replies
            .iter()
            .all(|reply| matches!(reply, redis::Value::BulkString(text) if rate_limit::is_admitted(text)));
        let mode = if admitted { CheckMode::Check } else { CheckMode::Peek };
        let decisions = requests.iter().zip(replies);
        decisions
            .map(|(request, reply)| parse_decision(reply_bytes(reply)?, &request.policy, request.cost, mode))
            .collect()
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.decide(policy, key, cost, CheckMode::Peek).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let keys = keys.rate_limit(policy, key);
        // No charge is larger than this, so nothing is lost.
        let max = Quota::MAX_UNITS as i64;
        let descriptor = descriptor(policy, &keys, change.clamp(-max, max));
        scripts.rate_limit.check(servers, CheckMode::Settle(receipt), &[descriptor]).await.map(drop)
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        let Inner { servers, keys, scripts, .. } = &*self.inner;
        let keys = keys.rate_limit(policy, key);
        let block_us = time.min(Quota::MAX_WINDOW).as_micros() as u64;
        scripts.rate_limit.block(servers, &keys[0], block_us, policy.encoded_limits(encode)).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        let Inner { servers, keys, .. } = &*self.inner;
        let keys = keys.rate_limit(policy, key);
        let mut command = redis::cmd("UNLINK");
        command.arg(keys.as_slice());
        servers.send(&keys[0], &command).await.map(drop).map_err(store_error)
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}
