use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::{JoinSet, yield_now};
use tokio::time::{sleep, timeout};
use tower::{Service, ServiceExt, service_fn};
use tower_layer::Layer;

use super::*;
use crate::error::BoxError;
use crate::key::GlobalKey;

const TIME: Duration = Duration::from_millis(200);

/// A request with an id and a caller. Zero stands for none.
#[derive(Clone, Copy)]
struct Lookup {
    caller: u64,
    id: u64,
}

impl Lookup {
    fn id(&self) -> Option<u64> {
        (self.id > 0).then_some(self.id)
    }

    fn caller(&self) -> Option<u64> {
        (self.caller > 0).then_some(self.caller)
    }
}

/// A service that takes 200 ms, and counts its calls and their ends.
#[derive(Clone, Default)]
struct Origin {
    calls: Arc<AtomicUsize>,
    ends: Arc<AtomicUsize>,
}

impl Origin {
    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    fn ends(&self) -> usize {
        self.ends.load(Ordering::Relaxed)
    }

    fn service<R: Send + 'static>(
        &self,
        outcome: fn(Lookup) -> R,
    ) -> impl Service<Lookup, Response = R, Error = BoxError, Future: Send> + Clone + Send + use<R> {
        let origin = self.clone();
        service_fn(move |lookup| {
            let origin = origin.clone();
            async move {
                origin.calls.fetch_add(1, Ordering::Relaxed);
                sleep(TIME).await;
                origin.ends.fetch_add(1, Ordering::Relaxed);
                Ok(outcome(lookup))
            }
        })
    }
}

const fn lookup(caller: u64, id: u64) -> Lookup {
    Lookup { caller, id }
}

async fn all<S>(service: &S, lookups: impl Iterator<Item = Lookup>) -> Vec<Result<S::Response, S::Error>>
where
    S: Service<Lookup, Future: Send, Response: Send, Error: Send> + Clone + Send + 'static,
{
    let mut callers = JoinSet::new();
    for lookup in lookups {
        callers.spawn(service.clone().oneshot(lookup));
    }
    callers.join_all().await
}

#[tokio::test(start_paused = true)]
async fn equal_requests_share_one_call() {
    let origin = Origin::default();
    let service = SingleFlightLayer::new(Lookup::id).public().layer(origin.service(|lookup| lookup.id));
    for response in all(&service, (0..100).map(|caller| lookup(caller, 1))).await {
        assert_eq!(response.unwrap(), 1);
    }
    assert_eq!(origin.calls(), 1);
    // Nothing is stored.
    assert_eq!(service.clone().oneshot(lookup(1, 1)).await.unwrap(), 1);
    assert_eq!(origin.calls(), 2);
    for (id, response) in (2..5).zip(all(&service, (2..5).map(|id| lookup(1, id))).await) {
        assert!((2..5).contains(&response.unwrap()), "{id}");
    }
    assert_eq!(origin.calls(), 5);
}

