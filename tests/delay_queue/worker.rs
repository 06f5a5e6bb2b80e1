//! Delay queue workers: start times, concurrency, outcomes of jobs, and shutdown.

use crate::support;

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, pending, poll_fn, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use support::server::RedisServer;
use support::shared::patient;
use support::stores::delegate_queue;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tollgate::delay_queue::store::{Ack, Claim, Claimed, DelayQueueStore, MAX_BATCH, QueueKey};
use tollgate::delay_queue::{
    Backoff, Cancelled, Codec, DelayQueue, DelayQueueWorker, Due, Event, Events, Job, JobId, JobResponder,
    OnUndecodable, Outcome, Priority, Push, Reason, Recurring, Schedule, State, UniqueFor, WorkerError,
};
use tollgate::idempotency::{Idempotent, Operation, OperationError};
use tollgate::lock::LeaseHandle;
use tollgate::rate_limit::RateLimitHandle;
use tollgate::testing::{Failure, FaultStore, TestJob};
use tollgate::{
    BoxError, ErrorResponder, GlobalKey, Key, Limiter, LockLayer, MemoryBackend, OnMissingKey, Policy, Quota,
    RateLimitLayer, RedisBackend, StoreError,
};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn queue(store: impl DelayQueueStore + Send + Sync + 'static) -> DelayQueue<u32> {
    DelayQueue::new(store, "work").deadline(secs(5))
}

/// The attempts that ran, with their times.
#[derive(Clone)]
struct Record {
    since: Instant,
    runs: Arc<Mutex<Vec<(u32, u16, Duration)>>>,
}

impl Record {
    fn new() -> Self {
        Self { since: Instant::now(), runs: Arc::default() }
    }

    fn note(&self, job: &Job<u32>) {
        self.runs.lock().unwrap().push((**job, job.attempt(), self.since.elapsed()));
    }

    /// A service that records each job and completes it.
    fn service(&self) -> impl Service<Job<u32>, Error = Infallible, Future: Send> + Clone + Send + use<> {
        let record = self.clone();
        service_fn(move |job| {
            record.note(&job);
            ready(Ok::<_, Infallible>(()))
        })
    }

    /// A service that records each job and runs `work` in each attempt.
    fn service_with<F, W>(
        &self,
        work: W,
    ) -> impl Service<Job<u32>, Error = Infallible, Future: Send> + Clone + Send + use<F, W>
    where
        F: Future<Output = ()> + Send,
        W: Fn(u16) -> F + Clone + Send,
    {
        let record = self.clone();
        service_fn(move |job: Job<u32>| {
            record.note(&job);
            let worked = work(job.attempt());
            async move {
                worked.await;
                Ok::<_, Infallible>(())
            }
        })
    }

    fn payloads(&self) -> Vec<u32> {
        let mut payloads: Vec<_> = self.runs.lock().unwrap().iter().map(|(payload, ..)| *payload).collect();
        payloads.sort_unstable();
        payloads
    }

    fn attempts(&self) -> Vec<u16> {
        self.runs.lock().unwrap().iter().map(|(_, attempt, _)| *attempt).collect()
    }

    fn times(&self) -> Vec<Duration> {
        self.runs.lock().unwrap().iter().map(|(.., time)| *time).collect()
    }
}

/// A worker in the background that runs until [`stop`](Self::stop).
struct Background {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), WorkerError>>,
}

impl Background {
    fn start<S, C>(worker: DelayQueueWorker<u32, S, C>) -> Self
    where
        S: Service<Job<u32>, Error: Into<BoxError>, Future: Send + 'static> + Send + 'static,
        C: Codec<u32> + Send + Sync + 'static,
    {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(worker.run_until(async {
            let _ = stopped.await;
        }));
        Self { stop, task }
    }

    async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap().unwrap();
    }
}

async fn is_empty(queue: &DelayQueue<u32>) -> bool {
    let counts = queue.counts().await.unwrap();
    counts.waiting + counts.running + counts.dead == 0
}

#[track_caller]
fn assert_close(time: Duration, expected: Duration) {
    assert!(time >= expected && time < expected + ms(5), "{time:?} instead of {expected:?}");
}

#[tokio::test(start_paused = true)]
async fn jobs_run_when_they_are_due_and_never_early() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), record.service()));
    for delay in [60, 3, 0, 7_200] {
        queue.push(delay).delay(secs(delay.into())).await.unwrap();
    }
    sleep(secs(7_201)).await;
    let runs = record.runs.lock().unwrap().clone();
    assert_eq!(runs.iter().map(|(payload, ..)| *payload).collect::<Vec<_>>(), [0, 3, 60, 7_200]);
    for (delay, _, time) in runs {
        assert_close(time, secs(delay.into()));
    }
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn day_of_retries_takes_no_time_on_a_paused_clock() {
    let since = std::time::Instant::now();
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let queue = queue(store).max_attempts(25);
    let record = Record::new();
    let noted = record.clone();
    let service = service_fn(move |job| {
        noted.note(&job);
        ready(Err::<(), _>("not today"))
    });
    let worker = DelayQueueWorker::new(queue.clone(), service).backoff(Backoff::fixed(secs(3_600)));
    let worker = Background::start(worker);
    let id = *queue.push(1).await.unwrap().id();
    sleep(secs(86_401)).await;
    assert_eq!(record.attempts(), (1..=25).collect::<Vec<_>>());
    for (hour, time) in (0..).zip(record.times()) {
        // Each timer may be up to a millisecond late.
        let (least, most) = (secs(hour * 3_600), secs(hour * 3_600) + ms(2 * hour + 2));
        assert!(time >= least && time <= most, "{time:?} instead of {least:?}");
    }
    let dead = queue.get(id).await.unwrap().unwrap();
    assert_eq!((dead.state, dead.attempt), (State::Dead, 25));
    let failure = dead.failure.unwrap();
    assert_eq!((failure.reason, &*failure.error), (Reason::Failed, "not today"));
    worker.stop().await;
    // The worker calls the store when there is something to do, and not every few seconds of the day.
    assert!(faults.total_calls() < 150, "{} calls", faults.total_calls());
    assert!(since.elapsed() < secs(1), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn outcome_decides_what_happens_to_the_job() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let noted = record.clone();
    let service = service_fn(move |job: Job<u32>| {
        noted.note(&job);
        let is_first = noted.attempts().len() == 1;
        ready(match *job {
            _ if !is_first => Ok(()),
            1 => Err(Outcome::snooze(secs(10))),
            2 => Err(Outcome::retry_after(secs(20)).because("busy")),
            3 => Err(Outcome::dead("no such customer")),
            _ => Err(Outcome::cancel()),
        })
    });
    for (payload, attempts, times) in
        [(1, vec![1, 1], vec![0, 10]), (2, vec![1, 2], vec![0, 20]), (3, vec![1], vec![0]), (4, vec![1], vec![0])]
    {
        let worker = Background::start(DelayQueueWorker::new(queue.clone(), service.clone()));
        let since = record.since.elapsed();
        let push = || queue.push(payload).unique_for(payload, UniqueFor::Time(secs(86_400)));
        assert!(push().await.unwrap().is_new());
        sleep(secs(100)).await;
        assert_eq!(record.attempts(), attempts, "{payload}");
        for (time, expected) in record.times().into_iter().zip(times) {
            assert_close(time - since, secs(expected));
        }
        record.runs.lock().unwrap().clear();
        worker.stop().await;
        let pushed = push().await.unwrap();
        assert_eq!(pushed.is_new(), payload == 4, "{payload}: only a cancelled job releases its key");
        queue.cancel(pushed).await.unwrap();
    }
    let dead = queue.dead(0, 10).await.unwrap();
    assert_eq!(dead.len(), 1);
    let failure = dead[0].failure.as_ref().unwrap();
    assert_eq!((failure.reason, &*failure.error), (Reason::Refused, "no such customer"));
    assert_eq!(queue.counts().await.unwrap().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn job_knows_its_last_attempt() {
    let queue = queue(MemoryBackend::new());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let service = service_fn(move |job: Job<u32>| {
        noted.lock().unwrap().push((job.attempt(), job.is_last_attempt()));
        ready(Err::<(), _>("not today"))
    });
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service).backoff(Backoff::fixed(secs(1))));
    for (attempts, expected) in [(1, vec![(1, true)]), (3, vec![(1, false), (2, false), (3, true)])] {
        queue.push(1).max_attempts(attempts).await.unwrap();
        sleep(secs(60)).await;
        assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), expected);
    }
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn keep_dead_limits_the_number_and_age_of_dead_jobs() {
    let queue = queue(MemoryBackend::new()).max_attempts(1).keep_dead(3, secs(3_600));
    let service = service_fn(|job: Job<u32>| ready(if *job == 0 { Ok(()) } else { Err("not today") }));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    let dead = async || {
        let mut dead: Vec<_> =
            queue.dead(0, 10).await.unwrap().iter().map(|job| queue.decode(job).unwrap()).collect::<Vec<u32>>();
        dead.sort_unstable();
        dead
    };
    for payload in 1..=5 {
        queue.push(payload).await.unwrap();
        sleep(secs(60)).await;
    }
    // Only claims remove dead jobs.
    let another = async || {
        queue.push(0).await.unwrap();
        sleep(secs(1)).await;
    };
    another().await;
    assert_eq!(dead().await, [3, 4, 5], "the oldest jobs were removed");
    // The third job has been dead for more than an hour, and the fourth has not.
    sleep(secs(3_600 - 150)).await;
    another().await;
    assert_eq!(dead().await, [4, 5]);
    worker.stop().await;
}

/// During a shutdown, a call that hangs does not use up the time for acks.
#[tokio::test(start_paused = true)]
async fn acks_use_another_call_while_one_hangs() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let queue = queue(store.clone());
    queue.push(1).await.unwrap();
    let service = service_fn(async |_: Job<u32>| {
        sleep(secs(2)).await;
        Ok::<_, Infallible>(())
    });
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service).lease(secs(30)));
    sleep(secs(1)).await;
    let ended = tokio::spawn(worker.stop());
    sleep(ms(500)).await;
    faults.hang();
    sleep(secs(2)).await;
    faults.heal();
    ended.await.unwrap();
    assert!(is_empty(&queue).await);
}

/// A codec that cannot decode some payloads.
#[derive(Clone, Copy)]
struct Picky;

impl Codec<u32> for Picky {
    fn encode(&self, payload: &u32) -> Result<Vec<u8>, BoxError> {
        Ok(payload.to_le_bytes().to_vec())
    }

    fn decode(&self, bytes: &[u8]) -> Result<u32, BoxError> {
        let payload = u32::from_le_bytes(bytes.try_into()?);
        assert_ne!(payload, 3, "cannot read three");
        if payload == 4 { Err("four is not a number".into()) } else { Ok(payload) }
    }
}

/// An error that panics when it is displayed.
#[derive(Debug)]
struct Unspeakable;

impl fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("six has no text")
    }
}

impl std::error::Error for Unspeakable {}

