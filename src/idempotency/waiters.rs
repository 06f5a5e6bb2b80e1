use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::attempt::{Attempt, Begin};
use super::context::OperationContext;
use super::has_payload::HasPayload;
use super::store::Begun;
use crate::error::StoreError;
use crate::store::notifications::Notifications;

/// How often a waiter polls, with or without notifications.
const POLL: Duration = Duration::from_secs(1);
/// A lease near its end is probably about to be renewed.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);

impl<P: HasPayload + 'static> OperationContext<P> {
    /// Begins the operation, or waits for its attempt in flight unless too many requests wait. `begun` is the store's first
    /// reply.
    pub(crate) async fn begin_or_wait(
        self: &Arc<Self>,
        begun: Option<Result<Begin<P>, StoreError>>,
        max_wait: Duration,
        max_waiting: usize,
    ) -> Result<Begin<P>, StoreError> {
        let begun = match begun {
            Some(begun) => begun?,
            None => Attempt::begin(self).await?,
        };
        if max_wait.is_zero() || !matches!(begun, Begin::Not(Begun::InFlight { .. })) {
            return Ok(begun);
        }
        let coordinator = self.coordinator();
        let Some(_place) = coordinator.register_waiter(self.bounded_scope(), max_waiting) else { return Ok(begun) };
        let start = Instant::now();
        let begun = Box::pin(wait(Arc::clone(self), begun, start + max_wait)).await;
        coordinator.meters().waited(start.elapsed());
        Ok(begun)
    }
}

/// Begins the operation once the attempt in flight ends. `known` is the last reply: it stays valid if the store fails, so no
/// request passes for that.
async fn wait<P: HasPayload + 'static>(
    mut context: Arc<OperationContext<P>>,
    mut known: Begin<P>,
    until: Instant,
) -> Begin<P> {
    // An end before the subscription is found by another call.
    let watch = timeout_at(until.min(Instant::now() + POLL), context.watch());
    let mut wakeups = watch.await.unwrap_or_else(|_| Notifications::none());
    loop {
        let begun = Attempt::begin(&context).await;
        let has_failed = begun.is_err();
        known = begun.unwrap_or(known);
        let Begin::Not(Begun::InFlight { remaining, .. }) = &known else { return known };
        let now = Instant::now();
        if now >= until {
            return known;
        }
        // The end of an abandoned lease sends no notification.
        let mut pause = (*remaining).clamp(SHORTEST_PAUSE, POLL);
        if has_failed {
            // A claim that may have been granted is released: use a new one.
            let Ok(again) = context.anew() else { return known };
            (context, pause) = (again, POLL);
        }
        tokio::select! {
            () = wakeups.next() => {}
            () = sleep_until(until.min(now + pause)) => {}
        }
    }
}
