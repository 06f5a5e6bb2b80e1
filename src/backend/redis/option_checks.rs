//! The ranges of options, also of those in a URL.

use std::time::Duration;

use crate::error::ConfigError;

/// The largest number of connections to one server. Without a cluster, all of them are opened at startup, and a server accepts 10,000
/// clients by default.
const MAX_CONNECTIONS: u32 = 1_024;

pub(crate) const fn check_connections(connections: u32) -> Result<(), ConfigError> {
    match connections {
        1..=MAX_CONNECTIONS => Ok(()),
        _ => Err(ConfigError::ConnectionsOutOfRange { connections, max: MAX_CONNECTIONS }),
    }
}

pub(crate) const fn check_timeout(setting: &'static str, timeout: Duration) -> Result<(), ConfigError> {
    if timeout.is_zero() { Err(ConfigError::ZeroTimeout { setting }) } else { Ok(()) }
}
