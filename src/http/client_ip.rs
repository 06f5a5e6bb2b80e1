use std::net::IpAddr;
use std::sync::Arc;

use ::http::header::HeaderMap;
use ::http::request::Parts;
use ::http::{Extensions, HeaderName, HeaderValue, Request};
use ipnet::{IpNet, Ipv4Net};

use super::address::{IPV6_PREFIX, canonical, is_private, network_of};
use super::client_ip_log::Warnings;
use super::forwarded;
use super::forwarding_header::ForwardingHeader;
use super::key::{self, header_name};
use crate::error::ConfigError;
use crate::key::{ExtractKey, Key, Or, first_of, missing_key};

/// Amazon CloudFront writes an address and a port into this header, and puts no brackets around IPv6 addresses.
static CLOUDFRONT_VIEWER_ADDRESS: HeaderName = HeaderName::from_static("cloudfront-viewer-address");

/// Counts by the IP address of the client, also behind proxies.
///
/// List the networks from which your proxies connect, or give the [number of proxies](Self::trusting_hops). If the peer, which is the other
/// end of the connection, is not a trusted proxy, it is the client, and no header changes that.
///
/// If the peer is a trusted proxy, all lines of `X-Forwarded-For` are read from the right. Each proxy appends the address that it saw, so
/// the client is the first address that is not a trusted proxy. Entries to its left come from the client and may be forged, so they are
/// ignored. If all addresses are trusted, the client is the leftmost one.
///
/// ```
/// use http::Request;
/// use tollgate::http::{ClientIp, PeerAddr};
///
/// # fn main() -> Result<(), tollgate::BoxError> {
/// let by_ip = ClientIp::trusting(["10.0.0.0/8".parse()?]);
///
/// let proxy = PeerAddr("10.0.0.1:4711".parse()?);
/// let forwarded = Request::builder().extension(proxy).header("x-forwarded-for", "6.6.6.6, 203.0.113.7, 10.0.0.2");
/// assert_eq!(by_ip.client_ip(&forwarded.body(())?), Some("203.0.113.7".parse()?));
///
/// let client = PeerAddr("203.0.113.8:4711".parse()?);
/// let forged = Request::builder().extension(client).header("x-forwarded-for", "6.6.6.6");
/// assert_eq!(by_ip.client_ip(&forged.body(())?), Some("203.0.113.8".parse()?));
/// # Ok(())
/// # }
/// ```
///
/// Behind Cloudflare, with one key per /56, which many providers assign to an IPv6 client:
///
/// ```
/// use tollgate::http::ClientIp;
///
/// # fn main() -> Result<(), tollgate::BoxError> {
/// let cloudflare = ["173.245.48.0/20".parse()?, "2400:cb00::/32".parse()?]; // and its other published networks
/// let by_ip = ClientIp::trusting(cloudflare).single_header("cf-connecting-ip").ipv6_prefix(56)?;
/// # Ok(())
/// # }
/// ```
///
/// # How the address is found
///
/// The peer address comes from the same extensions as that of [`peer_ip`](super::peer_ip). Without it a request has no key. Over a Unix
/// socket a proxy has no address: insert a [`PeerAddr`](super::PeerAddr) with a trusted one, such as `127.0.0.1`.
///
/// * An entry is an address in the form `ip`, `ip:port`, `[v6]` or `[v6]:port`, quoted or not. A port is a number up to 65535, or a name
///   that begins with `_`, as in `203.0.113.7:_hidden`.
/// * An IPv6 address without brackets has a port only if the whole text is no address: `2001:db8::1:50001` has port 50001, since no group has
///   five digits, but `2001:db8::1:443` is an address. This is ambiguous, so let your proxy write brackets. For headers that always hold a port, use
///   [`SingleWithPort`](ForwardingHeader::SingleWithPort).
/// * Any other entry is unreadable, such as `unknown`, `_hidden`, an IPv6 address with a zone, or an empty entry. In `Forwarded`, a malformed
///   element is unreadable, and so is an element without `for` or with two. An unreadable entry ends the search, because the entries to its
///   left are not trustworthy. [`on_unreadable`](Self::on_unreadable) then sets the key.
/// * At most [`MAX_HOPS`](Self::MAX_HOPS) entries are read. If all of them are trusted, the last one read is the client. In
///   `X-Forwarded-For`, text to their left is never scanned, however long it is. In `Forwarded`, which has quoted strings to skip, a value is
///   scanned a few times at most. The search does not allocate.
/// * An IPv4 address that is written as IPv6 (`::ffff:203.0.113.7`) is IPv4, both for trust and for the key.
/// * An address that NAT64 translated (`64:ff9b::203.0.113.7`) counts as IPv4 in the key, and stays IPv6 for trust, `client_ip` and `within`.
/// * The key of any other IPv6 address has its first 64 bits (see [`ipv6_prefix`](Self::ipv6_prefix)), because one client usually controls
///   all the other bits. [`client_ip`](Self::client_ip) and [`within`](Self::within) use all bits.
///
/// # Requirements
///
/// * Trust only the addresses of proxies. A client in a trusted network can forge any address.
/// * Read the header that your proxies write. Most proxies append to `X-Forwarded-For`, but pass on a `Forwarded` or `X-Real-IP` that the
///   client has forged.
/// * Every trusted proxy must append to that header or overwrite it.
///
/// The [table of proxies](super#proxies-and-their-headers) lists the headers of the major products.
///
/// # Logs
///
/// An unreadable value from a trusted proxy is logged as a warning, at most once per minute. With the feature `metrics`, each such request
/// is counted in `tollgate_unreadable_client_addresses_total`.
///
/// An extractor and its clones log each of these warnings once:
///
/// * The trusted networks include all IPv4 or all IPv6 addresses. This is logged when the extractor is created.
/// * A request has no peer address.
/// * A peer that is not trusted sends a forwarding header. Any client can do so, and it may be harmless.
/// * A trusted proxy sends a forwarding header, but not the header that is read.
/// * The client has a private address that is not trusted. Most likely it is a proxy that is missing from the list.
#[derive(Clone, Debug)]
pub struct ClientIp {
    trusted: Trusted,
    header: ForwardingHeader,
    on_unreadable: OnUnreadable,
    ipv6_prefix: u8,
    warnings: Arc<Warnings>,
}

