//! What those who run services see of operations and do to them, on memory and on Redis.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::time::Duration;

use support::server::RedisServer;
use tokio::time::{sleep, timeout};
use tollgate::idempotency::{
    Begun, Checkpoint, Claim, Completion, Digest, IdempotencyAdmin, IdempotencyRegistry, Operation, OperationState,
    OperationStatus, Payload,
};
use tollgate::lock::Token;
use tollgate::{MemoryBackend, RedisBackend};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

fn claim(lease: Duration) -> Claim {
    let (token, head) = (Token::random().unwrap(), Digest([7; 16]));
    Claim { token, head, lease, retention: LONG, takes_over: false }
}

fn operation() -> Operation {
    Operation::new(("ali:ce", "POST", "/pay:now"), "k:1")
}

async fn take<S: IdempotencyRegistry>(store: &S, claim: &Claim) -> (u64, u32) {
    match store.begin(&operation(), claim).await.unwrap() {
        Begun::Granted { fence, attempt, payload, checkpoint } => {
            assert_eq!((payload, checkpoint), (Payload::default(), None));
            (fence, attempt)
        }
        begun => panic!("{begun:?}"),
    }
}

async fn look<S: IdempotencyRegistry + Clone + Sync>(store: &S) -> OperationStatus {
    let status = IdempotencyAdmin::new(store.clone()).inspect(&operation()).await.unwrap().unwrap();
    assert_eq!(status.operation, operation());
    status
}

fn completion(is_kept: bool) -> Completion {
    Completion { answer: (*b"x").into(), is_kept, payload: Payload::default(), retention: LONG }
}

fn is_about(duration: Duration, expected: Duration) -> bool {
    duration <= expected && duration + Duration::from_secs(20) > expected
}

async fn each_state_can_be_seen<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone()).deadline(Duration::from_secs(10));
    assert_eq!(admin.inspect(&operation()).await.unwrap(), None);

    let first = claim(LONG);
    let (fence, _) = take(&store, &first).await;
    let status = look(&store).await;
    assert!(matches!(status.state, OperationState::InFlight { remaining } if is_about(remaining, LONG)), "{status:?}");
    assert!(is_about(status.kept_for, LONG * 2), "{status:?}");
    assert_eq!((status.fence, status.attempts, status.checkpoint), (fence, 1, None));

    // Given back with what was put down, and taken up and lost.
    let note = Checkpoint::new(1, "charged", b"data").unwrap();
    assert!(store.checkpoint(&operation(), &first, &Payload::default(), &note).await.unwrap());
    assert!(store.release(&operation(), &first.token).await.unwrap());
    let status = look(&store).await;
    assert_eq!((status.state, status.attempts, status.checkpoint), (OperationState::Free, 1, Some(note.clone())));
    let second = claim(SHORT);
    let begun = store.begin(&operation(), &second).await.unwrap();
    assert!(matches!(begun, Begun::Granted { attempt: 2, .. }), "{begun:?}");
    sleep(SHORT * 3).await;
    let status = look(&store).await;
    assert!(matches!(status.state, OperationState::Unknown { since } if since > SHORT), "{status:?}");
    assert!(status.fence > fence, "{status:?}");
    assert_eq!((status.attempts, status.checkpoint), (2, Some(note)));

    assert!(store.complete(&operation(), &second.token, &completion(false)).await.unwrap());
    let done = look(&store).await;
    assert_eq!((done.state, done.fence), (OperationState::Completed { is_kept: false }, status.fence));
    assert!(is_about(done.kept_for, LONG) && done.checkpoint.is_none(), "{done:?}");
}

/// What was taken over is told apart in the record, and that is nothing that anybody has put down.
async fn what_was_taken_over_has_no_checkpoint<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    take(&store, &claim(SHORT)).await;
    sleep(SHORT * 3).await;
    let second = Claim { takes_over: true, ..claim(LONG) };
    take(&store, &second).await;
    for _ in 0..2 {
        assert_eq!((look(&store).await.attempts, look(&store).await.checkpoint), (2, None));
        assert!(store.release(&operation(), &second.token).await.unwrap());
    }
    // It is not the same request's any more.
    let status = look(&store).await;
    assert!(store.forget(&status).await.unwrap());
    assert_eq!(take(&store, &Claim { head: Digest([8; 16]), ..claim(LONG) }).await.1, 3);
}

/// Whatever it is, the next request begins it, with a larger fence, and whoever did it before changes nothing.
async fn what_is_forgotten_is_begun_anew<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone());
    let mut last = (0, 0);
    for turn in 0..4 {
        let claim = Claim { head: Digest([turn; 16]), ..claim(if turn == 1 { SHORT } else { LONG }) };
        let begun = take(&store, &claim).await;
        assert!(begun.0 > last.0 && begun.1 == last.1 + 1, "{begun:?} after {last:?}");
        last = begun;
        match turn {
            0 => {}
            1 => sleep(SHORT * 3).await,
            _ => assert!(store.complete(&operation(), &claim.token, &completion(turn == 2)).await.unwrap()),
        }
        let status = look(&store).await;
        for _ in 0..2 {
            assert!(admin.forget(&status).await.unwrap(), "{status:?}");
        }
        let free = look(&store).await;
        assert_eq!((free.state, free.fence, free.attempts), (OperationState::Free, last.0, last.1));
        assert!(is_about(free.kept_for, Duration::from_secs(600)), "{free:?}");
        assert!(!store.renew(&operation(), &claim, &Payload::default()).await.unwrap());
        assert!(!store.complete(&operation(), &claim.token, &completion(true)).await.unwrap());
    }
}

