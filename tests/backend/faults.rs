//! Faults of Redis under load: flushed scripts, killed, restarted and stopped servers, and cut connections.

use crate::support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bb8_redis::RedisConnectionManager;
use futures_util::future::join_all;
use support::load::{self, Load};
use support::processor::{ProcessorMeter, Waits};
use support::proxy::{Proxy, Traffic};
use support::server::{RedisServer, wait_until};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{CircuitBreaker, Decision};
use tollgate::{
    BoxError, DelayQueue, ErrorResponder, Key, Limiter, Locks, Policy, Quota, RateLimitFallback, RateLimitLayer,
    RedisBackend, RedisOptions, StoreError,
};
use tower::{Layer, ServiceExt, service_fn};

const DEADLINE: Duration = Duration::from_millis(100);
/// How long after its deadline a call may end on a busy machine.
const SLACK: Duration = Duration::from_millis(50);
/// A call that waited this long for a processor may fail for that reason, so its failure is ignored.
const STARVED: Duration = Duration::from_millis(30);
/// The deadline of calls that are not meant to miss it.
const LONG: Duration = Duration::from_secs(5);
/// How soon after a fault all calls must succeed.
const RECOVERY: Duration = Duration::from_secs(1);

/// Serializes the tests of this file. They measure time, and would slow each other down.
async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

fn policy() -> Policy {
    Policy::new("faults", Quota::per_hour(100_000_000).fixed_window())
}

async fn backend(server: &RedisServer) -> RedisBackend {
    RedisBackend::connect(server.url()).await.expect("the server accepts the connection")
}

/// A call, with its error if it failed.
type Call = load::Call<Option<StoreError>>;

/// Starts callers that check without a pause.
fn start_load(callers: u32, backend: &RedisBackend, deadline: Duration) -> Load<Option<StoreError>> {
    let limiter = Limiter::new(backend.clone(), policy()).deadline(deadline);
    // A failure can be immediate, and so can the next one. The pause leaves the processor to the server.
    let pause = |failure: &Option<StoreError>| Duration::from_millis(failure.is_some().into());
    Load::start(callers, pause, move |caller| {
        let limiter = limiter.clone();
        async move { limiter.check(caller).await.err() }
    })
}

/// Asserts that no call took longer than its deadline, apart from its wait for a processor. With so many callers, most calls wait for one.
fn all_in_time<T>(calls: &[load::Call<T>], waits: &Waits, deadline: Duration) {
    let limit = deadline + SLACK;
    let waited = |call: &load::Call<T>| waits.between(call.since, call.ended());
    let is_late = |call: &&load::Call<T>| call.took > limit && call.took.saturating_sub(waited(call)) > limit;
    let slowest = calls.iter().filter(is_late).max_by_key(|call| call.took);
    let worst = slowest.map(|call| (call.took, waited(call)));
    assert!(worst.is_none(), "a call was late (duration, of which without a processor): {worst:?}");
}

/// Asserts that no call failed, apart from calls that had no processor.
fn none_failed<'a>(calls: impl IntoIterator<Item = &'a Call>, waits: &Waits) {
    let fed = calls.into_iter().filter(|call| waits.between(call.since, call.ended()) <= STARVED);
    let failures: Vec<_> = fed.filter_map(|call| call.outcome.as_ref()).collect();
    assert!(failures.is_empty(), "{} failures, first {:?}", failures.len(), failures[0]);
}

/// The smallest number of calls that proves anything.
const ENOUGH: usize = 1_000;

