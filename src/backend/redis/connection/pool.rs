//! A pool of multiplexed connections. A call clones a connection, and returns the original before it sends a command.

use std::fmt;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use bb8::{ManageConnection, RunError};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, Value};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::connector::Connector;
use super::handle::{Connection, LATE_AFTER, ServerHealth};
use super::runtime::RuntimeHandle;
use super::timeout_error::no_connection;
use crate::backend::redis::error;
use crate::backend::redis::sentinel::PrimaryTerm;

/// The pause after a failed attempt to connect. Doubles with each further failure.
const MIN_BACKOFF: Duration = Duration::from_millis(10);
/// The longest pause. It is short enough for the pool to recover within a second of the server's return.
const MAX_BACKOFF: Duration = Duration::from_millis(250);
/// After a failed attempt, calls without a connection fail at once with its error until the next attempt should be over. This time is the
/// next pause, the duration of the failed attempt, and this margin. Under load there is an attempt after every pause. After a lull the
/// state of the server is unknown, so a call waits for the attempt that it triggers.
const FAILURE_VALIDITY: Duration = Duration::from_millis(100);

/// Multiplexed connections to one server, or to the primary of a Sentinel service.
#[derive(Clone)]
pub(crate) struct Pool {
    connector: Connector,
    connections: u32,
    // How many connections to open in advance.
    min_idle: Option<u32>,
    options: PoolOptions,
    // Shared with other pools of the same server.
    server_state: Arc<ServerState>,
    // Replaced after its runtime has ended, because attempts to connect that began there never finish.
    inner: Arc<RwLock<Arc<PoolInner>>>,
}

/// Opens and lends connections in one runtime.
struct PoolInner {
    pool: bb8::Pool<Manager>,
    // The last attempt to connect, if it failed.
    last_failure: watch::Receiver<Option<ConnectFailure>>,
    runtime: Arc<RuntimeHandle>,
}

/// Timeouts and the runtime of a pool.
#[derive(Clone)]
pub(crate) struct PoolOptions {
    /// For opening a connection, and for waiting for one.
    pub(crate) connect: Duration,
    /// For one command.
    pub(crate) response: Duration,
    /// The runtime in which connections are opened. After it has ended, the runtime of the caller is used.
    pub(crate) runtime: Arc<RuntimeHandle>,
}

/// An attempt to connect that failed.
struct ConnectFailure {
    error: RedisError,
    // When the next attempt should be over. Then calls no longer fail with this error.
    until: Instant,
}

/// The state of attempts to connect and of open connections, which all pools of one server share. So only one of the pools logs a change.
#[derive(Default)]
pub(crate) struct ServerState {
    // The last attempt to connect, if it failed.
    failure_sender: watch::Sender<Option<ConnectFailure>>,
    // The last attempt that succeeded: when it began, and how long it took.
    success_sender: watch::Sender<Option<(Instant, Duration)>>,
    backoff: Mutex<Backoff>,
    health: Arc<ServerHealth>,
}

impl Pool {
    /// Opens all connections and waits for them.
    pub(crate) async fn open(
        connector: Connector,
        connections: u32,
        options: PoolOptions,
        server_state: &Arc<ServerState>,
    ) -> Result<Self, RedisError> {
        let server_state = Arc::clone(server_state);
        let (manager, last_failure) = Manager::new(connector.clone(), options.clone(), Arc::clone(&server_state));
        let pool = builder(connections, Some(connections)).build(manager).await?;
        let inner =
            Arc::new(RwLock::new(Arc::new(PoolInner { pool, last_failure, runtime: Arc::clone(&options.runtime) })));
        Ok(Self { connector, connections, min_idle: Some(connections), options, server_state, inner })
    }

    /// Opens all connections in the background.
    pub(crate) fn eager(
        connector: Connector,
        connections: u32,
        options: PoolOptions,
        server_state: &Arc<ServerState>,
    ) -> Self {
        Self::unopened(connector, connections, Some(connections), options, server_state)
    }

    /// Opens connections when they are needed.
    pub(crate) fn lazy(
        connector: Connector,
        connections: u32,
        options: PoolOptions,
        server_state: &Arc<ServerState>,
    ) -> Self {
        Self::unopened(connector, connections, None, options, server_state)
    }

    fn unopened(
        connector: Connector,
        connections: u32,
        min_idle: Option<u32>,
        options: PoolOptions,
        server_state: &Arc<ServerState>,
    ) -> Self {
        let server_state = Arc::clone(server_state);
        let inner =
            PoolInner::new(connector.clone(), connections, min_idle, options.clone(), Arc::clone(&server_state));
        Self { connector, connections, min_idle, options, server_state, inner: Arc::new(RwLock::new(Arc::new(inner))) }
    }

