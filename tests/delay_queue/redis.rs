//! Delay queues on a real Redis server: commands, wake-ups, and the keys that remain.

use crate::support;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::future::{pending, ready};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use support::proxy::{Proxy, Traffic};
use support::server::{RedisServer, wait_until};
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep, timeout};
use tollgate::delay_queue::store::{
    Ack, AckKind, Admission, Claim, ClaimedJob, DelayQueueStore, Extended, Finished, JobLease, MAX_BATCH, QueueKey,
    WorkerId,
};
use tollgate::delay_queue::{
    Cancelled, Changed, DeadLimits, Due, Event, Job, JobId, MAX_ERROR_LEN, NewJob, Outcome, Priority, Pushed,
    QueueError, Reason, State, Unique, UniqueFor,
};
use tollgate::{BoxError, DelayQueue, DelayQueueWorker, Key, RedisBackend, RedisOptions, StoreError};
use tower::service_fn;

const MINUTE: Duration = Duration::from_secs(60);

async fn connect(server: &RedisServer) -> RedisBackend {
    // Tolerates the delays of a busy machine.
    let options = RedisOptions::from_url(server.url()).unwrap().response_timeout(Duration::from_secs(10));
    options.connect().await.unwrap()
}

fn queue(backend: &RedisBackend) -> DelayQueue<String> {
    DelayQueue::new(backend.clone(), "test").deadline(Duration::from_secs(10))
}

fn key() -> QueueKey {
    QueueKey::new("test")
}

fn claim(limit: usize) -> Claim {
    claim_for(limit, MINUTE)
}

fn claim_for(limit: usize, lease: Duration) -> Claim {
    Claim::new(WorkerId::random().unwrap(), limit, lease)
}

/// The number of scripts that the server has run, and their total time. A call of an unknown script runs none: it fails.
fn scripts(server: &RedisServer) -> (u64, Duration) {
    let stats = server.text("INFO commandstats");
    let number = |line: &str, field: &str| -> Option<u64> {
        line.split_once(&format!("{field}="))?.1.split(',').next()?.parse().ok()
    };
    let of_scripts = stats.lines().filter(|line| line.starts_with("cmdstat_eval"));
    let (calls, usec): (Vec<_>, Vec<_>) = of_scripts
        .filter_map(|line| Some((number(line, "calls")? - number(line, "failed_calls")?, number(line, "usec")?)))
        .unzip();
    (calls.iter().sum(), Duration::from_micros(usec.iter().sum()))
}

/// Jobs with one due time are delivered once each, by scripts that block the server only briefly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backlog_is_delivered_in_short_scripts() {
    const JOBS: usize = 50_000;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    // A time in the past, so all jobs are due when they are pushed, and none precedes the others.
    let due = std::time::UNIX_EPOCH;
    let pushed = queue.push_all((0..JOBS).map(|i| queue.push(i.to_string()).at(due))).await;
    assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)));
    let (mut seen, mut finishes) = (HashSet::new(), Vec::new());
    let claim = claim(256);
    loop {
        let claimed = backend.claim(&key(), &finishes, &claim).await.unwrap();
        assert!(claimed.finished.iter().all(|finished| *finished == Finished::Done));
        if claimed.jobs.is_empty() {
            break;
        }
        finishes.clear();
        for job in claimed.jobs {
            finishes.push(Ack::new(job.lease(), AckKind::Done));
            assert!(seen.insert(job.job.id), "twice");
        }
    }
    assert_eq!(seen.len(), JOBS);
    let (calls, time) = scripts(&server);
    // On average, since a busy machine may suspend any single script.
    assert!(time / u32::try_from(calls).unwrap() < Duration::from_millis(5), "{calls} scripts took {time:?}");
    let left: Vec<String> = server.query("KEYS *");
    assert_eq!(left, ["tollgate:2:{delay_queue:test}:state"]);
}

/// Regression: a claim read 64 jobs before it looked at their sizes, which blocked the server for a third of a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_takes_few_large_jobs() {
    const JOBS: usize = 40;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend).max_size(1 << 20);
    let payload = || "x".repeat(256 * 1_024);
    // In runs, and as single jobs.
    let pushed = queue.push_all((0..JOBS / 2).map(|_| queue.push(payload()))).await;
    assert!(pushed.iter().all(Result::is_ok));
    for _ in 0..JOBS / 2 {
        queue.push(payload()).await.unwrap();
    }
    let listed = queue.list(State::Waiting, 0, 256).await.unwrap().len();
    assert!((1..=8).contains(&listed), "{listed} are listed");
    // Claimed by a worker that dies.
    let mut claim = claim_for(256, Duration::from_millis(10));
    for _ in 0..JOBS / 4 {
        backend.claim(&key(), &[], &claim).await.unwrap();
    }
    sleep(Duration::from_millis(20)).await;
    claim.lease = MINUTE;
    let (mut seen, mut expired, mut first) = (HashSet::new(), 0, None);
    while seen.len() < JOBS {
        let claimed = backend.claim(&key(), &[], &claim).await.unwrap();
        let (count, back) = (claimed.jobs.len(), claimed.expired.jobs);
        assert!((1..=8).contains(&count) && back <= 8, "{count} claimed after {back} expired");
        expired += back;
        for job in claimed.jobs {
            first.get_or_insert(job.lease());
            assert!(seen.insert(job.job.id), "twice");
        }
    }
    assert!(expired > 0);
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.running, counts.waiting), (JOBS as u64, 0));
    let finish = Ack::new(first.unwrap(), AckKind::Done);
    let claimed = backend.claim(&key(), &[finish], &claim).await.unwrap();
    assert_eq!(claimed.finished, [Finished::Done]);
}

/// Jobs without an explicit id wait in runs. A run is claimed in order, and each of its jobs can be found, changed and cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_pushed_in_bulk_wait_in_runs() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    let members = || {
        ["runs", "due:normal"]
            .map(|part| server.query::<usize>(&format!("ZCARD tollgate:2:{{delay_queue:test}}:{part}")))
    };
    let due = std::time::SystemTime::now();
    let pushed = queue.push_all((0..300).map(|i| queue.push(i.to_string()).at(due))).await;
    let ids: Vec<_> = pushed.iter().map(|pushed| *pushed.as_ref().unwrap().id()).collect();
    assert!(ids.is_sorted());
    assert_eq!(members(), [18, 12]);
    let again = queue.push("again".to_owned()).id(ids[40]).await.unwrap();
    assert!(!again.is_new());
    assert_eq!(queue.get(ids[40]).await.unwrap().unwrap().state, State::Waiting);
    assert_eq!(queue.replace(ids[40], "new".to_owned()).await.unwrap(), Changed::Done);
    assert_eq!(members(), [18, 12], "lookups and new payloads split no run");
    assert_eq!(queue.reschedule(ids[41], MINUTE).await.unwrap(), Changed::Done);
    assert_eq!(members(), [17, 28]);
    assert_eq!(queue.cancel(ids[0]).await.unwrap(), Cancelled::Removed);
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.due), (299, 298));
    let mut left = ids.clone();
    left.retain(|id| *id != ids[0] && *id != ids[41]);
    let listed = queue.list(State::Waiting, 20, 100).await.unwrap();
    assert_eq!(listed.iter().map(|job| job.id).collect::<Vec<_>>(), left[20..120]);
    let mut claimed = Vec::new();
    for limit in [50, 256, 256] {
        let jobs = backend.claim(&key(), &[], &claim(limit)).await.unwrap().jobs;
        assert_eq!(jobs.len(), limit.min(left.len() - claimed.len()));
        claimed.extend(jobs);
    }
    assert_eq!(claimed.iter().map(|job| job.job.id).collect::<Vec<_>>(), left);
    assert_eq!(&*claimed[39].job.payload, b"\"new\"");
    assert_eq!(members(), [0, 1]);
}

