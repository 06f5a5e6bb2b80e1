//! What clients read: statuses, header fields and bodies, with HTTP and with gRPC.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::ready;
use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::{Router, routing::get};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use tollgate::grpc::AsStatus;
use tollgate::http::{PeerAddr, header, peer_ip};
use tollgate::rate_limit::{Decision, Limit, LimitStatus, RateLimitStore, Receipt};
use tollgate::{Key, MemoryBackend, OnMissingKey, OnStoreError, Policy, Quota, RateLimitLayer, StoreError, first_of};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const STANDING: HeaderName = HeaderName::from_static("ratelimit");

// What is answered, case by case.

#[tokio::test(start_paused = true)]
async fn an_admitted_request_gets_the_inner_answer_and_both_fields() {
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
async fn a_request_over_the_limit_gets_429_and_is_told_when_to_come_back() {
    let service = layer(Quota::per_minute(1).fixed_window()).layer(hello());
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    tokio::time::advance(Duration::from_secs(20)).await;
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.headers[RETRY_AFTER], "40");
    assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
    assert_eq!(answer.headers[STANDING], r#""api";r=0;t=40"#);
    assert_eq!(answer.headers[CONTENT_TYPE], "text/plain; charset=utf-8");
    assert_eq!(answer.headers.len(), 4);
    assert_eq!(answer.body, "rate limit `api` exceeded, try again in 40 s\n");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_costs_more_than_the_quota_gets_429_and_no_time() {
    for (limit, cost) in [(5, 6), (0, 1), (0, 0)] {
        let layer = layer(Quota::per_minute(limit).fixed_window()).cost(move |_: &Request<()>| cost);
        let answer = ask(&layer.layer(hello()), request()).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.headers[POLICY], format!(r#""api";q={limit};w=60"#));
        assert_eq!(answer.headers.get(RETRY_AFTER), None, "no wait helps");
        assert_eq!(answer.headers.get(STANDING), None, "nothing is known");
        assert_eq!(answer.body, "the request exceeds the whole quota of rate limit `api`\n");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_key_gets_400() {
    let service = layer(Quota::per_minute(1).fixed_window()).key(header("x-api-key")).layer(hello());
    for request in [request(), with_key(b"")] {
        let answer = ask(&service, request).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
        assert_eq!(answer.headers[CONTENT_TYPE], "text/plain; charset=utf-8");
        assert_eq!(answer.headers.len(), 2);
        assert_eq!(answer.body, "the request carries no key to count it under\n");
    }
    assert_eq!(ask(&service, with_key(b"k1")).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_store_failure_that_denies_gets_503_and_tells_no_internals() {
    let layer = RateLimitLayer::new(failing(), api(Quota::per_minute(1).fixed_window()));
    let answer = ask(&layer.on_store_error(OnStoreError::Deny).layer(hello()), request()).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers[RETRY_AFTER], "1");
    assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
    assert_eq!(answer.headers[CONTENT_TYPE], "text/plain; charset=utf-8");
    assert_eq!(answer.headers.len(), 3);
    assert_eq!(answer.body, "temporarily unavailable\n");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_passes_without_decision_hears_of_the_policy_only() {
    let quota = Quota::per_minute(1).fixed_window();
    let outage = RateLimitLayer::new(failing(), api(quota)).on_store_error(OnStoreError::Allow).layer(hello());
    let keyless = layer(quota).key(header("x-api-key")).on_missing_key(OnMissingKey::Pass).layer(hello());
    for answer in [ask(&outage, request()).await, ask(&keyless, request()).await] {
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.body, "hello");
        assert_eq!(answer.headers[POLICY], r#""api";q=1;w=60"#);
        assert_eq!(answer.headers.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn the_error_of_the_inner_service_stays_its_error() {
    let broken = service_fn(|_: Request<()>| ready(Err::<Response<String>, _>("broken")));
    let service = layer(Quota::per_minute(1).fixed_window()).layer(broken);
    assert_eq!(service.clone().oneshot(request()).await.unwrap_err(), "broken");
    let rejected = service.oneshot(request()).await.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS, "a rejection is a response all the same");
}

#[tokio::test(start_paused = true)]
async fn the_length_of_a_rejection_is_known_before_it_is_read() {
    let service = layer(Quota::per_minute(0).fixed_window()).layer(hello());
    let body = service.oneshot(request()).await.unwrap().into_body();
    assert!(!body.is_end_stream());
    let told = body.size_hint().exact().unwrap();
    assert_eq!(body.collect().await.unwrap().to_bytes().len() as u64, told);
}

#[tokio::test(start_paused = true)]
async fn the_inner_body_passes_through_with_its_length_and_trailers() {
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

#[tokio::test(start_paused = true)]
async fn an_axum_router_can_be_limited_per_route() {
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
async fn the_wait_of_any_store_is_rounded_up_and_never_0() {
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
async fn whoever_waits_as_told_is_admitted() {
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
async fn a_window_is_told_only_where_it_is_whole_seconds() {
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
async fn no_reset_is_told_while_the_whole_quota_is_left() {
    let service = layer(Quota::per_minute(5).fixed_window()).cost(|_: &Request<()>| 0).layer(hello());
    assert_eq!(ask(&service, request()).await.headers[STANDING], r#""api";r=5"#);
}

// Fields as structured fields.

#[tokio::test(start_paused = true)]
async fn fields_are_lists_of_a_string_with_integers() {
    let service = layer(Quota::per_minute(u32::MAX).fixed_window()).layer(hello());
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
async fn layers_on_top_of_each_other_add_a_member_each() {
    let named = |name, quota: Quota| RateLimitLayer::new(MemoryBackend::new(), Policy::new(name, quota.fixed_window()));
    let service = ServiceBuilder::new()
        .layer(named("outer", Quota::per_hour(3)))
        .layer(named("inner", Quota::per_minute(2)))
        .service(hello());
    let (outer, inner) = (&[("q", 3), ("w", 3_600)], &[("q", 2), ("w", 60)]);

    // Both admit.
    for left in [1, 0] {
        let answer = ask(&service, request()).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.policies(), [Member::of("inner", inner), Member::of("outer", outer)]);
        let standing =
            [Member::of("inner", &[("r", left), ("t", 60)]), Member::of("outer", &[("r", left + 1), ("t", 3_600)])];
        assert_eq!(answer.standing(), standing);
    }
    // The inner one says no; the outer one has admitted, and says so.
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.retry_after(), Some(60));
    assert_eq!(answer.policies(), [Member::of("inner", inner), Member::of("outer", outer)]);
    let standing = [Member::of("inner", &[("r", 0), ("t", 60)]), Member::of("outer", &[("r", 0), ("t", 3_600)])];
    assert_eq!(answer.standing(), standing);
    // The outer one says no, so the inner one is not heard.
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.retry_after(), Some(3_600));
    assert_eq!(answer.policies(), [Member::of("outer", outer)]);
    assert_eq!(answer.standing(), [Member::of("outer", &[("r", 0), ("t", 3_600)])]);
}

proptest! {
    #[test]
    fn fields_parse_whatever_the_policy(
        name in prop::collection::vec(any::<char>(), 0..80),
        limit in prop_oneof![any::<u32>(), 0..3_u32],
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
            // The first request takes all there is.
            let service = RateLimitLayer::new(MemoryBackend::new(), policy.clone())
                .cost(move |_: &Request<()>| limit)
                .layer(hello());
            let [first, second] = [ask(&service, request()).await, ask(&service, request()).await];

            let whole_seconds = (window.subsec_nanos() == 0).then_some(window.as_secs() as i64);
            let rounded_up = (window.as_nanos().div_ceil(1_000_000_000)) as i64;
            let told = [("q", Some(i64::from(limit))), ("w", whole_seconds)];
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

// Keys.

#[tokio::test(start_paused = true)]
async fn hostile_header_values_are_keys_like_any_other() {
    let service = layer(Quota::per_minute(1).fixed_window()).key(header("x-api-key")).layer(hello());
    let mut huge = vec![b'x'; 1 << 20];
    let huge_twin = huge.clone();
    *huge.last_mut().unwrap() = b'y';
    let values: [&[u8]; 9] = [b"\xff", b"\xfe", b"{}", b"{", b"{a}", b"%7B%7D", b"!everyone", &huge, &huge_twin];
    for value in values {
        assert_eq!(ask(&service, with_key(value)).await.status, StatusCode::OK, "counted apart from all others");
    }
    for value in values {
        assert_eq!(ask(&service, with_key(value)).await.status, StatusCode::TOO_MANY_REQUESTS, "and counted");
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_of_several_headers_counts() {
    let service = layer(Quota::per_minute(1).fixed_window()).key(header("x-api-key")).layer(hello());
    let both = |first: &'static str, second: &'static str| {
        Request::builder().header("X-API-Key", first).header("x-api-key", second).body(()).unwrap()
    };
    assert_eq!(ask(&service, both("a", "1")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, both("a", "2")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&service, both("b", "a")).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn a_peer_counts_by_address_whatever_its_port() {
    let service = by_peer();
    assert_eq!(ask(&service, from_peer("203.0.113.7:1111")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, from_peer("203.0.113.7:2222")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&service, from_peer("203.0.113.8:1111")).await.status, StatusCode::OK);
    let mapped = ask(&service, from_peer("[::ffff:203.0.113.7]:1111")).await;
    assert_eq!(mapped.status, StatusCode::TOO_MANY_REQUESTS, "IPv4 in the guise of IPv6 is the same client");
    let neighbour = ask(&service, from_peer("[::ffff:203.0.113.9]:1111")).await;
    assert_eq!(neighbour.status, StatusCode::OK, "and not all of IPv4 is one client");
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
async fn the_peer_address_of_axum_is_found() {
    let service = by_peer();
    let connected = |addr: &str| {
        let info = ConnectInfo(addr.parse::<SocketAddr>().unwrap());
        Request::builder().extension(info).body(()).unwrap()
    };
    assert_eq!(ask(&service, connected("203.0.113.7:1111")).await.status, StatusCode::OK);
    assert_eq!(ask(&service, connected("203.0.113.7:2222")).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&service, connected("203.0.113.8:1111")).await.status, StatusCode::OK);
    let same = ask(&service, from_peer("203.0.113.8:1111")).await;
    assert_eq!(same.status, StatusCode::TOO_MANY_REQUESTS, "it does not matter who told the address");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_is_not_known_has_no_key() {
    let answer = ask(&by_peer(), request()).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

#[tokio::test(start_paused = true)]
async fn nobody_can_spell_the_address_of_another_as_an_api_key() {
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
async fn a_grpc_rejection_is_a_status_without_body() {
    let quota = Quota::per_minute(1).fixed_window();
    let exhausted = layer(Quota::per_minute(0).fixed_window()).with_rejection(AsStatus).layer(hello());
    let keyless = layer(quota).key(header("x-tenant")).with_rejection(AsStatus).layer(hello());
    let outage = RateLimitLayer::new(failing(), api(quota)).on_store_error(OnStoreError::Deny);
    let outage = outage.with_rejection(AsStatus).layer(hello());
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
        assert_eq!(response.headers().len(), 4);
        assert!(response.body().is_end_stream(), "or it would not be trailers-only");
        assert_eq!(response.body().size_hint().exact(), Some(0));
        assert!(response.into_body().frame().await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_grpc_client_over_the_limit_is_told_how_long_to_wait() {
    let policy = Policy::new("50% größer", Quota::per_minute(1).fixed_window());
    let layer = RateLimitLayer::new(MemoryBackend::new(), policy).with_rejection(AsStatus);
    let service = layer.layer(hello());
    assert_eq!(ask(&service, request()).await.status, StatusCode::OK);
    let answer = ask(&service, request()).await;
    assert_eq!(answer.headers["grpc-status"], "8");
    // The percent signs of the name are escaped once more: a client undoes that and sees the name as stores do.
    let message = "rate limit `50%2525%2520gr%25C3%25B6%25C3%259Fer` exceeded, try again in 60 s";
    assert_eq!(answer.headers["grpc-message"], message);
    let name = "50%25%20gr%C3%B6%C3%9Fer";
    assert_eq!(answer.policies(), [Member::of(name, &[("q", 1), ("w", 60)])]);
    assert_eq!(answer.standing(), [Member::of(name, &[("r", 0), ("t", 60)])]);
}

#[tokio::test(start_paused = true)]
async fn an_admitted_grpc_call_gets_the_inner_answer_and_both_fields() {
    let service = layer(Quota::per_minute(5).fixed_window()).with_rejection(AsStatus).layer(hello());
    let answer = ask(&service, request()).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.body, "hello");
    assert_eq!(answer.headers[POLICY], r#""api";q=5;w=60"#);
    assert_eq!(answer.headers[STANDING], r#""api";r=4;t=60"#);
    assert_eq!(answer.headers.len(), 2, "no status of ours");
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

/// A store that answers what a closure says.
#[derive(Clone)]
struct Store<F>(F);

/// A store that is down and whose error says too much.
fn failing() -> Store<fn() -> Result<Decision, StoreError>> {
    Store(|| Err(StoreError::unavailable("redis://:hunter2@10.0.0.1/ refused the connection")))
}

impl<F: Fn() -> Result<Decision, StoreError> + Sync> RateLimitStore for Store<F> {
    async fn check(&self, _: &Policy, _: &Key, _: u32) -> Result<Decision, StoreError> {
        self.0()
    }

    async fn peek(&self, _: &Policy, _: &Key, _: u32) -> Result<Decision, StoreError> {
        unreachable!("a layer never peeks")
    }

    async fn settle(&self, _: &Policy, _: &Key, _: Receipt, _: i64) -> Result<(), StoreError> {
        unreachable!("nothing is given back")
    }

    async fn block(&self, _: &Policy, _: &Key, _: Duration) -> Result<(), StoreError> {
        unreachable!("a layer never blocks")
    }

    async fn reset(&self, _: &Policy, _: &Key) -> Result<(), StoreError> {
        unreachable!("a layer never resets")
    }
}

// Answers.

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

    fn retry_after(&self) -> Option<i64> {
        let mut values = self.headers.get_all(RETRY_AFTER).iter();
        let value = values.next()?;
        assert!(values.next().is_none(), "one wait is told, not two");
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

    /// The lines of a field, joined as a recipient may do and read as one list.
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
