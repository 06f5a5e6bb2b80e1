//! The store contracts behind Sentinels and on a cluster, with failovers and slot migrations. `backend.rs` tests a single server.

use crate::support;

use std::collections::BTreeSet;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::cluster::Cluster;
use support::processor::ProcessorMeter;
use support::proxy::{Proxy, Traffic};
use support::sentinel::{SERVICE, SentinelDeployment};
use support::server::{RedisServer, free_port, version, wait_until};
use support::shared::{Shared, connect};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use tollgate::delay_queue::{CircuitBreaker, DelayQueue, DelayQueueWorker, Job, WorkerError};
use tollgate::idempotency::Operation;
use tollgate::idempotency::store::{Begun, BodyFingerprint, Claim, Completion, Digest, IdempotencyStore, RecordBound};
use tollgate::lock::store::{Acquired, LockStore, Renewal, Token};
use tollgate::lock::{LockAdmin, LockKey, ReleaseOutcome};
use tollgate::rate_limit::Decision;
use tollgate::rate_limit::store::{RateLimitStore, Request};
use tollgate::{BoxError, Key, Limiter, Locks, Policy, Quota, RedisBackend, RedisOptions};
use tower::service_fn;

mod behind_sentinels {
    use super::*;

    static DEPLOYMENT: Shared<SentinelDeployment> = Shared::new();

    tollgate::rate_limit_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let deployment = DEPLOYMENT.get(SentinelDeployment::start);
            claim(connect(&deployment.url()).await).await;
            deployment.primary().every_key_expires();
        }
    );

    mod locks {
        use super::*;

        tollgate::lock_contract!(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            |claim| {
                let deployment = DEPLOYMENT.get(SentinelDeployment::start);
                claim(connect(&deployment.url()).await).await;
            }
        );
    }

    mod idempotency {
        use super::*;

        tollgate::idempotency_contract!(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            |claim| {
                let deployment = DEPLOYMENT.get(SentinelDeployment::start);
                claim(connect(&deployment.url()).await).await;
                deployment.primary().every_key_expires();
            }
        );
    }

    mod delay_queue {
        use super::*;

        tollgate::delay_queue_contract!(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            |claim| {
                let deployment = DEPLOYMENT.get(SentinelDeployment::start);
                claim(connect(&deployment.url()).await).await;
                deployment.primary().every_key_expires();
            }
        );
    }
}

/// Regression: a primary that was replaced without being down counted requests for seconds, until a Sentinel made it a replica. Those
/// counts were lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_primary_is_left_although_it_answers() {
    let deployment = SentinelDeployment::start();
    let policy = Policy::new("follows", Quota::per_hour(1_000_000).fixed_window());
    let limiter =
        Limiter::new(RedisBackend::connect(deployment.url()).await.unwrap(), policy).deadline(Duration::from_secs(10));
    let old = deployment.primary().port();
    let _ = limiter.check("before").await.unwrap();
    deployment.fail_over();
    let (announced, new) = block_in_place(|| deployment.wait_for_another_primary(old));
    while announced.elapsed() < Duration::from_secs(1) {
        let _ = limiter.check("meanwhile").await.unwrap();
        sleep(Duration::from_millis(5)).await;
    }
    while deployment.servers[new].query::<Vec<String>>("KEYS *:after}:*").is_empty() {
        // A Sentinel takes longer to make the old primary a replica.
        assert!(announced.elapsed() < Duration::from_secs(3), "the old primary is not left");
        let _ = limiter.check("after").await.unwrap();
        sleep(Duration::from_millis(5)).await;
    }
}

/// Regression: Sentinels were polled every 0.4 s, and the old primary's counts until then were lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_primary_is_followed_at_once() {
    let mut deployment = SentinelDeployment::start();
    let policy = Policy::new("follows", Quota::per_hour(1_000_000).fixed_window());
    let limiter =
        Limiter::new(RedisBackend::connect(deployment.url()).await.unwrap(), policy).deadline(Duration::from_secs(10));
    let _ = limiter.check("before").await.unwrap();
    let listens = |sentinel: &RedisServer| sentinel.text("CLIENT LIST").contains(" sub=2 ");
    let all_are_listened_to = |sentinels: &[RedisServer]| {
        block_in_place(|| wait_until("all Sentinels are listened to", || sentinels.iter().all(listens)));
    };
    all_are_listened_to(&deployment.sentinels);
    // A Sentinel that restarts is subscribed to again.
    block_in_place(|| {
        deployment.sentinels[2].kill();
        deployment.sentinels[2].restart();
    });
    all_are_listened_to(&deployment.sentinels);

    block_in_place(|| deployment.wait_until_whole());
    let meter = ProcessorMeter::start();
    let old = deployment.primary().port();
    deployment.fail_over();
    let (announced, new) = block_in_place(|| deployment.wait_for_another_primary(old));
    let mut server = deployment.servers[new].connection();
    while redis::cmd("DBSIZE").query::<u64>(&mut server).unwrap() < 2 {
        assert!(announced.elapsed() < Duration::from_secs(3), "the old primary is not left");
        let _ = limiter.check("after").await.unwrap();
    }
    let left = Instant::now();
    let late = Late { took: left - announced, waited: meter.stop().between(announced, left) };
    late.is_below(Duration::from_millis(150), "another primary was announced");
}

