//! `CacheLayer` when something breaks: bodies, handlers, stores; and how it streams.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::mpsc;
use tokio::time::{advance, sleep};
use tollgate::testing::FaultStore;
use tollgate::{BoxError, CacheLayer, MemoryBackend};
use tower::{Layer, ServiceExt, service_fn};

use crate::http::{App, Origin, boxed, get, ms, public, request, respond, send};

type Part = Result<Frame<Bytes>, BoxError>;

/// A body whose parts the test sends.
fn body_of(mut parts: mpsc::UnboundedReceiver<Part>) -> Body {
    let stream = futures_util::stream::poll_fn(move |cx| parts.poll_recv(cx));
    Body::new(StreamBody::new(stream))
}

fn data(text: &'static str) -> Part {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

/// A body of these parts.
fn parts(list: Vec<Part>) -> Body {
    let (sender, receiver) = mpsc::unbounded_channel();
    for part in list {
        sender.send(part).unwrap();
    }
    body_of(receiver)
}

const FRESH: &[(&str, &str)] = &[("cache-control", "max-age=60")];
const FRESH_TEN: &[(&str, &str)] = &[("cache-control", "max-age=60"), ("content-length", "10")];

/// Responds with a bad body first, and then with good ones.
fn app(origin: &Origin, layer: CacheLayer<tollgate::GlobalKey>, bad: fn() -> Response<Body>) -> App {
    boxed(layer.layer(origin.service(move |_, number| if number == 1 { bad() } else { respond(200, FRESH, "good") })))
}

#[tokio::test(start_paused = true)]
async fn body_that_fails_midway_is_not_stored() {
    let origin = Origin::default();
    let app = app(&origin, public(), || respond(200, FRESH, parts(vec![data("ha"), Err("cut".into())])));
    let (_, waiter) = tokio::join!(
        async {
            let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
            let mut body = response.into_body();
            assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "ha");
            assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "cut");
        },
        async {
            sleep(ms(50)).await;
            send(&app, request("GET", "/", &[])).await.0
        }
    );
    assert_eq!(waiter.status, 503, "nothing to share");
    advance(ms(1_000)).await;
    assert_eq!(get(&app, "/").await, "good");
}

#[tokio::test(start_paused = true)]
async fn body_of_wrong_length_is_not_stored() {
    for bad in [|| respond(200, FRESH_TEN, "short") as Response<Body>, || respond(200, FRESH_TEN, "much too long")] {
        let origin = Origin::default();
        let app = app(&origin, public(), bad);
        let (parts, body) = send(&app, request("GET", "/", &[])).await;
        assert!(parts.headers["content-length"] == "10" && body.len() != 10, "as the origin has sent it");
        assert_eq!(send(&app, request("GET", "/", &[])).await.0.status, 503);
        advance(ms(1_000)).await;
        assert_eq!(get(&app, "/").await, "good");
    }
}

#[tokio::test(start_paused = true)]
async fn large_body_is_streamed_and_not_stored() {
    let origin = Origin::default();
    let layer = public().max_response(1_000);
    let app = boxed(layer.layer(origin.service(|_, number| {
        let chunk = || Ok(Frame::data(Bytes::from(vec![b'x'; 600])));
        respond(
            200,
            &[("cache-control", "max-age=60")],
            parts(vec![chunk(), chunk(), chunk(), Ok(Frame::data(number.to_string().into()))]),
        )
    })));
    let (one, two) = tokio::join!(get(&app, "/"), get(&app, "/"));
    assert_eq!((one.len(), two.len()), (1_801, 1_801));
    assert!(one.ends_with('1') && two.ends_with('2'));
    assert_eq!(origin.calls(), 2);
}

/// Regression: the number of parts was not limited, and each part takes memory besides its bytes.
#[tokio::test(start_paused = true)]
async fn body_of_tiny_parts_counts_its_memory() {
    for (count, calls) in [(30, 1), (50, 2)] {
        let origin = Origin::default();
        let app =
            boxed(public().max_response(10_000).layer(
                origin.service(move |_, _| respond(200, FRESH, parts((0..count).map(|_| data("x")).collect()))),
            ));
        for _ in 0..2 {
            assert_eq!(get(&app, "/").await.len(), count);
        }
        assert_eq!(origin.calls(), calls, "{count}");
    }
}

