//! Log messages for operators: one line when a state changes, and none per request.

use crate::support;

use std::convert::Infallible;
use std::fmt;
use std::future::{pending, ready};
use std::io;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use support::server::{RedisServer, free_port, version, wait_until};
use tokio::sync::Barrier;
use tokio::time::{advance, sleep, timeout};
use tollgate::delay_queue::{Codec, Outcome, Recurring, Schedule};
use tollgate::http::{ClientIp, FingerprintedBody, ForwardingHeader, PeerAddr, peer_ip};
use tollgate::idempotency::{
    Failed, IdempotencyHandle, Idempotent, OnDisconnect, Operation, OperationError, ResponsePolicy,
};
use tollgate::lock::LockKey;
use tollgate::lock::store::LockStore;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{CircuitBreaker, Decision, LimitStatus, PolicyResolver, Receipt};
use tollgate::responder::OutcomeUnknown;
use tollgate::testing::{Failure, FaultStore, Verb};
use tollgate::{
    BoxError, DelayQueue, DelayQueueWorker, ErrorResponder, ExistsFilter, ExtractKey, GlobalKey, IdempotencyLayer, Job,
    Key, Limiter, LockLayer, Locks, MemoryBackend, OnStoreError, Policy, Quota, RateLimitLayer, RedisBackend,
    RedisOptions, StoreError,
};
use tower::{Layer, ServiceExt, service_fn};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Collects the messages of all events, with their fields `then`, `old_answer`, `cause`, `missing` and `error`. If the flag is set, a line also
/// names the layer, operation, locks or queue.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Message>>>, bool, Option<tracing::Level>);

impl Log {
    fn take(&self) -> Vec<Message> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    fn lines(&self) -> Vec<String> {
        self.take().into_iter().map(|message| message.line).collect()
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Messages per request are below INFO.
        *metadata.level() <= self.2.unwrap_or(tracing::Level::INFO)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message { names_operations: self.1, ..Message::default() };
        event.record(&mut message);
        message.line = format!("{} {}{}", event.metadata().level(), message.line, message.operation);
        self.0.lock().unwrap().push(message);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Message {
    line: String,
    then: String,
    old_answer: String,
    cause: String,
    missing: String,
    error: String,
    operation: String,
    names_operations: bool,
}

impl Message {
    fn of_a_resolver(&self) -> (&str, &str, &str) {
        (&self.line, &self.then, &self.old_answer)
    }
}

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.line = format!("{value:?}"),
            "cause" => self.cause = format!("{value:?}"),
            "missing" => self.missing = format!("{value:?}").replace('"', ""),
            "then" => self.then = format!("{value:?}"),
            "old_answer" => self.old_answer = format!("{value:?}"),
            name @ ("layer" | "operation" | "locks" | "queue") if self.names_operations => {
                self.operation += &format!(" {name}={value:?}");
            }
            name @ ("job" | "jobs" | "attempts" | "reason" | "error") if self.operation.starts_with(" queue=") => {
                self.operation += &format!(" {name}={value:?}");
            }
            "error" => self.error = format!("{value:?}"),
            _ => {}
        }
    }
}

/// A store that fails while `broken` is set, except for the policy `firm`.
#[derive(Clone, Default)]
struct Flaky {
    broken: Arc<AtomicBool>,
}

impl RateLimitStore for Flaky {
    async fn check(&self, policy: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        if self.broken.load(Ordering::Relaxed) && policy.name() != "firm" {
            Err(StoreError::unavailable("connection refused"))
        } else {
            Ok(Decision::new([LimitStatus::new(5, 4, Duration::ZERO, Duration::from_secs(1))]))
        }
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.check(policy, key, cost).await
    }

    async fn settle(&self, _: &Policy, _: &Key, _: Receipt, _: i64) -> Result<(), StoreError> {
        unreachable!("this test settles nothing")
    }

    async fn block(&self, _: &Policy, _: &Key, _: Duration) -> Result<(), StoreError> {
        unreachable!("a layer never blocks")
    }

    async fn reset(&self, _: &Policy, _: &Key) -> Result<(), StoreError> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn outage_logs_one_line_at_start_and_end() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = Flaky::default();
    let policy = Policy::new("api", Quota::per_minute(5).fixed_window());
    // Each request is a number, which is its cost.
    let service = RateLimitLayer::new(store.clone(), policy)
        .cost(|cost: &u64| *cost)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: u64| Ok::<_, BoxError>(())));
    let ask = |cost: u64| {
        let service = service.clone();
        async move { drop(service.oneshot(cost).await) }
    };

    ask(1).await;
    assert!(log.lines().is_empty());

    // Every third call fails. A cost above the capacity is denied without the store, which does not count as a reply of the store.
    for turn in 0..200 {
        store.broken.store(turn % 3 == 0, Ordering::Relaxed);
        ask(1).await;
        ask(1_000).await;
        advance(Duration::from_millis(20)).await;
    }
    assert_eq!(log.lines(), ["WARN rate limit store fails"]);

    store.broken.store(false, Ordering::Relaxed);
    for _ in 0..3 {
        advance(Duration::from_secs(1)).await;
        ask(1).await;
    }
    assert_eq!(log.lines(), ["INFO rate limit store answers again"]);
}

