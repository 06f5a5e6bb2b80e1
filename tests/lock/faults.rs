//! Locks under faults: dropped futures, lost leases, missing replies, and Redis killed, stopped and cut off. No fault may leave a lock
//! behind, or let two clients believe that they hold the same lock.

use crate::support;

use std::convert::Infallible;
use std::error::Error as _;
use std::future::{IntoFuture, pending};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use support::locks::{DropAt, History};
use support::processor::ProcessorMeter;
use support::proxy::{Proxy, Traffic};
use support::server::{RedisServer, wait_until};
use support::shared::patient;
use support::stores::delegate_lock;
use support::windows::now_us;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{sleep, timeout};
use tollgate::lock::fencing::FenceLayer;
use tollgate::lock::store::{
    Acquired, Claim, LockRegistry, LockStore, Notifications, Queueing, Released, Renewal, Token,
};
use tollgate::lock::{
    CircuitBreaker, Cursor, LeaseState, LockAdmin, LockKey, LossReason, Redlock, ReleaseOutcome, Replication, RunError,
    RwLocks, Segmented, Semaphore,
};
use tollgate::testing::{Failure, FaultStore, Faults, Verb};
use tollgate::{
    BoxError, ErrorResponder, Lease, Limiter, LockError, LockLayer, Locks, MemoryBackend, Policy, Quota, Reach,
    RedisBackend, RedisOptions, StoreError,
};
use tower::util::BoxCloneService;
use tower::{Layer, ServiceExt, service_fn};

const LONG: Duration = Duration::from_secs(30);
/// Tolerance for a busy machine.
const SLACK: Duration = Duration::from_millis(500);

/// Runs the time-sensitive tests of this file one after the other, because they would slow each other down.
async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

async fn connect(server: &RedisServer) -> RedisBackend {
    patient(server.url()).await
}

/// With the default options, for servers that stop.
async fn impatient(server: &RedisServer) -> RedisBackend {
    RedisBackend::connect(server.url()).await.expect("the server accepts the connection")
}

async fn locks(server: &RedisServer) -> Locks {
    Locks::new(connect(server).await, "default").deadline(Duration::from_secs(2))
}

/// Runs a command on the server, on a connection of its own.
fn command<T: redis::FromRedisValue>(server: &RedisServer, words: &[&str]) -> T {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command.query(&mut server.connection()).unwrap()
}

const LEASE: &str = "tollgate:2:{lock:default:a}:lease";

/// Drops a future after each number of polls, until it completes. Runs `then` after each drop.
macro_rules! drop_everywhere {
    ($future:expr, $then:expr) => {{
        let mut ended = false;
        for polls in 0..100 {
            // The output is dropped before `then`.
            ended = DropAt::new(polls, $future).await.map(drop).is_some();
            $then;
            if ended {
                break;
            }
        }
        assert!(ended, "the future never completed");
    }};
}

