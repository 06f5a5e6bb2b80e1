//! The memory and the time that each feature takes from a Redis server. `docs/guide/redis.md` has results.
//!
//! ```text
//! TOLLGATE_STORE=redis://127.0.0.1:6379/ cargo run --release -p tollgate-examples --bin sizing
//! ```
//!
//! An argument replaces the 2,000 calls of a round. Use an empty server: the keys stay until they expire.

use std::sync::Arc;
use std::time::Duration;
use std::{env, process};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::backend::redis::bb8_redis::redis;
use tollgate::idempotency::{Idempotent, Operation};
use tollgate::{BoxError, Cache, DelayQueue, Lease, Limiter, Locks, Policy, Quota, RedisOptions};

const DEADLINE: Duration = Duration::from_secs(5);

struct Server(redis::aio::MultiplexedConnection);

impl Server {
    /// A figure of `INFO`: the number after `field`, which follows `line`.
    async fn info(&mut self, line: &str, field: &str) -> Result<f64, BoxError> {
        let text: String = redis::cmd("INFO").arg("all").query_async(&mut self.0).await?;
        let rest = text.split_once(line).and_then(|(_, rest)| rest.split_once(field)?.1.split([',', '\r']).next());
        Ok(rest.unwrap_or("0").parse()?)
    }

    async fn memory(&mut self) -> Result<f64, BoxError> {
        sleep(Duration::from_millis(200)).await; // until replies have left the buffers
        self.info("# Memory", "used_memory:").await
    }

    /// Prints the time of the scripts of a call, and its memory. Calls: one every 2 ms, one after the other, 256 at a time.
    async fn measure<F: Future<Output = Result<Option<Lease>, BoxError>> + Send>(
        &mut self,
        what: &str,
        calls: usize,
        call: impl Fn(usize) -> F + Send + Sync + 'static,
    ) -> Result<(), BoxError> {
        let (mut kept, call) = (vec![call(0).await?], Arc::new(call));
        let (before, mut next) = (self.memory().await?, 1);
        print!("{what:<40}");
        for (tasks, calls, pause) in [(1, calls, 2), (1, calls, 0), (256, 10 * calls, 0)] {
            let started = self.info("cmdstat_evalsha:", "usec=").await?;
            let (end, mut running) = (next + calls, JoinSet::new());
            for first in next..next + tasks {
                let call = Arc::clone(&call);
                running.spawn(async move {
                    let mut kept = Vec::new();
                    for number in (first..end).step_by(tasks) {
                        kept.push(call(number).await?);
                        sleep(Duration::from_millis(pause)).await;
                    }
                    Ok::<_, BoxError>(kept)
                });
            }
            while let Some(done) = running.join_next().await {
                kept.extend(done??);
            }
            print!("{:>6.1} us", (self.info("cmdstat_evalsha:", "usec=").await? - started) / calls as f64);
            next = end;
        }
        println!("{:>6.0} bytes", (self.memory().await? - before) / (next - 1) as f64);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = env::var("TOLLGATE_STORE").map_err(|_| "set TOLLGATE_STORE to an empty Redis server")?;
    let mut server = Server(redis::Client::open(&*url)?.get_multiplexed_async_connection().await?);
    let calls = env::args().nth(1).map_or(Ok(2_000), |calls| calls.parse())?;
    let others = server.info("# Clients", "connected_clients:").await?;
    // A prefix of its own, so that a second run finds no key of the first.
    let backend = RedisOptions::from_url(&url)?.prefix(process::id().to_string()).connect().await?;

    let [fixed, log] = [Quota::per_day(1_000).fixed_window(), Quota::per_day(1_000).sliding_log()?];
    let three = Policy::new("three", Quota::per_day(1_000).token_bucket()).limit(fixed);
    for (what, policy, requests) in [
        ("count, one limit", Policy::new("one", fixed), 1),
        ("count, three limits", three.limit(Quota::per_hour(1_000).sliding_window()), 1),
        ("request in a sliding log, ten in a key", Policy::new("log", log), 10),
    ] {
        let limiter = Arc::new(Limiter::new(backend.clone(), policy).deadline(DEADLINE));
        let call = move |number: usize| {
            let limiter = Arc::clone(&limiter);
            async move { Ok(limiter.check((number / requests) as u64).await.map(|_| None)?) }
        };
        server.measure(what, calls, call).await?;
    }

    for (what, name, releases) in [("lock, held", "held", false), ("lock, acquired and released", "released", true)] {
        let locks = Locks::new(backend.clone(), name).ttl(Duration::from_secs(180)).deadline(DEADLINE);
        let acquire = move |number: usize| {
            let lease = locks.lock(number as u64);
            async move { Ok(if releases { lease.await?.release().await.map(|_| None)? } else { Some(lease.await?) }) }
        };
        server.measure(what, calls, acquire).await?;
    }
    let operations = Idempotent::new(backend.clone(), "operations").deadline(DEADLINE);
    let once = move |number: usize| {
        let operations = operations.clone();
        let work = async |_| Ok::<_, BoxError>([b'x'; 100]);
        async move { Ok(operations.run(Operation::new("alice", number.to_string()), "input", work).await.map(|_| None)?) }
    };
    server.measure("operation with a response of 100 bytes", calls, once).await?;

    let queue = DelayQueue::<String>::new(backend.clone(), "queue").deadline(DEADLINE);
    let push = move |number: usize| {
        let push = queue.push(format!("{number:0100}")).delay(Duration::from_secs(3_600));
        async { Ok(push.await.map(|_| None)?) }
    };
    server.measure("job of 100 bytes, waiting", calls, push).await?;

    let cache = Cache::<String>::new(backend.clone(), "values", Duration::from_secs(3_600)).deadline(DEADLINE);
    let set = move |number: usize| {
        let cache = cache.clone();
        async move { Ok(cache.set(number as u64, format!("{number:0100}")).await.map(|()| None)?) }
    };
    server.measure("cached value of 100 bytes, stored", calls, set).await?;

    println!("connections of this process: {}", server.info("# Clients", "connected_clients:").await? - others);
    Ok(())
}