#[tokio::test(start_paused = true)]
async fn unrecorded_requests_log_one_line_at_start_and_end() {
    let log = Log(Arc::default(), true, None);
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let _logging = tracing::subscriber::set_default(log.clone());
    let guard = IdempotencyLayer::new(store).name("pay").scope(GlobalKey).on_store_error(OnStoreError::Allow);
    let service = guard.layer(service_fn(async |_: Request<FingerprintedBody<Full<Bytes>>>| {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
    }));
    let ask = |number: usize| {
        let request = Request::post("/").header("idempotency-key", number).body(Full::default()).unwrap();
        let service = service.clone();
        async move { assert_eq!(service.oneshot(request).await.unwrap().status(), StatusCode::OK) }
    };
    ask(0).await;
    log.lines();
    faults.fail(Failure::Unavailable);
    for number in 1..20 {
        ask(number).await;
    }
    let begins = r#"WARN idempotency store fails: requests are served without a record layer="pay""#;
    let opens = r#"WARN idempotency circuit opens: only probes call the store layer="pay""#;
    let messages = log.take();
    let [fails, passes, _] = &*messages else { panic!("{} lines", messages.len()) };
    assert!(!passes.cause.is_empty() && passes.cause == fails.cause, "{:?}", passes.cause);
    assert_eq!(
        messages.iter().map(|message| &*message.line).collect::<Vec<_>>(),
        [r#"WARN idempotency store fails layer="pay""#, begins, opens]
    );
    faults.heal();
    for number in 20..23 {
        advance(Duration::from_secs(5)).await;
        ask(number).await;
    }
    let ends = r#"INFO idempotency store answers again: requests are served once layer="pay""#;
    let closes = r#"INFO idempotency circuit closes: all calls reach the store layer="pay""#;
    assert_eq!(log.lines(), [closes, r#"INFO idempotency store answers again layer="pay""#, ends]);
}

/// Configured methods are deliberate, so they cause no warning.
#[tokio::test(start_paused = true)]
async fn ignored_idempotency_key_logs_one_warning() {
    let guard = || IdempotencyLayer::new(MemoryBackend::new()).name("pay").scope(GlobalKey);
    let chosen = guard().methods([Method::POST]);
    for (guard, is_told) in [(guard(), true), (chosen, false)] {
        let log = Log(Arc::default(), true, None);
        let _logging = tracing::subscriber::set_default(log.clone());
        let ask = async |method: Method, key: Option<&str>| {
            // A router may create a service per request.
            let service = guard.layer(service_fn(async |_: Request<FingerprintedBody<Full<Bytes>>>| {
                Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
            }));
            let mut request = Request::builder().method(method);
            if let Some(key) = key {
                request = request.header("idempotency-key", key);
            }
            service.oneshot(request.body(Full::default()).unwrap()).await.unwrap();
        };
        for method in [Method::GET, Method::OPTIONS, Method::POST] {
            ask(method, Some("k")).await;
        }
        ask(Method::PUT, None).await;
        assert!(log.lines().is_empty());
        for method in [Method::DELETE, Method::PUT, Method::DELETE] {
            ask(method, Some("k")).await;
        }
        let lines = log.lines();
        assert_eq!(lines.len(), usize::from(is_told), "{lines:?}");
        let begins = "WARN a request with an idempotency key is served without a record";
        assert!(lines.iter().all(|line| line.starts_with(begins) && line.ends_with(r#" layer="pay""#)), "{lines:?}");
    }
}

/// The outer layer has a record of the request, so it is replayed.
#[tokio::test(start_paused = true)]
async fn key_recorded_by_an_outer_layer_logs_no_warning() {
    let guard = || IdempotencyLayer::new(MemoryBackend::new()).scope(GlobalKey);
    let handler = service_fn(async |_: Request<FingerprintedBody<FingerprintedBody<Full<Bytes>>>>| {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
    });
    let service = guard().methods([Method::PUT]).layer(guard().layer(handler));
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let ask = async |method: Method| {
        let request = Request::builder().method(method).header("idempotency-key", "k").body(Full::default()).unwrap();
        service.clone().oneshot(request).await.unwrap().headers().contains_key("idempotent-replayed")
    };
    assert!(!ask(Method::PUT).await);
    assert!(ask(Method::PUT).await);
    assert!(log.lines().is_empty());
    // Neither layer has a record of this one.
    ask(Method::DELETE).await;
    let lines = log.lines();
    assert!(lines.len() == 1 && lines[0].contains("served without a record"), "{lines:?}");
}

/// A limiter without a layer logs the same lines. By default, every call reaches the store. With a breaker, an open circuit rejects calls.
#[tokio::test(start_paused = true)]
async fn limiter_logs_outage_and_open_circuit_once() {
    for (breaker, asked) in [(None, 20), (Some(CircuitBreaker::new().failures(3)), 3)] {
        let log = Log::default();
        let _logging = tracing::subscriber::set_default(log.clone());
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let limiter = Limiter::new(store, Policy::new("api", Quota::per_minute(100).fixed_window()));
        let limiter = breaker.map_or(limiter.clone(), |breaker| limiter.circuit_breaker(breaker));
        faults.fail(Failure::Unavailable);
        for _ in 0..20 {
            assert!(limiter.check("alice").await.unwrap_err().is_unavailable());
        }
        assert_eq!(faults.calls(Verb::Check), asked);
        let opens = "WARN rate limit circuit opens: only probes call the store";
        let begins = ["WARN rate limit store fails", opens];
        assert_eq!(log.lines(), begins[..1 + usize::from(breaker.is_some())]);
        faults.heal();
        for _ in 0..2 {
            sleep(Duration::from_secs(1)).await;
            // A check would be decided without waiting, which is no success of the store. A peek is one.
            let _ = limiter.peek("alice").await.unwrap();
        }
        let ends = ["INFO rate limit circuit closes: all calls reach the store", "INFO rate limit store answers again"];
        assert_eq!(log.lines(), ends[usize::from(breaker.is_none())..]);
    }
}

/// A failed shadow policy changes no response, so its lines have no field `then`.
#[tokio::test(start_paused = true)]
async fn failure_for_shadow_policies_has_its_own_lines() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = Flaky::default();
    let policy = |name: &str| Policy::new(name, Quota::per_minute(5).fixed_window());
    let service = RateLimitLayer::new(store.clone(), policy("firm"))
        .and(policy("trial").shadow(), GlobalKey)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: u32| Ok::<_, BoxError>(())));
    store.broken.store(true, Ordering::Relaxed);
    for request in 0..20 {
        service.clone().oneshot(request).await.unwrap();
    }
    let messages = log.take();
    let lines: Vec<&str> = messages.iter().map(|message| &*message.line).collect();
    let begins = "WARN rate limit store fails for shadow policies: they are not counted";
    let opens = "WARN rate limit circuit of shadow policies opens: only probes call the store about them";
    assert_eq!(lines, [begins, opens]);
    assert_eq!((&*messages[0].cause, &*messages[0].then), ("connection refused", ""));

    store.broken.store(false, Ordering::Relaxed);
    for request in 0..3 {
        advance(Duration::from_secs(1)).await;
        service.clone().oneshot(request).await.unwrap();
    }
    let closes = "INFO rate limit circuit of shadow policies closes: all calls about them reach the store";
    assert_eq!(log.lines(), [closes, "INFO rate limit store answers again for shadow policies"]);
}

/// No operation began, so no outcome is unknown. While the store is down, the layer does not ask it to release attempts that it never
/// granted.
#[tokio::test(start_paused = true)]
async fn failed_begins_do_not_log_one_line_each() {
    let log = Log::default();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let _logging = tracing::subscriber::set_default(log.clone());
    let guard = IdempotencyLayer::new(store).scope(GlobalKey);
    let service = guard.layer(service_fn(async |_: Request<FingerprintedBody<Full<Bytes>>>| {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
    }));
    let ask = |number: usize| {
        let request = Request::post("/").header("idempotency-key", number).body(Full::default()).unwrap();
        let service = service.clone();
        async move { service.oneshot(request).await.unwrap().status() }
    };
    faults.fail(Failure::Timeout);
    for number in 0..600 {
        assert_eq!(ask(number).await, StatusCode::SERVICE_UNAVAILABLE);
        sleep(Duration::from_millis(200)).await;
    }
    let opens = "WARN idempotency circuit opens: only probes call the store";
    assert_eq!(log.lines(), ["WARN idempotency store fails", opens]);
    let (begins, releases) = (faults.calls(Verb::Begin), faults.calls(Verb::Release));
    assert!(releases <= begins, "{releases} releases after {begins} failed begins");
    faults.heal();
    assert_eq!(ask(600).await, StatusCode::OK);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(ask(601).await, StatusCode::OK);
    let closes = "INFO idempotency circuit closes: all calls reach the store";
    assert_eq!(log.lines(), [closes, "INFO idempotency store answers again"]);
}

/// One call in three fails for a while, so no circuit opens.
#[tokio::test(start_paused = true)]
async fn intermittent_errors_do_not_log_one_line_each() {
    let log = Log::default();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let _logging = tracing::subscriber::set_default(log.clone());
    let layer = LockLayer::new(store.clone(), "requests").key(GlobalKey).on_store_error(tollgate::OnStoreError::Allow);
    let locked = layer.responder(ErrorResponder).layer(service_fn(async |_: ()| Ok::<_, BoxError>(())));
    let guard = IdempotencyLayer::new(store).scope(GlobalKey).on_store_error(OnStoreError::Allow);
    let guarded = guard.layer(service_fn(async |_: Request<FingerprintedBody<Full<Bytes>>>| {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
    }));
    for number in 0..300 {
        if number % 3 == 0 {
            faults.fail(Failure::Unavailable);
        }
        locked.clone().oneshot(()).await.unwrap();
        let request = Request::post("/").header("idempotency-key", number).body(Full::default()).unwrap();
        guarded.clone().oneshot(request).await.unwrap();
        faults.heal();
        sleep(Duration::from_millis(20)).await;
    }
    let mut lines = log.lines();
    lines.sort_unstable();
    let expected = [
        "WARN idempotency store fails",
        "WARN idempotency store fails: requests are served without a record",
        "WARN lock store fails",
        "WARN lock store fails: requests pass without a lock",
    ];
    assert_eq!(lines, expected);
}

/// Regression: the late breaker was ignored without a warning.
#[tokio::test(start_paused = true)]
async fn late_circuit_breaker_logs_a_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let locks = Locks::new(FaultStore::new(MemoryBackend::new()), "default").circuit_breaker(CircuitBreaker::off());
    drop(locks.clone().circuit_breaker(CircuitBreaker::new()).lock("a").await.unwrap());
    log.take();
    drop(locks.circuit_breaker(CircuitBreaker::new()));
    let expected = "WARN a circuit breaker of locks is ignored: set it before the first call of the store";
    assert_eq!(log.lines(), [expected]);
}

/// Regression: the line only said that a store fails.
#[tokio::test(start_paused = true)]
async fn unlocked_requests_log_the_cause() {
    let log = Log::default();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let _logging = tracing::subscriber::set_default(log.clone());
    let layer = LockLayer::new(store, "requests").key(GlobalKey).on_store_error(tollgate::OnStoreError::Allow);
    let service = layer.responder(ErrorResponder).layer(service_fn(async |_: ()| Ok::<_, BoxError>(())));
    service.oneshot(()).await.unwrap();
    let messages: Vec<_> = log.take().into_iter().map(|message| (message.line, message.cause)).collect();
    let cause = "a fault injected by the test";
    let expected = ["WARN lock store fails", "WARN lock store fails: requests pass without a lock"]
        .map(|line| (line.into(), cause.into()));
    assert_eq!(messages, expected);
}

/// An operator needs to know which requests run without a lock: payments or reports.
#[tokio::test(start_paused = true)]
async fn outage_lines_name_their_locks() {
    let log = Log(Arc::default(), true, None);
    let store = FaultStore::new(MemoryBackend::new());
    let _logging = tracing::subscriber::set_default(log.clone());
    let breaker = CircuitBreaker::new().failures(1).probe_interval(Duration::from_secs(1));
    let layer =
        |name| LockLayer::new(store.clone(), name).key(GlobalKey).circuit_breaker(breaker).responder(ErrorResponder);
    let inner = service_fn(async |_: ()| Ok::<_, BoxError>(()));
    let payments = layer("payments").layer(inner);
    let reports = layer("reports").on_store_error(tollgate::OnStoreError::Allow).layer(inner);
    store.faults().fail(Failure::Unavailable);
    assert!(payments.clone().oneshot(()).await.is_err());
    assert!(reports.clone().oneshot(()).await.is_ok());
    let opens = "WARN lock circuit opens: only probes call the store";
    let begins = [
        "WARN lock store fails locks=\"payments\"".to_owned(),
        format!("{opens} locks=\"payments\""),
        "WARN lock store fails locks=\"reports\"".to_owned(),
        format!("{opens} locks=\"reports\""),
        "WARN lock store fails: requests pass without a lock locks=\"reports\"".to_owned(),
    ];
    assert_eq!(log.lines(), begins);

    store.faults().heal();
    sleep(Duration::from_secs(3)).await;
    assert!(payments.oneshot(()).await.is_ok() && reports.clone().oneshot(()).await.is_ok());
    let ends: Vec<_> = log.lines().into_iter().filter(|line| line.contains("answers again")).collect();
    let expected = [
        "INFO lock store answers again locks=\"payments\"",
        "INFO lock store answers again locks=\"reports\"",
        "INFO lock store answers again: requests need their lock locks=\"reports\"",
    ];
    assert_eq!(ends, expected);
}

/// The responses are lost, and the tombstones are kept.
#[tokio::test(start_paused = true)]
async fn store_without_room_for_responses_logs_one_line() {
    let log = Log(Arc::default(), true, None);
    let backend = MemoryBackend::with_capacity(20);
    let _logging = tracing::subscriber::set_default(log.clone());
    let guard = IdempotencyLayer::new(backend).name("pay").scope(GlobalKey);
    let service = guard.layer(service_fn(async |_: Request<FingerprintedBody<Full<Bytes>>>| {
        Ok::<_, BoxError>(Response::new(Full::<Bytes>::from(vec![b'x'; 15_000])))
    }));
    let ask = async |number: usize| {
        let request = Request::post("/").header("idempotency-key", number).body(Full::default()).unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), 15_000);
    };
    for number in 0..10 {
        ask(number).await;
        sleep(Duration::from_millis(100)).await;
    }
    let lines = [
        r#"WARN idempotency store fails layer="pay""#,
        r#"WARN the idempotency store is out of memory: responses are not stored, and retries of their requests are rejected layer="pay""#,
    ];
    assert_eq!(log.lines(), lines);
    sleep(Duration::from_secs(86_400)).await;
    ask(10).await;
    let lines = [
        r#"INFO idempotency store answers again layer="pay""#,
        r#"INFO the idempotency store has room for responses again layer="pay""#,
    ];
    assert_eq!(log.lines(), lines);
}

