//! Rate-limit decisions on one Redis, where all clients together get at most the quota.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use actix_extensible_rate_limit::backend::redis::RedisBackend as ActixBackend;
use actix_extensible_rate_limit::backend::{Backend, SimpleInput};
use bb8_redis::RedisConnectionManager;
use bb8_redis::bb8::Pool;
use limitador::AsyncRateLimiter;
use limitador::limit::{Limit, Namespace};
use limitador::storage::redis::{AsyncRedisStorage, CachedRedisStorageBuilder};
use redis::Script;
use redis::aio::MultiplexedConnection;
use serde_json::json;
use tokio::task::JoinSet;
use tollgate::{DenyCache, Limiter, Policy, Quota, RedisBackend};

use crate::Run;
use crate::bench::{Contender, Figures, Loaded, load, scatter, take_turns};
use crate::ceiling::Ceiling;
use crate::node::Node;
use crate::report::{Rank, Table};
use crate::server::RedisServer;

pub const KEYS: u64 = 10_000;
const WINDOW: Duration = Duration::from_secs(3_600);
pub const GENEROUS: u32 = 1_000_000_000;
/// The trial: this many tasks of two clients request nearly twice the quota of `TRIED` keys.
const TASKS: u64 = 64;
const TRIED: u64 = 8;
const QUOTA: u32 = 601;

/// The common approach: a counter that expires, in one script.
const COUNTER: &str = "local used = redis.call('INCR', KEYS[1])
if used == 1 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return used <= tonumber(ARGV[1]) and 1 or 0";

/// A rate limiter that decides whether a key is allowed.
#[derive(Clone)]
pub enum Decider {
    Tollgate(Limiter<RedisBackend>),
    DenyCache(Limiter<DenyCache<RedisBackend>>),
    Actix(ActixBackend, u32),
    Limitador(Arc<AsyncRateLimiter>, Namespace),
    Held(Pool<RedisConnectionManager>, Arc<Script>, u32, &'static str),
    Plain(MultiplexedConnection, Arc<Script>, u32),
}

impl Decider {
    pub async fn tollgate(url: &str, name: &str, quota: u32) -> Self {
        let policy = Policy::new(name, Quota::per_hour(quota.into()).fixed_window());
        let backend = RedisBackend::connect(url).await.expect("Redis accepts the connection");
        // Longer than any call here, so late replies are measured, not abandoned.
        Self::Tollgate(Limiter::new(backend, policy).deadline(Duration::from_secs(10)))
    }

