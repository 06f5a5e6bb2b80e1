//! `CacheLayer` on axum as it is, over sockets, inside other layers, and on Redis.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::header::CACHE_CONTROL;
use axum::routing::get;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;
use tollgate::http::header;
use tollgate::{CacheLayer, GlobalKey, MemoryBackend, RedisBackend};
use tower::{Layer, service_fn};
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;

use crate::support::cluster::Cluster;
use crate::support::server::RedisServer;
use crate::support::shared::patient;

/// Aborts a server when it is dropped.
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    task: Option<AbortHandle>,
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Server {
    pub(crate) async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() }).abort_handle();
        Self::new(addr, Some(task))
    }

    /// `task` is aborted when this is dropped.
    pub(crate) fn new(addr: SocketAddr, task: Option<AbortHandle>) -> Self {
        Self { addr, task, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    pub(crate) async fn send(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> Response<String> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.addr));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let (parts, body) = self.client.request(request.body(Empty::new()).unwrap()).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Response::from_parts(parts, String::from_utf8(body.to_vec()).unwrap())
    }
}

/// A handler that counts its calls.
fn counting(calls: &Arc<AtomicUsize>) -> axum::routing::MethodRouter {
    let calls = Arc::clone(calls);
    get(move || async move {
        let number = calls.fetch_add(1, Ordering::Relaxed) + 1;
        sleep(Duration::from_millis(100)).await;
        ([(CACHE_CONTROL, "max-age=60"), (http::header::ETAG, "\"v\"")], number.to_string())
    })
}

fn public() -> CacheLayer<GlobalKey> {
    CacheLayer::new(MemoryBackend::new(), "pages").public()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn axum_router_is_cached_over_sockets() {
    let calls = Arc::default();
    let server =
        Server::start(Router::new().route("/", counting(&calls)).layer(public()).layer(CorsLayer::new())).await;
    let mut requests = JoinSet::new();
    let server = Arc::new(server);
    for _ in 0..20 {
        let server = Arc::clone(&server);
        requests.spawn(async move { server.send("GET", "/", &[]).await });
    }
    for response in requests.join_all().await {
        assert_eq!((response.body().as_str(), &response.headers()["content-length"]), ("1", &"1".parse().unwrap()));
    }
    let head = server.send("HEAD", "/", &[]).await;
    assert_eq!((head.body().as_str(), head.headers()["content-length"].to_str().unwrap()), ("", "1"));
    let not_modified = server.send("GET", "/", &[("if-none-match", "\"v\"")]).await;
    assert_eq!(not_modified.status(), 304);
    assert!(not_modified.headers().contains_key("age"));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nested_routers_have_different_responses() {
    let [a, b]: [Arc<AtomicUsize>; 2] = Default::default();
    let layer = public();
    let nested = |calls| Router::new().route("/x", counting(calls)).layer(layer.clone());
    b.store(10, Ordering::Relaxed);
    let server = Server::start(Router::new().nest("/a", nested(&a)).nest("/b", nested(&b))).await;
    for _ in 0..2 {
        assert_eq!(server.send("GET", "/a/x", &[]).await.body(), "1");
        assert_eq!(server.send("GET", "/b/x", &[]).await.body(), "11");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layer_per_principal_works_on_axum() {
    let calls = Arc::default();
    let layer = CacheLayer::new(MemoryBackend::new(), "pages").per(header("x-api-key"));
    let server = Server::start(Router::new().route("/", counting(&calls)).layer(layer)).await;
    for (key, expected) in [("a", "1"), ("b", "2"), ("a", "1"), ("b", "2")] {
        assert_eq!(server.send("GET", "/", &[("x-api-key", key)]).await.body(), expected);
    }
}

/// Inside of compression, one response serves all encodings. Outside, each encoding is a response of its own.
#[tokio::test(start_paused = true)]
async fn cache_works_on_both_sides_of_compression() {
    for (is_inside, expected) in [(true, 1), (false, 2)] {
        let calls = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&calls);
        let page = get(move || async move {
            counter.fetch_add(1, Ordering::Relaxed);
            ([(CACHE_CONTROL, "max-age=60")], "hello ".repeat(100))
        });
        let router = Router::new().route("/", page);
        let app: Router = if is_inside {
            router.layer(public()).layer(CompressionLayer::new())
        } else {
            router.layer(CompressionLayer::new()).layer(public())
        };
        for encoding in ["gzip", "identity", "gzip", "identity"] {
            let request = Request::get("/").header("accept-encoding", encoding).body(axum::body::Body::empty());
            let response = tower::ServiceExt::oneshot(app.clone(), request.unwrap()).await.unwrap();
            let found = response.headers().get("content-encoding").map_or("identity", |found| found.to_str().unwrap());
            assert_eq!(found, encoding);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            if encoding == "gzip" {
                assert!(body.starts_with(&[0x1f, 0x8b]) && body.len() < 100);
            } else {
                assert_eq!(body, "hello ".repeat(100));
            }
            // In paused time, until all tasks are idle: the response is stored when its body has ended.
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert_eq!(calls.load(Ordering::Relaxed), expected, "inside: {is_inside}");
    }
}

/// A bare hyper server, whose request body is not `Sync`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hyper_service_is_cached_over_sockets() {
    let calls = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&calls);
    let service = public().layer(service_fn(move |_: Request<Incoming>| {
        let number = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let response =
            Response::builder().header(CACHE_CONTROL, "max-age=60").body(Full::new(Bytes::from(number.to_string())));
        async move { Ok::<_, Infallible>(response.unwrap()) }
    }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    let server = Server::new(addr, Some(task.abort_handle()));
    for _ in 0..3 {
        assert_eq!(server.send("GET", "/", &[]).await.body(), "1");
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

/// Two processes, here two backends of one deployment.
async fn two_servers_are_one_call(url: &str, layer: impl Fn(RedisBackend) -> CacheLayer<GlobalKey>) {
    let calls = Arc::default();
    let mut requests = JoinSet::new();
    let mut routers = Vec::new();
    for _ in 0..2 {
        let layer = layer(patient(url).await).deadline(Duration::from_secs(5));
        routers.push(Router::new().route("/", counting(&calls)).layer(layer));
    }
    for number in 0..100 {
        let router = routers[number % 2].clone();
        let request = Request::get("http://a/").body(axum::body::Body::empty()).unwrap();
        requests.spawn(async move {
            let response = tower::ServiceExt::oneshot(router, request).await.unwrap();
            response.into_body().collect().await.unwrap().to_bytes()
        });
    }
    assert!(requests.join_all().await.iter().all(|body| body == "1"));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_on_one_redis_are_one_call() {
    let redis = RedisServer::start();
    two_servers_are_one_call(&redis.url(), |backend| CacheLayer::new(backend, "pages").public()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_on_one_cluster_are_one_call() {
    let cluster = Cluster::start();
    two_servers_are_one_call(&cluster.url(), |backend| CacheLayer::new(backend, "pages").public()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_with_local_tiers_are_one_call() {
    let minute = Duration::from_secs(60);
    let redis = RedisServer::start();
    let layer = |backend| CacheLayer::new(backend, "pages").public().local_tier(100, minute);
    two_servers_are_one_call(&redis.url(), layer).await;
}
