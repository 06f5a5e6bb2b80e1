//! IP addresses: which addresses are the same, which belong to one client, and which are private.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Converts an IPv4-mapped IPv6 address to IPv4. Other addresses stay as they are: `::1` is not `0.0.0.1`.
#[inline]
pub(super) fn canonical(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// Whether this address is not routable on the internet: private, loopback, link-local or of a carrier-grade NAT.
pub(super) fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            let is_carrier_nat = v4.to_bits() >> 22 == 0x6440_0000 >> 22; // 100.64.0.0/10
            v4.is_private() || v4.is_loopback() || v4.is_link_local() || is_carrier_nat
        }
        IpAddr::V6(v6) => v6.is_unique_local() || v6.is_loopback() || v6.is_unicast_link_local(),
    }
}

/// The default length of the IPv6 prefix that one client controls.
pub(super) const IPV6_PREFIX: u8 = 64;

/// The first 96 bits of an IPv4 address that NAT64 translated to IPv6: 64:ff9b::/96 (RFC 6052).
const NAT64: u128 = 0x0064_ff9b << 64;

/// The address without the bits that one client controls.
#[inline]
pub(super) fn network_of(ip: IpAddr, ipv6_prefix: u8) -> IpAddr {
    // All mapped addresses are in one /64, and so are all translated ones: convert them to IPv4 before the prefix is cut.
    match canonical(ip) {
        IpAddr::V4(v4) => v4.into(),
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
    fn canonical_converts_mapped_addresses_only() {
        let cases = [
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("::1", "::1"),
            ("::", "::"),
            ("::10.0.0.1", "::10.0.0.1"),
            ("64:ff9b::10.0.0.1", "64:ff9b::10.0.0.1"),
            ("10.0.0.1", "10.0.0.1"),
        ];
        for (ip, same) in cases {
            assert_eq!(canonical(ip.parse().unwrap()), same.parse::<IpAddr>().unwrap(), "{ip}");
        }
    }

    #[test]
    fn private_addresses_are_recognized() {
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

    #[test]
    fn ipv6_addresses_of_one_client_share_a_network() {
        let cases = [
            ("203.0.113.7", "203.0.113.7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff::", "2001:db8:1:2::"),
            ("64:ff9b::203.0.113.7", "203.0.113.7"),
            // Other NAT64 prefixes belong to single networks, so they are not converted.
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
        for ipv6 in ["::ffff:203.0.113.7", "64:ff9b::203.0.113.7"] {
            assert_eq!(network_of(ipv6.parse().unwrap(), 32), IpAddr::from([203, 0, 113, 7]));
        }
    }
}
