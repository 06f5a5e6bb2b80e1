//! Batches of lock acquisitions and releases.
//!
//! As with checks, a few calls at a time are sent directly, and further ones share batches. Each acquisition and release has its own
//! answer. If the script skips a call or Redis rejects the batch, the caller repeats the call, directly and with the same token, which is
//! harmless. So foreign data under one key never fails other calls. After a timeout or lost connection, the callers get the error.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::{RedisError, Value};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::batcher::{BatchConfig, Batcher, InFlightGuard, until_abandoned};
use super::deferred::DeferredWork;
use crate::backend::redis::connection::runtime::RuntimeHandle;
use crate::backend::redis::error::{store_error, unexpected_reply};
use crate::backend::redis::keys::{Keys, LockNames};
use crate::backend::redis::scripts::Scripts;
use crate::backend::redis::scripts::lock::MAX_LOCKS;
use crate::backend::redis::topology::Servers;
use crate::error::StoreError;
use crate::lock::LockKey;
use crate::lock::store::{Acquired, Claim, Token};

/// A command costs Redis as much as six locks, so larger batches are better. Callers do more between two locks than between two checks.
/// With a third of the callers in each batch, Redis does not wait for the callers. Late callers use a fourth batch.
const CONFIG: BatchConfig = BatchConfig {
    max_unbatched: 8,
    linger: Duration::from_micros(200),
    max_batch: MAX_LOCKS,
    split: |_| 3,
    max_partial_in_flight: |_| 4,
    max_full_in_flight: 4,
};

/// Batches of acquisitions and releases, on the dedicated connections, where they do not wait behind checks.
pub(crate) struct LockBatcher(Batcher<Pending>);

/// A pending acquisition or release.
struct Pending {
    lock: LockKey,
    token: Token,
    // The fields `ttl`, `fences` and `floor` of the `Claim` of an acquisition; `None` for a release.
    claim: Option<(Duration, u32, u64)>,
    reply: oneshot::Sender<Answer>,
}

/// The number in the reply of the script; `None` to call directly.
type Answer = Result<Option<i64>, StoreError>;

impl LockBatcher {
    /// Sends batches until it is dropped.
    pub(crate) fn new(servers: Servers, scripts: Arc<Scripts>, keys: Arc<Keys>, runtime: &RuntimeHandle) -> Self {
        let send =
            move |batch, deferred| send(servers.clone(), Arc::clone(&scripts), Arc::clone(&keys), deferred, batch);
        Self(Batcher::new(CONFIG, runtime, send))
    }

    /// A permit for a direct call, or `None` if the call should be batched.
    pub(crate) fn try_direct(&self) -> Option<InFlightGuard> {
        self.0.try_direct()
    }

    /// The outcome of a batched acquisition; `None` to call directly.
    pub(crate) async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Option<Acquired>, StoreError> {
        let pending = |reply| Pending::to_acquire(lock, claim, reply);
        let answer = self.0.submit(pending).await.and_then(Result::ok).unwrap_or(Ok(None))?;
        Ok(answer.map(acquired))
    }

    /// The number of subscribers that a batched release has notified; `None` to call directly.
    pub(crate) async fn release(&self, lock: &LockKey, token: &Token) -> Result<Option<u64>, StoreError> {
        let pending = |reply| Pending::to_release(lock, token, reply);
        match self.0.submit(pending).await {
            Some(Ok(answer)) => Ok(answer?.map(listeners)),
            // The batch may have been executed. A direct call would then report that the token does not hold the lease, as after a loss.
            Some(Err(gone)) => Err(StoreError::unavailable(gone)),
            None => Ok(None),
        }
    }
}

impl Pending {
    const fn to_acquire(lock: &LockKey, claim: &Claim, reply: oneshot::Sender<Answer>) -> Self {
        Self { lock: *lock, token: claim.token, claim: Some((claim.ttl, claim.fences, claim.floor)), reply }
    }

