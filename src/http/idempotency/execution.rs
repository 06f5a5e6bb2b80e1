//! Executes an operation, from its handler to its record: [`classify`](super::classify) decides whether the response is stored,
//! [`stream`](super::stream) records it, and [`settle`](super::settle) stores the result.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::StatusCode;
use tokio::time::{Instant, sleep_until};

use super::fingerprint::{BodyRejection, RunningFingerprint, UnreadBody};
use super::settings::{FOREVER, Settings};
use super::settle::{CompleteResponse, Outcome};
use crate::http::lock::AbortOutcome;
use crate::idempotency::{Attempt, CountGuard, HasBodyFingerprint as _, OnUnknown, OperationContext, Rejection};

/// A running operation.
pub(super) struct Execution {
    attempt: Attempt<RunningFingerprint>,
    running: CountGuard,
    // The unread part of the body, if it must match that of the previous attempt.
    unread: Option<Arc<dyn UnreadBody>>,
    // Whether the request is known to have a route.
    has_route: bool,
    start: Instant,
    // When `max_runtime` ends.
    until: Instant,
    // Resolves when the work must stop. `None` at first, because work that completes immediately needs neither timers nor renewals.
    stop: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Execution {
    pub(super) fn new(
        attempt: Attempt<RunningFingerprint>,
        settings: &Settings,
        running: CountGuard,
        unread: Option<Arc<dyn UnreadBody>>,
        has_route: bool,
    ) -> Self {
        let attempt = if settings.policy.releases_failures() { attempt.release_on_panic() } else { attempt };
        let start = attempt.sent();
        let until = start + settings.max_runtime.min(FOREVER);
        Self { attempt, running, unread, has_route, start, until, stop: None }
    }

    pub(super) const fn context(&self) -> &Arc<OperationContext<RunningFingerprint>> {
        self.attempt.context()
    }

    pub(super) const fn start(&self) -> Instant {
        self.start
    }

    /// Call this when a part of the response is sent. After that, a panic does not release the operation.
    pub(super) fn mark_responding(&self) {
        self.attempt.mark_responding();
    }

    /// Releases the operation when this is dropped.
    pub(super) fn release_on_drop(&mut self) {
        self.attempt.release_on_drop();
    }

    /// Runs synchronous code of the operation.
    pub(super) fn run_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.attempt.run_work(work)
    }

    /// Whether a "no such route" response may come from a router, so that no handler has run.
    pub(super) fn is_unrouted(&self, status: StatusCode) -> bool {
        let is_polled = || self.context().body().is_polled();
        match status {
            StatusCode::NOT_FOUND => !self.has_route && !is_polled(),
            // The route may exist for other methods only.
            StatusCode::METHOD_NOT_ALLOWED => !is_polled(),
            _ => false,
        }
    }

    /// Whether another attempt may have started. After a stall, check this before any code of the handler runs.
    pub(super) fn is_lost(&self) -> bool {
        self.attempt.is_lost()
    }

    /// Polls `work` under the lease. `None` if `work` took too long, another attempt may have started, or the request body was rejected.
    pub(super) fn poll_under_lease<F: Future>(
        &mut self,
        work: Pin<&mut F>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<F::Output>> {
        if self.is_lost() || self.stop.as_mut().is_some_and(|stop| stop.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(None);
        }
        if let Poll::Ready(output) = self.attempt.run_work(|| work.poll(cx)) {
            // If the request body differs or is too large, discard the response of the handler.
            return Poll::Ready(self.context().body().rejection().is_none().then_some(output));
        }
        if self.stop.is_none() && self.stop.insert(self.until_stop()).as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        Poll::Pending
    }

    fn until_stop(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (context, lost, until) = (Arc::clone(self.context()), self.attempt.renew_until_lost(), self.until);
        Box::pin(async move {
            tokio::select! {
                () = lost => {}
                () = context.body().until_rejected() => {}
                () = sleep_until(until) => {}
            }
        })
    }

    /// The rejection after the running handler was dropped. If the body differs from that of the previous attempt, the operation is
    /// released, except with `ResponsePolicy::All` and `OnUnknown::Reject`. Otherwise the lease of the operation expires.
    pub(super) fn abort(&mut self, settings: &Settings) -> (Rejection, AbortOutcome) {
        match self.context().body().rejection() {
            Some(BodyRejection::Differs) => {
                let may_retry = settings.on_unknown == OnUnknown::Retry || settings.policy.releases_failures();
                // Release it, so that retries of the right request need not wait for the end of this lease. This attempt has stored no
                // checkpoint that could mislead them.
                if may_retry {
                    self.release_on_drop();
                    return (Rejection::Mismatch, AbortOutcome::Released);
                }
                (Rejection::Mismatch, AbortOutcome::OutcomeUnknown)
            }
            Some(BodyRejection::TooLarge) => (Rejection::TooLarge { has_begun: true }, AbortOutcome::OutcomeUnknown),
            None => {
                self.log_cancelled();
                (Rejection::Cancelled, AbortOutcome::OutcomeUnknown)
            }
        }
    }

    fn log_cancelled(&self) {
        let context = self.context();
        let (layer, operation) = (context.layer(), context.operation());
        tracing::warn!(layer, %operation, "a handler was cancelled: its outcome is unknown when its lease has ended");
        self.attempt.mark_reported();
    }

    /// Records how long the handler ran, after it has returned or was dropped.
    pub(super) fn record_handler_time(&self, settings: &Settings) {
        settings.coordinator.metrics().handled(self.start);
    }

    /// Whether the unread part of the request body must be compared before the response is stored. A body that failed has no more parts.
    pub(super) fn must_compare_rest(&self, outcome: &Outcome) -> bool {
        let fingerprint = self.context().body();
        matches!(outcome, Outcome::Completed(_)) && !fingerprint.is_confirmed() && !fingerprint.has_failed()
    }

    /// Compares the unread part of the body with that of the previous attempt, as far as that attempt has read it. Returns the outcome of
    /// the handler; `None` if the body differs.
    pub(super) async fn compare_rest(&mut self, outcome: Outcome, settings: &Settings) -> Option<Outcome> {
        if !self.must_compare_rest(&outcome) {
            return Some(outcome);
        }
        let fingerprint = self.attempt.context().body();
        let is_same = match self.unread.as_mut().and_then(Arc::get_mut) {
            Some(unread) => tokio::select! {
                is_same = unread.is_same(fingerprint, settings.compare_timeouts()) => is_same,
                () = self.attempt.renew_until_lost() => None,
            },
            // The handler still holds the body.
            None => None,
        };
        match (is_same, outcome) {
            (Some(false), _) => {
                fingerprint.reject_as_different();
                None
            }
            // The error may be due to a different body, so do not store it for retries of the right request.
            (None, Outcome::Completed(CompleteResponse { is_success: false, .. })) => Some(Outcome::Failed),
            (_, outcome) => Some(outcome),
        }
    }

    /// Stores the result of the operation. The future is `None` if that needs no waiting.
    pub(super) fn settle(
        self,
        outcome: Outcome,
        settings: &Settings,
    ) -> (CountGuard, Option<impl Future<Output = ()> + Send + use<>>) {
        (self.running, outcome.settle(self.attempt, settings))
    }
}
