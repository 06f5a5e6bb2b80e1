//! HTTP responses behind `CacheLayer`, `tower-http-cache` and `http-cache-tower-server`: what each layer does in seven cases, and the time of a
//! hit in the process.
//!
//! `cargo run --release --bin http_caches` starts its own Redis, takes less than a minute after the build, and prints the table of
//! docs/guide/cache.md. The last line is `layer_hit_ns=.. tower_http_cache_ns=.. http_cache_ns=.. bare_ns=.. hit_over_tower_http_cache=..`.
//!
//! The layers have their default settings, with a time to live of a minute. The origin takes 200 ms. The times of hits are the medians of
//! rounds in which all layers take turns, and include creating the request and reading a body of 1 KiB.

#[path = "../../../../tests/support/server.rs"]
#[allow(dead_code, reason = "the harness of the tests has more than this program needs")]
mod server;

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use http::header::{AUTHORIZATION, CACHE_CONTROL, SET_COOKIE};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use http_cache::{MokaCache, MokaManager};
use http_cache_tower_server::ServerCacheLayer;
use server::RedisServer;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::{BoxError, CacheLayer, GlobalKey, MemoryBackend};
use tower::util::{BoxCloneService, BoxCloneSyncService};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http_cache::prelude::{InMemoryBackend, RedisBackend};

type App = BoxCloneService<Request<Full<Bytes>>, Response<Body>, BoxError>;
type Inner = BoxCloneSyncService<Request<Full<Bytes>>, Response<Full<Bytes>>, Infallible>;

const MINUTE: Duration = Duration::from_secs(60);
const ORIGIN: Duration = Duration::from_millis(200);

#[derive(Clone, Copy)]
enum Peer {
    Tollgate,
    TowerHttpCache,
    HttpCacheTowerServer,
}

const PEERS: [Peer; 3] = [Peer::Tollgate, Peer::TowerHttpCache, Peer::HttpCacheTowerServer];

fn tollgate() -> CacheLayer<GlobalKey> {
    CacheLayer::new(MemoryBackend::new(), "pages").public().fresh_for(MINUTE).local_tier(10_000, MINUTE)
}

fn tower_http_cache(ttl: Duration) -> tower_http_cache::CacheLayer<InMemoryBackend> {
    let layer = tower_http_cache::CacheLayer::builder(InMemoryBackend::new(10_000)).ttl(ttl);
    layer.stale_while_revalidate(MINUTE).build()
}

fn http_cache() -> ServerCacheLayer<MokaManager> {
    ServerCacheLayer::new(MokaManager::new(MokaCache::new(10_000)))
}

impl Peer {
    /// An origin behind the layer, which stores in the process. `ttl` is for the layer that ignores the time of the response.
    fn app(self, inner: Inner, ttl: Duration) -> App {
        match self {
            Self::Tollgate => boxed(tollgate().layer(inner)),
            Self::TowerHttpCache => boxed(tower_http_cache(ttl).layer(inner)),
            Self::HttpCacheTowerServer => boxed(http_cache().layer(inner)),
        }
    }

    /// The same on Redis. `None` if the layer cannot store there.
    async fn on_redis(self, inner: Inner, url: &str) -> Option<App> {
        match self {
            Self::Tollgate => {
                let backend = tollgate::RedisBackend::connect(url).await.expect("Redis accepts the connection");
                Some(boxed(CacheLayer::new(backend, "pages").public().fresh_for(MINUTE).layer(inner)))
            }
            Self::TowerHttpCache => {
                let client = redis::Client::open(url).expect("the URL is well-formed");
                let manager = client.get_connection_manager().await.expect("Redis accepts the connection");
                Some(boxed(
                    tower_http_cache::CacheLayer::builder(RedisBackend::new(manager)).ttl(MINUTE).build().layer(inner),
                ))
            }
            Self::HttpCacheTowerServer => None,
        }
    }
}

fn boxed<S, B>(service: S) -> App
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    BoxCloneService::new(service.map_response(|response: Response<B>| response.map(Body::new)).map_err(Into::into))
}

/// An origin that counts its calls, and takes 200 ms.
fn origin(
    respond: impl Fn(&Request<Full<Bytes>>) -> Response<Full<Bytes>> + Clone + Send + Sync + 'static,
) -> (Inner, Arc<AtomicUsize>) {
    let calls = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&calls);
    let service = service_fn(move |request: Request<Full<Bytes>>| {
        let (respond, counter) = (respond.clone(), Arc::clone(&counter));
        async move {
            counter.fetch_add(1, Ordering::Relaxed);
            sleep(ORIGIN).await;
            Ok::<_, Infallible>(respond(&request))
        }
    });
    (Inner::new(service), calls)
}

