//! `LockLayer` around services: which requests pass, when they pass, and when the next request does.

use std::convert::Infallible;
use std::future::{Ready, pending, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::http::{header, lock_fence};
use tollgate::lock::fencing::{Fence, FenceLayer, MissingFence};
use tollgate::lock::{
    CircuitBreaker, LeaseHandle, LeaseState, LockAdmin, LossReason, MissingKey, OnLoss, ReleaseAt, Replication,
    RwLocks, Semaphore,
};
use tollgate::responder::BusyStatus;
use tollgate::testing::{Failure, FaultStore};
use tollgate::{
    BoxError, ConfigError, ErrorResponder, GlobalKey, HttpResponder, LockError, LockLayer, Locks, MemoryBackend,
    OnMissingKey, OnStoreError, Reach, first_of,
};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

/// A layer that locks the path of a request.
type ByPath = LockLayer<fn(&Request<Full<Bytes>>) -> String>;

fn by_path() -> ByPath {
    on(MemoryBackend::new())
}

fn on(store: impl tollgate::lock::store::LockStore + Send + Sync + 'static) -> ByPath {
    LockLayer::new(store, "requests").key(|request| request.uri().path().to_owned())
}

fn request(method: Method, path: &str) -> Request<Full<Bytes>> {
    Request::builder().method(method).uri(path).body(Full::default()).unwrap()
}

fn post(path: &str) -> Request<Full<Bytes>> {
    request(Method::POST, path)
}

/// The safe methods.
const SAFE: [Method; 4] = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE];

/// A handler that takes a second.
async fn slow(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    sleep(Duration::from_secs(1)).await;
    Ok(Response::new("done".into()))
}

async fn quick(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new("done".into()))
}

#[tokio::test(start_paused = true)]
async fn one_request_runs_and_others_get_retry_after() {
    let service = by_path().layer(service_fn(slow));
    let first = tokio::spawn(service.clone().oneshot(post("/a")));
    tokio::task::yield_now().await;
    let response = service.clone().oneshot(post("/a")).await.unwrap();
    assert_eq!(response.status(), StatusCode::CONFLICT);
    assert_eq!(response.headers()["retry-after"], "5");
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["status"], 409);
    assert_eq!(body["type"], "urn:tollgate:lock:busy");
    assert_eq!(body["title"], "Lock is in use");
    assert!(!body.to_string().contains("/a"), "the response contains the key: {body}");
    // Requests with another key, and safe methods, pass.
    assert_eq!(service.clone().oneshot(post("/b")).await.unwrap().status(), StatusCode::OK);
    for safe in SAFE {
        let response = service.clone().oneshot(request(safe.clone(), "/a")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{safe}");
    }
    let body = first.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "done");
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn safe_methods_can_require_the_lock() {
    let service = by_path().lock_safe_methods(true).layer(service_fn(slow));
    for first in [Method::POST, Method::GET] {
        let first = tokio::spawn(service.clone().oneshot(request(first, "/a")));
        tokio::task::yield_now().await;
        for safe in SAFE {
            let response = service.clone().oneshot(request(safe.clone(), "/a")).await.unwrap();
            assert_eq!(response.status(), StatusCode::CONFLICT, "{safe}");
        }
        let response = first.await.unwrap().unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn busy_response_has_the_chosen_status() {
    let presets = [
        (BusyStatus::Conflict, StatusCode::CONFLICT),
        (BusyStatus::Locked, StatusCode::LOCKED),
        (BusyStatus::TooManyRequests, StatusCode::TOO_MANY_REQUESTS),
    ];
    for (preset, status) in presets {
        let layer = by_path().responder(HttpResponder::new().busy(preset));
        let service = layer.layer(service_fn(slow));
        let _first = tokio::spawn(service.clone().oneshot(post("/a")));
        tokio::task::yield_now().await;
        assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), status);
    }
}

/// By the status alone, a client cannot tell a full queue from a store error, or a held lock from a conflict in the handler.
#[tokio::test(start_paused = true)]
async fn each_rejection_has_its_own_problem_type() {
    async fn problem<B>(response: Response<B>) -> (u16, String)
    where
        B: Body<Data = Bytes>,
        B::Error: std::fmt::Debug,
    {
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["status"], status.as_u16());
        assert_ne!(body["title"], status.canonical_reason().unwrap());
        (status.as_u16(), body["type"].as_str().unwrap().to_owned())
    }
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let layer = on(store).max_hold(Duration::from_millis(500));
    let service = layer.clone().layer(service_fn(slow));
    let ask = |layer: ByPath| layer.layer(service_fn(slow)).oneshot(post("/a"));

    let first = tokio::spawn(service.oneshot(post("/a")));
    tokio::task::yield_now().await;
    let busy = ask(layer.clone()).await.unwrap();
    assert_eq!(problem(busy).await, (409, "urn:tollgate:lock:busy".into()));
    let full = ask(layer.clone().wait(Duration::from_secs(1)).max_waiters(0)).await.unwrap();
    assert_eq!(problem(full).await, (503, "urn:tollgate:lock:queue-full".into()));
    let lost = first.await.unwrap().unwrap();
    assert_eq!(problem(lost).await, (503, "urn:tollgate:lock:lost".into()));
    faults.fail(Failure::Unavailable);
    let failed = ask(layer.clone()).await.unwrap();
    assert_eq!(problem(failed).await, (503, "urn:tollgate:lock:unavailable".into()));
    faults.heal();
    layer.shutdown().await;
    let closed = ask(layer).await.unwrap();
    assert_eq!(problem(closed).await, (503, "urn:tollgate:lock:unavailable".into()));
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_are_bounded() {
    let layer = by_path().wait(Duration::from_millis(2_500)).max_waiters(3);
    let service = layer.layer(service_fn(slow));
    let start = Instant::now();
    let mut requests = Vec::new();
    for _ in 0..5 {
        let request = service.clone().oneshot(post("/a"));
        requests.push(tokio::spawn(async move {
            let response = request.await.unwrap();
            let status = response.status();
            response.into_body().collect().await.unwrap();
            (status, start.elapsed().as_millis() / 500)
        }));
        tokio::task::yield_now().await;
    }
    let mut outcomes = Vec::new();
    for request in requests {
        outcomes.push(request.await.unwrap());
    }
    let expected = [
        (StatusCode::OK, 2),
        (StatusCode::OK, 4),
        (StatusCode::OK, 6),
        // Its wait is over.
        (StatusCode::CONFLICT, 5),
        // The queue is full.
        (StatusCode::SERVICE_UNAVAILABLE, 0),
    ];
    assert_eq!(outcomes, expected);
}

/// A body that a test sends frame by frame.
struct Stream(mpsc::UnboundedReceiver<Result<&'static str, BoxError>>);

impl Body for Stream {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame =
            |frame: Result<&'static str, BoxError>| frame.map(|text| Frame::data(Bytes::from_static(text.as_bytes())));
        self.0.poll_recv(cx).map(|next| next.map(frame))
    }
}

type Sender = mpsc::UnboundedSender<Result<&'static str, BoxError>>;

/// A service that responds at once, and the senders of its response bodies.
fn streaming(layer: &ByPath) -> (impl Fn() -> Option<Sender> + use<>, StreamService) {
    let senders = Arc::default();
    let service = layer.layer(service_fn(streams(&senders))).boxed_clone();
    (move || senders.lock().unwrap().pop(), service)
}

/// A handler that responds with streams and keeps their senders.
fn streams(kept: &Arc<Mutex<Vec<Sender>>>) -> impl Fn(Request<Full<Bytes>>) -> Ready<Streamed> + Clone + Send + use<> {
    let kept = Arc::clone(kept);
    move |_| {
        let (sender, receiver) = mpsc::unbounded_channel();
        kept.lock().unwrap().push(sender);
        ready(Ok(Response::new(Stream(receiver))))
    }
}

