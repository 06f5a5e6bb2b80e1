//! `SingleFlightLayer` around the origin of an axum server, over sockets.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::single_flight::SingleFlightError;
use tollgate::{BoxError, SingleFlightLayer};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};

use crate::http::ms;
use crate::http_servers::Server;

type Users = BoxCloneSyncService<u64, String, SingleFlightError>;

async fn user(State(users): State<Users>, Path(id): Path<u64>) -> Result<String, StatusCode> {
    users.oneshot(id).await.map_err(|error| match error {
        SingleFlightError::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::BAD_GATEWAY,
    })
}

/// A server whose origin takes 200 ms, and never responds to its first call if `hangs_first`. The calls are counted.
fn app(hangs_first: bool, call_timeout: Duration) -> (Router, Arc<AtomicUsize>) {
    let calls = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&calls);
    let origin = service_fn(move |id: u64| {
        let number = counter.fetch_add(1, Ordering::Relaxed) + 1;
        async move {
            if hangs_first && number == 1 {
                pending::<()>().await;
            }
            sleep(ms(200)).await;
            Ok::<_, BoxError>(format!("user {id}, call {number}"))
        }
    });
    let users = SingleFlightLayer::new(|id: &u64| *id).public().call_timeout(call_timeout).layer(origin);
    (Router::new().route("/users/{id}", get(user)).with_state(Users::new(users)), calls)
}

/// The statuses and bodies of requests that are sent at the same time.
async fn at_once(server: &Arc<Server>, count: usize) -> Vec<(u16, String)> {
    let mut requests = JoinSet::new();
    for _ in 0..count {
        let server = Arc::clone(server);
        requests.spawn(async move {
            let response = server.send("GET", "/users/1", &[]).await;
            (response.status().as_u16(), response.into_body())
        });
    }
    requests.join_all().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_over_sockets_share_one_call() {
    let (app, calls) = app(false, Duration::from_secs(30));
    let server = Arc::new(Server::start(app).await);
    for response in at_once(&server, 20).await {
        assert_eq!(response, (200, "user 1, call 1".to_owned()));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_call_fails_for_all_and_frees_its_key() {
    let (app, calls) = app(true, ms(500));
    let server = Arc::new(Server::start(app).await);
    for response in at_once(&server, 20).await {
        assert_eq!(response, (504, String::new()));
    }
    let response = server.send("GET", "/users/1", &[]).await;
    assert_eq!(response.body(), "user 1, call 2");
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_goes_strands_no_other_client() {
    let (app, calls) = app(false, Duration::from_secs(30));
    let server = Arc::new(Server::start(app).await);
    let mut leader = TcpStream::connect(server.addr).await.unwrap();
    leader.write_all(b"GET /users/1 HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    while calls.load(Ordering::Relaxed) == 0 {
        sleep(ms(1)).await;
    }
    let waiters = tokio::spawn({
        let server = Arc::clone(&server);
        async move { at_once(&server, 5).await }
    });
    sleep(ms(50)).await;
    drop(leader);
    for response in waiters.await.unwrap() {
        assert_eq!(response, (200, "user 1, call 1".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_stops_waits_for_its_calls() {
    let (app, calls) = app(false, Duration::from_secs(30));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Server::new(listener.local_addr().unwrap(), None);
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async move { stopped.await.unwrap() };
    let serving = tokio::spawn(axum::serve(listener, app).with_graceful_shutdown(stopped).into_future());
    let requests = tokio::spawn(async move { at_once(&Arc::new(client), 5).await });
    while calls.load(Ordering::Relaxed) == 0 {
        sleep(ms(1)).await;
    }
    sleep(ms(50)).await;
    stop.send(()).unwrap();
    for response in requests.await.unwrap() {
        assert_eq!(response, (200, "user 1, call 1".to_owned()));
    }
    serving.await.unwrap().unwrap();
}
