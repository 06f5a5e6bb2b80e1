//! Counts, leases, operations and jobs in Redis, shared by every process that uses it.
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
//! # Topologies
//!
//! One server, the primary that Sentinels name, or a cluster: the URL says which ([`RedisOptions::from_url`]), and nothing else
//! in a program changes.
//!
//! * *Sentinel*: whenever a connection is opened, the Sentinels are asked for the primary, and that server whether it is one. One
//!   Sentinel that answers is enough, and one that hangs costs a few tenths of a second. They are asked again when one of them
//!   announces another primary (`+promoted-slave` or `+switch-master`), and every 0.4 s in any case: a
//!   server that has been replaced is left within a second, whether or not it still answers. With TLS, the primary is connected
//!   to by the address that the Sentinels tell, so its certificate must be for that.
//! * *Cluster*: a subject has all its keys in one slot, and goes to the node that serves it. MOVED, ASK and TRYAGAIN are followed at
//!   once and are no errors. Each node has connections of its own: one that is down or hangs concerns its own slots, and the map is
//!   read anew, from another node, until somebody else serves them. A decision about several subjects is one script where they
//!   share a slot; otherwise they are asked one after the other, and what was charged is given back when one says no. While a slot is
//!   open for a move, a node refuses whatever names several keys of which it has not all: fair and read/write locks are not granted then,
//!   sliding logs not counted, and queues stand still, until the slot has moved. Such a call is sent again, at least every 8 ms, until its deadline or the
//!   response timeout; it fails only if its slot is open for longer than that. A lock that is held is renewed and given back, and an operation ends.
//!
//!   Each node that has a channel is listened to on a connection of its own. If that connection ends, does not answer a PING within the response timeout
//!   (but at least 1 s and at most 5 s), or if the channel moves, this process subscribes again at the node that has the channel by then. All who wait there look once.
//!
//! With Sentinels and clusters Tollgate connects to the addresses that these announce. There is no mapping of addresses: in containers and behind
//! NAT, announce addresses that clients can reach (`cluster-announce-ip`, `cluster-announce-port`, `cluster-announce-hostname`,
//! `replica-announce-ip`).
//!
//! After a failover what replication had not carried is forgotten: `min-replicas-to-write` on the server bounds that.
//!
//! # Connections
//!
//! A bb8 pool of a few *multiplexed* connections for each server. A call borrows one, clones its handle and gives it back before it
//! sends anything, so no call waits for the round trip of another and a handful of connections serves thousands of requests at
//! once. There is no PING per checkout: a connection that fails is marked, is never handed out again, and is replaced.
//! One that was closed while it was idle is replaced before anything is sent. What is sent does not wait until the network has confirmed what
//! was sent before (`TCP_NODELAY`).
//! A server that is demoted to a replica is left for whatever its address leads to by then. While connections are refused,
//! calls fail at once instead of waiting for their deadline; a server that accepts them and does not answer costs calls their
//! deadline until that is known. An attempt to connect whose packets a network has lost is not waited for once a later one has come through. A command
//! whose answer is lost is never sent again, since it may have been counted.
//!
//! # Decisions that meet
//!
//! A decision that is nearly alone is a call of its own and waits for nobody. When more than a handful are on their way, or several were
//! answered together a moment ago, those that come wait until one of a few calls is back (the longer the round trip, the more there are), and then
//! go together in one script, each charged or denied by itself: exact, and less than half the work for Redis. Half of those who are there go in
//! each, so that Redis has the one to work on while the other is being answered. Not on a cluster, where hardly
//! two subjects share a slot. So do locks that are taken and those that are given back at the same time, all of them in one script: each is granted,
//! refused or given back by itself, and a cycle costs Redis about half of what its two calls would.
//!
//! Once there are locks or operations, one more connection is opened, for renewing and giving back, which do not queue behind decisions, and for
//! locks that go together; and one that listens for locks becoming free and operations being done, if somebody waits for one. Waiting for replicas holds a connection
//! up, so locks that ask for that have their own, and renewals others: for each number of replicas as many as requests have, or 16, at the most. Those
//! who ask at the same time go together and share the wait, so where replicas are well one or two connections are enough. A backend that was opened [from a
//! pool](RedisBackend::from_pool) has no means to listen: who waits there for a lock or an operation looks once a second, and
//! a worker of a queue every five seconds at the latest.
//!
//! # Keys
//!
//! `<prefix>:2:{rate_limit:<policy>:<subject>}:<shape>:<part>`, `<prefix>:2:{lock:<namespace>:<subject>}:lease` with the
//! channels `...:free` and `...:asked`, what its holders are called, `...:names`, and who stands in line for it, `...:line` and `...:places`, beside it, and
//! `<prefix>:2:{idempotency:<part>}:<scope>:<key>:record` with the channel `...:done`, and `<prefix>:2:{idempotency}:<scope>:records` counts the records of a caller; a delay queue is `<prefix>:2:{delay_queue:<name>}:<part>`. The braces make a subject, and a queue, one slot of a cluster. Each key has a
//! time to live. Two releases of Tollgate may share one Redis, during a rolling deploy for instance, if the number after the prefix is the same *and* the
//! changelog says nothing else under *Data format*. Values have versions of their own: a release fails with a store
//! error where it meets a version that it does not know. Until 0.1 is released, formats may change at any time.
//!
//! # Servers
//!
//! Redis 6.2 or later, or Valkey; connecting to an older one is an error that says so. A user of their own needs no more than this,
//! with the prefix in the place of `tollgate`:
//!
//! ```text
//! ACL SETUSER tollgate on >password ~tollgate:2:* +eval +evalsha +unlink +get +mget +set +pttl +pexpire +time +getrange +setrange +strlen +append
//! ```
//!
//! One that may not run all of these is not let in, with an error that names what is missing. For another database than the first one, as in
//! the example above, also `+select`.
//!
//! For locks that replicas have to know of `+wait`, and for those that are taken in line `+zadd +zrem +zrange +zrangebyscore +zrank +zscore +zcard`, as well.
//!
//! For the records of the callers of an `IdempotencyLayer`, which are counted, also `+zadd +zrem +zrange +zrangebyscore +zcard`.
//!
//! For those who wait for a lock or for the same request also `resetchannels &tollgate:2:* +publish +subscribe +unsubscribe`, on a cluster `+spublish +ssubscribe +sunsubscribe` too. Without
//! these who waits looks once a second. With `+pubsub|numsub`, locks that are given back at the same time are only told of where somebody listens, which is cheaper. Listing locks or operations takes `+scan`.
//! That somebody may not listen is a warning in the log, once, and it is tried again every five seconds.
//!
//! For delay queues also `resetchannels &tollgate:2:* +publish +subscribe +unsubscribe +exists +hget +hset +hdel +hmget +hlen +hexists +zadd +zrem +zcard +zcount +zscore +zmscore +zrange +zrangebyscore +zremrangebyrank +zremrangebyscore +zpopmin`,
//! on a cluster `+spublish +ssubscribe +sunsubscribe` too. Without these on channels workers look every five seconds.
//!
//! With Sentinels `+role` is needed as well (and there, for a [user](RedisOptions::sentinel_user) of their own, `+sentinel|master` and
//! `+sentinel|get-master-addr-by-name`, and for announcements `+subscribe &+promoted-slave &+switch-master`), with a cluster `+cluster|slots +asking`. A user who may run `INFO` too is told at the
//! start of a `maxmemory-policy` that can evict our keys: a key that is evicted is a count that starts again, and since all keys
//! have a time to live, only `noeviction` leaves them alone.
//!
//! # Metrics
//!
//! With the feature `metrics`, and a recorder that was installed before anything is waited for:
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `tollgate_redis_subscription_failures_total` | | attempts to subscribe to messages that failed. Meanwhile whoever waits for a lock or an operation looks once a second, and a worker every five seconds. The log has one WARN for each server |
//!
//! # Encryption
//!
//! With the feature `tls`, `rediss` in the place of `redis` encrypts with rustls. Servers are trusted as the operating system does, or by
//! [`ca_certificate`](RedisOptions::ca_certificate); [`client_certificate`](RedisOptions::client_certificate) shows who we
//! are. A program that has installed a rustls `CryptoProvider` keeps it; otherwise `ring` is installed.
//!
//! The certificate of a server must not be that of an authority: `openssl req -x509` makes one with `CA:TRUE` unless it gets
//! `-addext basicConstraints=CA:FALSE`. The private key of a client must not be encrypted.

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
mod options;
mod replicated;
mod scripts;
mod sentinel;
mod server_check;
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

