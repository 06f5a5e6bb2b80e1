//! Connections that are borrowed for an instant, never for a round trip.

use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;
use std::{fmt, io};

use bb8::{ManageConnection, RunError};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, Value};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::connect::Connector;
use super::handle::{Connection, LATE, PoolHealth};
use super::runtime::RuntimeHandle;
use crate::backend::redis::error;
use crate::backend::redis::sentinel::PrimaryTerm;

/// The pause after a failed attempt to connect, doubled with each further one.
const MIN_BACKOFF: Duration = Duration::from_millis(10);
/// The longest pause: short enough for the pool to be whole within a second of the server's return.
const MAX_BACKOFF: Duration = Duration::from_millis(250);
/// How long a failed attempt to connect speaks for the next one, beside the pause before it and the time that it may take. While calls
/// come there is an attempt after every pause; after a lull nothing is known, and a call waits for the attempt that it sets off.
const FAILURE_VALIDITY: Duration = Duration::from_millis(100);

/// Multiplexed connections to one server, or to whichever is the primary of a service.
#[derive(Clone)]
pub(crate) struct Pool {
    connector: Connector,
    connections: u32,
    // How many are opened before they are needed.
    min_idle: Option<u32>,
    options: PoolOptions,
    // With those of other pools to the same server, if it has any.
    server_state: Arc<ServerState>,
    // Another one when the runtime has ended in which it opened connections: what it had begun there is never finished.
    inner: Arc<RwLock<Arc<PoolInner>>>,
}

/// Who opens and lends connections, and where.
struct PoolInner {
    pool: bb8::Pool<Manager>,
    // The last attempt to connect, if it failed.
    last_failure: watch::Receiver<Option<ConnectFailure>>,
    runtime: Arc<RuntimeHandle>,
}

/// On what terms there are connections.
#[derive(Clone)]
pub(crate) struct PoolOptions {
    /// Opening a connection, and waiting for one.
    pub(crate) connect: Duration,
    /// One command.
    pub(crate) response: Duration,
    /// Where they are opened, as long as it is there.
    pub(crate) home: Arc<RuntimeHandle>,
}

/// An attempt to connect that failed.
struct ConnectFailure {
    error: RedisError,
    // Until when the next attempt should be over.
    until: Instant,
}

/// What those tell each other who open connections to one server: one of them speaks for all, in the log as well.
#[derive(Default)]
pub(crate) struct ServerState {
    // The last attempt to connect, if it failed.
    failure_sender: watch::Sender<Option<ConnectFailure>>,
    // The last attempt that did not: when it began, and how long it took.
    success_sender: watch::Sender<Option<(Instant, Duration)>>,
    backoff: Mutex<Backoff>,
    health: Arc<PoolHealth>,
}