/// Regression: the lines did not name the operations of unknown outcome, so operators could not find them.
#[tokio::test(start_paused = true)]
async fn unknown_outcome_line_names_the_operation() {
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let guard = IdempotencyLayer::new(store)
        .name("payments")
        .scope(|_: &Request<Full<Bytes>>| Some("alice"))
        .max_runtime(Duration::from_secs(60));
    let failing = faults.clone();
    let named = Arc::new(Mutex::new(Vec::new()));
    let names = Arc::clone(&named);
    let service = guard.layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| {
        let operation = request.extensions().get::<IdempotencyHandle>().unwrap().operation().to_string();
        names.lock().unwrap().push(operation);
        let (failing, path) = (failing.clone(), request.uri().path().to_owned());
        async move {
            match path.as_str() {
                "/never" => pending().await,
                _ => failing.fail(Failure::Unavailable),
            }
            Ok::<_, BoxError>(Response::new(Full::<Bytes>::default()))
        }
    }));
    let ask = |path: &str| {
        let request = Request::post(path).header("idempotency-key", "k").body(Full::default()).unwrap();
        let service = service.clone();
        async move { service.oneshot(request).await.unwrap().status() }
    };
    assert_eq!(ask("/never").await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(ask("/late").await, StatusCode::OK);
    guard.wait_idle().await;
    let named = std::mem::take(&mut *named.lock().unwrap());
    assert_eq!(named.len(), 2);
    assert!(named[0].contains("alice") && named[0].ends_with(":k"), "{named:?}");
    let lines: Vec<_> = log.take().into_iter().map(|message| (message.line, message.cause)).collect();
    for (line, operation, cause) in [
        ("a handler was cancelled: its outcome is unknown when its lease has ended", &named[0], ""),
        (
            "an operation could not be settled in time: its outcome is unknown",
            &named[1],
            "a fault injected by the test",
        ),
    ] {
        let line = (format!("WARN {line} layer=\"payments\" operation={operation}"), cause.to_owned());
        assert!(lines.contains(&line), "{line:?} is not one of {lines:#?}");
    }
}

/// Regression: the line about a payment of unknown outcome gave no reason.
#[tokio::test(start_paused = true)]
async fn log_of_an_unknown_outcome_has_its_error() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let payouts = Idempotent::new(MemoryBackend::new(), "payouts").response_policy(ResponsePolicy::All);
    let timeout = io::Error::other(Failed::outcome_unknown("timed out"));
    let errors: [(BoxError, &str); 3] = [
        (Failed::outcome_unknown("bank timeout").into(), "bank timeout"),
        (OperationError::Failed(timeout.into()).into(), "the outcome of the operation is unknown: timed out"),
        ("no money".into(), ""),
    ];
    for (number, (error, cause)) in errors.into_iter().enumerate() {
        let operation = Operation::new("alice", number.to_string());
        assert!(payouts.run(operation, "", async |_| Err::<&str, _>(error)).await.is_err());
        let messages: Vec<_> = log.take().into_iter().map(|message| (message.line, message.cause)).collect();
        let line = "WARN an operation has failed: its outcome is unknown when its lease has ended";
        assert_eq!(messages, [(line.to_owned(), cause.to_owned())]);
    }
}

/// Each abandoned operation logs one line, whatever the reason.
#[tokio::test(start_paused = true)]
async fn abandoned_operations_log_one_line_each() {
    const LEFT: &str = "an execution was dropped: the outcome of its operation is unknown when its lease has ended";
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let guard = IdempotencyLayer::new(MemoryBackend::new())
        .scope(GlobalKey)
        .max_body(3)
        .response_policy(ResponsePolicy::All)
        .on_disconnect(OnDisconnect::Cancel);
    let service = guard.layer(service_fn(async |request: Request<FingerprintedBody<BoxBody<Bytes, Infallible>>>| {
        let (parts, body) = request.into_parts();
        match parts.uri.path() {
            "/fails" => return Err(BoxError::from("no money")),
            "/panics" => panic!("no money at all"),
            "/gone" => pending().await,
            _ => drop(body.collect().await),
        }
        let mut response = Response::new(Full::<Bytes>::default());
        response.extensions_mut().insert(OutcomeUnknown);
        Ok(response)
    }));
    let ask = |path: &str, body: &'static str| {
        // The length of the body is unknown until it is read.
        let body = futures_util::stream::iter([Ok(Frame::data(Bytes::from(body)))]);
        let request = Request::post(path).header("idempotency-key", "k");
        service.clone().oneshot(request.body(BodyExt::boxed(StreamBody::new(body))).unwrap())
    };
    let line = |path: &str| format!("WARN {LEFT} layer=\"idempotency\" operation=!global,POST,{path}:k");
    assert!(ask("/fails", "").await.is_err());
    assert_eq!(log.lines(), [line("/fails")]);
    assert!(AssertUnwindSafe(ask("/panics", "")).catch_unwind().await.is_err());
    assert_eq!(log.lines(), [line("/panics")]);
    assert!(timeout(Duration::from_secs(1), ask("/gone", "")).await.is_err());
    assert_eq!(log.lines(), [line("/gone")]);
    assert_eq!(ask("/large", "long").await.unwrap().status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(log.lines(), [line("/large")]);
    assert_eq!(ask("/says-so", "").await.unwrap().status(), StatusCode::OK);
    let says_so =
        "a handler reported an unknown outcome or lost its lock: its outcome is unknown when its lease has ended";
    assert_eq!(log.lines(), [line("/says-so").replace(LEFT, says_so)]);

    let payouts = Idempotent::new(MemoryBackend::new(), "payouts");
    let run = payouts.run(Operation::new("alice", "k"), "", async |_| pending::<Result<&str, BoxError>>().await);
    assert!(timeout(Duration::from_secs(1), run).await.is_err());
    assert_eq!(log.lines(), [format!("WARN {LEFT} layer=\"payouts\" operation=payouts,alice:k")]);
    let run = payouts.clone().max_runtime(Duration::from_secs(1));
    let run = run.run(Operation::new("alice", "l"), "", async |_| pending::<Result<&str, BoxError>>().await);
    assert!(matches!(run.await, Err(OperationError::Cancelled)));
    let lines = log.lines();
    assert!(matches!(lines.as_slice(), [line] if line.contains("an operation was cancelled")), "{lines:?}");
}