/// The story of an operation that was looked at, and was gone on with before somebody had made up their mind.
async fn what_is_not_as_it_was_found_is_left_alone<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone());
    let first = claim(SHORT);
    take(&store, &first).await;
    sleep(SHORT * 3).await;
    let unknown = look(&store).await;

    // Its process was silent, and is heard of again.
    let long = Claim { lease: LONG, ..first };
    assert!(store.renew(&operation(), &long, &Payload::default()).await.unwrap());
    assert!(!admin.forget(&unknown).await.unwrap());
    let in_flight = look(&store).await;
    assert!(matches!(in_flight.state, OperationState::InFlight { .. }), "{in_flight:?}");

    assert!(store.complete(&operation(), &first.token, &completion(true)).await.unwrap());
    let done = look(&store).await;
    for before in [&unknown, &in_flight] {
        assert!(!admin.forget(before).await.unwrap());
    }
    let other = OperationStatus { state: OperationState::Completed { is_kept: false }, ..done.clone() };
    assert!(!admin.forget(&other).await.unwrap());
    assert!(matches!(look(&store).await.state, OperationState::Completed { is_kept: true }));

    // Begun anew, it is in the same states by another fence.
    assert!(admin.forget(&done).await.unwrap());
    let second = claim(LONG);
    take(&store, &second).await;
    for before in [&unknown, &in_flight, &done] {
        assert!(!admin.forget(before).await.unwrap());
    }
    assert!(store.complete(&operation(), &second.token, &completion(true)).await.unwrap());
    assert!(!admin.forget(&done).await.unwrap());

    let never = OperationStatus { operation: Operation::new("alice", "never"), ..done };
    assert!(!admin.forget(&never).await.unwrap());
}

async fn whoever_waits_is_told<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    take(&store, &claim(LONG)).await;
    let mut wakeups = store.watch(&operation()).await;
    // One that comes because something may have been missed may come now.
    while timeout(Duration::from_millis(300), wakeups.next()).await.is_ok() {}
    assert!(store.forget(&look(&store).await).await.unwrap());
    timeout(Duration::from_secs(10), wakeups.next()).await.expect("whoever waits is told");
}

macro_rules! on_each_backend {
    ($($claim:ident)+) => {
        mod memory {
            use super::*;

            $(
                #[tokio::test(start_paused = true)]
                async fn $claim() {
                    super::$claim(MemoryBackend::new()).await;
                }
            )+
        }

        mod redis_server {
            use super::*;

            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $claim() {
                    let server = RedisServer::start();
                    super::$claim(RedisBackend::connect(server.url()).await.unwrap()).await;
                    assert!(server.query::<u64>("DBSIZE") > 0);
                    server.every_key_expires();
                }
            )+
        }

        mod any {

            $(
                #[tokio::test(start_paused = true)]
                async fn $claim() {
                    super::$claim(tollgate::connect("memory:").await.unwrap()).await;
                }
            )+
        }
    };
}

on_each_backend! {
    each_state_can_be_seen
    what_was_taken_over_has_no_checkpoint
    what_is_forgotten_is_begun_anew
    what_is_not_as_it_was_found_is_left_alone
    whoever_waits_is_told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_wrote_is_an_error_and_stays_as_it_is() {
    let server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    let operation = Operation::new("alice", "k");
    let status = OperationStatus {
        operation,
        state: OperationState::Free,
        fence: 0,
        attempts: 0,
        checkpoint: None,
        kept_for: Duration::ZERO,
    };
    for value in ["hello", ""] {
        let key = "tollgate:2:{idempotency:alice:k}:record";
        let _: () = redis::cmd("SET").arg(key).arg(value).query(&mut server.connection()).unwrap();
        let admin = IdempotencyAdmin::new(backend.clone());
        assert!(admin.inspect(&operation).await.unwrap_err().is_foreign_data());
        assert!(admin.forget(&status).await.unwrap_err().is_foreign_data());
        let still: String = server.query(&format!("GET {key}"));
        assert_eq!(still, value);
    }
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_not_waited_for() {
    let server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    take(&backend, &claim(LONG)).await;
    let status = look(&backend).await;
    let admin = IdempotencyAdmin::new(backend).deadline(Duration::from_millis(200));
    server.pause();
    assert!(admin.inspect(&operation()).await.unwrap_err().is_timeout());
    assert!(admin.forget(&status).await.unwrap_err().is_timeout());
    server.resume();
}