#[tokio::test(start_paused = true)]
async fn first_client_gets_parts_while_they_are_stored() {
    let (sender, receiver) = mpsc::unbounded_channel();
    let receiver = Arc::new(std::sync::Mutex::new(Some(receiver)));
    let service = service_fn(move |_: Request<Body>| {
        let parts = receiver.lock().unwrap().take().expect("one call");
        async move { Ok::<_, Infallible>(respond(200, FRESH, body_of(parts))) }
    });
    let app = boxed(public().layer(service));
    let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
    let mut body = response.into_body();
    for text in ["one", "two"] {
        sender.send(data(text)).unwrap();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), text);
    }
    let waiter = tokio::spawn({
        let app = app.clone();
        async move { get(&app, "/").await }
    });
    sleep(ms(10)).await;
    drop(sender);
    assert!(body.frame().await.is_none());
    assert_eq!(waiter.await.unwrap(), "onetwo");
    assert_eq!(get(&app, "/").await, "onetwo");
}

#[tokio::test(start_paused = true)]
async fn client_that_goes_midway_strands_no_waiter() {
    let origin = Origin::default();
    let (sender, receiver) = mpsc::unbounded_channel();
    let receiver = Arc::new(std::sync::Mutex::new(Some(receiver)));
    let app = boxed(public().layer(origin.service(move |_, _| match receiver.lock().unwrap().take() {
        Some(parts) => respond(200, FRESH, body_of(parts)),
        None => respond(200, FRESH, "again"),
    })));
    let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
    let waiter = tokio::spawn({
        let app = app.clone();
        async move { get(&app, "/").await }
    });
    sleep(ms(10)).await;
    sender.send(data("one")).unwrap();
    drop(response);
    sleep(ms(10)).await;
    drop(sender);
    assert_eq!((&*waiter.await.unwrap(), origin.calls()), ("one", 1), "the load goes on for the waiter");
}

#[tokio::test(start_paused = true)]
async fn load_without_callers_is_cancelled() {
    let origin = Origin::default();
    let (sender, receiver) = mpsc::unbounded_channel();
    let receiver = Arc::new(std::sync::Mutex::new(Some(receiver)));
    let app = boxed(public().layer(origin.service(move |_, _| match receiver.lock().unwrap().take() {
        Some(parts) => respond(200, FRESH, body_of(parts)),
        None => respond(200, FRESH, "again"),
    })));
    let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
    drop(response);
    sleep(ms(10)).await;
    assert!(sender.send(data("one")).is_err(), "the body was dropped");
    assert_eq!(get(&app, "/").await, "again");
}

/// Regression: a client that counts bytes goes before the end of the body, and the load was cancelled then.
#[tokio::test(start_paused = true)]
async fn client_that_counts_bytes_does_not_cancel_the_load() {
    let origin = Origin::default();
    let app = boxed(
        public().layer(origin.service(|_, _| respond(200, FRESH_TEN, parts(vec![data("01234"), data("56789")])))),
    );
    let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
    let mut body = response.into_body();
    let mut received = 0;
    while received < 10 {
        received += body.frame().await.unwrap().unwrap().into_data().unwrap().len();
    }
    drop(body);
    sleep(ms(10)).await;
    assert_eq!((&*get(&app, "/").await, origin.calls()), ("0123456789", 1));
}

