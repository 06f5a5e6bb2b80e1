//! The contract tests of [`IdempotencyRegistry`]: each function tests one requirement.
//! [`idempotency_registry_contract!`](crate::idempotency_registry_contract) runs them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::error::StoreError;
use crate::idempotency::store::{Begun, BodyFingerprint, Claim, Completion, Digest, IdempotencyRegistry, Token};
use crate::idempotency::{
    Checkpoint, Cursor, IdempotencyAdmin, Operation, OperationPage, OperationState, OperationStatus, StoredResponse,
};

/// A lease that does not end during a test, even on a slow machine.
const LONG: Duration = Duration::from_secs(60);
/// A lease that ends soon.
const SHORT: Duration = Duration::from_millis(20);

fn claim(lease: Duration) -> Claim {
    let (token, head) = (Token::random().unwrap(), Digest([7; 16]));
    Claim { token, head, lease, retention: LONG, takes_over: false, bound: None }
}

fn operation() -> Operation {
    Operation::new(("ali:ce", "POST", "/pay:now"), "k:1")
}

async fn take<S: IdempotencyRegistry>(store: &S, claim: &Claim) -> (u64, u32) {
    match store.begin(&operation(), claim).await.unwrap() {
        Begun::Granted { fence, attempt, body_fingerprint, checkpoint } => {
            assert_eq!((body_fingerprint, checkpoint), (BodyFingerprint::default(), None));
            (fence, attempt)
        }
        begun => panic!("{begun:?}"),
    }
}

async fn inspect<S: IdempotencyRegistry + Clone + Sync>(store: &S) -> OperationStatus {
    let status = IdempotencyAdmin::new(store.clone()).inspect(&operation()).await.unwrap().unwrap();
    assert_eq!(status.operation, operation());
    status
}

fn completion(is_kept: bool) -> Completion {
    Completion { response: (*b"x").into(), is_kept, body_fingerprint: BodyFingerprint::default(), retention: LONG }
}

fn is_about(duration: Duration, expected: Duration) -> bool {
    duration <= expected && duration + Duration::from_secs(20) > expected
}

/// An operator can see an operation in each of its states.
pub async fn every_state_can_be_inspected<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone()).deadline(Duration::from_secs(10));
    assert_eq!(admin.inspect(&operation()).await.unwrap(), None);

    let first = claim(LONG);
    let (fence, _) = take(&store, &first).await;
    let status = inspect(&store).await;
    assert!(matches!(status.state, OperationState::InFlight { remaining } if is_about(remaining, LONG)), "{status:?}");
    assert!(is_about(status.kept_for, LONG * 2), "{status:?}");
    assert_eq!((status.fence, status.attempts, status.checkpoint), (fence, 1, None));

    // Released with a checkpoint, then begun again and lost.
    let note = Checkpoint::new(1, "charged", b"data").unwrap();
    assert!(store.checkpoint(&operation(), &first, &BodyFingerprint::default(), &note).await.unwrap());
    assert!(store.release(&operation(), &first).await.unwrap());
    let status = inspect(&store).await;
    assert_eq!((status.state, status.attempts, status.checkpoint), (OperationState::Free, 1, Some(note.clone())));
    let second = claim(SHORT);
    let begun = store.begin(&operation(), &second).await.unwrap();
    assert!(matches!(begun, Begun::Granted { attempt: 2, .. }), "{begun:?}");
    sleep(SHORT * 3).await;
    let status = inspect(&store).await;
    assert!(matches!(status.state, OperationState::Unknown { since } if since > SHORT), "{status:?}");
    assert!(status.fence > fence, "{status:?}");
    assert_eq!((status.attempts, status.checkpoint), (2, Some(note)));

    assert!(store.complete(&operation(), &second.token, &completion(false)).await.unwrap());
    let done = inspect(&store).await;
    assert_eq!((done.state, done.fence), (OperationState::Completed { is_kept: false }, status.fence));
    assert!(is_about(done.kept_for, LONG) && done.checkpoint.is_none(), "{done:?}");
}

/// The record has a mark for a takeover. The mark is not a checkpoint.
pub async fn takeover_mark_is_not_a_checkpoint<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    take(&store, &claim(SHORT)).await;
    sleep(SHORT * 3).await;
    let second = Claim { takes_over: true, ..claim(LONG) };
    take(&store, &second).await;
    for _ in 0..2 {
        assert_eq!((inspect(&store).await.attempts, inspect(&store).await.checkpoint), (2, None));
        assert!(store.release(&operation(), &second).await.unwrap());
    }
    // After that, the operation is not bound to the request any more.
    let status = inspect(&store).await;
    assert!(store.forget(&status).await.unwrap());
    assert_eq!(take(&store, &Claim { head: Digest([8; 16]), ..claim(LONG) }).await.1, 3);
}

