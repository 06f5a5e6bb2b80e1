//! The layer for idempotency on a real server: what it asks, and what is left when clients and processes misbehave.

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
use tollgate::idempotency::{Begun, Claim, Digest, IdempotencyHandle, IdempotencyStore, Operation, RecordBound};
use tollgate::lock::Token;
use tollgate::{IdempotencyLayer, RedisBackend};
use tower::util::BoxCloneService;
use tower::{Layer, Service, ServiceExt, service_fn};

const LONG: Duration = Duration::from_secs(60);

/// How often the handler has run, for each caller and key, and what it said.
type Runs = Arc<Mutex<HashMap<(String, String), Vec<String>>>>;
type App = BoxCloneService<Request<Full<Bytes>>, (u16, bool, Bytes), Infallible>;

async fn guard(server: &RedisServer) -> IdempotencyLayer<HeaderKey> {
    let backend = patient(server.url()).await;
    IdempotencyLayer::new(backend).scope(header("authorization")).lease(Duration::from_secs(2))
}

/// A replica: a handler behind `guard` that takes some milliseconds and says something else each time.
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
    told(service)
}

/// Status, whether it is a replay, and body.
fn told<S>(service: S) -> App
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

/// Numbers that nobody would guess (SplitMix64).
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

/// A checkpoint is not put down before it is known that the body is the right one, so whoever sends that is not handed one of another body.
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
async fn a_first_request_costs_two_commands_and_a_replay_one() {
    let server = RedisServer::start();
    let app = replica(guard(&server).await.deadline(Duration::from_secs(5)), &Runs::default());
    // The scripts are known to the server after this.
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
async fn a_replay_has_the_trailers_of_the_answer() {
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

/// What was done is recorded, and what was not is given back, also where there is no memory left.
#[tokio::test]
async fn a_server_that_is_full_forgets_no_operation_that_has_begun() {
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

/// Another process is told by the store, and does not ask again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_in_another_process_is_told() {
    let server = RedisServer::start();
    let runs = Runs::default();
    let has_begun = Arc::new(Notify::new());
    let [one, other] = [(); 2].map(|()| async {
        // Renewals are left out of account.
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
    // The scripts are known to the server after this.
    let guard = guard(&server).await.deadline(Duration::from_secs(5));
    replica(guard, &runs).oneshot(pay("alice", "first", "hundred")).await.unwrap();
    let calls = || {
        let stats = server.text("INFO commandstats");
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum::<u64>()
    };
    // Whoever is told late for want of a processor is in one of a few tries; somebody who looks once a second is some 700 ms late in
    // all of them.
    let (mut late, mut made) = (Vec::new(), 0);
    while late.last().is_none_or(|late| *late >= Duration::from_millis(500)) {
        assert!(late.len() < 3, "it took {late:?} to be told");
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
    // Begun, completed; and asked at first, once it listened, after a second, and when it was told.
    assert!(made <= 6, "{made} calls");
}

/// A handler at work, and two processes that ask for its operation.
struct Payment {
    guards: [IdempotencyLayer<HeaderKey>; 2],
    apps: [App; 2],
    begun: mpsc::UnboundedReceiver<Run>,
}

/// An attempt, which ends when it is told to.
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
            made.push((guard, told(service)));
        }
        let [(first, one), (second, other)] = made.try_into().ok().unwrap();
        Self { guards: [first, second], apps: [one, other], begun }
    }

    /// Asks one of the processes until it answers something else than that the store fails, or that somebody has begun.
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
        tokio::spawn(async { timeout(LONG, asking).await.expect("it is answered") })
    }

    async fn begun(&mut self) -> Run {
        timeout(LONG, self.begun.recv()).await.expect("a handler begins").unwrap()
    }
}

/// When the lease of the only operation ends, in us by the clock of Redis.
fn lease_ends(server: &RedisServer) -> u64 {
    let key = server.query::<Vec<String>>("KEYS *:record").remove(0);
    let record: Vec<u8> = server.query(&format!("GET {key}"));
    let mut ends = [0; 8];
    ends[..7].copy_from_slice(&record[13..20]);
    u64::from_le_bytes(ends)
}

/// A failover that loses nothing. Whoever has begun goes on with the primary that takes over, and whoever waits does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_outlives_its_primary_is_the_only_one() {
    let mut deployment = block_in_place(SentinelDeployment::start);
    let mut payment = Payment::new(&deployment.url()).await;
    let first = payment.ask(0);
    let run = payment.begun().await;
    let early = payment.ask(1);
    // What replicas do not have yet is lost with a primary.
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
        wait_until("somebody waits", || !new.query::<Vec<String>>("PUBSUB CHANNELS tollgate:*").is_empty());
    });
    run.ends.send(()).unwrap();
    let text = Bytes::from(format!("paid by {}", run.fence));
    assert_eq!(first.await.unwrap(), (false, text.clone()));
    for asked in [early, late, payment.ask(0)] {
        assert_eq!(asked.await.unwrap(), (true, text.clone()));
    }
    assert!(payment.begun.try_recv().is_err(), "it is not done again");
}

