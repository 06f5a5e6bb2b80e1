use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Once;

use ::http::header::{FORWARDED, HeaderMap};
use ::http::request::Parts;
use ::http::{Extensions, HeaderName, Request};

use super::address::{IPV6_PREFIX, canonical, is_private, network_of};
use super::forwarding_header::X_FORWARDED_FOR;
use crate::key::{ExtractKey, Key, Or, first_of, missing_key};

/// Counts by the value of a request header: an API key, a session, a tenant.
///
/// A request without the header, or with an empty one, has no key. If the header is repeated, its first value is the key. Values are often
/// secrets, so the store sees only their digest ([`Key::digest`]).
///
/// The value is the client's claim. Until something checks it, each value that a client invents has its own quota and its own entry in the
/// store. So put the layer behind the authentication, or add a limit for the [address](super#keys). Behind an authentication layer, a
/// closure can count by the extension that this layer inserts: [`bearer_token`](super::bearer_token) has an example.
///
/// **Do not count by `authorization`.** `Bearer`, `bearer` and `BEARER` with the same token are different keys here. So is each password
/// that a client tries for a user. Use [`bearer_token`](super::bearer_token) and [`basic_user`](super::basic_user).
///
/// ```
/// use tollgate::http::header;
///
/// let by_api_key = header("x-api-key");
/// ```
///
/// # Panics
///
/// If `name` is not a valid header name. Validate a name from configuration with [`HeaderName::try_from`], and pass the `HeaderName`.
#[must_use]
pub fn header(name: impl TryInto<HeaderName>) -> HeaderKey {
    HeaderKey { name: header_name(name) }
}

/// Converts a header name in upper or lower case, and panics if the name is not valid.
pub(super) fn header_name(name: impl TryInto<HeaderName>) -> HeaderName {
    name.try_into().unwrap_or_else(|_| panic!("invalid header name: use letters, digits and `-`"))
}

/// See [`header`].
#[derive(Clone, Debug)]
pub struct HeaderKey {
    name: HeaderName,
}

impl HeaderKey {
    /// Counts by a header whose name comes from a file.
    #[cfg(feature = "config")]
    pub(crate) const fn named(name: HeaderName) -> Self {
        Self { name }
    }

    /// Uses `fallback` for requests without the header: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    fn key_in(&self, headers: &HeaderMap) -> Option<Key> {
        let value = headers.get(&self.name)?;
        (!value.is_empty()).then(|| Key::digest(value))
    }
}

impl<B> ExtractKey<Request<B>> for HeaderKey {
    fn extract_key(&self, request: &Request<B>) -> Option<Key> {
        self.key_in(request.headers())
    }
}

/// For handlers that take the parts of a request without its body.
impl ExtractKey<Parts> for HeaderKey {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        self.key_in(&parts.headers)
    }
}

/// The peer address, which is the other end of the connection, as an extension of each request.
///
/// For servers that have no such extension. Insert it where you accept connections, and never take it from a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// Counts by the IP address of the peer, which is the other end of the connection.
///
/// Reads a [`PeerAddr`] or, with the feature `axum`, axum's `ConnectInfo<SocketAddr>` from the extensions of the request. Axum's
/// `MockConnectInfo` works too, for tests of a router. A request without any of these has no key: layers respond with 400 by default, and
/// the first such request is logged as a warning.
///
/// The key of an IPv6 address is its first 64 bits, because one client usually controls all the other bits. An IPv4 address that is written
/// as IPv6 (`::ffff:203.0.113.7`) counts as IPv4. So does the NAT64 translation with the well-known prefix (`64:ff9b::203.0.113.7`).
///
/// Behind a proxy this is the address of the proxy, so use [`ClientIp`](super::ClientIp) there. A request from a private address with
/// `X-Forwarded-For` or `Forwarded` most likely comes from a proxy. The first such request that is found is logged as a warning. Each thread
/// checks its first 1,024 requests, and one of 64 after that.
#[must_use]
pub const fn peer_ip() -> PeerIp {
    PeerIp
}

/// See [`peer_ip`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PeerIp;

impl PeerIp {
    /// Uses `fallback` for requests whose address is not known: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }
}

impl PeerIp {
    #[inline]
    fn key_in(headers: &HeaderMap, extensions: &Extensions) -> Option<Key> {
        let peer = peer_in(extensions);
        if let Some(peer) = peer
            && !PROXY_WARNING.is_completed()
            && is_sampled()
            && is_private(canonical(peer.ip()))
        {
            warn_of_proxy(peer, headers);
        }
        match peer {
            Some(SocketAddr::V4(peer)) => Some(Key::from(*peer.ip())),
            Some(SocketAddr::V6(peer)) => Some(Key::from(network_of((*peer.ip()).into(), IPV6_PREFIX))),
            None => {
                MISSING_PEER_WARNING.call_once(|| warn_missing_peer("peer_ip()"));
                missing_key::record(NO_PEER);
                None
            }
        }
    }
}