/// Drops a lease after a moment.
fn give_back_soon(lease: Lease) {
    tokio::spawn(async move {
        sleep(Duration::from_millis(5)).await;
        drop(lease);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_futures_can_be_dropped_at_any_poll() {
    let server = RedisServer::start();
    let (here, there) = (locks(&server).await, locks(&server).await);
    // The next caller gets the lock at once, without an expiry.
    let is_free = async || drop(timeout(LONG / 3, there.lock("a")).await.unwrap().unwrap());

    drop_everywhere!(here.lock("a").into_future(), is_free().await);
    drop_everywhere!(here.try_lock("a").into_future(), is_free().await);
    drop_everywhere!(here.run("a", async |_| sleep(Duration::from_millis(1)).await), is_free().await);
    drop_everywhere!(
        async {
            let lease = here.lock("a").await.unwrap();
            let more = lease.reenter();
            drop(lease);
            more.release().await.unwrap();
        },
        is_free().await
    );
    // Waits for a holder in another process and in this one, which releases the lock after a moment.
    for holder in [&there, &here] {
        drop_everywhere!(
            async {
                let lease = holder.lock("a").await.unwrap();
                tokio::spawn(async move {
                    sleep(Duration::from_millis(5)).await;
                    drop(lease);
                });
                drop(here.lock("a").wait(LONG).await.unwrap());
            },
            is_free().await
        );
    }
    let fair = here.clone().fair();
    drop_everywhere!(
        async {
            let lease = there.lock("a").await.unwrap();
            tokio::spawn(async move {
                sleep(Duration::from_millis(5)).await;
                drop(lease);
            });
            drop(fair.lock("a").wait(LONG).await.unwrap());
        },
        is_free().await
    );
    drop_everywhere!(here.lock_all(["c", "a", "b"]).into_future(), {
        drop(timeout(LONG / 3, there.lock_all(["a", "b", "c"]).into_future()).await.unwrap().unwrap());
    });
    drop_everywhere!(
        async {
            let lease = there.lock("b").await.unwrap();
            tokio::spawn(async move {
                sleep(Duration::from_millis(5)).await;
                drop(lease);
            });
            drop(here.lock_all(["a", "b"]).wait(LONG).await.unwrap());
        },
        is_free().await
    );
    let rw = async || RwLocks::new(connect(&server).await, "rw_locks").deadline(Duration::from_secs(2));
    let (readers, writers) = (rw().await, rw().await);
    let is_free = async || drop(timeout(LONG / 3, writers.write("a")).await.unwrap().unwrap());
    drop_everywhere!(readers.read("a").into_future(), is_free().await);
    drop_everywhere!(readers.try_read("a").into_future(), is_free().await);
    drop_everywhere!(readers.try_write("a").into_future(), is_free().await);
    for is_writer in [true, false] {
        drop_everywhere!(
            async {
                let lease = if is_writer { readers.read("a") } else { writers.write("a") }.await.unwrap();
                tokio::spawn(async move {
                    sleep(Duration::from_millis(5)).await;
                    drop(lease);
                });
                drop(if is_writer { readers.write("a") } else { readers.read("a") }.wait(LONG).await.unwrap());
            },
            is_free().await
        );
    }
    for locks in [readers, writers] {
        give_back_soon(locks.read("a").await.unwrap());
        drop_everywhere!(locks.shutdown(), yield_now().await);
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
    let lease = here.lock("b").ttl(Duration::from_millis(300)).max_hold(Duration::from_millis(20)).await.unwrap();
    drop_everywhere!(lease.lost(), yield_now().await);
    drop(lease);
    // A waiter of another process asks for the lease, repeatedly.
    let lease = here.lock("b").await.unwrap();
    let asks = tokio::spawn(there.clone().request_release().lock("b").wait(LONG).into_future());
    drop_everywhere!(lease.release_requested(), yield_now().await);
    drop(lease);
    drop(asks.await.unwrap().unwrap());
    let is_free = async || drop(timeout(LONG / 3, there.lock_all(["a", "b"]).into_future()).await.unwrap().unwrap());
    drop_everywhere!(async { here.lock_all(["b", "a"]).await.unwrap().release().await.unwrap() }, is_free().await);
    let short = here.clone().ttl(Duration::from_millis(300)).max_hold(Duration::from_millis(20));
    let leases = short.lock_all(["a", "b"]).await.unwrap();
    drop_everywhere!(leases.lost(), yield_now().await);
    drop(leases);
    for locks in [here, there] {
        drop_everywhere!(locks.shutdown(), yield_now().await);
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
    // No subscription and no lease is left.
    let start = Instant::now();
    while !command::<Vec<String>>(&server, &["PUBSUB", "CHANNELS"]).is_empty() {
        assert!(start.elapsed() < LONG, "a client still listens");
        sleep(Duration::from_millis(50)).await;
    }
    for key in command::<Vec<String>>(&server, &["KEYS", "*"]) {
        let value: Vec<u8> = command(&server, &["GET", &key]);
        // A released exclusive lease ends at 0.
        assert!(value.len() == 8 || (value.len() == 42 && value[8..15] == [0; 7]), "{key} has a holder");
    }
}

/// The same for features that use locks: layers, other kinds of locks, and administration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_any_lock_future_leaves_nothing_behind() {
    let server = RedisServer::start();
    let (here, there) = (locks(&server).await, locks(&server).await.wait(LONG / 3));
    let is_free = async || drop(there.lock("a").await.unwrap());
    let held_for_a_moment = async || {
        let lease = there.lock("a").await.unwrap();
        tokio::spawn(async move {
            sleep(Duration::from_millis(5)).await;
            drop(lease);
        });
    };

    let layer = LockLayer::with_locks(here.clone().wait(LONG)).key(|_: &Request<()>| "a");
    let handler = service_fn(async |_: Request<()>| {
        sleep(Duration::from_millis(1)).await;
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
    });
    let post = || Request::post("/").body(()).unwrap();
    let (attached, detached) = (layer.clone().layer(handler), layer.detached().layer(handler));
    drop_everywhere!(
        async { attached.clone().oneshot(post()).await.unwrap().collect().await.unwrap() },
        is_free().await
    );
    drop_everywhere!(
        async { detached.clone().oneshot(post()).await.unwrap().collect().await.unwrap() },
        is_free().await
    );
    for service in [BoxCloneService::new(attached), BoxCloneService::new(detached)] {
        drop_everywhere!(
            async {
                held_for_a_moment().await;
                service.clone().oneshot(post()).await.unwrap()
            },
            is_free().await
        );
    }
    let ends = LockLayer::with_locks(locks(&server).await).key(|_: &Request<()>| "a").detached();
    let answer = ends.clone().layer(handler).oneshot(post()).await.unwrap();
    tokio::spawn(async move {
        sleep(Duration::from_millis(5)).await;
        drop(answer);
    });
    drop_everywhere!(ends.shutdown(), yield_now().await);
    timeout(LONG, ends.shutdown()).await.expect("nothing is left");
    drop(there.try_lock("a").await.unwrap());

    let segments = Segmented::new(&here, "a", 2);
    let is_free = async || drop(there.lock_all([("a", 0_u16), ("a", 1)]).await.unwrap());
    drop_everywhere!(segments.any().into_future(), is_free().await);
    drop_everywhere!(async { segments.any().await.unwrap().release().await.unwrap() }, is_free().await);
    drop_everywhere!(
        async {
            let both = there.lock_all([("a", 0_u16), ("a", 1)]).await.unwrap();
            tokio::spawn(async move {
                sleep(Duration::from_millis(5)).await;
                drop(both);
            });
            drop(segments.any().wait(LONG).await.unwrap());
        },
        is_free().await
    );

    let semaphore = async || {
        Semaphore::new(connect(&server).await, "semaphores", 2).deadline(Duration::from_secs(2)).wait(LONG / 3)
    };
    let (exports, others) = (semaphore().await, semaphore().await);
    let is_free = async || drop((others.acquire("a").await.unwrap(), others.acquire("a").await.unwrap()));
    drop_everywhere!(exports.acquire("a").into_future(), is_free().await);
    drop_everywhere!(exports.try_acquire("a").into_future(), is_free().await);
    drop_everywhere!(
        async {
            let permits = (others.acquire("a").await.unwrap(), others.acquire("a").await.unwrap());
            tokio::spawn(async move {
                sleep(Duration::from_millis(5)).await;
                drop(permits);
            });
            drop(exports.acquire("a").await.unwrap());
        },
        is_free().await
    );
    let layer = LockLayer::with_semaphore(exports.clone()).key(|_: &Request<()>| "a").layer(handler);
    drop_everywhere!(async { layer.clone().oneshot(post()).await.unwrap().collect().await.unwrap() }, is_free().await);
    drop_everywhere!(
        async {
            give_back_soon(others.acquire("a").await.unwrap());
            give_back_soon(others.acquire("a").await.unwrap());
            layer.clone().oneshot(post()).await.unwrap()
        },
        is_free().await
    );
    for semaphore in [exports, others] {
        give_back_soon(semaphore.acquire("a").await.unwrap());
        drop_everywhere!(semaphore.shutdown(), yield_now().await);
        timeout(LONG, semaphore.shutdown()).await.expect("nothing is left");
    }

    let rw = async || RwLocks::new(connect(&server).await, "rw_locks").deadline(Duration::from_secs(2)).wait(LONG / 3);
    let (pages, others) = (rw().await, rw().await);
    let is_free = async || drop(others.write("a").await.unwrap());
    let moment = async |_| sleep(Duration::from_millis(1)).await;
    drop_everywhere!(pages.read("a").run(moment), is_free().await);
    drop_everywhere!(pages.write("a").run(moment), is_free().await);
    let layer = LockLayer::with_rw_locks(pages.clone()).key(|_: &Request<()>| "a").layer(handler);
    for method in [Method::GET, Method::POST] {
        let request = || Request::builder().method(&method).uri("/").body(()).unwrap();
        drop_everywhere!(
            async { layer.clone().oneshot(request()).await.unwrap().collect().await.unwrap() },
            is_free().await
        );
        drop_everywhere!(
            async {
                give_back_soon(others.write("a").await.unwrap());
                layer.clone().oneshot(request()).await.unwrap()
            },
            is_free().await
        );
    }

    let is_free = async || drop(there.lock("b").await.unwrap());
    // A lease that was reentered through a view outlives the first one, and releases the lock.
    drop_everywhere!(
        async {
            let lease = here.lock("b").await.unwrap();
            let view = lease.view();
            let kept = view.reenter().unwrap();
            drop(lease);
            yield_now().await;
            kept.release().await.unwrap();
        },
        is_free().await
    );
    let lease = here.lock("b").ttl(Duration::from_millis(300)).max_hold(Duration::from_millis(20)).await.unwrap();
    let view = lease.view();
    drop_everywhere!(view.lost(), yield_now().await);
    drop((lease, view));
    let lease = here.lock("b").await.unwrap();
    let view = lease.view();
    let asks = tokio::spawn(there.clone().request_release().lock("b").into_future());
    drop_everywhere!(view.release_requested(), yield_now().await);
    drop(lease);
    drop((asks.await.unwrap().unwrap(), view));
    let admin = LockAdmin::new(connect(&server).await, "default").deadline(LONG);
    let is_free = async || drop(there.lock("a").await.unwrap());
    drop_everywhere!(admin.inspect("a"), is_free().await);
    drop_everywhere!(admin.list(Cursor::default(), 10), is_free().await);
    drop_everywhere!(admin.force_release("a"), is_free().await);
    let fenced = FenceLayer::new(|_: &u64| "a", |fence: &u64| Some(*fence)).responder(ErrorResponder);
    let fenced = fenced.layer(service_fn(async |fence: u64| {
        yield_now().await;
        Ok::<_, BoxError>(fence)
    }));
    drop_everywhere!(fenced.clone().oneshot(7), assert_eq!(fenced.clone().oneshot(7).await.unwrap(), 7));

    let servers = [(); 3].map(|()| RedisServer::start());
    let quorum = async || {
        let mut backends = Vec::new();
        for server in &servers {
            backends.push(connect(server).await);
        }
        Locks::new(Redlock::new(backends).unwrap(), "default").deadline(Duration::from_secs(2)).wait(LONG / 3)
    };
    let (redlock, elsewhere) = (quorum().await, quorum().await);
    let is_free = async || drop(elsewhere.lock("a").await.unwrap());
    drop_everywhere!(redlock.lock("a").into_future(), is_free().await);
    drop_everywhere!(
        async {
            let lease = elsewhere.lock("a").await.unwrap();
            tokio::spawn(async move {
                sleep(Duration::from_millis(5)).await;
                drop(lease);
            });
            drop(redlock.lock("a").await.unwrap());
        },
        is_free().await
    );
    let is_free = async || drop(elsewhere.lock_all(["b", "a"]).await.unwrap());
    drop_everywhere!(redlock.lock_all(["a", "b"]).into_future(), is_free().await);
    drop_everywhere!(
        async {
            give_back_soon(elsewhere.lock("b").await.unwrap());
            redlock.lock_all(["a", "b"]).await.unwrap().release().await.unwrap()
        },
        is_free().await
    );
    for locks in [pages, others] {
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
    for locks in [here, there, redlock, elsewhere] {
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
}

#[tokio::test(start_paused = true)]
async fn unclaimed_grant_is_released() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let (locks, other) = (Locks::new(store, "default"), Locks::new(backend.clone(), "default"));
    faults.delay(Duration::from_millis(20));
    // The future is dropped during the store call. The later grant is released.
    for polls in 0..3 {
        assert!(DropAt::new(polls, locks.lock("a").into_future()).await.is_none() || polls == 2);
        sleep(Duration::from_millis(100)).await;
        assert_eq!(backend.locks(), 0, "after {polls} polls");
    }
    // The reply of a grant is lost. The caller gets a timeout, and the grant is released in the end.
    faults.heal();
    faults.lose_replies();
    let asking = tokio::spawn(locks.try_lock("a").into_future());
    sleep(Duration::from_millis(90)).await;
    assert!(other.try_lock("a").await.is_err_and(|error| error.is_busy()));
    let error = asking.await.unwrap().unwrap_err();
    assert!(matches!(&error, LockError::Store(error) if error.is_timeout()), "{error:?}");
    faults.heal();
    sleep(Duration::from_secs(2)).await;
    assert_eq!(backend.locks(), 0);
    locks.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn waiter_recovers_a_grant_whose_reply_was_lost() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    faults.lose_replies();
    let waiter = tokio::spawn(locks.lock("a").into_future());
    sleep(Duration::from_millis(150)).await;
    faults.heal();
    let lease = waiter.await.unwrap().unwrap();
    assert!(faults.calls(Verb::Acquire) >= 2);
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    // A late grant is released as well.
    locks.shutdown().await;
    drop(locks);
}

/// Regression: if `try_acquire` was in flight, its permit was granted after the shutdown had ended, and was never released.
#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_permits_in_flight() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    store.faults().delay(Duration::from_millis(50));
    let semaphore = Semaphore::new(store, "semaphores", 2);
    let asking = tokio::spawn(semaphore.try_acquire("a").into_future());
    yield_now().await;
    let over = tokio::spawn({
        let semaphore = semaphore.clone();
        async move { semaphore.shutdown().await }
    });
    let permit = asking.await.unwrap().unwrap();
    sleep(Duration::from_secs(1)).await;
    assert!(!over.is_finished(), "a permit is held");
    assert_eq!(permit.release().await.unwrap(), ReleaseOutcome::Released);
    timeout(LONG, over).await.expect("nothing is left").unwrap();
    assert_eq!(backend.locks(), 0);
}

/// Regression: after one lost reply, the release was repeated every second until the lease would have ended, up to a day later. A shutdown
/// waited for that.
#[tokio::test(start_paused = true)]
async fn release_is_retried_for_seconds_only() {
    for is_granted in [true, false] {
        let backend = MemoryBackend::new();
        let store = FaultStore::new(backend.clone());
        let faults = store.faults();
        let locks = Locks::new(store, "default").ttl(Claim::MAX_TTL);
        faults.lose_replies();
        if is_granted {
            let waiter = tokio::spawn(locks.lock("a").into_future());
            sleep(Duration::from_millis(150)).await;
            faults.heal();
            let lease = waiter.await.unwrap().unwrap();
            assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
        } else {
            assert!(locks.try_lock("a").await.is_err());
            faults.heal();
        }
        timeout(Duration::from_secs(6), locks.shutdown()).await.expect("the shutdown ends within seconds");
        assert_eq!(backend.locks(), 0);
        let releases = faults.calls(Verb::Release);
        assert!((2..=12).contains(&releases), "{releases} releases, granted: {is_granted}");
    }
    // A lease that was held for longer has no claim in flight any more.
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").ttl(Claim::MAX_TTL);
    faults.lose_replies();
    let waiter = tokio::spawn(locks.lock("a").into_future());
    sleep(Duration::from_millis(150)).await;
    faults.heal();
    let lease = waiter.await.unwrap().unwrap();
    sleep(LONG).await;
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    timeout(Duration::from_millis(1), locks.shutdown()).await.expect("nothing is left");
    assert_eq!(faults.calls(Verb::Release), 1);
}

/// Regression: the first call counted, while the last call counts for all other settings.
#[tokio::test(start_paused = true)]
async fn last_circuit_breaker_and_holder_name_count() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, admin) = (store.faults(), LockAdmin::new(store.get_ref().clone(), "default"));
    let locks = Locks::new(store, "default").circuit_breaker(CircuitBreaker::off()).holder("first");
    let locks = locks.circuit_breaker(CircuitBreaker::new().failures(1)).holder("last");
    faults.fail(Failure::Timeout);
    for _ in 0..3 {
        assert!(locks.try_lock("a").await.is_err());
    }
    assert_eq!(faults.calls(Verb::Acquire), 1, "the circuit is open after the first failure");
    faults.heal();
    sleep(Duration::from_millis(100)).await;
    let lease = locks.lock("a").await.unwrap();
    yield_now().await;
    let name = || async { admin.inspect("a").await.unwrap().holders[0].name.clone() };
    assert_eq!(name().await.as_deref(), Some("last"));
    drop(lease);
    // Later leases can have another name.
    let lease = locks.clone().holder("next").lock("a").await.unwrap();
    yield_now().await;
    assert_eq!(name().await.as_deref(), Some("next"));
    drop(lease);
}

/// Regression: after a failed call, the name was sent again only five minutes later.
#[tokio::test(start_paused = true)]
async fn unsent_holder_name_is_sent_with_the_next_renewal() {
    let store = FaultStore::new(MemoryBackend::new());
    let (faults, admin) = (store.faults(), LockAdmin::new(store.get_ref().clone(), "default"));
    let locks = Locks::new(store, "default").ttl(LONG).holder("me");
    let name = || async { admin.inspect("a").await.unwrap().holders[0].name.clone() };
    for is_silent in [false, true] {
        let lease = locks.lock("a").await.unwrap();
        // The call that sends the name has not run yet, because no task has run since.
        if is_silent {
            faults.hang();
        } else {
            faults.fail_next(1, Failure::Unavailable);
        }
        sleep(Duration::from_secs(1)).await;
        faults.heal();
        assert_eq!(name().await, None);
        sleep(LONG / 3).await;
        assert_eq!(name().await.as_deref(), Some("me"));
        lease.release().await.unwrap();
    }
    assert_eq!(faults.calls(Verb::Name), 4);
}

/// `run` under several locks, or under any segment, works like `run` under one lock.
#[tokio::test(start_paused = true)]
async fn body_runs_only_while_several_locks_are_held() {
    let backend = MemoryBackend::new();
    let (locks, admin) = (
        Locks::new(backend.clone(), "default").ttl(Duration::from_secs(3)),
        LockAdmin::new(backend.clone(), "default"),
    );
    let others = Locks::new(backend, "default");
    let value = locks.lock_all(["alice", "bob"]).run(async |leases| {
        assert!(leases.check().is_ok() && leases.leases().len() == 2);
        for key in ["alice", "bob"] {
            assert!(matches!(locks.lock(key).await, Err(LockError::Nested(_))));
            assert!(others.try_lock(key).await.is_err_and(|error| error.is_busy()));
        }
        assert!(matches!(locks.lock_all(["bob", "carol"]).await, Err(LockError::Nested(_))));
        drop(locks.lock("carol").await.unwrap());
        7
    });
    assert_eq!(value.await.unwrap(), 7);
    for key in ["alice", "bob"] {
        drop(others.try_lock(key).await.unwrap());
    }
    // The loss of one lease is the loss of all.
    let taken_away = async {
        sleep(Duration::from_millis(100)).await;
        assert_eq!(admin.force_release("bob").await.unwrap().holders, 1);
    };
    let (outcome, ()) = tokio::join!(locks.lock_all(["alice", "bob"]).run(|_| pending::<()>()), taken_away);
    assert!(outcome.unwrap_err().is_lost());
    for key in ["alice", "bob"] {
        drop(others.lock(key).wait(Duration::from_secs(1)).await.unwrap());
    }
    let start = tokio::time::Instant::now();
    let brief = locks.lock_all(["alice", "bob"]).ttl(Duration::from_secs(60)).max_hold(Duration::from_millis(20));
    let outcome = brief.run(async |leases| {
        assert!(leases.remaining() <= Duration::from_millis(20));
        pending::<()>().await;
    });
    assert!(
        matches!(outcome.await, Err(RunError::Lock(LockError::Lost(lost))) if lost.reason() == LossReason::MaxHold)
    );
    assert!(start.elapsed() < Duration::from_millis(100));

    let segments = Segmented::new(&locks, "sku:1", 2);
    let indices = segments.any().run(async |outer| {
        let inner = segments.any().run(async |inner| inner.index()).await.unwrap();
        assert!(matches!(segments.one(outer.index()).await, Err(LockError::Nested(_))));
        (outer.index(), inner)
    });
    let (outer, inner) = indices.await.unwrap();
    assert_eq!(outer + inner, 1);
    let brief = segments.any().ttl(Duration::from_secs(60)).max_hold(Duration::from_millis(20));
    let outcome = brief.run(|segment| async move {
        assert!(segment.lease().remaining() <= Duration::from_millis(20));
        pending::<()>().await;
    });
    assert!(outcome.await.unwrap_err().is_lost());
    locks.shutdown().await;
}

/// A store that fails for one lock.
struct FailsFor {
    inner: MemoryBackend,
    failing: LockKey,
}

impl LockStore for FailsFor {
    delegate_lock!(inner: acquire_all, renew, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        if *lock == self.failing {
            return Err(StoreError::unavailable("its node is down"));
        }
        self.inner.acquire(lock, claim).await
    }
}

/// Regression: the first segment with a store error ended the request, regardless of the other segments.
#[tokio::test(start_paused = true)]
async fn segment_with_a_store_error_is_skipped() {
    let probe = Segmented::new(&Locks::new(MemoryBackend::new(), "default"), "sku:1", 3);
    let failing = *probe.one(1).await.unwrap().lock();
    let locks = Locks::new(FailsFor { inner: MemoryBackend::new(), failing }, "default");
    let segments = Segmented::new(&locks, "sku:1", 3);
    for wait in [Duration::ZERO, Duration::from_secs(10)] {
        for _ in 0..50 {
            assert_ne!(segments.any().wait(wait).await.unwrap().index(), 1);
        }
    }
    // While no segment is free, the error is returned, or the request waits for a release.
    let (first, second) = (segments.one(0).await.unwrap(), segments.one(2).await.unwrap());
    let refused = segments.any().wait(Duration::ZERO).await;
    assert!(matches!(&refused, Err(LockError::Store(error)) if error.is_unavailable()), "{refused:?}");
    let waiter = tokio::spawn(segments.any().wait(Duration::from_secs(10)).into_future());
    sleep(Duration::from_secs(2)).await;
    drop(second);
    assert_eq!(waiter.await.unwrap().unwrap().index(), 2);
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn request_for_any_segment_waits_for_a_failing_store() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    let segments = Segmented::new(&locks, "sku:1", 3);
    for failure in [Failure::Unavailable, Failure::Timeout] {
        faults.fail(failure);
        let waiter = tokio::spawn(segments.any().wait(Duration::from_secs(10)).into_future());
        sleep(Duration::from_millis(300)).await;
        faults.heal();
        drop(waiter.await.unwrap().unwrap());
        // The retries end with the wait.
        faults.fail(failure);
        let start = tokio::time::Instant::now();
        assert!(matches!(segments.any().wait(Duration::from_secs(1)).await, Err(LockError::Store(_))));
        assert!(start.elapsed() >= Duration::from_secs(1) && start.elapsed() < Duration::from_secs(2));
        assert!(matches!(segments.any().wait(Duration::ZERO).await, Err(LockError::Store(_))));
        faults.heal();
        drop(segments.any().await.unwrap());
    }
    // A permanent error is returned at once.
    faults.fail(Failure::Unauthorized);
    let start = tokio::time::Instant::now();
    let refused = segments.any().await;
    assert!(matches!(&refused, Err(LockError::Store(error)) if error.is_unauthorized()), "{refused:?}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    faults.heal();
    // The request waits for a hanging server no longer than a request for one lock.
    faults.hang();
    let start = tokio::time::Instant::now();
    assert!(segments.any().wait(Duration::ZERO).await.is_err());
    assert!(start.elapsed() <= Duration::from_millis(200), "{:?}", start.elapsed());
    faults.heal();
    // A segment with too few replicas is not granted either.
    let careful = Segmented::new(&locks.clone().replication(Replication::Require(1)), "sku:1", 3);
    let start = tokio::time::Instant::now();
    assert!(matches!(careful.any().wait(Duration::from_secs(1)).await, Err(LockError::NotReplicated(_))));
    assert!(start.elapsed() >= Duration::from_millis(900), "{:?}", start.elapsed());
}

/// A store that replies for one lock, and hangs for all others.
struct HangsBut {
    inner: MemoryBackend,
    healthy: LockKey,
}

impl LockStore for HangsBut {
    delegate_lock!(inner: acquire_all, renew, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        if *lock != self.healthy {
            pending::<()>().await;
        }
        self.inner.acquire(lock, claim).await
    }
}

/// Regression: the first hanging segment used up all the time of a request without a wait.
#[tokio::test(start_paused = true)]
async fn hanging_segment_leaves_time_for_others() {
    let probe = Segmented::new(&Locks::new(MemoryBackend::new(), "default"), "sku:1", 3);
    let healthy = *probe.one(1).await.unwrap().lock();
    let locks = Locks::new(HangsBut { inner: MemoryBackend::new(), healthy }, "default");
    let segments = Segmented::new(&locks, "sku:1", 3);
    for wait in [Duration::ZERO, Duration::from_millis(50)] {
        for _ in 0..20 {
            let start = tokio::time::Instant::now();
            assert_eq!(segments.any().wait(wait).await.unwrap().index(), 1);
            assert!(start.elapsed() <= Duration::from_millis(200) + wait, "{:?}", start.elapsed());
        }
    }
    // The time is bounded, regardless of the number of segments.
    let locks =
        Locks::new(HangsBut { inner: MemoryBackend::new(), healthy }, "default").circuit_breaker(CircuitBreaker::off());
    let many = Segmented::new(&locks, "sku:2", 1_000);
    let start = tokio::time::Instant::now();
    assert!(many.any().wait(Duration::ZERO).await.is_err());
    assert!(start.elapsed() <= Duration::from_millis(210), "{:?}", start.elapsed());
}

/// A request without a wait tries all segments, however long that takes, if the store replies.
#[tokio::test(start_paused = true)]
async fn last_free_segment_is_found_in_a_slow_store() {
    let backend = MemoryBackend::new();
    let theirs = Segmented::new(&Locks::new(backend.clone(), "default"), "sku:1", 50);
    let mut held = Vec::new();
    for index in (0..50).filter(|index| *index != 17) {
        held.push(theirs.one(index).await.unwrap());
    }
    let store = FaultStore::new(backend);
    store.faults().delay(Duration::from_millis(20));
    let ours = Segmented::new(&Locks::new(store, "default"), "sku:1", 50);
    for _ in 0..20 {
        let segment = ours.any().wait(Duration::ZERO).await.unwrap();
        assert_eq!(segment.index(), 17);
        segment.release().await.unwrap();
    }
}

/// A store that executes the first claim late, when its caller no longer waits.
struct Late {
    inner: MemoryBackend,
    by: Duration,
    late: AtomicBool,
}

impl Late {
    fn new(inner: &MemoryBackend, by: Duration) -> Self {
        Self { inner: inner.clone(), by, late: AtomicBool::new(true) }
    }
}

impl LockStore for Late {
    delegate_lock!(inner: acquire_all, renew, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        if self.late.swap(false, Ordering::SeqCst) {
            let (inner, by, lock, claim) = (self.inner.clone(), self.by, *lock, *claim);
            tokio::spawn(async move {
                sleep(by).await;
                inner.acquire(&lock, &claim).await
            });
            return Err(StoreError::timeout());
        }
        self.inner.acquire(lock, claim).await
    }
}

#[tokio::test(start_paused = true)]
async fn grant_seconds_after_its_request_is_released() {
    let inner = MemoryBackend::new();
    let locks = Locks::new(Late::new(&inner, Duration::from_secs(3)), "default").ttl(Claim::MAX_TTL);
    assert!(locks.try_lock("a").await.is_err());
    let start = tokio::time::Instant::now();
    while inner.locks() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    assert!(start.elapsed() >= Duration::from_secs(2), "the grant came late");
    locks.shutdown().await;
    assert_eq!(inner.locks(), 0);
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
}

/// Regression: with a short `ttl`, the release was repeated only for that long. A later grant blocked the lock for another `ttl`.
#[tokio::test(start_paused = true)]
async fn late_grant_is_released() {
    let (second, late) = (Duration::from_secs(1), Duration::from_millis(4_900));
    for (is_held, fails) in [(true, false), (false, false), (true, true), (false, true)] {
        let inner = MemoryBackend::new();
        let store = FaultStore::new(Late::new(&inner, late));
        let faults = store.faults();
        let locks = Locks::new(store, "default").ttl(2 * second);
        let start = tokio::time::Instant::now();
        if is_held {
            let lease = locks.lock("a").wait(second).await.unwrap();
            assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
        } else {
            assert!(locks.try_lock("a").await.is_err());
        }
        sleep(4 * second).await;
        assert_eq!(inner.locks(), 0);
        if fails {
            faults.fail(Failure::Unavailable);
            // The next release comes within a second, before the lease ends by itself.
            sleep(Duration::from_millis(1_500)).await;
            assert_eq!(inner.locks(), 1, "the grant came late");
            faults.heal();
        }
        locks.shutdown().await;
        assert_eq!(inner.locks(), 0, "held: {is_held}");
        let ended = start.elapsed();
        assert!(ended > late && ended < if fails { late + 2 * second } else { 6 * second }, "{ended:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn store_error_differs_from_a_busy_lock() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").wait(Duration::from_secs(1));
    faults.fail(Failure::Unavailable);
    let start = tokio::time::Instant::now();
    assert!(matches!(locks.lock("a").await, Err(LockError::Store(error)) if error.is_unavailable()));
    assert!(start.elapsed() <= Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(faults.calls(Verb::Acquire) > 2, "a waiter retries");
    // A permanent error is not retried.
    faults.fail(Failure::Unauthorized);
    let calls = faults.calls(Verb::Acquire);
    assert!(matches!(locks.lock("a").await, Err(LockError::Store(error)) if error.is_unauthorized()));
    assert_eq!(faults.calls(Verb::Acquire), calls + 1);
    faults.heal();
    drop(locks.lock("a").await.unwrap());
}

/// Regression: waiters behind a silent store were told at the end of their wait that the lock was held.
#[tokio::test(start_paused = true)]
async fn waiters_of_a_failing_store_get_its_error() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").circuit_breaker(CircuitBreaker::off());
    for wait in [0, 50, 150, 500].map(Duration::from_millis) {
        faults.hang();
        let start = tokio::time::Instant::now();
        let requests: JoinSet<_> = (0..10).map(|_| locks.lock("a").wait(wait).into_future()).collect();
        for answer in requests.join_all().await {
            assert!(matches!(&answer, Err(LockError::Store(error)) if error.is_timeout()), "{answer:?} after {wait:?}");
        }
        assert!(start.elapsed() <= wait + Duration::from_millis(100), "{:?}", start.elapsed());
        faults.heal();
    }
    // Once the store replies, later callers get its current reply, and not the last error.
    faults.delay(Duration::from_millis(20));
    let lease = locks.lock("a").await.unwrap();
    assert!(locks.try_lock("a").await.is_err_and(|error| error.is_busy()));
    drop(lease);
}

/// Regression: all callers but the first were told that the lock would be free at once.
#[tokio::test(start_paused = true)]
async fn all_callers_get_the_remaining_time_of_the_lease() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    faults.delay(Duration::from_millis(5));
    let (here, there) = (Locks::new(store, "default"), Locks::new(backend, "default"));
    let held = there.lock("a").await.unwrap();
    let wait_is_exact = async |key: &'static str| {
        let requests: JoinSet<_> = (0..10).map(|_| here.try_lock(key).into_future()).collect();
        for answer in requests.join_all().await {
            let error = answer.unwrap_err();
            assert!(matches!(&error, LockError::Busy(busy) if !busy.retry_after().is_zero()), "{error:?}");
        }
    };
    wait_is_exact("a").await;
    assert_eq!(faults.calls(Verb::Acquire), 1, "one call serves all callers");
    // The same behind a waiter for this lock, or for several locks, that has had its reply.
    let waiter = tokio::spawn(here.lock("a").into_future());
    sleep(Duration::from_millis(50)).await;
    wait_is_exact("a").await;
    waiter.abort();
    let waiter = tokio::spawn(here.lock_all(["a", "b"]).into_future());
    sleep(Duration::from_millis(50)).await;
    wait_is_exact("a").await;
    wait_is_exact("b").await;
    waiter.abort();
    sleep(Duration::from_secs(1)).await;
    // `lock_all` does not claim its first lock while another of its locks is held in this process.
    let second = here.lock("c").await.unwrap();
    let waiter = tokio::spawn(here.lock_all(["b", "c"]).into_future());
    sleep(Duration::from_millis(50)).await;
    let start = tokio::time::Instant::now();
    wait_is_exact("b").await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(second);
    drop((waiter.await.unwrap().unwrap(), held));
}

/// Regression: with `max_waiters(0)`, a caller that came during a release was rejected.
#[tokio::test(start_paused = true)]
async fn release_in_flight_is_no_queue() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").max_waiters(0);
    faults.delay(Duration::from_millis(5));
    for wait in [Duration::ZERO, LONG] {
        drop(locks.lock("a").await.unwrap());
        let next = tokio::spawn(locks.lock("a").wait(wait).into_future());
        yield_now().await;
        // The next caller is rejected, because another one waits already.
        assert!(matches!(locks.lock("a").await, Err(LockError::QueueFull(_))));
        drop(next.await.unwrap().unwrap());
        sleep(Duration::from_secs(1)).await;
    }
}

/// Regression: the releases ran one after the other and took the deadline each.
#[tokio::test(start_paused = true)]
async fn several_leases_are_released_concurrently() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    let leases = locks.lock_all(0..20_u64).await.unwrap();
    faults.hang();
    let start = tokio::time::Instant::now();
    let error = leases.release().await.unwrap_err();
    assert!(error.is_timeout());
    assert_eq!(error.source().unwrap().to_string(), "no reply within the deadline of 100ms");
    assert!(start.elapsed() <= Duration::from_millis(200), "{:?}", start.elapsed());
    faults.heal();
    drop(locks.lock_all(0..20_u64).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn renewals_are_batched_every_third_of_the_ttl() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").ttl(Duration::from_secs(9));
    let mut leases = Vec::new();
    for key in 0..300 {
        leases.push(locks.lock(key).await.unwrap());
    }
    sleep(Duration::from_secs(2)).await;
    assert_eq!(faults.calls(Verb::Renew), 0, "no renewal is due yet");
    // Renewals that are due at about the same time share calls of up to 128.
    for third in 1..=20 {
        sleep(Duration::from_secs(3)).await;
        let calls = faults.calls(Verb::Renew);
        assert!((third * 3 - 3..=third * 4).contains(&calls), "{calls} calls in {third} thirds");
    }
    assert!(leases.iter().all(|lease| lease.state() == LeaseState::Held));
}

#[tokio::test(start_paused = true)]
async fn failed_renewals_suspend_a_lease_until_the_next_one() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").ttl(Duration::from_secs(9));
    let lease = locks.lock("a").await.unwrap();
    faults.fail(Failure::Timeout);
    sleep(Duration::from_secs(4)).await;
    assert_eq!(lease.state(), LeaseState::Suspended);
    assert!(lease.check().is_ok());
    faults.heal();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(lease.state(), LeaseState::Held);
    assert!(lease.remaining() > Duration::from_secs(7));
    // A hanging renewal does not extend the lease either.
    faults.hang();
    let start = tokio::time::Instant::now();
    assert_eq!(lease.lost().await.reason(), LossReason::Expired);
    assert!(start.elapsed() < Duration::from_secs(9));
    assert_eq!(lease.state(), LeaseState::Lost);
    faults.heal();
    sleep(Duration::from_secs(20)).await;
    assert_eq!(lease.state(), LeaseState::Lost, "a loss is permanent");
    assert!(locks.try_lock("a").await.is_ok(), "the lost lease blocks no other caller");
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Lost);
}

