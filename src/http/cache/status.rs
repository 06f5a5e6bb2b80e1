//! The fields `Cache-Status` (RFC 9211) and `Age` (RFC 9111, section 5.1).

use std::fmt::Write as _;
use std::time::Duration;

use ::http::header::AGE;
use ::http::{HeaderMap, HeaderName, HeaderValue};

/// How the cache has handled a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheStatus {
    /// Served from the cache. It is stale if its age is larger than `fresh_for`.
    Hit { age: Duration, fresh_for: Duration },
    /// The cache does not serve such requests.
    Bypass,
    /// The method is not GET or HEAD.
    Method,
    /// There was no response.
    Miss,
    /// The response was no longer fresh.
    Stale,
    /// Another request has loaded the response.
    Collapsed,
}

const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

impl CacheStatus {
    /// Adds the field. Caches nearer to the client come later in it.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        let mut value = String::from("Tollgate; ");
        match self {
            Self::Hit { age, fresh_for } => {
                let left = fresh_for.as_secs().cast_signed().saturating_sub(age.as_secs().cast_signed());
                // Writing to a String cannot fail.
                let _ = write!(value, "hit; ttl={left}");
            }
            Self::Bypass => value.push_str("fwd=bypass"),
            Self::Method => value.push_str("fwd=method"),
            Self::Miss => value.push_str("fwd=miss"),
            Self::Stale => value.push_str("fwd=stale"),
            Self::Collapsed => value.push_str("fwd=miss; collapsed"),
        }
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.append(CACHE_STATUS, value);
        }
    }
}

/// Writes the age of a stored response.
pub(super) fn write_age(age: Duration, headers: &mut HeaderMap) {
    headers.insert(AGE, age.as_secs().into());
}
