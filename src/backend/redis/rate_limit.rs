use std::time::Duration;

use super::RedisBackend;
use super::error::store_error;
use super::scripts::{self, Charge};
use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::{Algorithm, Decision, Policy, RateLimitStore};

impl RedisBackend {
    async fn decide(&self, policy: &Policy, key: &Key, cost: u32, peek: bool) -> Result<Decision, StoreError> {
        let quota = policy.limit().quota();
        let script = match policy.limit().algorithm() {
            Algorithm::FixedWindow => &self.inner.scripts.fixed_window,
            Algorithm::SlidingLog => &self.inner.scripts.sliding_log,
        };
        let key = self.inner.keys.rate_limit(policy, key);
        let charge = Charge { limit: quota.limit(), window_us: quota.window_us(), cost, peek };
        let charged = scripts::rate_limit(&self.inner.pool, script, &key, charge).await?;

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
