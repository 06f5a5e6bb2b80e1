//! Handles requests that have a key.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::http::{HeaderName, HeaderValue, Request, Response};
use bytes::Bytes;
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::{Chunks, IdempotentBody};
use super::detach::{Answer, DetachMode, DetachableFuture};
use super::execution::Execution;
use super::fingerprint::{CompareError, FingerprintedBody, RunningFingerprint, has_route, is_same};
use super::handler_outcome::HandlerOutcome;
use super::recorded_response::Recorded;
use super::settings::{Settings, Shared};
use crate::error::{BoxError, StoreError};
use crate::http::lock::{AbortMarker, AbortOutcome};
use crate::idempotency::store::{Begun, BodyFingerprint, Claim, RecordBound};
use crate::idempotency::{
    Attempt, ClaimResult, CountGuard, Granted, IdempotencyHandle, OnDisconnect, OnUnknown, Operation, OperationContext,
    Rejection, ScopeBound, Verdict,
};
use crate::responder::{NotExecuted, Responder};
use crate::store::token::Token;

/// The header field of replayed responses.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The maximum `Retry-After` of a request in flight, however long the lease may last: most handlers end much sooner.
const MAX_RETRY_AFTER_IN_FLIGHT: Duration = Duration::from_secs(5);

/// The bounds of `Retry-After` for a caller with too many records. At most an hour, because a record may be released before it
/// expires.
const MIN_RETRY_AFTER: Duration = Duration::from_secs(1);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3_600);

/// Begins the operation, and executes, replays or rejects the request.
///
/// `inner` is the service that has reported ready. If the store replies without waiting, the handler is called here. Otherwise
/// the ready service is moved into the future, and a clone takes its place.
pub(super) fn guard<S, K, A, B, R>(
    inner: &mut S,
    request: Request<B>,
    operation: (Operation, RecordBound),
    running: CountGuard,
    shared: Arc<Shared<K, A>>,
) -> DetachableFuture<R, S::Error>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    K: Send + Sync + 'static,
    A: Responder<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let settings = &shared.settings;
    let context = context(settings, operation, &request);
    let admitted = AdmittedRequest { request, running };
    // With `OnDisconnect::Cancel`, start the handler only when the future is polled.
    let is_eager = settings.on_disconnect == OnDisconnect::Finish;
    match context.as_ref().ok().filter(|_| is_eager).and_then(Attempt::try_begin) {
        Some(Ok(ClaimResult::Granted(granted))) => {
            let (execution, handler) = start(settings, granted, admitted, inner);
            if handler.is_none() {
                // A request that is not executed needs no reserved service.
                drop(take_ready(inner));
            }
            DetachableFuture::new(Box::pin(RunHandler::new(execution, handler, shared)), DetachMode::Yes)
        }
        result => {
            let detaches = Arc::<AtomicBool>::default();
            let beginning = begin(take_ready(inner), context, result, admitted, shared, Arc::clone(&detaches));
            DetachableFuture::new(Box::pin(beginning), DetachMode::When(detaches))
        }
    }
}

/// The instance of the inner service that reported ready, with its reserved capacity. Leaves a clone for the next request.
pub(in crate::http) fn take_ready<S: Clone>(inner: &mut S) -> S {
    let fresh = inner.clone();
    mem::replace(inner, fresh)
}

