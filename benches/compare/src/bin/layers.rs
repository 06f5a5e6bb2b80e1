//! A request through our layer and through the layer of `tower_governor`, both counting in memory by peer address.
//!
//! `cargo run --release --bin layers` takes less than a minute after the build and ends with one line. All figures are medians of
//! interleaved rounds. All times are of whole requests, and include creating the request and the bare service.
//!
//! * `layer_lean_over_governor`: the time of a request on one thread through our layer without header fields and extensions, divided by the
//!   time through `GovernorLayer`
//! * `layer_over_governor_headers`: the same for our default layer, with header fields, a handle in the request and the decision in the
//!   response, and `GovernorLayer` with `use_headers()`
//! * `layer_lean_cost`, `layer_cost`: the same ratios after the time of the bare service is subtracted from all times
//! * `tasks1_..`, `tasks64_..`: requests per second of 1 and of 64 tasks on two threads, each with clones of the service. Ours divided by
//!   theirs, so above 1 is faster
//!
//! Every layer has a quota for exactly the measured requests. All of them must be allowed, and the next request of each address must be
//! denied, or there are no figures.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use tollgate::http::{PeerIp, peer_ip};
use tollgate::rate_limit::{Decision, RateLimitHandle};
use tollgate::{HttpResponder, MemoryBackend, Policy, Quota, RateLimitLayer};
use tower::util::ServiceFn;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

const ADDRESSES: u32 = 1_024;
/// Requests of a round on one thread, and by tasks. Each address sends equally many.
const BATCH: u32 = 20 * ADDRESSES;
const LOAD: u32 = 400 * ADDRESSES;
const BATCHES: u32 = 101;
const LOADS: u32 = 9;
const TASKS: [u32; 2] = [1, 64];

/// How many requests one address may send. The next one is allowed an hour later.
const QUOTA: u32 = (BATCHES * BATCH + TASKS.len() as u32 * LOADS * LOAD) / ADDRESSES;
const PERIOD: Duration = Duration::from_secs(3_600);

type Boxed<T> = Pin<Box<dyn Future<Output = T>>>;

struct Contender {
    name: &'static str,
    /// The time of one request, in nanoseconds.
    batch: Box<dyn FnMut() -> f64>,
    /// Millions of requests per second, by the number of tasks.
    load: Box<dyn Fn(u32) -> Boxed<f64>>,
    /// How many addresses are denied.
    turned_away: Box<dyn FnMut() -> u32>,
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime starts").block_on(compare());
}

async fn compare() {
    let bare = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let mut plain = GovernorConfigBuilder::default();
    plain.period(PERIOD).burst_size(QUOTA);
    let mut with_headers = plain.use_headers();
    let mut governor = || GovernorLayer::new(plain.finish().expect("the quota is valid"));
    let mut governor_headers = || GovernorLayer::new(with_headers.finish().expect("the quota is valid"));
    assert_eq!(adds(&governor()), (0, false, false));
    assert_eq!(adds(&governor_headers()), (2, false, false));
    assert_eq!(adds(&lean()), (0, false, false));
    assert_eq!(adds(&ours()), (2, true, true));

    let mut contenders = [
        contender("bare", bare),
        contender("governor", governor().layer(bare)),
        contender("governor with headers", governor_headers().layer(bare)),
        contender("ours, lean", lean().layer(bare)),
        contender("ours", ours().layer(bare)),
    ];
    let mut nanos = contenders.each_ref().map(|_| Vec::new());
    for round in 0..BATCHES as usize {
        for at in turns(round, contenders.len()) {
            nanos[at].push((contenders[at].batch)());
        }
    }
    let mut rates = TASKS.map(|_| contenders.each_ref().map(|_| Vec::new()));
    for round in 0..LOADS as usize {
        for (tasks, rates) in TASKS.into_iter().zip(&mut rates) {
            for at in turns(round, contenders.len()) {
                rates[at].push((contenders[at].load)(tasks).await);
            }
        }
    }
    for contender in &mut contenders {
        let expected = if contender.name == "bare" { 0 } else { ADDRESSES };
        assert_eq!((contender.turned_away)(), expected, "{} did not count every request", contender.name);
    }

    for (at, contender) in contenders.iter().enumerate() {
        print!("{:<22} {:>4.0} ns", contender.name, median(&nanos[at]));
        for (tasks, rates) in TASKS.into_iter().zip(&rates) {
            print!("   {tasks} tasks: {:.2} M/s", median(&rates[at]));
        }
        println!();
    }
    let [bare, governor, governor_headers, lean, ours] = &nanos;
    print!("layer_lean_over_governor={:.2} ", ratio(lean, governor));
    print!("layer_over_governor_headers={:.2} ", ratio(ours, governor_headers));
    print!("layer_lean_cost={:.2} ", ratio(&less(lean, bare), &less(governor, bare)));
    print!("layer_cost={:.2}", ratio(&less(ours, bare), &less(governor_headers, bare)));
    for (tasks, [_, governor, governor_headers, lean, ours]) in TASKS.into_iter().zip(&rates) {
        print!(" tasks{tasks}_lean_over_governor={:.2}", ratio(lean, governor));
        print!(" tasks{tasks}_over_governor_headers={:.2}", ratio(ours, governor_headers));
    }
    println!();
}

