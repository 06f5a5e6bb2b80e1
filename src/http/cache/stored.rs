//! The values of the HTTP cache: responses, and for a URI with `Vary` the names of the request header fields that select its response.
//!
//! The stored form: a version byte, a kind byte. For a response, four durations as `u64` milliseconds, the length and text of the
//! selection, then the bytes of a [`Recorder`](crate::http::idempotency::recorded_response::Recorder). `Varies`: the nonce, the number of
//! names, then each name after its length.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use ::http::HeaderName;
use bytes::{Buf, Bytes};

use super::policy::Times;
use super::status::insert_placeholders;
use super::vary::Vary;
use crate::codec::Codec;
use crate::error::BoxError;
use crate::http::idempotency::recorded_response::Recorded;
use crate::key::Key;

const VERSION: u8 = 1;
const RESPONSE: u8 = 0;
const VARIES: u8 = 1;

/// A value of the cache.
#[expect(clippy::large_enum_variant, reason = "nearly all values are responses, and each is behind an `Arc`")]
pub(super) enum Stored {
    Response(StoredResponse),
    /// Request headers select the response of this URI. Each variant is stored under its own key.
    Varies(Varies),
}

/// A response that may be served to several clients.
pub(super) struct StoredResponse {
    pub(super) times: Times,
    /// A digest of the values that the request has in the `Vary` fields of this response. Empty if no field selects the response.
    pub(super) selection: Key,
    pub(super) recorded: Recorded,
    // The stored form of `recorded`.
    encoded: Bytes,
}

impl StoredResponse {
    /// `None` if `encoded` is not a recorded response.
    pub(super) fn new(times: Times, selection: Key, encoded: Bytes) -> Option<Self> {
        let mut recorded = Recorded::read(encoded.clone())?;
        // A hit clones this map and replaces `Age` and `Cache-Status`. They are inserted here, so that the clone does not grow.
        insert_placeholders(&mut recorded.headers);
        Some(Self { times, selection, recorded, encoded })
    }
}

/// Which fields select the responses of a URI.
pub(super) struct Varies {
    pub(super) vary: Vary,
    /// A random part of the keys of all variants. After this `Varies` is removed or replaced, no request finds these variants any more.
    pub(super) nonce: u64,
}

impl Varies {
    /// The key of the response for a selection. A client can fill the store with invented header values, but no faster than with invented
    /// query strings.
    pub(super) fn variant_key(&self, uri: Key, selection: Key) -> Key {
        Key::from((uri, format!("{:x}", self.nonce), selection))
    }
}

/// The stored form of [`Stored`].
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredCodec;

impl Codec<Stored> for StoredCodec {
    fn encode(&self, stored: &Stored) -> Result<Vec<u8>, BoxError> {
        let mut out = vec![VERSION];
        match stored {
            Stored::Response(StoredResponse { times, selection, encoded, .. }) => {
                out.reserve(encoded.len() + 128);
                out.push(RESPONSE);
                let Times { initial_age, fresh_for, while_revalidate, if_error } = times;
                for time in [initial_age, fresh_for, while_revalidate, if_error] {
                    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
                    out.extend_from_slice(&millis.to_le_bytes());
                }
                put(&mut out, selection.as_str())?;
                out.extend_from_slice(encoded);
            }
            Stored::Varies(Varies { vary, nonce }) => {
                out.push(VARIES);
                out.extend_from_slice(&nonce.to_le_bytes());
                out.push(u8::try_from(vary.names().len())?);
                for name in vary.names() {
                    put(&mut out, name.as_str())?;
                }
            }
        }
        Ok(out)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Stored, BoxError> {
        read(bytes).ok_or_else(|| Unreadable.into())
    }
}

fn put(out: &mut Vec<u8>, text: &str) -> Result<(), BoxError> {
    out.extend_from_slice(&u16::try_from(text.len())?.to_le_bytes());
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

fn read(mut bytes: &[u8]) -> Option<Stored> {
    if bytes.try_get_u8().ok()? != VERSION {
        return None;
    }
    match bytes.try_get_u8().ok()? {
        RESPONSE => {
            let mut time = || bytes.try_get_u64_le().ok().map(Duration::from_millis);
            let times =
                Times { initial_age: time()?, fresh_for: time()?, while_revalidate: time()?, if_error: time()? };
            let selection = Key::stored(text(&mut bytes)?)?;
            StoredResponse::new(times, selection, Bytes::copy_from_slice(bytes)).map(Stored::Response)
        }
        VARIES => {
            let nonce = bytes.try_get_u64_le().ok()?;
            let count = bytes.try_get_u8().ok()?;
            let names = (0..count).map(|_| HeaderName::from_bytes(text(&mut bytes)?.as_bytes()).ok());
            let vary = Vary::new(names.collect::<Option<_>>()?)?;
            bytes.is_empty().then_some(Stored::Varies(Varies { vary, nonce }))
        }
        _ => None,
    }
}

fn text<'a>(bytes: &mut &'a [u8]) -> Option<&'a str> {
    let len = usize::from(bytes.try_get_u16_le().ok()?);
    let (text, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    str::from_utf8(text).ok()
}

#[derive(Debug)]
struct Unreadable;

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the cached response was written by another version, or is damaged")
    }
}

