//! The metrics of a service: they have few labels, and never a key.

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{PollFn, poll_fn};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use metrics::{Counter, Gauge, Histogram, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_util::CompositeKey;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use metrics_util::registry::{AtomicStorage, Registry};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::Instant;
use tollgate::config::{Rules, RulesLayer};
use tollgate::delay_queue::Outcome;
use tollgate::http::{ClientIp, FingerprintedBody, PeerAddr, header};
use tollgate::idempotency::{Idempotent, OnUnknown, Operation};
use tollgate::lock::{LockAdmin, Segmented};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{
    ChargeOn, CircuitBreaker, Decision, DenyCache, PolicyResolver, QuotaPrefetch, RateLimitHandle, Receipt,
};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{
    BoxError, DelayQueue, DelayQueueWorker, ErrorResponder, ExistsFilter, GlobalKey, IdempotencyLayer, Job, Key,
    Limiter, LockLayer, Locks, MemoryBackend, OnStoreError, Policy, Quota, RateLimitFallback, RateLimitLayer,
    StoreError,
};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Every counter and the number of values of every histogram, by `name{label=value,...}`, without zeros. Asserts that each has a
/// description.
fn seen(snapshotter: &Snapshotter) -> BTreeMap<String, u64> {
    seen_since(snapshotter, BTreeMap::new())
}

/// Adds the new values to `seen`, because each snapshot resets them.
fn seen_since(snapshotter: &Snapshotter, mut seen: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    for (key, unit, description, value) in snapshotter.snapshot().into_vec() {
        let name = key.key().name();
        assert_eq!(unit == Some(Unit::Seconds), name.ends_with("_seconds"), "{name}");
        assert!(description.is_some_and(|text| !text.is_empty()), "{name} is not described");
        let labels: Vec<_> = key.key().labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let seen = seen.entry(format!("{name}{{{}}}", labels.join(","))).or_default();
        match value {
            DebugValue::Counter(count) => *seen += count,
            DebugValue::Histogram(values) => *seen += values.len() as u64,
            // A gauge is back at zero in the end.
            DebugValue::Gauge(value) => {
                let value = *seen as f64 + value.0;
                assert!(value.is_nan() || value >= 0.0, "{name} is {value}");
                *seen = value as u64;
            }
        }
    }
    seen.retain(|_, value| *value > 0);
    seen
}

/// A body that a test sends part by part.
type Parts =
    StreamBody<PollFn<Box<dyn FnMut(&mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> + Send>>>;

fn expect(expected: &[(&str, u64)]) -> BTreeMap<String, u64> {
    expected.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

/// A recorder, its snapshotter, and a runtime with a paused clock.
fn recording() -> (DebuggingRecorder, Snapshotter, Runtime) {
    let recorder = DebuggingRecorder::new();
    metrics::with_local_recorder(&recorder, tollgate::metrics::describe);
    let snapshotter = recorder.snapshotter();
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    (recorder, snapshotter, runtime)
}

#[test]
fn lock_requests_are_counted_by_outcome() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let breaker = CircuitBreaker::new().failures(2);
    let locks = Locks::new(store.clone(), "orders").ttl(Duration::from_secs(1)).circuit_breaker(breaker);
    let others = Locks::new(store.clone(), "orders");
    let admin = LockAdmin::new(store.get_ref().clone(), "orders");
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let lease = locks.lock("a").await.unwrap();
            assert!(locks.try_lock("a").await.is_err());
            assert!(locks.lock("a").max_hold(Duration::ZERO).await.is_err());
            // A local handoff, and a notification to a waiter of other `Locks`.
            let (waiter, other) = (locks.lock("a").into_future(), others.lock("a").into_future());
            let ((), lease, other) = tokio::join!(
                async {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    drop(lease);
                },
                async { waiter.await.unwrap().release().await },
                other,
            );
            lease.unwrap();
            other.unwrap().release().await.unwrap();
            // A lost lease, after failed renewals.
            let lease = locks.lock("b").await.unwrap();
            faults.fail(Failure::Unavailable);
            lease.lost().await;
            for _ in 0..3 {
                assert!(locks.try_lock("c").await.is_err());
            }
            faults.heal();
            drop(lease);
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(locks.try_lock("c").await.unwrap());
            locks.lock("d").max_hold(Duration::from_millis(5)).await.unwrap().lost().await;
            let lease = locks.lock("e").await.unwrap();
            admin.force_release("e").await.unwrap();
            lease.lost().await;
            // A request that finds the wait queue full, and a waiter that gets no notification.
            let lease = others.lock("f").await.unwrap();
            let waiter = locks.lock("f").wait(Duration::from_secs(5)).into_future();
            let full = locks.clone().max_waiters(0).lock("f").into_future();
            let (waiter, full) = tokio::join!(waiter, full);
            assert!(full.is_err() && waiter.is_err());
            drop(lease);
        });
    });
    let mut seen = seen(&snapshotter);
    let renewals = seen.remove("tollgate_lock_failed_renewals_total{locks=orders}");
    assert!(renewals.is_some_and(|renewals| renewals > 1), "{renewals:?}");
    let polls = seen.remove("tollgate_lock_fallback_polls_total{locks=orders}");
    assert!(polls.is_some_and(|polls| polls >= 5), "{polls:?}");
    let expected = [
        ("tollgate_lock_requests_total{locks=orders,outcome=granted}", 8),
        ("tollgate_lock_requests_total{locks=orders,outcome=busy}", 2),
        ("tollgate_lock_requests_total{locks=orders,outcome=queue_full}", 1),
        ("tollgate_lock_requests_total{locks=orders,outcome=refused}", 1),
        ("tollgate_lock_requests_total{locks=orders,outcome=failed}", 3),
        ("tollgate_lock_wait_seconds{locks=orders}", 8),
        ("tollgate_lock_hold_seconds{locks=orders}", 8),
        ("tollgate_lock_handover_seconds{locks=orders,way=hand}", 1),
        ("tollgate_lock_handover_seconds{locks=orders,way=message}", 1),
        ("tollgate_lock_lost_total{locks=orders,reason=expired}", 1),
        ("tollgate_lock_lost_total{locks=orders,reason=max_hold}", 1),
        ("tollgate_lock_lost_total{locks=orders,reason=taken}", 1),
        ("tollgate_lock_store_errors_total{locks=orders}", 2),
        ("tollgate_lock_circuit_transitions_total{locks=orders,state=open}", 1),
        ("tollgate_lock_circuit_transitions_total{locks=orders,state=closed}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

/// Regression: each lock that was acquired first counted as granted. The whole request did not count if one of them was lost meanwhile.
#[test]
fn several_locks_count_as_one_request() {
    let (recorder, snapshotter, runtime) = recording();
    let backend = MemoryBackend::new();
    let locks = Locks::new(backend.clone(), "orders").fair();
    // Acquired outside the recorder, so it does not count.
    let lease = runtime.block_on(Locks::new(backend, "orders").lock("b").into_future()).unwrap();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let both = || locks.lock_all(["a", "b"]).max_hold(Duration::from_secs(1));
            for wait in [0, 5].map(Duration::from_secs) {
                assert!(both().wait(wait).await.is_err_and(|error| error.is_busy()));
            }
            assert!(both().ttl(Duration::ZERO).await.is_err());
            drop(lease);
            drop(both().await.unwrap());
            // A request for no locks does not count.
            drop(locks.lock_all([""; 0]).await.unwrap());
        });
    });
    let mut seen = seen(&snapshotter);
    seen.retain(|name, _| name.starts_with("tollgate_lock_requests") || name.starts_with("tollgate_lock_wait"));
    let expected = [
        ("tollgate_lock_requests_total{locks=orders,outcome=granted}", 1),
        ("tollgate_lock_requests_total{locks=orders,outcome=busy}", 2),
        ("tollgate_lock_requests_total{locks=orders,outcome=refused}", 1),
        ("tollgate_lock_wait_seconds{locks=orders}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

/// Regression: each segment that was tried counted as a request, and only the last try was timed.
#[test]
fn any_segment_counts_as_one_request() {
    let (recorder, snapshotter, runtime) = recording();
    let backend = MemoryBackend::new();
    let stock = Segmented::new(&Locks::new(backend.clone(), "stock"), "sku:1", 3);
    // Acquired outside the recorder, so they do not count.
    let theirs = Segmented::new(&Locks::new(backend, "stock"), "sku:1", 3);
    let held: Vec<_> = (0..3).map(|index| runtime.block_on(theirs.one(index).into_future()).unwrap()).collect();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            assert!(stock.any().wait(Duration::ZERO).await.is_err_and(|error| error.is_busy()));
            assert!(stock.any().wait(Duration::from_millis(950)).await.is_err_and(|error| error.is_busy()));
            assert!(stock.any().among(|_| false).await.is_err_and(|error| error.is_busy()));
            assert!(stock.any().ttl(Duration::ZERO).await.is_err());
            let (segment, ()) = tokio::join!(stock.any().into_future(), async {
                tokio::time::sleep(Duration::from_millis(550)).await;
                drop(held);
            });
            drop(segment.unwrap());
        });
    });
    let (mut requests, mut waits) = (BTreeMap::new(), Vec::new());
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let labels: Vec<_> = key.key().labels().map(|label| label.value().to_owned()).collect();
        match (key.key().name(), value) {
            ("tollgate_lock_requests_total", DebugValue::Counter(count)) if count > 0 => {
                requests.insert(labels.join(" "), count);
            }
            ("tollgate_lock_wait_seconds", DebugValue::Histogram(values)) => {
                waits.extend(values.into_iter().map(f64::from));
            }
            _ => {}
        }
    }
    assert_eq!(requests, expect(&[("stock granted", 1), ("stock busy", 3), ("stock refused", 1)]));
    assert!(matches!(waits[..], [waited] if (0.55..0.66).contains(&waited)), "{waits:?}");
}

