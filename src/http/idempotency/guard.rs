//! What is done with a request that has a key.

use std::future::Future;
use std::pin::pin;
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
use super::run::{Come, Course};
use super::service::Shared;
use crate::error::{BoxError, StoreError};
use crate::idempotency::{
    Begin, Begun, Claim, Granted, IdempotencyHandle, OnDisconnect, OnUnknown, Operation, Order, Payload, Rejection,
    Running, Verdict,
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
///
/// The future of a request that is served is moved and kept in memory for each of them, so nothing stays in it that is not needed while
/// something is awaited: what need not be is done in functions around it, and what is rare is boxed.
pub(super) fn guard<S, K, A, B, R>(
    mut ready: S,
    request: Request<B>,
    operation: Operation,
    running: Running,
    shared: Arc<Shared<K, A>>,
    backstage: Arc<Backstage>,
) -> impl Future<Output = Answer<R, S::Error>> + Send + use<S, K, A, B, R>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    K: Send + Sync + 'static,
    A: Reject<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let (order, reading) = order(&shared.settings, operation, &request);
    async move {
        let Shared { settings, answer, .. } = &*shared;
        let begun = match order {
            Ok(order) => begin(settings, &order).await,
            Err(error) => Err(error),
        };
        let arrived = Arrived { request, reading, running };
        // Not the other half of what is taken up, which would have to make room for it until the end.
        let mut declined = None;
        let Some((course, handler)) = take_up(settings, begun, arrived, &backstage, &mut ready, &mut declined) else {
            let Some((begun, arrived)) = declined.map(|declined| *declined) else {
                unreachable!("it is one or the other")
            };
            return Box::pin(decline(ready, begun, arrived, settings, answer)).await;
        };
        let served = {
            let mut handler = pin!(handler);
            match handler.as_mut().as_pin_mut() {
                Some(handler) => course.under_lease(handler).await,
                None => None,
            }
        };
        let (settling, answered) = match Come::of(&course, served) {
            Come::Whole(outcome, answered) => (course.settle(outcome), answered),
            Come::Part(start) => return Ok(start.go_on(course)),
            Come::Nothing(rejection) => return settings.reject(answer, rejection),
        };
        drop(settling.await);
        answered.map_err(|error| answer.error(error))
    }
}

/// What the store is asked about a request, and what is going to be known of its body.
fn order<B>(
    settings: &Settings,
    operation: Operation,
    request: &Request<B>,
) -> (Result<Arc<Order>, StoreError>, Arc<Reading>) {
    let (head, reading) = settings.fingerprints.of(&operation, request, &settings.headers);
    let (lease, retention) = (settings.lease, settings.retention);
    let takes_over = settings.on_unknown == OnUnknown::Retry;
    let order = Token::random().map(|token| {
        let claim = Claim { token, head, lease, retention, takes_over };
        Order::new(&settings.home, operation, claim)
    });
    (order, reading)
}

/// A request, what is known of its body, and its place among those that are handled.
struct Arrived<B> {
    request: Request<B>,
    reading: Arc<Reading>,
    running: Running,
}

/// What is in the way of a request.
type Declined<B> = Box<(Result<Begun, StoreError>, Arrived<B>)>;

