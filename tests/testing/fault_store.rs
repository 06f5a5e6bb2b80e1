//! Tests of the tools for tests: stores with injected faults, exhausted clients and jobs.

use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, advance, timeout};
use tollgate::delay_queue::store::{QueueKey, WorkerId};
use tollgate::delay_queue::{self, Due, JobId, NewJob, State};
use tollgate::idempotency::store::{BodyFingerprint, Claim, Completion, Digest};
use tollgate::idempotency::{Checkpoint, IdempotencyAdmin, Operation, StoredResponse};
use tollgate::lock::store::{Notifications, Renewal, Token};
use tollgate::lock::{self, Cursor, LockAdmin, LockKey};
use tollgate::rate_limit::Outcome;
use tollgate::rate_limit::store::{RateLimitStore, Request};
use tollgate::testing::{Failure, FaultStore, Faults, TestJob, Verb, exhaust};
use tollgate::{Key, Limiter, MemoryBackend, Policy, Quota, StoreError};

/// The contract holds behind a `FaultStore` without faults.
mod behind_a_fault_store {
    use super::*;

    tollgate::rate_limit_contract!(
        #[tokio::test(start_paused = true)]
        async {
            FaultStore::new(MemoryBackend::new())
        }
    );
}

/// With the default test attribute: the clock runs.
mod around_each_claim {
    use super::*;

    tollgate::rate_limit_contract!(|claim| {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        claim(store).await;
        assert!(faults.total_calls() > 0);
    });
}

/// Administrative calls are subject to faults as well.
#[tokio::test(start_paused = true)]
async fn admin_calls_are_subject_to_faults() {
    use tollgate::idempotency::store::IdempotencyStore;
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = LockAdmin::new(store.clone(), "default");
    let operations = IdempotencyAdmin::new(store.clone());
    let token = Token::random().unwrap();
    let operation = Operation::new("alice", "k");
    let (head, lease, retention) = (Digest::default(), Claim::MIN_LEASE, Claim::MIN_RETENTION);
    store.begin(&operation, &Claim::new(token, head, lease, retention)).await.unwrap();
    advance(lease * 2).await;
    let status = operations.inspect(&operation).await.unwrap().unwrap();
    let answer = || StoredResponse::of_operation("x");

    faults.fail(Failure::Unauthorized);
    let errors = [
        locks.inspect("a").await.map(drop),
        locks.force_release("a").await.map(drop),
        locks.list(Cursor::default(), 1).await.map(drop),
        operations.inspect(&operation).await.map(drop),
        operations.forget(&status).await.map(drop),
        operations.complete(&status, answer()).await.map(drop),
        operations.list(Cursor::default(), 1).await.map(drop),
    ];
    assert!(errors.iter().all(|error| error.as_ref().is_err_and(StoreError::is_unauthorized)), "{errors:?}");
    assert_eq!(faults.calls(Verb::Admin), 8);
    faults.heal();
    assert_eq!(operations.inspect(&operation).await.unwrap().map(|found| found.fence), Some(status.fence));

    faults.lose_replies();
    assert!(operations.complete(&status, answer()).await.unwrap_err().is_timeout());
    faults.heal();
    assert!(operations.complete(&status, answer()).await.unwrap(), "a repeated call is harmless");
}

fn policy() -> Policy {
    Policy::new("testing", Quota::per_minute(1_000).fixed_window())
}

fn store() -> (Limiter<FaultStore<MemoryBackend>>, Faults) {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    (Limiter::new(store, policy()), faults)
}

#[tokio::test]
async fn every_kind_of_failure_is_reported_and_charges_nothing() {
    let (limiter, faults) = store();
    type IsReported = fn(&StoreError) -> bool;
    let kinds: [(Failure, IsReported); 5] = [
        (Failure::Unavailable, StoreError::is_unavailable),
        (Failure::Timeout, StoreError::is_timeout),
        (Failure::Unauthorized, StoreError::is_unauthorized),
        (Failure::OutOfMemory, StoreError::is_out_of_memory),
        (Failure::ForeignData, StoreError::is_foreign_data),
    ];
    for (failure, is_reported) in kinds {
        faults.fail(failure);
        let error = limiter.check("alice").await.unwrap_err();
        assert!(is_reported(&error), "{error:?}");
    }
    faults.fail(Failure::Other);
    assert!(!limiter.check("alice").await.unwrap_err().is_unavailable());
    faults.heal();
    assert_eq!(limiter.peek("alice").await.unwrap().remaining(), Some(1_000));
    assert_eq!((faults.calls(Verb::Check), faults.calls(Verb::Peek), faults.total_calls()), (6, 1, 7));
}