/// Regression: each of these waiters counted one more poll.
#[test]
fn timed_out_waiter_is_no_fallback_poll() {
    let (recorder, snapshotter, runtime) = recording();
    let backend = MemoryBackend::new();
    let locks = Locks::new(backend.clone(), "orders");
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let lease = Locks::new(backend, "orders").lock("a").await.unwrap();
            for _ in 0..10 {
                assert!(locks.lock("a").wait(Duration::from_millis(400)).await.is_err());
            }
            drop(lease);
        });
    });
    let seen = seen(&snapshotter);
    assert_eq!(seen.get("tollgate_lock_requests_total{locks=orders,outcome=busy}"), Some(&10));
    assert_eq!(seen.get("tollgate_lock_fallback_polls_total{locks=orders}"), None);
}

/// A store that is down.
#[derive(Clone)]
struct Down;

impl RateLimitStore for Down {
    async fn check(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        Err(StoreError::unavailable("connection refused"))
    }

    async fn peek(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        Err(StoreError::unavailable("connection refused"))
    }

    async fn settle(&self, _: &Policy, _: &Key, _: Receipt, _: i64) -> Result<(), StoreError> {
        Err(StoreError::unavailable("connection refused"))
    }

    async fn block(&self, _: &Policy, _: &Key, _: Duration) -> Result<(), StoreError> {
        Err(StoreError::unavailable("connection refused"))
    }

    async fn reset(&self, _: &Policy, _: &Key) -> Result<(), StoreError> {
        Err(StoreError::unavailable("connection refused"))
    }
}

/// Sends one request per client, one after the other, and returns the metrics.
fn ask<B>(layer: RateLimitLayer<B>, clients: &[&'static str]) -> BTreeMap<String, u64>
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    let layer = layer
        .key(|client: &&'static str| *client)
        .deny(|client: &&'static str| *client == "mallory")
        .responder(ErrorResponder)
        .charge_on(|answer: Result<&&'static str, &BoxError>| *answer.unwrap() != "free");
    seen_of(layer.layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client))), clients)
}

fn seen_of<S>(service: S, clients: &[&'static str]) -> BTreeMap<String, u64>
where
    S: Service<&'static str, Error = BoxError> + Clone,
{
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        for client in clients {
            drop(runtime.block_on(service.clone().oneshot(*client)));
        }
        drop(runtime);
    });
    seen(&snapshotter)
}

#[test]
fn decisions_are_counted_by_policy_and_outcome() {
    let policy = Policy::new("api", Quota::per_hour(2).fixed_window());
    let layer = RateLimitLayer::new(MemoryBackend::new(), policy);
    let seen = ask(layer, &["alice", "alice", "alice", "bob", "", "mallory", "free"]);
    let expected = [
        ("tollgate_decisions_total{policy=api,outcome=allowed}", 4),
        ("tollgate_decisions_total{policy=api,outcome=limited}", 1),
        ("tollgate_decisions_total{policy=api,outcome=missing_key}", 1),
        ("tollgate_decisions_total{policy=api,outcome=denied}", 1),
        ("tollgate_near_limit_total{policy=api}", 1),
        ("tollgate_settlements_total{policy=api,outcome=done}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

/// Regression: the lost settlement was not counted.
#[test]
fn settlement_that_ends_with_its_runtime_is_lost() {
    let policy = Policy::new("api", Quota::per_hour(9).fixed_window());
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(Duration::from_millis(50));
    let mut seen = ask(RateLimitLayer::new(store, policy), &["free"]);
    seen.retain(|name, _| name.starts_with("tollgate_settlements_total"));
    assert_eq!(seen, expect(&[("tollgate_settlements_total{policy=api,outcome=lost}", 1)]));
}

/// The policy to charge was never resolved.
#[test]
fn charge_after_a_failed_resolver_is_counted_as_lost() {
    let policy = Policy::new("api", Quota::per_hour(9).fixed_window());
    let fails = PolicyResolver::new(|_| std::future::ready(Err::<Policy, _>("the database is away")));
    let layer =
        RateLimitLayer::new(MemoryBackend::new(), policy).resolver(fails).on_store_error(RateLimitFallback::Deny);
    let layer = layer.responder(ErrorResponder).cost(|_: &&'static str| 0).charge_on(Pays);
    let mut seen = seen_of(layer.layer(service_fn(async |client| Ok::<_, BoxError>(client))), &["alice"]);
    seen.retain(|name, _| name.starts_with("tollgate_settlements_total"));
    assert_eq!(seen, expect(&[("tollgate_settlements_total{policy=api,outcome=lost}", 1)]));
}

/// Charges three units afterwards.
struct Pays;

impl<Res, E> ChargeOn<Res, E> for Pays {
    fn settle(&self, handle: &RateLimitHandle, _: Result<&mut Res, &E>) {
        handle.charge(3);
    }
}

#[test]
fn unobserved_requests_are_counted_the_same() {
    for limit in [Quota::per_hour(10).fixed_window(), Quota::per_hour(10).token_bucket()] {
        let layer = RateLimitLayer::new(MemoryBackend::new(), Policy::new("api", limit));
        let layer = layer.key(|client: &&'static str| *client).responder(ErrorResponder);
        let service = layer.layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)));
        let expected = [
            ("tollgate_decisions_total{policy=api,outcome=allowed}", 10),
            ("tollgate_decisions_total{policy=api,outcome=limited}", 3),
            ("tollgate_near_limit_total{policy=api}", 2),
        ];
        assert_eq!(seen_of(service, &["alice"; 13]), expect(&expected), "{limit:?}");
    }
}

/// Regression: with a quota below 5, no request ever counted as near the limit.
#[test]
fn small_quotas_count_requests_near_the_limit() {
    for (limit, near) in (1..).zip([1, 1, 1, 1, 1, 2, 2, 2, 2]) {
        let quota = Quota::per_hour(limit);
        for limit in [quota.fixed_window(), quota.token_bucket(), quota.sliding_log().unwrap()] {
            let layer = || RateLimitLayer::new(MemoryBackend::new(), Policy::new("api", limit));
            let plain = layer().key(|client: &&'static str| *client).responder(ErrorResponder);
            let plain = plain.layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)));
            let clients = vec!["alice"; limit.capacity() as usize];
            for seen in [seen_of(plain, &clients), ask(layer(), &clients)] {
                assert_eq!(seen.get("tollgate_near_limit_total{policy=api}"), Some(&near), "{limit:?} {seen:?}");
            }
        }
    }
}

#[test]
fn shadow_policy_is_counted_separately() {
    let policy = Policy::new("trial", Quota::per_hour(1).fixed_window()).shadow();
    let seen = ask(RateLimitLayer::new(MemoryBackend::new(), policy), &["alice"; 3]);
    let expected = [
        ("tollgate_decisions_total{policy=trial,outcome=allowed}", 1),
        ("tollgate_decisions_total{policy=trial,outcome=shadow_limited}", 2),
        ("tollgate_near_limit_total{policy=trial}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

/// Regression: the denials of a shadow policy of a `Limiter` were not counted.
#[test]
fn limiter_is_counted_like_a_layer() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let per_hour = |name, limit| Policy::new(name, Quota::per_hour(limit).fixed_window());
    let trial = Limiter::new(store.clone(), per_hour("trial", 1).shadow());
    let mails = Limiter::new(store, per_hour("mails", 5));
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            for _ in 0..3 {
                assert!(trial.check("alice").await.unwrap().is_allowed());
            }
            assert!(mails.check_cost("alice", 4).await.unwrap().is_allowed());
            assert!(mails.try_acquire("alice").await.unwrap());
            assert!(!mails.try_acquire("alice").await.unwrap());
            assert!(!mails.check_cost("alice", 6).await.unwrap().is_allowed());
            mails.block("alice", Duration::from_secs(1)).await.unwrap();
            assert!(!mails.acquire("alice", Duration::ZERO).await.unwrap().is_allowed());
            // A peek is not a request.
            assert!(!mails.peek("alice").await.unwrap().is_allowed());
        });
    });
    let mut seen = seen(&snapshotter);
    seen.retain(|name, _| !name.starts_with("tollgate_store"));
    let expected = [
        ("tollgate_decisions_total{policy=trial,outcome=allowed}", 1),
        ("tollgate_decisions_total{policy=trial,outcome=shadow_limited}", 2),
        ("tollgate_near_limit_total{policy=trial}", 1),
        ("tollgate_decisions_total{policy=mails,outcome=allowed}", 2),
        ("tollgate_decisions_total{policy=mails,outcome=limited}", 1),
        ("tollgate_decisions_total{policy=mails,outcome=never}", 1),
        ("tollgate_decisions_total{policy=mails,outcome=blocked}", 1),
        ("tollgate_near_limit_total{policy=mails}", 1),
    ];
    assert_eq!(seen, expect(&expected));

    // `try_acquire` returns no details, but counts all the same.
    let (recorder, snapshotter, _) = recording();
    let plain = Limiter::new(MemoryBackend::new(), per_hour("plain", 3));
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            for _ in 0..3 {
                assert!(plain.try_acquire("alice").await.unwrap());
            }
            assert!(!plain.try_acquire("alice").await.unwrap());
        });
    });
    let expected = [
        ("tollgate_decisions_total{policy=plain,outcome=allowed}", 3),
        ("tollgate_decisions_total{policy=plain,outcome=limited}", 1),
        ("tollgate_near_limit_total{policy=plain}", 1),
    ];
    assert_eq!(self::seen(&snapshotter), expect(&expected));
}

