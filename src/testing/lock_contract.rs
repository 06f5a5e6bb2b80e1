//! The contract tests of [`LockStore`], and of [`Locks`] with each backend: each function tests one requirement.
//! [`lock_contract!`](crate::lock_contract) runs them on a backend.
//!
//! A test gets a store that no other test uses, and panics if the store violates the requirement. The tests wait on tokio's clock. They
//! take no time if it is paused, and up to some seconds otherwise.
#![allow(clippy::unwrap_used, reason = "a failed requirement panics at its line")]

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{ConfigError, StoreError};
use crate::lock::store::{Acquired, Claim, LockStore, Notifications, Queueing, Released, Renewal, Token};
use crate::lock::{
    Lease, LeaseState, LockError, LockKey, LockKind, Locks, LossReason, MultiLease, ReleaseOutcome, RunError, RwLocks,
    Segment, Segmented, Semaphore,
};
use crate::reach::Reach;
use crate::store::shutdown::ShutdownTarget;
use crate::testing::observed::Observed;

/// A lease that does not end during a test, even on a slow machine.
const LONG: Duration = Duration::from_secs(60);
/// A lease whose end a test can wait for, with tolerance for a slow machine.
const SHORT: Duration = Duration::from_millis(1_500);
/// How much later than expected an event may be on a busy machine.
const SLACK: Duration = Duration::from_millis(1_200);

fn lock(key: &str) -> LockKey {
    LockKey::new("contract", key)
}

fn claim(ttl: Duration) -> Claim {
    Claim::new(Token::random().unwrap(), ttl)
}

/// A generous deadline, since these tests are not about the speed of a store.
fn locks<S: LockStore + Clone + Send + Sync + 'static>(store: &S) -> Locks {
    Locks::new(store.clone(), "default").deadline(Duration::from_secs(10))
}

/// Acquires a free lock. Returns the fence.
async fn take<S: LockStore>(store: &S, lock: &LockKey, claim: &Claim) -> u64 {
    match store.acquire(lock, claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        answer => panic!("{lock} should be free: {answer:?}"),
    }
}

fn fence(answer: &Acquired) -> Option<u64> {
    match answer {
        Acquired::Granted { fence } => Some(*fence),
        _ => None,
    }
}

/// How long another holder may keep the lock.
async fn busy<S: LockStore>(store: &S, lock: &LockKey) -> Duration {
    match store.acquire(lock, &claim(LONG)).await.unwrap() {
        Acquired::Busy { remaining } => remaining,
        answer => panic!("{lock} should be held: {answer:?}"),
    }
}

/// A free lock is granted. A held lock is not, and the reply says for how long it may be held.
pub async fn free_lock_is_granted_and_held_lock_is_not<S: LockStore>(store: S) {
    take(&store, &lock("a"), &claim(LONG)).await;
    for _ in 0..3 {
        let remaining = busy(&store, &lock("a")).await;
        assert!(remaining <= LONG && remaining > LONG - SLACK * 10, "{remaining:?}");
    }
}

/// Other keys and other namespaces are other locks.
pub async fn keys_and_names_are_separate_locks<S: LockStore>(store: S) {
    for lock in [LockKey::new("a", "b"), LockKey::new("b", "a"), LockKey::new("a:b", ""), LockKey::new("", "a:b")] {
        take(&store, &lock, &claim(LONG)).await;
        busy(&store, &lock).await;
    }
}

/// If the token of the holder acquires the lock again, it gets the same reply, and the lease lasts for its whole time again. With a quorum,
/// other servers may have replied in time than before, with another fence.
pub async fn acquisition_can_be_repeated<S: LockStore>(store: S) {
    for fences in [1, 16] {
        let claim = Claim { fences, ..claim(SHORT) };
        let lock = LockKey::new("again", fences);
        let fence = take(&store, &lock, &claim).await;
        for _ in 0..8 {
            sleep(SHORT / 4).await;
            let again = take(&store, &lock, &claim).await;
            assert!(again == fence || store.reach() == Reach::Quorum, "{again} after {fence}");
        }
        assert!(busy(&store, &lock).await > SHORT / 4);
    }
}

/// Each grant of a lock has larger fences than all earlier grants, whether the previous lease was released or expired.
pub async fn fences_rise_with_every_grant<S: LockStore>(store: S) {
    let mut last = 0;
    for (round, fences) in [1, 16, 1, 65_536, 1, 1, 16, 16, 1].into_iter().enumerate() {
        let is_given_back = round % 3 > 0;
        let claim = Claim { fences, ..claim(if is_given_back { LONG } else { Claim::MIN_TTL }) };
        let fence = take(&store, &lock("a"), &claim).await;
        assert!(fence > last, "{fence} after {last} in round {round}");
        assert!(fence + u64::from(fences) < 1 << 53);
        last = fence + u64::from(fences) - 1;
        if is_given_back {
            assert!(store.release(&lock("a"), &claim.token).await.unwrap().was_held);
        } else {
            sleep(Claim::MIN_TTL * 2).await;
        }
    }
}

/// Without renewals, a lease expires after its time, and not before.
pub async fn lease_expires<S: LockStore>(store: S) {
    let start = Instant::now();
    let dead = claim(SHORT);
    take(&store, &lock("a"), &dead).await;
    loop {
        match store.acquire(&lock("a"), &claim(LONG)).await.unwrap() {
            Acquired::Granted { .. } => break,
            Acquired::Busy { remaining } => {
                assert!(remaining <= SHORT, "{remaining:?}");
                sleep(remaining.max(Duration::from_millis(1))).await;
            }
            answer => panic!("the queue should be empty: {answer:?}"),
        }
    }
    let took = start.elapsed();
    assert!(took >= SHORT && took < SHORT + SLACK, "{took:?}");
    // The previous holder can neither renew nor release the lease.
    let renewal = Renewal::new(lock("a"), dead.token, LONG);
    assert_eq!(store.renew(&[renewal]).await.unwrap(), [false]);
    assert!(!store.release(&lock("a"), &dead.token).await.unwrap().was_held);
    busy(&store, &lock("a")).await;
}

/// A lease that is renewed in time does not expire.
pub async fn renewal_extends_a_lease<S: LockStore>(store: S) {
    let claim = claim(SHORT);
    take(&store, &lock("a"), &claim).await;
    for _ in 0..4 {
        sleep(SHORT / 2).await;
        let renewal = Renewal::new(lock("a"), claim.token, SHORT);
        assert_eq!(store.renew(&[renewal]).await.unwrap(), [true]);
        busy(&store, &lock("a")).await;
    }
    // A renewal may extend or shorten the lease.
    for ttl in [LONG, SHORT] {
        let renewal = Renewal::new(lock("a"), claim.token, ttl);
        store.renew(&[renewal]).await.unwrap();
        let remaining = busy(&store, &lock("a")).await;
        assert!(remaining <= ttl && remaining + SLACK > ttl, "{remaining:?} of {ttl:?}");
    }
}