/// Each of the pushes has its own result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_pushes_share_calls() {
    const JOBS: usize = 2_000;
    let server = RedisServer::start();
    let queue = queue(&connect(&server).await).max_jobs(JOBS as u64);
    queue.push("first".to_owned()).id("0").await.unwrap();
    let before = scripts(&server).0;
    let mut pushes = JoinSet::new();
    for i in 0..JOBS + 10 {
        let queue = queue.clone();
        // Id 0 exists already, and ten pushes find no room, in any order.
        pushes.spawn(async move { queue.push(i.to_string()).id(i.to_string()).await });
    }
    let answers = pushes.join_all().await;
    let new = answers.iter().filter(|answer| answer.as_ref().is_ok_and(Pushed::is_new)).count();
    let full = answers.iter().filter(|answer| answer.as_ref().is_err_and(QueueError::is_full)).count();
    let there = answers.iter().filter(|answer| answer.as_ref().is_ok_and(|pushed| !pushed.is_new())).count();
    let failed = answers.iter().find(|answer| answer.as_ref().is_err_and(|error| !error.is_full()));
    assert_eq!((new, full, there), (JOBS - 1, 10, 1), "{failed:?}");
    let calls = scripts(&server).0 - before;
    assert!(calls < JOBS as u64 / 4, "{calls} calls");
    assert_eq!(queue.counts().await.unwrap().waiting, JOBS as u64);
}

/// The store cannot snooze a job whose record it cannot read, so the job is dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_job_is_reported_as_dead() {
    let server = Arc::new(RedisServer::start());
    let queue = queue(&connect(&server).await);
    queue.push("a".to_owned()).id("a").await.unwrap();
    let damaged = Arc::clone(&server);
    let service = service_fn(move |_: Job<String>| {
        damaged.query::<()>("HSET tollgate:2:{delay_queue:test}:jobs a rubbish");
        ready(Err::<(), _>(Outcome::snooze(MINUTE)))
    });
    let worker = DelayQueueWorker::new(queue.clone(), service);
    let mut events = worker.events();
    let reported = async {
        let mut next = async || timeout(Duration::from_secs(10), events.next()).await.unwrap().unwrap();
        assert!(matches!(next().await, Event::Started { .. }));
        let event = next().await;
        assert!(matches!(event, Event::Dead { reason: Reason::Undecodable, .. }), "{event:?}");
    };
    worker.run_until(reported).await.unwrap();
    assert_eq!(queue.counts().await.unwrap().dead, 1);
}

/// A record that is not a job does not block other jobs, and ends among the dead jobs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_record_does_not_block_other_jobs() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    queue.push("a".to_owned()).id("a").unique("user").await.unwrap();
    server.query::<()>("HSET tollgate:2:{delay_queue:test}:jobs broken rubbish");
    server.query::<()>("ZADD tollgate:2:{delay_queue:test}:due:normal 1 broken");
    let brief = claim_for(10, Claim::MIN_LEASE);
    let claimed = backend.claim(&key(), &[], &brief).await.unwrap();
    assert_eq!(claimed.jobs.iter().map(|job| job.job.id.as_str()).collect::<Vec<_>>(), ["a"]);
    sleep(Claim::MIN_LEASE * 3).await;
    let claimed = backend.claim(&key(), &[], &claim(10)).await.unwrap();
    assert_eq!(claimed.jobs.iter().map(|job| job.job.id.as_str()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(queue.counts().await.unwrap().dead, 1);

    // Nor does it block access to the other dead jobs.
    let kind = AckKind::Dead { reason: Reason::Refused, error: "no".into() };
    let refused = Ack::new(claimed.jobs[0].lease(), kind);
    assert_eq!(backend.claim(&key(), &[refused], &claim(0)).await.unwrap().finished, [Finished::Dead]);
    assert_eq!(queue.counts().await.unwrap().dead, 2);
    assert_eq!(queue.dead(0, 10).await.unwrap().len(), 1);
    assert!(queue.get("broken").await.is_err());
    let broken = JobId::new("broken");
    assert_eq!(backend.replay(&key(), &[broken]).await.unwrap(), [false]);
    assert_eq!(queue.replay(10, |_| true).await.unwrap(), 1);
    assert_eq!(backend.forget(&key(), &[broken]).await.unwrap(), [true]);
    assert_eq!(queue.purge().await.unwrap(), 1);
    assert_eq!(server.query::<Vec<String>>("HKEYS tollgate:2:{delay_queue:test}:jobs"), [""; 0]);
}

/// Calls every method of the store, and reports each result to `looked`.
async fn ask_everything(backend: &RedisBackend, held: &[JobLease], looked: impl Fn(&str, Result<(), StoreError>)) {
    let (key, claim) = (key(), claim(10));
    let ids = ["high", "normal", "low", "dead"].map(JobId::new);
    for &priority in Priority::ALL {
        let mut job = NewJob::new(JobId::unique().unwrap(), *b"1");
        job.priority = priority;
        job.unique = Some(Unique { key: Key::from(priority as u8), span: UniqueFor::Time(MINUTE) });
        looked("push", backend.push(&key, &[job], 100).await.map(drop));
    }
    // The ids of a run are consecutive.
    let run = DelayQueue::<u8>::new(backend.clone(), "test").deadline(MINUTE);
    for pushed in run.push_all((0..16).map(|i| run.push(i).delay(MINUTE))).await {
        let answer = match pushed {
            Ok(_) => Ok(()),
            Err(QueueError::Store(error)) => Err(error),
            Err(error) => panic!("{error}"),
        };
        looked("push of a run", answer);
    }
    looked("extend", backend.extend(&key, held, MINUTE).await.map(drop));
    for id in &ids {
        looked("get", backend.get(&key, id).await.map(drop));
        looked("reschedule", backend.reschedule(&key, id, Due::In(MINUTE)).await.map(drop));
        looked("replace", backend.replace(&key, id, b"2").await.map(drop));
    }
    looked("cancel", backend.cancel(&key, &held[1].id, false).await.map(drop));
    looked("counts", backend.counts(&key).await.map(drop));
    for state in [State::Waiting, State::Running, State::Dead] {
        looked("list", backend.list(&key, state, 0, 10).await.map(drop));
    }
    let retry = AckKind::Retry { delay: MINUTE, error: "no".into() };
    for kind in [retry, AckKind::Done] {
        let finish = Ack::new(held[0], kind);
        looked("finish", backend.claim(&key, &[finish], &Claim::new(claim.worker, 0, MINUTE)).await.map(drop));
    }
    looked("claim", backend.claim(&key, &[], &claim).await.map(drop));
    looked("pause", backend.pause(&key, false).await);
    looked("replay", backend.replay(&key, &ids[3..]).await.map(drop));
    looked("drain", backend.purge(&key, 10, false).await.map(drop));
    looked("forget", backend.forget(&key, &ids).await.map(drop));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_value_is_an_error_and_is_left_unchanged() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let list = ("RPUSH", "x");
    let states = ["hello", "", "\u{2}234567890123456789", "\u{1}2345678901234"].map(|value| ("state", ("SET", value)));
    let parts = [
        "jobs",
        "due:high",
        "due:normal",
        "due:low",
        "leases",
        "dead",
        "unique",
        "unique_ends",
        "cancels",
        "state",
        "idle",
        "runs",
    ];
    for (part, (command, value)) in parts.map(|part| (part, list)).into_iter().chain(states) {
        server.query::<()>("FLUSHALL");
        // Jobs in every state: two running, one dead, and one waiting of each priority.
        let unique =
            |name: &str| (name == "dead").then(|| Unique { key: "user".into(), span: UniqueFor::WaitingOrRunning });
        let push = async |name: &str, priority| {
            let mut job = NewJob::new(JobId::new(name), *b"1");
            (job.priority, job.unique) = (priority, unique(name));
            assert_eq!(backend.push(&key(), &[job], 100).await.unwrap(), [Admission::New]);
        };
        let take = async || backend.claim(&key(), &[], &claim(1)).await.unwrap().jobs[0].lease();
        push("dead", Priority::Normal).await;
        let kind = AckKind::Dead { reason: Reason::Refused, error: "no".into() };
        let finish = Ack::new(take().await, kind);
        backend.claim(&key(), &[finish], &claim(0)).await.unwrap();
        let mut held = Vec::new();
        for name in ["a", "b"] {
            push(name, Priority::Normal).await;
            held.push(take().await);
        }
        for (name, priority) in ["high", "normal", "low"].into_iter().zip(Priority::ALL.iter().copied()) {
            push(name, priority).await;
        }

        let name = format!("tollgate:2:{{delay_queue:test}}:{part}");
        let mut connection = server.connection();
        let _: u64 = redis::cmd("DEL").arg(&name).query(&mut connection).unwrap();
        let _: redis::Value = redis::cmd(command).arg(&name).arg(value).query(&mut connection).unwrap();
        let dump = || {
            let mut connection = server.connection();
            let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
            keys.sort_unstable();
            let value = |key: &String| redis::cmd("DUMP").arg(key).query::<Vec<u8>>(&mut connection).unwrap();
            let values: Vec<_> = keys.iter().map(value).collect();
            keys.into_iter().zip(values).collect::<HashMap<_, _>>()
        };
        let (before, errors) = (RefCell::new(dump()), Cell::new(0));
        let looked = |verb: &str, answer: Result<(), StoreError>| {
            let now = dump();
            assert_eq!(now[&name], before.borrow()[&name], "{verb} has changed {part}");
            if let Err(error) = answer {
                assert!(error.is_foreign_data(), "{verb}: {error:?}");
                // Nor does the failed call create a key.
                if command == "SET" {
                    assert_eq!(now, *before.borrow(), "{verb}");
                }
                errors.set(errors.get() + 1);
            }
            before.replace(now);
        };
        ask_everything(&backend, &held, looked).await;
        assert!(errors.get() > 0, "no call read {part}");
        if command == "SET" {
            assert_eq!(errors.get(), 24, "all calls but pushes and extensions read the state");
        }
    }
}

/// Regression: a record with an unknown priority made every claim fail, together with the acks in the same call.
#[tokio::test]
async fn unknown_priority_does_not_block_other_jobs() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    for id in ["bad", "good", "late"] {
        queue.push(id.to_owned()).id(id).await.unwrap();
    }
    let claimed = backend.claim(&key(), &[], &claim_for(2, Claim::MIN_LEASE)).await.unwrap();
    let leases: Vec<_> = claimed.jobs.iter().map(ClaimedJob::lease).collect();
    assert_eq!(leases.iter().map(|lease| lease.id.as_str()).collect::<Vec<_>>(), ["bad", "good"]);
    let mut connection = server.connection();
    let jobs = "tollgate:2:{delay_queue:test}:jobs";
    let mut record: Vec<u8> = redis::cmd("HGET").arg(jobs).arg("bad").query(&mut connection).unwrap();
    record[13] |= 3;
    let _: u64 = redis::cmd("HSET").arg(jobs).arg("bad").arg(record).query(&mut connection).unwrap();
    // Released in the same call as a job that is done. Its lease may have ended by then.
    let finishes = [AckKind::Release, AckKind::Done].into_iter().zip(&leases);
    let finishes: Vec<_> = finishes.map(|(kind, &lease)| Ack::new(lease, kind)).collect();
    let claimed = backend.claim(&key(), &finishes, &claim(10)).await.unwrap();
    assert_eq!(claimed.finished, [Finished::Dead, Finished::Done]);
    assert_eq!(claimed.jobs.iter().map(|job| job.job.id.as_str()).collect::<Vec<_>>(), ["late"]);
    // Nor can it be replayed.
    assert_eq!(backend.replay(&key(), &[JobId::new("bad")]).await.unwrap(), [false]);
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.running, counts.dead), (0, 1, 1));
}

