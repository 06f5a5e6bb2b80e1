use std::time::Duration;

use ::http::header::CONTENT_TYPE;
use ::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message as _;

use super::details::{Any, Status, Violation};
use crate::http::{ResponseBody, STORE_RETRY, STORE_TEXT, answer_to, leave, tell};
use crate::key::Key;
use crate::rate_limit::{AnnotateResponse, Limit, LimitInfo, RateLimitHandle, RateLimited, Rejection, ceil_seconds};
use crate::responder::{HeaderConfig, HeaderVersion, NotExecuted, PartitionKeyMac, Responder, UpstreamFields};

/// A rejection becomes a gRPC status. See the [module docs](crate::grpc). Cheap to clone.
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

/// What `grpc-message` has to escape besides what is not ASCII.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

impl GrpcResponder {
    /// With the newest header fields and exact waits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Which metadata tells the client how its limits stand; `[]` for none. Defaults to
    /// [`[HeaderVersion::Draft10]`](HeaderVersion::Draft10).
    #[must_use]
    pub fn headers(mut self, versions: impl IntoIterator<Item = HeaderVersion>) -> Self {
        self.fields.versions = versions.into_iter().collect();
        self
    }

    /// Tells the client its partition key: see [`HttpResponder::partition_secret`](crate::HttpResponder::partition_secret).
    /// Defaults to not telling it.
    ///
    /// # Panics
    ///
    /// If the secret has fewer than 16 bytes.
    #[must_use]
    pub fn partition_secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.fields.secret = Some(PartitionKeyMac::new(secret.as_ref()));
        self
    }

    /// Adds a random time to the waits that are told, up to this one, so that clients who were turned away together do not
    /// come back together. Defaults to zero.
    #[must_use]
    pub const fn retry_jitter(mut self, most: Duration) -> Self {
        self.retry_jitter = most;
        self
    }

    /// Whether requests and responses carry in their extensions what layers know of them: see
    /// [`HttpResponder::extensions`](crate::HttpResponder::extensions). Defaults to true.
    #[must_use]
    pub const fn extensions(mut self, extensions: bool) -> Self {
        self.fields.no_extensions = !extensions;
        self
    }

    /// Whose rate-limit fields a response has: see [`HttpResponder::upstream_fields`](crate::HttpResponder::upstream_fields). Defaults to
    /// [`UpstreamFields::Replace`].
    #[must_use]
    pub const fn upstream_fields(mut self, fields: UpstreamFields) -> Self {
        self.fields.upstream = fields;
        self
    }

    /// The whole answer of a layer that has these settings to a call over its limit, metadata included, but for [`NotExecuted`]: for services
    /// that ask a [`Limiter`](crate::Limiter), see [`HttpResponder::answer_to`](crate::HttpResponder::answer_to). A method of tonic fails with the status in it:
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
    /// let limited = RateLimited::of(limiter.policy(), 1, decision).ok_or("a no")?;
    /// let answer = GrpcResponder::new().answer_to(&limited, "alice");
    /// let status = Status::from_header_map(answer.headers()).ok_or("a status")?;
    /// assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    /// assert!(status.metadata().contains_key("ratelimit-policy"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn answer_to(&self, limited: &RateLimited, key: impl Into<Key>) -> Response<ResponseBody> {
        answer_to(self, limited, &key.into())
    }

    /// A wait as it is told: with jitter, so never shorter than it is.
    pub(super) fn told(&self, wait: Duration) -> Duration {
        let most = u64::try_from(self.retry_jitter.as_nanos()).unwrap_or(u64::MAX);
        wait.saturating_add(Duration::from_nanos(fastrand::u64(..=most)))
    }
}

impl<B, E> Responder<Rejection, Response<B>, E> for GrpcResponder {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            Rejection::Limited(limited) => {
                let wait = limited.retry_after().map(|wait| self.told(wait));
                let mut details: Vec<Any> = wait.map(Any::retry_info).into_iter().collect();
                let violations: Vec<Violation> = violations(&limited).collect();
                if !violations.is_empty() {
                    details.push(Any::quota_failure(violations));
                }
                let text = limited.text(wait.map(ceil_seconds));
                detailed(Code::ResourceExhausted, &text, wait, details)
            }
            Rejection::Denied(denied) => answer(Code::PermissionDenied, &denied.to_string()),
            Rejection::MissingKey(missing) => answer(Code::InvalidArgument, &missing.to_string()),
            Rejection::Store(_) => {
                let wait = self.told(STORE_RETRY);
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

    fn announces(&self) -> bool {
        self.fields.are_announced()
    }

    fn announce(&self, standing: &LimitInfo<'_>, response: &mut Response<B>) {
        if let (false, Some(decision)) = (self.fields.no_extensions, standing.decision) {
            leave(decision, response.extensions_mut());
        }
        tell(&self.fields, standing, response);
    }
}

/// The limits that stand in the way.
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

/// A status that a client can act upon: it has the wait once more where retry policies look for it.
pub(super) fn detailed<B>(
    code: Code,
    message: &str,
    wait: Option<Duration>,
    details: Vec<Any>,
) -> Response<ResponseBody<B>> {
    let mut response = answer(code, message);
    let headers = response.headers_mut();
    let status = Status { code: code as i32, message: message.to_owned(), details };
    // Base64 is ASCII, so this always is a value.
    if let Ok(details) = HeaderValue::try_from(BASE64.encode(status.encode_to_vec())) {
        headers.insert(DETAILS, details);
    }
    // Libraries read 32 bits, and take what is negative for "do not retry".
    let pushback = wait.and_then(|wait| i32::try_from(wait.as_nanos().div_ceil(1_000_000)).ok()).unwrap_or(-1);
    headers.insert(PUSHBACK, pushback.into());
    response
}

pub(super) fn answer<B>(code: Code, message: &str) -> Response<ResponseBody<B>> {
    let mut response = Response::new(ResponseBody::rejection(""));
    response.extensions_mut().insert(NotExecuted);
    *response.headers_mut() = trailers(code, message);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// A status of a call that is not to be sent again as it is: retry policies take `ABORTED`, for one, for a reason to do so.
pub(super) fn conclusive<B>(code: Code, message: &str) -> Response<ResponseBody<B>> {
    let mut response = answer(code, message);
    response.headers_mut().insert(PUSHBACK, (-1).into());
    response
}

/// A status as it ends a call whose answer has begun.
pub(super) fn trailers(code: Code, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(GRPC_STATUS, HeaderValue::from(code as u16));
    // Percent-encoded text is ASCII, so this always is a value.
    if let Ok(message) = HeaderValue::try_from(utf8_percent_encode(message, ESCAPED).to_string()) {
        trailers.insert(GRPC_MESSAGE, message);
    }
    trailers
}
