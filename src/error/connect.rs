use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use super::cause::causes;
use super::config::ConfigError;
use super::store::StoreError;

/// Connecting to a backend failed.
///
/// `Display` names the server and the remedy, and [`source`](Error::source) is the cause. `Debug` prints both as one sentence,
/// because `main` prints its error with `Debug`:
///
/// ```text
/// Error: cannot connect to redis at 127.0.0.1:6379: connection refused; start Redis there or correct the address
/// ```
#[non_exhaustive]
pub enum ConnectError {
    /// The URL or the options cannot work. No server was contacted.
    Config(ConfigError),
    /// No server replies, or the server cannot serve now. Retry later.
    Store(ConnectFailure),
    /// The user name or the password is wrong, or a login is required.
    Credentials(ConnectFailure),
    /// The user lacks required permissions.
    Permissions(ConnectFailure),
    /// The certificate of the server is signed by no trusted authority, not for this host, or out of date.
    Certificate(ConnectFailure),
    /// The server requires a client certificate, or another one.
    ClientCertificate(ConnectFailure),
    /// TLS failed for another reason. For example, only one side speaks TLS.
    Tls(ConnectFailure),
    /// The server cannot be used: it is too old, of another kind, or lacks the database or the service of the URL.
    Unsupported(ConnectFailure),
}

impl ConnectError {
    const fn failure(&self) -> Option<&ConnectFailure> {
        match self {
            Self::Config(_) => None,
            Self::Store(failure)
            | Self::Credentials(failure)
            | Self::Permissions(failure)
            | Self::Certificate(failure)
            | Self::ClientCertificate(failure)
            | Self::Tls(failure)
            | Self::Unsupported(failure) => Some(failure),
        }
    }

    /// Writes what failed, and the server.
    fn headline(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(_) => f.write_str("the settings of the store cannot work"),
            Self::Store(failure) => write!(f, "cannot connect to {}", failure.server),
            Self::Credentials(failure) => write!(f, "{} does not accept the user name or the password", failure.server),
            Self::Permissions(failure) => write!(f, "{} denies the user a permission that is needed", failure.server),
            Self::Certificate(failure) => write!(f, "the certificate of {} cannot be trusted", failure.server),
            Self::ClientCertificate(failure) => {
                write!(f, "{} demands a client certificate that it trusts", failure.server)
            }
            Self::Tls(failure) => write!(f, "cannot agree on encryption with {}", failure.server),
            Self::Unsupported(failure) => write!(f, "cannot use {}", failure.server),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.headline(f)?;
        self.failure().map_or(Ok(()), |failure| write!(f, "; {}", failure.remedy))
    }
}

impl fmt::Debug for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.headline(f)?;
        for cause in self.source().into_iter().flat_map(causes) {
            write!(f, ": {cause}")?;
        }
        self.failure().map_or(Ok(()), |failure| write!(f, "; {}", failure.remedy))
    }
}

impl Error for ConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            // Skip the store error itself, since its text repeats the variant.
            _ => self.failure()?.error.source(),
        }
    }
}

impl From<ConfigError> for ConnectError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

/// A failure to connect: the server, the cause and the remedy.
#[derive(Clone)]
pub struct ConnectFailure {
    server: Cow<'static, str>,
    remedy: Cow<'static, str>,
    error: StoreError,
}

impl ConnectFailure {
    #[cfg(feature = "redis")]
    pub(crate) fn new(server: &impl fmt::Display, error: StoreError, remedy: impl Into<Cow<'static, str>>) -> Self {
        Self { server: server.to_string().into(), remedy: remedy.into(), error }
    }

    /// The server, by its role and address: `redis at 127.0.0.1:6379`. Without user and password.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// How to fix it.
    #[must_use]
    pub fn remedy(&self) -> &str {
        &self.remedy
    }

    /// The error that a store call would return. Its [`source`](Error::source) is the cause.
    #[must_use]
    pub const fn error(&self) -> &StoreError {
        &self.error
    }
}

impl fmt::Debug for ConnectFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, remedy, error } = self;
        f.debug_struct("ConnectFailure").field("server", server).field("remedy", remedy).field("error", error).finish()
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;

    #[test]
    fn debug_prints_the_chain_as_one_sentence() {
        let cause = StoreError::unavailable("connection refused");
        let failure = ConnectFailure::new(&"redis at 10.0.0.1:6379", cause, "start Redis there");
        let error = ConnectError::Store(failure);
        assert_eq!(error.to_string(), "cannot connect to redis at 10.0.0.1:6379; start Redis there");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
        let sentence = "cannot connect to redis at 10.0.0.1:6379: connection refused; start Redis there";
        assert_eq!(format!("{error:?}"), sentence);
        let error = ConnectError::from(ConfigError::ZeroTimeout { setting: "deadline" });
        assert_eq!(format!("{error:?}"), "the settings of the store cannot work: a `deadline` of zero leaves no time");
    }
}