/// Regression: the cancellation of a record of a later version removed the record, and blocked its id for half a year.
#[tokio::test]
async fn cancellation_leaves_an_unreadable_record_alone() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    queue.push("a".to_owned()).id("a").await.unwrap();
    let mut connection = server.connection();
    let jobs = "tollgate:2:{delay_queue:test}:jobs";
    let record = |connection: &mut redis::Connection| {
        redis::cmd("HGET").arg(jobs).arg("a").query::<Vec<u8>>(connection).unwrap()
    };
    let mut newer = record(&mut connection);
    newer[0] = 2;
    let _: u64 = redis::cmd("HSET").arg(jobs).arg("a").arg(&newer).query(&mut connection).unwrap();
    let error = queue.cancel("a").await.unwrap_err();
    assert!(matches!(&error, QueueError::Store(error) if error.is_foreign_data()), "{error:?}");
    assert_eq!(record(&mut connection), newer);
    assert_eq!(server.query::<u64>("EXISTS tollgate:2:{delay_queue:test}:cancels"), 0);
    assert_eq!(server.query::<u64>("ZCARD tollgate:2:{delay_queue:test}:due:normal"), 1);
}

/// Without the leases, nothing ends the cancelled attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_leases_do_not_hold_up_an_id() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    queue.push("old".to_owned()).id("a").unique("key").await.unwrap();
    assert_eq!(backend.claim(&key(), &[], &claim(1)).await.unwrap().jobs.len(), 1);
    queue.cancel("a").await.unwrap();
    assert_eq!(server.query::<u64>("DEL tollgate:2:{delay_queue:test}:leases"), 1);
    queue.push("new".to_owned()).id("a").unique("key").await.unwrap();
    let claimed = backend.claim(&key(), &[], &claim(1)).await.unwrap();
    assert_eq!(claimed.jobs.iter().map(|job| job.job.id.as_str()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(server.query::<u64>("EXISTS tollgate:2:{delay_queue:test}:cancels"), 0);
}

/// A claim reads snoozed jobs when they are due again, so a single claim moves a bounded number of bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_snoozed_jobs_return_in_several_claims() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend).max_size(1 << 20);
    for _ in 0..8 {
        queue.push("x".repeat(400_000)).await.unwrap();
    }
    let mut leases = Vec::new();
    while leases.len() < 8 {
        leases.extend(backend.claim(&key(), &[], &claim(8)).await.unwrap().jobs.iter().map(ClaimedJob::lease));
    }
    let delay = Duration::from_millis(10);
    let finishes: Vec<_> = leases.into_iter().map(|lease| Ack::new(lease, AckKind::Snooze { delay })).collect();
    backend.claim(&key(), &finishes, &claim(0)).await.unwrap();
    sleep(2 * delay).await;
    let claimed = backend.claim(&key(), &[], &claim(1)).await.unwrap();
    assert!(claimed.more && claimed.jobs.len() == 1);
    assert_eq!(server.query::<u64>("ZCARD tollgate:2:{delay_queue:test}:snoozed"), 5);
}

/// Regression: Redis does not accept a very large index, and the backend took that error for a failing server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skip_beyond_the_last_job_returns_an_empty_page() {
    let server = RedisServer::start();
    let queue = queue(&connect(&server).await);
    // In a run, and as a single job.
    for pushed in queue.push_all((0..16).map(|i| queue.push(i.to_string()))).await {
        pushed.unwrap();
    }
    queue.push("a".to_owned()).id("a").await.unwrap();
    for skip in [u64::MAX, 1 << 63, 100_000_000_000_000_000, 1 << 53, 17] {
        for state in [State::Waiting, State::Running, State::Dead] {
            assert_eq!(queue.list(state, skip, 10).await.unwrap(), []);
        }
    }
    // The circuit is still closed.
    queue.push("b".to_owned()).await.unwrap();
}

