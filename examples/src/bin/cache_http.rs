//! A cache in front of two axum servers: how often is the handler called?
//!
//! ```text
//! cargo run -p tollgate-examples --bin cache_http
//! TOLLGATE_STORE=redis://127.0.0.1/ cargo run -p tollgate-examples --bin cache_http
//! ```
//!
//! With `-- --serve` it then listens on `TOLLGATE_ADDR`, or on 127.0.0.1:3000, and says what to try.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::get;
use http::header::{CACHE_CONTROL, HeaderValue, SET_COOKIE};
use http::{Method, Request, Response};
use tokio::task::JoinSet;
use tollgate::{AnyBackend, BoxError, CacheLayer};
use tower::ServiceExt;

type Calls = Arc<AtomicUsize>;

/// A handler that takes 50 ms, and responds with these header fields.
fn handler(calls: &Calls, fields: &'static [(http::HeaderName, HeaderValue)]) -> axum::routing::MethodRouter {
    let calls = Arc::clone(calls);
    get(async move || {
        calls.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut response = Response::new(Body::from("hello\n"));
        response.headers_mut().extend(fields.iter().cloned());
        response
    })
    .post(async || "changed\n")
}

/// One server. Real ones run in processes of their own.
fn server(backend: AnyBackend, calls: &Calls) -> Router {
    static PAGE: [(http::HeaderName, HeaderValue); 1] =
        [(CACHE_CONTROL, HeaderValue::from_static("max-age=60, stale-while-revalidate=60"))];
    static LOGIN: [(http::HeaderName, HeaderValue); 2] =
        [(CACHE_CONTROL, HeaderValue::from_static("max-age=60")), (SET_COOKIE, HeaderValue::from_static("session=1"))];
    let cache = CacheLayer::new(backend, "pages").public().deadline(Duration::from_secs(5));
    Router::new().route("/page", handler(calls, &PAGE)).route("/login", handler(calls, &LOGIN)).layer(cache)
}

/// Requests of a path at the same time, half of them to each server. Returns the number of calls of the handler.
async fn ask(servers: &[Router; 2], calls: &Calls, path: &'static str) -> Result<usize, BoxError> {
    calls.store(0, Ordering::Relaxed);
    let mut clients = JoinSet::new();
    for number in 0..100 {
        let (server, request) = (servers[number % 2].clone(), Request::get(path).body(Body::empty())?);
        clients.spawn(async move { server.oneshot(request).await });
    }
    for response in clients.join_all().await {
        let Ok(response) = response;
        assert_eq!(to_bytes(response.into_body(), 100).await?, "hello\n");
    }
    Ok(calls.load(Ordering::Relaxed))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = std::env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let backend = tollgate::connect(&url).await?;
    let calls = Calls::default();
    let servers = [server(backend.clone(), &calls), server(backend, &calls)];
    let change = || Request::builder().method(Method::POST).uri("/page").body(Body::empty());

    servers[0].clone().oneshot(change()?).await?;
    println!("a page, 100 requests: {} calls", ask(&servers, &calls, "/page").await?);
    println!("again: {} calls", ask(&servers, &calls, "/page").await?);
    servers[0].clone().oneshot(change()?).await?;
    println!("after a POST: {} calls", ask(&servers, &calls, "/page").await?);
    println!("a response with Set-Cookie, 100 requests: {} calls", ask(&servers, &calls, "/login").await?);

    if std::env::args().any(|arg| arg == "--serve") {
        let addr = std::env::var("TOLLGATE_ADDR").unwrap_or_else(|_| "127.0.0.1:3000".to_owned());
        let listener = tokio::net::TcpListener::bind(addr).await?;
        println!("Try it: curl -i http://{}/page", listener.local_addr()?);
        let [server, _] = servers;
        axum::serve(listener, server).await?;
    }
    Ok(())
}
