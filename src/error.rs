use std::error::Error;
use std::fmt;
use std::io;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use crate::reach::Reach;

mod connect;

pub use self::connect::{ConnectError, ConnectFailure};

/// Any boxed error. Services return it when errors of several types can reach their caller.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// An error and its causes, outermost first.
pub(crate) fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        // The inner error of an `io::Error` is not its source.
        Some(inner) => Some(inner),
        None => error.source(),
    })
}

/// A key is in use, for at most this long. It is a separate cause below the public error, so that an error that wraps the public error
/// and forwards only its source still reveals it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContentionHint(pub(crate) Duration);

impl ContentionHint {
    /// For an unknown time.
    pub(crate) const FOR_LONG: &Self = &Self(Duration::MAX);
}

impl fmt::Display for ContentionHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the key may become free at any time")
    }
}

impl Error for ContentionHint {}

/// The backend failed, so there is no decision.
///
/// A `StoreError` never means "denied": a request over its limit gets a [`Decision`](crate::rate_limit::Decision). The type is opaque.
/// Its predicates are stable. Its wording, and the type of its [`source`](Error::source), are not.
#[derive(Clone)]
pub struct StoreError {
    kind: Kind,
    // Whether the call certainly had no effect.
    is_refusal: bool,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Timeout,
    Unavailable,
    Unauthorized,
    OutOfMemory,
    ForeignData,
    Other,
}

impl StoreError {
    /// No reply came within the deadline. The call may have had an effect.
    #[must_use]
    pub fn timeout() -> Self {
        Self { kind: Kind::Timeout, is_refusal: false, source: None }
    }