/// A renewal does not restore an expired lease, although no other client has acquired the lock.
pub async fn ended_lease_cannot_be_renewed<S: LockStore>(store: S) {
    let dead = claim(Claim::MIN_TTL);
    take(&store, &lock("a"), &dead).await;
    sleep(Claim::MIN_TTL * 2).await;
    let renewal = Renewal::new(lock("a"), dead.token, LONG);
    assert_eq!(store.renew(&[renewal, Renewal { lock: lock("never"), ..renewal }]).await.unwrap(), [false, false]);
    take(&store, &lock("a"), &claim(LONG)).await;
    take(&store, &lock("never"), &claim(LONG)).await;
}

/// Each renewal of a batch has its own reply, in order, for any size of the batch.
pub async fn many_leases_are_renewed_in_one_call<S: LockStore>(store: S) {
    let renewals: Vec<_> =
        (0..300_u32).map(|i| Renewal::new(LockKey::new("many", i), claim(LONG).token, LONG)).collect();
    for renewal in renewals.iter().step_by(3) {
        take(&store, &renewal.lock, &Claim::new(renewal.token, LONG)).await;
    }
    let answers = store.renew(&renewals).await.unwrap();
    let expected: Vec<_> = (0..300).map(|i| i % 3 == 0).collect();
    assert_eq!(answers, expected);
    assert!(store.renew(&[]).await.unwrap().is_empty());
}

/// Only the token of the holder releases a lease. A second release is harmless.
pub async fn only_the_holder_releases_a_lease<S: LockStore>(store: S) {
    let (holder, other) = (claim(LONG), claim(LONG));
    assert_eq!(store.release(&lock("a"), &holder.token).await.unwrap(), Released::default());
    take(&store, &lock("a"), &holder).await;
    assert!(!store.release(&lock("a"), &other.token).await.unwrap().was_held);
    busy(&store, &lock("a")).await;
    assert!(store.release(&lock("a"), &holder.token).await.unwrap().was_held);
    assert!(!store.release(&lock("a"), &holder.token).await.unwrap().was_held);
    take(&store, &lock("a"), &other).await;
    assert!(!store.release(&lock("a"), &holder.token).await.unwrap().was_held);
    busy(&store, &lock("a")).await;
}

/// A key may consist of any bytes, and has its own lock.
pub async fn any_bytes_are_a_lock_key<S: LockStore>(store: S) {
    let keys: [&[u8]; 8] = [b"", b"{", b"}{", b"{a}", b"a:b", b"\0\xff\n", &[b'x'; 1 << 20], "\u{1F512}".as_bytes()];
    for key in keys {
        let (lock, claim) = (LockKey::new("contract", key), claim(LONG));
        take(&store, &lock, &claim).await;
        busy(&store, &lock).await;
        assert!(store.release(&lock, &claim.token).await.unwrap().was_held);
    }
}

/// Of many concurrent callers, exactly one gets the lock.
pub async fn one_of_many_racing_callers_gets_the_lock<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    for round in 0..5_u32 {
        let mut callers = JoinSet::new();
        for _ in 0..50 {
            let store = store.clone();
            callers.spawn(async move { store.acquire(&LockKey::new("race", round), &claim(LONG)).await.unwrap() });
        }
        let granted = |answer: &Acquired| matches!(answer, Acquired::Granted { .. });
        assert_eq!(callers.join_all().await.iter().filter(|answer| granted(answer)).count(), 1);
    }
}

/// Any number of locks can be acquired and released at the same time, independently of each other.
pub async fn concurrent_locks_are_independent<S>(store: S)
where
    S: LockStore + Clone + Send + Sync + 'static,
{
    // Two callers want each lock, for different times.
    let claims: Vec<_> = (0..300_u32)
        .map(|i| (LockKey::new("crowd", i / 2), Claim { fences: 1 + i % 3, ..claim(LONG - SHORT * (i % 2)) }))
        .collect();
    let all = async |claims: &[(LockKey, Claim)]| {
        let mut asking = JoinSet::new();
        for (i, (lock, claim)) in claims.iter().copied().enumerate() {
            let store = store.clone();
            asking.spawn(async move { (i, store.acquire(&lock, &claim).await.unwrap()) });
        }
        let mut answers = asking.join_all().await;
        answers.sort_by_key(|(i, _)| *i);
        answers.into_iter().map(|(_, answer)| fence(&answer)).collect::<Vec<_>>()
    };
    let fences = all(&claims).await;
    for pair in fences.chunks(2) {
        assert_eq!(pair.iter().flatten().count(), 1, "exactly one of two callers gets the lock: {pair:?}");
    }
    assert_eq!(all(&claims).await, fences, "a repeated acquisition has the same fences");

    let mut giving = JoinSet::new();
    for ((lock, claim), fence) in claims.iter().copied().zip(fences.clone()) {
        let store = store.clone();
        giving.spawn(async move {
            let released = store.release(&lock, &claim.token).await.unwrap();
            assert_eq!(released.was_held, fence.is_some(), "{lock}");
        });
    }
    giving.join_all().await;
    let refused = claims.iter().zip(&fences).filter(|(_, fence)| fence.is_none()).map(|(claim, _)| *claim);
    let granted = all(&refused.collect::<Vec<_>>()).await;
    for (pair, fence) in fences.chunks(2).zip(granted) {
        assert!(fence > pair[0].max(pair[1]), "{fence:?} after {pair:?}");
    }
}

/// A release notifies all watchers. It also works after they have gone.
pub async fn release_wakes_watchers<S: LockStore>(store: S) {
    let holder = claim(LONG);
    take(&store, &lock("a"), &holder).await;
    let (mut one, mut other) = (store.watch(&lock("a"), None).await, store.watch(&lock("a"), None).await);
    store.release(&lock("a"), &holder.token).await.unwrap();
    for notifications in [&mut one, &mut other] {
        timeout(SLACK, notifications.next()).await.expect("a notification");
    }
    take(&store, &lock("a"), &holder).await;
    drop((one, other));
    assert!(store.release(&lock("a"), &holder.token).await.unwrap().was_held);
}

/// Tasks that hold the lock never overlap, and each has a larger fence than all before it.
pub async fn one_at_a_time_with_rising_fences<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    // Two clients, as in two processes.
    let clients = [locks(&store).wait(LONG), locks(&store).wait(LONG)];
    let (inside, fence) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let (locks, inside, fence) = (clients[task % 2].clone(), Arc::clone(&inside), Arc::clone(&fence));
        tasks.spawn(async move {
            for turn in 0..25 {
                let lease = locks.lock("counter").await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two tasks hold the lock");
                let before = fence.swap(lease.fence(), Ordering::SeqCst);
                assert!(lease.fence() > before, "{} after {before}", lease.fence());
                yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                if turn % 2 == 0 {
                    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
                } else {
                    drop(lease);
                }
            }
        });
    }
    tasks.join_all().await;
    for locks in clients {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
    }
}

/// A waiter gets the lock soon after its release, in the same client and in another one.
pub async fn waiter_gets_the_released_lock<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let here = locks(&store);
    for (there, is_dropped) in
        [(here.clone(), false), (here.clone(), true), (locks(&store), false), (locks(&store), true)]
    {
        let lease = here.lock("a").await.unwrap();
        let waiter = tokio::spawn(there.lock("a").wait(LONG).into_future());
        sleep(Duration::from_millis(300)).await;
        assert!(!waiter.is_finished());
        let freed = Instant::now();
        if is_dropped {
            drop(lease);
        } else {
            lease.release().await.unwrap();
        }
        let lease = waiter.await.unwrap().unwrap();
        assert!(freed.elapsed() < SLACK, "{:?}", freed.elapsed());
        lease.release().await.unwrap();
    }
}

