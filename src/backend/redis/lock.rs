use std::sync::OnceLock;
use std::time::Duration;

use redis::Value;
use smallvec::SmallVec;

use super::error::unexpected_reply;
use super::pool::{Connector, Pool};
use super::scripts::MAX_RENEWALS;
use super::subscriber::Subscriber;
use super::{Inner, RedisBackend};
use crate::error::StoreError;
use crate::lock::{Acquired, Claim, LockKey, LockStore, Released, Renewal, Scope, Token, Wakeups};

/// What publishes to the channel of a lock. A cluster would send `PUBLISH` to all of its nodes.
const PUBLISH: &str = "PUBLISH";

/// The connections that only locks need, opened when they do.
pub(super) struct LockLinks {
    connector: Connector,
    connect_timeout: Duration,
    // Renewals and releases do not wait behind what requests have asked for.
    own: OnceLock<Pool>,
    subscriber: OnceLock<Subscriber>,
}

impl LockLinks {
    pub(super) fn new(connector: Connector, connect_timeout: Duration) -> Self {
        Self { connector, connect_timeout, own: OnceLock::new(), subscriber: OnceLock::new() }
    }

    /// Connections of their own to the same server.
    #[cfg(test)]
    pub(super) fn again(&self) -> Self {
        Self::new(self.connector.clone(), self.connect_timeout)
    }

    fn own(&self) -> &Pool {
        self.own.get_or_init(|| Pool::lazy(self.connector.clone(), 1, self.connect_timeout))
    }

    fn subscriber(&self) -> &Subscriber {
        self.subscriber.get_or_init(|| Subscriber::new(self.connector.clone(), self.connect_timeout))
    }
}

impl LockStore for RedisBackend {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let Inner { pool, keys, scripts, .. } = &*self.inner;
        let reply = scripts.lock_acquire(pool, &keys.lease(lock), claim).await?;
        match numbers(&reply).as_deref() {
            Some(&[1, fence]) => Ok(Acquired::Granted { fence }),
            Some(&[0, remaining_ms]) => Ok(Acquired::Busy { remaining: Duration::from_millis(remaining_ms) }),
            _ => Err(unexpected_reply(&reply)),
        }
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        let Inner { keys, scripts, locks, .. } = &*self.inner;
        let mut answers = Vec::with_capacity(renewals.len());
        for renewals in renewals.chunks(MAX_RENEWALS) {
            let leases: Vec<_> = renewals.iter().map(|renewal| keys.lease(&renewal.lock)).collect();
            let leases: Vec<_> = leases.iter().map(String::as_str).collect();
            let terms: Vec<_> = renewals.iter().map(|renewal| (&renewal.token, renewal.ttl)).collect();
            let reply = scripts.lock_renew(locks.own(), &leases, &terms).await?;
            let renewed = numbers(&reply).filter(|renewed| renewed.len() == renewals.len());
            answers.extend(renewed.ok_or_else(|| unexpected_reply(&reply))?.iter().map(|renewed| *renewed == 1));
        }
        Ok(answers)
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        let Inner { keys, scripts, locks, .. } = &*self.inner;
        let channel = keys.free(lock);
        let reply = scripts.lock_release(locks.own(), [&keys.lease(lock), &channel], token, PUBLISH).await?;
        match numbers(&reply).as_deref() {
            Some(&[was_held, listeners]) => {
                // This backend may listen itself, still or again.
                let ours = locks.subscriber.get().is_some_and(|subscriber| subscriber.listens_to(&channel));
                Ok(Released { was_held: was_held == 1, is_wanted: listeners > u64::from(ours) })
            }
            _ => Err(unexpected_reply(&reply)),
        }
    }

    async fn watch(&self, lock: &LockKey) -> Wakeups {
        let Inner { keys, locks, .. } = &*self.inner;
        locks.subscriber().subscribe(keys.free(lock)).await
    }

    fn scope(&self) -> Scope {
        Scope::Redis
    }
}

fn numbers(reply: &Value) -> Option<SmallVec<[u64; 2]>> {
    let Value::Array(values) = reply else { return None };
    let number = |value: &Value| match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    };
    values.iter().map(number).collect()
}