type Streamed = Result<Response<Stream>, Infallible>;
type StreamService =
    tower::util::BoxCloneService<Request<Full<Bytes>>, Response<tollgate::http::LockedBody<Stream>>, Infallible>;

#[tokio::test(start_paused = true)]
async fn lock_is_held_until_the_body_ends() {
    for end in ["ends", "fails", "is dropped"] {
        let (sender, service) = streaming(&by_path());
        let mut body = service.clone().oneshot(post("/a")).await.unwrap().into_body();
        let sender = sender().unwrap();
        sender.send(Ok("some")).unwrap();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "some");
        let status = service.clone().oneshot(post("/a")).await.unwrap().status();
        assert_eq!(status, StatusCode::CONFLICT, "before it {end}");
        match end {
            "ends" => {
                drop(sender);
                assert!(body.frame().await.is_none());
            }
            "fails" => {
                sender.send(Err("broken".into())).unwrap();
                assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "broken");
            }
            _ => drop(body),
        }
        let status = service.clone().oneshot(post("/a")).await.unwrap().status();
        assert_eq!(status, StatusCode::OK, "after it {end}");
    }
    // With `HandlerDone`, the lock is held only while the handler runs.
    let (_, service) = streaming(&by_path().release_at(ReleaseAt::HandlerDone));
    let _body = service.clone().oneshot(post("/a")).await.unwrap().into_body();
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
}

/// Sets a flag when it is dropped.
struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn lost_lease_cancels_the_handler() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let is_dropped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_dropped);
    let service = on(store).ttl(Duration::from_secs(3)).layer(service_fn(move |_| {
        let guard = OnDrop(Arc::clone(&flag));
        async move {
            pending::<()>().await;
            drop(guard);
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    let start = Instant::now();
    let response = tokio::spawn(service.oneshot(post("/a")));
    sleep(Duration::from_secs(10)).await;
    assert!(!response.is_finished(), "the lease is renewed");
    faults.fail(Failure::Unavailable);
    let response = response.await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(!response.headers().contains_key("retry-after"), "the handler may have had effects");
    assert!(is_dropped.load(Ordering::SeqCst));
    assert!(start.elapsed() < Duration::from_secs(13), "{:?}", start.elapsed());
}

/// With `OnLoss::Notify`, the handler is notified and continues.
#[tokio::test(start_paused = true)]
async fn notified_handler_survives_a_loss() {
    async fn stubborn(request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
        let lease = request.extensions().get::<LeaseHandle>().unwrap().clone();
        let lost = lease.lost().await;
        sleep(Duration::from_secs(60)).await;
        assert!(lease.check().is_err());
        Ok(Response::new(format!("{:?}", lost.reason()).into()))
    }
    let layer = by_path().max_hold(Duration::from_secs(2)).on_loss(OnLoss::Notify);
    let (attached, detached) =
        (layer.clone().layer(service_fn(stubborn)), layer.detached().layer(service_fn(stubborn)));
    let start = Instant::now();
    let (attached, detached) = tokio::join!(attached.oneshot(post("/a")), detached.oneshot(post("/b")));
    assert_eq!(start.elapsed().as_secs(), 62);
    for body in [attached.unwrap().into_body().collect().await, detached.unwrap().into_body().collect().await] {
        assert_eq!(body.unwrap().to_bytes(), "MaxHold");
    }
}

/// A handler behind a layer has no other way to see that its lease is about to end.
#[tokio::test(start_paused = true)]
async fn handler_sees_the_state_of_its_lease() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let service = on(store).ttl(Duration::from_secs(3)).layer(service_fn(move |request: Request<Full<Bytes>>| {
        let (lease, faults) = (request.extensions().get::<LeaseHandle>().unwrap().clone(), faults.clone());
        async move {
            assert_eq!(lease.state(), LeaseState::Held);
            faults.fail(Failure::Unavailable);
            sleep(Duration::from_millis(1_500)).await;
            assert_eq!(lease.state(), LeaseState::Suspended);
            assert!(lease.check().is_ok());
            faults.heal();
            sleep(Duration::from_secs(3)).await;
            assert_eq!(lease.state(), LeaseState::Held);
            let mut response = Response::new(Full::<Bytes>::from("done"));
            response.extensions_mut().insert(lease);
            Ok::<_, Infallible>(response)
        }
    }));
    let response = service.oneshot(post("/a")).await.unwrap();
    let lease = response.extensions().get::<LeaseHandle>().unwrap().clone();
    assert_eq!(lease.state(), LeaseState::Held);
    drop(response);
    assert_eq!(lease.state(), LeaseState::Lost, "the lease was released");
}

#[tokio::test(start_paused = true)]
async fn body_fails_if_its_lease_is_lost() {
    let (sender, service) = streaming(&by_path().max_hold(Duration::from_secs(2)));
    let mut body = service.clone().oneshot(post("/a")).await.unwrap().into_body();
    let sender = sender().unwrap();
    sender.send(Ok("some")).unwrap();
    body.frame().await.unwrap().unwrap();
    let error = body.frame().await.unwrap().unwrap_err();
    assert_eq!(error.downcast::<tollgate::lock::Lost>().unwrap().reason(), LossReason::MaxHold);
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);

    // With `OnLoss::Notify`, the body continues.
    let (sender, service) = streaming(&by_path().max_hold(Duration::from_secs(2)).on_loss(OnLoss::Notify));
    let mut body = service.oneshot(post("/a")).await.unwrap().into_body();
    let sender = sender().unwrap();
    sleep(Duration::from_secs(3)).await;
    sender.send(Ok("more")).unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "more");
}

