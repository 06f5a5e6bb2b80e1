//! Batches of jobs that are pushed at the same time.
//!
//! As with checks, a few pushes at a time are sent directly, and further ones share batches.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::batcher::{BatchConfig, Batcher, InFlightGuard, until_abandoned};
use super::deferred::DeferredWork;
use crate::backend::redis::codec::job::PackedJobs;
use crate::backend::redis::connection::runtime::RuntimeHandle;
use crate::backend::redis::error::unexpected_reply;
use crate::backend::redis::keys::{Keys, QueueKeys};
use crate::backend::redis::scripts::Scripts;
use crate::backend::redis::topology::Servers;
use crate::delay_queue::store::{Admission, MAX_BATCH, QueueKey, batch_len};
use crate::delay_queue::{JobId, NewJob};
use crate::error::StoreError;

const CONFIG: BatchConfig = BatchConfig {
    max_unbatched: 8,
    linger: Duration::from_micros(200),
    max_batch: MAX_BATCH,
    split: |_| 2,
    max_partial_in_flight: |_| 2,
    max_full_in_flight: 2,
};

/// Batches of pushes.
pub(crate) struct PushBatcher(Batcher<Pending>);

/// A job that was not pushed yet.
struct Pending {
    queue: QueueKey,
    job: NewJob,
    max_jobs: u64,
    reply: oneshot::Sender<Result<Admission, StoreError>>,
}

impl PushBatcher {
    /// Sends batches until it is dropped.
    pub(crate) fn new(servers: Arc<Servers>, keys: Arc<Keys>, scripts: Arc<Scripts>, runtime: &RuntimeHandle) -> Self {
        let send =
            move |batch, deferred| send(Arc::clone(&servers), Arc::clone(&keys), Arc::clone(&scripts), deferred, batch);
        Self(Batcher::new(CONFIG, runtime, send))
    }

    /// A permit for a direct call, or `None` if the call should be batched.
    pub(crate) fn try_direct(&self) -> Option<InFlightGuard> {
        self.0.try_direct()
    }

    /// Pushes a job in a batch. Returns `None` if the caller should push it directly.
    pub(crate) async fn push(
        &self,
        queue: &QueueKey,
        job: &NewJob,
        max_jobs: u64,
    ) -> Option<Result<Admission, StoreError>> {
        let pending = |reply| Pending { queue: *queue, job: job.clone(), max_jobs, reply };
        let lost = || StoreError::unavailable("the runtime that sends pushes to redis has ended");
        Some(self.0.submit(pending).await?.unwrap_or_else(|_| Err(lost())))
    }
}

/// Pushes a batch, with one call or more for each queue, and answers its callers. Returns the time of the last reply of Redis, or `None` if
/// a call got none.
async fn send(
    servers: Arc<Servers>,
    keys: Arc<Keys>,
    scripts: Arc<Scripts>,
    deferred: DeferredWork,
    mut batch: Vec<Pending>,
) -> Option<Instant> {
    // Skip the jobs of callers that have given up.
    batch.retain(|pending| !pending.reply.is_closed());
    if batch.is_empty() {
        return None;
    }
    // Concurrently, so that a stalled node of a cluster delays only its own queues.
    let calls = groups(batch).into_iter().map(|group| send_group(&servers, &keys, &scripts, &deferred, group));
    join_all(calls).await.into_iter().collect::<Option<Vec<_>>>()?.into_iter().max()
}

/// Groups of jobs with the same queue, priority and maximum number of jobs, each small enough for one call.
fn groups(mut batch: Vec<Pending>) -> Vec<Vec<Pending>> {
    let mut groups = Vec::new();
    while let Some(last) = batch.last() {
        let (mut group, rest): (Vec<_>, Vec<_>) = {
            let (queue, priority, max_jobs) = (last.queue, last.job.priority, last.max_jobs);
            batch.into_iter().partition(|pending| {
                (pending.queue, pending.job.priority, pending.max_jobs) == (queue, priority, max_jobs)
            })
        };
        batch = rest;
        while !group.is_empty() {
            let others = group.split_off(batch_len(group.iter().map(|pending| pending.job.size())));
            groups.push(mem::replace(&mut group, others));
        }
    }
    groups
}

