//! Operations that are not HTTP requests: each runs once, whatever happens to the process that runs it.

use crate::support;

use std::error::Error;
use std::future::pending;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fmt, io};

use futures_util::future::join_all;
use support::server::RedisServer;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};
use tollgate::idempotency::store::IdempotencyStore;
use tollgate::idempotency::{
    Done, Failed, IdempotencyAdmin, IdempotencyHandle, Idempotent, OnUnknown, Operation, OperationError,
    ResponsePolicy, StoredResponse,
};
use tollgate::lock::{RunError, Segmented};
use tollgate::testing::{Failure, FaultStore, Verb};
use tollgate::{BoxError, ConfigError, LockError, Locks, MemoryBackend, Reach, RedisBackend};

// Long, because on Redis this is real time, and a busy machine must not fail the tests.
const LEASE: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(5);

type Ran = Result<Done, OperationError>;

fn operation() -> Operation {
    Operation::new("alice", "payout-7")
}

fn operations(store: impl IdempotencyStore + Send + Sync + 'static) -> Idempotent {
    Idempotent::new(store, "payouts").lease(LEASE).deadline(DEADLINE)
}

/// Pays, and returns the number of earlier payments.
async fn pay(operations: &Idempotent, paid: &AtomicU32) -> Ran {
    operations
        .run(operation(), "100 EUR", async |_| {
            Ok::<_, BoxError>(format!("paid {}", paid.fetch_add(1, Ordering::Relaxed)))
        })
        .await
}

async fn attempts(operations: &Idempotent) -> Ran {
    operations
        .run(operation(), "100 EUR", async |attempt: IdempotencyHandle| {
            Ok::<_, BoxError>(attempt.attempt().to_string())
        })
        .await
}

async fn completed_operation_is_replayed<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    // Two instances stand for two processes.
    let (here, there, paid) = (operations(store.clone()), operations(store), AtomicU32::new(0));
    let first = pay(&here, &paid).await.unwrap();
    assert_eq!((first.response(), first.is_replay()), (b"paid 0".as_slice(), false));
    for operations in [&here, &there] {
        let again = pay(operations, &paid).await.unwrap();
        assert_eq!((again.response(), again.is_replay()), (b"paid 0".as_slice(), true));
        let other = operations.run(operation(), "200 EUR", async |_| Ok::<_, BoxError>("paid")).await;
        assert!(matches!(other, Err(OperationError::Mismatch)), "{other:?}");
    }
    for other in [Operation::new("bob", "payout-7"), Operation::new("alice", "payout-8")] {
        let other = here.run(other, "100 EUR", async |_| Ok::<_, BoxError>("paid")).await.unwrap();
        assert!(!other.is_replay());
    }
    assert_eq!(paid.load(Ordering::Relaxed), 1);
}

/// Regression: two kinds of messages used the same numbers, and the second kind got the results of the first.
async fn names_separate_operations<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let paid = AtomicU32::new(0);
    // A comma in a name does not separate the name from the scope.
    for (name, scope, expected) in [
        ("payouts", "alice", "paid 0"),
        ("refunds", "alice", "paid 1"),
        ("payouts,alice", "bob", "paid 2"),
        ("payouts", "alice,bob", "paid 3"),
        ("payouts", "alice", "paid 0"),
    ] {
        let operations = Idempotent::new(store.clone(), name).deadline(DEADLINE);
        let work = async |attempt: IdempotencyHandle| {
            assert_eq!(*attempt.operation(), Operation::new((name, scope), "7"));
            Ok::<_, BoxError>(format!("paid {}", paid.fetch_add(1, Ordering::Relaxed)))
        };
        let done = operations.run(Operation::new(scope, "7"), "100 EUR", work).await.unwrap();
        assert_eq!(done.response(), expected.as_bytes(), "{name} {scope}");
    }
}

