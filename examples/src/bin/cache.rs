//! A cache in front of a slow database: how many queries does each kind of overload cost, with and without its protection?
//!
//! ```text
//! cargo run -p tollgate-examples --bin cache
//! TOLLGATE_STORE=redis://127.0.0.1/ cargo run -p tollgate-examples --bin cache
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::stream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tollgate::{AnyBackend, BoxError, Cache, ExistsFilter};

const MINUTE: Duration = Duration::from_secs(60);

/// A database whose queries take 50 ms. It has the even ids below 1,000.
#[derive(Clone, Default)]
struct Database(Arc<AtomicUsize>);

impl Database {
    async fn user(self, id: u64) -> Result<Option<String>, BoxError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_millis(50)).await;
        Ok((id < 1_000 && id.is_multiple_of(2)).then(|| format!("user {id}")))
    }
}

/// Two processes, here two caches on one backend, whose callers ask for ids at the same time. Without caches, they ask the database. Returns
/// the number of queries.
async fn ask(caches: &[Cache<String>], ids: impl IntoIterator<Item = u64>) -> Result<usize, BoxError> {
    let database = Database::default();
    let mut callers = JoinSet::new();
    for (number, id) in ids.into_iter().enumerate() {
        let (cache, database) = (caches.get(number % 2).cloned(), database.clone());
        callers.spawn(async move {
            match cache {
                Some(cache) => cache.get_or_fill(id, move || database.user(id)).await.map_err(BoxError::from).map(drop),
                None => database.user(id).await.map(drop),
            }
        });
    }
    for user in callers.join_all().await {
        user?;
    }
    Ok(database.0.load(Ordering::Relaxed))
}

/// Asks for 200 ids again and again, until the entries of the first round have expired. Returns the largest number of queries in two rounds,
/// since entries that expire together may do so during a round.
async fn worst_rounds(caches: &[Cache<String>]) -> Result<usize, BoxError> {
    ask(caches, 0..200).await?;
    let (start, mut worst, mut last) = (Instant::now(), 0, 0);
    while start.elapsed() < Duration::from_millis(2_500) {
        let queries = ask(caches, 0..200).await?;
        worst = worst.max(last + queries);
        last = queries;
        sleep(Duration::from_millis(20)).await;
    }
    Ok(worst)
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = std::env::var("TOLLGATE_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let backend: AnyBackend = tollgate::connect(&url).await?;
    let deadline = Duration::from_secs(5);
    let cache = |name: &str, fresh_for| Cache::<String>::new(backend.clone(), name, fresh_for).deadline(deadline);
    let users = [(); 2].map(|()| cache("users", MINUTE).stale_for(MINUTE));
    users[0].invalidate(2).await?;
    users[0].invalidate(3).await?;

    println!("hot key, 500 callers of one id");
    println!("  without a cache: {} queries", ask(&[], [2; 500]).await?);
    println!("  with a cache: {} queries", ask(&users, [2; 500]).await?);
    users[0].expire(2).await?;
    println!("  stale, while one caller loads it again: {} queries", ask(&users, [2; 500]).await?);

    println!("absent keys");
    println!("  500 callers of one absent id, without a cache: {} queries", ask(&[], [3; 500]).await?);
    println!("  with a cache: {} queries", ask(&users, [3; 500]).await?);
    let known = ExistsFilter::new(backend.clone(), "users", 500).visible_within(Duration::ZERO).deadline(deadline);
    known.rebuild(stream::iter((0..1_000).step_by(2).map(Ok::<u64, BoxError>))).await?;
    let guarded = users.clone().map(|users| users.exists_filter(&known));
    // Other ids in each run, so that none is in the cache yet.
    let absent = u64::try_from(std::time::UNIX_EPOCH.elapsed()?.as_nanos())?;
    println!("  2,000 absent ids, with a cache: {} queries", ask(&users, absent..absent + 2_000).await?);
    println!("  with a filter too: {} queries", ask(&guarded, absent + 2_000..absent + 4_000).await?);

    println!("mass expiry, 200 ids that were stored together");
    let brief = |name, jitter| [(); 2].map(|()| cache(name, Duration::from_secs(2)).jitter(jitter).early_refresh(0.0));
    let (together, spread) = (brief("together", 0.0), brief("spread", 0.9));
    let (together, spread) = tokio::join!(worst_rounds(&together), worst_rounds(&spread));
    println!("  without jitter, in two rounds: {} queries", together?);
    println!("  with jitter, in two rounds: {} queries", spread?);
    Ok(())
}
