//! Decides whether a response is stored: the rules of [`ResponsePolicy`]. Calls no store and reads no body.

use std::any::Any;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::response::Parts;
use ::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::error::{BoxError, causes};
use crate::http::lock::{AbortMarker, AbortOutcome};
use crate::http::not_executed::REJECTED;
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
    /// Nothing is stored or released. When the lease ends, the outcome is unknown.
    Unknown,
}

/// The facts of a response, without its body, that decide about its [`Class`].
pub(super) struct ResponseClassifier {
    policy: ResponsePolicy,
    status: StatusCode,
    // The class that the response declares by its extensions or headers.
    declared_by_response: Option<Class>,
    // An inner layer may set it until the body has ended.
    abort_marker: Option<AbortMarker>,
    // Whether the same request probably gets the same status again.
    is_final: bool,
    is_grpc: bool,
    grpc: Option<GrpcStatus>,
}

impl ResponseClassifier {
    /// `is_unrouted`: the response may come from a router that knows no such route.
    pub(super) fn new(policy: ResponsePolicy, parts: &Parts, is_unrouted: bool) -> Self {
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
            declared_by_response: declared,
            abort_marker: extensions.get().cloned(),
            is_final: !is_unrouted && is_final(*status, headers),
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

    /// Whether the response is stored, whatever its trailers are, unless an inner layer aborts it.
    pub(super) fn is_surely_stored(&self) -> bool {
        let is_known = self.grpc.is_some() || !self.is_grpc || self.policy == ResponsePolicy::All;
        is_known && matches!(self.classify(&HeaderMap::new(), false), Class::Store { .. })
    }

    /// The class that the response or an inner layer declares.
    fn declared(&self) -> Option<Class> {
        let is_aborted = |outcome| self.abort_marker.as_ref().is_some_and(|marker| marker.is_set(outcome));
        if is_aborted(AbortOutcome::OutcomeUnknown) {
            return Some(Class::Unknown);
        }
        // If an inner layer has released its own operation, this one is released, too.
        self.declared_by_response.or_else(|| is_aborted(AbortOutcome::Released).then_some(Class::Release))
    }

    /// The gRPC status. A response that ended without one is an error for the client.
    fn grpc(&self, trailers: &HeaderMap, is_whole: bool) -> Option<GrpcStatus> {
        let status = self.grpc.or_else(|| GrpcStatus::of(trailers));
        status.or_else(|| (self.is_grpc && is_whole).then_some(GrpcStatus::Other))
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

#[cfg(test)]
mod tests {
    use std::io;

    use ::http::Response;

    use super::*;

    const SUCCESS: Class = Class::Store { is_success: true };
    const STORE: Class = Class::Store { is_success: false };
    const RELEASE: Class = Class::Release;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        fields.iter().map(field).collect()
    }

    fn parts(status: u16, headers: &[(&'static str, &'static str)]) -> Parts {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        *response.headers_mut() = map(headers);
        response.into_parts().0
    }

    /// The classes of a whole response by `SafeRetry`, `All` and `Success`.
    fn classes(parts: &Parts, trailers: &HeaderMap) -> [Class; 3] {
        [ResponsePolicy::SafeRetry, ResponsePolicy::All, ResponsePolicy::Success]
            .map(|policy| ResponseClassifier::new(policy, parts, false).classify(trailers, true))
    }

    #[test]
    fn status_and_headers_decide_by_policy() {
        let later = ("retry-after", "1");
        let success = [SUCCESS, SUCCESS, SUCCESS];
        let error = [STORE, STORE, RELEASE];
        let temporary = [RELEASE, STORE, RELEASE];
        for (statuses, headers, expected) in [
            ([200, 201, 202, 204, 299].as_slice(), [].as_slice(), success),
            (&[200, 202], &[later], success),
            (&[200], &[("set-cookie", "a=b")], success),
            (&[101, 301, 303, 304, 307], &[], error),
            (&[301, 303], &[later], error),
            (&[400, 402, 404, 405, 409, 410, 411, 413, 414, 416, 418, 422, 423, 424, 426, 431, 451, 499], &[], error),
            (&[400], &[("set-cookie", "a=b")], error),
            (&[400, 404, 409, 413, 423], &[later], temporary),
            (&[401, 403, 406, 407, 408, 412, 415, 417, 421, 425, 428, 429], &[], temporary),
            (&[500, 501, 502, 503, 504, 511, 599], &[], temporary),
            (&[503], &[later], temporary),
        ] {
            for &status in statuses {
                let classes = classes(&parts(status, headers), &HeaderMap::new());
                assert_eq!(classes, expected, "{status} {headers:?}");
            }
        }
    }

    /// Regression: `SafeRetry` stored unknown and malformed statuses, which clients take for `UNKNOWN`.
    #[test]
    fn grpc_status_decides_in_headers_and_trailers() {
        for (codes, expected) in [
            (["0"].as_slice(), [SUCCESS, SUCCESS, SUCCESS]),
            (&["3", "5", "6", "9", "11"], [STORE, STORE, RELEASE]),
            (&["1", "2", "4", "7", "8", "10", "12", "13", "14", "15", "16"], [RELEASE, STORE, RELEASE]),
            (&["17", "99", "-1", "03", "00", "x", "", "5, 5", "NOT_FOUND"], [RELEASE, STORE, RELEASE]),
        ] {
            for &code in codes {
                let (kind, status) = (("content-type", "application/grpc+proto"), ("grpc-status", code));
                for (headers, trailers) in
                    [([kind, status].as_slice(), [].as_slice()), (&[kind], &[status]), (&[], &[status])]
                {
                    let classes = classes(&parts(200, headers), &map(trailers));
                    assert_eq!(classes, expected, "{code} {headers:?}");
                }
            }
        }
    }

    #[test]
    fn grpc_response_that_ends_without_a_status_is_an_error() {
        let parts = parts(200, &[("content-type", "application/grpc")]);
        assert_eq!(classes(&parts, &HeaderMap::new()), [RELEASE, STORE, RELEASE]);
    }

    #[test]
    fn rejection_releases_and_unknown_outcome_wins() {
        for status in [200, 404, 503] {
            assert_eq!(classes(&parts(status, &[("tollgate-rejected", "1")]), &HeaderMap::new()), [RELEASE; 3]);
            let mut parts = parts(status, &[]);
            parts.extensions.insert(NotExecuted);
            assert_eq!(classes(&parts, &HeaderMap::new()), [RELEASE; 3]);
            parts.extensions.insert(OutcomeUnknown);
            assert_eq!(classes(&parts, &HeaderMap::new()), [Class::Unknown; 3]);
        }
    }

    #[test]
    fn inner_layer_may_cut_off_a_response_until_its_end() {
        for (cut, expected) in [
            (AbortOutcome::OutcomeUnknown, [Class::Unknown; 3]),
            (AbortOutcome::Released, [RELEASE; 3]),
            (AbortOutcome::Completed, [SUCCESS; 3]),
        ] {
            let marker = AbortMarker::around(None);
            let mut parts = parts(200, &[]);
            parts.extensions.insert(marker.clone());
            let classifier = ResponseClassifier::new(ResponsePolicy::SafeRetry, &parts, false);
            assert!(classifier.is_surely_stored());
            marker.set(cut);
            assert_eq!(classifier.classify(&HeaderMap::new(), true), expected[0], "{cut:?}");
            assert_eq!(classes(&parts, &HeaderMap::new()), expected, "{cut:?}");
        }
    }

    #[test]
    fn response_of_a_router_is_stored_by_all_only() {
        for (policy, expected) in
            [(ResponsePolicy::SafeRetry, RELEASE), (ResponsePolicy::All, STORE), (ResponsePolicy::Success, RELEASE)]
        {
            let classifier = ResponseClassifier::new(policy, &parts(404, &[]), true);
            assert_eq!(classifier.classify(&HeaderMap::new(), true), expected, "{policy:?}");
        }
    }

    #[test]
    fn response_is_surely_stored_if_trailers_cannot_change_that() {
        let (grpc, ok, other) = (("content-type", "application/grpc"), ("grpc-status", "0"), ("grpc-status", "99"));
        for (status, headers, expected) in [
            (200, [].as_slice(), [true, true, true]),
            (404, &[], [true, true, false]),
            (503, &[], [false, true, false]),
            // The status comes with the trailers.
            (200, &[grpc], [false, true, false]),
            (200, &[grpc, ok], [true, true, true]),
            (200, &[grpc, other], [false, true, false]),
            (200, &[("tollgate-rejected", "1")], [false, false, false]),
        ] {
            let parts = parts(status, headers);
            let sure = [ResponsePolicy::SafeRetry, ResponsePolicy::All, ResponsePolicy::Success]
                .map(|policy| ResponseClassifier::new(policy, &parts, false).is_surely_stored());
            assert_eq!(sure, expected, "{status} {headers:?}");
        }
    }

    #[test]
    fn lost_lock_is_found_in_boxed_errors_only() {
        let lost = || io::Error::other(PartialEffects);
        assert!(has_lost_its_lock(&BoxError::from(lost())));
        assert!(!has_lost_its_lock(&lost()));
        assert!(!has_lost_its_lock(&BoxError::from(io::Error::other("failed"))));
    }
}