async fn slow_operation_stays_in_flight_past_its_lease<S>(store: S)
where
    S: IdempotencyStore + Clone + Send + Sync + 'static,
{
    join_all([OnUnknown::Reject, OnUnknown::Retry].map(async |on_unknown| {
        let here = operations(store.clone()).on_unknown(on_unknown);
        let there = here.clone();
        let operation = Operation::new("alice", if on_unknown == OnUnknown::Retry { "a" } else { "b" });
        let (has_begun, mut start) = mpsc::channel(1);
        let (finish, finished) = oneshot::channel::<()>();
        let slow = tokio::spawn(async move {
            let work = async |_| {
                has_begun.send(()).await.unwrap();
                finished.await.unwrap();
                Ok::<_, BoxError>("slow")
            };
            here.run(operation, "", work).await
        });
        start.recv().await.unwrap();
        for _ in 0..4 {
            sleep(LEASE).await;
            let other = there.run(operation, "", async |_| Ok::<_, BoxError>("fast")).await;
            assert!(matches!(other, Err(OperationError::InFlight { remaining }) if remaining <= LEASE), "{other:?}");
        }
        finish.send(()).unwrap();
        assert_eq!(slow.await.unwrap().unwrap().response(), b"slow");
        assert!(there.run(operation, "", async |_| Ok::<_, BoxError>("fast")).await.unwrap().is_replay());
    }))
    .await;
}

async fn failed_operation_is_attempted_again<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let operations = operations(store);
    let failed = operations.run(operation(), "100 EUR", async |_| Err::<&str, _>(BoxError::from("no money"))).await;
    assert!(matches!(&failed, Err(OperationError::Failed(error)) if error.to_string() == "no money"), "{failed:?}");
    let panicking = operations.clone();
    let work = async move |_: IdempotencyHandle| -> Result<&str, BoxError> { panic!("no money at all") };
    let task = tokio::spawn(AssertUnwindSafe(async move { panicking.run(operation(), "100 EUR", work).await }).0);
    assert!(task.await.unwrap_err().is_panic());
    operations.wait_idle().await;
    assert_eq!(attempts(&operations).await.unwrap().response(), b"3");
}

/// An error that displays another error as its own and has that error's source, as `anyhow` and `#[error(transparent)]` do.
#[derive(Debug)]
struct Transparent<E>(E);

impl<E: fmt::Display> fmt::Display for Transparent<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: Error> Error for Transparent<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Regression: a payment was made twice. The bank did not reply in time, and that error was treated like any other.
async fn unknown_outcome_is_not_attempted_again<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let no_answer = || io::Error::other(Failed::outcome_unknown("no answer"));
    let nothing = || io::Error::other(Failed::nothing_done("no connection"));
    let other = || io::Error::other("no money");
    let (no_answer_within, nothing_within) = (
        Transparent(Transparent(Failed::outcome_unknown("no answer"))),
        Transparent(Failed::nothing_done(Failed::outcome_unknown("no answer"))),
    );
    let mut unknown = Vec::new();
    for (key, policy, error, is_unknown) in [
        ("a", ResponsePolicy::SafeRetry, no_answer(), true),
        ("b", ResponsePolicy::SafeRetry, other(), false),
        ("c", ResponsePolicy::Success, no_answer(), true),
        ("d", ResponsePolicy::All, other(), true),
        ("e", ResponsePolicy::All, no_answer(), true),
        ("f", ResponsePolicy::All, nothing(), false),
        ("g", ResponsePolicy::Success, other(), false),
        ("h", ResponsePolicy::SafeRetry, io::Error::other(no_answer_within), true),
        ("i", ResponsePolicy::All, io::Error::other(nothing_within), false),
    ] {
        let operations = operations(store.clone()).response_policy(policy);
        let operation = Operation::new("alice", key);
        let failed = operations.run(operation, "", async |_| Err::<&str, _>(error)).await;
        assert!(matches!(failed, Err(OperationError::Failed(_))), "{key}: {failed:?}");
        let again = operations.run(operation, "", async |_| Ok::<_, BoxError>("done")).await;
        if is_unknown {
            assert!(matches!(again, Err(OperationError::InFlight { .. })), "{key}: {again:?}");
            unknown.push((operations, operation));
        } else {
            assert!(!again.unwrap().is_replay(), "{key}");
        }
    }
    sleep(LEASE * 2).await;
    for (operations, operation) in unknown {
        let again = operations.run(operation, "", async |_| Ok::<_, BoxError>("done")).await;
        assert!(matches!(again, Err(OperationError::OutcomeUnknown { attempt: 1 })), "{operation}: {again:?}");
    }
    let operations = operations(store).response_policy(ResponsePolicy::All);
    let panicking = operations.clone();
    let work = async move |_: IdempotencyHandle| -> Result<&str, BoxError> { panic!("no money at all") };
    let task = tokio::spawn(AssertUnwindSafe(async move { panicking.run(operation(), "100 EUR", work).await }).0);
    assert!(task.await.unwrap_err().is_panic());
    operations.wait_idle().await;
    sleep(LEASE * 2).await;
    let unknown = attempts(&operations).await;
    assert!(matches!(unknown, Err(OperationError::OutcomeUnknown { attempt: 1 })), "{unknown:?}");
}

