use std::borrow::Cow;

use ::http::{HeaderMap, HeaderName};
use sfv::BareItemFromInput;
use sfv::visitor::{Ignored, ParameterVisitor, parameter_visitor_with};

use crate::idempotency::InvalidKey;
use crate::key::Key;

/// The maximum length of a key, in characters.
const MAX_LEN: usize = 255;
/// The maximum length of a header value: a key with every character escaped, two quotes, and 512 bytes of parameters.
const MAX_VALUE_LEN: usize = 2 * MAX_LEN + 2 + 512;

/// The key of a request; `None` without the header.
pub(super) fn key_of(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Key>, InvalidKey> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(InvalidKey::Several);
    }
    parse(value.as_bytes()).map(|key| Some(Key::new(key)))
}

/// Parses the value of the header: a String of RFC 9651 or a bare token, which most clients send. So `"abc"` and `abc` are the
/// same key. Parameters of a String are ignored.
pub(super) fn parse(value: &[u8]) -> Result<Cow<'_, [u8]>, InvalidKey> {
    let value = without_spaces(value);
    let key = match value.first() {
        None => return Err(InvalidKey::Empty),
        Some(_) if value.len() > MAX_VALUE_LEN => return Err(InvalidKey::TooLong),
        Some(b'"') => string(value)?,
        Some(_) => {
            // Refuse commas: a proxy may have joined repeated headers, so a comma may separate several keys.
            let is_token = |byte: &u8| byte.is_ascii_graphic() && !b"\",\\".contains(byte);
            if !value.iter().take(MAX_LEN + 1).all(is_token) {
                return Err(InvalidKey::Malformed);
            }
            Cow::Borrowed(value)
        }
    };
    match key.len() {
        0 => Err(InvalidKey::Empty),
        1..=MAX_LEN => Ok(key),
        _ => Err(InvalidKey::TooLong),
    }
}

/// Trims spaces that the server has not trimmed. RFC 9651 allows no other whitespace here.
fn without_spaces(mut value: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = value {
        value = rest;
    }
    value
}

/// The text between the quotes.
fn string(value: &[u8]) -> Result<Cow<'_, [u8]>, InvalidKey> {
    fn text(item: BareItemFromInput<'_>) -> Result<impl ParameterVisitor<'_, Out = Cow<'_, [u8]>>, InvalidKey> {
        let text = match item {
            BareItemFromInput::String(Cow::Borrowed(text)) => Cow::Borrowed(text.as_str().as_bytes()),
            BareItemFromInput::String(Cow::Owned(text)) => Cow::Owned(String::from(text).into_bytes()),
            _ => return Err(InvalidKey::Malformed),
        };
        Ok(parameter_visitor_with(Ignored, move |()| Ok(text)))
    }
    sfv::Parser::new(value).parse_item_with_visitor(text).map_err(|_| InvalidKey::Malformed)
}

#[cfg(test)]
mod tests {
    use ::http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn read(value: &[u8]) -> Result<String, InvalidKey> {
        parse(value).map(|key| String::from_utf8(key.into_owned()).unwrap())
    }

