//! Redis that works, that is down, and that does not answer.

use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::time::sleep;
use tollgate::rate_limit::store::RateLimitStore;
use tollgate::{AnyBackend, DelayQueue, Key, Locks, RedisBackend};

use super::{ms, pay, pay_and_disconnect, payments, policy, queue, refund, secs, start_worker};
use crate::support::server::RedisServer;

async fn job_runs(queue: &DelayQueue<u64>) {
    while queue.counts().await.unwrap().running == 0 {
        sleep(ms(5)).await;
    }
}

#[tokio::test]
async fn redis_backend_waits_for_every_kind() {
    let server = RedisServer::start();
    let backend = AnyBackend::from(RedisBackend::connect(server.url()).await.unwrap());
    let queue = queue(backend.clone());
    let (done, worker) = start_worker(&queue);
    queue.push(2_000).await.unwrap();
    let locks = Locks::new(backend.clone(), "orders").deadline(secs(5));
    let lease = locks.lock("42").await.unwrap();
    refund(backend.clone()).await;
    let service = payments(backend.clone(), ms(500));
    pay_and_disconnect(service.clone()).await;
    job_runs(&queue).await;
    let holder = async {
        sleep(ms(300)).await;
        drop(lease);
    };
    let (report, ()) = tokio::join!(backend.shutdown(secs(20)), holder);
    assert!(report.is_clean(), "{report}");
    worker.await.unwrap();
    assert_eq!(done.load(Ordering::SeqCst), 1);
    assert_eq!(queue.counts().await.unwrap().running, 0, "the result of the job is recorded");
    assert_eq!(backend.peek(&policy(), &Key::GLOBAL, 1).await.unwrap().remaining(), Some(10));
    assert_eq!(pay(service).await, http::StatusCode::SERVICE_UNAVAILABLE);
    assert!(locks.lock("42").await.is_err());
    // Locks of another connection to the same server stay open.
    let other = RedisBackend::connect(server.url()).await.unwrap();
    Locks::new(other, "orders").deadline(secs(5)).lock("42").await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn shutdown_ends_within_its_deadline_without_redis() {
    for is_killed in [true, false] {
        let mut server = RedisServer::start();
        let backend = RedisBackend::connect(server.url()).await.unwrap();
        let queue = queue(backend.clone());
        let _worker = start_worker(&queue);
        queue.push(60_000).await.unwrap();
        let locks = Locks::new(backend.clone(), "orders").deadline(secs(5));
        let lease = locks.lock("42").await.unwrap();
        pay_and_disconnect(payments(backend.clone(), secs(60))).await;
        job_runs(&queue).await;
        if is_killed {
            server.kill();
        } else {
            server.pause();
        }
        drop(lease);
        let start = Instant::now();
        let report = backend.shutdown(secs(2)).await;
        let time = start.elapsed();
        assert!((secs(2)..secs(3)).contains(&time), "{time:?}");
        let counts = (report.workers, report.jobs, report.leases, report.handlers);
        assert_eq!(counts, (1, 1, 1, 1), "{report}");
        if !is_killed {
            server.resume();
        }
    }
}
