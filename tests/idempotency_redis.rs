//! The layer for idempotency on a real server: what it asks, and what is left when clients and processes misbehave.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use support::server::{DURABLE, RedisServer};
use support::shared::patient;
use tokio::sync::Notify;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep, timeout};
use tollgate::IdempotencyLayer;
use tollgate::http::{FingerprintedBody, HeaderKey, IdempotentBody, header};
use tollgate::idempotency::IdempotencyHandle;
use tower::util::BoxCloneService;
use tower::{Layer, ServiceExt, service_fn};

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
async fn a_checkpoint_of_a_handler_that_was_sent_another_body_is_nobodys() {
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
        guard.drained().await;
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
        guard.drained().await;
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