/// Whatever the state was, the next request begins a forgotten operation, with a larger fence. The previous attempt can change nothing.
pub async fn forgotten_operation_begins_again<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone());
    let mut last = (0, 0);
    for round in 0..4 {
        let claim = Claim { head: Digest([round; 16]), ..claim(if round == 1 { SHORT } else { LONG }) };
        let begun = take(&store, &claim).await;
        assert!(begun.0 > last.0 && begun.1 == last.1 + 1, "{begun:?} after {last:?}");
        last = begun;
        match round {
            0 => {}
            1 => sleep(SHORT * 3).await,
            _ => assert!(store.complete(&operation(), &claim.token, &completion(round == 2)).await.unwrap()),
        }
        let status = inspect(&store).await;
        for _ in 0..2 {
            assert!(admin.forget(&status).await.unwrap(), "{status:?}");
        }
        let free = inspect(&store).await;
        assert_eq!((free.state, free.fence, free.attempts), (OperationState::Free, last.0, last.1));
        assert!(is_about(free.kept_for, Duration::from_secs(600)), "{free:?}");
        assert!(!store.renew(&operation(), &claim, &BodyFingerprint::default()).await.unwrap());
        assert!(!store.complete(&operation(), &claim.token, &completion(true)).await.unwrap());
    }
}

/// If an operation has changed since an operator inspected it, the operator's call does nothing.
pub async fn changed_operation_is_left_alone<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone());
    let first = claim(SHORT);
    take(&store, &first).await;
    sleep(SHORT * 3).await;
    let unknown = inspect(&store).await;

    // The process of the attempt was silent, and renews the lease.
    let long = Claim { lease: LONG, ..first };
    assert!(store.renew(&operation(), &long, &BodyFingerprint::default()).await.unwrap());
    assert!(!admin.forget(&unknown).await.unwrap());
    let in_flight = inspect(&store).await;
    assert!(matches!(in_flight.state, OperationState::InFlight { .. }), "{in_flight:?}");

    assert!(store.complete(&operation(), &first.token, &completion(true)).await.unwrap());
    let done = inspect(&store).await;
    for before in [&unknown, &in_flight] {
        assert!(!admin.forget(before).await.unwrap());
    }
    let other = OperationStatus { state: OperationState::Completed { is_kept: false }, ..done.clone() };
    assert!(!admin.forget(&other).await.unwrap());
    assert!(matches!(inspect(&store).await.state, OperationState::Completed { is_kept: true }));

    // The next execution has the same states, with another fence.
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

fn answer(text: &str) -> StoredResponse {
    StoredResponse::of_operation(text)
}

/// Begins the operation, stores a checkpoint with the fingerprint of the body, and lets the lease end.
async fn lose<S: IdempotencyRegistry + Clone + Sync>(store: &S) -> (Claim, BodyFingerprint, OperationStatus) {
    let (claim, body) = (claim(SHORT), BodyFingerprint { len: 3, is_whole: Some(true), digest: Digest([9; 16]) });
    take(store, &claim).await;
    let note = Checkpoint::new(1, "charged", b"data").unwrap();
    assert!(store.checkpoint(&operation(), &claim, &body, &note).await.unwrap());
    sleep(SHORT * 3).await;
    (claim, body, inspect(store).await)
}

