use std::time::Duration;

use ::http::header::CONTENT_TYPE;
use ::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message as _;

use super::details::{Any, Status, Violation};
use crate::http::{ResponseBody, STORE_RETRY, STORE_TEXT, annotate, insert_decision, respond_to};
use crate::key::Key;
use crate::rate_limit::{AnnotateResponse, Limit, LimitInfo, RateLimitHandle, RateLimited, Rejection, ceil_seconds};
use crate::responder::{HeaderConfig, HeaderVersion, NotExecuted, PartitionKeyMac, Responder, UpstreamFields};

/// Turns rejections into gRPC statuses. See the [module docs](crate::grpc). Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct GrpcResponder {
    pub(super) fields: HeaderConfig,
    retry_jitter: Duration,
}

#[derive(Clone, Copy)]
pub(super) enum Code {
    InvalidArgument = 3,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    Internal = 13,
    Unavailable = 14,
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// The ASCII characters that `grpc-message` must escape.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

impl GrpcResponder {
    /// Creates a responder with the newest header fields and exact waits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the versions of the rate-limit metadata; `[]` for none. Defaults to [`[HeaderVersion::Draft10]`](HeaderVersion::Draft10).
    #[must_use]
    pub fn headers(mut self, versions: impl IntoIterator<Item = HeaderVersion>) -> Self {
        self.fields.versions = versions.into_iter().collect();
        self
    }

    /// Sends the client its partition key: see [`HttpResponder::partition_secret`](crate::HttpResponder::partition_secret). Defaults to no
    /// partition key.
    ///
    /// # Panics
    ///
    /// If the secret has fewer than 16 bytes.
    #[must_use]
    pub fn partition_secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.fields.secret = Some(PartitionKeyMac::new(secret.as_ref()));
        self
    }

    /// Adds a random time of up to `max` to the waits in responses, so that clients that were rejected together do not retry together.
    /// Defaults to zero.
    #[must_use]
    pub const fn retry_jitter(mut self, max: Duration) -> Self {
        self.retry_jitter = max;
        self
    }

    /// Whether layers insert their handles and decisions into the extensions of requests and responses: see
    /// [`HttpResponder::extensions`](crate::HttpResponder::extensions). Defaults to true.
    #[must_use]
    pub const fn extensions(mut self, extensions: bool) -> Self {
        self.fields.no_extensions = !extensions;
        self
    }

    /// Sets the source of the rate-limit fields of a response: see [`HttpResponder::upstream_fields`](crate::HttpResponder::upstream_fields).
    /// Defaults to [`UpstreamFields::Replace`].
    #[must_use]
    pub const fn upstream_fields(mut self, fields: UpstreamFields) -> Self {
        self.fields.upstream = fields;
        self
    }

    /// The response of a layer with these settings to a call over its limit, with metadata and without [`NotExecuted`].
    ///
    /// For services that call a [`Limiter`](crate::Limiter): see [`HttpResponder::respond_to`](crate::HttpResponder::respond_to). A tonic
    /// method can return the status of this response:
    ///
    /// ```
    /// use tollgate::grpc::GrpcResponder;
    /// use tollgate::rate_limit::RateLimited;
    /// use tollgate::{BoxError, Limiter, MemoryBackend, Policy, Quota};
    /// use tonic::Status;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// let policy = Policy::new("log-in", Quota::per_minute(0).fixed_window());
    /// let limiter = Limiter::new(MemoryBackend::new(), policy);
    /// let decision = limiter.check("alice").await?;
    /// let limited = RateLimited::of(limiter.policy(), 1, decision).ok_or("not denied")?;
    /// let response = GrpcResponder::new().respond_to(&limited, "alice");
    /// let status = Status::from_header_map(response.headers()).ok_or("no status")?;
    /// assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    /// assert!(status.metadata().contains_key("ratelimit-policy"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn respond_to(&self, limited: &RateLimited, key: impl Into<Key>) -> Response<ResponseBody> {
        respond_to(self, limited, &key.into())
    }

    /// Adds jitter to a wait, so the result is never shorter.
    pub(super) fn with_jitter(&self, wait: Duration) -> Duration {
        let max = u64::try_from(self.retry_jitter.as_nanos()).unwrap_or(u64::MAX);
        wait.saturating_add(Duration::from_nanos(fastrand::u64(..=max)))
    }
}

