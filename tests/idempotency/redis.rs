//! The idempotency layer on a real Redis server: its commands, and its behavior when clients, processes and servers fail.

use crate::support;

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use support::sentinel::SentinelDeployment;
use support::server::{DURABLE, RedisServer, wait_until};
use support::shared::patient;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet, block_in_place};
use tokio::time::{Instant, sleep, timeout};
use tollgate::http::{FingerprintedBody, HeaderKey, IdempotentBody, header};
use tollgate::idempotency::store::{Begun, Claim, Digest, IdempotencyStore, RecordBound};
use tollgate::idempotency::{IdempotencyHandle, Operation};
use tollgate::lock::store::Token;
use tollgate::{IdempotencyLayer, RedisBackend};
use tower::util::BoxCloneService;
use tower::{Layer, Service, ServiceExt, service_fn};

const LONG: Duration = Duration::from_secs(60);

/// The responses of the handler, for each caller and key.
type Runs = Arc<Mutex<HashMap<(String, String), Vec<String>>>>;
type App = BoxCloneService<Request<Full<Bytes>>, (u16, bool, Bytes), Infallible>;

async fn guard(server: &RedisServer) -> IdempotencyLayer<HeaderKey> {
    let backend = patient(server.url()).await;
    IdempotencyLayer::new(backend).scope(header("authorization")).lease(Duration::from_secs(2))
}

/// A replica: a handler behind `guard` that takes some milliseconds and responds differently each time.
fn replica(guard: IdempotencyLayer<HeaderKey>, runs: &Runs) -> App {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let runs = Arc::clone(runs);
    let service = guard.layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| {
        let runs = Arc::clone(&runs);
        async move {
            let name = |name: &str| request.headers()[name].to_str().unwrap().to_owned();
            let operation = (name("authorization"), name("idempotency-key"));
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let body = String::from_utf8(body.to_vec()).unwrap();
            let answer = format!("{body} {operation:?} {number} {}", "x".repeat(number as usize % 3_000));
            runs.lock().unwrap().entry(operation).or_default().push(answer.clone());
            sleep(Duration::from_millis(number % 30)).await;
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(answer)))
        }
    }));
    boxed(service)
}

/// Returns status, whether the response is a replay, and body.
fn boxed<S>(service: S) -> App
where
    S: Service<Request<Full<Bytes>>, Response = Response<IdempotentBody<Full<Bytes>>>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send + 'static,
{
    BoxCloneService::new(service.and_then(|response: Response<IdempotentBody<Full<Bytes>>>| async {
        let (parts, body) = response.into_parts();
        let replayed = parts.headers.contains_key("idempotent-replayed");
        Ok((parts.status.as_u16(), replayed, body.collect().await.unwrap().to_bytes()))
    }))
}

fn pay(caller: &str, key: &str, body: &'static str) -> Request<Full<Bytes>> {
    let request = Request::post("/pay").header("authorization", caller).header("idempotency-key", key);
    request.body(body.into()).unwrap()
}

