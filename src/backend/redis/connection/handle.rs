//! What is known of a connection: whether it still answers, and whom it leads to.

use std::future::pending;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::time::{Instant, sleep_until};

use super::connect::ping;
use crate::backend::redis::error;
use crate::backend::redis::sentinel::PrimaryTerm;

/// A connection on which commands are waiting and nothing at all has come back for this long is taken for dead. A server
/// that is only slow answers sooner; a network that swallows everything does not. To be wrong costs one connection more:
/// calls in flight keep their clone of the old one.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection on which nothing has come for this long is looked at before it is lent: servers, and networks, close those that are idle.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// Before this, a missing answer says nothing about the connection.
pub(crate) const LATE_AFTER: Duration = Duration::from_millis(10);
/// A connection that ends at a replica is given up once it is this old: the address may lead to a new primary by now. Not
/// sooner, lest a replica be connected to in a loop.
const REPLICA_GRACE: Duration = Duration::from_secs(1);

/// What the pool keeps: a handle, of which clones are given out, and what is known of the connection behind it.
#[derive(Clone)]
pub(crate) struct Connection {
    connection: MultiplexedConnection,
    // How long it waits for an answer.
    timeout: Duration,
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
    last_reply: AtomicU64,
    // When it was last looked at, as the pool counts.
    last_probe: AtomicU64,
    pool: Arc<PoolHealth>,
    // With Sentinels: as long as the server is the one that they name.
    term: Option<PrimaryTerm>,
}

/// What one connection of a pool tells the others.
#[derive(Debug)]
pub(crate) struct PoolHealth {
    epoch: Instant,
    // Since when one was silent that was taken for dead for that, in us since `epoch`: those that were not heard since may be as dead, and each
    // of them would cost a call its time.
    silent_since: AtomicU64,
}

impl Default for PoolHealth {
    fn default() -> Self {
        Self { epoch: Instant::now(), silent_since: AtomicU64::new(0) }
    }
}

impl PoolHealth {
    fn at(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.epoch).as_micros() as u64
    }
}

impl Connection {
    /// Of a connection that was just opened. Its answers are waited for so long, unless [`send_within`](Self::send_within) says otherwise.
    pub(crate) fn new(
        connection: MultiplexedConnection,
        timeout: Duration,
        term: Option<PrimaryTerm>,
        pool: &Arc<PoolHealth>,
    ) -> Self {
        Self { connection, timeout, health: Arc::new(Health::new(term, Arc::clone(pool))) }
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.health.is_broken()
    }

    pub(crate) async fn ping(&mut self) -> Result<(), RedisError> {
        ping(&mut self.connection).await
    }

    /// Finds out whether an idle connection has been closed meanwhile, which nobody is told of. Nothing is waited for.
    pub(crate) fn probe_if_idle(&mut self) {
        if !self.health.is_idle() {
            return;
        }
        let ping = redis::cmd("PING");
        let sending = pin!(self.connection.send_packed_command(&ping));
        // Refused at once where nobody is left to write it; and given up before it is written where somebody is, or nearly always.
        if let Poll::Ready(Err(error)) = sending.poll(&mut Context::from_waker(Waker::noop()))
            && error.is_unrecoverable_error()
        {
            self.health.broken.store(true, Ordering::Relaxed);
        }
    }

    /// Sends one command and waits for its answer.
    pub(crate) async fn send(&mut self, command: &Cmd, asking: bool) -> Result<Value, RedisError> {
        let mut watch = ReplyWatch { health: &self.health, sent: Instant::now(), abandoned: true };
        let connection = &mut self.connection;
        let reply = if asking {
            // In one write, so that nobody's command comes between.
            let mut pipeline = Pipeline::with_capacity(2);
            pipeline.cmd("ASKING").add_command(command.clone());
            let replies = connection.send_packed_commands(&pipeline, 1, 1).await;
            replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
        } else {
            connection.send_packed_command(command).await
        };
        // The client says no more than that it was late.
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
        // A server error arrives as a value of its own kind. One within an answer concerns a part of it, and is for whoever asked for that.
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

    /// The same, for longer or less than answers are waited for otherwise. Longer only while the Sentinels name this primary, if there are any.
    pub(crate) async fn send_with_timeout(
        mut self,
        command: &Cmd,
        asking: bool,
        timeout: Duration,
    ) -> Result<Value, RedisError> {
        let default_timeout = self.timeout;
        // Of this clone alone.
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
    fn new(term: Option<PrimaryTerm>, pool: Arc<PoolHealth>) -> Self {
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

    /// Whether nothing has come for a while, and nobody has looked.
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

    /// Waits until the Sentinels have named another primary, and it is `earliest`. That the connection is silent is no reason to give up what
    /// is waited for: a server that is only slow has yet to answer it.
    async fn replaced(&self, earliest: Instant) {
        match &self.term {
            Some(term) => term.end().await,
            None => pending().await,
        }
        sleep_until(earliest).await;
    }
}

/// Notices connections that swallow everything. A command that is given up late, by a timeout or because its future is
/// dropped, is evidence; any answer is evidence to the contrary. One that is given up early says nothing: its answer was
/// likely on the way.
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

/// What there is to say when something was sent, and nothing has come back in time.
pub(crate) fn no_reply(within: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::TimedOut, format!("no reply within {within:?}")).into()
}
