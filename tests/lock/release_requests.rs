//! Release requests: a waiter asks, and the holder is notified. In one process, on memory, one Redis server, a cluster and Redlock.

use crate::support;

use std::future::IntoFuture;
use std::time::Duration;

use support::cluster::Cluster;
use support::server::{RedisServer, wait_until};
use support::shared::patient;
use tokio::task::block_in_place;
use tokio::time::timeout;
use tollgate::lock::store::LockStore;
use tollgate::lock::{Redlock, RwLocks, Semaphore};
use tollgate::{Locks, MemoryBackend};

/// The timeout of every wait that must end.
const LONG: Duration = Duration::from_secs(20);
/// How long to check that a notification or grant does not arrive.
const A_WHILE: Duration = Duration::from_millis(1_500);

fn locks<S: LockStore + Clone + Send + Sync + 'static>(store: &S) -> Locks {
    Locks::new(store.clone(), "default").deadline(LONG).wait(LONG)
}

/// The holder is notified if the waiter is in its process or in another one, and if it listens before the waiter asks or after.
async fn a_holder_is_asked<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store).request_release(), locks(&store).request_release());
    for (turn, others) in [&here, &there, &here, &there].into_iter().enumerate() {
        let lease = here.lock("a").await.unwrap();
        let listens_first = turn < 2;
        if listens_first {
            assert!(timeout(A_WHILE / 10, lease.release_requested()).await.is_err(), "no waiter has asked");
        }
        let waiter = tokio::spawn(others.lock("a").into_future());
        if !listens_first {
            tokio::time::sleep(A_WHILE / 10).await;
        }
        timeout(LONG, lease.release_requested()).await.expect("the holder is asked");
        timeout(LONG, lease.view().release_requested()).await.expect("the lease remembers the request");
        assert!(!waiter.is_finished() && lease.check().is_ok(), "the lease stays held");
        let fence = lease.fence();
        lease.release().await.unwrap();
        let next = timeout(LONG, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.fence() > fence);
        assert!(
            timeout(A_WHILE / 10, next.release_requested()).await.is_err(),
            "the request was for the previous lease"
        );
        next.release().await.unwrap();
    }
}

/// Waiters without `request_release` send no request.
async fn waiter_without_request_release_is_silent<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store), locks(&store));
    let lease = here.lock("a").await.unwrap();
    let waiters = [&here, &there].map(|locks| {
        let request = locks.lock("a");
        tokio::spawn(async move { drop(request.await.unwrap()) })
    });
    assert!(timeout(A_WHILE, lease.release_requested()).await.is_err());
    lease.release().await.unwrap();
    for waiter in waiters {
        timeout(LONG, waiter).await.unwrap().unwrap();
    }
}

/// The first waiter of a process asks, also after a handoff.
#[tokio::test(start_paused = true)]
async fn each_holder_is_asked_separately() {
    let backend = MemoryBackend::new();
    let silent = Locks::new(backend, "default").wait(LONG);
    let asking = silent.clone().request_release();
    let first = silent.lock("a").await.unwrap();
    let second = tokio::spawn(silent.lock("a").into_future());
    tokio::task::yield_now().await;
    let third = tokio::spawn(asking.lock("a").into_future());
    assert!(timeout(A_WHILE, first.release_requested()).await.is_err(), "the first waiter does not ask");
    first.release().await.unwrap();
    let second = second.await.unwrap().unwrap();
    timeout(A_WHILE, second.release_requested()).await.expect("the first waiter asks");
    second.release().await.unwrap();
    let third = third.await.unwrap().unwrap();
    assert!(timeout(A_WHILE, third.release_requested()).await.is_err(), "no waiter is left");
}

/// Regression: a waiter that became the first because the one before it gave up never asked.
#[tokio::test(start_paused = true)]
async fn waiter_asks_once_it_becomes_the_first() {
    let silent = Locks::new(MemoryBackend::new(), "default").wait(LONG);
    let asking = silent.clone().request_release();
    let lease = silent.lock("a").await.unwrap();
    let second = tokio::spawn(silent.lock("a").into_future());
    tokio::task::yield_now().await;
    let third = tokio::spawn(asking.lock("a").into_future());
    let last = tokio::spawn(silent.lock("a").into_future());
    assert!(timeout(A_WHILE, lease.release_requested()).await.is_err(), "the first waiter does not ask");
    // A waiter that leaves the back of the queue changes nothing.
    last.abort();
    assert!(timeout(A_WHILE, lease.release_requested()).await.is_err(), "the first waiter does not ask");
    second.abort();
    timeout(A_WHILE, lease.release_requested()).await.expect("the first waiter asks");
    drop(lease);
    drop(third.await.unwrap().unwrap());
}

