use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::error::{BoxError, ConfigError, StoreError};

/// Why a request was turned away by an idempotency layer, or cancelled.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The request has no key, and the layer is told to [reject](super::OnMissingKey::Reject) such requests.
    MissingKey,
    /// What the request has for a key is none.
    InvalidKey(InvalidKey),
    /// It does not say who is calling.
    MissingScope,
    /// Another request was sent with the same key.
    Mismatch,
    /// The same request is being served.
    InFlight {
        /// How long to wait before asking again.
        retry_after: Duration,
    },
    /// The same request was begun, and what came of it is not known.
    OutcomeUnknown {
        /// How many attempts there were.
        attempt: u32,
    },
    /// The same request was served, and its answer was not kept.
    NotKept {
        /// What is known of the answer, as the layer wrote it: the status.
        status: u16,
    },
    /// The body of the request broke off, so it is not known whether it is the same.
    Unreadable,
    /// The body of the request [stood still](crate::http::IdempotencyLayer::body_timeout) for too long while it was compared, so it is not known whether
    /// it is the same.
    BodyTimeout,
    /// The body of the request is larger than may be.
    TooLarge {
        /// Whether that was found out while a handler was reading it, which may have had effects.
        has_begun: bool,
    },
    /// The request was cancelled on the way: it has taken too long, or its lease was lost. It may have had effects.
    Cancelled,
    /// Too many requests are being served.
    Full,
    /// Its caller has as much as one caller may have.
    ScopeFull {
        /// Of what.
        bound: ScopeBound,
        /// How long to wait before asking again.
        retry_after: Duration,
    },
    /// A setting cannot work; nothing was asked of the store.
    Config(ConfigError),
    /// The store has failed.
    Store(StoreError),
}

#[cfg(feature = "http")]
impl Rejection {
    /// Whether a handler was dropped half way for it, so that nobody knows what it has done.
    pub(crate) const fn is_half_done(&self) -> bool {
        matches!(self, Self::TooLarge { has_begun: true } | Self::Cancelled)
    }
}

/// What one caller has too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScopeBound {
    /// Handlers at work: see [`max_running_per_scope`](crate::http::IdempotencyLayer::max_running_per_scope).
    Running,
    /// Records in the store: see [`max_records_per_scope`](crate::http::IdempotencyLayer::max_records_per_scope).
    Records,
}

/// What is wrong with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidKey {
    /// There is nothing in it.
    Empty,
    /// It has more than 255 characters.
    TooLong,
    /// It is neither a quoted string nor a token of visible ASCII characters.
    Malformed,
    /// There is more than one.
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
            Self::MissingScope => f.write_str("the request does not say who is calling"),
            Self::Mismatch => f.write_str("the idempotency key was used for another request"),
            Self::InFlight { .. } => f.write_str("the same request is being served"),
            Self::OutcomeUnknown { .. } => {
                f.write_str("the same request was begun before, and what came of it is not known")
            }
            Self::NotKept { .. } => f.write_str("the same request was served before, and its answer was not kept"),
            Self::Unreadable => f.write_str("the body of the request could not be read"),
            Self::BodyTimeout => f.write_str("the body of the request did not arrive in time"),
            Self::TooLarge { .. } => f.write_str("the body of the request is too large"),
            Self::Cancelled => f.write_str("the request was cancelled on the way and may have had effects"),
            Self::Full => f.write_str("too many requests are being served"),
            Self::ScopeFull { bound: ScopeBound::Running, .. } => {
                f.write_str("too many requests of this caller are being served")
            }
            Self::ScopeFull { bound: ScopeBound::Records, .. } => {
                f.write_str("too many idempotency keys of this caller are kept")
            }
            Self::Config(_) => f.write_str("the idempotency of requests is set up wrongly"),
            Self::Store(_) => f.write_str("the store of idempotency failed"),
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