/// A wait ends after its time, and a caller with no time does not wait.
pub async fn wait_ends_in_time<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let here = locks(&store);
    let _lease = here.lock("a").await.unwrap();
    for there in [here.clone(), locks(&store)] {
        for wait in [Duration::ZERO, Duration::from_millis(1), SHORT] {
            let start = Instant::now();
            let error = there.lock("a").wait(wait).await.unwrap_err();
            assert!(error.is_busy(), "{error:?}");
            let took = start.elapsed();
            assert!(took >= wait && took < wait + SLACK, "{took:?} for {wait:?}");
        }
    }
}

/// A waiter gets the lock of a dead holder when the lease has expired.
pub async fn waiter_gets_the_lock_of_a_dead_holder<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let start = Instant::now();
    let fence = take(&store, &LockKey::new("default", "a"), &claim(SHORT * 2)).await;
    let lease = locks(&store).lock("a").await.unwrap();
    let took = start.elapsed();
    assert!(took >= SHORT * 2 && took < SHORT * 2 + SLACK, "{took:?}");
    assert!(lease.fence() > fence);
}

/// Within one client, waiters are served in order of arrival.
pub async fn waiters_are_served_in_order<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = locks(&store).wait(LONG);
    let lease = locks.lock("a").await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for i in 0..50 {
        let (mut waiting, served) = (locks.lock("a").into_future(), Arc::clone(&served));
        // Queued before the next waiter arrives.
        let is_waiting = poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await;
        assert!(is_waiting);
        tasks.spawn(async move {
            let lease = waiting.await.unwrap();
            served.lock().unwrap().push(i);
            lease.release().await.unwrap();
        });
    }
    drop(lease);
    tasks.join_all().await;
    assert_eq!(*served.lock().unwrap(), (0..50).collect::<Vec<_>>());
}

/// The number of waiters is limited, and a waiter that leaves makes room for another.
pub async fn wait_queue_is_bounded<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = locks(&store).max_waiters(2).wait(LONG);
    let lease = locks.lock("a").await.unwrap();
    let waiter = || {
        let mut waiting = locks.lock("a").into_future();
        // The first poll adds the waiter to the queue.
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        tokio::spawn(waiting)
    };
    let (one, other) = (waiter(), waiter());
    assert!(matches!(locks.lock("a").await, Err(LockError::QueueFull(_))));
    one.abort();
    let _ = one.await;
    let third = waiter();
    assert!(matches!(locks.lock("a").await, Err(LockError::QueueFull(_))));
    drop(lease);
    drop(other.await.unwrap().unwrap());
    drop(third.await.unwrap().unwrap());
    timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
}

/// A lease is renewed while a handle exists.
pub async fn held_lease_is_renewed<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store), locks(&store));
    let lease = here.lock("a").ttl(SHORT).await.unwrap();
    let ends = Instant::now() + SHORT * 4;
    while Instant::now() < ends {
        assert!(there.try_lock("a").await.is_err_and(|error| error.is_busy()));
        assert_eq!(lease.state(), LeaseState::Held);
        assert!(lease.check().is_ok() && lease.remaining() > Duration::ZERO && lease.remaining() <= SHORT);
        sleep(SHORT / 8).await;
    }
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    drop(there.try_lock("a").await.unwrap());
}

/// The lock is released with the last handle of a lease, and all handles have the same fence.
pub async fn second_handle_keeps_the_lock<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store), locks(&store));
    let outer = here.lock("a").await.unwrap();
    let (inner, innermost) = (outer.reenter(), outer.reenter().reenter());
    assert_eq!((inner.fence(), innermost.fence()), (outer.fence(), outer.fence()));
    assert_eq!(outer.release().await.unwrap(), ReleaseOutcome::Shared);
    drop(inner);
    for locks in [&here, &there] {
        assert!(locks.try_lock("a").await.is_err_and(|error| error.is_busy()));
    }
    assert_eq!(innermost.release().await.unwrap(), ReleaseOutcome::Released);
    drop(there.try_lock("a").await.unwrap());
}

/// A lease is lost after its maximum hold time. The lock is free after the holder has released the lost lease.
pub async fn max_hold_ends_a_lease<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = locks(&store).max_hold(SHORT);
    let start = Instant::now();
    let lease = locks.lock("a").await.unwrap();
    let lost = timeout(LONG, lease.lost()).await.unwrap();
    let took = start.elapsed();
    assert_eq!(lost.reason(), LossReason::MaxHold);
    assert!(took >= SHORT && took < SHORT + SLACK, "{took:?}");
    assert_eq!((lease.state(), lease.remaining()), (LeaseState::Lost, Duration::ZERO));
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Lost);
    drop(locks.lock("a").await.unwrap());
}

/// A body runs under the lock, is dropped when the lease is lost, and may not wait for the lock that it holds.
pub async fn run_drops_its_body_if_the_lease_is_lost<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store), locks(&store));
    let outcome = here.run("a", async |lease| {
        assert!(there.try_lock("a").await.is_err_and(|error| error.is_busy()));
        assert!(matches!(here.lock("a").await, Err(LockError::Nested(_))));
        assert!(matches!(here.run("b", async |_| here.try_lock("a").await).await, Ok(Err(LockError::Nested(_)))));
        drop(here.try_lock("b").await.unwrap());
        lease.fence()
    });
    let fence = outcome.await.unwrap();
    assert!(there.try_lock("a").await.unwrap().fence() > fence);

    let got_through = Arc::new(AtomicUsize::new(0));
    let outcome = here.lock("c").max_hold(SHORT).run(async |_| {
        sleep(LONG).await;
        got_through.fetch_add(1, Ordering::SeqCst);
    });
    let error = LockError::from(timeout(LONG, outcome).await.unwrap().unwrap_err());
    assert!(error.is_lost() && got_through.load(Ordering::SeqCst) == 0, "{error:?}");
    drop(there.lock("c").await.unwrap());
}

/// Invalid times are rejected with the name of the setting. The largest valid times work.
pub async fn invalid_times_are_refused_by_name<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = locks(&store);
    for ttl in [Duration::ZERO, Duration::from_millis(1), Duration::from_secs(86_400 * 365), Duration::MAX] {
        let error = locks.lock("a").ttl(ttl).await.unwrap_err();
        assert!(matches!(error, LockError::Config(ConfigError::TtlOutOfRange { .. })), "{error:?}");
    }
    for (locks, setting) in
        [(locks.clone().deadline(Duration::ZERO), "deadline"), (locks.clone().max_hold(Duration::ZERO), "max_hold")]
    {
        let error = locks.lock("a").await.unwrap_err();
        assert!(
            matches!(&error, LockError::Config(error) if *error == ConfigError::ZeroTimeout { setting }),
            "{error:?}"
        );
    }
    drop(locks.lock("a").ttl(Claim::MAX_TTL).wait(Duration::MAX).max_hold(Duration::MAX).await.unwrap());
    // An acquisition waits for a release in progress until the deadline, even a very long one.
    let slow = locks.clone().deadline(Duration::MAX);
    let giving = slow.lock("a").await.unwrap().release();
    let (released, next) = tokio::join!(giving, slow.try_lock("a").into_future());
    assert_eq!(released.unwrap(), ReleaseOutcome::Released);
    drop(next.unwrap());
    timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
}