/// Regression: each part of a split queue skipped the full number, so jobs beyond the first page of a part were never listed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn split_queue_is_listed_page_by_page() {
    const JOBS: usize = 300;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    for (limit, bytes) in [(50, 60_000), (MAX_BATCH, 60_000), (7, 10)] {
        let queue = DelayQueue::<String>::new(backend.clone(), ("pages", limit)).split(3).deadline(MINUTE);
        let payload = "x".repeat(bytes);
        let pushed = queue.push_all((0..JOBS).map(|_| queue.push(payload.clone()))).await;
        let all: HashSet<_> = pushed.into_iter().map(|pushed| *pushed.unwrap().id()).collect();
        let (mut seen, mut skip) = (HashSet::new(), 0);
        loop {
            let page = queue.list(State::Waiting, skip, limit).await.unwrap();
            assert!(page.len() <= limit);
            if page.is_empty() {
                break;
            }
            skip += page.len() as u64;
            for job in page {
                assert!(seen.insert(job.id), "twice");
            }
        }
        assert_eq!((seen.len(), seen == all), (JOBS, true));
        queue.purge().await.unwrap();
    }
}

/// Moves the waiting jobs, at most `jobs`, to the dead jobs.
async fn kill(backend: &RedisBackend, jobs: usize) {
    let claim = claim(MAX_BATCH);
    let mut finishes = Vec::new();
    for _ in 0..jobs {
        let claimed = backend.claim(&key(), &finishes, &claim).await.unwrap();
        let dead = || AckKind::Dead { reason: Reason::Refused, error: "no".into() };
        finishes = claimed.jobs.iter().map(|job| Ack::new(job.lease(), dead())).collect();
        if finishes.is_empty() {
            break;
        }
    }
}

/// Regression: one script replayed 256 jobs of any size, which blocked the server for longer than the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_jobs_are_replayed_by_id_in_short_scripts() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend).max_jobs(1_000);
    // With its quotation marks, the payload has the largest size allowed.
    let payload = "x".repeat(64 * 1_024 - 2);
    let ids: Vec<_> = (0..MAX_BATCH).map(|i| JobId::new(format!("job-{i}"))).collect();
    let pushed = queue.push_all(ids.iter().map(|id| queue.push(payload.clone()).id(*id))).await;
    assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)));
    kill(&backend, MAX_BATCH).await;
    assert_eq!(queue.counts().await.unwrap().dead, MAX_BATCH as u64);
    let (before, _) = scripts(&server);
    assert_eq!(queue.replay_ids(ids.clone()).await.unwrap(), [true; MAX_BATCH]);
    let calls = scripts(&server).0 - before;
    assert!((16..=20).contains(&calls), "{calls} scripts");
    assert_eq!(queue.counts().await.unwrap().waiting, MAX_BATCH as u64);
    // The scripts only read dead jobs that they replay.
    let (before, _) = scripts(&server);
    assert_eq!(queue.replay_ids(ids.clone()).await.unwrap(), [false; MAX_BATCH]);
    assert_eq!(scripts(&server).0 - before, 1);
    kill(&backend, MAX_BATCH).await;
    let (before, _) = scripts(&server);
    assert_eq!(queue.forget_ids(ids).await.unwrap(), [true; MAX_BATCH]);
    assert_eq!(scripts(&server).0 - before, 1);
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.dead), (0, 0));
    assert_eq!(server.query::<u64>("EXISTS tollgate:2:{delay_queue:test}:jobs"), 0, "records are left");
}

/// A page of large jobs is shorter, but is not taken for the last page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_dead_jobs_are_all_replayed() {
    const JOBS: usize = 200;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend).max_jobs(1_000);
    let payload = "x".repeat(20_000);
    let pushed = queue.push_all((0..JOBS).map(|_| queue.push(payload.clone()))).await;
    assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)));
    kill(&backend, JOBS).await;
    assert_eq!(queue.counts().await.unwrap().dead, JOBS as u64);
    assert!(queue.dead(0, JOBS).await.unwrap().len() < JOBS, "the size of a page is bounded");
    assert_eq!(queue.replay(50, |_| true).await.unwrap(), 50);
    assert_eq!(queue.forget(usize::MAX, |_| true).await.unwrap(), JOBS - 50);
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.dead), (50, 0));
}

/// Records may be evicted or deleted by others. Each call then removes a bounded number of ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_without_records_are_removed_in_bounded_steps() {
    const JOBS: u64 = 5_000;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    for _ in 0..JOBS / 1_000 {
        queue.push_all((0..1_000).map(|i| queue.push(i.to_string()))).await;
    }
    server.query::<()>("DEL tollgate:2:{delay_queue:test}:jobs");
    let claimed = backend.claim(&key(), &[], &claim(MAX_BATCH)).await.unwrap();
    assert_eq!((claimed.jobs.len(), claimed.more), (0, true));
    let left = queue.counts().await.unwrap().waiting;
    assert!((JOBS - 1_000..JOBS).contains(&left), "{left}");
    assert!(queue.list(State::Waiting, 0, 10).await.unwrap().is_empty());
    let looked_at = left - queue.counts().await.unwrap().waiting;
    assert!((1..=2_000).contains(&looked_at), "{looked_at}");
    queue.push("whole".to_owned()).await.unwrap();
    let mut calls = 0;
    let found = loop {
        calls += 1;
        let claimed = backend.claim(&key(), &[], &claim(MAX_BATCH)).await.unwrap();
        if !claimed.more {
            break claimed.jobs.len();
        }
    };
    assert!((5..50).contains(&calls), "{calls}");
    assert_eq!(found, 1);
}

/// A failure takes the server longer than a completion, so each script stores fewer of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_failures_are_stored_in_several_scripts() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    let pushed = queue.push_all((0..MAX_BATCH).map(|i| queue.push(i.to_string()))).await;
    assert!(pushed.iter().all(|pushed| pushed.as_ref().is_ok_and(Pushed::is_new)));
    let claim = claim(MAX_BATCH);
    let jobs = backend.claim(&key(), &[], &claim).await.unwrap().jobs;
    assert_eq!(jobs.len(), MAX_BATCH);
    let error: Arc<str> = "e".repeat(MAX_ERROR_LEN).into();
    let mut finishes: Vec<_> = jobs
        .iter()
        .map(|job| {
            let kind = AckKind::Retry { delay: MINUTE, error: Arc::clone(&error) };
            Ack::new(job.lease(), kind)
        })
        .collect();
    // The first and the last job are done.
    finishes[0].kind = AckKind::Done;
    finishes[MAX_BATCH - 1].kind = AckKind::Done;
    let (before, _) = scripts(&server);
    let answer = backend.claim(&key(), &finishes, &claim).await.unwrap();
    assert_eq!(answer.finished, [Finished::Done; MAX_BATCH]);
    assert_eq!(scripts(&server).0 - before, 4);
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.running), (MAX_BATCH as u64 - 2, 0));
}

/// Acks free memory, so Redis must not refuse them for lack of memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acks_work_while_redis_is_out_of_memory() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    for id in ["a", "b"] {
        queue.push(id.to_owned()).id(id).await.unwrap();
    }
    let claim = claim(10);
    let jobs = backend.claim(&key(), &[], &claim).await.unwrap().jobs;
    server.limit_memory(1);
    let refused = queue.push("c".to_owned()).await.unwrap_err();
    assert!(matches!(&refused, QueueError::Store(error) if error.is_out_of_memory()), "{refused:?}");
    let endings = [AckKind::Done, AckKind::Snooze { delay: MINUTE }];
    let finishes: Vec<_> = jobs.iter().zip(endings).map(|(job, kind)| Ack::new(job.lease(), kind)).collect();
    for finish in finishes {
        let answer = backend.claim(&key(), &[finish], &Claim::new(claim.worker, 0, MINUTE)).await.unwrap();
        assert_eq!(answer.finished, [Finished::Done]);
    }
    let counts = queue.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.running), (1, 0));
}

