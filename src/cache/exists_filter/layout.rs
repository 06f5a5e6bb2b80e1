//! Where the bits of a key are.

use std::array;

use siphasher::sip128::{Hash128, SipHasher24};

use crate::key::Key;

/// One block of a filter.
pub type Block = [u8; Layout::BLOCK_LEN];

/// The size and hash seed of one version of a filter. Each rebuild creates a new version.
///
/// A key has one bit in each of the eight 32-bit words of one block, so one read tests a key. This is a split-block Bloom filter: Putze,
/// Sanders and Singler, "Cache-, Hash- and Space-Efficient Bloom Filters" (2007), as Apache Impala and Parquet use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layout {
    /// The number of blocks, from 1 to [`Layout::MAX_BLOCKS`].
    pub blocks: u32,
    /// The seed of the hash. It is random, so that a client cannot compute keys that are false positives.
    pub seed: [u8; 16],
}

impl Layout {
    /// The length of a block in bytes.
    pub const BLOCK_LEN: usize = 32;
    /// The length in bytes of the header, which precedes the blocks and describes them.
    pub const HEADER_LEN: usize = 64;
    /// The largest number of blocks. With the header, that many blocks take 32 MiB. While Redis allocates or frees a string, it serves no
    /// other command. A larger string takes longer.
    pub const MAX_BLOCKS: u32 = (((1 << 25) - Self::HEADER_LEN) / Self::BLOCK_LEN) as u32;

    /// A layout.
    #[must_use]
    pub const fn new(blocks: u32, seed: [u8; 16]) -> Self {
        Self { blocks, seed }
    }

    /// The length in bytes of a version with this layout, header included.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        Self::HEADER_LEN as u64 + Self::BLOCK_LEN as u64 * self.blocks as u64
    }

    /// The bits of a key.
    #[must_use]
    pub fn locate(&self, key: &Key) -> KeyBits {
        let Hash128 { h1, h2 } = SipHasher24::new_with_key(&self.seed).hash(key.as_str().as_bytes());
        // Maps the hash to the range of blocks without a division.
        let block = ((u128::from(h1) * u128::from(self.blocks)) >> 64) as u32;
        KeyBits { block, words: array::from_fn(|word| 1 << (h2 >> (5 * word) & 31)) }
    }
}

/// The bits of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyBits {
    /// The index of its block, from 0.
    pub block: u32,
    /// Its bits in the words of the block: one in each.
    pub words: [u32; 8],
}

impl KeyBits {
    /// The bits as a block, with each word in little-endian order.
    #[must_use]
    pub fn to_block(&self) -> Block {
        let mut block = [0; Layout::BLOCK_LEN];
        for (bytes, word) in block.as_chunks_mut().0.iter_mut().zip(self.words) {
            *bytes = word.to_le_bytes();
        }
        block
    }

    /// Whether all of these bits are set in a block.
    #[must_use]
    pub fn are_set_in(&self, block: &Block) -> bool {
        self.to_block().iter().zip(block).all(|(wanted, found)| found & wanted == *wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash is part of the data format: with another hash, stored keys would seem absent.
    #[test]
    fn bits_of_a_key_never_change() {
        // Computed with another implementation of SipHash.
        let layout = Layout::new(1_000_000, *b"0123456789abcdef");
        let located = ["", "alice", "user:42"].map(|key| layout.locate(&Key::from(key)));
        let shown = located.map(|bits| (bits.block, bits.words.map(u32::trailing_zeros)));
        let expected = [
            (819742, [26, 5, 21, 4, 17, 3, 12, 4]),
            (93198, [3, 0, 18, 29, 15, 27, 9, 5]),
            (558506, [7, 1, 3, 27, 8, 11, 21, 22]),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn key_has_one_bit_in_each_word_of_a_block() {
        for blocks in [1, 2, 3, 1_000, Layout::MAX_BLOCKS] {
            let layout = Layout::new(blocks, [7; 16]);
            for key in 0..100_u32 {
                let bits = layout.locate(&Key::from(key));
                assert!(bits.block < blocks);
                assert!(bits.words.iter().all(|word| word.count_ones() == 1), "{bits:?}");
                assert!(
                    bits.are_set_in(&bits.to_block()) && bits.are_set_in(&[0xff; 32]) && !bits.are_set_in(&[0; 32])
                );
            }
        }
        assert_eq!(Layout::new(Layout::MAX_BLOCKS, [0; 16]).bytes(), 32 << 20);
    }
}