/// Regression: a payment was made twice. The loss of a lock had dropped the work under it half way, and that error was treated like any
/// other.
#[tokio::test(start_paused = true)]
async fn lock_lost_during_the_work_is_an_unknown_outcome() {
    let locks = Locks::new(MemoryBackend::new(), "default").wait(Duration::ZERO).max_hold(Duration::from_secs(1));
    let cut = async || locks.run("account", async |_| pending::<()>().await).await.unwrap_err();
    let found_out = async || {
        let lease = locks.lock("account").await.unwrap();
        lease.lost().await;
        lease.check().unwrap_err()
    };
    let (several, segment) = (locks.lock_all(["alice", "bob"]), Segmented::new(&locks, "stock", 2).any());
    let held = locks.lock("account").await.unwrap();
    let busy = locks.lock("account").await.unwrap_err();
    drop(held);
    let errors: [(&str, BoxError, bool); 9] = [
        ("one lock", cut().await.into(), true),
        ("several", several.run(async |_| pending::<()>().await).await.unwrap_err().into(), true),
        ("a segment", segment.run(async |_| pending::<()>().await).await.unwrap_err().into(), true),
        ("checked", found_out().await.into(), true),
        ("nested", io::Error::other(cut().await).into(), true),
        ("transparent", Transparent(Transparent(cut().await)).into(), true),
        ("checked, transparent", Transparent(found_out().await).into(), true),
        ("overridden", Failed::nothing_done(cut().await).into(), false),
        ("never held", busy.into(), false),
    ];
    let operations = operations(MemoryBackend::new());
    let mut unknown = Vec::new();
    for (key, error, is_unknown) in errors {
        assert!(error.downcast_ref::<LockError>().is_none_or(|error| error.is_lost() == is_unknown), "{key}: {error}");
        let operation = Operation::new("alice", key);
        let failed = operations.run(operation, "", async |_| Err::<&str, _>(error)).await;
        assert!(matches!(failed, Err(OperationError::Failed(_))), "{key}: {failed:?}");
        let again = operations.run(operation, "", async |_| Ok::<_, BoxError>("done")).await;
        if is_unknown {
            assert!(matches!(again, Err(OperationError::InFlight { .. })), "{key}: {again:?}");
            unknown.push(operation);
        } else {
            assert!(!again.unwrap().is_replay(), "{key}");
        }
    }
    sleep(LEASE * 2).await;
    for operation in unknown {
        let again = operations.run(operation, "", async |_| Ok::<_, BoxError>("done")).await;
        assert!(matches!(again, Err(OperationError::OutcomeUnknown { attempt: 1 })), "{operation}: {again:?}");
    }

    let paid =
        operations.run(operation(), "100 EUR", async |_| locks.run("account", async |_| pending::<&str>().await).await);
    assert!(matches!(paid.await, Err(OperationError::Failed(_))));
    sleep(LEASE * 2).await;
    let again = attempts(&operations).await;
    assert!(matches!(again, Err(OperationError::OutcomeUnknown { attempt: 1 })), "{again:?}");
}

