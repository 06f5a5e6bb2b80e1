//! Whoever waits for a lock may ask for it, and its holder is told: in one process, over memory, one Redis, a cluster and Redlock.

use crate::support;

use std::future::IntoFuture;
use std::time::Duration;

use support::cluster::Cluster;
use support::server::{RedisServer, wait_until};
use support::shared::patient;
use tokio::task::block_in_place;
use tokio::time::timeout;
use tollgate::lock::{LockStore, Redlock, RwLocks, Semaphore};
use tollgate::{Locks, MemoryBackend};

/// Every wait that must end ends in this time.
const LONG: Duration = Duration::from_secs(20);
/// In which nothing is to happen that must not.
const A_WHILE: Duration = Duration::from_millis(1_500);

fn locks<S: LockStore + Clone + Send + Sync + 'static>(store: &S) -> Locks {
    Locks::new(store.clone(), "default").deadline(LONG).wait(LONG)
}

/// The holder is told whether those who ask are in its process or in another one, and whether it listens before they ask or after.
async fn a_holder_is_asked<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store).request_release(), locks(&store).request_release());
    for (turn, others) in [&here, &there, &here, &there].into_iter().enumerate() {
        let lease = here.lock("a").await.unwrap();
        let listens_first = turn < 2;
        if listens_first {
            assert!(timeout(A_WHILE / 10, lease.asked()).await.is_err(), "nobody has asked");
        }
        let waiter = tokio::spawn(others.lock("a").into_future());
        if !listens_first {
            tokio::time::sleep(A_WHILE / 10).await;
        }
        timeout(LONG, lease.asked()).await.expect("it is asked");
        timeout(LONG, lease.view().asked()).await.expect("and remembers that");
        assert!(!waiter.is_finished() && lease.check().is_ok(), "nothing is taken away");
        let fence = lease.fence();
        lease.release().await.unwrap();
        let next = timeout(LONG, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.fence() > fence);
        assert!(timeout(A_WHILE / 10, next.asked()).await.is_err(), "it was not this one that was asked");
        next.release().await.unwrap();
    }
}

/// Those who have not been told to ask wait in silence.
async fn who_does_not_ask_waits_in_silence<S: LockStore + Clone + Send + Sync + 'static>(store: S) {
    let (here, there) = (locks(&store), locks(&store));
    let lease = here.lock("a").await.unwrap();
    let waiters = [&here, &there].map(|locks| {
        let request = locks.lock("a");
        tokio::spawn(async move { drop(request.await.unwrap()) })
    });
    assert!(timeout(A_WHILE, lease.asked()).await.is_err());
    lease.release().await.unwrap();
    for waiter in waiters {
        timeout(LONG, waiter).await.unwrap().unwrap();
    }
}

/// The first of those who wait in a process asks, also after the lock went from hand to hand.
#[tokio::test(start_paused = true)]
async fn each_holder_is_asked_for_itself() {
    let backend = MemoryBackend::new();
    let silent = Locks::new(backend, "default").wait(LONG);
    let asking = silent.clone().request_release();
    let first = silent.lock("a").await.unwrap();
    let second = tokio::spawn(silent.lock("a").into_future());
    tokio::task::yield_now().await;
    let third = tokio::spawn(asking.lock("a").into_future());
    assert!(timeout(A_WHILE, first.asked()).await.is_err(), "who is first does not ask");
    first.release().await.unwrap();
    let second = second.await.unwrap().unwrap();
    timeout(A_WHILE, second.asked()).await.expect("who is first asks");
    second.release().await.unwrap();
    let third = third.await.unwrap().unwrap();
    assert!(timeout(A_WHILE, third.asked()).await.is_err(), "nobody is left");
}