/// What is known of the operation from now on, and its handler at work, which is `None` if somebody else may have begun meanwhile.
/// Nothing, but what is `declined`, if the operation is not to be begun.
fn take_up<S, B>(
    settings: &Arc<Settings>,
    begun: Result<Begin, StoreError>,
    arrived: Arrived<B>,
    backstage: &Backstage,
    ready: &mut S,
    declined: &mut Option<Declined<B>>,
) -> Option<(Course, Option<S::Future>)>
where
    S: Service<Request<FingerprintedBody<B>>>,
    B: Body,
{
    if begun.is_ok() {
        settings.answered();
    }
    let Granted { attempt, fence, number, payload, checkpoint } = match begun {
        Ok(Begin::Granted(granted)) => granted,
        Ok(Begin::Not(begun)) => {
            *declined = Some(Box::new((Ok(begun), arrived)));
            return None;
        }
        Err(error) => {
            *declined = Some(Box::new((Err(error), arrived)));
            return None;
        }
    };
    let Arrived { request, reading, running } = arrived;
    let mut request = request.map(|body| FingerprintedBody::new(body, payload, Arc::clone(&reading)));
    let handle = IdempotencyHandle::new(&attempt, number, fence, checkpoint, Arc::clone(&reading) as _);
    request.extensions_mut().insert(handle);
    settings.home.meters().decided(Verdict::Executed);
    if settings.on_disconnect == OnDisconnect::Finish {
        backstage.open();
    }
    let course = Course::new(attempt, reading, Arc::clone(settings), running);
    let handler = (!course.is_lost()).then(|| ready.call(request));
    Some((course, handler))
}

/// Answers a request that has nothing to be begun: out of the record, or without one if the store fails and that may be.
async fn decline<S, A, B, R>(
    mut ready: S,
    begun: Result<Begun, StoreError>,
    arrived: Arrived<B>,
    settings: &Settings,
    answer: &A,
) -> Answer<R, S::Error>
where
    S: Service<Request<FingerprintedBody<B>>, Response = Response<R>>,
    A: Reject<Rejection, Response<R>, S::Error, Response = Response<IdempotentBody<R>>, Error = S::Error>,
    B: Body<Data = Bytes>,
{
    let Arrived { request, reading, running: _running } = arrived;
    match begun {
        Ok(begun) => {
            // Whoever asks for it needs no place in the inner service.
            drop(ready);
            let recorded = recorded(settings, begun, request, &reading).await;
            recorded.map(replay).or_else(|rejection| settings.reject(answer, rejection))
        }
        Err(error) if settings.passes(&error) => {
            settings.home.meters().decided(Verdict::FailedOpen);
            let response = ready.call(request.map(FingerprintedBody::passed)).await;
            response.map(|response| answer.response(response)).map_err(|error| answer.error(error))
        }
        Err(error) => settings.reject(answer, Rejection::Store(error)),
    }
}

/// The answer to a request that is not served again, or what is in the way.
async fn recorded<B>(
    settings: &Settings,
    begun: Begun,
    request: Request<B>,
    reading: &Reading,
) -> Result<Recorded, Rejection>
where
    B: Body<Data = Bytes>,
{
    let (recorded, payload) = match begun {
        Begun::Completed { payload, answer, is_kept } => match Recorded::read(Bytes::from_owner(answer)) {
            Some(recorded) if is_kept => (Ok(recorded), payload),
            Some(recorded) => (Err(Rejection::NotKept { status: recorded.status.as_u16() }), payload),
            None => {
                let error = StoreError::foreign_data("an answer that this version cannot read");
                (Err(Rejection::Store(error)), Payload::default())
            }
        },
        Begun::InFlight { remaining, payload } => {
            let retry_after = remaining.min(LONGEST_WAIT);
            (Err(Rejection::InFlight { retry_after }), payload)
        }
        Begun::Unknown { attempt, payload } => (Err(Rejection::OutcomeUnknown { attempt }), payload),
        // `Granted` is no refusal.
        Begun::Mismatch | Begun::Granted { .. } => (Err(Rejection::Mismatch), Payload::default()),
    };
    // Who sends something else learns nothing about the first request.
    compare(settings, request, payload, reading).await?;
    let recorded = recorded?;
    settings.home.meters().decided(Verdict::Replayed);
    Ok(recorded)
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
async fn compare<B: Body<Data = Bytes>>(
    settings: &Settings,
    request: Request<B>,
    payload: Payload,
    reading: &Reading,
) -> Result<(), Rejection> {
    match timeout(settings.body_timeout, is_same(request.into_body(), &payload, reading)).await {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => Err(Rejection::Mismatch),
        Ok(Err(_)) | Err(_) => Err(Rejection::Unreadable),
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
