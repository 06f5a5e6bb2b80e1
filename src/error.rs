use std::error::Error;
use std::fmt;
use std::io;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use crate::lock::Reach;

mod connect;

pub use self::connect::{ConnectError, ConnectFailure};

/// Any error, boxed: what a service answers with when errors of several kinds can reach its caller.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// An error and what it was made of, the outermost first.
pub(crate) fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        // What it was made of is not its source.
        Some(inner) => Some(inner),
        None => error.source(),
    })
}

/// Somebody else is at what was asked for, for so long at the most, as an error of its own beneath the one that says it: whoever wraps that one and
/// passes on its source hides it, but not this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContentionHint(pub(crate) Duration);

impl ContentionHint {
    /// Nobody knows for how long.
    pub(crate) const FOR_LONG: &Self = &Self(Duration::MAX);
}

impl fmt::Display for ContentionHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this may be over at any time")
    }
}

impl Error for ContentionHint {}

/// The backend failed, so there is no decision.
///
/// This is never a "no": a request over its limit is a [`Decision`](crate::rate_limit::Decision), and the two cannot be
/// confused. The type is opaque. The predicates are stable; the wording and the type behind
/// [`source`](Error::source) are not.
#[derive(Clone)]
pub struct StoreError {
    kind: Kind,
    // Whether what was asked has not happened for sure.
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
    /// No answer came within the deadline. What was asked may still have happened.
    #[must_use]
    pub fn timeout() -> Self {
        Self { kind: Kind::Timeout, is_refusal: false, source: None }
    }