#[tokio::test]
async fn every_verb_fails_and_is_counted() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, policy, key) = (store.faults(), policy(), Key::from("alice"));
    let receipt = store.check(&policy, &key, 1).await.unwrap().receipt().unwrap();
    let clone = store.clone();
    faults.fail(Failure::Unavailable);
    assert!(clone.check(&policy, &key, 1).await.is_err());
    assert!(clone.check_all(&[Request { policy: policy.clone(), key, cost: 1 }]).await.is_err());
    assert!(clone.peek(&policy, &key, 1).await.is_err());
    assert!(clone.settle(&policy, &key, receipt, 5).await.is_err());
    assert!(clone.block(&policy, &key, Duration::from_secs(1)).await.is_err());
    assert!(clone.reset(&policy, &key).await.is_err());
    for verb in [Verb::CheckAll, Verb::Peek, Verb::Settle, Verb::Block, Verb::Reset] {
        assert_eq!(faults.calls(verb), 1, "{verb:?}");
    }
    assert_eq!(faults.calls(Verb::Check), 2);
    assert_eq!(store.get_ref().peek(&policy, &key, 1).await.unwrap().remaining(), Some(999));
}

/// Regression: two of these methods bypassed every fault, and were not counted.
#[tokio::test]
async fn every_verb_of_locks_fails_and_is_counted() {
    use tollgate::lock::store::LockStore;
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let (lock, token) = (LockKey::new("default", "a"), Token::random().unwrap());
    let claim = lock::store::Claim::new(token, Duration::from_secs(10));
    let acquired = store.acquire(&lock, &claim).await.unwrap();
    assert!(matches!(acquired, lock::store::Acquired::Granted { .. }));
    faults.fail(Failure::Unavailable);
    assert!(store.acquire(&lock, &claim).await.is_err());
    assert!(store.acquire_all(&[(lock, claim)]).await.is_err());
    assert!(store.renew(&[Renewal::new(lock, token, claim.ttl)]).await.is_err());
    assert!(store.name(&lock, &token, "billing").await.is_err());
    assert!(store.request_release(&lock).await.is_err());
    assert!(store.release(&lock, &token).await.is_err());
    for wakeups in [store.watch(&lock, None).await, store.watch_release_requests(&lock).await] {
        assert_eq!(format!("{wakeups:?}"), format!("{:?}", Notifications::none()));
    }
    for (verb, calls) in [
        (Verb::Acquire, 3),
        (Verb::Renew, 1),
        (Verb::Name, 1),
        (Verb::RequestRelease, 1),
        (Verb::Release, 1),
        (Verb::Watch, 2),
    ] {
        assert_eq!(faults.calls(verb), calls, "{verb:?}");
    }
    assert_eq!(faults.total_calls(), 9);
    faults.heal();
    faults.hang();
    assert!(store.name(&lock, &token, "billing").now_or_never().is_none());
    assert!(store.request_release(&lock).now_or_never().is_none());
    let holders = LockAdmin::new(store.get_ref().clone(), "default").inspect("a").await.unwrap().holders;
    assert!(holders.len() == 1 && holders[0].name.is_none(), "no call reached the store: {holders:?}");
}

#[tokio::test]
async fn every_verb_of_operations_fails_and_is_counted() {
    use tollgate::idempotency::store::IdempotencyStore;
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let (operation, token, body_fingerprint) =
        (Operation::new("alice", "k"), Token::random().unwrap(), BodyFingerprint::default());
    let (head, lease, retention) = (Digest::default(), Claim::MIN_LEASE, Claim::MIN_RETENTION);
    let claim = Claim::new(token, head, lease, retention);
    let completion = Completion::new(*b"", body_fingerprint, retention);
    faults.fail(Failure::Unavailable);
    assert!(
        store.try_begin(&operation, &claim).is_none() && store.complete_now(&operation, &token, &completion).is_none()
    );
    assert!(store.begin(&operation, &claim).await.is_err());
    assert!(store.renew(&operation, &claim, &body_fingerprint).await.is_err());
    let checkpoint = Checkpoint::new(1, "step", b"").unwrap();
    assert!(store.checkpoint(&operation, &claim, &body_fingerprint, &checkpoint).await.is_err());
    assert!(store.complete(&operation, &token, &completion).await.is_err());
    assert!(store.release(&operation, &claim).await.is_err());
    assert_eq!(format!("{:?}", store.watch(&operation).await), format!("{:?}", Notifications::none()));
    for verb in [Verb::Begin, Verb::Renew, Verb::Checkpoint, Verb::Complete, Verb::Release, Verb::Watch] {
        assert_eq!(faults.calls(verb), 1, "{verb:?}");
    }
    assert_eq!(faults.total_calls(), 6);
}