/// Waits for the reply of the store, and executes, replays or rejects the request. `first` is the reply if there is one already.
#[expect(clippy::manual_async_fn, reason = "an `async fn` holds its arguments twice")]
fn begin<S, K, A, B, R>(
    mut ready: S,
    context: Result<Arc<OperationContext<RunningFingerprint>>, StoreError>,
    first: Option<Result<ClaimResult<RunningFingerprint>, StoreError>>,
    admitted: AdmittedRequest<B>,
    shared: Arc<Shared<K, A>>,
    detaches: Arc<AtomicBool>,
) -> impl Future<Output = Answer<R, S::Error>> + Send
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    K: Send + Sync + 'static,
    A: Responder<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    async move {
        let settings = &shared.settings;
        let result = match context {
            Ok(context) => {
                context.begin_or_wait(first, settings.wait, settings.max_waiting).await.map(|result| (result, context))
            }
            Err(error) => Err(error),
        };
        // Boxed to keep this future small during the store call.
        match result {
            Ok((ClaimResult::Granted(granted), _)) => {
                let (execution, handler) = start(settings, granted, admitted, &mut ready);
                detaches.store(settings.on_disconnect == OnDisconnect::Finish, Ordering::Release);
                Box::pin(RunHandler::new(execution, handler, Arc::clone(&shared))).await
            }
            Ok((ClaimResult::NotGranted(begun), context)) => {
                settings.answered();
                Box::pin(replay_or_reject(ready, Ok((begun, context)), admitted, settings, &shared.responder)).await
            }
            Err(error) => Box::pin(replay_or_reject(ready, Err(error), admitted, settings, &shared.responder)).await,
        }
    }
}

pin_project! {
    /// Runs the handler, and returns its response once the record is stored.
    ///
    /// Hand-written, because an `async` block stores a captured future twice, and this future is allocated for each request.
    #[project = RunHandlerProj]
    #[project_replace = RunHandlerReplaced]
    enum RunHandler<F, R, E, K, A> {
        // The handler is running. It is `None` if it was not started.
        Handling { #[pin] handler: Option<F>, execution: Execution, shared: Arc<Shared<K, A>> },
        // The result is being stored.
        Settling { settled: Pin<Box<dyn Future<Output = Answer<R, E>> + Send>> },
        Done,
    }
}

impl<F, R, E, K, A> RunHandler<F, R, E, K, A> {
    fn new(execution: Execution, handler: Option<F>, shared: Arc<Shared<K, A>>) -> Self {
        Self::Handling { handler, execution, shared }
    }
}

impl<F, R, E, K, A> Future for RunHandler<F, R, E, K, A>
where
    F: Future<Output = Result<Response<R>, E>>,
    K: Send + Sync + 'static,
    A: Responder<Rejection, Response<R>, E, Response = Response<IdempotentBody<R>>, Error = E> + Send + Sync + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
    E: Send + 'static,
{
    type Output = Answer<R, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match self.as_mut().project() {
            RunHandlerProj::Handling { handler, execution, .. } => match handler.as_pin_mut() {
                Some(handler) => ready!(execution.poll_under_lease(handler, cx)),
                None => None,
            },
            RunHandlerProj::Settling { settled } => return settled.as_mut().poll(cx),
            RunHandlerProj::Done => None,
        };
        let has_started = matches!(&*self, Self::Handling { handler: Some(_), .. });
        // Drops the handler first.
        let RunHandlerReplaced::Handling { mut execution, shared, .. } = self.as_mut().project_replace(Self::Done)
        else {
            panic!("ResponseFuture polled after completion")
        };
        let Shared { settings, responder, .. } = &*shared;
        let handler_outcome = execution.run_work(|| HandlerOutcome::of(settings, &execution, result));
        if has_started && !matches!(handler_outcome, HandlerOutcome::Streaming(_)) {
            execution.record_handler_time(settings);
        }
        let (outcome, response) = match handler_outcome {
            HandlerOutcome::Complete(outcome, response) => (outcome, response.map_err(|error| responder.error(error))),
            HandlerOutcome::Streaming(start) => {
                return Poll::Ready(Ok(start.stream_rest(execution, Arc::clone(settings))));
            }
            HandlerOutcome::Aborted => {
                return Poll::Ready(reject_aborted(settings, responder, execution.abort(settings), has_started));
            }
        };
        if execution.must_compare_rest(&outcome) {
            let settled = Box::pin(async move {
                let Shared { settings, responder, .. } = &*shared;
                let Some(outcome) = execution.compare_rest(outcome, settings).await else {
                    return reject_aborted(settings, responder, execution.abort(settings), true);
                };
                let (running, settling) = execution.settle(outcome, settings);
                if let Some(settling) = settling {
                    settling.await;
                }
                drop(running);
                response
            });
            self.set(Self::Settling { settled });
            return self.poll(cx);
        }
        let (running, settling) = execution.settle(outcome, settings);
        let Some(settling) = settling else { return Poll::Ready(response) };
        let settled = Box::pin(async move {
            settling.await;
            drop(running);
            response
        });
        self.set(Self::Settling { settled });
        self.poll(cx)
    }
}