#[tokio::test(start_paused = true)]
async fn panicking_and_undecodable_jobs_affect_no_other_job() {
    let queue = DelayQueue::with_codec(MemoryBackend::new(), "work", Picky).max_attempts(2);
    let worker = DelayQueueWorker::new(
        queue.clone(),
        service_fn(|job: Job<u32>| {
            assert_ne!(*job, 1, "one at once");
            async move {
                assert_ne!(*job, 2, "two later");
                if *job == 6 { Err(Unspeakable) } else { Ok(()) }
            }
        }),
    );
    let worker = worker.span(|job| {
        assert_ne!(**job, 5, "five before");
        tracing::Span::none()
    });
    let worker = Background::start(worker);
    for payload in 0..10 {
        queue.push(payload).id(payload.to_string()).await.unwrap();
    }
    sleep(secs(60)).await;
    let mut dead: Vec<_> =
        queue.dead(0, 10).await.unwrap().into_iter().map(|job| (job.id, job.attempt, job.failure.unwrap())).collect();
    dead.sort_by_key(|(id, ..)| *id);
    let seen: Vec<_> = dead.iter().map(|(id, attempt, failure)| (id.as_str(), *attempt, failure.reason)).collect();
    let expected = [
        ("1", 2, Reason::Failed),
        ("2", 2, Reason::Failed),
        ("3", 1, Reason::Undecodable),
        ("4", 1, Reason::Undecodable),
        ("5", 2, Reason::Failed),
        ("6", 2, Reason::Failed),
    ];
    assert_eq!(seen, expected);
    let texts = ["one at once", "two later", "cannot read three", "not a number", "five before", "six has no text"];
    for (failure, part) in dead.iter().map(|(.., note)| note).zip(texts) {
        assert!(failure.error.contains(part), "{}", failure.error);
    }
    assert_eq!(queue.counts().await.unwrap().waiting, 0);
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rate_limited_job_is_snoozed_without_using_an_attempt() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let noted = record.clone();
    let policy = Policy::new("per second", Quota::per_second(5).fixed_window());
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(MemoryBackend::new(), policy).responder(ErrorResponder))
        .service(service_fn(move |job| {
            noted.note(&job);
            ready(Ok::<_, BoxError>(()))
        }));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    for payload in 0..20 {
        queue.push(payload).max_attempts(1).await.unwrap();
    }
    sleep(secs(120)).await;
    assert_eq!(record.payloads(), (0..20).collect::<Vec<_>>());
    assert!(record.attempts().iter().all(|attempt| *attempt == 1));
    let times = record.times();
    assert!(times[19] > secs(2), "20 jobs at 5 a second take longer than {:?}", times[19]);
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// Each job reserves three units and settles for one. It also reads the fence of its lock.
#[tokio::test(start_paused = true)]
async fn job_has_the_handles_of_its_layers() {
    let (queue, backend) = (queue(MemoryBackend::new()), MemoryBackend::new());
    let policy = Policy::new("tokens", Quota::per_hour(11).fixed_window());
    let limiter = Limiter::new(backend.clone(), policy.clone());
    let fences = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&fences);
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(backend.clone(), policy).cost(|_: &Job<u32>| 3).responder(JobResponder))
        .layer(LockLayer::new(backend, "requests").key(|job: &Job<u32>| job.to_string()).responder(JobResponder))
        .service(service_fn(move |job: Job<u32>| {
            noted.lock().unwrap().push(job.extensions().get::<LeaseHandle>().unwrap().fence());
            job.extensions().get::<RateLimitHandle>().unwrap().settle(1);
            ready(Ok::<_, BoxError>(()))
        }));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    for _ in 0..9 {
        queue.push(7).max_attempts(1).await.unwrap();
        sleep(secs(1)).await;
    }
    assert!(is_empty(&queue).await);
    assert_eq!(limiter.peek(Key::GLOBAL).await.unwrap().limits()[0].remaining(), 2);
    let fences = fences.lock().unwrap().clone();
    assert_eq!(fences.len(), 9);
    assert!(fences.is_sorted() && fences[0] > 0, "{fences:?}");
    worker.stop().await;
}

/// A job that passes without a lock must not take the lease of an outer layer for its own.
#[tokio::test(start_paused = true)]
async fn job_without_a_lock_has_no_lease_of_an_outer_layer() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let outer = LockLayer::new(MemoryBackend::new(), "requests").key(GlobalKey).responder(JobResponder);
    let inner = LockLayer::new(MemoryBackend::new(), "requests").key(|job: &Job<u32>| (**job > 0).then_some(**job));
    let service = ServiceBuilder::new()
        .layer(outer)
        .layer(inner.on_missing_key(OnMissingKey::Pass).responder(JobResponder))
        .service(service_fn(move |job: Job<u32>| {
            noted.lock().unwrap().push(job.extensions().get::<LeaseHandle>().map(|view| *view.lock().key()));
            ready(Ok::<_, BoxError>(()))
        }));
    for payload in [7, 0] {
        service.clone().oneshot(TestJob::new(payload).build()).await.unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), [Some(Key::from(7_u32)), None]);
}

#[tokio::test(start_paused = true)]
async fn locked_jobs_of_a_key_run_one_at_a_time() {
    let queue = queue(MemoryBackend::new());
    let at_work = Arc::new([const { AtomicUsize::new(0) }; 3]);
    let (seen, done) = (Arc::clone(&at_work), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&done);
    let service = ServiceBuilder::new()
        .layer(
            LockLayer::new(MemoryBackend::new(), "requests")
                .key(|job: &Job<u32>| (**job % 3).to_string())
                .responder(ErrorResponder),
        )
        .service(service_fn(move |job: Job<u32>| {
            let (seen, counted) = (Arc::clone(&seen), Arc::clone(&counted));
            async move {
                let place = &seen[*job as usize % 3];
                assert_eq!(place.fetch_add(1, Ordering::SeqCst), 0, "two jobs of a key at a time");
                sleep(ms(100)).await;
                place.fetch_sub(1, Ordering::SeqCst);
                counted.fetch_add(1, Ordering::SeqCst);
                Ok::<_, BoxError>(())
            }
        }));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    for payload in 0..12 {
        queue.push(payload).max_attempts(1).await.unwrap();
    }
    sleep(secs(60)).await;
    assert_eq!(done.load(Ordering::SeqCst), 12);
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// Regression: the job was dead before the outcome of the other job was known.
#[tokio::test(start_paused = true)]
async fn job_waits_for_its_operation_in_another_job() {
    let queue = queue(MemoryBackend::new());
    let operations = Idempotent::new(MemoryBackend::new(), "payouts");
    let replays = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&replays);
    let service = service_fn(move |_: Job<u32>| {
        let (operations, counted) = (operations.clone(), Arc::clone(&counted));
        async move {
            let work = async |_| {
                sleep(secs(60)).await;
                Ok::<_, BoxError>("paid")
            };
            let done = operations.run(Operation::new("alice", "payout-7"), "100 EUR", work).await?;
            counted.fetch_add(usize::from(done.is_replay()), Ordering::SeqCst);
            Ok::<_, BoxError>(())
        }
    });
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    for payload in 0..2 {
        queue.push(payload).max_attempts(1).await.unwrap();
    }
    sleep(secs(62)).await;
    assert_eq!(replays.load(Ordering::SeqCst), 1);
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// The operation is done, but the job may have more to do.
#[tokio::test(start_paused = true)]
async fn job_of_a_completed_operation_ends_as_the_service_says() {
    for needs_answer in [false, true] {
        let queue = queue(MemoryBackend::new());
        let operations = Idempotent::new(MemoryBackend::new(), "payouts").max_response(0);
        let payments = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&payments);
        let service = service_fn(move |job: Job<u32>| {
            let (operations, counted) = (operations.clone(), Arc::clone(&counted));
            async move {
                let work = async |_| {
                    counted.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, BoxError>("paid")
                };
                match operations.run(Operation::new("alice", "payout-7"), "100 EUR", work).await {
                    Err(OperationError::NotStored) if !needs_answer => return Ok(()),
                    answer => answer?,
                };
                assert_eq!(job.attempt(), 1, "the first attempt has an answer");
                Err::<(), BoxError>("the receipt was not printed".into())
            }
        });
        let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
        let id = *queue.push(7).max_attempts(2).await.unwrap().id();
        sleep(secs(60)).await;
        assert_eq!(payments.load(Ordering::SeqCst), 1);
        if needs_answer {
            let failure = queue.get(id).await.unwrap().unwrap().failure.unwrap();
            assert_eq!(failure.reason, Reason::Failed);
            assert_eq!(&*failure.error, "the operation was done before, and its response was not stored");
        } else {
            assert!(is_empty(&queue).await);
        }
        worker.stop().await;
    }
}

/// Regression: each job tried more than once a second.
#[tokio::test(start_paused = true)]
async fn jobs_retry_a_lock_less_often_if_many_wait() {
    const JOBS: u32 = 1_000;
    let queue = queue(MemoryBackend::new());
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    let service = ServiceBuilder::new()
        .map_request(move |job: Job<u32>| {
            counted.fetch_add(1, Ordering::SeqCst);
            job
        })
        .layer(LockLayer::new(MemoryBackend::new(), "requests").key(|_: &Job<u32>| "one").responder(JobResponder))
        .service(service_fn(async |job: Job<u32>| {
            if *job == 0 {
                sleep(secs(20)).await;
            }
            Ok::<_, BoxError>(())
        }));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    for payload in 0..JOBS {
        queue.push(payload).max_attempts(1).await.unwrap();
    }
    sleep(secs(20)).await;
    let tries = tries.load(Ordering::SeqCst);
    assert!((1_000..12_000).contains(&tries), "{tries}");
    // Still, the jobs complete as soon as the lock is free.
    sleep(secs(15)).await;
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// During a deployment, a new release replaces an old one.
#[tokio::test(start_paused = true)]
async fn undecodable_job_is_left_to_another_worker() {
    let backend = MemoryBackend::new();
    let (old, new) = (queue(backend.clone()), DelayQueue::<String>::new(backend, "work"));
    new.push("one".to_owned()).id("one").max_attempts(2).await.unwrap();
    let worker = || DelayQueueWorker::new(old.clone(), Record::new().service()).backoff(Backoff::fixed(secs(60)));
    worker().on_undecodable(OnUndecodable::Retry).run_until(sleep(secs(1))).await.unwrap();
    let job = new.get("one").await.unwrap().unwrap();
    assert_eq!((job.state, job.attempt, job.failure.unwrap().reason), (State::Waiting, 1, Reason::Failed));
    let service = service_fn(async |_: Job<String>| Ok::<_, BoxError>(()));
    DelayQueueWorker::new(new.clone(), service).run_until(sleep(secs(61))).await.unwrap();
    assert_eq!(new.get("one").await.unwrap(), None);

    new.push("two".to_owned()).id("two").await.unwrap();
    worker().run_until(sleep(secs(1))).await.unwrap();
    let job = new.get("two").await.unwrap().unwrap();
    assert_eq!((job.state, job.failure.unwrap().reason), (State::Dead, Reason::Undecodable));

    // No worker can read this job.
    new.push("three".to_owned()).id("three").max_attempts(2).await.unwrap();
    let worker = worker().on_undecodable(OnUndecodable::Retry);
    let mut events = worker.events();
    worker.run_until(sleep(secs(62))).await.unwrap();
    let job = new.get("three").await.unwrap().unwrap();
    assert_eq!((job.state, job.attempt, job.failure.unwrap().reason), (State::Dead, 2, Reason::Undecodable));
    assert!(matches!(events.next().await, Some(Event::Retried { .. })));
    assert!(matches!(events.next().await, Some(Event::Dead { reason: Reason::Undecodable, .. })));
}

#[tokio::test(start_paused = true)]
async fn task_beside_a_job_ends_with_the_job() {
    let queue = queue(MemoryBackend::new());
    let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let service = service_fn(move |job: Job<u32>| {
        let (mut beside, sender) = (job.cancellation(), sender.clone());
        tokio::spawn(async move { sender.send((*job, beside.ended().await)) });
        async move {
            sleep(secs(10)).await;
            Ok::<_, BoxError>(())
        }
    });
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service).lease(secs(3)));
    queue.push(1).await.unwrap();
    assert_eq!(timeout(secs(11), seen.recv()).await.unwrap(), Some((1, false)));
    queue.push(2).id("two").await.unwrap();
    sleep(secs(1)).await;
    assert_eq!(queue.cancel("two").await.unwrap(), Cancelled::Notified);
    assert_eq!(timeout(secs(2), seen.recv()).await.unwrap(), Some((2, true)));
    worker.stop().await;
}

