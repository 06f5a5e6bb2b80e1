//! Keys: the identities that requests count under.

mod ascii;
mod extract;
pub(crate) mod missing_key;

use std::borrow::Cow;
use std::error::Error;
use std::fmt::{self, Write as _};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use sha2::{Digest, Sha256};

use self::ascii::{OCTETS, plain_words, two_plain_words};
pub use self::extract::{ExtractKey, GlobalKey, IntoKey, Or, StrKey, Undecided, first_of, str_key};

/// The identity that a request counts under, such as a user or an address.
///
/// A key is printable text of at most [`Key::MAX_LEN`] bytes, whatever its input. So a client that chooses the input can neither fill a store
/// with long keys nor reach the data of another key:
///
/// * Bytes with a meaning in a store (`{`, `}`, `%`, `,`, …), spaces, control characters and non-ASCII bytes are percent-encoded.
/// * Input that does not fit is replaced by `#` and a SHA-256 digest (192 bits of it, in base64url).
/// * Two different inputs never give the same key, apart from collisions of the digest. Tuples are flat: a tuple within a tuple counts as its
///   parts.
///
/// Any bytes of any length are valid input. The empty key is a valid key, but a layer treats it as a missing key (see
/// [`OnMissingKey`](crate::OnMissingKey)).
///
/// ```
/// use tollgate::Key;
///
/// assert_eq!(Key::from("alice").as_str(), "alice");
/// assert_eq!(Key::from("{alice}").as_str(), "%7Balice%7D");
/// assert_eq!(Key::new([0xff, 0x00]).as_str(), "%FF%00");
/// assert_eq!(Key::new(vec![b'a'; 1 << 20]).as_str().len(), 33);
/// assert_eq!(Key::from(("alice", 7)).as_str(), "alice,7");
/// ```
// Aligned, because keys are written, compared and copied in 8-byte words. A word that was written in smaller pieces is slow to read, because
// the processor cannot forward the stores.
#[derive(Clone, Copy)]
#[repr(align(8))]
pub struct Key {
    // The text, zeros, and the length of the text in the last byte. One array, because keys are compared and copied for every request.
    bytes: [u8; Key::MAX_LEN + 1],
}

/// Bytes with a meaning in a store or in this module. `:` is safe, because the key is the last part of a stored key.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'{').add(b'}').add(b'%').add(b',').add(b'#').add(b'~').add(b'!');

/// The kind of input of a digest, so that a long text and a tuple with the same joined text have different digests.
#[derive(Clone, Copy)]
enum Origin {
    Bytes = 0,
    Tuple = 1,
    Fallback = 2,
}

impl Key {
    /// The maximum length of a key, in bytes.
    pub const MAX_LEN: usize = 47;

    /// The key that all requests share with [`GlobalKey`].
    pub const GLOBAL: Key = Key::reserved(b"!global");

    pub(crate) const EMPTY: Key = Key { bytes: [0; Key::MAX_LEN + 1] };

