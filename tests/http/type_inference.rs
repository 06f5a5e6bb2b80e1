//! Programs that users write, which must compile.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::Request;
use http::Response;
use tollgate::http::FingerprintedBody;
use tollgate::{
    ErrorResponder, ExtractKey, GlobalKey, IdempotencyLayer, LockLayer, MemoryBackend, Policy, Quota, RateLimitLayer,
    str_key,
};
use tower::{Layer, ServiceExt, service_fn};

fn limit() -> RateLimitLayer<MemoryBackend> {
    RateLimitLayer::new(MemoryBackend::new(), Policy::new("api", Quota::per_minute(9).fixed_window()))
}

fn request() -> Request {
    Request::post("/").header("x-tenant", "acme").header("idempotency-key", "a").body(Body::empty()).unwrap()
}

#[tokio::test]
async fn cost_closure_may_return_a_literal() {
    let service =
        limit().cost(|_: &Request| 3).layer(service_fn(async |_| Ok::<_, Infallible>(Response::new(Body::empty()))));
    let response = service.oneshot(request()).await.unwrap();
    assert_eq!(response.headers()["ratelimit"].to_str().unwrap().split(';').nth(1), Some("r=6"));
}

#[tokio::test]
async fn key_closure_may_borrow_from_the_request() {
    let tenant = str_key(|request: &Request| request.headers().get("x-tenant")?.to_str().ok());
    let layer = limit().key(tenant).on_missing_key(tollgate::OnMissingKey::Reject);
    let service = layer.layer(service_fn(async |_| Ok::<_, Infallible>(Response::new(Body::empty()))));
    assert_eq!(service.clone().oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(service.oneshot(Request::new(Body::empty())).await.unwrap().status(), 400);
}

/// The key is chosen at run time, and the type of the layer has a name.
#[tokio::test]
async fn boxed_key_makes_a_layer_with_a_nameable_type() {
    type BoxKey = Box<dyn ExtractKey<u32> + Send + Sync>;
    struct App {
        limit: RateLimitLayer<MemoryBackend, BoxKey>,
    }
    for by_job in [false, true] {
        let key: BoxKey = if by_job { Box::new(|job: &u32| *job) } else { Box::new(GlobalKey) };
        let app = App { limit: limit().key(key) };
        let service = app.limit.responder(ErrorResponder).layer(service_fn(async |job: u32| Ok::<_, Infallible>(job)));
        assert_eq!(service.oneshot(7).await.unwrap(), 7);
    }
}

#[test]
fn rejections_have_a_text() {
    fn text<R: std::fmt::Display>(rejection: R) -> String {
        rejection.to_string()
    }
    assert_eq!(text(tollgate::idempotency::Rejection::MissingKey), "the request carries no idempotency key");
    let limited: fn(tollgate::rate_limit::Rejection) -> String = text;
    let fence: fn(tollgate::lock::fencing::Rejection) -> String = text;
    let lock: fn(tollgate::lock::Rejection) -> String = text;
    let _ = (limited, fence, lock);
}

/// The futures of all layers around a closure service are `Send`, which the compiler must be able to prove.
#[tokio::test]
async fn layers_around_a_closure_service_can_be_spawned() {
    let paid =
        service_fn(async |_: Request<FingerprintedBody<Body>>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let once = IdempotencyLayer::new(MemoryBackend::new()).scope(GlobalKey).layer(paid);
    let spawned = tokio::spawn(async move { once.oneshot(request()).await });
    assert_eq!(spawned.await.unwrap().unwrap().status(), 200);

    let handler = service_fn(async |_: Request| Ok::<_, Infallible>(Response::new(Body::empty())));
    let lock = LockLayer::new(MemoryBackend::new(), "payments").key(GlobalKey).layer(limit().layer(handler));
    let spawned = tokio::spawn(async move { lock.oneshot(request()).await });
    assert_eq!(spawned.await.unwrap().unwrap().status(), 200);
}