/// The key of a request if a trusted proxy wrote a value without an address. Defaults to [`Proxy`](Self::Proxy).
///
/// Proxies write the value, so a client cannot choose it. The usual cause is a proxy that writes the header in another form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnreadable {
    /// The proxy that wrote the value: the entry to its right, or the peer if there is none. All such requests from that proxy share one
    /// quota.
    #[default]
    Proxy,
    /// The request has no key. By default a layer responds with 400: see `OnMissingKey`.
    Reject,
}

impl ClientIp {
    /// The maximum number of entries of a list that are read.
    pub const MAX_HOPS: usize = 64;

    /// Trusts the proxies in these networks.
    ///
    /// Without any network this is [`ClientIp::peer`]. With `0.0.0.0/0` each IPv4 client can forge its address, with `::/0` each IPv6
    /// client. Both are logged as a warning. `::/0` contains no IPv4 addresses, not even IPv4-mapped ones.
    #[must_use]
    pub fn trusting(proxies: impl IntoIterator<Item = IpNet>) -> Self {
        let trusted = Nets::new(proxies);
        if let Some(net) = trusted.entire_family() {
            tracing::warn!(
                %net,
                "ClientIp trusts all addresses of this family, so their clients can choose their keys: give `ClientIp::trusting` only the \
                 networks of your proxies"
            );
        }
        Self::of(Trusted::Nets(trusted))
    }

