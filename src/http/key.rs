use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Once;

use ::http::header::{FORWARDED, HeaderMap};
use ::http::request::Parts;
use ::http::{Extensions, HeaderName, Request};

use super::client_ip::{X_FORWARDED_FOR, is_private};
use super::forwarded::canonical;
use crate::key::{ExtractKey, Key, Or, first_of, lack};

/// Counts by the value of a request header: an API key, a session, a tenant.
///
/// A request without the header, or with an empty one, has no key. If the header is there more than once, the first one
/// counts. Values are secrets more often than not, so the store sees only their digest ([`Key::digest`]).
///
/// This counts what the client claims. In front of whatever checks the header, each value that a client makes up has a quota of its own, and an
/// entry of its own in the store: put the layer behind that, or add a limit for the [address](super#who-is-asking). Behind a layer that
/// authenticates, count by what that layer has left in the extensions of the request: a closure does, and
/// [`bearer_token`](super::bearer_token) has an example.
///
/// **Do not count by `authorization`.** `Bearer`, `bearer` and `BEARER` with the same token are different values here. So is each password
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
/// If `name` cannot be that of a header: it is part of the program, not of a request. A name that comes from elsewhere is for
/// [`HeaderName::try_from`] to judge, which this takes as well.
#[must_use]
pub fn header(name: impl TryInto<HeaderName>) -> HeaderKey {
    HeaderKey { name: header_name(name) }
}

/// The name of a header that the program names, in any case.
pub(super) fn header_name(name: impl TryInto<HeaderName>) -> HeaderName {
    name.try_into().unwrap_or_else(|_| panic!("the name of a header has letters, digits and `-`, and is not empty"))
}

/// See [`header`].
#[derive(Clone, Debug)]
pub struct HeaderKey {
    name: HeaderName,
}

impl HeaderKey {
    /// By a header whose name comes from a file.
    #[cfg(feature = "config")]
    pub(crate) const fn named(name: HeaderName) -> Self {
        Self { name }
    }

    /// Asks `fallback` where the header is missing: see [`first_of`].
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

/// What is left of a request in a handler that has its body.
impl ExtractKey<Parts> for HeaderKey {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        self.key_in(&parts.headers)
    }
}

/// The address of the other end of the connection, as an extension of each request.
///
/// For servers that have no such thing of their own. Insert it where connections are accepted; never make it from a
/// header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// Counts by the IP address of the other end of the connection.
///
/// Finds a [`PeerAddr`] or, with the feature `axum`, axum's `ConnectInfo<SocketAddr>` in the extensions of the request. A
/// request without either has no key, so that layers answer it by 400 unless told otherwise, and the first such request is a warning in the log. In
/// tests of an axum router its `MockConnectInfo` does as well.
///
/// An IPv6 address counts by its first 64 bits, since one client usually has all the others to choose from. An IPv4
/// address that arrives as IPv6, mapped (`::ffff:203.0.113.7`) or translated by NAT64 with the well-known prefix (`64:ff9b::203.0.113.7`),
/// counts as IPv4.
///
/// Behind a proxy this is the address of the proxy: use [`ClientIp`](super::ClientIp) there. The first request from a private address that is found to have
/// `X-Forwarded-For` or `Forwarded` is a warning in the log, as it comes from a proxy most likely. A thread looks at its first 1,024 requests, and at one of 64
/// after that.
#[must_use]
pub const fn peer_ip() -> PeerIp {
    PeerIp
}

/// See [`peer_ip`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PeerIp;

impl PeerIp {
    /// Asks `fallback` where the address is not known: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }
}

