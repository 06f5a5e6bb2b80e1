//! A hello server with and without layers, under load from `wrk`. The server and `wrk` are separate processes.

use std::convert::Infallible;
use std::env;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio, id};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::Response;
use axum::routing::get;
use axum::{Router, ServiceExt};
use futures_util::FutureExt;
use governor::middleware::NoOpMiddleware;
use http::Request;
use tokio::net::TcpListener;
use tollgate::http::peer_ip;
use tollgate::{Policy, Quota, RateLimitLayer, RedisBackend};
use tower::layer::util::Identity;
use tower::{Layer, Service};
use tower_governor::GovernorLayer;
use tower_governor::key_extractor::PeerIpKeyExtractor;

use crate::Run;
use crate::bench::{Contender, Figures, Processors, take_turns};
use crate::layers::{self, GENEROUS};
use crate::report::{Rank, Table, grouped};
use crate::server::RedisServer;

const CONNECTIONS: u32 = 64;
const LAYERS: [&str; 10] = [
    "tollgate",
    "tollgate-around",
    "tower_governor",
    "tower_governor-around",
    "tollgate-headers",
    "tollgate-default",
    "tower_governor-headers",
    "tollgate-redis",
    "no-op",
    "bare",
];

/// A service that answers requests: a router, or a layer around one.
trait App: Service<Request<Body>, Response = Response, Error = Infallible, Future: Send> + Clone + Send + 'static {}

impl<S> App for S where
    S: Service<Request<Body>, Response = Response, Error = Infallible, Future: Send> + Clone + Send + 'static
{
}

/// Calls `$act` with the hello service behind the layer of that name. Each service has its own type.
macro_rules! with_app {
    ($layer:expr, $url:expr, $act:expr) => {
        match $layer {
            "tollgate-around" => $act(layers::lean(GENEROUS).layer(hello().with_state(()))).await,
            "tower_governor-around" => $act(governor().layer(hello().with_state(()))).await,
            layer => $act(router(layer, $url).await).await,
        }
    };
}

/// Serves until it is killed, and prints its port.
pub async fn serve(layer: &str, url: &str) {
    with_app!(layer, url, serve_app);
}

async fn serve_app(app: impl App) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    println!("{}", listener.local_addr().expect("the listener has an address").port());
    let app = ServiceExt::<Request<Body>>::into_make_service_with_connect_info::<SocketAddr>(app);
    axum::serve(listener, app).await.expect("axum serves");
}

fn hello() -> Router {
    Router::new().route("/", get(async || "hello\n"))
}

fn governor() -> GovernorLayer<PeerIpKeyExtractor, NoOpMiddleware, Body> {
    GovernorLayer::new(layers::governor(GENEROUS))
}

/// The hello router behind a layer. Its routes are created once, not for every request.
async fn router(layer: &str, url: &str) -> Router {
    let app = hello();
    let app = match layer {
        "bare" => app,
        "no-op" => app.layer(Identity::new()),
        "tollgate" => app.layer(layers::lean(GENEROUS)),
        "tollgate-headers" => app.layer(layers::fields(GENEROUS)),
        "tollgate-default" => app.layer(layers::ours(GENEROUS)),
        "tollgate-redis" => {
            let backend = RedisBackend::connect(url).await.expect("Redis accepts the connection");
            let policy = Policy::new("http", Quota::per_day(GENEROUS.into()).token_bucket());
            app.layer(RateLimitLayer::new(backend, policy).key(peer_ip()).deadline(Duration::from_secs(10)))
        }
        "tower_governor" => app.layer(governor()),
        "tower_governor-headers" => app.layer(GovernorLayer::new(layers::governor_headers(GENEROUS))),
        other => panic!("unknown layer {other}"),
    };
    app.with_state(())
}

/// How many requests are counted.
const COUNTED: u32 = 5_000;

/// Answers requests without a server and sockets, so that [`instructions`] can count.
pub async fn answer(layer: &str) {
    with_app!(layer, "", answer_all);
}

async fn answer_all(mut app: impl App) {
    // Warm up, so that one-time work is not counted.
    answer_each(&mut app, 1_000);
    counted(&mut app);
}

/// Callgrind counts inside this function only, so it must not be inlined.
#[inline(never)]
fn counted(app: &mut impl App) {
    answer_each(app, COUNTED);
}

fn answer_each(app: &mut impl App, requests: u32) {
    for _ in 0..requests {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, 0, 1], 80))));
        let Some(Ok(response)) = app.call(request).now_or_never() else { panic!("the response is not ready at once") };
        assert_eq!(response.status(), 200);
    }
}

