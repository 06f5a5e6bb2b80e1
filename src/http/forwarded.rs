//! Parses `X-Forwarded-For` and `Forwarded` from the right.
//!
//! The rightmost entry comes from the nearest proxy. Entries to its left may be forged, so they must not change how it parses.

use std::net::{IpAddr, Ipv6Addr};

use super::address::canonical;

/// The maximum length of an address with brackets and a port, with a margin.
const MAX_ADDRESS: usize = 64;

/// The maximum length of an element of `X-Forwarded-For`, including whitespace. A longer element is unreadable.
const MAX_ELEMENT: usize = 128;

/// The hops of a line of `X-Forwarded-For`, last first. `None` stands for an entry without an address.
///
/// Every comma separates entries, also inside quotes. So an unclosed quote from a client cannot hide the entry that a proxy appends.
pub(super) fn x_forwarded_for(line: &[u8]) -> impl Iterator<Item = Option<IpAddr>> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest.take()?;
        let window = line.len().saturating_sub(MAX_ELEMENT);
        match line[window..].iter().rposition(|byte| *byte == b',') {
            Some(comma) => {
                rest = Some(&line[..window + comma]);
                Some(single(&line[window + comma + 1..]))
            }
            None if window > 0 => Some(None),
            None => Some(single(line)),
        }
    })
}

/// The hops of a line of `Forwarded` (RFC 7239), last first. `None` stands for an element without an address.
///
/// Quoted strings may hold commas. They are also parsed from the right: the opening quote is the nearest one to the left that no backslash
/// escapes. So a well-formed element parses in the same way, whatever is to its left. An unpaired quote makes its element and all elements
/// to the left unreadable.
pub(super) fn forwarded(line: &[u8]) -> impl Iterator<Item = Option<IpAddr>> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest.take()?;
        let mut start = line.len();
        while let Some(at) = line[..start].iter().rposition(|byte| matches!(byte, b',' | b'"')) {
            if line[at] == b',' {
                rest = Some(&line[..at]);
                return Some(element(&line[at + 1..]));
            }
            let Some(opening) = opening_quote(&line[..at]) else { return Some(None) };
            start = opening;
        }
        Some(element(line))
    })
}

/// The address of a header value that holds nothing else.
pub(super) fn single(value: &[u8]) -> Option<IpAddr> {
    address(unquoted(value))
}

/// The address of a header value that holds an address and a port.
pub(super) fn single_with_port(value: &[u8]) -> Option<IpAddr> {
    without_port(text(unquoted(value))?).map(canonical)
}

fn unquoted(value: &[u8]) -> &[u8] {
    let value = value.trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// The position of the quote that opens the quoted string which ends after `text`.
fn opening_quote(text: &[u8]) -> Option<usize> {
    let mut end = text.len();
    loop {
        let quote = text[..end].iter().rposition(|byte| *byte == b'"')?;
        let escapes = text[..quote].iter().rev().take_while(|byte| **byte == b'\\').count();
        if escapes % 2 == 0 {
            return Some(quote);
        }
        end = quote - escapes;
    }
}

/// The address in the parameter `for` of a well-formed element.
///
/// More lenient than the grammar in two ways, because some proxies need it: whitespace around semicolons, and unquoted values that should be
/// quoted, such as `for=[2001:db8::1]`.
fn element(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = element.trim_ascii();
    while !rest.is_empty() {
        if rest[0] != b';' {
            let (name, value) = rest.split_at(rest.iter().position(|byte| *byte == b'=')?);
            if name.is_empty() || !name.iter().all(is_token) {
                return None;
            }
            let value = &value[1..];
            let value_end = value_end(value)?;
            if name.eq_ignore_ascii_case(b"for") && found.replace(node(&value[..value_end])?).is_some() {
                return None;
            }
            rest = value[value_end..].trim_ascii_start();
            if rest.first().is_some_and(|byte| *byte != b';') {
                return None;
            }
        }
        rest = rest.get(1..).unwrap_or_default().trim_ascii_start();
    }
    found
}

/// The end of the parameter value at the start of `text`.
fn value_end(text: &[u8]) -> Option<usize> {
    if text.first() != Some(&b'"') {
        let end = text.iter().position(|byte| !is_plain(byte)).unwrap_or(text.len());
        return (end > 0).then_some(end);
    }
    let mut escaped = false;
    let closing = text.iter().skip(1).position(|byte| {
        let closes = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        closes
    })?;
    Some(closing + 2)
}

/// The address in the value of `for`, quoted or not.
fn node(value: &[u8]) -> Option<IpAddr> {
    let Some(quoted) = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")) else {
        return address(value);
    };
    let mut text = [0; MAX_ADDRESS];
    let mut len = 0;
    let mut escaped = false;
    for byte in quoted {
        escaped = *byte == b'\\' && !escaped;
        if !escaped {
            *text.get_mut(len)? = *byte;
            len += 1;
        }
    }
    address(&text[..len])
}

