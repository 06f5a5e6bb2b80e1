//! Maps failures to connect to [`ConnectError`]: the kind of mistake, the server, the cause and the remedy.

use std::borrow::Cow;
use std::io;
use std::time::Duration;

use redis::{ErrorKind, RedisError};

use super::diagnose::{Protocol, diagnose};
#[cfg(feature = "tls")]
use super::error::tls_error;
use super::error::{
    code, inner, io_error, is_database_forbidden, is_full, is_loading, is_unknown_command, peer_of, refused_database,
    store_error,
};
use super::peer::Peer;
use crate::error::{ConnectError, ConnectFailure, StoreError};

/// An attempt to connect.
pub(crate) struct Attempt {
    /// The server of errors that do not name one.
    pub(crate) peer: Peer,
    pub(crate) timeout: Duration,
    pub(crate) is_encrypted: bool,
    pub(crate) has_client_certificate: bool,
}

impl Attempt {
    /// Turns a failure to connect at startup into an error for the user.
    pub(crate) async fn failed(&self, error: RedisError) -> ConnectError {
        let peer = peer_of(&error).unwrap_or(&self.peer).clone();
        let error = inner(&error).clone();
        let classified = self.classify(&peer, &error);
        if matches!(classified, None | Some(ConnectError::Tls(_)))
            && !is_absent(&error)
            && let Some(address) = peer.address()
            && let Some(protocol) = diagnose(address, self.timeout).await
            && let Some(mismatch) = self.protocol_mismatch(&peer, protocol, &error)
        {
            return mismatch;
        }
        classified.unwrap_or_else(|| unclear(&peer, error))
    }

    /// The error for the user, if the kind, code or text of `error` is enough to name the mistake.
    fn classify(&self, peer: &Peer, error: &RedisError) -> Option<ConnectError> {
        #[cfg(feature = "tls")]
        if let Some(tls) = tls_error(error) {
            return Some(self.tls(peer, tls));
        }
        let failure = |remedy: &'static str| ConnectFailure::new(peer, store_error(error.clone()), remedy);
        Some(match (error.kind(), code(error)) {
            _ if is_full(error) => ConnectError::Store(failure("raise its `maxclients`, or open fewer `connections`")),
            _ if is_loading(error) => ConnectError::Store(failure("wait until it has loaded its data")),
            (ErrorKind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => {
                ConnectError::Credentials(failure(match peer {
                    Peer::Sentinel(_) => "correct them with `RedisOptions::sentinel_user`",
                    Peer::Pool => "correct them where the pool is made",
                    _ => "correct them in the URL or with `RedisOptions::user`",
                }))
            }
            (_, Some("NOPERM")) => ConnectError::Permissions(failure(GRANT)),
            _ if is_database_forbidden(error) => {
                ConnectError::Permissions(failure("grant it `+select`, or use database 0"))
            }
            _ if error.to_string().contains("cluster support disabled") => {
                unsupported(peer, "it is not a node of a cluster", "use `redis://`, or `rediss://` for encryption")
            }
            _ if error.to_string().contains("not point to a sentinel") => {
                unsupported(peer, "it is not a Sentinel", "use `redis://`, or `rediss://` for encryption")
            }
            _ if is_unknown_command(error) => wrong_server_kind(peer, error),
            (ErrorKind::MasterNameNotFoundBySentinel, _) => {
                unsupported(peer, error.detail()?.to_owned(), "correct the service in the path of the URL")
            }
            _ => {
                let detail = refused_database(error)?;
                unsupported(peer, format!("it refuses the database: {detail}"), "use a database that it has")
            }
        })
    }

    /// The error for the user, if the protocol that the server speaks explains `error`.
    fn protocol_mismatch(&self, peer: &Peer, protocol: Protocol, error: &RedisError) -> Option<ConnectError> {
        let failure = |text: &'static str, remedy| ConnectFailure::new(peer, StoreError::other(text), remedy);
        Some(match protocol {
            Protocol::Http => unsupported(peer, "an HTTP server answers there", "correct the port in the URL"),
            Protocol::Redis if self.is_encrypted => ConnectError::Tls(failure(
                "the server does not speak TLS on this port",
                "use its TLS port, or a `redis` scheme instead of `rediss`",
            )),
            Protocol::Redis => return None,
            Protocol::Tls { .. } if !self.is_encrypted => ConnectError::Tls(failure(
                "the server speaks TLS on this port",
                "use a `rediss` scheme instead of `redis` (feature `tls`), or its port without TLS",
            )),
            Protocol::Tls { wants_certificate: true } if !self.has_client_certificate => {
                ConnectError::ClientCertificate(failure("the handshake ended without one", PASS_CERTIFICATE))
            }
            Protocol::Tls { .. } if error.kind() == ErrorKind::Parse => not_redis(peer),
            Protocol::Tls { .. } => return None,
        })
    }

    #[cfg(feature = "tls")]
    fn tls(&self, peer: &Peer, error: &rustls::Error) -> ConnectError {
        use rustls::{AlertDescription as Alert, Error as Tls};
        let failure =
            |text: String, remedy: Cow<'static, str>| ConnectFailure::new(peer, StoreError::unavailable(text), remedy);
        match error {
            Tls::InvalidCertificate(problem) => {
                let (text, remedy) = certificate(peer, problem);
                ConnectError::Certificate(failure(text, remedy.into()))
            }
            Tls::AlertReceived(
                alert @ (Alert::CertificateRequired
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::UnknownCA
                | Alert::CertificateUnknown
                | Alert::CertificateExpired
                | Alert::CertificateRevoked
                | Alert::AccessDenied
                | Alert::DecryptError),
            ) => ConnectError::ClientCertificate(if self.has_client_certificate {
                failure(
                    format!("it rejected the certificate of this client with the alert {alert:?}"),
                    "pass a certificate from its CA to `RedisOptions::client_certificate`".into(),
                )
            } else {
                failure("the handshake ended without one".to_owned(), PASS_CERTIFICATE.into())
            }),
            _ => ConnectError::Tls(failure(
                error.to_string(),
                "make sure that its port speaks TLS 1.2 or 1.3 with a common cipher".into(),
            )),
        }
    }
}

const PASS_CERTIFICATE: &str = "pass one to `RedisOptions::client_certificate`";
const GRANT: &str = "grant the permissions that the docs of `tollgate::backend::redis` list under `Servers`";

/// The user may connect, but lacks permissions.
pub(crate) fn forbidden(peer: &Peer, error: StoreError) -> ConnectError {
    ConnectError::Permissions(ConnectFailure::new(peer, error, GRANT))
}

/// The server replies, but cannot be used.
pub(crate) fn unsupported(
    peer: &Peer,
    reason: impl Into<Cow<'static, str>>,
    remedy: impl Into<Cow<'static, str>>,
) -> ConnectError {
    ConnectError::Unsupported(ConnectFailure::new(peer, StoreError::other(reason.into()), remedy))
}

/// The node would serve some keys, and redirect the client for the others.
pub(crate) fn node_of_a_cluster(peer: &Peer) -> ConnectError {
    unsupported(peer, "it is a node of a cluster", "use `redis+cluster://`, or `rediss+cluster://` for encryption")
}

/// The server does not know a required command.
pub(crate) fn wrong_server_kind(peer: &Peer, error: &RedisError) -> ConnectError {
    // After the comma, the message repeats the arguments.
    let message = error.detail().unwrap_or_default().split(',').next().unwrap_or_default();
    let remedy = "if it is a Sentinel, use `redis+sentinel://`; otherwise let it run EVAL and EVALSHA";
    unsupported(peer, format!("it replied \"{message}\""), remedy)
}

fn not_redis(peer: &Peer) -> ConnectError {
    unsupported(peer, "the server does not speak the protocol of Redis", "correct the host and the port in the URL")
}

/// Whether there is no server to connect to.
fn is_absent(error: &RedisError) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, NotFound};
    let kind = io_error(error).map(io::Error::kind);
    is_unknown_host(error) || matches!(kind, Some(ConnectionRefused | HostUnreachable | NetworkUnreachable | NotFound))
}

