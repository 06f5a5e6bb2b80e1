//! The state of a connection: whether it still replies, and whether its server is still the primary.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::time::{Instant, sleep_until};

use super::connect::ping;
use super::timeout_error::no_reply;
use crate::backend::redis::error;
use crate::backend::redis::sentinel::PrimaryTerm;

/// A connection with pending commands and no reply at all for this long counts as dead. A slow server replies sooner; a network that
/// drops all packets does not. A wrong guess costs one new connection: calls in flight keep their clone of the old one.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection without a reply for this long is checked before it is lent, because servers and networks close idle connections.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// A call that is abandoned earlier says nothing about the connection.
pub(crate) const LATE_AFTER: Duration = Duration::from_millis(10);
/// A connection to a replica is replaced at this age, since its address may lead to a new primary by then. The delay prevents a loop of
/// reconnects to a replica.
const REPLICA_GRACE: Duration = Duration::from_secs(1);

/// A handle that the pool clones for each call, with the state of its connection.
#[derive(Clone)]
pub(crate) struct Connection {
    connection: MultiplexedConnection,
    // How long to wait for a reply.
    timeout: Duration,
    health: Arc<Health>,
}

/// What the users of one connection share about it.
#[derive(Debug)]
struct Health {
    opened: Instant,
    broken: AtomicBool,
    // When the first command was sent that was abandoned late since the last reply, in µs since `opened`, plus one. Zero if there is none.
    silent_since: AtomicU64,
    // When the last command with a reply was sent, by the pool's clock. At first the time of opening.
    last_reply: AtomicU64,
    // When the connection was last checked, by the pool's clock.
    last_probe: AtomicU64,
    pool: Arc<ServerHealth>,
    // With Sentinels: ends when they name another primary.
    term: Option<PrimaryTerm>,
}

/// What the connections of all pools with one [`ServerState`](super::pool::ServerState) share.
#[derive(Debug)]
pub(crate) struct ServerHealth {
    epoch: Instant,
    // Since when a connection that was found dead was silent, in µs since `epoch`. Connections without a reply since then may be dead as
    // well, and each of them would cost a call its timeout.
    silent_since: AtomicU64,
}

impl Default for ServerHealth {
    fn default() -> Self {
        Self { epoch: Instant::now(), silent_since: AtomicU64::new(0) }
    }
}

impl ServerHealth {
    fn at(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.epoch).as_micros() as u64
    }
}

impl Connection {
    /// Wraps a connection that was just opened. `timeout` applies to each command without [its own](Self::send_with_timeout).
    pub(crate) fn new(
        connection: MultiplexedConnection,
        timeout: Duration,
        term: Option<PrimaryTerm>,
        pool: &Arc<ServerHealth>,
    ) -> Self {
        Self { connection, timeout, health: Arc::new(Health::new(term, Arc::clone(pool))) }
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.health.is_broken()
    }

    pub(crate) async fn ping(&mut self) -> Result<(), RedisError> {
        ping(&mut self.connection).await
    }

    /// Marks an idle connection as broken if it was closed. Does not wait.
    pub(crate) fn probe_if_idle(&mut self) {
        if !self.health.is_idle() {
            return;
        }
        let ping = redis::cmd("PING");
        let sending = pin!(self.connection.send_packed_command(&ping));
        // If the connection is closed, the first poll fails. Otherwise the command is dropped, nearly always before it is written.
        if let Poll::Ready(Err(error)) = sending.poll(&mut Context::from_waker(Waker::noop()))
            && error.is_unrecoverable_error()
        {
            self.health.broken.store(true, Ordering::Relaxed);
        }
    }

