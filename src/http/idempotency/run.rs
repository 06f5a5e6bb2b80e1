use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use ::http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_service::Service;

use super::answer::Recorder;
use super::body::{IdempotentBody, Piece};
use super::fingerprint::{FingerprintedBody, Reading};
use super::layer::Settings;
use crate::error::BoxError;
use crate::idempotency::{Attempt, Completion, Keep, Running};

/// How many pieces of an answer may lie between the handler and its caller while all of them are recorded anyway.
const PIECES: usize = 1_024;
/// How many pieces that are there already are taken together before the caller gets the first of them.
const AT_ONCE: usize = 64;

type Tell<R, E> = oneshot::Sender<Result<Response<IdempotentBody<R>>, E>>;

/// Does an operation from its beginning to its end, whether or not anybody waits for the answer.
pub(super) async fn run<S, B, R>(
    service: S,
    request: Request<FingerprintedBody<B>>,
    attempt: Attempt,
    reading: Arc<Reading>,
    settings: Arc<Settings>,
    tell: Tell<R, S::Error>,
    running: Running,
) where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>>,
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    let gives_back = settings.keep.gives_failures_back();
    let attempt = if gives_back { attempt.gives_back_panics() } else { attempt };
    let served = timeout(settings.max_run, async {
        tokio::select! {
            // After a standstill nothing of the handler may run before this was looked at.
            biased;
            () = attempt.keep(|| reading.payload()) => None,
            served = serve(service, request, &attempt, &settings, tell) => Some(served),
        }
    });
    // What is dropped by one of the two is left to the end of its lease.
    let Ok(Some(served)) = served.await else {
        tracing::warn!("a handler was cancelled: its outcome is unknown when its lease has ended");
        return;
    };
    let Served { outcome, last } = served;
    match outcome {
        Outcome::Failed if gives_back => attempt.release().await,
        // Left to the end of its lease.
        Outcome::Failed => drop(attempt),
        Outcome::Answered { recorder, keeps, is_whole } => {
            // A client that has broken off is to send the whole of it, and not to hear again that it did not.
            if keeps && (!reading.has_failed() || recorder.status().is_success()) {
                let (answer, is_kept) = recorder.finish(is_whole);
                let (payload, retention) = (reading.payload(), settings.retention);
                attempt.complete(Completion { answer: answer.into(), is_kept, payload, retention }).await;
            } else {
                attempt.release().await;
            }
        }
    }
    drop(running);
    // Only now, so that whoever has seen the end of the answer finds it in the record.
    last.deliver().await;
}

/// What a handler has come to, and what its caller has not been told yet.
struct Served<R, E> {
    outcome: Outcome,
    last: Last<R, E>,
}

enum Outcome {
    /// There is no answer.
    Failed,
    /// There is one, and it is to be kept or not. It may have broken off.
    Answered { recorder: Recorder, keeps: bool, is_whole: bool },
}

enum Last<R, E> {
    /// All of it.
    Answer { tell: Tell<R, E>, answer: Result<Response<IdempotentBody<R>>, E> },
    /// The end of an answer that has begun.
    Pieces { pieces: Sender<Piece>, rest: [Option<Piece>; 3] },
}

impl<R, E> Last<R, E> {
    /// Whoever is told may be gone.
    async fn deliver(self) {
        match self {
            Self::Answer { tell, answer } => drop(tell.send(answer)),
            Self::Pieces { pieces, rest } => {
                for piece in rest.into_iter().flatten() {
                    let _ = pieces.send(piece).await;
                }
            }
        }
    }
}