    /// Creates a key from any bytes.
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        Self::from_bytes(bytes.as_ref())
    }

    /// Creates a key that hides its input: always the digest, even for a short input.
    ///
    /// For secrets such as API keys and session cookies, which must not be in a store in clear text. An attacker who guesses the input can
    /// still recognize its digest.
    pub fn digest(bytes: impl AsRef<[u8]>) -> Self {
        Self::digest_of(Origin::Bytes, &[bytes.as_ref()])
    }

    /// The text of the key, as it appears in a store. [`parse`](Self::parse) turns it into the same key again.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).expect("keys are ASCII by construction")
    }

    /// Parses the text that [`as_str`](Self::as_str) returns, for example from a log or an operator's page.
    ///
    /// Do not parse the input of clients: they could name any key, including [`GLOBAL`](Self::GLOBAL) and fallbacks. Use [`new`](Self::new)
    /// or `from` for it, which escape the text, even if it is already escaped.
    ///
    /// ```
    /// use tollgate::Key;
    ///
    /// for key in [Key::from("a b"), Key::from(("alice", 7)), Key::digest("secret"), Key::GLOBAL] {
    ///     assert_eq!(Key::parse(key.as_str()), Ok(key));
    ///     assert_ne!(Key::from(key.as_str()), key);
    /// }
    /// assert!(Key::parse("a b").is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// [`ParseKeyError`] if the text is not that of a key.
    pub fn parse(text: &str) -> Result<Self, ParseKeyError> {
        let is_key = text.len() <= Self::MAX_LEN && text.split(',').all(is_part);
        Self::stored(text).filter(|_| is_key).ok_or(ParseKeyError(()))
    }

    /// Like [`parse`](Self::parse), but without checking the escapes. For text that only this crate can have written.
    pub(crate) fn stored(text: &str) -> Option<Self> {
        let mut key = KeyBuilder::default();
        (text.bytes().all(|byte| byte.is_ascii_graphic()) && key.push(text.as_bytes())).then_some(key.0)
    }

    /// Whether the key is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    const fn len(&self) -> usize {
        self.bytes[Self::MAX_LEN] as usize
    }

    /// `len` is at most [`MAX_LEN`](Self::MAX_LEN).
    #[inline]
    const fn set_len(&mut self, len: usize) {
        self.bytes[Self::MAX_LEN] = len as u8;
    }

    #[inline]
    fn as_words(&self) -> [u64; 6] {
        let mut words = [0; 6];
        for (word, bytes) in words.iter_mut().zip(self.bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    /// A hash that groups equal keys without comparing their texts each time. Not for hash tables, because a client can choose many keys with
    /// the same hash.
    #[cfg(feature = "redis")]
    #[inline]
    pub(crate) fn sum(&self) -> u64 {
        self.as_words().iter().fold(0, |sum, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
    }

    /// The text and some of the zeros after it, as input of a hash. A text has no zeros, so this is unambiguous.
    ///
    /// The length is one less than a multiple of 8, because SipHash adds one byte of its own. It is at least 15, so that most
    /// addresses have the same length, and hashing them needs no branch.
    #[inline]
    pub(crate) fn as_hashed(&self) -> &[u8] {
        &self.bytes[..(self.len() | 7).max(Self::LEAST_HASHED)]
    }

    /// Like [`as_hashed`](Self::as_hashed), as an array of the minimum length. `None` for a key that needs more; most keys do not.
    #[inline]
    pub(crate) fn as_least_hashed(&self) -> Option<&[u8; Self::LEAST_HASHED]> {
        self.bytes.first_chunk().filter(|_| self.len() <= Self::LEAST_HASHED)
    }

    const LEAST_HASHED: usize = 15;

    /// The maximum length of a key with a short form.
    pub(crate) const SHORT_LEN: usize = 23;

    /// The short form: the text and the zeros after it. `None` for a longer key.
    #[inline]
    pub(crate) fn as_short(&self) -> Option<&[u8; Self::SHORT_LEN]> {
        self.bytes.first_chunk().filter(|_| self.len() <= Self::SHORT_LEN)
    }

    /// The key with this [short form](Self::as_short). A text has no zeros, so the first zero is its end.
    pub(crate) fn of_short(short: &[u8; Self::SHORT_LEN]) -> Self {
        let mut key = Self::EMPTY;
        key.bytes[..Self::SHORT_LEN].copy_from_slice(short);
        key.set_len(short.iter().position(|byte| *byte == 0).unwrap_or(Self::SHORT_LEN));
        key
    }

    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len()]
    }

    /// The key under which a layer counts a request whose key came from a [fallback](first_of).
    ///
    /// It has a mark, so that the API key `203.0.113.7` and the peer with that address have different keys. Use this
    /// method to [block](crate::Limiter::block) or reset such a key.
    #[must_use]
    pub fn as_fallback(self) -> Self {
        self.marked(b"~")
    }

    /// Adds the mark `!` to a key from the fallback of an inner [`Or`], so that it differs from the fallback keys of the outer `Or`.
    fn mark_if_fallback(self) -> Self {
        let unmarked = self.as_bytes().iter().find(|byte| **byte != b'!');
        if unmarked == Some(&b'~') { self.marked(b"!") } else { self }
    }

    fn marked(self, mark: &[u8]) -> Self {
        let mut text = KeyBuilder::default();
        if text.push(mark) && text.push(self.as_bytes()) {
            return text.0;
        }
        Self::digest_of(Origin::Fallback, &[mark, self.as_bytes()])
    }

    #[inline]
    fn from_bytes(bytes: &[u8]) -> Self {
        two_plain_words(bytes).map_or_else(
            || Self::from_any_bytes(bytes),
            |[first, second]| Self::of_words([first, second, 0, 0, 0, (bytes.len() as u64) << 56]),
        )
    }

    fn from_any_bytes(bytes: &[u8]) -> Self {
        plain_words(bytes).map_or_else(|| Self::escaped(bytes), Self::of_words)
    }

    // Writes whole words, because words that were written in pieces are slow to read.
    #[inline]
    fn of_words(words: [u64; 6]) -> Self {
        let mut key = Self::EMPTY;
        for (bytes, word) in key.bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        key
    }

    fn escaped(bytes: &[u8]) -> Self {
        let mut text = KeyBuilder::default();
        let fits =
            bytes.len() <= Self::MAX_LEN && percent_encode(bytes, ESCAPED).all(|piece| text.push(piece.as_bytes()));
        if fits { text.0 } else { Self::digest_of(Origin::Bytes, &[bytes]) }
    }

    fn from_parts(parts: &[Key]) -> Self {
        let mut text = KeyBuilder::default();
        let fits = parts.iter().enumerate().all(|(i, part)| (i == 0 || text.push(b",")) && text.push(part.as_bytes()));
        if fits {
            return text.0;
        }
        // Only a part that is a tuple itself has commas, and it counts as its parts. So the joined text is unambiguous.
        let joined: Vec<&[u8]> = parts.iter().flat_map(|part| [part.as_bytes(), b","]).collect();
        Self::digest_of(Origin::Tuple, &joined)
    }

    fn digest_of(origin: Origin, pieces: &[&[u8]]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update([origin as u8]);
        for piece in pieces {
            hasher.update(piece);
        }
        let digest = hasher.finalize();
        let mut key = Self::EMPTY;
        key.bytes[0] = b'#';
        // 24 bytes are 32 base64 digits.
        for (three, four) in digest[..24].chunks_exact(3).zip(key.bytes[1..33].chunks_exact_mut(4)) {
            let bits = u32::from(three[0]) << 16 | u32::from(three[1]) << 8 | u32::from(three[2]);
            for (i, digit) in four.iter_mut().enumerate() {
                *digit = BASE64URL[(bits >> (18 - 6 * i)) as usize & 63];
            }
        }
        key.set_len(33);
        key
    }

    fn from_text(text: impl AsRef<str>) -> Self {
        Self::from_bytes(text.as_ref().as_bytes())
    }

    /// A number below `parts`, which is at least 1. It is the same for this key in every process, and evenly distributed over all keys.
    pub(crate) fn spread(&self, parts: u16) -> u16 {
        (u64::from_be_bytes(Sha256::digest(self.as_bytes())[8..16].try_into().unwrap_or_default()) % u64::from(parts))
            as u16
    }

    /// A number from 0 to 99. It is the same for this key in every process, and evenly distributed over all keys.
    pub(crate) fn percentile(&self) -> u8 {
        (u64::from_be_bytes(Sha256::digest(self.as_bytes())[..8].try_into().unwrap_or_default()) % 100) as u8
    }

    /// A sign and digits need no escape.
    #[inline]
    fn from_integer(value: impl itoa::Integer) -> Self {
        Self::from_bytes(itoa::Buffer::new().format(value).as_bytes())
    }

    /// Hex digits, colons and dots need no escape.
    fn from_v6(address: Ipv6Addr) -> Self {
        let mut text = KeyBuilder::default();
        match write!(text, "{address}") {
            Ok(()) => text.0,
            Err(fmt::Error) => Self::from_text(address.to_string()),
        }
    }

    /// Gives the same text as `Display`, but faster, because IPv4 addresses are the most frequent keys.
    #[inline]
    fn from_v4(address: Ipv4Addr) -> Self {
        let [first, second, third, fourth] = address.octets().map(|octet| {
            let (digits, len) = OCTETS[usize::from(octet)];
            (u64::from(digits), len)
        });
        // Two octets fit into a word.
        let join = |(low, low_len): (u64, u32), (high, high_len): (u64, u32)| {
            (low | high << (8 * low_len), low_len + high_len)
        };
        let ((low, low_len), (high, high_len)) = (join(first, second), join(third, fourth));
        // Remove the last dot.
        let high_len = high_len - 1;
        let high = high & !(0xff << (8 * high_len));
        let text = u128::from(low) | u128::from(high) << (8 * low_len);
        Self::of_words([text as u64, (text >> 64) as u64, 0, 0, 0, u64::from(low_len + high_len) << 56])
    }

    #[inline]
    fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::from_v4(v4),
            IpAddr::V6(v6) => Self::from_v6(v6),
        }
    }

    const fn reserved(text: &[u8]) -> Self {
        let mut key = Self::EMPTY;
        let mut i = 0;
        while i < text.len() {
            key.bytes[i] = text[i];
            i += 1;
        }
        key.set_len(text.len());
        key
    }
}