/// After the start of a shutdown, no lock is granted, and waiters get an error. The shutdown ends when the last lease is released.
pub async fn shutdown_waits_for_held_leases<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = locks(&store);
    let lease = locks.lock("a").await.unwrap();
    let waiter = tokio::spawn(locks.lock("a").into_future());
    let contender = tokio::spawn(self::locks(&store).lock("a").into_future());
    sleep(Duration::from_millis(100)).await;
    let over = tokio::spawn({
        let locks = locks.clone();
        async move { locks.shutdown().await }
    });
    assert!(matches!(waiter.await.unwrap(), Err(LockError::Closed(_))));
    assert!(matches!(locks.lock("b").await, Err(LockError::Closed(_))));
    assert!(!over.is_finished());
    drop(lease);
    timeout(LONG, over).await.expect("the shutdown ends").unwrap();
    // A shutdown does not affect other clients.
    drop(contender.await.unwrap().unwrap());
}

/// A request for any segment gets a free one. If no segment is free, it waits.
pub async fn any_free_segment_is_granted<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store).wait(LONG), locks(&store).wait(LONG));
    let (here, there) = (Segmented::new(&here, "sku:1", 10), Segmented::new(&there, "sku:1", 10));
    let mut taken = Vec::new();
    for turn in 0..10 {
        let segmented = if turn % 2 == 0 { &here } else { &there };
        taken.push(segmented.any().await.unwrap());
    }
    taken.sort_by_key(Segment::index);
    let indices: Vec<_> = taken.iter().map(Segment::index).collect();
    assert_eq!(indices, (0..10).collect::<Vec<_>>());
    for segmented in [&here, &there] {
        assert!(segmented.any().wait(Duration::ZERO).await.is_err_and(|error| error.is_busy()));
        assert!(segmented.any().among(|_| false).wait(LONG).await.is_err_and(|error| error.is_busy()));
    }
    let waiter = tokio::spawn(there.any().into_future());
    sleep(Duration::from_millis(200)).await;
    let freed = Instant::now();
    taken.remove(7).release().await.unwrap();
    let segment = waiter.await.unwrap().unwrap();
    assert_eq!(segment.index(), 7);
    // At most one wait for each of the other segments comes before the free one.
    assert!(freed.elapsed() < SLACK * 3, "{:?}", freed.elapsed());
    drop(segment);
    // Only the wanted segments.
    drop(taken.remove(3));
    let segment = here.any().among(|index| index == 3).await.unwrap();
    assert_eq!((segment.index(), Segmented::new(&locks(&store), "none", 0).segments()), (3, 1));
    assert!(here.one(13).wait(Duration::ZERO).await.is_err_and(|error| error.is_busy()));
}

/// A semaphore admits as many holders as it has permits. The permits of dead holders count until they expire. A waiter gets in when a
/// permit is released.
pub async fn semaphore_grants_its_permits<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let semaphore = || Semaphore::new(store.clone(), "semaphores", 3).deadline(Duration::from_secs(10)).wait(LONG);
    let (here, there) = (semaphore(), semaphore());
    let claim = Claim { kind: LockKind::Semaphore, permits: 3, ..claim(SHORT * 2) };
    let dead = Instant::now();
    let mut last = take(&store, &LockKey::new("semaphores", "a"), &claim).await;
    let mut permits = Vec::new();
    for semaphore in [&here, &there] {
        let permit = semaphore.acquire("a").await.unwrap();
        assert!(permit.fence() > last);
        last = permit.fence();
        permits.push(permit);
    }
    for semaphore in [&here, &there] {
        let error = semaphore.try_acquire("a").await.unwrap_err();
        assert!(matches!(&error, LockError::Busy(busy) if busy.retry_after() <= SHORT * 2), "{error:?}");
    }
    permits.push(there.acquire("a").await.unwrap());
    assert!(dead.elapsed() >= SHORT * 2, "{:?}", dead.elapsed());
    // Two queued waiters get in one after the other.
    let mut waiters = JoinSet::new();
    for _ in 0..2 {
        waiters.spawn(here.acquire("a").into_future());
    }
    sleep(Duration::from_millis(300)).await;
    assert!(waiters.try_join_next().is_none());
    let freed = Instant::now();
    for turn in 0..2 {
        if turn == 0 {
            permits.remove(0).release().await.unwrap();
        } else {
            drop(permits.remove(0));
        }
        // The waiter that was first in the queue.
        permits.push(waiters.join_next().await.unwrap().unwrap().unwrap());
    }
    assert!(freed.elapsed() < SLACK * 2, "{:?}", freed.elapsed());
    drop(permits);
    for semaphore in [here, there] {
        timeout(LONG, semaphore.shutdown()).await.expect("the shutdown ends");
        assert!(matches!(semaphore.acquire("a").await, Err(LockError::Closed(_))));
    }
    for permits in [0, 1_001] {
        let error = Semaphore::new(store.clone(), "semaphores", permits).acquire("a").await.unwrap_err();
        assert!(matches!(error, LockError::Config(ConfigError::PermitsOutOfRange { .. })), "{error:?}");
    }
}

/// Concurrent holders never exceed the number of permits. The largest number of permits works as well.
pub async fn permits_are_exact<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let clients =
        [(); 2].map(|()| Semaphore::new(store.clone(), "semaphores", 5).deadline(Duration::from_secs(10)).wait(LONG));
    let (inside, max) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for task in 0..24 {
        let (semaphore, inside, max) = (clients[task % 2].clone(), Arc::clone(&inside), Arc::clone(&max));
        tasks.spawn(async move {
            for _ in 0..10 {
                let permit = semaphore.acquire("a").await.unwrap();
                max.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                drop(permit);
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(max.load(Ordering::SeqCst), 5);
    let many = Semaphore::new(store.clone(), "semaphores", 1_000).deadline(Duration::from_secs(10));
    let mut permits = Vec::new();
    for _ in 0..1_000 {
        permits.push(many.try_acquire("b").await.unwrap());
    }
    assert!(many.try_acquire("b").await.is_err_and(|error| error.is_busy()));
    permits.pop().unwrap().release().await.unwrap();
    drop(many.try_acquire("b").await.unwrap());
    drop(permits);
    timeout(LONG, many.shutdown()).await.expect("the shutdown ends");
}

/// Of several keys, all locks are acquired or none, in any order and with repeated keys. Concurrent requests do not deadlock.
pub async fn several_locks_are_taken_all_or_none<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store).wait(LONG), locks(&store).wait(LONG));
    let all = here.lock_all(["b", "a", "c", "a"]).await.unwrap();
    let keys: Vec<_> = all.leases().iter().map(|lease| lease.lock().key().as_str().to_owned()).collect();
    assert_eq!(keys, ["a", "b", "c"]);
    assert!(all.check().is_ok() && all.remaining() > Duration::ZERO);
    // The locks before the held one are released.
    let error = there.lock_all(["0", "1", "b"]).wait(Duration::from_millis(200)).await.unwrap_err();
    assert!(matches!(&error, LockError::Busy(busy) if busy.lock().key().as_str() == "b"), "{error:?}");
    let others = here.lock_all(["0", "1"]).wait(Duration::ZERO).await.unwrap();
    assert_eq!(others.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(all.release().await.unwrap(), ReleaseOutcome::Released);
    assert!(there.lock_all(Vec::<String>::new()).await.unwrap().leases().is_empty());

    let mut tasks = JoinSet::new();
    for (turn, keys) in [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"], ["c", "b", "a"]].into_iter().enumerate() {
        let locks = if turn % 2 == 0 { here.clone() } else { there.clone() };
        tasks.spawn(async move {
            for _ in 0..10 {
                let all = locks.lock_all(keys).await.unwrap();
                yield_now().await;
                drop(all);
            }
        });
    }
    timeout(LONG, tasks.join_all()).await.expect("every waiter is served");
    let all = here.clone().max_hold(SHORT).lock_all(["a", "b"]).await.unwrap();
    assert_eq!(timeout(LONG, all.lost()).await.unwrap().reason(), LossReason::MaxHold);
    assert_eq!(all.release().await.unwrap(), ReleaseOutcome::Lost);
    for locks in [here, there] {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
    }
}

fn rw_locks<S: LockStore + Clone + Send + Sync + 'static>(store: &S) -> RwLocks {
    RwLocks::new(store.clone(), "rw_locks").deadline(Duration::from_secs(10)).wait(LONG)
}

