//! What a failure of Redis means to somebody who does not care that it is Redis.

use std::error::Error;
use std::sync::Arc;
use std::{fmt, io};

use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind, Value};

use super::connect_error::Peer;
use crate::error::StoreError;

/// Whether the server does not know the script, and so has not run it.
pub(crate) fn is_no_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether the server says that it is not the primary.
pub(crate) fn is_from_replica(error: &RedisError) -> bool {
    matches!(code(error), Some("READONLY" | "MASTERDOWN" | "UNBLOCKED")) || is_wait_at_replica(error)
}

/// What a server that is made a replica says to a WAIT that comes after that; to one that it was waiting for it says UNBLOCKED.
fn is_wait_at_replica(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("WAIT cannot be used with replica instances"))
}

/// Says of an error that the command was not sent for which there is no connection, whatever was said to whoever wanted to connect.
pub(crate) fn unsent(error: RedisError) -> RedisError {
    io::Error::new(io::ErrorKind::NotConnected, Unsent(error)).into()
}

/// Why a command was not sent, if that is known.
fn cause_unsent(error: &RedisError) -> Option<&RedisError> {
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

/// Says which server an error is about, where it may be another one than the URL names.
pub(crate) fn at(peer: Peer, error: RedisError) -> RedisError {
    io::Error::other(At(peer, error)).into()
}

fn at_peer(error: &RedisError) -> Option<&At> {
    io_error(error)?.get_ref()?.downcast_ref()
}

#[derive(Debug)]
struct At(Peer, RedisError);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(peer, error) = self;
        write!(f, "{peer}: {}", Shown(error.clone()))
    }
}

impl Error for At {}

/// An error without what was added to it here.
pub(crate) fn inner(error: &RedisError) -> &RedisError {
    match cause_unsent(error).or_else(|| at_peer(error).map(|At(_, error)| error)) {
        Some(cause) => inner(cause),
        None => error,
    }
}

/// The server that an error is about, if it says so.
pub(crate) fn place(error: &RedisError) -> Option<&Peer> {
    match cause_unsent(error) {
        Some(cause) => place(cause),
        None => at_peer(error).map(|At(peer, _)| peer),
    }
}

/// An error in its own words. The client library's errors print their source, which would be printed again by whoever prints a chain.
#[derive(Debug)]
struct Shown(RedisError);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use io::ErrorKind::{
            ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable,
        };
        let Self(error) = self;
        if let Some(said) = error.source().and_then(|source| source.downcast_ref::<ServerError>()) {
            return write!(f, "{} {}", said.code(), said.details().unwrap_or_default());
        }
        match io_error(error).map(io::Error::kind) {
            Some(
                kind @ (ConnectionAborted | ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable),
            ) => fmt::Display::fmt(&kind, f),
            // The client library names its kind of error behind the sentence.
            _ => f.write_str(&error.to_string().replacen(&format!(" - {:?}", error.kind()), "", 1)),
        }
    }
}

impl Error for Shown {}

pub(crate) fn store_error(error: RedisError) -> StoreError {
    if let Some(cause) = cause_unsent(&error) {
        return store_error(cause.clone()).unasked();
    }
    if let Some(At(_, cause)) = at_peer(&error) {
        return store_error(cause.clone());
    }
    let shown = Shown(error.clone());
    if is_full(&error) || is_loading(&error) {
        return StoreError::unavailable(shown).unasked();
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
            // Some scripts write before they get there.
            _ if is_forbidden_within(&error) => StoreError::unauthorized_in_part(shown),
            _ => StoreError::other(shown),
        },
    }
}

/// Whether a server has no room for another client. It says so to whoever connects, whatever they ask for, and closes the connection.
pub(crate) fn is_full(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("max number of clients"))
}

/// Whether a server is still reading its data, from disk or from its primary. It runs no script before it has.
pub(crate) fn is_loading(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading)
}

/// Whether the user may not do something that a script does. Redis has no code for that: before 7.2 it says the one, since then, and Valkey,
/// the other.
fn is_forbidden_within(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    detail.contains("The user executing the script can't") || detail.contains("ACL failure in script")
}

/// What a server says to whoever wants another database than the first one and does not get it. The client keeps no code of that.
pub(crate) fn refused_database(error: &RedisError) -> Option<&str> {
    let detail = error.detail().unwrap_or_default();
    error.to_string().contains("refused to switch database").then_some(detail)
}

pub(crate) fn is_database_forbidden(error: &RedisError) -> bool {
    refused_database(error).is_some_and(|detail| detail.contains("no permissions"))
}