    pub async fn admits(&self, key: u64) -> bool {
        match self {
            Self::Tollgate(limiter) => limiter.check(key).await.expect("Redis decides").is_allowed(),
            Self::DenyCache(limiter) => limiter.check(key).await.expect("Redis decides").is_allowed(),
            Self::Actix(backend, quota) => {
                let input = SimpleInput {
                    interval: WINDOW,
                    max_requests: u64::from(*quota),
                    key: format!("actix:{quota}:{key}"),
                };
                backend.request(input).await.expect("Redis decides").0.is_allowed()
            }
            Self::Limitador(limiter, namespace) => {
                let values = HashMap::from([("user".to_owned(), key.to_string())]);
                let checked = limiter.check_rate_limited_and_update(namespace, &values, 1, false).await;
                !checked.expect("Redis decides").limited
            }
            Self::Held(pool, script, quota, name) => {
                let mut connection = pool.get().await.expect("the pool has a connection");
                let mut call = script.key(format!("{name}:{quota}:{key}"));
                let admitted: u8 =
                    call.arg(*quota).arg(3_600_000).invoke_async(&mut *connection).await.expect("Redis decides");
                admitted == 1
            }
            Self::Plain(connection, script, quota) => {
                let mut connection = connection.clone();
                let mut call = script.key(format!("plain:{quota}:{key}"));
                let admitted: u8 =
                    call.arg(*quota).arg(3_600_000).invoke_async(&mut connection).await.expect("Redis decides");
                admitted == 1
            }
        }
    }
}

/// All contenders, each set up as its own documentation recommends, with one fixed window of an hour.
pub async fn deciders(url: &str, quota: u32) -> Vec<(&'static str, Decider)> {
    let client = redis_of_actix::Client::open(url).expect("the URL is well-formed");
    let manager = redis_of_actix::aio::ConnectionManager::new(client).await.expect("Redis accepts the connection");
    let actix = ActixBackend::builder(manager).build();

    let limitador = |storage: Box<dyn limitador::storage::AsyncCounterStorage>, name: &str| {
        let limiter = AsyncRateLimiter::new_with_storage(storage);
        limiter.add_limit(Limit::new(name, i64::from(quota), WINDOW.as_secs(), [""; 0], ["user"]));
        Decider::Limitador(Arc::new(limiter), name.into())
    };
    let asking = AsyncRedisStorage::new(url).await.expect("Redis accepts the connection");
    let cached = CachedRedisStorageBuilder::new(url).build().await.expect("Redis accepts the connection");

    let script = Arc::new(Script::new(COUNTER));
    let manager = RedisConnectionManager::new(url).expect("the URL is well-formed");
    let pool = || Pool::builder().max_size(16).min_idle(16);
    let checked = pool().build(manager.clone()).await.expect("Redis accepts the connection");
    let unchecked = pool().test_on_check_out(false).build(manager).await.expect("Redis accepts the connection");
    let client = redis::Client::open(url).expect("the URL is well-formed");
    let connection = client.get_multiplexed_async_connection().await.expect("Redis accepts the connection");

    vec![
        ("tollgate", Decider::tollgate(url, "decisions", quota).await),
        ("actix-extensible-rate-limit", Decider::Actix(actix, quota)),
        ("limitador", limitador(Box::new(asking), &format!("asking{quota}"))),
        ("limitador-cached", limitador(Box::new(cached), &format!("cached{quota}"))),
        ("bb8-held", Decider::Held(checked, Arc::clone(&script), quota, "held")),
        ("bb8-unchecked", Decider::Held(unchecked, Arc::clone(&script), quota, "unchecked")),
        ("plain-script", Decider::Plain(connection, script, quota)),
    ]
}

/// Runs concurrent decisions over `keys` keys, all of them allowed.
pub async fn decide(decider: Decider, in_flight: u32, keys: u64, time: Duration) -> Figures {
    // Each load uses the keys in another order.
    static LOADS: AtomicU64 = AtomicU64::new(0);
    let offset = LOADS.fetch_add(1, Ordering::Relaxed) << 24;
    load(in_flight, time, move |task, turn| {
        let decider = decider.clone();
        async move { assert!(decider.admits(scatter(task, offset + turn) % keys).await, "the quota is out of reach") }
    })
    .await
}

/// Checks each of `keys` keys once.
pub async fn fill(decider: &Decider, keys: u64) {
    const TASKS: u64 = 256;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let decider = decider.clone();
        tasks.spawn(async move {
            for key in (task..keys).step_by(TASKS as usize) {
                decider.admits(key).await;
            }
        });
    }
    tasks.join_all().await;
}

/// How many requests beyond the quota are allowed when the tasks of two clients request nearly twice the quota.
async fn over_admitted(clients: [&Decider; 2], quota: u32) -> i64 {
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let decider = clients[task as usize % 2].clone();
        tasks.spawn(async move {
            let mut admitted = 0;
            for turn in 0..u64::from(quota) * 2 / TASKS * TRIED {
                admitted += i64::from(decider.admits(turn % TRIED).await);
            }
            admitted
        });
    }
    tasks.join_all().await.into_iter().sum::<i64>() - i64::from(quota) * TRIED as i64
}

/// Why a contender that allows more or less than the quota does not compete.
fn verdict(who: &str, over: i64, quota: i64) -> Option<String> {
    println!("TRIAL table=decisions who={who} over_admitted={over}");
    (over != 0).then(|| format!("not exact, {over:+} admissions of {quota}"))
}