    /// The current inner pool. If its runtime has ended, it is replaced by one in the caller's runtime.
    fn inner(&self) -> Arc<PoolInner> {
        let inner = Arc::clone(&self.inner.read().unwrap_or_else(PoisonError::into_inner));
        if !inner.runtime.has_ended() {
            return inner;
        }
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if inner.runtime.has_ended() {
            let options = PoolOptions { runtime: Arc::new(RuntimeHandle::here()), ..self.options.clone() };
            let server_state = Arc::clone(&self.server_state);
            *inner = Arc::new(PoolInner::new(
                self.connector.clone(),
                self.connections,
                self.min_idle,
                options,
                server_state,
            ));
        }
        Arc::clone(&inner)
    }

    /// Sends one command and waits for its reply.
    ///
    /// If it fails after the command was sent, the command may have run, so nothing is sent twice.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        self.exchange(command, false, None).await
    }

    /// Like [`send`](Self::send), with an optional timeout and an optional ASKING, for a node that takes over the slot of the key. If
    /// `timeout` exceeds the default one, the call fails once the default has passed and the Sentinels have named another primary.
    pub(crate) async fn exchange(
        &self,
        command: &Cmd,
        asking: bool,
        timeout: Option<Duration>,
    ) -> Result<Value, RedisError> {
        let mut connection = self.borrow().await.map_err(error::not_executed)?;
        let Some(timeout) = timeout else {
            return connection.send(command, asking).await;
        };
        // Boxed to keep the future of calls with the default timeout small.
        Box::pin(connection.send_with_timeout(command, asking, timeout)).await
    }

    /// Waits until a connection is available.
    pub(crate) async fn connected(&self) -> Result<(), RedisError> {
        self.borrow().await.map(drop).map_err(error::not_executed)
    }

    /// Whether the last attempt to open a connection failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.inner().last_failure.borrow().is_some()
    }

    /// A clone of a connection that is not known to be dead. The original is back in the pool on return.
    pub(crate) async fn borrow(&self) -> Result<Connection, RedisError> {
        // Each iteration removes a broken connection from the pool for good. So the loop needs at most one iteration for each
        // connection, and one more for a working one.
        for _ in 0..=self.connections {
            let inner = self.inner();
            let checkout = tokio::select! {
                biased;
                checkout = inner.runtime.inside(inner.checkout()) => checkout,
                // There is no connection, and the last attempt to open one failed just now: fail at once with its error. `checkout` has
                // triggered the next attempt.
                error = inner.unreachable() => return Err(error.unwrap_or_else(|| no_connection(self.options.connect))),
                // This timeout uses the clock of the caller's runtime, because the clock of the pool's runtime may be stopped.
                () = async { Box::pin(sleep(self.options.connect)).await } => return Err(no_connection(self.options.connect)),
            };
            let connection = match checkout {
                Some(Ok(connection)) => connection,
                Some(Err(RunError::User(error))) => return Err(error),
                Some(Err(RunError::TimedOut)) => return Err(no_connection(self.options.connect)),
                // The runtime has just ended.
                None => continue,
            };
            if !connection.is_broken() {
                return Ok(connection);
            }
        }
        Err(no_connection(self.options.connect))
    }
}

impl PoolInner {
    /// Creates the pool in the current runtime.
    fn new(
        connector: Connector,
        connections: u32,
        min_idle: Option<u32>,
        options: PoolOptions,
        server_state: Arc<ServerState>,
    ) -> Self {
        let runtime = Arc::clone(&options.runtime);
        let (manager, last_failure) = Manager::new(connector, options, server_state);
        Self { pool: builder(connections, min_idle).build_unchecked(manager), last_failure, runtime }
    }

    /// A clone of the next connection.
    async fn checkout(&self) -> Result<Connection, RunError<RedisError>> {
        let mut connection = self.pool.get().await?;
        connection.probe_if_idle();
        Ok(connection.clone())
    }

    /// Waits until there is no connection and the last attempt to open one failed recently. Returns its error.
    async fn unreachable(&self) -> Option<RedisError> {
        let started = Instant::now();
        let applies = |last_failure: &Option<ConnectFailure>| {
            let recent = last_failure.as_ref().is_some_and(|failure| started < failure.until);
            // If the pool has a connection, another call holds it, but only for an instant.
            recent && self.pool.state().connections == 0
        };
        let mut last_failure = self.last_failure.clone();
        let last_failure = last_failure.wait_for(applies).await.ok()?;
        Some(last_failure.as_ref()?.error.clone())
    }
}

fn builder(connections: u32, min_idle: Option<u32>) -> bb8::Builder<Manager> {
    bb8::Pool::builder()
        .max_size(connections)
        .min_idle(min_idle)
        .test_on_check_out(false)
        .retry_connection(false)
        // The caller has its own timeout.
        .connection_timeout(Duration::MAX)
        .idle_timeout(None)
        .max_lifetime(None)
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner.read().unwrap_or_else(PoisonError::into_inner).pool.state(), f)
    }
}

/// Opens connections for bb8, and detects broken ones.
pub(crate) struct Manager {
    connector: Connector,
    options: PoolOptions,
    server_state: Arc<ServerState>,
}

/// Limits how often a server that is down is connected to.
#[derive(Default)]
struct Backoff {
    length: Duration,
    until: Option<Instant>,
}

