//! Connections that are borrowed for an instant, never for a round trip.

use std::future::pending;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use std::{fmt, io};

use bb8::{ManageConnection, RunError};
use bb8_redis::RedisConnectionManager;
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, ProtocolVersion, RedisConnectionInfo, RedisError, Value,
};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::error;
use super::home::Home;
use super::sentinel::{Sentinels, Tenure};

/// A connection on which commands are waiting and nothing at all has come back for this long is taken for dead. A server
/// that is only slow answers sooner; a network that swallows everything does not. To be wrong costs one connection more:
/// calls in flight keep their clone of the old one.
const SILENCE: Duration = Duration::from_secs(1);
/// A connection on which nothing has come for this long is looked at before it is lent: servers, and networks, close those that are idle.
const IDLE: Duration = Duration::from_millis(100);
/// Before this, a missing answer says nothing about the connection.
const LATE: Duration = Duration::from_millis(10);
/// A connection that ends at a replica is given up once it is this old: the address may lead to a new primary by now. Not
/// sooner, lest a replica be connected to in a loop.
const DEMOTION: Duration = Duration::from_secs(1);
/// The pause after a failed attempt to connect, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause: short enough for the pool to be whole within a second of the server's return.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// How long a failed attempt to connect speaks for the next one, beside the pause before it and the time that it may take. While calls
/// come there is an attempt after every pause; after a lull nothing is known, and a call waits for the attempt that it sets off.
const FRESH: Duration = Duration::from_millis(100);

/// Multiplexed connections to one server, or to whichever is the primary of a service.
#[derive(Clone)]
pub(super) struct Pool {
    connector: Connector,
    connections: u32,
    // How many are opened before they are needed.
    min_idle: Option<u32>,
    terms: Terms,
    // With those of other pools to the same server, if it has any.
    siblings: Arc<Siblings>,
    // Another one when the runtime has ended in which it opened connections: what it had begun there is never finished.
    lender: Arc<RwLock<Arc<Lender>>>,
}

/// Who opens and lends connections, and where.
struct Lender {
    pool: bb8::Pool<Manager>,
    // The last attempt to connect, if it failed.
    trouble: watch::Receiver<Option<Trouble>>,
    home: Arc<Home>,
}

/// On what terms there are connections.
#[derive(Clone)]
pub(super) struct Terms {
    /// Opening a connection, and waiting for one.
    pub(super) connect: Duration,
    /// One command.
    pub(super) response: Duration,
    /// Where they are opened, as long as it is there.
    pub(super) home: Arc<Home>,
}

/// An attempt to connect that failed.
struct Trouble {
    error: RedisError,
    // Until when the next attempt should be over.
    until: Instant,
}

/// Where new connections come from.
#[derive(Clone)]
pub(super) enum Connector {
    Client(Box<(Client, AsyncConnectionConfig)>),
    Sentinels(Arc<Sentinels>),
    Pool { pool: bb8::Pool<RedisConnectionManager>, response_timeout: Duration },
}

/// What the pool keeps: a handle, of which clones are given out, and what is known of the connection behind it.
#[derive(Clone)]
pub(super) struct Handle {
    connection: MultiplexedConnection,
    // How long it waits for an answer.
    patience: Duration,
    health: Arc<Health>,
}

/// What the users of one connection tell each other about it.
#[derive(Debug)]
struct Health {
    opened: Instant,
    broken: AtomicBool,
    // When the command was sent that has waited longest without anything coming back, in us since `opened`, plus one.
    silent_since: AtomicU64,
    // When the last one was sent that was answered, as the pool counts; in the beginning when it was opened.
    heard: AtomicU64,
    // When it was last looked at, as the pool counts.
    looked: AtomicU64,
    others: Arc<Others>,
    // With Sentinels: as long as the server is the one that they name.
    tenure: Option<Tenure>,
}

/// What those tell each other who open connections to one server: one of them speaks for all, in the log as well.
#[derive(Default)]
pub(super) struct Siblings {
    // The last attempt to connect, if it failed.
    report: watch::Sender<Option<Trouble>>,
    // The last attempt that did not: when it began, and how long it took.
    success: watch::Sender<Option<(Instant, Duration)>>,
    pause: Mutex<Pause>,
    others: Arc<Others>,
}