    const fn to_release(lock: &LockKey, token: &Token, reply: oneshot::Sender<Answer>) -> Self {
        Self { lock: *lock, token: *token, claim: None, reply }
    }
}

/// Decodes the number that the script returns for an acquisition.
pub(crate) const fn acquired(number: i64) -> Acquired {
    match number {
        1.. => Acquired::Granted { fence: number.unsigned_abs() },
        held => Acquired::Busy { remaining: Duration::from_millis(held.unsigned_abs()) },
    }
}

/// Decodes the number that the script returns for a release.
const fn listeners(number: i64) -> u64 {
    number.unsigned_abs().saturating_sub(1)
}

/// Sends a batch and answers its callers. Returns the time of the last reply of Redis, or `None` without one.
async fn send(
    servers: Servers,
    scripts: Arc<Scripts>,
    keys: Arc<Keys>,
    deferred: DeferredWork,
    mut batch: Vec<Pending>,
) -> Option<Instant> {
    let connected = tokio::select! {
        biased;
        connected = servers.connected() => connected,
        () = until_abandoned(&mut batch, |pending| &mut pending.reply) => return None,
    };
    if let Err(error) = connected {
        return answer_callers(&deferred, Err(error), 0, batch).await;
    }
    // Callers that gave up before a connection was available need no lock. Releases are sent in any case.
    batch.retain(|pending| pending.claim.is_none() || !pending.reply.is_closed());
    // Nearly always, all acquisitions have the same parameters.
    batch.sort_by_key(|pending| (pending.claim.is_none(), pending.claim));
    let mut releases = batch.split_off(batch.partition_point(|pending| pending.claim.is_some()));
    let mut calls = Vec::new();
    while !batch.is_empty() || !releases.is_empty() {
        let claim = batch.last().and_then(|pending| pending.claim);
        let mut group = batch.split_off(batch.partition_point(|pending| pending.claim < claim));
        group.append(&mut releases);
        calls.push(send_group(&servers, &scripts, &keys, &deferred, claim, group));
    }
    join_all(calls).await.into_iter().max().flatten()
}

/// Sends one call of a batch: acquisitions with the same parameters, then releases.
async fn send_group(
    servers: &Servers,
    scripts: &Scripts,
    keys: &Keys,
    deferred: &DeferredWork,
    claim: Option<(Duration, u32, u64)>,
    mut group: Vec<Pending>,
) -> Option<Instant> {
    let acquisitions = group.partition_point(|pending| pending.claim.is_some());
    let mut names = LockNames::for_locks(keys, 2 * group.len() - acquisitions);
    group.iter().for_each(|pending| names.push_lease(&pending.lock));
    group[acquisitions..].iter().for_each(|pending| names.push_free(&pending.lock));
    let mut tokens = Vec::with_capacity(16 * group.len());
    group.iter().for_each(|pending| tokens.extend_from_slice(pending.token.as_bytes()));
    let (ttl, fences, floor) = claim.unwrap_or((Claim::MIN_TTL, 1, 0));
    let names = names.to_vec();
    let reply = tokio::select! {
        biased;
        reply = scripts.lock.exchange(servers, &names, &tokens, ttl, fences, floor) => reply,
        // Redis executes a batch that was sent. The task of a release repeats a release without an answer.
        () = until_abandoned(&mut group, |pending| &mut pending.reply) => return None,
    };
    if let Ok(reply) = &reply {
        granted_fences(reply, acquisitions).for_each(|fence| scripts.lock.granted(fence, fences));
    }
    answer_callers(deferred, reply, acquisitions, group).await
}