/// Clients often abort requests. If those lines looked like any other, operators could not find the line of a crash.
#[tokio::test(start_paused = true)]
async fn aborted_request_has_its_own_line() {
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let guard = IdempotencyLayer::new(MemoryBackend::new())
        .name("uploads")
        .scope(GlobalKey)
        .response_policy(ResponsePolicy::All);
    let service = guard.layer(service_fn(async |request: Request<FingerprintedBody<BoxBody<Bytes, io::Error>>>| {
        let mut response = Response::new(Full::<Bytes>::default());
        if request.into_body().collect().await.is_err() {
            *response.status_mut() = StatusCode::BAD_REQUEST;
        }
        Ok::<_, BoxError>(response)
    }));
    let frames = [Ok(Frame::data(Bytes::from("hun"))), Err(io::Error::other("the connection is gone"))];
    let body = BodyExt::boxed(StreamBody::new(futures_util::stream::iter(frames)));
    let request = Request::post("/").header("idempotency-key", "k").body(body).unwrap();
    assert_eq!(service.oneshot(request).await.unwrap().status(), StatusCode::BAD_REQUEST);
    let line = "a request broke off before its handler had all of it: its outcome is unknown when its lease has ended";
    assert_eq!(log.lines(), [format!("WARN {line} layer=\"uploads\" operation=!global,POST,/:k")]);
}

/// When the store is back, as many operations are settled as can be at a time. One more has no room.
#[tokio::test(start_paused = true)]
async fn response_lost_for_lack_of_room_is_named() {
    const ROOM: usize = 4_096;
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let payouts = Idempotent::new(store, "payouts");
    let all_have_begun = Barrier::new(ROOM + 1);
    let runs = (0..=ROOM).map(|number| {
        let (faults, all_have_begun) = (&faults, &all_have_begun);
        payouts.run(Operation::new("alice", number.to_string()), "", async move |_| {
            all_have_begun.wait().await;
            faults.fail(Failure::Unavailable);
            Ok::<_, BoxError>("paid")
        })
    });
    for paid in join_all(runs).await {
        assert_eq!(paid.unwrap().response(), b"paid");
    }
    faults.heal();
    payouts.wait_idle().await;
    let lost = "WARN an operation cannot be settled in the background: its outcome is unknown layer=\"payouts\" ";
    let lines = log.lines();
    assert_eq!(lines.iter().filter(|line| line.starts_with(lost)).count(), 1, "{lines:#?}");
}

#[tokio::test(start_paused = true)]
async fn failing_resolver_logs_one_line_and_no_store_error() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let policy = Policy::new("api", Quota::per_minute(5).fixed_window());
    let plans = PolicyResolver::new({
        let policy = policy.clone();
        move |key: Key| ready(if key.as_str() == "stranger" { Err("no such customer") } else { Ok(policy.clone()) })
    });
    let service = RateLimitLayer::new(Flaky::default(), policy)
        .key(|customer: &&'static str| *customer)
        .resolver(plans.time_to_live(Duration::from_millis(1)))
        .responder(ErrorResponder)
        .layer(service_fn(async |_: &'static str| Ok::<_, BoxError>(())));
    let ask = |customer: &'static str| {
        let service = service.clone();
        async move { service.oneshot(customer).await.unwrap() }
    };
    ask("alice").await;
    assert!(log.lines().is_empty());
    // A client with an unknown key tries it at most twice a minute.
    for turn in 0..400 {
        if turn % 30 == 0 {
            ask("stranger").await;
        }
        ask("alice").await;
        advance(Duration::from_secs(1)).await;
    }
    let messages = log.take();
    let messages: Vec<_> = messages.iter().map(Message::of_a_resolver).collect();
    assert_eq!(messages, [("WARN rate limit resolver fails", "Local", "false")]);
    for _ in 0..60 {
        advance(Duration::from_secs(1)).await;
        ask("alice").await;
    }
    assert_eq!(log.lines(), ["INFO rate limit resolver answers again"]);
}

/// Regression: the line described the first failed request, as if the whole outage were like it.
#[tokio::test(start_paused = true)]
async fn failing_resolver_with_stale_answers_logs_one_line() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let policy = Policy::new("api", Quota::per_minute(5).fixed_window());
    let hangs = Arc::new(AtomicBool::new(false));
    let plans = PolicyResolver::new({
        let (policy, hangs) = (policy.clone(), Arc::clone(&hangs));
        move |_| {
            let (policy, hangs) = (policy.clone(), hangs.load(Ordering::Relaxed));
            async move { if hangs { pending().await } else { Ok::<_, BoxError>(policy) } }
        }
    });
    let service = RateLimitLayer::new(Flaky::default(), policy)
        .key(|customer: &&'static str| *customer)
        .resolver(plans)
        .on_store_error(tollgate::RateLimitFallback::Deny)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: &'static str| Ok::<_, BoxError>(())));
    let ask = async |customer: &'static str| service.clone().oneshot(customer).await.is_ok();
    assert!(ask("alice").await);
    hangs.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        advance(Duration::from_secs(61)).await;
        assert!(ask("alice").await && !ask("bob").await);
    }
    let messages = log.take();
    let messages: Vec<_> = messages.iter().map(Message::of_a_resolver).collect();
    assert_eq!(messages, [("WARN rate limit resolver fails", "Deny", "true")]);
    hangs.store(false, Ordering::Relaxed);
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert!(ask("alice").await);
    }
    assert_eq!(log.lines(), ["INFO rate limit resolver answers again"]);
}

#[tokio::test(start_paused = true)]
async fn circuit_logs_one_line_per_transition() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let policy = Policy::new("api", Quota::per_minute(5).fixed_window());
    let service = RateLimitLayer::new(store.clone(), policy)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: ()| Ok::<_, BoxError>(())));
    let locks = Locks::new(store.clone(), "default");
    let jobs = DelayQueue::<u8>::new(store.clone(), "mail");
    let ask = async |times: usize| {
        for _ in 0..times {
            drop(service.clone().oneshot(()).await);
        }
        log.lines()
    };
    let take = async |times: usize| {
        for _ in 0..times {
            drop(locks.try_lock("alice").await);
        }
        log.lines()
    };
    let push = async |times: usize| {
        for _ in 0..times {
            drop(jobs.push(1).await);
        }
        log.lines()
    };
    assert!(ask(1).await.is_empty() && take(1).await.is_empty() && push(1).await.is_empty());
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..2 {
        store.faults().fail(Failure::Unavailable);
        let opens = "WARN rate limit circuit opens: only probes call the store";
        assert_eq!(ask(4).await, ["WARN rate limit store fails"]);
        assert_eq!(ask(100).await, [opens]);
        let opens = "WARN lock circuit opens: only probes call the store";
        assert_eq!(take(100).await, ["WARN lock store fails", opens]);
        let opens = "WARN delay queue circuit opens: only probes call the store";
        assert_eq!(push(100).await, ["WARN delay queue store fails", opens]);
        advance(Duration::from_secs(2)).await;
        let probed = [ask(3).await, take(3).await, push(3).await].concat();
        assert!(probed.is_empty(), "a probe that fails changes nothing: {probed:?}");

        store.faults().heal();
        // Without a delay, checks are decided without waiting, which is no success of the store.
        store.faults().delay(Duration::from_millis(1));
        advance(Duration::from_secs(2)).await;
        let closes = "INFO rate limit circuit closes: all calls reach the store";
        assert_eq!(ask(3).await, [closes, "INFO rate limit store answers again"]);
        let closes = "INFO lock circuit closes: all calls reach the store";
        assert_eq!(take(3).await, [closes, "INFO lock store answers again"]);
        let closes = "INFO delay queue circuit closes: all calls reach the store";
        assert_eq!(push(3).await, [closes, "INFO delay queue store answers again"]);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test]
