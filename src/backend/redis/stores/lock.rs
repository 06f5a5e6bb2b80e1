use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use redis::Value;
use smallvec::SmallVec;

use crate::backend::redis::batch::lock::{LockBatcher, acquired};
use crate::backend::redis::cluster::slot;
use crate::backend::redis::connection::subscriber::{Interest, Subscriber};
use crate::backend::redis::error::{is_refused_for_now, store_error, unexpected_reply};
use crate::backend::redis::scripts::Reply;
use crate::backend::redis::scripts::lock::{MAX_RENEWALS, lock_kind};
use crate::backend::redis::topology::Delivery;
use crate::backend::redis::{Inner, RedisBackend};
use crate::error::StoreError;
use crate::lock::store::{Acquired, Claim, LockStore, Notifications, Queueing, Released, Renewal, Replicas, Token};
use crate::lock::{LockKey, LockKind};
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;

impl LockStore for RedisBackend {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let is_plain = claim.queueing == Queueing::Bypass && claim.kind == LockKind::Exclusive;
        let calls = self.lock_batcher().filter(|_| is_plain && claim.replicas.count == 0);
        let _permit = match calls.map(|calls| (calls.try_direct(), calls)) {
            Some((None, calls)) => match calls.acquire(lock, claim).await? {
                Some(answer) => return Ok(answer),
                None => None,
            },
            Some((permit, _)) => permit,
            None => None,
        };
        // Boxed to keep the future of a batched call small.
        Box::pin(self.acquire_alone(lock, claim)).await
    }

    async fn acquire_all(&self, wanted: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        let Inner { keys, scripts, .. } = &*self.inner;
        let replicas = wanted.first().map(|(_, claim)| claim.replicas).unwrap_or_default();
        let leases: Vec<_> = wanted.iter().map(|(lock, _)| keys.lease(lock)).collect();
        let leases: Vec<_> = leases.iter().map(String::as_str).collect();
        let reply = match scripts.lock.acquire_all(self.way_to_grant(replicas), &leases, wanted).await? {
            Reply::Replied(reply) => reply,
            Reply::Insufficient(replicas) => return Ok(vec![Acquired::NotReplicated { replicas }; wanted.len()]),
        };
        let numbers = numbers(&reply).filter(|numbers| numbers.len() == wanted.len() + 1);
        let numbers = numbers.ok_or_else(|| unexpected_reply(&reply))?;
        let verdict = numbers[0];
        let answer = |number: &u64| match (verdict, *number) {
            (1, fence) => Some(Acquired::Granted { fence }),
            (0, remaining_ms) => Some(Acquired::Busy { remaining: Duration::from_millis(remaining_ms) }),
            (2, 0) => Some(Acquired::Busy { remaining: Duration::ZERO }),
            (2, held_as) => lock_kind(held_as).map(|held| Acquired::OtherKind { held }),
            _ => None,
        };
        numbers[1..].iter().map(answer).collect::<Option<_>>().ok_or_else(|| unexpected_reply(&reply))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        // One concurrent script call for each shard. The renewals are sorted, so that the leases of one semaphore are adjacent, as the
        // script expects. The answers are put back into the order of `renewals`.
        let mut order: Vec<_> = (0..renewals.len()).collect();
        order.sort_by_cached_key(|&i| (self.shard(&renewals[i].lock), renewals[i].lock.known_hash()));
        let sorted: Vec<_> = order.iter().map(|&i| &renewals[i]).collect();
        let calls = sorted
            .chunk_by(|one, other| self.shard(&one.lock) == self.shard(&other.lock))
            .flat_map(|shard| shard.chunks(MAX_RENEWALS))
            .map(|renewals| self.renew_shard(renewals));
        let renewed = try_join_all(calls).await?.concat();
        let mut answers = vec![false; renewals.len()];
        for (i, renewed) in order.into_iter().zip(renewed) {
            answers[i] = renewed;
        }
        Ok(answers)
    }

    /// One script reaches all keys of a shard. A shard is a slot on a cluster, and the whole server otherwise.
    fn shard(&self, lock: &LockKey) -> u32 {
        let Inner { servers, keys, .. } = &*self.inner;
        if servers.is_cluster() { slot(&keys.lease(lock)).into() } else { 0 }
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        let released = |(was_held, listeners)| {
            // `listeners` includes this backend if it is subscribed. Only other listeners count.
            let listens = |subscriber: &Subscriber| subscriber.listens_to(&keys.free_channel(lock));
            let ours = listeners > 0 && auxiliary.subscriber.get().is_some_and(listens);
            Released { was_held, is_wanted: listeners > u64::from(ours) }
        };
        let _permit = match self.lock_batcher().map(|calls| (calls.try_direct(), calls)) {
            Some((None, calls)) => match calls.release(lock, token).await? {
                Some(listeners) => return Ok(released((true, listeners))),
                None => None,
            },
            Some((permit, _)) => permit,
            None => None,
        };
        Box::pin(self.release_alone(lock, token)).await.map(released)
    }

    async fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        let interest = waiter.copied().map_or(Interest::Changes, Interest::Turn);
        auxiliary.subscriber().subscribe(keys.free_channel(lock), interest).await
    }

    async fn name(&self, lock: &LockKey, token: &Token, name: &str) -> Result<(), StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        scripts.lock.name(&auxiliary.dedicated, [&keys.lease(lock), &keys.names(lock)], token, name).await.map(drop)
    }

    async fn request_release(&self, lock: &LockKey) -> Result<(), StoreError> {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        let (lease, channel) = (keys.lease(lock), keys.release_requests(lock));
        let ask = |verb| {
            let mut command = redis::cmd(verb);
            command.arg(&channel).arg("1");
            command
        };
        let mut answer = auxiliary.dedicated.send(&lease, &ask(self.publish())).await;
        if auxiliary.dedicated.is_cluster() && answer.as_ref().is_err_and(|error| !error.is_io_error()) {
            // Redis 6.2 lacks SPUBLISH.
            answer = auxiliary.dedicated.send(&lease, &ask("PUBLISH")).await;
        }
        answer.map(drop).map_err(store_error)
    }

    async fn watch_release_requests(&self, lock: &LockKey) -> Notifications {
        let Inner { keys, auxiliary, .. } = &*self.inner;
        auxiliary.subscriber().subscribe(keys.release_requests(lock), Interest::Messages).await
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.shutdown.add(target);
    }
}

