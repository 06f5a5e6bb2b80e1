//! Locks that are asked for at the same time, and those that are given back, in one call.
//!
//! As with decisions: who is nearly alone goes by itself, and those beyond that wait until one of a few calls is back. Each of them
//! has an answer of its own. Where a call of several has none to give, whoever is in it asks alone, with the same token: that is
//! harmless, and what is refused to one is not refused to all.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::{RedisError, Value};
use tokio::sync::oneshot;

use super::error::{store_error, unexpected_reply};
use super::home::Home;
use super::keys::{Keys, LockNames};
use super::meeting::{Away, Limits, Meeting};
use super::scripts::{MAX_LOCKS, Scripts};
use super::servers::Servers;
use crate::error::StoreError;
use crate::lock::{Acquired, Claim, LockKey, Token};

/// A call costs Redis as much as three locks, and as much again to read and to answer, so it is better for more to meet. Half of what
/// the scripts take: while they are at work on one half, the other half can be answered and ask again.
const LIMITS: Limits = Limits { alone: 1, busy: Duration::from_millis(2), together: MAX_LOCKS / 2 };

/// Where those meet who want locks, and where those who give them back. The latter have connections of their own.
pub(super) struct LockCalls {
    acquisitions: Meeting<Acquisition>,
    releases: Meeting<Release>,
}

/// Somebody who has not asked for a lock yet.
struct Acquisition {
    lock: LockKey,
    claim: Claim,
    reply: oneshot::Sender<Answer>,
}

/// Somebody who has not given a lock back yet.
struct Release {
    lock: LockKey,
    token: Token,
    reply: oneshot::Sender<Answer>,
}

/// The number that a script answers about one of them. `None` if it has to be asked for alone.
type Answer = Result<Option<i64>, StoreError>;

impl LockCalls {
    /// Sends what has met, until it is dropped.
    pub(super) fn new(
        servers: Arc<Servers>,
        own: Servers,
        scripts: Arc<Scripts>,
        keys: Arc<Keys>,
        home: &Home,
    ) -> Self {
        let (to_acquire, leases) = (Arc::clone(&scripts), Arc::clone(&keys));
        let acquire = move |batch| acquire(Arc::clone(&servers), Arc::clone(&to_acquire), Arc::clone(&leases), batch);
        let release = move |batch| release(own.clone(), Arc::clone(&scripts), Arc::clone(&keys), batch);
        Self { acquisitions: Meeting::new(LIMITS, home, acquire), releases: Meeting::new(LIMITS, home, release) }
    }

    /// A place for somebody who may ask alone, unless others are on their way already.
    pub(super) fn acquires_alone(&self) -> Option<Away> {
        self.acquisitions.alone()
    }

    /// The same for somebody who gives a lock back.
    pub(super) fn releases_alone(&self) -> Option<Away> {
        self.releases.alone()
    }

    /// What becomes of somebody who asks together with others, or `None` if that has to be alone after all.
    pub(super) async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Option<Acquired>, StoreError> {
        let waiting = |reply| Acquisition { lock: *lock, claim: *claim, reply };
        let answer = self.acquisitions.join(waiting).await.and_then(Result::ok).unwrap_or(Ok(None))?;
        Ok(answer.map(acquired))
    }

    /// How many were listening when a lease was given back together with others, or `None` if that has to be alone after all.
    pub(super) async fn release(&self, lock: &LockKey, token: &Token) -> Result<Option<u64>, StoreError> {
        let waiting = |reply| Release { lock: *lock, token: *token, reply };
        match self.releases.join(waiting).await {
            Some(Ok(answer)) => Ok(answer?.map(listeners)),
            // What was sent may have been done. Alone it would be told that nobody holds the lease, as if it had been lost.
            Some(Err(gone)) => Err(StoreError::unavailable(gone)),
            None => Ok(None),
        }
    }
}

/// What the number stands for that a script answers to one who wants a lock.
pub(super) const fn acquired(number: i64) -> Acquired {
    match number {
        1.. => Acquired::Granted { fence: number.unsigned_abs() },
        held => Acquired::Busy { remaining: Duration::from_millis(held.unsigned_abs()) },
    }
}

const fn listeners(number: i64) -> u64 {
    number.unsigned_abs().saturating_sub(1)
}

