//! Keys that are stored together do not expire together.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate::cache::store::{CacheKey, CacheStore};
use tollgate::{Cache, MemoryBackend};

use crate::support::server::RedisServer;
use crate::support::shared::patient;

const MINUTE: Duration = Duration::from_secs(60);

/// The largest part of these times that is in one second.
fn worst_second(times: impl ExactSizeIterator<Item = Duration>) -> f64 {
    let (mut seconds, count) = ([0_u32; 70], times.len());
    times.for_each(|time| seconds[time.as_secs() as usize] += 1);
    f64::from(seconds.into_iter().max().unwrap_or_default()) / count as f64
}

/// Stores keys evenly within one second, and returns the largest part of them that is no longer fresh within one later second.
async fn worst_second_in_memory(jitter: Option<f64>) -> f64 {
    const KEYS: u64 = 100_000;
    let backend = MemoryBackend::with_capacity(2 * KEYS as usize);
    let mut cache = Cache::<u64>::new(backend.clone(), "numbers", MINUTE);
    if let Some(jitter) = jitter {
        cache = cache.jitter(jitter);
    }
    let start = Instant::now();
    let mut times = Vec::new();
    for key in 0..KEYS {
        cache.set(key, key).await.unwrap();
        let entry = CacheStore::get(&backend, &CacheKey::new("numbers", key)).await.unwrap().unwrap();
        times.push(start.elapsed() + entry.fresh_for);
        if key % 1_000 == 999 {
            tokio::time::advance(Duration::from_millis(10)).await;
        }
    }
    assert_eq!(start.elapsed(), Duration::from_secs(1));
    assert_eq!(backend.cache_entries(), KEYS as usize);
    worst_second(times.into_iter())
}

#[tokio::test(start_paused = true)]
async fn jitter_spreads_the_end_of_keys_that_are_stored_together() {
    let none = worst_second_in_memory(Some(0.0)).await;
    let default = worst_second_in_memory(None).await;
    let wide = worst_second_in_memory(Some(0.9)).await;
    println!("100,000 keys, worst second: {none:.4} without jitter, {default:.4} by default, {wide:.4} with 0.9");
    assert!(none > 0.999, "{none}");
    assert!(default < 0.2, "{default}");
    assert!(wide < 0.025, "{wide}");
}

/// The times to live on the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_on_redis_do_not_expire_together() {
    const KEYS: u64 = 20_000;
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    for (jitter, most) in [(0.1, 0.2), (0.9, 0.025)] {
        let cache =
            Cache::<u64>::new(backend.clone(), "numbers", MINUTE).jitter(jitter).deadline(Duration::from_secs(60));
        let mut callers = JoinSet::new();
        for caller in 0..64 {
            let cache = cache.clone();
            callers.spawn(async move {
                for key in (caller..KEYS).step_by(64) {
                    cache.set(key, key).await.unwrap();
                }
            });
        }
        callers.join_all().await;
        let mut pipeline = redis::pipe();
        for key in 0..KEYS {
            pipeline.cmd("PEXPIRETIME").arg(format!("tollgate:2:{{cache:numbers:{key}}}:entry"));
        }
        // Redis 6.2 does not have it.
        let Ok(ends) = pipeline.query::<Vec<u64>>(&mut server.connection()) else { return };
        let first = ends.iter().min().copied().unwrap_or_default();
        let worst = worst_second(ends.into_iter().map(|end| Duration::from_millis(end - first)));
        println!("{KEYS} keys on Redis, worst second: {worst:.4} with jitter {jitter}");
        assert!(worst < most, "{worst} with jitter {jitter}");
    }
}
