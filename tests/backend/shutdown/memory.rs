//! Each kind of work on the memory backend, with a paused clock.

use std::future::pending;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};
use tollgate::backend::ShutdownReport;
use tollgate::delay_queue::{Job, Recurring, Schedule};
use tollgate::lock::{Redlock, RwLocks, Semaphore};
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::testing::{Failure, FaultStore};
use tollgate::{
    AnyBackend, BoxError, DelayQueueWorker, DenyCache, Key, LockError, LockLayer, Locks, MemoryBackend, QuotaPrefetch,
};
use tower::service_fn;

use super::{ms, pay, pay_and_disconnect, payments, policy, queue, refund, secs, start_worker};

/// Shuts down, and returns the report and how long it took.
async fn shut_down(backend: &MemoryBackend, seconds: u64) -> (ShutdownReport, Duration) {
    let start = Instant::now();
    (backend.shutdown(secs(seconds)).await, start.elapsed())
}

fn left(change: impl FnOnce(&mut ShutdownReport)) -> ShutdownReport {
    let mut report = ShutdownReport::default();
    change(&mut report);
    report
}

#[tokio::test(start_paused = true)]
async fn worker_ends_after_its_running_jobs() {
    let backend = MemoryBackend::new();
    let queue = queue(backend.clone());
    let (done, worker) = start_worker(&queue);
    queue.push(3_000).await.unwrap();
    sleep(secs(1)).await;
    let (later, shutdown) = tokio::join!(
        async {
            sleep(secs(1)).await;
            queue.push(0).await
        },
        shut_down(&backend, 25),
    );
    later.unwrap();
    assert_eq!((shutdown, done.load(Ordering::SeqCst)), ((ShutdownReport::default(), secs(2)), 1));
    worker.await.unwrap();
    assert_eq!(queue.counts().await.unwrap().waiting, 1, "no job is claimed after the shutdown");
    // A worker that starts afterwards claims nothing either.
    start_worker(&queue).1.await.unwrap();
    assert_eq!(queue.counts().await.unwrap().waiting, 1);
}

#[tokio::test(start_paused = true)]
async fn shutdown_reports_the_jobs_at_its_deadline() {
    let backend = MemoryBackend::new();
    let queue = queue(backend.clone());
    let _worker = start_worker(&queue);
    queue.push(3_000).await.unwrap();
    queue.push(3_000).await.unwrap();
    sleep(secs(1)).await;
    let (report, time) = shut_down(&backend, 1).await;
    let expected = left(|left| (left.workers, left.jobs) = (1, 2));
    assert_eq!((report, time, report.is_clean()), (expected, secs(1), false));
    assert_eq!(report.to_string(), "the shutdown is incomplete: it left 1 running worker, 2 unfinished jobs");
    // A further call waits for the rest.
    let (report, time) = shut_down(&backend, 25).await;
    assert_eq!((report.to_string(), time), ("the shutdown is complete".to_owned(), secs(1)));
}

/// The defaults took 31 s, and Kubernetes kills a process after 30 s.
#[tokio::test(start_paused = true)]
async fn worker_with_its_defaults_ends_within_25_s() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let (queue, faults) = (queue(store.clone()), store.faults());
    queue.push(u64::MAX).await.unwrap();
    let worker = DelayQueueWorker::new(queue.clone(), service_fn(|_: Job<u64>| pending::<Result<(), BoxError>>()));
    let worker = tokio::spawn(worker.run());
    sleep(secs(1)).await;
    faults.fail(Failure::Unavailable);
    let (report, time) = shut_down(&backend, 25).await;
    assert!(time < secs(25), "{time:?}");
    worker.await.unwrap().unwrap();
    assert_eq!(report, left(|left| left.jobs = 1), "the worker has ended without recording the job's release");
}

#[tokio::test(start_paused = true)]
async fn recurring_schedule_ends_with_the_backend() {
    let backend = MemoryBackend::new();
    let queue = queue(backend.clone());
    let schedule = || Schedule::cron("tick", "* * * * * *").unwrap();
    let recurring = tokio::spawn(Recurring::new(queue.clone(), schedule(), |_: SystemTime| 0).run());
    sleep(secs(3)).await;
    assert_eq!(shut_down(&backend, 25).await, (ShutdownReport::default(), secs(0)));
    recurring.await.unwrap();
    let pushed = queue.counts().await.unwrap().waiting;
    assert!(pushed >= 3, "{pushed}");
    Recurring::new(queue.clone(), schedule(), |_: SystemTime| 0).run().await;
    assert_eq!(queue.counts().await.unwrap().waiting, pushed);
}