/// Sentinels that get a new `MONITOR` command count failovers from zero again. The old primary keeps answering.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unmonitored_primary_is_left() {
    let deployment = SentinelDeployment::start();
    // Fail over once first, because connections compare the number of failovers.
    let old = deployment.primary().port();
    deployment.fail_over();
    block_in_place(|| deployment.wait_for_another_primary(old));
    block_in_place(|| deployment.wait_until_whole());
    let policy = Policy::new("follows", Quota::per_hour(1_000_000).fixed_window());
    let limiter =
        Limiter::new(RedisBackend::connect(deployment.url()).await.unwrap(), policy).deadline(Duration::from_secs(10));
    let new = RedisServer::start();
    let backend = RedisBackend::connect(deployment.url()).await.unwrap();
    let listens = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    let _ = limiter.check("before").await.unwrap();
    // Remove the service from all Sentinels first. A Sentinel that still monitors the old primary would announce it to the others.
    for command in [format!("REMOVE {SERVICE}"), format!("MONITOR {SERVICE} 127.0.0.1 {} 2", new.port())] {
        for sentinel in &deployment.sentinels {
            sentinel.query::<()>(&format!("SENTINEL {command}"));
        }
    }
    let since = Instant::now();
    while new.query::<Vec<String>>("KEYS *:after}:*").is_empty() {
        assert!(since.elapsed() < Duration::from_secs(10), "the old primary is not left");
        let _ = limiter.check("after").await.unwrap();
        sleep(Duration::from_millis(20)).await;
    }
    // Waiters for locks subscribe on the new primary.
    let since = Instant::now();
    while new.query::<Vec<String>>("PUBSUB CHANNELS *:free").is_empty() {
        assert!(since.elapsed() < Duration::from_secs(10), "the old primary is still listened to");
        sleep(Duration::from_millis(20)).await;
    }
    drop(listens);
}

/// Regression: a partitioned Sentinel named a server that accepted connections. Connections that had heard of no other server kept using
/// it, because the watch compared announcements with another server, to which it had connected before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn primary_of_a_partitioned_sentinel_is_left() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let (out_of_touch, sentinels) = (watches(old.port(), 5), [(); 2].map(|()| watches(new.port(), 6)));
    let proxies = sentinels.each_ref().map(|sentinel| Proxy::start(sentinel.port()));
    let [first, second] = proxies.each_ref().map(Proxy::port);
    let url =
        format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{first},127.0.0.1:{second}/{SERVICE}", out_of_touch.port());
    let policy = Policy::new("follows", Quota::per_hour(1_000_000).fixed_window());
    let limiter = Limiter::new(RedisBackend::connect(url).await.unwrap(), policy).deadline(Duration::from_secs(10));
    let limiter = limiter.circuit_breaker(CircuitBreaker::off());
    let keys = |server: &RedisServer| server.query::<u64>("DBSIZE");
    let goes_to = async |server: &RedisServer, name: &'static str| {
        let (since, before) = (Instant::now(), keys(server));
        for number in 0.. {
            assert!(since.elapsed() < Duration::from_secs(10), "{name}");
            // The connection may just have been closed.
            let _ = limiter.check((name, number)).await;
            if keys(server) > before {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    goes_to(&new, "before").await;
    // Wait until the watch knows this primary, too.
    sleep(Duration::from_secs(1)).await;

    proxies.iter().for_each(|proxy| proxy.to_client(Traffic::Delay(Duration::from_millis(300))));
    new.kill_clients();
    goes_to(&old, "meanwhile").await;
    proxies.iter().for_each(Proxy::heal);
    let (healed, mut counted, mut elsewhere) = (Instant::now(), keys(&old), 0);
    // Until then, at least every second check goes to the old server.
    while elsewhere < 50 {
        assert!(healed.elapsed() < Duration::from_secs(10), "the old server is not left");
        let is_answered = limiter.check(("after", healed.elapsed().as_micros() as u64)).await.is_ok();
        let now = keys(&old);
        elsewhere = if now > counted { 0 } else { elsewhere + u32::from(is_answered) };
        counted = now;
        sleep(Duration::from_millis(5)).await;
    }
    goes_to(&new, "in the end").await;
}

/// Starts an isolated Sentinel that monitors `primary` and has seen `epoch` failovers.
fn watches(primary: u16, epoch: u64) -> RedisServer {
    for _ in 0..10 {
        let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
        let config = format!(
            "port {port}\nbind 127.0.0.1\nsentinel monitor {SERVICE} 127.0.0.1 {primary} 3\n\
             sentinel config-epoch {SERVICE} {epoch}\n"
        );
        std::fs::write(folder.path().join("sentinel.conf"), config).unwrap();
        let args = ["sentinel.conf", "--sentinel"].map(str::to_owned).to_vec();
        if let Some(sentinel) = RedisServer::try_start(port, args, folder) {
            return sentinel;
        }
    }
    panic!("the Sentinel does not start");
}

/// Jobs that are pushed before and after the failover run, and the worker keeps running.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_continues_on_the_promoted_primary() {
    let mut deployment = SentinelDeployment::start();
    let mut work = Work::start(RedisBackend::connect(deployment.url()).await.unwrap());
    work.push().await;
    // Jobs that no replica has yet would be lost with the primary.
    block_in_place(|| deployment.wait_until_whole());
    let old = block_in_place(|| deployment.kill_primary());
    let port = deployment.servers[old].port();
    block_in_place(|| deployment.wait_for_another_primary(port));
    work.push().await;
    work.end().await;
}

