//! Decodes the reply to a claim.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::attempt_results::panic_text;
use super::pending_ack::PendingAck;
use super::settings::OnUndecodable;
use crate::codec::Codec;
use crate::delay_queue::backoff::{Backoff, share};
use crate::delay_queue::job::{Canceller, Job};
use crate::delay_queue::queue::DelayQueue;
use crate::delay_queue::record::Reason;
use crate::delay_queue::store::{AckKind, Claim, Claimed, ClaimedJob, Died, Expired, Finished, JobLease};

/// The decoded reply to a call that finishes and claims.
pub(crate) struct Claims<T> {
    pub(crate) finished: Vec<Finished>,
    pub(crate) jobs: Vec<DecodedJob<T>>,
    // Jobs whose payload cannot be decoded.
    pub(crate) undecodable: Vec<PendingAck>,
    pub(crate) more: bool,
    pub(crate) next: Option<Duration>,
    pub(crate) oldest_due: Option<Duration>,
    pub(crate) expired: Expired,
    pub(crate) died: Vec<Died>,
    pub(crate) received: Instant,
    // The time of the store's clock.
    pub(crate) now: SystemTime,
}

pub(crate) struct DecodedJob<T> {
    pub(crate) lease: JobLease,
    pub(crate) job: Job<T>,
    pub(crate) canceller: Canceller,
}

/// The rule for jobs that cannot be decoded.
#[derive(Clone, Copy)]
pub(crate) struct UndecodableRule {
    pub(crate) action: OnUndecodable,
    pub(crate) backoff: Backoff,
}

impl<T> Claims<T> {
    /// Decodes the claimed jobs.
    pub(crate) fn decode<C: Codec<T>>(queue: &DelayQueue<T, C>, claimed: Claimed, rule: UndecodableRule) -> Self {
        let received = Instant::now();
        let Claimed { finished, jobs: claimed, more, next, oldest_due, expired, died, now } = claimed;
        let (mut jobs, mut undecodable) = (Vec::with_capacity(claimed.len()), Vec::new());
        for job in claimed {
            let (lease, attempt) = (job.lease(), job.job.attempt);
            match decode(queue, job, rule) {
                Ok(decoded) => jobs.push(decoded),
                Err(kind) => undecodable.push(PendingAck { attempt, ..PendingAck::new(lease, kind) }),
            }
        }
        Self { finished, jobs, undecodable, more, next, oldest_due, expired, died, received, now }
    }

    /// When to claim again, by the local clock. `None` if only a notification leads to the next claim.
    pub(crate) fn next_at(&self) -> Option<Instant> {
        self.received.checked_add(wait(self.next?, self.now))
    }
}

/// Decodes a claimed job. If that fails, the error says what becomes of the job.
fn decode<T, C: Codec<T>>(
    queue: &DelayQueue<T, C>,
    claimed: ClaimedJob,
    rule: UndecodableRule,
) -> Result<DecodedJob<T>, AckKind> {
    let (lease, attempt, max_attempts) = (claimed.lease(), claimed.job.attempt, claimed.job.max_attempts);
    let kind = match catch_unwind(AssertUnwindSafe(|| queue.decode_claimed(claimed))) {
        Ok(Ok((job, canceller))) => return Ok(DecodedJob { lease, job, canceller }),
        Ok(Err(kind)) => kind,
        Err(panic) => AckKind::Dead { reason: Reason::Undecodable, error: panic_text(panic) },
    };
    Err(match kind {
        // After the last attempt the job is dead as undecodable, and not as failed.
        AckKind::Dead { error, .. } if rule.action == OnUndecodable::Retry && attempt < max_attempts => {
            AckKind::Retry { delay: rule.backoff.delay(attempt), error }
        }
        kind => kind,
    })
}

/// How long to wait after the reply. `next` counts from the start of the current millisecond of the store's clock, so subtract the part of
/// this millisecond that has passed.
fn wait(next: Duration, now: SystemTime) -> Duration {
    if next == Claim::MAX_WAIT {
        // No due time is known. The spread keeps many workers from claiming at the same time.
        return next - share(next / 5);
    }
    let start = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().subsec_nanos() % 1_000_000;
    next.saturating_sub(Duration::from_nanos(start.into()))
}