/// The lease counts from before the command was sent, because the reply may have taken long.
#[tokio::test(start_paused = true)]
async fn reply_time_is_subtracted_from_the_lease() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(Duration::from_millis(300));
    let locks = Locks::new(store, "default").ttl(Duration::from_secs(1)).deadline(Duration::from_secs(1));
    let left = locks.lock("a").await.unwrap().remaining();
    assert!(left <= Duration::from_millis(700) && left > Duration::from_millis(600), "{left:?}");
}

/// Regression: a caller with a wait got the timeout at once.
#[tokio::test(start_paused = true)]
async fn late_grant_is_retried_by_waiters_and_released_otherwise() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let locks = Locks::new(store, "default").ttl(Duration::from_secs(1)).deadline(Duration::from_secs(2));
    faults.delay(Duration::from_millis(1_200));
    let asking = tokio::spawn(locks.try_lock("a").into_future());
    sleep(Duration::from_millis(100)).await;
    faults.heal();
    let error = asking.await.unwrap().unwrap_err();
    assert!(matches!(&error, LockError::Store(error) if error.is_timeout()), "{error:?}");
    sleep(Duration::from_millis(50)).await;
    assert_eq!(backend.locks(), 0, "the grant is released long before it expires");

    faults.delay(Duration::from_millis(1_200));
    let waiter = tokio::spawn(locks.lock("a").wait(Duration::from_secs(5)).into_future());
    sleep(Duration::from_millis(100)).await;
    faults.heal();
    let lease = waiter.await.unwrap().unwrap();
    assert!(lease.remaining() > Duration::from_millis(900), "{lease:?}");
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(backend.locks(), 0);
}