impl Error for Unreadable {}

#[cfg(test)]
mod tests {
    use ::http::{HeaderMap, HeaderValue, StatusCode};
    use proptest::prelude::*;

    use super::*;
    use crate::http::idempotency::recorded_response::Recorder;

    fn response() -> Stored {
        let secs = Duration::from_secs;
        let times = Times { initial_age: secs(1), fresh_for: secs(2), while_revalidate: secs(3), if_error: secs(4) };
        let mut headers = HeaderMap::new();
        headers.insert("etag", HeaderValue::from_static("\"a\""));
        let body = Bytes::from_static(b"hello");
        let mut recorder = Recorder::new(StatusCode::NOT_FOUND, &headers, false, 1_000);
        recorder.count_data(&body);
        let (encoded, _) = recorder.finish(std::iter::once(&body), true);
        Stored::Response(StoredResponse::new(times, Key::digest("x"), Bytes::from_owner(encoded)).unwrap())
    }

    #[test]
    fn response_survives_round_trip() {
        let bytes = StoredCodec.encode(&response()).unwrap();
        let Ok(Stored::Response(stored)) = StoredCodec.decode(&bytes) else { panic!("no response") };
        assert_eq!((stored.times.stale_for(), stored.selection), (Duration::from_secs(4), Key::digest("x")));
        assert_eq!((stored.recorded.status, &*stored.recorded.body), (StatusCode::NOT_FOUND, b"hello".as_slice()));
        assert_eq!(stored.recorded.headers["etag"], "\"a\"");
    }

    #[test]
    fn names_survive_round_trip() {
        let vary = Vary::new(vec![HeaderName::from_static("accept"), HeaderName::from_static("x-a")]).unwrap();
        let bytes = StoredCodec.encode(&Stored::Varies(Varies { vary: vary.clone(), nonce: 7 })).unwrap();
        let Ok(Stored::Varies(found)) = StoredCodec.decode(&bytes) else { panic!("no names") };
        assert_eq!((found.vary, found.nonce), (vary, 7));
    }

    #[test]
    fn each_selection_and_generation_has_its_own_slot() {
        let variant_key = |nonce, selection: u32| {
            let varies = Varies { vary: Vary::default(), nonce };
            varies.variant_key(Key::from("/"), Key::digest(selection.to_string())).as_str().to_owned()
        };
        let variant_keys = (1..3).flat_map(|nonce| (0..200).map(move |selection| variant_key(nonce, selection)));
        assert_eq!(variant_keys.collect::<std::collections::BTreeSet<_>>().len(), 400);
    }

    proptest! {
        #[test]
        fn damaged_bytes_are_a_value_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..100),
            at in 0..200_usize,
            with: u8,
        ) {
            let _ = StoredCodec.decode(&bytes);
            let mut damaged = StoredCodec.encode(&response()).unwrap();
            let at = at % damaged.len();
            damaged[at] = with;
            let _ = StoredCodec.decode(&damaged);
            let _ = StoredCodec.decode(&damaged[..at]);
        }
    }
}
