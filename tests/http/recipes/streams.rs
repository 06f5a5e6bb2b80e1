use std::convert::Infallible;
use std::time::Duration;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::{Router, routing::get};
use futures_util::stream::pending;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tollgate::http::header;
use tollgate::lock::{LeaseHandle, Semaphore};
use tollgate::responder::BusyStatus;
use tollgate::{AnyBackend, HttpResponder, LockLayer};

async fn events() -> impl IntoResponse {
    Sse::new(pending::<Result<Event, Infallible>>()).keep_alive(KeepAlive::default())
}

async fn socket(permit: LeaseHandle, request: Request) -> impl IntoResponse {
    // Take the permit here, not in the task: the layer releases its own with the response.
    let Some(permit) = permit.reenter() else { return Err(StatusCode::SERVICE_UNAVAILABLE) };
    tokio::spawn(async move {
        if let Ok(connection) = hyper::upgrade::on(request).await {
            tokio::select! {
                () = serve(connection) => {}
                _ = permit.lost() => {}
            }
        }
    });
    Ok((StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade"), ("upgrade", "echo")]))
}

async fn serve(connection: Upgraded) {
    let (mut read, mut write) = tokio::io::split(TokioIo::new(connection));
    let _ = tokio::io::copy(&mut read, &mut write).await; // until the client ends
}

fn app(backend: AnyBackend) -> Router {
    let streams = Semaphore::new(backend, "streams", 3).wait(Duration::ZERO).max_hold(Duration::from_secs(3_600));
    let limit = LockLayer::with_semaphore(streams)
        .lock_safe_methods(true) // a GET needs a permit, too
        .key(header("x-user")) // or what your authentication has put into the extensions
        .responder(HttpResponder::new().busy(BusyStatus::TooManyRequests));
    Router::new().route("/events", get(events)).route("/socket", get(socket)).layer(limit)
}

#[cfg(test)]
mod tests {
    use axum::http::{Method, Response};
    use hyper::body::Incoming;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::{App, Client, backend, eventually};
    use super::*;
    use crate::support::server::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn fourth_stream_of_a_user_is_rejected() {
        let (_redis, apps) = start().await;
        let mut streams = Vec::new();
        for number in 0..3 {
            streams.push(stream(&apps[number % 2], "alice").await);
            assert_eq!(streams[number].status(), 200);
            assert_eq!(streams[number].headers()["content-type"], "text/event-stream");
        }
        for app in &apps {
            assert_eq!(stream(app, "alice").await.status(), 429);
        }
        assert_eq!(stream(&apps[0], "bob").await.status(), 200, "another user");
        assert_eq!(Client::new().get(apps[0].addr, "/events", &[]).await.status, 400, "no user");

        // A closed stream gives its permit back, also to the other instance.
        streams.remove(0);
        eventually("a permit is free", async || {
            let response = stream(&apps[1], "alice").await;
            let is_open = response.status() == 200;
            streams.push(response);
            is_open
        })
        .await;
        assert_eq!(stream(&apps[0], "alice").await.status(), 429);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn socket_holds_its_permit_until_it_closes() {
        let (_redis, apps) = start().await;
        let _streams = [stream(&apps[0], "alice").await, stream(&apps[1], "alice").await];
        let response = open(&apps[0], "/socket", "alice").await;
        assert_eq!(response.status(), 101);
        let mut socket = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
        for message in [b"hello", b"again"] {
            socket.write_all(message).await.unwrap();
            let mut echo = [0; 5];
            socket.read_exact(&mut echo).await.unwrap();
            assert_eq!(&echo, message);
            for path in ["/events", "/socket"] {
                assert_eq!(open(&apps[1], path, "alice").await.status(), 429, "the socket has the third permit");
            }
        }
        drop(socket);
        let mut next = None;
        eventually("the permit of the socket is free", async || {
            let response = stream(&apps[1], "alice").await;
            let is_open = response.status() == 200;
            next = Some(response);
            is_open
        })
        .await;
    }

    async fn stream(app: &App, user: &str) -> Response<Incoming> {
        open(app, "/events", user).await
    }

    /// On a connection of its own, which ends with the response.
    async fn open(app: &App, path: &str, user: &str) -> Response<Incoming> {
        let headers = [("x-user", user), ("connection", "upgrade"), ("upgrade", "echo")];
        Client::new().open(Method::GET, app.addr, path, &headers, "").await
    }

    async fn start() -> (RedisServer, [App; 2]) {
        let redis = RedisServer::start();
        let [one, two] = [backend(&redis).await, backend(&redis).await].map(app);
        (redis, [App::serve(one).await, App::serve(two).await])
    }
}
