//! A layer in front of real servers: axum, bare hyper and tonic, each called over sockets.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use bytes::{Buf, BufMut};
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tollgate::grpc::GrpcResponder;
use tollgate::http::{HeaderKey, PeerAddr, PeerIp, header, peer_ip};
use tollgate::idempotency::{IdempotencyAdmin, Operation, OperationState, StoredResponse};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{Decision, Receipt};
use tollgate::responder::HeaderVersion;
use tollgate::{
    BoxError, IdempotencyLayer, Key, LockLayer, Locks, MemoryBackend, Policy, Quota, RateLimitFallback, RateLimitLayer,
    StoreError,
};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower::{Layer, Service, ServiceBuilder, service_fn};

// HTTP/1, by peer address.

#[tokio::test]
async fn axum_limits_a_client_across_connections() {
    within_seconds(async {
        let server = serve_axum(by_peer()).await;
        assert_limited_across_connections(server.addr).await;
    })
    .await;
}

#[tokio::test]
async fn axum_limits_a_client_on_one_connection() {
    within_seconds(async {
        let server = serve_axum(by_peer()).await;
        assert_limited_on_one_connection(server.addr).await;
    })
    .await;
}

#[tokio::test]
async fn hyper_limits_a_client_across_connections() {
    within_seconds(async {
        let server = serve_hyper(by_peer()).await;
        assert_limited_across_connections(server.addr).await;
    })
    .await;
}

#[tokio::test]
async fn hyper_limits_a_client_on_one_connection() {
    within_seconds(async {
        let server = serve_hyper(by_peer()).await;
        assert_limited_on_one_connection(server.addr).await;
    })
    .await;
}

#[tokio::test]
async fn clones_of_one_layer_count_together_in_different_servers() {
    within_seconds(async {
        let layer = by_peer();
        let (axum, hyper) = (serve_axum(layer.clone()).await, serve_hyper(layer).await);
        for (server, status) in [(&axum, 200), (&hyper, 200), (&axum, 200), (&hyper, 429), (&axum, 429)] {
            assert_eq!(Client::connect(server.addr).await.get().await.status(), status);
        }
    })
    .await;
}

#[tokio::test]
async fn concurrent_requests_do_not_exceed_the_quota() {
    within_seconds(async {
        for server in [serve_axum(by_peer()).await, serve_hyper(by_peer()).await] {
            let addr = server.addr;
            let mut requests = JoinSet::new();
            for _ in 0..20 {
                requests.spawn(async move { Client::connect(addr).await.get().await.status() });
            }
            let statuses = requests.join_all().await;
            assert_eq!(statuses.iter().filter(|status| **status == StatusCode::OK).count(), 3);
            assert_eq!(statuses.iter().filter(|status| **status == StatusCode::TOO_MANY_REQUESTS).count(), 17);
        }
    })
    .await;
}

// Only on Linux does the whole of 127.0.0.0/8 belong to this machine by default.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn clients_of_other_addresses_have_their_own_quotas() {
    within_seconds(async {
        for server in [serve_axum(by_peer()).await, serve_hyper(by_peer()).await] {
            let mut client = Client::connect(server.addr).await;
            for status in [200, 200, 200, 429] {
                assert_eq!(client.get().await.status(), status);
            }
            let neighbour = Ipv4Addr::new(127, 0, 0, 2);
            let mut client = Client::connect_from(neighbour.into(), server.addr).await;
            for status in [200, 200, 200, 429] {
                assert_eq!(client.get().await.status(), status);
            }
        }
    })
    .await;
}

// gRPC, by tenant.

