//! What a request means for the cache, from its head and from whether it has a body.

use std::borrow::Cow;
use std::time::SystemTime;

use ::http::header::{
    AUTHORIZATION, COOKIE, ETAG, HOST, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE,
    LAST_MODIFIED, RANGE, UPGRADE,
};
use ::http::uri::Authority;
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body::Body;

use super::cache_control::CacheControl;
use super::policy::date;
use super::settings::Settings;
use crate::http::idempotency::fingerprint::original_uri;
use crate::key::Key;

/// What to do with a request.
pub(super) enum Plan {
    /// Pass it on.
    Bypass,
    /// Pass it on, and remove these entries if it succeeds.
    Change(Vec<Key>),
    /// Answer it from the cache if possible.
    Read(Read),
}

/// A GET or HEAD request.
pub(super) struct Read {
    pub(super) uri: Key,
    pub(super) is_head: bool,
    /// The response may be neither stored nor shared.
    pub(super) no_store: bool,
    pub(super) conditions: Conditions,
}

/// The schemes that a key may have. The scheme is empty for HTTP/1 requests, whose URI usually has none.
const SCHEMES: [&str; 3] = ["", "http", "https"];
/// Requests with these fields bypass the cache: ranges, preconditions that a cache cannot check, and upgrades to other protocols.
const NEVER_CACHED: [HeaderName; 5] = [RANGE, IF_MATCH, IF_UNMODIFIED_SINCE, IF_RANGE, UPGRADE];

impl Plan {
    /// `principal` is `None` if the request has none.
    pub(super) fn of<B: Body>(request: &Request<B>, principal: Option<Key>, settings: &Settings) -> Self {
        let (Some(principal), Some(host)) = (principal, host(request)) else { return Self::Bypass };
        let method = request.method();
        if !method.is_safe() {
            return Self::Change(SCHEMES.map(|scheme| key(request, principal, scheme, &host)).to_vec());
        }
        let headers = request.headers();
        let is_head = method == Method::HEAD;
        let names_client = settings.is_public
            && (headers.contains_key(AUTHORIZATION) || headers.contains_key(COOKIE) && !settings.ignores_cookies);
        let is_bypassed = NEVER_CACHED.iter().any(|name| headers.contains_key(name)) || !request.body().is_end_stream();
        if !(is_head || method == Method::GET) || names_client || is_bypassed {
            return Self::Bypass;
        }
        let scheme = request.uri().scheme_str().unwrap_or_default();
        Self::Read(Read {
            uri: key(request, principal, scheme, &host),
            is_head,
            no_store: CacheControl::of(headers).no_store,
            conditions: Conditions::of(headers),
        })
    }
}

fn key<B>(request: &Request<B>, principal: Key, scheme: &str, host: &str) -> Key {
    let uri = original_uri(request);
    Key::from((principal, scheme, host, uri.path_and_query().map_or("/", |path| path.as_str())))
}

/// The host and port. Empty if the request names none. `None` if the request has several `Host` fields, or one that differs from the
/// authority of the URI, since it is not clear which one selects the response.
fn host<B>(request: &Request<B>) -> Option<Cow<'_, str>> {
    let mut fields = request.headers().get_all(HOST).iter();
    let field = fields.next().map(HeaderValue::to_str).transpose().ok()?;
    let authority = request.uri().authority().map(Authority::as_str);
    let differ = authority.zip(field).is_some_and(|(authority, field)| !authority.eq_ignore_ascii_case(field));
    if fields.next().is_some() || differ {
        return None;
    }
    let host = authority.or(field).unwrap_or_default();
    let has_upper = host.bytes().any(|byte| byte.is_ascii_uppercase());
    Some(if has_upper { host.to_ascii_lowercase().into() } else { host.into() })
}

/// The conditions of a request that this cache checks (RFC 9110, section 13).
#[derive(Default)]
pub(super) struct Conditions {
    if_none_match: Vec<HeaderValue>,
    if_modified_since: Option<SystemTime>,
}

impl Conditions {
    fn of(headers: &HeaderMap) -> Self {
        Self {
            if_none_match: headers.get_all(IF_NONE_MATCH).iter().cloned().collect(),
            if_modified_since: headers.get(IF_MODIFIED_SINCE).and_then(date),
        }
    }

