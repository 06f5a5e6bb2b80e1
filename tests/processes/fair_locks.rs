//! Processes that want one fair lock on one Redis. Some of them are killed while they wait for it or hold it, some are stopped for a
//! moment, and some of their waiters give up.
//!
//! The program starts itself again as the workers. A worker prints each of its grants: the fence, when the lock was first requested, and
//! when the reply arrived that confirmed a queue position. A waiter with a confirmed position must get a smaller fence than any waiter
//! whose first request comes later.

use crate::support;

use std::collections::HashMap;
use std::env;
use std::io::Write;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use support::server::RedisServer;
use support::stores::delegate_lock;
use support::windows::now_us;
use support::worker::{Worker, end_at_panics};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate::lock::LockKey;
use tollgate::lock::store::{Acquired, Claim, LockStore, Token};
use tollgate::{Locks, RedisBackend, StoreError};

const WORKERS: usize = 4;
const TASKS: u64 = 6;
const TTL: Duration = Duration::from_millis(500);
const DURATION: Duration = Duration::from_secs(12);
/// A waiter that has sent no request for this long may have lost its position, and is not checked.
const ALIVE: Duration = Duration::from_millis(2_500);
/// How long workers may take to end afterwards.
const SETTLED: Duration = Duration::from_secs(60);
/// Marks a worker process. Contains the URL of its server.
const WORKER: &str = "TOLLGATE_TEST_FAIR_WORKER";

pub(crate) const TESTS: &[(&str, fn())] = &[("no_live_waiter_is_overtaken", no_live_waiter_is_overtaken)];

/// Runs the worker if this process is one, and returns whether it is.
pub(crate) fn is_worker() -> bool {
    let Ok(url) = env::var(WORKER) else { return false };
    end_at_panics();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work(&url));
    true
}

/// The times of a waiter's requests, in microseconds on the clock that all processes share.
#[derive(Clone, Copy, Default)]
struct Wait {
    asked: u64,
    queued_at: u64,
    last: u64,
    longest_silence: u64,
}

/// The backend, with a record of the requests.
struct Observed {
    inner: RedisBackend,
    waits: Arc<Mutex<Waits>>,
}

#[derive(Default)]
struct Waits {
    by_token: HashMap<Token, Wait>,
    by_fence: HashMap<u64, Wait>,
}

impl LockStore for Observed {
    delegate_lock!(inner: acquire_all, renew, release, watch, scope);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        let now = now_us();
        let queued_at = {
            let mut waits = self.waits.lock().unwrap();
            let wait = waits.by_token.entry(claim.token).or_insert(Wait { asked: now, last: now, ..Wait::default() });
            wait.longest_silence = wait.longest_silence.max(now.saturating_sub(wait.last));
            // Until a reply confirms the position again, it is unknown. A waiter that receives a grant after the end of the lease, or
            // never, has had its turn. Its next request joins the end of the queue.
            std::mem::take(&mut wait.queued_at)
        };
        let answer = self.inner.acquire(lock, claim).await;
        let answered = now_us();
        let mut waits = self.waits.lock().unwrap();
        let wait = waits.by_token.get_mut(&claim.token).unwrap();
        // The server may have processed the request at any time after it was sent.
        wait.longest_silence = wait.longest_silence.max(answered.saturating_sub(wait.last));
        wait.last = now;
        match answer {
            Ok(Acquired::Queued { .. }) => wait.queued_at = if queued_at == 0 { answered } else { queued_at },
            Ok(Acquired::Granted { fence }) => {
                let wait = Wait { queued_at, ..*wait };
                waits.by_fence.insert(fence, wait);
            }
            _ => {}
        }
        answer
    }
}

async fn work(url: &str) {
    let waits = Arc::new(Mutex::new(Waits::default()));
    let store = Observed { inner: RedisBackend::connect(url).await.unwrap(), waits: Arc::clone(&waits) };
    let locks =
        Locks::new(store, "default").fair().ttl(TTL).wait(Duration::from_secs(60)).deadline(Duration::from_secs(1));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (locks, waits) = (locks.clone(), Arc::clone(&waits));
        tasks.spawn(async move {
            let mut turn = u64::from(std::process::id()) + task;
            while start.elapsed() < DURATION {
                turn += 1;
                // Every third waiter gives up early, and is dropped at its position.
                let time_limit = Duration::from_millis(if turn.is_multiple_of(3) { turn % 40 } else { 60_000 });
                let Ok(Ok(lease)) = timeout(time_limit, locks.lock("a").into_future()).await else { continue };
                let wait = waits.lock().unwrap().by_fence.remove(&lease.fence()).unwrap();
                let Wait { asked, queued_at, longest_silence, .. } = wait;
                let mut out = std::io::stdout();
                writeln!(out, "{} {asked} {queued_at} {longest_silence} {}", lease.fence(), now_us()).unwrap();
                out.flush().unwrap();
                sleep(Duration::from_millis(turn % 4)).await;
                drop(lease);
                sleep(Duration::from_millis(turn % 7)).await;
            }
        });
    }
    tasks.join_all().await;
    locks.shutdown().await;
}

/// A grant that a worker printed.
struct Grant {
    fence: u64,
    asked: u64,
    queued_at: u64,
    silence: u64,
    at: u64,
}

fn no_live_waiter_is_overtaken() {
    let server = RedisServer::start();
    let (sender, lines) = mpsc::channel();
    let mut workers: Vec<Worker> =
        (0..WORKERS).map(|_| Worker::start(WORKER, &server.url(), sender.clone(), Some)).collect();
    drop(sender);
    thread::sleep(Duration::from_millis(1_500));
    for round in 0..4 {
        // Short enough to keep the queue positions.
        let worker = &workers[round % 2];
        worker.pause();
        thread::sleep(TTL * 2);
        worker.resume();
        thread::sleep(Duration::from_millis(300));
        if round == 1 || round == 2 {
            workers[WORKERS - round].kill();
        }
    }
    for worker in &mut workers {
        assert!(worker.has_ended_well(SETTLED), "a worker failed, or did not end");
    }
    let read = |line: String| {
        let numbers: Vec<u64> = line.split(' ').map_while(|number| number.parse().ok()).collect();
        let [fence, asked, queued_at, silence, at] = numbers[..] else { return None };
        Some(Grant { fence, asked, queued_at, silence, at })
    };
    let mut grants: Vec<Grant> = lines.iter().filter_map(read).collect();
    grants.sort_unstable_by_key(|grant| grant.fence);
    let mut waited = 0;
    // The latest first request among the waiters served so far.
    let mut latest = (0, 0);
    for grant in &grants {
        if grant.queued_at > 0 && grant.silence < ALIVE.as_micros() as u64 {
            waited += 1;
            let (asked, fence) = latest;
            assert!(grant.queued_at >= asked, "{fence} overtook {} by {} us", grant.fence, asked - grant.queued_at);
        }
        latest = latest.max((grant.asked, grant.fence));
    }
    // Killed processes hold up the others until their lease ends, or until their position expires and a waiter calls the store.
    let longest = grants.windows(2).map(|pair| pair[1].at.saturating_sub(pair[0].at)).max().unwrap_or_default();
    println!("{} grants, {waited} of them waited for; {longest} us without one at the most", grants.len());
    assert!(grants.len() > 300 && waited > 100, "too few grants to check");
    let bound = TTL + Claim::POSITION_TTL + Duration::from_secs(2);
    assert!(longest < bound.as_micros() as u64, "no grant for {longest} us");
    let left: u64 = server.query("EXISTS tollgate:2:{lock:default:a}:queue");
    assert_eq!(left, 0, "a waiter is left in the queue");
}
