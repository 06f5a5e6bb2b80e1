//! The store contract on real Redis servers, and the properties of this backend: commands, keys, memory and errors.

use crate::support;

use std::collections::HashMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use futures_util::FutureExt as _;
use http::{Request, Response};
use redis::Connection;
use support::server::{RedisServer, wait_until};
use support::shared::patient;
use tokio::runtime::Handle;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::timeout;
use tollgate::delay_queue::{DelayQueueWorker, Job, Recurring, Schedule};
use tollgate::http::{FingerprintedBody, header};
use tollgate::idempotency::{Idempotent, Operation};
use tollgate::rate_limit::Decision;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::{
    AnyBackend, BoxError, ConfigError, ConnectError, DelayQueue, DenyCache, IdempotencyLayer, Limiter, MemoryBackend,
    Policy, Quota, QuotaPrefetch, RateLimitLayer, Reach, RedisBackend, RedisOptions, StoreError,
};
use tower::util::BoxCloneService;
use tower::{Layer, ServiceExt, service_fn};

tollgate::rate_limit_contract!(
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    |claim| {
        let server = RedisServer::start();
        claim(connect(&server).await).await;
        server.every_key_expires();
    }
);

/// Long enough that a busy machine fails no test.
const DEADLINE: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

async fn connect(server: &RedisServer) -> RedisBackend {
    patient(server.url()).await
}

/// One policy per algorithm, each `limit` per minute.
fn policies(limit: u64) -> [Policy; 2] {
    let quota = Quota::per_minute(limit);
    [Policy::new("fixed", quota.fixed_window()), Policy::new("log", quota.sliding_log().unwrap())]
}

fn limiter(backend: &RedisBackend, policy: Policy) -> Limiter<RedisBackend> {
    Limiter::new(backend.clone(), policy).deadline(DEADLINE)
}

/// The value of a field of `INFO`.
fn info(connection: &mut Connection, section: &str, field: &str) -> Option<String> {
    let info: String = redis::cmd("INFO").arg(section).query(connection).unwrap();
    info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).map(str::to_owned)
}

/// How often each command was called, by clients and by scripts.
fn calls(connection: &mut Connection) -> HashMap<String, u64> {
    let info: String = redis::cmd("INFO").arg("commandstats").query(connection).unwrap();
    let calls = info.lines().filter_map(|line| {
        let (command, numbers) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((command.to_lowercase(), numbers.split(',').next()?.parse().ok()?))
    });
    calls.collect()
}

#[tokio::test]
async fn a_decision_is_one_command() {
    const DECISIONS: u64 = 100;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    for policy in policies(60) {
        let limiter = limiter(&backend, policy);
        // The first call carries the text of the script.
        let _ = limiter.check("alice").await.unwrap();
        let _: () = redis::cmd("CONFIG").arg("RESETSTAT").query(&mut connection).unwrap();
        for _ in 0..DECISIONS {
            let _ = limiter.check("alice").await.unwrap();
        }
        let mut calls = calls(&mut connection);
        assert_eq!(calls.remove("evalsha"), Some(DECISIONS));
        // The statistics also count the commands that scripts call and the commands of this test. Any other command would be an extra round
        // trip: PING, EVAL, SCRIPT LOAD.
        for known in ["get", "pttl", "set", "incrby", "time", "getrange", "append", "pexpire", "setrange", "strlen"] {
            calls.remove(known);
        }
        calls.retain(|command, _| !command.starts_with("config") && !command.starts_with("info"));
        assert!(calls.is_empty(), "{calls:?}");
    }
}