/// An operator can complete an operation of unknown outcome with a response. The next request gets the response, and the original attempt
/// can change nothing.
pub async fn unknown_operation_can_be_completed<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone()).retention(LONG * 3);
    let (first, body_fingerprint, unknown) = lose(&store).await;
    for _ in 0..2 {
        assert!(admin.complete(&unknown, answer("charged")).await.unwrap());
    }
    assert!(!admin.complete(&unknown, answer("not charged")).await.unwrap(), "it is already completed");
    assert!(!admin.complete(&unknown, StoredResponse::not_stored()).await.unwrap());
    let done = inspect(&store).await;
    assert_eq!(done.state, OperationState::Completed { is_kept: true });
    assert_eq!((done.fence, done.attempts, done.checkpoint.as_ref()), (unknown.fence, 1, None));
    assert!(is_about(done.kept_for, LONG * 3), "{done:?}");

    // The original attempt continues, and can change nothing.
    assert!(!store.renew(&operation(), &first, &body_fingerprint).await.unwrap());
    assert!(!store.complete(&operation(), &first.token, &completion(true)).await.unwrap());
    assert!(!store.release(&operation(), &first).await.unwrap());
    let expected =
        Begun::Completed { body_fingerprint, response: Arc::clone(answer("charged").bytes()), is_kept: true };
    for takes_over in [false, true] {
        let same = Claim { takes_over, ..claim(LONG) };
        assert_eq!(store.begin(&operation(), &same).await.unwrap(), expected, "the fingerprint of the request stays");
        let other = Claim { head: Digest([8; 16]), ..same };
        assert_eq!(store.begin(&operation(), &other).await.unwrap(), Begun::Mismatch);
    }

    // The operator was wrong.
    assert!(admin.forget(&done).await.unwrap());
    let (_, _, unknown) = lose(&store).await;
    assert!(admin.complete(&unknown, StoredResponse::not_stored()).await.unwrap());
    assert_eq!(inspect(&store).await.state, OperationState::Completed { is_kept: false });
}

/// If an operation was completed with a wrong response by an operator, the operator can replace it. The record must not have changed since
/// the inspection. The next request gets the new response.
pub async fn manual_completion_can_be_replaced<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone()).retention(LONG * 3);
    let (first, body_fingerprint, unknown) = lose(&store).await;
    assert!(admin.complete(&unknown, answer("a longer answer")).await.unwrap());
    let wrong = inspect(&store).await;
    let later = IdempotencyAdmin::new(store.clone()).retention(LONG * 6);
    for _ in 0..2 {
        assert!(later.complete(&wrong, answer("charged")).await.unwrap());
    }
    let begun = store.begin(&operation(), &claim(LONG)).await.unwrap();
    assert_eq!(
        begun,
        Begun::Completed { body_fingerprint, response: Arc::clone(answer("charged").bytes()), is_kept: true }
    );
    let done = inspect(&store).await;
    assert_eq!((done.state, done.fence, done.attempts), (wrong.state, unknown.fence, 1));
    assert!(is_about(done.kept_for, LONG * 6), "{done:?}");
    assert!(!store.complete(&operation(), &first.token, &completion(true)).await.unwrap());

    assert!(later.complete(&done, StoredResponse::not_stored()).await.unwrap());
    let unkept = inspect(&store).await;
    assert_eq!(unkept.state, OperationState::Completed { is_kept: false });
    assert!(!later.complete(&done, answer("x")).await.unwrap(), "the record has changed");
    assert!(later.complete(&unkept, answer("x")).await.unwrap());
    let last = inspect(&store).await;
    assert!(admin.forget(&last).await.unwrap());
    assert!(!later.complete(&last, answer("y")).await.unwrap());
    lose(&store).await;
    assert!(!later.complete(&last, answer("y")).await.unwrap(), "the status is of the previous attempt");
}

/// An operator cannot complete an operation in another state, or with the status of another state.
pub async fn only_unknown_operations_can_be_completed<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone());
    let complete = async |status: &OperationStatus| admin.complete(status, answer("charged")).await.unwrap();
    let (first, body_fingerprint, unknown) = lose(&store).await;
    let never = OperationStatus { operation: Operation::new("alice", "never"), ..unknown.clone() };
    assert!(!complete(&never).await && admin.inspect(&never.operation).await.unwrap().is_none());

    // The process of the attempt was silent, and renews the lease.
    assert!(store.renew(&operation(), &Claim { lease: LONG, ..first }, &body_fingerprint).await.unwrap());
    let in_flight = inspect(&store).await;
    assert!(!complete(&unknown).await && !complete(&in_flight).await);
    assert_eq!(inspect(&store).await.checkpoint, in_flight.checkpoint);
    assert!(store.renew(&operation(), &first, &body_fingerprint).await.unwrap());
    sleep(SHORT * 3).await;
    assert!(!complete(&in_flight).await, "the status does not say that the outcome is unknown");

    // Another attempt, also of unknown outcome.
    let second = Claim { takes_over: true, ..claim(SHORT) };
    let begun = store.begin(&operation(), &second).await.unwrap();
    assert!(matches!(begun, Begun::Granted { attempt: 2, .. }), "{begun:?}");
    sleep(SHORT * 3).await;
    assert!(!complete(&unknown).await, "the status is of the first attempt");
    let unknown = inspect(&store).await;

    assert!(store.complete(&operation(), &second.token, &completion(true)).await.unwrap());
    let done = inspect(&store).await;
    assert!(!complete(&unknown).await && !complete(&done).await);
    assert!(!admin.complete(&unknown, answer("x")).await.unwrap(), "the response of the handler stays");
    let free = {
        assert!(admin.forget(&done).await.unwrap());
        inspect(&store).await
    };
    assert!(!complete(&unknown).await && !complete(&free).await);
    assert_eq!(inspect(&store).await.state, OperationState::Free);
}

