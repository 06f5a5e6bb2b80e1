//! A server with a rate limit per client, and requests that show the limit.
//!
//! ```text
//! cargo run -p tollgate-examples --bin quickstart             counts in memory, serves until Ctrl-C
//! cargo run -p tollgate-examples --bin quickstart -- --once   ends after the table
//! TOLLGATE_STORE=redis://127.0.0.1/                           counts in Redis: start two and watch them share
//! TOLLGATE_ADDR=127.0.0.1:3001                                another address than 127.0.0.1:3000
//! ```
//!
//! Five of seven requests pass.

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;

use axum::{Router, body::Body, http::Request, routing::get};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::net::TcpListener;
use tollgate::{Policy, Quota, RateLimitLayer, http::peer_ip};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("{sentence}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), String> {
    let store = env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".into());
    let addr = env::var("TOLLGATE_ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let once = env::args().any(|arg| arg == "--once");

    // `Debug` of this error is a sentence with the server, the cause and the remedy.
    let backend = tollgate::connect(&store).await.map_err(|error| format!("TOLLGATE_STORE: {error:?}."))?;
    let policy = Policy::new("quickstart", Quota::per_minute(5).fixed_window());
    let app = Router::new()
        .route("/", get(async || "hello\n"))
        .layer(RateLimitLayer::new(backend, policy).key(peer_ip()))
        .into_make_service_with_connect_info::<SocketAddr>();

    let listener = TcpListener::bind(&addr)
        .await
        .map_err(|error| format!("Cannot listen on {addr}, set TOLLGATE_ADDR to another address: {error}."))?;
    let local = listener.local_addr().map_err(|error| format!("The listener has no address: {error}."))?;
    let server = tokio::spawn(async move { axum::serve(listener, app).await });

    println!("{store} allows 5 requests per minute and client\n", store = store.split(':').next().unwrap_or_default());
    burst(local).await.map_err(|error| format!("The server at {local} does not answer: {error}."))?;
    if once {
        return Ok(());
    }
    println!("\nTry it: curl -i http://{local}/   (Ctrl-C ends)");
    tokio::select! {
        ended = server => ended.map_err(|error| error.to_string())?.map_err(|error| format!("The server failed: {error}.")),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

/// Sends more requests than the quota and prints the responses.
async fn burst(server: SocketAddr) -> Result<(), Box<dyn Error>> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    println!("request  status                 remaining      retry-after");
    for request in 1..=7 {
        let response = client.request(Request::get(format!("http://{server}/")).body(Body::empty())?).await?;
        let field = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("-");
        let remaining = field("ratelimit").split(';').find_map(|part| part.strip_prefix("r=")).unwrap_or("-");
        let retry = field("retry-after");
        println!("{request:<7}  {:<21}  {remaining:<13}  {retry}", response.status().to_string());
    }
    Ok(())
}