#[tokio::test]
async fn a_block_and_each_shadow_cost_another_round_trip() {
    const DECISIONS: u64 = 10;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let policy = |name| Policy::new(name, Quota::per_minute(1_000).fixed_window());
    let mut connection = server.connection();
    let mut calls_since = || {
        let calls = calls(&mut connection).remove("evalsha").unwrap_or(0);
        let _: () = redis::cmd("CONFIG").arg("RESETSTAT").query(&mut connection).unwrap();
        calls
    };

    let blocked = limiter(&backend, policy("blocked"));
    blocked.block("alice", LONG).await.unwrap();
    for _ in 0..2 {
        // The first calls carry the texts of the scripts.
        let _ = blocked.check("alice").await.unwrap();
        calls_since();
    }
    for _ in 0..DECISIONS {
        assert!(!blocked.check("alice").await.unwrap().is_allowed());
    }
    assert_eq!(calls_since(), 2 * DECISIONS);

    let hello = service_fn(async |_: Request<()>| Ok::<_, BoxError>(Response::new(())));
    let alone = RateLimitLayer::new(backend, policy("enforced")).deadline(DEADLINE);
    let shadow = |name| policy(name).shadow();
    let beside_one = alone.clone().and(shadow("one"), |_: &Request<()>| "bob");
    let beside_two = beside_one.clone().and(shadow("two"), |_: &Request<()>| "bob");
    let services = [
        BoxCloneService::new(alone.layer(hello).map_response(drop)),
        BoxCloneService::new(beside_one.layer(hello).map_response(drop)),
        BoxCloneService::new(beside_two.layer(hello).map_response(drop)),
    ];
    for (shadows, service) in (0..).zip(services) {
        service.clone().oneshot(Request::new(())).await.unwrap();
        calls_since();
        for _ in 0..DECISIONS {
            service.clone().oneshot(Request::new(())).await.unwrap();
        }
        assert_eq!(calls_since(), (1 + shadows) * DECISIONS, "{shadows} shadows");
    }
}

#[tokio::test]
async fn a_denial_and_a_peek_write_nothing() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    for policy in policies(5) {
        let limiter = limiter(&backend, policy);
        let _ = limiter.check_cost("alice", 4).await.unwrap();
        let before = info(&mut connection, "persistence", "rdb_changes_since_last_save");
        for _ in 0..10 {
            assert!(!limiter.check_cost("alice", 2).await.unwrap().is_allowed());
            assert!(limiter.check_cost("alice", 0).await.unwrap().is_allowed());
            let _ = limiter.peek("alice").await.unwrap();
            let _ = limiter.peek("unknown").await.unwrap();
        }
        assert_eq!(info(&mut connection, "persistence", "rdb_changes_since_last_save"), before);
    }
}

/// Returns the name of the key that holds `part` of alice's counts. Resets alice before and afterwards.
async fn stored(limiter: &Limiter<RedisBackend>, connection: &mut Connection, part: &str) -> String {
    limiter.reset("alice").await.unwrap();
    let _ = limiter.check("alice").await.unwrap();
    let pattern = format!("tollgate:2:{{rate_limit:{}:alice}}:????????:{part}", limiter.policy().name());
    let mut keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query(connection).unwrap();
    assert_eq!(keys.len(), 1, "{keys:?}");
    limiter.reset("alice").await.unwrap();
    keys.remove(0)
}

#[tokio::test]
async fn a_sliding_log_stays_small() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let limit = Quota::new(Quota::MAX_SLIDING_LOG, Duration::from_millis(200)).unwrap().sliding_log().unwrap();
    let limiter = limiter(&backend, Policy::new("small", limit));
    let mut connection = server.connection();
    let mut cuts = 0;
    let mut before = 0;
    let key = &stored(&limiter, &mut connection, "log:200000").await;
    // Spans many windows, so that far more entries expire than stay alive.
    for _ in 0..6_000 {
        let remaining = limiter.check("alice").await.unwrap().remaining().unwrap();
        let alive = Quota::MAX_SLIDING_LOG - remaining;
        let bytes: u64 = redis::cmd("STRLEN").arg(key).query(&mut connection).unwrap();
        assert!(bytes <= 6 + 12 * (alive + alive / 4 + 65), "{bytes} bytes for {alive} requests");
        cuts += u32::from(bytes < before);
        before = bytes;
    }
    assert!(cuts > 0, "the log was never trimmed, so the test proves nothing");
}

#[tokio::test]
async fn full_log_uses_documented_memory() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let limiter = limiter(&backend, Policy::new("full", Quota::per_hour(10_000).sliding_log().unwrap()));
    let mut connection = server.connection();
    let key = &stored(&limiter, &mut connection, "log:3600000000").await;
    for _ in 0..10_000 {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    let length: u64 = redis::cmd("STRLEN").arg(key).query(&mut connection).unwrap();
    assert_eq!(length, 13 + 12 * 10_000);
    let memory: u64 = redis::cmd("MEMORY").arg("USAGE").arg(key).query(&mut connection).unwrap();
    // Redis allocates up to twice the length of a growing string.
    assert!(memory < 2 * length + 1_024, "{memory} bytes");
}