/// Loses a lease, and then the lease of a running body, because the store no longer replies.
async fn lose(locks: &Locks, faults: &Faults) {
    // Nine seconds less 1 % and 2 ms, plus the inaccuracy of a timer.
    let in_time = Duration::from_millis(8_908)..Duration::from_millis(8_912);
    let locks = locks.clone().ttl(Duration::from_secs(9)).deadline(Duration::from_secs(60));
    let start = tokio::time::Instant::now();
    let lease = locks.lock("a").await.unwrap();
    faults.hang();
    assert_eq!(lease.lost().await.reason(), LossReason::Expired);
    assert!(in_time.contains(&start.elapsed()), "{:?}", start.elapsed());

    faults.heal();
    let start = tokio::time::Instant::now();
    let outcome = locks.run("b", async |_| {
        faults.hang();
        pending::<()>().await;
    });
    assert!(outcome.await.unwrap_err().is_lost());
    assert!(in_time.contains(&start.elapsed()), "{:?}", start.elapsed());
    faults.heal();
}

#[tokio::test(start_paused = true)]
async fn holder_learns_of_a_loss_while_a_renewal_hangs() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    lose(&Locks::new(store, "default"), &faults).await;
    assert_eq!(faults.calls(Verb::Renew), 2, "one renewal of each lease was in flight");
}

/// The task that renews leases, and drops lost ones, is in a runtime that stands still.
#[test]
fn holder_learns_of_a_loss_by_the_clock_alone() {
    let runtime = || Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let (still, here) = (runtime(), runtime());
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    let first = still.block_on(locks.lock("first").into_future()).unwrap();
    here.block_on(lose(&locks, &faults));
    assert_eq!(faults.calls(Verb::Renew), 0);
    here.block_on(async { drop(first) });
}

/// Regression: the reply to a renewal was awaited no longer than the first lease of the call lasted. Then all leases of the call were
/// suspended.
#[tokio::test(start_paused = true)]
async fn ending_lease_takes_no_time_from_the_others() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").ttl(Duration::from_secs(3));
    let lease = locks.lock("a").await.unwrap();
    let short = locks.lock("b").max_hold(Duration::from_millis(1_030)).await.unwrap();
    faults.delay(Duration::from_millis(60));
    sleep(Duration::from_millis(1_045)).await;
    assert_eq!((lease.state(), short.state()), (LeaseState::Held, LeaseState::Lost));
    sleep(Duration::from_millis(100)).await;
    assert!(lease.remaining() > Duration::from_secs(2), "the lease was renewed");
}

/// Regression: no other caller got the lock until the last renewal had expired.
#[tokio::test(start_paused = true)]
async fn inattentive_holder_loses_the_lock_at_max_hold() {
    let second = Duration::from_secs(1);
    let backend = MemoryBackend::new();
    let locks = || Locks::new(backend.clone(), "default").wait(Duration::ZERO);
    for (here, there) in [(locks(), locks()), (locks().fair(), locks().fair())] {
        let forgotten = here.lock("a").max_hold(5 * second).await.unwrap();
        let start = tokio::time::Instant::now();
        let waiter = tokio::spawn(here.lock("a").wait(LONG).into_future());
        sleep(5 * second).await;
        // A holder that checks has the same margin to stop as with a lease that expires.
        assert_eq!(forgotten.check().unwrap_err().reason(), LossReason::MaxHold);
        assert!(there.lock("a").await.is_err_and(|error| error.is_busy()));
        let next = waiter.await.unwrap().unwrap();
        assert!(start.elapsed() < 6 * second, "{:?}", start.elapsed());
        // The late release of the first holder does not end the next lease.
        assert_eq!(forgotten.release().await.unwrap(), ReleaseOutcome::Lost);
        assert!(there.lock("a").await.is_err_and(|error| error.is_busy()));
        next.release().await.unwrap();
    }
    let semaphore = || Semaphore::new(backend.clone(), "semaphores", 1).wait(Duration::ZERO);
    let permit = semaphore().max_hold(5 * second).acquire("a").await.unwrap();
    sleep(6 * second).await;
    drop(semaphore().acquire("a").await.unwrap());
    drop(permit);
}

/// Regression: the lease was released a second time in place of its holder. A shutdown waited for that, for a hundredth of the `ttl`.
#[tokio::test(start_paused = true)]
async fn release_after_max_hold_leaves_nothing_pending() {
    let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3_600));
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store.clone(), "default").ttl(hour).max_hold(5 * second);
    let permits = Semaphore::new(store.clone(), "semaphores", 1).ttl(hour).max_hold(5 * second);
    let start = tokio::time::Instant::now();
    let leases = [
        locks.lock("a").await.unwrap(),
        locks.lock("b").await.unwrap(),
        locks.clone().fair().lock("c").await.unwrap(),
        permits.acquire("d").await.unwrap(),
    ];
    sleep(Duration::from_millis(5_001)).await;
    let [first, rest @ ..] = leases;
    assert_eq!(first.release().await.unwrap(), ReleaseOutcome::Lost);
    drop(rest);
    tokio::join!(locks.shutdown(), permits.shutdown());
    assert!(start.elapsed() < 6 * second, "{:?}", start.elapsed());
    assert_eq!(faults.calls(Verb::Release), 4);

    // The store has not received a release yet.
    let locks = Locks::new(store.clone(), "default").ttl(hour).max_hold(5 * second);
    let lease = locks.lock("a").await.unwrap();
    sleep(Duration::from_millis(5_001)).await;
    let release = lease.release();
    sleep(60 * second).await;
    drop(Locks::new(store, "default").lock("a").wait(Duration::ZERO).await.unwrap());
    assert_eq!(release.await.unwrap(), ReleaseOutcome::Lost);
}

/// Regression: after a handoff, a view of the old lease was notified only when the next holder lost the lock.
#[tokio::test(start_paused = true)]
async fn view_is_notified_of_a_handoff() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let lease = locks.lock("a").await.unwrap();
    let (view, fence) = (lease.view(), lease.fence());
    let guarded = tokio::spawn(async move { view.lost().await });
    let next = tokio::spawn(locks.lock("a").into_future());
    sleep(Duration::from_millis(10)).await;
    drop(lease);
    let next = next.await.unwrap().unwrap();
    assert_eq!(next.fence(), fence + 1, "a handoff");
    let lost = timeout(Duration::from_millis(1), guarded).await.unwrap().unwrap();
    assert_eq!(lost.reason(), LossReason::Released);
    assert!(next.check().is_ok());
}

/// A store in which another process releases a lock just before the caller subscribes.
struct Hasty {
    inner: MemoryBackend,
    held: Mutex<Option<Lease>>,
}

impl LockStore for Hasty {
    delegate_lock!(inner: acquire, acquire_all, renew, release);

    async fn watch(&self, lock: &LockKey, waiter: Option<&Token>) -> Notifications {
        if let Some(lease) = self.held.lock().await.take() {
            lease.release().await.unwrap();
        }
        LockStore::watch(&self.inner, lock, waiter).await
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }
}

#[tokio::test(start_paused = true)]
async fn release_before_the_subscription_is_found_at_once() {
    let inner = MemoryBackend::new();
    let held = Mutex::new(Some(Locks::new(inner.clone(), "default").lock("a").await.unwrap()));
    let start = tokio::time::Instant::now();
    drop(Locks::new(Hasty { inner, held }, "default").lock("a").await.unwrap());
    assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn failed_release_is_reported_and_retried() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    for failure in [Failure::Unavailable, Failure::Timeout] {
        let lease = locks.lock("a").await.unwrap();
        faults.fail(failure);
        assert!(lease.release().await.is_err());
        assert_eq!(backend.locks(), 1);
        faults.heal();
        sleep(Duration::from_secs(3)).await;
        assert_eq!(backend.locks(), 0);
        // `run` does not report it, because the body has its own outcome.
        let outcome = locks.run("a", async |_| faults.fail(failure)).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        faults.heal();
        sleep(Duration::from_secs(3)).await;
        assert_eq!(backend.locks(), 0);
    }
}

/// Regression: the release was retried until the last acknowledged renewal would have ended. A later renewal then blocked the lock for the
/// rest of its time.
#[tokio::test(start_paused = true)]
async fn release_is_retried_as_long_as_a_renewal_may_arrive() {
    let second = Duration::from_secs(1);
    // After several abandoned renewals, and during the first one.
    for (loses, given_back) in [(second, 29_650), (9 * second, 10_050)] {
        let backend = MemoryBackend::new();
        let store = FaultStore::new(backend.clone());
        let faults = store.faults();
        let locks = Locks::new(store, "default").ttl(30 * second);
        let start = tokio::time::Instant::now();
        let lease = locks.lock("a").await.unwrap();
        tokio::time::sleep_until(start + loses).await;
        faults.lose_replies();
        let given_back = start + Duration::from_millis(given_back);
        tokio::time::sleep_until(given_back).await;
        assert!(faults.calls(Verb::Renew) > 0);
        faults.fail(Failure::Unavailable);
        drop(lease);
        tokio::time::sleep_until(start + Duration::from_millis(30_500)).await;
        faults.heal();
        sleep(2 * second).await;
        assert_eq!(backend.locks(), 0);
        locks.shutdown().await;
    }
    // If the renewals were refused, no longer than the lease lasts.
    let store = FaultStore::new(MemoryBackend::new());
    let locks = Locks::new(store.clone(), "default").ttl(30 * second);
    let lease = locks.lock("a").await.unwrap();
    store.faults().fail(Failure::OutOfMemory);
    sleep(29 * second).await;
    drop(lease);
    timeout(2 * second, locks.shutdown()).await.expect("the lease has expired");
    // With several stores, that needs a refusal of all, because one store may renew the lease alone.
    let backend = MemoryBackend::new();
    let stores = [backend.clone(), MemoryBackend::new(), MemoryBackend::new()].map(FaultStore::new);
    let faults = stores.each_ref().map(FaultStore::faults);
    let locks = Locks::new(Redlock::new(stores).unwrap(), "default").ttl(30 * second);
    let lease = locks.lock("a").await.unwrap();
    faults[1..].iter().for_each(|faults| faults.fail(Failure::OutOfMemory));
    sleep(29 * second).await;
    faults[0].fail(Failure::Unavailable);
    drop(lease);
    sleep(2 * second).await;
    faults.iter().for_each(Faults::heal);
    sleep(2 * second).await;
    assert_eq!(backend.locks(), 0);
}

