//! The rights that a Redis user needs for each capability: every right that the docs list, and no other.
//!
//! The crate works around some missing rights: for instance, waiters that may not subscribe poll. So the tests read the refused commands
//! from the server's ACL log.

use crate::support;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::future::{Future, IntoFuture};
use std::path::Path;
use std::time::Duration;

use futures_util::stream;
use support::server::{RedisServer, wait_until};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use tollgate::delay_queue::store::{Ack, AckKind, Claim as JobClaim, ClaimedJob, DelayQueueStore, QueueKey, WorkerId};
use tollgate::delay_queue::{DeadLimits, JobId, State};
use tollgate::idempotency::store::{
    Begun, BodyFingerprint, Claim as Attempt, Completion, Digest, IdempotencyStore, RecordBound,
};
use tollgate::idempotency::{Checkpoint, IdempotencyAdmin, Operation};
use tollgate::lock::store::Token;
use tollgate::lock::{Cursor, LockAdmin, Replication, RwLocks, Semaphore};
use tollgate::{
    BoxError, Cache, ConnectError, DelayQueue, ExistsFilter, Lease, Limiter, Locks, Policy, Quota, RedisBackend,
};

const MINUTE: Duration = Duration::from_secs(60);
/// How long the server may take to refuse a command that the user lacks.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Refusals without an effect. A refused `PING` is an answer as well, a client that may not call `ZRANGE` is in no wait queue, and the docs
/// explain `INFO`.
const DONE_WITHOUT: [&str; 3] = ["command ping", "command zrange", "command info"];
/// Slightly longer than a channel stays subscribed without a waiter.
const LINGER: Duration = Duration::from_millis(2_500);

/// The words of the docs after `start`, up to the next backtick or the end of the line.
fn documented(start: &str) -> Vec<&'static str> {
    let docs = include_str!("../../src/backend/redis/mod.rs");
    let (_, rule) = docs.split_once(start).unwrap_or_else(|| panic!("the docs say {start}"));
    rule.split(['`', '\n']).next().unwrap().split_whitespace().collect()
}

fn base() -> Vec<&'static str> {
    documented("//! ACL SETUSER tollgate ")
}

fn for_waiting() -> Vec<&'static str> {
    [
        documented("Waiting for a lock, for the same request or for a cached value: `"),
        documented("Cheaper batches of lock releases: `"),
    ]
    .concat()
}

/// Gives the user exactly these rights.
fn allow(server: &RedisServer, words: &[&str]) {
    server.query::<()>("ACL DELUSER tollgate");
    server.query::<()>(&format!("ACL SETUSER tollgate {}", words.join(" ")));
    server.query::<()>("ACL LOG RESET");
}

/// The commands, keys and channels that the server has refused.
fn refused(server: &RedisServer) -> Vec<String> {
    let entries: Vec<HashMap<String, redis::Value>> = server.query("ACL LOG");
    let text = |value: &redis::Value| redis::from_redis_value::<String>(value.clone()).unwrap();
    entries.iter().map(|entry| format!("{} {}", text(&entry["reason"]), text(&entry["object"]))).collect()
}

async fn connect(server: &RedisServer) -> Result<RedisBackend, BoxError> {
    Ok(RedisBackend::connect(server.url().replace("://", "://tollgate:password@")).await?)
}

