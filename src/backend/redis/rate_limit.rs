use std::time::Duration;

use super::error::store_error;
use super::scripts::Charge;
use super::{Inner, RedisBackend};
use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::{Algorithm, Decision, Policy, RateLimitStore};

impl RedisBackend {
    async fn decide(&self, policy: &Policy, key: &Key, cost: u32, peek: bool) -> Result<Decision, StoreError> {
        let Inner { pool, keys, scripts } = &*self.inner;
        let (quota, charge) = (policy.limit().quota(), Charge { cost, peek });
        let key = keys.rate_limit(policy, key);
        let charged = match policy.limit().algorithm() {
            Algorithm::FixedWindow => scripts.rate_limit_fixed_window(pool, &key, quota, charge).await?,
            Algorithm::SlidingLog => scripts.rate_limit_sliding_log(pool, &key, quota, charge).await?,
        };
        let reset = Duration::from_micros(charged.reset_us);
        Ok(if charged.admitted {
            Decision::allowed(quota.limit(), charged.remaining, reset)
        } else {
            let retry = Duration::from_micros(charged.retry_us);
            Decision::limited(quota.limit(), charged.remaining, retry, reset)
        })
    }
}

impl RateLimitStore for RedisBackend {
    async fn check(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        self.decide(policy, key, cost, false).await
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u32) -> Result<Decision, StoreError> {
        self.decide(policy, key, cost, true).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        let mut command = redis::cmd("UNLINK");
        command.arg(self.inner.keys.rate_limit(policy, key));
        self.inner.pool.send(&command).await.map(drop).map_err(store_error)
    }
}