/// Regression: the handler was refused the lost lock as if it still held it.
#[tokio::test(start_paused = true)]
async fn handler_can_take_a_lost_lock_again() {
    let locks = Locks::new(MemoryBackend::new(), "default").ttl(Duration::from_secs(1));
    let inner = locks.clone();
    let layer = LockLayer::with_locks(locks).max_hold(Duration::from_millis(20)).on_loss(OnLoss::Notify);
    let service = layer.key(|_: &Request<Full<Bytes>>| "a").layer(service_fn(move |request: Request<Full<Bytes>>| {
        let (locks, view) = (inner.clone(), request.extensions().get::<LeaseHandle>().unwrap().clone());
        async move {
            assert!(matches!(locks.lock("a").await, Err(LockError::Nested(_))));
            view.lost().await;
            // The store keeps the lease until it expires.
            let lease = locks.lock("a").wait(Duration::from_secs(2)).await.unwrap();
            assert!(lease.fence() > view.fence());
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    assert_eq!(service.oneshot(post("/")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn lease_handle_of_a_request_keeps_no_lock() {
    let views = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&views);
    let service = by_path().layer(service_fn(move |request: Request<Full<Bytes>>| {
        let view = request.extensions().get::<LeaseHandle>().unwrap().clone();
        assert!(view.check().is_ok() && view.remaining() > Duration::from_secs(10));
        seen.lock().unwrap().push(view);
        async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
    }));
    for _ in 0..2 {
        assert_eq!(service.clone().oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
    }
    let views = views.lock().unwrap().clone();
    assert!(views[0].fence() < views[1].fence());
    for view in views {
        assert_eq!(view.check().unwrap_err().reason(), LossReason::Released);
        assert!(view.reenter().is_none() && view.remaining().is_zero());
        assert_eq!(timeout(Duration::from_secs(60), view.lost()).await.unwrap().reason(), LossReason::Released);
    }
}

#[tokio::test(start_paused = true)]
async fn handler_that_takes_its_own_lock_gets_nested() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let inner = locks.clone();
    let service = LockLayer::with_locks(locks).key(|_: &Request<Full<Bytes>>| "a").layer(service_fn(
        move |request: Request<Full<Bytes>>| {
            let (locks, view) = (inner.clone(), request.extensions().get::<LeaseHandle>().unwrap().clone());
            async move {
                assert!(matches!(locks.lock("a").await, Err(LockError::Nested(_))));
                // The intended way.
                let lease = view.reenter().unwrap();
                assert_eq!(lease.fence(), view.fence());
                drop(locks.lock("b").await.unwrap());
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        },
    ));
    assert_eq!(service.oneshot(post("/")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn disconnected_client_releases_its_lock() {
    let service = by_path().layer(service_fn(slow));
    let request = timeout(Duration::from_millis(500), service.clone().oneshot(post("/a")));
    assert!(request.await.is_err());
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn detached_handler_finishes_with_its_lock() {
    let finished = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&finished);
    let service = by_path().detached().layer(service_fn(move |request| {
        let count = Arc::clone(&count);
        async move {
            let response = slow(request).await;
            count.fetch_add(1, Ordering::SeqCst);
            response
        }
    }));
    assert!(timeout(Duration::from_millis(500), service.clone().oneshot(post("/a"))).await.is_err());
    sleep(Duration::from_millis(400)).await;
    assert_eq!(service.clone().oneshot(post("/a")).await.unwrap().status(), StatusCode::CONFLICT);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(finished.load(Ordering::SeqCst), 1);
    let response = service.clone().oneshot(post("/a")).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "done");
    assert_eq!(finished.load(Ordering::SeqCst), 2);
    // If the client disconnects, a request without a lock is cancelled, and so is a request that still waits for its lock.
    for layer in [by_path(), by_path().wait(Duration::from_secs(9))] {
        let finished = Arc::clone(&finished);
        let service = layer.detached().layer(service_fn(move |request| {
            let finished = Arc::clone(&finished);
            async move {
                let response = slow(request).await;
                finished.fetch_add(1, Ordering::SeqCst);
                response
            }
        }));
        let _first = tokio::spawn(service.clone().oneshot(post("/a")));
        tokio::task::yield_now().await;
        for request in [request(Method::GET, "/a"), post("/a")] {
            let _ = timeout(Duration::from_millis(500), service.clone().oneshot(request)).await;
        }
        sleep(Duration::from_secs(5)).await;
    }
    assert_eq!(finished.load(Ordering::SeqCst), 4);
}

/// Regression: a request that passed without its lock after a store error was cancelled with its client.
#[tokio::test(start_paused = true)]
async fn detached_handler_finishes_without_its_lock() {
    let store = FaultStore::new(MemoryBackend::new());
    // A refused claim leaves nothing to release. Otherwise `shutdown` would wait for that as well.
    store.faults().fail(Failure::OutOfMemory);
    let layer = on(store).on_store_error(OnStoreError::Allow).detached();
    let finished = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&finished);
    let service = layer.clone().layer(service_fn(move |request| {
        let count = Arc::clone(&count);
        async move {
            let response = slow(request).await;
            count.fetch_add(1, Ordering::SeqCst);
            response
        }
    }));
    for request in [request(Method::GET, "/a"), post("/a")] {
        assert!(timeout(Duration::from_millis(500), service.clone().oneshot(request)).await.is_err());
    }
    assert_eq!(finished.load(Ordering::SeqCst), 0);
    // `shutdown` waits for this handler as for any other.
    layer.shutdown().await;
    assert_eq!(finished.load(Ordering::SeqCst), 1, "the GET needs no lock and is cancelled");
}

/// Regression: the request continued without its client and kept the lock of the outer layer, for as long as that layer allowed.
#[tokio::test(start_paused = true)]
async fn request_without_lock_is_not_detached_with_another() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let outer = LockLayer::with_locks(locks.clone()).key(|_: &Request<_>| "tenant".to_owned()).lock_safe_methods(true);
    let by_order = |request: &Request<_>| (request.uri().path() == "/order").then(|| "order".to_owned());
    let inner = LockLayer::with_locks(locks.clone()).key(by_order).on_missing_key(OnMissingKey::Pass).detached();
    let is_dropped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_dropped);
    let inner = inner.layer(service_fn(move |_: Request<Full<Bytes>>| {
        let guard = OnDrop(Arc::clone(&flag));
        async move {
            pending::<()>().await;
            drop(guard);
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    let second = Duration::from_secs(1);
    for request in [request(Method::GET, "/order"), post("/other")] {
        assert!(timeout(second, outer.clone().layer(inner.clone()).oneshot(request)).await.is_err());
        assert!(is_dropped.swap(false, Ordering::SeqCst));
        drop(locks.try_lock("tenant").await.unwrap());
    }
    let within = locks.run("tenant", async |_| inner.clone().oneshot(request(Method::GET, "/order")).await);
    assert!(timeout(second, within).await.is_err());
    assert!(is_dropped.swap(false, Ordering::SeqCst));
    drop(locks.try_lock("tenant").await.unwrap());
    // A request with a lock of its own continues detached, with that lock.
    assert!(timeout(second, outer.layer(inner).oneshot(post("/order"))).await.is_err());
    assert!(!is_dropped.load(Ordering::SeqCst));
    assert!(locks.try_lock("order").await.is_err_and(|error| error.is_busy()));
}

/// Regression: after the client had disconnected, the tenant's lock was released with the request while the handler continued. So two
/// handlers of one tenant could run at the same time.
#[tokio::test(start_paused = true)]
async fn detached_handler_keeps_the_outer_locks() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let outer = LockLayer::with_locks(locks.clone()).key(|_: &Request<_>| "tenant".to_owned());
    let inner = LockLayer::with_locks(locks.clone()).key(|_: &Request<_>| "order".to_owned()).detached();
    let inner = inner.layer(service_fn(slow));
    let nearly = Duration::from_millis(900);
    let start = Instant::now();
    assert!(timeout(nearly, outer.layer(inner.clone()).oneshot(post("/"))).await.is_err());
    assert!(locks.try_lock("tenant").await.is_err_and(|error| error.is_busy()));
    drop(locks.lock("tenant").await.unwrap());
    assert_eq!(start.elapsed(), Duration::from_secs(1));

    let within = locks.run("tenant", async |_| inner.oneshot(post("/")).await);
    assert!(timeout(nearly, within).await.is_err());
    assert!(locks.try_lock("tenant").await.is_err_and(|error| error.is_busy()));
    drop(locks.lock("tenant").await.unwrap());
    assert_eq!(start.elapsed(), Duration::from_secs(2));
}

/// Regression: the response said that the request was cancelled, while its handler continued.
#[tokio::test(start_paused = true)]
async fn detached_handler_ends_with_the_outer_locks() {
    for (on_loss, is_there, is_done) in
        [(OnLoss::Cancel, true, false), (OnLoss::Cancel, false, false), (OnLoss::Notify, false, true)]
    {
        let finished = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&finished);
        let handler = service_fn(move |request| {
            let flag = Arc::clone(&flag);
            async move {
                let response = slow(request).await;
                flag.store(true, Ordering::SeqCst);
                response
            }
        });
        let outer = LockLayer::new(MemoryBackend::new(), "requests")
            .key(GlobalKey)
            .max_hold(Duration::from_millis(500))
            .on_loss(on_loss);
        let inner = by_path().detached();
        let answer = outer.layer(inner.layer(handler)).oneshot(post("/a"));
        if is_there {
            assert_eq!(answer.await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
        } else {
            assert!(timeout(Duration::from_millis(100), answer).await.is_err());
        }
        inner.shutdown().await;
        assert_eq!(finished.load(Ordering::SeqCst), is_done, "{on_loss:?}");
    }
}

/// Regression: when the outer lock was lost, the setting of the inner layer cancelled the request, and the client got no response.
#[tokio::test(start_paused = true)]
async fn request_without_lock_survives_the_loss_of_another() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let outer = LockLayer::with_locks(locks.clone()).key(GlobalKey).lock_safe_methods(true).on_loss(OnLoss::Notify);
    let inner = LockLayer::with_locks(locks).key(GlobalKey).detached();
    let service = outer.max_hold(Duration::from_millis(500)).layer(inner.layer(service_fn(slow)));
    let answer = timeout(Duration::from_secs(10), service.oneshot(request(Method::GET, "/a"))).await;
    assert_eq!(answer.expect("the client gets a response").unwrap().status(), StatusCode::OK);
}

/// Regression: a detached handler without its own lock kept the lock of the outer layer, which is not detached.
#[tokio::test(start_paused = true)]
async fn detached_handler_without_lock_keeps_no_outer_lock() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    let by_path = |request: &Request<Full<Bytes>>| request.uri().path().to_owned();
    let outer = LockLayer::with_locks(locks.clone()).key(|_: &Request<_>| "tenant".to_owned());
    let inner = LockLayer::with_locks(locks.clone()).key(by_path).on_store_error(OnStoreError::Allow).detached();
    let is_dropped = Arc::new(AtomicBool::new(false));
    let (flag, again) = (Arc::clone(&is_dropped), locks.clone());
    let handler = inner.layer(service_fn(move |_: Request<Full<Bytes>>| {
        let (guard, again) = (OnDrop(Arc::clone(&flag)), again.clone());
        async move {
            // A caller inside the lock gets `Nested` at once.
            let refused = again.lock("tenant").wait(Duration::from_secs(9)).await;
            assert!(matches!(refused, Err(LockError::Nested(_))), "{refused:?}");
            pending::<()>().await;
            drop(guard);
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    let failing = faults.clone();
    let handler = handler.map_request(move |request| {
        failing.fail(Failure::OutOfMemory);
        request
    });
    assert!(timeout(Duration::from_secs(1), outer.layer(handler).oneshot(post("/order"))).await.is_err());
    faults.heal();
    sleep(Duration::from_secs(2)).await;
    drop(locks.try_lock("tenant").await.unwrap());
    assert!(!is_dropped.load(Ordering::SeqCst));
}

#[tokio::test(start_paused = true)]
async fn shutdown_of_a_layer_waits_and_admits_no_request() {
    let layer = by_path().detached();
    let finished = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&finished);
    let service = layer.clone().layer(service_fn(move |_: Request<Full<Bytes>>| {
        let flag = Arc::clone(&flag);
        async move {
            sleep(Duration::from_secs(5)).await;
            flag.store(true, Ordering::SeqCst);
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    assert!(timeout(Duration::from_secs(1), service.clone().oneshot(post("/a"))).await.is_err());
    let start = Instant::now();
    layer.shutdown().await;
    assert!(finished.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(5));
    assert_eq!(service.oneshot(post("/b")).await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test(start_paused = true)]
async fn detached_handler_is_cancelled_by_a_loss() {
    let is_dropped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_dropped);
    let locks = Locks::new(MemoryBackend::new(), "default").max_hold(Duration::from_secs(2));
    let layer =
        LockLayer::with_locks(locks.clone()).key(|request: &Request<Full<Bytes>>| request.uri().path().to_owned());
    let service = layer.detached().layer(service_fn(move |request: Request<Full<Bytes>>| {
        let guard = OnDrop(Arc::clone(&flag));
        async move {
            assert_ne!(request.uri().path(), "/panic");
            pending::<()>().await;
            drop(guard);
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    let status = service.clone().oneshot(post("/a")).await.unwrap().status();
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    // The handler runs in a task of its own, which keeps the lock until it has ended.
    drop(locks.lock("/a").await.unwrap());
    assert!(is_dropped.swap(false, Ordering::SeqCst));
    assert!(timeout(Duration::from_secs(1), service.clone().oneshot(post("/b"))).await.is_err());
    assert!(!is_dropped.load(Ordering::SeqCst));
    // Also if no client waits any more.
    locks.shutdown().await;
    assert!(is_dropped.load(Ordering::SeqCst));

    let layer =
        by_path().detached().layer(service_fn(async |_: Request<Full<Bytes>>| -> Result<Response<Full<Bytes>>, _> {
            Err::<_, BoxError>(std::iter::empty::<BoxError>().next().expect("a handler that panics"))
        }));
    assert!(tokio::spawn(layer.clone().oneshot(post("/a"))).await.unwrap_err().is_panic());
    assert!(tokio::spawn(layer.oneshot(post("/a"))).await.unwrap_err().is_panic(), "the lock is free again");
}

#[tokio::test(start_paused = true)]
async fn waiters_are_bounded_in_total() {
    let layer = by_path().wait(Duration::from_secs(9)).max_waiters_in_total(2).release_at(ReleaseAt::HandlerDone);
    let service = layer.layer(service_fn(slow));
    let _holders = ["/a", "/b", "/c"].map(|path| tokio::spawn(service.clone().oneshot(post(path))));
    sleep(Duration::from_millis(10)).await;
    let mut waiters = Vec::new();
    for (path, status) in [("/a", StatusCode::OK), ("/b", StatusCode::OK), ("/c", StatusCode::SERVICE_UNAVAILABLE)] {
        waiters.push((tokio::spawn(service.clone().oneshot(post(path))), status));
        tokio::task::yield_now().await;
    }
    for (waiter, status) in waiters {
        assert_eq!(waiter.await.unwrap().unwrap().status(), status);
    }
    assert_eq!(service.oneshot(post("/c")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn circuit_breaker_limits_the_cost_of_a_hanging_store() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let layer = on(store).circuit_breaker(CircuitBreaker::new().failures(3).probe_interval(Duration::from_secs(1)));
    let service = layer.layer(service_fn(slow));
    let held = service.clone().oneshot(post("/held")).await.unwrap();
    faults.hang();
    let mut took = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        let response = service.clone().oneshot(post("/a")).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()["retry-after"], "1");
        took.push(start.elapsed().as_millis());
    }
    assert_eq!(took, [100, 100, 100, 0, 0, 0]);
    faults.heal();
    assert_eq!(service.clone().oneshot(post("/a")).await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    // Held leases are released anyway.
    drop(held);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(service.clone().oneshot(post("/held")).await.unwrap().status(), StatusCode::OK);
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
}

/// The statuses of ten simultaneous requests.
async fn ten<S, B>(service: S, path: &'static str) -> Vec<u16>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible, Future: Send> + Clone + Send + 'static,
    B: Send + 'static,
{
    let requests: JoinSet<_> = (0..10).map(|_| service.clone().oneshot(post(path))).collect();
    requests.join_all().await.into_iter().map(|response| response.unwrap().status().as_u16()).collect()
}

/// Regression: requests behind the leader were told that the lock was held. With `OnStoreError::Allow` they were rejected, while the leader
/// passed.
#[tokio::test(start_paused = true)]
async fn all_waiters_get_the_error_of_a_hanging_store() {
    let breaker = CircuitBreaker::new().failures(3);
    for wait in [0, 50, 500].map(Duration::from_millis) {
        for (then, status) in [(OnStoreError::Deny, 503), (OnStoreError::Allow, 200)] {
            let store = FaultStore::new(MemoryBackend::new());
            let faults = store.faults();
            let layer = on(store).on_store_error(then).wait(wait).circuit_breaker(breaker);
            let service = layer.layer(service_fn(quick));
            faults.hang();
            // Before the circuit opens, and while it is open and one request is the probe.
            for round in 0..8 {
                let statuses = ten(service.clone(), "/a").await;
                assert_eq!(statuses, [status; 10], "round {round}, waiting for {wait:?}");
            }
            faults.heal();
            sleep(Duration::from_secs(1)).await;
            assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
        }
    }
}

/// Regression: requests with a wait waited although no request called the store.
#[tokio::test(start_paused = true)]
async fn no_request_waits_while_the_circuit_is_open() {
    let patient = |probe_interval| {
        let store = FaultStore::new(MemoryBackend::new());
        let breaker = CircuitBreaker::new().failures(2).probe_interval(probe_interval);
        let layer = on(store.clone()).wait(Duration::from_secs(5)).release_at(ReleaseAt::HandlerDone);
        (store.faults(), layer.circuit_breaker(breaker))
    };
    let (faults, layer) = patient(Duration::from_secs(60));
    let service = layer.layer(service_fn(quick));
    // While the circuit is closed, waiters stay after a failure.
    faults.delay(Duration::from_millis(5));
    faults.fail_next(1, Failure::Timeout);
    assert_eq!(ten(service.clone(), "/a").await, [200; 10]);
    // When the circuit opens, and from then on, no request waits.
    faults.hang();
    let start = Instant::now();
    assert_eq!(ten(service.clone(), "/a").await, [503; 10]);
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    let start = Instant::now();
    assert_eq!((ten(service.clone(), "/a").await, ten(service.clone(), "/b").await), (vec![503; 10], vec![503; 10]));
    assert_eq!(start.elapsed(), Duration::ZERO);
    // No request waits behind the probe either.
    tokio::time::advance(Duration::from_secs(60)).await;
    let probe = tokio::spawn(service.clone().oneshot(post("/a")));
    tokio::task::yield_now().await;
    let start = Instant::now();
    assert_eq!(ten(service, "/a").await, [503; 10]);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(probe.await.unwrap().unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);

    // Waiters that are queued already do not become probes one after the other.
    let (faults, layer) = patient(Duration::from_millis(10));
    let service = layer.layer(service_fn(slow));
    let start = Instant::now();
    let holder = tokio::spawn(service.clone().oneshot(post("/a")));
    tokio::task::yield_now().await;
    let waiters = tokio::spawn(ten(service.clone(), "/a"));
    sleep(Duration::from_millis(500)).await;
    faults.hang();
    assert_eq!(ten(service, "/b").await, [503; 10]);
    assert_eq!(holder.await.unwrap().unwrap().status(), StatusCode::OK);
    assert_eq!(waiters.await.unwrap(), [503; 10]);
    assert!(start.elapsed() < Duration::from_millis(1_400), "{:?}", start.elapsed());
}

#[test]
fn a_fence_is_one_plain_number() {
    use tollgate::http::{LOCK_FENCE, lock_fence};
    let fence = |values: &[&str]| {
        let mut request = Request::new(());
        for value in values {
            request.headers_mut().append(LOCK_FENCE, value.parse().unwrap());
        }
        lock_fence(&request)
    };
    assert_eq!(fence(&["1763663760123456"]), Some(1_763_663_760_123_456));
    for values in [&[][..], &["", "7"], &["7", "7"], &["+7"], &["-7"], &["7 "], &["0x7"], &["99999999999999999999"]] {
        assert_eq!(fence(values), None, "{values:?}");
    }
}

fn fenced(order: &str, fence: &str) -> Request<Full<Bytes>> {
    let request = Request::post("/").header("order", order).header("lock-fence", fence);
    request.body(Full::default()).unwrap()
}

#[tokio::test]
async fn too_small_fence_is_rejected() {
    let handler =
        service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())));
    let layer = FenceLayer::new(header("order"), lock_fence);
    let service = layer.clone().layer(handler);
    for (request, status) in [
        (fenced("a", "7"), 200),
        (fenced("a", "9"), 200),
        (fenced("a", "9"), 200),
        (fenced("a", "8"), 412),
        (fenced("b", "8"), 200),
        (fenced("a", "nine"), 400),
        (post("/"), 400),
    ] {
        let headers = format!("{:?}", request.headers());
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), status, "{headers}");
    }
    // All services of a layer share the recorded fences.
    let service = layer.responder(tollgate::grpc::GrpcResponder::new()).layer(handler);
    for (request, code) in [(fenced("a", "8"), "10"), (fenced("a", ""), "3"), (post("/"), "3")] {
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], code);
        let pushback = response.headers().get("grpc-retry-pushback-ms").map(|pushback| pushback.to_str().unwrap());
        assert_eq!(pushback, (code == "10").then_some("-1"));
    }
    assert!(!service.oneshot(fenced("a", "9")).await.unwrap().headers().contains_key("grpc-status"));
}

#[tokio::test]
async fn fence_rejection_can_use_the_response_type() {
    use axum::body::Body;

    let handler = service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Body::from("written"))));
    let layer = FenceLayer::new(header("order"), lock_fence).responder(HttpResponder::new().same_body());
    let service = layer.layer(handler);
    for (fence, status, text) in [("9", 200, "written"), ("8", 412, "another client holds")] {
        let response: Response<Body> = service.clone().oneshot(fenced("a", fence)).await.unwrap();
        assert_eq!(response.status(), status);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&body).contains(text), "{body:?}");
    }
}

/// Regression: a missing fence was reported as a missing key.
#[tokio::test]
async fn missing_fence_differs_from_missing_key() {
    let layer =
        FenceLayer::new(|order: &(u64, _)| (order.0 > 0).then_some(order.0), |order: &(_, Option<u64>)| order.1);
    let service = layer.responder(ErrorResponder).layer(service_fn(async |order| Ok::<_, BoxError>(order)));
    assert!(service.clone().oneshot((0, Some(7))).await.unwrap_err().is::<MissingKey>());
    for fence in [None, Some(u64::MAX)] {
        let error = service.clone().oneshot((1, fence)).await.unwrap_err();
        assert!(error.is::<MissingFence>() && error.to_string().contains("fence"), "{error}");
    }
    assert!(service.oneshot((1, Some(7))).await.is_ok());
}

/// Regression: a ready service that was not called kept its permit. With a concurrency limit of one, no other request could pass.
#[tokio::test(start_paused = true)]
async fn rejected_fence_keeps_no_concurrency_permit() {
    let write = service_fn(async |(_, fence): (u64, Option<u64>)| Ok::<_, BoxError>(fence));
    let limited = ConcurrencyLimitLayer::new(1).layer(write);
    let layer =
        FenceLayer::new(|write: &(u64, _)| (write.0 > 0).then_some(write.0), |write: &(_, Option<u64>)| write.1);
    let service = Fence::new(limited, layer.responder(ErrorResponder));
    assert_eq!(service.clone().oneshot((1, Some(7))).await.unwrap(), Some(7));
    for rejected in [(1, Some(6)), (1, None), (0, Some(7))] {
        let mut first = service.clone();
        let answer = first.ready().await.unwrap().call(rejected);
        let mut next = service.clone();
        assert!(timeout(Duration::ZERO, next.ready()).await.is_ok(), "{rejected:?}");
        assert!(answer.await.is_err());
    }
    assert_eq!(service.into_inner().oneshot((1, None)).await.unwrap(), None);
}

/// Regression: a fence that no store grants blocked all later requests of its key. With more keys than `capacity`, it blocked the requests
/// of all keys.
#[tokio::test]
async fn impossible_fence_is_rejected() {
    let handler =
        service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())));
    let service = FenceLayer::new(header("order"), lock_fence).capacity(2).layer(handler);
    for order in ["a", "b", "c", "d"] {
        for fence in [u64::MAX, 1 << 53] {
            let request = fenced(order, &fence.to_string());
            assert_eq!(service.clone().oneshot(request).await.unwrap().status(), StatusCode::BAD_REQUEST);
        }
    }
    let largest = fenced("a", &((1_u64 << 53) - 1).to_string());
    for request in [fenced("a", "7"), fenced("e", "7"), largest] {
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn store_error_rejects_requests_by_default() {
    for (then, status) in [(OnStoreError::Deny, StatusCode::SERVICE_UNAVAILABLE), (OnStoreError::Allow, StatusCode::OK)]
    {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let unprotected = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&unprotected);
        let service = on(store).on_store_error(then).layer(service_fn(move |request: Request<Full<Bytes>>| {
            seen.fetch_add(usize::from(request.extensions().get::<LeaseHandle>().is_none()), Ordering::SeqCst);
            async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
        }));
        // Another lock, on a working store.
        let service = by_path().layer(service);
        for fault in [Failure::Unavailable, Failure::Timeout, Failure::OutOfMemory] {
            faults.fail(fault);
            let response = service.clone().oneshot(post("/a")).await.unwrap();
            assert_eq!(response.status(), status, "{fault:?}");
            if then == OnStoreError::Deny {
                assert_eq!(response.headers()["retry-after"], "1");
            }
        }
        faults.heal();
        faults.hang();
        let start = Instant::now();
        assert_eq!(service.clone().oneshot(post("/a")).await.unwrap().status(), status);
        assert_eq!(start.elapsed(), Duration::from_millis(100));
        faults.heal();
        // Requests get the lock again once the store is called again.
        sleep(Duration::from_millis(100)).await;
        assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::OK);
        assert_eq!(unprotected.load(Ordering::SeqCst), if then == OnStoreError::Deny { 0 } else { 4 });
    }
}

#[tokio::test(start_paused = true)]
async fn each_missing_key_policy_is_applied() {
    let layer = LockLayer::new(MemoryBackend::new(), "requests").key(|_: &Request<Full<Bytes>>| None::<String>);
    let cases = [
        (OnMissingKey::Reject, [StatusCode::BAD_REQUEST, StatusCode::BAD_REQUEST]),
        (OnMissingKey::Pass, [StatusCode::OK, StatusCode::OK]),
    ];
    for (then, expected) in cases {
        let service = layer.clone().on_missing_key(then).layer(service_fn(slow));
        let first = tokio::spawn(service.clone().oneshot(post("/a")));
        tokio::task::yield_now().await;
        let second = service.oneshot(post("/b")).await.unwrap().status();
        assert_eq!([first.await.unwrap().unwrap().status(), second], expected, "{then:?}");
    }
    // With a fallback, requests without a key share one lock.
    let layer = layer.key(first_of(|_: &Request<Full<Bytes>>| None::<String>, GlobalKey));
    let service = layer.layer(service_fn(slow));
    let first = tokio::spawn(service.clone().oneshot(post("/a")));
    tokio::task::yield_now().await;
    assert_eq!(service.oneshot(post("/b")).await.unwrap().status(), StatusCode::CONFLICT);
    assert_eq!(first.await.unwrap().unwrap().status(), StatusCode::OK);
}

/// Regression: an unprotected handler found the lease of another layer, took it for its own, and wrote with an unrelated fence.
#[tokio::test(start_paused = true)]
async fn request_passed_without_lock_sees_no_other_lease() {
    let by = |field: &'static str, store: &FaultStore<MemoryBackend>| {
        let layer = LockLayer::new(store.clone(), field).key(header(field));
        layer.on_missing_key(OnMissingKey::Pass).on_store_error(OnStoreError::Allow)
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let lease = request.extensions().get::<LeaseHandle>();
        noted.lock().unwrap().push(lease.map(|lease| lease.lock().name().to_string()));
        ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())))
    });
    let store = FaultStore::new(MemoryBackend::new());
    let inner = by("order", &store);
    let outer = by("tenant", &FaultStore::new(MemoryBackend::new())).lock_safe_methods(true);
    let http = outer.layer(inner.layer(handler.clone())).map_response(drop).boxed_clone();
    let silent = inner.clone().responder(HttpResponder::new().extensions(false)).layer(handler.clone());
    let silent = outer.layer(silent).map_response(drop).boxed_clone();
    let grpc = inner.responder(tollgate::grpc::GrpcResponder::new()).layer(handler);
    let grpc = outer.layer(grpc).map_response(drop).boxed_clone();

    let (tenant, order) = (Some("tenant"), Some("order"));
    // The lease that the handler sees with the lock, with a safe method, without a key, and after a store error.
    for (service, expected) in [
        (http, [order, None, None, None]),
        (grpc, [order, order, None, None]),
        // This responder leaves extensions alone.
        (silent, [tenant, tenant, tenant, tenant]),
    ] {
        let cases = [(Method::POST, "order"), (Method::GET, "order"), (Method::POST, "other"), (Method::POST, "order")];
        for (case, (method, field)) in cases.into_iter().enumerate() {
            if case == 3 {
                store.faults().fail(Failure::Unavailable);
            }
            let request = Request::builder().method(method).header("tenant", "42").header(field, "42");
            service.clone().oneshot(request.body(Full::default()).unwrap()).await.unwrap();
        }
        store.faults().heal();
        assert_eq!(seen.lock().unwrap().drain(..).collect::<Vec<_>>(), expected.map(|lease| lease.map(str::to_owned)));
    }
}