/// The claim of a queued waiter.
fn queued_claim(is_shared: bool, ttl: Duration) -> Claim {
    let (kind, permits) = if is_shared { (LockKind::ReadWrite, 100) } else { (LockKind::Exclusive, 1) };
    Claim { kind, is_shared, permits, queueing: Queueing::Enqueue, ..claim(ttl) }
}

async fn is_first_in_queue<S: LockStore>(store: &S, lock: &LockKey, claim: &Claim) -> bool {
    match store.acquire(lock, claim).await.unwrap() {
        Acquired::Queued { is_first, .. } => is_first,
        answer => panic!("the claim for {lock} should be queued: {answer:?}"),
    }
}

/// Locks that can be acquired in one step.
fn in_one_shard<S: LockStore>(store: &S, count: usize) -> Vec<LockKey> {
    let mut shards: HashMap<u32, Vec<LockKey>> = HashMap::new();
    for key in 0..1_000_000_u32 {
        let lock = LockKey::new("contract", key);
        let shard = shards.entry(store.shard(&lock)).or_default();
        shard.push(lock);
        if shard.len() == count {
            return std::mem::take(shard);
        }
    }
    panic!("no {count} locks have the same shard");
}

/// Several leases are acquired in one step, or none. A repeated acquisition changes nothing, and each fence is larger than all before it.
pub async fn several_leases_are_taken_in_one_step<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = in_one_shard(&store, 3);
    let wanted = |ttl| locks.iter().map(|lock| (*lock, Claim { fences: 7, ..claim(ttl) })).collect::<Vec<_>>();
    let fences = |answers: Vec<Acquired>| {
        let fence = |answer| match answer {
            Acquired::Granted { fence } => Some(fence),
            _ => None,
        };
        answers.into_iter().map(fence).collect::<Option<Vec<_>>>()
    };
    assert!(store.acquire_all(&[]).await.unwrap().is_empty());
    let mine = wanted(LONG);
    let first = fences(store.acquire_all(&mine).await.unwrap()).unwrap();
    assert_eq!(fences(store.acquire_all(&mine).await.unwrap()).unwrap(), first);
    for lock in &locks {
        busy(&store, lock).await;
    }
    // A single held lock prevents the acquisition of all locks.
    for free in 0..2 {
        assert!(store.release(&mine[free].0, &mine[free].1.token).await.unwrap().was_held);
        let answers = store.acquire_all(&wanted(LONG)).await.unwrap();
        for (at, answer) in answers.into_iter().enumerate() {
            let Acquired::Busy { remaining } = answer else { panic!("{at}: {answer:?}") };
            assert_eq!(remaining.is_zero(), at <= free, "{at}: {remaining:?}");
        }
        let passing = claim(LONG);
        take(&store, &locks[free], &passing).await;
        assert!(store.release(&locks[free], &passing.token).await.unwrap().was_held);
    }
    assert!(store.release(&mine[2].0, &mine[2].1.token).await.unwrap().was_held);
    let second = fences(store.acquire_all(&wanted(SHORT)).await.unwrap()).unwrap();
    assert!(first.iter().zip(&second).all(|(first, second)| first + 6 < *second), "{first:?} {second:?}");
    // The leases expire, and can be renewed before.
    sleep(SHORT).await;
    let third = wanted(LONG);
    let mut answer = store.acquire_all(&third).await.unwrap();
    while fences(answer).is_none() {
        sleep(Duration::from_millis(5)).await;
        answer = store.acquire_all(&third).await.unwrap();
    }
    let renewals: Vec<_> = third.iter().map(|(lock, claim)| Renewal::new(*lock, claim.token, LONG)).collect();
    assert_eq!(store.renew(&renewals).await.unwrap(), [true; 3]);
    // Of many callers with different orders of the locks, exactly one gets them.
    for (lock, claim) in &third {
        assert!(store.release(lock, &claim.token).await.unwrap().was_held);
    }
    let mut callers = JoinSet::new();
    for turn in 0..30 {
        let (store, mut wanted) = (store.clone(), wanted(LONG));
        wanted.rotate_left(turn % 3);
        callers.spawn(async move { store.acquire_all(&wanted).await.unwrap() });
    }
    let answers = callers.join_all().await;
    assert_eq!(answers.into_iter().filter_map(fences).count(), 1);
}

/// Waiters are served in order of arrival, across clients, also if waiters between them give up.
pub async fn fair_locks_are_granted_in_order<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let store = Observed::new(store);
    let clients = [(); 3].map(|()| locks(&store).fair().wait(LONG));
    let lease = clients[0].lock("a").await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    let mut leaving = Vec::new();
    for i in 0..18 {
        let (locks, served) = (clients[i % 3].clone(), Arc::clone(&served));
        if i % 6 == 2 {
            leaving.push(tokio::spawn(locks.lock("a").into_future()));
        } else {
            tasks.spawn(async move {
                let lease = locks.lock("a").await.unwrap();
                served.lock().unwrap().push((i, lease.fence()));
                if i % 2 == 0 { drop(lease) } else { drop(lease.release().await) }
            });
        }
        // Queued before the next waiter arrives.
        store.has_line_of(i + 1).await;
    }
    for locks in &clients {
        assert!(locks.try_lock("a").await.is_err_and(|error| error.is_busy()));
    }
    leaving.iter().for_each(tokio::task::JoinHandle::abort);
    let freed = Instant::now();
    lease.release().await.unwrap();
    timeout(LONG, tasks.join_all()).await.expect("every waiter is served");
    assert!(freed.elapsed() < SLACK * 3, "{:?}", freed.elapsed());
    let served = std::mem::take(&mut *served.lock().unwrap());
    assert!(served.is_sorted(), "{served:?}");
    assert!(served.is_sorted_by_key(|(_, fence)| *fence), "{served:?}");
    assert_eq!(served.len(), 15);
    for locks in clients {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
    }
}

