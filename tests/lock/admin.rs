//! The contract of lock administration (inspect, list and force-release) on memory, on one Redis server and on a cluster.

use crate::support;

use std::collections::HashSet;
use std::error::Error as _;
use std::time::{Duration, Instant};

use support::cluster::Cluster;
use support::server::RedisServer;
use support::shared::{Shared, connect, patient};
use tokio::task::block_in_place;
use tollgate::lock::store::{Acquired, Claim, LockStore as _, Token};
use tollgate::lock::{Cursor, LockAdmin, LockKey, RunError};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{ConfigError, Locks, MemoryBackend};

/// Long, so that a busy machine does not fail a test.
const DEADLINE: Duration = Duration::from_secs(5);

mod memory {
    use super::*;

    tollgate::lock_registry_contract!(
        #[tokio::test(start_paused = true)]
        async {
            MemoryBackend::new()
        }
    );
}

mod behind_a_store_of_faults {
    use super::*;

    tollgate::lock_registry_contract!(
        #[tokio::test(start_paused = true)]
        async {
            FaultStore::new(MemoryBackend::new())
        }
    );
}

mod redis_server {
    use super::*;

    tollgate::lock_registry_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let server = RedisServer::start();
            claim(patient(server.url()).await).await;
            server.every_key_expires();
        }
    );
}

mod on_a_cluster {
    use super::*;

    static CLUSTER: Shared<Cluster> = Shared::new();

    tollgate::lock_registry_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let cluster = CLUSTER.get(Cluster::start);
            claim(connect(&cluster.url()).await).await;
        }
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_data_is_an_error_and_stays_unchanged() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let (admin, locks) = (
        LockAdmin::new(backend.clone(), "default").deadline(DEADLINE),
        Locks::new(backend, "default").deadline(DEADLINE),
    );
    for value in ["hello", "", "2345678901234567890"] {
        let _: () = redis::cmd("SET")
            .arg("tollgate:2:{lock:default:a}:lease")
            .arg(value)
            .query(&mut server.connection())
            .unwrap();
        assert!(admin.inspect("a").await.unwrap_err().is_foreign_data());
        assert!(admin.force_release("a").await.unwrap_err().is_foreign_data());
        let still: String = server.query("GET tollgate:2:{lock:default:a}:lease");
        assert_eq!(still, value);
    }
    // Regression: foreign data hid the other locks of its page, and all later pages.
    let _: () = server.query("DEL tollgate:2:{lock:default:a}:lease");
    let _: () = server.query("RPUSH tollgate:2:{lock:default:b}:lease x");
    let _: () = server.query("SET tollgate:2:{lock:default:c}:lease hello");
    let lease = locks.lock("d").await.unwrap();
    let mut from = Some(Cursor::default());
    let mut listed = Vec::new();
    while let Some(cursor) = from {
        let page = admin.list(cursor, 10).await.unwrap();
        listed.extend(page.locks.into_iter().map(|status| status.lock));
        from = page.next;
    }
    assert_eq!(listed, [*lease.lock()]);
}

/// Regression: nodes were numbered in the order of the slot map. After a slot had moved, a number belonged to another node, and one node
/// was left out with all its locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listing_covers_all_nodes_while_a_slot_moves() {
    let cluster = Cluster::start();
    let locks = Locks::new(patient(cluster.url()).await, "default").deadline(DEADLINE);
    let mut leases = Vec::new();
    for key in 0..60_u32 {
        leases.push(locks.lock(key).await.unwrap());
    }
    let mut next = Some(Cursor::default());
    let (mut found, mut pages) = (HashSet::new(), 0);
    while let Some(from) = next {
        // A new client, which knows the moved slot.
        let admin = LockAdmin::new(patient(cluster.url()).await, "default").deadline(DEADLINE);
        let page = admin.list(from, 1_000).await.unwrap();
        found.extend(page.locks.into_iter().map(|status| status.lock));
        (next, pages) = (page.next, pages + 1);
        if pages == 1 {
            block_in_place(|| {
                cluster.migrate(0, cluster.owner(16_383));
                cluster.wait_until_whole();
            });
        }
    }
    assert!(pages > 3, "each node has a page of its own");
    assert_eq!(found, leases.iter().map(|lease| *lease.lock()).collect());
}