/// Regression: failed checks did not count as decisions, and with an open circuit nothing was counted.
#[test]
fn failed_limiter_checks_count_as_failed_closed() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let limiter = Limiter::new(store, Policy::new("mails", Quota::per_hour(5).fixed_window()));
    let limiter = limiter.circuit_breaker(CircuitBreaker::new().failures(1).probe_interval(Duration::from_secs(3_600)));
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            for _ in 0..3 {
                assert!(limiter.check("alice").await.is_err());
                assert!(limiter.try_acquire("alice").await.is_err());
                assert!(limiter.acquire("alice", Duration::from_secs(1)).await.is_err());
                // A peek is not a request.
                assert!(limiter.peek("alice").await.is_err());
            }
        });
    });
    let mut seen = seen(&snapshotter);
    seen.retain(|name, _| !name.starts_with("tollgate_store_seconds"));
    let expected = [
        ("tollgate_decisions_total{policy=mails,outcome=failed_closed}", 9),
        ("tollgate_store_errors_total{policy=mails}", 1),
        ("tollgate_circuit_transitions_total{policy=mails,state=open}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

/// Regression: neither the store times nor the settlements of a limiter were recorded.
#[test]
fn limiter_waits_are_timed_and_settlements_counted() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let policy = |name| Policy::new(name, Quota::per_hour(5).fixed_window());
    let mails = Limiter::new(store, policy("mails"));
    let here = Limiter::new(MemoryBackend::new(), policy("here"));
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            // Calls of the memory backend are decided without waiting, so they are not timed.
            let receipt = here.check("alice").await.unwrap().receipt().unwrap();
            assert!(here.peek("alice").await.unwrap().is_allowed());
            here.settle("alice", receipt, -1).await.unwrap();

            faults.delay(Duration::from_millis(10));
            let receipt = mails.check("alice").await.unwrap().receipt().unwrap();
            assert!(mails.peek("alice").await.unwrap().is_allowed());
            mails.settle("alice", receipt, -1).await.unwrap();
            faults.delay(Duration::from_millis(200));
            assert!(mails.settle("alice", receipt, 1).await.unwrap_err().is_timeout());
            let left = tokio::time::timeout(Duration::from_millis(1), mails.settle("alice", receipt, 1));
            assert!(left.await.is_err());
        });
    });
    let (mut times, mut settled) = (Vec::new(), BTreeMap::new());
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let labels: Vec<_> = key.key().labels().map(|label| label.value().to_owned()).collect();
        match (key.key().name(), value) {
            ("tollgate_store_seconds", DebugValue::Histogram(values)) if !values.is_empty() => {
                times.push((labels, values.into_iter().map(f64::from).collect::<Vec<_>>()));
            }
            ("tollgate_settlements_total", DebugValue::Counter(count)) if count > 0 => {
                settled.insert(labels.join(" "), count);
            }
            _ => {}
        }
    }
    assert_eq!(times, [(vec!["mails".to_owned()], vec![0.01, 0.01, 0.01, 0.1])]);
    assert_eq!(settled, expect(&[("here done", 1), ("mails done", 1), ("mails lost", 2)]));
}

#[test]
fn waits_for_quota_are_timed() {
    let (recorder, snapshotter, runtime) = recording();
    let policy = Policy::new("api", Quota::per_second(1).token_bucket());
    let layer =
        RateLimitLayer::new(MemoryBackend::new(), policy).wait(Duration::from_millis(2_500)).responder(ErrorResponder);
    let service = layer.layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)));
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            service.clone().oneshot("at once").await.unwrap();
            let start = Instant::now();
            let mut waits = Vec::new();
            for client in ["first", "next", "too late", "leaves"] {
                waits.push(tokio::spawn(service.clone().oneshot(client)));
                tokio::task::yield_now().await;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            waits.pop().unwrap().abort();
            let mut ends = Vec::new();
            for wait in waits {
                ends.push((wait.await.unwrap().is_ok(), start.elapsed().as_secs()));
            }
            assert_eq!(ends, [(true, 1), (true, 2), (false, 2)]);
        });
        drop(runtime);
    });
    let waited = |(key, _, _, value): (CompositeKey, _, _, DebugValue)| match value {
        DebugValue::Histogram(values) if key.key().name() == "tollgate_wait_seconds" => Some((key, values)),
        _ => None,
    };
    let (key, values) = snapshotter.snapshot().into_vec().into_iter().find_map(waited).unwrap();
    assert_eq!(key.key().labels().map(|label| (label.key(), label.value())).collect::<Vec<_>>(), [("policy", "api")]);
    let mut tenths: Vec<_> = values.into_iter().map(|waited| (waited.into_inner() * 10.0).round() as u64).collect();
    tenths.sort_unstable();
    assert_eq!(tenths, [5, 10, 20, 20]);
}

#[test]
fn requests_denied_by_another_policy_are_not_allowed() {
    let per_hour = |name, limit| Policy::new(name, Quota::per_hour(limit).fixed_window());
    // Two of three requests exceed the limit of the user. The shadow policy counts them as well.
    let several = |store: &FaultStore<MemoryBackend>, user| {
        RateLimitLayer::new(store.clone(), per_hour("user", user))
            .key(|client: &&'static str| *client)
            .and(per_hour("total", 10), tollgate::GlobalKey)
            .and(per_hour("trial", 1).shadow(), tollgate::GlobalKey)
            .responder(ErrorResponder)
            .layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)))
    };
    let service = several(&FaultStore::new(MemoryBackend::new()), 1);
    let seen = seen_of(service, &["alice"; 3]);
    let decisions = |seen: &BTreeMap<String, u64>| -> BTreeMap<String, u64> {
        let decisions = seen.iter().filter(|(name, _)| name.starts_with("tollgate_decisions_total"));
        decisions.map(|(name, count)| (name.clone(), *count)).collect()
    };
    let expected = [
        ("tollgate_decisions_total{policy=user,outcome=allowed}", 1),
        ("tollgate_decisions_total{policy=user,outcome=limited}", 2),
        ("tollgate_decisions_total{policy=total,outcome=allowed}", 1),
        ("tollgate_decisions_total{policy=total,outcome=turned_away}", 2),
        ("tollgate_decisions_total{policy=trial,outcome=allowed}", 1),
        ("tollgate_decisions_total{policy=trial,outcome=shadow_limited}", 2),
    ];
    assert_eq!(decisions(&seen), expect(&expected));

    // The same holds if no store decides, because it fails or because the request can never be allowed.
    let down = FaultStore::new(MemoryBackend::new());
    down.faults().fail(Failure::Unavailable);
    let service = several(&down, 1);
    let expected = [
        ("tollgate_decisions_total{policy=user,outcome=local_allowed}", 1),
        ("tollgate_decisions_total{policy=user,outcome=local_limited}", 2),
        ("tollgate_decisions_total{policy=total,outcome=local_allowed}", 1),
        ("tollgate_decisions_total{policy=total,outcome=turned_away}", 2),
        ("tollgate_decisions_total{policy=trial,outcome=local_allowed}", 1),
        ("tollgate_decisions_total{policy=trial,outcome=shadow_limited}", 2),
    ];
    assert_eq!(decisions(&seen_of(service, &["alice"; 3])), expect(&expected));
    let service = several(&FaultStore::new(MemoryBackend::new()), 0);
    let expected = [
        ("tollgate_decisions_total{policy=user,outcome=never}", 1),
        ("tollgate_decisions_total{policy=total,outcome=turned_away}", 1),
        ("tollgate_decisions_total{policy=trial,outcome=allowed}", 1),
    ];
    assert_eq!(decisions(&seen_of(service, &["alice"])), expect(&expected));
}

