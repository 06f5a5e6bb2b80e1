//! `CacheLayer` with arbitrary requests and responses: no header field makes it panic, mix responses up, or share a private one.

use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::header::{AUTHORIZATION, COOKIE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use proptest::prelude::*;
use tollgate::{CacheLayer, MemoryBackend};
use tower::Layer;

use crate::http::{Origin, boxed, field, ms, send};

type Fields = Vec<(&'static str, Vec<u8>)>;

/// A value from the list, or any other one.
fn one_of(values: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let listed = prop::sample::select(values).prop_map(|value| value.as_bytes().to_vec());
    prop_oneof![8 => listed, 1 => prop::collection::vec(any::<u8>(), 0..12)]
}

/// Directives in any order, case and spacing.
fn control() -> impl Strategy<Value = Vec<u8>> {
    const DIRECTIVES: &[&str] = &[
        "max-age=60",
        "MAX-AGE=60",
        "max-age=\"9\"",
        "s-maxage=5",
        "max-age=0",
        "max-age=-1",
        "max-age",
        "public",
        "private",
        "Private=\"x\"",
        "no-store",
        "NO-CACHE",
        "must-revalidate",
        "stale-if-error=60",
        "stale-while-revalidate=60",
        "x=\"a, b\"",
        "x=\"open",
        "=",
        "",
    ];
    let separator = prop::sample::select(vec![",", ", ", " ,\t", ",,"]);
    let listed = (prop::collection::vec(prop::sample::select(DIRECTIVES), 1..4), separator);
    listed.prop_map(|(directives, separator)| directives.join(separator).into_bytes())
}

fn field_of_request() -> impl Strategy<Value = (&'static str, Vec<u8>)> {
    prop_oneof![
        3 => one_of(&["text/plain", "*/*"]).prop_map(|value| ("accept", value)),
        1 => one_of(&["Bearer a"]).prop_map(|value| ("authorization", value)),
        1 => one_of(&["a=b"]).prop_map(|value| ("cookie", value)),
        1 => control().prop_map(|value| ("cache-control", value)),
        1 => one_of(&["*", "\"v\"", "W/\"v\", \"w\"", "\"open"]).prop_map(|value| ("if-none-match", value)),
        1 => one_of(&["Sun, 06 Nov 1994 08:49:37 GMT"]).prop_map(|value| ("if-modified-since", value)),
        1 => one_of(&["a", "A", "b:80"]).prop_map(|value| ("host", value)),
        1 => one_of(&["bytes=0-1"]).prop_map(|value| ("range", value)),
    ]
}

fn field_of_response() -> impl Strategy<Value = (&'static str, Vec<u8>)> {
    prop_oneof![
        6 => control().prop_map(|value| ("cache-control", value)),
        2 => one_of(&["accept", "*", "x-who", "Accept, X-WHO", ",", "a b"]).prop_map(|value| ("vary", value)),
        1 => one_of(&["session=1"]).prop_map(|value| ("set-cookie", value)),
        1 => one_of(&["5", "1000", "x"]).prop_map(|value| ("age", value)),
        1 => one_of(&["0", "Sun, 06 Nov 1994 08:49:37 GMT"]).prop_map(|value| ("expires", value)),
        1 => one_of(&["Sun, 06 Nov 1994 08:49:37 GMT"]).prop_map(|value| ("date", value)),
        1 => one_of(&["\"v\"", "W/\"v\""]).prop_map(|value| ("etag", value)),
        1 => one_of(&["Sun, 06 Nov 1994 08:49:37 GMT"]).prop_map(|value| ("last-modified", value)),
        1 => one_of(&["Other; hit", ""]).prop_map(|value| ("cache-status", value)),
        1 => one_of(&["x-owner", "close"]).prop_map(|value| ("connection", value)),
        1 => one_of(&["7"]).prop_map(|value| ("content-length", value)),
    ]
}

/// A request of Alice or Bob, and the response if the origin is called.
#[derive(Clone, Debug)]
struct Exchange {
    of_alice: bool,
    method: &'static str,
    request: Fields,
    status: u16,
    response: Fields,
}

fn exchange() -> impl Strategy<Value = Exchange> {
    let method = prop::sample::select(vec!["GET", "GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "PURGE"]);
    let status = prop::sample::select(vec![200, 200, 200, 203, 204, 206, 301, 302, 304, 404, 403, 500, 501, 503]);
    let request = prop::collection::vec(field_of_request(), 0..4);
    let response = prop::collection::vec(field_of_response(), 0..4);
    (any::<bool>(), method, request, status, response).prop_map(|(of_alice, method, request, status, response)| {
        Exchange { of_alice, method, request, status, response }
    })
}

/// The fields whose values are valid.
fn add(headers: &mut HeaderMap, fields: &Fields) {
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(HeaderName::from_static(name), value);
        }
    }
}

/// Whether a request must neither give its response to others nor get that of others.
fn is_private_request(headers: &HeaderMap) -> bool {
    headers.contains_key(AUTHORIZATION) || headers.contains_key(COOKIE)
}

/// Whether a response must not reach another client, as far as its fields say.
fn is_private_response(headers: &HeaderMap) -> bool {
    let all = |name: &str| {
        let lines = headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).to_lowercase());
        lines.collect::<Vec<_>>().join(",")
    };
    let (control, vary) = (all("cache-control"), all("vary"));
    headers.contains_key("set-cookie")
        || ["private", "no-store", "no-cache"].iter().any(|name| control.contains(name))
        || ["*", "x-who"].iter().any(|name| vary.contains(name))
}

