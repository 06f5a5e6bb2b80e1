//! Settles attempts in the background, after their requests have ended.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::Instrument as _;

use super::context::{OperationContext, Settlement};
use super::has_payload::HasPayload;
use super::metrics::Ended;
use crate::error::StoreError;

/// How late a claim may reach the store after its release, if its caller did not wait for the reply.
const LATE: Duration = Duration::from_secs(1);
/// The first pause between background calls. It doubles with each call, up to a tenth of the lease.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The upper limit of the pause for any lease, so that results are stored soon after the store recovers.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The minimum time of background calls.
const SHORTEST: Duration = Duration::from_secs(1);

/// A background settlement. It may be dropped before its end, if there is no room or no runtime for its task.
pub(super) struct BackgroundSettle<P: HasPayload + 'static> {
    context: Arc<OperationContext<P>>,
    end: Settlement,
    what: Settled,
    is_over: bool,
}

/// The subject of a background settlement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Settled {
    Attempt,
    /// A claim whose reply was not received, so no handler was started. It is released twice, the second time a moment later. The
    /// claim may reach the store after the first release, and the store remembers only the token of the last release.
    Claim,
}

impl<P: HasPayload + 'static> BackgroundSettle<P> {
    /// Continues to settle in the background, for the length of a lease, but at least a second.
    pub(super) fn spawn(context: &Arc<OperationContext<P>>, end: Settlement, what: Settled) {
        let settling = Self { context: Arc::clone(context), end, what, is_over: false };
        let (Some(runtime), Some(running)) = (context.runtime(), context.coordinator().admit_background()) else {
            return;
        };
        let task = async move {
            settling.run().await;
            drop(running);
        };
        drop(runtime.spawn(task.in_current_span()));
    }

    async fn run(mut self) {
        let until = Instant::now() + self.context.lease().max(SHORTEST);
        match self.what {
            Settled::Attempt => self.settle_attempt(until).await,
            Settled::Claim => self.release_claim(until).await,
        }
        self.is_over = true;
    }

    async fn settle_attempt(&self, until: Instant) {
        let Self { context, end, .. } = self;
        let settled = self.settle_until(until, || Ok(())).await;
        if let Err(error) = &settled {
            let (layer, operation) = (context.layer(), context.operation());
            let cause = error.source().map(tracing::field::display);
            tracing::warn!(
                layer, %operation, %error, cause,
                "an operation could not be settled in time: its outcome is unknown"
            );
        }
        context.coordinator().meters().ended(settled.map_or(Ended::Unknown, |is_ours| context.ended(end, is_ours)));
    }

    async fn release_claim(&self, until: Instant) {
        let Self { context, end, .. } = self;
        // During a store outage there are as many of these as requests, so none of them is used as a probe.
        let mut settled = self.settle_until(until, || context.coordinator().circuit.admit_no_probe()).await;
        if settled.is_ok() {
            sleep(LATE).await;
            settled = context.settle(end).await;
        }
        if let Err(error) = settled {
            tracing::debug!(operation = %context.operation(), %error, "a claim could not be released, if it was granted");
        }
    }

    /// Repeats the store call until it succeeds or `until` has passed. The last call ignores `may_ask`: without it no call might
    /// find out that the store has recovered.
    async fn settle_until(
        &self,
        until: Instant,
        may_ask: impl Fn() -> Result<(), StoreError>,
    ) -> Result<bool, StoreError> {
        let Self { context, end, .. } = self;
        let longest = (context.lease() / 10).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        let mut pause = FIRST_PAUSE;
        loop {
            let is_last = Instant::now() >= until;
            let settled = match may_ask() {
                Err(error) if !is_last => Err(error),
                _ => context.settle(end).await,
            };
            if settled.is_ok() || is_last {
                return settled;
            }
            sleep_until(until.min(Instant::now() + pause)).await;
            pause = longest.min(pause * 2);
        }
    }
}

impl<P: HasPayload + 'static> Drop for BackgroundSettle<P> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (layer, operation) = (self.context.layer(), self.context.operation());
        match self.what {
            Settled::Attempt => {
                tracing::warn!(layer, %operation, "an operation cannot be settled in the background: its outcome is unknown");
                self.context.coordinator().meters().ended(Ended::Unknown);
            }
            Settled::Claim => {
                tracing::debug!(layer, %operation, "cannot release a claim in the background: it lasts until its lease ends");
            }
        }
    }
}
