//! Writes that replicas must have. Simultaneous writes share a connection and one WAIT.
//!
//! During a WAIT, Redis processes no other command of the connection, and it reports a timeout up to 0.1 s late. So commands that
//! arrive meanwhile use another connection, or are not sent at all.

use std::io;
use std::slice::from_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, RedisError, Value};
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::batch::batcher::{BatchConfig, Batcher, until_abandoned};
use super::connection::connector::Connector;
use super::connection::handle::Connection;
use super::connection::pool::{Pool, PoolOptions, ServerState};
use super::connection::timeout_error::no_connection;
use super::error::not_executed;
use crate::lock::store::Replicas;

/// Every call is batched. Two batches may be in flight, so that new calls do not wait for the WAIT of the first batch.
const BATCH: BatchConfig = BatchConfig {
    max_unbatched: 0,
    linger: Duration::ZERO,
    max_batch: 128,
    split: |_| 1,
    max_partial_in_flight: |_| 2,
    max_full_in_flight: 2,
};
/// The number of classes of calls. Class `n` has its own connections, for calls that need `n` replicas. The last class also serves higher
/// counts.
const COUNT_CLASSES: usize = 4;
/// The maximum number of connections of one class.
const MAX_CONNECTIONS: u32 = 16;
/// How late Redis may report that a WAIT timed out.
const LATE: Duration = Duration::from_millis(100);

/// Connections to one server for writes with replication, opened when they are needed.
#[derive(Clone)]
pub(crate) struct Replicated(Arc<Shared>);

struct Shared {
    connector: Connector,
    connections: u32,
    options: PoolOptions,
    // Shared by the pools of all connections, so that they learn of a failure of one.
    server_state: Arc<ServerState>,
    // One for each class, so that calls do not wait behind calls that need more replicas than the server has.
    batchers: [OnceLock<(Batcher<Pending>, Arc<DedicatedConnections>)>; COUNT_CLASSES],
}

/// The result of a command with replication.
pub(crate) enum Outcome {
    /// The server's reply. If this reply grants something, enough replicas have the write.
    Replied(Value),
    /// The command granted something, and only this many replicas have it. Zero also if nothing was sent, because no connection to a
    /// working server was free in time.
    Insufficient(u32),
    /// The command granted something, and the number of replicas is unknown.
    Indeterminate(RedisError),
}

/// A call that has not been sent yet.
struct Pending {
    command: Cmd,
    asking: bool,
    is_granted: fn(&Value) -> bool,
    count: u32,
    // How long to wait for a connection, and then for replicas.
    within: Duration,
    // When a connection must be available.
    until: Instant,
    reply: oneshot::Sender<Result<Outcome, RedisError>>,
}

impl Replicated {
    /// Uses at most `connections` connections for each replica count.
    pub(crate) fn new(connector: Connector, connections: u32, options: PoolOptions) -> Self {
        let connections = connections.min(MAX_CONNECTIONS);
        Self(Arc::new(Shared {
            connector,
            connections,
            options,
            server_state: Arc::default(),
            batchers: Default::default(),
        }))
    }

    /// Sends a command. If `is_granted` is true for the reply, also waits until the replicas have its writes.
    pub(crate) async fn exchange(
        &self,
        command: &Cmd,
        asking: bool,
        replicas: Replicas,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Outcome, RedisError> {
        let Replicas { count, within } = replicas;
        // The waits for a connection and for replicas must both end within the response timeout.
        let within = within.min(self.0.options.response / 2);
        let until = Instant::now() + within;
        let pending = |reply| Pending { command: command.clone(), asking, is_granted, count, within, until, reply };
        let (batcher, dedicated) = self.0.batcher(count);
        match batcher.submit(pending).await {
            Some(Ok(reply)) => reply,
            Some(Err(_)) => {
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the runtime of the connection has ended").into())
            }
            // Too many calls are queued.
            None => dedicated.refusal(within),
        }
    }
}

impl Shared {
    /// The batcher for a replica count.
    fn batcher(&self, count: u32) -> &(Batcher<Pending>, Arc<DedicatedConnections>) {
        let Self { connector, connections, options, server_state, batchers } = self;
        let class = (count as usize).clamp(1, COUNT_CLASSES) - 1;
        batchers[class].get_or_init(|| {
            let dedicated = Arc::new(DedicatedConnections::new(connector, *connections, options, server_state));
            let shared = Arc::clone(&dedicated);
            let send = move |batch, _| {
                let dedicated = Arc::clone(&shared);
                async move { send_batch(dedicated, batch).await.then(Instant::now) }
            };
            (Batcher::new(BATCH, &options.runtime, send), dedicated)
        })
    }
}

/// Connections, each for one batch at a time.
struct DedicatedConnections {
    idle: Mutex<Vec<Pool>>,
    permits: Semaphore,
    // The time since which the server owes a reply. Any reply resets it to `None`.
    silent_since: Mutex<Option<Instant>>,
}

struct DedicatedConnection<'a> {
    dedicated: &'a DedicatedConnections,
    // A pool of one connection.
    pool: Pool,
    _permit: SemaphorePermit<'a>,
}