/// Claims have a longer timeout than other calls, but a worker does not wait for a replaced primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_on_a_dead_primary_does_not_block_the_worker() {
    let deployment = Arc::new(SentinelDeployment::start());
    let queue = DelayQueue::new(RedisBackend::connect(deployment.url()).await.unwrap(), "work");
    let old = deployment.primary_index();
    let pausing = Arc::clone(&deployment);
    let pause = move || pausing.servers[old].pause();
    let late = done_after(queue, pause, || deployment.wait_for_another_primary(deployment.servers[old].port()).0).await;
    late.is_below(Duration::from_millis(1_500), "another primary was announced");
}

/// The task that follows failovers ends with the runtime that created the backend. It must start again in another runtime.
#[test]
fn replaced_primary_is_left_after_the_first_runtime_ended() {
    let deployment = SentinelDeployment::start();
    let limiter = from_a_runtime_that_has_ended(&deployment.url());
    runtime().block_on(async {
        works(&limiter, "before").await;
        // The watch starts with the first call. Wait until it knows this primary.
        sleep(Duration::from_secs(1)).await;
        let old = deployment.primary().port();
        deployment.fail_over();
        let (announced, new) = block_in_place(|| deployment.wait_for_another_primary(old));
        sleep(Duration::from_secs(1).saturating_sub(announced.elapsed())).await;
        while deployment.servers[new].query::<Vec<String>>("KEYS *:after}:*").is_empty() {
            assert!(announced.elapsed() < Duration::from_secs(3), "the old primary is not left");
            works(&limiter, "after").await;
            sleep(Duration::from_millis(5)).await;
        }
    });
}

mod on_a_cluster {
    use super::*;

    /// The same on a cluster as behind Sentinels.
    #[test]
    fn moved_node_is_left_after_the_first_runtime_ended() {
        let cluster = Cluster::start();
        let limiter = from_a_runtime_that_has_ended(&cluster.url());
        runtime().block_on(async {
            works(&limiter, "a").await;
            let keys = |node: usize| cluster.nodes[node].query::<Vec<String>>("KEYS *").pop();
            let (owner, key) =
                cluster.primaries().into_iter().find_map(|node| Some((node, keys(node)?))).expect("a key exists");
            let slot: u16 = cluster.nodes[owner].query(&format!("CLUSTER KEYSLOT {key}"));
            cluster.nodes[owner].pause();
            block_in_place(|| cluster.wait_for_another_owner(slot, owner));
            works(&limiter, "a").await;
        });
    }

    static CLUSTER: Shared<Cluster> = Shared::new();