async fn run(exchanges: Vec<Exchange>, default_time: bool) {
    let origin = Origin::default();
    // The next response, and of each call the heads of its request and response.
    let next = Arc::new(Mutex::new(None::<Exchange>));
    let calls = Arc::new(Mutex::new(Vec::<(Method, HeaderMap, HeaderMap)>::new()));
    let (planned, noted) = (Arc::clone(&next), Arc::clone(&calls));
    let service = origin.service(move |request: &Request<Body>, _| {
        let mut noted = noted.lock().unwrap();
        let exchange = planned.lock().unwrap().clone().unwrap();
        let who = request.headers()["x-who"].to_str().unwrap().to_owned();
        let mut response =
            Response::new(if request.method() == Method::HEAD { "".into() } else { Body::from(who.clone()) });
        *response.status_mut() = StatusCode::from_u16(exchange.status).unwrap();
        add(response.headers_mut(), &exchange.response);
        response.headers_mut().insert("x-call", noted.len().into());
        noted.push((request.method().clone(), request.headers().clone(), response.headers().clone()));
        response
    });
    let layer = CacheLayer::new(MemoryBackend::new(), "pages").public();
    let layer = if default_time { layer.fresh_for(ms(60_000)) } else { layer };
    let app = boxed(layer.layer(service));
    for exchange in exchanges {
        *next.lock().unwrap() = Some(exchange.clone());
        let who = if exchange.of_alice { "alice" } else { "bob" };
        let mut request = Request::builder().method(exchange.method).uri("/").body(Body::empty()).unwrap();
        add(request.headers_mut(), &exchange.request);
        request.headers_mut().insert("x-who", HeaderValue::from_static(who));
        if !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, HeaderValue::from_static("a"));
        }
        let asked = request.headers().clone();
        let (parts, body) = send(&app, request).await;
        let Ok(call) = field(&parts, "x-call").parse::<usize>() else {
            assert!([503, 504].contains(&parts.status.as_u16()), "{exchange:?}: {parts:?}");
            continue;
        };
        let (method, owner, response) = &calls.lock().unwrap()[call];
        if parts.status == 200 && exchange.method != "HEAD" {
            assert_eq!(body.as_bytes(), owner["x-who"].as_bytes(), "{exchange:?}");
        }
        if owner["x-who"] != asked["x-who"] {
            assert_eq!(method, Method::GET, "{exchange:?}");
            let is_private = is_private_request(owner) || is_private_request(&asked) || is_private_response(response);
            assert!(!is_private, "{exchange:?} got {response:?}");
        }
    }
}

proptest! {
    #[test]
    fn any_headers_neither_panic_nor_leak(
        exchanges in prop::collection::vec(exchange(), 1..8),
        default_time: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(run(exchanges, default_time));
    }
}
