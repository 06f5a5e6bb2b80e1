//! Sends a response to the client while it is recorded.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::http::header::CONTENT_LENGTH;
use ::http::response::Parts;
use ::http::{HeaderMap, Response};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc::{self, Sender};
use tokio::task::consume_budget;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;

use super::body::{AbortOnDrop, Chunks, IdempotentBody, Piece};
use super::classify::{Class, ResponseClassifier};
use super::execution::Execution;
use super::fingerprint::RunningFingerprint;
use super::recorded_response::Recorder;
use super::settings::{FOREVER, Settings};
use super::settle::{CompleteResponse, Outcome};
use crate::error::BoxError;
use crate::http::lock::{AbortMarker, AbortOutcome};
use crate::idempotency::{HasBodyFingerprint as _, OnDisconnect, OperationContext, Verdict};
use crate::lock::{Held, Lease, ReleaseAt};

/// The maximum number of buffered pieces between the handler and the client. `max_response` bounds the total size of recorded pieces.
const PIECES: usize = 1_024;
/// The maximum number of ready pieces that are collected before the client gets the first one.
const MAX_READY: usize = 64;

/// The first part of a response.
pub(super) struct ResponseStart<R> {
    parts: Parts,
    chunks: Chunks,
    stream: StreamRecorder<R>,
    hint: SizeHint,
}

impl<R> ResponseStart<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    /// `is_unrouted`: the response may come from a router that knows no such route.
    pub(super) fn new(response: Response<R>, settings: &Settings, is_unrouted: bool) -> Self {
        let (parts, body) = response.into_parts();
        let recorder = Recorder::new(parts.status, &parts.headers, settings.keeps_cookies, settings.max_response);
        let classifier = ResponseClassifier::new(settings.policy, &parts, is_unrouted);
        let hint = body.size_hint();
        Self { parts, chunks: Chunks::default(), stream: StreamRecorder::new(body, recorder, classifier), hint }
    }

    /// Reads the ready part of the body. True if the body has ended.
    pub(super) fn read_ready(&mut self) -> bool {
        self.stream.read_ready(&mut self.chunks)
    }

    /// The whole response, after its body has ended.
    pub(super) fn into_whole(self) -> (Outcome, Response<IdempotentBody<R>>) {
        let Self { parts, chunks, stream, .. } = self;
        let outcome = stream.outcome(chunks.iter(), true);
        (outcome, Response::from_parts(parts, IdempotentBody::whole(chunks, stream.trailers)))
    }
}