#[tokio::test]
async fn admin_calls_time_out_if_the_store_hangs() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let admin = LockAdmin::new(backend, "default").deadline(Duration::from_millis(100));
    server.pause();
    let start = Instant::now();
    assert!(admin.inspect("a").await.unwrap_err().is_timeout());
    assert!(admin.force_release("a").await.unwrap_err().is_timeout());
    assert!(admin.list(Cursor::default(), 10).await.unwrap_err().is_timeout());
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    server.resume();
}

/// A forced release works without free memory, because it frees memory in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_release_works_without_free_memory() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let (locks, admin) = (
        Locks::new(backend.clone(), "default").deadline(DEADLINE),
        LockAdmin::new(backend, "default").deadline(DEADLINE),
    );
    let lease = locks.lock("a").await.unwrap();
    server.limit_memory(1);
    assert_eq!(admin.force_release("a").await.unwrap().holders, 1);
    assert_eq!(admin.force_release("b").await.unwrap().holders, 0);
    server.limit_memory(0);
    assert!(locks.clone().try_lock("b").await.is_ok());
    assert!(!admin.inspect("a").await.unwrap().is_held());
    drop(lease);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_release_returns_a_fence_above_all_earlier_ones() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    // Simulates a clock that was set back by a day after this grant.
    let day_us = 86_400_000_000;
    let (seen, claim) = (LockKey::new("locks", "seen"), Claim::new(Token::random().unwrap(), DEADLINE));
    let Acquired::Granted { fence: now } = backend.acquire(&seen, &claim).await.unwrap() else {
        panic!("the lock is free")
    };
    let mut ahead = Claim::new(Token::random().unwrap(), DEADLINE);
    ahead.floor = now + day_us;
    let granted = backend.acquire(&LockKey::new("locks", "ahead"), &ahead).await.unwrap();
    assert!(matches!(granted, Acquired::Granted { fence } if fence > now + day_us), "{granted:?}");
    let released = LockAdmin::new(backend.clone(), "locks").force_release("seen").await.unwrap();
    assert!(released.fence > now + day_us, "{released:?}");
}

#[tokio::test]
async fn zero_deadline_is_rejected_on_any_backend() {
    let admin = LockAdmin::new(MemoryBackend::new(), "default").deadline(Duration::ZERO);
    let errors = [
        admin.inspect("a").await.map(drop),
        admin.list(Cursor::default(), 10).await.map(drop),
        admin.force_release("a").await.map(drop),
    ];
    for error in errors {
        let cause = error.unwrap_err().source().and_then(|cause| cause.downcast_ref().cloned());
        assert_eq!(cause, Some(ConfigError::ZeroTimeout { setting: "deadline" }));
    }
}

/// Regression: a failed release of one lock hid that another lock was lost.
#[tokio::test(start_paused = true)]
async fn failed_release_does_not_hide_the_loss_of_another_lock() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let (admin, faults) = (LockAdmin::new(backend, "accounts"), store.faults());
    let outcome = Locks::new(store, "accounts").lock_all(["a", "b"]).run(async |_| {
        assert_eq!(admin.force_release("b").await.unwrap().holders, 1);
        // The release of `a` fails, with an error that is not tried again at once.
        faults.fail_next(1, Failure::Unauthorized);
    });
    match outcome.await {
        Err(RunError::Unprotected { lost, .. }) => assert_eq!(*lost.lock(), LockKey::new("accounts", "b")),
        outcome => panic!("{outcome:?}"),
    }
}
