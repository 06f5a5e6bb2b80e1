//! Maps errors of Redis to [`StoreError`].

use std::error::Error;
use std::sync::Arc;
use std::{fmt, io};

use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind, Value};

use super::peer::Peer;
use crate::error::StoreError;

/// Whether the server does not know the script, and so has not run it.
pub(crate) fn is_no_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether the server reports that it is not the primary.
pub(crate) fn is_from_replica(error: &RedisError) -> bool {
    matches!(code(error), Some("READONLY" | "MASTERDOWN" | "UNBLOCKED")) || is_wait_at_replica(error)
}

/// Whether this is the error for a WAIT that arrives after the server has become a replica. A WAIT in progress ends with UNBLOCKED.
fn is_wait_at_replica(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("WAIT cannot be used with replica instances"))
}

/// Marks an error as a failure without any effect: the command was not sent, or a node refused to run it.
pub(crate) fn not_executed(error: RedisError) -> RedisError {
    io::Error::new(io::ErrorKind::NotConnected, Unsent(error)).into()
}

/// Why a command was not sent, if that is known.
fn cause_not_executed(error: &RedisError) -> Option<&RedisError> {
    io_error(error)?.get_ref()?.downcast_ref().map(|Unsent(cause)| cause)
}

#[derive(Debug)]
struct Unsent(RedisError);

impl fmt::Display for Unsent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Error for Unsent {}

/// Names the server in its error. This server may differ from the one in the URL.
pub(crate) fn with_peer(peer: Peer, error: RedisError) -> RedisError {
    io::Error::other(PeerError(peer, error)).into()
}

fn peer_error(error: &RedisError) -> Option<&PeerError> {
    io_error(error)?.get_ref()?.downcast_ref()
}

#[derive(Debug)]
struct PeerError(Peer, RedisError);

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(peer, error) = self;
        write!(f, "{peer}: {}", Shown(error.clone()))
    }
}

impl Error for PeerError {}

/// The error inside the wrappers of [`not_executed`] and [`with_peer`].
pub(crate) fn inner(error: &RedisError) -> &RedisError {
    match cause_not_executed(error).or_else(|| peer_error(error).map(|PeerError(_, error)| error)) {
        Some(cause) => inner(cause),
        None => error,
    }
}

/// The server that [`with_peer`] added to the error, if any.
pub(crate) fn peer_of(error: &RedisError) -> Option<&Peer> {
    match cause_not_executed(error) {
        Some(cause) => peer_of(cause),
        None => peer_error(error).map(|PeerError(peer, _)| peer),
    }
}

/// Displays an error without its source. The client library's errors include their source, which a printed error chain would repeat.
#[derive(Debug)]
struct Shown(RedisError);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use io::ErrorKind::{
            ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable,
        };
        let Self(error) = self;
        if let Some(server_error) = error.source().and_then(|source| source.downcast_ref::<ServerError>()) {
            return write!(f, "{} {}", server_error.code(), server_error.details().unwrap_or_default());
        }
        match io_error(error).map(io::Error::kind) {
            Some(
                kind @ (ConnectionAborted | ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable),
            ) => fmt::Display::fmt(&kind, f),
            // Remove the `ErrorKind`, which the client library appends.
            _ => f.write_str(&error.to_string().replacen(&format!(" - {:?}", error.kind()), "", 1)),
        }
    }
}

impl Error for Shown {}

pub(crate) fn store_error(error: RedisError) -> StoreError {
    if let Some(cause) = cause_not_executed(&error) {
        return store_error(cause.clone()).before_sending();
    }
    if let Some(PeerError(_, cause)) = peer_error(&error) {
        return store_error(cause.clone());
    }
    let shown = Shown(error.clone());
    if is_full(&error) || is_loading(&error) {
        return StoreError::unavailable(shown).before_sending();
    }
    if error.is_timeout() {
        return StoreError::late(shown);
    }
    match error.kind() {
        ErrorKind::Io
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        | ErrorKind::ClusterConnectionNotFound => StoreError::unavailable(shown),
        ErrorKind::AuthenticationFailed => StoreError::unauthorized(shown),
        _ => match code(&error) {
            Some(
                "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "MOVED" | "ASK" | "READONLY" | "NOREPLICAS"
                | "BUSY" | "MISCONF" | "UNBLOCKED",
            ) => StoreError::unavailable(shown),
            _ if is_wait_at_replica(&error) => StoreError::unavailable(shown),
            Some("NOAUTH" | "WRONGPASS" | "NOPERM") => StoreError::unauthorized(shown),
            Some("OOM") => StoreError::out_of_memory(shown),
            Some("WRONGTYPE" | "TOLLGATE") => StoreError::foreign_data(shown),
            _ if is_database_forbidden(&error) => StoreError::unauthorized(shown),
            // Some scripts write before they fail.
            _ if is_denied_in_script(&error) => StoreError::unauthorized_in_part(shown),
            _ => StoreError::other(shown),
        },
    }
}

/// Whether a server has no room for another client. It sends this error to every new client, whatever the command, and disconnects it.
pub(crate) fn is_full(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("max number of clients"))
}