#[tokio::test]
async fn renewals_work_while_redis_is_out_of_memory() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    queue(&backend).push("a".to_owned()).await.unwrap();
    let jobs = backend.claim(&key(), &[], &claim(1)).await.unwrap().jobs;
    server.limit_memory(1);
    assert_eq!(backend.extend(&key(), &[jobs[0].lease()], MINUTE * 2).await.unwrap(), [Extended::Held]);
    let ends: u64 =
        server.query::<Vec<(Vec<u8>, u64)>>("ZRANGE tollgate:2:{delay_queue:test}:leases 0 -1 WITHSCORES")[0].1;
    let (seconds, _): (u64, u64) = server.query("TIME");
    assert!(ends > seconds * 1_000 + 90_000);
}

#[tokio::test]
async fn jobs_pushed_after_an_eviction_expire() {
    let server = RedisServer::start();
    let queue = queue(&connect(&server).await);
    queue.push("a".to_owned()).delay(MINUTE * 60).await.unwrap();
    server.query::<()>("UNLINK tollgate:2:{delay_queue:test}:jobs");
    queue.push("b".to_owned()).await.unwrap();
    server.every_key_expires();
}

/// Regression: a paused queue whose jobs had filled the memory could not be resumed, so the memory stayed full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_is_administered_while_redis_is_out_of_memory() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    queue.push("running".to_owned()).id("running").await.unwrap();
    let running = backend.claim(&key(), &[], &claim(1)).await.unwrap().jobs.remove(0).lease();
    let keeper = claim(4);
    let _wakeups = backend.watch(&key(), keeper.worker).await;
    let channels = || server.query::<Vec<String>>("PUBSUB CHANNELS").len();
    block_in_place(|| support::server::wait_until("the timekeeper listens", || channels() == 1));
    assert!(backend.claim(&key(), &[], &keeper).await.unwrap().jobs.is_empty());
    queue.pause().await.unwrap();
    for id in ["a", "b"] {
        queue.push(id.to_owned()).id(id).delay(MINUTE).await.unwrap();
    }
    server.limit_memory(1);
    queue.resume().await.unwrap();
    assert!(!queue.counts().await.unwrap().is_paused);
    assert_eq!(queue.promote("a").await.unwrap(), Changed::Done);
    let jobs = backend.claim(&key(), &[], &keeper).await.unwrap().jobs;
    assert_eq!(jobs.len(), 1);
    let finish = Ack::new(jobs[0].lease(), AckKind::Done);
    assert_eq!(backend.claim(&key(), &[finish], &keeper).await.unwrap().finished, [Finished::Done]);
    queue.pause().await.unwrap();
    assert!(queue.counts().await.unwrap().is_paused);
    assert_eq!(queue.reschedule("b", MINUTE * 2).await.unwrap(), Changed::Done);
    assert_eq!(queue.cancel("running").await.unwrap(), Cancelled::Notified);
    assert_eq!(backend.extend(&key(), &[running], MINUTE).await.unwrap(), [Extended::Cancelled]);
    for key in ["due:normal", "cancels", "state"] {
        assert!(server.query::<i64>(&format!("PTTL tollgate:2:{{delay_queue:test}}:{key}")) > 0, "{key} expires");
    }
}

/// A push in a transaction of the caller takes effect with that transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn push_is_part_of_the_pipeline_of_the_caller() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    let push = || queue.push("order 42".to_owned()).id("order:42").prepare().unwrap();
    let mut pipeline = redis::pipe();
    pipeline.atomic().set("order:42", "unpaid").ignore();
    backend.push_in(&mut pipeline, &push());
    backend.push_in(&mut pipeline, &push());
    assert_eq!(queue.counts().await.unwrap().waiting, 0);
    let answers: Vec<Vec<String>> = block_in_place(|| pipeline.query(&mut server.connection()).unwrap());
    assert_eq!(answers, [["1"], ["0"]]);
    let job = queue.get("order:42").await.unwrap().unwrap();
    assert_eq!((job.state, queue.decode(&job).unwrap().as_str()), (State::Waiting, "order 42"));
}

/// Of a hundred waiting workers, a push wakes one. If that worker has no capacity for more jobs, the next worker is woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_push_wakes_one_worker() {
    const WORKERS: usize = 100;
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    let mut waiting = Vec::new();
    for _ in 0..WORKERS {
        let claim = claim(1);
        let wakeups = backend.watch(&key(), claim.worker).await;
        let claimed = backend.claim(&key(), &[], &claim).await.unwrap();
        assert_eq!((claimed.jobs.len(), claimed.next), (0, Some(Claim::MAX_WAIT)));
        waiting.push((claim, wakeups));
    }
    // Waits for `at_least` messages, and then until no message has arrived for a while.
    let woken = async |waiting: &mut Vec<(Claim, tollgate::lock::store::Notifications)>, at_least: usize| {
        let (since, mut woken, mut last) = (Instant::now(), Vec::new(), Instant::now());
        while last.elapsed() < Duration::from_millis(200) || woken.len() < at_least {
            assert!(since.elapsed() < Duration::from_secs(10), "{woken:?} were woken");
            for (i, (_, wakeups)) in waiting.iter_mut().enumerate() {
                if timeout(Duration::ZERO, wakeups.next()).await.is_ok() {
                    woken.push(i);
                    last = Instant::now();
                }
            }
            sleep(Duration::from_millis(5)).await;
        }
        woken
    };
    // Skip the confirmations of the subscriptions.
    let channels = || server.query::<Vec<String>>("PUBSUB CHANNELS").len();
    block_in_place(|| support::server::wait_until("all workers listen", || channels() >= WORKERS));
    woken(&mut waiting, 0).await;
    let pushed = Instant::now();
    queue.push("a".to_owned()).await.unwrap();
    let first = woken(&mut waiting, 1).await;
    assert_eq!(first.len(), 1, "{first:?}");
    // No other worker is woken before the first one claims, unless that takes so long that it may have died.
    let many = queue.push_all((0..10).map(|i| queue.push(i.to_string()))).await;
    assert!(many.iter().all(Result::is_ok));
    let others = woken(&mut waiting, 0).await;
    assert!(others.is_empty() || pushed.elapsed() > Duration::from_secs(1), "{others:?}");
    let claimed = backend.claim(&key(), &[], &waiting[first[0]].0).await.unwrap();
    assert!(claimed.jobs.len() == 1 && claimed.more);
    let second = woken(&mut waiting, 1).await;
    assert!(second.len() == 1 && second != first, "{second:?}");
}

/// Workers wait longer for the store than requests do. Regression: a claim that took the server more than half a second was abandoned, and
/// its jobs stayed idle for a whole lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_claim_reply_is_not_discarded() {
    let server = RedisServer::start();
    let backend = RedisBackend::connect(server.url()).await.unwrap();
    let queue = queue(&backend);
    // Caches the script, so that the server runs it even if the worker has stopped waiting.
    backend.claim(&key(), &[], &claim(1)).await.unwrap();
    let (done, mut attempts) = mpsc::unbounded_channel();
    let service = service_fn(move |job: Job<String>| {
        done.send(job.attempt()).unwrap();
        ready(Ok::<_, BoxError>(()))
    });
    queue.push("a".to_owned()).await.unwrap();
    server.pause_clients(Duration::from_millis(1_000));
    let worker = DelayQueueWorker::new(queue, service).lease(Duration::from_secs(30));
    let worker = tokio::spawn(worker.run());
    let attempt = timeout(Duration::from_secs(3), attempts.recv()).await;
    assert_eq!(attempt, Ok(Some(1)));
    worker.abort();
}

