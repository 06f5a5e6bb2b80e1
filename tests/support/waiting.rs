//! A process that waits for notifications of a lock, an operation and the jobs of a queue. Measures how late they arrive.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tollgate::delay_queue::{CircuitBreaker, DelayQueue, DelayQueueWorker, Job, WorkerError};
use tollgate::idempotency::store::{Digest, IdempotencyStore};
use tollgate::idempotency::{self, Operation};
use tollgate::lock::store::{LockStore, Notifications, Token};
use tollgate::lock::{self, LockKey};
use tollgate::{BoxError, RedisBackend};
use tower::service_fn;

/// How late a notification may be in half of the tries.
pub const LATE: Duration = Duration::from_millis(50);
/// How soon after a fault notifications have to be on time again.
pub const SOON: Duration = Duration::from_secs(2);
/// The longest wait for a notification.
pub const TIMEOUT: Duration = Duration::from_secs(10);
const TTL: Duration = Duration::from_secs(60);
/// The number of notifications of each kind.
const TRIES: usize = 5;

/// A process that waits, and a process that causes its notifications.
#[derive(Debug)]
pub struct Waiting {
    teller: RedisBackend,
    lock: LockKey,
    locks: Notifications,
    operation: Operation,
    operations: Notifications,
    queue: DelayQueue<u32>,
    worker: Worker,
}

/// A worker that reports when it starts a job.
#[derive(Debug)]
pub struct Worker {
    task: JoinHandle<Result<(), WorkerError>>,
    since: mpsc::UnboundedReceiver<Instant>,
}

impl Worker {
    pub fn start(queue: DelayQueue<u32>) -> Self {
        let (tell, since) = mpsc::unbounded_channel();
        let service = service_fn(move |_: Job<u32>| {
            // The receiver may be gone.
            let _ = tell.send(Instant::now());
            std::future::ready(Ok::<_, BoxError>(()))
        });
        let queue = queue.deadline(Duration::from_secs(1));
        Self { task: tokio::spawn(DelayQueueWorker::new(queue, service).run()), since }
    }

    /// How late the idle worker starts a job after its push.
    pub async fn lateness(&mut self, queue: &DelayQueue<u32>) -> Duration {
        sleep(LATE).await;
        until_ok(async || queue.push(0).await.map(drop)).await;
        let pushed = Instant::now();
        let since = timeout(TIMEOUT, self.since.recv()).await;
        since.map_or(TIMEOUT, |since| since.expect("the worker runs").saturating_duration_since(pushed))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Waiting {
    /// Chooses the hash tags of all keys with `is_chosen`, so that the servers under test have the keys.
    pub async fn start(teller: RedisBackend, hears: RedisBackend, is_chosen: impl Fn(&str) -> bool) -> Self {
        let named = |prefix: &str| {
            let mut names = (0..).map(|number: u32| number.to_string());
            names.find(|name| is_chosen(&format!("{prefix}{name}"))).expect("there is another number")
        };
        let lock = LockKey::new("default", named("lock:default:"));
        let operation = Operation::new("scope", named("idempotency:scope:"));
        let name = named("delay_queue:");
        let locks = LockStore::watch(&hears, &lock, None).await;
        let operations = IdempotencyStore::watch(&hears, &operation).await;
        let queue = DelayQueue::new(teller.clone(), name.clone());
        let queue = queue.deadline(TIMEOUT).circuit_breaker(CircuitBreaker::off());
        let worker = Worker::start(DelayQueue::new(hears, name));
        Self { teller, lock, locks, operation, operations, queue, worker }
    }

    /// The hash tag of the keys of the queue.
    pub fn tag(&self) -> String {
        format!("delay_queue:{}", self.queue.name())
    }

    /// The median lateness of each kind of notification.
    pub async fn lateness(&mut self) -> [(&'static str, Duration); 3] {
        let mut all = [("lock", Vec::new()), ("operation", Vec::new()), ("job", Vec::new())];
        for _ in 0..TRIES {
            all[0].1.push(self.lock_is_late().await);
            all[1].1.push(self.operation_is_late().await);
            all[2].1.push(self.worker.lateness(&self.queue).await);
        }
        all.map(|(what, mut late)| {
            late.sort_unstable();
            (what, late[TRIES / 2])
        })
    }

    async fn lock_is_late(&mut self) -> Duration {
        let token = Token::random().expect("there is randomness");
        let claim = lock::store::Claim::new(token, TTL);
        until_ok(|| self.teller.acquire(&self.lock, &claim)).await;
        quiet(&mut self.locks).await;
        let since = Instant::now();
        until_ok(|| LockStore::release(&self.teller, &self.lock, &token)).await;
        let _ = timeout(TIMEOUT, self.locks.next()).await;
        since.elapsed()
    }

    async fn operation_is_late(&mut self) -> Duration {
        let token = Token::random().expect("there is randomness");
        let claim = idempotency::store::Claim::new(token, Digest::default(), TTL, TTL);
        until_ok(|| self.teller.begin(&self.operation, &claim)).await;
        quiet(&mut self.operations).await;
        let since = Instant::now();
        until_ok(|| IdempotencyStore::release(&self.teller, &self.operation, &claim)).await;
        let _ = timeout(TIMEOUT, self.operations.next()).await;
        since.elapsed()
    }
}

async fn until_ok<T, E: Debug>(call: impl AsyncFn() -> Result<T, E>) {
    let since = Instant::now();
    while let Err(error) = call().await {
        assert!(since.elapsed() < TIMEOUT, "{error:?}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Discards earlier notifications.
async fn quiet(wakeups: &mut Notifications) {
    while timeout(Duration::from_millis(5), wakeups.next()).await.is_ok() {}
}
