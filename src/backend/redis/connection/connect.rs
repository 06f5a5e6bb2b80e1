//! Opens connections to a server.

use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError};

use crate::backend::redis::error;

/// Sets `TCP_NODELAY`. By default a command waits until the network has acknowledged the one before. On a shared connection that
/// costs a round trip, and up to 40 ms more while the server has nothing to send.
pub(crate) fn tcp_nodelay() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

/// Connects to a server.
pub(crate) async fn open(client: &Client, config: &AsyncConnectionConfig) -> Result<MultiplexedConnection, RedisError> {
    let auth_error = match client.get_multiplexed_async_connection_with_config(config).await {
        Err(error) if error.kind() == ErrorKind::AuthenticationFailed => error,
        outcome => return outcome,
    };
    // The client library discards the server's message. It may be `max number of clients`, which a server also sends to clients
    // without credentials.
    let info = client.get_connection_info().clone();
    let anonymous = Client::open(info.set_redis_settings(RedisConnectionInfo::default().set_skip_set_lib_name()))?;
    let outcome = match anonymous.get_multiplexed_async_connection_with_config(config).await {
        Ok(mut connection) => ping(&mut connection).await,
        Err(error) => Err(error),
    };
    Err(match outcome {
        // An I/O error counts as well: the server may have closed the connection before the client read the message.
        Err(error) if error::is_full(&error) || error.is_io_error() => error,
        _ => auth_error,
    })
}

/// Connects to a server for subscriptions.
pub(crate) async fn open_subscriber(
    client: &Client,
    push_sender: impl AsyncPushSender,
) -> Result<MultiplexedConnection, RedisError> {
    let client = with_resp3(client)?;
    // The caller has its own timeouts.
    let config = AsyncConnectionConfig::new()
        .set_push_sender(push_sender)
        .set_connection_timeout(None)
        .set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// The same client with RESP3, which delivers pushes together with replies. With RESP2 they would pass through another task.
pub(crate) fn with_resp3(client: &Client) -> Result<Client, RedisError> {
    let info = client.get_connection_info().clone();
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    Client::open(info.set_redis_settings(settings))
}

/// Checks that the server accepts commands.
pub(crate) async fn ping(connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
    match redis::cmd("PING").query_async(connection).await {
        // A user may run the scripts and not PING.
        Err(error) if error.code() == Some("NOPERM") => Ok(()),
        reply => reply,
    }
}
