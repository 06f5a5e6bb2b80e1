use std::convert::Infallible;
use std::time::Duration;

use ::http::header::{CONTENT_TYPE, RETRY_AFTER};
use ::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};

use super::body::{Never, ResponseBody};
use super::headers::write_fields;
use super::problem::{Kind, Problem};
use super::upstream::tell;
use crate::key::Key;
use crate::rate_limit::{
    AnnotateResponse, Decision, LimitInfo, Outcome, RateLimitHandle, RateLimited, Rejection, ceil_seconds,
};
use crate::responder::{HttpResponder, NotExecuted, RejectionBody, Responder};

/// What a client is told to wait when it is not known when the store will answer again.
pub(crate) const STORE_RETRY: Duration = Duration::from_secs(1);

/// The form of [`NotExecuted`] that passes a connection: on the rejections of locks and idempotency whose status does not say "not now".
pub(crate) const REJECTED: HeaderName = HeaderName::from_static("tollgate-rejected");
pub(crate) const IS_REJECTED: HeaderValue = HeaderValue::from_static("true");

/// All that a client hears of a store failure: what exactly is wrong is no business of the client.
pub(crate) const STORE_TEXT: &str = "temporarily unavailable";

impl<B, E> Responder<Rejection, Response<B>, E> for HttpResponder {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            Rejection::Limited(limited) => {
                let kind = match limited.decision().outcome() {
                    Outcome::Blocked => Kind::AbnormalUsageDetected,
                    _ => Kind::QuotaExceeded,
                };
                let retry_after = limited.retry_after().map(|wait| self.told(wait));
                let detail = &*limited.text(retry_after);
                let violated = limited.violated().collect();
                self.answer(retry_after, Problem { kind, status: StatusCode::TOO_MANY_REQUESTS, detail, violated })
            }
            Rejection::Denied(denied) => self.refusal(StatusCode::FORBIDDEN, &denied.to_string()),
            Rejection::MissingKey(missing) => self.refusal(StatusCode::BAD_REQUEST, &missing.to_string()),
            Rejection::Store(_) => {
                let (kind, status) = (Kind::TemporaryReducedCapacity, StatusCode::SERVICE_UNAVAILABLE);
                let problem = Problem { kind, status, detail: STORE_TEXT, violated: Vec::new() };
                self.answer(Some(self.told(STORE_RETRY)), problem)
            }
        })
    }

    #[inline]
    fn response(&self, response: Response<B>) -> Self::Response {
        ResponseBody::of(response)
    }

    fn error(&self, error: E) -> E {
        error
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
    fn announces(&self) -> bool {
        self.fields.are_announced()
    }

    #[inline]
    fn announce(&self, standing: &LimitInfo<'_>, response: &mut Response<B>) {
        if let (false, Some(decision)) = (self.fields.no_extensions, standing.decision) {
            leave(decision, response.extensions_mut());
        }
        tell(&self.fields, standing, response);
    }
}

/// Leaves a decision for layers further out, unless another one that restricts more is there already.
pub(crate) fn leave(decision: &Decision, extensions: &mut Extensions) {
    if let Some(before) = extensions.insert(decision.clone())
        && before.strictness() > decision.strictness()
    {
        extensions.insert(before);
    }
}

/// Both halves of what a layer answers to a request that counts for `key`, for a handler that may have done something by then.
pub(crate) fn answer_to<A>(answer: &A, limited: &RateLimited, key: &Key) -> Response<ResponseBody>
where
    A: Responder<Rejection, Response<Never>, Infallible, Response = Response<ResponseBody>, Error = Infallible>
        + AnnotateResponse<Request<()>, Response<ResponseBody>>,
{
    let Ok(mut response) = answer.reject(Rejection::Limited(limited.clone()));
    response.extensions_mut().remove::<NotExecuted>();
    if answer.announces() {
        // Whom the others count for is not known.
        let mut key = Some(key);
        for denial in limited.denials() {
            let standing = LimitInfo { policy: &denial.policy, key: key.take(), decision: Some(&denial.decision) };
            answer.announce(&standing, &mut response);
        }
    }
    response
}

impl HttpResponder {
    /// The whole answer of a layer that has these settings to a request over its limit, header fields and extensions included: for handlers
    /// that ask a [`Limiter`](crate::Limiter), see [`RateLimited::of`].
    ///
    /// `key` is whom the [policy](RateLimited::policy) counts. Other policies that have said no too are told without a partition key.
    ///
    /// [`NotExecuted`] alone is left out: what was done before is for the handler to say. One that has done nothing may add it to the extensions, so
    /// that an [`IdempotencyLayer`](super::IdempotencyLayer) with [`ResponsePolicy::All`](crate::idempotency::ResponsePolicy::All) does not keep the answer.
    #[must_use]
    pub fn answer_to(&self, limited: &RateLimited, key: impl Into<Key>) -> Response<ResponseBody> {
        answer_to(self, limited, &key.into())
    }

    /// Adds the header fields that tell how a request stands, for [answers](crate::responder::Responder) of one's own.
    ///
    /// Adds to whatever is there. For a response that may have the fields of an [upstream](Self::upstream_fields), call
    /// [`announce`](crate::rate_limit::AnnotateResponse::announce) instead.
    pub fn write_headers(&self, standing: &LimitInfo<'_>, headers: &mut HeaderMap) {
        write_fields(&self.fields, standing, headers);
    }

    /// A wait as it is told: rounded up and with jitter, so never shorter than it is.
    pub(super) fn told(&self, wait: Duration) -> u64 {
        ceil_seconds(wait).saturating_add(fastrand::u32(..=self.retry_jitter).into())
    }

    pub(super) fn refusal<B>(&self, status: StatusCode, detail: &str) -> Response<ResponseBody<B>> {
        self.answer(None, Problem { kind: Kind::Blank, status, detail, violated: Vec::new() })
    }

    pub(super) fn answer<B>(&self, retry_after: Option<u64>, problem: Problem<'_>) -> Response<ResponseBody<B>> {
        let (content_type, body) = match self.body {
            RejectionBody::Problem => ("application/problem+json", problem.to_json()),
            RejectionBody::PlainText => ("text/plain; charset=utf-8", format!("{}\n", problem.detail)),
        };
        let mut response = Response::new(ResponseBody::rejection(body));
        *response.status_mut() = problem.status;
        response.extensions_mut().insert(NotExecuted);
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(seconds) = retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        if problem.kind.is_ours() {
            headers.insert(REJECTED, IS_REJECTED);
        }
        response
    }
}