/// A store that executes the first release, and loses its reply with the connection.
#[derive(Clone)]
struct Forgetful {
    inner: MemoryBackend,
    forgets: Arc<AtomicBool>,
}

impl Forgetful {
    fn new() -> Self {
        Self { inner: MemoryBackend::new(), forgets: Arc::new(AtomicBool::new(true)) }
    }
}

impl LockStore for Forgetful {
    delegate_lock!(inner: acquire, acquire_all, renew, watch);

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        let released = self.inner.release(lock, token).await?;
        if self.forgets.swap(false, Ordering::SeqCst) {
            return Err(StoreError::unavailable("the connection broke"));
        }
        Ok(released)
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }
}

/// Regression: a caller that was told of an earlier loss could have undone the work that the lease had protected.
#[tokio::test(start_paused = true)]
async fn lost_release_reply_is_no_lost_lease() {
    let store = Forgetful::new();
    let locks = Locks::new(store.clone(), "default").ttl(Duration::from_secs(9));
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Uncertain);
    assert_eq!(store.inner.locks(), 0);
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
    // A lease that ended before by the local clock is lost, regardless of the replies.
    let lease = locks.lock("a").max_hold(Duration::from_secs(1)).await.unwrap();
    sleep(Duration::from_secs(2)).await;
    store.forgets.store(true, Ordering::SeqCst);
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Lost);
    // Each lease is released separately, and the worst outcome counts.
    let leases = locks.lock_all(["a", "b", "c"]).await.unwrap();
    let handle = leases.leases()[0].reenter();
    store.forgets.store(true, Ordering::SeqCst);
    assert_eq!(leases.release().await.unwrap(), ReleaseOutcome::Uncertain);
    assert_eq!(handle.release().await.unwrap(), ReleaseOutcome::Released);

    let stores = [(); 3].map(|()| Forgetful::new());
    let locks = Locks::new(Redlock::new(stores.clone()).unwrap(), "default");
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Uncertain);
    assert!(stores.iter().all(|store| store.inner.locks() == 0));
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
    // The replies of the other stores are enough.
    stores[0].forgets.store(true, Ordering::SeqCst);
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
}

/// The same with a connection that breaks after Redis has executed the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_connection_on_release_is_no_lost_lease() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let backend = RedisOptions::from_url(proxy.url()).unwrap().response_timeout(LONG).connect().await.unwrap();
    let locks = Locks::new(backend, "default").deadline(LONG);
    let admin = LockAdmin::new(connect(&server).await, "default");
    locks.lock("a").await.unwrap().release().await.unwrap();
    let lease = locks.lock("a").await.unwrap();
    proxy.to_client(Traffic::Swallow);
    let releasing = tokio::spawn(lease.release());
    while admin.inspect("a").await.unwrap().is_held() {
        sleep(Duration::from_millis(1)).await;
    }
    proxy.heal();
    proxy.cut();
    assert_eq!(timeout(LONG, releasing).await.unwrap().unwrap().unwrap(), ReleaseOutcome::Uncertain);
    // The next release goes over another connection, and its reply arrives.
    assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
}

/// Regression: batched claims on a dead connection were awaited until the response timeout, although no caller waited for them any more.
/// The connection was not replaced before that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_batch_keeps_no_dead_connection() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    // Longer than any wait of this test.
    let options = RedisOptions::from_url(proxy.url()).unwrap().response_timeout(2 * LONG);
    let locks = Locks::new(options.connect().await.unwrap(), "default").circuit_breaker(CircuitBreaker::off());
    // Opens both connections.
    locks.clone().deadline(LONG).lock("a").await.unwrap().release().await.unwrap();
    proxy.to_server(Traffic::Swallow);
    proxy.to_client(Traffic::Swallow);
    let several: JoinSet<_> = (0..16).map(|task: u32| locks.try_lock(task).into_future()).collect();
    assert!(several.join_all().await.iter().all(Result::is_err));
    // Only one caller continues: more callers would send enough unbatched claims to detect the dead connection by these alone.
    let asking = tokio::spawn(async move { while locks.try_lock("b").await.is_err() {} });
    sleep(Duration::from_millis(1_500)).await;
    // Works for new connections only, because the old ones have lost data.
    proxy.heal();
    timeout(LONG / 2, asking).await.expect("the dead connection is replaced").unwrap();
}

/// Regression: claims that waited in a batch for a new connection were granted later, even if their callers had already got an error.
#[tokio::test]
async fn caller_that_gave_up_before_a_connection_gets_no_lock() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let options = RedisOptions::from_url(proxy.url()).unwrap().connections(1);
    let backend = options.connect_timeout(4 * LONG).response_timeout(4 * LONG).connect().await.unwrap();
    proxy.to_client(Traffic::Hold);
    proxy.cut();
    // Until the client has noticed the cut.
    sleep(Duration::from_millis(300)).await;
    // More claims than are sent unbatched, and in one task, so that they are batched.
    let ask = async |key: &'static str, i: u32| {
        let lock = LockKey::new(key, i);
        backend.acquire(&lock, &Claim::new(Token::random().unwrap(), 4 * LONG)).await
    };
    let is_told = AtomicU32::new(0);
    let give_up = async |i| {
        assert!(timeout(Duration::from_millis(100), ask("hurried", i)).await.is_err());
        if is_told.fetch_add(1, Ordering::Relaxed) + 1 == 16 {
            proxy.heal();
        }
    };
    let wait = async |i| ask("patient", i).await.unwrap();
    let (_, waited) = tokio::join!(join_all((0..16).map(give_up)), join_all((0..16).map(wait)));
    assert!(waited.iter().all(|answer| matches!(answer, Acquired::Granted { .. })), "{waited:?}");
    for i in 0..16_u32 {
        let holder_count = async |key| backend.inspect(&LockKey::new(key, i)).await.unwrap().holder_count;
        assert_eq!([holder_count("hurried").await, holder_count("patient").await], [0, 1]);
    }
}

/// Concurrent releases share calls, and the runtime that sends them may end. The outcome of such a call is unknown as well.
#[test]
fn ended_runtime_on_release_is_no_lost_lease() {
    let server = RedisServer::start();
    let parallel = || Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let give_back = |leases: Vec<Result<Lease, LockError>>| -> JoinSet<_> {
        leases.into_iter().map(|lease| lease.unwrap().release()).collect()
    };
    let (sends, stays) = (parallel(), parallel());
    // The sender of the calls runs in the runtime that connected, whichever runtime the caller is in.
    let backend = sends.block_on(impatient(&server));
    let locks = Locks::new(backend, "default").deadline(Duration::from_secs(2));
    let outcomes = stays.block_on(async {
        // Loads the script into the server, so that it can execute the calls that arrive while it is paused.
        let mut giving = give_back(ask_for_all(std::slice::from_ref(&locks), 60).await);
        while giving.join_next().await.is_some() {}
        let leases = ask_for_all(std::slice::from_ref(&locks), 60).await;
        server.pause();
        let giving = give_back(leases);
        sleep(Duration::from_millis(300)).await;
        sends.shutdown_background();
        sleep(Duration::from_millis(100)).await;
        server.resume();
        timeout(LONG, giving.join_all()).await.unwrap()
    });
    // A release with a store error reports no loss.
    assert!(!outcomes.iter().any(|outcome| matches!(outcome, Ok(ReleaseOutcome::Lost))), "{outcomes:?}");
    assert!(outcomes.iter().any(|outcome| matches!(outcome, Ok(ReleaseOutcome::Uncertain))), "{outcomes:?}");
}

#[test]
fn lease_can_be_dropped_without_a_runtime() {
    let server = RedisServer::start();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (locks, other) = runtime.block_on(async { (locks(&server).await, locks(&server).await) });
    let lease = runtime.block_on(locks.lock("a").into_future()).unwrap();
    thread::spawn(move || drop(lease)).join().unwrap();
    let start = Instant::now();
    drop(runtime.block_on(other.lock("a").into_future()).unwrap());
    // Long before the lease expires.
    assert!(start.elapsed() < LONG / 6, "{:?}", start.elapsed());

    // If the runtime has ended, the lease expires, and another runtime continues.
    let lease = runtime.block_on(locks.lock("b").ttl(Duration::from_secs(1)).into_future()).unwrap();
    drop(runtime);
    drop(lease);
    drop((locks, other));
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = self::locks(&server).await;
        let lease = locks.lock("b").ttl(Duration::from_secs(3)).await.unwrap();
        sleep(Duration::from_secs(4)).await;
        assert_eq!(lease.state(), LeaseState::Held, "the new runtime renews the lease");
    });
}

/// Regression: the renewal task stayed in the runtime of the first lease, so leases of the next runtime were not renewed.
#[test]
fn locks_that_outlive_a_runtime_renew_in_the_next() {
    let locks = Locks::new(MemoryBackend::new(), "default").ttl(Duration::from_secs(3));
    for _ in 0..2 {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let lease = locks.lock("a").await.unwrap();
            sleep(Duration::from_secs(4)).await;
            assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
        });
    }
}

/// Regression: the task that renewed all leases ran in the runtime of the first lease, and ended with it.
#[test]
fn lease_outlives_the_runtime_of_another_lease() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let locks = Locks::new(store, "default").ttl(Duration::from_secs(2));
    let parallel = || Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = Builder::new_current_thread().enable_all().build().unwrap();
    let (second, last) = (parallel(), parallel());
    let take = |runtime: &Runtime, key| runtime.block_on(locks.lock(key).into_future()).unwrap();
    let leases = [take(&first, "a"), take(&second, "b"), take(&last, "c")];
    // A renewal of all leases is in flight, and its reply will be lost.
    faults.hang();
    first.block_on(async {
        while faults.calls(Verb::Renew) == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    });
    drop(first);
    faults.heal();
    last.block_on(async { sleep(Duration::from_millis(2_500)).await });
    assert!(leases.iter().all(|lease| lease.check().is_ok()), "{leases:?}");
    drop(second);
    last.block_on(async { sleep(Duration::from_millis(2_500)).await });
    assert!(leases.iter().all(|lease| lease.check().is_ok()), "{leases:?}");
    last.block_on(async {
        drop(leases);
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    });
}

/// Regression: a lease that was dropped with its runtime was to be released in that runtime, and was not.
#[test]
fn lease_of_an_ended_runtime_is_released_in_another() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let locks = Locks::new(store, "default");
    let parallel = || Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let lasting = parallel();
    let other = lasting.block_on(locks.lock("b").into_future()).unwrap();
    for is_under_way in [false, true] {
        let (brief, locks) = (parallel(), locks.clone());
        let lease = brief.block_on(locks.lock("a").into_future()).unwrap();
        if is_under_way {
            // The background release has begun, and the store does not reply.
            faults.hang();
            brief.block_on(async {
                drop(lease);
                sleep(Duration::from_millis(50)).await;
            });
            faults.heal();
        } else {
            brief.spawn(async move {
                pending::<()>().await;
                drop(lease);
            });
        }
        drop(brief);
        let start = Instant::now();
        while backend.locks() > 1 {
            assert!(start.elapsed() < LONG / 3, "the lease is not released");
            thread::sleep(Duration::from_millis(10));
        }
    }
    lasting.block_on(async {
        drop(other);
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    });
}

/// A store that never replies to a claim for the lock `a`, and records that claim.
#[derive(Clone, Default)]
struct Unanswering {
    inner: MemoryBackend,
    wanted: Arc<std::sync::Mutex<Option<(LockKey, Claim)>>>,
}

impl LockStore for Unanswering {
    delegate_lock!(inner: acquire_all, renew, release, watch);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        if *lock == LockKey::new("default", "a") {
            *self.wanted.lock().unwrap() = Some((*lock, *claim));
            pending::<()>().await;
        }
        self.inner.acquire(lock, claim).await
    }

    fn reach(&self) -> Reach {
        Reach::Process
    }
}

/// Regression: the only release came before the grant.
#[test]
fn grant_after_the_end_of_a_runtime_is_released() {
    let store = Unanswering::default();
    let locks = Locks::new(store.clone(), "default").deadline(LONG);
    let parallel = || Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (brief, lasting) = (parallel(), parallel());
    let other = lasting.block_on(locks.lock("b").into_future()).unwrap();
    drop(brief.spawn(locks.lock("a").into_future()));
    let start = Instant::now();
    while store.wanted.lock().unwrap().is_none() {
        assert!(start.elapsed() < LONG, "no claim arrives");
        thread::sleep(Duration::from_millis(10));
    }
    drop(brief);
    thread::sleep(Duration::from_millis(100));
    let (lock, claim) = store.wanted.lock().unwrap().unwrap();
    lasting.block_on(store.inner.acquire(&lock, &claim)).unwrap();
    assert_eq!(store.inner.locks(), 2);
    let start = Instant::now();
    while store.inner.locks() > 1 {
        assert!(start.elapsed() < LONG / 3, "the lease is not released");
        thread::sleep(Duration::from_millis(10));
    }
    lasting.block_on(async {
        drop(other);
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    });
}