/// Blocks the thread, as a service should not, until `is_over` is set.
fn block(is_over: &AtomicBool) {
    let since = std::time::Instant::now();
    while !is_over.load(Ordering::SeqCst) && since.elapsed() < secs(60) {
        std::thread::sleep(ms(1));
    }
}

async fn until_one_runs(queue: &DelayQueue<u32>) {
    let one_runs = async {
        while queue.counts().await.unwrap().running == 0 {
            sleep(ms(10)).await;
        }
    };
    timeout(secs(20), one_runs).await.unwrap();
}

/// Returns an error after a timeout. The caller checks it once no thread is blocked.
async fn until_empty(queue: &DelayQueue<u32>) -> Result<(), tokio::time::error::Elapsed> {
    let empty = async {
        while !is_empty(queue).await {
            sleep(ms(10)).await;
        }
    };
    timeout(secs(20), empty).await
}

/// Regression: the shutdown never ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocking_service_does_not_stop_a_shutdown() {
    let queue = queue(MemoryBackend::new());
    queue.push(1).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_over);
    let service = service_fn(move |_: Job<u32>| {
        let seen = Arc::clone(&seen);
        async move {
            block(&seen);
            Ok::<_, BoxError>(())
        }
    });
    let worker = DelayQueueWorker::new(queue.clone(), service).grace(ms(50)).abort_after(ms(50));
    let since = Instant::now();
    let ended = timeout(secs(10), worker.run_until(sleep(ms(100)))).await;
    let took = since.elapsed();
    is_over.store(true, Ordering::SeqCst);
    ended.unwrap().unwrap();
    assert!(took > secs(1) && took < secs(8), "{took:?}");
    assert_eq!(queue.counts().await.unwrap().running, 1, "the job keeps its lease until that ends");
}

/// Regression: the lease was renewed for as long as the process lived, and no other worker ever got the job.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocking_service_loses_its_job_when_the_lease_ends() {
    let queue = queue(MemoryBackend::new());
    queue.push(1).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_over);
    let service = service_fn(move |job: Job<u32>| {
        let seen = Arc::clone(&seen);
        async move {
            if job.attempt() == 1 {
                block(&seen);
            }
            Ok::<_, BoxError>(())
        }
    });
    // The first worker has no capacity for another job.
    let worker = || {
        DelayQueueWorker::new(queue.clone(), service.clone()).lease(secs(1)).max_runtime(ms(100)).abort_after(ms(50))
    };
    let first = Background::start(worker().concurrency(1));
    until_one_runs(&queue).await;
    let second = Background::start(worker());
    let is_done_again = until_empty(&queue).await;
    is_over.store(true, Ordering::SeqCst);
    is_done_again.unwrap();
    first.stop().await;
    second.stop().await;
}

/// Regression: each attempt blocked one more thread of the same process, until no thread was left.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocking_service_gets_its_job_again_afterwards() {
    let queue = queue(MemoryBackend::new());
    queue.push(1).id("a").await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let (at_it, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, inside, peak) = (Arc::clone(&is_over), Arc::clone(&at_it), Arc::clone(&most));
    let service = service_fn(move |_: Job<u32>| {
        let (seen, inside, peak) = (Arc::clone(&seen), Arc::clone(&inside), Arc::clone(&peak));
        async move {
            peak.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            block(&seen);
            inside.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, BoxError>(())
        }
    });
    let worker = DelayQueueWorker::new(queue.clone(), service)
        .lease(ms(500))
        .max_runtime(ms(100))
        .abort_after(ms(50))
        .backoff(Backoff::fixed(ms(200)));
    let (mut events, all) = (worker.events(), worker.events());
    let worker = Background::start(worker);
    let is_put_off = timeout(secs(20), async {
        while !matches!(events.next().await, Some(Event::Snoozed { .. })) {}
        queue.get("a").await.unwrap().unwrap()
    });
    let job = is_put_off.await;
    is_over.store(true, Ordering::SeqCst);
    assert_eq!(most.load(Ordering::SeqCst), 1, "one attempt at a time");
    let job = job.unwrap();
    assert_eq!((job.state, job.attempt), (State::Waiting, 1), "an attempt that did not start does not count");
    assert_eq!(&*job.failure.unwrap().error, "the job exceeded its maximum runtime");
    until_empty(&queue).await.unwrap();
    worker.stop().await;
    assert_eq!(names_of(all).await, ["started", "retried", "snoozed", "started", "done"]);
}

/// The worker that abandoned the job is the timekeeper when the job is due.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_job_of_a_blocked_worker_goes_to_another() {
    let server = RedisServer::start();
    let queue = queue(patient(server.url()).await);
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_over);
    let service = service_fn(move |job: Job<u32>| {
        let seen = Arc::clone(&seen);
        async move {
            if job.attempt() == 1 {
                block(&seen);
            }
            Ok::<_, BoxError>(())
        }
    });
    let worker = || {
        let worker = DelayQueueWorker::new(queue.clone(), service.clone());
        Background::start(worker.max_runtime(ms(100)).abort_after(ms(50)).backoff(Backoff::fixed(ms(200))))
    };
    let first = worker();
    queue.push(1).await.unwrap();
    until_one_runs(&queue).await;
    let second = worker();
    let is_done = until_empty(&queue).await;
    is_over.store(true, Ordering::SeqCst);
    is_done.unwrap();
    first.stop().await;
    second.stop().await;
}

/// Regression: now and then the worker stood still with the job, because it waited on the thread that the job blocked.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocking_service_does_not_delay_other_jobs() {
    for _ in 0..25 {
        let queue = queue(MemoryBackend::new());
        // Only a timer announces the second job.
        queue.push(1).await.unwrap();
        queue.push(2).delay(ms(50)).await.unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let (started, mut since) = tokio::sync::mpsc::unbounded_channel();
        let service = service_fn(move |job: Job<u32>| {
            let (seen, started) = (Arc::clone(&seen), started.clone());
            async move {
                started.send(*job)?;
                if *job == 1 {
                    block(&seen);
                }
                Ok::<_, BoxError>(())
            }
        });
        let worker = Background::start(DelayQueueWorker::new(queue, service));
        let both = timeout(secs(20), async { [since.recv().await, since.recv().await] }).await;
        is_over.store(true, Ordering::SeqCst);
        let mut both = both.unwrap();
        both.sort_unstable();
        assert_eq!(both, [Some(1), Some(2)]);
        worker.stop().await;
    }
}

/// The task that it wakes is queued behind it on the same thread, where no other thread steals it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocking_service_does_not_delay_its_own_pushes() {
    let queue = queue(MemoryBackend::new());
    queue.push(1).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let (seen, pushing) = (Arc::clone(&is_over), queue.clone());
    let (started, mut since) = tokio::sync::mpsc::unbounded_channel();
    let (go, gone) = oneshot::channel();
    let mut gone = Some(gone);
    let service = service_fn(move |job: Job<u32>| {
        let (seen, started, pushing, gone) = (Arc::clone(&seen), started.clone(), pushing.clone(), gone.take());
        async move {
            started.send(*job)?;
            if let Some(gone) = gone {
                gone.await?;
                pushing.push(2).await?;
                block(&seen);
            }
            Ok::<_, BoxError>(())
        }
    });
    let worker = Background::start(DelayQueueWorker::one_by_one(queue, service));
    assert_eq!(since.recv().await, Some(1));
    // Until the worker is idle.
    sleep(ms(100)).await;
    go.send(()).unwrap();
    let second = timeout(secs(20), since.recv()).await;
    is_over.store(true, Ordering::SeqCst);
    assert_eq!(second.unwrap(), Some(2));
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn timeout_is_a_failure_and_is_retried() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let noted = record.clone();
    let service = ServiceBuilder::new().timeout(secs(1)).service(service_fn(move |job: Job<u32>| {
        noted.note(&job);
        async move {
            if job.attempt() == 1 {
                pending::<()>().await;
            }
            Ok::<_, BoxError>(())
        }
    }));
    let worker = DelayQueueWorker::new(queue.clone(), service).backoff(Backoff::fixed(secs(5)));
    let worker = Background::start(worker);
    queue.push(1).await.unwrap();
    sleep(secs(10)).await;
    assert_eq!(record.attempts(), [1, 2]);
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn worker_claims_no_more_than_its_service_is_ready_for() {
    let queue = queue(MemoryBackend::new());
    let service = ServiceBuilder::new().concurrency_limit(3).service(service_fn(async |_: Job<u32>| {
        sleep(secs(1)).await;
        Ok::<_, Infallible>(())
    }));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service.clone()));
    for payload in 0..9 {
        queue.push(payload).await.unwrap();
    }
    for round in 0..3 {
        sleep(ms(500)).await;
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.running, counts.waiting), (3, 6 - 3 * round));
        sleep(ms(501)).await;
    }
    assert!(is_empty(&queue).await);
    // An idle worker holds no permit.
    let mut other = service;
    timeout(ms(1), poll_fn(|cx| other.poll_ready(cx))).await.unwrap().unwrap();
    worker.stop().await;
}