fn ours() -> RateLimitLayer<MemoryBackend, PeerIp> {
    let bucket = Quota::new(1, PERIOD)
        .and_then(|quota| quota.burst(QUOTA.into()))
        .expect("the bucket refills in a year")
        .token_bucket();
    RateLimitLayer::new(MemoryBackend::new(), Policy::new("api", bucket)).key(peer_ip())
}

fn lean() -> RateLimitLayer<MemoryBackend, PeerIp> {
    ours().responder(HttpResponder::new().headers([]).extensions(false))
}

fn contender<S, B>(name: &'static str, service: S) -> Contender
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    let (mut batched, loaded, mut last) = (service.clone(), service.clone(), service);
    Contender {
        name,
        batch: Box::new(move || {
            let start = Instant::now();
            for turn in 0..BATCH {
                assert_eq!(now(batched.call(request(turn))).status(), StatusCode::OK, "{name}");
            }
            start.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH)
        }),
        load: Box::new(move |tasks| {
            let service = loaded.clone();
            Box::pin(async move {
                let start = Instant::now();
                let tasks = (0..tasks).map(|task| tokio::spawn(load(service.clone(), task, tasks)));
                for task in tasks.collect::<Vec<_>>() {
                    assert!(task.await.expect("no request fails"), "{name} denied a request");
                }
                f64::from(LOAD) / start.elapsed().as_secs_f64() / 1e6
            })
        }),
        turned_away: Box::new(move || {
            let turned_away = |turn: &u32| now(last.call(request(*turn))).status() == StatusCode::TOO_MANY_REQUESTS;
            (0..ADDRESSES).filter(turned_away).count() as u32
        }),
    }
}

/// The share of one of `tasks` tasks in a [`LOAD`]. Returns whether all its requests were allowed.
async fn load<S, B>(service: S, task: u32, tasks: u32) -> bool
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
{
    let mut admitted = true;
    for turn in (task..LOAD).step_by(tasks as usize) {
        let Ok(response) = service.clone().oneshot(request(turn)).await;
        admitted &= response.status() == StatusCode::OK;
        // Like a server task that sometimes waits for its client.
        if turn / tasks % 100 == 99 {
            tokio::task::yield_now().await;
        }
    }
    admitted
}

/// A request of one of [`ADDRESSES`] clients. All clients are equally frequent, and their order is scattered.
fn request(turn: u32) -> Request<Body> {
    let [.., third, fourth] = (turn.wrapping_mul(0x9e37_79b9) % ADDRESSES).to_be_bytes();
    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, third, fourth], 80))));
    request
}

/// Polls a service that never waits.
fn now<T>(answer: impl Future<Output = Result<T, Infallible>>) -> T {
    match pin!(answer).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(answer)) => answer,
        Poll::Pending => panic!("the memory backend did not answer at once"),
    }
}

type Witness = ServiceFn<fn(Request<Body>) -> Ready<Result<Response<Body>, Infallible>>>;

/// What a layer adds: the number of response header fields, whether the request has a handle in its extensions, and whether the response has
/// the decision. Verifies that the comparison is fair.
fn adds<L, B>(layer: &L) -> (usize, bool, bool)
where
    L: Layer<Witness>,
    L::Service: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let witness: Witness = service_fn(|request| {
        let has_handle = request.extensions().get::<RateLimitHandle>().is_some();
        let status = if has_handle { StatusCode::ACCEPTED } else { StatusCode::OK };
        ready(Ok(Response::builder().status(status).body(Body::empty()).expect("a response")))
    });
    let response = now(layer.layer(witness).call(request(0)));
    let has_decision = response.extensions().get::<Decision>().is_some();
    (response.headers().len(), response.status() == StatusCode::ACCEPTED, has_decision)
}

/// The order of the contenders. Each round begins with another one.
fn turns(round: usize, contenders: usize) -> impl Iterator<Item = usize> {
    (0..contenders).map(move |turn| (round + turn) % contenders)
}

fn less(nanos: &[f64], bare: &[f64]) -> Vec<f64> {
    nanos.iter().zip(bare).map(|(nanos, bare)| nanos - bare).collect()
}

/// The median of the ratios of the rounds.
fn ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    median(&ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect::<Vec<_>>())
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