    /// A timeout, with the limit that was exceeded as its source.
    pub(crate) fn late(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Timeout, source)
    }

    /// The backend is unreachable, or cannot serve now.
    pub fn unavailable(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Unavailable, source)
    }

    /// The same failure, but before the call was sent.
    #[cfg(feature = "redis")]
    pub(crate) fn unasked(self) -> Self {
        match self.kind {
            Kind::Timeout | Kind::Unavailable => Self { kind: Kind::Unavailable, is_refusal: true, ..self },
            _ => self,
        }
    }

    /// The same failure, but part of the call may have had an effect: in another store, in an earlier call, or before the script failed.
    pub(crate) fn in_doubt(self) -> Self {
        Self { is_refusal: false, ..self }
    }

    /// The backend rejects the credentials, or they do not permit the call.
    pub fn unauthorized(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Unauthorized, source)
    }

    /// Like [`unauthorized`](Self::unauthorized), after part of the call may have had an effect.
    #[cfg(feature = "redis")]
    pub(crate) fn unauthorized_in_part(source: impl Into<BoxError>) -> Self {
        Self::unauthorized(source).in_doubt()
    }

    /// The backend has no memory for the write.
    pub fn out_of_memory(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::OutOfMemory, source)
    }

    /// The key holds data that this version of Tollgate did not write and cannot read.
    pub fn foreign_data(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::ForeignData, source)
    }

    /// Any other failure.
    pub fn other(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Other, source)
    }

    fn with_source(kind: Kind, source: impl Into<BoxError>) -> Self {
        let is_refusal = matches!(kind, Kind::Unauthorized | Kind::OutOfMemory | Kind::ForeignData);
        Self { kind, is_refusal, source: Some(Arc::from(source.into())) }
    }

    /// Whether no reply came in time. The call may have had an effect.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.kind == Kind::Timeout
    }

    /// Whether the backend is down, unreachable, still loading or not accepting writes. Retry later.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.kind == Kind::Unavailable
    }

    /// Whether the credentials are wrong, missing or insufficient. Retries fail until an operator changes them.
    #[must_use]
    pub fn is_unauthorized(&self) -> bool {
        self.kind == Kind::Unauthorized
    }

    /// Whether the backend has no memory left for writes.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == Kind::OutOfMemory
    }

    /// Whether the key holds data of another program, or of a version of Tollgate that this one cannot read.
    #[must_use]
    pub fn is_foreign_data(&self) -> bool {
        self.kind == Kind::ForeignData
    }

    /// Whether the call was not sent or was refused, so that it certainly had no effect.
    pub(crate) const fn is_refusal(&self) -> bool {
        self.is_refusal
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError").field("kind", &self.kind).field("source", &self.source).finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Timeout => "the store did not answer in time",
            Kind::Unavailable => "the store is unavailable",
            Kind::Unauthorized => "the store refused the credentials",
            Kind::OutOfMemory => "the store is out of memory",
            Kind::ForeignData => "the key holds data that this version of tollgate cannot read",
            Kind::Other => "the store failed",
        })
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// A setting cannot work. Detected before the first call to a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A quota or a burst is too large to be counted exactly.
    QuotaOutOfRange {
        /// The given units.
        units: u64,
        /// The largest quota and burst.
        max: u64,
    },
    /// The window of a quota is out of range.
    WindowOutOfRange {
        /// The given window.
        window: Duration,
        /// The shortest window.
        min: Duration,
        /// The longest window.
        max: Duration,
    },
    /// A sliding log stores every request of its window, so its quota is limited.
    SlidingLogTooLong {
        /// The given quota.
        limit: u64,
        /// The largest quota of a sliding log.
        max: u64,
    },
    /// A token bucket would take longer to fill than the longest window.
    BurstOutOfRange {
        /// The given size.
        burst: u64,
        /// The refill...
        limit: u64,
        /// ...in this time.
        window: Duration,
    },
    /// A token bucket of size 0 would never allow a request.
    ZeroBurst,
    /// An IPv6 prefix that is too short would count whole countries as one client. More than 128 bits do not exist.
    Ipv6PrefixOutOfRange {
        /// The given number of bits.
        bits: u8,
        /// The smallest number of bits.
        min: u8,
        /// The largest number of bits.
        max: u8,
    },
    /// The URL of a backend is invalid. The error does not contain the URL, which may hold a password.
    InvalidUrl {
        /// Why the URL is invalid.
        reason: String,
    },
    /// No backend has the scheme of this URL.
    UnknownScheme {
        /// The part before the first colon.
        scheme: String,
    },
    /// The crate was built without the feature for this backend.
    FeatureMissing {
        /// The Cargo feature to enable.
        feature: &'static str,
    },
    /// A certificate or a private key cannot be used.
    InvalidCertificate {
        /// Why it cannot be used.
        reason: String,
    },
    /// The number of connections is out of range. A backend needs one to each server, and opens all of them at startup.
    ConnectionsOutOfRange {
        /// The given number.
        connections: u32,
        /// The largest number.
        max: u32,
    },
    /// A timeout, a deadline or a time to live is zero.
    ZeroTimeout {
        /// The name of the setter.
        setting: &'static str,
    },
    /// A lease would expire before it can be used, or would outlive its holder for too long.
    TtlOutOfRange {
        /// The given time to live.
        ttl: Duration,
        /// The shortest time to live.
        min: Duration,
        /// The longest time to live.
        max: Duration,
    },
    /// A semaphore with 0 permits never grants one, and one with too many is no bound.
    PermitsOutOfRange {
        /// The given number.
        permits: u32,
        /// The largest number.
        max: u32,
    },
    /// With so few stores, a majority is all of them.
    TooFewStores {
        /// The given number of stores.
        stores: usize,
        /// The smallest number of stores.
        min: usize,
    },
    /// A [`Redlock`](crate::lock::Redlock) supports neither fair locks nor read/write locks nor semaphores: a quorum of stores can only grant
    /// exclusive leases, and keeps no wait queue.
    NotByQuorum,
    /// A job would be due too late, or a unique key be held for too long.
    DelayOutOfRange {
        /// The given delay, or the given time of the unique key.
        delay: Duration,
        /// The longest delay.
        max: Duration,
    },
    /// The id of a job is empty, so the job cannot be told from others.
    EmptyJobId,
    /// A push of one queue was given to another queue, or to a queue on another backend.
    OtherQueue {
        /// The queue that got the push.
        queue: String,
        /// The queue that created the push.
        other: String,
    },
    /// A schedule is invalid.
    InvalidSchedule {
        /// Why the schedule is invalid.
        reason: String,
    },
    /// The backend coordinates fewer processes than required.
    ReachTooSmall {
        /// The required reach.
        needed: Reach,
        /// The reach of the backend.
        has: Reach,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WindowOutOfRange { window, min, max } => {
                write!(f, "a window of {window:?} is not between {min:?} and {} days", max.as_secs() / 86_400)
            }
            Self::QuotaOutOfRange { units, max } => {
                write!(f, "{units} units cannot be counted exactly; a quota or a burst is at most {max}")
            }
            Self::SlidingLogTooLong { limit, max } => write!(
                f,
                "a sliding log remembers every request, so its quota is at most {max}, not {limit}; use a fixed window"
            ),
            Self::BurstOutOfRange { burst, limit, window } => {
                write!(f, "a bucket of {burst} takes longer than 3660 days to fill at {limit} per {window:?}")
            }
            Self::ZeroBurst => f.write_str("a burst of 0 denies every request; if you want this, set a quota of 0"),
            Self::Ipv6PrefixOutOfRange { bits, min, max } => {
                write!(f, "an IPv6 prefix of {bits} bits is not between {min} and {max}")
            }
            Self::InvalidUrl { reason } => write!(f, "the store URL is not valid: {reason}"),
            Self::UnknownScheme { scheme } => write!(
                f,
                "unknown URL scheme `{scheme}`: expected memory, redis, rediss, valkey, valkeys, unix, redis+unix, redis+sentinel or redis+cluster"
            ),
            Self::FeatureMissing { feature } => {
                write!(f, "this build of tollgate lacks the feature `{feature}` that the store URL needs")
            }
            Self::InvalidCertificate { reason } => {
                write!(f, "a certificate or key for the store cannot be used: {reason}")
            }
            Self::ConnectionsOutOfRange { connections, max } => {
                write!(f, "{connections} connections to each server are not between 1 and {max}")
            }
            Self::ZeroTimeout { setting } => write!(f, "a `{setting}` of zero leaves no time"),
            Self::TtlOutOfRange { ttl, min, max } => {
                write!(f, "a lease of {ttl:?} is not between {min:?} and {} hours", max.as_secs() / 3_600)
            }
            Self::PermitsOutOfRange { permits, max } => {
                write!(f, "a semaphore of {permits} permits is not between 1 and {max}")
            }
            Self::TooFewStores { stores, min } => write!(f, "{stores} stores are too few: at least {min} are required"),
            Self::NotByQuorum => {
                f.write_str("a Redlock supports neither fair locks nor read/write locks nor semaphores")
            }
            Self::DelayOutOfRange { delay, max } => {
                let days = max.as_secs() / 86_400;
                write!(f, "a delay, or the time of a unique key, of {delay:?} is longer than {max:?} ({days} days)")
            }
            Self::EmptyJobId => f.write_str("the id of the job is empty"),
            Self::OtherQueue { queue, other } => {
                write!(
                    f,
                    "a push of the queue `{other}` cannot be made by the queue `{queue}`: they differ in name, backend or number of partitions"
                )
            }
            Self::InvalidSchedule { reason } => write!(f, "the schedule is not valid: {reason}"),
            Self::ReachTooSmall { needed, has } => {
                write!(f, "this backend coordinates {has}, but {needed} must be coordinated")
            }
        }
    }
}

impl Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_send_and_sync() {
        fn is_portable<T: Error + Send + Sync + 'static>() {}
        is_portable::<StoreError>();
        is_portable::<ConfigError>();
        is_portable::<ConnectError>();
    }

    #[test]
    fn error_in_doubt_is_no_refusal() {
        for error in [StoreError::unauthorized(""), StoreError::out_of_memory(""), StoreError::foreign_data("")] {
            let kind = error.kind;
            assert!(error.is_refusal());
            let error = error.in_doubt();
            assert!(!error.is_refusal() && error.kind == kind, "{error:?}");
        }
    }

    #[test]
    fn each_level_displays_only_itself() {
        let error = StoreError::unavailable("connection refused");
        assert_eq!(error.to_string(), "the store is unavailable");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
    }
}