#[tokio::test(start_paused = true)]
async fn service_without_http_returns_typed_errors() {
    let layer = LockLayer::new(MemoryBackend::new(), "requests")
        .key(|job: &u32| (*job > 0).then_some(*job))
        .responder(ErrorResponder);
    let service = layer.layer(service_fn(async |job: u32| {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, BoxError>(job)
    }));
    let first = tokio::spawn(service.clone().oneshot(7));
    tokio::task::yield_now().await;
    let error = service.clone().oneshot(7).await.unwrap_err();
    assert!(error.downcast::<LockError>().unwrap().is_busy());
    assert!(service.clone().oneshot(0).await.unwrap_err().is::<MissingKey>());
    assert_eq!(first.await.unwrap().unwrap(), 7);
    assert_eq!(service.oneshot(7).await.unwrap(), 7);
}

#[tokio::test]
async fn layer_can_require_a_scope() {
    let error = by_path().require(Reach::Redis).unwrap_err();
    assert_eq!(error, ConfigError::ReachTooSmall { needed: Reach::Redis, has: Reach::Process });
    assert!(by_path().require(Reach::Process).is_ok());
}

#[tokio::test]
async fn locks_can_require_a_scope() {
    let too_small = ConfigError::ReachTooSmall { needed: Reach::Redis, has: Reach::Process };
    for (scope, expected) in [(Reach::Process, Ok(())), (Reach::Redis, Err(too_small))] {
        assert_eq!(Locks::new(MemoryBackend::new(), "default").require(scope).map(drop), expected);
        assert_eq!(Semaphore::new(MemoryBackend::new(), "semaphores", 2).require(scope).map(drop), expected);
        assert_eq!(RwLocks::new(MemoryBackend::new(), "rw_locks").require(scope).map(drop), expected);
    }
}