/// Parses `ip`, `ip:port`, `[v6]`, `[v6]:port`, and `v6:port` unless the whole text is an address.
///
/// Without brackets, a port of up to four digits may be the last group of an address that has `::`, and is parsed as such. Everything else
/// is not an address: names, `unknown`, `_hidden`, zone ids.
fn address(address: &[u8]) -> Option<IpAddr> {
    let text = text(address)?;
    let ip = text.parse().ok().or_else(|| bracketed(text)).or_else(|| without_port(text))?;
    Some(canonical(ip))
}

fn text(address: &[u8]) -> Option<&str> {
    (address.len() <= MAX_ADDRESS).then(|| std::str::from_utf8(address).ok()).flatten()
}

fn bracketed(text: &str) -> Option<IpAddr> {
    text.strip_prefix('[')?.strip_suffix(']')?.parse().ok().map(Ipv6Addr::into)
}

/// The address before the last colon, if a port follows it.
fn without_port(text: &str) -> Option<IpAddr> {
    let (ip, _) = text.rsplit_once(':').filter(|(_, port)| is_port(port))?;
    ip.parse().ok().or_else(|| bracketed(ip))
}

/// A port is a number, or an obfuscated name that begins with `_` (RFC 7239).
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)),
        None => {
            (1..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<u16>().is_ok()
        }
    }
}

/// The bytes of a name (RFC 9110, `tchar`).
fn is_token(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte)
}

