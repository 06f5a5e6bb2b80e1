//! The final charge of an HTTP or gRPC request: set by the response status, the handler or the trailers, and kept if the client
//! disconnects.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty};
use tollgate::config::{Rules, RulesLayer};
use tollgate::delay_queue::JobResponder;
use tollgate::grpc::{self, GrpcResponder};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::rate_limit::{Decision, Outcome, RateLimitHandle, Receipt};
use tollgate::responder::SameBody;
use tollgate::testing::TestJob;
use tollgate::{
    BoxError, ErrorResponder, GlobalKey, HttpResponder, Job, Key, MemoryBackend, Policy, Quota, RateLimitLayer,
    StoreError,
};
use tower::{Layer, Service, ServiceExt, service_fn};

fn tokens() -> Policy {
    Policy::new("tokens", Quota::per_hour(100).fixed_window())
}

async fn left(store: &impl RateLimitStore) -> u64 {
    store.peek(&tokens(), &Key::GLOBAL, 1).await.unwrap().remaining().unwrap()
}

fn request() -> Request<()> {
    Request::new(())
}

/// Responds with the status that the path names.
async fn status(request: Request<()>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let status = request.uri().path().trim_start_matches('/').parse::<u16>().unwrap();
    let mut response = Response::new(Empty::new());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    Ok(response)
}

#[tokio::test]
async fn preset_decides_which_statuses_are_charged() {
    for (charges_failures, path, charged) in [
        (true, "/200", false),
        (true, "/302", false),
        (true, "/401", true),
        (true, "/500", true),
        (false, "/200", true),
        (false, "/302", true),
        (false, "/404", false),
        (false, "/503", false),
    ] {
        let store = MemoryBackend::new();
        let preset = if charges_failures { tollgate::http::failures() } else { tollgate::http::successes() };
        let service = RateLimitLayer::new(store.clone(), tokens()).charge_on(preset).layer(service_fn(status));
        service.oneshot(Request::get(path).body(()).unwrap()).await.unwrap();
        assert_eq!(left(&store).await, if charged { 99 } else { 100 }, "{path}");
    }
}

#[tokio::test]
async fn handler_settles_reserved_cost() {
    let store = MemoryBackend::new();
    let handler = async |request: Request<()>| {
        let limit = request.extensions().get::<RateLimitHandle>().unwrap().clone();
        assert_eq!((limit.cost(), limit.decision().unwrap().remaining()), (40, Some(60)));
        limit.settle(25);
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    };
    let service = RateLimitLayer::new(store.clone(), tokens()).cost(|_: &Request<()>| 40).layer(service_fn(handler));
    let response = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(left(&store).await, 75);
    let decision = response.extensions().get::<Decision>().unwrap();
    assert_eq!((decision.outcome(), decision.remaining()), (Outcome::Allowed, Some(60)));
}

fn per_hour(name: &str, limit: u64) -> Policy {
    Policy::new(name, Quota::per_hour(limit).fixed_window())
}

/// Reports the decision that the handler finds in the request extensions in a response header: `<remaining> of <limit>`.
async fn tell(request: Request<()>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let mut response = Response::new(Empty::new());
    if let Some(limit) = request.extensions().get::<RateLimitHandle>() {
        let decision = limit.decision().unwrap();
        let text = format!("{} of {}", decision.remaining().unwrap(), decision.capacity());
        response.headers_mut().insert("x-decision", text.parse().unwrap());
    }
    Ok(response)
}

/// What the handler has read, and what layers further out read in the response.
async fn read<S, B>(service: S) -> (Option<String>, Option<(Option<u64>, u64)>)
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    let response = service.oneshot(request()).await.unwrap();
    let text = response.headers().get("x-decision").map(|text| text.to_str().unwrap().to_owned());
    (text, response.extensions().get::<Decision>().map(|decision| (decision.remaining(), decision.capacity())))
}