/// Answers the callers of a group, of which the first `acquisitions` acquire. Returns the time of the reply of Redis, or `None` without
/// one.
async fn answer_callers(
    deferred: &DeferredWork,
    reply: Result<Value, RedisError>,
    acquisitions: usize,
    group: Vec<Pending>,
) -> Option<Instant> {
    let replied_at = reply.is_ok().then(Instant::now);
    let numbers = match reply.map_err(store_error) {
        Ok(reply) => answers(&reply, acquisitions, group.len()).unwrap_or_else(|| {
            tracing::debug!(error = %unexpected_reply(&reply), "redis sent an unexpected reply to a batch of locks");
            vec![0; group.len()]
        }),
        Err(error) if error.is_timeout() || error.is_unavailable() => {
            group.into_iter().for_each(|pending| drop(pending.reply.send(Err(error.clone()))));
            return None;
        }
        Err(error) => {
            tracing::debug!(%error, "redis rejected a batch of locks");
            vec![0; group.len()]
        }
    };
    deferred
        .when_idle(move || {
            for (pending, number) in group.into_iter().zip(numbers) {
                // The caller may have given up.
                let _ = pending.reply.send(Ok((number != 0).then_some(number)));
            }
        })
        .await;
    replied_at
}

/// The answers in the reply of the script. It has one number for most acquisitions, implies 1 for most releases, and lists the exceptions.
fn answers(reply: &Value, acquisitions: usize, count: usize) -> Option<Vec<i64>> {
    let Value::Array(values) = reply else { return None };
    let [Value::Int(first), others @ ..] = values.as_slice() else { return None };
    let mut answers = vec![1; count];
    answers.get_mut(..acquisitions)?.fill(*first);
    for other in others.chunks(2) {
        let [Value::Int(index), Value::Int(answer)] = other else { return None };
        let at = usize::try_from(*index).ok()?.checked_sub(1)?;
        *answers.get_mut(at)? = *answer;
    }
    Some(answers)
}

/// The fences that the script grants to acquisitions.
fn granted_fences(reply: &Value, acquisitions: usize) -> impl Iterator<Item = i64> {
    let values = match reply {
        Value::Array(values) if acquisitions > 0 => values.as_slice(),
        _ => &[],
    };
    let (common, others) = values.split_first().unzip();
    let others = others.unwrap_or_default().chunks(2).filter_map(move |other| match other {
        [Value::Int(index), answer] if usize::try_from(*index).is_ok_and(|index| index <= acquisitions) => Some(answer),
        _ => None,
    });
    common.into_iter().chain(others).filter_map(|answer| match answer {
        Value::Int(fence @ 1..) => Some(*fence),
        _ => None,
    })
}

/// The answers to releases and acquisitions.
#[cfg(test)]
pub(crate) async fn exchange_batch(
    servers: Servers,
    scripts: Arc<Scripts>,
    keys: Arc<Keys>,
    held: impl Iterator<Item = (LockKey, Token)>,
    acquisitions: impl Iterator<Item = (LockKey, Claim)>,
) -> Result<(Vec<Option<u64>>, Vec<Option<Acquired>>), StoreError> {
    let mut batch = Vec::new();
    let mut meet = |pending: &dyn Fn(oneshot::Sender<Answer>) -> Pending| {
        let (reply, answer) = oneshot::channel();
        batch.push(pending(reply));
        answer
    };
    let acquisitions: Vec<_> =
        acquisitions.map(|(lock, claim)| meet(&|reply| Pending::to_acquire(&lock, &claim, reply))).collect();
    let held: Vec<_> = held.map(|(lock, token)| meet(&|reply| Pending::to_release(&lock, &token, reply))).collect();
    send(servers, scripts, keys, DeferredWork::new(), batch).await;
    let numbers = async |answers| {
        let answers = join_all::<Vec<oneshot::Receiver<Answer>>>(answers).await;
        answers.into_iter().map(|answer| answer.unwrap()).collect::<Result<Vec<_>, _>>()
    };
    let (held, acquisitions) = (numbers(held).await?, numbers(acquisitions).await?);
    let held = held.into_iter().map(|number| number.map(listeners));
    Ok((held.collect(), acquisitions.into_iter().map(|number| number.map(acquired)).collect()))
}