/// Whether a key may have this text between its commas: marks, each a `~` after any number of `!`, and then the text of a key.
fn is_part(part: &str) -> bool {
    let (marks, text) = part.split_at(part.rfind('~').map_or(0, |last| last + 1));
    let digest = text.strip_prefix('#').filter(|digits| digits.len() == 32);
    let is_reserved = text == Key::GLOBAL.as_str();
    let is_valid = match digest {
        Some(digits) => digits.bytes().all(|digit| BASE64URL.contains(&digit)),
        // Decoding and escaping a valid text yields the same text.
        None => is_reserved || Key::escaped(&Cow::from(percent_decode_str(text))).as_str() == text,
    };
    marks.bytes().all(|mark| mark == b'~' || mark == b'!') && is_valid
}

/// A text is not the text of a key: see [`Key::parse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseKeyError(());

impl fmt::Display for ParseKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not the text of a key: parse accepts only text that `as_str` or `Display` returns")
    }
}

impl Error for ParseKeyError {}

// By hand, in words: comparing bytes is slow for a key that was just written, because the processor cannot forward the stores.
impl PartialEq for Key {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.as_words().iter().zip(other.as_words()).fold(0, |different, (word, other)| different | (word ^ other)) == 0
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

const BASE64URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Builds a key, and refuses text that does not fit.
struct KeyBuilder(Key);

impl Default for KeyBuilder {
    fn default() -> Self {
        Self(Key::EMPTY)
    }
}

impl KeyBuilder {
    fn push(&mut self, bytes: &[u8]) -> bool {
        let (start, end) = (self.0.len(), self.0.len() + bytes.len());
        let Some(room) = self.0.bytes[..Key::MAX_LEN].get_mut(start..end) else { return false };
        room.copy_from_slice(bytes);
        self.0.set_len(end);
        true
    }
}

impl fmt::Write for KeyBuilder {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        if self.push(piece.as_bytes()) { Ok(()) } else { Err(fmt::Error) }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Key").field(&self.as_str()).finish()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn plain_words_match_escaping(
            name in prop::collection::vec(b'-'..=b'z', 0..60),
            index in 0..60_usize,
            other in any::<u8>(),
        ) {
            let plain = |bytes: &[u8]| plain_words(bytes).map(Key::of_words);
            let fits = name.len() <= Key::MAX_LEN;
            prop_assert_eq!(plain(&name), fits.then(|| Key::escaped(&name)));
            prop_assert_eq!(Key::from_bytes(&name), Key::escaped(&name));
            let mut changed = name;
            if let Some(byte) = changed.get_mut(index) {
                *byte = other;
                let expected = (fits && (b'-'..=b'z').contains(&other)).then(|| Key::escaped(&changed));
                prop_assert_eq!(plain(&changed), expected);
                prop_assert_eq!(Key::from_bytes(&changed), Key::escaped(&changed));
            }
        }
    }

    #[test]
    fn parse_refuses_text_of_no_key() {
        for text in [
            "a b", "{a}", "a%2", "a%2G", "%7b", "%61", "100%", "!", "~!", "!a", "!everyon", "!!global", "#", "#a",
            "a#", "é", "a\n", "a~", "a,!b", "~~!a",
        ] {
            assert_eq!(Key::parse(text), Err(ParseKeyError(())), "{text}");
        }
        let digest = Key::digest("secret");
        for text in [&digest.as_str()[..32], &format!("{}*", &digest.as_str()[..32]), &format!("{digest}a")] {
            assert_eq!(Key::parse(text), Err(ParseKeyError(())), "{text}");
        }
        assert!(Key::parse(&"a".repeat(Key::MAX_LEN)).is_ok() && Key::parse(&"a".repeat(Key::MAX_LEN + 1)).is_err());
        assert!(Key::parse(&"%41".repeat(1 << 20)).is_err());
    }

    #[test]
    fn input_cannot_spell_reserved_keys() {
        assert_ne!(Key::from(Key::GLOBAL.as_str()), Key::GLOBAL);
        let digest = Key::digest("secret");
        assert_ne!(Key::from(digest.as_str()), digest);
    }

    #[test]
    fn fallback_key_differs_from_same_input() {
        let header = |r: &(Option<&'static str>, &'static str)| r.0;
        let peer = |r: &(Option<&'static str>, &'static str)| r.1;
        let key = first_of(header, peer);
        let honest = key.extract_key(&(None, "203.0.113.7")).unwrap();
        let spoofed = key.extract_key(&(Some("203.0.113.7"), "198.51.100.1")).unwrap();
        assert_ne!(honest, spoofed);
        assert_ne!(key.extract_key(&(Some("~203.0.113.7"), "198.51.100.1")).unwrap(), honest);
        assert_eq!(key.extract_key(&(Some(""), "203.0.113.7")), Some(honest), "an empty key is a missing key");
    }

    #[test]
    fn fallbacks_of_a_chain_have_distinct_keys() {
        type Request = [Option<&'static str>; 4];
        let part = |i: usize| move |request: &Request| request[i];
        let left = first_of(part(0), part(1)).or(part(2)).or(part(3));
        let right = first_of(part(0), first_of(part(1), first_of(part(2), part(3))));
        for text in ["x", "~x", "!~x", "123456789012345678901234567890123456789012345"] {
            let requests = (0..4).map(|i| {
                let mut request = Request::default();
                request[i] = Some(text);
                request
            });
            let (left, right): (Vec<_>, Vec<_>) =
                requests.map(|request| (left.extract_key(&request), right.extract_key(&request))).unzip();
            for mut keys in [left, right] {
                keys.sort_by_key(|key| key.map(|key| key.as_str().to_owned()));
                keys.dedup();
                assert_eq!(keys.len(), 4, "{keys:?}");
            }
        }
    }

    #[test]
    fn long_tuples_and_long_texts_differ() {
        let (a, b) = ("a".repeat(30), "b".repeat(30));
        assert_ne!(Key::from((&a, &b)), Key::from(format!("{a},{b}")));
        assert_ne!(Key::from((&a, &b)), Key::from((format!("{a}b"), "b".repeat(29))));
    }

    #[test]
    fn numbers_and_addresses_keep_their_text() {
        assert_eq!(Key::from(42_u64).as_str(), "42");
        assert_eq!(Key::from(IpAddr::from([203, 0, 113, 7])).as_str(), "203.0.113.7");
        assert_eq!(Key::from(Ipv6Addr::LOCALHOST).as_str(), "::1");
        for address in [[0, 0, 0, 0], [255, 255, 255, 255], [1, 10, 100, 9], [99, 101, 199, 200]].map(Ipv4Addr::from) {
            assert_eq!(Key::from(address).as_str(), address.to_string());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_short_printable_key(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let key = Key::new(&bytes);
            prop_assert!(key.as_str().len() <= Key::MAX_LEN);
            let is_safe = |b: u8| b.is_ascii_graphic() && !b"{},~!".contains(&b);
            prop_assert!(key.as_str().bytes().all(is_safe));
            prop_assert_eq!(key.is_empty(), bytes.is_empty());
        }

        #[test]
        fn different_bytes_give_different_keys(
            a in prop::collection::vec(any::<u8>(), 0..60),
            b in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            prop_assert_eq!(a == b, Key::new(&a) == Key::new(&b));
        }

        /// Also keys with marks, of tuples, and of chains of fallbacks.
        #[test]
        fn parse_round_trips_any_key(
            a in prop::collection::vec(any::<u8>(), 0..60),
            b in "[a~!#%, ]{0,20}",
            number in any::<i128>(),
        ) {
            let (a, b) = (Key::new(&a), Key::from(b));
            let pair = Key::from((a, b));
            let chain = b.as_fallback().mark_if_fallback().as_fallback().mark_if_fallback();
            let nested = Key::from((Key::GLOBAL.as_fallback(), number, Key::from((chain, "")), Key::digest("x").mark_if_fallback()));
            for key in [a, b, pair, pair.as_fallback(), chain, nested, nested.as_fallback().mark_if_fallback(), number.into()] {
                prop_assert_eq!(Key::parse(key.as_str()), Ok(key));
            }
        }

        #[test]
        fn parsed_key_has_same_text(text in "[a~!#%27B,]{0,12}") {
            if let Ok(key) = Key::parse(&text) {
                prop_assert_eq!(key.as_str(), text);
            }
        }

        #[test]
        fn different_tuples_give_different_keys(a in ".{0,40}", b in ".{0,40}", c in ".{0,40}", d in ".{0,40}") {
            let same = a == c && b == d;
            prop_assert_eq!(same, Key::from((&a, &b)) == Key::from((&c, &d)));
        }
    }
}