#[test]
fn accelerator_metrics_match_their_stats() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let leases = QuotaPrefetch::new(store).max_age(Duration::from_millis(500));
    let cache = DenyCache::new(leases.clone());
    let limiter = Limiter::new(cache.clone(), Policy::new("hot", Quota::per_minute(1_000).fixed_window()));
    let until_some_are_held = async || {
        for _ in 0..300 {
            let _ = limiter.check("all").await.unwrap();
        }
        while leases.stats().held < 20 {
            let _ = limiter.check("all").await.unwrap();
        }
    };
    let minute = Duration::from_secs(60);
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            // Units are given back, expire with the window, are lost to a store error, and are lost in a call that times out.
            until_some_are_held().await;
            tokio::time::advance(Duration::from_millis(600)).await;
            let _ = limiter.check("all").await.unwrap();
            assert!(leases.stats().given_back > 0);
            for lost in 0..3 {
                tokio::time::advance(minute).await;
                until_some_are_held().await;
                let (held, expired) = (leases.stats().held, leases.stats().expired);
                match lost {
                    0 => tokio::time::advance(minute).await,
                    1 => {
                        tokio::time::advance(Duration::from_millis(600)).await;
                        faults.fail_next(1, Failure::Unavailable);
                    }
                    _ => {
                        tokio::time::advance(Duration::from_millis(600)).await;
                        faults.hang();
                    }
                }
                let _ = limiter.check("all").await;
                faults.heal();
                assert_eq!(leases.stats().expired, expired + held, "{lost}");
            }
            leases.reset(&Policy::new("hot", Quota::per_minute(1_000).fixed_window()), &"all".into()).await.unwrap();
            for _ in 0..1_100 {
                let _ = limiter.check("all").await.unwrap();
            }
        });
    });
    let (mut seen, units, answers) = (seen(&snapshotter), leases.stats(), cache.stats());
    assert!(answers.hits > 0);
    // The check that failed is one of the decisions.
    let failed = "tollgate_decisions_total{policy=hot,outcome=failed_closed}";
    assert_eq!(seen.get(failed), Some(&1));
    let decisions: u64 = ["allowed", "limited", "failed_closed"]
        .iter()
        .filter_map(|outcome| seen.remove(&format!("tollgate_decisions_total{{policy=hot,outcome={outcome}}}")))
        .sum();
    assert_eq!(decisions, answers.hits + answers.misses);
    seen.remove("tollgate_near_limit_total{policy=hot}");
    let expected = [
        ("tollgate_leased_units_total{policy=hot,outcome=drawn}", units.drawn),
        ("tollgate_leased_units_total{policy=hot,outcome=given_back}", units.given_back),
        ("tollgate_leased_units_total{policy=hot,outcome=expired}", units.expired),
        ("tollgate_deny_cache_total{policy=hot,outcome=hit}", answers.hits),
        ("tollgate_deny_cache_total{policy=hot,outcome=miss}", answers.misses),
        // The call that was lost.
        ("tollgate_store_errors_total{policy=hot}", 1),
        ("tollgate_store_seconds{policy=hot}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

#[test]
fn operations_are_counted_by_layer_and_outcome() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    metrics::with_local_recorder(&recorder, || {
        let guard = IdempotencyLayer::new(store).name("pay").scope(header("x-user")).max_response(500).max_body(100);
        let open = guard.clone().name("open").on_store_error(OnStoreError::Allow).layer(service_fn(pay));
        let service = guard.wait(Duration::from_secs(1)).layer(service_fn(pay));
        let ask = async |key: &str, body: &'static str| {
            let request = Request::post("/").header("x-user", "alice").header("idempotency-key", key);
            let response = service.clone().oneshot(request.body(Full::<Bytes>::from(body)).unwrap()).await;
            response.unwrap().into_body().collect().await.unwrap().to_bytes()
        };
        runtime.block_on(async {
            for (key, body) in [("a", "x"), ("a", "x"), ("a", "y"), ("\"", "x"), ("b", "large"), ("b", "large")] {
                ask(key, body).await;
            }
            for _ in 0..2 {
                ask("c", "fails").await;
            }
            // One request waits for the other.
            tokio::join!(ask("d", "slow"), ask("d", "slow"));
            faults.fail(Failure::Unavailable);
            ask("e", "x").await;
            let request = Request::post("/").header("x-user", "alice").header("idempotency-key", "f");
            open.oneshot(request.body(Full::from("x")).unwrap()).await.unwrap();
            let request = Request::post("/").header("x-user", "alice").header("idempotency-key", "g");
            service.clone().oneshot(request.body(Full::from("x".repeat(101))).unwrap()).await.unwrap();
        });
    });
    let expected = [
        ("tollgate_idempotency_requests_total{layer=open,outcome=failed_open}", 1),
        ("tollgate_idempotency_store_errors_total{layer=open}", 1),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=too_large}", 1),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=executed}", 5),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=replayed}", 2),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=mismatch}", 1),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=invalid_key}", 1),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=not_stored}", 1),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=failed_closed}", 1),
        ("tollgate_idempotency_attempts_total{layer=pay,outcome=stored}", 2),
        ("tollgate_idempotency_attempts_total{layer=pay,outcome=not_stored}", 1),
        ("tollgate_idempotency_attempts_total{layer=pay,outcome=released}", 2),
        ("tollgate_idempotency_handler_seconds{layer=pay}", 5),
        ("tollgate_idempotency_wait_seconds{layer=pay}", 1),
        ("tollgate_idempotency_store_errors_total{layer=pay}", 1),
    ];
    assert_eq!(seen(&snapshotter), expect(&expected));
}

/// Regression: handlers that were cancelled after they had begun to respond were not counted.
#[test]
fn handlers_cut_off_while_responding_are_counted() {
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        let guard = IdempotencyLayer::new(MemoryBackend::new()).name("pay").scope(header("x-user"));
        let guard = guard.max_runtime(Duration::from_secs(1)).max_response(500).max_body(1_000);
        let service = guard.clone().layer(service_fn(async |request: Request<FingerprintedBody<Parts>>| {
            Ok::<_, BoxError>(Response::new(request.into_body()))
        }));
        runtime.block_on(async {
            // A body that stalls, a body that becomes too large while the response can still be stored, and a body that does so afterwards.
            for (key, first, second) in [("a", 1, 0), ("b", 200, 900), ("c", 600, 600)] {
                let (sender, mut parts) = unbounded_channel();
                let send = |len| sender.send(Ok(Frame::data(Bytes::from(vec![b'x'; len])))).unwrap();
                send(first);
                let body: Parts = StreamBody::new(poll_fn(Box::new(move |cx| parts.poll_recv(cx))));
                let request = Request::post("/").header("x-user", "alice").header("idempotency-key", key);
                let answer = service.clone().oneshot(request.body(body).unwrap()).await.unwrap();
                let mut answer = answer.into_body();
                assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap().len(), first);
                tokio::time::sleep(Duration::from_millis(1)).await;
                if second > 0 {
                    send(second);
                }
                assert!(answer.collect().await.is_err(), "{key}");
                guard.wait_idle().await;
            }
        });
    });
    let mut seen = seen(&snapshotter);
    seen.retain(|name, _| name.starts_with("tollgate_idempotency_requests_total"));
    let expected = [
        ("tollgate_idempotency_requests_total{layer=pay,outcome=executed}", 3),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=cancelled}", 1),
        ("tollgate_idempotency_requests_total{layer=pay,outcome=too_large}", 2),
    ];
    assert_eq!(seen, expect(&expected));
}

/// How long handlers took, by the name of their layer.
fn handler_seconds(snapshotter: &Snapshotter) -> BTreeMap<String, Vec<f64>> {
    let mut seconds = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        if key.key().name() == "tollgate_idempotency_handler_seconds"
            && let DebugValue::Histogram(values) = value
        {
            let layer = key.key().labels().next().unwrap().value().to_owned();
            seconds.insert(layer, values.into_iter().map(f64::from).collect());
        }
    }
    seconds
}

