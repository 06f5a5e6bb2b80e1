//! Conversions into keys, and extractors of keys from requests.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use super::Key;

macro_rules! into_key {
    ($make:path: $($type:ty),*) => {$(
        impl From<$type> for Key {
            #[inline]
            fn from(value: $type) -> Self {
                $make(value)
            }
        }

        impl IntoKey for $type {
            fn into_key(self) -> Option<Key> {
                Some(self.into())
            }
        }
    )*};
}

into_key!(Key::new: &[u8], Vec<u8>);
into_key!(Key::from_text: &str, String, &String, Box<str>, Arc<str>, Cow<'_, str>);
into_key!(Key::from_integer: u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize);
into_key!(Key::from_v6: Ipv6Addr);
into_key!(Key::from_v4: Ipv4Addr);
into_key!(Key::from_ip: IpAddr);

macro_rules! tuples {
    ($($name:ident),*) => {
        impl<$($name: Into<Key>),*> From<($($name,)*)> for Key {
            #[allow(non_snake_case)]
            fn from(($($name,)*): ($($name,)*)) -> Self {
                Self::from_parts(&[$($name.into()),*])
            }
        }

        impl<$($name: IntoKey),*> IntoKey for ($($name,)*) {
            #[allow(non_snake_case)]
            fn into_key(self) -> Option<Key> {
                let ($($name,)*) = self;
                Some(Key::from_parts(&[$(present($name.into_key())?),*]))
            }
        }

        impl<Req, $($name: ExtractKey<Req>),*> ExtractKey<Req> for ($($name,)*) {
            #[allow(non_snake_case)]
            fn extract_key(&self, request: &Req) -> Option<Key> {
                let ($($name,)*) = self;
                Some(Key::from_parts(&[$(present($name.extract_key(request))?),*]))
            }
        }
    };
}

tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);

/// Treats an empty key as missing.
fn present(key: Option<Key>) -> Option<Key> {
    key.filter(|key| !key.is_empty())
}

/// The types that a closure may return as a key: text, bytes, numbers, addresses, a [`Key`], tuples of these, or an `Option` of one.
///
/// `None` means that the request has no key. So does a tuple with a missing or empty part.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be used as a key",
    note = "a key is text, bytes, a number, an IP address, a `Key`, a tuple of these, or an `Option` of one. For text borrowed from the request, use `str_key`"
)]
pub trait IntoKey {
    /// The key, if there is one.
    fn into_key(self) -> Option<Key>;
}

impl IntoKey for Key {
    fn into_key(self) -> Option<Key> {
        Some(self)
    }
}

impl<T: IntoKey> IntoKey for Option<T> {
    fn into_key(self) -> Option<Key> {
        self.and_then(T::into_key)
    }
}

/// Extracts the key of a request.
///
/// Closures are extractors, and so are tuples of extractors. A tuple counts each combination of its parts, and has a key only if all parts
/// have one. Set a fallback with [`first_of`], or with the method `or` of the extractors in `tollgate::http`.
///
/// ```
/// use tollgate::{ExtractKey, Key};
///
/// struct Call { tenant: Option<String>, method: &'static str }
///
/// let by_tenant = |call: &Call| call.tenant.clone();
/// let by_method = |call: &Call| call.method;
/// let by_both = (by_tenant, by_method);
///
/// let call = Call { tenant: Some("acme".into()), method: "list" };
/// assert_eq!(by_both.extract_key(&call), Some(Key::from(("acme", "list"))));
///
/// let call = Call { tenant: None, method: "list" };
/// assert_eq!(by_both.extract_key(&call), None);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot find a key in `{Req}`",
    note = "use a closure `|request: &{Req}| ...`, one of the extractors in `tollgate::http`, or a tuple of them",
    note = "`Unkeyed`: call `.key(..)` on the `LockLayer`; `Unscoped`: call `.scope(..)` on the `IdempotencyLayer`; `Undecided`: call `.public()` or `.per(..)` on the `CacheLayer` or `SingleFlightLayer`; `GlobalKey` is one key for all requests"
)]
pub trait ExtractKey<Req> {
    /// The key of this request, or `None` if it has none.
    fn extract_key(&self, request: &Req) -> Option<Key>;
}