#[tokio::test]
async fn tonic_denies_the_fourth_call_with_resource_exhausted() {
    within_seconds(async {
        let (server, calls) = serve_tonic(by_tenant()).await;
        let mut client = GrpcClient::connect(server.addr).await;
        for _ in 0..3 {
            assert_eq!(client.say(Some("acme"), "hello").await.unwrap(), "hello");
        }
        let status = client.say(Some("acme"), "hello").await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let message = status.message();
        assert!(message.starts_with("rate limit `servers` exceeded, try again in "), "{message}");
        assert_eq!(status.metadata().get("ratelimit-policy").unwrap(), r#""servers";q=3;w=60"#);
        let standing = status.metadata().get("ratelimit").unwrap().to_str().unwrap();
        assert!(standing.starts_with(r#""servers";r=0;t="#), "{standing}");

        let wait = status.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert!(wait > Duration::from_secs(30) && wait < Duration::from_secs(60), "{wait:?}");
        assert_ne!(wait.subsec_nanos(), 0, "the wait is not rounded");
        assert!(message.ends_with(&format!(" {} s", wait.as_secs() + 1)), "the text has it rounded up: {message}");
        let pushback = status.metadata().get("grpc-retry-pushback-ms").unwrap().to_str().unwrap();
        assert_eq!(pushback, wait.as_nanos().div_ceil(1_000_000).to_string());
        let violations = violations(&status);
        assert_eq!(violations, [("servers".to_owned(), "servers: 3 in 60 s".to_owned())]);

        assert_eq!(client.say(Some("globex"), "hello").await.unwrap(), "hello", "another tenant still passes");
        assert_eq!(client.say(Some("acme"), "again").await.unwrap_err().code(), Code::ResourceExhausted);
        assert_eq!(calls.load(Ordering::Relaxed), 4, "only admitted calls reached the service");
    })
    .await;
}

#[tokio::test]
async fn tonic_limits_a_tenant_across_connections() {
    within_seconds(async {
        let (server, _) = serve_tonic(by_tenant()).await;
        for _ in 0..3 {
            let mut client = GrpcClient::connect(server.addr).await;
            assert!(client.say(Some("acme"), "hello").await.is_ok());
        }
        let mut client = GrpcClient::connect(server.addr).await;
        assert_eq!(client.say(Some("acme"), "hello").await.unwrap_err().code(), Code::ResourceExhausted);
    })
    .await;
}

/// As in the docs of `grpc`. tonic stores the address where `peer_ip` does not look.
#[tokio::test]
async fn tonic_limits_a_forwarded_peer_address() {
    within_seconds(async {
        let pass_on = |mut call: Request<tonic::body::Body>| {
            if let Some(peer) = call.extensions().get().and_then(TcpConnectInfo::remote_addr) {
                call.extensions_mut().insert(PeerAddr(peer));
            }
            call
        };
        let limited = ServiceBuilder::new().map_request(pass_on).layer(by_peer().responder(GrpcResponder::new()));
        let (server, _) = serve_echo(limited.into_inner());
        let mut client = GrpcClient::connect(server.addr).await;
        for _ in 0..3 {
            assert!(client.say(None, "hello").await.is_ok());
        }
        assert_eq!(client.say(None, "hello").await.unwrap_err().code(), Code::ResourceExhausted);
    })
    .await;
}

#[tokio::test]
async fn tonic_concurrent_calls_do_not_exceed_the_quota() {
    within_seconds(async {
        let (server, calls) = serve_tonic(by_tenant()).await;
        let client = GrpcClient::connect(server.addr).await;
        let mut answers = JoinSet::new();
        for _ in 0..20 {
            let mut client = client.clone();
            answers.spawn(async move { client.say(Some("acme"), "hello").await.map_err(|status| status.code()) });
        }
        let answers = answers.join_all().await;
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 3);
        assert_eq!(answers.iter().filter(|answer| **answer == Err(Code::ResourceExhausted)).count(), 17);
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    })
    .await;
}

/// The docs of `grpc` warn of this.
#[tokio::test]
async fn plain_429_gives_a_tonic_client_no_retry_info() {
    within_seconds(async {
        let (server, _) = serve_echo(by_tenant());
        let mut client = GrpcClient::connect(server.addr).await;
        for _ in 0..3 {
            assert!(client.say(Some("acme"), "hello").await.is_ok());
        }
        let status = client.say(Some("acme"), "hello").await.unwrap_err();
        // From the status, or from the body, which is not a gRPC message.
        assert!(matches!(status.code(), Code::Unavailable | Code::Internal), "{status}");
        assert!(status.get_details_retry_info().is_none());
    })
    .await;
}

#[tokio::test]
async fn tonic_call_without_tenant_gets_invalid_argument() {
    within_seconds(async {
        let (server, calls) = serve_tonic(by_tenant()).await;
        let mut client = GrpcClient::connect(server.addr).await;
        let status = client.say(None, "hello").await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.message(), "the request carries no key to count it under");
        assert_eq!(calls.load(Ordering::Relaxed), 0);
    })
    .await;
}

#[tokio::test]
async fn tonic_client_gets_the_exceeded_limits() {
    within_seconds(async {
        let odd = Quota::new(2, Duration::from_millis(90_500)).unwrap();
        let policy = Policy::new("größe", Quota::per_hour(1).fixed_window())
            .limit(Quota::per_day(5).sliding_window())
            .limit(odd.burst(1).unwrap().token_bucket())
            .named("burst");
        let layer = RateLimitLayer::new(MemoryBackend::new(), policy).key(header("x-tenant"));
        let (server, _) = serve_tonic(layer).await;
        let mut client = GrpcClient::connect(server.addr).await;
        assert!(client.say(Some("acme"), "hello").await.is_ok());
        let status = client.say(Some("acme"), "hello").await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let name = "gr%C3%B6%C3%9Fe";
        let expected =
            [(name.to_owned(), format!("{name}-1h: 1 in 3600 s")), (name.to_owned(), "burst: 1 in 45.25 s".to_owned())];
        assert_eq!(violations(&status), expected);
        let wait = status.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert!(wait > Duration::from_secs(3_500), "the longest of the waits: {wait:?}");
    })
    .await;
}

#[tokio::test]
async fn tonic_client_must_not_retry_if_no_wait_helps() {
    within_seconds(async {
        let nothing = Policy::new("servers", Quota::per_minute(0).fixed_window());
        let (server, _) = serve_tonic(RateLimitLayer::new(MemoryBackend::new(), nothing).key(header("x-tenant"))).await;
        let mut client = GrpcClient::connect(server.addr).await;
        let status = client.say(Some("acme"), "hello").await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "-1");
        assert!(status.get_details_retry_info().is_none());
        let violations = violations(&status);
        assert_eq!(violations, [("servers".to_owned(), "servers: 0 in 60 s".to_owned())]);
    })
    .await;
}