/// Counts its instances: how many exist, and the most at a time.
struct Counted {
    alive: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Counted {
    fn new(alive: &Arc<AtomicUsize>, most: &Arc<AtomicUsize>) -> Self {
        most.fetch_max(alive.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        Self { alive: Arc::clone(alive), most: Arc::clone(most) }
    }
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        Self::new(&self.alive, &self.most)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service<Job<u32>> for Counted {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Job<u32>) -> Self::Future {
        ready(Ok(()))
    }
}

/// Regression: a worker with a very large concurrency cloned its service endlessly, and never started the first job.
#[tokio::test(start_paused = true)]
async fn service_is_cloned_only_for_claimed_jobs() {
    for concurrency in [1_000_000, usize::MAX] {
        let queue = queue(MemoryBackend::new());
        let (alive, most) = (Arc::default(), Arc::default());
        let worker = DelayQueueWorker::new(queue.clone(), Counted::new(&alive, &most)).concurrency(concurrency);
        let worker = Background::start(worker);
        queue.push(1).await.unwrap();
        sleep(secs(1)).await;
        assert!(is_empty(&queue).await);
        worker.stop().await;
        let most = most.load(Ordering::SeqCst);
        assert!(most <= 2 * MAX_BATCH + 2, "{most} instances at a time");
    }
}

/// A service that cannot be cloned and handles one job at a time.
struct Single {
    is_busy: Arc<AtomicBool>,
    record: Record,
}

impl Service<Job<u32>> for Single {
    type Response = ();
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<(), Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.is_busy.load(Ordering::SeqCst) {
            let waker = cx.waker().clone();
            tokio::spawn(async move {
                sleep(ms(10)).await;
                waker.wake();
            });
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, job: Job<u32>) -> Self::Future {
        assert!(!self.is_busy.swap(true, Ordering::SeqCst), "called although not ready");
        self.record.note(&job);
        let is_busy = Arc::clone(&self.is_busy);
        Box::pin(async move {
            sleep(secs(1)).await;
            is_busy.store(false, Ordering::SeqCst);
            Ok(())
        })
    }
}

#[tokio::test(start_paused = true)]
async fn unclonable_service_gets_one_job_at_a_time() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let service = Single { is_busy: Arc::default(), record: record.clone() };
    for payload in 0..4 {
        queue.push(payload).await.unwrap();
    }
    let worker = Background::start(DelayQueueWorker::one_by_one(queue.clone(), service));
    sleep(ms(500)).await;
    assert_eq!(queue.counts().await.unwrap().running, 1);
    sleep(secs(5)).await;
    assert_eq!(record.payloads(), [0, 1, 2, 3]);
    // A panic of the service would be another attempt, which might succeed in time.
    assert_eq!(record.attempts(), [1; 4]);
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

#[derive(Clone)]
struct Unready(Option<&'static str>);

impl Service<Job<u32>> for Unready {
    type Response = ();
    type Error = BoxError;
    type Future = Ready<Result<(), BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.map_or(Poll::Pending, |error| Poll::Ready(Err(error.into())))
    }

    fn call(&mut self, _: Job<u32>) -> Self::Future {
        unreachable!("the service is never ready")
    }
}

#[tokio::test(start_paused = true)]
async fn worker_with_an_unready_service_leaves_jobs_to_others() {
    let queue = queue(MemoryBackend::new());
    queue.push(1).await.unwrap();
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), Unready(None)));
    sleep(secs(60)).await;
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
    worker.stop().await;
    let error = DelayQueueWorker::new(queue.clone(), Unready(Some("gone"))).run().await.unwrap_err();
    assert!(matches!(&error, WorkerError::Service(error) if error.to_string() == "gone"), "{error:?}");
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
}

#[tokio::test(start_paused = true)]
async fn idle_worker_ends_at_once_if_its_service_fails() {
    let since = Instant::now();
    let worker = DelayQueueWorker::new(queue(MemoryBackend::new()), Unready(Some("gone")));
    worker.run().await.unwrap_err();
    assert_close(since.elapsed(), Duration::ZERO);
}

/// A service that is ready while its gate is open, and records each job.
#[derive(Clone)]
struct Gate {
    is_open: Arc<AtomicBool>,
    record: Record,
}

impl Service<Job<u32>> for Gate {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.is_open.load(Ordering::SeqCst) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, job: Job<u32>) -> Self::Future {
        self.record.note(&job);
        ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn due_job_runs_elsewhere_while_one_worker_is_busy() {
    let queue = queue(MemoryBackend::new());
    let (first, second) = (Record::new(), Record::new());
    let gate = Gate { is_open: Arc::new(AtomicBool::new(true)), record: first.clone() };
    let busy = Background::start(DelayQueueWorker::new(queue.clone(), gate.clone()));
    sleep(ms(100)).await;
    let other = Background::start(DelayQueueWorker::new(queue.clone(), second.service()));
    gate.is_open.store(false, Ordering::SeqCst);
    queue.push(1).delay(secs(1)).await.unwrap();
    sleep(secs(10)).await;
    assert!(first.times().is_empty());
    assert_close(second.times()[0], ms(1_100));
    for worker in [busy, other] {
        worker.stop().await;
    }
}

/// Waits until each of these partitions has a timekeeper and `beside` other idle workers.
async fn until_workers_wait(server: &RedisServer, parts: &[&str], beside: usize) {
    let are_waiting = || {
        parts.iter().all(|part| {
            let key = |key: &str| format!("tollgate:2:{{delay_queue:work{part}}}:{key}");
            server.query::<usize>(&format!("STRLEN {}", key("state"))) > 15
                && server.query::<usize>(&format!("ZCARD {}", key("idle"))) == beside
        })
    };
    timeout(secs(10), async {
        while !tokio::task::block_in_place(are_waiting) {
            sleep(ms(5)).await;
        }
    })
    .await
    .expect("the workers wait");
}

/// On Redis, one idle worker is the timekeeper and the others sleep. A timekeeper whose service is not ready must hand over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_unready_worker_hands_over_timekeeping() {
    let server = RedisServer::start();
    let queue = queue(patient(server.url()).await);
    let (first, second) = (Record::new(), Record::new());
    let gate = Gate { is_open: Arc::new(AtomicBool::new(true)), record: first.clone() };
    let keeper = Background::start(DelayQueueWorker::new(queue.clone(), gate.clone()));
    until_workers_wait(&server, &[""], 0).await;
    let other = Background::start(DelayQueueWorker::new(queue.clone(), second.service()));
    until_workers_wait(&server, &[""], 1).await;
    gate.is_open.store(false, Ordering::SeqCst);
    // The first job wakes the timekeeper, and the second one becomes due later.
    for (i, delay) in [(0, ms(0)), (1, ms(700))] {
        let pushed = second.since.elapsed();
        queue.push(i).delay(delay).await.unwrap();
        timeout(secs(10), async {
            while second.times().len() <= i as usize {
                sleep(ms(1)).await;
            }
        })
        .await
        .unwrap();
        let took = second.times()[i as usize] - pushed;
        assert!(took >= delay && took < delay + secs(1), "{took:?} instead of {delay:?}");
    }
    assert!(first.times().is_empty());
    for worker in [keeper, other] {
        worker.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_stopped_worker_hands_over_timekeeping() {
    let server = RedisServer::start();
    let queue = queue(patient(server.url()).await);
    let record = Record::new();
    let keeper = Background::start(DelayQueueWorker::new(queue.clone(), record.service()));
    until_workers_wait(&server, &[""], 0).await;
    let other = Background::start(DelayQueueWorker::new(queue.clone(), record.service()));
    until_workers_wait(&server, &[""], 1).await;
    let pushed = record.since.elapsed();
    queue.push(1).delay(secs(1)).await.unwrap();
    keeper.stop().await;
    timeout(secs(10), async {
        while record.times().is_empty() {
            sleep(ms(1)).await;
        }
    })
    .await
    .unwrap();
    let took = record.times()[0] - pushed;
    assert!(took >= secs(1) && took < secs(2), "{took:?}");
    other.stop().await;
}

/// A worker of a partitioned queue shares its concurrency among all partitions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_busy_worker_hands_over_timekeeping_of_partitions() {
    let server = RedisServer::start();
    let queue = queue(patient(server.url()).await).split(2);
    let part = |id: &String| queue.push(0).id(id.clone()).prepare().unwrap().queue.partition();
    let ids = [0, 1].map(|wanted| (0..).map(|i: u32| i.to_string()).find(|id| part(id) == wanted).unwrap());
    let (record, release) = (Record::new(), Arc::new(tokio::sync::Notify::new()));
    let service = || {
        let (record, release) = (record.clone(), Arc::clone(&release));
        service_fn(move |job: Job<u32>| {
            record.note(&job);
            let release = Arc::clone(&release);
            async move {
                if *job == 0 {
                    release.notified().await;
                }
                Ok::<_, Infallible>(())
            }
        })
    };
    let keeper = Background::start(DelayQueueWorker::new(queue.clone(), service()).concurrency(1));
    until_workers_wait(&server, &["", "#1"], 0).await;
    let other = Background::start(DelayQueueWorker::new(queue.clone(), service()).concurrency(1));
    until_workers_wait(&server, &["", "#1"], 1).await;
    let pushed = record.since.elapsed();
    for (payload, id) in (0..).zip(&ids) {
        queue.push(payload).id(id.clone()).delay(ms(700) * payload).await.unwrap();
    }
    timeout(secs(10), async {
        while record.times().len() < 2 {
            sleep(ms(1)).await;
        }
    })
    .await
    .unwrap();
    let took = record.times()[1] - pushed;
    assert!(took >= ms(700) && took < ms(1_700), "{took:?}");
    release.notify_waiters();
    for worker in [keeper, other] {
        worker.stop().await;
    }
}

/// Panics in `poll_ready`, or in the first call.
struct Fragile {
    panics_in_poll_ready: bool,
    calls: Arc<AtomicUsize>,
}

impl Service<Job<u32>> for Fragile {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        assert!(!self.panics_in_poll_ready, "panic in poll_ready");
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Job<u32>) -> Self::Future {
        assert!(self.calls.fetch_add(1, Ordering::SeqCst) > 0, "panic in the first call");
        ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn panic_in_poll_ready_ends_the_worker_but_not_in_a_job() {
    let queue = queue(MemoryBackend::new());
    let calls = Arc::new(AtomicUsize::new(0));
    let service = |panics_in_poll_ready| Fragile { panics_in_poll_ready, calls: Arc::clone(&calls) };
    queue.push(1).id("a").await.unwrap();
    let error = DelayQueueWorker::one_by_one(queue.clone(), service(true)).run().await.unwrap_err();
    assert!(matches!(&error, WorkerError::Service(error) if error.to_string().contains("panicked")), "{error:?}");
    assert_eq!(queue.get("a").await.unwrap().unwrap().attempt, 0);
    let worker = DelayQueueWorker::one_by_one(queue.clone(), service(false)).backoff(Backoff::fixed(secs(1)));
    let worker = Background::start(worker);
    sleep(secs(3)).await;
    assert_eq!(calls.load(Ordering::SeqCst), 2, "the only instance of the service continues");
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// The names of all events of a worker.
async fn names_of(mut events: Events) -> Vec<&'static str> {
    let mut names = Vec::new();
    while let Some(event) = events.next().await {
        names.push(match event {
            Event::Started { .. } => "started",
            Event::Done { .. } => "done",
            Event::Dead { .. } => "dead",
            Event::Retried { .. } => "retried",
            Event::Snoozed { .. } => "snoozed",
            Event::Cancelled { .. } => "cancelled",
            Event::Released { .. } => "released",
            Event::LeaseLost { .. } => "lease lost",
            Event::LeasesExpired { jobs: 1, dead: 0 } => "expired",
            Event::LeasesExpired { jobs: 1, dead: 1 } => "expired and dead",
            Event::StoreFailed { .. } => "failed",
            Event::StoreWorks => "works",
            _ => "something else",
        });
    }
    names
}

/// The store has put the job back, but its reply was lost. To the retry it replies that the worker does not hold the job.
#[tokio::test(start_paused = true)]
async fn retry_with_a_lost_reply_is_reported_as_a_retry() {
    for (outcome, expected) in [(Outcome::retry_after(secs(60)), "retried"), (Outcome::snooze(secs(60)), "snoozed")] {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let queue = queue(store);
        let outcome = Mutex::new(Some(outcome));
        let service = service_fn(move |_: Job<u32>| {
            let outcome = outcome.lock().unwrap().take().unwrap();
            async move {
                sleep(secs(1)).await;
                Err::<(), _>(outcome)
            }
        });
        let worker = DelayQueueWorker::one_by_one(queue.clone(), service);
        let events = worker.events();
        let worker = Background::start(worker);
        queue.push(1).id("a").await.unwrap();
        sleep(ms(900)).await;
        faults.lose_replies();
        sleep(secs(1)).await;
        faults.heal();
        assert_eq!(queue.get("a").await.unwrap().unwrap().state, State::Waiting);
        // Until the worker gives up on that call.
        sleep(secs(10)).await;
        worker.stop().await;
        assert_eq!(names_of(events).await, ["started", "failed", "works", expected]);
    }
}

/// As above, for acks that do not put the job back, and for a job that another worker has completed by then.
#[tokio::test(start_paused = true)]
async fn ack_without_a_reply_is_reported_with_its_effect() {
    const KEPT: u64 = 10_000;
    for (attempts, delay, kept, is_cancelled, expected) in [
        (1, secs(60), KEPT, false, "dead"),
        (1, secs(60), KEPT, true, "cancelled"),
        (2, secs(60), KEPT, true, "cancelled"),
        (2, secs(1), KEPT, false, "retried"),
        // No record shows whether the job was cancelled.
        (1, secs(60), 0, false, "dead"),
    ] {
        let backend = MemoryBackend::new();
        let store = FaultStore::new(backend.clone());
        let faults = store.faults();
        let (queue, other) = (queue(store).keep_dead(kept, secs(3_600)), queue(backend));
        let service = service_fn(async |_: Job<u32>| {
            sleep(secs(1)).await;
            Err::<(), _>("not today")
        });
        let worker = DelayQueueWorker::one_by_one(queue.clone(), service).backoff(Backoff::fixed(delay));
        let events = worker.events();
        let worker = Background::start(worker);
        queue.push(1).id("a").max_attempts(attempts).await.unwrap();
        sleep(ms(900)).await;
        if is_cancelled {
            assert_eq!(queue.cancel("a").await.unwrap(), Cancelled::Notified);
        }
        faults.lose_replies();
        sleep(ms(500)).await;
        faults.heal();
        let second = Background::start(DelayQueueWorker::new(other.clone(), Record::new().service()));
        // Until the worker gives up on that call.
        sleep(secs(10)).await;
        assert_eq!(other.get("a").await.unwrap().is_some(), expected == "dead" && kept > 0);
        worker.stop().await;
        second.stop().await;
        assert_eq!(names_of(events).await, ["started", "failed", "works", expected]);
    }
}

/// The store has forgotten the completed job. When the worker retries the ack, another job has the same id.
#[tokio::test(start_paused = true)]
async fn ack_without_reply_counts_although_the_id_is_pushed_again() {
    for (outcome, expected) in [(None, "done"), (Some(Outcome::cancel()), "cancelled")] {
        let store = FaultStore::new(MemoryBackend::new());
        let faults = store.faults();
        let queue = queue(store);
        let answer = Mutex::new(Some(outcome.map_or(Ok(()), Err)));
        let service = service_fn(move |_: Job<u32>| {
            let answer = answer.lock().unwrap().take().unwrap();
            async move {
                sleep(secs(1)).await;
                answer
            }
        });
        let worker = DelayQueueWorker::one_by_one(queue.clone(), service);
        let events = worker.events();
        let worker = Background::start(worker);
        queue.push(1).id("a").await.unwrap();
        sleep(ms(900)).await;
        faults.lose_replies();
        sleep(secs(1)).await;
        faults.heal();
        assert!(queue.push(2).id("a").delay(secs(60)).await.unwrap().is_new());
        // Until the worker gives up on that call.
        sleep(secs(10)).await;
        assert_eq!(queue.get("a").await.unwrap().unwrap().state, State::Waiting);
        worker.stop().await;
        assert_eq!(names_of(events).await, ["started", "failed", "works", expected]);
    }
}

/// The store refused every ack, so the job was not put back before its lease ended.
#[tokio::test(start_paused = true)]
async fn job_not_acked_by_the_end_of_its_lease_is_lost() {
    let outcomes = [Outcome::retry_after(secs(60)), Outcome::snooze(secs(60))];
    for outcome in outcomes {
        let backend = MemoryBackend::new();
        let store = FaultStore::new(backend.clone());
        let faults = store.faults();
        let (cut_off, other) = (queue(store), queue(backend));
        let outcome = Mutex::new(Some(outcome));
        let service = service_fn(move |_: Job<u32>| {
            let outcome = outcome.lock().unwrap().take().unwrap();
            async move {
                sleep(secs(1)).await;
                Err::<(), _>(outcome)
            }
        });
        let worker = DelayQueueWorker::one_by_one(cut_off, service).lease(secs(6));
        let events = worker.events();
        let worker = Background::start(worker);
        other.push(10).await.unwrap();
        sleep(ms(500)).await;
        faults.fail(Failure::OutOfMemory);
        sleep(secs(6)).await;
        let done = Arc::new(AtomicUsize::new(0));
        let second = Background::start(DelayQueueWorker::new(other.clone(), sleeper(&done)));
        sleep(secs(1)).await;
        faults.heal();
        sleep(secs(5)).await;
        assert_eq!(other.counts().await.unwrap().running, 1, "the second worker runs it");
        worker.stop().await;
        second.stop().await;
        assert_eq!(names_of(events).await, ["started", "failed", "works", "lease lost"]);
    }
}

#[tokio::test(start_paused = true)]
async fn failure_of_a_cancelled_job_is_a_cancellation() {
    let queue = queue(MemoryBackend::new());
    let service = service_fn(async |_: Job<u32>| {
        sleep(secs(1)).await;
        Err::<(), _>("not today")
    });
    let worker = DelayQueueWorker::new(queue.clone(), service);
    let events = worker.events();
    let worker = Background::start(worker);
    queue.push(1).id("a").await.unwrap();
    // Before the lease is renewed, so that the worker does not know of the cancellation.
    sleep(ms(500)).await;
    assert_eq!(queue.cancel("a").await.unwrap(), Cancelled::Notified);
    sleep(secs(10)).await;
    assert!(is_empty(&queue).await);
    worker.stop().await;
    assert_eq!(names_of(events).await, ["started", "cancelled"]);
}

#[tokio::test(start_paused = true)]
async fn next_worker_reports_the_attempts_of_a_dead_worker() {
    let queue = queue(MemoryBackend::new()).max_attempts(2);
    queue.push(1).id("a").await.unwrap();
    let doomed = || {
        let service = service_fn(|_: Job<u32>| pending::<Result<(), Infallible>>());
        DelayQueueWorker::new(queue.clone(), service).lease(secs(1))
    };
    let (first, second, third) = (doomed(), doomed(), doomed());
    let (of_second, of_third) = (second.events(), third.events());
    // Each worker is dropped during an attempt.
    assert!(timeout(ms(500), first.run()).await.is_err());
    assert!(timeout(ms(1_500), second.run()).await.is_err());
    assert!(timeout(ms(1_500), third.run()).await.is_err());
    assert_eq!(names_of(of_second).await, ["expired", "started"]);
    assert_eq!(names_of(of_third).await, ["expired and dead"]);
    assert_eq!(queue.get("a").await.unwrap().unwrap().state, State::Dead);
}

#[tokio::test(start_paused = true)]
async fn lease_is_renewed_while_the_job_runs() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let service = record.service_with(|_| sleep(secs(100)));
    let worker = |service| Background::start(DelayQueueWorker::new(queue.clone(), service).lease(secs(3)));
    let workers = [worker(service.clone()), worker(service)];
    queue.push(1).await.unwrap();
    sleep(secs(101)).await;
    assert_eq!(record.attempts(), [1]);
    assert!(is_empty(&queue).await);
    for worker in workers {
        worker.stop().await;
    }
}

/// Regression: the job was started and cancelled at once, and its attempt was used up.
#[tokio::test(start_paused = true)]
async fn job_with_an_expired_lease_is_not_started() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let queue = queue(store);
    let record = Record::new();
    queue.push(1).id("a").await.unwrap();
    faults.delay(ms(50));
    let worker = DelayQueueWorker::new(queue.clone(), record.service()).lease(ms(10));
    let events = worker.events();
    let worker = Background::start(worker);
    sleep(secs(1)).await;
    assert!(record.attempts().is_empty());
    faults.heal();
    sleep(secs(1)).await;
    assert_eq!(record.attempts(), [1]);
    assert!(is_empty(&queue).await);
    worker.stop().await;
    let names = names_of(events).await;
    assert_eq!(names[names.len() - 2..], ["started", "done"]);
    assert!(names[..names.len() - 2].iter().all(|event| *event == "released"), "{names:?}");
}

