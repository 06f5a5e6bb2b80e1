//! Responses as clients read them: statuses, header fields and bodies, with HTTP and with gRPC.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt::Debug;
use std::future::ready;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use prost::Message as _;
use serde_json::{Value, json};
use tollgate::grpc::GrpcResponder;
use tollgate::http::{ClientIp, EXPOSED_HEADERS, PeerAddr, ResponseBody, header, matched_path, peer_ip};
use tollgate::idempotency::IdempotencyHandle;
use tollgate::lock::LeaseHandle;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{
    AnnotateResponse, BurstQuota, Decision, Limit, LimitInfo, LimitStatus, PolicyResolver, RateLimitHandle,
    RateLimited, Receipt, Rejection,
};
use tollgate::responder::{HeaderVersion, NotExecuted, RejectionBody, Responder, UpstreamFields};
use tollgate::{
    ExtractKey, GlobalKey, HttpResponder, IdempotencyLayer, Key, Limiter, LockLayer, MemoryBackend, OnMissingKey,
    Policy, Quota, RateLimitFallback, RateLimitLayer, StoreError, first_of,
};
use tonic_types::StatusExt;
use tower::util::option_layer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const STANDING: HeaderName = HeaderName::from_static("ratelimit");

// Responses, case by case.

#[tokio::test(start_paused = true)]
async fn admitted_request_gets_the_inner_response_and_both_fields() {
    let teapot = service_fn(async |_: Request<()>| {
        let response = Response::builder().status(StatusCode::IM_A_TEAPOT).header("x-brewed-by", "inner");
        Ok::<_, Infallible>(response.body("short and stout".to_owned()).unwrap())
    });
    let service = layer(Quota::per_minute(100).fixed_window()).layer(teapot);
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(answer.body, "short and stout");
    assert_eq!(answer.headers["x-brewed-by"], "inner");
    assert_eq!(answer.headers[POLICY], r#""api";q=100;w=60"#);
    assert_eq!(answer.headers[STANDING], r#""api";r=99;t=60"#);
    assert_eq!(answer.headers.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn denied_request_gets_429_and_retry_after() {
    let service = layer(Quota::per_minute(1).fixed_window()).layer(hello());
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    tokio::time::advance(Duration::from_secs(20)).await;
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.headers[RETRY_AFTER], "40");
    assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
    assert_eq!(answer.headers[STANDING], r#""api";r=0;t=40"#);
    assert_eq!(answer.headers.len(), 4);
    let problem = answer.problem();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["title"], "Request cannot be satisfied as assigned quota has been exceeded");
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["detail"], "rate limit `api` exceeded, try again in 40 s");
    assert_eq!(problem["violated-policies"], json!(["api"]));
}

#[tokio::test(start_paused = true)]
async fn request_above_the_quota_gets_429_without_retry_after() {
    for (limit, cost) in [(5, 6), (0, 1), (0, 0)] {
        let layer = layer(Quota::per_minute(limit).fixed_window()).cost(move |_: &Request<()>| cost);
        let answer = ask(&layer.layer(hello()), request()).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.headers[POLICY], format!(r#""api";q={limit};w=60"#));
        assert_eq!(answer.headers.get(RETRY_AFTER), None, "no wait helps");
        assert_eq!(answer.headers.get(STANDING), None, "the state is unknown");
        let problem = answer.problem();
        assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
        assert_eq!(problem["detail"], "the request exceeds the whole quota of rate limit `api`");
        assert_eq!(problem["violated-policies"], json!(["api"]));
    }
}

#[tokio::test(start_paused = true)]
async fn request_without_key_gets_400() {
    let service = layer(Quota::per_minute(1).fixed_window()).key(header("x-api-key")).layer(hello());
    for request in [request(), with_key(b"")] {
        let answer = ask(&service, request).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
        assert_eq!(answer.headers.len(), 2);
        let detail = "the request carries no key to count it under";
        let blank = json!({"type": "about:blank", "title": "Bad Request", "status": 400, "detail": detail});
        assert_eq!(answer.problem(), blank);
    }
    assert_eq!(ask(&service, with_key(b"k1")).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn denying_store_error_gets_503_and_reveals_no_internals() {
    let layer = RateLimitLayer::new(failing(), api(Quota::per_minute(1).fixed_window()));
    let answer = ask(&layer.on_store_error(RateLimitFallback::Deny).layer(hello()), request()).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers[RETRY_AFTER], "1");
    assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
    assert_eq!(answer.headers.len(), 3);
    let problem = answer.problem();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity");
    assert_eq!(problem["title"], "Request cannot be satisfied due to temporary server capacity constraints");
    assert_eq!(problem["status"], 503);
    assert_eq!(problem["detail"], "temporarily unavailable");
    assert_eq!(problem["violated-policies"], json!([]));
    assert!(!answer.body.contains("hunter2") && !answer.body.contains("10.0.0.1"), "{}", answer.body);
}

#[tokio::test(start_paused = true)]
async fn request_on_the_deny_list_gets_403() {
    let layer = layer(Quota::per_minute(5).fixed_window()).deny(|_: &Request<()>| true);
    let answer = ask(&layer.clone().layer(hello()), request()).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    assert_eq!(answer.headers[POLICY], r#""api";q=5;w=60"#);
    assert_eq!(answer.headers.len(), 2);
    let detail = "the request is not allowed";
    let blank = json!({"type": "about:blank", "title": "Forbidden", "status": 403, "detail": detail});
    assert_eq!(answer.problem(), blank);
    let answer = ask(&layer.responder(GrpcResponder::new()).layer(hello()), request()).await;
    assert_eq!((&answer.headers["grpc-status"], &*answer.body), (&HeaderValue::from_static("7"), ""));
}

#[tokio::test(start_paused = true)]
async fn blocked_key_gets_429_and_an_abnormal_usage_problem() {
    let (half, minute) = (Duration::from_millis(30_500), Duration::from_secs(60));
    let free = LimitStatus::new(5, 5, Duration::ZERO, Duration::ZERO);
    let used_up = LimitStatus::new(5, 0, minute, minute);
    // A blocked key that is also over its limit has to wait for both.
    for (status, wait, violated) in [(free, "31", json!([])), (used_up, "60", json!(["api"]))] {
        let store = Store(move || Ok(Decision::new([status]).blocked(half)));
        let layer = RateLimitLayer::new(store, api(Quota::per_minute(5).fixed_window()));
        let answer = ask(&layer.layer(hello()), request()).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.headers[RETRY_AFTER], wait);
        let problem = answer.problem();
        assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#abnormal-usage-detected");
        assert_eq!(problem["title"], "Request not satisfied due to detection of abnormal request pattern");
        assert_eq!(problem["status"], 429);
        assert_eq!(problem["detail"], format!("blocked by rate limit `api`, try again in {wait} s"));
        assert_eq!(problem["violated-policies"], violated);
    }
}

#[tokio::test(start_paused = true)]
async fn problem_names_the_exceeded_limits() {
    let policy = api(Quota::per_second(1).fixed_window())
        .limit(Quota::per_hour(1).fixed_window())
        .named(r#"the "hourly" \ one"#)
        .limit(Quota::per_day(9).fixed_window());
    let service = RateLimitLayer::new(MemoryBackend::new(), policy).layer(hello());
    let hourly = r#"the%20"hourly"%20\%20one"#;
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    assert_eq!(ask(&service, request()).await.problem()["violated-policies"], json!(["api-1s", hourly]));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(ask(&service, request()).await.problem()["violated-policies"], json!([hourly]));
}

#[tokio::test(start_paused = true)]
async fn problem_names_the_limits_of_all_denying_policies() {
    let per = |name, quota: Quota| Policy::new(name, quota.fixed_window());
    let backend = MemoryBackend::new();
    let user = per("user", Quota::per_minute(2)).limit(Quota::per_hour(2).fixed_window());
    let layer = RateLimitLayer::new(backend.clone(), user)
        .and(per("total", Quota::per_day(3)), GlobalKey)
        .and(per("free", Quota::per_day(9)), GlobalKey)
        .and(per("trial", Quota::per_day(1)).shadow(), GlobalKey)
        .cost(|request: &Request<()>| request.uri().path().len() as u64);
    let service = layer.clone().layer(hello());
    let ask = async |path: &str| ask(&service, Request::get(path).body(()).unwrap()).await;
    let wait_of = |answer: &Answer| answer.retry_after();

    assert_eq!(ask("/2").await.status, StatusCode::OK);
    // Neither the shadow policy nor the policies with quota left are named.
    let answer = ask("/2").await;
    assert_eq!(answer.problem()["violated-policies"], json!(["total", "user-1m", "user-1h"]));
    assert_eq!(answer.problem()["detail"], "rate limit `total` exceeded, try again in 86400 s");
    assert_eq!(wait_of(&answer), Some(86_400));
    // The longer wait decides, whether it is a block or a limit of another policy.
    let total = Limiter::new(backend, per("total", Quota::per_day(3)));
    for (block, wait, policy, kind) in
        [(1_800, 3_600, "user", "quota-exceeded"), (7_200, 7_200, "total", "abnormal-usage-detected")]
    {
        total.block(Key::GLOBAL, Duration::from_secs(block)).await.unwrap();
        let answer = ask("/").await;
        assert_eq!(answer.problem()["violated-policies"], json!(["user-1m", "user-1h"]));
        assert!(answer.problem()["type"].as_str().unwrap().ends_with(kind), "{}", answer.body);
        assert!(answer.problem()["detail"].as_str().unwrap().contains(policy), "{}", answer.body);
        assert_eq!(wait_of(&answer), Some(wait));
    }
    // The same holds for a longer limit of the blocked policy.
    assert_eq!(wait_of(&ask("/2").await), Some(86_400));
    // A request that can never be admitted gets no wait, whatever the other limits say.
    let answer = ask("/3456").await;
    assert_eq!(answer.problem()["violated-policies"], json!(["user-1m", "user-1h", "total"]));
    assert_eq!(wait_of(&answer), None);
}

#[tokio::test(start_paused = true)]
async fn rejections_can_be_plain_text() {
    let plain = HttpResponder::new().body(RejectionBody::PlainText);
    let quota = Quota::per_minute(1).fixed_window();
    let exhausted = layer(Quota::per_minute(0).fixed_window()).responder(plain.clone()).layer(hello());
    let keyless = layer(quota).key(header("x-api-key")).responder(plain.clone()).layer(hello());
    let outage = RateLimitLayer::new(failing(), api(quota)).on_store_error(RateLimitFallback::Deny);
    let outage = outage.responder(plain).layer(hello());
    let cases = [
        (ask(&exhausted, request()).await, 429, "the request exceeds the whole quota of rate limit `api`\n"),
        (ask(&keyless, request()).await, 400, "the request carries no key to count it under\n"),
        (ask(&outage, request()).await, 503, "temporarily unavailable\n"),
    ];
    for (answer, status, body) in cases {
        assert_eq!(answer.status, status);
        assert_eq!(answer.headers[CONTENT_TYPE], "text/plain; charset=utf-8");
        assert_eq!(answer.body, body);
    }
}

#[tokio::test(start_paused = true)]
async fn undecided_request_gets_only_the_policy_field() {
    let quota = Quota::per_minute(1).fixed_window();
    let outage = RateLimitLayer::new(failing(), api(quota)).on_store_error(RateLimitFallback::Allow).layer(hello());
    let keyless = layer(quota).key(header("x-api-key")).on_missing_key(OnMissingKey::Pass).layer(hello());
    for answer in [ask(&outage, request()).await, ask(&keyless, request()).await] {
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.body, "hello");
        assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
        assert_eq!(answer.headers.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn shadow_policy_adds_no_fields_to_uncounted_requests() {
    let policy = Policy::new("api", Quota::per_minute(1).fixed_window()).shadow();
    let layer = RateLimitLayer::new(MemoryBackend::new(), policy).key(header("x-api-key"));
    for on_missing_key in [OnMissingKey::Reject, OnMissingKey::Pass] {
        let answer = ask(&layer.clone().on_missing_key(on_missing_key).layer(hello()), request()).await;
        assert_eq!((answer.status, answer.headers.len()), (StatusCode::OK, 0), "{on_missing_key:?}");
    }
    let answer = ask(&layer.allow(|_: &Request<()>| true).layer(hello()), request()).await;
    assert_eq!((answer.status, answer.headers.len()), (StatusCode::OK, 0));
}

#[tokio::test(start_paused = true)]
async fn error_of_the_inner_service_is_passed_on() {
    let broken = service_fn(|_: Request<()>| ready(Err::<Response<String>, _>("broken")));
    let service = layer(Quota::per_minute(1).fixed_window()).layer(broken);
    assert_eq!(service.clone().oneshot(request()).await.unwrap_err(), "broken");
    let rejected = service.oneshot(request()).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS, "a rejection is a response, not an error");
}

#[tokio::test(start_paused = true)]
async fn rejection_body_has_a_known_length() {
    let service = layer(Quota::per_minute(0).fixed_window()).layer(hello());
    let body = service.oneshot(request()).await.unwrap().into_body();
    assert!(!body.is_end_stream());
    let told = body.size_hint().exact().unwrap();
    assert_eq!(body.collect().await.unwrap().to_bytes().len() as u64, told);
}

#[tokio::test(start_paused = true)]
async fn inner_body_keeps_its_length_and_trailers() {
    let service = layer(Quota::per_minute(1).fixed_window()).layer(service_fn(async |_: Request<()>| {
        let trailers = HeaderMap::from_iter([(HeaderName::from_static("x-checksum"), HeaderValue::from_static("42"))]);
        Ok::<_, Infallible>(Response::new(Full::from("hello").with_trailers(ready(Some(Ok(trailers))))))
    }));
    let body = service.oneshot(request()).await.unwrap().into_body();
    assert_eq!(body.size_hint().exact(), Some(5));
    let body = body.collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x-checksum"], "42");
    assert_eq!(body.to_bytes(), "hello");
}

/// As arguments, and as `Option` if the layer is not in front or passes the request without a handle.
#[tokio::test]
async fn axum_handlers_extract_the_handles_of_layers() {
    async fn all(limit: RateLimitHandle, lease: LeaseHandle, operation: IdempotencyHandle) -> String {
        assert!(lease.fence() > 0 && operation.fence() > 0);
        limit.settle(5);
        format!("{} {}", limit.cost(), operation.attempt())
    }
    async fn some(limit: Option<RateLimitHandle>, lease: Option<LeaseHandle>, of: Option<IdempotencyHandle>) -> String {
        format!("{} {} {}", limit.is_some(), lease.is_some(), of.is_some())
    }
    let backend = MemoryBackend::new();
    let policy = Policy::new("tokens", Quota::per_hour(10).fixed_window());
    let limiter = Limiter::new(backend.clone(), policy.clone());
    let app = Router::new()
        .route("/all", post(all))
        .route("/some", get(some))
        .layer(LockLayer::new(backend.clone(), "requests").key(GlobalKey))
        .layer(IdempotencyLayer::new(backend.clone()).scope(|_: &_| "shop"))
        .layer(RateLimitLayer::new(backend, policy).cost(|_: &_| 2))
        .route("/none", get(some).post(all));
    let answer = async |method, path| {
        let request = Request::builder().method(method).uri(path).header("idempotency-key", "\"8e03978e\"");
        let response = app.clone().oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    assert_eq!(answer("POST", "/all").await, (StatusCode::OK, "2 1".to_owned()));
    let peeked = limiter.peek(Key::GLOBAL).await.unwrap();
    assert_eq!(peeked.limits()[0].remaining(), 5);
    assert_eq!(answer("GET", "/some").await, (StatusCode::OK, "true false false".to_owned()));
    assert_eq!(answer("GET", "/none").await, (StatusCode::OK, "false false false".to_owned()));
    assert_eq!(answer("POST", "/none").await.0, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn disabled_extensions_are_not_added() {
    for extensions in [true, false] {
        let handler = service_fn(move |request: Request<Full<Bytes>>| {
            let left = request.extensions();
            assert_eq!(left.get::<RateLimitHandle>().is_some(), extensions);
            assert_eq!(left.get::<LeaseHandle>().is_some(), extensions);
            ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())))
        });
        let answer = GrpcResponder::new().extensions(extensions);
        let service = ServiceBuilder::new()
            .layer(layer(Quota::per_minute(5).fixed_window()).responder(answer.clone()))
            .layer(LockLayer::new(MemoryBackend::new(), "requests").key(GlobalKey).responder(answer))
            .service(handler);
        let response = service.oneshot(Request::post("/").body(Full::default()).unwrap()).await.unwrap();
        assert_eq!(response.extensions().get::<Decision>().is_some(), extensions);
    }
}

/// As in the docs. By the key alone, each made-up key would have a quota of its own.
#[tokio::test(start_paused = true)]
async fn limit_of_the_address_stops_made_up_keys() {
    let policy = Policy::new("api", Quota::per_minute(10).fixed_window());
    let address = Policy::new("address", Quota::per_minute(30).fixed_window());
    let service = RateLimitLayer::new(MemoryBackend::new(), policy)
        .key(header("x-api-key").or(peer_ip()))
        .and(address, peer_ip())
        .layer(hello());
    let asked = async |peer: &str, key: String| {
        let peer = PeerAddr(peer.parse().unwrap());
        ask(&service, Request::builder().extension(peer).header("x-api-key", key).body(()).unwrap()).await.status
    };
    let mut passed = 0;
    for guess in 0..100 {
        passed += u32::from(asked("203.0.113.7:4711", format!("made-up-{guess}")).await == StatusCode::OK);
    }
    assert_eq!(passed, 30);
    assert_eq!(asked("203.0.113.8:4711", "real".to_owned()).await, StatusCode::OK, "another address has its own quota");
}

#[tokio::test]
async fn matched_path_counts_by_axum_route() {
    let policy = Policy::new("api", Quota::per_hour(2).fixed_window());
    let layer = RateLimitLayer::new(MemoryBackend::new(), policy).key(matched_path());
    let app = Router::new()
        .route("/users/{id}", get(async || ""))
        .nest("/v2", Router::new().route("/users/{id}", get(async || "")))
        .route("/about", get(async || ""))
        .layer(layer.on_missing_key(OnMissingKey::Reject));
    let asked = [
        ("/users/1", 200),
        ("/users/2", 200),
        ("/users/3", 429),
        ("/v2/users/1", 200),
        ("/v2/users/2", 200),
        ("/v2/users/2", 429),
        ("/about", 200),
        ("/nothing", 400),
    ];
    for (path, status) in asked {
        let request = Request::get(path).body(axum::body::Body::empty()).unwrap();
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), status, "{path}");
    }
}

/// Regression: if a part of a key was a header or a route, a handler that had taken the body could not find the key of the layer.
#[tokio::test]
async fn request_parts_have_the_key_of_the_request() {
    let by = (header("x-api-key").or(peer_ip()), matched_path());
    let handler = async move |request: Request<axum::body::Body>| {
        let key = by.extract_key(&request).unwrap();
        let (parts, _) = request.into_parts();
        assert_eq!(by.extract_key(&parts), Some(key));
        key.to_string()
    };
    let app = Router::new().route("/users/{id}", get(handler));
    let call = async |name: &str, value: &str| {
        let peer = PeerAddr("203.0.113.7:80".parse().unwrap());
        let request = Request::get("/users/7").extension(peer).header(name, value);
        let response = app.clone().oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap();
        response.into_body().collect().await.unwrap().to_bytes()
    };
    let route = Key::from("/users/{id}");
    for (name, value, whom) in [
        ("x-api-key", "secret", Key::digest("secret")),
        ("x-api-key", "", Key::from("203.0.113.7").as_fallback()),
        ("x-other", "secret", Key::from("203.0.113.7").as_fallback()),
    ] {
        assert_eq!(call(name, value).await, Key::from((whom, route)).as_str(), "{name}: {value}");
    }
}

#[tokio::test]
async fn exposed_headers_cover_all_added_headers() {
    let limited = layer(Quota::per_minute(1).fixed_window()).layer(hello());
    ask(&limited, request()).await;
    let denied = ask(&limited, request()).await;
    let once = IdempotencyLayer::new(MemoryBackend::new())
        .scope(header("x-api-key"))
        .layer(service_fn(async |_: Request<_>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))));
    let pay = async |key: Option<&str>| {
        let mut request = Request::post("/").header("x-api-key", "k");
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let answer = once.clone().oneshot(request.body(Full::<Bytes>::default()).unwrap()).await.unwrap();
        let (head, body) = answer.into_parts();
        body.collect().await.unwrap();
        head.headers
    };
    pay(Some("k")).await;
    let (replayed, rejected) = (pay(Some("k")).await, pay(None).await);
    let added: BTreeSet<String> = [&denied.headers, &replayed, &rejected]
        .into_iter()
        .flat_map(HeaderMap::keys)
        .map(ToString::to_string)
        .collect();
    let exposed = EXPOSED_HEADERS.iter().chain([&CONTENT_TYPE]).map(ToString::to_string).collect();
    assert_eq!(added, exposed);
}

#[tokio::test]
async fn unmatched_route_counts_by_the_fallback_or_not_at_all() {
    let layer = || RateLimitLayer::new(MemoryBackend::new(), api(Quota::per_hour(2).fixed_window()));
    let routes = || Router::new().route("/users/{id}", get(async || ""));
    let by_address = routes().layer(layer().key(matched_path().or(peer_ip())));
    let of_routes = routes().route_layer(layer().key(matched_path()));
    let asked = [
        ("/nope", [404, 404]),
        ("/nope", [404, 404]),
        ("/users/1", [200, 200]),
        ("/users/2", [200, 200]),
        ("/users/3", [429, 429]),
        ("/neither", [429, 404]),
    ];
    for (path, statuses) in asked {
        for (app, status) in [&by_address, &of_routes].into_iter().zip(statuses) {
            let peer = PeerAddr("203.0.113.7:4711".parse().unwrap());
            let request = Request::get(path).extension(peer).body(axum::body::Body::empty()).unwrap();
            assert_eq!(app.clone().oneshot(request).await.unwrap().status(), status, "{path}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn axum_router_can_be_limited_per_route() {
    let limit = layer(Quota::per_minute(1).fixed_window());
    let app: Router =
        Router::new().route("/limited", get(async || "hello").layer(limit)).route("/free", get(async || "hello"));
    let statuses = async |path: &str| {
        let mut statuses = Vec::new();
        for _ in 0..2 {
            let request = Request::get(path).body(axum::body::Body::empty()).unwrap();
            statuses.push(app.clone().oneshot(request).await.unwrap().status().as_u16());
        }
        statuses
    };
    assert_eq!(statuses("/limited").await, [200, 429]);
    assert_eq!(statuses("/free").await, [200, 200]);
}

/// Around a router with an unchanged body type, so that `option_layer` can leave the layer out.
#[tokio::test(start_paused = true)]
async fn whole_axum_router_can_be_limited_by_a_setting() {
    let limit = layer(Quota::per_minute(1).fixed_window()).responder(HttpResponder::new().same_body());
    for is_limited in [true, false] {
        let router = Router::new().route("/", get(async || "hello"));
        let app = option_layer(is_limited.then_some(limit.clone())).layer(router);
        let ask = async |path: &str| {
            let request = Request::get(path).body(axum::body::Body::empty()).unwrap();
            let response: axum::response::Response = app.clone().oneshot(request).await.unwrap();
            let (head, body) = response.into_parts();
            let length = body.size_hint().exact();
            let body = String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap();
            assert_eq!(length, Some(body.len() as u64));
            Answer { status: head.status, headers: head.headers, body }
        };
        let first = ask("/").await;
        assert_eq!((first.status, &*first.body), (StatusCode::OK, "hello"));
        assert_eq!(first.headers.contains_key(STANDING), is_limited);
        let second = ask("/nowhere").await;
        if is_limited {
            assert_eq!(second.status, StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(second.headers[STANDING], r#""api";r=0;t=60"#);
            assert_eq!(second.problem()["violated-policies"], json!(["api"]));
        } else {
            assert_eq!((second.status, &*second.body), (StatusCode::NOT_FOUND, ""));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn same_body_keeps_a_custom_body_type() {
    struct Mine(Box<dyn Body<Data = Bytes, Error = Infallible> + Send + Unpin>);

    impl Body for Mine {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Pin::new(&mut *self.0).poll_frame(cx)
        }
    }

    impl From<ResponseBody<Self>> for Mine {
        fn from(body: ResponseBody<Self>) -> Self {
            Self(Box::new(body))
        }
    }

    let handler =
        service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(Mine(Box::new(Full::from("hello"))))));
    let limit = layer(Quota::per_minute(1).fixed_window()).responder(HttpResponder::new().same_body());
    let service = option_layer(Some(limit)).layer(handler);
    assert_eq!(ask(&service, request()).await.body, "hello");
    let second = ask(&service, request()).await;
    assert_eq!(second.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(second.problem()["violated-policies"], json!(["api"]));
}

// Times.

#[tokio::test(start_paused = true)]
async fn waits_are_rounded_up_and_never_0() {
    let cases: [(u64, &[(u64, i64)]); 3] = [
        (10, &[(0, 1), (9, 1)]),
        (1_500, &[(0, 2), (499, 2), (500, 1), (501, 1), (1_499, 1)]),
        (60_000, &[(0, 60), (1, 60), (999, 60), (1_000, 59), (1_001, 59), (59_000, 1), (59_999, 1)]),
    ];
    for (window, cases) in cases {
        let quota = Quota::new(1, Duration::from_millis(window)).unwrap();
        for limit in [quota.fixed_window(), quota.sliding_log().unwrap()] {
            for &(elapsed, seconds) in cases {
                let service = layer(limit).layer(hello());
                assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
                tokio::time::advance(Duration::from_millis(elapsed)).await;
                let answer = ask(&service, request()).await;
                assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
                let told = (answer.retry_after(), answer.standing()[0].parameter("t"));
                assert_eq!(told, (Some(seconds), Some(seconds)), "{elapsed} ms into {limit:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn wait_of_any_store_is_rounded_up_and_never_0() {
    let cases = [(0, 1, 1), (0, 999_999_999, 1), (1, 0, 1), (1, 1, 2), (59, 1, 60)];
    for (secs, nanos, seconds) in cases {
        let wait = Duration::new(secs, nanos);
        let store = Store(move || Ok(Decision::new([LimitStatus::new(5, 2, wait, wait)])));
        let service = RateLimitLayer::new(store, api(Quota::per_minute(5).fixed_window())).layer(hello());
        let answer = ask(&service, request()).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.retry_after(), Some(seconds), "{wait:?}");
        assert_eq!(answer.standing()[0].parameter("r"), Some(2));
    }
}

#[tokio::test(start_paused = true)]
async fn request_after_the_announced_wait_is_admitted() {
    for (millis, units) in [(10, 1), (1_500, 3), (60_000, 2)] {
        let quota = Quota::new(units, Duration::from_millis(millis)).unwrap();
        for limit in [quota.fixed_window(), quota.sliding_log().unwrap()] {
            let service = layer(limit).layer(hello());
            for _ in 0..units {
                assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
                tokio::time::advance(Duration::from_millis(3)).await;
            }
            let wait = ask(&service, request()).await.retry_after().unwrap();
            tokio::time::advance(Duration::from_secs(wait.unsigned_abs())).await;
            assert_eq!(ask(&service, request()).await.status, StatusCode::OK, "{limit:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn window_is_announced_only_in_whole_seconds() {
    let cases = [
        (Duration::from_millis(10), None),
        (Duration::from_millis(999), None),
        (Duration::from_millis(1_500), None),
        (Duration::new(1, 1), None),
        (Duration::from_secs(1), Some(1)),
        (Duration::from_secs(60), Some(60)),
        (Duration::from_secs(86_400), Some(86_400)),
        (Quota::MAX_WINDOW, Some(316_224_000)),
    ];
    for (window, told) in cases {
        let service = layer(Quota::new(7, window).unwrap().fixed_window()).layer(hello());
        let answer = ask(&service, request()).await;
        assert_eq!(answer.policies()[0].parameter("w"), told, "{window:?}");
        assert_eq!(answer.policies()[0].parameter("q"), Some(7));
    }
}

#[tokio::test(start_paused = true)]
async fn full_quota_has_no_reset() {
    let service = layer(Quota::per_minute(5).fixed_window()).cost(|_: &Request<()>| 0).layer(hello());
    assert_eq!(ask(&service, request()).await.headers[STANDING], r#""api";r=5"#);
}

// Fields as structured fields.

#[tokio::test(start_paused = true)]
async fn fields_are_lists_of_a_string_with_integers() {
    let service = layer(Quota::per_minute(u32::MAX.into()).fixed_window()).layer(hello());
    let answer = ask(&service, request()).await;
    assert_eq!(answer.policies(), [Member::of("api", &[("q", 4_294_967_295), ("w", 60)])]);
    assert_eq!(answer.standing(), [Member::of("api", &[("r", 4_294_967_294), ("t", 60)])]);
}

#[tokio::test(start_paused = true)]
async fn any_policy_name_makes_fields_that_parse() {
    let long = "x".repeat(1 << 16);
    let digest = Policy::new(&long, Quota::per_second(1).fixed_window()).name().to_owned();
    assert!(digest.starts_with('#'), "{digest}");
    let names = [
        ("plain", "plain"),
        ("", ""),
        (r#"say "hi""#, r#"say%20"hi""#),
        (r"back\slash\", r"back\slash\"),
        ("a;q=1, b", "a;q=1%2C%20b"),
        ("per tenant", "per%20tenant"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("🚦", "%F0%9F%9A%A6"),
        ("line\r\nbreak\0", "line%0D%0Abreak%00"),
        (&long, &digest),
    ];
    for (name, told) in names {
        let policy = Policy::new(name, Quota::per_second(2).fixed_window());
        let service = RateLimitLayer::new(MemoryBackend::new(), policy).layer(hello());
        let answer = ask(&service, request()).await;
        assert_eq!(answer.policies(), [Member::of(told, &[("q", 2), ("w", 1)])]);
        assert_eq!(answer.standing(), [Member::of(told, &[("r", 1), ("t", 1)])]);
    }
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_add_a_member_each() {
    let named = |name, quota: Quota| RateLimitLayer::new(MemoryBackend::new(), Policy::new(name, quota.fixed_window()));
    let service = ServiceBuilder::new()
        .layer(named("outer", Quota::per_hour(3)))
        .layer(named("inner", Quota::per_minute(2)))
        .service(hello());
    let (outer, inner) = (&[("q", 3), ("w", 3_600)], &[("q", 2), ("w", 60)]);

    // Both layers admit the request.
    for left in [1, 0] {
        let answer = ask(&service, request()).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.policies(), [Member::of("inner", inner), Member::of("outer", outer)]);
        let standing =
            [Member::of("inner", &[("r", left), ("t", 60)]), Member::of("outer", &[("r", left + 1), ("t", 3_600)])];
        assert_eq!(answer.standing(), standing);
    }
    // The inner layer denies the request. The outer layer has admitted it, and adds its fields.
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.retry_after(), Some(60));
    assert_eq!(answer.policies(), [Member::of("inner", inner), Member::of("outer", outer)]);
    let standing = [Member::of("inner", &[("r", 0), ("t", 60)]), Member::of("outer", &[("r", 0), ("t", 3_600)])];
    assert_eq!(answer.standing(), standing);
    // The outer layer denies the request, so the inner layer is not called.
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.retry_after(), Some(3_600));
    assert_eq!(answer.policies(), [Member::of("outer", outer)]);
    assert_eq!(answer.standing(), [Member::of("outer", &[("r", 0), ("t", 3_600)])]);
}

proptest! {
    #[test]
    fn fields_parse_for_any_policy(
        name in prop::collection::vec(any::<char>(), 0..80),
        limit in some_units(),
        window in prop_oneof![
            (1_u64..316_224_000).prop_map(Duration::from_secs),
            (10_000_u64..316_224_000_000_000).prop_map(Duration::from_micros),
            (10_000_000_u64..5_000_000_000).prop_map(Duration::from_nanos),
        ],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let name = String::from_iter(name);
            let policy = Policy::new(&name, Quota::new(limit, window).unwrap().fixed_window());
            // The first request uses the whole quota.
            let service = RateLimitLayer::new(MemoryBackend::new(), policy.clone())
                .cost(move |_: &Request<()>| limit)
                .layer(hello());
            let [first, second] = [ask(&service, request()).await, ask(&service, request()).await];

            let whole_seconds = (window.subsec_nanos() == 0).then_some(window.as_secs() as i64);
            let rounded_up = (window.as_nanos().div_ceil(1_000_000_000)) as i64;
            let told = [("q", Some(limit.min(999_999_999_999_999) as i64)), ("w", whole_seconds)];
            let told: Vec<_> = told.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
            for answer in [&first, &second] {
                prop_assert_eq!(answer.policies(), [Member::of(policy.name(), &told)]);
                if limit == 0 {
                    prop_assert_eq!(answer.headers.get(STANDING), None);
                } else {
                    prop_assert_eq!(answer.standing(), [Member::of(policy.name(), &[("r", 0), ("t", rounded_up)])]);
                }
            }
            prop_assert_eq!(first.status.is_success(), limit > 0);
            prop_assert_eq!(second.status, StatusCode::TOO_MANY_REQUESTS);
            prop_assert_eq!(second.retry_after(), (limit > 0).then_some(rounded_up));
            Ok(())
        })?;
    }
}

// Versions of the fields.

/// Three limits: the second one is tighter than the first, and the window of the third one cannot be announced.
fn three_limits() -> (Policy, Decision) {
    let odd = Quota::new(7, Duration::from_millis(1_500)).unwrap();
    let policy = api(Quota::per_second(10).fixed_window())
        .limit(Quota::per_hour(1_000).sliding_window())
        .limit(odd.fixed_window());
    let decision = Decision::new([
        LimitStatus::new(10, 9, Duration::ZERO, Duration::from_millis(900)),
        LimitStatus::new(1_000, 3, Duration::ZERO, Duration::from_millis(1_800_001)),
        LimitStatus::new(7, 7, Duration::ZERO, Duration::ZERO),
    ]);
    (policy, decision)
}

#[test]
fn each_version_has_its_own_fields() {
    use HeaderVersion::{Draft6, Draft7, Draft10, LegacyDelta};

    let (policy, decision) = three_limits();
    let newest = [
        ("ratelimit-policy", r#""api-1s";q=10;w=1, "api-1h";q=1000;w=3600, "api-1500ms";q=7"#),
        ("ratelimit", r#""api-1s";r=9;t=1, "api-1h";r=3;t=1801, "api-1500ms";r=7"#),
    ];
    let old_policy = ("ratelimit-policy", "10;w=1, 1000;w=3600, 7");
    let draft_7 = [old_policy, ("ratelimit", "limit=1000, remaining=3, reset=1801")];
    let draft_6 = [("ratelimit-limit", "1000"), ("ratelimit-remaining", "3"), ("ratelimit-reset", "1801")];
    let legacy = [("x-ratelimit-limit", "1000"), ("x-ratelimit-remaining", "3"), ("x-ratelimit-reset", "1801")];

    let cases: [(&[HeaderVersion], Vec<_>); 10] = [
        (&[], vec![]),
        (&[Draft10], newest.to_vec()),
        (&[Draft7], draft_7.to_vec()),
        (&[Draft6], [&[old_policy][..], &draft_6].concat()),
        (&[LegacyDelta], legacy.to_vec()),
        (&[Draft10, LegacyDelta], [&newest[..], &legacy].concat()),
        (&[LegacyDelta, Draft10], [&newest[..], &legacy].concat()),
        (&[Draft6, Draft7], [&draft_7[..], &draft_6].concat()),
        (&[Draft10, Draft7], newest.to_vec()),
        (&[Draft10, Draft6], [&newest[..], &draft_6].concat()),
    ];
    for (versions, expected) in cases {
        let answer = HttpResponder::new().headers(versions.iter().copied());
        let headers = announced(&answer, &[LimitInfo::of(&policy, &Key::from("k1"), Some(&decision))]);
        assert_eq!(lines(&headers), expected, "{versions:?}");
    }
    let default = announced(&HttpResponder::default(), &[LimitInfo::of(&policy, &Key::from("k1"), Some(&decision))]);
    assert_eq!(lines(&default), newest);
}

#[test]
fn older_fields_parse_as_what_their_drafts_say() {
    let (policy, decision) = three_limits();
    let answer = HttpResponder::new().headers([HeaderVersion::Draft7]);
    let headers = announced(&answer, &[LimitInfo::of(&policy, &Key::from("k1"), Some(&decision))]);
    let dictionary = sfv::Parser::new(headers[STANDING].as_bytes()).parse::<sfv::Dictionary>().unwrap();
    let mut again = sfv::DictSerializer::new();
    for (key, number) in [("limit", 1_000), ("remaining", 3), ("reset", 1_801)] {
        let _ = again.bare_item(sfv::KeyRef::from_str(key).unwrap(), sfv::Integer::from(number));
    }
    assert_eq!(dictionary.len(), 3);
    assert_eq!(headers[STANDING], again.finish().unwrap());
    let list = sfv::Parser::new(headers[POLICY].as_bytes()).parse::<sfv::List>().unwrap();
    assert_eq!(list.len(), 3);
}

#[test]
fn legacy_reset_is_0_for_a_full_quota_and_absent_if_unknown() {
    use HeaderVersion::{Draft6, LegacyDelta};

    let policy = api(Quota::per_minute(5).fixed_window());
    let answer = HttpResponder::new().headers([Draft6, LegacyDelta]);
    let whole = Decision::new([LimitStatus::new(5, 5, Duration::ZERO, Duration::ZERO)]);
    let headers = announced(&answer, &[LimitInfo::of(&policy, &Key::from("k1"), Some(&whole))]);
    assert_eq!(
        (&headers["ratelimit-reset"], &headers["x-ratelimit-reset"]),
        (&"0".parse().unwrap(), &"0".parse().unwrap())
    );

    let never = Decision::never([5]);
    for decision in [None, Some(&never)] {
        let headers = announced(&answer, &[LimitInfo::of(&policy, &Key::from("k1"), decision)]);
        assert_eq!(lines(&headers), [("ratelimit-policy", "5;w=60")]);
    }
}

#[test]
fn last_legacy_version_decides_the_form_of_the_reset() {
    use HeaderVersion::{LegacyDelta, LegacyEpoch};

    let policy = api(Quota::per_minute(5).fixed_window());
    let decision = Decision::new([LimitStatus::new(5, 4, Duration::ZERO, Duration::from_millis(9_500))]);
    let reset = |versions: &[HeaderVersion]| {
        let answer = HttpResponder::new().headers(versions.iter().copied());
        let headers = announced(&answer, &[LimitInfo::of(&policy, &Key::from("k1"), Some(&decision))]);
        headers["x-ratelimit-reset"].to_str().unwrap().parse::<u64>().unwrap()
    };
    for versions in [&[LegacyEpoch][..], &[LegacyDelta, LegacyEpoch]] {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let told = reset(versions);
        let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let ready = Duration::from_millis(9_500);
        assert!(Duration::from_secs(told) >= before + ready, "not before the reset");
        assert!(Duration::from_secs(told) < after + ready + Duration::from_secs(1), "at most a second after the reset");
    }
    assert_eq!(reset(&[LegacyEpoch, LegacyDelta]), 10);
}

#[test]
fn tightest_of_stacked_layers_sets_single_values() {
    use HeaderVersion::{Draft6, Draft7, LegacyDelta};

    let key = Key::from("k1");
    let known = |name: &str, remaining: u64, reset: u64| {
        let status = LimitStatus::new(9, remaining, Duration::ZERO, Duration::from_secs(reset));
        (Policy::new(name, Quota::per_minute(9).fixed_window()), Decision::new([status]))
    };
    let cases = [
        ([known("inner", 5, 10), known("outer", 3, 20)], ("3", "20")),
        ([known("inner", 3, 20), known("outer", 5, 10)], ("3", "20")),
        ([known("inner", 3, 20), known("outer", 3, 10)], ("3", "20")),
        ([known("inner", 3, 10), known("outer", 3, 20)], ("3", "20")),
        ([known("inner", 9, 10), known("outer", 10, 20)], ("9", "10")),
    ];
    for (stack, (remaining, reset)) in cases {
        let standings = [0, 1].map(|i| LimitInfo::of(&stack[i].0, &key, Some(&stack[i].1)));
        let headers = announced(&HttpResponder::new().headers([Draft6, Draft7, LegacyDelta]), &standings);
        let expected = [
            ("ratelimit-policy", "9;w=60"),
            ("ratelimit-policy", "9;w=60"),
            ("ratelimit", &*format!("limit=9, remaining={remaining}, reset={reset}")),
            ("ratelimit-limit", "9"),
            ("ratelimit-remaining", remaining),
            ("ratelimit-reset", reset),
            ("x-ratelimit-limit", "9"),
            ("x-ratelimit-remaining", remaining),
            ("x-ratelimit-reset", reset),
        ];
        assert_eq!(lines(&headers), expected);
    }
    // A value that is not a number does not come from a layer, and is replaced.
    let mut headers = HeaderMap::new();
    headers.insert("x-ratelimit-remaining", HeaderValue::from_static("plenty"));
    let (policy, decision) = known("api", 5, 10);
    HttpResponder::new()
        .headers([LegacyDelta])
        .write_headers(&LimitInfo::of(&policy, &key, Some(&decision)), &mut headers);
    assert_eq!(headers["x-ratelimit-remaining"], "5");
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_of_several_limits_add_a_line_each() {
    let named = |name: &str, limit: u64| {
        let policy = Policy::new(name, Quota::per_second(limit).fixed_window());
        RateLimitLayer::new(MemoryBackend::new(), policy.limit(Quota::per_hour(100).fixed_window()))
    };
    let service = ServiceBuilder::new().layer(named("outer", 5)).layer(named("inner", 1)).service(hello());
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.retry_after(), Some(1));
    let expected = [r#""inner-1s";q=1;w=1, "inner-1h";q=100;w=3600"#, r#""outer-1s";q=5;w=1, "outer-1h";q=100;w=3600"#];
    assert_eq!(answer.headers.get_all(POLICY).iter().collect::<Vec<_>>(), expected);
    let expected = [r#""inner-1s";r=0;t=1, "inner-1h";r=99;t=3600"#, r#""outer-1s";r=3;t=1, "outer-1h";r=98;t=3600"#];
    assert_eq!(answer.headers.get_all(STANDING).iter().collect::<Vec<_>>(), expected);
}

#[test]
fn burst_is_announced_with_its_fill_time() {
    let told = |limit: u64, burst: u64| {
        let policy = api(Quota::per_second(limit).burst(burst).unwrap().token_bucket());
        announced(&HttpResponder::new(), &[LimitInfo::new(&policy)])[POLICY].to_str().unwrap().to_owned()
    };
    assert_eq!(told(10, 10), r#""api";q=10;w=1"#);
    assert_eq!(told(10, 300), r#""api";q=300;w=30"#);
    assert_eq!(told(10, 25), r#""api";q=25"#);
}

// Waits.

#[tokio::test(start_paused = true)]
async fn violated_limit_announces_no_time_after_retry_after() {
    // This store reports a reset that is far later than the end of the wait.
    let (soon, late) = (Duration::from_millis(1_200), Duration::from_secs(50));
    let store = Store(move || {
        Ok(Decision::new([LimitStatus::new(5, 0, soon, late), LimitStatus::new(9, 4, Duration::ZERO, late)]))
    });
    let policy = api(Quota::per_minute(5).fixed_window()).limit(Quota::per_minute(9).fixed_window()).named("other");
    for version in [HeaderVersion::Draft10, HeaderVersion::Draft7] {
        let answer = HttpResponder::new().headers([version]);
        let service = RateLimitLayer::new(store.clone(), policy.clone()).responder(answer).layer(hello());
        let answer = ask(&service, request()).await;
        assert_eq!(answer.retry_after(), Some(2));
        let expected = match version {
            HeaderVersion::Draft10 => r#""api-1m";r=0;t=2, "other";r=4;t=50"#,
            _ => "limit=5, remaining=0, reset=2",
        };
        assert_eq!(answer.headers[STANDING], expected);
    }
}

#[tokio::test(start_paused = true)]
async fn jitter_spreads_waits_and_never_shortens_them() {
    let wait = Duration::from_millis(2_500);
    let store = Store(move || Ok(Decision::new([LimitStatus::new(5, 0, wait, wait)])));
    let policy = api(Quota::per_minute(5).fixed_window());
    let jittery = HttpResponder::new().retry_jitter(Duration::from_millis(4_900));
    let service = RateLimitLayer::new(store.clone(), policy.clone()).responder(jittery.clone()).layer(hello());
    let mut told = BTreeSet::new();
    for _ in 0..500 {
        let answer = ask(&service, request()).await;
        let seconds = answer.retry_after().unwrap();
        assert_eq!(answer.headers[STANDING], r#""api";r=0;t=3"#, "jitter does not change the field");
        assert_eq!(answer.problem()["detail"], format!("rate limit `api` exceeded, try again in {seconds} s"));
        told.insert(seconds);
    }
    assert_eq!(told.into_iter().collect::<Vec<_>>(), [3, 4, 5, 6, 7]);

    let outage = RateLimitLayer::new(failing(), policy.clone()).on_store_error(RateLimitFallback::Deny);
    let outage = outage.responder(jittery.clone()).layer(hello());
    let mut told = BTreeSet::new();
    for _ in 0..500 {
        told.insert(ask(&outage, request()).await.retry_after().unwrap());
    }
    assert_eq!(told.into_iter().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);

    let never = layer(Quota::per_minute(0).fixed_window()).responder(jittery).layer(hello());
    assert_eq!(ask(&never, request()).await.retry_after(), None, "no wait helps, with or without jitter");
    let short = HttpResponder::new().retry_jitter(Duration::from_millis(999));
    let service = RateLimitLayer::new(store.clone(), policy.clone()).responder(short).layer(hello());
    assert_eq!(ask(&service, request()).await.retry_after(), Some(3));
    let endless = HttpResponder::new().retry_jitter(Duration::MAX);
    let service = RateLimitLayer::new(store, policy).responder(endless).layer(hello());
    assert!(ask(&service, request()).await.headers[RETRY_AFTER].to_str().unwrap().parse::<u64>().unwrap() >= 3);
}

#[test]
fn wait_of_any_length_makes_fields_that_parse() {
    let policy = api(Quota::per_minute(5).fixed_window());
    let endless = Decision::new([LimitStatus::new(5, 0, Duration::MAX, Duration::MAX)]);
    let headers = announced(&HttpResponder::new(), &[LimitInfo::of(&policy, &Key::from("k1"), Some(&endless))]);
    assert_eq!(Member::list(&headers, &STANDING), [Member::of("api", &[("r", 0), ("t", 18_446_744_073_710)])]);
    let legacy = HttpResponder::new().headers([HeaderVersion::LegacyEpoch]);
    let headers = announced(&legacy, &[LimitInfo::of(&policy, &Key::from("k1"), Some(&endless))]);
    let reset: u64 = headers["x-ratelimit-reset"].to_str().unwrap().parse().unwrap();
    assert!(reset > 18_446_744_073_710, "{reset}");
}

// Partition keys.

const SECRET: &[u8] = b"0123456789abcdef";

#[test]
fn partition_key_is_a_keyed_digest_in_both_fields() {
    let (policy, decision) = three_limits();
    let answer = HttpResponder::new().partition_secret(SECRET);
    let key = Key::from("203.0.113.7");
    let headers = announced(&answer, &[LimitInfo::of(&policy, &key, Some(&decision))]);
    // HMAC-SHA-256, calculated independently.
    let pk = "pk=:4l56oV8Y55o/0CqPo1sRwg==:";
    let policies = format!(r#""api-1s";q=10;w=1;{pk}, "api-1h";q=1000;w=3600;{pk}, "api-1500ms";q=7;{pk}"#);
    assert_eq!(headers[POLICY], policies);
    assert_eq!(headers[STANDING], format!(r#""api-1s";r=9;t=1;{pk}, "api-1h";r=3;t=1801;{pk}, "api-1500ms";r=7;{pk}"#));
    // Once more: the digest is not random, and no state of one client remains for the next.
    let other = announced(&answer, &[LimitInfo::of(&policy, &Key::from("203.0.113.8"), Some(&decision))]);
    assert!(other[STANDING].to_str().unwrap().contains("pk=:AY2RnhXIUd2u3QGDTe9vHg==:"));
    assert_eq!(announced(&answer, &[LimitInfo::of(&policy, &key, Some(&decision))]), headers);
    // A request without a key gets no partition key.
    let keyless = announced(&answer, &[LimitInfo::new(&policy)]);
    assert_eq!(
        lines(&keyless),
        [("ratelimit-policy", r#""api-1s";q=10;w=1, "api-1h";q=1000;w=3600, "api-1500ms";q=7"#)]
    );
}

#[test]
fn partition_key_depends_on_key_and_secret_and_shows_neither() {
    let policy = api(Quota::per_minute(5).fixed_window());
    let pk = |secret: &[u8], key: &str| {
        let answer = HttpResponder::new().partition_secret(secret);
        let debug = format!("{answer:?}");
        assert!(!debug.contains("48, 49, 50") && !debug.contains("0123456789"), "{debug}");
        let headers = announced(&answer, &[LimitInfo::of(&policy, &Key::from(key), None)]);
        assert!(!headers[POLICY].to_str().unwrap().contains(key));
        let list = sfv::Parser::new(headers[POLICY].as_bytes()).parse::<sfv::List>().unwrap();
        let sfv::ListEntry::Item(item) = &list[0] else { panic!("{list:?}") };
        let pk = item.params["pk"].as_byte_sequence().unwrap().to_vec();
        assert_eq!(pk.len(), 16);
        assert!(!key.as_bytes().starts_with(&pk));
        pk
    };
    let all: BTreeSet<_> = [
        pk(SECRET, "203.0.113.7"),
        pk(SECRET, "203.0.113.8"),
        pk(SECRET, "a key that is longer than 16 bytes"),
        pk(b"0123456789abcdeg", "203.0.113.7"),
        pk(b"0123456789abcdef0", "203.0.113.7"),
    ]
    .into();
    assert_eq!(all.len(), 5, "all different");
}

#[test]
#[should_panic(expected = "at least 16 bytes")]
fn empty_partition_secret_is_rejected() {
    let _ = HttpResponder::new().partition_secret("");
}

/// Regression: a block under a key that differs from the key of the layer had no effect, and no error.
#[tokio::test]
async fn limiter_accepts_the_key_that_a_layer_counts_by() {
    let (backend, policy) = (MemoryBackend::new(), Policy::new("test", Quota::per_hour(10).fixed_window()));
    let limiter = Limiter::new(backend.clone(), policy.clone());
    let service = RateLimitLayer::new(backend, policy).key(header("x-api-key").or(peer_ip())).layer(service_fn(
        async |request: Request<()>| {
            let handle = request.extensions().get::<RateLimitHandle>().unwrap();
            Ok::<_, Infallible>(Response::new(handle.key().unwrap().to_string()))
        },
    ));
    let call = async |request: Request<()>| {
        let response = service.clone().oneshot(request).await.unwrap();
        (response.status(), response.into_body().collect().await.unwrap().to_bytes())
    };
    let with_key = || Request::get("/").header("x-api-key", "secret").body(()).unwrap();
    let with_peer = || Request::get("/").extension(PeerAddr("[2001:db8::1]:80".parse().unwrap())).body(()).unwrap();
    for (request, key) in [
        (&with_key as &dyn Fn() -> Request<()>, Key::digest("secret")),
        (&with_peer, Key::from("2001:db8::").as_fallback()),
    ] {
        let (status, told) = call(request()).await;
        assert_eq!((status, &told[..]), (StatusCode::OK, key.as_str().as_bytes()));
        limiter.block(key, Duration::from_secs(60)).await.unwrap();
        assert_eq!(call(request()).await.0, StatusCode::TOO_MANY_REQUESTS);
        limiter.reset(key).await.unwrap();
        assert_eq!(call(request()).await.0, StatusCode::OK);
    }
}

/// Regression: only layers could write the rate limit fields.
#[tokio::test(start_paused = true)]
async fn handler_responds_to_a_denial_like_a_layer() {
    let policy =
        || Policy::new("log-in", Quota::per_minute(1).fixed_window()).limit(Quota::per_hour(1).sliding_window());
    let limiter = Limiter::new(MemoryBackend::new(), policy());
    assert!(limiter.try_acquire("alice").await.unwrap());
    let decision = limiter.check("alice").await.unwrap();
    let limited = RateLimited::of(limiter.policy(), 1, decision).unwrap();

    let compare = async |of_layer: Response<ResponseBody<String>>, of_handler: Response<ResponseBody>| {
        assert_eq!(of_handler.status(), of_layer.status());
        assert_eq!(of_handler.headers(), of_layer.headers());
        let left = |extensions: &Extensions| extensions.get::<Decision>().cloned();
        assert_eq!(left(of_handler.extensions()), left(of_layer.extensions()));
        // Only the handler knows whether anything was done before.
        let nothing_done = |extensions: &Extensions| extensions.get::<NotExecuted>().is_some();
        assert_eq!((nothing_done(of_handler.extensions()), nothing_done(of_layer.extensions())), (false, true));
        let [of_handler, of_layer] = [of_handler.into_body().collect().await, of_layer.into_body().collect().await];
        assert_eq!(of_handler.unwrap().to_bytes(), of_layer.unwrap().to_bytes());
    };
    let every = [HeaderVersion::Draft10, HeaderVersion::Draft6, HeaderVersion::LegacyDelta];
    let response = HttpResponder::new();
    for answer in [
        response.clone(),
        response.clone().partition_secret(SECRET),
        response.clone().headers(every).body(RejectionBody::PlainText).extensions(false),
        response.headers([]).extensions(false),
    ] {
        compare(second_of(policy(), answer.clone()).await, answer.respond_to(&limited, "alice")).await;
    }
    let status = GrpcResponder::new();
    for answer in
        [status.clone(), status.clone().partition_secret(SECRET).headers(every), status.headers([]).extensions(false)]
    {
        compare(second_of(policy(), answer.clone()).await, answer.respond_to(&limited, "alice")).await;
    }
    let told = HttpResponder::new().respond_to(&limited, "alice");
    assert!([RETRY_AFTER, POLICY, STANDING].iter().all(|field| told.headers().contains_key(field)));
}

/// The response to the second of two requests.
async fn second_of<A>(policy: Policy, answer: A) -> Response<ResponseBody<String>>
where
    A: Responder<
            Rejection,
            Response<String>,
            Infallible,
            Response = Response<ResponseBody<String>>,
            Error = Infallible,
        > + AnnotateResponse<Request<()>, Response<ResponseBody<String>>>
        + Clone,
{
    let layer = RateLimitLayer::new(MemoryBackend::new(), policy).key(|_: &Request<()>| "alice");
    let service = layer.responder(answer).layer(hello());
    service.clone().oneshot(request()).await.unwrap();
    service.oneshot(request()).await.unwrap()
}

proptest! {
    #[test]
    fn fields_are_byte_for_byte_what_sfv_writes(
        name in prop::collection::vec(prop_oneof![any::<char>(), prop::char::range(' ', '~')], 0..60),
        limits in prop::collection::vec(some_limit(), 1..=5),
        statuses in prop::collection::vec((some_units(), some_wait(), some_wait()), 5),
        with_pk in any::<bool>(),
    ) {
        let mut policy = Policy::new(String::from_iter(name), limits[0].0);
        if let Some(name) = &limits[0].1 {
            policy = policy.named(name);
        }
        for (limit, name) in &limits[1..] {
            policy = policy.limit(*limit);
            if let Some(name) = name {
                policy = policy.named(name);
            }
        }
        let status = |(remaining, retry, reset): &(u64, Duration, Duration)| LimitStatus::new(Quota::MAX_UNITS, *remaining, *retry, *reset);
        let decision = Decision::new(statuses[..limits.len()].iter().map(status));
        let key = Key::from("203.0.113.7");
        let mut answer = HttpResponder::new();
        let mut pk = None;
        if with_pk {
            answer = answer.partition_secret(SECRET);
            pk = Some(base64_of_the_first_key());
        }
        let headers = announced(&answer, &[LimitInfo::of(&policy, &key, Some(&decision))]);

        let whole = |wait: Duration| wait.as_nanos().div_ceil(1_000_000_000) as i64;
        // Structured fields have no larger integers.
        let shown = |units: u64| units.min(999_999_999_999_999) as i64;
        let policies = policy.limit_names().zip(policy.limits()).map(|(name, limit)| {
            let is_told = limit.period().subsec_nanos() == 0 && !limit.period().is_zero();
            let window = is_told.then(|| whole(limit.period()));
            (name, [("q", Some(shown(limit.capacity()))), ("w", window)])
        });
        prop_assert_eq!(&headers[POLICY], &written_by_sfv(policies, pk.as_deref()));
        let standings = policy.limit_names().zip(decision.limits()).map(|(name, status)| {
            let more = status.retry_after().unwrap_or(Duration::MAX).min(status.reset_after());
            (name, [("r", Some(shown(status.remaining()))), ("t", Some(whole(more)).filter(|t| *t > 0))])
        });
        prop_assert_eq!(&headers[STANDING], &written_by_sfv(standings, pk.as_deref()));

        // The field is the same after it is parsed and written again.
        for field in [POLICY, STANDING] {
            let list = sfv::Parser::new(headers[&field].as_bytes()).parse::<sfv::List>().unwrap();
            prop_assert_eq!(list.len(), limits.len());
            prop_assert_eq!(&headers[&field], &sfv::FieldType::serialize(&list).unwrap());
        }
    }
}

fn some_units() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u32>().prop_map(u64::from), 0..3_u64, 0..=Quota::MAX_UNITS]
}

fn some_limit() -> impl Strategy<Value = (Limit, Option<String>)> {
    let window = prop_oneof![
        (1_u64..316_224_000).prop_map(Duration::from_secs),
        (10_000_u64..316_224_000_000_000).prop_map(Duration::from_micros),
        (10_u64..3_000).prop_map(Duration::from_millis),
    ];
    let limit = (some_units(), window, 0..5_u8).prop_map(|(units, window, algorithm)| {
        let quota = Quota::new(units, window).unwrap();
        match algorithm {
            0 => quota.fixed_window(),
            1 => quota.sliding_window(),
            2 => quota.burst(units / 7).map_or(quota.token_bucket(), BurstQuota::token_bucket),
            _ => quota.sliding_log().unwrap_or(quota.token_bucket()),
        }
    });
    (limit, prop::option::of(prop_oneof!["[ -~]{0,60}", any::<String>()]))
}

fn some_wait() -> impl Strategy<Value = Duration> {
    let seconds = (0_u64..1_000_000_000_000_000).prop_map(Duration::from_secs);
    let short = (0_u64..5_000_000_000).prop_map(Duration::from_nanos);
    // A fraction on top of the longest duration would round to an integer that structured fields cannot represent.
    prop_oneof![Just(Duration::ZERO), short, seconds]
}

/// A list of strings with integer parameters, some of which may be missing, and an optional `pk` of bytes.
fn written_by_sfv<'a>(
    members: impl Iterator<Item = (&'a str, [(&'static str, Option<i64>); 2])>,
    pk: Option<&[u8]>,
) -> String {
    let mut list = sfv::ListSerializer::new();
    for (name, parameters) in members {
        let mut item = list.bare_item(sfv::StringRef::from_str(name).unwrap());
        for (key, value) in parameters {
            if let Some(value) = value {
                item = item.parameter(sfv::KeyRef::from_str(key).unwrap(), sfv::Integer::try_from(value).unwrap());
            }
        }
        if let Some(pk) = pk {
            let _ = item.parameter(sfv::KeyRef::from_str("pk").unwrap(), pk);
        }
    }
    list.finish().unwrap()
}

fn base64_of_the_first_key() -> Vec<u8> {
    let item = sfv::Parser::new(b":4l56oV8Y55o/0CqPo1sRwg==:").parse::<sfv::Item>().unwrap();
    item.bare_item.as_byte_sequence().unwrap().to_vec()
}

/// The fields that layers with this responder add, the innermost first.
fn announced(answer: &HttpResponder, standings: &[LimitInfo<'_>]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for standing in standings {
        answer.write_headers(standing, &mut headers);
    }
    headers
}

fn lines(headers: &HeaderMap) -> Vec<(&str, &str)> {
    headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect()
}

// Keys.

#[tokio::test(start_paused = true)]
async fn hostile_header_values_are_keys_like_any_other() {
    let service = layer(Quota::per_minute(1).fixed_window()).key(header("x-api-key")).layer(hello());
    let mut huge = vec![b'x'; 1 << 20];
    let huge_twin = huge.clone();
    *huge.last_mut().unwrap() = b'y';
    let values: [&[u8]; 9] = [b"\xff", b"\xfe", b"{}", b"{", b"{a}", b"%7B%7D", b"!global", &huge, &huge_twin];
    for value in values {
        assert_eq!(ask(&service, with_key(value)).await.status, StatusCode::OK, "each value has its own quota");
    }
    for value in values {
        assert_eq!(ask(&service, with_key(value)).await.status, StatusCode::TOO_MANY_REQUESTS, "each value is counted");
    }
}

#[tokio::test(start_paused = true)]
async fn first_of_several_headers_counts() {
    let service = layer(Quota::per_minute(1).fixed_window()).key(header("x-api-key")).layer(hello());
    let both = |first: &'static str, second: &'static str| {
        Request::builder().header("X-API-Key", first).header("x-api-key", second).body(()).unwrap()
    };
    assert_eq!(ask(&service, both("a", "1")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, both("a", "2")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&service, both("b", "a")).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn peer_counts_by_address_whatever_its_port() {
    let service = by_peer();
    assert_eq!(ask(&service, from_peer("203.0.113.7:1111")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, from_peer("203.0.113.7:2222")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&service, from_peer("203.0.113.8:1111")).await.status, StatusCode::OK);
    let mapped = ask(&service, from_peer("[::ffff:203.0.113.7]:1111")).await;
    assert_eq!(mapped.status, StatusCode::TOO_MANY_REQUESTS, "an IPv4-mapped address is the same client");
    let neighbour = ask(&service, from_peer("[::ffff:203.0.113.9]:1111")).await;
    assert_eq!(neighbour.status, StatusCode::OK, "another mapped address is another client");
}

#[tokio::test(start_paused = true)]
async fn peers_of_one_ipv6_network_count_together() {
    let service = by_peer();
    assert_eq!(ask(&service, from_peer("[2001:db8:1:2::1]:1111")).await.status, StatusCode::OK);
    for twin in ["[2001:db8:1:2::2]:1111", "[2001:db8:1:2:ffff:ffff:ffff:ffff]:1111"] {
        assert_eq!(ask(&service, from_peer(twin)).await.status, StatusCode::TOO_MANY_REQUESTS, "{twin}");
    }
    assert_eq!(ask(&service, from_peer("[2001:db8:1:3::1]:1111")).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn peer_address_of_axum_is_found() {
    let service = by_peer();
    let connected = |addr: &str| {
        let info = ConnectInfo(addr.parse::<SocketAddr>().unwrap());
        Request::builder().extension(info).body(()).unwrap()
    };
    assert_eq!(ask(&service, connected("203.0.113.7:1111")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, connected("203.0.113.7:2222")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&service, connected("203.0.113.8:1111")).await.status, StatusCode::OK);
    let same = ask(&service, from_peer("203.0.113.8:1111")).await;
    assert_eq!(same.status, StatusCode::TOO_MANY_REQUESTS, "the source of the address does not matter");
}

#[tokio::test(start_paused = true)]
async fn unknown_peer_has_no_key() {
    let answer = ask(&by_peer(), request()).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

/// Regression: the response did not name the reason, and the warning in the log may be hidden.
#[tokio::test(start_paused = true)]
async fn missing_extension_is_named_in_debug_builds() {
    let layer = || layer(Quota::per_minute(9).fixed_window());
    let address = || Policy::new("address", Quota::per_minute(9).fixed_window());
    let by_ip = ClientIp::trusting(["10.0.0.0/8".parse().unwrap()]);
    let detail = async |service, request| {
        let answer = ask(&service, request).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        answer.problem()["detail"].as_str().unwrap().to_owned()
    };
    let plain = "the request carries no key to count it under";
    let with_peer = || layer().key(header("x-api-key").or(peer_ip()));
    for (service, extension) in [
        (layer().key(peer_ip()).layer(hello()).boxed_clone(), "ConnectInfo<SocketAddr>"),
        (layer().key(by_ip).layer(hello()).boxed_clone(), "ConnectInfo<SocketAddr>"),
        (with_peer().layer(hello()).boxed_clone(), "ConnectInfo<SocketAddr>"),
        (
            layer().key(header("x-tenant")).and(address(), peer_ip()).layer(hello()).boxed_clone(),
            "ConnectInfo<SocketAddr>",
        ),
        (layer().key((peer_ip(), matched_path())).layer(hello()).boxed_clone(), "ConnectInfo<SocketAddr>"),
        (layer().key(matched_path()).layer(hello()).boxed_clone(), "MatchedPath"),
    ] {
        let detail = detail(service, request()).await;
        assert!(detail.starts_with(plain) && detail.contains(extension) == cfg!(debug_assertions), "{detail}");
    }
    // A missing extension of an earlier request is not named in a later response.
    let by_key = layer().key(header("x-api-key")).layer(hello()).boxed_clone();
    assert_eq!(detail(by_key, request()).await, plain);
}

#[tokio::test(start_paused = true)]
async fn api_key_cannot_imitate_the_address_of_another_client() {
    let api_key = |request: &Request<()>| -> Option<String> {
        let value = request.headers().get("x-api-key")?;
        Some(value.to_str().ok()?.to_owned())
    };
    let service = layer(Quota::per_minute(1).fixed_window()).key(first_of(api_key, peer_ip())).layer(hello());
    for key in ["203.0.113.7", "~203.0.113.7"] {
        assert_eq!(ask(&service, with_key(key.as_bytes())).await.status, StatusCode::OK);
    }
    assert_eq!(ask(&service, from_peer("203.0.113.7:1111")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, from_peer("203.0.113.7:1111")).await.status, StatusCode::TOO_MANY_REQUESTS);
}

// gRPC.

#[tokio::test(start_paused = true)]
async fn grpc_rejection_is_a_status_without_body() {
    let quota = Quota::per_minute(1).fixed_window();
    let exhausted = layer(Quota::per_minute(0).fixed_window()).responder(GrpcResponder::new()).layer(hello());
    let keyless = layer(quota).key(header("x-tenant")).responder(GrpcResponder::new()).layer(hello());
    let outage = RateLimitLayer::new(failing(), api(quota)).on_store_error(RateLimitFallback::Deny);
    let outage = outage.responder(GrpcResponder::new()).layer(hello());
    let cases = [
        (exhausted.oneshot(request()).await.unwrap(), "8", "the request exceeds the whole quota of rate limit `api`"),
        (keyless.oneshot(request()).await.unwrap(), "3", "the request carries no key to count it under"),
        (outage.oneshot(request()).await.unwrap(), "14", "temporarily unavailable"),
    ];
    for (response, code, message) in cases {
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["grpc-status"], code);
        assert_eq!(response.headers()["grpc-message"], message);
        assert_eq!(response.headers()[CONTENT_TYPE], "application/grpc");
        assert!(response.headers().contains_key(POLICY));
        let detailed = response.headers().contains_key("grpc-status-details-bin");
        assert_eq!(detailed, response.headers().contains_key("grpc-retry-pushback-ms"));
        assert_eq!(response.headers().len(), if detailed { 6 } else { 4 });
        assert!(response.body().is_end_stream(), "the response is trailers-only");
        assert_eq!(response.body().size_hint().exact(), Some(0));
        assert!(response.into_body().frame().await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn grpc_client_over_the_limit_gets_its_wait() {
    let policy = Policy::new("50% größer", Quota::per_minute(1).fixed_window());
    let layer = RateLimitLayer::new(MemoryBackend::new(), policy).responder(GrpcResponder::new());
    let service = layer.layer(hello());
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    let answer = ask(&service, request()).await;
    assert_eq!(answer.headers["grpc-status"], "8");
    // The percent signs of the name are escaped again. A client undoes that, and sees the name as stores do.
    let message = "rate limit `50%2525%2520gr%25C3%25B6%25C3%259Fer` exceeded, try again in 60 s";
    assert_eq!(answer.headers["grpc-message"], message);
    let name = "50%25%20gr%C3%B6%C3%9Fer";
    let status = tonic::Status::from_header_map(&answer.headers).unwrap();
    assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_secs(60)));
    let violations = violations(&status);
    assert_eq!(violations, [(name.to_owned(), format!("{name}: 1 in 60 s"))]);
    assert_eq!(answer.headers["grpc-retry-pushback-ms"], "60000");
    let details = answer.headers["grpc-status-details-bin"].to_str().unwrap();
    assert!(!details.contains('='), "gRPC requires base64 without padding");
    assert_eq!(answer.policies(), [Member::of(name, &[("q", 1), ("w", 60)])]);
    assert_eq!(answer.standing(), [Member::of(name, &[("r", 0), ("t", 60)])]);
}

#[tokio::test(start_paused = true)]
async fn quota_failure_names_the_limits_of_all_denying_policies() {
    // A limit may have the same name as another policy.
    let total = Policy::new("total", Quota::per_hour(1).sliding_window()).named("api");
    let layer = layer(Quota::per_minute(1).fixed_window()).and(total, GlobalKey).responder(GrpcResponder::new());
    let service = layer.layer(hello());
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    let answer = ask(&service, request()).await;
    let status = tonic::Status::from_header_map(&answer.headers).unwrap();
    let expected = [("total", "api: 1 in 3600 s"), ("api", "api: 1 in 60 s")];
    assert_eq!(violations(&status), expected.map(|(subject, limit)| (subject.to_owned(), limit.to_owned())));
    let wait = status.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert!(wait > Duration::from_secs(3_600), "{wait:?}");
}

#[tokio::test(start_paused = true)]
async fn grpc_client_gets_the_exact_wait_and_the_same_status_twice() {
    let max = Duration::from_millis(i32::MAX.unsigned_abs().into());
    let cases = [
        (Duration::from_nanos(1), "1"),
        (Duration::from_micros(1_234_567), "1235"),
        (max, "2147483647"),
        (max + Duration::from_nanos(1), "-1"),
        (Duration::from_secs(315_576_000_000), "-1"),
    ];
    for (wait, pushback) in cases {
        let store = Store(move || Ok(Decision::new([LimitStatus::new(5, 0, wait, wait)])));
        let layer = RateLimitLayer::new(store, api(Quota::per_minute(5).fixed_window()));
        let answer = ask(&layer.responder(GrpcResponder::new()).layer(hello()), request()).await;
        assert_eq!(answer.headers["grpc-retry-pushback-ms"], pushback);
        let status = tonic::Status::from_header_map(&answer.headers).unwrap();
        // Exact to the microsecond, rounded up.
        let exact = Duration::from_micros(wait.as_nanos().div_ceil(1_000) as u64);
        assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(exact));
        let inner = tonic_types::pb::Status::decode(status.details()).unwrap();
        assert_eq!((inner.code, &*inner.message), (8, status.message()));
        assert_eq!(inner.details.len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn blocked_grpc_client_gets_its_wait_and_no_quota_failure() {
    let free = LimitStatus::new(5, 5, Duration::ZERO, Duration::ZERO);
    let store = Store(move || Ok(Decision::new([free]).blocked(Duration::from_millis(1_500))));
    let layer = RateLimitLayer::new(store, api(Quota::per_minute(5).fixed_window()));
    let answer = ask(&layer.responder(GrpcResponder::new()).layer(hello()), request()).await;
    let status = tonic::Status::from_header_map(&answer.headers).unwrap();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_eq!(status.message(), "blocked by rate limit `api`, try again in 2 s");
    assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_millis(1_500)));
    assert!(status.get_details_quota_failure().is_none());
}

#[tokio::test(start_paused = true)]
async fn admitted_grpc_call_gets_the_inner_response_and_both_fields() {
    let service = layer(Quota::per_minute(5).fixed_window()).responder(GrpcResponder::new()).layer(hello());
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.body, "hello");
    assert_eq!(answer.headers[POLICY], r#""api";q=5;w=60"#);
    assert_eq!(answer.headers[STANDING], r#""api";r=4;t=60"#);
    assert_eq!(answer.headers.len(), 2, "the layer adds no status");
}

// The fields of an upstream.

/// The fields that three upstreams send.
const DRAFT_7: &[(&str, &str)] =
    &[("ratelimit-policy", "10;w=60"), ("ratelimit", "limit=10, remaining=7, reset=30"), ("retry-after", "3")];
const GITHUB: &[(&str, &str)] = &[
    ("x-ratelimit-limit", "5000"),
    ("x-ratelimit-remaining", "7"),
    ("x-ratelimit-used", "4993"),
    ("x-ratelimit-reset", "1900000000"),
];
const UNREADABLE: &[(&str, &str)] = &[("x-rate-limit-limit", "1 or 2"), ("x-ratelimit-remaining", "a few")];

/// The fields that a client gets from two layers in front of an upstream that sends the fields `upstream`.
async fn fields_of(
    answer: HttpResponder,
    quota: u64,
    upstream: &'static [(&'static str, &'static str)],
) -> Vec<(String, String)> {
    let proxy = service_fn(move |_: Request<()>| {
        let mut response = Response::new(String::new());
        for (name, value) in upstream {
            response.headers_mut().append(*name, HeaderValue::from_static(value));
        }
        ready(Ok::<_, Infallible>(response))
    });
    let inner = layer(Quota::per_minute(quota).fixed_window()).responder(answer.clone());
    let outer = Policy::new("outer", Quota::per_minute(quota + 100).fixed_window());
    let outer = RateLimitLayer::new(MemoryBackend::new(), outer).responder(answer);
    let answer = ask(&outer.layer(inner.layer(proxy)), request()).await;
    let fields = answer.headers.iter();
    fields.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
}

fn pairs(fields: &[(&str, &str)]) -> Vec<(String, String)> {
    fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Regression: two syntaxes in one field parse as neither. `X-RateLimit-Reset` of one source stood beside `X-RateLimit-Remaining` of
/// another.
#[tokio::test(start_paused = true)]
async fn fields_of_an_upstream_are_replaced_by_default() {
    let ours = [
        ("ratelimit-policy", r#""api";q=100;w=60"#),
        ("ratelimit-policy", r#""outer";q=200;w=60"#),
        ("ratelimit", r#""api";r=99;t=60"#),
        ("ratelimit", r#""outer";r=199;t=60"#),
    ];
    for upstream in [DRAFT_7, GITHUB, UNREADABLE, &[("ratelimit", r#""up";r=1;t=9"#)]] {
        let mut fields = fields_of(HttpResponder::new(), 100, upstream).await;
        // `Retry-After` belongs to the status.
        let wait = upstream.iter().find(|(name, _)| *name == "retry-after").map(|(_, seconds)| *seconds);
        let position = fields.iter().position(|(name, _)| name == "retry-after");
        assert_eq!(position.map(|at| fields.remove(at).1).as_deref(), wait);
        assert_eq!(fields, pairs(&ours), "{upstream:?}");
    }
    let legacy = HttpResponder::new().headers([HeaderVersion::LegacyDelta]);
    let ours = [("x-ratelimit-limit", "100"), ("x-ratelimit-remaining", "99"), ("x-ratelimit-reset", "60")];
    assert_eq!(fields_of(legacy, 100, GITHUB).await, pairs(&ours));
    // A layer without fields leaves the fields of the upstream unchanged.
    for upstream in [DRAFT_7, GITHUB, UNREADABLE] {
        assert_eq!(fields_of(HttpResponder::new().headers([]), 100, upstream).await, pairs(upstream));
    }
}

#[tokio::test(start_paused = true)]
async fn fields_of_the_tighter_source_are_kept() {
    let tighter = HttpResponder::new().upstream_fields(UpstreamFields::KeepTighter);
    for upstream in [DRAFT_7, GITHUB] {
        assert_eq!(fields_of(tighter.clone(), 100, upstream).await, pairs(upstream));
        // The inner layer has less quota left than the upstream, so the response has the fields of both layers.
        let fields = fields_of(tighter.clone(), 5, upstream).await;
        let standing: Vec<_> =
            fields.iter().filter(|(name, _)| name == "ratelimit").map(|(_, value)| &**value).collect();
        assert_eq!(standing, [r#""api";r=4;t=60"#, r#""outer";r=104;t=60"#]);
        assert!(!fields.iter().any(|(name, _)| name.starts_with("x-")), "{fields:?}");
    }
    let fields = fields_of(tighter, 100, UNREADABLE).await;
    assert!(fields.iter().all(|(name, _)| name.starts_with("ratelimit")), "{fields:?}");
}

/// The outer layer is the tighter one. The fields that the inner layer has left out appear as well.
#[tokio::test(start_paused = true)]
async fn tighter_outer_layer_restores_the_fields_of_the_inner_one() {
    let answer = HttpResponder::new().upstream_fields(UpstreamFields::KeepTighter);
    let proxy = service_fn(|_: Request<()>| {
        ready(Ok::<_, Infallible>(
            Response::builder().header("ratelimit", "limit=10, remaining=7, reset=30").body(()).unwrap(),
        ))
    });
    let [inner, outer] = [("inner", 100), ("outer", 5)].map(|(name, quota)| {
        let policy = Policy::new(name, Quota::per_minute(quota).fixed_window());
        RateLimitLayer::new(MemoryBackend::new(), policy).responder(answer.clone())
    });
    let response = outer.layer(inner.layer(proxy)).oneshot(request()).await.unwrap();
    let standing: Vec<_> = response.headers().get_all(STANDING).iter().collect();
    assert_eq!(standing, [r#""inner";r=99;t=60"#, r#""outer";r=4;t=60"#]);
}

#[tokio::test(start_paused = true)]
async fn fields_of_an_upstream_are_kept_if_configured() {
    let keep = HttpResponder::new().upstream_fields(UpstreamFields::Keep);
    for quota in [5, 100] {
        for upstream in [DRAFT_7, GITHUB, UNREADABLE] {
            assert_eq!(fields_of(keep.clone(), quota, upstream).await, pairs(upstream));
        }
        assert_eq!(fields_of(keep.clone(), quota, &[]).await.len(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn metadata_of_a_grpc_upstream_is_replaced_by_default() {
    for (answer, kept) in
        [(GrpcResponder::new(), false), (GrpcResponder::new().upstream_fields(UpstreamFields::Keep), true)]
    {
        let proxy = service_fn(|_: Request<()>| {
            let response = Response::builder().header("x-ratelimit-remaining", "7").header("x-ratelimit-reset", "30");
            ready(Ok::<_, Infallible>(response.body(Full::<Bytes>::default()).unwrap()))
        });
        let limit = layer(Quota::per_minute(100).fixed_window()).responder(answer);
        let response = limit.layer(proxy).oneshot(request()).await.unwrap();
        let headers = response.headers();
        assert_eq!((headers.contains_key("x-ratelimit-reset"), headers.contains_key(STANDING)), (kept, !kept));
    }
}

/// Regression: the resolver got a digest of the API key, which no database can map to a plan.
#[tokio::test(start_paused = true)]
async fn plan_is_found_by_the_api_key_of_an_axum_request() {
    #[derive(Clone, Debug, PartialEq)]
    struct ApiKey(String);
    let per_hour = |units: u64| Policy::new("api", Quota::per_hour(units).fixed_window());
    let plans = PolicyResolver::of_input(move |ApiKey(key)| async move {
        tokio::task::yield_now().await;
        let quota = match &*key {
            "the-key-of-alice" => 3,
            "the-key-of-bob" => 2,
            _ => return Err("the database is down"),
        };
        Ok(per_hour(quota))
    });
    let api_key = |request: &axum::extract::Request| {
        let key = request.headers().get("x-api-key")?;
        Some(ApiKey(key.to_str().ok()?.to_owned()))
    };
    let limit = RateLimitLayer::new(MemoryBackend::new(), per_hour(1))
        .key(header("x-api-key"))
        .resolver_from(api_key, plans.clone())
        .on_store_error(RateLimitFallback::Deny);
    let app: Router = Router::new().route("/", get(async || "hello")).layer(limit);
    let statuses = async |key: &str| {
        let mut statuses = Vec::new();
        for _ in 0..4 {
            let request = Request::get("/").header("x-api-key", key).body(axum::body::Body::empty()).unwrap();
            statuses.push(app.clone().oneshot(request).await.unwrap().status().as_u16());
        }
        statuses
    };
    assert_eq!(statuses("the-key-of-alice").await, [200, 200, 200, 429]);
    assert_eq!(statuses("the-key-of-bob").await, [200, 200, 429, 429]);
    assert_eq!(statuses("unknown").await, [503; 4]);
    // `forget` takes the key of the layer.
    plans.forget(&Key::digest("the-key-of-alice"));
    assert_eq!(statuses("the-key-of-alice").await, [429; 4]);
    assert!(!format!("{plans:?} {app:?}").contains("the-key-of"), "{plans:?} {app:?}");
}

/// The subjects and descriptions in the quota failure of a status.
fn violations(status: &tonic::Status) -> Vec<(String, String)> {
    let failure = status.get_details_quota_failure().expect("a quota failure");
    failure.violations.into_iter().map(|violation| (violation.subject, violation.description)).collect()
}

// Requests, services and layers.

fn request() -> Request<()> {
    Request::new(())
}

fn with_key(value: &[u8]) -> Request<()> {
    Request::builder().header("x-api-key", HeaderValue::from_bytes(value).unwrap()).body(()).unwrap()
}

fn from_peer(addr: &str) -> Request<()> {
    Request::builder().extension(PeerAddr(addr.parse().unwrap())).body(()).unwrap()
}

fn hello() -> impl Service<Request<()>, Response = Response<String>, Error = Infallible, Future: Send> + Clone {
    service_fn(async |_: Request<()>| Ok(Response::new("hello".to_owned())))
}

fn api(limit: Limit) -> Policy {
    Policy::new("api", limit)
}

fn layer(limit: Limit) -> RateLimitLayer<MemoryBackend> {
    RateLimitLayer::new(MemoryBackend::new(), api(limit))
}

/// One request per minute and peer.
fn by_peer()
-> impl Service<Request<()>, Response = Response<impl Body<Data = Bytes, Error: Debug>>, Error: Debug> + Clone {
    layer(Quota::per_minute(1).fixed_window()).key(peer_ip()).layer(hello())
}

async fn ask<S, B>(service: &S, request: Request<()>) -> Answer
where
    S: Service<Request<()>, Response = Response<B>, Error: Debug> + Clone,
    B: Body<Data = Bytes, Error: Debug>,
{
    let (head, body) = service.clone().oneshot(request).await.unwrap().into_parts();
    let body = String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap();
    Answer { status: head.status, headers: head.headers, body }
}

/// A store that replies with the result of a closure.
#[derive(Clone)]
struct Store<F>(F);

/// A store that is down, with an error that reveals too much.
fn failing() -> Store<fn() -> Result<Decision, StoreError>> {
    Store(|| Err(StoreError::unavailable("redis://:hunter2@10.0.0.1/ refused the connection")))
}

impl<F: Fn() -> Result<Decision, StoreError> + Sync> RateLimitStore for Store<F> {
    async fn check(&self, _: &Policy, _: &Key, _: u64) -> Result<Decision, StoreError> {
        self.0()
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

// Responses.

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn policies(&self) -> Vec<Member> {
        Member::list(&self.headers, &POLICY)
    }

    fn standing(&self) -> Vec<Member> {
        Member::list(&self.headers, &STANDING)
    }

    fn problem(&self) -> Value {
        assert_eq!(self.headers[CONTENT_TYPE], "application/problem+json");
        serde_json::from_str(&self.body).unwrap()
    }

    fn retry_after(&self) -> Option<i64> {
        let mut values = self.headers.get_all(RETRY_AFTER).iter();
        let value = values.next()?;
        assert!(values.next().is_none(), "there is only one Retry-After");
        Some(value.to_str().unwrap().parse().unwrap())
    }
}

/// A member of a `RateLimit` or `RateLimit-Policy` field: a string with integers as parameters, in order.
#[derive(Debug, PartialEq)]
struct Member {
    name: String,
    parameters: Vec<(String, i64)>,
}

impl Member {
    fn of(name: &str, parameters: &[(&str, i64)]) -> Self {
        let parameters = parameters.iter().map(|&(key, value)| (key.to_owned(), value)).collect();
        Self { name: name.to_owned(), parameters }
    }

    /// The lines of a field, joined as a recipient may do and parsed as one list.
    fn list(headers: &HeaderMap, field: &HeaderName) -> Vec<Self> {
        let lines: Vec<&[u8]> = headers.get_all(field).iter().map(HeaderValue::as_bytes).collect();
        let list = sfv::Parser::new(&lines.join(&b", "[..])).parse::<sfv::List>().expect("the field is a list");
        list.iter().map(Self::read).collect()
    }

    fn read(entry: &sfv::ListEntry) -> Self {
        let sfv::ListEntry::Item(item) = entry else { panic!("{entry:?} is not an item") };
        let name = item.bare_item.as_string().expect("a member is a string").as_str().to_owned();
        let integer = |value: &sfv::BareItem| i64::from(value.as_integer().expect("a parameter is an integer"));
        let parameters = item.params.iter().map(|(key, value)| (key.as_str().to_owned(), integer(value))).collect();
        Self { name, parameters }
    }

    fn parameter(&self, key: &str) -> Option<i64> {
        self.parameters.iter().find(|(name, _)| name == key).map(|(_, value)| *value)
    }
}