/// What one connection of a pool tells the others.
#[derive(Debug)]
struct Others {
    epoch: Instant,
    // Since when one was silent that was taken for dead for that, in us since `epoch`: those that were not heard since may be as dead, and each
    // of them would cost a call its time.
    silent_since: AtomicU64,
}

impl Default for Others {
    fn default() -> Self {
        Self { epoch: Instant::now(), silent_since: AtomicU64::new(0) }
    }
}

impl Others {
    fn at(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.epoch).as_micros() as u64
    }
}

impl Pool {
    /// Opens all connections, beside those of other pools to the same server.
    pub(super) async fn open(
        connector: Connector,
        connections: u32,
        terms: Terms,
        siblings: &Arc<Siblings>,
    ) -> Result<Self, RedisError> {
        let siblings = Arc::clone(siblings);
        let (manager, trouble) = Manager::new(connector.clone(), terms.clone(), Arc::clone(&siblings));
        let pool = builder(connections, Some(connections)).build(manager).await?;
        let lender = Arc::new(RwLock::new(Arc::new(Lender { pool, trouble, home: Arc::clone(&terms.home) })));
        Ok(Self { connector, connections, min_idle: Some(connections), terms, siblings, lender })
    }

    /// The same, but does not wait for them.
    pub(super) fn eager(connector: Connector, connections: u32, terms: Terms, siblings: &Arc<Siblings>) -> Self {
        Self::unopened(connector, connections, Some(connections), terms, siblings)
    }

    /// The same without a connection until one is needed.
    pub(super) fn lazy(connector: Connector, connections: u32, terms: Terms, siblings: &Arc<Siblings>) -> Self {
        Self::unopened(connector, connections, None, terms, siblings)
    }

    fn unopened(
        connector: Connector,
        connections: u32,
        min_idle: Option<u32>,
        terms: Terms,
        siblings: &Arc<Siblings>,
    ) -> Self {
        let siblings = Arc::clone(siblings);
        let lender = Lender::new(connector.clone(), connections, min_idle, terms.clone(), Arc::clone(&siblings));
        Self { connector, connections, min_idle, terms, siblings, lender: Arc::new(RwLock::new(Arc::new(lender))) }
    }

    /// Whoever lends connections; from now on in the caller's runtime if the one has ended in which that was done.
    fn lender(&self) -> Arc<Lender> {
        let lender = Arc::clone(&self.lender.read().unwrap_or_else(PoisonError::into_inner));
        if !lender.home.is_gone() {
            return lender;
        }
        let mut lender = self.lender.write().unwrap_or_else(PoisonError::into_inner);
        if lender.home.is_gone() {
            let terms = Terms { home: Arc::new(Home::here()), ..self.terms.clone() };
            let known = Arc::clone(&self.siblings);
            *lender = Arc::new(Lender::new(self.connector.clone(), self.connections, self.min_idle, terms, known));
        }
        Arc::clone(&lender)
    }