/// The bytes of an unquoted value, more than the grammar allows.
fn is_plain(byte: &u8) -> bool {
    byte.is_ascii_graphic() && !b",;\"\\=".contains(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GARBAGE: &str = "-";

    /// The hops, last first, joined by spaces.
    fn read(hops: impl Iterator<Item = Option<IpAddr>>) -> String {
        let hops: Vec<_> = hops.map(|hop| hop.map_or(GARBAGE.to_owned(), |ip| ip.to_string())).collect();
        hops.join(" ")
    }

    #[test]
    fn addresses_parse_in_every_form_of_proxies() {
        let cases = [
            ("203.0.113.7", "203.0.113.7"),
            (" \t203.0.113.7\t ", "203.0.113.7"),
            ("203.0.113.7:4711", "203.0.113.7"),
            ("\"203.0.113.7:4711\"", "203.0.113.7"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:4711", "2001:db8::1"),
            ("\"[2001:DB8::1]:4711\"", "2001:db8::1"),
            ("203.0.113.7:_hidden", "203.0.113.7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("[::ffff:cb00:7107]:1", "203.0.113.7"),
            ("::1", "::1"),
            ("::203.0.113.7", "::cb00:7107"),
            ("203.0.113.7:65535", "203.0.113.7"),
            // A port without brackets, unless it can be the last group of the address.
            ("2001:db8::1:50001", "2001:db8::1"),
            ("2001:db8:0:0:0:0:0:1:443", "2001:db8::1"),
            ("2001:db8::1:443", "2001:db8::1:443"),
            (":::1", "::"),
        ];
        for (text, ip) in cases {
            assert_eq!(single(text.as_bytes()), Some(ip.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn other_text_is_not_an_address() {
        let cases = [
            "",
            " ",
            "\"",
            "\"\"",
            "unknown",
            "_hidden",
            "localhost",
            "203.0.113",
            "203.0.113.7.",
            "203.0.113.007",
            "0xcb.0.113.7",
            "3405803783",
            "203.0.113.7:",
            "203.0.113.7:x",
            "203.0.113.7:123456",
            "203.0.113.7:65536",
            "2001:db8::1:65536",
            "[2001:db8::1]:65536",
            "203.0.113.7:-1",
            "203.0.113.7:1:2",
            "203.0.113.7/32",
            "203.0.113.7 203.0.113.8",
            "fe80::1%eth0",
            "[fe80::1%25eth0]:1",
            "[::1",
            "::1]",
            "[::1]1",
            "[::1]:",
            "[203.0.113.7]",
            "[[::1]]",
            "::::1",
            "2001:db8::1:",
            "for=203.0.113.7",
            "\"203.0.113.7",
            "203.0.113.7\"",
            "\"203.0.113.7\\\"",
            "203.0.113.7:_",
            "２０３.0.113.7",
        ];
        for text in cases {
            assert_eq!(single(text.as_bytes()), None, "{text}");
        }
        assert_eq!(single(b"203.0.113.7\xff"), None);
        assert_eq!(single(b"203.0.113.7\0"), None);
        assert_eq!(single(&[b'1'; 1 << 20]), None);
    }

    #[test]
    fn x_forwarded_for_parses_from_the_right() {
        let cases = [
            ("", "-"),
            ("1.1.1.1", "1.1.1.1"),
            ("1.1.1.1, 2.2.2.2,3.3.3.3", "3.3.3.3 2.2.2.2 1.1.1.1"),
            ("1.1.1.1,, 2.2.2.2,", "- 2.2.2.2 - 1.1.1.1"),
            ("\"1.1.1.1, 2.2.2.2", "2.2.2.2 -"),
            ("\"1.1.1.1\", \"[::2]:3\"", "::2 1.1.1.1"),
            ("1.1.1.1 2.2.2.2", "-"),
            ("1.1.1.1; 2.2.2.2", "-"),
        ];
        for (line, hops) in cases {
            assert_eq!(read(x_forwarded_for(line.as_bytes())), hops, "{line}");
        }
        let padded = |spaces| format!("1.1.1.1,{}2.2.2.2", " ".repeat(spaces));
        assert_eq!(read(x_forwarded_for(padded(100).as_bytes())), "2.2.2.2 1.1.1.1");
        assert_eq!(read(x_forwarded_for(padded(200).as_bytes())), "-", "and nothing left of it");
    }

    #[test]
    fn forwarded_parses_from_the_right() {
        let cases = [
            ("", "-"),
            ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
            ("For=\"[2001:db8:cafe::17]:4711\"", "2001:db8:cafe::17"),
            ("for=192.0.2.43, FOR=198.51.100.17", "198.51.100.17 192.0.2.43"),
            ("for=192.0.2.43,for=\"_gazonk\"", "- 192.0.2.43"),
            ("for=unknown", "-"),
            ("proto=https;by=203.0.113.43", "-"),
            ("for=1.1.1.1; proto=https ; host=\"a,b;for=2.2.2.2\"", "1.1.1.1"),
            (";;for=1.1.1.1;;", "1.1.1.1"),
            // Invalid by the grammar, but written by proxies.
            ("for=[2001:db8::1]:4711", "2001:db8::1"),
            ("for=2001:db8::1;host=example.org:80", "2001:db8::1"),
            ("for=\"2001:db8::1\"", "2001:db8::1"),
            // Escapes.
            (r#"for="\1.1.1\.1""#, "1.1.1.1"),
            (r#"host="\"";for=1.1.1.1"#, "1.1.1.1"),
            (r#"host="\\";for=1.1.1.1, for=2.2.2.2"#, "2.2.2.2 1.1.1.1"),
            (r#"host="x\\\", for=6.6.6.6";for=1.1.1.1"#, "1.1.1.1"),
            // Malformed, so unreadable.
            ("1.1.1.1", "-"),
            ("for", "-"),
            ("for=", "-"),
            ("=1.1.1.1", "-"),
            ("for =1.1.1.1", "-"),
            ("for= 1.1.1.1", "-"),
            ("for=1.1.1.1 proto=http", "-"),
            ("for=1.1.1.1;for=2.2.2.2", "-"),
            ("for=1.1.1.1;for=1.1.1.1", "-"),
            ("for=1.1.1.1;host=a b", "-"),
            ("for=1.1.1.1;host=a=b", "-"),
            ("for=1.1.1.1;host=\"", "-"),
            ("for=1.1.1.1;host=a\"b\"", "-"),
            ("for=1.1.1.1;host=\"a\"b", "-"),
            ("xfor=1.1.1.1", "-"),
            ("for=\"1.1.1.1", "-"),
            ("for=1.1.1.1\"", "-"),
            ("for=\"\"", "-"),
            // The value of a client, then the entry that a proxy appended.
            ("for=\", for=1.1.1.1", "1.1.1.1 -"),
            (r#"for="\, for=1.1.1.1"#, "1.1.1.1 -"),
            (r#"for=6.6.6.6;a=", for=1.1.1.1;host="b""#, "1.1.1.1 -"),
            (r#"x="y, for=1.1.1.1;a="b,c""#, "1.1.1.1 -"),
        ];
        for (line, hops) in cases {
            assert_eq!(read(forwarded(line.as_bytes())), hops, "{line}");
        }
    }
}