/// Regression: all leases of the same renewal call were lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_data_loses_no_other_lease() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let locks = locks(&server).await.ttl(Duration::from_secs(3));
    let (lost, kept) = (locks.lock("a").await.unwrap(), locks.lock("b").await.unwrap());
    let _: u64 = command(&server, &["DEL", LEASE]);
    let _: u64 = command(&server, &["RPUSH", LEASE, "x"]);
    assert_eq!(timeout(LONG, lost.lost()).await.unwrap().reason(), LossReason::Taken);
    sleep(Duration::from_millis(3_500)).await;
    assert!(kept.check().is_ok());
    assert_eq!(command::<Vec<String>>(&server, &["LRANGE", LEASE, "0", "-1"]), ["x"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_key_loses_the_lease_at_the_next_renewal() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let ttl = Duration::from_secs(3);
    let locks = locks(&server).await.ttl(ttl);
    let cancelled = Arc::new(AtomicBool::new(true));
    let body = locks.run("a", async |lease| {
        let _: u64 = command(&server, &["DEL", LEASE]);
        let other = self::locks(&server).await.try_lock("a").await.unwrap();
        assert!(other.fence() > lease.fence());
        sleep(LONG).await;
        cancelled.store(false, Ordering::SeqCst);
    });
    let start = Instant::now();
    let error = LockError::from(body.await.unwrap_err());
    assert!(matches!(&error, LockError::Lost(lost) if lost.reason() == LossReason::Taken), "{error:?}");
    assert!(start.elapsed() < ttl, "{:?}", start.elapsed());
    assert!(cancelled.load(Ordering::SeqCst));
}

/// Regression: both bodies ran at the same time, and both calls returned `Ok`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_reports_a_flushed_lease() {
    let server = RedisServer::start();
    let (here, there) = (locks(&server).await, locks(&server).await);
    let outcome = here.run("a", async |_| {
        let _: () = command(&server, &["FLUSHALL"]);
        there.run("a", async |_| 1).await.unwrap()
    });
    match outcome.await {
        Err(RunError::Unprotected { lost, output: 1 }) => assert_eq!(lost.reason(), LossReason::Taken),
        outcome => panic!("{outcome:?}"),
    }
    assert_eq!(here.run("a", async |_| 2).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_learns_of_a_loss_before_its_key_expires() {
    let _alone = alone().await;
    for is_killed in [false, true] {
        while !is_known_in_time(is_killed).await {}
    }
}

/// Takes a lease from a server that then stops, and checks how long the holder believes that it has it. False if the setup took so long
/// that the lease may have been renewed before the server stopped.
async fn is_known_in_time(is_killed: bool) -> bool {
    let ttl = Duration::from_secs(2);
    let meter = ProcessorMeter::start();
    let mut server = RedisServer::start();
    let locks = Locks::new(impatient(&server).await, "default").ttl(ttl).deadline(Duration::from_secs(20));
    let start = Instant::now();
    let lease = locks.lock("a").await.unwrap();
    let value: Vec<u8> = command(&server, &["GET", LEASE]);
    // The end of the lease in microseconds, after its kind and the last fence.
    let ends = u64::from_le_bytes([&value[8..15], &[0]].concat().try_into().unwrap());
    if is_killed {
        server.kill();
    } else {
        server.pause();
    }
    if start.elapsed() >= ttl / 3 {
        return false;
    }
    // `remaining` is read before the clock, so a preemption in between only makes the sum larger. The minimum discards it.
    let believes_until = |lease: &Lease| {
        let left = (0..20).map(|_| lease.remaining().as_micros() as u64 + now_us());
        left.min().unwrap()
    };
    let margin = (ttl / 100).as_micros() as u64;
    assert!(believes_until(&lease) <= ends - margin);
    // Renewals are in flight meanwhile, without a reply.
    sleep(ttl / 2).await;
    assert!(lease.check().is_err() || believes_until(&lease) <= ends - margin);
    assert_eq!(timeout(LONG, lease.lost()).await.unwrap().reason(), LossReason::Expired);
    let (notified, notified_us) = (Instant::now(), now_us());
    assert!(lease.check().is_err() && start.elapsed() >= ttl / 2, "{:?}", start.elapsed());
    // A holder without a processor cannot be notified.
    let waited = meter.stop().between(notified - SLACK, notified);
    let late = Duration::from_micros(notified_us.saturating_sub(ends));
    assert!(late <= waited, "notified {late:?} after the key expired, of which {waited:?} without a processor");
    if !is_killed {
        server.resume();
        // The renewal task has dropped the lease, so another caller of this process can get the lock.
        drop(locks.lock("a").wait(LONG).await.unwrap());
    }
    true
}

#[test]
fn holder_learns_of_a_loss_after_its_runtime_stalled() {
    let server = RedisServer::start();
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let here = runtime();
    here.block_on(async {
        let locks = locks(&server).await.ttl(Duration::from_millis(400));
        let lease = locks.lock("a").await.unwrap();
        // Blocks the whole runtime: no timer fires, and no lease is renewed for twice the `ttl`.
        thread::sleep(Duration::from_millis(800));
        assert!(lease.check().is_err());
        assert_eq!((lease.state(), lease.remaining()), (LeaseState::Lost, Duration::ZERO));
        // `lost` returns without waiting.
        assert_eq!(timeout(Duration::ZERO, lease.lost()).await.unwrap().reason(), LossReason::Expired);

        let mut is_untouched = true;
        let outcome = locks.run("b", async |_| {
            thread::sleep(Duration::from_millis(800));
            yield_now().await;
            is_untouched = false;
        });
        assert!(outcome.await.unwrap_err().is_lost());
        assert!(is_untouched, "the body continued without the lock");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_is_no_lost_lease() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let locks = locks(&server).await.ttl(Duration::from_millis(1_500));
    let lease = locks.lock("a").await.unwrap();
    for _ in 0..10 {
        let _: u64 = command(&server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        let _: () = command(&server, &["SCRIPT", "FLUSH"]);
        sleep(Duration::from_millis(200)).await;
        assert!(lease.check().is_ok(), "{lease:?}");
    }
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_notified_after_the_subscription_was_cut() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let (here, there) = (locks(&server).await, locks(&server).await.wait(LONG));
    let lease = here.lock("a").await.unwrap();
    let waiter = tokio::spawn(async move {
        let lease = there.lock("a").await.unwrap();
        (Instant::now(), lease.release().await)
    });
    let listens = || server.query::<Vec<String>>("PUBSUB CHANNELS *:free").len() == 1;
    for _ in 0..3 {
        tokio::task::block_in_place(|| wait_until("the waiter listens", listens));
        let killed: u64 = command(&server, &["CLIENT", "KILL", "TYPE", "pubsub"]);
        assert_eq!(killed, 1, "one connection listens for the whole process");
    }
    tokio::task::block_in_place(|| wait_until("the waiter listens again", listens));
    // Between two polls of the lock.
    sleep(Duration::from_millis(300)).await;
    let meter = ProcessorMeter::start();
    let freed = Instant::now();
    lease.release().await.unwrap();
    let (taken, released) = waiter.await.unwrap();
    assert_notified_at_once(freed, taken, meter);
    assert_eq!(released.unwrap(), ReleaseOutcome::Released);
}

/// The rights that every user needs to connect.
const RIGHTS: &[&str] = &[
    "+eval",
    "+evalsha",
    "+unlink",
    "+get",
    "+mget",
    "+set",
    "+pttl",
    "+pexpire",
    "+time",
    "+getrange",
    "+setrange",
    "+strlen",
    "+append",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_without_notifications_polls_every_second() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let acl = ["ACL", "SETUSER", "mute", "on", ">secret", "~tollgate:2:*", "resetchannels"];
    let _: () = command(&server, &[&acl[..], RIGHTS].concat());
    let url = format!("redis://mute:secret@127.0.0.1:{}/", server.port());
    let mute =
        Locks::new(RedisBackend::connect(url).await.unwrap(), "default").deadline(Duration::from_secs(2)).wait(LONG);
    let manager = bb8_redis::RedisConnectionManager::new(server.url()).unwrap();
    let pool = bb8_redis::bb8::Pool::builder().max_size(1).build(manager).await.unwrap();
    let pooled = RedisOptions::from_pool(pool).connect().await.unwrap();
    let pooled = Locks::new(pooled, "default").deadline(Duration::from_secs(2)).wait(LONG);
    let holder = locks(&server).await;
    for locks in [mute, pooled] {
        let lease = holder.lock("a").await.unwrap();
        let waiter = tokio::spawn(locks.lock("a").into_future());
        sleep(Duration::from_millis(300)).await;
        let freed = Instant::now();
        lease.release().await.unwrap();
        let lease = waiter.await.unwrap().unwrap();
        assert!(freed.elapsed() < Duration::from_secs(1) + SLACK, "{:?}", freed.elapsed());
        // It can release its lease like any other client.
        assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    }
}

/// Regression: the server does not close the connection when it refuses a subscription. The refused client opened another connection at
/// once, ninety times a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_subscription_causes_no_reconnect_loop() {
    let server = RedisServer::start();
    let acl = ["ACL", "SETUSER", "mute", "on", ">secret", "~tollgate:2:*", "&*", "+@all", "-subscribe"];
    let _: () = command(&server, &acl);
    let url = format!("redis://mute:secret@127.0.0.1:{}/", server.port());
    let mute =
        Locks::new(RedisBackend::connect(url).await.unwrap(), "default").deadline(Duration::from_secs(2)).wait(LONG);
    let lease = locks(&server).await.lock("a").await.unwrap();
    let connections = || server.info("total_connections_received").unwrap().parse::<u32>().unwrap();
    let before = connections();
    let waiter = tokio::spawn(mute.lock("a").into_future());
    sleep(Duration::from_secs(2)).await;
    let opened = connections() - before;
    assert!(opened < 10, "{opened} connections in two seconds");
    lease.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

/// The server refuses a subscription to several channels if one of them is forbidden.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_channel_does_not_silence_others() {
    let server = RedisServer::start();
    let channels = "&tollgate:2:{lock:default:a}:*";
    let acl = ["ACL", "SETUSER", "half", "on", ">secret", "~tollgate:2:*", "resetchannels", channels, "+@all"];
    let _: () = command(&server, &acl);
    let url = format!("redis://half:secret@127.0.0.1:{}/", server.port());
    let half =
        Locks::new(RedisBackend::connect(url).await.unwrap(), "default").deadline(Duration::from_secs(2)).wait(LONG);
    let holder = locks(&server).await;
    let [a, b] = [holder.lock("a").await.unwrap(), holder.lock("b").await.unwrap()];
    let for_b = tokio::spawn(half.lock("b").into_future());
    let refusals = || command::<Vec<redis::Value>>(&server, &["ACL", "LOG"]).len();
    tokio::task::block_in_place(|| wait_until("the first channel is refused", || refusals() > 0));
    let for_a = tokio::spawn(half.lock("a").into_future());
    let heard = || command::<Vec<String>>(&server, &["PUBSUB", "CHANNELS"]).iter().any(|name| name.contains(":a}"));
    tokio::task::block_in_place(|| wait_until("the other channel is subscribed", heard));
    a.release().await.unwrap();
    b.release().await.unwrap();
    for waiter in [for_a, for_b] {
        waiter.await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(heard(), "the connection is still there");
}

fn claim_in(line: Queueing, ttl: Duration) -> Claim {
    let mut claim = Claim::new(Token::random().unwrap(), ttl);
    claim.queueing = line;
    claim
}

/// Regression: waiters behind a dead waiter called the store continuously until the dead waiter's position expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_behind_a_dead_waiter_polls_rarely() {
    let server = RedisServer::start();
    let (every, mute) = ("+@all", "mute");
    let _: () = command(&server, &["ACL", "SETUSER", mute, "on", ">secret", "~tollgate:2:*", "resetchannels", every]);
    let url = format!("redis://{mute}:secret@127.0.0.1:{}/", server.port());
    let backend = connect(&server).await;
    let lock = LockKey::new("default", "a");
    for url in [url, server.url().to_owned()] {
        let store = FaultStore::new(RedisBackend::connect(url).await.unwrap());
        let faults = store.faults();
        let claim = |line| claim_in(line, LONG);
        let (held, dead) = (claim(Queueing::Bypass), claim(Queueing::Enqueue));
        backend.acquire(&lock, &held).await.unwrap();
        assert!(matches!(backend.acquire(&lock, &dead).await.unwrap(), Acquired::Queued { is_first: true, .. }));
        backend.release(&lock, &held.token).await.unwrap();
        let locks = Locks::new(store, "default").fair().deadline(Duration::from_secs(2)).wait(LONG);
        let waiter = tokio::spawn(locks.lock("a").into_future());
        sleep(Duration::from_secs(2)).await;
        assert!(!waiter.is_finished());
        let calls = faults.calls(Verb::Acquire);
        assert!((2..=6).contains(&calls), "{calls} calls in two seconds");
        timeout(LONG, waiter).await.unwrap().unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn foreign_data_is_an_error_and_stays_unchanged() {
    let server = RedisServer::start();
    let locks = locks(&server).await;
    let foreign: [&[&str]; 5] = [
        &["RPUSH", LEASE, "x"],
        &["SET", LEASE, "hello"],
        &["SET", LEASE, ""],
        &["SET", LEASE, "2345678901234567890"],
        &["SET", LEASE, "\u{1}234567890123456789012345678901234"],
    ];
    for words in foreign {
        let _: redis::Value = command(&server, words);
        let before: Vec<u8> = command(&server, &["DUMP", LEASE]);
        let answer = locks.try_lock("a").await;
        assert!(matches!(&answer, Err(LockError::Store(error)) if error.is_foreign_data()), "{words:?}: {answer:?}");
        assert_eq!(command::<Vec<u8>>(&server, &["DUMP", LEASE]), before);
        let _: u64 = command(&server, &["DEL", LEASE]);
    }
}

/// Checks that the waiter was notified and did not find the release by polling. A waiter without a processor cannot be notified.
fn assert_notified_at_once(given_back: Instant, taken: Instant, meter: ProcessorMeter) {
    let (took, waited) = (taken - given_back, meter.stop().between(given_back, taken));
    assert!(took < Duration::from_millis(400) + waited, "{took:?}, of which {waited:?} without a processor");
}

/// As in a deployment that switches to fair locks, or back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fair_holder_notifies_a_plain_waiter() {
    let server = RedisServer::start();
    let (fair, plain) = (locks(&server).await.fair(), locks(&server).await);
    for _ in 0..3 {
        let lease = fair.lock("a").await.unwrap();
        let plain = plain.clone();
        let waiting = tokio::spawn(async move {
            let lease = plain.lock("a").wait(Duration::from_secs(20)).await.unwrap();
            (Instant::now(), lease.release().await)
        });
        let listens = || server.query::<Vec<String>>("PUBSUB CHANNELS *:free").len() == 1;
        tokio::task::block_in_place(|| wait_until("the waiter listens", listens));
        // Between two polls of the lock.
        sleep(Duration::from_millis(300)).await;
        let meter = ProcessorMeter::start();
        let given_back = Instant::now();
        lease.release().await.unwrap();
        let (taken, released) = waiting.await.unwrap();
        assert_notified_at_once(given_back, taken, meter);
        assert_eq!(released.unwrap(), ReleaseOutcome::Released);
    }
}

/// Renewals and releases work without free memory: a release frees memory in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_and_releases_work_without_free_memory() {
    let server = RedisServer::start();
    let locks = locks(&server).await.ttl(Duration::from_secs(2));
    let mut leases = Vec::new();
    for key in ["a", "b", "c"] {
        leases.push(locks.lock(key).await.unwrap());
    }
    leases.push(locks.clone().fair().lock("d").await.unwrap());
    server.limit_memory(1);
    let refused = locks.try_lock("e").await;
    assert!(matches!(&refused, Err(LockError::Store(error)) if error.is_out_of_memory()), "{refused:?}");
    sleep(Duration::from_millis(4_500)).await;
    // All at once, so that some releases are batched.
    let mut giving: JoinSet<_> = leases.into_iter().map(Lease::release).collect();
    while let Some(released) = giving.join_next().await {
        assert_eq!(released.unwrap().unwrap(), ReleaseOutcome::Released);
    }
    server.limit_memory(0);
    for key in ["a", "b", "c", "d"] {
        drop(locks.try_lock(key).await.unwrap());
    }
}

/// Regression: a dead waiter at the head of the queue blocked it forever once its position was evicted. Of several dead waiters, each
/// blocked the queue for the full time.
#[tokio::test]
async fn evicted_positions_are_restored_once() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let lock = LockKey::new("default", "a");
    let claim = |ttl| claim_in(Queueing::Enqueue, ttl);
    // Ends after the positions have been checked, and before the restored positions expire.
    let short = claim(Duration::from_secs(2));
    assert!(matches!(backend.acquire(&lock, &short).await.unwrap(), Acquired::Granted { .. }));
    for place in 0..3 {
        let answer = backend.acquire(&lock, &claim(LONG)).await.unwrap();
        assert!(matches!(answer, Acquired::Queued { is_first, .. } if is_first == (place == 0)), "{answer:?}");
    }
    let start = Instant::now();
    let _: u64 = command(&server, &["UNLINK", "tollgate:2:{lock:default:a}:positions"]);
    // A claim that does not enter the queue leaves no key without an expiry.
    let passing = claim_in(Queueing::Yield, LONG);
    assert!(matches!(backend.acquire(&lock, &passing).await.unwrap(), Acquired::Busy { .. }));
    let lives: i64 = command(&server, &["PTTL", "tollgate:2:{lock:default:a}:positions"]);
    assert!(lives > 0, "{lives}");
    let mine = claim(LONG);
    while !matches!(backend.acquire(&lock, &mine).await.unwrap(), Acquired::Granted { .. }) {
        assert!(start.elapsed() < Claim::POSITION_TTL + SLACK * 4, "the positions of the dead waiters have expired");
        sleep(Duration::from_millis(50)).await;
    }
    assert!(start.elapsed() > Claim::POSITION_TTL - SLACK, "the dead waiters had positions until then");
}

/// Regression: if the server's clock was set back, an earlier lease lasted longer by that much.
#[tokio::test]
async fn clock_set_back_extends_no_lease_and_lowers_no_fence() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let locks = locks(&server).await;
    let fence = locks.lock("a").await.unwrap().fence();
    sleep(Duration::from_millis(100)).await;
    let hour = 3_600_000_000;
    for is_one_of_several in [false, true] {
        let (seconds, _): (u64, u64) = command(&server, &["TIME"]);
        let (last_fence, ends) = (fence + hour, seconds * 1_000_000 + hour);
        let mut value = vec![1];
        value.extend_from_slice(&last_fence.to_le_bytes()[..7]);
        value.extend_from_slice(&ends.to_le_bytes()[..7]);
        value.extend_from_slice(&500_u32.to_le_bytes());
        value.extend_from_slice(&fence.to_le_bytes()[..7]);
        value.extend_from_slice(&[7; 16]);
        let mut connection = server.connection();
        let _: () = redis::cmd("SET").arg(LEASE).arg(value).arg("PX").arg(600_000).query(&mut connection).unwrap();
        let start = Instant::now();
        let next_fence = match is_one_of_several {
            false => locks.lock("a").await.unwrap().fence(),
            true => locks.lock_all(["a", "b"]).await.unwrap().leases()[0].fence(),
        };
        assert!(start.elapsed() < Duration::from_millis(500) + SLACK, "{:?}", start.elapsed());
        assert!(next_fence > last_fence);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncontended_lock_costs_two_commands() {
    let server = RedisServer::start();
    let locks = locks(&server).await;
    // The first calls carry the text of the scripts.
    locks.lock("a").await.unwrap().release().await.unwrap();
    let _: () = command(&server, &["CONFIG", "RESETSTAT"]);
    for _ in 0..100 {
        locks.lock("a").await.unwrap().release().await.unwrap();
    }
    let info: String = command(&server, &["INFO", "commandstats"]);
    let mut calls: Vec<_> =
        info.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(",usec")).collect();
    // The statistics also count the commands of scripts and of this test. There are no other commands.
    let known = ["get", "set", "time", "publish", "config", "info", "hello", "client", "select"];
    calls.retain(|(call, _)| !known.iter().any(|known| call.starts_with(known)));
    let calls: Vec<_> = calls.into_iter().map(|(call, _)| call).collect();
    assert_eq!(calls, ["evalsha:calls=200"]);
    // No caller has waited, so there is no subscription.
    let listeners: String = command(&server, &["CLIENT", "LIST", "TYPE", "pubsub"]);
    assert_eq!(listeners.trim(), "");
}

/// Several clients use one lock while Redis is stopped, cut off and made to forget its scripts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_clients_hold_the_same_lock() {
    let _alone = alone().await;
    let server = RedisServer::start();
    let history = History::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for client in 0..4_u64 {
        let backend = impatient(&server).await;
        let locks = Locks::new(backend, "default").ttl(Duration::from_millis(300)).wait(LONG);
        for task in 0..3_u64 {
            let (locks, history, stop) = (locks.clone(), history.clone(), Arc::clone(&stop));
            tasks.spawn(async move {
                let mut turn = client + task;
                while !stop.load(Ordering::Relaxed) {
                    let Ok(lease) = locks.lock("a").await else { continue };
                    history.stay(&lease, Duration::from_millis(turn * 7 % 20)).await;
                    turn += 1;
                    match turn % 3 {
                        0 => drop(lease),
                        1 => drop(lease.release().await),
                        // Dropped halfway.
                        _ => drop(DropAt::new(1, lease.release()).await),
                    }
                }
            });
        }
    }
    for round in 0..12_u64 {
        match round % 4 {
            0 => {
                server.pause();
                sleep(Duration::from_millis(100 + 60 * round)).await;
                server.resume();
            }
            1 => drop(command::<u64>(&server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])),
            2 => drop(command::<u64>(&server, &["CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes"])),
            _ => command::<()>(&server, &["SCRIPT", "FLUSH"]),
        }
        sleep(Duration::from_millis(400)).await;
    }
    stop.store(true, Ordering::Relaxed);
    timeout(LONG, tasks.join_all()).await.expect("all clients finish");
    history.check();
    assert!(history.len() > 100, "only {} stays", history.len());
    println!("{} stays", history.len());
}

#[tokio::test(start_paused = true)]
async fn aborted_waiters_block_no_other_waiter() {
    let locks = Locks::new(MemoryBackend::new(), "default");
    let lease = locks.lock("a").await.unwrap();
    let waiters: Vec<_> = (0..100).map(|_| tokio::spawn(locks.lock("a").into_future())).collect();
    yield_now().await;
    for waiter in waiters.iter().step_by(2) {
        waiter.abort();
    }
    drop(lease);
    for (at, waiter) in waiters.into_iter().enumerate() {
        match waiter.await {
            Ok(lease) => {
                assert_eq!(at % 2, 1, "an aborted waiter has the lock");
                drop(lease.unwrap());
            }
            Err(error) => assert!(at % 2 == 0 && error.is_cancelled(), "{at}: {error}"),
        }
    }
    // A body that never ends is dropped with its caller.
    let body = tokio::spawn(locks.run("a", async |_| pending::<()>().await));
    yield_now().await;
    body.abort();
    let _ = body.await;
    drop(locks.try_lock("a").await.unwrap());
    locks.shutdown().await;
}

/// Tries to acquire all of these locks at the same time.
async fn ask_for_all(locks: &[Locks], keys: usize) -> Vec<Result<Lease, LockError>> {
    let mut asking = JoinSet::new();
    for key in 0..keys {
        let request = locks[key % locks.len()].try_lock(key.to_string());
        asking.spawn(async move { (key, request.await) });
    }
    let mut answers = asking.join_all().await;
    answers.sort_by_key(|(key, _)| *key);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Concurrent callers share calls and nothing else: a problem with one lock does not affect the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_lock_affects_no_other_lock_of_its_batch() {
    let server = RedisServer::start();
    let lease_of = |key: usize| format!("tollgate:2:{{lock:default:{key}}}:lease");
    // Another type, another layout, and a lease from before the clock was set back by a century.
    let _: () = command(&server, &["RPUSH", &lease_of(7), "x"]);
    let _: () = command(&server, &["SET", &lease_of(8), "hello"]);
    let foreign = [7, 8].map(|key| command::<Vec<u8>>(&server, &["DUMP", &lease_of(key)]));
    let mut ancient = vec![1];
    for number in [5_000_000_000_000_000_u64, 5_000_000_000_000_000] {
        ancient.extend(&number.to_le_bytes()[..7]);
    }
    ancient.extend(10_u32.to_le_bytes());
    ancient.extend(&5_000_000_000_000_000_u64.to_le_bytes()[..7]);
    ancient.extend([7; 16]);
    let mut set = redis::cmd("SET");
    let _: () = set.arg(lease_of(9)).arg(ancient).query(&mut server.connection()).unwrap();

    let (locks, others) = (locks(&server).await, self::locks(&server).await);
    let answers = ask_for_all(std::slice::from_ref(&locks), 100).await;
    for (key, answer) in answers.iter().enumerate() {
        match (key, answer) {
            (7 | 8, Err(LockError::Store(error))) if error.is_foreign_data() => {}
            (9, Err(LockError::Busy(busy))) if busy.retry_after() <= Duration::from_secs(1) => {}
            (0..7 | 10.., Ok(_)) => {}
            answer => panic!("{answer:?}"),
        }
    }
    assert_eq!(foreign, [7, 8].map(|key| command::<Vec<u8>>(&server, &["DUMP", &lease_of(key)])));
    drop(answers);
    timeout(LONG, locks.shutdown()).await.unwrap();
    let lease = others.lock("9").await.unwrap();
    assert!(lease.fence() > 5_000_000_000_000_000, "the fence exceeds the last one, whatever the clock says");
}

/// Futures can also be dropped anywhere if many concurrent callers share calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_batched_requests_leave_nothing_behind() {
    let server = RedisServer::start();
    let (here, there) = (locks(&server).await, locks(&server).await);
    for polls in 0..6 {
        let mut asking = JoinSet::new();
        for key in 0..100_u32 {
            // Some requests share these calls and are not dropped.
            let polls = if key % 3 == 0 { 100 } else { polls };
            let request = DropAt::new(polls, here.lock(key).into_future());
            asking.spawn(async move { drop(request.await) });
        }
        asking.join_all().await;
        let all_are_free = async {
            for key in 0..100_u32 {
                drop(there.lock(key).wait(LONG).await.unwrap());
            }
        };
        // A leftover lease would expire only after its `ttl`, which is as long as this timeout.
        timeout(LONG / 2, all_are_free).await.expect("all locks were released");
    }
}

/// A user may be allowed some locks and not others, or may lack a right that a batch needs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_batch_is_sent_one_by_one() {
    let server = RedisServer::start();
    let some = ["ACL", "SETUSER", "some", "on", ">secret", "~tollgate:2:{lock:orders:*", "~tollgate:2:{probe}"];
    let _: () = command(&server, &[&some[..], &["&*", "+@all"]].concat());
    let few = ["ACL", "SETUSER", "few", "on", ">secret", "~tollgate:2:*", "resetchannels"];
    let _: () = command(&server, &[&few[..], RIGHTS].concat());
    for user in ["some", "few"] {
        let url = format!("redis://{user}:secret@127.0.0.1:{}/", server.port());
        let backend = RedisBackend::connect(url).await.unwrap();
        if user == "few" {
            // Fewer rights than a user needs to connect.
            let fewer = ["ACL", "SETUSER", user, "-@all", "+eval", "+evalsha", "+get", "+set", "+time"];
            let _: () = command(&server, &fewer);
        }
        let both = ["orders", "payments"].map(|name| {
            // Without a circuit, since each refusal counts as a failure, and a late call would be denied by the open circuit.
            Locks::new(backend.clone(), name).deadline(Duration::from_secs(2)).circuit_breaker(CircuitBreaker::off())
        });
        let mut leases = Vec::new();
        for (key, answer) in ask_for_all(&both, 60).await.into_iter().enumerate() {
            match answer {
                Ok(lease) => leases.push(lease),
                Err(LockError::Store(error)) if error.is_unauthorized() && user == "some" && key % 2 == 1 => {}
                Err(error) => panic!("{user}, {key}: {error}"),
            }
        }
        assert_eq!(leases.len(), if user == "some" { 30 } else { 60 });
        let mut giving = JoinSet::new();
        for lease in leases {
            giving.spawn(async move { assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released) });
        }
        giving.join_all().await;
    }
}