    /// Sends one command and waits for its reply.
    pub(crate) async fn send(&mut self, command: &Cmd, asking: bool) -> Result<Value, RedisError> {
        let mut watch = ReplyWatch { health: &self.health, sent: Instant::now(), abandoned: true };
        let connection = &mut self.connection;
        let reply = if asking {
            // In one write, so that no other command comes between.
            let mut pipeline = Pipeline::with_capacity(2);
            pipeline.cmd("ASKING").add_command(command.clone());
            let replies = connection.send_packed_commands(&pipeline, 1, 1).await;
            replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
        } else {
            connection.send_packed_command(command).await
        };
        // The client library's timeout error has no duration.
        let reply = reply.map_err(|error| {
            let is_late = error.is_timeout() && watch.sent.elapsed() >= self.timeout;
            if is_late { no_reply(self.timeout) } else { error }
        });
        match &reply {
            Err(error) if error.is_timeout() => {}
            Err(error) if error.is_unrecoverable_error() => {
                self.health.broken.store(true, Ordering::Relaxed);
                watch.abandoned = false;
            }
            Ok(_) | Err(_) => watch.replied(),
        }
        // The client library returns an error of the server as a `Value::ServerError`. The caller handles an error inside an array, which
        // concerns one element. In both cases, only an error of a replica marks the connection as broken.
        let is_from_replica =
            |value: &Value| matches!(value, Value::ServerError(error) if error::is_from_replica(&error.clone().into()));
        let is_from_replica = match &reply {
            Ok(Value::Array(values)) => values.iter().any(is_from_replica),
            Ok(value) => is_from_replica(value),
            Err(error) => error::is_from_replica(error),
        };
        let reply = match reply {
            Ok(Value::ServerError(error)) => Err(error.into()),
            reply => reply,
        };
        if is_from_replica && self.health.opened.elapsed() >= REPLICA_GRACE {
            self.health.broken.store(true, Ordering::Relaxed);
        }
        reply
    }

    /// Like [`send`](Self::send), with another timeout. After the default timeout, it fails as soon as the Sentinels name another primary.
    pub(crate) async fn send_with_timeout(
        mut self,
        command: &Cmd,
        asking: bool,
        timeout: Duration,
    ) -> Result<Value, RedisError> {
        let default_timeout = self.timeout;
        // Applies to this clone only.
        self.connection.set_response_timeout(timeout);
        self.timeout = timeout;
        let (health, sent) = (Arc::clone(&self.health), Instant::now());
        tokio::select! {
            biased;
            reply = self.send(command, asking) => reply,
            () = health.replaced(sent + default_timeout) => Err(no_reply(sent.elapsed())),
        }
    }
}

impl Health {
    fn new(term: Option<PrimaryTerm>, pool: Arc<ServerHealth>) -> Self {
        let opened = Instant::now();
        let [last_reply, last_probe] = [(); 2].map(|()| AtomicU64::new(pool.at(opened)));
        Self {
            opened,
            broken: AtomicBool::new(false),
            silent_since: AtomicU64::new(0),
            last_reply,
            last_probe,
            pool,
            term,
        }
    }

    /// Whether there was no reply for a while. If so, records a check, so that only one caller checks.
    fn is_idle(&self) -> bool {
        let now = self.pool.at(Instant::now());
        let last = self.last_reply.load(Ordering::Relaxed).max(self.last_probe.load(Ordering::Relaxed));
        let is_idle = now.saturating_sub(last) >= IDLE_AFTER.as_micros() as u64;
        if is_idle {
            self.last_probe.store(now, Ordering::Relaxed);
        }
        is_idle
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
            || self.term.as_ref().is_some_and(PrimaryTerm::is_over)
            || self.last_reply.load(Ordering::Relaxed) < self.pool.silent_since.load(Ordering::Relaxed)
    }

    /// Waits until the Sentinels have named another primary, and until `earliest`. Silence alone does not end the wait: a slow server may
    /// still reply.
    async fn replaced(&self, earliest: Instant) {
        match &self.term {
            Some(term) => term.end().await,
            None => pending().await,
        }
        sleep_until(earliest).await;
    }
}

/// Detects connections that drop all packets. A command that is abandoned late, by a timeout or by dropping its future, is evidence. A
/// reply is evidence to the contrary. A command that is abandoned early says nothing, since its reply was probably on the way.
struct ReplyWatch<'a> {
    health: &'a Health,
    sent: Instant,
    abandoned: bool,
}

impl ReplyWatch<'_> {
    fn replied(&mut self) {
        self.abandoned = false;
        self.health.last_reply.store(self.health.pool.at(self.sent), Ordering::Relaxed);
        if self.health.silent_since.load(Ordering::Relaxed) != 0 {
            self.health.silent_since.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for ReplyWatch<'_> {
    fn drop(&mut self) {
        if !self.abandoned || self.sent.elapsed() < LATE_AFTER {
            return;
        }
        let sent = (self.sent - self.health.opened).as_micros() as u64 + 1;
        let since = match self.health.silent_since.compare_exchange(0, sent, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => sent,
            Err(since) => since,
        };
        let now = self.health.opened.elapsed().as_micros() as u64 + 1;
        if now.saturating_sub(since) >= SILENCE_TIMEOUT.as_micros() as u64 {
            self.health.broken.store(true, Ordering::Relaxed);
            let since = self.health.pool.at(self.health.opened) + since;
            self.health.pool.silent_since.fetch_max(since, Ordering::Relaxed);
        }
    }
}
