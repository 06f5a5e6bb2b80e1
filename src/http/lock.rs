use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::body::ResponseBody;
use super::problem::{Kind, Problem};
use super::responder::{REJECTED, STORE_RETRY, STORE_TEXT};
use crate::error::BoxError;
use crate::lock::{BindLease, LeaseGuard, LeaseHandle, LockError, Rejection, fencing};
use crate::responder::{BusyStatus, HttpResponder, NotExecuted, OutcomeUnknown, Responder};

/// A client is not told to wait for longer than this, however long the lease may last: most are given back much sooner.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The header field in which a request says the [fence](crate::Lease::fence) of the lock that it is sent under.
pub const LOCK_FENCE: HeaderName = HeaderName::from_static("lock-fence");

/// The fence in the field [`LOCK_FENCE`], for a [`FenceLayer`](fencing::FenceLayer). `None` if there is not exactly one, or if it is no number.
pub fn lock_fence<B>(request: &Request<B>) -> Option<u64> {
    let mut fences = request.headers().get_all(LOCK_FENCE).iter();
    let fence = fences.next()?.to_str().ok()?;
    // `parse` would take a sign.
    let is_number = fences.next().is_none() && fence.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| fence.parse().ok())?
}

impl<B, E> Responder<fencing::Rejection, Response<B>, E> for HttpResponder {
    type Response = Response<ResponseBody<B>>;
    type Error = E;

