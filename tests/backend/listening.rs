//! Notifications of a cluster after its nodes have changed. All waiters of a process must get notifications again.

use std::time::{Duration, Instant};

use tokio::task::block_in_place;
use tokio::time::sleep;
use tollgate::delay_queue::DelayQueue;
use tollgate::lock::LockKey;
use tollgate::lock::store::LockStore;
use tollgate::{RedisBackend, RedisOptions};

use crate::support::cluster::Cluster;
use crate::support::server::{RedisServer, version, wait_until};
use crate::support::waiting::{LATE, SOON, TIMEOUT, Waiting, Worker};

async fn connect(url: &str) -> RedisBackend {
    RedisBackend::connect(url).await.unwrap()
}

/// Starts waiters whose keys are all in slots of one primary.
async fn wait_for(cluster: &Cluster, primary: usize, url: &str) -> Waiting {
    let is_there = |tag: &str| cluster.owner(slot(cluster, tag)) == primary;
    Waiting::start(connect(&cluster.url()).await, connect(url).await, is_there).await
}

fn slot(cluster: &Cluster, tag: &str) -> u16 {
    let node = cluster.nodes.iter().find(|node| node.is_answering()).unwrap();
    node.query(&format!("CLUSTER KEYSLOT {{{tag}}}"))
}

async fn assert_in_time(waiting: &mut Waiting, when: &str) {
    let lateness = waiting.lateness().await;
    assert!(lateness.iter().all(|(_, late)| *late < LATE), "{when}: {lateness:?}");
}

/// Regression: the client kept reconnecting to the dead primary, or only to the servers of the URL, and got no more notifications.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_took_over_is_listened_to() {
    let mut cluster = Cluster::start();
    let old = cluster.primaries()[0];
    // The URL names this node only.
    let url = cluster.nodes[old].url().replace("redis:", "redis+cluster:");
    let mut waiting = wait_for(&cluster, old, &url).await;
    assert_in_time(&mut waiting, "before").await;
    let slot = slot(&cluster, &waiting.tag());
    let back = block_in_place(|| {
        cluster.wait_until_whole();
        cluster.nodes[old].kill();
        cluster.wait_for_another_owner(slot, old).0
    });
    sleep((back + SOON).saturating_duration_since(Instant::now())).await;
    assert_in_time(&mut waiting, "after").await;
}

/// Regression: one command renewed all subscriptions on a node. The node refuses a command with channels of several slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_queue_are_listened_to_after_a_cut() {
    let cluster = Cluster::start();
    let queue = |backend| DelayQueue::<u32>::new(backend, "split").split(8).deadline(TIMEOUT);
    let mut worker = Worker::start(queue(connect(&cluster.url()).await));
    let teller = queue(connect(&cluster.url()).await);
    let channels = |node: &RedisServer| node.query::<Vec<String>>("PUBSUB SHARDCHANNELS").len();
    // Before Redis 7, every node sends all notifications.
    let listened = || cluster.primaries().iter().map(|&node| channels(&cluster.nodes[node])).sum::<usize>();
    let are_all_listened_to = || version() < (7, 0) || listened() == 8;
    block_in_place(|| wait_until("all parts are listened to", are_all_listened_to));
    for node in cluster.primaries() {
        cluster.nodes[node].query::<()>("CLIENT KILL TYPE pubsub");
    }
    sleep(SOON).await;
    assert!(are_all_listened_to(), "{} of 8 parts are listened to", listened());
    let mut late = Vec::new();
    for _ in 0..16 {
        late.push(worker.lateness(&teller).await);
    }
    late.sort_unstable();
    // Without a notification, the worker finds a job by its poll every five seconds.
    assert!(late[late.len() / 2] < LATE && late[late.len() - 1] < SOON, "{late:?}");
}

/// Like a pod that restarts with another address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_with_another_address_is_listened_to() {
    // The timeout is long, so no replica takes over meanwhile.
    let mut cluster = Cluster::start_with(&["--cluster-node-timeout", "15000"]);
    let node = cluster.primaries()[0];
    let mut waiting = wait_for(&cluster, node, &cluster.url()).await;
    assert_in_time(&mut waiting, "before").await;
    block_in_place(|| cluster.readdress(node));
    sleep(SOON).await;
    assert_in_time(&mut waiting, "after").await;
}

/// Nothing has failed: the connection to the old primary stays open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_leave_a_demoted_primary() {
    let cluster = Cluster::start();
    let old = cluster.primaries()[0];
    let mut waiting = wait_for(&cluster, old, &cluster.url()).await;
    let slot = slot(&cluster, &waiting.tag());
    block_in_place(|| {
        cluster.fail_over(old);
        cluster.wait_for_another_owner(slot, old);
    });
    sleep(SOON).await;
    assert_in_time(&mut waiting, "after").await;
}

/// Regression: the client did not check whether such a connection is alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_leave_a_hanging_primary() {
    let cluster = Cluster::start();
    let old = cluster.primaries()[0];
    let mut waiting = wait_for(&cluster, old, &cluster.url()).await;
    let slot = slot(&cluster, &waiting.tag());
    let back = block_in_place(|| {
        cluster.wait_until_whole();
        cluster.nodes[old].pause();
        cluster.wait_for_another_owner(slot, old).0
    });
    sleep((back + SOON).saturating_duration_since(Instant::now())).await;
    assert_in_time(&mut waiting, "after").await;
}

/// Regression: the process tried to connect to that primary until its connect timeout, and read the slot map only afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_connect_timeout_does_not_delay_the_failover() {
    // The process notices the dead connection long before another node takes over.
    let cluster = Cluster::start_with(&["--cluster-node-timeout", "5000"]);
    let old = cluster.primaries()[0];
    let is_there = |tag: &str| cluster.owner(slot(&cluster, tag)) == old;
    let patient = RedisOptions::from_url(cluster.url()).unwrap().connect_timeout(Duration::from_secs(60));
    let hears = patient.connect().await.unwrap();
    let mut waiting = Waiting::start(connect(&cluster.url()).await, hears, is_there).await;
    let slot = slot(&cluster, &waiting.tag());
    let back = block_in_place(|| {
        cluster.wait_until_whole();
        cluster.nodes[old].pause();
        cluster.wait_for_another_owner(slot, old).0
    });
    sleep((back + SOON).saturating_duration_since(Instant::now())).await;
    assert_in_time(&mut waiting, "after").await;
}

/// Regression: the connection was kept, and checked for liveness every second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_without_channels_is_closed() {
    // Before Redis 7, every node sends all notifications.
    if version() < (7, 0) {
        return;
    }
    let cluster = Cluster::start();
    let backend = connect(&cluster.url()).await;
    let wakeups = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    let slot = slot(&cluster, "lock:default:a");
    let old = cluster.owner(slot);
    let new = cluster.primaries().into_iter().find(|&node| node != old).unwrap();
    let listeners = |node: usize| cluster.nodes[node].text("CLIENT LIST TYPE pubsub");
    block_in_place(|| {
        wait_until("the lock is listened to", || listeners(old).lines().count() == 1);
        // `id=12 addr=...`
        let connection = listeners(old).split(' ').next().unwrap().to_owned() + " ";
        let is_open = || cluster.nodes[old].text("CLIENT LIST").contains(&connection);
        assert!(is_open());
        cluster.migrate(slot, new);
        wait_until("the new node is listened to", || listeners(new).lines().count() == 1);
        let start = Instant::now();
        wait_until("the old connection is closed", || !is_open());
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    });
    drop(wakeups);
}
