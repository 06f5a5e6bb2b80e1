//! Locks that require replicas: servers whose replicas are connected, stopped, gone, or promoted.

use crate::support;

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::cluster::Cluster;
use support::processor::ProcessorMeter;
use support::proxy::{Proxy, Traffic};
use support::server::{RedisServer, wait_until};
use support::shared::patient;
use support::stores::delegate_lock;
use tokio::task::{block_in_place, yield_now};
use tokio::time::{sleep, timeout};
use tollgate::lock::store::{Acquired, Claim, LockStore, Renewal, Replicas};
use tollgate::lock::{
    CircuitBreaker, LeaseState, LockAdmin, LockKey, LossReason, ReleaseOutcome, Replication, RwLocks, Segmented,
};
use tollgate::testing::{Failure, FaultStore, Verb};
use tollgate::{
    ErrorResponder, GlobalKey, LockError, LockLayer, Locks, MemoryBackend, OnStoreError, RedisBackend, RedisOptions,
    StoreError,
};
use tower::{Layer, ServiceExt, service_fn};

const LONG: Duration = Duration::from_secs(20);

async fn locks(server: &RedisServer, replicas: u32) -> Locks {
    let backend = patient(server.url()).await;
    Locks::new(backend, "default")
        .replication(Replication::Require(replicas))
        .deadline(Duration::from_secs(1))
        .wait(Duration::ZERO)
}

fn replica_of(primary: &RedisServer) -> RedisServer {
    let port = primary.port().to_string();
    RedisServer::start_with(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"])
}

fn with_replicas(count: usize) -> (RedisServer, Vec<RedisServer>) {
    let primary = RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]);
    let replicas: Vec<_> = (0..count).map(|_| replica_of(&primary)).collect();
    primary.query::<()>("SET started 1");
    wait_until("the replicas are in sync", || primary.is_followed_by(count));
    (primary, replicas)
}