impl DedicatedConnections {
    fn new(connector: &Connector, connections: u32, options: &PoolOptions, server_state: &Arc<ServerState>) -> Self {
        let pool = |_| Pool::lazy(connector.clone(), 1, options.clone(), server_state);
        let idle: Vec<_> = (0..connections).map(pool).collect();
        let permits = Semaphore::new(idle.len());
        Self { idle: Mutex::new(idle), permits, silent_since: Mutex::default() }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Pool>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the connection that was returned last, so that the others may stay unopened. `None` if no connection becomes free in time.
    async fn take(&self, until: Instant) -> Option<DedicatedConnection<'_>> {
        let permit = timeout_at(until, self.permits.acquire()).await.ok()?.ok()?;
        let pool = self.idle().pop()?;
        Some(DedicatedConnection { dedicated: self, pool, _permit: permit })
    }

    fn silent_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the server owes a reply.
    fn note_sent(&self) {
        self.silent_since().get_or_insert_with(Instant::now);
    }

    /// Records a reply.
    fn note_reply(&self) {
        *self.silent_since() = None;
    }

    /// The result of a call that was not sent because no connection was free in time. If the busy connections got no reply either, the
    /// server is unreachable.
    fn refusal(&self, within: Duration) -> Result<Outcome, RedisError> {
        let is_silent = self.silent_since().is_some_and(|since| since.elapsed() >= within / 2);
        if is_silent { Err(not_executed(no_connection(within))) } else { Ok(Outcome::Insufficient(0)) }
    }

    fn refuse(&self, batch: Vec<Pending>) {
        for pending in batch {
            let refusal = self.refusal(pending.within);
            pending.respond(refusal);
        }
    }
}

impl Drop for DedicatedConnection<'_> {
    fn drop(&mut self) {
        self.dedicated.idle().push(self.pool.clone());
    }
}

/// Sends a batch, and notifies each caller. Returns true if the server replied, and enough replicas have all writes of granted calls.
async fn send_batch(dedicated: Arc<DedicatedConnections>, batch: Vec<Pending>) -> bool {
    let Some(until) = batch.iter().map(|pending| pending.until).max() else { return false };
    let Some(reserved) = dedicated.take(until).await else {
        dedicated.refuse(batch);
        return false;
    };
    let now = Instant::now();
    let (mut batch, late): (Vec<_>, Vec<_>) = batch.into_iter().partition(|pending| now < pending.until);
    dedicated.refuse(late);
    dedicated.note_sent();
    let connected = tokio::select! {
        biased;
        connected = reserved.pool.borrow() => connected,
        () = until_abandoned(&mut batch, |pending| &mut pending.reply) => return false,
    };
    let connection = match connected {
        Ok(connection) => connection,
        Err(error) => {
            let error = not_executed(error);
            batch.into_iter().for_each(|pending| pending.respond(Err(error.clone())));
            return false;
        }
    };
    // Skip calls that were abandoned.
    let sends = batch
        .into_iter()
        .filter(|pending| !pending.reply.is_closed())
        .map(|pending| send_one(connection.clone(), pending));
    let replies = join_all(sends).await;
    let is_replied = replies.iter().any(Option::is_some);
    if is_replied {
        dedicated.note_reply();
    }
    let mut granted: Vec<_> = replies.into_iter().flatten().flatten().collect();
    granted.retain(|(pending, _)| !pending.reply.is_closed());
    if granted.is_empty() {
        return is_replied;
    }
    wait_for_replicas(&dedicated, connection, granted).await
}

/// Sends one command. Notifies the caller unless the reply grants something. `None` without a reply, `Some(None)` if the reply grants
/// nothing.
async fn send_one(mut connection: Connection, mut pending: Pending) -> Option<Option<(Pending, Value)>> {
    let reply = tokio::select! {
        biased;
        reply = connection.send(&pending.command, pending.asking) => reply,
        () = until_abandoned(from_mut(&mut pending.reply), |reply| reply) => return None,
    };
    match reply {
        Ok(value) if (pending.is_granted)(&value) => Some(Some((pending, value))),
        reply => {
            let is_replied = is_reply(&reply);
            pending.respond(reply.map(Outcome::Replied));
            is_replied.then_some(None)
        }
    }
}