/// Runs `everything` with the documented rights, and again without each command of `own`.
async fn takes_exactly<F: Future<Output = Result<(), BoxError>>>(
    server: &RedisServer,
    others: &[&str],
    own: &[&str],
    everything: impl Fn() -> F,
) {
    let all = [others, own].concat();
    allow(server, &all);
    let outcome = timeout(MINUTE, everything()).await.expect("the operations end in time");
    let mut missed = refused(server);
    missed.retain(|object| !DONE_WITHOUT.contains(&&**object));
    assert!(outcome.is_ok() && missed.is_empty(), "{outcome:?}, refused: {missed:?}");
    let commands: Vec<_> = own.iter().filter(|word| word.starts_with('+')).collect();
    assert!(!commands.is_empty(), "{own:?}");
    for command in commands {
        let rest: Vec<_> = all.iter().copied().filter(|word| word != command).collect();
        allow(server, &rest);
        // The outcome does not matter, because the crate works around some missing rights.
        let misses = async {
            let _ = timeout(TIMEOUT, everything()).await;
        };
        let is_missed = async {
            // Before Redis 7, the log names no subcommands.
            let known = command[1..].split('|').next().unwrap();
            while !refused(server).iter().any(|object| object.starts_with(&format!("command {known}"))) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let both = async {
            misses.await;
            sleep(Duration::from_secs(1)).await;
        };
        tokio::select! {
            () = is_missed => {}
            () = both => panic!("nothing needs {command}: refused {:?}", refused(server)),
        }
    }
}

/// An unused name, because an operation that was refused halfway may leave keys behind.
fn fresh() -> Result<String, BoxError> {
    Ok(JobId::unique()?.as_str().to_owned())
}

fn quick(locks: Locks) -> Locks {
    locks.deadline(Duration::from_secs(2)).wait(TIMEOUT)
}

/// Acquires, waits for and renews locks, acquires several at once, and acquires and releases many.
async fn use_locks(server: &RedisServer) -> Result<(), BoxError> {
    let (a, b) = (&fresh()?, &fresh()?);
    let (here, there) =
        (quick(Locks::new(connect(server).await?, "default")), quick(Locks::new(connect(server).await?, "default")));
    let lease = here.lock(a.clone()).ttl(Duration::from_millis(1_500)).await?;
    let waiting = tokio::spawn(there.lock(a.clone()).into_future());
    // Wait until the lease is renewed.
    sleep(Duration::from_millis(600)).await;
    lease.check()?;
    lease.release().await?;
    waiting.await??.release().await?;
    here.lock_all([a.clone(), b.clone()]).await?.release().await?;
    let lease = here.lock(b.clone()).await?;
    let waiting = tokio::spawn(there.lock(b.clone()).into_future());
    sleep(Duration::from_millis(200)).await;
    let mut tasks = JoinSet::new();
    for key in 0..100_u32 {
        let request = here.lock((a.clone(), key));
        tasks.spawn(async move { Ok::<_, BoxError>(request.await?) });
    }
    let mut leases = vec![lease];
    while let Some(lease) = tasks.join_next().await {
        leases.push(lease??);
    }
    let mut releases: JoinSet<_> = leases.into_iter().map(Lease::release).collect();
    while let Some(released) = releases.join_next().await {
        released??;
    }
    waiting.await??.release().await?;
    sleep(LINGER).await;
    here.shutdown().await;
    there.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_need_the_documented_rights() {
    let server = RedisServer::start();
    takes_exactly(&server, &base(), &for_waiting(), || use_locks(&server)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_database_needs_the_documented_rights() {
    let server = RedisServer::start();
    let connect = async |database: u32| {
        RedisBackend::connect(server.url().replace("://", "://tollgate:password@") + &database.to_string()).await
    };
    let count = async || {
        let limiter = Limiter::new(connect(2).await?, Policy::new("elsewhere", Quota::per_hour(100).fixed_window()));
        let _ = limiter.deadline(Duration::from_secs(2)).check("alice").await?;
        Ok(())
    };
    let own = documented("as in the example above, also\n//! needs `");
    takes_exactly(&server, &base(), &own, count).await;
    assert!(server.info("db2").is_some());
    // Neither error goes away by itself, so connecting reports each of them.
    let error = connect(2).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Permissions(failure) if failure.error().is_unauthorized()), "{error:?}");
    allow(&server, &[base(), own].concat());
    let error = connect(99).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unsupported(_)), "{error:?}");
    assert!(format!("{error:?}").contains("out of range"), "{error:?}");
}