/// Pushes jobs of one queue and priority. Returns the time of the reply of Redis, or `None` without one.
async fn send_group(
    servers: &Servers,
    keys: &Keys,
    scripts: &Scripts,
    deferred: &DeferredWork,
    group: Vec<Pending>,
) -> Option<Instant> {
    let (keys, max_jobs) = (keys.delay_queue(&group[0].queue), group[0].max_jobs);
    let (jobs, mut replies): (Vec<_>, Vec<_>) =
        group.into_iter().map(|Pending { job, reply, .. }| (job, reply)).unzip();
    let jobs: Vec<_> = jobs.iter().collect();
    let answer = tokio::select! {
        biased;
        answer = push(servers, scripts, &keys, max_jobs, &jobs) => answer,
        () = until_abandoned(&mut replies, |reply| reply) => return None,
    };
    let replied_at = answer.is_ok().then(Instant::now);
    deferred
        .when_idle(move || {
            for (i, reply) in replies.into_iter().enumerate() {
                let admission = match &answer {
                    Ok(admissions) => Ok(admissions[i]),
                    Err(error) => Err(error.clone()),
                };
                // The caller may have given up.
                let _ = reply.send(admission);
            }
        })
        .await;
    replied_at
}

/// Pushes jobs of one priority.
pub(crate) async fn push(
    servers: &Servers,
    scripts: &Scripts,
    keys: &QueueKeys,
    max_jobs: u64,
    jobs: &[&NewJob],
) -> Result<Vec<Admission>, StoreError> {
    let Some(first) = jobs.first() else { return Ok(Vec::new()) };
    let reply = scripts.delay_queue.push(servers, keys, first.priority as usize, max_jobs, &PackedJobs(jobs)).await?;
    admissions(jobs, &reply).ok_or_else(|| unexpected_reply(&reply))
}

/// Decodes the reply of `delay_queue_push.lua`.
fn admissions(jobs: &[&NewJob], reply: &Value) -> Option<Vec<Admission>> {
    let Value::Array(values) = reply else { return None };
    let [Value::BulkString(answers), key_holders @ ..] = values.as_slice() else { return None };
    let mut key_holders = key_holders.iter();
    let admission = |(job, answer): (&&NewJob, &u8)| match answer {
        b'0' => Some(Admission::Exists(job.id)),
        b'1' => Some(Admission::New),
        b'2' => Some(Admission::Full),
        b'3' => match key_holders.next()? {
            Value::BulkString(holder) => Some(Admission::Exists(JobId::from_store(holder)?)),
            _ => None,
        },
        _ => None,
    };
    if answers.len() == jobs.len() { jobs.iter().zip(answers).map(admission).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::connection::connector::Connector;
    use crate::backend::redis::connection::pool::{Pool, PoolOptions};
    use crate::delay_queue::Priority;

    /// The push of a caller that has given up.
    fn pending(bytes: usize, priority: Priority) -> Pending {
        let job = NewJob { priority, ..NewJob::new(JobId::from("a"), vec![0; bytes]) };
        Pending { queue: QueueKey::new("test"), job, max_jobs: 1, reply: oneshot::channel().0 }
    }

    /// Regression: the time until they were discarded counted as a round trip.
    #[tokio::test]
    async fn abandoned_pushes_count_as_no_reply() {
        // No server listens there.
        let client = redis::Client::open("redis://127.0.0.1:1/").unwrap();
        let connector = Connector::Client(Box::new((client, redis::AsyncConnectionConfig::new())));
        let pool_options =
            PoolOptions { connect: Duration::MAX, response: Duration::MAX, runtime: Arc::new(RuntimeHandle::here()) };
        let servers = Servers::One(Pool::lazy(connector, 1, pool_options, &Arc::default()));
        let batch = vec![pending(1, Priority::Normal), pending(1, Priority::Low)];
        let (servers, keys, scripts) = (Arc::new(servers), Arc::new(Keys::new("test")), Arc::new(Scripts::new()));
        assert_eq!(send(servers, keys, scripts, DeferredWork::new(), batch).await, None);
    }

    /// Redis does nothing else while a script reads its arguments.
    #[test]
    fn batch_of_large_jobs_goes_in_several_calls() {
        let sizes = |batch| {
            let mut sizes: Vec<_> = groups(batch).iter().map(Vec::len).collect();
            sizes.sort_unstable();
            sizes
        };
        assert_eq!(sizes((0..MAX_BATCH).map(|_| pending(100, Priority::Normal)).collect()), [MAX_BATCH]);
        let large = (0..100).map(|_| pending(60_000, Priority::Normal));
        assert_eq!(sizes(large.chain([pending(1, Priority::Low)]).collect()), [1, 15, 17, 17, 17, 17, 17]);
        assert_eq!(sizes((0..3).map(|_| pending(2_000_000, Priority::Normal)).collect()), [1, 1, 1]);
    }
}
