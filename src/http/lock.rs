use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::body::ResponseBody;
use super::not_executed::declare_rejection;
use super::problem::{Kind, Problem};
use super::responder::{STORE_RETRY, STORE_TEXT};
use crate::error::BoxError;
use crate::lock::{BindLease, LeaseGuard, LeaseHandle, LockError, Rejection, fencing};
use crate::responder::{BusyStatus, HttpResponder};

/// The maximum `Retry-After` of a busy lock, however long the lease may last: most leases are released much sooner.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(5);

/// The header field for the [fence](crate::Lease::fence) of the lock that the sender of a request holds.
pub const LOCK_FENCE: HeaderName = HeaderName::from_static("lock-fence");

/// The fence in the field [`LOCK_FENCE`], for a [`FenceLayer`](fencing::FenceLayer). `None` if the field is missing, repeated or not a
/// number.
pub fn lock_fence<B>(request: &Request<B>) -> Option<u64> {
    let mut fences = request.headers().get_all(LOCK_FENCE).iter();
    let fence = fences.next()?.to_str().ok()?;
    // `parse` would accept a sign.
    let is_number = fences.next().is_none() && fence.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| fence.parse().ok())?
}

impl HttpResponder {
    pub(super) fn fence_rejection(&self, rejection: &fencing::Rejection) -> Response<Bytes> {
        let mut response = match rejection {
            fencing::Rejection::Stale(_) => {
                self.refusal(StatusCode::PRECONDITION_FAILED, "another client holds the lock of this request now")
            }
            fencing::Rejection::MissingKey(_) | fencing::Rejection::MissingFence(_) => {
                self.refusal(StatusCode::BAD_REQUEST, "the request names no lock or fence")
            }
        };
        declare_rejection(&mut response, false);
        response
    }

    pub(super) fn lock_rejection(&self, rejection: &Rejection) -> Response<Bytes> {
        let mut response = match rejection {
            Rejection::MissingKey(missing) => self.refusal(StatusCode::BAD_REQUEST, &missing.to_string()),
            Rejection::Lock(LockError::Busy(busy)) => {
                let status = match self.busy {
                    BusyStatus::Conflict => StatusCode::CONFLICT,
                    BusyStatus::Locked => StatusCode::LOCKED,
                    BusyStatus::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
                };
                let wait = self.retry_after_secs(busy.retry_after().min(MAX_RETRY_AFTER));
                // The key and the holder are not for the client to see.
                let detail = &format!("the lock is in use, try again in {wait} s");
                self.answer(Some(wait), Problem { kind: Kind::LockBusy, status, detail, violated: Vec::new() })
            }
            Rejection::Full(full) => self.retry_later(Kind::Blank, &full.to_string()),
            Rejection::Lock(LockError::QueueFull(_)) => {
                self.retry_later(Kind::LockQueueFull, "too many requests wait for the lock")
            }
            Rejection::Lock(LockError::Lost(_)) => {
                // The request may have had effects, so the response has no `Retry-After`.
                let (kind, status) = (Kind::LockLost, StatusCode::SERVICE_UNAVAILABLE);
                let detail = "the request was cancelled while it ran and may have had effects";
                self.answer(None, Problem { kind, status, detail, violated: Vec::new() })
            }
            Rejection::Lock(LockError::Store(_) | LockError::NotReplicated(_) | LockError::Closed(_)) => {
                self.retry_later(Kind::LockUnavailable, STORE_TEXT)
            }
            // Errors in the program or its configuration.
            Rejection::Lock(error) => {
                tracing::error!(%error, "cannot acquire the lock of a request");
                self.refusal(StatusCode::INTERNAL_SERVER_ERROR, "the request cannot be served")
            }
        };
        declare_rejection(&mut response, matches!(rejection, Rejection::Lock(LockError::Lost(_))));
        response
    }

    fn retry_later(&self, kind: Kind, detail: &str) -> Response<Bytes> {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        self.answer(Some(self.retry_after_secs(STORE_RETRY)), Problem { kind, status, detail, violated: Vec::new() })
    }
}

impl<ReqBody, B> BindLease<Request<ReqBody>, Response<LockedBody<B>>> for HttpResponder
where
    B: Body<Data = Bytes>,
{
    fn is_safe(&self, request: &Request<ReqBody>) -> bool {
        matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE)
    }

    fn attach(&self, lease: LeaseHandle, request: &mut Request<ReqBody>) {
        if !self.fields.no_extensions {
            request.extensions_mut().insert(lease);
        }
    }

    fn pass(&self, request: &mut Request<ReqBody>) {
        if !self.fields.no_extensions {
            request.extensions_mut().remove::<LeaseHandle>();
        }
    }

    fn bind(&self, guard: LeaseGuard, response: &mut Response<LockedBody<B>>) {
        LockedBody::bind(response, guard, None);
    }
}

