//! The store calls of a worker that are in flight.

use std::time::Duration;

use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;

use super::claims::{Claims, UndecodableRule};
use super::partition::SentCall;
use super::settings::Settings;
use crate::codec::Codec;
use crate::delay_queue::queue::DelayQueue;
use crate::delay_queue::store::{Claim, Extended, JobLease, MAX_BATCH, QueueKey, WorkerId};
use crate::error::StoreError;

/// The calls of a worker that are in flight.
pub(crate) struct StoreCalls<T, C> {
    queue: DelayQueue<T, C>,
    worker: WorkerId,
    lease: Duration,
    undecodable: UndecodableRule,
    in_flight: JoinSet<Reply<T>>,
    // How many jobs the calls in flight may claim.
    reserved: usize,
    // How many results they carry.
    acks: usize,
}

/// The reply to a call.
pub(crate) enum Reply<T> {
    Claimed(ClaimReply<T>),
    Extended(ExtendReply),
}

pub(crate) struct ClaimReply<T> {
    pub(crate) call: SentCall,
    pub(crate) sent: Instant,
    // Boxed to keep replies small.
    pub(crate) result: Result<Box<Claims<T>>, StoreError>,
}

pub(crate) struct ExtendReply {
    pub(crate) partition: usize,
    pub(crate) tasks: Vec<Id>,
    pub(crate) sent: Instant,
    pub(crate) result: Result<Vec<Extended>, StoreError>,
}

impl<T, C> StoreCalls<T, C> {
    pub(crate) fn new(queue: DelayQueue<T, C>, worker: WorkerId, settings: &Settings<T>) -> Self {
        let Settings { lease, backoff, on_undecodable: action, .. } = *settings;
        let undecodable = UndecodableRule { action, backoff };
        Self { queue, worker, lease, undecodable, in_flight: JoinSet::new(), reserved: 0, acks: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// How many jobs the calls in flight may claim.
    pub(crate) const fn reserved(&self) -> usize {
        self.reserved
    }

    /// How many results the calls in flight carry.
    pub(crate) const fn acks(&self) -> usize {
        self.acks
    }

    /// Subtracts an answered call from the jobs and results of the calls in flight.
    pub(crate) fn replied(&mut self, call: &SentCall) {
        self.reserved -= call.max_jobs;
        self.acks -= call.acks.len();
    }
}

impl<T, C> StoreCalls<T, C>
where
    C: Codec<T> + Send + Sync + 'static,
    T: Send + 'static,
{
    /// Waits for a reply; `None` if no call is in flight.
    pub(crate) async fn next_reply(&mut self) -> Option<Result<Reply<T>, JoinError>> {
        self.in_flight.join_next().await
    }

    /// Records results and claims jobs.
    pub(crate) fn claim(&mut self, key: QueueKey, call: SentCall, timeout: Duration) {
        self.reserved += call.max_jobs;
        self.acks += call.acks.len();
        let (worker, max_jobs, lease) = (self.worker, call.max_jobs, self.lease);
        let claim = Claim { worker, limit: max_jobs, lease, dead: self.queue.dead_limits() };
        let (queue, undecodable) = (self.queue.clone(), self.undecodable);
        self.in_flight.spawn(async move {
            let finished = call.acks.iter().map(|pending| pending.ack.clone()).collect();
            let sent = Instant::now();
            let result = queue.claim(key, finished, claim, timeout).await;
            let result = result.map(|claimed| Box::new(Claims::decode(&queue, claimed, undecodable)));
            Reply::Claimed(ClaimReply { call, sent, result })
        });
    }

    /// Renews leases.
    pub(crate) fn extend(&mut self, partition: usize, key: QueueKey, leases: &[(Id, JobLease)], timeout: Duration) {
        for batch in leases.chunks(MAX_BATCH) {
            let (tasks, leases): (Vec<_>, Vec<_>) = batch.iter().copied().unzip();
            let (queue, lease) = (self.queue.clone(), self.lease);
            self.in_flight.spawn(async move {
                let sent = Instant::now();
                let result = queue.extend(key, leases, lease, timeout).await;
                Reply::Extended(ExtendReply { partition, tasks, sent, result })
            });
        }
    }
}
