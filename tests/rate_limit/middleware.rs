//! The layer around any tower service, with and without HTTP: readiness, calls of the inner service, and responses.

use std::error::Error;
use std::fmt;
use std::future::{Future, pending, ready};
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering::{self, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{
    ChargeOn, CircuitBreaker, Decision, Denied, DenyCache, Descriptors, FilterAction, LayerOptions, LimitStatus,
    MissingKey, Mode, Outcome, PolicyResolver, RateLimitHandle, RateLimited, Receipt, UnitCost,
};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{
    BoxError, ConfigError, DelayQueue, ErrorResponder, GlobalKey, Key, Limiter, MemoryBackend, OnMissingKey, Policy,
    Quota, RateLimitFallback, RateLimitLayer, StoreError, first_of,
};
use tower::util::BoxCloneService;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_test::mock::{self, Handle, Mock, Spawn};

// Readiness.

#[tokio::test(start_paused = true)]
async fn readiness_follows_the_inner_service_without_store_calls() {
    let store = Store::counting();
    let (mut service, mut inner): (Spawn<_>, Handle<&str, ()>) = mock::spawn_layer(layer(&store, per_hour(1)));

    inner.allow(0);
    assert!(service.poll_ready::<&str>().is_pending());
    assert!(!service.is_woken());
    inner.allow(1);
    assert!(service.is_woken(), "the waker of the caller reached the inner service");
    assert!(matches!(service.poll_ready::<&str>(), Poll::Ready(Ok(()))));
    assert!(matches!(service.poll_ready::<&str>(), Poll::Ready(Ok(()))), "a second poll changes nothing");
    inner.send_error(Broken);
    match service.poll_ready::<&str>() {
        Poll::Ready(Err(error)) => assert!(error.is::<Broken>()),
        other => panic!("the inner service failed, but was reported as {other:?}"),
    }
    assert_eq!(store.asked(), 0);
}

#[tokio::test(start_paused = true)]
async fn ready_instance_is_called() {
    for key in ["", "alice"] {
        let layer =
            layer(MemoryBackend::new(), per_hour(10)).key(move |_: &&str| key).on_missing_key(OnMissingKey::Pass);
        let mut service = layer.layer(Strict::default());
        for _ in 0..3 {
            // All decisions are made at once, so no clone is needed.
            let served_by = service.ready().await.unwrap().call("request").await.unwrap();
            assert_eq!(served_by, 0, "{key:?}");
        }
    }
    let mut service = layer(Store::counting(), per_hour(10)).layer(Strict::default());
    for instance in 0..3 {
        let served_by = service.ready().await.unwrap().call("request").await.unwrap();
        assert_eq!(served_by, instance, "the called instance stays with its request during the store call");
    }
}

#[tokio::test(start_paused = true)]
async fn clone_of_a_ready_service_must_become_ready_itself() {
    let mut service = layer(MemoryBackend::new(), per_hour(10)).layer(Strict::default());
    service.ready().await.unwrap();
    let mut clone = service.clone();
    assert_eq!(clone.ready().await.unwrap().call("request").await.unwrap(), 1);
    assert_eq!(service.call("request").await.unwrap(), 0, "the original stayed ready");
}

#[tokio::test(start_paused = true)]
async fn changed_layer_leaves_clones_and_services_alone() {
    let strict = layer(MemoryBackend::new(), per_hour(10)).key(|_: &&str| "");
    let service = strict.layer(service_fn(echo));
    let lenient = strict.clone().on_missing_key(OnMissingKey::Pass);
    let costly = strict.clone().key(|_: &&str| "key").cost(|_: &&str| 11);

    assert_eq!(lenient.layer(service_fn(echo)).oneshot("request").await.unwrap(), "request");
    assert!(costly.layer(service_fn(echo)).oneshot("request").await.unwrap_err().is::<RateLimited>());
    for service in [service, strict.layer(service_fn(echo))] {
        assert!(service.oneshot("request").await.unwrap_err().is::<MissingKey>());
    }
}

#[tokio::test(start_paused = true)]
async fn slow_decision_does_not_hold_up_the_next_request() {
    let gate = Arc::new(Notify::new());
    let mut service = layer(Store::gated(&gate), per_hour(10)).layer(Strict::default());
    let mut first = pin!(service.ready().await.unwrap().call("request"));
    assert!(poll_once(first.as_mut()).is_pending());
    let mut second = pin!(service.ready().await.unwrap().call("request"));
    assert!(poll_once(second.as_mut()).is_pending());
    gate.notify_waiters();
    assert_eq!(second.await.unwrap(), 1);
    assert_eq!(first.await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn rejected_request_returns_its_permit_at_once() {
    let gate = Arc::new(Notify::new());
    let permits = Arc::new(Semaphore::new(1));
    let store = Store::gated_with(&gate, || Ok(denied()));
    let mut service = layer(store, per_hour(1)).layer(Permits::of(&permits));

    let mut future = pin!(service.ready().await.unwrap().call("request"));
    assert!(poll_once(future.as_mut()).is_pending());
    assert_eq!(permits.available_permits(), 0, "the permit is held during the store call");
    gate.notify_waiters();
    assert!(matches!(poll_once(future.as_mut()), Poll::Ready(Err(_))));
    assert_eq!(permits.available_permits(), 1);
}

#[tokio::test(start_paused = true)]
async fn request_without_key_returns_its_permit_at_once() {
    let permits = Arc::new(Semaphore::new(1));
    let mut service = layer(MemoryBackend::new(), per_hour(1)).key(|_: &&str| None::<Key>).layer(Permits::of(&permits));
    let answer = service.ready().await.unwrap().call("request");
    assert_eq!(permits.available_permits(), 1);
    assert!(answer.await.unwrap_err().is::<MissingKey>());
}

#[tokio::test(start_paused = true)]
async fn admitted_request_keeps_its_permit_until_served() {
    let permits = Arc::new(Semaphore::new(1));
    let mut service = layer(MemoryBackend::new(), per_hour(1)).layer(Permits::of(&permits));
    let mut future = Box::pin(service.ready().await.unwrap().call("hang"));
    assert!(poll_once(future.as_mut()).is_pending());
    assert_eq!(permits.available_permits(), 0);
    drop(future);
    assert_eq!(permits.available_permits(), 1);
}

// Counting.

#[tokio::test(start_paused = true)]
async fn rejected_request_never_reaches_the_inner_service() {
    let (mut service, mut inner) = mocked(layer(MemoryBackend::new(), per_hour(1)));

    let mut admitted = pin!(service.ready().await.unwrap().call("first"));
    assert!(poll_once(admitted.as_mut()).is_pending());
    let Poll::Ready(Some(("first", answer))) = inner.poll_request() else { panic!("the first request did not arrive") };
    answer.send_response("served");
    assert_eq!(admitted.await.unwrap(), "served");

    let error = service.ready().await.unwrap().call("second").await.unwrap_err();
    assert!(error.is::<RateLimited>());
    assert_no_more_calls(service, &mut inner);
}

#[tokio::test(start_paused = true)]
async fn clones_of_a_service_share_counts() {
    let service = layer(MemoryBackend::new(), per_hour(2)).layer(service_fn(echo));
    let clone = service.clone();
    assert!(service.clone().oneshot("a").await.is_ok());
    assert!(clone.clone().oneshot("b").await.is_ok());
    assert!(service.oneshot("c").await.unwrap_err().is::<RateLimited>());
    assert!(clone.oneshot("d").await.unwrap_err().is::<RateLimited>());
}

#[tokio::test(start_paused = true)]
async fn services_of_one_layer_and_of_its_clones_share_counts() {
    let layer = layer(MemoryBackend::new(), per_hour(3));
    let services = [
        layer.layer(service_fn(echo as fn(&'static str) -> _)),
        layer.layer(service_fn(echo)),
        layer.clone().layer(service_fn(echo)),
    ];
    for service in &services {
        assert!(service.clone().oneshot("within").await.is_ok());
    }
    for service in services {
        assert!(service.oneshot("beyond").await.unwrap_err().is::<RateLimited>());
    }
}

#[tokio::test(start_paused = true)]
async fn request_is_charged_by_each_layer() {
    let layer = layer(MemoryBackend::new(), per_hour(3));
    let service = ServiceBuilder::new().layer(layer.clone()).layer(layer).service(service_fn(echo));
    assert!(service.clone().oneshot("charged 1 and 2").await.is_ok());
    // The outer layer takes the last unit, so the inner layer denies.
    assert!(service.oneshot("charged 3").await.unwrap_err().is::<RateLimited>());
}

#[tokio::test(start_paused = true)]
async fn keys_are_counted_separately() {
    let service = layer(MemoryBackend::new(), per_hour(1)).key(|tenant: &&'static str| *tenant).layer(service_fn(echo));
    assert!(service.clone().oneshot("acme").await.is_ok());
    assert!(service.clone().oneshot("globex").await.is_ok());
    assert!(service.clone().oneshot("acme").await.is_err());
    assert!(service.oneshot("globex").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn quota_returns_when_its_window_ends() {
    let service = layer(MemoryBackend::new(), per_hour(1)).layer(service_fn(echo));
    assert!(service.clone().oneshot("first").await.is_ok());
    let error = service.clone().oneshot("second").await.unwrap_err();
    let wait = error.downcast::<RateLimited>().unwrap().retry_after().unwrap();
    tokio::time::advance(wait - Duration::from_millis(1)).await;
    assert!(service.clone().oneshot("too early").await.is_err());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(service.oneshot("in time").await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_do_not_exceed_the_quota() {
    let service = layer(MemoryBackend::new(), per_hour(50)).layer(service_fn(echo));
    let tasks: Vec<_> = (0..400).map(|_| tokio::spawn(service.clone().oneshot("request"))).collect();
    let mut passed = 0;
    for task in tasks {
        passed += usize::from(task.await.unwrap().is_ok());
    }
    assert_eq!(passed, 50);
}

// Errors.

#[tokio::test(start_paused = true)]
async fn inner_error_passes_through() {
    let service =
        layer(MemoryBackend::new(), per_hour(1)).layer(service_fn(|_: &'static str| ready(Err::<(), Broken>(Broken))));
    let error = service.oneshot("request").await.unwrap_err();
    assert_eq!(*error.downcast::<Broken>().unwrap(), Broken);
}

#[tokio::test(start_paused = true)]
async fn request_stays_charged_if_the_inner_service_fails() {
    let service =
        layer(MemoryBackend::new(), per_hour(1)).layer(service_fn(|_: &'static str| ready(Err::<(), Broken>(Broken))));
    assert!(service.clone().oneshot("request").await.unwrap_err().is::<Broken>());
    assert!(service.oneshot("request").await.unwrap_err().is::<RateLimited>());
}

#[tokio::test(start_paused = true)]
async fn rejection_names_the_policy_and_the_wait() {
    let service = layer(MemoryBackend::new(), per_hour(1)).layer(service_fn(echo));
    assert!(service.clone().oneshot("first").await.is_ok());
    tokio::time::advance(Duration::from_secs(600)).await;
    let error = service.oneshot("second").await.unwrap_err();
    assert_eq!(error.to_string(), "rate limit `test` exceeded, try again in 3000 s");
    let limited = error.downcast::<RateLimited>().unwrap();
    assert_eq!(limited.policy(), "test");
    assert_eq!(limited.retry_after(), Some(Duration::from_secs(3_000)));
    assert_eq!(limited.decision().outcome(), Outcome::Limited);
    assert_eq!(limited.decision().capacity(), 1);
    assert_eq!(limited.decision().remaining(), Some(0));
}

// Cancellation.

#[tokio::test(start_paused = true)]
async fn drop_during_a_store_call_never_calls_the_inner_service() {
    let gate = Arc::new(Notify::new());
    let (mut service, mut inner) = mocked(layer(Store::gated(&gate), per_hour(1)));
    let mut future = Box::pin(service.ready().await.unwrap().call("request"));
    assert!(poll_once(future.as_mut()).is_pending());
    drop(future);
    gate.notify_waiters();
    assert_no_more_calls(service, &mut inner);
}

#[tokio::test(start_paused = true)]
async fn drop_during_a_store_call_leaves_nothing_behind() {
    let (held, asking, request) = (Arc::new(()), Arc::new(()), Arc::new(()));
    let store = Store::new({
        let asking = Arc::clone(&asking);
        move |_, _, _| {
            let asking = Arc::clone(&asking);
            async move {
                pending::<()>().await;
                drop(asking);
                Ok(allowed())
            }
        }
    });
    let mut service = layer(store, per_hour(1)).layer(Holding(Arc::clone(&held)));
    let counts = || [&held, &asking, &request].map(Arc::strong_count);
    let before = counts();

    let mut future = Box::pin(service.ready().await.unwrap().call(Arc::clone(&request)));
    assert!(poll_once(future.as_mut()).is_pending());
    assert_eq!(counts(), before.map(|count| count + 1), "the instance, the store call and the request are alive");
    drop(future);
    assert_eq!(counts(), before);
    drop(service);
    assert_eq!(counts(), [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn drop_during_the_inner_call_drops_the_inner_future() {
    let held = Arc::new(());
    let mut service = layer(MemoryBackend::new(), per_hour(1)).layer(Holding(Arc::clone(&held)));
    let mut future = Box::pin(service.ready().await.unwrap().call(Arc::new(())));
    assert!(poll_once(future.as_mut()).is_pending());
    drop(service);
    assert_eq!(Arc::strong_count(&held), 2, "only the inner future is left");
    drop(future);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[tokio::test(start_paused = true)]
async fn request_dropped_after_admission_stays_charged() {
    let mut service = layer(MemoryBackend::new(), per_hour(1)).layer(Holding(Arc::new(())));
    let mut future = Box::pin(service.ready().await.unwrap().call(Arc::new(())));
    assert!(poll_once(future.as_mut()).is_pending());
    drop(future);
    assert!(service.oneshot(Arc::new(())).await.unwrap_err().is::<RateLimited>());
}

#[tokio::test(start_paused = true)]
async fn unpolled_future_calls_no_remote_store() {
    let store = Store::counting();
    let (mut service, mut inner) = mocked(layer(&store, per_hour(1)));
    drop(service.ready().await.unwrap().call("request"));
    assert_eq!(store.asked(), 0);
    assert_no_more_calls(service, &mut inner);
}

#[tokio::test(start_paused = true)]
async fn local_decision_is_made_in_call() {
    let (mut service, mut inner) = mocked(layer(MemoryBackend::new(), per_hour(1)));
    inner.allow(2);
    let _answer = service.ready().await.unwrap().call("request");
    let (request, _) = inner.next_request().await.unwrap();
    assert_eq!(request, "request");
}

// Slow stores.

#[tokio::test(start_paused = true)]
async fn hanging_store_lets_requests_pass_after_100_ms() {
    let service = layer(Store::hanging(), per_hour(1)).layer(service_fn(echo));
    let start = Instant::now();
    assert_eq!(service.oneshot("request").await.unwrap(), "request");
    assert_eq!(start.elapsed(), Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn hanging_store_is_a_timeout_if_the_layer_denies() {
    let layer = layer(Store::hanging(), per_hour(1)).on_store_error(RateLimitFallback::Deny);
    let (mut service, mut inner) = mocked(layer);
    let start = Instant::now();
    let error = service.ready().await.unwrap().call("request").await.unwrap_err();
    assert_eq!(start.elapsed(), Duration::from_millis(100));
    assert!(error.downcast::<StoreError>().unwrap().is_timeout());
    assert_no_more_calls(service, &mut inner);
}

/// The literal is a `u64` without a suffix.
#[tokio::test(start_paused = true)]
async fn closure_with_integer_literal_is_a_cost() {
    type Request = http::Request<()>;
    let layer = RateLimitLayer::new(MemoryBackend::new(), per_hour(5)).responder(ErrorResponder);
    let hello = service_fn(async |_: Request| Ok::<_, BoxError>(()));
    let service = layer.cost(|_: &Request| 3).layer(hello);
    service.clone().oneshot(Request::new(())).await.unwrap();
    let limited = service.oneshot(Request::new(())).await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!((limited.cost(), limited.decision().remaining()), (3, Some(2)));
}

#[tokio::test(start_paused = true)]
async fn free_request_passes_a_failing_store_but_no_block() {
    let (store, policy) = (FaultStore::new(MemoryBackend::new()), per_hour(1));
    let layer = RateLimitLayer::new(store.clone(), policy.clone()).responder(ErrorResponder);
    let service = layer
        .on_store_error(RateLimitFallback::Deny)
        .cost(|cost: &u64| *cost)
        .layer(service_fn(async |cost: u64| Ok::<_, BoxError>(cost)));
    for _ in 0..3 {
        assert_eq!(service.clone().oneshot(0).await.unwrap(), 0);
    }
    store.faults().fail(Failure::Unavailable);
    assert_eq!(service.clone().oneshot(0).await.unwrap(), 0);
    assert!(service.clone().oneshot(1).await.unwrap_err().is::<StoreError>());
    store.faults().heal();
    assert_eq!(service.clone().oneshot(1).await.unwrap(), 1);
    assert_eq!(service.clone().oneshot(0).await.unwrap(), 0, "although nothing is left");
    Limiter::new(store.clone(), policy).block(Key::GLOBAL, Duration::from_secs(60)).await.unwrap();
    let refused = service.oneshot(0).await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!(refused.decision().outcome(), Outcome::Blocked);
    let nothing = RateLimitLayer::new(store, per_hour(0)).responder(ErrorResponder).cost(|cost: &u64| *cost);
    assert!(
        nothing
            .layer(service_fn(async |cost: u64| Ok::<_, BoxError>(cost)))
            .oneshot(0)
            .await
            .unwrap_err()
            .is::<RateLimited>()
    );
}

#[tokio::test(start_paused = true)]
async fn deadline_can_be_set() {
    for millis in [1, 20, 5_000] {
        let deadline = Duration::from_millis(millis);
        for on_store_error in [RateLimitFallback::Allow, RateLimitFallback::Deny] {
            let layer = layer(Store::hanging(), per_hour(1)).on_store_error(on_store_error).deadline(deadline);
            let start = Instant::now();
            let answer = layer.layer(service_fn(echo)).oneshot("request").await;
            assert_eq!(start.elapsed(), deadline);
            assert_eq!(answer.is_ok(), on_store_error == RateLimitFallback::Allow);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn decision_just_before_the_deadline_counts() {
    for (answer, passes) in [(allowed(), true), (denied(), false)] {
        let store = Store::new(move |_, _, _| {
            let answer = answer.clone();
            async move {
                sleep(Duration::from_millis(99)).await;
                Ok(answer)
            }
        });
        let start = Instant::now();
        let service = layer(store, per_hour(1)).layer(service_fn(echo));
        let passed = match service.oneshot("request").await {
            Ok(_) => true,
            Err(error) => !error.is::<RateLimited>(),
        };
        assert_eq!(passed, passes);
        assert_eq!(start.elapsed(), Duration::from_millis(99));
    }
}

#[tokio::test(start_paused = true)]
async fn deadline_does_not_limit_the_inner_service() {
    let service = layer(MemoryBackend::new(), per_hour(1)).layer(service_fn(async |_: &'static str| {
        sleep(Duration::from_secs(60)).await;
        Ok::<_, Broken>("at last")
    }));
    assert_eq!(service.oneshot("request").await.unwrap(), "at last");
}

/// Returns the invalid setting that prevented the store call, if that is the cause.
fn setting<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a ConfigError> {
    error.source().and_then(<dyn Error>::downcast_ref)
}

/// Regression: every decision of Redis was late then, and each process admitted the whole quota.
#[tokio::test(start_paused = true)]
async fn zero_deadline_is_a_config_error_without_a_store_call() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    faults.delay(Duration::from_millis(1));
    let expected = ConfigError::ZeroTimeout { setting: "deadline" };
    for then in [RateLimitFallback::Local, RateLimitFallback::Allow, RateLimitFallback::Deny] {
        let service = |policy: Policy| {
            let layer = RateLimitLayer::new(store.clone(), policy)
                .responder(ErrorResponder)
                .on_store_error(then)
                .deadline(Duration::ZERO);
            layer.layer(service_fn(async |request: &'static str| Ok::<_, BoxError>(request)))
        };
        let enforced = service(per_hour(5));
        // More requests than it takes to open the circuit.
        for _ in 0..10 {
            let error = enforced.clone().oneshot("alice").await.unwrap_err();
            assert_eq!(setting(&*error), Some(&expected), "{then:?}");
        }
        // A shadow policy rejects no request for an invalid setting either.
        assert_eq!(service(per_hour(5).shadow()).oneshot("alice").await.unwrap(), "alice");
    }

    let limiter = Limiter::new(store.clone(), per_hour(5)).deadline(Duration::ZERO);
    assert_eq!(setting(&limiter.check("alice").await.unwrap_err()), Some(&expected));
    assert_eq!(setting(&limiter.peek("alice").await.unwrap_err()), Some(&expected));
    let queue = DelayQueue::<u8>::new(store, "numbers").deadline(Duration::ZERO);
    assert_eq!(setting(&queue.push(7).await.unwrap_err()), Some(&expected));
    assert_eq!(faults.total_calls(), 0);
}

// Several keys, filters, resolvers.

#[tokio::test(start_paused = true)]
async fn request_is_charged_to_all_its_keys_or_to_none() {
    let backend = MemoryBackend::new();
    let [user, address, total] = [("user", 2), ("address", 3), ("total", 100)]
        .map(|(name, limit)| Policy::new(name, Quota::per_hour(limit).fixed_window()));
    // A request is (user, address).
    let service = RateLimitLayer::new(backend.clone(), user.clone())
        .responder(ErrorResponder)
        .key(|request: &(&'static str, &'static str)| request.0)
        .and(address.clone(), |request: &(&'static str, &'static str)| request.1)
        .and(total.clone(), tollgate::GlobalKey)
        .layer(service_fn(async |_: (&'static str, &'static str)| Ok::<_, Broken>(())));
    let ask = |user, address| service.clone().oneshot((user, address));
    let denied_by = |error: BoxError| error.downcast::<RateLimited>().unwrap().policy().to_owned();
    ask("alice", "home").await.unwrap();
    ask("alice", "home").await.unwrap();
    assert_eq!(denied_by(ask("alice", "home").await.unwrap_err()), "user");
    ask("bob", "home").await.unwrap();
    assert_eq!(denied_by(ask("bob", "home").await.unwrap_err()), "address");
    ask("bob", "work").await.unwrap();

    let left = async |policy: &Policy, key: &'static str| {
        Limiter::new(backend.clone(), policy.clone()).peek(key).await.unwrap().remaining()
    };
    assert_eq!(left(&user, "alice").await, Some(0));
    assert_eq!(left(&user, "bob").await, Some(0));
    assert_eq!(left(&address, "home").await, Some(0));
    assert_eq!(left(&address, "work").await, Some(2));
    let decision = RateLimitStore::peek(&backend, &total, &Key::GLOBAL, 1).await.unwrap();
    assert_eq!(decision.remaining(), Some(96), "denied requests were not charged");
}

#[tokio::test(start_paused = true)]
async fn lists_are_checked_before_the_key() {
    let layer = layer(MemoryBackend::new(), per_hour(1))
        .allow(|request: &&str| request.starts_with("health"))
        .deny(|request: &&str| request.ends_with("evil"))
        .key(|_: &&str| None::<&str>);
    let service = layer.layer(service_fn(echo));
    for _ in 0..3 {
        assert_eq!(service.clone().oneshot("health").await.unwrap(), "health");
    }
    assert!(service.clone().oneshot("evil").await.unwrap_err().is::<Denied>());
    assert!(
        service.clone().oneshot("health of evil").await.unwrap_err().is::<Denied>(),
        "the list added last is checked first"
    );
    assert!(service.clone().oneshot("other").await.unwrap_err().is::<MissingKey>());
}

#[tokio::test(start_paused = true)]
async fn filter_runs_if_no_list_has_decided() {
    let backend = MemoryBackend::new();
    let plan = |quota| Policy::new("plan", Quota::per_hour(quota).fixed_window());
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let layer = layer(backend.clone(), per_hour(100))
        .allow(|request: &&str| request.starts_with("health"))
        .filter(move |request: &&str, descriptors: &mut Descriptors| {
            counted.fetch_add(1, Relaxed);
            match *request {
                "free" => descriptors.push(plan(1), Some("alice".into())),
                "paid" => descriptors.push(plan(3), Some("alice".into())),
                "open" => return FilterAction::Bypass,
                "nobody" => descriptors.push(plan(3), None),
                _ => return FilterAction::Deny,
            }
            FilterAction::Limit
        })
        .deny(|request: &&str| request.ends_with("evil"));
    let service = layer.layer(service_fn(echo));
    let ask = async |request| service.clone().oneshot(request).await;

    assert!(ask("health").await.is_ok());
    assert!(ask("health of evil").await.unwrap_err().is::<Denied>());
    assert_eq!(asked.load(Relaxed), 0);
    assert!(ask("open").await.is_ok());
    assert!(ask("other").await.unwrap_err().is::<Denied>());
    assert!(ask("nobody").await.unwrap_err().is::<MissingKey>());

    assert!(ask("free").await.is_ok());
    assert_eq!(ask("free").await.unwrap_err().downcast::<RateLimited>().unwrap().policy(), "plan");
    // A change of the policy keeps the count.
    assert!(ask("paid").await.is_ok());
    assert!(ask("paid").await.is_ok());
    assert!(ask("paid").await.unwrap_err().is::<RateLimited>());
    let left = backend.peek(&per_hour(100), &Key::GLOBAL, 1).await.unwrap().remaining();
    assert_eq!(left, Some(97), "denied requests were not charged");
}

#[tokio::test(start_paused = true)]
async fn shadow_policy_counts_and_rejects_nothing() {
    let backend = MemoryBackend::new();
    let policy = per_hour(2).shadow();
    let service = layer(backend.clone(), policy.clone()).layer(service_fn(echo));
    for _ in 0..10 {
        assert_eq!(service.clone().oneshot("request").await.unwrap(), "request");
    }
    let decision = RateLimitStore::peek(&backend, &policy, &Key::GLOBAL, 1).await.unwrap();
    assert_eq!(decision.remaining(), Some(0));
}

#[tokio::test(start_paused = true)]
async fn shadow_policy_does_not_affect_other_policies() {
    let backend = MemoryBackend::new();
    let trial = Policy::new("trial", Quota::per_hour(1).fixed_window()).shadow();
    let service = layer(backend.clone(), per_hour(3)).and(trial, tollgate::GlobalKey).layer(service_fn(echo));
    for turn in 0..5 {
        assert_eq!(service.clone().oneshot("request").await.is_ok(), turn < 3);
    }
}

#[tokio::test(start_paused = true)]
async fn failing_shadow_policy_does_not_affect_other_policies() {
    let memory = MemoryBackend::new();
    for hangs in [false, true] {
        let counts = memory.clone();
        let store = Store::new(move |policy, key, cost| {
            let (memory, policy, key) = (counts.clone(), policy.clone(), *key);
            async move {
                match policy.name() {
                    "trial" if hangs => pending().await,
                    "trial" => Err(StoreError::foreign_data("not ours")),
                    _ => memory.check(&policy, &key, cost).await,
                }
            }
        });
        let trial = Policy::new("trial", Quota::per_hour(1).fixed_window()).shadow();
        for on_store_error in [RateLimitFallback::Local, RateLimitFallback::Allow, RateLimitFallback::Deny] {
            let layer = layer(&store, per_hour(1)).on_store_error(on_store_error);
            memory.reset(&per_hour(1), &Key::GLOBAL).await.unwrap();
            let service = layer.and(trial.clone(), tollgate::GlobalKey).layer(service_fn(echo));
            assert!(service.clone().oneshot("request").await.is_ok(), "{on_store_error:?}");
            let error = service.oneshot("request").await.unwrap_err();
            assert!(error.is::<RateLimited>(), "{on_store_error:?}: {error}");
        }
    }
}

/// Regression: store errors of the shadow policy opened the circuit, and `RateLimitFallback` was applied to the enforced policy.
#[tokio::test(start_paused = true)]
async fn failing_shadow_policy_opens_no_circuit() {
    for (hangs, shadows) in [(true, 1), (false, 1), (true, 2)] {
        let memory = MemoryBackend::new();
        let asked = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&asked);
        let store = Store::new(move |policy, key, cost| {
            let (memory, policy, key) = (memory.clone(), policy.clone(), *key);
            let is_enforced = policy.name() == "calls";
            counts.fetch_add(usize::from(is_enforced), Relaxed);
            async move {
                match is_enforced {
                    true => memory.check(&policy, &key, cost).await,
                    false if hangs => pending().await,
                    false => Err(StoreError::unavailable("gone")),
                }
            }
        });
        let shadow = |name: &str| Policy::new(name, Quota::per_hour(1).fixed_window()).shadow();
        let layer = RateLimitLayer::new(store, Policy::new("calls", Quota::per_hour(10).fixed_window()));
        let layer = layer.on_store_error(RateLimitFallback::Deny).responder(ErrorResponder);
        let layer = layer.and(shadow("trial"), tollgate::GlobalKey);
        let service = match shadows {
            1 => BoxCloneService::new(layer.layer(service_fn(echo))),
            _ => BoxCloneService::new(layer.and(shadow("other"), tollgate::GlobalKey).layer(service_fn(echo))),
        };
        // Five sequential requests, then five concurrent ones.
        let mut requests = JoinSet::new();
        for request in 0..10 {
            requests.spawn(service.clone().oneshot("request"));
            if request < 5 {
                let answer = requests.join_next().await.unwrap().unwrap();
                assert!(answer.is_ok(), "request {request}, {shadows} shadow policies, hanging: {hangs}");
            }
        }
        while let Some(answer) = requests.join_next().await {
            assert!(answer.unwrap().is_ok(), "concurrent, {shadows} shadow policies, hanging: {hangs}");
        }
        assert!(service.oneshot("request").await.unwrap_err().is::<RateLimited>());
        assert_eq!(asked.load(Relaxed), 11);
    }
}

/// Regression: each request waited for the whole deadline while the store hung.
#[tokio::test(start_paused = true)]
async fn only_probes_wait_for_a_hanging_shadow_policy() {
    let memory = MemoryBackend::new();
    let hangs = Arc::new(AtomicBool::new(true));
    let store = Store::new({
        let (memory, hangs) = (memory.clone(), Arc::clone(&hangs));
        move |policy, key, cost| {
            let (memory, policy, key) = (memory.clone(), policy.clone(), *key);
            let hangs = policy.name() == "trial" && hangs.load(Relaxed);
            async move { if hangs { pending().await } else { memory.check(&policy, &key, cost).await } }
        }
    });
    let trial = || Policy::new("trial", Quota::per_hour(100).fixed_window()).shadow();
    let layer = layer(store, per_hour(100)).on_store_error(RateLimitFallback::Deny);
    let layer = layer.circuit_breaker(CircuitBreaker::new().failures(3).probe_interval(Duration::from_secs(10)));
    let service = layer.and(trial(), tollgate::GlobalKey).layer(service_fn(echo));
    let took = async || {
        let since = Instant::now();
        service.clone().oneshot("request").await.unwrap();
        since.elapsed()
    };
    let left = async |policy: Policy| memory.peek(&policy, &Key::GLOBAL, 1).await.unwrap().remaining();

    for _ in 0..3 {
        assert!(took().await >= Duration::from_millis(100), "the circuit is still closed");
    }
    for _ in 0..10 {
        assert_eq!(took().await, Duration::ZERO);
    }
    tokio::time::advance(Duration::from_secs(11)).await;
    assert!(took().await >= Duration::from_millis(100), "this request is a probe");
    assert_eq!(took().await, Duration::ZERO);

    hangs.store(false, Relaxed);
    assert_eq!((left(trial()).await, left(per_hour(100)).await), (Some(100), Some(85)));
    tokio::time::advance(Duration::from_secs(11)).await;
    for _ in 0..5 {
        assert_eq!(took().await, Duration::ZERO);
    }
    assert_eq!(
        (left(trial()).await, left(per_hour(100)).await),
        (Some(95), Some(80)),
        "the shadow policy counts again"
    );
}

/// Regression: a request without a shadow policy took the probe of the circuit of shadow policies, and called nothing.
#[tokio::test(start_paused = true)]
async fn request_without_a_shadow_policy_takes_no_probe() {
    let memory = MemoryBackend::new();
    let fails = Arc::new(AtomicBool::new(true));
    let store = Store::new({
        let (memory, fails) = (memory.clone(), Arc::clone(&fails));
        move |policy, key, cost| {
            let (memory, policy, key) = (memory.clone(), policy.clone(), *key);
            let fails = policy.name() == "trial" && fails.load(Relaxed);
            async move { if fails { Err(StoreError::unavailable("gone")) } else { memory.check(&policy, &key, cost).await } }
        }
    });
    let trial = Policy::new("trial", Quota::per_hour(100).fixed_window()).shadow();
    let layer = layer(store, per_hour(100));
    let layer = layer.circuit_breaker(CircuitBreaker::new().failures(3).probe_interval(Duration::from_secs(10)));
    let layer = layer.and_if_present(trial.clone(), |request: &&str| (*request == "trial").then_some("key"));
    let service = layer.layer(service_fn(echo));
    for _ in 0..3 {
        service.clone().oneshot("trial").await.unwrap();
    }
    fails.store(false, Relaxed);
    tokio::time::advance(Duration::from_secs(11)).await;
    service.clone().oneshot("request").await.unwrap();
    service.oneshot("trial").await.unwrap();
    let remaining = memory.peek(&trial, &Key::from("key"), 1).await.unwrap().remaining();
    assert_eq!(remaining, Some(99), "this request was the probe");
}

#[tokio::test(start_paused = true)]
async fn shadow_policy_passes_requests_without_a_key() {
    let trial = Policy::new("trial", Quota::per_hour(1).fixed_window());
    for (mode, passes) in [(Mode::Shadow, true), (Mode::Percent(0), true), (Mode::Percent(100), false)] {
        let alone = layer(MemoryBackend::new(), trial.clone().mode(mode)).key(|_: &&str| None::<&str>);
        assert_eq!(alone.layer(service_fn(echo)).oneshot("request").await.is_ok(), passes, "{mode:?}");
        let added = layer(MemoryBackend::new(), per_hour(1)).and(trial.clone().mode(mode), |_: &&str| None::<&str>);
        assert_eq!(added.layer(service_fn(echo)).oneshot("request").await.is_ok(), passes, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn percent_mode_limits_a_share_of_the_clients() {
    let policy = Policy::new("trial", Quota::per_hour(0).fixed_window()).mode(Mode::Percent(30));
    let service = RateLimitLayer::new(MemoryBackend::new(), policy)
        .responder(ErrorResponder)
        .key(|client: &u32| *client)
        .layer(service_fn(async |_: u32| Ok::<_, Broken>(())));
    let mut limited = 0;
    for client in 0..1_000 {
        let first = service.clone().oneshot(client).await.is_err();
        assert_eq!(service.clone().oneshot(client).await.is_err(), first, "always the same clients");
        limited += u32::from(first);
    }
    assert!((240..360).contains(&limited), "{limited} of 1,000");
}

fn plans(asked: &Arc<AtomicUsize>) -> PolicyResolver {
    let asked = Arc::clone(asked);
    PolicyResolver::new(move |key: Key| {
        asked.fetch_add(1, Relaxed);
        async move {
            sleep(Duration::from_millis(5)).await;
            match key.as_str() {
                "free" => Ok(per_hour(1)),
                "pro" => Ok(per_hour(4)),
                "slow" => std::future::pending().await,
                _ => Err("no such customer"),
            }
        }
    })
}

#[tokio::test(start_paused = true)]
async fn clients_get_the_quota_of_their_plan() {
    let asked = Arc::new(AtomicUsize::new(0));
    let service = layer(MemoryBackend::new(), per_hour(0))
        .key(|plan: &&'static str| *plan)
        .resolver(plans(&asked))
        .layer(service_fn(echo));
    for (plan, quota) in [("free", 1), ("pro", 4)] {
        let mut passed = 0;
        for _ in 0..6 {
            passed += u32::from(service.clone().oneshot(plan).await.is_ok());
        }
        assert_eq!(passed, quota, "{plan}");
    }
    assert_eq!(asked.load(Relaxed), 2, "answers are cached");
    tokio::time::advance(Duration::from_secs(61)).await;
    let all = ["pro"; 20].map(|plan| service.clone().oneshot(plan));
    let mut tasks = tokio::task::JoinSet::new();
    all.into_iter().for_each(|call| drop(tasks.spawn(call)));
    tasks.join_all().await;
    assert_eq!(asked.load(Relaxed), 3, "requests for one key share a resolver call");
}

/// A request: the key that it counts under, and the input of its resolver call.
#[derive(Clone, Copy)]
struct Call {
    client: u32,
    plan: Option<&'static str>,
}

async fn accept(_: Call) -> Result<(), BoxError> {
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn resolver_is_called_with_the_input_of_the_request() {
    let (asked, found) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let plans = PolicyResolver::of_input({
        let asked = Arc::clone(&asked);
        move |plan: &'static str| {
            asked.fetch_add(1, Relaxed);
            async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                Ok::<_, BoxError>(per_hour(if plan == "pro" { 4 } else { 1 }))
            }
        }
    });
    let count = Arc::clone(&found);
    let input = move |call: &Call| {
        count.fetch_add(1, Relaxed);
        call.plan
    };
    // The order of these methods does not matter.
    let service = layer(MemoryBackend::new(), per_hour(2))
        .resolver_from(input, plans)
        .key(|call: &Call| call.client)
        .allow(|call: &Call| call.client == 7)
        .and(Policy::new("total", Quota::per_hour(1_000).fixed_window()), GlobalKey)
        .layer(service_fn(accept));
    for (client, plan, quota) in [(1, Some("free"), 1), (2, Some("pro"), 4), (3, None, 2), (7, Some("free"), 6)] {
        let calls = [Call { client, plan }; 6].map(|call| service.clone().oneshot(call));
        let mut tasks = tokio::task::JoinSet::new();
        calls.into_iter().for_each(|call| drop(tasks.spawn(call)));
        let passed = tasks.join_all().await.iter().filter(|outcome| outcome.is_ok()).count();
        assert_eq!(passed, quota, "client {client}");
    }
    assert_eq!(asked.load(Relaxed), 2, "requests for one key share a resolver call");
    // If the cached answer is fresh, no input is extracted, so a request may have none.
    found.store(0, Relaxed);
    for plan in [Some("free"), None] {
        assert!(service.clone().oneshot(Call { client: 2, plan }).await.is_err());
    }
    assert_eq!((asked.load(Relaxed), found.load(Relaxed)), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn resolver_that_is_named_last_is_the_one_that_is_asked() {
    let by_input = || PolicyResolver::of_input(|quota: u64| ready(Ok::<_, BoxError>(per_hour(quota))));
    let by_key = PolicyResolver::new(|_| ready(Ok::<_, BoxError>(per_hour(1))));
    let layer = || layer(MemoryBackend::new(), per_hour(0));
    let passed = async |calls: Vec<Result<(), BoxError>>| calls.iter().filter(|call| call.is_ok()).count();
    let last_by_key = layer().resolver_from(|_: &Call| Some(3), by_input()).resolver(by_key.clone());
    let last_by_input = layer().resolver(by_key).resolver_from(|_: &Call| Some(2), by_input());
    let twice = layer().resolver_from(|_: &Call| Some(2), by_input()).resolver_from(|_: &Call| Some(3), by_input());
    let call = Call { client: 1, plan: None };
    let (last_by_key, last_by_input, twice) = (
        last_by_key.layer(service_fn(accept)),
        last_by_input.layer(service_fn(accept)),
        twice.layer(service_fn(accept)),
    );
    let mut outcomes = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..5 {
        outcomes[0].push(last_by_key.clone().oneshot(call).await);
        outcomes[1].push(last_by_input.clone().oneshot(call).await);
        outcomes[2].push(twice.clone().oneshot(call).await);
    }
    let [first, second, third] = outcomes;
    assert_eq!((passed(first).await, passed(second).await, passed(third).await), (1, 2, 3));
}

#[tokio::test(start_paused = true)]
async fn waiting_request_is_resolved_by_its_input_each_time() {
    let plans = PolicyResolver::of_input(|units: u64| {
        ready(Ok::<_, BoxError>(Policy::new("plan", Quota::per_second(units).fixed_window())))
    });
    let service = layer(MemoryBackend::new(), per_hour(0))
        .key(|call: &Call| call.client)
        .resolver_from(|_: &Call| Some(2), plans.time_to_live(Duration::ZERO))
        .wait(Duration::from_secs(60))
        .layer(service_fn(accept));
    let since = tokio::time::Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..10 {
        tasks.spawn(service.clone().oneshot(Call { client: 1, plan: None }));
    }
    assert!(tasks.join_all().await.iter().all(Result::is_ok));
    assert!((4_000..6_000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn forgotten_resolver_answer_applies_a_new_plan_at_once() {
    let (asked, quota) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
    let resolver = PolicyResolver::new({
        let (asked, quota) = (Arc::clone(&asked), Arc::clone(&quota));
        move |_| {
            asked.fetch_add(1, Relaxed);
            ready(Ok::<_, BoxError>(per_hour(quota.load(Relaxed) as u64)))
        }
    });
    let service = layer(MemoryBackend::new(), per_hour(0))
        .key(|customer: &&'static str| *customer)
        .resolver(resolver.clone())
        .layer(service_fn(echo));
    let passes = async |customer| service.clone().oneshot(customer).await.is_ok();
    assert!(passes("alice").await && passes("bob").await);
    quota.store(2, Relaxed);
    assert!(!passes("alice").await, "the cached answer is used");
    resolver.forget(&"alice".into());
    assert!(passes("alice").await && !passes("alice").await, "the units used before still count");
    assert!(!passes("bob").await, "the answers for other keys stay cached");
    assert_eq!(asked.load(Relaxed), 3);
    resolver.forget(&"nobody".into());
}

#[tokio::test(start_paused = true)]
async fn resolver_applies_only_to_the_key_of_the_layer() {
    let asked = Arc::new(AtomicUsize::new(0));
    let total = Policy::new("total", Quota::per_hour(2).fixed_window());
    let later = Later(Arc::default());
    let service = layer(MemoryBackend::new(), per_hour(1))
        .key(|_: &&'static str| None::<&str>)
        .and(total, |plan: &&'static str| *plan)
        .on_missing_key(OnMissingKey::Pass)
        .resolver(plans(&asked))
        .charge_on(later.clone())
        .layer(service_fn(echo));
    for _ in 0..2 {
        service.clone().oneshot("pro").await.unwrap();
    }
    let error = service.oneshot("pro").await.unwrap_err();
    assert_eq!(error.downcast::<RateLimited>().unwrap().policy(), "total");
    assert_eq!(asked.load(Relaxed), 0);
    let handle = later.0.lock().unwrap().pop().unwrap();
    assert_eq!(handle.decision().map(Decision::capacity), Some(2), "the policy of the layer made no decision");
}

#[tokio::test(start_paused = true)]
async fn failing_or_hanging_resolver_is_a_store_error() {
    let asked = Arc::new(AtomicUsize::new(0));
    let layer = layer(MemoryBackend::new(), per_hour(1)).key(|plan: &&'static str| *plan).resolver(plans(&asked));
    let closed = layer.clone().on_store_error(RateLimitFallback::Deny).layer(service_fn(echo));
    let start = Instant::now();
    let error = closed.clone().oneshot("slow").await.unwrap_err();
    assert!(error.downcast::<StoreError>().unwrap().is_timeout());
    assert_eq!(start.elapsed(), Duration::from_millis(100));
    let error = closed.oneshot("nobody").await.unwrap_err();
    let cause = error.downcast::<StoreError>().unwrap();
    assert_eq!(std::error::Error::source(&*cause).unwrap().to_string(), "no such customer");

    let local = layer.layer(service_fn(echo));
    assert!(local.clone().oneshot("nobody").await.is_ok());
    assert!(local.oneshot("nobody").await.unwrap_err().is::<RateLimited>(), "limited by the policy of the layer");
}

/// If the resolver fails, the policy of the layer applies only to local decisions. Regression: if that policy had a quota of 0, it applied
/// in all modes, so a job was discarded for good.
#[tokio::test(start_paused = true)]
async fn resolver_failure_does_not_concern_the_layer_policy() {
    let fails = PolicyResolver::new(|_| ready(Err::<Policy, _>("the database is away")));
    let layer = layer(MemoryBackend::new(), per_hour(0)).resolver(fails);
    let answer = async |on_store_error| {
        let service = layer.clone().on_store_error(on_store_error).layer(service_fn(echo));
        service.oneshot("request").await
    };
    assert!(answer(RateLimitFallback::Deny).await.unwrap_err().is::<StoreError>());
    assert_eq!(answer(RateLimitFallback::Allow).await.unwrap(), "request");
    let never = answer(RateLimitFallback::Local).await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!(never.decision().outcome(), Outcome::Never);

    // It makes no difference whether the policy of the layer is enforced.
    for mode in [Mode::Shadow, Mode::Percent(0)] {
        let fails = PolicyResolver::new(|_| ready(Err::<Policy, _>("the database is away")));
        let trial = RateLimitLayer::new(MemoryBackend::new(), per_hour(9).mode(mode)).resolver(fails);
        let trial = trial.responder(ErrorResponder);
        let total = Policy::new("total", Quota::per_hour(9).fixed_window());
        for (then, passes) in
            [(RateLimitFallback::Deny, false), (RateLimitFallback::Allow, true), (RateLimitFallback::Local, true)]
        {
            let trial = trial.clone().on_store_error(then);
            let alone = trial.clone().layer(service_fn(echo)).oneshot("request").await;
            let several = trial.and(total.clone().shadow(), tollgate::GlobalKey).layer(service_fn(echo));
            for answer in [alone, several.oneshot("request").await] {
                let failed = answer.err().map(|error| error.is::<StoreError>());
                assert_eq!(failed, (!passes).then_some(true), "{mode:?} {then:?}");
            }
        }
    }

    let closed = Policy::new("closed", Quota::per_hour(0).fixed_window());
    let service =
        layer.on_store_error(RateLimitFallback::Allow).and(closed, tollgate::GlobalKey).layer(service_fn(echo));
    let never = service.oneshot("request").await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!(never.violated().collect::<Vec<_>>(), ["closed"]);
}

#[tokio::test(start_paused = true)]
async fn failing_resolver_opens_no_circuit_of_the_store() {
    let store = Store::counting();
    let service = layer(&store, per_hour(1))
        .key(|plan: &&'static str| *plan)
        .resolver(plans(&Arc::default()))
        .circuit_breaker(CircuitBreaker::new().failures(2).probe_interval(Duration::from_secs(60)))
        .layer(service_fn(echo));
    for unknown in ["nobody", "slow", "nobody", "slow", "nobody"] {
        drop(service.clone().oneshot(unknown).await);
    }
    for _ in 0..6 {
        drop(service.clone().oneshot("pro").await);
    }
    assert_eq!(store.asked(), 6);
}

#[tokio::test(start_paused = true)]
async fn slow_resolver_does_not_shorten_the_store_deadline() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(Duration::from_millis(90));
    let asked = Arc::new(AtomicUsize::new(0));
    let service = RateLimitLayer::new(store, per_hour(1))
        .responder(ErrorResponder)
        .key(|client: &u32| *client)
        .resolver(slow_plans(&asked, Duration::from_millis(95), 100))
        .on_store_error(RateLimitFallback::Deny)
        .layer(service_fn(async |_: u32| Ok::<_, Broken>(())));
    for client in 0..20 {
        let start = Instant::now();
        service.clone().oneshot(client).await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_millis(185));
    }
}

#[tokio::test(start_paused = true)]
async fn stale_answer_serves_all_waiters_if_the_refresh_fails() {
    let asked = Arc::new(AtomicUsize::new(0));
    let flaky = PolicyResolver::new({
        let asked = Arc::clone(&asked);
        move |_| {
            let first = asked.fetch_add(1, Relaxed) == 0;
            async move {
                sleep(Duration::from_millis(60)).await;
                if first { Ok(per_hour(100)) } else { Err("the database is away") }
            }
        }
    });
    let layer = layer(MemoryBackend::new(), per_hour(0)).resolver(flaky).on_store_error(RateLimitFallback::Deny);
    let service = layer.layer(service_fn(echo));
    service.clone().oneshot("request").await.unwrap();
    tokio::time::advance(Duration::from_secs(61)).await;
    let mut tasks = tokio::task::JoinSet::new();
    (0..20).for_each(|_| drop(tasks.spawn(service.clone().oneshot("request"))));
    for answer in tasks.join_all().await {
        answer.unwrap();
    }
    assert_eq!(asked.load(Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn stale_answers_make_room_for_new_answers() {
    let asked = Arc::new(AtomicUsize::new(0));
    let resolver = PolicyResolver::new({
        let asked = Arc::clone(&asked);
        move |_| {
            asked.fetch_add(1, Relaxed);
            ready(Ok::<_, BoxError>(per_hour(100)))
        }
    });
    let service = RateLimitLayer::new(MemoryBackend::new(), per_hour(0))
        .responder(ErrorResponder)
        .key(|client: &u32| *client)
        .resolver(resolver.capacity(200))
        .layer(service_fn(async |_: u32| Ok::<_, Broken>(())));
    for client in 0..200 {
        service.clone().oneshot(client).await.unwrap();
    }
    tokio::time::advance(Duration::from_secs(3_600)).await;
    asked.store(0, Relaxed);
    for _ in 0..10 {
        for client in 1_000..1_050 {
            service.clone().oneshot(client).await.unwrap();
        }
    }
    assert!(asked.load(Relaxed) < 60, "{} resolver calls for 50 clients", asked.load(Relaxed));
}

#[tokio::test(start_paused = true)]
async fn hanging_resolver_delays_a_stale_answer_by_half_a_deadline() {
    let hangs = Arc::new(AtomicBool::new(false));
    let resolver = PolicyResolver::new({
        let hangs = Arc::clone(&hangs);
        move |_| {
            let hangs = hangs.load(Relaxed);
            async move {
                if hangs {
                    pending::<()>().await;
                }
                Ok::<_, Broken>(per_hour(2))
            }
        }
    });
    let service = layer(MemoryBackend::new(), per_hour(0)).resolver(resolver).layer(service_fn(echo));
    assert!(service.clone().oneshot("request").await.is_ok());
    hangs.store(true, Relaxed);
    tokio::time::advance(Duration::from_secs(61)).await;
    let start = Instant::now();
    assert!(service.clone().oneshot("request").await.is_ok());
    assert_eq!(start.elapsed(), Duration::from_millis(50));
    let limited = service.oneshot("request").await.unwrap_err();
    assert!(limited.is::<RateLimited>(), "the stale answer is valid for another period");
    assert_eq!(start.elapsed(), Duration::from_millis(50));
}

/// Answers with so many per hour after so long, and counts how often it is asked.
fn slow_plans(asked: &Arc<AtomicUsize>, time: Duration, limit: u64) -> PolicyResolver {
    let asked = Arc::clone(asked);
    PolicyResolver::new(move |_| {
        asked.fetch_add(1, Relaxed);
        async move {
            sleep(time).await;
            Ok::<_, BoxError>(per_hour(limit))
        }
    })
}

#[tokio::test(start_paused = true)]
async fn slow_resolver_is_called_once_and_its_answer_cached() {
    let asked = Arc::new(AtomicUsize::new(0));
    let layer = layer(MemoryBackend::new(), per_hour(1))
        .resolver(slow_plans(&asked, Duration::from_millis(350), 100))
        .on_store_error(RateLimitFallback::Deny);
    let service = layer.layer(service_fn(echo));
    let start = Instant::now();
    // Three rounds of twenty requests, each of which times out after 100 ms. Before them, one request is cancelled.
    let cancelled = tokio::time::timeout(Duration::from_millis(10), service.clone().oneshot("request"));
    cancelled.await.unwrap_err();
    for _ in 0..3 {
        let mut tasks = tokio::task::JoinSet::new();
        (0..20).for_each(|_| drop(tasks.spawn(service.clone().oneshot("request"))));
        for answer in tasks.join_all().await {
            assert!(answer.unwrap_err().downcast::<StoreError>().unwrap().is_timeout());
        }
    }
    assert_eq!(start.elapsed(), Duration::from_millis(310));
    service.clone().oneshot("request").await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_millis(350), "the first call has returned");
    service.oneshot("request").await.unwrap();
    assert_eq!(asked.load(Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn late_answer_is_used_when_it_arrives() {
    let asked = Arc::new(AtomicUsize::new(0));
    let plans = PolicyResolver::new({
        let asked = Arc::clone(&asked);
        move |_| {
            let limit = if asked.fetch_add(1, Relaxed) == 0 { 1 } else { 3 };
            async move {
                sleep(Duration::from_millis(60)).await;
                Ok::<_, BoxError>(per_hour(limit))
            }
        }
    });
    let service = layer(MemoryBackend::new(), per_hour(0)).resolver(plans).layer(service_fn(echo));
    let passes = async || service.clone().oneshot("request").await.is_ok();
    assert!(passes().await);
    tokio::time::advance(Duration::from_secs(61)).await;
    let start = Instant::now();
    assert!(!passes().await && !passes().await, "the stale answer");
    assert_eq!(start.elapsed(), Duration::from_millis(50));
    sleep(Duration::from_millis(20)).await;
    assert!(passes().await && passes().await && !passes().await, "the new answer");
    assert_eq!(asked.load(Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn stale_answer_is_refreshed_once() {
    let asked = Arc::new(AtomicUsize::new(0));
    let plans = slow_plans(&asked, Duration::from_millis(90), 100).time_to_live(Duration::ZERO);
    let service = layer(MemoryBackend::new(), per_hour(0)).resolver(plans).layer(service_fn(echo));
    service.clone().oneshot("request").await.unwrap();
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    (0..20).for_each(|_| drop(tasks.spawn(service.clone().oneshot("request"))));
    tasks.join_all().await;
    assert_eq!(start.elapsed(), Duration::from_millis(50));
    for _ in 0..20 {
        service.clone().oneshot("request").await.unwrap();
    }
    assert!(start.elapsed() <= Duration::from_millis(90 + 50), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn resolver_error_is_cached_for_a_second() {
    let (asked, knows) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let plans = PolicyResolver::new({
        let (asked, knows) = (Arc::clone(&asked), Arc::clone(&knows));
        move |_| {
            asked.fetch_add(1, Relaxed);
            let knows = knows.load(Relaxed);
            async move {
                sleep(Duration::from_millis(10)).await;
                if knows { Ok(per_hour(100)) } else { Err("no such customer") }
            }
        }
    });
    let service = layer(MemoryBackend::new(), per_hour(1))
        .key(|_: &&'static str| "alice")
        .resolver(plans.clone())
        .on_store_error(RateLimitFallback::Deny)
        .layer(service_fn(echo));
    let start = Instant::now();
    for _ in 0..3 {
        let mut tasks = tokio::task::JoinSet::new();
        (0..20).for_each(|_| drop(tasks.spawn(service.clone().oneshot("request"))));
        for answer in tasks.join_all().await {
            let error = answer.unwrap_err().downcast::<StoreError>().unwrap();
            assert_eq!(error.source().unwrap().to_string(), "no such customer");
        }
    }
    assert_eq!((start.elapsed(), asked.load(Relaxed)), (Duration::from_millis(10), 1), "all requests share a call");
    knows.store(true, Relaxed);
    sleep(Duration::from_millis(999)).await;
    assert!(service.clone().oneshot("request").await.is_err());
    sleep(Duration::from_millis(1)).await;
    service.clone().oneshot("request").await.unwrap();
    assert_eq!(asked.load(Relaxed), 2, "the error is cached for one second");

    plans.forget(&"alice".into());
    knows.store(false, Relaxed);
    assert!(service.clone().oneshot("request").await.is_err());
    knows.store(true, Relaxed);
    assert!(service.clone().oneshot("request").await.is_err());
    plans.forget(&"alice".into());
    service.oneshot("request").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn resolver_failures_evict_no_cached_answers() {
    let (asked, known) = (Arc::new(AtomicUsize::new(0)), 100);
    let plans = PolicyResolver::new({
        let asked = Arc::clone(&asked);
        move |key: Key| {
            let number: u32 = key.as_str().parse().unwrap();
            asked.fetch_add(usize::from(number < known), Relaxed);
            async move {
                match number {
                    _ if number < known => Ok(per_hour(100)),
                    _ if number.is_multiple_of(2) => Err("no such customer"),
                    _ => pending().await,
                }
            }
        }
    });
    let service = RateLimitLayer::new(MemoryBackend::new(), per_hour(1))
        .responder(ErrorResponder)
        .key(|client: &u32| *client)
        .resolver(plans.capacity(known as usize))
        .layer(service_fn(async |_: u32| Ok::<_, Broken>(())));
    for client in 0..known {
        service.clone().oneshot(client).await.unwrap();
    }
    let mut tasks = tokio::task::JoinSet::new();
    (1_000..5_000).for_each(|client| drop(tasks.spawn(service.clone().oneshot(client))));
    tasks.join_all().await;
    for client in 0..known {
        service.clone().oneshot(client).await.unwrap();
    }
    assert_eq!(asked.load(Relaxed), known as usize, "one call for each known key");
}

/// Regression: the answers for invented keys evicted the answers for customers.
#[tokio::test(start_paused = true)]
async fn one_time_keys_evict_no_returning_keys() {
    let (asked, known) = (Arc::new(AtomicUsize::new(0)), 50);
    let plans = PolicyResolver::new({
        let asked = Arc::clone(&asked);
        move |key: Key| {
            let number: u32 = key.as_str().parse().unwrap();
            asked.fetch_add(usize::from(number < known), Relaxed);
            std::future::ready(Ok::<_, Broken>(if number < known { per_hour(100) } else { per_hour(1) }))
        }
    });
    let service = RateLimitLayer::new(MemoryBackend::new(), per_hour(1))
        .responder(ErrorResponder)
        .key(|client: &u32| *client)
        .resolver(plans.capacity(2 * known as usize).time_to_live(Duration::from_secs(1)))
        .layer(service_fn(async |_: u32| Ok::<_, Broken>(())));
    let customers = async || {
        for client in 0..known {
            service.clone().oneshot(client).await.unwrap();
        }
    };
    customers().await;
    customers().await;
    for turn in 1..=5 {
        for client in 0..1_000 {
            service.clone().oneshot(turn * 1_000 + client).await.unwrap();
        }
        customers().await;
        assert_eq!(asked.load(Relaxed), (turn * known) as usize, "one call for each customer and second");
        sleep(Duration::from_secs(1)).await;
        customers().await;
    }
}

#[tokio::test(start_paused = true)]
async fn hanging_resolver_call_is_abandoned() {
    let asked = Arc::new(AtomicUsize::new(0));
    let hangs = slow_plans(&asked, Duration::from_secs(3_600), 1).timeout(Duration::from_secs(2));
    let layer = layer(MemoryBackend::new(), per_hour(1)).resolver(hangs).on_store_error(RateLimitFallback::Deny);
    let service = layer.layer(service_fn(echo));
    let start = Instant::now();
    for (millis, times) in [(0, 1), (1_950, 1), (2_500, 1), (3_100, 2), (5_000, 2), (5_200, 2), (6_200, 3)] {
        tokio::time::sleep_until(start + Duration::from_millis(millis)).await;
        let error = service.clone().oneshot("request").await.unwrap_err().downcast::<StoreError>().unwrap();
        assert!(error.is_timeout());
        assert_eq!(asked.load(Relaxed), times, "after {millis} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn resolver_calls_are_bounded_and_queued() {
    let (asked, most) = (Arc::new(AtomicUsize::new(0)), PolicyResolver::MAX_RUNNING);
    let plans = slow_plans(&asked, Duration::from_millis(300), 100);
    let service = RateLimitLayer::new(MemoryBackend::new(), per_hour(0))
        .responder(ErrorResponder)
        .key(|client: &usize| *client as u64)
        .resolver(plans)
        .on_store_error(RateLimitFallback::Deny)
        .layer(service_fn(async |_: usize| Ok::<_, Broken>(())));
    let ask = async |clients: std::ops::Range<usize>| {
        let mut tasks = tokio::task::JoinSet::new();
        clients.for_each(|client| drop(tasks.spawn(service.clone().oneshot(client))));
        tasks.join_all().await.into_iter().filter(Result::is_ok).count()
    };
    let start = Instant::now();
    assert_eq!(ask(0..most + 10).await, 0);
    assert_eq!(asked.load(Relaxed), most, "the number of running calls is bounded");
    sleep(Duration::from_millis(250) - start.elapsed()).await;
    assert_eq!(ask(most..most + 10).await, 0, "their calls have started and not returned");
    assert_eq!(asked.load(Relaxed), most + 10);
    sleep(Duration::from_millis(250)).await;
    assert_eq!(ask(0..most + 10).await, most + 10);
    assert_eq!(asked.load(Relaxed), most + 10, "one call for each key");
}

#[tokio::test(start_paused = true)]
async fn answer_from_before_forget_is_not_cached() {
    let asked = Arc::new(AtomicUsize::new(0));
    let plans = PolicyResolver::new({
        let asked = Arc::clone(&asked);
        move |_| {
            // The first call takes longer than the second.
            let (limit, millis) = if asked.fetch_add(1, Relaxed) == 0 { (1, 80) } else { (2, 10) };
            async move {
                sleep(Duration::from_millis(millis)).await;
                Ok::<_, BoxError>(per_hour(limit))
            }
        }
    });
    let service = layer(MemoryBackend::new(), per_hour(0))
        .key(|customer: &&'static str| *customer)
        .resolver(plans.clone())
        .layer(service_fn(echo));
    let first = tokio::spawn(service.clone().oneshot("alice"));
    sleep(Duration::from_millis(10)).await;
    plans.forget(&"alice".into());
    service.clone().oneshot("alice").await.unwrap();
    assert!(first.await.unwrap().unwrap_err().is::<RateLimited>(), "limited by the plan at the time of the call");
    service.clone().oneshot("alice").await.unwrap();
    assert!(service.oneshot("alice").await.unwrap_err().is::<RateLimited>(), "limited by the current plan");
    assert_eq!(asked.load(Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn panicking_resolver_is_called_once() {
    // The resolver panics at once, or after it has waited.
    for waits in [false, true] {
        let asked = Arc::new(AtomicUsize::new(0));
        let plans = PolicyResolver::new({
            let asked = Arc::clone(&asked);
            move |_| {
                asked.fetch_add(1, Relaxed);
                async move {
                    if waits {
                        sleep(Duration::from_millis(10)).await;
                    }
                    if true {
                        panic!("a mistake in a resolver");
                    }
                    Ok::<_, BoxError>(per_hour(1))
                }
            }
        });
        let layer = layer(MemoryBackend::new(), per_hour(1)).resolver(plans).on_store_error(RateLimitFallback::Deny);
        let service = layer.layer(service_fn(echo));
        let mut tasks = tokio::task::JoinSet::new();
        (0..20).for_each(|_| drop(tasks.spawn(service.clone().oneshot("request"))));
        for answer in tasks.join_all().await {
            let error = answer.unwrap_err().downcast::<StoreError>().unwrap();
            assert_eq!(error.source().unwrap().to_string(), "the policy resolver has panicked");
        }
        assert_eq!(asked.load(Relaxed), 1);
    }
}

#[test]
fn resolver_call_is_repeated_if_its_runtime_ends_or_stalls() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let plans = slow_plans(&asked, Duration::from_millis(50), 100).timeout(Duration::from_millis(500));
    let service = layer(MemoryBackend::new(), per_hour(0))
        .key(|customer: &&'static str| *customer)
        .resolver(plans)
        .deadline(Duration::from_secs(1))
        .on_store_error(RateLimitFallback::Deny)
        .layer(service_fn(echo));
    let begin = |customer| {
        let runtime = runtime();
        let cancelled = async { tokio::time::timeout(Duration::ZERO, service.clone().oneshot(customer)).await };
        runtime.block_on(cancelled).unwrap_err();
        runtime
    };
    // The runtime ends while another request waits for the call.
    let first = begin("alice");
    let other = runtime();
    other.block_on(async {
        let waiting = tokio::spawn(service.clone().oneshot("alice"));
        sleep(Duration::from_millis(10)).await;
        first.shutdown_background();
        waiting.await.unwrap().unwrap();
    });
    assert_eq!(asked.load(Relaxed), 2);

    // The runtime is alive and no longer driven.
    let _still = begin("bob");
    other.block_on(async {
        service.clone().oneshot("bob").await.unwrap_err();
        sleep(Duration::from_millis(700)).await;
        service.clone().oneshot("bob").await.unwrap();
    });
    assert_eq!(asked.load(Relaxed), 4);
}

#[test]
fn immediate_resolver_needs_no_runtime() {
    let service = layer(MemoryBackend::new(), per_hour(0))
        .resolver(PolicyResolver::new(|_| ready(Ok::<_, BoxError>(per_hour(1)))))
        .layer(service_fn(echo));
    assert!(matches!(poll_once(pin!(service.clone().oneshot("request"))), Poll::Ready(Ok(_))));
    assert!(matches!(poll_once(pin!(service.oneshot("request"))), Poll::Ready(Err(_))));
}

// Charges that depend on the response.

#[derive(Clone)]
struct Login(Limiter<MemoryBackend>);

impl Login {
    fn new() -> Self {
        Self(Limiter::new(MemoryBackend::new(), per_hour(3)))
    }

    fn layer(&self) -> RateLimitLayer<MemoryBackend, GlobalKey, LayerOptions<UnitCost, ErrorResponder>> {
        layer(self.0.store().clone(), self.0.policy().clone())
    }

    async fn left(&self) -> Option<u64> {
        let store = self.0.store();
        RateLimitStore::peek(store, self.0.policy(), &Key::GLOBAL, 1).await.unwrap().remaining()
    }
}

#[tokio::test(start_paused = true)]
async fn responses_are_charged_by_their_outcome() {
    let login = Login::new();
    let service = login.layer().charge_on(|answer: Result<&bool, &BoxError>| !matches!(answer, Ok(true))).layer(
        service_fn(async |password: &'static str| match password {
            "error" => Err::<bool, BoxError>("broken".into()),
            password => Ok(password == "right"),
        }),
    );
    for _ in 0..10 {
        assert!(service.clone().oneshot("right").await.unwrap());
        assert_eq!(login.left().await, Some(3));
    }
    for left in [2, 1] {
        assert!(!service.clone().oneshot("wrong").await.unwrap());
        assert_eq!(login.left().await, Some(left));
    }
    assert!(service.clone().oneshot("error").await.is_err());
    assert!(service.oneshot("right").await.unwrap_err().is::<RateLimited>());
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_count_until_their_outcome() {
    let login = Login::new();
    let service = login.layer().charge_on(|_: Result<&(), &Broken>| false).layer(service_fn(async |_: u8| {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, Broken>(())
    }));
    let mut tasks = tokio::task::JoinSet::new();
    (0..10).for_each(|turn| drop(tasks.spawn(service.clone().oneshot(turn))));
    let passed = tasks.join_all().await.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(passed, 3);
    assert_eq!(login.left().await, Some(3));
}

#[tokio::test(start_paused = true)]
async fn cancelled_request_stays_charged() {
    let login = Login::new();
    let service = login.layer().charge_on(|_: Result<&(), &Broken>| false).layer(service_fn(async |_: u8| {
        std::future::pending::<()>().await;
        Ok::<_, Broken>(())
    }));
    let answer = tokio::time::timeout(Duration::from_secs(1), service.oneshot(1)).await;
    assert!(answer.is_err());
    assert_eq!(login.left().await, Some(2));
}

/// Keeps the handles, so that a test can settle later.
#[derive(Clone)]
struct Later(Arc<Mutex<Vec<RateLimitHandle>>>);

impl<Res, E> ChargeOn<Res, E> for Later {
    fn settle(&self, handle: &RateLimitHandle, _: Result<&mut Res, &E>) {
        self.0.lock().unwrap().push(handle.clone());
    }
}

#[tokio::test(start_paused = true)]
async fn charge_is_corrected_when_the_last_handle_is_dropped() {
    let login = Login::new();
    let later = Later(Arc::default());
    let service = login.layer().charge_on(later.clone()).cost(|_: &&str| 2).layer(service_fn(echo));
    service.clone().oneshot("request").await.unwrap();
    let handle = later.0.lock().unwrap().pop().unwrap();
    assert_eq!((handle.cost(), handle.decision().and_then(Decision::remaining)), (2, Some(1)));
    let other = handle.clone();
    handle.settle(1);
    handle.charge(5);
    handle.refund(4);
    drop(handle);
    assert_eq!(login.left().await, Some(1), "another handle is alive");
    other.refund(1);
    drop(other);
    assert_eq!(login.left().await, Some(2), "1 + 5 - 4 - 1 units are charged");
}

#[tokio::test(start_paused = true)]
async fn refund_is_at_most_the_charge() {
    let login = Login::new();
    let later = Later(Arc::default());
    let service = login.layer().charge_on(later.clone()).layer(service_fn(echo));
    service.clone().oneshot("one").await.unwrap();
    service.clone().oneshot("two").await.unwrap();
    let handles = std::mem::take(&mut *later.0.lock().unwrap());
    handles[0].refund(100);
    drop(handles);
    assert_eq!(login.left().await, Some(2), "the other request is still charged");
    service.clone().oneshot("three").await.unwrap();
    let handles = std::mem::take(&mut *later.0.lock().unwrap());
    handles[0].settle(4);
    drop(handles);
    assert_eq!(login.left().await, Some(0), "a debt leaves nothing");
}

#[tokio::test]
async fn handle_may_be_dropped_on_a_thread_without_a_runtime() {
    let login = Login::new();
    let later = Later(Arc::default());
    // The calls of this store need a timer, so they do not complete at once.
    let store = FaultStore::new(login.0.store().clone());
    let layer = RateLimitLayer::new(store.clone(), login.0.policy().clone()).responder(ErrorResponder);
    let service = layer.charge_on(later.clone()).layer(service_fn(echo));
    service.oneshot("request").await.unwrap();
    let before = login.left().await;
    store.faults().delay(Duration::from_millis(5));
    let handle = later.0.lock().unwrap().pop().unwrap();
    std::thread::spawn(move || handle.refund(1)).join().unwrap();
    let given_back = async {
        while login.left().await != before.map(|left| left + 1) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(10), given_back).await.expect("the unit was not given back");
}

#[tokio::test(start_paused = true)]
async fn free_request_can_be_charged_afterwards() {
    let login = Login::new();
    let later = Later(Arc::default());
    let service = login.layer().charge_on(later.clone()).cost(|_: &&str| 0).layer(service_fn(echo));
    service.clone().oneshot("request").await.unwrap();
    later.0.lock().unwrap().pop().unwrap().charge(2);
    assert_eq!(login.left().await, Some(1));
    service.oneshot("request").await.unwrap();
    later.0.lock().unwrap().pop().unwrap().refund(1);
    assert_eq!(login.left().await, Some(1), "an uncharged request has nothing to refund");
}

/// Regression: the charge was dropped silently, so requests during an outage cost nothing.
#[tokio::test(start_paused = true)]
async fn request_admitted_in_an_outage_can_be_charged_later() {
    // With `Deny`, a request that costs something is rejected.
    for (then, cost) in [(RateLimitFallback::Deny, 0), (RateLimitFallback::Allow, 0), (RateLimitFallback::Allow, 4)] {
        let (memory, later) = (MemoryBackend::new(), Later(Arc::default()));
        let store = FaultStore::new(memory.clone());
        let total = Policy::new("total", Quota::per_hour(9).fixed_window());
        let own = RateLimitLayer::new(store.clone(), per_hour(9)).responder(ErrorResponder).on_store_error(then);
        let own = own.charge_on(later.clone()).cost(move |_: &&str| cost);
        let admitted = async |answer: Result<&'static str, BoxError>| {
            answer.unwrap();
            store.faults().heal();
            let handle = later.0.lock().unwrap().pop().unwrap();
            assert!(handle.decision().is_none());
            handle
        };
        let left = async |policy: &Policy| memory.peek(policy, &Key::GLOBAL, 1).await.unwrap().remaining().unwrap();
        store.faults().fail(Failure::Unavailable);
        admitted(own.clone().layer(service_fn(echo)).oneshot("request").await).await.charge(3);
        assert_eq!(left(&per_hour(9)).await, 6, "{then:?} {cost}");
        store.faults().fail(Failure::Unavailable);
        let several = own.clone().and(total.clone(), tollgate::GlobalKey).layer(service_fn(echo));
        admitted(several.oneshot("request").await).await.settle(cost + 2);
        assert_eq!((left(&per_hour(9)).await, left(&total).await), (4, 7), "{then:?} {cost}");
        // An uncharged request has nothing to refund.
        store.faults().fail(Failure::Unavailable);
        admitted(own.layer(service_fn(echo)).oneshot("request").await).await.settle(0);
        assert_eq!(left(&per_hour(9)).await, 4, "{then:?} {cost}");
    }
}

#[tokio::test(start_paused = true)]
async fn charge_of_another_window_is_not_refunded() {
    let login = Login::new();
    let later = Later(Arc::default());
    let service = login.layer().charge_on(later.clone()).layer(service_fn(echo));
    service.clone().oneshot("early").await.unwrap();
    let early = std::mem::take(&mut *later.0.lock().unwrap());
    tokio::time::advance(Duration::from_secs(3_600)).await;
    service.clone().oneshot("late").await.unwrap();
    early[0].settle(0);
    drop(early);
    assert_eq!(login.left().await, Some(2));
}

// Failing stores.

#[tokio::test(start_paused = true)]
async fn fallback_counts_per_process_by_default() {
    let store = Store::failing(|| StoreError::unavailable("connection refused"));
    let layer = layer(&store, per_hour(4));
    for (replicas, quota) in [(1, 4), (3, 2), (100, 1)] {
        let service = layer.clone().replicas(replicas).key(move |_: &&str| replicas).layer(service_fn(echo));
        for turn in 0..6 {
            let answer = service.clone().oneshot("request").await;
            assert_eq!(answer.is_ok(), turn < quota, "{turn} of {quota}");
            if let Err(error) = answer {
                assert!(error.is::<RateLimited>(), "a denial, not a store error: {error:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn fallback_charges_all_descriptors_or_none() {
    let total = Policy::new("total", Quota::per_hour(6).fixed_window());
    for (replicas, per_user, in_total) in [(1, 4, 6), (2, 2, 3)] {
        let service = layer(&Store::failing(|| StoreError::unavailable("connection refused")), per_hour(4))
            .key(|user: &&'static str| *user)
            .and(total.clone(), tollgate::GlobalKey)
            .replicas(replicas)
            .layer(service_fn(echo));
        let denied_by = async |user| {
            let error = service.clone().oneshot(user).await.err()?.downcast::<RateLimited>().unwrap();
            Some(error.decisions().map(|(policy, _)| policy.to_owned()).collect::<Vec<_>>())
        };
        for _ in 0..per_user {
            assert_eq!(denied_by("alice").await, None);
        }
        // The total is not charged.
        for _ in 0..3 {
            assert_eq!(denied_by("alice").await, Some(vec!["test".to_owned()]), "{replicas}");
        }
        for _ in per_user..in_total {
            assert_eq!(denied_by("bob").await, None, "{replicas}");
        }
        // In turn, the total denies a user with quota left.
        assert_eq!(denied_by("bob").await, Some(vec!["total".to_owned()]));
        assert_eq!(denied_by("alice").await.map(|policies| policies.len()), Some(2));
    }
}

#[tokio::test(start_paused = true)]
async fn recovered_store_decides_again() {
    let broken = Arc::new(AtomicBool::new(true));
    let store = Store::new({
        let broken = Arc::clone(&broken);
        move |_, _, _| {
            let answer = if broken.load(Relaxed) { Err(StoreError::timeout()) } else { Ok(allowed()) };
            async { answer }
        }
    });
    let service = layer(&store, per_hour(1)).layer(service_fn(echo));
    assert!(service.clone().oneshot("request").await.is_ok());
    assert!(service.clone().oneshot("request").await.is_err(), "the local quota is used up");
    broken.store(false, Relaxed);
    for _ in 0..5 {
        assert!(service.clone().oneshot("request").await.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn allow_mode_passes_everything_if_the_store_fails() {
    let store = Store::failing(|| StoreError::unavailable("connection refused"));
    let layer =
        layer(&store, per_hour(1)).on_store_error(RateLimitFallback::Allow).circuit_breaker(CircuitBreaker::off());
    let service = layer.layer(service_fn(echo));
    for asked in 1..=10 {
        assert_eq!(service.clone().oneshot("request").await.unwrap(), "request");
        assert_eq!(store.asked(), asked, "every request calls the store");
    }
}

#[tokio::test(start_paused = true)]
async fn hanging_store_delays_few_requests() {
    let broken = Arc::new(AtomicBool::new(true));
    let store = Store::new({
        let broken = Arc::clone(&broken);
        move |_, _, _| {
            let broken = broken.load(Relaxed);
            async move {
                if broken {
                    std::future::pending::<()>().await;
                }
                Ok(allowed())
            }
        }
    });
    let service = layer(&store, per_hour(1)).on_store_error(RateLimitFallback::Deny).layer(service_fn(echo));
    let mut times = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        let error = service.clone().oneshot("request").await.unwrap_err();
        assert!(error.is::<StoreError>());
        times.push(start.elapsed());
        sleep(Duration::from_millis(1)).await;
    }
    let slow = times.iter().filter(|time| **time >= Duration::from_millis(100)).count();
    assert!((5..=7).contains(&slow), "{slow} of 100 waited for the deadline");
    assert!(times.iter().filter(|time| !time.is_zero()).count() == slow, "the others did not wait at all");

    // One probe detects that the outage is over.
    broken.store(false, Relaxed);
    sleep(Duration::from_millis(100)).await;
    for _ in 0..3 {
        assert!(service.clone().oneshot("request").await.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_clones_share_circuit_and_counts() {
    let store = Store::failing(|| StoreError::unavailable("connection refused"));
    // Opens at the first failure, and stays open for longer than the test takes.
    let circuit = CircuitBreaker::new().failures(1).probe_interval(Duration::from_secs(3_600));
    let first = layer(&store, per_hour(40)).circuit_breaker(circuit).layer(service_fn(echo));
    // The threads alternate: one serves with a clone of the previous thread's clone, the next with a clone of the first service.
    let (mut last, mut passed) = (first.clone(), 0);
    for turn in 0..60 {
        let service = if turn % 2 == 0 { last.clone() } else { first.clone() };
        let runtime = tokio::runtime::Handle::current();
        let serve = move || (runtime.block_on(service.clone().oneshot("request")).is_ok(), service.clone());
        let is_ok;
        (is_ok, last) = std::thread::spawn(serve).join().unwrap();
        passed += usize::from(is_ok);
    }
    assert_eq!((passed, store.asked()), (40, 1), "clones share the local counts and the open circuit");
}

#[tokio::test(start_paused = true)]
async fn request_above_the_local_share_is_not_denied_for_good() {
    let store = Store::failing(StoreError::timeout);
    let layer = layer(&store, per_hour(10)).replicas(5).cost(|request: &&str| request.len() as u64);
    let service = layer.layer(service_fn(echo));
    assert!(service.clone().oneshot("four").await.unwrap_err().is::<StoreError>());
    assert!(service.clone().oneshot("of").await.is_ok());
    assert!(service.oneshot("more than all").await.unwrap_err().is::<RateLimited>());
}

#[tokio::test(start_paused = true)]
async fn impossible_request_is_denied_in_any_store_state() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Timeout);
    let layer = |limit| RateLimitLayer::new(store.clone(), per_hour(limit)).responder(ErrorResponder);
    let total = Policy::new("total", Quota::per_hour(9).fixed_window());
    let banned = PolicyResolver::new(|_| ready(Ok::<_, BoxError>(per_hour(0))));
    for on_store_error in [RateLimitFallback::Local, RateLimitFallback::Allow, RateLimitFallback::Deny] {
        let several = layer(0).and(total.clone(), tollgate::GlobalKey).on_store_error(on_store_error);
        let plan = layer(1).resolver(banned.clone().time_to_live(Duration::ZERO));
        let (several, plan) =
            (several.layer(service_fn(echo)), plan.on_store_error(on_store_error).layer(service_fn(echo)));
        for _ in 0..10 {
            for error in [several.clone().oneshot("request").await, plan.clone().oneshot("request").await] {
                let limited = error.unwrap_err().downcast::<RateLimited>().unwrap();
                assert_eq!(limited.decision().outcome(), Outcome::Never, "{on_store_error:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn cached_denial_closes_no_circuit() {
    let plans = PolicyResolver::new(|_| ready(Ok::<_, BoxError>(per_hour(1)))).time_to_live(Duration::ZERO);
    for waits in [false, true] {
        let fails = Arc::new(AtomicBool::new(false));
        let store = Store::new({
            let (fails, memory) = (Arc::clone(&fails), MemoryBackend::new());
            move |policy, key, cost| {
                let (fails, memory, policy, key) = (fails.load(Relaxed), memory.clone(), policy.clone(), *key);
                async move { if fails { Err(StoreError::timeout()) } else { memory.check(&policy, &key, cost).await } }
            }
        });
        let layer = RateLimitLayer::new(DenyCache::new(store.clone()), per_hour(1))
            .responder(ErrorResponder)
            .key(|client: &&'static str| *client);
        let layer = if waits { layer.wait(Duration::from_secs(1)) } else { layer.resolver(plans.clone()) };
        let service = layer.layer(service_fn(echo));
        service.clone().oneshot("alice").await.unwrap();
        service.clone().oneshot("alice").await.unwrap_err();
        fails.store(true, Relaxed);
        for _ in 0..5 {
            drop(service.clone().oneshot("bob").await);
        }
        let before = store.asked();
        assert!(
            service.clone().oneshot("alice").await.unwrap_err().is::<RateLimited>(),
            "also while the circuit is open"
        );
        tokio::time::advance(Duration::from_millis(101)).await;
        assert!(service.clone().oneshot("alice").await.unwrap_err().is::<RateLimited>());
        assert_eq!(store.asked(), before, "the cache decides");
        for _ in 0..5 {
            drop(service.clone().oneshot("bob").await);
        }
        assert_eq!(store.asked(), before + 1, "expected only the probe");
    }
}

/// Regression: a shadow policy disabled the cache, and cached denials of both policies closed the circuit or kept it from opening.
#[tokio::test(start_paused = true)]
async fn shadow_policy_ignores_cached_denials_in_an_outage() {
    // With a limit of 1, the denial of the shadow policy is cached. With 9, the shadow policy needs a store call.
    for limit in [1, 9] {
        let fails = Arc::new(AtomicBool::new(false));
        let store = Store::new({
            let (fails, memory) = (Arc::clone(&fails), MemoryBackend::new());
            move |policy, key, cost| {
                let (fails, memory, policy, key) = (fails.load(Relaxed), memory.clone(), policy.clone(), *key);
                async move { if fails { Err(StoreError::timeout()) } else { memory.check(&policy, &key, cost).await } }
            }
        });
        let cache = DenyCache::new(store.clone()).max_age(Duration::from_secs(60));
        let trial = Policy::new("trial", Quota::per_hour(limit).fixed_window()).shadow();
        let service = RateLimitLayer::new(cache, per_hour(1))
            .responder(ErrorResponder)
            .key(|client: &&'static str| *client)
            .and(trial, |client: &&'static str| *client)
            .layer(service_fn(echo));
        let is_denied = async |client| {
            let answer = service.clone().oneshot(client).await;
            answer.is_err_and(|error| error.is::<RateLimited>())
        };
        assert!(!is_denied("alice").await);
        assert!(is_denied("alice").await);
        fails.store(true, Relaxed);
        for _ in 0..4 {
            is_denied("bob").await;
        }
        assert!(is_denied("alice").await);
        // This request opens the circuit, if the shadow policy has not.
        is_denied("bob").await;
        let before = store.asked();
        is_denied("bob").await;
        assert!(is_denied("alice").await, "also while the circuit is open");
        tokio::time::advance(Duration::from_millis(101)).await;
        assert!(is_denied("alice").await);
        assert_eq!(store.asked(), before, "the cache decides");
        for _ in 0..5 {
            is_denied("bob").await;
        }
        assert_eq!(store.asked(), before + 1, "expected only the probe");
    }
}

#[tokio::test(start_paused = true)]
async fn impossible_request_does_not_use_up_the_probe() {
    let fails = Arc::new(AtomicBool::new(true));
    let store = Store::new({
        let fails = Arc::clone(&fails);
        move |_, _, _| ready(if fails.load(Relaxed) { Err(StoreError::timeout()) } else { Ok(allowed()) })
    });
    let total = Policy::new("total", Quota::per_hour(9).fixed_window());
    let service = layer(&store, per_hour(3))
        .cost(|request: &&str| request.len() as u64)
        .and(total, tollgate::GlobalKey)
        .layer(service_fn(echo));
    for _ in 0..5 {
        drop(service.clone().oneshot("r").await);
    }
    fails.store(false, Relaxed);
    tokio::time::advance(Duration::from_millis(101)).await;
    drop(service.clone().oneshot("too long").await.unwrap_err());
    let before = store.asked();
    service.oneshot("r").await.unwrap();
    assert!(store.asked() > before, "the probe is still due");
}

#[tokio::test(start_paused = true)]
async fn deny_mode_returns_the_store_error() {
    type Case = (fn() -> StoreError, fn(&StoreError) -> bool);
    let cases: [Case; 4] = [
        (|| StoreError::unavailable("down"), StoreError::is_unavailable),
        (|| StoreError::unauthorized("no"), StoreError::is_unauthorized),
        (|| StoreError::out_of_memory("full"), StoreError::is_out_of_memory),
        (|| StoreError::foreign_data("a list"), StoreError::is_foreign_data),
    ];
    for (error, is_that_kind) in cases {
        let layer = layer(Store::failing(error), per_hour(1)).on_store_error(RateLimitFallback::Deny);
        let (mut service, mut inner) = mocked(layer);
        let answer = service.ready().await.unwrap().call("request").await.unwrap_err();
        let answer = answer.downcast::<StoreError>().unwrap();
        assert!(is_that_kind(&answer), "{answer:?}");
        assert_eq!(answer.source().unwrap().to_string(), error().source().unwrap().to_string());
        assert_no_more_calls(service, &mut inner);
    }
}

#[tokio::test(start_paused = true)]
async fn on_store_error_applies_to_failed_decisions_only() {
    for on_store_error in [RateLimitFallback::Allow, RateLimitFallback::Deny] {
        let turn = Arc::new(AtomicUsize::new(0));
        let store = Store::new(move |_, _, _| {
            ready(match turn.fetch_add(1, Ordering::Relaxed) % 3 {
                0 => Ok(allowed()),
                1 => Err(StoreError::other("hiccup")),
                _ => Ok(denied()),
            })
        });
        let service = layer(store, per_hour(1)).on_store_error(on_store_error).layer(service_fn(echo));
        for _ in 0..3 {
            assert!(service.clone().oneshot("allowed").await.is_ok());
            match service.clone().oneshot("failed").await {
                Ok(_) => assert_eq!(on_store_error, RateLimitFallback::Allow),
                Err(error) => {
                    assert_eq!(on_store_error, RateLimitFallback::Deny);
                    assert!(error.is::<StoreError>());
                }
            }
            assert!(service.clone().oneshot("denied").await.unwrap_err().is::<RateLimited>());
        }
    }
}

// Requests without a key.

#[tokio::test(start_paused = true)]
async fn request_without_key_is_rejected_by_default() {
    for key in [None, Some("")] {
        let store = Store::counting();
        let (mut service, mut inner) = mocked(layer(&store, per_hour(1)).key(move |_: &&str| key));
        let error = service.ready().await.unwrap().call("request").await.unwrap_err();
        assert!(error.is::<MissingKey>(), "{key:?}");
        assert_eq!(store.asked(), 0);
        assert_no_more_calls(service, &mut inner);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_without_key_can_share_a_quota() {
    let service = layer(MemoryBackend::new(), per_hour(2))
        .key(first_of(|name: &&'static str| (*name != "nobody").then_some(*name), GlobalKey))
        .layer(service_fn(echo));
    assert!(service.clone().oneshot("nobody").await.is_ok());
    assert!(service.clone().oneshot("").await.is_ok(), "an empty key counts as a missing key");
    assert!(service.clone().oneshot("nobody").await.unwrap_err().is::<RateLimited>());
    assert!(service.clone().oneshot("").await.unwrap_err().is::<RateLimited>());
    for name in ["alice", "!global"] {
        assert!(service.clone().oneshot(name).await.is_ok(), "{name} has its own quota");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_without_key_can_pass_uncounted() {
    let store = Store::counting();
    let service = layer(&store, per_hour(1))
        .key(|name: &&'static str| (*name != "nobody").then_some(*name))
        .on_missing_key(OnMissingKey::Pass)
        .layer(service_fn(echo));
    for _ in 0..3 {
        assert!(service.clone().oneshot("nobody").await.is_ok());
        assert!(service.clone().oneshot("").await.is_ok());
    }
    assert_eq!(store.asked(), 0);
    assert!(service.clone().oneshot("alice").await.is_ok());
    assert!(service.oneshot("alice").await.is_err(), "requests with a key are counted");
}

/// Regression: the setting for the key of the layer decided about added keys, so all requests were rejected or none counted.
#[tokio::test(start_paused = true)]
async fn missing_added_key_is_rejected_unless_optional() {
    type Call = (&'static str, Option<&'static str>);
    let tenant = |call: &Call| call.1;
    for (on_missing_key, passes, left) in
        [(OnMissingKey::Reject, false, [Some(10), Some(10)]), (OnMissingKey::Pass, true, [Some(9), Some(10)])]
    {
        for (if_present, absent) in [(false, None), (true, None), (true, Some(""))] {
            let backend = MemoryBackend::new();
            let policy = |name: &str| Policy::new(name, Quota::per_hour(10).fixed_window());
            let layer = RateLimitLayer::new(backend.clone(), policy("user")).responder(ErrorResponder);
            let layer = layer.key(|call: &Call| call.0).on_missing_key(on_missing_key);
            let layer = match if_present {
                true => layer.and_if_present(policy("tenant"), tenant),
                false => layer.and(policy("tenant"), tenant),
            };
            let service = layer.layer(service_fn(async |_: Call| Ok::<_, Broken>(())));
            let answer = service.clone().oneshot(("alice", absent)).await;
            let remaining = async |name, key: Key| backend.peek(&policy(name), &key, 1).await.unwrap().remaining();
            if if_present {
                assert!(answer.is_ok(), "{on_missing_key:?}");
                assert_eq!(remaining("user", "alice".into()).await, Some(9), "{on_missing_key:?}");
                assert_eq!(remaining("tenant", Key::GLOBAL).await, Some(10), "{on_missing_key:?}");
                // The setting applies to the key of the layer as before.
                let answer = service.clone().oneshot(("", None)).await;
                assert_eq!(answer.is_ok(), passes, "{on_missing_key:?}");
                service.oneshot(("alice", Some("acme"))).await.unwrap();
                assert_eq!(remaining("tenant", "acme".into()).await, Some(9), "{on_missing_key:?}");
            } else {
                assert_eq!(answer.is_ok(), passes, "{on_missing_key:?}");
                let seen = [remaining("user", "alice".into()).await, remaining("tenant", Key::GLOBAL).await];
                assert_eq!(seen, left, "{on_missing_key:?}");
            }
        }
    }
}

// Costs.

#[tokio::test(start_paused = true)]
async fn request_is_charged_its_cost_or_nothing() {
    let service = weighted(MemoryBackend::new(), per_hour(10));
    assert!(service.clone().oneshot(7).await.is_ok());
    let error = service.clone().oneshot(4).await.unwrap_err().downcast::<RateLimited>().unwrap();
    assert_eq!(error.decision().remaining(), Some(3), "a denial charges nothing");
    assert!(service.clone().oneshot(3).await.is_ok());
    assert!(service.oneshot(1).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn cost_of_0_passes_and_charges_nothing() {
    let service = weighted(MemoryBackend::new(), per_hour(1));
    for _ in 0..5 {
        assert!(service.clone().oneshot(0).await.is_ok());
    }
    assert!(service.clone().oneshot(1).await.is_ok(), "the whole quota was left");
    assert!(service.clone().oneshot(1).await.is_err());
    assert!(service.oneshot(0).await.is_ok(), "free although nothing is left");
}

#[tokio::test(start_paused = true)]
async fn cost_above_the_quota_is_denied_without_a_store_call() {
    let store = Store::counting();
    let service = weighted(&store, per_hour(3));
    for cost in [4, u64::from(u32::MAX), u64::MAX] {
        let error = service.clone().oneshot(cost).await.unwrap_err().downcast::<RateLimited>().unwrap();
        assert_eq!(error.decision().outcome(), Outcome::Never);
        assert_eq!(error.retry_after(), None, "no wait helps");
        assert_eq!(error.decision().remaining(), None);
    }
    assert_eq!(store.asked(), 0);
    assert!(service.oneshot(3).await.is_ok(), "nothing was charged");
    assert_eq!(store.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn quota_of_0_denies_without_a_store_call() {
    let store = Store::counting();
    let service = weighted(&store, per_hour(0));
    for cost in [0, 1, u64::from(u32::MAX), u64::MAX] {
        let error = service.clone().oneshot(cost).await.unwrap_err().downcast::<RateLimited>().unwrap();
        assert_eq!(error.decision(), &Decision::never([0]));
    }
    assert_eq!(store.asked(), 0);
}

#[tokio::test(start_paused = true)]
async fn permanent_denial_needs_no_working_store() {
    let service = weighted(Store::hanging(), per_hour(3));
    let start = Instant::now();
    assert!(service.oneshot(4).await.unwrap_err().is::<RateLimited>(), "denied although store errors would pass");
    assert_eq!(start.elapsed(), Duration::ZERO);
}

// Types and misuse.

#[test]
fn layer_is_send_with_a_key_that_is_not_clone() {
    fn portable<T: Clone + Send + Sync + 'static>(_: &T) {}
    fn sendable<T: Send + 'static>(_: &T) {}
    struct Unclonable;

    let secret = Unclonable;
    let price = Unclonable;
    let layer = layer(MemoryBackend::new(), per_hour(1))
        .key(move |_: &&'static str| {
            let Unclonable = &secret;
            "key"
        })
        .cost(move |_: &&'static str| {
            let Unclonable = &price;
            1
        });
    portable(&layer);
    let mut service = layer.layer(mock::pair::<&'static str, ()>().0);
    // The mock is closed, since only the types matter here.
    portable(&service);
    sendable(&service.call("request"));
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "ResponseFuture polled after completion")]
async fn polling_again_after_a_rejection_panics() {
    poll_beyond_the_end(layer(MemoryBackend::new(), per_hour(0))).await;
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "ResponseFuture polled after completion")]
async fn polling_again_after_a_missing_key_panics() {
    poll_beyond_the_end(layer(MemoryBackend::new(), per_hour(1)).key(|_: &&str| None::<Key>)).await;
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "ResponseFuture polled after completion")]
async fn polling_again_after_an_answer_panics() {
    poll_beyond_the_end(layer(MemoryBackend::new(), per_hour(1))).await;
}

// Helpers.

fn per_hour(limit: u64) -> Policy {
    Policy::new("test", Quota::per_hour(limit).fixed_window())
}

type Plain<B> = RateLimitLayer<B, GlobalKey, LayerOptions<UnitCost, ErrorResponder>>;

fn layer<B: IntoStore>(store: B, policy: Policy) -> Plain<B::Store> {
    RateLimitLayer::new(store.into_store(), policy).responder(ErrorResponder)
}

/// A service whose requests are their own costs in units.
fn weighted(
    store: impl IntoStore<Store: RateLimitStore + Clone + Send + Sync + 'static>,
    policy: Policy,
) -> impl Service<u64, Response = (), Error = BoxError, Future: Send> + Clone {
    layer(store, policy).cost(|units: &u64| *units).layer(service_fn(async |_: u64| Ok::<_, Broken>(())))
}

/// Wraps a mock in the layer.
fn mocked<L: Layer<Mock<&'static str, &'static str>>>(layer: L) -> (L::Service, Handle<&'static str, &'static str>) {
    let (inner, handle) = mock::pair();
    (layer.layer(inner), handle)
}

/// Asserts that the mock has received no request, and that no sender is left.
fn assert_no_more_calls<S>(service: S, inner: &mut Handle<&'static str, &'static str>) {
    drop(service);
    assert!(matches!(inner.poll_request(), Poll::Ready(None)));
}

async fn echo(request: &'static str) -> Result<&'static str, Broken> {
    Ok(request)
}

fn allowed() -> Decision {
    Decision::new([LimitStatus::new(1, 0, Duration::ZERO, Duration::from_secs(1))])
}

fn denied() -> Decision {
    Decision::new([LimitStatus::new(1, 0, Duration::from_secs(1), Duration::from_secs(1))])
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls a response future to its end, and once more.
async fn poll_beyond_the_end<L>(layer: L)
where
    L: Layer<Strict, Service: Service<&'static str, Error: fmt::Debug>>,
{
    let mut service = layer.layer(Strict::default());
    let mut future = pin!(service.ready().await.expect("`Strict` is always ready").call("request"));
    assert!(poll_once(future.as_mut()).is_ready());
    let _ = poll_once(future.as_mut());
}

/// The error of an inner service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken")
    }
}

impl Error for Broken {}

/// Panics if an instance is called before it was polled ready. Responds with the number of the called instance.
#[derive(Default)]
struct Strict {
    instance: usize,
    clones: Arc<AtomicUsize>,
    ready: bool,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        let instance = self.clones.fetch_add(1, Ordering::Relaxed) + 1;
        Self { instance, clones: Arc::clone(&self.clones), ready: false }
    }
}

impl Service<&'static str> for Strict {
    type Response = usize;
    type Error = Broken;
    type Future = AnswerFuture<usize, Broken>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: &'static str) -> Self::Future {
        assert!(self.ready, "instance {} was called before it was ready", self.instance);
        self.ready = false;
        Box::pin(ready(Ok(self.instance)))
    }
}

/// Ready only with a permit, like a concurrency limit. Serves every request except `hang` at once.
struct Permits {
    permits: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Permits {
    fn of(permits: &Arc<Semaphore>) -> Self {
        Self { permits: Arc::clone(permits), permit: None }
    }
}

impl Clone for Permits {
    fn clone(&self) -> Self {
        Self::of(&self.permits)
    }
}

impl Service<&'static str> for Permits {
    type Response = ();
    type Error = Broken;
    type Future = AnswerFuture<(), Broken>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        if self.permit.is_none() {
            self.permit = Arc::clone(&self.permits).try_acquire_owned().ok();
        }
        // These tests never wait for a permit, so no task has to be woken.
        if self.permit.is_some() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, request: &'static str) -> Self::Future {
        let permit = self.permit.take().expect("a permit is held");
        Box::pin(async move {
            if request == "hang" {
                pending::<()>().await;
            }
            drop(permit);
            Ok(())
        })
    }
}

/// Never responds. The service and its futures hold a token, so that tests detect leaks.
#[derive(Clone)]
struct Holding(Arc<()>);

impl Service<Arc<()>> for Holding {
    type Response = ();
    type Error = Broken;
    type Future = AnswerFuture<(), Broken>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Arc<()>) -> Self::Future {
        let held = Arc::clone(&self.0);
        Box::pin(async move {
            pending::<()>().await;
            drop(held);
            Ok(())
        })
    }
}

type AnswerFuture<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;
type Check = dyn Fn(&Policy, &Key, u64) -> AnswerFuture<Decision, StoreError> + Send + Sync;

/// A store whose decisions come from a closure, and which counts its calls.
#[derive(Clone)]
struct Store {
    check: Arc<Check>,
    asked: Arc<AtomicUsize>,
}

impl Store {
    fn new<F, Fut>(check: F) -> Self
    where
        F: Fn(&Policy, &Key, u64) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Decision, StoreError>> + Send + 'static,
    {
        Self { check: Arc::new(move |policy, key, cost| Box::pin(check(policy, key, cost))), asked: Arc::default() }
    }

    /// Decides like the memory backend.
    fn counting() -> Self {
        let memory = MemoryBackend::new();
        Self::new(move |policy, key, cost| {
            let (memory, policy, key) = (memory.clone(), policy.clone(), *key);
            async move { memory.check(&policy, &key, cost).await }
        })
    }

    fn failing(error: fn() -> StoreError) -> Self {
        Self::new(move |_, _, _| ready(Err(error())))
    }

    fn hanging() -> Self {
        Self::new(|_, _, _| pending())
    }

    /// Allows all waiting requests when the gate opens.
    fn gated(gate: &Arc<Notify>) -> Self {
        Self::gated_with(gate, || Ok(allowed()))
    }

    fn gated_with(gate: &Arc<Notify>, answer: fn() -> Result<Decision, StoreError>) -> Self {
        let gate = Arc::clone(gate);
        Self::new(move |_, _, _| {
            let gate = Arc::clone(&gate);
            async move {
                gate.notified().await;
                answer()
            }
        })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl RateLimitStore for Store {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        (self.check)(policy, key, cost).await
    }

    async fn peek(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        unreachable!("a layer never peeks")
    }

    async fn settle(&self, _: &Policy, _: &Key, _: Receipt, _: i64) -> Result<(), StoreError> {
        unreachable!("nothing is given back")
    }

    async fn block(&self, _: &Policy, _: &Key, _: Duration) -> Result<(), StoreError> {
        unreachable!("a layer never blocks")
    }

    async fn reset(&self, _: &Policy, _: &Key) -> Result<(), StoreError> {
        unreachable!("a layer never resets")
    }
}

/// A store, or a reference to a store that the test inspects afterwards.
trait IntoStore {
    type Store;
    fn into_store(self) -> Self::Store;
}

impl IntoStore for MemoryBackend {
    type Store = Self;
    fn into_store(self) -> Self {
        self
    }
}

impl IntoStore for Store {
    type Store = Self;
    fn into_store(self) -> Self {
        self
    }
}

impl IntoStore for &Store {
    type Store = Store;
    fn into_store(self) -> Store {
        self.clone()
    }
}
