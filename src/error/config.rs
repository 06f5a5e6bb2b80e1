//! Settings that cannot work.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::reach::Reach;

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
        /// The units that are refilled per `window`.
        limit: u64,
        /// The time in which `limit` units are refilled.
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
    /// A [`Redlock`](crate::lock::Redlock) on so few stores would need all of them for a majority.
    TooFewStores {
        /// The given number of stores.
        stores: usize,
        /// The smallest number of stores.
        min: usize,
    },
    /// A [`Redlock`](crate::lock::Redlock) supports neither fair locks nor read/write locks nor semaphores: a quorum of stores can only
    /// grant exclusive leases, and keeps no wait queue.
    NotByQuorum,
    /// An entry of a cache has too many tags.
    TooManyTags {
        /// The given number.
        tags: usize,
        /// The largest number.
        max: usize,
    },
    /// A job would be due too late, or a unique key would be held for too long.
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

impl ConfigError {
    #[cfg(feature = "redis")]
    pub(crate) fn invalid_url(reason: impl Into<String>) -> Self {
        Self::InvalidUrl { reason: reason.into() }
    }

    pub(crate) fn no_scheme() -> Self {
        Self::InvalidUrl { reason: "it has no scheme such as `memory:` or `redis:`".into() }
    }

    /// The error for the text before the first colon of a URL. Text that cannot be a scheme may be a password, so the error has none of it.
    pub(crate) fn unknown_scheme(text: &str) -> Self {
        let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        if text.is_empty() || !text.bytes().all(is_scheme) {
            return Self::no_scheme();
        }
        Self::UnknownScheme { scheme: text.chars().take(32).collect() }
    }
}

// Here, so that the module of `Reach` does not depend on `ConfigError`, which contains a `Reach`.
impl Reach {
    /// An error if this is less than `needed`.
    pub(crate) fn require(self, needed: Self) -> Result<(), ConfigError> {
        if self < needed { Err(ConfigError::ReachTooSmall { needed, has: self }) } else { Ok(()) }
    }
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
            Self::TooManyTags { tags, max } => {
                write!(f, "an entry with {tags} tags has too many: at most {max} are allowed")
            }
            Self::TooFewStores { stores, min } => write!(f, "{stores} stores are too few: at least {min} are required"),
            Self::NotByQuorum => f.write_str("a Redlock has no fair locks, read/write locks or semaphores"),
            Self::DelayOutOfRange { delay, max } => {
                let days = max.as_secs() / 86_400;
                write!(f, "a delay or unique-key time of {delay:?} is longer than {max:?} ({days} days)")
            }
            Self::EmptyJobId => f.write_str("the id of the job is empty"),
            Self::OtherQueue { queue, other } => write!(
                f,
                "a push of the queue `{other}` cannot be made by the queue `{queue}`: they differ in name, backend or number of partitions"
            ),
            Self::InvalidSchedule { reason } => write!(f, "the schedule is not valid: {reason}"),
            Self::ReachTooSmall { needed, has } => {
                write!(f, "this backend coordinates {has}, but {needed} must be coordinated")
            }
        }
    }
}

impl Error for ConfigError {}