#[tokio::test]
async fn key_regains_lost_expiry() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    let limiter = limiter(&backend, Policy::new("expiry", Quota::per_second(10).fixed_window()));
    let key = &stored(&limiter, &mut connection, "counts").await;
    let _ = limiter.check("alice").await.unwrap();
    for harm in ["PERSIST", "PEXPIRE"] {
        let mut command = redis::cmd(harm);
        command.arg(key);
        if harm == "PEXPIRE" {
            command.arg(86_400_000);
        }
        let _: i64 = command.query(&mut connection).unwrap();
        // The expiry only decides when Redis may delete the key, so the count is unchanged.
        assert!(limiter.peek("alice").await.unwrap().reset_after() <= Duration::from_secs(1));
        // The script rewrites the expiry once in each fifth of it.
        tokio::time::sleep(Duration::from_millis(1_263 / 5 + 1)).await;
        let _ = limiter.check("alice").await.unwrap();
        let ttl: i64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
        assert!((1..=1_263).contains(&ttl), "{ttl} after {harm}");
    }
}

/// Regression: counts took over the expiry of a long block, and kept it after the block was lifted or shortened.
#[tokio::test]
async fn lifted_block_does_not_extend_the_key() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    let [policy, _] = policies(10);
    let limiter = limiter(&backend, policy);
    let key = &stored(&limiter, &mut connection, "counts").await;
    let _ = limiter.check("alice").await.unwrap();
    for block in [Duration::ZERO, Duration::from_secs(1)] {
        limiter.block("alice", Duration::from_secs(86_400)).await.unwrap();
        limiter.block("alice", block).await.unwrap();
        let ttl: i64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
        assert!((50_000..=75_013).contains(&ttl), "{ttl} after a block of {block:?}");
    }
}

/// Counts that are ahead of the server's clock extend the expiry by that difference. Charges compute the expiry in the same way.
#[tokio::test]
async fn lifted_block_after_a_clock_step_keeps_counts() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    let limiter = limiter(&backend, Policy::new("lifted", Quota::per_minute(10).fixed_window()));
    let key = &stored(&limiter, &mut connection, "counts").await;
    let _ = limiter.check_cost("alice", 9).await.unwrap();
    let mut value: Vec<u8> = redis::cmd("GET").arg(key).query(&mut connection).unwrap();
    // The last update follows the version and the capacity.
    let last = 1 + 7;
    let ahead = f64::from_le_bytes(value[last..last + 8].try_into().unwrap()) + 3_600e6;
    value[last..last + 8].copy_from_slice(&ahead.to_le_bytes());
    let _: () = redis::cmd("SET").arg(key).arg(value).arg("PX").arg(4_000_000).query(&mut connection).unwrap();
    limiter.block("alice", Duration::ZERO).await.unwrap();
    let ttl: u64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
    assert!((3_650_000..=3_690_000).contains(&ttl), "{ttl}");
}

/// Two configurations of one policy share a key, as during a rollout. One of them needs the key for far longer.
#[tokio::test]
async fn block_keeps_the_key_as_long_as_its_counts() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    let bucket = |quota: Quota| limiter(&backend, Policy::new("shared", quota.token_bucket()));
    let (long, short) = (bucket(Quota::per_day(10)), bucket(Quota::per_minute(100)));
    let key = &stored(&long, &mut connection, "counts").await;
    let _ = long.check_cost("alice", 9).await.unwrap();
    for block in [Duration::ZERO, Duration::from_secs(1), Duration::ZERO] {
        short.block("alice", block).await.unwrap();
        let ttl: u64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
        assert!(ttl > 2 * 86_400_000, "{ttl} after a block of {block:?}");
    }
    assert!(long.check("alice").await.unwrap().is_allowed());
    let ttl: u64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
    assert!(ttl > 2 * 86_400_000, "{ttl}");
    assert!(!long.check("alice").await.unwrap().is_allowed());
}

