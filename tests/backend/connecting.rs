//! Connecting: transports, credentials and topologies, and the errors of refused connections.

use crate::support;

use std::error::Error;
use std::fs;
use std::future::{IntoFuture, ready};
use std::time::{Duration, Instant};

use support::cluster::Cluster;
use support::proxy::{Door, Proxy, Traffic};
use support::sentinel::{SERVICE, SentinelDeployment};
use support::server::{RedisServer, query, wait_until};
use support::tls::{Certificates, TlsServer};
use tokio::sync::mpsc;
use tokio::task::{JoinSet, block_in_place, yield_now};
use tokio::time::sleep;
use tollgate::lock::store::LockStore;
use tollgate::lock::{Cursor, LockAdmin, LockKey, ReleaseOutcome};
use tollgate::{
    AnyBackend, BoxError, ConfigError, ConnectError, DelayQueue, DelayQueueWorker, Job, Limiter, Locks, Policy, Quota,
    RedisBackend, RedisOptions, StoreError,
};
use tower::service_fn;

/// Long enough that a busy machine fails no test.
const LONG: Duration = Duration::from_secs(5);

async fn works(backend: RedisBackend) -> Result<(), BoxError> {
    let policy = Policy::new("connecting", Quota::per_hour(1).fixed_window());
    let limiter = Limiter::new(backend, policy).deadline(LONG);
    limiter.reset("alice").await?;
    assert!(limiter.check("alice").await?.is_allowed());
    assert!(!limiter.check("alice").await?.is_allowed());
    Ok(())
}

/// The timeout allows for unoptimized cryptography on a busy machine.
fn options(url: &str) -> RedisOptions {
    RedisOptions::from_url(url).unwrap().connect_timeout(Duration::from_secs(10))
}

/// The messages of an error and of its sources, joined.
fn causes(error: &dyn Error) -> String {
    let rest = error.source().map(|source| format!(": {}", causes(source)));
    format!("{error}{}", rest.unwrap_or_default())
}

fn is_unsupported(error: &ConnectError, because: &str) -> bool {
    matches!(error, ConnectError::Unsupported(_)) && format!("{error:?}").contains(because)
}

/// The options with the CA and the client certificate that a server with mutual TLS requires.
fn trusted(options: RedisOptions, certificates: &Certificates) -> RedisOptions {
    let read = |path| fs::read(path).unwrap();
    options
        .ca_certificate(read(certificates.authority()))
        .client_certificate(read(certificates.client_certificate()), read(certificates.client_key()))
}

#[tokio::test]
async fn unix_socket_connects() {
    let server = RedisServer::start();
    let url = format!("redis+unix://{}?db=3", server.unix_socket().display());
    works(RedisBackend::connect(url).await.unwrap()).await.unwrap();
    assert!(server.info("db3").is_some_and(|keys| keys.starts_with("keys=1")));
}

#[tokio::test]
async fn user_and_database_are_applied() {
    let server = RedisServer::start();
    server.query::<()>("ACL SETUSER shop on >p@ss/w:rd ~* +@all");
    let url = |userinfo: &str| format!("redis://{userinfo}127.0.0.1:{}/5", server.port());
    works(RedisBackend::connect(url("shop:p%40ss%2Fw%3Ard@")).await.unwrap()).await.unwrap();
    works(options(&url("")).user("shop", "p@ss/w:rd").connect().await.unwrap()).await.unwrap();
    // `user` overrides the credentials of the URL.
    works(options(&url("nobody:nothing@")).user("shop", "p@ss/w:rd").connect().await.unwrap()).await.unwrap();
    assert!(server.info("db5").is_some());
    let error = options(&url("")).user("shop", "wrong").connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Credentials(_)), "{error:?}");
}