/// Whether a result is a reply of the server.
fn is_reply<T>(reply: &Result<T, RedisError>) -> bool {
    reply.as_ref().map_or_else(|error| error.code().is_some(), |_| true)
}

/// Waits until enough replicas have the writes of the granted calls, and notifies each caller. Returns whether enough replicas have them.
async fn wait_for_replicas(
    dedicated: &DedicatedConnections,
    mut connection: Connection,
    mut granted: Vec<(Pending, Value)>,
) -> bool {
    let count = granted.iter().map(|(pending, _)| pending.count).max().unwrap_or_default();
    let within = granted.iter().map(|(pending, _)| pending.remaining_wait()).max().unwrap_or_default();
    let mut command = redis::cmd("WAIT");
    // Zero would mean no timeout.
    command.arg(count).arg(within.as_millis().max(1) as u64);
    let due = Instant::now() + within + LATE;
    let abandoned = async {
        until_abandoned(&mut granted, |(pending, _)| &mut pending.reply).await;
        // Until then, a working server processes no other command of this connection.
        sleep_until(due).await;
    };
    let reply = tokio::select! {
        biased;
        reply = connection.send(&command, false) => Some(reply),
        () = abandoned => None,
    };
    if !reply.as_ref().is_some_and(is_reply) {
        dedicated.note_sent();
    }
    let Some(reply) = reply else { return false };
    let reached = match reply {
        Ok(Value::Int(reached)) => Ok(u32::try_from(reached).unwrap_or_default()),
        Ok(_) => Err((redis::ErrorKind::UnexpectedReturnType, "the reply to WAIT is not a number").into()),
        Err(error) => Err(error),
    };
    let are_enough = reached.as_ref().is_ok_and(|reached| *reached >= count);
    for (pending, value) in granted {
        let reply = match &reached {
            Ok(reached) if *reached >= pending.count => Outcome::Replied(value),
            Ok(reached) => Outcome::Insufficient(*reached),
            Err(error) => Outcome::Indeterminate(error.clone()),
        };
        pending.respond(Ok(reply));
    }
    are_enough
}

impl Pending {
    /// How long to wait for replicas from now on. The time to get a connection is not deducted.
    fn remaining_wait(&self) -> Duration {
        self.within.min((self.until + self.within).saturating_duration_since(Instant::now()))
    }

    fn respond(self, reply: Result<Outcome, RedisError>) {
        // The caller may have given up.
        let _ = self.reply.send(reply);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;
    use crate::backend::redis::connection::runtime::RuntimeHandle;

    fn dedicated(port: u16) -> DedicatedConnections {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
        let connector = Connector::Client(Box::new((client, config)));
        let long = Duration::from_secs(60);
        let options = PoolOptions { connect: long, response: long, runtime: Arc::new(RuntimeHandle::here()) };
        DedicatedConnections::new(&connector, 2, &options, &Arc::default())
    }

    /// Replies OK to each command until a WAIT, and then stays silent. Returns its port.
    async fn silent_server(connected: Arc<Semaphore>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                connected.add_permits(1);
                tokio::spawn(async move {
                    let mut read = [0; 1_024];
                    while let Ok(length) = client.read(&mut read).await
                        && length > 0
                    {
                        let text = String::from_utf8_lossy(&read[..length]);
                        let commands = if text.contains("WAIT") { 0 } else { text.matches('*').count() };
                        client.write_all("+OK\r\n".repeat(commands).as_bytes()).await.unwrap();
                    }
                });
            }
        });
        port
    }

    /// Regression: each dead connection cost a caller one second.
    #[tokio::test]
    async fn dead_connection_marks_idle_others() {
        let connected = Arc::new(Semaphore::new(0));
        let dedicated = dedicated(silent_server(Arc::clone(&connected)).await);
        let until = Instant::now() + Duration::from_secs(60);
        let (one, other) = (dedicated.take(until).await.unwrap(), dedicated.take(until).await.unwrap());
        let mut dead = one.pool.borrow().await.unwrap();
        other.pool.borrow().await.unwrap();
        assert!(timeout(Duration::from_millis(1_100), dead.send(&redis::cmd("WAIT"), false)).await.is_err());
        assert_eq!(connected.available_permits(), 2);
        other.pool.borrow().await.unwrap();
        assert_eq!(connected.available_permits(), 3, "the idle connection is replaced");
    }

    /// Regression: each connection logged its own failure.
    #[tokio::test]
    async fn connect_failure_applies_to_all_connections() {
        // No server listens there.
        let dedicated = dedicated(1);
        let until = Instant::now() + Duration::from_secs(60);
        let (one, other) = (dedicated.take(until).await.unwrap(), dedicated.take(until).await.unwrap());
        assert!(one.pool.borrow().await.is_err());
        assert!(other.pool.is_failing());
    }
}
