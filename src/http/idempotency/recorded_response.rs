//! The stored form of responses: a version byte, the status, the headers and the trailers with their lengths, and the body.

use std::iter;
use std::sync::Arc;

use ::http::header::{self, HeaderName};
use ::http::{HeaderMap, HeaderValue, Response, StatusCode};
use bytes::{Buf, Bytes};
use smallvec::{Array, SmallVec};

use crate::http::upstream::is_rate_limit_field;
use crate::idempotency::StoredResponse;

/// The version of the stored form.
const VERSION: u8 = 1;
/// An empty list of headers.
const NO_HEADERS: [u8; 2] = [0; 2];

/// Hop-by-hop headers and per-response headers such as `Date`. They would be wrong in a replay.
const NOT_KEPT: &[&str] = &[
    "age",
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "server-timing",
    "te",
    "traceparent",
    "tracestate",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];

/// Builds the stored form of a response. `count_data` only counts the body, and `finish` adds it.
pub(in crate::http) struct Recorder {
    // A few headers fit without an allocation.
    head: SmallVec<[u8; 96]>,
    trailers: SmallVec<[u8; 16]>,
    len: usize,
    max: usize,
    // Whether all counts and lengths of headers and trailers fit into their integers.
    lengths_fit: bool,
    status: StatusCode,
}

impl Recorder {
    pub(in crate::http) fn new(status: StatusCode, headers: &HeaderMap, keeps_cookies: bool, max: usize) -> Self {
        let mut head = SmallVec::new();
        head.push(VERSION);
        head.extend_from_slice(&status.as_u16().to_le_bytes());
        let is_kept = |name: &HeaderName| is_kept(name, headers) && (keeps_cookies || name != header::SET_COOKIE);
        let lengths_fit = write_headers(&mut head, headers, is_kept);
        let len = head.len();
        Self { head, trailers: SmallVec::new(), len, max, lengths_fit, status }
    }

    /// Whether the part that was recorded so far fits into the stored form and the maximum size.
    pub(in crate::http) const fn fits(&self) -> bool {
        self.fits_with(0)
    }

    /// The same, with `more` bytes besides the recorded ones.
    pub(in crate::http) const fn fits_with(&self, more: usize) -> bool {
        self.lengths_fit && self.len.saturating_add(more) <= self.max
    }

    pub(in crate::http) fn count_data(&mut self, data: &Bytes) {
        self.len = self.len.saturating_add(data.len());
    }

    pub(in crate::http) fn set_trailers(&mut self, trailers: &HeaderMap) {
        // If there are several sets of trailers, the last one counts.
        self.len -= self.trailers.len();
        self.trailers.clear();
        self.lengths_fit &= write_headers(&mut self.trailers, trailers, |_| true);
        self.len = self.len.saturating_add(self.trailers.len());
    }

    /// The stored form of the response, and true. If the response is incomplete or too large: the stored form of its status, and false.
    pub(in crate::http) fn finish<'a>(
        &self,
        body: impl Iterator<Item = &'a Bytes>,
        is_whole: bool,
    ) -> (Arc<[u8]>, bool) {
        let is_kept = is_whole && self.fits();
        if !is_kept {
            return (Arc::from(status_only(self.status).as_slice()), false);
        }
        let trailers = if self.trailers.is_empty() { NO_HEADERS.as_slice() } else { &self.trailers };
        let len = self.len - self.trailers.len() + trailers.len();
        // Allocated once.
        let mut response: Arc<[u8]> = std::iter::repeat_n(0, len).collect();
        let mut rest = Arc::get_mut(&mut response).expect("the new Arc has one owner");
        for part in [&*self.head, trailers].into_iter().chain(body.map(|chunk| &**chunk)) {
            let (to, after) = rest.split_at_mut(part.len());
            to.copy_from_slice(part);
            rest = after;
        }
        (response, true)
    }
}

/// Stands for a response that was not stored: its status without headers.
pub(in crate::http) fn status_only(status: StatusCode) -> [u8; 5] {
    let [low, high] = status.as_u16().to_le_bytes();
    let [none, nothing] = NO_HEADERS;
    [VERSION, low, high, none, nothing]
}

impl StoredResponse {
    /// For an operation of an [`IdempotencyLayer`](crate::IdempotencyLayer): the whole response is replayed, including trailers
    /// and cookies. Only hop-by-hop headers and per-response headers such as `Date` are left out.
    pub fn with_trailers<B: Into<Bytes>>(response: Response<B>, trailers: &HeaderMap) -> Self {
        let (head, body) = response.into_parts();
        let body = body.into();
        let mut recorder = Recorder::new(head.status, &head.headers, true, usize::MAX);
        recorder.count_data(&body);
        recorder.set_trailers(trailers);
        let (bytes, is_kept) = recorder.finish(iter::once(&body), true);
        Self::of_record(bytes, is_kept)
    }

