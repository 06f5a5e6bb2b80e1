//! Callers that stop polling: the roles that they have in the queue of their process pass on.

use std::convert::Infallible;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::lock::store::LockStore;
use tollgate::lock::{ReleaseOutcome, RwLocks, Segmented, Semaphore};
use tollgate::testing::FaultStore;
use tollgate::{GlobalKey, LockError, LockLayer, Locks, MemoryBackend, OnStoreError};
use tower::{Layer, ServiceExt, service_fn};

use crate::support::server::RedisServer;
use crate::support::shared::patient;

/// Longer than the 250 ms after which a role passes on, and shorter than any wait in here.
const SOON: Duration = Duration::from_millis(700);
const MOMENT: Duration = Duration::from_millis(10);
const WAIT: Duration = Duration::from_secs(2);

/// A lease of any kind.
trait Guard: Send {}
impl<T: Send> Guard for T {}

type Taking = Pin<Box<dyn Future<Output = Result<Box<dyn Guard>, LockError>> + Send>>;
type Take = Arc<dyn Fn(Duration) -> Taking + Send + Sync>;

fn take<R, T>(request: impl Fn(Duration) -> R + Send + Sync + 'static) -> Take
where
    R: IntoFuture<Output = Result<T, LockError>>,
    R::IntoFuture: Send + 'static,
    T: Send + 'static,
{
    Arc::new(move |wait| {
        let request = request(wait).into_future();
        Box::pin(async move { Ok(Box::new(request.await?) as Box<dyn Guard>) })
    })
}

/// Every kind of lock on `store`, as one process has them.
fn kinds<S: LockStore + Clone + Send + Sync + 'static>(store: &S) -> [(&'static str, Take); 6] {
    let locks = Locks::new(store.clone(), "default");
    let fair = Locks::new(store.clone(), "fair").fair();
    let semaphore = Semaphore::new(store.clone(), "semaphores", 1);
    let rw = RwLocks::new(store.clone(), "rw_locks");
    let segmented = Segmented::new(&Locks::new(store.clone(), "segments"), "k", 1);
    let multi = Locks::new(store.clone(), "multi");
    [
        ("plain", take(move |wait| locks.lock("k").wait(wait))),
        ("fair", take(move |wait| fair.lock("k").wait(wait))),
        ("semaphore", take(move |wait| semaphore.acquire("k").wait(wait))),
        ("read/write", take(move |wait| rw.write("k").wait(wait))),
        ("segmented", take(move |wait| segmented.any().wait(wait))),
        ("multi", take(move |wait| multi.lock_all(["k", "l"]).wait(wait))),
    ]
}

/// Polls a request for a moment, in which it is not granted.
async fn poll_for_a_moment(request: &mut Taking) {
    let granted = timeout(MOMENT, request).await;
    assert!(granted.is_err(), "the request is granted already: {:?}", granted.unwrap().err());
}

fn assert_busy(kind: &str, outcome: Result<Box<dyn Guard>, LockError>) {
    match outcome {
        Err(LockError::Busy(_)) => {}
        Err(error) => panic!("{kind}: {error:?}"),
        Ok(_) => panic!("{kind}: the request was granted"),
    }
}

async fn granted_soon(kind: &str, request: Taking) -> Box<dyn Guard> {
    let start = Instant::now();
    let guard = request.await.unwrap_or_else(|error| panic!("{kind}: {error:?}"));
    assert!(start.elapsed() < SOON, "{kind}: after {:?}", start.elapsed());
    guard
}