#[tokio::test(start_paused = true)]
async fn cancelled_job_is_notified_and_then_dropped() {
    let queue = queue(MemoryBackend::new());
    let events_seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&events_seen);
    let service = service_fn(move |job: Job<u32>| {
        let noted = Arc::clone(&noted);
        async move {
            job.cancellation().cancelled().await;
            noted.lock().unwrap().push(*job);
            if *job == 2 {
                pending::<()>().await;
            }
            Err::<(), _>("given up")
        }
    });
    let worker = DelayQueueWorker::new(queue.clone(), service).lease(secs(3)).abort_after(secs(2));
    let mut events = worker.events();
    let worker = Background::start(worker);
    for payload in [1, 2] {
        queue.push(payload).id(payload.to_string()).await.unwrap();
    }
    sleep(ms(100)).await;
    for id in ["1", "2"] {
        assert_eq!(queue.cancel(id).await.unwrap(), Cancelled::Notified);
    }
    sleep(ms(1_100)).await;
    let mut seen = events_seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, [1, 2]);
    assert_eq!(queue.counts().await.unwrap().running, 1, "one of the jobs reacts");
    sleep(ms(2_100)).await;
    assert!(is_empty(&queue).await);
    worker.stop().await;
    let mut cancelled = 0;
    while let Some(event) = events.next().await {
        cancelled += usize::from(matches!(event, Event::Cancelled { .. }));
    }
    assert_eq!(cancelled, 2);
}

#[tokio::test(start_paused = true)]
async fn hanging_job_fails_after_its_max_runtime() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let service = record.service_with(|attempt| async move {
        if attempt == 1 {
            pending::<()>().await;
        }
    });
    let worker = DelayQueueWorker::new(queue.clone(), service)
        .max_runtime(secs(60))
        .abort_after(secs(5))
        .backoff(Backoff::fixed(secs(10)));
    let worker = Background::start(worker);
    queue.push(1).await.unwrap();
    sleep(secs(80)).await;
    assert_eq!(record.attempts(), [1, 2]);
    assert_close(record.times()[1], secs(75));
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn isolated_worker_abandons_its_job_and_cannot_ack_it() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let (cut_off, other) = (queue(store), queue(backend));
    let was_cancelled = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&was_cancelled);
    let service = service_fn(move |job: Job<u32>| {
        let flag = Arc::clone(&flag);
        async move {
            job.cancellation().cancelled().await;
            flag.store(true, Ordering::SeqCst);
            // The job ignores the cancellation and returns `Ok`.
            sleep(secs(3)).await;
            Ok::<_, Infallible>(())
        }
    });
    let worker = DelayQueueWorker::new(cut_off, service).lease(secs(6));
    let mut events = worker.events();
    let worker = Background::start(worker);
    let id = *other.push(1).await.unwrap().id();
    sleep(ms(100)).await;
    faults.fail(Failure::Unavailable);
    sleep(ms(5_800)).await;
    assert!(!was_cancelled.load(Ordering::SeqCst), "the lease has not ended");
    sleep(ms(200)).await;
    assert!(was_cancelled.load(Ordering::SeqCst), "the lease has ended");
    let record = Record::new();
    let second = record.service_with(|_| sleep(secs(10)));
    let second = Background::start(DelayQueueWorker::new(other.clone(), second));
    sleep(ms(1)).await;
    assert_eq!(record.attempts(), [2]);
    faults.heal();
    sleep(secs(5)).await;
    assert_eq!(other.get(id).await.unwrap().unwrap().state, State::Running, "the second worker runs it");
    sleep(secs(6)).await;
    assert!(is_empty(&other).await);
    worker.stop().await;
    second.stop().await;
    let mut lost = 0;
    while let Some(event) = events.next().await {
        lost += usize::from(matches!(event, Event::LeaseLost { .. }));
    }
    assert_eq!(lost, 1);
}

