//! Decisions that are asked for at the same time, in one call.
//!
//! A decision that is nearly alone goes by itself and waits for nobody. Those beyond that wait until one of a few calls is
//! back, and then go together: a call costs Redis as much as two decisions, so that many more are made in the same time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::{RedisError, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::counts::{encode, time_to_live_ms};
use super::error::{store_error, unexpected_reply};
use super::scripts::{Group, Scripts};
use super::servers::Servers;
use crate::error::StoreError;
use crate::rate_limit::Policy;

/// How many decisions go by themselves at a time.
const ALONE: usize = 8;
/// How many decisions go together at the most. More would save Redis little, and hold up others for longer.
const TOGETHER: usize = 32;
/// How many calls are on their way at a time, so that Redis has one to work on while another one travels.
const CALLS: usize = 2;
/// A call that is away for longer than this does not hold up the next one: its connection may be dead.
const LATE: Duration = Duration::from_millis(20);
/// How many decisions may wait; more than that go by themselves.
pub(super) const WAITING: usize = 4_096;
/// How many calls may be away altogether, late ones included.
const AWAY: usize = 64;

/// Where decisions meet.
pub(super) struct Gather {
    alone: AtomicUsize,
    waiting: mpsc::Sender<Waiting>,
    sender: AbortHandle,
}

/// A decision that has not been asked for yet.
struct Waiting {
    policy: Policy,
    key: String,
    cost: u32,
    reply: oneshot::Sender<Result<Value, RedisError>>,
}

/// The place of a call that goes by itself.
pub(super) struct Alone<'a>(&'a AtomicUsize);

impl<'a> Alone<'a> {
    /// A place, unless so many are taken that whoever comes next had better wait for others.
    pub(super) fn find(taken: &'a AtomicUsize) -> Option<Self> {
        let place = Alone(taken);
        (taken.fetch_add(1, Ordering::Relaxed) < ALONE).then_some(place)
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Gather {
    /// Sends what has met, until it is dropped.
    pub(super) fn new(servers: Arc<Servers>, scripts: Arc<Scripts>) -> Self {
        let (waiting, arrivals) = mpsc::channel(WAITING);
        let send = move |batch| {
            let (servers, scripts) = (Arc::clone(&servers), Arc::clone(&scripts));
            async move { send(&servers, &scripts, batch).await }
        };
        let sender = tokio::spawn(send_together(arrivals, TOGETHER, send)).abort_handle();
        Self { alone: AtomicUsize::new(0), waiting, sender }
    }

    /// A place for a decision that may go by itself, unless others are on their way already.
    pub(super) fn alone(&self) -> Option<Alone<'_>> {
        Alone::find(&self.alone)
    }

    /// What `rate_limit_check_plain` would say, or `None` if the decision has to go by itself after all.
    pub(super) async fn check(&self, policy: &Policy, key: &str, cost: u32) -> Option<Result<Value, StoreError>> {
        let (reply, answer) = oneshot::channel();
        let waiting = Waiting { policy: policy.clone(), key: key.to_owned(), cost, reply };
        // Too many wait, or the runtime that sends them is gone.
        self.waiting.try_send(waiting).ok()?;
        let lost = || RedisError::from((redis::ErrorKind::Client, "the runtime that asks for decisions has ended"));
        let answer = answer.await.unwrap_or_else(|_| Err(lost()));
        Some(answer.and_then(Value::extract_error).map_err(store_error))
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        self.sender.abort();
    }
}

/// Sends what has met, at most `most` at a time, until nobody can ask any more.
pub(super) async fn send_together<W, F>(mut arrivals: mpsc::Receiver<W>, most: usize, send: impl Fn(Vec<W>) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    // When those were sent that are not known to be back or late.
    let mut young = VecDeque::<Instant>::new();
    loop {
        while young.len() >= CALLS || calls.len() >= AWAY {
            let oldest = young.front().copied();
            tokio::select! {
                _ = calls.join_next() => drop(young.pop_front()),
                () = sleep_until(oldest.unwrap_or_else(Instant::now) + LATE), if oldest.is_some() => {
                    young.pop_front();
                }
            }
        }
        let mut batch = Vec::with_capacity(most);
        tokio::select! {
            Some(_) = calls.join_next() => {
                young.pop_front();
                continue;
            }
            number = arrivals.recv_many(&mut batch, most) => if number == 0 {
                return;
            }
        }
        young.push_back(Instant::now());
        calls.spawn(send(batch));
    }
}

/// Asks for several decisions at once, and tells each who waits for it.
async fn send(servers: &Servers, scripts: &Scripts, mut batch: Vec<Waiting>) {
    // Who has given up need not be charged.
    batch.retain(|waiting| !waiting.reply.is_closed());
    batch.sort_by_key(|waiting| std::ptr::from_ref(waiting.policy.packed(encode)));
    let keys: Vec<_> = batch.iter().map(|waiting| &*waiting.key).collect();
    if keys.is_empty() {
        return;
    }
    let groups: Vec<_> = batch
        .chunk_by(|one, other| std::ptr::eq(one.policy.packed(encode), other.policy.packed(encode)))
        .map(|group| {
            let policy = &group[0].policy;
            let costs = group.iter().map(|waiting| waiting.cost).collect();
            Group { packed: policy.packed(encode), ttl_ms: time_to_live_ms(policy), costs }
        })
        .collect();
    let replies = match scripts.check_many.run(servers, &keys, &groups).await {
        Ok(Value::Array(replies)) if replies.len() == batch.len() => replies.into_iter().map(Ok).collect(),
        Ok(reply) => {
            tracing::debug!(error = %unexpected_reply(&reply), "redis answers several decisions in a way that cannot be read");
            vec![
                Err(RedisError::from((redis::ErrorKind::UnexpectedReturnType, "decisions cannot be read")));
                batch.len()
            ]
        }
        Err(error) => vec![Err(error); batch.len()],
    };
    for (waiting, reply) in batch.into_iter().zip(replies) {
        // Who has given up meanwhile is not interested.
        let _ = waiting.reply.send(reply);
    }
}

/// What the script says to questions that meet.
#[cfg(test)]
pub(super) async fn together(
    servers: &Servers,
    scripts: &Scripts,
    asked: impl Iterator<Item = (&Policy, &str, u32)>,
) -> Result<Vec<Value>, StoreError> {
    let (batch, answers): (Vec<_>, Vec<_>) = asked
        .map(|(policy, key, cost)| {
            let (reply, answer) = oneshot::channel();
            (Waiting { policy: policy.clone(), key: key.to_owned(), cost, reply }, answer)
        })
        .unzip();
    send(servers, scripts, batch).await;
    let mut replies = Vec::new();
    for answer in answers {
        let reply = answer.await.expect("everybody gets an answer");
        replies.push(reply.and_then(Value::extract_error).map_err(store_error)?);
    }
    Ok(replies)
}
