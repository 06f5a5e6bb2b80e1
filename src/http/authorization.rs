//! Keys from `Authorization`, whose scheme has several spellings.

use ::http::Request;
use ::http::header::{AUTHORIZATION, HeaderMap};
use ::http::request::Parts;
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use crate::key::{ExtractKey, Key, Or, first_of};

/// Counts by the token of `Authorization: Bearer <token>` (RFC 6750).
///
/// The case of the scheme and the number of spaces after it do not matter, so `bearer` and `BEARER` share one quota. The store sees only a
/// digest of the token.
///
/// A request has no key if the header is missing, repeated or malformed, or has another scheme. A token has letters, digits and `-._~+/`,
/// with any number of `=` at its end.
///
/// This function does not verify the token. Put the layer behind the authentication and add a limit for the [address](super#keys), or count
/// by the user that the authentication layer found:
///
/// * A client that invents tokens has a quota for each.
/// * Some tokens have several spellings, such as a JWT whose last character has unused bits. A new token of the same client is a new key,
///   too.
/// * A closure can count by an extension that the authentication layer has inserted into the request:
///
/// ```
/// use http::Request;
/// use tollgate::http::bearer_token;
/// use tollgate::ExtractKey;
///
/// #[derive(Clone)]
/// struct User { id: u64 } // from the authentication layer, which is further out
///
/// let by_user = |request: &Request<()>| request.extensions().get::<User>().map(|user| user.id);
/// let by_token = bearer_token();
///
/// let request = Request::builder().header("authorization", "bearer  mF_9.B5f-4.1JqM").extension(User { id: 7 }).body(())?;
/// let same = Request::builder().header("authorization", "Bearer mF_9.B5f-4.1JqM").body(())?;
/// assert_eq!(by_user.extract_key(&request), Some(7.into()));
/// assert_eq!(by_token.extract_key(&request), by_token.extract_key(&same));
/// # Ok::<(), http::Error>(())
/// ```
#[must_use]
pub const fn bearer_token() -> BearerTokenKey {
    BearerTokenKey
}

/// See [`bearer_token`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BearerTokenKey;

impl BearerTokenKey {
    /// Uses `fallback` for requests without a token: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    fn key_in(headers: &HeaderMap) -> Option<Key> {
        let token = credentials(headers, b"bearer")?;
        let body = token.iter().rposition(|byte| *byte != b'=').map_or(&[][..], |last| &token[..=last]);
        let is_token =
            !body.is_empty() && body.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/".contains(byte));
        is_token.then(|| Key::digest(token))
    }
}

/// Counts by the user name of `Authorization: Basic <credentials>` (RFC 7617), without the password.
///
/// With the password in the key, each guess would have its own quota, and a limit on logins would limit nothing. The case of the scheme and
/// the padding of the base64 do not matter. The key is [`Key::digest`] of the name, so the store sees no names.
///
/// A request has no key if the header is missing or repeated, has another scheme, is not base64, or has no name before a colon.
///
/// Names are compared by their bytes. If your users may write `Alice` for `alice`, build the key in a closure. A client may try one password
/// with many names, so add a limit for the [address](super#keys).
///
/// ```
/// use tollgate::http::{basic_user, peer_ip};
/// use tollgate::{MemoryBackend, Policy, Quota, RateLimitLayer};
///
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// let guesses = Policy::new("login", Quota::per_minute(5).sliding_log()?);
/// let address = Policy::new("login-address", Quota::per_minute(20).sliding_log()?);
/// let layer = RateLimitLayer::new(MemoryBackend::new(), guesses).key(basic_user()).and(address, peer_ip());
/// # drop(layer);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub const fn basic_user() -> BasicUserKey {
    BasicUserKey
}

/// See [`basic_user`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BasicUserKey;

/// Accepts any padding and trailing bits. Otherwise a request with another encoding of the name would have no key, and might pass
/// uncounted.
const LENIENT_BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

impl BasicUserKey {
    /// Uses `fallback` for requests without a user name: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }

    fn key_in(headers: &HeaderMap) -> Option<Key> {
        let pair = LENIENT_BASE64.decode(credentials(headers, b"basic")?).ok()?;
        let colon = pair.iter().position(|byte| *byte == b':')?;
        (colon > 0).then(|| Key::digest(&pair[..colon]))
    }
}

/// The credentials after the scheme, which is case-insensitive (RFC 9110, 11.4). `None` if the header is repeated: the service might read
/// either value.
fn credentials<'a>(headers: &'a HeaderMap, scheme: &[u8]) -> Option<&'a [u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let (given, credentials) = value.as_bytes().trim_ascii().split_at_checked(scheme.len())?;
    let is_match = given.eq_ignore_ascii_case(scheme) && credentials.first() == Some(&b' ');
    is_match.then(|| credentials.trim_ascii_start())
}