/// Regression: cancelled handlers were not timed, nor was the rest of a response that was too large to store. The recorded times fell while
/// handlers took ever longer.
#[test]
fn handler_time_lasts_to_the_end_of_the_response() {
    let (recorder, snapshotter, runtime) = recording();
    let second = Duration::from_secs(1);
    let guard =
        IdempotencyLayer::new(MemoryBackend::new()).scope(header("x-user")).max_runtime(second).max_response(10);
    let guard = guard.lease(second).on_unknown(OnUnknown::Retry);
    // `pause` precedes the response, and each part of the body precedes a pause of its own.
    let ask = async |layer: &'static str, sent: &'static str, pause: Duration, parts: &'static [(usize, Duration)]| {
        let guard = guard.clone().name(layer);
        let service =
            guard.clone().layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| async move {
                request.into_body().collect().await?;
                tokio::time::sleep(pause).await;
                let (sender, mut receiver) = unbounded_channel();
                tokio::spawn(async move {
                    for (len, pause) in parts {
                        sender.send(Ok(Frame::data(Bytes::from(vec![b'x'; *len])))).ok();
                        tokio::time::sleep(*pause).await;
                    }
                });
                let body: Parts = StreamBody::new(poll_fn(Box::new(move |cx| receiver.poll_recv(cx))));
                Ok::<_, BoxError>(Response::new(body))
            }));
        let request = Request::post("/").header("x-user", "alice").header("idempotency-key", layer);
        let answer = service.oneshot(request.body(Full::from(sent)).unwrap()).await.unwrap();
        let status = answer.status();
        drop(answer.into_body().collect().await);
        guard.wait_idle().await;
        status
    };
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            const SHORT: Duration = Duration::from_millis(400);
            const LONG: Duration = Duration::from_secs(9);
            ask("whole", "x", SHORT, &[(1, SHORT)]).await;
            ask("too_large", "x", Duration::ZERO, &[(20, SHORT), (1, SHORT), (1, SHORT), (1, SHORT), (1, SHORT)]).await;
            ask("no_answer", "x", LONG, &[]).await;
            ask("cut_off", "x", Duration::ZERO, &[(1, LONG)]).await;
            ask("too_large_and_cut_off", "x", SHORT, &[(20, LONG)]).await;
            // A request with another body, which is refused before its handler begins.
            tokio::time::sleep(second).await;
            assert_eq!(ask("no_answer", "", SHORT, &[]).await, StatusCode::UNPROCESSABLE_ENTITY);
            let operations = Idempotent::new(MemoryBackend::new(), "operations").max_runtime(second);
            let work = async |_| {
                tokio::time::sleep(LONG).await;
                Ok::<_, BoxError>("late")
            };
            assert!(operations.run(Operation::new("alice", "k"), "", work).await.is_err());
        });
    });
    let seen = handler_seconds(&snapshotter);
    let expected = [
        ("whole", 0.8),
        ("too_large", 2.0),
        ("no_answer", 1.0),
        ("cut_off", 1.0),
        ("too_large_and_cut_off", 1.4),
        ("operations", 1.0),
    ];
    assert_eq!(seen.len(), expected.len(), "{seen:?}");
    for (layer, at_least) in expected {
        assert!(matches!(seen[layer][..], [time] if time >= at_least && time < at_least + 0.1), "{layer}: {seen:?}");
    }
}

#[test]
fn operations_without_http_are_counted_alike() {
    let (recorder, snapshotter, runtime) = recording();
    let operations = Idempotent::new(MemoryBackend::new(), "payouts");
    let run = async |fingerprint: &str, answer: Result<&'static str, BoxError>| {
        operations.run(Operation::new("alice", "k"), fingerprint, async |_| answer).await.is_ok()
    };
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            assert!(!run("a", Err("no".into())).await && run("a", Ok("paid")).await && run("a", Ok("")).await);
            assert!(!run("b", Ok("")).await);
        });
    });
    let expected = [
        ("tollgate_idempotency_attempts_total{layer=payouts,outcome=released}", 1),
        ("tollgate_idempotency_attempts_total{layer=payouts,outcome=stored}", 1),
        ("tollgate_idempotency_handler_seconds{layer=payouts}", 2),
        ("tollgate_idempotency_requests_total{layer=payouts,outcome=executed}", 2),
        ("tollgate_idempotency_requests_total{layer=payouts,outcome=mismatch}", 1),
        ("tollgate_idempotency_requests_total{layer=payouts,outcome=replayed}", 1),
    ];
    assert_eq!(seen(&snapshotter), expect(&expected));
}

/// The first caller is counted while it still waits.
#[test]
fn lock_store_that_fails_from_the_start_is_counted() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let locks = Locks::new(store, "orders").circuit_breaker(CircuitBreaker::new().failures(2));
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let one = locks.lock("a").into_future();
            assert!(tokio::time::timeout(Duration::from_secs(1), one).await.is_err());
        });
    });
    let seen = seen(&snapshotter);
    assert_eq!(seen["tollgate_lock_circuit_transitions_total{locks=orders,state=open}"], 1);
    assert!(seen["tollgate_lock_store_errors_total{locks=orders}"] >= 2, "{seen:?}");
}

#[test]
fn requests_that_pass_without_their_lock_are_counted() {
    for (then, unprotected) in [(OnStoreError::Allow, Some(&5)), (OnStoreError::Deny, None)] {
        let (recorder, snapshotter, runtime) = recording();
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let breaker = CircuitBreaker::new().failures(2);
        let layer = LockLayer::new(store, "orders").key(GlobalKey).on_store_error(then).circuit_breaker(breaker);
        let service = layer.responder(ErrorResponder).layer(service_fn(async |passes: bool| Ok::<_, BoxError>(passes)));
        metrics::with_local_recorder(&recorder, || {
            runtime.block_on(async {
                service.clone().oneshot(true).await.unwrap();
                faults.fail(Failure::Unavailable);
                // The store is not called for all of these, because the circuit opens.
                for _ in 0..5 {
                    drop(service.clone().oneshot(true).await);
                }
            });
        });
        let seen = seen(&snapshotter);
        assert_eq!(seen.get("tollgate_lock_unprotected_total{locks=orders}"), unprotected, "{then:?}");
        assert_eq!(seen["tollgate_lock_requests_total{locks=orders,outcome=failed}"], 5);
    }
}

/// Regression: a false alarm about unknown outcomes. The attempts were released, the reply was late, and other attempts had begun by then.
#[test]
fn released_attempt_is_not_counted_as_unknown() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, losing) = (store.faults(), store.faults());
    let guard = IdempotencyLayer::new(store).name("pay").scope(header("x-user")).on_unknown(OnUnknown::Retry);
    let service = guard.clone().layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| {
        let (losing, is_first) = (losing.clone(), request.headers().contains_key("x-first"));
        async move {
            let mut response = Response::new(Full::<Bytes>::default());
            if is_first {
                losing.lose_replies();
                *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            } else {
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
            Ok::<_, BoxError>(response)
        }
    }));
    let ask = |header: &str| {
        let request = Request::post("/").header("x-user", "alice").header("idempotency-key", "k").header(header, "");
        service.clone().oneshot(request.body(Full::default()).unwrap())
    };
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let first = tokio::spawn(ask("x-first"));
            // By then the release has reached the store. Its reply would be late 0.1 s after that.
            tokio::time::sleep(Duration::from_millis(10)).await;
            faults.heal();
            assert_eq!(ask("x-second").await.unwrap().status(), StatusCode::OK);
            assert_eq!(first.await.unwrap().unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
            guard.wait_idle().await;
        });
    });
    let mut seen = seen(&snapshotter);
    seen.retain(|name, _| name.starts_with("tollgate_idempotency_attempts_total"));
    let expected = [
        ("tollgate_idempotency_attempts_total{layer=pay,outcome=released}", 1),
        ("tollgate_idempotency_attempts_total{layer=pay,outcome=stored}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

/// An operation that never began has no unknown outcome.
#[test]
fn an_outage_makes_no_attempt_unknown() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    metrics::with_local_recorder(&recorder, || {
        let guard = IdempotencyLayer::new(store).name("pay").scope(header("x-user"));
        let service = guard.layer(service_fn(pay));
        runtime.block_on(async {
            for failure in [Failure::Timeout, Failure::Unavailable, Failure::OutOfMemory] {
                faults.fail(failure);
                for key in 0..20 {
                    let request = Request::post("/").header("x-user", "alice").header("idempotency-key", key);
                    service.clone().oneshot(request.body(Full::<Bytes>::default()).unwrap()).await.unwrap();
                }
                tokio::time::sleep(Duration::from_secs(120)).await;
                faults.heal();
                tokio::time::sleep(Duration::from_secs(120)).await;
            }
        });
    });
    let seen = seen(&snapshotter);
    assert_eq!(seen["tollgate_idempotency_requests_total{layer=pay,outcome=failed_closed}"], 60);
    assert!(seen.keys().all(|name| !name.contains("attempts_total")), "{seen:?}");
}

/// A request under several policies counts for each of them, as decisions do.
#[test]
fn undecided_requests_are_counted_per_policy() {
    for (then, outcome) in [(RateLimitFallback::Allow, "failed_open"), (RateLimitFallback::Deny, "failed_closed")] {
        let policy = |name: &'static str| Policy::new(name, Quota::per_hour(6).fixed_window());
        let layer = RateLimitLayer::new(Down, policy("api")).on_store_error(then).responder(ErrorResponder);
        let layer = layer.key(|client: &&'static str| *client).and(policy("total"), |_: &&'static str| "all");
        let service = layer.layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)));
        let seen = seen_of(service, &["alice", "bob"]);
        for name in ["api", "total"] {
            assert_eq!(seen[&format!("tollgate_decisions_total{{policy={name},outcome={outcome}}}")], 2, "{seen:?}");
        }
    }
}

