//! One holder at a time: four workers change one balance, and a fifth loses its lock.
//!
//! ```text
//! cargo run -p tollgate-examples --bin locks   the lock is kept in memory
//! TOLLGATE_STORE=redis://127.0.0.1/            in Redis: shared with other processes
//! ```
//!
//! No deposit of forty is lost. A late write is refused because of its fence.

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

/// An error and its causes, in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut levels: Vec<_> = iter::successors(Some(error), |&error| error.source()).map(ToString::to_string).collect();
    // Errors of other crates may repeat their cause in their own text.
    levels.dedup();
    levels.join(": ")
}

/// The protected balance. It refuses a fence smaller than the largest so far.
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
    let locks = Locks::new(tollgate::connect(&store).await?, "accounts").ttl(Duration::from_secs(1));
    let account = Arc::new(Mutex::new(Account::default()));
    let balance = |account: &Mutex<Account>| account.lock().map(|account| account.balance).unwrap_or_default();

    let mut workers = JoinSet::new();
    for _ in 0..4 {
        let (locks, account) = (locks.clone(), Arc::clone(&account));
        workers.spawn(async move {
            for _ in 0..10 {
                // Read, wait, write: two workers at a time would lose a deposit. The body is dropped if the lease is lost.
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

    // A worker that may hold the lock for a moment only, and ignores its loss.
    let slow = locks.lock("42").max_hold(Duration::from_millis(50)).await?;
    println!("a slow worker is told: {}", slow.lost().await);
    // After a crash, the lock lasts for its `ttl` at most.
    let other = locks.lock("42").await?;
    let mut account = account.lock().map_err(|error| error.to_string())?;
    account.write(&other, 1_000)?;
    let outcome = account.write(&slow, 0);
    println!("its write is {}", outcome.err().unwrap_or_default());
    println!("the balance of the next worker stays: {}", account.balance);
    Ok(())
}