/// Asks for several locks at once, and tells each who waits for it. Whether Redis has answered.
async fn acquire(servers: Arc<Servers>, scripts: Arc<Scripts>, keys: Arc<Keys>, mut batch: Vec<Acquisition>) -> bool {
    // Who has given up need not get a lock.
    batch.retain(|waiting| !waiting.reply.is_closed());
    // Nearly always all of them are alike.
    batch.sort_by_key(|waiting| (waiting.claim.ttl, waiting.claim.fences));
    let mut calls = Vec::new();
    let mut rest = batch.into_iter().peekable();
    while let Some(first) = rest.next() {
        let (ttl, fences) = (first.claim.ttl, first.claim.fences);
        let mut group = vec![first];
        while let Some(next) = rest.next_if(|next| (next.claim.ttl, next.claim.fences) == (ttl, fences)) {
            group.push(next);
        }
        let (servers, scripts) = (&servers, &scripts);
        let mut names = LockNames::for_locks(&keys, group.len());
        group.iter().for_each(|waiting| names.push_lease(&waiting.lock));
        calls.push(async move {
            let tokens: Vec<_> = group.iter().map(|waiting| &waiting.claim.token).collect();
            let reply = scripts.lock_acquire_many(servers, &names.to_vec(), ttl, fences, &tokens).await;
            tell(reply, group.into_iter().map(|waiting| waiting.reply))
        });
    }
    join_all(calls).await.contains(&true)
}

/// Gives several leases back at once, and tells each who waits for that. Whether Redis has answered.
async fn release(own: Servers, scripts: Arc<Scripts>, keys: Arc<Keys>, mut batch: Vec<Release>) -> bool {
    // Who has given up comes again.
    batch.retain(|waiting| !waiting.reply.is_closed());
    if batch.is_empty() {
        return false;
    }
    let mut names = LockNames::for_locks(&keys, 2 * batch.len());
    batch.iter().for_each(|waiting| names.push_lease(&waiting.lock));
    batch.iter().for_each(|waiting| names.push_free(&waiting.lock));
    let tokens: Vec<_> = batch.iter().map(|waiting| &waiting.token).collect();
    let reply = scripts.lock_release_many(&own, &names.to_vec(), &tokens).await;
    tell(reply, batch.into_iter().map(|waiting| waiting.reply))
}

/// Tells those who have met what the script says about each of them. Whether there is an answer.
fn tell(reply: Result<Value, RedisError>, waiting: impl ExactSizeIterator<Item = oneshot::Sender<Answer>>) -> bool {
    let is_answered = reply.is_ok();
    let numbers = match reply.map_err(store_error) {
        Ok(reply) => answers(&reply, waiting.len()).unwrap_or_else(|| {
            tracing::debug!(error = %unexpected_reply(&reply), "redis answers about several locks in a way that cannot be read");
            vec![0; waiting.len()]
        }),
        Err(error) if error.is_timeout() || error.is_unavailable() => {
            waiting.for_each(|waiting| drop(waiting.send(Err(error.clone()))));
            return false;
        }
        Err(error) => {
            tracing::debug!(%error, "redis refuses a call about several locks");
            vec![0; waiting.len()]
        }
    };
    for (waiting, number) in waiting.zip(numbers) {
        // Who has given up meanwhile is not interested.
        let _ = waiting.send(Ok((number != 0).then_some(number)));
    }
    is_answered
}

/// What a script answers to each of so many: one number for most, and another for those that it names.
fn answers(reply: &Value, count: usize) -> Option<Vec<i64>> {
    let Value::Array(values) = reply else { return None };
    let [Value::Int(most), others @ ..] = values.as_slice() else { return None };
    let mut answers = vec![*most; count];
    for other in others.chunks(2) {
        let [Value::Int(which), Value::Int(answer)] = other else { return None };
        let at = usize::try_from(*which).ok()?.checked_sub(1)?;
        *answers.get_mut(at)? = *answer;
    }
    Some(answers)
}

/// What the script says to those who meet when they ask.
#[cfg(test)]
pub(super) async fn acquire_together(
    servers: Arc<Servers>,
    scripts: Arc<Scripts>,
    keys: Arc<Keys>,
    wanted: impl Iterator<Item = (LockKey, Claim)>,
) -> Result<Vec<Option<Acquired>>, StoreError> {
    let meeting = wanted.map(|(lock, claim)| {
        let (reply, answer) = oneshot::channel();
        (Acquisition { lock, claim, reply }, answer)
    });
    let (batch, answers): (Vec<_>, Vec<_>) = meeting.unzip();
    acquire(servers, scripts, keys, batch).await;
    let numbers: Vec<_> =
        join_all(answers).await.into_iter().map(|answer| answer.unwrap()).collect::<Result<_, _>>()?;
    Ok(numbers.into_iter().map(|number| number.map(acquired)).collect())
}

/// What the script says to those who meet when they give back.
#[cfg(test)]
pub(super) async fn release_together(
    own: Servers,
    scripts: Arc<Scripts>,
    keys: Arc<Keys>,
    held: impl Iterator<Item = (LockKey, Token)>,
) -> Result<Vec<Option<u64>>, StoreError> {
    let meeting = held.map(|(lock, token)| {
        let (reply, answer) = oneshot::channel();
        (Release { lock, token, reply }, answer)
    });
    let (batch, answers): (Vec<_>, Vec<_>) = meeting.unzip();
    release(own, scripts, keys, batch).await;
    let numbers: Vec<_> =
        join_all(answers).await.into_iter().map(|answer| answer.unwrap()).collect::<Result<_, _>>()?;
    Ok(numbers.into_iter().map(|number| number.map(listeners)).collect())
}