#[tokio::test]
async fn extensions_hold_the_most_restrictive_decision() {
    let sizes = [(5, 9, 7), (9, 5, 7), (7, 9, 5)];
    for (layer, first, second) in sizes {
        // A shadow policy restricts no request, so its decision is not stored.
        let layer = RateLimitLayer::new(MemoryBackend::new(), per_hour("layer", layer))
            .and(per_hour("first", first), GlobalKey)
            .and(per_hour("second", second), GlobalKey)
            .and(per_hour("trial", 1).shadow(), GlobalKey);
        let (handler, response) = read(layer.layer(service_fn(tell))).await;
        assert_eq!((handler.as_deref(), response), (Some("4 of 5"), Some((Some(4), 5))));
    }
    let layer = RateLimitLayer::new(MemoryBackend::new(), per_hour("layer", 9));
    let layer = layer.and(per_hour("full", 1), GlobalKey).and(per_hour("closed", 0), GlobalKey);
    let (handler, response) = read(layer.layer(service_fn(tell))).await;
    assert_eq!((handler, response), (None, Some((None, 0))), "a quota of 0 is the most restrictive");
}

#[tokio::test]
async fn handler_sees_innermost_layer_and_client_the_strictest() {
    for (outer, inner) in [(9, 5), (5, 9)] {
        let store = MemoryBackend::new();
        let layers = [("outer", outer), ("inner", inner)];
        let [outer, inner] = layers.map(|(name, limit)| RateLimitLayer::new(store.clone(), per_hour(name, limit)));
        let layered = |answers: bool| {
            // The test covers the HTTP responder and the gRPC responder.
            let inner = inner.clone().layer(service_fn(tell));
            if answers {
                outer.clone().layer(inner).boxed_clone()
            } else {
                outer.clone().responder(GrpcResponder::new()).layer(inner).boxed_clone()
            }
        };
        for (answers, left) in [(true, 1), (false, 2)] {
            let (handler, response) = read(layered(answers)).await;
            let of_inner = layers[1].1;
            assert_eq!(handler, Some(format!("{} of {of_inner}", of_inner - left)));
            assert_eq!(response, Some((Some(5 - left), 5)));
        }
    }
}

/// If an inner layer that counts nothing left the outer layer's handle in the request, `settle` in the handler would change the outer
/// charge.
#[tokio::test]
async fn handler_sees_no_charge_of_another_layer() {
    let handler = |expected: &'static [&'static str]| {
        service_fn(move |request: Request<()>| {
            let handle = request.extensions().get::<RateLimitHandle>();
            assert_eq!(handle.map(|handle| handle.policies().collect::<Vec<_>>()).unwrap_or_default(), expected);
            handle.inspect(|handle| handle.settle(50));
            std::future::ready(Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())))
        })
    };
    let store = MemoryBackend::new();
    let outer = RateLimitLayer::new(store.clone(), tokens());
    let inner = || RateLimitLayer::new(MemoryBackend::new(), per_hour("inner", 9)).and(per_hour("total", 9), GlobalKey);
    outer.layer(inner().layer(handler(&["inner", "total"]))).oneshot(request()).await.unwrap();
    assert_eq!(left(&store).await, 99);

    let listed = inner().allow(|_: &Request<()>| true);
    outer.layer(listed.clone().layer(handler(&[]))).oneshot(request()).await.unwrap();
    outer.layer(listed.clone().responder(GrpcResponder::new()).layer(handler(&[]))).oneshot(request()).await.unwrap();
    let rules = "rules: [{ path: /counted, policy: rule, key: global }]
policies: { rule: { limits: [{ algorithm: fixed_window, quota: 1, per: 1h }] } }";
    let rules = RulesLayer::new(MemoryBackend::new(), Rules::from_yaml(rules).unwrap());
    outer.layer(rules.layer(handler(&[]))).oneshot(request()).await.unwrap();
    assert_eq!(left(&store).await, 96);

    // A service of jobs hides the outer handle as well.
    let job = service_fn(async |job: Job<u32>| {
        assert!(job.extensions().get::<RateLimitHandle>().is_none());
        Ok::<_, BoxError>(())
    });
    let all = RateLimitLayer::new(MemoryBackend::new(), tokens()).responder(JobResponder);
    let service = all.layer(all.clone().allow(|_: &Job<u32>| true).layer(job));
    service.oneshot(TestJob::new(7).build()).await.unwrap();

    // With `extensions(false)`, the inner layer leaves the outer layer's handle in the request.
    let silent = listed.responder(HttpResponder::new().extensions(false));
    outer.layer(silent.layer(handler(&["tokens"]))).oneshot(request()).await.unwrap();
    assert_eq!(left(&store).await, 46);
}

