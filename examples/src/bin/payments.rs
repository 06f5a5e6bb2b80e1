//! Charges a card once, although fifty clients send the same payment and half of them disconnect and retry.
//!
//! ```text
//! cargo run -p tollgate-examples --bin payments   the records are kept in memory
//! TOLLGATE_STORE=redis://127.0.0.1/               in Redis: shared with other processes
//! ```
//!
//! One charge, fifty clients with the same receipt, and a rejected payment of another amount under the same key.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{env, iter};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use axum::{Extension, Router};
use http_body_util::BodyExt;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate::http::header;
use tollgate::idempotency::IdempotencyHandle;
use tollgate::{BoxError, IdempotencyLayer};
use tower::ServiceExt;

const CLIENTS: u64 = 50;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("The payment cannot be made: {}.", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut levels: Vec<_> = iter::successors(Some(error), |&error| error.source()).map(ToString::to_string).collect();
    // Errors of other crates may repeat their cause in their own text.
    levels.dedup();
    levels.join(": ")
}

/// As slow as a card network. Passes an idempotency key of its own on to the network.
async fn charge(
    Extension(charges): Extension<Arc<AtomicU32>>,
    Extension(operation): Extension<IdempotencyHandle>,
    amount: String,
) -> String {
    let _key_for_the_network = operation.derive("charge");
    sleep(Duration::from_millis(300)).await;
    let number = charges.fetch_add(1, Ordering::SeqCst) + 1;
    format!("receipt {number} for {amount}")
}

async fn run() -> Result<(), BoxError> {
    let store = env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".into());
    let guard = IdempotencyLayer::new(tollgate::connect(&store).await?)
        .scope(header("x-api-key"))
        .wait(Duration::from_secs(5)) // for the answer to the same request; as it comes it would be 409
        .deadline(Duration::from_secs(1));
    let charges = Arc::new(AtomicU32::new(0));
    let app: Router =
        Router::new().route("/payments", post(charge)).layer(guard.clone()).layer(Extension(Arc::clone(&charges)));

    // A new key in each run: Redis remembers the last one for a day.
    let key = format!("order-42-{}", SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos());
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (app, key) = (app.clone(), key.clone());
        clients.spawn(async move { client_of(client, app, &key).await });
    }
    let receipts = clients.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let count = |wanted: fn(&Receipt) -> bool| receipts.iter().filter(|receipt| wanted(receipt)).count();
    println!("{CLIENTS} clients asked {} times, {} of them hung up at first", sum(&receipts), count(|r| r.hung_up));
    println!("charges: {}", charges.load(Ordering::SeqCst));
    println!("receipts: {}, replays among them: {}", receipts.len(), count(|receipt| receipt.is_replay));
    let first = receipts.first().map_or("", |receipt| &*receipt.text);
    println!("the same receipt for all: {}", receipts.iter().all(|receipt| receipt.text == first));
    let other = app.oneshot(payment(&key, "9999 EUR")?).await?.status();
    println!("another amount under the same key: {other}");
    guard.wait_idle().await;
    Ok(())
}

struct Receipt {
    text: String,
    is_replay: bool,
    hung_up: bool,
    tries: u32,
}

fn sum(receipts: &[Receipt]) -> u32 {
    receipts.iter().map(|receipt| receipt.tries).sum()
}

fn payment(key: &str, amount: &'static str) -> Result<Request<Body>, BoxError> {
    let request = Request::post("/payments").header("x-api-key", "of alice").header("idempotency-key", key);
    Ok(request.body(Body::from(amount))?)
}

/// Retries until there is a receipt. Every second client disconnects from its first attempt.
async fn client_of(client: u64, app: Router, key: &str) -> Result<Receipt, BoxError> {
    let (mut tries, mut hung_up) = (0, false);
    loop {
        tries += 1;
        let limit = Duration::from_millis(if client.is_multiple_of(2) && tries == 1 { client } else { 60_000 });
        if let Ok(response) = timeout(limit, app.clone().oneshot(payment(key, "100 EUR")?)).await {
            let response = response?;
            if response.status() == StatusCode::OK {
                let is_replay = response.headers().contains_key("idempotent-replayed");
                let text = String::from_utf8(response.into_body().collect().await?.to_bytes().to_vec())?;
                return Ok(Receipt { text, is_replay, hung_up, tries });
            }
        } else {
            hung_up = true;
        }
        sleep(Duration::from_millis(50)).await;
    }
}
