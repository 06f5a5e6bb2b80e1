//! Which responses are stored, and for how long: a strict subset of RFC 9111 for a shared cache, with RFC 5861. Calls no store and reads no
//! body.

use std::time::{Duration, SystemTime};

use ::http::header::{AGE, CONTENT_TYPE, DATE, EXPIRES, SET_COOKIE};
use ::http::{HeaderMap, HeaderValue, StatusCode};

use super::cache_control::{CacheControl, seconds};
use super::vary::Vary;

/// What the cache does with a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It may be stored, and shared with waiters.
    Store { times: Times, vary: Vary },
    /// It is for its own client only. For the duration `mark`, each further request calls the inner service without waiting.
    Uncached { mark: Duration },
    /// The inner service has failed. The response is for its own client only, and for a while the inner service is not called.
    Failed,
}

/// How long a stored response may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    /// How old it was when it was stored.
    pub(super) initial_age: Duration,
    /// How long it is fresh from then on. More than zero.
    pub(super) fresh_for: Duration,
    /// How long after the end of its freshness it is served while it is loaded again.
    pub(super) while_revalidate: Duration,
    /// How long after the end of its freshness it is served if the inner service fails.
    pub(super) if_error: Duration,
}

impl Times {
    /// How long it is kept after it was fresh.
    pub(super) fn stale_for(&self) -> Duration {
        self.while_revalidate.max(self.if_error)
    }
}

/// The statuses of responses that are stored. RFC 9110, section 15.1, also lists 206, 300, 405, 414 and 501. 206 needs ranges. A client
/// could make the cache serve a provoked 405 or 414 to other clients.
const STORED: [StatusCode; 7] = [
    StatusCode::OK,
    StatusCode::NON_AUTHORITATIVE_INFORMATION,
    StatusCode::NO_CONTENT,
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::PERMANENT_REDIRECT,
    StatusCode::NOT_FOUND,
    StatusCode::GONE,
];
/// The further statuses of responses that are stored if the response states its lifetime.
const STORED_IF_EXPLICIT: [StatusCode; 2] = [StatusCode::FOUND, StatusCode::TEMPORARY_REDIRECT];
/// The statuses that are failures (RFC 5861, section 4).
const FAILED: [StatusCode; 4] = [
    StatusCode::INTERNAL_SERVER_ERROR,
    StatusCode::BAD_GATEWAY,
    StatusCode::SERVICE_UNAVAILABLE,
    StatusCode::GATEWAY_TIMEOUT,
];

/// After a response that must not be stored, requests do not wait for each other for this time.
pub(super) const UNCACHED_FOR: Duration = Duration::from_secs(10);
/// Replaces `UNCACHED_FOR` if the reason may be a property of this one request, such as a blocked address.
pub(super) const UNCACHED_BRIEFLY_FOR: Duration = Duration::from_secs(1);

/// Whether a status is a failure of the inner service. Others, such as 501, are responses like any other.
pub(super) fn is_failure(status: StatusCode) -> bool {
    FAILED.contains(&status)
}

/// Decides about a response to a GET. `default` is the lifetime of a response that states none.
pub(super) fn judge(status: StatusCode, headers: &HeaderMap, default: Option<Duration>, now: SystemTime) -> Verdict {
    if is_failure(status) {
        return Verdict::Failed;
    }
    let is_refused = status.is_client_error() && !STORED.contains(&status);
    let uncached = Verdict::Uncached { mark: if is_refused { UNCACHED_BRIEFLY_FOR } else { UNCACHED_FOR } };
    let control = CacheControl::of(headers);
    let is_for_one = control.no_store || control.no_cache || control.private || headers.contains_key(SET_COOKIE);
    if is_for_one || is_endless(headers) {
        return uncached;
    }
    let Some(vary) = Vary::of(headers) else { return uncached };
    let lifetime = match explicit_lifetime(&control, headers, now) {
        Some(lifetime) if STORED.contains(&status) || STORED_IF_EXPLICIT.contains(&status) => lifetime,
        None if STORED.contains(&status) => default.unwrap_or_default(),
        _ => return uncached,
    };
    let initial_age = age(headers, now);
    let fresh_for = lifetime.saturating_sub(initial_age);
    if fresh_for.is_zero() {
        return uncached;
    }
    // RFC 9111, section 4.2.4: these directives prohibit stale responses.
    let never_stale = control.must_revalidate || control.s_maxage.is_some();
    let stale = |time: Option<Duration>| time.filter(|_| !never_stale).unwrap_or_default();
    let times = Times {
        initial_age,
        fresh_for,
        while_revalidate: stale(control.stale_while_revalidate),
        if_error: stale(control.stale_if_error),
    };
    Verdict::Store { times, vary }
}

/// The lifetime that the response states, counted from its creation (RFC 9111, section 4.2.1).
fn explicit_lifetime(control: &CacheControl, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    if let Some(lifetime) = control.s_maxage.or(control.max_age) {
        return Some(lifetime);
    }
    let mut expires = headers.get_all(EXPIRES).iter();
    let first = expires.next()?;
    // A repeated or invalid field means that the response has expired (section 5.3).
    let expires = date(first).filter(|_| expires.next().is_none());
    let created = headers.get(DATE).and_then(date).unwrap_or(now);
    Some(expires.and_then(|expires| expires.duration_since(created).ok()).unwrap_or_default())
}

/// The age of a response that has just arrived (RFC 9111, section 4.2.3). An age that cannot be read counts as the largest.
fn age(headers: &HeaderMap, now: SystemTime) -> Duration {
    let apparent = headers.get(DATE).and_then(date).and_then(|date| now.duration_since(date).ok());
    let stated = headers.get_all(AGE).iter().map(|age| age.to_str().ok().and_then(seconds).unwrap_or(Duration::MAX));
    stated.chain(apparent).max().unwrap_or_default()
}

