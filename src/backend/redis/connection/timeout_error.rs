//! Errors of operations that took too long.

use std::io;
use std::time::Duration;

use redis::RedisError;

/// No connection was available in time, and nothing was sent.
pub(crate) fn no_connection(within: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::NotConnected, format!("no connection within {within:?}")).into()
}

/// The command was sent, and no reply came in time.
pub(crate) fn no_reply(within: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::TimedOut, format!("no reply within {within:?}")).into()
}