async fn missing_peer_address_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    for _ in 0..3 {
        assert_eq!(peer_ip().extract_key(&http::Request::new(())), None);
    }
    let lines = log.lines();
    assert!(lines.len() == 1 && lines[0].contains("into_make_service_with_connect_info"), "{lines:?}");
}

#[test]
fn proxy_in_front_of_peer_ip_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let ask = |peer: &str, header: &str| {
        let peer = PeerAddr((peer.parse::<IpAddr>().unwrap(), 4711).into());
        let request = http::Request::builder().extension(peer).header(header, "203.0.113.7").body(());
        assert!(peer_ip().extract_key(&request.unwrap()).is_some());
    };
    ask("192.0.2.1", "x-forwarded-for");
    ask("2001:db8::1", "forwarded");
    ask("10.0.0.1", "x-api-key");
    assert!(log.lines().is_empty(), "any client can send the header over the internet");
    for (peer, header) in [("::ffff:10.0.0.1", "forwarded"), ("10.0.0.1", "x-forwarded-for"), ("::1", "forwarded")] {
        ask(peer, header);
    }
    let lines = log.lines();
    assert!(lines.len() == 1 && lines[0].contains("`ClientIp::trusting`"), "{lines:?}");
}

#[test]
fn client_without_peer_address_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let by_ip = proxied();
    for _ in 0..3 {
        assert_eq!(by_ip.client_ip(&http::Request::new(())), None);
        assert_eq!(by_ip.clone().extract_key(&http::Request::new(())), None);
    }
    let lines = log.lines();
    assert!(lines.len() == 1 && lines[0].starts_with("WARN a request has no peer address"), "{lines:?}");
}

#[test]
fn forgotten_proxy_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    for by_ip in [ClientIp::peer(), proxied(), proxied().single_header("x-real-ip")] {
        ask(&by_ip, "192.0.2.1", &[]);
        ask(&by_ip, "192.0.2.1", &[("x-api-key", "k1")]);
        assert!(log.lines().is_empty(), "no proxy has forwarded the request");
        for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
            ask(&by_ip, "192.0.2.1", &[(header, "203.0.113.7")]);
            ask(&by_ip.clone(), "192.0.2.2", &[(header, "203.0.113.7")]);
        }
        let lines = log.lines();
        assert!(lines.len() == 1 && lines[0].contains("not a trusted proxy"), "{lines:?}");
    }
}

#[test]
fn trust_in_every_address_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let trusting = |nets: &[&str]| ClientIp::trusting(nets.iter().map(|net| net.parse().unwrap()));
    for nets in [&["0.0.0.0/0"][..], &["10.0.0.0/8", "::/0"], &["::ffff:0.0.0.0/96"], &["0.0.0.0/1", "128.0.0.0/1"]] {
        let by_ip = trusting(nets);
        ask(&by_ip.clone(), "203.0.113.7", &[]);
        let lines = log.lines();
        assert!(
            lines.len() == 1 && lines[0].starts_with("WARN ClientIp trusts all addresses of this family"),
            "{nets:?}: {lines:?}"
        );
    }
    let some = trusting(&["0.0.0.0/1", "::/1", "10.0.0.0/8"]);
    let client = http::Request::builder().extension(PeerAddr(([203, 0, 113, 7], 4711).into())).body(()).unwrap();
    assert!(some.within(["0.0.0.0/0".parse().unwrap()])(&client));
    assert!(log.lines().is_empty(), "these networks are plausible");
}

#[test]
fn private_client_behind_a_proxy_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    for client in
        ["192.168.0.1", "127.0.0.1", "169.254.0.1", "100.64.0.1", "::1", "fd00::1", "fe80::1", "::ffff:172.16.0.1"]
    {
        let by_ip = proxied();
        for quiet in ["203.0.113.7", "2001:db8::7", "10.0.0.2", "203.0.113.7, 10.0.0.2"] {
            ask(&by_ip, "10.0.0.1", &[("x-forwarded-for", quiet)]);
        }
        ask(&by_ip, "10.0.0.1", &[]);
        ask(&by_ip, "192.168.0.1", &[]);
        assert!(log.lines().is_empty(), "these addresses are plausible");
        for _ in 0..3 {
            ask(&by_ip, "10.0.0.1", &[("x-forwarded-for", client)]);
        }
        let lines = log.lines();
        assert!(lines.len() == 1 && lines[0].contains("private address"), "{client}: {lines:?}");
    }
}

#[test]
fn proxy_with_another_header_logs_one_warning() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let (list, element) = (("x-forwarded-for", "203.0.113.7"), ("forwarded", "for=203.0.113.7"));
    let by_forwarded = proxied().header(ForwardingHeader::Forwarded);
    for (by_ip, read, other) in [(proxied(), list, element), (by_forwarded, element, list)] {
        ask(&by_ip, "10.0.0.1", &[]);
        ask(&by_ip, "10.0.0.1", &[read]);
        ask(&by_ip, "10.0.0.1", &[read, other]);
        assert!(log.lines().is_empty(), "these headers are as configured");
        for _ in 0..3 {
            ask(&by_ip, "10.0.0.1", &[other]);
        }
        let lines = log.lines();
        assert!(lines.len() == 1 && lines[0].contains("a different header"), "{lines:?}");
    }
}

#[tokio::test]
async fn memory_backend_logs_once_that_it_is_local() {
    let log = Log(Arc::default(), false, Some(tracing::Level::DEBUG));
    let _logging = tracing::subscriber::set_default(log.clone());
    let local = |level| {
        [format!(
            "{level} tollgate counts in memory: limits, locks, idempotency and jobs hold within this process only"
        )]
    };
    let backend = tollgate::connect("memory:").await.unwrap();
    assert_eq!(log.lines(), local("INFO"));
    drop((Locks::new(backend.clone(), "default"), DelayQueue::<String>::new(backend, "mails")));
    assert!(log.lines().is_empty());
    for backend in [MemoryBackend::new, MemoryBackend::default, || MemoryBackend::with_capacity(10)] {
        drop(backend());
        assert_eq!(log.lines(), local("DEBUG"));
    }
}

fn proxied() -> ClientIp {
    ClientIp::trusting(["10.0.0.0/8".parse().unwrap()])
}

fn ask(by_ip: &ClientIp, peer: &str, headers: &[(&str, &str)]) {
    let mut request = http::Request::builder().extension(PeerAddr((peer.parse::<IpAddr>().unwrap(), 4711).into()));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    by_ip.client_ip(&request.body(()).unwrap());
}

/// Regression: all clients of the proxy shared one quota, without a line in the log.
#[tokio::test(start_paused = true)]
async fn unreadable_client_address_logs_one_warning_a_minute() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    for (by_ip, header, value) in [
        (proxied(), "x-forwarded-for", "6.6.6.6, unknown"),
        (proxied().header(ForwardingHeader::Forwarded), "forwarded", "for=unknown"),
        (proxied().single_header("x-real-ip"), "x-real-ip", "203.0.113.7 and more"),
        (ClientIp::trusting_hops(2), "x-forwarded-for", "unknown"),
    ] {
        for _ in 0..2 {
            for _ in 0..100 {
                ask(&by_ip, "10.0.0.1", &[(header, value)]);
                ask(&by_ip.clone(), "10.0.0.2", &[(header, value)]);
            }
            advance(Duration::from_millis(59_999)).await;
            ask(&by_ip, "10.0.0.1", &[(header, value)]);
            let lines = log.lines();
            assert!(lines.len() == 1 && lines[0].starts_with("WARN ClientIp cannot read the address"), "{lines:?}");
            advance(Duration::from_millis(1)).await;
        }
    }
    ask(&proxied(), "192.0.2.1", &[("x-forwarded-for", "unknown")]);
    let lines = log.lines();
    assert!(lines.len() == 1 && lines[0].contains("not a trusted proxy"), "the header is not read: {lines:?}");
}

