//! Batches of rate limit checks that are requested at the same time.
//!
//! The overhead of one command costs Redis as much as three checks, so Redis serves many more checks in the same time if they are batched.

use std::sync::Arc;
use std::time::Duration;

use redis::{RedisError, Value};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::batcher::{BatchConfig, Batcher, InFlightGuard, until_abandoned};
use super::deferred::DeferredWork;
use crate::backend::redis::codec::rate_limit::encode;
use crate::backend::redis::connection::runtime::RuntimeHandle;
use crate::backend::redis::error::{store_error, unexpected_reply};
use crate::backend::redis::scripts::Scripts;
use crate::backend::redis::scripts::rate_limit::Group;
use crate::backend::redis::topology::Servers;
use crate::error::StoreError;
use crate::key::Key;
use crate::rate_limit::Policy;

/// Larger batches would save Redis little and block it for longer. The script accepts at most 64 checks.
const CONFIG: BatchConfig = BatchConfig {
    max_unbatched: 8,
    linger: Duration::from_micros(200),
    max_batch: 64,
    split: batch_count,
    max_partial_in_flight: batch_count,
    max_full_in_flight: 4,
};

/// Into how many batches this number of checks is divided. With few checks, the round trip takes most of the time, so more batches are
/// better. With many checks, the commands take most of the time, so fewer batches are better.
const fn batch_count(callers: usize) -> usize {
    if callers <= MAX_FOR_FOUR_BATCHES { 4 } else { 2 }
}

/// The most checks that are divided into four batches. From 24 checks on, with a client of one thread, four batches had a lower throughput
/// than two.
const MAX_FOR_FOUR_BATCHES: usize = 20;

/// The reply for one descriptor. The counts of most policies fit inline.
pub(crate) type Reply = SmallVec<[u8; 32]>;

/// Batches of checks.
pub(crate) struct CheckBatcher(Batcher<Pending>);

/// A check that was not sent yet.
struct Pending {
    policy: Policy,
    // The hash of the key: cheaper to sort by than the strings.
    key_hash: u64,
    // The key of the counters in Redis.
    redis_key: String,
    cost: u64,
    reply: oneshot::Sender<Result<Reply, RedisError>>,
}

impl CheckBatcher {
    /// Sends batches until it is dropped.
    pub(crate) fn new(servers: Arc<Servers>, scripts: Arc<Scripts>, runtime: &RuntimeHandle) -> Self {
        let send = move |batch, deferred| {
            let (servers, scripts) = (Arc::clone(&servers), Arc::clone(&scripts));
            async move { send(&servers, &scripts, &deferred, batch).await }
        };
        Self(Batcher::new(CONFIG, runtime, send))
    }

    /// A permit for a direct call, or `None` if the call should be batched.
    pub(crate) fn try_direct(&self) -> Option<InFlightGuard> {
        self.0.try_direct()
    }

    /// The reply to a batched check, in the format of `rate_limit_check_plain`; `None` to call directly.
    pub(crate) async fn check(
        &self,
        policy: &Policy,
        key: &Key,
        redis_key: String,
        cost: u64,
    ) -> Option<Result<Reply, StoreError>> {
        let pending = |reply| Pending { policy: policy.clone(), key_hash: key.sum(), redis_key, cost, reply };
        let lost = |_| Err(StoreError::unavailable("the runtime that sends checks to redis has ended"));
        Some(self.0.submit(pending).await?.map_or_else(lost, |reply| reply.map_err(store_error)))
    }
}

/// Sends a batch and answers its callers. Returns the time of the reply of Redis, or `None` without one.
async fn send(
    servers: &Servers,
    scripts: &Scripts,
    deferred: &DeferredWork,
    mut batch: Vec<Pending>,
) -> Option<Instant> {
    let connected = tokio::select! {
        biased;
        connected = servers.connected() => connected,
        () = until_abandoned(&mut batch, |pending| &mut pending.reply) => return None,
    };
    if let Err(error) = connected {
        batch.into_iter().for_each(|pending| drop(pending.reply.send(Err(error.clone()))));
        return None;
    }
    // Do not charge callers that gave up before a connection was available.
    batch.retain(|pending| !pending.reply.is_closed());
    // The script needs the checks of a policy in one group, and the checks of a key next to each other.
    let order = |pending: &Pending| (std::ptr::from_ref(pending.policy.encoded_limits(encode)), pending.key_hash);
    batch.sort_by(|one, other| order(one).cmp(&order(other)).then_with(|| one.redis_key.cmp(&other.redis_key)));
    let (checks, mut replies): (Vec<_>, Vec<_>) = batch
        .into_iter()
        .map(|Pending { policy, redis_key, cost, reply, .. }| ((policy, redis_key, cost), reply))
        .unzip();
    if checks.is_empty() {
        return None;
    }
    let keys: Vec<_> = checks.iter().map(|(_, redis_key, _)| &**redis_key).collect();
    let groups: Vec<_> = checks
        .chunk_by(|(one, ..), (other, ..)| std::ptr::eq(one.encoded_limits(encode), other.encoded_limits(encode)))
        .map(|group| {
            let costs = group.iter().map(|(.., cost)| *cost).collect();
            Group { limits: group[0].0.encoded_limits(encode), costs }
        })
        .collect();
    let answer = tokio::select! {
        biased;
        answer = scripts.rate_limit.check_many.run(servers, &keys, &groups) => answer,
        () = until_abandoned(&mut replies, |reply| reply) => return None,
    };
    let replied_at = answer.is_ok().then(Instant::now);
    let answers = match answer {
        Ok(answer) => {
            let lengths = checks.iter().map(|(policy, ..)| policy.encoded_limits(encode).counts_len);
            split(&answer, lengths).unwrap_or_else(|| {
                tracing::debug!(error = %unexpected_reply(&answer), "redis sent an unexpected reply to a batch of checks");
                vec![Err(unreadable()); replies.len()]
            })
        }
        Err(error) => vec![Err(error); replies.len()],
    };
    deferred
        .when_idle(move || {
            for (reply, answer) in replies.into_iter().zip(answers) {
                // The caller may have given up.
                let _ = reply.send(answer);
            }
        })
        .await;
    replied_at
}