/// The network may forget the connections of a worker and swallow their traffic. One lost claim makes the worker replace all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_replaces_all_connections_after_a_lost_claim() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let (done, mut finished) = mpsc::unbounded_channel();
    let service = service_fn(move |job: Job<String>| {
        done.send(job.to_string()).unwrap();
        ready(Ok::<_, BoxError>(()))
    });
    let there = queue(&RedisBackend::connect(proxy.url()).await.unwrap());
    // A store call may take a third of the lease.
    let worker = tokio::spawn(DelayQueueWorker::new(there, service).lease(Duration::from_secs(6)).run());
    let here = queue(&connect(&server).await);
    here.push("before".to_owned()).await.unwrap();
    assert_eq!(finished.recv().await.as_deref(), Some("before"));
    proxy.to_server(Traffic::Swallow);
    sleep(Duration::from_millis(100)).await;
    // New connections work from now on.
    proxy.heal();
    here.push("after".to_owned()).await.unwrap();
    // Messages from the server still arrive, so the worker is woken. It loses one claim of 2 s, and not one for each connection.
    let after = timeout(Duration::from_secs(6), finished.recv()).await;
    assert_eq!(after.unwrap().as_deref(), Some("after"));
    worker.abort();
}

/// During shutdown, a worker retries over another connection. Regression: the last call used up the time for all calls, and its acks were
/// lost without a log message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn final_acks_survive_lost_replies() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let (started, mut running) = mpsc::unbounded_channel();
    let (end, may_end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let is_over = Arc::clone(&may_end);
    let service = service_fn(move |_: Job<String>| {
        started.send(()).unwrap();
        let is_over = Arc::clone(&is_over);
        async move {
            is_over.notified().await;
            Ok::<_, BoxError>(())
        }
    });
    let there = RedisOptions::from_url(proxy.url()).unwrap().connections(2).connect().await.unwrap();
    let worker = DelayQueueWorker::new(queue(&there), service).lease(Duration::from_secs(30));
    let kind = Arc::clone(&end);
    let worker = tokio::spawn(worker.run_until(async move { kind.notified().await }));
    let here = queue(&connect(&server).await);
    here.push("a".to_owned()).await.unwrap();
    running.recv().await.unwrap();
    end.notify_one();
    sleep(Duration::from_millis(100)).await;
    proxy.to_server(Traffic::Swallow);
    sleep(Duration::from_millis(100)).await;
    // New connections work from now on.
    proxy.heal();
    may_end.notify_one();
    worker.await.unwrap().unwrap();
    let counts = here.counts().await.unwrap();
    assert_eq!((counts.waiting, counts.running, counts.dead), (0, 0, 0));
}

/// A postponed job keeps its unique key for as long as it waits, which may be longer than expected when it was pushed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unique_key_lasts_as_long_as_its_job() {
    const YEAR: Duration = Duration::from_secs(366 * 86_400);
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    let days = |key: &str| server.query::<u64>(&format!("TTL tollgate:2:{{delay_queue:test}}:{key}")) / 86_400;
    queue.push("a".to_owned()).id("a").unique("a").await.unwrap();
    assert!(days("unique") < 200);
    queue.reschedule("a", YEAR).await.unwrap();
    assert!(days("unique") >= 366, "{} days", days("unique"));
    queue.promote("a").await.unwrap();
    let (retry, snooze) = (AckKind::Retry { delay: 2 * YEAR, error: "".into() }, AckKind::Snooze { delay: 4 * YEAR });
    for (kind, least) in [(retry, 2 * 366), (snooze, 4 * 366)] {
        let claimed = backend.claim(&key(), &[], &claim(1)).await.unwrap();
        let finish = Ack::new(claimed.jobs[0].lease(), kind);
        backend.claim(&key(), &[finish], &claim(0)).await.unwrap();
        assert!(days("unique") >= least, "{} days", days("unique"));
        queue.promote("a").await.unwrap();
    }
}

/// Regression: a pause ended after 180 days, and jobs with a later due time ran without notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pause_lasts_as_long_as_the_jobs_it_holds_back() {
    const YEAR: Duration = Duration::from_secs(366 * 86_400);
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    let days = |key: &str| server.query::<u64>(&format!("TTL tollgate:2:{{delay_queue:test}}:{key}")) / 86_400;
    queue.push("running".to_owned()).await.unwrap();
    let claimed = backend.claim(&key(), &[], &claim(1)).await.unwrap();
    queue.pause().await.unwrap();
    queue.push("waiting".to_owned()).delay(YEAR).await.unwrap();
    assert!(days("state") + 1 >= days("due:normal"), "{} of {} days", days("state"), days("due:normal"));
    let finish = Ack::new(claimed.jobs[0].lease(), AckKind::Snooze { delay: 2 * YEAR });
    backend.claim(&key(), &[finish], &claim(0)).await.unwrap();
    assert!(days("snoozed") > 2 * 366);
    assert!(days("state") + 1 >= days("snoozed"), "{} of {} days", days("state"), days("snoozed"));
}

/// A push does not rely on a worker that has died.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn push_wakes_another_worker_if_the_timekeeper_is_gone() {
    let server = RedisServer::start();
    let (doomed, backend) = (connect(&server).await, connect(&server).await);
    let keeper = claim(1);
    let wakeups = doomed.watch(&key(), keeper.worker).await;
    doomed.claim(&key(), &[], &keeper).await.unwrap();
    let other = claim(1);
    let mut others = backend.watch(&key(), other.worker).await;
    backend.claim(&key(), &[], &other).await.unwrap();
    drop((wakeups, doomed));
    let channels = || server.query::<Vec<String>>("PUBSUB CHANNELS").len();
    block_in_place(|| support::server::wait_until("the timekeeper is gone", || channels() == 1));
    while timeout(Duration::from_millis(20), others.next()).await.is_ok() {}
    queue(&backend).push("a".to_owned()).await.unwrap();
    timeout(Duration::from_secs(4), others.next()).await.expect("the other worker is woken");
}

/// The first waiting worker is the timekeeper, and dies. Returns how many ms later another worker takes its job. The time counts from the
/// end of the lease of the first worker, or from the due time if the job has a delay.
async fn late_after_a_kill(server: &RedisServer, number: u64, lease: Duration, delay: Option<Duration>) -> f64 {
    let (doomed, backend) = (connect(server).await, connect(server).await);
    let queue = |backend: &RedisBackend| {
        DelayQueue::<String>::new(backend.clone(), number.to_string()).deadline(Duration::from_secs(10))
    };
    let service = service_fn(|_: Job<String>| pending::<Result<(), BoxError>>());
    let victim = tokio::spawn(DelayQueueWorker::new(queue(&doomed), service).lease(lease).run());
    queue(&doomed).push("a".to_owned()).delay(delay.unwrap_or_default()).await.unwrap();
    while delay.is_none() && queue(&backend).counts().await.unwrap().running == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    // The victim waits for more jobs, and is the timekeeper.
    sleep(Duration::from_millis(200)).await;
    let (taken, mut is_taken) = mpsc::unbounded_channel();
    let service = service_fn(move |_: Job<String>| {
        taken.send(SystemTime::now()).unwrap();
        ready(Ok::<_, BoxError>(()))
    });
    let peer = tokio::spawn(DelayQueueWorker::new(queue(&backend), service).lease(lease).run());
    sleep(Duration::from_millis(500 + 700 * number)).await;
    victim.abort();
    drop(doomed);
    sleep(Duration::from_millis(100)).await;
    let times = if delay.is_some() { "due:normal" } else { "leases" };
    let times = format!("tollgate:2:{{delay_queue:{number}}}:{times}");
    let times: Vec<(Vec<u8>, f64)> = block_in_place(|| {
        let mut range = redis::cmd("ZRANGE");
        range.arg(times).arg(0).arg(-1).arg("WITHSCORES").query(&mut server.connection()).unwrap()
    });
    assert_eq!(times.len(), 1);
    let taken = timeout(Duration::from_secs(15), is_taken.recv()).await.unwrap().unwrap();
    peer.abort();
    taken.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64() * 1e3 - times[0].1
}

