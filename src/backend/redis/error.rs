//! What a failure of Redis means to somebody who does not care that it is Redis.

use std::error::Error;
use std::sync::Arc;
use std::{fmt, io};

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use crate::error::{ConnectError, StoreError};

/// Whether the server does not know the script, and so has not run it.
pub(super) fn is_no_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether the server says that it is not the primary.
pub(super) fn is_from_replica(error: &RedisError) -> bool {
    matches!(code(error), Some("READONLY" | "MASTERDOWN" | "UNBLOCKED")) || is_wait_at_replica(error)
}

/// What a server that is made a replica says to a WAIT that comes after that; to one that it was waiting for it says UNBLOCKED.
fn is_wait_at_replica(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("WAIT cannot be used with replica instances"))
}

/// Says of an error that the command was not sent for which there is no connection, whatever was said to whoever wanted to connect.
pub(super) fn unsent(error: RedisError) -> RedisError {
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

pub(super) fn store_error(error: RedisError) -> StoreError {
    if let Some(cause) = cause_unsent(&error) {
        return store_error(cause.clone()).unasked();
    }
    if is_full(&error) || is_loading(&error) {
        return StoreError::unavailable(error).unasked();
    }
    if error.is_timeout() {
        return StoreError::late(error);
    }
    match error.kind() {
        ErrorKind::Io
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        | ErrorKind::ClusterConnectionNotFound => StoreError::unavailable(error),
        ErrorKind::AuthenticationFailed => StoreError::unauthorized(error),
        _ => match code(&error) {
            Some(
                "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "MOVED" | "ASK" | "READONLY" | "NOREPLICAS"
                | "BUSY" | "MISCONF" | "UNBLOCKED",
            ) => StoreError::unavailable(error),
            _ if is_wait_at_replica(&error) => StoreError::unavailable(error),
            Some("NOAUTH" | "WRONGPASS" | "NOPERM") => StoreError::unauthorized(error),
            Some("OOM") => StoreError::out_of_memory(error),
            Some("WRONGTYPE" | "TOLLGATE") => StoreError::foreign_data(error),
            _ if is_database_forbidden(&error) => StoreError::unauthorized(error),
            // Some scripts write before they get there.
            _ if is_forbidden_within(&error) => StoreError::unauthorized_in_part(error),
            _ => StoreError::other(error),
        },
    }
}

/// Whether a server has no room for another client. It says so to whoever connects, whatever they ask for, and closes the connection.
pub(super) fn is_full(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("max number of clients"))
}

/// Whether a server is still reading its data, from disk or from its primary. It runs no script before it has.
fn is_loading(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading)
}

/// Whether the user may not do something that a script does. Redis has no code for that: before 7.2 it says the one, since then, and Valkey,
/// the other.
fn is_forbidden_within(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    detail.contains("The user executing the script can't") || detail.contains("ACL failure in script")
}

/// What a server says to whoever wants another database than the first one and does not get it. The client keeps no code of that.
fn refused_database(error: &RedisError) -> Option<&str> {
    let detail = error.detail().unwrap_or_default();
    error.to_string().contains("refused to switch database").then_some(detail)
}

fn is_database_forbidden(error: &RedisError) -> bool {
    refused_database(error).is_some_and(|detail| detail.contains("no permissions"))
}

/// Whether the server knows no such command, nor ever will: it is another kind of server, or an operator has taken the command away.
pub(super) fn is_unknown_command(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("unknown command"))
}

/// What there is to say of a server that does not know what we need.
pub(super) fn another_kind(error: &RedisError) -> ConnectError {
    // What follows are the arguments.
    let said = error.detail().unwrap_or_default().split(',').next().unwrap_or_default();
    let reason = format!("the server says \"{said}\": if it is a Sentinel, use `redis+sentinel://`");
    ConnectError::Unsupported { reason }
}

/// Whether a node has not run a command since its keys are on their way to another one, some of which it has and some not.
pub(super) fn is_refused_for_now(error: &StoreError) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<RedisError>());
    cause.is_some_and(|cause| code(cause) == Some("TRYAGAIN"))
}

/// Why there is no connection to begin with.
pub(super) fn connect_error(error: RedisError) -> ConnectError {
    let error = cause_unsent(&error).cloned().unwrap_or(error);
    #[cfg(feature = "tls")]
    if let Some(tls) = tls_error(&error) {
        use rustls::{AlertDescription, Error as Tls};
        return match tls {
            Tls::InvalidCertificate(_) => ConnectError::Certificate(store_error(error)),
            Tls::AlertReceived(
                AlertDescription::CertificateRequired
                | AlertDescription::BadCertificate
                | AlertDescription::UnknownCA
                | AlertDescription::CertificateUnknown
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateRevoked
                | AlertDescription::DecryptError,
            ) => ConnectError::ClientCertificate(store_error(error)),
            _ => ConnectError::Tls(store_error(error)),
        };
    }
    match (error.kind(), code(&error)) {
        _ if is_full(&error) => ConnectError::Store(store_error(error)),
        (ErrorKind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => {
            ConnectError::Credentials(store_error(error))
        }
        (_, Some("NOPERM")) => ConnectError::Permissions(store_error(error)),
        _ if is_database_forbidden(&error) => ConnectError::Permissions(store_error(error)),
        _ if error.to_string().contains("cluster support disabled") => {
            ConnectError::Unsupported { reason: "the server is not a node of a cluster: use `redis://`".to_owned() }
        }
        _ if error.to_string().contains("not point to a sentinel") => {
            ConnectError::Unsupported { reason: "the server is not a Sentinel: use `redis://`".to_owned() }
        }
        _ if is_unknown_command(&error) => another_kind(&error),
        _ => match (refused_database(&error), error.detail()) {
            (Some(detail), _) => ConnectError::Unsupported { reason: format!("it refuses the database: {detail}") },
            (_, Some(detail)) if error.kind() == ErrorKind::MasterNameNotFoundBySentinel => {
                ConnectError::Unsupported { reason: detail.to_owned() }
            }
            _ => ConnectError::Store(store_error(error)),
        },
    }
}

/// What went wrong in the TLS layer, if that is where it went wrong.
#[cfg(feature = "tls")]
fn tls_error(error: &RedisError) -> Option<&rustls::Error> {
    // That has what the TLS layer said in it.
    io_error(error)?.get_ref()?.downcast_ref()
}

fn io_error(error: &RedisError) -> Option<&io::Error> {
    // The client hands out the shared box that it keeps the error in.
    error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?.downcast_ref()
}

/// The code of a server's error. Redis before 7 wraps an error that a script ran into, code and all, in a sentence of its
/// own: `ERR Error running script (call to f_...): @user_script:12: WRONGTYPE Operation against ...`.
pub(super) fn code(error: &RedisError) -> Option<&str> {
    let error = cause_unsent(error).unwrap_or(error);
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
pub(super) fn unexpected_reply(reply: &Value) -> StoreError {
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
        assert!(matches!(connect_error(unsent(gone())), ConnectError::Store(error) if !error.is_refusal()));
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