/// Whether the server knows no such command, nor ever will: it is another kind of server, or an operator has taken the command away.
pub(crate) fn is_unknown_command(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("unknown command"))
}

/// Whether a node has not run a command since its keys are on their way to another one, some of which it has and some not.
pub(crate) fn is_refused_for_now(error: &StoreError) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<Shown>());
    cause.is_some_and(|Shown(cause)| code(cause) == Some("TRYAGAIN"))
}

/// What went wrong in the TLS layer, if that is where it went wrong.
#[cfg(feature = "tls")]
pub(crate) fn tls_error(error: &RedisError) -> Option<&rustls::Error> {
    // That has what the TLS layer said in it.
    io_error(error)?.get_ref()?.downcast_ref()
}

pub(crate) fn io_error(error: &RedisError) -> Option<&io::Error> {
    // The client hands out the shared box that it keeps the error in.
    error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?.downcast_ref()
}

/// The code of a server's error. Redis before 7 wraps an error that a script ran into, code and all, in a sentence of its
/// own: `ERR Error running script (call to f_...): @user_script:12: WRONGTYPE Operation against ...`.
pub(crate) fn code(error: &RedisError) -> Option<&str> {
    let error = inner(error);
    let code = error.code()?;
    let wrapped = match (code, error.detail()) {
        ("ERR", Some(detail)) => detail.split_once("@user_script").map(|(_, place)| place),
        // One that the script has caught and returns begins with the place.
        (place, Some(detail)) if place.starts_with("@user_script") => Some(detail),
        _ => None,
    };
    let inner = wrapped.and_then(|place| {
        let mut words = place.split([' ', '-']);
        words.find(|word| word.len() > 2 && word.bytes().all(|byte| byte.is_ascii_uppercase()))
    });
    Some(inner.unwrap_or(code))
}

/// The server answered, but not as the script does.
pub(crate) fn unexpected_reply(reply: &Value) -> StoreError {
    StoreError::other(UnexpectedReply(format!("{reply:?}").chars().take(200).collect()))
}

#[derive(Debug)]
struct UnexpectedReply(String);

impl fmt::Display for UnexpectedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a script answered {}, which is not what it answers", self.0)
    }
}

impl Error for UnexpectedReply {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_sent_has_not_happened() {
        let gone = || RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        assert!(!store_error(gone()).is_refusal());
        let error = store_error(unsent(gone()));
        assert!(error.is_refusal() && error.is_unavailable());
        // Nobody sees a difference.
        assert_eq!(format!("{error:?}"), format!("{:?}", store_error(gone())).replace("true", "false"));
        let refused = RedisError::from((ErrorKind::AuthenticationFailed, "no"));
        assert!(store_error(unsent(refused)).is_unauthorized());
    }

    #[test]
    fn a_server_that_reads_its_data_has_run_nothing() {
        let loads = said("LOADING Redis is loading the dataset in memory");
        for error in [loads.clone(), unsent(loads)] {
            let error = store_error(error);
            assert!(error.is_refusal() && error.is_unavailable(), "{error:?}");
            assert!(error.source().unwrap().to_string().contains("loading the dataset"), "{error:?}");
        }
        let within = said("ERR Error running script (call to f_0): @user_script:30: LOADING Redis is loading");
        assert!(!store_error(within).is_refusal());
    }

    /// It was an error that does not pass, and ended all waiting.
    #[test]
    fn a_primary_that_became_a_replica_takes_no_writes_for_now() {
        for text in [
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            "ERR WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is configured to be writable \
             (which is not the default) writes to replicas are just local and are not propagated.",
        ] {
            let error = said(text);
            assert!(is_from_replica(&error), "{error:?}");
            let error = store_error(error);
            // What was written before it is there, and may be carried on.
            assert!(error.is_unavailable() && !error.is_refusal(), "{error:?}");
        }
    }

    fn said(text: &str) -> RedisError {
        let answer = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = answer else { panic!("{answer:?}") };
        error.into()
    }

    #[test]
    fn a_script_that_is_stopped_half_way_may_have_written() {
        let is_refusal = |text: &str| {
            let error = store_error(said(text));
            assert!(error.is_unauthorized(), "{error:?}");
            error.is_refusal()
        };
        assert!(is_refusal("NOPERM User bob has no permissions to run the 'evalsha' command"));
        assert!(!is_refusal("ERR ACL failure in script: User bob has no permissions to run the 'set' command"));
    }
}