use self::batch::check::CheckBatcher;
use self::batch::lock::LockBatcher;
use self::batch::push::PushBatcher;
use self::connect_error::Peer;
use self::error::store_error;
use self::keys::Keys;
use self::scripts::Scripts;
use self::stores::lock::LockLinks;
use self::topology::{Connections, Servers};
use crate::error::{ConnectError, StoreError};

pub use self::options::RedisOptions;
/// The pool crate and, inside it, bb8 and the Redis client that [`RedisBackend::from_pool`] speaks.
pub use ::bb8_redis;

/// Keeps everything in Redis: limits hold across all processes that use the same server, database and prefix.
///
/// See the [module docs](self) for connections, keys and servers. Cheap to clone; clones share the connections, which are
/// closed when the last clone is dropped.
///
/// Make it in a runtime that lasts for as long as it is used. Calls may come from others, but it is in that one that connections are opened and
/// failovers are followed. When it has ended, connections are opened anew in that of the next call.
#[derive(Clone)]
pub struct RedisBackend {
    inner: Arc<Inner>,
}

struct Inner {
    servers: Arc<Servers>,
    keys: Arc<Keys>,
    scripts: Arc<Scripts>,
    // Not on a cluster, where hardly two subjects share a slot.
    check_batcher: Option<CheckBatcher>,
    locks: LockLinks,
    // One for each decision about several whose charges are being given back.
    refunds: Arc<Semaphore>,
    // From the first lock on, and not on a cluster either.
    lock_batcher: OnceLock<LockBatcher>,
    // From the first push on.
    pushes: OnceLock<PushBatcher>,
}