/// A released key keeps its expiry, unless that is long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn released_lease_of_a_day_expires_within_minutes() {
    let server = RedisServer::start();
    let locks = locks(&server).await.ttl(Duration::from_secs(86_400));
    let leases = ask_for_all(std::slice::from_ref(&locks), 60).await;
    let mut giving: JoinSet<_> = leases.into_iter().map(|lease| lease.unwrap().release()).collect();
    while let Some(released) = giving.join_next().await {
        assert_eq!(released.unwrap().unwrap(), ReleaseOutcome::Released);
    }
    let keys: Vec<String> = command(&server, &["KEYS", "*:lease"]);
    assert_eq!(keys.len(), 60);
    for key in keys {
        let ttl: u64 = command(&server, &["PTTL", &key]);
        assert!(ttl <= 25 * 60 * 1_000, "{key} lives for {ttl} ms");
    }
}

/// A batched release notifies the waiter, whether or not the releasing user may run `PUBSUB NUMSUB`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batched_release_notifies_waiters() {
    let server = RedisServer::start();
    let there = locks(&server).await;
    let rights = format!("{} +publish +subscribe +unsubscribe", RIGHTS.join(" "));
    for (user, more) in [("knows", "+pubsub|numsub"), ("guesses", "-pubsub")] {
        let rule = format!("ACL SETUSER {user} on >secret ~tollgate:2:* resetchannels &tollgate:2:* {rights} {more}");
        let _: () = command(&server, &rule.split(' ').collect::<Vec<_>>());
        let url = format!("redis://{user}:secret@127.0.0.1:{}/", server.port());
        let here = Locks::new(RedisBackend::connect(url).await.unwrap(), "default").deadline(Duration::from_secs(2));
        let listeners =
            || command::<(String, u64)>(&server, &["PUBSUB", "NUMSUB", "tollgate:2:{lock:default:5}:free"]).1;
        // Some releases are not batched, possibly also that of the awaited lock.
        for _ in 0..5 {
            let leases = ask_for_all(std::slice::from_ref(&here), 60).await;
            let waiter = there.clone();
            let waiting = tokio::spawn(async move {
                let lease = waiter.lock("5").wait(LONG).await.unwrap();
                (Instant::now(), lease)
            });
            while listeners() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            // After a poll of the lock, and half a second before the next one.
            sleep(Duration::from_millis(50)).await;
            let _: () = command(&server, &["CONFIG", "RESETSTAT"]);
            let meter = ProcessorMeter::start();
            let given_back = Instant::now();
            let mut giving = JoinSet::new();
            for lease in leases {
                giving.spawn(
                    async move { assert_eq!(lease.unwrap().release().await.unwrap(), ReleaseOutcome::Released) },
                );
            }
            giving.join_all().await;
            let (taken, lease) = waiting.await.unwrap();
            assert_notified_at_once(given_back, taken, meter);
            lease.release().await.unwrap();
            // An unbatched release publishes in any case, and so does the release of the waiter.
            let info: String = command(&server, &["INFO", "commandstats"]);
            let calls = |name: &str| -> u64 {
                let line = info.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{name}:calls=")));
                line.and_then(|calls| calls.split(',').next()?.parse().ok()).unwrap_or_default()
            };
            let (together, alone, published) = (calls("mget"), calls("get"), calls("publish"));
            assert!(together > 0, "{user}: no release was batched");
            if user == "knows" {
                assert!(published <= alone, "{user}: {published} messages for {alone} unbatched releases");
            } else {
                assert!(published >= 60, "{user}: {published} messages");
            }
        }
    }
}