impl PeerIp {
    #[inline]
    fn key_in(headers: &HeaderMap, extensions: &Extensions) -> Option<Key> {
        let peer = peer_in(extensions);
        if let Some(peer) = peer
            && !PROXY_TOLD.is_completed()
            && is_looked_at()
            && is_private(canonical(peer.ip()))
        {
            tell_of_a_proxy(peer, headers);
        }
        match peer {
            Some(SocketAddr::V4(peer)) => Some(Key::from(*peer.ip())),
            Some(SocketAddr::V6(peer)) => Some(Key::from(network_of((*peer.ip()).into(), IPV6_PREFIX))),
            None => {
                NOBODY_TOLD.call_once(|| warn_of_no_peer("peer_ip()"));
                lack::note(NO_PEER);
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

/// What is left of a request in a handler that has its body.
impl ExtractKey<Parts> for PeerIp {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        Self::key_in(&parts.headers, &parts.extensions)
    }
}

/// The mistake is the program's and the same for every request, so it is told once.
static NOBODY_TOLD: Once = Once::new();

/// So is this one.
static PROXY_TOLD: Once = Once::new();

/// How many requests of each thread are looked at for what a proxy puts into all of them, and one of how many after that.
const ALL_OF: u16 = 1_024;
const ONE_OF: u16 = 64;

/// Whether this request is one of them: to look takes longer than to find the address.
#[inline]
fn is_looked_at() -> bool {
    thread_local! {
        static SEEN: Cell<u16> = const { Cell::new(0) };
    }
    SEEN.with(|seen| {
        let number = seen.get();
        seen.set(number.checked_add(1).unwrap_or(ALL_OF));
        number < ALL_OF || number % ONE_OF == 0
    })
}

/// Apart, so that the others do not have to go around it.
#[cold]
fn tell_of_a_proxy(peer: &SocketAddr, headers: &HeaderMap) {
    if let Some(header) = [&X_FORWARDED_FOR, &FORWARDED].into_iter().find(|name| headers.contains_key(*name)) {
        PROXY_TOLD.call_once(|| {
            tracing::warn!(
                peer = %peer.ip(), %header,
                "peer_ip() finds a forwarding header in a request from a private address: most likely that is a proxy of yours, and \
                 all its clients count as one; count by `ClientIp::trusting` with its network, which is `client_ip` in a file of rules"
            );
        });
    }
}

/// What a request lacks that has no address.
pub(super) const NO_PEER: &str = "its extensions hold neither a `PeerAddr` nor, with the feature `axum`, a `ConnectInfo<SocketAddr>`; serve \
                                  with `into_make_service_with_connect_info::<SocketAddr>()`";

pub(super) fn warn_of_no_peer(extractor: &str) {
    tracing::warn!(
        "{extractor} finds no address in a request: with axum, turn on the feature `axum` and serve with \
         `into_make_service_with_connect_info::<SocketAddr>()`; elsewhere insert a `PeerAddr` into the extensions"
    );
}

/// The address of the other end of the connection. By reference: it would be put together again elsewhere, which takes as long as
/// to find it.
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

/// How many bits of an IPv6 address a network has that one client has to itself, unless we are told.
pub(super) const IPV6_PREFIX: u8 = 64;

/// The first 96 bits of an IPv4 address that was translated to IPv6: 64:ff9b::/96 (RFC 6052).
const NAT64: u128 = 0x0064_ff9b << 64;

/// The address that stands for all that one client has.
#[inline]
pub(super) fn network_of(ip: IpAddr, ipv6_prefix: u8) -> IpAddr {
    // Mapped addresses first: all of IPv4 is in one /64 of them.
    match canonical(ip) {
        IpAddr::V4(v4) => v4.into(),
        // And in one of those that were translated.
        IpAddr::V6(v6) if v6.to_bits() >> 32 == NAT64 => Ipv4Addr::from_bits(v6.to_bits() as u32).into(),
        IpAddr::V6(v6) => {
            let host_bits = u32::from(128_u8.saturating_sub(ipv6_prefix));
            Ipv6Addr::from_bits(v6.to_bits() & u128::MAX.checked_shl(host_bits).unwrap_or(0)).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_requests_of_a_thread_are_looked_at_and_then_one_of_some_for_good() {
        // Has a thread of its own, as every test has.
        assert!((0..ALL_OF).all(|_| is_looked_at()));
        for _ in 0..2 * (u16::MAX / ONE_OF) {
            assert!(is_looked_at());
            assert!((1..ONE_OF).all(|_| !is_looked_at()));
        }
    }

    #[test]
    fn addresses_stand_for_clients() {
        let cases = [
            ("203.0.113.7", "203.0.113.7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff::", "2001:db8:1:2::"),
            ("64:ff9b::203.0.113.7", "203.0.113.7"),
            // Other prefixes are no one's but those of a network.
            ("64:ff9b:1::203.0.113.7", "64:ff9b:1::"),
            ("64:ff9b::1:203.0.113.7", "64:ff9b::"),
            ("164:ff9b::203.0.113.7", "164:ff9b::"),
            ("::1", "::"),
        ];
        for (peer, client) in cases {
            assert_eq!(network_of(peer.parse().unwrap(), IPV6_PREFIX), client.parse::<IpAddr>().unwrap(), "{peer}");
        }
        let all = "2001:db8:1:2:3:4:5:6".parse().unwrap();
        for (prefix, client) in
            [(32, "2001:db8::"), (48, "2001:db8:1::"), (56, "2001:db8:1::"), (128, "2001:db8:1:2:3:4:5:6")]
        {
            assert_eq!(network_of(all, prefix), client.parse::<IpAddr>().unwrap(), "/{prefix}");
        }
        for written_as_ipv6 in ["::ffff:203.0.113.7", "64:ff9b::203.0.113.7"] {
            assert_eq!(network_of(written_as_ipv6.parse().unwrap(), 32), IpAddr::from([203, 0, 113, 7]));
        }
    }

    #[test]
    fn headers_count_by_their_bytes_whatever_these_are() {
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