/// A dead waiter blocks the waiters behind it until its position has expired and a waiter polls.
pub async fn dead_waiter_loses_its_position<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let locks = locks(&store).fair().wait(LONG);
    let lease = locks.lock("a").await.unwrap();
    let start = Instant::now();
    assert!(is_first_in_queue(&store, lease.lock(), &queued_claim(false, LONG)).await);
    let waiter = tokio::spawn(locks.lock("a").into_future());
    sleep(Duration::from_millis(100)).await;
    lease.release().await.unwrap();
    drop(waiter.await.unwrap().unwrap());
    let took = start.elapsed();
    assert!(took >= Claim::POSITION_TTL && took < Claim::POSITION_TTL + Duration::from_secs(1) + SLACK, "{took:?}");
    timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
}

/// Readers share the lock, up to the number of permits. A writer holds it alone. Each grant has a larger fence.
pub async fn readers_share_and_writers_exclude<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (rw_locks(&store), rw_locks(&store));
    let (one, other) = (here.read("a").await.unwrap(), there.read("a").await.unwrap());
    let third = there.try_read("a").await.unwrap();
    assert!(one.fence() < other.fence() && other.fence() < third.fence());
    for locks in [&here, &there] {
        assert!(locks.try_write("a").await.is_err_and(|error| error.is_busy()));
        locks.try_write("b").await.unwrap().release().await.unwrap();
    }
    for reader in [one, other] {
        assert_eq!(reader.release().await.unwrap(), ReleaseOutcome::Released);
    }
    assert!(here.try_write("a").await.is_err_and(|error| error.is_busy()));
    let fence = third.fence();
    assert_eq!(third.release().await.unwrap(), ReleaseOutcome::Released);
    let writer = here.try_write("a").await.unwrap();
    assert!(writer.fence() > fence);
    for locks in [&here, &there] {
        assert!(locks.try_read("a").await.is_err_and(|error| error.is_busy()));
        assert!(locks.try_write("a").await.is_err_and(|error| error.is_busy()));
    }
    assert_eq!(writer.release().await.unwrap(), ReleaseOutcome::Released);

    let readers = [(); 4].map(|()| Claim { permits: 3, queueing: Queueing::Yield, ..queued_claim(true, LONG) });
    for reader in &readers[..3] {
        take(&store, &lock("c"), reader).await;
    }
    let answer = store.acquire(&lock("c"), &readers[3]).await.unwrap();
    assert!(matches!(answer, Acquired::Busy { .. }), "{answer:?}");
    for locks in [here, there] {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
    }
}

/// Readers that arrive while a writer waits are queued behind it, and hold the lock together after it. Writers are queued behind readers,
/// too.
pub async fn readers_wait_behind_a_waiting_writer<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let store = Observed::new(store);
    let clients = [rw_locks(&store), rw_locks(&store)];
    let reader = clients[0].read("a").await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for (i, is_writer) in [true, false, false, false, true, false].into_iter().enumerate() {
        let (locks, served) = (clients[i % 2].clone(), Arc::clone(&served));
        tasks.spawn(async move {
            let request = if is_writer { locks.write("a") } else { locks.read("a") };
            let lease = request.await.unwrap();
            served.lock().unwrap().push((i, lease.fence()));
            sleep(Duration::from_millis(50)).await;
            drop(lease);
        });
        // Queued before the next waiter arrives.
        store.has_line_of(i + 1).await;
        assert!(clients[1].try_read("a").await.is_err_and(|error| error.is_busy()), "a writer waits");
    }
    let freed = Instant::now();
    drop(reader);
    timeout(LONG, tasks.join_all()).await.expect("every waiter is served");
    assert!(freed.elapsed() < SLACK * 3, "{:?}", freed.elapsed());
    let served = std::mem::take(&mut *served.lock().unwrap());
    let mut order: Vec<_> = served.iter().map(|(i, _)| *i).collect();
    // Readers that hold the lock together are notified one after the other, and may finish in any order.
    order[1..4].sort_unstable();
    assert_eq!(order, [0, 1, 2, 3, 4, 5]);
    let fence_of = |i: usize| served.iter().find(|(j, _)| *j == i).unwrap().1;
    assert!((1..6).all(|i| fence_of(i - 1) < fence_of(i)), "{served:?}");
    for locks in clients {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
    }
}

/// A dead reader blocks a writer until its own lease expires, even if other readers come and go meanwhile.
pub async fn dead_reader_expires_alone<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let lock = LockKey::new("rw_locks", "a");
    let (dead, alive) = (queued_claim(true, SHORT), queued_claim(true, LONG));
    let start = Instant::now();
    take(&store, &lock, &dead).await;
    while start.elapsed() < SHORT * 3 / 2 {
        let passing = queued_claim(true, LONG);
        take(&store, &lock, &alive).await;
        take(&store, &lock, &passing).await;
        assert!(store.release(&lock, &passing.token).await.unwrap().was_held);
        sleep(SHORT / 8).await;
    }
    assert!(!store.release(&lock, &dead.token).await.unwrap().was_held);
    let renewals = [dead.token, alive.token].map(|token| Renewal::new(lock, token, LONG));
    assert_eq!(store.renew(&renewals).await.unwrap(), [false, true]);
    let writer = Claim { kind: LockKind::ReadWrite, ..queued_claim(false, LONG) };
    assert!(is_first_in_queue(&store, &lock, &writer).await);
    assert!(store.release(&lock, &alive.token).await.unwrap().was_held);
    take(&store, &lock, &writer).await;
}

/// A queued waiter keeps its position with repeated calls. It loses the position without them, and gives it up with a release. A client
/// that does not wait never overtakes a waiter.
pub async fn polling_keeps_a_queue_position<S: LockStore>(store: S) {
    let holder = claim(LONG);
    take(&store, &lock("a"), &holder).await;
    let [first, dead, leaving, last] = [(); 4].map(|()| queued_claim(false, LONG));
    assert!(is_first_in_queue(&store, &lock("a"), &first).await);
    for behind in [&dead, &leaving, &last] {
        assert!(!is_first_in_queue(&store, &lock("a"), behind).await);
    }
    assert!(store.release(&lock("a"), &holder.token).await.unwrap().was_held);
    for queueing in [Queueing::Yield, Queueing::Enqueue] {
        let answer = store.acquire(&lock("a"), &Claim { queueing, ..claim(LONG) }).await.unwrap();
        assert!(!matches!(answer, Acquired::Granted { .. }), "waiters are queued: {answer:?}");
    }
    for behind in [&dead, &leaving, &last] {
        assert!(!is_first_in_queue(&store, &lock("a"), behind).await);
    }
    assert!(!store.release(&lock("a"), &leaving.token).await.unwrap().was_held);
    let start = Instant::now();
    while start.elapsed() < Claim::POSITION_TTL + Duration::from_millis(500) {
        assert!(!is_first_in_queue(&store, &lock("a"), &last).await || start.elapsed() > Claim::POSITION_TTL / 2);
        let answer = store.acquire(&lock("a"), &first).await.unwrap();
        if start.elapsed() < Claim::POSITION_TTL / 2 {
            // The first waiter gets the lock. A repeated call changes nothing.
            assert!(matches!(answer, Acquired::Granted { .. }), "{answer:?}");
        }
        sleep(Duration::from_millis(250)).await;
    }
    assert!(store.release(&lock("a"), &first.token).await.unwrap().was_held);
    // The dead waiter before it is not in the queue any more.
    take(&store, &lock("a"), &last).await;
    assert!(store.release(&lock("a"), &last.token).await.unwrap().was_held);
    take(&store, &lock("a"), &Claim { queueing: Queueing::Yield, ..claim(LONG) }).await;
}

