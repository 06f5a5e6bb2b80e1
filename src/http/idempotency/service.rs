use std::fmt;
use std::future::Future;
use std::mem;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::{HeaderName, HeaderValue, Request, Response};
use bytes::Bytes;
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tower_service::Service;
use tracing::Instrument as _;

use super::answer::Recorded;
use super::body::{AbortOnDrop, IdempotentBody};
use super::fingerprint::{FingerprintedBody, is_same};
use super::key::key_of;
use super::layer::{IdempotencyLayer, Settings};
use super::run::run;
use crate::error::{BoxError, StoreError};
use crate::idempotency::{
    Begin, Begun, Claim, IdempotencyHandle, OnDisconnect, OnMissingKey, OnUnknown, Operation, Payload, Rejection,
};
use crate::key::ExtractKey;
use crate::lock::Token;
use crate::reject::{AsResponse, Reject};

/// What a response out of a record carries.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// A client is not told to wait for longer than this, however long the lease may last: most handlers are done much sooner.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How long to wait before the store is asked again for the answer of somebody else; half as much again the next time.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A service that serves the same request once. See the [module docs](crate::idempotency) for examples.
///
/// Ready when the inner service is: which operation a request belongs to is known only once it is there. The inner service that
/// reported ready is held while the store is asked; a request that is not served gives it back unused.
#[must_use]
pub struct Idempotency<S, K, A = AsResponse> {
    inner: S,
    shared: Arc<(Arc<Settings>, Arc<K>, A)>,
}

impl<S, K, A> Idempotency<S, K, A> {
    /// Puts `inner` behind `layer`, without a stack of layers.
    pub fn new(inner: S, layer: IdempotencyLayer<K, A>) -> Self {
        let (settings, scope, answer) = layer.into_parts();
        Self { inner, shared: Arc::new((Arc::new(settings), scope, answer)) }
    }

    /// The service behind the layer.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service behind the layer, to change.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Takes the service out from behind the layer.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, K, A, B, R> Service<Request<B>> for Idempotency<S, K, A>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    K: ExtractKey<Request<B>> + Send + Sync + 'static,
    A: Reject<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<IdempotentBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error, A, K>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        let (settings, scope, answer) = &*shared;
        if !settings.methods.contains(request.method()) {
            return ResponseFuture::passed_through(self.inner.call(request.map(FingerprintedBody::passed)), shared);
        }
        let rejection = match key_of(request.headers(), &settings.header) {
            Ok(Some(key)) => match scope.extract_key(&request).filter(|scope| !scope.is_empty()) {
                Some(scope) => {
                    let answer = guard(self.take_ready(), request, Operation::new(scope, key), shared);
                    return ResponseFuture { state: State::Guarded { answer: Box::pin(answer) } };
                }
                None => Rejection::MissingScope,
            },
            Ok(None) if settings.on_missing_key == OnMissingKey::Pass => {
                return ResponseFuture::passed_through(self.inner.call(request.map(FingerprintedBody::passed)), shared);
            }
            Ok(None) => Rejection::MissingKey,
            Err(invalid) => Rejection::InvalidKey(invalid),
        };
        drop(self.take_ready());
        ResponseFuture { state: State::Rejected { answer: Some(answer.reject(rejection)) } }
    }
}

impl<S: Clone, K, A> Idempotency<S, K, A> {
    /// The instance of the inner service that reported ready, with the place that it may have reserved. Leaves a clone for the next time.
    fn take_ready(&mut self) -> S {
        let fresh = self.inner.clone();
        mem::replace(&mut self.inner, fresh)
    }
}

/// Finds out how far the operation is, and does what follows from that.
async fn guard<S, K, A, B, R>(
    ready: S,
    request: Request<B>,
    operation: Operation,
    shared: Arc<(Arc<Settings>, Arc<K>, A)>,
) -> Result<Response<IdempotentBody<R>>, S::Error>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    A: Reject<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let (settings, _, answer) = &*shared;
    let mut ready = ready;
    let Some(running) = settings.home.admit(settings.max_running) else {
        return answer.reject(Rejection::Full);
    };
    let (head, mac) = settings.fingerprints.of(&operation, &request, &settings.headers);
    let begun = match Token::random() {
        Ok(token) => {
            let (lease, retention) = (settings.lease, settings.retention);
            let takes_over = settings.on_unknown == OnUnknown::Retry;
            begin(settings, operation, Claim { token, head, lease, retention, takes_over }).await
        }
        Err(error) => Err(error),
    };
    let (rejection, payload) = match begun {
        Ok(Begin::Granted { attempt, fence, number }) => {
            settings.answered();
            let (parts, body) = request.into_parts();
            let (body, reading) = FingerprintedBody::new(body, mac);
            let mut request = Request::from_parts(parts, body);
            request.extensions_mut().insert(IdempotencyHandle::new(*attempt.operation(), number, fence));
            let (tell, told) = oneshot::channel();
            let run = run(ready, request, attempt, reading, Arc::clone(settings), tell, running);
            // Boxed, since it is large, and would be moved from hand to hand on its way into the task.
            let task = tokio::spawn(Box::pin(run).in_current_span());
            let cancels = settings.on_disconnect == OnDisconnect::Cancel;
            let abort = cancels.then(|| AbortOnDrop(task.abort_handle()));
            return match told.await {
                Ok(Ok(mut response)) => {
                    if let Some(abort) = abort {
                        response.body_mut().aborts(abort);
                    }
                    Ok(response)
                }
                Ok(Err(error)) => Err(answer.error(error)),
                Err(_) => match task.await {
                    // As it would be without this layer.
                    Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
                    Ok(()) | Err(_) => answer.reject(Rejection::Cancelled),
                },
            };
        }
        Ok(Begin::Not(begun)) => {
            settings.answered();
            match begun {
                Begun::Completed { payload, answer: bytes, is_kept } => {
                    match Recorded::read(Bytes::from_owner(bytes)) {
                        Some(recorded) if is_kept => {
                            // Whoever asks for it needs no place in the inner service.
                            drop(ready);
                            return match compare(settings, request, &payload, mac).await {
                                None => Ok(replay(recorded)),
                                Some(rejection) => answer.reject(rejection),
                            };
                        }
                        Some(recorded) => (Rejection::NotKept { status: recorded.status.as_u16() }, payload),
                        None => {
                            let error = StoreError::foreign_data("an answer that this version cannot read");
                            (Rejection::Store(error), Payload::default())
                        }
                    }
                }
                Begun::InFlight { remaining, payload } => {
                    let retry_after = remaining.min(LONGEST_WAIT);
                    (Rejection::InFlight { retry_after }, payload)
                }
                Begun::Unknown { attempt, payload } => (Rejection::OutcomeUnknown { attempt }, payload),
                // `Granted` is no refusal.
                Begun::Mismatch | Begun::Granted { .. } => (Rejection::Mismatch, Payload::default()),
            }
        }
        Err(error) if settings.passes(&error) => {
            let response = ready.call(request.map(FingerprintedBody::passed)).await;
            return response.map(|response| answer.response(response)).map_err(|error| answer.error(error));
        }
        Err(error) => (Rejection::Store(error), Payload::default()),
    };
    drop(ready);
    // Who sends something else learns nothing about the first request.
    let other = compare(settings, request, &payload, mac).await;
    answer.reject(other.unwrap_or(rejection))
}