impl<R> ResponseStart<R>
where
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    /// Records the rest of the response in a task. If the client disconnects, only `OnDisconnect::Cancel` stops the task.
    pub(super) fn stream_rest(self, execution: Execution, settings: Arc<Settings>) -> Response<IdempotentBody<R>> {
        let Self { mut parts, mut chunks, mut stream, mut hint } = self;
        execution.mark_responding();
        if !stream.trailers.is_empty() {
            hint = SizeHint::new();
        }
        let cancels = settings.on_disconnect == OnDisconnect::Cancel;
        let (pieces, receiver) = mpsc::channel(PIECES);
        stream.chunks = chunks.iter().cloned().collect();
        if stream.may_be_complete() {
            stream.held_back = chunks.pop_last();
        }
        stream.leases = Held::current().shares(ReleaseAt::BodyEnd);
        let abort_marker = AbortMarker::around(parts.extensions.remove());
        parts.extensions.insert(abort_marker.clone());
        let sender = StreamSender { abort_marker: abort_marker.clone(), pieces, settings, stream };
        let task = tokio::spawn(sender.run(execution).in_current_span());
        let mut body = IdempotentBody::live(chunks, receiver, hint, abort_marker);
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

/// Sends the rest of a response to the client and records it.
struct StreamSender<R> {
    // Reports the abort to outer layers and to the body of the response.
    abort_marker: AbortMarker,
    pieces: Sender<Piece>,
    settings: Arc<Settings>,
    stream: StreamRecorder<R>,
}

/// Why recording stops.
enum Stop {
    Ended(BodyEnd),
    /// The response is too large to be stored, and it is certain that its status is stored. The handler reads no more of the request body,
    /// which has not failed and matches that of the previous attempt.
    StatusOnly,
}

/// The end of a response body, which may be an error.
type BodyEnd = Result<(), BoxError>;

impl<R> StreamSender<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    /// Sends the end of the response only after the record is stored.
    async fn run(mut self, mut execution: Execution) {
        let (context, start) = (Arc::clone(execution.context()), execution.start());
        let stop = {
            let mut forwarding = pin!(self.stream.forward(&self.pieces, context.body()));
            poll_fn(|cx| execution.poll_under_lease(forwarding.as_mut(), cx)).await
        };
        if !matches!(stop, Some(Stop::StatusOnly)) {
            // Drop the handler first. It may own the request body, which `compare_rest` needs exclusively.
            self.stream.body = None;
            execution.record_handler_time(&self.settings);
        }
        let Some(stop) = stop else { return self.abort(execution) };
        let is_whole = matches!(stop, Stop::Ended(Ok(())));
        let mut outcome = self.stream.outcome(self.stream.chunks.iter(), is_whole);
        if let Outcome::Completed(response) = &mut outcome {
            // A response that broke off is not a success if the request body failed: the handler may have streamed the response from the
            // body.
            response.is_success &= is_whole || !context.body().has_failed();
        }
        let Some(outcome) = execution.compare_rest(outcome, &self.settings).await else {
            return self.abort(execution);
        };
        let (running, settling) = execution.settle(outcome, &self.settings);
        if let Some(settling) = settling {
            settling.await;
        }
        let end = match stop {
            Stop::Ended(end) => Some(end),
            Stop::StatusOnly => {
                let end = self.send_unrecorded(&context).await;
                self.settings.coordinator.metrics().handled(start);
                end
            }
        };
        match end {
            Some(end) => self.send_end(end).await,
            None => self.cancel(&context),
        }
        drop(running);
    }

    /// Ends the response of a handler that was dropped, or whose request differs from that of the previous attempt.
    fn abort(self, mut execution: Execution) {
        let Self { abort_marker, pieces, settings, stream } = self;
        // Release the locks first.
        drop(stream);
        let (rejection, outcome) = execution.abort(&settings);
        abort_marker.set(outcome);
        settings.coordinator.metrics().decided(Verdict::of(&rejection));
        // Ends the body, and an outer layer reads the marker then.
        drop(pieces);
    }

    /// Sends the rest of a response that is too large to be stored. Each part may take `max_runtime`. If the client has gone, the rest may
    /// take `max_runtime` in total. `None` if the response must stop before its end.
    async fn send_unrecorded(&mut self, context: &OperationContext<RunningFingerprint>) -> Option<BodyEnd> {
        let (max_runtime, pieces) = (self.max_runtime(), &self.pieces);
        let mut lost = pin!(context.until_lost());
        let mut disconnected_until = None;
        loop {
            let now = Instant::now();
            if pieces.is_closed() && *disconnected_until.get_or_insert(now + max_runtime) <= now {
                return None;
            }
            let until = disconnected_until.unwrap_or(now + max_runtime);
            let mut part = pin!(timeout_at(until, self.stream.forward_next(pieces)));
            // Stop the handler once another attempt may have started, which is possible until the result is stored.
            let under_lease = poll_fn(|cx| {
                if context.is_lost() || lost.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(None);
                }
                part.as_mut().poll(cx).map(Result::ok)
            });
            if let Some(end) = under_lease.await? {
                return Some(end);
            }
        }
    }

    /// Sends the last part and the end of a response.
    async fn send_end(self, end: BodyEnd) {
        let max_runtime = self.max_runtime();
        let Self { pieces, stream, .. } = self;
        let StreamRecorder { held_back, trailers, leases, .. } = stream;
        // Release the locks first, so that the client can acquire them after the end.
        drop(leases);
        let trailers = (end.is_ok() && !trailers.is_empty()).then_some(Piece::Trailers(trailers));
        let last = end.map_or_else(Piece::Failed, |()| Piece::End);
        for piece in [held_back.map(Piece::Data), trailers, Some(last)].into_iter().flatten() {
            // The client may have gone, or may have stopped reading.
            let _ = timeout_at(Instant::now() + max_runtime, pieces.send(piece)).await;
        }
    }

    /// Ends a response that is too large to be stored, after it took too long or lost its lease.
    fn cancel(self, context: &OperationContext<RunningFingerprint>) {
        if context.is_done() {
            self.abort_marker.set(AbortOutcome::Completed);
        }
        self.settings.coordinator.metrics().decided(Verdict::Cancelled);
    }

    fn max_runtime(&self) -> Duration {
        self.settings.max_runtime.min(FOREVER)
    }
}