#[tokio::test]
async fn encrypted_server_connects() {
    let server = TlsServer::start(false);
    let authority = fs::read(server.certificates.authority()).unwrap();
    works(options(&server.url()).ca_certificate(authority.clone()).connect().await.unwrap()).await.unwrap();
    // The certificate also covers the IP address.
    let url = format!("rediss://127.0.0.1:{}/", server.tls_port());
    works(options(&url).ca_certificate(authority).connect().await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn mutual_tls_requires_a_trusted_client_certificate() {
    let server = TlsServer::start(true);
    works(trusted(options(&server.url()), &server.certificates).connect().await.unwrap()).await.unwrap();

    let authority = fs::read(server.certificates.authority()).unwrap();
    let error = options(&server.url()).ca_certificate(authority.clone()).connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::ClientCertificate(_)), "no certificate: {error:?}");

    let others = Certificates::for_names(&["localhost"]);
    let error = trusted(options(&server.url()), &others).ca_certificate(authority).connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::ClientCertificate(_)), "a certificate of another CA: {error:?}");
}

#[tokio::test]
async fn untrusted_server_certificate_is_refused() {
    let server = TlsServer::start(false);
    let others = Certificates::for_names(&["localhost"]);
    let wrong = options(&server.url()).ca_certificate(fs::read(others.authority()).unwrap());
    let system = options(&server.url());
    let elsewhere = TlsServer::start_with(Certificates::for_names(&["example.com"]), false);
    let authority = fs::read(elsewhere.certificates.authority()).unwrap();
    let name = options(&elsewhere.url()).ca_certificate(authority);
    for (what, options) in [("another authority", wrong), ("the system's authorities", system), ("another name", name)]
    {
        let error = options.connect().await.unwrap_err();
        assert!(matches!(error, ConnectError::Certificate(_)), "{what}: {error:?}");
    }
}

#[tokio::test]
async fn tls_to_a_plaintext_server_is_an_error() {
    let server = RedisServer::start();
    let authority = fs::read(Certificates::for_names(&["localhost"]).authority()).unwrap();
    let url = format!("rediss://localhost:{}/", server.port());
    let error = options(&url).ca_certificate(authority).connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Tls(_)), "{error:?}");
}

#[tokio::test]
async fn invalid_certificates_are_config_errors() {
    for url in ["rediss://localhost/", "rediss+sentinel://localhost/service", "rediss+cluster://localhost/"] {
        let made = Certificates::for_names(&["localhost"]);
        let key = fs::read(made.client_key()).unwrap();
        for options in [options(url).ca_certificate("nonsense"), options(url).client_certificate("nonsense", key)] {
            let error = options.connect().await.unwrap_err();
            let is_it = matches!(&error, ConnectError::Config(ConfigError::InvalidCertificate { .. }));
            assert!(is_it, "{url}: {error:?}");
        }
    }
    let error = options("redis://localhost/").ca_certificate("any").connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Config(ConfigError::InvalidCertificate { .. })), "{error:?}");
}

#[tokio::test]
async fn encrypted_sentinels_require_their_password() {
    let server = TlsServer::start(true);
    let (_sentinel, port) = server.sentinel();
    let url = format!("rediss+sentinel://127.0.0.1:{port}/{SERVICE}/2");
    let certified = || trusted(options(&url), &server.certificates);
    works(certified().sentinel_user("", "watch").connect().await.unwrap()).await.unwrap();
    assert!(server.server.info("db2").is_some());
    let error = certified().connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Credentials(_)), "no password: {error:?}");
    let error = certified().sentinel_user("", "wrong").connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Credentials(_)), "wrong password: {error:?}");
}

#[tokio::test]
async fn encrypted_cluster_connects() {
    let node = TlsServer::start_cluster();
    let url = format!("rediss+cluster://localhost:{}", node.tls_port());
    works(trusted(options(&url), &node.certificates).connect().await.unwrap()).await.unwrap();
    let authority = fs::read(node.certificates.authority()).unwrap();
    let error = options(&url).ca_certificate(authority).connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::ClientCertificate(_)), "{error:?}");
}

