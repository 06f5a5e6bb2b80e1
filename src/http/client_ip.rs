use std::net::IpAddr;
use std::sync::Arc;

use ::http::header::{FORWARDED, HeaderMap};
use ::http::request::Parts;
use ::http::{Extensions, HeaderName, HeaderValue, Request};
use ipnet::{IpNet, Ipv4Net};

use super::client_ip_log::Told;
use super::forwarded::{self, canonical};
use super::key::{self, IPV6_PREFIX, header_name};
use crate::error::ConfigError;
use crate::key::{ExtractKey, Key, Or, first_of, lack};

pub(super) static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Amazon CloudFront writes an address and a port into this one, and IPv6 without brackets.
static CLOUDFRONT_VIEWER_ADDRESS: HeaderName = HeaderName::from_static("cloudfront-viewer-address");

/// Counts by the IP address of the client, also behind proxies.
///
/// The proxies have to be named, by the networks that they connect from, or else [counted](Self::trusting_hops). If the other end of the
/// connection is none of them, it is the client, and no header changes that. If it is one, `X-Forwarded-For` is read from the right, all lines of
/// it: each proxy has appended whom it saw. Addresses of trusted proxies are skipped and the first other one is the
/// client; what stands left of it comes from the client itself, who may have made it up. Where all are trusted, the client
/// is the leftmost.
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
/// let somebody = PeerAddr("203.0.113.8:4711".parse()?);
/// let forged = Request::builder().extension(somebody).header("x-forwarded-for", "6.6.6.6");
/// assert_eq!(by_ip.client_ip(&forged.body(())?), Some("203.0.113.8".parse()?));
/// # Ok(())
/// # }
/// ```
///
/// Behind Cloudflare, counting IPv6 clients by the /56 that providers hand out:
///
/// ```
/// use tollgate::http::ClientIp;
///
/// # fn main() -> Result<(), tollgate::BoxError> {
/// let cloudflare = ["173.245.48.0/20".parse()?, "2400:cb00::/32".parse()?]; // and the others that it publishes
/// let by_ip = ClientIp::trusting(cloudflare).single_header("cf-connecting-ip").ipv6_prefix(56)?;
/// # Ok(())
/// # }
/// ```
///
/// # Which address is found
///
/// The other end of the connection is found as by [`peer_ip`](super::peer_ip); without it there is no key. A proxy that
/// connects over a Unix socket has no address: insert a [`PeerAddr`](super::PeerAddr) that is trusted, of `127.0.0.1` say.
///
/// * An entry is an address, `ip`, `ip:port`, `[v6]` or `[v6]:port`, quoted or not. A port is at most 65535, or a name such as `_hidden`.
/// * An IPv6 address with a port and without brackets is read if it is no address by itself: `2001:db8::1:50001` has port 50001, while
///   `2001:db8::1:443` is an address. This is ambiguous, so have your proxy write brackets. Headers that always hold a port have a [form of their own](ForwardingHeader::SingleWithPort).
/// * Anything else is unreadable and ends the search, such as `unknown`, `_hidden`, an IPv6 address with a zone, or an empty entry. In
///   `Forwarded`, an element that is not well-formed is unreadable, and so is one without `for` or with two. The entries left of an
///   unreadable one prove nothing. [`on_unreadable`](Self::on_unreadable) says how the request counts then.
/// * At most [`MAX_HOPS`](Self::MAX_HOPS) entries are read. If all these are trusted, the last one read is the client. What
///   stands left of them in `X-Forwarded-For` is never looked at, however long it is; a value of `Forwarded`, where quoted
///   strings have to be skipped, is gone through a few times at most. Nothing is allocated.
/// * An IPv4 address that is written as IPv6 (`::ffff:203.0.113.7`) is IPv4 here, for trust as for counting.
/// * One that was translated by NAT64 with the well-known prefix (`64:ff9b::203.0.113.7`) counts as IPv4, and is IPv6 for everything else.
/// * Any other IPv6 address counts by its first 64 bits (see [`ipv6_prefix`](Self::ipv6_prefix)), as one client usually has all
///   the others to choose from. [`client_ip`](Self::client_ip) and [`within`](Self::within) see all bits.
///
/// # What it relies on
///
/// * Trust the addresses of proxies only. A client in a trusted network can say to be anybody.
/// * Only one header is read, and it has to be the one that your proxies write: most append to `X-Forwarded-For` and pass
///   through a `Forwarded` or an `X-Real-IP` that the client made up.
/// * Every trusted proxy has to append to that header or overwrite it.
///
/// The [table of proxies](super#proxies-and-their-headers) has the headers of the major ones.
///
/// # What is logged
///
/// An unreadable value from a trusted proxy is a warning, at most once a minute. With the feature `metrics`, each of them is counted in
/// `tollgate_unreadable_client_addresses_total`.
///
/// Each of these is a warning, once per extractor and its clones: trust in all addresses there are, when it is made; no address of the
/// connection; a forwarding header from somebody who is not trusted (anybody can send one, so this may be nothing); another forwarding header
/// than the one that is read; a client with a private address that is not trusted (most likely a proxy that is missing from the list).
#[derive(Clone, Debug)]
pub struct ClientIp {
    trusted: Trusted,
    header: ForwardingHeader,
    on_unreadable: OnUnreadable,
    ipv6_prefix: u8,
    told: Arc<Told>,
}