/// Regression: store errors were counted although the decision needed no store.
#[test]
fn zero_deadline_is_no_error_if_no_store_is_needed() {
    let policy = |name: &'static str, quota: u64| Policy::new(name, Quota::per_hour(quota).fixed_window());
    let trials = [policy("api", 100).shadow(), policy("total", 100).shadow()];
    let never = [policy("api", 0), policy("total", 100)];
    for ([api, total], outcomes) in
        [(trials, ["api,outcome=allowed", "total,outcome=allowed"]), (never, ["api,outcome=never"; 2])]
    {
        let layer = RateLimitLayer::new(MemoryBackend::new(), api).deadline(Duration::ZERO).responder(ErrorResponder);
        let layer = layer.key(|client: &&'static str| *client).and(total, |_: &&'static str| "all");
        let service = layer.layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)));
        let seen = seen_of(service, &["alice"; 7]);
        for outcome in outcomes {
            assert_eq!(seen[&format!("tollgate_decisions_total{{policy={outcome}}}")], 7, "{seen:?}");
        }
        assert!(seen.keys().all(|name| !name.contains("errors") && !name.contains("circuit")), "{seen:?}");
    }
}

async fn pay(request: Request<FingerprintedBody<Full<Bytes>>>) -> Result<Response<Full<Bytes>>, BoxError> {
    let body = request.into_body().collect().await?.to_bytes();
    let mut response = Response::new(body.clone().into());
    match &*body {
        b"slow" => tokio::time::sleep(Duration::from_millis(100)).await,
        b"large" => *response.body_mut() = vec![b'x'; 1_000].into(),
        b"fails" => *response.status_mut() = StatusCode::BAD_GATEWAY,
        _ => {}
    }
    Ok(response)
}

#[test]
fn store_errors_are_counted_with_their_fallback() {
    let layer = |then: RateLimitFallback| {
        let policy = Policy::new("api", Quota::per_hour(6).fixed_window());
        RateLimitLayer::new(Down, policy).on_store_error(then).circuit_breaker(CircuitBreaker::new().failures(3))
    };
    let failures = [
        ("tollgate_store_errors_total{policy=api}", 3),
        ("tollgate_store_seconds{policy=api}", 3),
        ("tollgate_circuit_transitions_total{policy=api,state=open}", 1),
    ];
    for (then, decisions) in [
        (RateLimitFallback::Allow, vec![("tollgate_decisions_total{policy=api,outcome=failed_open}", 8)]),
        (RateLimitFallback::Deny, vec![("tollgate_decisions_total{policy=api,outcome=failed_closed}", 8)]),
        (
            RateLimitFallback::Local,
            vec![
                ("tollgate_decisions_total{policy=api,outcome=local_allowed}", 6),
                ("tollgate_decisions_total{policy=api,outcome=local_limited}", 2),
                ("tollgate_near_limit_total{policy=api}", 2),
            ],
        ),
    ] {
        let expected: Vec<_> = failures.iter().copied().chain(decisions).collect();
        assert_eq!(ask(layer(then), &["alice"; 8]), expect(&expected), "{then:?}");
    }
}

/// Otherwise, opened minus closed transitions would show the circuit of one rule as open forever.
#[test]
fn circuit_closes_under_the_policy_that_tripped_it() {
    let rules = Rules::from_toml(
        r#"
        policies.api.limits = [{ quota = 9, per = "1h", algorithm = "fixed_window" }]
        policies.login.limits = [{ quota = 9, per = "1h", algorithm = "fixed_window" }]
        rules = [
            { path = "/api", policy = "api", key = "global", on_store_error = "allow" },
            { path = "/login", policy = "login", key = "global", on_store_error = "deny" },
        ]
        "#,
    );
    let store = FaultStore::new(MemoryBackend::new());
    let service = RulesLayer::new(store.clone(), rules.unwrap())
        .circuit_breaker(CircuitBreaker::new().failures(1))
        .layer(service_fn(async |_: Request<()>| Ok::<_, BoxError>(Response::new(()))));
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let ask = async |path| drop(service.clone().oneshot(Request::get(path).body(()).unwrap()).await.unwrap());
            for (fails, answers) in [("/login", "/api"), ("/api", "/api")] {
                store.faults().fail(Failure::Unavailable);
                ask(fails).await;
                store.faults().heal();
                // Like a remote store, it does not answer at once.
                store.faults().delay(Duration::from_millis(1));
                tokio::time::advance(Duration::from_millis(101)).await;
                ask(answers).await;
            }
        });
    });
    let mut transitions = seen(&snapshotter);
    transitions.retain(|name, _| name.starts_with("tollgate_circuit_transitions_total"));
    let expected = [
        ("tollgate_circuit_transitions_total{policy=api,state=closed}", 1),
        ("tollgate_circuit_transitions_total{policy=api,state=open}", 1),
        ("tollgate_circuit_transitions_total{policy=login,state=closed}", 1),
        ("tollgate_circuit_transitions_total{policy=login,state=open}", 1),
    ];
    assert_eq!(transitions, expect(&expected));
}

#[test]
fn requests_that_no_rule_matches_are_counted() {
    let rules = Rules::from_toml(
        r#"
        policies.api.limits = [{ quota = 9, per = "1h", algorithm = "fixed_window" }]
        rules = [
            { path = "/api", policy = "api", key = "global" },
            { path = "/health", unlimited = true },
        ]
        "#,
    );
    let service = RulesLayer::new(MemoryBackend::new(), rules.unwrap())
        .layer(service_fn(async |_: Request<()>| Ok::<_, BoxError>(Response::new(()))));
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            for path in ["/api", "/health", "/%68ealth", "/api/", "/API", "/"] {
                service.clone().oneshot(Request::get(path).body(()).unwrap()).await.unwrap();
            }
        });
    });
    assert_eq!(seen(&snapshotter)["tollgate_rules_unmatched_requests_total{}"], 3);
}

#[test]
fn unreadable_client_addresses_are_counted() {
    let by_ip = ClientIp::trusting(["10.0.0.0/8".parse().unwrap()]);
    let (recorder, snapshotter, _runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        for (peer, value) in
            [("10.0.0.1:1", "unknown"), ("10.0.0.1:1", "203.0.113.7:70000"), ("192.0.2.1:1", "unknown")]
        {
            let request =
                Request::builder().extension(PeerAddr(peer.parse().unwrap())).header("x-forwarded-for", value);
            by_ip.client_ip(&request.body(()).unwrap());
        }
    });
    assert_eq!(
        seen(&snapshotter),
        expect(&[("tollgate_unreadable_client_addresses_total{header=x-forwarded-for}", 2)])
    );
}