#[tokio::test]
async fn every_verb_of_queues_fails_and_is_counted() {
    use tollgate::delay_queue::store::DelayQueueStore;
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let (queue, id, worker) = (QueueKey::new("mail"), JobId::new("a"), WorkerId::random().unwrap());
    let claim = delay_queue::store::Claim::new(worker, 1, delay_queue::store::Claim::MIN_LEASE);
    faults.fail(Failure::Unavailable);
    assert!(store.push(&queue, &[NewJob::new(id, *b"x")], 10).await.is_err());
    assert!(store.claim(&queue, &[], &claim).await.is_err());
    assert!(store.extend(&queue, &[], claim.lease).await.is_err());
    assert_eq!(format!("{:?}", store.watch(&queue, worker).await), format!("{:?}", Notifications::none()));
    for verb in [Verb::Push, Verb::Claim, Verb::Extend, Verb::Watch] {
        assert_eq!(faults.calls(verb), 1, "{verb:?}");
    }
    let errors = [
        store.get(&queue, &id).await.map(drop),
        store.cancel(&queue, &id, false).await.map(drop),
        store.reschedule(&queue, &id, Due::NOW).await.map(drop),
        store.replace(&queue, &id, b"y").await.map(drop),
        store.counts(&queue).await.map(drop),
        store.list(&queue, State::Waiting, 0, 1).await.map(drop),
        store.pause(&queue, true).await,
        store.purge(&queue, 1, false).await.map(drop),
        store.release_unique(&queue, &"key".into()).await.map(drop),
        store.replay(&queue, &[id]).await.map(drop),
        store.forget(&queue, &[id]).await.map(drop),
    ];
    assert!(errors.iter().all(|error| error.as_ref().is_err_and(StoreError::is_unavailable)), "{errors:?}");
    assert_eq!((faults.calls(Verb::Control), faults.total_calls()), (11, 15));
}

#[tokio::test]
async fn fail_next_affects_only_the_next_calls() {
    let (limiter, faults) = store();
    faults.fail_next(2, Failure::Unavailable);
    let mut failed = Vec::new();
    for _ in 0..4 {
        failed.push(limiter.check("alice").await.is_err());
    }
    assert_eq!(failed, [true, true, false, false]);
}

#[tokio::test]
async fn fail_percent_is_deterministic_for_a_seed() {
    let run = async |seed: u64, percent: u8| {
        let (limiter, faults) = store();
        faults.seed(seed);
        faults.fail_percent(percent, Failure::Timeout);
        let mut failed = Vec::new();
        for _ in 0..1_000 {
            failed.push(limiter.peek("alice").await.is_err());
        }
        failed
    };
    let count = |failed: &[bool]| failed.iter().filter(|failed| **failed).count();
    let (first, again, other) = (run(0, 30).await, run(0, 30).await, run(1, 30).await);
    assert_eq!(first, again);
    assert_ne!(first, other);
    assert!(count(&first).abs_diff(300) < 60, "{} of 1,000 instead of 300", count(&first));
    assert_eq!((count(&run(0, 0).await), count(&run(0, 100).await)), (0, 1_000));
}

#[tokio::test(start_paused = true)]
async fn hanging_calls_end_only_at_the_deadline() {
    let (limiter, faults) = store();
    faults.hang();
    let start = Instant::now();
    assert!(limiter.check("alice").await.unwrap_err().is_timeout());
    assert_eq!(start.elapsed(), Duration::from_millis(100));
    faults.heal();
    assert!(limiter.check("alice").await.unwrap().is_allowed());

    let store = FaultStore::new(MemoryBackend::new());
    store.faults().hang();
    let (policy, key) = (policy(), Key::from("alice"));
    let mut call = Box::pin(store.check(&policy, &key, 1));
    assert!(timeout(Duration::from_secs(1), &mut call).await.is_err());
    // The reply is lost, whatever comes later.
    store.faults().heal();
    assert!(timeout(Duration::from_secs(86_400), call).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn delay_precedes_all_other_faults() {
    let (limiter, faults) = store();
    faults.delay(Duration::from_millis(30));
    let start = Instant::now();
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    assert_eq!(start.elapsed(), Duration::from_millis(30));
    faults.fail_next(1, Failure::Unavailable);
    assert!(limiter.check("alice").await.unwrap_err().is_unavailable());
    assert_eq!(start.elapsed(), Duration::from_millis(60));
    faults.delay(Duration::from_millis(101));
    assert!(limiter.check("alice").await.unwrap_err().is_timeout());
}

#[tokio::test]
async fn immediate_decision_does_not_bypass_a_fault() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, policy, key) = (store.faults(), policy(), Key::from("alice"));
    let set: [fn(&Faults); 5] = [
        Faults::hang,
        |faults| faults.fail(Failure::Other),
        |faults| faults.fail_next(1, Failure::Other),
        |faults| faults.fail_percent(1, Failure::Other),
        |faults| faults.delay(Duration::from_millis(1)),
    ];
    for set in set {
        set(&faults);
        assert_eq!(store.check_now(&policy, &key, 1), None);
        faults.heal();
    }
    assert_eq!(faults.total_calls(), 0);
    assert!(store.check_now(&policy, &key, 1).is_some_and(|decision| decision.is_allowed()));
    assert_eq!(faults.calls(Verb::Check), 1);
}