/// A batched release frees the lock for all clients, and a second release changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batched_release_frees_locks_for_all_clients() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let locks = Locks::new(backend.clone(), "default").deadline(Duration::from_secs(2));
    for turn in 0..3 {
        let leases = ask_for_all(std::slice::from_ref(&locks), 60).await;
        let mut giving = JoinSet::new();
        for lease in leases {
            giving.spawn(async move { lease.unwrap().release().await.unwrap() });
        }
        giving.join_all().await;
        let values = (0..60).map(|key| format!("tollgate:2:{{lock:default:{key}}}:lease"));
        let of = |value: &[u8], at: usize| value[at..at + 7].iter().rfold(0, |n, byte| n << 8 | u64::from(*byte));
        let together = values.filter(|lease| {
            let value: Vec<u8> = command(&server, &["GET", lease]);
            value.len() == 42 && of(&value, 8) == 0
        });
        let together: Vec<_> = together.collect();
        let lease = together.last().expect("some releases are batched");
        let value: Vec<u8> = command(&server, &["GET", lease]);
        let token = Token::from_bytes(&value[26..]).unwrap();
        let subject = lease.trim_start_matches("tollgate:2:{lock:default:").trim_end_matches("}:lease");
        let lock = LockKey::new("default", subject);
        // The former holder holds nothing.
        assert_eq!(backend.renew(&[Renewal::new(lock, token, LONG)]).await.unwrap(), [false]);
        assert!(!backend.release(&lock, &token).await.unwrap().was_held);
        backend.name(&lock, &token, "nobody").await.unwrap();
        let status = backend.inspect(&lock).await.unwrap();
        assert!(!status.is_held() && status.last_fence >= of(&value, 1), "{status:?}");
        assert_eq!(command::<Vec<u8>>(&server, &["GET", lease]), value);
        let names: bool = command(&server, &["EXISTS", &lease.replace(":lease", ":names")]);
        assert!(!names, "a name without a holder");
        // Each script that grants treats the lock as free.
        let fence = match turn {
            0 => locks.try_lock(subject).await.unwrap().fence(),
            1 => locks.clone().fair().lock(subject).await.unwrap().fence(),
            _ => {
                // A single key does not use the script for several locks.
                let several = locks.lock_all([subject, "free"]).await.unwrap();
                several.leases().iter().find(|lease| *lease.lock() == LockKey::new("default", subject)).unwrap().fence()
            }
        };
        assert!(fence > of(&value, 1));
        timeout(LONG, async { drop(locks.lock(subject).wait(LONG).await.unwrap()) }).await.unwrap();
    }
}

/// Repeated acquisition of a lock does not rewrite its expiry. After the release of a long lease, the key expires as early as any other.
#[tokio::test]
async fn repeated_acquisition_keeps_the_expiry_of_the_key() {
    const KEPT_MS: i64 = 750_000;
    let server = RedisServer::start();
    let locks = locks(&server).await;
    let lives = || command::<i64>(&server, &["PTTL", "tollgate:2:{lock:default:a}:lease"]);
    let mut last = 0;
    for _ in 0..20 {
        let lease = locks.lock("a").await.unwrap();
        assert!(lease.fence() > last, "{} after {last}", lease.fence());
        last = lease.fence();
        assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    }
    let info: String = command(&server, &["INFO", "commandstats"]);
    let written = info.lines().find_map(|line| line.strip_prefix("cmdstat_set:calls="));
    let written: u32 =
        written.and_then(|calls| calls.split(',').next()?.parse().ok()).expect("the first grant sets the key");
    assert!(written <= 2, "at first, and when the next fifth of the expiry begins: {written}");
    assert!(lives() > KEPT_MS, "{}", lives());
    let lease = locks.lock("a").ttl(Duration::from_secs(3_600)).await.unwrap();
    assert!(lease.fence() > last && lives() > KEPT_MS + 3_500_000, "{}", lives());
    lease.release().await.unwrap();
    assert!((KEPT_MS - 60_000..=KEPT_MS).contains(&lives()), "{}", lives());
}

/// Concurrent requests need few calls to Redis.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_callers_share_calls() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let locks = Locks::new(patient(proxy.url()).await, "default").deadline(Duration::from_secs(2));
    // While a reply is on its way, further callers gather for the next call, also on a busy machine.
    proxy.to_client(Traffic::Delay(Duration::from_millis(30)));
    let calls = || -> u64 {
        let info: String = command(&server, &["INFO", "commandstats"]);
        let calls = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        calls.and_then(|calls| calls.split(',').next()?.parse().ok()).unwrap_or_default()
    };
    let before = calls();
    let mut tasks = JoinSet::new();
    for key in 0..64_u32 {
        let locks = locks.clone();
        tasks.spawn(async move {
            for _ in 0..20 {
                assert_eq!(locks.lock(key).await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
            }
        });
    }
    tasks.join_all().await;
    let made = calls() - before;
    assert!(made < 64 * 20, "{made} calls for {} cycles", 64 * 20);
    // Several leases of one holder are released in shared calls as well.
    let leases = locks.lock_all(0..64_u32).await.unwrap();
    let before = calls();
    assert_eq!(leases.release().await.unwrap(), ReleaseOutcome::Released);
    let made = calls() - before;
    assert!(made < 16, "{made} calls for 64 leases");
}

/// Regression: callers that got no connection had nothing to release, and tried to for as long as a lease would have lasted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ignores_requests_that_were_never_sent() {
    let mut server = RedisServer::start();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(1).connect().await.unwrap();
    let locks = Locks::new(backend.clone(), "default").deadline(Duration::from_secs(2));
    tokio::task::block_in_place(|| server.kill());
    // A command on a closed connection may have arrived. The limiter's call detects that, so that no lock request does.
    let limiter = Limiter::new(backend, Policy::new("first", Quota::per_hour(1).fixed_window()));
    for _ in 0..3 {
        assert!(limiter.check("alice").await.is_err());
    }
    for key in ["a", "b"] {
        assert!(matches!(locks.try_lock(key).await, Err(LockError::Store(error)) if error.is_unavailable()));
    }
    assert!(locks.lock("c").wait(Duration::from_millis(200)).await.is_err());
    timeout(Duration::from_secs(1), locks.shutdown()).await.expect("no call is in flight");
}

/// Regression: a loading server replies, so its requests counted as possibly executed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ignores_requests_to_a_loading_server() {
    let mut server = RedisServer::start();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(1).connect().await.unwrap();
    let locks = Locks::new(backend.clone(), "default").deadline(Duration::from_secs(2));
    tokio::task::block_in_place(|| {
        server.kill();
        server.restart_slowly();
    });
    // A command on a closed connection may have arrived. The limiter's call detects that, so that no lock request does.
    let limiter = Limiter::new(backend, Policy::new("first", Quota::per_hour(1).fixed_window()));
    let limiter = limiter.circuit_breaker(CircuitBreaker::off()).deadline(Duration::from_secs(2));
    let cause = |error: &StoreError| error.source().unwrap().to_string();
    let start = Instant::now();
    while let Err(error) = limiter.check("alice").await
        && !cause(&error).contains("loading")
    {
        assert!(start.elapsed() < LONG, "{}", cause(&error));
    }
    for key in ["a", "b"] {
        let refused = locks.try_lock(key).await;
        assert!(matches!(&refused, Err(LockError::Store(error)) if error.is_unavailable()), "{refused:?}");
    }
    assert!(locks.lock("c").wait(Duration::from_millis(200)).await.is_err());
    timeout(Duration::from_secs(5), locks.shutdown()).await.expect("no call is in flight");
    assert!(!server.is_answering(), "the server is still loading");
}