/// A service for jobs that take as many seconds as their payload says. Counts the completed jobs.
fn sleeper(done: &Arc<AtomicUsize>) -> impl Service<Job<u32>, Error = Infallible, Future: Send> + Clone + Send + use<> {
    let done = Arc::clone(done);
    service_fn(move |job: Job<u32>| {
        let done = Arc::clone(&done);
        async move {
            sleep(secs((*job).into())).await;
            done.fetch_add(1, Ordering::SeqCst);
            Ok::<_, Infallible>(())
        }
    })
}

#[tokio::test(start_paused = true)]
async fn shutdown_finishes_jobs_and_releases_the_rest() {
    let queue = queue(MemoryBackend::new());
    let done = Arc::new(AtomicUsize::new(0));
    let worker =
        DelayQueueWorker::new(queue.clone(), sleeper(&done)).concurrency(2).grace(secs(10)).abort_after(secs(1));
    let worker = Background::start(worker);
    for (id, seconds) in [("short", 5), ("long", 100), ("waiting", 1)] {
        queue.push(seconds).id(id).await.unwrap();
        sleep(ms(10)).await;
    }
    sleep(secs(1)).await;
    let since = Instant::now();
    worker.stop().await;
    assert!(since.elapsed() >= secs(11) && since.elapsed() < secs(12), "{:?}", since.elapsed());
    assert_eq!(done.load(Ordering::SeqCst), 1);
    for id in ["long", "waiting"] {
        let job = queue.get(id).await.unwrap().unwrap();
        assert_eq!((job.state, job.attempt), (State::Waiting, 0), "{id}");
    }
}

/// The result of a job that was asked to stop decides what happens to it.
#[tokio::test(start_paused = true)]
async fn stopped_job_is_done_only_if_it_returns_ok() {
    for (is_done, left) in [(true, 0), (false, 2)] {
        let queue = queue(MemoryBackend::new());
        let service = service_fn(move |job: Job<u32>| async move {
            job.cancellation().cancelled().await;
            if is_done { Ok(()) } else { Err("there was no time") }
        });
        let worker = DelayQueueWorker::new(queue.clone(), service)
            .grace(secs(10))
            .max_runtime(secs(60))
            .backoff(Backoff::fixed(secs(3_600)));
        let worker = Background::start(worker);
        queue.push(1).id("overrun").await.unwrap();
        sleep(secs(61)).await;
        queue.push(2).id("at the end").await.unwrap();
        sleep(secs(1)).await;
        worker.stop().await;
        let counts = queue.counts().await.unwrap();
        assert_eq!((counts.waiting, counts.running, counts.dead), (left, 0, 0));
        if !is_done {
            // One attempt has failed, and the other had no time to.
            for (id, attempts) in [("overrun", 1), ("at the end", 0)] {
                assert_eq!(queue.get(id).await.unwrap().unwrap().attempt, attempts, "{id}");
            }
        }
    }
}

/// Regression: a job that was refused during the shutdown of its worker ran again at once, at every deployment.
#[tokio::test(start_paused = true)]
async fn outcome_of_a_job_stopped_by_a_shutdown_counts() {
    let queue = queue(MemoryBackend::new());
    let service = service_fn(async |job: Job<u32>| {
        job.cancellation().cancelled().await;
        Err::<(), _>(match *job {
            0 => Outcome::dead("card declined"),
            1 => Outcome::cancel(),
            2 => Outcome::snooze(secs(3_600)),
            _ => Outcome::retry_after(secs(3_600)).because("busy"),
        })
    });
    let worker = DelayQueueWorker::new(queue.clone(), service).grace(secs(1));
    let events = worker.events();
    let worker = Background::start(worker);
    for (payload, id) in (0..).zip(["dead", "cancelled", "snoozed", "retried"]) {
        queue.push(payload).id(id).await.unwrap();
    }
    sleep(secs(1)).await;
    worker.stop().await;

    let get = async |id| queue.get(id).await.unwrap();
    let dead = get("dead").await.unwrap();
    let failure = dead.failure.unwrap();
    assert_eq!((dead.state, failure.reason, &*failure.error), (State::Dead, Reason::Refused, "card declined"));
    assert!(get("cancelled").await.is_none());
    for (id, attempt) in [("snoozed", 0), ("retried", 1)] {
        let job = get(id).await.unwrap();
        assert_eq!((job.state, job.attempt), (State::Waiting, attempt), "{id}");
    }
    assert_eq!(queue.counts().await.unwrap().due, 0, "both jobs wait for an hour");
    let mut names = names_of(events).await;
    names.sort_unstable();
    assert_eq!(names[..4], ["cancelled", "dead", "retried", "snoozed"]);
}

#[tokio::test(start_paused = true)]
async fn dropped_worker_leaves_jobs_until_their_leases_end() {
    let queue = queue(MemoryBackend::new());
    let done = Arc::new(AtomicUsize::new(0));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), sleeper(&done)).lease(secs(30)));
    let id = *queue.push(5).await.unwrap().id();
    sleep(secs(1)).await;
    worker.task.abort();
    sleep(secs(10)).await;
    assert_eq!(done.load(Ordering::SeqCst), 0, "the running job is dropped");
    assert_eq!(queue.get(id).await.unwrap().unwrap().state, State::Running);
    let record = Record::new();
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), record.service()));
    sleep(secs(30)).await;
    assert_eq!(record.attempts(), [2]);
    assert_close(record.times()[0], secs(19));
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn failing_store_is_retried_and_nothing_is_lost() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let (faulty, queue) = (queue(store), queue(backend));
    let done = Arc::new(AtomicUsize::new(0));
    let worker = DelayQueueWorker::new(faulty, sleeper(&done));
    let mut events = worker.events();
    let worker = Background::start(worker);
    queue.push(1).await.unwrap();
    sleep(ms(500)).await;
    let before = faults.total_calls();
    faults.fail(Failure::Unavailable);
    sleep(secs(10)).await;
    let asked = faults.total_calls() - before;
    assert!((8..40).contains(&asked), "{asked} calls in ten seconds");
    assert_eq!(done.load(Ordering::SeqCst), 1);
    assert_eq!(queue.counts().await.unwrap().running, 1, "the ack could not be sent");
    queue.push(0).await.unwrap();
    faults.heal();
    sleep(secs(1) + ms(10)).await;
    assert_eq!(done.load(Ordering::SeqCst), 2, "the completed job does not run again");
    assert!(is_empty(&queue).await);
    worker.stop().await;
    let mut seen = Vec::new();
    while let Some(event) = events.next().await {
        seen.push(match event {
            Event::Started { .. } => "started",
            Event::Done { .. } => "done",
            Event::Dead { .. } => "dead",
            Event::StoreFailed { .. } => "failed",
            Event::StoreWorks => "works",
            _ => "something else",
        });
    }
    assert_eq!(seen[..3], ["started", "failed", "works"]);
    assert_eq!(seen[3..].iter().filter(|event| **event == "done").count(), 2);
}

#[tokio::test(start_paused = true)]
async fn worker_with_a_failing_store_frees_service_permits() {
    let store = FaultStore::new(MemoryBackend::new());
    let faults = store.faults();
    let queue = queue(store);
    let record = Record::new();
    let service = ServiceBuilder::new().concurrency_limit(3).service(record.service());
    let (mut one, mut another) = (service.clone(), service.clone());
    let since = Instant::now();
    faults.fail(Failure::Unavailable);
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service));
    sleep(secs(10)).await;
    // The worker uses one permit at most, and not all the time.
    for other in [&mut one, &mut another] {
        timeout(secs(10), ServiceExt::ready(other)).await.unwrap().unwrap();
    }
    let asked = faults.total_calls();
    faults.heal();
    for payload in 0..5 {
        queue.push(payload).await.unwrap();
    }
    sleep(secs(2)).await;
    assert_eq!(record.payloads(), [0, 1, 2, 3, 4]);
    assert!((8..60).contains(&asked), "{asked} calls in {:?}", since.elapsed());
    worker.stop().await;
}

/// Without a receiver, events cost nothing. A slow receiver gets the number of missed events.
#[tokio::test(start_paused = true)]
async fn unread_events_are_dropped_and_counted() {
    let queue = queue(MemoryBackend::new());
    let worker = DelayQueueWorker::new(queue.clone(), sleeper(&Arc::default()));
    let mut events: Events = worker.events();
    let worker = Background::start(worker);
    for _ in 0..1_000 {
        queue.push(0).await.unwrap();
    }
    sleep(secs(1)).await;
    worker.stop().await;
    let Some(Event::Missed(missed)) = events.next().await else { panic!("2,000 events do not fit") };
    // The remaining events, as a stream.
    let (mut events, mut picked) = (pin!(events), 0);
    while poll_fn(|cx| events.as_mut().poll_next(cx)).await.is_some() {
        picked += 1;
    }
    assert_eq!(missed + picked, 2_000);
}

#[tokio::test(start_paused = true)]
async fn worker_serves_all_partitions_of_a_queue() {
    let queue = queue(MemoryBackend::new()).split(7);
    let done = Arc::new(AtomicUsize::new(0));
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), sleeper(&done)).concurrency(10));
    let pushed = queue.push_all((0..500).map(|_| queue.push(0).delay(secs(3)))).await;
    assert!(pushed.iter().all(Result::is_ok));
    sleep(secs(4)).await;
    assert_eq!(done.load(Ordering::SeqCst), 500);
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// What happens to a claim instead of reaching the backend: it fails at once, or gets no reply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Fails,
    Hangs,
}

/// A backend that fails or hangs on some claims.
#[derive(Clone)]
struct Fickle<F> {
    backend: MemoryBackend,
    fate: F,
}

impl<F: Fn(&QueueKey, &Claim) -> Option<Fate> + Send + Sync> DelayQueueStore for Fickle<F> {
    delegate_queue!(backend: push, extend, watch, get, cancel, reschedule, replace, counts, list, pause, purge, release_unique, replay, forget, scope);

