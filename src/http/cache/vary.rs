//! The field `Vary`: which header fields of a request select its response (RFC 9111, section 4.1).

use ::http::header::VARY;
use ::http::{HeaderMap, HeaderName};

use crate::key::Key;

/// The names of the header fields that select a response, in alphabetical order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Vary(Vec<HeaderName>);

impl Vary {
    /// The largest number of names. A response with more is not stored.
    pub(super) const MAX: usize = 16;

    /// `None` with `*`, with an invalid name, or with more than [`Self::MAX`] names.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut names = Vec::new();
        for line in headers.get_all(VARY) {
            for name in line.to_str().ok()?.split(',').map(str::trim).filter(|name| !name.is_empty()) {
                if name == "*" {
                    return None;
                }
                names.push(HeaderName::from_bytes(name.as_bytes()).ok()?);
            }
        }
        Self::new(names)
    }

    /// `None` if there are too many.
    pub(super) fn new(mut names: Vec<HeaderName>) -> Option<Self> {
        names.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        names.dedup();
        (names.len() <= Self::MAX).then_some(Self(names))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn names(&self) -> &[HeaderName] {
        &self.0
    }

    /// Whether all these names are among those of `other`.
    pub(super) fn is_within(&self, other: &Self) -> bool {
        self.0.iter().all(|name| other.0.contains(name))
    }

    /// A digest of the values that a request has in these fields. Requests with the same values have the same response.
    pub(super) fn selection(&self, request: &HeaderMap) -> Key {
        let mut text = Vec::new();
        for name in &self.0 {
            let values = request.get_all(name);
            put(&mut text, name.as_str().as_bytes());
            text.extend_from_slice(&(values.iter().count() as u64).to_le_bytes());
            for value in values {
                put(&mut text, value.as_bytes());
            }
        }
        Key::digest(text)
    }
}

/// Appends `bytes` after their length, so that no two lists of values have the same text.
fn put(text: &mut Vec<u8>, bytes: &[u8]) {
    text.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    text.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use ::http::HeaderValue;

    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn names_are_read_in_any_order_and_case() {
        let one = Vary::of(&headers(&[("vary", "Accept-Language,  accept"), ("vary", "ACCEPT,")])).unwrap();
        assert_eq!(one, Vary::of(&headers(&[("vary", "accept, accept-language")])).unwrap());
        assert!(Vary::of(&HeaderMap::new()).unwrap().is_empty());
        let accept = Vary::of(&headers(&[("vary", "accept")])).unwrap();
        assert!(accept.is_within(&one) && !one.is_within(&accept));
    }

    #[test]
    fn star_and_invalid_names_select_no_other_request() {
        for line in ["*", "accept, *", "a b"] {
            assert_eq!(Vary::of(&headers(&[("vary", line)])), None, "{line}");
        }
        let names = |count: usize| (0..count).map(|i| HeaderName::try_from(format!("x-{i}")).unwrap()).collect();
        assert!(Vary::new(names(Vary::MAX)).is_some() && Vary::new(names(Vary::MAX + 1)).is_none());
    }

    #[test]
    fn selection_differs_with_each_value() {
        let vary = Vary::of(&headers(&[("vary", "x-a, x-b")])).unwrap();
        let requests: [&[_]; 8] = [
            &[],
            &[("x-a", "")],
            &[("x-a", "1")],
            &[("x-b", "1")],
            &[("x-a", "1"), ("x-a", "2")],
            &[("x-a", "1, 2")],
            &[("x-a", "1"), ("x-b", "2")],
            &[("x-a", "12"), ("x-b", "")],
        ];
        let mut selections: Vec<_> =
            requests.iter().map(|lines| vary.selection(&headers(lines)).as_str().to_owned()).collect();
        selections.sort();
        selections.dedup();
        assert_eq!(selections.len(), requests.len());
        assert_eq!(vary.selection(&headers(&[("x-c", "1")])), vary.selection(&HeaderMap::new()));
    }
}