macro_rules! by_headers {
    ($($key:ident),*) => {$(
        impl<B> ExtractKey<Request<B>> for $key {
            fn extract_key(&self, request: &Request<B>) -> Option<Key> {
                Self::key_in(request.headers())
            }
        }

        /// For handlers that take the parts of a request without its body.
        impl ExtractKey<Parts> for $key {
            fn extract_key(&self, parts: &Parts) -> Option<Key> {
                Self::key_in(&parts.headers)
            }
        }
    )*};
}

by_headers!(BearerTokenKey, BasicUserKey);

#[cfg(test)]
mod tests {
    use super::*;

    fn request(values: &[&str]) -> Request<()> {
        let request = values.iter().fold(Request::builder(), |request, value| request.header(AUTHORIZATION, *value));
        request.body(()).unwrap()
    }

    /// Regression: each spelling had its own quota.
    #[test]
    fn bearer_scheme_spelling_does_not_change_key() {
        let key = |value: &str| bearer_token().extract_key(&request(&[value]));
        let plain = key("Bearer abc.def");
        assert_eq!(plain, Some(Key::digest(b"abc.def")));
        for bits in 0..64_u32 {
            let scheme: String = "bearer"
                .char_indices()
                .map(|(i, letter)| if bits >> i & 1 == 1 { letter.to_ascii_uppercase() } else { letter })
                .collect();
            let spaces = " ".repeat(1 + bits as usize % 5);
            assert_eq!(key(&format!("{scheme}{spaces}abc.def ")), plain, "{scheme}");
        }
        assert_ne!(key("Bearer abc.deg"), plain);
        assert_eq!(key("Bearer AZaz09-._~+/=="), Some(Key::digest(b"AZaz09-._~+/==")));
    }

    #[test]
    fn malformed_bearer_token_has_no_key() {
        let values = [
            "",
            "Bearer",
            "Bearer ",
            "Bearer =",
            "Bearer a b",
            "Bearer a,b",
            "Bearer a=b",
            "Bearer \"a\"",
            "Bearerabc",
        ];
        for value in values.into_iter().chain(["Bearer\tabc", "Basic YTpi", "Token abc", "abc", "Bearer abc;"]) {
            assert_eq!(bearer_token().extract_key(&request(&[value])), None, "{value:?}");
        }
        assert_eq!(bearer_token().extract_key(&request(&[])), None);
        assert_eq!(bearer_token().extract_key(&request(&["Bearer abc", "Bearer abc"])), None, "two of them");
        assert_eq!(bearer_token().extract_key(&request(&["Basic YTpi", "Bearer abc"])), None, "two of them");
    }

    /// Regression: each password that a client tried had its own quota.
    #[test]
    fn password_does_not_change_user_key() {
        let key = |value: &str| basic_user().extract_key(&request(&[value]));
        let alice = Some(Key::digest(b"alice"));
        // alice:a, alice:bb, alice:ccc, alice:x:y, alice:
        for pair in
            ["YWxpY2U6YQ==", "YWxpY2U6YQ", "YWxpY2U6YR==", "YWxpY2U6YmI=", "YWxpY2U6Y2Nj", "YWxpY2U6eDp5", "YWxpY2U6"]
        {
            for scheme in ["Basic", "basic", "BASIC  "] {
                assert_eq!(key(&format!("{scheme} {pair}")), alice, "{scheme} {pair}");
            }
        }
        assert_eq!(key("Basic Ym9iOmE="), Some(Key::digest(b"bob")));
        assert_eq!(key("Basic /zph"), Some(Key::digest(b"\xff")), "not UTF-8");
    }

    #[test]
    fn credentials_without_user_name_have_no_key() {
        // `alice`, `:secret`, and text that is not base64.
        for value in [
            "",
            "Basic",
            "Basic ",
            "Basic YWxpY2U=",
            "Basic OnNlY3JldA==",
            "Basic alice:a",
            "Basic YWxp Y2U6",
            "Bearer YTpi",
        ] {
            assert_eq!(basic_user().extract_key(&request(&[value])), None, "{value:?}");
        }
        assert_eq!(basic_user().extract_key(&request(&["Basic YTpi", "Basic YTpi"])), None, "two of them");
    }

    #[test]
    fn request_parts_have_same_keys() {
        let (parts, ()) = request(&["basic YTpi"]).into_parts();
        assert_eq!(basic_user().extract_key(&parts), Some(Key::digest(b"a")));
        let (parts, ()) = request(&["bearer YTpi"]).into_parts();
        assert_eq!(bearer_token().extract_key(&parts), Some(Key::digest(b"YTpi")));
    }
}