    tollgate::rate_limit_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let cluster = CLUSTER.get(Cluster::start);
            claim(connect(&cluster.url()).await).await;
            cluster.primaries().into_iter().for_each(|index| cluster.nodes[index].every_key_expires());
        }
    );

    mod locks {
        use super::*;

        tollgate::lock_contract!(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            |claim| {
                let cluster = CLUSTER.get(Cluster::start);
                claim(connect(&cluster.url()).await).await;
                cluster.primaries().into_iter().for_each(|index| cluster.nodes[index].every_key_expires());
            }
        );
    }

    mod idempotency {
        use super::*;

        tollgate::idempotency_contract!(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            |claim| {
                let cluster = CLUSTER.get(Cluster::start);
                claim(connect(&cluster.url()).await).await;
                cluster.primaries().into_iter().for_each(|index| cluster.nodes[index].every_key_expires());
            }
        );
    }

    mod delay_queue {
        use super::*;

        tollgate::delay_queue_contract!(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            |claim| {
                let cluster = CLUSTER.get(Cluster::start);
                claim(connect(&cluster.url()).await).await;
                cluster.primaries().into_iter().for_each(|index| cluster.nodes[index].every_key_expires());
            }
        );
    }

    /// The user has only the documented rights.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiter_is_notified_after_its_lock_moved() {
        let cluster = Cluster::start();
        for node in &cluster.nodes {
            let rule = "on >password ~tollgate:2:* resetchannels &tollgate:2:* +eval +evalsha +unlink +get +mget +set +pttl +pexpire \
                        +time +getrange +setrange +strlen +append +cluster|slots +asking +publish +subscribe +unsubscribe";
            node.query::<()>(&format!("ACL SETUSER tollgate {rule}"));
            if version() >= (7, 0) {
                node.query::<()>("ACL SETUSER tollgate +spublish +ssubscribe +sunsubscribe");
            }
        }
        let url = cluster.url().replace("://", "://tollgate:password@");
        let locks = || async {
            Locks::new(RedisBackend::connect(&url).await.unwrap(), "default").deadline(Duration::from_secs(1))
        };
        let (here, there) = (locks().await, locks().await);
        let channel = "tollgate:2:{lock:default:a}:free";
        let slot: u16 = cluster.nodes[0].query(&format!("CLUSTER KEYSLOT {channel}"));
        let listens = |node: &RedisServer| {
            let channels = if version() >= (7, 0) { "PUBSUB SHARDCHANNELS" } else { "PUBSUB CHANNELS" };
            node.query::<Vec<String>>(channels).contains(&channel.to_owned())
        };
        let notified_after = async |turn| {
            let lease = here.lock("a").await.unwrap();
            let there = there.clone();
            let waiting = tokio::spawn(async move {
                let lease = there.lock("a").wait(Duration::from_secs(20)).await.unwrap();
                let taken = Instant::now();
                lease.release().await.unwrap();
                taken
            });
            let owner = cluster.owner(slot);
            let heard = || listens(&cluster.nodes[owner]) || (version() < (7, 0) && cluster.nodes.iter().any(listens));
            block_in_place(|| wait_until(&format!("the node that has the lock is listened to in turn {turn}"), heard));
            // Between two polls of the lock.
            sleep(Duration::from_millis(300)).await;
            let given_back = Instant::now();
            lease.release().await.unwrap();
            waiting.await.unwrap().saturating_duration_since(given_back)
        };
        for turn in 0..3 {
            let owner = cluster.owner(slot);
            // A waiter that lacks a processor is notified in time in one of a few tries. A waiter that polls once a second never is.
            let mut took = Vec::new();
            while took.last().is_none_or(|took| *took >= Duration::from_millis(400)) {
                assert!(took.len() < 5, "notifications took {took:?} in turn {turn}");
                took.push(notified_after(turn).await);
            }
            // Another node owns the slot in the next turn.
            let next = cluster.primaries().into_iter().find(|primary| *primary != owner).unwrap();
            block_in_place(|| cluster.migrate(slot, next));
        }
    }

    /// Regression: the client connects to all known nodes before it subscribes. It gave up before its attempt to connect to the hanging
    /// node did, so waiters polled once a second meanwhile.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiter_is_notified_while_an_unrelated_node_hangs() {
        // The timeout is long, so the paused replica stays a known node.
        let cluster = Cluster::start_with(&["--cluster-node-timeout", "30000"]);
        let replica = cluster.replica_of(0);
        assert!(cluster.url().contains(&cluster.nodes[replica].port().to_string()));
        cluster.nodes[replica].pause();
        let url = cluster.url();
        let locks = || async {
            Locks::new(RedisBackend::connect(&url).await.unwrap(), "default").deadline(Duration::from_secs(2))
        };
        let (here, there) = (locks().await, locks().await);
        let lease = here.lock("a").await.unwrap();
        let waiting = tokio::spawn(async move { there.lock("a").wait(Duration::from_secs(60)).await });
        let channels = if version() >= (7, 0) { "PUBSUB SHARDCHANNELS" } else { "PUBSUB CHANNELS" };
        let primaries = || (0..3).map(|primary| &cluster.nodes[primary]);
        let is_heard =
            || primaries().any(|node| node.query::<Vec<String>>(channels).iter().any(|name| name.contains(":a}")));
        block_in_place(|| wait_until("the lock is listened to", is_heard));
        lease.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }

    /// A restarted node refuses connections while it loads its data. Regression: the refusal counted as a reply, so the slots of the node
    /// were unavailable during the load, although its replica had taken over.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn loading_node_is_left_for_its_successor() {
        // The timeout is long, so no replica takes over before the test promotes it.
        let mut cluster = Cluster::start_with(&["--cluster-node-timeout", "30000"]);
        let policy = Policy::new("loads", Quota::per_hour(1_000_000).fixed_window());
        let limiter = Limiter::new(connect(&cluster.url()).await, policy).deadline(Duration::from_secs(10));
        let limiter = limiter.circuit_breaker(CircuitBreaker::off());
        let _ = limiter.check("alice").await.unwrap();
        let tag = "{rate_limit:loads:alice}";
        let owner = cluster.owner(cluster.nodes[0].query(&format!("CLUSTER KEYSLOT {tag}")));
        let replica = cluster.replica_of(owner);
        let old = &mut cluster.nodes[owner];
        block_in_place(|| {
            old.kill();
            old.restart_slowly();
        });
        let cause = async || match limiter.check("alice").await {
            Ok(_) => String::new(),
            Err(error) => std::error::Error::source(&error).unwrap().to_string(),
        };
        let since = Instant::now();
        while !cause().await.contains("loading") {
            assert!(since.elapsed() < Duration::from_secs(20), "{}", cause().await);
        }
        // Wait until reloads of the slot map for other reasons are over.
        sleep(Duration::from_secs(1)).await;
        cluster.nodes[replica].query::<()>("CLUSTER FAILOVER TAKEOVER");
        let since = Instant::now();
        while let Err(error) = limiter.check("alice").await {
            assert!(since.elapsed() < Duration::from_secs(10), "{error}");
            sleep(Duration::from_millis(5)).await;
        }
        assert!(!cluster.nodes[owner].is_answering(), "it is still loading");
    }

    /// A slot may be migrating for minutes, or forever if the move was abandoned. Meanwhile a node refuses a command with several keys if
    /// it lacks one of them. A channel name never exists as a key.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn operation_completes_while_its_slot_moves() {
        let cluster = Cluster::start();
        let backend = connect(&cluster.url()).await;
        let locks = Locks::new(backend.clone(), "default").deadline(Duration::from_secs(2));
        let taken = [locks.lock("a").await.unwrap(), locks.clone().fair().lock("b").await.unwrap()];
        let (lease, retention) = (Duration::from_secs(60), Duration::from_secs(60));
        // Two claims without a record bound, and one with a bound, whose record is counted.
        let claims = [("done", None), ("given-back", None), ("counted", Some(100))].map(|(key, most)| {
            let token = Token::random().unwrap();
            let mut claim = Claim::new(token, Digest::default(), lease, retention);
            claim.bound = most.map(|most| RecordBound { scope: Key::new("caller"), max: most });
            (Operation::new("scope", key), claim)
        });
        for (operation, claim) in &claims {
            assert!(matches!(backend.begin(operation, claim).await.unwrap(), Begun::Granted { .. }));
        }
        // Without the count, the slot of that record holds only one of the two keys.
        for primary in &cluster.nodes[..3] {
            for count in primary.query::<Vec<String>>("KEYS *:records") {
                assert_eq!(primary.query::<u64>(&format!("DEL {count}")), 1);
            }
        }
        let slots: Vec<_> = (0..3).flat_map(|primary| cluster.slots_with_keys(primary)).collect();
        for slot in slots {
            let to = (cluster.owner(slot) + 1) % 3;
            block_in_place(|| cluster.open(slot, to));
        }
        for lease in taken {
            assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
        }
        let [(done, claim), given_back, counted] = claims;
        let body_fingerprint = BodyFingerprint::default();
        let completion = Completion::new(*b"done", body_fingerprint, retention);
        assert!(backend.complete(&done, &claim.token, &completion).await.unwrap());
        for (operation, claim) in [given_back, counted] {
            assert!(IdempotencyStore::release(&backend, &operation, &claim).await.unwrap());
        }
        let admin = LockAdmin::new(backend.clone(), "default");
        assert_eq!(admin.force_release("b").await.unwrap().holders, 0);
    }

    /// One lock is acquired before the migration and lies on the old node. The other is acquired during it and lies on the new node.
    /// Regression: one call renewed both. Every attempt was refused, so both leases were lost although Redis had them.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn locks_of_a_migrating_slot_are_renewed() {
        let cluster = Cluster::start();
        let backend = connect(&cluster.url()).await;
        // They share a slot.
        let [before, since] = ["8", "72"].map(|key| LockKey::new("default", key));
        assert_eq!(backend.shard(&before), backend.shard(&since));
        let ttl = Duration::from_secs(60);
        let take = async |lock: &LockKey| {
            let claim = tollgate::lock::store::Claim::new(Token::random().unwrap(), ttl);
            assert!(matches!(backend.acquire(lock, &claim).await.unwrap(), Acquired::Granted { .. }));
            claim.token
        };
        let held = take(&before).await;
        let slot = u16::try_from(backend.shard(&before)).unwrap();
        let to = (cluster.owner(slot) + 1) % 3;
        block_in_place(|| cluster.open(slot, to));
        let others = take(&since).await;
        // These tokens hold neither lock.
        let [unknown, gone] = [(); 2].map(|()| Token::random().unwrap());
        for replicas in 0..2 {
            let renewals = [(before, held), (before, unknown), (since, gone), (since, others)];
            let renewals = renewals.map(|(lock, token)| {
                let mut renewal = Renewal::new(lock, token, ttl);
                (renewal.replicas.count, renewal.replicas.within) = (replicas, Duration::from_secs(4));
                renewal
            });
            let renewed = LockStore::renew(&backend, &renewals).await.unwrap();
            assert_eq!(renewed, [true, false, false, true], "{replicas} replicas");
        }
    }

    /// A node refuses a command if another node has some of its keys. Regression: retries ended after 62 ms or five other nodes, whatever
    /// the deadline.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn scripts_of_several_keys_wait_while_their_slot_moves() {
        let cluster = Cluster::start();
        let deadline = Duration::from_secs(10);
        let options = RedisOptions::from_url(cluster.url()).unwrap().response_timeout(deadline);
        let backend = options.connect().await.unwrap();
        let slot = |tag: &str| cluster.nodes[0].query::<u16>(&format!("CLUSTER KEYSLOT {{{tag}}}"));
        let slots = [slot("delay_queue:work"), slot("lock:default:a")];
        let queue = DelayQueue::<u32>::new(backend.clone(), "work").deadline(deadline);
        let locks = Locks::new(backend.clone(), "default").fair().deadline(deadline);
        let (stop, stopped) = watch::channel(false);
        let mut callers = JoinSet::new();
        for caller in 0..4 {
            let (queue, locks, stopped) = (queue.clone(), locks.clone(), stopped.clone());
            callers.spawn(async move {
                let mut calls = 0;
                while !*stopped.borrow() {
                    queue.push(calls).await.unwrap();
                    if caller == 0 {
                        let _ = locks.lock("a").wait(deadline).await.unwrap().release().await;
                    }
                    calls += 1;
                    sleep(Duration::from_millis(1)).await;
                }
                calls
            });
        }
        for _ in 0..3 {
            for slot in slots {
                let to = (cluster.owner(slot) + 1) % 3;
                block_in_place(|| {
                    let from = cluster.open(slot, to);
                    std::thread::sleep(Duration::from_millis(150));
                    cluster.move_keys(slot, from, to);
                    std::thread::sleep(Duration::from_millis(150));
                    cluster.close(slot, from, to);
                });
            }
        }
        stop.send(true).unwrap();
        let calls: u32 = callers.join_all().await.into_iter().sum();
        assert!(calls > 50, "no more than {calls} calls were answered");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn worker_follows_the_slot_of_its_queue() {
        let mut cluster = Cluster::start();
        let mut work = Work::start(RedisBackend::connect(cluster.url()).await.unwrap());
        let slot: u16 = cluster.nodes[0].query("CLUSTER KEYSLOT {delay_queue:work}");
        work.push().await;
        let first = cluster.owner(slot);
        block_in_place(|| cluster.migrate(slot, (first + 1) % 3));
        work.push().await;
        block_in_place(|| cluster.fail_over((first + 1) % 3));
        let (_, second) = block_in_place(|| cluster.wait_for_another_owner(slot, (first + 1) % 3));
        work.push().await;
        // Jobs that no replica has yet would be lost with the primary.
        block_in_place(|| {
            cluster.wait_until_whole();
            cluster.nodes[second].kill();
            cluster.wait_for_another_owner(slot, second);
        });
        work.push().await;
        work.end().await;
    }

    /// The same on a cluster as behind Sentinels.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn claim_on_a_dead_node_does_not_block_the_worker() {
        let cluster = Arc::new(Cluster::start());
        let queue = DelayQueue::new(RedisBackend::connect(cluster.url()).await.unwrap(), "work");
        let slot: u16 = cluster.nodes[0].query("CLUSTER KEYSLOT {delay_queue:work}");
        let old = cluster.owner(slot);
        let pausing = Arc::clone(&cluster);
        let pause = move || pausing.nodes[old].pause();
        let late = done_after(queue, pause, || cluster.wait_for_another_owner(slot, old).0).await;
        late.is_below(Duration::from_millis(1_500), "the slot had another owner");
    }

    /// Regression: concurrent pushes are batched, and pushes to a hanging node delayed all others. They also occupied slots for calls after
    /// their callers had given up, until no slot was left.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn hanging_node_delays_no_push_to_another_node() {
        // The timeout is long, so no replica takes over meanwhile.
        let cluster = Cluster::start_with(&["--cluster-node-timeout", "30000"]);
        let options = RedisOptions::from_url(cluster.url()).unwrap().response_timeout(Duration::from_secs(2));
        let backend = options.connect().await.unwrap();
        let slot = |name: &str| cluster.nodes[0].query::<u16>(&format!("CLUSTER KEYSLOT {{delay_queue:{name}}}"));
        let (here, names) = (cluster.owner(slot("here")), (0..).map(|i| format!("there-{i}")));
        let there = names.into_iter().find(|name| cluster.owner(slot(name)) != here).unwrap();
        let deadline = Duration::from_millis(300);
        // With a circuit breaker, an open circuit would skip the hanging node, and callers that fail at once would occupy the threads.
        let queue = |name: &str| {
            DelayQueue::<usize>::new(backend.clone(), name.to_owned())
                .deadline(deadline)
                .circuit_breaker(CircuitBreaker::off())
        };
        // A push to the healthy node does not need this deadline, which is shorter than the response timeout.
        let deadline = Duration::from_secs(1);
        let (here, there) = (queue("here").deadline(deadline), queue(&there));
        here.push(0).await.unwrap();
        there.clone().deadline(deadline).push(0).await.unwrap();
        let hanging = &cluster.nodes[cluster.owner(slot(there.name().as_str()))];
        hanging.pause();
        let failures = async |queue: DelayQueue<usize>, i: usize| {
            // Staggers the callers, so that each batch has pushes for both nodes.
            sleep(Duration::from_millis(i as u64 * 10)).await;
            let (since, mut failures, mut pushes) = (Instant::now(), 0, 0);
            while since.elapsed() < Duration::from_secs(2) {
                failures += usize::from(queue.push(i).await.is_err());
                pushes += 1;
            }
            (failures, pushes)
        };
        let (mut to_here, mut to_there) = (JoinSet::new(), JoinSet::new());
        for i in 0..32 {
            to_here.spawn(failures(here.clone(), i));
            to_there.spawn(failures(there.clone(), i));
        }
        for (failures, pushes) in to_here.join_all().await {
            assert_eq!(failures, 0, "of {pushes} pushes to a healthy node");
        }
        assert!(to_there.join_all().await.into_iter().all(|(failures, pushes)| failures == pushes));
        hanging.resume();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn split_queue_is_worked_across_nodes() {
        let cluster = CLUSTER.get(Cluster::start);
        let backend = connect(&cluster.url()).await;
        let mut work = Work::on(DelayQueue::new(backend, "split").split(8));
        work.push().await;
        let owners: BTreeSet<_> = (0..8)
            .map(|part| if part == 0 { String::new() } else { format!("#{part}") })
            .map(|part| cluster.owner(cluster.nodes[0].query(&format!("CLUSTER KEYSLOT {{delay_queue:split{part}}}"))))
            .collect();
        assert!(owners.len() > 1, "all parts are on {owners:?}");
        // Each job wakes the worker by a notification of the node that stores it.
        for job in work.pushed..work.pushed + 20 {
            let since = Instant::now();
            work.queue.push(job).id(job.to_string()).await.unwrap();
            while !work.done.lock().unwrap().contains(&job) {
                assert!(since.elapsed() < Duration::from_secs(3), "job {job} has not started");
                sleep(Duration::from_millis(1)).await;
            }
        }
        work.pushed += 20;
        work.end().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn keys_spread_over_all_primaries_with_their_quotas() {
        const SUBJECTS: u32 = 600;
        const QUOTA: u64 = 3;
        let cluster = CLUSTER.get(Cluster::start);
        let primaries = cluster.primaries();
        let keys = || primaries.iter().map(|index| cluster.nodes[*index].query::<u64>("DBSIZE")).collect::<Vec<_>>();
        let before = keys();
        let policy = Policy::new("spread", Quota::per_hour(QUOTA).fixed_window());
        let limiter = Limiter::new(connect(&cluster.url()).await, policy).deadline(Duration::from_secs(10));
        let mut tasks = JoinSet::new();
        for subject in 0..SUBJECTS {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut admitted = 0;
                for _ in 0..2 * QUOTA {
                    admitted += u64::from(limiter.check(subject).await.unwrap().is_allowed());
                }
                admitted
            });
        }
        assert_eq!(tasks.join_all().await, vec![QUOTA; SUBJECTS as usize]);
        for (before, after) in before.into_iter().zip(keys()) {
            assert!(after >= before + u64::from(SUBJECTS) / 5, "{before} keys, then {after}");
        }
    }

    /// Regression: a check of keys on two nodes was cancelled at its deadline because one node did not answer. The other node had charged
    /// its key.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn charge_of_one_node_is_refunded_if_another_times_out() {
        let cluster = Cluster::start();
        let backend = RedisBackend::connect(cluster.url()).await.unwrap();
        let policy = Policy::new("nodes", Quota::per_hour(5).fixed_window());
        let owner = |subject: &str| {
            let slot = cluster.nodes[0].query(&format!("CLUSTER KEYSLOT {{rate_limit:nodes:{subject}}}"));
            cluster.owner(slot)
        };
        let other = (0..).map(|n| format!("bob{n}")).find(|other| owner(other) != owner("alice")).unwrap();
        let requests = ["alice", &other].map(|key| Request { policy: policy.clone(), key: key.into(), cost: 2 });
        let left = async || backend.peek(&policy, &"alice".into(), 1).await.unwrap().remaining();
        // Load the scripts and open the connections first.
        assert!(backend.check_all(&requests).await.unwrap().iter().all(Decision::is_allowed));
        assert_eq!(left().await, Some(3));

        cluster.nodes[owner(&other)].pause_clients(Duration::from_secs(2));
        assert!(
            timeout(Duration::from_millis(250), backend.check_all(&requests)).await.is_err(),
            "one node does not answer"
        );
        let given_back = async {
            while left().await != Some(3) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(5), given_back).await.expect("the charge is refunded");
        // The charge is also refunded if the caller waits for the failure of the node.
        assert!(backend.check_all(&requests).await.is_err(), "the node is still paused");
        assert_eq!(left().await, Some(3));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn key_keeps_its_count_while_its_slot_moves() {
        let cluster = Cluster::start();
        let policy = Policy::new("moves", Quota::per_hour(1_000).fixed_window());
        let limiter = Limiter::new(connect(&cluster.url()).await, policy).deadline(Duration::from_secs(10));
        for round in 0..6 {
            assert_eq!(limiter.check("alice").await.unwrap().remaining(), Some(999 - round));
            let owner = (0..3).find(|index| !cluster.slots_with_keys(*index).is_empty()).unwrap();
            let slot = cluster.slots_with_keys(owner)[0];
            block_in_place(|| cluster.migrate(slot, (owner + 1) % 3));
        }
    }
}