#[tokio::test(start_paused = true)]
async fn exhausted_client_has_no_quota_left() {
    let minute = Quota::per_minute(7);
    let huge = Quota::per_day(u32::MAX.into());
    let limits = [
        minute.fixed_window(),
        minute.sliding_window(),
        minute.sliding_log().unwrap(),
        minute.burst(3).unwrap().token_bucket(),
        huge.fixed_window(),
        huge.token_bucket(),
        Quota::per_second(0).fixed_window(),
    ];
    let single = limits.map(|limit| Policy::new("single", limit));
    let several = limits[..6].iter().fold(Policy::new("several", limits[4]), |policy, limit| policy.limit(*limit));
    for policy in single.into_iter().chain([several]) {
        let limiter = Limiter::new(MemoryBackend::new(), policy);
        for used in [0, 1] {
            let _ = limiter.check_cost("alice", used).await.unwrap();
            advance(Duration::from_millis(1)).await;
            let decision = exhaust(&limiter, "alice").await;
            assert_eq!(decision.remaining().unwrap_or(0), 0, "{:?}", limiter.policy());
            assert!(!limiter.check("alice").await.unwrap().is_allowed(), "{:?}", limiter.policy());
        }
        // Once more, with nothing left to use up.
        let _ = exhaust(&limiter, "alice").await;
    }
}

#[tokio::test]
#[should_panic(expected = "cannot exhaust `alice`: it is blocked")]
async fn blocked_client_cannot_be_exhausted() {
    let limiter = Limiter::new(MemoryBackend::new(), policy());
    limiter.block("alice", Duration::from_secs(60)).await.unwrap();
    let _ = exhaust(&limiter, "alice").await;
}

#[tokio::test]
#[should_panic(expected = "cannot exhaust `alice`: the store failed")]
async fn exhaust_panics_if_the_store_fails() {
    let (limiter, faults) = store();
    faults.fail(Failure::Unavailable);
    let _ = exhaust(&limiter, "alice").await;
}

#[tokio::test]
async fn fault_store_preserves_the_outcome() {
    let (limiter, _) = store();
    let _ = exhaust(&limiter, "alice").await;
    assert_eq!(limiter.check("alice").await.unwrap().outcome(), Outcome::Limited);
}

#[tokio::test]
async fn test_job_has_its_configured_properties() {
    let first = TestJob::new("mail").build();
    assert_eq!((first.attempt(), first.is_last_attempt(), first.last_failure()), (1, false, None));
    assert!(!first.cancellation().is_cancelled());

    let job =
        TestJob::new("mail").id("order 7").attempt(3).max_attempts(3).header("tenant", "blue").last_failure("busy");
    let (job, canceller) = job.cancellable();
    assert_eq!((*job, job.id().as_str(), job.attempt()), ("mail", "order%207", 3));
    assert!(job.is_last_attempt() && job.fence() > first.fence());
    assert_eq!(job.headers().get("tenant"), Some("blue"));
    assert_eq!(job.last_failure().map(|note| &*note.error), Some("busy"));
    canceller.cancel();
    assert!(job.cancellation().is_cancelled());
    job.cancellation().cancelled().await;
}

/// Regression: a service runs a task beside a job until the job ends. In a test, the job had ended before the task started.
#[tokio::test]
async fn test_job_lasts_until_it_is_dropped() {
    let job = TestJob::new(1).build();
    let mut cancellation = job.cancellation();
    assert_eq!(cancellation.ended().now_or_never(), None);
    let clone = job.clone().map(|number| number + 1);
    drop(job);
    assert_eq!(cancellation.ended().now_or_never(), None);
    drop(clone);
    assert_eq!(cancellation.ended().now_or_never(), Some(false));

    let (job, canceller) = TestJob::new(1).cancellable();
    assert_eq!(job.cancellation().ended().now_or_never(), None);
    drop(canceller);
    assert_eq!(job.cancellation().ended().now_or_never(), Some(false));
}