pin_project! {
    /// The body of a response from a [`LockLayer`](crate::lock::LockLayer).
    ///
    /// It holds the lock until it ends, fails or is dropped. If the lease is lost before that, the body fails with
    /// [`Lost`](crate::lock::Lost), or ends with a gRPC status.
    #[derive(Debug)]
    pub struct LockedBody<B> {
        #[pin]
        body: ResponseBody<B>,
        guard: Option<LeaseGuard>,
        // The trailers that end the body if the lease is lost. Without them the body fails.
        on_loss: Option<fn() -> HeaderMap>,
        // Records the loss of the lease for outer layers.
        abort_marker: Option<AbortMarker>,
        is_finished: bool,
    }
}

impl<B> LockedBody<B> {
    pub(crate) const fn new(body: ResponseBody<B>) -> Self {
        Self { body, guard: None, on_loss: None, abort_marker: None, is_finished: false }
    }
}

impl<B: Body<Data = Bytes>> LockedBody<B> {
    /// Keeps `guard` until the body ends. `on_loss` makes the trailers for a lost lease.
    pub(crate) fn bind(response: &mut Response<Self>, guard: LeaseGuard, on_loss: Option<fn() -> HeaderMap>) {
        if response.body().body.is_end_stream() {
            return;
        }
        let abort_marker = AbortMarker::around(response.extensions_mut().remove());
        response.extensions_mut().insert(abort_marker.clone());
        let body = response.body_mut();
        (body.guard, body.on_loss, body.abort_marker) = (Some(guard), on_loss, Some(abort_marker));
    }
}

/// In the extensions of a response: whether its handler was aborted, and with which outcome. The handler may be aborted after the response
/// has begun, so read the marker when the body has ended.
#[derive(Clone, Debug)]
pub(crate) struct AbortMarker(Arc<MarkerState>);

/// The outcome of an aborted handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbortOutcome {
    OutcomeUnknown,
    /// The request body differs from that of the previous attempt, so the operation was released.
    Released,
    /// The operation was recorded as done before its handler was aborted.
    Completed,
}

#[derive(Debug)]
struct MarkerState {
    outcome: OnceLock<AbortOutcome>,
    // The marker of an inner layer. A layer between the inner and the outer layer reads the inner marker, and must not see the outcome that
    // the outer layer sets.
    inner: Option<AbortMarker>,
}

impl AbortMarker {
    pub(crate) fn around(inner: Option<Self>) -> Self {
        Self(Arc::new(MarkerState { outcome: OnceLock::new(), inner }))
    }

    /// Only the first call has an effect.
    pub(crate) fn set(&self, outcome: AbortOutcome) {
        self.0.outcome.get_or_init(|| outcome);
    }

    pub(crate) fn is_set(&self, outcome: AbortOutcome) -> bool {
        self.0.outcome.get() == Some(&outcome) || self.0.inner.as_ref().is_some_and(|inner| inner.is_set(outcome))
    }
}

/// For the rejections of your own [`Responder`](crate::responder::Responder).
impl<B> From<Bytes> for LockedBody<B> {
    fn from(text: Bytes) -> Self {
        Self::new(text.into())
    }
}

// Outer layers that respond themselves, for CORS or a timeout, create an empty body with `Default`.
impl<B: Default> Default for LockedBody<B> {
    fn default() -> Self {
        Self::new(ResponseBody::default())
    }
}

impl<B> Body for LockedBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        if *this.is_finished {
            return Poll::Ready(None);
        }
        if let Some(Poll::Ready(lost)) = this.guard.as_mut().map(|guard| guard.poll_lost(cx)) {
            (*this.guard, *this.is_finished) = (None, true);
            if let Some(abort_marker) = this.abort_marker.take() {
                abort_marker.set(AbortOutcome::OutcomeUnknown);
            }
            return Poll::Ready(Some(match this.on_loss {
                None => Err(lost.into()),
                Some(trailers) => Ok(Frame::trailers(trailers())),
            }));
        }
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        let is_last = match &frame {
            Some(Ok(frame)) => frame.is_trailers() || this.body.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        if is_last {
            *this.guard = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_finished || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_finished { SizeHint::with_exact(0) } else { self.body.size_hint() }
    }
}
