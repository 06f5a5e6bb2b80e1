//! Who is asking.

mod ascii;
mod extract;
pub(crate) mod lack;

use std::borrow::Cow;
use std::error::Error;
use std::fmt::{self, Write as _};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use sha2::{Digest, Sha256};

use self::ascii::{OCTETS, plain_words, two_plain_words};
pub use self::extract::{ExtractKey, GlobalKey, IntoKey, Or, first_of};

/// Who is asking: the subject that a quota is counted for.
///
/// A key is short printable text of at most [`Key::MAX_LEN`] bytes, whatever it was made of, so that a client who chooses
/// it can neither grow a store nor reach another subject's data:
///
/// * bytes that mean something to a store (`{`, `}`, `%`, `,`, …), spaces, control characters and everything outside
///   ASCII are percent-encoded;
/// * what does not fit is replaced by `#` and a SHA-256 digest (192 bits of it, in base64url);
/// * two different inputs never give the same key, short of a collision of the digest. (Tuples are flat: a tuple within a
///   tuple counts as its parts.)
///
/// Nothing is rejected: any bytes of any length make a key. The empty key is a subject like any other here; a layer takes
/// it for a missing key (see [`OnMissingKey`](crate::rate_limit::OnMissingKey)).
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
// Where words lie: keys are written, compared and copied as such, and a word that was written in pieces cannot be read until
// all of them have got to memory.
#[derive(Clone, Copy)]
#[repr(align(8))]
pub struct Key {
    // The text, zeros, and in the last byte how long the text is. One array, because keys are compared and copied for every request.
    bytes: [u8; Key::MAX_LEN + 1],
}

/// What a store or this module gives a meaning to. `:` is harmless: the subject is the last part of a stored key.
const RESERVED: &AsciiSet = &CONTROLS.add(b' ').add(b'{').add(b'}').add(b'%').add(b',').add(b'#').add(b'~').add(b'!');

/// What went into a digest, so that a long text and a tuple that spells the same never share one.
#[derive(Clone, Copy)]
enum Origin {
    Bytes = 0,
    Tuple = 1,
    Fallback = 2,
}

impl Key {
    /// The longest a key can be, in bytes.
    pub const MAX_LEN: usize = 47;

    /// The key of everybody, where a quota is shared by all.
    pub const GLOBAL: Key = Key::reserved(b"!global");
    /// The key of requests that carry none.
    pub const ANONYMOUS: Key = Key::reserved(b"!anonymous");

    pub(crate) const EMPTY: Key = Key { bytes: [0; Key::MAX_LEN + 1] };

