//! `CacheLayer`: what it serves, and how often it calls the inner service.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep};
use tollgate::http::header;
use tollgate::testing::{Failure, FaultStore};
use tollgate::{CacheLayer, GlobalKey, MemoryBackend};
use tower::limit::ConcurrencyLimitLayer;
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};

pub(crate) type App = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// An origin that counts its calls. By default it takes 200 ms and responds with the number of the call.
#[derive(Clone, Default)]
pub(crate) struct Origin(Arc<AtomicUsize>);

impl Origin {
    pub(crate) fn calls(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// A service whose response is made from the request and the number of the call.
    pub(crate) fn service<F>(
        &self,
        respond: F,
    ) -> impl tower::Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + Sync
    + use<F>
    where
        F: Fn(&Request<Body>, usize) -> Response<Body> + Clone + Send + Sync + 'static,
    {
        let calls = Arc::clone(&self.0);
        service_fn(move |request: Request<Body>| {
            let (calls, respond) = (Arc::clone(&calls), respond.clone());
            async move {
                let number = calls.fetch_add(1, Ordering::Relaxed) + 1;
                sleep(ms(200)).await;
                Ok(respond(&request, number))
            }
        })
    }

    /// Responds with these header fields, and the number of the call.
    pub(crate) fn with(&self, fields: &'static [(&'static str, &'static str)], layer: CacheLayer<GlobalKey>) -> App {
        boxed(layer.layer(self.service(move |_, number| respond(200, fields, number.to_string()))))
    }
}

pub(crate) fn boxed<S, B>(service: S) -> App
where
    S: tower::Service<Request<Body>, Response = Response<B>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    B: http_body::Body<Data = Bytes, Error: Into<tollgate::BoxError>> + Send + 'static,
{
    BoxCloneSyncService::new(service.map_response(|response: Response<B>| response.map(Body::new)))
}

pub(crate) fn respond(status: u16, fields: &[(&'static str, &'static str)], body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    for (name, value) in fields {
        response.headers_mut().append(*name, HeaderValue::from_static(value));
    }
    response
}

pub(crate) fn public() -> CacheLayer<GlobalKey> {
    CacheLayer::new(MemoryBackend::new(), "pages").public().jitter(0.0).early_refresh(0.0)
}

pub(crate) fn request(method: &str, path: &str, fields: &[(&'static str, &'static str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

/// The head of a response, and its body, or `!` if it breaks off.
pub(crate) async fn send(app: &App, request: Request<Body>) -> (http::response::Parts, String) {
    let Ok(response) = app.clone().oneshot(request).await;
    let (parts, body) = response.into_parts();
    let body = match body.collect().await {
        Ok(body) => String::from_utf8(body.to_bytes().to_vec()).unwrap(),
        Err(_) => "!".to_owned(),
    };
    (parts, body)
}

pub(crate) async fn get(app: &App, path: &str) -> String {
    send(app, request("GET", path, &[])).await.1
}

pub(crate) fn field<'a>(parts: &'a http::response::Parts, name: &str) -> &'a str {
    parts.headers.get(name).map_or("", |value| value.to_str().unwrap())
}

fn status_of(parts: &http::response::Parts) -> &str {
    field(parts, "cache-status")
}

/// The bodies of requests that are sent at the same time.
async fn at_once(app: &App, count: usize, make: impl Fn() -> Request<Body>) -> Vec<(u16, String)> {
    let mut requests = JoinSet::new();
    for _ in 0..count {
        let (app, request) = (app.clone(), make());
        requests.spawn(async move {
            let (parts, body) = send(&app, request).await;
            (parts.status.as_u16(), body)
        });
    }
    requests.join_all().await
}

const FRESH: &[(&str, &str)] = &[("cache-control", "max-age=60")];

#[tokio::test(start_paused = true)]
async fn response_is_served_until_it_is_no_longer_fresh() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    let (parts, body) = send(&app, request("GET", "/", &[])).await;
    assert_eq!((status_of(&parts), &*body), ("Tollgate; fwd=miss", "1"));
    assert!(!parts.headers.contains_key("age"));
    advance(Duration::from_secs(59)).await;
    let (parts, body) = send(&app, request("GET", "/", &[])).await;
    assert_eq!((status_of(&parts), &*body), ("Tollgate; hit; ttl=1", "1"));
    assert_eq!((field(&parts, "age"), field(&parts, "cache-control")), ("59", "max-age=60"));
    advance(Duration::from_secs(1)).await;
    assert_eq!(get(&app, "/").await, "2");
}

#[tokio::test(start_paused = true)]
async fn hundred_requests_at_once_are_one_call() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    let began = Instant::now();
    let responses = at_once(&app, 100, || request("GET", "/", &[])).await;
    assert!(responses.iter().all(|response| *response == (200, "1".to_owned())));
    assert_eq!((origin.calls(), began.elapsed()), (1, ms(200)));
}