/// All holders are asked, because any permit would do. They decide which one to release.
#[tokio::test(start_paused = true)]
async fn all_permit_holders_are_asked() {
    let backend = MemoryBackend::new();
    let semaphore = || Semaphore::new(backend.clone(), "semaphores", 2).wait(LONG);
    let (here, there) = (semaphore(), semaphore().request_release());
    let (one, other) = (here.acquire("a").await.unwrap(), there.acquire("a").await.unwrap());
    let silent = tokio::spawn(here.acquire("a").into_future());
    assert!(timeout(A_WHILE, one.release_requested()).await.is_err(), "this waiter does not ask");
    silent.abort();
    let waiter = tokio::spawn(there.acquire("a").into_future());
    timeout(LONG, one.release_requested()).await.expect("the first holder is asked");
    timeout(LONG, other.release_requested()).await.expect("the second holder is asked");
    one.release().await.unwrap();
    drop(timeout(LONG, waiter).await.unwrap().unwrap().unwrap());
    assert!(other.check().is_ok());
}

#[tokio::test(start_paused = true)]
async fn writer_asks_all_readers() {
    let backend = MemoryBackend::new();
    let pages = || RwLocks::new(backend.clone(), "rw_locks").wait(LONG);
    let (here, there) = (pages(), pages().request_release());
    let readers = [here.read("a").await.unwrap(), there.read("a").await.unwrap()];
    let writer = tokio::spawn(there.write("a").into_future());
    for reader in readers {
        timeout(LONG, reader.release_requested()).await.expect("the reader is asked");
        reader.release().await.unwrap();
    }
    let writer = timeout(LONG, writer).await.unwrap().unwrap().unwrap();
    let reader = tokio::spawn(there.read("a").into_future());
    timeout(LONG, writer.release_requested()).await.expect("the writer is asked");
    writer.release().await.unwrap();
    drop(timeout(LONG, reader).await.unwrap().unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_asked_on_memory() {
    a_holder_is_asked(MemoryBackend::new()).await;
    waiter_without_request_release_is_silent(MemoryBackend::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_asked_on_redis() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    a_holder_is_asked(backend.clone()).await;
    waiter_without_request_release_is_silent(backend).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_asked_on_a_cluster() {
    let cluster = Cluster::start();
    a_holder_is_asked(patient(cluster.url()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_asked_by_redlock() {
    let servers = [(); 3].map(|()| RedisServer::start());
    let mut stores = Vec::new();
    for server in &servers {
        stores.push(patient(server.url()).await);
    }
    a_holder_is_asked(Redlock::new(stores).unwrap()).await;
}

/// A replaced connection may have missed a notification, so waiters look again. That is no request to the holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connection_is_no_release_request() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let (here, there) = (locks(&backend), locks(&backend).request_release());
    let lease = here.lock("a").await.unwrap();
    let mut asked = Box::pin(lease.release_requested());
    assert!(timeout(A_WHILE / 5, &mut asked).await.is_err());
    let listening = || server.query::<Vec<String>>("PUBSUB CHANNELS *:asked").len();
    block_in_place(|| wait_until("the holder listens", || listening() == 1));
    for _ in 0..2 {
        assert_eq!(server.query::<u64>("CLIENT KILL TYPE pubsub"), 1);
        block_in_place(|| wait_until("the holder listens again", || listening() == 1));
        assert!(timeout(A_WHILE / 5, &mut asked).await.is_err(), "no waiter has asked");
    }
    let waiter = tokio::spawn(there.lock("a").into_future());
    timeout(LONG, &mut asked).await.expect("the holder still receives requests");
    drop(asked);
    lease.release().await.unwrap();
    drop(timeout(LONG, waiter).await.unwrap().unwrap().unwrap());
}
