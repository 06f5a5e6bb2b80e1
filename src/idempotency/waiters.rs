use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::attempt::{Begin, OperationContext};
use super::handle::HasPayload;
use super::store::Begun;
use crate::error::StoreError;
use crate::lock::Notifications;

/// How often whoever waits looks, whether or not something was heard.
const POLL: Duration = Duration::from_secs(1);
/// A lease that is about to end is about to be renewed, more often than not.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);

impl<P: HasPayload + 'static> OperationContext<P> {
    /// Begins the operation, or waits for whoever does it, unless as many as may do so already. `begun` is what the store has said already.
    pub(crate) async fn begin_or_wait(
        self: &Arc<Self>,
        begun: Option<Result<Begin<P>, StoreError>>,
        patience: Duration,
        max_waiting: usize,
    ) -> Result<Begin<P>, StoreError> {
        let begun = match begun {
            Some(begun) => begun?,
            None => self.begin().await?,
        };
        if patience.is_zero() || !matches!(begun, Begin::Not(Begun::InFlight { .. })) {
            return Ok(begun);
        }
        let home = self.home();
        let Some(_place) = home.register_waiter(self.bounded_scope(), max_waiting) else { return Ok(begun) };
        let start = Instant::now();
        let begun = Box::pin(wait(Arc::clone(self), begun, start + patience)).await;
        home.meters().waited(start.elapsed());
        Ok(begun)
    }
}

/// Begins the operation once somebody else is done with it. `known` is what the store has said last: a store that fails meanwhile does
/// not make it untrue, so nobody passes for that.
async fn wait<P: HasPayload + 'static>(
    mut order: Arc<OperationContext<P>>,
    mut known: Begin<P>,
    until: Instant,
) -> Begin<P> {
    // What comes to pass before anybody listens is found by asking again.
    let watch = timeout_at(until.min(Instant::now() + POLL), order.watch());
    let mut wakeups = watch.await.unwrap_or_else(|_| Notifications::none());
    loop {
        let begun = order.begin().await;
        let has_failed = begun.is_err();
        known = begun.unwrap_or(known);
        let Begin::Not(Begun::InFlight { remaining, .. }) = &known else { return known };
        let now = Instant::now();
        if now >= until {
            return known;
        }
        // When the lease ends without a word nobody tells.
        let mut pause = (*remaining).clamp(SHORTEST_PAUSE, POLL);
        if has_failed {
            // What may have been claimed is given back, so it is not claimed again.
            let Ok(again) = order.anew() else { return known };
            (order, pause) = (again, POLL);
        }
        tokio::select! {
            () = wakeups.next() => {}
            () = sleep_until(until.min(now + pause)) => {}
        }
    }
}
