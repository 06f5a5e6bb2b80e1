//! Builds keys from plain ASCII in 8-byte words, without a check of each byte.

/// Whether all bytes of the words are plain: from `-` to `z`, which need no escape. Nearly all names have only such bytes.
#[inline]
fn are_plain<const WORDS: usize>(words: [u64; WORDS]) -> bool {
    // The first sum sets bit 7 of each byte from `-` on, and the second of each byte above `z`.
    let not_plain = words.map(|word| {
        let (from_min, above_max) = (word.wrapping_add(EACH * (128 - 0x2d)), word.wrapping_add(EACH * (127 - 0x7a)));
        word | above_max | !from_min
    });
    not_plain.iter().fold(0, |all, word| all | word) & (EACH << 7) == 0
}

const EACH: u64 = u64::from_le_bytes([1; 8]);

/// The first two words of the key of these bytes, if they are plain and have 8 to 15 bytes, the most frequent length.
#[inline]
pub(super) fn two_plain_words(bytes: &[u8]) -> Option<[u64; 2]> {
    let (first, last) = (u64::from_le_bytes(*bytes.first_chunk()?), u64::from_le_bytes(*bytes.last_chunk()?));
    // The part of the last word that is not in the first one.
    let second = last >> 8 >> (8 * (7 - bytes.len() % 8));
    (bytes.len() < 16 && are_plain([first, last])).then_some([first, second])
}

/// The words of the key of these bytes, if they are plain and fit.
pub(super) fn plain_words(bytes: &[u8]) -> Option<[u64; 6]> {
    let (chunks, len) = (bytes.as_chunks().0, bytes.len());
    let mut words = [0; 6];
    // The last byte of the words is the length.
    if len >= size_of_val(&words) {
        return None;
    }
    let mut are_all_plain = true;
    if let Some(last) = bytes.last_chunk() {
        let last = u64::from_le_bytes(*last);
        are_all_plain = are_plain([last]);
        for (at, word) in words.iter_mut().enumerate() {
            if let Some(bytes) = chunks.get(at) {
                *word = u64::from_le_bytes(*bytes);
                are_all_plain &= are_plain([*word]);
            } else if at == chunks.len() {
                *word = last >> 8 >> (8 * (7 - len % 8));
            }
        }
    } else {
        words[0] = short_word(bytes);
        are_all_plain &= are_plain([words[0] | (EACH * u64::from(b'a')) << (8 * len)]);
    }
    words[5] |= (len as u64) << 56;
    are_all_plain.then_some(words)
}

/// The word of fewer than eight bytes.
#[inline]
fn short_word(bytes: &[u8]) -> u64 {
    let byte = |at: usize| u64::from(bytes[at]) << (8 * at);
    match (bytes.first_chunk(), bytes.last_chunk()) {
        (Some(first), Some(last)) => {
            u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << (8 * (bytes.len() - 4))
        }
        _ if bytes.is_empty() => 0,
        _ => byte(0) | byte(bytes.len() / 2) | byte(bytes.len() - 1),
    }
}

/// The octets of IPv4 addresses as text with a final dot, in little-endian order, and the length of the text.
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