/// The header that proxies write and [`ClientIp`] reads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardingHeader {
    /// `X-Forwarded-For`: a list of addresses.
    XForwardedFor,
    /// `Forwarded` (RFC 7239): a list of elements with the address in `for`.
    Forwarded,
    /// A header that holds one address, such as `CF-Connecting-IP` or `X-Real-IP`: see [`ClientIp::single_header`].
    Single(HeaderName),
    /// A header that holds one address and its port, such as `CloudFront-Viewer-Address`. The port stands behind the last colon, whether an
    /// IPv6 address has brackets or not: `2001:db8::1:443` is `2001:db8::1` with port 443.
    SingleWithPort(HeaderName),
}

/// How a request counts if a trusted proxy wrote a value that holds no address. Defaults to [`Peer`](Self::Peer).
///
/// Proxies write the value, so a client cannot choose it. The usual cause is a header that the proxy writes in another form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnUnreadable {
    /// By the address of the proxy that wrote the value: the other end of the connection, or the last trusted hop of a list.
    /// All clients of that proxy share one quota meanwhile.
    #[default]
    Peer,
    /// The request has no key. A layer answers it by 400 unless its `OnMissingKey` says otherwise.
    Reject,
}

impl ClientIp {
    /// How many entries of a list are read.
    pub const MAX_HOPS: usize = 64;

    /// Believes the proxies in these networks.
    ///
    /// Without any network this is [`ClientIp::peer`]. With `0.0.0.0/0` or `::/0` each client can be believed to be whom it says, which is a
    /// warning in the log; `::/0` holds no IPv4 address, also none that is written as IPv6.
    #[must_use]
    pub fn trusting(proxies: impl IntoIterator<Item = IpNet>) -> Self {
        let trusted = Nets::new(proxies);
        if let Some(net) = trusted.everybody() {
            tracing::warn!(
                %net,
                "ClientIp trusts every address, so each client chooses the one that it counts by: name the networks of your \
                 proxies in `ClientIp::trusting`, and no others"
            );
        }
        Self::of(Trusted::Nets(trusted))
    }