    /// Sends one command and waits for its answer.
    ///
    /// A failure after the command was sent leaves open whether it ran, so nothing is sent twice.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        self.exchange(command, false, None).await
    }

    /// The same, also to a node that is about to take over the slot of the key, with ASKING, and for longer or less than commands are
    /// waited for otherwise. Longer only while the Sentinels name this primary, if there are any.
    pub(super) async fn exchange(
        &self,
        command: &Cmd,
        asking: bool,
        patience: Option<Duration>,
    ) -> Result<Value, RedisError> {
        let mut handle = self.borrow().await.map_err(error::unsent)?;
        let Some(patience) = patience else {
            return handle.send(command, asking).await;
        };
        // Apart, so that what is not waited for longer has no room for it to carry along.
        Box::pin(self.wait_longer(handle, command, asking, patience)).await
    }

    async fn wait_longer(
        &self,
        mut handle: Handle,
        command: &Cmd,
        asking: bool,
        patience: Duration,
    ) -> Result<Value, RedisError> {
        // Of this clone alone.
        handle.connection.set_response_timeout(patience);
        handle.patience = patience;
        let (health, sent) = (Arc::clone(&handle.health), Instant::now());
        tokio::select! {
            biased;
            answer = handle.send(command, asking) => answer,
            () = health.replaced(sent + self.terms.response) => Err(no_reply(sent.elapsed())),
        }
    }

    /// Waits until there is a connection to send something by.
    pub(super) async fn connected(&self) -> Result<(), RedisError> {
        self.borrow().await.map(drop).map_err(error::unsent)
    }

    /// Whether the last attempt to open a connection failed.
    pub(super) fn is_in_trouble(&self) -> bool {
        self.lender().trouble.borrow().is_some()
    }

    /// A clone of the handle of a connection that is not known to be dead. The original is back in the pool on return.
    pub(super) async fn borrow(&self) -> Result<Handle, RedisError> {
        // Each turn takes a broken connection out of the pool for good, so there are at most as many turns as connections,
        // and one more for a sound one.
        for _ in 0..=self.connections {
            let lender = self.lender();
            let lent = tokio::select! {
                biased;
                lent = lender.home.inside(lender.lend()) => lent,
                // No connection is there and the last attempt to open one failed just now: say why at once. Asking the
                // pool has set off the next attempt.
                error = lender.trouble() => return Err(error.unwrap_or_else(|| no_connection(self.terms.connect))),
                // By the caller's clock: that of the other runtime may stand still.
                () = async { Box::pin(sleep(self.terms.connect)).await } => return Err(no_connection(self.terms.connect)),
            };
            let handle = match lent {
                Some(Ok(handle)) => handle,
                Some(Err(RunError::User(error))) => return Err(error),
                Some(Err(RunError::TimedOut)) => return Err(no_connection(self.terms.connect)),
                // The runtime has ended meanwhile.
                None => continue,
            };
            if !handle.health.is_broken() {
                return Ok(handle);
            }
        }
        Err(no_connection(self.terms.connect))
    }
}

impl Lender {
    /// In the runtime that this is called in.
    fn new(
        connector: Connector,
        connections: u32,
        min_idle: Option<u32>,
        terms: Terms,
        siblings: Arc<Siblings>,
    ) -> Self {
        let home = Arc::clone(&terms.home);
        let (manager, trouble) = Manager::new(connector, terms, siblings);
        Self { pool: builder(connections, min_idle).build_unchecked(manager), trouble, home }
    }

    /// A clone of the handle of whichever connection is next.
    async fn lend(&self) -> Result<Handle, RunError<RedisError>> {
        let mut item = self.pool.get().await?;
        item.look();
        Ok(item.clone())
    }

    /// Waits until there is no connection and the last attempt to open one was a recent one that failed, and says how.
    async fn trouble(&self) -> Option<RedisError> {
        let asked = Instant::now();
        let hopeless = |trouble: &Option<Trouble>| {
            let recent = trouble.as_ref().is_some_and(|trouble| asked < trouble.until);
            // With a connection left that is only lent out, waiting takes an instant.
            recent && self.pool.state().connections == 0
        };
        let mut trouble = self.trouble.clone();
        let trouble = trouble.wait_for(hopeless).await.ok()?;
        Some(trouble.as_ref()?.error.clone())
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
pub(super) fn no_connection(within: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::NotConnected, format!("no connection within {within:?}")).into()
}

/// What there is to say when something was sent, and nothing has come back in time.
pub(super) fn no_reply(within: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::TimedOut, format!("no reply within {within:?}")).into()
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.lender.read().unwrap_or_else(PoisonError::into_inner).pool.state(), f)
    }
}

impl Handle {
    /// Finds out whether an idle connection has been closed meanwhile, which nobody is told of. Nothing is waited for.
    fn look(&mut self) {
        if !self.health.is_idle() {
            return;
        }
        let ping = redis::cmd("PING");
        let asked = pin!(self.connection.send_packed_command(&ping));
        // Refused at once where nobody is left to write it; and given up before it is written where somebody is, or nearly always.
        if let Poll::Ready(Err(error)) = asked.poll(&mut Context::from_waker(Waker::noop()))
            && error.is_unrecoverable_error()
        {
            self.health.broken.store(true, Ordering::Relaxed);
        }
    }

