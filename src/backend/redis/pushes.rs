//! Jobs that are pushed at the same time, in one call.
//!
//! As with decisions: a push that is nearly alone goes by itself, and those beyond that wait until one of a few calls is back.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::Inner;
use super::delay_queue::push;
use super::keys::Keys;
use super::meeting::{Away, LATE, Limits, Meeting};
use super::scripts::Scripts;
use super::servers::Servers;
use crate::delay_queue::{Admission, MAX_BATCH, NewJob, QueueKey};
use crate::error::StoreError;

const LIMITS: Limits = Limits { alone: 8, busy: Duration::from_micros(200), together: MAX_BATCH, calls: 2 };

/// Where pushes meet.
pub(super) struct Pushes(Meeting<Waiting>);

/// A job that has not been pushed yet.
struct Waiting {
    queue: QueueKey,
    job: NewJob,
    max_jobs: u64,
    reply: oneshot::Sender<Result<Admission, StoreError>>,
}

impl Pushes {
    /// Sends what has met, until it is dropped.
    pub(super) fn new(inner: &Inner) -> Self {
        let Inner { servers, keys, scripts, locks, .. } = inner;
        let (servers, keys, scripts) = (Arc::clone(servers), Arc::clone(keys), Arc::clone(scripts));
        let send = move |batch| send(Arc::clone(&servers), Arc::clone(&keys), Arc::clone(&scripts), batch);
        Self(Meeting::new(LIMITS, locks.home(), send))
    }

    /// A place for a push that may go by itself, unless others are on their way already.
    pub(super) fn alone(&self) -> Option<Away> {
        self.0.alone()
    }

    /// Pushes a job together with others, or `None` if it has to go by itself after all.
    pub(super) async fn together(
        &self,
        queue: &QueueKey,
        job: &NewJob,
        max_jobs: u64,
    ) -> Option<Result<Admission, StoreError>> {
        let waiting = |reply| Waiting { queue: *queue, job: job.clone(), max_jobs, reply };
        let lost = || StoreError::unavailable("the runtime that pushes jobs has ended");
        Some(self.0.join(waiting).await?.unwrap_or_else(|_| Err(lost())))
    }
}

/// Pushes several jobs at once, those of each queue by themselves, and tells each who waits for it. Whether Redis has answered all of it.
async fn send(servers: Arc<Servers>, keys: Arc<Keys>, scripts: Arc<Scripts>, mut batch: Vec<Waiting>) -> bool {
    // Who has given up need not be pushed.
    batch.retain(|waiting| !waiting.reply.is_closed());
    let mut calls = Vec::new();
    while let Some(last) = batch.last() {
        let (group, rest): (Vec<_>, Vec<_>) = {
            let (queue, priority, max_jobs) = (last.queue, last.job.priority, last.max_jobs);
            batch.into_iter().partition(|waiting| {
                (waiting.queue, waiting.job.priority, waiting.max_jobs) == (queue, priority, max_jobs)
            })
        };
        batch = rest;
        calls.push(send_group(&servers, &keys, &scripts, group));
    }
    // At the same time: a node of a cluster that hangs concerns its own queues.
    !join_all(calls).await.contains(&false)
}

/// Pushes several jobs of one queue and priority. Whether there is an answer.
async fn send_group(servers: &Servers, keys: &Keys, scripts: &Scripts, group: Vec<Waiting>) -> bool {
    let (keys, max_jobs) = (keys.delay_queue(&group[0].queue), group[0].max_jobs);
    let (jobs, mut replies): (Vec<_>, Vec<_>) =
        group.into_iter().map(|Waiting { job, reply, .. }| (job, reply)).unzip();
    let jobs: Vec<_> = jobs.iter().collect();
    let answer = tokio::select! {
        biased;
        answer = push(servers, scripts, &keys, max_jobs, &jobs) => answer,
        () = given_up(&mut replies) => return false,
    };
    for (i, reply) in replies.into_iter().enumerate() {
        let admission = match &answer {
            Ok(admissions) => Ok(admissions[i]),
            Err(error) => Err(error.clone()),
        };
        // Who has given up meanwhile is not interested.
        let _ = reply.send(admission);
    }
    answer.is_ok()
}

/// Waits until nobody waits any more, from when an answer is late: a node that hangs is to hold the place of a call for no longer, or there are
/// none left for the others.
async fn given_up<T>(replies: &mut [oneshot::Sender<T>]) {
    sleep(LATE).await;
    for reply in replies {
        reply.closed().await;
    }
}