/// A layer without principals would send Alice's response to Bob.
#[tokio::test(start_paused = true)]
async fn principals_share_no_response() {
    let origin = Origin::default();
    let service = SingleFlightLayer::new(Lookup::id).per(Lookup::caller).layer(origin.service(|lookup| lookup.caller));
    let alice = async { all(&service, (0..50).map(|_| lookup(1, 7))).await };
    let bob = async { all(&service, (0..50).map(|_| lookup(2, 7))).await };
    let (alice, bob) = tokio::join!(alice, bob);
    assert!(alice.into_iter().all(|caller| caller.unwrap() == 1));
    assert!(bob.into_iter().all(|caller| caller.unwrap() == 2));
    assert_eq!(origin.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn request_without_key_or_principal_shares_nothing() {
    let origin = Origin::default();
    let service = SingleFlightLayer::new(Lookup::id).per(Lookup::caller).layer(origin.service(|lookup| lookup.id));
    all(&service, (0..5).map(|_| lookup(0, 1))).await;
    assert_eq!(origin.calls(), 5, "no principal");
    all(&service, (0..5).map(|_| lookup(1, 0))).await;
    assert_eq!(origin.calls(), 10, "no key");
}

#[tokio::test(start_paused = true)]
async fn cancelled_leader_strands_no_waiter() {
    let origin = Origin::default();
    let service = SingleFlightLayer::new(Lookup::id).public().layer(origin.service(|lookup| lookup.id));
    let leader = tokio::spawn(service.clone().oneshot(lookup(1, 1)));
    sleep(TIME / 4).await;
    let waiters = tokio::spawn({
        let service = service.clone();
        async move { all(&service, (0..99).map(|_| lookup(2, 1))).await }
    });
    sleep(TIME / 4).await;
    leader.abort();
    assert!(waiters.await.unwrap().into_iter().all(|response| response.unwrap() == 1));
    assert_eq!(origin.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn call_ends_with_its_last_caller() {
    let origin = Origin::default();
    let service = SingleFlightLayer::new(Lookup::id).public().layer(origin.service(|lookup| lookup.id));
    let waiters = async { all(&service, (0..10).map(|_| lookup(1, 1))).await };
    assert!(timeout(TIME / 2, waiters).await.is_err());
    sleep(TIME * 2).await;
    assert_eq!((origin.calls(), origin.ends()), (1, 0));
    assert_eq!(service.clone().oneshot(lookup(1, 1)).await.unwrap(), 1, "the key is free again");
    assert_eq!((origin.calls(), origin.ends()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn call_survives_drop_of_its_service() {
    let origin = Origin::default();
    let service = SingleFlightLayer::new(Lookup::id).public().layer(origin.service(|lookup| lookup.id));
    assert_eq!(service.oneshot(lookup(1, 1)).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn error_reaches_all_callers() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let inner = service_fn(move |_: Lookup| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {
            sleep(TIME).await;
            Err::<(), BoxError>("the origin is down".into())
        }
    });
    let service = SingleFlightLayer::new(Lookup::id).public().layer(inner);
    for response in all(&service, (0..100).map(|_| lookup(1, 1))).await {
        let SingleFlightError::Service(error) = response.unwrap_err() else { panic!("another error") };
        assert_eq!(error.to_string(), "the origin is down");
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

/// Panics in `call`, or in its future.
#[tokio::test(start_paused = true)]
async fn panic_is_error_for_all_callers() {
    for in_call in [true, false] {
        let inner = service_fn(move |_: Lookup| {
            assert!(!in_call, "in the call");
            async {
                sleep(TIME).await;
                panic!("in the future");
                #[allow(unreachable_code)]
                Ok::<(), BoxError>(())
            }
        });
        let service = SingleFlightLayer::new(Lookup::id).public().layer(inner);
        for response in all(&service, (0..10).map(|_| lookup(1, 1))).await {
            assert!(matches!(response.unwrap_err(), SingleFlightError::Aborted));
        }
        let next = service.oneshot(lookup(1, 1)).await;
        assert!(matches!(next.unwrap_err(), SingleFlightError::Aborted), "the key is free again");
    }
}

/// A service whose first call calls the service around it with the same key.
#[tokio::test(start_paused = true)]
async fn recursive_request_does_not_wait_for_itself() {
    type Outer = tower::util::BoxCloneService<u64, u64, SingleFlightError>;
    let outer: Arc<std::sync::OnceLock<std::sync::Mutex<Outer>>> = Arc::default();
    let known = Arc::clone(&outer);
    let inner = service_fn(move |depth: u64| {
        let outer = known.get().unwrap().lock().unwrap().clone();
        async move {
            if depth == 2 {
                return Ok::<_, BoxError>(depth);
            }
            Ok(outer.oneshot(depth + 1).await?)
        }
    });
    let service = SingleFlightLayer::new(GlobalKey).public().layer(inner);
    outer.set(std::sync::Mutex::new(tower::util::BoxCloneService::new(service.clone()))).unwrap();
    assert_eq!(timeout(TIME, service.oneshot(0)).await.unwrap().unwrap(), 2);
}

/// The layer calls the inner instance that reported ready, and not its clone.
#[tokio::test]
async fn ready_instance_is_called() {
    #[derive(Default)]
    struct Picky(bool);

    impl Clone for Picky {
        fn clone(&self) -> Self {
            Self(false)
        }
    }

    impl Service<u64> for Picky {
        type Response = u64;
        type Error = BoxError;
        type Future = std::future::Ready<Result<u64, BoxError>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
            self.0 = true;
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: u64) -> Self::Future {
            assert!(self.0, "not ready");
            std::future::ready(Ok(request))
        }
    }

    let mut service = SingleFlightLayer::new(GlobalKey).public().layer(Picky::default());
    for request in 0..3 {
        assert_eq!(service.ready().await.unwrap().call(request).await.unwrap(), request);
    }
}

/// The runtime lives on, so the task must end by itself.
#[tokio::test(start_paused = true)]
async fn dropped_callers_leave_no_task() {
    let alive = Arc::new(());
    let held = Arc::clone(&alive);
    let inner = service_fn(move |_: u64| {
        let held = Arc::clone(&held);
        async move {
            let _held = held;
            pending::<Result<(), BoxError>>().await
        }
    });
    let service = SingleFlightLayer::new(GlobalKey).public().layer(inner);
    assert!(timeout(TIME, service.oneshot(1)).await.is_err());
    for _ in 0..10 {
        yield_now().await;
    }
    assert_eq!(Arc::strong_count(&alive), 1);
}

/// Regression: all later requests with the key joined a call that never ended.
#[tokio::test(start_paused = true)]
async fn call_that_hangs_ends_with_its_timeout() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let inner = service_fn(move |lookup: Lookup| {
        let is_first = counted.fetch_add(1, Ordering::Relaxed) == 0;
        async move { if is_first { pending().await } else { Ok::<_, BoxError>(lookup.id) } }
    });
    let service = SingleFlightLayer::new(Lookup::id).public().call_timeout(TIME).layer(inner);
    let early = tokio::spawn(service.clone().oneshot(lookup(1, 1)));
    sleep(TIME / 2).await;
    let late = tokio::spawn(service.clone().oneshot(lookup(2, 1)));
    let begun = tokio::time::Instant::now();
    for caller in [early, late] {
        let error = caller.await.unwrap().unwrap_err();
        assert!(matches!(error, SingleFlightError::TimedOut { after: TIME }), "{error}");
    }
    assert_eq!(begun.elapsed(), TIME / 2, "the time counts from the start of the call");
    assert_eq!(service.oneshot(lookup(3, 1)).await.unwrap(), 1, "the key is free again");
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

/// Each of two calls sends a request with the key of the other one.
#[tokio::test(start_paused = true)]
async fn calls_that_need_each_other_end_with_the_timeout() {
    type Outer = tower::util::BoxCloneSyncService<u64, u64, SingleFlightError>;
    let outer: Arc<std::sync::OnceLock<Outer>> = Arc::default();
    let known = Arc::clone(&outer);
    let inner = service_fn(move |id: u64| {
        let outer = known.get().unwrap().clone();
        async move {
            sleep(TIME).await;
            Ok::<_, BoxError>(outer.oneshot(3 - id).await?)
        }
    });
    let service = SingleFlightLayer::new(|id: &u64| *id).public().layer(inner);
    outer.set(tower::util::BoxCloneSyncService::new(service.clone())).unwrap();
    let (one, two) = tokio::join!(service.clone().oneshot(1), service.oneshot(2));
    let errors = [one.unwrap_err(), two.unwrap_err()];
    // The other call may get this error from its inner service, as `SingleFlightError::Service`.
    assert!(errors.iter().any(|error| matches!(error, SingleFlightError::TimedOut { .. })), "{errors:?}");
}