/// Only the next queued waiter is notified. If it leaves, the waiter behind it is next.
pub async fn only_the_next_waiter_is_notified<S: LockStore>(store: S) {
    let holder = queued_claim(false, LONG);
    take(&store, &lock("a"), &holder).await;
    let waiting = [(); 3].map(|()| queued_claim(false, LONG));
    let mut notifications = Vec::new();
    for (i, claim) in waiting.iter().enumerate() {
        assert_eq!(is_first_in_queue(&store, &lock("a"), claim).await, i == 0);
        notifications.push(store.watch(&lock("a"), Some(&claim.token)).await);
    }
    // Precautionary notifications may have arrived until now.
    for notifications in &mut notifications {
        while timeout(Duration::from_millis(50), notifications.next()).await.is_ok() {}
    }
    let quiet = Duration::from_millis(200);
    for turn in 0..3 {
        if turn == 1 {
            // The first waiter gives up.
            store.release(&lock("a"), &waiting[turn].token).await.unwrap();
        } else {
            let holder = if turn == 0 { holder.token } else { waiting[0].token };
            assert!(store.release(&lock("a"), &holder).await.unwrap().was_held);
        }
        let next = if turn == 0 { 0 } else { 2 };
        if turn < 2 {
            timeout(SLACK, notifications[next].next()).await.expect("a notification");
        }
        for (i, notifications) in notifications.iter_mut().enumerate() {
            if turn < 2 || i < 2 {
                assert!(timeout(quiet, notifications.next()).await.is_err(), "waiter {i} was notified in turn {turn}");
            }
        }
        if turn == 0 {
            take(&store, &lock("a"), &waiting[0]).await;
        }
    }
    take(&store, &lock("a"), &waiting[2]).await;
}

/// If no waiter is queued, a release notifies the other watchers, even if the holder acquired the lease through the queue.
pub async fn without_a_queue_all_watchers_are_notified<S: LockStore>(store: S) {
    for holder in [queued_claim(false, LONG), queued_claim(true, LONG)] {
        take(&store, &lock("a"), &holder).await;
        let mut notifications = store.watch(&lock("a"), None).await;
        // Precautionary notifications may have arrived until now.
        while timeout(Duration::from_millis(50), notifications.next()).await.is_ok() {}
        assert!(store.release(&lock("a"), &holder.token).await.unwrap().was_held);
        timeout(SLACK, notifications.next()).await.expect("a notification");
    }
    take(&store, &lock("a"), &claim(LONG)).await;
}

/// Readers and writers never hold the lock together, all of them are served, and each writer has a larger fence than the writers before it.
pub async fn readers_and_writers_never_meet<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let clients = [rw_locks(&store), rw_locks(&store)];
    // The number of readers, and 1,000 for each writer.
    let (inside, fence, together) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for task in 0..12 {
        let locks = clients[task % 2].clone();
        let (inside, fence, together) = (Arc::clone(&inside), Arc::clone(&fence), Arc::clone(&together));
        tasks.spawn(async move {
            for turn in 0..10 {
                if (task + turn) % 3 == 0 {
                    let lease = locks.write("a").await.unwrap();
                    assert_eq!(inside.fetch_add(1_000, Ordering::SeqCst), 0, "a writer shares the lock");
                    let before = fence.swap(lease.fence(), Ordering::SeqCst);
                    assert!(lease.fence() > before, "{} after {before}", lease.fence());
                    sleep(Duration::from_millis(1)).await;
                    inside.fetch_sub(1_000, Ordering::SeqCst);
                } else {
                    let lease = locks.read("a").await.unwrap();
                    let others = inside.fetch_add(1, Ordering::SeqCst);
                    assert!(others < 1_000, "a reader shares the lock with a writer");
                    together.fetch_max(others + 1, Ordering::SeqCst);
                    sleep(Duration::from_millis(2)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(lease);
                }
            }
        });
    }
    timeout(LONG, tasks.join_all()).await.expect("every waiter is served");
    assert!(together.load(Ordering::SeqCst) > 1, "readers share the lock");
    for locks in clients {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
    }
}

/// A waiter that gives up leaves the queue, and does not block others. This holds for readers and writers.
pub async fn abandoned_wait_leaves_the_queue<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let store = Observed::new(store);
    let (here, there) = (rw_locks(&store), rw_locks(&store));
    let reader = here.read("a").await.unwrap();
    // The first gives up after its wait, the second when it is dropped.
    let error = there.write("a").wait(Duration::from_millis(300)).await.unwrap_err();
    assert!(error.is_busy(), "{error:?}");
    let start = Instant::now();
    drop(there.read("a").await.unwrap());
    let writer = tokio::spawn(there.write("a").into_future());
    store.has_line_of(1).await;
    let next = tokio::spawn(here.read("a").into_future());
    store.has_line_of(2).await;
    assert!(!next.is_finished());
    writer.abort();
    drop(next.await.unwrap().unwrap());
    assert!(start.elapsed() < Duration::from_millis(600) + SLACK, "{:?}", start.elapsed());
    // The number of waiters in a process is limited.
    let few = RwLocks::new(store.clone(), "rw_locks").max_waiters(1).wait(LONG).deadline(Duration::from_secs(10));
    let waiters = [(); 2].map(|()| tokio::spawn(few.write("a").into_future()));
    store.has_line_of(2).await;
    assert!(matches!(few.write("a").await, Err(LockError::QueueFull(_))));
    assert!(few.try_write("a").await.is_err_and(|error| error.is_busy()));
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    drop(reader);
    drop(here.write("a").wait(SLACK).await.unwrap());
    // A body that would wait for its own lease gets an error.
    let nested = here.read("a").run(async |_| here.write("a").await);
    assert!(matches!(nested.await, Ok(Err(LockError::Nested(_)))));
    for locks in [here, there, few] {
        timeout(LONG, locks.shutdown()).await.expect("the shutdown ends");
        assert!(matches!(locks.read("a").await, Err(LockError::Closed(_))));
    }
}

/// Claims of every kind, with every treatment of the queue.
fn of_every_kind() -> Vec<Claim> {
    let all = |kind, permits, is_shared, queueing| Claim { kind, permits, is_shared, queueing, ..claim(LONG) };
    vec![
        all(LockKind::Exclusive, 1, false, Queueing::Bypass),
        all(LockKind::Exclusive, 1, false, Queueing::Enqueue),
        all(LockKind::Semaphore, 1, false, Queueing::Bypass),
        all(LockKind::Semaphore, 3, false, Queueing::Bypass),
        all(LockKind::Semaphore, 3, false, Queueing::Enqueue),
        all(LockKind::ReadWrite, 1, false, Queueing::Enqueue),
        all(LockKind::ReadWrite, 1, false, Queueing::Yield),
        all(LockKind::ReadWrite, 100, true, Queueing::Enqueue),
        all(LockKind::ReadWrite, 100, true, Queueing::Yield),
    ]
}

