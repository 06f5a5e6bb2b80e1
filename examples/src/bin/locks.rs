//! One at a time: four workers change one balance, and a fifth learns that its time is over.
//!
//! ```text
//! cargo run -p tollgate-examples --bin locks   the lock is kept in memory
//! TOLLGATE_STORE=redis://127.0.0.1/            in Redis: other processes would keep out as well
//! ```
//!
//! You will see forty deposits of which none is lost, and a write that comes too late and is refused by its fence.

use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, iter};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::{BoxError, Lease, Locks};

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

/// An error and its causes, of which each says its own part.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut levels: Vec<_> = iter::successors(Some(error), |&error| error.source()).map(ToString::to_string).collect();
    // Errors of other crates may repeat their cause.
    levels.dedup();
    levels.join(": ")
}

/// What the lock protects: it refuses whoever comes with a smaller fence than it has seen.
#[derive(Default)]
struct Account {
    balance: u64,
    fence: u64,
}

impl Account {
    fn write(&mut self, lease: &Lease, balance: u64) -> Result<(), String> {
        if lease.fence() < self.fence {
            return Err("refused: its fence is smaller".to_owned());
        }
        (self.balance, self.fence) = (balance, lease.fence());
        Ok(())
    }
}

async fn run() -> Result<(), BoxError> {
    let store = env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".into());
    let locks = Locks::new(tollgate::connect(&store).await?).namespace("accounts").ttl(Duration::from_secs(1));
    let account = Arc::new(Mutex::new(Account::default()));
    let balance = |account: &Mutex<Account>| account.lock().map(|account| account.balance).unwrap_or_default();

    let mut workers = JoinSet::new();
    for _ in 0..4 {
        let (locks, account) = (locks.clone(), Arc::clone(&account));
        workers.spawn(async move {
            for _ in 0..10 {
                // Read, think, write: what two at a time would get wrong. The body ends where the lease is lost.
                locks
                    .run("42", async |lease| {
                        let before = account.lock().map(|account| account.balance).unwrap_or_default();
                        sleep(Duration::from_millis(1)).await;
                        account.lock().map_err(|error| error.to_string())?.write(&lease, before + 10)
                    })
                    .await??;
            }
            Ok::<_, BoxError>(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    println!("40 deposits of 10 by 4 workers: {}", balance(&account));

    // Somebody who may have the lock for a moment only, and goes on regardless.
    let slow = locks.lock("42").max_hold(Duration::from_millis(50)).await?;
    println!("a slow worker is told: {}", slow.lost().await);
    // The lock outlives it by its time to live at the most.
    let other = locks.lock("42").await?;
    let mut account = account.lock().map_err(|error| error.to_string())?;
    account.write(&other, 1_000)?;
    let outcome = account.write(&slow, 0);
    println!("its write is {}", outcome.err().unwrap_or_default());
    println!("the balance of the next worker stays: {}", account.balance);
    Ok(())
}
