//! The recipes of the guide on a real Redis. Each file begins with the code of docs/guide/recipes.md, and proves what the recipe promises.

#![allow(dead_code, reason = "the recipes have functions that only their users call")]

mod cached;
mod leader;
mod login;
mod nginx;
mod orders;
mod outbound;
mod plans;
mod streams;
mod webhook;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use axum::Router;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tollgate::AnyBackend;

use crate::support::server::RedisServer;

const GUIDE: &str = include_str!("../../../docs/guide/recipes.md");

/// How long a test waits for what has to happen soon.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn guide_shows_the_tested_code() {
    let files = [
        ("cached", include_str!("cached.rs")),
        ("leader", include_str!("leader.rs")),
        ("login", include_str!("login.rs")),
        ("nginx", include_str!("nginx.rs")),
        ("orders", include_str!("orders.rs")),
        ("outbound", include_str!("outbound.rs")),
        ("plans", include_str!("plans.rs")),
        ("streams", include_str!("streams.rs")),
        ("webhook", include_str!("webhook.rs")),
    ];
    for (name, file) in files {
        let (recipe, _) = file.split_once("\n#[cfg(test)]\nmod tests {").expect("the tests follow the recipe");
        let is_shown = blocks("rust").any(|block| block == recipe.trim_end());
        assert!(is_shown, "docs/guide/recipes.md has no code block with the text of tests/http/recipes/{name}.rs");
    }
}

/// The code blocks of the guide in a language.
fn blocks(language: &str) -> impl Iterator<Item = &'static str> {
    GUIDE.split("\n```").skip(1).step_by(2).filter_map(move |block| {
        let (info, code) = block.split_once('\n')?;
        (info.split(',').next() == Some(language)).then_some(code)
    })
}

/// A backend for one instance of an app, which tolerates a busy machine.
async fn backend(redis: &RedisServer) -> AnyBackend {
    backend_at(&redis.url()).await
}

async fn backend_at(url: &str) -> AnyBackend {
    let timeout = Duration::from_secs(10);
    tollgate::connect_with(url, |redis| redis.connect_timeout(timeout).response_timeout(timeout))
        .await
        .expect("the server accepts connections")
}

/// An app on a port of its own. It stops when it is dropped.
struct App {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl App {
    async fn serve(app: Router) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        Self { addr, task: tokio::spawn(async move { axum::serve(listener, app).await.unwrap() }) }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An HTTP client at one address, which keeps its connections.
#[derive(Clone)]
struct Client(legacy::Client<HttpConnector, Full<Bytes>>);

impl Client {
    fn new() -> Self {
        Self::at(Ipv4Addr::LOCALHOST)
    }

    /// Only on Linux does the whole of 127.0.0.0/8 belong to this machine by default.
    fn at(ip: Ipv4Addr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_local_address(Some(IpAddr::V4(ip)));
        connector.set_nodelay(true);
        Self(legacy::Client::builder(TokioExecutor::new()).build(connector))
    }

    async fn get(&self, server: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Reply {
        self.send(Method::GET, server, path, headers, "").await
    }

    async fn post(&self, server: SocketAddr, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        self.send(Method::POST, server, path, headers, body).await
    }

    async fn send(
        &self,
        method: Method,
        server: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Reply {
        let (head, body) = self.open(method, server, path, headers, body).await.into_parts();
        let body = body.collect().await.expect("the body ends").to_bytes();
        Reply { status: head.status.as_u16(), headers: head.headers, body: String::from_utf8(body.into()).unwrap() }
    }

    /// A response whose body may never end.
    async fn open(
        &self,
        method: Method,
        server: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("http://{server}{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body.to_owned())).unwrap();
        self.0.request(request).await.expect("the server answers")
    }
}

#[derive(Debug)]
struct Reply {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Reply {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// Polls until the condition holds.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < SOON, "not within {SOON:?}: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}
