//! Repeats one operation, so that callgrind can count its instructions: `tollgate-instructions CASE COUNT`.
//!
//! `scripts/check-instructions` runs each case with a small and a large count. The difference gives the cost of one operation, without the
//! start of the program and the first call. Everything runs on one thread and, except for batched checks, with one key. So neither the
//! order of threads nor the seed of a hash changes the count. The Redis cases count the work of this process: encoding a call, sending it,
//! and decoding its reply.

use std::convert::Infallible;
use std::env;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use http::{Request, Response};
use server::RedisServer;
use tollgate::{DelayQueue, Key, Limiter, Locks, MemoryBackend, Policy, Quota, RateLimitLayer, RedisBackend};
use tower::{Layer, Service, service_fn};

#[allow(dead_code, unreachable_pub, reason = "the tests use the rest of it")]
#[path = "../../../tests/support/server.rs"]
mod server;

/// Longer than any call takes under callgrind.
const DEADLINE: Duration = Duration::from_secs(60);
const QUOTA: u64 = 1_000_000_000;

fn main() {
    let mut words = env::args().skip(1);
    let case = words.next().unwrap_or_default();
    let count: u32 =
        words.next().and_then(|count| count.parse().ok()).expect("usage: tollgate-instructions CASE COUNT");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        match case.as_str() {
            "memory-fixed-window" => check(memory(Quota::per_day(QUOTA).fixed_window()), count).await,
            "memory-token-bucket" => check(memory(Quota::per_day(QUOTA).token_bucket()), count).await,
            "memory-yes" => try_acquire(memory(Quota::per_day(QUOTA).token_bucket()), count).await,
            "memory-three-limits" => check(Limiter::new(MemoryBackend::new(), three_limits()), count).await,
            "memory-layer" => layer(count).await,
            "memory-layer-anew" => layer_anew(count).await,
            "redis-check" => {
                let (_server, backend) = redis().await;
                check(Limiter::new(backend, policy()).deadline(DEADLINE), count).await;
            }
            "redis-three-limits" => {
                let (_server, backend) = redis().await;
                check(Limiter::new(backend, three_limits()).deadline(DEADLINE), count).await;
            }
            "redis-check-together" => check_together(count).await,
            "redis-lock" => lock(count).await,
            "redis-push" => push(count).await,
            "encode-push" => encode_push(count).await,
            other => panic!("unknown case {other}"),
        }
    });
}

fn policy() -> Policy {
    Policy::new("instructions", Quota::per_day(QUOTA).fixed_window())
}

fn three_limits() -> Policy {
    Policy::new("instructions", Quota::per_day(QUOTA).token_bucket())
        .limit(Quota::per_hour(QUOTA).fixed_window())
        .limit(Quota::per_day(QUOTA).sliding_window())
}

fn memory(limit: tollgate::rate_limit::Limit) -> Limiter<MemoryBackend> {
    Limiter::new(MemoryBackend::new(), Policy::new("instructions", limit))
}

async fn redis() -> (RedisServer, RedisBackend) {
    let server = RedisServer::start();
    let options = tollgate::RedisOptions::from_url(server.url()).expect("the URL is well-formed");
    let options = options.connections(1).connect_timeout(DEADLINE).response_timeout(DEADLINE);
    let backend = options.connect().await.expect("Redis accepts the connection");
    (server, backend)
}

async fn check<B: tollgate::rate_limit::store::RateLimitStore>(limiter: Limiter<B>, count: u32) {
    let key = Key::from("client-1");
    for _ in 0..count {
        assert!(limiter.check(black_box(key)).await.expect("the backend decides").is_allowed());
    }
}

/// How many decisions run concurrently, each about its own key. Most of them are batched.
const TOGETHER: u64 = 64;

async fn check_together(count: u32) {
    let (_server, backend) = redis().await;
    let limiter = Limiter::new(backend, policy()).deadline(DEADLINE);
    for _ in 0..count {
        let decisions = (0..TOGETHER).map(|client| limiter.check(black_box(client)));
        for decision in futures_util::future::join_all(decisions).await {
            assert!(decision.expect("the backend decides").is_allowed());
        }
    }
}

async fn try_acquire(limiter: Limiter<MemoryBackend>, count: u32) {
    let key = Key::from("client-1");
    for _ in 0..count {
        assert!(limiter.try_acquire(black_box(key)).await.expect("memory decides"));
    }
}

fn layer_by_peer() -> RateLimitLayer<MemoryBackend, impl Fn(&Request<()>) -> String> {
    let peer = |_: &Request<()>| IpAddr::from(Ipv4Addr::LOCALHOST).to_string();
    RateLimitLayer::new(MemoryBackend::new(), policy()).key(peer).responder(tollgate::HttpResponder::new())
}

async fn hello(_: Request<()>) -> Result<Response<()>, Infallible> {
    Ok(Response::new(()))
}

async fn layer(count: u32) {
    let mut service = layer_by_peer().layer(service_fn(hello));
    for _ in 0..count {
        let Ok(response) = service.call(black_box(Request::new(()))).await;
        assert!(response.status().is_success());
    }
}

/// Creates a service for each request, from a clone of the layer.
async fn layer_anew(count: u32) {
    let layer = layer_by_peer();
    for _ in 0..count {
        let Ok(response) = layer.clone().layer(service_fn(hello)).call(black_box(Request::new(()))).await;
        assert!(response.status().is_success());
    }
}

async fn lock(count: u32) {
    let (_server, backend) = redis().await;
    let locks = Locks::new(backend, "default").deadline(DEADLINE);
    for _ in 0..count {
        let lease = locks.lock("order:1").await.expect("the lock is granted");
        lease.release().await.expect("the lock is released");
    }
}

async fn push(count: u32) {
    let (_server, backend) = redis().await;
    let queue = DelayQueue::<String>::new(backend, "instructions").deadline(DEADLINE);
    let payload = "payload".to_owned();
    for _ in 0..count {
        assert!(queue.push(black_box(&payload)).delay(DEADLINE).await.expect("the job is stored").is_new());
    }
}

/// Encodes pushes without sending them.
async fn encode_push(count: u32) {
    let (_server, backend) = redis().await;
    let queue = DelayQueue::<String>::new(backend.clone(), "instructions");
    let payload = "payload".to_owned();
    for _ in 0..count {
        let job =
            queue.push(black_box(&payload)).delay(DEADLINE).id("job").prepare().expect("the payload can be encoded");
        let mut pipeline = redis::pipe();
        backend.push_in(&mut pipeline, &job);
        black_box(pipeline.get_packed_pipeline());
    }
}