#[tokio::test]
async fn tonic_client_of_a_broken_store_gets_retry_info() {
    within_seconds(async {
        let policy = Policy::new("servers", Quota::per_minute(3).fixed_window());
        let layer = RateLimitLayer::new(Broken, policy).key(header("x-tenant")).on_store_error(RateLimitFallback::Deny);
        let (server, _) = serve_tonic(layer).await;
        let mut client = GrpcClient::connect(server.addr).await;
        let status = client.say(Some("acme"), "hello").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "temporarily unavailable"));
        let wait = status.get_details_retry_info().unwrap().retry_delay;
        assert_eq!(wait, Some(Duration::from_secs(1)));
        assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
        assert!(status.get_details_quota_failure().is_none());
        let said = String::from_utf8_lossy(status.details()).into_owned();
        assert!(!said.contains("hunter2"), "{said}");
    })
    .await;
}

#[tokio::test]
async fn tonic_client_gets_the_configured_fields_and_jitter() {
    within_seconds(async {
        let answer = GrpcResponder::new()
            .headers([HeaderVersion::LegacyDelta, HeaderVersion::Draft10])
            .partition_secret([7; 32])
            .retry_jitter(Duration::from_secs(1_000));
        let (server, _) = serve_tonic_answering(by_tenant(), answer).await;
        let mut client = GrpcClient::connect(server.addr).await;
        for _ in 0..3 {
            assert!(client.say(Some("acme"), "hello").await.is_ok());
        }
        let mut waits = Vec::new();
        for _ in 0..20 {
            let status = client.say(Some("acme"), "hello").await.unwrap_err();
            assert_eq!(status.metadata().get("x-ratelimit-remaining").unwrap(), "0");
            let policy = status.metadata().get("ratelimit-policy").unwrap().to_str().unwrap();
            assert!(policy.starts_with(r#""servers";q=3;w=60;pk=:"#), "{policy}");
            let reset: u64 = status.metadata().get("x-ratelimit-reset").unwrap().to_str().unwrap().parse().unwrap();
            let wait = status.get_details_retry_info().unwrap().retry_delay.unwrap();
            assert!(wait > Duration::from_secs(reset - 1) && wait < Duration::from_secs(1_060), "{wait:?} {reset}");
            waits.push(wait);
        }
        assert!(waits.iter().max().unwrap().abs_diff(*waits.iter().min().unwrap()) > Duration::from_secs(100));
    })
    .await;
}

#[tokio::test]
async fn tonic_runs_a_call_with_a_key_once() {
    within_seconds(async {
        let guard = IdempotencyLayer::new(MemoryBackend::new()).scope(header("x-tenant"));
        let (server, calls) = serve_echo(guard.responder(GrpcResponder::new()));
        let mut client = GrpcClient::connect(server.addr).await;
        let acme = [("x-tenant", "acme"), ("idempotency-key", "k")];
        for is_replay in [false, true, true] {
            let answer = client.call(&acme, "hundred").await.unwrap();
            assert_eq!(answer.metadata().contains_key("idempotent-replayed"), is_replay);
            assert_eq!(answer.into_inner(), "hundred");
        }
        assert_eq!(client.call(&acme, "thousand").await.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(client.call(&acme[..1], "hundred").await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        let globex = [("x-tenant", "globex"), ("idempotency-key", "k")];
        let answer = client.call(&globex, "thousand").await.unwrap();
        assert!(!answer.metadata().contains_key("idempotent-replayed"), "the key of another tenant");
        assert_eq!(calls.load(Ordering::Relaxed), 2);

        // A status that means "try again later" is not recorded, and any other status is.
        for (said, code, runs) in [("busy", Code::Unavailable, 3), ("gone", Code::NotFound, 1)] {
            let before = calls.load(Ordering::Relaxed);
            for _ in 0..3 {
                let status = client.call(&[acme[0], ("idempotency-key", said)], said).await.unwrap_err();
                assert_eq!((status.code(), status.message()), (code, said));
            }
            assert_eq!(calls.load(Ordering::Relaxed) - before, runs, "{said}");
        }
    })
    .await;
}

/// An operator completes two calls that were cut off: one with a message, and one with a status.
#[tokio::test]
async fn tonic_client_gets_the_response_set_by_an_operator() {
    within_seconds(async {
        let backend = MemoryBackend::new();
        let guard = IdempotencyLayer::new(backend.clone()).scope(header("x-tenant"));
        let guard = guard.lease(Duration::from_millis(50)).max_runtime(Duration::from_millis(50));
        let (server, calls) = serve_echo(guard.responder(GrpcResponder::new()));
        let mut client = GrpcClient::connect(server.addr).await;
        let admin = IdempotencyAdmin::new(backend);
        let of_status = Status::already_exists("paid").into_http::<Bytes>();
        for (key, answer) in [("a", StoredResponse::of_message("charged")), ("b", of_status.into())] {
            let call = [("x-tenant", "acme"), ("idempotency-key", key)];
            assert_eq!(client.call(&call, "hang").await.unwrap_err().code(), Code::Aborted);
            let operation = Operation::new((Key::digest("acme"), "POST", "/tollgate.test.Echo/Say"), key);
            let unknown = loop {
                let status = admin.inspect(&operation).await.unwrap().unwrap();
                if matches!(status.state, OperationState::Unknown { .. }) {
                    break status;
                }
                sleep(Duration::from_millis(10)).await;
            };
            assert!(admin.complete(&unknown, answer).await.unwrap());
            match client.call(&call, "hang").await {
                Ok(answer) => {
                    assert_eq!((key, &**answer.get_ref()), ("a", "charged"));
                    assert!(answer.metadata().contains_key("idempotent-replayed"));
                }
                Err(status) => assert_eq!((key, status.code(), status.message()), ("b", Code::AlreadyExists, "paid")),
            }
        }
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    })
    .await;
}

#[tokio::test]
async fn tonic_deadline_of_a_call_ends_its_wait_for_a_lock() {
    within_seconds(async {
        let locks = Locks::new(MemoryBackend::new(), "default");
        let held = locks.lock(Key::digest("acme")).await.unwrap();
        let layer = LockLayer::with_locks(locks).key(header("x-tenant")).wait(Duration::from_secs(600)).max_waiters(1);
        let (server, calls) = serve_echo(layer.responder(GrpcResponder::new()));
        let mut client = GrpcClient::connect(server.addr).await;
        let mut ended = 0;
        while ended < 3 {
            let status = client.call(&[("x-tenant", "acme"), ("grpc-timeout", "100m")], "hundred").await.unwrap_err();
            match status.code() {
                Code::Cancelled | Code::DeadlineExceeded => ended += 1,
                // The previous call may still wait, since the server learns of its end a little later than the client.
                Code::ResourceExhausted => {}
                code => panic!("{code:?}"),
            }
        }
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        held.release().await.unwrap();
    })
    .await;
}

// Assertions for every HTTP server.

async fn assert_limited_across_connections(server: SocketAddr) {
    for remaining in ["r=2", "r=1", "r=0"] {
        let response = Client::connect(server).await.get().await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.body(), "hello");
        assert!(field(&response, "ratelimit").contains(remaining));
    }
    assert_rejected(&Client::connect(server).await.get().await);
}

async fn assert_limited_on_one_connection(server: SocketAddr) {
    let mut client = Client::connect(server).await;
    for _ in 0..3 {
        assert_eq!(client.get().await.status(), StatusCode::OK);
    }
    assert_rejected(&client.get().await);
    assert_rejected(&client.get().await); // A rejection leaves the connection in order.
    assert_rejected(&Client::connect(server).await.get().await);
}

fn assert_rejected(response: &Response<Bytes>) {
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let wait: u64 = field(response, "retry-after").parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
    assert_eq!(field(response, "ratelimit-policy"), r#""servers";q=3;w=60"#);
    assert!(field(response, "ratelimit").starts_with(r#""servers";r=0;t="#));
    assert_eq!(field(response, "content-type"), "application/problem+json");
    let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!(problem["detail"], format!("rate limit `servers` exceeded, try again in {wait} s"));
    assert_eq!(problem["violated-policies"], serde_json::json!(["servers"]));
}

fn field<'a>(response: &'a Response<Bytes>, name: &str) -> &'a str {
    response.headers()[name].to_str().unwrap()
}

/// The subjects and descriptions in the quota failure of a status.
fn violations(status: &Status) -> Vec<(String, String)> {
    let failure = status.get_details_quota_failure().expect("a quota failure");
    failure.violations.into_iter().map(|violation| (violation.subject, violation.description)).collect()
}

// The limit and the servers behind it.

fn limit() -> RateLimitLayer<MemoryBackend> {
    RateLimitLayer::new(MemoryBackend::new(), Policy::new("servers", Quota::per_minute(3).fixed_window()))
}

fn by_peer() -> RateLimitLayer<MemoryBackend, PeerIp> {
    limit().key(peer_ip())
}

fn by_tenant() -> RateLimitLayer<MemoryBackend, HeaderKey> {
    limit().key(header("x-tenant"))
}

async fn serve_axum(layer: RateLimitLayer<MemoryBackend, PeerIp>) -> Server {
    let app = Router::new().route("/", get(async || "hello")).layer(layer);
    let listener = TcpListener::bind(ANY_PORT).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    Server { addr, task: tokio::spawn(async move { axum::serve(listener, app).await.unwrap() }) }
}

async fn serve_hyper(layer: RateLimitLayer<MemoryBackend, PeerIp>) -> Server {
    let limited = ServiceBuilder::new()
        .layer(layer)
        .service(service_fn(async |_: Request<Incoming>| Ok::<_, Infallible>(Response::new(Full::from("hello")))));
    let listener = TcpListener::bind(ANY_PORT).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        // Dropped together with this task, and the connections with it.
        let mut connections = JoinSet::new();
        loop {
            let (stream, peer) = listener.accept().await.unwrap();
            let service = ServiceBuilder::new()
                .map_request(move |mut request: Request<Incoming>| {
                    request.extensions_mut().insert(PeerAddr(peer));
                    request
                })
                .service(limited.clone());
            connections.spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)),
            );
        }
    });
    Server { addr, task }
}