    async fn claim(&self, queue: &QueueKey, finished: &[Ack], claim: &Claim) -> Result<Claimed, StoreError> {
        match (self.fate)(queue, claim) {
            None => self.backend.claim(queue, finished, claim).await,
            Some(Fate::Fails) => Err(StoreError::unavailable("its node is down")),
            Some(Fate::Hangs) => pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn partition_on_a_dead_node_does_not_stop_other_partitions() {
    for fate in [Fate::Fails, Fate::Hangs] {
        let backend = MemoryBackend::new();
        let is_down = Arc::new(AtomicBool::new(false));
        let down = Arc::clone(&is_down);
        let fate =
            move |queue: &QueueKey, _: &Claim| (queue.partition() == 0 && down.load(Ordering::SeqCst)).then_some(fate);
        let healthy = QueueKey::new("work").with_partition(1);
        let queue = queue(Fickle { backend: backend.clone(), fate }).split(2);
        let pushed = queue.push_all((0..100).map(|_| queue.push(1))).await;
        assert!(pushed.iter().all(Result::is_ok));
        // At first, only jobs of partition 0 run.
        backend.pause(&healthy, true).await.unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let worker = DelayQueueWorker::new(queue.clone(), sleeper(&done)).concurrency(10);
        let mut outages = pin!(worker.events());
        let worker = Background::start(worker);
        // Success of the healthy partition does not end the reported outage.
        let mut outages = async || {
            let mut changes = Vec::new();
            while let Poll::Ready(event) = poll_fn(|cx| Poll::Ready(outages.as_mut().poll_next(cx))).await {
                match event {
                    Some(Event::StoreFailed { .. }) => changes.push("fails"),
                    Some(Event::StoreWorks) => changes.push("works"),
                    Some(Event::Missed(_)) | None => panic!("an event was missed"),
                    _ => {}
                }
            }
            changes
        };
        sleep(ms(500)).await;
        is_down.store(true, Ordering::SeqCst);
        backend.pause(&healthy, false).await.unwrap();
        sleep(secs(20)).await;
        let counts = backend.counts(&healthy).await.unwrap();
        assert_eq!((counts.waiting, counts.running), (0, 0));
        assert_eq!(outages().await, ["fails"]);
        is_down.store(false, Ordering::SeqCst);
        sleep(secs(20)).await;
        assert_eq!(outages().await, ["works"]);
        assert!(is_empty(&queue).await);
        assert_eq!(done.load(Ordering::SeqCst), 100, "no job ran twice");
        worker.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn failed_handover_of_timekeeping_is_retried() {
    let backend = MemoryBackend::new();
    let (since, handed) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
    let noted = Arc::clone(&handed);
    let fate = move |_: &QueueKey, claim: &Claim| {
        let mut handed = noted.lock().unwrap();
        let is_first = claim.limit == 0 && handed.is_empty();
        handed.extend((claim.limit == 0).then(|| since.elapsed()));
        is_first.then_some(Fate::Fails)
    };
    let queue = queue(Fickle { backend, fate });
    let gate = Gate { is_open: Arc::new(AtomicBool::new(true)), record: Record::new() };
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), gate.clone()));
    sleep(ms(100)).await;
    gate.is_open.store(false, Ordering::SeqCst);
    queue.push(1).delay(secs(1)).await.unwrap();
    sleep(secs(2)).await;
    let handed = handed.lock().unwrap().clone();
    assert!(handed.len() > 1 && handed[1] - handed[0] < ms(200), "{handed:?}");
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn too_short_lease_is_rejected() {
    let worker = DelayQueueWorker::new(queue(MemoryBackend::new()), sleeper(&Arc::default())).lease(ms(1));
    assert!(matches!(worker.run().await, Err(WorkerError::Config(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_earlier_job_wakes_a_worker() {
    let server = RedisServer::start();
    let queue = queue(patient(server.url()).await);
    let record = Record::new();
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), record.service()));
    queue.push(0).delay(secs(3_600)).await.unwrap();
    sleep(ms(500)).await;
    for (i, delay) in (1..).zip([0, 300, 0, 100]) {
        let pushed = record.since.elapsed();
        queue.push(i).delay(ms(delay)).await.unwrap();
        let came = timeout(secs(2), async {
            while record.runs.lock().unwrap().len() < i as usize {
                sleep(ms(1)).await;
            }
        });
        came.await.unwrap();
        let took = record.times()[i as usize - 1] - pushed;
        // A worker that is not woken claims after five seconds.
        assert!(took >= ms(delay) && took < ms(delay + 1_000), "{took:?} instead of {delay} ms");
        sleep(ms(50)).await;
    }
    worker.stop().await;
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_workers_are_cheap_and_one_job_wakes_few() {
    const WORKERS: usize = 200;
    let server = RedisServer::start();
    let queue = queue(patient(server.url()).await);
    let done = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> =
        (0..WORKERS).map(|_| Background::start(DelayQueueWorker::new(queue.clone(), sleeper(&done)))).collect();
    sleep(secs(2)).await;
    let calls = || {
        let stats = server.text("INFO commandstats");
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse::<u64>().ok()).unwrap()
    };
    let (before, since) = (calls(), Instant::now());
    sleep(secs(6)).await;
    let per_second = (calls() - before) as f64 / since.elapsed().as_secs_f64();
    assert!(per_second > 0.0, "nothing was measured");
    assert!(per_second < WORKERS as f64 / 2.0, "{per_second} commands a second");
    let (before, since) = (calls(), Instant::now());
    for _ in 0..10 {
        queue.push(0).await.unwrap();
        sleep(ms(50)).await;
    }
    timeout(secs(10), async {
        while done.load(Ordering::SeqCst) < 10 {
            sleep(ms(10)).await;
        }
    })
    .await
    .unwrap();
    let for_jobs = calls() - before;
    let idle = per_second * since.elapsed().as_secs_f64();
    assert_eq!(done.load(Ordering::SeqCst), 10);
    assert!((for_jobs as f64) < 80.0 + 2.0 * idle, "{for_jobs} commands for ten jobs, {idle} of which are idle claims");
    for worker in workers {
        worker.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_survives_failures_of_redis() {
    let mut server = RedisServer::start_with(support::server::DURABLE);
    let queue = queue(RedisBackend::connect(server.url()).await.unwrap());
    let record = Record::new();
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), record.service()).lease(secs(1)));
    let mut pushed = 0;
    for round in 0..4 {
        for _ in 0..50 {
            queue.push(pushed).delay(ms(u64::from(pushed) % 50)).await.unwrap();
            pushed += 1;
        }
        match round {
            0 => server.flush_scripts(),
            1 => drop(server.kill_clients()),
            2 => {
                server.kill();
                sleep(ms(300)).await;
                server.restart();
            }
            _ => {}
        }
        timeout(secs(10), async {
            while !is_empty_on_redis(&queue).await {
                sleep(ms(10)).await;
            }
        })
        .await
        .unwrap();
    }
    worker.stop().await;
    let mut seen = record.payloads();
    seen.dedup();
    assert_eq!(seen, (0..pushed).collect::<Vec<_>>());
}

/// While ten jobs run, and while none do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_drops_jobs_that_redis_has_lost_and_continues() {
    let mut server = RedisServer::start();
    let queue = queue(RedisBackend::connect(server.url()).await.unwrap());
    let (record, calls) = (Record::new(), Arc::new(AtomicUsize::new(0)));
    let (noted, count) = (record.clone(), Arc::clone(&calls));
    let service = service_fn(move |job: Job<u32>| {
        noted.note(&job);
        let (count, mut cancellation) = (Arc::clone(&count), job.cancellation());
        async move {
            if *job < 10 {
                cancellation.cancelled().await;
                count.fetch_add(1, Ordering::SeqCst);
            }
            Ok::<_, Infallible>(())
        }
    });
    // The lost jobs use the whole concurrency of the worker.
    let worker = DelayQueueWorker::new(queue.clone(), service).lease(secs(3)).concurrency(10);
    let mut events = worker.events();
    let worker = Background::start(worker);
    for round in 0..3 {
        for payload in round * 10..(round + 1) * 10 {
            // The first pushes after a restart may fail.
            timeout(secs(20), async { while queue.push(payload).id(format!("{payload}")).await.is_err() {} })
                .await
                .unwrap();
        }
        let runs = async {
            while record.payloads().len() < 10 * (round as usize + 1) || (round > 0 && !is_empty_on_redis(&queue).await)
            {
                sleep(ms(10)).await;
            }
        };
        timeout(secs(30), runs).await.expect("every pushed job runs");
        if round < 2 {
            server.kill();
            server.restart();
        }
    }
    assert_eq!(calls.load(Ordering::SeqCst), 10);
    worker.stop().await;
    assert!(is_empty(&queue).await);
    assert_eq!(record.payloads(), (0..30).collect::<Vec<_>>());
    assert_eq!(record.attempts(), [1; 30]);
    let (mut lost, mut done) = (0, 0);
    while let Some(event) = events.next().await {
        match event {
            Event::LeaseLost { .. } => lost += 1,
            Event::Done { .. } => done += 1,
            Event::Started { .. } | Event::StoreFailed { .. } | Event::StoreWorks => {}
            event => panic!("{event:?}"),
        }
    }
    assert_eq!((lost, done), (10, 20));
}

/// The first calls after a restart may fail.
async fn is_empty_on_redis(queue: &DelayQueue<u32>) -> bool {
    queue.counts().await.is_ok_and(|counts| counts.waiting + counts.running == 0)
}

#[tokio::test(start_paused = true)]
async fn many_schedulers_push_one_job_per_occurrence() {
    let queue = queue(MemoryBackend::new());
    let record = Record::new();
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), record.service()));
    let schedule = Schedule::cron("hourly", "0 * * * *").unwrap();
    let mut schedulers = tokio::task::JoinSet::new();
    for late in 0..5 {
        let (queue, schedule) = (queue.clone(), schedule.clone());
        schedulers.spawn(async move {
            // The system time does not advance with the paused clock. A scheduler that starts later is behind by as much, and pushes an
            // occurrence whose job is done and forgotten.
            sleep(secs(late * 800)).await;
            Recurring::new(queue, schedule, |_| 7).run().await;
        });
    }
    sleep(secs(24 * 3_600)).await;
    assert_eq!(record.payloads(), [7; 24]);
    assert!(record.times().windows(2).all(|times| times[1] - times[0] > secs(3_599)));
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
    drop(schedulers);
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn distant_occurrence_is_pushed_once_it_is_near() {
    let queue = queue(MemoryBackend::new());
    let date = std::time::SystemTime::now() + Due::MAX_DELAY + secs(3_600);
    let date = jiff::Timestamp::try_from(date).unwrap().strftime("%S %M %H %d %m * %Y").to_string();
    let schedule = Schedule::cron("once", &date).unwrap();
    let scheduler = tokio::spawn(Recurring::new(queue.clone(), schedule, |_| 7).run());
    sleep(secs(60)).await;
    assert_eq!(queue.counts().await.unwrap().waiting, 0);
    sleep(secs(4 * 3_600)).await;
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
    scheduler.abort();
}

#[tokio::test(start_paused = true)]
async fn missed_occurrences_are_pushed_once() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    let (faulty, queue) = (queue(store), queue(backend));
    let schedule = Schedule::cron("minutely", "* * * * *").unwrap();
    faults.fail(Failure::Unavailable);
    let scheduler = tokio::spawn(Recurring::new(faulty, schedule, |_| 7).run());
    sleep(secs(3_600)).await;
    faults.heal();
    sleep(secs(10)).await;
    let counts = queue.counts().await.unwrap();
    assert!((1..=2).contains(&counts.due) && counts.waiting <= 3, "{counts:?}");
    scheduler.abort();
}

/// If the clock of the pushes is ahead of the clock that retires the schedule, more occurrences than the next one have jobs.
#[tokio::test(start_paused = true)]
async fn retired_schedule_leaves_no_job_of_a_fast_clock() {
    let queue = queue(MemoryBackend::new());
    let schedule = Schedule::cron("minutely", "* * * * *").unwrap();
    let now = std::time::SystemTime::now();
    let times = std::iter::successors(schedule.next_after(now), |time| schedule.next_after(*time));
    // Without the first occurrence, which may become due during the test.
    for time in times.skip(1).take(30) {
        let since = time.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
        queue.push(7).id(format!("minutely@{}", since.as_secs())).at(time).await.unwrap();
    }
    assert_eq!(queue.counts().await.unwrap().waiting, 30);
    // Other jobs stay.
    queue.push(7).id("minutely@another").at(now + secs(60)).await.unwrap();
    let retire = || Recurring::new(queue.clone(), schedule.clone(), |_| 7).retire();
    assert!(retire().await.unwrap());
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
    assert!(!retire().await.unwrap());
}

