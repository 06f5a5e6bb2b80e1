//! Executes an operation, from its handler to its record.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use ::http::response::Parts;
use ::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc::{self, Sender};
use tokio::task::consume_budget;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::Instrument as _;

use super::body::{AbortOnDrop, Chunks, IdempotentBody, Piece};
use super::fingerprint::{BodyFingerprint, BodyRejection, Rest};
use super::future::Answer;
use super::layer::Settings;
use super::recorded_response::{Recorder, mark};
use crate::error::{BoxError, causes};
use crate::http::lock::{AbortMarker, Cut};
use crate::http::responder::REJECTED;
use crate::idempotency::store::Completion;
use crate::idempotency::{
    Attempt, HasPayload as _, OnDisconnect, OnUnknown, Rejection, ResponsePolicy, Running, Settlement, Verdict,
};
use crate::lock::{Held, Lease, PartialEffects, ReleaseAt};
use crate::responder::{NotExecuted, OutcomeUnknown};

/// The maximum number of buffered pieces between the handler and the client. While a response is recorded, its size is bounded
/// anyway.
const PIECES: usize = 1_024;
/// The maximum number of ready pieces that are collected before the client gets the first one.
const AT_ONCE: usize = 64;
/// Practically unlimited.
pub(super) const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// A running operation.
pub(super) struct Execution {
    attempt: Attempt<BodyFingerprint>,
    running: Running,
    // The unread part of the body, if it has to match that of the previous attempt.
    rest: Option<Arc<dyn Rest>>,
    // Whether the request is known to have a route.
    has_route: bool,
    begun: Instant,
    // When `max_runtime` ends.
    until: Instant,
    // Resolves when the work has to stop. `None` at first, because work that is ready at once needs neither timers nor renewals.
    limits: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Execution {
    pub(super) fn new(
        attempt: Attempt<BodyFingerprint>,
        settings: &Settings,
        running: Running,
        rest: Option<Arc<dyn Rest>>,
        has_route: bool,
    ) -> Self {
        let attempt = if settings.keep.gives_failures_back() { attempt.gives_back_panics() } else { attempt };
        let begun = attempt.sent();
        let until = begun + settings.max_runtime.min(FOREVER);
        Self { attempt, running, rest, has_route, begun, until, limits: None }
    }

    /// Releases the operation when this is dropped.
    pub(super) fn gives_back(&mut self) {
        self.attempt.gives_back();
    }

    /// Runs a part of the operation that is not a future.
    pub(super) fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.attempt.at_work(work)
    }

    /// Whether a "no such route" response may come from a router, so that no handler has run.
    fn is_not_here(&self, status: StatusCode) -> bool {
        let is_touched = || self.attempt.order().body().is_touched();
        match status {
            StatusCode::NOT_FOUND => !self.has_route && !is_touched(),
            // The route may exist for other methods only.
            StatusCode::METHOD_NOT_ALLOWED => !is_touched(),
            _ => false,
        }
    }

    /// Whether another attempt may have started. After a stall, check this before any code of the handler runs.
    pub(super) fn is_lost(&self) -> bool {
        self.attempt.is_lost()
    }

