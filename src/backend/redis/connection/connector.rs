//! Opens connections to one server, to a Sentinel service or like a pool.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisError};

use super::connect::{open, open_subscriber, ping};
use crate::backend::redis::sentinel::{PrimaryTerm, Sentinels};

/// Opens new connections.
#[derive(Clone)]
pub(crate) enum Connector {
    Client(Box<(Client, AsyncConnectionConfig)>),
    Sentinels(Arc<Sentinels>),
    Pool { pool: bb8::Pool<RedisConnectionManager>, response_timeout: Duration },
}

impl Connector {
    pub(crate) async fn connect(&self) -> Result<(MultiplexedConnection, Option<PrimaryTerm>), RedisError> {
        let mut term = None;
        let mut connection = match self {
            Self::Sentinels(sentinels) => {
                let (connection, primary_term) = sentinels.connect().await?;
                term = Some(primary_term);
                connection
            }
            Self::Client(client) => {
                let (client, config) = &**client;
                open(client, config).await?
            }
            Self::Pool { pool, response_timeout } => {
                // A pooled connection may be in a transaction or blocked.
                let mut connection = pool.dedicated_connection().await?;
                connection.set_response_timeout(*response_timeout);
                connection
            }
        };
        // If the client has no password, a server that requires one accepts the connection and then refuses every command.
        ping(&mut connection).await?;
        Ok((connection, term))
    }

    /// Opens a connection for subscriptions. `push_sender` receives the messages that the server pushes.
    pub(crate) async fn subscriber(
        &self,
        push_sender: impl AsyncPushSender,
    ) -> Result<(MultiplexedConnection, Option<PrimaryTerm>), RedisError> {
        match self {
            Self::Client(client) => open_subscriber(&client.0, push_sender).await.map(|connection| (connection, None)),
            Self::Sentinels(sentinels) => {
                sentinels.subscriber(push_sender).await.map(|(connection, term)| (connection, Some(term)))
            }
            Self::Pool { .. } => {
                Err((ErrorKind::InvalidClientConfig, "a pool has no connections for subscriptions").into())
            }
        }
    }
}

/// Names the server for the log, without user and password.
impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(client) => fmt::Display::fmt(client.0.get_connection_info().addr(), f),
            Self::Sentinels(sentinels) => fmt::Display::fmt(sentinels, f),
            Self::Pool { .. } => f.write_str("the pool's server"),
        }
    }
}