/// Regression: the first of several locks was lost during the wait for a later one. The error said that work under the locks had been
/// dropped.
#[tokio::test(start_paused = true)]
async fn work_that_never_held_all_its_locks_is_retried() {
    let backend = MemoryBackend::new();
    let locks = Locks::new(backend.clone(), "default").fair().max_hold(Duration::from_secs(2));
    let held = Locks::new(backend, "default").fair().lock("bob").await.unwrap();
    tokio::spawn(async move {
        sleep(Duration::from_secs(3)).await;
        drop(held);
    });
    let operations = operations(MemoryBackend::new());
    let start = Instant::now();
    let pay = || {
        operations.run(operation(), "100 EUR", async |_| locks.lock_all(["alice", "bob"]).run(async |_| "paid").await)
    };
    let refused = pay().await;
    let Err(OperationError::Failed(error)) = &refused else { panic!("{refused:?}") };
    assert!(error.downcast_ref::<RunError<&str>>().is_some_and(RunError::is_busy), "{error:?}");
    // The wait ends as soon as the first lock is lost.
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(2) && waited < Duration::from_millis(2_100), "{waited:?}");
    assert!(!pay().await.unwrap().is_replay());
}

/// A message that is redelivered while its first delivery is being processed.
async fn waiter_gets_the_result<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let there = operations(store.clone()).wait(LEASE * 20);
    for (key, answer, expected) in [("a", Ok("slow"), ("slow", true)), ("b", Err("no money"), ("fast", false))] {
        let (here, operation) = (operations(store.clone()), Operation::new("alice", key));
        let (has_begun, mut start) = mpsc::channel(1);
        let slow = tokio::spawn(async move {
            let work = async |_| {
                has_begun.send(()).await.unwrap();
                sleep(LEASE * 2).await;
                answer
            };
            here.run(operation, "", work).await.is_ok()
        });
        start.recv().await.unwrap();
        let done = there.run(operation, "", async |_| Ok::<_, BoxError>("fast")).await.unwrap();
        assert_eq!((done.response(), done.is_replay()), (expected.0.as_bytes(), expected.1));
        assert_eq!(slow.await.unwrap(), answer.is_ok());
    }

    let hanging = operations(store.clone());
    let (has_begun, mut start) = mpsc::channel(1);
    let hanging = tokio::spawn(async move {
        let work = async |_| {
            has_begun.send(()).await.unwrap();
            pending::<Result<&str, BoxError>>().await
        };
        hanging.run(operation(), "100 EUR", work).await
    });
    start.recv().await.unwrap();
    let start = Instant::now();
    let in_flight = attempts(&there.clone().max_waiters_in_total(0)).await;
    assert!(matches!(in_flight, Err(OperationError::InFlight { .. })), "{in_flight:?}");
    assert!(start.elapsed() < LEASE, "{:?}", start.elapsed());
    let in_flight = attempts(&there.wait(LEASE * 2)).await;
    assert!(matches!(in_flight, Err(OperationError::InFlight { .. })), "{in_flight:?}");
    assert!(start.elapsed() >= LEASE * 2, "{:?}", start.elapsed());
    hanging.abort();
}

async fn work_past_max_runtime_is_dropped<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let operations = operations(store).max_runtime(LEASE * 2);
    let start = Instant::now();
    let work = operations.run(operation(), "100 EUR", async |_| pending::<Result<&str, BoxError>>().await);
    let cancelled = timeout(LEASE * 10, work).await.expect("max_runtime ends the work");
    assert!(matches!(cancelled, Err(OperationError::Cancelled)), "{cancelled:?}");
    assert!(start.elapsed() >= LEASE * 2, "{:?}", start.elapsed());
    sleep(LEASE * 2).await;
    let unknown = attempts(&operations).await;
    assert!(matches!(unknown, Err(OperationError::OutcomeUnknown { attempt: 1 })), "{unknown:?}");
}