/// A service that panics if it is called without having been ready. A clone is not ready.
#[derive(Debug)]
struct Strict(bool);

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self(false)
    }
}

impl Service<Request<Full<Bytes>>> for Strict {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0 = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        assert!(std::mem::take(&mut self.0), "called without having been ready");
        std::future::ready(Ok(Response::new(Full::default())))
    }
}

#[tokio::test(start_paused = true)]
async fn ready_instance_is_called() {
    let mut service = by_path().layer(Strict(false));
    for request in [post("/a"), request(Method::GET, "/a"), post("/a")] {
        let response = service.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
}

/// A real server, and a client that disconnects in the middle of the response.
#[tokio::test]
async fn cut_connection_releases_the_lock() {
    let (frames, receiver) = mpsc::unbounded_channel::<Result<Bytes, BoxError>>();
    let receiver = Arc::new(Mutex::new(Some(receiver)));
    let handler = move || {
        let receiver = receiver.lock().unwrap().take();
        async move {
            match receiver {
                Some(mut receiver) => {
                    axum::body::Body::from_stream(futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx)))
                }
                None => axum::body::Body::from("second"),
            }
        }
    };
    let lock = LockLayer::new(MemoryBackend::new(), "requests")
        .key(|request: &axum::extract::Request| request.uri().path().to_owned());
    let app = axum::Router::new().route("/a", axum::routing::post(handler)).layer(lock);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let head = "POST /a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let mut first = TcpStream::connect(addr).await.unwrap();
    first.write_all(head.as_bytes()).await.unwrap();
    frames.send(Ok("some".into())).unwrap();
    let mut buffer = [0; 1_024];
    assert!(first.read(&mut buffer).await.unwrap() > 0);
    let ask = async || {
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        answer
    };
    assert!(ask().await.starts_with("HTTP/1.1 409 "));
    drop(first);
    let start = std::time::Instant::now();
    loop {
        let answer = ask().await;
        if answer.starts_with("HTTP/1.1 200 ") {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{answer}");
        sleep(Duration::from_millis(10)).await;
    }
    server.abort();
}