    /// Removes the conditions, so that the response has a body to store.
    pub(super) fn remove(headers: &mut HeaderMap) {
        headers.remove(IF_NONE_MATCH);
        headers.remove(IF_MODIFIED_SINCE);
    }

    /// Whether the client has this response already.
    pub(super) fn is_not_modified(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        if status != StatusCode::OK {
            return false;
        }
        if !self.if_none_match.is_empty() {
            let has =
                |etag: &HeaderValue| self.if_none_match.iter().any(|list| lists(list.as_bytes(), etag.as_bytes()));
            return headers.get(ETAG).is_some_and(has);
        }
        let modified = headers.get(LAST_MODIFIED).and_then(date);
        modified.zip(self.if_modified_since).is_some_and(|(modified, since)| modified <= since)
    }
}

/// Whether a list of entity tags has a tag, by weak comparison.
fn lists(list: &[u8], etag: &[u8]) -> bool {
    let opaque = |tag: &[u8]| tag.strip_prefix(b"W/").unwrap_or(tag).to_vec();
    let etag = opaque(etag);
    let mut rest = list.trim_ascii();
    if rest == b"*" {
        return true;
    }
    loop {
        rest = rest.trim_ascii_start();
        rest = rest.strip_prefix(b"W/").unwrap_or(rest);
        // A tag may contain commas.
        let Some(end) = rest.strip_prefix(b"\"").and_then(|tag| tag.iter().position(|byte| *byte == b'"')) else {
            return false;
        };
        let (tag, after) = rest.split_at(end + 2);
        if tag == etag {
            return true;
        }
        let Some(next) = after.trim_ascii_start().strip_prefix(b",") else { return false };
        rest = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(name: &'static str, value: &'static str) -> Conditions {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        Conditions::of(&headers)
    }

    #[test]
    fn entity_tags_are_compared_weakly() {
        let mut headers = HeaderMap::new();
        headers.insert(ETAG, HeaderValue::from_static("W/\"a,b\""));
        for (list, expected) in [
            ("\"a,b\"", true),
            ("W/\"a,b\"", true),
            ("\"x\", W/\"a,b\"", true),
            ("\"x\" ,\t\"a,b\", \"y\"", true),
            ("*", true),
            ("\"a\"", false),
            ("a,b", false),
            ("\"x\" \"a,b\"", false),
            ("\"a,b", false),
            ("", false),
            ("\"", false),
        ] {
            let conditions = conditions("if-none-match", list);
            assert_eq!(conditions.is_not_modified(StatusCode::OK, &headers), expected, "{list}");
            assert!(!conditions.is_not_modified(StatusCode::NOT_FOUND, &headers));
        }
    }

    #[test]
    fn date_counts_only_without_entity_tags() {
        let mut headers = HeaderMap::new();
        headers.insert(LAST_MODIFIED, HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT"));
        for (since, expected) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", true),
            ("Sun, 06 Nov 1994 08:49:38 GMT", true),
            ("Sun, 06 Nov 1994 08:49:36 GMT", false),
            ("yesterday", false),
        ] {
            let mut conditions = conditions("if-modified-since", since);
            assert_eq!(conditions.is_not_modified(StatusCode::OK, &headers), expected, "{since}");
            conditions.if_none_match.push(HeaderValue::from_static("\"x\""));
            assert!(!conditions.is_not_modified(StatusCode::OK, &headers));
        }
    }

    #[test]
    fn request_with_two_hosts_has_no_key() {
        let request = |uri: &str, hosts: &[&str]| {
            let mut request = Request::builder().uri(uri);
            for host in hosts {
                request = request.header(HOST, *host);
            }
            host(&request.body(()).unwrap()).map(Cow::into_owned)
        };
        assert_eq!(request("/", &["A:80"]).as_deref(), Some("a:80"));
        assert_eq!(request("http://a/", &["A"]).as_deref(), Some("a"));
        assert_eq!(request("/", &[]).as_deref(), Some(""));
        assert_eq!(request("http://a/", &["b"]), None);
        assert_eq!(request("/", &["a", "a"]), None);
    }
}