fn is_unknown_host(error: &RedisError) -> bool {
    io_error(error).is_some_and(|error| error.to_string().contains("failed to lookup address"))
}

/// The error for a failure whose only explanation is the error itself.
fn unclear(peer: &Peer, error: RedisError) -> ConnectError {
    if error.kind() == ErrorKind::Parse {
        return not_redis(peer);
    }
    let remedy = match io_error(&error).map(io::Error::kind) {
        _ if is_unknown_host(&error) => "correct the host name, or the name server of this machine",
        Some(io::ErrorKind::ConnectionRefused) => "start Redis there or correct the address",
        Some(io::ErrorKind::NotFound) => "start Redis there or correct the path",
        Some(io::ErrorKind::PermissionDenied) => "let this process read and write the socket",
        Some(io::ErrorKind::NotConnected | io::ErrorKind::TimedOut) => {
            "make sure that Redis answers there and no firewall drops the packets, or raise `connect_timeout`"
        }
        _ => "make sure that Redis answers there",
    };
    let remedy = peer.announcement().unwrap_or(remedy);
    ConnectError::Store(ConnectFailure::new(peer, store_error(error), remedy))
}

/// The problem with a server certificate, and its remedy.
#[cfg(feature = "tls")]
fn certificate(peer: &Peer, problem: &rustls::CertificateError) -> (String, &'static str) {
    use rustls::CertificateError as Problem;
    match problem {
        // `BadSignature` if a trusted CA has the same name as the CA that signed the certificate.
        Problem::UnknownIssuer | Problem::BadSignature => (
            "it is signed by no CA that this program trusts".to_owned(),
            "pass the certificate of its CA to `RedisOptions::ca_certificate`",
        ),
        Problem::NotValidForName | Problem::NotValidForNameContext { .. } => (
            problem.to_string(),
            match peer {
                Peer::Node(_) => {
                    "issue it for the announced address as well, or have the nodes announce a name that it is for \
                     (`cluster-announce-hostname` with `cluster-preferred-endpoint-type hostname`)"
                }
                Peer::Primary(_) => {
                    "issue it for the announced address as well, or have the Sentinels announce a name that it is for \
                     (`sentinel announce-hostnames yes`)"
                }
                _ => "connect by a name that it is for, or issue it for this one as well",
            },
        ),
        Problem::Expired | Problem::ExpiredContext { .. } => (problem.to_string(), "renew it"),
        Problem::NotValidYet | Problem::NotValidYetContext { .. } => {
            (problem.to_string(), "set the clock of this machine, or wait")
        }
        Problem::Other(error) if format!("{error:?}").contains("CaUsedAsEndEntity") => (
            "it is a CA certificate (`CA:TRUE`), which a server must not use".to_owned(),
            "issue one with `basicConstraints=CA:FALSE` for the server, self-signed or signed by that CA",
        ),
        Problem::InvalidPurpose | Problem::InvalidPurposeContext { .. } => {
            (problem.to_string(), "issue one with the extended key usage `serverAuth`")
        }
        _ => (problem.to_string(), "issue a new one"),
    }
}