#[tokio::test]
async fn future_counts_deny_no_longer_than_before() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    let quota = Quota::per_minute(2);
    let limits = [quota.token_bucket(), quota.fixed_window(), quota.sliding_window()];
    let policy = Policy::new("future", limits[0]).limit(limits[1]).limit(limits[2]);
    let limiter = limiter(&backend, policy);
    let key = &stored(&limiter, &mut connection, "counts").await;
    // Shifts the stored instants, as if the server's clock were set back by so many seconds.
    for back in [1, 30, 3_600, 86_400 * 365] {
        assert!(limiter.check_cost("alice", 2).await.unwrap().is_allowed());
        let before = limiter.peek("alice").await.unwrap();
        let value: Vec<u8> = redis::cmd("GET").arg(key).query(&mut connection).unwrap();
        let params_end = 1 + 25 + 2 * 7;
        // After the parameters come last update, full-since, debt and part of the bucket, then start and use of two windows.
        let moved = [0, 1, 4, 6].map(|number| params_end + 8 * number).into_iter().fold(value, |mut value, at| {
            let instant = f64::from_le_bytes(value[at..at + 8].try_into().unwrap()) + f64::from(back) * 1e6;
            value[at..at + 8].copy_from_slice(&instant.to_le_bytes());
            value
        });
        let _: () = redis::cmd("SET").arg(key).arg(moved).arg("PX").arg(120_000).query(&mut connection).unwrap();
        let after = limiter.peek("alice").await.unwrap();
        for (before, after) in before.limits().iter().zip(after.limits()) {
            assert_eq!(before.remaining(), after.remaining());
            let later = after.reset_after().abs_diff(before.reset_after());
            assert!(later < Duration::from_secs(5), "set back by {back} s: {before:?} became {after:?}");
        }
        let wait = limiter.check("alice").await.unwrap().retry_after().expect("the quota is used up");
        assert!(wait <= Duration::from_secs(120), "set back by {back} s: {wait:?}");
        // The wait shrinks as time passes, although a denied request charges nothing.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let later = limiter.check("alice").await.unwrap().retry_after().expect("the quota is used up");
        assert!(later + Duration::from_millis(5) <= wait, "set back by {back} s: {wait:?}, then {later:?}");
        limiter.reset("alice").await.unwrap();
    }
}

#[tokio::test]
async fn log_from_the_future_denies_for_one_window() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    let policy = Policy::new("future", Quota::per_minute(1).sliding_log().unwrap());
    let limiter = limiter(&backend, policy);
    let key = &stored(&limiter, &mut connection, "log:60000000").await;
    let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut connection).unwrap();
    // Writes a log as if the server's clock were set back by so many seconds.
    for back in [30, 59, 3_600, 86_400 * 365] {
        let mut value = vec![2];
        value.extend_from_slice(&[0; 5 + 7]);
        value.extend_from_slice(&((seconds + back) * 1_000_000).to_le_bytes()[..7]);
        value.extend_from_slice(&1_u64.to_le_bytes()[..5]);
        let _: () = redis::cmd("SET").arg(key).arg(value).arg("PX").arg(100_000).query(&mut connection).unwrap();
        let decision = limiter.check("alice").await.unwrap();
        let wait = decision.retry_after().expect("the log is full");
        assert!(wait <= Duration::from_secs(60), "set back by {back} s: {wait:?}");
        // The wait shrinks as time passes, although a denied request charges nothing.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let later = limiter.check("alice").await.unwrap().retry_after().expect("the log is full");
        assert!(later + Duration::from_millis(5) <= wait, "set back by {back} s: {wait:?}, then {later:?}");
    }
}

#[tokio::test]
async fn foreign_data_is_an_error_and_stays_unchanged() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let mut connection = server.connection();
    for (policy, part) in policies(5).into_iter().zip(["counts", "log:60000000"]) {
        let limiter = limiter(&backend, policy);
        let key = &*stored(&limiter, &mut connection, part).await;
        let foreign: [&[&str]; 9] = [
            &["RPUSH", key, "x"],
            &["HSET", key, "field", "x"],
            &["SET", key, "hello"],
            &["SET", key, "-1"],
            &["SET", key, ""],
            &["SET", key, "b\u{1}2345678901234567890"],
            // Begins like counts, but is too short for the number of limits that it claims, or for their counters.
            &["SET", key, "\u{1}\u{10}\u{4}\0"],
            &["SET", key, "\u{1}\u{1}\u{1c}\0\u{2}23456781234512341234567"],
            &["SET", key, "\u{4}2341234567812345678123456781234567"],
        ];
        for set in foreign {
            let mut command = redis::cmd(set[0]);
            command.arg(&set[1..]);
            let _: redis::Value = command.query(&mut connection).unwrap();
            let dump = |connection: &mut Connection| redis::cmd("DUMP").arg(key).query::<Vec<u8>>(connection).unwrap();
            let before = dump(&mut connection);
            let answer = limiter.check("alice").await;
            if set[2].is_empty() {
                // An empty string counts as a missing key.
                assert!(answer.unwrap().is_allowed());
            } else {
                let error = answer.unwrap_err();
                assert!(error.is_foreign_data(), "{set:?}: {error:?}");
                assert_eq!(dump(&mut connection), before);
            }
            // Resetting the key repairs it.
            limiter.reset("alice").await.unwrap();
            assert!(limiter.check("alice").await.unwrap().is_allowed());
            limiter.reset("alice").await.unwrap();
        }
    }
}

