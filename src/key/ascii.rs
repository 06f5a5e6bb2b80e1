//! Keys word by word, without looking at each byte, where the bytes are the text.

use super::Key;

/// Whether all bytes of some words fit as they are, as those of nearly all names do: `-` to `z`, which are digits, letters and most of what is between
/// names.
#[inline]
fn are_plain<const WORDS: usize>(ascii_words: [u64; WORDS]) -> bool {
    // What is less than `-` does not get to 128 by this, and what is more than `z` does.
    let odd = ascii_words.map(|word| {
        let (least, most) = (word.wrapping_add(EACH * (128 - 0x2d)), word.wrapping_add(EACH * (127 - 0x7a)));
        word | most | !least
    });
    odd.iter().fold(0, |all, word| all | word) & (EACH << 7) == 0
}

const EACH: u64 = u64::from_le_bytes([1; 8]);

/// The words of which a key of these bytes begins, where they are of a length that is very frequent, and fit as they are.
#[inline]
pub(super) fn two_plain_words(bytes: &[u8]) -> Option<[u64; 2]> {
    let (first, last) = (u64::from_le_bytes(*bytes.first_chunk()?), u64::from_le_bytes(*bytes.last_chunk()?));
    // What of the last word is not in the first one.
    let second = last >> 8 >> (8 * (7 - bytes.len() % 8));
    (bytes.len() < 16 && are_plain([first, last])).then_some([first, second])
}

/// The words that a key of these bytes consists of, where they fit as they are.
pub(super) fn plain_words(bytes: &[u8]) -> Option<[u64; 6]> {
    let (whole, len) = (bytes.as_chunks().0, bytes.len());
    if len > Key::MAX_LEN {
        return None;
    }
    let mut ascii_words = [0; 6];
    let mut are_all_plain = true;
    if let Some(last) = bytes.last_chunk() {
        let last = u64::from_le_bytes(*last);
        are_all_plain = are_plain([last]);
        for (at, word) in ascii_words.iter_mut().enumerate() {
            if let Some(bytes) = whole.get(at) {
                *word = u64::from_le_bytes(*bytes);
                are_all_plain &= are_plain([*word]);
            } else if at == whole.len() {
                *word = last >> 8 >> (8 * (7 - len % 8));
            }
        }
    } else {
        ascii_words[0] = few(bytes);
        are_all_plain &= are_plain([ascii_words[0] | (EACH * u64::from(b'a')) << (8 * len)]);
    }
    ascii_words[5] |= (len as u64) << 56;
    are_all_plain.then_some(ascii_words)
}

/// A word of less than eight bytes.
#[inline]
fn few(bytes: &[u8]) -> u64 {
    let byte = |at: usize| u64::from(bytes[at]) << (8 * at);
    match (bytes.first_chunk(), bytes.last_chunk()) {
        (Some(first), Some(last)) => {
            u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << (8 * (bytes.len() - 4))
        }
        _ if bytes.is_empty() => 0,
        _ => byte(0) | byte(bytes.len() / 2) | byte(bytes.len() - 1),
    }
}

/// The numbers that an IPv4 address is made of, as text with a dot behind it whose first byte is the lowest, and how long that is.
pub(super) static OCTETS: [(u32, u32); 256] = {
    let mut octets = [(0, 0); 256];
    let mut octet = 0;
    while octet < octets.len() {
        let (mut digits, mut len, mut divisor) = (0, 0, 100);
        while divisor > 0 {
            if octet >= divisor || divisor == 1 {
                digits |= (b'0' as u32 + (octet / divisor % 10) as u32) << (8 * len);
                len += 1;
            }
            divisor /= 10;
        }
        octets[octet] = (digits | (b'.' as u32) << (8 * len), len + 1);
        octet += 1;
    }
    octets
};