/// Who came to be first since the one in front gave up never asked.
#[tokio::test(start_paused = true)]
async fn who_is_first_since_others_gave_up_asks() {
    let silent = Locks::new(MemoryBackend::new(), "default").wait(LONG);
    let asking = silent.clone().request_release();
    let lease = silent.lock("a").await.unwrap();
    let second = tokio::spawn(silent.lock("a").into_future());
    tokio::task::yield_now().await;
    let third = tokio::spawn(asking.lock("a").into_future());
    let last = tokio::spawn(silent.lock("a").into_future());
    assert!(timeout(A_WHILE, lease.asked()).await.is_err(), "who is first does not ask");
    // Whoever leaves from further back changes nothing.
    last.abort();
    assert!(timeout(A_WHILE, lease.asked()).await.is_err(), "who is first does not ask");
    second.abort();
    timeout(A_WHILE, lease.asked()).await.expect("who is first asks");
    drop(lease);
    drop(third.await.unwrap().unwrap());
}

/// Any of them would do, and which ends is for them to say.
#[tokio::test(start_paused = true)]
async fn all_who_hold_a_permit_are_asked() {
    let backend = MemoryBackend::new();
    let semaphore = || Semaphore::new(backend.clone(), "semaphores", 2).wait(LONG);
    let (here, there) = (semaphore(), semaphore().request_release());
    let (one, other) = (here.acquire("a").await.unwrap(), there.acquire("a").await.unwrap());
    let silent = tokio::spawn(here.acquire("a").into_future());
    assert!(timeout(A_WHILE, one.asked()).await.is_err(), "that one waits in silence");
    silent.abort();
    let waiter = tokio::spawn(there.acquire("a").into_future());
    timeout(LONG, one.asked()).await.expect("it is asked");
    timeout(LONG, other.asked()).await.expect("and so is this one");
    one.release().await.unwrap();
    drop(timeout(LONG, waiter).await.unwrap().unwrap().unwrap());
    assert!(other.check().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_writer_asks_those_who_read() {
    let backend = MemoryBackend::new();
    let pages = || RwLocks::new(backend.clone(), "rw_locks").wait(LONG);
    let (here, there) = (pages(), pages().request_release());
    let readers = [here.read("a").await.unwrap(), there.read("a").await.unwrap()];
    let writer = tokio::spawn(there.write("a").into_future());
    for reader in readers {
        timeout(LONG, reader.asked()).await.expect("it is asked");
        reader.release().await.unwrap();
    }
    let writer = timeout(LONG, writer).await.unwrap().unwrap().unwrap();
    let reader = tokio::spawn(there.read("a").into_future());
    timeout(LONG, writer.asked()).await.expect("and so is a writer");
    writer.release().await.unwrap();
    drop(timeout(LONG, reader).await.unwrap().unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_asked_on_memory() {
    a_holder_is_asked(MemoryBackend::new()).await;
    who_does_not_ask_waits_in_silence(MemoryBackend::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_asked_on_redis() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    a_holder_is_asked(backend.clone()).await;
    who_does_not_ask_waits_in_silence(backend).await;
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

/// A connection that is made again may have missed something: whoever waits looks again then, but no holder was asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_asks_nobody() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let (here, there) = (locks(&backend), locks(&backend).request_release());
    let lease = here.lock("a").await.unwrap();
    let mut asked = Box::pin(lease.asked());
    assert!(timeout(A_WHILE / 5, &mut asked).await.is_err());
    let listening = || server.query::<Vec<String>>("PUBSUB CHANNELS *:asked").len();
    block_in_place(|| wait_until("it listens", || listening() == 1));
    for _ in 0..2 {
        assert_eq!(server.query::<u64>("CLIENT KILL TYPE pubsub"), 1);
        block_in_place(|| wait_until("it listens again", || listening() == 1));
        assert!(timeout(A_WHILE / 5, &mut asked).await.is_err(), "nobody has asked");
    }
    let waiter = tokio::spawn(there.lock("a").into_future());
    timeout(LONG, &mut asked).await.expect("it still hears who asks");
    drop(asked);
    lease.release().await.unwrap();
    drop(timeout(LONG, waiter).await.unwrap().unwrap().unwrap());
}