/// The number of replicas that had the lease, and the required number.
fn shortage<T: std::fmt::Debug>(answer: Result<T, LockError>) -> (u32, u32) {
    match answer {
        Err(LockError::NotReplicated(error)) => (error.replicas(), error.required()),
        answer => panic!("{answer:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_counts_once_enough_replicas_have_it() {
    let (primary, replicas) = with_replicas(2);
    let (two, three) = (locks(&primary, 2).await, locks(&primary, 3).await);
    for turn in 0..50 {
        let lease = two.lock(turn).await.unwrap();
        let key = format!("STRLEN tollgate:2:{{lock:default:{turn}}}:lease");
        for replica in &replicas {
            assert_eq!(replica.query::<u64>(&key), 8 + 34, "the lease was granted before the replicas had it");
        }
        assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    }
    let both = two.lock_all(["a", "b"]).await.unwrap();
    assert_eq!(both.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(shortage(three.lock("a").await), (2, 3));
    assert_eq!(shortage(three.lock_all(["d", "e"]).await), (2, 3));
    // The client releases the grants with too few replicas, and a waiter gets these locks as usual.
    let both = two.lock_all(["a", "d", "e"]).wait(LONG).await.unwrap();
    // A held lock is busy, regardless of its replicas.
    assert!(three.lock("a").await.is_err_and(|error| error.is_busy()));
    drop(both);
    for locks in [two, three] {
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
    let fair = locks(&primary, 3).await.fair();
    assert_eq!(shortage(fair.lock("c").wait(Duration::from_millis(300)).await), (2, 3));
    let backend = patient(primary.url()).await;
    let pages = RwLocks::new(backend, "rw_locks").replication(Replication::Require(2)).deadline(Duration::from_secs(1));
    drop((pages.read("a").await.unwrap(), pages.read("a").await.unwrap()));
    timeout(LONG, pages.shutdown()).await.expect("nothing is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_replica_blocks_grants_until_it_resumes() {
    let (primary, replicas) = with_replicas(1);
    let locks = locks(&primary, 1).await;
    replicas[0].pause();
    let start = Instant::now();
    assert_eq!(shortage(locks.lock("a").await), (0, 1));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    // A waiter retries, and later callers of this process queue behind it.
    let waiter = tokio::spawn(locks.lock("a").wait(LONG).into_future());
    sleep(Duration::from_millis(1_200)).await;
    assert!(!waiter.is_finished());
    // Callers that require no replicas do not wait for them.
    let plain = patient(primary.url()).await;
    let plain = Locks::new(plain, "default").deadline(Duration::from_secs(2)).wait(Duration::ZERO);
    drop(plain.lock("b").await.unwrap());
    replicas[0].resume();
    drop(timeout(LONG, waiter).await.unwrap().unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreplicated_renewal_does_not_extend_a_lease() {
    let (primary, replicas) = with_replicas(1);
    let ttl = Duration::from_secs(3);
    let locks = locks(&primary, 1).await.ttl(ttl).deadline(Duration::from_millis(300));
    let lease = locks.lock("a").await.unwrap();
    replicas[0].pause();
    let start = Instant::now();
    while lease.state() != LeaseState::Suspended {
        assert!(start.elapsed() < ttl && lease.state() != LeaseState::Lost, "{lease:?}");
        sleep(Duration::from_millis(10)).await;
    }
    replicas[0].resume();
    let start = Instant::now();
    while lease.state() != LeaseState::Held {
        assert!(start.elapsed() < ttl, "the lease does not recover");
        sleep(Duration::from_millis(10)).await;
    }
    replicas[0].pause();
    let stopped = Instant::now();
    assert_eq!(timeout(LONG, lease.lost()).await.unwrap().reason(), LossReason::Expired);
    // The lease lasts this long only if a renewal counts that came after the replica had stopped.
    assert!(stopped.elapsed() < ttl * 5 / 4, "a renewal counted without the replica");
    replicas[0].resume();
}

/// Regression: each caller waited for replicas behind the others on the same connection. Most exceeded their deadline and got a store
/// error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_callers_learn_of_missing_replicas() {
    let primary = RedisServer::start();
    let locks = locks(&primary, 1).await;
    let asking: Vec<_> = (0..64).map(|key| tokio::spawn(locks.try_lock(key).into_future())).collect();
    for asked in asking {
        assert_eq!(shortage(asked.await.unwrap()), (0, 1));
    }
    timeout(LONG, locks.shutdown()).await.expect("nothing is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_callers_get_replicated_grants() {
    let (primary, replicas) = with_replicas(1);
    let locks = locks(&primary, 1).await;
    let asking: Vec<_> = (0..64).map(|key| tokio::spawn(locks.try_lock(key).into_future())).collect();
    for (key, asked) in asking.into_iter().enumerate() {
        let lease = asked.await.unwrap().unwrap();
        let key = format!("STRLEN tollgate:2:{{lock:default:{key}}}:lease");
        assert_eq!(block_in_place(|| replicas[0].query::<u64>(&key)), 8 + 34);
        drop(lease);
    }
    timeout(LONG, locks.shutdown()).await.expect("nothing is left");
}

/// Regression: the time that a claim waited for its connection was subtracted from the time for replicas, which replied in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_for_a_connection_costs_no_replication_time() {
    let primary = RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]);
    let proxy = Proxy::start(primary.port());
    let port = proxy.port().to_string();
    let _replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    primary.query::<()>("SET started 1");
    wait_until("the replica is in sync", || primary.is_followed_by(1));
    proxy.to_server(Traffic::Delay(Duration::from_millis(1_500)));
    let options = RedisOptions::from_url(primary.url()).unwrap().connections(2);
    let locks = Locks::new(options.response_timeout(LONG).connect_timeout(LONG).connect().await.unwrap(), "default")
        .replication(Replication::Require(1))
        .deadline(Duration::from_secs(4));
    let mut asking = Vec::new();
    for key in ["a", "b", "c", "d"] {
        asking.push(tokio::spawn(locks.try_lock(key).into_future()));
        // Sent apart, so that the claims are not batched.
        sleep(Duration::from_millis(50)).await;
    }
    for asked in asking {
        drop(asked.await.unwrap().unwrap());
    }
}

/// Regression: renewals were sent behind claims that waited in vain on the same connection, until the leases expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_replication_costs_others_no_lease() {
    let (primary, _replicas) = with_replicas(1);
    let one = locks(&primary, 1).await;
    let two = one.clone().replication(Replication::Require(2));
    let ttl = Duration::from_secs(3);
    let lease = one.lock("held").ttl(ttl).await.unwrap();
    let start = Instant::now();
    let mut asking = Vec::new();
    while start.elapsed() < 2 * ttl {
        asking.push(tokio::spawn(two.try_lock(asking.len()).into_future()));
        sleep(Duration::from_millis(50)).await;
        assert!(lease.check().is_ok(), "{lease:?} after {:?}", start.elapsed());
    }
    // Other callers still get locks.
    assert_eq!(one.try_lock("other").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
    for asked in asking {
        assert_eq!(shortage(asked.await.unwrap()).1, 2);
    }
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promoted_replica_has_the_lease() {
    let (mut primary, replicas) = with_replicas(1);
    let lease = locks(&primary, 1).await.ttl(LONG).lock("a").await.unwrap();
    primary.kill();
    replicas[0].query::<()>("REPLICAOF NO ONE");
    let other = patient(replicas[0].url()).await;
    let other = Locks::new(other, "default").deadline(Duration::from_secs(2)).wait(Duration::ZERO);
    assert!(other.lock("a").await.is_err_and(|error| error.is_busy()));
    assert!(lease.check().is_ok());
}

/// Regression: calls on a dead connection were awaited until the response timeout, although no caller waited for them any more. The
/// connection was not replaced before that: locks hung, and leases were lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_claims_keep_no_dead_connection() {
    let (primary, _replicas) = with_replicas(1);
    let proxy = Proxy::start(primary.port());
    // Longer than any wait of this test.
    let options = RedisOptions::from_url(proxy.url()).unwrap().connections(1).response_timeout(3 * LONG);
    let locks = Locks::new(options.connect().await.unwrap(), "default")
        .replication(Replication::Require(1))
        .circuit_breaker(CircuitBreaker::off());
    let ttl = Duration::from_secs(6);
    let patient = locks.clone().deadline(Duration::from_secs(2)).ttl(ttl);
    let accepted = proxy.accepted();
    let lease = patient.lock("a").ttl(Duration::from_secs(1)).await.unwrap();
    block_in_place(|| {
        wait_until("there is a connection for renewals beside the one for grants", || proxy.accepted() >= accepted + 2);
    });
    lease.release().await.unwrap();
    let held = patient.lock("held").await.unwrap();
    proxy.to_server(Traffic::Swallow);
    proxy.to_client(Traffic::Swallow);
    assert!(locks.try_lock("a").await.is_err());
    // Works for new connections only, because the old ones have lost data.
    proxy.heal();
    let asking = tokio::spawn(async move { while locks.try_lock("b").await.is_err() {} });
    timeout(LONG / 2, asking).await.expect("the dead connection is replaced").unwrap();
    let start = Instant::now();
    while start.elapsed() < ttl * 3 / 2 {
        assert!(held.check().is_ok(), "{held:?} after {:?}", start.elapsed());
        sleep(Duration::from_millis(50)).await;
    }
}

/// Regression: callers without a connection got `NotReplicated`, which counted as a reply of the store. So the circuit stayed closed, and
/// requests did not pass without their lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_connection_to_a_hanging_server_is_a_store_error() {
    let (primary, _replicas) = with_replicas(1);
    let options = RedisOptions::from_url(primary.url()).unwrap().connections(1).response_timeout(LONG);
    let locks = Locks::new(options.connect().await.unwrap(), "default")
        .replication(Replication::Require(1))
        .circuit_breaker(CircuitBreaker::off())
        .wait(Duration::ZERO);
    locks.clone().deadline(LONG).lock("a").await.unwrap().release().await.unwrap();
    primary.pause();
    let locks = locks.deadline(Duration::from_secs(1));
    let layer = LockLayer::with_locks(locks).key(|key: &u32| key.to_string());
    let layer = layer.on_store_error(OnStoreError::Allow).responder(ErrorResponder);
    let service = layer.layer(service_fn(async |_: u32| Ok::<_, LockError>(())));
    let mut asking = Vec::new();
    for key in 0..30 {
        asking.push(tokio::spawn(service.clone().oneshot(key)));
        sleep(Duration::from_millis(20)).await;
    }
    for asked in asking {
        asked.await.unwrap().unwrap();
    }
}

/// Regression: the server's error for a WAIT during its demotion was treated as permanent. Neither the caller nor the waiters behind it
/// waited for another primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicated_claim_survives_a_demoted_primary() {
    let (primary, replicas) = with_replicas(1);
    let other = RedisServer::start();
    let locks = locks(&primary, 1).await.deadline(LONG).wait(2 * LONG);
    replicas[0].pause();
    let waiters = ["one", "other"].map(|_| {
        let waiting = locks.lock("a").into_future();
        tokio::spawn(async move { waiting.await.unwrap().release().await.unwrap() })
    });
    block_in_place(|| {
        wait_until("a WAIT is blocked", || primary.info("blocked_clients").is_some_and(|clients| clients == "1"));
        primary.query::<()>(&format!("REPLICAOF 127.0.0.1 {}", other.port()));
        wait_until("no WAIT is blocked", || primary.info("blocked_clients").is_some_and(|clients| clients == "0"));
        primary.query::<()>("REPLICAOF NO ONE");
        replicas[0].resume();
    });
    for waiter in waiters {
        assert_eq!(timeout(LONG, waiter).await.unwrap().unwrap(), ReleaseOutcome::Released);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_counts_replicas_of_the_owning_node() {
    let cluster = block_in_place(Cluster::start);
    // If replicas are missing, a claim waits half of this for them.
    let options = RedisOptions::from_url(cluster.url()).unwrap().response_timeout(Duration::from_secs(1));
    let backend = options.connect().await.unwrap();
    let locks = Locks::new(backend, "default").deadline(Duration::from_secs(2)).wait(Duration::ZERO);
    let most = block_in_place(|| {
        let followers =
            |index: &usize| cluster.nodes[*index].info("connected_slaves").and_then(|count| count.parse().ok());
        cluster.primaries().iter().map(|index| followers(index).unwrap_or(0_u32)).max().unwrap_or_default()
    });
    assert_eq!(most, 1);
    let one = locks.clone().replication(Replication::Require(1));
    for turn in 0..20 {
        let reached = |locks: Locks| async move { locks.lock(turn).await };
        reached(one.clone()).await.unwrap().release().await.unwrap();
        let beyond = reached(locks.clone().replication(Replication::Require(2))).await;
        assert_eq!(shortage(beyond), (1, 2));
    }

    // The replica of one node stalls, and those of the other nodes work.
    let owner = |turn: i32| {
        let slot = cluster.nodes[0].query(&format!("CLUSTER KEYSLOT {{lock:default:{turn}}}"));
        cluster.owner(slot)
    };
    let owners: Vec<usize> = block_in_place(|| (0..20).map(owner).collect());
    let struck = owners[0];
    assert!(owners.iter().any(|owner| *owner != struck), "all locks are on one node");
    block_in_place(|| cluster.nodes[cluster.replica_of(struck)].pause());
    for (turn, owner) in (0..20).zip(owners) {
        let answer = one.lock(turn).await;
        if owner == struck {
            assert_eq!(shortage(answer), (0, 1), "no replica has the lease of {turn}");
        } else {
            assert_eq!(answer.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn store_without_replicas_grants_no_replicated_lease() {
    let backend = MemoryBackend::new();
    let locks =
        Locks::new(backend.clone(), "default").replication(Replication::Require(1)).wait(Duration::from_secs(1));
    assert_eq!(shortage(locks.lock("a").await), (0, 1));
    assert_eq!(shortage(locks.lock_all(["a", "b"]).await), (0, 1));
    timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    assert_eq!(backend.locks(), 0);
    drop(locks);
    drop(Locks::new(backend, "default").replication(Replication::Primary).lock("a").await.unwrap());
}

/// Regression: a caller that required replicas got a lease by handoff that no replica ever had to have.
#[tokio::test(start_paused = true)]
async fn handoff_requires_the_same_replication() {
    let locks = Locks::new(MemoryBackend::new(), "default").wait(Duration::from_secs(1));
    let careful = locks.clone().replication(Replication::Require(2));
    let lease = locks.lock("a").await.unwrap();
    let first = careful.lock("a").into_future();
    // The second caller gets the lock when the first gives up.
    let second = locks.lock("a").wait(Duration::from_secs(2)).into_future();
    let (first, second, ()) = tokio::join!(first, second, async {
        sleep(Duration::from_millis(10)).await;
        drop(lease);
    });
    assert_eq!(shortage(first), (0, 2));
    drop(second.unwrap());
}

/// A store that takes as long as Redis may take to report how many replicas have a lease.
struct Late {
    inner: MemoryBackend,
    replicas: u32,
}

impl Late {
    async fn wait(&self, replicas: &mut Replicas) -> bool {
        let Replicas { count, within, .. } = std::mem::take(replicas);
        if count > 0 {
            sleep(within + Duration::from_millis(100)).await;
        }
        count <= self.replicas
    }
}

impl LockStore for Late {
    delegate_lock!(inner: acquire_all, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let mut claim = *claim;
        if self.wait(&mut claim.replicas).await {
            return self.inner.acquire(lock, &claim).await;
        }
        Ok(Acquired::NotReplicated { replicas: self.replicas })
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        let mut renewals = renewals.to_vec();
        for renewal in &mut renewals {
            self.wait(&mut renewal.replicas).await;
        }
        self.inner.renew(&renewals).await
    }
}

/// Regression: replies sometimes came after the deadline and counted as store errors, for which a layer may let requests pass without their
/// lock.
#[tokio::test(start_paused = true)]
async fn latest_possible_reply_of_redis_is_awaited() {
    let locks = |replicas| {
        let store = Late { inner: MemoryBackend::new(), replicas };
        Locks::new(store, "default").replication(Replication::Require(1)).wait(Duration::ZERO)
    };
    let alone = locks(0);
    for _ in 0..10 {
        // The first caller is the leader, and the second waits behind it.
        let (first, second) = tokio::join!(alone.lock("a").into_future(), alone.lock("a").into_future());
        assert_eq!([shortage(first), shortage(second)], [(0, 1); 2]);
    }
    let layer =
        LockLayer::with_locks(alone).key(GlobalKey).on_store_error(OnStoreError::Allow).responder(ErrorResponder);
    let service =
        layer.layer(service_fn(async |(): ()| -> Result<(), LockError> { panic!("the handler ran without a lock") }));
    for _ in 0..10 {
        assert!(service.clone().oneshot(()).await.is_err());
    }
    // A late renewal is not given up either.
    let lease = locks(1).ttl(Duration::from_secs(3)).lock("a").await.unwrap();
    for _ in 0..100 {
        sleep(Duration::from_millis(100)).await;
        assert_eq!(lease.state(), LeaseState::Held);
    }
}

/// Regression: these waiters got a store error although the store worked. A layer may let requests pass without their lock then.
#[tokio::test(start_paused = true)]
async fn waiter_behind_a_replicated_claim_waits_for_its_reply() {
    let plain = Locks::new(Late { inner: MemoryBackend::new(), replicas: 0 }, "default").wait(Duration::ZERO);
    for deadline in [100, 2_000].map(Duration::from_millis) {
        let careful = plain.clone().deadline(deadline).replication(Replication::Require(1));
        let layer = LockLayer::with_locks(plain.clone()).key(|(): &()| "a".to_owned());
        let layer = layer.on_store_error(OnStoreError::Allow).responder(ErrorResponder);
        let service = layer
            .layer(service_fn(async |(): ()| -> Result<(), LockError> { panic!("the handler ran without a lock") }));
        let (first, second, third, fourth) = tokio::join!(
            careful.lock("a").into_future(),
            plain.lock("a").into_future(),
            plain.lock("a").wait(Duration::from_millis(10)).into_future(),
            service.oneshot(()),
        );
        assert_eq!(shortage(first), (0, 1));
        for refused in [second.unwrap_err(), third.unwrap_err()] {
            assert!(refused.is_busy(), "{refused:?}");
        }
        assert!(fourth.is_err());
        // The next waiter no longer follows a claim that requires replicas.
        drop(plain.lock("a").await.unwrap());
    }
}

/// Regression: the time for the other segments was over before they could reply, and that counted as a store error.
#[tokio::test(start_paused = true)]
async fn under_replicated_segment_is_no_store_error() {
    let late = Late { inner: MemoryBackend::new(), replicas: 0 };
    let locks = Locks::new(late, "default").replication(Replication::Require(1));
    for (key, segments) in [("some", 8), ("many", 20)] {
        let stock = Segmented::new(&locks, key, segments);
        for wait in [Duration::ZERO, Duration::from_secs(1)] {
            assert_eq!(shortage(stock.any().wait(wait).await), (0, 1));
        }
    }
}

/// A store whose server has no replicas, and grants leases anyway.
struct Alone {
    inner: MemoryBackend,
}

impl LockStore for Alone {
    delegate_lock!(inner: acquire_all, renew, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let mut claim = *claim;
        let count = std::mem::take(&mut claim.replicas).count;
        Ok(match self.inner.acquire(lock, &claim).await? {
            Acquired::Granted { .. } if count > 0 => Acquired::NotReplicated { replicas: 0 },
            answer => answer,
        })
    }
}

/// A store that reports too few replicas for a renewal as Redis does: for all leases of the call.
struct Short {
    inner: MemoryBackend,
    is_short: Arc<AtomicBool>,
}

impl LockStore for Short {
    delegate_lock!(inner: acquire_all, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let mut claim = *claim;
        claim.replicas = Replicas::default();
        self.inner.acquire(lock, &claim).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Result<Vec<bool>, StoreError> {
        let renewed = self.inner.renew(renewals).await?;
        if self.is_short.load(Ordering::Relaxed) && renewed.contains(&true) {
            return Err(StoreError::unavailable("too few replicas"));
        }
        Ok(renewed)
    }
}

/// Regression: the loss of one lease was not reported as long as too few replicas had the other leases of the same renewal.
#[tokio::test(start_paused = true)]
async fn taken_lease_differs_from_an_under_replicated_one() {
    let backend = MemoryBackend::new();
    let is_short = Arc::new(AtomicBool::new(true));
    let store = Short { inner: backend.clone(), is_short: Arc::clone(&is_short) };
    let ttl = Duration::from_secs(30);
    let locks = Locks::new(store, "default").replication(Replication::Require(1)).ttl(ttl);
    let (kept, taken) = (locks.lock("kept").await.unwrap(), locks.lock("taken").await.unwrap());
    LockAdmin::new(backend, "default").force_release("taken").await.unwrap();
    let start = tokio::time::Instant::now();
    assert_eq!(taken.lost().await.reason(), LossReason::Taken);
    // With the second renewal. Later renewals may be sent in separate calls.
    assert!(start.elapsed() < ttl / 3 + Duration::from_millis(60), "{:?}", start.elapsed());
    assert_eq!(kept.state(), LeaseState::Suspended);
    is_short.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(kept.state(), LeaseState::Held);
}

/// Regression: the leftover was forgotten if the next attempt was refused without a store call. It blocked the lock until it expired.
#[tokio::test(start_paused = true)]
async fn leftover_of_an_attempt_is_released_without_a_next_one() {
    for is_fair in [false, true] {
        let backend = MemoryBackend::new();
        let store = FaultStore::new(Alone { inner: backend.clone() });
        let faults = store.faults();
        let breaker = CircuitBreaker::new().failures(1).probe_interval(LONG);
        let locks = Locks::new(store, "default").circuit_breaker(breaker).wait(Duration::from_secs(2));
        let elsewhere = Locks::new(backend, "default").fair().wait(Duration::ZERO);
        // The leftover: a lease that too few replicas have, or a position in the queue.
        let (waiting, held) = match is_fair {
            false => (locks.clone().replication(Replication::Require(1)), None),
            true => (locks.clone().fair(), Some(elsewhere.lock("a").await.unwrap())),
        };
        let waiter = tokio::spawn(waiting.lock("a").into_future());
        while faults.calls(Verb::Acquire) == 0 {
            yield_now().await;
        }
        faults.fail(Failure::Unavailable);
        assert!(locks.try_lock("b").await.is_err(), "the circuit is closed");
        faults.heal();
        let refused = waiter.await.unwrap();
        assert!(matches!(&refused, Err(LockError::Store(error)) if error.is_unavailable()), "{refused:?}");
        sleep(Duration::from_millis(50)).await;
        if let Some(held) = held {
            held.release().await.unwrap();
        }
        let free = elsewhere.lock("a").await;
        assert!(free.is_ok(), "is fair: {is_fair}: {free:?}");
    }
}

/// Regression: the replication that the leader required was reported to other waiters as if they had required it.
#[tokio::test(start_paused = true)]
async fn waiter_behind_a_replicated_claim_gets_its_own_count() {
    let locks = Locks::new(Alone { inner: MemoryBackend::new() }, "default");
    let careful = |replicas| locks.clone().replication(Replication::Require(replicas));
    let waiter = tokio::spawn(careful(1).lock("a").wait(Duration::from_secs(10)).into_future());
    sleep(Duration::from_secs(1)).await;
    for wait in [0, 500].map(Duration::from_millis) {
        let refused = locks.lock("a").wait(wait).await.unwrap_err();
        // For as long as the leader tries.
        let left = Duration::from_secs(9) - wait;
        assert!(matches!(&refused, LockError::Busy(busy) if busy.retry_after() == left), "{refused:?}");
        for replicas in [1, 2] {
            assert_eq!(shortage(careful(replicas).lock("a").wait(wait / 5).await), (0, replicas));
        }
    }
    assert_eq!(shortage(waiter.await.unwrap()), (0, 1));
    drop(locks.lock("a").await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_replicas_differ_from_a_silent_server() {
    let primary = RedisServer::start();
    let backend = RedisBackend::connect(primary.url()).await.unwrap();
    let locks = Locks::new(backend, "default").replication(Replication::Require(1));
    let meter = ProcessorMeter::start();
    let mut answers = Vec::new();
    for turn in 0..50 {
        sleep(Duration::from_millis(30)).await;
        let start = Instant::now();
        let answer = locks.try_lock(turn).await;
        answers.push((start, Instant::now(), answer));
    }
    let waits = meter.stop();
    // Half of the deadline is slack for a busy machine. Whether the server had a processor is not known, so a few late replies are
    // accepted. Regression: a third were late.
    answers.retain(|(start, ended, _)| waits.between(*start, *ended) < Duration::from_millis(50));
    let (in_time, late): (Vec<_>, Vec<_>) = answers
        .into_iter()
        .map(|(.., answer)| answer)
        .partition(|answer| matches!(answer, Err(LockError::NotReplicated(_))));
    assert!(!in_time.is_empty() && in_time.len() >= 8 * late.len(), "{late:?}");
    assert!(in_time.into_iter().all(|answer| shortage(answer) == (0, 1)));
}
