//! The relative costs of the parts of rate limiting. Takes less than a minute after the build.
//!
//! `cargo bench --bench rate_limit` starts its own Redis and ends with one line:
//!
//! * `policy3_cost_ratio`: the time of a decision with three limits (token bucket, fixed window, sliding window) on Redis, divided by the
//!   time with the first limit only. The median of interleaved rounds on ten servers, one after the other, with 256 in flight over 10,000
//!   keys
//! * `deny_cache_per_s`: decisions per second of a `DenyCache` over Redis on two threads, all denied; the lower rate of one key and of
//!   10,000
//! * `lease_per_s`: decisions per second of `QuotaPrefetch` over Redis on two threads, for one key, all allowed
//! * `lease_over_admitted`: units beyond the quota of their window when several `QuotaPrefetch` share one key, over more than a hundred
//!   windows
//! * `layer_ns`, `bare_ns`: the time of an HTTP request on one thread, through the whole layer on memory and through the bare service. The
//!   layer counts by address, with header fields and extensions

#[path = "parts/accelerators.rs"]
mod accelerators;
#[path = "../tests/support/mod.rs"]
mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use http::{Request, Response};
use support::server::RedisServer;
use tollgate::http::{PeerAddr, peer_ip};
use tollgate::{Limiter, MemoryBackend, Policy, Quota, RateLimitLayer, RedisBackend};
use tower::{Layer, Service, service_fn};

const IN_FLIGHT: u64 = 256;
const KEYS: u64 = 10_000;
const SERVERS: usize = 10;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(250);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    let policy3_cost_ratio = runtime.block_on(policy3_cost_ratio());
    drop(runtime);
    let (layer_ns, bare_ns) = layer_ns();
    let (deny_cache_per_s, lease_per_s, lease_over_admitted) = accelerators::figures();
    println!(
        "policy3_cost_ratio={policy3_cost_ratio:.2} deny_cache_per_s={deny_cache_per_s:.0} lease_per_s={lease_per_s:.0} \
         lease_over_admitted={lease_over_admitted} layer_ns={layer_ns:.0} bare_ns={bare_ns:.0}"
    );
}

async fn policy3_cost_ratio() -> f64 {
    let bucket = Quota::per_second(1_000).burst(1_000_000).expect("the bucket refills in a day").token_bucket();
    let one = Policy::new("one", bucket);
    let three = Policy::new("three", bucket)
        .limit(Quota::per_hour(1_000_000).fixed_window())
        .limit(Quota::per_day(20_000_000).sliding_window());
    let mut ratios = Vec::new();
    // Ratios differ more between servers than between the rounds of one server.
    for number in 1..=SERVERS {
        let server = RedisServer::start();
        let backend = RedisBackend::connect(server.url()).await.expect("Redis accepts the connection");
        let limiter = |policy: &Policy| Limiter::new(backend.clone(), policy.clone()).deadline(Duration::from_secs(10));
        let [one, three] = [limiter(&one), limiter(&three)];
        let mut rates = [0.0; 2];
        for round in 0..=ROUNDS {
            let [one, three] = [load(&one).await, load(&three).await];
            // The first round warms up.
            if round > 0 {
                rates = [rates[0] + one, rates[1] + three];
                ratios.push(one / three);
            }
        }
        let [one, three] = rates.map(|rate| rate / ROUNDS as f64);
        println!("server {number}: one limit {one:.0}/s, three limits {three:.0}/s");
    }
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

/// Decisions per second with [`IN_FLIGHT`] concurrent calls for a [`ROUND`].
async fn load(limiter: &Limiter<RedisBackend>) -> f64 {
    let turns = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let tasks: Vec<_> = (0..IN_FLIGHT)
        .map(|_| {
            let (turns, limiter) = (Arc::clone(&turns), limiter.clone());
            tokio::spawn(async move {
                while start.elapsed() < ROUND {
                    let turn = turns.fetch_add(1, Ordering::Relaxed);
                    let key = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                    let decision = limiter.check(key % KEYS).await.expect("Redis decides");
                    assert!(decision.is_allowed());
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no call fails");
    }
    turns.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()
}

fn layer_ns() -> (f64, f64) {
    let bare = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(())));
    let bucket = Quota::per_second(1_000).burst(1_000_000_000).expect("the bucket refills in two weeks").token_bucket();
    let layer = RateLimitLayer::new(MemoryBackend::new(), Policy::new("api", bucket)).key(peer_ip());
    let mut limited = layer.layer(bare);
    let mut bare = bare;
    let [mut layer_ns, mut bare_ns] = [f64::MAX; 2];
    // Other load on the machine only adds time, so the fastest of many batches is the most accurate.
    for _ in 0..100 {
        layer_ns = layer_ns.min(batch(&mut limited));
        bare_ns = bare_ns.min(batch(&mut bare));
    }
    (layer_ns, bare_ns)
}

/// The time to create and serve one request, over a thousand addresses.
fn batch<S, B>(service: &mut S) -> f64
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    const REQUESTS: u32 = 20_000;
    let start = Instant::now();
    for turn in 0..REQUESTS {
        let [.., third, fourth] = turn.wrapping_mul(0x9e37_79b9).to_be_bytes();
        let mut request = Request::new(());
        request.extensions_mut().insert(PeerAddr(SocketAddr::from(([10, 0, third & 3, fourth], 80))));
        let answer = pin!(service.call(request)).poll(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(Ok(response)) = answer else { panic!("the memory backend did not answer at once") };
        assert_eq!(response.status(), 200);
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(REQUESTS)
}
