//! Reports the outcome of a handler to the store.

use std::future::Future;
use std::sync::Arc;

use ::http::StatusCode;

use super::fingerprint::RunningFingerprint;
use super::recorded_response::status_only;
use super::settings::Settings;
use crate::idempotency::store::Completion;
use crate::idempotency::{Attempt, HasBodyFingerprint as _, Settlement};

/// The outcome of a handler.
pub(super) enum Outcome {
    /// No response, or a response that may belong to a different request.
    Failed,
    /// A response or an error after which the effects are unknown.
    Unknown,
    /// A response that releases the operation.
    Released,
    /// A response that completes the operation.
    Completed(CompleteResponse),
}

/// A response that completes its operation.
pub(super) struct CompleteResponse {
    pub(super) status: StatusCode,
    pub(super) is_success: bool,
    /// The stored form.
    pub(super) response: Arc<[u8]>,
    /// Whether all of it is stored, or only its status.
    pub(super) is_kept: bool,
}

impl CompleteResponse {
    /// Whether the response may be stored for the part of the request body that was read. If the body failed, the client should retry with
    /// the whole body, so an error response is not stored then. Then a success is not stored either if the body may differ from that of the
    /// previous attempt.
    fn is_storable(&self, fingerprint: &RunningFingerprint) -> bool {
        !fingerprint.has_failed() || (self.is_success && fingerprint.is_confirmed())
    }
}

impl Outcome {
    /// Stores the result of the operation, or lets its lease expire. `None` if that needs no waiting.
    pub(super) fn settle(
        self,
        attempt: Attempt<RunningFingerprint>,
        settings: &Settings,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        let context = attempt.context();
        let (fingerprint, layer, operation) = (context.body(), context.layer(), context.operation());
        let releases_failures = settings.policy.releases_failures();
        let settlement = match self {
            Self::Completed(response) if response.is_storable(fingerprint) => {
                let CompleteResponse { status, response, is_kept, .. } = response;
                let (body_fingerprint, retention) = (fingerprint.body_fingerprint(), settings.retention);
                let completion = Completion { response, is_kept, body_fingerprint, retention };
                Settlement::Complete { completion, mark: status_only(status) }
            }
            Self::Released => Settlement::Release,
            Self::Completed(_) | Self::Failed if releases_failures => Settlement::Release,
            Self::Completed(_) => {
                tracing::warn!(
                    layer, %operation,
                    "a request broke off before its handler had all of it: its outcome is unknown when its lease has ended"
                );
                attempt.mark_reported();
                return None;
            }
            Self::Unknown => {
                tracing::warn!(
                    layer, %operation,
                    "a handler reported an unknown outcome or lost its lock: its outcome is unknown when its lease has ended"
                );
                attempt.mark_reported();
                return None;
            }
            // The dropped attempt logs this.
            Self::Failed => return None,
        };
        attempt.settle(settlement)
    }
}