/// While a key is held as one kind, a claim of another kind gets that kind in the reply. After the release, the key may be held as any
/// kind.
///
/// Once, a permit was granted beside an exclusive lock of the same key.
pub async fn key_is_held_as_one_kind<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    for (at, held) in of_every_kind().into_iter().enumerate() {
        let lock = LockKey::new("kinds", at as u32);
        for wanted in of_every_kind() {
            take(&store, &lock, &held).await;
            let answer = store.acquire(&lock, &wanted).await.unwrap();
            if wanted.kind == held.kind {
                assert!(!matches!(answer, Acquired::OtherKind { .. }), "{held:?}, {wanted:?}: {answer:?}");
            } else {
                assert_eq!(answer, Acquired::OtherKind { held: held.kind }, "{held:?}, {wanted:?}");
            }
            store.release(&lock, &wanted.token).await.unwrap();
            assert!(store.release(&lock, &held.token).await.unwrap().was_held);
            take(&store, &lock, &wanted).await;
            assert!(store.release(&lock, &wanted.token).await.unwrap().was_held);
        }
    }
    let deadline = Duration::from_secs(10);
    let locks = Locks::new(store.clone(), "kinds").deadline(deadline).wait(Duration::ZERO);
    let semaphore = Semaphore::new(store.clone(), "kinds", 3).deadline(deadline).wait(Duration::ZERO);
    let rw_locks = RwLocks::new(store.clone(), "kinds").deadline(deadline).wait(SHORT);
    let error = |error: LockError| match error {
        LockError::OtherKind(error) => (error.wanted(), error.held()),
        error => panic!("{error:?}"),
    };
    let lease = locks.lock("a").await.unwrap();
    let wanted = error(semaphore.acquire("a").await.unwrap_err());
    assert_eq!(wanted, (LockKind::Semaphore, LockKind::Exclusive));
    for request in [rw_locks.read("a"), rw_locks.write("a")] {
        assert_eq!(error(request.await.unwrap_err()), (LockKind::ReadWrite, LockKind::Exclusive));
    }
    assert!(locks.clone().fair().lock("a").await.is_err_and(|error| error.is_busy()));
    lease.release().await.unwrap();
    let permit = semaphore.acquire("a").await.unwrap();
    assert_eq!(error(locks.lock("a").await.unwrap_err()), (LockKind::Exclusive, LockKind::Semaphore));
    assert_eq!(error(locks.lock_all(["a", "b"]).await.unwrap_err()), (LockKind::Exclusive, LockKind::Semaphore));
    drop(locks.lock("b").await.unwrap());
    permit.release().await.unwrap();
    drop(locks.lock("a").wait(LONG).await.unwrap());
    locks.shutdown().await;
    semaphore.shutdown().await;
    rw_locks.shutdown().await;
}

/// A store grants larger fences than the given floor, even if it lost its data or its clock is wrong.
pub async fn fences_are_larger_than_the_floor<S: LockStore>(store: S) {
    let day_us = 86_400_000_000;
    let mut floor = take(&store, &lock("start"), &claim(LONG)).await + day_us;
    let [first, second] = in_one_shard(&store, 2).try_into().unwrap();
    for (at, held) in of_every_kind().into_iter().enumerate() {
        let fence = take(&store, &LockKey::new("floor", at as u32), &Claim { floor, ..held }).await;
        assert!(fence > floor, "{fence} of {held:?}");
        floor = fence + day_us;
    }
    let wanted = [first, second].map(|lock| (lock, Claim { floor, fences: 16, ..claim(LONG) }));
    for answer in store.acquire_all(&wanted).await.unwrap() {
        assert!(fence(&answer) > Some(floor), "{answer:?}");
    }
    let max = Claim { floor: u64::MAX, fences: 65_536, ..claim(LONG) };
    let fence = take(&store, &lock("most"), &max).await;
    assert!(fence > Claim::MAX_FLOOR && fence + 65_536 < 1 << 53, "{fence}");
}

/// Removes the lease of the current holder without telling it, like a store that lost its data.
async fn lose<S: LockStore>(store: &Tokens<S>, locks: &[LockKey]) {
    for lock in locks {
        let token = *store.tokens.lock().unwrap().get(lock).expect("the lock was granted");
        assert!(store.inner.release(lock, &token).await.unwrap().was_held);
    }
}

/// A store that records the latest granted token of each lock.
#[derive(Clone)]
struct Tokens<S> {
    inner: S,
    tokens: Arc<Mutex<HashMap<LockKey, Token>>>,
}

impl<S: LockStore + Sync> LockStore for Tokens<S> {
    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let answer = self.inner.acquire(lock, claim).await?;
        if fence(&answer).is_some() {
            self.tokens.lock().unwrap().insert(*lock, claim.token);
        }
        Ok(answer)
    }

    async fn acquire_all(&self, wanted: &[(LockKey, Claim)]) -> Result<Vec<Acquired>, StoreError> {
        let answers = self.inner.acquire_all(wanted).await?;
        if answers.iter().all(|answer| fence(answer).is_some()) {
            self.tokens.lock().unwrap().extend(wanted.iter().map(|(lock, claim)| (*lock, claim.token)));
        }
        Ok(answers)
    }

    fn shard(&self, lock: &LockKey) -> u32 {
        self.inner.shard(lock)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        self.inner.renew(renewals).await
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        self.inner.release(lock, token).await
    }

    async fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        self.inner.watch(lock, waiter).await
    }

    fn reach(&self) -> Reach {
        self.inner.reach()
    }

    fn add_to_shutdown(&self, target: &ShutdownTarget) {
        self.inner.add_to_shutdown(target);
    }
}

/// If a lease was lost shortly before its release, the release reports the loss. A body under the lease then ends with an error that
/// carries its output.
///
/// Once, the release reported success.
pub async fn release_reports_a_lost_lease<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let store = &Tokens { inner: store, tokens: Arc::default() };
    let reports_loss = |outcome: Result<u32, RunError<u32>>| match outcome {
        Err(RunError::Unprotected { lost, output: 7 }) => assert_eq!(lost.reason(), LossReason::Taken),
        outcome => panic!("{outcome:?}"),
    };
    let body = |lease: Lease| async move {
        lose(store, &[*lease.lock()]).await;
        7
    };
    let locks = locks(store);
    let semaphore = Semaphore::new(store.clone(), "semaphores", 3).deadline(Duration::from_secs(10));
    let (rw_locks, fair) = (rw_locks(store), locks.clone().fair().lock("fair"));
    let requests =
        [locks.lock("a"), locks.try_lock("a"), fair, semaphore.acquire("a"), rw_locks.read("a"), rw_locks.write("b")];
    for request in requests {
        reports_loss(request.run(body).await);
    }
    let segments = Segmented::new(&locks, "sku", 2);
    reports_loss(segments.any().run(|segment: Segment| body(segment.lease().reenter())).await);
    let both = locks.lock_all(["b", "c"]).run(|leases: MultiLease| async move {
        lose(store, &[*leases.leases()[1].lock()]).await;
        7
    });
    reports_loss(both.await);
    let lease = locks.lock("a").await.unwrap();
    lose(store, &[*lease.lock()]).await;
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Lost);
    // Other leases are not affected.
    assert_eq!(locks.run("a", async |_| 7).await.unwrap(), 7);
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
}