    /// Polls `work` under the lease. `None` if it took too long, or another attempt may have started.
    pub(super) fn poll_under_lease<F: Future>(
        &mut self,
        work: Pin<&mut F>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<F::Output>> {
        if self.is_lost() || self.limits.as_mut().is_some_and(|limits| limits.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(None);
        }
        if let Poll::Ready(output) = self.attempt.at_work(|| work.poll(cx)) {
            // If the request body differs or is too large, discard the response of the handler.
            return Poll::Ready(self.attempt.order().body().unfit().is_none().then_some(output));
        }
        if self.limits.is_none() && self.limits.insert(self.limits()).as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        Poll::Pending
    }

    fn limits(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (order, kept, until) = (Arc::clone(self.attempt.order()), self.attempt.keep(), self.until);
        Box::pin(async move {
            tokio::select! {
                () = kept => {}
                () = order.body().until_it_is_unfit() => {}
                () = sleep_until(until) => {}
            }
        })
    }

    /// The rejection for a handler that was dropped while it ran. Its operation is left to the end of its lease, or released if
    /// its body differs from that of the previous attempt.
    pub(super) fn breaks_off(&mut self, settings: &Settings) -> (Rejection, Cut) {
        match self.attempt.order().body().unfit() {
            Some(BodyRejection::Differs) => {
                let may_begin_again = settings.on_unknown == OnUnknown::Retry || settings.keep.gives_failures_back();
                // Release it, so that retries of the right request need not wait for the end of this lease, after which they
                // might all be rejected. This attempt has stored no checkpoint, so none can mislead them.
                if may_begin_again {
                    self.gives_back();
                    return (Rejection::Mismatch, Cut::GivenBack);
                }
                (Rejection::Mismatch, Cut::OutcomeUnknown)
            }
            Some(BodyRejection::TooLarge) => (Rejection::TooLarge { has_begun: true }, Cut::OutcomeUnknown),
            None => {
                self.is_cancelled();
                (Rejection::Cancelled, Cut::OutcomeUnknown)
            }
        }
    }

    /// Logs the cancellation. The dropped operation is left to the end of its lease.
    fn is_cancelled(&self) {
        let order = self.attempt.order();
        let (layer, operation) = (order.layer(), order.operation());
        tracing::warn!(layer, %operation, "a handler was cancelled: its outcome is unknown when its lease has ended");
        self.attempt.told();
    }

    /// Records how long the handler ran, after it has ended or was dropped.
    pub(super) fn ended(&self, settings: &Settings) {
        settings.home.meters().handled(self.begun);
    }

    /// Whether the request body must be compared further before the response is stored. A body that has broken off has no more to
    /// compare.
    pub(super) fn has_to_read_on(&self, outcome: &Outcome) -> bool {
        let reading = self.attempt.order().body();
        matches!(outcome, Outcome::Answered { keeps: true, .. }) && !reading.is_known() && !reading.has_failed()
    }

    /// Compares the unread part of the body with that of the previous attempt, as far as that is known. Returns the outcome of
    /// the handler; `None` if the body differs.
    pub(super) async fn read_on(&mut self, outcome: Outcome, settings: &Settings) -> Option<Outcome> {
        if !self.has_to_read_on(&outcome) {
            return Some(outcome);
        }
        let reading = self.attempt.order().body();
        let is_same = match self.rest.as_mut().and_then(Arc::get_mut) {
            Some(rest) => tokio::select! {
                is_same = rest.is_same(reading, settings.pace()) => is_same,
                () = self.attempt.keep() => None,
            },
            // The handler still holds the body.
            None => None,
        };
        match (is_same, outcome) {
            (Some(false), _) => {
                reading.differs();
                None
            }
            // This may be a rejection of a different request, so do not store it for retries of the right one.
            (None, Outcome::Answered { succeeded: false, .. }) => Some(Outcome::Failed),
            (_, outcome) => Some(outcome),
        }
    }

    /// Stores the result of the operation. The future is `None` if that needs no waiting.
    pub(super) fn settle(
        self,
        outcome: Outcome,
        settings: &Settings,
    ) -> (Running, Option<impl Future<Output = ()> + Send + use<>>) {
        let Self { attempt, running, .. } = self;
        let order = attempt.order();
        let (reading, layer, operation) = (order.body(), order.layer(), order.operation());
        let end = match outcome {
            Outcome::Failed if settings.keep.gives_failures_back() => Settlement::Release,
            // The effects are not known: leave the operation to the end of its lease.
            Outcome::Failed => return (running, None),
            Outcome::Unknown => {
                tracing::warn!(
                    layer, %operation,
                    "a handler reported an unknown outcome or lost its lock: its outcome is unknown when its lease has ended"
                );
                attempt.told();
                return (running, None);
            }
            // If the request body has broken off, the client should retry with the whole body, so an error response to it is not
            // stored. Neither is the response to a part of a body that may be a different one.
            Outcome::Answered { status, succeeded, keeps, answer, is_kept }
                if keeps && (!reading.has_failed() || (succeeded && reading.is_known())) =>
            {
                let (payload, retention) = (reading.payload(), settings.retention);
                let completion = Completion { answer, is_kept, payload, retention };
                Settlement::Complete { completion, mark: mark(status) }
            }
            Outcome::Answered { keeps: true, .. } if !settings.keep.gives_failures_back() => {
                tracing::warn!(
                    layer, %operation,
                    "a request broke off before its handler had all of it: its outcome is unknown when its lease has ended"
                );
                attempt.told();
                return (running, None);
            }
            Outcome::Answered { .. } => Settlement::Release,
        };
        (running, attempt.settle(end))
    }
}

/// The outcome of a handler.
pub(super) enum Outcome {
    /// No response, or none that can be stored.
    Failed,
    /// A response that declares the outcome unknown.
    Unknown,
    /// A response. `keeps`: whether it completes the operation. `is_kept`: whether all of it is stored, or only its status.
    Answered { status: StatusCode, succeeded: bool, keeps: bool, answer: Arc<[u8]>, is_kept: bool },
}

/// The state of a handler that has returned.
#[expect(clippy::large_enum_variant, reason = "the large one is what nearly all are, and in no future")]
pub(super) enum HandlerOutcome<R, E> {
    /// The whole response. It is sent once it is stored.
    Complete(Outcome, Answer<R, E>),
    /// A response whose body continues. Boxed, so that whole responses need no room for it.
    Streaming(Box<Start<R>>),
    /// The handler was dropped while it ran.
    Aborted,
}

/// The first part of a response.
pub(super) struct Start<R> {
    parts: Parts,
    chunks: Chunks,
    stream: StreamRecorder<R>,
    hint: SizeHint,
}

impl<R, E> HandlerOutcome<R, E>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    E: 'static,
{
    /// Reads the ready part of a response, which usually is the whole. `served` is `None` if the handler was stopped.
    pub(super) fn of(settings: &Settings, course: &Execution, served: Option<Result<Response<R>, E>>) -> Self {
        let (parts, body) = match served {
            Some(Ok(response)) => response.into_parts(),
            Some(Err(error)) => {
                let outcome = if has_lost_its_lock(&error) { Outcome::Unknown } else { Outcome::Failed };
                return Self::Complete(outcome, Err(error));
            }
            None => return Self::Aborted,
        };
        let recorder = Recorder::new(parts.status, &parts.headers, settings.keeps_cookies, settings.max_answer);
        let (hint, mut chunks) = (body.size_hint(), Chunks::default());
        let mut stream = StreamRecorder::new(
            body,
            recorder,
            ResponseClassifier::new(settings.keep, &parts, course.is_not_here(parts.status)),
        );
        if stream.take_what_is_there(&mut chunks) {
            let outcome = stream.outcome(chunks.iter(), true);
            Self::Complete(outcome, Ok(Response::from_parts(parts, IdempotentBody::whole(chunks, stream.trailers))))
        } else {
            Self::Streaming(Box::new(Start { parts, chunks, stream, hint }))
        }
    }
}

/// Whether a handler failed because its lock was lost while it ran. Only errors of the type [`BoxError`] can be inspected.
fn has_lost_its_lock<E: 'static>(error: &E) -> bool {
    let error = (error as &dyn Any).downcast_ref::<BoxError>();
    error.is_some_and(|error| causes(&**error).any(<dyn std::error::Error>::is::<PartialEffects>))
}