/// The documented `ACL SETUSER` rule, with the rights `more` that the docs add for a topology.
fn user(more: &str) -> String {
    let docs = include_str!("../../src/backend/redis/mod.rs");
    let rule = docs.lines().find_map(|line| line.strip_prefix("//! ACL ")).unwrap();
    assert!(docs.contains(&format!("`{more}`")), "the docs say that a user needs {more}");
    format!("ACL {rule} {more}")
}

#[tokio::test(flavor = "multi_thread")]
async fn documented_user_works_behind_sentinels() {
    let deployment = SentinelDeployment::start();
    let url = deployment.url().replace("://", "://tollgate:password@");
    deployment.primary().query::<()>(&user("+role"));
    works(RedisBackend::connect(&url).await.unwrap()).await.unwrap();
    let watcher = "+sentinel|master +sentinel|get-master-addr-by-name";
    for sentinel in &deployment.sentinels {
        sentinel.query::<()>(&format!("ACL SETUSER watcher on >watch {watcher}"));
    }
    works(options(&url).sentinel_user("watcher", "watch").connect().await.unwrap()).await.unwrap();
    deployment.primary().query::<()>("ACL SETUSER tollgate -role");
    let error = RedisBackend::connect(&url).await.unwrap_err();
    assert!(matches!(error, ConnectError::Permissions(_)), "{error:?}");
    let error = RedisBackend::connect(url.replace(":password@", ":wrong@")).await.unwrap_err();
    assert!(matches!(error, ConnectError::Credentials(_)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_sentinel_service_is_an_error() {
    let mut deployment = SentinelDeployment::start();
    let url = deployment.url().replace(SERVICE, "invoices");
    for sentinels_down in 0..3 {
        // A misspelt service name is not an outage.
        for tolerates_outage in [false, true] {
            let error = options(&url).tolerate_outage(tolerates_outage).connect().await.unwrap_err();
            assert!(matches!(&error, ConnectError::Unsupported(_)), "{sentinels_down}: {error:?}");
            assert!(causes(&error).ends_with("no Sentinel watches over `invoices`"), "{}", causes(&error));
        }
        block_in_place(|| deployment.sentinels[sentinels_down].kill());
    }
    // No Sentinel is left to answer.
    assert!(
        matches!(options(&url).connect().await, Err(ConnectError::Store(failure)) if failure.error().is_unavailable())
    );
    assert!(options(&url).tolerate_outage(true).connect().await.is_ok());
}

/// The client library would send `CLIENT SETINFO`. Servers refuse that to a restricted user, and log each refusal.
#[tokio::test(flavor = "multi_thread")]
async fn connecting_causes_no_command_errors() {
    let deployment = SentinelDeployment::start();
    let servers = deployment.servers.iter().chain(&deployment.sentinels);
    let mut observers: Vec<_> = servers.map(RedisServer::connection).collect();
    let mut errors = || -> Vec<String> {
        let errors = |observer| query::<String>(observer, "INFO errorstats").unwrap();
        observers.iter_mut().map(errors).collect()
    };
    // Looking up the primary may count as well, so it comes first.
    let primary = deployment.primary().url();
    let before = errors();
    let backend = RedisBackend::connect(deployment.url()).await.unwrap();
    let wakeups = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    works(RedisBackend::connect(primary).await.unwrap()).await.unwrap();
    let after = errors();
    // `NOSCRIPT` errors are expected, so only `ERR` counts.
    let refused = |errors: &[String]| -> Vec<String> {
        errors
            .iter()
            .flat_map(|errors| errors.lines())
            .filter(|line| line.starts_with("errorstat_ERR"))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(refused(&after), refused(&before));
    drop(wakeups);
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_and_dead_sentinels_are_skipped() {
    let mut deployment = SentinelDeployment::start();
    let proxy = Proxy::start(deployment.sentinels[0].port());
    proxy.door(Door::Silent);
    let dead = deployment.sentinels[1].port();
    deployment.sentinels[1].kill();
    let url = format!(
        "redis+sentinel://127.0.0.1:{},127.0.0.1:{dead},127.0.0.1:{}/{SERVICE}",
        proxy.port(),
        deployment.sentinels[2].port()
    );
    works(RedisBackend::connect(&url).await.unwrap()).await.unwrap();
    // A Sentinel that hangs beyond the connect timeout does not hide the error that the others report.
    let misspelt = RedisOptions::from_url(url.replace(SERVICE, "invoices")).unwrap();
    let misspelt = misspelt.connect_timeout(Duration::from_secs(2)).response_timeout(Duration::from_secs(30));
    let error = misspelt.connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Unsupported(_)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn documented_user_works_on_a_cluster() {
    let cluster = Cluster::start();
    let url = cluster.url().replace("://", "://tollgate:password@");
    for node in &cluster.nodes {
        node.query::<()>(&user("+cluster|slots +asking"));
    }
    let policy = Policy::new("connecting", Quota::per_hour(1).fixed_window());
    let limiter = Limiter::new(RedisBackend::connect(&url).await.unwrap(), policy).deadline(LONG);
    // The user may call every node, and follow the redirections after a slot has moved.
    for subject in 0..100 {
        assert!(limiter.check(subject).await.unwrap().is_allowed());
    }
    for slot in cluster.slots_with_keys(0) {
        tokio::task::block_in_place(|| cluster.migrate(slot, 1));
    }
    for subject in 0..100 {
        assert!(!limiter.check(subject).await.unwrap().is_allowed());
    }
    for node in &cluster.nodes {
        node.query::<()>("ACL SETUSER tollgate -cluster");
    }
    let error = RedisBackend::connect(&url).await.unwrap_err();
    assert!(matches!(error, ConnectError::Permissions(_)), "{error:?}");
}

/// Connecting to a node takes three round trips, and its first query one more.
#[tokio::test(flavor = "multi_thread")]
async fn distant_cluster_node_gets_its_timeout() {
    let cluster = Cluster::start();
    let proxy = Proxy::start(cluster.nodes[0].port());
    proxy.to_client(Traffic::Delay(Duration::from_millis(600)));
    let options = || RedisOptions::from_url(proxy.url().replace("redis:", "redis+cluster:")).unwrap();
    let patient = options().connect_timeout(Duration::from_secs(20)).response_timeout(Duration::from_secs(5));
    works(patient.connect().await.unwrap()).await.unwrap();
    let error = options().connect_timeout(Duration::from_millis(300)).connect().await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(failure) if failure.error().is_unavailable()), "{error:?}");
    assert!(causes(&error).contains("no connection within 300ms"), "{error:?}");
}

/// Regression: the subscriber connection was given up after a second, so waiters got no notifications.
#[tokio::test(flavor = "multi_thread")]
async fn distant_server_is_subscribed_to() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    proxy.to_client(Traffic::Delay(Duration::from_millis(1_200)));
    let options = RedisOptions::from_url(proxy.url()).unwrap().connections(1);
    let options = options.connect_timeout(Duration::from_secs(20)).response_timeout(Duration::from_secs(5));
    let backend = options.connect().await.unwrap();
    let listens = LockStore::watch(&backend, &LockKey::new("default", "a"), None).await;
    let listeners = || server.query::<(String, u32)>("PUBSUB NUMSUB tollgate:2:{lock:default:a}:free").1;
    block_in_place(|| wait_until("the lock is listened to", || listeners() == 1));
    // The subscription stays, on the same connection.
    let opened = proxy.accepted();
    sleep(Duration::from_secs(3)).await;
    assert_eq!((listeners(), proxy.accepted()), (1, opened), "listeners, and connections ever opened");
    drop(listens);
}

/// Regression: Sentinels had a fixed second to accept a connection, and half a second to answer.
#[tokio::test(flavor = "multi_thread")]
async fn distant_sentinels_get_their_timeout() {
    let deployment = SentinelDeployment::start();
    let sentinel = &deployment.sentinels[0];
    sentinel.query::<()>("ACL SETUSER watcher on >watch +@all");
    let proxy = Proxy::start(sentinel.port());
    proxy.to_client(Traffic::Delay(Duration::from_millis(1_200)));
    let url = format!("redis+sentinel://127.0.0.1:{}/{SERVICE}", proxy.port());
    let options = || RedisOptions::from_url(&url).unwrap().sentinel_user("watcher", "watch");
    let patient = options().connect_timeout(Duration::from_secs(20)).response_timeout(Duration::from_secs(5));
    works(patient.connect().await.unwrap()).await.unwrap();
    let error = options().connect_timeout(Duration::from_millis(300)).connect().await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(failure) if failure.error().is_unavailable()), "{error:?}");
}

/// Regression: at most two calls were in flight at a time, full batches or not. A burst of requests waited for dozens of round trips to a
/// server in another zone, and most of them timed out.
#[tokio::test(flavor = "multi_thread")]
async fn burst_does_not_wait_for_sequential_round_trips() {
    const REQUESTS: usize = 2_000;
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let backend = RedisBackend::connect(proxy.url()).await.unwrap();
    let limiter = Limiter::new(backend, Policy::new("burst", Quota::per_hour(1_000_000).fixed_window()));
    assert!(limiter.clone().deadline(LONG).check("first").await.unwrap().is_allowed());
    proxy.to_client(Traffic::Delay(Duration::from_millis(10)));
    // A busy machine may be too slow for one burst. Sequential round trips would make every burst late.
    let mut late = REQUESTS;
    for _ in 0..10 {
        let mut requests = JoinSet::new();
        for i in 0..REQUESTS {
            let limiter = limiter.clone();
            requests.spawn(async move { limiter.check(i % 100).await });
        }
        late = late.min(requests.join_all().await.into_iter().filter(Result::is_err).count());
        if late == 0 {
            break;
        }
    }
    assert_eq!(late, 0, "of {REQUESTS}");
}

/// How long the process stalls. This exceeds the deadline by more than a tenth, which is the time left to read replies that have arrived.
const STILL: Duration = Duration::from_millis(3_500);
const STILL_DEADLINE: Duration = Duration::from_secs(3);

async fn patient(server: &RedisServer) -> RedisBackend {
    let options = RedisOptions::from_url(server.url()).unwrap().response_timeout(Duration::from_secs(10));
    options.connect().await.unwrap()
}

/// Replies that have already arrived are not late: their requests were charged.
#[tokio::test]
async fn stalled_process_reads_replies_that_arrived() {
    let server = RedisServer::start();
    let policy = Policy::new("still", Quota::per_hour(1_000).fixed_window());
    let limiter = Limiter::new(patient(&server).await, policy).deadline(STILL_DEADLINE);
    assert!(limiter.check("first").await.unwrap().is_allowed());
    let mut requests = JoinSet::new();
    for i in 0..64 {
        let limiter = limiter.clone();
        requests.spawn(async move { limiter.check(i).await });
    }
    // Wait until all of them are sent.
    for _ in 0..20 {
        yield_now().await;
    }
    std::thread::sleep(STILL);
    for answer in requests.join_all().await {
        assert!(answer.unwrap().is_allowed());
    }
}

#[tokio::test]
async fn stalled_process_reads_outcomes_of_its_releases() {
    let server = RedisServer::start();
    let locks = Locks::new(patient(&server).await, "default").deadline(STILL_DEADLINE);
    for _ in 0..2 {
        let leases = locks.lock_all(0..64_u64).await.unwrap();
        let releasing = tokio::spawn(leases.release());
        // Wait until all of them are sent.
        for _ in 0..20 {
            yield_now().await;
        }
        std::thread::sleep(STILL);
        assert_eq!(releasing.await.unwrap().unwrap(), ReleaseOutcome::Released);
    }
}

/// Regression: connections that a call from another runtime opened ended with that runtime, and so did the tasks that send batches.
#[test]
fn calls_survive_the_end_of_a_calling_runtime() {
    const CALLS: usize = 64;
    let server = RedisServer::start();
    let home = tokio::runtime::Runtime::new().unwrap();
    let backend = home.block_on(RedisBackend::connect(server.url())).unwrap();
    let locks = Locks::new(backend.clone(), "default").deadline(Duration::from_secs(5));
    let queue = DelayQueue::<usize>::new(backend, "test").deadline(Duration::from_secs(5));
    server.kill_clients();
    let visitor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    visitor.block_on(async {
        // Wait until the connections are open again.
        let start = Instant::now();
        let mut worked = 0;
        while worked < 20 {
            assert!(start.elapsed() < Duration::from_secs(10), "no connection is opened");
            let works = queue.push(0).await.is_ok() && locks.lock("a").await.is_ok();
            worked = if works { worked + 1 } else { 0 };
        }
    });
    drop(visitor);
    server.query::<()>("CONFIG RESETSTAT");
    home.block_on(async {
        let mut calls = JoinSet::new();
        for i in 0..CALLS {
            let (queue, locks) = (queue.clone(), locks.clone());
            calls.spawn(async move {
                queue.push(i).await.unwrap();
                locks.lock(i).await.unwrap().release().await.unwrap();
            });
        }
        calls.join_all().await;
    });
    let stats = server.text("INFO commandstats");
    let scripts = stats.lines().filter(|line| line.starts_with("cmdstat_eval"));
    let calls = scripts.filter_map(|line| line.split_once("calls=")?.1.split(',').next()?.parse::<usize>().ok());
    let calls = calls.sum::<usize>();
    assert!(calls < CALLS, "{calls} script calls for {} operations", 3 * CALLS);
}

/// Regression: callers that waited for a connection panicked when its runtime ended. Later calls waited forever for the attempt begun
/// there, although Redis was available.
#[test]
fn calls_survive_the_end_of_the_first_runtime() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port());
    let home = tokio::runtime::Runtime::new().unwrap();
    let options = RedisOptions::from_url(proxy.url()).unwrap().connections(1);
    let backend = home.block_on(options.connect()).unwrap();
    let limiter = Limiter::new(backend, Policy::new("connecting", Quota::per_hour(1_000).fixed_window()));
    let limiter = limiter.deadline(Duration::from_secs(5));
    let visitor = tokio::runtime::Runtime::new().unwrap();
    let _ = visitor.block_on(limiter.check("alice")).unwrap();
    // From now on, new connections get no reply.
    proxy.door(Door::Silent);
    proxy.cut();
    // The first call finds the connection closed.
    let _ = visitor.block_on(limiter.check("alice"));
    let waiting = limiter.clone();
    let waiting = visitor.spawn(async move { waiting.check("alice").await });
    std::thread::sleep(Duration::from_millis(200));
    drop(home);
    let error = visitor.block_on(waiting).expect("it does not panic").unwrap_err();
    assert!(error.is_unavailable() || error.is_timeout(), "{error:?}");
    proxy.door(Door::Open);
    visitor.block_on(async {
        let start = Instant::now();
        while let Err(error) = limiter.check("alice").await {
            assert!(start.elapsed() < Duration::from_secs(3), "{}", causes(&error));
        }
    });
    // The same holds when the second runtime ends.
    drop(visitor);
    let another = tokio::runtime::Runtime::new().unwrap();
    let _ = another.block_on(limiter.check("alice")).unwrap();
    // Concurrent checks are still batched in the third runtime.
    server.query::<()>("CONFIG RESETSTAT");
    another.block_on(async {
        let mut checks = JoinSet::new();
        for i in 0..200_u32 {
            let limiter = limiter.clone();
            checks.spawn(async move { limiter.check(i).await.unwrap().is_allowed() });
        }
        assert!(checks.join_all().await.into_iter().all(|is_allowed| is_allowed));
    });
    let stats = server.text("INFO commandstats");
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    let calls = calls.and_then(|calls| calls.split(',').next()?.parse::<u32>().ok());
    assert!(calls.unwrap() < 100, "{stats}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_topology_in_the_url_is_an_error() {
    let cluster = Cluster::start();
    let error = RedisBackend::connect(cluster.nodes[0].url()).await.unwrap_err();
    assert!(is_unsupported(&error, "redis+cluster://"), "{error:?}");
    let server = RedisServer::start();
    let error = RedisBackend::connect(server.url().replace("redis:", "redis+cluster:")).await.unwrap_err();
    assert!(is_unsupported(&error, "redis://"), "{error:?}");
    let error = RedisBackend::connect(server.url().replace("redis:", "redis+sentinel:") + "orders").await.unwrap_err();
    assert!(is_unsupported(&error, "not a Sentinel"), "{error:?}");
    // A Sentinel answers PING and INFO like a server. It was once taken for a server that cannot run scripts at the moment.
    let sentinels = SentinelDeployment::start();
    for scheme in ["redis:", "redis+cluster:"] {
        let error = options(&sentinels.sentinels[0].url().replace("redis:", scheme)).connect().await.unwrap_err();
        let is_it = is_unsupported(&error, "redis+sentinel://");
        assert!(is_it, "{scheme} {error:?}");
    }
}

