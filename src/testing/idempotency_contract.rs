//! The contract tests of [`IdempotencyStore`]: each function tests one requirement. [`idempotency_contract!`](crate::idempotency_contract)
//! runs them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::idempotency::store::{
    Begun, BodyFingerprint, Claim, Completion, Digest, IdempotencyStore, RecordBound, Token,
};
use crate::idempotency::{Checkpoint, Operation};

/// A lease that does not end during a test, even on a slow machine.
const LONG: Duration = Duration::from_secs(60);
/// A lease whose end a test can wait for, with tolerance for a slow machine.
const SHORT: Duration = Duration::from_millis(1_500);

fn operation(key: &str) -> Operation {
    Operation::new("contract", key)
}

fn claim(lease: Duration) -> Claim {
    let (token, head) = (Token::random().unwrap(), Digest([7; 16]));
    Claim { token, head, lease, retention: LONG, takes_over: false, bound: None }
}

fn body_fingerprint(len: u64) -> BodyFingerprint {
    BodyFingerprint { len, is_whole: Some(true), digest: Digest([9; 16]) }
}

fn completion(response: &[u8]) -> Completion {
    Completion { response: response.into(), is_kept: true, body_fingerprint: body_fingerprint(3), retention: LONG }
}

/// Begins a free operation. Returns the fence and the number of the attempt.
async fn take<S: IdempotencyStore>(store: &S, operation: &Operation, claim: &Claim) -> (u64, u32) {
    match store.begin(operation, claim).await.unwrap() {
        Begun::Granted { fence, attempt, .. } => (fence, attempt),
        begun => panic!("{operation} should be free: {begun:?}"),
    }
}

async fn begin<S: IdempotencyStore>(store: &S, operation: &Operation) -> Begun {
    store.begin(operation, &claim(LONG)).await.unwrap()
}

fn is_in_flight(begun: &Begun) -> bool {
    matches!(begun, Begun::InFlight { .. })
}

/// A new operation is granted once. Other callers learn that it is in flight, and for how long at most.
pub async fn operation_is_granted_once<S: IdempotencyStore>(store: S) {
    let (_, attempt) = take(&store, &operation("a"), &claim(LONG)).await;
    assert_eq!(attempt, 1);
    for _ in 0..3 {
        match begin(&store, &operation("a")).await {
            Begun::InFlight { remaining, body_fingerprint } => {
                assert!(remaining <= LONG && remaining > LONG / 2, "{remaining:?}");
                assert_eq!(body_fingerprint, BodyFingerprint::default());
            }
            begun => panic!("{begun:?}"),
        }
    }
}

/// The same key in another scope is another operation, and so is another key.
pub async fn scopes_and_keys_are_separate<S: IdempotencyStore>(store: S) {
    for (number, (scope, key)) in [("a", "b"), ("b", "a"), ("a:b", ""), ("", "a:b")].into_iter().enumerate() {
        let (operation, claim) = (Operation::new(scope, key), claim(LONG));
        take(&store, &operation, &claim).await;
        assert!(store.complete(&operation, &claim.token, &completion(&[number as u8])).await.unwrap());
    }
    for (number, (scope, key)) in [("a", "b"), ("b", "a"), ("a:b", ""), ("", "a:b")].into_iter().enumerate() {
        match begin(&store, &Operation::new(scope, key)).await {
            Begun::Completed { response, .. } => assert_eq!(*response, [number as u8]),
            begun => panic!("{begun:?}"),
        }
    }
}

/// If a token begins its operation again, it gets the same reply, and the lease lasts for its whole time again.
pub async fn begin_can_be_repeated<S: IdempotencyStore>(store: S) {
    let (operation, claim) = (operation("a"), claim(SHORT));
    let granted = take(&store, &operation, &claim).await;
    for _ in 0..4 {
        sleep(SHORT / 2).await;
        assert_eq!(take(&store, &operation, &claim).await, granted);
    }
    assert!(is_in_flight(&begin(&store, &operation).await));
}

