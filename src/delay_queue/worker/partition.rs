//! One partition of the queue: results to record, and when to claim.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::claims::Claims;
use super::pending_ack::PendingAck;
use crate::delay_queue::backoff::share;
use crate::delay_queue::store::{Claim, QueueKey};
use crate::error::StoreError;

/// The pause after a failed call. It doubles with each further failure up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a worker knows of one partition of its queue.
pub(crate) struct Partition {
    pub(crate) key: QueueKey,
    pub(crate) pending_acks: VecDeque<PendingAck>,
    // When there may be a job to claim. `None` while a claim is in flight, or until a notification arrives.
    pub(crate) claim_at: Option<Instant>,
    // Whether more jobs were due after the last claim, and the age of the oldest due job in the last reply.
    pub(crate) has_more_due: bool,
    pub(crate) oldest_due: Option<Duration>,
    // When the last call was sent.
    pub(crate) called_at: Instant,
    // Whether the store may rely on this worker to claim when the next job is due, while other workers sleep.
    pub(crate) is_timekeeper: bool,
    // Whether the next call claims no job, so that the store relies on another worker.
    pub(crate) next_call_skips_claim: bool,
    // How many calls that record results and claim jobs are in flight.
    pub(crate) calls: usize,
    pub(crate) failures: u32,
    pub(crate) backoff_until: Instant,
}

/// A call that records results and claims jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) partition: usize,
    /// How many results to record.
    pub(crate) acks: usize,
    /// How many jobs to claim at most.
    pub(crate) max_jobs: usize,
}

/// A [`Call`] in flight.
pub(crate) struct SentCall {
    pub(crate) partition: usize,
    pub(crate) max_jobs: usize,
    pub(crate) acks: Vec<PendingAck>,
    // The partition's `is_timekeeper` before the call was sent.
    was_timekeeper: bool,
}

impl Partition {
    pub(crate) fn new(key: QueueKey, now: Instant) -> Self {
        Self {
            key,
            pending_acks: VecDeque::new(),
            claim_at: Some(now),
            has_more_due: false,
            oldest_due: None,
            called_at: now,
            is_timekeeper: false,
            next_call_skips_claim: false,
            calls: 0,
            failures: 0,
            backoff_until: now,
        }
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.claim_at.is_some_and(|at| at <= now)
    }

    /// Whether the partition waits after a failed call.
    pub(crate) fn is_backing_off(&self, now: Instant) -> bool {
        self.backoff_until > now
    }

    /// Whether there is a result to record, or may be a job to claim.
    pub(crate) fn has_work(&self, now: Instant) -> bool {
        let has_more = self.has_more_due && self.failures == 0;
        !self.is_backing_off(now) && (self.is_due(now) || has_more || !self.pending_acks.is_empty())
    }

    /// When to call the store at the latest. If a due job cannot be claimed, the call refreshes the age of the oldest due job. While jobs
    /// run, the call does not wait for a notification, because a job may block the thread of the task that receives notifications.
    pub(crate) fn refresh_at(&self, now: Instant, is_busy: bool) -> Option<Instant> {
        (is_busy || self.is_due(now) || self.oldest_due.is_some()).then(|| self.called_at + Claim::MAX_WAIT)
    }

    /// Adds a result to record. After `lease_ends` the store may refuse it.
    pub(crate) fn add_ack(&mut self, lease_ends: Instant, ack: PendingAck) {
        self.pending_acks.push_back(PendingAck { lease_ends: Some(lease_ends), ..ack });
    }

    /// Starts a call, which takes its results out of `pending_acks`.
    pub(crate) fn start_call(&mut self, Call { partition, acks, max_jobs }: Call, now: Instant) -> SentCall {
        let acks = self.pending_acks.drain(..acks).collect();
        let call = SentCall { partition, max_jobs, acks, was_timekeeper: self.is_timekeeper };
        (self.called_at, self.next_call_skips_claim) = (now, false);
        self.calls += 1;
        if max_jobs > 0 {
            // Set by the reply, or by the failure of the call.
            self.claim_at = None;
        } else {
            self.is_timekeeper = false;
        }
        call
    }

    /// Puts the results of a failed call back into `pending_acks`, and pauses.
    pub(crate) fn record_failure(&mut self, call: SentCall, sent: Instant, error: &StoreError, now: Instant) {
        for ack in call.acks.into_iter().rev() {
            // A refused call had no effect. A call after the end of the lease counts as one without effect, because
            // another worker may have the job.
            let may_have_effect = !error.is_refusal() && ack.lease_ends.is_none_or(|ends| sent < ends);
            let first_sent_at = ack.first_sent_at.or(may_have_effect.then_some(sent));
            self.pending_acks.push_front(PendingAck { first_sent_at, ..ack });
        }
        let pause = (FIRST_PAUSE * (1 << self.failures.min(8))).min(LONGEST_PAUSE);
        self.failures += 1;
        (self.backoff_until, self.claim_at) = (now + pause / 2 + share(pause / 2), Some(now));
        // The claim may have taken effect, and made this worker the timekeeper.
        self.is_timekeeper |= call.max_jobs > 0 || call.was_timekeeper;
    }

    /// Records the reply, and when to claim next.
    pub(crate) fn record_claims<T>(&mut self, max_jobs: usize, claims: &Claims<T>, now: Instant) {
        self.failures = 0;
        if max_jobs == 0 {
            // The store does not notify a worker whose last call had a limit of zero jobs, so claim now.
            self.claim_at = Some(now);
            return;
        }
        self.has_more_due = claims.more || claims.jobs.len() + claims.undecodable.len() >= max_jobs;
        // While another call is in flight, keep the role: the store may have handled that call last.
        self.is_timekeeper = !self.has_more_due || (self.is_timekeeper && self.calls > 0);
        let claim_at = if self.has_more_due { Some(now) } else { claims.next_at() };
        self.claim_at = self.claim_at.into_iter().chain(claim_at).min();
    }
}
