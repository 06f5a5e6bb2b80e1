//! Redis on bad days, under load: flushed, killed, restarted, stopped, and with its clients cut off.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bb8_redis::RedisConnectionManager;
use support::server::RedisServer;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::{
    AsError, BoxError, Limiter, OnStoreError, Policy, Quota, RateLimitLayer, RedisBackend, RedisOptions, StoreError,
};
use tower::{Layer, ServiceExt, service_fn};

const DEADLINE: Duration = Duration::from_millis(100);
/// What a busy machine may add to a deadline before it counts as missed.
const SLACK: Duration = Duration::from_millis(50);
/// How soon everything has to work again.
const RECOVERY: Duration = Duration::from_secs(1);

/// Lets the tests of this file run one after the other: they judge by the clock, and would slow each other down.
async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

fn policy() -> Policy {
    Policy::new("faults", Quota::per_hour(100_000_000).fixed_window())
}

async fn backend(server: &RedisServer) -> RedisBackend {
    RedisBackend::connect(server.url()).await.expect("the server lets us in")
}

/// One call under load: when it began, how long it took, and what came of it.
struct Call {
    begun: Instant,
    took: Duration,
    failure: Option<StoreError>,
}

/// Callers that ask without a pause until they are told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    callers: JoinSet<Vec<Call>>,
}

impl Load {
    fn start(callers: u32, backend: &RedisBackend, deadline: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let limiter = Limiter::new(backend.clone(), policy()).deadline(deadline);
        let mut set = JoinSet::new();
        for caller in 0..callers {
            let (stop, limiter) = (Arc::clone(&stop), limiter.clone());
            set.spawn(async move {
                let mut calls = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let answer = limiter.check(caller).await;
                    let failure = answer.err();
                    // A failure can come at once, and then the next would, too: leave the processor to the server.
                    let failed = failure.is_some();
                    calls.push(Call { begun, took: begun.elapsed(), failure });
                    if failed {
                        sleep(Duration::from_millis(1)).await;
                    }
                }
                calls
            });
        }
        Self { stop, callers: set }
    }

    async fn stop(self) -> Vec<Call> {
        self.stop.store(true, Ordering::Relaxed);
        self.callers.join_all().await.into_iter().flatten().collect()
    }
}

/// No call took longer than its deadline.
fn all_in_time(calls: &[Call]) {
    let slowest = calls.iter().map(|call| call.took).max().expect("there were calls");
    assert!(slowest <= DEADLINE + SLACK, "a call took {slowest:?}");
}

