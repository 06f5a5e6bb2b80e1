//! Rate limits, locks, idempotency records, jobs and cached values in Redis, shared by all processes that use the same server.
//!
//! ```no_run
//! use std::time::Duration;
//! use tollgate::RedisOptions;
//!
//! # #[tokio::main] async fn main() -> Result<(), tollgate::ConnectError> {
//! let backend = RedisOptions::from_url("redis://:password@10.0.0.5/2")?
//!     .prefix("shop")
//!     .connections(2)
//!     .connect_timeout(Duration::from_millis(500))
//!     .connect()
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! | setter of [`RedisOptions`] | default | meaning |
//! | --- | --- | --- |
//! | [`prefix`](RedisOptions::prefix) | `tollgate` | the prefix of all keys |
//! | [`connections`](RedisOptions::connections) | 3 | connections for requests to each server |
//! | [`connect_timeout`](RedisOptions::connect_timeout) | 1 s | to open a connection, with login and Sentinel queries |
//! | [`response_timeout`](RedisOptions::response_timeout) | 500 ms | for the reply to one command |
//! | [`tolerate_outage`](RedisOptions::tolerate_outage) | `false` | whether `connect` returns a backend while Redis is down |
//! | [`user`](RedisOptions::user), [`sentinel_user`](RedisOptions::sentinel_user) | those of the URL, none | the login |
//! | `ca_certificate`, `client_certificate` (feature `tls`) | those of the operating system, none | trust and client authentication |
//!
//! The URL selects the servers, the database and the protocol. Guides: [Redis](crate::guide::redis),
//! [performance](crate::guide::performance), [troubleshooting](crate::guide::troubleshooting).
//!
//! # Topologies
//!
//! The URL selects one server, the primary of a Sentinel service, or a cluster ([`RedisOptions::from_url`]). The rest of your
//! program stays the same.
//!
//! * *Sentinel*: to open a connection, the client asks all Sentinels for the primary and checks with `ROLE` that it is a primary.
//!   One reply is enough; a Sentinel that hangs costs 0.2 s. The client asks again when a Sentinel announces another primary
//!   (`+promoted-slave` or `+switch-master`), and every 0.4 s in any case. So the client leaves a replaced primary within a second,
//!   even if the old primary still answers. With TLS, the certificate of the primary must match the address that the Sentinels announce.
//! * *Cluster*: all keys of one rate-limit key, of one lock, or of one partition of a queue are in one slot. The client follows MOVED, ASK
//!   and TRYAGAIN; they are not errors. Each node has its own connections, so a node that is down or hangs affects only its own slots.
//!   Until another node serves these slots, the client keeps reading the slot map from the other nodes. A decision about several keys is
//!   one script if the keys share a slot. Otherwise the client checks one key after the other, and refunds the charges if a later key is
//!   denied.
//!
//!   While a slot migrates, a node refuses commands with several keys unless it has all of them. Until the migration ends, fair and
//!   read/write locks are not granted, sliding logs are not counted, and queues pause. The client repeats a refused call at least
//!   every 8 ms, until its deadline or the response timeout. Renewals and releases of locks still work, and so does the completion
//!   of an operation.
//!
//!   Each node with subscribed channels has one connection for subscriptions. The client subscribes again, at the node that then
//!   has the channel, if the connection ends, the channel moves, or a PING is not answered in time. That time is the response
//!   timeout, but at least 1 s and at most 5 s. After a new subscription, each waiter on the channel checks the store once.
//!
//! Tollgate connects to the addresses that Sentinels and cluster nodes announce. Addresses cannot be mapped: in containers and behind
//! NAT, announce addresses that clients can reach (`cluster-announce-ip`, `cluster-announce-port`, `cluster-announce-hostname`,
//! `replica-announce-ip`).
//!
//! A failover loses the writes that were not replicated. Set `min-replicas-to-write` on the server to bound the loss.
//!
//! # Connections
//!
//! Each server has a bb8 pool of a few *multiplexed* connections. A call borrows a connection, clones its handle and returns it
//! before it sends anything. No call waits for the round trip of another, so a few connections serve thousands of concurrent
//! requests. There is no PING per checkout: a failed connection is marked, never reused, and replaced. A connection that was closed
//! while idle is replaced before the next command. `TCP_NODELAY` is set, so a command does not wait for the acknowledgement of
//! earlier packets.
//!
//! If the server becomes a replica, the client closes the connection and connects to its address again. While the server refuses
//! connections, calls fail at once instead of waiting for their deadline. If it accepts connections and does not answer, calls wait until
//! their deadline. When the client has detected this failure, calls fail at once, too. If the network drops the packets of a connection
//! attempt, the client restarts this attempt soon after a later attempt succeeds. A command whose reply is lost is never sent again, since
//! it may have been counted.
//!
//! # Batching
//!
//! With at most 8 checks in flight, each check is a call of its own and is sent at once. With more, or within 200 µs after a batch, new
//! checks share a call of one script. If a few such calls are in flight, the next one waits until one of them returns or has taken 20 ms.
//! With a longer round trip, the client allows more of these calls in flight. The script charges or denies each check separately, so
//! batching is exact. A large batch costs Redis less than half the work of separate calls. Each batch takes a part of the pending checks,
//! so Redis works on one batch while the reply to another travels. On a cluster, checks and locks are not batched, because two keys hardly
//! ever share a slot. Lock acquisitions and releases at the same time are batched, too; each is granted, refused or released separately. An
//! acquisition and its release then cost Redis about half of the two separate calls.
//!
//! The first renewal, release or lock batch opens a dedicated connection for these calls, which must not queue behind checks. Renewals
//! include those of operations, loads of caches and running jobs. The first waiter opens a connection for subscriptions, which notifies
//! waiters of released locks, completed operations and loaded values. WAIT blocks its connection, so locks that require replication use
//! separate connections, and so do their renewals. Grants and renewals have separate groups of connections for 1, 2, 3, and 4 or more
//! replicas. Each group has at most `connections` connections, and at most 16. Simultaneous calls share one WAIT, so one or two
//! connections are enough while the replicas are healthy.
//!
//! A backend that was opened [from a pool](RedisBackend::from_pool) cannot subscribe. Waiters for a lock or an operation then poll once a
//! second, waiters for a cached value twice a second, and queue workers at least every 5 s.
//!
//! # Keys
//!
//! | data | key | beside it |
//! | --- | --- | --- |
//! | rate limit | `<prefix>:2:{rate_limit:<policy>:<key>}:<shape>:<part>` | |
//! | lock | `<prefix>:2:{lock:<name>:<key>}:lease` | channels `...:free` and `...:asked`; names `...:names`; queue `...:queue`, `...:positions` |
//! | operation | `<prefix>:2:{idempotency:<partition>}:<scope>:<key>:record` | channel `...:done` |
//! | records of a caller | `<prefix>:2:{idempotency}:<scope>:records` | on a cluster one for each partition |
//! | delay queue | `<prefix>:2:{delay_queue:<name>}:<part>` | further partitions `...{delay_queue:<name>#<number>}:<part>` |
//! | cached value | `<prefix>:2:{cache:<cache>:<key>}:entry` | `...:lease`, channel `...:changed` |
//! | tag of cached values | `<prefix>:2:{cache:<cache>:<tag>}:generation` | |
//! | exists filter | `<prefix>:2:{cache_filter:<filter>}:versions` | one or two versions `...:bits:<version>` |
//!
//! On a cluster, the braces keep all keys of one rate-limit key, lock, queue partition or filter in one slot. Every key has a time to live.
//! Two versions of Tollgate can share one Redis, for example during a rolling deploy, if two conditions hold. The number after the prefix
//! is the same, and the changelog lists no other incompatibility under *Data format*. Values have format numbers: a version that reads an
//! unknown number fails with a store error. A cached value with an unknown number is loaded again. Until 0.1 is published, formats may
//! change at any time.
//!
//! # Servers
//!
//! Redis 6.2 or later, or Valkey. If the server is older, and the user may run `INFO`, connecting fails with
//! [`ConnectError::Unsupported`]. A dedicated user needs these permissions, with your prefix in place of `tollgate`:
//!
//! ```text
//! ACL SETUSER tollgate on >password ~tollgate:2:* +eval +evalsha +unlink +get +mget +set +pttl +pexpire +time +getrange +setrange +strlen +append
//! ```
//!
//! If a permission is missing, connecting fails with an error that names it. A database other than 0, as in the example above, also
//! needs `+select`.
//!
//! Further permissions:
//!
//! * Locks with replication: `+wait`.
//! * Fair locks and fair semaphores, and read/write locks: `+zadd +zrem +zrange +zrangebyscore +zrank +zscore +zcard`.
//! * Record limits for each caller of an `IdempotencyLayer`: `+zadd +zrem +zrange +zrangebyscore +zcard +zscore`.
//! * Waiting for a lock, for the same request or for a cached value: `resetchannels &tollgate:2:* +publish +subscribe +unsubscribe`, on a cluster
//!   `+spublish +ssubscribe +sunsubscribe` too. Without these, waiters poll once a second, or twice for a cached value.
//! * Cheaper batches of lock releases: `+pubsub|numsub`. Releases are then published only to channels with subscribers.
//! * Listing locks or operations: `+scan`.
//! * Delay queues: `resetchannels &tollgate:2:* +publish +subscribe +unsubscribe +exists +hget +hset +hdel +hmget +hlen +hexists +zadd +zrem +zcard +zcount +zscore +zmscore +zrange +zrangebyscore +zremrangebyrank +zremrangebyscore +zpopmin`, on a cluster
//!   `+spublish +ssubscribe +sunsubscribe` too. Without the permissions on channels, workers poll every 5 s.
//! * Sentinel: `+role` on the data servers. A [Sentinel user](RedisOptions::sentinel_user) needs `+sentinel|master` and
//!   `+sentinel|get-master-addr-by-name`, and for announcements `+subscribe &+promoted-slave &+switch-master`.
//! * Cluster: `+cluster|slots +asking`.
//! * Check of the version, and warning about eviction, at startup: `+info`.
//!
//! If the user may not subscribe, the log has one warning, and the client tries again every 5 s.
//!
//! If `maxmemory-policy` allows eviction, an evicted key loses its count, lock, record or job. All keys have a time to live, so only
//! `noeviction` keeps them. With `+info`, the log has a warning at startup if the policy can evict keys. An evicted cached value is only
//! loaded again, so a Redis for caches alone may evict.
//!
//! # Metrics
//!
//! With the feature `metrics`. Install the recorder before the first wait for a lock, an operation, a cached value or a job:
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_redis_subscription_failures_total` | | failed attempts to subscribe; meanwhile waiters poll every 1 s (every 0.5 s for cached values), and workers every 5 s |
//!
//! The log has one WARN for each server where an attempt failed.
//!
//! # Encryption
//!
//! With the feature `tls`, the scheme `rediss` encrypts with rustls. The client trusts the certificate authorities of the operating system
//! or, if you set it, your [`ca_certificate`](RedisOptions::ca_certificate). [`client_certificate`](RedisOptions::client_certificate)
//! authenticates the client. If you have installed a rustls `CryptoProvider`, it is used; otherwise `ring` is installed.
//!
//! The server certificate must not be a CA certificate: `openssl req -x509` makes one with `CA:TRUE` unless you add
//! `-addext basicConstraints=CA:FALSE`. The private key of the client must not be encrypted.

mod address;
mod auxiliary_connections;
mod batch;
#[cfg(feature = "tls")]
mod certificates;
mod cluster;
mod codec;
mod connect_error;
mod connection;
mod diagnose;
mod error;
mod keys;
mod metrics;
mod option_checks;
mod options;
mod peer;
mod purpose;
mod replicated;
mod scripts;
mod sentinel;
mod server_check;
mod server_clock;
mod stores;
mod topology;
mod url;
mod url_parameters;

#[cfg(test)]
mod differential;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::auxiliary_connections::AuxiliaryConnections;
use self::batch::check::CheckBatcher;
use self::batch::lock::LockBatcher;
use self::batch::push::PushBatcher;
use self::error::store_error;
use self::keys::Keys;
use self::peer::Peer;
use self::scripts::Scripts;
use self::server_clock::ServerClock;
use self::topology::{Connections, Servers};
use crate::error::{ConnectError, StoreError};
use crate::store::shutdown::{ShutdownRegistry, ShutdownReport};

pub use self::options::RedisOptions;
/// Re-exported for [`RedisBackend::from_pool`]: the pool crate with bb8 and the Redis client in it.
pub use ::bb8_redis;

/// Keeps all data in Redis, shared by all processes that use the same server, database and prefix.
///
/// See the [module docs](self) for connections, keys and servers. Cheap to clone; clones share the connections, which close when the
/// last clone is dropped.
///
/// Create the backend in a runtime that outlives it. Calls may come from other runtimes, but the backend opens connections and follows
/// failovers in its own runtime. After this runtime has ended, the next call opens new connections in the runtime of its caller.
#[derive(Clone)]
pub struct RedisBackend {
    inner: Arc<Inner>,
}

/// Maximum number of concurrent tasks that refund the charges of a decision on several keys. Further refunds run in the caller, and
/// end early if the caller is dropped.
const MAX_REFUNDS: usize = 1_024;

struct Inner {
    servers: Arc<Servers>,
    keys: Arc<Keys>,
    scripts: Arc<Scripts>,
    // `None` on a cluster, where two keys hardly ever share a slot.
    check_batcher: Option<CheckBatcher>,
    auxiliary: AuxiliaryConnections,
    // One permit for each decision about several keys whose charges are being refunded.
    refunds: Arc<Semaphore>,
    // Created at the first lock; never on a cluster.
    lock_batcher: OnceLock<LockBatcher>,
    // Created at the first push.
    pushes: OnceLock<PushBatcher>,
    server_clock: ServerClock,
    shutdown: ShutdownRegistry,
}

impl RedisBackend {
    /// Connects with default [options](RedisOptions) to the servers that a [URL](RedisOptions::from_url) names.
    ///
    /// # Errors
    ///
    /// See [`RedisOptions::from_url`] and [`RedisOptions::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, ConnectError> {
        RedisOptions::from_url(url)?.connect().await
    }

    /// Connects like your pool: to the same server, with the same credentials, and with default [options](RedisOptions).
    ///
    /// The pool's manager opens separate connections. A pooled connection could be in a transaction or blocked by a command of its
    /// borrower.
    ///
    /// Turn on `TcpSettings::set_nodelay` in the settings of the manager's client; it is off by default. These connections are shared, so
    /// without it each command waits until the network has acknowledged the one before.
    ///
    /// If the server has no room for another client, the manager discards the server's message. With a password, the failure can then
    /// look like a rejected password. The error is then [`ConnectError::Credentials`], and later a store error with
    /// [`is_unauthorized`](StoreError::is_unauthorized).
    ///
    /// # Errors
    ///
    /// If the pool's manager cannot open a working connection within the connect timeout.
    pub async fn from_pool(pool: bb8::Pool<RedisConnectionManager>) -> Result<Self, ConnectError> {
        RedisOptions::from_pool(pool).connect().await
    }

    /// Pings Redis and returns the round-trip time. Use it for alerts, and for the readiness of a service that is useless without Redis.
    ///
    /// A service that uses only rate limits is ready without Redis: its limits continue in each process while Redis fails.
    ///
    /// ```no_run
    /// use axum::{Router, extract::State, http::StatusCode, routing::get};
    /// use tollgate::RedisBackend;
    ///
    /// async fn ready(State(backend): State<RedisBackend>) -> StatusCode {
    ///     match backend.ping().await {
    ///         Ok(_) => StatusCode::NO_CONTENT,
    ///         Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    ///     }
    /// }
    ///
    /// # async fn serve() -> Result<(), tollgate::BoxError> {
    /// let backend = RedisBackend::connect("redis://127.0.0.1/").await?;
    /// let app: Router = Router::new().route("/ready", get(ready)).with_state(backend);
    /// # drop(app);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Uses the connections of normal calls. Does not check permissions: a refused PING counts as a reply. On a cluster, one node that
    /// replies is enough; nodes are tried one after the other. Takes at most the connect timeout and the response timeout for each
    /// node.
    ///
    /// # Errors
    ///
    /// If each server fails to reply or reports that it cannot serve yet.
    pub async fn ping(&self) -> Result<Duration, StoreError> {
        let (mut from, mut failure) = (0, None);
        loop {
            let started = Instant::now();
            match self.inner.servers.send_to(from, |_| redis::cmd("PING")).await {
                Some((number, Err(error))) if error::code(&error) != Some("NOPERM") => match number.checked_add(1) {
                    Some(next) => (from, failure) = (next, failure.or(Some(error))),
                    None => return Err(store_error(failure.unwrap_or(error))),
                },
                Some(_) => return Ok(started.elapsed()),
                None => return Err(failure.map_or_else(StoreError::timeout, store_error)),
            }
        }
    }

    /// Closes everything that this process made from this backend, waits until it is closed, and returns what was left unfinished: see
    /// [`backend`](crate::backend#shutdown). Takes no longer than `deadline`, also while Redis does not answer.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        self.inner.shutdown.shutdown(deadline).await
    }

    /// Wraps connections after a check of the servers.
    async fn new(connections: Connections, peer: &Peer, keys: Keys) -> Result<Self, ConnectError> {
        let scripts = Scripts::new();
        server_check::probe(&connections.requests, peer, &keys, &scripts.server.probe).await?;
        Ok(Self::with_connections(connections, keys, scripts))
    }

    /// Wraps connections without a check of the servers.
    fn unchecked(connections: Connections, keys: Keys) -> Self {
        Self::with_connections(connections, keys, Scripts::new())
    }

    fn with_connections(connections: Connections, keys: Keys, scripts: Scripts) -> Self {
        let Connections { requests, dedicated, grants, renewals, response_timeout, source, runtime } = connections;
        let auxiliary = AuxiliaryConnections::new(dedicated, [grants, renewals], response_timeout, source, runtime);
        Self::with_scripts(Arc::new(requests), keys, auxiliary, scripts)
    }

    fn with_scripts(servers: Arc<Servers>, keys: Keys, auxiliary: AuxiliaryConnections, scripts: Scripts) -> Self {
        let (scripts, keys) = (Arc::new(scripts), Arc::new(keys));
        let check_batcher = (!servers.is_cluster())
            .then(|| CheckBatcher::new(Arc::clone(&servers), Arc::clone(&scripts), auxiliary.runtime()));
        let (lock_batcher, pushes) = (OnceLock::new(), OnceLock::new());
        let refunds = Arc::new(Semaphore::new(MAX_REFUNDS));
        let shutdown = ShutdownRegistry::default();
        Self {
            inner: Arc::new(Inner {
                servers,
                keys,
                scripts,
                check_batcher,
                refunds,
                auxiliary,
                lock_batcher,
                pushes,
                server_clock: ServerClock::new(),
                shutdown,
            }),
        }
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("keys", &self.inner.keys).field("servers", &self.inner.servers).finish()
    }
}
