//! The contract of the administration of operations, on memory, on one Redis server and on a cluster.

use crate::support;

use std::error::Error as _;
use std::time::{Duration, Instant};

use support::cluster::Cluster;
use support::server::RedisServer;
use support::shared::{Shared, connect, patient};
use tollgate::idempotency::store::{Begun, Claim, Digest, IdempotencyRegistry, IdempotencyStore};
use tollgate::idempotency::{IdempotencyAdmin, Operation, OperationState, OperationStatus, StoredResponse};
use tollgate::lock::Cursor;
use tollgate::lock::store::Token;
use tollgate::testing::FaultStore;
use tollgate::{ConfigError, MemoryBackend};

const LONG: Duration = Duration::from_secs(60);

fn claim() -> Claim {
    let (token, head) = (Token::random().unwrap(), Digest::default());
    Claim::new(token, head, LONG, LONG)
}

fn answer() -> StoredResponse {
    StoredResponse::of_operation("x")
}

mod memory {
    use super::*;

    tollgate::idempotency_registry_contract!(
        #[tokio::test(start_paused = true)]
        async {
            MemoryBackend::new()
        }
    );
}

mod any {
    tollgate::idempotency_registry_contract!(
        #[tokio::test(start_paused = true)]
        async {
            tollgate::connect("memory:").await.unwrap()
        }
    );
}

mod behind_a_fault_store {
    use super::*;

    tollgate::idempotency_registry_contract!(
        #[tokio::test(start_paused = true)]
        async {
            FaultStore::new(MemoryBackend::new())
        }
    );
}

mod redis_server {
    use super::*;

    tollgate::idempotency_registry_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let server = RedisServer::start();
            claim(patient(server.url()).await).await;
            assert!(server.query::<u64>("DBSIZE") > 0);
            server.every_key_expires();
        }
    );
}

mod on_a_cluster {
    use super::*;

    static CLUSTER: Shared<Cluster> = Shared::new();

    tollgate::idempotency_registry_contract!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        |claim| {
            let cluster = CLUSTER.get(Cluster::start);
            claim(connect(&cluster.url()).await).await;
            cluster.primaries().into_iter().for_each(|index| cluster.nodes[index].every_key_expires());
        }
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_value_is_an_error_and_is_left_unchanged() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let (operation, another) = (Operation::new("alice", "k"), Operation::new("alice", "l"));
    backend.begin(&another, &claim()).await.unwrap();
    let status = OperationStatus::new(operation, OperationState::Free);
    let unknown = OperationStatus::new(operation, OperationState::Unknown { since: LONG });
    for value in ["hello", ""] {
        let key = "tollgate:2:{idempotency:32}:alice:k:record";
        let _: () = redis::cmd("SET").arg(key).arg(value).query(&mut server.connection()).unwrap();
        let admin = IdempotencyAdmin::new(backend.clone());
        assert!(admin.inspect(&operation).await.unwrap_err().is_foreign_data());
        assert!(admin.forget(&status).await.unwrap_err().is_foreign_data());
        assert!(admin.complete(&unknown, answer()).await.unwrap_err().is_foreign_data());
        let (mut found, mut next) = (Vec::new(), Some(Cursor::default()));
        while let Some(from) = next {
            let page = admin.list(from, 10).await.unwrap();
            found.extend(page.operations.into_iter().map(|status| status.operation));
            next = page.next;
        }
        assert_eq!(found, [another], "the foreign value hides no other operation");
        let still: String = server.query(&format!("GET {key}"));
        assert_eq!(still, value);
    }
}

/// Regression: after a process died, its operation could not be settled until the clock of the store had caught up. Each inspection treated
/// the lease as if it began at that time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clock_set_back_keeps_no_operation_in_flight() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let admin = IdempotencyAdmin::new(backend.clone()).deadline(Duration::from_secs(5));
    let operation = Operation::new("alice", "k");
    let mut short = claim();
    short.lease = Claim::MIN_LEASE;
    backend.begin(&operation, &short).await.unwrap();
    let key = "tollgate:2:{idempotency:32}:alice:k:record";
    let mut record: Vec<u8> = server.query(&format!("GET {key}"));
    // Moves the end of the lease, in µs, one hour ahead.
    let mut ends = [0; 8];
    ends[..7].copy_from_slice(&record[13..20]);
    let ends = u64::from_le_bytes(ends) + 3_600_000_000;
    record[13..20].copy_from_slice(&ends.to_le_bytes()[..7]);
    let mut set = redis::cmd("SET");
    let _: () = set.arg(key).arg(record).arg("KEEPTTL").query(&mut server.connection()).unwrap();

    let look = async || admin.inspect(&operation).await.unwrap().unwrap();
    let unknown = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            match look().await {
                status @ OperationStatus { state: OperationState::Unknown { .. }, .. } => return status,
                OperationStatus { state: OperationState::InFlight { remaining }, .. } => {
                    assert!(remaining <= Claim::MIN_LEASE, "{remaining:?}");
                }
                status => panic!("{status:?}"),
            }
            tokio::time::sleep(Claim::MIN_LEASE).await;
        }
    });
    let unknown = unknown.await.expect("the lease ends");
    assert!(admin.complete(&unknown, answer()).await.unwrap());
    assert_eq!(look().await.state, OperationState::Completed { is_kept: true });
    server.every_key_expires();
}