/// Begins the operation, or waits for whoever does it.
async fn begin(settings: &Settings, operation: Operation, claim: Claim) -> Result<Begin, StoreError> {
    let (until, mut pause) = (Instant::now() + settings.wait, FIRST_PAUSE);
    loop {
        let begun = settings.home.begin(operation, claim).await?;
        let left = until.saturating_duration_since(Instant::now());
        if !matches!(begun, Begin::Not(Begun::InFlight { .. })) || left.is_zero() {
            return Ok(begun);
        }
        sleep(pause.min(left)).await;
        pause = (pause + pause / 2).min(LONGEST_PAUSE);
    }
}

/// What is wrong with a request that should have this body.
async fn compare<B: Body<Data = Bytes>>(
    settings: &Settings,
    request: Request<B>,
    payload: &Payload,
    mac: hmac::Hmac<sha2::Sha256>,
) -> Option<Rejection> {
    match timeout(settings.body_timeout, is_same(request.into_body(), payload, mac)).await {
        Ok(Ok(true)) => None,
        Ok(Ok(false)) => Some(Rejection::Mismatch),
        Ok(Err(_)) | Err(_) => Some(Rejection::Unreadable),
    }
}

fn replay<R>(recorded: Recorded) -> Response<IdempotentBody<R>> {
    let Recorded { status, headers, body, trailers } = recorded;
    let chunks = (!body.is_empty()).then_some(body).into_iter().collect();
    let mut response = Response::new(IdempotentBody::whole(chunks, trailers));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

// By hand: `derive` would ask for more than the inner service to be `Clone`.
impl<S: Clone, K, A> Clone for Idempotency<S, K, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, K, A> fmt::Debug for Idempotency<S, K, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.0.describe::<K>(f, "Idempotency")
    }
}

type Answer<R, E> = Result<Response<IdempotentBody<R>>, E>;

pin_project! {
    /// The answer of a service that serves the same request once. Dropping it lets a handler that has begun
    /// [finish](crate::idempotency::OnDisconnect) in the background.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<F, R, E, A, K> {
        #[pin]
        state: State<F, R, E, A, K>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, R, E, A, K> {
        // The request needs no record: the inner service is at work.
        Passed { #[pin] future: F, shared: Arc<(Arc<Settings>, Arc<K>, A)> },
        // The store is asked, or the handler is at work in a task of its own.
        Guarded { answer: Pin<Box<dyn Future<Output = Answer<R, E>> + Send>> },
        // The request is turned away without asking anybody; `None` once that was told.
        Rejected { answer: Option<Answer<R, E>> },
    }
}

impl<F, R, E, A, K> ResponseFuture<F, R, E, A, K> {
    fn passed_through(future: F, shared: Arc<(Arc<Settings>, Arc<K>, A)>) -> Self {
        Self { state: State::Passed { future, shared } }
    }
}

impl<F, R, E, A, K> Future for ResponseFuture<F, R, E, A, K>
where
    F: Future<Output = Result<Response<R>, E>>,
    A: Reject<Rejection, Response<R>, E, Response = Response<IdempotentBody<R>>, Error = E>,
{
    type Output = Answer<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Passed { future, shared } => {
                let (_, _, answer) = &**shared;
                let response = std::task::ready!(future.poll(cx));
                Poll::Ready(response.map(|response| answer.response(response)).map_err(|error| answer.error(error)))
            }
            StateProj::Guarded { answer } => answer.as_mut().poll(cx),
            StateProj::Rejected { answer } => {
                Poll::Ready(answer.take().expect("ResponseFuture polled after completion"))
            }
        }
    }
}

impl<F, R, E, A, K> fmt::Debug for ResponseFuture<F, R, E, A, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