/// The server, and the number of calls that reached its service.
async fn serve_tonic<B>(layer: RateLimitLayer<B, HeaderKey>) -> (Server, Arc<AtomicUsize>)
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    serve_tonic_answering(layer, GrpcResponder::new()).await
}

async fn serve_tonic_answering<B>(
    layer: RateLimitLayer<B, HeaderKey>,
    answer: GrpcResponder,
) -> (Server, Arc<AtomicUsize>)
where
    B: RateLimitStore + Clone + Send + Sync + 'static,
{
    serve_echo(layer.responder(answer))
}

/// Serves [`Echo`] behind a layer.
fn serve_echo<L, B>(layer: L) -> (Server, Arc<AtomicUsize>)
where
    L: Layer<Routes> + Clone + Send + 'static,
    L::Service: Service<Request<tonic::body::Body>, Response = Response<B>> + Clone + Send + 'static,
    <L::Service as Service<Request<tonic::body::Body>>>::Future: Send,
    <L::Service as Service<Request<tonic::body::Body>>>::Error: Into<BoxError> + Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let echo = Echo::default();
    let calls = Arc::clone(&echo.calls);
    let incoming = TcpIncoming::bind(ANY_PORT).unwrap();
    let addr = incoming.local_addr().unwrap();
    let server = tonic::transport::Server::builder().layer(layer).add_service(echo);
    let task = tokio::spawn(async move { server.serve_with_incoming(incoming).await.unwrap() });
    (Server { addr, task }, calls)
}