    /// Sends one command and waits for its answer.
    pub(super) async fn send(&mut self, command: &Cmd, asking: bool) -> Result<Value, RedisError> {
        let mut watch = SilenceWatch { health: &self.health, sent: Instant::now(), given_up: true };
        let connection = &mut self.connection;
        let answer = if asking {
            // In one write, so that nobody's command comes between.
            let mut pipeline = Pipeline::with_capacity(2);
            pipeline.cmd("ASKING").add_command(command.clone());
            let answers = connection.send_packed_commands(&pipeline, 1, 1).await;
            answers.map(|mut answers| answers.pop().unwrap_or(Value::Nil))
        } else {
            connection.send_packed_command(command).await
        };
        // The client says no more than that it was late.
        let answer = answer.map_err(|error| {
            let is_late = error.is_timeout() && watch.sent.elapsed() >= self.patience;
            if is_late { no_reply(self.patience) } else { error }
        });
        match &answer {
            Err(error) if error.is_timeout() => {}
            Err(error) if error.is_unrecoverable_error() => {
                self.health.broken.store(true, Ordering::Relaxed);
                watch.given_up = false;
            }
            Ok(_) | Err(_) => watch.answered(),
        }
        // A server error arrives as a value of its own kind. One within an answer concerns a part of it, and is for whoever asked for that.
        let is_from_replica =
            |value: &Value| matches!(value, Value::ServerError(error) if error::is_from_replica(&error.clone().into()));
        let is_from_replica = match &answer {
            Ok(Value::Array(values)) => values.iter().any(is_from_replica),
            Ok(value) => is_from_replica(value),
            Err(error) => error::is_from_replica(error),
        };
        let answer = match answer {
            Ok(Value::ServerError(error)) => Err(error.into()),
            answer => answer,
        };
        if is_from_replica && self.health.opened.elapsed() >= DEMOTION {
            self.health.broken.store(true, Ordering::Relaxed);
        }
        answer
    }
}

impl Health {
    fn new(tenure: Option<Tenure>, others: Arc<Others>) -> Self {
        let opened = Instant::now();
        let [heard, looked] = [(); 2].map(|()| AtomicU64::new(others.at(opened)));
        Self { opened, broken: AtomicBool::new(false), silent_since: AtomicU64::new(0), heard, looked, others, tenure }
    }

    /// Whether nothing has come for a while, and nobody has looked.
    fn is_idle(&self) -> bool {
        let now = self.others.at(Instant::now());
        let last = self.heard.load(Ordering::Relaxed).max(self.looked.load(Ordering::Relaxed));
        let is_idle = now.saturating_sub(last) >= IDLE.as_micros() as u64;
        if is_idle {
            self.looked.store(now, Ordering::Relaxed);
        }
        is_idle
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
            || self.tenure.as_ref().is_some_and(Tenure::is_over)
            || self.heard.load(Ordering::Relaxed) < self.others.silent_since.load(Ordering::Relaxed)
    }

    /// Waits until the Sentinels have named another primary, and it is `earliest`. That the connection is silent is no reason to give up what
    /// is waited for: a server that is only slow has yet to answer it.
    async fn replaced(&self, earliest: Instant) {
        match &self.tenure {
            Some(tenure) => tenure.end().await,
            None => pending().await,
        }
        sleep_until(earliest).await;
    }
}

/// Notices connections that swallow everything. A command that is given up late, by a timeout or because its future is
/// dropped, is evidence; any answer is evidence to the contrary. One that is given up early says nothing: its answer was
/// likely on the way.
struct SilenceWatch<'a> {
    health: &'a Health,
    sent: Instant,
    given_up: bool,
}