#[tokio::test]
async fn require_redis_rejects_the_memory_backend() {
    fn scopes(backend: impl RateLimitStore + Clone) -> [Result<(), ConfigError>; 2] {
        let policy = Policy::new("wide", Quota::per_minute(1).fixed_window());
        [
            Limiter::new(backend.clone(), policy.clone()).require(Reach::Redis).map(drop),
            RateLimitLayer::new(backend, policy).require(Reach::Redis).map(drop),
        ]
    }
    let server = RedisServer::start();
    for (url, expected) in [
        ("memory://", Err(ConfigError::ReachTooSmall { needed: Reach::Redis, has: Reach::Process })),
        (&*server.url(), Ok(())),
    ] {
        let backend = tollgate::connect(url).await.unwrap();
        assert_eq!(DelayQueue::<u8>::new(backend.clone(), "wide").require(Reach::Redis).map(drop), expected);
        let (denials, leases) = (DenyCache::new(backend.clone()), QuotaPrefetch::new(backend.clone()));
        let found = [scopes(backend), scopes(denials), scopes(leases)];
        assert_eq!(found.concat(), vec![expected; 6], "{url}");
    }
    assert!(Limiter::new(MemoryBackend::new(), policies(1)[0].clone()).require(Reach::Process).is_ok());
}

#[tokio::test]
async fn prefixes_and_databases_keep_programs_apart() {
    let server = RedisServer::start();
    let [policy, _] = policies(1);
    let backends = [
        RedisOptions::from_url(server.url()).unwrap().prefix("a").connect().await.unwrap(),
        RedisOptions::from_url(server.url()).unwrap().prefix("b").connect().await.unwrap(),
        RedisOptions::from_url(format!("{}3", server.url())).unwrap().prefix("a").connect().await.unwrap(),
    ];
    for backend in backends {
        let limiter = limiter(&backend, policy.clone());
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        assert!(!limiter.check("alice").await.unwrap().is_allowed());
    }
}

#[tokio::test]
async fn connect_with_applies_redis_options() {
    let server = RedisServer::start();
    let (url, [policy, _]) = (server.url(), policies(1));
    let prefixed = async |url: &str, prefix: &'static str| {
        tollgate::connect_with(url, |redis| redis.prefix(prefix)).await.unwrap()
    };
    for backend in [prefixed(&url, "a").await, prefixed(&url, "b").await, prefixed("memory:", "a").await] {
        let limiter = Limiter::new(backend, policy.clone()).deadline(DEADLINE);
        assert!(limiter.check("alice").await.unwrap().is_allowed());
    }
    // A backend that the program opens itself shares these counts.
    let by_hand = RedisOptions::from_url(&url).unwrap().prefix("a").connect().await.unwrap();
    let limiter = Limiter::new(AnyBackend::from(by_hand), policy).deadline(DEADLINE);
    assert!(!limiter.check("alice").await.unwrap().is_allowed());

    let refused = tollgate::connect_with(&url, |redis| redis.connections(0)).await;
    assert!(
        matches!(refused, Err(ConnectError::Config(ConfigError::ConnectionsOutOfRange { connections: 0, .. }))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn unix_socket_works() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("redis.sock");
    let socket = socket.to_str().unwrap();
    let _server = RedisServer::start_with(&["--unixsocket", socket]);
    let backend = tollgate::connect(format!("redis+unix://{socket}?db=1")).await.unwrap();
    let [policy, _] = policies(1);
    assert!(Limiter::new(backend, policy).deadline(DEADLINE).check("alice").await.unwrap().is_allowed());
}

#[tokio::test]
async fn connections_end_with_their_backend() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let mut clients = || info(&mut connection, "clients", "connected_clients").unwrap().parse::<u32>().unwrap();
    let alone = clients();
    let backend = RedisOptions::from_url(server.url()).unwrap().connections(3).connect().await.unwrap();
    assert_eq!(clients(), alone + 3);
    let clone = backend.clone();
    drop(backend);
    let [policy, _] = policies(1);
    let _ = limiter(&clone, policy).check("alice").await.unwrap();
    drop(clone);
    // The server notices a closed connection with some delay.
    for _ in 0..100 {
        if clients() == alone {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} connections are still open", clients() - alone);
}

#[tokio::test]
async fn program_pool_can_be_used() {
    let server = RedisServer::start();
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    let pool = bb8_redis::bb8::Pool::builder().max_size(2).build(manager).await.unwrap();
    let backend = RedisBackend::from_pool(pool.clone()).await.unwrap();
    let [policy, _] = policies(1);
    let limiter = limiter(&backend, policy);
    // The program has an open transaction on each pooled connection. The backend must not disturb it.
    let (mut one, mut two) = (pool.get().await.unwrap(), pool.get().await.unwrap());
    for connection in [&mut *one, &mut *two] {
        let _: () = redis::cmd("MULTI").query_async(connection).await.unwrap();
        let _: () = redis::cmd("PING").query_async(connection).await.unwrap();
    }
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    assert!(!limiter.check("alice").await.unwrap().is_allowed());
    for connection in [&mut *one, &mut *two] {
        let answers: Vec<String> = redis::cmd("EXEC").query_async(connection).await.unwrap();
        assert_eq!(answers, ["PONG"]);
    }
}

/// The `ACL SETUSER` rule in the docs.
fn documented_user() -> Vec<&'static str> {
    let docs = include_str!("../../src/backend/redis/mod.rs");
    let command = docs.lines().find_map(|line| line.strip_prefix("//! ACL ")).unwrap();
    command.split(' ').collect()
}