async fn dropped_operation_has_an_unknown_outcome<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let strict = operations(store.clone());
    let (has_charged, mut charged) = mpsc::channel(1);
    let dropped = strict.run(operation(), "100 EUR", async |attempt: IdempotencyHandle| {
        attempt.checkpoint("charged", "receipt").await.map_err(BoxError::from)?;
        has_charged.send(()).await.unwrap();
        pending::<Result<&str, BoxError>>().await
    });
    tokio::select! {
        ended = dropped => panic!("{ended:?}"),
        charged = charged.recv() => charged.unwrap(),
    }
    sleep(LEASE * 2).await;
    let unknown = attempts(&strict).await;
    assert!(matches!(unknown, Err(OperationError::OutcomeUnknown { attempt: 1 })), "{unknown:?}");
    let again = operations(store).on_unknown(OnUnknown::Retry);
    let work = async |attempt: IdempotencyHandle| {
        let last = attempt.last_checkpoint().map(|last| last.data().to_vec()).unwrap_or_default();
        Ok::<_, BoxError>([last, attempt.attempt().to_string().into()].concat())
    };
    assert_eq!(again.run(operation(), "100 EUR", work).await.unwrap().response(), b"receipt2");
    assert!(attempts(&strict).await.unwrap().is_replay());
}

async fn too_large_result_is_not_recorded<S: IdempotencyStore + Clone + Send + Sync + 'static>(store: S) {
    let operations = operations(store).max_response(6);
    let large = operations.run(operation(), "100 EUR", async |_| Ok::<_, BoxError>("seven b")).await.unwrap();
    assert_eq!(large.response(), b"seven b", "the process that ran the work gets the result");
    assert!(matches!(attempts(&operations).await, Err(OperationError::NotStored)));
    let fits = operations.run(Operation::new("alice", "b"), "", async |_| Ok::<_, BoxError>("six by")).await;
    assert!(
        fits.is_ok() && operations.run(Operation::new("alice", "b"), "", async |_| Ok::<_, BoxError>("")).await.is_ok()
    );
}

macro_rules! on_both {
    ($($claim:ident)+) => {
        mod memory {
            $(
                #[tokio::test(start_paused = true)]
                async fn $claim() {
                    super::$claim(super::MemoryBackend::new()).await;
                }
            )+
        }

        mod redis_server {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $claim() {
                    let server = super::RedisServer::start();
                    super::$claim(super::RedisBackend::connect(server.url()).await.unwrap()).await;
                    server.every_key_expires();
                }
            )+
        }
    };
}

on_both! {
    completed_operation_is_replayed
    names_separate_operations
    slow_operation_stays_in_flight_past_its_lease
    failed_operation_is_attempted_again
    unknown_outcome_is_not_attempted_again
    waiter_gets_the_result
    work_past_max_runtime_is_dropped
    dropped_operation_has_an_unknown_outcome
    too_large_result_is_not_recorded
}

#[tokio::test(start_paused = true)]
async fn store_outage_starts_nothing_and_loses_no_result() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let (operations, paid) = (operations(store), AtomicU32::new(0));
    faults.fail(Failure::Unavailable);
    for _ in 0..20 {
        let failed = pay(&operations, &paid).await;
        assert!(matches!(&failed, Err(OperationError::Store(error)) if error.is_unavailable()), "{failed:?}");
    }
    assert_eq!(faults.calls(Verb::Begin), 5, "the circuit is open");
    faults.heal();
    sleep(Duration::from_secs(2)).await;
    assert_eq!(paid.load(Ordering::Relaxed), 0);

    let work = async |_| {
        faults.fail(Failure::Unavailable);
        Ok::<_, BoxError>("paid")
    };
    assert_eq!(operations.run(operation(), "100 EUR", work).await.unwrap().response(), b"paid");
    faults.heal();
    operations.wait_idle().await;
    assert_eq!(pay(&operations, &paid).await.unwrap().response(), b"paid");
}

#[tokio::test(start_paused = true)]
async fn work_is_dropped_before_another_process_takes_over() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let operations = operations(store).deadline(Duration::from_millis(100)).on_unknown(OnUnknown::Retry);
    let kept = Arc::new(());
    let held = Arc::clone(&kept);
    let work = async move |_| {
        let _held = held;
        faults.hang();
        pending::<Result<&str, BoxError>>().await
    };
    let start = Instant::now();
    let cancelled = operations.run(operation(), "100 EUR", work);
    let cancelled = timeout(LEASE * 2, cancelled).await.expect("the end of the lease ends the work");
    assert!(matches!(cancelled, Err(OperationError::Cancelled)), "{cancelled:?}");
    assert!(start.elapsed() < LEASE, "{:?}", start.elapsed());
    assert_eq!(Arc::strong_count(&kept), 1, "the work is dropped");
}