impl ManageConnection for Manager {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> Result<Connection, RedisError> {
        let ServerState { failure_sender, success_sender, health, .. } = &*self.server_state;
        let until = self.server_state.backoff().until;
        if let Some(until) = until {
            sleep_until(until).await;
        }
        let started = Instant::now();
        let outcome = match timeout(self.options.connect, self.attempt()).await {
            // The server accepted the connection and does not reply.
            Ok(Err(error)) if error::inner(&error).is_timeout() => {
                let no_reply = no_connection(self.options.response.min(self.options.connect));
                Err(error::peer_of(&error)
                    .map_or_else(|| no_reply.clone(), |peer| error::with_peer(peer.clone(), no_reply.clone())))
            }
            Ok(outcome) => outcome,
            Err(_) => Err(no_connection(self.options.connect)),
        };
        match &outcome {
            Ok(_) => {
                success_sender.send_replace(Some((started, started.elapsed())));
                *self.server_state.backoff() = Backoff::default();
                if failure_sender.send_replace(None).is_some() {
                    tracing::info!(server = %self.connector, "connected to redis again");
                }
            }
            Err(error) => {
                let backoff = self.server_state.backoff().extend();
                let failure = ConnectFailure {
                    error: error.clone(),
                    until: Instant::now() + backoff + started.elapsed() + FAILURE_VALIDITY,
                };
                if failure_sender.send_replace(Some(failure)).is_none() {
                    tracing::warn!(server = %self.connector, %error, "cannot connect to redis");
                }
            }
        }
        outcome.map(|(connection, term)| Connection::new(connection, self.options.response, term, health))
    }

    async fn is_valid(&self, connection: &mut Connection) -> Result<(), RedisError> {
        connection.ping().await
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.is_broken()
    }
}

impl Manager {
    fn new(
        connector: Connector,
        options: PoolOptions,
        server_state: Arc<ServerState>,
    ) -> (Self, watch::Receiver<Option<ConnectFailure>>) {
        let last_failure = server_state.failure_sender.subscribe();
        (Self { connector, options, server_state }, last_failure)
    }

    /// Opens a connection. If a later attempt succeeds first, the packets of this one may be lost, so it starts again.
    async fn attempt(&self) -> Result<(MultiplexedConnection, Option<PrimaryTerm>), RedisError> {
        loop {
            tokio::select! {
                biased;
                outcome = self.connector.connect() => return outcome,
                () = self.server_state.overtaken(Instant::now()) => {}
            }
        }
    }
}

impl ServerState {
    /// Waits until an attempt that began after `started` has succeeded, and then for the duration of that attempt plus [`LATE_AFTER`].
    async fn overtaken(&self, started: Instant) {
        let is_later = |success: &Option<(Instant, Duration)>| success.is_some_and(|(at, _)| at > started);
        let mut success = self.success_sender.subscribe();
        let later = success.wait_for(is_later).await.ok().and_then(|later| *later);
        match later {
            Some((_, took)) => sleep(took + LATE_AFTER).await,
            None => pending().await,
        }
    }

    fn backoff(&self) -> MutexGuard<'_, Backoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backoff {
    fn extend(&mut self) -> Duration {
        self.length = (self.length * 2).clamp(MIN_BACKOFF, MAX_BACKOFF);
        self.until = Some(Instant::now() + self.length);
        self.length
    }
}

#[cfg(test)]
mod tests {
    use redis::{AsyncConnectionConfig, Client, RedisConnectionInfo};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Answers each request with PONG.
    async fn serve(mut client: TcpStream) {
        let mut request = [0; 1024];
        while client.read(&mut request).await.is_ok_and(|read| read > 0) && client.write_all(b"+PONG\r\n").await.is_ok()
        {
        }
    }

    #[tokio::test]
    async fn lost_connect_attempt_is_repeated_after_later_success() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}/", server.local_addr().unwrap());
        let info = redis::IntoConnectionInfo::into_connection_info(url).unwrap();
        let client =
            Client::open(info.set_redis_settings(RedisConnectionInfo::default().set_skip_set_lib_name())).unwrap();
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let connector = Connector::Client(Box::new((client, config)));
        let hour = Duration::from_secs(3_600);
        let options = PoolOptions { connect: hour, response: hour, runtime: Arc::new(RuntimeHandle::here()) };
        let server_state = Arc::default();
        let [one, other] = [(); 2].map(|()| Pool::lazy(connector.clone(), 1, options.clone(), &server_state));

        let waiting = tokio::spawn(async move { one.connected().await });
        let (lost, _) = server.accept().await.unwrap();
        let serving = tokio::spawn(async move {
            loop {
                let (client, _) = server.accept().await.unwrap();
                tokio::spawn(serve(client));
            }
        });
        other.connected().await.unwrap();
        timeout(Duration::from_secs(10), waiting).await.expect("the lost attempt is repeated").unwrap().unwrap();
        serving.abort();
        drop(lost);
    }
}