/// A call that does not wait returns the same reply as a call that waits. If the store would have to wait, it does nothing.
pub async fn immediate_reply_is_correct<S: IdempotencyStore>(store: S) {
    let (operation, claim) = (operation("a"), claim(LONG));
    let at_once = store.try_begin(&operation, &claim).transpose().unwrap();
    let begun = store.begin(&operation, &claim).await.unwrap();
    assert!(matches!(begun, Begun::Granted { attempt: 1, .. }), "{begun:?}");
    assert_eq!(at_once.unwrap_or_else(|| begun.clone()), begun);
    match store.complete_now(&operation, &claim.token, &completion(b"first")).transpose().unwrap() {
        Some(is_ours) => assert!(is_ours),
        None => {
            assert!(is_in_flight(&begin(&store, &operation).await));
            assert!(store.complete(&operation, &claim.token, &completion(b"first")).await.unwrap());
        }
    }
    let expected =
        Begun::Completed { body_fingerprint: body_fingerprint(3), response: b"first".as_slice().into(), is_kept: true };
    assert_eq!(begin(&store, &operation).await, expected);
    if let Some(again) = store.try_begin(&operation, &claim) {
        assert_eq!(again.unwrap(), expected);
    }
}

/// Every later caller gets the stored response unchanged, with the fingerprint of the request body.
pub async fn response_is_stored_unchanged<S: IdempotencyStore>(store: S) {
    let all_bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    for (number, response) in [b"".as_slice(), b"\0\r\n{}", &all_bytes].into_iter().enumerate() {
        let (operation, claim) = (Operation::new("kept", number), claim(LONG));
        take(&store, &operation, &claim).await;
        for _ in 0..2 {
            assert!(store.complete(&operation, &claim.token, &completion(response)).await.unwrap());
        }
        let expected =
            Begun::Completed { body_fingerprint: body_fingerprint(3), response: response.into(), is_kept: true };
        for _ in 0..2 {
            assert_eq!(begin(&store, &operation).await, expected);
        }
        assert_eq!(store.begin(&operation, &claim).await.unwrap(), expected, "also with the same token");
    }
}

/// A response that is too large leaves a mark, and the operation does not begin again.
pub async fn omitted_response_leaves_a_mark<S: IdempotencyStore>(store: S) {
    let claim = claim(LONG);
    take(&store, &operation("a"), &claim).await;
    let mark = Completion { is_kept: false, ..completion(b"200") };
    assert!(store.complete(&operation("a"), &claim.token, &mark).await.unwrap());
    let again = Claim { takes_over: true, ..self::claim(LONG) };
    let begun = store.begin(&operation("a"), &again).await.unwrap();
    assert_eq!(
        begun,
        Begun::Completed { body_fingerprint: body_fingerprint(3), response: (*b"200").into(), is_kept: false }
    );
}

/// Another head is a mismatch in each state, also after the response was stored. A mismatch does not remove the response.
pub async fn different_request_is_a_mismatch_in_every_state<S: IdempotencyStore>(store: S) {
    let first = claim(SHORT);
    let other = Claim { head: Digest([8; 16]), takes_over: true, ..claim(SHORT) };
    let mismatch = async |state: &str| {
        assert_eq!(store.begin(&operation("a"), &other).await.unwrap(), Begun::Mismatch, "{state}");
    };
    take(&store, &operation("a"), &first).await;
    mismatch("in flight").await;
    sleep(SHORT + SHORT / 3).await;
    mismatch("outcome unknown").await;
    assert!(store.renew(&operation("a"), &first, &body_fingerprint(1)).await.unwrap());
    mismatch("renewed").await;
    assert!(store.complete(&operation("a"), &first.token, &completion(b"x")).await.unwrap());
    mismatch("completed").await;
    let begun = begin(&store, &operation("a")).await;
    assert!(matches!(begun, Begun::Completed { .. }), "the first request still matches: {begun:?}");
}

