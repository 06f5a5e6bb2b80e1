//! What is done with a request that has a key.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use ::http::{HeaderName, HeaderValue, Request, Response};
use bytes::Bytes;
use http_body::Body;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tower_service::Service;

use super::answer::Recorded;
use super::body::{Chunks, IdempotentBody};
use super::fingerprint::{FingerprintedBody, Reading, is_same};
use super::future::{Answer, Backstage};
use super::layer::Settings;
use super::run::{Course, keep};
use super::service::Shared;
use crate::error::{BoxError, StoreError};
use crate::idempotency::{
    Begin, Begun, Claim, Granted, IdempotencyHandle, OnDisconnect, OnUnknown, Operation, Order, Payload, Rejection,
    Verdict,
};
use crate::lock::{Token, Wakeups};
use crate::reject::Reject;

/// What a response out of a record carries.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// A client is not told to wait for longer than this, however long the lease may last: most handlers are done much sooner.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How often whoever waits looks, whether or not something was heard.
const POLL: Duration = Duration::from_secs(1);
/// A lease that is about to end is about to be renewed, more often than not.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);

/// Finds out how far the operation is, and does what follows from that.
pub(super) async fn guard<S, K, A, B, R>(
    mut ready: S,
    request: Request<B>,
    operation: Operation,
    shared: Arc<Shared<K, A>>,
    backstage: Arc<Backstage>,
) -> Answer<R, S::Error>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    A: Reject<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let Shared { settings, answer, .. } = &*shared;
    let reject = |rejection| settings.reject(answer, rejection);
    let Some(running) = settings.home.admit(settings.max_running) else {
        return reject(Rejection::Full);
    };
    let (head, reading) = settings.fingerprints.of(&operation, &request, &settings.headers);
    let begun = match Token::random() {
        Ok(token) => {
            let (lease, retention) = (settings.lease, settings.retention);
            let takes_over = settings.on_unknown == OnUnknown::Retry;
            let claim = Claim { token, head, lease, retention, takes_over };
            begin(settings, &Order::new(&settings.home, operation, claim)).await
        }
        Err(error) => Err(error),
    };
    let (rejection, payload) = match begun {
        Ok(Begin::Granted(Granted { attempt, fence, number, payload, checkpoint })) => {
            settings.answered();
            let (parts, body) = request.into_parts();
            let body = FingerprintedBody::new(body, payload, Arc::clone(&reading));
            let mut request = Request::from_parts(parts, body);
            let handle = IdempotencyHandle::new(&attempt, number, fence, checkpoint, Arc::clone(&reading) as _);
            request.extensions_mut().insert(handle);
            settings.home.meters().decided(Verdict::Executed);
            if settings.on_disconnect == OnDisconnect::Finish {
                backstage.open();
            }
            let course = Course::new(attempt, reading, Arc::clone(settings), running);
            let served = if course.is_lost() { None } else { course.under_lease(pin!(ready.call(request))).await };
            return match keep(course, served).await {
                Ok(answered) => answered.map_err(|error| answer.error(error)),
                Err(rejection) => reject(rejection),
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
                            return match compare(settings, request, payload, &reading).await {
                                None => {
                                    settings.home.meters().decided(Verdict::Replayed);
                                    Ok(replay(recorded))
                                }
                                Some(rejection) => reject(rejection),
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
            settings.home.meters().decided(Verdict::FailedOpen);
            let response = Box::pin(ready.call(request.map(FingerprintedBody::passed))).await;
            return response.map(|response| answer.response(response)).map_err(|error| answer.error(error));
        }
        Err(error) => (Rejection::Store(error), Payload::default()),
    };
    drop(ready);
    // Who sends something else learns nothing about the first request.
    let other = compare(settings, request, payload, &reading).await;
    reject(other.unwrap_or(rejection))
}

/// Begins the operation, or waits for whoever does it.
async fn begin(settings: &Settings, order: &Arc<Order>) -> Result<Begin, StoreError> {
    let begun = order.begin().await?;
    if settings.wait.is_zero() || !matches!(begun, Begin::Not(Begun::InFlight { .. })) {
        return Ok(begun);
    }
    let Some(_place) = settings.home.stand_by(settings.max_waiting) else { return Ok(begun) };
    let start = Instant::now();
    let begun = Box::pin(wait(order, start + settings.wait)).await;
    settings.home.meters().waited(start.elapsed());
    begun
}

/// Begins the operation once somebody else is done with it.
async fn wait(order: &Arc<Order>, until: Instant) -> Result<Begin, StoreError> {
    // What comes to pass before anybody listens is found by asking again.
    let watch = timeout_at(until.min(Instant::now() + POLL), order.watch());
    let mut wakeups = watch.await.unwrap_or_else(|_| Wakeups::none());
    loop {
        let begun = order.begin().await?;
        let Begin::Not(Begun::InFlight { remaining, .. }) = &begun else { return Ok(begun) };
        let now = Instant::now();
        if now >= until {
            return Ok(begun);
        }
        // When the lease ends without a word nobody tells.
        let pause = (*remaining).clamp(SHORTEST_PAUSE, POLL);
        tokio::select! {
            () = wakeups.next() => {}
            () = sleep_until(until.min(now + pause)) => {}
        }
    }
}

/// What is wrong with a request that should have this body.
///
/// Boxed, as is all else that most of those who are served do not get to: they would carry it along.
fn compare<'a, B: Body<Data = Bytes> + Send + 'a>(
    settings: &Settings,
    request: Request<B>,
    payload: Payload,
    reading: &'a Reading,
) -> Pin<Box<dyn Future<Output = Option<Rejection>> + Send + 'a>> {
    let (limit, body) = (settings.body_timeout, request.into_body());
    Box::pin(async move {
        match timeout(limit, is_same(body, &payload, reading)).await {
            Ok(Ok(true)) => None,
            Ok(Ok(false)) => Some(Rejection::Mismatch),
            Ok(Err(_)) | Err(_) => Some(Rejection::Unreadable),
        }
    })
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