    /// Makes a key of any bytes.
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        Self::from_bytes(bytes.as_ref())
    }

    /// Makes a key that does not show what it was made of: always the digest, however short the input.
    ///
    /// For secrets such as API keys and session cookies, which should not lie in a store in clear text. Whoever can guess
    /// the input can still recognise its digest.
    pub fn digest(bytes: impl AsRef<[u8]>) -> Self {
        Self::digest_of(Origin::Bytes, &[bytes.as_ref()])
    }

    /// The key as it appears in a store. [`parse`](Self::parse) makes the same key of it again.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).expect("a key is ASCII by construction")
    }

    /// The key that [`as_str`](Self::as_str) answers this for, as a log or a page for operators has shown it.
    ///
    /// Not for what clients send: they could name the key of anybody, [`GLOBAL`](Self::GLOBAL) and fallbacks included. That is what
    /// [`new`](Self::new) and `from` are for, which make of a text whatever key it takes and escape what was escaped before.
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
    /// [`ParseKeyError`] if it does so for no key.
    pub fn parse(text: &str) -> Result<Self, ParseKeyError> {
        let is_key = text.len() <= Self::MAX_LEN && text.split(',').all(is_part);
        Self::stored(text).filter(|_| is_key).ok_or(ParseKeyError(()))
    }

    /// The same for what nobody else can have written: whether it was made as keys are is not looked at.
    pub(crate) fn stored(text: &str) -> Option<Self> {
        let mut key = Text::default();
        (text.bytes().all(|byte| byte.is_ascii_graphic()) && key.push(text.as_bytes())).then_some(key.0)
    }

    /// Whether the key was made of nothing.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    const fn len(&self) -> usize {
        self.bytes[Self::MAX_LEN] as usize
    }

    /// Of at most [`MAX_LEN`](Self::MAX_LEN) bytes.
    #[inline]
    const fn set_len(&mut self, len: usize) {
        self.bytes[Self::MAX_LEN] = len as u8;
    }

    #[inline]
    fn ascii_words(&self) -> [u64; 6] {
        let mut ascii_words = [0; 6];
        for (word, bytes) in ascii_words.iter_mut().zip(self.bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        ascii_words
    }

    /// A number that others hardly ever have: to put equal keys beside each other without comparing their texts each time. Not for tables, since
    /// whoever chooses keys can choose many that have the same one.
    #[cfg(feature = "redis")]
    #[inline]
    pub(crate) fn sum(&self) -> u64 {
        self.ascii_words().iter().fold(0, |sum, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
    }

    /// The text and some of the zeros behind it, to be hashed: there is no zero in a text. Whole words but for the last byte, which is where a hash
    /// puts the length, and two words at the least, so that the processor need not guess where addresses end.
    #[inline]
    pub(crate) fn as_hashed(&self) -> &[u8] {
        &self.bytes[..(self.len() | 7).max(Self::LEAST_HASHED)]
    }

    /// The same for keys of which no more is hashed than the least, which most are.
    #[inline]
    pub(crate) fn as_least_hashed(&self) -> Option<&[u8; Self::LEAST_HASHED]> {
        self.bytes.first_chunk().filter(|_| self.len() <= Self::LEAST_HASHED)
    }

    const LEAST_HASHED: usize = 15;

    /// How long a key is at the most that [`as_short`](Self::as_short) answers.
    pub(crate) const SHORT_LEN: usize = 23;

    /// The text and the zeros behind it, if it is short.
    #[inline]
    pub(crate) fn as_short(&self) -> Option<&[u8; Self::SHORT_LEN]> {
        self.bytes.first_chunk().filter(|_| self.len() <= Self::SHORT_LEN)
    }

    /// The key that [`as_short`](Self::as_short) answered this for: there is no zero in a text.
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

    /// The key that a request is counted by where this one was found by a [fallback](first_of): marked, so that `203.0.113.7` sent as an API
    /// key and the peer of that address stay two subjects.
    ///
    /// For those who [block](crate::Limiter::block) or reset a key that a layer counts.
    #[must_use]
    pub fn as_fallback(self) -> Self {
        self.marked(b"~")
    }

    /// Marks a key that was itself found by a fallback, so that it is not taken for one of the fallback that comes after it.
    fn of_first(self) -> Self {
        let unmarked = self.as_bytes().iter().find(|byte| **byte != b'!');
        if unmarked == Some(&b'~') { self.marked(b"!") } else { self }
    }

    fn marked(self, mark: &[u8]) -> Self {
        let mut text = Text::default();
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

    // Each word is put together in a register, and written once to where it stays: what was written in pieces is read late.
    #[inline]
    fn of_words(ascii_words: [u64; 6]) -> Self {
        let mut key = Self::EMPTY;
        for (bytes, word) in key.bytes.as_chunks_mut().0.iter_mut().zip(ascii_words) {
            *bytes = word.to_le_bytes();
        }
        key
    }

    fn escaped(bytes: &[u8]) -> Self {
        let mut text = Text::default();
        let fits =
            bytes.len() <= Self::MAX_LEN && percent_encode(bytes, RESERVED).all(|piece| text.push(piece.as_bytes()));
        if fits { text.0 } else { Self::digest_of(Origin::Bytes, &[bytes]) }
    }

    fn from_parts(parts: &[Key]) -> Self {
        let mut text = Text::default();
        let fits = parts.iter().enumerate().all(|(i, part)| (i == 0 || text.push(b",")) && text.push(part.as_bytes()));
        if fits {
            return text.0;
        }
        // A comma within a part is escaped, unless the part is a tuple itself, so the joined text says what the parts were.
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
        // 24 bytes are 32 digits of six bits.
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

    /// A number below `parts`, which is at least 1: always the same for this key, in every process, and spread evenly over all keys.
    pub(crate) fn spread(&self, parts: u16) -> u16 {
        (u64::from_be_bytes(Sha256::digest(self.as_bytes())[8..16].try_into().unwrap_or_default()) % u64::from(parts))
            as u16
    }

    /// A number from 0 to 99 that is always the same for this key, in every process, and spread evenly over all keys.
    pub(crate) fn percentile(&self) -> u8 {
        (u64::from_be_bytes(Sha256::digest(self.as_bytes())[..8].try_into().unwrap_or_default()) % 100) as u8
    }

    /// A sign and digits, so nothing is escaped.
    #[inline]
    fn from_integer(value: impl itoa::Integer) -> Self {
        Self::from_bytes(itoa::Buffer::new().format(value).as_bytes())
    }

    /// Digits and colons, so nothing has to be escaped.
    fn from_v6(address: Ipv6Addr) -> Self {
        let mut text = Text::default();
        match write!(text, "{address}") {
            Ok(()) => text.0,
            Err(fmt::Error) => Self::from_text(address.to_string()),
        }
    }

    /// As it prints, but without the machinery of formatting, since this is what most keys of most programs are.
    #[inline]
    fn from_v4(address: Ipv4Addr) -> Self {
        let [first, second, third, fourth] = address.octets().map(|octet| {
            let (digits, len) = OCTETS[usize::from(octet)];
            (u64::from(digits), len)
        });
        // Two of them are a word at the most.
        let join = |(low, len): (u64, u32), (high, more): (u64, u32)| (low | high << (8 * len), len + more);
        let ((low, len), (high, more)) = (join(first, second), join(third, fourth));
        // But for the last dot.
        let more = more - 1;
        let high = high & !(0xff << (8 * more));
        let text = u128::from(low) | u128::from(high) << (8 * len);
        Self::of_words([text as u64, (text >> 64) as u64, 0, 0, 0, u64::from(len + more) << 56])
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

/// Whether a key has this between its commas: marks, each a `~` with any number of `!` in front, and behind them what a key is made of.
fn is_part(part: &str) -> bool {
    let (marks, text) = part.split_at(part.rfind('~').map_or(0, |last| last + 1));
    let digest = text.strip_prefix('#').filter(|digits| digits.len() == 32);
    let is_reserved = [Key::GLOBAL, Key::ANONYMOUS].iter().any(|key| key.as_str() == text);
    let is_made = match digest {
        Some(digits) => digits.bytes().all(|digit| BASE64URL.contains(&digit)),
        // What was escaped is what comes of escaping it again.
        None => is_reserved || Key::escaped(&Cow::from(percent_decode_str(text))).as_str() == text,
    };
    marks.bytes().all(|mark| mark == b'~' || mark == b'!') && is_made
}

/// A text is that of no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseKeyError(());

impl fmt::Display for ParseKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the text is not one that a key is shown as")
    }
}

impl Error for ParseKeyError {}

// By hand, and not as bytes: a comparison of memory has to wait until a key that was just made has got there.
impl PartialEq for Key {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.ascii_words()
            .iter()
            .zip(other.ascii_words())
            .fold(0, |different, (word, other)| different | (word ^ other))
            == 0
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

const BASE64URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// A key being written; refuses what does not fit.
struct Text(Key);

impl Default for Text {
    fn default() -> Self {
        Self(Key::EMPTY)
    }
}

impl Text {
    fn push(&mut self, bytes: &[u8]) -> bool {
        let (start, end) = (self.0.len(), self.0.len() + bytes.len());
        let Some(room) = self.0.bytes[..Key::MAX_LEN].get_mut(start..end) else { return false };
        room.copy_from_slice(bytes);
        self.0.set_len(end);
        true
    }
}

impl fmt::Write for Text {
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
        /// However long it is, and with whatever in whatever place.
        #[test]
        fn what_needs_no_escape_is_the_same_as_if_it_had_been_looked_at_for_one(
            name in prop::collection::vec(b'-'..=b'z', 0..60),
            place in 0..60_usize,
            other in any::<u8>(),
        ) {
            let plain = |bytes: &[u8]| plain_words(bytes).map(Key::of_words);
            let fits = name.len() <= Key::MAX_LEN;
            prop_assert_eq!(plain(&name), fits.then(|| Key::escaped(&name)));
            prop_assert_eq!(Key::from_bytes(&name), Key::escaped(&name));
            let mut changed = name;
            if let Some(byte) = changed.get_mut(place) {
                *byte = other;
                let expected = (fits && (b'-'..=b'z').contains(&other)).then(|| Key::escaped(&changed));
                prop_assert_eq!(plain(&changed), expected);
                prop_assert_eq!(Key::from_bytes(&changed), Key::escaped(&changed));
            }
        }
    }

    #[test]
    fn what_no_key_is_shown_as_is_refused() {
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
    fn reserved_keys_cannot_be_spelled() {
        assert_ne!(Key::from(Key::GLOBAL.as_str()), Key::GLOBAL);
        assert_ne!(Key::from(Key::ANONYMOUS.as_str()), Key::ANONYMOUS);
        let digest = Key::digest("secret");
        assert_ne!(Key::from(digest.as_str()), digest);
    }

    #[test]
    fn a_fallback_is_another_subject_than_its_namesake() {
        let header = |r: &(Option<&'static str>, &'static str)| r.0;
        let peer = |r: &(Option<&'static str>, &'static str)| r.1;
        let key = first_of(header, peer);
        let honest = key.extract_key(&(None, "203.0.113.7")).unwrap();
        let spoofed = key.extract_key(&(Some("203.0.113.7"), "198.51.100.1")).unwrap();
        assert_ne!(honest, spoofed);
        assert_ne!(key.extract_key(&(Some("~203.0.113.7"), "198.51.100.1")).unwrap(), honest);
        assert_eq!(key.extract_key(&(Some(""), "203.0.113.7")), Some(honest), "an empty key is no key");
    }

    #[test]
    fn no_place_in_a_chain_of_fallbacks_can_be_spelled_at_another() {
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
    fn numbers_and_addresses_read_as_they_print() {
        assert_eq!(Key::from(42_u64).as_str(), "42");
        assert_eq!(Key::from(IpAddr::from([203, 0, 113, 7])).as_str(), "203.0.113.7");
        assert_eq!(Key::from(Ipv6Addr::LOCALHOST).as_str(), "::1");
        for address in [[0, 0, 0, 0], [255, 255, 255, 255], [1, 10, 100, 9], [99, 101, 199, 200]].map(Ipv4Addr::from) {
            assert_eq!(Key::from(address).as_str(), address.to_string());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_make_a_short_printable_key(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let key = Key::new(&bytes);
            prop_assert!(key.as_str().len() <= Key::MAX_LEN);
            let harmless = |b: u8| b.is_ascii_graphic() && !b"{},~!".contains(&b);
            prop_assert!(key.as_str().bytes().all(harmless));
            prop_assert_eq!(key.is_empty(), bytes.is_empty());
        }

        #[test]
        fn different_bytes_make_different_keys(
            a in prop::collection::vec(any::<u8>(), 0..60),
            b in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            prop_assert_eq!(a == b, Key::new(&a) == Key::new(&b));
        }

        /// Marked, as a part of a tuple, or of a chain of fallbacks.
        #[test]
        fn a_key_is_made_again_of_what_it_is_shown_as(
            a in prop::collection::vec(any::<u8>(), 0..60),
            b in "[a~!#%, ]{0,20}",
            number in any::<i128>(),
        ) {
            let (a, b) = (Key::new(&a), Key::from(b));
            let pair = Key::from((a, b));
            let chain = b.as_fallback().of_first().as_fallback().of_first();
            let nested = Key::from((Key::GLOBAL.as_fallback(), number, Key::from((chain, "")), Key::digest("x").of_first()));
            for key in [a, b, pair, pair.as_fallback(), chain, nested, nested.as_fallback().of_first(), number.into()] {
                prop_assert_eq!(Key::parse(key.as_str()), Ok(key));
            }
        }

        /// What is taken is not taken for anything else.
        #[test]
        fn a_text_that_is_taken_is_that_of_its_key(text in "[a~!#%27B,]{0,12}") {
            if let Ok(key) = Key::parse(&text) {
                prop_assert_eq!(key.as_str(), text);
            }
        }

        #[test]
        fn tuples_do_not_run_into_each_other(a in ".{0,40}", b in ".{0,40}", c in ".{0,40}", d in ".{0,40}") {
            let same = a == c && b == d;
            prop_assert_eq!(same, Key::from((&a, &b)) == Key::from((&c, &d)));
        }
    }
}
