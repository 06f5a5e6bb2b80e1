//! The stages of a worker's shutdown.

use std::time::Duration;

use tokio::time::Instant;

use crate::delay_queue::store::Claim;

/// How long a dropped service may take to yield before its job is abandoned.
pub(crate) const ABANDON_AFTER: Duration = Duration::from_secs(1);
/// How long the worker tries to record the last results during a shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The stages of a worker, from work to the end of its shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Working,
    /// Waits for running jobs until this instant.
    Draining(Instant),
    /// Running services were told to give up and are dropped. Ends at this instant, since a future that never yields cannot be dropped.
    Releasing(Instant),
    /// No job runs any more, except abandoned jobs that do not yield. The remaining results are recorded until this instant.
    Flushing(Instant),
}

impl Stage {
    /// The first stage of a shutdown.
    pub(crate) fn draining(now: Instant, grace: Duration) -> Self {
        Self::Draining(after(now, grace))
    }

    pub(crate) fn is_working(self) -> bool {
        self == Self::Working
    }

    pub(crate) const fn ends_at(self) -> Option<Instant> {
        match self {
            Self::Working => None,
            Self::Draining(until) | Self::Releasing(until) | Self::Flushing(until) => Some(until),
        }
    }

    /// The next stage of the shutdown, if it is time for it. The worker is idle if no job runs and no call in flight can claim one.
    pub(crate) fn next(self, now: Instant, is_idle: bool, abort_after: Duration) -> Option<Self> {
        match self {
            Self::Draining(until) if now >= until => Some(Self::Releasing(after(now, abort_after) + ABANDON_AFTER)),
            Self::Draining(until) | Self::Releasing(until) if is_idle || now >= until => {
                Some(Self::Flushing(now + FLUSH_TIMEOUT))
            }
            Self::Working | Self::Draining(_) | Self::Releasing(_) | Self::Flushing(_) => None,
        }
    }
}

/// The instant `time` after `now`; a day after `now` if the clock cannot represent that instant.
fn after(now: Instant, time: Duration) -> Instant {
    now.checked_add(time).unwrap_or_else(|| now + Claim::MAX_LEASE)
}
