//! Settles attempts in the background, after their requests have ended.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::Instrument as _;

use super::context::{OperationContext, Settlement};
use super::has_body_fingerprint::HasBodyFingerprint;
use super::metrics::AttemptOutcome;
use crate::error::StoreError;

/// A claim without a reply may still reach the store after its release. So it is released again after this time.
const SECOND_RELEASE_DELAY: Duration = Duration::from_secs(1);
/// The first pause between background calls. It doubles with each call, up to a tenth of the lease.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The maximum of the pause for any lease, so that results are stored soon after the store recovers.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The minimum time for which background calls are repeated.
const MIN_RETRY_TIME: Duration = Duration::from_secs(1);

/// A background settlement. It is dropped unfinished if too many are running, if there is no runtime, or if the runtime shuts down.
pub(super) struct BackgroundSettle<P: HasBodyFingerprint + 'static> {
    context: Arc<OperationContext<P>>,
    settlement: Settlement,
    target: SettleTarget,
    is_done: bool,
}

/// What a background task settles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SettleTarget {
    Attempt,
    /// A claim without a reply, so no handler was started. It may reach the store after its first release. By then, another release
    /// may have replaced the token that the store remembers. So the claim is released again.
    Claim,
}

impl<P: HasBodyFingerprint + 'static> BackgroundSettle<P> {
    /// Continues to settle in the background, for the length of a lease, but at least a second.
    pub(super) fn spawn(context: &Arc<OperationContext<P>>, settlement: Settlement, target: SettleTarget) {
        let settling = Self { context: Arc::clone(context), settlement, target, is_done: false };
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
        let until = Instant::now() + self.context.lease().max(MIN_RETRY_TIME);
        match self.target {
            SettleTarget::Attempt => self.settle_attempt(until).await,
            SettleTarget::Claim => self.release_claim(until).await,
        }
        self.is_done = true;
    }

    async fn settle_attempt(&self, until: Instant) {
        let Self { context, settlement, .. } = self;
        let settled = self.settle_until(until, || Ok(())).await;
        if let Err(error) = &settled {
            let (layer, operation) = (context.layer(), context.operation());
            let cause = error.source().map(tracing::field::display);
            tracing::warn!(
                layer, %operation, %error, cause,
                "an operation could not be settled in time: its outcome is unknown"
            );
        }
        let outcome = settled.map_or(AttemptOutcome::Unknown, |is_ours| context.outcome(settlement, is_ours));
        context.coordinator().metrics().record_attempt(outcome);
    }

    async fn release_claim(&self, until: Instant) {
        let Self { context, settlement, .. } = self;
        // During a store outage, each claim without a reply spawns such a task. The calls of these tasks must not be probes.
        let mut settled = self.settle_until(until, || context.coordinator().circuit.admit_no_probe()).await;
        if settled.is_ok() {
            sleep(SECOND_RELEASE_DELAY).await;
            settled = context.settle(settlement).await;
        }
        if let Err(error) = settled {
            tracing::debug!(operation = %context.operation(), %error, "a claim could not be released, if it was granted");
        }
    }

    /// Repeats the store call until it succeeds or `until` has passed. `may_call` can prevent each call but the last. By then the
    /// store may have recovered, although no probe has closed the circuit.
    async fn settle_until(
        &self,
        until: Instant,
        may_call: impl Fn() -> Result<(), StoreError>,
    ) -> Result<bool, StoreError> {
        let Self { context, settlement, .. } = self;
        let longest = (context.lease() / 10).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        let mut pause = FIRST_PAUSE;
        loop {
            let is_last = Instant::now() >= until;
            let settled = match may_call() {
                Err(error) if !is_last => Err(error),
                _ => context.settle(settlement).await,
            };
            if settled.is_ok() || is_last {
                return settled;
            }
            sleep_until(until.min(Instant::now() + pause)).await;
            pause = longest.min(pause * 2);
        }
    }
}

impl<P: HasBodyFingerprint + 'static> Drop for BackgroundSettle<P> {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let (layer, operation) = (self.context.layer(), self.context.operation());
        match self.target {
            SettleTarget::Attempt => {
                tracing::warn!(layer, %operation, "an operation cannot be settled in the background: its outcome is unknown");
                self.context.coordinator().metrics().record_attempt(AttemptOutcome::Unknown);
            }
            SettleTarget::Claim => {
                tracing::debug!(layer, %operation, "cannot release a claim in the background: it lasts until its lease ends");
            }
        }
    }
}