async fn another_process_gets_the_key<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    for ((kind, here), (_, there)) in kinds(&store).into_iter().zip(kinds(&store)) {
        for held_for in [Duration::ZERO, Duration::from_millis(150)] {
            let held = here(WAIT).await.unwrap();
            let mut unpolled = here(WAIT);
            poll_for_a_moment(&mut unpolled).await;
            sleep(held_for).await;
            drop(held);
            sleep(MOMENT).await;
            drop(granted_soon(kind, there(WAIT)).await);
            sleep(WAIT).await;
            assert_busy(kind, unpolled.await);
            drop(here(Duration::ZERO).await.unwrap_or_else(|error| panic!("{kind}: {error:?}")));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unpolled_waiter_lets_other_processes_in() {
    another_process_gets_the_key(MemoryBackend::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unpolled_waiter_lets_other_processes_in_on_redis() {
    let server = RedisServer::start();
    another_process_gets_the_key(patient(server.url()).await).await;
}

async fn waiters_of_this_process_go_on<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    for ((kind, here), (_, there)) in kinds(&store).into_iter().zip(kinds(&store)) {
        // Behind a holder of this process and of another one. There the unpolled waiter is the leader.
        for holder in [&here, &there] {
            for held_for in [Duration::ZERO, Duration::from_millis(150)] {
                let held = holder(WAIT).await.unwrap();
                let mut unpolled = here(WAIT);
                poll_for_a_moment(&mut unpolled).await;
                let mut others = JoinSet::new();
                for request in [(); 3].map(|()| here(WAIT)) {
                    others.spawn(async move { drop(granted_soon(kind, request).await) });
                }
                sleep(MOMENT + held_for).await;
                drop(held);
                others.join_all().await;
                drop(unpolled);
                drop(granted_soon(kind, there(WAIT)).await);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unpolled_waiter_holds_up_no_local_waiter() {
    waiters_of_this_process_go_on(MemoryBackend::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unpolled_waiter_holds_up_no_local_waiter_on_redis() {
    let server = RedisServer::start();
    waiters_of_this_process_go_on(patient(server.url()).await).await;
}

#[tokio::test(start_paused = true)]
async fn unclaimed_grant_of_a_call_in_flight_is_released() {
    let backend = MemoryBackend::new();
    for delay in [1, 30, 90].map(Duration::from_millis) {
        let store = FaultStore::new(backend.clone());
        store.faults().delay(delay);
        for ((kind, here), (_, there)) in kinds(&store).into_iter().zip(kinds(&backend)) {
            for wait in [Duration::ZERO, WAIT] {
                let mut unpolled = here(wait);
                assert!(timeout(Duration::ZERO, &mut unpolled).await.is_err());
                sleep(delay + Duration::from_millis(1)).await;
                drop(granted_soon(kind, there(WAIT)).await);
                sleep(WAIT).await;
                assert_busy(kind, unpolled.await);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn release_begins_when_it_is_polled_or_dropped() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let lease = locks.lock("k").await.unwrap();
    let view = lease.view();
    let release = lease.release();
    sleep(WAIT).await;
    assert!(view.check().is_ok() && locks.try_lock("k").await.is_err_and(|error| error.is_busy()));
    drop(release);
    drop(locks.try_lock("k").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn caller_that_missed_a_grant_is_not_refused_as_full() {
    let backend = MemoryBackend::new();
    let bounded = [
        Locks::new(backend.clone(), "waiters").max_waiters(1),
        Locks::new(backend.clone(), "fair").fair().max_waiters(1),
        Locks::new(backend, "total").max_waiters_in_total(2),
    ];
    for locks in bounded {
        let held = locks.lock("k").await.unwrap();
        let mut unpolled = Box::pin(locks.lock("k").wait(5 * WAIT).into_future());
        assert!(timeout(MOMENT, &mut unpolled).await.is_err());
        held.release().await.unwrap();
        sleep(SOON).await;
        let held = locks.lock("k").wait(WAIT).await.unwrap();
        let mut others = JoinSet::new();
        for _ in 0..2 {
            let request = locks.lock("k").wait(5 * WAIT).into_future();
            others.spawn(async move { request.await.map(drop) });
        }
        sleep(MOMENT).await;
        assert!(timeout(MOMENT, &mut unpolled).await.is_err(), "the caller keeps waiting: {locks:?}");
        held.release().await.unwrap();
        drop(unpolled.await.unwrap());
        drop(others);
    }
}

#[tokio::test(start_paused = true)]
async fn unpolled_release_frees_the_key() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    store.faults().delay(Duration::from_millis(20));
    let (here, there) = (Locks::new(store.clone(), "default"), Locks::new(backend.clone(), "default"));
    let semaphore = Semaphore::new(store, "semaphores", 1);
    for is_lock in [true, false] {
        let request = || if is_lock { here.lock("k") } else { semaphore.acquire("k") };
        let lease = request().await.unwrap();
        let mut unpolled = Box::pin(lease.release());
        assert!(timeout(Duration::ZERO, &mut unpolled).await.is_err());
        let next = timeout(SOON, request().into_future()).await.expect("the lease is released");
        drop(next.unwrap());
        sleep(SOON).await;
        assert_eq!(backend.locks(), 0);
        assert_eq!(unpolled.await.unwrap(), ReleaseOutcome::Released);
    }
    drop(there.try_lock("k").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn late_poll_within_the_wait_gets_the_lock() {
    for (kind, take) in kinds(&MemoryBackend::new()) {
        let held = take(WAIT).await.unwrap();
        let mut waiter = take(WAIT);
        poll_for_a_moment(&mut waiter).await;
        drop(held);
        // In time for the offer, and then too late for it.
        sleep(Duration::from_millis(180)).await;
        let held = granted_soon(kind, waiter).await;
        let mut waiter = take(WAIT);
        poll_for_a_moment(&mut waiter).await;
        drop(held);
        sleep(Duration::from_secs(1)).await;
        drop(granted_soon(kind, waiter).await);
    }
}

#[tokio::test(start_paused = true)]
async fn stalled_waiter_keeps_its_position() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let held = locks.lock("k").await.unwrap();
    let mut first = locks.lock("k").wait(WAIT).into_future();
    assert!(timeout(MOMENT, &mut first).await.is_err());
    let mut second = locks.lock("k").wait(WAIT).into_future();
    assert!(timeout(MOMENT, &mut second).await.is_err());
    let mut third = locks.lock("k").wait(WAIT).into_future();
    assert!(timeout(MOMENT, &mut third).await.is_err());
    drop(held);
    // The first two miss their offers, one after the other.
    let held = timeout(SOON, &mut third).await.expect("the stalled waiters are skipped").unwrap();
    assert!(timeout(MOMENT, &mut second).await.is_err());
    assert!(timeout(MOMENT, &mut first).await.is_err());
    drop(held);
    let held = timeout(MOMENT, &mut first).await.expect("the first one comes before the second").unwrap();
    assert!(timeout(MOMENT, &mut second).await.is_err());
    drop(held);
    drop(timeout(MOMENT, second).await.expect("the lock is free").unwrap());
}

/// Regression: with an untrue store error, two requests ran under one exclusive lock.
#[tokio::test(start_paused = true)]
async fn unpolled_request_opens_no_lock_on_store_error() {
    let layer = LockLayer::new(MemoryBackend::new(), "requests")
        .wait(Duration::from_millis(400))
        .on_store_error(OnStoreError::Allow)
        .key(|_: &Request<()>| "k");
    let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let handler = {
        let (running, most) = (Arc::clone(&running), Arc::clone(&most));
        service_fn(move |_: Request<()>| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(Duration::from_millis(150)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
            }
        })
    };
    let service = layer.layer(handler);
    let request = || Request::post("/").body(()).unwrap();
    let first = tokio::spawn(service.clone().oneshot(request()));
    sleep(MOMENT).await;
    let mut unpolled = Box::pin(service.clone().oneshot(request()));
    assert!(timeout(MOMENT, &mut unpolled).await.is_err());
    let others: Vec<_> = (0..4).map(|_| tokio::spawn(service.clone().oneshot(request()))).collect();
    drop(first.await.unwrap().unwrap().collect().await.unwrap());
    for other in others {
        let status = other.await.unwrap().unwrap().status();
        assert!(status == StatusCode::OK || status == StatusCode::CONFLICT, "{status}");
    }
    assert_eq!(unpolled.await.unwrap().status(), StatusCode::CONFLICT);
    assert_eq!(most.load(Ordering::SeqCst), 1, "requests ran at the same time under the lock");
}

async fn thread_is_blocked_after_a_drop<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    for ((kind, here), (_, there)) in kinds(&store).into_iter().zip(kinds(&store)) {
        for next in [&there, &here] {
            let holder = here(WAIT).await.unwrap();
            let waiter = tokio::spawn(granted_soon(kind, next(WAIT)));
            sleep(MOMENT).await;
            let blocked = tokio::spawn(async move {
                drop(holder);
                thread::sleep(SOON + SOON / 2);
            });
            drop(waiter.await.unwrap());
            blocked.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn blocked_thread_delays_no_release() {
    thread_is_blocked_after_a_drop(MemoryBackend::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn blocked_thread_delays_no_release_on_redis() {
    let server = RedisServer::start();
    thread_is_blocked_after_a_drop(patient(server.url()).await).await;
}

async fn drop_and_try<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    for (kind, take) in kinds(&store) {
        let mut busy = 0;
        for _ in 0..100 {
            match take(Duration::ZERO).await {
                Ok(lease) => drop(lease),
                Err(LockError::Busy(_)) => busy += 1,
                Err(error) => panic!("{kind}: {error:?}"),
            }
        }
        assert_eq!(busy, 0, "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn try_after_drop_is_never_busy() {
    drop_and_try(MemoryBackend::new()).await;
    let server = RedisServer::start();
    drop_and_try(patient(server.url()).await).await;
}

#[tokio::test]
async fn try_after_drop_is_never_busy_on_one_thread() {
    drop_and_try(MemoryBackend::new()).await;
    let server = RedisServer::start();
    drop_and_try(patient(server.url()).await).await;
}

#[tokio::test(start_paused = true)]
async fn try_after_drop_waits_for_a_slow_release() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(Duration::from_millis(50));
    drop_and_try(store).await;
}

async fn sequential_requests<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let layers = [
        LockLayer::new(store.clone(), "requests").key(GlobalKey),
        LockLayer::with_locks(Locks::new(store.clone(), "fair").fair().wait(Duration::ZERO)).key(GlobalKey),
        LockLayer::with_semaphore(Semaphore::new(store.clone(), "semaphores", 1).wait(Duration::ZERO)).key(GlobalKey),
        LockLayer::with_rw_locks(RwLocks::new(store, "rw_locks").wait(Duration::ZERO)).key(GlobalKey),
    ];
    for (at, layer) in layers.into_iter().enumerate() {
        let service = layer
            .key(|_: &Request<()>| "k")
            .layer(service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))));
        for _ in 0..100 {
            let request = Request::post("/").body(()).unwrap();
            let response = service.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "layer {at}");
            response.collect().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_requests_find_their_lock_free() {
    sequential_requests(MemoryBackend::new()).await;
    let server = RedisServer::start();
    sequential_requests(patient(server.url()).await).await;
}