const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A server that accepts connections until it is dropped.
struct Server {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A store that is down, with an error that reveals too much.
#[derive(Clone)]
struct Broken;

impl RateLimitStore for Broken {
    async fn check(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        Err(StoreError::unavailable("redis://:hunter2@10.0.0.1/ refused the connection"))
    }

    async fn peek(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        unreachable!("a layer never peeks")
    }

    async fn settle(&self, _: &Policy, _: &Key, _: Receipt, _: i64) -> Result<(), StoreError> {
        unreachable!("a layer never settles on its own")
    }

    async fn block(&self, _: &Policy, _: &Key, _: Duration) -> Result<(), StoreError> {
        unreachable!("a layer never blocks")
    }

    async fn reset(&self, _: &Policy, _: &Key) -> Result<(), StoreError> {
        unreachable!("a layer never resets")
    }
}

/// A gRPC service without generated code. Its one method echoes the message. `busy` and `gone` are answered with an error, and `hang` never
/// returns.
#[derive(Clone, Default)]
struct Echo {
    calls: Arc<AtomicUsize>,
}

impl NamedService for Echo {
    const NAME: &'static str = "tollgate.test.Echo";
}

impl Service<Request<tonic::body::Body>> for Echo {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async {
            let say = service_fn(async |said: tonic::Request<String>| match said.into_inner() {
                said if said == "busy" => Err(Status::unavailable(said)),
                said if said == "hang" => pending().await,
                said if said == "gone" => Err(Status::not_found(said)),
                said => Ok(tonic::Response::new(said)),
            });
            Ok(tonic::server::Grpc::new(PlainText).unary(say, request).await)
        })
    }
}