/// Connects as that user, and calls every operation of a limiter.
async fn do_everything(server: &RedisServer) -> Result<(), BoxError> {
    let backend = RedisBackend::connect(format!("redis://tollgate:password@127.0.0.1:{}/", server.port())).await?;
    for policy in policies(200) {
        let limiter = limiter(&backend, policy);
        limiter.reset("alice").await?;
        let mut receipt = None;
        for _ in 0..201 {
            receipt = receipt.or(limiter.check("alice").await?.receipt());
        }
        let _ = limiter.peek("alice").await?;
        limiter.settle("alice", receipt.unwrap(), -1).await?;
        let _ = limiter.check("alice").await?;
        for time in [Duration::from_secs(1), Duration::ZERO] {
            limiter.block("alice", time).await?;
        }
        // Beyond a few concurrent checks, another script batches them. The docs once lacked a command of that script, so checks failed only
        // under load.
        let mut asking = JoinSet::new();
        for _ in 0..64 {
            let limiter = limiter.clone();
            asking.spawn(async move { limiter.check("bob").await });
        }
        while let Some(decision) = asking.join_next().await {
            let _ = decision??;
        }
    }
    Ok(())
}

#[tokio::test]
async fn documented_rights_suffice() {
    let server = RedisServer::start();
    let _: () = redis::cmd("ACL").arg(documented_user()).query(&mut server.connection()).unwrap();
    do_everything(&server).await.unwrap();
}

#[tokio::test]
async fn every_documented_right_is_needed() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let rule = documented_user();
    let commands: Vec<_> = rule.iter().filter(|word| word.starts_with('+')).collect();
    assert!(commands.len() > 5, "{commands:?}");
    for command in commands {
        let _: () = redis::cmd("ACL").arg(&rule).arg(command.replace('+', "-")).query(&mut connection).unwrap();
        assert!(do_everything(&server).await.is_err(), "nothing fails without {command}");
        // Connecting reports a missing right. Before, only failed checks did, sometimes only under load.
        let url = format!("redis://tollgate:password@127.0.0.1:{}/", server.port());
        let error = RedisBackend::connect(url).await.unwrap_err();
        let ConnectError::Permissions(failure) = &error else { panic!("{command}: {error:?}") };
        let name = command.trim_start_matches('+').to_uppercase();
        assert!(
            failure.error().is_unauthorized() && format!("{error:?}").to_uppercase().contains(&name),
            "{command}: {error:?}"
        );
        assert!(server.query::<Vec<String>>("KEYS *probe*").is_empty(), "the probe leaves no key behind");
    }
}

#[tokio::test]
async fn secrets_are_not_shown() {
    let server = RedisServer::start_with(&["--requirepass", "hunter2"]);
    let url = format!("redis://:hunter2@127.0.0.1:{}/", server.port());
    let options = RedisOptions::from_url(&url).unwrap();
    let shown = format!("{options:?}");
    let backend = options.connect().await.unwrap();
    let shown = format!("{shown} {backend:?} {:?}", tollgate::connect(&url).await.unwrap());
    assert!(!shown.contains("hunter2"), "{shown}");
}