impl<R> Start<R>
where
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    /// Records the rest of the response in a task, even if the client no longer reads it.
    pub(super) fn go_on(self, course: Execution, settings: Arc<Settings>) -> Response<IdempotentBody<R>> {
        let Self { mut parts, mut chunks, mut stream, mut hint } = self;
        course.attempt.answering();
        if !stream.trailers.is_empty() {
            hint = SizeHint::new();
        }
        let cancels = settings.on_disconnect == OnDisconnect::Cancel;
        let (pieces, receiver) = mpsc::channel(PIECES);
        stream.chunks = chunks.iter().cloned().collect();
        if stream.may_be_over() {
            stream.held = chunks.pop_last();
        }
        stream.leases = Held::present().shares(ReleaseAt::BodyEnd);
        let cut_off = AbortMarker::around(parts.extensions.remove());
        parts.extensions.insert(cut_off.clone());
        let task = tokio::spawn(stream.finish(course, settings, pieces, cut_off.clone()).in_current_span());
        let mut body = IdempotentBody::live(chunks, receiver, hint, cut_off);
        if cancels {
            let len = content_length(&parts.headers).or_else(|| hint.exact());
            body.aborts(AbortOnDrop::new(task.abort_handle(), len));
        }
        Response::from_parts(parts, body)
    }
}

/// The announced length of a body.
fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Why recording stops.
enum Stop {
    End,
    Broken(BoxError),
    /// The response is too large to be stored and its status is final. It belongs to the right request body, and the handler
    /// reads no more of that body.
    TooLarge,
}