    fn reject(&self, rejection: fencing::Rejection) -> Result<Self::Response, E> {
        Ok(match rejection {
            fencing::Rejection::Stale(_) => {
                self.refusal(StatusCode::PRECONDITION_FAILED, "the lock of this request is somebody else's by now")
            }
            fencing::Rejection::Missing(_) | fencing::Rejection::MissingFence(_) => {
                self.refusal(StatusCode::BAD_REQUEST, "the request does not say under which lock it was sent")
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

impl<B, E> Responder<Rejection, Response<B>, E> for HttpResponder {
    type Response = Response<LockedBody<B>>;
    type Error = E;

    fn reject(&self, rejection: Rejection) -> Result<Self::Response, E> {
        let response = match rejection {
            Rejection::MissingKey(missing) => self.refusal(StatusCode::BAD_REQUEST, &missing.to_string()),
            Rejection::Lock(LockError::Busy(busy)) => {
                let status = match self.busy {
                    BusyStatus::Conflict => StatusCode::CONFLICT,
                    BusyStatus::Locked => StatusCode::LOCKED,
                    BusyStatus::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
                };
                let wait = self.told(busy.retry_after().min(LONGEST_WAIT));
                // Neither the key nor the holder is any business of the client.
                let detail = &format!("another request is at work on this, try again in {wait} s");
                self.answer(Some(wait), Problem { kind: Kind::LockBusy, status, detail, violated: Vec::new() })
            }
            Rejection::Full(full) => self.later(Kind::Blank, &full.to_string()),
            Rejection::Lock(LockError::QueueFull(_)) => {
                self.later(Kind::LockQueueFull, "too many requests wait for this")
            }
            Rejection::Lock(LockError::Lost(_)) => {
                // It may have had effects, so nobody is invited to try again.
                let (kind, status) = (Kind::LockLost, StatusCode::SERVICE_UNAVAILABLE);
                let detail = "the request was cancelled on the way and may have had effects";
                let mut response = self.answer(None, Problem { kind, status, detail, violated: Vec::new() });
                response.extensions_mut().remove::<NotExecuted>();
                response.extensions_mut().insert(OutcomeUnknown);
                response.headers_mut().remove(REJECTED);
                response
            }
            Rejection::Lock(LockError::Store(_) | LockError::NotReplicated(_) | LockError::Closed(_)) => {
                self.later(Kind::LockUnavailable, STORE_TEXT)
            }
            // Mistakes of the program.
            Rejection::Lock(error) => {
                tracing::error!(%error, "a request cannot be locked");
                self.refusal(StatusCode::INTERNAL_SERVER_ERROR, "the request cannot be served")
            }
        };
        Ok(response.map(LockedBody::new))
    }

    fn response(&self, response: Response<B>) -> Self::Response {
        response.map(|body| LockedBody::new(ResponseBody::inner(body)))
    }

    fn error(&self, error: E) -> E {
        error
    }
}

impl HttpResponder {
    fn later<B>(&self, kind: Kind, detail: &str) -> Response<ResponseBody<B>> {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        self.answer(Some(self.told(STORE_RETRY)), Problem { kind, status, detail, violated: Vec::new() })
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

    fn occupy(&self, stay: LeaseGuard, response: &mut Response<LockedBody<B>>) {
        LockedBody::occupy(response, stay, None);
    }
}

pin_project! {
    /// The body of a response that came through a [`LockLayer`](crate::lock::LockLayer). It keeps the lock until it has ended, has failed or is
    /// dropped. If the lease is lost before that, it fails with [`Lost`](crate::lock::Lost), or ends with the status of gRPC.
    #[derive(Debug)]
    pub struct LockedBody<B> {
        #[pin]
        body: ResponseBody<B>,
        stay: Option<LeaseGuard>,
        // What it ends with if the lease is lost; an error if that is nothing.
        on_loss: Option<fn() -> HeaderMap>,
        // Who is told of that besides whoever reads it.
        cut_off: Option<AbortMarker>,
        is_over: bool,
    }
}

impl<B> LockedBody<B> {
    pub(crate) const fn new(body: ResponseBody<B>) -> Self {
        Self { body, stay: None, on_loss: None, cut_off: None, is_over: false }
    }
}

impl<B: Body<Data = Bytes>> LockedBody<B> {
    /// With the trailers for a lease that is lost, where a body has to end with any.
    pub(crate) fn occupy(response: &mut Response<Self>, stay: LeaseGuard, on_loss: Option<fn() -> HeaderMap>) {
        if response.body().body.is_end_stream() {
            return;
        }
        let cut_off = AbortMarker::around(response.extensions_mut().remove());
        response.extensions_mut().insert(cut_off.clone());
        let body = response.body_mut();
        (body.stay, body.on_loss, body.cut_off) = (Some(stay), on_loss, Some(cut_off));
    }
}

/// In the extensions of a response: whether its handler was cut off half way. Where it has begun to answer, that is known once the body has ended.
#[derive(Clone, Debug)]
pub(crate) struct AbortMarker(Arc<Made>);

/// What a handler has come to that was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    OutcomeUnknown,
    /// It was sent another body than the attempt before, and its operation was given back.
    GivenBack,
    /// That it was done is in its record.
    Done,
}

#[derive(Debug)]
struct Made {
    cut: OnceLock<Cut>,
    // That of a layer further in. What is between the two layers has looked at it, and has nothing to do with the one further out.
    inner: Option<AbortMarker>,
}

impl AbortMarker {
    pub(crate) fn around(inner: Option<Self>) -> Self {
        Self(Arc::new(Made { cut: OnceLock::new(), inner }))
    }

    /// The first time counts.
    pub(crate) fn make(&self, cut: Cut) {
        self.0.cut.get_or_init(|| cut);
    }

    pub(crate) fn is_made(&self, cut: Cut) -> bool {
        self.0.cut.get() == Some(&cut) || self.0.inner.as_ref().is_some_and(|inner| inner.is_made(cut))
    }
}

/// The body of a rejection of one's own.
impl<B> From<Bytes> for LockedBody<B> {
    fn from(text: Bytes) -> Self {
        Self::new(text.into())
    }
}

// Layers above that answer by themselves, for CORS or a timeout, make an empty body this way.
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
        if *this.is_over {
            return Poll::Ready(None);
        }
        if let Some(Poll::Ready(lost)) = this.stay.as_mut().map(|stay| stay.poll_lost(cx)) {
            (*this.stay, *this.is_over) = (None, true);
            if let Some(cut_off) = this.cut_off.take() {
                cut_off.make(Cut::OutcomeUnknown);
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
            *this.stay = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_over { SizeHint::with_exact(0) } else { self.body.size_hint() }
    }
}