/// Splits the reply of the script into one for each check. If all checks are charged, the reply is one string, and `lengths` has the length
/// of each part. Otherwise the reply is an array. `None` if the reply is malformed.
fn split(
    answer: &Value,
    lengths: impl ExactSizeIterator<Item = usize> + Clone,
) -> Option<Vec<Result<Reply, RedisError>>> {
    match answer {
        Value::BulkString(all) if lengths.clone().sum::<usize>() == all.len() => {
            let mut rest = &**all;
            let mut next = |length| {
                let (reply, others) = rest.split_at(length);
                rest = others;
                Ok(Reply::from_slice(reply))
            };
            Some(lengths.map(&mut next).collect())
        }
        Value::Array(answers) if answers.len() == lengths.len() => {
            let one = |answer: &Value| match answer {
                Value::BulkString(reply) => Ok(Reply::from_slice(reply)),
                other => Err(other.clone().extract_error().err().unwrap_or_else(unreadable)),
            };
            Some(answers.iter().map(one).collect())
        }
        _ => None,
    }
}

fn unreadable() -> RedisError {
    RedisError::from((redis::ErrorKind::UnexpectedReturnType, "the reply to a check is malformed"))
}

/// The replies to checks in one batch.
#[cfg(test)]
pub(crate) async fn check_batch(
    servers: &Servers,
    scripts: &Scripts,
    checks: impl Iterator<Item = (&Policy, &Key, String, u64)>,
) -> Result<Vec<Reply>, StoreError> {
    let (batch, answers): (Vec<_>, Vec<_>) = checks
        .map(|(policy, key, redis_key, cost)| {
            let (reply, answer) = oneshot::channel();
            (Pending { policy: policy.clone(), key_hash: key.sum(), redis_key, cost, reply }, answer)
        })
        .unzip();
    send(servers, scripts, &DeferredWork::new(), batch).await;
    let mut replies = Vec::new();
    for answer in answers {
        let reply = answer.await.expect("each check gets a reply");
        replies.push(reply.map_err(store_error)?);
    }
    Ok(replies)
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::task::JoinSet;

    use super::*;

    #[test]
    fn reply_is_split_into_one_for_each_check() {
        let lengths = [24, 32, 24];
        let replies = |answer: &Value| split(answer, lengths.into_iter());
        let parts = lengths.map(|length| vec![length as u8; length]);
        let text = |bytes: &[u8]| Value::BulkString(bytes.to_vec());

        let all_charged = replies(&text(&parts.concat())).unwrap();
        assert_eq!(all_charged.into_iter().map(Result::unwrap).collect::<Vec<_>>(), parts.clone().map(Reply::from));

        let failed = redis::parse_redis_value(b"-WRONGTYPE a list\r\n").unwrap();
        let some = replies(&Value::Array(vec![text(&[]), failed, text(&[0; 8])])).unwrap();
        assert!(some[0].as_ref().unwrap().is_empty());
        assert_eq!(some[1].as_ref().unwrap_err().code(), Some("WRONGTYPE"));
        assert_eq!(**some[2].as_ref().unwrap(), [0; 8]);
        let other = replies(&Value::Array(vec![Value::Int(1), Value::Nil, text(&[])])).unwrap();
        assert_eq!(other.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, false, true]);

        for answer in [text(&[0; 79]), text(&[0; 81]), text(&[]), Value::Array(vec![text(&[]); 2]), Value::Okay] {
            assert!(replies(&answer).is_none(), "{answer:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn few_checks_use_more_batches_than_many() {
        for (number, parts) in [(16, vec![4, 4, 4, 4]), (20, vec![5, 5, 5, 5]), (32, vec![16, 16])] {
            let (sent, mut batch_sizes) = mpsc::unbounded_channel();
            let send = move |batch: Vec<oneshot::Sender<()>>, _| {
                sent.send(batch.len()).unwrap();
                async move {
                    let _batch = batch;
                    std::future::pending().await
                }
            };
            let batcher = Arc::new(Batcher::new(CONFIG, &RuntimeHandle::here(), send));
            let mut callers = JoinSet::new();
            for _ in 0..number {
                let batcher = Arc::clone(&batcher);
                callers.spawn(async move { batcher.submit(|reply| reply).await });
            }
            for (index, part) in parts.into_iter().enumerate() {
                // Shorter than the time after which a batch is late and makes room for the next.
                let call = tokio::time::timeout(Duration::from_millis(1), batch_sizes.recv()).await;
                assert_eq!(call.unwrap_or_else(|_| panic!("call {index} of {number}")), Some(part));
            }
        }
    }
}