/// The instructions that a router needs for a request, by callgrind. `None` without valgrind.
fn instructions(layer: &str) -> Option<u64> {
    let program = env::current_exe().expect("this program is a file");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=compare::http::counted*"])
        .arg(program)
        .args(["answer", layer])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let count = text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse::<u64>().ok());
    let count = count.filter(|count| output.status.success() && *count > 0);
    Some(count.unwrap_or_else(|| panic!("callgrind counted nothing for {layer}: {text}")) / u64::from(COUNTED))
}

/// Runs a command on one core. The server and `wrk` have a core each, so the server always has a processor and is the bottleneck. If both
/// share two cores, the placement of wakeups changes the rate by a fifth.
fn on_core(core: u32) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]);
    command
}

/// The process is killed on drop.
struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start(layer: &str, redis: &RedisServer) -> Self {
        let program = env::current_exe().expect("this program is a file");
        let mut process = on_core(0)
            .arg(program)
            .args(["serve", layer, &redis.url()])
            .env("TOKIO_WORKER_THREADS", "1")
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program runs");
        let mut port = String::new();
        let stdout = process.stdout.take().expect("the stream is piped");
        BufReader::new(stdout).read_line(&mut port).expect("the server prints its port");
        Self { process, port: port.trim().parse().expect("the server prints a port") }
    }

    /// A response, as text.
    fn answer(&self) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens");
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").expect("the server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server answers");
        answer
    }

    /// `busy` has the processor time of the server and of `wrk`.
    fn load(&self, connections: u32) -> Figures {
        let used = || {
            let ([server, _], [_, wrk]) = (Processors::seconds_of(self.process.id()), Processors::seconds_of(id()));
            (server, wrk)
        };
        let before = used();
        let output = on_core(1)
            .args(["wrk", "--latency", "-t1", &format!("-c{connections}"), "-d1s"])
            .arg(format!("http://127.0.0.1:{}/", self.port))
            .output()
            .expect("wrk runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!text.contains("Non-2xx") && !text.contains("Socket errors"), "every request is served: {text}");
        let value =
            |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name)).unwrap_or_default().trim();
        let after = used();
        let calls = text.lines().find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok());
        let calls: u64 = calls.unwrap_or_else(|| panic!("wrk reported no requests: {text}"));
        let per_s: f64 = value("Requests/sec:").parse().unwrap_or_default();
        let time = calls as f64 / per_s;
        Figures {
            calls,
            per_s,
            p50_us: micros(value("50%")),
            p99_us: micros(value("99%")),
            busy: Processors { clients: (after.1 - before.1) / time, servers: (after.0 - before.0) / time },
            ..Figures::default()
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ignore errors, because the process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The microseconds of `345.00us`, `1.20ms` or `1.05s`.
fn micros(text: &str) -> f64 {
    let (digits, unit) = text.split_at(text.find(|sign: char| sign.is_ascii_alphabetic()).unwrap_or(text.len()));
    let unit = match unit {
        "us" => 1.0,
        "ms" => 1e3,
        _ => 1e6,
    };
    digits.parse::<f64>().unwrap_or_default() * unit
}

/// A ratio in words.
fn than(ratio: f64, [more, less]: [&str; 2], what: &str) -> String {
    format!("{:.1} % {} {what}", (ratio - 1.0).abs() * 100.0, if ratio < 1.0 { less } else { more })
}

pub async fn table(run: &mut Run) {
    if let Some(missing) =
        ["wrk", "taskset"].into_iter().find(|tool| Command::new(tool).arg("--version").output().is_err())
    {
        println!("SKIPPED http: there is no {missing}");
        return;
    }
    let redis = RedisServer::start();
    for layer in LAYERS {
        let answer = Server::start(layer, &redis).answer().to_lowercase();
        let has_fields = answer.contains("ratelimit");
        let is_expected = layer.ends_with("-headers") || ["tollgate-default", "tollgate-redis"].contains(&layer);
        assert!(answer.starts_with("http/1.1 200") && has_fields == is_expected, "{layer}: {answer}");
    }
    // Many short turns, because the machine varies by more from one second to the next than a layer costs.
    let rounds = if run.is_quick { run.rounds } else { 3 * run.rounds };
    let redis = &redis;
    let contender = |layer| {
        let load = move |connections| {
            // Start a new server for each turn. Depending on their memory layout, servers of one kind differ by as much as layers do.
            let load = async move { Server::start(layer, redis).load(connections) };
            let figures: crate::bench::Loaded<'_> = Box::pin(load);
            figures
        };
        Contender::new(layer, load)
    };
    let mut contenders: Vec<_> = LAYERS.into_iter().map(contender).collect();
    let points = [CONNECTIONS];
    let medians = take_turns(&mut contenders, &points, rounds, |_| None).await;
    let place = |layer| LAYERS.iter().position(|&other| other == layer).unwrap_or_default();
    let rate = |layer| medians[0][place(layer)].figures.per_s;
    let bare = rate("bare");
    println!(
        "HTTP no_op_over_bare={:.3} memory_over_bare={:.3} around_over_bare={:.3} headers_over_bare={:.3} default_over_bare={:.3}",
        rate("no-op") / bare,
        rate("tollgate") / bare,
        rate("tollgate-around") / bare,
        rate("tollgate-headers") / bare,
        rate("tollgate-default") / bare
    );
    let tables = [
        (
            "http",
            "A server under load",
            "An axum hello server on its own core with one thread, restarted for each second of load. `wrk -t1` on another core has 64 \
             connections, all from one address. The layers only allow or deny. Whatever the layer, a router boxes the inner service and \
             clones it for every request, so `no-op` should be slower than `bare`. If it is not, the difference is below the resolution \
             of this table, and so are others of that size. A layer around the whole router has no such cost. The count of instructions \
             at the end shows what a layer adds with warm caches.",
            "tollgate",
            "tower_governor",
            vec![
                ("tollgate", None),
                ("tower_governor", None),
                ("tollgate-around", Some("the same layer in front of the router")),
                ("tower_governor-around", Some("the same layer in front of the router")),
                ("no-op", Some("a layer that does nothing")),
                ("bare", Some("no layer")),
            ],
        ),
        (
            "http-headers",
            "A server under load that reports the limits",
            "The same with header fields in every response, which the server has to write and `wrk` has to read. \
             `tollgate-default` is the default layer, which also puts a handle into the request and the decision into \
             the response. `tower_governor-headers` has `use_headers()`. The processor time of `tollgate-redis` does \
             not include that of Redis.",
            "tollgate-headers",
            "tower_governor-headers",
            vec![
                ("tollgate-headers", None),
                ("tollgate-default", None),
                ("tower_governor-headers", None),
                ("tollgate-redis", Some("calls Redis for every request")),
                ("bare", Some("no layer")),
            ],
        ),
    ];
    for (name, title, text, ours, theirs, lines) in tables {
        let [one, other] = [ours, theirs].map(|layer| medians[0][place(layer)].figures);
        let of_time = |figures: Figures| figures.busy.servers / figures.per_s;
        let remark = format!(
            "In this run, `{ours}` served {}, with {} of the server per request.",
            than(one.per_s / other.per_s, ["more", "fewer"], &format!("requests than `{theirs}`")),
            than(of_time(one) / of_time(other), ["more", "less"], "processor time"),
        );
        run.report.add(Table {
            name,
            title,
            text,
            unit: "connections",
            points: points.to_vec(),
            headline: CONNECTIONS,
            rank: Rank::Rate,
            ours,
            sides: ["wrk", "server"],
            remark,
            medians: vec![lines.iter().map(|(layer, _)| medians[0][place(layer)]).collect()],
            lines: lines
                .iter()
                .map(|&(layer, apart)| {
                    // A contender that fails does not compete, either.
                    let failed = contenders[place(layer)].apart.clone();
                    (layer, failed.or_else(|| apart.map(str::to_owned)))
                })
                .collect(),
            ..Table::default()
        });
    }
}

/// Counts the instructions that layers add to a request, because `wrk` cannot measure so little.
pub fn counts(run: &mut Run) {
    let mut text = String::from(
        "\nInstructions that an axum router needs to answer a hello request, counted by callgrind, without sockets. All requests come \
         from one address.\n\n| | instructions |\n| --- | ---: |\n",
    );
    for layer in LAYERS.into_iter().filter(|layer| *layer != "tollgate-redis") {
        let Some(each) = instructions(layer) else {
            println!("SKIPPED instructions of requests: there is no valgrind");
            return;
        };
        println!("COST table=requests who={layer} instructions={each}");
        let _ = writeln!(text, "| {layer} | {} |", grouped(each as f64));
    }
    run.report.add_text(&text);
}