/// Checks these subjects, all at once.
async fn check_at_once(
    limiter: &Limiter<RedisBackend>,
    subjects: impl Iterator<Item = u64>,
) -> Vec<Result<Decision, StoreError>> {
    let mut tasks = JoinSet::new();
    for subject in subjects {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.check(subject).await });
    }
    tasks.join_all().await
}

#[tokio::test]
async fn concurrent_decisions_share_calls() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    for policy in [policies(100)[0].clone(), Policy::new("two", Quota::per_hour(100).token_bucket())] {
        let limiter = limiter(&backend, policy);
        let before = calls(&mut server.connection());
        let decisions = check_at_once(&limiter, (0..3_000).map(|turn| turn % 3)).await;
        let admitted = decisions.into_iter().filter(|decision| decision.as_ref().unwrap().is_allowed()).count();
        assert_eq!(admitted, 300);
        let after = calls(&mut server.connection());
        let evalsha = after["evalsha"] - before.get("evalsha").unwrap_or(&0);
        assert!(evalsha < 300, "{evalsha} calls for 3,000 decisions");
    }
    server.every_key_expires();
}

/// Two configurations of one policy in one process, whose checks of one key are batched.
#[tokio::test]
async fn batched_checks_keep_their_own_quota() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let [few, many] = [100, 200].map(|limit| limiter(&backend, policies(limit)[0].clone()));
    let mut tasks = JoinSet::new();
    for turn in 0..1_000 {
        let limiter = if turn % 2 == 0 { few.clone() } else { many.clone() };
        tasks.spawn(async move { limiter.check("alice").await });
    }
    let decisions = tasks.join_all().await;
    let admitted = decisions.into_iter().filter(|decision| decision.as_ref().unwrap().is_allowed()).count();
    assert_eq!(admitted, 200);
    server.every_key_expires();
}

#[tokio::test]
async fn foreign_data_of_one_key_fails_no_other_key() {
    let server = RedisServer::start();
    let [policy, _] = policies(100);
    let limiter = limiter(&connect(&server).await, policy);
    // Finds the key that holds the count of subject 7, and overwrites it.
    let _ = limiter.check(7_u64).await.unwrap();
    let key: String = server.query::<Vec<String>>("KEYS *").remove(0);
    server.query::<()>(&format!("DEL {key}"));
    server.query::<()>(&format!("RPUSH {key} mine"));
    let decisions = check_at_once(&limiter, (0..1_000).map(|turn| turn % 10)).await;
    let (good, bad): (Vec<_>, Vec<_>) = decisions.into_iter().partition(Result::is_ok);
    assert_eq!((good.len(), bad.len()), (900, 100));
    assert!(good.iter().all(|decision| decision.as_ref().unwrap().is_allowed()));
    assert!(bad.iter().all(|decision| decision.as_ref().unwrap_err().is_foreign_data()), "{:?}", bad[0]);
    assert_eq!(server.query::<Vec<String>>(&format!("LRANGE {key} 0 -1")), ["mine"]);
}

#[tokio::test]
async fn out_of_memory_admits_no_request() {
    let server = RedisServer::start();
    let [policy, _] = policies(100);
    let limiter = limiter(&connect(&server).await, policy);
    let _ = limiter.check(1_u64).await.unwrap();
    server.limit_memory(1);
    for decision in check_at_once(&limiter, (0..500).map(|turn| turn % 2)).await {
        let error = decision.unwrap_err();
        assert!(error.is_out_of_memory(), "{error:?}");
    }
    server.limit_memory(0);
    assert_eq!(limiter.peek(1_u64).await.unwrap().limits()[0].remaining(), 99);
}

/// Regression: a request that could not be charged for lack of memory failed its whole batch, including requests that are denied without a
/// charge.
#[tokio::test]
async fn out_of_memory_does_not_fail_denials() {
    let server = RedisServer::start();
    let [policy, _] = policies(3);
    let limiter = limiter(&connect(&server).await, policy);
    for _ in 0..3 {
        assert!(limiter.check(0_u64).await.unwrap().is_allowed());
    }
    let _ = limiter.check(1_u64).await.unwrap();
    server.limit_memory(1);
    let mut denied = 0;
    for decision in check_at_once(&limiter, (0..500).map(|turn| turn % 2)).await {
        match decision {
            Ok(decision) => {
                assert!(!decision.is_allowed());
                denied += 1;
            }
            Err(error) => assert!(error.is_out_of_memory(), "{error:?}"),
        }
    }
    assert_eq!(denied, 250);
    server.limit_memory(0);
}

