//! How often a decision in memory allocates, and how many bytes: one line `ALLOC who=.. allocations=.. bytes=..` per case.
//!
//! `scripts/bench` runs this. It is a separate program because its allocator counts.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response};
use tollgate::http::peer_ip;
use tollgate::{HttpResponder, Key, Limiter, MemoryBackend, Policy, Quota, RateLimitLayer};
use tower::{Layer, Service, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

const CALLS: u64 = 10_000;
const BURST: u32 = 1_000_000_000;

fn main() {
    let policy = || Policy::new("memory", Quota::per_day(BURST.into()).token_bucket());
    let limiter = Limiter::new(MemoryBackend::new(), policy());
    let key = Key::from("client-1");
    count("limiter", || assert!(now(limiter.check(key)).expect("memory does not fail").is_allowed()));

    let quota = governor::Quota::per_second(NonZeroU32::MAX);
    let keyed = governor::RateLimiter::keyed(quota);
    let name = "client-1".to_owned();
    count("governor", || assert!(keyed.check_key(&name).is_ok()));

    let bare = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let layer = || RateLimitLayer::new(MemoryBackend::new(), policy()).key(peer_ip());
    let mut builder = GovernorConfigBuilder::default();
    builder.per_nanosecond(1).burst_size(BURST);
    serve("no-layer", bare);
    serve("layer-lean", layer().responder(HttpResponder::new().headers([]).extensions(false)).layer(bare));
    serve("layer", layer().layer(bare));
    serve("tower_governor", GovernorLayer::new(builder.finish().expect("the quota is valid")).layer(bare));
    serve(
        "tower_governor-headers",
        GovernorLayer::new(builder.use_headers().finish().expect("the quota is valid")).layer(bare),
    );
}

fn serve<S, B>(who: &str, mut service: S)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    count(who, || {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, 0, 1], 80))));
        let Ok(response) = now(service.call(request));
        assert!(response.status().is_success());
    });
}

/// Calls once to create the key, and then counts.
fn count(who: &str, mut call: impl FnMut()) {
    call();
    let info = allocation_counter::measure(|| (0..CALLS).for_each(|_| call()));
    let per = |count: u64| count as f64 / CALLS as f64;
    println!("ALLOC who={who} allocations={:.2} bytes={:.0}", per(info.count_total), per(info.bytes_total));
}

/// Polls a call once. The memory backend never waits.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("the memory backend did not answer at once"),
    }
}