// Without this attribute the compiler suggests a closure and hides the note above.
#[diagnostic::do_not_recommend]
impl<Req, F, K> ExtractKey<Req> for F
where
    F: Fn(&Req) -> K,
    K: IntoKey,
{
    fn extract_key(&self, request: &Req) -> Option<Key> {
        self(request).into_key()
    }
}

/// Gives a closure a type that you can name, for a field of a struct, or for an extractor that is chosen at run time.
impl<Req> ExtractKey<Req> for Box<dyn ExtractKey<Req> + Send + Sync> {
    fn extract_key(&self, request: &Req) -> Option<Key> {
        (**self).extract_key(request)
    }
}

impl<Req> ExtractKey<Req> for Arc<dyn ExtractKey<Req> + Send + Sync> {
    fn extract_key(&self, request: &Req) -> Option<Key> {
        (**self).extract_key(request)
    }
}

/// Lets a closure return text that it borrows from the request.
///
/// For a plain closure, the compiler does not infer that the result borrows from the request.
///
/// ```
/// use tollgate::{ExtractKey, Key, str_key};
///
/// struct Call { tenant: Option<String> }
///
/// let key = str_key(|call: &Call| call.tenant.as_deref());
/// assert_eq!(key.extract_key(&Call { tenant: Some("acme".into()) }), Some(Key::from("acme")));
/// ```
pub const fn str_key<Req, F>(closure: F) -> StrKey<F>
where
    F: Fn(&Req) -> Option<&str>,
{
    StrKey(closure)
}

/// An extractor of borrowed text: see [`str_key`].
#[derive(Clone, Copy, Debug)]
pub struct StrKey<F>(F);

impl<Req, F> ExtractKey<Req> for StrKey<F>
where
    F: Fn(&Req) -> Option<&str>,
{
    fn extract_key(&self, request: &Req) -> Option<Key> {
        self.0(request).map(Key::from)
    }
}

/// Uses `fallback` for requests for which `first` finds no key.
///
/// A key from the fallback has a mark, so a client cannot send a value for `first` that gives the same key.
///
/// ```
/// use tollgate::{ExtractKey, first_of};
///
/// struct Call { tenant: Option<String>, address: String }
///
/// let key = first_of(|call: &Call| call.tenant.clone(), |call: &Call| call.address.clone());
/// let honest = Call { tenant: None, address: "203.0.113.7".into() };
/// let forged = Call { tenant: Some("203.0.113.7".into()), address: "198.51.100.1".into() };
/// assert_ne!(key.extract_key(&honest), key.extract_key(&forged));
/// ```
pub const fn first_of<A, B>(first: A, fallback: B) -> Or<A, B> {
    Or { first, fallback }
}

/// An extractor with a fallback: see [`first_of`].
#[derive(Clone, Copy, Debug)]
pub struct Or<A, B> {
    first: A,
    fallback: B,
}

impl<A, B> Or<A, B> {
    /// Uses `fallback` for requests for which the other extractors find no key: see [`first_of`].
    pub fn or<F>(self, fallback: F) -> Or<Self, F> {
        first_of(self, fallback)
    }
}

impl<Req, A: ExtractKey<Req>, B: ExtractKey<Req>> ExtractKey<Req> for Or<A, B> {
    fn extract_key(&self, request: &Req) -> Option<Key> {
        present(self.first.extract_key(request))
            .map(Key::mark_if_fallback)
            .or_else(|| present(self.fallback.extract_key(request)).map(Key::as_fallback))
    }
}

/// Gives every request the same key, so all requests share one quota. This is the default of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalKey;

impl<Req> ExtractKey<Req> for GlobalKey {
    fn extract_key(&self, _: &Req) -> Option<Key> {
        Some(Key::GLOBAL)
    }
}

/// The principal type of a [`CacheLayer`](crate::http::CacheLayer) or [`SingleFlightLayer`](crate::SingleFlightLayer) until you call
/// `public` or `per`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Undecided;