/// What the first attempt comes to is its caller's, and nothing of it is kept: neither while the second one is at work nor afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_is_gone_is_a_request_that_is_served_anew() {
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
            timeout(LONG, payment.guards[process].wait_idle()).await.expect("there is nothing left to tell");
        }
        assert_eq!(payment.ask(0).await.unwrap(), (true, kept));
        assert!(payment.begun.try_recv().is_err(), "it is not done a third time");
    }
}

/// Four replicas, of which one dies with its handlers at work, a server that loses its connections and is killed, and clients
/// that try again, hang up, and change their minds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_operation_is_done_at_most_once_whatever_breaks() {
    const KEYS: u64 = 150;
    const CLIENTS: u64 = 24;
    let mut server = RedisServer::start_with(DURABLE);
    let runs = Runs::default();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(guard(&server).await);
    }
    let mut replicas: Vec<App> = guards.iter().map(|guard| replica(guard.clone(), &runs)).collect();
    // One whose runtime ends in the middle of everything.
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
                let patience = Duration::from_millis(if dice.below(4) == 0 { dice.below(20) } else { 2_000 });
                if let Ok(answer) = timeout(patience, app.oneshot(pay(&caller, &key, body))).await {
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
    assert!(runs.len() > KEYS as usize, "{} operations are too few to say anything", runs.len());
    for (operation, said) in &*runs {
        assert_eq!(said.len(), 1, "{operation:?} was done {} times", said.len());
    }
    let mut served = 0;
    for (operation, body, status, text) in answers {
        if status == 200 {
            assert_eq!(text, runs[&operation][0].as_bytes());
            assert!(text.starts_with(body.as_bytes()), "the answer to another request: {text:?}");
            served += 1;
        } else {
            assert!([0, 409, 422, 503].contains(&status), "{status}");
        }
    }
    assert!(served > KEYS, "{served} answers are too few to say anything");
    for key in server.query::<Vec<String>>("KEYS *") {
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut server.connection()).unwrap();
        assert!(ttl >= 0 || ttl == -2, "{key} has no expiry: {ttl}");
    }
}

/// On one server the count of a caller's records is exact, ends with the records, and stays small.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_records_of_a_caller_are_counted_until_they_end() {
    const MOST: u64 = 20;
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let lease = Duration::from_millis(10);
    let begin = async |scope: &str, number: u32, retention| {
        let mut claim = Claim::new(Token::random().unwrap(), Digest::default(), lease, retention);
        claim.bound = Some(RecordBound { scope: scope.into(), most: MOST });
        // A route of its own each time: what is bounded is the caller.
        let operation = Operation::new((scope, "POST", number), number);
        (backend.begin(&operation, &claim).await.unwrap(), operation, claim)
    };
    let is_granted = |begun: &Begun| matches!(begun, Begun::Granted { .. });
    let count = "tollgate:2:{idempotency}:alice:records";
    let day = Duration::from_secs(86_400);
    // Those of a day, and one that ends soon.
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
    // The record has ended, so there is room for another one.
    sleep(Duration::from_millis(3_100)).await;
    assert!(is_granted(&begin("alice", 21, day).await.0));
    assert!(matches!(begin("alice", 22, day).await.0, Begun::ScopeFull { .. }));
    assert_eq!(server.query::<u64>(&format!("ZCARD {count}")), MOST);
    // What is given back is remembered for ten minutes.
    let (begun, operation, claim) = begin("carol", 0, day).await;
    assert!(is_granted(&begun));
    assert!(IdempotencyStore::release(&backend, &operation, &claim).await.unwrap());
    let ends_ms: Vec<String> = server.query("ZRANGE tollgate:2:{idempotency}:carol:records 0 -1 WITHSCORES");
    let now_s = server.query::<Vec<u64>>("TIME")[0];
    let left_s = ends_ms[1].parse::<u64>().unwrap() / 1_000 - now_s;
    assert!((590..=600).contains(&left_s), "{left_s}");
}