#[test]
fn resolver_errors_are_counted_apart_from_the_store() {
    let per_hour = |limit| Policy::new("api", Quota::per_hour(limit).fixed_window());
    let plans = PolicyResolver::new(move |key: Key| async move {
        tokio::time::sleep(Duration::from_millis(40)).await;
        match key.as_str() {
            "stranger" => Err("no such customer"),
            "slow" => std::future::pending().await,
            _ => Ok(per_hour(100)),
        }
    });
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(Duration::from_millis(10));
    let layer = RateLimitLayer::new(store, per_hour(2))
        .key(|client: &&'static str| *client)
        .resolver(plans)
        .circuit_breaker(CircuitBreaker::new().failures(1))
        .responder(ErrorResponder)
        .layer(service_fn(async |client: &'static str| Ok::<_, BoxError>(client)));
    let (recorder, snapshotter, runtime) = recording();
    let ask = |clients: &[&'static str]| {
        metrics::with_local_recorder(&recorder, || {
            for client in clients {
                drop(runtime.block_on(layer.clone().oneshot(*client)));
            }
        });
    };
    ask(&["carol"]);
    let times = snapshotter.snapshot().into_vec().into_iter().find_map(|(_, _, _, value)| match value {
        DebugValue::Histogram(times) => Some(times.into_iter().map(f64::from).collect::<Vec<_>>()),
        _ => None,
    });
    assert_eq!(times.unwrap(), [0.01], "without the time of the resolver");
    ask(&["alice", "stranger", "alice", "stranger", "slow", "slow", "stranger", "alice", "bob"]);
    let seen = seen(&snapshotter);
    let expected = [
        ("tollgate_decisions_total{policy=api,outcome=allowed}", 4),
        ("tollgate_decisions_total{policy=api,outcome=local_allowed}", 4),
        ("tollgate_decisions_total{policy=api,outcome=local_limited}", 1),
        ("tollgate_near_limit_total{policy=api}", 2),
        ("tollgate_resolver_errors_total{policy=api}", 5),
        ("tollgate_store_seconds{policy=api}", 4),
    ];
    assert_eq!(seen, expect(&expected));
}

#[test]
fn cancelled_push_counts_as_failed() {
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let store = FaultStore::new(MemoryBackend::new());
            store.faults().hang();
            let queue = DelayQueue::<u32>::new(store, "mail");
            for payload in 0..20 {
                let push = queue.push(payload).into_future();
                tokio::time::timeout(Duration::from_millis(50), push).await.unwrap_err();
            }
        });
    });
    // A caller that gives up is no store error.
    assert_eq!(seen(&snapshotter), expect(&[("tollgate_job_pushes_total{queue=mail,outcome=failed}", 20)]));
}

#[test]
fn jobs_are_counted_by_outcome() {
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let queue = DelayQueue::<u32>::new(MemoryBackend::new(), "mail");
            for payload in 0..4 {
                queue.push(payload).await.unwrap();
            }
            queue.pause().await.unwrap();
            let service = service_fn(async |job: Job<u32>| match (*job, job.attempt()) {
                (1, 1) => Err(Outcome::retry_after(Duration::from_secs(1))),
                (2, _) => Err(Outcome::dead("no")),
                (3, _) => {
                    tokio::time::sleep(Duration::from_secs(100)).await;
                    Ok(())
                }
                _ => Ok(()),
            });
            let worker =
                DelayQueueWorker::new(queue.clone(), service).grace(Duration::ZERO).abort_after(Duration::ZERO);
            let watched = async {
                tokio::time::sleep(Duration::from_secs(7)).await;
                let oldest_due = seen(&snapshotter).remove("tollgate_jobs_oldest_due_seconds{queue=mail}");
                queue.resume().await.unwrap();
                oldest_due
            };
            let shutdown = tokio::time::sleep(Duration::from_secs(17));
            let (ended, oldest_due) = tokio::join!(worker.run_until(shutdown), watched);
            ended.unwrap();
            assert_eq!(oldest_due, Some(5), "the store was asked two seconds ago");
        });
    });
    let expected = [
        ("tollgate_job_lateness_seconds{queue=mail}", 5),
        ("tollgate_job_seconds{queue=mail}", 5),
        ("tollgate_jobs_total{queue=mail,outcome=dead}", 1),
        ("tollgate_jobs_total{queue=mail,outcome=done}", 2),
        ("tollgate_jobs_total{queue=mail,outcome=released}", 1),
        ("tollgate_jobs_total{queue=mail,outcome=retried}", 1),
    ];
    assert_eq!(seen(&snapshotter), expect(&expected));
}

/// The gauge needs a worker. Without one, `counts` reports the age, as the docs say.
#[test]
fn age_of_due_jobs_without_a_worker_is_queried() {
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let queue = DelayQueue::<u32>::new(MemoryBackend::new(), "mail");
            queue.push(1).await.unwrap();
            queue.pause().await.unwrap();
            let service = service_fn(async |_: Job<u32>| Ok::<_, BoxError>(()));
            DelayQueueWorker::new(queue.clone(), service)
                .run_until(tokio::time::sleep(Duration::from_secs(7)))
                .await
                .unwrap();
            assert_eq!(queue.counts().await.unwrap().oldest_due, Some(Duration::from_secs(7)));
        });
    });
    assert_eq!(seen(&snapshotter).remove("tollgate_jobs_oldest_due_seconds{queue=mail}"), None);
}

#[test]
fn pushes_are_counted_by_outcome() {
    let (recorder, snapshotter, runtime) = recording();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let breaker = CircuitBreaker::new().failures(2);
    let queue = DelayQueue::<u32>::new(store, "mail").max_jobs(2).circuit_breaker(breaker);
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let answers = queue.push_all([queue.push(1).id("a"), queue.push(2).id("a"), queue.push(3)]).await;
            assert!(answers.iter().all(Result::is_ok));
            assert!(queue.push(4).await.unwrap_err().is_full());
            faults.fail(Failure::Unavailable);
            queue.counts().await.unwrap_err();
            for answer in queue.push_all([queue.push(5), queue.push(6)]).await {
                answer.unwrap_err();
            }
            // The circuit is open, so these calls do not reach the store.
            queue.push(7).await.unwrap_err();
            queue.counts().await.unwrap_err();
            faults.heal();
            tokio::time::sleep(Duration::from_secs(1)).await;
            queue.counts().await.unwrap();
        });
    });
    let expected = [
        ("tollgate_job_pushes_total{queue=mail,outcome=new}", 2),
        ("tollgate_job_pushes_total{queue=mail,outcome=exists}", 1),
        ("tollgate_job_pushes_total{queue=mail,outcome=full}", 1),
        ("tollgate_job_pushes_total{queue=mail,outcome=failed}", 3),
        ("tollgate_job_store_errors_total{queue=mail}", 2),
        ("tollgate_job_circuit_transitions_total{queue=mail,state=open}", 1),
        ("tollgate_job_circuit_transitions_total{queue=mail,state=closed}", 1),
    ];
    assert_eq!(seen(&snapshotter), expect(&expected));
}

#[test]
fn jobs_without_a_final_result_are_counted() {
    static WAS_SNOOZED: AtomicBool = AtomicBool::new(false);
    let (recorder, snapshotter, runtime) = recording();
    let secs = Duration::from_secs;
    let mut halfway = BTreeMap::new();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let backend = MemoryBackend::new();
            let store = FaultStore::new(backend.clone());
            let faults = store.faults();
            let queue = DelayQueue::<u32>::new(backend, "mail");
            let service = service_fn(async |job: Job<u32>| match (*job, job.attempt()) {
                (0, _) if !WAS_SNOOZED.swap(true, Ordering::Relaxed) => Err(Outcome::snooze(Duration::from_secs(1))),
                (1, _) => Err(Outcome::cancel()),
                (2..5, 1) => std::future::pending().await,
                _ => Ok(()),
            });
            let worker = |queue| DelayQueueWorker::new(queue, service).lease(secs(3)).abort_after(Duration::ZERO);
            // The worker dies with two jobs: the first has attempts left, the second has none.
            queue.push(2).await.unwrap();
            queue.push(3).max_attempts(1).await.unwrap();
            assert!(tokio::time::timeout(secs(1), worker(queue.clone()).run()).await.is_err());
            for payload in [0, 1] {
                queue.push(payload).await.unwrap();
            }
            let shutdown = tokio::time::sleep(secs(60));
            let watched = async {
                tokio::time::sleep(secs(10)).await;
                // The worker loses the store during this job, and another worker completes it.
                queue.push(4).await.unwrap();
                tokio::time::sleep(secs(1)).await;
                halfway = seen(&snapshotter);
                faults.fail(Failure::Unavailable);
                tokio::time::sleep(secs(4)).await;
                let others = DelayQueueWorker::new(queue.clone(), service_fn(async |_| Ok::<_, BoxError>(())));
                others.run_until(tokio::time::sleep(secs(1))).await.unwrap();
                faults.heal();
            };
            let failing = DelayQueue::<u32>::new(store, "mail");
            tokio::join!(worker(failing).run_until(shutdown), watched).0.unwrap();
        });
    });
    assert_eq!(halfway.get("tollgate_jobs_running{queue=mail}"), Some(&1));
    let mut seen = seen_since(&snapshotter, halfway);
    let errors = seen.remove("tollgate_job_store_errors_total{queue=mail}");
    assert!(errors.is_some_and(|errors| errors > 1), "{errors:?}");
    let expected = [
        ("tollgate_job_lateness_seconds{queue=mail}", 8),
        ("tollgate_job_pushes_total{queue=mail,outcome=new}", 5),
        ("tollgate_job_seconds{queue=mail}", 8),
        ("tollgate_job_leases_expired_total{queue=mail,outcome=dead}", 1),
        ("tollgate_job_leases_expired_total{queue=mail,outcome=returned}", 2),
        ("tollgate_jobs_total{queue=mail,outcome=cancelled}", 1),
        ("tollgate_jobs_total{queue=mail,outcome=done}", 3),
        ("tollgate_jobs_total{queue=mail,outcome=lease_lost}", 1),
        ("tollgate_jobs_total{queue=mail,outcome=snoozed}", 1),
    ];
    assert_eq!(seen, expect(&expected));
}

