//! The shutdown of a backend closes each kind of work, waits for it, and reports leftover work.

mod memory;
mod redis;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::sync::Notify;
use tokio::time::sleep;
use tollgate::delay_queue::{Job, store::DelayQueueStore};
use tollgate::http::{FingerprintedBody, header};
use tollgate::idempotency::store::IdempotencyStore;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::{
    BoxError, DelayQueue, DelayQueueWorker, ErrorResponder, IdempotencyLayer, Policy, Quota, RateLimitLayer,
};
use tower::{Layer, Service, ServiceExt, service_fn};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn queue(store: impl DelayQueueStore + Send + Sync + 'static) -> DelayQueue<u64> {
    DelayQueue::new(store, "work").deadline(secs(5))
}

/// Starts a worker. The payload of a job is its duration in milliseconds. Returns the number of finished jobs, and the worker's task.
fn start_worker(queue: &DelayQueue<u64>) -> (Arc<AtomicUsize>, tokio::task::JoinHandle<()>) {
    let done = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&done);
    let service = service_fn(move |job: Job<u64>| {
        let counter = Arc::clone(&counter);
        async move {
            sleep(ms(*job)).await;
            counter.fetch_add(1, Ordering::SeqCst);
            Ok::<_, BoxError>(())
        }
    });
    let worker = DelayQueueWorker::new(queue.clone(), service);
    (done, tokio::spawn(async move { worker.run().await.unwrap() }))
}

/// Makes a request that the layer charges and then refunds in the background.
async fn refund(store: impl RateLimitStore + Clone + Send + Sync + 'static) {
    let layer = RateLimitLayer::new(store, policy())
        .responder(ErrorResponder)
        .charge_on(|_: Result<&(), &BoxError>| false)
        .deadline(secs(60));
    layer.layer(service_fn(async |()| Ok::<_, BoxError>(()))).oneshot(()).await.unwrap();
}

fn policy() -> Policy {
    Policy::new("refunded", Quota::per_hour(10).fixed_window())
}

type Paid = Response<tollgate::http::IdempotentBody<Full<Bytes>>>;

/// A service behind an idempotency layer whose handler takes `time`.
fn payments(
    store: impl IdempotencyStore + Send + Sync + 'static,
    time: Duration,
) -> impl Service<Request<Full<Bytes>>, Response = Paid, Error = Infallible, Future: Send> + Clone {
    let layer = IdempotencyLayer::new(store).scope(header("authorization")).deadline(secs(5));
    layer.layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| async move {
        request.extensions().get::<Arc<Notify>>().inspect(|started| started.notify_one());
        sleep(time).await;
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"paid"))))
    }))
}

fn payment(key: &str) -> Request<Full<Bytes>> {
    let request = Request::post("/pay").header("authorization", "alice").header("idempotency-key", key);
    request.body(Full::default()).unwrap()
}

/// Pays, and disconnects when the handler has started, so that it is detached.
async fn pay_and_disconnect(service: impl Service<Request<Full<Bytes>>, Response = Paid, Error = Infallible>) {
    let (started, mut request) = (Arc::new(Notify::new()), payment("first"));
    request.extensions_mut().insert(Arc::clone(&started));
    tokio::select! {
        _ = service.oneshot(request) => panic!("the handler takes longer"),
        () = started.notified() => {}
    }
}

/// The status of another payment.
async fn pay(service: impl Service<Request<Full<Bytes>>, Response = Paid, Error = Infallible>) -> StatusCode {
    service.oneshot(payment("second")).await.unwrap().status()
}