    /// Trusts this many proxies, whatever their addresses are.
    ///
    /// The client is the entry at this position of the header, from the right: the last one with 1, the one before it with 2. Each proxy
    /// between the client and this service must append one entry. If there are fewer entries, the leftmost one is the client. If there are
    /// none, the peer is the client. With a header that holds one address, any number above 0 trusts that header. A number above
    /// [`MAX_HOPS`](Self::MAX_HOPS) counts as `MAX_HOPS`, and 0 is [`ClientIp::peer`].
    ///
    /// # Risk
    ///
    /// The number cannot tell a proxy from a client. A client that bypasses one of the proxies **chooses its own key**. So does every client
    /// if the number is too large. Make sure that the network allows no way around the proxies, or use [`trusting`](Self::trusting) if you
    /// know their networks.
    ///
    /// ```
    /// use http::Request;
    /// use tollgate::http::{ClientIp, PeerAddr};
    ///
    /// # fn main() -> Result<(), tollgate::BoxError> {
    /// let by_ip = ClientIp::trusting_hops(2); // a CDN and a load balancer
    ///
    /// let balancer = PeerAddr("192.0.2.1:4711".parse()?);
    /// let request = Request::builder().extension(balancer);
    /// let forwarded = request.header("x-forwarded-for", "6.6.6.6, 203.0.113.7, 198.51.100.1");
    /// assert_eq!(by_ip.client_ip(&forwarded.body(())?), Some("203.0.113.7".parse()?));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn trusting_hops(hops: usize) -> Self {
        if hops == 0 { Self::peer() } else { Self::of(Trusted::Hops(hops)) }
    }

    fn of(trusted: Trusted) -> Self {
        Self {
            trusted,
            header: ForwardingHeader::XForwardedFor,
            on_unreadable: OnUnreadable::default(),
            ipv6_prefix: IPV6_PREFIX,
            warnings: Arc::default(),
        }
    }

    /// Trusts no proxy: the client is the peer, as with [`peer_ip`](super::peer_ip).
    ///
    /// The first request with a forwarding header is logged as a warning, because it may come from a proxy that you forgot.
    #[must_use]
    pub fn peer() -> Self {
        Self::trusting([])
    }

    /// Reads this header.
    ///
    /// Your proxies must append to this header or overwrite it. Otherwise the client chooses its address.
    ///
    /// Defaults to [`ForwardingHeader::XForwardedFor`].
    #[must_use]
    pub fn header(mut self, header: ForwardingHeader) -> Self {
        self.header = match header {
            ForwardingHeader::Single(name) if name == CLOUDFRONT_VIEWER_ADDRESS => {
                ForwardingHeader::SingleWithPort(name)
            }
            header => header,
        };
        self
    }

    /// Reads the address from a header that holds one address, such as `cf-connecting-ip`, `true-client-ip` or `x-real-ip`.
    ///
    /// The proxy must overwrite the header, and the network must allow no way around the proxy. If the header is missing, the peer is the
    /// client. If the header is repeated or holds anything but one address, [`on_unreadable`](Self::on_unreadable) sets the key.
    ///
    /// `cloudfront-viewer-address` holds a port, too, so it is read as [`SingleWithPort`](ForwardingHeader::SingleWithPort).
    ///
    /// # Panics
    ///
    /// If `name` is not a valid header name. Its case does not matter.
    #[must_use]
    pub fn single_header(self, name: impl TryInto<HeaderName>) -> Self {
        self.header(ForwardingHeader::Single(header_name(name)))
    }

    /// The key of a request if a trusted proxy wrote a value without an address.
    ///
    /// Defaults to [`OnUnreadable::Proxy`].
    #[must_use]
    pub const fn on_unreadable(mut self, then: OnUnreadable) -> Self {
        self.on_unreadable = then;
        self
    }

    /// Counts IPv6 addresses by this many leading bits: the length of the network that one client controls.
    ///
    /// Defaults to 64.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Ipv6PrefixOutOfRange`] unless `bits` is between 32 and 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, ConfigError> {
        let (min, max) = (32, 128);
        if !(min..=max).contains(&bits) {
            return Err(ConfigError::Ipv6PrefixOutOfRange { bits, min, max });
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }

    /// Uses `fallback` for requests whose address is not known: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    /// The address of the client with all its bits, for logs and lists.
    ///
    /// `None` if the peer address is not known or, with [`OnUnreadable::Reject`], if a trusted proxy wrote a value without an address.
    pub fn client_ip<B>(&self, request: &Request<B>) -> Option<IpAddr> {
        self.client_in(request.headers(), request.extensions())
    }

    /// Like [`client_ip`](Self::client_ip), for a handler that takes the parts of the request. `ClientIp` also extracts a [key](ExtractKey)
    /// from parts.
    ///
    /// ```
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Extension, http::request::Parts};
    /// use tollgate::http::ClientIp;
    /// use tollgate::{ExtractKey, Limiter, MemoryBackend};
    ///
    /// async fn log_in(
    ///     Extension(by_ip): Extension<ClientIp>,
    ///     Extension(limiter): Extension<Limiter<MemoryBackend>>,
    ///     parts: Parts,
    ///     name: String,
    /// ) -> Result<String, String> {
    ///     let Some(client) = by_ip.extract_key(&parts) else { return Err("unknown client address".into()) };
    ///     if name != "alice" && !limiter.try_acquire(client).await.unwrap_or(true) {
    ///         return Err("too many attempts".into());
    ///     }
    ///     Ok(format!("{name} logs in from {:?}", by_ip.client_ip_of(&parts)))
    /// }
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(log_in));
    /// # }
    /// ```
    pub fn client_ip_of(&self, parts: &Parts) -> Option<IpAddr> {
        self.client_in(&parts.headers, &parts.extensions)
    }

    fn client_in(&self, headers: &HeaderMap, extensions: &Extensions) -> Option<IpAddr> {
        let Some(peer) = key::peer_in(extensions).map(|peer| canonical(peer.ip())) else {
            if self.warnings.no_peer.set() {
                key::warn_missing_peer("ClientIp");
            }
            missing_key::record(key::NO_PEER);
            return None;
        };
        if !self.trusted.trusts(peer) {
            self.warnings.ignored_header(peer, headers, &self.header);
            return Some(peer);
        }
        match self.client_behind(peer, headers) {
            Ok(client) => {
                if client == peer {
                    self.warnings.other_header(headers, &self.header);
                } else if is_private(client) && !self.trusted.lists(client) {
                    self.warnings.private_client(client);
                }
                Some(client)
            }
            Err(proxy) => {
                self.warnings.unreadable_header(proxy, headers, &self.header);
                match self.on_unreadable {
                    OnUnreadable::Proxy => Some(proxy),
                    OnUnreadable::Reject => None,
                }
            }
        }
    }

    /// The client behind the trusted proxy `peer`. An error holds the proxy that wrote a value without an address.
    fn client_behind(&self, peer: IpAddr, headers: &HeaderMap) -> Result<IpAddr, IpAddr> {
        let mut lines = headers.get_all(self.header.name()).iter().map(HeaderValue::as_bytes);
        let parse = match self.header {
            ForwardingHeader::XForwardedFor => {
                return self.walk(peer, lines.rev().flat_map(forwarded::x_forwarded_for));
            }
            ForwardingHeader::Forwarded => return self.walk(peer, lines.rev().flat_map(forwarded::forwarded)),
            ForwardingHeader::Single(_) => forwarded::single,
            ForwardingHeader::SingleWithPort(_) => forwarded::single_with_port,
        };
        match (lines.next(), lines.next()) {
            (None, _) => Ok(peer),
            (Some(line), None) => parse(line).ok_or(peer),
            (Some(_), Some(_)) => Err(peer),
        }
    }

    /// A predicate that tells whether a request comes from one of these networks. Use it to allow, deny or exempt clients.
    ///
    /// The predicate compares the whole address of the client, not the prefix in its key. It is false if the address is not known.
    ///
    /// ```
    /// use http::Request;
    /// use tollgate::http::{ClientIp, PeerAddr};
    ///
    /// # fn main() -> Result<(), tollgate::BoxError> {
    /// let by_ip = ClientIp::trusting(["10.0.0.0/8".parse()?]);
    /// let is_office = by_ip.within(["198.51.100.0/24".parse()?, "2001:db8:7::/48".parse()?]);
    ///
    /// let request = Request::builder().extension(PeerAddr("10.0.0.1:4711".parse()?));
    /// assert!(is_office(&request.header("x-forwarded-for", "198.51.100.9").body(())?));
    /// # Ok(())
    /// # }
    /// ```
    pub fn within<B, N>(&self, nets: N) -> impl Fn(&Request<B>) -> bool + Clone + use<B, N>
    where
        N: IntoIterator<Item = IpNet>,
    {
        let nets = Nets::new(nets);
        let client = self.clone();
        move |request| client.client_ip(request).is_some_and(|ip| nets.contains(ip))
    }

    fn key_of(&self, ip: IpAddr) -> Key {
        Key::from(network_of(ip, self.ipv6_prefix))
    }

    /// Follows the hops until the first that is not trusted.
    fn walk(&self, peer: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> Result<IpAddr, IpAddr> {
        let mut client = peer;
        for hop in hops.take(self.trusted.max_entries().min(Self::MAX_HOPS)) {
            client = hop.ok_or(client)?;
            if !self.trusted.trusts(client) {
                break;
            }
        }
        Ok(client)
    }
}