impl<B, E> Responder<Rejection, Response<B>, E> for GrpcResponder {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            Rejection::Limited(limited) => {
                let wait = limited.retry_after().map(|wait| self.with_jitter(wait));
                let mut details: Vec<Any> = wait.map(Any::retry_info).into_iter().collect();
                let violations: Vec<Violation> = violations(&limited).collect();
                if !violations.is_empty() {
                    details.push(Any::quota_failure(violations));
                }
                let text = limited.text(wait.map(ceil_seconds));
                detailed(Code::ResourceExhausted, &text, wait, details)
            }
            Rejection::Denied(denied) => status_response(Code::PermissionDenied, &denied.to_string()),
            Rejection::MissingKey(missing) => status_response(Code::InvalidArgument, &missing.to_string()),
            Rejection::Store(_) => {
                let wait = self.with_jitter(STORE_RETRY);
                detailed(Code::Unavailable, STORE_TEXT, Some(wait), vec![Any::retry_info(wait)])
            }
        })
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        ResponseBody::of(response)
    }

    fn error(&self, error: E) -> E {
        error
    }
}

impl<ReqBody, B> AnnotateResponse<Request<ReqBody>, Response<B>> for GrpcResponder {
    fn attaches(&self) -> bool {
        !self.fields.no_extensions
    }

    fn attach(&self, handle: RateLimitHandle, request: &mut Request<ReqBody>) {
        request.extensions_mut().insert(handle);
    }

    fn pass(&self, request: &mut Request<ReqBody>) {
        if !self.fields.no_extensions {
            request.extensions_mut().remove::<RateLimitHandle>();
        }
    }

    fn annotates(&self) -> bool {
        self.fields.annotates()
    }

    fn annotate(&self, info: &LimitInfo<'_>, response: &mut Response<B>) {
        if let (false, Some(decision)) = (self.fields.no_extensions, info.decision) {
            insert_decision(decision, response.extensions_mut());
        }
        annotate(&self.fields, info, response);
    }
}

/// The violated limits.
fn violations(limited: &RateLimited) -> impl Iterator<Item = Violation> {
    limited.denials().flat_map(|denial| {
        denial.violated(limited.cost()).map(|(name, limit)| {
            let description = format!("{name}: {} in {}", limit.capacity(), period(limit));
            Violation { subject: denial.policy.name().to_owned(), description }
        })
    })
}

fn period(limit: &Limit) -> String {
    format!("{} s", limit.period().as_secs_f64())
}

/// A status with details and, for retry policies, a pushback with the wait.
pub(super) fn detailed<B>(
    code: Code,
    message: &str,
    wait: Option<Duration>,
    details: Vec<Any>,
) -> Response<ResponseBody<B>> {
    let mut response = status_response(code, message);
    let headers = response.headers_mut();
    let status = Status { code: code as i32, message: message.to_owned(), details };
    // Base64 is ASCII, so the conversion always succeeds.
    if let Ok(details) = HeaderValue::try_from(BASE64.encode(status.encode_to_vec())) {
        headers.insert(DETAILS, details);
    }
    // gRPC libraries read 32 bits, and treat a negative value as "do not retry". A longer wait becomes -1.
    let pushback = wait.and_then(|wait| i32::try_from(wait.as_nanos().div_ceil(1_000_000)).ok()).unwrap_or(-1);
    headers.insert(PUSHBACK, pushback.into());
    response
}

pub(super) fn status_response<B>(code: Code, message: &str) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::rejection(""));
    response.extensions_mut().insert(NotExecuted);
    *response.headers_mut() = trailers(code, message);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// A status that forbids automatic retries. Without the pushback, retry policies would retry codes such as `ABORTED`.
pub(super) fn without_retry<B>(code: Code, message: &str) -> Response<ResponseBody<B>> {
    let mut response = status_response(code, message);
    response.headers_mut().insert(PUSHBACK, (-1).into());
    response
}

/// The trailers with a status, also for a call whose response has begun.
pub(super) fn trailers(code: Code, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(GRPC_STATUS, HeaderValue::from(code as u16));
    // Percent-encoded text is ASCII, so the conversion always succeeds.
    if let Ok(message) = HeaderValue::try_from(utf8_percent_encode(message, ESCAPED).to_string()) {
        trailers.insert(GRPC_MESSAGE, message);
    }
    trailers
}