/// Asserts that no call failed from `RECOVERY` after `back` on, and that there were enough calls.
fn recovered_since(back: Instant, calls: &[Call], waits: &Waits) {
    let late: Vec<_> = calls.iter().filter(|call| call.since >= back + RECOVERY).collect();
    assert!(late.len() >= ENOUGH, "only {} calls after the recovery", late.len());
    none_failed(late, waits);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_scripts_are_no_error() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let load = start_load(32, &backend(&server).await, Duration::from_secs(5));
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
    let failure = calls.iter().find_map(|call| call.outcome.as_ref());
    assert!(failure.is_none(), "{failure:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_fails_calls_in_time_and_recovers_in_a_second() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let meter = ProcessorMeter::start();
    let load = start_load(32, &backend(&server).await, DEADLINE);
    sleep(Duration::from_millis(500)).await;
    let killed = Instant::now();
    server.kill();
    sleep(Duration::from_secs(2)).await;
    let restarted = Instant::now();
    server.restart();
    let back = Instant::now();
    sleep(RECOVERY).await;
    load.goes_on(Duration::from_millis(700), ENOUGH).await;
    let calls = load.stop().await;

    let waits = meter.stop();
    all_in_time(&calls, &waits, DEADLINE);
    recovered_since(back, &calls, &waits);
    none_failed(calls.iter().filter(|call| call.ended() < killed), &waits);
    let down: Vec<_> = calls.iter().filter(|call| call.since > killed + SLACK && call.ended() < restarted).collect();
    assert!(down.len() > 100, "only {} calls while it was down", down.len());
    for call in &down {
        let failure = call.outcome.as_ref().expect("no call succeeds while the server is down");
        assert!(failure.is_unavailable() || failure.is_timeout(), "{failure:?}");
    }
    // Refused connections show that the server is down, so calls do not wait for the deadline.
    let at_once = down.iter().filter(|call| call.took < DEADLINE / 2).count();
    assert!(at_once * 10 > down.len() * 9, "{at_once} of {} failed at once", down.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_server_delays_no_call_beyond_the_deadline() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let meter = ProcessorMeter::start();
    let load = start_load(32, &backend(&server).await, DEADLINE);
    // A connection is given up after a time between these two.
    for length in [Duration::from_millis(300), Duration::from_millis(2_500)] {
        sleep(Duration::from_millis(300)).await;
        server.pause();
        sleep(length).await;
        server.resume();
        sleep(RECOVERY).await;
    }
    let back = Instant::now() - RECOVERY;
    load.goes_on(Duration::from_millis(500), ENOUGH).await;
    let calls = load.stop().await;

    let waits = meter.stop();
    all_in_time(&calls, &waits, DEADLINE);
    recovered_since(back, &calls, &waits);
    let failed = calls.iter().filter_map(|call| call.outcome.as_ref()).collect::<Vec<_>>();
    assert!(failed.len() > 100, "only {} calls failed", failed.len());
    assert!(failed.iter().all(|failure| failure.is_timeout() || failure.is_unavailable()));
}

/// Direct calls of the store have no other deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_without_a_deadline_ends_with_the_response_timeout() {
    let _turn = alone().await;
    // Longer than the default.
    const TIMEOUT: Duration = Duration::from_secs(1);
    let server = RedisServer::start();
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    let pool = bb8_redis::bb8::Pool::builder().build(manager).await.unwrap();
    for options in [RedisOptions::from_url(server.url()).unwrap(), RedisOptions::from_pool(pool)] {
        let backend = options.response_timeout(TIMEOUT).connect().await.unwrap();
        server.pause();
        let start = Instant::now();
        let error = backend.check(&policy(), &Key::from("alice"), 1).await.unwrap_err();
        let took = start.elapsed();
        server.resume();
        assert!(error.is_timeout(), "{error:?}");
        assert!(took >= TIMEOUT && took < TIMEOUT * 3, "{took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_connection_fails_only_calls_in_flight() {
    let _turn = alone().await;
    const CALLERS: u32 = 16;
    const CUTS: usize = 20;
    let server = RedisServer::start();
    for connections in [1, 4] {
        let options = RedisOptions::from_url(server.url()).unwrap().connections(connections);
        let load = start_load(CALLERS, &options.connect().await.unwrap(), Duration::from_secs(5));
        let mut connection = server.connection();
        for _ in 0..CUTS {
            sleep(Duration::from_millis(50)).await;
            let _: u32 =
                redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).query(&mut connection).unwrap();
        }
        let calls = load.stop().await;
        let failures = calls.iter().filter(|call| call.outcome.is_some()).count();
        // A caller has one call in flight, so each cut connection costs it at most one failure: a broken connection is never reused. All
        // connections are cut at once, so a caller may fail on several of them before the backend notices.
        let most = CALLERS as usize * CUTS * connections as usize;
        assert!(failures > 0 && failures <= most, "{failures} failures with {connections} connections");
        assert!(calls.len() > 1_000);
    }
}

/// Regression: the server's `timeout`, or a network that drops idle connections, closed all connections. Under low load, all but one of the
/// calls then failed, each on another closed connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_closed_while_idle_fail_no_call() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    let pool = bb8_redis::bb8::Pool::builder().max_size(1).build(manager).await.unwrap();
    let backends = [backend(&server).await, RedisBackend::from_pool(pool.clone()).await.unwrap()];
    let deadline = Duration::from_secs(5);
    // Unlike killing clients, this does not close connections that are being opened.
    let close = || {
        server.query::<()>("CONFIG SET timeout 1");
        block_in_place(|| wait_until("the server has closed all connections", || server.clients() == 0));
        server.query::<()>("CONFIG SET timeout 0");
        // Wait until the backend has noticed.
        sleep(Duration::from_millis(300))
    };
    for backend in backends {
        let limiter = Limiter::new(backend.clone(), policy()).deadline(deadline);
        let locks = Locks::new(backend.clone(), "default").deadline(deadline);
        let queue = DelayQueue::<u32>::new(backend, "idle").deadline(deadline);
        let _ = limiter.check("alice").await.unwrap();
        locks.try_lock("a").await.unwrap().release().await.unwrap();
        close().await;
        for i in 0..8 {
            assert!(limiter.check(i).await.unwrap().is_allowed(), "call {i}");
        }
        close().await;
        locks.try_lock("b").await.unwrap().release().await.unwrap();
        close().await;
        queue.push(0).await.unwrap();
    }
}

/// Regression: for half a second, calls reported a failed attempt to connect, although the next attempt was overdue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_failure_is_shared_with_the_next_attempt_only() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(1).connect().await.unwrap();
    let limiter = Limiter::new(backend, policy()).deadline(Duration::from_secs(5));
    server.kill();
    // The first call finds the connection closed, and the second one fails to open another.
    for _ in 0..2 {
        let error = limiter.check("alice").await.unwrap_err();
        assert!(error.is_unavailable(), "{error:?}");
    }
    server.restart();
    sleep(Duration::from_millis(200)).await;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

/// Regression: calls reported the failed replacement of one connection, although others were alive and only briefly in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn irreplaceable_connection_costs_nothing_beside_another() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let mut connection = server.connection();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(2).connect().await.unwrap();
    // The server accepts no further client.
    let clients: Vec<String> = clients(&mut connection);
    let _: () = redis::cmd("CONFIG").arg(&["SET", "maxclients", "1"]).query(&mut connection).unwrap();
    let _: u32 = redis::cmd("CLIENT").arg(&["KILL", "ID", &clients[1]]).query(&mut connection).unwrap();
    let load = start_load(64, &backend, Duration::from_secs(5));
    sleep(Duration::from_secs(1)).await;
    let calls = load.stop().await;
    let failures = calls.iter().filter(|call| call.outcome.is_some()).count();
    assert!(calls.len() > 1_000 && failures <= 64, "{failures} failures in {} calls", calls.len());
}

