use std::convert::Infallible;
use std::time::Duration;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::{Extensions, HeaderMap, HeaderValue, Request, Response, StatusCode};

use bytes::Bytes;

use super::body::{Never, ResponseBody};
use super::headers::write_fields;
use super::problem::{Kind, Problem};
use super::upstream::annotate;
use crate::key::Key;
use crate::rate_limit::{
    AnnotateResponse, Decision, LimitInfo, Outcome, RateLimitHandle, RateLimited, Rejection, ceil_seconds,
};
use crate::responder::{HttpResponder, NotExecuted, RejectionBody, Responder};

/// The `Retry-After` of a store failure, whose end is not known.
pub(crate) const STORE_RETRY: Duration = Duration::from_secs(1);

/// The text of a store failure. The client must not see the details.
pub(crate) const STORE_TEXT: &str = "temporarily unavailable";

impl HttpResponder {
    pub(super) fn rate_limit_rejection(&self, rejection: &Rejection) -> Response<Bytes> {
        match rejection {
            Rejection::Limited(limited) => {
                let kind = match limited.decision().outcome() {
                    Outcome::Blocked => Kind::AbnormalUsageDetected,
                    _ => Kind::QuotaExceeded,
                };
                let retry_after = limited.retry_after().map(|wait| self.retry_after_secs(wait));
                let detail = &*limited.text(retry_after);
                let violated = limited.violated().collect();
                self.answer(retry_after, Problem { kind, status: StatusCode::TOO_MANY_REQUESTS, detail, violated })
            }
            Rejection::Denied(denied) => self.refusal(StatusCode::FORBIDDEN, &denied.to_string()),
            Rejection::MissingKey(missing) => self.refusal(StatusCode::BAD_REQUEST, &missing.to_string()),
            Rejection::Store(_) => {
                let (kind, status) = (Kind::TemporaryReducedCapacity, StatusCode::SERVICE_UNAVAILABLE);
                let problem = Problem { kind, status, detail: STORE_TEXT, violated: Vec::new() };
                self.answer(Some(self.retry_after_secs(STORE_RETRY)), problem)
            }
        }
    }
}

impl<ReqBody, B> AnnotateResponse<Request<ReqBody>, Response<B>> for HttpResponder {
    #[inline]
    fn attaches(&self) -> bool {
        !self.fields.no_extensions
    }

    #[inline]
    fn attach(&self, handle: RateLimitHandle, request: &mut Request<ReqBody>) {
        request.extensions_mut().insert(handle);
    }

    #[inline]
    fn pass(&self, request: &mut Request<ReqBody>) {
        if !self.fields.no_extensions {
            request.extensions_mut().remove::<RateLimitHandle>();
        }
    }

    #[inline]
    fn annotates(&self) -> bool {
        self.fields.annotates()
    }

    #[inline]
    fn annotate(&self, info: &LimitInfo<'_>, response: &mut Response<B>) {
        if let (false, Some(decision)) = (self.fields.no_extensions, info.decision) {
            insert_decision(decision, response.extensions_mut());
        }
        annotate(&self.fields, info, response);
    }
}

/// Inserts a decision for outer layers, unless an inner layer has inserted a stricter one.
pub(crate) fn insert_decision(decision: &Decision, extensions: &mut Extensions) {
    if let Some(before) = extensions.insert(decision.clone())
        && before.strictness() > decision.strictness()
    {
        extensions.insert(before);
    }
}

/// The response of a layer to a rejected request with this key. The handler may have had effects, so the response is not marked as
/// [`NotExecuted`].
pub(crate) fn respond_to<R>(responder: &R, limited: &RateLimited, key: &Key) -> Response<ResponseBody>
where
    R: Responder<Rejection, Response<Never>, Infallible, Response = Response<ResponseBody>, Error = Infallible>
        + AnnotateResponse<Request<()>, Response<ResponseBody>>,
{
    let Ok(mut response) = responder.reject(Rejection::Limited(limited.clone()));
    response.extensions_mut().remove::<NotExecuted>();
    if responder.annotates() {
        // Only the key of the first policy is known.
        let mut key = Some(key);
        for denial in limited.denials() {
            let info = LimitInfo { policy: &denial.policy, key: key.take(), decision: Some(&denial.decision) };
            responder.annotate(&info, &mut response);
        }
    }
    response
}

impl HttpResponder {
    /// The response of a layer with these settings to a request over its limit, with header fields and extensions.
    ///
    /// For handlers that call a [`Limiter`](crate::Limiter): see [`RateLimited::of`]. `key` is the key under the
    /// [policy](RateLimited::policy). The fields of other policies that denied the request have no partition key.
    ///
    /// The extension [`NotExecuted`] is missing, because the handler may have had effects. A handler without effects may insert it. Then an
    /// [`IdempotencyLayer`](super::IdempotencyLayer) with [`ResponsePolicy::All`](crate::idempotency::ResponsePolicy::All) does not store
    /// the response.
    #[must_use]
    pub fn respond_to(&self, limited: &RateLimited, key: impl Into<Key>) -> Response<ResponseBody> {
        respond_to(self, limited, &key.into())
    }

    /// Writes the rate-limit header fields, for your own [`Responder`].
    ///
    /// Appends to fields that are lists. A field with one value keeps the value of the tightest limit. For a response that may have the fields
    /// of an [upstream](Self::upstream_fields), call
    /// [`annotate`](crate::rate_limit::AnnotateResponse::annotate) instead.
    pub fn write_headers(&self, info: &LimitInfo<'_>, headers: &mut HeaderMap) {
        write_fields(&self.fields, info, headers);
    }

    /// The seconds of a wait, rounded up and with jitter, so never shorter than the wait.
    pub(super) fn retry_after_secs(&self, wait: Duration) -> u64 {
        ceil_seconds(wait).saturating_add(fastrand::u32(..=self.retry_jitter).into())
    }

    pub(super) fn refusal(&self, status: StatusCode, detail: &str) -> Response<Bytes> {
        self.answer(None, Problem { kind: Kind::Blank, status, detail, violated: Vec::new() })
    }

    pub(super) fn answer(&self, retry_after: Option<u64>, problem: Problem<'_>) -> Response<Bytes> {
        let (content_type, body) = match self.body {
            RejectionBody::Problem => ("application/problem+json", problem.to_json()),
            RejectionBody::PlainText => ("text/plain; charset=utf-8", format!("{}\n", problem.detail)),
        };
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = problem.status;
        response.extensions_mut().insert(NotExecuted);
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(seconds) = retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}