#[tokio::test(start_paused = true)]
async fn grpc_rejections_have_status_codes() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let layer = on(store).responder(tollgate::grpc::GrpcResponder::new()).max_hold(Duration::from_secs(2));
    let service = layer.layer(service_fn(slow));
    let first = tokio::spawn(service.clone().oneshot(post("/a")));
    tokio::task::yield_now().await;
    let response = service.clone().oneshot(post("/a")).await.unwrap();
    assert_eq!(response.headers()["grpc-status"], "10");
    assert!(response.headers().contains_key("grpc-retry-pushback-ms"));
    drop(first.await.unwrap().unwrap());
    faults.fail(Failure::Unavailable);
    assert_eq!(service.oneshot(post("/a")).await.unwrap().headers()["grpc-status"], "14");
    faults.heal();
    let service = layer.layer(service_fn(async |_| pending::<Result<Response<Full<Bytes>>, Infallible>>().await));
    let response = service.oneshot(post("/b")).await.unwrap();
    assert_eq!(response.headers()["grpc-status"], "10");
    // The request may have had effects, and clients with a retry policy would send it again.
    assert_eq!(response.headers()["grpc-retry-pushback-ms"], "-1");

    // Also if the lease is lost after the response has begun.
    let senders = Arc::default();
    let service = layer.layer(service_fn(streams(&senders)));
    let mut body = service.oneshot(post("/c")).await.unwrap().into_body();
    let sender = senders.lock().unwrap().pop().unwrap();
    sender.send(Ok("some")).unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "some");
    let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "10");
    assert!(trailers.contains_key("grpc-message") && !trailers.contains_key("content-type"));
    assert!(body.is_end_stream() && body.frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn other_rejections_have_grpc_and_http_codes() {
    let grpc = |layer: ByPath| layer.responder(tollgate::grpc::GrpcResponder::new()).layer(service_fn(slow));
    let service = grpc(by_path().wait(Duration::from_secs(9)).max_waiters(0));
    let first = tokio::spawn(service.clone().oneshot(post("/a")));
    tokio::task::yield_now().await;
    let response = service.oneshot(post("/a")).await.unwrap();
    assert_eq!(response.headers()["grpc-status"], "8");
    assert!(response.headers().contains_key("grpc-retry-pushback-ms"));
    drop(first.await.unwrap().unwrap());

    let keyless = LockLayer::new(MemoryBackend::new(), "requests").key(|_: &Request<Full<Bytes>>| None::<String>);
    let service = keyless.responder(tollgate::grpc::GrpcResponder::new()).layer(service_fn(slow));
    assert_eq!(service.oneshot(post("/a")).await.unwrap().headers()["grpc-status"], "3");

    let careful = Locks::new(MemoryBackend::new(), "default").replication(Replication::Require(1)).wait(Duration::ZERO);
    let closed = Locks::new(MemoryBackend::new(), "default");
    closed.shutdown().await;
    for locks in [careful, closed] {
        let layer = || {
            LockLayer::with_locks(locks.clone()).key(|request: &Request<Full<Bytes>>| request.uri().path().to_owned())
        };
        let response = layer().layer(service_fn(slow)).oneshot(post("/a")).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()["retry-after"], "1");
        let service = layer().responder(tollgate::grpc::GrpcResponder::new()).layer(service_fn(slow));
        let response = service.oneshot(post("/a")).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "14");
        assert!(response.headers().contains_key("grpc-retry-pushback-ms"));
    }
}