    /// The same, and which limit it was.
    pub(crate) fn late(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Timeout, source)
    }

    /// Nobody is there to answer, or whoever is there cannot serve at the moment.
    pub fn unavailable(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Unavailable, source)
    }

    /// The same failure, found out before anything was asked.
    #[cfg(feature = "redis")]
    pub(crate) fn unasked(self) -> Self {
        match self.kind {
            Kind::Timeout | Kind::Unavailable => Self { kind: Kind::Unavailable, is_refusal: true, ..self },
            _ => self,
        }
    }

    /// The same where a part of what was asked may have happened: in another store, in an earlier call, or before the script failed.
    pub(crate) fn in_doubt(self) -> Self {
        Self { is_refusal: false, ..self }
    }

    /// The backend wants other credentials, or the credentials do not allow what was asked.
    pub fn unauthorized(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::Unauthorized, source)
    }

    /// The same, found out when a part of what was asked may have been done.
    #[cfg(feature = "redis")]
    pub(crate) fn unauthorized_in_part(source: impl Into<BoxError>) -> Self {
        Self::unauthorized(source).in_doubt()
    }

    /// The backend has no room for what had to be written.
    pub fn out_of_memory(source: impl Into<BoxError>) -> Self {
        Self::with_source(Kind::OutOfMemory, source)
    }

    /// The key holds something that this version of Tollgate did not write and cannot read.
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

    /// Whether no answer came in time. What was asked may have happened all the same.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.kind == Kind::Timeout
    }

    /// Whether the backend is down, unreachable, still loading or not accepting writes; it is worth trying again later.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.kind == Kind::Unavailable
    }

    /// Whether the credentials are wrong, missing, or allow too little. It stays so until somebody changes them.
    #[must_use]
    pub fn is_unauthorized(&self) -> bool {
        self.kind == Kind::Unauthorized
    }

    /// Whether the backend has no memory left for writes.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == Kind::OutOfMemory
    }

    /// Whether the key holds data of somebody else, or of a version of Tollgate that this one cannot read.
    #[must_use]
    pub fn is_foreign_data(&self) -> bool {
        self.kind == Kind::ForeignData
    }

    /// Whether the backend was not asked, or has said no, so that what was asked has not happened.
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
            Kind::ForeignData => "the store holds data that is not ours under this key",
            Kind::Other => "the store failed",
        })
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// A setting cannot work, found before anything was asked of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The window of a quota is shorter than the shortest or longer than the longest that can be counted.
    WindowOutOfRange {
        /// The window that was asked for.
        window: Duration,
        /// The shortest window there is.
        min: Duration,
        /// The longest window there is.
        max: Duration,
    },
    /// A sliding log remembers every request of its window, so its quota is capped.
    SlidingLogTooLong {
        /// The quota that was asked for.
        limit: u32,
        /// The largest quota that a sliding log takes.
        max: u32,
    },
    /// A token bucket of this size would take longer to fill than the longest window there is.
    BurstOutOfRange {
        /// The size that was asked for.
        burst: u32,
        /// What flows in...
        limit: u32,
        /// ...in this time.
        window: Duration,
    },
    /// A token bucket of no size would admit nothing, whatever flows in.
    ZeroBurst,
    /// So few bits of an IPv6 address would count whole countries as one client, or there are not as many.
    Ipv6PrefixOutOfRange {
        /// The number of bits that was asked for.
        bits: u8,
        /// The smallest number of bits.
        min: u8,
        /// The largest number of bits.
        max: u8,
    },
    /// The URL of a backend cannot be understood. The URL itself is left out, since it may hold a password.
    InvalidUrl {
        /// What is wrong with it.
        reason: String,
    },
    /// No backend answers to the scheme of this URL.
    UnknownScheme {
        /// The part before the first colon.
        scheme: String,
    },
    /// The backend exists, but the crate was built without it.
    FeatureMissing {
        /// The Cargo feature to turn on.
        feature: &'static str,
    },
    /// A certificate or a private key is not one that can be used.
    InvalidCertificate {
        /// What is wrong with it.
        reason: String,
    },
    /// A backend needs a connection to each server, and opens all of them at the start.
    ConnectionsOutOfRange {
        /// The number that was asked for.
        connections: u32,
        /// The largest there is.
        max: u32,
    },
    /// A time of nothing: for an answer, or to hold anything.
    ZeroTimeout {
        /// Which setting it is, by the name of its method.
        setting: &'static str,
    },
    /// A lease would be over before it can be used, or would outlive its holder for longer than anybody wants.
    TtlOutOfRange {
        /// The time to live that was asked for.
        ttl: Duration,
        /// The shortest there is.
        min: Duration,
        /// The longest there is.
        max: Duration,
    },
    /// A semaphore with no permits lets nobody in, and one with too many is no bound.
    PermitsOutOfRange {
        /// The number that was asked for.
        permits: u32,
        /// The largest there is.
        max: u32,
    },
    /// Of so few stores more than half are no fewer than all.
    TooFewStores {
        /// How many there are.
        stores: usize,
        /// How many it takes at least.
        min: usize,
    },
    /// Stores that agree by the majority can lend something to one at a time, and keep no line: a
    /// [`Redlock`](crate::lock::Redlock) has no fair locks, no locks for readers and no semaphores.
    NotByQuorum,
    /// A job would be due later than can be counted, or a unique key be held for longer.
    DelayOutOfRange {
        /// The delay, or the time of the unique key, that was asked for.
        delay: Duration,
        /// The longest there is.
        max: Duration,
    },
    /// A job that is called nothing cannot be told from others.
    EmptyJobId,
    /// A push was made by another queue than the one that it was given to, or on another backend that is no clone.
    OtherQueue {
        /// What the queue is called that it was given to.
        queue: String,
        /// What the queue is called that has made it.
        other: String,
    },
    /// A schedule cannot be understood.
    InvalidSchedule {
        /// What is wrong with it.
        reason: String,
    },
    /// Locks hold among fewer than they are meant to.
    ScopeTooSmall {
        /// Among whom they are meant to hold.
        needed: Reach,
        /// Among whom they do.
        has: Reach,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WindowOutOfRange { window, min, max } => {
                write!(f, "a window of {window:?} is not between {min:?} and {} days", max.as_secs() / 86_400)
            }
            Self::SlidingLogTooLong { limit, max } => write!(
                f,
                "a sliding log remembers every request, so its quota is at most {max}, not {limit}; use a fixed window"
            ),
            Self::BurstOutOfRange { burst, limit, window } => {
                write!(f, "a bucket of {burst} takes longer than 3660 days to fill at {limit} per {window:?}")
            }
            Self::ZeroBurst => f.write_str("a burst of 0 admits nothing; if that is meant, say a quota of 0"),
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
            Self::TooFewStores { stores, min } => write!(f, "{stores} stores are too few: it takes {min}"),
            Self::NotByQuorum => f.write_str("stores that agree by the majority keep no line and no permits"),
            Self::DelayOutOfRange { delay, max } => {
                let days = max.as_secs() / 86_400;
                write!(f, "a delay, or the time of a unique key, of {delay:?} is longer than {max:?} ({days} days)")
            }
            Self::EmptyJobId => f.write_str("the id of a job is empty"),
            Self::OtherQueue { queue, other } => {
                write!(
                    f,
                    "a push of the queue `{other}` cannot be made by the queue `{queue}`, which is another one, on another backend or split otherwise"
                )
            }
            Self::InvalidSchedule { reason } => write!(f, "the schedule is not valid: {reason}"),
            Self::ScopeTooSmall { needed, has } => {
                write!(f, "what this backend keeps holds within {has}, and is meant to hold within {needed}")
            }
        }
    }
}

impl Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_cross_threads_and_fit_in_a_box() {
        fn portable<T: Error + Send + Sync + 'static>() {}
        portable::<StoreError>();
        portable::<ConfigError>();
        portable::<ConnectError>();
    }

    #[test]
    fn what_may_have_happened_in_part_is_no_refusal() {
        for error in [StoreError::unauthorized(""), StoreError::out_of_memory(""), StoreError::foreign_data("")] {
            let kind = error.kind;
            assert!(error.is_refusal());
            let error = error.in_doubt();
            assert!(!error.is_refusal() && error.kind == kind, "{error:?}");
        }
    }

    #[test]
    fn each_level_prints_itself_only() {
        let error = StoreError::unavailable("connection refused");
        assert_eq!(error.to_string(), "the store is unavailable");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
    }
}