/// The ids of all clients of the server, the oldest first.
fn clients(connection: &mut redis::Connection) -> Vec<String> {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(connection).unwrap();
    list.lines().filter_map(|line| line.strip_prefix("id=")?.split(' ').next()).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_primary_is_left_for_the_new_one() {
    let _turn = alone().await;
    let (old, new) = (RedisServer::start(), RedisServer::start());
    // Clients connect to this address. Like a failover, the proxy can forward it to another server.
    let proxy = Proxy::start(old.port());
    let backend = RedisBackend::connect(proxy.url()).await.unwrap();
    let limiter = Limiter::new(backend, policy()).deadline(Duration::from_secs(5));
    let _ = limiter.check("alice").await.unwrap();
    sleep(Duration::from_secs(1)).await;

    proxy.lead_to(new.port());
    let replicaof = ["127.0.0.1".to_owned(), new.port().to_string()];
    let _: () = redis::cmd("REPLICAOF").arg(&replicaof).query(&mut old.connection()).unwrap();
    let switched = Instant::now();
    // Each connection discovers the failover by its own error.
    let mut failures = 0;
    while switched.elapsed() < RECOVERY {
        if let Err(error) = limiter.check("alice").await {
            assert!(error.is_unavailable(), "{error:?}");
            failures += 1;
        }
        sleep(Duration::from_millis(5)).await;
    }
    assert!((1..=4).contains(&failures), "{failures} failures");
    let _ = limiter.check("alice").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_tasks_on_a_small_pool_are_served_fairly() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let options = RedisOptions::from_url(server.url()).unwrap().connections(2);
    let backend = options.response_timeout(Duration::from_secs(10)).connect().await.unwrap();
    let load = start_load(2_000, &backend, Duration::from_secs(30));
    sleep(Duration::from_secs(3)).await;
    let calls = load.stop().await;
    assert!(calls.iter().all(|call| call.outcome.is_none()));
    let mut times: Vec<_> = calls.iter().map(|call| call.took).collect();
    times.sort_unstable();
    let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
    assert!(longest <= median * 100, "the longest wait is {longest:?}, the median {median:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_pool_recovers_after_a_restart() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    let pool = bb8_redis::bb8::Pool::builder().max_size(2).min_idle(2).build(manager).await.unwrap();
    let backend = RedisBackend::from_pool(pool.clone()).await.unwrap();
    let meter = ProcessorMeter::start();
    let load = start_load(8, &backend, LONG);
    sleep(Duration::from_millis(300)).await;
    server.kill();
    sleep(Duration::from_millis(300)).await;
    server.restart();
    let back = Instant::now();
    sleep(RECOVERY).await;
    load.goes_on(Duration::from_millis(700), ENOUGH).await;
    recovered_since(back, &load.stop().await, &meter.stop());
}

/// A check that its client cancels is no sign of a broken connection.
#[tokio::test]
async fn abandoned_calls_do_not_cost_a_connection() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let mut connection = server.connection();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(1).connect().await.unwrap();
    let limiter = Limiter::new(backend, policy()).deadline(LONG);
    let before = clients(&mut connection);
    for _ in 0..3 {
        tokio::select! {
            biased;
            _ = limiter.check("alice") => panic!("the reply cannot have arrived yet"),
            () = std::future::ready(()) => {}
        }
        sleep(Duration::from_millis(600)).await;
    }
    let _ = limiter.check("alice").await.unwrap();
    assert_eq!(clients(&mut connection), before);
}

/// If the network drops all packets, only the missing replies show that a connection is dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connection_is_replaced() {
    let _turn = alone().await;
    let (black_hole, server) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(black_hole.port());
    let backend = RedisBackend::connect(proxy.url()).await.unwrap();
    let limiter = Limiter::new(backend, policy()).deadline(DEADLINE);
    let _ = limiter.clone().deadline(LONG).check("alice").await.unwrap();
    black_hole.pause();
    proxy.lead_to(server.port());
    let start = Instant::now();
    let (mut last_failure, mut in_a_row) = (start, 0);
    while in_a_row < 100 {
        assert!(start.elapsed() < Duration::from_secs(10), "it still fails");
        in_a_row += 1;
        if limiter.check("alice").await.is_err() {
            (last_failure, in_a_row) = (Instant::now(), 0);
        }
        sleep(Duration::from_millis(2)).await;
    }
    // Each connection is given up after a second of silence. This test uses them in turn, so the times add up.
    let took = last_failure - start;
    assert!(took > Duration::from_millis(500) && took < Duration::from_secs(6), "{took:?}");
    black_hole.resume();
}

