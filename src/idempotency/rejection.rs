use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::error::{BoxError, ConfigError, StoreError};

/// Why an idempotency layer rejected or cancelled a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The request has no key, and the layer [rejects](crate::OnMissingKey::Reject) such requests.
    MissingKey,
    /// The key of the request is malformed.
    InvalidKey(InvalidKey),
    /// The request does not identify its caller.
    MissingScope,
    /// The key was used before, for a request with other contents.
    Mismatch,
    /// The same request is in flight.
    InFlight {
        /// How long to wait before a retry.
        retry_after: Duration,
    },
    /// The same request was begun, and its outcome is unknown.
    OutcomeUnknown {
        /// Number of attempts.
        attempt: u32,
    },
    /// The same request was completed, and its response was not stored.
    NotStored {
        /// The stored part of the response: its status.
        status: u16,
    },
    /// The request body broke off, so its fingerprint is unknown.
    Unreadable,
    /// The request body [stalled](crate::http::IdempotencyLayer::body_timeout) while it was compared, so its fingerprint is
    /// unknown.
    BodyTimeout,
    /// The request body is too large.
    TooLarge {
        /// Whether a handler was reading it, and may have had effects.
        has_begun: bool,
    },
    /// The request was cancelled during its execution: it took too long, or lost its lease. It may have had effects.
    Cancelled,
    /// Too many requests are running.
    Full,
    /// The caller has reached its limit.
    ScopeFull {
        /// Which limit.
        bound: ScopeBound,
        /// How long to wait before a retry.
        retry_after: Duration,
    },
    /// A setting is invalid; the store was not called.
    Config(ConfigError),
    /// The store failed.
    Store(StoreError),
}

#[cfg(feature = "http")]
impl Rejection {
    /// Whether a handler was dropped during its execution, so that the outcome is unknown.
    pub(crate) const fn may_have_run(&self) -> bool {
        matches!(self, Self::TooLarge { has_begun: true } | Self::Cancelled)
    }
}

/// The limit that a caller has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScopeBound {
    /// Running handlers: see [`max_running_per_scope`](crate::http::IdempotencyLayer::max_running_per_scope).
    Running,
    /// Records in the store: see [`max_records_per_scope`](crate::http::IdempotencyLayer::max_records_per_scope).
    Records,
}

/// The defect of a malformed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidKey {
    /// It is empty.
    Empty,
    /// It has more than 255 characters.
    TooLong,
    /// It is neither a quoted string nor a token of visible ASCII characters.
    Malformed,
    /// There are several.
    Several,
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the idempotency key is empty",
            Self::TooLong => "the idempotency key has more than 255 characters",
            Self::Malformed => "the idempotency key is neither a quoted string nor a token",
            Self::Several => "the request carries more than one idempotency key",
        })
    }
}

impl Error for InvalidKey {}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingKey => f.write_str("the request carries no idempotency key"),
            Self::InvalidKey(invalid) => fmt::Display::fmt(invalid, f),
            Self::MissingScope => f.write_str("the request does not identify its caller"),
            Self::Mismatch => f.write_str("the idempotency key was used for another request"),
            Self::InFlight { .. } => f.write_str("the same request is being served"),
            Self::OutcomeUnknown { .. } => f.write_str("the same request was begun before, and its outcome is unknown"),
            Self::NotStored { .. } => {
                f.write_str("the same request was served before, and its response was not stored")
            }
            Self::Unreadable => f.write_str("the body of the request could not be read"),
            Self::BodyTimeout => f.write_str("the body of the request did not arrive in time"),
            Self::TooLarge { .. } => f.write_str("the body of the request is too large"),
            Self::Cancelled => f.write_str("the request was cancelled while it ran and may have had effects"),
            Self::Full => f.write_str("too many requests are being served"),
            Self::ScopeFull { bound: ScopeBound::Running, .. } => {
                f.write_str("too many requests of this caller are being served")
            }
            Self::ScopeFull { bound: ScopeBound::Records, .. } => {
                f.write_str("too many idempotency keys of this caller are kept")
            }
            Self::Config(_) => f.write_str("the idempotency settings are invalid"),
            Self::Store(_) => f.write_str("the idempotency store failed"),
        }
    }
}

impl Error for Rejection {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl From<StoreError> for Rejection {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

const _: () = {
    const fn fits<T: Into<BoxError>>() {}
    fits::<Rejection>();
    fits::<InvalidKey>();
};
