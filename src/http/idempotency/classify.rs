//! Decides whether a response is stored: the rules of [`ResponsePolicy`]. Calls no store and reads no body.

use std::any::Any;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::response::Parts;
use ::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::error::{BoxError, causes};
use crate::http::lock::{AbortMarker, Cut};
use crate::http::responder::REJECTED;
use crate::idempotency::ResponsePolicy;
use crate::lock::PartialEffects;
use crate::responder::{NotExecuted, OutcomeUnknown};

/// The consequence of a response for its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// The response is stored, and replayed to retries.
    Store { is_success: bool },
    /// The operation is released, so that the next request is executed.
    Release,
    /// The outcome is unknown when the lease ends.
    Unknown,
}

/// The facts of a response, without its body, that decide about its [`Class`].
pub(super) struct ResponseClassifier {
    policy: ResponsePolicy,
    status: StatusCode,
    // The class that the response declares by its extensions or headers.
    declared: Option<Class>,
    // Of an inner layer. It may be set until the body has ended.
    abort_marker: Option<AbortMarker>,
    // Whether the same request probably gets the same status again.
    is_final: bool,
    is_grpc: bool,
    grpc: Option<GrpcStatus>,
}

impl ResponseClassifier {
    /// `is_not_here`: the response may come from a router that knows no such route.
    pub(super) fn new(policy: ResponsePolicy, parts: &Parts, is_not_here: bool) -> Self {
        let Parts { status, headers, extensions, .. } = parts;
        let content_type = headers.get(CONTENT_TYPE).map_or(b"".as_slice(), HeaderValue::as_bytes);
        let declared = if extensions.get::<OutcomeUnknown>().is_some() {
            Some(Class::Unknown)
        } else if extensions.get::<NotExecuted>().is_some() || headers.contains_key(&REJECTED) {
            // Extensions are not sent over a connection, but this field is.
            Some(Class::Release)
        } else {
            None
        };
        Self {
            policy,
            status: *status,
            declared,
            abort_marker: extensions.get().cloned(),
            is_final: !is_not_here && is_final(*status, headers),
            is_grpc: content_type.starts_with(b"application/grpc"),
            grpc: GrpcStatus::of(headers),
        }
    }

    pub(super) const fn status(&self) -> StatusCode {
        self.status
    }

    /// The class of the response. `is_whole`: its body has ended, and `trailers` are known.
    pub(super) fn classify(&self, trailers: &HeaderMap, is_whole: bool) -> Class {
        if let Some(declared) = self.declared() {
            return declared;
        }
        let grpc = self.grpc(trailers, is_whole);
        let is_success = self.status.is_success() && matches!(grpc, None | Some(GrpcStatus::Ok));
        let is_stored = match self.policy {
            ResponsePolicy::All => true,
            ResponsePolicy::Success => is_success,
            ResponsePolicy::SafeRetry => self.is_final && grpc != Some(GrpcStatus::Other),
        };
        if is_stored { Class::Store { is_success } } else { Class::Release }
    }

    /// Whether the response is stored, whatever its trailers are.
    pub(super) fn is_stored_anyway(&self) -> bool {
        let is_known = self.grpc.is_some() || !self.is_grpc || self.policy == ResponsePolicy::All;
        is_known && matches!(self.classify(&HeaderMap::new(), false), Class::Store { .. })
    }

    /// The class that the response or an inner layer declares.
    fn declared(&self) -> Option<Class> {
        let is_cut = |cut| self.abort_marker.as_ref().is_some_and(|marker| marker.is_made(cut));
        if is_cut(Cut::OutcomeUnknown) {
            return Some(Class::Unknown);
        }
        // An inner layer has released its own operation.
        self.declared.or_else(|| is_cut(Cut::GivenBack).then_some(Class::Release))
    }

    /// The gRPC status. A response that ended without one is an error for the client.
    fn grpc(&self, trailers: &HeaderMap, is_whole: bool) -> Option<GrpcStatus> {
        let told = self.grpc.or_else(|| GrpcStatus::of(trailers));
        told.or_else(|| (self.is_grpc && is_whole).then_some(GrpcStatus::Other))
    }
}

/// The statuses that [`ResponsePolicy::SafeRetry`] never stores, besides 5xx. They are temporary, or depend on the headers, the
/// credentials or the connection of the request, which may differ next time.
const NEVER_STORED: [StatusCode; 12] = [
    StatusCode::UNAUTHORIZED,
    StatusCode::FORBIDDEN,
    StatusCode::NOT_ACCEPTABLE,
    StatusCode::PROXY_AUTHENTICATION_REQUIRED,
    StatusCode::REQUEST_TIMEOUT,
    StatusCode::PRECONDITION_FAILED,
    StatusCode::UNSUPPORTED_MEDIA_TYPE,
    StatusCode::EXPECTATION_FAILED,
    StatusCode::MISDIRECTED_REQUEST,
    StatusCode::TOO_EARLY,
    StatusCode::PRECONDITION_REQUIRED,
    StatusCode::TOO_MANY_REQUESTS,
];

/// Whether [`ResponsePolicy::SafeRetry`] stores responses with this status and these headers.
fn is_final(status: StatusCode, headers: &HeaderMap) -> bool {
    let is_later = status.is_client_error() && headers.contains_key(RETRY_AFTER);
    !status.is_server_error() && !is_later && !NEVER_STORED.contains(&status)
}

/// The gRPC status of a response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GrpcStatus {
    Ok,
    /// An error that the same request probably gets again.
    Final,
    /// It may differ next time, or is not a status of gRPC, which clients take for `UNKNOWN`.
    Other,
}

impl GrpcStatus {
    const NAME: HeaderName = HeaderName::from_static("grpc-status");

    fn of(headers: &HeaderMap) -> Option<Self> {
        Some(match headers.get(&Self::NAME)?.as_bytes() {
            b"0" => Self::Ok,
            // INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE
            b"3" | b"5" | b"6" | b"9" | b"11" => Self::Final,
            _ => Self::Other,
        })
    }
}

/// Whether a handler failed because its lock was lost while it ran. Only errors of the type [`BoxError`] can be inspected.
pub(super) fn has_lost_its_lock<E: 'static>(error: &E) -> bool {
    let error = (error as &dyn Any).downcast_ref::<BoxError>();
    error.is_some_and(|error| causes(&**error).any(<dyn std::error::Error>::is::<PartialEffects>))
}
