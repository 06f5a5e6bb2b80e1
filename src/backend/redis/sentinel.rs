//! Connections to whichever server is the primary of a service at the moment.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::{MultiplexedConnection, PubSub};
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisError};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// How long a Sentinel is asked alone before the next one is asked beside it: one that hangs should not cost the whole time
/// that there is to connect.
const HEAD_START: Duration = Duration::from_millis(100);

/// The Sentinels of a service, each with a client of its own: the client library asks one after the other, and would wait
/// for the first that hangs.
#[derive(Clone)]
pub(super) struct Sentinels {
    service: Arc<str>,
    clients: Vec<Arc<Mutex<SentinelClient>>>,
    config: AsyncConnectionConfig,
}

impl Sentinels {
    pub(super) fn new(service: String, clients: Vec<SentinelClient>, config: AsyncConnectionConfig) -> Self {
        let clients = clients.into_iter().map(|client| Arc::new(Mutex::new(client))).collect();
        Self { service: service.into(), clients, config }
    }

    /// Connects to the primary that the first Sentinel to answer names, if that server takes itself for a primary, too.
    pub(super) async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        self.primary().await?.get_multiplexed_async_connection_with_config(&self.config).await
    }

    /// The same, for subscriptions.
    pub(super) async fn subscriber(&self) -> Result<PubSub, RedisError> {
        self.primary().await?.get_async_pubsub().await
    }

    async fn primary(&self) -> Result<Client, RedisError> {
        let mut left = self.clients.iter();
        let mut asked = JoinSet::new();
        let mut worst = None;
        loop {
            if let Some(client) = left.next() {
                let client = Arc::clone(client);
                asked.spawn(async move { client.lock().await.async_get_client().await });
            }
            let patience = Instant::now() + HEAD_START;
            tokio::select! {
                answer = asked.join_next() => match answer {
                    Some(Ok(Ok(primary))) => return Ok(primary),
                    Some(Ok(Err(error))) => worst = Some(telling(worst, error)),
                    // The task was dropped with the runtime.
                    Some(Err(_)) => {}
                    None => return Err(worst.unwrap_or_else(super::pool::no_connection)),
                },
                () = sleep_until(patience), if left.len() > 0 => {}
            }
        }
    }
}

/// Which of two errors tells more: that of a server which does not let us in, rather than that of a Sentinel which is not
/// there or knows no primary.
fn telling(known: Option<RedisError>, error: RedisError) -> RedisError {
    match known {
        Some(known) if known.kind() != ErrorKind::Io => known,
        _ => error,
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the primary of {}", self.service)
    }
}