#[tokio::test]
async fn cancelled_checks_are_not_charged() {
    let server = RedisServer::start();
    let [policy, _] = policies(3_000);
    let limiter = limiter(&connect(&server).await, policy);
    let _ = limiter.check("alice").await.unwrap();
    server.pause();
    let mut tasks = JoinSet::new();
    for _ in 0..2_000 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.check("alice").await });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    tasks.shutdown().await;
    server.resume();
    // Only the checks that were in flight are charged: single ones, and a few batches.
    let used = 3_000 - limiter.peek("alice").await.unwrap().limits()[0].remaining();
    assert!(used <= 1 + 4 + 8 * 64, "{used} were charged");
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

/// Drops operations and workers that run, wait or listen, and stops a worker and a scheduler.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_task_outlives_its_backend() {
    let server = RedisServer::start();
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let backend = connect(&server).await;
    let (begins, mut start) = mpsc::unbounded_channel();
    let mut dropped = JoinSet::new();

    // One operation executes, and the other one waits for it.
    for _ in 0..2 {
        let operations = Idempotent::new(backend.clone(), "payouts").lease(SECOND).wait(LONG).deadline(DEADLINE);
        let begins = begins.clone();
        dropped.spawn(async move {
            let work = async |_| {
                begins.send(()).unwrap();
                pending::<Result<Vec<u8>, BoxError>>().await
            };
            drop(operations.run(Operation::new("alice", "k"), "100 EUR", work).await);
        });
    }
    // The execution of this request is detached from its client.
    let ends = Arc::new(Notify::new());
    for _ in 0..2 {
        let layer = IdempotencyLayer::new(backend.clone()).scope(header("authorization"));
        let (begins, ends) = (begins.clone(), Arc::clone(&ends));
        let service = layer.lease(SECOND).wait(LONG).deadline(DEADLINE).layer(service_fn(
            move |_: Request<FingerprintedBody<String>>| {
                begins.send(()).unwrap();
                let ends = Arc::clone(&ends);
                let answer = async move {
                    ends.notified().await;
                    Ok::<_, BoxError>(Response::new(String::new()))
                };
                answer.boxed()
            },
        ));
        let request = Request::post("/pay").header("authorization", "alice").header("idempotency-key", "k");
        let request = request.body(String::new()).unwrap();
        dropped.spawn(service.oneshot(request).map(drop));
    }
    let mut stopped = JoinSet::new();
    let (stop, _) = broadcast::channel::<()>(1);
    for is_dropped in [true, false] {
        let queue = DelayQueue::<u32>::new(backend.clone(), if is_dropped { "dropped" } else { "stopped" });
        let queue = queue.deadline(DEADLINE);
        queue.push(7).await.unwrap();
        let begins = begins.clone();
        let worker = DelayQueueWorker::new(
            queue.clone(),
            service_fn(move |_: Job<u32>| {
                begins.send(()).unwrap();
                async move {
                    if is_dropped {
                        pending::<()>().await;
                    }
                    Ok::<_, BoxError>(())
                }
            }),
        );
        let schedule = Recurring::new(queue, Schedule::cron("yearly", "0 0 1 1 *").unwrap(), |_| 7);
        if is_dropped {
            dropped.spawn(async move { drop(worker.run().await) });
            dropped.spawn(schedule.run());
        } else {
            let [mut worker_stops, mut schedule_stops] = [(); 2].map(|()| stop.subscribe());
            stopped.spawn(async move { worker.run_until(async { drop(worker_stops.recv().await) }).await.unwrap() });
            stopped.spawn(async move { schedule.run_until(async { drop(schedule_stops.recv().await) }).await });
        }
    }
    let all = async {
        for _ in 0..4 {
            start.recv().await.unwrap();
        }
    };
    timeout(LONG, all).await.expect("two executions and two jobs start");
    block_in_place(|| {
        wait_until("two waiters and two workers listen", || {
            server.query::<Vec<String>>("PUBSUB CHANNELS tollgate:*").len() >= 4
        });
    });
    drop(backend);
    dropped.shutdown().await;
    ends.notify_one();
    stop.send(()).unwrap();
    stopped.join_all().await;
    block_in_place(|| wait_until("no task is left", || tasks() == before));
    block_in_place(|| wait_until("no connection is left", || server.clients() == 0));
}