impl RedisBackend {
    /// Connects with the default [options](RedisOptions) to the servers that a [URL](RedisOptions::from_url) names.
    ///
    /// # Errors
    ///
    /// As [`RedisOptions::from_url`] and [`RedisOptions::connect`].
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, ConnectError> {
        RedisOptions::from_url(url)?.connect().await
    }

    /// Connects as a pool does that the program has already: to the same server, with the same credentials, and with the
    /// default [options](RedisOptions).
    ///
    /// The connections are opened by the pool's manager and are not those that the pool hands out, since whoever has borrowed
    /// one may be in the middle of a transaction or waiting for a blocking command.
    ///
    /// They are as the manager opens them: `TcpSettings::set_nodelay` of its client's settings, which that leaves off, is worth turning on, since
    /// calls share connections. With it off each waits until the network has confirmed the one before.
    ///
    /// With a password, a server that has no room for another client may be taken for one that refuses the password: the manager keeps nothing
    /// of what such a server says. It is [`ConnectError::Credentials`] then, and later a store error that
    /// [is about credentials](StoreError::is_unauthorized).
    ///
    /// # Errors
    ///
    /// If the pool's manager cannot open a connection that answers within the connect timeout.
    pub async fn from_pool(pool: bb8::Pool<RedisConnectionManager>) -> Result<Self, ConnectError> {
        RedisOptions::from_pool(pool).connect().await
    }

    /// Whether Redis answers, and how soon: for a service that is to get no requests while it does not.
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
    /// Goes by the connections that requests go by, and says nothing about what a user may do there. A refusal is an answer. On a cluster one
    /// node that answers is enough: they are asked one after the other. Takes no longer than it may take to connect and to answer, for each
    /// of them.
    ///
    /// # Errors
    ///
    /// If nobody answers, or a server says that it cannot serve yet.
    pub async fn ping(&self) -> Result<Duration, StoreError> {
        let (mut from, mut failure) = (0, None);
        loop {
            let begun = Instant::now();
            match self.inner.servers.send_to(from, |_| redis::cmd("PING")).await {
                Some((number, Err(error))) if error::code(&error) != Some("NOPERM") => match number.checked_add(1) {
                    Some(next) => (from, failure) = (next, failure.or(Some(error))),
                    None => return Err(store_error(failure.unwrap_or(error))),
                },
                Some(_) => return Ok(begun.elapsed()),
                None => return Err(failure.map_or_else(StoreError::timeout, store_error)),
            }
        }
    }

    /// Takes over connections, after a look at the servers behind them.
    async fn new(links: Connections, peer: &Peer, keys: Keys) -> Result<Self, ConnectError> {
        let scripts = Scripts::new();
        server_check::probe(&links.requests, peer, &keys, &scripts.probe).await?;
        Ok(Self::with_links(links, keys, scripts))
    }

    /// The same without a look.
    fn unseen(links: Connections, keys: Keys) -> Self {
        Self::with_links(links, keys, Scripts::new())
    }

    fn with_links(links: Connections, keys: Keys, scripts: Scripts) -> Self {
        let Connections { requests, apart, grants, renewals, patience, source, home } = links;
        let locks = LockLinks::new(apart, [grants, renewals], patience, source, home);
        Self::with_scripts(Arc::new(requests), keys, locks, scripts)
    }

    fn with_scripts(servers: Arc<Servers>, keys: Keys, locks: LockLinks, scripts: Scripts) -> Self {
        let (scripts, keys) = (Arc::new(scripts), Arc::new(keys));
        let check_batcher = (!servers.is_cluster())
            .then(|| CheckBatcher::new(Arc::clone(&servers), Arc::clone(&scripts), locks.home()));
        let (lock_batcher, pushes) = (OnceLock::new(), OnceLock::new());
        let refunds = Arc::new(Semaphore::new(stores::rate_limit::MAX_REFUNDS));
        Self { inner: Arc::new(Inner { servers, keys, scripts, check_batcher, refunds, locks, lock_batcher, pushes }) }
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("keys", &self.inner.keys).field("servers", &self.inner.servers).finish()
    }
}