/// An operator may have disabled scripts, or the server is of another kind.
#[tokio::test]
async fn server_without_scripts_is_unsupported() {
    for args in [["--rename-command", "EVALSHA", ""], ["--rename-command", "EVAL", ""]] {
        let server = RedisServer::start_with(&args);
        for tolerates_outage in [false, true] {
            let error = options(&server.url()).tolerate_outage(tolerates_outage).connect().await.unwrap_err();
            let is_it = is_unsupported(&error, "unknown command");
            assert!(is_it, "{args:?} {error:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ping_reports_whether_redis_answers() {
    let mut server = RedisServer::start();
    server.query::<()>("ACL SETUSER shop on >secret ~tollgate:2:* +@all -ping");
    let backend = options(&server.url()).user("shop", "secret").connect().await.unwrap();
    assert!(backend.ping().await.unwrap() < Duration::from_secs(5), "a refusal is an answer");
    let any = AnyBackend::from(backend.clone());
    assert!(any.ping().await.is_ok());
    server.pause();
    assert!(backend.ping().await.unwrap_err().is_timeout());
    server.resume();
    block_in_place(|| server.kill());
    assert!(backend.ping().await.unwrap_err().is_unavailable());
    assert!(any.ping().await.unwrap_err().is_unavailable());

    let mut cluster = Cluster::start();
    let backend = RedisBackend::connect(cluster.url()).await.unwrap();
    for down in cluster.primaries() {
        assert!(backend.ping().await.is_ok(), "before node {down} is killed");
        block_in_place(|| cluster.nodes[down].kill());
    }
    block_in_place(|| cluster.nodes.iter_mut().for_each(RedisServer::kill));
    assert!(backend.ping().await.is_err());
}

/// Connects while all servers are stopped, and resumes them later.
async fn starts_in_an_outage<'a>(url: &str, servers: impl IntoIterator<Item = &'a RedisServer> + Clone) {
    let options = || RedisOptions::from_url(url).unwrap().connect_timeout(Duration::from_millis(200));
    servers.clone().into_iter().for_each(RedisServer::pause);
    let error = options().connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Store(_)), "{url}: {}", causes(&error));
    let backend = options().tolerate_outage(true).connect().await.unwrap();
    assert!(backend.ping().await.is_err(), "{url}");
    let limiter = Limiter::new(backend.clone(), Policy::new("early", Quota::per_hour(1).fixed_window()));
    assert!(limiter.check("alice").await.is_err(), "{url}");
    let admin = LockAdmin::new(backend.clone(), "default");
    assert!(admin.list(Cursor::default(), 10).await.is_err(), "{url}");
    servers.into_iter().for_each(RedisServer::resume);
    let start = Instant::now();
    while let Err(error) = limiter.check("alice").await {
        assert!(start.elapsed() < Duration::from_secs(30), "{url}: {}", causes(&error));
        sleep(Duration::from_millis(20)).await;
    }
    works(backend).await.unwrap();
}

