//! A cache in front of a slow origin, with and without its protection: how often is the origin called?
//!
//! ```text
//! cargo run -p tollgate-examples --bin cache
//! TOLLGATE_STORE=redis://127.0.0.1/ cargo run -p tollgate-examples --bin cache
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tollgate::{AnyBackend, BoxError, Cache};

/// A database whose queries take 50 ms. It has the even ids.
#[derive(Clone, Default)]
struct Database(Arc<AtomicUsize>);

impl Database {
    async fn user(self, id: u64) -> Result<Option<String>, BoxError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(50)).await;
        Ok(id.is_multiple_of(2).then(|| format!("user {id}")))
    }
}

/// Two processes, here two caches on one backend, whose callers ask for ids at the same time. Returns the number of queries.
async fn ask(caches: [&Cache<String>; 2], ids: &[u64], times: usize) -> Result<usize, BoxError> {
    let database = Database::default();
    let mut callers = JoinSet::new();
    for number in 0..times {
        for &id in ids {
            let (cache, database) = (caches[number % 2].clone(), database.clone());
            callers.spawn(async move { cache.get_or_fill(id, move || database.user(id)).await });
        }
    }
    for user in callers.join_all().await {
        user?;
    }
    // A stale value is loaded again in the background.
    tokio::time::sleep(Duration::from_millis(200)).await;
    Ok(database.0.load(Ordering::Relaxed))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = std::env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let backend: AnyBackend = tollgate::connect(&url).await?;
    let users = || {
        let minute = Duration::from_secs(60);
        Cache::<String>::new(backend.clone(), "users", minute).stale_for(minute).deadline(Duration::from_secs(5))
    };
    let caches = [&users(), &users()];
    for id in 0..12_u64 {
        caches[0].invalidate(id).await?;
    }

    println!("breakdown: 500 callers of one id, {} queries", ask(caches, &[2], 500).await?);
    println!("penetration: 500 callers of an id that does not exist, {} queries", ask(caches, &[3], 500).await?);
    println!("again: {} queries", ask(caches, &[3], 500).await?);
    println!("ten ids, 50 callers of each: {} queries", ask(caches, &[0, 1, 4, 5, 6, 7, 8, 9, 10, 11], 50).await?);
    caches[0].expire(2).await?;
    println!("stale: 500 callers get the old value, {} queries", ask(caches, &[2], 500).await?);
    Ok(())
}