/// All operations of a list, in any order and without duplicates.
async fn all(list: impl AsyncFn(Cursor) -> Result<OperationPage, StoreError>) -> HashMap<String, OperationState> {
    let (mut found, mut next, mut pages) = (HashMap::new(), Some(Cursor::default()), 0);
    while let Some(from) = next {
        let page = list(from).await.unwrap();
        found.extend(page.operations.into_iter().map(|status| (status.operation.to_string(), status.state)));
        next = page.next;
        pages += 1;
        assert!(pages < 3_000, "the list does not end");
    }
    found
}

/// A list contains every operation of a scope, or of all scopes, page by page, and no other.
pub async fn operations_are_listed<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    let admin = IdempotencyAdmin::new(store.clone()).scope("orders").deadline(Duration::from_secs(10));
    let odd = ["", "a b", "x:y", "*", "[a]", "}{", "\\", "ä", &"long".repeat(100)];
    let numbers: Vec<_> = (0..200).map(|number| number.to_string()).collect();
    let mut expected = Vec::new();
    for key in odd.into_iter().chain(numbers.iter().map(String::as_str)) {
        let operation = Operation::new("orders", key);
        store.begin(&operation, &claim(LONG)).await.unwrap();
        expected.push(operation.to_string());
    }
    expected.sort();
    for scope in ["order", "orders:x", "orders*", "o?ders"] {
        store.begin(&Operation::new(scope, "a"), &claim(LONG)).await.unwrap();
    }
    for max in [1, 7, 1_000] {
        let found = all(async |from| admin.list(from, max).await).await;
        let mut names: Vec<_> = found.into_keys().collect();
        names.sort();
        assert_eq!(names, expected, "{max} at a time");
    }
    let past = Cursor { part: u32::MAX, position: 0 };
    assert_eq!(admin.list(past, 10).await.unwrap(), OperationPage { operations: Vec::new(), next: None });
    // A scope that looks like a pattern matches only itself.
    let pattern = IdempotencyAdmin::new(store.clone()).scope("o?ders");
    let found = all(async |from| pattern.list(from, 100).await).await;
    assert_eq!(found.into_keys().collect::<Vec<_>>(), ["o?ders:a"]);

    // One operation of unknown outcome, among those of all scopes.
    let all_scopes = IdempotencyAdmin::new(store.clone());
    let (_, _, unknown) = lose(&store).await;
    let found = all(async |from| all_scopes.list(from, 100).await).await;
    assert_eq!(found.len(), expected.len() + 5);
    let found = all(async |from| all_scopes.unknown(from, 100).await).await;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&unknown.operation.to_string()]);
    assert!(all(async |from| admin.unknown(from, 100).await).await.is_empty());
    assert!(all_scopes.complete(&unknown, answer("charged")).await.unwrap());
    assert!(all(async |from| all_scopes.unknown(from, 100).await).await.is_empty());
}

/// A watcher gets a notification when an operator forgets or completes the operation.
pub async fn waiter_is_notified_of_a_manual_change<S: IdempotencyRegistry + Clone + Sync>(store: S) {
    take(&store, &claim(LONG)).await;
    let mut notifications = store.watch(&operation()).await;
    // A precautionary notification may arrive now.
    while timeout(Duration::from_millis(300), notifications.next()).await.is_ok() {}
    assert!(store.forget(&inspect(&store).await).await.unwrap());
    timeout(Duration::from_secs(10), notifications.next()).await.expect("a notification");
    let (_, _, unknown) = lose(&store).await;
    while timeout(Duration::from_millis(300), notifications.next()).await.is_ok() {}
    assert!(store.complete_unknown(&unknown, &answer("x"), LONG).await.unwrap());
    timeout(Duration::from_secs(10), notifications.next()).await.expect("a notification");
}