/// Regression: the response was put under its own key after the client had got the end of the body.
#[tokio::test(start_paused = true)]
async fn response_with_vary_is_stored_by_a_slow_store() {
    let store = FaultStore::new(MemoryBackend::new());
    store.faults().delay(ms(5));
    let origin = Origin::default();
    let fields = &[("cache-control", "max-age=60"), ("content-length", "5"), ("vary", "accept")];
    let layer = CacheLayer::new(store, "pages").public().jitter(0.0).early_refresh(0.0);
    let app = boxed(layer.layer(origin.service(move |_, _| respond(200, fields, "01234"))));
    for _ in 0..3 {
        let mut body = app.clone().oneshot(request("GET", "/", &[])).await.unwrap().into_body();
        let mut received = 0;
        while received < 5 {
            received += body.frame().await.unwrap().unwrap().into_data().unwrap().len();
        }
        drop(body);
        sleep(ms(500)).await;
    }
    assert_eq!(origin.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn slow_body_is_streamed_beyond_the_load_timeout() {
    let origin = Origin::default();
    let app = boxed(public().load_timeout(ms(500)).layer(origin.service(|_, _| {
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            for text in ["one", "two", "three"] {
                let _ = sender.send(data(text));
                sleep(ms(300)).await;
            }
        });
        respond(200, FRESH, body_of(receiver))
    })));
    assert_eq!(get(&app, "/").await, "onetwothree");
    advance(ms(1_000)).await;
    assert_eq!(get(&app, "/").await, "onetwothree");
    assert_eq!(origin.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn trailers_are_stored() {
    let origin = Origin::default();
    let app = boxed(public().layer(origin.service(|_, _| {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("x-sum", http::HeaderValue::from_static("7"));
        respond(200, FRESH, parts(vec![data("one"), Ok(Frame::trailers(trailers))]))
    })));
    for _ in 0..2 {
        let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.trailers().unwrap()["x-sum"], "7");
        assert_eq!(body.to_bytes(), "one");
    }
    assert_eq!(origin.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn panic_is_an_error_for_all() {
    let has_panicked = Arc::new(AtomicBool::new(false));
    let service = service_fn(move |_: Request<Body>| {
        let has_panicked = Arc::clone(&has_panicked);
        async move {
            sleep(ms(200)).await;
            assert!(has_panicked.swap(true, Ordering::Relaxed), "the first call panics");
            Ok::<_, Infallible>(respond(200, FRESH, "good"))
        }
    });
    let app = boxed(public().layer(service));
    let (one, two) = tokio::join!(send(&app, request("GET", "/", &[])), send(&app, request("GET", "/", &[])));
    assert_eq!((one.0.status.as_u16(), two.0.status.as_u16()), (500, 500));
    advance(ms(1_000)).await;
    assert_eq!(get(&app, "/").await, "good");
}

#[tokio::test(start_paused = true)]
async fn error_of_the_service_reaches_its_caller() {
    let service = service_fn(async |_: Request<Body>| {
        sleep(ms(200)).await;
        Err::<Response<Body>, BoxError>("broken".into())
    });
    let app = public().layer(service);
    let (one, two) =
        tokio::join!(app.clone().oneshot(request("GET", "/", &[])), app.clone().oneshot(request("GET", "/", &[])));
    assert_eq!(one.unwrap_err().to_string(), "broken");
    assert_eq!(two.unwrap().status(), 503);
}

#[tokio::test(start_paused = true)]
async fn handler_that_takes_too_long_is_dropped() {
    let app = boxed(public().load_timeout(ms(100)).layer(Origin::default().service(|_, _| respond(200, FRESH, ""))));
    assert_eq!(send(&app, request("GET", "/", &[])).await.0.status, 504);
}

#[tokio::test(start_paused = true)]
async fn stale_response_survives_an_error_of_the_service() {
    let calls = Arc::new(AtomicBool::new(false));
    let service = service_fn(move |_: Request<Body>| {
        let is_first = !calls.swap(true, Ordering::Relaxed);
        async move {
            let fields = &[("cache-control", "max-age=1, stale-if-error=60")];
            if is_first { Ok(respond(200, fields, "good")) } else { Err::<_, BoxError>("broken".into()) }
        }
    });
    let app = CacheLayer::new(MemoryBackend::new(), "pages").public().layer(service);
    for _ in 0..3 {
        let response = app.clone().oneshot(request("GET", "/", &[])).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "good");
        advance(Duration::from_secs(10)).await;
    }
}