/// From `RECOVERY` after `back` on, nothing failed, and there was enough to fail.
fn recovered_since(back: Instant, calls: &[Call]) {
    let late: Vec<_> = calls.iter().filter(|call| call.begun >= back + RECOVERY).collect();
    assert!(late.len() > 1_000, "only {} calls to judge by", late.len());
    let failures: Vec<_> = late.iter().filter_map(|call| call.failure.as_ref()).collect();
    assert!(failures.is_empty(), "{} failures, first {:?}", failures.len(), failures[0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_are_no_error() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let load = Load::start(32, &backend(&server).await, Duration::from_secs(5));
    let mut connection = server.connection();
    let start = Instant::now();
    let mut flushes = 0;
    while start.elapsed() < Duration::from_secs(2) {
        let _: () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut connection).unwrap();
        flushes += 1;
        sleep(Duration::from_millis(1)).await;
    }
    let calls = load.stop().await;
    assert!(flushes > 100 && calls.len() > 1_000, "{flushes} flushes, {} calls", calls.len());
    let failure = calls.iter().find_map(|call| call.failure.as_ref());
    assert!(failure.is_none(), "{failure:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_costs_errors_in_time_and_a_second_at_most() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let load = Load::start(32, &backend(&server).await, DEADLINE);
    sleep(Duration::from_millis(500)).await;
    let killed = Instant::now();
    server.kill();
    sleep(Duration::from_secs(2)).await;
    let restarted = Instant::now();
    server.restart();
    let back = Instant::now();
    sleep(RECOVERY + Duration::from_millis(700)).await;
    let calls = load.stop().await;

    all_in_time(&calls);
    recovered_since(back, &calls);
    assert!(calls.iter().filter(|call| call.begun + call.took < killed).all(|call| call.failure.is_none()));
    let down: Vec<_> =
        calls.iter().filter(|call| call.begun > killed + SLACK && call.begun + call.took < restarted).collect();
    assert!(down.len() > 100, "only {} calls while it was down", down.len());
    for call in &down {
        let failure = call.failure.as_ref().expect("nobody can answer while the server is down");
        assert!(failure.is_unavailable() || failure.is_timeout(), "{failure:?}");
    }
    // A server that refuses connections is known to be down, so nobody waits for the deadline.
    let at_once = down.iter().filter(|call| call.took < DEADLINE / 2).count();
    assert!(at_once * 10 > down.len() * 9, "{at_once} of {} failed at once", down.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_holds_nobody_beyond_the_deadline() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let load = Load::start(32, &backend(&server).await, DEADLINE);
    // Shorter and longer than it takes to give up the connections.
    for length in [Duration::from_millis(300), Duration::from_millis(2_500)] {
        sleep(Duration::from_millis(300)).await;
        server.pause();
        sleep(length).await;
        server.resume();
        sleep(RECOVERY).await;
    }
    let back = Instant::now() - RECOVERY;
    sleep(Duration::from_millis(500)).await;
    let calls = load.stop().await;

    all_in_time(&calls);
    recovered_since(back, &calls);
    let failed = calls.iter().filter_map(|call| call.failure.as_ref()).collect::<Vec<_>>();
    assert!(failed.len() > 100, "only {} calls failed", failed.len());
    assert!(failed.iter().all(|failure| failure.is_timeout() || failure.is_unavailable()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_connection_costs_what_was_in_flight_and_no_more() {
    let _turn = alone().await;
    const CALLERS: u32 = 16;
    const CUTS: usize = 20;
    let server = RedisServer::start();
    let load = Load::start(CALLERS, &backend(&server).await, Duration::from_secs(5));
    let mut connection = server.connection();
    for _ in 0..CUTS {
        sleep(Duration::from_millis(50)).await;
        let _: u32 =
            redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).query(&mut connection).unwrap();
    }
    let calls = load.stop().await;
    let failures = calls.iter().filter(|call| call.failure.is_some()).count();
    // A caller waits for one answer at a time, so a cut costs each of them one at the most: a broken connection is never
    // handed out twice.
    assert!(failures > 0 && failures <= CALLERS as usize * CUTS, "{failures} failures");
    assert!(calls.len() > 1_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_tasks_on_a_small_pool_are_served_fairly() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(2).connect().await.unwrap();
    let load = Load::start(2_000, &backend, Duration::from_secs(30));
    sleep(Duration::from_secs(3)).await;
    let calls = load.stop().await;
    assert!(calls.iter().all(|call| call.failure.is_none()));
    let mut times: Vec<_> = calls.iter().map(|call| call.took).collect();
    times.sort_unstable();
    let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
    assert!(longest <= median * 100, "the longest wait is {longest:?}, the median {median:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_of_the_program_is_healed_after_a_restart() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    let pool = bb8_redis::bb8::Pool::builder().max_size(2).min_idle(2).build(manager).await.unwrap();
    let backend = RedisBackend::from_pool(pool.clone()).await.unwrap();
    let load = Load::start(8, &backend, DEADLINE);
    sleep(Duration::from_millis(300)).await;
    server.kill();
    sleep(Duration::from_millis(300)).await;
    server.restart();
    let back = Instant::now();
    sleep(RECOVERY + Duration::from_millis(700)).await;
    recovered_since(back, &load.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_layer_follows_its_policy_while_redis_is_down() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let backend = backend(&server).await;
    let inner = service_fn(async |request: u32| Ok::<_, BoxError>(request));
    let layer = RateLimitLayer::new(backend, policy()).with_rejection(AsError).deadline(DEADLINE);
    let open = layer.clone().on_store_error(OnStoreError::Allow).layer(inner);
    let closed = layer.on_store_error(OnStoreError::Deny).layer(inner);
    assert_eq!(open.clone().oneshot(1).await.unwrap(), 1);
    assert_eq!(closed.clone().oneshot(1).await.unwrap(), 1);

    server.kill();
    for request in 0..20 {
        let start = Instant::now();
        assert_eq!(open.clone().oneshot(request).await.unwrap(), request);
        let error = closed.clone().oneshot(request).await.unwrap_err();
        assert!(error.downcast_ref::<StoreError>().is_some(), "{error:?}");
        assert!(start.elapsed() <= (DEADLINE + SLACK) * 2);
    }

    server.restart();
    sleep(RECOVERY).await;
    assert_eq!(closed.oneshot(2).await.unwrap(), 2);
}