/// Rejects the request after its handler was dropped or the response was discarded. An outer layer reads the outcome from the marker.
fn reject_aborted<A, B, R, E>(
    settings: &Settings,
    responder: &A,
    (rejection, outcome): (Rejection, AbortOutcome),
    has_started: bool,
) -> Result<Response<B>, E>
where
    A: Responder<Rejection, Response<R>, E, Response = Response<B>, Error = E>,
{
    let mut rejected = settings.reject(responder, rejection);
    if has_started && let Ok(response) = &mut rejected {
        let abort_marker = AbortMarker::around(None);
        abort_marker.set(outcome);
        response.extensions_mut().remove::<NotExecuted>();
        response.extensions_mut().insert(abort_marker);
    }
    rejected
}

/// The context of a request, with its claim and the state of its body.
fn context<B>(
    settings: &Settings,
    (operation, bound): (Operation, RecordBound),
    request: &Request<B>,
) -> Result<Arc<OperationContext<RunningFingerprint>>, StoreError> {
    let (head, fingerprint) = settings.fingerprints.of(&operation, request, &settings.headers);
    let (lease, retention) = (settings.lease, settings.retention);
    let takes_over = settings.on_unknown == OnUnknown::Retry;
    let claim = Claim { token: Token::random()?, head, lease, retention, takes_over, bound: Some(bound) };
    Ok(OperationContext::new(&settings.coordinator, operation, claim, fingerprint))
}

/// A request, and the guard that counts it as running.
struct AdmittedRequest<B> {
    request: Request<B>,
    running: CountGuard,
}

/// Starts the execution. The handler is `None` if another attempt may have started, or if the body differs from that of the previous
/// attempt.
fn start<S, B>(
    settings: &Settings,
    granted: Granted<RunningFingerprint>,
    admitted: AdmittedRequest<B>,
    ready: &mut S,
) -> (Execution, Option<S::Future>)
where
    S: Service<Request<FingerprintedBody<B>>>,
    B: Body<Data = Bytes> + Send + 'static,
{
    settings.answered();
    let Granted { attempt, fence, number, body_fingerprint, checkpoint } = granted;
    let AdmittedRequest { request, running } = admitted;
    let mut unread = None;
    let mut request = request.map(|body| {
        let (body, rest) =
            FingerprintedBody::new(body, body_fingerprint, settings.max_body, Arc::clone(attempt.context()));
        unread = rest;
        body
    });
    let context = Arc::clone(attempt.context());
    let handle = IdempotencyHandle::new(Arc::clone(&context) as _, number, fence, checkpoint);
    request.extensions_mut().insert(handle);
    let mut execution = Execution::new(attempt, settings, running, unread, has_route(&request));
    // An empty body may already differ from that of the previous attempt.
    if context.body().rejection().is_some() || execution.is_lost() {
        execution.release_on_drop();
        return (execution, None);
    }
    settings.coordinator.metrics().decided(Verdict::Executed);
    let handler = execution.run_work(|| ready.call(request));
    (execution, Some(handler))
}