/// How long an event took, and how long this process or its servers had no processor meanwhile.
struct Late {
    took: Duration,
    waited: Duration,
}

impl Late {
    #[track_caller]
    fn is_below(&self, bound: Duration, since: &str) {
        let Self { took, waited } = *self;
        assert!(took < bound + waited, "{took:?} after {since}, of which {waited:?} without a processor");
    }
}

/// Measures how long after `replaced` a job starts. The server that should have delivered it no longer answers the worker.
async fn done_after(
    queue: DelayQueue<u32>,
    pause: impl Fn() + Clone + Send + 'static,
    replaced: impl FnOnce() -> Instant,
) -> Late {
    let meter = ProcessorMeter::start();
    let (done, mut jobs) = mpsc::unbounded_channel();
    let service = service_fn(move |job: Job<u32>| {
        if *job == 0 {
            pause();
        }
        done.send(*job).unwrap();
        ready(Ok::<_, BoxError>(()))
    });
    let queue = queue.deadline(Duration::from_secs(1));
    queue.push(1).delay(Duration::from_secs(1)).await.unwrap();
    // Wait until a replica has the job.
    sleep(Duration::from_millis(200)).await;
    queue.push(0).await.unwrap();
    // The claims of this worker have the longest timeout.
    let worker = DelayQueueWorker::new(queue, service).concurrency(1).lease(Duration::from_secs(30));
    let worker = tokio::spawn(worker.run());
    assert_eq!(jobs.recv().await, Some(0));
    let replaced = block_in_place(replaced);
    assert_eq!(jobs.recv().await, Some(1));
    let done = Instant::now();
    worker.abort();
    Late { took: done - replaced, waited: meter.stop().between(replaced, done) }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn from_a_runtime_that_has_ended(url: &str) -> Limiter<RedisBackend> {
    let policy = Policy::new("follows", Quota::per_hour(1_000_000).fixed_window());
    Limiter::new(runtime().block_on(RedisBackend::connect(url)).unwrap(), policy).deadline(Duration::from_secs(10))
}

/// Waits until a check succeeds.
async fn works(limiter: &Limiter<RedisBackend>, subject: &'static str) {
    let since = Instant::now();
    while let Err(error) = limiter.check(subject).await {
        assert!(since.elapsed() < Duration::from_secs(5), "{error}");
    }
}

/// A queue and its worker, which must survive every fault of the servers.
struct Work {
    queue: DelayQueue<u32>,
    pushed: u32,
    done: Arc<Mutex<BTreeSet<u32>>>,
    stop: oneshot::Sender<()>,
    worker: JoinHandle<Result<(), WorkerError>>,
}

impl Work {
    const BATCH: u32 = 100;

    fn start(backend: RedisBackend) -> Self {
        Self::on(DelayQueue::new(backend, "work"))
    }

    fn on(queue: DelayQueue<u32>) -> Self {
        let queue = queue.deadline(Duration::from_secs(1));
        let done = Arc::new(Mutex::new(BTreeSet::new()));
        let noted = Arc::clone(&done);
        let service = service_fn(move |job: Job<u32>| {
            noted.lock().unwrap().insert(*job);
            ready(Ok::<_, BoxError>(()))
        });
        let worker = DelayQueueWorker::new(queue.clone(), service).lease(Duration::from_secs(1)).concurrency(10);
        let (stop, stopped) = oneshot::channel();
        let worker = tokio::spawn(worker.run_until(async {
            let _ = stopped.await;
        }));
        Self { queue, pushed: 0, done, stop, worker }
    }

    /// Pushes jobs that are due within the next three seconds, and retries each push until it succeeds.
    async fn push(&mut self) {
        for job in self.pushed..self.pushed + Self::BATCH {
            let push =
                || self.queue.push(job).id(job.to_string()).delay(Duration::from_millis(u64::from(job) * 37 % 3_000));
            let since = Instant::now();
            while let Err(error) = push().await {
                assert!(since.elapsed() < Duration::from_secs(20), "{error}");
                sleep(Duration::from_millis(20)).await;
            }
        }
        self.pushed += Self::BATCH;
    }

    /// Waits until all jobs are done, and stops the worker.
    async fn end(self) {
        let since = Instant::now();
        let is_over = async || {
            let counts = self.queue.counts().await;
            counts.is_ok_and(|counts| counts.waiting + counts.running + counts.dead == 0)
        };
        while !is_over().await {
            assert!(since.elapsed() < Duration::from_secs(20), "{:?}", self.queue.counts().await);
            sleep(Duration::from_millis(20)).await;
        }
        assert!(!self.worker.is_finished(), "the worker has ended");
        self.stop.send(()).unwrap();
        self.worker.await.unwrap().unwrap();
        let done = self.done.lock().unwrap();
        assert!(done.iter().copied().eq(0..self.pushed), "{done:?}");
    }
}