/// The other worker was to claim again only five seconds later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_of_a_killed_worker_is_claimed_when_its_lease_ends() {
    let server = RedisServer::start();
    let late = |number| late_after_a_kill(&server, number, Duration::from_secs(5), None);
    for late in join_all((0..4).map(late)).await {
        assert!((-1.0..500.0).contains(&late), "late by {late} ms");
    }
}

/// The same holds for a job that no worker has started.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_job_is_on_time_although_the_timekeeper_dies() {
    let server = RedisServer::start();
    let late = |number| late_after_a_kill(&server, number, MINUTE, Some(Duration::from_secs(6)));
    for late in join_all((0..4).map(late)).await {
        assert!((-1.0..500.0).contains(&late), "late by {late} ms");
    }
}

/// If leases are renewed, idle workers claim about as often as without running jobs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_workers_claim_no_more_often_beside_running_jobs() {
    const WORKERS: usize = 16;
    const WATCHED: Duration = Duration::from_secs(12);
    let server = RedisServer::start();
    // How often the workers claim beside a job with `lease`, at the intervals that the store sets.
    let looks = async |lease: Option<Duration>| {
        let backend = connect(&server).await;
        let queue = QueueKey::new(format!("{lease:?}"));
        let keeper = claim_for(10, lease.unwrap_or(MINUTE));
        if lease.is_some() {
            backend.push(&queue, &[NewJob::new(JobId::from("a"), *b"")], 10).await.unwrap();
        }
        let claimed = backend.claim(&queue, &[], &keeper).await.unwrap();
        let held: Vec<_> = claimed.jobs.iter().map(ClaimedJob::lease).collect();
        assert_eq!(held.len(), usize::from(lease.is_some()));
        let mut workers = JoinSet::new();
        let since = Instant::now();
        for _ in 0..WORKERS {
            let (backend, claim) = (backend.clone(), claim(1));
            workers.spawn(async move {
                let mut looks = 0;
                while since.elapsed() < WATCHED {
                    let claimed = backend.claim(&queue, &[], &claim).await.unwrap();
                    assert!(claimed.jobs.is_empty());
                    (looks, _) = (looks + 1, sleep(claimed.next.unwrap()).await);
                }
                looks
            });
        }
        while since.elapsed() < WATCHED {
            backend.extend(&queue, &held, keeper.lease).await.unwrap();
            // Meanwhile this worker is the timekeeper.
            backend.claim(&queue, &[], &keeper).await.unwrap();
            sleep(Duration::from_secs(5) / 3).await;
        }
        workers.join_all().await.into_iter().sum::<usize>()
    };
    let (none, long, short) = tokio::join!(looks(None), looks(Some(MINUTE)), looks(Some(Duration::from_secs(5))));
    // A few workers claim once more, because a lease ends within their wait.
    assert!(long <= none + 1 && short <= none + WORKERS, "{none}, {long} and {short} claims");
}

/// The worker that was the timekeeper has no capacity left, so there is no timekeeper.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn push_wakes_an_idle_worker_if_the_timekeeper_is_busy() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let (busy, idle) = (claim(1), claim(1));
    let mut wakeups = Vec::new();
    for claim in [&busy, &idle] {
        wakeups.push(backend.watch(&key(), claim.worker).await);
        assert!(backend.claim(&key(), &[], claim).await.unwrap().jobs.is_empty());
    }
    queue(&backend).push("a".to_owned()).await.unwrap();
    assert_eq!(backend.claim(&key(), &[], &busy).await.unwrap().jobs.len(), 1);
    let idle_wakeups = &mut wakeups[1];
    while timeout(Duration::from_millis(100), idle_wakeups.next()).await.is_ok() {}
    queue(&backend).push("b".to_owned()).await.unwrap();
    timeout(Duration::from_secs(4), idle_wakeups.next()).await.expect("the idle worker is woken");
}

/// Jobs may be what fills the memory, so claims must still work then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_workers_claim_while_redis_is_out_of_memory() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    queue(&backend).push("a".to_owned()).delay(Duration::from_secs(2)).await.unwrap();
    let (keeper, other, third) = (claim(4), claim(4), claim(4));
    for claim in [&keeper, &other] {
        assert!(backend.claim(&key(), &[], claim).await.unwrap().jobs.is_empty());
    }
    server.limit_memory(1);
    // The timekeeper leaves, another worker takes over, and others wait, also a worker that has not claimed before.
    let leaves = Claim::new(keeper.worker, 0, MINUTE);
    for claim in [&leaves, &other, &third, &keeper, &third] {
        assert!(backend.claim(&key(), &[], claim).await.unwrap().jobs.is_empty());
    }
    sleep(Duration::from_secs(2)).await;
    assert_eq!(backend.claim(&key(), &[], &other).await.unwrap().jobs.len(), 1);
}

/// For the same job, and for another one.
#[tokio::test]
async fn clock_set_back_does_not_lower_a_fence() {
    let server = RedisServer::start();
    let backend = connect(&server).await;
    let queue = queue(&backend);
    queue.push("a".to_owned()).id("a").await.unwrap();
    let first = backend.claim(&key(), &[], &claim(1)).await.unwrap().jobs.remove(0);
    let state = "tollgate:2:{delay_queue:test}:state";
    let mut value: Vec<u8> = server.query(&format!("GET {state}"));
    // As if a clock that is an hour ahead had written the state.
    let last_fence = first.token + 3_600_000_000;
    value[2..9].copy_from_slice(&last_fence.to_le_bytes()[..7]);
    let mut set = redis::cmd("SET");
    let _: () = set.arg(state).arg(value).arg("KEEPTTL").query(&mut server.connection()).unwrap();

    queue.push("b".to_owned()).id("b").await.unwrap();
    let finish = Ack::new(first.lease(), AckKind::Retry { delay: Duration::ZERO, error: "no".into() });
    let claimed = backend.claim(&key(), &[finish], &claim(2)).await.unwrap();
    assert_eq!(claimed.finished, [Finished::Done]);
    let (since, mut jobs) = (Instant::now(), claimed.jobs);
    while jobs.len() < 2 {
        assert!(since.elapsed() < MINUTE, "both jobs are due");
        jobs.extend(backend.claim(&key(), &[], &claim(2)).await.unwrap().jobs);
    }
    for job in jobs {
        assert!(job.token > last_fence, "{} has {} after {last_fence}", job.job.id, job.token);
    }
}

/// A primary, its replica, and a proxy that leads to the current primary.
struct Failover {
    primary: RedisServer,
    replica: RedisServer,
    line: Proxy,
    address: Proxy,
}

impl Failover {
    fn start() -> Self {
        let hurry = "--repl-diskless-sync yes --repl-diskless-sync-delay 0 --repl-ping-replica-period 1";
        let primary = RedisServer::start_with(&hurry.split(' ').collect::<Vec<_>>());
        let (line, address) = (Proxy::start(primary.port()), Proxy::start(primary.port()));
        let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &line.port().to_string()]);
        Self { primary, replica, line, address }
    }

    fn is_followed(&self) {
        wait_until("the replica is up to date", || self.primary.is_followed_by(1));
    }

    /// Holds back all further replication traffic.
    fn falls_behind(&self) {
        self.line.to_client(Traffic::Hold);
    }

    /// Kills the primary and promotes the replica.
    fn fail_over(&mut self) {
        self.primary.kill();
        self.line.reset();
        self.replica.query::<()>("REPLICAOF NO ONE");
        let leases: u64 = self.replica.query("EXISTS tollgate:2:{delay_queue:test}:leases");
        assert_eq!(leases, 0, "the replica has no claims");
        self.address.lead_to(self.replica.port());
        self.address.cut();
    }
}