fn page(control: &str) -> Response<Full<Bytes>> {
    Response::builder().header(CACHE_CONTROL, control).body(Full::from(vec![b'x'; 1_024])).expect("the field is valid")
}

fn request(method: Method, path: &str) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("host", "localhost");
    request.body(Full::default()).expect("the path is valid")
}

async fn send(app: App, request: Request<Full<Bytes>>) -> (http::response::Parts, Bytes) {
    let (parts, body) = app.oneshot(request).await.expect("the origin does not fail").into_parts();
    (parts, axum::body::to_bytes(body, usize::MAX).await.expect("the body is complete"))
}

/// Sends this number of requests at the same time.
fn at_once(apps: &[App], each: usize) -> JoinSet<()> {
    let mut requests = JoinSet::new();
    for app in apps.iter().flat_map(|app| std::iter::repeat_n(app, each)) {
        let app = app.clone();
        requests.spawn(async move {
            send(app, request(Method::GET, "/")).await;
        });
    }
    requests
}

/// Alice sends `Authorization` and gets a cookie. Then Bob requests the same path.
async fn private_response(peer: Peer) -> String {
    let (inner, _) = origin(|request| {
        let mut response = page("max-age=60");
        let user = request.headers().get(AUTHORIZATION).expect("each request has it").clone();
        response.headers_mut().insert(SET_COOKIE, user.clone());
        response.map(|_| Full::from(user.to_str().expect("it is text").to_owned()))
    });
    let app = peer.app(inner, MINUTE);
    let request_of = |user: &'static str| {
        let mut request = request(Method::GET, "/me");
        request.headers_mut().insert(AUTHORIZATION, http::HeaderValue::from_static(user));
        request
    };
    send(app.clone(), request_of("alice")).await;
    let (parts, body) = send(app.clone(), request_of("bob")).await;
    match (parts.headers.get(SET_COOKIE).is_some_and(|cookie| cookie == "alice"), &*body == b"alice") {
        (false, false) => "his own".to_owned(),
        (true, true) => "**hers, with her cookie**".to_owned(),
        _ => "**a part of hers**".to_owned(),
    }
}

/// A HEAD request, and then a GET of the same path.
async fn get_after_head(peer: Peer) -> String {
    let (inner, _) = origin(|request| {
        let response = page("max-age=60");
        if request.method() == Method::HEAD { response.map(|_| Full::default()) } else { response }
    });
    let app = peer.app(inner, MINUTE);
    send(app.clone(), request(Method::HEAD, "/")).await;
    let (_, body) = send(app.clone(), request(Method::GET, "/")).await;
    if body.is_empty() { "**an empty body**" } else { "its body" }.to_owned()
}

async fn cold_calls(peer: Peer, status: StatusCode) -> String {
    let (inner, calls) = origin(move |_| {
        let mut response = page("max-age=60");
        *response.status_mut() = status;
        response
    });
    at_once(&[peer.app(inner, MINUTE)], 100).join_all().await;
    calls.load(Ordering::Relaxed).to_string()
}

/// The client of the first request goes while 99 wait.
async fn calls_after_leader(peer: Peer) -> String {
    let (inner, calls) = origin(|_| page("max-age=60"));
    let app = [peer.app(inner, MINUTE)];
    let mut leader = at_once(&app, 1);
    sleep(ORIGIN / 10).await;
    let waiters = at_once(&app, 99);
    sleep(ORIGIN / 10).await;
    leader.shutdown().await;
    waiters.join_all().await;
    calls.load(Ordering::Relaxed).to_string()
}

/// How long the first request for a stale response takes.
async fn stale_wait(peer: Peer) -> String {
    let (inner, _) = origin(|_| page("max-age=1, stale-while-revalidate=60"));
    let app = peer.app(inner, Duration::from_secs(1));
    send(app.clone(), request(Method::GET, "/")).await;
    sleep(Duration::from_millis(1_500)).await;
    let start = Instant::now();
    send(app.clone(), request(Method::GET, "/")).await;
    format!("{} ms", start.elapsed().as_millis())
}

/// Four instances with 50 requests each.
async fn calls_of_instances(peer: Peer, url: &str) -> String {
    let (inner, calls) = origin(|_| page("max-age=60"));
    let mut apps = Vec::new();
    for _ in 0..4 {
        match peer.on_redis(inner.clone(), url).await {
            Some(app) => apps.push(app),
            None => return "no store on Redis".to_owned(),
        }
    }
    at_once(&apps, 50).join_all().await;
    calls.load(Ordering::Relaxed).to_string()
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime starts");
    runtime.block_on(async {
        let server = RedisServer::start();
        println!("| case | `CacheLayer` | tower-http-cache | http-cache-tower-server |\n| --- | --- | --- | --- |");
        for case in CASES {
            print!("| {case} |");
            for peer in PEERS {
                print!(" {} |", run(case, peer, &server.url()).await);
            }
            println!();
        }
    });
    hits(&runtime);
}