/// Once, a live attempt was taken for an abandoned one. While the lease lasts, no other attempt begins, not even with a takeover.
pub async fn live_attempt_is_never_taken_over<S: IdempotencyStore>(store: S) {
    let first = claim(SHORT);
    take(&store, &operation("a"), &first).await;
    for _ in 0..6 {
        sleep(SHORT / 2).await;
        assert!(store.renew(&operation("a"), &first, &body_fingerprint(1)).await.unwrap());
        let thief = Claim { takes_over: true, ..claim(LONG) };
        let begun = store.begin(&operation("a"), &thief).await.unwrap();
        assert!(is_in_flight(&begun), "{begun:?}");
    }
}

/// Once, an abandoned attempt completed while it was taken over. A takeover after the completion changes nothing.
pub async fn completed_operation_is_never_taken_over<S: IdempotencyStore>(store: S) {
    let first = claim(Claim::MIN_LEASE);
    take(&store, &operation("a"), &first).await;
    sleep(Claim::MIN_LEASE * 3).await;
    let begun = begin(&store, &operation("a")).await;
    assert!(matches!(begun, Begun::Unknown { attempt: 1, .. }), "{begun:?}");
    // The attempt was only slow.
    assert!(store.complete(&operation("a"), &first.token, &completion(b"first")).await.unwrap());
    let late = Claim { takes_over: true, ..claim(LONG) };
    match store.begin(&operation("a"), &late).await.unwrap() {
        Begun::Completed { response, .. } => assert_eq!(*response, *b"first"),
        begun => panic!("{begun:?}"),
    }
    assert!(store.complete(&operation("a"), &first.token, &completion(b"other")).await.unwrap(), "it is completed");
    assert!(!store.complete(&operation("a"), &late.token, &completion(b"late")).await.unwrap());
    assert!(!store.renew(&operation("a"), &first, &body_fingerprint(1)).await.unwrap());
    assert!(!store.release(&operation("a"), &first).await.unwrap());
    match begin(&store, &operation("a")).await {
        Begun::Completed { response, .. } => assert_eq!(*response, *b"first"),
        begun => panic!("{begun:?}"),
    }
}

/// If its lease ends, an attempt has an unknown outcome until another attempt takes over. After that, its holder can change nothing.
pub async fn superseded_attempt_changes_nothing<S: IdempotencyStore>(store: S) {
    let first = claim(Claim::MIN_LEASE);
    let (fence, _) = take(&store, &operation("a"), &first).await;
    sleep(Claim::MIN_LEASE * 3).await;
    for _ in 0..2 {
        let begun = begin(&store, &operation("a")).await;
        assert!(matches!(begun, Begun::Unknown { attempt: 1, .. }), "{begun:?}");
    }
    let second = Claim { takes_over: true, ..claim(LONG) };
    let (next, attempt) = take(&store, &operation("a"), &second).await;
    assert!(next > fence && attempt == 2, "{next} after {fence}, attempt {attempt}");
    assert!(!store.renew(&operation("a"), &first, &body_fingerprint(1)).await.unwrap());
    assert!(!store.complete(&operation("a"), &first.token, &completion(b"late")).await.unwrap());
    assert!(!store.release(&operation("a"), &first).await.unwrap());
    assert!(is_in_flight(&store.begin(&operation("a"), &first).await.unwrap()));
    assert!(store.complete(&operation("a"), &second.token, &completion(b"second")).await.unwrap());
    match begin(&store, &operation("a")).await {
        Begun::Completed { response, .. } => assert_eq!(*response, *b"second"),
        begun => panic!("{begun:?}"),
    }
}