/// A codec for messages of plain text.
#[derive(Clone, Copy)]
pub(crate) struct PlainText;

impl Codec for PlainText {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for PlainText {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, text: String, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for PlainText {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        String::from_utf8(bytes.into()).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

// The clients.

/// One HTTP/1 connection, kept alive between requests.
struct Client {
    requests: SendRequest<Empty<Bytes>>,
    server: SocketAddr,
    connection: JoinHandle<()>,
}

impl Client {
    async fn connect(server: SocketAddr) -> Self {
        Self::connect_from(Ipv4Addr::LOCALHOST.into(), server).await
    }

    async fn connect_from(ip: IpAddr, server: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((ip, 0).into()).unwrap();
        let stream = socket.connect(server).await.unwrap();
        let (requests, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(async move { connection.await.unwrap() });
        Self { requests, server, connection }
    }

    async fn get(&mut self) -> Response<Bytes> {
        let request = Request::get("/").header("host", self.server.to_string()).body(Empty::new()).unwrap();
        self.requests.ready().await.expect("the connection is still open");
        let (head, body) = self.requests.send_request(request).await.unwrap().into_parts();
        Response::from_parts(head, body.collect().await.unwrap().to_bytes())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

#[derive(Clone)]
struct GrpcClient {
    grpc: tonic::client::Grpc<Channel>,
}

impl GrpcClient {
    async fn connect(server: SocketAddr) -> Self {
        let channel = Endpoint::from_shared(format!("http://{server}")).unwrap().connect().await.unwrap();
        Self { grpc: tonic::client::Grpc::new(channel) }
    }

    async fn say(&mut self, tenant: Option<&'static str>, text: &str) -> Result<String, Status> {
        let tenant: Vec<_> = tenant.map(|tenant| ("x-tenant", tenant)).into_iter().collect();
        self.call(&tenant, text).await.map(tonic::Response::into_inner)
    }

    async fn call(
        &mut self,
        metadata: &[(&'static str, &'static str)],
        text: &str,
    ) -> Result<tonic::Response<String>, Status> {
        let mut request = tonic::Request::new(text.to_owned());
        for (name, value) in metadata {
            request.metadata_mut().insert(*name, value.parse().unwrap());
        }
        let path = PathAndQuery::from_static("/tollgate.test.Echo/Say");
        self.grpc.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
        self.grpc.unary(request, path, PlainText).await
    }
}

/// Ends a test that would hang. The timeout is far shorter than the minute after which quotas return.
async fn within_seconds(test: impl Future<Output = ()>) {
    timeout(Duration::from_secs(20), test).await.expect("the servers answer");
}