    /// Believes this many proxies, whatever their addresses are.
    ///
    /// The client is the entry at this place of the header, from the right: with 1 the last one, with 2 the one before it. Each proxy
    /// between the client and this service has to append one entry. If there are fewer entries, the leftmost one is the client, and the
    /// other end of the connection if there is none. With a header that holds one address, any number above 0 believes that header.
    /// More than [`MAX_HOPS`](Self::MAX_HOPS) are not believed, and 0 is [`ClientIp::peer`].
    ///
    /// # Risk
    ///
    /// The number cannot tell a proxy from a client. A client that reaches this service around one of the counted hops
    /// **chooses the address that it counts by**. So does every client if the number is too large. Close all ways around the proxies
    /// in the network, or use [`trusting`](Self::trusting) if their networks are known.
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
            told: Arc::default(),
        }
    }

    /// Believes nobody: the client is the other end of the connection, as with [`peer_ip`](super::peer_ip). The log warns
    /// where a forwarding header comes in, which may be a proxy that was forgotten.
    #[must_use]
    pub fn peer() -> Self {
        Self::trusting([])
    }

    /// Reads this header instead.
    ///
    /// It has to be one that your proxies append to or overwrite. If they do not, the client chooses its address.
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

    /// Reads the address from a header that holds no more than that, such as `cf-connecting-ip`, `true-client-ip` or
    /// `x-real-ip`.
    ///
    /// Only a proxy that overwrites it can be believed, and only if there is no way around that proxy. If the header is
    /// missing, the other end of the connection is the client. If it is there more than once or holds anything but one address,
    /// [`on_unreadable`](Self::on_unreadable) says how the request counts.
    ///
    /// `cloudfront-viewer-address` holds a port, too: it is [`SingleWithPort`](ForwardingHeader::SingleWithPort) without being told.
    ///
    /// # Panics
    ///
    /// If `name`, in whatever case, cannot be that of a header: it is part of the program, not of a request.
    #[must_use]
    pub fn single_header(self, name: impl TryInto<HeaderName>) -> Self {
        self.header(ForwardingHeader::Single(header_name(name)))
    }

    /// How a request counts if a trusted proxy wrote a value that holds no address.
    ///
    /// Defaults to [`OnUnreadable::Peer`].
    #[must_use]
    pub const fn on_unreadable(mut self, then: OnUnreadable) -> Self {
        self.on_unreadable = then;
        self
    }

    /// Counts IPv6 addresses by this many of their bits, those of a network that one client has to itself.
    ///
    /// Defaults to 64.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Ipv6PrefixOutOfRange`] unless it is between 32 and 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, ConfigError> {
        let (min, max) = (32, 128);
        if !(min..=max).contains(&bits) {
            return Err(ConfigError::Ipv6PrefixOutOfRange { bits, min, max });
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }

    /// Asks `fallback` where the address is not known: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    /// The address of the client with all its bits, for logs and lists. `None` where the other end of the connection is
    /// not known, and with [`OnUnreadable::Reject`] where a proxy wrote no address.
    pub fn client_ip<B>(&self, request: &Request<B>) -> Option<IpAddr> {
        self.client_in(request.headers(), request.extensions())
    }

    /// The same in a handler that has the body, and the rest of the request. The [key](ExtractKey) of a client is found in that, too.
    ///
    /// ```
    /// # #[cfg(feature = "axum")] {
    /// use axum::{Extension, http::request::Parts};
    /// use tollgate::http::ClientIp;
    /// use tollgate::{ExtractKey, Limiter, MemoryBackend};
    ///
    /// async fn log_in(
    ///     Extension(by_ip): Extension<ClientIp>,
    ///     Extension(strangers): Extension<Limiter<MemoryBackend>>,
    ///     parts: Parts,
    ///     name: String,
    /// ) -> Result<String, String> {
    ///     let Some(client) = by_ip.extract_key(&parts) else { return Err("who is there?".into()) };
    ///     if name != "alice" && !strangers.try_acquire(client).await.unwrap_or(true) {
    ///         return Err("too many".into());
    ///     }
    ///     Ok(format!("{name} comes from {:?}", by_ip.client_ip_of(&parts)))
    /// }
    /// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(log_in));
    /// # }
    /// ```
    pub fn client_ip_of(&self, parts: &Parts) -> Option<IpAddr> {
        self.client_in(&parts.headers, &parts.extensions)
    }

    fn client_in(&self, headers: &HeaderMap, extensions: &Extensions) -> Option<IpAddr> {
        let Some(peer) = key::peer_in(extensions).map(|peer| canonical(peer.ip())) else {
            if self.told.no_peer.first() {
                key::warn_of_no_peer("ClientIp");
            }
            lack::note(key::NO_PEER);
            return None;
        };
        if !self.trusted.hold(peer) {
            self.told.of_ignored(peer, headers, &self.header);
            return Some(peer);
        }
        match self.seen_by(peer, headers) {
            Ok(client) => {
                if client == peer {
                    self.told.of_another(headers, &self.header);
                } else if is_private(client) && !self.trusted.name(client) {
                    self.told.of_private(client);
                }
                Some(client)
            }
            Err(proxy) => {
                self.told.of_unreadable(proxy, headers, &self.header);
                match self.on_unreadable {
                    OnUnreadable::Peer => Some(proxy),
                    OnUnreadable::Reject => None,
                }
            }
        }
    }

    /// Whom the trusted proxies saw, of which `peer` is the last. An error is the proxy that did not write an address.
    fn seen_by(&self, peer: IpAddr, headers: &HeaderMap) -> Result<IpAddr, IpAddr> {
        let mut lines = headers.get_all(self.header.name()).iter().map(HeaderValue::as_bytes);
        let read = match self.header {
            ForwardingHeader::XForwardedFor => {
                return self.walk(peer, lines.rev().flat_map(forwarded::x_forwarded_for));
            }
            ForwardingHeader::Forwarded => return self.walk(peer, lines.rev().flat_map(forwarded::forwarded)),
            ForwardingHeader::Single(_) => forwarded::single,
            ForwardingHeader::SingleWithPort(_) => forwarded::single_with_port,
        };
        match (lines.next(), lines.next()) {
            (None, _) => Ok(peer),
            (Some(line), None) => read(line).ok_or(peer),
            (Some(_), Some(_)) => Err(peer),
        }
    }

    /// Whether a request comes from one of these networks: for lists of clients that are let in, kept out or not counted.
    ///
    /// Compares the whole address of the client, not the network that it counts by. A client whose address is not known is
    /// in none.
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
        move |request| client.client_ip(request).is_some_and(|ip| nets.contain(ip))
    }

    fn key_of(&self, ip: IpAddr) -> Key {
        Key::from(key::network_of(ip, self.ipv6_prefix))
    }

    /// Goes from one hop to whom it saw for as long as the hops are trusted.
    fn walk(&self, peer: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> Result<IpAddr, IpAddr> {
        let mut client = peer;
        for hop in hops.take(self.trusted.most().min(Self::MAX_HOPS)) {
            client = hop.ok_or(client)?;
            if !self.trusted.hold(client) {
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

/// What is left of a request in a handler that has its body.
impl ExtractKey<Parts> for ClientIp {
    fn extract_key(&self, parts: &Parts) -> Option<Key> {
        self.client_ip_of(parts).map(|ip| self.key_of(ip))
    }
}

impl ForwardingHeader {
    pub(super) fn name(&self) -> &HeaderName {
        match self {
            Self::XForwardedFor => &X_FORWARDED_FOR,
            Self::Forwarded => &FORWARDED,
            Self::Single(name) | Self::SingleWithPort(name) => name,
        }
    }
}

/// Which hops are believed.
#[derive(Clone, Debug)]
enum Trusted {
    Nets(Nets),
    Hops(usize),
}

impl Trusted {
    /// Whether this hop is believed; if hops are counted, each is until there are too many.
    fn hold(&self, hop: IpAddr) -> bool {
        matches!(self, Self::Hops(_)) || self.name(hop)
    }

    /// Whether this is known to be the address of a proxy.
    fn name(&self, ip: IpAddr) -> bool {
        matches!(self, Self::Nets(nets) if nets.contain(ip))
    }

    /// How many entries of a list may be read.
    const fn most(&self) -> usize {
        match self {
            Self::Nets(_) => usize::MAX,
            Self::Hops(hops) => *hops,
        }
    }
}

/// Networks that do not overlap, in order.
#[derive(Clone, Debug)]
struct Nets(Arc<[IpNet]>);

impl Nets {
    fn new(nets: impl IntoIterator<Item = IpNet>) -> Self {
        let nets: Vec<IpNet> = nets.into_iter().map(canonical_net).collect();
        let mut nets = IpNet::aggregate(&nets);
        nets.sort_unstable_by_key(IpNet::network);
        Self(nets.into())
    }

    /// The first one that has all addresses of IPv4 or all of IPv6 in it.
    fn everybody(&self) -> Option<&IpNet> {
        self.0.iter().find(|net| net.prefix_len() == 0)
    }

    fn contain(&self, ip: IpAddr) -> bool {
        let after = self.0.partition_point(|net| net.network() <= ip);
        self.0[..after].last().is_some_and(|net| net.contains(&ip))
    }
}

/// A network of IPv4 addresses that are written as IPv6 is one of IPv4.
fn canonical_net(net: IpNet) -> IpNet {
    let mapped = || {
        let IpNet::V6(net) = net else { return None };
        let bits = net.prefix_len().checked_sub(96)?;
        Ipv4Net::new(net.addr().to_ipv4_mapped()?, bits).ok()
    };
    mapped().map_or(net, IpNet::V4)
}

/// Whether networks, taken together, have all addresses of IPv4 or all of IPv6 in them.
#[cfg(feature = "config")]
pub(crate) fn hold_everybody(nets: impl IntoIterator<Item = IpNet>) -> bool {
    Nets::new(nets).everybody().is_some()
}

/// Whether nobody comes from this address over the internet.
pub(super) fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            let shared_by_a_carrier = v4.to_bits() >> 22 == 0x6440_0000 >> 22; // 100.64.0.0/10
            v4.is_private() || v4.is_loopback() || v4.is_link_local() || shared_by_a_carrier
        }
        IpAddr::V6(v6) => v6.is_unique_local() || v6.is_loopback() || v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(list: &[&str]) -> Nets {
        Nets::new(list.iter().map(|net| net.parse().unwrap()))
    }

    #[test]
    fn a_set_of_networks_holds_what_one_of_them_holds() {
        let some =
            nets(&["10.0.0.0/8", "10.1.0.0/16", "192.0.2.128/25", "192.0.2.7/32", "2001:db8::/32", "192.0.2.9/24"]);
        for ip in
            ["10.0.0.0", "10.255.255.255", "10.1.2.3", "192.0.2.0", "192.0.2.255", "2001:db8::", "2001:db8:ffff::1"]
        {
            assert!(some.contain(ip.parse().unwrap()), "{ip}");
        }
        for ip in
            ["9.255.255.255", "11.0.0.0", "192.0.1.255", "192.0.3.0", "2001:db7::", "2001:db9::", "::", "::ffff:0:0"]
        {
            assert!(!some.contain(ip.parse().unwrap()), "{ip}");
        }
        assert!(!nets(&[]).contain("10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn ipv4_and_ipv6_are_never_taken_for_each_other() {
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        let v6: IpAddr = "::1".parse().unwrap();
        assert!(nets(&["::ffff:10.0.0.0/104"]).contain(v4));
        assert!(nets(&["::ffff:0.0.0.0/96"]).contain(v4));
        assert!(nets(&["0.0.0.0/0"]).contain(v4));
        assert!(!nets(&["::/0"]).contain(v4));
        assert!(nets(&["::/0"]).contain(v6));
        assert!(!nets(&["0.0.0.0/0"]).contain(v6));
        assert!(!nets(&["0.0.0.1/32"]).contain(v6));
    }

    #[test]
    fn addresses_that_are_not_of_the_internet_are_known() {
        let private =
            ["10.9.8.7", "172.31.0.1", "192.168.0.1", "127.0.0.2", "169.254.1.1", "100.64.0.0", "100.127.255.255"];
        for ip in private.into_iter().chain(["::1", "fc00::1", "fdff::1", "fe80::1", "febf::1"]) {
            assert!(is_private(ip.parse().unwrap()), "{ip}");
        }
        let public = ["172.32.0.1", "100.63.255.255", "100.128.0.0", "8.8.8.8", "::2", "2001:db8::1", "fec0::1"];
        for ip in public {
            assert!(!is_private(ip.parse().unwrap()), "{ip}");
        }
    }
}