/// Whether a server is still loading its data, from disk or from its primary. Meanwhile, the server runs no script.
pub(crate) fn is_loading(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading)
}

/// Whether the user lacks a permission for a command in a script. Redis has no error code for this. The first text is from before 7.2,
/// the second from 7.2 and Valkey.
fn is_denied_in_script(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    detail.contains("The user executing the script can't") || detail.contains("ACL failure in script")
}

/// The text of the server's refusal to select a database other than 0. The client library discards the error code.
pub(crate) fn refused_database(error: &RedisError) -> Option<&str> {
    let detail = error.detail().unwrap_or_default();
    error.to_string().contains("refused to switch database").then_some(detail)
}

pub(crate) fn is_database_forbidden(error: &RedisError) -> bool {
    refused_database(error).is_some_and(|detail| detail.contains("no permissions"))
}

/// Whether the server will never know the command: it is another kind of server, or an operator has removed the command.
pub(crate) fn is_unknown_command(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("unknown command"))
}

/// Whether a node has not run a command because its keys are split between two nodes.
pub(crate) fn is_refused_for_now(error: &StoreError) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<Shown>());
    cause.is_some_and(|Shown(cause)| code(cause) == Some("TRYAGAIN"))
}

/// The error of the TLS layer, if there is one.
#[cfg(feature = "tls")]
pub(crate) fn tls_error(error: &RedisError) -> Option<&rustls::Error> {
    // The I/O error contains it.
    io_error(error)?.get_ref()?.downcast_ref()
}

pub(crate) fn io_error(error: &RedisError) -> Option<&io::Error> {
    // The source is the `Arc` around the I/O error, not the I/O error itself.
    error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?.downcast_ref()
}

/// The code of a server's error. Redis before 7 wraps the error of a script, with its code, in a sentence:
/// `ERR Error running script (call to f_...): @user_script:12: WRONGTYPE Operation against ...`.
pub(crate) fn code(error: &RedisError) -> Option<&str> {
    let error = inner(error);
    let code = error.code()?;
    let wrapped = match (code, error.detail()) {
        ("ERR", Some(detail)) => detail.split_once("@user_script").map(|(_, location)| location),
        // If the script has caught and returned the error, the location is in the place of the code.
        (location, Some(detail)) if location.starts_with("@user_script") => Some(detail),
        _ => None,
    };
    let inner = wrapped.and_then(|location| {
        let mut words = location.split([' ', '-']);
        words.find(|word| word.len() > 2 && word.bytes().all(|byte| byte.is_ascii_uppercase()))
    });
    Some(inner.unwrap_or(code))
}

/// The server replied, but not in the form that the script or command returns.
pub(crate) fn unexpected_reply(reply: &Value) -> StoreError {
    StoreError::other(UnexpectedReply(format!("{reply:?}").chars().take(200).collect()))
}

#[derive(Debug)]
struct UnexpectedReply(String);

impl fmt::Display for UnexpectedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unexpected reply of redis: {}", self.0)
    }
}

impl Error for UnexpectedReply {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsent_command_is_a_refusal() {
        let reset = || RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        assert!(!store_error(reset()).is_refusal());
        let error = store_error(not_executed(reset()));
        assert!(error.is_refusal() && error.is_unavailable());
        // Users see no difference.
        assert_eq!(format!("{error:?}"), format!("{:?}", store_error(reset())).replace("true", "false"));
        let refused = RedisError::from((ErrorKind::AuthenticationFailed, "no"));
        assert!(store_error(not_executed(refused)).is_unauthorized());
    }

    #[test]
    fn loading_server_is_a_refusal() {
        let loading = server_error("LOADING Redis is loading the dataset in memory");
        for error in [loading.clone(), not_executed(loading)] {
            let error = store_error(error);
            assert!(error.is_refusal() && error.is_unavailable(), "{error:?}");
            assert!(error.source().unwrap().to_string().contains("loading the dataset"), "{error:?}");
        }
        let in_script =
            server_error("ERR Error running script (call to f_0): @user_script:30: LOADING Redis is loading");
        assert!(!store_error(in_script).is_refusal());
    }

    /// Regression: this was a permanent error, and ended all waits.
    #[test]
    fn demoted_primary_is_unavailable() {
        for text in [
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            "ERR WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is configured to be writable \
             (which is not the default) writes to replicas are just local and are not propagated.",
        ] {
            let error = server_error(text);
            assert!(is_from_replica(&error), "{error:?}");
            let error = store_error(error);
            // The server may have applied the writes before the WAIT, and may still send them to replicas.
            assert!(error.is_unavailable() && !error.is_refusal(), "{error:?}");
        }
    }

    fn server_error(text: &str) -> RedisError {
        let reply = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = reply else { panic!("{reply:?}") };
        error.into()
    }

    #[test]
    fn denial_in_script_is_no_refusal() {
        let is_refusal = |text: &str| {
            let error = store_error(server_error(text));
            assert!(error.is_unauthorized(), "{error:?}");
            error.is_refusal()
        };
        assert!(is_refusal("NOPERM User bob has no permissions to run the 'evalsha' command"));
        assert!(!is_refusal("ERR ACL failure in script: User bob has no permissions to run the 'set' command"));
    }
}