/// Records a response while it is sent.
struct StreamRecorder<R> {
    // `None` when no more of it is needed.
    body: Option<Pin<Box<R>>>,
    // The next frame, if it was read ahead.
    next: Option<Option<Result<Frame<Bytes>, BoxError>>>,
    // The last part, held back because a client that counts bytes would take it for the end.
    held: Option<Bytes>,
    // The parts to store.
    chunks: Vec<Bytes>,
    trailers: HeaderMap,
    recorder: Recorder,
    judge: ResponseClassifier,
    // The leases of the locks around this response.
    leases: Vec<Lease>,
}

impl<R> StreamRecorder<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    fn new(body: R, recorder: Recorder, judge: ResponseClassifier) -> Self {
        let (chunks, trailers, leases) = (Vec::new(), HeaderMap::new(), Vec::new());
        let body = Some(Box::pin(body));
        Self { body, next: None, held: None, chunks, trailers, recorder, judge, leases }
    }

    /// Reads the frames that are ready. True if the body has ended.
    fn take_what_is_there(&mut self, chunks: &mut Chunks) -> bool {
        // The caller polls again for the rest, so no waker is needed.
        let cx = &mut Context::from_waker(Waker::noop());
        for _ in 0..AT_ONCE {
            match self.poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(data) = self.note(frame) {
                        chunks.push(data);
                    }
                    if !self.recorder.fits() {
                        return false;
                    }
                }
                Poll::Ready(None) => return true,
                Poll::Ready(Some(Err(error))) => {
                    self.next = Some(Some(Err(error)));
                    return false;
                }
                Poll::Pending => return false,
            }
        }
        false
    }

    /// Records and sends the rest of a response. Sends its end only after the record is stored.
    async fn finish(
        mut self,
        mut course: Execution,
        settings: Arc<Settings>,
        pieces: Sender<Piece>,
        cut_off: AbortMarker,
    ) {
        let (max_runtime, order) = (settings.max_runtime.min(FOREVER), Arc::clone(course.attempt.order()));
        let stop = {
            let mut passing = pin!(self.pass_on(&pieces, order.body()));
            poll_fn(|cx| course.poll_under_lease(passing.as_mut(), cx)).await
        };
        let Some(stop) = stop else {
            // Drop the handler before anything else happens.
            drop(self);
            course.ended(&settings);
            let (rejection, cut) = course.breaks_off(&settings);
            cut_off.make(cut);
            settings.home.meters().decided(Verdict::of(&rejection));
            return;
        };
        // A response that is too large ends later.
        let has_ended = !matches!(stop, Stop::TooLarge);
        let begun = course.begun;
        if has_ended {
            course.ended(&settings);
            // It may own the request body, which `read_on` must hold alone.
            self.body = None;
        }
        let mut outcome = self.outcome(self.chunks.iter(), matches!(stop, Stop::End));
        if let (Stop::Broken(_), Outcome::Answered { succeeded, .. }) = (&stop, &mut outcome) {
            // If the request body breaks off, a response that is made from it breaks off, too.
            *succeeded &= !order.body().has_failed();
        }
        let Some(outcome) = course.read_on(outcome, &settings).await else {
            drop(self);
            let (rejection, cut) = course.breaks_off(&settings);
            cut_off.make(cut);
            settings.home.meters().decided(Verdict::of(&rejection));
            return;
        };
        let (running, settling) = course.settle(outcome, &settings);
        if let Some(settling) = settling {
            settling.await;
        }
        let mut lost = pin!(order.until_lost());
        let mut alone_until = None;
        let last = match stop {
            Stop::End => Some(Piece::End),
            Stop::Broken(error) => Some(Piece::Failed(error)),
            // A response that is too large may take as long as it makes progress. If the client has gone, only the handler takes
            // time, so it gets `max_runtime` in total.
            Stop::TooLarge => loop {
                let now = Instant::now();
                if pieces.is_closed() && *alone_until.get_or_insert(now + max_runtime) <= now {
                    break None;
                }
                let until = alone_until.unwrap_or(now + max_runtime);
                let mut stepping = pin!(timeout_at(until, self.step(&pieces)));
                // The handler still runs, and the store may not know yet that no attempt may take over.
                let under_lease = poll_fn(|cx| {
                    if order.is_lost() || lost.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(None);
                    }
                    stepping.as_mut().poll(cx).map(Result::ok)
                });
                match under_lease.await {
                    Some(None | Some(Stop::TooLarge)) => {}
                    Some(Some(Stop::End)) => break Some(Piece::End),
                    Some(Some(Stop::Broken(error))) => break Some(Piece::Failed(error)),
                    None => break None,
                }
            },
        };
        if !has_ended {
            settings.home.meters().handled(begun);
        }
        let Some(last) = last else {
            if order.is_done() {
                cut_off.make(Cut::Done);
            }
            settings.home.meters().decided(Verdict::Cancelled);
            return;
        };
        // Release the locks first, so that a client that sees the end finds them free.
        drop(mem::take(&mut self.leases));
        let is_end = matches!(last, Piece::End);
        let trailers = (is_end && !self.trailers.is_empty()).then_some(Piece::Trailers(self.trailers));
        for piece in [self.held.map(Piece::Data), trailers, Some(last)].into_iter().flatten() {
            // The client may have gone, or may have stopped reading.
            let _ = timeout_at(Instant::now() + max_runtime, pieces.send(piece)).await;
        }
        drop(running);
    }

    async fn pass_on(&mut self, pieces: &Sender<Piece>, reading: &BodyFingerprint) -> Stop {
        loop {
            // Wait for the end if the response may belong to a different request body, or if the body may still break off.
            let is_right = || reading.is_known() && reading.is_over() && !reading.has_failed();
            if !self.recorder.fits() && self.judge.is_sure() && is_right() {
                return Stop::TooLarge;
            }
            if let Some(stop) = self.step(pieces).await {
                return stop;
            }
        }
    }

    /// Sends the next part.
    async fn step(&mut self, pieces: &Sender<Piece>) -> Option<Stop> {
        // A body that is always ready, without a reader, must yield to other tasks and to the timers.
        consume_budget().await;
        let frame = match self.next.take() {
            Some(frame) => frame,
            None => poll_fn(|cx| self.poll_frame(cx)).await,
        };
        match frame {
            Some(Ok(frame)) => {
                if let Some(data) = self.note(frame) {
                    if self.recorder.fits() {
                        self.chunks.push(data.clone());
                    } else {
                        self.chunks = Vec::new();
                    }
                    if let Some(before) = self.held.replace(data) {
                        send(pieces, before, self.recorder.fits()).await;
                    }
                    let may_be_over = self.may_be_over();
                    if let Some(data) = self.held.take_if(|_| !may_be_over) {
                        send(pieces, data, self.recorder.fits()).await;
                    }
                }
                None
            }
            Some(Err(error)) => Some(Stop::Broken(error)),
            None => Some(Stop::End),
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.body.as_mut().filter(|body| !body.is_end_stream()) {
            Some(body) => body.as_mut().poll_frame(cx).map_err(Into::into),
            None => Poll::Ready(None),
        }
    }

    /// Whether a client that counts bytes takes the received part for the whole.
    fn may_be_over(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_end_stream() || body.size_hint().exact() == Some(0))
    }

    /// Records a frame. Returns its data for the client; trailers are sent at the end.
    fn note(&mut self, frame: Frame<Bytes>) -> Option<Bytes> {
        match frame.into_data() {
            Ok(data) => {
                self.recorder.data(&data);
                (!data.is_empty()).then_some(data)
            }
            Err(frame) => {
                if let Ok(last) = frame.into_trailers() {
                    self.recorder.trailers(&last);
                    self.trailers = last;
                }
                None
            }
        }
    }

    fn outcome<'a>(&self, chunks: impl Iterator<Item = &'a Bytes>, is_whole: bool) -> Outcome {
        if self.judge.is_unknown() {
            return Outcome::Unknown;
        }
        let (answer, is_kept) = self.recorder.finish(chunks, is_whole);
        let Self { judge, trailers, .. } = self;
        let (succeeded, keeps) = (judge.succeeded(trailers, is_whole), judge.keeps(trailers, is_whole));
        Outcome::Answered { status: judge.status, succeeded, keeps, answer, is_kept }
    }
}