/// A renewal restores an ended lease, and stores the fingerprint of the body.
pub async fn late_renewal_succeeds_without_a_takeover<S: IdempotencyStore>(store: S) {
    let first = Claim { lease: Claim::MIN_LEASE, ..claim(LONG) };
    take(&store, &operation("a"), &first).await;
    sleep(Claim::MIN_LEASE * 3).await;
    let long = Claim { lease: LONG, ..first };
    assert!(store.renew(&operation("a"), &long, &body_fingerprint(77)).await.unwrap());
    match begin(&store, &operation("a")).await {
        Begun::InFlight { body_fingerprint: known, .. } => assert_eq!(known, body_fingerprint(77)),
        begun => panic!("{begun:?}"),
    }
}

/// A released operation can begin again, with a larger fence and only with another token.
pub async fn released_operation_begins_again<S: IdempotencyStore>(store: S) {
    let (mut last, mut heads) = (0, 0..);
    for attempt in 1..5 {
        // The next request may be another one.
        let claim = Claim { head: Digest([heads.next().unwrap(); 16]), ..claim(LONG) };
        let (fence, is) = take(&store, &operation("a"), &claim).await;
        assert!(fence > last && is == attempt, "{fence} after {last}, attempt {is} is {attempt}");
        last = fence;
        for _ in 0..2 {
            assert!(store.release(&operation("a"), &claim).await.unwrap());
        }
        assert!(!store.renew(&operation("a"), &claim, &body_fingerprint(1)).await.unwrap());
        assert!(!store.complete(&operation("a"), &claim.token, &completion(b"x")).await.unwrap());
        assert!(is_in_flight(&store.begin(&operation("a"), &claim).await.unwrap()), "not with the same token");
    }
}

/// If a claim is released before it arrives, it has no effect. So a client can release a claim without knowing whether it arrived.
pub async fn early_release_cancels_a_late_claim<S: IdempotencyStore>(store: S) {
    let lost = claim(LONG);
    assert!(store.release(&operation("a"), &lost).await.unwrap());
    assert!(is_in_flight(&store.begin(&operation("a"), &lost).await.unwrap()));
    take(&store, &operation("a"), &claim(LONG)).await;
    assert!(!store.release(&operation("a"), &lost).await.unwrap());
    assert!(is_in_flight(&begin(&store, &operation("a")).await));
}

/// The next attempt gets the last checkpoint and the fingerprint of the body, after a takeover and after a release.
pub async fn next_attempt_finds_the_checkpoint<S: IdempotencyStore>(store: S) {
    let note = |number| Checkpoint::new(number, "charged", &[0, number as u8, 255]).unwrap();
    let granted = async |claim: &Claim| match store.begin(&operation("a"), claim).await.unwrap() {
        Begun::Granted { attempt, body_fingerprint, checkpoint, .. } => (attempt, body_fingerprint, checkpoint),
        begun => panic!("{begun:?}"),
    };
    let first = Claim { lease: Claim::MIN_LEASE, ..claim(LONG) };
    assert_eq!(granted(&first).await, (1, BodyFingerprint::default(), None));
    for number in 1..3 {
        assert!(store.checkpoint(&operation("a"), &first, &body_fingerprint(5), &note(number)).await.unwrap());
    }
    sleep(Claim::MIN_LEASE * 3).await;
    assert!(matches!(begin(&store, &operation("a")).await, Begun::Unknown { attempt: 1, .. }));
    let second = Claim { takes_over: true, ..claim(LONG) };
    for _ in 0..2 {
        assert_eq!(granted(&second).await, (2, body_fingerprint(5), Some(note(2))));
    }
    assert!(
        !store.checkpoint(&operation("a"), &first, &body_fingerprint(5), &note(9)).await.unwrap(),
        "it was taken over"
    );
    assert!(store.renew(&operation("a"), &second, &body_fingerprint(5)).await.unwrap());
    assert!(store.release(&operation("a"), &second).await.unwrap());
    assert!(
        !store.checkpoint(&operation("a"), &second, &body_fingerprint(5), &note(9)).await.unwrap(),
        "it was released"
    );
    let third = claim(LONG);
    assert_eq!(granted(&third).await, (3, body_fingerprint(5), Some(note(2))));
    assert!(store.complete(&operation("a"), &third.token, &completion(b"x")).await.unwrap());
    assert!(
        !store.checkpoint(&operation("a"), &third, &body_fingerprint(5), &note(9)).await.unwrap(),
        "it was completed"
    );
    let expected = Begun::Completed { body_fingerprint: body_fingerprint(3), response: (*b"x").into(), is_kept: true };
    assert_eq!(begin(&store, &operation("a")).await, expected);
}