/// Regression: a misspelt path disabled its limit without a warning.
#[tokio::test(start_paused = true)]
async fn rules_that_match_nothing_log_one_warning() {
    use tollgate::config::{Rules, RulesLayer};
    let rules = |quota: u32| {
        Rules::from_toml(&format!(
            r#"
            policies.a.limits = [{{ quota = {quota}, per = "1s", algorithm = "fixed_window" }}]
            rules = [
                {{ path = "/api/{{*rest}}", policy = "a", key = "global" }},
                {{ path = "/health", unlimited = true }},
                {{ path = "/v1/login", methods = ["POST", "PUT"], policy = "a", key = "global" }},
                {{ path = "/m%65", policy = "a", key = "global" }},
            ]
            "#
        ))
        .unwrap()
    };
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let layer = RulesLayer::new(MemoryBackend::new(), rules(1_000_000));
    let service = layer.layer(service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(()))));
    let ask = async |paths: &[&str]| {
        // Only one in many requests checks the clock.
        for path in paths.iter().cycle().take(300) {
            let _ = service.clone().oneshot(Request::get(*path).body(()).unwrap()).await;
        }
    };
    let paths = ["/api/x", "/health", "/login", "/me"];
    ask(&paths).await;
    advance(Rules::UNMATCHED_AFTER - Duration::from_secs(1)).await;
    ask(&paths).await;
    assert!(log.lines().is_empty(), "the rules are too new for a warning");
    advance(Duration::from_secs(1)).await;
    for lines in [1, 0] {
        ask(&paths).await;
        let found = log.lines();
        assert_eq!(found.len(), lines, "{found:?}");
        assert!(found.iter().all(|line| line.starts_with("WARN no request has matched these rules")), "{found:?}");
    }
    layer.handle().reload(rules(2_000_000));
    assert_eq!(log.lines(), ["INFO the rules were changed"]);
    ask(&paths).await;
    service.clone().oneshot(Request::post("/v1/login").body(()).unwrap()).await.unwrap();
    advance(Rules::UNMATCHED_AFTER).await;
    ask(&paths).await;
    assert!(log.lines().is_empty(), "each rule has matched since the reload");
}

#[tokio::test]
async fn mistakes_in_rules_are_logged_once() {
    use tollgate::config::Rules;
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    let limit = r#"limits = [{ quota = 1, per = "1s", algorithm = "fixed_window" }]"#;
    let rule = "[[rules]]\npath = \"/\"\npolicy = \"a\"\nkey = \"global\"";
    let good = format!("[policies.a]\n{limit}\n[policies.b]\n{limit}\n{rule}\n");
    let handle = Rules::from_toml(&good).unwrap().handle();
    assert_eq!(log.lines(), ["WARN no rule uses a policy of the file; add a rule, or remove the policy"]);
    // With this mistake, all clients of a proxy would share one quota.
    let trusting = format!("{good}[client_ip]\ntrusted = [\"10.0.0.0/8\"]\n");
    Rules::from_toml(&trusting.replace("\"global\"", "\"peer_ip\"")).unwrap();
    assert_eq!(log.lines()[1..], ["WARN no rule has the key `client_ip`, so the table `client_ip` has no effect"]);
    Rules::from_toml(&trusting.replace("\"global\"", "[{ header = \"x-api-key\" }, \"client_ip\"]")).unwrap();
    assert_eq!(log.lines(), ["WARN no rule uses a policy of the file; add a rule, or remove the policy"]);
    Rules::from_toml(&good.replace("\"global\"", "{ header = \"Authorization\" }")).unwrap();
    assert!(log.lines()[1].starts_with("WARN a rule uses the header `authorization` as a key"));

    let write = |text: &str| {
        std::fs::write(folder.path().join("fresh"), text).unwrap();
        std::fs::rename(folder.path().join("fresh"), &file).unwrap();
    };
    // Waits until the watch finds the mistake, and for many more polls.
    let found = async |what: &str| {
        while handle.last_error().is_none_or(|error| !error.message().contains(what)) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    write("rules = [");
    let _watch = handle.watch_every(Duration::from_millis(2), &file);
    found("unclosed").await;
    let place = format!("{}:1:", file.display());
    let lines = log.take();
    assert_eq!(lines.len(), 1, "one line, however often the file is polled");
    assert_eq!(lines[0].line, "ERROR the rules stay unchanged: the file cannot be loaded");
    assert!(lines[0].error.contains(&place), "{}", lines[0].error);

    write("rules = 7");
    found("invalid type").await;
    assert_eq!(log.lines().len(), 1, "another mistake logs another line");
}

#[tokio::test]
async fn evicting_server_logs_one_line() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let policy = |policy: &'static str| ["--maxmemory-policy", policy];
    for evicting in ["allkeys-lru", "volatile-ttl"] {
        let server = RedisServer::start_with(&[&policy(evicting)[..], &["--maxmemory", "100mb"]].concat());
        let _backend = tollgate::connect(server.url()).await.unwrap();
        let lines = log.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("WARN redis may evict keys") && lines[0].contains("noeviction"), "{lines:?}");
    }
    for harmless in [&policy("allkeys-lru")[..], &["--maxmemory", "100mb", "--maxmemory-policy", "noeviction"]] {
        let server = RedisServer::start_with(harmless);
        let _backend = tollgate::connect(server.url()).await.unwrap();
        assert_eq!(log.lines(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn missing_subscribe_right_is_logged_once() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let server = RedisServer::start();
    server.query::<()>("ACL SETUSER mute on >secret ~tollgate:2:* &* +@all -subscribe");
    let backend = RedisBackend::connect(server.url().replace("://", "://mute:secret@")).await.unwrap();
    let locks = Locks::new(backend, "default").deadline(Duration::from_secs(2));
    let holder =
        Locks::new(RedisBackend::connect(server.url()).await.unwrap(), "default").deadline(Duration::from_secs(2));
    for key in ["a", "b", "a"] {
        let _lease = holder.lock(key).await.unwrap();
        assert!(locks.lock(key).wait(Duration::from_millis(500)).await.is_err());
    }
    let lines = log.take();
    assert_eq!(lines.len(), 1, "{:?}", lines.iter().map(|message| &message.line).collect::<Vec<_>>());
    assert!(lines[0].line.starts_with("WARN the redis user may not subscribe"), "{}", lines[0].line);
    assert_eq!(lines[0].missing, "+subscribe");
    for how_often in ["queue workers poll every 5 s", "waiters once a second"] {
        assert!(lines[0].line.contains(how_often), "{}", lines[0].line);
    }
}

/// Regression: a process that got no more notifications logged nothing.
#[tokio::test]
async fn failed_subscriptions_log_one_line_at_start_and_end() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let recorder = DebuggingRecorder::new();
    let _counts = metrics::set_default_local_recorder(&recorder);
    let mut server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    let _wakeups = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    server.kill();
    sleep(Duration::from_secs(1)).await;
    server.restart();
    let start = tokio::time::Instant::now();
    let mut lines = Vec::new();
    while !lines.iter().any(|line: &String| line.contains("subscribed to redis again")) {
        assert!(start.elapsed() < Duration::from_secs(10), "{lines:?}");
        sleep(Duration::from_millis(20)).await;
        lines.extend(log.lines().into_iter().filter(|line| line.contains("subscribe")));
    }
    assert_eq!(
        lines,
        ["WARN cannot subscribe to redis; waiters and workers poll meanwhile", "INFO subscribed to redis again"]
    );
    let counters = recorder.snapshotter().snapshot().into_vec();
    let failures =
        counters.iter().find(|(key, ..)| key.key().name() == "tollgate_redis_subscription_failures_total").unwrap();
    assert!(matches!(failures.3, DebugValue::Counter(1..)), "{:?}", failures.3);
}

/// Regression: the process reconnected a hundred times a second, without a line in the log.
#[tokio::test]
async fn short_lived_subscriptions_log_one_line() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    let _wakeups = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    let mut ended = 0;
    for _ in 0..1_000 {
        ended += server.query::<u32>("CLIENT KILL TYPE pubsub");
        sleep(Duration::from_millis(3)).await;
    }
    assert!((2..25).contains(&ended), "{ended} connections");
    let lines = || log.lines().into_iter().filter(|line| line.contains("subscribe")).collect::<Vec<_>>();
    assert_eq!(lines(), ["WARN cannot subscribe to redis; waiters and workers poll meanwhile"]);
    sleep(Duration::from_secs(3)).await;
    assert_eq!(lines(), ["INFO subscribed to redis again"]);
}

