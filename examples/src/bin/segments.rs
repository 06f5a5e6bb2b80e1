//! Eight sellers share one stock: 1,000 pieces in 20 segments of 50, each with its own lock.
//!
//! ```text
//! cargo run -p tollgate-examples --bin segments   the locks are kept in memory
//! TOLLGATE_STORE=redis://127.0.0.1/               in Redis
//! ```
//!
//! Exactly 1,000 pieces are sold. The program also prints how many sales ran at a time; one lock would allow one.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, iter};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::lock::Segmented;
use tollgate::{BoxError, Locks};

const SEGMENTS: usize = 20;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("The locks cannot be used: {}.", chain(&*error));
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

async fn run() -> Result<(), BoxError> {
    let store = env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".into());
    let locks = Locks::new(tollgate::connect(&store).await?, "stock").deadline(Duration::from_secs(2));
    // Read, wait, write: two sellers at a time in one segment would sell a piece twice.
    let stock: Arc<[AtomicU32; SEGMENTS]> = Arc::new(std::array::from_fn(|_| AtomicU32::new(50)));
    let (at_once, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));

    let mut sellers = JoinSet::new();
    for _ in 0..8 {
        let segments = Segmented::new(&locks, "sku:1", SEGMENTS as u16);
        let (stock, at_once, most) = (Arc::clone(&stock), Arc::clone(&at_once), Arc::clone(&most));
        sellers.spawn(async move {
            let mut sold = 0;
            let left = |index: u16| stock[usize::from(index)].load(Ordering::Relaxed);
            while (0..segments.segments()).any(|index| left(index) > 0) {
                let segment = segments.any().among(|index| left(index) > 0).await?;
                most.fetch_max(at_once.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                let before = left(segment.index());
                sleep(Duration::from_millis(1)).await;
                // Another seller may have sold the last piece before we got the lock.
                if before > 0 {
                    stock[usize::from(segment.index())].store(before - 1, Ordering::Relaxed);
                    sold += 1;
                }
                at_once.fetch_sub(1, Ordering::Relaxed);
                segment.release().await?;
            }
            Ok::<u32, BoxError>(sold)
        });
    }
    let mut sold = 0;
    while let Some(seller) = sellers.join_next().await {
        sold += seller??;
    }
    println!("sold: {sold}");
    println!("at a time: {}", most.load(Ordering::Relaxed));
    Ok(())
}