impl SilenceWatch<'_> {
    fn answered(&mut self) {
        self.given_up = false;
        self.health.heard.store(self.health.others.at(self.sent), Ordering::Relaxed);
        if self.health.silent_since.load(Ordering::Relaxed) != 0 {
            self.health.silent_since.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for SilenceWatch<'_> {
    fn drop(&mut self) {
        if !self.given_up || self.sent.elapsed() < LATE {
            return;
        }
        let sent = (self.sent - self.health.opened).as_micros() as u64 + 1;
        let since = match self.health.silent_since.compare_exchange(0, sent, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => sent,
            Err(since) => since,
        };
        let now = self.health.opened.elapsed().as_micros() as u64 + 1;
        if now.saturating_sub(since) >= SILENCE.as_micros() as u64 {
            self.health.broken.store(true, Ordering::Relaxed);
            let since = self.health.others.at(self.health.opened) + since;
            self.health.others.silent_since.fetch_max(since, Ordering::Relaxed);
        }
    }
}

/// Opens connections for bb8, and knows the broken ones.
pub(super) struct Manager {
    connector: Connector,
    terms: Terms,
    siblings: Arc<Siblings>,
}

/// Keeps a server that is down from being asked in a loop.
#[derive(Default)]
struct Pause {
    length: Duration,
    until: Option<Instant>,
}

impl ManageConnection for Manager {
    type Connection = Handle;
    type Error = RedisError;

    async fn connect(&self) -> Result<Handle, RedisError> {
        let Siblings { report, success, others, .. } = &*self.siblings;
        let pause = self.siblings.pause().until;
        if let Some(until) = pause {
            sleep_until(until).await;
        }
        let begun = Instant::now();
        let outcome = match timeout(self.terms.connect, self.attempt()).await {
            // It is there and says nothing.
            Ok(Err(error)) if error.is_timeout() => Err(no_connection(self.terms.response.min(self.terms.connect))),
            Ok(outcome) => outcome,
            Err(_) => Err(no_connection(self.terms.connect)),
        };
        match &outcome {
            Ok(_) => {
                success.send_replace(Some((begun, begun.elapsed())));
                *self.siblings.pause() = Pause::default();
                if report.send_replace(None).is_some() {
                    tracing::info!(server = %self.connector, "connected to redis again");
                }
            }
            Err(error) => {
                let pause = self.siblings.pause().extend();
                let trouble = Trouble { error: error.clone(), until: Instant::now() + pause + begun.elapsed() + FRESH };
                if report.send_replace(Some(trouble)).is_none() {
                    tracing::warn!(server = %self.connector, %error, "cannot connect to redis");
                }
            }
        }
        let patience = self.terms.response;
        outcome.map(|(connection, tenure)| Handle {
            connection,
            patience,
            health: Arc::new(Health::new(tenure, Arc::clone(others))),
        })
    }

    async fn is_valid(&self, handle: &mut Handle) -> Result<(), RedisError> {
        ping(&mut handle.connection).await
    }

    fn has_broken(&self, handle: &mut Handle) -> bool {
        handle.health.is_broken()
    }
}

impl Manager {
    fn new(connector: Connector, terms: Terms, siblings: Arc<Siblings>) -> (Self, watch::Receiver<Option<Trouble>>) {
        let trouble = siblings.report.subscribe();
        (Self { connector, terms, siblings }, trouble)
    }

    /// Opens a connection. If one is there that was begun later, what was sent for this one may have been lost, and it is begun anew.
    async fn attempt(&self) -> Result<(MultiplexedConnection, Option<Tenure>), RedisError> {
        loop {
            tokio::select! {
                biased;
                outcome = self.connector.connect() => return outcome,
                () = self.siblings.overtaken(Instant::now()) => {}
            }
        }
    }
}

impl Siblings {
    /// Waits until an attempt that was begun later than `begun` has a connection, and for as long again as that has taken.
    async fn overtaken(&self, begun: Instant) {
        let is_later = |success: &Option<(Instant, Duration)>| success.is_some_and(|(at, _)| at > begun);
        let mut success = self.success.subscribe();
        let later = success.wait_for(is_later).await.ok().and_then(|later| *later);
        match later {
            Some((_, took)) => sleep(took + LATE).await,
            None => pending().await,
        }
    }

    fn pause(&self) -> MutexGuard<'_, Pause> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pause {
    fn extend(&mut self) -> Duration {
        self.length = (self.length * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.until = Some(Instant::now() + self.length);
        self.length
    }
}

impl Connector {
    async fn connect(&self) -> Result<(MultiplexedConnection, Option<Tenure>), RedisError> {
        let mut tenure = None;
        let mut connection = match self {
            Self::Sentinels(sentinels) => {
                let (connection, of_the_primary) = sentinels.connect().await?;
                tenure = Some(of_the_primary);
                connection
            }
            Self::Client(client) => {
                let (client, config) = &**client;
                open(client, config).await?
            }
            Self::Pool { pool, response_timeout } => {
                // Not one of those that the pool hands out: whoever has borrowed it may be in a transaction, or waiting.
                let mut connection = pool.dedicated_connection().await?;
                connection.set_response_timeout(*response_timeout);
                connection
            }
        };
        // A client without a password is let in and then refused every command.
        ping(&mut connection).await?;
        Ok((connection, tenure))
    }

    /// A connection for subscriptions, by which `heard` is told what the server says by itself.
    pub(super) async fn subscriber(
        &self,
        heard: impl AsyncPushSender,
    ) -> Result<(MultiplexedConnection, Option<Tenure>), RedisError> {
        match self {
            Self::Client(client) => listen(&client.0, heard).await.map(|connection| (connection, None)),
            Self::Sentinels(sentinels) => {
                sentinels.subscriber(heard).await.map(|(connection, tenure)| (connection, Some(tenure)))
            }
            Self::Pool { .. } => {
                Err((ErrorKind::InvalidClientConfig, "a pool has no connections for subscriptions").into())
            }
        }
    }
}

/// How connections are to be. What is asked does not wait until the network has confirmed what was asked before, as it does by default: on a
/// connection that many share that is a round trip, and up to 40 ms more where the server has nothing to say yet.
pub(super) fn unhindered() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

/// Connects to a server.
pub(super) async fn open(client: &Client, config: &AsyncConnectionConfig) -> Result<MultiplexedConnection, RedisError> {
    let refused = match client.get_multiplexed_async_connection_with_config(config).await {
        Err(error) if error.kind() == ErrorKind::AuthenticationFailed => error,
        outcome => return outcome,
    };
    // The client keeps nothing of what the server has said, which may be that it has no room for anybody. It says that to strangers, too.
    let info = client.get_connection_info().clone();
    let stranger = Client::open(info.set_redis_settings(RedisConnectionInfo::default().set_skip_set_lib_name()))?;
    let outcome = match stranger.get_multiplexed_async_connection_with_config(config).await {
        Ok(mut connection) => ping(&mut connection).await,
        Err(error) => Err(error),
    };
    Err(match outcome {
        // What it said may have come before there was anybody to read it.
        Err(error) if error::is_full(&error) || error.is_io_error() => error,
        _ => refused,
    })
}

/// Connects to a server in order to listen to it.
pub(super) async fn listen(client: &Client, heard: impl AsyncPushSender) -> Result<MultiplexedConnection, RedisError> {
    // With another protocol messages would go through one more task to whoever they are for.
    let info = client.get_connection_info().clone();
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let client = Client::open(info.set_redis_settings(settings))?;
    // Whoever wants to listen has a clock of their own.
    let config =
        AsyncConnectionConfig::new().set_push_sender(heard).set_connection_timeout(None).set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// Names the server for the log: no user, no password.
impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(client) => fmt::Display::fmt(client.0.get_connection_info().addr(), f),
            Self::Sentinels(sentinels) => fmt::Display::fmt(sentinels, f),
            Self::Pool { .. } => f.write_str("the pool's server"),
        }
    }
}