/// Claims until the store replies and, unless the limit is 0, returns a job.
async fn claim_again(backend: &RedisBackend, finished: &[Ack], claim: &Claim) -> (Vec<Finished>, Vec<ClaimedJob>) {
    let claims = async {
        loop {
            match backend.claim(&key(), finished, claim).await {
                Ok(claimed) if claim.limit == 0 || !claimed.jobs.is_empty() => return (claimed.finished, claimed.jobs),
                // The connections have just been cut.
                _ => sleep(Duration::from_millis(5)).await,
            }
        }
    };
    timeout(MINUTE, claims).await.expect("the store replies")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn previous_holder_cannot_ack_a_job_after_a_failover() {
    let mut deployment = block_in_place(Failover::start);
    let options = RedisOptions::from_url(deployment.address.url()).unwrap().response_timeout(Duration::from_secs(10));
    let backend = options.connect().await.unwrap();
    queue(&backend).push("a".to_owned()).await.unwrap();
    block_in_place(|| deployment.is_followed());
    deployment.falls_behind();
    let (_, first) = claim_again(&backend, &[], &claim(1)).await;
    block_in_place(|| deployment.fail_over());

    let done = |job: &ClaimedJob| [Ack::new(job.lease(), AckKind::Done)];
    // Neither while the job waits, nor while another worker holds it.
    assert_eq!(claim_again(&backend, &done(&first[0]), &claim(0)).await.0, [Finished::Lost]);
    assert_eq!(backend.extend(&key(), &[first[0].lease()], MINUTE).await.unwrap(), [Extended::Lost]);
    let (_, second) = claim_again(&backend, &[], &claim(1)).await;
    assert_eq!(second[0].job.id, first[0].job.id);
    assert!(second[0].token > first[0].token, "{} after {}", second[0].token, first[0].token);
    assert_eq!(claim_again(&backend, &done(&first[0]), &claim(0)).await.0, [Finished::Lost]);
    assert_eq!(backend.extend(&key(), &[first[0].lease()], MINUTE).await.unwrap(), [Extended::Lost]);
    assert_eq!(claim_again(&backend, &done(&second[0]), &claim(0)).await.0, [Finished::Done]);
    let counts = queue(&backend).counts().await.unwrap();
    assert_eq!((counts.waiting, counts.running, counts.dead), (0, 0, 0));
}

/// The worker cancels the attempt that the failover lost, and does not store its result. That holds even if the attempt ends while the
/// store is down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_returned_by_a_failover_runs_with_a_larger_fence() {
    for (ends_early, lease) in [(false, Duration::from_secs(3)), (true, Duration::from_secs(30))] {
        let mut deployment = block_in_place(Failover::start);
        let queue = queue(&RedisBackend::connect(deployment.address.url()).await.unwrap());
        queue.push("a".to_owned()).await.unwrap();
        block_in_place(|| deployment.is_followed());
        deployment.falls_behind();
        let (run, mut runs) = mpsc::unbounded_channel();
        let (end, is_over) = tokio::sync::oneshot::channel::<()>();
        let mut is_over = Some(is_over);
        let service = service_fn(move |job: Job<String>| {
            run.send(job.fence()).unwrap();
            let (mut cancellation, is_over) = (job.cancellation(), is_over.take());
            async move {
                if let Some(is_over) = is_over {
                    tokio::select! {
                        () = cancellation.cancelled() => {}
                        Ok(()) = is_over => {}
                    }
                }
                Ok::<_, BoxError>(())
            }
        });
        let worker = DelayQueueWorker::one_by_one(queue.clone(), service).lease(lease);
        let mut events = worker.events();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let worker = tokio::spawn(worker.run_until(async {
            let _ = stopped.await;
        }));
        let first = runs.recv().await.unwrap();
        if ends_early {
            block_in_place(|| deployment.primary.kill());
            end.send(()).unwrap();
            let fails = async { while !matches!(events.next().await, Some(Event::StoreFailed { .. })) {} };
            timeout(MINUTE, fails).await.expect("the store fails");
        }
        block_in_place(|| deployment.fail_over());
        let second = timeout(MINUTE, runs.recv()).await.expect("the job runs again").unwrap();
        assert!(second > first, "{second} after {first}");
        let mut ends = HashMap::new();
        let both = async {
            while ends.values().sum::<u32>() < 2 {
                match events.next().await {
                    Some(Event::Done { .. }) => *ends.entry("done").or_default() += 1,
                    Some(Event::LeaseLost { .. }) => *ends.entry("lost").or_default() += 1,
                    Some(Event::Started { .. } | Event::StoreFailed { .. } | Event::StoreWorks) => {}
                    event => panic!("{event:?}"),
                }
            }
        };
        timeout(MINUTE, both).await.expect("both attempts end");
        assert_eq!(ends, HashMap::from([("done", 1), ("lost", 1)]));
        stop.send(()).unwrap();
        worker.await.unwrap().unwrap();
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.waiting, counts.running, counts.dead), (0, 0, 0));
    }
}

/// The documented ACL rules are enough for everything that a queue does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_acl_is_sufficient_for_delay_queues() {
    let server = RedisServer::start();
    let docs = include_str!("../../src/backend/redis/mod.rs");
    let line = |start: &str| {
        let rule =
            docs.lines().find_map(|line| line.split_once(start)).unwrap_or_else(|| panic!("{start} is in the docs")).1;
        rule.split('`').next().unwrap().trim().to_owned()
    };
    server.query::<()>(&format!("ACL SETUSER tollgate {}", line("ACL SETUSER tollgate ")));
    server.query::<()>(&format!("ACL SETUSER tollgate {}", line("Delay queues: `")));
    let url = server.url().replace("://", "://tollgate:password@");
    let backend = RedisOptions::from_url(url).unwrap().connect().await.unwrap();
    let queue = queue(&backend);
    let worker = claim(10);
    let mut wakeups = backend.watch(&key(), worker.worker).await;
    backend.claim(&key(), &[], &worker).await.unwrap();
    while timeout(Duration::from_millis(20), wakeups.next()).await.is_ok() {}
    for id in ["a", "b", "c"] {
        queue.push(id.to_owned()).id(id).unique(id).max_attempts(1).await.unwrap();
    }
    timeout(Duration::from_secs(4), wakeups.next()).await.expect("the user may publish and subscribe");
    assert_eq!(queue.reschedule("a", MINUTE).await.unwrap(), Changed::Done);
    assert_eq!(queue.promote("a").await.unwrap(), Changed::Done);
    let jobs = backend.claim(&key(), &[], &worker).await.unwrap().jobs;
    queue.cancel("a").await.unwrap();
    backend.extend(&key(), &[jobs[0].lease()], MINUTE).await.unwrap();
    let finish = |job: &ClaimedJob| Ack::new(job.lease(), AckKind::Retry { delay: Duration::ZERO, error: "no".into() });
    let finishes: Vec<_> = jobs.iter().map(finish).collect();
    let mut few = worker;
    few.dead = DeadLimits::new(1, MINUTE);
    backend.claim(&key(), &finishes, &few).await.unwrap();
    queue.pause().await.unwrap();
    queue.resume().await.unwrap();
    assert_eq!(queue.dead(0, 10).await.unwrap().len(), 1);
    assert_eq!(queue.replay(10, |_| true).await.unwrap(), 1);
    assert_eq!(queue.purge().await.unwrap(), 1);
    assert_eq!(queue.counts().await.unwrap().waiting, 0);
    queue.push("d".to_owned()).id("d").await.unwrap();
    assert_eq!(backend.claim(&key(), &[], &worker).await.unwrap().jobs.len(), 1);
    queue.cancel("d").await.unwrap();
    assert_eq!(server.query::<u64>("DEL tollgate:2:{delay_queue:test}:leases"), 1);
    backend.claim(&key(), &[], &worker).await.unwrap();
}