/// Regression: batches on a dead connection were awaited until the response timeout, although their callers had given up. The backend did
/// not find the connection dead, and the batches occupied all slots for calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_batches_keep_no_dead_connection() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    // Longer than this test waits for anything.
    let options = RedisOptions::from_url(proxy.url()).unwrap().response_timeout(LONG * 12);
    let backend = options.connect().await.unwrap();
    let limiter = Limiter::new(backend, policy()).deadline(DEADLINE).circuit_breaker(CircuitBreaker::off());
    let _ = limiter.clone().deadline(LONG).check("alice").await.unwrap();
    proxy.to_server(Traffic::Swallow);
    proxy.to_client(Traffic::Swallow);
    let mut callers = JoinSet::new();
    for caller in 0..16 {
        let limiter = limiter.clone();
        callers.spawn(async move { while limiter.check(caller).await.is_err() {} });
    }
    sleep(Duration::from_millis(1_500)).await;
    // Heals connections that are opened from now on.
    proxy.heal();
    timeout(LONG * 3, callers.join_all()).await.expect("the dead connections are replaced");
}

/// Regression: checks that waited together for a new connection were sent and charged, including checks whose callers had timed out.
#[tokio::test]
async fn timed_out_waiters_for_a_connection_are_not_charged() {
    let _turn = alone().await;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let options = RedisOptions::from_url(proxy.url()).unwrap().connections(1);
    let backend = options.connect_timeout(LONG * 12).response_timeout(LONG * 12).connect().await.unwrap();
    let limiter = Limiter::new(backend, policy()).deadline(LONG * 12);
    let hurried = limiter.clone().deadline(DEADLINE);
    proxy.to_client(Traffic::Hold);
    proxy.cut();
    // Wait until the backend has noticed.
    sleep(Duration::from_millis(300)).await;
    // Enough checks to be batched, all in one task.
    let timed_out = AtomicUsize::new(0);
    let give_up = async |_| {
        let error = hurried.check("hurried").await.unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        if timed_out.fetch_add(1, Ordering::Relaxed) + 1 == 16 {
            proxy.heal();
        }
    };
    let wait = async |_| limiter.check("patient").await.unwrap();
    let (_, waited) = tokio::join!(join_all((0..16).map(give_up)), join_all((0..16).map(wait)));
    assert!(waited.iter().all(Decision::is_allowed));
    let left = async |key| limiter.peek(key).await.unwrap().remaining().unwrap();
    assert_eq!([left("hurried").await, left("patient").await + 16], [left("fresh").await; 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_layer_follows_its_policy_while_redis_is_down() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    let backend = backend(&server).await;
    let inner = service_fn(async |request: u32| Ok::<_, BoxError>(request));
    let layer = RateLimitLayer::new(backend, policy()).responder(ErrorResponder).deadline(DEADLINE);
    let open = layer.clone().on_store_error(RateLimitFallback::Allow).layer(inner);
    let closed = layer.on_store_error(RateLimitFallback::Deny).layer(inner);
    // On a busy machine a call may miss the deadline, but not every call does.
    let is_served = async || {
        let since = Instant::now();
        while let Err(error) = closed.clone().oneshot(1).await {
            assert!(since.elapsed() < LONG, "{error:?}");
            sleep(Duration::from_millis(5)).await;
        }
    };
    assert_eq!(open.clone().oneshot(1).await.unwrap(), 1);
    is_served().await;

    server.kill();
    let meter = ProcessorMeter::start();
    let mut calls = Vec::new();
    for request in 0..20 {
        let since = Instant::now();
        assert_eq!(open.clone().oneshot(request).await.unwrap(), request);
        calls.push(load::Call { since, took: since.elapsed(), outcome: () });
        let since = Instant::now();
        let error = closed.clone().oneshot(request).await.unwrap_err();
        calls.push(load::Call { since, took: since.elapsed(), outcome: () });
        assert!(error.downcast_ref::<StoreError>().is_some(), "{error:?}");
    }
    all_in_time(&calls, &meter.stop(), DEADLINE);

    server.restart();
    sleep(RECOVERY).await;
    is_served().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_counts_alone_in_an_outage_and_recovers() {
    let _turn = alone().await;
    let mut server = RedisServer::start();
    // The hourly quota is ten. In an outage, each of two replicas admits five requests.
    let policy = Policy::new("alone", Quota::per_hour(10).fixed_window());
    let limiter = Limiter::new(backend(&server).await, policy.clone()).deadline(LONG);
    // A healthy server meets this deadline. The server would not have counted a check that missed it.
    let deadline = Duration::from_secs(1);
    let service = RateLimitLayer::new(limiter.store().clone(), policy)
        .key(|client: &u32| *client)
        .deadline(deadline)
        .replicas(2)
        .responder(ErrorResponder)
        .layer(service_fn(async |_: u32| Ok::<_, BoxError>(())));
    let meter = ProcessorMeter::start();
    let mut calls = Vec::new();
    let mut admitted = async |client: u32, requests: u32| {
        let mut admitted = 0;
        for _ in 0..requests {
            let since = Instant::now();
            admitted += u32::from(service.clone().oneshot(client).await.is_ok());
            calls.push(load::Call { since, took: since.elapsed(), outcome: () });
        }
        admitted
    };
    assert_eq!(admitted(1, 15).await, 10);

    server.pause();
    assert_eq!(admitted(2, 15).await, 5);
    server.resume();
    sleep(RECOVERY).await;
    assert_eq!(admitted(3, 15).await, 10);

    server.kill();
    let since = Instant::now();
    assert_eq!(admitted(4, 15).await, 5);
    assert!(since.elapsed() < deadline * 2, "calls to a dead server fail fast");
    server.restart();
    sleep(RECOVERY).await;
    assert_eq!(admitted(5, 15).await, 10);
    all_in_time(&calls, &meter.stop(), deadline);
    assert_eq!(limiter.peek(5).await.unwrap().remaining(), Some(0), "Redis counts again");
}
