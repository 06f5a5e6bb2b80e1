//! Locks by the majority of three servers: the contract, as far as it applies, and servers that are killed, stopped and restarted.

use crate::support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::locks::History;
use support::proxy::{Proxy, Traffic};
use support::server::{DURABLE, RedisServer};
use support::shared::patient;
use support::stores::delegate_lock;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use tollgate::lock::store::{Acquired, Claim, LockStore, Released, Token};
use tollgate::lock::{Cursor, LeaseState, LockAdmin, LockKey, LossReason, Redlock, ReleaseOutcome, RwLocks, Semaphore};
use tollgate::testing::{Failure, FaultStore};
use tollgate::{
    ConfigError, GlobalKey, Lease, LockError, LockLayer, Locks, MemoryBackend, Reach, RedisBackend, StoreError,
};

const LONG: Duration = Duration::from_secs(30);

/// The contract tests that hold for a majority. Tests of queues are left out, and the test that each race has a winner.
macro_rules! claims {
    (@each $attributes:tt $store:tt $($name:ident)*) => {
        $(claims! { @test $attributes $store $name })*
    };
    (@test [$($attributes:tt)*] [$store:expr] $name:ident) => {
        $($attributes)*
        async fn $name() {
            let (_keep, store) = $store.await;
            tollgate::testing::lock_contract::$name(store).await;
        }
    };
    (#[$attribute:meta] $store:expr) => {
        claims! { @each [#[$attribute]] [$store]
            free_lock_is_granted_and_held_lock_is_not
            keys_and_names_are_separate_locks
            acquisition_can_be_repeated
            fences_rise_with_every_grant
            lease_expires
            renewal_extends_a_lease
            ended_lease_cannot_be_renewed
            many_leases_are_renewed_in_one_call
            only_the_holder_releases_a_lease
            any_bytes_are_a_lock_key
            release_wakes_watchers
            one_at_a_time_with_rising_fences
            waiter_gets_the_released_lock
            wait_ends_in_time
            waiter_gets_the_lock_of_a_dead_holder
            waiters_are_served_in_order
            wait_queue_is_bounded
            held_lease_is_renewed
            second_handle_keeps_the_lock
            max_hold_ends_a_lease
            run_drops_its_body_if_the_lease_is_lost
            invalid_times_are_refused_by_name
            shutdown_waits_for_held_leases
            any_free_segment_is_granted
            several_locks_are_taken_all_or_none
        }
    };
}

mod in_memory {
    use super::*;

    claims!(
        #[tokio::test(start_paused = true)]
        async {
            ((), Redlock::new([(); 3].map(|()| MemoryBackend::new())).unwrap())
        }
    );
}

mod on_three_servers {
    use super::*;

    claims!(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async {
            let servers = [(); 3].map(|()| RedisServer::start());
            let mut backends = Vec::new();
            for server in &servers {
                backends.push(patient(server.url()).await);
            }
            let store = Redlock::new(backends).unwrap();
            (servers, store)
        }
    );
}

async fn connect(servers: &[RedisServer]) -> Redlock<RedisBackend> {
    let mut backends = Vec::new();
    for server in servers {
        backends.push(RedisBackend::connect(server.url()).await.unwrap());
    }
    Redlock::new(backends).unwrap()
}

async fn locks(servers: &[RedisServer]) -> Locks {
    Locks::new(connect(servers).await, "default").deadline(Duration::from_millis(500))
}

/// A lease from all servers. A lease from only two servers depends on both of them.
async fn lease_of_all(locks: &Locks, servers: &[RedisServer]) -> Lease {
    let start = Instant::now();
    loop {
        let lease = locks.lock("a").await.unwrap();
        // The holder's token is at the end of the value.
        let token = |server: &RedisServer| {
            let value: Vec<u8> = server.query("GET tollgate:2:{lock:default:a}:lease");
            value.get(8 + 18..).map(<[u8]>::to_vec)
        };
        let tokens: Vec<_> = block_in_place(|| servers.iter().map(token).collect());
        if tokens.iter().all(|token| token.is_some() && *token == tokens[0]) {
            return lease;
        }
        assert!(start.elapsed() < LONG, "some servers never grant the lease");
        // On failure the release continues in the background.
        let _ = lease.release().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_work_while_a_minority_is_killed_or_stopped() {
    let mut servers = [(); 3].map(|()| RedisServer::start_with(DURABLE));
    let ttl = Duration::from_secs(2);
    let (here, there) = (locks(&servers).await.ttl(ttl), locks(&servers).await.ttl(ttl));
    for (down, is_killed) in [(0, true), (1, false), (2, true)] {
        let lease = lease_of_all(&here, &servers).await;
        if is_killed {
            block_in_place(|| servers[down].kill());
        } else {
            servers[down].pause();
        }
        let held = Instant::now();
        while held.elapsed() < ttl * 3 / 2 {
            assert!(lease.check().is_ok(), "{:?} after {:?}", lease.state(), held.elapsed());
            let answer = there.try_lock("a").await;
            assert!(answer.is_err(), "{answer:?} while {down} is down");
            sleep(ttl / 10).await;
        }
        let fence = lease.fence();
        assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
        let start = Instant::now();
        let other = there.lock("a").await.unwrap();
        assert!(start.elapsed() < ttl, "{:?}", start.elapsed());
        assert!(other.fence() > fence);
        if is_killed {
            block_in_place(|| servers[down].restart());
        } else {
            servers[down].resume();
        }
        assert_eq!(other.release().await.unwrap(), ReleaseOutcome::Released);
    }
    for locks in [here, there] {
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_leases_end_and_none_is_granted() {
    let mut servers = [(); 3].map(|()| RedisServer::start_with(DURABLE));
    let ttl = Duration::from_secs(2);
    let locks = locks(&servers).await.ttl(ttl).wait(Duration::ZERO);
    let lease = locks.lock("a").await.unwrap();
    block_in_place(|| servers[0].kill());
    servers[1].pause();
    let stopped = Instant::now();
    assert!(matches!(locks.lock("b").await, Err(LockError::Store(_))));
    assert_eq!(timeout(LONG, lease.lost()).await.unwrap().reason(), LossReason::Expired);
    // Renewals come every third of the lease. A renewal that counted without a majority would extend the lease beyond this bound.
    assert!(stopped.elapsed() < ttl * 5 / 4, "{:?}", stopped.elapsed());
    assert_eq!(lease.state(), LeaseState::Lost);
    block_in_place(|| servers[0].restart());
    servers[1].resume();
    let start = Instant::now();
    // The grant of the remaining server blocks no client.
    for key in ["a", "b"] {
        drop(locks.lock(key).wait(LONG).await.unwrap());
    }
    assert!(start.elapsed() < ttl * 2, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn refused_claim_is_released_where_it_was_granted() {
    let backends = [(); 5].map(|()| MemoryBackend::new());
    let stores = Redlock::new(backends.clone().map(FaultStore::new)).unwrap();
    let lock = LockKey::new("default", "a");
    let claim = |ttl_ms| Claim::new(Token::random().unwrap(), Duration::from_millis(ttl_ms));
    for (backend, ttl_ms) in backends[..3].iter().zip([30_000, 40_000, 50_000]) {
        assert!(matches!(backend.acquire(&lock, &claim(ttl_ms)).await.unwrap(), Acquired::Granted { .. }));
    }
    let answer = stores.acquire(&lock, &claim(1_000)).await.unwrap();
    // Three of five stores are free once the first of the three leases has ended.
    assert_eq!(answer, Acquired::Busy { remaining: Duration::from_secs(30) });
    assert_eq!([1, 1, 1, 0, 0], [0, 1, 2, 3, 4].map(|i: usize| backends[i].locks()));
    // No client has a majority, and two free stores are too few. The caller may retry soon, but not at once.
    tokio::time::advance(Duration::from_secs(35)).await;
    let more = claim(60_000);
    backends[3].acquire(&lock, &more).await.unwrap();
    let answer = stores.acquire(&lock, &claim(1_000)).await.unwrap();
    assert!(matches!(answer, Acquired::Busy { remaining } if remaining > Duration::ZERO), "{answer:?}");
    backends[3].release(&lock, &more.token).await.unwrap();
    assert!(matches!(stores.acquire(&lock, &claim(1_000)).await.unwrap(), Acquired::Granted { .. }));
}

/// A store that records the tokens that were released.
#[derive(Clone, Default)]
struct Recorder {
    inner: MemoryBackend,
    given_back: Arc<Mutex<HashSet<Token>>>,
    attempts: Arc<AtomicUsize>,
}

impl LockStore for Recorder {
    delegate_lock!(inner: acquire_all, renew, watch);

    async fn acquire(&self, lock: &LockKey, claim: &Claim) -> Result<Acquired, StoreError> {
        assert!(
            !self.given_back.lock().unwrap().contains(&claim.token),
            "a late release of this token may still arrive"
        );
        self.attempts.fetch_add(1, Ordering::Relaxed);
        self.inner.acquire(lock, claim).await
    }

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        self.given_back.lock().unwrap().insert(*token);
        LockStore::release(&self.inner, lock, token).await
    }

    /// Passes for a remote store.
    fn reach(&self) -> Reach {
        Reach::Redis
    }
}

/// Regression: a stopped server executed a release late, after the next attempt had got the lock with the same token. The holder relied on
/// a lease that two of three servers no longer had.
#[tokio::test(start_paused = true)]
async fn released_token_is_not_used_again() {
    let stores = [(); 3].map(|()| Recorder::default());
    let locks = Locks::new(Redlock::new(stores.clone()).unwrap(), "default");
    let other = Claim::new(Token::random().unwrap(), Duration::from_millis(500));
    let lock = LockKey::new("default", "a");
    for store in &stores[..2] {
        store.inner.acquire(&lock, &other).await.unwrap();
    }
    let lease = locks.lock("a").wait(LONG).await.unwrap();
    assert!(stores.iter().all(|store| store.attempts.load(Ordering::Relaxed) > 1));
    assert_eq!(lease.release().await.unwrap(), ReleaseOutcome::Released);
    locks.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn store_errors_differ_from_busy_locks() {
    let backends = [(); 3].map(|()| FaultStore::new(MemoryBackend::new()));
    let faults = backends.clone().map(|backend| backend.faults());
    let locks = Locks::new(Redlock::new(backends).unwrap(), "default").wait(Duration::ZERO);
    faults[0].fail(Failure::Unavailable);
    let lease = locks.lock("a").await.unwrap();
    faults[1].fail(Failure::Unavailable);
    let other = Locks::new(Redlock::new([(); 3].map(|()| MemoryBackend::new())).unwrap(), "default");
    assert!(matches!(locks.lock("b").await, Err(LockError::Store(error)) if error.is_unavailable()));
    assert!(lease.release().await.is_err());
    faults.iter().for_each(tollgate::testing::Faults::heal);
    faults[2].hang();
    let start = tokio::time::Instant::now();
    drop(locks.lock("c").await.unwrap());
    assert!(start.elapsed() < Duration::from_millis(50), "the call waits for the hanging store");
    faults[2].heal();
    for locks in [locks, other] {
        timeout(LONG, locks.shutdown()).await.expect("nothing is left");
    }
}

/// Regression: grants without a majority were released key by key, each time with a wait for the silent store. The deadline passed, and a
/// lock of another client was reported as a store error.
#[tokio::test(start_paused = true)]
async fn lock_all_is_busy_while_one_store_hangs() {
    let backends = [(); 3].map(|()| MemoryBackend::new());
    let stores = backends.clone().map(FaultStore::new);
    stores[2].faults().hang();
    let locks = Locks::new(Redlock::new(stores).unwrap(), "default").wait(Duration::ZERO);
    let other = Claim::new(Token::random().unwrap(), LONG);
    for is_held_by in [&backends[..2], &backends[..1]] {
        for backend in is_held_by {
            backend.acquire(&LockKey::new("default", 7_u64), &other).await.unwrap();
        }
        for _ in 0..10 {
            let error = locks.lock_all(0..12_u64).await.unwrap_err();
            assert!(error.is_busy(), "{error:?}");
        }
        for backend in is_held_by {
            backend.release(&LockKey::new("default", 7_u64), &other.token).await.unwrap();
            assert_eq!(backend.locks(), 0);
        }
    }
    drop(locks.lock_all(0..12_u64).await.unwrap());
}

/// A store that passes for one on another machine.
struct Remote(FaultStore<MemoryBackend>);

impl LockStore for Remote {
    delegate_lock!(0: acquire, acquire_all, renew, release, watch);

    fn reach(&self) -> Reach {
        Reach::Redis
    }
}

/// Regression: a store that failed for a moment was counted as a refusal.
#[tokio::test(start_paused = true)]
async fn undecided_renewal_is_retried() {
    let ttl = Duration::from_secs(3);
    let stores = [(); 3].map(|()| FaultStore::new(MemoryBackend::new()));
    let [_, second, third] = stores.each_ref().map(FaultStore::faults);
    let locks = Locks::new(Redlock::new(stores.map(Remote)).unwrap(), "default").ttl(ttl);
    for is_back_in_time in [true, false] {
        // Two leases that are due together. The third store does not have one of them.
        let known = locks.lock("known").await.unwrap();
        third.fail(Failure::Unavailable);
        let unknown = locks.lock("unknown").await.unwrap();
        third.heal();
        second.fail(Failure::Unavailable);
        sleep(ttl / 2).await;
        assert_eq!((known.state(), unknown.state()), (LeaseState::Held, LeaseState::Suspended));
        if is_back_in_time {
            second.heal();
            sleep(Duration::from_millis(500)).await;
            assert_eq!(unknown.state(), LeaseState::Held);
        } else {
            assert_eq!(timeout(ttl, unknown.lost()).await.unwrap().reason(), LossReason::Expired);
        }
        // The known lease is not lost with the other one.
        sleep(ttl).await;
        assert_eq!((known.state(), unknown.check().is_ok()), (LeaseState::Held, is_back_in_time));
        second.heal();
        known.release().await.unwrap();
        unknown.release().await.unwrap();
    }
}

/// A store that executes each release after a delay, unless its caller gives up before.
#[derive(Clone)]
struct Slow {
    inner: MemoryBackend,
    takes: Duration,
    in_use: Arc<()>,
}

impl LockStore for Slow {
    delegate_lock!(inner: acquire, acquire_all, renew, watch);

    async fn release(&self, lock: &LockKey, token: &Token) -> Result<Released, StoreError> {
        sleep(self.takes).await;
        LockStore::release(&self.inner, lock, token).await
    }

    fn reach(&self) -> Reach {
        Reach::Redis
    }
}

fn slow<const N: usize>(takes_ms: [u64; N]) -> [Slow; N] {
    takes_ms.map(|ms| Slow { inner: MemoryBackend::new(), takes: Duration::from_millis(ms), in_use: Arc::default() })
}

/// Regression: once two stores had the release, the call to the third was dropped 10 ms later. That store kept the lease for its whole
/// time.
#[tokio::test(start_paused = true)]
async fn slow_store_receives_the_release_too() {
    let stores = slow([0, 0, 100]);
    let locks = Locks::new(Redlock::new(stores.clone()).unwrap(), "default").wait(Duration::ZERO);
    for _ in 0..3 {
        let start = tokio::time::Instant::now();
        assert_eq!(locks.lock("a").await.unwrap().release().await.unwrap(), ReleaseOutcome::Released);
        assert!(start.elapsed() < Duration::from_millis(50), "the release waits for the slow store");
    }
    sleep(Duration::from_millis(200)).await;
    assert_eq!(stores[2].inner.locks(), 0);
    // The same for a grant without a majority.
    let other = Claim::new(Token::random().unwrap(), LONG);
    for store in &stores[..2] {
        store.inner.acquire(&LockKey::new("default", "a"), &other).await.unwrap();
    }
    assert!(locks.lock("a").await.unwrap_err().is_busy());
    sleep(Duration::from_millis(200)).await;
    assert_eq!(stores[2].inner.locks(), 0);
}

#[tokio::test(start_paused = true)]
async fn background_releases_end_in_time_and_with_their_store() {
    let stores = slow([0, 0, 86_400_000]);
    let in_use = || Arc::strong_count(&stores[2].in_use);
    let redlock = Redlock::new(stores.clone()).unwrap();
    let lock = LockKey::new("default", "a");
    let mut releases = JoinSet::new();
    for _ in 0..2_000 {
        let redlock = redlock.clone();
        releases.spawn(async move { redlock.release(&lock, &Token::random().unwrap()).await.unwrap() });
    }
    releases.join_all().await;
    let alive = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(alive, 1_024);
    sleep(Duration::from_secs(6)).await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
    redlock.release(&lock, &Token::random().unwrap()).await.unwrap();
    drop(redlock);
    tokio::task::yield_now().await;
    assert_eq!(in_use(), 1);
}

/// Regression: if many leases were released at the same time, a more distant server missed most of the releases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn distant_server_receives_all_releases() {
    let servers = [(); 3].map(|()| RedisServer::start());
    let far = Proxy::start(servers[2].port());
    let mut backends = Vec::new();
    for url in [servers[0].url(), servers[1].url(), far.url()] {
        backends.push(RedisBackend::connect(url).await.unwrap());
    }
    // Longer than the other servers take on a busy machine.
    far.to_server(Traffic::Delay(Duration::from_millis(75)));
    far.to_client(Traffic::Delay(Duration::from_millis(75)));
    let locks = Locks::new(Redlock::new(backends).unwrap(), "default").deadline(Duration::from_secs(5));
    // In the first round, connections for releases and scripts are missing, so calls may arrive late.
    for ttl in [Duration::from_secs(1), LONG] {
        let mut tasks = JoinSet::new();
        for key in 0..200_u32 {
            let request = locks.lock(key).ttl(ttl);
            tasks.spawn(async move { request.await.unwrap().release().await.unwrap() });
        }
        assert!(tasks.join_all().await.iter().all(|release| *release == ReleaseOutcome::Released));
        sleep(Duration::from_secs(1)).await;
    }
    let admin = LockAdmin::new(RedisBackend::connect(servers[2].url()).await.unwrap(), "default");
    let (mut held, mut next) = (0, Some(Cursor::default()));
    while let Some(from) = next {
        let page = admin.list(from, 1_000).await.unwrap();
        (held, next) = (held + page.locks.len(), page.next);
    }
    assert_eq!(held, 0);
}

#[tokio::test]
async fn unsupported_quorum_configuration_is_refused() {
    let few = Redlock::new([(); 2].map(|()| MemoryBackend::new())).unwrap_err();
    assert_eq!(few, ConfigError::TooFewStores { stores: 2, min: 3 });
    let process = Redlock::new([(); 3].map(|()| MemoryBackend::new())).unwrap();
    assert_eq!(LockStore::reach(&process), Reach::Process);
    assert!(LockLayer::new(process.clone(), "requests").key(GlobalKey).require(Reach::Redis).is_err());
    assert!(Locks::new(process, "default").require(Reach::Redis).is_err());

    let servers = [(); 3].map(|()| RedisServer::start());
    let stores = connect(&servers).await;
    assert!(LockStore::reach(&stores) == Reach::Quorum && Reach::Quorum > Reach::Redis);
    assert!(LockLayer::new(stores.clone(), "requests").key(GlobalKey).require(Reach::Quorum).is_ok());
    assert!(Locks::new(stores.clone(), "default").require(Reach::Quorum).is_ok());
    let refused = [
        Locks::new(stores.clone(), "default").fair().lock("a").await,
        RwLocks::new(stores.clone(), "rw_locks").read("a").await,
        RwLocks::new(stores.clone(), "rw_locks").write("a").await,
        Semaphore::new(stores.clone(), "semaphores", 2).acquire("a").await,
    ];
    for answer in refused {
        assert!(matches!(answer, Err(LockError::Config(ConfigError::NotByQuorum))), "{answer:?}");
    }
    drop(Semaphore::new(stores, "semaphores", 1).acquire("a").await.unwrap());
}

/// Several clients, while one server after the other is stopped, killed, and restarted with its data from disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_clients_hold_the_same_lock() {
    let mut servers = [(); 3].map(|()| RedisServer::start_with(DURABLE));
    let history = History::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for client in 0..4_u64 {
        let locks = locks(&servers).await.ttl(Duration::from_millis(400)).wait(LONG);
        for task in 0..2 {
            let (locks, history, stop) = (locks.clone(), history.clone(), Arc::clone(&stop));
            tasks.spawn(async move {
                let mut turn = client + task;
                while !stop.load(Ordering::Relaxed) {
                    let Ok(lease) = locks.lock("a").await else { continue };
                    history.stay(&lease, Duration::from_millis(turn * 7 % 20)).await;
                    turn += 1;
                    if turn % 2 == 0 { drop(lease) } else { drop(lease.release().await) }
                }
            });
        }
    }
    for round in 0..9 {
        let down = round % 3;
        sleep(Duration::from_millis(300)).await;
        if round % 2 == 0 {
            servers[down].pause();
            sleep(Duration::from_millis(600)).await;
            servers[down].resume();
        } else {
            block_in_place(|| servers[down].kill());
            sleep(Duration::from_millis(300)).await;
            block_in_place(|| servers[down].restart());
        }
    }
    stop.store(true, Ordering::Relaxed);
    timeout(LONG, tasks.join_all()).await.expect("all clients finish");
    history.check();
    assert!(history.len() > 100, "only {} stays", history.len());
    println!("{} stays", history.len());
}

/// A server that lost the lease and a server that is slow to reply are no majority.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_majority_that_forgets_loses_a_lease() {
    let servers = [(); 3].map(|()| RedisServer::start());
    let locks = locks(&servers).await;
    for (forgetful, expected) in [(1, ReleaseOutcome::Released), (2, ReleaseOutcome::Lost)] {
        let lease = lease_of_all(&locks, &servers).await;
        for server in &servers[..forgetful] {
            let _: u64 = block_in_place(|| server.query("DEL tollgate:2:{lock:default:a}:lease"));
        }
        assert_eq!(lease.release().await.unwrap(), expected);
    }
    let lease = lease_of_all(&locks, &servers).await;
    let _: u64 = block_in_place(|| servers[0].query("DEL tollgate:2:{lock:default:a}:lease"));
    servers[1].pause();
    let released = lease.release().await;
    servers[1].resume();
    assert!(!matches!(released, Ok(ReleaseOutcome::Lost)), "{released:?}");
}

/// Regression: the next fence came from the clocks alone and ignored the last granted fence.
#[tokio::test]
async fn quorum_fences_rise_although_all_stores_forget() {
    let stores = [(); 3].map(|()| MemoryBackend::new());
    let redlock = Redlock::new(stores).unwrap();
    let lock = LockKey::new("default", "a");
    let claim = || Claim::new(Token::random().unwrap(), Duration::from_secs(1));
    let mut first = claim();
    first.floor = 1 << 52;
    let Acquired::Granted { fence } = redlock.acquire(&lock, &first).await.unwrap() else { panic!("the lock is free") };
    let other = LockKey::new("default", "b");
    let answer = redlock.clone().acquire(&other, &claim()).await.unwrap();
    assert!(fence > 1 << 52 && matches!(answer, Acquired::Granted { fence: next } if next > fence), "{answer:?}");
}
