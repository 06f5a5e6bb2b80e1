use std::fmt;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::{AsyncConnectionConfig, Client};

use super::RedisBackend;
use super::keys::Keys;
use super::lock::LockLinks;
use super::pool::{Connector, Pool};
use crate::error::{ConfigError, ConnectError};

/// How to reach Redis, and what to call things there.
///
/// ```no_run
/// use tollgate::RedisOptions;
///
/// # #[tokio::main] async fn main() -> Result<(), tollgate::ConnectError> {
/// let backend = RedisOptions::from_url("redis://127.0.0.1/")?.prefix("shop").connect().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedisOptions {
    source: Source,
    prefix: String,
    connections: u32,
    connect_timeout: Duration,
    response_timeout: Duration,
}

#[derive(Clone)]
enum Source {
    Client(Client),
    Pool(bb8::Pool<RedisConnectionManager>),
}

/// A few are enough, since each is shared by all callers and the server has one thread for all of them.
const DEFAULT_CONNECTIONS: u32 = 4;

impl RedisOptions {
    /// Reaches the server that a URL names: `redis://user:password@host:port/db` or `redis+unix:///path?db=0`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidUrl`]. Nothing is contacted yet.
    pub fn from_url(url: impl AsRef<str>) -> Result<Self, ConfigError> {
        let client = Client::open(url.as_ref()).map_err(|error| ConfigError::InvalidUrl { reason: reason(&error) })?;
        Ok(Self::new(Source::Client(client)))
    }

    /// Connects as a pool does that the program has already: see [`RedisBackend::from_pool`].
    pub fn from_pool(pool: bb8::Pool<RedisConnectionManager>) -> Self {
        Self::new(Source::Pool(pool))
    }

    fn new(source: Source) -> Self {
        Self {
            source,
            prefix: "tollgate".to_owned(),
            connections: DEFAULT_CONNECTIONS,
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_millis(500),
        }
    }

    /// What the name of every key begins with. Defaults to `tollgate`. Programs with the same prefix on the same database
    /// share their counts. Take a short one of letters, digits, `-`, `_`, `.` and `:`; any other byte is percent-encoded, and
    /// what is longer than [`Key::MAX_LEN`](crate::Key::MAX_LEN) bytes then is replaced by its digest.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How many connections to keep. Defaults to 4, each of which serves any number of requests at once.
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// How long it may take to open a connection, logging in included. Defaults to 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long one command may go unanswered. Defaults to 500 ms.
    ///
    /// The backstop for calls without a deadline of their own. A [`Limiter`](crate::Limiter) and a layer have one, which is
    /// shorter by default.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Connects, and makes sure that Redis lets us in.
    ///
    /// # Errors
    ///
    /// [`ConfigError::EmptyPool`] for a pool of no connections and [`ConfigError::ZeroTimeout`] for a timeout of zero; a
    /// [`StoreError`](crate::StoreError) if no connection could be opened within the connect timeout.
    pub async fn connect(self) -> Result<RedisBackend, ConnectError> {
        let Self { source, prefix, connections, connect_timeout, response_timeout } = self;
        if connections == 0 {
            return Err(ConfigError::EmptyPool.into());
        }
        if connect_timeout.is_zero() || response_timeout.is_zero() {
            return Err(ConfigError::ZeroTimeout.into());
        }
        let connector = match source {
            Source::Client(client) => {
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(None)
                    .set_response_timeout(Some(response_timeout))
                    .set_pipeline_buffer_size(PIPELINE_BUFFER);
                Connector::Client(Box::new((client, config)))
            }
            Source::Pool(pool) => Connector::Pool { pool, response_timeout },
        };
        let pool = Pool::open(connector.clone(), connections, connect_timeout).await?;
        Ok(RedisBackend::new(pool, Keys::new(&prefix), LockLinks::new(connector, connect_timeout)))
    }
}

/// How many commands may wait to be written to one connection before the next caller has to wait for a place. The client's
/// own default of 50 is fewer than the callers that one connection is meant to serve.
const PIPELINE_BUFFER: usize = 1_024;

/// What is wrong with a URL, without the part of the client's message that repeats a piece of it.
fn reason(error: &redis::RedisError) -> String {
    let text = error.to_string();
    let text = match error.detail() {
        Some(detail) => text.replace(detail, "..."),
        None => text,
    };
    // The client names its kind of error behind the sentence, which helps nobody here.
    text.split_once(" - ").map_or(text.as_str(), |(sentence, _)| sentence).to_owned()
}

impl fmt::Debug for RedisOptions {
    // The source is left out: it holds the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisOptions")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}