/// A checkpoint that arrives late does not replace a later one. A checkpoint renews the lease.
pub async fn late_checkpoint_changes_nothing<S: IdempotencyStore>(store: S) {
    let note = |number, data: &[u8]| Checkpoint::new(number, "", data).unwrap();
    let first = claim(SHORT);
    take(&store, &operation("a"), &first).await;
    for (number, data) in [(2, &[7; Checkpoint::MAX_DATA][..]), (1, b"early"), (2, b"again")] {
        sleep(SHORT / 2).await;
        assert!(store.checkpoint(&operation("a"), &first, &body_fingerprint(1), &note(number, data)).await.unwrap());
    }
    assert!(is_in_flight(&begin(&store, &operation("a")).await));
    assert!(store.release(&operation("a"), &first).await.unwrap());
    match begin(&store, &operation("a")).await {
        Begun::Granted { checkpoint, .. } => assert_eq!(checkpoint, Some(note(2, b"again"))),
        begun => panic!("{begun:?}"),
    }
}

/// An attempt with a checkpoint may have had effects, so its key stays bound to the request after a release.
pub async fn checkpoint_keeps_the_fingerprint<S: IdempotencyStore>(store: S) {
    let first = claim(LONG);
    take(&store, &operation("a"), &first).await;
    let note = Checkpoint::new(1, "charged", b"").unwrap();
    assert!(store.checkpoint(&operation("a"), &first, &body_fingerprint(1), &note).await.unwrap());
    for _ in 0..2 {
        assert!(store.release(&operation("a"), &first).await.unwrap());
    }
    let other = Claim { head: Digest([8; 16]), ..claim(LONG) };
    assert_eq!(store.begin(&operation("a"), &other).await.unwrap(), Begun::Mismatch);
    assert!(is_in_flight(&store.begin(&operation("a"), &first).await.unwrap()), "not with the same token");
    take(&store, &operation("a"), &claim(LONG)).await;
}

/// A renewal that arrives after a later checkpoint does not reduce the known part of the body.
///
/// Once, it did. Another request whose body began alike was taken for the same request, and got the checkpoint.
pub async fn known_part_of_a_body_stays_known<S: IdempotencyStore>(store: S) {
    let read = |len, is_whole| BodyFingerprint { len, is_whole: Some(is_whole), digest: Digest([len as u8; 16]) };
    let note = Checkpoint::new(1, "charged", b"").unwrap();
    let first = claim(LONG);
    take(&store, &operation("a"), &first).await;
    assert!(store.renew(&operation("a"), &first, &read(2, false)).await.unwrap());
    assert!(store.checkpoint(&operation("a"), &first, &read(100, true), &note).await.unwrap());
    for late in [BodyFingerprint::default(), read(3, false), read(100, false)] {
        assert!(store.renew(&operation("a"), &first, &late).await.unwrap());
        match begin(&store, &operation("a")).await {
            Begun::InFlight { body_fingerprint: known, .. } => {
                assert_eq!(known, read(100, true), "renewed with {late:?}");
            }
            begun => panic!("{begun:?}"),
        }
        assert!(store.checkpoint(&operation("a"), &first, &late, &note).await.unwrap());
        match begin(&store, &operation("a")).await {
            Begun::InFlight { body_fingerprint: known, .. } => {
                assert_eq!(known, read(100, true), "checkpoint with {late:?}");
            }
            begun => panic!("{begun:?}"),
        }
    }
    assert!(store.release(&operation("a"), &first).await.unwrap());
    match begin(&store, &operation("a")).await {
        Begun::Granted { body_fingerprint: known, checkpoint, .. } => {
            assert_eq!((known, checkpoint), (read(100, true), Some(note)));
        }
        begun => panic!("{begun:?}"),
    }
}