impl<B> ExtractKey<Request<B>> for ClientIp {
    fn extract_key(&self, request: &Request<B>) -> Option<Key> {
        self.client_ip(request).map(|ip| self.key_of(ip))
    }
}

/// For handlers that take the parts of a request without its body.
impl ExtractKey<Parts> for ClientIp {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        self.client_ip_of(parts).map(|ip| self.key_of(ip))
    }
}

/// Which hops are trusted.
#[derive(Clone, Debug)]
enum Trusted {
    Nets(Nets),
    Hops(usize),
}

impl Trusted {
    /// Whether this hop is trusted. With `Hops`, every hop is trusted, since `max_entries` already limits how many are read.
    fn trusts(&self, hop: IpAddr) -> bool {
        matches!(self, Self::Hops(_)) || self.lists(hop)
    }

    /// Whether this address is in the list of trusted networks.
    fn lists(&self, ip: IpAddr) -> bool {
        matches!(self, Self::Nets(nets) if nets.contains(ip))
    }

    /// The maximum number of entries of a list that are read.
    const fn max_entries(&self) -> usize {
        match self {
            Self::Nets(_) => usize::MAX,
            Self::Hops(hops) => *hops,
        }
    }
}

/// Sorted networks that do not overlap.
#[derive(Clone, Debug)]
struct Nets(Arc<[IpNet]>);

