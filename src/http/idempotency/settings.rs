//! The settings of a layer, which its services share.

use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::http::{HeaderName, Method, Request};

use super::fingerprint::{CompareTimeouts, Fingerprints};
use crate::error::{ConfigError, StoreError};
use crate::idempotency::{
    Coordinator, IdempotencyHandle, MaxRunning, OnDisconnect, OnUnknown, Rejection, ResponsePolicy, Verdict,
};
use crate::on_failure::{OnMissingKey, OnStoreError};
use crate::responder::Responder;
use crate::store::circuit::OutageTracker;

/// Practically unlimited.
pub(super) const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// The settings that do not depend on the types of requests and responses.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) coordinator: Arc<Coordinator>,
    pub(super) fingerprints: Fingerprints,
    pub(super) header: HeaderName,
    pub(super) headers: Arc<[HeaderName]>,
    pub(super) methods: Arc<[Method]>,
    pub(super) lease: Duration,
    pub(super) retention: Duration,
    pub(super) wait: Duration,
    pub(super) max_waiting: usize,
    pub(super) max_runtime: Duration,
    pub(super) max_running: usize,
    // `None` is half of `max_running`.
    pub(super) max_running_per_scope: Option<usize>,
    pub(super) max_records_per_scope: u64,
    pub(super) max_response: usize,
    pub(super) max_body: u64,
    pub(super) body_timeout: Duration,
    pub(super) keeps_cookies: bool,
    pub(super) policy: ResponsePolicy,
    pub(super) on_missing_key: OnMissingKey,
    pub(super) on_unknown: OnUnknown,
    pub(super) on_store_error: OnStoreError,
    pub(super) on_disconnect: OnDisconnect,
    // Whether the log has reported that requests pass without a record.
    pub(super) unprotected: Arc<OutageTracker>,
    // Whether `methods` was called, or the log has reported a request whose method is not handled.
    pub(super) methods_are_known: Arc<AtomicBool>,
}

/// The shared state of all clones of a service.
pub(super) struct Shared<K, A> {
    pub(super) settings: Arc<Settings>,
    pub(super) scope: Arc<K>,
    pub(super) responder: A,
}

impl Settings {
    pub(super) fn max_running_attempts(&self) -> MaxRunning {
        let half = (self.max_running / 2).max(1);
        MaxRunning { in_total: self.max_running, per_scope: self.max_running_per_scope.unwrap_or(half) }
    }

    /// The timeouts for comparing a request body with that of the previous attempt. In total, the comparison may take `max_runtime`.
    pub(super) fn compare_timeouts(&self) -> CompareTimeouts {
        CompareTimeouts { stall: self.body_timeout.min(FOREVER), total: self.max_runtime.min(FOREVER) }
    }

    /// Checks that neither the deadline nor `max_runtime` is zero.
    pub(super) fn check_times(&self) -> Result<(), ConfigError> {
        self.coordinator.check_times(Some(self.max_runtime))
    }

    /// Whether a request is served without a record after this error. If so, the first error of an outage is logged.
    pub(super) fn passes(&self, error: &StoreError) -> bool {
        if self.on_store_error == OnStoreError::Deny {
            return false;
        }
        if self.unprotected.record_failure() {
            let cause = error.source().map(tracing::field::display);
            tracing::warn!(layer = &*self.coordinator.options().name, %error, cause, "idempotency store fails: requests are served without a record");
        }
        true
    }

    /// For a request whose method is not handled. Logs the first one with a key, unless its method is safe or `methods` was called.
    pub(super) fn passed<B>(&self, request: &Request<B>) {
        let (method, headers) = (request.method(), request.headers());
        if method.is_safe() || self.methods_are_known.load(Ordering::Relaxed) || !headers.contains_key(&self.header) {
            return;
        }
        // An outer layer records this request.
        if request.extensions().get::<IdempotencyHandle>().is_some() {
            return;
        }
        if !self.methods_are_known.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                layer = &*self.coordinator.options().name, %method,
                "a request with an idempotency key is served without a record: only POST and PATCH have records by \
                 default; name all methods with `IdempotencyLayer::methods`, which also stops this warning"
            );
        }
    }

    pub(super) fn answered(&self) {
        if self.unprotected.record_success() {
            let layer = &*self.coordinator.options().name;
            tracing::info!(layer, "idempotency store answers again: requests are served once");
        }
    }

    /// Rejects a request, and counts it.
    pub(super) fn reject<A: Responder<Rejection, Res, E>, Res, E>(
        &self,
        responder: &A,
        rejection: Rejection,
    ) -> Result<A::Response, A::Error> {
        self.coordinator.metrics().decided(Verdict::of(&rejection));
        responder.reject(rejection)
    }

    pub(super) fn describe<K>(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("scope", &std::any::type_name::<K>())
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .field("deadline", &self.coordinator.options().deadline)
            .field("response_policy", &self.policy)
            .field("on_missing_key", &self.on_missing_key)
            .field("on_unknown", &self.on_unknown)
            .field("on_store_error", &self.on_store_error)
            .field("on_disconnect", &self.on_disconnect)
            .finish_non_exhaustive()
    }
}