/// With `request_release`, a waiting request asks the handler to finish sooner.
#[tokio::test(start_paused = true)]
async fn waiting_request_asks_the_handler() {
    async fn patient(request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
        let lease = request.extensions().get::<LeaseHandle>().unwrap().clone();
        let is_asked = timeout(Duration::from_secs(5), lease.release_requested()).await.is_ok();
        Ok(Response::new(if is_asked { "asked" } else { "not asked" }.into()))
    }
    for asks in [false, true] {
        let layer = by_path().wait(Duration::from_secs(60));
        let layer = if asks { layer.request_release() } else { layer };
        let service = layer.layer(service_fn(patient));
        let requests = [(); 2].map(|()| tokio::spawn(service.clone().oneshot(post("/a"))));
        let mut ends = Vec::new();
        for request in requests {
            ends.push(request.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes());
        }
        assert_eq!(ends, [if asks { "asked" } else { "not asked" }, "not asked"]);
    }
}

/// Regression: settings that the layer lacked required separate `Locks`, which brought their own wait and bounds.
#[tokio::test(start_paused = true)]
async fn layer_with_a_holder_name_rejects_at_once() {
    let backend = MemoryBackend::new();
    let service = on(backend.clone()).holder("billing").layer(service_fn(slow));
    let first = tokio::spawn(service.clone().oneshot(post("/a")));
    sleep(Duration::from_millis(10)).await;
    let status = LockAdmin::new(backend, "requests").inspect("/a").await.unwrap();
    assert_eq!(status.holders.iter().map(|holder| holder.name.as_deref()).collect::<Vec<_>>(), [Some("billing")]);
    let start = Instant::now();
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::CONFLICT);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(first.await.unwrap().unwrap().status(), StatusCode::OK);
}