impl Nets {
    fn new(nets: impl IntoIterator<Item = IpNet>) -> Self {
        let nets: Vec<IpNet> = nets.into_iter().map(canonical_net).collect();
        let mut nets = IpNet::aggregate(&nets);
        nets.sort_unstable_by_key(IpNet::network);
        Self(nets.into())
    }

    /// The first network that contains all IPv4 or all IPv6 addresses.
    fn entire_family(&self) -> Option<&IpNet> {
        self.0.iter().find(|net| net.prefix_len() == 0)
    }

    fn contains(&self, ip: IpAddr) -> bool {
        let after = self.0.partition_point(|net| net.network() <= ip);
        self.0[..after].last().is_some_and(|net| net.contains(&ip))
    }
}

/// Converts a network of IPv4-mapped IPv6 addresses to IPv4.
fn canonical_net(net: IpNet) -> IpNet {
    let mapped = || {
        let IpNet::V6(net) = net else { return None };
        let bits = net.prefix_len().checked_sub(96)?;
        Ipv4Net::new(net.addr().to_ipv4_mapped()?, bits).ok()
    };
    mapped().map_or(net, IpNet::V4)
}

/// Whether these networks together contain all IPv4 or all IPv6 addresses.
#[cfg(feature = "config")]
pub(crate) fn contain_entire_family(nets: impl IntoIterator<Item = IpNet>) -> bool {
    Nets::new(nets).entire_family().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(list: &[&str]) -> Nets {
        Nets::new(list.iter().map(|net| net.parse().unwrap()))
    }

    #[test]
    fn nets_contain_addresses_of_each_network() {
        let some =
            nets(&["10.0.0.0/8", "10.1.0.0/16", "192.0.2.128/25", "192.0.2.7/32", "2001:db8::/32", "192.0.2.9/24"]);
        for ip in
            ["10.0.0.0", "10.255.255.255", "10.1.2.3", "192.0.2.0", "192.0.2.255", "2001:db8::", "2001:db8:ffff::1"]
        {
            assert!(some.contains(ip.parse().unwrap()), "{ip}");
        }
        for ip in
            ["9.255.255.255", "11.0.0.0", "192.0.1.255", "192.0.3.0", "2001:db7::", "2001:db9::", "::", "::ffff:0:0"]
        {
            assert!(!some.contains(ip.parse().unwrap()), "{ip}");
        }
        assert!(!nets(&[]).contains("10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn ipv4_and_ipv6_networks_are_distinct() {
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        let v6: IpAddr = "::1".parse().unwrap();
        assert!(nets(&["::ffff:10.0.0.0/104"]).contains(v4));
        assert!(nets(&["::ffff:0.0.0.0/96"]).contains(v4));
        assert!(nets(&["0.0.0.0/0"]).contains(v4));
        assert!(!nets(&["::/0"]).contains(v4));
        assert!(nets(&["::/0"]).contains(v6));
        assert!(!nets(&["0.0.0.0/0"]).contains(v6));
        assert!(!nets(&["0.0.0.1/32"]).contains(v6));
    }
}
