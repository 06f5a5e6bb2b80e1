//! Clients cannot choose the address under which they are counted: hostile headers, in tables and in more than a million random requests.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use http::header::FORWARDED;
use http::{HeaderName, HeaderValue, Request};
use tollgate::http::{ClientIp, ForwardingHeader, IpNet, OnUnreadable, PeerAddr, peer_ip};
use tollgate::{ConfigError, ExtractKey, Key};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

// Tables.

/// A handler that has taken the body only has the parts of the request.
#[test]
fn request_parts_have_the_client_ip_of_the_request() {
    let by_ip = ClientIp::trusting(["10.0.0.0/8".parse().unwrap()]);
    for (peer, client) in
        [(Some("10.0.0.1:80"), Some("2001:db8::7")), (Some("203.0.113.8:80"), Some("203.0.113.8")), (None, None)]
    {
        let mut request = Request::builder().header(X_FORWARDED_FOR, "2001:db8::7").body(()).unwrap();
        if let Some(peer) = peer {
            request.extensions_mut().insert(PeerAddr(peer.parse().unwrap()));
        }
        let keys = (by_ip.extract_key(&request), peer_ip().extract_key(&request));
        let (parts, ()) = request.into_parts();
        assert_eq!(by_ip.client_ip_of(&parts), client.map(|client| client.parse().unwrap()));
        assert_eq!((by_ip.extract_key(&parts), peer_ip().extract_key(&parts)), keys);
        assert_eq!(keys.0.is_some(), peer.is_some());
    }
}

#[test]
fn x_forwarded_for_is_read_from_the_right_while_trusted() {
    let cases: &[(&[&str], &str)] = &[
        // Common cases.
        (&[], "10.0.0.1"),
        (&["203.0.113.7"], "203.0.113.7"),
        (&["203.0.113.7, 10.0.0.2"], "203.0.113.7"),
        (&["203.0.113.7,10.0.0.3,\t10.0.0.2 "], "203.0.113.7"),
        (&["203.0.113.7:4711, 10.0.0.2:80"], "203.0.113.7"),
        (&["[2001:db8::7]:4711, [fd00::2]"], "2001:db8::7"),
        (&["2001:db8::7, fd00::2"], "2001:db8::7"),
        (&["\"203.0.113.7\", \"10.0.0.2:80\""], "203.0.113.7"),
        // The values that a client sends are left of its address.
        (&["6.6.6.6, 203.0.113.7"], "203.0.113.7"),
        (&["10.0.0.9, 203.0.113.7, 10.0.0.2"], "203.0.113.7"),
        (&["\"6.6.6.6, 203.0.113.7"], "203.0.113.7"),
        (&["garbage, 203.0.113.7, 10.0.0.2"], "203.0.113.7"),
        // All lines count, in their order.
        (&["6.6.6.6", "203.0.113.7"], "203.0.113.7"),
        (&["6.6.6.6, 203.0.113.7", "10.0.0.3, 10.0.0.2"], "203.0.113.7"),
        (&["6.6.6.6", "203.0.113.7", "10.0.0.2"], "203.0.113.7"),
        (&["", "203.0.113.7"], "203.0.113.7"),
        // If all addresses are trusted, the leftmost counts.
        (&["10.0.0.9"], "10.0.0.9"),
        (&["10.0.0.9, 10.0.0.3", "fd00::2"], "10.0.0.9"),
        // An entry without a readable address ends the search.
        (&["6.6.6.6, unknown"], "10.0.0.1"),
        (&["6.6.6.6, unknown, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6, _hidden, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6, fe80::1%eth0, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6, [fe80::1%eth0]:80, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6,, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6,"], "10.0.0.1"),
        (&["6.6.6.6", ""], "10.0.0.1"),
        (&["6.6.6.6", " ", "10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6, 10.0.0.256, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6, 010.0.0.3, 10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6, 10.0.0.2 10.0.0.3"], "10.0.0.1"),
        (&["6.6.6.6; 10.0.0.2"], "10.0.0.1"),
        (&["6.6.6.6, for=10.0.0.2"], "10.0.0.1"),
        (&["6.6.6.6, ２.2.2.2, 10.0.0.2"], "10.0.0.2"),
        // IPv4-mapped IPv6 addresses, and addresses that only look like them.
        (&["6.6.6.6, ::ffff:203.0.113.7, ::ffff:10.0.0.2"], "203.0.113.7"),
        (&["6.6.6.6, [::ffff:a00:2]:80"], "6.6.6.6"),
        (&["6.6.6.6, ::10.0.0.2"], "::10.0.0.2"),
        (&["6.6.6.6, ::1"], "::1"),
    ];
    for &(lines, client) in cases {
        let request = request("10.0.0.1", &X_FORWARDED_FOR, lines);
        assert_eq!(proxied().client_ip(&request), Some(ip(client)), "{lines:?}");
    }
}