/// Replays or rejects a request that is not executed. After a store error, calls the inner service without a record if the
/// settings allow it.
async fn replay_or_reject<S, A, B, R>(
    mut ready: S,
    begun: Result<(Begun, Arc<OperationContext<RunningFingerprint>>), StoreError>,
    admitted: AdmittedRequest<B>,
    settings: &Settings,
    responder: &A,
) -> Answer<R, S::Error>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>>,
    A: Responder<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>,
    B: Body<Data = Bytes>,
{
    let AdmittedRequest { request, running: _running } = admitted;
    match begun {
        Ok((begun, context)) => {
            // A replay needs no reserved service.
            drop(ready);
            let recorded = recorded(settings, begun, request, context.body()).await;
            recorded.map(replay).or_else(|rejection| settings.reject(responder, rejection))
        }
        Err(error) if settings.passes(&error) => {
            settings.coordinator.metrics().decided(Verdict::FailedOpen);
            let response = ready.call(request.map(FingerprintedBody::passed)).await;
            response.map(|response| responder.response(response)).map_err(|error| responder.error(error))
        }
        Err(error) => settings.reject(responder, Rejection::Store(error)),
    }
}

/// The stored response for a request that is not executed, or its rejection.
async fn recorded<B>(
    settings: &Settings,
    begun: Begun,
    request: Request<B>,
    fingerprint: &RunningFingerprint,
) -> Result<Recorded, Rejection>
where
    B: Body<Data = Bytes>,
{
    let (recorded, body_fingerprint) = match begun {
        Begun::Completed { body_fingerprint, response, is_kept } => match Recorded::read(Bytes::from_owner(response)) {
            Some(recorded) if is_kept => (Ok(recorded), body_fingerprint),
            Some(recorded) => (Err(Rejection::NotStored { status: recorded.status.as_u16() }), body_fingerprint),
            None => {
                let error = StoreError::foreign_data("a stored response that this version cannot read");
                (Err(Rejection::Store(error)), BodyFingerprint::default())
            }
        },
        Begun::InFlight { remaining, body_fingerprint } => {
            let retry_after = remaining.min(MAX_RETRY_AFTER_IN_FLIGHT);
            (Err(Rejection::InFlight { retry_after }), body_fingerprint)
        }
        Begun::ScopeFull { retry_after } => {
            let (bound, retry_after) = (ScopeBound::Records, retry_after.clamp(MIN_RETRY_AFTER, MAX_RETRY_AFTER));
            (Err(Rejection::ScopeFull { bound, retry_after }), BodyFingerprint::default())
        }
        Begun::Unknown { attempt, body_fingerprint } => (Err(Rejection::OutcomeUnknown { attempt }), body_fingerprint),
        // `Granted` does not reach this function.
        Begun::Mismatch | Begun::Granted { .. } => (Err(Rejection::Mismatch), BodyFingerprint::default()),
    };
    // A different request learns nothing about the first one.
    compare(settings, request, body_fingerprint, fingerprint).await?;
    let recorded = recorded?;
    settings.coordinator.metrics().decided(Verdict::Replayed);
    Ok(recorded)
}

/// Checks that the body of a request matches the fingerprint.
async fn compare<B: Body<Data = Bytes>>(
    settings: &Settings,
    request: Request<B>,
    body_fingerprint: BodyFingerprint,
    fingerprint: &RunningFingerprint,
) -> Result<(), Rejection> {
    match is_same(request.into_body(), &body_fingerprint, fingerprint, settings.compare_timeouts()).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(Rejection::Mismatch),
        Err(CompareError::BrokenOff) => Err(Rejection::Unreadable),
        Err(CompareError::TooSlow) => Err(Rejection::BodyTimeout),
    }
}

fn replay<R>(recorded: Recorded) -> Response<IdempotentBody<R>> {
    let Recorded { status, headers, body, trailers } = recorded;
    let mut chunks = Chunks::default();
    chunks.push(body);
    let mut response = Response::new(IdempotentBody::whole(chunks, trailers));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}
