use std::borrow::Cow;
use std::fmt::Write as _;

/// A path in the one spelling by which patterns and requests are compared, as RFC 3986, 6.2.2 has it: escapes have upper-case digits, what is
/// not ASCII is escaped, and a sign that may stand in a segment is not. Nothing is allocated for a path that has no escapes and is ASCII.
pub(super) fn normal(path: &str) -> Cow<'_, str> {
    if path.bytes().all(|byte| byte.is_ascii() && byte != b'%') {
        return Cow::Borrowed(path);
    }
    let mut normal = String::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%'
            && let [high, low, ref behind @ ..] = *after
            && let Some(byte) = escaped(high, low)
        {
            push(&mut normal, byte, stands_for_itself(byte));
            rest = behind;
        } else {
            push(&mut normal, byte, byte.is_ascii());
            rest = after;
        }
    }
    Cow::Owned(normal)
}

fn escaped(high: u8, low: u8) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(high)? << 4 | digit(low)?)
}

/// Whether routers take a sign for the same as its escape. Not `/`, which would be the end of a segment, nor what patterns are written with.
fn stands_for_itself(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"/%{}".contains(&byte)
}

fn push(path: &mut String, byte: u8, as_it_is: bool) {
    if as_it_is {
        path.push(char::from(byte));
    } else {
        write!(path, "%{byte:02X}").expect("a string takes all that is written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_has_one_spelling() {
        let cases = [
            ("/users/me", "/users/me"),
            ("/users/%6de", "/users/me"),
            ("/users/%6De", "/users/me"),
            ("/orders%3Acancel", "/orders:cancel"),
            ("/größe", "/gr%C3%B6%C3%9Fe"),
            ("/gr%c3%b6%C3%9fe", "/gr%C3%B6%C3%9Fe"),
            // Another number of segments, and text that has an escape in it.
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
            assert_eq!(normal(path), expected, "{path}");
        }
        assert!(matches!(normal("/a-b/c.d~e_f:g@h!$&'()*+,;="), Cow::Borrowed(_)));
    }

    proptest! {
        #[test]
        fn escapes_change_nothing(path in "[/a-zA-Z0-9:.ö ]{0,20}", which in any::<u64>()) {
            let mut escaped = String::new();
            for (i, byte) in path.bytes().enumerate() {
                push(&mut escaped, byte, byte == b'/' || byte.is_ascii_graphic() && which >> i & 1 == 0);
            }
            let path = path.replace(' ', "%20");
            prop_assert_eq!(normal(&escaped), normal(&path));
        }
    }
}