/// Whether anybody answers who would run our commands.
async fn ping(connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
    match redis::cmd("PING").query_async(connection).await {
        // A user may be allowed our scripts and no PING.
        Err(error) if error.code() == Some("NOPERM") => Ok(()),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Says yes to whatever it is asked.
    async fn serve(mut client: TcpStream) {
        let mut asked = [0; 1024];
        while client.read(&mut asked).await.is_ok_and(|read| read > 0) && client.write_all(b"+PONG\r\n").await.is_ok() {
        }
    }

    #[tokio::test]
    async fn an_attempt_to_connect_that_was_lost_is_made_again_when_a_later_one_has_come_through() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}/", server.local_addr().unwrap());
        let info = redis::IntoConnectionInfo::into_connection_info(url).unwrap();
        let client =
            Client::open(info.set_redis_settings(RedisConnectionInfo::default().set_skip_set_lib_name())).unwrap();
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let connector = Connector::Client(Box::new((client, config)));
        let hour = Duration::from_secs(3_600);
        let terms = Terms { connect: hour, response: hour, home: Arc::new(Home::here()) };
        let siblings = Arc::default();
        let [one, other] = [(); 2].map(|()| Pool::lazy(connector.clone(), 1, terms.clone(), &siblings));

        let waiting = tokio::spawn(async move { one.connected().await });
        let (lost, _) = server.accept().await.unwrap();
        let serving = tokio::spawn(async move {
            loop {
                let (client, _) = server.accept().await.unwrap();
                tokio::spawn(serve(client));
            }
        });
        other.connected().await.unwrap();
        timeout(Duration::from_secs(10), waiting).await.expect("it is not waited for").unwrap().unwrap();
        serving.abort();
        drop(lost);
    }
}