/// Lets the handler answer, and records that. Its caller gets everything meanwhile but the end.
async fn serve<S, B, R>(
    mut service: S,
    request: Request<FingerprintedBody<B>>,
    attempt: &Attempt,
    settings: &Settings,
    tell: Tell<R, S::Error>,
) -> Served<R, S::Error>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>>,
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    let (parts, body) = match service.call(request).await {
        Ok(response) => response.into_parts(),
        Err(error) => {
            return Served { outcome: Outcome::Failed, last: Last::Answer { tell, answer: Err(error) } };
        }
    };
    let status = parts.status;
    let is_grpc = GrpcStatus::of(&parts.headers);
    let keeps = |trailers: &HeaderMap| keeps(settings.keep, status, is_grpc.or(GrpcStatus::of(trailers)));
    let mut recorder = Recorder::new(status, &parts.headers, settings.keeps_cookies, settings.max_answer);
    let mut body = pin!(body);
    let mut hint = body.size_hint();
    let (mut chunks, mut trailers) = (VecDeque::new(), HeaderMap::new());

    // What is there already, which is all of it more often than not.
    let mut next: Option<Option<Result<Frame<Bytes>, BoxError>>> = None;
    for _ in 0..AT_ONCE {
        if body.is_end_stream() {
            next = Some(None);
            break;
        }
        match poll_fn(|cx| Poll::Ready(body.as_mut().poll_frame(cx))).await {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = record(frame, &mut recorder, &mut trailers) {
                    chunks.push_back(data);
                }
                if !recorder.fits() {
                    break;
                }
            }
            Poll::Ready(frame) => {
                next = Some(frame.map(|frame| frame.map_err(Into::into)));
                break;
            }
            Poll::Pending => break,
        }
    }
    if let Some(None) = next {
        let keeps = keeps(&trailers);
        let answer = Ok(Response::from_parts(parts, IdempotentBody::whole(chunks, trailers)));
        let outcome = Outcome::Answered { recorder, keeps, is_whole: true };
        return Served { outcome, last: Last::Answer { tell, answer } };
    }

    // The rest comes bit by bit.
    attempt.answering();
    let (pieces, receiver) = mpsc::channel(PIECES);
    if !trailers.is_empty() {
        hint = http_body::SizeHint::new();
    }
    // Whoever asked may be gone, and then the answer is recorded all the same.
    let _ = tell.send(Ok(Response::from_parts(parts, IdempotentBody::live(chunks, receiver, hint))));
    let mut held = None;
    loop {
        let frame = match next.take() {
            Some(frame) => frame,
            None if body.is_end_stream() => None,
            None => poll_fn(|cx| body.as_mut().poll_frame(cx)).await.map(|frame| frame.map_err(Into::into)),
        };
        match frame {
            Some(Ok(frame)) => {
                if let Some(data) = record(frame, &mut recorder, &mut trailers) {
                    if let Some(before) = held.replace(Piece::Data(data)) {
                        send(&pieces, before, &recorder).await;
                    }
                    // One that may be the last is kept back: a caller who counts takes it for the end.
                    let may_be_last = body.is_end_stream() || body.size_hint().exact() == Some(0);
                    if let Some(piece) = held.take_if(|_| !may_be_last) {
                        send(&pieces, piece, &recorder).await;
                    }
                }
            }
            Some(Err(error)) => {
                let outcome = Outcome::Answered { recorder, keeps: keeps(&trailers), is_whole: false };
                let rest = [held, Some(Piece::Failed(error)), None];
                return Served { outcome, last: Last::Pieces { pieces, rest } };
            }
            None => {
                let outcome = Outcome::Answered { recorder, keeps: keeps(&trailers), is_whole: true };
                let trailers = (!trailers.is_empty()).then_some(Piece::Trailers(trailers));
                return Served { outcome, last: Last::Pieces { pieces, rest: [held, trailers, Some(Piece::End)] } };
            }
        }
    }
}

/// Notes a frame; answers what is in it for the caller, but for trailers, which come at the end.
fn record(frame: Frame<Bytes>, recorder: &mut Recorder, trailers: &mut HeaderMap) -> Option<Bytes> {
    match frame.into_data() {
        Ok(data) => {
            recorder.data(&data);
            (!data.is_empty()).then_some(data)
        }
        Err(frame) => {
            if let Ok(last) = frame.into_trailers() {
                recorder.trailers(&last);
                *trailers = last;
            }
            None
        }
    }
}

/// Sends a piece to the caller, if there still is one.
async fn send(pieces: &Sender<Piece>, piece: Piece, recorder: &Recorder) {
    if recorder.fits() {
        // All that waits there is recorded, which bounds it.
        let _ = pieces.send(piece).await;
    } else if let Ok(mut places) = pieces.reserve_many(PIECES).await {
        // One at a time: a caller who reads slowly is waited for.
        if let Some(place) = places.next() {
            place.send(piece);
        }
    }
}

/// What a gRPC service says of its answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GrpcStatus {
    Ok,
    /// It may be otherwise the next time.
    Transient,
    Other,
}

impl GrpcStatus {
    const NAME: HeaderName = HeaderName::from_static("grpc-status");

    fn of(headers: &HeaderMap) -> Option<Self> {
        Some(match headers.get(&Self::NAME)?.as_bytes() {
            b"0" => Self::Ok,
            // CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, ABORTED, INTERNAL, UNAVAILABLE, DATA_LOSS
            b"1" | b"2" | b"4" | b"8" | b"10" | b"13" | b"14" | b"15" => Self::Transient,
            _ => Self::Other,
        })
    }
}

fn keeps(keep: Keep, status: StatusCode, grpc: Option<GrpcStatus>) -> bool {
    match keep {
        Keep::All => true,
        Keep::Success => status.is_success() && matches!(grpc, None | Some(GrpcStatus::Ok)),
        Keep::SafeRetry => {
            let not_now = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
            !status.is_server_error() && !not_now.contains(&status) && grpc != Some(GrpcStatus::Transient)
        }
    }
}