/// After a takeover, a release keeps the binding to the request and the number of attempts. The earlier attempt may have had effects, so
/// the next one must be the same request.
///
/// Once, the release removed both.
pub async fn takeover_keeps_the_fingerprint<S: IdempotencyStore>(store: S) {
    let first = claim(Claim::MIN_LEASE);
    take(&store, &operation("a"), &first).await;
    assert!(store.renew(&operation("a"), &first, &body_fingerprint(5)).await.unwrap());
    sleep(Claim::MIN_LEASE * 3).await;
    let (mut last, mut known) = (1, None);
    for _ in 0..3 {
        let next = Claim { takes_over: true, ..claim(LONG) };
        for _ in 0..2 {
            match store.begin(&operation("a"), &next).await.unwrap() {
                Begun::Granted { attempt, body_fingerprint: is, checkpoint, .. } => {
                    assert_eq!((attempt, is, checkpoint), (last + 1, body_fingerprint(5), known.clone()));
                }
                begun => panic!("{begun:?}"),
            }
        }
        last += 1;
        if last == 3 {
            known = Checkpoint::new(1, "", b"");
            let note = known.as_ref().unwrap();
            assert!(store.checkpoint(&operation("a"), &next, &body_fingerprint(5), note).await.unwrap());
        }
        for _ in 0..2 {
            assert!(store.release(&operation("a"), &next).await.unwrap());
        }
        let other = Claim { head: Digest([8; 16]), ..claim(LONG) };
        assert_eq!(store.begin(&operation("a"), &other).await.unwrap(), Begun::Mismatch);
        assert!(is_in_flight(&store.begin(&operation("a"), &next).await.unwrap()), "not with the same token");
    }
    let done = claim(LONG);
    take(&store, &operation("a"), &done).await;
    assert!(store.complete(&operation("a"), &done.token, &completion(b"x")).await.unwrap());
    let expected = Begun::Completed { body_fingerprint: body_fingerprint(3), response: (*b"x").into(), is_kept: true };
    assert_eq!(begin(&store, &operation("a")).await, expected);
}

/// Watchers get a notification when the operation is completed, and when it is released. A renewal sends none.
pub async fn watcher_is_notified<S: IdempotencyStore>(store: S) {
    for number in 0..2_u32 {
        let (operation, claim) = (Operation::new("watched", number), claim(LONG));
        take(&store, &operation, &claim).await;
        let mut notifications = [store.watch(&operation).await, store.watch(&operation).await];
        // A precautionary notification may arrive now, but not each time.
        let mut renewals = 0;
        loop {
            assert!(store.renew(&operation, &claim, &body_fingerprint(1)).await.unwrap());
            if timeout(Duration::from_millis(300), notifications[0].next()).await.is_err() {
                break;
            }
            renewals += 1;
            assert!(renewals < 5, "renewals notify the watcher");
        }
        if number == 0 {
            assert!(store.complete(&operation, &claim.token, &completion(b"x")).await.unwrap());
        } else {
            assert!(store.release(&operation, &claim).await.unwrap());
        }
        for notifications in &mut notifications {
            timeout(Duration::from_secs(10), notifications.next()).await.expect("a notification");
        }
        assert!(!is_in_flight(&begin(&store, &operation).await));
    }
}

