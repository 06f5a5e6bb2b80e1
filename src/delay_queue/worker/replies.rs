//! How a worker handles the store's replies: it reports recorded results, starts claimed jobs, and notes renewed leases.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tower_service::Service;
use tracing::Instrument;

use super::claims::{Claims, DecodedJob};
use super::event_loop::WorkerLoop;
use super::job_timers::JobTimers;
use super::partition::SentCall;
use super::pending_ack::PendingAck;
use super::running_job::RunningJob;
use super::store_calls::{ClaimReply, ExtendReply, Reply};
use crate::delay_queue::job::Job;
use crate::delay_queue::store::AckKind;
use crate::error::BoxError;

/// How long a job snoozes if this worker claims it again after it has abandoned the job. After the snooze, another worker may claim the
/// job: each worker checks within [`Claim::MAX_WAIT`](crate::delay_queue::store::Claim::MAX_WAIT).
const ABANDONED_SNOOZE: Duration = Duration::from_secs(3);

/// The call that claimed a job.
#[derive(Clone, Copy)]
struct Origin {
    partition: usize,
    // When it was sent, by the local clock.
    sent: Instant,
    // When it claimed the job, by the store's clock.
    claimed_at: SystemTime,
}

impl<T, S, C> WorkerLoop<T, S, C>
where
    S: Service<Job<T>, Error: Into<BoxError>, Future: Send + 'static>,
{
    pub(super) fn on_reply(&mut self, reply: Reply<T>, now: Instant) {
        match reply {
            Reply::Extended(reply) => self.on_extended(reply, now),
            Reply::Claimed(ClaimReply { call, sent, result }) => {
                self.calls.replied(&call);
                let partition = &mut self.partitions[call.partition];
                partition.calls -= 1;
                match result {
                    Ok(claims) => self.on_claimed(call, sent, *claims, now),
                    Err(error) => {
                        self.reporter.store_failed(call.partition, &error);
                        partition.record_failure(call, sent, &error, now);
                    }
                }
            }
        }
    }

    fn on_claimed(&mut self, call: SentCall, sent: Instant, claims: Claims<T>, now: Instant) {
        let (reporter, index) = (&mut self.reporter, call.partition);
        let dead = self.queue.dead_limits();
        reporter.store_works(index);
        for (ack, finished) in call.acks.into_iter().zip(&claims.finished) {
            reporter.acked(ack, *finished, dead, now);
        }
        self.partitions[index].oldest_due = claims.oldest_due;
        reporter.oldest_due(self.partitions.iter().filter_map(|partition| partition.oldest_due).max());
        reporter.expired(claims.expired, &claims.died, now);
        let partition = &mut self.partitions[index];
        partition.record_claims(call.max_jobs, &claims, now);
        let lease_ends = sent + self.settings.lease;
        for ack in claims.undecodable {
            partition.add_ack(lease_ends, ack);
        }
        if lease_ends <= now && !claims.jobs.is_empty() {
            reporter.claimed_too_late(claims.jobs.len());
        }
        let origin = Origin { partition: index, sent, claimed_at: claims.now };
        for decoded in claims.jobs {
            self.start(decoded, origin, now);
        }
    }

    /// Starts a claimed job.
    fn start(&mut self, decoded: DecodedJob<T>, origin: Origin, now: Instant) {
        let DecodedJob { lease, job, canceller } = decoded;
        let lease_ends = origin.sent + self.settings.lease;
        let partition = &mut self.partitions[origin.partition];
        if self.jobs.has_abandoned(&lease.id) {
            // The job waits for the end of the abandoned attempt, or for another worker.
            partition.next_call_skips_claim = true;
            partition.add_ack(lease_ends, PendingAck::new(lease, AckKind::Snooze { delay: ABANDONED_SNOOZE }));
            return;
        }
        // Another worker may have claimed the job after the end of the lease.
        let may_begin = self.stage.is_working() && now < lease_ends;
        let Some(mut instance) = may_begin.then(|| self.services.take()).flatten() else {
            partition.add_ack(lease_ends, PendingAck::new(lease, AckKind::Release));
            return;
        };
        let (attempt, is_last) = (job.attempt(), job.is_last_attempt());
        let late = origin.claimed_at.duration_since(job.due_at()).unwrap_or_default();
        let call = catch_unwind(AssertUnwindSafe(|| {
            let span = self.settings.span(self.queue.name().as_str(), &job);
            (span.in_scope(|| instance.call(job)), span)
        }));
        let (future, span) = match call {
            Ok(called) => called,
            Err(panic) => {
                self.services.put_panicked(instance);
                let ack = self.results.panicked(lease, attempt, panic);
                partition.add_ack(lease_ends, PendingAck { is_last, attempt, ..ack });
                return;
            }
        };
        self.services.put(instance);
        let task = async move { future.await.map(drop).map_err(Into::into) };
        let abort = self.jobs.spawn(task.instrument(span));
        let timers = JobTimers::new(origin.sent, self.settings.lease, now, self.settings.max_runtime);
        let partition = origin.partition;
        let running = RunningJob { partition, lease, attempt, is_last, started: now, canceller, abort, timers };
        self.reporter.started(&running, late);
        self.jobs.insert(running);
    }

    /// Handles the reply to a lease renewal.
    fn on_extended(&mut self, reply: ExtendReply, now: Instant) {
        let ExtendReply { partition, tasks, sent, result } = reply;
        match result {
            Ok(extensions) => {
                // While claims fail, a successful renewal does not mean that the store works.
                if self.partitions[partition].failures == 0 {
                    self.reporter.store_works(partition);
                }
                for (task, extended) in tasks.iter().zip(extensions) {
                    self.jobs.extended(task, extended, sent, now);
                }
            }
            // The next renewal retries it.
            Err(error) => self.reporter.store_failed(partition, &error),
        }
    }
}