pub async fn tables(run: &mut Run) {
    let server = RedisServer::start();
    let node = Node::start(&server);
    let url = server.url();
    let mut verdicts = Vec::new();
    let pairs = deciders(&url, QUOTA).await.into_iter().zip(deciders(&url, QUOTA).await);
    for ((who, one), (_, other)) in pairs {
        verdicts.push(verdict(who, over_admitted([&one, &other], QUOTA).await, i64::from(QUOTA) * TRIED as i64));
    }
    let deciders = deciders(&url, GENEROUS).await;
    let tollgate = deciders[0].1.clone();
    // Call twice, because the first call may find the script missing.
    assert!(tollgate.admits(7_777_777).await);
    let call = async { assert!(tollgate.admits(7_777_777).await) };
    let ceiling = Ceiling::record(&server, "rate_limit_check_plain.lua", "7777777", call).await;

    let time = run.time;
    let mut contenders: Vec<_> = deciders
        .iter()
        .zip(verdicts)
        .map(|((who, decider), verdict)| {
            Contender::new(who, move |in_flight| Box::pin(decide(decider.clone(), in_flight, KEYS, time)))
                .apart(verdict)
        })
        .collect();
    if let Some(node) = &node {
        let answer = node.ask(json!({"do": "trial", "quota": QUOTA, "keys": TRIED, "tasks": TASKS})).await;
        let wanted = i64::from(QUOTA) * TRIED as i64;
        let who = "rate-limiter-flexible-node";
        let verdict = verdict(who, answer["admitted"].as_i64().unwrap_or_default() - wanted, wanted);
        let load =
            move |in_flight| -> Loaded<'_> { Box::pin(node.load("decide", in_flight, time, json!({"keys": KEYS}))) };
        contenders.push(Contender::new(who, load).apart(verdict));
    }
    let points = [1, 16, 64, 256, 1_024];
    let medians = take_turns(&mut contenders, &points, run.rounds, |_| Some(ceiling.per_s())).await;
    run.report.add(Table {
        name: "decisions",
        title: "Rate-limit decisions on one Redis",
        text: "A fixed window of an hour over 10,000 keys, all requests allowed, by the number of decisions in flight in one process.\n\n\
               - The ceiling is the rate of `redis-benchmark -P 64 -c 50` with the script that Tollgate calls for a single decision. \
               Tollgate batches concurrent decisions, so it can exceed the ceiling.\n\
               - Beyond eight in flight, the cost per decision falls until four calls of 64 decisions each are in flight. From 256 \
               on, more decisions in flight only wait longer.\n\
               - Before the measurement, 64 tasks of two clients request nearly twice the quota of eight keys. A contender that does \
               not allow exactly the quota is listed, but does not compete.\n\
               - `limitador` reads and writes in two steps, and its cache answers from the process. Its version is 0.6, the newest \
               that builds without RocksDB.\n\
               - `bb8-held` is a pool of 16 connections with default settings: each call holds a connection for its round trip, after \
               a PING.\n\
               - `bb8-unchecked` is the same without the PING.\n\
               - `plain-script` is a counter that expires, on one multiplexed connection.",
        unit: "decisions in flight",
        points: points.to_vec(),
        headline: 256,
        rank: Rank::Rate,
        lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
        medians,
        ..Table::default()
    });
    denied(run, &server, node.as_ref()).await;
}

/// Repeated checks of one key over its quota, by contenders that cache denials.
async fn denied(run: &mut Run, server: &RedisServer, node: Option<&Node>) {
    let backend = RedisBackend::connect(server.url()).await.expect("Redis accepts the connection");
    let policy = Policy::new("denied", Quota::per_hour(5).fixed_window());
    let limiter = Limiter::new(DenyCache::new(backend.clone()), policy.clone()).deadline(Duration::from_secs(10));
    let decider = Decider::DenyCache(limiter);
    let asking = Decider::Tollgate(Limiter::new(backend, policy).deadline(Duration::from_secs(10)));
    for _ in 0..10 {
        asking.admits(0).await;
        decider.admits(0).await;
    }
    let call = async { assert!(!asking.admits(0).await, "the quota is used up") };
    let ceiling = Ceiling::record(server, "rate_limit_check_plain.lua", "7777777", call).await;
    let time = run.time;
    let mut contenders = vec![Contender::new("tollgate", |in_flight| {
        let decider = decider.clone();
        Box::pin(load(in_flight, time, move |_, turn| {
            let decider = decider.clone();
            async move {
                assert!(!decider.admits(0).await, "the quota is used up");
                // A cached decision never waits, so yield to the other tasks.
                if turn % 64 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        }))
    })];
    if let Some(node) = node {
        let load = move |in_flight| -> Loaded<'_> { Box::pin(node.load("denied", in_flight, time, json!({}))) };
        contenders.push(Contender::new("rate-limiter-flexible-node", load));
    }
    let points = [256];
    let medians = take_turns(&mut contenders, &points, run.rounds, |_| Some(ceiling.per_s())).await;
    run.report.add(Table {
        name: "denied",
        title: "A key over its quota",
        text: "Denied requests per second of one such key, by contenders that cache denials in the process. `DenyCache` does so for at \
               most a second, and the in-memory block of `rate-limiter-flexible` is set to last for the window. The ceiling is the rate \
               of `redis-benchmark` with the script that a check without a cache calls.",
        unit: "decisions in flight",
        points: points.to_vec(),
        headline: 256,
        rank: Rank::Rate,
        lines: contenders.into_iter().map(|contender| (contender.who, contender.apart)).collect(),
        medians,
        ..Table::default()
    });
}