pub(super) fn date(value: &HeaderValue) -> Option<SystemTime> {
    httpdate::parse_http_date(value.to_str().ok()?).ok()
}

/// Whether the body is a stream of events, which does not end.
fn is_endless(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).map_or(b"".as_slice(), HeaderValue::as_bytes);
    content_type.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use ::http::HeaderName;

    use super::*;

    const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn judged(status: u16, default: u64, fields: &[(&'static str, &'static str)]) -> Verdict {
        let field = |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let mut headers = HeaderMap::new();
        for (name, value) in fields.iter().map(field) {
            headers.append(name, value);
        }
        let default = (default > 0).then(|| Duration::from_secs(default));
        judge(StatusCode::from_u16(status).unwrap(), &headers, default, httpdate::parse_http_date(NOW).unwrap())
    }

    /// The seconds for which a response is fresh, and stale while revalidated and if an error occurs. `None` if it is not stored.
    fn times(status: u16, default: u64, fields: &[(&'static str, &'static str)]) -> Option<[u64; 3]> {
        match judged(status, default, fields) {
            Verdict::Store { times: Times { fresh_for, while_revalidate, if_error, .. }, .. } => {
                Some([fresh_for, while_revalidate, if_error].map(|time| time.as_secs()))
            }
            Verdict::Uncached { .. } | Verdict::Failed => None,
        }
    }

    #[test]
    fn response_without_time_is_stored_only_by_default_time() {
        assert_eq!(times(200, 0, &[]), None);
        assert_eq!(times(200, 60, &[]), Some([60, 0, 0]));
        assert_eq!(times(200, 60, &[("cache-control", "max-age=5")]), Some([5, 0, 0]));
        assert_eq!(times(200, 60, &[("cache-control", "max-age=0")]), None);
    }

    #[test]
    fn time_of_shared_caches_takes_precedence() {
        assert_eq!(times(200, 0, &[("cache-control", "max-age=5, s-maxage=9")]), Some([9, 0, 0]));
        assert_eq!(times(200, 0, &[("cache-control", "max-age=5"), ("expires", "0")]), Some([5, 0, 0]));
        assert_eq!(times(200, 0, &[("cache-control", "max-age=5, s-maxage=0")]), None);
    }

    #[test]
    fn expires_counts_from_the_date() {
        let later = ("expires", "Sun, 06 Nov 1994 08:50:37 GMT");
        assert_eq!(times(200, 0, &[later]), Some([60, 0, 0]));
        assert_eq!(times(200, 0, &[later, ("date", "Sun, 06 Nov 1994 08:49:17 GMT")]), Some([60, 0, 0]));
        for expired in ["0", "Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:48:37 GMT", "tomorrow"] {
            assert_eq!(times(200, 60, &[("expires", expired)]), None, "{expired}");
        }
        assert_eq!(times(200, 60, &[later, later]), None);
    }

    #[test]
    fn age_shortens_the_time() {
        let fresh = ("cache-control", "max-age=60");
        assert_eq!(times(200, 0, &[fresh, ("age", "20")]), Some([40, 0, 0]));
        assert_eq!(times(200, 0, &[fresh, ("date", "Sun, 06 Nov 1994 08:49:07 GMT")]), Some([30, 0, 0]));
        assert_eq!(times(200, 0, &[fresh, ("age", "60")]), None);
        assert_eq!(times(200, 0, &[fresh, ("age", "young")]), None);
        assert_eq!(times(200, 0, &[fresh, ("date", "Sun, 06 Nov 1994 09:49:37 GMT")]), Some([60, 0, 0]));
    }

    #[test]
    fn response_for_one_client_is_not_stored() {
        let fresh = ("cache-control", "max-age=60");
        for field in [
            ("set-cookie", "a=b"),
            ("cache-control", "private"),
            ("cache-control", "no-store"),
            ("cache-control", "no-cache"),
            ("cache-control", "private=\"x-a\""),
            ("vary", "*"),
            ("vary", "accept, *"),
            ("content-type", "Text/Event-Stream; charset=utf-8"),
        ] {
            assert_eq!(judged(200, 60, &[fresh, field]), Verdict::Uncached { mark: UNCACHED_FOR }, "{field:?}");
        }
    }

    #[test]
    fn stale_response_is_served_only_if_allowed() {
        let stale = "max-age=5, stale-while-revalidate=6, stale-if-error=7";
        assert_eq!(times(200, 0, &[("cache-control", stale)]), Some([5, 6, 7]));
        for directive in ["must-revalidate", "proxy-revalidate", "s-maxage=5"] {
            let fields = [("cache-control", stale), ("cache-control", directive)];
            assert_eq!(times(200, 0, &fields), Some([5, 0, 0]), "{directive}");
        }
    }

    #[test]
    fn only_some_statuses_are_stored() {
        for status in 200..600 {
            let (by_default, explicit) = (times(status, 60, &[]), times(status, 0, &[("cache-control", "max-age=60")]));
            assert_eq!(by_default.is_some(), [200, 203, 204, 301, 308, 404, 410].contains(&status), "{status}");
            assert_eq!(explicit.is_some(), by_default.is_some() || [302, 307].contains(&status), "{status}");
            let is_failure = judged(status, 60, &[]) == Verdict::Failed;
            assert_eq!(is_failure, [500, 502, 503, 504].contains(&status), "{status}");
        }
        assert_eq!(judged(403, 60, &[]), Verdict::Uncached { mark: UNCACHED_BRIEFLY_FOR });
    }
}