/// Sends a part to the client, unless it has gone.
async fn send(pieces: &Sender<Piece>, data: Bytes, is_recorded: bool) {
    if is_recorded {
        // Buffered parts are recorded, which bounds them.
        let _ = pieces.send(Piece::Data(data)).await;
    } else if let Ok(mut places) = pieces.reserve_many(PIECES).await {
        // Buffer only one, so that a slow client slows down the handler.
        if let Some(place) = places.next() {
            place.send(Piece::Data(data));
        }
    }
}

/// The statuses that [`ResponsePolicy::SafeRetry`] never stores, besides 5xx. They are temporary, or depend on the headers, the
/// credentials or the connection of the request, which may differ next time. Other statuses also depend on the rest of the response.
const GIVEN_BACK: [StatusCode; 12] = [
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

/// The gRPC status of a response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GrpcStatus {
    Ok,
    /// It may differ next time.
    Transient,
    Other,
}

impl GrpcStatus {
    const NAME: HeaderName = HeaderName::from_static("grpc-status");

    fn of(headers: &HeaderMap) -> Option<Self> {
        Some(match headers.get(&Self::NAME)?.as_bytes() {
            b"0" => Self::Ok,
            // CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, PERMISSION_DENIED, RESOURCE_EXHAUSTED, ABORTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE,
            // DATA_LOSS, UNAUTHENTICATED
            b"1" | b"2" | b"4" | b"7" | b"8" | b"10" | b"12" | b"13" | b"14" | b"15" | b"16" => Self::Transient,
            _ => Self::Other,
        })
    }
}