const CASES: [&str; 7] = [
    "Alice's response has `Set-Cookie`; Bob then gets",
    "HEAD, then GET of the same path: GET gets",
    "100 requests at once, cold: calls of the origin",
    "100 requests at once, the origin answers 500: calls",
    "the first client of 100 goes: calls",
    "first request for a stale response takes",
    "4 instances on one Redis, 50 requests each: calls",
];

async fn run(case: &str, peer: Peer, url: &str) -> String {
    match CASES.iter().position(|name| *name == case).expect("it is one of them") {
        0 => private_response(peer).await,
        1 => get_after_head(peer).await,
        2 => cold_calls(peer, StatusCode::OK).await,
        3 => cold_calls(peer, StatusCode::INTERNAL_SERVER_ERROR).await,
        4 => calls_after_leader(peer).await,
        5 => stale_wait(peer).await,
        _ => calls_of_instances(peer, url).await,
    }
}

const PATHS: usize = 100;
const ROUNDS: usize = 501;

/// Prints the times of hits.
fn hits(runtime: &tokio::runtime::Runtime) {
    let _context = runtime.enter();
    let inner = service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(page("max-age=3600")));
    let mut contenders = [
        contender("no layer", inner),
        contender("CacheLayer", tollgate().layer(inner)),
        contender("tower-http-cache", tower_http_cache(MINUTE).layer(inner)),
        contender("http-cache-tower-server", http_cache().layer(inner)),
    ];
    // The first requests fill the caches, maybe in tasks.
    for _ in 0..3 {
        contenders.iter_mut().for_each(|contender| contender.warm(runtime));
    }
    let mut nanos = contenders.each_ref().map(|_| Vec::new());
    for round in 0..ROUNDS {
        for turn in 0..contenders.len() {
            let at = (round + turn) % contenders.len();
            nanos[at].push((contenders[at].batch)());
        }
    }
    let medians = nanos.each_ref().map(|nanos| median(nanos));
    println!();
    for (contender, nanos) in contenders.iter().zip(&medians) {
        println!("{:<24} {nanos:>6.0} ns", contender.name);
    }
    let [bare, ours, theirs, other] = medians;
    let ratios: Vec<_> = nanos[1].iter().zip(&nanos[2]).map(|(ours, theirs)| ours / theirs).collect();
    println!(
        "layer_hit_ns={ours:.0} tower_http_cache_ns={theirs:.0} http_cache_ns={other:.0} bare_ns={bare:.0} hit_over_tower_http_cache={:.2}",
        median(&ratios)
    );
}

struct Contender {
    name: &'static str,
    /// Sends one request for a path.
    send: Box<dyn Fn(&tokio::runtime::Runtime, &str)>,
    /// The time of a hit in nanoseconds.
    batch: Box<dyn FnMut() -> f64>,
}

impl Contender {
    fn warm(&self, runtime: &tokio::runtime::Runtime) {
        (0..PATHS).for_each(|path| (self.send)(runtime, &path_of(path)));
    }
}

fn path_of(number: usize) -> String {
    format!("/articles/{number}?page=1")
}

fn contender<S, B>(name: &'static str, service: S) -> Contender
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: Debug> + Clone + 'static,
    B: HttpBody<Data = Bytes, Error: Debug>,
{
    let (warmed, mut batched) = (service.clone(), service);
    let paths: Vec<_> = (0..PATHS).map(path_of).collect();
    Contender {
        name,
        send: Box::new(move |runtime, path| {
            let len = runtime.block_on(async {
                length(warmed.clone().oneshot(request(Method::GET, path)).await.expect("the origin does not fail"))
                    .await
            });
            assert_eq!(len, 1_024);
        }),
        batch: Box::new(move || {
            let start = Instant::now();
            for path in &paths {
                let request = request(Method::GET, path);
                let len = now(async {
                    poll_fn(|cx| batched.poll_ready(cx)).await.expect("the origin is ready");
                    length(batched.call(request).await.expect("the origin does not fail")).await
                });
                assert_eq!(len, 1_024, "{name}");
            }
            start.elapsed().as_secs_f64() * 1e9 / paths.len() as f64
        }),
    }
}

/// Reads a body to its end.
async fn length<B: HttpBody<Data = Bytes, Error: Debug>>(response: Response<B>) -> usize {
    let mut body = pin!(response.into_body());
    let mut len = 0;
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        len += frame.expect("the body is complete").data_ref().map_or(0, Bytes::len);
    }
    len
}

/// Polls a request once: a hit in the process does not wait.
fn now<T>(answer: impl Future<Output = T>) -> T {
    match pin!(answer).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("the response was not in the process"),
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
