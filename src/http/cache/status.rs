//! The fields `Cache-Status` (RFC 9211) and `Age` (RFC 9111, section 5.1).

use std::time::Duration;

use ::http::header::{AGE, Entry};
use ::http::{HeaderMap, HeaderName, HeaderValue};
use smallvec::SmallVec;

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
        let value = self.value();
        match headers.entry(CACHE_STATUS) {
            Entry::Vacant(field) => {
                field.insert(value);
            }
            Entry::Occupied(mut field) if field.get().is_empty() => {
                field.insert(value);
            }
            Entry::Occupied(mut field) => field.append(value),
        }
    }

    fn value(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Hit { age, fresh_for } => {
                let left = fresh_for.as_secs().cast_signed().saturating_sub(age.as_secs().cast_signed());
                let (mut digits, mut text) =
                    (itoa::Buffer::new(), SmallVec::<[u8; 40]>::from_slice(b"Tollgate; hit; ttl="));
                text.extend_from_slice(digits.format(left).as_bytes());
                return HeaderValue::from_bytes(&text).expect("digits are valid in a header field");
            }
            Self::Bypass => "Tollgate; fwd=bypass",
            Self::Method => "Tollgate; fwd=method",
            Self::Miss => "Tollgate; fwd=miss",
            Self::Stale => "Tollgate; fwd=stale",
            Self::Collapsed => "Tollgate; fwd=miss; collapsed",
        })
    }
}

/// Makes room for the fields of a hit, which replace these.
pub(super) fn insert_placeholders(headers: &mut HeaderMap) {
    write_age(Duration::ZERO, headers);
    headers.entry(CACHE_STATUS).or_insert(HeaderValue::from_static(""));
}

/// Writes the age of a stored response.
pub(super) fn write_age(age: Duration, headers: &mut HeaderMap) {
    headers.insert(AGE, age.as_secs().into());
}