impl Pool {
    /// Opens all connections, beside those of other pools to the same server.
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
            Arc::new(RwLock::new(Arc::new(PoolInner { pool, last_failure, runtime: Arc::clone(&options.home) })));
        Ok(Self { connector, connections, min_idle: Some(connections), options, server_state, inner })
    }

    /// The same, but does not wait for them.
    pub(crate) fn eager(
        connector: Connector,
        connections: u32,
        options: PoolOptions,
        server_state: &Arc<ServerState>,
    ) -> Self {
        Self::unopened(connector, connections, Some(connections), options, server_state)
    }

    /// The same without a connection until one is needed.
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

    /// Whoever lends connections; from now on in the caller's runtime if the one has ended in which that was done.
    fn inner(&self) -> Arc<PoolInner> {
        let inner = Arc::clone(&self.inner.read().unwrap_or_else(PoisonError::into_inner));
        if !inner.runtime.has_ended() {
            return inner;
        }
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if inner.runtime.has_ended() {
            let options = PoolOptions { home: Arc::new(RuntimeHandle::here()), ..self.options.clone() };
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

    /// Sends one command and waits for its answer.
    ///
    /// A failure after the command was sent leaves open whether it ran, so nothing is sent twice.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        self.exchange(command, false, None).await
    }

    /// The same, also to a node that is about to take over the slot of the key, with ASKING, and for longer or less than commands are
    /// waited for otherwise. Longer only while the Sentinels name this primary, if there are any.
    pub(crate) async fn exchange(
        &self,
        command: &Cmd,
        asking: bool,
        timeout: Option<Duration>,
    ) -> Result<Value, RedisError> {
        let mut connection = self.borrow().await.map_err(error::unsent)?;
        let Some(timeout) = timeout else {
            return connection.send(command, asking).await;
        };
        // Apart, so that what is not waited for longer has no room for it to carry along.
        Box::pin(connection.send_with_timeout(command, asking, timeout)).await
    }

    /// Waits until there is a connection to send something by.
    pub(crate) async fn connected(&self) -> Result<(), RedisError> {
        self.borrow().await.map(drop).map_err(error::unsent)
    }

    /// Whether the last attempt to open a connection failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.inner().last_failure.borrow().is_some()
    }

    /// A clone of the handle of a connection that is not known to be dead. The original is back in the pool on return.
    pub(crate) async fn borrow(&self) -> Result<Connection, RedisError> {
        // Each turn takes a broken connection out of the pool for good, so there are at most as many turns as connections,
        // and one more for a sound one.
        for _ in 0..=self.connections {
            let inner = self.inner();
            let checkout = tokio::select! {
                biased;
                checkout = inner.runtime.inside(inner.checkout()) => checkout,
                // No connection is there and the last attempt to open one failed just now: say why at once. Asking the
                // pool has set off the next attempt.
                error = inner.unreachable() => return Err(error.unwrap_or_else(|| no_connection(self.options.connect))),
                // By the caller's clock: that of the other runtime may stand still.
                () = async { Box::pin(sleep(self.options.connect)).await } => return Err(no_connection(self.options.connect)),
            };
            let connection = match checkout {
                Some(Ok(connection)) => connection,
                Some(Err(RunError::User(error))) => return Err(error),
                Some(Err(RunError::TimedOut)) => return Err(no_connection(self.options.connect)),
                // The runtime has ended meanwhile.
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
    /// In the runtime that this is called in.
    fn new(
        connector: Connector,
        connections: u32,
        min_idle: Option<u32>,
        options: PoolOptions,
        server_state: Arc<ServerState>,
    ) -> Self {
        let runtime = Arc::clone(&options.home);
        let (manager, last_failure) = Manager::new(connector, options, server_state);
        Self { pool: builder(connections, min_idle).build_unchecked(manager), last_failure, runtime }
    }

    /// A clone of the handle of whichever connection is next.
    async fn checkout(&self) -> Result<Connection, RunError<RedisError>> {
        let mut connection = self.pool.get().await?;
        connection.probe_if_idle();
        Ok(connection.clone())
    }

    /// Waits until there is no connection and the last attempt to open one was a recent one that failed, and says how.
    async fn unreachable(&self) -> Option<RedisError> {
        let started = Instant::now();
        let applies = |last_failure: &Option<ConnectFailure>| {
            let recent = last_failure.as_ref().is_some_and(|failure| started < failure.until);
            // With a connection left that is only lent out, waiting takes an instant.
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
        // Whoever waits has a clock of their own.
        .connection_timeout(Duration::MAX)
        .idle_timeout(None)
        .max_lifetime(None)
}

/// What there is to say when no connection was to be had in time: nothing was sent.
pub(crate) fn no_connection(within: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::NotConnected, format!("no connection within {within:?}")).into()
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner.read().unwrap_or_else(PoisonError::into_inner).pool.state(), f)
    }
}

/// Opens connections for bb8, and knows the broken ones.
pub(crate) struct Manager {
    connector: Connector,
    options: PoolOptions,
    server_state: Arc<ServerState>,
}

/// Keeps a server that is down from being asked in a loop.
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
            // It is there and says nothing.
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

    /// Opens a connection. If one is there that was begun later, what was sent for this one may have been lost, and it is begun anew.
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
    /// Waits until an attempt that was begun later than `begun` has a connection, and for as long again as that has taken.
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

    /// Says yes to whatever it is asked.
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
        let options = PoolOptions { connect: hour, response: hour, home: Arc::new(RuntimeHandle::here()) };
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
