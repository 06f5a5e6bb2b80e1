//! Opening connections, to whatever there is.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError};

use crate::backend::redis::error;
use crate::backend::redis::sentinel::{PrimaryTerm, Sentinels};

/// Where new connections come from.
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
                // Not one of those that the pool hands out: whoever has borrowed it may be in a transaction, or waiting.
                let mut connection = pool.dedicated_connection().await?;
                connection.set_response_timeout(*response_timeout);
                connection
            }
        };
        // A client without a password is let in and then refused every command.
        ping(&mut connection).await?;
        Ok((connection, term))
    }

    /// A connection for subscriptions, by which `heard` is told what the server says by itself.
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

/// How connections are to be. What is asked does not wait until the network has confirmed what was asked before, as it does by default: on a
/// connection that many share that is a round trip, and up to 40 ms more where the server has nothing to say yet.
pub(crate) fn tcp_nodelay() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

/// Connects to a server.
pub(crate) async fn open(client: &Client, config: &AsyncConnectionConfig) -> Result<MultiplexedConnection, RedisError> {
    let auth_error = match client.get_multiplexed_async_connection_with_config(config).await {
        Err(error) if error.kind() == ErrorKind::AuthenticationFailed => error,
        outcome => return outcome,
    };
    // The client keeps nothing of what the server has said, which may be that it has no room for anybody. It says that to strangers, too.
    let info = client.get_connection_info().clone();
    let anonymous = Client::open(info.set_redis_settings(RedisConnectionInfo::default().set_skip_set_lib_name()))?;
    let outcome = match anonymous.get_multiplexed_async_connection_with_config(config).await {
        Ok(mut connection) => ping(&mut connection).await,
        Err(error) => Err(error),
    };
    Err(match outcome {
        // What it said may have come before there was anybody to read it.
        Err(error) if error::is_full(&error) || error.is_io_error() => error,
        _ => auth_error,
    })
}

/// Connects to a server in order to listen to it.
pub(crate) async fn open_subscriber(
    client: &Client,
    push_sender: impl AsyncPushSender,
) -> Result<MultiplexedConnection, RedisError> {
    let client = with_resp3(client)?;
    // Whoever wants to listen has a clock of their own.
    let config = AsyncConnectionConfig::new()
        .set_push_sender(push_sender)
        .set_connection_timeout(None)
        .set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// The same client with the protocol in which messages come along with answers. With another one they would go through one more task.
pub(crate) fn with_resp3(client: &Client) -> Result<Client, RedisError> {
    let info = client.get_connection_info().clone();
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    Client::open(info.set_redis_settings(settings))
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
pub(crate) async fn ping(connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
    match redis::cmd("PING").query_async(connection).await {
        // A user may be allowed our scripts and no PING.
        Err(error) if error.code() == Some("NOPERM") => Ok(()),
        reply => reply,
    }
}