#[test]
fn docs_of_metrics_say_what_an_idle_timeout_does() {
    for docs in [
        include_str!("../../src/rate_limit/mod.rs"),
        include_str!("../../src/lock/mod.rs"),
        include_str!("../../src/idempotency/mod.rs"),
        include_str!("../../src/delay_queue/mod.rs"),
    ] {
        let (_, docs) = docs.split_once("//! # Metrics").unwrap();
        let docs = docs.split("//! # ").next().unwrap();
        assert!(docs.contains("idle timeout"), "{docs}");
    }
}

/// A recorder that forgets metrics, as an exporter with an idle timeout does: it ignores the handles of a forgotten metric.
struct Forgetful(Registry<metrics::Key, AtomicStorage>);

impl Forgetful {
    /// Every counter and histogram that was used, and every gauge, with their values.
    fn seen(&self) -> BTreeMap<String, f64> {
        let name = |key: &metrics::Key| {
            let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            format!("{}{{{}}}", key.name(), labels.join(","))
        };
        let mut seen = BTreeMap::new();
        self.0.visit_counters(|key, counter| {
            seen.insert(name(key), counter.load(Ordering::Relaxed) as f64);
        });
        self.0.visit_histograms(|key, values| {
            seen.insert(name(key), values.data().len() as f64);
        });
        seen.retain(|_, value| *value > 0.0);
        self.0.visit_gauges(|key, gauge| {
            seen.insert(name(key), f64::from_bits(gauge.load(Ordering::Relaxed)));
        });
        seen
    }
}

impl Recorder for Forgetful {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &Metadata<'_>) -> Counter {
        self.0.get_or_create_counter(key, |counter| Counter::from_arc(counter.clone()))
    }

    fn register_gauge(&self, key: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        self.0.get_or_create_gauge(key, |gauge| Gauge::from_arc(gauge.clone()))
    }

    fn register_histogram(&self, key: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        self.0.get_or_create_histogram(key, |histogram| Histogram::from_arc(histogram.clone()))
    }
}

/// Regression: metrics never appeared again after an exporter had dropped them at its idle timeout.
#[test]
fn metric_that_was_dropped_when_idle_appears_again() {
    let recorder = Forgetful(Registry::new(AtomicStorage));
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let memory = MemoryBackend::new();
    let store = FaultStore::new(memory.clone());
    let faults = store.faults();
    let breaker = CircuitBreaker::new().failures(1).probe_interval(Duration::ZERO);
    let policy = Policy::new("again", Quota::per_second(1).fixed_window());
    let limit = RateLimitLayer::new(store.clone(), policy).circuit_breaker(breaker).responder(ErrorResponder);
    let limit = limit.layer(service_fn(async |(): ()| Ok::<_, BoxError>(())));
    let locks = Locks::new(memory.clone(), "again");
    let operations = Idempotent::new(memory.clone(), "again");
    let queue = DelayQueue::<u32>::new(memory, "again");
    let use_all = async |turn: u32| {
        let _ = (limit.clone().oneshot(()).await, limit.clone().oneshot(()).await);
        faults.fail(Failure::Unavailable);
        let _ = limit.clone().oneshot(()).await;
        faults.heal();
        // A check that has to wait counts as a reply of the store, and closes the circuit.
        faults.delay(Duration::from_millis(1));
        let _ = limit.clone().oneshot(()).await;
        faults.heal();
        locks.lock("a").await.unwrap().release().await.unwrap();
        let operation = Operation::new("alice", turn.to_string());
        operations.run(operation, "", async |_| Ok::<_, BoxError>("done")).await.unwrap();
        queue.push(turn).await.unwrap();
        // Long enough for the worker to have run the job, and for the next use to be in another second.
        tokio::time::sleep(Duration::from_secs(3)).await;
    };
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            // One job runs all the time.
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let work = service_fn(async |job: Job<u32>| {
                if *job == 0 {
                    tokio::time::sleep(Duration::from_secs(600)).await;
                }
                Ok::<_, BoxError>(())
            });
            let worker = DelayQueueWorker::new(queue.clone(), work).concurrency(2);
            let running = tokio::spawn(worker.run_until(async { drop(stopped.await) }));
            queue.push(0).await.unwrap();
            use_all(1).await;
            let first = recorder.seen();
            recorder.0.clear();
            use_all(2).await;
            let second = recorder.seen();
            // A gauge that has stayed at 0 was not used.
            let used = first.iter().filter(|(_, value)| **value > 0.0).map(|(name, _)| name);
            let missing: Vec<_> = used.filter(|name| !second.contains_key(*name)).collect();
            assert!(missing.is_empty(), "{missing:?} did not appear again");
            for name in [
                "tollgate_decisions_total{policy=again,outcome=limited}",
                "tollgate_circuit_transitions_total{policy=again,state=closed}",
                "tollgate_lock_requests_total{locks=again,outcome=granted}",
                "tollgate_idempotency_requests_total{layer=again,outcome=executed}",
                "tollgate_job_pushes_total{queue=again,outcome=new}",
                "tollgate_jobs_total{queue=again,outcome=done}",
            ] {
                assert!(second.contains_key(name), "{name} is not among {second:?}");
            }
            let at_work = |seen: &BTreeMap<String, f64>| seen.get("tollgate_jobs_running{queue=again}").copied();
            assert_eq!((at_work(&first), at_work(&second)), (Some(1.0), Some(1.0)));
            recorder.0.clear();
            tokio::time::sleep(Duration::from_secs(600)).await;
            drop(stop);
            running.await.unwrap().unwrap();
            assert_eq!(at_work(&recorder.seen()), Some(0.0));
        });
    });
}

/// Regression: a loss that was found at release was not counted.
#[test]
fn losses_found_at_release_are_counted_once() {
    let (recorder, snapshotter, runtime) = recording();
    let backend = MemoryBackend::new();
    let locks = Locks::new(backend.clone(), "orders");
    let admin = LockAdmin::new(backend, "orders");
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let outcome = locks.run("a", async |_| admin.force_release("a").await.unwrap().holders).await;
            assert_eq!(outcome.unwrap_err().into_output(), Some(1));
            // The release task counts it, too.
            let lease = locks.lock("a").await.unwrap();
            admin.force_release("a").await.unwrap();
            drop(lease);
            locks.shutdown().await;
        });
    });
    assert_eq!(seen(&snapshotter).get("tollgate_lock_lost_total{locks=orders,reason=taken}"), Some(&2));
}

#[test]
fn handlers_of_detached_layers_are_counted() {
    let (recorder, snapshotter, runtime) = recording();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let layer = LockLayer::new(MemoryBackend::new(), "orders").key(|key: &&'static str| *key).detached();
            let service = layer.max_running(2).responder(ErrorResponder).layer(service_fn(async |_: &'static str| {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok::<_, BoxError>(())
            }));
            for key in ["a", "b", "c"] {
                let answer = service.clone().oneshot(key);
                drop(tokio::time::timeout(Duration::from_millis(10), answer).await);
            }
            let so_far = seen(&snapshotter);
            assert_eq!(so_far.get("tollgate_lock_handlers_running{locks=orders}"), Some(&2));
            assert_eq!(so_far.get("tollgate_lock_requests_total{locks=orders,outcome=full}"), Some(&1));
            tokio::time::sleep(Duration::from_secs(1)).await;
            let at_the_end = seen_since(&snapshotter, so_far);
            assert_eq!(at_the_end.get("tollgate_lock_handlers_running{locks=orders}"), None);
        });
    });
}

#[test]
fn fill_ratio_of_an_exists_filter_is_a_gauge() {
    let (recorder, snapshotter, runtime) = recording();
    let filter = ExistsFilter::new(MemoryBackend::new(), "users", 1_000);
    let ratio = metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let keys = futures_util::stream::iter((0..500_u32).map(Ok::<_, BoxError>));
            filter.rebuild(keys).await.unwrap();
            filter.stats().await.unwrap().unwrap().fill_ratio
        })
    });
    assert!(ratio > 0.2 && ratio < 0.4, "{ratio}");
    let gauges: Vec<_> = snapshotter.snapshot().into_vec();
    let found = gauges.iter().find(|(key, ..)| key.key().name() == "tollgate_exists_filter_fill_ratio").unwrap();
    assert_eq!(found.3, DebugValue::Gauge(ratio.into()));
    assert_eq!(found.0.key().labels().next().unwrap().value(), "users");
}
