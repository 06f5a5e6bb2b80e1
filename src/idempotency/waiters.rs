use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::attempt::{Attempt, ClaimResult};
use super::context::OperationContext;
use super::has_body_fingerprint::HasBodyFingerprint;
use super::store::Begun;
use crate::error::StoreError;
use crate::store::notifications::Notifications;

/// How often a waiter polls, with or without notifications.
const POLL: Duration = Duration::from_secs(1);
/// The shortest pause between polls: a lease near its end is probably renewed.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);

impl<P: HasBodyFingerprint + 'static> OperationContext<P> {
    /// Begins the operation, or waits for its attempt in flight unless too many requests wait. `first` is the first reply of the store,
    /// if there is one already.
    pub(crate) async fn begin_or_wait(
        self: &Arc<Self>,
        first: Option<Result<ClaimResult<P>, StoreError>>,
        max_wait: Duration,
        max_waiting: usize,
    ) -> Result<ClaimResult<P>, StoreError> {
        let result = match first {
            Some(first) => first?,
            None => Attempt::begin(self).await?,
        };
        if max_wait.is_zero() || !matches!(result, ClaimResult::NotGranted(Begun::InFlight { .. })) {
            return Ok(result);
        }
        let coordinator = self.coordinator();
        let Some(_waiter) = coordinator.register_waiter(self.bounded_scope(), max_waiting) else { return Ok(result) };
        let start = Instant::now();
        let result = Box::pin(wait(Arc::clone(self), result, start + max_wait)).await;
        coordinator.metrics().waited(start.elapsed());
        Ok(result)
    }
}

/// Begins the operation once the attempt in flight ends. If the store fails, keeps waiting, and returns the last reply at the end of the
/// wait. So no request passes because of the failure.
async fn wait<P: HasBodyFingerprint + 'static>(
    mut context: Arc<OperationContext<P>>,
    mut last: ClaimResult<P>,
    until: Instant,
) -> ClaimResult<P> {
    // The attempt may have ended before the subscription, so the loop calls the store first.
    let watch = timeout_at(until.min(Instant::now() + POLL), context.watch());
    let mut notifications = watch.await.unwrap_or_else(|_| Notifications::none());
    loop {
        let result = Attempt::begin(&context).await;
        let has_failed = result.is_err();
        last = result.unwrap_or(last);
        let ClaimResult::NotGranted(Begun::InFlight { remaining, .. }) = &last else { return last };
        let now = Instant::now();
        if now >= until {
            return last;
        }
        // The end of an abandoned lease sends no notification.
        let mut pause = (*remaining).clamp(SHORTEST_PAUSE, POLL);
        if has_failed {
            // The failed claim may have been granted and is being released, so use a new token.
            let Ok(again) = context.with_new_token() else { return last };
            (context, pause) = (again, POLL);
        }
        tokio::select! {
            () = notifications.next() => {}
            () = sleep_until(until.min(now + pause)) => {}
        }
    }
}
