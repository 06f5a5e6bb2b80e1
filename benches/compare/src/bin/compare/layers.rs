//! A request through a layer that counts in memory by peer address: with header fields, without them, and without any layer.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use tokio::task::JoinSet;
use tollgate::http::{PeerIp, peer_ip};
use tollgate::rate_limit::{LayerOptions, UnitCost};
use tollgate::responder::SameBody;
use tollgate::{HttpResponder, MemoryBackend, Policy, Quota, RateLimitLayer};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_governor::GovernorLayer;
use tower_governor::governor::{GovernorConfig, GovernorConfigBuilder};

use crate::Run;
use crate::bench::{Contender, Figures, figures, take_turns};
use crate::report::{Rank, Table};

const ADDRESSES: u32 = 1_024;
const BATCH: u32 = 1_000;
const DAY: Duration = Duration::from_secs(86_400);
pub const GENEROUS: u32 = 1_000_000_000;

/// Allows `burst` requests at once, and refills as many within a day.
pub fn ours(burst: u32) -> RateLimitLayer<MemoryBackend, PeerIp> {
    RateLimitLayer::new(MemoryBackend::new(), Policy::new("api", Quota::per_day(burst.into()).token_bucket()))
        .key(peer_ip())
}

/// The type of a layer in an axum router, or around one.
type OfAxum = RateLimitLayer<MemoryBackend, PeerIp, LayerOptions<UnitCost, SameBody<HttpResponder>>>;

/// The same with header fields alone, without extensions of requests and responses.
pub fn fields(burst: u32) -> OfAxum {
    ours(burst).responder(HttpResponder::new().extensions(false).same_body())
}

/// The same without header fields.
pub fn lean(burst: u32) -> OfAxum {
    ours(burst).responder(HttpResponder::new().headers([]).extensions(false).same_body())
}

type Governor<M> = GovernorConfig<tower_governor::key_extractor::PeerIpKeyExtractor, M>;

pub fn governor(burst: u32) -> Governor<::governor::middleware::NoOpMiddleware> {
    let mut builder = GovernorConfigBuilder::default();
    builder.period(DAY / burst).burst_size(NonZeroU32::new(burst).map_or(1, NonZeroU32::get));
    builder.finish().expect("the quota is valid")
}

pub fn governor_headers(burst: u32) -> Governor<::governor::middleware::StateInformationMiddleware> {
    let mut builder = GovernorConfigBuilder::default();
    builder.period(DAY / burst).burst_size(burst);
    builder.use_headers().finish().expect("the quota is valid")
}

/// A request of one of [`ADDRESSES`] clients. All clients are equally frequent, and their order is scattered.
fn request(turn: u32) -> Request<Body> {
    let [.., third, fourth] = (turn.wrapping_mul(0x9e37_79b9) % ADDRESSES).to_be_bytes();
    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, third, fourth], 80))));
    request
}

async fn load<S, B>(service: S, tasks: u32, time: Duration) -> Figures
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Send,
{
    let begun = Instant::now();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let service = service.clone();
        running.spawn(async move {
            let mut took = Vec::new();
            while begun.elapsed() < time {
                let called = Instant::now();
                for turn in 0..BATCH {
                    let Ok(response) = service.clone().oneshot(request(task + turn)).await;
                    assert_eq!(response.status(), StatusCode::OK, "the quota is out of reach");
                }
                took.push(called.elapsed());
                // Like a server task that sometimes waits for its client.
                tokio::task::yield_now().await;
            }
            took
        });
    }
    let took = running.join_all().await;
    let batches = figures(begun.elapsed(), took.into_iter().flatten());
    let share = 1.0 / f64::from(BATCH);
    Figures { per_s: batches.per_s / share, p50_us: batches.p50_us * share, p99_us: batches.p99_us * share, ..batches }
}

/// How many requests beyond `burst` are allowed for one client.
async fn over_admitted<S, B>(service: S, burst: u32) -> i64
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
{
    let mut admitted = 0;
    for _ in 0..2 * burst {
        let Ok(response) = service.clone().oneshot(request(0)).await;
        admitted += i64::from(response.status() == StatusCode::OK);
    }
    admitted - i64::from(burst)
}

pub async fn tables(run: &mut Run) {
    const BURST: u32 = 100;
    let bare = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let time = run.time / 2;
    macro_rules! contender {
        ($table:literal, $who:literal, $layer:expr) => {{
            let over = over_admitted($layer(BURST).layer(bare), BURST).await;
            println!("TRIAL table={} who={} over_admitted={over}", $table, $who);
            let verdict = (over != 0).then(|| format!("not exact: {over:+} admissions of {BURST}"));
            let service = $layer(GENEROUS).layer(bare);
            Contender::new($who, move |tasks| Box::pin(load(service.clone(), tasks, time))).apart(verdict)
        }};
    }
    let bare_line = || {
        let beside = Some("the service without a layer".to_owned());
        Contender::new("bare", move |tasks| Box::pin(load(bare, tasks, time))).apart(beside)
    };
    let tables = [
        (
            "layer",
            "A layer that only allows or denies",
            "Requests through a layer in front of a service that does nothing, by tasks, without header fields and extensions. The time \
             includes creating the request. The time of a call is that of a thousand, divided.",
            vec![
                contender!("layer", "tollgate", lean),
                contender!("layer", "tower_governor", |burst| GovernorLayer::new(governor(burst))),
                bare_line(),
            ],
        ),
        (
            "layer-headers",
            "A layer that reports the limits",
            "The same with header fields in every response and without extensions, like `tower_governor` with `use_headers()`. \
             `tollgate-default` is the default layer, which also puts a handle into the request and the decision into the response.",
            vec![
                contender!("layer-headers", "tollgate", fields),
                contender!("layer-headers", "tollgate-default", ours),
                contender!("layer-headers", "tower_governor", |burst| GovernorLayer::new(governor_headers(burst))),
                bare_line(),
            ],
        ),
    ];
    for (name, title, text, mut contenders) in tables {
        let points = [1, 64];
        let medians = take_turns(&mut contenders, &points, run.rounds, |_| None).await;
        run.report.add(Table {
            name,
            title,
            text,
            unit: "tasks",
            points: points.to_vec(),
            headline: 64,
            rank: Rank::Rate,
            lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
            medians,
            ..Table::default()
        });
    }
}