/// A deterministic random number generator (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// A handler may store a checkpoint only once its body is known to be the right one. A client with the right body never gets a checkpoint
/// of another body.
#[tokio::test]
async fn checkpoint_of_a_handler_with_another_body_is_discarded() {
    let server = RedisServer::start();
    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let guard = guard(&server).await.deadline(Duration::from_secs(5));
    let service = guard.clone().layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| {
        let run = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            let operation = request.extensions().get::<IdempotencyHandle>().unwrap().clone();
            let begun = operation.checkpoint("begun", run.to_string()).await;
            assert_eq!(begun.is_ok(), run == 0, "{begun:?}");
            let last = operation.last_checkpoint().map_or(Vec::new(), |last| last.data().to_vec());
            request.into_body().collect().await.unwrap();
            operation.checkpoint("charged", run.to_string()).await.unwrap();
            let status = if run == 0 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
            Ok::<_, Infallible>(Response::builder().status(status).body(Full::<Bytes>::from(last)).unwrap())
        }
    }));
    for (body, status) in [("hundred", 503), ("thousan", 422), ("hundred", 200)] {
        let answer = service.clone().oneshot(pay("alice", "k", body)).await.unwrap();
        assert_eq!(answer.status(), status, "{body}");
        if status == 200 {
            assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "0");
        }
        guard.wait_idle().await;
    }
    assert_eq!(runs.load(Ordering::SeqCst), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_request_costs_two_commands_and_a_replay_one() {
    let server = RedisServer::start();
    let app = replica(guard(&server).await.deadline(Duration::from_secs(5)), &Runs::default());
    // After this request the server has the scripts cached.
    app.clone().oneshot(pay("alice", "first", "hundred")).await.unwrap();
    let calls = || {
        let stats = server.text("INFO commandstats");
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum::<u64>()
    };
    let before = calls();
    assert_eq!(app.clone().oneshot(pay("alice", "k", "hundred")).await.unwrap().0, 200);
    let first = calls();
    assert!(app.clone().oneshot(pay("alice", "k", "hundred")).await.unwrap().1);
    let replay = calls();
    assert_eq!(app.clone().oneshot(pay("alice", "k", "thousand")).await.unwrap().0, 422);
    assert_eq!([first - before, replay - first, calls() - replay], [2, 1, 1]);
}

#[tokio::test]
async fn replay_has_the_trailers_of_the_response() {
    let server = RedisServer::start();
    let guard = guard(&server).await.deadline(Duration::from_secs(5));
    let service = guard.layer(service_fn(async |_: Request<FingerprintedBody<Full<Bytes>>>| {
        let trailers = HeaderMap::from_iter([(HeaderName::from_static("x-sum"), HeaderValue::from_static("7"))]);
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done").with_trailers(ready(Some(Ok(trailers))))))
    }));
    for is_again in [false, true] {
        let response = service.clone().oneshot(pay("alice", "k", "hundred")).await.unwrap();
        assert_eq!(response.headers().contains_key("idempotent-replayed"), is_again);
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.trailers().unwrap()["x-sum"], "7");
        assert_eq!(body.to_bytes(), "done");
    }
}

/// Even if the server has no free memory, a finished operation is recorded and a failed one is released.
#[tokio::test]
async fn full_server_keeps_the_outcome_of_operations() {
    let server = Arc::new(RedisServer::start());
    let runs = Arc::new(AtomicU64::new(0));
    let (full, count) = (Arc::clone(&server), Arc::clone(&runs));
    let guard = guard(&server).await.lease(Duration::from_secs(2)).deadline(Duration::from_secs(5));
    let service = guard.layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| {
        let (server, runs) = (Arc::clone(&full), Arc::clone(&count));
        async move {
            runs.fetch_add(1, Ordering::Relaxed);
            server.limit_memory(1);
            // Longer than the lease.
            sleep(Duration::from_millis(4_500)).await;
            let fails = request.headers()["idempotency-key"] == "fails";
            let status = if fails { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
            Ok::<_, Infallible>(Response::builder().status(status).body(Full::<Bytes>::from("done")).unwrap())
        }
    }));
    for (key, status, times) in [("works", StatusCode::OK, 1), ("fails", StatusCode::SERVICE_UNAVAILABLE, 2)] {
        runs.store(0, Ordering::Relaxed);
        for _ in 0..2 {
            let response = service.clone().oneshot(pay("alice", key, "hundred")).await.unwrap();
            assert_eq!(response.status(), status);
            response.into_body().collect().await.unwrap();
            server.limit_memory(0);
        }
        assert_eq!(runs.load(Ordering::Relaxed), times, "{key}");
    }
}