#[tokio::test]
async fn tolerate_outage_starts_while_redis_is_down() {
    let server = RedisServer::start();
    starts_in_an_outage(&server.url(), [&server]).await;
    let deployment = SentinelDeployment::start();
    starts_in_an_outage(&deployment.url(), deployment.servers.iter().chain(&deployment.sentinels)).await;
    let cluster = Cluster::start();
    starts_in_an_outage(&cluster.url(), &cluster.nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn maximum_timeouts_work() {
    let (server, cluster) = (RedisServer::start(), Cluster::start());
    for url in [server.url(), cluster.url()] {
        let options = RedisOptions::from_url(url).unwrap();
        let options = options.connect_timeout(Duration::MAX).response_timeout(Duration::MAX);
        let backend = options.connect().await.unwrap();
        works(backend.clone()).await.unwrap();
        // Claims have a longer timeout than other commands, and workers and waiters subscribe.
        let queue = DelayQueue::<u32>::new(backend.clone(), "queue").deadline(LONG);
        let (done, mut is_done) = mpsc::unbounded_channel();
        let service = service_fn(move |job: Job<u32>| ready(done.send(*job).map_err(BoxError::from)));
        let worker = tokio::spawn(DelayQueueWorker::new(queue.clone(), service).run());
        queue.push(7).await.unwrap();
        assert_eq!(is_done.recv().await, Some(7));
        worker.abort();
        let [here, there] = [(); 2].map(|()| Locks::new(backend.clone(), "default").deadline(Duration::from_secs(5)));
        let lease = here.lock("a").await.unwrap();
        let waiting = tokio::spawn(there.lock("a").wait(Duration::from_secs(30)).into_future());
        lease.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn tolerate_outage_reports_permanent_errors() {
    let mut server = RedisServer::start();
    let options = || options(&server.url()).tolerate_outage(true);
    works(options().connect().await.unwrap()).await.unwrap();
    let error = options().user("nobody", "nothing").connect().await.unwrap_err();
    assert!(matches!(error, ConnectError::Credentials(_)), "{}", causes(&error));
    let error = options().connections(0).connect().await.unwrap_err();
    assert!(
        matches!(error, ConnectError::Config(ConfigError::ConnectionsOutOfRange { connections: 0, .. })),
        "{}",
        causes(&error)
    );
    let no_such_database = RedisOptions::from_url(format!("{}99", server.url())).unwrap().tolerate_outage(true);
    assert!(no_such_database.connect().await.is_err());
    // If the server starts later, the first calls report the wrong credentials.
    let late = options().user("nobody", "nothing");
    server.kill();
    let backend = late.connect().await.unwrap();
    server.restart();
    let start = Instant::now();
    loop {
        let error = works(backend.clone()).await.unwrap_err().downcast::<StoreError>().unwrap();
        if error.is_unauthorized() {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{}", causes(&error));
    }
}

/// A partitioned Sentinel, which is asked first, names a server that hangs.
#[tokio::test(flavor = "multi_thread")]
async fn unreachable_sentinel_does_not_hide_the_primary() {
    let deployment = SentinelDeployment::start();
    let old = deployment.primary().port();
    deployment.fail_over();
    deployment.wait_for_another_primary(old);
    deployment.wait_until_whole();
    let stale = RedisServer::start();
    let alone = &deployment.sentinels[0];
    alone.query::<()>(&format!("SENTINEL REMOVE {SERVICE}"));
    alone.query::<()>(&format!("SENTINEL MONITOR {SERVICE} 127.0.0.1 {} 3", stale.port()));
    stale.pause();
    let options = || RedisOptions::from_url(deployment.url()).unwrap().connect_timeout(Duration::from_secs(2));
    works(options().connect().await.unwrap()).await.unwrap();
    stale.resume();
    // The stale server is not used after it answers again.
    let backend = options().prefix("again").connect().await.unwrap();
    works(backend).await.unwrap();
    assert!(stale.query::<Vec<String>>("KEYS *").is_empty());
}