/// Regression: the process retried twenty times a second, without a line or a metric.
#[tokio::test]
async fn node_that_refuses_its_own_channels_logs_one_line() {
    // Sharded channels are new in Redis 7.
    if version() < (7, 0) {
        return;
    }
    let args = "--cluster-enabled yes --cluster-config-file nodes.conf --cluster-announce-ip 127.0.0.1 \
                --cluster-allow-pubsubshard-when-down no";
    let node = RedisServer::start_with(&args.split_whitespace().collect::<Vec<_>>());
    node.query::<()>("CLUSTER ADDSLOTSRANGE 0 16383");
    wait_until("the node serves", || node.text("CLUSTER INFO").contains("cluster_state:ok"));
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let url = node.url().replace("redis:", "redis+cluster:");
    let backend = RedisBackend::connect(url).await.unwrap();
    node.query::<()>("CLUSTER DELSLOTS 0");
    wait_until("the node refuses", || node.text("CLUSTER INFO").contains("cluster_state:fail"));
    let _wakeups = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    let start = node.text("INFO stats");
    sleep(Duration::from_secs(4)).await;
    let errors = |stats: &str| {
        let field = stats.lines().find_map(|line| line.strip_prefix("total_error_replies:"));
        field.unwrap().trim().parse::<u32>().unwrap()
    };
    let refused = errors(&node.text("INFO stats")) - errors(&start);
    assert!((3..20).contains(&refused), "{refused} refusals");
    let lines: Vec<_> = log.lines().into_iter().filter(|line| line.contains("subscribe")).collect();
    assert_eq!(
        lines,
        ["WARN cannot subscribe to redis, the node of the slot refuses; waiters and workers poll meanwhile"]
    );
    node.query::<()>("CLUSTER ADDSLOTS 0");
    let listeners = || node.query::<(String, u32)>("PUBSUB SHARDNUMSUB tollgate:2:{lock:default:a}:free").1;
    let is_heard = async {
        while listeners() == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(10), is_heard).await.unwrap();
}

/// Regression: each attempt to load the slot map logged a line per node, twenty times a second.
#[tokio::test]
async fn cluster_that_is_down_logs_few_lines() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let nodes: Vec<_> = (0..3).map(|_| format!("127.0.0.1:{}", free_port())).collect();
    let options = RedisOptions::from_url(format!("redis+cluster://{}/", nodes.join(","))).unwrap();
    let _backend = options.tolerate_outage(true).connect().await.unwrap();
    sleep(Duration::from_secs(2)).await;
    let lines = log.lines();
    // One line per node for the first attempt, one per node for the retry, and one for the outage.
    assert!((1..=7).contains(&lines.len()), "{} lines: {:?}", lines.len(), &lines[..lines.len().min(10)]);
}

/// Collects the spans of one name, with their fields.
#[derive(Clone)]
struct Spans {
    name: &'static str,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Spans {
    fn called(name: &'static str) -> Self {
        Self { name, seen: Arc::default() }
    }
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!(" {}={value:?}", field.name());
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.name() == self.name
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields(span.metadata().name().to_owned());
        span.record(&mut fields);
        let mut spans = self.seen.lock().unwrap();
        spans.push(fields.0);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        let mut fields = Fields(String::new());
        values.record(&mut fields);
        self.seen.lock().unwrap()[span.into_u64() as usize - 1] += &fields.0;
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test(start_paused = true)]
async fn each_attempt_of_a_job_has_a_span_with_its_number() {
    let spans = Spans::called("job");
    let _guard = tracing::subscriber::set_default(spans.clone());
    let queue = DelayQueue::<u32>::new(MemoryBackend::new(), "mail");
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    queue.push(1).id("welcome:42").header("traceparent", parent).await.unwrap();
    let service = service_fn(async |job: Job<u32>| if job.attempt() == 1 { Err("not today") } else { Ok(()) });
    let worker = DelayQueueWorker::new(queue, service);
    worker.run_until(tokio::time::sleep(Duration::from_secs(60))).await.unwrap();
    let links = "link.trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\" link.span_id=\"00f067aa0ba902b7\"";
    let expected = [1, 2].map(|attempt| format!("job queue=\"mail\" id=welcome:42 attempt={attempt} {links}"));
    assert_eq!(*spans.seen.lock().unwrap(), expected);
}

/// Results in a call that hangs until the end are as lost as results that wait for a call.
#[tokio::test(start_paused = true)]
async fn ending_worker_logs_unacknowledged_jobs() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let queue = DelayQueue::<u32>::new(store, "mail");
    queue.push(1).await.unwrap();
    let service = service_fn(async |_: Job<u32>| {
        sleep(Duration::from_secs(2)).await;
        Ok::<_, BoxError>(())
    });
    let worker = DelayQueueWorker::new(queue, service);
    let shut_down = async {
        sleep(Duration::from_secs(1)).await;
        faults.hang();
    };
    worker.run_until(shut_down).await.unwrap();
    let expected = [
        "WARN the store fails: the worker retries until it works",
        "WARN job results could not be recorded: the jobs may run again",
    ];
    assert_eq!(log.lines(), expected);
}

/// Runs jobs that fail for good. Half of them are refused by the handler, and the others have no attempt left.
fn failing(queue: DelayQueue<u32>) -> impl Future<Output = ()> {
    let service = service_fn(async |job: Job<u32>| {
        let error: BoxError =
            if (*job).is_multiple_of(2) { Outcome::dead("no such address").into() } else { "not today".into() };
        Err::<(), _>(error)
    });
    let worker = DelayQueueWorker::new(queue, service);
    async { worker.run_until(sleep(Duration::from_secs(1))).await.unwrap() }
}

