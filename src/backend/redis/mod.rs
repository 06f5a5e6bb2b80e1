//! Counts and leases in Redis, shared by every process that uses it.
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
//! # Connections
//!
//! A bb8 pool of a few *multiplexed* connections. A call borrows one, clones its handle and gives it back before it sends
//! anything, so no call waits for the round trip of another and a handful of connections serves thousands of requests at
//! once. There is no PING per checkout: a connection that fails is marked, is never handed out again, and is replaced.
//! A server that is demoted to a replica is left for whatever its address leads to by then. While connections are refused,
//! calls fail at once instead of waiting for their deadline; a server that accepts them and does not answer costs calls their
//! deadline until that is known.
//!
//! Once there are locks, two more connections are opened: one for renewing and giving back, which do not queue behind requests, and
//! one that listens for locks becoming free, if somebody waits for one. A backend that was opened [from a
//! pool](RedisBackend::from_pool) has no means to listen: who waits there looks once a second.
//!
//! # Keys
//!
//! `<prefix>:2:{rate_limit:<policy>:<subject>}:<shape>:<part>` and `<prefix>:2:{lock:<namespace>:<subject>}:lease`, with the
//! channel `...:free` beside it. The braces make a subject one slot of a cluster. Each key has a
//! time to live. Two releases of Tollgate may share one Redis as long as the number after the prefix is the same.
//!
//! # Servers
//!
//! A user of their own needs no more than this, with the prefix in the place of `tollgate`:
//!
//! ```text
//! ACL SETUSER tollgate on >password ~tollgate:2:* +eval +evalsha +unlink +get +set +pttl +pexpire +time +getrange +strlen +append
//! ```
//!
//! For locks also `&tollgate:2:* +publish +subscribe +unsubscribe`. Without these who waits for a lock looks once a second.
//!
//! Redis 6.2 or later, or Valkey. `maxmemory-policy` should be `noeviction` or a `volatile` one with room to spare: a key
//! that is evicted is a count that starts again.

mod counts;
mod error;
mod keys;
mod lock;
mod options;
mod pool;
mod rate_limit;
mod scripts;
mod subscriber;

#[cfg(test)]
mod differential;

use std::fmt;
use std::sync::Arc;

use bb8_redis::RedisConnectionManager;

use self::keys::Keys;
use self::lock::LockLinks;
use self::pool::Pool;
use self::scripts::Scripts;
use crate::error::ConnectError;

pub use self::options::RedisOptions;
/// The pool crate and, inside it, bb8 and the Redis client that [`RedisBackend::from_pool`] speaks.
pub use ::bb8_redis;

/// Keeps everything in Redis: limits hold across all processes that use the same server, database and prefix.
///
/// See the [module docs](self) for connections, keys and servers. Cheap to clone; clones share the connections, which are
/// closed when the last clone is dropped.
#[derive(Clone)]
pub struct RedisBackend {
    inner: Arc<Inner>,
}

struct Inner {
    pool: Pool,
    keys: Keys,
    scripts: Scripts,
    locks: LockLinks,
}

impl RedisBackend {
    /// Connects with the default [options](RedisOptions): `redis://user:password@host:port/db` or `redis+unix:///path`.
    ///
    /// # Errors
    ///
    /// If the URL is malformed, or Redis does not let us in within the connect timeout.
    pub async fn connect(url: impl AsRef<str>) -> Result<Self, ConnectError> {
        RedisOptions::from_url(url)?.connect().await
    }

    /// Connects as a pool does that the program has already: to the same server, with the same credentials, and with the
    /// default [options](RedisOptions).
    ///
    /// The connections are opened by the pool's manager and are not those that the pool hands out, since whoever has borrowed
    /// one may be in the middle of a transaction or waiting for a blocking command.
    ///
    /// # Errors
    ///
    /// If the pool's manager cannot open a connection that answers within the connect timeout.
    pub async fn from_pool(pool: bb8::Pool<RedisConnectionManager>) -> Result<Self, ConnectError> {
        RedisOptions::from_pool(pool).connect().await
    }

    fn new(pool: Pool, keys: Keys, locks: LockLinks) -> Self {
        Self { inner: Arc::new(Inner { pool, keys, scripts: Scripts::new(), locks }) }
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("keys", &self.inner.keys).field("pool", &self.inner.pool).finish()
    }
}