#[test]
fn forwarded_is_read_by_its_own_grammar() {
    let cases: &[(&[&str], &str)] = &[
        (&["for=203.0.113.7;proto=https;by=10.0.0.1"], "203.0.113.7"),
        (&["for=6.6.6.6, FOR=\"[2001:db8::7]:4711\";host=\"a,b\", for=10.0.0.2"], "2001:db8::7"),
        (&["for=6.6.6.6", "for=203.0.113.7", "for=10.0.0.2"], "203.0.113.7"),
        (&["for=\"", "for=203.0.113.7"], "203.0.113.7"),
        (&["for=\", for=203.0.113.7"], "203.0.113.7"),
        (&["for=6.6.6.6, proto=https"], "10.0.0.1"),
        (&["for=6.6.6.6, for=unknown, for=10.0.0.2"], "10.0.0.2"),
        (&["for=6.6.6.6, for=\"_hidden\""], "10.0.0.1"),
        (&["for=6.6.6.6, for=10.0.0.2;for=10.0.0.3"], "10.0.0.1"),
        (&["203.0.113.7"], "10.0.0.1"),
        (&[r#"for=203.0.113.7;host="\", for=6.6.6.6;x=\"""#], "203.0.113.7"),
    ];
    let by_ip = proxied().header(ForwardingHeader::Forwarded);
    for &(lines, client) in cases {
        assert_eq!(by_ip.client_ip(&request("10.0.0.1", &FORWARDED, lines)), Some(ip(client)), "{lines:?}");
    }
}

#[test]
fn single_header_counts_only_with_one_address() {
    let name = HeaderName::from_static("cf-connecting-ip");
    let by_ip = proxied().single_header("cf-connecting-ip");
    let cases: &[(&[&str], &str)] = &[
        (&["203.0.113.7"], "203.0.113.7"),
        (&[" [2001:db8::7]:443 "], "2001:db8::7"),
        (&["::ffff:203.0.113.7"], "203.0.113.7"),
        (&[], "10.0.0.1"),
        (&[""], "10.0.0.1"),
        (&["unknown"], "10.0.0.1"),
        (&["6.6.6.6, 203.0.113.7"], "10.0.0.1"),
        (&["6.6.6.6", "203.0.113.7"], "10.0.0.1"),
        (&["203.0.113.7", "203.0.113.7"], "10.0.0.1"),
    ];
    for &(lines, client) in cases {
        assert_eq!(by_ip.client_ip(&request("10.0.0.1", &name, lines)), Some(ip(client)), "{lines:?}");
        assert_eq!(by_ip.client_ip(&request("192.0.2.1", &name, lines)), Some(ip("192.0.2.1")), "{lines:?}");
    }
}

#[test]
fn only_the_chosen_header_is_read() {
    let mut request = request("10.0.0.1", &X_FORWARDED_FOR, &["203.0.113.1"]);
    request.headers_mut().insert(FORWARDED, HeaderValue::from_static("for=203.0.113.2"));
    request.headers_mut().insert("x-real-ip", HeaderValue::from_static("203.0.113.3"));
    let found = |by_ip: ClientIp| by_ip.client_ip(&request);
    assert_eq!(found(proxied()), Some(ip("203.0.113.1")));
    assert_eq!(found(proxied().header(ForwardingHeader::XForwardedFor)), Some(ip("203.0.113.1")));
    assert_eq!(found(proxied().header(ForwardingHeader::Forwarded)), Some(ip("203.0.113.2")));
    assert_eq!(found(proxied().single_header("x-real-ip")), Some(ip("203.0.113.3")));
    assert_eq!(found(proxied().single_header("X-Real-IP")), Some(ip("203.0.113.3")), "in any letter case");
    assert_eq!(found(proxied().single_header("true-client-ip")), Some(ip("10.0.0.1")));
}

#[test]
fn untrusted_peer_is_the_client_whatever_its_headers() {
    for peer in ["192.0.2.1", "::ffff:192.0.2.1", "::10.0.0.1", "::1", "11.0.0.1"] {
        let request = request(peer, &X_FORWARDED_FOR, &["203.0.113.7, 10.0.0.1"]);
        let peer = if peer.starts_with("::ffff") { "192.0.2.1" } else { peer };
        for by_ip in [proxied(), ClientIp::peer(), ClientIp::trusting([])] {
            assert_eq!(by_ip.client_ip(&request), Some(ip(peer)));
        }
    }
    let mapped = request("::ffff:10.0.0.1", &X_FORWARDED_FOR, &["203.0.113.7"]);
    assert_eq!(proxied().client_ip(&mapped), Some(ip("203.0.113.7")));
    assert_eq!(ClientIp::peer().client_ip(&mapped), Some(ip("10.0.0.1")));
}

#[test]
fn chain_is_followed_for_at_most_max_hops() {
    let chain = |proxies: usize| format!("203.0.113.7{}", ", 10.0.0.2".repeat(proxies));
    let found = |proxies| proxied().client_ip(&request("10.0.0.1", &X_FORWARDED_FOR, &[&chain(proxies)]));
    assert_eq!(found(ClientIp::MAX_HOPS - 1), Some(ip("203.0.113.7")));
    assert_eq!(found(ClientIp::MAX_HOPS), Some(ip("10.0.0.2")));
}

#[test]
fn request_without_a_peer_has_no_client_ip() {
    let mut request = Request::new(());
    request.headers_mut().insert(X_FORWARDED_FOR, HeaderValue::from_static("203.0.113.7"));
    assert_eq!(proxied().client_ip(&request), None);
    assert_eq!(proxied().extract_key(&request), None);
    assert_eq!(proxied().or(|_: &Request<()>| "nobody").extract_key(&request).unwrap().as_str(), "~nobody");
    assert!(!proxied().within(["0.0.0.0/0".parse().unwrap()])(&request));
}

#[test]
fn peer_of_axum_is_found() {
    use axum::extract::ConnectInfo;
    use axum::extract::connect_info::MockConnectInfo;
    let peer: SocketAddr = "10.0.0.1:4711".parse().unwrap();
    let request = || Request::builder().header(X_FORWARDED_FOR, "203.0.113.7");
    for request in [request().extension(ConnectInfo(peer)), request().extension(MockConnectInfo(peer))] {
        assert_eq!(proxied().client_ip(&request.body(()).unwrap()), Some(ip("203.0.113.7")));
    }
}

#[test]
fn key_is_the_network_of_one_client() {
    let key = |by_ip: &ClientIp, client: &str| {
        by_ip.extract_key(&request("10.0.0.1", &X_FORWARDED_FOR, &[client])).unwrap().as_str().to_owned()
    };
    let by_64 = proxied();
    assert_eq!(key(&by_64, "2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    assert_eq!(key(&by_64, "203.0.113.7"), "203.0.113.7");
    assert_eq!(key(&by_64, "::ffff:203.0.113.7"), "203.0.113.7");
    let by_56 = proxied().ipv6_prefix(56).unwrap();
    assert_eq!(key(&by_56, "2001:db8:1:2ff:3::"), "2001:db8:1:200::");
    assert_eq!(key(&by_56, "::ffff:203.0.113.7"), "203.0.113.7");
    assert_eq!(key(&proxied().ipv6_prefix(128).unwrap(), "2001:db8::5:6"), "2001:db8::5:6");
    assert_eq!(key(&proxied().ipv6_prefix(32).unwrap(), "2001:db8:1::"), "2001:db8::");
    for bits in [0, 31, 129, 255] {
        let error = proxied().ipv6_prefix(bits).unwrap_err();
        assert_eq!(error, ConfigError::Ipv6PrefixOutOfRange { bits, min: 32, max: 128 });
        assert_eq!(error.to_string(), format!("an IPv6 prefix of {bits} bits is not between 32 and 128"));
    }
}

#[test]
fn trusting_no_proxy_counts_like_peer_ip() {
    for peer in ["203.0.113.7", "::ffff:203.0.113.7", "2001:db8:1:2:3:4:5:6", "::1"] {
        let request = request(peer, &X_FORWARDED_FOR, &["6.6.6.6"]);
        assert_eq!(ClientIp::peer().extract_key(&request), peer_ip().extract_key(&request), "{peer}");
    }
}

/// Regression: all IPv6 clients of CloudFront had one quota, because CloudFront writes the port behind the address without brackets.
#[test]
fn cloudfront_viewer_address_is_read_in_each_of_its_forms() {
    let name = HeaderName::from_static("cloudfront-viewer-address");
    let cases = [
        ("198.51.100.10:46532", "198.51.100.10"),
        ("2001:db8:a::1:50001", "2001:db8:a::1"),
        ("2001:db8:a::1:443", "2001:db8:a::1"),
        ("2001:db8:b::1:1", "2001:db8:b::1"),
        ("2001:db8:1:2:3:4:5:6:50001", "2001:db8:1:2:3:4:5:6"),
        ("2001:db8:1:2:3:4:5:6:443", "2001:db8:1:2:3:4:5:6"),
        ("1::2:3:4:5:6:443", "1::2:3:4:5:6"),
        ("::1:65535", "::1"),
        ("[2001:db8:a::1]:50001", "2001:db8:a::1"),
        ("::ffff:203.0.113.7:443", "203.0.113.7"),
        // A value without a port is not valid.
        ("198.51.100.10", "10.0.0.1"),
        ("2001:db8:a::", "10.0.0.1"),
        ("[2001:db8:a::1]", "10.0.0.1"),
        ("2001:db8:a::1:65536", "10.0.0.1"),
        ("2001:db8:a::1:abcd", "10.0.0.1"),
    ];
    let by_ips = [
        proxied().single_header("CloudFront-Viewer-Address"),
        proxied().header(ForwardingHeader::Single(name.clone())),
        proxied().header(ForwardingHeader::SingleWithPort(name.clone())),
    ];
    for (by_ip, (value, client)) in by_ips.iter().flat_map(|by_ip| cases.iter().map(move |case| (by_ip, *case))) {
        assert_eq!(by_ip.client_ip(&request("10.0.0.1", &name, &[value])), Some(ip(client)), "{value}");
    }
    let keys = |by_ip: &ClientIp| {
        let values = ["2001:db8:a::1:50001", "2001:db8:b::1:50001", "2001:db8:c::1:50001", "2001:db8:d::1:50001"];
        values.map(|value| by_ip.extract_key(&request("10.0.0.1", &name, &[value])).unwrap())
    };
    let [a, b, c, d] = keys(&by_ips[0]);
    assert!(a != b && b != c && c != d && a != d);
}

/// The forms in the table of proxies in the docs of `http`.
#[test]
fn forms_of_the_major_proxies_are_read() {
    let header = HeaderName::from_static;
    let cases = [
        // Application Load Balancer, with default settings and with client port preservation.
        ("x-forwarded-for", "6.6.6.6, 203.0.113.7", "203.0.113.7"),
        ("x-forwarded-for", "6.6.6.6, 203.0.113.7:8080", "203.0.113.7"),
        ("x-forwarded-for", "6.6.6.6, 2001:db8::21f:5bff:febf:ce22:8a2e", "2001:db8::21f:5bff:febf:ce22:8a2e"),
        ("x-forwarded-for", "6.6.6.6, [2001:db8::8a2e]:8080", "2001:db8::8a2e"),
        // Google: the last entry is the load balancer itself, which is in a trusted network here.
        ("x-forwarded-for", "6.6.6.6,203.0.113.7,10.0.0.2", "203.0.113.7"),
        // Application Gateway: an address and a port.
        ("x-forwarded-for", "203.0.113.7:50001", "203.0.113.7"),
        ("x-forwarded-for", "2001:db8::7:50001", "2001:db8::7"),
        ("x-azure-socketip", "2001:db8::7", "2001:db8::7"),
        ("cf-connecting-ip", "2001:db8::7", "2001:db8::7"),
        ("fastly-client-ip", "203.0.113.7", "203.0.113.7"),
        ("true-client-ip", "203.0.113.7", "203.0.113.7"),
        ("x-envoy-external-address", "203.0.113.7", "203.0.113.7"),
        ("x-real-ip", "2001:db8::7", "2001:db8::7"),
        ("forwarded", "for=6.6.6.6, for=\"[2001:db8::7]:50001\";proto=https", "2001:db8::7"),
    ];
    for (name, value, client) in cases {
        let by_ip = match name {
            "x-forwarded-for" => proxied(),
            "forwarded" => proxied().header(ForwardingHeader::Forwarded),
            name => proxied().single_header(name),
        };
        assert_eq!(by_ip.client_ip(&request("10.0.0.1", &header(name), &[value])), Some(ip(client)), "{name}: {value}");
    }
}

#[test]
fn port_is_at_most_65535() {
    for (entry, client) in [
        ("203.0.113.7:65535", "203.0.113.7"),
        ("203.0.113.7:0", "203.0.113.7"),
        ("203.0.113.7:00080", "203.0.113.7"),
        ("203.0.113.7:65536", "10.0.0.1"),
        ("203.0.113.7:99999", "10.0.0.1"),
        ("203.0.113.7:+80", "10.0.0.1"),
        ("[2001:db8::7]:65535", "2001:db8::7"),
        ("[2001:db8::7]:65536", "10.0.0.1"),
        ("[203.0.113.7]:80", "10.0.0.1"),
    ] {
        assert_eq!(proxied().client_ip(&request("10.0.0.1", &X_FORWARDED_FOR, &[entry])), Some(ip(client)), "{entry}");
        let forwarded = format!("for=\"{entry}\"");
        let by_ip = proxied().header(ForwardingHeader::Forwarded);
        assert_eq!(by_ip.client_ip(&request("10.0.0.1", &FORWARDED, &[&forwarded])), Some(ip(client)), "{forwarded}");
    }
}

#[test]
fn on_unreadable_reject_rejects_unreadable_values() {
    let strict = proxied().on_unreadable(OnUnreadable::Reject);
    let cases: &[(&[&str], Option<&str>)] = &[
        (&[], Some("10.0.0.1")),
        (&["203.0.113.7"], Some("203.0.113.7")),
        (&["garbage, 203.0.113.7"], Some("203.0.113.7")),
        (&["10.0.0.2"], Some("10.0.0.2")),
        (&["unknown"], None),
        (&["6.6.6.6, unknown, 10.0.0.2"], None),
        (&["203.0.113.7:70000"], None),
        (&[""], None),
    ];
    for &(lines, client) in cases {
        let request = request("10.0.0.1", &X_FORWARDED_FOR, lines);
        assert_eq!(strict.client_ip(&request), client.map(ip), "{lines:?}");
        assert_eq!(strict.extract_key(&request), client.map(|client| Key::from(ip(client))), "{lines:?}");
        let ours = proxied().on_unreadable(OnUnreadable::Proxy).client_ip(&request);
        assert_eq!(ours, proxied().client_ip(&request), "the default");
    }
    let single = strict.clone().single_header("x-real-ip");
    let real_ip = HeaderName::from_static("x-real-ip");
    for (lines, client) in [
        (&["x"][..], None),
        (&["203.0.113.7", "203.0.113.7"], None),
        (&["203.0.113.7"], Some("203.0.113.7")),
        (&[], Some("10.0.0.1")),
    ] {
        assert_eq!(single.client_ip(&request("10.0.0.1", &real_ip, lines)), client.map(ip), "{lines:?}");
    }
    assert_eq!(single.client_ip(&request("192.0.2.1", &real_ip, &["x"])), Some(ip("192.0.2.1")), "not from a proxy");
}

#[test]
fn trusted_hops_are_counted_from_the_right() {
    let cases: &[(usize, &[&str], &str)] = &[
        (0, &["203.0.113.7"], "192.0.2.1"),
        (1, &["203.0.113.7"], "203.0.113.7"),
        (1, &["6.6.6.6, 203.0.113.7"], "203.0.113.7"),
        (2, &["6.6.6.6, 203.0.113.7, 198.51.100.1"], "203.0.113.7"),
        (2, &["6.6.6.6", "203.0.113.7", "198.51.100.1"], "203.0.113.7"),
        (2, &["6.6.6.6, 2001:db8::7, [2001:db8::1]:80"], "2001:db8::7"),
        // Fewer hops than configured.
        (2, &["203.0.113.7"], "203.0.113.7"),
        (2, &[], "192.0.2.1"),
        // An unreadable hop.
        (2, &["6.6.6.6, unknown"], "192.0.2.1"),
        (2, &["unknown, 198.51.100.1"], "198.51.100.1"),
        (usize::MAX, &["6.6.6.6, 203.0.113.7"], "6.6.6.6"),
    ];
    for &(hops, lines, client) in cases {
        let by_ip = ClientIp::trusting_hops(hops);
        assert_eq!(
            by_ip.client_ip(&request("192.0.2.1", &X_FORWARDED_FOR, lines)),
            Some(ip(client)),
            "{hops}: {lines:?}"
        );
    }
    let long = format!("203.0.113.7{}", ", 10.0.0.2".repeat(ClientIp::MAX_HOPS));
    let by_ip = ClientIp::trusting_hops(usize::MAX);
    assert_eq!(by_ip.client_ip(&request("192.0.2.1", &X_FORWARDED_FOR, &[&long])), Some(ip("10.0.0.2")));
    let by_ip = ClientIp::trusting_hops(1).single_header("true-client-ip");
    let name = HeaderName::from_static("true-client-ip");
    assert_eq!(by_ip.client_ip(&request("192.0.2.1", &name, &["203.0.113.7"])), Some(ip("203.0.113.7")));
}

#[test]
fn list_of_networks_matches_the_whole_address() {
    let listed = proxied().within(nets(&["203.0.113.0/24", "2001:db8:1:2:3::/80"]));
    let listed = listed.clone();
    let cases = [
        ("203.0.113.7", true),
        ("::ffff:203.0.113.7", true),
        ("203.0.114.7", false),
        ("2001:db8:1:2:3:4:5:6", true),
        ("2001:db8:1:2:4:4:5:6", false),
    ];
    for (client, is_listed) in cases {
        assert_eq!(listed(&request("10.0.0.1", &X_FORWARDED_FOR, &[client])), is_listed, "{client}");
        assert_eq!(listed(&request(client, &X_FORWARDED_FOR, &["203.0.113.9"])), is_listed, "{client}");
    }
}

#[test]
fn huge_headers_cost_little() {
    let million = |text: &str| text.repeat((1 << 20) / text.len());
    let values = [
        "10.0.0.2,".repeat(10_000),
        million("10.0.0.2,"),
        million("1"),
        million(","),
        million(" "),
        million("\""),
        million("\\"),
        million("\\\""),
        million("\\\\\""),
        million(";"),
        million("="),
        million("for=10.0.0.2,"),
        million("for=10.0.0.2;"),
        million("a=b;"),
        million("a=\"\";"),
        format!("for=\"{}\"", million("\\a")),
        format!("x=\"{}\";for=10.0.0.2", million("\\\"")),
        format!("\"{}", million("a,")),
    ];
    let readers = [proxied(), proxied().header(ForwardingHeader::Forwarded), proxied().single_header("x-real-ip")];
    let names = [X_FORWARDED_FOR, FORWARDED, HeaderName::from_static("x-real-ip")];
    for (by_ip, name) in readers.iter().zip(&names) {
        for value in &values {
            let request = request("10.0.0.1", name, &[value]);
            let start = Instant::now();
            assert!(by_ip.client_ip(&request).is_some());
            let took = start.elapsed();
            let piece = &value[..20.min(value.len())];
            // For a debug build on a busy machine. A quadratic algorithm would take hours.
            assert!(took < Duration::from_secs(2), "{name}: {piece} took {took:?}");
        }
        let lines = vec!["for=10.0.0.2"; 20_000];
        let request = request("10.0.0.1", name, &lines);
        let start = Instant::now();
        assert!(by_ip.client_ip(&request).is_some());
        assert!(start.elapsed() < Duration::from_millis(500));
    }
}

// Random requests: 1,600,000 in all.

#[test]
fn client_cannot_precede_proxies_in_x_forwarded_for() {
    let by_ip = proxied();
    let mut random = Random(0x5eed_0001);
    for _ in 0..400_000 {
        let client = random.client();
        let mut lines = random.lines();
        let peer = random.chain(client, &mut lines, |random, saw| match (random.below(6), saw) {
            (0, IpAddr::V4(v4)) => format!("{v4}:{}", random.below(65_536)),
            (1, IpAddr::V6(v6)) => format!("[{v6}]:{}", random.below(65_536)),
            (2, IpAddr::V6(v6)) => format!("[{v6}]"),
            (3, IpAddr::V4(v4)) => v4.to_ipv6_mapped().to_string(),
            (4, saw) => format!("\"{saw}\""),
            (_, saw) => saw.to_string(),
        });
        let request = raw_request(peer, &X_FORWARDED_FOR, &lines);
        assert_eq!(by_ip.client_ip(&request), Some(client), "{request:?}");
    }
}

#[test]
fn client_cannot_precede_proxies_in_forwarded() {
    let by_ip = proxied().header(ForwardingHeader::Forwarded);
    let mut random = Random(0x5eed_0002);
    for _ in 0..400_000 {
        let client = random.client();
        let mut lines = random.lines();
        // The client also chooses the values that the proxies copy into `host`.
        let peer = random.chain(client, &mut lines, |random, saw| {
            let said = match (random.below(3), saw) {
                (0, IpAddr::V4(v4)) => v4.to_string(),
                (1, IpAddr::V6(v6)) => format!("\"[{v6}]:{}\"", random.below(65_536)),
                (_, IpAddr::V6(v6)) => format!("\"[{v6}]\""),
                (_, saw) => format!("\"{saw}:{}\"", random.below(65_536)),
            };
            let name = ["for", "For", "FOR"][random.below(3)];
            let mut pairs = vec![format!("{name}={said}")];
            for other in ["host", "by", "proto"] {
                if random.below(3) == 0 {
                    let copied = String::from_utf8_lossy(&random.soup()).replace('\\', "\\\\").replace('"', "\\\"");
                    let at = random.below(pairs.len() + 1);
                    pairs.insert(at, format!("{other}=\"{copied}\""));
                }
            }
            pairs.join([";", "; "][random.below(2)])
        });
        let request = raw_request(peer, &FORWARDED, &lines);
        assert_eq!(by_ip.client_ip(&request), Some(client), "{request:?}");
    }
}

#[test]
fn headers_of_an_untrusted_peer_change_nothing() {
    let real_ip = HeaderName::from_static("x-real-ip");
    let readers = [proxied(), proxied().header(ForwardingHeader::Forwarded), proxied().single_header("x-real-ip")];
    let mut random = Random(0x5eed_0003);
    for _ in 0..200_000 {
        let client = random.client();
        let mut request = raw_request(client, &X_FORWARDED_FOR, &random.lines());
        for name in [&FORWARDED, &real_ip] {
            for line in random.lines() {
                request.headers_mut().append(name, HeaderValue::from_bytes(&line).unwrap());
            }
        }
        let by_ip = &readers[random.below(3)];
        assert_eq!(by_ip.client_ip(&request), Some(client), "{request:?}");
    }
}

#[test]
fn forwarded_headers_match_a_reference_parser() {
    let real_ip = HeaderName::from_static("x-real-ip");
    let (by_list, by_single) = (proxied(), proxied().single_header("x-real-ip"));
    let by_forwarded = proxied().header(ForwardingHeader::Forwarded);
    let trusted = nets(PROXIES);
    let mut random = Random(0x5eed_0004);
    let peer = ip("10.0.0.1");
    for _ in 0..200_000 {
        let lines = random.lines();
        let request = raw_request(peer, &X_FORWARDED_FOR, &lines);
        let mut client = peer;
        for entry in lines.join(&b","[..]).split(|byte| *byte == b',').rev() {
            if lines.is_empty() {
                break;
            }
            let Some(saw) = plainly(entry) else { break };
            client = saw;
            if !trusted.iter().any(|net| net.contains(&saw)) {
                break;
            }
        }
        assert_eq!(by_list.client_ip(&request), Some(client), "{request:?}");

        let request = raw_request(peer, &real_ip, &lines);
        let only = if let [line] = &lines[..] { plainly(line) } else { None };
        assert_eq!(by_single.client_ip(&request), Some(only.unwrap_or(peer)), "{request:?}");

        // There is no reference parser for this field. There must be a result, and key and address must agree.
        let request = raw_request(peer, &FORWARDED, &lines);
        let client = by_forwarded.client_ip(&request).unwrap();
        if client.is_ipv4() {
            assert_eq!(by_forwarded.extract_key(&request), Some(Key::from(client)));
        }
    }
}

const PROXIES: &[&str] = &["10.0.0.0/8", "fd00::/8"];

fn proxied() -> ClientIp {
    ClientIp::trusting(nets(PROXIES))
}

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn request(peer: &str, name: &HeaderName, lines: &[&str]) -> Request<()> {
    let lines: Vec<_> = lines.iter().map(|line| line.as_bytes().to_vec()).collect();
    raw_request(ip(peer), name, &lines)
}

fn raw_request(peer: IpAddr, name: &HeaderName, lines: &[Vec<u8>]) -> Request<()> {
    let mut request = Request::new(());
    request.extensions_mut().insert(PeerAddr(SocketAddr::new(peer, 4711)));
    for line in lines {
        request.headers_mut().append(name, HeaderValue::from_bytes(line).unwrap());
    }
    request
}

/// A simple reference parser of an address.
fn plainly(entry: &[u8]) -> Option<IpAddr> {
    let text = String::from_utf8(entry.to_vec()).ok()?;
    let text = text.trim_matches([' ', '\t']);
    let text =
        if text.len() > 1 && text.starts_with('"') && text.ends_with('"') { &text[1..text.len() - 1] } else { text };
    let bracketed = |text: &str| text.strip_prefix('[')?.strip_suffix(']')?.parse().ok().filter(IpAddr::is_ipv6);
    let with_port = || {
        let (ip, port) = text.rsplit_once(':')?;
        let number = port.len() <= 5 && port.bytes().all(|b| b.is_ascii_digit());
        let name = port.starts_with('_') && port.len() > 1;
        let name = name && port.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        let number = number && port.parse::<u16>().is_ok();
        let ip = bracketed(ip).or_else(|| ip.parse().ok());
        ip.filter(|_| name || number)
    };
    let ip = text.parse().ok().or_else(|| bracketed(text)).or_else(with_port)?;
    Some(ip.to_canonical())
}

/// SplitMix64: the same requests in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// An address that does not belong to a proxy.
    fn client(&mut self) -> IpAddr {
        let bits = self.next();
        if bits & 1 == 0 {
            IpAddr::from([203, bits as u8 >> 4, (bits >> 8) as u8, (bits >> 16) as u8])
        } else {
            IpAddr::from([0x2001, 0xdb8, (bits >> 8) as u16, 0, 0, (bits >> 24) as u16, 0, (bits >> 40) as u16])
        }
    }

    fn proxy(&mut self) -> IpAddr {
        let bits = self.next();
        if bits & 3 > 0 {
            IpAddr::from([10, 0, 0, (bits >> 8) as u8])
        } else {
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, (bits >> 8) as u16])
        }
    }

    /// The lines that a client sends, most of them nearly valid.
    fn lines(&mut self) -> Vec<Vec<u8>> {
        (0..self.below(4)).map(|_| self.soup()).collect()
    }

    fn soup(&mut self) -> Vec<u8> {
        const PIECES: &[&[u8]] = &[
            b",",
            b",",
            b", ",
            b";",
            b"=",
            b"\"",
            b"\"",
            b"\\",
            b"\\\"",
            b" ",
            b"\t",
            b":",
            b"[",
            b"]",
            b"%",
            b"_",
            b"1",
            b"for=",
            b"For=\"",
            b"for=6.6.6.6",
            b"host=",
            b"proto=https",
            b"by=\"",
            b"6.6.6.6",
            b"10.0.0.9",
            b"10.0.0.8",
            b"fd00::9",
            b"[fd00::9]:80",
            b"2001:db8:6::6",
            b"[2001:db8:6::6]",
            b"[2001:db8:6::6]:443",
            b"::ffff:10.0.0.9",
            b"6.6.6.6:80",
            b"\"6.6.6.6\"",
            b"\"10.0.0.9:80\"",
            b"unknown",
            b"_hidden",
            b"fe80::1%eth0",
            b"::1",
            b"0",
            b"for=10.0.0.9",
            b"for=\"[fd00::9]\"",
            b"for=unknown",
            b"\xff",
            b"\xc3\xa9",
            b"a",
        ];
        let mut text = Vec::new();
        for _ in 0..self.below(12) {
            text.extend_from_slice(PIECES[self.below(PIECES.len())]);
        }
        text
    }

    /// Sends the lines of a client through one to four proxies, each of which appends the address that it saw. Returns the address of the
    /// last proxy.
    fn chain(&mut self, client: IpAddr, lines: &mut Vec<Vec<u8>>, say: impl Fn(&mut Self, IpAddr) -> String) -> IpAddr {
        let mut saw = client;
        for _ in 0..=self.below(4) {
            let said = say(self, saw);
            let same_line = self.below(2) == 0;
            match lines.last_mut() {
                Some(line) if same_line => {
                    line.extend_from_slice([&b","[..], b", "][self.below(2)]);
                    line.extend_from_slice(said.as_bytes());
                }
                _ => lines.push(said.into_bytes()),
            }
            saw = self.proxy();
        }
        saw
    }
}