impl RedisBackend {
    pub(crate) fn publish(&self) -> &'static str {
        self.inner.auxiliary.dedicated.publish_command()
    }

    /// Batches concurrent calls. `None` on a cluster.
    fn lock_batcher(&self) -> Option<&LockBatcher> {
        let Inner { servers, scripts, keys, auxiliary, lock_batcher, .. } = &*self.inner;
        let start = || {
            LockBatcher::new(auxiliary.dedicated.clone(), Arc::clone(scripts), Arc::clone(keys), auxiliary.runtime())
        };
        (!servers.is_cluster()).then(|| lock_batcher.get_or_init(start))
    }

    /// Acquires a lock in a separate call.
    async fn acquire_alone(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let Inner { keys, scripts, .. } = &*self.inner;
        let (lease, way) = (keys.lease(lock), self.way_to_grant(claim.replicas));
        let is_plain = claim.queueing == Queueing::Bypass && claim.kind != LockKind::ReadWrite;
        let reply = if is_plain {
            scripts.lock.acquire(way, &lease, claim).await?
        } else {
            let [queue, positions] = keys.queue(lock);
            let channel = keys.free_channel(lock);
            scripts.lock.queue(way, [&lease, &queue, &positions, &channel], claim, self.publish()).await?
        };
        match reply {
            Reply::Insufficient(replicas) => Ok(Acquired::NotReplicated { replicas }),
            Reply::Replied(Value::Int(number)) if is_plain => Ok(acquired(number)),
            Reply::Replied(reply) if is_plain => other_kind(&reply).ok_or_else(|| unexpected_reply(&reply)),
            Reply::Replied(reply) => queued(&reply).ok_or_else(|| unexpected_reply(&reply)),
        }
    }

    /// Releases a lease in a separate call. Returns whether it was held, and the number of listeners.
    async fn release_alone(&self, lock: &LockKey, token: &Token) -> Result<(bool, u64), StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let (lease, channel, [queue, positions]) = (keys.lease(lock), keys.free_channel(lock), keys.queue(lock));
        let names = [&lease, &queue, &positions].map(String::as_str);
        let release = |names| scripts.lock.release(&auxiliary.dedicated, names, token, &channel, self.publish());
        let reply = match release(&names).await {
            // While the slot moves, this releases only the lease. Queued waiters notice the release when they poll, once a second.
            Err(error) if is_refused_for_now(&error) => release(&names[..1]).await,
            reply => reply,
        };
        match reply? {
            Value::Int(number) if number > 0 => Ok((true, number.unsigned_abs() - 1)),
            Value::Int(ended) => Ok((false, ended.unsigned_abs())),
            reply => Err(unexpected_reply(&reply)),
        }
    }

    async fn renew_shard(&self, renewals: &[&Renewal]) -> Result<Vec<bool>, StoreError> {
        match self.renew_together(renewals).await {
            // The slot moves, and some of its keys have moved. Each key is on one of the nodes, so calls with one key work.
            Err(error) if is_refused_for_now(&error) => {
                let locks = renewals.chunk_by(|one, other| one.lock == other.lock);
                let renewed = try_join_all(locks.map(|renewals| self.renew_together(renewals))).await;
                Ok(renewed.map_err(StoreError::in_doubt)?.concat())
            }
            renewed => renewed,
        }
    }

    /// Renews leases in one call.
    async fn renew_together(&self, renewals: &[&Renewal]) -> Result<Vec<bool>, StoreError> {
        let Inner { keys, scripts, auxiliary, .. } = &*self.inner;
        let leases: Vec<_> = renewals.iter().map(|renewal| keys.lease(&renewal.lock)).collect();
        let leases: Vec<_> = leases.iter().map(String::as_str).collect();
        let tokens: Vec<_> = renewals.iter().map(|renewal| (&renewal.token, renewal.ttl)).collect();
        let replicas = renewals.iter().map(|renewal| renewal.replicas).max_by_key(|replicas| replicas.count);
        let replicas = replicas.unwrap_or_default();
        let [_, replicated] = &auxiliary.replicated;
        let way = if replicas.count > 0 {
            Delivery::Replicated(replicated, replicas)
        } else {
            Delivery::Plain(&auxiliary.dedicated)
        };
        let Reply::Replied(reply) = scripts.lock.renew(way, &leases, &tokens).await? else {
            return Err(StoreError::unavailable("too few replicas know that leases were renewed"));
        };
        let renewed = numbers(&reply).filter(|renewed| renewed.len() == renewals.len());
        let renewed = renewed.ok_or_else(|| unexpected_reply(&reply))?;
        Ok(renewed.into_iter().map(|renewed| renewed == 1).collect())
    }

    fn way_to_grant(&self, replicas: Replicas) -> Delivery<'_> {
        let Inner { servers, auxiliary, .. } = &*self.inner;
        let [replicated, _] = &auxiliary.replicated;
        if replicas.count > 0 { Delivery::Replicated(replicated, replicas) } else { Delivery::Plain(servers) }
    }
}

/// Decodes a reply of `lock_acquire` that is not a number.
fn other_kind(reply: &Value) -> Option<Acquired> {
    match *numbers(reply)? {
        [held_as] => Some(Acquired::OtherKind { held: lock_kind(held_as)? }),
        _ => None,
    }
}

/// Decodes the reply of `lock_queue`.
fn queued(reply: &Value) -> Option<Acquired> {
    let numbers = numbers(reply)?;
    let remaining = Duration::from_millis(numbers.get(1).copied().unwrap_or_default());
    match *numbers {
        [1, fence] => Some(Acquired::Granted { fence }),
        [0, _] => Some(Acquired::Busy { remaining }),
        [2, _, ahead] => Some(Acquired::Queued { is_first: ahead == 0, remaining }),
        [3, _] => Some(Acquired::QueueFull { remaining }),
        [4, held_as] => Some(Acquired::OtherKind { held: lock_kind(held_as)? }),
        _ => None,
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