/// The store notifies the waiter, which does not poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_in_another_process_is_notified() {
    let server = RedisServer::start();
    let runs = Runs::default();
    let has_begun = Arc::new(Notify::new());
    let [one, other] = [(); 2].map(|()| async {
        // A long lease, so that the test counts no renewals.
        let guard = guard(&server).await.lease(Duration::from_secs(60)).deadline(Duration::from_secs(5));
        let has_begun = Arc::clone(&has_begun);
        guard.wait(Duration::from_secs(20)).layer(service_fn(
            move |request: Request<FingerprintedBody<Full<Bytes>>>| {
                drop(request);
                has_begun.notify_one();
                async {
                    sleep(Duration::from_millis(1_300)).await;
                    Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
                }
            },
        ))
    });
    let (one, other) = (one.await, other.await);
    // After this request the server has the scripts cached.
    let guard = guard(&server).await.deadline(Duration::from_secs(5));
    replica(guard, &runs).oneshot(pay("alice", "first", "hundred")).await.unwrap();
    let calls = || {
        let stats = server.text("INFO commandstats");
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum::<u64>()
    };
    // On a busy machine, the notification may be late in one of a few tries. A waiter that polls once a second is about 700 ms late in
    // every try.
    let (mut late, mut made) = (Vec::new(), 0);
    while late.last().is_none_or(|late| *late >= Duration::from_millis(500)) {
        assert!(late.len() < 3, "the notification took {late:?}");
        let key = format!("k{}", late.len());
        let before = calls();
        let request = one.clone().oneshot(pay("alice", &key, "hundred"));
        let first = tokio::spawn(async move {
            request.await.unwrap();
            Instant::now()
        });
        has_begun.notified().await;
        let second = other.clone().oneshot(pay("alice", &key, "hundred")).await.unwrap();
        assert!(second.headers().contains_key("idempotent-replayed"));
        late.push(first.await.unwrap().elapsed());
        made = calls() - before;
    }
    // The first request claims and completes. The waiter claims when it arrives, once it listens, after a second, and after its
    // notification.
    assert!(made <= 6, "{made} calls");
}

/// A handler that is running, and two processes that receive requests for its operation.
struct Payment {
    guards: [IdempotencyLayer<HeaderKey>; 2],
    apps: [App; 2],
    begun: mpsc::UnboundedReceiver<Run>,
}

/// An attempt, which ends on a signal of the test.
struct Run {
    attempt: u32,
    fence: u64,
    ends: oneshot::Sender<()>,
}

impl Payment {
    async fn new(url: &str) -> Self {
        let (begins, begun) = mpsc::unbounded_channel();
        let mut made = Vec::new();
        for _ in 0..2 {
            let guard = IdempotencyLayer::new(RedisBackend::connect(url).await.unwrap()).scope(header("authorization"));
            let guard = guard.lease(Duration::from_secs(3)).wait(LONG).deadline(Duration::from_secs(5));
            let begins = begins.clone();
            let service = guard.clone().layer(service_fn(move |request: Request<FingerprintedBody<Full<Bytes>>>| {
                let handle = request.extensions().get::<IdempotencyHandle>().unwrap().clone();
                let (ends, is_over) = oneshot::channel();
                let (attempt, fence) = (handle.attempt(), handle.fence());
                begins.send(Run { attempt, fence, ends }).unwrap();
                async move {
                    request.into_body().collect().await.unwrap();
                    is_over.await.unwrap();
                    Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(format!("paid by {fence}"))))
                }
            }));
            made.push((guard, boxed(service)));
        }
        let [(first, one), (second, other)] = made.try_into().ok().unwrap();
        Self { guards: [first, second], apps: [one, other], begun }
    }

    /// Sends the request to one process until the response is neither a store error nor "in flight".
    fn ask(&self, process: usize) -> JoinHandle<(bool, Bytes)> {
        let app = self.apps[process].clone();
        let asking = async move {
            loop {
                match app.clone().oneshot(pay("alice", "k", "hundred")).await.unwrap() {
                    (200, is_replay, text) => return (is_replay, text),
                    (409 | 503, ..) => sleep(Duration::from_millis(20)).await,
                    answer => panic!("{answer:?}"),
                }
            }
        };
        tokio::spawn(async { timeout(LONG, asking).await.expect("the request completes") })
    }

    async fn begun(&mut self) -> Run {
        timeout(LONG, self.begun.recv()).await.expect("a handler starts").unwrap()
    }
}

/// The end of the lease of the only operation, in µs by the clock of Redis.
fn lease_ends(server: &RedisServer) -> u64 {
    let key = server.query::<Vec<String>>("KEYS *:record").remove(0);
    let record: Vec<u8> = server.query(&format!("GET {key}"));
    let mut ends = [0; 8];
    ends[..7].copy_from_slice(&record[13..20]);
    u64::from_le_bytes(ends)
}