#[tokio::test(start_paused = true)]
async fn two_layers_on_one_store_are_one_call() {
    let (origin, backend) = (Origin::default(), MemoryBackend::new());
    let [one, two] = [0, 1].map(|_| origin.with(FRESH, CacheLayer::new(backend.clone(), "pages").public()));
    let (one, two) =
        tokio::join!(at_once(&one, 50, || request("GET", "/", &[])), at_once(&two, 50, || request("GET", "/", &[])));
    assert!(one.iter().chain(&two).all(|response| *response == (200, "1".to_owned())));
    assert_eq!(origin.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn response_for_alice_is_not_shared_with_bob() {
    let origin = Origin::default();
    let service = origin.service(|request, _| {
        let user = request.headers()["authorization"].to_str().unwrap().to_owned();
        respond(200, &[("set-cookie", "session=1"), ("cache-control", "max-age=60")], user)
    });
    let app = boxed(public().fresh_for(ms(60_000)).layer(service));
    for at_once in [false, true] {
        let alice = send(&app, request("GET", "/me", &[("authorization", "alice")]));
        let bob = send(&app, request("GET", "/me", &[("authorization", "bob")]));
        let (alice, bob) = if at_once { tokio::join!(alice, bob) } else { (alice.await, bob.await) };
        assert_eq!((&*alice.1, &*bob.1), ("alice", "bob"));
    }
    assert_eq!(origin.calls(), 4);
}

#[tokio::test(start_paused = true)]
async fn uncachable_response_is_for_its_own_client() {
    let origin = Origin::default();
    let app = origin.with(&[("cache-control", "max-age=60"), ("set-cookie", "a=b")], public());
    let began = Instant::now();
    let mut bodies: Vec<_> = at_once(&app, 50, || request("GET", "/", &[])).await;
    bodies.sort();
    bodies.dedup();
    assert_eq!((bodies.len(), origin.calls()), (50, 50));
    assert_eq!(began.elapsed(), ms(400), "all wait for the first one only");
    // From now on none waits.
    let began = Instant::now();
    at_once(&app, 50, || request("GET", "/", &[])).await;
    assert_eq!((origin.calls(), began.elapsed()), (100, ms(200)));
}

#[tokio::test(start_paused = true)]
async fn head_is_served_from_get_and_not_the_reverse() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    send(&app, request("HEAD", "/", &[])).await;
    assert_eq!(get(&app, "/").await, "2");
    let (parts, body) = send(&app, request("HEAD", "/", &[])).await;
    assert_eq!((field(&parts, "content-length"), &*body), ("1", ""));
    assert_eq!(origin.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn failing_origin_is_called_once_a_second() {
    let origin = Origin::default();
    let app = boxed(public().layer(origin.service(|_, number| respond(500, &[], number.to_string()))));
    let responses = at_once(&app, 100, || request("GET", "/", &[])).await;
    assert_eq!(origin.calls(), 1);
    assert_eq!(responses.iter().filter(|(status, _)| *status == 500).count(), 1);
    assert!(responses.iter().all(|(status, _)| [500, 503].contains(status)));
    let (parts, _) = send(&app, request("GET", "/", &[])).await;
    assert_eq!((parts.status.as_u16(), field(&parts, "retry-after")), (503, "1"));
    advance(ms(1_000)).await;
    assert_eq!(get(&app, "/").await, "2");
}

#[tokio::test(start_paused = true)]
async fn cancelled_leader_strands_no_waiter() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    let leader = tokio::spawn({
        let app = app.clone();
        async move { get(&app, "/").await }
    });
    sleep(ms(100)).await;
    let waiters = tokio::spawn({
        let app = app.clone();
        async move { at_once(&app, 99, || request("GET", "/", &[])).await }
    });
    sleep(ms(50)).await;
    leader.abort();
    assert!(waiters.await.unwrap().iter().all(|(_, body)| body == "1"));
    assert_eq!(origin.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn stale_response_is_served_while_it_is_loaded() {
    let origin = Origin::default();
    let app = origin.with(&[("cache-control", "max-age=1, stale-while-revalidate=10")], public());
    get(&app, "/").await;
    advance(ms(2_000)).await;
    let began = Instant::now();
    let responses = at_once(&app, 50, || request("GET", "/", &[])).await;
    assert!(responses.iter().all(|(_, body)| body == "1"));
    assert_eq!(began.elapsed(), Duration::ZERO);
    sleep(ms(201)).await;
    assert_eq!((&*get(&app, "/").await, origin.calls()), ("2", 2));
    advance(ms(11_001)).await;
    assert_eq!(get(&app, "/").await, "3", "too old");
}

#[tokio::test(start_paused = true)]
async fn stale_response_is_served_if_the_origin_fails() {
    let origin = Origin::default();
    let service = origin.service(|_, number| match number {
        1 => respond(200, &[("cache-control", "max-age=1, stale-if-error=10")], "good"),
        _ => respond(503, &[], "bad"),
    });
    let app = boxed(public().layer(service));
    get(&app, "/").await;
    advance(ms(2_000)).await;
    for _ in 0..3 {
        let (parts, body) = send(&app, request("GET", "/", &[])).await;
        assert_eq!((parts.status.as_u16(), &*body), (200, "good"));
    }
    assert_eq!(origin.calls(), 2);
    advance(ms(10_000)).await;
    assert_eq!(get(&app, "/").await, "bad");
}

/// Failures are those of RFC 5861, section 4. Regression: 501 and 505 were failures for the client, and not for the stored response.
#[tokio::test(start_paused = true)]
async fn only_failures_of_rfc_5861_serve_a_stale_response() {
    for status in [500, 501, 502, 503, 504, 505, 507] {
        let origin = Origin::default();
        let service = origin.service(move |_, number| match number {
            1 => respond(200, &[("cache-control", "max-age=1, stale-if-error=60")], "good"),
            _ => respond(status, &[], "bad"),
        });
        let app = boxed(public().layer(service));
        get(&app, "/").await;
        advance(ms(2_000)).await;
        let (parts, body) = send(&app, request("GET", "/", &[])).await;
        let expected = if [500, 502, 503, 504].contains(&status) { (200, "good") } else { (status, "bad") };
        assert_eq!((parts.status.as_u16(), &*body), expected);
        assert_eq!(send(&app, request("GET", "/", &[])).await.0.status.as_u16(), expected.0, "{status}, again");
    }
}

/// A client makes the handler fail. Others get 503 for a second, unless there is a stored response.
#[tokio::test(start_paused = true)]
async fn provoked_failure_spares_clients_with_a_stored_response() {
    for (control, status, expected) in [
        ("max-age=1", 500, (503, "")),
        ("max-age=1, stale-if-error=60", 500, (200, "good")),
        ("max-age=1, stale-while-revalidate=60", 500, (200, "good")),
        ("max-age=60", 500, (200, "good")),
        ("max-age=1", 400, (200, "good")),
    ] {
        let origin = Origin::default();
        let service = origin.service(move |request, _| match request.headers().contains_key("x-bad") {
            true => respond(status, &[], "bad"),
            false => respond(200, &[("cache-control", control)], "good"),
        });
        let app = boxed(public().layer(service));
        get(&app, "/").await;
        advance(ms(2_000)).await;
        send(&app, request("GET", "/", &[("x-bad", "1")])).await;
        sleep(ms(300)).await;
        let (parts, body) = send(&app, request("GET", "/", &[])).await;
        let body = if parts.status == 503 { "" } else { &*body };
        assert_eq!((parts.status.as_u16(), body), expected, "{control}, {status}");
        advance(ms(1_000)).await;
        assert_eq!(get(&app, "/").await, "good", "{control}, {status}, after a second");
    }
}

/// Two requests at a time may run. Regression: requests that waited for the response to another one took the permits of further ones.
#[tokio::test(start_paused = true)]
async fn waiting_requests_hold_no_permit_of_the_inner_service() {
    let (origin, backend) = (Origin::default(), MemoryBackend::new());
    let app = || {
        let service = origin.service(|_, number| respond(200, FRESH, number.to_string()));
        let limited = ConcurrencyLimitLayer::new(2).layer(service);
        boxed(CacheLayer::new(backend.clone(), "pages").public().layer(limited))
    };
    for (first, others) in [(app(), None), (app(), Some(app()))] {
        let others = others.unwrap_or_else(|| first.clone());
        send(&first, request("POST", "/", &[])).await;
        let begun = Instant::now();
        let loads = tokio::spawn(async move { get(&first, "/").await });
        sleep(ms(10)).await;
        let mut waiters = JoinSet::new();
        for _ in 0..10 {
            let app = others.clone();
            waiters.spawn(async move { get(&app, "/").await });
        }
        sleep(ms(10)).await;
        send(&others, request("GET", "/other", &[("cache-control", "no-store")])).await;
        assert_eq!(begun.elapsed(), ms(220));
        let response = loads.await.unwrap();
        assert!(waiters.join_all().await.iter().all(|body| *body == response));
    }
}

/// All requests must call the inner service in the end, and wait for their turns.
#[tokio::test(start_paused = true)]
async fn uncachable_responses_wait_for_permits() {
    let origin = Origin::default();
    let limited =
        ConcurrencyLimitLayer::new(2).layer(origin.service(|_, number| respond(200, &[], number.to_string())));
    let app = boxed(public().layer(limited));
    let begun = Instant::now();
    assert_eq!(at_once(&app, 9, || request("GET", "/", &[])).await.len(), 9);
    assert_eq!((origin.calls(), begun.elapsed()), (9, ms(1_000)), "one call, and then two at a time");
}

#[tokio::test(start_paused = true)]
async fn bypassing_requests_do_not_count_for_the_origin_limit() {
    let origin = Origin::default();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let app = origin.with(FRESH, CacheLayer::new(store, "pages").public().origin_limit(1));
    let bypassing = at_once(&app, 5, || request("GET", "/", &[("range", "bytes=0-")]));
    let forbidding = at_once(&app, 5, || request("GET", "/", &[("cache-control", "no-store")]));
    let cached = at_once(&app, 5, || request("GET", "/", &[]));
    let (bypassing, forbidding, cached) = tokio::join!(bypassing, forbidding, cached);
    assert!(bypassing.iter().chain(&forbidding).chain(&cached).all(|(status, _)| *status == 200));
    let others = ["/a", "/b"].map(|path| send(&app, request("GET", path, &[])));
    let [a, b] = others;
    let (a, b) = tokio::join!(a, b);
    let mut statuses = [a.0.status.as_u16(), b.0.status.as_u16()];
    statuses.sort();
    assert_eq!(statuses, [200, 503]);
}

#[tokio::test(start_paused = true)]
async fn without_the_store_few_requests_reach_the_origin() {
    let origin = Origin::default();
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().fail(Failure::Unavailable);
    let app = origin.with(FRESH, CacheLayer::new(store, "pages").public().origin_limit(3));
    let mut requests = JoinSet::new();
    for path in 0..20 {
        let app = app.clone();
        requests.spawn(async move { send(&app, request("GET", &format!("/{path}"), &[])).await.0 });
    }
    let (served, rejected): (Vec<_>, Vec<_>) =
        requests.join_all().await.into_iter().partition(|parts| parts.status == 200);
    assert_eq!((served.len(), origin.calls()), (3, 3));
    for parts in rejected {
        assert_eq!((parts.status.as_u16(), field(&parts, "retry-after")), (503, "1"));
        assert_eq!(parts.headers["content-type"], "application/problem+json");
    }
}

#[tokio::test(start_paused = true)]
async fn fields_in_vary_select_the_response() {
    let origin = Origin::default();
    let service = origin.service(|request, number| {
        let language = request.headers().get("accept-language").map_or("", |value| value.to_str().unwrap());
        let body = format!("{language} {number}");
        respond(200, &[("cache-control", "max-age=60"), ("vary", "Accept-Language")], body)
    });
    let app = boxed(public().layer(service));
    let de = || request("GET", "/", &[("accept-language", "de")]);
    let fr = || request("GET", "/", &[("accept-language", "fr")]);
    assert_eq!((&*send(&app, de()).await.1, &*send(&app, fr()).await.1), ("de 1", "fr 2"));
    assert_eq!((&*send(&app, de()).await.1, &*send(&app, fr()).await.1), ("de 1", "fr 2"));
    assert_eq!((&*get(&app, "/").await, &*get(&app, "/").await), (" 3", " 3"));
    send(&app, request("POST", "/", &[])).await;
    assert_eq!((&*send(&app, de()).await.1, &*send(&app, fr()).await.1), ("de 5", "fr 6"));
}

#[tokio::test(start_paused = true)]
async fn requests_at_once_get_their_own_variant() {
    let origin = Origin::default();
    let service = origin.service(|request, _| {
        let language = request.headers()["accept-language"].to_str().unwrap().to_owned();
        respond(200, &[("cache-control", "max-age=60"), ("vary", "accept-language")], language)
    });
    let app = boxed(public().layer(service));
    let mut requests = JoinSet::new();
    for number in 0..100 {
        let (app, language) = (app.clone(), ["de", "fr"][number % 2]);
        requests.spawn(async move {
            let (_, body) = send(&app, request("GET", "/", &[("accept-language", language)])).await;
            assert_eq!(body, language);
        });
    }
    requests.join_all().await;
    assert_eq!(origin.calls(), 2);
}

/// Regression: variants had 64 slots of a URI, so two of them could displace each other.
#[tokio::test(start_paused = true)]
async fn variants_of_one_uri_do_not_displace_each_other() {
    let origin = Origin::default();
    let service = origin.service(|request, _| {
        let value = request.headers()["x-a"].to_str().unwrap().to_owned();
        respond(200, &[("cache-control", "max-age=600"), ("vary", "x-a")], value)
    });
    let app = boxed(public().layer(service));
    for _ in 0..2 {
        for number in 0..200 {
            let mut request = request("GET", "/", &[]);
            request.headers_mut().insert("x-a", number.into());
            assert_eq!(send(&app, request).await.1, number.to_string());
        }
    }
    assert_eq!(origin.calls(), 200);
}

#[tokio::test(start_paused = true)]
async fn new_name_in_vary_is_learned() {
    let origin = Origin::default();
    let service = origin.service(|request, number| {
        let get = |name| request.headers().get(name).map_or("", |value| value.to_str().unwrap());
        let vary = if number == 1 { ("vary", "x-a") } else { ("vary", "x-a, x-b") };
        respond(200, &[("cache-control", "max-age=60"), vary], format!("{}{}", get("x-a"), get("x-b")))
    });
    let app = boxed(public().layer(service));
    for _ in 0..3 {
        for (fields, expected) in
            [(&[("x-a", "1")][..], "1"), (&[("x-a", "2"), ("x-b", "1")], "21"), (&[("x-a", "2"), ("x-b", "2")], "22")]
        {
            assert_eq!(send(&app, request("GET", "/", fields)).await.1, expected);
        }
    }
    assert!(origin.calls() <= 5, "{}", origin.calls());
}

#[tokio::test(start_paused = true)]
async fn unsafe_method_removes_the_response() {
    let origin = Origin::default();
    let service = origin.service(|request, number| match request.method().as_str() {
        "DELETE" => respond(403, &[], ""),
        _ => respond(200, FRESH, number.to_string()),
    });
    let app = boxed(public().layer(service));
    assert_eq!(get(&app, "/a").await, "1");
    assert_eq!(get(&app, "/b").await, "2");
    send(&app, request("DELETE", "/a", &[])).await;
    assert_eq!(get(&app, "/a").await, "1", "it has failed");
    let (parts, _) = send(&app, request("PUT", "/a", &[("authorization", "x")])).await;
    assert_eq!(status_of(&parts), "Tollgate; fwd=method");
    assert_eq!((&*get(&app, "/a").await, &*get(&app, "/b").await), ("5", "2"));
}

#[tokio::test(start_paused = true)]
async fn load_before_a_change_is_not_served_after_it() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    let before = tokio::spawn({
        let app = app.clone();
        async move { get(&app, "/").await }
    });
    sleep(ms(100)).await;
    send(&app, request("POST", "/", &[])).await;
    assert_eq!(before.await.unwrap(), "1");
    assert_eq!(get(&app, "/").await, "3");
}

#[tokio::test(start_paused = true)]
async fn conditional_request_is_answered_by_304() {
    let origin = Origin::default();
    let fields = &[("cache-control", "max-age=60"), ("etag", "\"v1\""), ("content-type", "text/plain")];
    let app = origin.with(fields, public());
    let conditional = |etag| request("GET", "/", &[("if-none-match", etag)]);
    for status in ["Tollgate; fwd=miss", "Tollgate; hit; ttl=60"] {
        let (parts, body) = send(&app, conditional("W/\"v1\"")).await;
        assert_eq!((parts.status.as_u16(), &*body, status_of(&parts)), (304, "", status));
        assert_eq!((field(&parts, "etag"), field(&parts, "content-type")), ("\"v1\"", ""));
    }
    let (parts, body) = send(&app, conditional("\"v2\"")).await;
    assert_eq!((parts.status.as_u16(), &*body), (200, "1"));
    assert_eq!(origin.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn some_requests_bypass_the_cache() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    assert_eq!(get(&app, "/").await, "1");
    for name in ["range", "authorization", "cookie", "if-match", "if-range", "if-unmodified-since", "upgrade"] {
        let (parts, body) = send(&app, request("GET", "/", &[(name, "x")])).await;
        assert_eq!(status_of(&parts), "Tollgate; fwd=bypass", "{name}");
        assert_ne!(body, "1", "{name}");
    }
    let with_body = Request::get("/").body(Body::from("x")).unwrap();
    assert_eq!(status_of(&send(&app, with_body).await.0), "Tollgate; fwd=bypass");
    assert_eq!(get(&app, "/").await, "1");
}

#[tokio::test(start_paused = true)]
async fn client_can_forbid_storing_but_not_force_a_load() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    let with = |directive| request("GET", "/", &[("cache-control", directive)]);
    assert_eq!(send(&app, with("no-store")).await.1, "1");
    assert_eq!(get(&app, "/").await, "2");
    for directive in ["no-cache", "max-age=0", "no-store"] {
        assert_eq!(send(&app, with(directive)).await.1, "2", "{directive}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_principal_has_its_own_responses() {
    let origin = Origin::default();
    let layer = CacheLayer::new(MemoryBackend::new(), "pages").per(header("x-user"));
    let app = boxed(layer.layer(origin.service(|_, number| respond(200, FRESH, number.to_string()))));
    let of = |user| request("GET", "/", &[("x-user", user), ("authorization", "x"), ("cookie", "a=b")]);
    for _ in 0..2 {
        assert_eq!((&*send(&app, of("alice")).await.1, &*send(&app, of("bob")).await.1), ("1", "2"));
    }
    for number in ["3", "4"] {
        let (parts, body) = send(&app, request("GET", "/", &[])).await;
        assert_eq!((status_of(&parts), &*body), ("Tollgate; fwd=bypass", number));
    }
    let shared = CacheLayer::new(MemoryBackend::new(), "pages").per(GlobalKey);
    let app = boxed(shared.layer(origin.service(|_, number| respond(200, FRESH, number.to_string()))));
    assert_ne!(get(&app, "/").await, get(&app, "/").await, "a key that identifies nobody is no principal");
}

#[tokio::test(start_paused = true)]
async fn key_has_scheme_host_path_and_query() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public());
    let uris = ["http://a/", "https://a/", "http://b/", "http://a/?q=1", "http://a/?q=2", "http://a/x"];
    let first = get(&app, uris[0]).await;
    for uri in &uris[1..] {
        assert_ne!(get(&app, uri).await, first, "{uri}");
    }
    assert_eq!(origin.calls(), uris.len());
    assert_eq!(get(&app, "http://A/").await, first);
}

#[tokio::test(start_paused = true)]
async fn cookies_of_requests_can_be_ignored() {
    let origin = Origin::default();
    let app = origin.with(FRESH, public().ignore_cookies());
    for cookie in ["a=1", "a=2", ""] {
        assert_eq!(send(&app, request("GET", "/", &[("cookie", cookie)])).await.1, "1");
    }
    assert_ne!(send(&app, request("GET", "/", &[("authorization", "x")])).await.1, "1");
}

#[tokio::test(start_paused = true)]
async fn handler_that_requests_its_own_uri_gets_an_error() {
    let slot: Arc<std::sync::OnceLock<App>> = Arc::default();
    let inner = Arc::clone(&slot);
    let service = service_fn(move |_: Request<Body>| {
        let app = inner.get().cloned();
        async move {
            let (parts, _) = send(&app.unwrap(), request("GET", "/", &[])).await;
            Ok::<_, Infallible>(respond(200, FRESH, parts.status.as_u16().to_string()))
        }
    });
    let app = boxed(public().layer(service));
    assert!(slot.set(app.clone()).is_ok());
    assert_eq!(get(&app, "/").await, "500");
}