#[tokio::test]
async fn extensions_can_be_disabled() {
    let layer = RateLimitLayer::new(MemoryBackend::new(), tokens());
    for (extensions, is_set) in [(true, true), (false, false)] {
        let layer = layer.clone().responder(HttpResponder::new().extensions(extensions));
        let service = layer.clone().layer(service_fn(tell));
        let response = service.clone().oneshot(request()).await.unwrap();
        assert!(response.headers().contains_key("ratelimit"), "header fields do not depend on extensions");
        let (handler, response) = read(service).await;
        assert_eq!((handler.is_some(), response.is_some()), (is_set, is_set));
        // The setting applies to rejections too.
        let (_, response) = read(layer.cost(|_: &Request<()>| 100).layer(service_fn(tell))).await;
        assert_eq!(response.is_some(), is_set);
    }
}

/// Counts the chunks that it yields, and settles on the handle's last value when it ends or is dropped.
struct Metered {
    limit: RateLimitHandle,
    chunks: u64,
}

impl Body for Metered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.chunks == 5 {
            return Poll::Ready(None);
        }
        self.chunks += 1;
        self.limit.settle(self.chunks);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"token")))))
    }
}

#[tokio::test]
async fn stream_is_charged_for_the_chunks_sent() {
    for (read, charged) in [(5, 5), (2, 2)] {
        let store = MemoryBackend::new();
        let handler = async |mut request: Request<()>| {
            let limit = request.extensions_mut().remove::<RateLimitHandle>().unwrap();
            Ok::<_, Infallible>(Response::new(Metered { limit, chunks: 0 }))
        };
        let service =
            RateLimitLayer::new(store.clone(), tokens()).cost(|_: &Request<()>| 40).layer(service_fn(handler));
        let mut body = service.oneshot(request()).await.unwrap().into_body();
        for _ in 0..read {
            body.frame().await.unwrap().unwrap();
            assert_eq!(left(&store).await, 60, "settled before the body ended");
        }
        // The client reads the body to the end, or disconnects in the middle.
        drop(body);
        assert_eq!(left(&store).await, 100 - charged);
    }
}

#[tokio::test(start_paused = true)]
async fn handler_charge_survives_client_disconnect() {
    let store = MemoryBackend::new();
    let handler = async |request: Request<()>| {
        request.extensions().get::<RateLimitHandle>().unwrap().charge(9);
        std::future::pending::<()>().await;
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    };
    let service = RateLimitLayer::new(store.clone(), tokens()).layer(service_fn(handler));
    let gave_up = tokio::time::timeout(Duration::from_secs(1), service.oneshot(request())).await;
    assert!(gave_up.is_err());
    assert_eq!(left(&store).await, 90);
}

/// A message, followed by optional trailers.
struct Call {
    message: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl Body for Call {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(message) = self.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }
}

fn grpc_status(code: &'static str) -> HeaderMap {
    HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static(code))])
}

#[tokio::test]
async fn grpc_outcome_is_read_from_trailers() {
    // A lowercase path selects the status in the trailers. An uppercase path puts the same status in the headers.
    let handler = async |request: Request<()>| {
        let (trailers, headers) = match request.uri().path() {
            "/ok" => (Some(grpc_status("0")), HeaderMap::new()),
            "/failed" => (Some(grpc_status("13")), HeaderMap::new()),
            "/OK" => (None, grpc_status("0")),
            "/FAILED" => (None, grpc_status("13")),
            _ => (None, HeaderMap::new()),
        };
        let mut response = Response::new(Call { message: Some(Bytes::from_static(b"message")), trailers });
        *response.headers_mut() = headers;
        Ok::<_, Infallible>(response)
    };
    // `/none` ends without a status.
    for (path, ok) in [("/ok", true), ("/failed", false), ("/OK", true), ("/FAILED", false), ("/none", false)] {
        for (preset, charged) in [(grpc::failures(), !ok), (grpc::successes(), ok)] {
            let store = MemoryBackend::new();
            let service = RateLimitLayer::new(store.clone(), tokens())
                .responder(GrpcResponder::new())
                .charge_on(preset)
                .layer(service_fn(handler));
            let response = service.oneshot(Request::get(path).body(()).unwrap()).await.unwrap();
            let in_headers = response.headers().contains_key("grpc-status");
            assert!(in_headers || left(&store).await == 99, "{path}: the outcome is not known yet");
            let body = response.into_body().collect().await.unwrap();
            assert_eq!(body.trailers().is_some(), matches!(path, "/ok" | "/failed"), "trailers reach the client");
            assert_eq!(left(&store).await, if charged { 99 } else { 100 }, "{path} {preset:?}");
        }
    }
}