/// A failover without data loss. The running handler and the waiters continue with the new primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_does_not_start_a_second_handler() {
    let mut deployment = block_in_place(SentinelDeployment::start);
    let mut payment = Payment::new(&deployment.url()).await;
    let first = payment.ask(0);
    let run = payment.begun().await;
    let early = payment.ask(1);
    // Data that the replicas lack is lost with the primary.
    let new = block_in_place(|| {
        deployment.wait_until_whole();
        let old = deployment.kill_primary();
        deployment.wait_for_another_primary(deployment.servers[old].port()).1
    });
    let late = payment.ask(1);
    let new = &deployment.servers[new];
    block_in_place(|| {
        let known = lease_ends(new);
        wait_until("the lease is renewed", || lease_ends(new) > known);
        wait_until("a waiter listens", || !new.query::<Vec<String>>("PUBSUB CHANNELS tollgate:*").is_empty());
    });
    run.ends.send(()).unwrap();
    let text = Bytes::from(format!("paid by {}", run.fence));
    assert_eq!(first.await.unwrap(), (false, text.clone()));
    for asked in [early, late, payment.ask(0)] {
        assert_eq!(asked.await.unwrap(), (true, text.clone()));
    }
    assert!(payment.begun.try_recv().is_err(), "the operation was executed again");
}

/// The result of the first attempt goes to its own caller. It is not recorded, neither during the second attempt nor afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_record_allows_a_new_first_attempt() {
    for is_done_before in [false, true] {
        let mut server = block_in_place(RedisServer::start);
        let mut payment = Payment::new(&server.url()).await;
        let first = payment.ask(0);
        let one = payment.begun().await;
        block_in_place(|| {
            server.kill();
            server.restart();
        });
        let second = payment.ask(1);
        let other = payment.begun().await;
        assert!(other.fence > one.fence, "{} after {}", other.fence, one.fence);
        assert_eq!((one.attempt, other.attempt), (1, 1));
        let said = |fence: u64| Bytes::from(format!("paid by {fence}"));
        let kept = said(other.fence);
        let mut both = [(0, first, one), (1, second, other)];
        if is_done_before {
            both.reverse();
        }
        for (process, asked, run) in both {
            run.ends.send(()).unwrap();
            assert_eq!(asked.await.unwrap(), (false, said(run.fence)));
            timeout(LONG, payment.guards[process].wait_idle()).await.expect("the layer has no calls left");
        }
        assert_eq!(payment.ask(0).await.unwrap(), (true, kept));
        assert!(payment.begun.try_recv().is_err(), "the operation was executed a third time");
    }
}

/// One of four replicas dies while its handlers run. The server loses its connections and is killed. Clients retry, disconnect and send
/// other bodies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_execute_at_most_once_under_faults() {
    const KEYS: u64 = 150;
    const CLIENTS: u64 = 24;
    let mut server = RedisServer::start_with(DURABLE);
    let runs = Runs::default();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(guard(&server).await);
    }
    let mut replicas: Vec<App> = guards.iter().map(|guard| replica(guard.clone(), &runs)).collect();
    // The runtime of this replica shuts down during the test.
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let its_guard = block_in_place(|| doomed.block_on(guard(&server)));
    let (app, handle) = (replica(its_guard, &runs), doomed.handle().clone());
    replicas.push(BoxCloneService::new(service_fn(move |request: Request<Full<Bytes>>| {
        let task = handle.spawn(app.clone().oneshot(request));
        async { Ok(task.await.map_or((0, false, Bytes::new()), |answer| answer.unwrap())) }
    })));

    let until = Instant::now() + Duration::from_secs(4);
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let replicas = replicas.clone();
        clients.spawn(async move {
            let mut dice = Dice(client);
            let mut answers = Vec::new();
            while Instant::now() < until {
                let caller = format!("caller-{}", dice.below(2));
                let key = format!("key-{}", dice.below(KEYS));
                let body = if dice.below(8) == 0 { "thousand" } else { "hundred" };
                let app = replicas[dice.below(4) as usize].clone();
                let client_timeout = Duration::from_millis(if dice.below(4) == 0 { dice.below(20) } else { 2_000 });
                if let Ok(answer) = timeout(client_timeout, app.oneshot(pay(&caller, &key, body))).await {
                    let (status, _, text) = answer.unwrap();
                    answers.push(((caller, key), body, status, text));
                }
                sleep(Duration::from_millis(dice.below(5))).await;
            }
            answers
        });
    }
    for _ in 0..3 {
        sleep(Duration::from_millis(500)).await;
        block_in_place(|| server.kill_clients());
    }
    doomed.shutdown_background();
    block_in_place(|| {
        server.kill();
        server.restart();
    });
    let answers: Vec<_> = clients.join_all().await.into_iter().flatten().collect();
    for guard in &guards {
        guard.wait_idle().await;
    }
    let runs = runs.lock().unwrap();
    assert!(runs.len() > KEYS as usize, "{} operations are too few for a result", runs.len());
    for (operation, said) in &*runs {
        assert_eq!(said.len(), 1, "{operation:?} was executed {} times", said.len());
    }
    let mut served = 0;
    for (operation, body, status, text) in answers {
        if status == 200 {
            assert_eq!(text, runs[&operation][0].as_bytes());
            assert!(text.starts_with(body.as_bytes()), "the response to another request: {text:?}");
            served += 1;
        } else {
            assert!([0, 409, 422, 503].contains(&status), "{status}");
        }
    }
    assert!(served > KEYS, "{served} responses are too few for a result");
    for key in server.query::<Vec<String>>("KEYS *") {
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut server.connection()).unwrap();
        assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
    }
}