/// Uses fair locks, read/write locks and semaphores, with waiters, one of which gives up.
async fn use_wait_queues(server: &RedisServer) -> Result<(), BoxError> {
    let a = &fresh()?;
    let (here, there) = (
        quick(Locks::new(connect(server).await?, "default")).fair(),
        quick(Locks::new(connect(server).await?, "default")).fair(),
    );
    let lease = here.lock(a.clone()).await?;
    // The waiters may be queued in any order.
    let mut waiting: JoinSet<_> =
        [&there, &here, &there].into_iter().map(|locks| locks.lock(a.clone()).into_future()).collect();
    drop(there.lock(a.clone()).wait(Duration::from_millis(100)).await);
    lease.release().await?;
    while let Some(lease) = waiting.join_next().await {
        lease??.release().await?;
    }
    let rw =
        async || Ok::<_, BoxError>(RwLocks::new(connect(server).await?, "rw_locks").deadline(Duration::from_secs(2)));
    let (readers, writers) = (rw().await?, rw().await?);
    let lease = readers.read(a.clone()).await?;
    let mut waiting = JoinSet::new();
    waiting.spawn(writers.write(a.clone()).into_future());
    sleep(Duration::from_millis(50)).await;
    waiting.spawn(readers.read(a.clone()).into_future());
    sleep(Duration::from_millis(50)).await;
    lease.release().await?;
    while let Some(lease) = waiting.join_next().await {
        lease??.release().await?;
    }
    let permits = Semaphore::new(connect(server).await?, "semaphores", 2).deadline(Duration::from_secs(2));
    let (one, other) = (permits.acquire(a.clone()).await?, permits.acquire(a.clone()).await?);
    one.release().await?;
    other.release().await?;
    for locks in [here, there] {
        locks.shutdown().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_queues_need_the_documented_rights() {
    let server = RedisServer::start();
    let own = documented("and read/write locks: `");
    takes_exactly(&server, &[base(), for_waiting()].concat(), &own, || use_wait_queues(&server)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_admin_needs_the_documented_rights() {
    let server = RedisServer::start();
    let look = async || {
        let (a, backend) = (fresh()?, connect(&server).await?);
        let locks = quick(Locks::new(backend.clone(), "default")).holder("billing");
        let lease = locks.lock(a.clone()).await?;
        let admin = LockAdmin::new(backend, "default").deadline(Duration::from_secs(2));
        sleep(Duration::from_millis(50)).await;
        admin.inspect(a.clone()).await?;
        admin.list(Cursor::default(), 10).await?;
        admin.force_release(a.clone()).await?;
        drop(lease);
        locks.shutdown().await;
        Ok(())
    };
    let own = documented("Listing locks or operations: `");
    takes_exactly(&server, &[base(), for_waiting()].concat(), &own, look).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicated_locks_need_the_documented_rights() {
    let server = RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]);
    let port = server.port().to_string();
    let _replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]);
    server.query::<()>("SET started 1");
    block_in_place(|| wait_until("the replica is in sync", || server.is_followed_by(1)));
    let replicated = async || {
        let locks = quick(Locks::new(connect(&server).await?, "default"))
            .replication(Replication::Require(1))
            .wait(Duration::ZERO);
        locks.lock(fresh()?).await?.release().await?;
        locks.shutdown().await;
        Ok(())
    };
    let own = documented("Locks with replication: `");
    takes_exactly(&server, &[base(), for_waiting()].concat(), &own, replicated).await;
}

/// Runs every call for an operation, with a waiter for it.
async fn use_operations(server: &RedisServer) -> Result<(), BoxError> {
    let (store, other) = (connect(server).await?, connect(server).await?);
    let admin = IdempotencyAdmin::new(store.clone());
    let operation = Operation::new("alice", fresh()?);
    let completion = Completion::new(*b"x", BodyFingerprint::default(), MINUTE);
    for turn in 0..3 {
        let attempt = Attempt::new(Token::random()?, Digest([turn; 16]), MINUTE, MINUTE);
        store.begin(&operation, &attempt).await?;
        let mut wakeups = IdempotencyStore::watch(&other, &operation).await;
        while timeout(Duration::from_millis(100), wakeups.next()).await.is_ok() {}
        store.renew(&operation, &attempt, &BodyFingerprint::default()).await?;
        store
            .checkpoint(&operation, &attempt, &BodyFingerprint::default(), &Checkpoint::new(1, "half", b"x").unwrap())
            .await?;
        match turn {
            0 => store.release(&operation, &attempt).await?,
            1 => admin.forget(&admin.inspect(&operation).await?.ok_or("there is none")?).await?,
            _ => store.complete(&operation, &attempt.token, &completion).await?,
        };
        // A waiter without notifications polls once a second.
        timeout(Duration::from_secs(3), wakeups.next()).await?;
    }
    sleep(LINGER).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_need_the_documented_rights() {
    let server = RedisServer::start();
    let own = documented("Waiting for a lock, for the same request or for a cached value: `");
    takes_exactly(&server, &base(), &own, || use_operations(&server)).await;
}

/// Loads a value that another backend waits for, and uses each other call of a cache.
async fn use_a_cache(server: &RedisServer) -> Result<(), BoxError> {
    let key = &fresh()?;
    let cache = async || {
        let cache = Cache::<u32>::new(connect(server).await?, "default", MINUTE);
        Ok::<_, BoxError>(cache.deadline(Duration::from_secs(2)).lease(Duration::from_millis(300)))
    };
    let (here, there) = (cache().await?, cache().await?);
    let slow = async || {
        // Wait until the lease is renewed.
        sleep(Duration::from_millis(500)).await;
        Ok::<_, BoxError>(7)
    };
    let (loaded, waited) = tokio::join!(here.get_or_fill(key.as_str(), slow), there.get_or_fill(key.as_str(), slow));
    assert_eq!((loaded?.as_deref(), waited?.as_deref()), (Some(&7), Some(&7)));
    here.expire(key.as_str()).await?;
    let filter = ExistsFilter::new(connect(server).await?, key.as_str(), 10).visible_within(Duration::ZERO);
    let filter = filter.deadline(Duration::from_secs(2));
    filter.rebuild(stream::iter([Ok::<_, BoxError>(1)])).await?;
    filter.add(2).await?;
    assert!(filter.might_contain(2).await?);
    here.set(key.as_str(), 8).await?;
    here.invalidate(key.as_str()).await?;
    here.tagged(["tag"]).set(key.as_str(), 9).await?;
    assert_eq!(there.get(key.as_str()).await?.as_deref(), Some(&9));
    here.invalidate_tag("tag").await?;
    let failing = async || Err::<u32, _>(BoxError::from("the origin is down"));
    assert!(here.get_or_fill(key.as_str(), failing).await.is_err());
    sleep(LINGER).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cache_needs_the_documented_rights() {
    let server = RedisServer::start();
    let own = documented("Waiting for a lock, for the same request or for a cached value: `");
    takes_exactly(&server, &base(), &own, || use_a_cache(&server)).await;
}

/// Runs every call for a queue.
async fn use_queues(server: &RedisServer) -> Result<(), BoxError> {
    let backend = connect(server).await?;
    let name = fresh()?;
    let queue = DelayQueue::<String>::new(backend.clone(), name.clone()).max_jobs(100).deadline(Duration::from_secs(5));
    let key = QueueKey::new(name);
    let worker = JobClaim::new(WorkerId::random()?, 10, MINUTE);
    let mut wakeups = DelayQueueStore::watch(&backend, &key, worker.worker).await;
    // The first worker is the timekeeper and gets no notifications.
    for worker in [JobClaim::new(WorkerId::random()?, 10, MINUTE), worker] {
        backend.claim(&key, &[], &worker).await?;
    }
    while timeout(Duration::from_millis(20), wakeups.next()).await.is_ok() {}
    for id in ["a", "b", "c"] {
        queue.push(id.to_owned()).id(id).unique(id).max_attempts(1).await?;
    }
    queue.push("again".to_owned()).id("again").unique("a").await?;
    queue.push("later".to_owned()).id("later").delay(MINUTE).await?;
    timeout(Duration::from_secs(4), wakeups.next()).await?;
    queue.replace("later", "x".to_owned()).await?;
    queue.cancel("later").await?;
    queue.reschedule("a", MINUTE).await?;
    queue.promote("a").await?;
    queue.list(State::Waiting, 0, 10).await?;
    queue.get("a").await?;
    let jobs = backend.claim(&key, &[], &worker).await?.jobs;
    queue.cancel("a").await?;
    let leases: Vec<_> = jobs.iter().map(ClaimedJob::lease).collect();
    backend.extend(&key, &leases, MINUTE).await?;
    let ending = AckKind::Retry { delay: Duration::ZERO, error: "no".into() };
    let finishes: Vec<_> = leases.iter().map(|&ticket| Ack::new(ticket, ending.clone())).collect();
    let mut few = worker;
    few.dead = DeadLimits::new(1, MINUTE);
    backend.claim(&key, &finishes, &few).await?;
    queue.pause().await?;
    queue.resume().await?;
    queue.counts().await?;
    queue.dead(0, 10).await?;
    queue.replay(10, |_| true).await?;
    queue.purge().await?;
    // A job whose lease expires, a late acknowledgement of it, and dead jobs that are forgotten.
    queue.push("d".to_owned()).id("d").max_attempts(1).await?;
    let brief = JobClaim::new(worker.worker, 10, Duration::from_millis(20));
    let jobs = backend.claim(&key, &[], &brief).await?.jobs;
    sleep(Duration::from_millis(50)).await;
    let late: Vec<_> = jobs.iter().map(|job| Ack::new(job.lease(), AckKind::Done)).collect();
    backend.claim(&key, &late, &worker).await?;
    queue.forget(10, |_| true).await?;
    drop(wakeups);
    sleep(LINGER).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_need_the_documented_rights() {
    let server = RedisServer::start();
    takes_exactly(&server, &base(), &documented("Delay queues: `"), || use_queues(&server)).await;
}

/// Fills the record bound of a caller, and begins another operation after the first record has expired.
async fn use_bounds(server: &RedisServer) -> Result<(), BoxError> {
    let (store, scope) = (connect(server).await?, fresh()?);
    let begin = async |key: &str, retention| {
        let mut attempt = Attempt::new(Token::random()?, Digest::default(), Duration::from_millis(10), retention);
        attempt.bound = Some(RecordBound { scope: (&*scope).into(), max: 1 });
        let operation = Operation::new(&*scope, key);
        Ok::<_, BoxError>((store.begin(&operation, &attempt).await?, operation, attempt))
    };
    begin("first", Duration::from_secs(1)).await?;
    assert!(matches!(begin("second", MINUTE).await?.0, Begun::ScopeFull { .. }));
    sleep(Duration::from_millis(1_100)).await;
    let (since, operation, attempt) = begin("second", MINUTE).await?;
    assert!(matches!(since, Begun::Granted { .. }), "{since:?}");
    IdempotencyStore::release(&store, &operation, &attempt).await?;
    Ok(())
}

/// Some commands run only after rare faults, which the other tests do not cause.
#[test]
fn every_command_of_a_script_is_documented() {
    let docs = include_str!("../../src/backend/redis/mod.rs");
    let lua = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua");
    let files = [&lua, &lua.join("includes")].map(|folder| fs::read_dir(folder).unwrap());
    let mut commands = BTreeSet::new();
    for file in files.into_iter().flatten().map(|file| file.unwrap().path()).filter(|path| path.is_file()) {
        let text = fs::read_to_string(file).unwrap();
        let calls = text.split("call('").skip(1);
        commands.extend(calls.map(|call| call.split('\'').next().unwrap().to_lowercase()));
    }
    assert!(commands.contains("zadd") && commands.contains("unlink"), "{commands:?}");
    let is_documented = |command: &String| docs.split([' ', '`', '|', '\n']).any(|word| word == format!("+{command}"));
    let missing: Vec<_> = commands.iter().filter(|command| !is_documented(command)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounded_records_need_the_documented_rights() {
    let server = RedisServer::start();
    let own = documented("of an `IdempotencyLayer`: `");
    let others = [base(), for_waiting()].concat();
    takes_exactly(&server, &others, &own, || use_bounds(&server)).await;
}