/// `SameBody` keeps the response body type, so the observing body wraps the body that carries the trailers.
#[tokio::test]
async fn grpc_outcome_is_read_from_trailers_of_unchanged_bodies() {
    for (status, left_of_it) in [("0", 100), ("13", 99)] {
        let handler = async move |_: Request<()>| {
            let call = Call { message: Some(Bytes::from_static(b"message")), trailers: Some(grpc_status(status)) };
            Ok::<_, Infallible>(Response::new(axum::body::Body::new(call)))
        };
        let store = MemoryBackend::new();
        let service = RateLimitLayer::new(store.clone(), tokens())
            .responder(SameBody::new(GrpcResponder::new()))
            .charge_on(grpc::failures())
            .layer(service_fn(handler));
        let response: Response<axum::body::Body> = service.oneshot(request()).await.unwrap();
        assert_eq!(left(&store).await, 99, "the outcome is not known yet");
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.trailers(), Some(&grpc_status(status)));
        assert_eq!(left(&store).await, left_of_it);
    }
}

struct Pieces(VecDeque<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }
}

/// gRPC-Web sends the trailers as the last message of the body. A layer that ignored this message would see every call end without a
/// status.
#[tokio::test]
async fn grpc_web_outcome_is_read_from_last_message() {
    let message = |flags: u8, text: &str| {
        [&[flags][..], &u32::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat()
    };
    let messages = [message(0, "\u{80}a message"), message(0, "")];
    let ends = [
        (Some("grpc-status:0\r\n"), true),
        (Some("grpc-message: fine\r\nGrpc-Status: 0\r\n"), true),
        (Some("grpc-status:13\r\ngrpc-message:grpc-status:0\r\n"), false),
        (Some(""), false),
        (None, false),
    ];
    for (content_type, is_text) in [("application/grpc-web+proto", false), ("application/grpc-web-text", true)] {
        for (end, ok) in ends {
            let messages = messages.iter().cloned().chain(end.map(|end| message(0x80, end)));
            let body: Vec<u8> = match is_text {
                true => messages.flat_map(|message| BASE64.encode(message).into_bytes()).collect(),
                false => messages.flatten().collect(),
            };
            // The result does not depend on where the body is cut into frames.
            for pieces in [1, 2, 3, 7, body.len()] {
                for (preset, charged) in [(grpc::failures(), !ok), (grpc::successes(), ok)] {
                    let store = MemoryBackend::new();
                    let handler = async |_: Request<()>| {
                        let pieces = body.chunks(pieces).map(Bytes::copy_from_slice).collect();
                        let answer = Response::builder().header("content-type", content_type);
                        Ok::<_, Infallible>(answer.body(Pieces(pieces)).unwrap())
                    };
                    let layer = RateLimitLayer::new(store.clone(), tokens()).responder(GrpcResponder::new());
                    let service = layer.charge_on(preset).layer(service_fn(handler));
                    let answer = service.oneshot(request()).await.unwrap();
                    assert_eq!(left(&store).await, 99, "the outcome is not known yet");
                    assert_eq!(
                        answer.into_body().collect().await.unwrap().to_bytes(),
                        body,
                        "the body reaches the client unchanged"
                    );
                    let left = left(&store).await;
                    assert_eq!(left, if charged { 99 } else { 100 }, "{content_type} {end:?} {pieces} {preset:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn grpc_call_dropped_before_trailers_is_a_failure() {
    let handler = async |_: Request<()>| {
        let message = Some(Bytes::from_static(b"message"));
        Ok::<_, Infallible>(Response::new(Call { message, trailers: Some(grpc_status("0")) }))
    };
    for (preset, charged) in [(grpc::failures(), true), (grpc::successes(), false)] {
        for frames in 0..=1 {
            let store = MemoryBackend::new();
            let service = RateLimitLayer::new(store.clone(), tokens())
                .responder(GrpcResponder::new())
                .charge_on(preset)
                .layer(service_fn(handler));
            let mut body = service.oneshot(request()).await.unwrap().into_body();
            for _ in 0..frames {
                body.frame().await.unwrap().unwrap();
            }
            assert_eq!(left(&store).await, 99, "the outcome is not known yet");
            drop(body);
            assert_eq!(left(&store).await, if charged { 99 } else { 100 }, "{preset:?} after {frames} frames");
        }
    }
}

/// A message, followed by an error.
struct Broken(Option<Bytes>);

impl Body for Broken {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        Poll::Ready(Some(self.0.take().map(Frame::data).ok_or("broken")))
    }
}

#[tokio::test]
async fn grpc_call_broken_before_trailers_is_a_failure() {
    for (preset, charged) in [(grpc::failures(), true), (grpc::successes(), false)] {
        let store = MemoryBackend::new();
        let handler =
            async |_: Request<()>| Ok::<_, Infallible>(Response::new(Broken(Some(Bytes::from_static(b"message")))));
        let service = RateLimitLayer::new(store.clone(), tokens())
            .responder(GrpcResponder::new())
            .charge_on(preset)
            .layer(service_fn(handler));
        let body = service.oneshot(request()).await.unwrap().into_body();
        assert_eq!(body.collect().await.unwrap_err(), "broken");
        assert_eq!(left(&store).await, if charged { 99 } else { 100 }, "{preset:?}");
    }
}

/// A store that takes 50 ms to settle a charge.
#[derive(Clone)]
struct Slow(MemoryBackend);

impl RateLimitStore for Slow {
    async fn check(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.0.check(policy, key, cost).await
    }

    async fn peek(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Decision, StoreError> {
        self.0.peek(policy, key, cost).await
    }

    async fn settle(&self, policy: &Policy, key: &Key, receipt: Receipt, change: i64) -> Result<(), StoreError> {
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.0.settle(policy, key, receipt, change).await
    }

    async fn block(&self, policy: &Policy, key: &Key, time: Duration) -> Result<(), StoreError> {
        self.0.block(policy, key, time).await
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), StoreError> {
        self.0.reset(policy, key).await
    }
}

#[tokio::test(start_paused = true)]
async fn corrections_block_no_request_and_are_bounded() {
    let store = MemoryBackend::new();
    let many = RateLimitHandle::MAX_PENDING as u64 + 100;
    let policy = Policy::new("many", Quota::per_hour(many).fixed_window());
    let mut service = RateLimitLayer::new(Slow(store.clone()), policy.clone())
        .responder(ErrorResponder)
        .charge_on(|_: Result<&(), &BoxError>| false)
        .layer(service_fn(async |_: u64| Ok::<_, BoxError>(())));
    let start = tokio::time::Instant::now();
    for turn in 0..many {
        service.ready().await.unwrap().call(turn).await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    tokio::time::sleep(Duration::from_millis(60)).await;
    let peek = store.peek(&policy, &Key::GLOBAL, 1).await.unwrap();
    assert_eq!(peek.remaining(), Some(many - 100), "the last 100 requests stay charged");
}

#[tokio::test(start_paused = true)]
async fn wait_idle_awaits_pending_corrections() {
    let store = MemoryBackend::new();
    let layer = RateLimitLayer::new(Slow(store.clone()), tokens());
    let service = layer.clone().cost(|_: &Request<()>| 10).charge_on(tollgate::http::successes());
    let service = service.layer(service_fn(status));
    let start = tokio::time::Instant::now();
    layer.wait_idle().await;
    assert_eq!(start.elapsed(), Duration::ZERO, "no correction is pending");
    let ask = || service.clone().oneshot(Request::get("/500").body(()).unwrap());
    ask().await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    ask().await.unwrap();
    assert_eq!(left(&store).await, 80);
    layer.wait_idle().await;
    assert_eq!((start.elapsed(), left(&store).await), (Duration::from_millis(70), 100));
    // `wait_idle` does not close the layer: later corrections can be awaited too.
    ask().await.unwrap();
    layer.wait_idle().await;
    assert_eq!((start.elapsed(), left(&store).await), (Duration::from_millis(120), 100));
}
