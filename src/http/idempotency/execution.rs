//! Executes an operation, from its handler to its record: [`classify`](super::classify) decides whether the response is stored,
//! [`stream`](super::stream) records it, and [`settle`](super::settle) stores the result.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::StatusCode;
use tokio::time::{Instant, sleep_until};

use super::fingerprint::{BodyFingerprint, BodyRejection, Rest};
use super::settings::{FOREVER, Settings};
use super::settle::{CompleteResponse, Outcome};
use crate::http::lock::Cut;
use crate::idempotency::{Attempt, HasPayload as _, OnUnknown, OperationContext, Rejection, Running};

/// A running operation.
pub(super) struct Execution {
    attempt: Attempt<BodyFingerprint>,
    running: Running,
    // The unread part of the body, if it has to match that of the previous attempt.
    rest: Option<Arc<dyn Rest>>,
    // Whether the request is known to have a route.
    has_route: bool,
    begun: Instant,
    // When `max_runtime` ends.
    until: Instant,
    // Resolves when the work has to stop. `None` at first, because work that is ready at once needs neither timers nor renewals.
    limits: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Execution {
    pub(super) fn new(
        attempt: Attempt<BodyFingerprint>,
        settings: &Settings,
        running: Running,
        rest: Option<Arc<dyn Rest>>,
        has_route: bool,
    ) -> Self {
        let attempt = if settings.keep.gives_failures_back() { attempt.gives_back_panics() } else { attempt };
        let begun = attempt.sent();
        let until = begun + settings.max_runtime.min(FOREVER);
        Self { attempt, running, rest, has_route, begun, until, limits: None }
    }

    pub(super) const fn context(&self) -> &Arc<OperationContext<BodyFingerprint>> {
        self.attempt.context()
    }

    pub(super) const fn begun(&self) -> Instant {
        self.begun
    }

    /// Call this when the client gets a part of the response. After that a panic does not release the operation.
    pub(super) fn answering(&self) {
        self.attempt.answering();
    }

    /// Releases the operation when this is dropped.
    pub(super) fn gives_back(&mut self) {
        self.attempt.gives_back();
    }

    /// Runs a part of the operation that is not a future.
    pub(super) fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.attempt.at_work(work)
    }

    /// Whether a "no such route" response may come from a router, so that no handler has run.
    pub(super) fn is_not_here(&self, status: StatusCode) -> bool {
        let is_touched = || self.context().body().is_touched();
        match status {
            StatusCode::NOT_FOUND => !self.has_route && !is_touched(),
            // The route may exist for other methods only.
            StatusCode::METHOD_NOT_ALLOWED => !is_touched(),
            _ => false,
        }
    }

    /// Whether another attempt may have started. After a stall, check this before any code of the handler runs.
    pub(super) fn is_lost(&self) -> bool {
        self.attempt.is_lost()
    }

    /// Polls `work` under the lease. `None` if it took too long, or another attempt may have started.
    pub(super) fn poll_under_lease<F: Future>(
        &mut self,
        work: Pin<&mut F>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<F::Output>> {
        if self.is_lost() || self.limits.as_mut().is_some_and(|limits| limits.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(None);
        }
        if let Poll::Ready(output) = self.attempt.at_work(|| work.poll(cx)) {
            // If the request body differs or is too large, discard the response of the handler.
            return Poll::Ready(self.context().body().unfit().is_none().then_some(output));
        }
        if self.limits.is_none() && self.limits.insert(self.limits()).as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        Poll::Pending
    }

    fn limits(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (context, kept, until) = (Arc::clone(self.context()), self.attempt.keep(), self.until);
        Box::pin(async move {
            tokio::select! {
                () = kept => {}
                () = context.body().until_it_is_unfit() => {}
                () = sleep_until(until) => {}
            }
        })
    }

    /// The rejection for a handler that was dropped while it ran. Its operation is left to the end of its lease, or released if
    /// its body differs from that of the previous attempt.
    pub(super) fn breaks_off(&mut self, settings: &Settings) -> (Rejection, Cut) {
        match self.context().body().unfit() {
            Some(BodyRejection::Differs) => {
                let may_begin_again = settings.on_unknown == OnUnknown::Retry || settings.keep.gives_failures_back();
                // Release it, so that retries of the right request need not wait for the end of this lease, after which they
                // might all be rejected. This attempt has stored no checkpoint, so none can mislead them.
                if may_begin_again {
                    self.gives_back();
                    return (Rejection::Mismatch, Cut::GivenBack);
                }
                (Rejection::Mismatch, Cut::OutcomeUnknown)
            }
            Some(BodyRejection::TooLarge) => (Rejection::TooLarge { has_begun: true }, Cut::OutcomeUnknown),
            None => {
                self.is_cancelled();
                (Rejection::Cancelled, Cut::OutcomeUnknown)
            }
        }
    }

    /// Logs the cancellation. The dropped operation is left to the end of its lease.
    fn is_cancelled(&self) {
        let context = self.context();
        let (layer, operation) = (context.layer(), context.operation());
        tracing::warn!(layer, %operation, "a handler was cancelled: its outcome is unknown when its lease has ended");
        self.attempt.mark_reported();
    }

    /// Records how long the handler ran, after it has ended or was dropped.
    pub(super) fn ended(&self, settings: &Settings) {
        settings.coordinator.meters().handled(self.begun);
    }

    /// Whether the request body must be compared further before the response is stored. A body that has broken off has no more to
    /// compare.
    pub(super) fn has_to_read_on(&self, outcome: &Outcome) -> bool {
        let reading = self.context().body();
        matches!(outcome, Outcome::Completed(_)) && !reading.is_known() && !reading.has_failed()
    }

    /// Compares the unread part of the body with that of the previous attempt, as far as that is known. Returns the outcome of
    /// the handler; `None` if the body differs.
    pub(super) async fn read_on(&mut self, outcome: Outcome, settings: &Settings) -> Option<Outcome> {
        if !self.has_to_read_on(&outcome) {
            return Some(outcome);
        }
        let reading = self.attempt.context().body();
        let is_same = match self.rest.as_mut().and_then(Arc::get_mut) {
            Some(rest) => tokio::select! {
                is_same = rest.is_same(reading, settings.pace()) => is_same,
                () = self.attempt.keep() => None,
            },
            // The handler still holds the body.
            None => None,
        };
        match (is_same, outcome) {
            (Some(false), _) => {
                reading.differs();
                None
            }
            // This may be a rejection of a different request, so do not store it for retries of the right one.
            (None, Outcome::Completed(CompleteResponse { is_success: false, .. })) => Some(Outcome::Failed),
            (_, outcome) => Some(outcome),
        }
    }

    /// Stores the result of the operation. The future is `None` if that needs no waiting.
    pub(super) fn settle(
        self,
        outcome: Outcome,
        settings: &Settings,
    ) -> (Running, Option<impl Future<Output = ()> + Send + use<>>) {
        (self.running, outcome.settle(self.attempt, settings))
    }
}