/// Reads a response and records it.
struct StreamRecorder<R> {
    // `None` when no more of it is needed.
    body: Option<Pin<Box<R>>>,
    // The next frame, if it was read ahead.
    next: Option<Option<Result<Frame<Bytes>, BoxError>>>,
    // The last part, which is sent after the record is stored: a client that counts bytes would take it for the end.
    held_back: Option<Bytes>,
    // The parts to store.
    chunks: Vec<Bytes>,
    trailers: HeaderMap,
    recorder: Recorder,
    classifier: ResponseClassifier,
    // The leases of the locks around this response.
    leases: Vec<Lease>,
}

impl<R> StreamRecorder<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    fn new(body: R, recorder: Recorder, classifier: ResponseClassifier) -> Self {
        let (chunks, trailers, leases) = (Vec::new(), HeaderMap::new(), Vec::new());
        let body = Some(Box::pin(body));
        Self { body, next: None, held_back: None, chunks, trailers, recorder, classifier, leases }
    }

    /// Reads the frames that are ready. True if the body has ended.
    fn read_ready(&mut self, chunks: &mut Chunks) -> bool {
        // The caller polls again for the rest, so no waker is needed.
        let cx = &mut Context::from_waker(Waker::noop());
        for _ in 0..MAX_READY {
            match self.poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(data) = self.record(frame) {
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

    /// Sends the response until it ends, or until it is certain that only its status is stored.
    async fn forward(&mut self, pieces: &Sender<Piece>, fingerprint: &RunningFingerprint) -> Stop {
        loop {
            // Wait for the end if the request body may still turn out to be different, or may fail.
            let body_is_settled = || fingerprint.is_confirmed() && fingerprint.is_final() && !fingerprint.has_failed();
            if !self.recorder.fits() && self.classifier.is_surely_stored() && body_is_settled() {
                return Stop::StatusOnly;
            }
            if let Some(end) = self.forward_next(pieces).await {
                return Stop::Ended(end);
            }
        }
    }

    /// Sends the next part. `None` until the body ends.
    async fn forward_next(&mut self, pieces: &Sender<Piece>) -> Option<BodyEnd> {
        // Yields to other tasks and timers if the body is always ready and has no reader.
        consume_budget().await;
        let frame = match self.next.take() {
            Some(frame) => frame,
            None => poll_fn(|cx| self.poll_frame(cx)).await,
        };
        match frame {
            Some(Ok(frame)) => {
                if let Some(data) = self.record(frame) {
                    self.forward_data(data, pieces).await;
                }
                None
            }
            Some(Err(error)) => Some(Err(error)),
            None => Some(Ok(())),
        }
    }

    async fn forward_data(&mut self, data: Bytes, pieces: &Sender<Piece>) {
        if self.recorder.fits() {
            self.chunks.push(data.clone());
        } else {
            self.chunks = Vec::new();
        }
        if let Some(previous) = self.held_back.replace(data) {
            send(pieces, previous, self.recorder.fits()).await;
        }
        let may_be_complete = self.may_be_complete();
        if let Some(data) = self.held_back.take_if(|_| !may_be_complete) {
            send(pieces, data, self.recorder.fits()).await;
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.body.as_mut().filter(|body| !body.is_end_stream()) {
            Some(body) => body.as_mut().poll_frame(cx).map_err(Into::into),
            None => Poll::Ready(None),
        }
    }

    /// Whether a client that counts bytes takes the response for complete.
    fn may_be_complete(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_end_stream() || body.size_hint().exact() == Some(0))
    }

    /// Records a frame. Returns its data for the client; trailers are sent at the end.
    fn record(&mut self, frame: Frame<Bytes>) -> Option<Bytes> {
        match frame.into_data() {
            Ok(data) => {
                self.recorder.count_data(&data);
                (!data.is_empty()).then_some(data)
            }
            Err(frame) => {
                if let Ok(last) = frame.into_trailers() {
                    self.recorder.set_trailers(&last);
                    self.trailers = last;
                }
                None
            }
        }
    }

    /// The outcome of the handler, from the parts of its response that were read. `is_whole`: the body has ended.
    fn outcome<'a>(&self, chunks: impl Iterator<Item = &'a Bytes>, is_whole: bool) -> Outcome {
        match self.classifier.classify(&self.trailers, is_whole) {
            Class::Unknown => Outcome::Unknown,
            Class::Release => Outcome::Released,
            Class::Store { is_success } => {
                let (response, is_kept) = self.recorder.finish(chunks, is_whole);
                Outcome::Completed(CompleteResponse { status: self.classifier.status(), is_success, response, is_kept })
            }
        }
    }
}

/// Sends a part to the client, unless the client has gone.
async fn send(pieces: &Sender<Piece>, data: Bytes, is_recorded: bool) {
    if is_recorded {
        // Recorded parts have a bounded total size, so the buffer may hold many of them.
        let _ = pieces.send(Piece::Data(data)).await;
    } else if let Ok(mut permits) = pieces.reserve_many(PIECES).await {
        // The buffer is empty now. Send only one part, so that a slow client slows down the handler.
        if let Some(permit) = permits.next() {
            permit.send(Piece::Data(data));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use http_body_util::StreamBody;

    use super::*;
    use crate::http::idempotency::recorded_response::Recorded;
    use crate::idempotency::ResponsePolicy;
    use crate::responder::NotExecuted;

    /// The outcome of a response of two parts, of which up to 100 bytes are stored.
    fn outcome(mut response: Response<()>, len: usize, keeps_cookies: bool) -> Outcome {
        let frames = [vec![b'x'; len], vec![b'y'; len]].map(|part| Ok::<_, Infallible>(Frame::data(Bytes::from(part))));
        response.headers_mut().insert("x-a", ::http::HeaderValue::from_static("b"));
        let (parts, ()) = response.into_parts();
        let recorder = Recorder::new(parts.status, &parts.headers, keeps_cookies, 100);
        let classifier = ResponseClassifier::new(ResponsePolicy::SafeRetry, &parts, false);
        let mut stream = StreamRecorder::new(StreamBody::new(stream::iter(frames)), recorder, classifier);
        let mut chunks = Chunks::default();
        let is_whole = stream.read_ready(&mut chunks);
        stream.outcome(chunks.iter(), is_whole)
    }

    fn stored(outcome: Outcome) -> (Recorded, bool) {
        let Outcome::Completed(response) = outcome else { panic!("the response is not stored") };
        (Recorded::read(Bytes::from_owner(response.response)).unwrap(), response.is_kept)
    }

    #[test]
    fn response_is_stored_with_cookies_only_if_they_are_kept() {
        for keeps_cookies in [false, true] {
            let response = Response::builder().header("set-cookie", "a=b").body(()).unwrap();
            let (recorded, is_kept) = stored(outcome(response, 2, keeps_cookies));
            assert!(is_kept && recorded.body == "xxyy" && recorded.headers["x-a"] == "b");
            assert_eq!(recorded.headers.contains_key("set-cookie"), keeps_cookies);
        }
    }

    #[test]
    fn too_large_response_completes_with_its_status_alone() {
        let response = Response::builder().status(201).body(()).unwrap();
        let (recorded, is_kept) = stored(outcome(response, 60, false));
        assert!(!is_kept && recorded.status == 201 && recorded.body.is_empty() && recorded.headers.is_empty());
    }

    #[test]
    fn response_that_is_not_stored_is_not_recorded() {
        let not_executed = Response::builder().extension(NotExecuted).body(()).unwrap();
        let unavailable = Response::builder().status(503).body(()).unwrap();
        for (response, len) in [(not_executed, 2), (unavailable.clone(), 2), (unavailable, 60)] {
            assert!(matches!(outcome(response, len, false), Outcome::Released));
        }
    }
}