#[tokio::test(start_paused = true)]
async fn dead_job_logs_one_warning() {
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let (backend, second) = (MemoryBackend::new(), Duration::from_secs(1));
    let queue = DelayQueue::<u32>::new(backend.clone(), "mail");
    queue.push(0).id("a").await.unwrap();
    queue.push(1).id("b").max_attempts(1).await.unwrap();
    failing(queue.clone()).await;
    let dead = "WARN a job is dead: it will not be tried again";
    let expected = [
        format!(r#"{dead} queue=mail job=a attempts=1 reason=Refused error="no such address""#),
        format!(r#"{dead} queue=mail job=b attempts=1 reason=Failed error="not today""#),
    ];
    assert_eq!(log.lines(), expected);
    // A job that cannot be decoded, and a job whose worker has died.
    let texts = DelayQueue::<String>::new(backend, "mail");
    texts.push("not a number".to_owned()).id("c").await.unwrap();
    failing(queue.clone()).await;
    let lines = log.lines();
    assert!(
        lines[0].starts_with(&format!("{dead} queue=mail job=c attempts=1 reason=Undecodable error=")),
        "{lines:?}"
    );
    assert_eq!(lines.len(), 1);
    queue.push(2).id("d").max_attempts(1).await.unwrap();
    let service = || service_fn(|_: Job<u32>| pending::<Result<(), BoxError>>());
    let doomed = DelayQueueWorker::new(queue.clone(), service()).lease(second);
    timeout(second / 2, doomed.run()).await.unwrap_err();
    sleep(second).await;
    failing(queue).await;
    let ended = "WARN leases expired before their jobs finished: the workers died, stalled or lost the network queue=mail jobs=1";
    let expected = format!(
        r#"{dead} queue=mail job=d attempts=1 reason=LeaseExpired error="the lease of its last attempt expired""#
    );
    assert_eq!(log.lines(), [ended.to_owned(), expected]);
}

#[tokio::test(start_paused = true)]
async fn many_dead_jobs_are_summarized() {
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let queue = DelayQueue::<u32>::new(MemoryBackend::new(), "mail");
    let pushed = queue.push_all((0..1_000).map(|i| queue.push(i).max_attempts(1))).await;
    assert!(pushed.iter().all(Result::is_ok));
    failing(queue).await;
    let lines = log.lines();
    assert_eq!(lines.len(), 101, "{lines:?}");
    let summary = "WARN more jobs died or were cut off than are logged in a second queue=mail jobs=900";
    assert_eq!(lines[100], summary);
}

#[tokio::test(start_paused = true)]
async fn job_cut_off_by_shutdown_logs_one_warning() {
    let log = Log(Arc::default(), true, None);
    let _logging = tracing::subscriber::set_default(log.clone());
    let queue = DelayQueue::<u32>::new(MemoryBackend::new(), "mail");
    for (number, id) in ["brief", "long"].into_iter().enumerate() {
        queue.push(number as u32).id(id).await.unwrap();
    }
    let service = service_fn(async |job: Job<u32>| {
        sleep(Duration::from_secs(2 + 1_000 * u64::from(*job))).await;
        Ok::<_, BoxError>(())
    });
    let worker = DelayQueueWorker::new(queue, service).grace(Duration::from_secs(5));
    worker.run_until(sleep(Duration::from_secs(1))).await.unwrap();
    let line = "WARN a job is cut off: it did not end within the grace period of the shutdown";
    assert_eq!(log.lines(), [format!(r#"{line} queue=mail job=long attempts=1 reason="shutdown""#)]);
}

#[tokio::test(start_paused = true)]
async fn failed_recurring_push_logs_its_cause() {
    struct Never;
    impl Codec<u8> for Never {
        fn encode(&self, _: &u8) -> Result<Vec<u8>, BoxError> {
            Err("a payload without a name".into())
        }
        fn decode(&self, _: &[u8]) -> Result<u8, BoxError> {
            Err("never".into())
        }
    }
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let queue = DelayQueue::with_codec(MemoryBackend::new(), "mail", Never);
    let hourly = Schedule::cron("hourly", "0 * * * *").unwrap();
    Recurring::new(queue, hourly.clone(), |_| 7).run_until(sleep(Duration::from_secs(1))).await;
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let queue = DelayQueue::new(store, "mail");
    Recurring::new(queue, hourly, |_| 7).run_until(sleep(Duration::from_millis(10))).await;
    let lines: Vec<_> = log.take().into_iter().map(|message| (message.line, message.cause)).collect();
    let expected = [
        ("ERROR a recurring job cannot be pushed", "a payload without a name"),
        ("WARN delay queue store fails", "a fault injected by the test"),
        ("WARN a recurring job could not be pushed yet", "a fault injected by the test"),
    ];
    assert_eq!(lines, expected.map(|(line, cause)| (line.to_owned(), cause.to_owned())));
}

/// A process cannot know which jobs another process has pushed.
#[tokio::test(start_paused = true)]
async fn late_scheduler_does_not_report_missing_jobs() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    faults.fail(Failure::Unavailable);
    let queue = DelayQueue::new(backend, "mail");
    let minutely = Schedule::cron("minutely", "* * * * *").unwrap();
    let cut_off = Recurring::new(DelayQueue::new(store, "mail"), minutely.clone(), |_| 7_u8);
    let other = Recurring::new(queue.clone(), minutely, |_| 7_u8);
    let heal = async {
        sleep(Duration::from_secs(3_600)).await;
        faults.heal();
    };
    let end = || sleep(Duration::from_secs(3_610));
    tokio::join!(cut_off.run_until(end()), other.run_until(end()), heal);
    assert!(queue.counts().await.unwrap().waiting >= 60, "each time has a job");
    let lines = log.lines();
    let late: Vec<_> = lines.iter().filter(|line| line.contains("times of a schedule")).collect();
    let expected = "WARN times of a schedule were missed: they have no jobs unless another process pushed them";
    assert_eq!(late, [expected]);
}

#[tokio::test(start_paused = true)]
async fn rate_limit_store_calls_have_spans_without_keys() {
    let spans = Spans::called("rate_limit");
    let _guard = tracing::subscriber::set_default(spans.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let per_hour = |name| Policy::new(name, Quota::per_hour(1).fixed_window());
    let one =
        RateLimitLayer::new(store.clone(), per_hour("api")).key(|user: &&'static str| *user).responder(ErrorResponder);
    let several = one.clone().and(per_hour("total"), |user: &&'static str| *user);
    let answer = service_fn(async |user: &'static str| Ok::<_, BoxError>(user));
    // A decision without waiting has no span.
    one.layer(answer).oneshot("alice").await.unwrap();
    assert!(spans.seen.lock().unwrap().is_empty());
    // An allowed request, a denied one, and a store error.
    store.faults().delay(Duration::from_millis(1));
    several.layer(answer).oneshot("bob").await.unwrap();
    one.layer(answer).oneshot("bob").await.unwrap_err();
    store.faults().fail(Failure::Unavailable);
    one.layer(answer).oneshot("carol").await.unwrap();
    let expected = [2, 1, 1].map(|descriptors| format!("rate_limit policy=\"api\" descriptors={descriptors}"));
    assert_eq!(*spans.seen.lock().unwrap(), expected);
}

/// Regression: a loss that was found at release was not logged.
#[tokio::test(start_paused = true)]
async fn a_loss_found_at_release_is_logged_once() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store.clone(), "default");
    let (locks_store, admin) = (store.clone(), tollgate::lock::LockAdmin::new(store, "default"));
    let lease = locks.lock("a").await.unwrap();
    admin.force_release("a").await.unwrap();
    log.take();
    assert_eq!(lease.release().await.unwrap(), tollgate::lock::ReleaseOutcome::Lost);
    locks.shutdown().await;
    assert_eq!(log.lines(), ["WARN lock lost"]);

    // If the connection fails, the outcome of the release is uncertain.
    let locks = Locks::new(locks_store.clone(), "default");
    let lease = locks.lock("a").await.unwrap();
    admin.force_release("a").await.unwrap();
    log.take();
    faults.fail_next(1, Failure::Unavailable);
    assert_eq!(lease.release().await.unwrap(), tollgate::lock::ReleaseOutcome::Uncertain);
    assert!(log.lines().is_empty());

    // A layer does not read the outcome of its releases.
    let admin = tollgate::lock::LockAdmin::new(locks_store.clone(), "requests");
    let layer = LockLayer::new(locks_store, "requests").key(GlobalKey).responder(ErrorResponder);
    let service = layer.layer(service_fn(async |_: ()| {
        admin.force_release(Key::GLOBAL).await.unwrap();
        Ok::<_, BoxError>(())
    }));
    service.clone().oneshot(()).await.unwrap();
    layer.shutdown().await;
    assert_eq!(log.lines(), ["WARN lock released by an administrator", "WARN lock lost"]);
}

#[tokio::test(start_paused = true)]
async fn outage_of_an_exists_filter_is_logged_once() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let filter = ExistsFilter::new(store, "users", 1_000).circuit_breaker(CircuitBreaker::new().failures(3));
    filter.rebuild(futures_util::stream::iter([Ok::<_, BoxError>(1)])).await.unwrap();
    faults.fail(Failure::Unavailable);
    for _ in 0..10 {
        filter.might_contain(1).await.unwrap_err();
    }
    faults.heal();
    for _ in 0..20 {
        advance(Duration::from_millis(100)).await;
        assert!(filter.might_contain(1).await.unwrap());
    }
    let lines = [
        "WARN exists filter store fails",
        "WARN exists filter circuit opens: only probes call the store",
        "INFO exists filter circuit closes: all calls reach the store",
        "INFO exists filter store answers again",
    ];
    assert_eq!(log.lines(), lines);
}

#[tokio::test(start_paused = true)]
async fn overfull_exists_filter_logs_one_warning() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(log.clone());
    let filter = ExistsFilter::new(MemoryBackend::new(), "users", 1_000);
    let keys = |count: u32| futures_util::stream::iter((0..count).map(Ok::<_, BoxError>));
    filter.rebuild(keys(1_000)).await.unwrap();
    assert!(filter.stats().await.unwrap().unwrap().fill_ratio > 0.5);
    // Regression: a filter within its capacity was warned of.
    assert_eq!(log.lines(), [""; 0]);
    filter.add_all(1_000..1_200_u32).await.unwrap();
    for _ in 0..3 {
        filter.stats().await.unwrap();
    }
    assert_eq!(
        log.lines(),
        ["WARN exists filter has more keys than it was built for: rebuild it with a larger capacity"]
    );
}