#[tokio::test(start_paused = true)]
async fn locks_grant_nothing_and_leases_are_awaited() {
    let backend = MemoryBackend::new();
    let locks = Locks::new(backend.clone(), "orders");
    let semaphore = Semaphore::new(backend.clone(), "slots", 2);
    let (lease, permit) = (locks.lock("42").await.unwrap(), semaphore.acquire("a").await.unwrap());
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock("42").wait(secs(60)).await }
    });
    sleep(ms(10)).await;
    let (report, time) = shut_down(&backend, 1).await;
    assert_eq!((report, time), (left(|left| left.leases = 2), secs(1)));
    assert!(matches!(waiter.await.unwrap(), Err(LockError::Closed(_))));
    let holder = async {
        sleep(secs(2)).await;
        drop((lease, permit));
    };
    let ((), end) = tokio::join!(holder, shut_down(&backend, 25));
    assert_eq!(end, (ShutdownReport::default(), secs(2)));
    // Locks of every kind, made before or afterwards, are closed.
    assert!(matches!(locks.lock("43").await, Err(LockError::Closed(_))));
    assert!(matches!(Locks::new(backend.clone(), "new").lock("1").await, Err(LockError::Closed(_))));
    assert!(matches!(RwLocks::new(backend.clone(), "new").read("1").await, Err(LockError::Closed(_))));
    assert!(matches!(semaphore.acquire("b").await, Err(LockError::Closed(_))));
}

#[tokio::test(start_paused = true)]
async fn corrections_of_wrapped_stores_are_awaited() {
    let backend = MemoryBackend::new();
    let store = FaultStore::new(backend.clone());
    let faults = store.faults();
    faults.delay(secs(2));
    refund(DenyCache::new(QuotaPrefetch::new(store))).await;
    assert_eq!(backend.peek(&policy(), &Key::GLOBAL, 1).await.unwrap().remaining(), Some(9));
    let (report, time) = shut_down(&backend, 1).await;
    assert_eq!((report, time), (left(|left| left.corrections = 1), secs(1)));
    assert_eq!(shut_down(&backend, 25).await, (ShutdownReport::default(), secs(1)));
    assert_eq!(backend.peek(&policy(), &Key::GLOBAL, 1).await.unwrap().remaining(), Some(10));
}

#[tokio::test(start_paused = true)]
async fn detached_handlers_are_awaited_and_new_ones_rejected() {
    let backend = MemoryBackend::new();
    let service = payments(backend.clone(), secs(3));
    pay_and_disconnect(service.clone()).await;
    let (report, time) = shut_down(&backend, 1).await;
    assert_eq!((report, time), (left(|left| left.handlers = 1), secs(1)));
    assert_eq!(pay(service.clone()).await, http::StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(shut_down(&backend, 25).await, (ShutdownReport::default(), secs(2)));
}

#[tokio::test(start_paused = true)]
async fn all_kinds_are_awaited_at_the_same_time() {
    let backend = MemoryBackend::new();
    let any = AnyBackend::from(backend.clone());
    let queue = queue(any.clone());
    let (_, worker) = start_worker(&queue);
    queue.push(3_000).await.unwrap();
    let lease = Locks::new(any.clone(), "orders").lock("42").await.unwrap();
    pay_and_disconnect(payments(any.clone(), secs(3))).await;
    let holder = async {
        sleep(secs(3)).await;
        drop(lease);
    };
    let start = Instant::now();
    let (report, ()) = tokio::join!(any.shutdown(secs(25)), holder);
    assert!(report.is_clean(), "{report}");
    assert!(start.elapsed() <= secs(3), "{:?}", start.elapsed());
    worker.await.unwrap();
}

/// The job failed, and the attempt counted, although only its lock was refused.
#[tokio::test(start_paused = true)]
async fn job_with_a_refused_lock_is_snoozed() {
    let backend = MemoryBackend::new();
    let (queue, locks) = (queue(backend.clone()), Locks::new(backend.clone(), "orders"));
    let service = service_fn(move |_: Job<u64>| {
        let locks = locks.clone();
        async move {
            sleep(secs(1)).await;
            drop(locks.lock("42").await?);
            Ok::<_, BoxError>(())
        }
    });
    tokio::spawn(DelayQueueWorker::new(queue.clone(), service).run());
    let id = *queue.push(0).await.unwrap().id();
    sleep(ms(500)).await;
    assert!(backend.shutdown(secs(25)).await.is_clean());
    assert_eq!(queue.get(id).await.unwrap().unwrap().attempt, 0);
}

#[tokio::test(start_paused = true)]
async fn shutdown_of_one_backend_closes_a_redlock() {
    let backends = [(); 3].map(|()| MemoryBackend::new());
    let locks = Locks::new(Redlock::new(backends.clone()).unwrap(), "orders");
    drop(locks.lock("42").await.unwrap());
    assert!(backends[1].shutdown(secs(25)).await.is_clean());
    assert!(matches!(locks.lock("42").await, Err(LockError::Closed(_))));
}

#[tokio::test(start_paused = true)]
async fn dropped_owners_and_other_backends_are_not_awaited() {
    let (backend, other) = (MemoryBackend::new(), MemoryBackend::new());
    let locks = Locks::new(other, "orders");
    let _lease = locks.lock("42").await.unwrap();
    drop(LockLayer::new(backend.clone(), "layer"));
    drop(DelayQueueWorker::new(queue(backend.clone()), service_fn(async |_: Job<u64>| Ok::<_, BoxError>(()))));
    assert_eq!(shut_down(&backend, 25).await, (ShutdownReport::default(), secs(0)));
    drop(locks.lock("43").await.unwrap());
    // Limits go on after the shutdown.
    refund(backend.clone()).await;
    assert_eq!(shut_down(&backend, 25).await, (ShutdownReport::default(), secs(0)));
}
