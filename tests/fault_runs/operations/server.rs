//! A server in its own process, which is this program started again.

use std::env;
use std::fs::{File, OpenOptions};
use std::future::pending;
use std::io::{BufRead, BufReader, Write, stdin};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use axum::{Extension, Router};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tollgate::http::header;
use tollgate::idempotency::{IdempotencyHandle, OnUnknown};
use tollgate::{IdempotencyLayer, RedisBackend};

/// The lease of operations.
pub const LEASE: Duration = Duration::from_secs(1);

/// Marks a server process. Contains `<url of Redis> <retention in ms> <number>`.
pub const WORKER: &str = "TOLLGATE_FAULTS_SERVER";
const JOURNAL: &str = "TOLLGATE_FAULTS_JOURNAL";

/// Whether an operation is executed again if its outcome is unknown.
pub fn is_repeatable(operation: &str) -> bool {
    operation.ends_with(['0', '3', '6'])
}

/// Returns the path of an operation.
pub fn path(operation: &str) -> &'static str {
    if is_repeatable(operation) { "/again" } else { "/once" }
}

/// The server process. Killed when dropped.
pub struct Server {
    process: Child,
    address: SocketAddr,
    orders: ChildStdin,
    held: Receiver<String>,
}

impl Server {
    pub fn start(redis: &str, journal: &Path, retention: Duration, number: usize) -> Self {
        let mut process = Command::new(env::current_exe().expect("the path of this program is known"))
            .env(WORKER, format!("{redis} {} {number}", retention.as_millis()))
            .env(JOURNAL, journal)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a server starts");
        let mut line = String::new();
        let (orders, output) = (process.stdin.take(), process.stdout.take().expect("stdout is piped"));
        let mut output = BufReader::new(output);
        output.read_line(&mut line).expect("a server prints its port");
        let port = line.trim().parse().expect("a port is a number");
        let (holds, held) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| holds.send(line)));
        Self { process, address: (Ipv4Addr::LOCALHOST, port).into(), orders: orders.expect("stdin is piped"), held }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the process runs. It ends by itself only after a panic.
    pub fn is_alive(&mut self) -> bool {
        self.process.try_wait().expect("a server can be waited for").is_none()
    }

    /// Holds the next handler forever. Returns its operation and body, if a handler starts in time.
    pub fn hold(&mut self, time_limit: Duration) -> Option<(String, String)> {
        writeln!(self.orders, "hold").ok()?;
        let held = self.held.recv_timeout(time_limit).ok()?;
        held.split_once(' ').map(|(operation, body)| (operation.to_owned(), body.to_owned()))
    }

    pub fn pause(&self) {
        self.signal("STOP");
    }

    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("there is a kill command");
        assert!(status.success(), "the server takes signal {name}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error cannot be reported from here.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The state of the handlers.
#[derive(Clone)]
struct Shop {
    // All servers append whole lines to it.
    journal: Arc<Mutex<File>>,
    number: u64,
    is_to_hold: Arc<AtomicBool>,
}

impl Shop {
    fn note(&self, line: &str) {
        let mut journal = self.journal.lock().expect("the mutex is not poisoned");
        journal.write_all(format!("{line}\n").as_bytes()).expect("the journal takes a line");
    }
}

async fn pay(
    State(shop): State<Shop>,
    Extension(handle): Extension<IdempotencyHandle>,
    headers: HeaderMap,
    body: String,
) -> String {
    let name = |name: &str| headers[name].to_str().expect("the header is text").to_owned();
    let operation = format!("{}/{}", name("authorization"), name("idempotency-key").trim_matches('"'));
    shop.note(&format!("begin {operation} {}", handle.fence()));
    if shop.is_to_hold.swap(false, Ordering::Relaxed) {
        println!("{operation} {body}");
        pending::<()>().await;
    }
    // Some handlers last until after the next fault.
    let fence = handle.fence();
    sleep(Duration::from_millis(if fence.is_multiple_of(50) { 600 } else { fence % 40 })).await;
    let size = if fence.is_multiple_of(20) { 20_000 } else { fence as usize % 500 };
    let answer = format!("{operation} {body} {fence} {} {}", shop.number, "x".repeat(size));
    shop.note(&format!("end {operation} {answer}"));
    answer
}

/// Serves until it is killed.
pub fn serve(config: &str) {
    let words: Vec<&str> = config.split(' ').collect();
    let [url, retention, number] = words[..] else { panic!("expected a URL, a retention and a number: {config}") };
    let retention = Duration::from_millis(retention.parse().expect("a retention is a number"));
    let journal = env::var(JOURNAL).expect("the path of the journal is set");
    let journal = OpenOptions::new().create(true).append(true).open(journal).expect("a journal can be opened");
    let (journal, number) = (Arc::new(Mutex::new(journal)), number.parse().expect("the number is valid"));
    let shop = Shop { journal, number, is_to_hold: Arc::default() };
    let is_to_hold = Arc::clone(&shop.is_to_hold);
    // There is only one kind of order.
    thread::spawn(move || {
        stdin().lines().map_while(Result::ok).for_each(|_| is_to_hold.store(true, Ordering::Relaxed));
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(async {
        // Redis may be down at the moment.
        let backend = loop {
            match RedisBackend::connect(url).await {
                Ok(backend) => break backend,
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        };
        let guard = |on_unknown| {
            IdempotencyLayer::new(backend.clone())
                .scope(header("authorization"))
                .lease(LEASE)
                .retention(retention)
                .wait(Duration::from_millis(50))
                .deadline(Duration::from_millis(500))
                .on_unknown(on_unknown)
        };
        let app = Router::new()
            .merge(Router::new().route("/once", post(pay)).layer(guard(OnUnknown::Reject)))
            .merge(Router::new().route("/again", post(pay)).layer(guard(OnUnknown::Retry)))
            .with_state(shop);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("there is a free port");
        println!("{}", listener.local_addr().expect("the listener has an address").port());
        axum::serve(listener, app).await.expect("the server runs until it is killed");
    });
}