/// The job is due by the clock of the store, which may be ahead of the clock that retires the schedule.
#[tokio::test(start_paused = true)]
async fn retired_schedule_lets_a_running_job_finish() {
    let queue = queue(MemoryBackend::new());
    let done = Arc::new(AtomicUsize::new(0));
    let worker = DelayQueueWorker::new(queue.clone(), sleeper(&done));
    let events = worker.events();
    let worker = Background::start(worker);
    let schedule = Schedule::cron("minutely", "* * * * *").unwrap();
    let second = schedule.next_after(schedule.next_after(std::time::SystemTime::now()).unwrap()).unwrap();
    let since = second.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
    queue.push(60).id(format!("minutely@{}", since.as_secs())).await.unwrap();
    sleep(secs(1)).await;
    assert_eq!(queue.counts().await.unwrap().running, 1);
    assert!(!Recurring::new(queue.clone(), schedule, |_| 7).retire().await.unwrap(), "none waits");
    sleep(secs(61)).await;
    worker.stop().await;
    assert_eq!(names_of(events).await, ["started", "done"]);
}

#[tokio::test(start_paused = true)]
async fn schedule_is_retired_by_the_clock_of_its_pushes() {
    let queue = queue(MemoryBackend::new());
    let recurring = || Recurring::new(queue.clone(), Schedule::cron("daily", "0 0 * * *").unwrap(), |_| 7);
    let (pushing, retiring) = (recurring(), recurring());
    // The system time does not advance with the paused clock.
    pushing.run_until(sleep(secs(49 * 3_600))).await;
    let before = queue.counts().await.unwrap();
    assert!(before.due >= 2 && before.waiting == before.due + 1, "{before:?}");
    assert!(retiring.retire().await.unwrap());
    // Jobs that were due stay.
    let after = queue.counts().await.unwrap();
    assert_eq!((after.waiting, after.due), (before.due, before.due));
}

#[tokio::test(start_paused = true)]
async fn recurring_jobs_match_and_leave_with_their_schedule() {
    let queue = queue(MemoryBackend::new());
    let hourly = || Schedule::cron("hourly", "0 * * * *").unwrap();
    let urgent = |push: Push| push.priority(Priority::High).max_attempts(3).header("from", "cron").id("another");
    Recurring::new(queue.clone(), hourly(), |_| 7).push_with(urgent).run_until(sleep(secs(1))).await;
    let jobs = queue.list(State::Waiting, 0, 10).await.unwrap();
    let [job] = jobs.as_slice() else { panic!("{jobs:?}") };
    assert_eq!((job.priority, job.max_attempts, job.headers.get("from")), (Priority::High, 3, Some("cron")));
    let since = job.due_at.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(job.id, JobId::from(format!("hourly@{}", since.as_secs())));

    let retire = || Recurring::new(queue.clone(), hourly(), |_| 7).retire();
    assert!(retire().await.unwrap() && is_empty(&queue).await);
    assert!(!retire().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn cancelled_occurrence_is_not_pushed_again() {
    let queue = queue(MemoryBackend::new());
    let recurring = || Recurring::new(queue.clone(), Schedule::cron("yearly", "0 0 1 1 *").unwrap(), |_| 7);
    recurring().run_until(sleep(secs(1))).await;
    let jobs = queue.list(State::Waiting, 0, 10).await.unwrap();
    assert_eq!(jobs.len(), 1);
    assert_eq!(queue.cancel(jobs[0].id).await.unwrap(), Cancelled::Removed);
    recurring().run_until(sleep(secs(1))).await;
    assert!(is_empty(&queue).await);
    // Until its unique key is released.
    assert!(queue.release_unique(jobs[0].id.as_str()).await.unwrap());
    recurring().run_until(sleep(secs(1))).await;
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
}

/// The payload of a panic. Its drop panics too.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        std::panic::panic_any("the payload of a panic is dropped");
    }
}

/// Panics with a [`Bomb`] in the future of the service, or in the text of its error.
async fn panic_somewhere(job: Job<u32>) -> Result<(), Explosive> {
    match *job {
        2 => std::panic::panic_any(Bomb),
        3 => Err(Explosive),
        _ => Ok(()),
    }
}

#[derive(Debug)]
struct Explosive;

impl fmt::Display for Explosive {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::panic::panic_any(Bomb)
    }
}

impl std::error::Error for Explosive {}

#[tokio::test(start_paused = true)]
async fn worker_survives_panic_payloads_whose_drop_panics() {
    let queue = queue(MemoryBackend::new());
    let done = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&done);
    let service = service_fn(move |job: Job<u32>| {
        if *job == 1 && job.attempt() == 1 {
            std::panic::panic_any(Bomb);
        }
        let (noted, is_first) = (Arc::clone(&noted), job.attempt() == 1);
        async move {
            if is_first {
                panic_somewhere(job).await?;
            }
            noted.fetch_add(1, Ordering::SeqCst);
            Ok::<_, Explosive>(())
        }
    });
    let worker = Background::start(DelayQueueWorker::new(queue.clone(), service).backoff(Backoff::fixed(secs(1))));
    for job in 1..=4 {
        queue.push(job).await.unwrap();
    }
    sleep(secs(10)).await;
    assert!(is_empty(&queue).await);
    worker.stop().await;
    assert_eq!(done.load(Ordering::SeqCst), 4);

    // A panic in `poll_ready` ends the worker with an error.
    #[derive(Clone)]
    struct Asked;
    impl Service<Job<u32>> for Asked {
        type Response = ();
        type Error = Infallible;
        type Future = Ready<Result<(), Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            std::panic::panic_any(Bomb)
        }

        fn call(&mut self, _: Job<u32>) -> Self::Future {
            ready(Ok(()))
        }
    }
    queue.push(5).await.unwrap();
    let error = DelayQueueWorker::new(queue, Asked).run().await.unwrap_err();
    assert!(matches!(error, WorkerError::Service(_)), "{error:?}");
}

/// An error whose drop panics.
#[derive(Debug)]
struct Fused(#[expect(dead_code)] Option<Fuse>);

#[derive(Debug)]
struct Fuse;

impl Drop for Fuse {
    fn drop(&mut self) {
        std::panic::panic_any(Bomb)
    }
}

impl fmt::Display for Fused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("fused")
    }
}

impl std::error::Error for Fused {}

/// Regression: a job had ended when its worker was dropped. Its unread result panicked in its drop, and the panic reached the caller.
#[tokio::test(start_paused = true)]
async fn dropped_worker_drops_answers_whose_drop_panics() {
    for panics in [false, true] {
        let queue = queue(MemoryBackend::new());
        let since = Arc::new(Notify::new());
        let noted = Arc::clone(&since);
        let service = service_fn(move |_: Job<u32>| {
            let noted = Arc::clone(&noted);
            async move {
                noted.notify_one();
                sleep(secs(1)).await;
                if panics { std::panic::panic_any(Bomb) } else { Err::<(), _>(Fused(Some(Fuse))) }
            }
        });
        queue.push(1).await.unwrap();
        let mut worker = Box::pin(DelayQueueWorker::new(queue, service).run());
        tokio::select! {
            _ = &mut worker => unreachable!("the worker runs until it is dropped"),
            () = since.notified() => {}
        }
        sleep(secs(2)).await;
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(worker)));
        assert!(dropped.is_ok(), "panics: {panics}");
    }
}

#[tokio::test(start_paused = true)]
async fn worker_survives_panics_of_cancelled_jobs() {
    let queue = queue(MemoryBackend::new());
    let service = service_fn(async |job: Job<u32>| {
        if *job < 3 {
            job.cancellation().cancelled().await;
        }
        match *job {
            1 => std::panic::panic_any(Bomb),
            2 => Err(Fused(Some(Fuse))),
            _ => Ok(()),
        }
    });
    let worker = DelayQueueWorker::new(queue.clone(), service).lease(secs(3)).abort_after(secs(20));
    let events = worker.events();
    let worker = Background::start(worker);
    for job in 1..=2_u32 {
        queue.push(job).id(job.to_string()).await.unwrap();
    }
    sleep(secs(1)).await;
    for job in 1..=2_u32 {
        assert_eq!(queue.cancel(job.to_string()).await.unwrap(), Cancelled::Notified);
    }
    sleep(secs(3)).await;
    queue.push(3).await.unwrap();
    sleep(secs(1)).await;
    assert!(is_empty(&queue).await);
    worker.stop().await;
    assert_eq!(names_of(events).await, ["started", "started", "cancelled", "cancelled", "started", "done"]);
}

#[tokio::test(start_paused = true)]
async fn job_pushed_after_a_cancellation_runs_after_the_old_run() {
    let queue = queue(MemoryBackend::new());
    let runs = Record::new();
    // The job ignores its cancellation.
    let service = runs.service_with(|_| sleep(secs(4)));
    let worker = DelayQueueWorker::new(queue.clone(), service).lease(secs(9)).abort_after(secs(20));
    let worker = Background::start(worker);
    queue.push(1).id("a").unique("key").await.unwrap();
    sleep(secs(1)).await;
    assert_eq!(queue.cancel("a").await.unwrap(), Cancelled::Notified);
    assert!(queue.push(2).id("a").unique("key").await.unwrap().is_new());
    sleep(secs(1)).await;
    assert_eq!(queue.get("a").await.unwrap().unwrap().state, State::Waiting);
    assert_eq!(runs.payloads(), [1]);
    sleep(secs(8)).await;
    assert_eq!(runs.payloads(), [1, 2]);
    assert!(runs.times()[1] >= secs(4), "{:?}", runs.times());
    assert!(runs.times()[1] < secs(4) + ms(100), "{:?}", runs.times());
    assert!(is_empty(&queue).await);
    worker.stop().await;
}

/// With a low concurrency, jobs that wait in a rate limit run by priority and due time, at the full rate.
#[tokio::test(start_paused = true)]
async fn waiting_rate_limit_keeps_the_order_of_jobs() {
    let backend = MemoryBackend::new();
    let queue = queue(backend.clone());
    let jobs = queue.push_all((0..100).map(|i| queue.push(i).at(std::time::UNIX_EPOCH + secs(u64::from(i))))).await;
    assert!(jobs.iter().all(Result::is_ok));
    // Jobs with a due time in the past run in the order of their ids.
    let runs = Record::new();
    let limit = Policy::new("mails", Quota::per_second(2).token_bucket());
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(backend, limit).wait(secs(10)).responder(JobResponder))
        .service(runs.service());
    let worker = DelayQueueWorker::new(queue.clone(), service).concurrency(2);
    let events = worker.events();
    let worker = Background::start(worker);
    let pushed_at = [secs(5), secs(12), secs(20)];
    for (number, at) in pushed_at.into_iter().enumerate() {
        tokio::time::sleep_until(runs.since + at).await;
        queue.push(1_000 + number as u32).priority(Priority::High).await.unwrap();
    }
    tokio::time::sleep_until(runs.since + secs(30)).await;
    let seen = runs.runs.lock().unwrap().clone();
    for (number, at) in pushed_at.into_iter().enumerate() {
        let time = seen.iter().find(|(payload, ..)| *payload == 1_000 + number as u32).unwrap().2;
        assert!(time <= at + ms(1_500), "pushed at {at:?}, and ran at {time:?}");
    }
    assert!(seen.len() >= 60, "{} in 30 s", seen.len());
    worker.stop().await;
    assert!(!names_of(events).await.contains(&"snoozed"));
}