    /// For a unary gRPC call behind an [`IdempotencyLayer`](crate::IdempotencyLayer): the status `OK`, with this encoded message.
    /// With prost, pass `message.encode_to_vec()`.
    #[cfg(feature = "grpc")]
    pub fn of_message(message: impl AsRef<[u8]>) -> Self {
        let message = message.as_ref();
        // The prefix of a gRPC message: 0 for no compression, and the length.
        let len = u32::try_from(message.len()).unwrap_or(u32::MAX);
        let body = [&[0], len.to_be_bytes().as_slice(), message].concat();
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        let ok = (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"));
        Self::with_trailers(response, &HeaderMap::from_iter([ok]))
    }
}

/// The whole response is replayed, including cookies. Only hop-by-hop headers and per-response headers such as `Date` are left out.
impl<B: Into<Bytes>> From<Response<B>> for StoredResponse {
    fn from(response: Response<B>) -> Self {
        Self::with_trailers(response, &HeaderMap::new())
    }
}

/// Only the status is stored: a retry learns that the operation was completed.
impl From<StatusCode> for StoredResponse {
    fn from(status: StatusCode) -> Self {
        Self::of_record(status_only(status).as_slice().into(), false)
    }
}

/// Whether a header is stored. Not those in [`NOT_KEPT`], rate-limit fields, and headers that `Connection` names.
fn is_kept(name: &HeaderName, headers: &HeaderMap) -> bool {
    let is_of_connection = || {
        let tokens = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
        tokens.flat_map(|value| value.split(',')).any(|token| token.trim().eq_ignore_ascii_case(name.as_str()))
    };
    !(NOT_KEPT.contains(&name.as_str()) || is_rate_limit_field(name) || is_of_connection())
}

/// Writes a list of headers. False if a count or length does not fit into its integer: then `out` must not be stored.
fn write_headers<A: Array<Item = u8>>(
    out: &mut SmallVec<A>,
    headers: &HeaderMap,
    is_kept: impl Fn(&HeaderName) -> bool,
) -> bool {
    let count_at = out.len();
    out.extend_from_slice(&[0; 2]);
    let mut count = 0_u16;
    for (name, value) in headers.iter().filter(|(name, _)| is_kept(name)) {
        let lens = (u16::try_from(name.as_str().len()), u32::try_from(value.len()), count.checked_add(1));
        let (Ok(name_len), Ok(value_len), Some(one_more)) = lens else { return false };
        out.extend_from_slice(&name_len.to_le_bytes());
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(&value_len.to_le_bytes());
        out.extend_from_slice(value.as_bytes());
        count = one_more;
    }
    out[count_at..count_at + 2].copy_from_slice(&count.to_le_bytes());
    true
}

/// A stored response.
pub(in crate::http) struct Recorded {
    pub(in crate::http) status: StatusCode,
    pub(in crate::http) headers: HeaderMap,
    pub(in crate::http) body: Bytes,
    pub(in crate::http) trailers: HeaderMap,
}

impl Recorded {
    /// `None` if [`Recorder`] did not write these bytes.
    pub(in crate::http) fn read(mut bytes: Bytes) -> Option<Self> {
        if bytes.try_get_u8().ok()? != VERSION {
            return None;
        }
        let status = StatusCode::from_u16(bytes.try_get_u16_le().ok()?).ok()?;
        let headers = read_headers(&mut bytes)?;
        // A response that was not stored ends here.
        let trailers = if bytes.is_empty() { HeaderMap::new() } else { read_headers(&mut bytes)? };
        Some(Self { status, headers, body: bytes, trailers })
    }
}

fn read_headers(bytes: &mut Bytes) -> Option<HeaderMap> {
    let count = bytes.try_get_u16_le().ok()?;
    let mut headers = HeaderMap::new();
    for _ in 0..count {
        let name_len = usize::from(bytes.try_get_u16_le().ok()?);
        let name = HeaderName::from_bytes(&take(bytes, name_len)?).ok()?;
        let value_len = usize::try_from(bytes.try_get_u32_le().ok()?).ok()?;
        let value = HeaderValue::from_maybe_shared(take(bytes, value_len)?).ok()?;
        headers.try_append(name, value).ok()?;
    }
    Some(headers)
}

fn take(bytes: &mut Bytes, len: usize) -> Option<Bytes> {
    (bytes.len() >= len).then(|| bytes.split_to(len))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(lines: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn stored_response_survives_round_trip() {
        let sent = headers(&[("location", b"/a"), ("x-many", b"1"), ("x-many", b"\xff\xfe"), ("x-empty", b"")]);
        let trailers = headers(&[("grpc-status", b"0")]);
        let mut recorder = Recorder::new(StatusCode::CREATED, &sent, false, 1_000);
        let body = ["one", "", "two"].map(|chunk| Bytes::from_static(chunk.as_bytes()));
        body.iter().for_each(|chunk| recorder.count_data(chunk));
        recorder.set_trailers(&trailers);
        let (bytes, is_kept) = recorder.finish(body.iter(), true);
        assert!(is_kept);
        let recorded = Recorded::read(Bytes::from_owner(bytes)).unwrap();
        assert_eq!((recorded.status, &*recorded.body), (StatusCode::CREATED, b"onetwo".as_slice()));
        assert_eq!((recorded.headers, recorded.trailers), (sent, trailers));
    }

    #[test]
    fn headers_of_hop_moment_or_request_are_not_stored() {
        let sent = headers(&[
            ("connection", b"close, X-Hop"),
            ("x-hop", b"1"),
            ("date", b"now"),
            ("content-length", b"7"),
            ("set-cookie", b"session=1"),
            ("ratelimit", b"r=1"),
            ("x-ratelimit-remaining", b"1"),
            ("x-rate-limit-remaining", b"1"),
            ("content-type", b"text/plain"),
        ]);
        let kept = |keeps_cookies| {
            let recorder = Recorder::new(StatusCode::OK, &sent, keeps_cookies, 1_000);
            let (bytes, _) = recorder.finish(std::iter::empty(), true);
            let recorded = Recorded::read(Bytes::from_owner(bytes)).unwrap();
            let mut names: Vec<_> = recorded.headers.keys().map(|name| name.as_str().to_owned()).collect();
            names.sort();
            names
        };
        assert_eq!(kept(false), ["content-type"]);
        assert_eq!(kept(true), ["content-type", "set-cookie"]);
    }

    #[test]
    fn too_large_or_broken_response_is_stored_as_status() {
        let sent = headers(&[("x-a", b"b")]);
        for (max, is_whole) in [(100, true), (1_000, false)] {
            let mut recorder = Recorder::new(StatusCode::OK, &sent, false, max);
            let body = [vec![b'x'; 101].into(), Bytes::from_static(b"more")];
            body.iter().for_each(|chunk| recorder.count_data(chunk));
            assert_eq!(recorder.fits(), max > 101);
            let (bytes, is_kept) = recorder.finish(body.iter(), is_whole);
            assert!(!is_kept);
            let recorded = Recorded::read(Bytes::from_owner(bytes)).unwrap();
            assert!(recorded.status == StatusCode::OK && recorded.body.is_empty() && recorded.headers.is_empty());
        }
    }

    /// Regression: the record of a response with more headers than its count can express could not be read.
    #[test]
    fn response_with_too_many_headers_is_stored_as_status() {
        let max = usize::from(u16::MAX);
        for (len, in_trailers, is_whole) in
            [(max, false, true), (max + 1, false, false), (max, true, true), (max + 1, true, false)]
        {
            let mut many = HeaderMap::new();
            for _ in 0..len {
                many.append("x-a", HeaderValue::from_static("b"));
            }
            let (headers, trailers) = if in_trailers { (HeaderMap::new(), many) } else { (many, HeaderMap::new()) };
            let mut response = Response::new("body");
            *response.headers_mut() = headers.clone();
            let response = StoredResponse::with_trailers(response, &trailers);
            assert_eq!(response.is_kept(), is_whole, "{len} {in_trailers}");
            let recorded = Recorded::read(Bytes::from_owner(Arc::clone(response.bytes()))).unwrap();
            let (headers, body) = if is_whole { (headers, "body") } else { (HeaderMap::new(), "") };
            assert!(recorded.headers == headers && recorded.body == body, "{len} {in_trailers}");
            assert_eq!(recorded.trailers.len(), if is_whole { trailers.len() } else { 0 });
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_to_response_or_none(bytes in prop::collection::vec(any::<u8>(), 0..100), version: bool) {
            let mut bytes = bytes;
            if let (Some(first), true) = (bytes.first_mut(), version) {
                *first = VERSION;
            }
            if let Some(recorded) = Recorded::read(bytes.into()) {
                prop_assert!((100..1_000).contains(&recorded.status.as_u16()));
            }
        }
    }
}
