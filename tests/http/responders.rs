//! Your own status, header fields and bodies for rejections.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Request};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http_body_util::BodyExt;
use tollgate::http::FingerprintedBody;
use tollgate::idempotency::ResponsePolicy;
use tollgate::lock::LeaseHandle;
use tollgate::rate_limit::RateLimitHandle;
use tollgate::responder::NotExecuted;
use tollgate::{
    GlobalKey, HttpResponder, IdempotencyLayer, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer, idempotency,
    lock, rate_limit,
};
use tower::{Layer, ServiceExt, service_fn};

const JSON: &str = r#"{"error":"rejected"}"#;

/// A response with nothing of the original but its status.
fn json(response: http::Response<Bytes>) -> http::Response<Bytes> {
    let mut json = http::Response::new(Bytes::from_static(JSON.as_bytes()));
    *json.status_mut() = response.status();
    json.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    json
}

fn post_with_key(key: &str) -> Request {
    Request::post("/").header("idempotency-key", key).body(Body::empty()).unwrap()
}

async fn text(response: Response) -> Bytes {
    response.into_body().collect().await.unwrap().to_bytes()
}

/// A hand-written responder forgot `NotExecuted`, so the 429 was replayed when the window was over.
#[tokio::test(start_paused = true)]
async fn mapped_rejection_of_a_rate_limit_is_not_replayed() {
    let policy = Policy::new("api", Quota::per_minute(1).fixed_window());
    let limit = RateLimitLayer::new(MemoryBackend::new(), policy)
        .responder(HttpResponder::new().map_rejection(|_: &rate_limit::Rejection, response| json(response)));
    let once =
        IdempotencyLayer::new(MemoryBackend::new()).scope(|_: &Request| "shop").response_policy(ResponsePolicy::All);
    let app = Router::new().route("/", post(async || "paid")).layer(limit).layer(once);

    assert_eq!(app.clone().oneshot(post_with_key("a")).await.unwrap().status(), StatusCode::OK);
    let rejected = app.clone().oneshot(post_with_key("b")).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(rejected.headers().contains_key("ratelimit") && !rejected.headers().contains_key(RETRY_AFTER));
    assert_eq!(rejected.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(text(rejected).await, JSON);

    tokio::time::advance(Duration::from_secs(60)).await;
    let retried = app.oneshot(post_with_key("b")).await.unwrap();
    assert_eq!(retried.status(), StatusCode::OK);
    assert_eq!(text(retried).await, "paid");
}

#[tokio::test(start_paused = true)]
async fn mapped_responders_keep_the_handles_of_handlers() {
    async fn handler(_: Extension<RateLimitHandle>, _: Extension<LeaseHandle>) -> &'static str {
        "both handles"
    }
    let responder = HttpResponder::new();
    let policy = Policy::new("api", Quota::per_minute(5).fixed_window());
    let limit = RateLimitLayer::new(MemoryBackend::new(), policy)
        .responder(responder.clone().map_rejection(|_: &rate_limit::Rejection, response| response));
    let lock = LockLayer::new(MemoryBackend::new(), "payments")
        .key(GlobalKey)
        .responder(responder.map_rejection(|_: &lock::Rejection, response| response));
    let app = Router::new().route("/", post(handler)).layer(lock).layer(limit);
    let response = app.oneshot(post_with_key("a")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(text(response).await, "both handles");
}

/// A default method of `BindLease` would have released the lock before the body was sent, and locked safe requests.
#[tokio::test(start_paused = true)]
async fn mapped_lock_rejection_keeps_the_lock_until_the_body_ends() {
    let lock = LockLayer::new(MemoryBackend::new(), "payments")
        .key(GlobalKey)
        .responder(HttpResponder::new().map_rejection(|_: &lock::Rejection, response| json(response)));
    let app = Router::new().route("/", get(async || "unpaid").post(async || "paid")).layer(lock);
    let paid = app.clone().oneshot(post_with_key("a")).await.unwrap();

    let rejected = app.clone().oneshot(post_with_key("b")).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::CONFLICT);
    assert_eq!(rejected.headers()["tollgate-rejected"], "true");
    assert!(rejected.extensions().get::<NotExecuted>().is_some());
    assert_eq!(text(rejected).await, JSON);
    let safe = app.clone().oneshot(Request::get("/").body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(safe.status(), StatusCode::OK);

    assert_eq!(text(paid).await, "paid");
    assert_eq!(app.oneshot(post_with_key("c")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn mapped_idempotency_rejection_has_its_own_status() {
    let responder = HttpResponder::new().map_rejection(|rejection: &idempotency::Rejection, mut response| {
        if matches!(rejection, idempotency::Rejection::MissingKey) {
            *response.status_mut() = StatusCode::PRECONDITION_REQUIRED;
        }
        response
    });
    let once = IdempotencyLayer::new(MemoryBackend::new()).scope(GlobalKey).responder(responder);
    let handler =
        service_fn(async |_: Request<FingerprintedBody<Body>>| Ok::<_, Infallible>(http::Response::new(Body::empty())));
    let response = once.layer(handler).oneshot(Request::post("/").body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::PRECONDITION_REQUIRED);
}