#[tokio::test(start_paused = true)]
async fn claim_granted_too_late_starts_no_work() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, paid) = (store.faults(), AtomicU32::new(0));
    let operations = operations(store).lease(Duration::from_millis(50)).on_unknown(OnUnknown::Retry);
    faults.delay(Duration::from_millis(60));
    let late = pay(&operations, &paid).await;
    assert!(matches!(&late, Err(OperationError::Store(error)) if error.is_timeout()), "{late:?}");
    operations.wait_idle().await;
    faults.heal();
    assert_eq!(pay(&operations, &paid).await.unwrap().response(), b"paid 0");
}

#[tokio::test(start_paused = true)]
async fn result_set_by_an_operator_is_replayed() {
    let backend = MemoryBackend::new();
    let operations = operations(backend.clone());
    let dropped = operations.run(operation(), "100 EUR", async |_| pending::<Result<&str, BoxError>>().await);
    assert!(timeout(LEASE / 2, dropped).await.is_err());
    sleep(LEASE * 2).await;
    let admin = IdempotencyAdmin::new(backend);
    let known = Operation::new(("payouts", "alice"), "payout-7");
    let unknown = admin.inspect(&known).await.unwrap().unwrap();
    assert!(admin.complete(&unknown, StoredResponse::of_operation("paid")).await.unwrap());
    let done = attempts(&operations).await.unwrap();
    assert_eq!((done.response(), done.is_replay()), (b"paid".as_slice(), true));

    // An operator completes the operation with an HTTP response by mistake. The error shows it.
    let complete = async |answer: StoredResponse| {
        let done = admin.inspect(&known).await.unwrap().unwrap();
        assert!(admin.complete(&done, answer).await.unwrap());
        attempts(&operations).await
    };
    let response = complete(http::Response::new("paid").into()).await;
    assert!(matches!(&response, Err(OperationError::Store(error)) if error.is_foreign_data()), "{response:?}");
    let unkept = complete(StoredResponse::not_stored()).await;
    assert!(matches!(unkept, Err(OperationError::NotStored)), "{unkept:?}");
    assert_eq!(complete(StoredResponse::of_operation("")).await.unwrap().response(), b"");
}

/// The source chain has the error of the work with its type, and no text appears twice.
#[test]
fn error_of_the_work_is_in_the_source_chain() {
    let failed = OperationError::Failed(Failed::outcome_unknown(io::Error::from(io::ErrorKind::TimedOut)).into());
    let (mut chain, mut texts) = (Vec::new(), Vec::new());
    let mut next = Some(&failed as &(dyn Error + 'static));
    while let Some(error) = next {
        chain.push(error);
        texts.push(error.to_string());
        next = error.source();
    }
    assert!(chain.iter().any(|error| error.is::<io::Error>()), "{texts:?}");
    let count = texts.len();
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), count, "{texts:?}");
}

#[test]
fn require_rejects_memory_for_the_reach_of_redis() {
    let refused = operations(MemoryBackend::new()).require(Reach::Redis);
    assert!(matches!(refused, Err(ConfigError::ReachTooSmall { .. })), "{refused:?}");
    assert!(operations(MemoryBackend::new()).require(Reach::Process).is_ok());
}

/// Regression: a zero duration was detected only on Redis, where every call exceeds it.
#[tokio::test]
async fn zero_duration_is_rejected_on_any_backend() {
    let zero = Duration::ZERO;
    let operations = operations(MemoryBackend::new());
    for (operations, named) in
        [(operations.clone().deadline(zero), "deadline"), (operations.max_runtime(zero), "max_runtime")]
    {
        let refused = attempts(&operations).await;
        let setting = match refused {
            Err(OperationError::Config(ConfigError::ZeroTimeout { setting })) => Some(setting),
            _ => None,
        };
        assert_eq!(setting, Some(named));
    }
}