/// Two layers are like two processes.
#[tokio::test(start_paused = true)]
async fn layer_can_be_fair() {
    for is_fair in [false, true] {
        let backend = MemoryBackend::new();
        let layer = || if is_fair { on(backend.clone()).fair() } else { on(backend.clone()) };
        let first = Locks::new(backend.clone(), "requests").lock("/a").await.unwrap();
        let waits = layer().wait(Duration::from_secs(60)).layer(service_fn(quick));
        let waits = tokio::spawn(waits.oneshot(post("/a")));
        sleep(Duration::from_millis(10)).await;
        first.release().await.unwrap();
        // The waiter is notified of the release, and has not called the store again yet.
        let passes = layer().layer(service_fn(quick)).oneshot(post("/a")).await.unwrap().status();
        assert_eq!(passes, if is_fair { StatusCode::CONFLICT } else { StatusCode::OK });
        assert_eq!(waits.await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn layer_can_require_replicas() {
    // The memory backend has no replicas.
    let service = by_path().replication(Replication::Require(1)).layer(service_fn(quick));
    assert_eq!(service.oneshot(post("/a")).await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
}

/// The number of running requests, and its maximum.
#[derive(Clone, Default)]
struct AtWork(Arc<(AtomicUsize, AtomicUsize)>);

impl AtWork {
    async fn serve(self, request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
        let (now, most) = &*self.0;
        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let response = slow(request).await;
        now.fetch_sub(1, Ordering::SeqCst);
        response
    }

    fn most(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }
}

/// A 101 response has no body that could keep the lock while the connection lasts.
#[tokio::test]
async fn upgraded_connection_keeps_its_lock() {
    use axum::response::IntoResponse;
    for keeps in [false, true] {
        let handler = async move |view: LeaseHandle, request: axum::extract::Request| {
            let permit = view.reenter().filter(|_| keeps);
            tokio::spawn(async move {
                let connection = hyper::upgrade::on(request).await.unwrap();
                let mut connection = hyper_util::rt::TokioIo::new(connection);
                let _ = connection.read_to_end(&mut Vec::new()).await;
                drop(permit);
            });
            (StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade"), ("upgrade", "chat")]).into_response()
        };
        let permits = Semaphore::new(MemoryBackend::new(), "semaphores", 1).wait(Duration::ZERO);
        let layer = LockLayer::with_semaphore(permits).key(GlobalKey).lock_safe_methods(true);
        let app = axum::Router::new().route("/", axum::routing::get(handler)).layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, app).await });
        let open = async || {
            let mut client = TcpStream::connect(addr).await.unwrap();
            let head = "GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n";
            client.write_all(head.as_bytes()).await.unwrap();
            let mut status = [0; "HTTP/1.1 101".len()];
            client.read_exact(&mut status).await.unwrap();
            (String::from_utf8(status.to_vec()).unwrap(), client)
        };
        let (status, first) = open().await;
        assert_eq!(status, "HTTP/1.1 101");
        let (status, second) = open().await;
        assert_eq!(status, if keeps { "HTTP/1.1 409" } else { "HTTP/1.1 101" });
        drop((first, second));
        let start = std::time::Instant::now();
        while open().await.0 != "HTTP/1.1 101" {
            assert!(start.elapsed() < Duration::from_secs(10), "the permit is not released");
            sleep(Duration::from_millis(10)).await;
        }
        server.abort();
    }
}

/// The status of a request, and the time until its response was read to the end.
async fn outcome(
    service: impl Service<Request<Full<Bytes>>, Response = Response<impl Body>, Error = Infallible>,
    request: Request<Full<Bytes>>,
) -> (StatusCode, Duration) {
    let start = Instant::now();
    let response = service.oneshot(request).await.unwrap();
    let status = response.status();
    assert!(response.into_body().collect().await.is_ok());
    (status, start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn semaphore_bounds_running_requests() {
    for is_fair in [false, true] {
        let at_work = AtWork::default();
        let inner = at_work.clone();
        let permits = Semaphore::new(MemoryBackend::new(), "semaphores", 2).wait(Duration::from_millis(1_500));
        let layer = LockLayer::with_semaphore(permits).key(GlobalKey);
        let layer = if is_fair { layer.fair() } else { layer };
        let service = layer
            .key(|request: &Request<Full<Bytes>>| request.uri().path().to_owned())
            .responder(HttpResponder::new().busy(BusyStatus::TooManyRequests))
            .layer(service_fn(move |request| inner.clone().serve(request)));
        let requests =
            [post("/a"), post("/a"), post("/a"), post("/a"), post("/a"), post("/b"), request(Method::GET, "/a")];
        let requests = requests.map(|request| tokio::spawn(outcome(service.clone(), request)));
        let mut outcomes = Vec::new();
        for request in requests {
            let (status, after) = request.await.unwrap();
            outcomes.push((status.as_u16(), after.as_millis()));
        }
        let two_seconds = (200, 2_000);
        assert_eq!(outcomes[..4], [(200, 1_000), (200, 1_000), two_seconds, two_seconds]);
        assert_eq!(outcomes[4], (429, 1_500), "its wait is over");
        assert_eq!(outcomes[5..], [(200, 1_000); 2], "another key, and a safe method");
        assert_eq!(at_work.most(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn handler_with_a_permit_can_take_another() {
    let permits = Semaphore::new(MemoryBackend::new(), "semaphores", 2).wait(Duration::ZERO);
    let inner = permits.clone();
    let service = LockLayer::with_semaphore(permits).key(|_: &Request<Full<Bytes>>| "a").detached().layer(service_fn(
        move |request: Request<Full<Bytes>>| {
            let permits = inner.clone();
            async move {
                let mine = request.extensions().get::<LeaseHandle>().unwrap().fence();
                let other = permits.try_acquire("a").await.unwrap();
                assert!(other.fence() > mine);
                assert!(permits.try_acquire("a").await.unwrap_err().is_busy());
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        },
    ));
    assert_eq!(outcome(service.clone(), post("/")).await.0, StatusCode::OK);
    assert_eq!(outcome(service, post("/")).await.0, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn readers_pass_together_and_a_writer_alone() {
    let at_work = AtWork::default();
    let locks = RwLocks::new(MemoryBackend::new(), "rw_locks").wait(Duration::ZERO);
    let layer: ByPath = LockLayer::with_rw_locks(locks).key(|request| request.uri().path().to_owned());
    let with = |layer: &ByPath| {
        let inner = at_work.clone();
        layer.layer(service_fn(move |request| inner.clone().serve(request)))
    };
    let service = with(&layer);
    let readers = [Method::GET, Method::HEAD, Method::GET]
        .map(|method| tokio::spawn(outcome(service.clone(), request(method, "/a"))));
    tokio::task::yield_now().await;
    assert_eq!(outcome(service.clone(), post("/a")).await.0, StatusCode::CONFLICT);
    assert_eq!(outcome(service.clone(), post("/b")).await.0, StatusCode::OK);
    for reader in readers {
        assert_eq!(reader.await.unwrap().0, StatusCode::OK);
    }
    assert_eq!(at_work.most(), 4);
    let writer = tokio::spawn(outcome(service.clone(), post("/a")));
    tokio::task::yield_now().await;
    assert_eq!(outcome(service.clone(), request(Method::GET, "/a")).await.0, StatusCode::CONFLICT);
    assert_eq!(writer.await.unwrap().0, StatusCode::OK);
    // With `lock_safe_methods(true)`, readers take the lock as writers. An explicit `false` is the default.
    let whatever = layer.clone().lock_safe_methods(true).lock_safe_methods(false);
    for (layer, status) in
        [(layer.clone().lock_safe_methods(false), 200), (whatever, 200), (layer.clone().lock_safe_methods(true), 409)]
    {
        let service = with(&layer);
        let reader = tokio::spawn(outcome(service.clone(), request(Method::GET, "/")));
        tokio::task::yield_now().await;
        assert_eq!(outcome(service.clone(), post("/")).await.0, StatusCode::CONFLICT);
        assert_eq!(outcome(service, request(Method::GET, "/")).await.0, status);
        assert_eq!(reader.await.unwrap().0, StatusCode::OK);
    }
}

/// Regression: clients that disconnected left an unlimited number of handlers running.
#[tokio::test(start_paused = true)]
async fn detached_handlers_are_bounded() {
    let layer = by_path().detached().max_running(3);
    let service = layer.clone().layer(service_fn(slow));
    let status = async |path: &str| {
        let response = service.clone().oneshot(post(path)).await.unwrap();
        (response.status(), response.headers().contains_key("retry-after"))
    };
    for path in ["/a", "/b", "/c"] {
        assert!(timeout(Duration::from_millis(10), service.clone().oneshot(post(path))).await.is_err());
    }
    for _ in 0..100 {
        assert_eq!(status("/d").await, (StatusCode::SERVICE_UNAVAILABLE, true));
    }
    // All services of a layer share its bound. Other layers have their own.
    let again = layer.clone().layer(service_fn(slow)).oneshot(post("/e")).await.unwrap();
    assert_eq!(again.status(), StatusCode::SERVICE_UNAVAILABLE);
    let other = by_path().detached().layer(service_fn(slow)).oneshot(post("/e")).await.unwrap();
    assert_eq!(other.status(), StatusCode::OK);
    // A request that needs no lock passes.
    let get = Request::get("/d").body(Full::default()).unwrap();
    assert_eq!(service.clone().oneshot(get).await.unwrap().status(), StatusCode::OK);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(status("/d").await.0, StatusCode::OK);
    // A request that is refused its lock, or gives up waiting for it, frees its slot.
    let held = timeout(Duration::from_millis(10), service.clone().oneshot(post("/a"))).await;
    assert!(held.is_err());
    for _ in 0..10 {
        assert_eq!(status("/a").await.0, StatusCode::CONFLICT);
    }
    sleep(Duration::from_secs(2)).await;
    layer.shutdown().await;
}

/// Without HTTP, the error is `Full`. Requests that pass without a lock count as well.
#[tokio::test(start_paused = true)]
async fn detached_handlers_without_a_lock_are_bounded() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let layer =
        LockLayer::new(store, "requests").key(GlobalKey).on_store_error(OnStoreError::Allow).detached().max_running(1);
    let wait = async |_: ()| {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, BoxError>(())
    };
    let service = layer.responder(ErrorResponder).layer(service_fn(wait));
    assert!(timeout(Duration::from_millis(10), service.clone().oneshot(())).await.is_err());
    let error = service.clone().oneshot(()).await.unwrap_err();
    assert!(error.is::<tollgate::lock::Full>(), "{error:?}");
    sleep(Duration::from_secs(1)).await;
    service.oneshot(()).await.unwrap();
}