/// On one server the record count of a caller is exact, drops when records expire, and takes little memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_caller_are_counted_until_they_expire() {
    const MOST: u64 = 20;
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let lease = Duration::from_millis(10);
    let begin = async |scope: &str, number: u32, retention| {
        let mut claim = Claim::new(Token::random().unwrap(), Digest::default(), lease, retention);
        claim.bound = Some(RecordBound { scope: scope.into(), max: MOST });
        // Each operation has a route of its own, because the bound applies to the caller.
        let operation = Operation::new((scope, "POST", number), number);
        (backend.begin(&operation, &claim).await.unwrap(), operation, claim)
    };
    let is_granted = |begun: &Begun| matches!(begun, Begun::Granted { .. });
    let count = "tollgate:2:{idempotency}:alice:records";
    let day = Duration::from_secs(86_400);
    // Most records last a day, and one expires soon.
    for number in 1..MOST as u32 {
        assert!(is_granted(&begin("alice", number, day).await.0), "{number}");
    }
    assert!(is_granted(&begin("alice", 0, Duration::from_secs(3)).await.0));
    match begin("alice", 20, day).await.0 {
        Begun::ScopeFull { retry_after } => assert!(retry_after <= Duration::from_millis(3_010), "{retry_after:?}"),
        begun => panic!("{begun:?}"),
    }
    assert!(is_granted(&begin("bob", 20, day).await.0));
    assert_eq!(server.query::<u64>(&format!("ZCARD {count}")), MOST);
    let ttl_ms = server.query::<u64>(&format!("PTTL {count}"));
    assert!((172_000_000..=172_800_020).contains(&ttl_ms), "{ttl_ms}");
    // The record has expired, so there is room for another one.
    sleep(Duration::from_millis(3_100)).await;
    assert!(is_granted(&begin("alice", 21, day).await.0));
    assert!(matches!(begin("alice", 22, day).await.0, Begun::ScopeFull { .. }));
    assert_eq!(server.query::<u64>(&format!("ZCARD {count}")), MOST);
    // A released operation is remembered for ten minutes.
    let (begun, operation, claim) = begin("carol", 0, day).await;
    assert!(is_granted(&begun));
    assert!(IdempotencyStore::release(&backend, &operation, &claim).await.unwrap());
    let ends_ms: Vec<String> = server.query("ZRANGE tollgate:2:{idempotency}:carol:records 0 -1 WITHSCORES");
    let now_s = server.query::<Vec<u64>>("TIME")[0];
    let left_s = ends_ms[1].parse::<u64>().unwrap() / 1_000 - now_s;
    assert!((590..=600).contains(&left_s), "{left_s}");
}
