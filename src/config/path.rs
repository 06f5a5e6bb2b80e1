use std::borrow::Cow;
use std::fmt::Write as _;

/// Normalizes a path (RFC 3986, 6.2.2), to compare patterns and requests.
///
/// Escapes get upper-case digits, non-ASCII bytes are escaped, and printable ASCII characters except `/`, `%`, `{` and `}` are unescaped.
/// An ASCII path without escapes is returned without allocation.
pub(super) fn normalize(path: &str) -> Cow<'_, str> {
    if path.bytes().all(|byte| byte.is_ascii() && byte != b'%') {
        return Cow::Borrowed(path);
    }
    let mut normalized = String::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%'
            && let [high, low, ref after_escape @ ..] = *after
            && let Some(byte) = unescape(high, low)
        {
            push(&mut normalized, byte, is_literal(byte));
            rest = after_escape;
        } else {
            push(&mut normalized, byte, byte.is_ascii());
            rest = after;
        }
    }
    Cow::Owned(normalized)
}

fn unescape(high: u8, low: u8) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(high)? << 4 | digit(low)?)
}

/// Whether routers treat a character like its escape. False for `/`, which would end the segment, for `%`, which would begin an escape, and
/// for `{` and `}`, which have a meaning in patterns.
fn is_literal(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"/%{}".contains(&byte)
}

fn push(path: &mut String, byte: u8, is_literal: bool) {
    if is_literal {
        path.push(char::from(byte));
    } else {
        write!(path, "%{byte:02X}").expect("writing to a string cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn normalize_maps_spellings_to_one_path() {
        let cases = [
            ("/users/me", "/users/me"),
            ("/users/%6de", "/users/me"),
            ("/users/%6De", "/users/me"),
            ("/orders%3Acancel", "/orders:cancel"),
            ("/größe", "/gr%C3%B6%C3%9Fe"),
            ("/gr%c3%b6%C3%9fe", "/gr%C3%B6%C3%9Fe"),
            // Unescaping these would add a segment, or change an escaped `%` or brace.
            ("/a%2fb", "/a%2Fb"),
            ("/%256de", "/%256de"),
            ("/%7bid%7d", "/%7Bid%7D"),
            ("/a%20b%00%ff", "/a%20b%00%FF"),
            // Not escapes.
            ("/%", "/%"),
            ("/%6", "/%6"),
            ("/%6gö", "/%6g%C3%B6"),
            ("/%%6d", "/%m"),
        ];
        for (path, expected) in cases {
            assert_eq!(normalize(path), expected, "{path}");
        }
        assert!(matches!(normalize("/a-b/c.d~e_f:g@h!$&'()*+,;="), Cow::Borrowed(_)));
    }

    proptest! {
        #[test]
        fn escapes_do_not_change_normalized_path(path in "[/a-zA-Z0-9:.ö ]{0,20}", which in any::<u64>()) {
            let mut escaped = String::new();
            for (i, byte) in path.bytes().enumerate() {
                push(&mut escaped, byte, byte == b'/' || byte.is_ascii_graphic() && which >> i & 1 == 0);
            }
            let path = path.replace(' ', "%20");
            prop_assert_eq!(normalize(&escaped), normalize(&path));
        }
    }
}