/// A response is kept for its retention. Then the operation is free again.
pub async fn response_expires_after_its_retention<S: IdempotencyStore>(store: S) {
    let claim = claim(LONG);
    take(&store, &operation("a"), &claim).await;
    let brief = Completion { retention: Claim::MIN_RETENTION, ..completion(b"x") };
    assert!(store.complete(&operation("a"), &claim.token, &brief).await.unwrap());
    sleep(Claim::MIN_RETENTION + Duration::from_millis(100)).await;
    take(&store, &operation("a"), &self::claim(LONG)).await;
    assert!(!store.complete(&operation("a"), &claim.token, &brief).await.unwrap());
}

/// Of many concurrent calls, exactly one begins the operation.
pub async fn one_of_many_racing_requests_begins<S: IdempotencyStore + Send + Sync + 'static>(store: S) {
    let store = Arc::new(store);
    for round in 0..10 {
        let mut racing = JoinSet::new();
        for _ in 0..20 {
            let store = Arc::clone(&store);
            racing.spawn(async move {
                let begun = store.begin(&Operation::new("race", round), &claim(LONG)).await.unwrap();
                matches!(begun, Begun::Granted { .. })
            });
        }
        assert_eq!(racing.join_all().await.into_iter().filter(|granted| *granted).count(), 1);
    }
}

/// A scope with the maximum number of records gets no new one, and the reply says when to retry. Existing records and other scopes work as
/// before. A store that counts approximately may refuse later, but refuses in the end.
pub async fn records_of_a_scope_are_bounded<S: IdempotencyStore>(store: S) {
    const MOST: u64 = 3;
    let bounded = |scope: &str| Claim { bound: Some(RecordBound { scope: scope.into(), max: MOST }), ..claim(LONG) };
    let operation = |scope: &str, number: u64| Operation::new((scope, number % 2), number);
    let mut claims = Vec::new();
    loop {
        assert!(claims.len() < 1_000, "the scope has no bound");
        let claim = bounded("alice");
        match store.begin(&operation("alice", claims.len() as u64), &claim).await.unwrap() {
            Begun::Granted { .. } => claims.push(claim),
            Begun::ScopeFull { retry_after } => {
                assert!(!retry_after.is_zero() && retry_after <= 2 * LONG, "{retry_after:?}");
                break;
            }
            begun => panic!("{begun:?}"),
        }
    }
    let granted = claims.len() as u64;
    assert!(granted >= MOST, "{granted}");
    let is_full = async || {
        let begun = store.begin(&operation("alice", granted), &bounded("alice")).await.unwrap();
        matches!(begun, Begun::ScopeFull { .. })
    };
    assert!(is_full().await);
    let known = operation("alice", 0);
    assert!(is_in_flight(&store.begin(&known, &bounded("alice")).await.unwrap()));
    assert!(store.complete(&known, &claims[0].token, &completion(b"first")).await.unwrap());
    assert!(matches!(store.begin(&known, &bounded("alice")).await.unwrap(), Begun::Completed { .. }));
    take(&store, &operation("bob", 0), &bounded("bob")).await;
    // A released operation is remembered for a while, and may begin again.
    assert!(store.release(&operation("alice", 1), &claims[1]).await.unwrap());
    assert!(is_full().await);
    take(&store, &operation("alice", 1), &bounded("alice")).await;
    take(&store, &operation("alice", granted), &claim(LONG)).await;
    // A claim that is released before it arrives makes no room for its key.
    let cancelled = operation("alice", granted + 2);
    assert!(store.release(&cancelled, &bounded("alice")).await.unwrap());
    // A store that counts approximately may have room left for this key.
    let mut next = granted + 2;
    while !matches!(store.begin(&operation("alice", next), &bounded("alice")).await.unwrap(), Begun::ScopeFull { .. }) {
        next += 2;
        assert!(next < granted + 1_000, "the number of cancelled keys has no bound");
        assert!(store.release(&operation("alice", next), &bounded("alice")).await.unwrap());
    }
}