/// For an operation that was released, and for one of unknown outcome.
#[tokio::test]
async fn clock_set_back_does_not_lower_a_fence() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    for is_released in [false, true] {
        let key = if is_released { "released" } else { "unknown" };
        let operation = Operation::new("alice", key);
        let mut first = claim();
        first.lease = Claim::MIN_LEASE;
        assert!(matches!(backend.begin(&operation, &first).await.unwrap(), Begun::Granted { .. }));
        if is_released {
            IdempotencyStore::release(&backend, &operation, &first).await.unwrap();
        }
        let key = server.query::<Vec<String>>(&format!("KEYS *:alice:{key}:record")).remove(0);
        let mut record: Vec<u8> = server.query(&format!("GET {key}"));
        // As if a clock that is an hour ahead had written the record.
        let mut last_fence = [0; 8];
        last_fence[..7].copy_from_slice(&record[6..13]);
        let last_fence = u64::from_le_bytes(last_fence) + 3_600_000_000;
        record[6..13].copy_from_slice(&last_fence.to_le_bytes()[..7]);
        let mut set = redis::cmd("SET");
        let _: () = set.arg(&key).arg(record).arg("KEEPTTL").query(&mut server.connection()).unwrap();

        let mut next = claim();
        next.takes_over = true;
        let granted = tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                match backend.begin(&operation, &next).await.unwrap() {
                    Begun::Granted { fence, attempt, .. } => return (fence, attempt),
                    Begun::InFlight { .. } => tokio::time::sleep(Claim::MIN_LEASE).await,
                    begun => panic!("{begun:?}"),
                }
            }
        });
        let (fence, attempt) = granted.await.expect("the first lease ends");
        assert!(attempt > 1 && fence > last_fence, "{fence} after {last_fence}, released: {is_released}");
    }
}

#[tokio::test]
async fn admin_calls_end_at_their_deadline() {
    let server = RedisServer::start();
    let backend = patient(server.url()).await;
    let operation = Operation::new("alice", "k");
    backend.begin(&operation, &claim()).await.unwrap();
    let status = backend.inspect(&operation).await.unwrap().unwrap();
    let admin = IdempotencyAdmin::new(backend).deadline(Duration::from_millis(200));
    server.pause();
    let begun = Instant::now();
    assert!(admin.inspect(&operation).await.unwrap_err().is_timeout());
    assert!(admin.forget(&status).await.unwrap_err().is_timeout());
    let mut unknown = status;
    unknown.state = OperationState::Unknown { since: LONG };
    assert!(admin.complete(&unknown, answer()).await.unwrap_err().is_timeout());
    assert!(admin.list(Cursor::default(), 10).await.unwrap_err().is_timeout());
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    server.resume();
}

/// Regression: a zero deadline was detected only on Redis, where every call exceeds it.
#[tokio::test]
async fn zero_deadline_is_rejected_on_any_backend() {
    let admin = IdempotencyAdmin::new(MemoryBackend::new()).deadline(Duration::ZERO);
    let operation = Operation::new("alice", "k");
    let unknown = OperationStatus::new(operation, OperationState::Unknown { since: LONG });
    let errors = [
        admin.inspect(&operation).await.map(drop),
        admin.forget(&unknown).await.map(drop),
        admin.complete(&unknown, answer()).await.map(drop),
        admin.list(Cursor::default(), 10).await.map(drop),
        admin.unknown(Cursor::default(), 10).await.map(drop),
    ];
    for error in errors {
        let cause = error.unwrap_err().source().and_then(|cause| cause.downcast_ref().cloned());
        assert_eq!(cause, Some(ConfigError::ZeroTimeout { setting: "deadline" }));
    }
}