    #[test]
    fn string_and_bare_token_are_same_key() {
        let uuid = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        for value in [uuid.to_owned(), format!("\"{uuid}\""), format!("  \"{uuid}\" "), format!("\"{uuid}\";v=1; b")] {
            assert_eq!(read(value.as_bytes()).as_deref(), Ok(uuid), "{value}");
        }
        assert_eq!(read(br#""a\"b\\ c, d""#).as_deref(), Ok(r#"a"b\ c, d"#));
        assert_eq!(read(b"KG5LxwFBepaKHyUD").as_deref(), Ok("KG5LxwFBepaKHyUD"));
        assert_eq!(read(b"order:42/a=b;c").as_deref(), Ok("order:42/a=b;c"));
    }

    #[test]
    fn invalid_keys_are_refused_with_reason() {
        let long = |len| "x".repeat(len);
        for (value, expected) in [
            (String::new(), InvalidKey::Empty),
            ("  ".into(), InvalidKey::Empty),
            (r#""""#.into(), InvalidKey::Empty),
            (long(256), InvalidKey::TooLong),
            (long(1 << 20), InvalidKey::TooLong),
            (format!("\"{}\"", long(256)), InvalidKey::TooLong),
            (format!("\"{}", long(1 << 20)), InvalidKey::TooLong),
            (r#"""#.into(), InvalidKey::Malformed),
            (r#""abc"#.into(), InvalidKey::Malformed),
            (r#""abc" def"#.into(), InvalidKey::Malformed),
            (r#""abc", "def""#.into(), InvalidKey::Malformed),
            (r#""a\b""#.into(), InvalidKey::Malformed),
            (r#""abc\"#.into(), InvalidKey::Malformed),
            (r#""abc";!!!"#.into(), InvalidKey::Malformed),
            (r#""abc";a="b"#.into(), InvalidKey::Malformed),
            (format!("\"abc\";a={}", long(1 << 20)), InvalidKey::TooLong),
            (r#"abc""#.into(), InvalidKey::Malformed),
            ("a,b".into(), InvalidKey::Malformed),
            ("a b".into(), InvalidKey::Malformed),
            ("a\tb".into(), InvalidKey::Malformed),
            ("\"a\"\t".into(), InvalidKey::Malformed),
            ("\"a\tb\"".into(), InvalidKey::Malformed),
            ("a\u{7f}".into(), InvalidKey::Malformed),
            ("schlüssel".into(), InvalidKey::Malformed),
            ("\"schlüssel\"".into(), InvalidKey::Malformed),
        ] {
            assert_eq!(read(value.as_bytes()), Err(expected), "{:.40}", value);
        }
        assert_eq!(read(long(255).as_bytes()), Ok(long(255)));
        assert_eq!(read(format!("\"{}\"", long(255)).as_bytes()), Ok(long(255)));
    }

    #[test]
    fn several_keys_are_refused() {
        let name = HeaderName::from_static("idempotency-key");
        let mut headers = HeaderMap::new();
        assert_eq!(key_of(&headers, &name), Ok(None));
        headers.append(&name, "a".parse().unwrap());
        assert_eq!(key_of(&headers, &name), Ok(Some(Key::from("a"))));
        headers.append(&name, "a".parse().unwrap());
        assert_eq!(key_of(&headers, &name), Err(InvalidKey::Several));
    }

    /// Arbitrary bytes, bytes of keys, and text that is almost a String.
    fn values() -> impl Strategy<Value = Vec<u8>> {
        let quoted = "[ ]{0,2}\"([ -~]|\\\\[\"\\\\]){0,300}\"?(;[ -~]{0,9})?[ ]{0,2}";
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..300),
            prop::collection::vec(0x21..=0x7e_u8, 0..300),
            quoted.prop_map(String::into_bytes),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        #[test]
        fn any_bytes_parse_to_bounded_key_or_error(values in prop::collection::vec(values(), 1..3)) {
            let mut headers = HeaderMap::new();
            let name = HeaderName::from_static("idempotency-key");
            for value in &values {
                // Values that no server accepts are not headers. The test parses them directly.
                if let Ok(value) = HeaderValue::from_bytes(value) {
                    headers.append(&name, value);
                }
            }
            let lines = headers.len();
            let key = key_of(&headers, &name);
            prop_assert_eq!(matches!(key, Ok(None)), lines == 0);
            prop_assert_eq!(key == Err(InvalidKey::Several), lines > 1);
            let value = &values[0];
            if lines == 1 && headers.get(&name).is_some_and(|line| line.as_bytes() == value) {
                prop_assert_eq!(key, parse(value).map(|key| Some(Key::new(key))));
            }
            if let Ok(key) = parse(value) {
                prop_assert!((1..=MAX_LEN).contains(&key.len()));
                prop_assert!(key.iter().all(|byte| (b' '..=b'~').contains(byte)));
            }
        }

        #[test]
        fn strings_parse_as_structured_fields(
            text in "[\"\\\\]?[ -~\\t\"\\\\]{0,20}[;\"]?",
            is_quoted: bool,
        ) {
            let value = if is_quoted {
                format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
            } else {
                format!("\"{text}")
            };
            let item = sfv::Parser::new(&value).parse::<sfv::Item>();
            match item.map(|item| item.bare_item) {
                Ok(sfv::BareItem::String(string)) if !string.as_str().is_empty() => {
                    prop_assert_eq!(read(value.as_bytes()), Ok(string.as_str().to_owned()));
                }
                Ok(_) => prop_assert_eq!(read(value.as_bytes()), Err(InvalidKey::Empty)),
                Err(_) => prop_assert!(read(value.as_bytes()).is_err(), "{}", value),
            }
        }
    }
}