/// Decides whether a response is stored.
struct ResponseClassifier {
    keep: ResponsePolicy,
    is_refusal: bool,
    is_not_here: bool,
    is_later: bool,
    is_unknown: bool,
    cut_off: Option<AbortMarker>,
    status: StatusCode,
    grpc: Option<GrpcStatus>,
    is_grpc: bool,
}

impl ResponseClassifier {
    fn new(keep: ResponsePolicy, parts: &Parts, is_not_here: bool) -> Self {
        let Parts { status, headers, extensions, .. } = parts;
        let content_type = headers.get(CONTENT_TYPE).map_or(b"".as_slice(), HeaderValue::as_bytes);
        let is_grpc = content_type.starts_with(b"application/grpc");
        // Extensions are not sent over a connection, but this field is.
        let is_refusal = extensions.get::<NotExecuted>().is_some() || headers.contains_key(&REJECTED);
        let is_later = status.is_client_error() && headers.contains_key(RETRY_AFTER);
        let is_unknown = extensions.get::<OutcomeUnknown>().is_some();
        let (cut_off, grpc) = (extensions.get::<AbortMarker>().cloned(), GrpcStatus::of(headers));
        Self { keep, is_refusal, is_not_here, is_later, is_unknown, cut_off, status: *status, grpc, is_grpc }
    }

    /// Whether the outcome is unknown: the response declares it, or it was cut off.
    fn is_unknown(&self) -> bool {
        self.is_unknown || self.is_cut_off(Cut::OutcomeUnknown)
    }

    /// Whether to release the operation: the response declares it, or an inner layer has released its own.
    fn is_refusal(&self) -> bool {
        self.is_refusal || self.is_cut_off(Cut::GivenBack)
    }

    fn is_cut_off(&self, cut: Cut) -> bool {
        self.cut_off.as_ref().is_some_and(|cut_off| cut_off.is_made(cut))
    }

    /// Whether the response is stored, whatever its trailers are.
    fn is_sure(&self) -> bool {
        (self.grpc.is_some() || !self.is_grpc || self.keep == ResponsePolicy::All)
            && self.keeps(&HeaderMap::new(), false)
    }

    /// The gRPC status. A response that ended without one is an error for the client.
    fn grpc(&self, trailers: &HeaderMap, is_whole: bool) -> Option<GrpcStatus> {
        let told = self.grpc.or_else(|| GrpcStatus::of(trailers));
        told.or_else(|| (self.is_grpc && is_whole).then_some(GrpcStatus::Transient))
    }

    fn succeeded(&self, trailers: &HeaderMap, is_whole: bool) -> bool {
        self.status.is_success() && matches!(self.grpc(trailers, is_whole), None | Some(GrpcStatus::Ok))
    }

    fn keeps(&self, trailers: &HeaderMap, is_whole: bool) -> bool {
        match self.keep {
            _ if self.is_refusal() || self.is_unknown() => false,
            ResponsePolicy::All => true,
            ResponsePolicy::Success => self.succeeded(trailers, is_whole),
            ResponsePolicy::SafeRetry => {
                !self.status.is_server_error()
                    && !self.is_not_here
                    && !self.is_later
                    && !GIVEN_BACK.contains(&self.status)
                    && self.grpc(trailers, is_whole) != Some(GrpcStatus::Transient)
            }
        }
    }
}