impl<B> ExtractKey<Request<B>> for PeerIp {
    #[inline]
    fn extract_key(&self, request: &Request<B>) -> Option<Key> {
        Self::key_in(request.headers(), request.extensions())
    }
}

/// For handlers that take the parts of a request without its body.
impl ExtractKey<Parts> for PeerIp {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        Self::key_in(&parts.headers, &parts.extensions)
    }
}

/// A configuration error affects every request, so each of these warnings is logged once.
static MISSING_PEER_WARNING: Once = Once::new();
static PROXY_WARNING: Once = Once::new();

/// Each thread checks this many of its first requests for a forwarding header.
const SAMPLE_ALL: u16 = 1_024;

/// After that, each thread checks one request of this many.
const SAMPLE_EVERY: u16 = 64;

/// Whether to check this request. The check is slower than reading the address, so most requests skip it.
#[inline]
fn is_sampled() -> bool {
    thread_local! {
        static REQUESTS: Cell<u16> = const { Cell::new(0) };
    }
    REQUESTS.with(|requests| {
        let number = requests.get();
        requests.set(number.checked_add(1).unwrap_or(SAMPLE_ALL));
        number < SAMPLE_ALL || number % SAMPLE_EVERY == 0
    })
}

/// A separate function to keep it out of the inlined fast path.
#[cold]
fn warn_of_proxy(peer: &SocketAddr, headers: &HeaderMap) {
    if let Some(header) = [&X_FORWARDED_FOR, &FORWARDED].into_iter().find(|name| headers.contains_key(*name)) {
        PROXY_WARNING.call_once(|| {
            tracing::warn!(
                peer = %peer.ip(), %header,
                "peer_ip() finds a forwarding header in a request from a private address: most likely this is your proxy, and all \
                 its clients share one key; use `ClientIp::trusting` with its network, or `client_ip` in a rules file"
            );
        });
    }
}

/// What a request without a peer address lacks, for [`missing_key::record`].
pub(super) const NO_PEER: &str = "its extensions hold neither a `PeerAddr` nor, with the feature `axum`, a `ConnectInfo<SocketAddr>`; serve \
                                  with `into_make_service_with_connect_info::<SocketAddr>()`";

pub(super) fn warn_missing_peer(extractor: &str) {
    tracing::warn!(
        extractor,
        "a request has no peer address: with axum, enable the feature `axum` and serve with \
         `into_make_service_with_connect_info::<SocketAddr>()`; with another server, insert a `PeerAddr` into the extensions"
    );
}

/// The peer address. Returned by reference, because copying it takes as long as finding it.
#[inline]
pub(super) fn peer_in(extensions: &Extensions) -> Option<&SocketAddr> {
    let peer = extensions.get().map(|PeerAddr(peer)| peer);
    #[cfg(feature = "axum")]
    let peer = peer.or_else(|| axum_peer(extensions));
    peer
}

#[inline]
#[cfg(feature = "axum")]
fn axum_peer(extensions: &Extensions) -> Option<&SocketAddr> {
    use axum::extract::ConnectInfo;
    use axum::extract::connect_info::MockConnectInfo;
    let mock = || extensions.get().map(|MockConnectInfo::<SocketAddr>(peer)| peer);
    extensions.get().map(|ConnectInfo::<SocketAddr>(peer)| peer).or_else(mock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_checks_first_requests_and_then_samples() {
        // Each test runs in its own thread.
        assert!((0..SAMPLE_ALL).all(|_| is_sampled()));
        for _ in 0..2 * (u16::MAX / SAMPLE_EVERY) {
            assert!(is_sampled());
            assert!((1..SAMPLE_EVERY).all(|_| !is_sampled()));
        }
    }

    #[test]
    fn header_key_accepts_any_bytes() {
        let by_token = header("x-token");
        let key = |value: &[u8]| {
            let value = ::http::HeaderValue::from_bytes(value).unwrap();
            by_token.extract_key(&Request::builder().header("x-token", value).body(()).unwrap())
        };
        assert_eq!(key(b""), None);
        assert_eq!(by_token.extract_key(&Request::new(())), None);
        assert!(key(b"\xff\xfe{}").is_some());
        assert_ne!(key(b"\xff"), key(b"\xfe"));
        assert!(!key(b"hunter2").unwrap().as_str().contains("hunter2"));
        assert!(key(&vec![b'x'; 1 << 20]).unwrap().as_str().len() <= Key::MAX_LEN);
    }
}
